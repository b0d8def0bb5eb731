"""Does noise on the advantages speed up the start?   python studies/advantage_noise.py

The proposal: add noise with variance 1e-4 (standard deviation 0.01) to the standardised advantages,
so that the loss is not 0, and learn "in 15 steps instead of 100". The study counts the steps until
the mean reward of 3 steps reaches a threshold, with and without a warmup of the learning rate. The
loss is reduced by `sequence`, because then it is 0 without the noise.
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
NOISES = (0.0, 0.01, 0.1)
HEADER = (
    f"warmup, steps | noise, std | steps to reward {THRESHOLD} | 95 % interval | "
    "difference to no noise | p (permutation) | not reached | mean abs(loss) at step 1"
)


def run(noise, warmup, seed, limit):
    def reached(history):
        return steps_to(THRESHOLD, history) < np.inf

    def add_noise(run, step, samples):  # the same as variants/advantage_noise.patch
        values = grpo.generator(run.cfg, 3, step).normal(0.0, noise, len(samples))
        for sample, value in zip(samples, values, strict=True):
            sample.advantages += value

    options = dict(warmup_steps=warmup, seed=seed, max_steps=limit, loss_reduction="sequence")
    return train(before=add_noise, stop=reached, **options)


def difference(steps, others, rng) -> str:
    """The difference of the means, with its 95 % bootstrap interval, as text."""
    means = rng.choice(steps, (10_000, len(steps))).mean(1)
    other_means = rng.choice(others, (10_000, len(others))).mean(1)
    low, high = np.quantile(means - other_means, (0.025, 0.975))
    return f"{np.mean(steps) - np.mean(others):+.1f} ({low:+.1f} to {high:+.1f})"


def main():
    args = arguments(__doc__)
    seeds, limit = range(10), 100
    warmups, noises = (0, 20), NOISES
    if args.quick:
        seeds, limit = range(1), 3
        warmups, noises = (0,), (0.0, 0.1)

    results = scan(run, grid(noises, warmups, seeds, [limit]), args.jobs)
    runs, steps, losses = {}, {}, {}
    for key in grid(noises, warmups):
        runs[key] = [results[*key, seed, limit] for seed in seeds]
        steps[key] = [min(limit, steps_to(THRESHOLD, h)) for h in runs[key]]
        losses[key] = np.mean([abs(h[0]["loss"]) for h in runs[key]])
    # the only certain effect of the noise: the loss that is printed
    for (noise, _), loss in losses.items():
        assert (loss < 1e-6) == (noise == 0), (
            "the first loss must be 0 without noise, and only then"
        )

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4.8), layout="constrained")
    table = [HEADER]
    ticks, labels = [], []
    rng = np.random.default_rng(0)
    for i, warmup in enumerate(warmups):
        first = i * (len(noises) + 1)
        left.text(first + 1, 0.5, f"warmup {warmup}", ha="center")
        for j, (noise, colour) in enumerate(zip(noises, ordered(len(noises)), strict=True)):
            key = noise, warmup
            x = first + j
            ticks.append(x)
            labels.append(f"{noise:g}")
            spread = rng.uniform(-0.25, 0.25, len(seeds))
            draw_steps_to_reward(left, x, steps[key], colour, x + spread)
            style = dict(color=colour, ls="--" if warmup else "-")
            label = f"noise {noise:g}, warmup {warmup}"
            band(right, until_one_stops(runs[key]), "reward", label=label, **style)

            mean, low, high = interval(steps[key])
            cells = [warmup, noise, f"{mean:.1f}", f"{low:.1f} to {high:.1f}"]
            if noise:
                cells.append(difference(steps[key], steps[0.0, warmup], rng))
                cells.append(f"{permutation_test(steps[key], steps[0.0, warmup]):.2f}")
            else:
                cells += ["", ""]
            missed = sum(steps_to(THRESHOLD, h) == np.inf for h in runs[key])
            table.append([*cells, f"{missed} of {len(seeds)}", f"{losses[key]:.0e}"])
    left.set(title=f"until the mean reward of 3 steps is {THRESHOLD}", ylabel="steps")
    left.set(xlabel="noise, std", ylim=0)
    left.set_xticks(ticks, labels)
    right.set(title="until the first seed is there", xlabel="step")
    right.set_ylabel("reward, mean of the samples")
    legend(figure, right, len(warmups))
    figure.supxlabel(
        f"{len(seeds)} seeds;  small dots: seeds;  "
        "whiskers: 95 % bootstrap interval of the mean;  bands: ± 1 standard error"
    )
    save(args, "advantage_noise", figure, table)


if __name__ == "__main__":
    main()
