"""Errors, exit codes, and flags: every field of a dataclass is one."""

import argparse
import contextlib
import dataclasses
import difflib
import math
import operator
import os
import re
import shlex
import signal
import sys
import time

import torch
import torch.distributed as dist


class ConfigError(Exception):
    """What the user asked for cannot be done: one line that names the flag or file. Exit code 2."""


class TrainingError(Exception):
    """The run cannot go on: a message that says why. Exit code 1."""


def first_line(error: BaseException) -> str:
    return (str(error).strip() or repr(error)).splitlines()[0]


def write_line(stream, text: str) -> None:
    """Never raises: what only talks must not end a run."""
    try:
        encoding = getattr(stream, "encoding", None) or "utf-8"
        print(text.encode(encoding, "backslashreplace").decode(encoding), file=stream, flush=True)
    except Exception as error:  # a full disk, a closed pipe; what stays in the buffer would be Python's last error
        with contextlib.suppress(Exception):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
            sys.stderr.write(f"the log ends here, it cannot be written: {error}\n")


def say(text: str) -> None:
    """One line of the log, from rank 0, which torchrun's environment names before the ranks have met."""
    if int(os.environ.get("RANK", 0)) == 0:
        write_line(sys.stdout, text)


GONE = "onnection (was likely )?(closed|reset|refused)|roken pipe|[Tt]ime(d )?out|remote process exit|was aborted"


def exit_code(program: str, call, less_memory: str) -> int:
    """Calls it. What ends it is one line and an exit code: 2 for what the user asked for, 1 for the rest."""
    try:
        call()
        return 0
    except ConfigError as error:
        code, message = 2, f"error: {error}"
    except TrainingError as error:
        code, message = 1, f"stopped: {error}"
    except KeyboardInterrupt:  # before the run has its own handler
        code, message = 130, "interrupted before the first step; nothing was written"
    except torch.OutOfMemoryError as error:
        code, message = 1, f"stopped: {first_line(error)} To need less: {less_memory}"
    except RuntimeError as error:
        cause = "; ".join(str(error).strip().splitlines()[:4])  # NCCL names it in its fourth line
        of_ranks = dist.is_initialized() and re.search("gloo|NCCL|onnection (closed|reset)", cause)
        if not of_ranks and not isinstance(error, dist.DistError):
            raise
        gone = "another rank is gone; why, says the report of the machine that it ran on"
        code, message = 1, f"stopped: {gone if re.search(GONE, cause) else cause}"
    if int(os.environ.get("LOCAL_RANK", 0)) > 0:  # what every rank finds, local rank 0 says; the others if it did not
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # with which torchrun ends those who wait here
        time.sleep(10)
    write_line(sys.stderr, f"{program}: {message}")
    return code


LIMITS = dict(low=(operator.ge, "at least"), above=(operator.gt, "above"), high=(operator.le, "at most"))


def flag(default, help, choices=(), group=None, bare=None, **limits):
    """A field that is a flag. group: the heading that begins with it; bare: its value when it stands alone."""
    limits = dict(high=2**31 - 1) | limits if type(default) is int else limits
    return dataclasses.field(
        default=default, metadata=dict(help=help, choices=choices, group=group, bare=bare, limits=limits)
    )


def at_home(text: str) -> str:
    """~ at the beginning of a path is the home directory, and in a list of files, too."""
    return ",".join(os.path.expanduser(part) for part in text.split(","))


def parse_flags(config, argv, program: str, description: str) -> dict:
    """The flags that were given, {name: value}; defaults are not among them."""
    words = {"true": True, "1": True, "false": False, "0": False}
    types = {str: at_home, bool: lambda text: words.get(text.lower(), text)}
    types[float | None] = lambda text: None if text.lower() == "none" else float(text)
    parser = argparse.ArgumentParser(
        prog=program, description=description, argument_default=argparse.SUPPRESS, allow_abbrev=False,
        exit_on_error=False, formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    group = parser
    for f in dataclasses.fields(config):
        about, choices = f.metadata["help"].replace("%", "%%"), f.metadata["choices"]
        group = parser.add_argument_group(f.metadata["group"]) if f.metadata["group"] else group
        bare = f.type is bool or f.metadata["bare"]
        alone = dict(nargs="?", const=bare) if bare else {}
        shown = dict(help=f"{about} [{f.default}]", metavar="|".join(choices) if choices else "X")
        group.add_argument(f"--{f.name}", type=types.get(f.type, f.type), **alone, **shown)
    try:
        values, unknown = parser.parse_known_args(argv)
    except argparse.ArgumentError as error:
        raise ConfigError(str(error).removeprefix("argument ")) from None
    if unknown:
        names = [f"--{f.name}" for f in dataclasses.fields(config)]
        near = difflib.get_close_matches(unknown[0].split("=")[0], names, n=1)
        raise ConfigError(f"unknown flag {unknown[0]}; {f'did you mean {near[0]}?' if near else 'see --help'}")
    return vars(values)


def check_flags(cfg):
    """Types, choices and limits, as the fields have them. Impossible values stop here. Returns cfg, paths at_home."""
    kinds = {bool: "true or false", int: "a whole number", str: "text"}
    for f in dataclasses.fields(cfg):
        value, choices = getattr(cfg, f.name), f.metadata["choices"]
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        absent = value is None and f.type == float | None
        fits = isinstance(value, f.type) if f.type in (bool, str) else number or absent
        need(fits and (f.type is not int or value % 1 == 0), cfg, f.name, f"must be {kinds.get(f.type, 'a number')}")
        need(not number or math.isfinite(value), cfg, f.name, "must be a finite number")
        need(not choices or value in choices, cfg, f.name, f"must be one of {', '.join(choices)}")
        for kind, limit in f.metadata["limits"].items():
            fine, words = LIMITS[kind]
            need(fine(value, limit), cfg, f.name, f"must be {words} {limit}")
    texts = {f.name: at_home(getattr(cfg, f.name)) for f in dataclasses.fields(cfg) if f.type is str}
    return dataclasses.replace(cfg, **texts)


def need(fine, cfg, name: str, why: str) -> None:
    if not fine:
        raise ConfigError(f"--{name} {getattr(cfg, name)}: {why}")


def differing_flags(cfg, defaults) -> str:
    """What differs from the defaults, as it would be typed."""
    values = {f.name: getattr(cfg, f.name) for f in dataclasses.fields(cfg)}
    return " ".join(f"--{k} {shlex.quote(str(v))}" for k, v in values.items() if v != getattr(defaults, k))
