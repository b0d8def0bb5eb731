"""Watches a run's metrics: prints one note, once per run, if something looks wrong."""

import numpy as np

WINDOW = 5  # steps; a single one is noise


class Advice:
    """The metrics of the steps so far, and the notes on them."""

    def __init__(self, past):
        """past: metrics before a resume; their notes are printed already."""
        self.steps = []
        self.printed = set()  # headings
        for line in past:
            self.see(line)

    def see(self, line):
        """Takes the next line of metrics.jsonl. Returns the notes to print after it."""
        if "eval_accuracy" in line:
            return []
        self.steps.append(line)
        if len(self.steps) < WINDOW:
            return []
        notes = []
        for heading, finding in FINDINGS:
            text = finding(self.steps)
            if text and heading not in self.printed:
                self.printed.add(heading)
                notes.append(f"note: {heading}: {text} (REFERENCE.md, Troubleshooting)")
        return notes


def values(steps, name):
    """One metric of some steps. NaN if there is no number: every comparison with it is False."""
    return np.array([line.get(name) for line in steps], float)


def last(steps, name):
    return values(steps[-WINDOW:], name)


def change(steps, name):
    """How much the mean of a metric has risen, from the first steps to the last ones."""
    return last(steps, name).mean() - values(steps[:WINDOW], name).mean()


# -- findings: each returns what to print, or nothing if all is well


def one_reward(steps):
    reward = values(steps[:WINDOW], "reward")
    spread = values(steps[:WINDOW], "reward_std")
    if np.ptp(reward) == 0 and spread.sum() == 0:
        return f"it is {reward[0]:.3g} for every sample; read them with view.py --step"


def no_signal(steps):
    share = last(steps, "frac_reward_zero_std")
    if share.min() >= 0.9:
        groups = f"{share.mean():.0%} of the groups"
        reward = f"the mean reward is {last(steps, 'reward').mean():.2g}"
        advice = "take harder prompts if it is high, easier ones if it is low"
        return f"{groups} have had no signal for {WINDOW} steps; {reward}: {advice}"


def cut_off(steps):
    share = last(steps, "completions/clipped_ratio")
    if share.min() >= 0.5:
        advice = "raise --max_completion_length, or add overlong to --reward"
        if "turns/mean" in steps[-1]:
            advice = "raise --max_completion_length, --max_turns or --max_turn_length"
        return f"{share.mean():.0%} are cut off; {advice}"


def one_turn(steps):
    if last(steps, "turns/mean").max() == 1:
        return f"all of them, for {WINDOW} steps; read them with view.py --step"


def kl_growth(steps):
    """Large and rising, without more reward. In distillation it starts large and falls."""
    kl = last(steps, "kl_k1")
    rises = change(steps, "kl_k1") > 0
    useless = change(steps, "reward") <= 0
    if kl.min() > 0.5 and rises and useless:
        return f"it is {kl.mean():.2g} nats a token; raise --beta, or lower --learning_rate"


FINDINGS = [  # heading in REFERENCE.md, and its check
    ("The reward has one value only", one_reward),
    ("`frac_reward_zero_std` is near 1", no_signal),
    ("Completions are cut off", cut_off),
    ("Episodes end with the first turn", one_turn),
    ("The KL grows without end", kl_growth),
]
