"""Mean of means: how wrong is averaging per micro-batch and per rank?   python studies/mean_of_means.py

A token mean taken per micro-batch, then averaged over micro-batches and ranks, gives sample i the weight
n_tokens / (ranks * micro-batches of its rank * tokens of its micro-batch) instead of 1. So with each sample's own
gradient known, every split's gradient is a weighted sum. On-policy the same weights on the advantages train with it.
"""

import copy

import numpy as np
import torch
from common import (
    Run,
    arguments,
    band,
    grid,
    legend,
    ordered,
    plt,
    save,
    scan,
    train,
    update_gradient,
)

SIZES, RANKS = (1, 2, 4, 8, 16, "all"), (1, 2, 3, 8)  # "all": one mean per rank
TRAINING = {  # name: micro-batch size, ranks, sorted by length first
    "exact (token)": None,
    "micro-batch 4, 2 ranks": (4, 2, False),
    "micro-batch 1 (= sequence)": (1, 1, False),
    "micro-batch 8, sorted by length": (8, 1, True),
}


def weights(lengths, size, ranks, order):
    """What averaging per micro-batch and per rank multiplies each sample's gradient with. lengths [N] -> [N]"""
    w = np.zeros(len(lengths))
    for share in np.array_split(order, ranks):
        step = len(share) if size == "all" else size
        micros = [share[i : i + step] for i in range(0, len(share), step)]
        for micro in micros:
            w[micro] = lengths.sum() / (ranks * len(micros) * lengths[micro].sum())
    return w


def skewed(samples, seed):
    """The same prompts and advantages; random tokens, lognormal lengths: many short, a few very long."""
    rng, samples = np.random.default_rng(seed), copy.deepcopy(samples)
    for s in samples:
        n = int(np.clip(rng.lognormal(np.log(20), 1.0), 1, 240))
        s.completion_ids, s.sampler_logps = rng.integers(5, 18, n), np.zeros(n, np.float32)
    return samples


def compare(lengths_of, seed, n_prompts):
    """(size, ranks) -> angle in degrees and length relative to the exact gradient; and grpo.update's own errors."""
    run = Run(seed=seed, num_prompts=n_prompts)
    samples = run.rollout(1)
    if lengths_of == "skewed":
        samples = skewed(samples, seed)
    lengths = np.array([len(s.completion_ids) for s in samples])
    # one sample alone, times its own token count: the sum over its tokens
    each = torch.stack(
        [update_gradient(run, [s]) * len(s.completion_ids) for s in samples]
    )  # [N, P]
    exact, products = (
        each.sum(0) / lengths.sum(),
        (each @ each.T).double().numpy() / lengths.sum() ** 2,
    )  # [P], [N, N]
    ones, order, found = (
        np.ones(len(samples)),
        np.random.default_rng(seed).permutation(len(samples)),
        {},
    )
    for size, ranks in grid(SIZES, RANKS):
        w = weights(lengths, size, ranks, order)
        norm, norm_exact = np.sqrt(w @ products @ w), np.sqrt(ones @ products @ ones)
        cosine = np.clip(w @ products @ ones / norm / norm_exact, -1, 1)
        found[size, ranks] = np.degrees(np.arccos(cosine)), norm / norm_exact
    sequence = update_gradient(run, samples, loss_reduction="sequence")
    alone = torch.tensor(weights(lengths, 1, 1, order), dtype=each.dtype) @ each / lengths.sum()
    found["sequence"] = ((alone - sequence).norm() / sequence.norm()).item()
    budgets = [update_gradient(run, samples, micro_batch_tokens=b) for b in (64, 512, 4096, 10**6)]
    found["grpo"] = max(((g - exact).norm() / exact.norm()).item() for g in budgets)
    return found


def learn(name, seed, steps):
    def before(run, step, samples):
        lengths = np.array([len(s.completion_ids) for s in samples])
        if TRAINING[name]:
            size, ranks, by_length = TRAINING[name]
            order = np.random.default_rng((seed, step)).permutation(len(samples))
            order = np.argsort(lengths, kind="stable") if by_length else order
            for s, w in zip(samples, weights(lengths, size, ranks, order), strict=True):
                s.advantage *= w

    return train(before, seed=seed, max_steps=steps, evals=(5, 10, 15, 20))


def main():
    args = arguments(__doc__)
    seeds, n_prompts = (range(1), 3) if args.quick else (range(5), 16)
    found = scan(compare, grid(("bundled", "skewed"), seeds, [n_prompts]), args.jobs)
    for (lengths_of, *_), f in found.items():
        assert f["grpo"] < 1e-4, (
            f"{lengths_of}: grpo.update depends on the micro-batch by {f['grpo']:.1e}"
        )
        assert f["sequence"] < 1e-4, "micro-batches of one are not the sequence reduction"
        assert abs(f["all", 1][1] - 1) < 1e-6 < abs(f["all", 8][1] - 1), (
            "one mean is exact, one per rank is not"
        )
    for lengths_of in ("bundled", "skewed"):
        angle = {
            m: np.mean([found[lengths_of, s, n_prompts][m, 1][0] for s in seeds]) for m in SIZES
        }
        assert angle[1] > 5 and angle[1] > angle[16] > angle["all"], (
            f"{lengths_of}: averaging means is right? {angle}"
        )
    names = ("exact (token)",) if args.quick else TRAINING
    runs = scan(learn, grid(names, seeds, [1 if args.quick else 20]), args.jobs)

    figure = plt.figure(figsize=(10, 9.5), layout="constrained")
    top, bottom = figure.subfigures(2, 1, height_ratios=(2, 1))
    axes, (left, right) = top.subplots(2, 2), bottom.subplots(1, 2)
    table = [["lengths", "samples per micro-batch", *(f"{r} rank{'s' * (r > 1)}" for r in RANKS)]]
    for row, lengths_of in enumerate(("bundled", "skewed")):
        errors = [
            [[found[lengths_of, s, n_prompts][m, r] for r in RANKS] for m in SIZES] for s in seeds
        ]
        mean, spread = np.mean(errors, 0), np.std(errors, 0)  # [sizes, ranks, (angle, length)]
        titles = (
            ("angle to the exact gradient", "degrees"),
            ("norm of the gradient", "relative to the exact one's"),
        )
        for column, (title, ylabel) in enumerate(titles):
            for r, (ranks, colour) in enumerate(zip(RANKS, ordered(len(RANKS)), strict=True)):
                style = dict(
                    fmt="o-",
                    ms=4,
                    lw=1,
                    capsize=2,
                    color=colour,
                    label=f"{ranks} rank{'s' * (ranks > 1)}",
                )
                x = (
                    np.arange(len(SIZES)) + (r - 1.5) * 0.12
                )  # side by side: 1, 2 and 8 ranks often agree
                axes[row, column].errorbar(x, mean[:, r, column], spread[:, r, column], **style)
            axes[row, column].set(title=f"{lengths_of} lengths: {title}", ylabel=ylabel)
            axes[row, column].set_xlabel("samples per micro-batch (all: a rank's)")
            axes[row, column].set_xticks(range(len(SIZES)), SIZES)
        for m, size in enumerate(SIZES):
            cells = [
                f"{a:.1f} +- {da:.1f}, {n:.2f}"
                for (a, n), (da, _) in zip(mean[m], spread[m], strict=True)
            ]
            table.append([f"{lengths_of}: angle in degrees, length / exact", size, *cells])
    error = max(f["grpo"] for f in found.values())
    table.append(
        ["both: grpo.update", "any", f"relative error {error:.0e}", *["as 1 (by test)"] * 3]
    )
    legend(top, axes[0, 0], len(RANKS))
    after = [
        [
            "trained with",
            "accuracy at the last step +- std",
            "sampled reward, last 3 steps",
            "completion tokens",
        ]
    ]
    for name in names:
        histories = [runs[name, s, 1 if args.quick else 20] for s in seeds]
        band(left, histories, "reward", label=name)
        band(right, histories, "completions/mean_length", label=name)
        ends = [np.array([h[-1].get("eval_accuracy", np.nan) for h in histories])]
        for key in ("reward", "completions/mean_length"):
            ends.append(np.array([np.mean([m[key] for m in h[-3:]]) for h in histories]))
        after.append([name, *(f"{x.mean():.3f} +- {x.std():.3f}" for x in ends)])
    left.set(title="training: reward", xlabel="step", ylabel="mean of the samples")
    right.set(title="training: completion length", xlabel="step", ylabel="tokens")
    legend(bottom, left, 2)
    text = "whiskers: ± 1 standard deviation over seeds;  bands: ± 1 standard error"
    figure.supxlabel(f"means of {len(seeds)} seeds;  {text}")
    save(args, "mean_of_means", figure, table, after)


if __name__ == "__main__":
    main()
