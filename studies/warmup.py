"""Is the slow start the learning-rate warmup?   python studies/warmup.py

Counts the steps until the mean reward of 3 steps reaches a threshold, with a linear warmup of 0 to
100 steps. If progress depends only on the sum of the learning rates so far, and a run needs s steps
without warmup, then with a warmup of w > s steps a run needs about sqrt(2 w s). That prediction
uses the runs without warmup only.
"""

import numpy as np
from common import (
    arguments,
    band,
    draw_steps_to_reward,
    grid,
    interval,
    legend,
    ordered,
    permutation_test,
    plt,
    save,
    scan,
    steps_to,
    train,
    until_one_stops,
)

import grpo

THRESHOLD = 0.8
HEADER = (
    f"warmup, steps | steps to reward {THRESHOLD} | 95 % interval | predicted | "
    "p against warmup 0 | not reached | rewards of the first 5 steps"
)


def run(warmup, seed, limit):
    def reached(history):
        return steps_to(THRESHOLD, history) < np.inf

    return train(stop=reached, warmup_steps=warmup, seed=seed, max_steps=limit)


def predicted_steps(warmup, full_steps):
    """Steps until the learning rates add up to those of `full_steps` steps without warmup."""
    rates, step = 0.0, 0
    while rates < full_steps - 1e-9:
        step += 1
        rates += min(1.0, step / max(1, warmup))
    return step


def main():
    args = arguments(__doc__)
    seeds, limit, warmups = range(5), 120, (0, 10, 50, 100)
    if args.quick:
        seeds, limit, warmups = range(1), 2, (0, 10)

    results = scan(run, grid(warmups, seeds, [limit]), args.jobs)
    runs, steps = {}, {}
    for warmup in warmups:
        runs[warmup] = [results[warmup, seed, limit] for seed in seeds]
        steps[warmup] = [min(limit, steps_to(THRESHOLD, h)) for h in runs[warmup]]
        for history in runs[warmup]:
            first_rate = grpo.BUNDLED["learning_rate"] / max(1, warmup)
            assert np.isclose(history[0]["learning_rate"], first_rate, rtol=1e-6)
    predictions = {w: predicted_steps(w, np.mean(steps[0])) for w in warmups}

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4.4), layout="constrained")
    table = [HEADER]
    for warmup, colour in zip(warmups, ordered(len(warmups)), strict=True):
        draw_steps_to_reward(left, warmup, steps[warmup], colour, [warmup] * len(seeds))
        shown = until_one_stops(runs[warmup])
        band(right, shown, "reward", color=colour, label=f"warmup {warmup}")

        mean, low, high = interval(steps[warmup])
        p = f"{permutation_test(steps[warmup], steps[0]):.1g}" if warmup else ""
        missed = sum(steps_to(THRESHOLD, h) == np.inf for h in runs[warmup])
        first_rewards = np.mean([[m["reward"] for m in h[:5]] for h in shown])
        cells = [warmup, f"{mean:.1f}", f"{low:.1f} to {high:.1f}", predictions[warmup], p]
        table.append([*cells, f"{missed} of {len(seeds)}", f"{first_rewards:.2f}"])
    left.plot(warmups, predictions.values(), "k:", label="predicted from the sum of the rates")
    left.set(title=f"until the mean reward of 3 steps is {THRESHOLD}", ylim=0)
    left.set(xlabel="warmup, steps", ylabel="steps")
    left.legend()
    right.set(title="until the first seed is there", xlabel="step")
    right.set_ylabel("reward, mean of the samples")
    legend(figure, right, len(warmups))
    figure.supxlabel(
        f"{len(seeds)} seeds;  small dots: seeds;  "
        "whiskers: 95 % bootstrap interval of the mean;  bands: ± 1 standard error"
    )
    save(args, "warmup", figure, table)


if __name__ == "__main__":
    main()
