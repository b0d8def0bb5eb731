"""Is a small adapter enough for RL?   python studies/lora.py FOLDER

"LoRA Without Regret" (Schulman et al., Thinking Machines, 2025) says so: with GRPO an adapter of
rank 1 learns as well as all weights, at ten times their learning rate. Here SmolLM2-135M-Instruct
learns sums of one-digit numbers (real_model.py says which packages that needs): all weights, and
adapters of rank 1, 8 and 32.

Seed 0 chooses the learning rate of each side: the one with the highest mean reward over all steps.
The other seeds, which took no part in that choice, give the curves and the table. All sides of one
seed have the same prompts and begin with the same samples. Each run is grpo.py's command line, in a
process of its own on one thread; one that FOLDER already has is not repeated, so the study can be
stopped at any time. To try a single run, which leaves the figures alone:

    python studies/lora.py FOLDER --side "rank 8" --rate 2e-4 --seed 0 --steps 2
"""

import os
import sys

import numpy as np
from common import arguments, band, interval, legend, ordered, plt, save, span
from real_model import accuracy_text, command_of, follow, make_model, training_seconds, with_key

from harness.curves import read_jsonl

TASK = "sums"
STEPS = 60
SEEDS = 6  # the first one chooses the learning rates
SIDES = {"full": 0, "rank 1": 1, "rank 8": 8, "rank 32": 32}
RATES = {  # learning rates to choose from
    "full": (1e-5, 2e-5, 4e-5, 8e-5),
    "rank 1": (1e-4, 2e-4, 4e-4, 8e-4),
    "rank 8": (1e-4, 2e-4, 4e-4, 8e-4),
    "rank 32": (1e-4, 2e-4, 4e-4, 8e-4),
}


def run(folder: str, side: str, rate: float, seed: int, steps: int = STEPS) -> list[dict]:
    """The metrics of one run, a dict a step, with the CPU seconds of training until then, and the
    largest memory of its process."""
    out = os.path.join(folder, f"{side.replace(' ', '_')}_{rate:g}_{seed}_{steps}")
    model = os.path.join(folder, "model")
    command = command_of(model, TASK, seed, steps, out)
    command += ["--learning_rate", str(rate), "--lora_rank", str(SIDES[side])]
    lines = follow(command, out)
    seconds = training_seconds(lines)
    history = read_jsonl(os.path.join(out, "metrics.jsonl"))
    for m in history:
        m["seconds"] = seconds[m["step"]]
        m["memory"] = lines[-1]["memory"]
    return history


def mean_reward(history: list[dict]) -> float:
    return float(np.mean([m["reward"] for m in with_key(history, "reward")]))


def choose_rates(folder: str) -> tuple[dict, list]:
    """The best learning rate of each side by seed 0, and the table of all."""
    chosen = {}
    table = ["trained | learning rate | mean reward, seed 0 | greedy accuracy after | chosen"]
    for side, rates in RATES.items():
        histories = {rate: run(folder, side, rate, 0) for rate in rates}
        chosen[side] = max(rates, key=lambda rate: mean_reward(histories[rate]))
        for rate, history in histories.items():
            mark = "yes" if rate == chosen[side] else ""
            accuracy = accuracy_text(history[-1])
            table.append([side, f"{rate:g}", mean_reward(history), accuracy, mark])
    return chosen, table


def learned_table(runs: dict, chosen: dict) -> list:
    """Means over the seeds, with their 95 % intervals."""
    table = [
        "trained | learning rate | seeds | mean reward | greedy accuracy after | "
        "difference to full, same seeds | CPU seconds | peak memory, GB | sampler gap"
    ]
    full = np.array([h[-1]["eval_accuracy"] for h in runs["full"]])
    for side, histories in runs.items():
        accuracy = np.array([h[-1]["eval_accuracy"] for h in histories])
        gaps = [m["sampler_gap"] for h in histories for m in with_key(h, "sampler_gap")]
        row = [side, f"{chosen[side]:g}", len(histories)]
        row += [span([mean_reward(h) for h in histories]), span(accuracy), span(accuracy - full)]
        row.append(f"{interval([h[-1]['seconds'] for h in histories])[0]:.0f}")
        row += [max(h[-1]["memory"] for h in histories), float(np.mean(gaps))]
        table.append(row)
    return table


def draw(runs: dict):
    """Reward by step and by CPU second, and held-out accuracy."""
    figure, axes = plt.subplots(1, 3, figsize=(11, 3.6), layout="constrained")
    by_step, by_second, held_out = axes
    for color, (side, histories) in zip(ordered(len(runs)), runs.items(), strict=True):
        training = [with_key(h, "reward") for h in histories]
        band(by_step, training, "reward", color=color, label=side)
        seconds = np.mean([[m["seconds"] for m in h] for h in training], 0)
        rewards = np.mean([[m["reward"] for m in h] for h in training], 0)
        by_second.plot(seconds, rewards, color=color)
        evals = [with_key(h, "eval_accuracy") for h in histories]
        band(held_out, evals, "eval_accuracy", color=color)
    by_step.set(xlabel="step", ylabel="reward of the step's samples (mean ± 1 s.e.)")
    by_second.set(xlabel="CPU seconds of training, one thread", ylabel="reward (mean)", xlim=0)
    held_out.set(xlabel="step", ylabel="greedy accuracy, held-out (mean ± 1 s.e.)")
    legend(figure, by_step, len(runs))
    return figure


def add_options(parser) -> None:
    parser.add_argument("folder", help="for the model and the runs")
    parser.add_argument("--side", choices=SIDES, help="only this one, with --rate and --seed")
    parser.add_argument("--rate", type=float, default=2e-4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=STEPS)


def main() -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    args = arguments(__doc__, add_options, quick=False)
    make_model(args.folder)
    if args.side:
        history = run(args.folder, args.side, args.rate, args.seed, args.steps)
        print(f"{args.side}, {args.rate:g}: mean reward {mean_reward(history):.3f}", end=", ")
        print(f"greedy {accuracy_text(history[-1])}, {history[-1]['memory']:.1f} GB")
        return

    chosen, rate_table = choose_rates(args.folder)
    runs = {side: [] for side in SIDES}
    for seed in range(1, SEEDS):
        for side, rate in chosen.items():
            runs[side].append(run(args.folder, side, rate, seed))
    save(args, "lora", draw(runs), learned_table(runs, chosen), rate_table)


if __name__ == "__main__":
    sys.exit(main())
