"""What the studies share: a lean training loop made of grpo's own functions (nothing is written to disk), several
runs at once in processes, confidence intervals, and saving of the figure and the table."""

import argparse
import functools
import itertools
import multiprocessing
import os
import sys
import tempfile
import time

os.environ.setdefault(
    "OMP_NUM_THREADS", "1"
)  # before torch: one core a run, `--jobs` runs at a time
HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.dirname(HERE))

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import torch
from transformers.utils import logging

import grpo
import harness.models
import harness.workers
import reward
import view
from grpo import Config
from harness.fast import FastPolicy
from harness.ranks import World

torch.set_num_threads(1)
logging.disable_progress_bar()
logging.set_verbosity_error()
plt.rcParams |= {"font.size": 10, "axes.grid": True, "grid.alpha": 0.3, "axes.spines.top": False}
plt.rcParams |= {
    "axes.spines.right": False,
    "savefig.dpi": 110,
    "legend.frameon": False,
    "legend.fontsize": 9,
}
plt.rcParams |= {
    "axes.prop_cycle": plt.cycler(color=view.COLORS),
    "axes.axisbelow": True,
    "axes.titlesize": 11,
}
plt.rcParams |= {"figure.constrained_layout.w_pad": 0.06, "figure.constrained_layout.h_pad": 0.06}
plt.rcParams |= {
    "figure.labelsize": 9
}  # supxlabel, the line below a figure: what its bands and whiskers are
CPU = World(0, 1, torch.device("cpu"))


def arguments(doc: str, options=None):
    """--quick writes its figure to a temporary directory: the published one comes from the full run only. options: adds
    a study's own."""
    parser = argparse.ArgumentParser(description=doc)
    parser.add_argument(
        "--quick",
        action="store_true",
        help="seconds instead of minutes: does it still run and hold?",
    )
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    if options:
        options(parser)
    args = parser.parse_args()
    args.started = time.monotonic()
    args.jobs = 1 if args.quick else args.jobs
    args.out = (
        os.path.join(tempfile.gettempdir(), "studies_quick")
        if args.quick
        else os.path.join(HERE, "figures")
    )
    os.makedirs(args.out, exist_ok=True)
    return args


def save(args, name: str, figure, *tables: list) -> None:
    """The figure, if there is one, and one markdown file with the tables, whose first row is the header."""
    if figure:
        figure.savefig(os.path.join(args.out, name + ".png"), bbox_inches="tight")
    lines = []
    for header, *rows in tables:
        cells = [[f"{x:.3g}" if isinstance(x, float) else str(x) for x in row] for row in rows]
        lines += [
            "| " + " | ".join(row) + " |" for row in [header, ["---"] * len(header), *cells]
        ] + [""]
    with open(os.path.join(args.out, name + ".md"), "w") as file:
        file.write("\n".join(lines[:-1]) + "\n")
    print("\n".join(lines))
    print(
        f"{name}: {(time.monotonic() - args.started) / 60:.1f} minutes, {args.jobs} processes -> {args.out}"
    )


# ----------------------------------------------------------------------------------------------------------------
# One training run


def fast_policy(model, temperature: float):
    """The policy with rows without padding and the head in tiles, which a run takes by itself."""
    return FastPolicy(grpo.Policy(model, temperature))


class Run:
    """Everything a run needs, on one CPU core. The settings are the bundled ones but for 8 prompts a step."""

    def __init__(self, **options):
        lean = dict(num_prompts=8, beta=0.0, max_sampler_gap=1e9, micro_batch_tokens=2048)
        self.cfg = cfg = Config(**(grpo.BUNDLED | lean | options))
        self.tokenizer, self.train_prompts, self.eval_prompts = data(
            cfg.model, cfg.train_data, cfg.eval_data
        )
        self.model = grpo.load_model(cfg.model, cfg)
        self.policy = fast_policy(self.model, cfg.temperature)
        self.reference = fast_policy(
            grpo.load_model(cfg.model, cfg).requires_grad_(False), cfg.temperature
        )
        self.sampler = grpo.HFSampler(
            self.model, *harness.models.special_ids(self.model, self.tokenizer, cfg), cfg
        )
        self.optimizer = grpo.make_optimizer(self.policy, cfg)
        self.scorer = harness.workers.Scorer(reward.load_rewards(cfg.reward))

    def rollout(self, step: int, prompts=None) -> list:
        """Scored samples with advantages, groups consecutive."""
        cfg = self.cfg
        prompts = prompts or grpo.prompts_of_step(self.train_prompts, step, cfg)
        samples = grpo.sample(
            *(
                self.sampler,
                prompts,
                cfg.num_generations,
                cfg.temperature,
                0,
                step,
                self.tokenizer,
                cfg,
                CPU,
            )
        )
        grpo.score(samples, self.scorer, step, cfg)
        self.no_signal = grpo.assign_advantages(samples, step, cfg)
        return samples

    def update(self, samples: list, step: int) -> dict:
        if self.cfg.updates_per_step > 1:
            grpo.compute_logps(self.policy, samples, "old_logps", self.cfg, CPU)
        if self.cfg.beta > 0:
            grpo.compute_logps(self.reference, samples, "ref_logps", self.cfg, CPU)
        return grpo.update(self.policy, self.optimizer, samples, self.cfg, step=step)

    def evaluate(self, n: int, step: int) -> dict:
        """Greedy, on the first n held-out prompts."""
        cfg = self.cfg
        return grpo.evaluate(
            self.sampler, self.eval_prompts[:n], self.tokenizer, self.scorer, step, cfg, CPU
        )

    def exact_kl(self, samples: list) -> float:
        """KL(policy || reference) in nats per completion: at every position of the samples the exact KL of the
        next-token distributions, over the full vocabulary."""
        batch = grpo.collate(samples, CPU.device, self.policy.rows)
        with torch.no_grad():
            p, q = (next_tokens(m, batch) for m in (self.policy, self.reference))  # [n, V]
        return ((p.exp() * (p - q)).sum() / len(samples)).item()


def next_tokens(policy, batch: dict):
    """[n, V]: all log-probabilities at the place of each real completion token."""
    logits = policy.model.get_output_embeddings()(policy.hidden(batch))
    return (logits.double() / policy.temperature).log_softmax(-1)


@functools.cache
def data(model: str, train_data: str, eval_data: str):
    return grpo.load_data(Config(model=model, train_data=train_data, eval_data=eval_data))[1:]


def train(before=None, after=None, stop=None, evals=(), n_eval=200, **options) -> list[dict]:
    """A run's metrics, a dict a step. Hooks: before(run, step, samples) and after(run, step, samples), around the
    update, may change the samples and return metrics; stop(history) ends the run; `evals` are steps with an eval."""
    run, history = Run(**options), []
    for step in range(1, run.cfg.max_steps + 1):
        samples = run.rollout(step)
        metrics = dict(step=step) | (before(run, step, samples) or {} if before else {})
        metrics |= dict(frac_reward_zero_std=run.no_signal) | grpo.sample_metrics(samples, run.cfg)
        metrics |= run.update(samples, step)
        if after:
            metrics |= after(run, step, samples)
        if step in evals:
            metrics |= run.evaluate(n_eval, step)
        history.append(metrics)
        if stop and stop(history):
            break
    return history


class Recorder:
    """Stands in for the optimiser: keeps the gradient that grpo.update computed."""

    def __init__(self, policy):
        self.policy, self.param_groups = policy, [{"lr": 0.0}]

    def step(self):
        pass

    def zero_grad(self, set_to_none):
        self.gradient = torch.cat([p.grad.flatten() for p in self.policy.parameters()])
        for p in self.policy.parameters():
            p.grad = None


def update_gradient(run: Run, samples: list, **options):
    """The gradient [P] of one optimiser step, unclipped, through grpo.update itself."""
    recorder = Recorder(run.policy)
    free = dict(
        beta=0.0, max_grad_norm=0.0, max_sampler_gap=1e9, tis_cap=0.0, micro_batch_tokens=2048
    )
    cfg = Config(**(grpo.BUNDLED | free | options))
    grpo.update(run.policy, recorder, samples, cfg)
    return recorder.gradient


def scan(function, settings: list[tuple], jobs: int) -> dict:
    """{setting: function(*setting)}, `jobs` at a time. Results do not depend on how many or in which order."""
    if jobs == 1:
        return {setting: function(*setting) for setting in settings}
    with multiprocessing.get_context("fork").Pool(min(jobs, len(settings))) as pool:
        return dict(zip(settings, pool.starmap(function, settings, chunksize=1), strict=True))


def grid(*axes) -> list[tuple]:
    return list(itertools.product(*axes))


# ----------------------------------------------------------------------------------------------------------------
# Statistics and curves


def steps_to(threshold: float, history: list[dict], window: int = 3) -> float:
    """The first step at which the mean reward of the last `window` steps has reached the threshold; inf: never."""
    rewards = [m["reward"] for m in history]
    reached = (
        n for n in range(window, len(rewards) + 1) if np.mean(rewards[n - window : n]) >= threshold
    )
    return next(reached, np.inf)


def interval(values, n: int = 10_000) -> tuple[float, float, float]:
    """Mean and its 95 % bootstrap interval."""
    values = np.asarray(values, float)
    means = np.random.default_rng(0).choice(values, (n, len(values))).mean(1)
    return float(values.mean()), *(float(q) for q in np.quantile(means, (0.025, 0.975)))


def permutation_test(a, b, n: int = 20_000) -> float:
    """Two-sided p of the difference of the means, if it did not matter which runs belong to a and which to b."""
    both, rng = np.concatenate([a, b]).astype(float), np.random.default_rng(0)
    shuffled = rng.permuted(np.tile(both, (n, 1)), axis=1)  # [n, A + B]
    found = np.abs(shuffled[:, : len(a)].mean(1) - shuffled[:, len(a) :].mean(1))
    return float((1 + (found >= abs(np.mean(a) - np.mean(b)) - 1e-12).sum()) / (1 + n))


def ordered(n: int):
    """n colours of an ordered scale, dark to light; like view.COLORS, the colour-blind can tell them apart."""
    return plt.cm.viridis(np.linspace(0, 0.8, n))


def legend(figure, axis, ncols: int, **style) -> None:
    """The axis's legend above all panels, where no curve can be."""
    figure.legend(
        *axis.get_legend_handles_labels(), loc="outside upper center", ncols=ncols, **style
    )


def band(axis, histories: list, key: str, **style) -> None:
    """Mean over runs against the step, with the standard error as a band; few steps are marked."""
    there = [m["step"] for m in histories[0] if key in m]
    values = np.array([[m[key] for m in h if key in m] for h in histories])  # [runs, steps]
    mean, error = np.nanmean(values, 0), np.nanstd(values, 0) / np.sqrt(max(1, len(values) - 1))
    (line,) = axis.plot(there, mean, marker="o" if len(there) < 5 else None, ms=4, **style)
    axis.fill_between(there, mean - error, mean + error, color=line.get_color(), alpha=0.2, lw=0)
    axis.xaxis.get_major_locator().set_params(integer=True)


def bands(axes, panels: dict, runs: list[tuple], xlabel: str) -> None:
    """A panel for each {key: (title, y label)}, with a band for each (histories, style) of `runs`."""
    for axis, (key, (title, ylabel)) in zip(axes.flat, panels.items(), strict=True):
        for histories, style in runs:
            band(axis, histories, key, **style)
        axis.set(title=title, xlabel=xlabel, ylabel=ylabel)
