"""The algorithm's own tests, to be read after grpo.py: the step in the docstring, the gradient for
every split of the samples, advantages, KL estimators, the objective. A CPU is enough for all.

Most of them compare a result with the same quantity computed in another way: in one batch, by
enumeration of all sequences, or by a formula from a paper. tests/test_update.py tests the policy,
the sampler and the rest of an update.
"""

import dataclasses
import functools
import itertools
import math
import textwrap

import numpy as np
import pytest
import torch

import grpo
from extras import fast
from grpo import Config, group_advantages, kl_estimate
from tests.common import (
    F64,
    REDUCTIONS,
    grpo_loss,
    on_ranks,
    random_samples,
    relative,
    tiny_model,
    update_gradient,
)

TOLERANCE = {torch.float32: 1e-6, F64: 1e-12}
NUMPY_TYPE = {torch.float32: np.float32, F64: np.float64}
SCALES = ("group", "batch", "none")
ESTIMATORS = ("k1", "k2", "k3", "k4", "wk3")
OPTIONS = [{}, {"ratio_level": "sequence"}, {"kl_in": "reward", "kl_estimator": "k1"}]


def gradient(value, x):
    return torch.autograd.grad(value, x)[0]


# ------------------------------------------------------------------------------------------------
# The step in the docstring


def test_the_nine_lines_of_the_docstring_are_the_default_step(monkeypatch):
    """They are taken from the docstring and run in float64, with a sampler and a reward that give
    what the samples hold. update() has the same gradient."""
    start = grpo.__doc__.index("    for prompt, row in prompts")
    lines = textwrap.dedent(grpo.__doc__[start:].partition("\n\n")[0])
    assert lines.count("\n") == 8
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
    names = dict(
        torch=torch,
        prompts=[(torch.tensor(group[0].prompt.ids), group) for group in groups],
        model=lambda ids: model(ids[None]).logits[0],
        sample=lambda model, prompt: next(answers),
        decode=lambda answer: answer,
        reward=lambda answer, group: next(
            s.reward for s in group if s.completion_ids.tolist() == answer.tolist()
        ),
        n_tokens=sum(len(s.completion_ids) for s in samples),
        optimizer=torch.optim.SGD(model.parameters(), 0.0),
    )
    monkeypatch.setattr(torch, "tensor", functools.partial(torch.tensor, dtype=F64))
    exec(lines.replace("range(8)", "range(5)"), names)
    gradient = torch.cat([p.grad.flatten() for p in model.parameters()])
    assert relative(gradient, expected) < 1e-12 and expected.norm() > 1e-3


# ------------------------------------------------------------------------------------------------
# The gradient is the same for every split of the samples


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("dtype, tolerance", TOLERANCE.items())
def test_gradient_is_the_same_for_every_micro_batch_split(dtype, tolerance, reduction, options):
    cfg = Config(loss_reduction=reduction, beta=0.1, max_grad_norm=0, **options)
    samples = random_samples(15, 5, NUMPY_TYPE[dtype])
    in_one_batch = dataclasses.replace(cfg, micro_batch_tokens=10**6)
    whole, expected = update_gradient(in_one_batch, samples, dtype)
    assert whole.norm() > 1e-3

    for micro_batch_tokens in (1, 45, 100):  # one sample in a micro-batch; groups of 5 are cut
        split = dataclasses.replace(cfg, micro_batch_tokens=micro_batch_tokens)
        grad, metrics = update_gradient(split, samples, dtype)
        assert relative(grad, whole) < tolerance
        assert metrics["loss"] == pytest.approx(expected["loss"], rel=tolerance, abs=tolerance)
        assert metrics["kl"] == pytest.approx(expected["kl"], rel=1e-6)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("size", [1, 3, 7, 15])
def test_loss_of_the_parts_sums_to_the_whole(reduction, size):
    torch.manual_seed(0)
    N, T = 15, 9
    logps, old, ref, sampler = (torch.randn(4, N, T, dtype=F64) * 0.5 - 1).unbind()
    logps.requires_grad_()
    mask = torch.arange(T) < torch.randint(1, T + 1, (N, 1))
    advantages = torch.randn(N, dtype=F64)
    tensors = (logps, old, ref, sampler, advantages, mask)
    cfg = Config(loss_reduction=reduction, beta=0.2)
    n_tokens = int(mask.sum())
    whole, _ = grpo_loss(*tensors, cfg, n_tokens, N)
    whole_grad = gradient(whole, logps)

    total = 0.0
    grad = torch.zeros_like(whole_grad)
    for rows in torch.arange(N).split(size):
        loss, _ = grpo_loss(*[x[rows] for x in tensors], cfg, n_tokens, N)
        total += loss.item()
        grad += gradient(loss, logps)
    assert total == pytest.approx(whole.item(), rel=1e-12)
    assert relative(grad, whole_grad) < 1e-12


def test_no_mean_of_means():
    """100 tokens with a loss of 0.5 and 900 with 0.3 have a mean of 0.32, not 0.4, in two
    micro-batches as in one."""
    cfg = Config(beta=0.0)
    loss = 0.0
    for n, value in ((100, 0.5), (900, 0.3)):
        logps = torch.zeros(1, n)
        advantages = torch.tensor([-value])
        part, _ = grpo_loss(logps, logps, None, None, advantages, torch.ones(1, n), cfg, 1000, 2)
        loss += part.item()
    assert loss == pytest.approx(0.32)


OPTIONS_OF_RANKS = dict(beta=0.1, temperature=0.8, max_grad_norm=0)


def samples_of_ranks(dtype, reduction):
    samples = random_samples(15, 5, NUMPY_TYPE[dtype])
    if reduction == "sequence":
        samples[3].loss_mask[:] = False
    return samples


def gradients_of_ranks(out):
    """Runs on every rank. Rank 0 saves {name of a case: (gradient [P], loss)}: every dtype with
    every reduction, and steps with so few samples that some ranks have none."""
    grpo.join_ranks(Config(device="cpu"))
    results = {}
    for dtype, reduction in itertools.product(TOLERANCE, REDUCTIONS):
        # A form of the policy for each reduction: one row, rows of their own, another head.
        policy = grpo.Policy(tiny_model(dtype=dtype), 0.8)
        if reduction == "sequence":
            policy.model.set_attn_implementation("sdpa")
        if reduction == "constant":
            policy = fast.FastPolicy(policy, grpo.hidden_of)
        ddp = torch.nn.parallel.DistributedDataParallel(policy)
        cfg = Config(loss_reduction=reduction, micro_batch_tokens=40, **OPTIONS_OF_RANKS)
        samples = samples_of_ranks(dtype, reduction)
        grad, metrics = update_gradient(cfg, samples, dtype, policy, ddp)
        results[f"{dtype} {reduction}"] = (grad, metrics["loss"])
    for n in (1, 2):  # with the last policy and configuration of the loop
        grad, metrics = update_gradient(cfg, random_samples(n, n), F64, policy, ddp)
        results[f"{n} samples"] = (grad, metrics["loss"])
    if grpo.RANK == 0:
        torch.save(results, out)
    torch.distributed.barrier()


@pytest.fixture(scope="module", params=[2, 3])
def ranks(request, tmp_path_factory):
    """What gradients_of_ranks() saved, with 2 and with 3 ranks."""
    out = tmp_path_factory.mktemp("ranks") / "out.pt"
    done = on_ranks(request.param, "test_grpo.gradients_of_ranks", out)
    assert done.returncode == 0, done.stderr[-3000:]
    return torch.load(out)


def test_gradient_is_the_same_for_1_2_and_3_processes(ranks):
    for (dtype, tolerance), reduction in itertools.product(TOLERANCE.items(), REDUCTIONS):
        cfg = Config(loss_reduction=reduction, micro_batch_tokens=10**6, **OPTIONS_OF_RANKS)
        whole, expected = update_gradient(cfg, samples_of_ranks(dtype, reduction), dtype)
        grad, loss = ranks[f"{dtype} {reduction}"]
        assert relative(grad, whole) < tolerance
        assert loss == pytest.approx(expected["loss"], rel=tolerance, abs=tolerance)


def test_more_ranks_than_samples(ranks):
    cfg = Config(loss_reduction="constant", micro_batch_tokens=40, **OPTIONS_OF_RANKS)
    for n in (1, 2):
        whole, expected = update_gradient(cfg, random_samples(n, n), F64)
        grad, loss = ranks[f"{n} samples"]
        assert relative(grad, whole) < 1e-12
        assert loss == pytest.approx(expected["loss"], rel=1e-12)


# ------------------------------------------------------------------------------------------------
# Advantages


def test_group_advantages():
    rewards = torch.tensor([1.0, 0.0, 0.0, 1.0, 3.0, 1.0, 1.0, 1.0])
    scaled = group_advantages(rewards, 4)
    std = torch.tensor([1.0, 0.0, 0.0, 1.0]).std()  # ddof 1
    assert torch.allclose(scaled[:4], torch.tensor([0.5, -0.5, -0.5, 0.5]) / (std + 1e-4))

    centred = group_advantages(rewards, 4, "none")
    assert torch.allclose(centred[4:], torch.tensor([1.5, -0.5, -0.5, -0.5]))
    by_batch = group_advantages(rewards, 4, "batch")
    assert torch.allclose(by_batch, centred / (rewards.std() + 1e-4))
    assert group_advantages(rewards, 4, eps=1.0)[0] < scaled[0]


@pytest.mark.parametrize("scale", SCALES)
def test_equal_rewards_give_exactly_zero(scale):
    rounding = [0.1 + 0.2, 0.3, 0.3]  # the first differs in its last bit, which is no signal
    rewards = torch.tensor([*rounding, 0.1, 0.2, 0.7], dtype=F64)
    assert (group_advantages(rewards, 3, scale)[:3] == 0).all()
    assert (group_advantages(rewards, 3, scale)[3:] != 0).any()
    assert (group_advantages(torch.full((6,), 0.7), 3, scale) == 0).all()


def test_small_differences_of_large_rewards_are_a_signal():
    rewards = torch.tensor([1e6, 1e6 + 0.5, 1e6, 1e6 + 1.0], dtype=F64)
    equal = torch.full((4,), 1e6 + 0.1, dtype=F64)
    for scale in SCALES:
        assert (group_advantages(rewards, 4, scale) != 0).all()
        assert (group_advantages(rewards + 1e9, 4, scale) != 0).all()
        assert (group_advantages(equal, 4, scale) == 0).all()


def test_a_group_with_one_reward_or_none_gives_no_nan():
    one = torch.tensor([1.0, math.nan, math.nan, math.nan])
    none = torch.full((8,), math.nan)
    for scale in SCALES:
        assert (group_advantages(one, 4, scale) == 0).all()
        assert (group_advantages(none, 4, scale) == 0).all()


def test_an_excluded_reward_does_not_change_the_others():
    rewards = torch.tensor([1.0, math.nan, 0.0, 0.5])
    advantages = group_advantages(rewards, 4, "none")
    assert advantages[1] == 0
    assert torch.allclose(advantages[[0, 2, 3]], torch.tensor([0.5, -0.5, 0.0]))


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

    d = logps - ref
    assert torch.equal(kl_estimate(logps, ref, logps, "k2"), d**2 / 2)
    assert torch.allclose(kl_estimate(logps, ref, logps, "k3"), (-d).exp() - 1 + d, rtol=1e-9)


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

    kl = dict(beta=0.3, kl_in="reward", kl_estimator="k1")
    cfg = Config(loss_reduction="constant", max_completion_length=1, **kl)  # a plain sum
    logps = policy.logps()
    probabilities = policy.probabilities().detach()
    advantage = torch.zeros(1, dtype=F64)
    mask = torch.ones(1, LENGTH)
    total = 0.0
    assert len(logps) == V**LENGTH
    for i in range(V**LENGTH):  # a batch of one for each sequence
        row = logps[i : i + 1]
        old = row.detach()
        loss, _ = grpo_loss(row, old, ref[i : i + 1], None, advantage, mask, cfg, LENGTH, 1)
        total = total + probabilities[i] * loss
    assert relative(policy.grad(total), cfg.beta * exact) < 1e-12


def test_gradient_identity_of_wk3():
    logps, ref, old = torch.randn(3, 5, 7, dtype=F64).unbind()
    logps.requires_grad_()
    grad = gradient(kl_estimate(logps, ref, old, "wk3").sum(), logps)
    assert torch.allclose(grad, (logps - old).exp() * (logps - ref))  # d(w k3)/dlogp = w k1


def test_kl_survives_large_ratios():
    logps = torch.tensor([[-200.0, 0.0]], requires_grad=True)
    ref = torch.tensor([[0.0, -300.0]])
    for name in ESTIMATORS:
        value = kl_estimate(logps, ref, logps.detach(), name)
        assert value.isfinite().all()
        assert gradient(value.sum(), logps).isfinite().all()


@pytest.mark.parametrize("d", [-60.0, -25.0, -19.0, -18.0, -5.0, 0.0, 3.0, 40.0])
def test_the_slope_of_wk3_is_w_times_d_at_any_distance(d):
    """In float32 too, although exp(-d) swallows d from -18 on. And k3 pulls towards the reference
    from any distance."""
    logps = torch.tensor([[-1.5]], requires_grad=True)
    ref = logps.detach() - d
    old = logps.detach() - 0.5
    slope = gradient(kl_estimate(logps, ref, old, "wk3"), logps).item()
    assert slope == pytest.approx(math.exp(0.5) * d, rel=1e-5, abs=1e-6)

    slope = gradient(kl_estimate(logps, ref, old, "k3"), logps).item()
    assert d == 0 or math.copysign(1, slope) == math.copysign(1, d)
    if abs(d) < 19:
        assert slope == pytest.approx(1 - math.exp(-d), rel=1e-4, abs=1e-6)


# ------------------------------------------------------------------------------------------------
# The objective


def on_policy_batch():
    """Log-probabilities [N, T], mask [N, T] and advantages [N] of 12 completions in groups of 4."""
    N, T = 12, 8
    g = torch.Generator().manual_seed(0)
    logps = -torch.rand(N, T, generator=g, dtype=F64) - 0.1
    mask = torch.arange(T) < torch.randint(1, T + 1, (N, 1), generator=g)
    rewards = torch.randint(0, 2, (N,), generator=g).to(F64)
    return logps.requires_grad_(), mask, group_advantages(rewards, 4)


def test_first_step_value_is_zero_and_gradient_is_not():
    logps, mask, advantages = on_policy_batch()
    old = logps.detach()
    ref = old - 0.1
    n_tokens = int(mask.sum())
    for beta in (0.0, 0.5):
        cfg = Config(beta=beta, loss_reduction="sequence", kl_estimator="k3")
        loss, _ = grpo_loss(logps, old, ref, None, advantages, mask, cfg, n_tokens, 12)
        k3 = math.exp(-0.1) - 1 + 0.1
        assert loss.item() == pytest.approx(beta * k3, abs=1e-12)
        assert gradient(loss, logps).norm() > 0.01

    # With the token reduction: minus the covariance of advantage and length, over the mean length.
    cfg = Config(beta=0)
    loss, _ = grpo_loss(logps, old, None, None, advantages, mask, cfg, n_tokens, 12)
    lengths = mask.sum(1).double()
    covariance = ((lengths - lengths.mean()) * (advantages - advantages.mean())).mean()
    assert loss.item() == pytest.approx((-covariance / lengths.mean()).item())

    # The ratio is 1, so the gradient is that of plain REINFORCE.
    expected = torch.where(mask, -advantages[:, None] / n_tokens, 0.0)
    assert torch.allclose(gradient(loss, logps), expected)


@pytest.mark.parametrize("ratio, advantage, clip_acts", [
    (1.5, 1, True), (0.5, 1, False), (1.5, -1, False), (0.5, -1, True), (1.27, 1, False),
    (0.81, -1, False),
])  # fmt: skip
def test_clipping_is_asymmetric_and_sign_aware(ratio, advantage, clip_acts):
    cfg = Config(beta=0, clip_low=0.2, clip_high=0.28)
    logps = torch.tensor([[math.log(ratio)]], dtype=F64, requires_grad=True)
    old = torch.zeros(1, 1, dtype=F64)
    advantages = torch.tensor([float(advantage)])
    loss, stats = grpo_loss(logps, old, None, None, advantages, torch.ones(1, 1), cfg, 1, 1)
    assert (gradient(loss, logps).item() == 0) is clip_acts
    assert stats["clip_ratio/region_mean"].item() == clip_acts
    clipped = min(max(ratio, 0.8), 1.28)
    assert loss.item() == pytest.approx(-min(ratio * advantage, clipped * advantage))


def test_gspo_takes_the_geometric_mean_of_the_ratios():
    gspo = dict(ratio_level="sequence", loss_reduction="sequence", clip_low=1, clip_high=10)
    cfg = Config(beta=0, **gspo)
    logps, old = torch.randn(2, 3, 5, dtype=F64).unbind()
    logps.requires_grad_()
    mask = torch.arange(5) < torch.tensor([[5], [2], [3]])
    lengths = mask.sum(1)
    advantages = torch.tensor([1.0, -1.0, 0.5], dtype=F64)
    loss, _ = grpo_loss(logps, old, None, None, advantages, mask, cfg, 10, 3)
    ratio = ((logps - old) * mask).sum(1).div(lengths).exp()
    assert loss.item() == pytest.approx(-(ratio * advantages).mean().item())
    expected = torch.where(mask, -(ratio * advantages / 3 / lengths)[:, None], 0.0)
    assert torch.allclose(gradient(loss, logps), expected)

    # GSPO-token: a token's own advantage acts on this token, with the sequence's ratio as weight.
    of_tokens = torch.randn(3, 5, dtype=F64)
    loss, _ = grpo_loss(logps, old, None, None, of_tokens, mask, cfg, 10, 3)
    expected = torch.where(mask, -(ratio / 3 / lengths)[:, None] * of_tokens, 0.0)
    assert torch.allclose(gradient(loss, logps), expected)

    # At ratio 1 the level makes no difference, even if the KL is in the reward.
    for options in (dict(beta=0), dict(beta=0.5, kl_in="reward", kl_estimator="k1")):
        grads = []
        for level in ("token", "sequence"):
            cfg = Config(ratio_level=level, **options)
            loss, _ = grpo_loss(logps, logps.detach(), old, None, advantages, mask, cfg, 10, 3)
            grads.append(gradient(loss, logps))
        assert torch.allclose(*grads)


def test_truncated_importance_weights():
    logps = torch.tensor([[-1.0, -1.0, -1.0]], dtype=F64, requires_grad=True)
    old = logps.detach()
    sampler = torch.tensor([[-1.5, -1.0, -9.0]], dtype=F64)
    mask = torch.ones(1, 3)
    advantages = torch.tensor([1.0], dtype=F64)
    loss, _ = grpo_loss(logps, old, None, None, advantages, mask, Config(beta=0), 3, 1)
    plain = gradient(loss, logps)
    for cap, weights in ((2.0, [math.exp(0.5), 1, 2]), (1.2, [1.2, 1, 1.2]), (0.0, [1, 1, 1])):
        cfg = Config(beta=0, tis_cap=cap)
        loss, _ = grpo_loss(logps, old, None, sampler, advantages, mask, cfg, 3, 1)
        assert torch.allclose(gradient(loss, logps), plain * torch.tensor([weights], dtype=F64))


def test_importance_weights_keep_the_expected_gradient():
    """With samples of another distribution, such as a sampler's in bfloat16. The expectation is
    exact: a vocabulary of 6 is enumerated."""
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(6, generator=g, dtype=F64, requires_grad=True)
    sampler = (logits.detach() + 0.5 * torch.randn(6, generator=g, dtype=F64)).log_softmax(0)
    value = torch.randn(6, generator=g, dtype=F64)  # the advantage of each token
    exact = gradient(-(logits.softmax(0) * value).sum(), logits)

    def error(cap):
        logps = logits.log_softmax(0)[:, None]  # [N = 6, T = 1]: each token once
        weighted = value * sampler.exp()  # by how often the token is sampled
        mask = torch.ones(6, 1)
        cfg = Config(beta=0, tis_cap=cap)
        old = logps.detach()
        loss, _ = grpo_loss(logps, old, None, sampler[:, None], weighted, mask, cfg, 1, 6)
        return relative(gradient(loss, logits), exact)

    assert error(1e9) < 1e-12
    assert error(0) > 0.05  # without weights the gradient points elsewhere
    assert error(2.0) < error(0)


@pytest.mark.parametrize("rubbish", [math.nan, math.inf, -math.inf, 1e30])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_padding_may_hold_anything(reduction, options, rubbish):
    g = torch.Generator().manual_seed(0)
    tensors = [torch.randn(3, 6, generator=g, dtype=F64) - 1 for _ in range(4)]
    tensors.append(torch.randn(3, 6, generator=g, dtype=F64))  # advantages
    mask = torch.arange(6) < torch.tensor([[6], [2], [0]])
    cfg = Config(beta=0.1, loss_reduction=reduction, **options)

    def results(padding):
        filled = [torch.where(mask, x, padding) for x in tensors]
        logps = filled[0].requires_grad_()
        loss, stats = grpo_loss(*filled, mask, cfg, 8, 2)
        stats = {name: float(value) for name, value in stats.items()}
        return loss.item(), gradient(loss, logps), stats

    loss, grad, stats = results(rubbish)
    expected_loss, expected_grad, expected_stats = results(0.0)
    assert math.isfinite(expected_loss)
    assert loss == expected_loss
    assert torch.equal(grad, expected_grad)
    assert stats == expected_stats


def test_kl_goes_through_the_same_reduction():
    logps, old, ref = torch.randn(3, 4, 6, dtype=F64).unbind()
    mask = torch.arange(6) < torch.tensor([[6], [2], [1], [3]])
    kl = torch.where(mask, kl_estimate(logps, ref, old, "wk3"), 0.0)
    expected = {
        "token": kl.sum() / 12,
        "sequence": (kl.sum(1) / mask.sum(1)).sum() / 4,
        "constant": kl.sum() / (4 * 50),
    }
    advantages = torch.zeros(4, dtype=F64)
    for reduction, value in expected.items():
        cfg = Config(beta=0.7, loss_reduction=reduction, max_completion_length=50)
        loss, _ = grpo_loss(logps, old, ref, None, advantages, mask, cfg, 12, 4)
        assert loss.item() == pytest.approx(0.7 * value.item())


def test_a_token_out_of_the_loss_still_counts_in_its_sequence():
    """Such as one that an entropy mask leaves out: GSPO's ratio is the mean over all tokens that
    were sampled."""
    torch.manual_seed(0)
    logps, old = (torch.randn(2, 1, 4, dtype=F64) * 0.1).unbind()
    sampled = torch.tensor([[True, True, True, False]])
    mask = torch.tensor([[True, False, True, False]])
    advantages = torch.ones(1, dtype=F64)
    cfg = Config(ratio_level="sequence", beta=0, clip_low=1, clip_high=100)
    loss, stats = grpo_loss(logps, old, None, None, advantages, mask, cfg, 2, 1, sampled=sampled)
    ratio = (logps - old)[0, :3].mean().exp()
    assert loss.item() == pytest.approx(-ratio.item())
    assert stats["tokens"] == 2


def test_distillation_is_a_kl_to_a_teacher_without_a_reward():
    """--reference TEACHER --beta 1 with rewards of weight 0: the gradient is that of a policy
    gradient with the advantage log p_teacher - log p for each token."""
    torch.manual_seed(0)
    logps, teacher = (torch.randn(2, 4, 5, dtype=F64) - 1).unbind()
    logps.requires_grad_()
    old = logps.detach()
    mask = torch.arange(5) < torch.tensor([[5], [2], [3], [1]])
    nothing = torch.zeros(4, dtype=F64)
    distilled, _ = grpo_loss(logps, old, teacher, None, nothing, mask, Config(beta=1.0), 11, 4)
    advantages = (teacher - logps).detach()
    rewarded, _ = grpo_loss(logps, old, None, None, advantages, mask, Config(beta=0.0), 11, 4)
    assert torch.allclose(gradient(distilled, logps), gradient(rewarded, logps), rtol=1e-12)
