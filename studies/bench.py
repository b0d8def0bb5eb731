"""Seconds, CPU seconds and memory of a step: this trainer, TRL on the same work, and the floor.

    python3.11 -m venv .trl-venv
    .trl-venv/bin/pip install --no-deps --retries 1 -r requirements-cpu.txt
    .trl-venv/bin/pip install trl==1.16.0 "datasets<4.9"
    python studies/bench.py --trl .trl-venv/bin/python --model FOLDER/model    # of real_model.py
    python studies/bench.py --settings bundled "30M"                           # without TRL

A round takes an hour, or half an hour with --jobs 2. With --runs FILE the results are kept in a
file, and a side that has its result is not run again, so the benchmark can be stopped.

All sides have the same model, prompts, G, lengths, learning rate and beta, and the dtype that
grpo.py would choose. They take turns, each in a process of its own with one thread (--jobs 2: two
at a time, in another order each round). A ratio compares two sides in the same round. The sides:

- ours samples as `--rollout auto` does: with Hugging Face for the bundled model, which TRL at its
  best and the floor sample with vLLM, too; else with vLLM.
- "TRL as it comes" samples with HF generate and, on a CPU, computes the head at every position.
- "TRL at its best" samples with the same vLLM engine as ours. It computes the head at completion
  positions only, as it does on CUDA; one function is patched for that.
- the floor is a bare implementation of the same work: sampling, and a forward pass (reference) and
  forward and backward pass (update) over as many tokens as were real, each group's prompt once.
  Completions attend to their whole prompt, and no pair of query and key is computed in vain.

Freed memory stays in the process on all sides but TRL as it comes. If a setting compiles layers,
the same sides do so.
"""

import argparse
import contextlib
import ctypes
import functools
import itertools
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

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported
HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.dirname(HERE))

import grpo  # isort: skip  first, because it sets environment variables before torch
import numpy as np
import torch

import harness.auto
import harness.engine
import harness.fast
import harness.log
import harness.models
import harness.ranks
import harness.rows
import harness.run

# prompt, completion: tokens, at most.  rows: of a TRL micro-batch.  budget: tokens of one of our
# micro-batches, at most as many as TRL's rows have with their padding.  without: sides that are
# left out, because another setting shows the same, or because they take longest.  stop: the
# probability that a word ends the completion; None: the model has its own tokenizer and task.
REAL = dict(
    num_prompts=8, num_generations=8, prompt=48, completion=32, beta=0.0, stop=None, steps=1,
    rows=32, budget=1024, compile=True,
)  # fmt: skip
TINY = dict(
    num_prompts=32, num_generations=8, prompt=8, completion=40, beta=0.001, stop=None, steps=8,
    rows=32, budget=768,
)  # fmt: skip
RANDOM = dict(
    num_prompts=8, num_generations=8, prompt=12, completion=128, beta=0.04, stop=1 / 40, steps=1,
    rows=8, budget=560,
    shape=dict(
        vocab_size=32_000, hidden_size=384, intermediate_size=1024, num_hidden_layers=10,
        num_attention_heads=6, num_key_value_heads=2,
    ),
)  # fmt: skip
WORDS = dict(
    num_prompts=8, num_generations=8, prompt=75, completion=24, beta=0.0, stop=0, steps=1,
    rows=8, budget=4 * 99, without=("trl_hf",),
    shape=dict(  # of Gemma 3 270M
        vocab_size=262_144, hidden_size=640, intermediate_size=2048, num_hidden_layers=18,
        num_attention_heads=4, num_key_value_heads=1, head_dim=256,
    ),
)  # fmt: skip
EQUAL = dict(completion=40, stop=0, budget=8 * 52, without=("trl_hf",))
LONG = dict(
    num_prompts=1, num_generations=16, prompt=512, completion=64, stop=0, budget=8 * 576,
    without=("trl_hf",),
)  # fmt: skip
# Answers have 300 tokens on average.
ANSWERS = dict(
    num_prompts=2, prompt=60, completion=768, stop=1 / 340, budget=4096, without=("trl_hf",),
)  # fmt: skip
BOTH_LONG = dict(
    num_prompts=2, prompt=512, completion=512, stop=1 / 400, budget=4096, without=("trl_hf",),
)  # fmt: skip
SETTINGS = {
    # its floor is that of the next setting
    "135M, its own reward": REAL | dict(reward="answer", without=("floor",)),
    "135M, reward by position": REAL | dict(without=("trl_hf",)),
    "bundled": TINY,
    "bundled, 6 tokens": TINY | dict(num_prompts=16, completion=6, rows=64, steps=20),
    "30M": RANDOM,
    "30M, equal lengths": RANDOM | EQUAL,
    "30M, long prompt": RANDOM | LONG,
    "30M, long answers": RANDOM | ANSWERS,
    "30M, long prompt and answers": RANDOM | BOTH_LONG,
    "270M, 262k words": WORDS,
}
IN_PICTURE = (
    "135M, its own reward",
    "bundled",
    "30M",
    "30M, equal lengths",
    "30M, long answers",
    "30M, long prompt and answers",
    "270M, 262k words",
)
SIDES = dict(ours="ours", trl="TRL at its best", trl_hf="TRL as it comes", floor="floor")
# logps: of the reference, and of TRL's old policy
PHASES = ("rollout", "reward", "logps", "update", "sync")
REWARDS = """import re

def position(completions, **_):
    return [i % 13 / 13 for i in range(len(completions))]

def answer(completions, answer, **_):
    texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]
    found = [re.findall(r"-?\\d+", text) for text in texts]
    return [float(bool(numbers) and numbers[-1] == a) for numbers, a in zip(found, answer)]
"""


def prepare(setting: str, model: str, folder: str) -> dict:
    """Paths of the model, the rows and the reward. The model is the real one, the bundled one, or
    one with random weights."""
    spec = SETTINGS[setting]
    rewards, rows = os.path.join(folder, "reward.py"), os.path.join(folder, "rows.jsonl")
    with open(rewards, "w") as file:
        file.write(REWARDS)
    reward = f"{rewards}:{spec.get('reward', 'position')}"
    if setting.startswith("bundled"):
        data = os.path.join(HERE, "..", "sample_data")
        model, rows = os.path.join(data, "model"), os.path.join(data, "train.jsonl")
    elif setting.startswith("135M"):
        write_differences(rows)
    else:
        make_random_model(spec, folder)
        write_random_prompts(spec, rows)
        model = folder
    return dict(model=model, rows=rows, reward=reward, dtype=dtype_of(setting))


def dtype_of(setting: str) -> str:
    """As `--dtype auto` chooses on a CPU."""
    if setting.startswith("bundled") or not harness.auto.fast_bfloat16(torch.device("cpu")):
        return "float32"
    return "bfloat16"


def write_differences(path: str) -> None:
    pairs = [(a, b) for a in range(10) for b in range(10)]
    task = "State the final answer to the following arithmetic problem:"
    with open(path, "w") as file:
        for a, b in np.random.default_rng(0).permutation(pairs).tolist():
            message = dict(role="user", content=f"{task} {a} - {b} =")
            file.write(json.dumps(dict(prompt=[message], answer=str(a - b))) + "\n")


def make_random_model(spec: dict, folder: str) -> None:
    """A model to which all words are nearly equally probable. A share `stop` of the words ends a
    completion, so lengths are geometric with mean 1 / stop."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import (
        AutoModelForCausalLM,
        AutoTokenizer,
        LlamaConfig,
        PreTrainedTokenizerFast,
    )

    n_words = spec["shape"]["vocab_size"]
    special = dict(pad_token="<pad>", unk_token="<unk>", eos_token="<eos>")  # ids 0, 1, 2
    names = [*special.values(), *(f"w{i}" for i in range(3, n_words))]
    ids = {name: i for i, name in enumerate(names)}
    words = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, **special).save_pretrained(folder)

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(LlamaConfig(tie_word_embeddings=True, **spec["shape"]))
    model.generation_config.eos_token_id = list(range(2, 3 + int(spec["stop"] * n_words)))
    model.generation_config.pad_token_id = 0
    model.save_pretrained(folder)
    # for some model types transformers loads another tokenizer than the saved one
    loaded = AutoTokenizer.from_pretrained(folder)
    assert loaded(f"w{n_words - 1} w3").input_ids == [n_words - 1, 3], "a word must be a token"


def write_random_prompts(spec: dict, path: str) -> None:
    """The words of prompts end no completion: they are from the vocabulary's second half."""
    n_words = spec["shape"]["vocab_size"]
    with open(path, "w") as file:
        size = (64, spec["prompt"])
        for ids in np.random.default_rng(0).integers(n_words // 2, n_words, size):
            file.write(json.dumps(dict(prompt=" ".join(f"w{i}" for i in ids))) + "\n")


# --------------------------------------------------------------------------------------------------
# One side, in a process of its own


def clocks() -> np.ndarray:
    """Seconds: wall, CPU, and the system's part of the CPU seconds."""
    system = resource.getrusage(resource.RUSAGE_SELF).ru_stime
    return np.array([time.perf_counter(), time.process_time(), system])


def resident() -> tuple[int, int]:
    """Bytes of this process in memory, now and at the peak (Linux)."""
    with open("/proc/self/status") as status:
        values = dict(line.split(":", 1) for line in status)
    return tuple(1024 * int(values[name].split()[0]) for name in ("VmRSS", "VmHWM"))


def forget_peak() -> None:
    """Returns freed memory to the system and starts a new peak. Takes time: not for timed steps."""
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")


class Record:
    """Wall and CPU seconds of each step by phase, and its tokens. The first step warms up, and the
    last one also measures memory, which takes time: neither counts for the seconds."""

    def __init__(self, n_timed: int):
        self.n_timed = n_timed
        self.steps = []
        self.now = {}  # the current step
        self.current_phase = None
        self.began = False
        self.sampled = 0  # bytes in memory after the last step's sampling

    @contextlib.contextmanager
    def phase(self, name):
        if self.current_phase:  # a phase within a phase is part of the outer one
            yield
            return
        self.current_phase = name
        started = clocks()
        try:
            yield
        finally:
            self.current_phase = None
            self.now[name] = self.now.get(name, 0) + clocks() - started
            if name == "rollout" and len(self.steps) == 1 + self.n_timed:
                forget_peak()
                self.sampled = resident()[0]

    def timed(self, name, function):
        def call(*args, **options):
            with self.phase(name):
                return function(*args, **options)

        return call

    def count(self, computed: int, real: int):
        """Adds the tokens of a forward pass with gradient, padding and prompts included (computed),
        and those of samples with their prompts (real)."""
        if torch.is_grad_enabled():
            self.now["tokens"] = self.now.get("tokens", 0) + np.array([computed, real])

    def step_ends(self, *_, **__):
        if self.began:
            self.now.update(step=clocks() - self.started, resident=resident())
            self.steps.append(self.now)
        self.began = True
        if len(self.steps) == 1 + self.n_timed:
            forget_peak()
        self.now = {}
        self.started = clocks()

    def result(self, n_parameters: int) -> dict:
        """Means over the timed steps, and the peak of memory of scoring and update in MB, above the
        memory after sampling, without the gradients."""
        timed, last = self.steps[1:-1], self.steps[-1]
        for step in timed:
            assert step["rollout"][1] > 0.01 * step["step"][1], "sampling is outside its phase"
        result = {}
        for name in (*PHASES, "step", "tokens"):
            if any(name in step for step in timed):
                values = [step.get(name, 0 * step["step"]) for step in timed]
                result[name] = np.mean(values, 0).tolist()
        _, peak = last["resident"]
        result["memory"] = (peak - self.sampled - 4 * n_parameters) / 1e6
        return result


def flags(files, spec, sampler) -> list[str]:
    values = dict(
        model=files["model"],
        train_data=files["rows"],
        reward=files["reward"],
        rollout=sampler,
        num_prompts=spec["num_prompts"],
        num_generations=spec["num_generations"],
        beta=spec["beta"],
        dtype=files["dtype"],
        max_completion_length=spec["completion"],
        compile="compile" in spec,
        micro_batch_tokens=spec["budget"],
        max_steps=spec["steps"] + 2,
        learning_rate=1e-6,
        eval_data="",
        eval_every=0,
        out_dir=tempfile.mkdtemp(),
    )
    return flag_list(values)


def flag_list(values: dict) -> list[str]:
    """{name: value} as arguments of a command line."""
    texts = []
    for name, value in values.items():
        texts += [f"--{name}", str(value)]
    return texts


def count_parameters(model) -> int:
    return sum(p.numel() for p in model.parameters())


def run_ours(files, spec, extra) -> dict:
    """grpo.train with a clock around its phases; it saves nothing."""
    record = Record(spec["steps"])
    policies = []
    forward = harness.fast.FastPolicy.forward
    log, steps = harness.log.Log.step, harness.run.Run.steps

    @contextlib.contextmanager
    def timed_phase(self, phase):
        with record.phase(phase):
            yield
        self.seconds[f"time_{phase}"] = 1.0  # printed only

    def counted_forward(self, batch):
        policies.append(self)
        record.count(batch["ids"].numel(), 0)
        return forward(self, batch)

    def logged_step(self, metrics, rows):
        log(self, metrics, rows)
        record.count(0, metrics["tokens"])  # of all samples: some get no forward pass
        record.step_ends()

    def first_step_begins(self):
        record.step_ends()
        yield from steps(self)

    harness.fast.FastPolicy.forward = counted_forward
    harness.run.Clock.__call__ = timed_phase
    harness.log.Log.step = logged_step
    harness.run.Run.steps = first_step_begins
    harness.run.Run.save = lambda self: None
    grpo.train(grpo.parse_args(flags(files, spec, "auto") + extra))
    return record.result(count_parameters(policies[0]))


def trl_trainer(files, spec, best: bool, record: Record, **changes):
    """TRL's trainer on the same work, and its vLLM engine if it is TRL at its best. `changes` are
    options of GRPOConfig."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    rows = []
    with open(files["rows"]) as file:
        for line in file:
            row = json.loads(line)
            rows.append({key: row[key] for key in ("prompt", "answer") if key in row})
    path, name = files["reward"].split(":")
    functions = {}
    with open(path) as file:
        exec(file.read(), functions)
    n = spec["num_prompts"] * spec["num_generations"]
    options = dict(
        per_device_train_batch_size=spec["rows"],
        gradient_accumulation_steps=n // spec["rows"],
        num_generations=spec["num_generations"],
        max_completion_length=spec["completion"],
        max_steps=spec["steps"] + 2,
        learning_rate=1e-6,
        lr_scheduler_type="constant",
        beta=spec["beta"],
        use_cpu=True,
        gradient_checkpointing=False,
        report_to="none",
        disable_tqdm=True,
        save_strategy="no",
        bf16=files["dtype"] == "bfloat16",
        output_dir=tempfile.mkdtemp(),
        logging_steps=1,
        model_init_kwargs=dict(dtype="float32"),
    )
    config = GRPOConfig(**(options | changes))
    data = Dataset.from_list(rows)
    trainer = GRPOTrainer(files["model"], functions[name], config, train_dataset=data)
    if best:
        engine = use_engine(trainer, files, spec, record)
    else:
        engine = None
        trainer._generate_single_turn = record.timed("rollout", trainer._generate_single_turn)
    trainer._calculate_rewards = record.timed("reward", trainer._calculate_rewards)
    score = trainer._get_per_token_logps_and_entropies

    def counted_score(model, input_ids, attention_mask, *args, **options):
        record.count(input_ids.numel(), int(attention_mask.sum()))
        if torch.is_grad_enabled():
            return score(model, input_ids, attention_mask, *args, **options)
        with record.phase("logps"):
            return score(model, input_ids, attention_mask, *args, **options)

    trainer._get_per_token_logps_and_entropies = counted_score
    return trainer, engine


def use_engine(trainer, files, spec, record: Record):
    """TRL at its best: gives the trainer our vLLM engine, which is returned."""
    import trl.trainer.utils

    # TRL asks this only when it chooses at which positions to compute the head
    trl.trainer.utils._use_triton = lambda device: True
    world = harness.ranks.World(0, 1, torch.device("cpu"))
    harness.models.keep_freed_memory(world.device)
    cfg = grpo.parse_args(flags(files, spec, "vllm"))
    cfg = harness.auto.resolve_auto(cfg, trainer.model, world.device)
    harness.engine.choose_sampler(cfg, world.device, False)
    longest = spec["prompt"] + spec["completion"]
    engine = grpo.VLLMSampler(trainer.eos_token_ids, longest, cfg, world)
    calls = itertools.count(1)

    def generate(prompt_ids, images, fields, num_generations, **_):
        with record.phase("sync"):
            engine.push(trainer.model)
        with record.phase("rollout"):
            prompts = [np.array(ids, dtype=np.int32) for ids in prompt_ids[::num_generations]]
            call = next(calls)
            seed = trainer.args.seed
            seeds = [harness.ranks.seed_of(seed, 0, call, i) for i in range(len(prompts))]
            limits = [cfg.max_completion_length] * len(prompts)
            groups = engine.generate(prompts, num_generations, seeds, 1.0, limits)
        completions = [c for group in groups for c in group]
        return [c.ids.tolist() for c in completions], [c.logps.tolist() for c in completions]

    trainer.use_vllm = True
    trainer._generate_single_turn = generate
    if cfg.compile:
        harness.models.compile_layers(trainer.model, cfg)
    return engine


def run_trl(files, spec, best: bool) -> dict:
    from transformers import TrainerCallback

    record = Record(spec["steps"])
    trainer, _ = trl_trainer(files, spec, best, record)

    class Steps(TrainerCallback):
        def on_train_begin(self, *_, **__):
            record.step_ends()

        def on_step_end(self, *_, **__):
            record.step_ends()

    trainer.add_callback(Steps())
    trainer.train()
    for step in record.steps:  # the rest of a step is forward, backward, optimiser
        step["update"] = step["step"] - sum(step.get(phase, 0) for phase in PHASES)
    return record.result(count_parameters(trainer.model))


def rows_without_padding(samples, G: int, vocabulary: int) -> tuple[torch.Tensor, int]:
    """Random ids [N, P + T], and P. T is the mean length of the completions; P is a G-th of the
    prompts' mean length, so that a group has as many prompt tokens as one prompt."""
    P = max(1, round(np.mean([len(s.prompt.ids) for s in samples]) / G))
    T = round(np.mean([len(s.completion_ids) for s in samples]))
    return torch.randint(2, vocabulary, (len(samples), P + T)), P


def least_attention(P: int, G: int, module, query, key, value, mask, scaling=None, **_):
    """Attention of rows [N, heads, P + T, D] in which the first P tokens of G rows are one prompt.

    Prompts attend to themselves and completions to themselves, causally, and completions to all of
    their prompt. The two outputs of a completion are added, which is less than a softmax over both.
    """
    attend = functools.partial(
        torch.nn.functional.scaled_dot_product_attention, scale=scaling, enable_gqa=True
    )
    rows = []
    for group in zip(query.split(G), key.split(G), value.split(G), strict=True):
        prompt = [x[:, :, :P].transpose(0, 1).flatten(1, 2)[None] for x in group]
        q, k, v = (x[:, :, P:] for x in group)  # [G, heads, T, D]
        of_prompt = attend(*prompt, is_causal=True)  # [1, heads, G * P, D]
        to_prompt = attend(q.transpose(0, 1).flatten(1, 2)[None], *prompt[1:])
        own = attend(q, k, v, is_causal=True)
        own = own + to_prompt[0].unflatten(1, (len(q), -1)).transpose(0, 1)
        first = of_prompt[0].unflatten(1, (len(q), -1)).transpose(0, 1)
        rows.append(torch.cat([first, own], 2))
    return torch.cat(rows).transpose(1, 2), None


@contextlib.contextmanager
def attention_of_floor(model, P: int, G: int):
    """Inside, the model attends by least_attention."""
    import transformers
    from transformers.masking_utils import AttentionMaskInterface

    transformers.AttentionInterface.register("floor", functools.partial(least_attention, P, G))
    AttentionMaskInterface.register("floor", lambda *_, **__: None)
    loaded = model.config._attn_implementation
    model.config._attn_implementation = "floor"
    try:
        yield
    finally:
        model.config._attn_implementation = loaded


def bare_losses(model, ids, P: int, cfg):
    """Yields the completions' loss for each micro-batch: a forward pass with the head at completion
    positions only."""
    for part in ids.split(max(1, cfg.micro_batch_tokens // ids.shape[1])):
        attention = attention_of_floor(model, P, cfg.num_generations)
        with grpo.autocast(cfg, ids.device), attention:
            output = model.base_model(input_ids=part, use_cache=False)
            logits = model.lm_head(output.last_hidden_state[:, P - 1 : -1])  # [n, T, V]
            targets = part[:, P:]
            yield torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def run_floor(files, spec) -> dict:
    record = Record(spec["steps"])
    cfg = grpo.parse_args(flags(files, spec, "vllm"))
    tokenizer = harness.rows.load_tokenizer(cfg)
    world = harness.ranks.World(0, 1, torch.device("cpu"))
    harness.models.keep_freed_memory(world.device)
    prompts = harness.rows.load_prompts("train_data", [], tokenizer, cfg)
    model = grpo.load_model(cfg.model, cfg)
    cfg = harness.auto.resolve_auto(cfg, model, world.device)
    harness.engine.choose_sampler(cfg, world.device, False)
    eos, _ = harness.models.special_ids(model, tokenizer, cfg)
    engine = grpo.VLLMSampler(eos, spec["prompt"] + spec["completion"], cfg, world)
    engine.push(model)
    if cfg.compile:
        harness.models.compile_layers(model, cfg)
    record.step_ends()
    for step in range(1, cfg.max_steps + 1):
        step_prompts = grpo.prompts_of_step(prompts, step, cfg)
        seeds = [harness.ranks.seed_of(cfg.seed, 0, step, i) for i in range(len(step_prompts))]
        with record.phase("rollout"):
            samples = grpo.sample(engine, step_prompts, seeds, cfg, world)
        ids, P = rows_without_padding(samples, cfg.num_generations, model.config.vocab_size)
        if cfg.beta:
            with record.phase("logps"), torch.no_grad():
                for _ in bare_losses(model, ids, P, cfg):
                    pass
        record.count(ids.numel(), sum(s.n_tokens for s in samples))
        with record.phase("update"):
            for loss in bare_losses(model, ids, P, cfg):
                loss.backward()
        model.zero_grad()
        record.step_ends()
    return record.result(count_parameters(model))


# --------------------------------------------------------------------------------------------------
# All sides in turn


def run_side(python: list, side: str, setting: str, files: dict, extra: list) -> dict:
    """The result of one side, in a process of its own. `python` may be a launcher of several ranks:
    then the result is that of the first one."""
    command = [*python, os.path.abspath(__file__), "--side", side, "--settings", setting]
    command += ["--files", json.dumps(files)]
    env = dict(os.environ)
    if side == "trl_hf":
        env["THP_MEM_ALLOC_ENABLE"] = "0"  # grpo.py switches it on, TRL does not
    done = subprocess.run([*command, *extra], capture_output=True, text=True, env=env)
    if "\nRESULT " not in done.stdout:
        sys.exit(f"{setting}, {side}:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return json.loads(done.stdout.split("\nRESULT ")[1].splitlines()[0])


def read_runs(path: str) -> dict:
    """{(setting, round, side): result}"""
    runs = {}
    if os.path.exists(path):
        with open(path) as file:
            for line in file:
                *key, result = json.loads(line)
                runs[tuple(key)] = result
    return runs


def run_all(args, settings: list, extra: list) -> dict:
    """{(setting, round, side): result}. All sides of a round begin before the next round."""
    runs = read_runs(args.runs)
    files = {}
    folder = tempfile.TemporaryDirectory()
    lock = threading.Lock()

    def run(key):
        setting, _, side = key
        with lock:
            if setting not in files:
                setting_folder = os.path.join(folder.name, str(len(files)))
                os.mkdir(setting_folder)
                files[setting] = prepare(setting, args.model, setting_folder)
        python = args.trl if side.startswith("trl") else sys.executable
        result = run_side([python], side, setting, files[setting], extra)
        with lock:
            runs[key] = result
            line = json.dumps([*key, result])
            print(line, flush=True)
            if args.runs:
                with open(args.runs, "a") as file:
                    file.write(line + "\n")

    keys = []
    for number in range(args.rounds):
        for setting in settings:
            for side in SIDES:
                left_out = side in SETTINGS[setting].get("without", ())
                no_trl = side.startswith("trl") and not args.trl
                if not left_out and not no_trl:
                    keys.append((setting, number, side))
    if args.jobs > 1:
        # two sides share the machine's memory bandwidth: in each round with another neighbour
        keys.sort(key=lambda key: (key[1], random.Random(str(key)).random()))
    with ThreadPoolExecutor(args.jobs) as pool:
        for _ in pool.map(run, [key for key in keys if key not in runs]):
            pass
    return runs


def side_rows(setting: str, rounds: list) -> list:
    """Rows of the table of CPU seconds, which other work on the machine disturbs least."""
    table = []
    for side, title in SIDES.items():
        runs = [results[side] for results in rounds if side in results]
        if not runs:
            continue
        median = {}
        for name in (*PHASES, "step", "tokens"):
            median[name] = np.median([run.get(name, [0, 0, 0]) for run in runs], axis=0)
        wall, cpu, _ = median["step"]
        phases = [float(median[phase][1]) for phase in PHASES]
        system = np.median([run["step"][2] / run["step"][1] for run in runs])
        per_token = np.median([1000 * run["update"][1] / run["tokens"][1] for run in runs])
        waste = np.median([run["tokens"][0] / run["tokens"][1] for run in runs])
        memory = float(np.median([run["memory"] for run in runs]))
        row = [setting, runs[0]["dtype"], title, *phases]
        row += [float(cpu), int(median["tokens"][1]), float(wall)]
        row += [float(100 * system), float(per_token), float(waste), memory, len(runs)]
        table.append(row)
    return table


def step_cost(run: dict) -> float:
    """CPU seconds per real token: sides draw their own completions, of other lengths."""
    return run["step"][1] / run["tokens"][1]


def update_cost(run: dict) -> float:
    """CPU seconds of scoring and update per real token, with all that has no phase of its own, as
    TRL's update has none."""
    other = sum(run.get(phase, [0, 0])[1] for phase in ("rollout", "reward", "sync"))
    return (run["step"][1] - other) / run["tokens"][1]


def peak_memory(run: dict) -> float:
    return run["memory"]


def ratio_rows(setting: str, rounds: list) -> list:
    """Rows of the table of ratios: the least, the median and the most of the rounds."""
    table = []
    kinds = {"step": step_cost, "logps and update": update_cost, "memory": peak_memory}
    for over, under in (("trl", "ours"), ("trl_hf", "ours"), ("ours", "floor")):
        for kind, value in kinds.items():
            if under == "floor" and kind == "memory":
                continue
            ratios = []
            for results in rounds:
                if over in results and under in results:
                    ratios.append(value(results[over]) / value(results[under]))
            if ratios:
                spread = [min(ratios), float(np.median(ratios)), max(ratios)]
                table.append([setting, f"{SIDES[over]} / {SIDES[under]}", kind, *spread])
    return table


def publish(table, ratios, args) -> None:
    """The tables, and a picture of whole steps."""
    from common import plt, save

    from harness.curves import COLORS

    names = ["setting", "dtype", "side", *PHASES, "step", "real tokens", "step, wall"]
    names += ["of the system, %", "update, ms a token", "computed / real"]
    names += ["peak MB, logps and update", "rounds"]
    ratio_names = "setting | pair | of | min | median | max"
    shown = []
    for row in ratios:
        setting, pair, kind, *_ = row
        if kind == "step" and setting in IN_PICTURE and "TRL" in pair:
            shown.append(row)
    figure, axis = plt.subplots(figsize=(8.3, 1.2 + 0.38 * len(shown)), layout="constrained")
    for i, (_, pair, _, low, middle, high) in enumerate(shown):
        color = COLORS[1] if pair.startswith("TRL as it comes") else COLORS[0]
        error = [[middle - low], [high - middle]]
        axis.barh(i, middle, color=color, xerr=error, capsize=3, ecolor="0.25")
        axis.text(high + 0.08, i, f"{middle:.1f}", va="center")
    labels = [f"{setting}: {pair.split(' / ')[0]}" for setting, pair, *_ in shown]
    axis.set_yticks(range(len(shown)), labels)
    axis.axvline(1, color="black", lw=1)
    axis.set_xlabel("CPU seconds a real token of the whole step, TRL's over ours")
    widest = max((row[5] for row in shown), default=1)
    axis.set(ylim=(len(shown) - 0.5, -0.5), xlim=(0, 0.6 + widest))
    axis.set_title("bars: median of the rounds;  whiskers: least and most", fontsize=9, loc="left")
    save(args, "bench", figure, [" | ".join(names), *table], [ratio_names, *ratios])


def run_this_side(args, extra: list) -> dict:
    """The work of a process with --side."""
    spec = SETTINGS[args.settings[0]]
    if args.side == "ours":
        return run_ours(args.files, spec, extra)
    if args.side == "floor":
        return run_floor(args.files, spec)
    return run_trl(args.files, spec, best=args.side == "trl")


def parse_arguments() -> tuple:
    """Arguments, and flags of grpo.py."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--trl", default="", help="python of an environment that has TRL")
    add("--model", default="", help="directory of the 135 M model; without it: no 135M settings")
    add("--settings", nargs="+", default=list(SETTINGS), choices=SETTINGS)
    add("--rounds", type=int, default=3)
    add("--jobs", type=int, default=1, help="sides at a time; at most the cores of the machine")
    add("--runs", default="", help="file for the results; a side that is in it is not run again")
    add("--out", default=os.path.join(HERE, "figures"), help="directory of figure and table")
    add("--side", help=argparse.SUPPRESS)  # this process is one side
    add("--files", type=json.loads, help=argparse.SUPPRESS)
    return parser.parse_known_args()


def main() -> None:
    args, extra = parse_arguments()
    if args.side:
        result = run_this_side(args, extra)
        result["dtype"] = args.files["dtype"]
        print("\nRESULT " + json.dumps(result), flush=True)
        os._exit(0)
    os.makedirs(args.out, exist_ok=True)
    args.started = time.monotonic()
    settings = [name for name in args.settings if args.model or not name.startswith("135M")]
    runs = run_all(args, settings, extra)
    table, ratios = [], []
    for setting in settings:
        rounds = []  # of each: {side: result}
        for number in range(args.rounds):
            results = {key[2]: run for key, run in runs.items() if key[:2] == (setting, number)}
            rounds.append(results)
        table += side_rows(setting, rounds)
        ratios += ratio_rows(setting, rounds)
    publish(table, ratios, args)


if __name__ == "__main__":
    main()
