"""What does each trainer call GRPO?   python studies/trainers.py FOLDER

The advantages and losses of 19 trainers, at their defaults, beside `group_advantages`, `weigh` and
`grpo_loss`, on one batch of 8 samples: on-policy, off-policy, and with wild ratios; whole, and in
two micro-batches. pip puts each package into FOLDER/NAME, without what it needs. (Two are in no
index: clone them there.) Of a package only the functions named here are executed, unchanged. How
its trainer calls them, and scales losses over micro-batches, was read in its code.
"""

import __future__

import ast
import dataclasses
import itertools
import math
import subprocess
import sys
import types
import typing
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace as Namespace

import common
import matplotlib.pyplot as plt
import numpy as np
import torch

import grpo

G, T = 4, 12
LENGTHS = [3, 7, 12, 5, 9, 2, 6, 11]
N, N_TOKENS = len(LENGTHS), sum(LENGTHS)
REWARDS = torch.tensor([1, 0, 0, 1, 0.2, 0.9, 0.9, 0.4], dtype=torch.float64)
MASK = (torch.arange(T) < torch.tensor(LENGTHS)[:, None]).double()  # [N, T]
WHOLE = [[*range(N)]]
PARTS = [[0, 1, 3, 5], [2, 4, 6, 7]]  # two micro-batches, of 17 and 38 tokens
CLIPS = {"0.2, 0.2": (0.2, 0.2), "0.2, 0.28": (0.2, 0.28), "off": (1e9, 1e9)}
KLS = ("k1", "k2", "k3", "k4", "wk3")
RAN = ("trl", "invokerl", "forge-rl")  # two steps by the whole trainer, on a CPU
HEADER = (
    "trainer | A | flags here | policy gradient on, off policy | wild tokens that differ | two "
    "micro-batches: error, cosine | KL by default | KL here | KL gradient | wild tokens whose KL "
    "has no gradient | largest A of 8 equal rewards | shown by"
)


class Anything(Namespace):
    """A stand-in for a trainer's object: what is not given is None."""

    def __getattr__(self, name):
        return None


@dataclasses.dataclass
class Trainer:
    advantages: typing.Callable  # (rewards [N], group size) -> [N]
    loss: typing.Callable  # (micro-batch, KL coefficient) -> what `backward` is called on
    kl: str = "off"  # by default, as read
    cost: typing.Callable | None = None  # (case) -> [N, T]: a KL in the reward, off the advantages
    splits: bool = True  # a step may have several micro-batches


# -- The batch


def cases() -> dict:
    """on: old = now. off: now - old is N(0, 0.3), and five ratios lie between 1.2 and 1.28. wild:
    ratios to e^2.5 and e^-2.5, and a reference up to 14 nats away."""
    rng = np.random.default_rng(20261127)
    now = -rng.exponential(1.0, (N, T))
    near = now - rng.normal(0, 0.3, (N, T))
    old = now - rng.normal(0, 0.3, (N, T))
    for i, t, ratio in ((0, 1, 1.24), (3, 2, 1.25), (5, 0, 1.22), (6, 3, 1.26), (2, 4, 1.24)):
        old[i, t] = now[i, t] - math.log(ratio)
    wild = now - rng.choice([-2.5, -1.5, 0.0, 1.5, 2.5], (N, T))
    far = now + rng.choice([-14.0, -3.0, 0.5, 3.0, 14.0], (N, T))
    both = dict(on=(now, near), off=(old, near), wild=(wild, far))
    tensors = {name: [torch.from_numpy(x) for x in (now, *two)] for name, two in both.items()}
    return {name: dict(zip(("logps", "old", "ref"), x, strict=True)) for name, x in tensors.items()}


CASES = cases()


def gradient(trainer, case: str, parts: list, advantages, kl=0.0):
    """[N, T]: by each log-probability. The losses of the micro-batches add up. advantages [N, T]"""
    total = torch.zeros(N, T, dtype=torch.float64)
    for rows in parts:
        batch = {name: x[rows].clone() for name, x in CASES[case].items()}
        batch |= dict(mask=MASK[rows], advantages=advantages[rows], rows=rows, parts=len(parts))
        logps = batch["logps"].requires_grad_()
        loss = trainer.loss(Namespace(**batch), kl)
        total[rows] = torch.autograd.grad(loss, logps)[0]
    return total * MASK


def ours(advantages):
    """(flags) -> grpo_loss with weigh's weights and another trainer's advantages [N, T]."""

    def make(**flags):
        cfg = grpo.Config(max_completion_length=T, **flags)
        samples = []
        for i, length in enumerate(LENGTHS):
            samples.append(grpo.Sample(i // G, None, np.arange(length), np.zeros(length)))
            samples[-1].advantages = advantages[i, :length].numpy()
        grpo.weigh(samples, cfg)

        def loss(batch, kl):
            flat = [x[batch.mask > 0] for x in (batch.logps, batch.old, batch.ref)]
            logps, old, ref = flat  # [n]
            if kl == 0:
                ref = None
            mine = [samples[i] for i in batch.rows]
            a = torch.from_numpy(np.concatenate([s.advantages for s in mine]))
            weights = torch.from_numpy(np.concatenate([s.weights for s in mine]))
            lengths = [len(s.weights) for s in mine]
            with_kl = dataclasses.replace(cfg, beta=kl)
            return grpo.grpo_loss(logps, old, ref, None, a, weights, with_kl, lengths)[0]

        return Trainer(None, loss)

    return make


def error(mine, theirs) -> float:
    """The largest difference, over the largest entry of theirs."""
    return ((mine - theirs).abs().max() / theirs.abs().max()).item()


# -- The packages


def install(folder: str, package: str) -> Path:
    """Where the package lies: FOLDER/NAME."""
    at = Path(folder, short(package)).resolve()
    if not at.exists() and "==" not in package:
        sys.exit(f"clone {package} into {at}")
    if not at.exists():
        command = [sys.executable, "-m", "pip", "install", "--no-deps", "--ignore-requires-python"]
        subprocess.run([*command, "--target", str(at), package], check=True)
    return at


def short(package: str) -> str:
    return package.split("==")[0].split(" at ")[0]


def cut(path: Path, names: str, **given) -> Namespace:
    """The functions and classes of a file ("Class.method": a method) as they stand there, without
    decorators. The file would import what needs GPUs or services; `given` is in its place."""
    body = []
    for node in ast.parse(path.read_text()).body:
        for part in (node, *getattr(node, "body", [])):
            prefix = "" if part is node else getattr(node, "name", "") + "."
            targets = getattr(part, "targets", [part])
            name = getattr(targets[0], "name", None) or getattr(targets[0], "id", "")
            if prefix + name in names.split():
                if hasattr(part, "decorator_list"):
                    kept = ("dataclass", "classmethod", "staticmethod", "property")
                    ds = part.decorator_list
                    part.decorator_list = [d for d in ds if ast.unparse(d).split("(")[0] in kept]
                body.append(part)
    space = dict(torch=torch, np=np, math=math, dataclass=dataclasses.dataclass, __name__="cut")
    space |= vars(typing) | given
    flags = __future__.annotations.compiler_flag
    exec(compile(ast.Module(body, []), str(path), "exec", flags, dont_inherit=True), space)
    return Namespace(**{n.split(".")[-1]: space[n.split(".")[-1]] for n in names.split()})


def standardised(ddof: int, eps: float):
    """The formula of a trainer in whose code it stands amid other things."""

    def advantages(rewards, size):
        r = rewards.view(-1, size)
        return (r - r.mean(1, keepdim=True)) / (r.std(1, keepdim=True, correction=ddof) + eps)

    return advantages


def of_verl(core):
    """verl's function, which several trainers have: rewards at the last token, a name a group."""

    def advantages(rewards, size):
        names = np.arange(len(rewards)) // size
        ones = torch.ones(len(rewards), 1, dtype=rewards.dtype)
        return core.compute_grpo_outcome_advantage(rewards[:, None], ones, names)[0][:, 0]

    return advantages


def same(x, **_):
    return x


class Base:
    def __init__(self, **_):
        pass


def trl(at):
    names = "GRPOTrainer._compute_loss"
    cut_out = cut(at / "trl/trainer/grpo_trainer.py", names, nanmin=torch.min, nanmax=torch.max)

    def loss(b, kl):
        accelerator = Namespace(num_processes=1, gather=same, gather_for_metrics=same, reduce=same)
        args = Anything(use_bias_correction_kl=True, steps_per_generation=b.parts)
        me = Anything(model=Namespace(training=True), args=args, accelerator=accelerator, beta=kl)
        me.loss_type, me.importance_sampling_level, me.top_entropy_quantile = "dapo", "token", 1.0
        me.epsilon_low = me.epsilon_high = 0.2
        me.current_gradient_accumulation_steps = b.parts
        me._metrics = dict(train=defaultdict(list))
        me._get_per_token_logps_and_entropies = lambda *_, **__: (b.logps, b.logps * 0, None)
        ids = torch.zeros(len(b.rows), T, dtype=torch.long)
        inputs = dict(prompt_ids=ids, prompt_mask=ids, completion_ids=ids, completion_mask=b.mask)
        inputs |= dict(advantages=b.advantages, old_per_token_logps=b.old)
        inputs |= dict(ref_per_token_logps=b.ref, num_items_in_batch=torch.tensor(N_TOKENS))
        return cut_out._compute_loss(me, None, inputs)

    return Trainer(standardised(1, 1e-4), loss)


def unsloth(at):
    cut_out = cut(at / "unsloth_zoo/rl_replacements.py", "grpo_compute_loss")

    def loss(b, kl):
        ids = torch.zeros(len(b.rows), T, dtype=torch.long)
        options = dict(loss_type="dapo", epsilon_low=0.2, epsilon_high=0.2)
        options |= dict(num_items_in_batch=torch.tensor(float(N_TOKENS)), num_processes=1)
        options |= dict(current_gradient_accumulation_steps=b.parts, steps_per_generation=b.parts)
        options |= dict(use_bias_correction_kl=True)  # TRL's
        tensors = (b.ref, b.logps, b.old, None, ids, b.mask, kl, b.advantages)
        return cut_out.grpo_compute_loss(*tensors, **options)[0]

    return Trainer(standardised(1, 1e-4), loss)


def verl(at, name="verl", path="verl/trainer/ppo", of="verl/utils"):
    f = cut(at / of / "torch_functional.py", "masked_sum masked_mean")
    names = "compute_grpo_outcome_advantage compute_policy_loss_vanilla agg_loss kl_penalty"
    given = {f"{name}_F": f, "defaultdict": defaultdict}
    given |= dict(AlgoConfig=type(None), AlgorithmArguments=type(None))
    core = cut(at / path / "core_algos.py", names + " kl_penalty_forward", **given)
    cfg = Anything(clip_ratio=0.2, clip_ratio_c=3.0, get=lambda name, default: default)
    counts = {}
    if name == "verl":  # those of the whole step
        counts = dict(dp_size=1, batch_num_tokens=N_TOKENS, global_batch_size=N)
    cfg.global_batch_info = counts

    def loss(b, kl):
        tensors = (b.old, b.logps, b.advantages, b.mask, "token-mean", cfg)
        policy = core.compute_policy_loss_vanilla(*tensors)[0]
        k3 = core.kl_penalty(b.logps, b.ref, "low_var_kl")
        both = policy + kl * core.agg_loss(k3, b.mask, "token-mean", **counts)
        if name == "siirl":
            both = both / b.parts
        return both

    return Trainer(of_verl(core), loss)


def siirl(at):
    return verl(at, "siirl", "siirl/dag_worker", "siirl/utils/model_utils")


def trinity(at):
    folder = at / "trinity/algorithm"
    f = cut(folder / "utils.py", "masked_sum masked_mean aggregate_loss")
    given = vars(f) | dict(PolicyLossFn=Base, GroupAdvantage=Base)
    name = "PPOPolicyLossFn"
    policy = cut(folder / "policy_loss_fn/ppo_policy_loss.py", name, **given).PPOPolicyLossFn
    policy = policy(**policy.default_args())
    given |= dict(ABC=object, abstractmethod=same)
    k2 = cut(folder / "kl_fn/kl_fn.py", "KLFn K2Fn", **given).K2Fn
    name = "GRPOGroupedAdvantage"
    of_group = cut(folder / "advantage_fn/grpo_advantage.py", name, **given).GRPOGroupedAdvantage()

    def advantages(rewards, size):
        samples = [Namespace(reward=r, action_mask=torch.ones(1)) for r in rewards.tolist()]
        for i in range(0, len(samples), size):
            of_group.calculate_group_advantage("", samples[i : i + size])
        return torch.cat([s.advantages for s in samples])

    def loss(b, kl):  # a mean, where the engine of verl expects a share of the step's
        of_kl = k2(kl_coef=kl).calculate_kl_loss(b.logps, b.ref, b.mask, "token-mean")[0]
        return policy(b.logps, b.old, b.mask, b.advantages)[0] + of_kl

    return Trainer(advantages, loss, "0.001 k2")


def openrlhf(at):
    folder = at / "openrlhf"
    names = "masked_mean compute_approx_kl compute_reward KL_IS_WEIGHT_CLIP"
    f = cut(folder / "models/utils.py", names)
    names = "PolicyLoss aggregate_loss"
    policy = cut(folder / "models/loss.py", names, nn=torch.nn, **vars(f)).PolicyLoss()
    names = "compute_advantages_and_returns get_cumulative_returns"
    names = " ".join(f"RemoteExperienceMaker.{name}" for name in names.split())
    given = dict(itertools=itertools, apply_length_penalties=lambda *_: None, Experience=None)
    maker = cut(folder / "trainer/ppo_utils/experience_maker.py", names, **given, **vars(f))

    def estimate(rewards, size, mask, kl, coefficient):
        advantage = Namespace(estimator="group_norm", gamma=1.0, no_std_norm=False)
        args = Namespace(rollout=Namespace(n_samples_per_prompt=size))
        args.reward, args.algo = Namespace(clip_range=(-10, 10)), Namespace(advantage=advantage)
        me = Namespace(strategy=Namespace(args=args), kl_ctl=Namespace(value=coefficient))
        me.advantage_estimator = "group_norm"
        me.get_cumulative_returns = lambda *x: maker.get_cumulative_returns(me, *x)
        samples = Namespace(rewards=rewards, index=[*range(len(rewards))], action_mask=mask > 0)
        samples.kl, samples.info = kl, {}
        maker.compute_advantages_and_returns(me, [samples])
        return samples.advantages

    def advantages(rewards, size):
        ones = torch.ones(len(rewards), 1)
        return estimate(rewards, size, ones, ones.to(rewards.dtype) * 0, 0.0)[:, 0]

    def cost(case):
        kl = f.compute_approx_kl(case["old"], case["ref"]).double() * MASK
        both = [estimate(REWARDS.clone(), G, MASK, kl, c) for c in (0.0, 1.0)]
        return both[0] - both[1]

    def loss(b, kl):  # DeepSpeed divides by the number of micro-batches
        options = dict(action_mask=b.mask, dp_size=1, batch_num_tokens=N_TOKENS / b.parts)
        return policy(b.logps, b.old, b.advantages, **options)[0] / b.parts

    return Trainer(advantages, loss, "0.01 k1, in the reward", cost)


def areal(at):
    policy = cut(at / "areal/utils/functional/functional.py", "ppo_actor_loss_fn")
    k1 = cut(at / "areal/utils/data.py", "KLEstimator").KLEstimator("k1")
    actor = cut(at / "areal/trainer/ppo/actor.py", "PPOActor._compute_advantages")

    def estimate(rewards, mask, old, ref, coefficient):
        me = Anything(config=Anything(), reward_bias=0.0, reward_scaling=1.0, reward_clip=20.0)
        me.kl_ctl, me.kl_estimator, me.discount, me.gae_lambda = coefficient, k1, 1.0, 1.0
        ahead = torch.nn.functional.pad  # a prompt of one token
        data = dict(input_ids=ahead(mask, (1, 0)).long(), rewards=rewards)
        data |= dict(loss_mask=ahead(mask, (1, 0)) > 0, logprobs=ahead(old * mask, (1, 0)).float())
        data |= dict(attention_mask=ahead(mask, (1, 0), value=1.0) > 0)
        data |= dict(ref_logp=ahead(ref * mask, (0, 1)).float())
        return actor._compute_advantages(me, data)["advantages"][:, :-1]

    def advantages(rewards, size):
        ones = torch.ones(len(rewards), 1)
        return estimate(rewards.float(), ones, ones, ones, 0.0)[:, 0]

    def cost(case):
        kl = (case["old"], case["ref"])
        both = [estimate(REWARDS.float(), MASK, *kl, c).double()[:, :T] for c in (0.0, 1.0)]
        return both[0] - both[1]

    def loss(b, kl):
        tensors = (b.logps, b.old, b.old, b.advantages, 0.2, b.mask > 0)
        return policy.ppo_actor_loss_fn(*tensors)[0] * b.mask.sum() / N_TOKENS

    return Trainer(advantages, loss, "0.1 k1, in the reward", cost)


def skyrl(at):
    folder = at / "skyrl/backends/skyrl_train/utils"
    f = cut(folder / "torch_utils.py", "masked_mean safe_exp_delta")
    names = "ppo_policy_loss reduce_loss compute_grpo_outcome_advantage compute_approx_kl"
    names += " apply_loss_reduction_to_advantages_minibatch"
    correct = cut(folder / "off_policy_correction_utils.py", "apply_off_policy_correction")
    given = vars(f) | vars(correct) | dict(defaultdict=defaultdict)
    core = cut(folder / "ppo_utils.py", names, **given)
    cfg = Anything(policy_loss_type="regular", eps_clip_low=0.2, eps_clip_high=0.2)

    def loss(b, kl):
        all_rows = torch.zeros(N, T, dtype=torch.float64)
        all_rows[b.rows] = b.advantages
        scale = core.apply_loss_reduction_to_advantages_minibatch
        scaled = scale(all_rows, MASK, "token_mean", len(b.rows), None)[b.rows]
        policy = core.ppo_policy_loss(b.logps, b.old, scaled, cfg, b.mask)[0]
        k3 = core.compute_approx_kl(b.logps, b.ref, b.mask, "k3")
        of_rows = f.masked_mean(k3, b.mask, dim=-1).mean() * len(b.rows) / N
        return policy + kl * of_rows

    return Trainer(of_verl(core), loss, "0.001 k3, mean of samples")


def swift(at):
    estimate = cut(at / "swift/rl_core/advantage.py", "compute_advantages").compute_advantages
    names = "GRPOTrainer._compute_loss_and_metrics WINDOW_NORMALIZED_LOSS_TYPES"
    given = dict(gather_object=same, nanmin=torch.min, nanmax=torch.max)
    trainer = cut(at / "swift/rlhf_trainers/grpo_trainer.py", names, **given)

    def advantages(rewards, size):
        return estimate(rewards[:, None], torch.ones(1, dtype=rewards.dtype), size)[0]

    def loss(b, kl):
        me = Anything(model=Namespace(training=True), beta=kl, loss_type="grpo", sdar_loss_coef=0)
        me.args, me.importance_sampling_level = Anything(), "token"
        me.epsilon_low = me.epsilon_high = 0.2
        me._get_per_token_logps_and_entropies = lambda *_, **__: (b.logps, None)
        me.accelerator = Namespace(gather_for_metrics=same, num_processes=1)
        batch = Anything(completion_mask=b.mask > 0, ref_per_token_logps=b.ref)
        batch.old_per_token_logps, batch.advantages = b.old, b.advantages
        return trainer._compute_loss_and_metrics(me, None, {}, batch)[0] / b.parts

    return Trainer(advantages, loss, "0.04 k3")


def agilerl(at):
    names = "fill_outside_mask masked_mean calculate_k3_kl k3_kl_penalty_reference"
    f = cut(at / "agilerl/utils/llm_utils.py", names)
    names = "_compute_policy_loss _log_importance_weights _off_policy_drops _reduce_masked_loss"
    names += " _token_loss_weights _resolve_loss_window _clipped_units _calculate_advantage"
    names = " ".join(f"GRPO.{name}" for name in names.split())
    cut_out = vars(cut(at / "agilerl/algorithms/grpo.py", names, **vars(f)))

    def me(size, parts, kl):
        it = Anything(group_size=size, adv_norm="mean_only", beta=kl, kl_clamp=10.0)
        it.clip_coef_min, it.clip_coef_max, it.use_bias_correction_kl = 0.8, 1.2, True
        it.off_policy_token_mask_bounds, it.off_policy_sequence_mask_threshold = (0.5, 5.0), 0.03
        it._masks_off_policy_tokens, it.loss_norm = True, "accumulation_window"
        it.gradient_accumulation_steps, it._window_action_tokens = parts, N_TOKENS
        for name, function in cut_out.items():
            setattr(it, name, types.MethodType(function, it))
        return it

    def loss(b, kl):
        tensors = (b.mask, b.logps, b.old, b.ref, b.advantages[:, :1], None)
        options = dict(level="token", objective="grpo")
        return me(G, b.parts, kl)._compute_policy_loss(*tensors, **options)[0] / b.parts

    return Trainer(lambda r, size: me(size, 1, 0)._calculate_advantage(r), loss, "0.001 wk3")


def art(at):
    import pydantic

    names = "Loss LossOffPolicyDiagnostics AlignedLossInputs loss_fn _mask_ignored_tokens"
    names += " compute_probs_corr importance_ratio_histogram_edges shift_tensor"
    given = dict(BaseModel=pydantic.BaseModel, ConfigDict=pydantic.ConfigDict)
    core = cut(at / "art/loss.py", names, **given)
    known = dict(torch=torch, Literal=typing.Literal) | vars(core)
    for record in (core.Loss, core.LossOffPolicyDiagnostics, core.AlignedLossInputs):
        record.model_rebuild(_types_namespace=known)

    def advantages(rewards, size):  # in Python's floats
        return standardised(0, 1e-6)(torch.tensor(rewards.tolist()).double(), size)

    def loss(b, kl):
        batch = dict(assistant_mask=b.mask > 0, old_logprobs=b.old, advantages=b.advantages)
        batch |= dict(weights=b.mask, group_ids=torch.zeros(b.mask.shape))
        batch = core.AlignedLossInputs(**batch)
        options = dict(kl_penalty_coef=kl)
        return core.loss_fn(batch, b.logps, b.ref, None, options).policy_loss / b.parts

    return Trainer(advantages, loss)


def rlinf(at):
    folder = at / "rlinf"
    f = cut(folder / "utils/utils.py", "masked_mean")
    core = cut(folder / "algorithms/losses.py", "compute_ppo_actor_loss", Callable=None, **vars(f))
    estimate = cut(folder / "algorithms/advantages.py", "compute_grpo_advantages")
    penalty = cut(folder / "algorithms/utils.py", "kl_penalty").kl_penalty

    def advantages(rewards, size):
        ones = torch.ones(1, len(rewards), dtype=rewards.dtype)
        return estimate.compute_grpo_advantages(rewards, ones, size)[0]

    def loss(b, kl):  # the order (reference, policy) is that of fsdp_actor_worker.py
        logps, old, ref, a = (x.float() for x in (b.logps, b.old, b.ref, b.advantages))
        policy = core.compute_ppo_actor_loss(logps, old, 0.2, 0.2, a, b.mask > 0)[0]
        k3 = f.masked_mean(penalty(ref, logps, "low_var_kl"), b.mask > 0)
        return (policy + kl * k3) / b.parts

    return Trainer(advantages, loss, "by config")


def areno(at):
    estimate = cut(at / "areno/api/advantages.py", "compute_batch_group_advantages")
    metrics = dict(TrainMetric=Anything(), LOGP_METRIC_WEIGHT="")
    names = "ResponseLayout response_layout masked_mean grpo_loss_fn"
    core = cut(at / "areno/api/backend/cuda/losses.py", names, **metrics)

    def advantages(rewards, size):
        sizes = [size] * (len(rewards) // size)
        return torch.tensor(estimate.compute_batch_group_advantages(rewards.tolist(), sizes))

    def loss(b, kl):
        pack = dict(response_mask=b.mask, logprobs=b.old, advantages=b.advantages)
        pack["seq_ids"] = torch.arange(len(b.rows))[:, None].expand_as(b.mask)
        pack = {f"packed_{name}": x.reshape(-1) for name, x in pack.items()}
        pack["packed_num_sequences"] = len(b.rows)
        return core.grpo_loss_fn(pack, b.logps.reshape(-1))[0] / b.parts

    return Trainer(advantages, loss, "none")


def invokerl(at):
    core = cut(at / "invokerl/algorithms/grpo.py", "GRPO", BaseAlgorithm=Base)

    def advantages(rewards, size):
        ones = torch.ones(len(rewards), 1)
        batch = Anything(group_size=size, response_mask=ones, rewards=rewards)
        return core.GRPO().compute_advantages(batch)[:, 0]

    def loss(b, kl):
        batch = Namespace(response_mask=b.mask, old_log_probs=b.old, ref_log_probs=b.ref)
        batch.rewards = torch.zeros(1)
        return core.GRPO(beta=kl).compute_loss(b.logps, batch, b.advantages)[0] / b.parts

    return Trainer(advantages, loss, "0.04 k3")


def retrain(at):
    estimate = cut(at / "retrain/advantages.py", "compute_grpo_advantages").compute_grpo_advantages
    core = cut(at / "retrain/local_train_helper.py", "_compute_policy_loss")

    def advantages(rewards, size):
        return torch.tensor([estimate(r) for r in rewards.view(-1, size).tolist()])

    def loss(b, kl):
        ratio = (b.logps - b.old).exp()
        return core._compute_policy_loss(ratio, b.advantages, b.mask, 0.0, 0.0)[0]

    return Trainer(advantages, loss, "none", splits=False)


def forge(at):
    core = cut(at / "forge/core/grpo.py", "compute_group_advantages grpo_loss")

    def loss(b, kl):
        policy, ref = ((x * b.mask).sum(1) / b.mask.sum(1) for x in (b.logps, b.ref))
        return core.grpo_loss(policy, ref, b.advantages[:, 0], kl_beta=kl)[0] / b.parts

    return Trainer(core.compute_group_advantages, loss, "0.01 of its own")


def stateset(at):
    sys.path.insert(0, str(at))
    from stateset_agents.training import objectives

    plain = objectives.OBJECTIVES["grpo"]

    def advantages(rewards, size):
        return objectives.compute_advantages(rewards, torch.arange(len(rewards)) // size, plain)

    def loss(b, kl):
        options = dict(logp_cur=b.logps, logp_old=b.old, logp_ref=b.ref, mask=b.mask)
        options |= dict(advantages=b.advantages[:, 0], objective=plain.with_(kl_coef=kl))
        return objectives.policy_loss(**options, total_rows=N).loss

    return Trainer(advantages, loss)


def slime(at):
    core = cut(at / "slime/utils/ppo_utils.py", "compute_policy_loss compute_approx_kl")

    def loss(b, kl):
        policy = core.compute_policy_loss(b.old - b.logps, b.advantages, 0.2, 0.2)[0]
        tokens = policy + kl * core.compute_approx_kl(b.logps, b.ref, "k1")
        return ((tokens * b.mask).sum(1) / b.mask.sum(1)).sum() / N

    return Trainer(standardised(1, 1e-6), loss)


def prime(at):
    names = "default_loss_fn _safe_mean compute_importance_ratio_and_mismatch_kl"
    core = cut(at / "src/prime_rl/trainer/rl/loss.py", names, LossOutputs=Namespace)

    def advantages(rewards, size):
        r = rewards.view(-1, size)
        return r - r.mean(1, keepdim=True)

    def loss(b, kl):  # its KL is to the sampler
        batch = Anything(trainer_logprobs=b.logps, inference_logprobs=b.old)
        batch.advantages, batch.loss_mask = b.advantages, b.mask > 0
        cfg = Namespace(dppo_mask_low=0.2, dppo_mask_high=0.2, adv_tau=1.0, kl_tau=kl)
        return core.default_loss_fn(batch, cfg).loss / N_TOKENS

    return Trainer(advantages, loss, "0.001 squared, to the sampler")


def textbook():
    """The published objective, with a mean of each micro-batch: this must be what is found."""

    def loss(b, kl):
        ratio, d = (b.logps - b.old).exp(), b.ref - b.logps
        gain = torch.minimum(ratio * b.advantages, ratio.clamp(0.8, 1.2) * b.advantages)
        losses = kl * (d.exp() - 1 - d) - gain
        return (losses * b.mask).sum() / b.mask.sum() / b.parts

    return Trainer(standardised(1, 1e-4), loss)


TRAINERS = {
    "trl==1.16.0": trl,
    "unsloth-zoo==2026.10.9": unsloth,
    "verl==0.9.1": verl,
    "openrlhf==0.11.2": openrlhf,
    "ms-swift==4.6.0": swift,
    "areal==1.0.4": areal,
    "skyrl==0.4.0": skyrl,
    "agilerl==2.58.0": agilerl,
    "openpipe-art==0.5.23": art,
    "trinity-rft==0.6.0": trinity,
    "rlinf==0.3.0": rlinf,
    "siirl==0.2.0": siirl,
    "areno==0.10.0": areno,
    "invokerl==0.2.0": invokerl,
    "retrain==0.3.2": retrain,
    "forge-rl==0.1.2": forge,
    "stateset-agents==0.69.0": stateset,
    "slime at 624b824": slime,
    "prime-rl at 559b447": prime,
}


# -- What is measured


def largest_of_equal(trainer, size=8) -> float:
    """The largest advantage in two groups of equal rewards in float32, of 0.01, 0.02, ... 0.99."""
    groups = [torch.full((2 * size,), k / 100) for k in range(1, 100)]
    return max(trainer.advantages(r, size).abs().max().item() for r in groups)


def kind_of(advantages) -> str:
    """Which formula the advantages are, up to an eps."""
    r = REWARDS.view(-1, G)
    known = {"r": r, "r - mean": r - r.mean(1, keepdim=True)}
    for ddof, name in enumerate(("std, n", "std, n - 1")):
        known[name] = known["r - mean"] / r.std(1, correction=ddof, keepdim=True)
    off = {name: error(advantages, formula.flatten()) for name, formula in known.items()}
    assert min(off.values()) < 1e-3
    return min(off, key=off.get)


def nearest(theirs: dict, advantages, options: dict, kl=0.0) -> tuple:
    """Of our gradients by `options` (words: flags) the nearest to `theirs` {case: [N, T]}: the
    words, the errors on- and off-policy, and the gradient of the wild case."""
    make, tried = ours(advantages), {}
    for words, flags in options.items():
        mine = {case: gradient(make(**flags), case, WHOLE, advantages, kl) for case in CASES}
        errors = [error(mine[case], theirs[case]) for case in ("on", "off")]
        tried[words] = errors, mine["wild"]
    words = min(tried, key=lambda words: math.prod(e + 1e-9 for e in tried[words][0]))
    return words, *tried[words]


def shown(errors) -> str:
    words = [f"{e:.0e}".replace("0e+00", "0") if e < 0.01 else "none" for e in errors]
    return " / ".join(words)


def measure(trainer) -> dict:
    a = torch.as_tensor(trainer.advantages(REWARDS.clone(), G)).double().flatten()  # [N]
    found = dict(advantages=kind_of(a), equal=largest_of_equal(trainer))
    a = a[:, None].expand(N, T)
    theirs = {case: gradient(trainer, case, WHOLE, a) for case in CASES}
    options = {}
    for reduction, words in itertools.product(("token", "sequence"), CLIPS):
        low, high = CLIPS[words]
        flags = dict(loss_reduction=reduction, clip_low=low, clip_high=high)
        options[f"{reduction}, clip {words}"] = flags
    found["flags"], found["errors"], mine = nearest(theirs, a, options)
    found["wild"] = int((abs(mine - theirs["wild"]) > 1e-6).sum())
    if min(found["errors"]) > 0.01:
        found["flags"] = "none"
    split = gradient(trainer, "on", PARTS, a)
    cosine = torch.cosine_similarity(split.flatten(), theirs["on"].flatten(), 0).item()
    found["split"] = (
        (error(split, theirs["on"]), cosine) if trainer.splits else (math.nan, math.nan)
    )

    kl, options = 1.0, {}
    for reduction, name in itertools.product(("token", "sequence"), KLS):
        options[f"{name}, {reduction}"] = dict(loss_reduction=reduction, kl_estimator=name)
    if trainer.cost:  # the KL is in the reward
        kl, options = 0.1, {"k1 in reward": dict(kl_estimator="k1", kl_in="reward", clip_high=0.2)}
        costs = {case: trainer.cost(CASES[case]) for case in CASES}
        theirs = {case: gradient(trainer, case, WHOLE, a - kl * costs[case]) for case in CASES}
    else:
        a = a * 0
        theirs = {case: gradient(trainer, case, WHOLE, a, kl) for case in CASES}
    found |= dict(kl="", kl_errors=[], no_pull="")
    if all(g.any() for g in theirs.values()):
        found["kl"], found["kl_errors"], mine = nearest(theirs, a, options, kl)
        found["no_pull"] = int(((theirs["wild"] == 0) & (mine != 0)).sum())
    if min(found["kl_errors"], default=0) > 0.01:
        found |= dict(kl="none", no_pull="")
    if trainer.cost:
        found["no_pull"] = ""
    return found


def row_of(package: str, trainer, m: dict) -> list:
    split = "{:.2f}, {:.3f}".format(*m["split"]).replace("nan, nan", "not split")
    how = "two steps" if short(package) in RAN else "reading"
    of_policy = [m["flags"], shown(m["errors"]), m["wild"], split]
    of_kl = [trainer.kl, m["kl"], shown(m["kl_errors"]), m["no_pull"]]
    return [package, m["advantages"], *of_policy, *of_kl, f"{m['equal']:.2g}", how]


def draw(figure, found: dict) -> None:
    names = [*map(short, found)]
    panels = {
        "two micro-batches: error of the gradient": [m["split"][0] for m in found.values()],
        "largest advantage of 8 equal rewards": [max(m["equal"], 1e-8) for m in found.values()],
        "tokens of 55 whose KL has no gradient": [m["no_pull"] or 0 for m in found.values()],
    }
    axes = figure.subplots(1, 3, sharey=True)
    for axis, (title, values) in zip(axes, panels.items(), strict=True):
        axis.barh(names, values)
        axis.set(title=title)
    axes[0].invert_yaxis()
    axes[1].set(xscale="log", xlim=1e-8)


def main():
    args = common.arguments(__doc__, "folder")
    if args.quick:
        trainers = dict(quick=textbook())
    else:
        trainers = {name: make(install(args.folder, name)) for name, make in TRAINERS.items()}
    found = {name: measure(trainer) for name, trainer in trainers.items()}
    if args.quick:
        m = found["quick"]
        assert m["flags"] == "token, clip 0.2, 0.2" and max(m["errors"]) < 1e-12 and m["wild"] == 0
        assert m["kl"] == "k3, token" and max(m["kl_errors"]) < 1e-12 and m["no_pull"] == 0
        assert abs(m["split"][0] - 0.476) < 1e-3 and abs(m["split"][1] - 0.924) < 1e-3
    figure = plt.figure(figsize=(14, 5), layout="constrained")
    draw(figure, found)
    rows = [row_of(name, trainers[name], m) for name, m in found.items()]
    common.save(args, "trainers", figure, [HEADER, *rows])


if __name__ == "__main__":
    main()
