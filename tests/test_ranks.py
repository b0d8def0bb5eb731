"""TODO."""

import itertools

import numpy as np
import pytest

import grpo
import harness.log
import harness.ranks
from grpo import Config, Sample
from harness.ranks import World
from tests.common import CPU, random_samples

pytest_plugins = "tests.common"


def test_ranks_finish_together_and_nothing_is_lost():
    samples = random_samples(23, 1, longest=40)
    shares = grpo.deal(samples, 3, False)
    assert sorted(map(id, sum(shares, []))) == sorted(map(id, samples))
    loads = [sum(map(len, share)) for share in shares]
    assert max(loads) - min(loads) <= max(map(len, samples))
    for share in shares:
        for micro in grpo.pack(share, 100, False):
            assert len(micro) * max(map(len, micro)) <= 100 or len(micro) == 1


@pytest.mark.parametrize("shared", [False, True])
def test_dealing_and_packing_ask_for_a_length_a_few_times_however_large_a_micro_batch(shared, monkeypatch):
    asked, samples = [], random_samples(64, 4, longest=40)

    class Counted(Sample):
        def __len__(self):
            asked.append(self)
            return super().__len__()

    samples = [Counted(**vars(s)) for s in samples]
    for n_ranks, budget in ((1, 100), (1, 10**6), (16, 10**6)):
        asked.clear()
        shares = grpo.deal(samples, n_ranks, shared)
        packed = [grpo.pack(share, budget, shared) for share in shares]
        assert len(asked) <= 8 * len(samples)
        assert sum(sum(packed, []), []) == sum(shares, [])
        for share in packed:  # where one ends, the next sample has no room in it, or is much shorter
            for micro, (after, *_) in itertools.pairwise(share):
                full = grpo.tokens_of([*micro, after], shared) > budget
                ragged = len(after) < 0.8 * len(micro[0]) and 4 * grpo.tokens_of(micro, shared) > budget
                assert full or (not shared and ragged)
            assert all(len(micro) == 1 or grpo.tokens_of(micro, shared) <= budget for micro in share)


def test_what_ranks_send_each_other():
    """Arrays as they lie in memory, the rest pickled; on arrival they are not copied, but can be written to."""
    samples, row = random_samples(4, 2), np.arange(12, dtype=np.float32).reshape(3, 4)
    samples[0].extra, samples[1].sampler_logps = dict(column=row[:, 1], empty=row[:0]), None  # not in one piece
    samples[2].text = "\U0001f600 \x00 ü"
    data = harness.ranks.to_bytes(samples)
    assert len(data) < 400 * len(samples) + 12 * sum(map(len, samples))
    received = np.concatenate([data, np.full(9, 7, np.uint8)])  # those of the largest rank are as long
    found = harness.ranks.from_bytes(received)
    for a, b in zip(samples, found, strict=True):
        for name, value in vars(a).items():
            if isinstance(value, np.ndarray):
                other = getattr(b, name)
                assert other.dtype == value.dtype and (other == value).all()
                assert np.shares_memory(other, received) and other.flags.aligned and other.flags.writeable
            elif name not in ("prompt", "extra"):
                assert value == getattr(b, name)
        assert (a.prompt.ids == b.prompt.ids).all() and a.prompt.row == b.prompt.row
    assert found[0].prompt is found[1].prompt  # of a group: once
    assert (found[0].extra["column"] == row[:, 1]).all() and found[0].extra["empty"].shape == (0, 4)
    assert harness.ranks.from_bytes(harness.ranks.to_bytes([])) == [] and harness.ranks.from_bytes(
        harness.ranks.to_bytes([3])
    ) == [3]


def test_the_gap_of_a_rollout_is_summed_up_by_the_ranks_together():
    samples, cfg, sums = random_samples(6, 4), Config(max_sampler_gap=1e9), []
    for s in samples:
        s.old_logps = s.sampler_logps + 0.01

    class Rank(World):
        def gather(self, items):
            sums.extend(items)
            return list(sums)

    for rank in range(3):
        metrics = harness.log.rollout_gap(samples, cfg, Rank(rank, 3, CPU.device))
    counts = [part["n"] for part, _ in sums]
    assert sum(counts) == sum(len(s.completion_ids) for s in samples) and max(counts) < 0.6 * sum(counts)
    assert metrics["sampler_gap"] == pytest.approx(harness.log.rollout_gap(samples, cfg, CPU)["sampler_gap"])
