"""Is the slow start the warmup, and does noise on the advantages help?   studies/advantage_noise.py

Counts the steps until the mean reward of 3 steps reaches a threshold.

(a) With noise on the standardized advantages, with a warmup and without. The noise was proposed to
    make the loss nonzero, and to learn "in 15 steps instead of 100". The reduction is `sequence`.
(b) With a linear warmup. If progress depends only on the sum of the learning rates so far, and a
    run needs s steps without warmup, it needs about sqrt(2 w s) with a warmup of w > s steps.
"""

import common
import numpy as np

import grpo

THRESHOLD = 0.8
HEADER = (
    f"warmup, steps | noise, std | steps to reward {THRESHOLD} (95 %) | predicted | difference to "
    "no noise, or no warmup (95 %) | not reached | mean abs(loss) at step 1 | rewards of the first "
    "5 steps"
)


def run(limit, reduction, noise, warmup, seed):
    def add_noise(policy, samples, step):  # the same as variants/advantage_noise.patch
        generator = np.random.default_rng((seed, 3, step, 0))
        for sample in samples:
            sample.advantages += generator.normal(0.0, noise)

    options = dict(warmup_steps=warmup, seed=seed, max_steps=limit, loss_reduction=reduction)
    return common.train(add_noise, stop=reached, **options)


def reached(metrics):
    return common.steps_to(THRESHOLD, metrics) < np.inf


def predicted_steps(warmup, full_steps):
    """Steps until the learning rates add up to the sum of `full_steps` steps without warmup."""
    rates, step = 0.0, 0
    while rates < full_steps - 1e-9:
        step += 1
        rates += min(1.0, step / max(1, warmup))
    return step


def compare(args, name: str, results: dict, limit: int) -> None:
    """Saves a figure and a table. results: {(noise, warmup): runs}, without warmup first."""
    table, sides, steps = [HEADER], {}, {}
    for noise, warmup in results:
        runs = results[noise, warmup]
        first_rate = grpo.BUNDLED["learning_rate"] / max(1, warmup)
        assert np.allclose([run[0]["learning_rate"] for run in runs], first_rate, rtol=1e-6)
        loss = np.mean([abs(run[0]["loss"]) for run in runs])
        steps[noise, warmup] = [min(limit, common.steps_to(THRESHOLD, run)) for run in runs]
        predicted = predicted_steps(warmup, np.mean(steps[noise, 0]))
        base = steps[0.0, 0]
        if noise > 0:
            base = steps[0.0, warmup]
        row = [warmup, noise, common.span(steps[noise, warmup], 1), predicted]
        row.append(common.difference(steps[noise, warmup], base))
        missed = sum(not reached(run) for run in runs)
        first_rewards = np.mean([[m["reward"] for m in run[:5]] for run in runs])
        table.append([*row, f"{missed} of {len(runs)}", f"{loss:.0e}", f"{first_rewards:.2f}"])
        sides[f"noise {noise:g}, warmup {warmup}"] = runs

    panels = [("reward, until the first seed reaches 0.8", "reward", sides)]
    common.save(args, name, panels, table)


if __name__ == "__main__":
    args = common.arguments(__doc__)
    noises, warmups, limit = (0.0, 0.01, 0.1), (0, 10, 50, 100), 120
    ten, five = range(10), range(5)
    with_noise = [(noise, warmup) for warmup in (0, 20) for noise in noises]
    if args.quick:
        with_noise, warmups, limit = [(0.0, 0), (0.1, 0)], (0, 10), 2
        ten = five = range(1)
    noisy = common.scan(run, (limit, "sequence"), with_noise, ten, args.jobs)
    for (noise, _), runs in noisy.items():
        # the only certain effect of the noise is on the printed loss
        silent = [abs(run[0]["loss"]) < 1e-6 for run in runs]
        assert silent == [noise == 0] * len(runs), "the first loss is 0 without noise, only then"
    compare(args, "advantage_noise", noisy, limit)
    warm = common.scan(run, (limit, "token"), common.grid([0.0], warmups), five, args.jobs)
    compare(args, "warmup", warm, limit)
