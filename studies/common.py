"""The code that the studies share: grpo.train with hooks around its update, runs in parallel
processes, figures and tables. Sides are compared as in tools/compare.py."""

import argparse
import contextlib
import copy
import itertools
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

# before torch is imported: each run gets one core, and `--jobs` runs go on at the same time
os.environ.setdefault("OMP_NUM_THREADS", "1")
HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(HERE)
sys.path[:0] = [ROOT, f"{ROOT}/tools"]

import matplotlib

matplotlib.use("Agg")
import compare
import matplotlib.pyplot as plt
import numpy as np
import torch
import view

import grpo
from extras import runs as runs_of_extras

torch.set_num_threads(1)
plt.rc("axes", grid=True, titlesize=11, prop_cycle=plt.cycler(color=view.COLORS))
plt.rc("figure", labelsize=9)
plt.rc("grid", alpha=0.3)
plt.rc("legend", fontsize=9, frameon=False)
plt.rc("savefig", dpi=110)


def arguments(doc: str, *names: str):
    """The study's arguments, some by name ("folder", "many*", "--switch"); when it began; and where
    its figure goes: with `--quick` to a temporary directory, as only full runs are published."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=doc, formatter_class=raw)
    for name in names:
        kind = dict(nargs="*") if name.endswith("*") else {}
        if name.startswith("--"):
            kind = dict(action="store_true")
        parser.add_argument(name.rstrip("*"), **kind)
    parser.add_argument("--quick", action="store_true", help="does it run, and do its claims hold?")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    args = parser.parse_args()
    args.started = time.monotonic()
    args.out = os.path.join(HERE, "figures")
    if args.quick:
        args.jobs = 1
        args.out = tempfile.mkdtemp()
    return args


def save(args, name: str, panels: list[tuple], *tables: list) -> None:
    """Writes NAME.png, and NAME.md with the tables. The first row of a table is a string, its
    column names with " | " between them; the others are lists."""
    if panels:
        figure_of(panels).savefig(os.path.join(args.out, name + ".png"), bbox_inches="tight")
    lines = []
    for header, *rows in tables:
        lines += [f"| {header} |", "| " + " | ".join(["---"] * (header.count(" | ") + 1)) + " |"]
        for row in rows:
            cells = [f"{x:.3g}" if isinstance(x, float) else str(x) for x in row]
            lines.append("| " + " | ".join(cells) + " |")
        lines.append("")
    Path(args.out, name + ".md").write_text("\n".join(lines[:-1]) + "\n")
    print("\n".join(lines))
    minutes = (time.monotonic() - args.started) / 60
    print(f"{name}: {minutes:.1f} minutes, {args.jobs} processes -> {args.out}")


def install(at, *packages: str) -> None:
    """Installs packages into a folder, without their dependencies."""
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-compile"]
    pip += ["--ignore-requires-python", "--target", str(at)]
    subprocess.run([*pip, *packages], check=True)


def train(before=None, after=None, stop=None, evals=False, **options) -> list[dict]:
    """A run of the bundled task, but with 8 prompts a step; `options` are other flags. Returns the
    metrics of each step, with the metrics of the eval after the step.

    before(policy, samples, step) and after(policy, samples, step) are called around the update.
    They may change the samples, and may return metrics. stop(metrics) ends the run. evals: also run
    evals before the first step, every eval_every steps, and after the last step."""
    update, is_over = grpo.update, grpo.Run.should_stop

    def update_with_hooks(policy, ddp, optimizer, samples, step, cfg):
        metrics = {}
        if before:
            metrics |= before(policy, samples, step) or {}
        metrics |= update(policy, ddp, optimizer, samples, step, cfg)
        if after:
            metrics |= after(policy, samples, step) or {}
        return metrics

    def is_over_or_stopped(run):
        return is_over(run) or (stop is not None and stop(run.files.history))

    lean = dict(num_prompts=8, beta=0.0, max_sampler_gap=1e9, micro_batch_tokens=2048)
    lean |= dict(dtype="float32", eval_every=0, log_completions=0)
    if not evals:
        lean |= dict(eval_data="")
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.object(grpo, "update", update_with_hooks),
        mock.patch.object(grpo.Run, "should_stop", is_over_or_stopped),
        mock.patch.object(runs_of_extras.Files, "save"),
        mock.patch("tools.view.draw"),
        contextlib.redirect_stdout(None),
    ):
        lines = grpo.train(grpo.Config(**grpo.BUNDLED | lean | dict(out_dir=folder) | options))
    steps = {}
    for line in lines:
        steps.setdefault(line["step"], {}).update(line)
    steps.pop(0, None)
    return list(steps.values())


def rollout(**options) -> tuple:
    """The policy before its first update, and the samples of the first step with a signal."""
    kept = []

    def keep(policy, samples, step):
        if not kept and any(s.advantages[0] != 0 for s in samples):
            kept.extend((copy.deepcopy(policy), samples))

    train(keep, stop=lambda steps: len(kept) > 0, max_steps=100, **options)
    return tuple(kept)


def gradient_of(policy, samples: list, **options):
    """[P]: the gradient that grpo.update would give to the optimizer, before it is clipped."""
    cfg = grpo.Config(**dict(tis_cap=0.0, micro_batch_tokens=2048) | options)
    policy.zero_grad()
    grpo.accumulate_gradient(policy, policy, samples, cfg)
    return torch.cat([p.grad.flatten() for p in policy.parameters()])


def relative_error(gradient, exact) -> float:
    return ((gradient - exact).norm() / exact.norm()).item()


def lengths_of(samples: list) -> np.ndarray:
    """[N] completion tokens."""
    return np.array([len(s.completion_ids) for s in samples])


def scan(function, first: tuple, settings: list[tuple], seeds, jobs: int) -> dict:
    """{setting: [function(*first, *setting, seed) of each seed]}, computed by `jobs` processes. The
    results depend neither on the number of processes nor on the order."""
    work = [(*first, *setting, seed) for setting in settings for seed in seeds]
    if jobs == 1:
        results = itertools.starmap(function, work)
    else:
        with multiprocessing.get_context("fork").Pool(jobs) as pool:
            results = iter(pool.starmap(function, work, chunksize=1))
    return {setting: [next(results) for _ in seeds] for setting in settings}


def grid(*axes) -> list[tuple]:
    return list(itertools.product(*axes))


def steps_to(threshold: float, metrics: list[dict], window: int = 3) -> float:
    """The first step at which the mean reward of the last `window` steps reaches the threshold;
    inf if no step does."""
    rewards = [m["reward"] for m in metrics if "reward" in m]
    for n in range(window, len(rewards) + 1):
        if np.mean(rewards[n - window : n]) >= threshold:
            return n
    return np.inf


def span(values, digits: int = 3) -> str:
    """The mean and half of its 95 % interval, 0 for one seed: 0.663 +- 0.041."""
    half = 0.0
    if len(values) > 1:
        half = compare.half_interval(list(map(float, values)))
    return f"{np.mean(values):.{digits}f} +- {half:.{digits}f}"


def mean_and_std(values) -> str:
    return f"{np.mean(values):.3f} +- {np.std(values):.3f}"


def difference(values, others) -> str:
    """values - others, of the same seeds, with its interval, in words; nothing for one side."""
    if values is others:
        return ""
    return compare.difference(dict(enumerate(others)), dict(enumerate(values)))


def figure_of(panels: list[tuple]):
    """A panel is a title, a metric, and {label: runs}. It shows by step the mean over the seeds, up
    to the end of the first run, and all seeds as a band."""
    n_columns = min(2, len(panels))
    n_rows = (len(panels) + 1) // 2
    figure = plt.figure(figsize=(5 * n_columns, 3.6 * n_rows), layout="constrained")
    for number, (title, metric, sides) in enumerate(panels, 1):
        axis = figure.add_subplot(n_rows, n_columns, number, title=title, xlabel="step")
        for label, runs in sides.items():
            runs = [SimpleNamespace(log=run) for run in runs]
            steps, values = compare.curves_of(runs, metric)
            (line,) = axis.plot(steps, values.mean(0), marker=".", label=label)
            style = dict(color=line.get_color(), alpha=0.2, lw=0)
            axis.fill_between(steps, values.min(0), values.max(0), **style)
        axis.legend()
    figure.supxlabel("lines: means of the seeds;  bands: all of them")
    return figure
