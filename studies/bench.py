"""Seconds, CPU seconds and memory of a step: this trainer, TRL on the same work, and the floor of both.

    python3.11 -m venv .trl-venv && .trl-venv/bin/pip install --no-deps -r requirements-cpu.txt
    .trl-venv/bin/pip install trl==1.16.0
    python studies/bench.py --trl .trl-venv/bin/python            # without --trl: this trainer and the floor

Same model, prompts, G, lengths, learning rate, beta and dtype. Sides take turns, each in a process of its own, one
thread; a ratio is TRL's over ours in the same round. "TRL as it comes" samples with HF generate and, on a CPU, scores
the head at every position; "TRL at its best" samples with the same vLLM engine as ours and scores the head at
completion positions only, as it does on CUDA (one function is patched for that). The floor is what no trainer can do
without: sampling, and a bare forward (reference) and forward and backward (update) over as many tokens as were real.
"""

import argparse
import contextlib
import ctypes
import json
import os
import subprocess
import sys
import tempfile
import time

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # as grpo.py sets it for vLLM on a CPU, for all sides alike
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # likewise, but for TRL as it comes
HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.dirname(HERE))

import numpy as np
import torch

# prompt, completion: tokens, at most. rows: of a TRL micro-batch; ours gets as many padded tokens. stop: a word's
# probability to be a completion's last; None: the bundled model and task
SETTINGS = {
    "tiny": dict(num_prompts=32, num_generations=8, prompt=8, completion=40, rows=32, beta=0.001, stop=None, steps=8),
    "30M": dict(num_prompts=8, num_generations=8, prompt=12, completion=128, rows=8, beta=0.04, stop=1 / 40, steps=1),
    "30M, 64 rows": dict(
        num_prompts=8, num_generations=8, prompt=12, completion=128, rows=64, beta=0.04, stop=1 / 40, steps=1
    ),
    "long prompt": dict(
        num_prompts=1, num_generations=16, prompt=512, completion=64, rows=8, beta=0.04, stop=0, steps=1
    ),
}
SIDES = dict(ours="ours, vLLM", ours_hf="ours, HF", trl="TRL at its best", trl_hf="TRL as it comes", floor="floor")
PHASES = ("rollout", "reward", "logps", "update", "sync")  # logps: reference, and TRL's old policy


def prepare(spec: dict, folder: str) -> dict:
    """Paths of model, rows and reward: the bundled ones, or a 30 M model of random weights, whose words are all nearly
    as probable, so that lengths are geometric with mean 1 / stop."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, PreTrainedTokenizerFast

    reward, rows, vocabulary = os.path.join(folder, "reward.py"), os.path.join(folder, "rows.jsonl"), 32_000
    with open(reward, "w") as file:
        file.write("def reward(completions, **_):\n    return [len(c) % 13 / 13 for c in completions]\n")
    if spec["stop"] is None:
        data = os.path.join(HERE, "..", "sample_data")
        return dict(model=os.path.join(data, "model"), rows=os.path.join(data, "train.jsonl"), reward=reward)
    names = dict(pad_token="<pad>", unk_token="<unk>", eos_token="<eos>")  # ids 0, 1, 2; no word begins like them
    ids = {word: i for i, word in enumerate([*names.values(), *(f"w{i}" for i in range(3, vocabulary))])}
    words = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, **names).save_pretrained(folder)
    sizes = dict(hidden_size=384, intermediate_size=1024, num_hidden_layers=10, num_attention_heads=6)
    config = LlamaConfig(vocab_size=vocabulary, num_key_value_heads=2, tie_word_embeddings=True, **sizes)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    model.generation_config.eos_token_id = list(range(2, 3 + int(spec["stop"] * vocabulary)))
    model.generation_config.pad_token_id = 0
    model.save_pretrained(folder)
    rng = np.random.default_rng(0)
    with open(rows, "w") as file:
        for ids in rng.integers(vocabulary // 2, vocabulary, (64, spec["prompt"])):
            file.write(json.dumps(dict(prompt=" ".join(f"w{i}" for i in ids))) + "\n")
    found = AutoTokenizer.from_pretrained(folder)(f"w{vocabulary - 1} w3").input_ids
    assert found == [vocabulary - 1, 3], found  # a word is a token (for some model types another tokenizer is loaded)
    return dict(model=folder, rows=rows, reward=reward)


# ----------------------------------------------------------------------------------------------------------------
# One side, in a process of its own


def clocks() -> np.ndarray:
    return np.array([time.perf_counter(), time.process_time()])


def resident() -> tuple[int, int]:
    """Bytes of this process in memory, now and at the peak (Linux)."""
    with open("/proc/self/status") as status:
        values = dict(line.split(":", 1) for line in status)
    return tuple(1024 * int(values[name].split()[0]) for name in ("VmRSS", "VmHWM"))


def forget_peak() -> None:
    """What was freed goes back to the system, and the peak starts from here."""
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")


class Record:
    """Of each step: wall and CPU seconds by phase; tokens that forwards with gradient computed, and the real ones."""

    def __init__(self):
        self.steps, self.now, self.inside = [], {}, None
        self.loaded = self.sampled = 0  # bytes resident before the first step, after the sampling of this one

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
            if name == "rollout":
                self.now["peak"] = resident()[1]
                forget_peak()
                self.sampled = resident()[0]

    def timed(self, name, function):
        def call(*args, **options):
            with self.phase(name):
                return function(*args, **options)

        return call

    def count(self, computed, real):
        if torch.is_grad_enabled():
            self.now["tokens"] = self.now.get("tokens", 0) + np.array([computed, real])

    def step_ends(self, *_, **__):
        now, peak = resident()
        if self.loaded:
            memory = dict(peak=max(peak, self.now["peak"]) - self.loaded, update_peak=peak - self.sampled)
            self.steps.append(self.now | dict(step=clocks() - self.started) | memory)
        else:
            self.loaded = now
        forget_peak()
        self.now, self.started = {}, clocks()

    def result(self, n_parameters: int) -> dict:
        """Means over the steps after the first. memory: of scoring and update, the peak above what was there after
        sampling, without gradients; whole: of the step, above what was loaded, gradients and Adam's moments. MB."""
        steps = self.steps[1:]
        names = {name for step in steps for name in step}
        means = {name: np.mean([step.get(name, np.zeros(2)) for step in steps], 0).tolist() for name in names}
        memory = max(step["update_peak"] for step in steps) - 4 * n_parameters
        whole = max(step["peak"] for step in steps) - 3 * 4 * n_parameters
        return means | dict(memory=memory / 1e6, whole=whole / 1e6)


def flags(files, spec, steps, sampler) -> list[str]:
    per_row = spec["prompt"] + spec["completion"]
    named = dict(model=files["model"], train_data=files["rows"], reward=f"{files['reward']}:reward", rollout=sampler)
    named |= dict(num_prompts=spec["num_prompts"], num_generations=spec["num_generations"], beta=spec["beta"])
    budget = 2048 if spec["stop"] is None else 8 * per_row
    named |= dict(max_completion_length=spec["completion"], micro_batch_tokens=budget)
    named |= dict(max_steps=steps + 1, learning_rate=1e-6, eval_data="", eval_every=0, out_dir=tempfile.mkdtemp())
    named |= dict(dtype="float32")
    return [text for name, value in named.items() for text in (f"--{name}", str(value))]


def run_ours(files, spec, steps, sampler, extra) -> dict:
    import grpo
    import harness

    record, policies = Record(), []
    forward, log, start = grpo.Policy.forward, harness.Log.step, harness.Log.__init__

    @contextlib.contextmanager
    def clock(self, phase):
        with record.phase(phase):
            yield
        self.seconds[f"time_{phase}"] = 1.0  # shown, not used

    def counted(self, ids, prompts, completions, groups=None):
        policies.append(self)
        shared = 0 if groups is None else len(groups) - len(groups.unique())
        padded = ids.numel() - shared * int(prompts.max()) - (0 if groups is None else len(ids))
        record.count(padded, int((prompts + completions).sum()))
        return forward(self, ids, prompts, completions, groups)

    def logged(self, *args):
        log(self, *args)
        record.step_ends()

    def begins(self, *args):
        start(self, *args)
        record.step_ends()

    grpo.Policy.forward, harness.Clock.__call__ = counted, clock
    harness.Log.step, harness.Log.__init__ = logged, begins
    harness.Run.save = harness.Run.rehearse = lambda self: None
    grpo.train(grpo.parse_args(flags(files, spec, steps, sampler) + extra))
    return record.result(sum(p.numel() for p in policies[0].parameters()))


def run_trl(files, spec, steps, sampler) -> dict:
    import trl.trainer.utils
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    record, best = Record(), sampler == "vllm"
    with open(files["rows"]) as rows:
        data = Dataset.from_list([dict(prompt=json.loads(line)["prompt"]) for line in rows])
    with open(files["reward"]) as file:
        exec(file.read(), space := {})
    n = spec["num_prompts"] * spec["num_generations"]
    options = dict(per_device_train_batch_size=spec["rows"], gradient_accumulation_steps=n // spec["rows"])
    options |= dict(
        num_generations=spec["num_generations"], max_completion_length=spec["completion"], beta=spec["beta"]
    )
    options |= dict(max_steps=steps + 1, learning_rate=1e-6, lr_scheduler_type="constant", save_strategy="no")
    options |= dict(use_cpu=True, bf16=False, gradient_checkpointing=False, report_to="none", disable_tqdm=True)
    config = GRPOConfig(
        output_dir=tempfile.mkdtemp(), logging_steps=1, model_init_kwargs=dict(dtype="float32"), **options
    )
    trainer = GRPOTrainer(files["model"], space["reward"], config, train_dataset=data)
    if best:
        import grpo
        import harness

        trl.trainer.utils._use_triton = lambda device: True  # used there only to choose the positions
        cfg = grpo.parse_args(flags(files, spec, steps, "vllm"))
        harness.choose_sampler(cfg, torch.device("cpu"), False)
        world = harness.World(0, 1, torch.device("cpu"))
        engine, trainer.use_vllm, seed = grpo.VLLMSampler(trainer.eos_token_ids, spec["prompt"], cfg, world), True, [0]

        def generate(prompt_ids, images, fields, num_generations, **_):
            with record.phase("sync"):
                engine.push(trainer.model)
            with record.phase("rollout"):
                seed[0] += 1
                seeds = [harness.seed_of(cfg.seed, 0, seed[0], i) for i in range(len(prompt_ids) // num_generations)]
                prompts = [np.array(ids, dtype=np.int32) for ids in prompt_ids[::num_generations]]
                drawn = [c for group in engine.generate(prompts, num_generations, seeds, 1.0) for c in group]
            return [c.ids.tolist() for c in drawn], [c.logps.tolist() for c in drawn]

        trainer._generate_single_turn = generate
    else:
        trainer._generate_single_turn = record.timed("rollout", trainer._generate_single_turn)
    trainer._calculate_rewards = record.timed("reward", trainer._calculate_rewards)
    score = trainer._get_per_token_logps_and_entropies

    def scored(model, input_ids, attention_mask, *args, **options):
        record.count(input_ids.numel(), int(attention_mask.sum()))
        with contextlib.nullcontext() if torch.is_grad_enabled() else record.phase("logps"):
            return score(model, input_ids, attention_mask, *args, **options)

    trainer._get_per_token_logps_and_entropies = scored
    ends = type("Ends", (TrainerCallback,), dict(on_train_begin=record.step_ends, on_step_end=record.step_ends))
    trainer.add_callback(ends())
    trainer.train()
    for step in record.steps:  # what remains is forward, backward, optimiser
        step["update"] = step["step"] - sum(step.get(phase, 0) for phase in PHASES)
    return record.result(sum(p.numel() for p in trainer.model.parameters()))


def rows_without_padding(samples, vocabulary: int) -> tuple[torch.Tensor, int]:
    """ids [N, P + T] of random words, as many as the samples have tokens: rows of the mean lengths. And P."""
    P = round(np.mean([len(s.prompt.ids) for s in samples]))
    T = round(np.mean([len(s.completion_ids) for s in samples]))
    return torch.randint(2, vocabulary, (len(samples), P + T)), P


def bare_losses(model, ids, P: int, cfg):
    """Losses of the completions, a micro-batch at a time: a forward with the head at completion positions only."""
    for part in ids.split(max(1, cfg.micro_batch_tokens // ids.shape[1])):
        hidden = model.base_model(input_ids=part, use_cache=False).last_hidden_state[:, P - 1 : -1]
        yield torch.nn.functional.cross_entropy(model.lm_head(hidden).flatten(0, 1), part[:, P:].flatten())


def run_floor(files, spec, steps) -> dict:
    import grpo
    import harness

    record, cfg = Record(), grpo.parse_args(flags(files, spec, steps, "vllm"))
    tokenizer, world = harness.load_tokenizer(cfg), harness.World(0, 1, torch.device("cpu"))
    prompts = harness.load_prompts("train_data", [], tokenizer, cfg)
    model = grpo.load_model(cfg.model, cfg)
    harness.choose_sampler(cfg, world.device, False)
    eos, _ = harness.special_ids(model.generation_config, tokenizer, cfg)
    engine = grpo.VLLMSampler(eos, spec["prompt"], cfg, world)
    engine.push(model)
    record.step_ends()
    for step in range(1, steps + 2):
        drawn = grpo.prompts_of_step(prompts, step, cfg)
        with record.phase("rollout"):
            samples = grpo.sample(engine, drawn, cfg.num_generations, 1.0, 0, step, tokenizer, cfg, world)
        ids, P = rows_without_padding(samples, model.config.vocab_size)
        with record.phase("logps"), torch.no_grad():
            list(bare_losses(model, ids, P, cfg))
        record.count(ids.numel(), ids.numel())
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
    command = [*python, os.path.abspath(__file__), "--side", side, "--settings", setting, "--files", json.dumps(files)]
    env = os.environ | ({"THP_MEM_ALLOC_ENABLE": "0"} if side == "trl_hf" else {})
    done = subprocess.run([*command, *extra], capture_output=True, text=True, env=env)
    if "\nRESULT " not in done.stdout:
        sys.exit(f"{setting}, {side}:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return json.loads(done.stdout.split("\nRESULT ")[1].splitlines()[0])


def report(name, rounds) -> tuple[list, list]:
    """Rows of the table of CPU seconds, which other work disturbs least, and of the table of ratios. Sides draw
    completions of their own, so seconds are compared per real token (prompt and completion, without padding)."""
    table, ratios = [], []
    for side, title in SIDES.items():
        runs = [r[side] for r in rounds if side in r]
        if not runs:
            continue
        median = {key: np.median([run.get(key, [0, 0]) for run in runs], axis=0) for key in (*PHASES, "step", "tokens")}
        waste = np.median([run["tokens"][0] / run["tokens"][1] for run in runs])
        memory = [float(np.median([run[kind] for run in runs])) for kind in ("memory", "whole")]
        cells = [float(median[phase][1]) for phase in (*PHASES, "step")] + [int(median["tokens"][1])]
        table.append([name, title, *cells, float(median["step"][0]), waste, *memory])
    part = {
        "step": lambda run: run["step"][1] / run["tokens"][1],
        "logps and update": lambda run: (run["update"][1] + run["logps"][1]) / run["tokens"][1],
        "memory": lambda run: run["memory"],
    }
    pairs = [("trl", "ours"), ("trl_hf", "ours"), ("trl_hf", "ours_hf"), ("ours", "floor")]
    for (over, under), (what, value) in ((pair, item) for pair in pairs for item in part.items()):
        found = sorted(value(r[over]) / value(r[under]) for r in rounds if over in r and under in r)
        if found and not (under == "floor" and what == "memory"):
            spread = [found[0], float(np.median(found)), found[-1]]
            ratios.append([name, f"{SIDES[over]} / {SIDES[under]}", what, *spread])
    return table, ratios


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trl", default="", help="python of an environment that has TRL")
    parser.add_argument("--settings", nargs="+", default=list(SETTINGS), choices=SETTINGS)
    parser.add_argument("--sides", nargs="+", default=list(SIDES), choices=SIDES)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", default=os.path.join(HERE, "figures"), help="directory of figure and table")
    parser.add_argument("--side", help=argparse.SUPPRESS)  # this process is one side
    parser.add_argument("--files", type=json.loads, help=argparse.SUPPRESS)
    args, extra = parser.parse_known_args()
    if args.side:
        spec = SETTINGS[args.settings[0]]
        call = (args.files, spec, spec["steps"])
        sampler = "hf" if args.side.endswith("_hf") else "vllm"
        run = dict(ours=run_ours, trl=run_trl, floor=run_floor)[args.side.removesuffix("_hf")]
        rest = {"ours": (sampler, extra), "trl": (sampler,), "floor": ()}[args.side.removesuffix("_hf")]
        print("\nRESULT " + json.dumps(run(*call, *rest)), flush=True)
        os._exit(0)
    os.makedirs(args.out, exist_ok=True)
    table, ratios, started = [], [], time.monotonic()
    for setting in args.settings:
        rounds = [{} for _ in range(args.rounds)]
        with tempfile.TemporaryDirectory() as folder:
            files = prepare(SETTINGS[setting], folder)
            for number, side in ((n, s) for n in range(args.rounds) for s in args.sides):
                if side.startswith("trl") and not args.trl:
                    continue
                python = args.trl if side.startswith("trl") else sys.executable
                rounds[number][side] = run_side([python], side, setting, files, extra)
                print(setting, number, side, rounds[number][side], flush=True)
        for rows, new in zip((table, ratios), report(setting, rounds), strict=True):
            rows += new
    publish(table, ratios, argparse.Namespace(out=args.out, started=started, jobs=1))


def publish(table, ratios, args) -> None:
    from common import plt, save

    header = ["setting", "side", *PHASES, "step", "real tokens", "step, wall", "computed / real"]
    header += ["peak MB, logps and update", "peak MB, step"]
    if not ratios:
        sys.exit("nothing to compare")
    figure, axes = plt.subplots(1, 2, figsize=(12, 1 + 0.15 * len(ratios)), sharey=True)
    for axis, what in zip(axes, ("step", "logps and update"), strict=True):
        rows = [row for row in ratios if row[2] == what]
        low, middle, high = np.array([row[3:] for row in rows]).T
        labels = [f"{setting}: {pair}" for setting, pair, *_ in rows]
        colors = ["tab:grey" if "floor" in label else "tab:blue" for label in labels]
        axis.barh(labels, middle, xerr=[middle - low, high - middle], color=colors, alpha=0.7)
        axis.axvline(1, color="black", lw=1)
        axis.set(title=what, xlabel="CPU seconds per real token, ratio", ylim=(len(rows) - 0.5, -0.5))
    figure.tight_layout()
    save(args, "bench", figure, [header, *table], [["setting", "pair", "of", "min", "median", "max"], *ratios])


if __name__ == "__main__":
    main()
