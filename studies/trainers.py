"""What does each trainer call GRPO?   python studies/trainers.py FOLDER

The script compares the advantages and losses of 19 trainers, at their defaults, with grpo.py's, on
one batch of 8 samples: on-policy, off-policy, and with wild ratios; whole, and in two
micro-batches. pip installs each package into FOLDER/NAME, without its dependencies. (Two are in no
index: clone them there.) Only the functions that trainers.toml names are executed, unchanged. How a
trainer calls them, and scales losses over micro-batches, was read in its code.
"""

import __future__

import ast
import dataclasses
import math
import re
import sys
import tomllib
import types
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace as Namespace

import common
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
POLICY_FLAGS, KL_FLAGS = {}, {}  # words of the table: flags of grpo.py
for reduction in ("token", "sequence"):
    flags = dict(loss_reduction=reduction)
    for words, low, high in (("0.2, 0.2", 0.2, 0.2), ("0.2, 0.28", 0.2, 0.28), ("off", 1e9, 1e9)):
        POLICY_FLAGS[f"{reduction}, clip {words}"] = dict(flags, clip_low=low, clip_high=high)
    for name in ("k1", "k2", "k3", "k4", "wk3"):
        KL_FLAGS[f"{name}, {reduction}"] = dict(flags, kl_estimator=name)


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
    """[N, T]: the gradient of all losses w.r.t. the log-probabilities. advantages [N, T]"""
    total = torch.zeros(N, T, dtype=torch.float64)
    for rows in parts:
        batch = {name: x[rows].clone() for name, x in CASES[case].items()}
        batch |= dict(mask=MASK[rows], advantages=advantages[rows], rows=rows, parts=len(parts))
        logps = batch["logps"].requires_grad_()
        loss = trainer.loss(Namespace(**batch), kl)
        if trainer.micro_batches == "mean":
            loss = loss / len(parts)
        total[rows] = torch.autograd.grad(loss, logps)[0]
    return total * MASK


def error(mine, theirs) -> float:
    """The largest difference, divided by the largest entry of theirs."""
    return ((mine - theirs).abs().max() / theirs.abs().max()).item()


def same(x, **_):
    return x


class Anything(Namespace):
    """A stand-in for a trainer's object: attributes that are not given are None."""

    def __init__(self, *_, **given):
        super().__init__(**given)

    def __getattr__(self, name):
        return None


# Names that the files import from their own or other packages
STAND_INS = dict(Anything=Anything, LossOutputs=Namespace, TrainMetric=Anything())
STAND_INS |= dict(nanmin=torch.min, nanmax=torch.max, gather_object=same)
STAND_INS |= dict.fromkeys(("AlgoConfig", "AlgorithmArguments", "LOGP_METRIC_WEIGHT"), type(None))
STAND_INS |= dict.fromkeys(("PolicyLossFn", "GroupAdvantage", "BaseAlgorithm"), Anything)
STAND_INS |= dict(apply_length_penalties=Anything)
MODULES = {*sys.stdlib_module_names, "numpy", "pydantic", "torch"} - {"__future__"}
DECORATORS = {"dataclass", "classmethod", "staticmethod", "property"}


def cut(name: str, at: Path, files: dict) -> types.ModuleType:
    """A module of the functions and classes of some files, {path: names}, unchanged except that
    most decorators are removed. (The files would import packages that need GPUs or services.) With
    "Class.method" the class has only the named methods; its other attributes come from an adapter,
    or are None."""
    module = sys.modules[name] = types.ModuleType(name)  # dataclasses and pydantic look there
    vars(module).update(STAND_INS, verl_F=module, siirl_F=module)
    for path, names in files.items():
        body, names = [], names.split()
        for node in ast.parse((at / path).read_text()).body:
            inner = getattr(node, "body", [])
            methods = [x for x in inner if f"{name_of(node)}.{name_of(x)}" in names]
            if methods:
                node.bases, node.body = [ast.parse("Anything", mode="eval").body], methods
            imported = re.match(r"(?:from|import) (\w+)", ast.unparse(node))
            if methods or name_of(node) in names or (imported and imported[1] in MODULES):
                body.append(node)
            for part in (node, *methods):
                old = getattr(part, "decorator_list", [])
                part.decorator_list = [d for d in old if ast.unparse(d).split("(")[0] in DECORATORS]
        flag = __future__.annotations.compiler_flag
        code = compile(ast.Module(body, []), path, "exec", flag, dont_inherit=True)
        exec(code, vars(module))
    return module


def name_of(node) -> str:
    """The name of what a statement defines: a function, a class, a constant."""
    target = getattr(node, "targets", [node])[0]
    return getattr(target, "name", None) or getattr(target, "id", "")


class Trainer:
    """An adapter, with the advantage formula of trainers that have no function for this formula
    alone. `backward` is called on its `loss`(micro-batch, KL coefficient)."""

    ddof, eps = 1, 1e-4
    kl_flags, kl_coefficient, advantage_coefficient = KL_FLAGS, 1.0, 0  # to measure its KL

    def __init__(self, at: Path, spec: dict):  # spec: its section of trainers.toml
        self.spec = spec
        self.defaults = spec.get("defaults", {})
        self.micro_batches = spec.get("micro_batches", "sum")
        self.f = cut(f"of_{type(self).__name__}", at, spec.get("files", {}))

    def advantages(self, rewards, size: int):
        """rewards [N] -> [N]"""
        r = rewards.view(-1, size)
        std = r.std(1, keepdim=True, correction=self.ddof)
        return (r - r.mean(1, keepdim=True)) / (std + self.eps)


class KLInReward(Trainer):
    """Its `estimate` returns advantages [N, T] of rewards that include a KL."""

    kl_flags = {"k1 in reward": dict(kl_estimator="k1", kl_in="reward", clip_high=0.2)}
    kl_coefficient, advantage_coefficient = 0.1, 1  # together with the policy's loss

    def advantages(self, rewards, size):
        zeros = torch.zeros(len(rewards), 1)
        return self.estimate(rewards, size, zeros + 1, zeros, zeros, 0.0)[:, 0]

    def loss(self, b, kl):
        if kl > 0:  # what the KL subtracts from the advantages
            tensors = (REWARDS.clone(), G, b.mask, b.old, b.ref)
            cost = self.estimate(*tensors, 0.0) - self.estimate(*tensors, 1.0)
            b.advantages = b.advantages - kl * cost
        return self.policy_loss(b)


class TRL(Trainer):  # a mean over the tokens of the step; k3 times the ratio
    def me(self, b, kl, **more):
        """The trainer's object, for TRL and for trainers derived from TRL."""
        one = Namespace(num_processes=1, gather=same, gather_for_metrics=same, reduce=same)
        training = Namespace(training=True)
        it = self.f.GRPOTrainer(accelerator=one, model=training, beta=kl, **self.defaults, **more)
        it.epsilon_low = it.epsilon_high = 0.2
        return it

    def loss(self, b, kl):
        args = Anything(use_bias_correction_kl=True, steps_per_generation=b.parts)
        me = self.me(b, kl, args=args, current_gradient_accumulation_steps=b.parts)
        me._metrics = dict(train=defaultdict(list))
        me._get_per_token_logps_and_entropies = lambda *_, **__: (b.logps, b.logps * 0, None)
        ids = torch.zeros(len(b.rows), T, dtype=torch.long)
        inputs = dict(prompt_ids=ids, prompt_mask=ids, completion_ids=ids, completion_mask=b.mask)
        inputs |= dict(advantages=b.advantages, old_per_token_logps=b.old)
        inputs |= dict(ref_per_token_logps=b.ref, num_items_in_batch=torch.tensor(N_TOKENS))
        return me._compute_loss(None, inputs)


class Unsloth(Trainer):  # like TRL, but its k3 is clamped
    def loss(self, b, kl):
        ids = torch.zeros(len(b.rows), T, dtype=torch.long)
        options = dict(num_items_in_batch=torch.tensor(float(N_TOKENS)), num_processes=1)
        options |= dict(current_gradient_accumulation_steps=b.parts, steps_per_generation=b.parts)
        tensors = (b.ref, b.logps, b.old, None, ids, b.mask, kl, b.advantages)
        return self.f.grpo_compute_loss(*tensors, **options, **self.defaults)[0]


class Verl(Trainer):  # a bad answer's token whose ratio is above 3 teaches nothing (dual clip)
    counts = dict(dp_size=1, batch_num_tokens=N_TOKENS, global_batch_size=N)  # of the whole step

    def advantages(self, rewards, size):  # rewards at the last token, a name for each group
        names = np.arange(len(rewards)) // size
        ones = torch.ones(len(rewards), 1, dtype=rewards.dtype)
        return self.f.compute_grpo_outcome_advantage(rewards[:, None], ones, names)[0][:, 0]

    def loss(self, b, kl):
        cfg = Anything(**self.defaults, global_batch_info=self.counts)
        cfg.get = lambda name, default: default
        tensors = (b.old, b.logps, b.advantages, b.mask, "token-mean", cfg)
        policy = self.f.compute_policy_loss_vanilla(*tensors)[0]
        k3 = self.f.kl_penalty(b.logps, b.ref, "low_var_kl")
        return policy + kl * self.f.agg_loss(k3, b.mask, "token-mean", **self.counts)


class SiiRL(Verl):  # an earlier verl, with a mean over each micro-batch
    counts = {}


class Trinity(Trainer):  # a mean, where verl's engine expects a share of the step's loss
    def advantages(self, rewards, size):
        samples = [Namespace(reward=r, action_mask=torch.ones(1)) for r in rewards.tolist()]
        for i in range(0, len(samples), size):
            self.f.GRPOGroupedAdvantage().calculate_group_advantage("", samples[i : i + size])
        return torch.cat([s.advantages for s in samples])

    def loss(self, b, kl):
        policy = self.f.PPOPolicyLossFn(**self.f.PPOPolicyLossFn.default_args())
        k2 = self.f.K2Fn(kl_coef=kl).calculate_kl_loss(b.logps, b.ref, b.mask, "token-mean")[0]
        return policy(b.logps, b.old, b.mask, b.advantages)[0] + k2


class OpenRLHF(KLInReward):  # the advantages are clipped at 10
    def estimate(self, rewards, size, mask, old, ref, coefficient):
        advantage = Namespace(estimator="group_norm", gamma=1.0, no_std_norm=False)
        args = Namespace(rollout=Namespace(n_samples_per_prompt=size))
        args.reward, args.algo = Namespace(clip_range=(-10, 10)), Namespace(advantage=advantage)
        me = self.f.RemoteExperienceMaker(strategy=Namespace(args=args))
        me.advantage_estimator, me.kl_ctl = "group_norm", Namespace(value=coefficient)
        samples = Namespace(rewards=rewards, index=[*range(len(rewards))], action_mask=mask > 0)
        kl = self.f.compute_approx_kl(old, ref).to(rewards.dtype)
        samples.kl, samples.info = kl * mask, {}
        me.compute_advantages_and_returns([samples])
        return samples.advantages

    def policy_loss(self, b):
        options = dict(action_mask=b.mask, dp_size=1, batch_num_tokens=N_TOKENS / b.parts)
        return self.f.PolicyLoss()(b.logps, b.old, b.advantages, **options)[0]


class AReaL(KLInReward):  # the advantage is the reward itself
    def estimate(self, rewards, size, mask, old, ref, coefficient):
        me = self.f.PPOActor(config=Anything(), kl_ctl=coefficient, **self.defaults)
        me.kl_estimator = self.f.KLEstimator("k1")
        ahead = torch.nn.functional.pad  # a prompt of one token
        data = dict(input_ids=ahead(mask, (1, 0)).long(), rewards=rewards.float())
        data |= dict(loss_mask=ahead(mask, (1, 0)) > 0, logprobs=ahead(old * mask, (1, 0)).float())
        data |= dict(attention_mask=ahead(mask, (1, 0), value=1.0) > 0)
        data |= dict(ref_logp=ahead(ref * mask, (0, 1)).float())
        return me._compute_advantages(data)["advantages"][:, :-1].double()

    def policy_loss(self, b):
        tensors = (b.logps, b.old, b.old, b.advantages, 0.2, b.mask > 0)
        return self.f.ppo_actor_loss_fn(*tensors)[0] * b.mask.sum() / N_TOKENS


class SkyRL(Verl):  # the advantages include the token weights; the KL is a mean over samples
    def loss(self, b, kl):
        all_rows = torch.zeros(N, T, dtype=torch.float64)
        all_rows[b.rows] = b.advantages
        scale = self.f.apply_loss_reduction_to_advantages_minibatch
        scaled = scale(all_rows, MASK, "token_mean", len(b.rows), None)[b.rows]
        cfg = Anything(**self.defaults)
        policy = self.f.ppo_policy_loss(b.logps, b.old, scaled, cfg, b.mask)[0]
        k3 = self.f.compute_approx_kl(b.logps, b.ref, b.mask, "k3")
        return policy + kl * self.f.masked_mean(k3, b.mask, dim=-1).mean() * len(b.rows) / N


class Swift(TRL):  # derived from TRL, but each sample counts the same; k3 is clamped
    def advantages(self, rewards, size):
        one = torch.ones(1, dtype=rewards.dtype)
        return self.f.compute_advantages(rewards[:, None], one, size)[0]

    def loss(self, b, kl):
        me = self.me(b, kl, args=Anything())
        me._get_per_token_logps_and_entropies = lambda *_, **__: (b.logps, None)
        batch = Anything(completion_mask=b.mask > 0, ref_per_token_logps=b.ref)
        batch.old_per_token_logps, batch.advantages = b.old, b.advantages
        return me._compute_loss_and_metrics(None, {}, batch)[0]


class AgileRL(Trainer):  # no standard deviation; tokens far from the policy are dropped
    def advantages(self, rewards, size):
        return self.f.GRPO(group_size=size, **self.defaults)._calculate_advantage(rewards)

    def loss(self, b, kl):
        me = self.f.GRPO(group_size=G, beta=kl, **self.defaults)
        me.gradient_accumulation_steps, me._window_action_tokens = b.parts, N_TOKENS
        tensors = (b.mask, b.logps, b.old, b.ref, b.advantages[:, :1], None)
        return me._compute_policy_loss(*tensors, level="token", objective="grpo")[0]


class ART(Trainer):  # no clip
    ddof, eps = 0, 1e-6

    def advantages(self, rewards, size):  # in Python's floats
        return super().advantages(torch.tensor(rewards.tolist()).double(), size)

    def loss(self, b, kl):
        batch = dict(assistant_mask=b.mask > 0, old_logprobs=b.old, advantages=b.advantages)
        batch |= dict(weights=b.mask, group_ids=torch.zeros(b.mask.shape))
        batch, options = self.f.AlignedLossInputs(**batch), dict(kl_penalty_coef=kl)
        return self.f.loss_fn(batch, b.logps, b.ref, None, options).policy_loss


class RLinf(Trainer):  # reference and policy are in the order of fsdp_actor_worker.py
    def advantages(self, rewards, size):
        ones = torch.ones(1, len(rewards), dtype=rewards.dtype)
        return self.f.compute_grpo_advantages(rewards, ones, size)[0]

    def loss(self, b, kl):
        logps, old, ref, a = (x.float() for x in (b.logps, b.old, b.ref, b.advantages))
        policy = self.f.compute_ppo_actor_loss(logps, old, 0.2, 0.2, a, b.mask > 0)[0]
        k3 = self.f.kl_penalty(ref, logps, "low_var_kl")
        return policy + kl * self.f.masked_mean(k3, b.mask > 0)


class Areno(Trainer):  # the ratio divides a probability by itself
    def advantages(self, rewards, size):
        sizes = [size] * (len(rewards) // size)
        return torch.tensor(self.f.compute_batch_group_advantages(rewards.tolist(), sizes))

    def loss(self, b, kl):
        pack = dict(response_mask=b.mask, logprobs=b.old, advantages=b.advantages)
        pack["seq_ids"] = torch.arange(len(b.rows))[:, None].expand_as(b.mask)
        pack = {f"packed_{name}": x.reshape(-1) for name, x in pack.items()}
        pack["packed_num_sequences"] = len(b.rows)
        return self.f.grpo_loss_fn(pack, b.logps.reshape(-1))[0]


class InvokeRL(Trainer):  # the first GRPO's loss, but a mean over each micro-batch's tokens
    def advantages(self, rewards, size):
        ones = torch.ones(len(rewards), 1)
        batch = Anything(group_size=size, response_mask=ones, rewards=rewards)
        return self.f.GRPO().compute_advantages(batch)[:, 0]

    def loss(self, b, kl):
        batch = Namespace(response_mask=b.mask, old_log_probs=b.old, ref_log_probs=b.ref)
        batch.rewards = torch.zeros(1)
        return self.f.GRPO(beta=kl).compute_loss(b.logps, batch, b.advantages)[0]


class Retrain(Trainer):  # no division by the standard deviation, and no clip
    def advantages(self, rewards, size):
        groups = rewards.view(-1, size).tolist()
        return torch.tensor([self.f.compute_grpo_advantages(group) for group in groups])

    def loss(self, b, kl):
        ratio = (b.logps - b.old).exp()
        return self.f._compute_policy_loss(ratio, b.advantages, b.mask, 0.0, 0.0)[0]


class Forge(Trainer):  # log-probabilities are means over samples; ratios to the reference
    def advantages(self, rewards, size):
        return self.f.compute_group_advantages(rewards, size)

    def loss(self, b, kl):
        policy, ref = ((x * b.mask).sum(1) / b.mask.sum(1) for x in (b.logps, b.ref))
        return self.f.grpo_loss(policy, ref, b.advantages[:, 0], kl_beta=kl)[0]


class Stateset(Trainer):  # each sample counts the same. The whole package can be imported
    def __init__(self, at, spec):
        super().__init__(at, spec)
        sys.path.insert(0, str(at))
        from stateset_agents.training import objectives

        self.f, self.plain = objectives, objectives.OBJECTIVES["grpo"]

    def advantages(self, rewards, size):
        groups = torch.arange(len(rewards)) // size
        return self.f.compute_advantages(rewards, groups, self.plain)

    def loss(self, b, kl):
        options = dict(logp_cur=b.logps, logp_old=b.old, logp_ref=b.ref, mask=b.mask)
        options |= dict(advantages=b.advantages[:, 0], objective=self.plain.with_(kl_coef=kl))
        return self.f.policy_loss(**options, total_rows=N).loss


class Slime(Trainer):  # each sample counts the same; the KL is k1
    eps = 1e-6

    def loss(self, b, kl):
        policy = self.f.compute_policy_loss(b.old - b.logps, b.advantages, 0.2, 0.2)[0]
        tokens = policy + kl * self.f.compute_approx_kl(b.logps, b.ref, "k1")
        return ((tokens * b.mask).sum(1) / b.mask.sum(1)).sum() / N


class Prime(Trainer):  # masks tokens whose probability has moved. The KL is to the sampler
    def advantages(self, rewards, size):
        r = rewards.view(-1, size)
        return r - r.mean(1, keepdim=True)

    def loss(self, b, kl):
        batch = Anything(trainer_logprobs=b.logps, inference_logprobs=b.old)
        batch.advantages, batch.loss_mask = b.advantages, b.mask > 0
        return self.f.default_loss_fn(batch, Namespace(**self.defaults, kl_tau=kl)).loss / N_TOKENS


class Textbook(Trainer):
    """The published objective, with a mean over each micro-batch: the study must find this."""

    def loss(self, b, kl):
        ratio, d = (b.logps - b.old).exp(), b.ref - b.logps
        gain = torch.minimum(ratio * b.advantages, ratio.clamp(0.8, 1.2) * b.advantages)
        losses = kl * (d.exp() - 1 - d) - gain
        return (losses * b.mask).sum() / b.mask.sum()


class Ours(Trainer):
    """grpo_loss, with the weights of assign_loss_weights."""

    micro_batches = "sum"

    def __init__(self, **flags):
        self.cfg = grpo.Config(max_completion_length=T, **flags)
        samples = [grpo.Sample(0, None, np.arange(n), np.zeros(n)) for n in LENGTHS]
        grpo.assign_loss_weights(samples, self.cfg)
        self.weights = torch.zeros(N, T, dtype=torch.float64)
        self.weights[MASK > 0] = torch.from_numpy(np.concatenate([s.loss_weights for s in samples]))

    def loss(self, b, kl):
        tensors = (b.logps, b.old, b.ref, b.advantages, self.weights[b.rows])
        logps, old, ref, advantages, weights = (x[b.mask > 0] for x in tensors)  # [n]
        lengths = b.mask.sum(1).int().tolist()
        cfg = dataclasses.replace(self.cfg, beta=kl)
        return grpo.grpo_loss(logps, old, ref, None, advantages, weights, cfg, lengths)[0]


def installed(folder: str, package: str) -> Path:
    """The package's folder, FOLDER/NAME. Installs the package first if needed."""
    at = Path(folder, re.split("==| at ", package)[0]).resolve()
    if not at.exists():
        if "==" not in package:
            sys.exit(f"clone {package} into {at}")
        common.install(at, package)
    return at


def largest_of_equal(trainer, size=8) -> float:
    """The largest advantage in two groups of equal rewards in float32, of 0.01, 0.02, ... 0.99."""
    groups = [torch.full((2 * size,), k / 100) for k in range(1, 100)]
    return max(trainer.advantages(r, size).abs().max().item() for r in groups)


def kind_of(advantages) -> str:
    """Which formula gives the advantages, up to an eps."""
    r = REWARDS.view(-1, G)
    known = {"r": r, "r - mean": r - r.mean(1, keepdim=True)}
    for ddof, name in enumerate(("std, n", "std, n - 1")):
        known[name] = known["r - mean"] / r.std(1, correction=ddof, keepdim=True)
    off = {name: error(advantages, formula.flatten()) for name, formula in known.items()}
    assert min(off.values()) < 1e-3
    return min(off, key=off.get)


def nearest(trainer, advantages, options: dict, kl=0.0) -> tuple:
    """Finds the flags, of `options` {words: flags}, whose gradient is nearest to the trainer's.
    Returns their words, the errors on- and off-policy, and for the wild case the gradients [N, T]
    of the trainer and of ours."""
    theirs = {case: gradient(trainer, case, WHOLE, advantages, kl) for case in CASES}
    if not all(g.any() for g in theirs.values()):
        return "", [], theirs["wild"], theirs["wild"]
    found, least = None, math.inf
    for words, flags in options.items():
        mine = {case: gradient(Ours(**flags), case, WHOLE, advantages, kl) for case in CASES}
        errors = [error(mine[case], theirs[case]) for case in ("on", "off")]
        badness = math.prod(e + 1e-9 for e in errors)
        if badness < least:
            found, least = (words, errors, theirs["wild"], mine["wild"]), badness
    if min(found[1]) > 0.01:
        return "none", *found[1:]
    return found


def shown(errors) -> str:
    words = [f"{e:.0e}".replace("0e+00", "0") if e < 0.01 else "none" for e in errors]
    return " / ".join(words)


def row_of(trainer) -> list:
    """The trainer's row of the table."""
    spec = trainer.spec
    a = torch.as_tensor(trainer.advantages(REWARDS.clone(), G)).double().flatten()  # [N]
    row = [spec["package"], kind_of(a)]

    a = a[:, None].expand(N, T)
    flags, errors, theirs, mine = nearest(trainer, a, POLICY_FLAGS)
    row += [flags, shown(errors), int((abs(mine - theirs) > 1e-6).sum())]

    whole, split = (gradient(trainer, "on", parts, a) for parts in (WHOLE, PARTS))
    cosine = torch.cosine_similarity(split.flatten(), whole.flatten(), 0).item()
    of_split = f"{error(split, whole):.2f}, {cosine:.3f}"
    if trainer.micro_batches == "none":
        of_split = "not split"

    of_kl = (a * trainer.advantage_coefficient, trainer.kl_flags, trainer.kl_coefficient)
    flags, errors, theirs, mine = nearest(trainer, *of_kl)
    no_pull = int(((theirs == 0) & (mine != 0)).sum())
    if flags in ("", "none", "k1 in reward"):
        no_pull = ""
    row += [of_split, spec["kl"], flags, shown(errors), no_pull]
    how = "two steps" if "steps" in spec else "reading"
    return [*row, f"{largest_of_equal(trainer):.2g}", how]


if __name__ == "__main__":
    args = common.arguments(__doc__, "folder")
    if args.quick:
        row = row_of(Textbook(None, dict(package="", kl="", micro_batches="mean")))
        assert row[1:6] == ["std, n - 1", "token, clip 0.2, 0.2", "0 / 0", 0, "0.48, 0.924"], row
        assert (row[7], row[9]) == ("k3, token", 0), row
        assert re.fullmatch(r"(0|\de-1\d) / (0|\de-1\d)", row[8]), row
        sys.exit()
    packages = tomllib.loads(Path(common.HERE, "trainers.toml").read_text())
    table = [packages.pop("columns")]
    for name, spec in packages.items():
        trainer = globals()[name](installed(args.folder, spec["package"]), spec)
        table.append(row_of(trainer))
    common.save(args, "trainers", [], table)
