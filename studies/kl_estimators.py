"""Which KL estimator controls the KL?   python studies/kl_estimators.py

(a) A toy with all sequences of 3 tokens over 4 words. Expectations are sums over the sequences, so
    bias and noise of each gradient are exact, on the policy's own samples and on an older policy's.
(b) The bundled task with each estimator, beta and seed, and two optimizer steps per rollout. Does a
    larger beta give a smaller KL to the reference, and what accuracy? The KL is exact.
"""

import copy
import itertools

import common
import numpy as np
import torch

import grpo
from grpo import Config, grpo_loss, kl_estimate

ESTIMATORS = ("k1", "k2", "k3", "k4", "wk3")
ALL = (*ESTIMATORS, "k1 in reward")
BETAS = (0.0, 0.01, 0.03, 0.1, 0.3, 1.0)
DISTANCES = {"near": 0.15, "mid": 0.6, "far": 1.5}  # how far the toy policy is from the reference
EXACT_HEADER = (
    "gradient of | distance | samples | exact KL | error of the mean | along the true one | noise"
)
TRAINED_HEADER = (
    "estimator | beta | KL, nats per completion (95 %) | difference to beta 0 (95 %) | "
    "accuracy +- std over seeds"
)
FIRST_ROLLOUT = 6  # the mean KL begins here: the steep start is over

V, T = 4, 3  # words, tokens
SEQUENCES = torch.tensor(list(itertools.product(range(V), repeat=T)))  # [V^T, T]
PLACES = torch.tensor([V ** (T - 1 - t) for t in range(T)])


class Toy:
    """A policy whose next-token distributions are free tables, one row for each prefix."""

    def __init__(self, seed, scale, base=None):
        g = torch.Generator().manual_seed(seed)
        self.tables = []
        for t in range(T):
            table = torch.randn(V**t, V, generator=g, dtype=torch.float64) * scale
            if base:
                table += base.tables[t].detach()
            self.tables.append(table.requires_grad_())

    def conditionals(self):
        """T x [V^T, V]: for each sequence, the log-probabilities of all words at position t."""
        prefix = (SEQUENCES * PLACES).cumsum(1) // PLACES // V  # [V^T, T]: number of the prefix
        return [table.log_softmax(-1)[prefix[:, t]] for t, table in enumerate(self.tables)]

    def logps(self):
        """[V^T, T]: the log-probability of each token of each sequence."""
        conditionals = torch.stack(self.conditionals(), 1)  # [V^T, T, V]
        return conditionals.gather(2, SEQUENCES[:, :, None])[:, :, 0]

    def gradient(self, value):
        """[P]"""
        options = dict(retain_graph=True, materialize_grads=True)
        gradients = torch.autograd.grad(value, self.tables, **options)
        return torch.cat([g.flatten() for g in gradients])


def k1_in_reward(logps, old_logps, ref_logps):
    """[V^T]: the loss of each sequence with k1 in its reward, advantages 0 and no clipping."""
    cfg = Config(beta=1.0, kl_in="reward", kl_estimator="k1", clip_low=1.0, clip_high=1e9)
    losses = []
    for row in zip(logps, old_logps, ref_logps, strict=True):  # [T] each
        loss, _ = grpo_loss(*row, None, torch.zeros(T), torch.ones(T), cfg, [T])
        losses.append(loss)
    return losses


def exact_gradients() -> list[dict]:
    """For each estimator: the error of the expected gradient, its length along the true gradient,
    and its standard deviation, all relative to the true gradient. For a loss term, the true
    gradient is the gradient of the next-token KL, summed over the positions of the samples; for a
    term in the reward, it is the gradient of the KL between whole sequences."""
    rows, reference = [], Toy(0, 1.0)
    ref_logps = reference.logps().detach()
    for distance, scale in DISTANCES.items():
        policy = Toy(1, scale, reference)
        logps = policy.logps()
        kl = (logps.sum(1).exp() * (logps - ref_logps).sum(1)).sum()
        pairs = zip(policy.conditionals(), reference.conditionals(), strict=True)
        local = [(a.exp() * (a - b.detach())).sum(1) for a, b in pairs]  # T x [V^T]
        for sampling, sampler in (("on-policy", policy), ("off-policy", Toy(2, 0.3, policy))):
            old_logps = sampler.logps().detach()
            q = old_logps.sum(1).exp()[:, None]  # [V^T, 1]: how often a sequence is sampled
            of_loss = policy.gradient((q * torch.stack(local, 1)).sum())
            true = dict.fromkeys(ESTIMATORS, of_loss) | {ALL[-1]: policy.gradient(kl)}
            for name in ALL:
                if name in ESTIMATORS:
                    values = kl_estimate(logps, ref_logps, old_logps, name).sum(1)  # [V^T]
                else:
                    values = k1_in_reward(logps, old_logps, ref_logps)
                g = torch.stack([policy.gradient(value) for value in values])  # [V^T, P]
                mean, length = (q * g).sum(0), true[name].norm()
                row = dict(name=name, distance=distance, sampling=sampling, kl=kl.item())
                row["bias"] = ((mean - true[name]).norm() / length).item()
                row["along"] = (mean @ true[name] / length**2).item()
                row["noise"] = ((q * (g - mean).square()).sum().sqrt() / length).item()
                rows.append(row)
    return rows


def check(rows):
    """The claims of part (a)."""
    by_key = {(r["name"], r["distance"], r["sampling"]): r for r in rows}
    for distance in DISTANCES:
        on = {name: by_key[name, distance, "on-policy"] for name in ALL}
        off = {name: by_key[name, distance, "off-policy"] for name in ALL}
        for name in ("k2", "k4", "wk3", "k1 in reward"):
            assert on[name]["bias"] < 1e-10, f"{name} must be exact on-policy"
        for name in ("k4", "wk3"):
            assert off[name]["bias"] < 1e-10, f"{name} must be exact off-policy"
        for name in ("k1", "k2", "k3"):
            assert off[name]["bias"] > 1e-3, f"{name} must not be exact off-policy"
        assert abs(on["k1"]["bias"] - 1) < 1e-10, "k1's gradient must vanish on average"
        assert on["wk3"]["noise"] < on["k4"]["noise"], "wk3 must be less noisy than k4"
    k3 = [by_key["k3", distance, "on-policy"]["bias"] for distance in DISTANCES]
    assert 0.01 < k3[0] < k3[1] < k3[2], "k3's bias must grow with the distance"


def run(steps, estimator, beta, seed):
    """(b) A training run that records the KL at the beginning of each step."""
    reference = []

    def before(policy, samples, step):
        if step == 1:
            reference.append(copy.deepcopy(policy))
        # not `kl`: the update's metric of this name, an estimate per token, would replace it
        return dict(exact_kl=exact_kl(policy, reference[0], samples))

    options = dict(kl_estimator=estimator, beta=beta, seed=seed, max_steps=steps, num_minibatches=2)
    return common.train(before, evals=True, **options)


@torch.no_grad()
def exact_kl(policy, reference, samples) -> float:
    """KL(policy || reference) in nats per completion, exact over the whole vocabulary: the KL of
    the next-token distributions, summed over the samples' positions."""
    batch = grpo.collate(samples, policy.model.device)
    logits = [x.model(batch["ids"]).logits.flatten(0, 1) for x in (policy, reference)]
    p, q = [x[batch["logit_index"]].double().log_softmax(-1) for x in logits]  # [n, V]
    return ((p.exp() * (p - q)).sum() / len(samples)).item()


if __name__ == "__main__":
    args = common.arguments(__doc__)
    rows = exact_gradients()
    check(rows)
    seeds, steps = range(5), 15
    betas, names = BETAS, ESTIMATORS
    if args.quick:
        seeds, steps = range(1), 2
        betas, names = (0.0, 0.3), ("wk3",)

    # with beta 0 all estimators are the same run
    settings = [("wk3", 0.0), *common.grid(names, betas[1:])]
    runs = common.scan(run, (steps,), settings, seeds, args.jobs)
    runs |= {(name, 0.0): runs["wk3", 0.0] for name in names}

    panels, table = [], [TRAINED_HEADER]
    first = min(FIRST_ROLLOUT, steps)
    for name in names:
        sides = {f"beta {beta:g}": runs[name, beta] for beta in betas}
        panels.append((f"(b) {name}: KL, nats per completion", "exact_kl", sides))
        kl = {}
        for beta in betas:
            side = runs[name, beta]
            kl[beta] = [np.mean([m["exact_kl"] for m in run[first - 1 :]]) for run in side]
            cells = [common.span(kl[beta], 2), common.difference(kl[beta], kl[0.0])]
            accuracy = [run[-1]["eval_accuracy"] for run in side]
            table.append([name, beta, *cells, common.mean_and_std(accuracy)])
    exact = [EXACT_HEADER]
    for r in rows:
        numbers = [round(r[key], 3) for key in ("kl", "bias", "along", "noise")]
        exact.append([r["name"], r["distance"], r["sampling"], *numbers])
    common.save(args, "kl_estimators", panels, exact, table)
