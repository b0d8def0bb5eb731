"""Where the time of scoring and update goes, ours and that of the floor of bench.py.

    python studies/where_time_goes.py

Both in one process, on completions of the same lengths, in turn. Seconds are the profiler's own times of operators,
the least of ROUNDS for each kind, because other work on the machine only ever adds. GFLOP are of matrix products.
"""

import argparse
import os
import tempfile
import time

import numpy as np
import torch
from bench import SETTINGS, bare_losses, flags, prepare, rows_without_padding
from common import CPU, HERE, fast_policy, legend, plt, save
from torch.profiler import ProfilerActivity, profile

import grpo
import harness.models
import harness.rows

ROUNDS = 3
KINDS = {
    "matrix products": ("mm", "addmm", "bmm"),
    "attention": ("scaled_dot_product",),
    "zeros, copies, gathers": (
        "fill",
        "zero",
        "copy",
        "cat",
        "index",
        "gather",
        "scatter",
        "embedding",
    ),
    "optimiser": ("fused_adamw",),
}
REST = "elementwise and sums"  # norms, activations, softmax, gradients added up


def kind_of(operator: str) -> str:
    name = operator.removeprefix("aten::").strip("_")
    return next((kind for kind, starts in KINDS.items() if name.startswith(starts)), REST)


def measured(work) -> dict:
    """{kind: seconds}, and GFLOP."""
    with profile(activities=[ProfilerActivity.CPU], with_flops=True) as record:
        work()
    seconds, flop = {}, 0
    for event in record.key_averages():
        seconds[kind_of(event.key)] = (
            seconds.get(kind_of(event.key), 0) + event.self_cpu_time_total / 1e6
        )
        flop += event.flops * (kind_of(event.key) == "matrix products")
    return seconds | {"GFLOP": flop / 1e9}


def sides(files: dict, spec: dict) -> dict:
    """What each side does after sampling, as a function without arguments."""
    cfg = grpo.parse_args(flags(files, spec, "hf") + ["--max_sampler_gap", "1e9"])
    harness.models.keep_freed_memory(CPU.device)
    model, tokenizer = grpo.load_model(cfg.model, cfg), harness.rows.load_tokenizer(cfg)
    cfg = harness.models.resolve_auto(cfg, model, CPU.device)
    policy = fast_policy(model, cfg.temperature)
    optimizer = grpo.make_optimizer(policy, cfg)
    prompts = harness.rows.load_prompts("train_data", [], tokenizer, cfg)
    sampler = grpo.HFSampler(model, *harness.models.special_ids(model, tokenizer, cfg), cfg)
    drawn = grpo.prompts_of_step(prompts, 1, cfg)
    samples = grpo.sample(sampler, drawn, cfg.num_generations, 1.0, 0, 1, tokenizer, cfg, CPU)
    for number, sample in enumerate(samples):
        sample.advantages[:] = (-1.0) ** number

    def ours():
        grpo.wrap(policy, cfg, CPU)
        grpo.compute_logps(policy, samples, "ref_logps", cfg, CPU)
        grpo.update(policy, optimizer, samples, cfg)

    ids, P = rows_without_padding(samples, cfg.num_generations, model.config.vocab_size)

    def floor():
        model.get_input_embeddings().sparse = False
        with torch.no_grad():
            list(bare_losses(model, ids, P, cfg))
        for loss in bare_losses(model, ids, P, cfg):
            loss.backward()
        optimizer.zero_grad()

    return dict(ours=ours, floor=floor)


def draw(table: list):
    figure, axis = plt.subplots(figsize=(10, 4), layout="constrained")
    labels = [f"{name}, {side}" for name, side, *_ in table]
    together, left = {(name, side): row[-2] for name, side, *row in table}, np.zeros(len(table))
    kinds = [*KINDS, REST]
    thin = {"optimiser", REST}  # the optimiser alone would be a pixel or two
    shown = {kind: [kind] for kind in kinds if kind not in thin} | {
        "elementwise, sums, optimiser": thin
    }
    for label, parts in shown.items():
        part = np.array(
            [
                sum(row[2 + kinds.index(k)] for k in parts) / together[row[0], "floor"]
                for row in table
            ]
        )
        axis.barh(labels, part, left=left, label=label)
        left += part
    for y, row in enumerate(table):
        axis.text(left[y] + 0.01, y, f"{row[-2]:.3g} s", va="center")
    axis.set(ylim=(len(table) - 0.5, -0.5), xlim=(0, left.max() + 0.1))
    axis.set_xlabel("seconds of scoring and update, relative to the floor's")
    legend(figure, axis, 2)
    figure.supxlabel(
        f"one thread;  of each kind the least of {ROUNDS} rounds;  floor: the bare passes of bench.py"
    )
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.parse_args()
    started, table = time.monotonic(), []
    kinds = [*KINDS, REST]
    for name in ("bundled", "30M", "30M, long prompt"):
        with tempfile.TemporaryDirectory() as folder:
            work = sides(prepare(name, "", folder), SETTINGS[name])
        found = {side: [] for side in work}
        for side in (1 + ROUNDS) * list(work):
            found[side].append(measured(work[side]))
        for side, runs in found.items():
            runs = runs[1:]  # the first one warms up
            seconds = [min(run.get(kind, 0.0) for run in runs) for kind in kinds]
            table.append([name, side, *seconds, sum(seconds), runs[0]["GFLOP"]])

    args = argparse.Namespace(out=os.path.join(HERE, "figures"), started=started, jobs=1)
    save(
        args,
        "where_time_goes",
        draw(table),
        [["setting", "side", *kinds, "together", "GFLOP"], *table],
    )


if __name__ == "__main__":
    main()
