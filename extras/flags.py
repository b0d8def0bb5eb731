"""The command line: flags, messages about mistakes in them, and the end of the process."""

import contextlib
import inspect
import json
import os
import re
import sys
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import grpo
from extras import preflight, ranks, runs
from extras.errors import ConfigError, describe, mistakes_in

NOT_FLAGS = {"about", "first_day", "added"}  # other keys of config.json: see runs.py
NOT_FLAGS |= {"job"}  # of earlier versions
PATIENCE = 10.0  # seconds from the end of the run to the end of the process


def print_help():
    """Prints the lines of Config and its bases, since argparse's own help has no comments."""
    fields = ""
    for kind in grpo.Config.__mro__[-2::-1]:
        with contextlib.suppress(OSError, TypeError):  # made by make_dataclass
            header = r"(?s).*?\bclass \w+(\([^)]*\))?:.*?\n"
            fields += re.sub(header, "", inspect.getsource(kind), count=1)
    hidden = {name: x for name, x in vars(grpo.Config()).items() if f" {name}: " not in fields}
    fields += "".join(f"    {name}: {x!r}\n" for name, x in hidden.items())
    print("usage: python grpo.py [--name value] ...\n")
    print(re.sub(r"(?m)^ +(?=\w+: )", "  --", fields).replace("    # ", "# "))
    print("Without --model: the bundled task, with the values of BUNDLED in grpo.py.")
    print("How flags work together: see the top of grpo.py, README.md, docs/REFERENCE.md.")


def make_parser(plain, *args, **kwargs):
    names = list(vars(grpo.Config()))

    def refuse(message):
        raise ConfigError(preflight.suggest_flag(message, names))

    parser = plain(*args, **kwargs)
    parser.print_help = print_help
    parser.error = refuse
    return parser


def saved_flags(plain, given, *args, **kwargs) -> dict:
    """The flags of the run to resume, wherever it is."""
    path = runs.config_to_resume(given, getattr(grpo.Config, "out_dir", ""))
    if not path:
        return plain(given, *args, **kwargs)
    found = dict(out_dir=os.path.dirname(path), resume=True)
    with mistakes_in(f"--resume: {path}", (OSError, ValueError, TypeError)):
        config = json.loads(Path(path).read_text())
        unknown = config.keys() - vars(grpo.Config()).keys() - NOT_FLAGS
        for name in unknown - {*config.get("added", [])}:
            raise ValueError(f"{name} is not a flag")
        saved = plain(SimpleNamespace(**found), *args, **kwargs) | found
    return saved | dict(plain=False, began=config.get("first_day", saved.get("began", "")))


def parse_flags(plain, argv=None, *args, **kwargs):
    with mistakes_in("flags", (ValueError,)):
        preflight.check_flags_once(sys.argv[1:] if argv is None else argv)
    cfg = plain(argv, *args, **kwargs)
    saved = grpo.saved_flags(cfg)
    if cfg.resume and not saved:
        ranks.say("--resume: there is no run yet, so a new one begins")
        cfg = replace(cfg, resume=False)
    for name, before in saved.items():
        if name != "out_dir" and getattr(cfg, name) != before:
            ranks.say(f"--{name} was {before!r} and is now {getattr(cfg, name)!r}")
    schedule = getattr(cfg, "lr_schedule", "constant")
    if schedule != "constant" and saved.get("max_steps", cfg.max_steps) != cfg.max_steps:
        ranks.say(f"--lr_schedule {schedule}: the learning rate jumps (new --max_steps)")
    return cfg


def main(plain, *args, **kwargs) -> int:
    """Prints an error as one line."""
    streams: list = [sys.stdout, sys.stderr]
    for stream in streams:
        with contextlib.suppress(AttributeError):  # a notebook's streams lack it
            stream.reconfigure(errors="backslashreplace")  # for a terminal that is not UTF-8
    code = 1
    try:
        code = plain(*args, **kwargs)
        return code
    except Exception as error:
        ranks.leave(error)
        message, code = describe(error)
        if not message:
            raise
    finally:
        if sys.modules["__main__"] is grpo:  # the command line
            limit = threading.Timer(PATIENCE, lambda: end_process(code))
            limit.daemon = True
            limit.start()
    print(f"{Path(grpo.__file__).name}: error: {message}", file=sys.stderr, flush=True)
    return code


def end_process(code: int) -> None:
    """Python waits for users' threads, and a thread may wait for a server that never answers."""
    print("your thread is still running: the process ends without it", file=sys.stderr, flush=True)
    os._exit(code)
