"""The policy, the sampler and an update: what is computed, what is trained, and which optimizer
steps are taken."""

import dataclasses
import itertools
import math

import numpy as np
import pytest
import torch
import transformers

import grpo
from grpo import Config, HFSampler, Prompt
from tests.common import (
    CPU,
    F64,
    HERE,
    REDUCTIONS,
    Recorder,
    grpo_loss,
    random_samples,
    relative,
    tiny_model,
    update_gradient,
)


def tiny_policy():
    return grpo.Policy(tiny_model(), 1.0)


def make_config(**options):
    """The samples' log-probabilities are made up, so that the gap to the sampler is large."""
    return Config(**dict(max_sampler_gap=1e9, micro_batch_tokens=2048) | options)


def set_advantages(samples, value):
    for s in samples:
        s.advantages[:] = value


def copy_of(policy):
    return [p.detach().clone() for p in policy.parameters()]


def has_moved(policy, before):
    pairs = zip(before, policy.parameters(), strict=True)
    return any(not torch.equal(a, b) for a, b in pairs)


def steps(policy, samples, cfg, step=1, optimizer=None):
    """The metrics of update(), and whether weights have changed."""
    before = copy_of(policy)
    optimizer = optimizer or grpo.make_optimizer(policy, cfg)
    metrics = grpo.update(policy, policy, optimizer, samples, step, cfg)
    return metrics, has_moved(policy, before)


def count_passes(policy):
    passes = []
    policy.register_forward_pre_hook(lambda _, args: passes.append(len(args[0]["ids"])))
    return passes


# ------------------------------------------------------------------------------------------------
# Policy


def test_logps_and_entropy_are_the_models_own():
    model = tiny_model()
    samples = random_samples(6, 3)
    logps, entropy = grpo.Policy(model, 0.7)(grpo.collate(samples, CPU))
    tables = []
    for s in samples:
        text = torch.from_numpy(np.append(s.prompt.ids, s.completion_ids))[None]
        tables.append(model(text).logits[0, len(s.prompt.ids) - 1 : -1])
    table = (torch.cat(tables) / 0.7).log_softmax(-1)  # [n, V]
    targets = torch.from_numpy(np.concatenate([s.completion_ids for s in samples]))
    assert torch.allclose(logps, table.gather(1, targets[:, None])[:, 0], atol=1e-5)
    assert torch.allclose(entropy, -(table.exp() * table).sum(-1), atol=1e-5)


def test_dropout_is_forced_to_zero_in_configs_inside_configs():
    inner = transformers.LlamaConfig(attention_dropout=0.5)
    outer = transformers.LlavaConfig(text_config=inner, vision_config=None)
    assert grpo.without_dropout(outer).text_config.attention_dropout == 0.0


def test_float64_stays_float64():
    """Advantages that differ in the tenth digit give gradients that differ there, too."""
    cfg = Config(beta=0, max_grad_norm=0)
    gradients = []
    for change in (0.0, 1e-10):
        samples = random_samples(6, 3, np.float64)
        samples[0].advantages = samples[0].advantages + change
        gradients.append(update_gradient(cfg, samples, F64)[0])
    assert 1e-13 < relative(*gradients) < 1e-8


# ------------------------------------------------------------------------------------------------
# Rollout


def prompts_of(*ids):
    return [np.array(one) for one in ids]


def test_prompts_of_a_step_are_a_function_of_seed_and_step():
    prompts = [Prompt(np.array([i]), "", {}) for i in range(7)]
    cfg = Config(num_prompts=3)

    def drawn(step, cfg=cfg):
        return [p.ids[0] for p in grpo.prompts_of_step(prompts, step, cfg)]

    stream = list(itertools.chain(*(drawn(step) for step in range(1, 15))))
    epochs = [stream[i : i + 7] for i in range(0, 42, 7)]
    assert all(sorted(epoch) == list(range(7)) for epoch in epochs)
    assert len(set(map(tuple, epochs))) > 1
    assert drawn(5) == stream[12:15]
    assert drawn(1, Config(num_prompts=3, seed=1)) != stream[:3]
    assert len(drawn(1, Config(num_prompts=20))) == 20  # more than there are


def test_the_streams_of_earlier_runs_are_the_same():
    """Runs of one seed can be compared across versions."""
    cfg = Config(seed=3)
    assert grpo.seed_of(cfg, grpo.SAMPLING, 2, 5) == 1097549577811238910
    order = grpo.generator(cfg, grpo.ORDER, 0, 1).permutation(8)
    assert order.tolist() == [0, 1, 6, 3, 5, 7, 4, 2]


def test_samples_follow_the_scored_distribution():
    """The sampler's log-probabilities are the policy's, and frequencies match them: temperature
    only, whatever else the model's generation config asks for."""
    model = tiny_model()
    options = dict(top_p=0.1, top_k=2, repetition_penalty=2.0, do_sample=True)
    model.generation_config = transformers.GenerationConfig(**options)
    sampler = HFSampler(model, [1], Config(max_completion_length=1))
    n = 4000
    completions = sampler.generate(prompts_of([5, 6, 7]) * n, [(0, i) for i in range(n)], 0.7)
    logps = (model(torch.tensor([[5, 6, 7]])).logits[0, -1] / 0.7).log_softmax(-1)
    counts = torch.bincount(torch.tensor([ids[0] for ids, _ in completions]), minlength=32)
    assert (counts / n - logps.exp()).abs().max() < 4 * 0.5 / n**0.5
    for ids, row in completions[:50]:
        assert row[0] == pytest.approx(logps[ids[0]].item(), abs=1e-5)
    [(ids, _)] = sampler.generate(prompts_of([5, 6, 7]), [(0, 0)], 0.0)
    assert ids[0] == logps.argmax()


def test_a_sample_depends_on_its_seed_only():
    sampler = HFSampler(tiny_model(), [1], Config(max_completion_length=10))
    prompts = prompts_of([5, 6, 7], [8], [9, 10, 11, 12, 13])
    together = sampler.generate(prompts * 4, [(p, i) for i in range(4) for p in range(3)], 1.0)
    for number, (ids, _) in enumerate(together):
        i, p = divmod(number, 3)
        [(alone, _)] = sampler.generate([prompts[p]], [(p, i)], 1.0)
        assert ids.tolist() == alone.tolist()
    assert len({tuple(ids) for ids, _ in together}) > 6
    assert sampler.generate([], [], 1.0) == []


def test_every_eos_id_stops_and_is_kept_and_a_limit_only_cuts():
    eos = list(range(1, 9))
    sampler = HFSampler(tiny_model(), eos, Config(max_completion_length=20))
    prompts = prompts_of([9, 10]) * 64
    seeds = [(0, i) for i in range(64)]
    whole = sampler.generate(prompts, seeds, 1.0)
    for ids, logps in whole:
        assert len(logps) == len(ids)
        assert ids[-1] in eos or len(ids) == 20
        assert not any(i in eos for i in ids[:-1])
    assert min(len(ids) for ids, _ in whole) < 20
    cut = sampler.generate(prompts, seeds, 1.0, limits=[3, 7] * 32)
    for (ids, _), (shorter, _), limit in zip(whole, cut, [3, 7] * 32, strict=True):
        assert shorter.tolist() == ids[:limit].tolist()


def test_ids_without_a_text_are_dropped():
    tokenizer = transformers.AutoTokenizer.from_pretrained(f"{HERE}/sample_data/model")
    tokenizer.add_special_tokens(dict(additional_special_tokens=["<think>", "</think>"]))
    written = "<think>1+2=3</think>3"
    ids = np.array(tokenizer(written, add_special_tokens=False)["input_ids"])
    assert grpo.decode(tokenizer, np.append(ids, len(tokenizer) + 5)) == written


# ------------------------------------------------------------------------------------------------
# What is trained


def test_masked_truncation_counts_in_the_baseline_but_not_in_the_loss():
    cfg = Config(num_generations=4, mask_truncated=True)
    samples = random_samples(4, 4)
    for s, reward in zip(samples, (1.0, 0.0, 0.0, 0.0), strict=True):
        s.reward = reward
    samples[2].finish_reason = samples[3].finish_reason = "length"
    grpo.assign_advantages(samples, cfg)
    assert samples[0].advantages[0] == pytest.approx((1 - 0.25) / (0.5 + 1e-4))
    grad, metrics = update_gradient(cfg, samples)
    expected_grad, expected = update_gradient(cfg, samples[:2])
    assert relative(grad, expected_grad) < 1e-6
    for key in ("loss", "entropy"):
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


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("budget", [1, 30, 1000])
def test_micro_batches_hold_every_sample_once_within_their_budget(budget, packed):
    samples = random_samples(17, 3)
    batches = grpo.micro_batches(samples, Config(micro_batch_tokens=budget), packed)
    assert sorted(id(s) for batch in batches for s in batch) == sorted(map(id, samples))
    for batch in batches:
        assert len(batch) == 1 or grpo.collate(batch, CPU, packed)["ids"].numel() <= budget


def test_several_updates_use_the_rollouts_own_logps():
    """The second mini-batch of a rollout is off-policy: its ratio is against the policy before the
    first."""
    samples = random_samples(8, 4)
    cfg = make_config(num_minibatches=2, beta=0, learning_rate=0.05, tis_cap=0)
    policy = tiny_policy()
    grpo.add_logps("old_logps", policy, samples, cfg)
    before = [s.old_logps.copy() for s in samples]
    metrics, moved = steps(policy, samples, cfg)
    assert moved and metrics["optimizer_steps"] == 2
    assert metrics["clip_ratio/region_mean"] > 0  # the ratio moved
    for logps, s in zip(before, samples, strict=True):
        assert (logps == s.old_logps).all()


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_context_is_read_and_not_trained(reduction, level):
    """Tokens that the policy did not sample are not in the loss, its counts and its lengths; the
    tokens after them see them."""
    samples = random_samples(9, 3, longest=12)
    rng = np.random.default_rng(1)
    for s in samples:
        s.sampled = rng.random(len(s.completion_ids)) < 0.6
        s.sampled[0] = True
    options = dict(loss_reduction=reduction, ratio_level=level)
    cfg = Config(beta=0.1, max_grad_norm=0, micro_batch_tokens=40, **options)
    policy = tiny_policy()
    grad, metrics = update_gradient(cfg, samples, policy=policy)
    for s in samples:  # nothing of the context is read but its ids
        for values in (s.advantages, s.sampler_logps, s.ref_logps):
            values[~s.sampled] = math.nan
    grad_with_nan, metrics_with_nan = update_gradient(cfg, samples, policy=policy)
    assert torch.equal(grad, grad_with_nan)
    assert metrics == metrics_with_nan

    # The same loss from the sampled tokens only, one sample after the other.
    logps, _ = policy(grpo.collate(samples, CPU))
    counts = (len(logps), len(samples))
    loss = 0.0
    for s, row in zip(samples, logps.split([int(s.sampled.sum()) for s in samples]), strict=True):
        parts = [x[s.sampled] for x in (s.ref_logps, s.sampler_logps, s.advantages)]
        ref, sampler, advantages = torch.from_numpy(np.array(parts))[:, None]
        mask = torch.ones_like(row[None])
        tensors = (row[None], row[None].detach(), ref, sampler, advantages, mask)
        loss = loss + grpo_loss(*tensors, cfg, *counts)[0]
    expected = torch.autograd.grad(loss, list(policy.parameters()))
    assert relative(grad, torch.cat([g.flatten().to(F64) for g in expected])) < 1e-5


def test_samples_without_a_gradient_need_no_pass():
    """Same gradient and loss, fewer passes; with a KL term they stay in."""
    samples = random_samples(12, 4)
    set_advantages(samples[::3], 0.0)
    with_tiny_advantages = []  # which are too small for any influence
    for s in samples:
        other = dataclasses.replace(s)
        other.advantages = s.advantages + 1e-30
        with_tiny_advantages.append(other)

    def passes(beta, samples):
        policy = tiny_policy()
        rows = count_passes(policy)
        options = dict(loss_reduction="sequence", micro_batch_tokens=1)
        cfg = Config(beta=beta, max_grad_norm=0, **options)
        grad, metrics = update_gradient(cfg, samples, policy=policy)
        return len(rows), grad, metrics["loss"]

    n_passes, grad, loss = passes(0.0, samples)
    all_passes, expected_grad, expected_loss = passes(0.0, with_tiny_advantages)
    assert (n_passes, all_passes) == (8, 12)
    assert relative(grad, expected_grad) < 1e-6
    assert loss == pytest.approx(expected_loss, rel=1e-6)
    assert passes(0.1, samples)[0] == 12


# ------------------------------------------------------------------------------------------------
# Steps that are taken, and steps that are not


def test_gradient_is_clipped_once_and_logged_before_clipping():
    samples = random_samples(6, 3)
    free, metrics = update_gradient(Config(max_grad_norm=0), samples)
    clipped, clipped_metrics = update_gradient(Config(max_grad_norm=0.01), samples)
    assert metrics["grad_norm"] == pytest.approx(free.norm().item(), rel=1e-5)
    assert metrics["grad_norm"] == clipped_metrics["grad_norm"]
    assert clipped.norm().item() == pytest.approx(0.01, rel=1e-3)


def test_an_update_starts_from_no_gradient():
    samples = random_samples(6, 3)
    cfg = make_config(beta=0.0)
    clean, _ = update_gradient(cfg, samples)
    policy = tiny_policy()
    policy(grpo.collate(samples, CPU))[0].sum().backward()
    recorder = Recorder(policy)
    grpo.update(policy, policy, recorder, samples, 1, cfg)
    of_the_caller, of_the_update = recorder.grads
    assert not torch.equal(clean, of_the_caller)
    assert torch.equal(clean, of_the_update)


def test_a_gradient_that_is_not_finite_skips_the_step():
    samples = random_samples(6, 3)
    set_advantages(samples[2:3], math.inf)
    policy = tiny_policy()
    metrics, moved = steps(policy, samples, make_config())
    assert metrics["skipped_steps"] == 1
    assert not moved
    assert all(p.grad is None for p in policy.parameters())


def test_no_step_without_a_signal():
    silent = random_samples(6, 3)
    set_advantages(silent, 0.0)
    cfg = make_config(num_generations=3, weight_decay=0.1, learning_rate=1e-3, beta=0.0)
    policy = tiny_policy()
    optimizer = grpo.make_optimizer(policy, cfg)
    learned = random_samples(6, 3)
    assert steps(policy, learned, cfg, optimizer=optimizer)[1]  # leaves momentum
    metrics, moved = steps(policy, silent, cfg, 2, optimizer=optimizer)
    assert not moved and metrics["optimizer_steps"] == 0
    assert metrics["loss"] == metrics["grad_norm"] == 0
    for s in learned:  # advantages of tokens that are not in the loss are no signal
        s.loss_mask[:] = False
    assert not steps(policy, learned, cfg, 3, optimizer=optimizer)[1]


def test_without_a_signal_the_kl_pulls_unless_the_policy_is_the_reference():
    """There the KL's gradient is rounding, which Adam would make as large as a step."""
    silent = random_samples(6, 3)
    set_advantages(silent, 0.0)
    cfg = make_config(num_generations=3, learning_rate=1e-3, beta=0.1)
    policy = tiny_policy()
    grpo.add_logps("ref_logps", policy, silent, cfg)
    optimizer = grpo.make_optimizer(policy, cfg)
    assert not steps(policy, silent, cfg, optimizer=optimizer)[1]
    assert steps(policy, random_samples(6, 3), cfg, optimizer=optimizer)[1]
    assert steps(policy, silent, cfg, optimizer=optimizer)[1]  # it has left the reference

    policy = tiny_policy()
    grpo.add_logps("ref_logps", grpo.Policy(tiny_model(seed=1), 1.0), silent, cfg)  # a teacher
    teacher = dataclasses.replace(cfg, reference="teacher")
    metrics, moved = steps(policy, silent, teacher)
    assert moved and metrics["kl"] > 0


@pytest.mark.parametrize("advantage", [1.0, 0.0])
def test_a_sampler_that_is_off_stops_before_a_weight_changes(advantage):
    """In a step without a signal, too."""
    samples = random_samples(4, 2)
    set_advantages(samples, advantage)
    cfg = make_config(num_minibatches=2, max_sampler_gap=1, beta=0.0)
    policy = tiny_policy()
    grpo.add_logps("sampler_logps", policy, samples, cfg)
    assert grpo.accumulate_gradient(policy, policy, samples, cfg)["sampler_gap"] < 1e-4
    for s in samples:
        s.sampler_logps = s.sampler_logps + 50
    before = copy_of(policy)
    with pytest.raises(grpo.TrainingError):
        steps(policy, samples, cfg)
    assert not has_moved(policy, before)
    samples[1].sampler_logps[0] = samples[0].sampler_logps[0] = math.nan
    with pytest.raises(grpo.TrainingError):
        steps(policy, samples, make_config(beta=0.1))


# ------------------------------------------------------------------------------------------------
# The optimizer


def test_learning_rate_schedules():
    def rates(**options):
        cfg = Config(learning_rate=1.0, max_steps=10, **options)
        updates = cfg.max_steps * cfg.num_minibatches * cfg.num_epochs
        return [grpo.learning_rate_at(k, cfg) for k in range(updates)]

    assert rates() == [1.0] * 10  # without warm-up the first step learns
    assert rates(lr_schedule="linear") == pytest.approx([1 - k / 10 for k in range(10)])
    assert rates(lr_schedule="cosine")[5] == pytest.approx(0.5)
    assert rates(warmup_steps=4)[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert len(rates(num_minibatches=2, num_epochs=3)) == 60
    assert rates(num_minibatches=2, lr_schedule="linear")[10] == 0.5


def test_every_update_has_its_own_rate():
    options = dict(learning_rate=1e-3, lr_schedule="linear", warmup_steps=3, max_steps=4)
    cfg = make_config(num_minibatches=2, beta=0.0, **options)
    policy = tiny_policy()
    recorder = Recorder(policy)
    for step in (1, 2, 3):
        metrics = grpo.update(policy, policy, recorder, random_samples(6, 3), step, cfg)
    assert recorder.rates == [grpo.learning_rate_at(k, cfg) for k in range(6)]
    assert metrics["learning_rate"] == recorder.rates[-1]


def test_weight_decay_spares_norms_and_biases():
    decayed, spared = grpo.make_optimizer(tiny_policy(), Config(weight_decay=0.1)).param_groups
    assert decayed["weight_decay"] == 0.1
    assert all(p.dim() == 2 for p in decayed["params"])
    assert spared["weight_decay"] == 0.0
    assert spared["params"] and all(p.dim() == 1 for p in spared["params"])
