"""Is the slow start the learning-rate warmup?   python studies/warmup.py

Steps until the mean reward of 3 steps reaches the threshold, for a linear warmup of 0 to 100 steps. If progress is
the sum of the learning rates so far, a run without warmup that needs s steps needs about sqrt(2 w s) with w > s: a
prediction from the runs without warmup alone.
"""

import math

import numpy as np
from common import (
    arguments,
    band,
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
)

import grpo

THRESHOLD = 0.8


def run(warmup, seed, limit):
    options = dict(warmup_steps=warmup, seed=seed, max_steps=limit)
    return train(stop=lambda history: steps_to(THRESHOLD, history) < np.inf, **options)


def predicted(warmup, s):
    """Steps until the learning rates sum up to s full ones."""
    done, n = 0.0, 0
    while done < s - 1e-9:
        n += 1
        done += min(1.0, n / warmup) if warmup else 1.0
    return n


def main():
    args = arguments(__doc__)
    seeds, limit, warmups = (
        (range(1), 2, (0, 10)) if args.quick else (range(5), 120, (0, 10, 50, 100))
    )
    found = scan(run, grid(warmups, seeds, [limit]), args.jobs)
    runs = {w: [found[w, s, limit] for s in seeds] for w in warmups}
    rates = [h[0]["learning_rate"] * max(1, w) for w, histories in runs.items() for h in histories]
    assert np.allclose(rates, grpo.BUNDLED["learning_rate"], rtol=1e-6), (
        "the first step has another rate"
    )
    steps = {
        w: [min(limit, steps_to(THRESHOLD, h)) for h in histories] for w, histories in runs.items()
    }
    guess = {w: predicted(w, np.mean(steps[0])) for w in warmups}

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4.4), layout="constrained")
    table = [
        [
            "warmup, steps",
            f"steps to reward {THRESHOLD}",
            "95 % interval",
            "predicted",
            "p against warmup 0",
        ]
    ]
    table[0] += ["not reached", "rewards of the first 5 steps"]
    for w, colour in zip(warmups, ordered(len(warmups)), strict=True):
        mean, low, high = interval(steps[w])
        left.errorbar(
            w, mean, [[mean - low], [high - mean]], fmt="o", capsize=4, color=colour, zorder=3
        )
        left.scatter([w] * len(steps[w]), steps[w], s=12, alpha=0.4, color=colour)
        shown = min(len(h) for h in runs[w])  # while all seeds still run
        rewards = np.array([[m["reward"] for m in h[:shown]] for h in runs[w]])  # [seeds, steps]
        band(right, [h[:shown] for h in runs[w]], "reward", color=colour, label=f"warmup {w}")
        p = "" if w == 0 else f"{permutation_test(steps[w], steps[0]):.1g}"
        failed = sum(steps_to(THRESHOLD, h) == math.inf for h in runs[w])
        first = f"{rewards[:, :5].mean():.2f}"
        table.append(
            [
                w,
                f"{mean:.1f}",
                f"{low:.1f} to {high:.1f}",
                guess[w],
                p,
                f"{failed} of {len(seeds)}",
                first,
            ]
        )
    left.plot(
        warmups, [guess[w] for w in warmups], "k:", label="predicted from the sum of the rates"
    )
    left.set(
        title=f"until the mean reward of 3 steps is {THRESHOLD}",
        xlabel="warmup, steps",
        ylabel="steps",
    )
    left.set_ylim(0)
    left.legend()
    right.set(
        title="until the first seed is there", xlabel="step", ylabel="reward, mean of the samples"
    )
    legend(figure, right, len(warmups))
    text = "small dots: seeds;  whiskers: 95 % bootstrap interval of the mean;  bands: ± 1 standard error"
    figure.supxlabel(f"{len(seeds)} seeds;  {text}")
    save(args, "warmup", figure, table)


if __name__ == "__main__":
    main()
