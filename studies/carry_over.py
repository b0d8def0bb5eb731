"""Do the claims carry over to a real model?   python studies/carry_over.py MODEL CHECKPOINT ...

MODEL is the directory that real_model.py makes of SmolLM2-135M-Instruct, CHECKPOINT a step_... of a run of it with that
study's flags and a --save_every, the last of several the furthest. The rows need pip install reasoning-gym==0.1.25, the
rollouts vLLM. In parts 1 to 5 the same code measures the bundled model, too. There is no enumeration here: the true
gradient of part 3 is exact over the vocabulary at every position of the samples, and the samples are drawn. Part 6
rounds the results of one kind of operator at a time to bfloat16, and knows Llamas only.
"""

import argparse
import contextlib
import copy
import dataclasses
import os
import sys
import tempfile
import time

import kl_estimators
import numpy as np
import torch
from common import CPU, HERE, Recorder, Run, fast_policy, next_tokens, plt, save
from mean_of_means import weights
from real_model import FLAGS, ROOT, SYSTEM
from torch import nn

import grpo
import harness.engine
import harness.models
import harness.packing
import harness.workers

SKETCH = 2**20
LONG = 12  # tokens, as in reductions.py
SPLITS = [
    (1, 1),
    (4, 1),
    (16, 1),
    ("all", 2),
    ("all", 4),
    ("all", 8),
]  # samples per micro-batch, ranks
OPERATORS = (
    "weights",
    "linear layers",
    "norms",
    "rotary",
    "attention",
    "silu, product",
    "residual stream",
    "logits",
)
CONFIGURATIONS = {  # of the trainer: its weights are in bfloat16, its products are, its head is in float32
    "autocast, as grpo.py": (False, True, False),
    "autocast, float32 head": (False, True, True),
    "bfloat16 model": (True, False, False),
    "bfloat16 model, float32 head": (True, False, True),
    "float32": (False, False, False),
}


# ----------------------------------------------------------------------------------------------------------------
# The model, its policies and their samples


def configured(model: str) -> grpo.Config:
    gym = os.path.join(ROOT, "sample_data", "gym.py")
    rows = [
        "--train_data",
        f"{gym}:sums",
        "--reward",
        f"{gym}:score",
        "--system_prompt",
        SYSTEM["sums"],
    ]
    return dataclasses.replace(
        grpo.parse_args(["--model", model, *rows, *FLAGS.split()]), max_sampler_gap=1e9
    )


class Real:
    """A model directory with what common.Run gives to the bundled model."""

    def __init__(self, path: str, cfg: grpo.Config):
        rewards, self.tokenizer, self.prompts, _ = grpo.load_data(cfg)
        self.cfg, self.scorer, self.model = (
            cfg,
            harness.workers.Scorer(rewards),
            grpo.load_model(path, cfg),
        )
        self.policy = fast_policy(self.model, cfg.temperature)

    def rollout(self, engine, step: int, n_prompts: int) -> list:
        cfg = dataclasses.replace(self.cfg, num_prompts=n_prompts)
        prompts = grpo.prompts_of_step(self.prompts, step, cfg)
        samples = grpo.sample(
            engine, prompts, cfg.num_generations, 1.0, 0, step, self.tokenizer, cfg, CPU
        )
        grpo.score(samples, self.scorer, step, cfg)
        grpo.assign_advantages(samples, step, cfg)
        return samples


def rollouts(
    paths: dict, cfg, steps: int, n_prompts: int, dtype="bfloat16", float_head=False
) -> dict:
    """{name: a list of samples per step}, by one engine that gets the weights of each."""
    cfg, found, engine = dataclasses.replace(cfg, dtype=dtype), {}, None
    assert harness.engine.choose_sampler(cfg, CPU.device, False)[0] == "vllm"
    for name, path in paths.items():
        real = Real(path, cfg)
        if engine is None:
            special = harness.models.special_ids(real.model, real.tokenizer, cfg)
            longest = max(len(p.ids) for p in real.prompts)
            engine = grpo.make_sampler("vllm", real.model, *special, longest, cfg, CPU)
            if float_head:  # what its option --hf-overrides '{"head_dtype": "float32"}' sets
                engine.llm.apply_model(
                    lambda m: setattr(m.logits_processor, "head_dtype", torch.float32)
                )
        engine.push(real.model)
        found[name] = [real.rollout(engine, step + 1, n_prompts) for step in range(steps)]
    engine.close()
    return found


# ----------------------------------------------------------------------------------------------------------------
# 1, 2, 4: the first step's loss, the mean of means, the length bias


def update(subject, samples: list, **options):
    """Metrics and gradient [P], unclipped, of one optimiser step through grpo.update itself."""
    free = dict(beta=0.0, max_grad_norm=0.0, max_sampler_gap=1e9, tis_cap=0.0)
    recorder = Recorder(subject.policy)
    cfg = dataclasses.replace(subject.cfg, **(free | options))
    metrics = grpo.update(subject.policy, recorder, samples, cfg)
    return metrics, recorder.gradient


def first_step(subject, samples: list) -> dict:
    """(reduction, importance weights) -> value of the loss, the predicted value, gradient norm."""
    found, copies = {}, copy.deepcopy(samples)
    grpo.compute_logps(subject.policy, copies, "old_logps", subject.cfg, CPU)
    lengths = np.array([len(s.completion_ids) for s in samples])
    advantages = np.array([s.advantage for s in samples])
    for reduction in ("sequence", "token"):
        covariance = np.cov(advantages, lengths, ddof=0)[0, 1] / lengths.mean()
        predicted = {0.0: -covariance if reduction == "token" else 0.0}
        w = [np.exp(s.old_logps - s.sampler_logps).clip(max=2.0) for s in copies]
        pushed = [
            a * (x.sum() if reduction == "token" else x.mean())
            for a, x in zip(advantages, w, strict=True)
        ]
        predicted[2.0] = -sum(pushed) / (lengths.sum() if reduction == "token" else len(samples))
        for cap, value in predicted.items():
            metrics, _ = update(subject, samples, loss_reduction=reduction, tis_cap=cap)
            found[reduction, cap] = metrics["loss"], float(value), metrics["grad_norm"]
    return found


def sketch(gradient, signs):
    """[P] -> [SKETCH]: sums of every SKETCH-th number with random signs. Inner products survive, to about 0.1 %."""
    found = torch.zeros(SKETCH)
    for g, sign in zip(gradient.split(SKETCH), signs.split(SKETCH), strict=True):
        found[: len(g)] += g * sign
    return found


def random_signs(policy):
    n = sum(p.numel() for p in policy.parameters())
    return (
        torch.randint(0, 2, (n,), generator=torch.Generator().manual_seed(0), dtype=torch.int8) * 2
        - 1
    )


def angles(subject, samples: list, seed: int) -> dict:
    """Split -> angle in degrees to the exact gradient, length relative to it."""
    signs, lengths = (
        random_signs(subject.policy),
        np.array([len(s.completion_ids) for s in samples]),
    )
    each = torch.zeros(len(samples), SKETCH)
    for row, s in zip(each, samples, strict=True):
        if s.advantage:  # one sample alone, times its own token count: the sum over its tokens
            row += sketch(update(subject, [s])[1], signs) * len(s.completion_ids)
    products, ones = (each @ each.T).double().numpy(), np.ones(len(samples))  # [N, N]
    exact, found = np.sqrt(ones @ products @ ones), {}
    for size, ranks in SPLITS:
        w = weights(lengths, size, ranks, np.random.default_rng(seed).permutation(len(samples)))
        norm = np.sqrt(w @ products @ w)
        cosine = min(1.0, w @ products @ ones / norm / exact)
        found[size, ranks] = np.degrees(np.arccos(cosine)), norm / exact
    whole = update(subject, samples)[1]
    folded = sketch(whole, signs)
    found["error of the sum"] = (
        (each.sum(0) / lengths.sum() - folded).norm() / folded.norm()
    ).item()
    found["error of the sketch"] = (
        folded.norm() / torch.linalg.vector_norm(whole, dtype=torch.float64) - 1
    ).item()
    return found


def push_ratio(samples: list, cfg, reduction: str) -> float:
    """Mean |d loss / d log-probability| of a token in long wrong answers over that in short wrong answers."""
    cfg = dataclasses.replace(cfg, loss_reduction=reduction, beta=0.0)
    batch = grpo.collate(samples, CPU.device)
    logps = batch["sampler_logps"].clone().requires_grad_()
    counts = int(batch["mask"].sum()), len(samples)
    rest = (logps.detach(), None, None, batch["advantages"], batch["mask"], cfg, *counts)
    (slope,) = torch.autograd.grad(grpo.grpo_loss(logps, *rest)[0], logps)  # [N, T]
    push = {True: [], False: []}
    for s, row in zip(samples, slope, strict=True):
        if s.reward < 0.5 and s.advantage < 0:
            n = len(s.completion_ids)
            push[n > LONG].append(row[:n].abs().mean().item())
    return (
        float(np.mean(push[True]) / np.mean(push[False])) if push[True] and push[False] else np.nan
    )


# ----------------------------------------------------------------------------------------------------------------
# 3: the KL estimators


def kl_gradients(policy, reference, samples: list, group_size: int) -> tuple:
    """Sketches [groups, SKETCH] of each gradient, a mean over the completions of one prompt; exact KL, nats per
    completion. On-policy wk3 is k2, and k4 is k1 + k2, token by token: asserted, not computed twice."""
    signs, parameters = random_signs(policy), list(policy.parameters())
    found, kl = {name: [] for name in ("exact", "k1", "k2", "k3")}, 0.0
    for start in range(0, len(samples), group_size):
        batch = grpo.collate(samples[start : start + group_size], CPU.device, policy.rows)
        with torch.no_grad():
            q = next_tokens(reference, batch)  # [n, V]
        p = next_tokens(policy, batch)
        logps, ref = (x.gather(1, batch["targets"][:, None])[:, 0] for x in (p, q))  # [n]
        leaf, slopes = logps.detach().requires_grad_(), {}
        for name in kl_estimators.ESTIMATORS:
            value = grpo.kl_estimate(leaf, ref, leaf.detach(), name).sum()
            (slopes[name],) = torch.autograd.grad(value, leaf)
        torch.testing.assert_close(slopes["wk3"], slopes["k2"], atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(slopes["k4"], slopes["k1"] + slopes["k2"], atol=1e-5, rtol=1e-4)
        values = {"exact": (p.exp() * (p - q)).sum()}
        values |= {name: (slopes[name] * logps).sum() for name in ("k1", "k2", "k3")}
        kl += values["exact"].item() / len(samples)
        for name, value in values.items():
            grads = torch.autograd.grad(value / group_size, parameters, retain_graph=name != "k3")
            found[name].append(sketch(torch.cat([g.flatten() for g in grads]), signs))
    found = {name: torch.stack(rows) for name, rows in found.items()}
    return found | {"k4": found["k1"] + found["k2"], "wk3": found["k2"]}, kl


def kl_errors(gradients: dict, group_size: int) -> dict:
    """Of each: (value, jackknife error) of the squared error of the mean over |true|^2, and of the mean along the true
    one; noise per completion over |true|, whole and of the difference from the exact gradient. Products are taken
    between different prompts only, so that noise does not count as error."""
    every, found = np.arange(len(gradients["exact"])), {}

    def product(a, b):  # [groups, groups]
        return (a.double() @ b.double().T).numpy()

    def between(products, rows):
        part = products[np.ix_(rows, rows)]
        return (part.sum() - np.trace(part)) / (len(rows) * (len(rows) - 1))

    def share(products):
        rows = [every, *(np.delete(every, i) for i in every)]
        whole, *left_out = [between(products, r) / between(true, r) for r in rows]
        return whole, np.sqrt(len(every) - 1) * np.std(left_out)

    def noise(products):
        variance = np.trace(products) / len(every) - between(products, every)
        return np.sqrt(max(0.0, group_size * variance / between(true, every)))

    true = product(gradients["exact"], gradients["exact"])
    for name, g in gradients.items():
        offs = product(g - gradients["exact"], g - gradients["exact"])
        found[name] = dict(squared=share(offs), along=share(product(g, gradients["exact"])))
        found[name] |= dict(noise=noise(product(g, g)), own_noise=noise(offs))
    return found


# ----------------------------------------------------------------------------------------------------------------
# 5, 6: the sampler's log-probabilities and the trainer's


@contextlib.contextmanager
def rounded(policy, operators):
    """Within it what these operators return is rounded to bfloat16; all else stays float32."""
    layers, undo = policy.model.base_model.layers, contextlib.ExitStack()
    modeling = sys.modules[type(layers[0]).__module__]

    def r(x):
        return x.bfloat16().float()

    def rounds(modules):
        for m in modules:
            undo.callback(m.register_forward_hook(lambda m, args, out: r(out)).remove)

    def before(modules, hook):
        for m in modules:
            undo.callback(m.register_forward_pre_hook(hook).remove)

    with undo:
        if "weights" in operators:
            for p in policy.parameters():
                undo.callback(p.data.copy_, p.data.clone())
                p.data.copy_(r(p.data))
        if "linear layers" in operators:
            rounds(m for m in layers.modules() if isinstance(m, nn.Linear))
        if "norms" in operators:
            rounds(m for m in policy.modules() if "Norm" in type(m).__name__)
        if "rotary" in operators:  # cosine and sine, and what they make of queries and keys
            plain = modeling.apply_rotary_pos_emb
            undo.callback(setattr, modeling, "apply_rotary_pos_emb", plain)
            modeling.apply_rotary_pos_emb = lambda q, k, *angles: map(
                r, plain(q, k, *map(r, angles))
            )
        if "attention" in operators:
            attend = harness.packing.packed_attention
            undo.callback(
                modeling.ALL_ATTENTION_FUNCTIONS.register, harness.packing.ATTENTION, attend
            )

            def in_bf16(module, query, key, value, blocks, **options):
                blocks = [
                    (*places, bias if bias is None else bias.bfloat16()) for *places, bias in blocks
                ]
                out, _ = attend(
                    module, *(x.bfloat16() for x in (query, key, value)), blocks, **options
                )
                return out.float(), None

            modeling.ALL_ATTENTION_FUNCTIONS.register(harness.packing.ATTENTION, in_bf16)
        if "silu, product" in operators:
            rounds(layer.mlp.act_fn for layer in layers)
            before([layer.mlp.down_proj for layer in layers], lambda m, args: (r(args[0]),))
        if "residual stream" in operators:
            rounds([policy.model.get_input_embeddings(), *layers])

            def in_place(m, args):  # the tensor that the second norm gets goes round it, too
                args[0].copy_(r(args[0]))

            before([layer.post_attention_layernorm for layer in layers], in_place)
        yield


@torch.no_grad()
def logps_of(policy, samples: list, cfg, operators=(), float_head=False) -> np.ndarray:
    """[n], the samples' tokens one after the other. With operators or a float32 head the head is computed here."""
    if not operators and not float_head:
        copies = [dataclasses.replace(s) for s in samples]
        grpo.compute_logps(policy, copies, "old_logps", cfg, CPU)
        return np.concatenate([s.old_logps for s in copies])
    parts = {}
    for micro in grpo.plan(samples, policy.packs, cfg, CPU)[0]:
        batch = grpo.collate(micro, CPU.device, policy.rows)
        with rounded(policy, operators):
            with grpo.autocast(cfg, CPU.device):
                hidden = policy.hidden(batch)
            logits = (
                hidden.float() @ policy.model.get_output_embeddings().weight.float().T
            )  # [n, V]
        logits = logits.bfloat16().float() if "logits" in operators else logits
        logps = logits.log_softmax(-1).gather(1, batch["targets"][:, None])[:, 0]  # [n]
        logps = logps.split([len(s.completion_ids) for s in micro])
        parts |= {id(s): part.numpy() for s, part in zip(micro, logps, strict=True)}
    return np.concatenate([parts[id(s)] for s in samples])


def sampler_logps(samples: list) -> np.ndarray:
    return np.concatenate([s.sampler_logps for s in samples])


def mean_gap(a, b, samples: list) -> tuple[float, float]:
    """Mean |difference| a token, and its standard error over completions."""
    gap, ends = np.abs(a - b), np.cumsum([len(s.completion_ids) for s in samples])[:-1]
    parts = [part.sum() - gap.mean() * len(part) for part in np.split(gap, ends)]
    return float(gap.mean()), float(np.sqrt(np.square(parts).sum()) / len(gap))


def importance_weights(trainer, samples: list) -> dict:
    log_ratio = trainer - sampler_logps(samples)
    ends = np.cumsum([len(s.completion_ids) for s in samples])[:-1]
    token, sequence = np.exp(log_ratio), np.exp([x.sum() for x in np.split(log_ratio, ends)])
    found = dict(
        gap=mean_gap(trainer, sampler_logps(samples), samples), n=(len(token), len(sequence))
    )
    for name, w in (("token", token), ("sequence", sequence)):
        found[name] = dict(
            quantiles=np.quantile(w, (0.001, 0.01, 0.99, 0.999)), beyond=float((w > 2).mean())
        )
        found[name] |= dict(
            most=float(w.max()), ess=float(w.sum() ** 2 / (len(w) * np.square(w).sum()))
        )
    return found


def operator_gaps(path: str, cfg, samples: list, float_head_samples: list) -> dict:
    """Mean |gap| and its error, of each row of a table: what is rounded, to the float32 model and to the engine; the
    trainer's arithmetic, to an engine with a float32 head, too. By probability of the token: share, mean |gap|."""
    exact, found, policy = dataclasses.replace(cfg, dtype="float32"), {}, Real(path, cfg).policy
    base, engine = logps_of(policy, samples, exact), sampler_logps(samples)
    rounding = {f"only {name}": {name} for name in OPERATORS} | {"all of these": set(OPERATORS)}
    rounding |= {f"all but {name}": set(OPERATORS) - {name} for name in OPERATORS}
    for name, operators in rounding.items():
        logps = logps_of(policy, samples, exact, operators)
        rounding[name] = [mean_gap(logps, other, samples) for other in (base, engine)]
    for low, high in ((0, 0.1), (0.1, 0.9), (0.9, 1)):
        there = (low < np.exp(base)) & (np.exp(base) <= high)
        found[f"{low} to {high}"] = [
            float(there.mean()),
            float(np.abs(base - engine)[there].mean()),
        ]
    trainer, head = {}, float_head_samples
    for name, (whole, autocast, float_head) in CONFIGURATIONS.items():
        policy, c = Real(path, cfg).policy, cfg if autocast else exact
        for p in policy.parameters() if whole else ():
            p.data = p.data.bfloat16()
        parts = (base, samples), (engine, samples), (sampler_logps(head), head)
        trainer[name] = [
            mean_gap(logps_of(policy, part, c, float_head=float_head), y, part) for y, part in parts
        ]
    return dict(rounding=rounding, trainer=trainer, probability=found)


# ----------------------------------------------------------------------------------------------------------------
# Tables and the figure


def spread(values, digits=2) -> str:
    if np.isnan(values).all():
        return "none long"
    return f"{np.mean(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def with_error(pair, digits=4) -> str:
    return f"{pair[0]:.{digits}f} ± {pair[1]:.{digits}f}"


def loss_table(first: dict) -> list:
    table = [
        [
            "1: first step",
            "reduction",
            "weights",
            "loss: mean (range)",
            "largest error of the prediction",
        ]
    ]
    table[0] += ["gradient norm: mean (range)"]
    for name, found in first.items():
        for reduction, cap in found[0]:
            loss, predicted, norm = np.array([r[reduction, cap] for r in found]).T
            error = f"{np.abs(loss - predicted).max():.0e}"
            table.append(
                [
                    name,
                    reduction,
                    f"cap {cap:g}" if cap else "none",
                    spread(loss, 4),
                    error,
                    spread(norm),
                ]
            )
    return table


def angle_table(turned: dict) -> list:
    names = [f"{size} a micro-batch, {ranks} rank{'s' * (ranks > 1)}" for size, ranks in SPLITS]
    table = [["2: angle in degrees, length / exact", "rollouts", *names]]
    for name, found in turned.items():
        means = [np.mean([r[split] for r in found], 0) for split in SPLITS]
        table.append([name, len(found), *(f"{angle:.1f}, {length:.2f}" for angle, length in means)])
    return table


def kl_table(kl: dict) -> list:
    table = [
        ["3: gradient of", "policy", "KL, nats per completion", "squared error of the mean ± s.e."]
    ]
    table[0] += [
        "along the true one ± s.e.",
        "noise per completion",
        "without the exact gradient's",
    ]
    for r in kl_estimators.exact_gradients():
        if r["sampling"] == "on-policy" and r["name"] != "k1 in reward":
            errors = [f"{r['bias'] ** 2:.3f}", f"{r['along']:.3f}", f"{r['noise']:.1f}", ""]
            table.append([r["name"], f"enumerated toy, {r['distance']}", r["kl"], *errors])
    for name, (errors, value) in kl.items():
        for estimator, e in errors.items():
            row = [
                with_error(e["squared"], 3),
                with_error(e["along"], 3),
                f"{e['noise']:.1f}",
                f"{e['own_noise']:.1f}",
            ]
            table.append([estimator, name, value, *row])
    return table


def weight_table(importance: dict) -> list:
    table = [
        [
            "5: trainer",
            "tokens",
            "mean abs(log ratio) ± s.e.",
            "token weight: 0.1, 1, 99, 99.9 %",
            "largest",
        ]
    ]
    table[0] += [
        "over 2",
        "effective share",
        "sequence weight: 1, 99 %",
        "largest",
        "effective share",
    ]
    for name, found in importance.items():
        row = [name, found["n"][0], with_error(found["gap"], 5)]
        for kind, some in (("token", slice(None)), ("sequence", slice(1, 3))):
            w = found[kind]
            row += [", ".join(f"{q:.3f}" for q in w["quantiles"][some]), f"{w['most']:.3f}"]
            row += [f"{w['beyond']:.1e}"] * (kind == "token") + [f"{w['ess']:.4f}"]
        table.append(row)
    return table


def operator_tables(gaps: dict) -> list:
    columns = dict(probability=("share of tokens", "gap of float32 and the engine"))
    columns["rounding"] = ("gap to float32 ± s.e.", "to the engine ± s.e.")
    columns["trainer"] = (*columns["rounding"], "to one with a float32 head ± s.e.")
    tables = []
    for kind, names in columns.items():
        tables.append([[f"6: {kind}", *(f"{state}: {name}" for state in gaps for name in names)]])
        for name in gaps["start"][kind]:
            cells = [x for found in gaps.values() for x in found[kind][name]]
            tables[-1].append(
                [name, *(x if isinstance(x, float) else with_error(x) for x in cells)]
            )
    return tables


def draw(gaps: dict):
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 5.2), layout="constrained")
    wide = 0.8 / len(gaps)
    for i, (state, found) in enumerate(gaps.items()):
        style = dict(color=f"C{i}", capsize=2, error_kw=dict(lw=0.8), align="edge")
        pairs = [
            found["rounding"][row][0]
            for row in (*(f"only {name}" for name in OPERATORS), "all of these")
        ]
        mean, error = np.array(
            [*pairs, found["trainer"]["float32"][1]]
        ).T  # the last: of the engine itself
        left.barh(
            np.arange(len(mean)) + wide * i - 0.4,
            mean,
            0.9 * wide,
            xerr=error,
            label=state,
            **style,
        )
        for j, engine in enumerate(("the engine as it is", "with a float32 head")):
            mean, error = np.array([pairs[1 + j] for pairs in found["trainer"].values()]).T
            style |= dict(alpha=0.45 if j else 1, label=f"{state}, {engine}")
            right.barh(
                np.arange(len(mean)) + wide * (i + j / 2) - 0.4,
                mean,
                0.45 * wide,
                xerr=error,
                **style,
            )
    left.set_yticks(range(len(OPERATORS) + 2), [*OPERATORS, "all of these", "the engine"])
    right.set_yticks(
        range(len(CONFIGURATIONS)), [name.replace(", ", ",\n") for name in CONFIGURATIONS]
    )
    left.set(title="rounded to bfloat16: only this", xlabel="gap to the float32 model")
    right.set(title="arithmetic of the trainer", xlabel="gap to the engine")
    for axis in (left, right):
        axis.grid(axis="y", visible=False)
        axis.set_ylim(len(axis.get_yticks()) + 1.0, -0.6)
        what = ": mean |log-probability difference| a token,\nnats; whiskers: ± 1 s.e. over completions"
        axis.set_xlabel(axis.get_xlabel() + what)
        axis.legend(loc="lower right", fontsize=8)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="FOLDER/model of real_model.py")
    parser.add_argument("checkpoints", nargs="+", help="step_... of a run of it")
    parser.add_argument(
        "--quick", action="store_true", help="minutes, few samples: does it still run?"
    )
    args = parser.parse_args()
    args.started, args.jobs, args.out = time.monotonic(), 1, os.path.join(HERE, "figures")
    if args.quick:  # the published figure comes from the full run only
        args.out = os.path.join(tempfile.gettempdir(), "studies_quick")
        os.makedirs(args.out, exist_ok=True)
    cfg, n_prompts, steps = (
        configured(os.path.abspath(args.model)),
        2 if args.quick else 16,
        1 if args.quick else 4,
    )
    policies = {"start": cfg.model} | {
        f"{int(path.rstrip('/')[-6:])} steps": path for path in args.checkpoints
    }
    ends = {name: policies[name] for name in ("start", list(policies)[-1])}
    samples = rollouts(policies, cfg, steps, n_prompts)
    with_head = rollouts(ends, cfg, 1, n_prompts, float_head=True)
    near = list(policies)[1]
    own = rollouts({near: policies[near]}, cfg, 1, n_prompts * 3 // 2, "float32")[near][0]
    toy = Run(num_prompts=n_prompts)
    toy_samples = [toy.rollout(step + 1) for step in range(steps)]
    reals = {name: Real(path, cfg) for name, path in policies.items()}

    first = {"bundled model, start, float32": [first_step(toy, part) for part in toy_samples]}
    first["SmolLM2, start, bfloat16"] = [
        first_step(reals["start"], part) for part in samples["start"]
    ]
    every = [values for found in first.values() for rollout in found for values in rollout.values()]
    assert all(abs(loss - predicted) < 1e-4 for loss, predicted, _ in every)
    turned = {
        "bundled model, start": [
            angles(toy, part[: 4 * n_prompts], i) for i, part in enumerate(toy_samples)
        ]
    }
    for name in ("start", near):
        turned[f"SmolLM2, {name}"] = [angles(reals[name], samples[name][0][: 4 * n_prompts], 0)]

    subjects = {"bundled model, start": (toy, toy_samples)}
    subjects |= {f"SmolLM2, {name}": (reals[name], parts) for name, parts in samples.items()}
    push = [
        [
            "4: push, long / short wrong answers: mean (range)",
            *(kinds := ("sequence", "token", "constant")),
        ]
    ]
    for name, (subject, parts) in subjects.items():
        push.append(
            [
                name,
                *(
                    spread([push_ratio(part, subject.cfg, kind) for part in parts])
                    for kind in kinds
                ),
            ]
        )

    special = toy.sampler.eos_ids, toy.sampler.pad_id
    toy.sampler = grpo.HFSampler(
        toy.model, *special, dataclasses.replace(toy.cfg, dtype="bfloat16")
    )
    subjects["bundled model, start"] = toy, [toy.rollout(step + 1) for step in range(steps)]
    importance = {}
    for name, (subject, parts) in subjects.items():
        for dtype in ("bfloat16", "float32"):
            dtyped = dataclasses.replace(subject.cfg, dtype=dtype)
            logps = [
                logps_of(subject.policy, part, dtyped) for part in parts[:2]
            ]  # apart: groups have the same names
            importance[f"{name}, {dtype}"] = importance_weights(
                np.concatenate(logps), sum(parts[:2], [])
            )

    toy.sampler = grpo.HFSampler(toy.model, *special, toy.cfg)
    for step in range(1, 2 if args.quick else 11):
        toy.update(toy.rollout(step), step)
    toy.cfg = dataclasses.replace(toy.cfg, num_prompts=n_prompts * 3 // 2)
    distances = {
        "bundled model, 10 steps": kl_gradients(toy.policy, toy.reference, toy.rollout(11), 8)
    }
    distances[f"SmolLM2, {near}"] = kl_gradients(reals[near].policy, reals["start"].policy, own, 8)
    kl = {name: (kl_errors(gradients, 8), value) for name, (gradients, value) in distances.items()}

    gaps = {
        name: operator_gaps(path, cfg, samples[name][0], with_head[name][0])
        for name, path in ends.items()
    }
    tables = loss_table(first), angle_table(turned), kl_table(kl), push, weight_table(importance)
    save(args, "carry_over", draw(gaps), *tables, *operator_tables(gaps))


if __name__ == "__main__":
    main()
