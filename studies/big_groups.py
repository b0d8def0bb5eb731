"""Big groups in small memory, and what the group size is good for.   python studies/big_groups.py

(a) One group of G completions, micro-batches of 512 tokens against the whole group at once: memory (bytes that
    autograd holds for backward at its peak, without the parameters) and the difference of the two gradients.
(b) The advantage of a right answer, over all outcomes of the rest of its group, enumerated: its mean and spread, and
    how often a group gives no signal at all.
(c) Learning with 64 samples a step, divided into few big or many small groups.
"""

import math

import numpy as np
import torch
from common import (
    Run,
    arguments,
    band,
    grid,
    interval,
    ordered,
    permutation_test,
    plt,
    save,
    scan,
    steps_to,
    train,
)
from common import update_gradient as gradient_of

import grpo

SAMPLES, BUDGET, THRESHOLD = 64, 512, 0.8


class Held:
    """Counts the bytes that autograd keeps between forward and backward."""

    now = peak = 0

    def __init__(self, tensor):
        self.tensor = tensor
        self.bytes = (
            0 if isinstance(tensor, torch.nn.Parameter) else tensor.numel() * tensor.element_size()
        )
        Held.now += self.bytes
        Held.peak = max(Held.peak, Held.now)

    def __del__(self):
        Held.now -= self.bytes


def split(G, seed, budget):
    """Peak bytes with the budget and with everything at once, and the relative difference of the gradients."""
    run = Run(seed=seed, num_prompts=1, num_generations=G)
    step = next(step for step in range(1, 100) if run.rollout(step) and run.no_signal < 1)
    samples, peaks, gradients = run.rollout(step), [], []
    for tokens in (budget, 10**7):
        Held.now = Held.peak = 0
        with torch.autograd.graph.saved_tensors_hooks(Held, lambda held: held.tensor):
            gradients.append(gradient_of(run, samples, micro_batch_tokens=tokens))
        peaks.append(Held.peak / 2**20)
    return *peaks, ((gradients[0] - gradients[1]).norm() / gradients[1].norm()).item()


def advantage(G, p):
    """Of a right answer, when each of the G - 1 others is right with probability p: mean, std; and P(no signal)."""
    values, chances = [], []
    for k in range(G):
        rewards = torch.tensor([1.0] * (k + 1) + [0.0] * (G - 1 - k), dtype=torch.float64)
        values.append(grpo.group_advantages(rewards, G)[0].item())
        chances.append(math.comb(G - 1, k) * p**k * (1 - p) ** (G - 1 - k))
    mean = np.dot(chances, values)
    return mean, math.sqrt(np.dot(chances, np.square(np.array(values) - mean))), p**G + (1 - p) ** G


def learn(G, seed, steps):
    cfg = dict(num_prompts=SAMPLES // G, num_generations=G, seed=seed, max_steps=steps)
    return train(evals=(steps,), **cfg)


def main():
    args = arguments(__doc__)
    budget, sizes, many = BUDGET, (4, 8, 16, 32, 64, 128, 256), (4, 8, 16, 32, 64)
    if args.quick:
        budget, sizes, many = 256, (4, 64, 128), (8,)
    seeds, steps = (range(1), 1) if args.quick else (range(5), 25)
    memory = scan(split, grid(sizes, seeds, [budget]), args.jobs)
    runs = scan(learn, grid(many, seeds, [steps]), args.jobs)
    peak = {G: np.mean([memory[G, s, budget] for s in seeds], 0) for G in sizes}
    worst = {G: max(memory[G, s, budget][2] for s in seeds) for G in sizes}
    assert max(worst.values()) < 1e-4, f"the split changes the gradient: {worst}"
    # from `small` on a group fills more than one micro-batch: here a completion has about 8 tokens
    small, big = next(G for G in sizes if 8 * G > budget), sizes[-1]
    assert peak[big][0] < 1.3 * peak[small][0], "memory grows with the group"
    assert peak[big][1] > 0.6 * big / small * peak[small][1], "at once it should have grown"
    groups = [2**i for i in range(1, 9)]
    noise = [advantage(G, 0.25)[1] / advantage(G, 0.25)[0] for G in (4, 16, 64)]
    assert noise[0] > noise[1] > noise[2], "a bigger group must be less noisy"

    figure, axes = plt.subplots(2, 2, figsize=(10, 7.4), layout="constrained")
    axes = axes.flat
    for column, label in ((0, f"micro-batches of {budget} tokens"), (1, "whole group at once")):
        axes[0].plot(sizes, [peak[G][column] for G in sizes], "o-", label=label)
    axes[0].set(
        title="(a) held for backward, at its peak",
        xlabel="group size G",
        ylabel="MiB",
        yscale="log",
    )
    axes[0].legend()
    for p in (0.25, 0.8):
        values = np.array([advantage(G, p) for G in groups])  # [groups, 3]
        axes[1].errorbar(
            groups, values[:, 0], values[:, 1], fmt="o-", capsize=2, label=f"success rate {p}"
        )
        axes[2].plot(groups, values[:, 2], "o-", label=f"success rate {p}")
    axes[1].set(
        title="(b) advantage of a right answer",
        xlabel="group size G",
        ylabel="mean over all outcomes",
    )
    axes[2].set(
        title="(b) groups without signal", xlabel="group size G", ylabel="share of the groups"
    )
    axes[1].set_ylim(-0.9)  # room for the legend
    axes[1].legend(loc="lower right")
    axes[2].legend()
    for axis, ticks in zip(axes[:3], (sizes, groups, groups), strict=True):
        axis.set_xscale("log", base=2)
        axis.set_xticks(ticks, ticks)
    first = [
        ["G", f"MiB, {budget} tokens a micro-batch", "MiB, at once", "gradient difference, largest"]
    ]
    first[0] += ["advantage of a right answer at rate 0.25", "groups without signal"]
    for G in sizes:
        mean, std, none = advantage(G, 0.25)
        first.append(
            [
                G,
                *(f"{x:.0f}" for x in peak[G][:2]),
                f"{worst[G]:.0e}",
                f"{mean:.2f} +- {std:.2f}",
                f"{none:.3f}",
            ]
        )
    learned = [
        [
            "prompts x G",
            "steps to reward 0.8 (95 %)",
            "p against G = 8",
            "reward, last 5 steps",
            "accuracy +- std",
        ]
    ]
    reached = {G: [min(steps, steps_to(THRESHOLD, runs[G, s, steps])) for s in seeds] for G in many}
    for G, colour in zip(many, ordered(len(many)), strict=True):
        histories = [runs[G, s, steps] for s in seeds]
        band(axes[3], histories, "reward", color=colour, label=f"{SAMPLES // G} x {G}")
        mean, low, high = interval(reached[G])
        ends = (
            [np.mean([m["reward"] for m in h[-5:]]) for h in histories],
            [h[-1]["eval_accuracy"] for h in histories],
        )
        p = f"{permutation_test(reached[G], reached[8]):.2f}" if G != 8 else ""
        text = [f"{np.mean(x):.3f} +- {np.std(x):.3f}" for x in ends]
        learned.append([f"{SAMPLES // G} x {G}", f"{mean:.1f} ({low:.1f} to {high:.1f})", p, *text])
    axes[3].set(
        title=f"(c) reward, {SAMPLES} samples a step", xlabel="step", ylabel="mean of the samples"
    )
    axes[3].set_ylim(0, 1.02)
    axes[3].legend(title="prompts x G", loc="lower right", ncols=3)
    text = "bands: ± 1 standard error;  (b) exact, whiskers: ± 1 standard deviation"
    figure.supxlabel(f"(a), (c) means of {len(seeds)} seeds;  {text}")
    save(args, "big_groups", figure, first, learned)


if __name__ == "__main__":
    main()
