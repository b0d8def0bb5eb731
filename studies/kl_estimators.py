"""Which KL estimator controls the KL?   python studies/kl_estimators.py

(a) A toy with every sequence of 3 tokens over 4 words: expectations are sums, so the bias and the noise of each
    estimator's gradient are exact, with the samples of the policy itself and with those of an older policy.
(b) The bundled task, every estimator x beta x seed, two updates per rollout: KL to the reference (exact over the
    vocabulary): does a larger beta give a smaller one? (c) The same runs as a Pareto front: accuracy against KL.
"""

import itertools

import numpy as np
import torch
from common import (
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

from grpo import Config, grpo_loss, kl_estimate

ESTIMATORS = ("k1", "k2", "k3", "k4", "wk3")
BETAS = (0.0, 0.01, 0.03, 0.1, 0.3, 1.0)
FROM = 6  # first rollout of the mean KL: the steep start is over
V, T = 4, 3
SEQUENCES = torch.tensor(list(itertools.product(range(V), repeat=T)))  # [V^T, T]
PLACES = torch.tensor([V ** (T - 1 - t) for t in range(T)])


class Toy:
    """Each next-token distribution is a free table."""

    def __init__(self, seed, scale, base=None):
        g = torch.Generator().manual_seed(seed)
        tables = [torch.randn(V**t, V, generator=g, dtype=torch.float64) * scale for t in range(T)]
        start = [table.detach() for table in base.tables] if base else [0] * T
        self.tables = [(a + b).requires_grad_() for a, b in zip(tables, start, strict=True)]

    def conditionals(self):  # T x [V^T, V]
        prefix = (
            (SEQUENCES * PLACES).cumsum(1) // PLACES // V
        )  # [V^T, T]: the number of the prefix before t
        return [table.log_softmax(-1)[prefix[:, t]] for t, table in enumerate(self.tables)]

    def logps(self):  # [V^T, T]
        return torch.stack(
            [c.gather(1, SEQUENCES[:, t, None])[:, 0] for t, c in enumerate(self.conditionals())], 1
        )

    def gradient(self, value):  # [P]
        parts = torch.autograd.grad(value, self.tables, retain_graph=True, materialize_grads=True)
        return torch.cat([part.flatten() for part in parts])


def k1_in_reward(lp, old, ref):
    """Through grpo_loss, sequence by sequence, advantages 0 and no clipping. All [V^T, T] -> [V^T]"""
    cfg = Config(
        beta=1.0,
        kl_in="reward",
        kl_estimator="k1",
        loss_reduction="constant",
        max_completion_length=1,
    )
    cfg.clip_low, cfg.clip_high = 1.0, 1e9
    rest = (None, torch.zeros(1), torch.ones(1, T), cfg, T, 1)
    return [
        grpo_loss(*row, *rest)[0]
        for row in zip(lp.split(1), old.split(1), ref.split(1), strict=True)
    ]


def exact_gradients() -> list[dict]:
    """Of each estimator: error of the expected gradient, and its standard deviation, over the true gradient's norm.
    True: of the next-token KL, summed over positions, at the sampler's prefixes; in the reward: of the sequence KL."""
    rows, reference = [], Toy(0, 1.0)
    for distance, scale in (("near", 0.15), ("mid", 0.6), ("far", 1.5)):
        policy = Toy(1, scale, reference)
        lp, ref = policy.logps(), reference.logps().detach()
        for sampling, sampler in (("on-policy", policy), ("off-policy", Toy(2, 0.3, policy))):
            old = sampler.logps().detach()
            q = old.sum(1).exp()  # [V^T]
            pairs = zip(policy.conditionals(), reference.conditionals(), strict=True)
            local = torch.stack(
                [(a.exp() * (a - b.detach())).sum(1) for a, b in pairs], 1
            )  # [V^T, T]
            per_token = policy.gradient((q[:, None] * local).sum())
            kl = (lp.sum(1).exp() * (lp - ref).sum(1)).sum()
            for name in (*ESTIMATORS, "k1 in reward"):
                in_loss = name in ESTIMATORS
                values = (
                    kl_estimate(lp, ref, old, name).sum(1)
                    if in_loss
                    else k1_in_reward(lp, old, ref)
                )  # [V^T]
                g = torch.stack([policy.gradient(value) for value in values])  # [V^T, P]
                true = per_token if in_loss else policy.gradient(kl)
                mean = (q[:, None] * g).sum(0)
                row = dict(
                    kl=kl,
                    bias=(mean - true).norm() / true.norm(),
                    along=mean @ true / true.square().sum(),
                )
                row |= dict(noise=((q[:, None] * (g - mean).square()).sum()).sqrt() / true.norm())
                rows.append(
                    dict(name=name, distance=distance, sampling=sampling)
                    | {k: row[k].item() for k in row}
                )
    return rows


def check(rows):
    found = {(r["name"], r["distance"], r["sampling"]): r for r in rows}
    for distance in ("near", "mid", "far"):
        on = {name: found[name, distance, "on-policy"] for name in (*ESTIMATORS, "k1 in reward")}
        assert all(on[name]["bias"] < 1e-10 for name in ("k2", "k4", "wk3", "k1 in reward"))
        assert abs(on["k1"]["bias"] - 1) < 1e-10, "k1's gradient must vanish on average"
        assert all(found[name, distance, "off-policy"]["bias"] < 1e-10 for name in ("k4", "wk3"))
        assert all(
            found[name, distance, "off-policy"]["bias"] > 1e-3 for name in ("k1", "k2", "k3")
        )
        assert on["wk3"]["noise"] < on["k4"]["noise"]
    k3 = [found["k3", distance, "on-policy"]["bias"] for distance in ("near", "mid", "far")]
    assert 0.01 < k3[0] < k3[1] < k3[2], "k3's bias must grow with the distance"


def run(estimator, beta, seed, steps, n_eval):
    options = dict(kl_estimator=estimator, beta=beta, seed=seed, max_steps=steps, num_minibatches=2)
    return train(
        lambda run, _, samples: dict(kl=run.exact_kl(samples)),
        evals=(steps,),
        n_eval=n_eval,
        **options,
    )


def main():
    args = arguments(__doc__)
    check(rows := exact_gradients())
    seeds, steps, betas, n_eval = (
        (range(1), 2, (0.0, 0.3), 16) if args.quick else (range(5), 15, BETAS, 200)
    )
    names = ("wk3",) if args.quick else ESTIMATORS
    settings = grid(["wk3"], [0.0], seeds, [steps], [n_eval]) + grid(
        names, betas[1:], seeds, [steps], [n_eval]
    )
    found = {setting[:3]: history for setting, history in scan(run, settings, args.jobs).items()}
    runs = {
        (n, b): [found["wk3" if b == 0 else n, b, s] for s in seeds] for n in names for b in betas
    }

    figure = plt.figure(figsize=(10, 11), layout="constrained")
    top, middle, bottom = figure.subfigures(3, 1)
    axes, (left, right) = top.subplots(1, 2), bottom.subplots(1, 2)
    titles = (
        "(a) error of the expected gradient; no bar: exact",
        "(a) noise of the gradient, standard deviation",
    )
    colours = [
        c for colour in ordered(3) for c in (colour, 1 - 0.45 * (1 - colour))
    ]  # off-policy: paler
    for axis, key, title in zip(axes, ("bias", "noise"), titles, strict=True):
        for i, name in enumerate((*ESTIMATORS, "k1 in reward")):
            for j, r in enumerate(r for r in rows if r["name"] == name):  # near, mid, far x on, off
                label = f"{r['distance']}, {r['sampling']}" if i == 0 else None
                axis.bar(
                    i + (j - 2.5) * 0.13, max(r[key], 1e-3), 0.12, color=colours[j], label=label
                )
        axis.set(yscale="log", ylim=(1e-3 if key == "bias" else 1, 50), title=title)
        axis.set_ylabel("relative to the true gradient")
        axis.set_xticks(range(len(ESTIMATORS) + 1), (*ESTIMATORS, "k1 in\nreward"))
    legend(top, axes[0], 3, title="the policy's distance from the reference, and whose samples")
    for axis, name in zip(
        middle.subplots(1, len(names), sharey=True, squeeze=False)[0], names, strict=True
    ):
        for beta, colour in zip(betas, ordered(len(betas)), strict=True):
            band(axis, runs[name, beta], "kl", label=f"beta {beta:g}", color=colour)
        axis.set(title=f"(b) {name}", xlabel="rollout")
    middle.axes[0].set_ylabel("KL to the reference,\nnats per completion")
    legend(middle, middle.axes[0], len(betas))
    table = [
        [
            "estimator",
            "beta",
            "KL, nats per completion (95 %)",
            "p (beta 0)",
            "accuracy +- std over seeds",
        ]
    ]
    for i, name in enumerate(names):
        kl = {
            b: [
                np.mean([m["kl"] for m in h if m["step"] >= min(FROM, steps)])
                for h in runs[name, b]
            ]
            for b in betas
        }
        accuracy = np.array(
            [[h[-1]["eval_accuracy"] for h in runs[name, b]] for b in betas]
        )  # [betas, seeds]
        spans = np.array([interval(kl[b]) for b in betas])  # [betas, 3]
        error = np.abs(spans[:, 1:] - spans[:, :1]).T  # [2, betas]: below and above the mean
        left.errorbar(
            np.arange(len(betas)) + (i - 2) * 0.06,
            spans[:, 0],
            error,
            fmt="o-",
            lw=1,
            ms=4,
            label=name,
        )
        right.plot(spans[:, 0], accuracy.mean(1), "-", lw=0.7, alpha=0.6)
        right.scatter(
            spans[:, 0], accuracy.mean(1), range(12, 12 + 16 * len(betas), 16), color=f"C{i}"
        )
        for b, (mean, low, high), values in zip(betas, spans, accuracy, strict=True):
            p = f"{permutation_test(kl[b], kl[0.0]):.3f}" if b else ""
            accurate = f"{values.mean():.3f} +- {values.std():.3f}"
            table.append([name, b, f"{mean:.2f} ({low:.2f} to {high:.2f})", p, accurate])
    left.set(
        title=f"(b) KL, mean of rollouts {FROM} to {steps}",
        xlabel="beta",
        ylabel="nats per completion",
    )
    left.set_xticks(range(len(betas)), [f"{beta:g}" for beta in betas])
    right.set(title="(c) a dot per beta, larger for larger", xlabel="KL, nats per completion")
    right.set_ylabel(f"greedy accuracy on {n_eval} prompts")
    legend(bottom, left, len(names))
    text = "bands: ± 1 standard error;  whiskers: 95 % bootstrap interval of the mean"
    figure.supxlabel(f"(a) exact;  (b), (c) means of {len(seeds)} seeds;  {text}")
    exact = [
        [
            "gradient of",
            "distance",
            "samples",
            "exact KL",
            "error of the mean",
            "along the true one",
            "noise",
        ]
    ]
    exact += [[round(x, 3) if isinstance(x, float) else x for x in r.values()] for r in rows]
    save(args, "kl_estimators", figure, exact, table)


if __name__ == "__main__":
    main()
