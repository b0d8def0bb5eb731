"""Does noise on the advantages speed up the start?   python studies/advantage_noise.py

The proposal: add noise of variance 1e-4 (standard deviation 0.01) after standardisation, so that the loss is not 0,
and learn "in 15 steps instead of 100". Counted here: steps until the mean reward of 3 steps reaches the threshold,
with and without learning-rate warmup, under `sequence` reduction, where the loss is 0 without the noise.
"""

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

THRESHOLD = 0.8
NOISES = (0.0, 0.01, 0.1)


def run(noise, warmup, seed, limit):
    options = dict(advantage_noise=noise, warmup_steps=warmup, seed=seed, max_steps=limit)
    return train(
        stop=lambda h: steps_to(THRESHOLD, h) < np.inf, loss_reduction="sequence", **options
    )


def main():
    args = arguments(__doc__)
    seeds, limit, warmups, noises = range(10), 100, (0, 20), NOISES
    if args.quick:
        seeds, limit, warmups, noises = range(1), 3, (0,), (0.0, 0.1)
    found = scan(run, grid(noises, warmups, seeds, [limit]), args.jobs)
    runs = {(n, w): [found[n, w, s, limit] for s in seeds] for n in noises for w in warmups}
    reached = {
        key: [min(limit, steps_to(THRESHOLD, h)) for h in histories]
        for key, histories in runs.items()
    }
    # the one certain effect: the value that is printed
    loss = {key: np.mean([abs(h[0]["loss"]) for h in histories]) for key, histories in runs.items()}
    assert all((value < 1e-6) == (noise == 0) for (noise, _), value in loss.items())

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4.8), layout="constrained")
    table = [
        [
            "warmup, steps",
            "noise, std",
            f"steps to reward {THRESHOLD}",
            "95 % interval",
            "difference to no noise",
        ]
    ]
    table[0] += ["p (permutation)", "not reached", "mean abs(loss) at step 1"]
    rng = np.random.default_rng(0)
    for i, warmup in enumerate(warmups):
        for j, noise in enumerate(noises):
            steps, none = reached[noise, warmup], reached[0.0, warmup]
            mean, low, high = interval(steps)
            x, colour = i * (len(noises) + 1) + j, ordered(len(noises))[j]
            left.errorbar(
                x, mean, [[mean - low], [high - mean]], fmt="o", capsize=4, color=colour, zorder=3
            )
            left.scatter(
                x + rng.uniform(-0.25, 0.25, len(steps)), steps, s=12, alpha=0.4, color=colour
            )
            versus = ["", ""]
            if noise:
                shifts = rng.choice(steps, (10_000, len(steps))).mean(1) - rng.choice(
                    none, (10_000, len(none))
                ).mean(1)
                span = np.quantile(shifts, (0.025, 0.975))
                versus = [f"{mean - np.mean(none):+.1f} ({span[0]:+.1f} to {span[1]:+.1f})"]
                versus.append(f"{permutation_test(steps, none):.2f}")
            failed = sum(steps_to(THRESHOLD, h) == np.inf for h in runs[noise, warmup])
            text = [f"{mean:.1f}", f"{low:.1f} to {high:.1f}", *versus, f"{failed} of {len(steps)}"]
            table.append([warmup, noise, *text, f"{loss[noise, warmup]:.0e}"])
            shown = min(len(h) for h in runs[noise, warmup])  # while all seeds still run
            style = dict(
                color=colour,
                ls="-" if warmup == 0 else "--",
                label=f"noise {noise:g}, warmup {warmup}",
            )
            band(right, [h[:shown] for h in runs[noise, warmup]], "reward", **style)
    left.set(
        title=f"until the mean reward of 3 steps is {THRESHOLD}",
        ylabel="steps",
        xlabel="noise, std",
    )
    ticks = [
        (i * (len(noises) + 1) + j, f"{n:g}")
        for i in range(len(warmups))
        for j, n in enumerate(noises)
    ]
    left.set_xticks(*zip(*ticks, strict=True))
    left.set_ylim(0)
    for i, warmup in enumerate(warmups):
        left.text(i * (len(noises) + 1) + 1, 0.5, f"warmup {warmup}", ha="center")
    right.set(
        title="until the first seed is there", xlabel="step", ylabel="reward, mean of the samples"
    )
    legend(figure, right, len(warmups))
    text = "small dots: seeds;  whiskers: 95 % bootstrap interval of the mean;  bands: ± 1 standard error"
    figure.supxlabel(f"{len(seeds)} seeds;  {text}")
    save(args, "advantage_noise", figure, table)


if __name__ == "__main__":
    main()
