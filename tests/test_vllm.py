"""The vLLM engine: its samples are the policy's after every push, and what a push misses ends the
run. An engine cannot be started twice in a process, and a start takes 25 CPU seconds: all runs of
the bundled model on one rank have the same engine."""

import ctypes
import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

import grpo
from extras import preflight
from extras.errors import ConfigError, TrainingError
from grpo import Config, Prompt, Sample
from tests.common import (
    CPU,
    GAP,
    HERE,
    draw_from,
    flags_of,
    lines,
    metrics_of,
    on_ranks,
    small_config,
    small_run,
    tiny_model,
)

QUESTIONS = ["520+773=", "111+222=", "989+898="]
FAULTS = {  # what goes wrong from the second push on, and what the run says
    "push": "nan off on average",
    "norms": "nan off on average",
    "down_proj": "nan off on average",  # a layer of its own
    "k_proj": "nan off on average",  # a part of one
    "scaled": "off on average",
    "swapped": "off on average",
    "refused": "prefix cache",
}


def in_a_process(function, *args):
    """What a function of this file prints as JSON in its last line."""
    code = f"from tests import test_vllm as m; m.{function}(*{list(map(str, args))!r})"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, cwd=HERE, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


# ------------------------------------------------------------------------------------------------
# A push, for several architectures


def gap_after_pushes(kind, tied, folder):
    """The largest gap to the policy after three pushes: these weights, others, these again. The
    config says tied even where the head is not."""
    options = dict(tie_word_embeddings=tied == "True", vocab_size=64)
    first = tiny_model(kind, **options)
    first.save_pretrained(folder)
    config = json.loads(Path(folder, "config.json").read_text())
    Path(folder, "config.json").write_text(json.dumps(config | dict(tie_word_embeddings=True)))
    cfg = Config(model=folder, dtype="float32", max_completion_length=16)
    sampler = grpo.VLLMSampler(first, [1], 80, cfg)
    prompts = [np.arange(5, 5 + n) for n in (3, 40, 40, 7)]
    gaps = []
    for model in (first, tiny_model(kind, seed=7, **options), first):
        sampler.load_weights(model)
        samples = []
        seeds = [(0, i) for i in range(len(prompts))]
        for prompt, (ids, logps) in zip(
            prompts, draw_from(sampler, prompts, seeds, 0.9), strict=True
        ):
            samples.append(Sample(0, Prompt(prompt, "", {}), ids, logps))
        ours, _ = grpo.Policy(model, 0.9)(grpo.collate(samples, CPU))
        theirs = np.concatenate([s.sampler_logps for s in samples])
        gaps.append(float(np.abs(ours.detach().numpy() - theirs).max()))
        # The same seeds give the same texts, and temperature 0 the most likely token.
        again = draw_from(sampler, prompts, seeds, 0.9)
        assert [ids.tolist() for ids, _ in again] == [s.completion_ids.tolist() for s in samples]
        [(greedy, _)] = draw_from(sampler, prompts[:1], [(0, 0)], 0.0, limits=[1])
        logits = model(torch.from_numpy(prompts[0])[None]).logits[0, -1]
        assert greedy.tolist() == [int(logits.argmax())]
    sampler.close()
    print(json.dumps(max(gaps)))


def needs_vllm():
    pytest.importorskip("vllm")
    try:
        ctypes.CDLL("libnuma.so.1")
    except OSError:
        pytest.skip("libnuma1 is not installed")


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind, tied", [("qwen2", True), ("llama", False), ("gemma2", True), ("mixtral", False)]
)
def test_engine_and_trainer_agree_before_and_after_a_push(kind, tied, tmp_path):
    needs_vllm()
    assert in_a_process("gap_after_pushes", kind, tied, tmp_path) < 1e-4


# ------------------------------------------------------------------------------------------------
# Runs of the bundled model


def plant(fault, engine, patch):
    """Makes pushes and rollouts go wrong from the second push on."""
    generate = grpo.VLLMSampler.generate
    reload = engine.collective_rpc
    reset = engine.reset_prefix_cache
    pushes = []

    def faulty_reload(name, kwargs):
        pushes.append(name)
        weights = dict(kwargs["weights_iterator"])
        if len(pushes) >= 2 and fault == "push":
            return
        if len(pushes) >= 2 and fault == "scaled":
            weights = {name: w * 1.001 for name, w in weights.items()}
        left_out = dict(norms="norm", down_proj="down_proj", k_proj="k_proj").get(fault, "none")
        if len(pushes) >= 2:
            weights = {name: w for name, w in weights.items() if left_out not in name}
        reload(name, kwargs=dict(weights_iterator=iter(weights.items())))

    def faulty_generate(self, prompts, *args):
        if len(pushes) >= 2 and fault == "swapped":
            prompts = prompts[::-1]
        return generate(self, prompts, *args)

    def faulty_reset():
        return reset() and not (len(pushes) >= 2 and fault == "refused")

    patch.setattr(engine, "collective_rpc", faulty_reload)
    patch.setattr(engine, "reset_prefix_cache", faulty_reset)
    patch.setattr(grpo.VLLMSampler, "generate", faulty_generate)


def runs_of_one_engine(folder):
    """Prints what a run with each fault says at its end. Before the first push of a resume the
    engine has the weights of another run's end."""
    import vllm

    start = vllm.LLM
    engines = []

    def engine_of(**options):
        if engines == []:
            engines.append((options, start(**options)))
        first_options, engine = engines[0]
        assert options == first_options
        return engine

    vllm.LLM = engine_of
    grpo.VLLMSampler.close = lambda self: None
    small_run(f"{folder}/none", rollout="vllm", max_steps=3)
    said = {}
    caches = engines[0][1].llm_engine.model_executor.driver_worker.model_runner.kv_caches
    for fault in FAULTS:
        with pytest.MonkeyPatch.context() as patch, pytest.raises(TrainingError) as ended:
            for cache in caches:  # no nan of the run before
                cache.zero_()
            plant(fault, engines[0][1], patch)
            small_run(f"{folder}/{fault}", rollout="vllm", max_steps=3)
        said[fault] = str(ended.value)
    adapters = dict(rollout="vllm", lora_rank=2)
    small_run(f"{folder}/parts", max_steps=2, **adapters)
    small_run(f"{folder}/whole", **adapters)
    small_run(f"{folder}/parts", resume=True, **adapters)
    print(json.dumps(said))


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The folder of the runs, and what those with a fault said."""
    needs_vllm()
    folder = tmp_path_factory.mktemp("runs")
    return folder, in_a_process("runs_of_one_engine", folder)


@pytest.mark.slow
@pytest.mark.xdist_group("engine")
def test_planted_faults_end_a_run(runs):
    folder, said = runs
    for fault, words in FAULTS.items():
        assert words in said[fault]
    assert [m["step"] for m in metrics_of(folder / "none")] == [1, 2, 3]
    assert all(m[GAP] < 1e-5 for m in metrics_of(folder / "none"))


@pytest.mark.slow
@pytest.mark.xdist_group("engine")
def test_resume_to_the_bit_with_vllm_and_adapters(runs):
    whole, parts = (metrics_of(runs[0] / name) for name in ("whole", "parts"))
    assert whole == parts and [m["step"] for m in whole] == [1, 2, 3, 4]
    assert all(m[GAP] < 1e-4 for m in whole)


@pytest.mark.slow
@pytest.mark.xdist_group("engine")
def test_two_ranks_with_vllm(runs, tmp_path):
    """Two engines: the samples of one rank."""
    flags = flags_of(small_config(tmp_path / "two", rollout="vllm", max_steps=2))
    done = on_ranks(2, "tests.common.main", *flags)
    assert done.returncode == 0, done.stderr[-3000:]
    one, two = (
        lines(folder / "completions.jsonl") for folder in (runs[0] / "none", tmp_path / "two")
    )
    assert [row["completion"] for row in two] == [
        row["completion"] for row in one if row["step"] < 3
    ]


# ------------------------------------------------------------------------------------------------
# Without an engine


@pytest.mark.parametrize("off, reward", [(0.02, "overlong"), (np.nan, "overlong:0")])
def test_one_wrong_token_is_seen(off, reward, tmp_path, monkeypatch):
    """Even of a sample that gets no pass, if its log-probability is no number."""
    generate = grpo.HFSampler.generate

    def faulty(self, *args):
        completions = generate(self, *args)
        completions[-1]["sampler_logps"][-1] += off
        return completions

    monkeypatch.setattr(grpo.HFSampler, "generate", faulty)
    monkeypatch.setattr(preflight, "check_padding", lambda *_: None)
    options = dict(reward=reward, max_sampler_gap=0.1, max_steps=1, beta=0.1, num_minibatches=2)
    if off > 0:
        [metrics] = small_run(tmp_path / "out", **options)
        assert metrics[GAP.replace("mean", "max")] == pytest.approx(0.02, abs=1e-4)
        assert metrics[GAP] < 0.002
    else:
        with pytest.raises(TrainingError, match="nan"):
            small_run(tmp_path / "out", **options | dict(beta=0.0))


def test_a_sampler_that_padding_disturbs_is_said_at_the_start(tmp_path):
    """With Moshi's cache a token does not see the tokens of its window."""
    path = tmp_path / "model"
    shutil.copytree(f"{HERE}/sample_data/model", path)
    sizes = dict(vocab_size=32, hidden_size=32, num_hidden_layers=2, num_attention_heads=2)
    sizes |= dict(num_key_value_heads=1, ffn_dim=48, head_dim=16, sliding_window=6)
    config = transformers.MoshiConfig(**sizes, eos_token_id=1, pad_token_id=0)
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(path)
    options = dict(model=str(path), dtype="bfloat16", max_sampler_gap=0.0)
    with pytest.raises(ConfigError, match="--rollout hf: Moshi.*padding"):
        small_run(tmp_path / "out", **options)


def test_an_engine_that_does_not_start_is_one_line(tmp_path, monkeypatch, capfd):
    def refuse(*args):
        raise RuntimeError("no memory\nand a traceback")

    monkeypatch.setattr(grpo, "VLLMSampler", refuse)
    args = flags_of(small_config(tmp_path / "run", rollout="vllm"))
    assert grpo.main(args) == 2
    error = capfd.readouterr().err
    assert error.count("\n") == 1
    assert "--rollout" in error and "no memory" in error and "hf" in error
    for temperature in ("3.0", "0.003"):  # vLLM raises an error, and takes 0.01
        assert grpo.main([*args, "--temperature", temperature]) == 2
        assert "--temperature" in capfd.readouterr().err


class Engine:
    """Records what the sampler asks of vLLM on a GPU."""

    def __init__(self):
        self.calls = []

    def wake_up(self, tags):
        self.calls += [f"wake {tag}" for tag in tags]

    def sleep(self, level):
        self.calls.append(f"sleep {level}")

    def apply_model(self, function):
        self.calls.append(function.__name__)

    def collective_rpc(self, name, kwargs):
        self.calls.append(name)

    def reset_prefix_cache(self):
        self.calls.append("reset")
        return True


def test_the_engine_sleeps_and_wakes_in_order(monkeypatch):
    """Weights first and the cache of keys and values last, so that their peaks do not add up."""
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    sampler = object.__new__(grpo.VLLMSampler)
    sampler.llm, sampler.on_cuda, sampler.asleep, sampler.cfg = Engine(), True, False, Config()
    push = ["fill_with_nan", "reload_weights", "repack", "reset"]
    model = tiny_model()
    sampler.load_weights(model)
    assert sampler.llm.calls == push
    sampler.llm.calls.clear()
    sampler.sleep()
    sampler.sleep()
    sampler.load_weights(model)
    assert sampler.llm.calls == ["sleep 2", "wake weights", *push, "wake kv_cache"]
