"""Is a change better, or was it the seeds? Compares runs of grpo.py and of changed copies.

    python extras/compare.py out out.1 mine mine.1       # runs with the same flags are one side
    python extras/compare.py base=out,out.1 mine=mine,mine.1
    python extras/compare.py --run grpo.py 'my_grpo.py --mine 3' --seeds 3 --jobs 2 [flags of both]

--run makes what compare/ lacks: a run is known by its script, reward.py, flags and the files that
flags name. One number is tested, since of ten one differs by chance: the mean reward of the steps
that all runs have, which shows who learns sooner. The interval (95 %) is Student's for the
differences by seed, else Welch's with the fewer degrees of freedom.
"""

import argparse
import fcntl
import json
import re
import shlex
import sys
import zlib
from itertools import product
from multiprocessing.pool import ThreadPool
from pathlib import Path
from statistics import fmean, variance
from subprocess import PIPE, STDOUT, Popen

import numpy as np
import view
from tqdm import tqdm

METRICS = "reward eval_accuracy completions/mean_length tokens step_time".split()
T = (12.706, 4.303, 3.182, 2.776)  # t distribution: 97.5 % quantiles for 2, 3, 4, 5 and more seeds
COLUMN = "{:<20}".format
np.seterr(invalid="ignore")  # one seed has no standard error: nan


class Run:
    def __init__(self, folder):
        self.log = view.read_log(folder, "metrics.jsonl")
        flags = json.loads(Path(folder, "config.json").read_text())
        about = flags.pop("about", {})  # the script, and the rows of the eval
        self.flags = flags | about | {"out_dir": "", "resume": "", "seed": ""}
        self.seed = flags["seed"]


def make_run(seed, side, flags, bar):
    """Makes a run, or the rest of it, and returns side=folder; nothing if it failed. side: the
    script and, after blanks, flags of its own."""
    script, *own = shlex.split(side)
    flags = [*flags, *own]
    named = re.findall(r"[^,:=\s]+\.\w+", " ".join(flags))  # such as rewards.py:mine
    files = filter(Path.is_file, map(Path, [script, Path(script).with_name("reward.py"), *named]))
    content = b"".join(file.read_bytes() for file in files) + str(flags).encode()
    name = f"{Path(script).stem}_{zlib.crc32(content):08x}_seed{seed}"
    folder = f"compare/{name}"
    command = [sys.executable, script, "--keep", "1", *flags]
    command += ["--seed", str(seed), "--out_dir", folder]
    with open(f"compare/.{name}", "a+") as ended:
        fcntl.flock(ended, fcntl.LOCK_EX)  # its stdin: a run keeps the lock even if we are killed
        if ended.tell() > 0:
            bar.update(1000)
            return f"{side}={folder}"
        if Path(folder).exists():
            command.append("--resume")
        line, done = "no output", 0
        process = Popen(command, stdin=ended, stdout=PIPE, stderr=STDOUT, text=True)
        for line in process.stdout:
            for step, steps in re.findall(r"^step (\d+)/(\d+)", line):
                before, done = done, 1000 * int(step) // int(steps)
                bar.update(done - before)
        if process.wait() == 0 and done in (0, 1000):  # 0: only the end of it was missing
            bar.update(1000 - done)
            ended.write(line)
            return f"{side}={folder}"
    bar.write(f"{folder} failed: {line}")


def curves_of(runs, metric):
    """The steps at which all runs have the metric, and its values [runs, steps]."""
    points = [view.points_of(run.log, metric) for run in runs] or [{}]
    steps = sorted(set.intersection(*map(set, points)))
    return steps, np.array([[p[step] for step in steps] for p in points])


def report(names):
    """names: folders, or side=folder,folder. Prints numbers; returns {side: its runs}."""
    sides, first_with = {}, {}  # first_with: of each set of flags the first folder
    for name in filter(None, names):
        given, _, folders = name.rpartition("=")
        for folder in folders.split(","):
            run = Run(folder)
            side = given or first_with.setdefault(str(run.flags), folder)
            sides.setdefault(side, []).append(run)
    runs = sum(sides.values(), [])
    steps, values = curves_of(runs, "reward")
    if not steps:
        raise ValueError("name runs that have a step each")
    if len({run.flags.get("eval_rows") for run in runs}) > 1:
        raise ValueError("the runs have other eval data")
    shared = set.intersection(*[set(run.flags.items()) for run in runs])
    means = iter(values.mean(1))
    rewards = {}
    for name, side in sides.items():
        own = sorted(side[0].flags.items() - shared)
        print(f"{name}: {len(side)} seeds", *[f"{flag} {value}" for flag, value in own], sep="; ")
        print("+- standard error".ljust(24), *map(COLUMN, ("first", "last", "highest", "mean")))
        for metric in METRICS:
            at, curves = curves_of(side, metric)
            if at:
                columns = curves.T[0], curves.T[-1], curves.max(1), curves.mean(1)
                errors = np.std(columns, 1) / (len(side) - 1) ** 0.5
                cells = zip(np.mean(columns, 1), errors, strict=True)
                print(metric.ljust(24), *[COLUMN(f"{m:.3g} +- {e:.2g}") for m, e in cells])
        rewards[name] = {run.seed: next(means) for run in side}
    base, *others = rewards
    for other in others:
        verdict = difference(rewards[base], rewards[other])
        print(f"mean reward, {other} - {base}: {verdict}")
    return sides


def half_interval(*groups):
    """Half of the 95 % interval of a mean, or of the difference of two: a group each."""
    n = min(map(len, groups))
    return T[min(n, 5) - 2] * sum(variance(group) / len(group) for group in groups) ** 0.5


def difference(a, b):
    """b - a in words, with its 95 % interval. a, b: {seed: value}."""
    groups = [b.values(), a.values()]
    if a.keys() == b.keys():
        groups = [[b[seed] - a[seed] for seed in a]]
    n = min(map(len, groups))
    if n < 2:
        return "one seed does not tell"
    mean = fmean(b.values()) - fmean(a.values())
    half = half_interval(*groups)
    verdict = "no difference seen"
    if abs(mean) > half:
        verdict = "more than the seeds vary"
    return f"{mean:+.3g} +- {half:.2g}, {n} seeds: {verdict}"


def draw(sides):
    from matplotlib.figure import Figure

    figure = Figure(figsize=(14, 7), layout="constrained")
    figure.supxlabel("line: mean of the seeds; band: lowest to highest seed", fontsize=9)
    for number, (title, unit, names) in enumerate(view.PANELS, 1):
        ax = figure.add_subplot(2, 4, number, title=title, ylabel=unit.split(",")[0], xlabel="step")
        for name, side in sides.items():
            steps, values = curves_of(side, min(names))
            ax.plot(steps, values.mean(0), label=name)
            ax.fill_between(steps, values.min(0), values.max(0), alpha=0.2)
    figure.legend(*ax.get_legend_handles_labels(), loc="outside upper center", ncols=5)
    figure.savefig("compare.png")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(usage=argparse.SUPPRESS, allow_abbrev=False)
    parser.format_help = lambda: __doc__
    parser.add_argument("--run", nargs="+")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=1)
    args, names = parser.parse_known_args()
    try:
        if args.run:
            Path("compare").mkdir(exist_ok=True)
            with tqdm(total=1000 * args.seeds * len(args.run), unit_scale=0.001) as bar:
                jobs = product(range(args.seeds), args.run, [names], [bar])
                names = ThreadPool(args.jobs).starmap(make_run, jobs, 1)
        draw(report(names))
    except (Exception, KeyboardInterrupt) as error:
        parser.error(str(error) or "stopped; the same command goes on")
