"""A policy in one row or in rows of their own, with the model's head or that of fast.py: for each
kind of model the gradient is that of one text at a time."""

import copy
import dataclasses
import os
import re
import unittest.mock

import numpy as np
import pytest
import torch
import transformers
from torch._dynamo.utils import counters

import grpo
from extras import fast, lora, models, packed
from grpo import Config, Policy, Prompt, Sample, collate
from tests.common import (
    CPU,
    draw_from,
    flags_of,
    random_samples,
    relative,
    small_config,
    small_run,
    tiny_model,
    update_gradient,
)

SIZES = dict(vocab_size=32, hidden_size=32, intermediate_size=48, max_position_embeddings=64)
SIZES |= dict(num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=16)
SIZES |= dict(eos_token_id=1, pad_token_id=0, state_size=4)
SIZES |= dict(num_experts=4, num_local_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
SIZES |= dict(linear_key_head_dim=16, linear_value_head_dim=16, linear_num_key_heads=2)
SIZES |= dict(
    linear_num_value_heads=2, full_attention_interval=2, shared_expert_intermediate_size=16
)
WINDOW = dict(sliding_window=6)  # shorter than the texts
MAMBA = dict(mamba_d_ssm=32, mamba_n_heads=4, mamba_d_head=8, mamba_d_state=4, mamba_chunk_size=8)
LATENT = dict(n_routed_experts=4, n_group=1, topk_group=1, first_k_dense_replace=1, head_dim=8)
LATENT |= dict(q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8)
PACKED = dict(  # kinds whose texts stand in one row, and what they need beside SIZES
    GPT2={},
    Llama={},
    Qwen2={},
    Qwen3={},
    Gemma3Text=WINDOW,
    Mistral=WINDOW,
    Phi={},  # its head has a bias
    Phi3=WINDOW,
    Olmo2={},
    Cohere2=WINDOW,  # it scales its logits
    OPT=dict(word_embed_proj_dim=32, ffn_dim=48),  # with dropout in its config
    GPTNeoX={},
    Qwen3Moe={},
    Phimoe=WINDOW,  # its modules do not know their window
    Exaone4=WINDOW | dict(sliding_window_pattern=2),  # its modules know one that they do not use
    Afmoe={},  # it names its arguments otherwise
    DeepseekV3=LATENT | dict(v_head_dim=16, num_key_value_heads=2),
)
ALONE = dict(  # kinds whose texts have a row of their own
    Gemma2=WINDOW | dict(attn_logit_softcapping=2.0, final_logit_softcapping=5.0),
    GptOss=WINDOW,  # sinks
    Bloom={},  # ALiBi
    Mpt={},
    Falcon=dict(head_dim=None),
    GPTNeo=dict(attention_types=[[["global", "local"], 1]], window_size=6),
    Llama4Text=dict(intermediate_size_mlp=48, attention_chunk_size=6),
    Mamba={},
    Mamba2=dict(num_heads=4, n_groups=1, chunk_size=8),
    FalconH1=MAMBA,
    Bamba=MAMBA | dict(mamba_d_head=16, attn_layer_indices=[1]),
    Jamba=dict(attn_layer_period=2, attn_layer_offset=1, use_mamba_kernels=False),
    Qwen3Next={},  # linear attention
    Qwen3_5Text={},
    Lfm2=dict(layer_types=["conv", "full_attention"], conv_L_cache=3),
    Rwkv=dict(attention_hidden_size=32),
    xLSTM=dict(hidden_size=64, num_blocks=2, num_heads=2, chunk_size=16),
    RecurrentGemma=dict(lru_width=32, attention_window_size=6, block_types=["recurrent"]),
)
KINDS = PACKED | ALONE
OWN_HEAD = ("Phi", "Gemma2", "Cohere2", "xLSTM", "RecurrentGemma", "Llama4Text")
CONFIG = dict(dtype="float64", temperature=0.8, max_completion_length=12, micro_batch_tokens=40)
CONFIG = Config(**CONFIG, max_grad_norm=0, tis_cap=0)
FEW = "Llama OPT Gemma3Text Exaone4 Mamba Lfm2".split()  # the others are slow
CANNOT_SAMPLE = ("Rwkv", "xLSTM")  # in a batch


def load(kind, path, cfg=CONFIG):
    """A tiny model as the trainer loads it, with the initialization of transformers."""
    sizes = {name: size for name, size in (SIZES | KINDS[kind]).items() if size is not None}
    config = getattr(transformers, f"{kind}Config")(**sizes)
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(path)
    return grpo.load_model(str(path), cfg, CPU)


def test_a_model_is_loaded_as_transformers_does_and_its_padding_learns(tmp_path):
    """PhiMoE's jitter is a threshold in eval mode. A token of padding may be the EOS, too."""
    model = load("Phimoe", tmp_path)
    options = dict(dtype=torch.float64, experts_implementation="eager")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, **options)
    ids = torch.arange(32)[None]
    logps = model(ids).logits.log_softmax(-1)
    assert torch.equal(logps, theirs(ids).logits.log_softmax(-1))
    logps[0, :, 0].sum().backward()
    assert model.get_input_embeddings().weight.grad[0].abs().sum() > 0


def make_samples():
    """Two groups, which have the same number, as in a replay; with tokens of an environment."""
    samples = random_samples(4, 2, np.float64)
    for s in samples:
        s.group = 0
        s.sampled[1::3] = False
    return samples


@unittest.mock.patch("extras.fast.SMALL", 0)  # small models have the plain head
def choose(model, samples):
    return grpo.make_policy(model, [samples[0].prompt, samples[-1].prompt], CONFIG)


def one_text_at_a_time(model, samples):
    """The gradient [P] of the loss, written out, with transformers' own attention and head."""
    n_tokens = sum(int(s.sampled.sum()) for s in samples)
    model.zero_grad()
    for s in samples:
        text = torch.from_numpy(np.append(s.prompt.ids, s.completion_ids))
        logits = model(text[None], use_cache=False).logits[0, :-1] / 0.8
        logps = logits.log_softmax(-1).gather(1, text[1:, None])[-len(s.completion_ids) :, 0]
        weighted = logps * torch.from_numpy(s.advantages)
        (-weighted[torch.from_numpy(s.sampled)].sum() / n_tokens).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def scale_weights(model, factor):
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() > 1:
                p.mul_(factor)


def with_slow(kinds):
    return [k if k in FEW else pytest.param(k, marks=pytest.mark.slow) for k in kinds]


@pytest.mark.parametrize("kind", with_slow(KINDS))
def test_gradient(kind, tmp_path):
    """With the small weights of an untrained model, whose distributions are nearly uniform, so that
    tokens of other texts matter little, and with large ones."""
    model = load(kind, tmp_path)
    plain = copy.deepcopy(model)
    samples = make_samples()
    for factor in (1, 8):
        scale_weights(model, factor)
        scale_weights(plain, factor)
        expected = one_text_at_a_time(plain, samples)
        policy = choose(model, samples)
        assert packed.packs(model) == (kind in PACKED)
        assert isinstance(policy, fast.FastPolicy) == (kind not in OWN_HEAD)
        grad, _ = update_gradient(CONFIG, samples, policy=policy)
        assert relative(grad, expected) < 1e-6
    own_heads = [packed.PackedPolicy(model, 0.8), Policy(plain, 0.8)]
    for own_head in own_heads[kind in ALONE :]:
        grad, _ = update_gradient(CONFIG, samples, policy=own_head)
        assert relative(grad, expected) < 1e-6

    model = model.float()
    policy = choose(model, samples)
    assert packed.packs(model) == (kind in PACKED)  # in float32, too
    if kind in CANNOT_SAMPLE:
        return
    prompts = [s.prompt.ids for s in samples]
    form = grpo.HFSampler if models.has_plain_cache(model) else models.GenerateSampler
    sampler = form(model, [1], CONFIG)
    completions = draw_from(sampler, prompts, [(0, i) for i in range(4)], 0.8)
    drawn = [Sample(0, s.prompt, *c) for s, c in zip(samples, completions, strict=True)]
    grpo.add_logps("old_logps", policy, drawn, CONFIG)
    for s in drawn:
        assert np.abs(s.old_logps - s.sampler_logps).max() < 1e-4


@pytest.mark.parametrize("kind", with_slow(["OPT", "Lfm2", "GPT2", "GptOss", "Qwen3_5Text"]))
def test_gradient_of_adapters_with_checkpointing(kind, tmp_path):
    """Which needs the training mode, but not its dropout."""
    model = load(kind, tmp_path, dataclasses.replace(CONFIG, gradient_checkpointing=True))
    lora.add_adapters(model, {}, Config(lora_rank=2))
    scale_weights(model, 8)
    for name, p in model.named_parameters():
        if ".lora_B." in name:
            torch.nn.init.normal_(p, 0, 0.02)
    plain = copy.deepcopy(model)
    calls = []
    layer = next(m for m in model.modules() if isinstance(m, fast.GradientCheckpointingLayer))
    next(layer.children()).register_forward_hook(lambda *_: calls.append("layer"))
    samples = make_samples()
    policy = choose(model, samples)
    policy.register_forward_hook(lambda *_: calls.append("pass"))
    calls.clear()
    grad, _ = update_gradient(CONFIG, samples, policy=policy)
    assert calls.count("layer") == 2 * calls.count("pass")  # once more in backward
    assert relative(grad, one_text_at_a_time(plain, samples)) < 1e-6


def test_a_row_of_texts_is_refused_by_attention_that_cannot_tell_them_apart(tmp_path):
    model = load("GptOss", tmp_path)
    with pytest.raises(ValueError, match="packed"):
        policy = packed.PackedPolicy(model, 1.0)
        policy(policy.collate(make_samples()))


def test_dropout_that_is_yours_acts_in_packed_sequences():
    """In half of the attention; in eval mode, in which the trainer keeps models, in none."""
    policy = packed.PackedPolicy(tiny_model(attention_dropout=0.5), 1.0)
    batch = policy.collate(random_samples(4, 2))
    calm, _ = policy(batch)
    assert torch.equal(policy(batch)[0], calm)
    policy.model.train()
    assert relative(policy(batch)[0], calm) > 1e-4


@unittest.mock.patch("extras.fast.SMALL", 0)
def test_windows_that_only_long_texts_reach_are_compared():
    """A model that makes its windows in its own way: as a mask that it gives to its layers."""
    mask = torch.ones(1, 1, 128, 128, dtype=torch.bool).tril().triu(1 - 48)

    def with_window(module, args, options):
        length = options["hidden_states"].shape[1]
        return args, options | dict(attention_mask=mask[:, :, :length, :length])

    prompts = [s.prompt for s in random_samples(2, 1)]
    for longest in (40, 90):
        model = tiny_model("mistral", sliding_window=None)
        model.config.sliding_window = 48
        for layer in model.model.layers:
            layer.self_attn.register_forward_pre_hook(with_window, with_kwargs=True)
        cfg = Config(dtype="float32", max_completion_length=longest)
        grpo.make_policy(model, prompts, cfg)
        assert packed.packs(model) == (longest < 48)


def test_experts_multiply_in_bfloat16_and_are_stored_so_if_they_are_frozen(monkeypatch):
    model = tiny_model("mixtral")
    multiply = fast.grouped_mm_experts_forward
    dtypes = []

    def spied(layer, *args):
        dtypes.append(layer.down_proj.dtype)
        return multiply(layer, *args)

    monkeypatch.setattr(fast, "grouped_mm_experts_forward", spied)
    policy = packed.PackedPolicy(model, 1.0)
    batch = policy.collate(random_samples(4, 2))
    exact, _ = policy(batch)
    policy.dtype = "bfloat16"
    rounded, _ = policy(batch)
    rounded.sum().backward()
    assert model.model.layers[0].mlp.experts.down_proj.grad.dtype == torch.float32
    lora.add_adapters(model, {}, Config(lora_rank=2))
    lora.halve_frozen(model)
    assert torch.equal(policy(batch)[0], rounded)
    assert 1e-4 < (rounded - exact).abs().mean() < 0.05
    assert dtypes == 2 * [torch.float32] + 2 * [torch.bfloat16] + dtypes[4:]
    layers = [p for n, p in model.model.layers.named_parameters() if p.dim() > 1]
    frozen = {p.dtype for p in layers if not p.requires_grad and len(p) != 8}  # no router
    assert frozen == {torch.bfloat16}


def test_the_pictures_of_batches():
    """Those of collate's docstring, and of packed.py."""
    texts = [("abc", "xy."), ("abc", "z."), ("de", "w.")]
    samples = []
    for prompt, completion in texts:
        ids, words = (np.array(list(map(ord, text))) for text in (prompt, completion))
        samples.append(Sample(0, Prompt(ids, "", {}), words, np.zeros(len(words))))
    batch = collate(samples[:2], CPU)
    assert batch["ids"].flatten().tolist() == [*map(ord, "abcxy.abcz."), 0]
    assert "".join(map(chr, batch["targets"])) == "xy.z."
    assert batch["logit_index"].tolist() == [2, 3, 4, 8, 9]
    batch = packed.PackedPolicy(tiny_model(), 1.0).collate(samples)
    assert "".join(map(chr, batch["ids"])) == "abcxy.z.dew."
    assert batch["positions"].tolist() == [0, 1, 2, 3, 4, 5, 3, 4, 0, 1, 2, 3]
    assert "".join(map(chr, batch["targets"])) == "xy.z.w."
    assert batch["logit_index"].tolist() == [2, 3, 4, 2, 6, 9, 10]
    assert batch["lengths"] == [3, 2, 2]


@pytest.mark.slow
def test_compiled_layers_are_compiled_once(tmp_path, monkeypatch):
    """Whatever the lengths of the texts are: from step 3 on there is no other graph."""
    graphs = []
    update = grpo.update

    def counted(*args):
        metrics = update(*args)
        graphs.append(counters["stats"]["unique_graphs"])
        return metrics

    monkeypatch.setattr(grpo, "update", counted)
    compiled = small_run(tmp_path / "compiled", compile="on")
    assert graphs[1] > 0 and graphs[1:] == graphs[1:2] * 3
    plain = small_run(tmp_path / "plain")
    for ours, theirs in zip(compiled, plain, strict=True):
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-3)


class Tripled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return 3 * grad


@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
def test_compiled_layers_with_another_gradient_are_not_used(kind, tmp_path, monkeypatch, capsys):
    def compile(layer, factor=Tripled, **_):
        layer._compiled_call_impl = lambda *args, **options: factor.apply(
            layer.forward(*args, **options)
        )

    monkeypatch.setattr(fast.GradientCheckpointingLayer, "compile", compile)
    cfg = small_config(tmp_path / "run", compile="on", dtype=kind)
    assert grpo.main(flags_of(cfg)) == 2
    assert "--compile" in capsys.readouterr().err
    policy = Policy(tiny_model(), 1.0, kind)
    samples = random_samples(4, 2)
    assert fast.compile_layers(policy, samples)
    assert all(layer._compiled_call_impl is None for layer in policy.model.model.layers)
    monkeypatch.setattr(Tripled, "backward", staticmethod(lambda ctx, grad: grad))
    assert not fast.compile_layers(policy, samples)
    assert all(layer._compiled_call_impl for layer in policy.model.model.layers)


def test_the_gradient_of_a_prompt_is_not_rounded_after_each_of_its_completions():
    rows = torch.randn(3, 2, dtype=torch.bfloat16, requires_grad=True)
    grad = torch.rand(3000, 2).bfloat16()
    packed.Gathered.apply(rows, torch.arange(3).repeat(1000)).backward(grad)
    assert relative(rows.grad.float(), grad.float().view(1000, 3, 2).sum(0)) < 2**-8


# -- The head


@pytest.mark.parametrize("kept", [0, 100, 10**9])
@pytest.mark.parametrize("tile", [1, 40, 10**9])
def test_head_has_the_gradient_of_autograd(tile, kept, monkeypatch):
    monkeypatch.setattr(fast, "TILE", tile)
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


def resident() -> int:
    """Memory of this process, in pages."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1])


def test_large_tensors_stand_in_large_pages_and_their_memory_is_kept():
    if not os.path.exists("/sys/kernel/mm/transparent_hugepage"):
        pytest.skip("this kernel has no large pages")
    fast.tune_memory()
    tensor = torch.ones(2**24)
    address = tensor.data_ptr() + 2**25  # its middle
    with open("/proc/self/smaps") as file:
        mappings = re.findall(r"^(\w+)-(\w+) .*?^VmFlags: (.*?)$", file.read(), re.M | re.S)
    [flags] = [flags for a, b, flags in mappings if int(a, 16) <= address < int(b, 16)]
    assert "hg" in flags.split()  # asks for large pages
    before = resident()
    del tensor
    assert resident() > before - 1000


def test_padded_rows_have_the_gradient_of_one_sample_at_a_time():
    """The plain policy, with texts of many lengths and tokens of an environment, split at will."""
    model = tiny_model(dtype=torch.float64)
    samples = make_samples()
    expected = one_text_at_a_time(model, samples)
    for tokens in (1, 30, 1000):
        cfg = dataclasses.replace(CONFIG, micro_batch_tokens=tokens)
        grad, _ = update_gradient(cfg, samples, policy=Policy(model, 0.8))
        assert relative(grad, expected) < 1e-12
