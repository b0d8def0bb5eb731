"""A sampler that is not the policy.   python studies/off_policy.py

The samples come from the policy itself, from bfloat16 arithmetic, or from weights that are 4 steps
old: each with and without truncated importance weights (cap 2) to correct for that.
"""

import copy
import dataclasses

import numpy as np
from common import (
    arguments,
    band,
    grid,
    legend,
    mean_with_whiskers,
    permutation_test,
    plt,
    save,
    scan,
    span,
    train,
)

import grpo

SAMPLERS = ("same", "bf16", "4 steps old")
DELAY = 4  # steps
CAPS = (0.0, 2.0)  # 0: no importance weights


def mismatch(sampler, cap, seed, steps):
    """A run with rollouts by another sampler than the policy."""
    weights = []  # before step 1, 2, ...

    def use_sampler(run, model, cfg):
        run.sampler = grpo.HFSampler(model, run.sampler.stop_ids, cfg)

    def before(run, step, samples):
        if step == 1 and sampler == "bf16":
            use_sampler(run, run.model, dataclasses.replace(run.cfg, dtype="bfloat16"))
        if step == 1 and "old" in sampler:
            use_sampler(run, copy.deepcopy(run.model), run.cfg)
        weights.append(copy.deepcopy(run.model.state_dict()))

    def after(run, step, samples):
        if "old" in sampler:
            del weights[: -DELAY - 1]
            run.sampler.model.load_state_dict(weights[max(0, len(weights) - DELAY)])
        if step == steps:  # the policy itself is evaluated
            use_sampler(run, run.model, run.cfg)

    return train(before, after, evals=(steps,), tis_cap=cap, seed=seed, max_steps=steps)


def mean_rewards(histories) -> list:
    """The mean reward of each run, over all steps."""
    return [np.mean([m["reward"] for m in h]) for h in histories]


def draw(runs: dict) -> tuple:
    """The figure, and the table. runs: {(sampler, cap): histories}."""
    figure, axes = plt.subplots(1, 3, figsize=(10, 4), layout="constrained")
    samplers = list(dict.fromkeys(sampler for sampler, _ in runs))
    table = [
        "sampler | importance weights | mean abs(log-probability gap) | reward, mean of all steps "
        "(95 %) | reward, last 3 steps (95 %) | accuracy (95 %) | p of the first"
    ]
    for (sampler, cap), histories in runs.items():
        i = samplers.index(sampler)
        rewards = mean_rewards(histories)
        axis, name, p, x, dot = axes[0], "none", "", i - 0.12, dict(fmt="s", mfc="white")
        if cap:
            axis, name, x, dot = axes[1], f"cap {cap:g}", i + 0.12, dict(fmt="o")
            p = f"{permutation_test(mean_rewards(runs[sampler, 0.0]), rewards):.2f}"
        band(axis, histories, "reward", color=f"C{i}", label=sampler)
        mean_with_whiskers(axes[2], x, rewards, capsize=3, color=f"C{i}", **dot)
        gap = np.mean([[m["sampler_gap"] for m in h] for h in histories])
        ends = [np.mean([m["reward"] for m in h[-3:]]) for h in histories]
        accuracies = [h[-1]["eval_accuracy"] for h in histories]
        table.append([sampler, name, f"{gap:.1e}", span(rewards), span(ends), span(accuracies), p])
    for axis, title in zip(axes, ("no importance weights", "truncated weights"), strict=False):
        axis.set(title=title, xlabel="rollout", ylabel="reward, mean of the samples", ylim=(0, 1))
    legend(figure, axes[0], 3, title="the sampler's weights")
    axes[2].set_xticks(range(len(samplers)), [s.replace(" step", "\nstep") for s in samplers])
    axes[2].set(title="hollow: no importance weights", ylabel="reward, mean of all rollouts")
    return figure, table


def main():
    args = arguments(__doc__)
    seeds, samplers, steps = range(5), SAMPLERS, 14
    if args.quick:
        seeds, samplers, steps = range(1), ("4 steps old",), 3
    results = scan(mismatch, grid(samplers, CAPS, seeds, [steps]), args.jobs)
    runs = {}
    for sampler, cap in grid(samplers, CAPS):
        runs[sampler, cap] = [results[sampler, cap, seed, steps] for seed in seeds]
        if "old" in sampler:
            for history in runs[sampler, cap]:
                assert all(m["sampler_gap"] > 1e-4 for m in history[1:]), "the weights are not old"
    figure, table = draw(runs)
    figure.supxlabel(
        f"means of {len(seeds)} seeds;  bands: ± 1 standard error;  "
        "whiskers: 95 % bootstrap interval"
    )
    save(args, "off_policy", figure, table)


if __name__ == "__main__":
    main()
