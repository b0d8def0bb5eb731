"""Runs of the vLLM engine for tests/test_engine.py. Each of more_engines() and vllm_worker() gets a
process of its own, and writes what it measured into results.json, which the tests then check."""

import dataclasses
import json
import math
import os
import pathlib

import numpy as np
import pytest
import torch

import grpo
import harness.engine
import harness.rows
from grpo import Config, Prompt, Sample
from harness.flags import TrainingError
from tests.common import (
    BUNDLED,
    CPU,
    PRIME,
    copy_cut_back,
    fast_policy,
    ids_of,
    lines,
    logps_of,
    small_run,
    texts,
    tiny_model,
)
from tests.episodes import stage
from tests.families import SAMPLING, family, family_run

ENGINES = [("qwen2", True)]  # architecture, and whether its embedding is tied
MORE_ENGINES = [
    ("mixtral", False),
    ("qwen3", True),
    ("llama", False),
    ("gemma2", True),
    ("mistral", False),
]
WEIGHT_FAULTS = ("push", "norms", "head")  # weights stay NaN: seen at any learning rate
FAULTS = ("none", *WEIGHT_FAULTS, "scaled", "refused", "cache", "swapped", "unset")
SERVED = ("llama3", "gemma2")  # of FAMILIES; the first one is sampled by vLLM, too
QUESTIONS = ["520+773=", "111+222=", "989+898="]
TIS = "sampling/importance_sampling_ratio/mean"
HALF_METRICS = ("sampler_gap", TIS, TIS.replace("mean", "max"), "tis_ess")
ENGINE_OPTIONS = dict(dtype="float32", kv_cache_memory_bytes=2**26, enforce_eager=True)


def case_name(kind, tied):
    return f"{kind} {'tied' if tied else 'untied'}"


def write_results(folder, results):
    (pathlib.Path(folder) / "results.json").write_text(json.dumps(results))


# ------------------------------------------------------------------------------------------------
# Faults


def plant(sampler, fault, monkeypatch):
    """Makes pushes and rollouts go wrong in the way of `fault`, from the second push on."""
    generate = sampler.generate
    reload = sampler.llm.collective_rpc
    reset = sampler.llm.reset_prefix_cache
    repack = grpo.repack
    pushes = []

    def is_planted():
        return len(pushes) >= 2

    def faulty_reload(name, kwargs):
        pushes.append(name)
        weights = dict(kwargs["weights_iterator"])
        if is_planted() and fault == "push":
            return
        if is_planted() and fault == "scaled":
            weights = {name: w * 1.001 for name, w in weights.items()}
        if is_planted() and fault == "norms":
            weights = {name: w for name, w in weights.items() if "norm" not in name}
        reload(name, kwargs=dict(weights_iterator=iter(weights.items())))
        if fault == "unset":
            sampler.llm.apply_model(lambda m: m.model.norm.weight.data.fill_(math.nan) is None)

    def faulty_generate(prompts, *rest):
        if is_planted() and fault == "swapped":
            prompts = prompts[::-1]
        return generate(prompts, *rest)

    def faulty_repack(model):
        if not is_planted():
            repack(model)

    def faulty_reset():
        if is_planted():
            return fault == "cache"  # True: it says that it did
        return reset()

    monkeypatch.setattr(sampler, "generate", faulty_generate)
    monkeypatch.setattr(sampler.llm, "collective_rpc", faulty_reload)
    if fault == "head":
        monkeypatch.setattr(grpo, "repack", faulty_repack)
    if fault in ("cache", "refused"):
        monkeypatch.setattr(sampler.llm, "reset_prefix_cache", faulty_reset)


def clean_cache(worker):
    """Of the NaN of the fault before: what is masked is multiplied by 0, and stays NaN."""
    for cache in worker.model_runner.kv_caches:
        cache.zero_()


def fault_run(out, sampler, fault):
    """Two steps of a real run. Returns each step's sampler_gap, and the error that ended the run.

    The two prompts are longer than a block of the prefix cache and the same in both steps, so that
    keys and values of the old policy could be used again.
    """
    rows = os.path.join(os.path.dirname(out), "long.jsonl")
    with open(rows, "w") as file:
        for prompt in ("123+456=" * 17, "111+222=333" * 12 + "111+222="):
            file.write(json.dumps(dict(prompt=prompt, answer="")) + "\n")
    options = dict(train_data=rows, num_prompts=2, num_generations=8, num_minibatches=1)
    options["temperature"] = 0.7 if fault == "raw" else 1.0
    options["learning_rate"] = 1e-6 if fault in WEIGHT_FAULTS else 1e-3

    sampler.llm.collective_rpc(clean_cache)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grpo, "make_sampler", lambda *_: sampler)
        patch.setattr(sampler, "close", lambda: None)
        plant(sampler, fault, patch)
        try:
            small_run(out, **options, max_steps=2, save_every=0)
            error = ""
        except TrainingError as training_error:
            error = str(training_error)
    return [m["sampler_gap"] for m in lines(os.path.join(out, "metrics.jsonl"))], error


# ------------------------------------------------------------------------------------------------
# Engine and trainer


def agreement(folder, engines):
    """{case: for the first weights, for others and for the first again, what agree() found}"""
    grpo.VLLMSampler.CPU_CACHE_BYTES = 2**26
    cfg = Config(rollout="vllm", max_completion_length=12, temperature=0.7)
    # the call sets the engine's environment
    assert harness.engine.choose_sampler(cfg, CPU.device, False) == ("vllm", "asked for")
    rng = np.random.default_rng(0)
    prompts = [ids_of(rng.integers(2, 32, n)) for n in (3, 9, 150)]
    results = {}
    for kind, tied in engines:
        models = [tiny_model(kind, seed=seed, tie_word_embeddings=tied) for seed in (0, 1)]
        models[0].save_pretrained(f"{folder}/{kind}")
        kind_cfg = dataclasses.replace(cfg, model=f"{folder}/{kind}")
        sampler = grpo.VLLMSampler([1, 2], 150, kind_cfg, CPU)
        name = case_name(kind, tied)
        results[name] = []
        for model in (models[0], models[1], models[0]):
            sampler.push(model)
            results[name].append(agree(sampler, model, prompts, cfg))
        sampler.close()
    return results


def agree(sampler, model, prompts, cfg):
    """[greedy decoding is that of the HF sampler; the largest difference of a log-probability from
    the trainer's; a seed gives the same text again; stop tokens, and only these, end a text]"""
    seeds = [0, 1, 2]
    greedy = [group for [group] in sampler.generate(prompts, 1, seeds, 0.0)]
    hf = grpo.HFSampler(model, [1, 2], 0, cfg)
    expected = [group for [group] in hf.generate(prompts, 1, seeds, 0.0)]
    same = texts(greedy) == texts(expected)
    same_ends = [c.finish_reason for c in greedy] == [c.finish_reason for c in expected]

    groups = sampler.generate(prompts, 8, seeds, 0.7)
    samples = []
    stops_end = True
    for i, group in enumerate(groups):
        for c in group:
            samples.append(Sample(i, Prompt(prompts[i], "", {}), c.ids, c.logps, c.finish_reason))
            stops_end = stops_end and (c.ids[-1] in (1, 2)) == (c.finish_reason == "stop")

    logps, _ = logps_of(fast_policy(model, 0.7), samples)
    gaps = []
    for s, row in zip(samples, logps.detach().numpy(), strict=True):
        gaps.append(np.abs(row[: len(s.sampler_logps)] - s.sampler_logps).max())
    [second] = sampler.generate(prompts[1:2], 8, [1], 0.7)
    stable = texts(second) == texts(groups[1])
    return [same and same_ends, float(max(gaps)), stable, stops_end]


def episodes(sampler, model):
    """Episodes of four turns by the engine: the largest difference of a log-probability from the
    trainer's; and of every request after the first turns [its tokens, those found in the prefix
    cache, those of the transcript before the environment's last reply]."""
    table = []
    for i in range(4):
        prompt = f"{110 + i}+456=" * 6
        table.append(dict(prompt=prompt, says=["1+2=" * 11, "33+44=" * 7, "5+6=" * 10]))
    tokenizer = harness.rows.load_tokenizer(BUNDLED)
    flags = dict(max_completion_length=180, num_generations=2)
    scene = stage("says", table, tokenizer, **flags)
    generate = sampler.llm.generate
    requests = []

    def counted_generate(texts, *rest, **options):
        results = generate(texts, *rest, **options)
        requests.append([(len(r.prompt_token_ids), r.num_cached_tokens) for r in results])
        return results

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampler.llm, "generate", counted_generate)
        samples = grpo.sample(sampler, scene.prompts, [0] * 4, scene.cfg, CPU, player=scene.player)
    logps, _ = logps_of(fast_policy(model, 1.0), samples)
    gaps = []
    for s, row in zip(samples, logps.detach().numpy(), strict=True):
        gap = np.abs(row[: len(s.completion_ids)] - s.sampler_logps)
        gaps.append(gap[s.sampled].max())

    counts = []
    for number, turn in enumerate(requests[1:]):
        playing = [s for s in samples if len(s.transcript.turns) >= number + 2]
        reply = len(tokenizer(table[0]["says"][number])["input_ids"])
        for _, (tokens, cached) in zip(playing, turn, strict=True):
            counts.append([tokens, cached, tokens - reply])
    return dict(
        gap=float(max(gaps)), counts=counts, turns=[len(s.transcript.turns) for s in samples]
    )


def served_family(folder, name):
    """Trains a family for a step and serves what it saved by an engine that is started on the
    directory, chat template and all. Returns the step's sampler_gap, the number of different
    samples, and whether prompt and greedy answer are those of transformers."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from vllm import LLM, SamplingParams

    folder.mkdir()
    one_text = SAMPLING | dict(do_sample=True, top_k=1)  # if the trainer sampled by these
    path, _ = family(folder / "model", name, one_text)
    rows = folder / "rows.jsonl"
    rows.write_text('{"prompt": "1+2?"}\n{"prompt": "the sum of 11 and 22?"}\n')
    rollout = "vllm" if name == SERVED[0] else "hf"
    [metrics] = family_run(path, folder / "out", str(rows), rollout=rollout)
    samples = {row["completion"] for row in lines(folder / "out" / "completions.jsonl")}

    saved = folder / "out" / "step_000001"
    model = AutoModelForCausalLM.from_pretrained(saved)
    tokenizer = AutoTokenizer.from_pretrained(saved)
    messages = [dict(role="user", content=" 1+2? ")]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    greedy = dict(do_sample=False, repetition_penalty=1.0, top_k=None, top_p=None, temperature=None)
    ids = model.generate(torch.tensor([prompt]), max_new_tokens=20, **greedy)[0]
    expected = ids[len(prompt) :].tolist()

    llm = LLM(str(saved), max_model_len=128, **ENGINE_OPTIONS)
    params = SamplingParams(temperature=0, max_tokens=20)
    [answer] = llm.chat([messages], params, use_tqdm=False)
    llm.llm_engine.engine_core.shutdown()
    same_prompt = list(answer.prompt_token_ids) == prompt
    same_answer = list(answer.outputs[0].token_ids) == expected
    return metrics["sampler_gap"], len(samples), same_prompt, same_answer


# ------------------------------------------------------------------------------------------------
# The two processes


def more_engines(folder):
    """The checks that need an engine of their own each."""
    from vllm import LLM

    results = agreement(folder, MORE_ENGINES)
    bundled = dict(model=BUNDLED.model, max_completion_length=8, rollout="vllm")
    start = LLM.__init__

    def start_raw(self, **options):
        start(self, **(options | dict(logprobs_mode="raw_logprobs")))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LLM, "__init__", start_raw)
        sampler = grpo.VLLMSampler([1], 150, Config(temperature=0.7, **bundled), CPU)
        results["raw"] = fault_run(f"{folder}/raw", sampler, "raw")
    sampler.close()

    sampler = grpo.VLLMSampler([1], 150, Config(dtype="bfloat16", **bundled), CPU)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grpo, "make_sampler", lambda *_: sampler)
        steps = small_run(f"{folder}/half", max_steps=2, dtype="bfloat16")
    results["half"] = [{key: m[key] for key in HALF_METRICS} for m in steps]
    sampler.close()

    results["families"] = {}
    for name in SERVED:
        results["families"][name] = served_family(pathlib.Path(folder) / f"served_{name}", name)
    write_results(folder, results)


def vllm_worker(folder):
    """The checks that can share an engine in one process."""
    results = agreement(folder, ENGINES)
    bundled = dict(model=BUNDLED.model, max_completion_length=8, rollout="vllm")
    sampler = grpo.VLLMSampler([1], 240, Config(**bundled), CPU)
    sampler.push(grpo.load_model(BUNDLED.model, BUNDLED))
    rng = np.random.default_rng(0)
    many = [ids_of(rng.integers(3, 18, 45)) for _ in range(110)]  # 4,950 tokens; a step takes 4,096
    results["episodes"] = episodes(sampler, grpo.load_model(BUNDLED.model, BUNDLED))
    results["many"] = sum(len(group) for group in sampler.generate(many, 2, list(range(110)), 1.0))
    for fault in FAULTS:
        results[f"fault {fault}"] = fault_run(f"{folder}/{fault}", sampler, fault)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grpo, "make_sampler", lambda *_: sampler)
        patch.setattr(sampler, "close", lambda: None)
        small_run(f"{folder}/whole", max_steps=3, num_minibatches=1)
        copy_cut_back(f"{folder}/whole", f"{folder}/resumed", 1)
        small_run(f"{folder}/resumed", max_steps=3, num_minibatches=1, resume="latest")
        small_run(f"{folder}/off_policy", max_steps=3, num_minibatches=2)
        args = [*PRIME, "--max_steps", 1, "--out_dir", f"{folder}/prime"]
        prime = grpo.parse_args([str(arg) for arg in args])
        sampler.max_completion_length = prime.max_completion_length
        grpo.train(prime)
    sampler.close()
    results["texts"] = answers_of_a_checkpoint(f"{folder}/whole/step_000003")
    write_results(folder, results)


def answers_of_a_checkpoint(path):
    """As users load it: by its path, with its tokenizer, without a push."""
    from vllm import LLM, SamplingParams

    llm = LLM(path, max_model_len=64, **ENGINE_OPTIONS)
    params = SamplingParams(temperature=0, max_tokens=20)
    requests = llm.generate(QUESTIONS, params, use_tqdm=False)
    llm.llm_engine.engine_core.shutdown()
    return [request.outputs[0].text for request in requests]
