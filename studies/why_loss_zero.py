"""Why is the loss 0, and does it learn?   python studies/why_loss_zero.py

With one optimizer step per rollout the ratio is 1, and the advantages of a group sum to 0. So the
VALUE of the loss follows from the samples alone. Under `sequence` reduction it is beta * KL. Under
`token` reduction, the covariance of advantage and length, divided by the mean length, is subtracted
from beta * KL. For contrast, a planted bug, a reward that is always 1, shows a true fault.
"""

import common
import numpy as np
from torch.nn.utils import parameters_to_vector

import grpo

BETA = 0.04
CASES = ("sequence reduction", "token reduction", "bug: the reward is always 1")
PANELS = {
    "loss": "loss",
    "beta_kl": f"{BETA} * KL, nats per token",
    "grad_norm": "gradient norm, L2, before clipping",
    "reward": "reward, mean of the samples",
    "moved": "parameter change, L2, |theta - theta_0|",
    "advantage_abs": "|advantage|, mean of the samples",
}
HEADER = (
    "case | largest loss at step 1 | loss, range | largest difference from the prediction | "
    "gradient norm, range | parameter change | groups without signal, last | "
    "reward, first -> last 3 steps"
)


def always_right(completion, row) -> float:
    return 1.0


def run(steps, case, seed):
    options = dict(seed=seed, max_steps=steps, beta=BETA, loss_reduction="sequence")
    if "token" in case:
        options["loss_reduction"] = "token"
    if "bug" in case:
        options["reward"] = f"{__file__}:always_right"
    cfg = grpo.Config(**grpo.BUNDLED | dict(micro_batch_tokens=2048))
    starts = []  # the parameters before each step

    def before(policy, samples, step):
        starts.append(parameters_to_vector(policy.parameters()).detach().clone())
        # under a name that the update does not use
        grpo.add_logps("logps_before", policy, samples, cfg)

    def after(policy, samples, step):
        differences = [(s.logps_before - s.ref_logps).astype(float) for s in samples]
        k3 = [np.expm1(-d) + d for d in differences]  # for each token, at ratio 1
        covariance = 0.0
        beta_kl = BETA * np.mean([x.mean() for x in k3])
        if "token" in case:
            beta_kl = BETA * np.concatenate(k3).mean()
            lengths = common.lengths_of(samples)
            advantages = [s.advantages[0] for s in samples]
            covariance = np.cov(advantages, lengths, ddof=0)[0, 1] / lengths.mean()
        moved = (parameters_to_vector(policy.parameters()) - starts[0]).norm().item()
        return dict(beta_kl=beta_kl, predicted=beta_kl - covariance, moved=moved)

    metrics = common.train(before, after, **options)
    check(case, metrics)
    return metrics


def check(case, steps):
    """Checks the claim of the study, which is deterministic for a given seed."""
    for m in steps:
        assert abs(m["loss"] - m["predicted"]) < 1e-5, f"{case}: another value than predicted"
        if "bug" in case:
            # not exactly 0, because other micro-batches round the reference's numbers differently
            assert abs(m["loss"]) < 1e-9 and m["grad_norm"] < 1e-6, "the bug has a gradient"
            assert m["moved"] == 0 and m["advantage_abs"] == 0 and m["frac_reward_zero_std"] == 1
        else:
            assert m["grad_norm"] > 0.01, f"{case}: no gradient"
    if "bug" not in case:
        assert steps[-1]["moved"] > 0, f"{case}: no parameter moved"
    if "sequence" in case:
        assert abs(steps[0]["loss"]) < 1e-6, "the first value is not 0"


if __name__ == "__main__":
    args = common.arguments(__doc__)
    seeds, steps = range(5), 30
    if args.quick:
        seeds, steps = range(1), 3

    results = common.scan(run, (steps,), common.grid(CASES), seeds, args.jobs)

    table = [HEADER]
    for (case,), runs in results.items():
        column = {}  # metric: [seeds, steps]
        for key in (*PANELS, "predicted", "frac_reward_zero_std"):
            column[key] = np.array([[m[key] for m in run] for run in runs])
        loss, norm, reward = column["loss"], column["grad_norm"], column["reward"]
        off = np.abs(loss - column["predicted"]).max()
        row = [case, f"{np.abs(loss[:, 0]).max():.1e}", f"{loss.min():.3f} to {loss.max():.3f}"]
        row += [f"{off:.1e}", f"{norm.min():.2g} to {norm.max():.2g}"]
        row += [f"{column[key][:, -1].mean():.2f}" for key in ("moved", "frac_reward_zero_std")]
        table.append([*row, f"{reward[:, 0].mean():.2f} -> {reward[:, -3:].mean():.2f}"])
    sides = {case: runs for (case,), runs in results.items()}
    panels = [(PANELS[key], key, sides) for key in PANELS]
    common.save(args, "why_loss_zero", panels, table)
