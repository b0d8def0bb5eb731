"""The checks of check.py, one for each variant. Each runs the patched copy, proves what the patch
is for, and returns a line that says what was shown."""

import importlib.util
import json

import numpy as np
import torch

F64 = torch.float64
ENGINE = "vllm" if importlib.util.find_spec("vllm") else "hf"
MAX_GAP = 1e-4  # between the log-probabilities of the sampler and of the trainer

# A few tokens for each variant of the objective: their probabilities before the update and now,
# their advantages; the gradient of the loss by each log-probability; how many tokens are clipped
# or masked; what that shows.
OBJECTIVES = {
    "cispo": dict(
        before=[0.1, 0.2, 0.8],
        now=[0.8, 0.2, 0.04],
        advantages=[1, 1, -1],
        gradient=[-5, -1, 0.05],
        clipped=1,
        shown="ratio 8 still learns, with weight 5",
    ),
    "dual_clip": dict(
        before=[0.1, 0.1, 0.1],
        now=[0.8, 0.2, 0.8],
        advantages=[-1, -1, 1],
        gradient=[0, 2, 0],
        clipped=2,
        shown="A < 0: ratio 8 has no gradient, ratio 2 has its full gradient",
    ),
    "dppo": dict(
        before=[0.001, 0.5, 0.9, 0.5],
        now=[0.01, 0.9, 0.5, 0.9],
        advantages=[1, 1, -1, -1],
        gradient=[-10, 0, 0, 1.8],
        clipped=2,
        shown="0.001 to 0.01 is kept, 0.5 to 0.9 is masked, but not on its way back",
    ),
}


def near(values, expected, atol=1e-9) -> bool:
    values = torch.as_tensor(values, dtype=F64)
    expected = torch.as_tensor(expected, dtype=F64)
    return torch.allclose(values, expected.expand_as(values), rtol=0, atol=atol)


# -- Objectives


def check_objective(copy):
    # Several updates per rollout, so that ratios leave 1.
    copy.run("--num_epochs", 2, "--num_minibatches", 2, "--learning_rate", 3e-3)
    case = OBJECTIVES[copy.name]
    old_logps = torch.tensor(case["before"], dtype=F64).log()[:, None]  # [N, 1]
    logps = torch.tensor(case["now"], dtype=F64).log()[:, None].requires_grad_()
    advantages = torch.tensor(case["advantages"], dtype=F64)
    mask = torch.ones_like(old_logps)
    cfg = copy.config(beta=0.0, tis_cap=0.0)

    loss, stats = copy.grpo.grpo_loss(
        logps, old_logps, None, None, advantages, mask, cfg, n_tokens=1, n_sequences=len(mask)
    )
    loss.backward()
    assert near(logps.grad[:, 0], case["gradient"]), logps.grad
    assert stats["clip_ratio/region_mean"] == case["clipped"], stats
    return case["shown"]


check_cispo = check_objective
check_dual_clip = check_objective
check_dppo = check_objective


def check_entropy_bonus(copy):
    copy.run()
    coefficient = 0.5
    cfg = copy.config(entropy_coef=coefficient, beta=0.0)
    policy = copy.policy()
    prompt = copy.grpo.Prompt(np.arange(5, 8), "", {})
    sample = copy.grpo.Sample(0, prompt, np.arange(8, 13), np.zeros(5), "stop")
    batch = copy.grpo.collate([sample], policy.model.device)

    def loss_and_bonus():
        logps, entropy = policy(batch)  # [1, 5]
        loss, _ = copy.grpo.grpo_loss(
            logps, logps.detach(), None, None, torch.zeros(1), torch.ones_like(logps), cfg,
            n_tokens=5, n_sequences=1, entropy=entropy,
        )  # fmt: skip
        return loss, -coefficient * entropy.mean().item()

    loss, bonus = loss_and_bonus()
    assert near(loss.item(), bonus), "the bonus does not go through the token reduction"

    # A small step against the gradient: the bonus falls by the squared norm of the gradient.
    loss.backward()
    squared_norm = sum(p.grad.square().sum().item() for p in policy.parameters())
    step = 1e-6
    for p in policy.parameters():
        p.data -= step * p.grad
    _, new_bonus = loss_and_bonus()
    slope = (bonus - new_bonus) / step
    assert squared_norm > 0, "the bonus has no gradient"
    assert abs(slope / squared_norm - 1) < 0.01, f"slope {slope}, gradient squared {squared_norm}"
    assert copy.grpo.why_no_gradient(sample, cfg) == "", "a sample without advantage has no pass"
    return "a step along the bonus raises the entropy by what its gradient says"


# -- Advantages


def check_rloo(copy):
    copy.run()
    rewards = torch.rand(3, 5, dtype=F64)
    expected = []
    for group in rewards.tolist():
        for r in group:
            mean_of_others = (sum(group) - r) / 4
            expected.append(r - mean_of_others)
    assert near(copy.grpo.group_advantages(rewards.flatten(), 5, "loo"), expected)
    return "advantages are r minus the mean of the others"


def check_maxrl(copy):
    copy.run()
    rewards = torch.tensor([1, 0, 0, 1, 0, 0, 0, 0], dtype=F64)  # two groups of four
    scores = torch.rand(4, dtype=F64)  # of the first group: stands for the gradients of its logps
    advantages = copy.grpo.group_advantages(rewards, 4, "mean")
    expected = scores[[0, 3]].mean() - scores.mean()
    assert near(advantages[:4] @ scores / 4, expected)
    assert near(advantages[4:], 0.0), "a group without a success has advantages"
    return "mean score of the successes minus mean score of all; 0 without a success"


# -- Prompts and the reference

NOTE_DRAWS = """
import json
import grpo

prompts_of_step = grpo.prompts_of_step

def note_draw(prompts, number, cfg):
    with open("draws.jsonl", "a") as file:
        print(number, file=file)
    return prompts_of_step(prompts, number, cfg)

grpo.prompts_of_step = note_draw
grpo.main()
"""


def check_dynamic_resampling(copy):
    (copy.directory / "note_draws.py").write_text(NOTE_DRAWS)
    once = copy.run("--seed", 1, "--max_steps", 3, "--max_draws", 1, out="once")
    often = copy.run("--seed", 1, "--max_steps", 3, "--max_draws", 8, out="often")
    empty = sum(step["frac_reward_zero_std"] for step in once) / 3
    assert empty > 0, "every group has a signal without the patch, so this shows nothing"
    assert any(step["draws"] > 1 for step in often)
    assert all(step["frac_reward_zero_std"] == 0 for step in often)

    flags = ["--seed", 1, "--max_draws", 8]
    copy.run(*flags, out="again", program="note_draws.py")
    flags += ["--max_steps", 3, "--resume"]
    again = copy.run(*flags, out="again", program="note_draws.py")
    assert again[-1]["grad_norm"] == often[-1]["grad_norm"], "a resume draws other prompts"
    numbers = [int(line) for line in (copy.directory / "draws.jsonl").read_text().split()]
    first_draws = [number for number in numbers if number <= 3]
    n_draws = sum(step["draws"] for step in often)
    assert first_draws == [1, 2, 3], f"prompts of the epoch are left out: draws {numbers}"
    assert len(set(numbers)) == len(numbers) == n_draws, f"a draw is repeated: draws {numbers}"
    return (
        f"groups without a signal: {empty:.0%} before, none after; no prompt is left out, a resume "
        "is exact"
    )


def check_dynamic_resampling_and_maxrl(copy):
    shown = check_dynamic_resampling(copy)
    lines = (copy.directory / "again" / "completions.jsonl").read_text().splitlines()
    assert lines
    for line in lines:
        assert json.loads(line)["advantage"] != 0, line
    return shown


def check_moving_reference(copy):
    flags = ["--ref_sync_every", 2]
    kl = [step["kl"] for step in copy.run(*flags, "--max_steps", 4)]
    after_sync, other = [kl[0], kl[2]], [kl[1], kl[3]]  # the first step is before any update
    assert max(after_sync) < 1e-9, kl
    assert min(other) > 1e-6, kl

    copy.run(*flags, "--max_steps", 3, out="again")
    again = copy.run(*flags, "--max_steps", 4, "--resume", out="again")
    assert again[-1]["kl"] == kl[3], "a resume loses the reference"
    return "KL 0 after each sync and only then; a resume is exact"


# -- Adapters and shards

# Runs grpo.py, and fails if this rank holds more than its share of Adam's moments.
COUNT_MOMENTS = """
import grpo

make_optimizer = grpo.make_optimizer
optimizers = []

def keep_optimizer(*arguments):
    optimizers.append(make_optimizer(*arguments))
    return optimizers[0]

grpo.make_optimizer = keep_optimizer
grpo.train(grpo.parse_args())
[optimizer] = optimizers
state = getattr(optimizer, "optim", optimizer).state  # of ZeroRedundancyOptimizer: its local part
held = 0
for moments in state.values():
    for moment in moments.values():
        if hasattr(moment, "to_local"):
            moment = moment.to_local()
        held += moment.numel()
total = sum(2 * p.numel() for group in optimizer.param_groups for p in group["params"])
assert 0 < held < 0.7 * total, f"this rank holds {held} of {total} moments"
"""


def largest_gap(copy, *flags, **options) -> float:
    """Of a run that samples with vLLM, if it is installed."""
    metrics = copy.run(*flags, "--rollout", ENGINE, out="engine", **options)
    gap = max(step["sampler_gap"] for step in metrics)
    assert gap < MAX_GAP, f"{ENGINE} samples from other weights: gap {gap}"
    return gap


def check_resume(copy, straight, flags):
    """straight: the metrics of a run of two ranks without a stop. A resume on two ranks is exact;
    then one on one rank, and one on two again, are equal up to rounding."""
    copy.run(*flags, out="again", ranks=2)
    for step, ranks, largest_change in ((3, 2, 0.0), (4, 1, 1e-3), (5, 2, 1e-3)):
        if step > len(straight):
            break
        again = copy.run(*flags, "--max_steps", step, "--resume", out="again", ranks=ranks)
        change = abs(again[-1]["grad_norm"] / straight[step - 1]["grad_norm"] - 1)
        assert change <= largest_change, f"resumed on {ranks} ranks, it differs by {change:.0e}"


def check_zero1(copy):
    (copy.directory / "count_moments.py").write_text(COUNT_MOMENTS)
    flags = ["--save_every", 2, "--keep", 0]
    straight = copy.run(*flags, "--max_steps", 4, ranks=2, program="count_moments.py")
    copy.run(*flags, ranks=2, program="plain.py", out="plain")
    saved, state = copy.saved()
    plain, plain_state = copy.saved("plain")
    for name in plain:
        assert torch.equal(saved[name], plain[name]), f"{name}: other weights than AdamW's"

    moments = state["optimizer"]["state"]
    for i, expected in plain_state["optimizer"]["state"].items():
        assert torch.equal(moments[i]["exp_avg_sq"], expected["exp_avg_sq"]), "other moments"
    check_resume(copy, straight, flags)

    flags += ["--lora_rank", 4]
    adapters = copy.run(*flags, ranks=2, program="count_moments.py", out="adapters")
    plain_adapters = copy.run(*flags, ranks=2, program="plain.py", out="plain_adapters")
    assert adapters[-1]["grad_norm"] == plain_adapters[-1]["grad_norm"], "other adapters"
    return (
        "weights and gathered moments are AdamW's to the bit, with adapters, too, a rank holds "
        "less than 70 %, resumed on 2 and 1 ranks"
    )


def check_fsdp2(copy):
    (copy.directory / "count_moments.py").write_text(COUNT_MOMENTS)
    flags = ["--save_every", 2, "--keep", 0, "--micro_batch_tokens", 200, "--num_minibatches", 2]
    sharded = copy.run(*flags, "--max_steps", 5, program="count_moments.py", ranks=2)
    ddp = copy.run(*flags, "--max_steps", 5, program="plain.py", out="plain", ranks=2)
    for step, expected in zip(sharded, ddp, strict=True):
        norms = step["grad_norm"], expected["grad_norm"]
        assert abs(norms[0] / norms[1] - 1) < 1e-3, norms
    saved, state = copy.saved()
    plain, _ = copy.saved("plain")
    for name in plain:
        assert near(saved[name], plain[name], 1e-5), f"{name}: other weights than DDP's"

    moments = [value["exp_avg"] for value in state["optimizer"]["state"].values()]
    n_weights = sum(weight.numel() for weight in plain.values())
    assert sum(moment.numel() for moment in moments) == n_weights, "moments are saved in part"
    check_resume(copy, sharded, flags)
    gap = largest_gap(copy, *flags, ranks=2)

    flags += ["--lora_rank", 4]
    norms = []
    for program in ("grpo.py", "plain.py"):
        lines = copy.run(*flags, ranks=2, program=program, out=f"adapters_{program}")
        norms.append(lines[-1]["grad_norm"])
    assert abs(norms[0] / norms[1] - 1) < 1e-3, f"adapters: {norms}"
    return (
        "two updates per rollout: gradient norms and weights are DDP's, with adapters, too, a rank "
        "holds less than 70 % of the moments, they are saved whole, resumed on 2, 1 and 2 ranks, "
        f"gap to {ENGINE} {gap:.0e}"
    )


# -- Numbers of few bits

# Runs grpo.py, and writes the weights with which this rank ends.
KEEP_WEIGHTS = """
import os
import torch
import grpo

wrap = grpo.wrap
models = []

def keep_model(policy, *arguments):
    models.append(policy.model)
    return wrap(policy, *arguments)

grpo.wrap = keep_model
cfg = grpo.parse_args()
grpo.train(cfg)
[model] = models
torch.save(list(model.parameters()), f"{cfg.out_dir}_rank{os.environ['RANK']}.pt")
"""


def bytes_of(tensor) -> int:
    """Of a tensor in 8 bits: its codes, the scale of each block, the table of the 256 numbers."""
    if not hasattr(tensor, "codes"):
        return tensor.nbytes
    return tensor.codes.nbytes + tensor.scale.nbytes + tensor.qmap.nbytes


def mean_move(optimizer, weights, size: float) -> float:
    """How far a step of that size moves the weights on average, over the size."""
    before = weights.detach().double()
    weights.grad = torch.ones_like(weights)
    with torch.compiler.set_stance("force_eager"):
        optimizer.step()
    return (before - weights.detach().double()).mean().item() / size


def check_adamw8bit(copy):
    (copy.directory / "keep_weights.py").write_text(KEEP_WEIGHTS)
    flags = ["--num_minibatches", 2, "--save_every", 2, "--keep", 0, "--max_steps"]
    copy.run(*flags, 4, ranks=2, program="keep_weights.py")
    ranks = [torch.load(copy.directory / f"out_rank{rank}.pt") for rank in range(2)]
    for ours, theirs in zip(*ranks, strict=True):
        assert ours.dtype == torch.bfloat16, f"weights in {ours.dtype}"
        assert torch.equal(ours, theirs), "the ranks have rounded to other weights"

    copy.run(*flags, 2, ranks=2, out="again")
    copy.run(*flags, 4, "--resume", ranks=2, out="again", program="keep_weights.py")
    resumed = torch.load(copy.directory / "again_rank0.pt")
    for ours, theirs in zip(ranks[0], resumed, strict=True):
        assert torch.equal(ours, theirs), "a resume ends with other weights"

    weights, state = copy.saved()
    states = state["optimizer"]["state"].values()
    moments = sum(bytes_of(tensor) for moments in states for tensor in moments.values())
    count = sum(p.numel() for p in ranks[0])
    assert sum(weight.nbytes for weight in weights.values()) == 2 * count, "other weights are saved"
    assert moments < 2.2 * count, f"the moments take {moments / count:.2f} bytes a parameter"

    # The next number below 1 is 0.004 away, so a step of 0.0001 is lost if it is rounded to the
    # nearest one.
    size = 1e-4
    policy = torch.nn.Linear(1024, 1024, bias=False, dtype=torch.bfloat16)
    torch.nn.init.ones_(policy.weight)
    nearest = torch.optim.AdamW(policy.parameters(), lr=size, weight_decay=0.0)
    assert mean_move(nearest, policy.weight, size) == 0
    optimizer = copy.grpo.make_optimizer(policy, copy.config(learning_rate=size))
    move = mean_move(optimizer, policy.weight, size)
    assert near(move, 1, atol=0.05), f"a step moves the weights by {move:.2f} of its size"

    flags = ["--max_steps", 8, "--num_prompts", 16]
    learned = copy.run(*flags, out="learned")[-1]["reward"]
    plain = copy.run(*flags, program="plain.py", out="plain")[-1]["reward"]
    assert learned > plain - 0.1, f"the reward is {learned:.2f}, AdamW's {plain:.2f}"
    copy.run("--rollout", ENGINE, out="engine")  # stops if the engine has other weights
    return (
        f"moments of {moments / count:.2f} bytes a parameter; small steps move the weights as far "
        "as they are, on average; two ranks round alike, a resume is exact; reward after 8 steps "
        f"{learned:.2f}, AdamW's {plain:.2f}"
    )
