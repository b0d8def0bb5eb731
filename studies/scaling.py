"""How seconds and memory of a step grow, on the 30 M model of bench.py.   python studies/scaling.py

(a) CPU seconds of scoring and update against the tokens of a step: linear.
(b) Their peak memory: flat in the group size and in the number of prompts once they fill micro-batches, since backward
    runs per micro-batch. It grows with --micro_batch_tokens.
(c) Wall seconds of a step on one rank and on two, a core each, and what is spent outside of sampling, reward, update.
"""

import argparse
import os
import sys
import tempfile
import time

import numpy as np
from bench import PHASES, prepare, run_side
from common import HERE, legend, plt, save

ROUNDS = 2
BUDGET = (
    280  # tokens of a micro-batch, but for (c): few enough that the smallest step here fills some
)


def step(files: dict, ranks: int = 1, **options) -> dict:
    """One step after a warm-up, in a process of its own: [wall, CPU] seconds by phase, tokens, memory in MB."""
    launch = (
        ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
        if ranks > 1
        else []
    )
    flags = [text for name, value in options.items() for text in (f"--{name}", str(value))]
    run = run_side([sys.executable, *launch], "ours", "30M", files, flags)
    print(ranks, options, run, flush=True)
    return run


def outside(run: dict) -> float:
    """Share of the wall time that is neither sampling, reward (and the exchange of samples), reference nor update."""
    return 1 - sum(run[phase][0] for phase in PHASES if phase != "sync") / run["step"][0]


def draw(sizes: list, table: list, memory: list):
    figure, axes = plt.subplots(1, 3, figsize=(10, 4), layout="constrained")
    left, middle, right = axes
    for marker, chosen, label in (
        ("o", sizes[:3], "n prompts x 8"),
        ("s", [sizes[0], *sizes[3:]], "4 prompts x G"),
    ):
        rows = np.array(
            [row[1:] for row, size in zip(table[1:], sizes, strict=True) if size in chosen]
        )
        left.plot(rows[:, 0], rows[:, 1], f"{marker}-", label=label)
        middle.plot([n * G for n, G in chosen], rows[:, 3], f"{marker}-", label=label)
    right.plot(*zip(*memory[1:], strict=True), "o-")
    left.set(
        title="(a) scoring and update", xlabel="real tokens of a step", ylabel="CPU seconds", xlim=0
    )
    middle.set(title="(b) peak memory", xlabel="completions of a step", ylabel="MB", xlim=0)
    right.set(title="(b) peak memory at 16 x 8", xlabel="--micro_batch_tokens", ylabel="MB", xlim=0)
    for axis in axes:
        axis.set_ylim(0, 1.1 * axis.dataLim.y1)
    legend(figure, left, 2)
    figure.supxlabel(
        f"a run each, after a warm-up step;  left and middle: --micro_batch_tokens {BUDGET}"
    )
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.parse_args()
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        files = prepare("30M", "", folder)
        sizes = [(n, 8) for n in (4, 8, 16)] + [(4, n) for n in (16, 32)]
        by_size = {
            (n, G): step(files, num_prompts=n, num_generations=G, micro_batch_tokens=BUDGET)
            for n, G in sizes
        }
        by_budget = {
            n: step(files, num_prompts=16, micro_batch_tokens=n)
            for n in (2 * BUDGET, 4 * BUDGET, 8 * BUDGET)
        }
        by_budget[BUDGET] = by_size[16, 8]
        by_ranks = {1: [], 2: []}
        for ranks in ROUNDS * [1, 2]:
            by_ranks[ranks].append(step(files, ranks))

    table = [
        [
            "prompts x G",
            "real tokens",
            "CPU seconds, scoring and update",
            "per 1000 tokens",
            "peak MB",
        ]
    ]
    for (n, G), run in by_size.items():
        tokens, seconds = run["tokens"][1], run["logps"][1] + run["update"][1]
        table.append([f"{n} x {G}", int(tokens), seconds, 1000 * seconds / tokens, run["memory"]])
    memory = [
        ["--micro_batch_tokens", "peak MB"],
        *sorted([n, run["memory"]] for n, run in by_budget.items()),
    ]
    wall = [["wall seconds, median", "one rank", "two ranks", "two / one: min", "median", "max"]]
    for name in ("rollout", "logps", "update", "step"):
        one, two = ([run[name][0] for run in by_ranks[n]] for n in (1, 2))
        ratios = np.divide(two, one)
        wall.append([name, *(float(f(x)) for f, x in ((np.median, one), (np.median, two)))])
        wall[-1] += [float(f(ratios)) for f in (np.min, np.median, np.max)]
    wall.append(
        [
            "outside, share",
            *(float(np.median([outside(run) for run in by_ranks[n]])) for n in (1, 2)),
            "",
            "",
            "",
        ]
    )

    args = argparse.Namespace(out=os.path.join(HERE, "figures"), started=started, jobs=1)
    save(args, "scaling", draw(sizes, table, memory), table, memory, wall)


if __name__ == "__main__":
    main()
