"""The update: advantages that reach it, mini-batches, which steps are taken and which passes are
made, learning rates, gradients in DDP's buckets."""

import dataclasses
import json
import math

import numpy as np
import pytest
import torch

import grpo
import harness.log
import harness.ranks
import view
from grpo import Config, grpo_loss
from harness.flags import TrainingError
from tests.common import (
    CPU,
    F64,
    REDUCTIONS,
    Recorder,
    fast_policy,
    leave_world,
    logps_of,
    random_samples,
    read,
    relative,
    small_run,
    tiny_model,
    update_gradient,
)

pytest_plugins = "tests.common"


def tiny_policy():
    return fast_policy(tiny_model(), 1.0)


def make_config(**options):
    """The samples' log-probabilities are made up, so that the gap to the sampler is large."""
    return Config(max_sampler_gap=1e9, **options)


def set_advantages(samples, value):
    for s in samples:
        s.advantages = np.full(len(s.completion_ids), value)


def weights_of(policy):
    return [p.detach().clone() for p in policy.parameters()]


def has_moved(policy, before):
    pairs = zip(before, policy.parameters(), strict=True)
    return any(not torch.equal(a, b) for a, b in pairs)


def causes_of(metrics):
    """Why steps were not taken."""
    causes = ("not_finite", *grpo.NO_GRADIENT)
    return [cause for cause in causes if metrics[f"skipped_steps/{cause}"]]


def count_rows(policy):
    """A list that grows by the number of rows [N] of every forward pass."""
    counts = []
    policy.register_forward_pre_hook(lambda _, args: counts.append(args[0]["shape"][0]))
    return counts


# ------------------------------------------------------------------------------------------------
# Advantages and mini-batches


def test_advantage_noise_is_seeded_by_the_step_and_has_mean_zero():
    samples = random_samples(4000, 8)
    for s in samples:
        s.reward = 1.0

    def noise(step, level):
        grpo.assign_advantages(samples, step, Config(num_generations=8, advantage_noise=level))
        return np.array([s.advantages[0] for s in samples])

    assert (noise(1, 0.0) == 0).all()
    first = noise(1, 0.1)
    assert (noise(2, 0.1) != first).any()
    assert (noise(1, 0.1) == first).all()
    assert abs(first.mean()) < 4 * 0.1 / math.sqrt(4000)
    assert first.std() == pytest.approx(0.1, rel=0.1)


def test_masked_truncation_counts_in_the_baseline_but_not_in_the_loss():
    cfg = Config(num_generations=4, mask_truncated=True, non_stop_reward=None)
    samples = random_samples(4, 4)
    samples[0].reward = 1.0
    samples[2].finish_reason = "length"
    samples[3].finish_reason = "length"
    grpo.assign_advantages(samples, 1, cfg)
    baseline = 0.25  # the mean of all four rewards
    assert samples[0].advantages[0] == pytest.approx((1 - baseline) / (0.5 + 1e-4))

    # The truncated samples are neither in the sums nor in the counts that divide them.
    grad, metrics = update_gradient(cfg, samples)
    expected_grad, expected = update_gradient(cfg, samples[:2])
    assert relative(grad, expected_grad) < 1e-6
    for key in ("loss", "entropy", "kl", "sampler_gap"):
        assert metrics[key] == pytest.approx(expected[key], rel=1e-5)


def test_minibatches_cover_every_epoch_without_divisibility():
    samples = random_samples(11, 1)
    cfg = Config(num_minibatches=3, num_epochs=2)
    minibatches = list(grpo.minibatches(samples, 4, cfg))
    assert [len(minibatch) for minibatch in minibatches] == [4, 4, 3] * 2
    orders = []
    for epoch in (minibatches[:3], minibatches[3:]):
        orders.append([id(s) for minibatch in epoch for s in minibatch])
        assert sorted(orders[-1]) == sorted(map(id, samples))
    assert orders[0] != orders[1]


def test_several_updates_use_the_rollouts_own_logps():
    """The second mini-batch of a rollout is off-policy: its ratio is against the policy before the
    first."""
    samples = random_samples(8, 4)
    cfg = make_config(num_minibatches=2, beta=0, learning_rate=0.05, tis_cap=0)
    policy = tiny_policy()
    grpo.compute_logps(policy, samples, "old_logps", cfg, CPU)
    before = [s.old_logps.copy() for s in samples]
    metrics = grpo.update(policy, grpo.make_optimizer(policy, cfg), samples, cfg)
    assert metrics["clip_ratio/region_mean"] > 0  # the ratio moved
    after, _ = logps_of(policy, samples)
    after = after.detach().numpy()
    same = [np.allclose(a, b[: len(a)], atol=1e-3) for a, b in zip(before, after, strict=True)]
    assert not all(same)
    for logps, s in zip(before, samples, strict=True):
        assert (logps == s.old_logps).all()


def test_samples_of_which_some_have_old_log_probabilities_are_refused():
    samples = random_samples(4, 2)
    samples[1].old_logps = samples[1].sampler_logps
    with pytest.raises(ValueError, match="3 of 4 samples have no old_logps"):
        grpo.collate(samples, CPU.device)


def test_a_sample_equals_itself_only():
    [a] = random_samples(1, 1)
    [b] = random_samples(1, 1)
    assert a == a
    assert a != b
    assert [b, a].index(a) == 1


def test_float64_stays_float64():
    """Advantages that differ in the tenth digit give gradients that differ there, too."""
    cfg = Config(beta=0, max_grad_norm=0)
    gradients = []
    for change in (0.0, 1e-10):
        samples = random_samples(6, 3, np.float64)
        samples[0].advantages = samples[0].advantages + change
        gradients.append(update_gradient(cfg, samples, F64)[0])
    assert 1e-13 < relative(*gradients) < 1e-8


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_context_is_read_and_not_trained(reduction, level):
    """Tokens that the policy did not draw are not in the loss, its counts and its lengths; the
    tokens after them see them."""
    samples = random_samples(9, 3, longest=12)
    rng = np.random.default_rng(1)
    for s in samples:
        s.sampled = rng.random(len(s.completion_ids)) < 0.6
        s.sampled[0] = True
    reductions = dict(loss_reduction=reduction, ratio_level=level)
    cfg = Config(beta=0.1, max_grad_norm=0, micro_batch_tokens=40, **reductions)
    policy = tiny_policy()
    grad, metrics = update_gradient(cfg, samples, policy=policy)

    for s in samples:  # nothing of the context is read but its ids
        for values in (s.advantages, s.sampler_logps, s.ref_logps):
            values[~s.sampled] = math.nan
    grad_with_nan, metrics_with_nan = update_gradient(cfg, samples, policy=policy)
    assert torch.equal(grad, grad_with_nan)
    assert metrics == metrics_with_nan

    # The same loss from the sampled tokens only, one sample after the other.
    logps, _ = policy(grpo.collate(samples, CPU.device, policy.rows))
    counts = (sum(s.n_sampled for s in samples), len(samples))
    loss = 0.0
    for s, row in zip(samples, logps, strict=True):
        row = row[torch.from_numpy(np.flatnonzero(s.sampled))][None]
        ref = torch.from_numpy(s.ref_logps[s.sampled])[None]
        sampler = torch.from_numpy(s.sampler_logps[s.sampled])[None]
        advantages = torch.from_numpy(s.advantages[s.sampled].astype(np.float32))[None]
        mask = torch.ones_like(row, dtype=torch.bool)
        part, _ = grpo_loss(row, row.detach(), ref, sampler, advantages, mask, cfg, *counts)
        loss = loss + part
    expected = torch.autograd.grad(loss, list(policy.parameters()))
    assert relative(grad, torch.cat([g.flatten().to(F64) for g in expected])) < 1e-5


# ------------------------------------------------------------------------------------------------
# Steps that are taken, and steps that are not


def test_an_update_starts_from_no_gradient():
    """Otherwise an update would clip the sum of its own gradient and of what the caller left."""
    cfg = Config(beta=0.1)
    samples = random_samples(6, 3)
    clean, _ = update_gradient(cfg, samples)
    policy = tiny_policy()
    logps, _ = logps_of(policy, samples)
    logps.sum().backward()
    recorder = Recorder(policy)
    grpo.update(policy, recorder, samples, make_config(beta=0.1, micro_batch_tokens=2048))
    of_the_caller, of_the_update = recorder.grads
    assert not torch.equal(clean, of_the_caller)
    assert torch.equal(clean, of_the_update)


def test_gradient_is_clipped_once_and_logged_before_clipping():
    samples = random_samples(6, 3)
    free, metrics = update_gradient(Config(max_grad_norm=0), samples)
    clipped, clipped_metrics = update_gradient(Config(max_grad_norm=0.01), samples)
    assert metrics["grad_norm"] == pytest.approx(free.norm().item(), rel=1e-5)
    assert metrics["grad_norm"] == clipped_metrics["grad_norm"]
    assert clipped.norm().item() == pytest.approx(0.01, rel=1e-3)


def test_a_gradient_that_is_not_finite_skips_the_step():
    samples = random_samples(6, 3)
    set_advantages(samples[2:3], math.inf)
    policy = tiny_policy()
    before = weights_of(policy)
    optimizer = grpo.make_optimizer(policy, Config())
    metrics = grpo.update(policy, optimizer, samples, make_config())
    assert metrics["skipped_steps"] == 1
    assert not has_moved(policy, before)
    assert all(p.grad is None for p in policy.parameters())


def test_no_step_without_a_signal():
    silent = random_samples(6, 3)
    for s in silent:
        s.reward = 1.0
    cfg = make_config(num_generations=3, weight_decay=0.1, learning_rate=1e-3, beta=0.0)
    assert grpo.assign_advantages(silent, 1, cfg) == 1.0
    policy = tiny_policy()
    optimizer = grpo.make_optimizer(policy, cfg)
    learned = random_samples(6, 3)
    grpo.update(policy, optimizer, learned, cfg)  # leaves momentum
    before = weights_of(policy)
    metrics = grpo.update(policy, optimizer, silent, cfg, step=2)
    for s in learned:  # advantages of tokens that are not in the loss are no signal
        s.in_loss[:] = False
    grpo.update(policy, optimizer, learned, cfg, step=3)
    assert not has_moved(policy, before)
    assert math.isfinite(metrics["loss"])
    assert math.isfinite(metrics["grad_norm"])


def test_a_teacher_pulls_where_no_advantage_does():
    """The reference may be another model, so that the first step must not be held back."""
    samples = random_samples(6, 3)
    set_advantages(samples, 0.0)
    policy = tiny_policy()
    cfg = make_config(num_generations=3, learning_rate=1e-3, beta=1.0)
    before = weights_of(policy)
    metrics = grpo.update(policy, grpo.make_optimizer(policy, cfg), samples, cfg)
    assert not any(metrics[f"skipped_steps/{cause}"] for cause in grpo.NO_GRADIENT)
    assert metrics["kl"] > 0
    assert has_moved(policy, before)


def test_steps_that_are_not_taken_are_counted_by_cause():
    def skipped(change, beta=0.0, at_reference=False):
        samples = random_samples(6, 3)
        set_advantages(samples, 0.0)
        for s in samples:
            change(s)
        policy = tiny_policy()
        cfg = make_config(num_generations=3, beta=beta)
        optimizer = grpo.make_optimizer(policy, cfg)
        metrics = grpo.update(policy, optimizer, samples, cfg, at_reference=at_reference)
        return causes_of(metrics)

    def nothing(s):
        pass

    def leave_out(s):
        s.in_loss[:] = False

    def make_context(s):
        s.sampled[:] = False

    def make_infinite(s):
        s.advantages[:] = math.inf

    def reward_first_token(s):
        s.advantages[0] = 1.0

    assert skipped(nothing) == ["no_advantage"]
    assert skipped(nothing, beta=0.1, at_reference=True) == ["at_reference"]
    assert skipped(nothing, beta=0.1) == []
    assert skipped(leave_out) == ["left_out"]
    assert skipped(make_context, beta=0.1) == ["nothing_sampled"]
    assert skipped(make_infinite) == ["not_finite"]
    assert skipped(reward_first_token) == []


def test_without_a_signal_the_kl_pulls_alone_once_there_was_an_update():
    """Before the first update the KL's gradient is rounding, which Adam would make as large as a
    step."""
    silent = random_samples(6, 3)
    set_advantages(silent, 0.0)
    learned = random_samples(6, 3)
    policy = tiny_policy()
    cfg = make_config(num_generations=3, learning_rate=1e-3, beta=0.1)
    optimizer = grpo.make_optimizer(policy, cfg)
    moved = []
    for step, samples in enumerate((silent, learned, silent), 1):
        before = weights_of(policy)
        grpo.update(policy, optimizer, samples, cfg, step=step, at_reference=not any(moved))
        moved.append(has_moved(policy, before))
    assert moved == [False, True, True]


def test_the_sampler_is_compared_where_something_is_in_the_loss():
    """Even if the first mini-batch has nothing in the loss."""
    samples = random_samples(4, 2)
    for s in samples:
        s.sampler_logps = s.sampler_logps + 50
    cfg = Config(num_minibatches=4, max_sampler_gap=1, beta=0.0)
    [first], *_ = grpo.minibatches(samples, 1, cfg)
    first.in_loss[:] = False
    policy = tiny_policy()
    before = weights_of(policy)
    with pytest.raises(TrainingError, match="the sampler's log-probabilities are off by"):
        grpo.update(policy, grpo.make_optimizer(policy, cfg), samples, cfg)
    assert not has_moved(policy, before)


def test_a_policy_that_gives_no_number_ends_the_run():
    samples = random_samples(6, 3)
    samples[4].sampler_logps[0] = math.nan  # if the policy's is NaN, the difference is NaN as well
    policy = tiny_policy()
    with pytest.raises(TrainingError, match="off by nan"):
        grpo.update(policy, grpo.make_optimizer(policy, Config()), samples, make_config())


# ------------------------------------------------------------------------------------------------
# Samples that need no pass


def test_samples_without_advantage_are_left_out_when_there_is_no_kl():
    """Same gradient and loss, fewer passes; with a KL term they stay in."""
    samples = random_samples(12, 4)
    set_advantages(samples[::3], 0.0)
    with_tiny_advantages = []  # which are too small for any influence
    for s in samples:
        advantages = s.advantages if s.advantages[0] else s.advantages + 1e-30
        with_tiny_advantages.append(dataclasses.replace(s, advantages=advantages))

    def passes(beta, samples):
        policy = tiny_policy()
        rows = count_rows(policy)
        one_sample = dict(loss_reduction="sequence", micro_batch_tokens=1)
        cfg = Config(beta=beta, max_grad_norm=0, **one_sample)
        grad, metrics = update_gradient(cfg, samples, policy=policy)
        return len(rows), grad, metrics["loss"]

    n_passes, grad, loss = passes(0.0, samples)
    all_passes, expected_grad, expected_loss = passes(0.0, with_tiny_advantages)
    assert n_passes == 8
    assert all_passes == 12
    assert relative(grad, expected_grad) < 1e-6
    assert loss == pytest.approx(expected_loss, rel=1e-6)
    assert passes(0.1, samples)[0] == 12


def test_samples_out_of_the_loss_are_not_computed():
    """The gradient is that of the other samples. A mini-batch with no others makes one pass of
    weight zero."""
    samples = random_samples(12, 4)
    for s in samples[::3]:
        s.in_loss[:] = False
        s.ref_logps = None
    policy = tiny_policy()
    passes = count_rows(policy)
    cfg = Config(beta=0.1, max_grad_norm=0, micro_batch_tokens=1)
    grad, _ = update_gradient(cfg, samples, policy=policy)
    expected, _ = update_gradient(cfg, [s for s in samples if s.in_loss.any()])
    assert len(passes) == 8
    assert relative(grad, expected) < 1e-6
    grad, metrics = update_gradient(cfg, samples[::3], policy=policy)
    assert len(passes) == 9
    assert grad.norm() == metrics["loss"] == metrics["grad_norm"] == 0

    # One mini-batch of several has no sample in the loss.
    cfg = dataclasses.replace(cfg, num_minibatches=4)
    samples = random_samples(12, 4)
    for s in list(grpo.minibatches(samples, 1, cfg))[1]:
        s.in_loss[:] = False
        s.ref_logps = None
    _, metrics = update_gradient(cfg, samples)
    assert metrics["kl"] > 0
    assert metrics["skipped_steps"] == 0


def test_a_pass_that_trains_nothing_is_in_no_metric():
    """DDP waits for a backward even if no sample has a signal. That sample is not the step."""
    samples = random_samples(12, 4)
    cfg = Config(beta=0.0, num_minibatches=2)
    silent, other = grpo.minibatches(samples, 1, cfg)
    set_advantages(silent, 0.0)
    _, expected = update_gradient(Config(beta=0.0), other)
    _, metrics = update_gradient(cfg, samples)
    averages = ["entropy", "clip_ratio/region_mean", "sampler_gap", "tis_ess"]
    for name in averages:
        assert metrics[name] == pytest.approx(expected[name], rel=1e-6)

    policy = tiny_policy()
    passes = count_rows(policy)
    grad, metrics = update_gradient(cfg, silent, policy=policy)
    assert len(passes) == 2  # one in each mini-batch
    assert grad.norm() == metrics["loss"] == metrics["grad_norm"] == 0
    assert not set(averages) & set(metrics)


def test_a_step_without_a_signal_logs_no_average_over_no_token(tmp_path, capsys):
    out = tmp_path / "out"
    options = dict(max_steps=2, reward="answer", max_completion_length=1, beta=0.0)
    for metrics in small_run(out, **options):
        assert metrics["loss"] == metrics["reward"] == 0
        assert not {"entropy", "clip_ratio/region_mean", "sampler_gap", "kl"} & set(metrics)
    assert " loss 0 grad 0 no-signal 1 | " in capsys.readouterr().out
    assert view.read_panels([str(out)])[3]["curves"] == []  # of the KL


def test_log_probabilities_of_truncated_samples_are_not_computed(tmp_path, monkeypatch):
    calls = []  # for each call of compute_logps: is its sample in the loss?
    compute_logps = grpo.compute_logps

    def recorded(policy, samples, *rest):
        calls.append([s.in_loss.all() for s in samples])
        compute_logps(policy, samples, *rest)

    monkeypatch.setattr(grpo, "compute_logps", recorded)
    options = dict(mask_truncated=True, beta=0.1)
    steps = small_run(tmp_path / "out", max_steps=2, save_every=0, seed=1, **options)
    for step, old, reference in zip(steps, calls[::2], calls[1::2], strict=True):
        clipped = step["completions/clipped_ratio"]
        assert 0 < clipped < 1
        assert old == reference == [True] * round(15 * (1 - clipped))
    [step] = small_run(tmp_path / "cut", max_steps=1, max_completion_length=1, **options)
    assert step["completions/clipped_ratio"] == 1
    assert step["loss"] == 0
    assert "kl" not in step


# ------------------------------------------------------------------------------------------------
# The optimizer


def test_learning_rate_schedules():
    def rates(**options):
        cfg = Config(learning_rate=1.0, max_steps=10, **options)
        return [grpo.learning_rate_at(k, cfg) for k in range(cfg.max_steps * cfg.updates_per_step)]

    assert rates() == [1.0] * 10  # without warm-up the first step learns
    assert rates(lr_schedule="linear") == pytest.approx([1 - k / 10 for k in range(10)])
    assert rates(lr_schedule="cosine")[5] == pytest.approx(0.5)
    assert rates(warmup_steps=4)[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert len(rates(num_minibatches=2, num_epochs=3)) == 60
    assert rates(num_minibatches=2, lr_schedule="linear")[10] == 0.5


def test_every_update_has_its_own_rate():
    schedule = dict(learning_rate=1e-3, lr_schedule="linear", warmup_steps=3, max_steps=4)
    cfg = make_config(num_minibatches=2, **schedule)
    policy = tiny_policy()
    optimizer = grpo.make_optimizer(policy, cfg)
    rates = []

    def record(optimizer, *_):
        rates.append({group["lr"] for group in optimizer.param_groups})

    optimizer.register_step_pre_hook(record)
    for step in (1, 2, 3):
        metrics = grpo.update(policy, optimizer, random_samples(6, 3), cfg, step=step)
    assert rates == [{grpo.learning_rate_at(k, cfg)} for k in range(6)]
    assert {metrics["learning_rate"]} == rates[-1]


def test_weight_decay_spares_norms_and_biases():
    decayed, spared = grpo.make_optimizer(tiny_policy(), Config(weight_decay=0.1)).param_groups
    assert decayed["weight_decay"] == 0.1
    assert all(p.dim() == 2 for p in decayed["params"])
    assert spared["weight_decay"] == 0.0
    assert spared["params"]
    assert all(p.dim() == 1 for p in spared["params"])


# ------------------------------------------------------------------------------------------------
# DistributedDataParallel


def gradients_in_their_buckets(out, tied=False):
    """Runs on every rank; rank 0 writes, for each step after the first, whether every gradient lay
    in one of DDP's buckets before every backward of its micro-batches."""
    world = harness.ranks.join_world(torch.device("cpu"))
    inside = addresses_in_buckets(world, tied)
    if world.rank == 0:
        with open(out, "w") as file:
            json.dump(inside, file)
    leave_world()


def addresses_in_buckets(world, tied):
    policy = fast_policy(tiny_model(tie_word_embeddings=tied), 1.0)
    cfg = make_config(micro_batch_tokens=20)
    ddp = grpo.wrap(policy, cfg, world)
    optimizer = grpo.make_optimizer(policy, cfg)
    buckets = {}  # index -> its first and last address

    def reduce(_, bucket):  # as DDP does, too
        buffer = bucket.buffer()
        buckets[bucket.index()] = (buffer.data_ptr(), buffer.data_ptr() + buffer.nbytes)
        work = torch.distributed.all_reduce(buffer.div_(world.size), async_op=True)
        return work.get_future().then(lambda done: done.value()[0])

    ddp.register_comm_hook(None, reduce)
    backwards = []  # of the current step: the addresses of all gradients before each
    honest_loss = grpo.grpo_loss

    def loss(*args, **options):
        backwards.append([0 if p.grad is None else p.grad.data_ptr() for p in policy.parameters()])
        return honest_loss(*args, **options)

    inside = []
    grpo.grpo_loss = loss
    for step in range(1, 5):
        backwards.clear()
        samples = random_samples(16, 4, seed=step)
        grpo.update(policy, optimizer, samples, cfg, step=step, ddp=ddp, world=world)
        assert len(backwards) > 2
        addresses = np.array(backwards).flatten()
        in_a_bucket = np.zeros(len(addresses), bool)
        for start, end in buckets.values():
            in_a_bucket[(start <= addresses) & (addresses < end)] = True
        inside.append(bool(in_a_bucket.all()))
    return inside[1:]


@pytest.mark.parametrize("tied", [False, True])
def test_gradients_stay_in_ddps_buckets(tied, fork, tmp_path):
    """With several micro-batches. Otherwise each parameter would have two gradients, one of its own
    and one in the bucket."""
    name = "tests.test_update.gradients_in_their_buckets"
    _, wait = fork(name, tmp_path / "out", tied=tied, ranks=2)
    done = wait()
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(read(tmp_path / "out")) == [True] * 3
