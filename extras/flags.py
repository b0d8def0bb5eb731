"""The command line, with the words that a mistake needs."""

import inspect
import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import grpo
from extras import preflight, ranks, runs
from extras.errors import ConfigError, mistakes_in

NOT_FLAGS = {"about", "job", "first_day", "added"}  # what config.json has besides: see runs.py


def make_parser(plain, *args, **kwargs):
    names = list(vars(grpo.Config()))

    def refuse(message):
        raise ConfigError(preflight.suggest_flag(message, names))

    parser = plain(*args, **kwargs)
    parser.print_help = lambda: print(grpo.__doc__, inspect.getsource(grpo.Config), sep="\n")
    parser.error = refuse
    return parser


def saved_flags(plain, given, *args, **kwargs) -> dict:
    """Of the run that goes on, wherever it is."""
    path = runs.config_to_resume(given, grpo.Config.out_dir)
    if not path:
        return plain(given, *args, **kwargs)
    found = dict(out_dir=os.path.dirname(path), resume=True)
    with mistakes_in(f"--resume: {path}", (OSError, ValueError, TypeError)):
        config = json.loads(Path(path).read_text())
        unknown = config.keys() - vars(grpo.Config()).keys() - NOT_FLAGS
        for name in unknown - {*config.get("added", [])}:
            raise ValueError(f"{name} is no flag")
        saved = plain(SimpleNamespace(**found), *args, **kwargs) | found
    return saved | dict(plain=False, began=config.get("first_day", saved.get("began", "")))


def parse_flags(plain, argv=None, *args, **kwargs):
    with mistakes_in("flags", (ValueError,)):
        preflight.check_flags_once(sys.argv[1:] if argv is None else argv)
    cfg = plain(argv, *args, **kwargs)
    saved = grpo.saved_flags(cfg)
    if cfg.resume and not saved:
        ranks.say("--resume: there is no run yet, so one begins")
        cfg = replace(cfg, resume=False)
    for name, before in saved.items():
        if name != "out_dir" and getattr(cfg, name) != before:
            ranks.say(f"--{name} was {before!r} and is {getattr(cfg, name)!r}")
    return cfg
