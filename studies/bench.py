"""Seconds, CPU seconds and memory of a step: this trainer, TRL on the same work, and the floor of both.

    python3.11 -m venv .trl-venv && .trl-venv/bin/pip install --no-deps --retries 1 -r requirements-cpu.txt
    .trl-venv/bin/pip install trl==1.16.0 "datasets<4.9"
    python studies/bench.py --trl .trl-venv/bin/python --model FOLDER/model       # of real_model.py
    python studies/bench.py --settings bundled "30M"                              # this trainer and the floor

All of it takes an hour a round, half of that with --jobs 2. With --runs FILE a side whose result is there is not run
again, so it can be stopped.

Same model, prompts, G, lengths, learning rate, beta and dtype. Sides take turns, each in a process of its own, one
thread (--jobs 2: two at a time, in another order each round); a ratio is TRL's over ours in the same round. "TRL as
it comes" samples with HF generate and, on a CPU, scores the head at every position; "TRL at its best" samples with
the same vLLM engine as ours and scores the head at completion positions only, as it does on CUDA (one function is
patched for that). Ours samples as --rollout auto has it: with Hugging Face for the bundled model, else with vLLM. The
floor is what no trainer can do without: sampling, and a bare forward (reference) and forward and backward (update)
over as many tokens as were real, a group's prompt counted once. Memory that is freed stays in the process on all
sides but TRL's as it comes, and layers are compiled on the same sides where a setting says so.
"""

import argparse
import contextlib
import ctypes
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch
HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.dirname(HERE))

import grpo  # isort: skip  first: it sets the environment before torch
import numpy as np
import torch

import harness.engine
import harness.log
import harness.models
import harness.ranks
import harness.rows
import harness.run

# prompt, completion: tokens, at most. rows: of a TRL micro-batch; budget: tokens of one of ours, no more than TRL's
# rows have with their padding. without: sides that are left out, where others say the same, or it takes longest.
# stop: a word's probability to be a completion's last; None: the model has a tokenizer and a task of its own
REAL = dict(
    num_prompts=8, num_generations=8, prompt=48, completion=32, beta=0.0, stop=None, steps=1
)
REAL |= dict(rows=32, budget=1024)
TINY = dict(
    num_prompts=32, num_generations=8, prompt=8, completion=40, beta=0.001, stop=None, steps=8
)
TINY |= dict(rows=32, budget=768)
RANDOM = dict(
    num_prompts=8, num_generations=8, prompt=12, completion=128, beta=0.04, stop=1 / 40, steps=1
)
RANDOM |= dict(rows=8, budget=560)
RANDOM |= dict(
    shape=dict(vocab_size=32_000, hidden_size=384, intermediate_size=1024, num_hidden_layers=10)
)
RANDOM["shape"] |= dict(num_attention_heads=6, num_key_value_heads=2)
WORDS = dict(num_prompts=8, num_generations=8, prompt=75, completion=24, beta=0.0, stop=0, steps=1)
WORDS |= dict(rows=8, budget=4 * 99, without=("trl_hf",))
WORDS |= dict(
    shape=dict(vocab_size=262_144, hidden_size=640, intermediate_size=2048, num_hidden_layers=18)
)
WORDS["shape"] |= dict(
    num_attention_heads=4, num_key_value_heads=1, head_dim=256
)  # as Gemma 3 270M
LONG = dict(num_prompts=1, num_generations=16, prompt=512, completion=64, budget=8 * 576)
SETTINGS = {
    "135M, its own reward": REAL
    | dict(reward="answer", compile=True, without=("floor",)),  # as the next one's
    "135M, reward by position": REAL | dict(compile=True, without=("trl_hf",)),
    "bundled": TINY,
    "bundled, 6 tokens": TINY | dict(num_prompts=16, completion=6, rows=64, steps=20),
    "30M": RANDOM,
    "30M, equal lengths": RANDOM | dict(completion=40, stop=0, budget=8 * 52, without=("trl_hf",)),
    "30M, long prompt": RANDOM | LONG | dict(stop=0, without=("trl_hf",)),
    "270M, 262k words": WORDS,
}
IN_PICTURE = ("135M, its own reward", "bundled", "30M", "30M, equal lengths", "270M, 262k words")
SIDES = dict(ours="ours", trl="TRL at its best", trl_hf="TRL as it comes", floor="floor")
PHASES = ("rollout", "reward", "logps", "update", "sync")  # logps: reference, and TRL's old policy
REWARDS = """import re

def position(completions, **_):
    return [i % 13 / 13 for i in range(len(completions))]

def answer(completions, answer, **_):
    texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]
    found = [re.findall(r"-?\\d+", text) for text in texts]
    return [float(bool(numbers) and numbers[-1] == a) for numbers, a in zip(found, answer)]
"""


def prepare(setting: str, model: str, folder: str) -> dict:
    """Paths of model, rows and reward: the real one, the bundled one, or a model of random weights, whose words are
    all nearly as probable, so that lengths are geometric with mean 1 / stop."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import (
        AutoModelForCausalLM,
        AutoTokenizer,
        LlamaConfig,
        PreTrainedTokenizerFast,
    )

    spec, rows = SETTINGS[setting], os.path.join(folder, "rows.jsonl")
    with open(os.path.join(folder, "reward.py"), "w") as file:
        file.write(REWARDS)
    reward = f"{file.name}:{spec.get('reward', 'position')}"
    if setting.startswith("bundled"):
        data = os.path.join(HERE, "..", "sample_data")
        return dict(
            model=os.path.join(data, "model"), rows=os.path.join(data, "train.jsonl"), reward=reward
        )
    rng = np.random.default_rng(0)
    if setting.startswith("135M"):
        with open(rows, "w") as file:
            for a, b in rng.permutation([(a, b) for a in range(10) for b in range(10)]).tolist():
                question = (
                    f"State the final answer to the following arithmetic problem: {a} - {b} ="
                )
                file.write(
                    json.dumps(
                        dict(prompt=[dict(role="user", content=question)], answer=str(a - b))
                    )
                    + "\n"
                )
        return dict(model=model, rows=rows, reward=reward)
    vocabulary = spec["shape"]["vocab_size"]
    names = dict(
        pad_token="<pad>", unk_token="<unk>", eos_token="<eos>"
    )  # ids 0, 1, 2; no word begins like them
    ids = {
        word: i
        for i, word in enumerate([*names.values(), *(f"w{i}" for i in range(3, vocabulary))])
    }
    words = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, **names).save_pretrained(folder)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(LlamaConfig(tie_word_embeddings=True, **spec["shape"]))
    model.generation_config.eos_token_id = list(range(2, 3 + int(spec["stop"] * vocabulary)))
    model.generation_config.pad_token_id = 0
    model.save_pretrained(folder)
    with open(rows, "w") as file:
        for ids in rng.integers(vocabulary // 2, vocabulary, (64, spec["prompt"])):
            file.write(json.dumps(dict(prompt=" ".join(f"w{i}" for i in ids))) + "\n")
    found = AutoTokenizer.from_pretrained(folder)(f"w{vocabulary - 1} w3").input_ids
    assert found == [vocabulary - 1, 3], (
        found
    )  # a word is a token (for some model types another tokenizer is loaded)
    return dict(model=folder, rows=rows, reward=reward)


# ----------------------------------------------------------------------------------------------------------------
# One side, in a process of its own


def clocks() -> np.ndarray:
    """Seconds: wall, CPU, and the system's part of CPU."""
    return np.array(
        [
            time.perf_counter(),
            time.process_time(),
            resource.getrusage(resource.RUSAGE_SELF).ru_stime,
        ]
    )


def resident() -> tuple[int, int]:
    """Bytes of this process in memory, now and at the peak (Linux)."""
    with open("/proc/self/status") as status:
        values = dict(line.split(":", 1) for line in status)
    return tuple(1024 * int(values[name].split()[0]) for name in ("VmRSS", "VmHWM"))


def forget_peak() -> None:
    """What was freed goes back to the system, and the peak starts from here. Not in steps whose time counts."""
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")


class Record:
    """Of each step: wall and CPU seconds by phase, and tokens.

    The first step warms up; in the last one memory is measured, which takes time: neither counts for the seconds."""

    def __init__(self, n_timed: int):
        self.steps, self.now, self.inside, self.n_timed = [], {}, None, n_timed
        self.loaded = self.sampled = (
            0  # bytes resident before the first step, after the sampling of the last one
        )

    @contextlib.contextmanager
    def phase(self, name):
        if self.inside:  # a phase in a phase is part of the outer one
            yield
            return
        self.inside, started = name, clocks()
        try:
            yield
        finally:
            self.inside = None
            self.now[name] = self.now.get(name, 0) + clocks() - started
            if name == "rollout" and len(self.steps) == 1 + self.n_timed:
                self.now["peak"] = resident()[1]
                forget_peak()
                self.sampled = resident()[0]

    def timed(self, name, function):
        def call(*args, **options):
            with self.phase(name):
                return function(*args, **options)

        return call

    def count(self, computed: int, real: int):
        """Tokens that forwards with gradient computed, and those of the step's samples, prompts included."""
        if torch.is_grad_enabled():
            self.now["tokens"] = self.now.get("tokens", 0) + np.array([computed, real])

    def step_ends(self, *_, **__):
        if self.loaded:
            self.steps.append(self.now | dict(step=clocks() - self.started, peaks=resident()))
        else:
            self.loaded = resident()[0]
        if len(self.steps) == 1 + self.n_timed:
            forget_peak()
        self.now, self.started = {}, clocks()

    def result(self, n_parameters: int) -> dict:
        """Means over the timed steps. memory: of scoring and update, the peak above what was there after sampling,
        without gradients; whole: of the step, above what was loaded, gradients and Adam's moments. MB."""
        timed, last = self.steps[1:-1], self.steps[-1]
        names = {name for step in timed for name in (*PHASES, "step", "tokens") if name in step}
        means = {
            name: np.mean([step.get(name, 0 * step["step"]) for step in timed], 0).tolist()
            for name in names
        }
        peak = last["peaks"][1]
        memory = peak - self.sampled - 4 * n_parameters
        whole = max(peak, last["peak"]) - self.loaded - 3 * 4 * n_parameters
        return means | dict(memory=memory / 1e6, whole=whole / 1e6)


def flags(files, spec, sampler) -> list[str]:
    named = dict(
        model=files["model"], train_data=files["rows"], reward=files["reward"], rollout=sampler
    )
    named |= dict(
        num_prompts=spec["num_prompts"], num_generations=spec["num_generations"], beta=spec["beta"]
    )
    named |= dict(max_completion_length=spec["completion"], compile="compile" in spec)
    named |= dict(micro_batch_tokens=spec["budget"])
    named |= dict(max_steps=spec["steps"] + 2, learning_rate=1e-6, eval_data="", eval_every=0)
    named |= dict(out_dir=tempfile.mkdtemp())
    return [text for name, value in named.items() for text in (f"--{name}", str(value))]


def run_ours(files, spec, extra) -> dict:
    record, policies = Record(spec["steps"]), []
    forward, log, steps = grpo.Policy.forward, harness.log.Log.step, harness.run.Run.steps

    @contextlib.contextmanager
    def clock(self, phase):
        with record.phase(phase):
            yield
        self.seconds[f"time_{phase}"] = 1.0  # shown, not used

    def counted(self, batch):
        policies.append(self)
        record.count(batch["ids"].numel(), 0)
        return forward(self, batch)

    def logged(self, metrics, rows):
        log(self, metrics, rows)
        record.count(0, metrics["tokens"])  # of all samples: those without a signal get no forward
        record.step_ends()

    def begins(self):
        record.step_ends()
        yield from steps(self)

    grpo.Policy.forward, harness.run.Clock.__call__ = counted, clock
    harness.log.Log.step, harness.run.Run.steps = logged, begins
    harness.run.Run.save = lambda self: None
    grpo.train(grpo.parse_args(flags(files, spec, "auto") + extra))
    return record.result(sum(p.numel() for p in policies[0].parameters()))


def trl_trainer(files, spec, best: bool, record: Record, **given):
    """TRL's trainer on the same work, and the engine that it samples with at its best."""
    import trl.trainer.utils
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    with open(files["rows"]) as rows:
        data = [json.loads(line) for line in rows]
    data = Dataset.from_list(
        [{key: row[key] for key in ("prompt", "answer") if key in row} for row in data]
    )
    path, name = files["reward"].split(":")
    with open(path) as file:
        exec(file.read(), space := {})
    n, world = (
        spec["num_prompts"] * spec["num_generations"],
        harness.ranks.World(0, 1, torch.device("cpu")),
    )
    options = dict(
        per_device_train_batch_size=spec["rows"], gradient_accumulation_steps=n // spec["rows"]
    )
    options |= dict(
        num_generations=spec["num_generations"], max_completion_length=spec["completion"]
    )
    options |= dict(
        max_steps=spec["steps"] + 2,
        learning_rate=1e-6,
        lr_scheduler_type="constant",
        beta=spec["beta"],
    )
    options |= dict(use_cpu=True, gradient_checkpointing=False, report_to="none", disable_tqdm=True)
    half = harness.models.fast_bfloat16(world.device) and not files["model"].endswith(
        "sample_data/model"
    )
    options |= dict(save_strategy="no", bf16=half)  # as grpo.py chooses
    options |= dict(
        output_dir=tempfile.mkdtemp(), logging_steps=1, model_init_kwargs=dict(dtype="float32")
    )
    config = GRPOConfig(**(options | given))
    trainer, engine = GRPOTrainer(files["model"], space[name], config, train_dataset=data), None
    if best:
        trl.trainer.utils._use_triton = lambda device: (
            True
        )  # used there only to choose the positions
        harness.models.keep_freed_memory(world.device)
        cfg = grpo.parse_args(flags(files, spec, "vllm"))
        cfg = harness.models.resolve_auto(cfg, trainer.model, world.device)
        harness.engine.choose_sampler(cfg, world.device, False)
        engine, trainer.use_vllm, seed = (
            grpo.VLLMSampler(trainer.eos_token_ids, spec["prompt"], cfg, world),
            True,
            [0],
        )

        def generate(prompt_ids, images, fields, num_generations, **_):
            with record.phase("sync"):
                engine.push(trainer.model)
            with record.phase("rollout"):
                seed[0] += 1
                seeds = [
                    harness.ranks.seed_of(cfg.seed, 0, seed[0], i)
                    for i in range(len(prompt_ids) // num_generations)
                ]
                prompts = [np.array(ids, dtype=np.int32) for ids in prompt_ids[::num_generations]]
                drawn = [
                    c
                    for group in engine.generate(prompts, num_generations, seeds, 1.0)
                    for c in group
                ]
            return [c.ids.tolist() for c in drawn], [c.logps.tolist() for c in drawn]

        trainer._generate_single_turn = generate
        if cfg.compile:
            harness.models.compile_layers(trainer.model, cfg)
    else:
        trainer._generate_single_turn = record.timed("rollout", trainer._generate_single_turn)
    trainer._calculate_rewards = record.timed("reward", trainer._calculate_rewards)
    score = trainer._get_per_token_logps_and_entropies

    def scored(model, input_ids, attention_mask, *args, **options):
        record.count(input_ids.numel(), int(attention_mask.sum()))
        with contextlib.nullcontext() if torch.is_grad_enabled() else record.phase("logps"):
            return score(model, input_ids, attention_mask, *args, **options)

    trainer._get_per_token_logps_and_entropies = scored
    return trainer, engine


def run_trl(files, spec, best: bool) -> dict:
    from transformers import TrainerCallback

    record = Record(spec["steps"])
    trainer, _ = trl_trainer(files, spec, best, record)
    ends = type(
        "Ends",
        (TrainerCallback,),
        dict(on_train_begin=record.step_ends, on_step_end=record.step_ends),
    )
    trainer.add_callback(ends())
    trainer.train()
    for step in record.steps:  # what remains is forward, backward, optimiser
        step["update"] = step["step"] - sum(step.get(phase, 0) for phase in PHASES)
    return record.result(sum(p.numel() for p in trainer.model.parameters()))


def rows_without_padding(samples, G: int, vocabulary: int) -> tuple[torch.Tensor, int]:
    """ids [N, P + T] of random words, rows of the mean lengths, each with its part of its group's prompt, and P."""
    P = max(1, round(np.mean([len(s.prompt.ids) for s in samples]) / G))
    T = round(np.mean([len(s.completion_ids) for s in samples]))
    return torch.randint(2, vocabulary, (len(samples), P + T)), P


def bare_losses(model, ids, P: int, cfg):
    """Losses of the completions, a micro-batch at a time: a forward with the head at completion positions only."""
    for part in ids.split(max(1, cfg.micro_batch_tokens // ids.shape[1])):
        with grpo.autocast(cfg, ids.device):
            hidden = model.base_model(input_ids=part, use_cache=False).last_hidden_state[
                :, P - 1 : -1
            ]
            yield torch.nn.functional.cross_entropy(
                model.lm_head(hidden).flatten(0, 1), part[:, P:].flatten()
            )


def run_floor(files, spec) -> dict:
    record, cfg = Record(spec["steps"]), grpo.parse_args(flags(files, spec, "vllm"))
    tokenizer, world = (
        harness.rows.load_tokenizer(cfg),
        harness.ranks.World(0, 1, torch.device("cpu")),
    )
    harness.models.keep_freed_memory(world.device)
    prompts = harness.rows.load_prompts("train_data", [], tokenizer, cfg)
    model = grpo.load_model(cfg.model, cfg)
    cfg = harness.models.resolve_auto(cfg, model, world.device)
    harness.engine.choose_sampler(cfg, world.device, False)
    eos, _ = harness.models.special_ids(model, tokenizer, cfg)
    engine = grpo.VLLMSampler(eos, spec["prompt"], cfg, world)
    engine.push(model)
    if cfg.compile:
        harness.models.compile_layers(model, cfg)
    record.step_ends()
    for step in range(1, cfg.max_steps + 1):
        drawn = grpo.prompts_of_step(prompts, step, cfg)
        with record.phase("rollout"):
            samples = grpo.sample(
                engine, drawn, cfg.num_generations, 1.0, 0, step, tokenizer, cfg, world
            )
        ids, P = rows_without_padding(samples, cfg.num_generations, model.config.vocab_size)
        if cfg.beta:
            with record.phase("logps"), torch.no_grad():
                list(bare_losses(model, ids, P, cfg))
        record.count(ids.numel(), sum(s.n_tokens for s in samples))
        with record.phase("update"):
            for loss in bare_losses(model, ids, P, cfg):
                loss.backward()
        model.zero_grad()
        record.step_ends()
    return record.result(sum(p.numel() for p in model.parameters()))


# ----------------------------------------------------------------------------------------------------------------
# All sides in turn


def run_side(python: list, side: str, setting: str, files: dict, extra: list) -> dict:
    """One side in a process of its own, or in as many as a launcher in `python` starts: the first one's result."""
    command = [
        *python,
        os.path.abspath(__file__),
        "--side",
        side,
        "--settings",
        setting,
        "--files",
        json.dumps(files),
    ]
    env = os.environ | (
        {"THP_MEM_ALLOC_ENABLE": "0"} if side == "trl_hf" else {}
    )  # grpo.py sets it, TRL does not
    done = subprocess.run([*command, *extra], capture_output=True, text=True, env=env)
    if "\nRESULT " not in done.stdout:
        sys.exit(f"{setting}, {side}:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return json.loads(done.stdout.split("\nRESULT ")[1].splitlines()[0])


def run_all(args, settings: list, extra: list) -> dict:
    """(setting, round, side): result. All of a round begin before the next."""
    runs, files, folder, lock = {}, {}, tempfile.TemporaryDirectory(), threading.Lock()
    if os.path.exists(args.runs):
        with open(args.runs) as file:
            runs = {tuple(key): result for *key, result in map(json.loads, file)}

    def run(key):
        setting, _, side = key
        with lock:
            if setting not in files:
                os.mkdir(own := os.path.join(folder.name, str(len(files))))
                files[setting] = prepare(setting, args.model, own)
        python = args.trl if side.startswith("trl") else sys.executable
        result = run_side([python], side, setting, files[setting], extra)
        with lock:
            runs[key] = result
            print(line := json.dumps([*key, result]), flush=True)
            if args.runs:
                with open(args.runs, "a") as file:
                    file.write(line + "\n")

    sides = {
        name: [s for s in SIDES if s not in SETTINGS[name].get("without", ())] for name in settings
    }
    keys = [(name, n, s) for n in range(args.rounds) for name in settings for s in sides[name]]
    if (
        args.jobs > 1
    ):  # another order each round, as the neighbour takes its part of the memory's speed
        keys.sort(key=lambda key: (key[1], random.Random(str(key)).random()))
    with ThreadPoolExecutor(args.jobs) as pool:
        list(
            pool.map(
                run,
                [
                    key
                    for key in keys
                    if key not in runs and (args.trl or not key[2].startswith("trl"))
                ],
            )
        )
    return runs


def report(setting, rounds) -> tuple[list, list]:
    """Rows of the table of CPU seconds, which other work disturbs least, and of the table of ratios. Sides draw
    completions of their own, so seconds are compared per real token (prompt and completion, without padding)."""
    table, ratios = [], []
    for side, title in SIDES.items():
        runs = [r[side] for r in rounds if side in r]
        if not runs:
            continue
        names = (*PHASES, "step", "tokens")
        median = {
            name: np.median([run.get(name, [0, 0, 0]) for run in runs], axis=0) for name in names
        }
        waste = np.median([run["tokens"][0] / run["tokens"][1] for run in runs])
        memory = [float(np.median([run[kind] for run in runs])) for kind in ("memory", "whole")]
        cells = [float(median[phase][1]) for phase in (*PHASES, "step")] + [
            int(median["tokens"][1])
        ]
        cells += [
            float(median["step"][0]),
            float(100 * np.median([run["step"][2] / run["step"][1] for run in runs])),
        ]
        per_token = np.median([1000 * run["update"][1] / run["tokens"][1] for run in runs])
        table.append([setting, title, *cells, float(per_token), float(waste), *memory, len(runs)])
    part = {
        "step": lambda run: run["step"][1] / run["tokens"][1],
        "logps and update": lambda run: (
            (run["update"][1] + run.get("logps", [0, 0])[1]) / run["tokens"][1]
        ),
        "memory": lambda run: run["memory"],
    }
    pairs = [("trl", "ours"), ("trl_hf", "ours"), ("ours", "floor")]
    for (over, under), (what, value) in ((pair, item) for pair in pairs for item in part.items()):
        found = sorted(value(r[over]) / value(r[under]) for r in rounds if over in r and under in r)
        if found and not (under == "floor" and what == "memory"):
            spread = [found[0], float(np.median(found)), found[-1]]
            ratios.append([setting, f"{SIDES[over]} / {SIDES[under]}", what, *spread])
    return table, ratios


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trl", default="", help="python of an environment that has TRL")
    parser.add_argument(
        "--model", default="", help="directory of the 135 M model; empty: its settings are left out"
    )
    parser.add_argument("--settings", nargs="+", default=list(SETTINGS), choices=SETTINGS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--jobs", type=int, default=1, help="sides at a time; at most the cores of the machine"
    )
    parser.add_argument(
        "--runs",
        default="",
        help="file that keeps each side's result; what is there is not run again",
    )
    parser.add_argument(
        "--out", default=os.path.join(HERE, "figures"), help="directory of figure and table"
    )
    parser.add_argument("--side", help=argparse.SUPPRESS)  # this process is one side
    parser.add_argument("--files", type=json.loads, help=argparse.SUPPRESS)
    args, extra = parser.parse_known_args()
    if args.side:
        call = (args.files, SETTINGS[args.settings[0]])
        sides = dict(ours=lambda: run_ours(*call, extra), floor=lambda: run_floor(*call))
        sides |= dict(
            trl=lambda: run_trl(*call, best=True), trl_hf=lambda: run_trl(*call, best=False)
        )
        print("\nRESULT " + json.dumps(sides[args.side]()), flush=True)
        os._exit(0)
    os.makedirs(args.out, exist_ok=True)
    started, table, ratios = time.monotonic(), [], []
    settings = [name for name in args.settings if args.model or not name.startswith("135M")]
    runs = run_all(args, settings, extra)
    for setting in settings:
        rounds = [
            {k[2]: run for k, run in runs.items() if k[:2] == (setting, n)}
            for n in range(args.rounds)
        ]
        for rows, new in zip((table, ratios), report(setting, rounds), strict=True):
            rows += new
    publish(table, ratios, argparse.Namespace(out=args.out, started=started, jobs=args.jobs))


def publish(table, ratios, args) -> None:
    """At most eight bars: the whole step of the settings that the README names."""
    from common import plt, save

    from view import COLORS

    header = [
        "setting",
        "side",
        *PHASES,
        "step",
        "real tokens",
        "step, wall",
        "of the system, %",
        "update, ms a token",
    ]
    header += ["computed / real", "peak MB, logps and update", "peak MB, step", "rounds"]
    shown = [row for row in ratios if row[2] == "step" and row[0] in IN_PICTURE and "TRL" in row[1]]
    figure, axis = plt.subplots(figsize=(8.3, 1.2 + 0.38 * len(shown)), layout="constrained")
    for i, (_, pair, _, low, middle, high) in enumerate(shown):
        color = COLORS[pair.startswith("TRL as it comes")]
        axis.barh(
            i, middle, color=color, xerr=[[middle - low], [high - middle]], capsize=3, ecolor="0.25"
        )
        axis.text(high + 0.08, i, f"{middle:.1f}", va="center")
    names = [f"{setting}: {pair.split(' / ')[0]}" for setting, pair, *_ in shown]
    axis.set_yticks(range(len(shown)), names)
    axis.axvline(1, color="black", lw=1)
    axis.set(
        xlabel="CPU seconds a real token of the whole step, TRL's over ours",
        ylim=(len(shown) - 0.5, -0.5),
    )
    axis.set_xlim(0, 0.6 + max((row[5] for row in shown), default=1))
    axis.set_title("bars: median of the rounds;  whiskers: least and most", fontsize=9, loc="left")
    save(
        args,
        "bench",
        figure,
        [header, *table],
        [["setting", "pair", "of", "min", "median", "max"], *ratios],
    )


if __name__ == "__main__":
    main()
