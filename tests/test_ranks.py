"""Ranks: what they send each other, how they meet, which device they take, random streams."""

import itertools
import os
import sys
import types

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing

from grpo import Config
from harness import engine, ranks
from harness.flags import ConfigError, say
from tests.common import CPU, random_samples

pytest_plugins = "tests.common"


def gathered():
    """On each of two ranks."""
    world = ranks.join_world(CPU.device)
    samples = random_samples(4, 2, seed=world.rank)
    for s in samples[:2]:
        s.old_logps, s.text = s.sampler_logps[::-1], "\U0001f600 \x00 ü"  # not in one piece
    everyone = world.gather(samples)
    expected = random_samples(4, 2, seed=0) + random_samples(4, 2, seed=1)
    for mine, theirs in zip(expected, everyone, strict=True):
        assert (mine.sampler_logps == theirs.sampler_logps).all()
        assert (mine.prompt.ids == theirs.prompt.ids).all()
        assert theirs.sampler_logps.dtype == np.float32 and theirs.sampler_logps.flags.writeable
    assert everyone[0].prompt is everyone[1].prompt  # once for a group
    assert everyone[4].text == "\U0001f600 \x00 ü"
    assert (everyone[4].old_logps == everyone[4].sampler_logps[::-1]).all()
    assert world.gather([]) == [] and world.gather([3] * world.rank) == [3]


def test_what_ranks_send_each_other_arrives_in_their_order(fork):
    done = fork("tests.test_ranks.gathered", ranks=2)[1]()
    assert done.returncode == 0, done.stderr


def refused():
    """On each of two ranks: an error that only rank 0 can find is raised on both."""
    world = ranks.join_world(CPU.device)
    assert world.first(lambda: world.rank + 7) == 7

    def fail():
        raise ConfigError(f"by rank {world.rank}")

    with pytest.raises(ConfigError, match="^by rank 0$"):
        world.first(fail)


def test_a_users_error_on_rank_0_ends_every_rank(fork):
    done = fork("tests.test_ranks.refused", ranks=2)[1]()
    assert done.returncode == 0, done.stderr


def differing():
    """On each of two ranks: one line that names what differs, on both."""
    world = ranks.join_world(CPU.device)
    world.same({"--beta": 0.1, "--train_data": "3f2a", "--chat": None})
    message = "^--train_data, --beta: not the same on rank 1 as on rank 0; [^\n]*$"
    with pytest.raises(ConfigError, match=message):
        world.same({"--seed": 1, "--train_data": f"{world.rank}a", "--beta": float(world.rank)})
    given = {"--beta": 0.0} if world.rank else {}  # a flag that only one machine was given
    with pytest.raises(ConfigError, match="^--beta: not the same on rank 1"):
        world.same(given)


def test_ranks_that_hold_different_things_are_refused(fork):
    done = fork("tests.test_ranks.differing", ranks=2)[1]()
    assert done.returncode == 0, done.stderr
    CPU.same({"--beta": 0.1})  # one rank agrees with itself


def in_a_group_of_its_own(rank, store):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        os.environ.pop(name, None)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    world = ranks.join_world(CPU.device)
    assert (world.rank, world.size, world.made_group) == (rank, 2, False)
    assert world.gather([rank]) == [0, 1]
    with open(f"{store}.{rank}", "w") as output:
        sys.stdout = output
        say("once")
        sys.stdout = sys.__stdout__
    ranks.leave_world(world)
    dist.barrier()  # the caller's group is still there
    kind, why = engine.choose_sampler(Config(), CPU.device, False)
    assert kind == "hf" and why.startswith("vLLM would end the caller's process group")
    with pytest.raises(ConfigError, match="^--rollout vllm: vLLM would end .* --rollout hf"):
        engine.choose_sampler(Config(rollout="vllm"), CPU.device, True)


def test_the_callers_process_group_is_joined(tmp_path):
    """As with torch.multiprocessing.spawn: not two runs of one rank. It outlives the run, which it
    would not with vLLM."""
    store = str(tmp_path / "store")
    torch.multiprocessing.start_processes(
        in_a_group_of_its_own, (store,), nprocs=2, start_method="fork"
    )
    assert [(tmp_path / f"store.{rank}").read_text() for rank in (0, 1)] == ["once\n", ""]


@pytest.fixture
def unlaunched(monkeypatch):
    """The environment of a program that no launcher started."""
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)


def test_an_incomplete_launch_is_named(unlaunched, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    message = "^RANK is set, MASTER_ADDR, MASTER_PORT, WORLD_SIZE not: start .* torchrun"
    with pytest.raises(ConfigError, match=message):
        ranks.join_world(CPU.device)


def test_tasks_that_train_alone_are_told(unlaunched, monkeypatch, capsys):
    monkeypatch.setenv("SLURM_NTASKS", "1")
    assert ranks.join_world(CPU.device) == CPU
    assert capsys.readouterr().out == ""
    monkeypatch.setenv("SLURM_NTASKS", "2")
    assert ranks.join_world(CPU.device) == CPU
    assert "warning: SLURM_NTASKS is 2, but this process trains alone" in capsys.readouterr().out


def test_auto_is_never_a_silent_run_beside_a_gpu(monkeypatch):
    chosen = []
    gpus = types.SimpleNamespace(
        is_available=lambda: False, device_count=lambda: 0, set_device=chosen.append
    )
    monkeypatch.setattr(torch, "cuda", gpus)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(os.path, "exists", lambda path: path == "/proc/driver/nvidia/version")
    message = "--device auto: torch for CUDA 13.0 needs a newer driver .* --device cpu"
    with pytest.raises(ConfigError, match=message):
        ranks.pick_device("auto")
    assert ranks.pick_device("cpu") == CPU.device
    monkeypatch.setattr(torch.version, "cuda", None)  # torch was installed for the CPU
    assert ranks.pick_device("auto") == CPU.device

    monkeypatch.setenv("LOCAL_RANK", "1")
    for count in (0, 1):
        gpus.device_count = lambda count=count: count
        message = f"--device cuda: torch sees {count} GPUs, and this is local rank 1"
        with pytest.raises(ConfigError, match=message):
            ranks.pick_device("cuda")
    gpus.device_count = lambda: 2
    assert ranks.pick_device("cuda") == torch.device("cuda", 1)
    assert chosen == [1]  # before any model is made


def test_a_mac_trains_on_its_cpu_unless_asked(monkeypatch):
    """With torch.backends.mps as on a Mac."""
    with pytest.raises(ConfigError, match="^--device mps: torch finds no Apple GPU here$"):
        ranks.pick_device("mps")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert ranks.pick_device("auto") == CPU.device
    mps = ranks.pick_device("mps", "float32")
    assert mps == torch.device("mps")
    with pytest.raises(ConfigError, match="^--device mps: has no float64; --device cpu has$"):
        ranks.pick_device("mps", "float64")
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    for size in (1, 2):
        monkeypatch.setattr(dist, "get_world_size", lambda size=size: size)
        if size == 1:
            assert ranks.join_world(mps) == ranks.World(0, 1, mps)
            continue
        with pytest.raises(ConfigError, match="^--device mps: one rank only, [^\n]*$"):
            ranks.join_world(mps)


def state(*numbers):
    return tuple(np.random.SeedSequence(numbers).generate_state(4, np.uint64).tolist())


def test_every_random_stream_is_one_of_its_own():
    """numpy fills short tuples with zeros: (0, 0, 3, 2) and (0, 0, 3, 2, 0) must not both occur."""
    names = ("SAMPLING", "PROMPT_ORDER", "EVAL", "TORCH", "NOISE", "MINIBATCHES")
    states = {}
    for name, step, number in itertools.product(names, range(4), range(6)):
        if name == "SAMPLING" and step == 0:
            continue  # steps are counted from 1
        if name == "PROMPT_ORDER" and step > 0:
            continue  # the order is the epoch's, and no step's
        for seed in (0, 1, 2, 3):
            numbers = ranks.stream(seed, getattr(ranks, name), step, number)
            states.setdefault(state(*numbers), []).append((name, seed, step, number))
    assert all(len(same) == 1 for same in states.values())
    assert len(states) == 4 * (3 * 6 + 6 + 4 * 4 * 6)


def test_the_streams_of_earlier_runs_are_the_same():
    """Samples, and the order of the first epoch's rows, to the bit."""
    for seed, step, prompt in ((0, 1, 0), (3, 20, 31)):
        sampling = ranks.stream(seed, ranks.SAMPLING, step, prompt)
        assert ranks.seed_of(*sampling) == ranks.seed_of(seed, 0, step, prompt)
        assert state(*ranks.stream(seed, ranks.PROMPT_ORDER, number=0)) == state(seed, 0)


def test_seeds_are_functions_of_all_their_numbers():
    numbers = ((0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0), (1, 0, 2**31))
    seeds = {ranks.seed_of(*some) for some in numbers}
    assert len(seeds) == 5 and all(0 <= seed < 2**62 for seed in seeds)
    assert ranks.seed_of(0, 0, 1) in seeds
