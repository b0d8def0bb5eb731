"""The policy and the models that it wraps: log-probabilities, gradients of all parameters, the
reference, memory; tokens that end a completion; evaluation; notes of tokens."""

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
import harness.rows
import harness.scorer
import reward
from grpo import Config
from harness.flags import ConfigError
from tests.common import (
    BUNDLED,
    CPU,
    HERE,
    MODELS,
    fast_policy,
    ids_of,
    in_bfloat16,
    lines,
    logps_of,
    random_samples,
    relative,
    run,
    small_run,
    tiny_model,
    update_gradient,
)

pytest_plugins = "tests.common"


# ------------------------------------------------------------------------------------------------
# Log-probabilities and gradients


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("kind, options", MODELS)
def test_logps_are_the_models_own(kind, options, temperature):
    model = tiny_model(kind, **options)
    policy = fast_policy(model, temperature)
    assert policy.plain_head is (kind != "gemma2")
    samples = random_samples(7, 7)
    logps, entropy = logps_of(policy, samples)
    for i, s in enumerate(samples):
        ids = torch.tensor(np.concatenate([s.prompt.ids, s.completion_ids]))[None]
        logits = model(ids).logits[0, len(s.prompt.ids) - 1 : -1]
        expected = (logits / temperature).log_softmax(-1)  # [T, V]
        T = len(s.completion_ids)
        expected_logps = expected[torch.arange(T), s.completion_ids]
        expected_entropy = -(expected.exp() * expected).sum(-1)
        assert torch.allclose(logps[i, :T], expected_logps, atol=1e-5)
        assert torch.allclose(entropy[i, :T], expected_entropy, atol=1e-5)
        assert (logps[i, T:] == 0).all()
        of_one_sample, _ = logps_of(policy, [s])
        assert torch.allclose(of_one_sample[0], logps[i, :T], atol=1e-5)


@pytest.mark.parametrize("kind, options", MODELS)
def test_every_parameter_trains_and_the_checkpoint_loads(kind, options, tmp_path):
    from transformers import AutoModelForCausalLM

    if kind == "mixtral":
        options = dict(num_experts_per_tok=4)  # so that every expert is used
    model = tiny_model(kind, **options)
    policy = fast_policy(model, 1.0)
    before = {name: p.clone() for name, p in model.named_parameters()}
    samples = random_samples(24, 4)
    for s in samples[::3]:  # so that every token of the vocabulary is used
        s.completion_ids[:] = (np.arange(len(s.completion_ids)) + len(s.prompt.ids) * 3) % 32
    cfg = Config(max_sampler_gap=1e9, learning_rate=0.01, out_dir=str(tmp_path))
    grpo.update(policy, grpo.make_optimizer(policy, cfg), samples, cfg)
    assert [name for name, p in model.named_parameters() if torch.equal(p, before[name])] == []

    path = str(tmp_path / "saved")
    tokenizer = harness.rows.load_tokenizer(BUNDLED)
    harness.checkpoints.model_writer(model, tokenizer, path)(path)
    attention = model.config._attn_implementation
    loaded, info = AutoModelForCausalLM.from_pretrained(
        path, attn_implementation=attention, output_loading_info=True
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    ids = torch.arange(2, 20)[None]
    assert torch.equal(loaded(ids).logits, model(ids).logits)


@pytest.mark.slow
def test_without_the_fast_room_the_script_trains_with_the_same_gradient(tmp_path):
    copy = tmp_path / "copy"
    copy.mkdir()
    ignored = shutil.ignore_patterns(
        ".git", "fast.py", "head.py", "packing.py", "attention.py", "out*", ".ci-venv"
    )
    for name in ("harness", "sample_data"):
        shutil.copytree(os.path.join(HERE, name), copy / name, ignore=ignored)
    for name in ("grpo.py", "reward.py", "view.py"):
        shutil.copy(os.path.join(HERE, name), copy / name)
    assert not (copy / "harness" / "fast.py").exists()

    flags = ["--num_prompts", 6, "--num_generations", 4, "--max_steps", 2]
    flags += ["--save_every", 0, "--eval_data", ""]
    done = run(copy / "grpo.py", *flags, "--out_dir", tmp_path / "without")
    assert "harness/fast.py is missing" in done.stdout
    run(*flags, "--fast", "false", "--out_dir", tmp_path / "plain")
    run(*flags, "--out_dir", tmp_path / "fast")
    metrics = [lines(tmp_path / name / "metrics.jsonl") for name in ("without", "plain", "fast")]
    for without, plain, fast in zip(*metrics, strict=True):
        assert without["grad_norm"] == plain["grad_norm"] != 0
        assert plain["grad_norm"] == pytest.approx(fast["grad_norm"], rel=1e-5)
        assert plain["reward"] == fast["reward"]
        assert plain["tokens"] == fast["tokens"]


def test_dropout_is_forced_to_zero(tmp_path):
    tiny_model(attention_dropout=0.5).save_pretrained(tmp_path)
    model = grpo.load_model(str(tmp_path), Config()).train()
    ids = torch.arange(2, 20)[None]
    assert torch.equal(model(ids).logits, model(ids).logits)


def test_gradient_checkpointing_changes_memory_only():
    samples = random_samples(6, 3)
    cfg = Config(beta=0.1)
    plain, _ = update_gradient(cfg, samples)
    policy = fast_policy(tiny_model(), 1.0)
    policy.model.gradient_checkpointing_enable(
        gradient_checkpointing_kwargs=dict(use_reentrant=False)
    )
    calls = []
    # A hook before the module, because a recomputation may stop before the module's end.
    policy.model.model.layers[0].mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    recomputed, _ = update_gradient(cfg, samples, policy=policy)
    assert len(calls) == 2  # in the forward pass, and again in the backward pass
    assert relative(recomputed, plain) < 1e-6


# ------------------------------------------------------------------------------------------------
# The reference


@pytest.mark.parametrize("tied", [True, False])
def test_a_reference_in_bfloat16_is_the_policy_of_the_first_step(tied, tmp_path):
    path = str(tmp_path / "model")
    tiny_model(tie_word_embeddings=tied).save_pretrained(path)
    shutil.copy(os.path.join(BUNDLED.model, "generation_config.json"), path)
    cfg = Config(model=path, dtype="bfloat16")
    policy = fast_policy(grpo.load_model(path, cfg), 1.0)
    reference = grpo.load_reference(cfg, CPU.device, None)
    assert reference.plain_head
    assert reference.packs

    dtypes = {name: p.dtype for name, p in reference.model.named_parameters()}
    assert dtypes["model.layers.0.mlp.up_proj.weight"] == torch.bfloat16
    assert dtypes["model.norm.weight"] == torch.float32
    if tied:
        assert "lm_head.weight" not in dtypes
        assert dtypes["model.embed_tokens.weight"] == torch.float32
    else:
        assert dtypes["lm_head.weight"] == torch.bfloat16

    samples = random_samples(9, 3)
    for packs in (False, True):
        values = in_bfloat16(policy, samples, packs)
        expected = in_bfloat16(reference, samples, packs)
        for a, b in zip(values, expected, strict=True):
            assert torch.equal(a, b)

    options = dict(model=path, tokenizer=BUNDLED.model, dtype="bfloat16", max_sampler_gap=1e9)
    steps = small_run(tmp_path / "out", num_minibatches=1, learning_rate=1e-2, **options)
    assert steps[0]["kl_k1"] == steps[0]["kl"] == 0
    assert steps[-1]["kl"] > 0


def test_a_resumed_policy_is_compared_with_its_reference(tmp_path):
    small_run(tmp_path / "out", max_steps=1, beta=0.1)
    cfg = Config(**grpo.BUNDLED)
    checkpoint = harness.checkpoints.load_checkpoint(str(tmp_path / "out" / "step_000001"))
    prompts = [grpo.Prompt(ids_of([5, 6, 7]), "", {})]
    for start, is_the_reference in ((None, True), (checkpoint, False)):
        _, policy, reference, _ = grpo.load_policies(cfg, start, prompts, CPU.device)
        same = harness.models.same_weights(policy.model, reference.model)
        assert same is is_the_reference


# ------------------------------------------------------------------------------------------------
# Tokens that end a completion


def test_end_and_padding_tokens_from_everywhere():
    tokenizer = types.SimpleNamespace(eos_token_id=2, pad_token_id=None)
    model = tiny_model()
    for of_the_model, expected in ((None, [2]), (7, [7, 2]), ([7, 2], [7, 2])):
        model.generation_config.eos_token_id = of_the_model
        pad = expected[0]  # the tokenizer has none, and any will do
        assert harness.models.special_ids(model, tokenizer, Config()) == (expected, pad)

    tokenizer.pad_token_id = 0
    tokenizer.eos_token_id = None
    model.generation_config.eos_token_id = [7]
    assert harness.models.special_ids(model, tokenizer, Config()) == ([7], 0)
    model.generation_config.eos_token_id = None
    with pytest.raises(ConfigError, match="no EOS token"):
        harness.models.special_ids(model, tokenizer, Config(model="m"))


def test_ids_of_a_padded_vocabulary_have_no_text():
    assert grpo.decode(harness.rows.load_tokenizer(BUNDLED), ids_of([8, 10**6])) == "3"


# ------------------------------------------------------------------------------------------------
# Evaluation


def test_an_eval_leaves_out_what_a_reward_does_not_apply_to(monkeypatch):
    values = [[1.0, 0.0], [None, None], [0.0, 0.0]]  # of each prompt, for its samples

    def make_sample(group, value):
        [sample] = random_samples(1, 1)
        sample.group = group
        sample.prompt = grpo.Prompt([2], "", {"value": value})
        sample.text = ""
        return sample

    def sample(_, prompts, seeds, cfg, world, greedy, player):
        n = 1 if greedy else cfg.num_generations
        samples = []
        for prompt in prompts:
            samples += prompt.samples[:n]
        return samples

    prompts = []
    for group, of_group in enumerate(values):
        samples = [make_sample(group, value) for value in of_group]
        prompts.append(types.SimpleNamespace(samples=samples))
    monkeypatch.setattr(grpo, "sample", sample)
    monkeypatch.setattr(grpo, "add_texts", lambda samples, tokenizer: None)

    def value_in_row(completion, row):
        return row["value"]

    scorer = harness.scorer.Scorer([reward.Reward("value", 1.0, value_in_row, trusted=True)])
    cfg = Config(eval_samples=2)
    metrics = grpo.evaluate(None, prompts, None, scorer, 1, cfg, CPU)
    assert metrics["eval_accuracy"] == 0.5
    assert metrics["eval_pass@1"] == 0.25
    assert metrics["eval_pass@2"] == 0.5
    metrics = grpo.evaluate(None, prompts[1:2], None, scorer, 1, cfg, CPU)
    assert math.isnan(metrics["eval_accuracy"])
    assert "eval_pass@1" not in metrics


# ------------------------------------------------------------------------------------------------
# Notes of tokens, for the log


@pytest.mark.parametrize("num_minibatches", [1, 2])
@pytest.mark.parametrize("micro_batch_tokens", [10, 10**6])
def test_what_is_noted_of_a_token(micro_batch_tokens, num_minibatches):
    """The push is minus the gradient by the log-probability, in units of an advantage. Here the
    ratio and all weights are 1, so the push is the advantage itself, less the KL's."""
    samples = random_samples(8, 4)
    policy = fast_policy(tiny_model(), 1.0)
    grpo.compute_logps(policy, samples, "old_logps", Config(micro_batch_tokens=100), CPU)
    for s in samples:
        s.sampler_logps = s.old_logps
        s.ref_logps = s.old_logps - np.float32(0.25)
    cfg = Config(
        log_tokens=5,
        beta=0.1,
        kl_estimator="k1",
        learning_rate=0,
        num_minibatches=num_minibatches,
        micro_batch_tokens=micro_batch_tokens,
    )
    grpo.note_tokens(policy, samples, cfg, CPU)
    assert [bool(s.token_notes) for s in samples] == [True] * 5 + [False] * 3
    for s in samples[:5]:
        notes = s.token_notes
        T = len(s.completion_ids)
        assert notes["logp"] == pytest.approx(s.old_logps, abs=1e-5)
        assert notes["gap"] == pytest.approx(np.zeros(T), abs=1e-5)
        assert notes["kl"] == pytest.approx(np.full(T, 0.25), abs=1e-5)
        assert min(notes["entropy"]) > 0
        assert notes["push"] == pytest.approx(s.advantages - 0.1, abs=1e-5)


def test_the_texts_of_tokens_join_to_the_completion(tmp_path):
    """Bytes and the end are included. Noted is the group with the strongest signal."""
    small_run(tmp_path / "out", num_minibatches=1, max_steps=1)
    rows = lines(tmp_path / "out" / "completions.jsonl")
    signal = np.zeros(3)
    for row in rows:
        signal[row["group"]] += abs(row["advantage"])
    for row in rows:
        assert ("tokens" in row) == (row["group"] == np.argmax(signal))
        if "tokens" in row:
            assert "".join(row["tokens"]["text"]) == row["completion"]
            assert {len(column) for column in row["tokens"].values()} == {row["length"]}


def test_notes_of_tokens_are_at_most_100_kb_a_step():
    """At 512 tokens a completion."""
    samples = random_samples(16, 8, longest=512)
    rng = np.random.default_rng(0)
    policy = fast_policy(tiny_model(max_position_embeddings=1024), 1.0)
    for s in samples:
        s.completion_ids = ids_of(rng.integers(2, 32, 512))
        s.sampled = np.ones(512, bool)
        s.in_loss = s.sampled
        s.advantages = np.full(512, 1.0 + (s.group == 0))
    cfg = Config(beta=0.1, micro_batch_tokens=4096)
    grpo.compute_logps(policy, samples, "ref_logps", cfg, CPU)
    for s in samples:  # the sampler's differ as bfloat16 rounds, the reference's as a policy moves
        noisy = s.ref_logps + rng.normal(0, 0.02, (2, 512))
        s.sampler_logps, s.ref_logps = noisy.astype(np.float32)
    grpo.note_tokens(policy, samples, cfg, CPU)
    assert [bool(s.token_notes) for s in samples] == [True] * 6 + [False] * 10
    notes = []
    for s in samples[:6]:
        notes.append({**harness.log.in_thousandths(s.token_notes), "text": ["token"] * 512})
    size = len(json.dumps(notes, separators=(",", ":")))
    assert 50_000 < size < 100_000


# ------------------------------------------------------------------------------------------------
# Memory


@pytest.mark.slow
def test_freed_memory_stays_in_the_process():
    """A tensor that is made again takes the memory pages of the one before. Otherwise the kernel
    gives new pages, and fills them with zeros."""
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

    def page_faults(*args):
        command = [sys.executable, "-c", code, *args]
        options = dict(env=env, cwd=HERE, capture_output=True, check=True)
        return int(subprocess.run(command, **options).stdout)

    assert page_faults() > 1000
    assert page_faults("keep") < 100
