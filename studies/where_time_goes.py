"""Where does the time of scoring and update go, for this trainer and for the floor of bench.py?

    python studies/where_time_goes.py

Both run in one process, in turns, on completions of the same lengths. Seconds are the profiler's
own times of operators. For each kind of operator the smallest of ROUNDS counts, because other work
on the machine can only add time. GFLOP counts matrix products.
"""

import tempfile

import numpy as np
import torch
from bench import SETTINGS, bare_losses, flags, prepare, rows_without_padding
from common import CPU, arguments, fast_policy, legend, plt, sample_step, save
from torch.profiler import ProfilerActivity, profile

import grpo
import harness.auto
import harness.models
import harness.rows

ROUNDS = 3
COPIES = "fill", "zero", "copy", "cat", "index", "gather", "scatter", "embedding"
KINDS = {  # how the names of their operators start
    "matrix products": ("mm", "addmm", "bmm"),
    "attention": ("scaled_dot_product",),
    "zeros, copies, gathers": COPIES,
    "optimiser": ("fused_adamw",),
    "elementwise and sums": ("",),  # the rest: norms, activations, softmax, sums of gradients
}
BARS = {  # the optimiser alone would be a pixel or two
    "matrix products": ("matrix products",),
    "attention": ("attention",),
    "zeros, copies, gathers": ("zeros, copies, gathers",),
    "elementwise, sums, optimiser": ("elementwise and sums", "optimiser"),
}


def kind_of(operator: str) -> str:
    name = operator.removeprefix("aten::").strip("_")
    for kind, starts in KINDS.items():
        if name.startswith(starts):
            return kind


def measured(work) -> dict:
    """{kind: seconds, "GFLOP": number}"""
    with profile(activities=[ProfilerActivity.CPU], with_flops=True) as record:
        work()
    result = dict.fromkeys((*KINDS, "GFLOP"), 0.0)
    for event in record.key_averages():
        kind = kind_of(event.key)
        result[kind] += event.self_cpu_time_total / 1e6
        if kind == "matrix products":
            result["GFLOP"] += event.flops / 1e9
    return result


def sides(files: dict, spec: dict) -> dict:
    """The work after sampling, of this trainer and of the floor, as functions without arguments."""
    cfg = grpo.parse_args(flags(files, spec, "hf") + ["--max_sampler_gap", "1e9"])
    harness.models.keep_freed_memory(CPU.device)
    model, tokenizer = grpo.load_model(cfg.model, cfg), harness.rows.load_tokenizer(cfg)
    cfg = harness.auto.resolve_auto(cfg, model, CPU.device)
    policy = fast_policy(model, cfg.temperature)
    optimizer = grpo.make_optimizer(policy, cfg)
    prompts = harness.rows.load_prompts("train_data", [], tokenizer, cfg)
    sampler = grpo.HFSampler(model, *harness.models.special_ids(model, tokenizer, cfg), cfg)
    samples = sample_step(sampler, prompts, tokenizer, 1, cfg)
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
            for _ in bare_losses(model, ids, P, cfg):
                pass
        for loss in bare_losses(model, ids, P, cfg):
            loss.backward()
        optimizer.zero_grad()

    return dict(ours=ours, floor=floor)


def draw(results: dict):
    """A bar for each (setting, side): {kind: seconds}, relative to the floor of its setting."""
    figure, axis = plt.subplots(figsize=(10, 4), layout="constrained")
    names = [f"{setting}, {side}" for setting, side in results]
    ends = np.zeros(len(results))
    for label, kinds in BARS.items():
        widths = []
        for (setting, _), seconds in results.items():
            floor = sum(results[setting, "floor"].values())
            widths.append(sum(seconds[kind] for kind in kinds) / floor)
        axis.barh(names, widths, left=ends, label=label)
        ends += widths
    for y, seconds in enumerate(results.values()):
        axis.text(ends[y] + 0.01, y, f"{sum(seconds.values()):.3g} s", va="center")
    axis.set(ylim=(len(results) - 0.5, -0.5), xlim=(0, ends.max() + 0.1))
    axis.set_xlabel("seconds of scoring and update, relative to the floor's")
    legend(figure, axis, 2)
    figure.supxlabel(
        f"one thread;  of each kind the least of {ROUNDS} rounds;  "
        "floor: the bare passes of bench.py"
    )
    return figure


def main() -> None:
    args = arguments(__doc__, quick=False)
    args.jobs = 1
    table = [" | ".join(["setting", "side", *KINDS, "together", "GFLOP"])]
    results = {}
    for setting in ("bundled", "30M", "30M, long prompt", "30M, long prompt and answers"):
        with tempfile.TemporaryDirectory() as folder:
            work = sides(prepare(setting, "", folder), SETTINGS[setting])
        rounds = {side: [] for side in work}
        for _ in range(1 + ROUNDS):
            for side in work:
                rounds[side].append(measured(work[side]))
        for side, runs in rounds.items():
            timed = runs[1:]  # the first one warms up
            seconds = {kind: min(run[kind] for run in timed) for kind in KINDS}
            results[setting, side] = seconds
            together = sum(seconds.values())
            table.append([setting, side, *seconds.values(), together, timed[0]["GFLOP"]])
    save(args, "where_time_goes", draw(results), table)


if __name__ == "__main__":
    main()
