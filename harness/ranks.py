"""Ranks: the same code with one process and with many; seeds."""

import contextlib
import os
import pickle
import random
import sys
import tempfile
from dataclasses import dataclass
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from harness.flags import ConfigError


@dataclass
class World:
    rank: int
    size: int
    device: torch.device

    def gather(self, items: list) -> list:
        """The lists of all ranks, one after the other, on every rank."""
        if self.size == 1:
            return items
        mine, sizes = to_bytes(items), torch.empty(self.size, 1, dtype=torch.int64)
        dist.all_gather(list(sizes), torch.tensor([len(mine)]))
        received = torch.empty(self.size, int(sizes.max()), dtype=torch.uint8)  # [ranks, longest]
        received[self.rank, : len(mine)] = torch.from_numpy(mine)
        dist.all_gather(list(received), received[self.rank])
        return [item for part in received.numpy() for item in from_bytes(part)]


def to_bytes(items: list) -> np.ndarray:
    """[n] uint8: the number of its parts, their lengths, and the parts: each array as it lies in memory, then the rest,
    pickled."""
    arrays = []
    rest = pickle.dumps(items, 5, buffer_callback=arrays.append)
    parts = [np.frombuffer(part, np.uint8) for part in (*(array.raw() for array in arrays), rest)]
    lengths = np.array([len(parts), *map(len, parts)])  # int64
    fill = [np.zeros(-len(part) % 8, np.uint8) for part in parts]  # every part begins at a multiple of 8
    return np.concatenate([lengths.view(np.uint8), *(x for pair in zip(parts, fill, strict=True) for x in pair)])


def from_bytes(data: np.ndarray) -> list:
    """The items again. Their arrays lie in data: nothing of them is copied. What follows in data is ignored."""
    count = int(data[:8].view(np.int64)[0])
    lengths = data[8 : 8 * (count + 1)].view(np.int64)
    room = -(-lengths // 8) * 8
    starts = 8 * (count + 1) + np.cumsum(room) - room
    *arrays, rest = (data[start : start + n] for start, n in zip(starts, lengths, strict=True))
    return pickle.loads(rest, buffers=arrays)


def is_rank0() -> bool:
    """Known from torchrun's environment, before the ranks have met."""
    return int(os.environ.get("RANK", 0)) == 0


def pick_device(kind: str) -> torch.device:
    if kind == "auto":
        kind = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    if kind == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: torch sees no GPU")
    return torch.device(kind, int(os.environ.get("LOCAL_RANK", 0))) if kind == "cuda" else torch.device(kind)


def join_world(device: torch.device) -> World:
    """Under torchrun, meet the other ranks. Objects travel over gloo, gradients over NCCL where there is a GPU."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if "RANK" not in os.environ:
        return World(0, 1, device)
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        store, rank, size = next(rendezvous("env://"))
        if os.environ.get("GROUP_WORLD_SIZE", "1") == "1":  # torchrun --max_restarts keeps the addresses of the dead
            store = dist.PrefixStore(f"start_{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timedelta(minutes=30))
    return World(dist.get_rank(), dist.get_world_size(), device)


def seed_of(*numbers: int) -> int:
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0] >> 2)


def seed_everything(seed: int) -> None:
    """Nothing here draws from the global generators; a reward or a changed copy that does, resumes exactly too."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


@contextlib.contextmanager
def quiet(verbose: bool):
    """Hides what libraries write to the terminal while an engine starts; the end of it is shown if that fails."""
    if verbose:
        yield
        return
    sys.stdout.flush()
    saved = [os.dup(1), os.dup(2)]
    with tempfile.TemporaryFile() as hidden:
        try:
            os.dup2(hidden.fileno(), 1)
            os.dup2(hidden.fileno(), 2)
            yield
            hidden.truncate(0)
        finally:
            for target, handle in enumerate(saved, 1):
                os.dup2(handle, target)
                os.close(handle)
            hidden.seek(0)
            sys.stderr.write(b"".join(hidden.readlines()[-20:]).decode(errors="replace"))
