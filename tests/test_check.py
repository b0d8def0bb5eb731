"""The start-up check: which policy a model gets, and which models are refused."""

import numpy as np
import pytest
import torch
import transformers

import grpo
import harness.attention
import harness.check
import harness.fast
import harness.merged_attention
from grpo import Config, Prompt, Sample
from harness.flags import ConfigError
from tests.common import CPU, fast_policy, ids_of, logps_of, random_samples, tiny_model

pytest_plugins = "tests.common"


def model_of(name, options):
    """A tiny model of random weights, of any family that transformers has."""
    sizes = dict(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=512,
        initializer_range=0.1,
        eos_token_id=1,
        pad_token_id=0,
        bos_token_id=None,
    )
    torch.manual_seed(0)
    config = getattr(transformers, name + "Config")(**(sizes | options))
    config = grpo.without_randomness(config)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


DYNAMIC = dict(
    rope_parameters=dict(rope_type="dynamic", factor=2.0),
    max_position_embeddings=32,
)
LONGROPE = dict(
    rope_parameters=dict(
        rope_type="longrope",
        short_factor=[1.0] * 16,
        long_factor=[4.0] * 16,
        rope_theta=1e4,
        original_max_position_embeddings=32,
    ),
    original_max_position_embeddings=32,
)
CAPPED = dict(attn_logit_softcapping=1.0, head_dim=32)
LLAMA4 = dict(num_local_experts=2, intermediate_size_mlp=48, head_dim=32)
CHUNKS = LLAMA4 | dict(attention_chunk_size=16)
SCALES_BY_PLACE = LLAMA4 | dict(floor_scale=64, no_rope_layers=[0, 1])
SINKS = dict(num_local_experts=4, num_experts_per_tok=2, sliding_window=8, head_dim=32)
CHOSEN_KEYS = dict(
    head_dim=32,
    num_local_experts=4,
    num_experts_per_tok=2,
    dense_intermediate_size=48,
    index_n_heads=1,
    index_head_dim=16,
    index_block_size=4,
    index_topk_blocks=2,
    mlp_layer_types=["dense", "sparse"],
    layer_types=["minimax_m3_sparse"] * 2,
)
SPARSE, COMPRESSED = "compressed_sparse_attention", "heavily_compressed_attention"
V4 = dict(
    num_local_experts=4,
    n_routed_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=48,
    mlp_layer_types=["moe", "moe"],
    head_dim=32,
    q_lora_rank=32,
    o_groups=2,
    o_lora_rank=16,
    hc_mult=2,
    index_n_heads=1,
    index_head_dim=16,
    index_topk=2,
    sliding_window=8,
    partial_rotary_factor=0.5,
    compress_rates={SPARSE: 4, COMPRESSED: 16},
)

# Family, its options, the longest text, and: packed rows, padded rows, or refused.
FAMILIES = [
    ("Llama", {}, 60, "packed"),
    ("Llama", DYNAMIC, 30, "packed"),
    ("Llama", DYNAMIC, 60, "refused"),
    ("Phi3", LONGROPE, 30, "packed"),
    ("Phi3", LONGROPE, 60, "refused"),
    ("Gemma2", CAPPED, 60, "packed"),  # sdpa leaves out its cap on scores
    ("Llama4Text", CHUNKS, 60, "packed"),
    ("Llama4Text", SCALES_BY_PLACE, 60, "padded"),  # the place in the row
    ("GptOss", SINKS, 60, "padded"),
    ("MiniMaxM3VLText", CHOSEN_KEYS, 60, "padded"),  # not under another attention's name
    ("DeepseekV4", V4 | dict(layer_types=[COMPRESSED] * 2), 60, "padded"),
    # Its index chooses keys, and breaks ties by the length of the row; the second one in a few
    # tokens only.
    ("DeepseekV4", V4 | dict(layer_types=[SPARSE] * 2), 60, "refused"),
    ("DeepseekV4", V4 | dict(layer_types=[COMPRESSED, SPARSE]), 60, "refused"),
    ("Falcon", {}, 60, "padded"),
    ("Mamba", dict(state_size=4), 60, "padded"),
]


@pytest.mark.parametrize("name, options, longest, rows", FAMILIES)
@pytest.mark.parametrize("fast", [True, False])
def test_a_policy_has_the_models_own_numbers_or_is_refused(name, options, longest, rows, fast):
    cfg = Config(
        temperature=0.7,
        micro_batch_tokens=400,
        max_completion_length=longest // 2,
        fast=fast,
    )
    numbers = Prompt(np.arange(longest - longest // 2), "", {})
    model = model_of(name, options)
    if rows == "refused":
        with pytest.raises(ConfigError, match="log-probabilities are off by .*longrope"):
            grpo.make_policy(model, cfg, [numbers])
        return

    policy = grpo.make_policy(model, cfg, [numbers])
    assert policy.packs == (fast and rows == "packed")
    rng = np.random.default_rng(0)
    prompts = [Prompt(ids_of(rng.integers(2, 64, n)), "", {}) for n in (5, longest - 9)]
    samples = []
    for group, length in ((0, 3), (0, 9), (1, 9)):
        ids = ids_of(rng.integers(2, 64, length))
        samples.append(Sample(group, prompts[group], ids, None, ""))
    logps, _ = logps_of(policy, samples)

    eager = transformers.AutoModelForCausalLM.from_config(model.config, attn_implementation="eager")
    eager.load_state_dict(model.state_dict())
    eager.eval()
    for s, row in zip(samples, logps, strict=True):
        T = len(s.completion_ids)
        ids = torch.tensor(np.concatenate([s.prompt.ids, s.completion_ids]))[None]
        logits = eager(ids).logits[0, len(s.prompt.ids) - 1 : -1]  # [T, V]
        expected = (logits / 0.7).log_softmax(-1)[torch.arange(T), s.completion_ids]
        assert torch.allclose(row[:T], expected, atol=2e-5)


def test_a_row_in_which_one_key_is_wrong_is_found(monkeypatch):
    honest = harness.attention.PackedRow.blocks.func

    def with_a_wrong_key(row):
        *before, last = honest(row)
        keys = last["keys"].clone()
        keys[0, 0] = keys[-1, -1]
        return [*before, last | dict(keys=keys)]

    for scale in (0.02, 0.1):
        model = tiny_model("llama", initializer_range=scale)
        assert grpo.make_policy(model, Config()).packs
        with monkeypatch.context() as patch:
            patch.setattr(harness.attention.PackedRow, "blocks", property(with_a_wrong_key))
            assert not grpo.make_policy(model, Config()).packs
        assert grpo.make_policy(model, Config()).packs


def test_every_token_counts_unless_the_model_has_experts():
    """Rounding may send a token to another expert; then one of a text's tokens may be off."""

    def error_of(kind, wrong_tokens):
        plain = grpo.Policy(tiny_model(kind), 1.0)
        honest = plain.forward

        class Wrong(grpo.Policy):
            def forward(self, batch):
                logps, entropy = honest(batch)
                logps[0, :wrong_tokens] += 0.05
                return logps, entropy

        texts = dict(longest=128, token_ids=range(200))  # 32 tokens of each are compared
        return harness.check.largest_error(Wrong(plain.model, 1.0), plain, **texts)

    assert error_of("llama", 0) < harness.check.ROUNDING
    assert error_of("llama", 1) > harness.check.ROUNDING
    assert error_of("mixtral", 3) < harness.check.ROUNDING
    assert error_of("mixtral", 5) > harness.check.ROUNDING


def test_no_memory_is_not_a_model_that_cannot_pack(monkeypatch):
    def out_of_memory(*_, **__):
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(harness.attention, "packed_attention", out_of_memory)
    with pytest.raises(torch.OutOfMemoryError):
        grpo.make_policy(tiny_model(), Config())


JITTER = dict(num_local_experts=4, router_jitter_noise=0.3)


@pytest.mark.parametrize(
    "name, options",
    [("BioGpt", dict(hidden_dropout_prob=0.5)), ("Mixtral", JITTER), ("Phimoe", JITTER)],
)
def test_nothing_in_an_update_is_random(name, options):
    """Two epochs at learning rate 0: the ratio of the second to the first is 1 everywhere."""
    policy = fast_policy(model_of(name, options), 1.0)
    samples = random_samples(6, 3)
    grpo.compute_logps(policy, samples, "old_logps", Config(micro_batch_tokens=100), CPU)
    for s in samples:
        s.ref_logps = s.old_logps
    cfg = Config(
        num_epochs=2,
        learning_rate=0,
        max_sampler_gap=1e9,
        micro_batch_tokens=50,
        beta=0.1,
    )
    metrics = grpo.update(policy, grpo.make_optimizer(policy, cfg), samples, cfg)
    assert metrics["kl"] < 1e-9
    assert not any(module.training for module in policy.model.modules())


def test_a_model_that_draws_random_numbers_is_refused():
    def noise(module, args, out):
        return out + 1e-3 * torch.randn_like(out)

    model = tiny_model()
    model.model.layers[0].mlp.register_forward_hook(noise)
    with pytest.raises(ConfigError, match="two forwards of this model differ"):
        grpo.make_policy(model, Config())


# ------------------------------------------------------------------------------------------------
# Attention without masks: planted faults, in every dtype or in bfloat16 only

NO_MASKS = "attention takes masks, which is slower"


def forgets_the_prompt(query, key, value, call, scale):
    out, lse = ATTEND(query, key, value, call, scale)
    return (out, lse) if call["causal"] else (out, lse - 100)


def sees_the_future(query, key, value, call, scale):
    return ATTEND(query, key, value, call | dict(causal=False), scale)


def weighs_by_half(query, key, value, call, scale):
    out, lse = ATTEND(query, key, value, call, scale)
    return out, lse / 2


def mixes_up_groups(query, key, value, call, scale):
    return ATTEND(query, key.roll(1, 0), value.roll(1, 0), call, scale)


def gives_nan(query, key, value, call, scale):
    out, lse = ATTEND(query, key, value, call, scale)
    return out * torch.nan, lse


def raises(query, key, value, call, scale):
    raise RuntimeError("USE_FLASH_ATTENTION was not enabled for build.")


ATTEND = harness.merged_attention.attend
FAULTS = [forgets_the_prompt, sees_the_future, weighs_by_half, mixes_up_groups, gives_nan, raises]


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_fault_without_masks_is_found(fault, dtype, monkeypatch, capsys):
    """In the dtype of the run: the kernel of bfloat16 is another one than that of float32."""

    def attend(query, *rest):
        if str(query.dtype) == f"torch.{dtype}":
            return fault(query, *rest)
        return ATTEND(query, *rest)

    monkeypatch.setattr(harness.merged_attention, "attend", attend)
    prompts = [Prompt(np.arange(40), "", {})]
    cfg = Config(dtype=dtype, max_completion_length=20, micro_batch_tokens=400)
    policy = grpo.make_policy(tiny_model("llama"), cfg, prompts)
    assert policy.packs and policy.attention == "masks"
    assert NO_MASKS in capsys.readouterr().out

    monkeypatch.setattr(harness.merged_attention, "attend", ATTEND)
    policy = grpo.make_policy(tiny_model("llama"), cfg, prompts)
    assert policy.packs and policy.attention == "auto"
    assert NO_MASKS not in capsys.readouterr().out


@pytest.mark.parametrize("packs", [True, False])
def test_a_fault_of_bfloat16_alone_is_found(packs, monkeypatch):
    """Of the attention with masks, too: the model then gets the next policy."""
    model = tiny_model("llama")
    honest = harness.fast.FastPolicy.hidden

    def wrong(policy, batch):
        hidden = honest(policy, batch)
        in_bfloat16 = torch.is_autocast_enabled("cpu")
        if in_bfloat16 and (policy.packs or not packs):
            hidden = hidden * 1.2
        return hidden

    for dtype in ("float32", "bfloat16"):
        with monkeypatch.context() as patch:
            patch.setattr(harness.fast.FastPolicy, "hidden", wrong)
            policy = grpo.make_policy(model, Config(dtype=dtype))
        if dtype == "float32":
            assert policy.packs
        else:
            assert not policy.packs and isinstance(policy, grpo.Policy) == (not packs)
