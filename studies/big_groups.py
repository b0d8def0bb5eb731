"""Big groups in small memory, and what the group size is good for.   python studies/big_groups.py

(a) One group of G completions, in micro-batches of 512 tokens and all at once: the most memory that
    autograd saves for the backward pass, without the parameters, and how far the gradients differ.
(b) The advantage of a right answer, by enumeration of all outcomes of the rest of its group: its
    mean, its standard deviation, and how often a group gives no signal at all.
(c) Learning with 64 samples a step, divided into few big or many small groups.
"""

import math

import common
import numpy as np
import torch
from common import grid, steps_to

import grpo

SAMPLES, BUDGET, THRESHOLD = 64, 512, 0.8


class Saved:
    """The most bytes that autograd saves for one backward pass. Each storage counts once, however
    many tensors are views of it; storages of parameters do not count."""

    def __init__(self, parameters):
        self.parameters = {p.untyped_storage().data_ptr() for p in parameters}
        self.storages = {}  # address: bytes, since the last backward pass
        self.peak = 0

    def pack(self, tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self.parameters:
            self.storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    def unpack(self, tensor):
        self.peak = max(self.peak, sum(self.storages.values()))
        self.storages.clear()
        return tensor


def memory_of_group(budget, G, seed):
    """Peak MiB in micro-batches of `budget` tokens, peak MiB at once, and the relative difference
    of the gradients."""
    policy, samples = common.rollout(seed=seed, num_prompts=1, num_generations=G)
    peaks, gradients = [], []
    for tokens in (budget, 10**7):
        saved = Saved(policy.parameters())
        with torch.autograd.graph.saved_tensors_hooks(saved.pack, saved.unpack):
            gradients.append(common.gradient_of(policy, samples, micro_batch_tokens=tokens))
        peaks.append(saved.peak / 2**20)
    return *peaks, common.relative_error(*gradients)


def advantage_when_right(G, p):
    """Mean and standard deviation of a right answer's advantage, if each of the G - 1 others is
    right with probability p; and the probability that a group gives no signal."""
    values, chances = [], []
    for k in range(G):  # k others are right
        rewards = torch.tensor([1.0] * (k + 1) + [0.0] * (G - 1 - k), dtype=torch.float64)
        values.append(grpo.group_advantages(rewards, G)[0].item())
        chances.append(math.comb(G - 1, k) * p**k * (1 - p) ** (G - 1 - k))
    mean = np.dot(chances, values)
    variance = np.dot(chances, np.square(np.array(values) - mean))
    return mean, math.sqrt(variance), p**G + (1 - p) ** G


def learn(steps, G, seed):
    options = dict(num_prompts=SAMPLES // G, num_generations=G, seed=seed, max_steps=steps)
    return common.train(evals=True, **options)


def check(peak, worst, budget):
    """peak: {G: (MiB in micro-batches, MiB at once, ...)}; worst: {G: gradient difference}."""
    assert max(worst.values()) < 1e-4, f"the split changes the gradient: {worst}"
    # from `small` on, a group fills several micro-batches: here a completion has about 8 tokens
    small = min(G for G in peak if 8 * G > budget)
    big = max(peak)
    assert peak[big][0] < 1.3 * peak[small][0], "memory grows with the group"
    assert peak[big][1] > 0.6 * big / small * peak[small][1], "at once it should have grown"
    means, stds, _ = zip(*[advantage_when_right(G, 0.25) for G in (4, 16, 64)], strict=True)
    assert np.all(np.diff(np.divide(stds, means)) < 0), "a bigger group must be less noisy"


if __name__ == "__main__":
    args = common.arguments(__doc__)
    budget, sizes, learning_sizes = BUDGET, (4, 8, 16, 32, 64, 128, 256), (4, 8, 16, 32, 64)
    seeds, steps = range(5), 25
    if args.quick:
        budget, sizes, learning_sizes = 256, (4, 64, 128), (8,)
        seeds, steps = range(1), 1

    memory = common.scan(memory_of_group, (budget,), grid(sizes), seeds, args.jobs)
    runs = common.scan(learn, (steps,), grid(learning_sizes), seeds, args.jobs)
    peak = {G: np.mean(of_seeds, 0) for (G,), of_seeds in memory.items()}
    worst = {G: np.max(of_seeds, 0)[2] for (G,), of_seeds in memory.items()}
    check(peak, worst, budget)

    memory_table = [
        f"G | MiB, {budget} tokens a micro-batch | MiB, at once | gradient difference, largest | "
        "advantage of a right answer at rate 0.25 | groups without signal"
    ]
    for G in sizes:
        mean, std, no_signal = advantage_when_right(G, 0.25)
        cells = [G, f"{peak[G][0]:.0f}", f"{peak[G][1]:.0f}", f"{worst[G]:.0e}"]
        memory_table.append([*cells, f"{mean:.2f} +- {std:.2f}", f"{no_signal:.3f}"])

    learning_table = [
        "prompts x G | steps to reward 0.8 (95 %) | difference to G = 8 (95 %) | "
        "reward, last 5 steps | accuracy +- std"
    ]
    sides = {}
    reached = {G: [min(steps, steps_to(THRESHOLD, run)) for run in runs[G,]] for (G,) in runs}
    for (G,), side in runs.items():
        name = f"{SAMPLES // G} x {G}"
        sides[name] = side
        rewards = [np.mean([m["reward"] for m in run[-5:]]) for run in side]
        accuracies = [run[-1]["eval_accuracy"] for run in side]
        cells = [common.span(reached[G], 1), common.difference(reached[G], reached[8])]
        ends = map(common.mean_and_std, (rewards, accuracies))
        learning_table.append([name, *cells, *ends])
    panels = [(f"(c) reward, {SAMPLES} samples a step, prompts x G", "reward", sides)]
    common.save(args, "big_groups", panels, memory_table, learning_table)
