"""Checkpoints: a directory that from_pretrained loads, with trainer_state.pt."""

import contextlib
import io
import os
import shutil
import zipfile
import zlib
from pathlib import Path
from typing import NamedTuple

import torch
from torch.utils._pytree import tree_map

from harness import lora
from harness.directory import LATEST, STATE, checkpoint_path, checkpoints, saved_config, step_of
from harness.flags import ConfigError, first_line, need, say


class Checkpoint(NamedTuple):
    path: str
    state: dict


def find_checkpoint(cfg) -> Checkpoint | None:
    """The named checkpoint, or the newest intact one of the resumed run. None: start from --model.
    Raises ConfigError if all that exist are damaged."""
    if cfg.resume == LATEST:
        paths = checkpoints(cfg.out_dir)[::-1]
        began_with = saved_config(cfg.out_dir).get("resume")
        if began_with and not paths:
            paths = [began_with]
    else:
        paths = [cfg.resume] if cfg.resume else []

    for path in paths:
        try:
            return load_checkpoint(path)
        except Exception as error:  # half a dozen types
            say(f"checkpoint {path} is damaged ({first_line(error)})")
    if paths:
        raise ConfigError(f"--resume {paths[-1]}: not a whole checkpoint")
    return None


def load_checkpoint(path: str) -> Checkpoint:
    """Raises if one of its files is missing, truncated or changed."""
    state_file = os.path.join(path, STATE)
    with zipfile.ZipFile(state_file) as archive:  # torch.save() stores a CRC-32 for each tensor
        if archive.testzip() is not None:
            raise OSError(f"{STATE} is damaged")
    state = torch.load(state_file, map_location="cpu", weights_only=True)
    for name, expected in state.pop("checksums").items():
        if checksum(os.path.join(path, name)) != expected:
            raise OSError(f"{name} is damaged")
    return Checkpoint(path, state)


def write_checkpoint(path: str, write_model, state: dict) -> None:
    """The directory gets its name only when it is complete and on the disk."""
    partial = os.path.join(os.path.dirname(path), ".partial")
    shutil.rmtree(partial, ignore_errors=True)  # left by a save that was killed
    try:
        write_model(partial)
        files = [file for file in Path(partial).rglob("*") if file.is_file()]
        checksums = {str(file.relative_to(partial)): checksum(file) for file in files}
        state_file = os.path.join(partial, STATE)
        torch.save(state | dict(checksums=checksums), state_file)
        for name in [*files, state_file, partial]:
            flush_to_disk(name)
        shutil.rmtree(path, ignore_errors=True)  # a damaged one that was skipped
        os.replace(partial, path)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def checksum(path) -> int:
    value = 0
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            value = zlib.crc32(block, value)  # seven times as fast as SHA-256
    return value


def flush_to_disk(path) -> None:
    handle = os.open(path, os.O_RDONLY)
    os.fsync(handle)
    os.close(handle)


def try_checkpoint(out_dir: str, write_model, state: dict, size: int) -> None:
    """Raises ConfigError, before the first step, if checkpoints of `size` bytes cannot be saved
    there or loaded back. Writes a small part of one."""
    trial = os.path.join(out_dir, ".trial")
    try:
        for name, value in state.items():
            refuse_unloadable(name, value)
        write_checkpoint(trial, lambda path: write_model(path, trial=True), {})
        needed = 2 * size  # the old checkpoint stays until the new one is complete
        if checkpoints(out_dir):
            needed = size
        free = shutil.disk_usage(out_dir).free
        if free < needed:
            raise OSError(f"{needed / 1e9:.2g} GB are needed, {free / 1e9:.2g} GB are free")
    except Exception as error:
        why = f"no checkpoint can be saved there ({first_line(error)})"
        raise ConfigError(f"--out_dir {out_dir}: {why}") from error
    finally:
        shutil.rmtree(trial, ignore_errors=True)


def refuse_unloadable(name: str, value) -> None:
    """Saves and loads one number per tensor, in memory."""
    file = io.BytesIO()
    torch.save(tree_map(first_number, value), file)
    file.seek(0)
    try:
        torch.load(file, weights_only=True)
    except Exception as error:
        why = "holds more than tensors, numbers, text, lists and dicts, and could not be loaded"
        raise ValueError(f"the part {name} {why}") from error


def first_number(value):
    if isinstance(value, torch.Tensor):
        return value.detach().reshape(-1)[:1].clone()
    return value


def remove_old(out_dir: str, step: int, best: int, keep: int) -> None:
    """Keeps the best checkpoint, the newest `keep` (0: all), and those of steps after `step`: they
    are damaged, and will be written again."""
    past = [path for path in checkpoints(out_dir) if step_of(path) <= step]
    if keep:
        for path in past[:-keep]:
            if step_of(path) != best:
                shutil.rmtree(path)


def link_best(out_dir: str, best: int) -> None:
    """Points the link `best` to the checkpoint of that step."""
    link = os.path.join(out_dir, "best")
    target = checkpoint_path(out_dir, best)
    if not os.path.isdir(target):
        return
    if os.path.isfile(os.path.join(link, STATE)) and not os.path.islink(link):
        shutil.rmtree(link)  # copying a run may have turned the link into a directory
    with contextlib.suppress(FileNotFoundError):
        os.remove(f"{link}.new")
    os.symlink(os.path.basename(target), f"{link}.new")
    os.replace(f"{link}.new", link)


def fingerprint(model) -> int:
    """A hash of the weights, the same on every device: the sum over all parameters of
    (position of the parameter) * (sum of its bits, as 32-bit integers)."""
    total = 0
    for position, parameter in enumerate(model.parameters(), 1):
        bits = parameter.detach().reshape(-1).view(torch.int32)
        total = total + position * bits.sum(dtype=torch.int64)  # no device sync in the loop
    return int(total) % 2**63


def refuse_other_weights(now: int, start: int, cfg, why: str) -> None:
    """ConfigError if --model has another fingerprint than the weights that the run began with."""
    need(now == start, cfg, "model", f"not the weights that this run began with, {why}")


def refuse_other_rank(checkpoint: Checkpoint, cfg) -> None:
    """ConfigError if the checkpoint has other adapters than the run that goes on from it."""
    rank = checkpoint.state["config"].get("lora_rank", 0)
    why = f"{checkpoint.path} has {rank}; to change it begin a run with that as --model"
    need(rank == cfg.lora_rank, cfg, "lora_rank", why)


def model_writer(model, tokenizer, source: str, weights=None):
    """Returns write(directory), which writes what from_pretrained loads.

    source: the directory or hub name that the model came from. Its generation_config.json is
        copied, because transformers reads some that it then refuses to write.
    weights: returns the tensors by name, if they are not those of the model.
    """
    from transformers import GenerationConfig
    from transformers.utils import cached_file

    generation = b""
    with contextlib.suppress(OSError):
        generation = Path(cached_file(source, "generation_config.json")).read_bytes()
    try:
        model.generation_config.validate(strict=True)
    except ValueError:  # save_pretrained() would refuse it
        model.generation_config = GenerationConfig()

    def write(directory: str, trial: bool = False) -> None:
        """trial: only vectors (norms, biases), which are small."""
        tensors = weights() if weights else lora.merged_state(model)
        if trial:
            tensors = {name: tensor for name, tensor in tensors.items() if tensor.dim() == 1}
        model.save_pretrained(directory, state_dict=tensors)
        tokenizer.save_pretrained(directory)
        if lora.adapters(model):
            lora.save_adapters(model, directory)
        file = Path(directory, "generation_config.json")
        file.unlink(missing_ok=True)  # the model's own: the sampler may have changed it
        if generation:
            file.write_bytes(generation)

    return write
