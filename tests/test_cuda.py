"""The trainer on a CUDA device that is not there (cuda_standin.py).

These tests cannot show speed, CUDA's own kernels and rounding, streams or NCCL.
"""

import contextlib
import functools
import json
import math
import os
import sys
import types

import numpy as np
import pytest
import torch
import transformers

import grpo
import harness.attention
import harness.auto
import harness.checkpoints
import harness.engine
import harness.head
import harness.models
import harness.ranks
import harness.run
from grpo import Config
from harness.flags import ConfigError
from harness.ranks import World
from tests.common import (
    HERE,
    PRIME,
    command_line,
    fast_policy,
    ids_of,
    lines,
    random_samples,
    relative,
    run,
    tiny_model,
)
from tests.on_cuda import CUDA, NO_STANDIN, SHORT, STANDIN, on_cuda, trained
from tests.test_cuda_engine import engines

pytestmark = NO_STANDIN


# ------------------------------------------------------------------------------------------------
# Runs


@pytest.mark.slow
def test_the_bundled_task_learns_in_bfloat16(tmp_path):
    options = [
        "--max_steps",
        6,
        "--num_prompts",
        16,
        "--eval_every",
        0,
        "--eval_data",
        "",
        "--dtype",
        "bfloat16",
    ]
    shown, metrics = trained(tmp_path / "out", *options, report=tmp_path / "report")
    assert "parameters on cuda:0, 1 rank(s)" in shown
    report = json.loads((tmp_path / "report.0").read_text())
    assert report["attention"]["flash, texts of many lengths, backward"] > 0
    start, end = (np.mean([m["reward"] for m in part]) for part in (metrics[:2], metrics[-2:]))
    assert end - start > 5 * math.sqrt(2 * 0.25 / 256)
    assert all(m["sampler_gap"] < 0.02 and m["skipped_steps"] == 0 for m in metrics)
    assert all(0.008 < m["peak_memory_gb"] < 1 for m in metrics)  # weights and moments: 16 bytes


VARIANTS = {
    "plain": ["--beta", 0],
    "kl": ["--beta", 0.1],
    "minibatches": ["--num_minibatches", 3, "--num_epochs", 2, "--micro_batch_tokens", 97],
    "checkpointing": ["--gradient_checkpointing"],
}


def variants(out, device, dtype):
    """Several runs of the command line in one process."""
    for name, args in VARIANTS.items():
        options = [
            *PRIME,
            *SHORT,
            "--rollout",
            "hf",
            "--device",
            device,
            "--dtype",
            dtype,
            "--out_dir",
            f"{out}/{name}",
        ]
        with contextlib.suppress(SystemExit):
            command_line(*map(str, [*options, *args]))


@pytest.mark.slow
def test_what_a_step_does_is_the_same_as_on_a_cpu(tmp_path):
    """Several updates a rollout, the KL term and recomputed layers have the CPU's numbers in
    float32."""
    for dtype in ("float32", "bfloat16"):
        on_cuda("tests.test_cuda.variants", tmp_path / dtype, "cuda", dtype)
    call = f"variants({str(tmp_path / 'cpu')!r}, 'cpu', 'float32')"
    assert run("-c", f"from tests import test_cuda; test_cuda.{call}").returncode == 0
    for name in VARIANTS:
        half, ours, theirs = (
            lines(tmp_path / run / name / "metrics.jsonl") for run in ("bfloat16", "float32", "cpu")
        )
        assert len(half) == len(ours) == len(theirs) == 2
        assert all(m["grad_norm"] > 0 and m["sampler_gap"] < 0.02 for m in half)
        for a, b in zip(ours, theirs, strict=True):
            for key in ("reward", "loss", "grad_norm", "entropy", "sampler_gap"):
                assert a[key] == pytest.approx(b[key], rel=1e-4, abs=1e-5), (name, key)


@pytest.mark.slow
def test_two_ranks_have_a_card_each(tmp_path):
    args = [*PRIME, *SHORT, "--dtype", "float32"]
    shown, two = trained(tmp_path / "two", *args, nproc=2, report=tmp_path / "report")
    assert "2 rank(s)" in shown
    _, one = trained(tmp_path / "one", *args)
    for a, b in zip(two, one, strict=True):
        assert a["reward"] == b["reward"] and a["grad_norm"] == pytest.approx(
            b["grad_norm"], rel=1e-4
        )
    for rank in (0, 1):
        report = json.loads((tmp_path / f"report.{rank}").read_text())
        assert report["waits"] and not report["elsewhere"], (
            f"rank {rank} uses another card: {report['elsewhere']}"
        )


@pytest.mark.slow
def test_a_run_goes_on_from_a_cpu_and_back(tmp_path):
    args = [
        *PRIME,
        *SHORT,
        "--dtype",
        "float32",
        "--save_every",
        1,
        "--keep",
        0,
        "--device",
        "cpu",
        "--rollout",
        "hf",
    ]
    for name, steps in (("whole", 3), ("out", 1)):
        assert run(*args, "--max_steps", steps, "--out_dir", tmp_path / name).returncode == 0
    whole, out = lines(tmp_path / "whole" / "metrics.jsonl"), tmp_path / "out"
    shown, _ = trained(out, "--resume", "--max_steps", 2)
    assert "at step 1" in shown
    assert (
        "at step 2" in run("--resume", "--device", "cpu", "--out_dir", out, "--max_steps", 3).stdout
    )
    for a, b in zip(lines(tmp_path / "out" / "metrics.jsonl"), whole, strict=True):
        assert a["reward"] == b["reward"] and a["grad_norm"] == pytest.approx(
            b["grad_norm"], rel=1e-3
        )


# ------------------------------------------------------------------------------------------------
# What waits for the device


def updates(path):
    """Updates of the same samples in few and in many micro-batches, a save, and a fingerprint:
    writes what waited in each."""
    import cuda_standin

    def waits():
        counted = dict(cuda_standin.waits)
        cuda_standin.waits.clear()
        return counted

    world = World(0, 1, CUDA)
    policy = fast_policy(tiny_model().to(CUDA), 1.0)
    samples = random_samples(30, 5)
    collate = grpo.collate
    results = []
    for step, budget in enumerate((4096, 4096, 100, 30), 1):
        micro_batches = []

        def count(micro, *args, micro_batches=micro_batches):
            micro_batches.append(micro)
            return collate(micro, *args)

        grpo.collate = count
        optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-5, fused=True)
        cfg = Config(micro_batch_tokens=budget, dtype="bfloat16", max_sampler_gap=1e9)
        waits()
        grpo.update(policy, optimizer, samples, cfg, step=step, world=world)
        results.append((len(micro_batches), waits()))

    saves = []
    harness.run.write_checkpoint = lambda *_: saves.append(waits())
    run = types.SimpleNamespace(
        world=world,
        stops=types.SimpleNamespace(lock=contextlib.nullcontext()),
        checkpoint_parts={},
        collective_save=False,
        rank0=True,
        saved_step=0,
        step=1,
        identity=0,
        config={},
        model=policy.model,
        write_model=None,
        path_of=str,
        tidy=int,
    )
    harness.run.Run.save(run)
    waits()
    harness.checkpoints.fingerprint(policy.model)
    with open(path, "w") as file:
        json.dump(dict(updates=results, saves=saves, fingerprint=waits()), file)


def test_an_update_waits_for_the_device_a_fixed_number_of_times(tmp_path):
    """Never inside a pass, and not for each micro-batch. A save and a resume wait once for all
    weights together."""
    on_cuda("tests.test_cuda.updates", tmp_path / "waits")
    found = json.loads((tmp_path / "waits").read_text())
    [save] = found["saves"]
    assert sum(save.values()) == 1
    assert sum(found["fingerprint"].values()) == 1
    numbers = [number for number, _ in found["updates"]]
    assert min(numbers) == 1 and max(numbers) >= 9
    for number, waits in found["updates"]:
        inside = {what: n for what, n in waits.items() if not what.endswith("outside")}
        assert not inside, f"inside a pass: {inside}"
        assert sum(waits.values()) <= 7, f"{number} micro-batches waited: {waits}"


# ------------------------------------------------------------------------------------------------
# bfloat16: a fault that a CPU does not have


def head_gradients(path):
    """The gradient that the head gives the body, [n, H], of a loss over a step's tokens.

    In float32, in bfloat16, and in bfloat16 with a fault: backward asks for autocast's dtype, which
    is float16 on CUDA outside the autocast block.
    """
    generator, found = torch.Generator().manual_seed(0), {}
    hidden, weight = (torch.randn(*shape, generator=generator) for shape in ((64, 32), (2000, 32)))
    # likely tokens, as a policy samples them: small gradients
    targets = (hidden @ weight.T).argmax(-1)
    hidden, weight, targets = hidden.to(CUDA).requires_grad_(), weight.to(CUDA), targets.to(CUDA)
    honest = harness.head.HeadLogps.backward

    def planted(ctx, grad_logps, grad_entropy):
        asked = torch.get_autocast_dtype("cuda")
        saved = [
            x.to(asked) if x is not None and x.dtype == torch.bfloat16 else x
            for x in ctx.saved_tensors
        ]
        own = {
            name: getattr(ctx, name)
            for name in ("weight", "temperature", "width", "kept", "needs_input_grad")
        }
        hidden, *rest = honest(
            types.SimpleNamespace(saved_tensors=saved, **own), grad_logps, grad_entropy
        )
        return hidden, *rest

    for name, dtype, backward in (
        ("true", torch.float32, honest),
        ("bfloat16", torch.bfloat16, honest),
        ("planted", torch.bfloat16, planted),
    ):
        harness.head.HeadLogps.backward = staticmethod(backward)
        with torch.autocast("cuda", torch.bfloat16, enabled=dtype == torch.bfloat16):
            logps, _ = harness.head.HeadLogps.apply(hidden, weight, None, targets, 1.0)
        [gradient] = torch.autograd.grad(logps.sum() / 1e7, hidden)
        found[name] = (1e7 * gradient.float()).cpu()
    torch.save(found, path)


@pytest.mark.slow
def test_a_global_dtype_asked_for_in_backward_is_seen(tmp_path):
    on_cuda("tests.test_cuda.head_gradients", tmp_path / "gradients")
    found = torch.load(tmp_path / "gradients", weights_only=True)
    assert relative(found["bfloat16"], found["true"]) < 0.02
    assert relative(found["planted"], found["true"]) > 0.5


# ------------------------------------------------------------------------------------------------
# Cards that people have

QWEN = {
    "0.5B": (896, 4864, 24, 14, 151936),
    "1.5B": (1536, 8960, 28, 12, 151936),
    "7B": (3584, 18944, 28, 28, 152064),
}


def qwen(size):
    """Without weights, but with their number."""
    from transformers import AutoModelForCausalLM, Qwen2Config

    names = (
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "vocab_size",
    )
    sizes = dict(zip(names, QWEN[size], strict=True)) | dict(
        num_key_value_heads=2, tie_word_embeddings=size != "7B"
    )
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(Qwen2Config(**sizes))


def test_the_micro_batch_follows_the_card_and_the_model(monkeypatch, capsys):
    def chosen(size, memory, **options):
        card = types.SimpleNamespace(total_memory=memory * 1e9)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: card)
        model = qwen(size)
        cfg = harness.auto.fit_micro_batch(
            Config(**(dict(dtype="bfloat16", beta=0.001) | options)), model, CUDA
        )
        assert model.is_gradient_checkpointing is cfg.gradient_checkpointing
        return cfg.micro_batch_tokens, cfg.gradient_checkpointing

    assert chosen("0.5B", 25.2) == (4096, False)
    assert "--micro_batch_tokens 4096 (22 GB of the card's 25)" in capsys.readouterr().out
    assert chosen("0.5B", 85) == (16384, False)
    assert chosen("0.5B", 15.8, dtype="float32")[1]  # recomputed
    assert chosen("1.5B", 85) == (8192, False)
    assert chosen("1.5B", 42.3) == (16384, True)
    assert chosen("7B", 150, beta=0) == (8192, True)
    assert chosen("0.5B", 85, micro_batch_tokens=100) == (100, False)
    for size, memory in (("1.5B", 25.2), ("7B", 150)):
        with pytest.raises(
            ConfigError,
            match=f"2048 tokens takes .* GB of the card's {memory:.0f}: --beta 0, --lora",
        ):
            chosen(size, memory)
    assert (
        harness.auto.fit_micro_batch(Config(), None, torch.device("cpu")).micro_batch_tokens == 2048
    )


def card_answers(path):
    """What this card gets for a model that is not small, and the attention of a training pass."""
    import cuda_standin

    harness.auto.SMALL = 0
    model = tiny_model().to(CUDA)  # grouped heads
    cfg = harness.auto.resolve_auto(
        Config(micro_batch_tokens=2048, max_sampler_gap=1e9), model, CUDA
    )
    policy = fast_policy(model, 1.0)
    made = []
    honest = harness.attention.PackedRow.blocks.func

    def noting(row):
        made.append(honest(row))
        return made[-1]

    blocks = functools.cached_property(noting)
    blocks.__set_name__(harness.attention.PackedRow, "blocks")
    harness.attention.PackedRow.blocks = blocks
    recorder = types.SimpleNamespace(
        param_groups=[], step=lambda: None, zero_grad=lambda set_to_none: None
    )
    answers = dict(dtype=cfg.dtype)
    samples = random_samples(12, 4)
    samples[0].prompt.ids = ids_of(range(2, 15))  # the longest prompt: not a multiple of 8
    for name, packs, way in (
        ("merged", True, "auto"),
        ("packed", True, "masks"),
        ("padded", False, "auto"),
    ):
        policy.packs, policy.attention = packs, way
        cuda_standin.attention.clear()
        grpo.update(policy, recorder, samples, cfg, world=World(0, 1, CUDA))
        answers[name] = dict(cuda_standin.attention)
        answers[f"{name} passes"] = len(made)
    masks = [block["mask"] for blocks in made for block in blocks]
    biases = [mask for mask in masks if mask is not None]
    answers |= dict(biases=[[str(bias.dtype), bias.shape[-1]] for bias in biases])
    with open(path, "w") as file:
        json.dump(answers, file)


def odd_heads(path):
    """The attention of heads that CUDA's flash kernel for texts of many lengths does not take."""
    import cuda_standin

    sizes = dict(vocab_size=32, n_embd=24, n_layer=1, n_head=2, n_positions=128)  # 12 per head
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)).eval().to(CUDA)
    cfg = Config(dtype="bfloat16", micro_batch_tokens=100, max_completion_length=8)
    policy = grpo.make_policy(model, cfg, [])
    cuda_standin.attention.clear()
    with grpo.autocast(cfg, CUDA):
        logps, _ = policy(grpo.collate(random_samples(12, 4), CUDA, policy.rows))
        logps.sum().backward()
    with open(path, "w") as file:
        json.dump([policy.packs, policy.attention, dict(cuda_standin.attention)], file)


def test_heads_of_other_sizes_keep_their_masks(tmp_path):
    on_cuda("tests.test_cuda.odd_heads", tmp_path / "answers")
    packs, attention, kernels = json.loads((tmp_path / "answers").read_text())
    assert packs and attention == "auto"
    assert set(kernels) == {"flash", "memory-efficient"}


def test_cards_that_vllm_has_no_kernels_for_sample_with_hf(monkeypatch):
    found = types.SimpleNamespace(current_platform=types.SimpleNamespace(device_type="cuda"))
    monkeypatch.setitem(sys.modules, "vllm", types.ModuleType("vllm"))
    monkeypatch.setitem(sys.modules, "vllm.platforms", found)
    for name in ("VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_LOGGING_LEVEL", "TRITON_F32_DEFAULT"):
        monkeypatch.setenv(name, "1")
    for capability, kind in (((6, 1), "hf"), ((7, 0), "hf"), ((7, 5), "vllm"), ((8, 6), "vllm")):
        monkeypatch.setattr(
            torch.cuda, "get_device_capability", lambda *_, capability=capability: capability
        )
        chosen, why = harness.engine.choose_sampler(Config(dtype="float32"), CUDA, False)
        assert chosen == kind and ("below compute capability 7.5" in why) == (kind == "hf")
        assert (
            os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
            and os.environ["TRITON_F32_DEFAULT"] == "ieee"
        )
        if kind == "hf":
            with pytest.raises(ConfigError, match="--rollout vllm: .*no kernels.*--rollout hf"):
                harness.engine.choose_sampler(Config(dtype="float32", rollout="vllm"), CUDA, False)


CARDS = {
    "Tesla T4": ([7, 5], "float32"),
    "NVIDIA GeForce RTX 3090": ([8, 6], "bfloat16"),
    "NVIDIA H100 80GB HBM3": ([9, 0], "bfloat16"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CARDS)
def test_what_a_card_can_do_decides_dtype_and_attention(tmp_path, name):
    capability, dtype = CARDS[name]
    on_cuda("tests.test_cuda.card_answers", tmp_path / "answers", name=name, capability=capability)
    answers = json.loads((tmp_path / "answers").read_text())
    assert answers["dtype"] == dtype  # a T4 emulates bfloat16
    # Never by the formula, whose memory is quadratic in the length; by flash if the card has it.
    if dtype == "bfloat16":
        calls = 3 * 2  # for two layers
        texts = "flash, texts of many lengths"
        assert answers["merged"] == {texts: calls, f"{texts}, backward": calls}
        assert answers["merged passes"] == 0  # no masks
        assert set(answers["packed"]) == {"flash", "memory-efficient"}
        assert set(answers["padded"]) == {"flash"}
    else:
        assert set(answers["merged"]) == set(answers["packed"]) == {"memory-efficient"}
        assert set(answers["padded"]) == {"memory-efficient"}
    # One mask for all layers, to be added as it is, as wide as the kernel takes it without padding.
    assert answers["packed passes"] == answers["merged passes"] + 1 and answers["biases"]
    assert all(kind == f"torch.{dtype}" and width % 8 == 0 for kind, width in answers["biases"])


def points(path, device="cuda"):
    """What studies/machine.py finds of the points that it asks."""
    sys.path.insert(0, os.path.join(HERE, "studies"))
    import machine

    engines()
    machine.SCRIPT = [STANDIN, "tests.test_cuda_engine.with_engine"]
    machine.random_model = lambda _, device: tiny_model().to(device)
    machine.check_points(harness.ranks.pick_device(device))
    with open(path, "w") as file:
        json.dump(machine.POINTS, file)


MISSING = {
    "NVIDIA H100 80GB HBM3": (
        2,
        [9, 0],
        {6, 7},
    ),  # two of them, but neither NCCL nor NVIDIA's driver
    "Tesla V100-SXM2-16GB": (1, [7, 0], {2, 3, 5, 6, 7, 9, 10}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MISSING)
def test_machine_finds_what_is_expected_of_a_card(tmp_path, name):
    devices, capability, missing = MISSING[name]
    on_cuda(
        "tests.test_cuda.points",
        tmp_path / "points",
        name=name,
        capability=capability,
        devices=devices,
    )
    found = json.loads((tmp_path / "points").read_text())
    assert {number for number, *_ in found} == {*range(1, 11)}
    assert not [line for line in found if line[-1] == "NOT AS EXPECTED"]
    assert {number for number, *_, answer in found if answer == "cannot be asked here"} == missing


@pytest.mark.slow
def test_machine_says_what_a_cpu_cannot_answer(tmp_path):
    code = f"from tests import test_cuda; test_cuda.points({str(tmp_path / 'points')!r}, 'cpu')"
    assert run("-c", code).returncode == 0
    found = json.loads((tmp_path / "points").read_text())
    assert {number for number, *_, answer in found if answer == "ok"} == {8}
    assert all(
        line[2:] == ["needs a GPU", "cannot be asked here"] for line in found if line[0] != 8
    )
