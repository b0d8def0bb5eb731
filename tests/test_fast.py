"""A policy in one row or in rows of their own, with the model's head or that of fast.py: for each
kind of model the gradient is that of one text at a time."""

import copy
import dataclasses

import numpy as np
import pytest
import torch
import transformers

import grpo
from extras import fast, lora
from grpo import Config, Policy, Sample, collate
from tests.common import CPU, on_ranks, random_samples, relative, update_gradient

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
CANNOT_SAMPLE = ("Mamba", "Mamba2", "Rwkv", "xLSTM", "RecurrentGemma")


def load(kind, path, cfg=CONFIG):
    """A tiny model as the trainer loads it, with the initialization of transformers."""
    sizes = {name: size for name, size in (SIZES | KINDS[kind]).items() if size is not None}
    config = getattr(transformers, f"{kind}Config")(**sizes)
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(path)
    return grpo.load_model("model", str(path), cfg, CPU)


def make_samples():
    """Two groups, which have the same number, as in a replay; with tokens of an environment."""
    samples = random_samples(6, 3, np.float64)
    for s in samples:
        s.group = 0
        s.sampled[1::3] = False
    return samples


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


@pytest.mark.parametrize("kind", KINDS)
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
        assert policy.one_row == (kind in PACKED)
        assert isinstance(policy, fast.FastPolicy) == (kind not in OWN_HEAD)
        for one in (policy, Policy(model, 0.8, policy.one_row)):
            grad, _ = update_gradient(CONFIG, samples, policy=one)
            assert relative(grad, expected) < 1e-6

    model = model.float()
    policy = choose(model, samples)
    assert policy.one_row == (kind in PACKED)  # in float32, too
    if kind in CANNOT_SAMPLE:
        return
    prompts = [s.prompt.ids for s in samples]
    sampler = grpo.HFSampler(model, [1], CONFIG)
    completions = sampler.generate(prompts, [(0, i) for i in range(6)], 0.8)
    drawn = [Sample(0, s.prompt, *c) for s, c in zip(samples, completions, strict=True)]
    grpo.add_logps("old_logps", policy, drawn, CONFIG)
    for s in drawn:
        assert np.abs(s.old_logps - s.sampler_logps).max() < 1e-4


@pytest.mark.parametrize("kind", ["GPT2", "Qwen3", "GptOss", "Qwen3_5Text"])
def test_gradient_of_adapters_with_checkpointing(kind, tmp_path):
    model = load(kind, tmp_path, dataclasses.replace(CONFIG, gradient_checkpointing=True))
    lora.add_adapters(model, {}, Config(lora_rank=2))
    scale_weights(model, 8)
    for name, p in model.named_parameters():
        if ".lora_B." in name:
            torch.nn.init.normal_(p, 0, 0.02)
    plain = copy.deepcopy(model)
    plain.gradient_checkpointing_disable()
    calls = []
    layers = [m for m in model.modules() if isinstance(m, grpo.GradientCheckpointingLayer)]
    next(layers[0].children()).register_forward_hook(lambda *_: calls.append("layer"))
    samples = make_samples()
    policy = choose(model, samples)
    policy.register_forward_hook(lambda *_: calls.append("pass"))
    calls.clear()
    grad, _ = update_gradient(CONFIG, samples, policy=policy)
    assert calls.count("layer") == 2 * calls.count("pass")  # once more in backward
    assert relative(grad, one_text_at_a_time(plain, samples)) < 1e-6


def gradient_of_ranks(path, out):
    grpo.join_ranks(Config(device="cpu"))
    model = grpo.load_model("model", path, CONFIG, CPU)
    samples = make_samples()
    policy = choose(model, samples)
    assert not policy.one_row
    grad, _ = update_gradient(CONFIG, samples, policy=policy, ddp=grpo.wrap(policy))
    if grpo.RANK == 0:
        torch.save(grad, out)
    torch.distributed.barrier()


def test_gradient_on_two_ranks_in_rows_of_their_own(tmp_path):
    model = load("FalconH1", tmp_path)
    done = on_ranks(2, "tests.test_fast.gradient_of_ranks", tmp_path, tmp_path / "out")
    assert done.returncode == 0, done.stderr[-3000:]
    expected = one_text_at_a_time(model, make_samples())
    assert relative(torch.load(tmp_path / "out"), expected) < 1e-6


def test_a_row_of_texts_is_refused_by_attention_that_cannot_tell_them_apart(tmp_path):
    model = load("GptOss", tmp_path)
    with pytest.raises(ValueError, match="one_row"):
        Policy(model, 1.0)(collate(make_samples(), CPU))
