"""Ranks that wait for each other as long as it takes, and say for whom; lines on the screen."""

import contextlib
import functools
import os
import time
from datetime import datetime

import torch
import torch.distributed as dist

import grpo
from extras.errors import mistakes_in, require

PATIENCE = 600.0  # seconds until rank 0 says for which ranks it waits; from then on doubled


def is_first() -> bool:
    return os.environ.get("RANK", "0") == "0"


def say(text: str) -> None:
    """On rank 0."""
    if is_first():
        with contextlib.suppress(OSError, RuntimeError):  # a closed pipe; a print inside a print
            print(text, flush=True)


@functools.cache
def now() -> str:
    """The same on all ranks, and in the whole run."""
    return grpo.all_gather([datetime.now().isoformat()])[0]


def join_ranks(plain, cfg, *args, **kwargs) -> torch.device:
    is_there = cfg.device != "cuda" or torch.cuda.is_available()
    require(is_there, "device", "torch finds no usable GPU here")
    with mistakes_in("the ranks that torchrun starts do not meet"):
        return plain(cfg, *args, **kwargs)


def all_gather(plain, items: list, *args, **kwargs) -> list:
    """It waits for the other ranks as long as it takes."""
    if dist.is_initialized():
        wait_for_ranks()
    return plain(items, *args, **kwargs)


def wait_for_ranks() -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    store = dist.distributed_c10d._get_default_store()
    meeting = store.add(f"gathers of rank {rank}", 1)
    arrived = dist.barrier(async_op=True)
    started, patience = time.monotonic(), PATIENCE
    while not arrived.is_completed():  # a blocking wait would let no signal in: see runs.py
        time.sleep(0.001)
        if rank == 0 and time.monotonic() - started > patience:
            counts = [store.add(f"gathers of rank {other}", 0) for other in range(world_size)]
            missing = [other for other, count in enumerate(counts) if count < meeting]
            say(f"has waited {patience:.0f} s for the ranks {missing}")
            patience *= 2
