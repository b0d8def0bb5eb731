"""Sampling, micro-batches, and an update where something is missing, broken or without a signal:
which optimizer steps are taken. test_grpo.py has the numbers."""

import contextlib
import copy
import dataclasses
import json
import math
import shutil

import numpy as np
import pytest
import torch
import transformers

import grpo
from extras import models, packed, preflight
from extras.errors import TrainingError
from grpo import Config, HFSampler
from tests.common import (
    CPU,
    HERE,
    draw_from,
    metrics_of,
    random_samples,
    small_run,
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


# ------------------------------------------------------------------------------------------------
# What is loaded and sampled


def test_dropout_is_forced_to_zero_in_configs_inside_configs():
    inner = transformers.LlamaConfig(attention_dropout=0.5)
    outer = transformers.LlavaConfig(text_config=inner, vision_config=None)
    models.plain_forward(outer)
    assert outer.text_config.attention_dropout == 0.0
    yours = copy.deepcopy(outer)
    yours.text_config.attention_dropout = 0.1  # set after the file was read
    models.plain_forward(yours, models.changed_settings(yours, outer))
    assert yours.text_config.attention_dropout == 0.1


@pytest.mark.parametrize(
    "flag", ["output_router_logits", "output_hidden_states", "output_attentions", "return_dict"]
)
def test_a_config_that_asks_for_other_outputs_changes_no_number(flag, tmp_path):
    """As TRL's SFT leaves it in mixtures. The same model without the flag has the right numbers,
    and a checkpoint has the flag."""
    found = []
    for name, flags in (("plain", {}), ("other", {flag: flag != "return_dict"})):
        path = tmp_path / name / "model"
        shutil.copytree(f"{HERE}/sample_data/model", path)
        tiny_model("mixtral", vocab_size=32).save_pretrained(path)
        config = json.loads((path / "config.json").read_text()) | flags
        (path / "config.json").write_text(json.dumps(config))
        small_run(tmp_path / name / "run", model=str(path), max_steps=1)
        found.append(metrics_of(tmp_path / name / "run"))
        saved = tmp_path / name / "run" / "step_000001" / "config.json"
        assert json.loads(saved.read_text()).items() >= flags.items()
    assert found[0] == found[1]


def test_a_gap_of_few_tokens_may_be_larger():
    """SmolLM2-135M in bfloat16 with vLLM on a CPU: of 4,350 tokens one was 1.04 off, and a pair of
    them may be 0.57. All have a mean of 0.046."""
    cfg = Config(dtype="bfloat16")
    for gap, tokens in ((0.05, math.inf), (1.0, 1), (0.57, 2)):
        grpo.check_gap(gap, cfg, tokens)
    for gap, tokens in ((0.11, math.inf), (0.11, 800), (0.4, 99), (math.nan, 1), (math.nan, 1e6)):
        with pytest.raises(grpo.TrainingError):
            grpo.check_gap(gap, cfg, tokens)
    grpo.check_gap(0.05, cfg)


@pytest.mark.parametrize("prompts, ends", [(1, False), (170, True)])
def test_a_step_knows_of_how_many_tokens_its_gap_is(prompts, ends, tmp_path, monkeypatch):
    """In float32 a mean of 3e-4 is a fault; of two tokens it is none."""
    generate = grpo.HFSampler.generate

    def faulty(self, *args):
        completions = generate(self, *args)
        for fields in completions:
            fields["sampler_logps"] = fields["sampler_logps"] + np.float32(3e-4)
        return completions

    monkeypatch.setattr(grpo.HFSampler, "generate", faulty)
    options = dict(num_prompts=prompts, num_generations=2, num_minibatches=1, max_steps=1, beta=0.1)
    options |= dict(max_completion_length=1 + 2 * ends, save_every=0, micro_batch_tokens=0)
    with pytest.raises(grpo.TrainingError) if ends else contextlib.nullcontext():
        small_run(tmp_path / "run", **options)


def test_what_no_text_reaches_is_not_trained(tmp_path):
    """Else --weight_decay would shrink an image tower: with several ranks its gradient is 0, and
    not None."""
    size = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    text = transformers.LlamaConfig(vocab_size=32, **size)
    vision = transformers.CLIPVisionConfig(image_size=4, patch_size=2, **size)
    config = transformers.LlavaConfig(text_config=text, vision_config=vision, image_token_index=3)
    transformers.LlavaForConditionalGeneration(config).save_pretrained(tmp_path)
    model = grpo.load_model(str(tmp_path), Config(), CPU)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    model(torch.arange(8)[None]).logits.sum().backward()
    assert trained == {name for name, p in model.named_parameters() if p.grad is not None}
    assert len(trained) < len(list(model.parameters()))


def test_a_limit_only_cuts():
    sampler = HFSampler(tiny_model(), [*range(1, 9)], Config(max_completion_length=20))
    prompts = [np.array([9, 10])] * 64
    seeds = [(0, i) for i in range(64)]
    whole = draw_from(sampler, prompts, seeds, 1.0)
    cut = draw_from(sampler, prompts, seeds, 1.0, limits=[3, 7] * 32)
    for (ids, _), (shorter, logps), limit in zip(whole, cut, [3, 7] * 32, strict=True):
        assert shorter.tolist() == ids[:limit].tolist() and len(logps) == len(shorter)
    assert draw_from(sampler, [], [], 1.0) == []


def test_ids_without_a_text_are_dropped():
    tokenizer = transformers.AutoTokenizer.from_pretrained(f"{HERE}/sample_data/model")
    tokenizer.add_special_tokens(dict(additional_special_tokens=["<think>", "</think>"]))
    written = "<think>1+2=3</think>3"
    ids = np.array(tokenizer(written, add_special_tokens=False)["input_ids"])
    assert tokenizer.decode(np.append(ids, len(tokenizer) + 5)) == written


def test_cut_off_completions_that_earn_nothing_are_said():
    """More than a quarter of the step, and none with a reward."""
    samples = random_samples(8, 2)
    for n, reward, said in ((2, 0.0, False), (3, 0.0, True), (3, 1.0, False)):
        for i, s in enumerate(samples):
            s.finish_reason, s.reward = ("stop", 1.0) if i >= n else ("length", reward)
        assert bool(preflight.check_cut_off(samples)) == said
    for i, s in enumerate(samples):
        s.reward = 0.6 * (i >= 3)
    for before, flag in ((0.7, "--max_completion_length"), (0.8, "--learning_rate")):
        assert flag in preflight.check_cut_off(samples, [0.1, before])  # 0.375 now


# ------------------------------------------------------------------------------------------------
# What is trained


@pytest.mark.parametrize("is_packed", [True, False])
@pytest.mark.parametrize("budget", [1, 26, 60, 1000])
def test_micro_batches_hold_every_sample_once_within_their_budget(budget, is_packed):
    """The prompt counts again where a batch begins within a group."""
    samples = random_samples(17, 5)
    for s in samples:
        s.prompt.ids = np.resize(s.prompt.ids, 9)
    policy = tiny_policy()
    if is_packed:
        policy = packed.PackedPolicy(policy.model, policy.temperature)
    batches = policy.micro_batches(samples, Config(micro_batch_tokens=budget))
    assert sorted(id(s) for batch in batches for s in batch) == sorted(map(id, samples))
    sizes = [policy.collate(batch)["ids"].numel() for batch in batches]
    for size, batch in zip(sizes, batches, strict=True):
        assert len(batch) == 1 or size <= budget
    assert len(batches) <= 2 * sum(sizes) / budget + 2  # and they are filled


def test_nothing_of_a_context_is_read_but_its_ids():
    """Of tokens that an environment wrote. test_grpo.py shows that they are not trained."""
    samples = random_samples(9, 3)
    for s in samples:
        s.sampled[1::2] = False
    cfg = Config(beta=0.1, max_grad_norm=0, micro_batch_tokens=40, ratio_level="sequence")
    grad, metrics = update_gradient(cfg, samples)
    for s in samples:
        for values in (s.advantages, s.sampler_logps, s.ref_logps):
            values[~s.sampled] = math.nan
    grad_with_nan, metrics_with_nan = update_gradient(cfg, samples)
    assert torch.equal(grad, grad_with_nan)
    assert metrics == metrics_with_nan
    samples[0].completion_ids[1] += 1
    assert not torch.equal(grad, update_gradient(cfg, samples)[0])


@pytest.mark.parametrize("beta, n_passes", [(0.0, 8), (0.1, 12)])
def test_samples_without_a_gradient_need_no_pass(beta, n_passes):
    """With a KL term all have one."""
    samples = random_samples(12, 4)
    set_advantages(samples[::3], 0.0)
    passes = []
    policy = tiny_policy()
    policy.register_forward_pre_hook(lambda _, args: passes.append(args))
    update_gradient(Config(beta=beta, micro_batch_tokens=1), samples, policy=policy)
    assert len(passes) == n_passes


# ------------------------------------------------------------------------------------------------
# Steps that are taken, and steps that are not


def test_an_update_starts_from_no_gradient():
    samples = random_samples(6, 3)
    policy = tiny_policy()
    policy(grpo.collate(samples, CPU))[0].sum().backward()
    clean, _ = update_gradient(Config(), samples)
    assert torch.equal(update_gradient(Config(), samples, policy=policy)[0], clean)


def test_a_gradient_that_is_not_finite_skips_the_step():
    samples = random_samples(6, 3)
    set_advantages(samples[2:3], math.inf)
    policy = tiny_policy()
    metrics, moved = steps(policy, samples, make_config())
    assert metrics["skipped_steps"] == 1
    assert not moved
    assert all(p.grad is None for p in policy.parameters())


def test_prompts_come_in_an_order_of_each_pass_or_in_that_of_the_rows():
    rows = list("abcde")
    cfg = Config(num_prompts=3, shuffle=False)
    assert [grpo.prompts_of_step(rows, step, cfg) for step in (1, 2)] == [
        ["a", "b", "c"],
        ["d", "e", "a"],
    ]
    passes = []
    for seed in range(4):
        cfg = Config(num_prompts=3, seed=seed)
        drawn = [row for step in range(1, 11) for row in grpo.prompts_of_step(rows, step, cfg)]
        passes += ["".join(drawn[i : i + 5]) for i in range(0, 30, 5)]
    assert {"".join(sorted(one)) for one in passes} == {"abcde"} and len(set(passes)) > 12


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
        s.trainable[:] = False
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

    samples = random_samples(6, 3)  # one of two minibatches has the signal
    set_advantages(samples[1:], 0.0)
    halves = dataclasses.replace(cfg, num_minibatches=2)
    for step in range(1, 9):
        policy = tiny_policy()
        grpo.add_logps("ref_logps", policy, samples, cfg)
        order = np.random.default_rng((cfg.seed, grpo.MINIBATCHES, step, 0)).permutation(6)
        metrics, _ = steps(policy, samples, halves, step)
        assert metrics["optimizer_steps"] == (2 if 0 in order[:3] else 1)

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
    with pytest.raises(TrainingError):
        steps(policy, samples, cfg)
    assert not has_moved(policy, before)
    samples[1].sampler_logps[0] = samples[0].sampler_logps[0] = math.nan
    with pytest.raises(TrainingError):
        steps(policy, samples, make_config(beta=0.1))


# ------------------------------------------------------------------------------------------------
# The optimizer


def test_weight_decay_spares_norms_and_biases():
    policies = [tiny_policy() for _ in range(3)]
    for policy, weight_decay in zip(policies, (0.5, 0.0), strict=False):
        for p in policy.parameters():
            p.grad = torch.ones_like(p)
        optimizer = grpo.make_optimizer(policy, Config(weight_decay=weight_decay))
        optimizer.param_groups[0]["lr"] = 0.1
        optimizer.step()
    for decayed, other, start in zip(*(p.parameters() for p in policies), strict=True):
        share = 0.1 * 0.5 if start.dim() == 2 else 0.0
        assert torch.allclose(decayed, other - share * start, atol=1e-6)
