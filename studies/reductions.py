"""Sequence, token or constant; standardise or not: GRPO, DAPO, Dr. GRPO, GSPO.   python studies/reductions.py

Two updates per rollout, so that GSPO's ratio differs from GRPO's. The length bias: how hard a token of a long wrong
answer is pushed down compared with a token of a short one, from the weights of the loss on real samples; and whether
wrong answers grow longer over training.
"""

import numpy as np
from common import (
    arguments,
    bands,
    grid,
    interval,
    legend,
    permutation_test,
    plt,
    save,
    scan,
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
LONG = 12  # tokens: an answer at once has at most 5, one with thinking at least 20


def run(method, seed, steps):
    reduction, scale, level = METHODS[method]

    def before(run, step, samples):
        wrong = [s for s in samples if s.reward < 0.5]
        right = [s for s in samples if s.reward > 0.5]
        # |weight| of one token in the loss, up to a factor that all tokens of the step share
        push = {True: [], False: []}
        for s in wrong:
            if s.advantage < 0:
                n = len(s.completion_ids)
                push[n > LONG].append(-s.advantage / (n if reduction == "sequence" else 1))
        lengths = {
            name: [len(s.completion_ids) for s in part]
            for name, part in (("wrong", wrong), ("right", right))
        }
        found = {
            f"{name}_length": float(np.mean(x)) if x else np.nan for name, x in lengths.items()
        }
        ratio = np.mean(push[True]) / np.mean(push[False]) if push[True] and push[False] else np.nan
        return found | dict(push_ratio=float(ratio))

    options = dict(
        loss_reduction=reduction, scale_rewards=scale, ratio_level=level, num_minibatches=2
    )
    return train(before, evals=(*range(5, steps, 5), steps), seed=seed, max_steps=steps, **options)


def main():
    args = arguments(__doc__)
    seeds, steps, names = (
        (range(1), 2, list(METHODS)[:1]) if args.quick else (range(5), 12, list(METHODS))
    )
    found = scan(run, grid(names, seeds, [steps]), args.jobs)
    runs = {name: [found[name, s, steps] for s in seeds] for name in names}

    figure, axes = plt.subplots(2, 2, figsize=(10, 7.4), layout="constrained")
    accuracy, *others = axes.flat
    panels = {
        "reward": ("reward", "mean of the samples"),
        "completions/mean_length": ("completion length", "tokens"),
        "wrong_length": ("length of wrong answers", "tokens"),
    }
    table = [
        [
            "method",
            "accuracy, step 5 (95 %)",
            "accuracy, last",
            "reward, mean of all steps (95 %)",
            "p (GRPO)",
        ]
    ]
    table[0] += [
        "length, last 5 steps",
        "wrong answers: first step",
        "last 5 steps",
        "push per token, long / short",
    ]
    styles = [
        dict(label=name, color=f"C{i}", ls="-" if ":" in name else "--")
        for i, name in enumerate(names)
    ]
    bands(
        np.array(others),
        panels,
        [(runs[name], style) for name, style in zip(names, styles, strict=True)],
        "rollout",
    )
    legend(figure, others[0], 3)
    figure.supxlabel(
        f"means of {len(seeds)} seeds;  bands: ± 1 standard error;  whiskers: 95 % bootstrap interval"
    )
    at = np.array([m["step"] for m in runs[names[0]][0] if "eval_accuracy" in m])
    accuracy.set(
        title="greedy accuracy", xlabel="rollout", ylabel="share of 200 held-out prompts", xticks=at
    )

    def area(name):
        return [np.mean([m["reward"] for m in h]) for h in runs[name]]

    for i, name in enumerate(names):
        evals = np.array(
            [[m["eval_accuracy"] for m in h if m["step"] in at] for h in runs[name]]
        )  # [seeds, evals]
        mean, *ends = np.array([interval(x) for x in evals.T]).T  # [evals] each
        x, error = at + 0.14 * (i - 2.5), np.abs(ends - mean)  # side by side
        accuracy.errorbar(x, mean, error, fmt="o", ms=4, capsize=2, color=f"C{i}")
        get = {
            k: np.array([[m[k] for m in h] for h in runs[name]]) for k in (*panels, "push_ratio")
        }
        table.append([
            name,
            *("{:.3f} ({:.3f} to {:.3f})".format(*interval(x)) for x in (evals[:, 0], evals[:, -1], area(name))),
            "" if name == names[0] else f"{permutation_test(area(name), area(names[0])):.2f}",
            f"{get['completions/mean_length'][:, -5:].mean():.1f}",
            f"{np.nanmean(get['wrong_length'][:, 0]):.1f}",
            f"{np.nanmean(get['wrong_length'][:, -5:]):.1f}",
            f"{np.nanmean(get['push_ratio'][:, :5]):.2f}",
        ])  # fmt: skip
    save(args, "reductions", figure, table)


if __name__ == "__main__":
    main()
