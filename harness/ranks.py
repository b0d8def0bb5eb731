"""Ranks: the same code with one process and with many. Devices, process groups, random streams."""

import os
from dataclasses import dataclass
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from harness.flags import ConfigError, say

# -- Random streams: every random number of a run comes from a generator seeded with one of these

SAMPLING = 0  # completions of a step, counted from 1; number: the prompt within the step
PROMPT_ORDER = 0  # order of the rows, at step 0, where SAMPLING draws nothing; number: the epoch
EVAL = 1  # completions of an eval; number: the prompt
TORCH = 2  # torch's generator, for modified copies that use it; number: the rank
NOISE = 3  # on the advantages
MINIBATCHES = 4  # order of a step's samples; number: the epoch
ENVIRONMENT = 5  # what an environment draws; number: the row


def stream(seed: int, purpose: int, step: int = 0, number: int = 0) -> tuple[int, ...]:
    """Seed of a generator: np.random.default_rng(stream(...)) or seed_of(*stream(...)).

    numpy fills up to four numbers with zeros, so that (s, t, 2) and (s, t, 2, 0) are one stream.
    Here every stream has four numbers, or a fifth that is not 0.
    """
    if purpose == 0:
        return (seed, 0, step, number)
    return (seed, 0, step, number, purpose)


def seed_of(*numbers: int) -> int:
    """A seed of 62 bits, a function of all the numbers."""
    [state] = np.random.SeedSequence(numbers).generate_state(1, np.uint64)
    return int(state >> 2)


# -- Ranks


@dataclass
class World:
    rank: int
    size: int
    device: torch.device
    made_group: bool = False  # else the process group is the caller's, or there is none

    def gather(self, items: list) -> list:
        """The lists of all ranks, one after the other, on every rank."""
        if self.size == 1:
            return items
        lists = [None] * self.size
        dist.all_gather_object(lists, items)
        return [item for one in lists for item in one]

    def first(self, call):
        """call() on rank 0; its result, or its ConfigError, on every rank."""
        result = None
        if self.rank == 0:
            try:
                result = call()
            except ConfigError as error:
                result = error
        result = self.gather([result])[0]
        if isinstance(result, ConfigError):
            raise result
        return result

    def same(self, values: dict) -> None:
        """ConfigError on every rank if a rank holds another value than rank 0 under some name."""
        everyone = self.gather([values])
        first = everyone[0]
        for rank, theirs in enumerate(everyone):
            names = {**first, **theirs}
            differing = [name for name in names if theirs.get(name) != first.get(name)]
            if differing:
                why = f"not the same on rank {rank} as on rank 0; every rank needs the same"
                raise ConfigError(f"{', '.join(differing)}: {why}")


def join_world(device: torch.device) -> World:
    """Meets the other ranks: in the caller's process group, under torchrun in a new one.

    Else this process is alone. Objects travel over gloo, gradients over NCCL on GPUs.
    ConfigError if torchrun's environment is incomplete, and for several ranks on mps.
    """
    if dist.is_initialized():
        return world_of(device, made_group=False)
    if "RANK" not in os.environ:
        tasks = os.environ.get("SLURM_NTASKS", "1")
        if tasks != "1":  # srun starts the program several times
            why = "but this process trains alone: have one task per machine start torchrun"
            say(f"warning: SLURM_NTASKS is {tasks}, {why}")
        return World(0, 1, device)
    missing = {"WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} - set(os.environ)
    if missing:
        why = "start several ranks with torchrun, or one without RANK"
        raise ConfigError(f"RANK is set, {', '.join(sorted(missing))} not: {why}")

    store, rank, size = next(rendezvous("env://"))
    if os.environ.get("GROUP_WORLD_SIZE", "1") == "1":
        # After a restart torchrun's store still holds the addresses of the ranks that died.
        start = os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)
        store = dist.PrefixStore(f"start_{start}", store)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    options = dict(store=store, rank=rank, world_size=size, timeout=timedelta(minutes=30))
    dist.init_process_group(backend, **options)
    return world_of(device, made_group=True)


def world_of(device, made_group):
    world = World(dist.get_rank(), dist.get_world_size(), device, made_group)
    if device.type == "mps" and world.size > 1:
        raise ConfigError("--device mps: one rank only, since PyTorch has no collectives for it")
    return world


def leave_world(world):
    """Ends the process group that join_world made. vLLM, when it closes, may have ended it."""
    if world.made_group and dist.is_initialized():
        dist.destroy_process_group()


# -- The device of a rank


def pick_device(kind: str, dtype: str = "auto") -> torch.device:
    """The device of this rank, on CUDA made torch's current one. auto: cuda, else cpu.

    mps only on request: by an open report its causal attention sees the future in half precision.
    ConfigError if the device is missing or cannot compute in this dtype.
    """
    if kind == "auto":
        kind = auto_device()
    if kind == "cuda":
        return card_of_this_rank()
    if kind == "mps" and not torch.backends.mps.is_available():
        raise ConfigError("--device mps: torch finds no Apple GPU here")
    if kind == "mps" and dtype == "float64":
        raise ConfigError("--device mps: has no float64; --device cpu has")
    return torch.device(kind)


def auto_device():
    """Raises if there is a GPU that torch cannot use; never silently the CPU."""
    if torch.cuda.is_available():
        return "cuda"
    if torch.version.cuda and os.path.exists("/proc/driver/nvidia/version"):
        why = f"torch for CUDA {torch.version.cuda} needs a newer driver than the GPU here has"
        raise ConfigError(f"--device auto: {why}; or say --device cpu")
    return "cpu"


def card_of_this_rank():
    """The GPU of torchrun's local rank; in a caller's process group the current GPU."""
    local = int(os.environ.get("LOCAL_RANK", 0))
    cards = torch.cuda.device_count()
    if dist.is_initialized() and "LOCAL_RANK" not in os.environ:
        local = torch.cuda.current_device()
    if local >= cards:
        raise ConfigError(f"--device cuda: torch sees {cards} GPUs, and this is local rank {local}")
    torch.cuda.set_device(local)
    return torch.device("cuda", local)
