"""The directory of a run: which one it is, what --resume finds there, its config.json and its lock.
Other runs' files are never moved, mixed or overwritten."""

import contextlib
import dataclasses
import glob
import json
import os
import re
import shutil
from pathlib import Path
from typing import NamedTuple

import torch
from filelock import FileLock, Timeout

from harness.flags import ConfigError, say

UNNAMED = "out"  # the default of --out_dir: the first of out, out.1, out.2, ... that is free
LATEST = "latest"  # value of a bare --resume: continue the run in out_dir
STATE = "trainer_state.pt"  # of a checkpoint, beside the files of the model


class Beginning(NamedTuple):
    out_dir: str
    resume: str  # LATEST: continue the run in out_dir. A path: new run from there. Empty: neither
    saved_flags: dict  # of that run or checkpoint


def resumed_flags(config_class, given: dict) -> dict:
    """The given flags, else those saved in what --resume names."""
    beginning = find_beginning(given.get("out_dir", UNNAMED), given.get("resume", ""))
    names = [field.name for field in dataclasses.fields(config_class)]
    saved = {name: value for name, value in beginning.saved_flags.items() if name in names}
    return saved | given | dict(out_dir=beginning.out_dir, resume=beginning.resume)


def find_beginning(out_dir: str, resume: str) -> Beginning:
    if not resume:
        return Beginning(out_dir, "", {})

    # --resume out.3 continues the run in out.3
    same = os.path.realpath(out_dir) == os.path.realpath(resume)
    if saved_config(resume) and (same or out_dir == UNNAMED):
        return Beginning(resume, LATEST, saved_config(resume))

    if resume != LATEST:
        inside = checkpoints(resume)
        checkpoint = inside[-1] if inside else resume
        return Beginning(out_dir, checkpoint, saved_flags(checkpoint))

    run = newest_run(out_dir)
    if run is None:
        say(f"--resume: no run in {out_dir} yet, so one begins")
        return Beginning(out_dir, "", {})
    return Beginning(run, LATEST, saved_config(run))


def newest_run(out_dir: str) -> str | None:
    """out_dir if it holds a run. If unnamed: the one of out, out.1, ... started last."""
    names = [out_dir]
    if out_dir == UNNAMED:
        names += glob.glob(f"{UNNAMED}.[0-9]*")
    runs = [name for name in names if saved_config(name)]
    return max(runs, key=lambda name: os.path.getmtime(config_file(name)), default=None)


def config_file(directory: str) -> str:
    return os.path.join(directory, "config.json")


def saved_config(directory: str) -> dict:
    """The config.json of the run in this directory; {} if there is none. A model's config.json has
    no out_dir."""
    try:
        saved = json.loads(Path(config_file(directory)).read_text())
    except (OSError, ValueError):
        return {}
    is_run = isinstance(saved, dict) and "out_dir" in saved
    return saved if is_run else {}


def saved_flags(checkpoint: str) -> dict:
    try:
        path = os.path.join(checkpoint, STATE)
        return torch.load(path, mmap=True, weights_only=True)["config"]
    except Exception:  # find_checkpoint() says what is wrong with it
        return {}


def claim_out_dir(cfg, exits: contextlib.ExitStack):
    """Returns cfg with the directory of this run, which stays locked until `exits` closes."""
    out = cfg.out_dir
    goes_on = cfg.resume == LATEST
    try:
        if out == UNNAMED and not goes_on:
            out = make_first_free()
        os.makedirs(out, exist_ok=True)
        if not goes_on:
            refuse_used(out)  # before a lock file is put there
        lock_directory(out, exits)
        if not goes_on:
            refuse_used(out)  # used by the lock's last run
    except OSError as error:
        raise ConfigError(f"--out_dir {out}: {error.strerror}") from None
    return dataclasses.replace(cfg, out_dir=out)


def make_first_free() -> str:
    number = 0
    name = UNNAMED
    while True:
        try:
            os.mkdir(name)  # fails if another process was faster
            return name
        except FileExistsError:
            number += 1
            name = f"{UNNAMED}.{number}"


def refuse_used(out: str) -> None:
    logs_and_models = glob.glob(os.path.join(glob.escape(out), "[cm]*.json*"))
    if checkpoints(out) or any(os.path.getsize(path) for path in logs_and_models):
        why = "--resume continues a run; for a new one name another directory"
        raise ConfigError(f"--out_dir {out}: holds files of a run or a model; {why}")


def lock_directory(out: str, exits: contextlib.ExitStack) -> None:
    process = Path(out, ".process")
    lock = FileLock(os.path.join(out, ".lock"))  # the system frees it, however this process ends
    try:
        lock.acquire(timeout=3)  # the ranks of a torchrun that was killed take a second to end
    except Timeout:
        why = f"another run (process {process.read_text()}) is writing there"
        raise ConfigError(f"--out_dir {out}: {why}") from None
    exits.callback(lock.release)
    exits.callback(remove_unused, out)
    process.write_text(str(os.getpid()))


def remove_unused(out: str) -> None:
    """A run that is refused leaves no trace."""
    if set(os.listdir(out)) <= {".lock", ".process"}:
        shutil.rmtree(out, ignore_errors=True)


def write_config(cfg, inputs: dict) -> None:
    """The flags of this run, fingerprints of its inputs, and in `resume` the checkpoint that it
    began with."""
    if cfg.resume == LATEST:
        began_with = saved_config(cfg.out_dir).get("resume", "")
    elif cfg.resume:
        began_with = os.path.abspath(cfg.resume)
    else:
        began_with = ""
    values = dataclasses.asdict(cfg) | dict(resume=began_with) | inputs
    partial = Path(cfg.out_dir, ".config.json")
    partial.write_text(json.dumps(values, indent=1))
    partial.replace(config_file(cfg.out_dir))


def checkpoints(out_dir: str) -> list[str]:
    """The complete ones, oldest first."""
    names = os.listdir(out_dir) if os.path.isdir(out_dir) else []
    complete = [name for name in names if re.fullmatch(r"step_\d{6,}", name)]
    return [os.path.join(out_dir, name) for name in sorted(complete, key=step_of)]


def checkpoint_path(out_dir: str, step: int) -> str:
    return os.path.join(out_dir, f"step_{step:06d}")


def step_of(path: str) -> int:
    return int(path.rpartition("_")[2])
