"""The fast policy has the numbers of the plain one: log-probabilities, entropy, gradients."""

import dataclasses

import numpy as np
import pytest
import torch
import transformers
from torch import nn

import grpo
from extras import fast
from grpo import Config, Policy, Prompt, Sample, collate

CPU = torch.device("cpu")
V = 211  # tokens in the vocabulary
SIZES = dict(vocab_size=V, hidden_size=16, intermediate_size=24, num_hidden_layers=2)
SIZES |= dict(num_attention_heads=2, num_key_value_heads=1, head_dim=8, max_position_embeddings=64)
MODELS = {
    "llama, tied": transformers.LlamaConfig(**SIZES, tie_word_embeddings=True),
    "llama, untied": transformers.LlamaConfig(**SIZES, tie_word_embeddings=False),
    "qwen3": transformers.Qwen3Config(**SIZES),
    "gpt2": transformers.GPT2Config(vocab_size=V, n_embd=16, n_layer=2, n_head=2, n_positions=64),
    "mistral, a window": transformers.MistralConfig(**SIZES, sliding_window=6),
}
BOTH = pytest.mark.parametrize("share", [True, False])


def tiny(config, dtype=torch.float64):
    torch.manual_seed(0)
    config = grpo.without_randomness(config)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() > 1:
                p.mul_(10)  # logits as large as those of a trained model
    return model.to(dtype).eval()


def make_samples(prompts=(9, 5, 14), lengths=(1, 7, 3, 12)) -> list:
    """A group for each length of a prompt, with a completion of each of the lengths."""
    random = np.random.default_rng(0)
    samples = []
    for group, size in enumerate(prompts):
        prompt = Prompt(random.integers(V, size=size), "", {})
        for T in lengths:
            ids = random.integers(V, size=T)
            samples.append(Sample(group, prompt, ids, random.normal(size=T) - 5))
            samples[-1].advantages = random.normal(size=T)
    return samples


def outputs(policy, samples, ddp=None) -> tuple:
    """logps and entropy [all sampled tokens], and the gradients of the sum of advantage * logp."""
    batch = collate(samples, CPU, policy.layout)
    policy.model.zero_grad()
    logps, entropy = (ddp or policy)(batch)
    assert not entropy.requires_grad
    (logps * batch["advantages"])[batch["sampled"]].sum().backward()
    gradients = {name: p.grad for name, p in policy.model.named_parameters()}
    return logps[batch["sampled"]].detach(), entropy[batch["sampled"]], gradients


def assert_same(
    policy, plain, samples, limit=1e-5
):  # norms round to float32, and an update of 1e-15 flips a bit
    ours = outputs(policy, samples)
    expected = outputs(plain, samples)
    torch.testing.assert_close(ours, expected, rtol=limit, atol=limit)


@pytest.fixture
def small_tiles(monkeypatch):
    """Several blocks of texts, and several tiles, some of them computed twice."""
    monkeypatch.setattr(fast, "BLOCK", dict(cpu=20))
    monkeypatch.setattr(fast, "TILE", dict(cpu=2000))
    monkeypatch.setattr(fast, "KEPT", dict(cpu=3000))


# -- The head


@pytest.mark.parametrize("kept", [0, 100, 10**9])
@pytest.mark.parametrize("tile", [1, 40, 10**9])
def test_head_has_the_gradient_of_autograd(tile, kept, monkeypatch):
    monkeypatch.setattr(fast, "TILE", dict(cpu=tile))
    monkeypatch.setattr(fast, "KEPT", dict(cpu=kept))
    torch.manual_seed(0)
    n, H, V, temperature = 5, 4, 23, 0.7
    hidden = torch.randn(n, H, dtype=torch.float64, requires_grad=True)
    weight = (100 * torch.randn(V, H, dtype=torch.float64)).requires_grad_()  # exp overflows
    targets = torch.tensor([0, 22, 7, 8, 8])
    upstream = torch.randn(n, dtype=torch.float64)

    table = (hidden @ weight.T / temperature).log_softmax(-1)  # [n, V]
    expected = table.gather(-1, targets[:, None])[:, 0]
    logps, entropy = fast.HeadLogps.apply(hidden, weight, targets, temperature)
    torch.testing.assert_close(logps, expected)
    torch.testing.assert_close(entropy, torch.special.entr(table.detach().exp()).sum(-1))
    ours = torch.autograd.grad(logps, [hidden, weight], upstream, retain_graph=True)
    again = torch.autograd.grad(logps, [hidden, weight], upstream)
    theirs = torch.autograd.grad(expected, [hidden, weight], upstream)
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(again, theirs)


def test_frozen_head_and_no_tokens():
    hidden = torch.randn(3, 4, requires_grad=True)
    logps, _ = fast.HeadLogps.apply(hidden, torch.randn(9, 4), torch.tensor([1, 2, 3]), 1.0)
    assert torch.autograd.grad(logps.sum(), hidden)[0].any()
    none = fast.HeadLogps.apply(hidden[:0], torch.randn(9, 4), torch.zeros(0).long(), 1.0)
    assert [len(v) for v in none] == [0, 0]


def test_backward_has_the_dtype_of_forward(monkeypatch):
    """Its products are in bfloat16 although backward runs outside of autocast."""
    dtypes = []
    tiles = fast.tiles

    def spied(ctx, hidden, weight):
        dtypes.append(hidden.dtype)
        return tiles(ctx, hidden, weight)

    monkeypatch.setattr(fast, "tiles", spied)
    hidden = torch.randn(3, 4, requires_grad=True)
    weight = torch.randn(9, 4, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        logps, entropy = fast.HeadLogps.apply(hidden, weight, torch.tensor([1, 2, 3]), 1.0)
    logps.sum().backward()
    assert dtypes == [torch.bfloat16] * 2
    assert [x.dtype for x in (logps, entropy, hidden.grad, weight.grad)] == [torch.float32] * 4


# -- The policy


@BOTH
@pytest.mark.parametrize("name", MODELS)
def test_same_numbers(name, share, small_tiles):
    plain = Policy(tiny(MODELS[name]), 0.8)
    assert_same(fast.FastPolicy(plain, share), plain, make_samples())


@BOTH
def test_context_is_neither_read_nor_scored(share, small_tiles):
    plain = Policy(tiny(MODELS["llama, tied"]), 1.0)
    policy = fast.FastPolicy(plain, share)
    samples = make_samples()
    for s in samples[1:]:
        s.sampled[1:6:2] = False
    assert_same(policy, plain, samples)
    batch = collate(samples, CPU, policy.layout)
    n = sum(int(s.sampled.sum()) for s in samples)
    assert len(batch["targets"]) == len(batch["read"]) == n
    logps, entropy = policy(batch)
    assert not logps[~batch["sampled"]].any() and not entropy[~batch["sampled"]].any()
    for s in samples:
        s.sampled[:] = False
    logps, _ = policy(collate(samples, CPU, policy.layout))
    logps.sum().backward()
    assert not logps.any()


@BOTH
def test_an_update_has_the_same_gradient(share):
    cfg = Config(dtype="float64", micro_batch_tokens=60, max_sampler_gap=1e9)
    gradients = []
    for fast_one in (False, True):
        policy = Policy(tiny(MODELS["llama, tied"]), 1.0)
        if fast_one:
            policy = fast.FastPolicy(policy, share)
        samples = make_samples()
        grpo.add_logps("old_logps", policy, samples, cfg)
        grpo.accumulate_gradient(policy, policy, samples, cfg)
        gradients.append({name: p.grad for name, p in policy.model.named_parameters()})
        gradients[-1] |= {str(i): torch.tensor(s.old_logps) for i, s in enumerate(samples)}
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-5)


def test_gradient_checkpointing():
    model = tiny(MODELS["llama, tied"])
    plain = Policy(model, 1.0)
    expected = outputs(plain, make_samples())
    model.gradient_checkpointing_enable(dict(use_reentrant=False))
    calls = []
    model.model.layers[0].self_attn.register_forward_hook(lambda *_: calls.append(1))
    ours = outputs(fast.FastPolicy(plain, share=False), make_samples())
    assert len(calls) == 2  # once more in backward
    torch.testing.assert_close(ours, expected)


@BOTH
@pytest.mark.parametrize("budget", [1, 20, 45, 70, 10**6])
def test_micro_batches(share, budget):
    policy = fast.FastPolicy(Policy(tiny(MODELS["llama, tied"]), 1.0), share)
    samples = make_samples()
    batches = policy.micro_batches(samples, budget)
    together = [s for batch in batches for s in batch]
    assert len(together) == len(samples) and set(together) == set(samples)
    assert together[0].total_length == max(s.total_length for s in samples)
    for batch in batches:
        tokens = sum(len(s.completion_ids) for s in batch)
        prompts = {s.group: len(s.prompt.ids) for s in batch}
        tokens += sum(prompts[g] for g in (prompts if share else [s.group for s in batch]))
        assert tokens <= budget or len(batch) == 1


def test_groups_stay_whole():
    """Each has 23 tokens and its prompt: 37, 32 and 28 tokens."""
    policy = fast.FastPolicy(Policy(tiny(MODELS["llama, tied"]), 1.0), share=True)
    for budget, expected in [(40, [{2}, {0}, {1}]), (60, [{2}, {0, 1}]), (70, [{2, 0}, {1}])]:
        batches = policy.micro_batches(make_samples(), budget)
        assert [{s.group for s in batch} for batch in batches] == expected


# -- Which policy


def chosen(config, monkeypatch, prompts=(40, 30), **flags) -> tuple:
    monkeypatch.setattr(fast, "SMALL", 0)
    plain = Policy(tiny(config, torch.float32), 1.0)
    cfg = dataclasses.replace(Config(max_completion_length=12), **flags)
    policy, why = fast.choose(plain, make_samples(prompts), collate, cfg)
    return getattr(policy, "share", "plain"), why


def test_choice(monkeypatch):
    config = MODELS["llama, tied"]
    assert chosen(config, monkeypatch)[0] is True
    assert chosen(config, monkeypatch, prompts=(2, 3))[0] is False
    assert chosen(config, monkeypatch, gradient_checkpointing=True)[0] is False
    plain = Policy(tiny(config), 1.0)
    monkeypatch.undo()
    assert fast.choose(plain, make_samples(), collate, Config())[0] is plain  # it is small


def test_models_that_change_logits_after_the_head_stay_plain(monkeypatch):
    gemma = transformers.Gemma2Config(**SIZES, final_logit_softcapping=5.0)
    policy, why = chosen(gemma, monkeypatch)
    assert policy == "plain" and "off" in why
    phi = transformers.PhiConfig(**{k: v for k, v in SIZES.items() if k != "head_dim"})
    policy, why = chosen(phi, monkeypatch)
    assert policy == "plain" and "bias" in why


@pytest.mark.parametrize("error", [TypeError("no cache"), torch.OutOfMemoryError("too large")])
def test_a_model_that_cannot_share(error, monkeypatch):
    def fails(*_):
        raise error

    monkeypatch.setattr(fast, "rows_of", fails)
    if isinstance(error, torch.OutOfMemoryError):  # a slower policy would need more
        with pytest.raises(torch.OutOfMemoryError):
            chosen(MODELS["llama, tied"], monkeypatch)
        return
    assert chosen(MODELS["llama, tied"], monkeypatch)[0] is False


@BOTH
def test_ddp(share, tmp_path):
    torch.distributed.init_process_group("gloo", f"file://{tmp_path}/ranks", rank=0, world_size=1)
    try:
        plain = Policy(tiny(MODELS["llama, tied"]), 1.0)
        policy = fast.FastPolicy(plain, share)
        ddp = nn.parallel.DistributedDataParallel(policy, find_unused_parameters=True)
        samples = make_samples()
        expected = outputs(plain, samples)
        torch.testing.assert_close(outputs(policy, samples, ddp), expected, rtol=1e-5, atol=1e-5)
    finally:
        torch.distributed.destroy_process_group()
