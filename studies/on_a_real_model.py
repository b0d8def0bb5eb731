"""The disputed claims, trained on a real model.   python studies/on_a_real_model.py FOLDER

The other studies train a model of 0.5 M parameters. Here SmolLM2-135M-Instruct learns sums of
one-digit numbers after one example, with one change a side (real_model.py says which packages are
needed). All sides of one seed have the same prompts and random numbers, so they begin with the same
samples, and differences are taken between runs of the same seed.

FOLDER gets the model, and a file for each run. A run whose file exists is not repeated, and all
sides get their first seed before any gets its second, so the study can be stopped at any time.
--draw runs nothing: it adds the runs in FOLDER to figures/on_a_real_model.jsonl and draws that
file. Without FOLDER it only draws. To check a single row, which takes minutes and leaves the
figures alone:

    python studies/on_a_real_model.py FOLDER --side "noise 0.1" --seed 0

--large: five sides at the size of README's command, which chats about sums and differences, in
bfloat16. A run takes five minutes, on a CPU that multiplies in bfloat16. The figures are
on_a_real_model_large.
"""

import dataclasses
import functools
import json
import os
import shutil
import sys
import time

import numpy as np
import torch
from common import (
    CPU,
    FIGURES,
    Run,
    arguments,
    band,
    grid,
    interval,
    permutation_test,
    plt,
    save,
    span,
    steps_to,
)
from mean_of_means import plant
from real_model import ROOT, SYSTEM, make_model, peak_memory

import grpo
import harness.models

NO_CLIPPING = dict(clip_low=1.0, clip_high=1e6)
SIDES = {  # the most disputed first
    "base": {},
    "noise 0.1": dict(advantage_noise=0.1),
    "warmup 20": dict(warmup_steps=20),
    "wk3, beta 0.3": dict(beta=0.3, kl_estimator="wk3"),
    "k3, beta 0.3": dict(beta=0.3, kl_estimator="k3"),
    "k1, beta 0.3": dict(beta=0.3, kl_estimator="k1"),
    "k1 in reward, beta 0.3": dict(beta=0.3, kl_estimator="k1", kl_in="reward"),
    "sequence": dict(loss_reduction="sequence"),
    "no std": dict(scale_rewards="none"),
    "4 updates": dict(num_minibatches=4),
    "4 updates, no clipping": dict(num_minibatches=4, **NO_CLIPPING),
    "mean of means": {},  # learn() changes its advantages
    "noise 0.01": dict(advantage_noise=0.01),
    "warmup 5": dict(warmup_steps=5),
    "constant": dict(loss_reduction="constant"),  # the same as base if the gradient is clipped
    "wk3, beta 0.04": dict(beta=0.04, kl_estimator="wk3"),
    "k3, beta 0.04": dict(beta=0.04, kl_estimator="k3"),
    "k1, beta 0.04": dict(beta=0.04, kl_estimator="k1"),
    "k1 in reward, beta 0.04": dict(beta=0.04, kl_estimator="k1", kl_in="reward"),
    "2 updates": dict(num_minibatches=2),
    "2 updates, no clipping": dict(num_minibatches=2, **NO_CLIPPING),
    # last: a machine without bfloat16 arithmetic emulates it, slowly
    "bfloat16": dict(dtype="bfloat16"),
}
QUICK_SIDES = (
    "base",
    "noise 0.1",
    "k1 in reward, beta 0.3",
    "4 updates",
    "4 updates, no clipping",
    "mean of means",
)
AGAINST = {  # the side that a side is compared with; the others: base
    "4 updates, no clipping": "4 updates",
    "2 updates, no clipping": "2 updates",
}
BASE = dict(
    num_prompts=4,
    num_generations=8,
    max_completion_length=4,
    learning_rate=1e-5,
    beta=0.0,
    dtype="float32",
    max_steps=12,
    micro_batch_tokens=2048,
    log_tokens=0,
)
LARGE = dict(  # as in real_model.py, where it differs from BASE
    train_data=os.path.join(ROOT, "sample_data", "gym.py:sums"),
    eval_data=os.path.join(ROOT, "sample_data", "gym.py:sums_eval"),
    reward=os.path.join(ROOT, "sample_data", "gym.py:score"),
    system_prompt=SYSTEM["sums"],
    num_prompts=16,
    max_completion_length=16,
    learning_rate=2e-5,
    dtype="bfloat16",
    max_steps=24,
    micro_batch_tokens=4096,
)
LARGE_SIDES = ("base", "noise 0.1", "warmup 5", "k3, beta 0.3", "4 updates")
SEEDS = 5
FIRST = 14  # so many sides get all their seeds before the other sides begin
LEVELS = (0.5, 0.7)  # of the reward, for steps and seconds to it
NAME, LARGE_NAME = "on_a_real_model", "on_a_real_model_large"  # of the figures


def mean_over_steps(row: dict, name: str) -> float:
    return float(np.mean([point[name] for point in row["history"]]))


def mean_reward(row: dict) -> float:
    return mean_over_steps(row, "reward")


def final_kl(row: dict) -> float:
    return row["kl"]


def final_accuracy(row: dict) -> float:
    return row["eval_accuracy"]


TESTED = {  # name: value of a run, digits
    "reward, mean of all steps": (mean_reward, 3),
    "KL at the end, nats a completion": (final_kl, 2),
    "held-out accuracy": (final_accuracy, 3),
}


# --------------------------------------------------------------------------------------------------
# The task, and the sampler


def questions(evaluation: bool) -> list[dict]:
    """If 3+8 is held out, so is 8+3."""
    pairs = [(a, b) for a in range(1, 10) for b in range(a, 10)]
    pairs = [pairs[i] for i in np.random.default_rng(0).permutation(len(pairs))]
    rows = []
    for pair in pairs[:22] if evaluation else pairs[22:]:
        for a, b in sorted({pair, pair[::-1]}):
            rows.append(dict(prompt=f"6+7=13\n{a}+{b}=", answer=str(a + b)))
    return rows


def training_rows():
    return questions(evaluation=False)


def held_out_rows():
    return questions(evaluation=True)


def once_per_prompt(model, generate, input_ids, attention_mask, **options):
    """HF generate for groups: computes each prompt once, and repeats its cache for the group."""
    rows = torch.stack((input_ids, attention_mask), 1)  # [N, 2, P]
    prompts, numbers = torch.unique(rows, dim=0, return_inverse=True)
    ids, mask = prompts[:, 0, :-1], prompts[:, 1, :-1]  # generate itself computes the last token
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    output = model(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=True)
    cache = output.past_key_values
    cache.batch_select_indices(numbers)
    return generate(
        input_ids=input_ids, attention_mask=attention_mask, past_key_values=cache, **options
    )


def make_run(model: str, quick: bool) -> Run:
    """The state in which all runs begin. A newline ends a completion, too: an answer is a line.
    quick: the bundled model."""
    harness.models.keep_freed_memory(CPU.device)
    options = dict(BASE)
    if quick:
        options.update(max_steps=2, max_completion_length=16)
    else:
        here = os.path.abspath(__file__)
        options.update(model=model, train_data=f"{here}:training_rows")
        options.update(eval_data=f"{here}:held_out_rows")
    run = Run(**options)
    newline = [i for i in run.tokenizer("\n").input_ids if run.tokenizer.decode([i]) == "\n"]
    run.sampler = grpo.HFSampler(
        run.model, run.sampler.stop_ids + newline, run.sampler.pad_id, run.cfg
    )
    run.model.generate = functools.partial(once_per_prompt, run.model, run.model.generate)
    run.eval_prompts = run.eval_prompts[:50]
    return run


def make_large_run(model: str) -> Run:
    harness.models.keep_freed_memory(CPU.device)
    run = Run(**(BASE | LARGE), model=model)
    run.model.generate = functools.partial(once_per_prompt, run.model, run.model.generate)
    return run


# --------------------------------------------------------------------------------------------------
# The runs


def divergence(run: Run, samples: list) -> dict:
    """KL to the reference: `kl` per completion, exact over the vocabulary; k1 and k3 per token,
    estimated from the sampled tokens."""
    grpo.compute_logps(run.policy, samples, "old_logps", run.cfg, CPU)
    grpo.compute_logps(run.reference, samples, "ref_logps", run.cfg, CPU)
    logps = torch.from_numpy(np.concatenate([s.old_logps for s in samples]))
    ref_logps = torch.from_numpy(np.concatenate([s.ref_logps for s in samples]))
    result = dict(kl=run.exact_kl(samples))
    for name in ("k3", "k1"):
        result[name] = grpo.kl_estimate(logps, ref_logps, logps, name).mean().item()
    return result


def rounded(values: dict, digits: int) -> dict:
    return {name: float(f"{x:.{digits}g}") for name, x in values.items()}


def learn(run: Run, side: str, seed: int, sides: dict = SIDES) -> dict:
    """One run, which changes the weights of `run`."""
    run.cfg = run.sampler.cfg = dataclasses.replace(run.cfg, seed=seed, **sides[side])
    if run.cfg.lora_rank > 0:
        run.add_adapters()
    run.optimizer = grpo.make_optimizer(run.policy, run.cfg)
    history, samples = take_steps(run, side, seed)
    return row_of(run, side, seed, history, samples)


def take_steps(run: Run, side: str, seed: int) -> tuple:
    """A dict of metrics for each step, and samples of the trained policy."""
    history, started = [], time.process_time()
    samples = run.rollout(1)
    for step in range(1, run.cfg.max_steps + 1):
        if side == "mean of means":
            order = np.random.default_rng((seed, step)).permutation(len(samples))
            plant(samples, 4, 2, order)  # micro-batches of 4 samples on 2 ranks
        m = grpo.sample_metrics(samples)
        m.update(run.update(samples, step))
        point = dict(
            reward=m["reward"],
            seconds=time.process_time() - started,
            length=m["completions/mean_length"],
            norm=m["grad_norm"],
            clipped=m["clip_ratio/region_mean"],
            gap=m["sampler_gap"],
        )
        history.append(dict(step=step, **rounded(point, 3)))
        samples = run.rollout(step + 1)  # after the last step: samples of the trained policy
    return history, samples


def row_of(run: Run, side: str, seed: int, history: list[dict], samples: list) -> dict:
    """What the file of a run holds."""
    step = len(history)
    end = dict(eval_accuracy=run.evaluate(len(run.eval_prompts), step)["eval_accuracy"])
    end.update(divergence(run, samples))
    return dict(side=side, seed=seed, **rounded(end, 4), history=history)


def learn_all(run: Run | None, settings: list[tuple], folder: str, learn=learn) -> list[dict]:
    """The runs of all (seed, side), each in a fork of this process, which itself never trains.
    Without `run`: those whose file exists. learn(run, side, seed) makes one."""
    os.makedirs(folder, exist_ok=True)
    rows = []
    for seed, side in settings:
        path = os.path.join(folder, f"{side}_{seed}.json")
        if not os.path.exists(path):
            if run is None:
                continue
            if os.fork() == 0:
                loaded = peak_memory(os.getpid())
                row = learn(run, side, seed)
                row["memory"] = round(peak_memory(os.getpid()) - loaded, 3)  # GB, beside the models
                with open(path + ".part", "w") as file:
                    json.dump(row, file)
                os.replace(path + ".part", path)  # so that a file is always complete
                sys.exit()
            _, status = os.wait()
            if status:
                sys.exit(f"on_a_real_model.py: {side}, seed {seed} failed")
        with open(path) as file:
            rows.append(json.load(file))
        print(summary(rows[-1]), flush=True)
    return rows


def summary(row: dict) -> str:
    values = [f"{name} {value(row):.{digits}f}" for name, (value, digits) in TESTED.items()]
    seconds = row["history"][-1]["seconds"]
    return f"{row['side']}, seed {row['seed']}: {'; '.join(values)}; {seconds:.0f} CPU seconds"


def read_runs(path: str) -> list[dict]:
    """The runs that the published figures show."""
    if not os.path.exists(path):
        return []
    with open(path) as file:
        return [json.loads(line) for line in file]


def write_runs(rows: list[dict], path: str) -> None:
    with open(path, "w") as file:
        for row in rows:
            file.write(json.dumps(row, separators=(",", ":")) + "\n")


def add_runs(new: list[dict], path: str) -> list[dict]:
    """Adds the new runs to the published ones, or replaces them; returns all."""
    rows = {(row["side"], row["seed"]): row for row in read_runs(path) + new}
    order = list(SIDES)
    rows = [rows[key] for key in sorted(rows, key=lambda key: (order.index(key[0]), key[1]))]
    write_runs(rows, path)
    return rows


def check(rows: list[dict], dtype: str) -> None:
    """Assertions that hold for any answer; if one fails, a side is not what its name says.
    dtype: of all sides that do not name theirs."""
    base = {row["seed"]: row["history"] for row in rows if row["side"] == "base"}
    for row in rows:
        side, history = row["side"], row["history"]
        same_seed = base[row["seed"]]
        name = f"{side}, seed {row['seed']}"
        gap = max(point["gap"] for point in history)
        side_dtype = SIDES[side].get("dtype", dtype)
        largest_gap = 1e-4 if side_dtype == "float32" else 0.1
        assert gap < largest_gap, f"{name}: the sampler is not the policy"
        if side_dtype == dtype:
            first_rewards = history[0]["reward"], same_seed[0]["reward"]
            assert first_rewards[0] == first_rewards[1], f"{name}: other samples than base"
        if side != "base":
            norms = [[point["norm"] for point in h] for h in (history, same_seed)]
            assert norms[0] != norms[1], f"{name}: the same gradients as base"
        if "no clipping" in side:
            assert mean_over_steps(row, "clipped") == 0, f"{name}: it clips"


# --------------------------------------------------------------------------------------------------
# Tables and picture. runs: {side: {seed: row}}


def differences(runs: dict, side: str, value, base: str = "base") -> tuple:
    """The change that a side makes, for each seed; and the p of a test that ignores the pairs, as
    with 5 pairs it could not be small."""
    other = runs[AGAINST.get(side, base)]
    seeds = sorted(runs[side].keys() & other.keys())
    ours = [value(runs[side][seed]) for seed in seeds]
    theirs = [value(other[seed]) for seed in seeds]
    return np.subtract(ours, theirs), permutation_test(ours, theirs)


def test_table(runs: dict, base: str = "base") -> list:
    header = "side | seeds"
    for name in TESTED:
        header += f" | {name} (95 %) | minus {base}, by pairs (95 %) | p ({len(runs) - 1} tests)"
    table = [header]
    for side, by_seed in runs.items():
        name = f"{side} (minus: {AGAINST[side]})" if side in AGAINST else side
        cells = [name, len(by_seed)]
        for value, digits in TESTED.values():
            cells.append(span([value(row) for row in by_seed.values()], digits))
            if side == base:
                cells += ["", ""]
            else:
                shifts, p = differences(runs, side, value, base)
                cells += [span(shifts, digits), f"{p:.3f}"]
        table.append(cells)
    return table


def speed_table(runs: dict) -> list:
    """A run that never reaches a level counts with its last step."""
    steps_names = [f"steps to {level} (95 %)" for level in LEVELS]
    seconds_names = [f"CPU seconds to {level} (95 %)" for level in LEVELS]
    names = ["side", *steps_names, f"never at {LEVELS[-1]}", *seconds_names, "CPU seconds in all"]
    names += ["k3 at the end, a token", "k1", "tokens", "clipped"]
    table = [" | ".join(names)]
    for side, by_seed in runs.items():
        histories = [row["history"] for row in by_seed.values()]
        steps, seconds = [], []
        for level in LEVELS:
            reached = [steps_to(level, history) for history in histories]
            ends = [int(min(n, len(histories[0]))) for n in reached]
            spent = [h[n - 1]["seconds"] for h, n in zip(histories, ends, strict=True)]
            steps.append(span(ends, 1))
            seconds.append(span(spent, 0))
        never = sum(map(np.isinf, reached))  # at the last level
        whole = span([history[-1]["seconds"] for history in histories], 0)
        means = [float(np.mean([row[key] for row in by_seed.values()])) for key in ("k3", "k1")]
        for key in ("length", "clipped"):
            means.append(float(np.mean([mean_over_steps(row, key) for row in by_seed.values()])))
        table.append([side, *steps, never, *seconds, whole, *means])
    return table


def draw_changes(axis, runs: dict, name: str) -> None:
    """A line for each side: the mean change with its interval, and a dot for each seed."""
    value, _ = TESTED[name]
    for y, side in enumerate(runs):
        shifts, _ = differences(runs, side, value)
        mean, low, high = interval(shifts)
        error = [[mean - low], [high - mean]]
        axis.errorbar(mean, y, xerr=error, fmt="o", ms=5, capsize=3, color="C0")
        axis.scatter(shifts, [y + 0.25] * len(shifts), s=8, alpha=0.5, color="C1")
    axis.axvline(0, color="C6", lw=0.8)
    names = [f"{side} ({len(by_seed)})" for side, by_seed in runs.items()]
    axis.set_yticks(range(len(runs)), names)
    axis.set(ylim=(len(runs) - 0.5, -0.7), title=f"{name},\nchange by pairs of one seed")


def draw(runs: dict):
    """The change that each side makes, and the curves of three disputes."""
    panels = [["reward", "kl", name] for name in ("start", "beta", "updates")]
    height = 5.5 + 0.16 * len(runs)  # inches
    figure, axes = plt.subplot_mosaic(
        panels, figsize=(12, height), layout="constrained", width_ratios=(2, 2, 3)
    )
    reward, kl, _ = TESTED
    draw_changes(axes["reward"], runs, reward)
    draw_changes(axes["kl"], runs, kl)
    axes["kl"].set_yticklabels([])
    curves = {  # words in the names of its sides, title
        "start": (("noise", "warmup"), "noise on the advantages, warmup"),
        "beta": (("0.3",), "KL term"),
        "updates": (("updates",), "mini-batches of a rollout"),
    }
    for key, (words, title) in curves.items():
        for side, by_seed in runs.items():
            if side == "base" or any(word in side for word in words):
                histories = [row["history"] for row in by_seed.values()]
                band(axes[key], histories, "reward", label=side)
        axes[key].set(title=title, xlabel="step", ylim=(0, 1.02))
        axes[key].set_ylabel("mean reward")
        axes[key].legend(loc="lower right")
    words = ["blue: mean and its 95 % bootstrap interval", "orange: seeds (how many)"]
    if not AGAINST.keys().isdisjoint(runs):
        words.append("without clipping: against with it")
    figure.supxlabel(";  ".join([*words, "bands: ± 1 standard error"]))
    return figure


def add_options(parser) -> None:
    parser.add_argument(
        "folder", nargs="?", help="directory of the model and the runs; without it: only draw"
    )
    parser.add_argument("--draw", action="store_true", help="only draw the runs in the folder")
    parser.add_argument("--large", action="store_true", help="five sides at README's size")
    parser.add_argument("--seeds", nargs="+", type=int, default=range(SEEDS), help="of the runs")
    parser.add_argument("--side", choices=SIDES, help="a single run, of --seed")
    parser.add_argument("--seed", type=int, default=0)


def single_run(run: Run | None, side: str, seed: int, folder: str, published: str) -> None:
    """One run, beside the published ones that it is compared with."""
    for row in read_runs(published):
        if row["seed"] == seed and row["side"] in (side, AGAINST.get(side, "base")):
            print(f"in the figures: {summary(row)}")
    learn_all(run, [(seed, side)], folder)


def order_of_runs(seeds, large: bool) -> list[tuple]:
    """[(seed, side)]"""
    if large:
        return grid(seeds, LARGE_SIDES)
    sides = list(SIDES)
    return grid(seeds, sides[:FIRST]) + grid(seeds, sides[FIRST:])


def main():
    args = arguments(__doc__, add_options)
    name, make, subfolder = NAME, functools.partial(make_run, quick=False), "runs"
    dtype = BASE["dtype"]
    if args.large:
        name, make, subfolder = LARGE_NAME, make_large_run, "large_runs"
        dtype = LARGE["dtype"]
    published = os.path.join(FIGURES, f"{name}.jsonl")
    if args.quick:
        folder = os.path.join(args.out, name)
        shutil.rmtree(folder, ignore_errors=True)
        rows = learn_all(make_run("", quick=True), grid(range(1), QUICK_SIDES), folder)
    elif args.folder:
        run = None
        if not args.draw:
            run = make(make_model(os.path.abspath(args.folder)))
        folder = os.path.join(args.folder, subfolder)
        if args.side:
            single_run(run, args.side, args.seed, folder, published)
            return
        settings = order_of_runs(args.seeds, args.large)
        rows = add_runs(learn_all(run, settings, folder), published)
    else:
        rows = read_runs(published)

    check(rows, dtype)
    runs = {}
    for side in SIDES:
        by_seed = {row["seed"]: row for row in rows if row["side"] == side}
        if by_seed:
            runs[side] = by_seed
    save(args, name, draw(runs), test_table(runs), speed_table(runs))


if __name__ == "__main__":
    main()
