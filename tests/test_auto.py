"""What auto means, and the checks of a model that depend on how long its texts are."""

import dataclasses

import pytest
import torch

from harness import auto, models
from harness.flags import ConfigError
from tests.common import BUNDLED, CPU, tiny_model

pytest_plugins = "tests.common"


@pytest.mark.parametrize(
    "small, fast, dtype, why",
    [
        (True, True, "float32", "the model is small"),
        (True, False, "float32", "the model is small"),
        (False, True, "bfloat16", "this cpu has fast bfloat16"),
        (False, False, "float32", "this cpu has no fast bfloat16"),
    ],
)
def test_the_dtype_follows_model_and_device(small, fast, dtype, why, monkeypatch, capsys):
    monkeypatch.setattr(auto, "SMALL", 10e6 if small else 0)
    monkeypatch.setattr(auto, "fast_bfloat16", lambda device: fast)
    cfg = auto.choose_dtype(BUNDLED, tiny_model(), CPU.device)
    assert cfg == dataclasses.replace(BUNDLED, dtype=dtype)
    assert capsys.readouterr().out == f"--dtype {dtype} ({why})\n"
    for given in ("float32", "bfloat16"):
        cfg = dataclasses.replace(BUNDLED, dtype=given)
        assert auto.choose_dtype(cfg, tiny_model(), CPU.device) is cfg
    assert capsys.readouterr().out == ""


def test_one_thread_for_a_small_model(monkeypatch):
    chosen = []
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    auto.set_threads(tiny_model())  # OMP_NUM_THREADS is set for the tests
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setattr(auto, "SMALL", 0)
    auto.set_threads(tiny_model())
    assert chosen == []
    monkeypatch.setattr(auto, "SMALL", 10e6)
    auto.set_threads(tiny_model())
    assert chosen == [1]


@pytest.fixture(scope="module")
def compressing():
    """DeepSeek-V4, tiny: a compressor acts from 4 or 16 tokens on."""
    from transformers import AutoModelForCausalLM, DeepseekV4Config

    kinds = ("sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention")
    config = DeepseekV4Config(
        vocab_size=64,
        hidden_size=32,
        moe_intermediate_size=16,
        num_hidden_layers=3,
        num_attention_heads=2,
        head_dim=16,
        q_lora_rank=16,
        num_experts_per_tok=2,
        n_routed_experts=4,
        o_groups=2,
        o_lora_rank=8,
        index_n_heads=2,
        index_head_dim=16,
        index_topk=4,
        sliding_window=8,
        max_position_embeddings=512,
        compress_rates=dict(zip(kinds[1:], (4, 16), strict=True)),
        layer_types=list(kinds),
        hc_mult=2,
    )
    return AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.parametrize("length, frozen", [(3, 14), (8, 10), (64, 6)])
def test_what_acts_on_long_texts_only_is_frozen_for_short_ones_only(
    compressing, length, frozen, capsys
):
    """Frozen is what torch.autograd.grad finds no way to, in a text as long as the run's."""
    compressing.requires_grad_(True)
    learns = {n: p for n, p in compressing.named_parameters() if ".experts." not in n}
    ids = torch.zeros(1, length, dtype=torch.int64)
    total = compressing(input_ids=ids, use_cache=False).logits.sum()
    gradients = torch.autograd.grad(total, list(learns.values()), allow_unused=True)
    unused = {n for n, g in zip(learns, gradients, strict=True) if g is None}

    models.freeze_unused(compressing, length)
    named = compressing.named_parameters()
    assert {name for name, p in named if not p.requires_grad} == unused
    assert len(unused) == frozen
    assert f"{frozen} tensors that text does not use are frozen" in capsys.readouterr().out


def test_the_probe_is_bounded_and_leaves_no_gradient(monkeypatch):
    model = tiny_model()
    monkeypatch.setattr(models, "LONGEST_PROBE", 7)
    lengths = []
    model.register_forward_pre_hook(
        lambda _, args, inputs: lengths.append(inputs["input_ids"].shape[1]), with_kwargs=True
    )
    models.freeze_unused(model, 10**9)
    assert lengths == [7]
    assert all(p.requires_grad and p.grad is None for p in model.parameters())


def test_a_prompt_beyond_the_positions_is_refused():
    from grpo import Prompt
    from tests.common import ids_of

    model = tiny_model()  # 512 positions
    cfg = dataclasses.replace(BUNDLED, max_completion_length=510)
    models.check_sizes(model, [Prompt(ids_of([1, 2]), "", {})], cfg)
    message = r"--max_completion_length 510: with the longest prompt \(3 tokens\) more than the mod"
    with pytest.raises(ConfigError, match=message + "el's 512 positions"):
        models.check_sizes(model, [Prompt(ids_of([1, 2, 3]), "", {})], cfg)
