"""The algorithm's own tests: gradient, advantages, KL, objective, policy, update. CPU only."""

import dataclasses
import gc
import itertools
import json
import math
import os
import shutil
import subprocess
import sys
import types

import numpy as np
import pytest
import torch

import grpo
import harness.checkpoints
import harness.log
import harness.models
import harness.ranks
import harness.rows
import harness.run
import harness.scorer
import harness.workers
import reward
from grpo import Config, group_advantages, grpo_loss, kl_estimate
from harness.flags import ConfigError, TrainingError
from tests.common import (
    BUNDLED,
    CPU,
    F64,
    HERE,
    MODELS,
    REDUCTIONS,
    Recorder,
    fast_policy,
    ids_of,
    in_bfloat16,
    lines,
    logps_of,
    random_samples,
    read,
    relative,
    run,
    small_run,
    tiny_model,
    update_gradient,
)

pytest_plugins = "tests.common"


def samples_of_ranks(dtype, reduction):
    """What gradients_of_ranks() and the one process that it is compared with train on."""
    samples = random_samples(15, 5, np.float64 if dtype == F64 else np.float32)
    samples[3].in_loss[:] = reduction != "sequence"
    return samples


def gradients_of_ranks(out):
    """Run by every rank: rank 0 writes the gradient of every reduction, and what a zero-signal step did."""
    world = harness.ranks.join_world(torch.device("cpu"))
    results = {}
    for dtype, reduction in itertools.product((torch.float32, F64), REDUCTIONS):
        policy = fast_policy(tiny_model(dtype=dtype), 0.8)
        ddp = grpo.wrap(policy, Config(), world)
        assert policy.model.get_input_embeddings().sparse == (
            dtype == F64
        )  # GPT-2 ties its embeddings
        samples = samples_of_ranks(dtype, reduction)
        cfg = Config(
            loss_reduction=reduction,
            beta=0.1,
            temperature=0.8,
            micro_batch_tokens=40,
            max_grad_norm=0,
        )
        grad, metrics = update_gradient(
            cfg, samples, dtype, ddp, policy, world, packs=reduction != "token"
        )
        results[f"{dtype} {reduction}"] = (grad, metrics["loss"])
    for samples in (
        random_samples(1, 1),
        random_samples(2, 2),
    ):  # fewer samples than ranks: the others join in idle
        grad, metrics = update_gradient(cfg, samples, F64, ddp, policy, world)
        results[f"few {len(samples)}"] = (grad, metrics["loss"])
    if world.rank == 0:
        torch.save(results, out)
    torch.distributed.barrier()
    del ddp
    gc.collect()  # as train() does, and why: there
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize(
    "options", [{}, {"ratio_level": "sequence"}, {"kl_in": "reward", "kl_estimator": "k1"}]
)
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-6), (F64, 1e-12)])
def test_gradient_is_the_same_for_every_micro_batch_split(dtype, tolerance, reduction, options):
    cfg = Config(loss_reduction=reduction, beta=0.1, max_grad_norm=0, **options)
    samples = random_samples(15, 5, np.float64 if dtype == F64 else np.float32)
    once = dataclasses.replace(cfg, micro_batch_tokens=10**6)
    whole, metrics = update_gradient(once, samples, dtype, packs=False)
    assert whole.norm() > 1e-3
    policy = fast_policy(tiny_model(dtype=dtype), 1.0)
    splits = (
        (1, True),
        (45, True),
        (45, False),
        (100, False),
    )  # one sample; a few; groups of 5 split in the middle
    for budget, packs in splits:
        split = dataclasses.replace(cfg, micro_batch_tokens=budget)
        part, m = update_gradient(split, samples, dtype, policy=policy, packs=packs)
        assert relative(part, whole) < tolerance
        assert m["loss"] == pytest.approx(metrics["loss"], rel=tolerance, abs=tolerance)
        assert m["kl"] == pytest.approx(metrics["kl"], rel=1e-6)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("size", [1, 3, 7, 15])
def test_loss_of_the_parts_sums_to_the_whole(reduction, size):
    torch.manual_seed(0)
    N, T = 15, 9
    logps, old, ref, sampler = (torch.randn(4, N, T, dtype=F64) * 0.5 - 1).unbind()
    mask = torch.arange(T) < torch.randint(1, T + 1, (N, 1))
    advantages, cfg = torch.randn(N, dtype=F64), Config(loss_reduction=reduction, beta=0.2)
    counts = (int(mask.sum()), N)
    logps.requires_grad_()
    (whole,) = torch.autograd.grad(
        grpo_loss(logps, old, ref, sampler, advantages, mask, cfg, *counts)[0], logps
    )
    total, grad = 0.0, torch.zeros_like(whole)
    for rows in torch.arange(N).split(size):
        parts = [x[rows] for x in (logps, old, ref, sampler, advantages, mask)]
        loss, _ = grpo_loss(*parts, cfg, *counts)
        grad += torch.autograd.grad(loss, logps)[0]
        total += loss.item()
    assert total == pytest.approx(
        grpo_loss(logps, old, ref, sampler, advantages, mask, cfg, *counts)[0].item(), rel=1e-12
    )
    assert relative(grad, whole) < 1e-12


@pytest.fixture(scope="module", params=[2, 3])
def ranks(request, fork, tmp_path_factory):
    out = tmp_path_factory.mktemp("ranks") / "out.pt"
    done = fork("test_grpo.gradients_of_ranks", out, ranks=request.param)[1]()
    assert done.returncode == 0, done.stderr[-3000:]
    return torch.load(out)


def test_gradient_is_the_same_for_1_2_and_3_processes(ranks):
    for dtype, tolerance in ((torch.float32, 1e-6), (F64, 1e-12)):
        for reduction in REDUCTIONS:
            samples = samples_of_ranks(dtype, reduction)
            cfg = Config(
                loss_reduction=reduction,
                beta=0.1,
                temperature=0.8,
                micro_batch_tokens=10**6,
                max_grad_norm=0,
            )
            whole, metrics = update_gradient(cfg, samples, dtype)
            grad, loss = ranks[f"{dtype} {reduction}"]
            assert relative(grad, whole) < tolerance
            assert loss == pytest.approx(metrics["loss"], rel=tolerance, abs=tolerance)


def test_more_ranks_than_samples(ranks):
    cfg = Config(
        loss_reduction="constant", beta=0.1, temperature=0.8, micro_batch_tokens=40, max_grad_norm=0
    )
    for samples in random_samples(1, 1), random_samples(2, 2):
        whole, metrics = update_gradient(cfg, samples, F64)
        grad, loss = ranks[f"few {len(samples)}"]
        assert relative(grad, whole) < 1e-12 and loss == pytest.approx(metrics["loss"], rel=1e-12)


def test_no_mean_of_means():
    """100 tokens of loss 0.5 and 900 of loss 0.3 are 0.32, not 0.4; on the advantages' scale, as two micro-batches."""
    cfg, loss = Config(beta=0.0), 0.0
    for n, value in ((100, 0.5), (900, 0.3)):
        logps = torch.zeros(1, n)
        loss += grpo_loss(
            logps, logps, None, None, torch.tensor([-value]), torch.ones(1, n), cfg, 1000, 2
        )[0].item()
    assert loss == pytest.approx(0.32)


def test_group_advantages():
    r = torch.tensor([1.0, 0.0, 0.0, 1.0, 3.0, 1.0, 1.0, 1.0])
    a = group_advantages(r, 4)
    std = torch.tensor([1.0, 0, 0, 1]).std()  # ddof 1
    assert torch.allclose(a[:4], torch.tensor([0.5, -0.5, -0.5, 0.5]) / (std + 1e-4))
    assert torch.allclose(group_advantages(r, 4, "none")[4:], torch.tensor([1.5, -0.5, -0.5, -0.5]))
    assert torch.allclose(
        group_advantages(r, 4, "batch"), group_advantages(r, 4, "none") / (r.std() + 1e-4)
    )
    assert group_advantages(r, 4, eps=1.0)[0] < a[0]


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_equal_rewards_give_exactly_zero(scale):
    r = torch.tensor([0.1 + 0.2, 0.3, 0.3, 0.1, 0.2, 0.7], dtype=F64)  # float noise is no signal
    assert (group_advantages(r, 3, scale)[:3] == 0).all()
    assert (group_advantages(r, 3, scale)[3:] != 0).any()
    assert (group_advantages(torch.full((6,), 0.7), 3, scale) == 0).all()


def test_small_differences_of_large_rewards_are_a_signal():
    r = torch.tensor([1e6, 1e6 + 0.5, 1e6, 1e6 + 1.0], dtype=F64)
    for scale in ("group", "batch", "none"):
        assert (group_advantages(r, 4, scale) != 0).all() and (
            group_advantages(r + 1e9, 4, scale) != 0
        ).all()
        assert (group_advantages(torch.full((4,), 1e6 + 0.1, dtype=F64), 4, scale) == 0).all()


def test_rewards_of_which_few_are_there_give_no_nan():
    one = torch.tensor([1.0, math.nan, math.nan, math.nan])
    for scale in ("group", "batch", "none"):
        assert (group_advantages(one, 4, scale) == 0).all()
        assert (group_advantages(torch.full((8,), math.nan), 4, scale) == 0).all()


def test_an_excluded_reward_leaves_the_others_alone():
    r = torch.tensor([1.0, math.nan, 0.0, 0.5])
    a = group_advantages(r, 4, "none")
    assert a[1] == 0 and torch.allclose(a[[0, 2, 3]], torch.tensor([0.5, -0.5, 0.0]))


def test_advantage_noise_is_seeded_by_the_step_and_has_mean_zero():
    samples = random_samples(4000, 8)
    for s in samples:
        s.reward = 1.0

    def noise(step, level):
        grpo.assign_advantages(samples, step, Config(num_generations=8, advantage_noise=level))
        return np.array([s.advantages[0] for s in samples])

    assert (noise(1, 0.0) == 0).all()
    a, b, again = noise(1, 0.1), noise(2, 0.1), noise(1, 0.1)
    assert (a == again).all() and (a != b).any()
    assert abs(a.mean()) < 4 * 0.1 / math.sqrt(4000) and a.std() == pytest.approx(0.1, rel=0.1)


def test_masked_truncation_counts_in_the_baseline_but_not_in_the_loss():
    cfg = Config(num_generations=4, mask_truncated=True, non_stop_reward=None)
    samples = random_samples(4, 4)
    for s, r, finish in zip(
        samples, (1.0, 0.0, 0.0, 0.0), ("stop", "stop", "length", "length"), strict=True
    ):
        s.reward, s.finish_reason = r, finish
    grpo.assign_advantages(samples, 1, cfg)
    assert samples[0].advantages[0] == pytest.approx(
        0.75 / (0.5 + 1e-4)
    )  # the mean is over all four
    grad, metrics = update_gradient(cfg, samples)
    only, metrics_only = update_gradient(cfg, samples[:2])
    assert relative(grad, only) < 1e-6  # numerator and denominator
    for key in ("loss", "entropy", "kl", "sampler_gap"):
        assert metrics[key] == pytest.approx(metrics_only[key], rel=1e-5)


V, LENGTH = 4, 3


SEQUENCES = torch.tensor(list(itertools.product(range(V), repeat=LENGTH)))  # [V^T, T]


class Toy:
    """Every sequence of 3 tokens over 4 words, each conditional a free table: all expectations are sums."""

    def __init__(self, seed, scale, base=None):
        g = torch.Generator().manual_seed(seed)
        self.tables = [torch.randn(V**t, V, generator=g, dtype=F64) * scale for t in range(LENGTH)]
        if base:
            self.tables = [a + b for a, b in zip(self.tables, base.tables, strict=True)]
        self.tables = [t.detach().requires_grad_() for t in self.tables]

    def conditionals(self):  # T x [V^T, V]
        prefix = [
            (SEQUENCES[:, :t] * torch.tensor([V ** (t - 1 - i) for i in range(t)])).sum(1)
            for t in range(LENGTH)
        ]
        return [
            table.log_softmax(-1)[p.long()] for table, p in zip(self.tables, prefix, strict=True)
        ]

    def logps(self):  # [V^T, T]
        return torch.stack(
            [c.gather(1, SEQUENCES[:, t, None])[:, 0] for t, c in enumerate(self.conditionals())], 1
        )

    def grad(self, value):
        return torch.cat(
            [g.flatten() for g in torch.autograd.grad(value, self.tables, allow_unused=False)]
        )


def local_kl(policy, reference):
    """Sum over positions of the exact KL of the next-token distributions: [V^T, T]."""
    pairs = zip(policy.conditionals(), reference.conditionals(), strict=True)
    return torch.stack([(p.exp() * (p - q)).sum(1) for p, q in pairs], 1)


@pytest.fixture(scope="module", params=[0.15, 0.6, 1.5], ids=["near", "mid", "far"])
def toy(request):
    reference = Toy(0, 1.0)
    policy = Toy(1, request.param, reference)
    return policy, reference, Toy(2, 0.3, policy)  # the last one: an older policy that sampled


def test_kl_values_in_expectation(toy):
    policy, reference, _ = toy
    lp, ref = policy.logps(), reference.logps()
    p = lp.sum(1).exp()
    exact = (p[:, None] * local_kl(policy, reference)).sum(
        0
    )  # [T]: E over prefixes of the token's KL
    for name in ("k1", "k3", "k4", "wk3"):
        found = (p[:, None] * kl_estimate(lp, ref, lp, name)).sum(0)
        assert torch.allclose(found, exact, rtol=1e-12)
    d = lp - ref
    assert torch.equal(kl_estimate(lp, ref, lp, "k2"), d**2 / 2)
    assert torch.allclose(kl_estimate(lp, ref, lp, "k3"), (-d).exp() - 1 + d, rtol=1e-9)


def expected_gradient(policy, reference, sampler, estimator):
    """E over the sampler's sequences of the gradient of the token sum; prefixes are weighted by the sampler."""
    q = sampler.logps().sum(1).exp().detach()
    estimate = kl_estimate(
        policy.logps(), reference.logps().detach(), sampler.logps().detach(), estimator
    )
    return policy.grad((q[:, None] * estimate).sum())


def test_kl_gradients_on_policy(toy, request):
    """The table of REFERENCE.md: what each estimator's expected gradient is, against that of the exact local KL."""
    policy, reference, _ = toy
    q = policy.logps().sum(1).exp().detach()
    exact = policy.grad((q[:, None] * local_kl(policy, reference)).sum())
    on_policy = {
        e: expected_gradient(policy, reference, policy, e) for e in ("k1", "k2", "k3", "k4", "wk3")
    }
    assert on_policy["k1"].norm() < 1e-12 * exact.norm() + 1e-14  # zero mean: pure noise
    for name in ("k2", "k4", "wk3"):
        assert relative(on_policy[name], exact) < 1e-12
    bias = relative(on_policy["k3"], exact)
    assert bias > {"near": 0.01, "mid": 0.1, "far": 0.3}[request.node.callspec.id]


def test_kl_gradients_off_policy(toy):
    """With the older policy's samples only the weighted estimators have the KL's gradient."""
    policy, reference, older = toy
    q = older.logps().sum(1).exp().detach()
    exact = policy.grad((q[:, None] * local_kl(policy, reference)).sum())
    for name in ("k4", "wk3"):
        assert relative(expected_gradient(policy, reference, older, name), exact) < 1e-12
    for name in ("k1", "k2", "k3"):
        assert relative(expected_gradient(policy, reference, older, name), exact) > 1e-3


def test_gradient_identity_of_wk3():
    lp, ref, old = torch.randn(3, 5, 7, dtype=F64).unbind()
    lp.requires_grad_()
    (grad,) = torch.autograd.grad(kl_estimate(lp, ref, old, "wk3").sum(), lp)
    assert torch.allclose(grad, (lp - old).exp() * (lp - ref))  # d(w k3)/dlogp = w k1


def test_kl_in_reward_has_the_gradient_of_the_sequence_kl(toy):
    """k1 reward-to-go, through grpo_loss itself: exact for the KL of whole sequences, which no loss term is."""
    policy, reference, _ = toy
    exact = policy.grad(
        (policy.logps().sum(1).exp() * (policy.logps() - reference.logps()).sum(1)).sum()
    )
    cfg = Config(
        beta=0.3,
        kl_in="reward",
        kl_estimator="k1",
        loss_reduction="constant",
        max_completion_length=1,
    )
    lp, n = policy.logps(), len(SEQUENCES)
    # one "sequence" per element of the sum, weighted by its probability through the mask-independent batch of one
    total = 0.0
    for i, p in enumerate(lp.sum(1).exp().detach()):
        row = lp[i : i + 1]
        loss, _ = grpo_loss(
            row, row.detach(), reference.logps()[i : i + 1].detach(), None, torch.zeros(1, dtype=F64),
            torch.ones_like(row), cfg, 3, 1,
        )  # fmt: skip
        total = total + p * loss
    assert n == V**LENGTH
    assert relative(policy.grad(total), cfg.beta * exact) < 1e-12


def test_kl_survives_large_ratios():
    lp = torch.tensor([[-200.0, 0.0]], requires_grad=True)
    for name in ("k1", "k2", "k3", "k4", "wk3"):
        value = kl_estimate(lp, torch.tensor([[0.0, -300.0]]), lp.detach(), name)
        (grad,) = torch.autograd.grad(value.sum(), lp)
        assert value.isfinite().all() and grad.isfinite().all()


@pytest.mark.parametrize("d", [-60.0, -25.0, -19.0, -18.0, -5.0, 0.0, 3.0, 40.0])
def test_the_slope_of_wk3_is_w_times_d_at_any_distance(d):
    """In float32, where exp(-d) swallows d from 18 on; and k3 pulls towards the reference, however far."""
    logps = torch.tensor([[-1.5]], requires_grad=True)
    ref, old = logps.detach() - d, logps.detach() - 0.5
    (grad,) = torch.autograd.grad(kl_estimate(logps, ref, old, "wk3"), logps)
    assert grad.item() == pytest.approx(math.exp(0.5) * d, rel=1e-5, abs=1e-6)
    (grad,) = torch.autograd.grad(kl_estimate(logps, ref, old, "k3"), logps)
    assert math.copysign(1, grad.item()) == math.copysign(1, d) or d == 0
    if abs(d) < 19:
        assert grad.item() == pytest.approx(1 - math.exp(-d), rel=1e-4, abs=1e-6)


def on_policy_batch(seed=0, N=12, T=8):
    g = torch.Generator().manual_seed(seed)
    logps = -torch.rand(N, T, generator=g, dtype=F64) - 0.1
    mask = torch.arange(T) < torch.randint(1, T + 1, (N, 1), generator=g)
    rewards = torch.randint(0, 2, (N,), generator=g).to(F64)
    return logps.requires_grad_(), mask, group_advantages(rewards, 4)


def test_first_step_value_is_zero_and_gradient_is_not():
    logps, mask, advantages = on_policy_batch()
    counts = (int(mask.sum()), len(mask))
    for beta in (0.0, 0.5):
        ref = logps.detach() - 0.1
        cfg = Config(beta=beta, loss_reduction="sequence", kl_estimator="k3")
        loss, _ = grpo_loss(logps, logps.detach(), ref, None, advantages, mask, cfg, *counts)
        k3 = math.exp(-0.1) - 1 + 0.1
        assert loss.item() == pytest.approx(beta * k3, abs=1e-12)
        (grad,) = torch.autograd.grad(loss, logps)
        assert grad.norm() > 0.01
    # token reduction: minus the covariance of advantage and length, over the mean length
    loss, _ = grpo_loss(
        logps, logps.detach(), None, None, advantages, mask, Config(beta=0), *counts
    )
    lengths = mask.sum(1).double()
    covariance = ((lengths - lengths.mean()) * (advantages - advantages.mean())).mean()
    assert loss.item() == pytest.approx((-covariance / lengths.mean()).item())
    # where the ratio is 1, the gradient is plain REINFORCE's
    (grad,) = torch.autograd.grad(loss, logps)
    assert torch.allclose(grad, torch.where(mask, -advantages[:, None] / mask.sum(), 0.0))


def test_advantage_noise_changes_the_value_but_not_the_expected_gradient():
    logps, mask, advantages = on_policy_batch()
    cfg = Config(beta=0, loss_reduction="sequence")

    def gradient(a):
        loss, _ = grpo_loss(
            logps, logps.detach(), None, None, a, mask, cfg, int(mask.sum()), len(mask)
        )
        return loss.item(), torch.autograd.grad(loss, logps)[0]

    _, exact = gradient(advantages)
    noise = (
        torch.randn(500, len(advantages), dtype=F64, generator=torch.Generator().manual_seed(0))
        * 0.1
    )
    noise = torch.cat([noise, -noise])  # antithetic: the mean is exactly zero
    values, grads = zip(*(gradient(advantages + e) for e in noise), strict=True)
    assert min(map(abs, values)) > 0
    assert relative(torch.stack(grads).mean(0), exact) < 1e-12


def test_clipping_is_asymmetric_and_sign_aware():
    cfg = Config(beta=0, clip_low=0.2, clip_high=0.28)
    for ratio, advantage, active in (
        (1.5, 1, True), (0.5, 1, False), (1.5, -1, False), (0.5, -1, True), (1.27, 1, False), (0.81, -1, False),
    ):  # fmt: skip
        logps = torch.tensor([[math.log(ratio)]], dtype=F64, requires_grad=True)
        one = torch.ones(1, 1)
        loss, stats = grpo_loss(
            logps, torch.zeros(1, 1, dtype=F64), None, None, advantage * one[0], one, cfg, 1, 1
        )
        (grad,) = torch.autograd.grad(loss, logps)
        assert (grad.item() == 0) is active and stats["clip_ratio/region_mean"].item() == active
        clipped = min(max(ratio, 0.8), 1.28)
        assert loss.item() == pytest.approx(-min(ratio * advantage, clipped * advantage))


def test_gspo_takes_the_geometric_mean_of_the_ratios():
    cfg = Config(
        beta=0, ratio_level="sequence", loss_reduction="sequence", clip_low=1, clip_high=10
    )
    logps, old = torch.randn(2, 3, 5, dtype=F64).unbind()
    mask = torch.arange(5) < torch.tensor([[5], [2], [3]])
    a = torch.tensor([1.0, -1.0, 0.5], dtype=F64)
    logps.requires_grad_()
    loss, _ = grpo_loss(logps, old, None, None, a, mask, cfg, 10, 3)
    ratio = ((logps - old) * mask).sum(1).div(mask.sum(1)).exp()
    assert loss.item() == pytest.approx(-(ratio * a).mean().item())
    (grad,) = torch.autograd.grad(loss, logps)
    assert torch.allclose(grad, torch.where(mask, -(ratio * a / 3 / mask.sum(1))[:, None], 0.0))
    # GSPO-token: what a token has of its own acts on that token, with the sequence's ratio as weight
    own = torch.randn(3, 5, dtype=F64)
    loss, _ = grpo_loss(logps, old, None, None, own, mask, cfg, 10, 3)
    (grad,) = torch.autograd.grad(loss, logps)
    assert torch.allclose(
        grad, torch.where(mask, -ratio[:, None] * own / 3 / mask.sum(1, keepdim=True), 0.0)
    )
    # at ratio 1 the level makes no difference, with a KL in the reward neither
    for options in (dict(beta=0), dict(beta=0.5, kl_in="reward", kl_estimator="k1")):
        grads = []
        for level in ("token", "sequence"):
            cfg = Config(ratio_level=level, **options)
            loss, _ = grpo_loss(logps, logps.detach(), old, None, a, mask, cfg, 10, 3)
            grads.append(torch.autograd.grad(loss, logps)[0])
        assert torch.allclose(*grads)


def test_truncated_importance_weights():
    logps = torch.tensor([[-1.0, -1.0, -1.0]], dtype=F64, requires_grad=True)
    sampler = torch.tensor([[-1.5, -1.0, -9.0]], dtype=F64)
    one, a = torch.ones(1, 3), torch.tensor([1.0], dtype=F64)
    (plain,) = torch.autograd.grad(
        grpo_loss(logps, logps.detach(), None, None, a, one, Config(beta=0), 3, 1)[0], logps
    )
    for cap, weights in ((2.0, [math.exp(0.5), 1, 2]), (1.2, [1.2, 1, 1.2]), (0.0, [1, 1, 1])):
        cfg = Config(beta=0, tis_cap=cap)
        loss, _ = grpo_loss(logps, logps.detach(), None, sampler, a, one, cfg, 3, 1)
        assert torch.allclose(
            torch.autograd.grad(loss, logps)[0], plain * torch.tensor([weights], dtype=F64)
        )


def test_importance_weights_keep_the_expected_gradient():
    """Samples of another distribution (a sampler in bfloat16, say), exactly, by enumeration of a small vocabulary."""
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(6, generator=g, dtype=F64, requires_grad=True)
    sampler = (logits.detach() + 0.5 * torch.randn(6, generator=g, dtype=F64)).log_softmax(0)
    value = torch.randn(6, generator=g, dtype=F64)  # the advantage of each token
    (exact,) = torch.autograd.grad(-(logits.softmax(0) * value).sum(), logits)

    def expected(cap):
        logps = logits.log_softmax(0)[
            :, None
        ]  # [N = 6, T = 1]: every token once, weighed by how often it is sampled
        args = (
            logps,
            logps.detach(),
            None,
            sampler[:, None],
            value * sampler.exp(),
            torch.ones(6, 1),
        )
        return torch.autograd.grad(grpo_loss(*args, Config(beta=0, tis_cap=cap), 1, 6)[0], logits)[
            0
        ]

    assert relative(expected(1e9), exact) < 1e-12
    assert relative(expected(0), exact) > 0.05  # without the weights it points elsewhere
    assert relative(expected(2.0), exact) < relative(expected(0), exact)


@pytest.mark.parametrize("rubbish", [math.nan, math.inf, -math.inf, 1e30])
@pytest.mark.parametrize(
    "options", [{}, {"ratio_level": "sequence"}, {"kl_in": "reward", "kl_estimator": "k1"}]
)
def test_padding_may_hold_anything(rubbish, options):
    g = torch.Generator().manual_seed(0)
    tensors = [(torch.randn(3, 6, generator=g, dtype=F64) - 1) for _ in range(4)]
    mask = torch.arange(6) < torch.tensor([[6], [2], [0]])
    advantages = torch.randn(3, 6, generator=g, dtype=F64)
    for reduction in REDUCTIONS:
        cfg, results = Config(beta=0.1, loss_reduction=reduction, **options), []
        for fill in (0.0, rubbish):
            filled = [torch.where(mask, x, fill) for x in (*tensors, advantages)]
            filled[0].requires_grad_()
            loss, stats = grpo_loss(*filled, mask, cfg, 8, 2)
            results.append(
                (
                    loss.item(),
                    torch.autograd.grad(loss, filled[0])[0],
                    {k: float(v) for k, v in stats.items()},
                )
            )
        assert results[0][0] == results[1][0] and torch.equal(results[0][1], results[1][1])
        assert results[0][2] == results[1][2] and math.isfinite(results[0][0])


def test_kl_goes_through_the_same_reduction():
    logps, old, ref = torch.randn(3, 4, 6, dtype=F64).unbind()
    mask = torch.arange(6) < torch.tensor([[6], [2], [1], [3]])
    k = torch.where(mask, kl_estimate(logps, ref, old, "wk3"), 0.0)
    expected = {
        "token": k.sum() / 12,
        "sequence": (k.sum(1) / mask.sum(1)).sum() / 4,
        "constant": k.sum() / (4 * 50),
    }
    for reduction, value in expected.items():
        cfg = Config(beta=0.7, loss_reduction=reduction, max_completion_length=50)
        loss, _ = grpo_loss(logps, old, ref, None, torch.zeros(4, dtype=F64), mask, cfg, 12, 4)
        assert loss.item() == pytest.approx(0.7 * value.item())


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("kind, options", MODELS)
def test_logps_are_the_models_own(kind, options, temperature):
    model = tiny_model(kind, **options)
    policy = fast_policy(model, temperature)
    assert policy.plain_head is (kind != "gemma2")
    samples = random_samples(7, 7)
    together, entropy = logps_of(policy, samples)
    for i, s in enumerate(samples):
        ids = torch.tensor(np.concatenate([s.prompt.ids, s.completion_ids]))[None]
        logits = model(ids).logits[0, len(s.prompt.ids) - 1 : -1]
        expected = (logits / temperature).log_softmax(-1)
        n = len(s.completion_ids)
        assert torch.allclose(
            together[i, :n], expected[torch.arange(n), s.completion_ids], atol=1e-5
        )
        assert torch.allclose(entropy[i, :n], -(expected.exp() * expected).sum(-1), atol=1e-5)
        alone, _ = logps_of(policy, [s])
        assert torch.allclose(alone[0], together[i, :n], atol=1e-5)
        assert (together[i, n:] == 0).all()


@pytest.mark.parametrize("kind, options", MODELS)
def test_every_parameter_trains_and_the_checkpoint_loads(kind, options, tmp_path):
    from transformers import AutoModelForCausalLM

    if kind == "mixtral":
        options = dict(num_experts_per_tok=4)  # so that every expert is used
    model, tokenizer = tiny_model(kind, **options), harness.rows.load_tokenizer(BUNDLED)
    policy, cfg = (
        fast_policy(model, 1.0),
        Config(max_sampler_gap=1e9, learning_rate=0.01, out_dir=str(tmp_path)),
    )
    before = {name: p.clone() for name, p in model.named_parameters()}
    samples = random_samples(24, 4)
    for s in samples[::3]:  # every token of the vocabulary is used
        s.completion_ids[:] = (np.arange(len(s.completion_ids)) + len(s.prompt.ids) * 3) % 32
    optimizer = grpo.make_optimizer(policy, cfg)
    grpo.update(policy, optimizer, samples, cfg)
    assert [name for name, p in model.named_parameters() if torch.equal(p, before[name])] == []
    path = str(tmp_path / "saved")
    harness.checkpoints.model_writer(model, tokenizer, path)(path)
    options = dict(attn_implementation=model.config._attn_implementation, output_loading_info=True)
    loaded, info = AutoModelForCausalLM.from_pretrained(path, **options)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    ids = torch.arange(2, 20)[None]
    assert torch.equal(loaded(ids).logits, model(ids).logits)


def test_without_the_fast_room_the_script_trains_with_the_same_gradient(tmp_path):
    copy = tmp_path / "copy"
    copy.mkdir()
    ignored = shutil.ignore_patterns(".git", "fast.py", "head.py", "packing.py", "out*", ".ci-venv")
    for name in ("grpo.py", "reward.py", "view.py", "harness", "sample_data"):
        source = os.path.join(HERE, name)
        if os.path.isdir(source):
            shutil.copytree(source, copy / name, ignore=ignored)
        else:
            shutil.copy(source, copy / name)
    assert not (copy / "harness" / "fast.py").exists()
    flags = "--num_prompts 6 --num_generations 4 --max_steps 2 --save_every 0 --eval_data".split()
    without = run(str(copy / "grpo.py"), *flags, "", "--out_dir", str(tmp_path / "without"))
    assert "harness/fast.py is not there" in without.stdout
    run(*flags, "", "--fast", "false", "--out_dir", str(tmp_path / "plain"))
    run(*flags, "", "--out_dir", str(tmp_path / "fast"))
    runs = [lines(tmp_path / name / "metrics.jsonl") for name in ("without", "plain", "fast")]
    for absent, plain, fast in zip(*runs, strict=True):
        assert absent["grad_norm"] == plain["grad_norm"] != 0
        assert plain["grad_norm"] == pytest.approx(fast["grad_norm"], rel=1e-5)
        assert plain["reward"] == fast["reward"] and plain["tokens"] == fast["tokens"]


def test_end_and_padding_tokens_from_everywhere():
    tokenizer = types.SimpleNamespace(eos_token_id=2, pad_token_id=None)
    model = tiny_model()
    for eos, expected in ((None, [2]), (7, [7, 2]), ([7, 2], [7, 2])):
        model.generation_config.eos_token_id = eos
        assert harness.models.special_ids(model, tokenizer, Config()) == (
            expected,
            expected[0],
        )  # no pad: any will do
    tokenizer.pad_token_id, tokenizer.eos_token_id, model.generation_config.eos_token_id = (
        0,
        None,
        [7],
    )
    assert harness.models.special_ids(model, tokenizer, Config()) == ([7], 0)
    model.generation_config.eos_token_id = None
    with pytest.raises(ConfigError, match="names an EOS token"):
        harness.models.special_ids(model, tokenizer, Config(model="m"))
    assert (
        grpo.decode(harness.rows.load_tokenizer(BUNDLED), ids_of([8, 10**6])) == "3"
    )  # ids of a padded vocabulary have no text


def test_dropout_is_forced_to_zero(tmp_path):
    tiny_model(attention_dropout=0.5).save_pretrained(tmp_path)
    model = grpo.load_model(str(tmp_path), Config()).train()
    ids = torch.arange(2, 20)[None]
    assert torch.equal(model(ids).logits, model(ids).logits)


def test_gradient_checkpointing_changes_memory_only():
    samples, cfg = random_samples(6, 3), Config(beta=0.1)
    plain, _ = update_gradient(cfg, samples)
    policy = fast_policy(tiny_model(), 1.0)
    policy.model.gradient_checkpointing_enable(
        gradient_checkpointing_kwargs=dict(use_reentrant=False)
    )
    calls = []  # by a hook before it: when it is made again, it may stop before its end
    policy.model.model.layers[0].mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    recomputed, _ = update_gradient(cfg, samples, policy=policy)
    assert len(calls) == 2  # in the forward pass, and again in the backward pass
    assert relative(recomputed, plain) < 1e-6


@pytest.mark.parametrize("tied", [True, False])
def test_a_reference_in_bfloat16_is_the_policy_of_the_first_step(tied, tmp_path):
    path = str(tmp_path / "model")
    tiny_model(tie_word_embeddings=tied).save_pretrained(path)
    shutil.copy(os.path.join(BUNDLED.model, "generation_config.json"), path)
    cfg = Config(model=path, dtype="bfloat16")
    policy, reference = (
        fast_policy(grpo.load_model(path, cfg), 1.0),
        grpo.load_reference(cfg, CPU.device, None),
    )
    assert reference.plain_head and reference.packs
    kinds = {name: p.dtype for name, p in reference.model.named_parameters()}
    assert (
        kinds["model.layers.0.mlp.up_proj.weight"] == torch.bfloat16
        and kinds["model.norm.weight"] == torch.float32
    )
    assert (
        kinds.get("lm_head.weight", kinds["model.embed_tokens.weight"])
        == (torch.float32, torch.bfloat16)[not tied]
    )
    samples = random_samples(9, 3)
    for shared in (False, True):
        values = [in_bfloat16(p, samples, shared) for p in (policy, reference)]
        assert all(torch.equal(a, b) for a, b in zip(*values, strict=True))
    given = dict(model=path, tokenizer=BUNDLED.model, dtype="bfloat16", max_sampler_gap=1e9)
    first, *_, last = small_run(tmp_path / "out", num_minibatches=1, learning_rate=1e-2, **given)
    assert first["kl_k1"] == first["kl"] == 0 < last["kl"]


def test_minibatches_cover_every_epoch_without_divisibility():
    samples = random_samples(11, 1)
    cfg = Config(num_minibatches=3, num_epochs=2)
    parts = list(grpo.minibatches(samples, 4, cfg))
    assert [len(p) for p in parts] == [4, 4, 3] * 2
    for epoch in (parts[:3], parts[3:]):
        assert sorted(id(s) for p in epoch for s in p) == sorted(map(id, samples))
    assert [id(s) for p in parts[:3] for s in p] != [id(s) for p in parts[3:] for s in p]


def test_several_updates_use_the_rollouts_own_logps():
    """The second mini-batch of a rollout is off-policy: its ratio is against the policy before the first."""
    samples = random_samples(8, 4)
    cfg = Config(num_minibatches=2, beta=0, learning_rate=0.05, tis_cap=0, max_sampler_gap=1e9)
    policy = fast_policy(tiny_model(), 1.0)
    grpo.compute_logps(policy, samples, "old_logps", cfg, CPU)
    before = [s.old_logps.copy() for s in samples]
    optimizer = grpo.make_optimizer(policy, cfg)
    metrics = grpo.update(policy, optimizer, samples, cfg)
    assert metrics["clip_ratio/region_mean"] > 0  # the ratio moved
    now, _ = logps_of(policy, samples)
    assert any(
        not np.allclose(a, b.detach().numpy()[: len(a)], atol=1e-3)
        for a, b in zip(before, now, strict=True)
    )
    assert all((a == s.old_logps).all() for a, s in zip(before, samples, strict=True))


def test_a_gradient_that_is_not_finite_skips_the_step():
    samples = random_samples(6, 3)
    samples[2].advantages = np.full(len(samples[2].completion_ids), math.inf)
    policy = fast_policy(tiny_model(), 1.0)
    before = [p.clone() for p in policy.parameters()]
    optimizer = grpo.make_optimizer(policy, Config())
    metrics = grpo.update(policy, optimizer, samples, Config(max_sampler_gap=1e9))
    assert metrics["skipped_steps"] == 1
    assert all(torch.equal(a, b) for a, b in zip(before, policy.parameters(), strict=True))
    assert all(p.grad is None for p in policy.parameters())


def test_no_step_without_a_signal():
    samples = random_samples(6, 3)
    for s in samples:
        s.reward = 1.0
    cfg = Config(
        num_generations=3, weight_decay=0.1, learning_rate=1e-3, max_sampler_gap=1e9, beta=0.0
    )
    assert grpo.assign_advantages(samples, 1, cfg) == 1.0
    policy = fast_policy(tiny_model(), 1.0)
    optimizer = grpo.make_optimizer(policy, cfg)
    learned = random_samples(6, 3)
    grpo.update(policy, optimizer, learned, cfg)  # leaves momentum
    before = [p.clone() for p in policy.parameters()]
    metrics = grpo.update(policy, optimizer, samples, cfg, step=2)
    for s in learned:  # an advantage that nothing in the loss has is no signal
        s.in_loss[:] = False
    grpo.update(policy, optimizer, learned, cfg, step=3)
    assert all(torch.equal(a, b) for a, b in zip(before, policy.parameters(), strict=True))
    assert math.isfinite(metrics["loss"]) and math.isfinite(metrics["grad_norm"])


def test_a_teacher_pulls_where_no_advantage_does():
    """Until it was found, `moved` held back every step: the reference may be another model."""
    samples, policy = random_samples(6, 3), fast_policy(tiny_model(), 1.0)
    for s in samples:
        s.advantages = np.zeros(len(s.completion_ids))
    cfg = Config(num_generations=3, learning_rate=1e-3, max_sampler_gap=1e9, beta=1.0)
    before = [p.clone() for p in policy.parameters()]
    metrics = grpo.update(policy, grpo.make_optimizer(policy, cfg), samples, cfg)
    assert (
        not any(metrics[f"skipped_steps/{cause}"] for cause in grpo.NO_GRADIENT)
        and metrics["kl"] > 0
    )
    assert any(not torch.equal(a, b) for a, b in zip(before, policy.parameters(), strict=True))


def test_an_update_starts_from_no_gradient():
    """Else it would clip the sum of its own gradient and of whatever the caller left."""
    cfg, samples = Config(beta=0.1), random_samples(6, 3)
    clean, _ = update_gradient(cfg, samples)
    policy = fast_policy(tiny_model(), 1.0)
    logps, _ = logps_of(policy, samples)
    logps.sum().backward()
    recorder = Recorder(policy)
    grpo.update(
        policy,
        recorder,
        samples,
        dataclasses.replace(cfg, max_sampler_gap=1e9, micro_batch_tokens=2048),
    )
    left_over, after_a_backward = recorder.grads
    assert not torch.equal(clean, left_over) and torch.equal(clean, after_a_backward)


def test_samples_of_which_some_have_old_log_probabilities_are_refused():
    samples = random_samples(4, 2)
    samples[1].old_logps = samples[1].sampler_logps
    with pytest.raises(ValueError, match="3 of 4 samples have no old_logps"):
        grpo.collate(samples, CPU.device)


def test_a_sample_equals_itself_only():
    a, b = random_samples(1, 1) + random_samples(1, 1)
    assert a == a and a != b and [b, a].index(a) == 1


def test_float64_stays_float64():
    """Advantages that differ in the tenth digit give gradients that differ there, too."""
    cfg, gradients = Config(beta=0, max_grad_norm=0), []
    for change in (0.0, 1e-10):
        samples = random_samples(6, 3, np.float64)
        samples[0].advantages = samples[0].advantages + change
        gradients.append(update_gradient(cfg, samples, F64)[0])
    assert 1e-13 < relative(*gradients) < 1e-8


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_the_loss_of_tokens_can_be_had_before_it_is_summed(reduction):
    torch.manual_seed(0)
    logps, old, ref, sampler, advantages = (torch.randn(5, 3, 4, dtype=F64) - 1).unbind()
    mask = torch.ones(3, 4, dtype=torch.bool)
    cfg = Config(loss_reduction=reduction, beta=0.1, max_completion_length=50)
    tokens = grpo.token_loss(logps, old, ref, sampler, advantages, mask, cfg)
    loss, _ = grpo_loss(logps, old, ref, sampler, advantages, mask, cfg, 12, 3)
    assert tokens.shape == (3, 4)
    divisor = dict(token=12, sequence=4 * 3, constant=50 * 3)[reduction]
    assert loss.item() == pytest.approx((tokens.sum() / divisor).item())


def test_a_token_out_of_the_loss_still_counts_in_its_sequence():
    """Of an entropy mask, say: GSPO's ratio is the mean over all tokens that were sampled."""
    torch.manual_seed(0)
    logps, old = (torch.randn(2, 1, 4, dtype=F64) * 0.1).unbind()
    sampled = torch.tensor([[True, True, True, False]])
    mask = torch.tensor([[True, False, True, False]])
    cfg = Config(ratio_level="sequence", beta=0, clip_low=1, clip_high=100)
    loss, stats = grpo_loss(
        logps, old, None, None, torch.ones(1, dtype=F64), mask, cfg, 2, 1, sampled=sampled
    )
    ratio = (logps - old)[0, :3].mean().exp()
    assert loss.item() == pytest.approx(-ratio.item()) and stats["tokens"] == 2


def test_flags_that_somebody_set_win_over_the_bundled_task(tmp_path):
    cfg = Config(eval_data="")
    cfg.max_steps = 1
    cfg.learning_rate = 1e-6  # the default
    prepared = grpo.prepare(cfg)
    assert (prepared.max_steps, prepared.learning_rate, prepared.eval_data) == (1, 1e-6, "")
    assert prepared.max_completion_length == grpo.BUNDLED["max_completion_length"]
    again = grpo.prepare(dataclasses.replace(cfg, seed=5))
    assert dataclasses.replace(prepared, seed=5) == again
    assert grpo.prepare(dataclasses.replace(Config(), seed=5)).max_steps == 20
    with pytest.raises(TypeError, match="no flag sede"):
        Config(sede=1)
    cfg.num_prompts = cfg.num_generations = 2
    cfg.out_dir = str(tmp_path / "out")
    [step] = grpo.train(cfg)
    assert step["step"] == 1 and step["learning_rate"] == 1e-6


def test_steps_that_are_not_taken_are_counted_by_cause():
    def skipped(change, beta=0.0, at_reference=False):
        samples, policy = random_samples(6, 3), fast_policy(tiny_model(), 1.0)
        for s in samples:
            s.advantages = np.zeros(len(s.completion_ids))
            change(s)
        cfg = Config(num_generations=3, max_sampler_gap=1e9, beta=beta)
        metrics = grpo.update(
            policy, grpo.make_optimizer(policy, cfg), samples, cfg, at_reference=at_reference
        )
        return [
            cause
            for cause in ("not_finite", *grpo.NO_GRADIENT)
            if metrics[f"skipped_steps/{cause}"]
        ]

    assert skipped(lambda s: None) == ["no_advantage"]
    assert skipped(lambda s: None, beta=0.1, at_reference=True) == ["at_reference"]
    assert skipped(lambda s: None, beta=0.1) == []
    assert skipped(lambda s: s.in_loss.fill(False)) == ["left_out"]
    assert skipped(lambda s: s.sampled.fill(False), beta=0.1) == ["nothing_sampled"]
    assert skipped(lambda s: s.advantages.fill(math.inf)) == ["not_finite"]
    assert skipped(lambda s: s.advantages.__setitem__(0, 1.0)) == []  # per token: one is enough


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_context_is_read_and_not_trained(reduction, level):
    """What the policy did not draw has no part in the loss, the counts and the lengths; what follows it sees it."""

    samples, rng = random_samples(9, 3, longest=12), np.random.default_rng(1)
    cfg = Config(
        beta=0.1,
        max_grad_norm=0,
        loss_reduction=reduction,
        ratio_level=level,
        micro_batch_tokens=40,
    )
    for s in samples:
        s.sampled = rng.random(len(s.completion_ids)) < 0.6
        s.sampled[0] = True
    policy = fast_policy(tiny_model(), 1.0)
    found, metrics = update_gradient(cfg, samples, policy=policy)
    for s in samples:  # nothing of it is looked at
        for values in (s.advantages, s.sampler_logps, s.ref_logps):
            values[~s.sampled] = math.nan
    again, same = update_gradient(cfg, samples, policy=policy)
    assert torch.equal(found, again) and metrics == same
    batch = grpo.collate(samples, CPU.device, policy.rows)
    logps, _ = policy(batch)
    n = sum(s.n_sampled for s in samples)
    parts = []
    for s, row in zip(samples, logps, strict=True):  # one by one, the sampled tokens alone
        at = torch.from_numpy(np.flatnonzero(s.sampled))
        x = row[at][None]
        values = [torch.from_numpy(v[s.sampled])[None] for v in (s.ref_logps, s.sampler_logps)]
        mask = torch.ones_like(x, dtype=torch.bool)
        advantages = torch.from_numpy(s.advantages[s.sampled].astype(np.float32))[None]
        parts.append(grpo_loss(x, x.detach(), *values, advantages, mask, cfg, n, len(samples))[0])
    grads = torch.autograd.grad(sum(parts), list(policy.parameters()))
    assert relative(found, torch.cat([g.flatten().to(F64) for g in grads])) < 1e-5


def test_without_a_signal_the_kl_pulls_alone_once_there_was_an_update():
    """Before, it is rounding, which Adam would make as large as a step."""
    silent, learned, policy = (
        random_samples(6, 3),
        random_samples(6, 3),
        fast_policy(tiny_model(), 1.0),
    )
    for s in silent:
        s.advantages = np.full(len(s.completion_ids), 0.0)
    cfg, moved = Config(num_generations=3, learning_rate=1e-3, max_sampler_gap=1e9, beta=0.1), []
    optimizer = grpo.make_optimizer(policy, cfg)
    for step, samples in enumerate((silent, learned, silent), 1):
        before = [p.clone() for p in policy.parameters()]
        grpo.update(policy, optimizer, samples, cfg, step=step, at_reference=not any(moved))
        moved.append(
            any(not torch.equal(a, b) for a, b in zip(before, policy.parameters(), strict=True))
        )
    assert moved == [False, True, True]


def test_a_resumed_policy_knows_whether_it_has_moved(tmp_path):
    small_run(tmp_path / "out", max_steps=1, beta=0.1)
    cfg, checkpoint = (
        Config(**grpo.BUNDLED),
        harness.checkpoints.load_checkpoint(str(tmp_path / "out" / "step_000001")),
    )
    prompts = [grpo.Prompt(ids_of([5, 6, 7]), "", {})]
    for start, expected in ((None, True), (checkpoint, False)):
        _, policy, reference, _ = grpo.load_policies(cfg, start, prompts, CPU.device)
        assert harness.models.same_weights(policy.model, reference.model) is expected


def test_the_sampler_is_compared_where_something_is_in_the_loss():
    """Also where nothing of the first mini-batch is."""
    samples, policy = random_samples(4, 2), fast_policy(tiny_model(), 1.0)
    cfg = Config(num_minibatches=4, max_sampler_gap=1, beta=0.0)
    for s in samples:
        s.sampler_logps = s.sampler_logps + 50
    [first], *_ = grpo.minibatches(samples, 1, cfg)
    first.in_loss[:] = False
    before = [p.clone() for p in policy.parameters()]
    with pytest.raises(TrainingError, match="the sampler's log-probabilities are off by"):
        grpo.update(policy, grpo.make_optimizer(policy, cfg), samples, cfg)
    assert all(torch.equal(a, b) for a, b in zip(before, policy.parameters(), strict=True))


def test_a_policy_that_gives_no_number_ends_the_run():
    samples, policy = random_samples(6, 3), fast_policy(tiny_model(), 1.0)
    samples[4].sampler_logps[0] = math.nan  # as where the policy's own is NaN: their difference
    with pytest.raises(TrainingError, match="off by nan"):
        grpo.update(
            policy, grpo.make_optimizer(policy, Config()), samples, Config(max_sampler_gap=1e9)
        )


def test_samples_without_advantage_are_left_out_when_there_is_no_kl():
    """Same gradient and loss, fewer passes; with a KL term they stay in."""
    samples = random_samples(12, 4)
    for s in samples[::3]:
        s.advantages = np.full(len(s.completion_ids), 0.0)

    def passes(beta, only):
        policy, seen = fast_policy(tiny_model(), 1.0), []
        policy.register_forward_pre_hook(lambda _, args: seen.append(args[0]["shape"][0]))
        cfg = Config(beta=beta, max_grad_norm=0, loss_reduction="sequence", micro_batch_tokens=1)
        rows = [
            dataclasses.replace(
                s, advantages=s.advantages if only or s.advantages[0] else s.advantages + 1e-30
            )
            for s in samples
        ]
        grad, metrics = update_gradient(cfg, rows, policy=policy)
        return len(seen), grad, metrics["loss"]

    (few, grad, loss), (all_, whole, loss_whole) = passes(0.0, True), passes(0.0, False)
    assert (
        (few, all_) == (8, 12)
        and relative(grad, whole) < 1e-6
        and loss == pytest.approx(loss_whole, rel=1e-6)
    )
    assert passes(0.1, True)[0] == 12


def test_samples_out_of_the_loss_are_not_computed(tmp_path, monkeypatch):
    """The gradient is that of the others alone; a mini-batch of nothing else is one pass of weight zero."""
    samples = random_samples(12, 4)
    for s in samples[::3]:
        s.in_loss[:] = False
        s.ref_logps = None
    policy, seen = fast_policy(tiny_model(), 1.0), []
    policy.register_forward_pre_hook(lambda _, args: seen.append(args[0]["shape"][0]))
    cfg = Config(beta=0.1, max_grad_norm=0, micro_batch_tokens=1)
    grad, _ = update_gradient(cfg, samples, policy=policy)
    whole, _ = update_gradient(cfg, [s for s in samples if s.in_loss.any()])
    assert len(seen) == 8 and relative(grad, whole) < 1e-6
    grad, metrics = update_gradient(cfg, samples[::3], policy=policy)
    assert len(seen) == 9 and grad.norm() == metrics["loss"] == metrics["grad_norm"] == 0
    # without KL and advantages one sample of the loss is left, for the metrics
    rows = [
        dataclasses.replace(
            s, advantages=0 * s.advantages, in_loss=np.full(len(s.advantages), i == 11)
        )
        for i, s in enumerate(samples)
    ]
    _, metrics = update_gradient(Config(beta=0), rows)
    assert metrics["loss"] == 0 and metrics["entropy"] > 0 and metrics["sampler_gap"] > 0
    # a mini-batch without a sample in the loss, among others
    cfg, samples = dataclasses.replace(cfg, num_minibatches=4), random_samples(12, 4)
    for s in list(grpo.minibatches(samples, 1, cfg))[1]:
        s.in_loss[:] = False
        s.ref_logps = None
    _, metrics = update_gradient(cfg, samples)
    assert metrics["kl"] > 0 and metrics["skipped_steps"] == 0

    scored, compute = [], grpo.compute_logps

    def counted(policy, samples, *rest):
        scored.append([s.in_loss.all() for s in samples])
        compute(policy, samples, *rest)

    monkeypatch.setattr(grpo, "compute_logps", counted)
    for step in small_run(
        tmp_path / "out", mask_truncated=True, beta=0.1, max_steps=2, save_every=0, seed=1
    ):
        old, reference, *scored = scored
        assert (
            old == reference == [True] * round(15 * (1 - step["completions/clipped_ratio"]))
            and 0 < step["completions/clipped_ratio"] < 1
        )
    [step] = small_run(
        tmp_path / "cut", mask_truncated=True, beta=0.1, max_steps=1, max_completion_length=1
    )
    assert step["completions/clipped_ratio"] == 1 and step["loss"] == step["kl"] == 0


def test_gradient_is_clipped_once_and_logged_before_clipping():
    samples = random_samples(6, 3)
    free, metrics = update_gradient(Config(max_grad_norm=0), samples)
    cut, cut_metrics = update_gradient(Config(max_grad_norm=0.01), samples)
    assert (
        metrics["grad_norm"]
        == pytest.approx(free.norm().item(), rel=1e-5)
        == cut_metrics["grad_norm"]
    )
    assert cut.norm().item() == pytest.approx(0.01, rel=1e-3)


@pytest.mark.parametrize("num_minibatches", [1, 2])
def test_what_is_noted_of_a_token(num_minibatches):
    """Its push is minus the gradient by its log-probability, in units of an advantage: here the ratio and all weights
    are 1, so it is the advantage itself, for each split into micro-batches. Only of the samples that are asked for."""
    for budget in (10, 10**6):
        samples, policy = random_samples(8, 4), fast_policy(tiny_model(), 1.0)
        grpo.compute_logps(policy, samples, "old_logps", Config(micro_batch_tokens=100), CPU)
        for s in samples:
            s.sampler_logps, s.ref_logps = s.old_logps, s.old_logps - np.float32(0.25)
        cfg = Config(
            log_tokens=5,
            beta=0.1,
            kl_estimator="k1",
            learning_rate=0,
            num_minibatches=num_minibatches,
        )
        grpo.note_tokens(policy, samples, dataclasses.replace(cfg, micro_batch_tokens=budget), CPU)
        assert [bool(s.token_notes) for s in samples] == [True] * 5 + [False] * 3
        for s in samples[:5]:
            notes = s.token_notes
            assert notes["logp"] == pytest.approx(s.old_logps, abs=1e-5)
            assert notes["gap"] == pytest.approx(np.zeros(len(notes["gap"])), abs=1e-5)
            assert notes["kl"] == pytest.approx(np.full(len(notes["kl"]), 0.25), abs=1e-5)
            assert min(notes["entropy"]) > 0
            assert notes["push"] == pytest.approx(s.advantages - 0.1, abs=1e-5)


def test_the_texts_of_tokens_join_to_the_completion(tmp_path):
    """Bytes and the end included; the first group by default, at most 100 kB a step at 512 tokens."""
    small_run(tmp_path / "out", num_minibatches=1, max_steps=1)
    rows = lines(tmp_path / "out" / "completions.jsonl")
    signal = [sum(abs(r["advantage"]) for r in rows if r["group"] == group) for group in range(3)]
    assert ["tokens" in row for row in rows] == [row["group"] == np.argmax(signal) for row in rows]
    for row in [row for row in rows if "tokens" in row]:
        assert "".join(row["tokens"]["text"]) == row["completion"]
        assert {len(column) for column in row["tokens"].values()} == {row["length"]}
    samples, rng = random_samples(16, 8, longest=512), np.random.default_rng(0)
    policy = fast_policy(tiny_model(max_position_embeddings=1024), 1.0)
    for s in samples:
        s.completion_ids = ids_of(rng.integers(2, 32, 512))
        s.sampled = s.in_loss = np.ones(512, bool)
    grpo.compute_logps(policy, samples, "ref_logps", Config(micro_batch_tokens=4096), CPU)
    for s in samples:  # as bfloat16 rounds, and as a policy moves
        s.sampler_logps, s.ref_logps = (s.ref_logps + rng.normal(0, 0.02, (2, 512))).astype(
            np.float32
        )
    for s in samples:
        s.advantages = np.full(len(s.completion_ids), 1.0 + (s.group == 0))
    grpo.note_tokens(policy, samples, Config(beta=0.1, micro_batch_tokens=4096), CPU)
    assert [bool(s.token_notes) for s in samples] == [True] * 6 + [False] * 10
    size = len(
        json.dumps(
            [
                harness.log.in_thousandths(s.token_notes) | dict(text=["token"] * 512)
                for s in samples[:6]
            ],
            separators=(",", ":"),
        )
    )
    assert 50_000 < size < 100_000


def test_learning_rate_schedules():
    def rates(**options):
        cfg = Config(learning_rate=1.0, max_steps=10, **options)
        return [grpo.learning_rate_at(k, cfg) for k in range(cfg.max_steps * cfg.updates_per_step)]

    assert rates() == [1.0] * 10  # warm-up off: the first step learns
    assert rates(lr_schedule="linear") == pytest.approx([1 - k / 10 for k in range(10)])
    assert rates(lr_schedule="cosine")[5] == pytest.approx(0.5)
    assert rates(warmup_steps=4)[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert (
        len(rates(num_minibatches=2, num_epochs=3)) == 60
        and rates(num_minibatches=2, lr_schedule="linear")[10] == 0.5
    )


def test_every_update_has_its_own_rate():
    schedule = dict(
        learning_rate=1e-3, lr_schedule="linear", warmup_steps=3, max_steps=4, num_minibatches=2
    )
    policy, cfg, rates = fast_policy(tiny_model(), 1.0), Config(**schedule, max_sampler_gap=1e9), []
    optimizer = grpo.make_optimizer(policy, cfg)
    optimizer.register_step_pre_hook(
        lambda o, *_: rates.append({group["lr"] for group in o.param_groups})
    )
    for step in (1, 2, 3):
        metrics = grpo.update(policy, optimizer, random_samples(6, 3), cfg, step=step)
    assert rates == [{grpo.learning_rate_at(k, cfg)} for k in range(6)]
    assert {metrics["learning_rate"]} == rates[-1]


def test_weight_decay_spares_norms_and_biases():
    policy = fast_policy(tiny_model(), 1.0)
    decayed, spared = grpo.make_optimizer(policy, Config(weight_decay=0.1)).param_groups
    assert decayed["weight_decay"] == 0.1 and all(p.dim() == 2 for p in decayed["params"])
    assert (
        spared["weight_decay"] == 0.0
        and all(p.dim() == 1 for p in spared["params"])
        and spared["params"]
    )


def test_an_eval_leaves_out_what_a_reward_does_not_apply_to(monkeypatch):
    right = {0: [1.0, 0.0], 1: [None, None], 2: [0.0, 0.0]}  # by prompt, for each sample
    monkeypatch.setattr(
        grpo,
        "sample",
        lambda _, prompts, seeds, cfg, world, greedy: [
            s for p in prompts for s in p.row[: 1 if greedy else cfg.num_generations]
        ],
    )

    def sample(group, i):
        s = random_samples(1, 1)[0]
        s.group, s.prompt, s.text = group, grpo.Prompt([2], "", {"value": right[group][i]}), ""
        return s

    prompts = [types.SimpleNamespace(row=[sample(group, i) for i in range(2)]) for group in right]
    value = reward.Reward("value", 1.0, lambda completion, row: row["value"], trusted=True)
    scorer, cfg = harness.scorer.Scorer([value]), Config(eval_samples=2)
    monkeypatch.setattr(grpo, "add_texts", lambda samples, tokenizer: None)
    found = grpo.evaluate(None, prompts, None, scorer, 1, cfg, CPU)
    assert found["eval_accuracy"] == 0.5 and (found["eval_pass@1"], found["eval_pass@2"]) == (
        0.25,
        0.5,
    )
    found = grpo.evaluate(None, prompts[1:2], None, scorer, 1, cfg, CPU)
    assert math.isnan(found["eval_accuracy"]) and "eval_pass@1" not in found


def gradients_in_their_buckets(out, tied=False):
    """Run by every rank: for each step after the first, whether every gradient lies in a bucket before every backward
    of its micro-batches."""
    world = harness.ranks.join_world(torch.device("cpu"))
    policy, buckets, places = fast_policy(tiny_model(tie_word_embeddings=tied), 1.0), {}, []
    honest = grpo.grpo_loss
    cfg = Config(max_sampler_gap=1e9, micro_batch_tokens=20)
    ddp, optimizer = grpo.wrap(policy, cfg, world), grpo.make_optimizer(policy, cfg)
    ddp.register_comm_hook(buckets, lambda state, bucket: reduce_and_note(state, bucket, world))

    def loss(*args, **options):
        places[-1].append([0 if p.grad is None else p.grad.data_ptr() for p in policy.parameters()])
        return honest(*args, **options)

    grpo.grpo_loss = loss
    for step in range(1, 5):
        places.append([])
        grpo.update(
            policy,
            optimizer,
            random_samples(16, 4, seed=step),
            cfg,
            step=step,
            ddp=ddp,
            world=world,
        )
    assert all(len(found) > 2 for found in places)
    inside = [
        all(any(a <= p < b for a, b in buckets.values()) for p in sum(found, []))
        for found in places[1:]
    ]
    if world.rank == 0:
        with open(out, "w") as file:
            json.dump(inside, file)
    torch.distributed.barrier()
    del ddp
    gc.collect()
    torch.distributed.destroy_process_group()


def reduce_and_note(state, bucket, world):
    buffer = bucket.buffer()
    state[bucket.index()] = (buffer.data_ptr(), buffer.data_ptr() + buffer.nbytes)
    work = torch.distributed.all_reduce(buffer.div_(world.size), async_op=True)
    return work.get_future().then(lambda done: done.value()[0])


@pytest.mark.parametrize("tied", [False, True])
def test_gradients_stay_in_ddps_buckets(tied, fork, tmp_path):
    """With several micro-batches: else each parameter has two gradients, one of its own and one in the bucket."""
    done = fork("test_grpo.gradients_in_their_buckets", tmp_path / "out", tied=tied, ranks=2)[1]()
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(read(tmp_path / "out")) == [True] * 3


@pytest.mark.slow
def test_freed_memory_stays_in_the_process():
    """A tensor made again takes the pages of the one before: the kernel gives, and fills with zeros, none."""
    code = """
import resource, sys, torch, harness.models
if sys.argv[1:]:
    harness.models.keep_freed_memory(torch.device("cpu"))
for i in range(20):
    if i == 10:  # the first few do not fit where the one before was: alignment
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(2**24)  # 64 MB
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
    env = os.environ | dict(THP_MEM_ALLOC_ENABLE="0")
    faults = [
        int(
            subprocess.run(
                [sys.executable, "-c", code, *more],
                env=env,
                cwd=HERE,
                capture_output=True,
                check=True,
            ).stdout
        )
        for more in ([], ["keep"])
    ]
    assert faults[0] > 1000 and faults[1] < 100, faults
