"""The vLLM engine: its samples are the policy's after every push, and what a push misses ends the
run. An engine cannot be started twice in a process, so its processes are forks of one that has
imported vLLM, which takes longer than a start; and all runs of the bundled model on one rank have
the same engine."""

import ctypes
import json
import os
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
    be_forked,
    draw_from,
    flags_of,
    free_port,
    lines,
    metrics_of,
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


def in_forks(*calls):
    """Calls "module.function", each on so many ranks with these arguments."""
    pytest.importorskip("vllm")
    try:
        ctypes.CDLL("libnuma.so.1")
    except OSError:
        pytest.skip("libnuma1 is not installed")
    code = f"from tests import test_vllm as m; m.fork_all({calls!r})"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=HERE, timeout=600
    )
    assert done.returncode == 0, done.stderr[-3000:]


def fork_all(calls):
    """One call after the other, up to the first that fails."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    import vllm.v1.engine.core
    import vllm.v1.engine.llm_engine
    import vllm.v1.worker.cpu_worker  # noqa: F401

    for n_ranks, function, *args in calls:
        meet = dict(WORLD_SIZE=str(n_ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
        forks = []
        for rank in range(n_ranks):
            own = meet | dict(RANK=str(rank), LOCAL_RANK=str(rank)) if n_ranks > 1 else {}
            forks.append(os.fork())
            if forks[-1] == 0:
                be_forked(own, [], HERE, function, args)
        failed = [os.waitpid(fork, 0)[1] != 0 for fork in forks]
        if any(failed):
            sys.exit(f"{function} {args}")


# ------------------------------------------------------------------------------------------------
# A push, for several architectures


def agree_after_pushes(kind, tied, folder):
    """Three pushes: these weights, others, these again. The config says tied even where the head is
    not."""
    options = dict(tie_word_embeddings=tied, vocab_size=64)
    first = tiny_model(kind, **options)
    first.save_pretrained(folder)
    config = json.loads(Path(folder, "config.json").read_text())
    Path(folder, "config.json").write_text(json.dumps(config | dict(tie_word_embeddings=True)))
    cfg = Config(model=folder, dtype="float32", max_completion_length=16)
    sampler = grpo.VLLMSampler(first, [1], 80, cfg)
    prompts = [np.arange(5, 5 + n) for n in (3, 40, 40, 7)]
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
        assert np.abs(ours.detach().numpy() - theirs).max() < 1e-4
        # The same seeds give the same texts, and temperature 0 the most likely token.
        again = draw_from(sampler, prompts, seeds, 0.9)
        assert [ids.tolist() for ids, _ in again] == [s.completion_ids.tolist() for s in samples]
        [(greedy, _)] = draw_from(sampler, prompts[:1], [(0, 0)], 0.0, limits=[1])
        logits = model(torch.from_numpy(prompts[0])[None]).logits[0, -1]
        assert greedy.tolist() == [int(logits.argmax())]
    sampler.close()


KINDS = dict(qwen2=True, llama=False, gemma2=True, mixtral=False)  # is the head tied?


@pytest.mark.slow
def test_engine_and_trainer_agree_before_and_after_a_push(tmp_path):
    function = "tests.test_vllm.agree_after_pushes"
    in_forks(*[(1, function, kind, tied, f"{tmp_path}/{kind}") for kind, tied in KINDS.items()])


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
    """said.json: what a run with each fault says at its end. Before the first push of a resume the
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
    Path(folder, "said.json").write_text(json.dumps(said))


@pytest.mark.slow
def test_planted_faults_end_a_run_and_a_resume_and_two_ranks_are_exact(tmp_path):
    two = flags_of(small_config(tmp_path / "two", rollout="vllm", max_steps=2))
    one_engine = (1, "tests.test_vllm.runs_of_one_engine", str(tmp_path))
    in_forks(one_engine, (2, "tests.common.main", *two))

    said = json.loads((tmp_path / "said.json").read_text())
    for fault, words in FAULTS.items():
        assert words in said[fault]
    assert [m["step"] for m in metrics_of(tmp_path / "none")] == [1, 2, 3]
    assert all(m[GAP] < 1e-5 for m in metrics_of(tmp_path / "none"))

    # With adapters, to the bit.
    whole, parts = (metrics_of(tmp_path / name) for name in ("whole", "parts"))
    assert whole == parts and [m["step"] for m in whole] == [1, 2, 3, 4]
    assert all(m[GAP] < 1e-4 for m in whole)

    # Two engines: the samples of one rank.
    one, two = (lines(tmp_path / name / "completions.jsonl") for name in ("none", "two"))
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
