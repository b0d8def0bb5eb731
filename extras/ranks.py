"""Ranks connect, compare code, flags and data, wait for each other as long as it takes, and end
together. This file also prints lines."""

import contextlib
import functools
import itertools
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
import uuid
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import grpo
from extras import digests
from extras.errors import ConfigError, TrainingError, cleanup, describe, mistakes_in, require

PATIENCE = 600.0  # seconds without a sign of life from a rank until it counts as gone
MEETING = 1800.0  # seconds that the ranks have to connect
GRACE = 10.0  # seconds for a rank to save and exit, once another has failed

HOST = os.uname().nodename
NODE = os.environ.get("GROUP_RANK", HOST)  # its ranks share a screen
hosts = []  # of all ranks
silent = []  # ranks without a sign of life. Rank 0 watches all others, and they watch rank 0
patient: Any = None  # a process group without a time limit, for waiting
gathers = itertools.count(1)
saving = threading.Lock()  # while it is held, nothing here ends the process
told = threading.Lock()  # the reason for the end is printed once


def is_first() -> bool:
    return os.environ.get("RANK", "0") == "0"


def say(text: str) -> None:
    """Prints the text on rank 0."""
    if is_first():
        with contextlib.suppress(OSError, RuntimeError):  # a closed pipe; a print inside a print
            print(text, flush=True)


@functools.cache
def now() -> str:
    """The time of the first call, the same on all ranks and in the whole run."""
    return grpo.all_gather([datetime.now().isoformat()])[0]


def name_of(rank: int) -> str:
    return f"rank {rank}, on {hosts[rank]}" if hosts else f"rank {rank}"


# -- Messages between ranks, whatever state they are in


def is_torchruns() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def store():
    """torchrun's store, which lives as long as the job, across restarts; else rank 0's store."""
    return connect(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))


@functools.cache
def connect(address: str, port: int):
    c10d: Any = dist
    return c10d.TCPStore(address, port, is_master=False)


def remember(name: str, value: str) -> None:
    if is_torchruns():
        store().set(name, value)


def recall(name: str) -> str:
    """The value that a process of this job has remembered, perhaps before a restart; else ""."""
    if is_torchruns() and store().check([name]):
        return store().get(name).decode()
    return ""


@functools.cache
def failure() -> str:
    """The store's key of the reason for the end. Earlier starts of the job used other keys."""
    numbers = itertools.count()
    if os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") == "0":  # torchrun restarts nothing
        return "failure 0"
    return next(name for name in map("failure {}".format, numbers) if not recall(name))


# -- The start


def join_ranks(plain, cfg, *args, **kwargs) -> torch.device:
    global patient
    check_cards(cfg)
    refuse_lone_tasks()
    is_alone = os.environ.get("WORLD_SIZE") == "1"
    if is_alone and not is_torchruns():  # one of several independent runs
        os.environ.pop("RANK", None)
    if grpo.WORLD_SIZE > 1 and is_torchruns():
        meet()
    with mistakes_in("the ranks that torchrun started cannot connect"):
        device = plain(cfg, *args, **kwargs)
        if grpo.WORLD_SIZE > 1:
            patient = dist.new_group(backend="gloo", timeout=timedelta(days=365))
    if grpo.WORLD_SIZE > 1:
        stop = threading.Event()
        thread = threading.Thread(target=watch, args=[stop], daemon=True)
        thread.start()
        cleanup.callback(thread.join)
        cleanup.callback(stop.set)
        hosts[:] = grpo.all_gather([HOST])
        require_same(digests.before_loading(cfg))
    return device


def check_cards(cfg) -> None:
    """ConfigError if a rank of this machine should have a GPU of its own, but has none."""
    is_there = torch.cuda.is_available()
    require(is_there or cfg.device != "cuda", "device", "torch finds no usable GPU here")
    if is_there and cfg.device != "cpu":
        ranks = int(os.environ.get("LOCAL_WORLD_SIZE", grpo.LOCAL_RANK + 1))
        cards = torch.cuda.device_count()
        require(ranks <= cards, "device", f"{ranks} ranks need a GPU each, but {cards} can be used")
    if not is_there and cfg.device == "auto" and has_card():
        why = "there is a GPU that torch cannot use: its driver is too old, or torch is a CPU build"
        raise ConfigError(f"--device: {why}; --device cpu runs without it")


def has_card() -> bool:
    """Runs nvidia-smi, then checks /dev: in /proc a container may see GPUs of others."""
    if os.environ.get("CUDA_VISIBLE_DEVICES", "0") in ("", "-1"):  # hidden on purpose
        return False
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, timeout=20)
        if listed.stdout.startswith(b"GPU"):
            return True
    return os.path.exists("/dev/nvidia0")


def refuse_lone_tasks() -> None:
    """ConfigError if a launcher sets no WORLD_SIZE: its processes would be runs with one seed."""
    counts = dict(srun="SLURM_STEP_NUM_TASKS", mpirun="OMPI_COMM_WORLD_SIZE", mpiexec="PMI_SIZE")
    found = [name for name, n in counts.items() if os.environ.get(n, "1") not in ("", "0", "1")]
    if {"ACCELERATE_USE_CPU", "MASTER_PORT"} <= os.environ.keys():  # set for several processes
        found.append("accelerate launch --cpu")
    if found and "WORLD_SIZE" not in os.environ:
        torchrun = "torchrun --nnodes N --nproc_per_node GPUS --rdzv_backend c10d --rdzv_endpoint"
        right = f"srun --ntasks-per-node=1 {torchrun} HOST:29500 grpo.py ..."
        why = f"{found[0]} starts processes that know nothing of each other. For one run: {right}"
        raise ConfigError(f"{why}; for separate runs: set RANK=0 WORLD_SIZE=1")


def meet() -> None:
    """Rank 0 calls, the others answer, and then all go on. After a restart torchrun's store still
    has entries of the earlier start, such as addresses where no process listens any more."""
    ours, world_size, calls = store(), grpo.WORLD_SIZE, {}
    ours.set(f"gathers of rank {grpo.RANK}", "0")

    def all_are_here() -> bool:
        return ours.add(f"here {call}", 0) == world_size - 1

    def may_go() -> bool:
        call = recall("call")
        if call.endswith(f" {world_size}") and call not in calls:
            calls[call] = ours.add(f"here {call}", 1) < world_size  # False for an old call
        return calls.get(call, False) and ours.check([f"go {call}"])

    if grpo.RANK > 0:
        wait_until(may_go)
        return
    call = f"{uuid.uuid4()} {world_size}"
    ours.set("call", call)
    wait_until(all_are_here)
    for key in ours.list_keys():
        if key.startswith("default_pg/"):  # torch's own keys
            ours.delete_key(key)
    ours.set(f"go {call}", "")


def wait_until(is_done) -> None:
    started = time.monotonic()
    while not is_done():
        time.sleep(0.05)
        if recall(failure()):
            raise TrainingError("another rank has failed")
        if time.monotonic() - started > MEETING:
            raise ConfigError(f"the ranks that torchrun started did not connect in {MEETING:.0f} s")


def require_same(mine: dict) -> None:
    """Ends the run if a rank differs from rank 0, and names the differences."""
    first, *others = grpo.all_gather([mine])
    for rank, other in enumerate(others, 1):
        names = [name for name in first.keys() & other.keys() if first[name] != other[name]]
        names.sort(key=list(first).index)
        if names:
            both = f"{first[names[0]]} and {other[names[0]]}"
            what = ", ".join(names[:5]) + ", ..." * (len(names) > 5)
            raise ConfigError(f"{name_of(0)}, and {name_of(rank)}, differ in {what} ({both})")


# -- Waiting


def all_gather(plain, items: list, *args, **kwargs) -> list:
    """Waits as long as it takes for ranks that are alive."""
    if dist.is_initialized() and grpo.WORLD_SIZE > 1:
        wait_for_ranks()
    return plain(items, *args, **kwargs)


def wait_for_ranks() -> None:
    meeting = next(gathers)
    store().set(f"gathers of rank {grpo.RANK}", str(meeting))
    arrived: Any = dist.barrier(group=patient, async_op=True)
    started, patience = time.monotonic(), PATIENCE
    while not arrived.is_completed():  # a blocking wait would delay signals: see runs.py
        time.sleep(0.001)
        if silent:
            names = " and ".join(map(name_of, silent))
            raise TrainingError(f"for {PATIENCE:.0f} s no sign of life from {names}")
        if grpo.RANK == 0 and time.monotonic() - started > patience:
            others = range(grpo.WORLD_SIZE)
            missing = [r for r in others if store().add(f"gathers of rank {r}", 0) < meeting]
            say(f"rank 0 has waited {patience:.0f} s for the ranks {missing}")
            patience *= 2


def watch(stop: threading.Event) -> None:
    """A thread that shows that this rank is alive, and checks whether others are and whether one
    failed. In an update the main thread waits in compiled code, and can do neither."""
    watched = range(1, grpo.WORLD_SIZE) if grpo.RANK == 0 else [0]
    signs, since = {}, {}
    with contextlib.suppress(RuntimeError):  # the store is gone, and the job with it
        while not stop.wait(min(1, PATIENCE / 10)):
            store().add(f"signs of rank {grpo.RANK}", 1)
            if store().check([failure()]):
                end_for_another()
            started = time.monotonic()
            for rank in watched:
                sign = store().add(f"signs of rank {rank}", 0)
                if signs.get(rank) != sign:
                    signs[rank], since[rank] = sign, started
            gone = [rank for rank in watched if started - since[rank] > PATIENCE]
            if gone and gone != silent:
                say(f"for {PATIENCE:.0f} s no sign of life from {' and '.join(map(name_of, gone))}")
            silent[:] = gone


# -- The end


def leave(error: BaseException) -> None:
    """Ends a failed rank of several, with its own line, or with the line of the rank that failed
    first. It closes nothing: vLLM would destroy the process group, which waits for ranks that are
    in an all-reduce with this one."""
    if grpo.WORLD_SIZE == 1:
        return
    line, code = describe(error)
    own = line or f"{type(error).__name__}: {error}"
    if not own.startswith("rank "):
        own = f"rank {grpo.RANK}, on {HOST}: {own}"
    node, rank, why = NODE, str(grpo.RANK), own
    with contextlib.suppress(RuntimeError):  # no store yet, or no longer
        if is_torchruns() or dist.is_initialized():
            may_be_torchs = isinstance(error, RuntimeError) and dist.is_initialized()
            if not line and may_be_torchs and (gone := ranks_gone()):
                why = f"{' and '.join(map(name_of, gone))}: gone"
            first = store().compare_set(failure(), "", f"{NODE} {rank} {why}")
            node, rank, why = first.decode().split(" ", 2)
    if why == own and not line:
        traceback.print_exception(error)
    word = "error" if why == own else "ends"
    tell(node, rank, f"{word}: {why}")
    if is_first() and not is_torchruns():
        time.sleep(1)  # the store is in this process, and the others ask it who failed first
    with saving:
        os._exit(code)


def ranks_gone() -> list:
    """The ranks that show no sign of life, as after kill -9."""

    def signs() -> list:
        return [store().add(f"signs of rank {rank}", 0) for rank in range(grpo.WORLD_SIZE)]

    before = signs()
    time.sleep(3)
    gone = [rank for rank, sign in enumerate(signs()) if sign == before[rank]]
    return gone if grpo.RANK not in gone else []  # else no rank shows any


def end_for_another() -> None:
    """Ends this rank from a thread: the main thread may be in an all-reduce that never ends."""
    node, rank, why = store().get(failure()).decode().split(" ", 2)
    tell(node, rank, f"ends: {why}")
    os.kill(os.getpid(), signal.SIGTERM)  # runs.py then saves the last complete step
    time.sleep(GRACE)
    with saving:
        os._exit(1)


def tell(node: str, rank: str, text: str) -> None:
    """Prints once on each node: by the rank that failed, or by the first rank of another node."""
    is_first_there = node != NODE and os.environ.get("LOCAL_RANK", "0") == "0"
    if (rank == str(grpo.RANK) or is_first_there) and told.acquire(blocking=False):
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            print(f"{Path(grpo.__file__).name}: {text}", file=sys.stderr, flush=True)
