"""Watches a run's metrics: if something looks wrong, one line, once per run, with where to read."""

import numpy as np

WINDOW = 5  # steps: one alone says little


class Advice:
    """The metrics so far, and the notes on them."""

    def __init__(self, cfg, past: list[dict]):
        """past: the metrics before a resume, whose notes were printed then."""
        self.cfg = cfg
        self.steps = []
        self.evals = []
        self.printed = set()  # headings
        for line in past:
            self.see(line)

    def see(self, line: dict) -> list[str]:
        """Takes the next line of metrics.jsonl. Returns the notes to print after it."""
        if "eval_accuracy" in line:
            self.evals.append(line)
        else:
            self.steps.append(line)
        if len(self.steps) < WINDOW:
            return []
        notes = []
        for heading, finding in FINDINGS:
            text = finding(self)
            if text and heading not in self.printed:
                self.printed.add(heading)
                notes.append(f"note: {heading}: {text} (REFERENCE.md, Troubleshooting)")
        return notes


def values(lines, name):
    """One metric of some lines. NaN if there is no number: every comparison with it is False."""
    return np.array([line.get(name) for line in lines], float)


def first(run, name):
    return values(run.steps[:WINDOW], name)


def last(run, name):
    return values(run.steps[-WINDOW:], name)


def change(run, name):
    """How much the mean of a metric has risen, from the first steps to the last ones."""
    return last(run, name).mean() - first(run, name).mean()


def share_right(run):
    """The mean of the first reward function over the last steps."""
    names = [name for name in run.steps[-1] if name.startswith("rewards/")]
    names.append("reward")
    return last(run, names[0]).mean()


# -- findings: each returns what to print, or nothing if all is well


def one_reward(run):
    reward = first(run, "reward")
    spread = first(run, "reward_std")
    if np.ptp(reward) == 0 and spread.sum() == 0:
        return f"it is {reward[0]:.3g} for every sample; read them with view.py --step"


def no_signal(run):
    share = last(run, "frac_reward_zero_std")
    right = share_right(run)
    which = "some right, others wrong: take prompts in between"
    if right > 0.9:
        which = "all right: take harder prompts"
    if right < 0.1:
        which = "all wrong: take easier prompts"
    if share.min() >= 0.9:
        groups = f"{share.mean():.0%} of the groups"
        return f"{groups} have had no signal for {WINDOW} steps, {which}"


def cut_off(run):
    """Half of them, or more and more of them while completions grow."""
    share = last(run, "completions/clipped_ratio")
    length_at_first = first(run, "completions/mean_length").mean()
    more = change(run, "completions/clipped_ratio") > 0.1
    longer = change(run, "completions/mean_length") > 0.2 * length_at_first
    if share.min() >= 0.5 or (more and longer):
        advice = "raise --max_completion_length, or add overlong to --reward"
        return f"{share.mean():.0%} are cut off; {advice}"


def entropy_collapse(run):
    """Early, and while most answers are wrong: else a low entropy is what learning leaves."""
    entropy = last(run, "entropy")
    entropy_at_first = first(run, "entropy")[0]
    early = len(run.steps) < 50
    wrong = share_right(run) < 0.5
    collapsed = entropy.max() < entropy_at_first / 20
    if early and wrong and collapsed:
        fall = f"from {entropy_at_first:.2g} to {entropy[-1]:.2g} nats a token"
        return f"it fell {fall}; lower --learning_rate"


def reward_hacking(run):
    """The eval has fallen from its best, by more than chance, while the reward has risen."""
    if not run.evals:
        return None
    now = run.evals[-1]
    best = max(run.evals, key=lambda line: line["eval_accuracy"] or 0)
    high, low = values([best, now], "eval_accuracy")
    error = np.hypot(*values([best, now], "eval_stderr"))
    eval_fell = high - low > 2.5 * error
    if not eval_fell:
        return None

    until = max(best["step"], run.steps[WINDOW - 1]["step"])  # the best may be the eval of step 0
    steps_then = [line for line in run.steps if line["step"] <= until]
    reward_then = values(steps_then[-WINDOW:], "reward").mean()
    reward_now = last(run, "reward").mean()
    if reward_now > reward_then:
        fall = f"the eval fell from {high:.3f} to {low:.3f}"
        return f"{fall} while the reward rose to {reward_now:.3g}; read completions"


def kl_growth(run):
    """Large, still rising, and of no use. In distillation it is large at first, and falls."""
    kl = last(run, "kl_k1")
    large = kl.min() > 0.5
    rises = change(run, "kl_k1") > 0
    useless = change(run, "reward") <= 0
    if large and rises and useless:
        return f"it is {kl.mean():.2g} nats a token; raise --beta, or lower --learning_rate"


def large_gradient(run):
    """Clipped nearly always, and of no use. In distillation a large one is of use: the KL falls."""
    max_norm = run.cfg.max_grad_norm
    if max_norm == 0 or len(run.steps) < 2 * WINDOW:
        return None
    reward_rises = change(run, "reward") > 0
    kl_falls = change(run, "kl_k1") < 0
    if reward_rises or kl_falls:
        return None
    times = values(run.steps[-2 * WINDOW :], "grad_norm") / max_norm
    limit = 1
    if run.cfg.learning_rate < 5e-5:
        limit = 10  # at low rates 1 to 4 is healthy
    share_clipped = (times > limit).mean()
    if share_clipped > 0.8:
        norm = f"the gradient norm is {times.mean():.2g} times --max_grad_norm"
        return f"{norm}; lower --learning_rate"


FINDINGS = [  # heading in REFERENCE.md, and what looks for it
    ("The reward has one value only", one_reward),
    ("`frac_reward_zero_std` is near 1", no_signal),
    ("Completions are cut off", cut_off),
    ("The entropy collapses", entropy_collapse),
    ("The reward rises and the answers are nonsense", reward_hacking),
    ("The KL grows without end", kl_growth),
    ("Another trainer's learning rate does not fit", large_gradient),
]
