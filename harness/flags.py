"""Errors, exit codes, and flags: every field of a dataclass is one."""

import argparse
import dataclasses
import difflib
import math
import os
import re
import shlex
import signal
import sys
import time
from dataclasses import field

import torch
import torch.distributed as dist


class ConfigError(Exception):
    """What the user asked for cannot be done: one line that names the flag or file. Exit code 2."""


class TrainingError(Exception):
    """The run cannot go on: a message that says why. Exit code 1."""


class Stopped(BaseException):
    """A signal asked the run to end. No Exception, so that no library swallows it."""


def first_line(error: BaseException) -> str:
    return (str(error).strip() or repr(error)).splitlines()[0]


def exit_code(program: str, call, less_memory: str) -> int:
    """Calls it. What ends it is one line and an exit code: 2 for what the user asked for, 1 for the rest."""

    def fail(code, message, wait=0):
        """What every rank finds by itself, local rank 0 says, and the others only if it did not."""
        if int(os.environ.get("LOCAL_RANK", 0)) > 0:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)  # with which torchrun ends those who wait here
            time.sleep(wait)
        print(f"{program}: {message}".encode(errors="backslashreplace").decode(), file=sys.stderr, flush=True)
        return code

    try:
        call()
        return 0
    except ConfigError as error:
        return fail(2, f"error: {error}", wait=10)
    except TrainingError as error:
        return fail(1, f"stopped: {error}", wait=10)
    except KeyboardInterrupt:  # before the run has its own handler
        return fail(130, "interrupted before the first step; nothing was written")
    except torch.OutOfMemoryError as error:
        return fail(1, f"stopped: {first_line(error)} To need less: {less_memory}")
    except RuntimeError as error:
        if dist.is_initialized() and re.search("onnection (closed|reset)|gloo|NCCL", str(error)):
            return fail(1, "stopped: another rank is gone; why, says the report of the machine that it ran on")
        raise


def flag(default, help, choices=None, low=None, high=2**31 - 1, group=None, bare=None):
    """A field that is a flag. group: the heading that begins with it; bare: its value when it stands alone."""
    return field(default=default, metadata=dict(help=help, choices=choices, low=low, high=high, group=group, bare=bare))


def parse_flags(config, argv, program: str, description: str) -> dict:
    """The flags that were given, {name: value}; defaults are not among them."""

    def boolean(text):
        return {"true": True, "1": True, "false": False, "0": False}.get(text.lower(), text)

    parser = argparse.ArgumentParser(
        prog=program, description=description, argument_default=argparse.SUPPRESS, allow_abbrev=False,
        exit_on_error=False, formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    here, group = os.path.dirname(os.path.abspath(__file__)), parser
    for f in dataclasses.fields(config):
        about, choices = f.metadata["help"].replace("%", "%%"), f.metadata["choices"]
        group = parser.add_argument_group(f.metadata["group"]) if f.metadata["group"] else group
        options = dict(help=f"{about} [{str(f.default).removeprefix(here + os.sep)}]")
        options |= dict(metavar="|".join(choices) if choices else "X", type=f.type)
        if f.type is bool:
            options |= dict(type=boolean, nargs="?", const=True)
        elif f.metadata["bare"]:
            options |= dict(nargs="?", const=f.metadata["bare"])
        elif f.type == float | None:
            options |= dict(type=lambda text: None if text.lower() == "none" else float(text))
        group.add_argument(f"--{f.name}", **options)
    try:
        values, unknown = parser.parse_known_args(argv)
    except argparse.ArgumentError as error:
        raise ConfigError(str(error).removeprefix("argument ")) from None
    if unknown:
        names = [f"--{f.name}" for f in dataclasses.fields(config)]
        near = difflib.get_close_matches(unknown[0].split("=")[0], names, n=1)
        raise ConfigError(f"unknown flag {unknown[0]}" + (f"; did you mean {near[0]}?" if near else "; see --help"))
    return vars(values)


def check_flags(cfg) -> None:
    """Types, choices and bounds, as the fields have them. Impossible values stop here."""
    for f in dataclasses.fields(cfg):
        value, choices, low, high = (getattr(cfg, f.name), *(f.metadata[key] for key in ("choices", "low", "high")))
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        fits = number if f.type in (int, float) else isinstance(value, f.type)
        need(f.type is not bool or fits, cfg, f.name, "must be true or false")
        kind = getattr(f.type, "__name__", f.type)
        need(fits and (f.type is not int or value == int(value)), cfg, f.name, f"must be of type {kind}")
        need(not number or math.isfinite(value), cfg, f.name, "must be a finite number")
        need(not choices or value in choices, cfg, f.name, f"must be one of {', '.join(choices or ())}")
        need(low is None or value >= low, cfg, f.name, f"must be at least {low}")
        need(f.type is not int or value <= high, cfg, f.name, f"must be at most {high}")


def need(fine, cfg, name: str, why: str) -> None:
    if not fine:
        raise ConfigError(f"--{name} {getattr(cfg, name)}: {why}")


def differing_flags(cfg, defaults) -> str:
    """What differs from the defaults, as it would be typed."""
    values = {f.name: getattr(cfg, f.name) for f in dataclasses.fields(cfg)}
    return " ".join(f"--{k} {shlex.quote(str(v))}" for k, v in values.items() if v != getattr(defaults, k))


def say(text: str) -> None:
    """One line of the log, from rank 0; above the progress bar where there is one."""
    if int(os.environ.get("RANK", 0)) == 0:  # known before the ranks have met
        from tqdm import tqdm

        encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
        tqdm.write(text.encode(encoding, "backslashreplace").decode(encoding), file=sys.stdout)
        sys.stdout.flush()
