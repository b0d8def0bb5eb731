"""Mean of means: how wrong is an average per micro-batch and rank?   studies/mean_of_means.py

A mean over the tokens of each micro-batch, averaged over micro-batches and ranks, gives sample i
the weight  n_tokens / (ranks * micro-batches of its rank * tokens of its micro-batch)  instead of
1. So once the gradient of each single sample is known, the gradient of any split is a weighted
sum. With one optimizer step per rollout, the same weights on the advantages reproduce this error
in training.
"""

import common
import numpy as np
import torch
from common import grid, lengths_of

from grpo import Sample

SIZES, RANKS = (1, 2, 4, 8, 16, "all"), (1, 2, 3, 8)  # "all": one mean per rank
RANK_NAMES = ("1 rank", "2 ranks", "3 ranks", "8 ranks")
LENGTHS = ("bundled", "skewed")
TRAINING = {  # name: micro-batch size, ranks, sorted by length first
    "exact (token)": None,
    "micro-batch 4, 2 ranks": (4, 2, False),
    "micro-batch 1 (= sequence)": (1, 1, False),
    "micro-batch 8, sorted by length": (8, 1, True),
}

TRAINING_HEADER = (
    "trained with | accuracy at the last step +- std | sampled reward, last 3 steps | "
    "completion tokens"
)


def weights(lengths, size, ranks, order):
    """[N]: the factor by which averaging per micro-batch and rank multiplies a sample's gradient.
    lengths [N] are tokens, and `order` [N] is the order in which samples go to ranks."""
    w = np.zeros(len(lengths))
    for share in np.array_split(order, ranks):
        step = len(share) if size == "all" else size
        micro_batches = [share[i : i + step] for i in range(0, len(share), step)]
        for micro in micro_batches:
            w[micro] = lengths.sum() / (ranks * len(micro_batches) * lengths[micro].sum())
    return w


def skewed(samples, seed):
    """The same prompts and advantages with random tokens: most completions are short, a few very
    long (lognormal)."""
    rng = np.random.default_rng(seed)
    changed = []
    for s in samples:
        n = int(np.clip(rng.lognormal(np.log(20), 1.0), 1, 240))
        ids, logps = rng.integers(5, 18, n), np.zeros(n, np.float32)
        sample = Sample(s.group, s.prompt, ids, logps)
        sample.advantages[:] = s.advantages[0]
        changed.append(sample)
    return changed


def errors_of(n_prompts, lengths_kind, seed):
    """{(size, ranks): angle in degrees to the exact gradient, length relative to it}; and the
    relative errors of grpo.update and of micro-batches of one sample, which must be near 0."""
    policy, samples = common.rollout(seed=seed, num_prompts=n_prompts)
    if lengths_kind == "skewed":
        samples = skewed(samples, seed)
    lengths = lengths_of(samples)
    # alone in its update, a sample gives the mean over its tokens; times their number, the sum
    single = [common.gradient_of(policy, [s]) * len(s.completion_ids) for s in samples]
    single = torch.stack(single).double() / lengths.sum()  # [N, P]
    exact = single.sum(0)  # [P]
    order = np.random.default_rng(seed).permutation(len(samples))

    results = {}
    for size, ranks in grid(SIZES, RANKS):
        mean = torch.tensor(weights(lengths, size, ranks, order)) @ single  # [P]
        cosine = torch.cosine_similarity(mean, exact, 0).clip(-1, 1)
        results[size, ranks] = cosine.arccos().rad2deg().item(), (mean.norm() / exact.norm()).item()
        if (size, ranks) == (1, 1):
            sequence = common.gradient_of(policy, samples, loss_reduction="sequence")
            results["sequence"] = common.relative_error(mean, sequence)
    options = [dict(micro_batch_tokens=budget) for budget in (64, 512, 4096, 10**6)]
    gradients = [common.gradient_of(policy, samples, **option) for option in options]
    results["grpo"] = max(common.relative_error(gradient, exact) for gradient in gradients)
    return results


def check(kind, results):
    """results: the errors of each seed."""
    for errors in results:
        assert errors["grpo"] < 1e-4, f"{kind}: grpo.update depends on the micro-batch"
        assert errors["sequence"] < 1e-4, "micro-batches of one are not the sequence reduction"
        assert abs(errors["all", 1][1] - 1) < 1e-6, "one mean over all must be exact"
        assert abs(errors["all", 8][1] - 1) > 1e-6, "one mean per rank must not be exact"
    angle = {size: np.mean([errors[size, 1][0] for errors in results]) for size in SIZES}
    assert angle[1] > 5, f"{kind}: averaging means is right? {angle}"
    assert angle[1] > angle[16] > angle["all"], f"{kind}: averaging means is right? {angle}"


def learn(steps, name, seed):
    def plant(policy, samples, step):
        """Multiplies the advantages, so that the update has the error of this split."""
        size, ranks, by_length = TRAINING[name]
        order = np.random.default_rng((seed, step)).permutation(len(samples))
        if by_length:
            order = np.argsort(lengths_of(samples), kind="stable")
        factors = weights(lengths_of(samples), size, ranks, order)
        for sample, factor in zip(samples, factors, strict=True):
            sample.advantages = sample.advantages * factor

    before = plant if TRAINING[name] else None
    return common.train(before, seed=seed, max_steps=steps, evals=True)


if __name__ == "__main__":
    args = common.arguments(__doc__)
    seeds, n_prompts, names, steps = range(5), 16, tuple(TRAINING), 20
    if args.quick:
        seeds, n_prompts, names, steps = range(1), 3, ("exact (token)",), 1

    results = common.scan(errors_of, (n_prompts,), grid(LENGTHS), seeds, args.jobs)
    runs = common.scan(learn, (steps,), grid(names), seeds, args.jobs)

    errors_table = [" | ".join(["lengths", "samples per micro-batch", *RANK_NAMES])]
    worst = 0.0
    for kind in LENGTHS:
        of_seeds = results[kind,]
        check(kind, of_seeds)
        worst = max(worst, *[errors["grpo"] for errors in of_seeds])
        splits = [[errors[split] for split in grid(SIZES, RANKS)] for errors in of_seeds]
        splits = np.reshape(splits, (len(seeds), len(SIZES), len(RANKS), 2))  # angle, length
        mean, spread = splits.mean(0), splits.std(0)[:, :, 0]
        for m, size in enumerate(SIZES):
            cells = [f"{kind}: angle in degrees, length / exact", size]
            for (angle, length), deviation in zip(mean[m], spread[m], strict=True):
                cells.append(f"{angle:.1f} +- {deviation:.1f}, {length:.2f}")
            errors_table.append(cells)
    error = f"relative error {worst:.0e}"
    errors_table.append(["both: grpo.update", "any", error, *["as 1 (by test)"] * 3])

    training_table = [TRAINING_HEADER]
    for (name,), histories in runs.items():
        ends = [[h[-1]["eval_accuracy"] for h in histories]]
        for key in ("reward", "completions/mean_length"):
            ends.append([np.mean([m[key] for m in h[-3:]]) for h in histories])
        training_table.append([name, *map(common.mean_and_std, ends)])
    sides = {name: histories for (name,), histories in runs.items()}
    panels = [(f"training: {m}", m, sides) for m in ("reward", "completions/mean_length")]
    common.save(args, "mean_of_means", panels, errors_table, training_table)
