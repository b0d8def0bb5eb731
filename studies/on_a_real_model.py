"""The disputed claims, trained on a real model.   python studies/on_a_real_model.py FOLDER

The other studies train a model of 0.5 M parameters. Here SmolLM2-135M-Instruct learns sums of one-digit numbers after
one example, with one change a side (real_model.py says which packages it needs). Every side with the same seed has the
same prompts and random numbers: all begin with the same samples, and differences are taken by pairs.

FOLDER gets the model, and a file for each run. A run that has its file is not run again, and all sides have their first
seed before one has its second, so it can be stopped at any time. With --draw it runs nothing: it adds what is there to
figures/on_a_real_model.jsonl and draws that; without FOLDER it only draws. A doubter runs one row alone, in minutes,
and the figures stay as they are:

    python studies/on_a_real_model.py FOLDER --side "noise 0.1" --seed 0
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
    HERE,
    Run,
    arguments,
    band,
    grid,
    interval,
    permutation_test,
    plt,
    save,
    steps_to,
)
from mean_of_means import weights
from real_model import make_model

import grpo
import harness.models

FREE = dict(clip_low=1.0, clip_high=1e6)
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
    "4 updates, no clipping": dict(num_minibatches=4, **FREE),
    "mean of means": {},  # see plant
    "noise 0.01": dict(advantage_noise=0.01),
    "warmup 5": dict(warmup_steps=5),
    "constant": dict(loss_reduction="constant"),  # base, wherever the gradient's norm is clipped
    "wk3, beta 0.04": dict(beta=0.04, kl_estimator="wk3"),
    "k3, beta 0.04": dict(beta=0.04, kl_estimator="k3"),
    "k1, beta 0.04": dict(beta=0.04, kl_estimator="k1"),
    "k1 in reward, beta 0.04": dict(beta=0.04, kl_estimator="k1", kl_in="reward"),
    "2 updates": dict(num_minibatches=2),
    "2 updates, no clipping": dict(num_minibatches=2, **FREE),
    "bfloat16": dict(
        dtype="bfloat16"
    ),  # last: a machine without bfloat16 arithmetic emulates it, slowly
}
AGAINST = {f"{n} updates, no clipping": f"{n} updates" for n in (2, 4)}  # the others: base
BASE = dict(
    num_prompts=4,
    num_generations=8,
    max_completion_length=4,
    learning_rate=1e-5,
    beta=0.0,
    dtype="float32",
)
BASE |= dict(max_steps=12, micro_batch_tokens=2048, log_tokens=0)
SEEDS, FIRST, LEVELS = (
    5,
    14,
    (0.5, 0.7),
)  # FIRST: so many sides get all their seeds before the others begin
RUNS = os.path.join(HERE, "figures", "on_a_real_model.jsonl")
VALUES = {  # what is tested: (value of a run, digits)
    "reward, mean of all steps": (lambda row: mean(row, "reward"), 3),
    "KL at the end, nats a completion": (lambda row: row["kl"], 2),
    "held-out accuracy": (lambda row: row["eval_accuracy"], 3),
}


# ----------------------------------------------------------------------------------------------------------------
# The task, and the sampler


def questions(evaluation: bool) -> list[dict]:
    """With 3+8 also 8+3 is held out."""
    pairs = [(a, b) for a in range(1, 10) for b in range(a, 10)]
    pairs = [pairs[i] for i in np.random.default_rng(0).permutation(len(pairs))]
    chosen = pairs[:22] if evaluation else pairs[22:]
    both_ways = [question for a, b in chosen for question in sorted({(a, b), (b, a)})]
    return [dict(prompt=f"6+7=13\n{a}+{b}=", answer=str(a + b)) for a, b in both_ways]


training_rows, held_out_rows = (
    functools.partial(questions, evaluation) for evaluation in (False, True)
)


def once_per_prompt(model, generate, input_ids, attention_mask, **options):
    """HF generate, for groups: a prompt is computed once, and its cache repeated for all that have it."""
    rows = torch.stack((input_ids, attention_mask), 1)  # [N, 2, P]
    prompts, numbers = torch.unique(rows, dim=0, return_inverse=True)
    ids, mask = prompts[:, 0, :-1], prompts[:, 1, :-1]  # generate itself computes the last token
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    cache = model(
        input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=True
    ).past_key_values
    cache.batch_select_indices(numbers)
    return generate(
        input_ids=input_ids, attention_mask=attention_mask, past_key_values=cache, **options
    )


def make_run(model: str, quick: bool) -> Run:
    """What all runs begin with. A newline ends a completion, too: the answer is a line."""
    harness.models.keep_freed_memory(CPU.device)
    here = os.path.abspath(__file__)
    real = dict(model=model, train_data=f"{here}:training_rows", eval_data=f"{here}:held_out_rows")
    run = Run(**BASE | (dict(max_steps=2, max_completion_length=16) if quick else real))
    newline = [i for i in run.tokenizer("\n").input_ids if run.tokenizer.decode([i]) == "\n"]
    run.sampler = grpo.HFSampler(
        run.model, run.sampler.eos_ids + newline, run.sampler.pad_id, run.cfg
    )
    run.model.generate = functools.partial(once_per_prompt, run.model, run.model.generate)
    run.eval_prompts = run.eval_prompts[:50]
    return run


# ----------------------------------------------------------------------------------------------------------------
# The runs


def plant(samples: list, step: int, seed: int) -> None:
    """A mean per micro-batch of 4 samples and per rank of 2 instead of the exact gradient, as factors of advantages."""
    order = np.random.default_rng((seed, step)).permutation(len(samples))
    lengths = np.array([len(s.completion_ids) for s in samples])
    for sample, factor in zip(samples, weights(lengths, 4, 2, order), strict=True):
        sample.advantage *= factor


def divergence(run: Run, samples: list) -> dict:
    """KL to the reference: exact over the vocabulary, per completion; estimated from the sampled tokens, per token."""
    logps = []
    for name, policy in (("old_logps", run.policy), ("ref_logps", run.reference)):
        grpo.compute_logps(policy, samples, name, run.cfg, CPU)
        logps.append(torch.from_numpy(np.concatenate([getattr(s, name) for s in samples])))
    estimates = {
        name: grpo.kl_estimate(*logps, logps[0], name).mean().item() for name in ("k3", "k1")
    }
    return dict(kl=run.exact_kl(samples)) | estimates


def learn(run: Run, side: str, seed: int) -> dict:
    """One run. It changes the weights of `run`."""
    run.cfg = run.sampler.cfg = dataclasses.replace(run.cfg, seed=seed, **SIDES[side])
    run.optimizer = grpo.make_optimizer(run.policy, run.cfg)
    history, started, samples = [], time.process_time(), run.rollout(1)
    for step in range(1, run.cfg.max_steps + 1):
        if side == "mean of means":
            plant(samples, step, seed)
        m = grpo.sample_metrics(samples, run.cfg) | run.update(samples, step)
        point = dict(
            reward=m["reward"],
            seconds=time.process_time() - started,
            length=m["completions/mean_length"],
        )
        point |= dict(
            norm=m["grad_norm"], clipped=m["clip_ratio/region_mean"], gap=m["sampler_gap"]
        )
        history.append(dict(step=step) | {name: float(f"{x:.3g}") for name, x in point.items()})
        samples = run.rollout(step + 1)  # the last time: what the trained policy writes
    end = dict(
        eval_accuracy=run.evaluate(len(run.eval_prompts), step)["eval_accuracy"]
    ) | divergence(run, samples)
    end = {name: float(f"{x:.4g}") for name, x in end.items()}
    return dict(side=side, seed=seed) | end | dict(history=history)


def learn_all(run: Run | None, settings: list[tuple], folder: str) -> list[dict]:
    """Each in a fork of this process, which never trains. No run: those that are there."""
    os.makedirs(folder, exist_ok=True)
    rows = []
    for seed, side in settings:
        path = os.path.join(folder, f"{side}_{seed}.json")
        if not os.path.exists(path):
            if not run:
                continue
            if os.fork() == 0:
                row = learn(run, side, seed)
                with open(path + ".part", "w") as file:
                    json.dump(row, file)
                os.replace(path + ".part", path)  # whole, or not there
                sys.exit()
            if os.wait()[1]:
                sys.exit(f"on_a_real_model.py: {side}, seed {seed} failed")
        with open(path) as file:
            rows.append(json.load(file))
        print(summary(rows[-1]), flush=True)
    return rows


def summary(row: dict) -> str:
    values = [f"{name} {value(row):.{digits}f}" for name, (value, digits) in VALUES.items()]
    return f"{row['side']}, seed {row['seed']}: {'; '.join(values)}; {row['history'][-1]['seconds']:.0f} CPU seconds"


def keep(new: list[dict]) -> list[dict]:
    """With the new runs, all those of the figures: one a line."""
    rows = {}
    if os.path.exists(RUNS):
        with open(RUNS) as file:
            rows = {(row["side"], row["seed"]): row for row in map(json.loads, file)}
    rows |= {(row["side"], row["seed"]): row for row in new}
    rows = [rows[key] for key in sorted(rows, key=lambda key: (list(SIDES).index(key[0]), key[1]))]
    if new:
        with open(RUNS, "w") as file:
            file.writelines(json.dumps(row, separators=(",", ":")) + "\n" for row in rows)
    return rows


def mean(row: dict, name: str) -> float:
    return float(np.mean([point[name] for point in row["history"]]))


def check(rows: list[dict]) -> None:
    """What must be so whatever the answer is: else the sides are not what they are called."""
    base = {row["seed"]: row["history"] for row in rows if row["side"] == "base"}
    for row in rows:
        name, history, twin = (
            f"{row['side']}, seed {row['seed']}",
            row["history"],
            base[row["seed"]],
        )
        rounded, norms = (
            row["side"] == "bfloat16",
            [[point["norm"] for point in h] for h in (history, twin)],
        )
        gap = max(point["gap"] for point in history)
        assert gap < (0.1 if rounded else 1e-4), f"{name}: sampled by another model than the policy"
        assert rounded or history[0]["reward"] == twin[0]["reward"], (
            f"{name}: begins with other samples than base"
        )
        assert row["side"] == "base" or norms[0] != norms[1], f"{name}: the same gradients as base"
        assert "no clipping" not in row["side"] or mean(row, "clipped") == 0, f"{name}: it clips"


# ----------------------------------------------------------------------------------------------------------------
# Tables and picture


def versus(runs: dict, side: str, value) -> tuple:
    """What a side changes, by pairs of the same seed; p, which does not use the pairs: with 5 it could not be small."""
    other = runs[AGAINST.get(side, "base")]
    seeds = sorted(runs[side].keys() & other.keys())
    ours, theirs = ([value(rows[seed]) for seed in seeds] for rows in (runs[side], other))
    return np.subtract(ours, theirs), permutation_test(ours, theirs)


def span(values, digits: int) -> str:
    return "{:.{d}f} ({:.{d}f} to {:.{d}f})".format(*interval(values), d=digits)


def tables(runs: dict) -> list[list]:
    tested, speed = [["side", "seeds"]], [["side"]]
    for name in VALUES:
        tested[0] += [f"{name} (95 %)", "minus base, by pairs (95 %)", f"p ({len(runs) - 1} tests)"]
    speed[0] += [*(f"steps to {level} (95 %)" for level in LEVELS), f"never at {LEVELS[-1]}"]
    speed[0] += [*(f"CPU seconds to {level} (95 %)" for level in LEVELS), "CPU seconds in all"]
    speed[0] += ["k3 at the end, a token", "k1", "tokens", "clipped"]
    for side, by_seed in runs.items():
        rows = list(by_seed.values())
        tested.append([f"{side} (minus: {AGAINST[side]})" if side in AGAINST else side, len(rows)])
        for value, digits in VALUES.values():
            shifts, p = versus(runs, side, value)
            tested[-1] += [span([value(row) for row in rows], digits)]
            tested[-1] += ["", ""] if side == "base" else [span(shifts, digits), f"{p:.3f}"]
        steps = [
            [steps_to(level, row["history"]) for row in rows] for level in LEVELS
        ]  # [levels, seeds]; inf: never
        ends = [[int(min(n, len(rows[0]["history"]))) for n in ns] for ns in steps]
        spent = [
            [row["history"][n - 1]["seconds"] for row, n in zip(rows, ns, strict=True)]
            for ns in ends
        ]
        speed.append(
            [
                side,
                *(span(ns, 1) for ns in ends),
                sum(map(np.isinf, steps[-1])),
                *(span(x, 0) for x in spent),
            ]
        )
        speed[-1] += [span([row["history"][-1]["seconds"] for row in rows], 0)]
        speed[-1] += [float(np.mean([row[key] for row in rows])) for key in ("k3", "k1")]
        speed[-1] += [
            float(np.mean([mean(row, key) for row in rows])) for key in ("length", "clipped")
        ]
    return [tested, speed]


def draw(runs: dict):
    """What each side changes, and the curves of three disputes."""
    panels = [["reward", "kl", name] for name in ("start", "beta", "updates")]
    figure, axes = plt.subplot_mosaic(
        panels, figsize=(12, 9), layout="constrained", width_ratios=(2, 2, 3)
    )
    for key, (name, (value, _)) in zip(("reward", "kl"), VALUES.items(), strict=False):
        for y, side in enumerate(runs):
            shifts = versus(runs, side, value)[0]
            middle, low, high = interval(shifts)
            error = [[middle - low], [high - middle]]
            axes[key].errorbar(middle, y, xerr=error, fmt="o", ms=5, capsize=3, color="C0")
            axes[key].scatter(shifts, [y + 0.25] * len(shifts), s=8, alpha=0.5, color="C1")
        axes[key].axvline(0, color="C6", lw=0.8)
        axes[key].set_yticks(
            range(len(runs)), [f"{side} ({len(rows)})" for side, rows in runs.items()]
        )
        axes[key].set(ylim=(len(runs) - 0.5, -0.7), title=f"{name},\nchange by pairs of one seed")
    axes["kl"].set_yticklabels([])
    curves = dict(start=("noise", "warmup"), beta=("0.3",), updates=("updates",))
    titles = dict(
        start="noise on the advantages, warmup", beta="KL term", updates="mini-batches of a rollout"
    )
    for key, words in curves.items():
        for side in [
            side for side in runs if side == "base" or any(word in side for word in words)
        ]:
            band(axes[key], [row["history"] for row in runs[side].values()], "reward", label=side)
        axes[key].set(
            title=titles[key], ylabel="reward, mean of the samples", ylim=(0, 1.02), xlabel="step"
        )
        axes[key].legend(loc="lower right")
    text = "blue: mean and its 95 % bootstrap interval;  orange: seeds (how many);  without clipping: against with it"
    figure.supxlabel(f"{text};  bands: ± 1 standard error")
    return figure


def options(parser) -> None:
    parser.add_argument(
        "folder", nargs="?", help="where the model and the runs are, or are put; none: only draws"
    )
    parser.add_argument("--draw", action="store_true", help="only draws the runs that are there")
    parser.add_argument("--side", choices=SIDES, help="one run alone, of --seed")
    parser.add_argument("--seed", type=int, default=0)


def main():
    args, rows = arguments(__doc__, options), keep([])
    if args.quick:
        some = [
            "base",
            "noise 0.1",
            "k1 in reward, beta 0.3",
            "4 updates",
            "4 updates, no clipping",
            "mean of means",
        ]
        shutil.rmtree(folder := os.path.join(args.out, "on_a_real_model"), ignore_errors=True)
        rows = learn_all(make_run("", True), grid(range(1), some), folder)
    elif args.folder:
        run = None if args.draw else make_run(make_model(os.path.abspath(args.folder)), False)
        folder, sides = os.path.join(args.folder, "runs"), list(SIDES)
        if args.side:
            for row in rows:
                if row["seed"] == args.seed and row["side"] in (
                    args.side,
                    AGAINST.get(args.side, "base"),
                ):
                    print(f"in the figures: {summary(row)}")
            learn_all(run, [(args.seed, args.side)], folder)
            return
        settings = [
            pair for part in (sides[:FIRST], sides[FIRST:]) for pair in grid(range(SEEDS), part)
        ]
        rows = keep(learn_all(run, settings, folder))
    check(rows)
    runs = {side: {row["seed"]: row for row in rows if row["side"] == side} for side in SIDES}
    runs = {side: by_seed for side, by_seed in runs.items() if by_seed}
    save(args, "on_a_real_model", draw(runs), *tables(runs))


if __name__ == "__main__":
    main()
