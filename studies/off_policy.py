"""A sampler that is not the policy.   python studies/off_policy.py

The samples come from the policy itself, from bfloat16 arithmetic, or from weights that are 4 steps
old, each with and without truncated importance weights (cap 2), which correct for the mismatch.
"""

import copy
import dataclasses
from unittest import mock

import common
import numpy as np

import grpo

SAMPLERS = ("same", "bf16", "4 steps old")
DELAY = 4  # steps
CAPS = (0.0, 2.0)
GAP = "sampling/sampling_logp_difference/mean"  # between sampler and trainer
WEIGHTS = {0.0: "none", 2.0: "cap 2"}  # importance weights


make_sampler = grpo.make_sampler


class BrainFloats(grpo.HFSampler):
    """Samples in bfloat16 in all steps; the eval after the last step uses the policy itself."""

    def __init__(self, run):
        super().__init__(run.policy.model, make_sampler(run).stop_ids, run.cfg)
        self.loads = 0

    def load_weights(self, model):
        self.loads += 1
        kind = "bfloat16" if self.loads <= self.cfg.max_steps else "float32"
        self.cfg = dataclasses.replace(self.cfg, dtype=kind)


class OldWeights(grpo.HFSampler):
    """Samples with the weights of DELAY steps ago, except in the eval after the last step."""

    def __init__(self, run):
        super().__init__(copy.deepcopy(run.policy.model), make_sampler(run).stop_ids, run.cfg)
        self.weights = []  # before step 1, 2, ...

    def load_weights(self, model):
        self.weights.append(copy.deepcopy(model.state_dict()))
        n = len(self.weights)
        age = DELAY if n <= self.cfg.max_steps else 0
        self.model.load_state_dict(self.weights[max(0, n - 1 - age)])


def mismatch(steps, sampler, cap, seed):
    """A run whose rollouts come from the given sampler."""
    makers = {"same": make_sampler, "bf16": BrainFloats, "4 steps old": OldWeights}
    with mock.patch.object(grpo, "make_sampler", makers[sampler]):
        return common.train(evals=True, tis_cap=cap, seed=seed, max_steps=steps)


if __name__ == "__main__":
    args = common.arguments(__doc__)
    seeds, samplers, steps = range(5), SAMPLERS, 14
    if args.quick:
        seeds, samplers, steps = range(1), ("4 steps old",), 3
    settings = common.grid(samplers, CAPS)
    runs = common.scan(mismatch, (steps,), settings, seeds, args.jobs)
    for run in runs["4 steps old", 0.0] + runs["4 steps old", 2.0]:
        assert all(m[GAP] > 1e-4 for m in run[1:]), "the weights are not old"
    table = [
        "sampler | importance weights | mean abs(log-probability gap) | reward, mean of all steps "
        "(95 %) | reward, last 3 steps (95 %) | accuracy (95 %) | the first less that without "
        "weights (95 %)"
    ]
    sides, rewards = {0.0: {}, 2.0: {}}, {}
    for (sampler, cap), side in runs.items():
        sides[cap][sampler] = side
        rewards[cap] = [np.mean([m["reward"] for m in run]) for run in side]
        gap = f"{np.mean([[m[GAP] for m in run] for run in side]):.1e}"
        ends = [np.mean([m["reward"] for m in run[-3:]]) for run in side]
        accuracies = [run[-1]["eval_accuracy"] for run in side]
        spans = [common.span(values) for values in (rewards[cap], ends, accuracies)]
        row = [sampler, WEIGHTS[cap], gap, *spans]
        table.append([*row, common.difference(rewards[cap], rewards[0.0])])
    panels = [(f"reward, weights: {WEIGHTS[cap]}", "reward", sides[cap]) for cap in CAPS]
    common.save(args, "off_policy", panels, table)
