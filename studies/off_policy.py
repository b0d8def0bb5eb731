"""Many updates per rollout, and a sampler that is not the policy.   python studies/off_policy.py

(a) 1, 2, 4 and 8 passes over each rollout, with clipping (0.2 / 0.28) and without it: clip
    fraction, ratio, reward.
(b) One pass, but the samples come from bfloat16 arithmetic or from weights that are k steps old,
    with and without truncated importance weights (cap 2) to correct for that.
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
    ordered,
    permutation_test,
    plt,
    save,
    scan,
    span,
    train,
)

import grpo

EPOCHS = (1, 2, 4, 8)
SAMPLERS = ("same", "bf16", "4 steps old")
PANELS = {  # of part (a): title, y label
    "clip_ratio/region_mean": ("clip fraction", "share of the tokens"),
    "log_ratio": ("ratio after the updates", "mean |log ratio|, nats per token"),
    "reward": ("reward", "mean of the samples"),
}
SUMMARY = (
    "reward, mean of all steps (95 %) | reward, last 3 steps (95 %) | accuracy (95 %) | "
    "p of the first"
)


def reuse(epochs, clip, seed, steps):
    """(a) `epochs` updates on each rollout."""

    def after(run, step, samples):
        grpo.add_logps("new_logps", run.policy, samples, run.cfg)
        log_ratio = []
        for s in samples:
            # with one epoch the update needs no old_logps: but for rounding they are the sampler's
            old_logps = s.sampler_logps if epochs == 1 else s.old_logps
            log_ratio.append(s.new_logps - old_logps)
        log_ratio = np.concatenate(log_ratio)
        ratio_q99 = float(np.exp(np.quantile(log_ratio, 0.99)))
        return dict(log_ratio=float(np.abs(log_ratio).mean()), ratio_q99=ratio_q99)

    options = dict(num_epochs=epochs, seed=seed, max_steps=steps)
    if not clip:
        options.update(clip_low=1.0, clip_high=1e6)
    return train(after=after, evals=(steps,), **options)


def mismatch(sampler, cap, seed, steps):
    """(b) Rollouts by another sampler than the policy."""
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
            delay = int(sampler.split()[0])
            del weights[: -delay - 1]
            run.sampler.model.load_state_dict(weights[max(0, len(weights) - delay)])
        if step == steps:  # the policy itself is evaluated
            use_sampler(run, run.model, run.cfg)

    return train(before, after, evals=(steps,), tis_cap=cap, seed=seed, max_steps=steps)


def mean_rewards(histories) -> list:
    """The mean reward of each run, over all steps."""
    return [np.mean([m["reward"] for m in h]) for h in histories]


def summary(histories) -> list[str]:
    """The cells of SUMMARY but the p."""
    ends = [np.mean([m["reward"] for m in h[-3:]]) for h in histories]
    accuracies = [h[-1]["eval_accuracy"] for h in histories]
    return [span(mean_rewards(histories)), span(ends), span(accuracies)]


def draw_reuse(figure, runs: dict) -> list:
    """Part (a): a row of panels, and the table. runs: {(epochs, clipping): histories}."""
    axes = figure.subplots(1, 3)
    numbers = list(dict.fromkeys(epochs for epochs, _ in runs))
    colours = dict(zip(numbers, ordered(len(numbers)), strict=True))
    table = [
        "updates per rollout | clipping | clip fraction | mean abs(log ratio) | "
        f"ratio, 99 % quantile | {SUMMARY}"
    ]
    for (epochs, clip), histories in runs.items():
        if clip:
            style = dict(color=colours[epochs], ls="-", label=f"{epochs}")
        else:
            style = dict(color=colours[epochs], ls=":", label=f"{epochs}, no clipping")
        for axis, key in zip(axes, PANELS, strict=True):
            if clip or key != "clip_ratio/region_mean":
                band(axis, histories, key, **style)
        cells = [epochs, "yes" if clip else "no"]
        for key in ("clip_ratio/region_mean", "log_ratio", "ratio_q99"):
            cells.append(f"{np.mean([[m[key] for m in h] for h in histories]):.3f}")
        p = ""
        if not clip:
            clipped = mean_rewards(runs[epochs, True])
            p = f"{permutation_test(clipped, mean_rewards(histories)):.2f}"
        table.append([*cells, *summary(histories), p])
    for axis, (title, ylabel) in zip(axes, PANELS.values(), strict=True):
        axis.set(title=f"(a) {title}", xlabel="rollout", ylabel=ylabel)
    legend(figure, axes[2], 4, title="updates per rollout")
    return table


def draw_mismatch(figure, runs: dict) -> list:
    """Part (b): a row of panels, and the table. runs: {(sampler, cap): histories}."""
    axes = figure.subplots(1, 3)
    samplers = list(dict.fromkeys(sampler for sampler, _ in runs))
    table = [f"sampler | importance weights | mean abs(log-probability gap) | {SUMMARY}"]
    for (sampler, cap), histories in runs.items():
        i = samplers.index(sampler)
        rewards = mean_rewards(histories)
        gap = np.mean([[m["sampler_gap"] for m in h] for h in histories])
        if cap:
            axis, name = axes[1], f"cap {cap:g}"
            p = f"{permutation_test(mean_rewards(runs[sampler, 0.0]), rewards):.2f}"
            dot = dict(fmt="o")
        else:
            axis, name, p = axes[0], "none", ""
            dot = dict(fmt="s", mfc="white")
        band(axis, histories, "reward", color=f"C{i}", label=sampler)
        x = i + (0.12 if cap else -0.12)
        mean_with_whiskers(axes[2], x, rewards, capsize=3, color=f"C{i}", **dot)
        table.append([sampler, name, f"{gap:.1e}", *summary(histories), p])
    titles = ("(b) no importance weights", "(b) truncated importance weights")
    for axis, title in zip(axes, titles, strict=False):
        axis.set(title=title, xlabel="rollout", ylabel="reward, mean of the samples", ylim=(0, 1))
    legend(figure, axes[0], 3, title="the sampler's weights")
    axes[2].set_xticks(range(len(samplers)), [s.replace(" step", "\nstep") for s in samplers])
    axes[2].set(title="(b) hollow: no importance weights", ylabel="reward, mean of all rollouts")
    return table


def main():
    args = arguments(__doc__)
    seeds, epochs, steps = range(5), EPOCHS, 9
    samplers, mismatch_steps = SAMPLERS, 14
    if args.quick:
        seeds, epochs, steps = range(1), (2,), 1
        samplers, mismatch_steps = ("4 steps old",), 3

    results = scan(reuse, grid(epochs, (True, False), seeds, [steps]), args.jobs)
    reused = {}
    for key in grid(epochs, (True, False)):
        reused[key] = [results[*key, seed, steps] for seed in seeds]
    results = scan(mismatch, grid(samplers, (0.0, 2.0), seeds, [mismatch_steps]), args.jobs)
    mismatched = {}
    for key in grid(samplers, (0.0, 2.0)):
        mismatched[key] = [results[*key, seed, mismatch_steps] for seed in seeds]
        if "old" in key[0]:
            for history in mismatched[key]:
                assert all(m["sampler_gap"] > 1e-4 for m in history[1:]), "the weights are not old"

    figure = plt.figure(figsize=(10, 8), layout="constrained")
    top, bottom = figure.subfigures(2, 1)
    tables = draw_reuse(top, reused), draw_mismatch(bottom, mismatched)
    figure.supxlabel(
        f"means of {len(seeds)} seeds;  bands: ± 1 standard error;  "
        "whiskers: 95 % bootstrap interval"
    )
    save(args, "off_policy", figure, *tables)


if __name__ == "__main__":
    main()
