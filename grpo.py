"""GRPO in one file: sample a group of answers to each prompt, score them, and make the answers that
beat the mean of their group more likely.

    python grpo.py                             # the bundled tiny model learns to add, on a CPU
    torchrun --nproc_per_node=2 grpo.py        # the same run, the same gradient, two processes
    torchrun --nproc_per_node=8 grpo.py --model Qwen/Qwen2.5-1.5B-Instruct --chat \\
        --train_data train.jsonl --prompt_template '{question}' --reward gsm8k

It is fine-tuning on the model's own answers, each with a weight: its advantage, which is negative
for an answer below the mean. The reward is only a number, and no gradient goes through it.

One step, in the order in which it runs (`training_loop` calls these):

    prompts_of_step    takes the next prompts from the data
    rollout            samples a group of completions for each prompt, and scores them
    add_logps          adds log-probabilities under the old policy and the reference, if needed
    assign_advantages  gives each completion its reward minus the mean reward of its group
    update             takes an optimizer step, with the gradient that `backward` adds up: for each
                       micro-batch Policy gives the log-probability of each completion token,
                       grpo_loss the loss, and PyTorch the gradient
    sampler.push       gives the new weights to the sampler

One group: four completions of one prompt have the rewards 1, 0, 0, 1. Their mean is 0.5 and their
standard deviation (with n - 1) 0.58, so the advantages are +0.87, -0.87, -0.87, +0.87. The loss of
a token is -A * exp(logp - logp.detach()), with the advantage A of its completion. Its value is -A,
and its gradient is that of -A * logp. If the four are equally long, these values add up to 0; if
the good ones are longer, to less than 0. The gradient is not 0: it makes the first and the last
completion more likely and the others less. So watch the reward and not the loss, which can be 0 in
every step of a run that learns. Had all four the same reward, their advantages would be 0, and the
group would teach nothing.

First comes the loop and what it calls, down to `update`. The helpers of these functions follow, and
then PLUMBING, which every trainer needs.

Shapes: N samples, T completion tokens (padded), L prompt and completion tokens (padded), V tokens
in the vocabulary, G samples of one prompt (a group).
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import csv
import difflib
import fcntl
import functools
import glob
import hashlib
import importlib
import importlib.util
import inspect
import json
import math
import os
import re
import shutil
import signal
import sys
import time
import typing
import unicodedata
from collections import Counter
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Literal

# Before torch is imported: idle threads that spin make a step on busy cores 5 to 30 times slower.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import numpy as np
import torch
import torch.distributed as dist
import transformers
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from transformers.modeling_layers import GradientCheckpointingLayer

from reward import Reward, call_reward, load_function, load_rewards

HERE = os.path.dirname(os.path.realpath(__file__))
RANK = int(os.environ.get("RANK", 0))  # torchrun starts one process per GPU, and sets these three
LOCAL_RANK = int(os.environ.get("LOCAL_RANK", 0))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", 1))


def gather(items: list) -> list:
    """The items of all ranks, on every rank."""
    if WORLD_SIZE == 1:
        return items
    lists = [None] * WORLD_SIZE
    dist.all_gather_object(lists, items)
    return [item for one in lists for item in one]


# ------------------------------------------------------------------------------------------------
# Records


@dataclass
class Prompt:
    ids: np.ndarray  # [P] token ids
    text: str
    row: dict  # the row of the data file
    messages: list | None = None  # the chat; None: the prompt is a plain text
    number: int = 0  # the row's. Count by it: ranks have copies of a Prompt


@dataclass(eq=False)  # compared by identity, because == on arrays gives no single bool
class Sample:
    """One completion. Arrays are [T], without padding."""

    group: int  # index of the prompt in the step; samples of the same group are compared
    prompt: Prompt
    completion_ids: np.ndarray  # with the sampled EOS: the policy also learns to stop
    # Log-probabilities of these tokens under the sampler, as it sampled; under the old policy,
    # which is the trainer's own before its first update on them (None: not needed); and under the
    # reference, a frozen model (None: no KL).
    sampler_logps: np.ndarray
    old_logps: np.ndarray | None = None
    ref_logps: np.ndarray | None = None
    # Masks, by default all True. sampled: the policy drew the token; else an environment wrote it,
    # and it is only read. in_loss: the token has a term in the loss (if its advantage is 0, only
    # that for the KL). counted: the divisor of the loss counts the token.
    sampled: np.ndarray = None
    in_loss: np.ndarray = None
    counted: np.ndarray = None
    advantages: np.ndarray = None  # by default the same for all tokens of a completion
    finish_reason: str = "stop"  # or "length": cut off
    text: str = ""  # without the EOS; a reward function gets it
    rewards: dict = field(default_factory=dict)  # name of a reward function: its value
    reward: float = math.nan  # their weighted sum; nan: no reward function applies
    failure: str = ""  # why a reward function or the environment failed
    logged: dict = field(default_factory=dict)  # metrics that a reward function logs
    extra: dict = field(default_factory=dict)  # columns that a reward function logs
    episode: typing.Any = None  # with --environment: its turns and replies

    def __post_init__(self):
        if self.sampled is None:
            self.sampled = np.ones(len(self.completion_ids), bool)
        self.reset_advantages()

    def reset_advantages(self) -> None:
        T = len(self.completion_ids)
        self.advantages = np.zeros(T)
        self.in_loss = np.ones(T, bool)
        self.counted = np.ones(T, bool)

    def append(self, ids: np.ndarray, logps: np.ndarray, sampled: bool) -> None:
        """Adds a turn of the policy, or (sampled: False) what an environment wrote."""
        self.completion_ids = np.append(self.completion_ids, ids)
        self.sampler_logps = np.append(self.sampler_logps, logps)
        self.sampled = np.append(self.sampled, np.full(len(ids), sampled))
        self.reset_advantages()

    @property
    def trained(self) -> np.ndarray:
        """The tokens that have a term in the loss."""
        return self.sampled & self.in_loss

    @property
    def total_length(self) -> int:
        return len(self.prompt.ids) + len(self.completion_ids)


# ------------------------------------------------------------------------------------------------
# The loop


def training_loop(run: Run) -> None:
    """GRPO. `run` holds all that it needs (see class Run, far below); `train` calls it."""
    cfg = run.cfg
    run.sampler.push(run.policy.model)  # the sampler starts without weights
    run.evaluate_if_due()
    while run.step < cfg.max_steps:
        step = run.step + 1

        # Sample a group of completions for each prompt, and score them. Each rank samples a part
        # of them, and gets them all.
        prompts = prompts_of_step(run.train_prompts, step, cfg)
        samples = rollout(run, prompts, SAMPLING, step, cfg.num_generations, cfg.temperature)
        run.sampler.sleep()  # the update needs the memory
        run.lap("rollout")
        if run.stop_is_requested():
            break  # the weights are still those of the last whole step

        # The loss compares the policy with the old one, which sampled, and with a reference. With
        # one optimizer step a rollout, the default, the policy still is the old one; and without
        # --beta there is no reference. (The bundled task has a small beta, 0.001.)
        if cfg.num_minibatches * cfg.num_epochs > 1:
            add_logps("old_logps", run.policy, samples, cfg)
        if run.reference is not None:
            add_logps("ref_logps", run.reference, samples, cfg)
        run.lap("logps")

        # How much better each completion is than its group; then the optimizer steps that follow.
        assign_advantages(samples, cfg)
        metrics = update(
            run.policy, run.ddp, run.optimizer, samples, step, cfg, reference=run.reference
        )
        run.lap("update")

        run.complete(step)  # a stop from here on saves this step
        run.sampler.push(run.policy.model)
        run.lap("push")
        run.log_step(samples, metrics)
        run.evaluate_if_due()
        run.save_if_due()
        if run.stop_is_requested():
            break


# ------------------------------------------------------------------------------------------------
# A step: rollout, advantages, log-probabilities, loss, gradient, update


def rollout(
    run: Run, prompts: list[Prompt], purpose: int, step: int, n: int, temperature: float
) -> list[Sample]:
    """n scored samples for each prompt, sorted by prompt. Each rank makes those of every
    WORLD_SIZE-th prompt, so that a group is on one rank; then all ranks get them all."""
    samples = []
    seeds = []  # one for each sample, so that a sample does not depend on those beside it
    for group in range(RANK, len(prompts), WORLD_SIZE):
        seed = seed_of(run.cfg, purpose, step, group)
        for i in range(n):
            samples.append(Sample(group, prompts[group], np.zeros(0, np.int64), np.zeros(0)))
            seeds.append((seed, i))

    completions = run.sampler.generate([s.prompt.ids for s in samples], seeds, temperature)
    for s, (ids, logps) in zip(samples, completions, strict=True):
        s.append(ids, logps, sampled=True)
        without_eos = ids
        if ids[-1] in run.sampler.stop_ids:
            without_eos = ids[:-1]
        else:
            s.finish_reason = "length"  # cut off; its reward counts like any other
        s.text = decode(run.tokenizer, without_eos)
    if run.player is not None:  # --environment: the turns after the first
        run.player.play(samples, seeds, run.sampler.generate, temperature)
    score(samples, run, step)  # reward.py has the reward functions: text, row -> number
    return sorted(gather(samples), key=lambda s: s.group)


def group_advantages(rewards, group_size: int, scale: str = "group", eps: float = 1e-4):
    """How much better than the mean of its group each sample is. rewards [N], the rewards of a
    group one after the other -> [N].

    scale: what r - mean is divided by. "group": the group's standard deviation + eps (DeepSeekMath,
    arXiv 2402.03300; unbiased, with eps, as in TRL). "batch": the standard deviation of all
    rewards. "none": nothing (Dr. GRPO, arXiv 2503.20783).
    A group of equal rewards gets exactly 0. A reward that is nan is ignored, and gets 0.
    """
    grouped = rewards.double().view(-1, group_size)  # [N / G, G]
    advantages = grouped - grouped.nanmean(1, keepdim=True)
    advantages = zero_where_nan_or_rounding(advantages, grouped)
    if scale == "group":
        advantages = advantages / (nanstd(grouped, 1) + eps)  # [N / G, 1]
    elif scale == "batch":
        advantages = advantages / (nanstd(grouped.view(1, -1), 1) + eps)  # [1, 1]
    return advantages.flatten().to(rewards.dtype)


def assign_advantages(samples: list[Sample], cfg: Config) -> None:
    """Fills in `advantages`. samples: those of all ranks, group after group. Another method puts
    its code here: it sets the advantages and the masks in_loss and counted, token by token."""
    rewards = torch.tensor([s.reward for s in samples], dtype=torch.float64)  # [N]
    advantages = group_advantages(rewards, cfg.num_generations, cfg.scale_rewards)  # [N]
    for s, advantage in zip(samples, advantages.tolist(), strict=True):
        s.advantages[:] = advantage
        # With mask_truncated, the reward of a cut-off completion only counts in its group's mean.
        leave_out = cfg.mask_truncated and s.finish_reason == "length"
        if leave_out or math.isnan(s.reward):
            s.in_loss[:] = False
            s.counted[:] = False


class Policy(nn.Module):
    """policy(collate(samples, device)) -> logps [N, T], the log-probability of each completion
    token, and entropy [N, T] in nats, that of the distribution at its place, without gradient.
    The values at padding mean nothing. A row of the batch is a prompt, its completion and padding:

    ids           a b c x y EOS 0        the completion x y EOS has the prompt a b c
    predictors        2 3 4              the model's output at c predicts x, that at x predicts y
    first             2                  the logits before this place are not needed

    extras/fast.py has a policy with the same numbers that is faster with language models.
    """

    def __init__(self, model, temperature: float):
        super().__init__()
        self.model = model
        self.temperature = temperature

    def forward(self, batch: dict):
        # Padding stands on the right, where causal attention lets no token see it.
        logits = logits_from(self.model, batch["ids"], batch["first"])  # [N, L - first, V]
        place = batch["predictors"] - batch["first"]  # [N, T], in these logits
        logits = logits.take_along_dim(place[:, :, None], dim=1)  # [N, T, V]
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        logps = (logits / self.temperature).log_softmax(-1)  # [N, T, V]
        entropy = torch.special.entr(logps.detach().exp()).sum(-1)  # - sum of p log p
        logps = logps.gather(-1, batch["completion"][:, :, None])  # [N, T, 1]
        return logps[:, :, 0], entropy

    def micro_batches(self, samples: list[Sample], budget: float) -> list[list[Sample]]:
        return micro_batches(samples, budget)

    def layout(self, samples: list[Sample]) -> dict:
        return padded_texts(samples)


def token_loss(logps, old_logps, ref_logps, sampler_logps, advantages, sampled, cfg: Config):
    """[N, T]: the loss of each token, and where the clip acts.

    In the first optimizer step after a rollout the policy is the old one, and the ratio is
    exp(logps - logps.detach()). It is 1, and its gradient is that of logps, because the derivative
    of exp(x) at 0 is 1. So the loss has the value -advantage, and the gradient of
    -advantage * logps.
    """
    ratio = policy_ratio(logps, old_logps, sampled, cfg)  # exp(logps - old_logps)
    surrogate = clipped_surrogate(ratio, advantages, cfg)
    is_clipped = surrogate < ratio * advantages
    if sampler_logps is not None and cfg.tis_cap > 0:
        # The sampler has the policy's weights but other kernels, so its probabilities differ a bit.
        # Truncated importance sampling (TIS) weighs each token by p_trainer / p_sampler, so that a
        # token which the sampler draws too often counts less.
        weight = (old_logps - sampler_logps).detach().exp()
        surrogate = surrogate * weight.clamp(max=cfg.tis_cap)
    loss = -surrogate
    if ref_logps is not None and cfg.kl_in == "loss" and cfg.beta > 0:
        kl = kl_estimate(logps, ref_logps, old_logps, cfg.kl_estimator)
        loss = loss + cfg.beta * kl
    return loss, is_clipped


def clipped_surrogate(ratio, advantages, cfg: Config):
    """[N, T]: ratio * advantage, what the policy gains by each token, but clipped (PPO, arXiv
    1707.06347, eq. 7). In the first optimizer step after a rollout the ratio is 1, and nothing is
    clipped. Later there is no gradient

    where the advantage is positive and the ratio above 1 + clip_high: more likely than is safe
    where the advantage is negative and the ratio below 1 - clip_low: less likely than is safe

    A ratio that went the wrong way, such as a small one with a positive advantage, keeps its
    gradient.
    """
    clipped_ratio = ratio.clamp(1 - cfg.clip_low, 1 + cfg.clip_high)
    return torch.minimum(ratio * advantages, clipped_ratio * advantages)


def grpo_loss(
    logps,  # [N, T]
    old_logps,  # [N, T]
    ref_logps,  # [N, T]; None: no KL term
    sampler_logps,  # [N, T]; None: the sampler's probabilities are not corrected
    advantages,  # [N] or [N, T]
    mask,  # [N, T], the tokens in the loss
    cfg: Config,
    n_tokens: int,  # in the whole optimizer step, over all micro-batches and ranks
    n_sequences: int,  # likewise
    sampled=None,  # [N, T], the tokens that the policy sampled; None: those of mask
    counted=None,  # [N, T], the tokens that a completion's length counts; None: those of mask
):
    """The loss of one micro-batch: the SUM over its tokens, divided by a count of the WHOLE
    optimizer step. So the losses of any micro-batches and ranks add up to that of the step. (A mean
    over each micro-batch would give the tokens of a small one more weight.)

    Where nothing was sampled the inputs may hold anything, even inf and nan.
    Returns (loss, stats); stats are sums over the tokens in the loss.
    """
    mask = mask.bool()
    sampled = mask if sampled is None else sampled.bool()
    counted = mask if counted is None else counted.bool()
    if advantages.dim() == 1:
        advantages = advantages[:, None].expand_as(logps)
    advantages = zero_outside(sampled, advantages.to(logps.dtype))
    logps = zero_outside(sampled, logps)
    old_logps = zero_outside(sampled, old_logps)
    ref_logps = zero_outside(sampled, ref_logps)
    sampler_logps = zero_outside(sampled, sampler_logps)

    advantages = advantages_less_kl(advantages, old_logps, ref_logps, cfg)
    losses, is_clipped = token_loss(
        logps, old_logps, ref_logps, sampler_logps, advantages, sampled, cfg
    )
    if cfg.loss_reduction == "token":
        losses = losses / n_tokens  # each token counts the same (DAPO, arXiv 2503.14476)
    elif cfg.loss_reduction == "sequence":
        length = (counted & sampled).sum(1, keepdim=True).clamp(min=1)  # [N, 1]
        losses = losses / length  # the mean over the completion (the original GRPO)
        losses = losses / n_sequences  # each completion counts the same
    else:  # by a constant, so that no length has an influence (Dr. GRPO)
        losses = losses / (n_sequences * cfg.max_completion_length)
    loss = zero_outside(mask, losses).sum()

    stats = {"tokens": mask.sum(), "clip_ratio/region_mean": (is_clipped & mask).sum()}
    if ref_logps is not None:
        k3 = kl_estimate(logps, ref_logps, logps, "k3").detach()
        stats["kl"] = zero_outside(mask, k3).sum()
        stats["kl_k1"] = zero_outside(mask, (logps - ref_logps).detach()).sum()
    return loss, stats


def backward(policy, ddp, minibatch: list[Sample], cfg: Config) -> dict:
    """The gradient of one optimizer step, in micro-batches. Returns sums for the log: over all
    ranks, and over the tokens of the samples that have a gradient."""
    lengths = [int((s.sampled & s.counted).sum()) for s in minibatch]
    n_tokens = max(1, sum(lengths))
    n_sequences = max(1, np.count_nonzero(lengths))
    teaching = [s for s in minibatch if has_gradient(s, cfg)]
    teaching = teaching or minibatch[:1]  # no gradient: one pass for check_gap, and for DDP
    sums = 0
    for batch, is_last in batches_of_rank(policy, teaching, cfg):
        # DDP averages the gradients over the ranks in the last backward only.
        ddp.require_backward_grad_sync = is_last
        with autocast(cfg, policy.model.device):
            logps, entropy = ddp(batch)  # [N, T]
        # Without old_logps this is the first optimizer step: the policy is the one that sampled.
        old_logps = batch.get("old_logps", logps.detach())
        loss, stats = grpo_loss(
            logps,
            old_logps,
            batch.get("ref_logps"),
            batch["sampler_logps"],
            batch["advantages"],
            batch["trained"],
            cfg,
            n_tokens,
            n_sequences,
            batch["sampled"],
            batch["counted"],
        )
        # DDP takes the mean over the ranks. The loss is divided by the count of all ranks already,
        # so their sum is right: the mean times the number of ranks.
        (loss * WORLD_SIZE).backward()
        stats["loss"] = loss.detach()
        stats["entropy"] = zero_outside(batch["trained"], entropy).sum()
        gap = (old_logps - batch["sampler_logps"]).abs()
        stats["sampler_gap"] = zero_outside(batch["sampled"], gap).sum()
        stats["sampled_tokens"] = batch["sampled"].sum()
        # The sums stay on the device, so that no pass waits for them.
        sums = sums + torch.stack([value.double() for value in stats.values()])
    if WORLD_SIZE > 1:
        dist.all_reduce(sums)
    return dict(zip(stats, sums.tolist(), strict=True))


def update(
    policy,
    ddp,  # the policy inside DistributedDataParallel; in a single process the policy itself
    optimizer,
    samples: list[Sample],  # all ranks have the same
    step: int,
    cfg: Config,
    reference=None,
) -> dict:
    """All optimizer steps of a rollout, by default one. Returns metrics."""
    sums = Counter()
    norms = []
    taken = 0
    number = (step - 1) * cfg.num_minibatches * cfg.num_epochs  # optimizer steps before this one
    for minibatch in minibatches(samples, step, cfg):
        learning_rate = learning_rate_at(number, cfg)
        number += 1
        for parameters in optimizer.param_groups:
            parameters["lr"] = learning_rate
        optimizer.zero_grad(set_to_none=WORLD_SIZE == 1)  # DDP keeps them in its own buckets
        minibatch_sums = backward(policy, ddp, minibatch, cfg)
        if not norms:
            check_gap(minibatch_sums, cfg)  # before a weight changes
        sums.update(minibatch_sums)  # a Counter adds
        norm = nn.utils.clip_grad_norm_(ddp.parameters(), cfg.max_grad_norm or math.inf)
        norms.append(norm.item())  # before clipping
        if has_signal(minibatch, policy, reference, cfg) and math.isfinite(norms[-1]):
            optimizer.step()
            taken += 1
    optimizer.zero_grad(set_to_none=WORLD_SIZE == 1)

    metrics = dict(learning_rate=learning_rate, optimizer_steps=taken)
    metrics["skipped_steps"] = int(np.sum(~np.isfinite(norms)))
    metrics["grad_norm"] = float(np.mean(norms))
    metrics["loss"] = sums.pop("loss") / len(norms)
    tokens = sums.pop("tokens")
    metrics["sampler_gap"] = sums.pop("sampler_gap") / max(1, sums.pop("sampled_tokens"))
    if tokens > 0:
        metrics |= {name: value / tokens for name, value in sums.items()}
    return metrics


# ------------------------------------------------------------------------------------------------
# Sampling: token ids in, token ids and their log-probabilities out

# Every random number comes from a generator seeded with (seed, purpose, step, number). So nothing
# depends on the number of ranks, and a resumed run has no generator to restore. Purposes:
SAMPLING = 0  # completions; number: the prompt within the step
ORDER = 0  # order of the data; step: always 0, and steps that sample begin at 1; number: the epoch
EVAL = 1  # completions of an eval; number: the prompt
MINIBATCHES = 4  # order of a rollout's samples; number: the epoch (2 and 3 are free)


def generator(cfg: Config, purpose: int, step: int, number: int = 0) -> np.random.Generator:
    return np.random.default_rng((cfg.seed, purpose, step, number))


def seed_of(cfg: Config, purpose: int, step: int, number: int) -> int:
    sequence = np.random.SeedSequence((cfg.seed, purpose, step, number))
    return int(sequence.generate_state(1, np.uint64)[0] >> 2)  # 62 bits fit every sampler's int


def prompts_of_step(prompts: list[Prompt], step: int, cfg: Config) -> list[Prompt]:
    """The next num_prompts, in an order that is shuffled anew in every epoch."""
    chosen = []
    for i in range((step - 1) * cfg.num_prompts, step * cfg.num_prompts):
        epoch, place = divmod(i, len(prompts))
        if not chosen or place == 0:  # the first prompt of the step, or of an epoch
            order = generator(cfg, ORDER, 0, epoch).permutation(len(prompts))
        chosen.append(prompts[order[place]])
    return chosen


class HFSampler:
    """Samples with the policy's own model: slow beside vLLM, but it needs nothing else."""

    BATCH = 256  # completions that are sampled together

    def __init__(self, model, stop_ids: list[int], cfg: Config):
        self.model = model
        self.stop_ids = stop_ids
        self.cfg = cfg

    def push(self, model) -> None:
        """Nothing to do here and in the next two: model and memory are the trainer's own."""

    def sleep(self) -> None: ...

    def close(self) -> None: ...

    def generate(
        self, prompts: list[np.ndarray], seeds: list[tuple], temperature: float, limits=None
    ) -> list[tuple]:
        """One completion of each prompt: its ids, and their log-probabilities after the
        temperature, both [T]. Temperature 0 is greedy. limits: the most tokens of each."""
        if limits is None:
            limits = [self.cfg.max_completion_length] * len(prompts)
        completions = {}
        order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))  # pads least
        while order:
            chosen = order[: self.BATCH]
            if self.model._is_stateful:  # recurrent layers see padding: prompts of one length
                chosen = [i for i in chosen if len(prompts[i]) == len(prompts[chosen[0]])]
            order = order[len(chosen) :]
            tokens, logps = self.sample_batch(
                [prompts[i] for i in chosen], [seeds[i] for i in chosen], temperature, limits
            )
            for place, i in enumerate(chosen):
                length = completion_length(tokens[place], self.stop_ids, limits[i])
                completions[i] = (tokens[place, :length], logps[place, :length])
        return [completions[i] for i in range(len(prompts))]

    @torch.no_grad()
    @torch.compiler.set_stance("force_eager")  # the cache grows: every length would be compiled
    def sample_batch(self, prompts, seeds, temperature: float, limits: list[int]) -> tuple:
        """Tokens and log-probabilities, [N, T], until every completion has stopped."""
        device = self.model.device
        stop_ids = torch.tensor(self.stop_ids, device=device)
        randoms = [np.random.default_rng(seed).random(max(limits)) for seed in seeds]
        randoms = torch.tensor(np.array(randoms), device=device)  # [N, T], float64
        ids = padded(prompts, side="left").to(device)  # [N, P]
        mask = padded([np.ones_like(p) for p in prompts], side="left").to(device)  # [N, P]
        has_stopped = torch.zeros(len(prompts), dtype=torch.bool, device=device)  # [N]
        cache = None
        tokens = []
        logps = []
        self.model.eval()
        with autocast(self.cfg, device, cache=True):
            while len(tokens) < max(limits) and not has_stopped.all():
                positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
                out = self.model(
                    ids,
                    attention_mask=mask,
                    position_ids=positions,
                    past_key_values=cache,
                    use_cache=True,
                )
                if "past_key_values" not in out:
                    why = "this model gives no past_key_values in transformers"
                    raise TrainingError(f"--rollout hf: {why}; --rollout vllm may know it")
                cache = out.past_key_values
                logits = out.logits[:, -1]  # [N, V], of the next token
                random = randoms[:, len(tokens), None]  # [N, 1]
                ids, logp = draw(logits, temperature, random)  # [N, 1] both
                tokens.append(ids)
                logps.append(logp)
                has_stopped = has_stopped | torch.isin(ids[:, 0], stop_ids)
                mask = torch.cat([mask, torch.ones_like(ids)], 1)
        return torch.cat(tokens, 1).cpu().numpy(), torch.cat(logps, 1).cpu().numpy()


def draw(logits, temperature: float, random) -> tuple:
    """logits [N, V], random numbers in [0, 1) [N, 1] -> one token of each row and its
    log-probability, [N, 1] both."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if temperature == 0:
        logps = logits.log_softmax(-1)
        token = logps.argmax(-1, keepdim=True)
    else:  # the first token at which the cumulative probability exceeds the random number
        logps = (logits / temperature).log_softmax(-1)  # [N, V]
        cumulative = logps.double().exp().cumsum(-1)  # [N, V]
        point = random * cumulative[:, -1:]  # the last entry is 1 but for rounding
        token = torch.searchsorted(cumulative, point, right=True)
        token = token.clamp(max=logits.shape[-1] - 1)  # if the logits are nan
    return token, logps.gather(-1, token)


def completion_length(tokens: np.ndarray, stop_ids: list[int], limit: int) -> int:
    """Up to and with the first token that stops."""
    stops = np.flatnonzero(np.isin(tokens[:limit], stop_ids))
    if len(stops) > 0:
        return stops[0] + 1
    return min(limit, len(tokens))


def decode(tokenizer, ids: np.ndarray) -> str:
    """Special tokens stay: a reward may look for <think>. Some models have more ids than their
    tokenizer; these have no text."""
    return tokenizer.decode(ids[ids < len(tokenizer)])


# ------------------------------------------------------------------------------------------------
# Rewards and advantages


def score(samples: list[Sample], run: Run, step: int) -> None:
    """Fills in the rewards. What fails counts as 0, and is said on the screen."""
    cfg = run.cfg
    scored = [s for s in samples if not s.failure]  # the others: their environment failed
    texts = [s.text for s in scored]
    rows = [reward_row(s, step, cfg) for s in scored]
    for reward in run.rewards:
        for s in samples:
            s.rewards[reward.name] = 0.0
        values, failures, metrics, extra = call_reward(reward, texts, rows, cfg.call_timeout)
        for i, s in enumerate(scored):
            s.rewards[reward.name] = values[i]
            s.failure = s.failure or failures.get(i, "")
            s.logged |= metrics
            s.extra |= {column: entries[i] for column, entries in extra.items()}

    for s in samples:
        weighted = [reward.weight * s.rewards[reward.name] for reward in run.rewards]
        if not np.isnan(weighted).all():
            s.reward = float(np.nansum(weighted))
            if s.finish_reason == "length" and cfg.non_stop_reward is not None:
                s.reward = cfg.non_stop_reward
    if run.player is not None:
        run.player.finish(samples)


def reward_row(s: Sample, step: int, cfg: Config) -> dict:
    """What a reward function gets beside the completion: the data row, and what the trainer knows.
    reward.py says how functions in TRL's form get it."""
    row = dict(s.prompt.row)
    if s.episode is not None:
        row |= s.episode.reward_columns()
    return row | dict(
        prompt_text=s.prompt.text,
        prompt_messages=s.prompt.messages,
        completion_ids=s.completion_ids.tolist(),
        completion_length=int(s.sampled.sum()),
        max_completion_length=cfg.max_completion_length,
        finish_reason=s.finish_reason,
        trainer_state=dict(global_step=step - 1, max_steps=cfg.max_steps),
    )


def zero_where_nan_or_rounding(advantages, grouped):
    """0.1 + 0.2 and 0.3 are the same reward: their difference must not become a signal."""
    largest = grouped.nan_to_num(0.0).abs().amax(1, keepdim=True)  # [N / G, 1]
    rounding = 4 * torch.finfo(torch.float64).eps * largest
    advantages = advantages.nan_to_num(0.0)
    is_signal = advantages.abs().amax(1, keepdim=True) > rounding
    return torch.where(is_signal, advantages, 0.0)


def nanstd(x, dim: int):
    """The unbiased standard deviation of the entries that are no nan; 0 for fewer than two."""
    count = (~x.isnan()).sum(dim, keepdim=True)
    squares = (x - x.nanmean(dim, keepdim=True)).square().nansum(dim, keepdim=True)
    return (squares / (count - 1).clamp(min=1)).sqrt()


def mean_and_std(values) -> tuple:
    """Without the values that are nan; the mean is nan if no other is left."""
    x = torch.tensor(values, dtype=torch.float64)
    return x.nanmean().item(), nanstd(x, 0).item()


# ------------------------------------------------------------------------------------------------
# Objective


def policy_ratio(logps, old_logps, sampled, cfg: Config):
    """[N, T]: policy / old policy, the one that sampled. Until the optimizer takes a step the two
    are the same. Then the ratio is 1, and its gradient is that of the log-probability."""
    log_ratio = logps - old_logps  # [N, T]
    if cfg.ratio_level == "sequence":
        # One ratio for the completion, the geometric mean of those of its tokens (GSPO, arXiv
        # 2507.18071, eq. 7), with the gradient of each token's own log-probability (eq. 14).
        length = sampled.sum(1, keepdim=True).clamp(min=1)
        mean = log_ratio.sum(1, keepdim=True) / length  # [N, 1]; / length: the geometric mean
        log_ratio = straight_through(mean, logps)
    return capped(log_ratio).exp()


def kl_estimate(logps, ref_logps, old_logps, estimator: str):
    """Per-token estimates of KL(policy || reference), from tokens that the old policy sampled: all
    [N, T]. With d = log(policy / reference) and w = policy / old policy:

        estimator             its gradient, as a loss
        k1 = d                0 on average: k1 does not hold the policy
        k2 = d^2 / 2          that of the KL, as long as w is 1
        k3 = exp(-d) - 1 + d  that of KL(reference || policy), which fades far from the reference
        k4 = w k1             that of the KL
        wk3 = w k3            that of the KL, with less noise; the default

    k1 to k3 are Schulman's (joschu.net/blog/kl-approx.html), wk3 is that of DeepSeek-V3.2 (arXiv
    2512.02556). studies/kl_estimators.py measures these claims.
    """
    d = logps - ref_logps
    w = capped(logps - old_logps).exp()
    if estimator == "k1":
        return d
    if estimator == "k2":
        return d.square() / 2
    if estimator == "k4":
        return w * d
    k3 = torch.expm1(capped(-d)) + d
    if estimator == "k3":
        return k3
    # The derivative of w k3 by logps is w d, since the terms with exp(-d) cancel. Autograd would
    # add these up in float32, and from d = -20 on their rounding error is as large as d.
    return straight_through(w * k3, logps, slope=(w * d).detach())


def straight_through(value, x, slope=1.0):
    """Forward: `value`. Backward: the gradient of slope * x, with slope as a constant."""
    return value.detach() + slope * (x - x.detach())


def capped(exponent):
    """At most 20, so that products of exponentials fit float32. Beyond 20 the gradient goes on,
    where that of clamp would be 0."""
    return straight_through(exponent.clamp(max=20), exponent)


def advantages_less_kl(advantages, old_logps, ref_logps, cfg: Config):
    """[N, T]. With --kl_in reward the KL is a cost: each token pays beta * k1 for itself and for
    the later tokens of its completion, because these depend on it."""
    if ref_logps is None or cfg.kl_in == "loss":
        return advantages
    k1 = kl_estimate(old_logps, ref_logps, old_logps, "k1").detach()
    return advantages - cfg.beta * k1.flip(1).cumsum(1).flip(1)  # the sum from t on


def zero_outside(mask, x):
    """x where the mask is True, elsewhere 0: not x * mask, which would keep nan."""
    if x is None:
        return None
    return torch.where(mask, x, 0)


# ------------------------------------------------------------------------------------------------
# Batches: samples become tensors


def micro_batches(samples: list[Sample], budget: float) -> list[list[Sample]]:
    """Samples of similar length together, at most `budget` tokens when they are padded."""
    batches = []
    for s in sorted(samples, key=lambda s: -s.total_length):
        if not batches or (len(batches[-1]) + 1) * batches[-1][0].total_length > budget:
            batches.append([])
        batches[-1].append(s)  # the first sample of a batch is its longest
    return batches


def padded(arrays: list[np.ndarray], side: str = "right") -> torch.Tensor:
    """[N, length of the longest], filled with zeros."""
    tensors = [torch.from_numpy(array) for array in arrays]
    return nn.utils.rnn.pad_sequence(tensors, batch_first=True, padding_side=side)


def padded_texts(samples: list[Sample]) -> dict:
    """The texts of a micro-batch. Policy says what is in it."""
    completion = padded([s.completion_ids for s in samples])  # [N, T]
    ids = padded([np.append(s.prompt.ids, s.completion_ids) for s in samples])  # [N, L]
    last = torch.tensor([len(s.prompt.ids) - 1 for s in samples])  # [N], end of the prompt
    predictors = last[:, None] + torch.arange(completion.shape[1])  # [N, T]
    predictors = predictors.clamp(max=ids.shape[1] - 1)  # at padding any place will do
    return dict(ids=ids, completion=completion, predictors=predictors, first=int(last.min()))


def collate(samples: list[Sample], device: torch.device, layout=padded_texts) -> dict:
    """The tensors of a micro-batch: its texts, and what the loss needs of their tokens. To give the
    loss another field of Sample, add its name here."""
    batch = layout(samples)
    for name in ("trained", "sampled", "counted", "advantages", "sampler_logps"):
        batch[name] = padded([getattr(s, name) for s in samples])  # [N, T]
    for name in ("old_logps", "ref_logps"):
        if samples[0].__dict__[name] is not None:
            batch[name] = padded([getattr(s, name) for s in samples])  # [N, T]
    for name, value in batch.items():
        if isinstance(value, torch.Tensor):
            batch[name] = value.to(device, non_blocking=True)  # beside what the GPU does
    return batch


def batches_of_rank(policy, samples: list[Sample], cfg: Config):
    """Yields this rank's micro-batches, and whether it is the last. All ranks get equally many: DDP
    needs a backward of every rank, so a rank that is left over in the last round gets an empty one.
    """
    budget = min(cfg.micro_batch_tokens, sum(s.total_length for s in samples) / WORLD_SIZE)
    batches = policy.micro_batches(samples, budget)
    for start in range(0, len(batches), WORLD_SIZE):
        dealt = batches[start : start + WORLD_SIZE]
        batch = collate(dealt[RANK % len(dealt)], policy.model.device, policy.layout)
        if RANK >= len(dealt):
            batch["trained"].zero_()
            batch["sampled"].zero_()
        yield batch, start + WORLD_SIZE >= len(batches)


@torch.no_grad()
def add_logps(name: str, policy, samples: list[Sample], cfg: Config) -> None:
    """Fills in old_logps or ref_logps: each rank computes a part, and every rank gets them all."""
    numbers = {s: number for number, s in enumerate(samples)}
    results = []
    device = policy.model.device
    budget = min(cfg.micro_batch_tokens, sum(s.total_length for s in samples) / WORLD_SIZE)
    for micro_batch in policy.micro_batches(samples, budget)[RANK::WORLD_SIZE]:
        with autocast(cfg, device):
            logps, _ = policy(collate(micro_batch, device, policy.layout))  # [N, T]
        for s, row in zip(micro_batch, logps.cpu().numpy(), strict=True):
            results.append((numbers[s], row[: len(s.completion_ids)]))
    for number, row in gather(results):
        setattr(samples[number], name, row)


# ------------------------------------------------------------------------------------------------
# Optimizer steps


def minibatches(samples: list[Sample], step: int, cfg: Config):
    """num_epochs passes over the samples, each in num_minibatches parts of nearly equal size."""
    for epoch in range(cfg.num_epochs):
        order = generator(cfg, MINIBATCHES, step, epoch).permutation(len(samples))
        for part in np.array_split(order, cfg.num_minibatches):
            yield [samples[i] for i in part]


def learning_rate_at(number: int, cfg: Config) -> float:
    """The learning rate of optimizer step `number` of the run, from 0."""
    if number < cfg.warmup_steps:
        return cfg.learning_rate * (number + 1) / cfg.warmup_steps
    total = cfg.max_steps * cfg.num_minibatches * cfg.num_epochs
    progress = (number - cfg.warmup_steps) / max(1, total - cfg.warmup_steps)  # in [0, 1)
    if cfg.lr_schedule == "linear":
        return cfg.learning_rate * (1 - progress)
    if cfg.lr_schedule == "cosine":
        return cfg.learning_rate * (1 + math.cos(math.pi * progress)) / 2
    return cfg.learning_rate


def has_gradient(s: Sample, cfg: Config) -> bool:
    """Whether the loss has a gradient in any token of the sample. If not, it needs no pass."""
    if cfg.beta > 0:
        return s.trained.any()
    return s.advantages[s.trained].any()


def has_signal(minibatch: list[Sample], policy, reference, cfg: Config) -> bool:
    """Whether an optimizer step has anything to follow: an advantage, or a KL to the reference.
    Without, Adam would still step: by its momentum, or, while the policy is the reference and the
    KL's gradient is mere rounding, by that, which it scales to a full step."""
    if any(s.advantages[s.trained].any() for s in minibatch):
        return True
    pulls = any(has_gradient(s, cfg) for s in minibatch)
    return pulls and not same_weights(policy, reference)


def check_gap(sums: dict, cfg: Config) -> None:
    """Sampler and trainer have the same weights. If their log-probabilities differ by more than
    rounding, the samples are not the policy's, and what is learned from them is wrong."""
    gap = sums["sampler_gap"] / max(1, sums["sampled_tokens"])
    limit = cfg.max_sampler_gap
    if limit == 0:
        limit = 0.1 if cfg.dtype == "bfloat16" else 1e-4
    if not gap <= limit:  # or the gap is nan
        raise TrainingError(
            f"the sampler's log-probabilities are {gap:.2g} off on average, more than {limit:g}: "
            "it has other weights, or another prompt, temperature or dtype. --rollout hf takes the "
            "trainer's own model"
        )


# ------------------------------------------------------------------------------------------------
# Eval


def evaluate(run: Run, step: int) -> dict:
    """The mean of the first reward over the eval data, greedy; with --eval_samples also pass@k."""
    values, length = eval_rewards(run, step, 1, 0.0)
    mean, std = mean_and_std(values[:, 0])
    metrics = dict(eval_accuracy=mean, eval_stderr=std / math.sqrt(max(1, len(values))))
    metrics["eval_length"] = length
    k = run.cfg.eval_samples
    if k > 0:
        values, _ = eval_rewards(run, step, k, run.cfg.temperature)
        metrics["eval_pass@1"] = float((values > 0.5).mean())
        metrics[f"eval_pass@{k}"] = float((values > 0.5).any(1).mean())
    return metrics


def eval_rewards(run: Run, step: int, n: int, temperature: float) -> tuple:
    """The first reward of n completions of each eval prompt to which it applies, [prompts, n], and
    the mean length."""
    samples = rollout(run, run.eval_prompts, EVAL, step, n, temperature)
    check_sampler(run, samples[:8], temperature)
    name = run.rewards[0].name
    values = np.array([s.rewards[name] for s in samples]).reshape(-1, n)
    length = float(np.mean([s.sampled.sum() for s in samples]))
    return values[~np.isnan(values).any(1)], length


def check_sampler(run: Run, samples: list[Sample], temperature: float) -> None:
    """An eval is wrong, too, if the sampler has other weights than the policy."""
    policy = copy.copy(run.policy)
    policy.temperature = temperature or 1.0  # greedy log-probabilities are those at 1
    add_logps("old_logps", policy, samples, run.cfg)
    gaps = np.concatenate([np.abs(s.old_logps - s.sampler_logps)[s.sampled] for s in samples])
    check_gap(dict(sampler_gap=gaps.sum(), sampled_tokens=len(gaps)), run.cfg)


# ------------------------------------------------------------------------------------------------
# PLUMBING: what every trainer needs. Flags, errors, ranks, data, models, vLLM, the run on disk
# ------------------------------------------------------------------------------------------------


@dataclass
class Config:
    # model and data
    model: str = ""  # policy: directory or hub name; empty: the bundled task
    reference: str = ""  # what the KL is measured from; empty: the model as it starts
    lora_rank: int = 0  # adapters' rank; 0: all weights learn. Adapters want 10 x learning_rate
    train_data: str = ""  # JSONL, JSON, CSV, parquet, hub name:config:split, file.py:function
    eval_data: str = ""  # held-out rows, same formats; empty: no eval
    reward: str = "answer"  # name[:weight],... or file.py:function; the first is the eval accuracy
    call_timeout: float = 10.0  # seconds for one call of a reward or an environment
    environment: str = ""  # file.py:name, plays turns with the policy (extras/agents.py)
    max_turns: int = 8  # turns of the policy in an episode with --environment
    prompt_template: str = ""  # made of columns: "{question}\nThink first."; empty: column prompt
    chat: bool = False  # string prompts become a user's turn in the chat template
    system_prompt: str = ""  # message before every prompt; implies --chat
    chat_template_kwargs: str = ""  # JSON for the chat template: '{"enable_thinking": false}'
    max_prompt_length: int = 512  # tokens; longer prompts are left out

    # rollout
    num_prompts: int = 32  # prompts per step, over all ranks
    num_generations: int = 8  # completions per prompt: the group, G
    max_completion_length: int = 512  # tokens; a completion that reaches this is cut off
    temperature: float = 1.0  # for sampling, and for all log-probabilities
    rollout: Literal["auto", "vllm", "hf"] = "auto"  # auto: vllm if installed, hf for small models
    vllm_gpu_memory_utilization: float = 0.3  # share of the GPU for vLLM while it samples
    tis_cap: float = 2.0  # cap on a token's weight p_trainer / p_sampler (TIS); 0: no weights
    max_sampler_gap: float = 0.0  # nats; a larger gap to the sampler ends the run; 0: by dtype

    # objective
    scale_rewards: Literal["group", "batch", "none"] = "group"  # whose std divides advantages
    loss_reduction: Literal["token", "sequence", "constant"] = "token"  # how losses are averaged
    kl_estimator: Literal["k1", "k2", "k3", "k4", "wk3"] = "wk3"  # KL term of the loss
    kl_in: Literal["loss", "reward"] = "loss"  # where the KL goes; in the reward: k1 only
    beta: float = 0.0  # KL coefficient; 0: no reference model
    clip_low: float = 0.2  # the ratio is clipped below 1 - clip_low
    clip_high: float = 0.28  # the ratio is clipped above 1 + clip_high
    ratio_level: Literal["token", "sequence"] = "token"  # ratio of each token, or sequence (GSPO)
    mask_truncated: bool = False  # leave cut-off completions out of the loss
    non_stop_reward: float | None = None  # reward of a cut-off completion; None: as scored

    # update
    num_minibatches: int = 1  # optimizer steps per pass over a rollout
    num_epochs: int = 1  # passes over a rollout
    micro_batch_tokens: int = 0  # tokens per forward and backward; 0: 2048, on cuda by free memory
    learning_rate: float = 1e-6  # AdamW, on float32 parameters
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"  # after the warmup
    warmup_steps: int = 0  # optimizer steps until the learning rate is full; GRPO needs none
    weight_decay: float = 0.0  # for matrices, not for norms and biases
    max_grad_norm: float = 1.0  # the gradient's norm is clipped to this; 0: off
    max_steps: int = 100  # rollouts
    gradient_checkpointing: bool = False  # less memory, a third more time
    fast: bool = True  # extras/fast.py where it is faster, and if it is there
    compile: bool = False  # torch.compile each layer: minutes at the start, faster steps
    dtype: Literal["auto", "float32", "bfloat16", "float64"] = "auto"  # for matrix products
    device: Literal["auto", "cpu", "cuda"] = "auto"  # auto: cuda, else cpu
    seed: int = 0  # every random number is a function of the seed and the step

    # output
    out_dir: str = "out"  # directory of the run; out: the first free one of out, out.1, ...
    eval_every: int = 10  # steps between evals; 0: only before the first and after the last step
    eval_samples: int = 0  # completions per eval prompt, for pass@k; 0: greedy only
    save_every: int = 10  # steps between checkpoints; 0: only the last and the best
    keep: int = 2  # newest checkpoints kept, beside the best by eval accuracy; 0: all
    resume: bool = False  # continue the run in --out_dir; without --out_dir the newest run
    log_completions: int = 64  # samples per step in completions.jsonl
    report_to: Literal["none", "wandb", "trackio"] = "none"  # dashboard


BUNDLED = dict(  # "R1 in miniature", if no --model is given; given flags win
    model=f"{HERE}/sample_data/model",
    train_data=f"{HERE}/sample_data/train.jsonl",
    eval_data=f"{HERE}/sample_data/eval.jsonl",
    max_completion_length=40,
    learning_rate=3e-4,
    micro_batch_tokens=1024,
    beta=0.001,
    max_steps=20,
    eval_every=5,
)

LOWEST = dict(num_generations=2, temperature=1e-6, call_timeout=1e-3, vllm_gpu_memory_utilization=0)
LOWEST |= dict.fromkeys(("num_prompts", "max_prompt_length", "max_completion_length"), 1)
LOWEST |= dict.fromkeys(("num_minibatches", "num_epochs", "max_turns"), 1)
HIGHEST = dict(clip_low=1, vllm_gpu_memory_utilization=1)


class ConfigError(Exception):
    """The user's mistake: one line on the screen, exit code 2."""


class TrainingError(Exception):
    """The run cannot go on: one line on the screen, exit code 1."""


@contextlib.contextmanager
def blame(what: str):
    """Whatever fails inside is a mistake in `what`: a flag, a file, a row."""
    try:
        yield
    except TrainingError:
        raise
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{what}: {one_line(error)}") from error


def one_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    if "validation error" in lines[0]:  # pydantic's reason comes later
        return " ".join(line.strip() for line in lines)[:500]
    return lines[0]


def need(fine, flag: str, why: str) -> None:
    if not fine:
        raise ConfigError(f"--{flag}: {why}")


def say(text: str) -> None:
    if RANK == 0:
        with contextlib.suppress(OSError):  # a closed pipe or a full disk ends no run
            print(text, flush=True)


def parse_flags(argv: list[str] | None) -> Config:
    """Given flags win over those of the run that --resume continues, and over BUNDLED."""

    def refuse(message: str):
        raise ConfigError(message)

    parser = argparse.ArgumentParser(allow_abbrev=False, argument_default=argparse.SUPPRESS)
    parser.error = refuse
    parser.print_help = lambda: print(__doc__, inspect.getsource(Config), sep="\n")
    for f in fields(Config):
        options = dict(type=type(f.default))
        if f.default is None:
            options = dict(type=float)
        if isinstance(f.default, bool):  # --chat, --chat true, --chat false
            options = dict(type=true_or_false, nargs="?", const=True)
        parser.add_argument(f"--{f.name}", **options)
    known, unknown = parser.parse_known_args(argv)
    given = vars(known)
    if unknown:
        names = [f"--{f.name}" for f in fields(Config)]
        closest = difflib.get_close_matches(unknown[0], names, n=1, cutoff=0)[0]
        refuse(f"unknown flag {unknown[0]}; did you mean {closest}? See --help")
    if given.get("resume"):
        out_dir = given.get("out_dir") or newest_run()
        with blame(f"--resume: no run in {out_dir}"):
            saved = json.loads(Path(out_dir, "config.json").read_text())
            return Config(**saved | given | dict(out_dir=out_dir))
    if given.get("model"):
        return Config(**given)
    if given.get("train_data"):
        given.setdefault("eval_data", "")  # the bundled eval is another task
    return Config(**BUNDLED | given | dict(model=BUNDLED["model"]))


def true_or_false(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise ValueError
    return text.lower() == "true"


def newest_run() -> str:
    runs = glob.glob("out*/config.json")
    return os.path.dirname(max(runs, key=os.path.getmtime, default="out/"))


def check_flags(cfg: Config) -> None:
    """Refuses impossible values before anything is loaded or written."""
    for name, kind in typing.get_type_hints(Config).items():
        value = getattr(cfg, name)
        choices = [choice for choice in typing.get_args(kind) if isinstance(choice, str)]
        if choices:
            need(value in choices, name, f"{value} is none of {', '.join(choices)}")
        if kind in (int, float):
            low, high = LOWEST.get(name, 0), HIGHEST.get(name, 1e300)
            is_number = isinstance(value, (int, float)) and low <= value <= high
            need(is_number, name, f"{value} is not a number from {low} on (to {high:g})")
    need(cfg.model, "model", "is empty; Config(**BUNDLED) is the bundled task")
    need(cfg.train_data, "train_data", "required if --model is given")
    with blame("--chat_template_kwargs: no JSON object"):
        dict(**json.loads(cfg.chat_template_kwargs or "{}"))
    samples = cfg.num_prompts * cfg.num_generations
    need(cfg.num_minibatches <= samples, "num_minibatches", "more than the step's samples")
    if cfg.kl_in == "reward" and cfg.beta > 0:
        why = f"the reward takes k1 only: {cfg.kl_estimator} has another gradient there"
        need(cfg.kl_estimator == "k1", "kl_estimator", why)
    if cfg.report_to != "none":
        found = importlib.util.find_spec(cfg.report_to)
        need(found, "report_to", f"not installed: pip install {cfg.report_to}")


# -- Ranks


def join_ranks(cfg: Config) -> torch.device:
    """Meets the processes that torchrun has started, or joins the caller's. Returns the device of
    this rank."""
    global RANK, WORLD_SIZE
    has_cuda = torch.cuda.is_available()
    need(has_cuda or cfg.device != "cuda", "device", "torch finds no usable GPU here")
    device = torch.device("cpu")
    if has_cuda and cfg.device != "cpu":
        device = torch.device("cuda", LOCAL_RANK)
        torch.cuda.set_device(device)
    elif cfg.device == "auto" and torch.version.cuda and os.path.exists("/proc/driver/nvidia"):
        raise ConfigError("--device: torch cannot use this GPU (old driver?); or say cpu")
    if dist.is_initialized():
        RANK, WORLD_SIZE = dist.get_rank(), dist.get_world_size()
    elif "RANK" in os.environ:
        # Python objects travel over gloo, gradients on GPUs over NCCL
        dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    return device


def refuse_different_ranks(values: dict) -> None:
    """Ranks that differ would train on nonsense without a word."""
    for rank, theirs in enumerate(gather([values])):
        different = [name for name in values if theirs[name] != values[name]]
        if different:
            raise ConfigError(f"{', '.join(different)}: rank {rank} has another than rank {RANK}")


def digest_of_weights(model) -> int:
    """The same on every device: the sum of (position of the parameter) * (sum of its bits)."""
    total = 0
    for position, parameter in enumerate(model.parameters(), 1):
        bits = parameter.detach().reshape(-1).view(torch.int32)
        total = total + position * bits.sum(dtype=torch.int64)
    return int(total)


def digest_of_rows(prompts: list[Prompt]) -> str:
    digest = hashlib.sha256()
    for p in prompts:
        digest.update(p.ids.tobytes())
        digest.update(json.dumps(p.row, default=lambda value: type(value).__name__).encode())
    return digest.hexdigest()[:16]


# -- Data


def read_rows(path: str):
    """Yields the rows of a file, of a hub dataset name:config:split, or of a function."""
    kind = Path(path).suffix.lower()
    if ".py:" in path:
        yield from load_function(path)()
    elif kind == ".jsonl":
        for line in Path(path).read_text("utf-8-sig").split("\n"):
            if line.strip():
                yield json.loads(line)
    elif kind == ".json":
        yield from json.loads(Path(path).read_text("utf-8-sig"))
    elif kind == ".csv":
        with open(path, encoding="utf-8-sig", newline="") as file:
            for row in csv.DictReader(file, strict=True):
                if None in row or None in row.values():
                    raise ValueError("more or fewer fields than the header")
                yield row
    else:
        from datasets import load_dataset

        if kind == ".parquet":
            yield from load_dataset("parquet", data_files=path, split="train")
        else:
            name, config, split = f"{path}::".split(":")[:3]
            yield from load_dataset(name, config or None, split=split or "train")


def load_prompts(flag: str, tokenizer, rewards: list[Reward], environment, cfg: Config) -> list:
    """The prompts of --train_data or --eval_data. A row that cannot be used ends the run here."""
    path = getattr(cfg, flag)
    columns = re.findall(r"\{([A-Za-z_]\w*)\}", cfg.prompt_template) or ["prompt"]
    prompts = []
    rows = read_rows(path)
    while True:
        number = len(prompts)
        with blame(f"--{flag} {path} row {number + 1}"):
            row = next(rows, None)
            if row is None:
                break
            row = plain_values(row)
            check_row(row, columns, rewards)
            prompts.append(make_prompt(row, number, tokenizer, environment, cfg))
    need(prompts, f"{flag} {path}", "no rows")
    kept = [p for p in prompts if len(p.ids) <= cfg.max_prompt_length]
    need(kept, f"{flag} {path}", f"no prompt has at most {cfg.max_prompt_length} tokens")
    if len(kept) < len(prompts):
        left_out = f"{len(prompts) - len(kept)} of {len(prompts)} prompts"
        say(f"--{flag}: {left_out} have more than {cfg.max_prompt_length} tokens: left out")
    if tokenizer.chat_template and kept[0].messages is None:
        say(f"--{flag}: strings go to this chat model without its template; --chat applies it")
    return kept


def check_row(row, columns: list[str], rewards: list[Reward]) -> None:
    if not isinstance(row, dict):
        raise ValueError("is no JSON object")
    for column, value in row.items():
        try:
            json.dumps(value, default=str, allow_nan=False)  # for the log
        except ValueError as error:
            raise ValueError(f"column '{column}': {one_line(error)}") from None
    for column in columns:
        if row.get(column) is None:
            raise ValueError(f"has no column '{column}'")
    for reward in rewards:
        for column in reward.columns:
            if column not in row:  # null: the reward does not apply to this row
                raise ValueError(f"has no column '{column}'")
        if reward.check is not None and reward.applies(row):
            reward.check(row)


def plain_values(value):
    """NumPy's arrays and numbers, as parquet files hold them, as Python's."""
    if isinstance(value, dict):
        return {name: plain_values(item) for name, item in value.items()}
    if isinstance(value, (list, np.ndarray)):
        return [plain_values(item) for item in value]
    if isinstance(value, np.floating):
        return float(str(value))  # float32's 5e-05 is not 4.999999873689376e-05
    if isinstance(value, np.generic):
        return value.item()
    return value


def make_prompt(row: dict, number: int, tokenizer, environment, cfg: Config) -> Prompt:
    """The column `prompt`, or --prompt_template filled in, as token ids."""
    prompt = row.get("prompt")
    if cfg.prompt_template:
        # A shell passes \n as two letters; before a small letter they are LaTeX, as in \neq
        template = re.sub(r"\\n(?![a-z])", "\n", cfg.prompt_template)
        prompt = re.sub(r"\{([A-Za-z_]\w*)\}", lambda match: str(row[match[1]]), template)
    if not prompt or not isinstance(prompt, (str, list)):
        raise ValueError(f"the prompt is neither a text nor a list of messages: {prompt!r}")
    is_chat = isinstance(prompt, list) or cfg.chat or cfg.system_prompt
    if not is_chat:
        if environment is not None and environment.tools(row):
            raise ValueError("tools need a chat: a list of messages, or --chat")
        return Prompt(string_ids(prompt, tokenizer), prompt, row, None, number)

    messages = prompt
    if isinstance(prompt, str):
        messages = [dict(role="user", content=prompt)]
    if cfg.system_prompt:
        messages = [dict(role="system", content=cfg.system_prompt), *messages]
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("content"), str):
            raise ValueError(f"a message needs a role and a text as content: {message!r}")
    options = json.loads(cfg.chat_template_kwargs or "{}")
    if environment is not None:
        if environment.tools(row):
            options["tools"] = environment.tools(row)
        opening = environment.opening(row, (cfg.seed, number), tokenizer)
        last = messages[-1]
        messages = [*messages[:-1], last | dict(content=last["content"] + opening)]
    text = chat_text(messages, tokenizer, options)
    if messages[0]["content"].strip() not in text:
        raise ValueError(f"the chat template leaves out the {messages[0]['role']} message")
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]  # the template writes BOS
    check_ids(ids, text, tokenizer)
    return Prompt(np.array(ids, np.int64), text, row, messages, number)


def chat_text(messages: list[dict], tokenizer, options: dict) -> str:
    """The chat up to where the policy goes on: in a turn of its own, or in one that is begun."""
    write = functools.partial(tokenizer.apply_chat_template, tokenize=False, **options)
    if messages[-1]["role"] != "assistant":
        return write(messages, add_generation_prompt=True)
    begun = write(messages, continue_final_message=True)
    before, words, after = begun.rpartition(messages[-1]["content"].strip())
    if not words:
        raise ValueError("the chat template changes the words that the answer begins with")
    # Qwen3's template puts an empty think block before these words, but not before a turn that the
    # policy begins. What both have in common is the header, such as <|im_start|>assistant.
    own = write(messages[:-1], add_generation_prompt=True)
    return os.path.commonprefix([before, own]) + words + after


def string_ids(text: str, tokenizer) -> np.ndarray:
    """With one BOS, if the tokenizer has one, and without the EOS that some tokenizers add."""
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    check_ids(ids, text, tokenizer)
    start = tokenizer("")["input_ids"]
    if tokenizer.bos_token_id != tokenizer.eos_token_id:
        start = [i for i in start if i != tokenizer.eos_token_id]
    if ids[: len(start)] != start:
        ids = start + ids
    if not ids:
        raise ValueError("the prompt is empty")
    return np.array(ids, np.int64)


def check_ids(ids: list[int], text: str, tokenizer) -> None:
    """The ids must say what the text says. A blank at its start or beside a special token is left
    out of account: some tokenizers add one, and decode it or not."""
    decoded = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
    tokens = [unicodedata.normalize("NFKC", token) for token in tokenizer.get_added_vocab()]
    special = "|".join(map(re.escape, tokens)) or "(?!)"  # (?!) matches nothing
    texts = [unicodedata.normalize("NFKC", x).lstrip() for x in (decoded, text)]
    texts = [re.sub(f" *({special}) *", r"\1", x) for x in texts]
    if texts[0] != texts[1]:
        raise ValueError(f"of {text!r} the tokenizer makes {decoded!r}")


# -- Models


def load_tokenizer(path: str):
    transformers.AutoConfig.from_pretrained(path, trust_remote_code=False)  # refuses foreign code
    tokenizer = transformers.AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    tokens = tokenizer.get_vocab().keys() - tokenizer.get_added_vocab().keys()
    if not tokens - set(tokenizer.all_special_tokens):  # made up by transformers
        raise ValueError("there are no tokenizer files")
    # transformers 5 goes by the class in the config, and may make another tokenizer of
    # tokenizer.json than that file says. PreTrainedTokenizerFast takes the file as it is.
    if not keeps_blanks(tokenizer) and getattr(tokenizer, "is_fast", False):
        plain = transformers.PreTrainedTokenizerFast.from_pretrained(path)
        if keeps_blanks(plain):
            return plain
    return tokenizer


def keeps_blanks(tokenizer) -> bool:
    text = "a b\n\n  c"
    return text in tokenizer.decode(tokenizer(text)["input_ids"])


SMALL = 10e6  # parameters; below, threads, bfloat16 and vLLM cost more than they save


def load_model(flag: str, path: str, cfg: Config, device: torch.device):
    """A Hugging Face causal language model without any randomness, in float32 even if the products
    are in bfloat16: at a learning rate of 1e-6 bfloat16 parameters lose 98 % of their updates to
    rounding."""
    with blame(f"--{flag} {path}"):
        config = transformers.AutoConfig.from_pretrained(path, trust_remote_code=False)
        if getattr(config, "quantization_config", None):
            raise ValueError(
                "is quantized, and cannot be trained; name the model that it is made of"
            )
        config = without_randomness(config)
        options = dict(dtype=torch.float64 if cfg.dtype == "float64" else torch.float32)
        if getattr(config.get_text_config(), "attn_logit_softcapping", None):
            options["attn_implementation"] = "eager"  # the others leave the cap out
        load = transformers.AutoModelForCausalLM.from_pretrained
        model, info = load(path, config=config, output_loading_info=True, **options)
        if info["missing_keys"]:
            raise ValueError(f"its files have no weights for {min(info['missing_keys'])}")
    try:
        model.generation_config.validate(strict=True)
    except ValueError:  # transformers would refuse to save what it has loaded
        ends = model.generation_config.eos_token_id
        model.generation_config = transformers.GenerationConfig(eos_token_id=ends)
    if cfg.gradient_checkpointing:
        model.gradient_checkpointing_enable(dict(use_reentrant=False))
    return model.to(device).eval()


def without_randomness(config):
    """Every dropout and jitter at 0, in the configs inside, too."""
    for name, value in vars(config).items():
        if hasattr(value, "to_diff_dict"):
            without_randomness(value)
        elif re.search("dropout|pdrop|layerdrop|jitter", name) and isinstance(value, float):
            setattr(config, name, 0.0)
    return config


def logits_from(model, ids, first: int):
    """[N, L - first, V]: the logits from this place on; those of the prompts before are not made.
    Gradient checkpointing acts in training mode only."""
    if model.is_gradient_checkpointing:
        model.train(torch.is_grad_enabled())
    kept = ids.shape[1] - first
    options = dict(use_cache=False)
    if "logits_to_keep" in inspect.signature(model.forward).parameters:
        options["logits_to_keep"] = kept
    return model(ids, **options).logits[:, -kept:]


def autocast(cfg: Config, device: torch.device, cache: bool = False):
    """cache: keep the weights in bfloat16 until the block ends. The sampler uses them often."""
    enabled = cfg.dtype == "bfloat16"
    return torch.autocast(device.type, torch.bfloat16, enabled=enabled, cache_enabled=cache)


def has_unused_parameters(model) -> bool:
    """A text may reach no image tower, and not every expert. DDP must not wait for those."""
    has_experts = any(".experts." in name for name, _ in model.named_parameters())
    return has_experts or model.config.get_text_config() is not model.config


def size(model) -> int:
    return sum(p.numel() for p in model.parameters())


def same_weights(policy, reference) -> bool:
    if isinstance(reference, AdaptersOff):
        adapters = [p for name, p in policy.named_parameters() if ".lora_B." in name]
        return not any(p.any() for p in adapters)
    pairs = zip(policy.parameters(), reference.parameters(), strict=True)
    return all(torch.equal(p.to(q.dtype), q) for p, q in pairs)


def fast_bfloat16(device: torch.device) -> bool:
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported()


def resolve_auto(cfg: Config, model, device: torch.device) -> Config:
    """The flags with a value in place of each `auto`."""
    if cfg.dtype == "auto":
        cfg = replace(cfg, dtype="float32")
        if size(model) >= SMALL and fast_bfloat16(device):
            cfg = replace(cfg, dtype="bfloat16")
    if cfg.micro_batch_tokens == 0:
        tokens = 2048
        if device.type == "cuda":
            tokens = tokens_that_fit(model, device)
        cfg = replace(cfg, micro_batch_tokens=min(gather([tokens])))  # the same on all ranks
    return cfg


def tokens_that_fit(model, device: torch.device) -> int:
    """A micro-batch that should fit the free memory of a GPU. Estimates, in bytes: gradients and
    Adam's moments of a parameter 12; of a token, logits and what the layers keep for backward."""
    text = model.config.get_text_config()
    learning = 12 * sum(p.numel() for p in model.parameters() if p.requires_grad)
    of_a_token = 16 * text.vocab_size + 80 * text.hidden_size * text.num_hidden_layers
    free, _ = torch.cuda.mem_get_info(device)
    return int(min(16384, max(256, 0.8 * (free - learning) / of_a_token)))


def halve_frozen(policy) -> None:
    """Casts frozen linear layers to bfloat16, as autocast would in every pass: half the memory."""
    tied = policy.model.get_input_embeddings().weight
    for module in policy.model.modules():
        if isinstance(module, nn.Linear) and module.weight is not tied:
            if not module.weight.requires_grad:
                module.to(torch.bfloat16)


def make_policy(model, prompts: list[Prompt], cfg: Config):
    """The plain policy, or that of extras/fast.py if it is there, right, and faster."""
    plain = Policy(model, cfg.temperature)
    if not cfg.fast:
        return plain
    try:
        from extras import fast
    except ImportError:
        say("policy: plain (extras/fast.py is not there)")
        return plain
    samples = []  # made up, to compare the two
    for group, prompt in enumerate(prompts[:2]):
        for length in (1, 5, 32):
            ids = np.resize(prompt.ids, min(length, cfg.max_completion_length))
            samples.append(Sample(group, prompt, ids, np.zeros(len(ids))))
    policy, why = fast.choose(plain, samples, collate, cfg)
    if WORLD_SIZE > 1 and len(set(gather([why]))) > 1:
        policy, why = plain, "the ranks chose differently"
    if any(p.requires_grad for p in model.parameters()):  # not that of the reference
        say(f"policy: {type(policy).__name__} ({why})")
    return policy


# -- LoRA (Hu et al., arXiv 2106.09685), by peft


def add_adapters(model, cfg: Config) -> None:
    """Freezes the model, and puts trained products beside all linear layers but the head."""
    with blame(f"--lora_rank {cfg.lora_rank}"):
        from peft import LoraConfig, inject_adapter_in_model

        torch.manual_seed(cfg.seed)  # every rank draws the same adapters
        options = dict(target_modules="all-linear", task_type="CAUSAL_LM")
        config = LoraConfig(r=cfg.lora_rank, lora_alpha=32, **options)
        inject_adapter_in_model(config, model)


class AdaptersOff:
    """The policy without its adapters: the reference of the KL, at no memory."""

    def __init__(self, policy):
        self.policy = policy
        self.model = policy.model
        self.micro_batches = policy.micro_batches
        self.layout = policy.layout

    def __call__(self, batch: dict):
        layers = [module for module in self.model.modules() if hasattr(module, "lora_A")]
        for layer in layers:
            layer.enable_adapters(False)
        try:
            return self.policy(batch)
        finally:
            for layer in layers:
                layer.enable_adapters(True)


def merged_weights(model, rounded: bool = False) -> dict:
    """Parameters (a tied head once) and saved buffers by name, the adapters merged into the weights
    beside which they stand. rounded: merged weights are in bfloat16."""
    saved = model.state_dict()
    weights = dict(model.named_parameters())
    weights |= {name: buffer for name, buffer in model.named_buffers() if name in saved}
    for number, (name, module) in enumerate(model.named_modules()):
        if hasattr(module, "get_delta_weight"):
            base = f"{name}.base_layer.weight"
            weights[base] = weights[base].float() + module.get_delta_weight("default")
            if rounded:
                weights[base] = round_at_random(weights[base].detach(), number)
    kept = [name for name in weights if ".lora_" not in name]
    return {name.replace(".base_layer", ""): weights[name].detach() for name in kept}


def round_at_random(x, seed: int):
    """float32 to bfloat16 by stochastic rounding: up or down, right on average. Rounded to the
    nearest, a small adapter's share would vanish: it is less than half the distance between two
    numbers of bfloat16."""
    bits = x.view(torch.int32)
    generator = torch.Generator(bits.device).manual_seed(seed)
    options = dict(dtype=torch.int32, device=bits.device, generator=generator)
    noise = torch.randint(2**16, bits.shape, **options)
    return (bits + noise).bitwise_and(-(2**16)).view(torch.float32).bfloat16()


# -- vLLM


class VLLMSampler:
    """A vLLM engine inside the process of each rank, which gets the weights in memory."""

    def __init__(self, model, stop_ids: list[int], longest: int, cfg: Config):
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # in this process, to share its tensors
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        if cfg.dtype == "float32":  # else its attention multiplies in TF32: a gap of 1e-3
            os.environ["TRITON_F32_DEFAULT"] = "ieee"
        import vllm
        from vllm.platforms import current_platform

        self.stop_ids = stop_ids
        self.cfg = cfg
        self.on_cuda = model.device.type == "cuda"
        self.asleep = False
        options = dict(
            model=cfg.model,
            dtype=cfg.dtype,
            max_model_len=longest,  # prompt and completion
            skip_tokenizer_init=True,
            generation_config="vllm",  # not the model's own, which may hold top-p
            logprobs_mode="processed_logprobs",  # after the temperature, as the trainer's are
            load_format="dummy",  # the first push brings the weights
        )
        head = model.get_output_embeddings()
        if head is not None and head.weight is not model.get_input_embeddings().weight:
            options["hf_overrides"] = dict(tie_word_embeddings=False)  # its config may say tied
        if self.on_cuda:
            options["gpu_memory_utilization"] = cfg.vllm_gpu_memory_utilization
            options["enable_sleep_mode"] = True
        else:
            type(current_platform).simple_compile_backend = "eager"  # compiling takes 10 s
            options["enforce_eager"] = True
            options["block_size"] = 32  # only full blocks are cached; the default is 128 tokens
            options["kv_cache_memory_bytes"] = 2**30
            options["enable_chunked_prefill"] = False  # crashes if a seeded prompt is split
        if dist.is_initialized():  # torchrun has started the processes
            options["distributed_executor_backend"] = "external_launcher"
        self.llm = vllm.LLM(**options)
        for module in model.modules():  # which vLLM looks for in classes of transformers
            module.do_not_compile = True
        self.SamplingParams = vllm.SamplingParams

    def push(self, model) -> None:
        """Sends the policy's weights. All are nan before, so that one which is forgotten ends the
        next rollout."""
        if self.asleep:  # weights first, then the cache, so that their peaks do not add up
            torch.cuda.empty_cache()
            self.llm.wake_up(tags=["weights"])
        self.llm.apply_model(fill_with_nan)
        # transformers renames and merges some tensors as it loads them, such as experts
        revert = transformers.core_model_loading.revert_weight_conversion
        weights = revert(model, merged_weights(model, self.cfg.dtype == "bfloat16")).items()
        try:
            self.llm.collective_rpc("reload_weights", kwargs=dict(weights_iterator=weights))
        except Exception as error:
            why = f"vLLM cannot load this model's weights from memory ({error!r:.200})"
            raise TrainingError(f"{why}: --rollout hf needs no push") from error
        self.llm.apply_model(repack)
        if not self.llm.reset_prefix_cache():  # its keys and values are the old policy's
            raise TrainingError("vLLM did not reset its prefix cache after new weights")
        if self.asleep:
            self.llm.wake_up(tags=["kv_cache"])
            self.asleep = False

    def sleep(self) -> None:
        """Frees the GPU for the update. Level 2 drops the weights: the next push brings them."""
        if self.on_cuda and not self.asleep:
            self.llm.sleep(level=2)
            self.asleep = True

    def close(self) -> None:
        self.llm.llm_engine.engine_core.shutdown()

    def generate(self, prompts, seeds, temperature: float, limits=None) -> list[tuple]:
        """The same as HFSampler.generate."""
        if limits is None:
            limits = [self.cfg.max_completion_length] * len(prompts)
        params = []
        for seed, limit in zip(seeds, limits, strict=True):
            state = np.random.SeedSequence(seed).generate_state(1)  # 32 bits
            options = dict(seed=int(state[0]), temperature=temperature)
            options |= dict(max_tokens=limit, stop_token_ids=self.stop_ids)
            options |= dict(logprobs=0, flat_logprobs=True, detokenize=False)  # 0: the sampled one
            params.append(self.SamplingParams(**options))
        texts = [dict(prompt_token_ids=ids.tolist()) for ids in prompts]
        completions = []
        for request in self.llm.generate(texts, params, use_tqdm=False):
            output = request.outputs[0]
            logps = np.array(output.logprobs.logprobs, np.float32)
            if len(logps) != len(output.token_ids) or not np.isfinite(logps).all():
                why = "the last push did not set all weights, or the policy itself is not finite"
                raise TrainingError(f"vLLM's log-probabilities are not finite: {why}")
            completions.append((np.array(output.token_ids), logps))
        return completions


def repack(engine_model) -> None:
    """Packs a tied head and MoE experts again, as vLLM's CPU build does at its start, but not when
    it reloads weights."""
    head = getattr(engine_model, "lm_head", None)
    if hasattr(head, "quant_method"):
        head.quant_method.process_weights_after_loading(head)
    for module in engine_model.modules():
        kernel = getattr(getattr(module, "quant_method", None), "moe_kernel", None)
        if kernel is not None and module.w2_weight.device.type == "cpu":
            kernel.fused_experts.process_weights_after_loading(module)


def fill_with_nan(engine_model) -> None:
    for parameter in engine_model.parameters():
        parameter.data.fill_(math.nan)
    repack(engine_model)


def stop_ids_of(model, tokenizer, cfg: Config) -> list[int]:
    """All end tokens of model and tokenizer that the model can sample."""
    ends = {tokenizer.eos_token_id, *np.ravel(model.generation_config.eos_token_id)}
    vocabulary = range(model.get_input_embeddings().num_embeddings)
    stop_ids = sorted(int(i) for i in ends if i in vocabulary)
    need(stop_ids, f"model {cfg.model}", "has no EOS token")
    return stop_ids


def make_sampler(model, stop_ids: list[int], longest: int, cfg: Config):
    kind = cfg.rollout
    if kind == "auto":
        kind = "vllm"
        if size(model) < SMALL or not importlib.util.find_spec("vllm") or cfg.dtype == "float64":
            kind = "hf"
    if kind == "hf":
        return HFSampler(model, stop_ids, cfg)
    why = "vLLM takes 0.01 to 2; --rollout hf takes others"
    need(0.01 <= cfg.temperature <= 2, f"temperature {cfg.temperature}", why)
    say("vLLM starts, which takes a minute or more")
    with blame(f"--rollout {cfg.rollout}: vllm did not start (hf needs none)"):
        return VLLMSampler(model, stop_ids, longest, cfg)


# -- The run on disk


def claim_out_dir(cfg: Config) -> str:
    """A directory of its own for a new run, so that no run ever overwrites another."""
    path = cfg.out_dir
    if not cfg.resume:
        number = 0
        while cfg.out_dir == Config.out_dir and os.path.exists(path):
            number += 1
            path = f"{cfg.out_dir}.{number}"
        with blame(f"--out_dir {path}"):
            os.makedirs(path, exist_ok=True)
            if os.listdir(path):
                raise ValueError("holds files already; name another, or take --resume")
    return path


def checkpoints(out_dir: str) -> list[str]:
    """Paths of step_NNNNNN, oldest first."""
    names = glob.glob(f"{glob.escape(out_dir)}/step_*")
    return sorted(names, key=lambda name: int(name.rpartition("_")[2]))


def newest_checkpoint(cfg: Config) -> dict:
    """What Run.save has written, with its `path`; empty if the run begins."""
    if not cfg.resume:
        return {}
    for path in reversed(checkpoints(cfg.out_dir)):
        try:
            transformers.AutoConfig.from_pretrained(path)
            # weights_only=False: run.state may hold anything. The directory is trusted anyway: its
            # config.json names Python files.
            options = dict(map_location="cpu", weights_only=False)
            return torch.load(f"{path}/trainer_state.pt", **options) | dict(path=path)
        except Exception as error:
            say(f"--resume: {path} is damaged ({one_line(error)}); trying the one before")
    return {}


def write_lines(path: str, rows: list[dict], mode: str = "a") -> None:
    with open(path, mode) as file:
        for row in rows:
            file.write(json.dumps(row, default=str) + "\n")


def drop_later_lines(path: str, step: int) -> None:
    """What comes after the checkpoint of `step` will be made and written again. The last line may
    be half of one."""
    kept = []
    if os.path.exists(path):
        for line in open(path, encoding="utf-8"):
            if line.endswith("\n") and json.loads(line)["step"] <= step:
                kept.append(line)
        Path(path).write_text("".join(kept), encoding="utf-8")


def without_nan(metrics: dict) -> dict:
    """JSON has no nan: such a metric has no value."""
    return {k: v for k, v in metrics.items() if not isinstance(v, float) or math.isfinite(v)}


def sample_metrics(samples: list[Sample]) -> dict:
    """Metrics of a rollout, under TRL's names. `reward` is what the advantages are made of."""
    reward, reward_std = mean_and_std([s.reward for s in samples])
    lengths = [int(s.sampled.sum()) for s in samples]
    signal = np.array([np.abs(s.advantages[s.trained]).max(initial=0) for s in samples])
    group_size = sum(s.group == samples[0].group for s in samples)
    metrics = {
        "reward": reward,
        "reward_std": reward_std,
        "advantage_abs": float(signal.mean()),
        "frac_reward_zero_std": float((signal.reshape(-1, group_size).max(1) == 0).mean()),
        "completions/mean_length": float(np.mean(lengths)),
        "completions/min_length": min(lengths),
        "completions/max_length": max(lengths),
        "completions/clipped_ratio": float(np.mean([s.finish_reason == "length" for s in samples])),
        "tokens": sum(s.total_length for s in samples),
        "failed_rewards": sum(bool(s.failure) for s in samples),
    }
    for name in samples[0].rewards:
        mean, std = mean_and_std([s.rewards[name] for s in samples])
        metrics |= {f"rewards/{name}/mean": mean, f"rewards/{name}/std": std}
    for name in {name for s in samples for name in s.logged}:
        mean, _ = mean_and_std([s.logged.get(name, math.nan) for s in samples])
        metrics[f"logged/{name}"] = mean
    return metrics


def completion_row(s: Sample, step: int, tokenizer) -> dict:
    """A line of completions.jsonl."""
    row = dict(step=step, group=s.group, prompt=s.prompt.text, completion=s.text)
    row |= dict(reward=s.reward, rewards=without_nan(s.rewards), advantage=s.advantages[0])
    row |= dict(length=int(s.sampled.sum()), finish_reason=s.finish_reason, row=s.prompt.row)
    if s.failure:
        row["failure"] = s.failure
    if s.extra:
        row["extra"] = s.extra
    if s.episode is not None:
        row |= s.episode.log_columns()
    texts = [decode(tokenizer, s.completion_ids[i : i + 1]) for i in range(len(s.completion_ids))]
    logps = [round(float(logp), 3) for logp in s.sampler_logps]
    row["tokens"] = dict(text=texts, logp=logps, sampled=s.sampled.astype(int).tolist())
    row["tokens"]["advantage"] = [round(float(a), 3) for a in s.advantages]
    return without_nan(row)


SHOWN = {  # metric: its name in the line of a step
    "reward": "reward",
    "completions/mean_length": "length",
    "loss": "loss",
    "grad_norm": "grad",
    "frac_reward_zero_std": "no-signal",
    "kl_k1": "kl",
    "sampler_gap": "gap",
    "tokens_per_s": "tok/s",
}


def open_dashboard(cfg: Config):
    """The module wandb or trackio, which have the same functions; None without a dashboard."""
    if RANK > 0 or cfg.report_to == "none":
        return None
    module = importlib.import_module(cfg.report_to)
    name = os.path.basename(cfg.out_dir)
    module.init(project="grpo", name=name, config=asdict(cfg), resume="allow")
    return module


# -- The run: set-up, log, eval, save


def load_reference(cfg: Config, policy, prompts: list[Prompt], device: torch.device):
    """What the KL is measured from; None: nothing."""
    if cfg.beta == 0:
        return None
    if cfg.lora_rank > 0 and not cfg.reference:
        return AdaptersOff(policy)
    flag = "reference" if cfg.reference else "model"
    model = load_model(flag, cfg.reference or cfg.model, cfg, device).requires_grad_(False)
    sizes = [m.get_input_embeddings().num_embeddings for m in (model, policy.model)]
    need(sizes[0] == sizes[1], "reference", f"its vocabulary has {sizes[0]} tokens, not {sizes[1]}")
    check_sizes(model, prompts, cfg)
    return make_policy(model, prompts, cfg)


def wrap(policy):
    """The policy for backward: inside DDP, which takes the mean of the gradients of all ranks."""
    if WORLD_SIZE == 1:
        return policy
    options = dict(gradient_as_bucket_view=True, broadcast_buffers=False)
    options["find_unused_parameters"] = has_unused_parameters(policy.model)
    return DistributedDataParallel(policy, **options)


def make_optimizer(policy, cfg: Config) -> torch.optim.Optimizer:
    trained = [p for p in policy.parameters() if p.requires_grad]
    matrices = [p for p in trained if p.dim() >= 2]
    vectors = [p for p in trained if p.dim() < 2]
    groups = [dict(params=matrices, weight_decay=cfg.weight_decay)]
    groups += [dict(params=vectors, weight_decay=0.0)] if vectors else []
    return torch.optim.AdamW(groups, cfg.learning_rate, fused=True)  # fused: 5 times as fast


def check_sizes(model, prompts: list[Prompt], cfg: Config) -> int:
    """The most tokens of a prompt and its completion; the model must have room for them."""
    longest = max(len(p.ids) for p in prompts) + cfg.max_completion_length
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None) or longest
    why = f"with the longest prompt {longest} tokens; the model has {positions} positions"
    need(longest <= positions, f"max_completion_length {cfg.max_completion_length}", why)
    largest = max(int(p.ids.max()) for p in prompts)
    vocabulary = model.get_input_embeddings().num_embeddings
    why = f"its tokenizer makes the id {largest}, but its vocabulary has {vocabulary} tokens"
    need(largest < vocabulary, f"model {cfg.model}", why)
    return longest


class Run:
    """All that a run holds. It is loaded and checked, on all ranks, before anything is written."""

    def __init__(self, cfg: Config, device: torch.device, closing: contextlib.ExitStack):
        with blame(f"--model {cfg.model}: no tokenizer"):
            self.tokenizer = tokenizer = load_tokenizer(cfg.model)
        with blame(f"--reward {cfg.reward}"):
            self.rewards = load_rewards(cfg.reward)
        environment = self.player = None
        if cfg.environment:
            with blame(f"--environment {cfg.environment}"):
                from extras import agents

                environment = agents.load_environment(cfg.environment, cfg.call_timeout)
        data = (tokenizer, self.rewards, environment, cfg)
        self.train_prompts = load_prompts("train_data", *data)
        self.eval_prompts = load_prompts("eval_data", *data) if cfg.eval_data else []
        prompts = self.train_prompts + self.eval_prompts

        checkpoint = newest_checkpoint(cfg)  # empty: the run begins
        self.step = self.saved = checkpoint.get("step", 0)  # the last whole step
        self.history = checkpoint.get("history", [])  # the lines of metrics.jsonl
        # A changed copy's own: a resume restores it. It may change once complete() was called.
        self.state = checkpoint.get("state", {})
        self.signals = []  # SIGTERM and Ctrl-C that came
        self.times = {}
        self.bad_steps = 0  # in a row
        self.weights_are_between_steps = False  # then an error must not save them

        model = load_model("model", cfg.model, cfg, device)
        digests = dict(weights=digest_of_weights(model), data=digest_of_rows(self.train_prompts))
        if cfg.lora_rank > 0:
            add_adapters(model, cfg)
            model.load_state_dict(checkpoint.get("adapters", {}), strict=False)
        elif checkpoint:
            model = load_model("model", checkpoint["path"], cfg, device)
        if size(model) < SMALL:
            torch.set_num_threads(1)
        longest = check_sizes(model, prompts, cfg)
        cfg = resolve_auto(cfg, model, device)
        self.policy = make_policy(model, prompts, cfg)
        self.reference = load_reference(cfg, self.policy, prompts, device)
        if cfg.reference and self.reference is not None:
            digests["reference"] = digest_of_weights(self.reference.model)
        self.digests = checkpoint.get("digests", digests)  # those that the run began with
        for name, flag in (("weights", "model"), ("reference", "reference")):
            same = self.digests.get(name) == digests.get(name)
            need(same, f"{flag} {getattr(cfg, flag)}", "not the weights that this run began with")
        if self.digests["data"] != digests["data"]:
            say("--train_data has changed since this run began")
        if cfg.dtype == "bfloat16":
            halve_frozen(self.policy)
            if self.reference is not None:
                halve_frozen(self.reference)
        stop_ids = stop_ids_of(model, tokenizer, cfg)
        if environment is not None:
            with blame(f"--environment {cfg.environment}"):
                self.player = agents.Player(environment, tokenizer, stop_ids, prompts, cfg)
                stop_ids = self.player.stop_ids

        ours = {f"--{name}": value for name, value in asdict(cfg).items()}
        for path in ("--model", "--train_data", "--eval_data", "--reward", "--out_dir"):
            ours.pop(path)  # paths may differ between machines: what they hold is compared
        ours["--eval_data"] = digest_of_rows(self.eval_prompts)
        ours["--reward"] = [(r.name, r.weight, r.columns) for r in self.rewards]
        ours["--resume"] = self.step
        refuse_different_ranks(ours | digests | dict(trained=digest_of_weights(model)))

        self.cfg = cfg = replace(cfg, out_dir=on_rank_0(claim_out_dir, cfg))
        if RANK == 0:
            lock = closing.enter_context(open(f"{cfg.out_dir}/.lock", "w"))
            with blame(f"--out_dir {cfg.out_dir}: another run is writing there"):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            Path(cfg.out_dir, "config.json").write_text(json.dumps(asdict(cfg), indent=1))
            write_lines(f"{cfg.out_dir}/metrics.jsonl", self.history, "w")
            drop_later_lines(f"{cfg.out_dir}/completions.jsonl", self.step)

        self.sampler = make_sampler(model, stop_ids, longest, cfg)
        closing.callback(self.sampler.close)
        self.ddp = wrap(self.policy)  # after vLLM, which may switch to another CUDA stream
        self.optimizer = make_optimizer(self.ddp, cfg)
        self.optimizer.register_step_pre_hook(self.begin_to_change)
        if checkpoint:
            self.optimizer.load_state_dict(checkpoint["optimizer"])
        if cfg.compile:
            for module in model.modules():
                if isinstance(module, GradientCheckpointingLayer):
                    module.compile(dynamic=True)
        self.dashboard = open_dashboard(cfg)
        weights = f"{size(model) / 1e6:.2f} M parameters"
        say(f"{cfg.model}: {weights}, {cfg.dtype}, {WORLD_SIZE} x {device}")
        count = len(self.train_prompts)
        say(f"{type(self.sampler).__name__}, {count} prompts, out_dir {cfg.out_dir}")
        say(f"first prompt: {decode(tokenizer, self.train_prompts[0].ids)!r}")
        say("watch reward and eval accuracy, not the loss: it can be 0 in every step of a good run")
        self.started = self.lap_started = time.perf_counter()

    def begin_to_change(self, *_) -> None:
        self.weights_are_between_steps = True

    def complete(self, step: int) -> None:
        self.step = step
        self.weights_are_between_steps = False

    def stop_is_requested(self) -> bool:
        """On any rank."""
        return any(gather(self.signals))

    def lap(self, phase: str) -> None:
        """Notes the seconds since the last lap, once the GPU has done what it was given."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        now = time.perf_counter()
        self.times[f"time_{phase}"] = now - self.lap_started
        self.lap_started = now

    def log(self, metrics: dict, rows: list[dict] = ()) -> None:
        self.history.append(without_nan(metrics))
        if RANK == 0:
            write_lines(f"{self.cfg.out_dir}/metrics.jsonl", self.history[-1:])
            write_lines(f"{self.cfg.out_dir}/completions.jsonl", rows)
        if self.dashboard is not None:
            # TRL's names: train/reward, eval/accuracy
            names = {k: f"train/{k}".replace("train/eval_", "eval/") for k in self.history[-1]}
            try:
                self.dashboard.log({names[k]: v for k, v in self.history[-1].items()}, self.step)
            except Exception as error:  # costs no step
                say(f"--report_to {self.cfg.report_to} failed: {one_line(error)}")

    def log_step(self, samples: list[Sample], metrics: dict) -> None:
        cfg = self.cfg
        metrics = dict(step=self.step) | metrics | sample_metrics(samples) | self.times
        if self.player is not None:
            metrics |= self.player.metrics(samples)
        metrics["step_time"] = sum(self.times.values())
        metrics["tokens_per_s"] = metrics["tokens"] / metrics["step_time"]
        first = samples[: cfg.log_completions]
        self.log(metrics, [completion_row(s, self.step, self.tokenizer) for s in first])

        shown = [f"{name} {metrics[key]:.3g}" for key, name in SHOWN.items() if key in metrics]
        for name in ("failed_rewards", "skipped_steps"):
            if metrics[name] > 0:
                shown.append(f"{name.upper()} {metrics[name]}")
        if metrics.get("optimizer_steps") == 0:
            shown.append("NO OPTIMIZER STEP")
        say(f"step {self.step}/{cfg.max_steps} {' '.join(shown)}")
        failures = [s.failure for s in samples if s.failure]
        if failures and sum(line.get("failed_rewards", 0) > 0 for line in self.history) == 1:
            say(failures[0])
        if len(failures) == len(samples) and self.step == 1:
            raise TrainingError(f"every sample of the first step failed: {failures[0]}")
        self.bad_steps = self.bad_steps + 1 if metrics["skipped_steps"] > 0 else 0
        if self.bad_steps == 5:
            raise TrainingError("5 steps in a row had no finite gradient; lower --learning_rate")

    def is_due(self, every: int) -> bool:
        return self.step == self.cfg.max_steps or (every > 0 and self.step % every == 0)

    def evaluate_if_due(self) -> None:
        is_done = any(m["step"] == self.step and "eval_length" in m for m in self.history)
        due = self.step == 0 or self.is_due(self.cfg.eval_every)
        if not self.eval_prompts or is_done or not due or self.stop_is_requested():
            return
        metrics = dict(step=self.step) | evaluate(self, self.step)
        shown = f"{metrics['eval_accuracy']:.3f} +- {metrics['eval_stderr']:.3f}"
        say(f"step {self.step}: eval accuracy {shown}, length {metrics['eval_length']:.3g}")
        self.log(metrics)
        self.lap_started = time.perf_counter()

    def best_step(self) -> int:
        """The step with the highest eval accuracy so far; 0: none."""
        evals = {m["step"]: m["eval_accuracy"] for m in self.history if m.get("eval_accuracy")}
        evals.pop(0, None)
        return max(evals, key=evals.get, default=0)

    def save_if_due(self) -> None:
        if self.is_due(self.cfg.save_every) or self.step == self.best_step():
            self.save()

    def save(self) -> None:
        """Writes a directory that from_pretrained loads. It gets its name once it is complete."""
        if RANK > 0 or self.step == self.saved or self.weights_are_between_steps:
            return
        cfg = self.cfg
        model = self.policy.model
        weights = merged_weights(model)
        if not all(w.isfinite().all() for w in weights.values()):
            say(f"the weights after step {self.step} are not finite: not saved")
            return
        partial = f"{cfg.out_dir}/.partial"
        shutil.rmtree(partial, ignore_errors=True)  # left by a save that was killed
        try:
            model.save_pretrained(partial, state_dict=weights)
            self.tokenizer.save_pretrained(partial)
            state = dict(step=self.step, history=self.history, state=self.state)
            state |= dict(digests=self.digests, optimizer=self.optimizer.state_dict())
            state["adapters"] = {k: p for k, p in model.named_parameters() if ".lora_" in k}
            torch.save(state, f"{partial}/trainer_state.pt")
            path = f"{cfg.out_dir}/step_{self.step:06d}"
            shutil.rmtree(path, ignore_errors=True)  # a damaged one that was passed over
            os.replace(partial, path)
        except OSError as error:  # such as a full disk; the next save may succeed
            say(f"step {self.step} is not saved: {one_line(error)}")
            return
        self.saved = self.step
        if cfg.keep > 0:
            best = f"{cfg.out_dir}/step_{self.best_step():06d}"
            for old in checkpoints(cfg.out_dir)[: -cfg.keep]:
                if old != best:
                    shutil.rmtree(old)


def on_rank_0(function, *args):
    """Its result, or its ConfigError, on every rank."""
    result = error = None
    if RANK == 0:
        try:
            result = function(*args)
        except ConfigError as caught:
            error = str(caught)
    result, error = gather([(result, error)])[0]
    if error:
        raise ConfigError(error)
    return result


@contextlib.contextmanager
def signals_into(caught: list):
    """SIGTERM and Ctrl-C only go on this list. A second one ends the process at once."""

    def catch(number, _):
        caught.append(number)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.write(2, b"stopping after this phase; a second signal ends the process at once\n")

    try:
        before = [
            (number, signal.signal(number, catch)) for number in (signal.SIGTERM, signal.SIGINT)
        ]
    except ValueError:  # signals are for the main thread
        before = []
    try:
        yield
    finally:
        for number, handler in before:
            signal.signal(number, handler)


@torch.inference_mode(False)  # whatever mode the caller is in
@torch.enable_grad()
def train(cfg: Config) -> list[dict]:
    """The whole run. Returns the lines of metrics.jsonl."""
    check_flags(cfg)
    transformers.logging.disable_progress_bar()
    torch.set_float32_matmul_precision("highest")  # rounded products look like a wrong sampler
    started_group = not dist.is_initialized()
    with contextlib.ExitStack() as closing:
        run = Run(cfg, join_ranks(cfg), closing)
        with signals_into(run.signals):
            try:
                training_loop(run)
            finally:
                run.save()  # the last whole step, also if a signal or an error ended the loop
        if WORLD_SIZE > 1:
            dist.barrier()  # nobody leaves while rank 0 saves
        run.ddp = None  # before vLLM closes, which may end the process group
    if started_group and dist.is_initialized():
        dist.destroy_process_group()
    finish(run)
    return run.history


def finish(run: Run) -> None:
    """Curves, and what a reader wants to know at the end."""
    if RANK > 0:
        return
    with contextlib.suppress(Exception):  # a picture that cannot be drawn ends no run
        from extras import view

        say(f"curves: {view.draw(run.cfg.out_dir)}")
    accuracies = [m["eval_accuracy"] for m in run.history if "eval_accuracy" in m]
    if accuracies:
        say(f"accuracy_before: {accuracies[0]:.3f}\naccuracy_after: {accuracies[-1]:.3f}")
    say(f"steps: {run.step}\nseconds: {time.perf_counter() - run.started:.1f}")
    say(f"out_dir: {run.cfg.out_dir}")


def main(argv: list[str] | None = None) -> int:
    """The command line. Returns the exit code; errors of the user and of the run are one line."""
    code = 1
    try:
        train(parse_flags(argv))
        return 0
    except ConfigError as error:
        message = str(error)
        code = 2
    except TrainingError as error:
        message = str(error)
    except torch.OutOfMemoryError as error:
        less = "lower --micro_batch_tokens or --vllm_gpu_memory_utilization"
        message = f"{one_line(error)} {less}, or take --gradient_checkpointing or --beta 0"
    if LOCAL_RANK > 0:
        time.sleep(3)  # torchrun ends all ranks with the first: let rank 0 speak
    print(f"grpo.py: error: {message}", file=sys.stderr, flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
