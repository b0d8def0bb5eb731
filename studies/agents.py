"""A real language model learns to use two tools, beside TRL.

    python studies/agents.py FOLDER --trl .trl-venv/bin/python    # see real_model.py and bench.py
    python studies/agents.py FOLDER --trl .trl-venv/bin/python --schemas

SmolLM2-135M-Instruct does not call tools. Therefore it first takes a few supervised steps on
demonstrations: a policy gradient whose samples are an expert's, with an advantage of 1. From there
GRPO trains both sides, with the same environment class (friends.py), prompts in the same order, G,
learning rate, temperature, lengths and dtype. TRL is at its best: it samples with the same vLLM
engine, and its head computes completion positions only. CPU seconds are those of a process and its
children, on one thread, without evals.

The prompts have 48 tokens, because friends.jinja writes a line for each tool. With --schemas it
writes JSON schemas, as most chat templates do: 176 tokens, one seed.
"""

import argparse
import dataclasses
import itertools
import json
import math
import multiprocessing
import os
import re
import sys
import tempfile
import time
from types import SimpleNamespace

import numpy as np
from common import CPU, FIGURES, HERE, fast_policy, plt, quick_folder, save
from friends import Friends, expert_turn, right
from real_model import follow, make_model, seconds_to, training_seconds, with_key

import grpo
import harness.engine
import harness.models
from harness.chat import encode
from harness.curves import COLORS, read_jsonl
from harness.player import Player
from harness.scorer import Scorer

FILE = os.path.join(HERE, "friends.py")
STEPS, SEEDS = 10, 3
SHORT = 3  # steps of --quick
# Every flag that matters is here, even if it is the default.
FLAGS = (
    f"--environment {FILE}:Friends --reward {FILE}:right,environment --rollout vllm "
    "--dtype float32 --beta 0 --num_prompts 2 --num_generations 8 --max_completion_length 112 "
    "--max_turns 4 --learning_rate 2e-5 --micro_batch_tokens 1024 --save_every 0 "
    "--log_completions -1"
)
WARM_UP = dict(max_steps=9, num_prompts=8, learning_rate=3e-5)
ROWS = 8  # of a micro-batch of TRL's; 16 need 9 GB
SIDES = dict(ours="ours", trl="TRL at its best")
RIGHT = "rewards/right/mean"
LEVELS = (0.25, 0.5, 0.75)
# How transformers' parse_response reads a turn of the policy.
TOOL_CALLS = dict(
    open="<tool_call>",
    close_pattern=r"</tool_call>\s*",
    repeats=True,
    content="json",
    transform=dict(type="function", function="{content}"),
)
RESPONSE_TEMPLATE = dict(
    start_anchor="<|im_start|>assistant\n",
    defaults=dict(role="assistant"),
    fields=dict(
        tool_calls=TOOL_CALLS, content=dict(close_pattern=r"<\|im_end\|>\s*", content="text")
    ),
)


# --------------------------------------------------------------------------------------------------
# The model that both sides begin with


class Expert:
    """Takes the sampler's place: it writes the right turn."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer

    def generate(self, prompts, n, seeds, temperature, limits):
        turns = []
        for prompt in prompts:
            text = expert_turn(self.tokenizer.decode(prompt))
            ids = [*encode(text, self.tokenizer), self.tokenizer.eos_token_id]
            logps = np.zeros(len(ids), np.float32)
            turns.append([grpo.Completion(np.array(ids, np.int32), logps, "stop")])
        return turns


def make_agent(folder: str, schemas: bool) -> str:
    """Writes FOLDER/agent: the model with a chat template for tools, after the demonstrations."""
    path = os.path.join(folder, "agent_schemas" if schemas else "agent")
    if os.path.exists(os.path.join(path, "tokenizer_config.json")):  # written last
        return path
    cfg = grpo.parse_args(command_of(make_model(folder), 0, 0, tempfile.mkdtemp(), schemas)[2:])
    # an expert has no log-probabilities, so there is no gap to bound
    cfg = dataclasses.replace(cfg, tis_cap=0.0, max_sampler_gap=1e9, **WARM_UP)
    cfg.train_data = f"{FILE}:demonstrations"
    tokenizer = grpo.rows.load_tokenizer(cfg)
    with open(os.path.join(HERE, "friends.jinja")) as file:
        tokenizer.chat_template = file.read()
    tokenizer.response_template = RESPONSE_TEMPLATE
    cfg.tokenizer = tempfile.mkdtemp()
    tokenizer.save_pretrained(cfg.tokenizer)
    # in a process of its own, so that its memory is free again
    child = multiprocessing.get_context("fork").Process(target=warm_up, args=(cfg, path))
    child.start()
    child.join()
    if child.exitcode != 0:
        sys.exit("agents.py: the warm-up failed")
    tokenizer.save_pretrained(path)
    return path


def warm_up(cfg: grpo.Config, path: str) -> None:
    """Supervised learning from the demonstrations; writes the model to `path`."""
    rewards, environment, tokenizer, prompts, _ = grpo.load_data(cfg)
    model = grpo.load_model(cfg.model, cfg)
    policy = fast_policy(model, cfg.temperature)
    optimizer = grpo.make_optimizer(policy, cfg)
    scorer = Scorer(rewards, cfg.call_timeout, cfg.workers, environment=environment)
    eos_ids, _ = harness.models.special_ids(model, tokenizer, cfg)
    player = Player(environment, scorer.pool, tokenizer, eos_ids, prompts, cfg)
    expert = Expert(tokenizer)
    for step in range(1, cfg.max_steps + 1):
        chosen = grpo.prompts_of_step(prompts, step, cfg)
        seeds = list(range(len(chosen)))
        samples = grpo.sample(expert, chosen, seeds, cfg, CPU, greedy=True, player=player)
        for s in samples:
            s.advantages[:] = 1.0
        metrics = grpo.update(policy, optimizer, samples, cfg, step=step)
        # The expert's log-probabilities are 0, so the gap is the policy's mean -log p.
        print(f"demonstrations {step}: -log p a token {metrics['sampler_gap']:.3f}", flush=True)
    scorer.close()
    model.save_pretrained(path)


# --------------------------------------------------------------------------------------------------
# The two sides


def command_of(model: str, seed: int, steps: int, out: str, schemas: bool) -> list[str]:
    command = [sys.executable, "grpo.py", "--model", model, *FLAGS.split()]
    command += ["--train_data", f"{FILE}:train", "--eval_data", f"{FILE}:held_out"]
    command += ["--max_steps", str(steps), "--eval_every", str(steps), "--seed", str(seed)]
    if schemas:
        command += ["--chat_template_kwargs", '{"schemas": true}']
    return [*command, "--out_dir", out]


def run_ours(folder: str, model: str, seed: int, steps: int, schemas: bool) -> list[dict]:
    """The metrics of each step, with the CPU seconds of training until its end."""
    out = os.path.join(folder, f"agents_{seed}")
    seconds = training_seconds(follow(command_of(model, seed, steps, out, schemas), out))
    history = read_jsonl(os.path.join(out, "metrics.jsonl"))
    for m in history:
        m["seconds"] = seconds[m["step"]]
    return history


def run_trl(folder: str, model: str, seed: int, steps: int, schemas: bool, python: str):
    """The same from TRL's side, which is a process of its own."""
    command = [python, os.path.abspath(__file__), os.path.dirname(model)]
    command += ["--side", "trl", "--seed", str(seed), "--steps", str(steps)]
    if schemas:
        command.append("--schemas")
    lines = follow(command, os.path.join(folder, f"agents_{seed}_trl"))
    seconds = training_seconds(lines)
    history = []
    for line in lines:
        m = dict(step=line["step"], seconds=seconds[line["step"]])
        for name, value in re.findall(r"(\S+) (\d+\.\d+)", line["text"]):
            m[name.replace("accuracy", "eval_accuracy")] = float(value)
        history.append(m)
    return history


def trl_side(model: str, seed: int, steps: int, schemas: bool) -> None:
    """TRL's trainer. Prints lines like ours. Our code measures greedy accuracy, at the end."""
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    cfg = grpo.parse_args(command_of(model, seed, steps, tempfile.mkdtemp(), schemas)[2:])
    rewards, environment, tokenizer, train, held_out = grpo.load_data(cfg)
    prompts = [grpo.prompts_of_step(train, step, cfg) for step in range(1, steps + 1)]
    config = GRPOConfig(
        per_device_train_batch_size=ROWS,
        gradient_accumulation_steps=cfg.num_prompts * cfg.num_generations // ROWS,
        num_generations=cfg.num_generations,
        max_completion_length=cfg.max_completion_length,
        max_tool_calling_iterations=cfg.max_turns - 1,
        max_steps=steps,
        learning_rate=cfg.learning_rate,
        lr_scheduler_type="constant",
        shuffle_dataset=False,
        chat_template_kwargs=json.loads(cfg.chat_template_kwargs or "{}"),
        beta=0.0,
        use_cpu=True,
        gradient_checkpointing=False,
        bf16=False,
        report_to="none",
        disable_tqdm=True,
        save_strategy="no",
        output_dir=tempfile.mkdtemp(),
        logging_steps=1,
        model_init_kwargs=dict(dtype="float32"),
        seed=seed,
    )
    data = Dataset.from_list([prompt.row for prompt in itertools.chain(*prompts)])
    trainer = GRPOTrainer(model, right, config, train_dataset=data, environment_factory=Friends)
    longest = max(len(p.ids) for p in train + held_out) + cfg.max_completion_length
    engine = use_engine(trainer, longest, prompts, cfg)

    class Lines(TrainerCallback):
        def on_train_begin(self, *_, **__):
            print("step 0", flush=True)

        def on_log(self, args, state, control, logs, **_):
            if "reward" in logs:
                names = ("reward", RIGHT, "completions/mean_length")
                values = [f"{name} {float(logs[name]):.4f}" for name in names]
                print(f"step {state.global_step}/{steps} {' '.join(values)}", flush=True)

    trainer.add_callback(Lines())
    trainer.train()
    engine.push(trainer.model)
    scorer = Scorer(rewards, cfg.call_timeout, cfg.workers, environment=environment)
    eos_ids = trainer.eos_token_ids
    player = Player(environment, scorer.pool, tokenizer, eos_ids, held_out, cfg)
    m = grpo.evaluate(engine, held_out, tokenizer, scorer, steps, cfg, CPU, player)
    print(f"step {steps}: eval accuracy {m['eval_accuracy']:.3f}", flush=True)
    os._exit(0)


def use_engine(trainer, longest: int, prompts: list, cfg: grpo.Config):
    """TRL at its best, as in bench.py: gives the trainer our vLLM engine, which is returned.

    prompts: of each step. The sides' token ids must be equal.
    """
    import trl.trainer.utils

    # TRL asks this only when it chooses at which positions to compute the head
    trl.trainer.utils._use_triton = lambda device: True
    harness.models.keep_freed_memory(CPU.device)
    harness.engine.choose_sampler(cfg, CPU.device, False)
    engine = grpo.VLLMSampler(trainer.eos_token_ids, longest, cfg, CPU)
    trainer.use_vllm = True
    trainer.vllm_generation = SimpleNamespace(llm=engine.llm)
    calls = itertools.count()

    def generate(prompt_ids, images, fields, num_generations, **_):
        texts = [np.array(ids, dtype=np.int32) for ids in prompt_ids[::num_generations]]
        if num_generations > 1:  # the first turn
            engine.push(trainer.model)
            step = trainer.state.global_step + 1
            seeds = grpo.seeds_of(grpo.SAMPLING, step, cfg.num_prompts, cfg)
            for ids, prompt in zip(texts, prompts[step - 1], strict=True):
                assert np.array_equal(ids, prompt.ids), "TRL has another prompt"
        else:
            seeds = [grpo.seed_of(cfg.seed, next(calls)) for _ in texts]
        groups = engine.generate(texts, num_generations, seeds, cfg.temperature)
        completions = [c for group in groups for c in group]
        return [c.ids.tolist() for c in completions], [c.logps.tolist() for c in completions]

    trainer._generate_single_turn = generate
    return engine


# --------------------------------------------------------------------------------------------------
# Figure and tables


def run_row(side: str, seed: int, history: list[dict]) -> list:
    steps, evals = with_key(history, "reward"), with_key(history, "eval_accuracy")
    shares = [m[RIGHT] for m in steps]
    lengths = [m["completions/mean_length"] for m in steps]
    greedy = " to ".join(f"{m['eval_accuracy']:.3f}" for m in evals)
    seconds = steps[-1]["seconds"] / len(steps)
    ends = [shares[0], float(np.mean(shares[-3:])), greedy, lengths[0], lengths[-1]]
    return [SIDES[side], seed, *ends, seconds]


def speed_table(runs: dict) -> list:
    """CPU seconds to a share of right answers, and TRL's over ours."""
    table = [" | ".join(["right, mean of up to 3 steps", "seed", *SIDES.values(), "ratio"])]
    for level, seed in itertools.product(LEVELS, range(len(runs["ours"]))):
        reached = [seconds_to(level, side[seed], RIGHT, 3) for side in runs.values()]
        cells = ["not reached" if math.isnan(x) else f"{x:.0f} s" for x in reached]
        ratio = reached[-1] / reached[0]
        table.append([level, seed, *cells, "" if math.isnan(ratio) else f"{ratio:.1f}"])
    return table


def draw(runs: dict):
    figure, axes = plt.subplots(1, 3, figsize=(11, 3.4), layout="constrained")
    seconds = "CPU seconds of training, one thread"
    share = "sampled: share right"
    panels = [("step", RIGHT), ("seconds", RIGHT), ("step", "seconds")]
    labels = [("step", share), (seconds, share), ("step", seconds)]
    for axis, (x, y), (xlabel, ylabel) in zip(axes, panels, labels, strict=True):
        for color, (side, histories) in zip(COLORS, runs.items(), strict=False):
            curves = []
            for history in histories:
                points = with_key(history, "reward")
                curves.append([[m[x] for m in points], [m[y] for m in points]])
                axis.plot(*curves[-1], color=color, lw=0.8, alpha=0.35)
            axis.plot(*np.mean(curves, 0), color=color, lw=2, label=SIDES[side])
        axis.set(xlabel=xlabel, ylabel=ylabel, xlim=0, ylim=0)
    axes[0].legend()
    figure.supxlabel("thin: a run each; bold: the mean of the seeds")
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("folder", help="directory of the model and the runs")
    add("--trl", default="", help="python of an environment with TRL (see bench.py)")
    add("--schemas", action="store_true", help="a longer prompt, one seed")
    add("--quick", action="store_true", help="a few steps and one seed: does it still run?")
    for name in ("side", "seed", "steps"):  # of a process that is TRL's side
        add(f"--{name}", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.started, args.jobs, args.out = time.monotonic(), 1, FIGURES
    folder = os.path.abspath(args.folder)
    model = make_agent(folder, args.schemas)
    if args.side:
        trl_side(model, int(args.seed), int(args.steps), args.schemas)
    steps, seeds = STEPS, SEEDS
    if args.schemas:
        seeds = 1
        folder = os.path.join(folder, "schemas")
    if args.quick:
        steps, seeds, args.out = SHORT, 1, quick_folder()
        folder = os.path.join(folder, "quick")

    runs = {side: [] for side in SIDES if side == "ours" or args.trl}
    for seed in range(seeds):
        setting = (folder, model, seed, steps, args.schemas)
        runs["ours"].append(run_ours(*setting))
        if args.trl:
            runs["trl"].append(run_trl(*setting, args.trl))
    results = [
        "side | seed | sampled right first | last 3 | greedy (before, after) | tokens first | "
        "last | CPU seconds a step"
    ]
    for side, histories in runs.items():
        results += [run_row(side, seed, history) for seed, history in enumerate(histories)]
    if args.schemas:
        save(args, "agents_schemas", None, results)
        return
    tables = [results]
    if args.trl:
        tables.append(speed_table(runs))
    save(args, "agents", draw(runs), *tables)


if __name__ == "__main__":
    main()
