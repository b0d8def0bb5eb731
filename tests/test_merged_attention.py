"""Attention in a packed row without masks: outputs, gradients, and where it is taken."""

import types

import numpy as np
import pytest
import torch

import grpo
import harness.attention
import harness.merged_attention
import harness.packing
import harness.ranks
from grpo import Config, Prompt, Sample
from harness.merged_attention import MergedAttention
from tests.common import (
    CPU,
    F64,
    MODELS,
    fast_policy,
    ids_of,
    in_bfloat16,
    leave_world,
    logps_of,
    random_samples,
    relative,
    tiny_model,
    update_gradient,
)

pytest_plugins = "tests.common"


def samples_of(groups):
    """groups: the prompt's tokens, and those of its completions."""
    rng = np.random.default_rng(0)
    samples = []
    for group, (prompt_size, *sizes) in enumerate(groups):
        prompt = Prompt(ids_of(rng.integers(2, 32, prompt_size)), "", {})
        for size in sizes:
            ids = ids_of(rng.integers(2, 32, size))
            samples.append(Sample(group, prompt, ids, np.zeros(size), "stop"))
    return samples


# Groups of a row: tokens of the prompt, and of its completions.
ROWS = [
    [(5, 7, 3)],
    [(1, 4, 1, 9)],  # a prompt of one token, a completion of one
    [(3, 1, 1), (4, 2, 6), (1, 5), (2, 1)],  # groups of which no completion has a second token
    [(6, 2, 2), (4, 2)],  # one query per completion
    [(3, 1), (2, 1, 1)],  # the row holds prompts only
]


def merged_inputs(heads, key_heads, tokens):
    torch.manual_seed(0)
    shapes = [(tokens, heads, 8), (tokens, key_heads, 8), (tokens, key_heads, 8)]
    return [torch.randn(*shape, dtype=F64, requires_grad=True) for shape in shapes]


def seen_keys(samples):
    """[S, S] in row order: each token sees its prompt and its past, by the words of packed_layout,
    and not by its arrays."""
    texts = []  # group and position of each token, and which text it belongs to
    order = harness.packing.by_group(samples)
    groups = list(dict.fromkeys(samples[i].group for i in order))
    for group in groups:
        size = next(len(s.prompt.ids) for s in samples if s.group == group)
        texts += [(group, position, "prompt") for position in range(size)]
    for i in order:
        texts += [(samples[i].group, n, i) for n in range(len(samples[i].completion_ids) - 1)]
    seen = torch.zeros(len(texts), len(texts), dtype=torch.bool)
    for query, (group, position, text) in enumerate(texts):
        for key, (other_group, other_position, other) in enumerate(texts):
            same_past = text == other and other_position <= position
            prompt = text != "prompt" and other == "prompt"
            seen[query, key] = group == other_group and (same_past or prompt)
    return seen


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("heads, key_heads", [(2, 2), (6, 2)])
def test_merged_attention_is_attention(row, heads, key_heads):
    """Against one softmax over all that a token sees, in float64."""
    samples = samples_of(row)
    seen = seen_keys(samples)
    inputs = merged_inputs(heads, key_heads, len(seen))
    layout = harness.packing.packed_layout(samples)
    assert layout["ids"].shape[1] == len(seen)
    merged = MergedAttention.apply(*inputs, layout["calls"], 0.3)

    query, key, value = inputs
    key, value = (x.repeat_interleave(heads // key_heads, 1) for x in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, key) * 0.3
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    expected = torch.einsum("hqk,khd->qhd", weights, value)
    assert relative(merged, expected) < 1e-15

    direction = torch.randn_like(expected)
    gradients = torch.autograd.grad(merged, inputs, direction)
    for gradient, other in zip(
        gradients, torch.autograd.grad(expected, inputs, direction), strict=True
    ):
        assert relative(gradient, other) < 1e-15


def test_the_calls_of_a_row():
    """Three calls, as CUDA's kernel takes them, or one for each text. No text is empty, and a
    group's completions are one text before their prompt."""
    samples = samples_of([(3, 1, 1), (4, 2, 6), (1, 5)])
    layout = harness.packing.packed_layout(samples, one_by_one=False)
    prompts, to_prompt, own = layout["calls"]

    def starts(call):
        query_starts, key_starts, *longest = call["offsets"]
        assert query_starts.dtype == key_starts.dtype == np.int32
        return [query_starts.tolist(), key_starts.tolist(), *longest]

    assert starts(prompts) == [[0, 4, 5, 8], [0, 4, 5, 8], 4, 4]
    assert starts(to_prompt) == [[0, 6, 10], [0, 4, 5], 6, 4]
    assert starts(own) == [[0, 5, 6, 10], [0, 5, 6, 10], 5, 5]
    assert (prompts["causal"], to_prompt["causal"], own["causal"]) == (True, False, True)
    assert to_prompt["queries"] == own["queries"] == own["keys"] == slice(8, 18)
    assert prompts["queries"] == slice(0, 8) and to_prompt["keys"] == slice(0, 5)
    assert layout["mean_text"] == 18 / 6

    calls = harness.packing.packed_layout(samples)["calls"]
    queries = [(call["queries"].start, call["queries"].stop) for call in calls]
    assert queries == [(0, 4), (4, 5), (5, 8), (8, 14), (14, 18), (8, 13), (13, 14), (14, 18)]
    keys = [(call["keys"].start, call["keys"].stop) for call in calls]
    assert keys == [(0, 4), (4, 5), (5, 8), (0, 4), (4, 5), (8, 13), (13, 14), (14, 18)]
    assert [call["causal"] for call in calls] == [True] * 3 + [False] * 2 + [True] * 3


# ------------------------------------------------------------------------------------------------
# Through the policy


@pytest.fixture
def calls(monkeypatch):
    """For each call of MergedAttention, the number of its kernels."""
    counted = []
    honest = MergedAttention.apply

    def counting(*args):
        counted.append(len(args[3]))
        return honest(*args)

    replaced = types.SimpleNamespace(apply=counting)
    monkeypatch.setattr(harness.attention, "MergedAttention", replaced)
    return counted


def merging(policy):
    policy.attention = "merged"
    return policy


PLAIN_CAUSAL = ("qwen2", "qwen3", "llama", "gemma", "mixtral")


@pytest.mark.parametrize("kind, options", MODELS)
def test_all_models_have_the_same_gradient(kind, options, calls):
    """Those with windows and caps keep their masks, in the layers that have them."""
    policy = merging(fast_policy(tiny_model(kind, **options), 0.7))
    parameters = list(policy.parameters())
    samples = random_samples(11, 4)
    logps, entropy = logps_of(policy, samples, packs=False)
    assert not calls
    merged_logps, merged_entropy = logps_of(policy, samples, packs=True)
    assert len(calls) == (2 if kind in PLAIN_CAUSAL else 0)
    assert torch.allclose(logps, merged_logps, atol=2e-5)
    assert torch.allclose(entropy, merged_entropy, atol=2e-5)
    expected = torch.autograd.grad(logps.square().sum(), parameters)
    gradient = torch.autograd.grad(merged_logps.square().sum(), parameters)
    flat = [torch.cat([x.flatten() for x in gradients]) for gradients in (gradient, expected)]
    assert relative(*flat) < 1e-5


@pytest.mark.parametrize("row", ROWS)
def test_the_plain_policys_gradient_in_float64(row, calls):
    samples = samples_of(row)
    for s in samples:
        s.advantages[:] = np.random.default_rng(len(s.completion_ids)).normal()
    cfg = Config(beta=0.0, micro_batch_tokens=10**6, max_grad_norm=0)
    plain = grpo.Policy(tiny_model(dtype=F64), 1.0)
    expected, _ = update_gradient(cfg, samples, policy=plain)
    policy = merging(fast_policy(tiny_model(dtype=F64), 1.0))
    gradient, _ = update_gradient(cfg, samples, policy=policy)
    assert relative(gradient, expected) < 1e-12
    assert calls == [len(harness.packing.packed_layout(samples)["calls"])] * 2  # layers


def test_recomputed_layers_merge_too(calls):
    model = tiny_model()
    policy = merging(fast_policy(model, 1.0))
    samples = random_samples(6, 3)
    parameters = list(model.parameters())
    logps, _ = logps_of(policy, samples)
    expected = torch.autograd.grad(logps.square().sum(), parameters)
    assert len(calls) == 2
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=dict(use_reentrant=False))
    logps, _ = logps_of(policy, samples)
    gradient = torch.autograd.grad(logps.square().sum(), parameters)
    assert len(calls) == 2 + 4  # layers compute their activations a second time
    assert all(torch.equal(a, b) for a, b in zip(gradient, expected, strict=True))


def gradient_of_ranks(out):
    """On each rank: rank 0 saves the gradient of samples that the ranks share, in several
    micro-batches."""
    world = harness.ranks.join_world(CPU.device)
    policy = merging(fast_policy(tiny_model(dtype=F64), 0.8))
    ddp = grpo.wrap(policy, Config(), world)
    cfg = Config(beta=0.1, micro_batch_tokens=40, max_grad_norm=0, temperature=0.8)
    samples = random_samples(15, 5, np.float64)
    gradient, _ = update_gradient(cfg, samples, F64, ddp, policy, world)
    if world.rank == 0:
        torch.save(gradient, out)
    del ddp
    leave_world()


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_have_the_gradient_of_one_process(ranks, fork, tmp_path):
    name = "tests.test_merged_attention.gradient_of_ranks"
    done = fork(name, tmp_path / "out", ranks=ranks)[1]()
    assert done.returncode == 0, done.stderr[-3000:]
    cfg = Config(beta=0.1, micro_batch_tokens=10**6, max_grad_norm=0, temperature=0.8)
    samples = random_samples(15, 5, np.float64)
    plain = grpo.Policy(tiny_model(dtype=F64), 0.8)
    expected, _ = update_gradient(cfg, samples, F64, policy=plain)
    assert relative(torch.load(tmp_path / "out"), expected) < 1e-12


def test_bfloat16_rounds_no_more_than_masks_do(calls):
    """Neither log-probabilities nor gradients."""
    policy = fast_policy(tiny_model(), 1.0)
    samples = random_samples(40, 4, longest=60)
    parameters = list(policy.parameters())

    def results(forward, way):
        policy.attention = way
        logps, _ = forward(policy, samples, True)
        gradients = torch.autograd.grad(logps.square().sum(), parameters)
        return logps.detach(), torch.cat([x.flatten() for x in gradients])

    exact = results(logps_of, "masks")
    assert not calls
    masks = results(in_bfloat16, "masks")
    merged = results(in_bfloat16, "merged")
    assert len(calls) == 2
    for right, rounded, other in zip(exact, merged, masks, strict=True):
        assert 0 < relative(rounded, right) < 1.2 * relative(other, right)


# ------------------------------------------------------------------------------------------------
# Where it is taken


@pytest.mark.parametrize(
    "amx, dtype, length, merged",
    [
        (False, torch.float32, 31, False),
        (False, torch.float32, 32, True),
        (True, torch.bfloat16, 199, False),
        (True, torch.bfloat16, 200, True),
        (False, torch.bfloat16, 399, False),
        (False, torch.bfloat16, 400, True),
    ],
)
def test_on_a_cpu_the_lengths_decide(amx, dtype, length, merged, monkeypatch, calls):
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    policy = fast_policy(tiny_model(), 1.0)
    batch = grpo.collate(samples_of([(length, length + 1)]), CPU.device, policy.rows)
    assert batch["mean_text"] == length
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16), torch.no_grad():
        policy(batch)
        assert len(calls) == (2 if merged else 0)
        policy.attention = "masks"
        calls.clear()
        policy(batch)
        assert not calls
