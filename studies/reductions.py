"""Sequence, token or constant; standardise or not?   python studies/reductions.py

GRPO, DAPO, Dr. GRPO and GSPO, with two updates per rollout, so that the ratios of GSPO and GRPO
differ. The length bias is measured twice. How hard is a token of a long wrong answer pushed down,
compared with a token of a short one (from the weights in the loss, on real samples)? And do wrong
answers grow longer over training?
"""

import numpy as np
from common import (
    advantage_of,
    arguments,
    bands,
    grid,
    interval,
    legend,
    permutation_test,
    plt,
    ratio_of_means,
    save,
    scan,
    span,
    train,
)

METHODS = {  # name: loss_reduction, scale_rewards, ratio_level
    "GRPO: sequence, group std": ("sequence", "group", "token"),
    "GSPO: sequence ratio, group std": ("sequence", "group", "sequence"),
    "DAPO: token, group std": ("token", "group", "token"),
    "token, no std": ("token", "none", "token"),
    "sequence, no std": ("sequence", "none", "token"),
    "Dr. GRPO: constant, no std": ("constant", "none", "token"),
}
LONG = 12  # tokens: an immediate answer has at most 5, one with thinking at least 20
PANELS = {
    "reward": ("reward", "mean of the samples"),
    "completions/mean_length": ("completion length", "tokens"),
    "wrong_length": ("length of wrong answers", "tokens"),
}
HEADER = (
    "method | accuracy, step 5 (95 %) | accuracy, last | reward, mean of all steps (95 %) | "
    "p (GRPO) | length, last 5 steps | wrong answers: first step | last 5 steps | "
    "push per token, long / short"
)


def push_ratio(wrong: list, reduction: str) -> float:
    """How hard a token of a long wrong answer is pushed down, over the same of a short one."""
    long, short = [], []
    for s in wrong:
        if advantage_of(s) >= 0:
            continue
        n = len(s.completion_ids)
        push = -advantage_of(s)  # up to a factor that all tokens of the step share
        if reduction == "sequence":
            push /= n
        pushes = long if n > LONG else short
        pushes.append(push)
    return ratio_of_means(long, short)


def mean_length(samples: list) -> float:
    if not samples:
        return np.nan
    return float(np.mean([len(s.completion_ids) for s in samples]))


def run(method, seed, steps):
    reduction, scale, level = METHODS[method]

    def before(run, step, samples):
        wrong = [s for s in samples if s.reward < 0.5]
        return dict(wrong_length=mean_length(wrong), push_ratio=push_ratio(wrong, reduction))

    return train(
        before,
        evals=(*range(5, steps, 5), steps),
        seed=seed,
        max_steps=steps,
        loss_reduction=reduction,
        scale_rewards=scale,
        ratio_level=level,
        num_minibatches=2,
    )


def main():
    args = arguments(__doc__)
    seeds, steps, names = range(5), 12, list(METHODS)
    if args.quick:
        seeds, steps, names = range(1), 2, names[:1]

    results = scan(run, grid(names, seeds, [steps]), args.jobs)
    runs = {name: [results[name, seed, steps] for seed in seeds] for name in names}
    rewards = {name: [np.mean([m["reward"] for m in h]) for h in runs[name]] for name in names}

    figure, axes = plt.subplots(2, 2, figsize=(10, 7.4), layout="constrained")
    accuracy, *others = axes.flat
    curves = []
    for i, name in enumerate(names):
        line = "-" if ":" in name else "--"  # dashed: methods without a name of their own
        curves.append((runs[name], dict(label=name, color=f"C{i}", ls=line)))
    bands(np.array(others), PANELS, curves, "rollout")
    legend(figure, others[0], 3)

    eval_steps = np.array([m["step"] for m in runs[names[0]][0] if "eval_accuracy" in m])
    accuracy.set(title="greedy accuracy", xlabel="rollout", xticks=eval_steps)
    accuracy.set_ylabel("share of 200 held-out prompts")
    table = [HEADER]
    for i, name in enumerate(names):
        evals = np.array(
            [[h[step - 1]["eval_accuracy"] for step in eval_steps] for h in runs[name]]
        )
        mean, low, high = np.array([interval(x) for x in evals.T]).T  # [evals] each
        x = eval_steps + 0.14 * (i - 2.5)  # side by side
        style = dict(fmt="o", ms=4, capsize=2, color=f"C{i}")
        accuracy.errorbar(x, mean, [mean - low, high - mean], **style)

        column = {}  # of each metric: [seeds, steps]
        for key in ("completions/mean_length", "wrong_length", "push_ratio"):
            column[key] = np.array([[m[key] for m in h] for h in runs[name]])
        p = "" if i == 0 else f"{permutation_test(rewards[name], rewards[names[0]]):.2f}"
        table.append([
            name,
            span(evals[:, 0]),
            span(evals[:, -1]),
            span(rewards[name]),
            p,
            f"{column['completions/mean_length'][:, -5:].mean():.1f}",
            f"{np.nanmean(column['wrong_length'][:, 0]):.1f}",
            f"{np.nanmean(column['wrong_length'][:, -5:]):.1f}",
            f"{np.nanmean(column['push_ratio'][:, :5]):.2f}",
        ])  # fmt: skip
    figure.supxlabel(
        f"means of {len(seeds)} seeds;  bands: ± 1 standard error;  "
        "whiskers: 95 % bootstrap interval"
    )
    save(args, "reductions", figure, table)


if __name__ == "__main__":
    main()
