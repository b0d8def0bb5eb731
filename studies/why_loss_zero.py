"""Why is the loss 0, and does it learn?   python studies/why_loss_zero.py

With one update per rollout the ratio is 1 and every group's advantages sum to 0. So the loss VALUE is predicted here
from the samples alone, without looking at the loss: beta * KL under `sequence` reduction, that minus the covariance of
advantage and length (over the mean length) under `token`. A planted bug, a reward that is always 1, is the contrast.
"""

import numpy as np
import torch
from common import CPU, arguments, bands, grid, legend, plt, save, scan, train

import grpo

BETA = 0.04
CASES = {
    "sequence": "sequence reduction",
    "token": "token reduction",
    "bug": "bug: the reward is always 1",
}


def run(case, seed, steps):
    reduction = "token" if case == "token" else "sequence"
    start = {}

    def before(run, step, samples):
        if case == "bug":
            for sample in samples:
                sample.reward = 1.0
            run.no_signal = grpo.assign_advantages(samples, step, run.cfg)
        start.setdefault(
            "parameters", torch.cat([p.detach().flatten() for p in run.policy.parameters()]).clone()
        )
        grpo.compute_logps(
            run.policy, samples, "logps_before", run.cfg, CPU
        )  # a name that no update reads

    def after(run, step, samples):
        lengths = np.array([len(s.completion_ids) for s in samples])
        advantages = np.array([s.advantage for s in samples])
        d = [(s.logps_before - s.ref_logps).astype(float) for s in samples]
        k3 = [np.expm1(-x) + x for x in d]  # the estimator's value at ratio 1
        kl = np.concatenate(k3).mean() if reduction == "token" else np.mean([x.mean() for x in k3])
        covariance = (
            np.cov(advantages, lengths, ddof=0)[0, 1] / lengths.mean()
            if reduction == "token"
            else 0.0
        )
        now = torch.cat([p.detach().flatten() for p in run.policy.parameters()])
        moved = (now - start["parameters"]).norm().item()
        return dict(beta_kl=BETA * kl, predicted=BETA * kl - covariance, moved=moved)

    return train(before, after, seed=seed, max_steps=steps, beta=BETA, loss_reduction=reduction)


def check(case, history):
    """The claim, deterministic for a seed."""
    assert all(abs(m["loss"] - m["predicted"]) < 1e-5 for m in history), (
        f"{case}: the value is not the predicted one"
    )
    if case == "bug":
        # not exactly 0 wherever other micro-batches give the reference's log-probabilities another rounding
        assert all(abs(m["loss"]) < 1e-9 and m["grad_norm"] < 1e-6 for m in history), (
            "the bug has a gradient"
        )
        assert all(
            m["moved"] == m["advantage_abs"] == 0 and m["frac_reward_zero_std"] == 1
            for m in history
        )
    else:
        assert all(m["grad_norm"] > 0.01 for m in history) and history[-1]["moved"] > 0, (
            f"{case}: no gradient"
        )
        assert case == "token" or abs(history[0]["loss"]) < 1e-6, "first value is not 0"


def main():
    args = arguments(__doc__)
    seeds, steps = (range(1), 3) if args.quick else (range(5), 30)
    found = scan(run, grid(CASES, seeds, [steps]), args.jobs)
    for (case, *_), history in found.items():
        check(case, history)

    figure, axes = plt.subplots(2, 3, figsize=(10, 6), layout="constrained")
    panels = {
        "loss": ("loss", "value"),
        "beta_kl": ("beta * KL", f"{BETA} * nats per token"),
        "grad_norm": ("gradient norm", "L2, before clipping"),
        "reward": ("reward", "mean of the samples"),
        "moved": ("parameter change", "L2, |theta - theta_0|"),
        "advantage_abs": ("|advantage|", "mean of the samples"),
    }
    histories = {case: [found[case, s, steps] for s in seeds] for case in CASES}
    bands(
        axes,
        panels,
        [(histories[case], dict(label=label)) for case, label in CASES.items()],
        "step",
    )
    legend(figure, axes[0, 0], 3)
    figure.supxlabel(f"lines: mean of {len(seeds)} seeds;  bands: ± 1 standard error")
    rows = []
    for case, label in CASES.items():
        runs = histories[case]
        keys = (*panels, "predicted", "frac_reward_zero_std")
        column = {k: np.array([[m[k] for m in h] for h in runs]) for k in keys}
        rows.append([
            label, f"{np.abs(column['loss'][:, 0]).max():.1e}",
            f"{column['loss'].min():.3f} to {column['loss'].max():.3f}",
            f"{np.abs(column['loss'] - column['predicted']).max():.1e}",
            f"{column['grad_norm'].min():.2g} to {column['grad_norm'].max():.2g}",
            *(f"{column[k][:, -1].mean():.2f}" for k in ("moved", "frac_reward_zero_std")),
            f"{column['reward'][:, 0].mean():.2f} -> {column['reward'][:, -3:].mean():.2f}",
        ])  # fmt: skip
    header = [
        "case",
        "largest loss at step 1",
        "loss, range",
        "largest difference from the prediction",
    ]
    header += ["gradient norm, range", "parameter change", "groups without signal, last"]
    header += ["reward, first -> last 3 steps"]
    save(args, "why_loss_zero", figure, [header, *rows])


if __name__ == "__main__":
    main()
