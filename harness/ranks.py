"""Ranks: the same code with one process and with many; seeds."""

import os
import random
import re
from dataclasses import dataclass
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from harness.flags import ConfigError

DRIVER = "/proc/driver/nvidia/version"


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


def pick_device(kind: str) -> torch.device:
    cuda = torch.cuda.is_available()
    if kind == "auto" and torch.version.cuda and not cuda and os.path.exists(DRIVER):  # never a silent run on the CPU
        with open(DRIVER) as file:
            driver = re.search(r"\d+(\.\d+)+", file.read())
        why = f"has the driver {driver and driver[0]}, which torch for CUDA {torch.version.cuda} cannot use"
        raise ConfigError(f"--device auto: the GPU here {why}: install a newer driver, or say --device cpu")
    if kind == "auto":
        kind = "cuda" if cuda else "mps" if torch.backends.mps.is_available() else "cpu"
    if kind == "cuda" and not cuda:
        raise ConfigError("--device cuda: torch sees no GPU")
    if kind == "cuda":  # the current one from here on: else the model's checks would open a context on card 0, too
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
        return torch.device(kind, torch.cuda.current_device())
    return torch.device(kind)


def join_world(device: torch.device) -> World:
    """Under torchrun, meet the other ranks. Objects travel over gloo, gradients over NCCL where there is a GPU."""
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
