"""What a run sees in its own metrics: a line where something looks wrong, once in a run, and where to read on."""

import numpy as np

WINDOW = 5  # steps: a single one says little


class Advice:
    def __init__(self, cfg, past: list[dict]):
        self.cfg, self.steps, self.evals, self.said = cfg, [], [], set()
        for line in (
            past
        ):  # of metrics.jsonl of a run that is resumed: what follows from them was said then
            self.see(line)

    def see(self, line: dict) -> list[str]:
        """Takes the next line of metrics.jsonl. Returns what there is to say after it, once for each heading."""
        (self.evals if "eval_accuracy" in line else self.steps).append(line)
        table = findings(self.steps, self.evals, self.cfg) if len(self.steps) >= WINDOW else []
        new = {
            heading: text for heading, is_so, text in table if is_so and heading not in self.said
        }
        self.said |= set(new)
        return [
            f"note: {heading}: {text} (REFERENCE.md, Troubleshooting)"
            for heading, text in new.items()
        ]


def values(lines: list[dict], name: str) -> np.ndarray:
    """NaN where there is no number: all comparisons with it are False."""
    return np.array([line.get(name) for line in lines], float)


def findings(steps: list[dict], evals: list[dict], cfg) -> list[tuple]:
    """The table: heading in REFERENCE.md, whether it is so, what to say. x0 is of the first steps, x of the last."""
    names = "reward reward_std entropy frac_reward_zero_std kl completions/clipped_ratio completions/mean_length"
    reward0, std0, entropy0, _, _, cut0, length0 = (
        values(steps[:WINDOW], name) for name in names.split()
    )
    reward, _, entropy, silent, kl, cut, length = (
        values(steps[-WINDOW:], name) for name in names.split()
    )
    right = values(
        steps[-WINDOW:], next((n for n in steps[-1] if n.startswith("rewards/")), "reward")
    ).mean()
    which = "some right, others wrong: take prompts in between"
    if right > 0.9 or right < 0.1:
        which = (
            "all right: take harder prompts" if right > 0.9 else "all wrong: take easier prompts"
        )
    halfway = (
        values(steps[: len(steps) // 2][-WINDOW:], "kl").mean()
        if len(steps) >= 4 * WINDOW
        else np.inf
    )
    norms = values(steps[-2 * WINDOW :], "grad_norm") / (
        cfg.max_grad_norm or np.inf
    )  # at low rates 1 to 4 is healthy
    best, now = max(evals, key=lambda m: m["eval_accuracy"] or 0, default={}), (evals or [{}])[-1]
    (high, low), errors = values([best, now], "eval_accuracy"), values([best, now], "eval_stderr")
    until = max(best.get("step", 0), steps[WINDOW - 1]["step"])
    then = values([m for m in steps if m["step"] <= until][-WINDOW:], "reward").mean()
    return [
        ("The reward has one value only", np.ptp(reward0) + std0.sum() == 0,
         f"it is {reward0[0]:.3g} for every sample; read them with view.py --step"),
        ("`frac_reward_zero_std` is near 1", silent.min() >= 0.9,
         f"{silent.mean():.0%} of the groups have had no signal for {WINDOW} steps, {which}"),
        ("Completions are cut off", cut.min() >= 0.5, f"{cut.mean():.0%} are cut off; raise --max_completion_length"),
        ("Completions are cut off", cut.min() > cut0.mean() + 0.1 and length.mean() > 1.2 * length0.mean(),
         f"{cut.mean():.0%} are, and they grew by {length.mean() / length0.mean() - 1:.0%}; add overlong to --reward"),
        ("The entropy collapses", len(steps) < 50 and right < 0.5 and entropy.max() < entropy0[0] / 20,
         f"it fell from {entropy0[0]:.2g} to {entropy[-1]:.2g} nats a token; lower --learning_rate"),
        ("The reward rises and the answers are nonsense", high - low > 2.5 * np.hypot(*errors) and reward.mean() > then,
         f"the eval fell from {high:.3f} to {low:.3f} while the reward rose to {reward.mean():.3g}; read completions"),
        ("The KL grows without end", kl.min() > 0.5 and (kl.mean() > 1.8 * halfway or reward.mean() <= reward0.mean()),
         f"it is {kl.mean():.2g} nats a token; raise --beta, or lower --learning_rate"),
        ("Another trainer's learning rate does not fit", (norms > (10 if cfg.learning_rate < 5e-5 else 1)).mean() > 0.8,
         f"the gradient norm is {norms.mean():.2g} times --max_grad_norm; lower --learning_rate"),
    ]  # fmt: skip
