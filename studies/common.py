"""The code that the studies share: a short training loop made of grpo's own functions (it writes
nothing to disk), runs in parallel processes, confidence intervals, figures and tables."""

import argparse
import functools
import itertools
import multiprocessing
import os
import sys
import tempfile
import time

# before torch is imported: each run gets one core, and `--jobs` runs go on at a time
os.environ.setdefault("OMP_NUM_THREADS", "1")
HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.dirname(HERE))

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import torch
import transformers

import grpo
from extras.view import COLORS
from grpo import Config
from reward import load_rewards

torch.set_num_threads(1)
transformers.logging.disable_progress_bar()
transformers.logging.set_verbosity_error()
plt.rcParams.update(
    {
        "axes.axisbelow": True,
        "axes.grid": True,
        "axes.prop_cycle": plt.cycler(color=COLORS),
        "axes.spines.right": False,
        "axes.spines.top": False,
        "axes.titlesize": 11,
        "figure.constrained_layout.h_pad": 0.06,
        "figure.constrained_layout.w_pad": 0.06,
        "figure.labelsize": 9,  # supxlabel explains bands and whiskers below a figure
        "font.size": 10,
        "grid.alpha": 0.3,
        "legend.fontsize": 9,
        "legend.frameon": False,
        "savefig.dpi": 110,
    }
)
FIGURES = os.path.join(HERE, "figures")
CPU = torch.device("cpu")


def arguments(doc: str, add_options=None, quick: bool = True):
    """The study's arguments, with the start time, the number of processes and the directory of
    its figure. `--quick` writes to a temporary directory, so that the published figures come from
    full runs only. `add_options(parser)` adds options of one study."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    if quick:
        parser.add_argument(
            "--quick", action="store_true", help="seconds instead of minutes: does it run and hold?"
        )
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    if add_options:
        add_options(parser)
    args = parser.parse_args()
    args.started = time.monotonic()
    args.out = FIGURES
    if quick and args.quick:
        args.jobs = 1
        args.out = quick_folder()
    return args


def quick_folder() -> str:
    """The directory for the figures and tables of `--quick`."""
    folder = os.path.join(tempfile.gettempdir(), "studies_quick")
    os.makedirs(folder, exist_ok=True)
    return folder


def save(args, name: str, figure, *tables: list) -> None:
    """Writes NAME.png, unless `figure` is None, and NAME.md with the tables. The first row of a
    table is a string, its column names with " | " between them; the others are lists."""
    if figure:
        figure.savefig(os.path.join(args.out, name + ".png"), bbox_inches="tight")
    lines = []
    for header, *rows in tables:
        lines.append(f"| {header} |")
        lines.append("| " + " | ".join(["---"] * (header.count(" | ") + 1)) + " |")
        for row in rows:
            lines.append("| " + " | ".join(cell_text(x) for x in row) + " |")
        lines.append("")
    with open(os.path.join(args.out, name + ".md"), "w") as file:
        file.write("\n".join(lines[:-1]) + "\n")
    print("\n".join(lines))
    minutes = (time.monotonic() - args.started) / 60
    print(f"{name}: {minutes:.1f} minutes, {args.jobs} processes -> {args.out}")


def cell_text(x) -> str:
    """A number of a table to three digits, anything else as it is."""
    if isinstance(x, float):
        return f"{x:.3g}"
    return str(x)


# --------------------------------------------------------------------------------------------------
# One training run


class Run:
    """All objects of a training run on one CPU core, under the names that grpo.Run has. The
    settings are those of the bundled task, but with 8 prompts a step; `options` change them."""

    player = None  # no environment

    def __init__(self, **options):
        lean = dict(num_prompts=8, beta=0.0, max_sampler_gap=1e9, micro_batch_tokens=2048)
        lean |= dict(dtype="float32")
        self.cfg = cfg = Config(**(grpo.BUNDLED | lean | options))
        self.tokenizer, self.rewards, self.train_prompts, self.eval_prompts = data()
        self.model = grpo.load_model("model", cfg.model, cfg, CPU)
        self.policy = grpo.Policy(self.model, cfg.temperature)
        reference = grpo.load_model("model", cfg.model, cfg, CPU).requires_grad_(False)
        self.reference = grpo.Policy(reference, cfg.temperature)
        stop_ids = grpo.stop_ids_of(self.model, self.tokenizer, cfg)
        self.sampler = grpo.HFSampler(self.model, stop_ids, cfg)
        self.optimizer = grpo.make_optimizer(self.policy, cfg)

    def rollout(self, step: int) -> list:
        """Samples with rewards and advantages; the samples of a group are consecutive."""
        cfg = self.cfg
        prompts = grpo.prompts_of_step(self.train_prompts, step, cfg)
        samples = grpo.rollout(
            self, prompts, grpo.SAMPLING, step, cfg.num_generations, cfg.temperature
        )
        grpo.assign_advantages(samples, cfg)
        return samples

    def update(self, samples: list, step: int) -> dict:
        """All optimizer steps of one rollout; returns their metrics."""
        cfg = self.cfg
        if cfg.num_minibatches * cfg.num_epochs > 1:
            grpo.add_logps("old_logps", self.policy, samples, cfg)
        if cfg.beta > 0:
            grpo.add_logps("ref_logps", self.reference, samples, cfg)
        return grpo.update(
            self.policy, self.policy, self.optimizer, samples, step, cfg, reference=self.reference
        )

    def evaluate(self, n: int, step: int) -> dict:
        """Greedy accuracy on the first n held-out prompts."""
        self.eval_prompts = self.eval_prompts[:n]
        return grpo.evaluate(self, step)

    def exact_kl(self, samples: list) -> float:
        """KL(policy || reference) in nats per completion, exact over the whole vocabulary: the KL
        of the next-token distributions, summed over the samples' positions."""
        batch = grpo.collate(samples, CPU)
        with torch.no_grad():
            p = next_tokens(self.policy, batch)  # [N, T, V]
            q = next_tokens(self.reference, batch)
        kl = (p.exp() * (p - q)).sum(-1)  # [N, T]
        return (grpo.zero_outside(batch["sampled"], kl).sum() / len(samples)).item()


def next_tokens(policy, batch: dict):
    """[N, T, V]: the log-probabilities of all tokens at each place of a completion."""
    logits = policy.model(batch["ids"]).logits  # [N, L, V]
    logits = logits.take_along_dim(batch["predictors"][:, :, None], dim=1)  # [N, T, V]
    return (logits.double() / policy.temperature).log_softmax(-1)


def advantage_of(sample) -> float:
    """The advantage that all tokens of a sample share."""
    return float(sample.advantages[0])


def lengths_of(samples: list) -> np.ndarray:
    """[N] completion tokens."""
    return np.array([len(s.completion_ids) for s in samples])


@functools.cache
def data() -> tuple:
    """Tokenizer, rewards, and the prompts of training and eval, of the bundled task."""
    cfg = Config(**grpo.BUNDLED)
    tokenizer = transformers.AutoTokenizer.from_pretrained(cfg.model)
    rewards = load_rewards(cfg.reward)
    train = grpo.load_prompts("train_data", tokenizer, rewards, None, cfg)
    return tokenizer, rewards, train, grpo.load_prompts("eval_data", tokenizer, rewards, None, cfg)


def train(before=None, after=None, stop=None, evals=(), n_eval=200, **options) -> list[dict]:
    """A run's metrics, a dict for each step. before(run, step, samples) and
    after(run, step, samples) are called around the update: they may change the samples, and may
    return metrics. stop(history) ends the run. `evals` lists the steps with an evaluation."""
    run = Run(**options)
    history = []
    for step in range(1, run.cfg.max_steps + 1):
        samples = run.rollout(step)
        metrics = dict(step=step)
        if before:
            metrics.update(before(run, step, samples) or {})
        metrics.update(grpo.sample_metrics(samples))
        metrics.update(run.update(samples, step))
        if after:
            metrics.update(after(run, step, samples) or {})
        if step in evals:
            metrics.update(run.evaluate(n_eval, step))
        history.append(metrics)
        if stop and stop(history):
            break
    return history


class Recorder:
    """Takes the optimizer's place and keeps the gradient that grpo.update computed."""

    def __init__(self, policy):
        self.policy = policy
        self.param_groups = [{"lr": 0.0}]

    def step(self):
        pass

    def zero_grad(self, set_to_none):
        if all(p.grad is None for p in self.policy.parameters()):
            return  # before the backward pass
        self.gradient = torch.cat([p.grad.flatten() for p in self.policy.parameters()])
        for p in self.policy.parameters():
            p.grad = None


def update_gradient(run: Run, samples: list, **options):
    """The gradient [P] of one optimizer step, before clipping, computed by grpo.update."""
    recorder = Recorder(run.policy)
    bare = dict(
        beta=0.0, max_grad_norm=0.0, max_sampler_gap=1e9, tis_cap=0.0, micro_batch_tokens=2048
    )
    cfg = Config(**(grpo.BUNDLED | bare | options))
    grpo.update(run.policy, run.policy, recorder, samples, 1, cfg)
    return recorder.gradient


def scan(function, settings: list[tuple], jobs: int) -> dict:
    """{setting: function(*setting)}, computed by `jobs` processes. The results depend neither on
    the number of processes nor on the order."""
    if jobs == 1:
        return {setting: function(*setting) for setting in settings}
    with multiprocessing.get_context("fork").Pool(min(jobs, len(settings))) as pool:
        results = pool.starmap(function, settings, chunksize=1)
    return dict(zip(settings, results, strict=True))


def grid(*axes) -> list[tuple]:
    return list(itertools.product(*axes))


# --------------------------------------------------------------------------------------------------
# Statistics


def steps_to(threshold: float, history: list[dict], window: int = 3) -> float:
    """The first step at which the mean reward of the last `window` steps reaches the threshold;
    inf if none does."""
    rewards = [m["reward"] for m in history]
    for n in range(window, len(rewards) + 1):
        if np.mean(rewards[n - window : n]) >= threshold:
            return n
    return np.inf


def interval(values, n: int = 10_000) -> tuple[float, float, float]:
    """The mean and its 95 % bootstrap interval."""
    values = np.asarray(values, float)
    means = np.random.default_rng(0).choice(values, (n, len(values))).mean(1)
    low, high = np.quantile(means, (0.025, 0.975))
    return float(values.mean()), float(low), float(high)


def span(values, digits: int = 3) -> str:
    """The mean and its interval as text: 0.66 (0.61 to 0.70)."""
    mean, low, high = interval(values)
    return f"{mean:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def permutation_test(a, b, n: int = 20_000) -> float:
    """Two-sided p of the difference of the means: how often is it as large if the runs are
    assigned to a and b at random?"""
    both = np.concatenate([a, b]).astype(float)
    shuffled = np.random.default_rng(0).permuted(np.tile(both, (n, 1)), axis=1)  # [n, A + B]
    differences = np.abs(shuffled[:, : len(a)].mean(1) - shuffled[:, len(a) :].mean(1))
    measured = abs(np.mean(a) - np.mean(b))
    return float((1 + (differences >= measured - 1e-12).sum()) / (1 + n))


# --------------------------------------------------------------------------------------------------
# Figures


def ordered(n: int):
    """n colours from dark to light, which colour-blind readers can tell apart."""
    return plt.cm.viridis(np.linspace(0, 0.8, n))


def legend(figure, axis, ncols: int, **style) -> None:
    """Puts the axis's legend above all panels, away from the curves."""
    figure.legend(
        *axis.get_legend_handles_labels(), loc="outside upper center", ncols=ncols, **style
    )


def mean_with_whiskers(axis, x, values, **style) -> None:
    """A dot at the mean of the values, with its 95 % bootstrap interval."""
    mean, low, high = interval(values)
    axis.errorbar(x, mean, [[mean - low], [high - mean]], **style)


def band(axis, histories: list, key: str, **style) -> None:
    """The mean over runs by step, with its standard error as a band. Curves of less than five
    points have markers."""
    steps = [m["step"] for m in histories[0] if key in m]
    values = np.array([[m[key] for m in h if key in m] for h in histories])  # [runs, steps]
    mean = np.nanmean(values, 0)
    error = np.nanstd(values, 0) / np.sqrt(max(1, len(values) - 1))
    if len(steps) < 5:
        style["marker"] = "o"
    (line,) = axis.plot(steps, mean, ms=4, **style)
    axis.fill_between(steps, mean - error, mean + error, color=line.get_color(), alpha=0.2, lw=0)
    axis.xaxis.get_major_locator().set_params(integer=True)


def bands(axes, panels: dict, runs: list[tuple], xlabel: str) -> None:
    """Draws a panel for each {key: (title, y label)}, with a band for each (histories, style)."""
    for axis, (key, (title, ylabel)) in zip(axes.flat, panels.items(), strict=True):
        for histories, style in runs:
            band(axis, histories, key, **style)
        axis.set(title=title, xlabel=xlabel, ylabel=ylabel)


def until_one_stops(histories: list) -> list:
    """The histories, cut where the first run stopped."""
    shortest = min(len(h) for h in histories)
    return [h[:shortest] for h in histories]


def draw_steps_to_reward(axis, x, steps, colour, scatter_at) -> None:
    """The mean of the steps that the seeds needed, with whiskers, and a small dot for each seed."""
    mean_with_whiskers(axis, x, steps, fmt="o", capsize=4, color=colour, zorder=3)
    axis.scatter(scatter_at, steps, s=12, alpha=0.4, color=colour)
