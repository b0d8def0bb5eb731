"""The algorithm's own tests, to be read after grpo.py, in its order. They begin with GRPO again,
slow and plain: sample after sample and token after token, in float64, without batches, packing or
ranks. The trainer's loop must do the same, with each option. All other numbers are checked against
an enumeration of all sequences, or against formulas. tests/test_update.py has the cases in which
something is missing or broken. A CPU is enough for all.
"""

import functools
import itertools
import math
import statistics
import textwrap
import types
from collections import Counter

import numpy as np
import pytest
import torch
import transformers
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

import grpo
from extras import fast, packed
from grpo import Config, Prompt, Sample, group_advantages, grpo_loss, kl_estimate
from reward import RewardFunction
from tests.common import (
    F64,
    GAP,
    REDUCTIONS,
    fake_run,
    on_ranks,
    random_samples,
    relative,
    tiny_model,
    update_gradient,
)

SCALES = ("group", "batch", "none")
ESTIMATORS = ("k1", "k2", "k3", "k4", "wk3")
STOP = [1, 2, 3, 4, 5]  # tokens that end a completion


def gradient(value, x):
    return torch.autograd.grad(value, x)[0]


# ------------------------------------------------------------------------------------------------
# GRPO once more


def naive_run(model, reference, prompts, cfg, method):
    """Trains the model. Returns the metrics of each step. method: what another algorithm does to
    advantages and trainable; None: nothing."""
    metrics = []
    for step in range(1, cfg.max_steps + 1):
        samples = []
        for group, prompt in enumerate(naive_prompts(prompts, step, cfg)):
            for i in range(cfg.num_generations):
                seed = (naive_seed(cfg, 0, step, group), i)
                ids, logps = naive_sample(model, prompt, seed, cfg.temperature, cfg)
                s = Sample(group, prompt, ids, said_by_the_sampler(ids, logps), old_logps=logps)
                s.ref_logps = naive_logps(reference, s, cfg)[0].detach().numpy()
                s.finish_reason = "stop" if ids[-1] in STOP else "length"
                s.sampled = written_by_the_policy(ids)
                s.reward = naive_reward(s, cfg)
                samples.append(s)
        naive_advantages(samples, cfg)
        if method is not None:
            method(samples)
        metrics.append(naive_metrics(samples) | naive_update(model, samples, step, cfg))
    return metrics


def naive_prompts(prompts, step, cfg):
    """In each pass over the data an order of its own."""
    orders = [
        np.random.default_rng((cfg.seed, 0, 0, n)).permutation(len(prompts)) for n in range(9)
    ]
    numbers = np.concatenate(orders)[(step - 1) * cfg.num_prompts :][: cfg.num_prompts]
    return [prompts[i] for i in numbers]


def naive_seed(cfg, stream, step, group):
    """The stream is 0 in training and 1 in an eval."""
    sequence = np.random.SeedSequence((cfg.seed, stream, step, group))
    return int(sequence.generate_state(1, np.uint64)[0] >> 2)


@torch.no_grad()
def naive_sample(model, prompt, seed, temperature, cfg):
    """Each token is the first at which the cumulative probability exceeds a random number. With
    temperature 0 it is the likeliest."""
    randoms = np.random.default_rng(seed).random(cfg.max_completion_length)
    ids = []
    logps = []
    while len(ids) < cfg.max_completion_length and not set(ids) & set(STOP):
        logits = model(torch.tensor([[*prompt.ids, *ids]]), use_cache=False).logits[0, -1]  # [V]
        logp = (logits / (temperature or 1.0)).log_softmax(-1)
        token = logp.argmax()
        if temperature > 0:
            token = (logp.exp().cumsum(0) <= randoms[len(ids)]).sum()
        ids.append(int(token))
        logps.append(logp[token].item())
    return np.array(ids), np.array(logps)


def naive_logps(model, s, cfg):
    """The log-probability of each token of the completion, and the entropy there, [T] both."""
    ids = torch.tensor([*s.prompt.ids, *s.completion_ids])
    logits = model(ids[None]).logits[0, len(s.prompt.ids) - 1 : -1]  # [T, V]
    table = (logits / cfg.temperature).log_softmax(-1)
    return table[range(len(table)), s.completion_ids], -(table.exp() * table).sum(-1)


def naive_reward(s, cfg):
    text = " ".join(str(i) for i in s.completion_ids if i not in STOP)
    total = math.nan
    for reward in REWARDS:
        try:
            value = reward.function(text, s.prompt.row)
        except ValueError:
            value = 0.0
        if value is not None:
            total = reward.weight * value + (0.0 if math.isnan(total) else total)
    if s.finish_reason == "length" and cfg.non_stop_reward is not None and not math.isnan(total):
        total = cfg.non_stop_reward
    return total


def naive_advantages(samples, cfg):
    """Each reward against the mean of its group."""
    everything = [s.reward for s in samples if not math.isnan(s.reward)]
    for s in samples:
        group = [other.reward for other in samples if other.group == s.group]
        group = [reward for reward in group if not math.isnan(reward)]
        if math.isnan(s.reward) or (cfg.mask_truncated and s.finish_reason == "length"):
            s.trainable[:] = False
        if not math.isnan(s.reward):
            s.advantages[:] = s.reward - statistics.mean(group)
        if cfg.scale_rewards != "none":
            scaled_by = group if cfg.scale_rewards == "group" else everything
            s.advantages /= (statistics.stdev(scaled_by) if len(scaled_by) > 1 else 0.0) + 1e-4


def naive_loss(model, minibatch, cfg):
    """The loss of an optimizer step, and sums for the log."""
    in_loss = [s.loss_mask for s in minibatch]
    n_tokens = sum(int(mask.sum()) for mask in in_loss)
    n_sequences = sum(bool(mask.any()) for mask in in_loss)
    total = 0.0
    sums = Counter()
    for s, mask in zip(minibatch, in_loss, strict=True):
        if cfg.beta == 0 and not s.advantages[mask].any():
            continue  # it teaches nothing, and its tokens are not in the log
        logps, entropy = naive_logps(model, s, cfg)
        ref, sampler = torch.tensor(np.array([s.ref_logps, s.sampler_logps]))
        old = logps.detach() if s.old_logps is None else torch.tensor(s.old_logps)
        written = np.flatnonzero(s.sampled)
        of_sequence = (logps - old)[written].mean().detach()
        for t in written:
            sums["sampled_tokens"] += 1
            sums["sampler_gap"] += abs(old[t] - sampler[t]).item()
            if not mask[t]:
                continue
            A = s.advantages[t]
            if cfg.beta > 0 and cfg.kl_in == "reward":
                A = A - cfg.beta * sum(old[u] - ref[u] for u in written if u >= t).item()
            ratio = torch.exp(logps[t] - old[t])
            if cfg.ratio_level == "sequence":  # GSPO-token, eq. 14: in value the sequence's ratio
                ratio = of_sequence.exp() * torch.exp(logps[t] - logps[t].detach())
            clipped = ratio.clamp(1 - cfg.clip_low, 1 + cfg.clip_high)
            loss = -min(A * ratio, A * clipped)
            if cfg.tis_cap > 0:
                loss = loss * min(math.exp(old[t] - sampler[t]), cfg.tis_cap)
            if cfg.beta > 0 and cfg.kl_in == "loss":
                loss = loss + cfg.beta * naive_kl(logps[t], ref[t], old[t])[cfg.kl_estimator]
            share = {
                "token": 1 / n_tokens,
                "sequence": 1 / (n_sequences * int(mask.sum())),
                "constant": 1 / (n_sequences * cfg.max_completion_length),
            }
            total = total + share[cfg.loss_reduction] * loss
            sums["tokens"] += 1
            sums["entropy"] += entropy[t].item()
            sums["clip_ratio/region_mean"] += bool(A * clipped < A * ratio)
            if cfg.beta > 0:
                sums["kl"] += naive_kl(logps[t], ref[t], old[t])["k3"].item()
                sums["kl_k1"] += (logps[t] - ref[t]).item()
    return total, sums


def naive_kl(logp, ref, old):
    d = logp - ref
    w = (logp - old).exp()
    k3 = (-d).exp() - 1 + d
    return dict(k1=d, k2=d**2 / 2, k3=k3, k4=w * d, wk3=w * k3)


def naive_update(model, samples, step, cfg):
    """Gradient descent: weights - learning rate * gradient. (What an optimizer makes of a gradient
    is not ours to test. After Adam one could not see whether the gradient has the right size.)"""
    parameters = list(model.parameters())
    losses, norms = [], []
    sums = Counter()
    for epoch in range(cfg.num_epochs):
        order = np.random.default_rng((cfg.seed, 4, step, epoch)).permutation(len(samples))
        for part in np.array_split(order, cfg.num_minibatches):
            index = (step - 1) * cfg.num_epochs * cfg.num_minibatches + len(losses)
            rate = naive_learning_rate(index, cfg)
            loss, new_sums = naive_loss(model, [samples[i] for i in part], cfg)
            gradients = torch.autograd.grad(loss, parameters)
            losses.append(loss.item())
            norms.append(torch.cat([g.flatten() for g in gradients]).norm().item())
            factor = min(1, (cfg.max_grad_norm or math.inf) / (norms[-1] + 1e-6))
            for p, g in zip(parameters, gradients, strict=True):
                p.data -= rate * factor * g
            sums.update(new_sums)
    steps = sum(norm > 0 for norm in norms)  # not with every token clipped
    metrics = dict(learning_rate=rate, optimizer_steps=steps, skipped_steps=0)
    metrics |= dict(loss=statistics.mean(losses), grad_norm=statistics.mean(norms))
    for name in ("entropy", "clip_ratio/region_mean", *(("kl", "kl_k1") if cfg.beta > 0 else ())):
        metrics[name] = sums[name] / sums["tokens"]
    return metrics | {GAP: sums["sampler_gap"] / sums["sampled_tokens"]}


def naive_learning_rate(index, cfg):
    if index < cfg.warmup_steps:
        return cfg.learning_rate * (index + 1) / cfg.warmup_steps
    steps = cfg.max_steps * cfg.num_epochs * cfg.num_minibatches
    done = (index - cfg.warmup_steps) / (steps - cfg.warmup_steps)
    factors = dict(constant=1, linear=1 - done, cosine=0.5 + 0.5 * math.cos(math.pi * done))
    return cfg.learning_rate * factors[cfg.lr_schedule]


def naive_metrics(samples):
    rewards = [s.reward for s in samples if not math.isnan(s.reward)]
    lengths = [int(s.sampled.sum()) for s in samples]
    groups = {s.group for s in samples}
    learns = {s.group for s in samples if s.advantages[s.loss_mask].any()}
    return {
        "reward": statistics.mean(rewards),
        "reward_std": statistics.stdev(rewards),
        "frac_reward_zero_std": 1 - len(learns) / len(groups),
        "completions/mean_length": statistics.mean(lengths),
        "completions/clipped_ratio": sum(s.finish_reason == "length" for s in samples)
        / len(samples),
        "tokens": sum(len(s.prompt.ids) + len(s.completion_ids) for s in samples),
    }


# ------------------------------------------------------------------------------------------------
# The loop does the same. What both are given: rewards, a sampler that is off, an environment


def helps(completion, row):
    """For some completions an error, for some None: it does not apply."""
    ids = [int(i) for i in completion.split()]
    if row["kind"] == "equal":
        return 1.0
    if ids[:1] == [7]:
        raise ValueError("a call that fails is worth 0")
    return None if len(ids) in (1, 4) else float(sum(i % 2 for i in ids))


def short(completion, row):
    length = len(completion.split())
    return None if row["kind"] == "equal" or length == 1 else length / 4


REWARDS = [
    RewardFunction("helps", 2.0, helps, (), False),
    RewardFunction("short", -0.5, short, (), False),
]


def said_by_the_sampler(ids, logps):
    """Far from the trainer's. (Rounded, because transformers samples from float32.)"""
    return np.round(logps + 0.9 * np.sin(ids), 2)


def written_by_the_policy(ids):
    """An environment has written the second token of long completions."""
    return np.array([t != 1 or len(ids) < 5 for t in range(len(ids))])


class Sampler(grpo.HFSampler):
    def generate(self, *arguments):
        completions = super().generate(*arguments)
        for fields in completions:
            ids, logps = fields["completion_ids"], fields["sampler_logps"]
            fields |= dict(sampler_logps=said_by_the_sampler(ids, logps))
            fields |= dict(sampled=written_by_the_policy(ids))
        return completions


def by_token(samples):
    """As another algorithm may do: a credit for each token, and some out of the loss."""
    for s in samples:
        s.advantages[1::3] = 0.0
        s.advantages[::3] *= 2.0
        s.trainable[3::4] = False


def make_run(model, reference, prompts, cfg):
    """What the loop reads of a Run."""
    policy = grpo.Policy(model, cfg.temperature)

    def end_step(step, samples, metrics):
        run.step = step
        run.metrics.append(grpo.sample_metrics(samples) | metrics)

    run = fake_run(
        cfg,
        policy=policy,
        ddp=policy,
        optimizer=torch.optim.SGD(model.parameters()),
        reference=grpo.Policy(reference, cfg.temperature) if cfg.beta > 0 else None,
        train_prompts=prompts,
        sampler=Sampler(model, STOP, cfg),
        tokenizer=types.SimpleNamespace(decode=lambda ids: " ".join(map(str, ids))),
        reward_functions=REWARDS,
        state={},
        record_time=lambda phase: None,
        evaluate_if_due=lambda: None,
        files=types.SimpleNamespace(save_if_due=lambda run: None),
        should_stop=lambda: run.step == cfg.max_steps,
        metrics=[],
        end_step=end_step,
    )
    return run


def loop_run(model, reference, prompts, packed, cfg):
    """What naive_run returns, by the trainer's loop."""
    run = make_run(model, reference, prompts, cfg)
    if not packed:
        model.set_attn_implementation("sdpa")
    grpo.training_loop(run)
    return run.metrics


OFF_POLICY = dict(num_minibatches=2, num_epochs=2)
SEQUENCE = dict(ratio_level="sequence", clip_low=0.02, clip_high=0.03)
IN_REWARD = dict(kl_in="reward", kl_estimator="k1", beta=0.2)
CASES = {  # each option stands in one of them at least
    "default": dict(max_steps=2),
    "sequence": dict(loss_reduction="sequence", temperature=0.8, micro_batch_tokens=1),
    "constant": dict(loss_reduction="constant", scale_rewards="none", num_prompts=7),
    "minibatches": dict(num_minibatches=3, max_steps=2, lr_schedule="cosine", max_grad_norm=0.1),
    "epochs": dict(num_epochs=2, max_steps=2, lr_schedule="linear", warmup_steps=2),
    "off_policy": OFF_POLICY | dict(tis_cap=0, micro_batch_tokens=10**6, clip_low=0.1, seed=2),
    "batch": OFF_POLICY | dict(scale_rewards="batch", beta=0.1, packed=False),
    "gspo": OFF_POLICY | SEQUENCE | dict(loss_reduction="sequence"),
    "truncated": dict(mask_truncated=True, loss_reduction="constant", packed=False),
    "cut_off": dict(non_stop_reward=-1.0, loss_reduction="sequence", seed=1),
    "in_reward": OFF_POLICY | IN_REWARD | dict(temperature=0.9),
    "in_reward_gspo": SEQUENCE | IN_REWARD | dict(num_epochs=2),
    "by_token": OFF_POLICY | SEQUENCE | dict(method=by_token),
    "by_token_sequence": dict(method=by_token, loss_reduction="sequence", beta=0.1),
}
CASES |= {name: dict(beta=0.3, kl_estimator=name, num_minibatches=2) for name in ESTIMATORS}


def make_prompts():
    rng = np.random.default_rng(3)
    prompts = []
    for length, kind in ((3, ""), (1, ""), (5, "equal"), (2, ""), (8, ""), (7, "")):
        prompts.append(Prompt(rng.integers(6, 32, length), "", dict(kind=kind)))
    prompts[3].ids = prompts[0].ids  # two rows may have the same prompt
    return prompts


@pytest.mark.parametrize("case", CASES)
def test_the_loop_is_the_naive_one(case, monkeypatch):
    """Its weights are the same, and the metrics of each step."""
    options = dict(num_prompts=4, num_generations=3, max_completion_length=6, max_steps=1)
    options |= dict(learning_rate=0.3, max_grad_norm=0, micro_batch_tokens=40, max_sampler_gap=9)
    options |= dict(packed=True, method=None, reference="another model") | CASES[case]
    packed, method = options.pop("packed"), options.pop("method")
    cfg = Config(**options)
    if method is not None:
        assign = grpo.assign_advantages
        monkeypatch.setattr(grpo, "assign_advantages", lambda s, *_: (assign(s, cfg), method(s)))
    start, naive, model, reference = (
        tiny_model(dtype=F64, seed=seed, n_layer=1) for seed in (0, 0, 0, 1)
    )
    expected = naive_run(naive, reference, make_prompts(), cfg, method)
    found = loop_run(model, reference, make_prompts(), packed, cfg)
    for ours, theirs in zip(found, expected, strict=True):
        ours = {name: ours[name] for name in theirs}
        assert ours == pytest.approx(theirs, rel=1e-9, abs=1e-12)
    change, expected_change = (weights_of(m) - weights_of(start) for m in (model, naive))
    assert relative(change, expected_change) < 1e-9 and expected_change.norm() > 0.01


def weights_of(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def test_an_eval_is_the_naive_one():
    """Greedy, and k samples of each prompt: right is a reward above 0.5."""

    def right(completion, row):
        return None if row["kind"] == "equal" else len(completion) % 7 / 6

    model = tiny_model(dtype=F64)
    cfg = Config(max_completion_length=6, eval_samples=3, temperature=0.9, dtype="float32")
    run = make_run(model, model, make_prompts(), cfg)
    run.eval_prompts = run.train_prompts
    run.step = 7
    run.sampler = grpo.HFSampler(model, STOP, cfg)
    run.reward_functions = [RewardFunction("right", 1.0, right, (), False), *REWARDS]

    def values(n, temperature):  # [prompts, n]
        table = []
        for group, prompt in enumerate(run.eval_prompts):
            seeds = [(naive_seed(cfg, 1, 7, group), i) for i in range(n)]
            ids = [naive_sample(model, prompt, seed, temperature, cfg)[0] for seed in seeds]
            texts = [" ".join(str(i) for i in one if i not in STOP) for one in ids]
            table.append([right(text, prompt.row) for text in texts])
        return [row for row in table if None not in row]

    greedy = [value for [value] in values(1, 0.0)]
    sampled = [[value > 0.5 for value in row] for row in values(3, 0.9)]
    metrics = grpo.evaluate(run)
    assert metrics["eval_accuracy"] == pytest.approx(statistics.mean(greedy))
    assert metrics["eval_stderr"] == pytest.approx(statistics.stdev(greedy) / math.sqrt(5))
    assert metrics["eval_pass@1"] == pytest.approx(statistics.mean(itertools.chain(*sampled)))
    assert metrics["eval_pass@3"] == statistics.mean(max(row) for row in sampled)
    assert 0 < metrics["eval_pass@1"] < metrics["eval_pass@3"]


# ------------------------------------------------------------------------------------------------
# The step in the docstring


def test_the_ten_lines_of_the_docstring_are_the_default_step(monkeypatch):
    """They run in float64, with a sampler and a reward that give what the samples hold. update()
    has the same gradient."""
    start = grpo.__doc__.index("    groups = [[sample(")
    lines = textwrap.dedent(grpo.__doc__[start:].partition("\n\n")[0])
    assert lines.count("\n") == 9
    samples = random_samples(15, 5, np.float64)
    rng = np.random.default_rng(0)
    for s in samples:
        s.reward = float(rng.integers(0, 3))
        s.ref_logps = None
    cfg = Config(num_generations=5, max_grad_norm=0, tis_cap=0, micro_batch_tokens=60)
    grpo.assign_advantages(samples, cfg)
    expected, _ = update_gradient(cfg, samples, F64)

    model = tiny_model(dtype=F64)
    groups = [samples[i : i + 5] for i in range(0, 15, 5)]
    answers = iter([torch.tensor(s.completion_ids) for s in samples])
    rewards = iter([s.reward for s in samples])
    names = dict(
        torch=torch,
        prompts=[(torch.tensor(group[0].prompt.ids), group) for group in groups],
        model=lambda ids: model(ids[None]).logits[0],
        sample=lambda model, prompt: next(answers),
        decode=lambda answer: answer,
        reward=lambda answer, group: next(rewards),
        optimizer=torch.optim.SGD(model.parameters(), 0.0),
    )
    monkeypatch.setattr(torch, "tensor", functools.partial(torch.tensor, dtype=F64))
    exec(lines.replace("range(8)", "range(5)"), names)
    gradient = torch.cat([p.grad.flatten() for p in model.parameters()])
    assert relative(gradient, expected) < 1e-12 and expected.norm() > 1e-3


def test_the_numbers_of_the_docstring():
    """Those of its group, of the division by the standard deviation, and of the mean of others."""
    rewards = torch.tensor([1.0, 0.0, 0.0, 1.0], dtype=F64)
    advantages = group_advantages(rewards, 4)
    assert [f"{a:+.2f}" for a in advantages] == ["+0.87", "-0.87", "-0.87", "+0.87"]
    assert f"{rewards.std():.2f}" == "0.58"
    for right, factor in ((1, 2.8), (4, 1.9)):
        rewards = torch.tensor([1.0] * right + [0.0] * (8 - right), dtype=F64)
        factors = group_advantages(rewards, 8) / group_advantages(rewards, 8, "none")
        assert factors.tolist() == pytest.approx([factor] * 8, abs=0.05)
        of_others = (rewards.sum() - rewards) / 7
        assert torch.allclose(group_advantages(rewards, 8, "none"), 7 / 8 * (rewards - of_others))
    # The values of the loss add up to 0 in the first step, if the answers are equally long.
    samples = random_samples(4, 4)
    for s, advantage in zip(samples, advantages.tolist(), strict=True):
        s.completion_ids = np.resize(s.completion_ids, 5)
        ones = np.ones(5, bool)
        s.sampled, s.trainable, s.sampler_logps, s.ref_logps = ones, ones, np.zeros(5), None
        s.advantages = np.full(5, advantage)
    grad, metrics = update_gradient(Config(tis_cap=0, max_grad_norm=0), samples)
    assert abs(metrics["loss"]) < 1e-7 and grad.norm() > 0.1


# ------------------------------------------------------------------------------------------------
# Ranks and micro-batches: the gradient is the same


def naive_gradient(cfg, samples):
    """The gradient [P] and the loss."""
    model = tiny_model(dtype=F64)
    loss, _ = naive_loss(model, samples, cfg)
    grads = torch.autograd.grad(loss, list(model.parameters()))
    return torch.cat([g.flatten() for g in grads]), loss.item()


def case_of_ranks(reduction, n=16):
    """With so few samples, too, that some ranks have none."""
    cfg = Config(loss_reduction=reduction, beta=0.1, temperature=0.8, max_grad_norm=0)
    samples = random_samples(n, min(n, 5), np.float64)
    if reduction == "sequence":
        samples[3].trainable[:] = False
    return grpo.replace(cfg, micro_batch_tokens=40), samples


CASES_OF_RANKS = [*((reduction, 16) for reduction in REDUCTIONS), ("constant", 1), ("constant", 2)]


def exchange(exchanges, bucket):
    """What DDP does by default, counted."""
    exchanges.append(1)
    return allreduce_hook(None, bucket)


def gradients_of_ranks(out):
    """Runs on every rank. Rank 0 saves of each case the gradient [P], the loss, and how often
    gradients were exchanged."""
    grpo.join_ranks(Config(device="cpu"))
    results = []
    reference = grpo.Policy(tiny_model(dtype=F64, seed=1), 0.8)
    for case in CASES_OF_RANKS:
        cfg, samples = case_of_ranks(*case)
        # A form of the policy for each reduction: padded, packed, another head.
        policy = grpo.Policy(tiny_model(dtype=F64), 0.8)
        if cfg.loss_reduction != "token":
            policy = packed.PackedPolicy(policy.model, 0.8)
        if cfg.loss_reduction == "constant":
            policy = fast.FastPolicy(policy)
        grpo.add_logps("ref_logps", reference, samples, cfg)
        ddp = torch.nn.parallel.DistributedDataParallel(policy)
        exchanges = []
        ddp.register_comm_hook(exchanges, exchange)
        grad, metrics = update_gradient(cfg, samples, F64, policy, ddp)
        results.append((grad, metrics["loss"], len(exchanges)))
    if grpo.RANK == 0:
        torch.save(results, out)
    torch.distributed.barrier()


def test_the_gradient_of_ranks_is_the_naive_one(tmp_path):
    """Three, which do not divide the 16 samples."""
    done = on_ranks(3, "test_grpo.gradients_of_ranks", tmp_path / "out.pt")
    assert done.returncode == 0, done.stderr[-3000:]
    reference = tiny_model(dtype=F64, seed=1)
    results = torch.load(tmp_path / "out.pt")
    for case, (grad, loss, exchanges) in zip(CASES_OF_RANKS, results, strict=True):
        assert exchanges == 1  # in the last backward only
        cfg, samples = case_of_ranks(*case)
        for s in samples:
            s.ref_logps = naive_logps(reference, s, cfg)[0].detach().numpy()
        expected, expected_loss = naive_gradient(cfg, samples)
        assert relative(grad, expected) < 1e-12
        assert loss == pytest.approx(expected_loss, rel=1e-12)


@pytest.mark.parametrize("micro_batch_tokens", [1, 300, 10**6])
def test_no_mean_of_means(micro_batch_tokens):
    """100 tokens with a loss of 0.5 and 900 with 0.3 have a mean of 0.32, not 0.4."""
    samples = []
    for n, value in ((100, 0.5), (450, 0.3), (450, 0.3)):
        ids = np.resize([7, 8, 9], n)
        samples.append(Sample(0, Prompt(ids[:3], "", {}), ids, np.zeros(n)))
        samples[-1].advantages[:] = -value
    policy = grpo.Policy(tiny_model(), 1.0)
    cfg = Config(tis_cap=0, micro_batch_tokens=micro_batch_tokens)
    assert update_gradient(cfg, samples, policy=policy)[1]["loss"] == pytest.approx(0.32)


# ------------------------------------------------------------------------------------------------
# A step: sample, reward


def test_all_samples_are_drawn_by_random_numbers_of_their_own():
    """Those of a prompt, of the same prompt in another group, of another step, and of an eval."""
    asked = []

    def generate(prompts, seeds, temperature):
        asked.extend(seeds)
        return [dict(completion_ids=np.array([7]), sampler_logps=np.zeros(1)) for _ in prompts]

    cfg = Config(num_generations=3)
    model = tiny_model()
    run = make_run(model, None, make_prompts()[:1] * 2, cfg)
    run.sampler = types.SimpleNamespace(generate=generate, stop_ids=[7])
    for stream, step in ((grpo.SAMPLING, 1), (grpo.SAMPLING, 2), (grpo.EVAL, 1), (grpo.EVAL, 0)):
        grpo.rollout(run, run.train_prompts, stream, step, 3, 1.0)
    assert len(asked) == len(set(asked)) == 4 * 2 * 3

    # What vLLM is asked for: it draws by one number.
    params = []
    engine = types.SimpleNamespace(generate=lambda texts, given, **_: params.extend(given) or [])
    sampler = grpo.VLLMSampler.__new__(grpo.VLLMSampler)
    vars(sampler).update(llm=engine, SamplingParams=dict, stop_ids=[4, 9], cfg=cfg)
    prompt = Prompt(np.array([1]), "", {})
    sampler.generate([prompt] * len(asked), asked, 0.7, [3] * len(asked))
    assert len({p["seed"] for p in params}) == len(asked)
    for p in params:
        assert (p["temperature"], p["max_tokens"], p["stop_token_ids"]) == (0.7, 3, [4, 9])


def test_samples_follow_the_scored_distribution():
    """The sampler's log-probabilities are the policy's, and frequencies match them: temperature
    only, whatever else the model's generation config asks for."""
    model = tiny_model()
    options = dict(top_p=0.1, top_k=2, repetition_penalty=2.0, do_sample=True)
    model.generation_config = transformers.GenerationConfig(**options)
    sampler = grpo.HFSampler(model, [1], Config(max_completion_length=1))
    n = 4000
    prompt = Prompt(np.array([5, 6, 7]), "", {})
    completions = sampler.generate([prompt] * n, [(0, i) for i in range(n)], 0.7)
    completions = [(c["completion_ids"], c["sampler_logps"]) for c in completions]
    logps = (model(torch.tensor([[5, 6, 7]])).logits[0, -1] / 0.7).log_softmax(-1)
    counts = torch.bincount(torch.tensor([ids[0] for ids, _ in completions]), minlength=32)
    assert (counts / n - logps.exp()).abs().max() < 4 * 0.5 / n**0.5
    for ids, row in completions[:50]:
        assert row[0] == pytest.approx(logps[ids[0]].item(), abs=1e-5)


# ------------------------------------------------------------------------------------------------
# Advantages


def test_group_advantages():
    rewards = [1.0, 0.0, 0.0, 1.0, 3.0, 1.0, 1.0, 1.0]
    first = statistics.stdev(rewards[:4])
    for scale, stds in (("group", (first, 1.0)), ("batch", (statistics.stdev(rewards),) * 2)):
        centred = torch.tensor([0.5, -0.5, -0.5, 0.5, 1.5, -0.5, -0.5, -0.5])
        divisors = torch.tensor(stds).repeat_interleave(4) + 0.1
        found = group_advantages(torch.tensor(rewards), 4, scale, eps=0.1)
        assert torch.allclose(found, centred / divisors)
    assert torch.equal(group_advantages(torch.tensor(rewards), 4, "none"), centred)


@pytest.mark.parametrize("scale", SCALES)
def test_equal_rewards_give_exactly_zero(scale):
    rounding = [0.1 + 0.2, 0.3, 0.3]  # the first differs in its last bit, which is no signal
    # Two weighted rewards that are 0: the first is 5.6e-17.
    near_zero = [0.1 + 0.2 - 0.3, 0.0, 0.0]
    rewards = torch.tensor([*rounding, *near_zero, 0.1, 0.2, 0.7], dtype=F64)
    assert (group_advantages(rewards, 3, scale)[:6] == 0).all()
    assert (group_advantages(rewards, 3, scale)[6:] != 0).any()
    assert (group_advantages(torch.full((6,), 0.7), 3, scale) == 0).all()


@pytest.mark.parametrize("scale", SCALES)
def test_small_differences_are_a_signal_and_one_reward_is_none(scale):
    rewards = torch.tensor([1e6, 1e6 + 0.5, 1e6, 1e6 + 1.0], dtype=F64)
    assert (group_advantages(rewards, 4, scale) != 0).all()
    assert (group_advantages(rewards + 1e9, 4, scale) != 0).all()
    assert (group_advantages(torch.full((4,), 1e6 + 0.1, dtype=F64), 4, scale) == 0).all()
    for first in (1.0, math.nan):
        rewards = torch.tensor([first, math.nan, math.nan, math.nan])
        assert (group_advantages(rewards, 4, scale) == 0).all()


# ------------------------------------------------------------------------------------------------
# KL estimators: their expectations, by enumeration of all sequences

V = 4  # tokens of the vocabulary
LENGTH = 3  # tokens of a sequence: T
SEQUENCES = torch.tensor(list(itertools.product(range(V), repeat=LENGTH)))  # [V^T, T]


class Toy:
    """A policy over SEQUENCES. tables[t] [V^t, V] has a row of logits for each prefix of t tokens,
    so that it can be any distribution. Expectations are sums over all sequences."""

    def __init__(self, seed, scale, base=None):
        g = torch.Generator().manual_seed(seed)
        self.tables = []
        for t in range(LENGTH):
            table = torch.randn(V**t, V, generator=g, dtype=F64) * scale
            if base is not None:
                table = table + base.tables[t].detach()
            self.tables.append(table.requires_grad_())

    def conditionals(self):
        """For each position, log-probabilities of all tokens after each sequence's prefix:
        T x [V^T, V]."""
        conditionals = []
        row = torch.zeros(len(SEQUENCES), dtype=torch.long)  # the prefix in base V: 2, 0, 3 is 203
        for t, table in enumerate(self.tables):
            conditionals.append(table.log_softmax(-1)[row])
            row = row * V + SEQUENCES[:, t]
        return conditionals

    def logps(self):
        """Log-probabilities of the sequences' tokens: [V^T, T]."""
        table = torch.stack(self.conditionals(), 1)  # [V^T, T, V]
        return table.gather(2, SEQUENCES[:, :, None])[:, :, 0]

    def probabilities(self):
        """Whole sequences': [V^T]."""
        return self.logps().sum(1).exp()

    def grad(self, value):
        return torch.cat([g.flatten() for g in torch.autograd.grad(value, self.tables)])


def local_kl(policy, reference):
    """The exact KL of the distributions of the next token, at every position: [V^T, T]."""
    columns = []
    for p, q in zip(policy.conditionals(), reference.conditionals(), strict=True):
        columns.append((p.exp() * (p - q)).sum(1))
    return torch.stack(columns, 1)


@pytest.fixture(scope="module", params=[0.15, 0.6, 1.5], ids=["near", "mid", "far"])
def toy(request):
    """A policy, its reference, and an older policy that sampled."""
    reference = Toy(0, 1.0)
    policy = Toy(1, request.param, reference)
    older = Toy(2, 0.3, policy)
    return policy, reference, older


def test_kl_values_in_expectation(toy):
    policy, reference, _ = toy
    logps = policy.logps()
    ref = reference.logps()
    p = policy.probabilities()[:, None]
    exact = (p * local_kl(policy, reference)).sum(0)  # [T]: the expectation over prefixes
    for name in ("k1", "k3", "k4", "wk3"):
        expectation = (p * kl_estimate(logps, ref, logps, name)).sum(0)
        assert torch.allclose(expectation, exact, rtol=1e-12)


def expected_gradient(policy, reference, sampler, estimator):
    """The expectation, over sequences of `sampler`, of the gradient of the estimates' sum."""
    old = sampler.logps().detach()
    ref = reference.logps().detach()
    estimates = kl_estimate(policy.logps(), ref, old, estimator)
    return policy.grad((old.sum(1).exp()[:, None] * estimates).sum())


def exact_gradient(policy, reference, sampler):
    """The gradient of the exact KL at every position, prefixes weighted as `sampler` has them."""
    weight = sampler.probabilities().detach()[:, None]
    return policy.grad((weight * local_kl(policy, reference)).sum())


def test_kl_gradients_on_policy(toy, request):
    """The expected gradient of each estimator against that of the KL. k3 has the other KL's."""
    policy, reference, _ = toy
    exact = exact_gradient(policy, reference, policy)
    expected = {name: expected_gradient(policy, reference, policy, name) for name in ESTIMATORS}
    assert expected["k1"].norm() < 1e-12 * exact.norm() + 1e-14  # zero mean: nothing but noise
    for name in ("k2", "k4", "wk3"):
        assert relative(expected[name], exact) < 1e-12
    least_bias = {"near": 0.01, "mid": 0.1, "far": 0.3}[request.node.callspec.id]
    assert relative(expected["k3"], exact) > least_bias
    p = policy.probabilities().detach()[:, None]
    assert relative(expected["k3"], policy.grad((p * local_kl(reference, policy)).sum())) < 1e-12


def test_kl_gradients_off_policy(toy):
    """With samples of an older policy, only the weighted estimators have the gradient of the KL."""
    policy, reference, older = toy
    exact = exact_gradient(policy, reference, older)
    for name in ("k4", "wk3"):
        assert relative(expected_gradient(policy, reference, older, name), exact) < 1e-12
    for name in ("k1", "k2", "k3"):
        assert relative(expected_gradient(policy, reference, older, name), exact) > 1e-3


def test_kl_in_reward_has_the_gradient_of_the_sequence_kl(toy):
    """With --kl_in reward, the loss has the gradient of the KL of whole sequences. No KL term in
    the loss has it."""
    policy, reference, _ = toy
    ref = reference.logps().detach()
    sequence_kl = (policy.probabilities() * (policy.logps() - ref).sum(1)).sum()
    exact = policy.grad(sequence_kl)

    cfg = Config(beta=0.3, kl_in="reward", kl_estimator="k1")
    logps = policy.logps().flatten()  # [n]: all sequences, one behind the other
    weights = policy.probabilities().detach().repeat_interleave(LENGTH)
    tensors = (logps, logps.detach(), ref.flatten(), None, torch.zeros(len(logps)), weights)
    loss, _ = grpo_loss(*tensors, cfg, [LENGTH] * V**LENGTH)
    assert relative(policy.grad(loss), cfg.beta * exact) < 1e-12


def test_kl_survives_large_ratios():
    logps = torch.tensor([[-200.0, 0.0]], requires_grad=True)
    ref = torch.tensor([[0.0, -300.0]])
    for name in ESTIMATORS:
        value = kl_estimate(logps, ref, logps.detach(), name)
        assert value.isfinite().all()
        assert gradient(value.sum(), logps).isfinite().all()


@pytest.mark.parametrize("d", [-60.0, -25.0, -19.0, -18.0, -5.0, 0.0, 3.0, 40.0])
def test_the_slope_of_wk3_is_w_times_d_at_any_distance(d):
    """In float32 too, although exp(-d) swallows d from -18 on. (So with a teacher as the reference
    and beta 1 it is a policy gradient with the advantage log p_teacher - log p.) And k3 pulls
    towards the reference from any distance."""
    logps = torch.tensor([[-1.5]], requires_grad=True)
    ref = logps.detach() - d
    old = logps.detach() - 0.5
    slope = gradient(kl_estimate(logps, ref, old, "wk3"), logps).item()
    assert slope == pytest.approx(math.exp(0.5) * d, rel=1e-5, abs=1e-6)

    slope = gradient(kl_estimate(logps, ref, old, "k3"), logps).item()
    assert d == 0 or math.copysign(1, slope) == math.copysign(1, d)


# ------------------------------------------------------------------------------------------------
# The loss


def test_first_step_value_is_zero_and_gradient_is_not():
    """Four answers with the advantages +1, -1, -1, +1 and a reference everywhere 0.1 away."""
    lengths = [3, 1, 4, 6]
    of_samples = torch.tensor([1.0, -1.0, -1.0, 1.0], dtype=F64)
    T = torch.tensor(lengths)
    advantages = of_samples.repeat_interleave(T)
    logps = -torch.rand(14, generator=torch.Generator().manual_seed(0), dtype=F64) - 0.1
    logps.requires_grad_()
    old = logps.detach()
    for beta in (0.0, 0.5):
        cfg = Config(beta=beta, kl_estimator="k3")
        weights = (1 / (4 * T.double())).repeat_interleave(T)  # of --loss_reduction sequence
        loss, _ = grpo_loss(logps, old, old - 0.1, None, advantages, weights, cfg, lengths)
        k3 = math.exp(-0.1) - 1 + 0.1
        assert loss.item() == pytest.approx(beta * k3, abs=1e-12)
        assert gradient(loss, logps).norm() > 0.01

    # With the token reduction: minus the covariance of advantage and length, over the mean length.
    weights = torch.full_like(old, 1 / 14)
    loss, _ = grpo_loss(logps, old, None, None, advantages, weights, Config(), lengths)
    covariance = statistics.mean(a * t for a, t in zip([1, -1, -1, 1], lengths, strict=True))
    assert loss.item() == pytest.approx(-covariance / statistics.mean(lengths))
    # The ratio is 1, so the gradient is that of plain REINFORCE.
    assert torch.allclose(gradient(loss, logps), -advantages / 14)


@pytest.mark.parametrize("ratio, advantage, value, clip_acts", [
    (1.5, 1, -1.28, True), (0.5, 1, -0.5, False), (1.5, -1, 1.5, False), (0.5, -1, 0.8, True),
    (1.27, 1, -1.27, False), (0.81, -1, 0.81, False),
])  # fmt: skip
def test_clipping_is_asymmetric_and_sign_aware(ratio, advantage, value, clip_acts):
    logps = torch.tensor([math.log(ratio)], dtype=F64, requires_grad=True)
    old, one = torch.zeros(1, dtype=F64), torch.ones(1, dtype=F64)
    loss, stats = grpo_loss(logps, old, None, None, advantage * one, one, Config(), [1])
    assert loss.item() == pytest.approx(value)
    assert gradient(loss, logps).item() == pytest.approx(0.0 if clip_acts else value)
    assert stats["clip_ratio/region_mean"].item() == clip_acts


def test_importance_weights_keep_the_expected_gradient():
    """With samples of another distribution, such as a sampler's in bfloat16. The expectation is
    exact: a vocabulary of 6 is enumerated."""
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(6, generator=g, dtype=F64, requires_grad=True)
    sampler = (logits.detach() + 0.5 * torch.randn(6, generator=g, dtype=F64)).log_softmax(0)
    value = torch.randn(6, generator=g, dtype=F64)  # the advantage of each token
    exact = gradient(-(logits.softmax(0) * value).sum(), logits)

    def error(cap):
        logps = logits.log_softmax(0)  # [n = 6]: each token once
        tensors = (logps, logps.detach(), None, sampler, value, sampler.exp())
        loss, _ = grpo_loss(*tensors, Config(tis_cap=cap), [1] * 6)
        return relative(gradient(loss, logits), exact)

    assert error(1e9) < 1e-12
    assert error(0) > 0.05  # without weights the gradient points elsewhere
    assert error(2.0) < error(0)
