"""CPU seconds and memory of a step: this trainer, and TRL on the same work.

    python3.11 -m venv .trl-venv
    .trl-venv/bin/pip install --no-deps --retries 1 -r requirements-test.txt
    .trl-venv/bin/pip install trl==1.16.0 "datasets<4.9"
    python studies/bench.py --trl .trl-venv/bin/python --rounds 3
    python studies/bench.py --settings bundled            # without TRL

Both sides have the same model, prompts, G, lengths, learning rate, beta and dtype, and take turns,
each in a process with one thread. Both sample with the same vLLM engine (but ours samples the
bundled model with Hugging Face, as --rollout auto does). TRL computes the head at completion
positions only, as it does on CUDA. Each side prints a JSON line: CPU seconds of a step and of its
rollout, tokens (of all prompts and completions), and memory (the peak of scoring and update in MB,
above the memory in use after sampling, without the gradients). At the end, the script prints the
smallest, median and largest ratio of TRL's cost to ours.
"""

import argparse
import ctypes
import functools
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported
HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.dirname(HERE))

import grpo  # isort: skip  first, because it sets environment variables before torch
import numpy as np
import torch

from extras import runs as runs_of_extras
from reward import load_function

# prompt, completion: tokens, at most.  stop: the probability that a token ends the completion.
# rows: of a TRL micro-batch.  budget: tokens of one of our micro-batches, at most as many as TRL's
# rows have with their padding.  steps: timed; one more warms up, and one measures memory.
SHAPE = dict(vocab_size=32_000, hidden_size=384, intermediate_size=1024, num_hidden_layers=10)
SHAPE |= dict(num_attention_heads=6, num_key_value_heads=2)
RANDOM = dict(num_prompts=8, num_generations=8, prompt=12, completion=128, beta=0.04, stop=1 / 40)
RANDOM |= dict(rows=8, budget=560, steps=1, shape=SHAPE)
ONE = RANDOM | dict(num_prompts=1, num_generations=16)
TWO = RANDOM | dict(num_prompts=2, budget=4096)
TINY = dict(num_prompts=32, num_generations=8, prompt=8, completion=40, beta=0.001, rows=32)
SETTINGS = {
    "bundled": TINY | dict(budget=768, steps=8),
    "30M": RANDOM,
    "30M, equal lengths": RANDOM | dict(completion=40, stop=0, budget=8 * 52),
    "30M, long prompt": ONE | dict(prompt=512, completion=64, stop=0, budget=8 * 576),
    "30M, long answers": TWO | dict(prompt=60, completion=768, stop=1 / 340),
    "30M, long prompt and answers": TWO | dict(prompt=512, completion=512, stop=1 / 400),
}
KINDS = ("step", "logps and update", "memory")


def position(completions, **_) -> list[float]:
    """The reward, which differs among the samples of a step."""
    return [i % 13 / 13 for i in range(len(completions))]


def prepare(spec: dict, folder: str) -> dict:
    """Paths of the model, rows and reward; the dtype that --dtype auto selects on a CPU."""
    files = dict(reward=f"{os.path.abspath(__file__)}:position", dtype="float32")
    if "shape" not in spec:
        return files | {name: grpo.BUNDLED[name] for name in ("model", "train_data")}
    make_random_model(spec, folder)
    write_random_prompts(spec, f"{folder}/rows.jsonl")
    if torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported():
        files["dtype"] = "bfloat16"
    return files | dict(model=folder, train_data=f"{folder}/rows.jsonl")


def make_random_model(spec: dict, folder: str) -> None:
    """A model to which all tokens are nearly equally probable. A share `stop` of them ends a
    completion, so lengths are geometric with mean 1 / stop."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

    V = spec["shape"]["vocab_size"]
    special = dict(pad_token="<pad>", unk_token="<unk>", eos_token="<eos>")  # ids 0, 1, 2
    names = [*special.values(), *(f"w{i}" for i in range(3, V))]
    ids = {name: i for i, name in enumerate(names)}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(LlamaConfig(tie_word_embeddings=True, **spec["shape"]))
    model.generation_config.eos_token_id = list(range(2, 3 + int(spec["stop"] * V)))
    model.generation_config.pad_token_id = 0
    model.save_pretrained(folder)


def write_random_prompts(spec: dict, path: str) -> None:
    """The prompts' tokens, from the vocabulary's second half, never end a completion."""
    V = spec["shape"]["vocab_size"]
    rng = np.random.default_rng(0)
    with open(path, "w") as file:
        for ids in rng.integers(V // 2, V, (64, spec["prompt"])):
            file.write(json.dumps(dict(prompt=" ".join(f"w{i}" for i in ids))) + "\n")


def memory_now() -> tuple[int, int]:
    """Memory of this process in bytes, now and at the peak (Linux)."""
    with open("/proc/self/status") as status:
        values = dict(line.split(":", 1) for line in status)
    return tuple(1024 * int(values[name].split()[0]) for name in ("VmRSS", "VmHWM"))


def forget_peak() -> None:
    """Returns freed memory to the system and resets the peak. This is too slow for timed steps."""
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")


class Record:
    """CPU seconds of each step and of its rollout. The first step warms up, and the last one
    measures memory, which takes time: the seconds of both are left out."""

    def __init__(self, n_timed: int):
        self.n_timed = n_timed
        self.steps = []

    def step_begins(self, *_, **__):
        self.rollout = 0.0
        self.started = time.process_time()

    def sample(self, function, *args, **options):
        started = time.process_time()
        result = function(*args, **options)
        self.rollout += time.process_time() - started
        if len(self.steps) == 1 + self.n_timed:
            forget_peak()
            self.after_sampling = memory_now()[0]
        return result

    def step_ends(self, tokens: int):
        self.steps.append((time.process_time() - self.started, self.rollout, tokens))
        self.peak = memory_now()[1]
        self.step_begins()

    def result(self, model) -> dict:
        means = np.mean(self.steps[1:-1], 0).tolist()
        memory = self.peak - self.after_sampling - 4 * model.num_parameters()
        return dict(zip(("step", "rollout", "tokens"), means, strict=True), memory=memory / 1e6)


def config(files: dict, spec: dict, sampler: str) -> grpo.Config:
    options = {name: spec[name] for name in ("num_prompts", "num_generations", "beta")}
    options |= dict(max_completion_length=spec["completion"], micro_batch_tokens=spec["budget"])
    options |= dict(max_steps=spec["steps"] + 2, out_dir=tempfile.mkdtemp(), rollout=sampler)
    return grpo.Config(**files, **options)


def run_ours(files: dict, spec: dict) -> dict:
    """grpo.train with a clock; it saves nothing."""
    record = Record(spec["steps"])
    runs = []
    end_step = grpo.Run.end_step

    def recorded(run, step, samples, metrics):
        runs.append(run)
        end_step(run, step, samples, metrics)
        record.step_ends(sum(s.total_length for s in samples))

    grpo.Run.end_step = recorded
    runs_of_extras.Files.save = lambda files, run: None
    grpo.rollout = functools.partial(record.sample, grpo.rollout)
    record.step_begins()
    grpo.train(config(files, spec, "auto"))
    return record.result(runs[0].policy.model)


def run_trl(files: dict, spec: dict) -> dict:
    """TRL's trainer on the same work, with our vLLM engine."""
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from extras import fast

    record, tokens = Record(spec["steps"]), []
    n = spec["num_prompts"] * spec["num_generations"]
    options = dict(num_generations=spec["num_generations"], beta=spec["beta"])
    options |= dict(max_completion_length=spec["completion"], max_steps=spec["steps"] + 2)
    options |= dict(per_device_train_batch_size=spec["rows"])
    options |= dict(gradient_accumulation_steps=n // spec["rows"], gradient_checkpointing=False)
    options |= dict(learning_rate=1e-6, lr_scheduler_type="constant", use_cpu=True)
    options |= dict(bf16=files["dtype"] == "bfloat16", model_init_kwargs=dict(dtype="float32"))
    options |= dict(report_to="none", disable_tqdm=True, save_strategy="no", logging_steps=1)
    options |= dict(output_dir=tempfile.mkdtemp())
    with open(files["train_data"]) as file:
        rows = Dataset.from_list([{"prompt": json.loads(line)["prompt"]} for line in file])
    reward = load_function(files["reward"])
    fast.tune_memory()  # as ours does
    trainer = GRPOTrainer(files["model"], reward, GRPOConfig(**options), train_dataset=rows)
    give_engine(trainer, files, spec, record)
    score = trainer._get_per_token_logps_and_entropies

    def counted_score(model, input_ids, attention_mask, *args, **options):
        if torch.is_grad_enabled():
            tokens.append(int(attention_mask.sum()))
        return score(model, input_ids, attention_mask, *args, **options)

    class Steps(TrainerCallback):
        on_train_begin = record.step_begins

        def on_step_end(self, *_, **__):
            record.step_ends(sum(tokens))
            tokens.clear()

    trainer._get_per_token_logps_and_entropies = counted_score
    trainer.add_callback(Steps())
    trainer.train()
    return record.result(trainer.model)


def give_engine(trainer, files: dict, spec: dict, record: Record) -> None:
    import trl.trainer.utils

    # TRL asks this only when it chooses at which positions to compute the head.
    trl.trainer.utils._use_triton = lambda device: True
    longest = spec["prompt"] + spec["completion"]
    cfg = config(files, spec, "vllm")
    engine = grpo.VLLMSampler(trainer.model, trainer.eos_token_ids, longest, cfg)
    calls = itertools.count(1)

    def generate(prompt_ids, images, fields, num_generations, **_):
        engine.load_weights(trainer.model)
        prompts = [grpo.Prompt(np.array(ids), "", {}) for ids in prompt_ids]
        call = next(calls)
        seeds = [(call, i) for i in range(len(prompts))]
        completions = record.sample(engine.generate, prompts, seeds, 1.0)
        names = ("completion_ids", "sampler_logps")
        return tuple([fields[name].tolist() for fields in completions] for name in names)

    trainer.use_vllm = True
    trainer._generate_single_turn = generate


def run_side(python: str, side: str, setting: str, files: dict) -> dict:
    work = json.dumps(dict(side=side, spec=SETTINGS[setting], files=files))
    command = [python, os.path.abspath(__file__), "--work", work]
    done = subprocess.run(command, capture_output=True, text=True)
    if "\nRESULT " not in done.stdout:
        sys.exit(f"{setting}, {side}:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    result = json.loads(done.stdout.split("\nRESULT ")[1].splitlines()[0])
    about = dict(setting=setting, side=side, dtype=files["dtype"])
    print(json.dumps(about | result), flush=True)
    return result


def costs_of(result: dict) -> list[float]:
    """Seconds per token of the step and of the step without its rollout, and memory. (Per token,
    because the sides draw completions of different lengths.)"""
    step, rest = result["step"], result["step"] - result["rollout"]
    return [step / result["tokens"], rest / result["tokens"], result["memory"]]


if __name__ == "__main__":
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    add = parser.add_argument
    add("--trl", default="", help="python of an environment that has TRL")
    add("--settings", nargs="+", default=list(SETTINGS), choices=SETTINGS)
    add("--rounds", type=int, default=3)
    add("--quick", action="store_true", help="one round of the bundled setting, two steps")
    add("--work", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:  # in a process that run_side has started
        sides = dict(ours=run_ours, trl=run_trl)
        result = sides[args.work["side"]](args.work["files"], args.work["spec"])
        print("\nRESULT " + json.dumps(result), flush=True)
        os._exit(0)
    if args.quick:
        SETTINGS["bundled"]["steps"] = 1
        args.settings, args.rounds = ["bundled"], 1
    for setting in args.settings:
        ratios = []
        with tempfile.TemporaryDirectory() as folder:
            files = prepare(SETTINGS[setting], folder)
            for _ in range(args.rounds):
                ours = run_side(sys.executable, "ours", setting, files)
                if args.trl:
                    theirs = run_side(args.trl, "trl", setting, files)
                    ratios.append(np.divide(costs_of(theirs), costs_of(ours)))
        for kind, values in zip(KINDS, np.transpose(ratios), strict=False):
            spread = f"{min(values):.2f}, {np.median(values):.2f}, {max(values):.2f}"
            print(f"{setting}: TRL / ours, {kind}: {spread}")
