"""How do seconds and memory of a step grow?   python studies/scaling.py

All on the 30 M model of bench.py.

(a) CPU seconds of scoring and update against the tokens of a step: they are proportional.
(b) Peak memory of scoring and update: it grows with --micro_batch_tokens, and far less than in
    proportion with the group size and the number of prompts, because backward runs per micro-batch.
(c) Wall seconds of a step on one rank and on two, with a core each, and the share of the time
    spent outside of sampling, reward, scoring and update.
"""

import sys
import tempfile

import numpy as np
from bench import PHASES, prepare, run_side
from common import arguments, legend, plt, save

ROUNDS = 2
BUDGET = 280  # tokens of a micro-batch in (a), (b): the smallest step must fill several
BY_PROMPTS = [(4, 8), (8, 8), (16, 8)]  # prompts, G
BY_GROUP = [(4, 8), (4, 16), (4, 32)]


def step(files: dict, ranks: int = 1, **options) -> dict:
    """One step after a warm-up, in a process of its own: [wall, CPU] seconds by phase, tokens, and
    memory in MB."""
    python = [sys.executable]
    if ranks > 1:
        python += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    flags = []
    for name, value in options.items():
        flags += [f"--{name}", str(value)]
    run = run_side(python, "ours", "30M", files, flags)
    print(ranks, options, run, flush=True)
    return run


def outside(run: dict) -> float:
    """The share of the wall time outside of sampling, reward (which includes the exchange of
    samples), scoring and update."""
    inside = sum(run[phase][0] for phase in PHASES if phase != "sync")
    return 1 - inside / run["step"][0]


def cost(run: dict) -> tuple[int, float]:
    """Tokens of the step, and CPU seconds of scoring and update."""
    return int(run["tokens"][1]), run["logps"][1] + run["update"][1]


def draw(by_size: dict, by_budget: dict):
    figure, axes = plt.subplots(1, 3, figsize=(10, 4), layout="constrained")
    left, middle, right = axes
    for marker, sizes, label in (
        ("o", BY_PROMPTS, "n prompts x 8"),
        ("s", BY_GROUP, "4 prompts x G"),
    ):
        tokens, seconds = zip(*(cost(by_size[size]) for size in sizes), strict=True)
        memory = [by_size[size]["memory"] for size in sizes]
        left.plot(tokens, seconds, f"{marker}-", label=label)
        middle.plot([n * G for n, G in sizes], memory, f"{marker}-", label=label)
    budgets = sorted(by_budget)
    right.plot(budgets, [by_budget[n]["memory"] for n in budgets], "o-")
    left.set(title="(a) scoring and update", xlabel="real tokens of a step", ylabel="CPU seconds")
    middle.set(title="(b) peak memory", xlabel="completions of a step", ylabel="MB")
    right.set(title="(b) peak memory at 16 x 8", xlabel="--micro_batch_tokens", ylabel="MB")
    for axis in axes:
        axis.set(xlim=0, ylim=(0, 1.1 * axis.dataLim.y1))
    legend(figure, left, 2)
    figure.supxlabel(
        f"a run each, after a warm-up step;  left and middle: --micro_batch_tokens {BUDGET}"
    )
    return figure


def rank_table(by_ranks: dict) -> list:
    """(c) Wall seconds on one rank and on two, and their ratios in the same round."""
    table = ["wall seconds, median | one rank | two ranks | two / one: min | median | max"]
    for phase in ("rollout", "logps", "update", "step"):
        one = [run[phase][0] for run in by_ranks[1]]
        two = [run[phase][0] for run in by_ranks[2]]
        ratios = np.divide(two, one)
        numbers = [np.median(one), np.median(two)]
        numbers += [np.min(ratios), np.median(ratios), np.max(ratios)]
        table.append([phase, *map(float, numbers)])
    shares = [float(np.median([outside(run) for run in by_ranks[n]])) for n in (1, 2)]
    table.append(["outside, share", *shares, "", "", ""])
    return table


def main() -> None:
    args = arguments(__doc__, quick=False)
    args.jobs = 1
    by_size, by_budget, by_ranks = {}, {}, {1: [], 2: []}
    with tempfile.TemporaryDirectory() as folder:
        files = prepare("30M", "", folder)
        for n, G in dict.fromkeys(BY_PROMPTS + BY_GROUP):
            options = dict(num_prompts=n, num_generations=G, micro_batch_tokens=BUDGET)
            by_size[n, G] = step(files, **options)
        by_budget[BUDGET] = by_size[16, 8]
        for budget in (2 * BUDGET, 4 * BUDGET, 8 * BUDGET):
            by_budget[budget] = step(files, num_prompts=16, micro_batch_tokens=budget)
        for ranks in ROUNDS * [1, 2]:
            by_ranks[ranks].append(step(files, ranks))

    growth = [
        "prompts x G | real tokens | CPU seconds, scoring and update | per 1000 tokens | peak MB"
    ]
    for (n, G), run in by_size.items():
        tokens, seconds = cost(run)
        growth.append([f"{n} x {G}", tokens, seconds, 1000 * seconds / tokens, run["memory"]])
    memory = ["--micro_batch_tokens | peak MB"]
    for budget in sorted(by_budget):
        memory.append([budget, by_budget[budget]["memory"]])
    save(args, "scaling", draw(by_size, by_budget), growth, memory, rank_table(by_ranks))


if __name__ == "__main__":
    main()
