"""Each patch of variants/ and each diff of REFERENCE applies to grpo.py, changes few lines, does
what it is for, and its runs resume to the bit."""

import importlib.util
import math
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

import extras
import grpo
from tests.common import (
    F64,
    GAP,
    HERE,
    flags_of,
    lines,
    metrics_of,
    on_ranks,
    random_samples,
    small_config,
    small_run,
    tiny_model,
    weights_of,
)

PATCHES = sorted(path.stem for path in Path(HERE, "variants").glob("*.patch"))
OWN_FLAGS = dict(moving_reference=["--move_every", "2"], dynamic_resampling=["--max_draws", "8"])
OPTIONS = dict(sequence_mask=dict(tis_cap=3.0), moving_reference=dict(beta=0.1, num_minibatches=1))


@pytest.fixture(autouse=True)
def without_pictures(monkeypatch):
    monkeypatch.setattr("tools.view.draw", str)  # they take longer than these runs


@pytest.fixture(scope="module")
def patched(tmp_path_factory):
    """patched(name) -> the folder of a copy of the trainer with the patch applied."""

    def copy(name):
        folder = tmp_path_factory.mktemp(name)
        for file in ("grpo.py", "reward.py"):
            shutil.copy(f"{HERE}/{file}", folder)
        (folder / "sample_data").symlink_to(f"{HERE}/sample_data")
        patch = f"{HERE}/variants/{name}.patch"
        subprocess.run(["git", "apply", patch], cwd=folder, check=True)
        return folder

    return copy


@pytest.fixture(autouse=True)
def first_copy_again():
    """Of grpo.py, for the tests that follow."""
    before = {name: sys.modules[name] for name in loaded_extras()} | dict(grpo=grpo)
    yield
    forget_extras()
    sys.modules.update(before)
    for name, module in before.items():
        if name != "grpo":
            setattr(extras, name.partition(".")[2], module)


def loaded_extras():
    """Those that call grpo.py."""
    modules = dict(sys.modules)
    return [name for name in modules if name[:7] == "extras." and hasattr(modules[name], "grpo")]


def forget_extras():
    for name in loaded_extras():
        del sys.modules[name]
        delattr(extras, name.partition(".")[2])


def module_of(folder):
    """The patched grpo.py, which is grpo from here on."""
    spec = importlib.util.spec_from_file_location("grpo", folder / "grpo.py")
    module = importlib.util.module_from_spec(spec)
    forget_extras()
    sys.modules["grpo"] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", PATCHES)
def test_a_patch_changes_few_lines(name):
    text = Path(HERE, "variants", f"{name}.patch").read_text()
    changed = [line for line in text.partition("\n@@")[2].split("\n") if line[:1] in ("+", "-")]
    added = [line for line in changed if line[0] == "+"]
    assert 0 < len(added) <= 25 and len(changed) <= (34 if name == "fsdp2" else 25)


@pytest.mark.slow
@pytest.mark.parametrize("name", PATCHES)
def test_runs_of_a_patch_resume_to_the_bit(name, patched, tmp_path):
    grpo = module_of(patched(name))
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    for out, more in ((whole, {}), (parts, dict(max_steps=2)), (parts, dict(resume=True))):
        cfg = small_config(out, **OPTIONS.get(name, {}) | more)
        assert grpo.main([*flags_of(cfg), *OWN_FLAGS.get(name, [])]) == 0
    assert metrics_of(whole) == metrics_of(parts)
    metrics = metrics_of(whole)
    if name == "moving_reference":  # at the end of a step the policy is the reference
        assert abs(metrics[0]["kl"]) < 1e-6 < metrics[1]["kl"]
        assert abs(metrics[2]["kl"]) < 1e-6 < metrics[3]["kl"]
    if name == "dynamic_resampling":
        groups = {}
        for row in lines(whole / "completions.jsonl"):
            key = (row["step"], row["group"])
            groups.setdefault(key, []).append(row["advantage"])
        assert len(groups) == 4 * 3
        assert all(any(advantages) for advantages in groups.values())


# ------------------------------------------------------------------------------------------------
# The diffs of "How to change it"


def changed_copy(folder, number):
    """A copy of the trainer with the diff applied. A hunk needs no line numbers: its old lines
    stand there once."""
    text = (
        Path(HERE, "docs/REFERENCE.md").read_text().split("```diff\n")[number].partition("```")[0]
    )
    source = Path(HERE, "grpo.py").read_text()
    for hunk in text.split("@@ ")[1:]:
        lines = hunk.splitlines(keepends=True)[1:]
        old = "".join(line[1:] or "\n" for line in lines if line[0] != "+")
        new = "".join(line[1:] or "\n" for line in lines if line[0] != "-")
        assert source.count(old) == 1, old
        source = source.replace(old, new)
    (folder / "grpo.py").write_text(source)
    return folder


DIFFS = dict(
    state=(1, {}),
    loss_term=(2, dict(num_minibatches=1, num_prompts=2)),
    prompts=(3, dict(reward="answer", max_completion_length=40, num_minibatches=1)),
    metric=(4, {}),
    sampler=(5, dict(max_sampler_gap=0.1)),
)


@pytest.mark.parametrize("name", DIFFS)
def test_the_diffs_of_the_reference_do_what_they_say_and_resume(name, tmp_path):
    number, options = DIFFS[name]
    if name == "loss_term":
        plain = small_run(tmp_path / "plain", **options | dict(max_steps=1))
    grpo = module_of(changed_copy(tmp_path, number))
    assert grpo.main(flags_of(small_config(tmp_path / "whole", **options))) == 0
    metrics = metrics_of(tmp_path / "whole")
    if name in ("state", "prompts"):  # they remember something
        for more in (dict(max_steps=2), dict(resume=True)):
            assert grpo.main(flags_of(small_config(tmp_path / "parts", **options | more))) == 0
        assert metrics == metrics_of(tmp_path / "parts")
    rows = lines(tmp_path / "whole" / "completions.jsonl")
    if name == "state":
        baseline = 0.0
        for m in metrics:
            baseline = 0.9 * baseline + 0.1 * m["reward"]
            for row in rows:
                if row["step"] == m["step"]:
                    assert row["advantage"] == pytest.approx(row["reward"] - baseline)
    if name == "loss_term":  # the loss of step 1 is larger by it
        first = [row for row in rows if row["step"] == 1]
        good = [row["tokens"]["logp"] for row in first if row["advantage"] > 0]
        term = -0.1 * sum(map(sum, good)) / sum(row["length"] for row in first)
        assert metrics[0]["loss"] - plain[0]["loss"] == pytest.approx(term, rel=0.01)
    if name == "prompts":
        solved = set()
        for step in range(1, 5):
            drawn = {row["prompt"]: row["reward"] for row in rows if row["step"] == step}
            assert len(solved) == 5 or not solved & set(drawn)
            solved |= {r["prompt"] for r in rows if r["step"] == step and r["reward"] == 1}
        assert solved
    if name == "metric":
        assert all(0 < m["unique"] <= 1 for m in metrics)
    if name == "sampler":
        assert all(1e-4 < m[GAP] < 0.1 for m in metrics)


def main_of(folder, *args):
    return module_of(Path(folder)).main(list(args))


def two_ranks_are_one_process(folder, parts, whole):
    """parts: made by two ranks, which resume it. whole: a run of one process."""
    for more in (dict(max_steps=2), dict(resume=True)):
        args = flags_of(small_config(parts, **more))
        done = on_ranks(2, "tests.test_variants.main_of", folder, *args)
        assert done.returncode == 0, done.stderr
    ours, expected = weights_of(parts / "step_000004"), weights_of(whole / "step_000004")
    assert torch.allclose(ours, expected, atol=1e-5)


@pytest.mark.slow
def test_fsdp2_on_two_ranks_is_the_run_of_one_process(patched, tmp_path):
    folder = patched("fsdp2")
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    small_run(whole)
    two_ranks_are_one_process(folder, parts, whole)


@pytest.mark.slow
def test_one_step_ahead(patched, tmp_path):
    """The weights have not changed before the samples of step 2 are drawn, and two ranks are one
    run, also after a resume."""
    folder = patched("one_step_ahead")
    whole, parts, still = tmp_path / "whole", tmp_path / "parts", tmp_path / "still"
    small_run(still, learning_rate=1e-30)
    assert main_of(folder, *flags_of(small_config(whole))) == 0
    two_ranks_are_one_process(folder, parts, whole)

    samples = [[], []]
    for out, rows in zip((whole, still), samples, strict=True):
        rows += [(row["step"], row["completion"]) for row in lines(out / "completions.jsonl")]
    n = 2 * 3 * 5
    assert samples[0][:n] == samples[1][:n]
    assert samples[0][n:] != samples[1][n:]
    assert all(m[GAP] < 1e-5 for m in metrics_of(whole))  # old_logps are as old


def loss_gradient(module, ratio, advantage, **options):
    """The gradient of the loss of one token by its log-probability."""
    old = torch.zeros(1, dtype=F64)
    logps = torch.full((1,), ratio, dtype=F64).log().requires_grad_()
    cfg = module.Config(beta=0, **options)
    advantages = torch.tensor([float(advantage)], dtype=F64)
    loss, _ = module.grpo_loss(logps, old, None, None, advantages, torch.ones(1), cfg, [1])
    return torch.autograd.grad(loss, logps)[0].item()


def test_rloo(patched):
    grpo = module_of(patched("rloo"))
    samples = []
    for reward in (3.0, 0.0, 1.0, 4.0):
        sample = grpo.Sample(0, None, torch.zeros(2).numpy(), torch.zeros(2).numpy())
        sample.reward = reward
        samples.append(sample)
    grpo.assign_advantages(samples, grpo.Config(num_generations=4))
    assert samples[0].advantages[0] == pytest.approx(3.0 - (0 + 1 + 4) / 3)


def test_process_reward(patched):
    """A loop over steps and tokens, in float64. Without lists it is GRPO."""
    module = module_of(patched("process_reward"))
    cfg = module.Config(num_generations=5)
    samples = random_samples(5, 5)
    rng = np.random.default_rng(0)
    ends = []  # of steps: sample, token, reward
    for i, s in enumerate(samples):
        s.rewards = dict(steps=0.0, answer=i % 2)
        s.reward = i % 2
        if i != 3:  # whose call failed
            steps = np.where(
                rng.random(len(s.sampled)) < 0.5, rng.normal(size=len(s.sampled)), math.nan
            )
            s.info["token_rewards"] = dict(steps=steps)
            s.reward += np.nansum(steps)
            ends += [(i, t, steps[t]) for t in np.flatnonzero(~np.isnan(steps))]
            if math.isnan(steps[-1]):
                ends.append((i, len(steps) - 1, 0))
            ends[-1] = (*ends[-1][:2], ends[-1][2] + i % 2)
        else:
            ends.append((i, len(s.sampled) - 1, 1))
    module.assign_advantages(samples, cfg)
    mean, std = (f([r for *_, r in ends]) for f in (statistics.mean, statistics.stdev))
    for i, s in enumerate(samples):
        for t, advantage in enumerate(s.advantages):
            later = [(r - mean) / (std + 1e-4) for j, end, r in ends if j == i and end >= t]
            assert advantage == pytest.approx(sum(later), abs=1e-12)
    for s in samples:
        s.info["token_rewards"] = {}
    module.assign_advantages(samples, cfg)
    found = [s.advantages.copy() for s in samples]
    grpo.assign_advantages(samples, cfg)
    for s, advantages in zip(samples, found, strict=True):
        assert advantages == pytest.approx(s.advantages, abs=1e-12)


def test_cispo(patched):
    grpo = module_of(patched("cispo"))
    assert loss_gradient(grpo, 8.0, 1.0, clip_high=4.0) == pytest.approx(-5.0)  # clipped, not cut
    assert loss_gradient(grpo, 2.0, -1.0, clip_high=4.0) == pytest.approx(2.0)


def test_sapo(patched):
    """The slope of the gate is tau-free at ratio 1, and r * 4 p (1 - p) elsewhere."""
    grpo = module_of(patched("sapo"))
    assert loss_gradient(grpo, 1.0, 1.0) == pytest.approx(-1.0)
    for ratio, advantage, tau in ((2.0, 1.0, 1.0), (0.5, -1.0, 1.05)):
        p = torch.sigmoid(torch.tensor(tau * (ratio - 1), dtype=F64)).item()
        expected = -advantage * ratio * 4 * p * (1 - p)
        assert loss_gradient(grpo, ratio, advantage) == pytest.approx(expected)


def test_sequence_mask(patched):
    """The weight of a completion is the product of its tokens' weights, 0 above the cap (TRL)."""
    grpo = module_of(patched("sequence_mask"))
    gaps = torch.tensor([0.5, 0.2, 0.9, 0.3, 0.0], dtype=F64)  # old - sampler
    logps = torch.zeros(5, dtype=F64, requires_grad=True)
    old, ones = logps.detach(), torch.ones(5, dtype=F64)
    cfg = grpo.Config(tis_cap=3.0)
    loss, _ = grpo.grpo_loss(logps, old, None, old - gaps, ones, ones, cfg, [2, 3])
    [gradient] = torch.autograd.grad(loss, logps)
    expected = [-math.exp(0.7)] * 2 + [0.0] * 3  # exp(1.2) > 3
    assert gradient.tolist() == pytest.approx(expected)


def test_token_mask(patched):
    """A loop over tokens: what is left in has the ratio and the sampler's weight, and no clip."""
    grpo = module_of(patched("token_mask"))
    rng = np.random.default_rng(0)
    values = [rng.uniform(-3, 0, 200) for _ in range(3)]  # by the policy, before, by the sampler
    now, old, drawn = map(torch.from_numpy, values)
    now.requires_grad_()
    advantages, ones = torch.from_numpy(rng.normal(size=200)), torch.ones(200, dtype=F64)
    cfg = grpo.Config(mask_above=0.3, tis_cap=2.0)
    loss, stats = grpo.grpo_loss(now, old, None, drawn, advantages, ones, cfg, [200])
    [gradient] = torch.autograd.grad(loss, now)
    n_masked = 0
    for t, (logp, old_logp, sampler_logp) in enumerate(zip(*values, strict=True)):
        expected = -advantages[t].item() * math.exp(logp - old_logp)
        expected *= min(math.exp(old_logp - sampler_logp), 2.0)
        if abs(math.exp(logp) - math.exp(sampler_logp)) > 0.3:
            expected = 0.0
            n_masked += 1
        assert gradient[t].item() == pytest.approx(expected, rel=1e-12)
    assert 20 < n_masked < 180 and stats["clip_ratio/region_mean"] == n_masked


def test_entropy_bonus(patched):
    """A step along the bonus raises the entropy."""
    grpo = module_of(patched("entropy_bonus"))
    policy = grpo.Policy(tiny_model(), 1.0)
    samples = []
    for s in random_samples(6, 3):
        samples.append(grpo.Sample(s.group, s.prompt, s.completion_ids, s.sampler_logps))
    cfg = grpo.Config(entropy_bonus=1.0, max_sampler_gap=1e9, micro_batch_tokens=40)
    optimizer = torch.optim.SGD(policy.parameters(), 0.0)
    optimizer.param_groups[0]["lr"] = 0.0
    cfg.learning_rate = 1e-2
    entropies = []
    for step in (1, 2, 3):  # advantages are 0: there is nothing but the bonus
        metrics = grpo.update(policy, policy, optimizer, samples, step, cfg)
        entropies.append(metrics["entropy"])
    assert entropies[0] < entropies[1] < entropies[2]


def test_gdpo(patched):
    """As TRL's "normalize_then_sum", whose formula this is, and what is equal in all rewards is
    exactly 0."""
    grpo = module_of(patched("gdpo"))
    names, weights = ("exact", "length", "format"), (1.0, 0.2, -0.5)
    values = np.random.default_rng(0).normal(0, (1, 100, 1), (8, 3))
    values[4:] = (0.1, 30.0, 0.7)  # the second group: all alike
    values[2, 1] = math.nan  # does not apply
    samples = []
    for i, row in enumerate(values):
        samples.append(grpo.Sample(i // 4, None, np.zeros(2), np.zeros(2)))
        samples[-1].rewards = dict(zip(names, row, strict=True))
        samples[-1].reward = 1.0
    state = dict(weights=dict(zip(names, weights, strict=True)))
    grpo.assign_advantages(samples, grpo.Config(num_generations=4), state)
    sums = []
    for group in (values[:4], values[4:]):
        std = np.nanstd(group, 0, ddof=1) + 1e-4
        apart = (group - np.nanmean(group, 0)) / std * weights
        sums += np.nansum(apart, 1).tolist()
    expected = (np.array(sums) - np.mean(sums)) / (np.std(sums, ddof=1) + 1e-4)
    assert [s.advantages[0] for s in samples] == pytest.approx(expected, abs=1e-12)
    assert all(s.advantages.any() == (s.group == 0) for s in samples)


def float64_logps(folder, s):
    """[T]: the log-probabilities of a completion, by the plain model of a checkpoint."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).double()
    ids = torch.from_numpy(np.append(s.prompt.ids, s.completion_ids))
    logps = model(ids[None]).logits[0, :-1].log_softmax(-1)
    return logps.gather(1, ids[1:, None])[len(s.prompt.ids) - 1 :, 0].detach().numpy()


def test_replay(patched, tmp_path, monkeypatch):
    """Step k learns from its own rollout and the one before, whose old_logps are those of the
    weights that drew it."""
    grpo = module_of(patched("replay"))
    update, learned_from = grpo.update, []

    def spy(policy, ddp, optimizer, samples, *rest):
        learned_from.append(samples)
        return update(policy, ddp, optimizer, samples, *rest)

    monkeypatch.setattr(grpo, "update", spy)
    cfg = small_config(tmp_path / "out", learning_rate=1e-2)
    assert grpo.main([*flags_of(cfg), "--replay", "2"]) == 0
    assert [len(samples) for samples in learned_from] == [15, 30, 30, 30]
    for step, samples in enumerate(learned_from, 1):
        for i, s in enumerate(samples[-30:]):
            drawn = step - 1 if i < len(samples) - 15 else step
            same = learned_from[drawn - 1][i % 15 - 15]
            assert (s.completion_ids == same.completion_ids).all() and s.reward == same.reward
            assert (s.advantages == same.advantages).all()
    for i, weights in ((0, 2), (15, 3)):  # of step 4
        s = learned_from[3][i]
        expected = float64_logps(tmp_path / f"out/step_{weights:06d}", s)
        assert s.old_logps == pytest.approx(expected, abs=1e-5)


def test_critic(patched):
    """Advantages by the sum that defines GAE, and the gradient of 0.5 (V - return)^2 by hand."""
    grpo = module_of(patched("critic"))
    policy = grpo.Policy(tiny_model(), 1.0)
    cfg = grpo.Config(max_sampler_gap=1e9, micro_batch_tokens=40)
    torch.nn.init.normal_(policy.critic)
    samples = []
    for i, s in enumerate(random_samples(8, 4)):
        samples.append(grpo.Sample(s.group, s.prompt, s.completion_ids, s.sampler_logps))
        samples[-1].reward = i / 8
    grpo.add_logps("values", policy, samples, cfg)
    grpo.assign_advantages(samples, cfg)
    grpo.accumulate_gradient(policy, policy, samples, cfg)
    n_tokens = sum(len(s.completion_ids) for s in samples)
    expected = torch.zeros_like(policy.critic)
    for s in samples:
        ids = torch.from_numpy(np.append(s.prompt.ids, s.completion_ids))
        body = policy.model.base_model
        hidden = body(ids[None]).last_hidden_state[0, len(s.prompt.ids) - 1 : -1].detach()
        v = (hidden.double() @ policy.critic.double()).tolist()
        delta = [after - now for now, after in zip(v, [*v[1:], s.reward], strict=True)]
        for t in range(len(v)):
            gae = sum(0.95**later * d for later, d in enumerate(delta[t:]))
            assert s.advantages[t] == pytest.approx(gae, abs=1e-5)
            expected -= gae * hidden[t] / n_tokens
    assert torch.allclose(policy.critic.grad, expected, rtol=1e-4, atol=1e-5)
