"""Does a policy of 6 bytes a parameter learn as one of 16?   python studies/eight_bits.py FOLDER

A weight in float32, its gradient and AdamW's two moments take 16 bytes. variants/adamw8bit.patch
takes 6: the weight and its gradient in bfloat16, each moment in 8 bits (torchao's AdamW8bit).
A step of RL is much smaller than the distance between two numbers of bfloat16. Rounded to the
nearest, most weights stay what they are; rounded at random, they move as far as the step, on
average. The rate of the last side is the better one of 4e-5 and 1e-4 on seed 0.

SmolLM2-135M-Instruct learns sums of one-digit numbers, as in on_a_real_model.py: all sides of one
seed have the same prompts and random numbers. FOLDER gets the model (real_model.py says which
packages it needs; torchao comes with pip install --no-deps torchao==0.18.0), and a file for each
run. A run whose file exists is not repeated, so the study can be stopped at any time. --draw runs
nothing: it draws the runs in FOLDER. Without FOLDER the published runs are drawn.
"""

import dataclasses
import os
import shutil

import torch
from common import FIGURES, Run, arguments, band, grid, legend, plt, save, span
from on_a_real_model import (
    learn_all,
    make_run,
    mean_over_steps,
    read_runs,
    row_of,
    take_steps,
    test_table,
    write_runs,
)
from real_model import make_model

import grpo

SIDES = {  # weights in, name of the optimizer, learning rate; all sides multiply in bfloat16
    "float32": (torch.float32, "AdamW", 1e-5),
    "8 bits, at random": (torch.bfloat16, "AdamW8bit", 1e-5),
    "bfloat16, to the nearest": (torch.bfloat16, "AdamW", 1e-5),
    "bfloat16, to the nearest, ten times the rate": (torch.bfloat16, "AdamW", 1e-4),
}
BASE = "float32"
SEEDS = 5
RUNS = os.path.join(FIGURES, "eight_bits.jsonl")


def learn(run: Run, side: str, seed: int) -> dict:
    """One run, which changes the weights of `run`."""
    weights, optimizer, rate = SIDES[side]
    options = dict(seed=seed, dtype="bfloat16", learning_rate=rate)
    run.cfg = run.sampler.cfg = dataclasses.replace(run.cfg, **options)
    if weights == torch.bfloat16:
        halve(run.model)
    run.optimizer = grpo.make_optimizer(run.policy, run.cfg)
    if optimizer == "AdamW8bit":
        run.optimizer = eight_bit_optimizer(run.optimizer.param_groups, run.cfg)
    torch.manual_seed(seed)

    start = [p.detach().clone() for p in run.policy.parameters()]
    history, samples = take_steps(run, side, seed)
    moved = 0
    for before, after in zip(start, run.policy.parameters(), strict=True):
        moved += (before != after).sum().item()
    sizes = bytes_of_parameter(run)

    for p in run.policy.parameters():
        p.data = p.data.float()  # the same numbers; the KL is computed without autocast
    row = row_of(run, side, seed, history, samples)
    return row | sizes | dict(moved=moved / sum(p.numel() for p in start))


def halve(model) -> None:
    """As the patch does it: what the layers add up stays in float32."""
    for p in model.parameters():
        p.data = p.data.bfloat16()
    model.get_input_embeddings().register_forward_hook(lambda *call: call[-1].float())


def eight_bit_optimizer(groups: list[dict], cfg):
    """The optimizer of the patch, which takes the learning rate as grpo.update() sets it."""
    from torchao.optim import AdamW8bit

    class Optimizer(AdamW8bit):
        def step(self):
            for group in self.param_groups:
                group["lr"] = torch.as_tensor(group["lr"])
            with torch.compiler.set_stance("force_eager"):  # a compiler would take a minute
                super().step()

    groups = [dict(params=g["params"], weight_decay=g["weight_decay"]) for g in groups]
    return Optimizer(groups, lr=cfg.learning_rate, bf16_stochastic_round=True)


def bytes_of_parameter(run: Run) -> dict:
    """What a parameter takes between two steps, and during one its gradient."""
    parameters = list(run.policy.parameters())
    count = sum(p.numel() for p in parameters)
    moments = 0
    for state in run.optimizer.state.values():
        for tensor in state.values():
            moments += nbytes(tensor)
    weights = sum(p.nbytes for p in parameters)  # a gradient has the type of its weight
    return dict(bytes_weights=weights / count, bytes_moments=moments / count)


def nbytes(tensor) -> int:
    """Of a tensor in 8 bits: its codes, the scale of each block, the table of the 256 numbers."""
    if not hasattr(tensor, "codes"):
        return tensor.nbytes
    return tensor.codes.nbytes + tensor.scale.nbytes + tensor.qmap.nbytes


# --------------------------------------------------------------------------------------------------
# Table and picture. runs: {side: {seed: row}}


def memory_table(runs: dict) -> list:
    names = ["bytes of a weight", "its gradient", "its moments", "all"]
    names += ["weights that are not what they were, %", "gap to the sampler, nats", "CPU seconds"]
    table = [" | ".join(["weights, rounding", *names])]
    for side, by_seed in runs.items():
        rows = list(by_seed.values())
        weight, moments = rows[0]["bytes_weights"], rows[0]["bytes_moments"]
        cells = [f"{x:.2f}" for x in (weight, weight, moments, 2 * weight + moments)]
        cells.append(span([100 * row["moved"] for row in rows], 1))
        cells.append(span([mean_over_steps(row, "gap") for row in rows], 4))
        cells.append(span([row["history"][-1]["seconds"] for row in rows], 0))
        table.append([side, *cells])
    return table


def draw(runs: dict):
    figure, axis = plt.subplots(figsize=(7, 4), layout="constrained")
    for side, by_seed in runs.items():
        histories = [row["history"] for row in by_seed.values()]
        band(axis, histories, "reward", label=f"{side} ({len(by_seed)} seeds)")
    axis.set(xlabel="step", ylabel="reward, mean of the samples", ylim=(0, 1.02))
    legend(figure, axis, ncols=2)
    figure.supxlabel("bands: ± 1 standard error")
    return figure


def check(rows: list[dict]) -> None:
    """Assertions that hold for any answer; if one fails, a side is not what its name says."""
    for row in rows:
        weights, optimizer, _ = SIDES[row["side"]]
        name = f"{row['side']}, seed {row['seed']}"
        assert row["bytes_weights"] == weights.itemsize, f"{name}: other weights"
        if optimizer == "AdamW8bit":
            assert row["bytes_moments"] < 2.2, f"{name}: other moments"
        assert mean_over_steps(row, "gap") < 0.1, f"{name}: the sampler is not the policy"


def add_options(parser) -> None:
    parser.add_argument("folder", nargs="?", help="of the model and the runs; without it: draw")
    parser.add_argument("--draw", action="store_true", help="only draw the runs in the folder")


def main():
    args = arguments(__doc__, add_options)
    if args.quick:
        folder = os.path.join(args.out, "eight_bits")
        shutil.rmtree(folder, ignore_errors=True)
        rows = learn_all(make_run("", quick=True), grid(range(1), SIDES), folder, learn)
    elif args.folder:
        run = None
        if not args.draw:
            run = make_run(make_model(os.path.abspath(args.folder)), quick=False)
        folder = os.path.join(args.folder, "eight_bits")
        rows = learn_all(run, grid(range(SEEDS), SIDES), folder, learn)
        write_runs(rows, RUNS)
    else:
        rows = read_runs(RUNS)

    check(rows)
    runs = {side: {} for side in SIDES}
    for row in rows:
        runs[row["side"]][row["seed"]] = row
    save(args, "eight_bits", draw(runs), test_table(runs, BASE), memory_table(runs))


if __name__ == "__main__":
    main()
