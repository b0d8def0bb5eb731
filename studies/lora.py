"""Is a small adapter enough for RL?   python studies/lora.py FOLDER

"LoRA Without Regret" (Schulman et al., Thinking Machines, 2025) says so: with GRPO an adapter of
rank 1 learns as well as all weights, at ten times their learning rate. Here SmolLM2-135M-Instruct
learns sums of one-digit numbers, as in on_a_real_model.py: all weights, and adapters of rank 1, 8
and 32.

Seed 0 chooses the learning rate of each side: the one with the highest mean reward over all steps.
The other seeds, which took no part in that choice, give the curves and the table. All sides of one
seed have the same prompts and begin with the same samples. A run that FOLDER already has is not
repeated, so the study can be stopped at any time.
"""

import functools
import os
import shutil

import numpy as np
from common import arguments, band, interval, legend, ordered, plt, save, span
from on_a_real_model import final_accuracy, final_kl, learn, learn_all, make_run, mean_reward
from real_model import make_model

SEEDS = 6  # the first one chooses the learning rates
SIDES = {"full": 0, "rank 1": 1, "rank 8": 8, "rank 32": 32}
ADAPTER_RATES = (1e-4, 2e-4, 4e-4, 8e-4)
RATES = {  # learning rates to choose from
    "full": (5e-6, 1e-5, 2e-5, 4e-5),
    "rank 1": ADAPTER_RATES,
    "rank 8": ADAPTER_RATES,
    "rank 32": ADAPTER_RATES,
}


def name_of(side: str, rate: float) -> str:
    return f"{side}, {rate:g}"


def all_settings() -> dict:
    """The flags of each side with each of its learning rates."""
    settings = {}
    for side, rank in SIDES.items():
        for rate in RATES[side]:
            settings[name_of(side, rate)] = dict(lora_rank=rank, learning_rate=rate)
    return settings


def choose_rates(runs_of) -> tuple[dict, list]:
    """The best learning rate of each side by seed 0, and the table of all."""
    chosen = {}
    table = ["trained | learning rate | mean reward, seed 0 | held-out accuracy | chosen"]
    for side, rates in RATES.items():
        runs = dict(zip(rates, runs_of([(0, name_of(side, rate)) for rate in rates]), strict=True))
        chosen[side] = max(rates, key=lambda rate: mean_reward(runs[rate]))
        for rate, run in runs.items():
            mark = "yes" if rate == chosen[side] else ""
            table.append([side, f"{rate:g}", mean_reward(run), final_accuracy(run), mark])
    return chosen, table


def learned_table(runs: dict, chosen: dict) -> list:
    """Means over the seeds, with their 95 % intervals."""
    table = [
        "trained | learning rate | seeds | mean reward | minus full, by pairs | "
        "held-out accuracy | minus full, by pairs | KL, nats a completion | "
        "CPU seconds a step | GB beside the model"
    ]
    for side, by_seed in runs.items():
        row = [side, f"{chosen[side]:g}", len(by_seed)]
        for value in (mean_reward, final_accuracy):
            values = [value(run) for run in by_seed]
            full = [value(run) for run in runs["full"]]
            row += [span(values), span(np.subtract(values, full))]
        row.append(span([final_kl(run) for run in by_seed], 2))
        seconds = [run["history"][-1]["seconds"] / len(run["history"]) for run in by_seed]
        row.append(f"{interval(seconds)[0]:.2f}")
        row.append(max(run["memory"] for run in by_seed))
        table.append(row)
    return table


def draw(runs: dict):
    """Reward by step and by CPU second, and held-out accuracy."""
    figure, axes = plt.subplots(1, 3, figsize=(11, 3.6), layout="constrained")
    by_step, by_second, held_out = axes
    colors = ordered(len(runs))
    for place, (color, (side, by_seed)) in enumerate(zip(colors, runs.items(), strict=True)):
        histories = [run["history"] for run in by_seed]
        band(by_step, histories, "reward", color=color, label=side)
        seconds = np.mean([[m["seconds"] for m in h] for h in histories], 0)
        rewards = np.mean([[m["reward"] for m in h] for h in histories], 0)
        by_second.plot(seconds, rewards, color=color)
        accuracy = [final_accuracy(run) for run in by_seed]
        mean, low, high = interval(accuracy)
        error = [[mean - low], [high - mean]]
        held_out.errorbar(place, mean, yerr=error, fmt="o", ms=6, capsize=4, color=color)
        held_out.scatter([place + 0.2] * len(accuracy), accuracy, s=10, alpha=0.5, color=color)
    by_step.set(xlabel="step", ylabel="reward of the step's samples (mean ± 1 s.e.)", ylim=0)
    by_second.set(xlabel="CPU seconds, one thread", ylabel="reward (mean)", xlim=0, ylim=0)
    held_out.set_xticks(range(len(runs)), list(runs))
    held_out.set(ylabel="held-out accuracy after the last step\n(mean, 95 % interval; seeds)")
    legend(figure, by_step, len(runs))
    return figure


def main() -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    args = arguments(__doc__, lambda parser: parser.add_argument("folder", nargs="?", default=""))
    seeds = SEEDS
    if args.quick:
        seeds = 2
        for side in RATES:
            RATES[side] = RATES[side][:2]
        folder = os.path.join(args.out, "lora")
        shutil.rmtree(folder, ignore_errors=True)
        run = make_run("", quick=True)
    else:
        folder = os.path.join(args.folder, "lora")
        run = make_run(make_model(os.path.abspath(args.folder)), quick=False)

    one_run = functools.partial(learn, sides=all_settings())
    runs_of = functools.partial(learn_all, run, folder=folder, learn=one_run)
    chosen, rate_table = choose_rates(runs_of)
    runs = {side: [] for side in SIDES}
    for seed in range(1, seeds):
        for side, rate in chosen.items():
            runs[side] += runs_of([(seed, name_of(side, rate))])
    save(args, "lora", draw(runs), learned_table(runs, chosen), rate_table)


if __name__ == "__main__":
    main()
