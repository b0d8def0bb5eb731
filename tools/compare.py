"""Is a change better, or was it the seeds? Compares runs of grpo.py and of changed copies.

    python tools/compare.py out out.1 mine mine.1       # runs with the same flags are one side
    python tools/compare.py base=out,out.1 mine=mine,mine.1
    python tools/compare.py --run grpo.py 'my_grpo.py --mine 3' --seeds 3 --jobs 2 [flags of both]

--run makes the runs that are missing in compare/, and resumes those that were stopped. If code or
data that a run read at its start has changed since, a new run is made in a new directory. (Not
checked: --model, environment variables, installed packages, files opened or imported later.)

Only one metric is tested, as one in twenty differs by chance: the mean of `reward` over the steps
that all runs have, which shows which side learns sooner. If the sides' rewards are not comparable,
it is `eval_accuracy`. --metric NAME tests another metric. The interval (95 %) is Student's for the
differences by seed. If no seed is on both sides, it is Welch's, with the degrees of freedom of the
smaller side. The exit code is 1 if a run failed or was stopped before its last step.
"""

import argparse
import fcntl
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import zlib
from itertools import combinations, product
from multiprocessing.pool import ThreadPool
from pathlib import Path
from statistics import fmean, variance

import numpy as np
import selfcheck
import view
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).parents[1]))
from extras import digests

METRICS = "reward eval_accuracy completions/mean_length tokens step_time".split()
# Flags that may differ within a side.
NEUTRAL = """out_dir resume seed keep save_every log_completions report_to micro_batch_tokens
vllm_gpu_memory_utilization began first_day job""".split()
np.seterr(invalid="ignore")  # one seed has no standard error: nan


class Run:
    def __init__(self, folder):
        self.folder = folder
        self.log = view.read_log(folder, "metrics.jsonl")
        flags = json.loads(Path(folder, "config.json").read_text())
        self.seed = flags["seed"]
        self.flags = about = flags.pop("about", {})  # digests of the files read at its start
        self.files = about.pop("files", {})
        self.own = set(flags)
        self.is_stale = self.files != {path: digests.of_file(path) for path in self.files}
        parts = [*about.pop("flags", {}).values(), flags]  # a resume may change flags
        # Files with a digest, without their folders, which differ in another checkout.
        read = [f"{Path(path).name} {digest}" for path, digest in self.files.items()]
        names = "|".join(re.escape(Path(path).name) for path in self.files)
        folder = re.compile(rf"[^\s,]*/(?=({names})([:,\s]|$))")
        for name in parts[0]:
            said = ", then ".join(dict.fromkeys(str(part.get(name)) for part in parts))
            about[name] = folder.sub("", said)
        self.model = about.get("model")
        known = dict(weights="model", weights_of_reference="reference")
        same = [flag for digest, flag in known.items() if digest in about]
        about |= dict.fromkeys(NEUTRAL + read + same, "")
        self.last = self.log[-1]["step"]
        evals = self.log[0].keys() & {"eval_length"}  # with evals, the last line is an eval
        self.is_whole = self.last == flags["max_steps"] and evals <= self.log[-1].keys()

    def command(self, shared):
        """The flags that not all runs share, and the digests of files that they read."""
        words = []
        for name, value in sorted(self.flags.items() - shared):
            if name == "weights":
                name, value = "model", self.model
            flag = f"--{name}" if name in self.own else name
            words += [flag, shlex.quote(value)] if value else [flag]
        return " ".join(words)


def command_of(side, flags):
    """The command of all runs of a side. side: a script and its own flags. ValueError if the script
    has a Config without one of the flags."""
    script, *own = shlex.split(side)
    said = dict(keep=["--keep", "1"]) | selfcheck.by_name([*flags, *own])
    text = Path(script).read_text()
    for name in said:
        is_unknown = "\nclass Config:" in text and f"\n    {name}: " not in text
        if is_unknown or name in ("seed", "out_dir", "resume"):
            raise ValueError(
                f"{script} takes no --{name} here; quote the flags of one side: 'mine.py --x 3'"
            )
    return [sys.executable, os.path.abspath(script), *sum(said.values(), [])]


def run_in(folder):
    """The run in a folder. If it has no log line yet, removes the folder and returns None."""
    log = Path(folder, "metrics.jsonl")
    if log.exists() and b"\n" in log.read_bytes():
        return Run(folder)
    shutil.rmtree(folder, ignore_errors=True)


def make_run(seed, command, bar):
    """Makes or resumes the run of a seed. If it fails, prints its error and returns None."""
    folder = f"compare/{Path(command[1]).stem}_{zlib.crc32(str(command).encode()):08x}_seed{seed}"
    while True:
        log = open(f"{folder}.log", "a")  # the run writes to it, and keeps the lock if we die
        fcntl.flock(log, fcntl.LOCK_EX)  # waits until no process makes a run there
        run = run_in(folder)
        if not run or not run.is_stale:
            break
        folder += ".edited"
    if not run or not run.is_whole:
        command = [*command, "--seed", str(seed), "--out_dir", folder]
        if run:
            command.append("--resume")
        subprocess.run(command, stdout=log, stderr=log, env=selfcheck.environment())
        run = run_in(folder)
    bar.update()
    if not run or not run.is_whole:
        said = Path(log.name).read_text(errors="replace").strip()
        last_line = said.rpartition("\n")[2]
        bar.write(f"{folder} failed: {last_line} (all output: {log.name})")
    elif not run.files:
        bar.write(f"{folder} has no digests of the files it read: extras/digests.py failed")
    else:
        return run


def read_sides(names):
    """names: folders, or side=folder,folder. Returns {side: its runs}."""
    sides, first_with = {}, {}  # first_with: {flags: the first folder with them}
    for name in names:
        given, _, folders = name.partition("=")
        if not folders or Path(name).exists():
            given, folders = "", name
        for folder in folders.split(","):
            run = Run(folder)
            side = given or first_with.setdefault(str(run.flags), folder)
            sides.setdefault(side, []).append(run)
    return sides


def curves_of(runs, metric):
    """The steps at which all runs have the metric, and its values [runs, steps]."""
    points = [view.points_of(run.log, metric) for run in runs] or [{}]
    steps = sorted(set.intersection(*map(set, points)))
    return steps, np.array([[p[step] for step in steps] for p in points])


def metric_to_test(sides):
    for metric in ("reward", "eval_accuracy"):
        if len({run.flags.get(f"{metric}_of", name) for name in sides for run in sides[name]}) < 2:
            return metric
    why = "the sides' rewards and eval data differ, or are unknown (runs without extras/)"
    raise ValueError(f"{why}; --metric NAME tests a metric anyway")


def mean_and_error(values):
    return f"{np.mean(values):.3g} +- {np.std(values) / (len(values) - 1) ** 0.5:.2g}"


def report(sides, n_made, wanted):
    """Prints a table for each side, and the test. n_made: the runs of a side with --run, else 0.
    Returns whether a run is missing or incomplete."""
    runs = sum(sides.values(), [])
    for side in sides.values():
        for a, b in combinations(side, 2):
            differ = a.flags.items() ^ b.flags.items() or {a.seed} & {b.seed}
            if differ:
                raise ValueError(f"{a.folder} and {b.folder} are not two seeds of a side: {differ}")
    metric = wanted or metric_to_test(sides)
    last = min([run.last for run in runs], default=0)
    for run in runs:  # all numbers come from the same steps
        run.log = [line for line in run.log if line["step"] <= last]
    steps, values = curves_of(runs, metric)
    n = sum(step > 0 for step in steps)  # step 0 is an eval before the training
    if n == 0:
        raise ValueError(f"there is no step for which all runs have {metric}")
    for run, mean in zip(runs, values[:, -n:].mean(1), strict=True):
        run.mean = mean
    shared = set.intersection(*[set(run.flags.items()) for run in runs])
    tested, failed = {}, ""
    for name, side in sides.items():
        tested[name] = {run.seed: run.mean for run in side}
        n_runs = n_made or len(side)
        missing = n_runs - sum(run.is_whole for run in side)
        if missing:
            failed += f"; {name}: {missing} of {n_runs} failed or unfinished"
        if not side:
            continue
        print(f"{name}: {len(side)} seeds {side[0].command(shared)}")
        print("+- standard error\tfirst\tlast\thighest\tmean".expandtabs(24))
        for row in METRICS:
            at, curves = curves_of(side, row)
            if at:
                columns = curves.T[0], curves.T[-1], curves.max(1), curves.mean(1)
                print("\t".join([row, *map(mean_and_error, columns)]).expandtabs(24))
    if metric == "eval_accuracy" != wanted:
        print("the sides' rewards are not comparable")
    print(f"tested: the mean {metric} of {n} steps, up to step {steps[-1]}")
    base, *others = tested
    for other in others:
        print(f"{other} - {base}: {difference(tested[base], tested[other])}{failed}")
    return bool(failed)


def t_quantile(freedom):
    """The 95 % quantile of |t| in Student's distribution. With t = sqrt(freedom) * tan(x), the
    density of x is cos(x) ** (freedom - 1), up to a factor."""
    x = np.arange(1e5) * np.pi / 2e5
    inside = np.cumsum(np.cos(x) ** (freedom - 1))
    return freedom**0.5 * np.tan(x[np.searchsorted(inside, 0.95 * inside[-1])])


def half_interval(*groups):
    """Half the 95 % interval of a group's mean, or of the sum of two groups' means."""
    t = t_quantile(min(map(len, groups)) - 1)
    return t * sum(variance(group) / len(group) for group in groups) ** 0.5


def difference(a, b):
    """b - a in words, with its 95 % interval. a, b: {seed: value}. Shared seeds are paired."""
    groups = [[b[seed] - a[seed] for seed in a.keys() & b.keys()]]
    if groups == [[]]:
        groups = [[*b.values()], [-value for value in a.values()]]
    n = min(map(len, groups))
    if n < 2:
        return "a test needs two seeds"
    mean, half = sum(map(fmean, groups)), half_interval(*groups)
    verdict = "no difference seen"
    if half < 1e-12:
        verdict = "the same in all seeds, so no test is possible"
    elif abs(mean) > half:
        verdict = "more than the seeds vary"
    return f"{mean:+.3g} +- {half:.2g}, {n} seeds: {verdict}"


def draw(sides):
    from matplotlib.figure import Figure

    figure = Figure(figsize=(14, 7), layout="constrained")
    figure.supxlabel("line: mean of the seeds; band: lowest to highest seed")
    for number, (title, unit, pattern) in enumerate(view.PANELS, 1):
        ax = figure.add_subplot(2, 4, number, title=title, ylabel=unit.split(",")[0], xlabel="step")
        for name, side in sides.items():
            steps, values = curves_of(side, pattern.split("|")[0])
            ax.plot(steps, values.mean(0), label=name)
            ax.fill_between(steps, values.min(0), values.max(0), alpha=0.2)
    figure.legend(*ax.get_legend_handles_labels(), loc="outside upper center", ncols=5)
    figure.savefig("compare.png")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(usage=argparse.SUPPRESS, allow_abbrev=False)
    parser.format_help = lambda: __doc__
    parser.add_argument("--run", nargs="+", default=[])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--metric")
    args, rest = parser.parse_known_args()
    try:
        commands = {side: command_of(side, rest) for side in args.run}
        if commands:
            Path("compare").mkdir(exist_ok=True)
            n = len(commands)
            with tqdm(total=n * args.seeds, unit="run") as bar, ThreadPool(args.jobs) as pool:
                jobs = product(range(args.seeds), commands.values(), [bar])
                runs = pool.starmap(make_run, jobs, 1)
            sides = {side: list(filter(None, runs[i::n])) for i, side in enumerate(commands)}
        else:
            sides = read_sides(rest)
        code = report(sides, len(args.run) and args.seeds, args.metric)
        draw(sides)
    except (Exception, KeyboardInterrupt) as error:
        parser.error(str(error) or "stopped; the same command resumes it")
    sys.exit(code)
