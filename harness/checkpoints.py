"""A run's files: its directory, and its checkpoints."""

import contextlib
import dataclasses
import glob
import itertools
import json
import os
import re
import shutil
import zlib
from pathlib import Path
from typing import NamedTuple

import torch
from filelock import FileLock, Timeout

from harness.flags import ConfigError, first_line, say

UNNAMED = "out"  # the default of --out_dir: the first of out, out.1, out.2, ... that does not exist
# Names this start of torchrun; the same over its --max_restarts
LAUNCH = f"{os.environ.get('TORCHELASTIC_RUN_ID', '')} {os.getppid()}"


# -- The directory: each run has its own. What another one left is never moved, mixed or overwritten


def saved_config(path: str) -> dict:
    """The config.json of the run in this directory, {} where there is none. That of a model has no launch."""
    try:
        saved = json.loads(Path(path or os.devnull, "config.json").read_text())
        return saved if "launch" in saved else {}
    except (OSError, ValueError, TypeError):
        return {}


def with_run(config, given: dict) -> dict:
    """The flags that are given, over those of the run or checkpoint that they resume. In the result resume is "latest"
    where the run in out_dir goes on, a checkpoint where a new run begins with that, and else empty."""
    out_dir, resume = given.get("out_dir", UNNAMED), given.get("resume", "")
    names = [out_dir, *glob.glob(f"{UNNAMED}.[0-9]*")] if out_dir == UNNAMED else [out_dir]
    if saved_config(resume) and (
        out_dir == UNNAMED or os.path.realpath(out_dir) == os.path.realpath(resume)
    ):
        names, resume = [resume], "latest"  # a run's own folder
    runs = {name: saved for name in names if (saved := saved_config(name))}
    own = {name: saved for name, saved in runs.items() if saved["launch"] == LAUNCH}
    if own and int(
        os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)
    ):  # by torchrun: with the run of this launch
        runs, resume = own, "latest"
    saved = {}
    if resume == "latest" and runs:
        out_dir = max(
            runs, key=lambda name: os.path.getmtime(os.path.join(name, "config.json"))
        )  # the last to start
        saved = runs[out_dir]
    elif resume == "latest":
        say(f"--resume: no run in {out_dir} yet, so one begins")
        resume = ""
    elif resume:
        resume = (checkpoints(resume) or [resume])[
            -1
        ]  # of a run, where --out_dir is another directory
        with contextlib.suppress(Exception):  # find_checkpoint says what is wrong with it
            saved = torch.load(
                os.path.join(resume, "trainer_state.pt"), mmap=True, weights_only=True
            )["config"]
    known = {f.name for f in dataclasses.fields(config)}
    return (
        {k: v for k, v in saved.items() if k in known}
        | given
        | dict(out_dir=out_dir, resume=resume)
    )


def refuse_used(out: str, goes_on: bool) -> None:
    if not goes_on and (
        checkpoints(out) or glob.glob(os.path.join(glob.escape(out), "[cm]*.json*"))
    ):
        why = "--resume goes on with a run, for a new one name another directory"
        raise ConfigError(f"--out_dir {out}: holds files of a run or a model; {why}")


def claim_out_dir(cfg, code: dict, exits: contextlib.ExitStack):
    """Rank 0 only. The Config with the directory of this run, which is locked and holds config.json from now on."""
    out, goes_on = cfg.out_dir, cfg.resume == "latest"
    try:
        for number in itertools.count(1) if out == UNNAMED and not goes_on else ():
            with contextlib.suppress(FileExistsError):
                os.mkdir(out)  # fails if another process was faster
                break
            out = f"{UNNAMED}.{number}"
        os.makedirs(out, exist_ok=True)
        refuse_used(out, goes_on)  # before a lock lies in it
        lock = FileLock(
            os.path.join(out, ".lock")
        )  # the system frees it with this process, however that ends
        lock.acquire(timeout=3)  # the ranks of a torchrun that was killed take a second to notice
        exits.callback(lock.release)
        refuse_used(out, goes_on)  # by the run that had the lock
        cfg = dataclasses.replace(cfg, out_dir=out)
        new = Path(out, "config.json.new")  # with that ending until it is whole
        began = (
            saved_config(out).get("resume", "")
            if goes_on
            else cfg.resume and os.path.abspath(cfg.resume)
        )
        notes = dict(process=os.getpid(), launch=LAUNCH, reward_code=code, resume=began)
        new.write_text(json.dumps(dataclasses.asdict(cfg) | notes, indent=1))
        new.replace(new.with_suffix(""))
        return cfg
    except Timeout:
        process = saved_config(out).get("process")
        raise ConfigError(
            f"--out_dir {out}: another run (process {process}) is writing there"
        ) from None
    except OSError as error:
        raise ConfigError(f"--out_dir {out}: {error.strerror}") from None


# -- Checkpoints: a directory that from_pretrained loads, with trainer_state.pt and the checksum of every file


class Checkpoint(NamedTuple):
    path: str
    state: dict


def checkpoints(out_dir: str) -> list[str]:
    """Complete ones, oldest first."""
    names = os.listdir(out_dir) if os.path.isdir(out_dir) else []
    steps = sorted(int(name[5:]) for name in names if re.fullmatch(r"step_\d{6,}", name))
    return [os.path.join(out_dir, f"step_{step:06d}") for step in steps]


def load_checkpoint(path: str) -> Checkpoint:
    """An exception if a file of it is missing, cut short or changed."""
    for name, expected in json.loads(Path(path, "checksums.json").read_text()).items():
        if checksum(os.path.join(path, name)) != expected:
            raise OSError(f"{name} is not as it was written")
    return Checkpoint(
        path,
        torch.load(os.path.join(path, "trainer_state.pt"), map_location="cpu", weights_only=True),
    )


def checksum(path: str) -> int:
    value = 0
    with open(path, "rb") as file:
        while part := file.read(1 << 20):
            value = zlib.crc32(part, value)  # seven times as fast as SHA-256
    return value


def find_checkpoint(cfg) -> Checkpoint | None:
    """The newest whole one of the run that goes on, or the one that is named; None: from the beginning."""
    paths = [cfg.resume] if cfg.resume else []
    if cfg.resume == "latest":  # before its own first checkpoint: where it began
        began = saved_config(cfg.out_dir).get("resume")
        paths = checkpoints(cfg.out_dir)[::-1] or ([began] if began else [])
    for path in paths:
        try:
            return load_checkpoint(path)
        except (
            Exception
        ) as error:  # half a dozen types; the directory stays until the run saves that step again
            say(f"checkpoint {path} is damaged ({first_line(error)})")
    if paths:
        raise ConfigError(f"--resume {paths[-1]}: not a whole checkpoint")
    return None


def write_checkpoint(final: str, write_model, state: dict) -> None:
    """It gets its name only when it is whole and on the disk."""
    partial = os.path.join(os.path.dirname(final), ".partial")
    shutil.rmtree(partial, ignore_errors=True)  # of a save that a kill cut short
    try:
        write_model(partial)
        torch.save(state, os.path.join(partial, "trainer_state.pt"))
        files = [
            os.path.join(folder, name) for folder, _, names in os.walk(partial) for name in names
        ]
        sums = Path(partial, "checksums.json")
        sums.write_text(
            json.dumps({os.path.relpath(path, partial): checksum(path) for path in files}, indent=1)
        )
        for path in [*files, sums, partial]:
            handle = os.open(path, os.O_RDONLY)
            os.fsync(handle)
            os.close(handle)
        shutil.rmtree(final, ignore_errors=True)  # a damaged one, which the run did not go on from
        os.replace(partial, final)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def fingerprint(model) -> int:
    """Names the weights: the sum of their bits, by parameter. The same on every device."""
    parameters = enumerate(model.parameters(), 1)
    return (
        int(
            sum(
                n * p.detach().reshape(-1).view(torch.int32).sum(dtype=torch.int64)
                for n, p in parameters
            )
        )
        % 2**63
    )


def model_writer(model, tokenizer, source: str, weights=lambda: None):
    """write(directory), which writes what from_pretrained loads. weights(): the tensors by name, where they are not the
    model's own. The generation_config.json of `source` is copied: transformers refuses to write some that it reads."""
    from transformers import GenerationConfig
    from transformers.utils import cached_file

    generation = b""
    with contextlib.suppress(OSError):
        generation = Path(cached_file(source, "generation_config.json")).read_bytes()
    try:
        model.generation_config.validate(strict=True)
    except (
        ValueError
    ):  # it would not be written, and the sampler does not need it: vLLM has its own parameters
        model.generation_config = GenerationConfig()

    def write(path):
        model.save_pretrained(path, state_dict=weights())
        tokenizer.save_pretrained(path)
        file = Path(path, "generation_config.json")
        file.unlink(missing_ok=True)  # the one that samples for us
        if generation:
            file.write_bytes(generation)

    return write
