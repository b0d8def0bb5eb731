"""Ranks: the same code with one process and with many; seeds."""

import os
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
        lists = [None] * self.size
        dist.all_gather_object(lists, items)
        return [item for part in lists for item in part]

    def first(self, call):
        """What call() gives on rank 0, on every rank; so is the user's error that it finds there."""
        try:
            found = call() if self.rank == 0 else None
        except ConfigError as error:
            found = error
        found = self.gather([found])[0]
        if isinstance(found, ConfigError):
            raise found
        return found


def pick_device(kind: str) -> torch.device:
    """The device of this rank, and of what torch makes by itself. auto: never a silent run on the CPU beside a GPU."""
    cuda, local = torch.cuda.is_available(), int(os.environ.get("LOCAL_RANK", 0))
    if (
        kind == "auto"
        and torch.version.cuda
        and not cuda
        and os.path.exists("/proc/driver/nvidia/version")
    ):
        why = f"torch for CUDA {torch.version.cuda} needs a newer driver than the GPU here has"
        raise ConfigError(f"--device auto: {why}; or say --device cpu")
    if kind == "auto":
        kind = "cuda" if cuda else "mps" if torch.backends.mps.is_available() else "cpu"
    if kind != "cuda":
        return torch.device(kind)
    if local >= torch.cuda.device_count():
        raise ConfigError(
            f"--device cuda: torch sees {torch.cuda.device_count()} GPUs, and this is local rank {local}"
        )
    torch.cuda.set_device(local)
    return torch.device(kind, local)


def join_world(device: torch.device) -> World:
    """Under torchrun, meet the other ranks. Objects travel over gloo, gradients over NCCL where there is a GPU."""
    if "RANK" not in os.environ:
        return World(0, 1, device)
    if not dist.is_initialized():
        store, rank, size = next(rendezvous("env://"))
        if (
            os.environ.get("GROUP_WORLD_SIZE", "1") == "1"
        ):  # torchrun --max_restarts keeps the addresses of the dead
            store = dist.PrefixStore(
                f"start_{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store
            )
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(
            backend, store=store, rank=rank, world_size=size, timeout=timedelta(minutes=30)
        )
    return World(dist.get_rank(), dist.get_world_size(), device)


def leave_world() -> None:
    if "RANK" in os.environ and dist.is_initialized():  # an engine that closed may have ended it
        dist.destroy_process_group()


# The random streams of a run. NumPy pads a seed with zeros to four numbers, so that (s, t) and
# (s, t, 0) are one stream: here each has four numbers, or five with its purpose at the end.
SAMPLING = 0  # from step 1 on; number: the prompt
PROMPT_ORDER = 0  # at step 0; number: the epoch
EVAL = 1  # number: the prompt
TORCH = 2  # torch.manual_seed; number: the rank
NOISE = 3
MINIBATCHES = 4  # number: the epoch


def stream(seed: int, purpose: int, step: int = 0, number: int = 0) -> tuple[int, ...]:
    """The seed, for NumPy, of one of these streams."""
    if purpose == 0:
        return (seed, 0, step, number)
    return (seed, 0, step, number, purpose)


def seed_of(*numbers: int) -> int:
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0] >> 2)
