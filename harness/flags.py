"""Errors, exit codes, and flags from a dataclass's fields. No torch, so --help is quick."""

import argparse
import contextlib
import dataclasses
import difflib
import os
import re
import shlex
import signal
import sys
import time


class ConfigError(Exception):
    """The user's mistake: one line that names the flag or the file. Exit code 2."""


class TrainingError(Exception):
    """The run cannot go on: a message that says why. Exit code 1."""


def first_line(error: BaseException) -> str:
    text = str(error).strip() or repr(error)
    return text.splitlines()[0]


def this_rank() -> int:
    """The rank of this process: in its process group if there is one, else as torchrun named it."""
    dist = sys.modules.get("torch.distributed")
    if dist and dist.is_initialized():
        return dist.get_rank()
    return int(os.environ.get("RANK", 0))


def say(text: str) -> None:
    """Prints a line of the log, on rank 0. Never raises: a full disk must not end a run."""
    with contextlib.suppress(Exception):
        if this_rank() == 0:
            encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
            print(text.encode(encoding, "backslashreplace").decode(encoding), flush=True)


# -- The end of a program


def exit_code(program: str, call, less_memory: str = "") -> int:
    """Runs call(). An error becomes one line and an exit code: 2 for a user's mistake, else 1.

    less_memory: the flags to name when memory runs out. A fault of the program keeps its traceback.
    """
    try:
        call()
        return 0
    except (Exception, KeyboardInterrupt) as error:
        code, line = code_and_line(error, less_memory)
        if not line:
            raise
        if int(os.environ.get("LOCAL_RANK", 0)) > 0:
            # Local rank 0 prints what all ranks hit. torchrun ends the others while they wait.
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            time.sleep(10)
        print(f"{program}: {line}", file=sys.stderr, flush=True)
        return code
    finally:
        drop_unwritable_output()


def code_and_line(error, less_memory):
    """The exit code, and the line to print; no line for what only a traceback explains."""
    if isinstance(error, ConfigError):
        return 2, f"error: {error}"
    if isinstance(error, TrainingError):
        return 1, f"stopped: {error}"
    if isinstance(error, KeyboardInterrupt):  # later the run has a handler of its own
        return 130, "interrupted before the first step; nothing was written"
    if not isinstance(error, RuntimeError):
        return 1, ""

    import torch
    import torch.distributed as dist

    if isinstance(error, torch.OutOfMemoryError):
        return 1, f"stopped: {first_line(error)} To need less: {less_memory}"
    cause = "; ".join(str(error).strip().splitlines()[:4])  # NCCL's cause is in line 4
    names_ranks = re.search("gloo|NCCL|onnection (closed|reset)", cause)
    if isinstance(error, dist.DistError) or ("RANK" in os.environ and names_ranks):
        why = "if another rank died, the log of its machine says why"
        return 1, f"stopped: {cause} ({why})"
    return 1, ""


def drop_unwritable_output() -> None:
    """Python flushes stdout when it exits, which would fail on a closed pipe."""
    with contextlib.suppress(Exception):
        try:
            sys.stdout.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


# -- Flags


def flag(default, help, choices=(), low=1 - 2**31, high=2**31 - 1, group=None, bare=None):
    """A dataclass field that is a flag.

    low, high: the limits of a number. group: the heading in --help that begins with this flag.
    bare: the value if the flag is given without one.
    """
    about = dict(help=help, choices=choices, low=low, high=high, group=group, bare=bare)
    return dataclasses.field(default=default, metadata=about)


def true_or_false(text):
    """Anything else stays text, which check_flags refuses."""
    return {"true": True, "false": False}.get(text.lower(), text)


def number_or_none(text):
    return None if text.lower() == "none" else float(text)


CONVERTERS = {bool: true_or_false, float | None: number_or_none, str: os.path.expanduser}


def parse_flags(config, argv, program: str, description: str) -> dict:
    """The flags that were given, {name: value}; defaults are not among them."""
    parser = argparse.ArgumentParser(
        prog=program,
        description=description,
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
        exit_on_error=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    section = parser
    for f in dataclasses.fields(config):
        about = f.metadata
        if about["group"]:
            section = parser.add_argument_group(about["group"])
        text = about["help"].replace("%", "%%")
        options = dict(help=f"{text} [{f.default}]", metavar="X")
        if about["choices"]:
            options["metavar"] = "|".join(about["choices"])
        if about["bare"] or f.type is bool:
            options["nargs"] = "?"
            options["const"] = about["bare"] or True
        section.add_argument(f"--{f.name}", type=CONVERTERS.get(f.type, f.type), **options)

    try:
        values, unknown = parser.parse_known_args(argv)
    except argparse.ArgumentError as error:
        raise ConfigError(str(error).removeprefix("argument ")) from None
    if unknown:
        names = [f"--{f.name}" for f in dataclasses.fields(config)]
        closest = difflib.get_close_matches(unknown[0], names, n=1, cutoff=0)[0]
        why = f"did you mean {closest}? --help shows them all"
        raise ConfigError(f"unknown flag {unknown[0]}; {why}")
    return vars(values)


def check_flags(cfg) -> None:
    """Checks types, choices and limits as the fields declare them."""
    if sys.flags.optimize > 1:
        raise ConfigError("python -OO drops the docstrings, which transformers reads; use -O")
    kinds = {bool: "true or false", int: "a whole number", str: "text"}
    for f in dataclasses.fields(cfg):
        value = getattr(cfg, f.name)
        kind = kinds.get(f.type, "a number")
        need(has_type(value, f.type), cfg, f.name, f"must be {kind}")
        choices = f.metadata["choices"]
        if choices:
            need(value in choices, cfg, f.name, f"must be one of {', '.join(choices)}")
        low = f.metadata["low"]
        high = f.metadata["high"]
        if isinstance(value, (int, float)):
            need(low <= value <= high, cfg, f.name, f"must be from {low} to {high}")


def has_type(value, kind):
    """An int is a valid float; a bool is not a number, although Python's is an int."""
    if isinstance(value, bool):
        return kind is bool
    if isinstance(value, int):
        return kind not in (bool, str)
    return isinstance(value, kind)


def need(fine, cfg, name: str, why: str) -> None:
    """Raises a ConfigError with the flag and its value, unless `fine` is true."""
    if not fine:
        raise ConfigError(f"--{name} {getattr(cfg, name)}: {why}")


def differing_flags(cfg, defaults) -> str:
    """The flags that differ from the defaults, as one would type them."""
    values = dataclasses.asdict(cfg).items()
    return " ".join(f"--{k} {shlex.quote(str(v))}" for k, v in values if v != getattr(defaults, k))
