"""Off-policy: many updates per rollout, and a sampler that is not the policy.   python studies/off_policy.py

(a) 1, 2, 4, 8 passes over each rollout, with clipping (0.2 / 0.28) and without: clip fraction, ratio, reward.
(b) One pass, but the samples come from bf16 arithmetic or from weights that are k steps old, with and without
    truncated importance weights (cap 2) for the difference.
"""

import copy
import dataclasses

import numpy as np
from common import (
    CPU,
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
    train,
)

import grpo

EPOCHS = (1, 2, 4, 8)
SAMPLERS = ("same", "bf16", "4 steps old")


def reuse(epochs, clip, seed, steps):
    def after(run, step, samples):
        grpo.compute_logps(run.policy, samples, "new_logps", run.cfg, CPU)
        if (
            epochs == 1
        ):  # there update() keeps no old log-probabilities: the sampler's are the same but for rounding
            log_ratio = np.concatenate([s.new_logps - s.sampler_logps for s in samples])
        else:
            log_ratio = np.concatenate([s.new_logps - s.old_logps for s in samples])
        return dict(
            log_ratio=float(np.abs(log_ratio).mean()),
            ratio_q99=float(np.exp(np.quantile(log_ratio, 0.99))),
        )

    options = {} if clip else dict(clip_low=1.0, clip_high=1e6)
    return train(
        after=after, evals=(steps,), num_epochs=epochs, seed=seed, max_steps=steps, **options
    )


def mismatch(sampler, cap, seed, steps):
    weights = []  # before step 1, 2, ...

    def before(run, step, samples):
        if step == 1 and sampler == "bf16":
            cfg = dataclasses.replace(run.cfg, dtype="bfloat16")
            run.sampler = grpo.HFSampler(run.model, run.sampler.eos_ids, run.sampler.pad_id, cfg)
        elif step == 1 and sampler != "same":
            stale = copy.deepcopy(run.model)
            run.sampler = grpo.HFSampler(stale, run.sampler.eos_ids, run.sampler.pad_id, run.cfg)
        weights.append(copy.deepcopy(run.model.state_dict()))

    def after(run, step, samples):
        if "old" in sampler:
            delay = int(sampler.split()[0])
            weights[: -delay - 1] = []
            run.sampler.model.load_state_dict(weights[max(0, len(weights) - delay)])
        if step == steps:  # the policy itself is evaluated
            run.sampler = grpo.HFSampler(
                run.model, run.sampler.eos_ids, run.sampler.pad_id, run.cfg
            )
        return {}

    return train(before, after, evals=(steps,), tis_cap=cap, seed=seed, max_steps=steps)


def summary(histories):
    """Reward over all steps, at the end, and accuracy, each with its interval."""
    rewards = np.array([[m["reward"] for m in h] for h in histories])  # [seeds, steps]
    values = rewards.mean(1), rewards[:, -3:].mean(1), [h[-1]["eval_accuracy"] for h in histories]
    return rewards.mean(1), ["{:.3f} ({:.3f} to {:.3f})".format(*interval(x)) for x in values]


def main():
    args = arguments(__doc__)
    seeds, steps, late, epochs_, samplers = range(5), 9, 14, EPOCHS, SAMPLERS
    if args.quick:
        seeds, steps, late, epochs_, samplers = range(1), 1, 3, (2,), ("4 steps old",)
    reused = scan(reuse, grid(epochs_, (True, False), seeds, [steps]), args.jobs)
    stale = scan(mismatch, grid(samplers, (0.0, 2.0), seeds, [late]), args.jobs)
    assert all(
        m["sampler_gap"] > 1e-4 for (name, *_), h in stale.items() if "old" in name for m in h[1:]
    )

    figure = plt.figure(figsize=(10, 8), layout="constrained")
    top, bottom = figure.subfigures(2, 1)
    axes = np.array([top.subplots(1, 3), bottom.subplots(1, 3)])
    head = [
        "reward, mean of all steps (95 %)",
        "reward, last 3 steps (95 %)",
        "accuracy (95 %)",
        "p of the first",
    ]
    first = [
        [
            "updates per rollout",
            "clipping",
            "clip fraction",
            "mean abs(log ratio)",
            "ratio, 99 % quantile",
            *head,
        ]
    ]
    for epochs, colour in zip(epochs_, ordered(len(epochs_)), strict=True):
        areas = {}
        for clip in (True, False):
            histories = [reused[epochs, clip, s, steps] for s in seeds]
            style = dict(
                color=colour,
                ls="-" if clip else ":",
                label=f"{epochs}" + ("" if clip else ", no clipping"),
            )
            for axis, key in zip(
                axes[0], ("clip_ratio/region_mean", "log_ratio", "reward"), strict=True
            ):
                if key != "clip_ratio/region_mean" or clip:
                    band(axis, histories, key, **style)
            areas[clip], text = summary(histories)
            keys = ("clip_ratio/region_mean", "log_ratio", "ratio_q99")
            means = [f"{np.mean([[m[k] for m in h] for h in histories]):.3f}" for k in keys]
            p = "" if clip else f"{permutation_test(areas[True], areas[False]):.2f}"
            first.append([epochs, "yes" if clip else "no", *means, *text, p])
    titles = (
        ("clip fraction", "share of the tokens"),
        ("ratio after the updates", "mean |log ratio|, nats per token"),
    )
    for axis, (title, ylabel) in zip(
        axes[0], (*titles, ("reward", "mean of the samples")), strict=True
    ):
        axis.set(title=f"(a) {title}", xlabel="rollout", ylabel=ylabel)
    legend(top, axes[0, 2], 4, title="updates per rollout")
    second = [["sampler", "importance weights", "mean abs(log-probability gap)", *head]]
    for i, sampler in enumerate(samplers):
        areas = {}
        for cap, axis in ((0.0, axes[1, 0]), (2.0, axes[1, 1])):
            histories = [stale[sampler, cap, s, late] for s in seeds]
            band(axis, histories, "reward", color=f"C{i}", label=sampler)
            axis.set(
                title=f"(b) {'truncated' if cap else 'no'} importance weights",
                xlabel="rollout",
                ylim=(0, 1),
            )
            axis.set_ylabel("reward, mean of the samples")
            areas[cap], text = summary(histories)
            gap = np.mean([[m["sampler_gap"] for m in h] for h in histories])
            p = f"{permutation_test(areas[0.0], areas[2.0]):.2f}" if cap else ""
            second.append([sampler, "cap 2" if cap else "none", f"{gap:.1e}", *text, p])
            mean, low, high = interval(areas[cap])
            style = dict(
                fmt="o" if cap else "s", mfc=None if cap else "white", capsize=3, color=f"C{i}"
            )
            axes[1, 2].errorbar(
                i + (0.12 if cap else -0.12), mean, [[mean - low], [high - mean]], **style
            )
    legend(bottom, axes[1, 0], 3, title="the sampler's weights")
    axes[1, 2].set_xticks(range(len(samplers)), [s.replace(" step", "\nstep") for s in samplers])
    axes[1, 2].set(title="(b) hollow: no importance weights", ylabel="reward, mean of all rollouts")
    figure.supxlabel(
        f"means of {len(seeds)} seeds;  bands: ± 1 standard error;  whiskers: 95 % bootstrap interval"
    )
    save(args, "off_policy", figure, first, second)


if __name__ == "__main__":
    main()
