"""Errors, exit codes, and flags: every field of a dataclass is one."""

import argparse
import dataclasses
import difflib
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


def say(text: str) -> None:
    """One line of the log, from rank 0. Never raises: what only talks must not end a run."""
    if int(os.environ.get("RANK", 0)) == 0:  # torchrun names it before the ranks have met
        try:
            encoding = sys.stdout.encoding or "utf-8"
            print(text.encode(encoding, "backslashreplace").decode(encoding), flush=True)
        except (
            Exception
        ):  # a full disk, a closed pipe: else what stays in the buffer would be Python's last error
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


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
        of_ranks = "RANK" in os.environ and re.search("gloo|NCCL|onnection (closed|reset)", cause)
        if not of_ranks and not isinstance(error, dist.DistError):
            raise
        code, message = (
            1,
            f"stopped: {cause} (if another rank is gone, the report of its machine says why)",
        )
    if (
        int(os.environ.get("LOCAL_RANK", 0)) > 0
    ):  # what every rank finds, local rank 0 says; the others if it did not
        signal.signal(
            signal.SIGTERM, signal.SIG_DFL
        )  # with which torchrun ends those who wait here
        time.sleep(10)
    print(f"{program}: {message}", file=sys.stderr, flush=True)
    return code


def flag(default, help, choices=(), low=1 - 2**31, high=2**31 - 1, group=None, bare=None):
    """A field that is a flag. group: the heading that begins with it; bare: its value when it stands alone."""
    about = dict(help=help, choices=choices, low=low, high=high, group=group, bare=bare)
    return dataclasses.field(default=default, metadata=about)


def parse_flags(config, argv, program: str, description: str) -> dict:
    """The flags that were given, {name: value}; defaults are not among them."""
    types = {bool: lambda text: {"true": True, "false": False}.get(text.lower(), text)}
    types[str] = lambda text: ",".join(
        map(os.path.expanduser, text.split(","))
    )  # ~, of a list of files, too
    types[float | None] = lambda text: None if text.lower() == "none" else float(text)
    parser = argparse.ArgumentParser(
        prog=program, description=description, argument_default=argparse.SUPPRESS, allow_abbrev=False,
        exit_on_error=False, formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    group = parser
    for f in dataclasses.fields(config):
        about, choices = f.metadata["help"].replace("%", "%%"), f.metadata["choices"]
        group = parser.add_argument_group(f.metadata["group"]) if f.metadata["group"] else group
        alone = (
            dict(nargs="?", const=f.metadata["bare"] or True)
            if f.type is bool or f.metadata["bare"]
            else {}
        )
        shown = dict(help=f"{about} [{f.default}]", metavar="|".join(choices) if choices else "X")
        group.add_argument(f"--{f.name}", type=types.get(f.type, f.type), **alone, **shown)
    try:
        values, unknown = parser.parse_known_args(argv)
    except argparse.ArgumentError as error:
        raise ConfigError(str(error).removeprefix("argument ")) from None
    if unknown:
        [near] = difflib.get_close_matches(
            unknown[0], [f"--{f.name}" for f in dataclasses.fields(config)], 1, 0
        )
        raise ConfigError(f"unknown flag {unknown[0]}; did you mean {near}? --help shows them all")
    return vars(values)


def check_flags(cfg) -> None:
    """Types, choices and limits, as the fields have them. Impossible values stop here."""
    kinds = {bool: "true or false", int: "a whole number", str: "text"}
    for f in dataclasses.fields(cfg):
        value, choices, low, high = (
            getattr(cfg, f.name),
            *(f.metadata[key] for key in ("choices", "low", "high")),
        )
        types = f.type if f.type in (bool, str) else f.type | int
        fits = isinstance(value, types) and isinstance(value, bool) == (f.type is bool)
        need(fits, cfg, f.name, f"must be {kinds.get(f.type, 'a number')}")
        need(not choices or value in choices, cfg, f.name, f"must be one of {', '.join(choices)}")
        need(
            not isinstance(value, (int, float)) or low <= value <= high,
            cfg,
            f.name,
            f"must be from {low} to {high}",
        )


def need(fine, cfg, name: str, why: str) -> None:
    if not fine:
        raise ConfigError(f"--{name} {getattr(cfg, name)}: {why}")


def differing_flags(cfg, defaults) -> str:
    """What differs from the defaults, as it would be typed."""
    values = dataclasses.asdict(cfg).items()
    return " ".join(f"--{k} {shlex.quote(str(v))}" for k, v in values if v != getattr(defaults, k))
