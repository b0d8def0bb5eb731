"""Do the claims carry over to a real model?   python studies/carry_over.py MODEL CHECKPOINT ...

MODEL is the directory that real_model.py makes of SmolLM2-135M-Instruct. CHECKPOINT is a step_...
of a run of it with that study's flags and a --save_every; of several, the last has trained longest.
The rows need pip install reasoning-gym==0.1.25, the rollouts vLLM. Parts 1 to 5 measure the bundled
model with the same code. Nothing is enumerated here: the samples are drawn, and the true gradient
of part 3 is exact over the vocabulary at every position of these samples. Part 6 rounds the results
of one kind of operator at a time to bfloat16; it works for Llamas only.
"""

import contextlib
import copy
import dataclasses
import itertools
import os
import sys

import kl_estimators
import numpy as np
import torch
from common import (
    CPU,
    Recorder,
    Run,
    advantage_of,
    arguments,
    fast_policy,
    lengths_of,
    next_tokens,
    plt,
    ratio_of_means,
    sample_step,
    save,
)
from mean_of_means import weights
from real_model import FLAGS, ROOT, SYSTEM
from torch import nn

import grpo
import harness.attention
import harness.engine
import harness.models
import harness.scorer
import harness.workers
from harness.fast import unflatten

SKETCH = 2**20  # numbers of a sketched gradient: see sketch()
LONG = 12  # tokens, as in reductions.py
GROUP = 8  # samples of a prompt
# samples per micro-batch, ranks
SPLITS = [(1, 1), (4, 1), (16, 1), ("all", 2), ("all", 4), ("all", 8)]
REDUCTIONS = ("sequence", "token", "constant")
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
CONFIGURATIONS = {  # of the trainer: bfloat16 weights, autocast to bfloat16, float32 head
    "autocast, as grpo.py": (False, True, False),
    "autocast, float32 head": (False, True, True),
    "bfloat16 model": (True, False, False),
    "bfloat16 model, float32 head": (True, False, True),
    "float32": (False, False, False),
}


# --------------------------------------------------------------------------------------------------
# The model, its policies and their samples


def configured(model: str) -> grpo.Config:
    gym = os.path.join(ROOT, "sample_data", "gym.py")
    flags = ["--model", model, "--train_data", f"{gym}:sums", "--reward", f"{gym}:score"]
    flags += ["--system_prompt", SYSTEM["sums"], *FLAGS.split(), "--dtype", "bfloat16"]
    return dataclasses.replace(grpo.parse_args(flags), max_sampler_gap=1e9)


class Real:
    """A model directory with the attributes that common.Run has for the bundled model."""

    def __init__(self, path: str, cfg: grpo.Config):
        rewards, _, self.tokenizer, self.prompts, _ = grpo.load_data(cfg)
        self.cfg = cfg
        self.scorer = harness.scorer.Scorer(rewards)
        self.model = grpo.load_model(path, cfg)
        self.policy = fast_policy(self.model, cfg.temperature)

    def rollout(self, engine, step: int, n_prompts: int) -> list:
        cfg = dataclasses.replace(self.cfg, num_prompts=n_prompts)
        samples = sample_step(engine, self.prompts, self.tokenizer, step, cfg)
        grpo.score(samples, self.scorer, step, cfg)
        grpo.assign_advantages(samples, step, cfg)
        return samples


def rollouts(
    paths: dict, cfg, steps: int, n_prompts: int, dtype="bfloat16", float_head=False
) -> dict:
    """{name: a list of samples per step}, by one engine that gets the weights of each path."""
    cfg = dataclasses.replace(cfg, dtype=dtype)
    assert harness.engine.choose_sampler(cfg, CPU.device, False)[0] == "vllm"
    results, engine = {}, None
    for name, path in paths.items():
        real = Real(path, cfg)
        if engine is None:
            special = harness.models.special_ids(real.model, real.tokenizer, cfg)
            longest_prompt = max(len(prompt.ids) for prompt in real.prompts)
            engine = grpo.make_sampler("vllm", real.model, *special, longest_prompt, cfg, CPU)
            if float_head:
                engine.llm.apply_model(set_float_head)
        engine.push(real.model)
        results[name] = [real.rollout(engine, step + 1, n_prompts) for step in range(steps)]
    engine.close()
    return results


def set_float_head(model) -> None:
    """Does the same as vLLM's option --hf-overrides '{"head_dtype": "float32"}'."""
    model.logits_processor.head_dtype = torch.float32


# --------------------------------------------------------------------------------------------------
# 1, 2, 4: the first step's loss, the mean of means, the length bias


def update(subject, samples: list, **options):
    """Metrics and gradient [P], before clipping, of one optimiser step of grpo.update."""
    bare = dict(beta=0.0, max_grad_norm=0.0, max_sampler_gap=1e9, tis_cap=0.0)
    recorder = Recorder(subject.policy)
    cfg = dataclasses.replace(subject.cfg, **(bare | options))
    metrics = grpo.update(subject.policy, recorder, samples, cfg)
    return metrics, recorder.gradient


def predicted_losses(samples: list, old_samples: list, reduction: str) -> dict:
    """{tis_cap: loss} of the first step, from the samples alone. old_samples: with old_logps."""
    lengths = lengths_of(samples)
    advantages = np.array([advantage_of(s) for s in samples])
    pushes = []
    for advantage, s in zip(advantages, old_samples, strict=True):
        w = np.exp(s.old_logps - s.sampler_logps).clip(max=2.0)
        pushes.append(advantage * (w.sum() if reduction == "token" else w.mean()))
    if reduction == "token":
        covariance = np.cov(advantages, lengths, ddof=0)[0, 1] / lengths.mean()
        return {0.0: -covariance, 2.0: -sum(pushes) / lengths.sum()}
    return {0.0: 0.0, 2.0: -sum(pushes) / len(samples)}


def first_step(subject, samples: list) -> dict:
    """{(reduction, tis_cap): (loss, predicted loss, gradient norm)}"""
    old_samples = copy.deepcopy(samples)
    grpo.compute_logps(subject.policy, old_samples, "old_logps", subject.cfg, CPU)
    results = {}
    for reduction in ("sequence", "token"):
        for cap, predicted in predicted_losses(samples, old_samples, reduction).items():
            metrics, _ = update(subject, samples, loss_reduction=reduction, tis_cap=cap)
            results[reduction, cap] = metrics["loss"], float(predicted), metrics["grad_norm"]
    return results


def sketch(gradient, signs):
    """[P] -> [SKETCH]: adds up every SKETCH-th number with random signs. This keeps the inner
    products of gradients, to about 0.1 %."""
    result = torch.zeros(SKETCH)
    for g, sign in zip(gradient.split(SKETCH), signs.split(SKETCH), strict=True):
        result[: len(g)] += g * sign
    return result


def random_signs(policy):
    n = sum(p.numel() for p in policy.parameters())
    g = torch.Generator().manual_seed(0)
    return torch.randint(0, 2, (n,), generator=g, dtype=torch.int8) * 2 - 1


def angles(subject, samples: list, seed: int) -> dict:
    """{split: (angle in degrees to the exact gradient, length relative to it)}, and two errors of
    the method."""
    signs, lengths = random_signs(subject.policy), lengths_of(samples)
    single = torch.zeros(len(samples), SKETCH)  # the sum over the tokens of each sample alone
    for row, s in zip(single, samples, strict=True):
        if advantage_of(s) != 0:
            row += sketch(update(subject, [s])[1], signs) * len(s.completion_ids)
    products = (single @ single.T).double().numpy()  # [N, N]
    ones = np.ones(len(samples))
    exact_norm = np.sqrt(ones @ products @ ones)
    results = {}
    for size, ranks in SPLITS:
        order = np.random.default_rng(seed).permutation(len(samples))
        w = weights(lengths, size, ranks, order)
        norm = np.sqrt(w @ products @ w)
        cosine = min(1.0, w @ products @ ones / norm / exact_norm)
        results[size, ranks] = np.degrees(np.arccos(cosine)), norm / exact_norm

    _, whole = update(subject, samples)
    folded = sketch(whole, signs)
    error = (single.sum(0) / lengths.sum() - folded).norm() / folded.norm()
    results["error of the sum"] = error.item()
    whole_norm = torch.linalg.vector_norm(whole, dtype=torch.float64)
    results["error of the sketch"] = (folded.norm() / whole_norm - 1).item()
    return results


def push_ratio(samples: list, cfg, reduction: str) -> float:
    """Mean |d loss / d log-probability| of a token in long wrong answers, over the same in short
    wrong answers; NaN if there are none of one kind."""
    cfg = dataclasses.replace(cfg, loss_reduction=reduction, beta=0.0)
    batch = grpo.collate(samples, CPU.device)
    logps = batch["sampler_logps"].clone().requires_grad_()
    counts = int(batch["mask"].sum()), len(samples)
    rest = (logps.detach(), None, None, batch["advantages"], batch["mask"], cfg, *counts)
    (slope,) = torch.autograd.grad(grpo.grpo_loss(logps, *rest)[0], logps)  # [N, T]
    long, short = [], []
    for s, row in zip(samples, slope, strict=True):
        if s.reward < 0.5 and advantage_of(s) < 0:
            n = len(s.completion_ids)
            pushes = long if n > LONG else short
            pushes.append(row[:n].abs().mean().item())
    return ratio_of_means(long, short)


# --------------------------------------------------------------------------------------------------
# 3: the KL estimators


def kl_gradients(policy, reference, samples: list) -> tuple:
    """{name: sketches [groups, SKETCH]} of each gradient, a mean over the completions of a prompt;
    and the exact KL in nats per completion. On-policy wk3 is k2, and k4 is k1 + k2, token by token:
    that is asserted, not computed twice."""
    signs, parameters = random_signs(policy), list(policy.parameters())
    gradients = {name: [] for name in ("exact", "k1", "k2", "k3")}
    kl = 0.0
    for start in range(0, len(samples), GROUP):
        batch = grpo.collate(samples[start : start + GROUP], CPU.device, policy.rows)
        with torch.no_grad():
            q = next_tokens(reference, batch)  # [n, V]
        p = next_tokens(policy, batch)
        targets = batch["targets"][:, None]
        logps, ref_logps = p.gather(1, targets)[:, 0], q.gather(1, targets)[:, 0]  # [n]
        slopes = {}  # of each estimator, by the log-probabilities
        leaf = logps.detach().requires_grad_()
        for name in kl_estimators.ESTIMATORS:
            value = grpo.kl_estimate(leaf, ref_logps, leaf.detach(), name).sum()
            (slopes[name],) = torch.autograd.grad(value, leaf)
        torch.testing.assert_close(slopes["wk3"], slopes["k2"], atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(slopes["k4"], slopes["k1"] + slopes["k2"], atol=1e-5, rtol=1e-4)

        exact = (p.exp() * (p - q)).sum()
        kl += exact.item() / len(samples)
        for name, rows in gradients.items():
            value = exact if name == "exact" else (slopes[name] * logps).sum()
            last = name == "k3"
            grads = torch.autograd.grad(value / GROUP, parameters, retain_graph=not last)
            rows.append(sketch(torch.cat([g.flatten() for g in grads]), signs))
    gradients = {name: torch.stack(rows) for name, rows in gradients.items()}
    gradients["k4"] = gradients["k1"] + gradients["k2"]
    gradients["wk3"] = gradients["k2"]
    return gradients, kl


def kl_errors(gradients: dict) -> dict:
    """For each estimator, relative to the true gradient: the squared error of the mean, and its
    length along the true one, as (value, jackknife error); and the noise per completion, whole and
    of the difference from the exact gradient. Products are taken between different prompts only, so
    that noise does not count as error."""
    exact = gradients["exact"]
    groups = np.arange(len(exact))

    def product(a, b):  # [groups, groups]
        return (a.double() @ b.double().T).numpy()

    def between(products, rows):
        chosen = products[np.ix_(rows, rows)]
        return (chosen.sum() - np.trace(chosen)) / (len(rows) * (len(rows) - 1))

    def share(products):
        value = between(products, groups) / between(true, groups)
        left_out = []
        for i in groups:
            rows = np.delete(groups, i)
            left_out.append(between(products, rows) / between(true, rows))
        return value, np.sqrt(len(groups) - 1) * np.std(left_out)

    def noise(products):
        variance = np.trace(products) / len(groups) - between(products, groups)
        return np.sqrt(max(0.0, GROUP * variance / between(true, groups)))

    true = product(exact, exact)
    errors = {}
    for name, g in gradients.items():
        difference = product(g - exact, g - exact)
        errors[name] = dict(
            squared=share(difference),
            along=share(product(g, exact)),
            noise=noise(product(g, g)),
            own_noise=noise(difference),
        )
    return errors


# --------------------------------------------------------------------------------------------------
# 5, 6: the sampler's log-probabilities and the trainer's


def r(x):
    """Rounds to bfloat16."""
    return x.bfloat16().float()


def round_in_place(module, args):
    """Hook of a norm, whose input the layer also adds to its output."""
    args[0].copy_(r(args[0]))


class Rounding(contextlib.ExitStack):
    """While it is entered, the results of these operators are rounded to bfloat16; everything else
    is float32."""

    def __init__(self, policy, operators):
        super().__init__()
        self.policy, self.operators = policy, operators
        self.layers = policy.model.base_model.layers
        self.modeling = sys.modules[type(self.layers[0]).__module__]

    def __enter__(self):
        super().__enter__()
        layers = self.layers
        if "weights" in self.operators:
            for p in self.policy.parameters():
                self.callback(p.data.copy_, p.data.clone())
                p.data.copy_(r(p.data))
        if "linear layers" in self.operators:
            self.round_results(m for m in layers.modules() if isinstance(m, nn.Linear))
        if "norms" in self.operators:
            self.round_results(m for m in self.policy.modules() if "Norm" in type(m).__name__)
        if "rotary" in self.operators:
            self.round_rotary()
        if "attention" in self.operators:
            self.round_attention()
        if "silu, product" in self.operators:
            self.round_results(layer.mlp.act_fn for layer in layers)
            self.before((layer.mlp.down_proj for layer in layers), lambda m, args: (r(args[0]),))
        if "residual stream" in self.operators:
            self.round_results([self.policy.model.get_input_embeddings(), *layers])
            self.before((layer.post_attention_layernorm for layer in layers), round_in_place)
        return self

    def round_results(self, modules):
        for m in modules:
            self.callback(m.register_forward_hook(lambda m, args, out: r(out)).remove)

    def before(self, modules, hook):
        for m in modules:
            self.callback(m.register_forward_pre_hook(hook).remove)

    def round_rotary(self):
        """Cosine and sine, and the queries and keys that they turn."""
        plain = self.modeling.apply_rotary_pos_emb
        self.callback(setattr, self.modeling, "apply_rotary_pos_emb", plain)

        def rotary(q, k, *angles):
            q, k = plain(q, k, *map(r, angles))
            return r(q), r(k)

        self.modeling.apply_rotary_pos_emb = rotary

    def round_attention(self):
        """Attention of bfloat16 inputs."""
        attend = harness.attention.packed_attention
        register = self.modeling.ALL_ATTENTION_FUNCTIONS.register
        self.callback(register, harness.attention.ATTENTION, attend)

        def in_bfloat16(module, query, key, value, row, **options):
            row.dtype = torch.bfloat16  # of the masks, which the first layer makes
            inputs = [x.bfloat16() for x in (query, key, value)]
            out, _ = attend(module, *inputs, row, **options)
            return out.float(), None

        register(harness.attention.ATTENTION, in_bfloat16)


@torch.no_grad()
def logps_of(policy, samples: list, cfg, operators=(), float_head=False) -> np.ndarray:
    """[n]: the log-probabilities of all tokens, one sample after the other. With operators or a
    float32 head, the head is computed here."""
    if not operators and not float_head:
        copies = [dataclasses.replace(s) for s in samples]
        grpo.compute_logps(policy, copies, "old_logps", cfg, CPU)
        return np.concatenate([s.old_logps for s in copies])
    rows = {}
    for micro in grpo.plan(samples, policy.packs, cfg, n_ranks=1)[0]:
        batch = grpo.collate(micro, CPU.device, policy.rows)
        with Rounding(policy, operators):
            with grpo.autocast(cfg, CPU.device):
                hidden = policy.hidden(batch)
            head = policy.model.get_output_embeddings().weight.float()
            logits = hidden.float() @ head.T  # [n, V]
        if "logits" in operators:
            logits = r(logits)
        logps = logits.log_softmax(-1).gather(1, batch["targets"][:, None])[:, 0]  # [n]
        # a packed row has the samples in an order of its own
        for s, row in zip(micro, unflatten(logps, batch).numpy(), strict=True):
            rows[id(s)] = row[: len(s.completion_ids)]
    return np.concatenate([rows[id(s)] for s in samples])


def sampler_logps(samples: list) -> np.ndarray:
    return np.concatenate([s.sampler_logps for s in samples])


def by_sample(values, samples: list) -> list:
    """[n] values of the tokens -> an array for each sample."""
    return np.split(values, np.cumsum(lengths_of(samples))[:-1])


def mean_gap(a, b, samples: list) -> tuple[float, float]:
    """Mean |difference| per token, and its standard error over completions."""
    gap = np.abs(a - b)
    excess = [x.sum() - gap.mean() * len(x) for x in by_sample(gap, samples)]
    return float(gap.mean()), float(np.sqrt(np.square(excess).sum()) / len(gap))


def weight_statistics(w) -> dict:
    return dict(
        quantiles=np.quantile(w, (0.001, 0.01, 0.99, 0.999)),
        beyond=float((w > 2).mean()),
        largest=float(w.max()),
        effective_share=float(w.sum() ** 2 / (len(w) * np.square(w).sum())),
    )


def importance_weights(trainer, samples: list) -> dict:
    """Statistics of the weights trainer / sampler, for tokens and for whole sequences."""
    sampler = sampler_logps(samples)
    log_ratio = trainer - sampler
    sequences = [x.sum() for x in by_sample(log_ratio, samples)]
    return dict(
        gap=mean_gap(trainer, sampler, samples),
        n_tokens=len(log_ratio),
        token=weight_statistics(np.exp(log_ratio)),
        sequence=weight_statistics(np.exp(sequences)),
    )


def operator_gaps(path: str, cfg, samples: list, float_head_samples: list) -> dict:
    """Three tables of (mean |gap|, standard error). rounding: a kind of operator is rounded; gap to
    the float32 model, and to the engine. trainer: the trainer's arithmetic; gap to the float32
    model, to the engine, and to an engine with a float32 head. probability: by probability of the
    token, the share of the tokens and their mean |gap|."""
    exact = dataclasses.replace(cfg, dtype="float32")
    policy = Real(path, cfg).policy
    base, engine = logps_of(policy, samples, exact), sampler_logps(samples)
    same = logps_of(policy, samples, exact, float_head=True)  # nothing is rounded
    np.testing.assert_allclose(same, base, atol=1e-3)

    choices = {f"only {name}": {name} for name in OPERATORS}
    choices["all of these"] = set(OPERATORS)
    for name in OPERATORS:
        choices[f"all but {name}"] = set(OPERATORS) - {name}
    rounding = {}
    for name, operators in choices.items():
        logps = logps_of(policy, samples, exact, operators)
        rounding[name] = [mean_gap(logps, base, samples), mean_gap(logps, engine, samples)]

    probability = {}
    for low, high in ((0, 0.1), (0.1, 0.9), (0.9, 1)):
        inside = (low < np.exp(base)) & (np.exp(base) <= high)
        gap = np.abs(base - engine)[inside].mean()
        probability[f"{low} to {high}"] = [float(inside.mean()), float(gap)]

    trainer = {}
    float_head_engine = sampler_logps(float_head_samples)
    for name, (low_weights, autocast, float_head) in CONFIGURATIONS.items():
        policy = Real(path, cfg).policy
        if low_weights:
            for p in policy.parameters():
                p.data = p.data.bfloat16()
        run_cfg = cfg if autocast else exact
        logps = logps_of(policy, samples, run_cfg, float_head=float_head)
        head_logps = logps_of(policy, float_head_samples, run_cfg, float_head=float_head)
        trainer[name] = [
            mean_gap(logps, base, samples),
            mean_gap(logps, engine, samples),
            mean_gap(head_logps, float_head_engine, float_head_samples),
        ]
    return dict(rounding=rounding, trainer=trainer, probability=probability)


# --------------------------------------------------------------------------------------------------
# Tables and the figure


def spread(values, digits=2) -> str:
    values = np.asarray(values)
    values = values[~np.isnan(values)]  # of rollouts with long wrong answers and short ones
    if len(values) == 0:
        return "none long"
    return f"{values.mean():.{digits}f} ({values.min():.{digits}f} to {values.max():.{digits}f})"


def with_error(pair, digits=4) -> str:
    return f"{pair[0]:.{digits}f} ± {pair[1]:.{digits}f}"


def loss_table(first: dict) -> list:
    table = [
        "1: first step | reduction | weights | loss: mean (range) | "
        "largest error of the prediction | gradient norm: mean (range)"
    ]
    for name, rollouts in first.items():
        for reduction, cap in rollouts[0]:
            loss, predicted, norm = np.array([r[reduction, cap] for r in rollouts]).T
            error = f"{np.abs(loss - predicted).max():.0e}"
            weight = f"cap {cap:g}" if cap else "none"
            table.append([name, reduction, weight, spread(loss, 4), error, spread(norm)])
    return table


def angle_table(turned: dict) -> list:
    names = ["2: angle in degrees, length / exact", "rollouts"]
    for size, ranks in SPLITS:
        plural = "s" if ranks > 1 else ""
        names.append(f"{size} a micro-batch, {ranks} rank{plural}")
    table = [" | ".join(names)]
    for name, rollouts in turned.items():
        row = [name, len(rollouts)]
        for split in SPLITS:
            angle, length = np.mean([r[split] for r in rollouts], 0)
            row.append(f"{angle:.1f}, {length:.2f}")
        table.append(row)
    return table


def kl_table(kl: dict) -> list:
    table = [
        "3: gradient of | policy | KL, nats per completion | squared error of the mean ± s.e. | "
        "along the true one ± s.e. | noise per completion | without the exact gradient's"
    ]
    for r in kl_estimators.exact_gradients():
        if r["sampling"] == "on-policy" and r["name"] != "k1 in reward":
            errors = [f"{r['bias'] ** 2:.3f}", f"{r['along']:.3f}", f"{r['noise']:.1f}", ""]
            table.append([r["name"], f"enumerated toy, {r['distance']}", r["kl"], *errors])
    for name, (errors, value) in kl.items():
        for estimator, e in errors.items():
            row = [estimator, name, value, with_error(e["squared"], 3), with_error(e["along"], 3)]
            table.append([*row, f"{e['noise']:.1f}", f"{e['own_noise']:.1f}"])
    return table


def push_table(subjects: dict) -> list:
    table = [" | ".join(["4: push, long / short wrong answers: mean (range)", *REDUCTIONS])]
    for name, (subject, rollouts) in subjects.items():
        row = [name]
        for reduction in REDUCTIONS:
            row.append(spread([push_ratio(part, subject.cfg, reduction) for part in rollouts]))
        table.append(row)
    return table


def weight_table(importance: dict) -> list:
    table = [
        "5: trainer | tokens | mean abs(log ratio) ± s.e. | token weight: 0.1, 1, 99, 99.9 % | "
        "largest | over 2 | effective share | sequence weight: 1, 99 % | largest | effective share"
    ]
    for name, statistics in importance.items():
        token, sequence = statistics["token"], statistics["sequence"]
        table.append([
            name,
            statistics["n_tokens"],
            with_error(statistics["gap"], 5),
            ", ".join(f"{q:.3f}" for q in token["quantiles"]),
            f"{token['largest']:.3f}",
            f"{token['beyond']:.1e}",
            f"{token['effective_share']:.4f}",
            ", ".join(f"{q:.3f}" for q in sequence["quantiles"][1:3]),
            f"{sequence['largest']:.3f}",
            f"{sequence['effective_share']:.4f}",
        ])  # fmt: skip
    return table


def operator_tables(gaps: dict) -> list:
    to_both = ("gap to float32 ± s.e.", "to the engine ± s.e.")
    columns = {
        "probability": ("share of tokens", "gap of float32 and the engine"),
        "rounding": to_both,
        "trainer": (*to_both, "to one with a float32 head ± s.e."),
    }
    tables = []
    for kind, names in columns.items():
        header = [f"{state}: {name}" for state in gaps for name in names]
        table = [" | ".join([f"6: {kind}", *header])]
        for name in gaps["start"][kind]:
            row = [name]
            for state_gaps in gaps.values():
                for x in state_gaps[kind][name]:
                    row.append(x if isinstance(x, float) else with_error(x))
            table.append(row)
        tables.append(table)
    return tables


def draw(gaps: dict):
    """Left: the gap that each rounded operator makes. Right: that of the trainer's arithmetic."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 5.2), layout="constrained")
    wide = 0.8 / len(gaps)
    rounded = [*(f"only {name}" for name in OPERATORS), "all of these"]
    for i, (state, state_gaps) in enumerate(gaps.items()):
        style = dict(color=f"C{i}", capsize=2, error_kw=dict(lw=0.8), align="edge")
        pairs = [state_gaps["rounding"][name][0] for name in rounded]
        pairs.append(state_gaps["trainer"]["float32"][1])  # of the engine itself
        mean, error = np.array(pairs).T
        y = np.arange(len(mean)) + wide * i - 0.4
        left.barh(y, mean, 0.9 * wide, xerr=error, label=state, **style)
        for j, engine in enumerate(("the engine as it is", "with a float32 head")):
            mean, error = np.array([pairs[1 + j] for pairs in state_gaps["trainer"].values()]).T
            y = np.arange(len(mean)) + wide * (i + j / 2) - 0.4
            style.update(alpha=0.45 if j else 1, label=f"{state}, {engine}")
            right.barh(y, mean, 0.45 * wide, xerr=error, **style)
    left.set_yticks(range(len(OPERATORS) + 2), [*OPERATORS, "all of these", "the engine"])
    names = [name.replace(", ", ",\n") for name in CONFIGURATIONS]
    right.set_yticks(range(len(CONFIGURATIONS)), names)
    left.set(title="rounded to bfloat16: only this", xlabel="gap to the float32 model")
    right.set(title="arithmetic of the trainer", xlabel="gap to the engine")
    for axis in (left, right):
        axis.grid(axis="y", visible=False)
        axis.set_ylim(len(axis.get_yticks()) + 1.0, -0.6)
        axis.set_xlabel(
            f"{axis.get_xlabel()}: mean |log-probability difference| a token,\n"
            "nats; whiskers: ± 1 s.e. over completions"
        )
        axis.legend(loc="lower right", fontsize=8)
    return figure


def add_options(parser) -> None:
    parser.add_argument("model", help="FOLDER/model of real_model.py")
    parser.add_argument("checkpoints", nargs="+", help="step_... of a run of it")


def importance_of_all(subjects: dict) -> dict:
    """Part 5: the importance weights of each subject, for a trainer in either dtype."""
    importance = {}
    for name, (subject, rollouts) in subjects.items():
        for dtype in ("bfloat16", "float32"):
            cfg = dataclasses.replace(subject.cfg, dtype=dtype)
            # one rollout at a time: their groups have the same numbers
            logps = np.concatenate([logps_of(subject.policy, part, cfg) for part in rollouts[:2]])
            samples = sum(rollouts[:2], [])
            importance[f"{name}, {dtype}"] = importance_weights(logps, samples)
    return importance


def main() -> None:
    args = arguments(__doc__, add_options)
    args.jobs = 1
    n_prompts, steps, toy_steps = 16, 4, 10
    if args.quick:
        n_prompts, steps, toy_steps = 2, 1, 1
    n_angles = 4 * n_prompts  # samples

    cfg = configured(os.path.abspath(args.model))
    policies = {"start": cfg.model}
    for path in args.checkpoints:
        policies[f"{int(path.rstrip('/')[-6:])} steps"] = path
    near, end = list(policies)[1], list(policies)[-1]
    ends = {name: policies[name] for name in ("start", end)}
    samples = rollouts(policies, cfg, steps, n_prompts)
    float_head = rollouts(ends, cfg, 1, n_prompts, float_head=True)
    near_only = {near: policies[near]}
    kl_samples = rollouts(near_only, cfg, 1, n_prompts * 3 // 2, "float32")[near][0]
    toy = Run(num_prompts=n_prompts)
    toy_samples = [toy.rollout(step + 1) for step in range(steps)]
    reals = {name: Real(path, cfg) for name, path in policies.items()}

    first = {
        "bundled model, start, float32": [first_step(toy, part) for part in toy_samples],
        "SmolLM2, start, bfloat16": [first_step(reals["start"], p) for p in samples["start"]],
    }
    for results in itertools.chain(*first.values()):
        for loss, predicted, _ in results.values():
            assert abs(loss - predicted) < 1e-4, "the loss is not the predicted one"

    turned = {"bundled model, start": []}
    for i, part in enumerate(toy_samples):
        turned["bundled model, start"].append(angles(toy, part[:n_angles], i))
    for name in ("start", near):
        turned[f"SmolLM2, {name}"] = [angles(reals[name], samples[name][0][:n_angles], 0)]

    subjects = {"bundled model, start": (toy, toy_samples)}
    for name, by_step in samples.items():
        subjects[f"SmolLM2, {name}"] = reals[name], by_step
    push = push_table(subjects)

    # the bundled model, sampled in bfloat16
    special = toy.sampler.stop_ids, toy.sampler.pad_id
    low_cfg = dataclasses.replace(toy.cfg, dtype="bfloat16")
    toy.sampler = grpo.HFSampler(toy.model, *special, low_cfg)
    subjects["bundled model, start"] = toy, [toy.rollout(step + 1) for step in range(steps)]
    importance = importance_of_all(subjects)

    # the bundled model, trained for some steps
    toy.sampler = grpo.HFSampler(toy.model, *special, toy.cfg)
    for step in range(1, toy_steps + 1):
        toy.update(toy.rollout(step), step)
    toy.cfg = dataclasses.replace(toy.cfg, num_prompts=n_prompts * 3 // 2)
    gradients = {
        "bundled model, 10 steps": kl_gradients(toy.policy, toy.reference, toy.rollout(11)),
        f"SmolLM2, {near}": kl_gradients(reals[near].policy, reals["start"].policy, kl_samples),
    }
    kl = {name: (kl_errors(sketches), value) for name, (sketches, value) in gradients.items()}

    gaps = {}
    for name, path in ends.items():
        gaps[name] = operator_gaps(path, cfg, samples[name][0], float_head[name][0])
    tables = [loss_table(first), angle_table(turned), kl_table(kl), push, weight_table(importance)]
    save(args, "carry_over", draw(gaps), *tables, *operator_tables(gaps))


if __name__ == "__main__":
    main()
