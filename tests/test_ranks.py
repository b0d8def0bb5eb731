"""Ranks: what they send each other, which device they take, seeds."""

import os
import types

import numpy as np
import pytest
import torch

from harness import ranks
from harness.flags import ConfigError
from tests.common import CPU, random_samples

pytest_plugins = "tests.common"


def gathered():
    """On each of two ranks."""
    world = ranks.join_world(CPU.device)
    samples = random_samples(4, 2, seed=world.rank)
    for s in samples[:2]:
        s.old_logps, s.text = s.sampler_logps[::-1], "\U0001f600 \x00 ü"  # not in one piece
    found, [a, b] = world.gather(samples), [random_samples(4, 2, seed=rank) for rank in (0, 1)]
    for mine, theirs in zip([*a, *b], found, strict=True):
        assert (mine.sampler_logps == theirs.sampler_logps).all() and (
            mine.prompt.ids == theirs.prompt.ids
        ).all()
        assert theirs.sampler_logps.dtype == np.float32 and theirs.sampler_logps.flags.writeable
    assert found[0].prompt is found[1].prompt  # of a group: once
    assert (
        found[4].text == "\U0001f600 \x00 ü"
        and (found[4].old_logps == found[4].sampler_logps[::-1]).all()
    )
    assert world.gather([]) == [] and world.gather([3] * world.rank) == [3]


def test_what_ranks_send_each_other_arrives_in_their_order(fork):
    done = fork("tests.test_ranks.gathered", ranks=2)[1]()
    assert done.returncode == 0, done.stderr


def refused():
    """On each of two ranks: what only rank 0 can find, the others hear of."""
    world = ranks.join_world(CPU.device)
    assert world.first(lambda: world.rank + 7) == 7

    def fail():
        raise ConfigError(f"by rank {world.rank}")

    with pytest.raises(ConfigError, match="^by rank 0$"):
        world.first(fail)


def test_an_error_of_the_user_that_rank_0_finds_ends_every_rank(fork):
    done = fork("tests.test_ranks.refused", ranks=2)[1]()
    assert done.returncode == 0, done.stderr


def test_auto_is_never_a_silent_run_beside_a_gpu(monkeypatch):
    chosen = []
    gpus = types.SimpleNamespace(
        is_available=lambda: False, device_count=lambda: 0, set_device=chosen.append
    )
    monkeypatch.setattr(torch, "cuda", gpus)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(os.path, "exists", lambda path: path == "/proc/driver/nvidia/version")
    with pytest.raises(
        ConfigError, match="--device auto: torch for CUDA 13.0 needs a newer driver .* --device cpu"
    ):
        ranks.pick_device("auto")
    assert ranks.pick_device("cpu") == CPU.device
    monkeypatch.setattr(torch.version, "cuda", None)  # torch was installed for the CPU
    assert ranks.pick_device("auto").type in ("cpu", "mps")
    monkeypatch.setenv("LOCAL_RANK", "1")
    for count in (0, 1):
        gpus.device_count = lambda count=count: count
        with pytest.raises(
            ConfigError, match=f"--device cuda: torch sees {count} GPUs, and this is local rank 1"
        ):
            ranks.pick_device("cuda")
    gpus.device_count = lambda: 2
    assert ranks.pick_device("cuda") == torch.device("cuda", 1) and chosen == [
        1
    ]  # before any model is made


def test_seeds_are_functions_of_all_their_numbers():
    found = {
        ranks.seed_of(*numbers)
        for numbers in ((0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0), (1, 0, 2**31))
    }
    assert (
        len(found) == 5
        and all(0 <= seed < 2**62 for seed in found)
        and ranks.seed_of(0, 0, 1) in found
    )
