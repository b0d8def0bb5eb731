"""Does noise on the advantages speed up the start?   python studies/advantage_noise.py

The proposal: add noise with variance 1e-4 (standard deviation 0.01) to the standardised advantages,
so that the loss is not 0, and learn "in 15 steps instead of 100". The study counts the steps until
the mean reward of 3 steps reaches a threshold, with and without a warmup of the learning rate. The
loss is reduced by `sequence`, because then it is 0 without the noise.
"""

from functools import partial

import common
import matplotlib.pyplot as plt
import numpy as np

import grpo

THRESHOLD = 0.8
NOISES = (0.0, 0.01, 0.1)
HEADER = (
    f"warmup, steps | noise, std | steps to reward {THRESHOLD} (95 %) | difference to no noise "
    "(95 %) | not reached | mean abs(loss) at step 1"
)


def run(limit, noise, warmup, seed):
    cfg = grpo.Config(seed=seed)

    def add_noise(policy, samples, step):  # the same as variants/advantage_noise.patch
        values = grpo.generator(cfg, 3, step).normal(0.0, noise, len(samples))
        for sample, value in zip(samples, values, strict=True):
            sample.advantages += value

    options = dict(warmup_steps=warmup, seed=seed, max_steps=limit, loss_reduction="sequence")
    return common.train(add_noise, stop=reached, **options)


def reached(metrics):
    return common.steps_to(THRESHOLD, metrics) < np.inf


def main():
    args = common.arguments(__doc__)
    seeds, limit = range(10), 100
    warmups, noises = (0, 20), NOISES
    if args.quick:
        seeds, limit = range(1), 3
        warmups, noises = (0,), (0.0, 0.1)
    settings = common.grid(noises, warmups)
    results = common.scan(partial(run, limit), settings, seeds, args.jobs)

    figure, axes = plt.subplots(1, 2, figsize=(10, 4.8), layout="constrained")
    table = [HEADER]
    sides, labels = [], []
    for i, warmup in enumerate(warmups):
        first = i * (len(noises) + 1)
        axes[0].text(first + 1, 0.5, f"warmup {warmup}", ha="center")
        for j, (noise, colour) in enumerate(zip(noises, common.ordered(len(noises)), strict=True)):
            runs = results[noise, warmup]
            steps = [min(limit, common.steps_to(THRESHOLD, run)) for run in runs]
            loss = np.mean([abs(run[0]["loss"]) for run in runs])
            # the only certain effect of the noise: the loss that is printed
            assert (loss < 1e-6) == (noise == 0), "the first loss is 0 without noise, and only then"

            labels.append(f"{noise:g}")
            style = dict(label=f"noise {noise:g}, warmup {warmup}", color=colour)
            style["ls"] = "--" if warmup else "-"
            sides.append((first + j, steps, runs, style))
            if noise == 0:
                without = steps
            cells = [warmup, noise, common.span(steps, 1), common.difference(steps, without)]
            missed = sum(not reached(run) for run in runs)
            table.append([*cells, f"{missed} of {len(seeds)}", f"{loss:.0e}"])
    common.draw_steps_to_reward(figure, axes, sides, THRESHOLD, "noise, std", spread=0.25)
    axes[0].set_xticks([x for x, *_ in sides], labels)
    common.save(args, "advantage_noise", figure, table)


if __name__ == "__main__":
    main()
