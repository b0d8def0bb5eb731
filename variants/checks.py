"""The checks of check.py, one for each variant: each runs the patched copy, then proves what its patch is for."""

import importlib.util
import json

import numpy as np
import torch
from safetensors.torch import load_file

ENGINE = "vllm" if importlib.util.find_spec("vllm") else "hf"
# a few tokens: probability before, after, advantage -> d(loss)/d(log-probability), clipped or masked tokens
OBJECTIVES = {
    "cispo": ([0.1, 0.2, 0.8], [0.8, 0.2, 0.04], [1, 1, -1], [-5, -1, 0.05], 1, "ratio 8 still learns, with weight 5"),
    "dual_clip": ([0.1, 0.1, 0.1], [0.8, 0.2, 0.8], [-1, -1, 1], [0, 2, 0], 2, "A < 0: ratio 8 is cut, 2 is not"),
    "dppo": ([0.001, 0.5, 0.9, 0.5], [0.01, 0.9, 0.5, 0.9], [1, 1, -1, -1], [-10, 0, 0, 1.8], 2,
             "0.001 to 0.01 is kept, 0.5 to 0.9 is masked, but not where it moves back"),
}  # fmt: skip


def near(found, expected, atol=1e-9) -> bool:
    found, expected = (torch.as_tensor(x, dtype=torch.float64) for x in (found, expected))
    return torch.allclose(found, expected.expand_as(found), rtol=0, atol=atol)


def check_objective(copy):
    copy.run(
        *"--num_epochs 2 --num_minibatches 2 --learning_rate 3e-3".split()
    )  # so that ratios leave 1
    before, after, advantages, gradient, clipped, shown = OBJECTIVES[copy.name]
    old, logps = (torch.tensor(p, dtype=torch.float64).log()[:, None] for p in (before, after))
    cfg, A = copy.config(beta=0.0, tis_cap=0.0), torch.tensor(advantages).double()
    everything = (logps.requires_grad_(), old, None, None, A, torch.ones_like(old), cfg, 1, len(A))
    loss, stats = copy.grpo.grpo_loss(*everything)
    loss.backward()
    assert near(logps.grad[:, 0], gradient) and stats["clip_ratio/region_mean"] == clipped, (
        logps.grad,
        stats,
    )
    return shown


check_cispo = check_dual_clip = check_dppo = check_objective


def check_rloo(copy):
    copy.run()
    rewards = torch.rand(3, 5, dtype=torch.float64)
    expected = [r - (sum(group) - r) / 4 for group in rewards.tolist() for r in group]
    assert near(copy.grpo.group_advantages(rewards.flatten(), 5, "loo"), expected)
    return "advantages are r minus the mean of the others"


def check_maxrl(copy):
    copy.run()
    rewards, scores = (
        torch.tensor([1.0, 0, 0, 1, 0, 0, 0, 0]).double(),
        torch.rand(4, dtype=torch.float64),
    )
    advantages = copy.grpo.group_advantages(rewards, 4, "mean")
    assert near(advantages[:4] @ scores / 4, scores[[0, 3]].mean() - scores.mean()) and near(
        advantages[4:], 0.0
    )
    return "mean score of the successes minus mean score of all; 0 without a success"


def check_entropy_bonus(copy):
    copy.run()
    grpo, policy, cfg = copy.grpo, copy.policy(), copy.config(entropy_coef=0.5, beta=0.0)
    completion = np.arange(8, 13), np.zeros(5)
    batch = grpo.collate(
        [grpo.Sample(0, grpo.Prompt(np.arange(5, 8), "", {}), *completion, "stop")],
        policy.model.device,
    )

    def bonus():
        logps, entropy = policy(batch)
        same = (
            logps,
            logps.detach(),
            None,
            None,
            torch.zeros(1),
            torch.ones_like(logps),
            cfg,
            5,
            1,
        )
        return grpo.grpo_loss(*same, entropy=entropy)[0], -0.5 * entropy.mean().item()

    loss, expected = bonus()
    assert near(loss.item(), expected), "the bonus does not go through the token reduction"
    loss.backward()
    square = sum(p.grad.square().sum().item() for p in policy.parameters())
    for p in policy.parameters():
        p.data -= 1e-6 * p.grad
    slope = (expected - bonus()[1]) / 1e-6
    assert square > 0 and abs(slope / square - 1) < 0.01, (
        f"slope {slope}, gradient squared {square}"
    )
    return "a step along the bonus raises the entropy by what its gradient says"


def check_moving_reference(copy):
    kl = [step["kl"] for step in copy.run("--ref_sync_every", 2, "--max_steps", 4)]
    assert max(kl[0], kl[2]) < 1e-9 < 1e-6 < min(kl[1], kl[3]), kl
    copy.run("--ref_sync_every", 2, "--max_steps", 3, out="again")
    again = copy.run("--ref_sync_every", 2, "--max_steps", 4, "--resume", out="again")
    assert again[-1]["kl"] == kl[3], "a resume loses the reference"
    return "KL 0 after each sync and only then; a resume is exact"


DRAWN = """
import json
import grpo

prompts_of_step = grpo.prompts_of_step
def noted(prompts, draw, cfg):
    with open("draws.jsonl", "a") as file:
        print(draw, file=file)
    return prompts_of_step(prompts, draw, cfg)
grpo.prompts_of_step = noted
grpo.main()
"""


def check_dynamic_resampling(copy):
    (copy.directory / "drawn.py").write_text(DRAWN)
    flags = ["--seed", 1, "--max_draws"]
    once, more = (copy.run("--max_steps", 3, *flags, n, out=f"out{n}") for n in (1, 8))
    empty = sum(step["frac_reward_zero_std"] for step in once) / 3
    assert empty > 0 and any(step["draws"] > 1 for step in more)
    assert all(step["frac_reward_zero_std"] == 0 for step in more)
    copy.run(*flags, 8, out="again", program="drawn.py")
    again = copy.run("--max_steps", 3, *flags, 8, "--resume", out="again", program="drawn.py")
    assert again[-1]["grad_norm"] == more[-1]["grad_norm"], "a resume draws other prompts"
    drawn = list(map(int, (copy.directory / "draws.jsonl").read_text().split()))
    assert drawn == [*range(1, sum(step["draws"] for step in more) + 1)], (
        f"prompts are left out: draws {drawn}"
    )
    return f"groups without a signal: {empty:.0%} before, none after; no prompt is left out, a resume is exact"


def check_dynamic_resampling_and_maxrl(copy):
    shown = check_dynamic_resampling(copy)
    lines = (copy.directory / "again" / "completions.jsonl").read_text().splitlines()
    for row in map(json.loads, lines):
        assert row["advantage"]
    return shown


def check_lora(copy):
    flags = ["--learning_rate", "3e-3", "--beta", 0]
    straight = copy.run(*flags, "--max_steps", 3, "--save_every", 2)
    (saved, state), base = (
        copy.saved(),
        load_file(copy.directory / "sample_data" / "model" / "model.safetensors"),
    )
    state, trained = state["adapters"], 0
    for name, weight in base.items():
        layer = name.removesuffix(".weight")
        if f"{layer}.lora_B.default.weight" in state:
            A, B = (state[f"{layer}.lora_{x}.default.weight"] for x in "AB")
            weight, trained = weight + 32 / 16 * (B @ A), trained + bool(B.any())
            assert near(saved[name], weight, 1e-6), f"{name} is not base plus adapter"
        else:
            assert torch.equal(saved[name], weight), f"{name} has changed"
    assert trained == 21 and saved.keys() == base.keys(), (trained, saved.keys() ^ base.keys())
    copy.run(*flags, out="again")
    again = copy.run(*flags, "--max_steps", 3, "--resume", out="again")
    assert again[-1]["grad_norm"] == straight[-1]["grad_norm"], "a resume is not exact"
    gap = max(step["sampler_gap"] for step in copy.run(*flags, "--rollout", ENGINE, out="engine"))
    assert gap < 1e-4, f"{ENGINE} samples from other weights: gap {gap}"
    return f"base unchanged, 21 adapters trained, checkpoint merged, a resume is exact, gap to {ENGINE} {gap:.0e}"


PROBE = """
import grpo

make_optimizer, made = grpo.make_optimizer, []
grpo.make_optimizer = lambda *arguments: made.append(make_optimizer(*arguments)) or made[0]
grpo.train(grpo.parse_args())
moments = [m for state in getattr(made[0], "optim", made[0]).state.values() for m in state.values()]
held = sum((m.to_local() if hasattr(m, "to_local") else m).numel() for m in moments)
everything = sum(2 * p.numel() for group in made[0].param_groups for p in group["params"])
assert 0 < held < 0.7 * everything, f"this rank holds {held} of {everything}"
"""


def check_zero1(copy):
    (copy.directory / "probe.py").write_text(PROBE)
    flags = ["--save_every", 2, "--keep", 0]
    straight = copy.run(*flags, "--max_steps", 4, ranks=2, program="probe.py")
    copy.run(*flags, ranks=2, program="plain.py", out="plain")
    (found, state), (expected, plain) = copy.saved(), copy.saved("plain")
    assert all(torch.equal(found[name], expected[name]) for name in expected), (
        "other weights than AdamW's"
    )
    moments = [
        (state["optimizer"]["state"][i], plain["optimizer"]["state"][i])
        for i in plain["optimizer"]["state"]
    ]
    assert all(torch.equal(mine["exp_avg_sq"], theirs["exp_avg_sq"]) for mine, theirs in moments)
    check_resume(copy, straight, flags)
    return "weights and gathered moments are AdamW's to the bit, a rank holds less than 70 %, resumed on 2 and 1 ranks"


def check_lora_and_zero1(copy):
    (copy.directory / "probe.py").write_text(PROBE)
    flags = ["--save_every", 2, "--keep", 0, "--learning_rate", "3e-3", "--beta", 0]
    straight = copy.run(*flags, "--max_steps", 4, ranks=2, program="probe.py")
    (saved, state), base = (
        copy.saved(),
        load_file(copy.directory / "sample_data" / "model" / "model.safetensors"),
    )
    assert saved.keys() == base.keys() and any(
        not torch.equal(saved[name], base[name]) for name in base
    )
    moments = [value["exp_avg"].shape for value in state["optimizer"]["state"].values()]
    assert moments == [adapter.shape for adapter in state["adapters"].values()], (
        "other moments than the adapters'"
    )
    check_resume(copy, straight, flags)
    return "merged, moments are the adapters' and saved whole, a rank holds less than 70 %, resumed on 2 and 1 ranks"


def check_resume(copy, straight, flags):
    """On the same ranks to the bit, then on one alone, and on both again, up to rounding."""
    copy.run(*flags, out="again", ranks=2)
    for step, ranks, error in ((3, 2, 0), (4, 1, 1e-3), (5, 2, 1e-3)):
        if step > len(straight):
            break
        again = copy.run(*flags, "--max_steps", step, "--resume", out="again", ranks=ranks)[-1][
            "grad_norm"
        ]
        change = abs(again / straight[step - 1]["grad_norm"] - 1)
        assert change <= error, f"resumed on {ranks} ranks it is another run, by {change:.0e}"


def check_fsdp2(copy):
    flags, held = (
        ["--save_every", 2, "--keep", 0, "--micro_batch_tokens", 200, "--num_minibatches", 2],
        {},
    )
    (copy.directory / "probe.py").write_text(PROBE)
    for out, program in (("out", "probe.py"), ("plain", "plain.py")):
        held[out] = copy.run(*flags, "--max_steps", 5, program=program, out=out, ranks=2)
    for ours, plain in zip(held["out"], held["plain"], strict=True):
        assert abs(ours["grad_norm"] / plain["grad_norm"] - 1) < 1e-3, (
            f"{ours['grad_norm']} {plain['grad_norm']}"
        )
    (found, state), (expected, plain) = copy.saved(), copy.saved("plain")
    assert all(near(found[name], expected[name], 1e-5) for name in expected), (
        "other weights than DDP's"
    )
    moments = {
        name.removeprefix("model."): value["exp_avg"]
        for name, value in state["optimizer"]["state"].items()
    }
    assert sum(m.numel() for m in moments.values()) == sum(w.numel() for w in expected.values()), (
        "moments in part"
    )
    check_resume(copy, held["out"], flags)
    gap = max(
        step["sampler_gap"] for step in copy.run(*flags, "--rollout", ENGINE, out="engine", ranks=2)
    )
    assert gap < 1e-4, f"{ENGINE} samples from other weights: gap {gap}"
    return (
        "two updates a rollout: gradient norms and weights are DDP's, a rank holds less than 70 % of the moments, they "
        f"are saved whole, resumed on 2, 1 and 2 ranks, gap to {ENGINE} {gap:.0e}"
    )


def check_guess_number(copy):
    grpo, file = copy.grpo, copy.directory / "guess.jsonl"
    rows = [dict(prompt=f"{n:03d}+000=", answer=str(n % 7 * 100)) for n in range(100, 200)]
    file.write_text("\n".join(map(json.dumps, rows)))
    flags = ["--train_data", file, "--max_turns", 3]
    gaps = [
        copy.run(*flags, "--rollout", ENGINE),
        copy.run(*flags, "--num_epochs", 2, out="epochs"),
    ]
    gap = max(step["sampler_gap"] for steps in gaps for step in steps)
    assert gap < 1e-4, f"gap {gap}: a turn does not see the turns before it"
    cfg, world, hints = (
        copy.config(train_data=str(file), max_turns=3),
        grpo.World(0, 1, torch.device("cpu")),
        0,
    )
    _, tokenizer, prompts, _ = grpo.load_data(cfg)
    eos_ids = [tokenizer.eos_token_id]
    sampler = grpo.HFSampler(copy.policy().model, eos_ids, tokenizer.pad_token_id, cfg)
    for s in grpo.sample(sampler, prompts[:8], 4, 1.0, 0, 1, tokenizer, cfg, world):
        guess = []
        for token, in_loss in zip(
            s.completion_ids, grpo.collate([s], world.device)["mask"][0], strict=True
        ):
            if in_loss:
                guess.append(token)
                continue
            higher = int(grpo.decode(tokenizer, np.array(guess), eos_ids)) < int(
                s.prompt.row["answer"]
            )
            assert tokenizer.decode([token]) == ("+" if higher else "="), (
                "a token that is no hint is masked"
            )
            guess, hints = [], hints + 1
        assert grpo.decode(tokenizer, np.array(guess), eos_ids) == s.text, (
            "the reward does not see the last guess"
        )
    assert hints > 8
    return f"{hints} hints are right and out of the loss, later turns see them (gap to {ENGINE} {gap:.0e})"
