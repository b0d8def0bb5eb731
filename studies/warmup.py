"""Is the slow start the learning-rate warmup?   python studies/warmup.py

Counts the steps until the mean reward of 3 steps reaches a threshold, with a linear warmup of 0 to
100 steps. If progress depends only on the sum of the learning rates so far, and a run needs s steps
without warmup, then with a warmup of w > s steps a run needs about sqrt(2 w s). That prediction
uses the runs without warmup only.
"""

from functools import partial

import common
import matplotlib.pyplot as plt
import numpy as np

import grpo

THRESHOLD = 0.8
HEADER = (
    f"warmup, steps | steps to reward {THRESHOLD} (95 %) | predicted | difference to warmup 0 "
    "(95 %) | not reached | rewards of the first 5 steps"
)


def run(limit, warmup, seed):
    return common.train(stop=reached, warmup_steps=warmup, seed=seed, max_steps=limit)


def reached(metrics):
    return common.steps_to(THRESHOLD, metrics) < np.inf


def predicted_steps(warmup, full_steps):
    """Steps until the learning rates add up to those of `full_steps` steps without warmup."""
    rates, step = 0.0, 0
    while rates < full_steps - 1e-9:
        step += 1
        rates += min(1.0, step / max(1, warmup))
    return step


def main():
    args = common.arguments(__doc__)
    seeds, limit, warmups = range(5), 120, (0, 10, 50, 100)
    if args.quick:
        seeds, limit, warmups = range(1), 2, (0, 10)
    results = common.scan(partial(run, limit), common.grid(warmups), seeds, args.jobs)

    figure, axes = plt.subplots(1, 2, figsize=(10, 4.4), layout="constrained")
    table = [HEADER]
    steps, predictions, sides = {}, {}, []
    for ((warmup,), runs), colour in zip(
        results.items(), common.ordered(len(warmups)), strict=True
    ):
        first_rate = grpo.BUNDLED["learning_rate"] / max(1, warmup)
        assert np.allclose([run[0]["learning_rate"] for run in runs], first_rate, rtol=1e-6)
        steps[warmup] = [min(limit, common.steps_to(THRESHOLD, run)) for run in runs]
        predictions[warmup] = predicted_steps(warmup, np.mean(steps[0]))
        sides.append((warmup, steps[warmup], runs, dict(label=f"warmup {warmup}", color=colour)))

        cells = [warmup, common.span(steps[warmup], 1), predictions[warmup]]
        cells.append(common.difference(steps[warmup], steps[0]))
        missed = sum(not reached(run) for run in runs)
        first_rewards = np.mean([[m["reward"] for m in run[:5]] for run in runs])
        table.append([*cells, f"{missed} of {len(seeds)}", f"{first_rewards:.2f}"])
    common.draw_steps_to_reward(figure, axes, sides, THRESHOLD, "warmup, steps")
    axes[0].plot(warmups, predictions.values(), "k:", label="predicted from the sum of the rates")
    axes[0].legend()
    common.save(args, "warmup", figure, table)


if __name__ == "__main__":
    main()
