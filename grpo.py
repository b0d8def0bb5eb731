r"""GRPO in one file: sample a group of answers to each prompt, score them, and make the answers
that beat the mean of their group more likely.

    python grpo.py                             # the bundled tiny model learns to add, on a CPU
    torchrun --nproc_per_node=2 grpo.py        # the same gradient, in two processes
    torchrun --nproc_per_node=8 grpo.py --model Qwen/Qwen2.5-1.5B-Instruct --rollout vllm --chat \
        --train_data train.jsonl --prompt_template '{question}' --reward gsm8k

A whole step in ten lines. This file adds --tis_cap (a weight near 1 per token), --max_grad_norm
and, in the bundled task, --beta; without them it has the same gradient. (test_grpo.py compares.)

    groups = [[sample(model, prompt) for _ in range(8)] for prompt, row in prompts]
    n_tokens = sum(len(answer) for answers in groups for answer in answers)
    for (prompt, row), answers in zip(prompts, groups):  # token ids: prompt [P], answers [T] each
        rewards = torch.tensor([reward(decode(answer), row) for answer in answers])  # [8]
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4)  # [8]
        for answer, advantage in zip(answers, advantages):
            logits = model(torch.cat([prompt, answer]))[len(prompt) - 1 : -1]  # [T, V]
            logps = logits.log_softmax(-1)[range(len(answer)), answer]  # [T]
            (-advantage * logps.sum() / n_tokens).backward()
    optimizer.step()  # and optimizer.zero_grad() before the next

GRPO is fine-tuning on the model's own answers. The loss is the cross-entropy of each answer times
its advantage, which is negative for an answer below the mean of its group. The reward is only a
number: no gradient goes through it. n_tokens counts the tokens of all answers of the optimizer
step, so each token has the same weight. A mean over each answer would give the tokens of short
answers more weight; a mean over each micro-batch (a common mistake in gradient accumulation) would
give the tokens of small micro-batches more weight.

One group: four answers with the rewards 1, 0, 0, 1. Their mean is 0.5 and their standard deviation
(n - 1) is 0.58, so the advantages A are +0.87, -0.87, -0.87, +0.87. They add up to 0. The loss of
this file is the mean of -A * ratio over the tokens. The ratio (below) is 1 by default, so with
answers of equal length and no KL penalty the loss is nearly 0, too. Its gradient is not 0: the
first and last answer are pushed up, the others down. So watch the reward, not the loss. With four
equal rewards all A would be 0, and only the KL penalty (--beta, below) would have a gradient.

Why it works (the policy gradient: REINFORCE, Williams 1992). Let p be an answer's probability, the
product of its tokens' probabilities: log p is logps.sum() above. The expected reward is the sum of
p * reward over all answers. As grad p is p * grad log p, the gradient of that sum is the mean of
reward * grad log p over sampled answers. A number b that does not depend on the answer may be
subtracted from the reward: the mean of b * grad log p is b * grad(sum of p) = b * grad(1) = 0. Only
the noise changes; a b near the mean reward usually lowers it. The mean reward of the group's other
answers is such a b, and reward - (mean of the group) is (G - 1) / G * (reward - b): the same but
for a factor. Two divisions are left out here: by n_tokens (a step of long answers counts less), and
by the standard deviation (A * 2.8 if 1 answer of 8 is right, 1.9 if 4; off: --scale_rewards none).

Terms: the policy is the model that is trained; a completion is an answer. A step is a rollout,
which samples and scores, and an update, which learns from the samples in one optimizer step or in
several (--num_minibatches, --num_epochs), each with a minibatch of them. A minibatch goes through
the model in micro-batches, whose gradients add up. A rank is one of the processes that torchrun
starts. The reference is a frozen model, by default the initial policy; --beta adds a penalty, the
KL divergence, that keeps the policy near it.

The ten lines use -A * logp, this file -A * ratio. The ratio, exp(logp - old_logp), tells how many
times as likely a token has become since it was sampled. As old_logp is a constant, the gradient of
the ratio is ratio * grad logp. In the first optimizer step on a rollout (by default the only one)
the ratio is 1, so both losses have the same gradient. In a later one a ratio of 1.2 means that the
policy would now sample this token, after the same tokens, 1.2 times as often: so the token counts
1.2 times (importance sampling, token by token). Above 1.28 (if A > 0) or below 0.8 (if A < 0) its
loss is clipped to a constant, which has no gradient: the token gets no further push.

Where this file has the ten lines, with batches, ranks and options:

    groups                     rollout, sample_batch (just before PLUMBING; or VLLMSampler)
    n_tokens                   assign_loss_weights
    rewards                    score (reward.py has the reward functions)
    advantages                 assign_advantages, group_advantages
    logits, logps              collate (the batch), Policy
    the loss, backward         grpo_loss, accumulate_gradient
    optimizer.step()           update

Shapes: N samples, G of one prompt (a group), P prompt tokens, T completion tokens, V tokens in the
vocabulary. A micro-batch is [N, L], padded; the policy sampled n of its tokens (no prompt, no
padding), and the loss works on [n].
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import math
import os
import shutil
import signal
import sys
import time
from collections import Counter
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # idle threads must not spin on busy cores

import numpy as np
import torch
import torch.distributed as dist
import transformers
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from reward import fill_in_reward, load_rewards

HERE = os.path.dirname(os.path.realpath(__file__))
RANK = int(os.environ.get("RANK", 0))  # torchrun sets these three
LOCAL_RANK = int(os.environ.get("LOCAL_RANK", 0))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", 1))


# -- Records
LATER: Any = None  # until the trainer fills the field in


@dataclass
class Prompt:
    ids: np.ndarray  # [P] token ids
    text: str
    row: dict  # the row of the data file
    messages: list | None = None  # the chat; None: the prompt is plain text
    row_number: int = 0  # in the data file, from 0


@dataclass(eq=False)  # == on arrays gives no single bool
class Sample:
    """One completion. Arrays are [T]."""

    group: int  # index of the prompt in the step
    prompt: Prompt
    completion_ids: np.ndarray  # with the EOS, unless cut off: the policy learns to stop
    # Log-probabilities of these tokens. Sampler and policy have the same weights until the update,
    # but the sampler computes with a cache, or in vLLM, so the two logps differ by rounding.
    sampler_logps: np.ndarray  # by the sampler, when it drew the tokens
    # By the policy, before the first optimizer step. None if there is no second one, because
    # accumulate_gradient then uses the logps of its own forward pass, as constants.
    old_logps: np.ndarray | None = None
    ref_logps: np.ndarray | None = None  # by the reference; None without a KL term
    sampled: np.ndarray = LATER  # True: by the policy; False: by a tool or an environment
    trainable: np.ndarray = LATER  # False: not in the loss; assign_advantages decides
    advantages: np.ndarray = LATER  # by assign_advantages; until then 0
    loss_weights: np.ndarray = LATER  # by assign_loss_weights, such as 1 / n_tokens
    finish_reason: str = "stop"  # or "length": cut off
    text: str = LATER  # without the EOS, for reward functions
    rewards: dict = field(default_factory=dict)  # name of a reward function: its value
    reward: float = math.nan  # their weighted sum, or --non_stop_reward; nan: none apply
    failure: str = ""  # why a reward function or the sampler failed
    info: dict = field(default_factory=dict)  # further notes of reward functions and extras/

    def __post_init__(self):
        T = len(self.completion_ids)
        if self.sampled is None:
            self.sampled = np.ones(T, bool)
        if self.trainable is None:
            self.trainable = np.ones(T, bool)
        if self.advantages is None:
            self.advantages = np.zeros(T)

    @property
    def loss_mask(self) -> np.ndarray:
        return self.sampled & self.trainable

    @property
    def advantages_in_loss(self) -> np.ndarray:
        return self.advantages[self.loss_mask]

    @property
    def total_length(self) -> int:
        return len(self.prompt.ids) + len(self.completion_ids)


# -- The loop
def training_loop(run: Run) -> None:
    """GRPO. `run` holds the model, the data and the settings; `run_loop` calls this."""
    cfg = run.cfg
    run.sampler.load_weights(run.policy.model)  # the sampler may have a copy of the model
    run.evaluate_if_due()
    while not run.should_stop():
        run.record_time("eval")  # since the last update: load_weights, eval and save

        # Sample a group of G completions for each prompt, and score them.
        step, G = run.step + 1, cfg.num_generations
        prompts = prompts_of_step(run.train_prompts, step, cfg)
        stream = SAMPLING  # of random numbers; an eval has another
        samples = rollout(run, prompts, stream, step, G, cfg.temperature)
        run.sampler.sleep()  # the update needs the memory
        run.record_time("rollout")

        # The loss needs old_logps, the policy's before its first optimizer step, and ref_logps. If
        # there is only one optimizer step, the forward pass of the update yields the old_logps.
        if cfg.num_minibatches * cfg.num_epochs > 1:
            add_logps("old_logps", run.policy, samples, cfg)
        if run.reference is not None:  # --beta > 0
            add_logps("ref_logps", run.reference, samples, cfg)
        run.record_time("logps")

        # How much better is each completion than its group? Then update, in one step or several.
        assign_advantages(samples, cfg, run.state)
        metrics = update(run.policy, run.ddp, run.optimizer, samples, step, cfg)
        run.record_time("update")
        run.end_step(step, samples, metrics)  # a checkpoint from here on includes this step

        run.sampler.load_weights(run.policy.model)
        run.evaluate_if_due()
        run.files.save_if_due(run)


# -- How good is a sample? Its reward, its advantage
def score(samples: list[Sample], run: Run) -> None:
    """Fills in `rewards`, a value for each reward function, and `reward`, their weighted sum. A
    function gets the text and the row of the data (see reward.py). A failed call gives 0; nan means
    that the function does not apply."""
    scored = [s for s in samples if not s.failure]
    for function in run.reward_functions:
        for s in samples:
            s.rewards[function.name] = 0.0  # stays if the sampler failed
        seed = seed_of(run.cfg, REWARDS, run.step, RANK) % 2**32
        transformers.set_seed(seed)  # for a function that draws random numbers
        fill_in_reward(function, scored, run)  # s.rewards[name] = function(s.text, s.prompt.row)
    for s in samples:
        weighted = [function.weight * s.rewards[function.name] for function in run.reward_functions]
        if not np.isnan(weighted).all():
            s.reward = float(np.nansum(weighted))
            if s.finish_reason == "length" and run.cfg.non_stop_reward is not None:
                s.reward = run.cfg.non_stop_reward


def group_advantages(rewards, group_size: int, scale: str = "group", eps: float = 1e-4):
    """How much better each sample is than the mean of its group: rewards [N], group after group,
    -> [N]. Equal rewards give exactly 0. A nan is ignored; its advantage is 0.

    scale: what r - mean is divided by. "group": the standard deviation of the group, so that
    rewards of 0 and 1 teach as much as 0 and 100 (DeepSeekMath, arXiv 2402.03300). "batch": the
    standard deviation of all rewards. "none": nothing (Dr. GRPO, arXiv 2503.20783).
    """
    grouped = rewards.double().view(-1, group_size)  # [N / G, G]
    mean = grouped.nanmean(1, keepdim=True)  # [N / G, 1]
    advantages = grouped - mean
    # Weighted sums round: 0.1 + 0.2 must count as equal to 0.3, and 0.1 + 0.2 - 0.3 as equal to 0.
    advantages[torch.isclose(grouped, mean, rtol=1e-15, atol=1e-12)] = 0.0
    if scale == "group":
        advantages = advantages / (nanstd(grouped) + eps)  # [N / G, G] / [N / G, 1]
    elif scale == "batch":
        advantages = advantages / (nanstd(grouped.view(1, -1)) + eps)  # [N / G, G] / [1, 1]
    return advantages.nan_to_num(0.0).flatten().to(rewards.dtype)  # nan: ignored


def assign_advantages(samples: list[Sample], cfg: Config, state: dict | None = None) -> None:
    """Fills in `advantages`. Another algorithm puts its code here: it sets advantages and
    trainable, token by token, and keeps in `state` what a later step or a resume must know."""
    rewards = torch.tensor([s.reward for s in samples], dtype=torch.float64)  # [N]
    advantages = group_advantages(rewards, cfg.num_generations, cfg.scale_rewards)  # [N]
    for s, advantage in zip(samples, advantages.tolist(), strict=True):
        s.advantages[:] = advantage  # the same for all tokens
        # --mask_truncated: a cut-off completion counts in the group's mean, but not in the loss.
        leave_out = cfg.mask_truncated and s.finish_reason == "length"
        if leave_out or math.isnan(s.reward):
            s.trainable[:] = False


# -- A batch, its log-probabilities
# Fields of a Sample that the loss gets. To add one, put its name here, and pass it to grpo_loss.
IN_BATCH = ["advantages", "loss_weights", "sampler_logps", "old_logps", "ref_logps"]


def collate(samples: list[Sample], device: torch.device) -> dict:
    """The tensors of a micro-batch. Each row is a prompt and its completion, padded on the right.
    (No attention mask: a token attends only to its left, so never to padding.) If a b c has the
    completion x y . and d e has w . (with the EOS .):
        ids          a b c x y .  d e w . 0 0     [N, L], 2 rows of 6
        targets            x y .      w .         [n], the sampled tokens
        logit_index      2 3 4      7 8           [n], index of the logits that predict them

    The fields of IN_BATCH are [n], too, sample after sample.
    """
    lengths = [int(s.sampled.sum()) for s in samples]  # how many of the n each sample has
    ids = padded([np.append(s.prompt.ids, s.completion_ids) for s in samples])  # [N, L]
    lists = dict(logit_index=[], targets=[s.completion_ids[s.sampled] for s in samples])
    for i, s in enumerate(samples):
        # In the flattened [N * L]. A token is predicted one place earlier.
        first = i * ids.shape[1] + len(s.prompt.ids) - 1
        lists["logit_index"].append(first + np.flatnonzero(s.sampled))
    for name in IN_BATCH:
        if any(getattr(s, name) is not None for s in samples):  # it is set in all, or in none
            lists[name] = [getattr(s, name)[s.sampled] for s in samples]
    batch = {name: torch.from_numpy(np.concatenate(parts)) for name, parts in lists.items()}  # [n]
    batch["ids"] = ids
    batch = {name: x.to(device, non_blocking=True) for name, x in batch.items()}  # GPU: no waiting
    return batch | dict(lengths=lengths)


class Policy(nn.Module):
    """policy(policy.collate(samples)) -> logps [n], the log-probability of each sampled token, and
    entropy [n], how uncertain the model was there (in nats, for the log). extras/ runs a faster
    Policy for a large model, unless you have edited this class or a function that it calls."""

    def __init__(self, model, temperature: float, dtype: str = "float32"):
        super().__init__()
        self.model = model
        self.temperature = temperature
        self.dtype = dtype  # of matrix products

    def micro_batches(self, samples: list[Sample], cfg: Config) -> list[list[Sample]]:
        return micro_batches(samples, cfg)

    def collate(self, samples: list[Sample]) -> dict:
        return collate(samples, self.model.device)

    def forward(self, batch: dict):
        with autocast(self.model.device, self.dtype):
            logits = self.model(batch["ids"], use_cache=False).logits  # [N, L, V]
        logits = logits.flatten(0, 1)[batch["logit_index"]]  # [n, V]
        return logps_of(logits, batch["targets"], self.temperature)


def logps_of(logits, targets, temperature: float):
    logps = log_probabilities(logits, temperature)  # [n, V], of logits / temperature
    entropy = torch.special.entr(logps.detach().exp()).sum(-1)  # [n], - sum of p log p
    return logps.gather(-1, targets[:, None])[:, 0], entropy


# -- The loss of a micro-batch, as a sum over its n tokens
def grpo_loss(
    logps,  # [n], as are all tensors here: a value for each sampled token of a micro-batch
    old_logps,
    ref_logps,  # None: no KL term
    sampler_logps,  # None: the sampler's probabilities are not corrected
    advantages,
    loss_weights,  # such as 1 / n_tokens: see assign_loss_weights
    cfg: Config,
    lengths: list[int],  # how many of the n each sample has
):
    """The loss of one micro-batch, and sums for the log. With the default flags:

        ratio = (logps - old_logps).exp()
        losses = torch.maximum(-A * ratio, -A * ratio.clamp(0.8, 1.28))  # A is the advantage
        loss = (losses * loss_weights).sum()  # a weight is 1 / n_tokens

    Not shown: each token's factor of about 1 (TIS), the KL term of --beta, and other flags. The
    loss is a SUM, divided by the n_tokens of the WHOLE optimizer step: the losses of all
    micro-batches and ranks add up to the loss of the step.
    """
    ratio = (logps - old_logps).exp()  # [n]
    if cfg.ratio_level == "sequence":  # one ratio for the whole completion (GSPO)
        ratio = sequence_ratio(logps, old_logps, lengths)
    if ref_logps is not None and cfg.kl_in == "reward":
        advantages = advantages - cfg.beta * kl_from_here_on(old_logps, ref_logps, lengths)
    losses = -advantages * ratio  # [n]
    # The clip (PPO, arXiv 1707.06347, eq. 7). If A is 1 and the ratio 1.5, the loss is -1.5 and the
    # clipped loss -1.28. The maximum, -1.28, is a constant: its gradient is 0. At a ratio of 0.5 it
    # is -0.5, and the gradient stays. If A is -1, the gradient is 0 only below 0.8.
    clipped = -advantages * ratio.clamp(1 - cfg.clip_low, 1 + cfg.clip_high)  # [n]
    is_clipped = clipped > losses
    losses = torch.maximum(losses, clipped)

    # Truncated importance sampling (TIS): a token counts p_policy / p_sampler times. The sampler
    # computes a little differently (see Sample): a token that it draws too often counts less.
    if sampler_logps is not None and cfg.tis_cap > 0:
        losses = losses * (old_logps - sampler_logps).exp().clamp(max=cfg.tis_cap)
    if ref_logps is not None and cfg.kl_in == "loss":  # --beta > 0, as in the bundled task
        losses = losses + cfg.beta * kl_estimate(logps, ref_logps, old_logps, cfg.kl_estimator)
    loss = (losses * loss_weights).sum()
    in_loss = loss_weights > 0
    return loss, token_stats(in_loss, is_clipped, logps, old_logps, ref_logps, sampler_logps)


def assign_loss_weights(minibatch: list[Sample], cfg: Config) -> None:
    """Fills in `loss_weights`: what the loss of each token is multiplied by, such as 1 / n_tokens.
    Counts are of the whole optimizer step, over all micro-batches and ranks."""
    lengths = [int(s.loss_mask.sum()) for s in minibatch]
    n_tokens = max(1, sum(lengths))
    n_sequences = max(1, np.count_nonzero(lengths))
    for s, length in zip(minibatch, lengths, strict=True):
        if cfg.loss_reduction == "token":
            weight = 1 / n_tokens  # each token counts the same (DAPO, arXiv 2503.14476)
        elif cfg.loss_reduction == "sequence":
            weight = 1 / max(1, length)  # the mean over the completion (the original GRPO)
            weight = weight / n_sequences  # each completion counts the same
        else:  # divided by a constant, so a token's weight depends on no length (Dr. GRPO)
            weight = 1 / (n_sequences * cfg.max_completion_length)
        s.loss_weights = np.where(s.loss_mask, weight, 0.0)  # [T]


# -- Step, backward
def update(policy, ddp, optimizer, samples: list[Sample], step: int, cfg: Config) -> dict:
    """All optimizer steps on a rollout, by default one. ddp: the policy in DistributedDataParallel,
    or the bare policy. All ranks have the same samples. Returns metrics."""
    sums, largest, norms = Counter(), {}, []
    steps_taken = 0
    for epoch in range(cfg.num_epochs):
        rng = np.random.default_rng((cfg.seed, MINIBATCHES, step, epoch))
        for chosen in np.array_split(rng.permutation(len(samples)), cfg.num_minibatches):
            earlier_steps = (step - 1) * cfg.num_epochs * cfg.num_minibatches + len(norms)
            set_learning_rate(optimizer, earlier_steps, cfg)
            optimizer.zero_grad(set_to_none=True)
            new_sums = accumulate_gradient(policy, ddp, [samples[i] for i in chosen], cfg)
            if not norms:  # The sampler still has these weights: a gap beyond rounding is a fault.
                tokens = max(1, new_sums["sampled_tokens"])
                check_gap(new_sums["sampler_gap"] / tokens, cfg, tokens)

            norm = nn.utils.clip_grad_norm_(ddp.parameters(), cfg.max_grad_norm or math.inf).item()
            # Adam makes a full step of any gradient, however small. So no step if the gradient is
            # - nan or inf;
            # - 0 (equal rewards in all groups), when momentum alone would move the weights;
            # - the KL's alone while the policy still is the reference: rounding (k1, k4: noise).
            has_advantage = any(samples[i].advantages_in_loss.any() for i in chosen)
            is_reference = cfg.beta > 0 and not cfg.reference and not optimizer.state  # no step yet
            if 0 < norm < math.inf and (has_advantage or not is_reference):
                optimizer.step()
                steps_taken += 1

            norms.append(norm)  # before clipping
            for name in [name for name in new_sums if name.endswith("max")]:
                largest[name] = max(new_sums.pop(name), largest.get(name, -math.inf))
            sums.update(new_sums)  # a Counter adds
    optimizer.zero_grad(set_to_none=True)  # the sampler needs the memory
    return update_metrics(sums, norms, steps_taken, optimizer) | largest


def accumulate_gradient(policy, ddp, minibatch: list[Sample], cfg: Config) -> Counter:
    """The gradient of one optimizer step, a sum over its micro-batches. Returns sums over all
    ranks, for the log: without a KL only over the samples whose advantage is not 0."""
    assign_loss_weights(minibatch, cfg)  # a minibatch has the samples of all ranks
    # Without a KL, a sample whose advantages are 0 has no gradient. (With a new term in the loss:
    # needed = minibatch.)
    needed = [s for s in minibatch if s.advantages_in_loss.any() or cfg.beta > 0]
    batches = policy.micro_batches(needed or minibatch[:1], cfg)  # never none: the log needs sums
    # DDP needs equally many backward passes on each rank. The last may be of copies without targets
    # (n is 0), whose loss and gradient are 0.
    empty = [replace(s, sampled=np.zeros_like(s.sampled)) for s in batches[-1]]
    batches += [empty] * (-len(batches) % WORLD_SIZE)  # now a multiple of WORLD_SIZE

    sums = []
    for i in range(RANK, len(batches), WORLD_SIZE):  # the batches of this rank
        # DDP all-reduces in the last backward; before that, each rank only adds up (no_sync).
        is_last = i + WORLD_SIZE >= len(batches)
        sync = contextlib.nullcontext() if WORLD_SIZE == 1 or is_last else ddp.no_sync()
        batch = policy.collate(batches[i])
        with sync:
            logps, entropy = ddp(batch)  # [n] both
            # With one optimizer step old_logps are these logps, detached: the ratio is 1, and its
            # gradient is the gradient of logps.
            old_logps = batch.get("old_logps", logps.detach())
            ref_logps, sampler_logps = batch.get("ref_logps"), batch["sampler_logps"]
            rest = batch["advantages"], batch["loss_weights"], cfg, batch["lengths"]
            loss, stats = grpo_loss(logps, old_logps, ref_logps, sampler_logps, *rest)
            # DDP takes the mean of the ranks' gradients, and we need their sum, because the weights
            # count the tokens of all ranks.
            (loss * WORLD_SIZE).backward()
        entropy = entropy * (batch["loss_weights"] > 0)  # [n]
        sums.append(stats | dict(loss=loss.detach(), entropy=entropy.sum()))
    return sum_over_ranks(sums)


# -- Where the samples come from
def rollout(run: Run, prompts, stream, step, G: int, temperature, first=0) -> list[Sample]:
    """G scored samples of each prompt, group after group. Rank r samples for the prompts r,
    r + WORLD_SIZE and so on; then every rank gets all samples.

    stream: of random numbers, SAMPLING or EVAL. first: the index of prompts[0] in the eval data,
    because each call of an eval gets a part of the data.
    """
    places = [(group, i) for group in range(RANK, len(prompts), WORLD_SIZE) for i in range(G)]
    # A seed for each sample: its random numbers depend on no other sample, and not on the ranks.
    seeds = [(seed_of(run.cfg, stream, step, first + group), i) for group, i in places]
    my_prompts = [prompts[group] for group, _ in places]
    completions = run.sampler.generate(my_prompts, seeds, temperature)  # fields of a Sample each

    samples = []
    for (group, _), prompt, completion in zip(places, my_prompts, completions, strict=True):
        known: dict = dict(group=group, prompt=prompt)
        s = Sample(**known | completion)
        ids = s.completion_ids
        if ids[-1] in run.sampler.stop_ids:
            ids = ids[:-1]
        else:
            s.finish_reason = "length"  # cut off
        if s.text is None:
            s.text = run.tokenizer.decode(ids)
        samples.append(s)
    score(samples, run)
    samples = sorted(all_gather(samples), key=lambda s: s.group)
    # A nan shows a broken sampler. The update would miss it in a sample that it leaves out.
    if not all(np.isfinite(s.sampler_logps).all() for s in samples):
        check_gap(math.nan, run.cfg)  # raises TrainingError
    return samples


@torch.no_grad()
def sample_batch(model, prompts, seeds, temperature: float, limits, stop_ids, cfg) -> list[dict]:
    """A completion of each prompt: completion_ids and sampler_logps, [T] both. limits: the
    maximum length of each. VLLMSampler is faster, but this needs no other package."""
    randoms = [np.random.default_rng(seed).random(max(limits)) for seed in seeds]
    randoms = torch.tensor(np.array(randoms), device=model.device)  # [N, T], in [0, 1)
    ids = padded([p.ids for p in prompts], side="left").to(model.device)  # [N, P]
    mask = padded([np.ones_like(p.ids) for p in prompts], side="left").to(model.device)
    positions = (mask.cumsum(1) - 1).clamp(min=0)  # [N, P]
    completions = [dict(completion_ids=[], sampler_logps=[]) for _ in prompts]
    running = np.arange(len(prompts))  # the completions that have not stopped: rows of the batch
    cache = None  # keys and values of the tokens so far
    with autocast(model.device, cfg.dtype, keep_weights=True):
        for t in range(max(limits)):
            options = dict(past_key_values=cache, use_cache=True, logits_to_keep=1)
            out = model(ids, attention_mask=mask, position_ids=positions, **options)
            # The first token at which the cumulative probability exceeds the random number:
            ids, logps = sample_token(out.logits[:, -1], temperature, randoms[running, t, None])
            tokens = ids[:, 0].cpu().numpy()
            for i, token, logp in zip(running, tokens, logps[:, 0].cpu().numpy(), strict=True):
                completions[i]["completion_ids"].append(token)
                completions[i]["sampler_logps"].append(logp)
            goes_on = ~np.isin(tokens, stop_ids) & (t + 1 < np.array(limits)[running])
            if not goes_on.any():
                break
            # The next pass gets the new token alone: the cache has the others.
            cache = out.past_key_values
            positions = positions[:, -1:] + 1
            mask = nn.functional.pad(mask, (0, 1), value=1)
            if not goes_on.all():  # stopped completions leave the batch
                rows = torch.from_numpy(np.flatnonzero(goes_on)).to(model.device)
                running = running[goes_on]
                ids, mask, positions = ids[rows], mask[rows], positions[rows]
                cache.batch_select_indices(rows)
    return [{name: np.array(x) for name, x in fields.items()} for fields in completions]


# ------------------------------------------------------------------------------------------------
# PLUMBING. The options of the loss, then the functions that are called above, then the program.
# ------------------------------------------------------------------------------------------------


# -- Extras: nothing above this line is marked @extra
# extras/ imports grpo. That must be this file, even if it runs as a script or as my_grpo.py.
is_first = sys.modules.setdefault("grpo", sys.modules[__name__]) is sys.modules[__name__]
try:
    from extras import WRAP_GRPO
except ImportError:  # it is not there, or another package has its name
    WRAP_GRPO = False
USE_EXTRAS = WRAP_GRPO and is_first and "--plain" not in sys.argv  # not in a second copy


def extra(file: str):
    """With extras/, a call of the function below runs the function of the same name in
    extras/FILE.py, which gets the function below as its first argument, calls it, and adds checks,
    more kinds of models and data, and recovery from errors. Without extras/, or with --plain, the
    function below runs alone.

    So all code of this file runs, with two exceptions: large models get a faster Policy (no
    padding, another head; the run prints its name) until you edit this file's, and models and data
    that this file does not support get other code. A value that you change here wins over the value
    in extras/. If you delete an @extra, a flag that needs it ends the run."""

    def mark(plain):
        @functools.wraps(plain)
        def wrapped(*args, **kwargs):
            if not USE_EXTRAS:
                return plain(*args, **kwargs)
            module = importlib.import_module(f"extras.{file}")
            return getattr(module, plain.__name__)(plain, *args, **kwargs)

        return wrapped

    return mark


# -- The options of the loss: what grpo_loss calls if a flag asks for it
def sequence_ratio(logps, old_logps, lengths: list[int]):
    """[n]: one ratio for the whole completion, exp(the mean of logp - old_logp), because the
    ratios of single tokens are noisy (GSPO, arXiv 2507.18071, eq. 7 and 14)."""
    of_samples = (logps - old_logps).split(lengths)  # [T] each
    mean = torch.cat([d.mean().expand_as(d) for d in of_samples])  # [n]
    # The exponent has the mean as its value, and the gradient of each token's own logp, so that
    # tokens may have advantages and masks of their own (GSPO-token):
    return (mean.detach() + logps - logps.detach()).exp()


def kl_estimate(logps, ref_logps, old_logps, estimator: str):
    """[n]: for each token a number whose average over many samples is KL(policy || reference) or
    near it, in nats. d = log(policy / reference), w = policy / old policy: the ratio. In the loss,
    an estimate acts on logp by its derivative: if that is positive, the token becomes less likely.

        estimate              derivative
        k1 = d                1            where w is 1: no push on average, only noise
        k2 = d^2 / 2          d            right in the first optimizer step, where w is 1
        k3 = exp(-d) - 1 + d  1 - exp(-d)  too weak where d > 0, too strong where d < 0
        k4 = w k1             w (1 + d)    right, but the 1 is noise
        wk3 = w k3            w d          right; the default

    Right: on average the gradient of each token's KL, given the tokens before it (kl_from_here_on
    adds the effect on later tokens). Where w is 1, k3 has the gradient of KL(reference || policy).
    k1 to k3 are Schulman's (joschu.net/blog/kl-approx.html), wk3 is DeepSeek-V3.2's (arXiv
    2512.02556).
    """
    d = (logps.double() - ref_logps).detach()  # float32: exp(-d) overflows below -88
    w = (logps.double() - old_logps).detach().exp()
    k3 = torch.expm1(-d) + d
    values = dict(k1=d, k2=d.square() / 2, k3=k3, k4=w * d, wk3=w * k3)
    derivatives = dict(k1=d**0, k2=d, k3=-torch.expm1(-d), k4=w * (1 + d), wk3=w * d)
    # From the table: autograd would compute some as a difference of large terms, mostly rounding.
    derivative = derivatives[estimator].clamp(-1e30, 1e30)
    return values[estimator] + derivative * (logps - logps.detach())


def kl_from_here_on(old_logps, ref_logps, lengths: list[int]):
    """[n]: with --kl_in reward the KL is a cost that is subtracted from the advantage. A token pays
    for itself and for the later tokens of its completion, because they follow from it."""
    k1 = (old_logps - ref_logps).detach()
    return torch.cat([x.flip(0).cumsum(0).flip(0) for x in k1.split(lengths)])  # sums from t on


# -- Random streams, the order of the data
# Each generator is seeded with (--seed, stream, step, index). So draws do not depend on the number
# of ranks (except in reward functions), and a resume has no generator to restore. Streams:
SAMPLING = 0  # completions; step: from 1 on; index: the prompt within the step
ORDER = 0  # order of the data, always with the step 0; index: the pass over the data
EVAL = 1  # completions of an eval; index: the prompt
REWARDS = 2  # reward functions; step: the last complete one; index: the rank
MINIBATCHES = 4  # order of a rollout's samples; index: the pass over them


def seed_of(cfg: Config, stream: int, step: int, index: int) -> int:
    sequence = np.random.SeedSequence((cfg.seed, stream, step, index))
    return int(sequence.generate_state(1, np.uint64)[0] >> 2)  # 62 bits


def prompts_of_step(prompts: list[Prompt], step: int, cfg: Config) -> list[Prompt]:
    """The next num_prompts prompts. With --shuffle each pass over the data has its own order."""
    chosen, orders = [], {}
    for place in range((step - 1) * cfg.num_prompts, step * cfg.num_prompts):
        k, i = divmod(place, len(prompts))  # the pass over the data, and the place in it
        if k not in orders:
            orders[k] = np.random.default_rng((cfg.seed, ORDER, 0, k)).permutation(len(prompts))
        chosen.append(prompts[orders[k][i] if cfg.shuffle else i])
    return chosen


# -- Batches
def padded(arrays: list[np.ndarray], side: str = "right") -> torch.Tensor:
    """[N, length of the longest], padded with zeros."""
    tensors = [torch.from_numpy(array) for array in arrays]
    return nn.utils.rnn.pad_sequence(tensors, batch_first=True, padding_side=side)


def micro_batches(samples: list[Sample], cfg: Config) -> list[list[Sample]]:
    """Batches of at most micro_batch_tokens, or of one sample. No split changes the gradient,
    because the loss is a sum."""
    samples = sorted(samples, key=lambda s: -s.total_length)  # similar lengths: little padding
    total = sum(s.total_length for s in samples)
    budget = cfg.micro_batch_tokens or 2048
    budget = min(budget, total / WORLD_SIZE)  # one for each rank, if lengths allow
    batches = []
    for s in samples:
        # All rows are as long as the first.
        if not batches or (len(batches[-1]) + 1) * batches[-1][0].total_length > budget:
            batches.append([])
        batches[-1].append(s)
    return batches


@torch.no_grad()
def add_logps(name: str, policy, samples: list[Sample], cfg: Config) -> None:
    """Fills in old_logps or ref_logps: each rank computes a part, and every rank gets all parts."""
    batches = policy.micro_batches(samples, cfg)
    computed = []
    for samples_of_batch in batches[RANK::WORLD_SIZE]:
        batch = policy.collate(samples_of_batch)
        computed.append((policy(batch)[0], batch["lengths"]))  # logps [n]
    # On a GPU the passes are only queued so far; .cpu() waits for them.
    parts = [part.numpy() for logps, lengths in computed for part in logps.cpu().split(lengths)]
    in_order = [s for rank in range(WORLD_SIZE) for b in batches[rank::WORLD_SIZE] for s in b]
    for s, part in zip(in_order, all_gather(parts), strict=True):
        row = np.zeros(len(s.sampled), part.dtype)  # [T]
        row[s.sampled] = part
        setattr(s, name, row)


# -- Metrics, under TRL's names
def token_stats(in_loss, is_clipped, logps, old_logps, ref_logps, sampler_logps) -> dict:
    """Sums over the tokens in the loss, and of the sampler's gap over all tokens. in_loss [n]."""
    logps = logps.detach()
    stats = {"tokens": in_loss.sum(), "clip_ratio/region_mean": (is_clipped & in_loss).sum()}
    if sampler_logps is not None:
        gap = (old_logps - sampler_logps).abs()
        stats["sampler_gap"] = gap.sum()
        largest = nn.functional.pad(gap, (0, 1)).max()  # n may be 0
        stats["sampling/sampling_logp_difference/max"] = largest
        stats["sampled_tokens"] = torch.ones_like(logps).sum()
    if ref_logps is not None:
        k3 = kl_estimate(logps, ref_logps, logps, "k3")
        stats["kl"] = (k3 * in_loss).sum()
        stats["kl_k1"] = ((logps - ref_logps) * in_loss).sum()
    return stats


def nanstd(x):
    """[R, C] -> [R, 1]: the standard deviation (n - 1) without nan values; 0 of one or no value."""
    count = (~x.isnan()).sum(1, keepdim=True)
    squares = (x - x.nanmean(1, keepdim=True)).square().nansum(1, keepdim=True)
    return (squares / (count - 1).clamp(min=1)).sqrt()


def mean_and_std(values) -> tuple:
    x = torch.tensor(np.array([values], float))  # [1, C]
    return x.nanmean().item(), nanstd(x).item()


def sum_over_ranks(of_batches: list[dict]) -> Counter:
    """Sums over the micro-batches of all ranks. If a name ends in max, the largest value."""
    rows = [torch.stack([x.double() for x in sums.values()]) for sums in of_batches]
    rows = all_gather(torch.stack(rows).tolist())  # one copy from the GPU for all of them
    totals = Counter()
    for name, values in zip(of_batches[0], zip(*rows, strict=True), strict=True):
        totals[name] = max(values) if name.endswith("max") else sum(values)
    return totals


def update_metrics(sums: Counter, norms, steps_taken: int, optimizer) -> dict:
    tokens, sampled_tokens = max(1, sums.pop("tokens")), max(1, sums.pop("sampled_tokens"))
    metrics = {
        "loss": sums.pop("loss") / len(norms),
        "grad_norm": float(np.mean(norms)),
        "learning_rate": optimizer.param_groups[0]["lr"],
        "optimizer_steps": steps_taken,
        "skipped_steps": len(norms) - sum(map(math.isfinite, norms)),  # nan or inf
        "sampling/sampling_logp_difference/mean": sums.pop("sampler_gap") / sampled_tokens,
    }
    return metrics | {name: value / tokens for name, value in sums.items()}


@extra("screen")
def sample_metrics(samples: list[Sample]) -> dict:
    lengths = [int(s.sampled.sum()) for s in samples]
    groups = {s.group for s in samples}
    with_signal = {s.group for s in samples if s.advantages_in_loss.any()}
    metrics = {
        "frac_reward_zero_std": 1 - len(with_signal) / len(groups),
        "completions/mean_length": float(np.mean(lengths)),
        "completions/clipped_ratio": float(np.mean([s.finish_reason == "length" for s in samples])),
        "tokens": sum(s.total_length for s in samples),
    }
    metrics["reward"], metrics["reward_std"] = mean_and_std([s.reward for s in samples])
    for name in samples[0].rewards:
        mean, std = mean_and_std([s.rewards[name] for s in samples])
        metrics |= {f"rewards/{name}/mean": mean, f"rewards/{name}/std": std}
    return metrics


def evaluate(run: Run) -> dict:
    """The mean of the first reward over the eval data, greedy; with --eval_samples also pass@k."""
    samples = samples_of_eval(run, 1, temperature=0.0)
    [values] = first_rewards(run, samples, 1).T  # [prompts]
    accuracy, std = mean_and_std(values)
    metrics = dict(eval_accuracy=accuracy, eval_stderr=std / math.sqrt(max(1, len(values))))
    metrics["eval_length"] = float(np.mean([s.sampled.sum() for s in samples]))
    metrics["failed_rewards"] = sum(bool(s.failure) for s in samples)
    if k := run.cfg.eval_samples:
        samples = samples_of_eval(run, k, run.cfg.temperature)
        is_right = first_rewards(run, samples, k) > 0.5
        metrics["eval_pass@1"] = float(is_right.mean())
        metrics[f"eval_pass@{k}"] = float(is_right.any(1).mean())
    return metrics


def first_rewards(run: Run, samples: list[Sample], k: int) -> np.ndarray:
    """[prompts, k], of the prompts to which the first reward applies. A failed call counts as 0."""
    name = run.reward_functions[0].name
    values = np.array([s.rewards[name] for s in samples]).reshape(-1, k)
    return values[~np.isnan(values).any(1)]


@extra("screen")
def samples_of_eval(run: Run, k: int, temperature: float) -> list[Sample]:
    """k samples of each eval prompt, at most as many at a time as a step has."""
    at_once = max(1, run.cfg.num_prompts * run.cfg.num_generations // k)
    samples = []
    for first in range(0, len(run.eval_prompts), at_once):
        prompts = run.eval_prompts[first : first + at_once]
        samples += rollout(run, prompts, EVAL, run.step, k, temperature, first)
    return samples


# -- Flags
@dataclass
class Config:
    # model and data
    model: str = ""  # policy: directory or hub name; empty: the bundled task
    reference: str = ""  # model from which the KL is measured; empty: the initial policy
    train_data: str = ""  # JSON lines; extras/ reads JSON, CSV, parquet, the hub, functions, too
    eval_data: str = ""  # held-out rows, same formats; empty: no eval
    reward: str = "answer"  # name[:weight],... or file.py:function; the first: eval accuracy
    call_timeout: float = 10.0  # seconds for one call of a reward function
    prompt_template: str = ""  # text with columns: '{question} Think first.'; empty: column prompt
    chat: bool = False  # string prompts become a user's turn in the chat template
    chat_template_kwargs: str = ""  # JSON for the chat template: '{"enable_thinking": false}'
    max_prompt_length: int = 512  # tokens; longer prompts are left out
    shuffle: bool = True  # the rows, in each pass; false: keep their order, as for a curriculum
    # rollout
    num_prompts: int = 32  # prompts per step, over all ranks
    num_generations: int = 8  # completions per prompt: the group, G
    max_completion_length: int = 512  # tokens; a completion without EOS by then is cut off
    temperature: float = 1.0  # for sampling, and for all log-probabilities
    rollout: Literal["auto", "vllm", "hf"] = "auto"  # sampler: vLLM, or the policy's model
    vllm_gpu_memory_utilization: float = 0.3  # share of the GPU for vLLM while it samples
    tis_cap: float = 2.0  # cap on a token's weight p_policy / p_sampler (TIS); 0: no weights
    max_sampler_gap: float = 0.0  # nats; a larger mean |sampler - policy| ends the run; 0: by dtype
    # objective
    scale_rewards: Literal["group", "batch", "none"] = "group"  # advantages are divided by its std
    loss_reduction: Literal["token", "sequence", "constant"] = "token"  # how losses are averaged
    kl_estimator: Literal["k1", "k2", "k3", "k4", "wk3"] = "wk3"  # KL term of the loss
    kl_in: Literal["loss", "reward"] = "loss"  # reward: subtracted from advantages (k1)
    beta: float = 0.0  # KL coefficient; 0: no reference model
    clip_low: float = 0.2  # the ratio is clipped below 1 - clip_low
    clip_high: float = 0.28  # the ratio is clipped above 1 + clip_high
    ratio_level: Literal["token", "sequence"] = "token"  # a ratio per token, or sequence (GSPO)
    mask_truncated: bool = False  # leave cut-off completions out of the loss
    non_stop_reward: float | None = None  # reward of a cut-off completion; None: as scored
    # update
    num_minibatches: int = 1  # optimizer steps per pass over a rollout
    num_epochs: int = 1  # passes over a rollout
    micro_batch_tokens: int = 0  # tokens per forward and backward; 0: 2048
    learning_rate: float = 1e-6  # AdamW, on float32 parameters
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"  # after the warmup
    warmup_steps: int = 0  # optimizer steps until the learning rate is full; GRPO needs none
    max_grad_norm: float = 1.0  # the gradient's norm is clipped to this; 0: off
    max_steps: int = 100  # steps, each a rollout and its update
    dtype: Literal["auto", "float32", "bfloat16", "float64"] = "auto"  # for matrix products
    device: Literal["auto", "cpu", "cuda"] = "auto"  # auto: cuda if there is one
    seed: int = 0  # every random number is a function of the seed and the step
    # output
    out_dir: str = "out"  # directory of the run
    eval_every: int = 10  # steps between evals; 0: only before the first and after the last step
    eval_samples: int = 0  # completions per eval prompt, for pass@k; 0: greedy only
    save_every: int = 10  # steps between checkpoints; 0: only the last
    keep: int = 2  # newest checkpoints kept; 0: all
    resume: bool = False  # continue the run in --out_dir
    plain: bool = False  # run this file without extras/
    # only with extras/: see ONLY_WITH_EXTRAS
    lora_rank: int = 0  # adapters' rank; 0: all weights learn. Adapters need 10 x learning_rate
    environment: str = ""  # file.py:name that plays turns with the policy (extras/agents.py)
    max_turns: int = 8  # turns of the policy in an episode with --environment
    system_prompt: str = ""  # message before every prompt; implies --chat
    weight_decay: float = 0.0  # for matrices, not for norms and biases
    gradient_checkpointing: bool = False  # less memory, a third more time
    fast: bool = True  # packed sequences and other forms of the policy, where they are faster
    compile: Literal["auto", "on", "off"] = "auto"  # layers; auto: on cuda, for large models
    began: str = ""  # date in chat templates, such as 2026-01-31; empty: day of the first start
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
    dtype="float32",
)


ONLY_WITH_EXTRAS = dict(
    lora_rank=0, environment="", max_turns=8, system_prompt="", weight_decay=0.0
)
ONLY_WITH_EXTRAS |= dict(gradient_checkpointing=False, fast=True, compile="auto", began="")
ONLY_WITH_EXTRAS |= dict(log_completions=64, report_to="none")  # flag: its value without extras/


@extra("flags")
def parse_flags(argv: list[str] | None = None) -> Config:
    """Given flags win over those of a resumed run, and over BUNDLED."""
    parser = make_parser()
    given = parser.parse_args(argv)  # a first pass, which decides the defaults
    saved = saved_flags(given)
    if saved:
        parser.set_defaults(**saved)
    elif not given.model:
        parser.set_defaults(**BUNDLED)
        if given.train_data:
            parser.set_defaults(eval_data="")  # the bundled eval is another task
    return Config(**vars(parser.parse_args(argv)))


@extra("flags")
def make_parser():
    flags: Any = Config  # Any, for the type checker
    return transformers.HfArgumentParser(flags, allow_abbrev=False)


@extra("flags")
def saved_flags(given) -> dict:
    """The flags of the run that --resume continues; {} for a new run."""
    path = Path(given.out_dir, "config.json")
    if not (given.resume and path.exists()):
        return {}
    saved = json.loads(path.read_text())  # with more than flags, if extras/ wrote it
    return {name: saved[name] for name in vars(Config()) if name in saved}


@extra("models")
def resolve_auto(cfg: Config, model) -> Config:
    """Replaces `auto` with the machine's value."""
    dtype = dict(cpu="float32", cuda="bfloat16")[model.device.type]
    auto = dict(device=model.device.type, dtype=dtype, rollout="hf")
    return replace(cfg, **{k: value for k, value in auto.items() if getattr(cfg, k) == "auto"})


class TrainingError(RuntimeError): ...  # the run cannot go on


# -- Ranks
@extra("ranks")
def join_ranks(cfg: Config) -> torch.device:
    """Connects the processes that torchrun has started. Returns the device of this rank."""
    device, backend = torch.device("cpu"), "gloo"
    if cfg.device == "cuda" or (cfg.device == "auto" and torch.cuda.is_available()):
        device = torch.device("cuda", LOCAL_RANK)
        torch.cuda.set_device(device)
        backend = "cpu:gloo,cuda:nccl"  # Python objects travel over gloo, gradients over NCCL
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    return device


@extra("ranks")
def all_gather(items: list) -> list:
    """The items of all ranks, on every rank."""
    if WORLD_SIZE == 1:
        return items
    lists: list = [None] * WORLD_SIZE
    dist.all_gather_object(lists, items)
    return [item for one in lists for item in one]


# -- Data: a file of JSON lines -> prompts, as token ids
@extra("rows")
def load_prompts(path: str, tokenizer, cfg: Config) -> list[Prompt]:
    rows = read_rows(path) if path else []
    prompts = [make_prompt(row, number, tokenizer, cfg) for number, row in enumerate(rows)]
    return [p for p in prompts if len(p.ids) <= cfg.max_prompt_length]


@extra("rows")
def read_rows(path: str):
    with open(path, encoding="utf-8-sig") as lines:  # some editors write a byte order mark
        yield from map(json.loads, filter(str.strip, lines))


@extra("rows")
def make_prompt(row: dict, row_number: int, tokenizer, cfg: Config) -> Prompt:
    text, messages = content_of(row, cfg), None
    if isinstance(text, list):
        messages = text
        options = dict(tokenize=False, add_generation_prompt=True)
        options |= json.loads(cfg.chat_template_kwargs or "{}")
        text = tokenizer.apply_chat_template(messages, **options)
    # One BOS: a chat template writes it; the tokenizer adds it to plain text.
    ids = tokenizer(text, add_special_tokens=messages is None)["input_ids"]
    return Prompt(np.array(ids, np.int64), text, row, messages, row_number)


@extra("rows")
def content_of(row: dict, cfg: Config) -> Any:
    """A text or a list of messages: the column `prompt`, or --prompt_template filled in."""
    content = row.get("prompt")
    if cfg.prompt_template:
        content = cfg.prompt_template.format(**row)
    if cfg.chat and not isinstance(content, list):
        content = [dict(role="user", content=content)]
    return content


# -- Model and optimizer
@extra("models")
def load_tokenizer(path: str, cfg: Config):
    return transformers.AutoTokenizer.from_pretrained(path)


@extra("models")
def load_model(path: str, cfg: Config, device: torch.device):
    """A Hugging Face causal language model, in float32 even if the products are in bfloat16: at a
    learning rate of 1e-6 bfloat16 parameters lose 98 % of their updates to rounding."""
    dtype = torch.float64 if cfg.dtype == "float64" else torch.float32
    kind: Any = transformers.AutoModelForCausalLM
    model, info = kind.from_pretrained(path, dtype=dtype, output_loading_info=True)
    for name in info["missing_keys"]:  # they would be random
        raise ValueError("its files have no weights for " + name)
    model.get_input_embeddings().padding_idx = None  # often the EOS, which must learn, too
    return model.to(device).eval()  # in eval mode while it learns, too: no dropout


@extra("models")
def save_model(model, tokenizer, folder: Path) -> None:
    """from_pretrained can load the folder."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def autocast(device, dtype: str, keep_weights: bool = False):
    """keep_weights: cache the bfloat16 weights until the block ends, for the sampler."""
    return torch.autocast(device.type, torch.bfloat16, dtype == "bfloat16", keep_weights)


@extra("fast")
def make_policy(model, prompts: list[Prompt], cfg: Config):  # extras/ tests a faster one on prompts
    return Policy(model, cfg.temperature, cfg.dtype)


@extra("models")
def load_reference(run: Run):
    """The reference policy; None without a KL."""
    if run.cfg.beta == 0:
        return None
    model = load_model(run.cfg.reference or run.cfg.model, run.cfg, run.device)
    return make_policy(model.requires_grad_(False), run.train_prompts, run.cfg)


@extra("models")
def make_optimizer(policy, cfg: Config) -> torch.optim.Optimizer:
    """AdamW. `fused` makes it five times as fast."""
    options: dict = dict(lr=cfg.learning_rate, weight_decay=0.0, fused=True)
    return torch.optim.AdamW(policy.parameters(), **options)


@extra("models")
def tensors_of(model, cfg: Config) -> dict:
    """The tensors that vLLM gets, by name."""
    return dict(model.named_parameters())


def set_learning_rate(optimizer, index: int, cfg: Config) -> None:
    """index: the number of the optimizer step in the run, from 0."""
    total = cfg.max_steps * cfg.num_minibatches * cfg.num_epochs
    progress = (index - cfg.warmup_steps) / max(1, total - cfg.warmup_steps)  # < 1; below 0: warmup
    factors = dict(constant=1, linear=1 - progress, cosine=(1 + math.cos(math.pi * progress)) / 2)
    factor = factors[cfg.lr_schedule]
    if index < cfg.warmup_steps:
        factor = (index + 1) / cfg.warmup_steps
    for group in optimizer.param_groups:  # each has the learning rate that make_optimizer gave it
        group["lr"] = group.get("initial_lr", cfg.learning_rate) * factor


# -- Samplers
def check_gap(gap: float, cfg: Config, tokens: float = math.inf) -> None:
    """gap: the mean |sampler's - policy's log-probability| of `tokens` tokens, in nats. The weights
    are the same. If the gap is larger than rounding, the samples are not the policy's, and training
    on them is wrong."""
    # In bfloat16 a mean of 0.05 is rounding (SmolLM2-135M with vLLM on a CPU). Over few tokens it
    # may be more (1.0 over one, 0.3 over four), and the tokens of a group may be alike.
    limit = cfg.max_sampler_gap or dict(bfloat16=0.1).get(cfg.dtype, 1e-4)
    limit *= max(1, 10 * math.sqrt(cfg.num_generations / tokens))
    if not gap <= limit:  # or the gap is nan
        why = "vLLM has other weights, or the model computes differently with padding or a cache"
        off = f"the sampler's log-probabilities are {gap:.2g} off on average, more than {limit:.2g}"
        raise TrainingError(f"{off} (--max_sampler_gap): {why}")


def sample_token(logits, temperature: float, random) -> tuple:
    """logits [N, V], random numbers [N, 1] -> tokens and their log-probabilities, [N, 1] both."""
    logps = log_probabilities(logits, temperature or 1.0)  # [N, V]
    if temperature == 0:
        token = logps.argmax(-1, keepdim=True)
    else:  # the first token at which the cumulative probability exceeds the random number
        cumulative = logps.exp().double().cumsum(-1)  # [N, V]
        point = random * cumulative[:, -1:]  # the last entry is 1, up to rounding
        token = torch.searchsorted(cumulative, point, right=True)
        token = token.clamp(max=logits.shape[-1] - 1)  # if the logits are nan
    return token, logps.gather(-1, token)


def log_probabilities(logits, temperature: float):
    """[N, V], for the sampler and the policy: at least in float32."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return (logits / temperature).log_softmax(-1)


class HFSampler:
    """Samples with the policy's own model."""

    def __init__(self, model, stop_ids: list[int], cfg: Config):
        self.model = model
        self.stop_ids = stop_ids
        self.cfg = cfg

    def load_weights(self, model) -> None:
        """This and the next two do nothing: the model is the trainer's own."""

    def sleep(self) -> None: ...

    def close(self) -> None: ...

    def generate(self, prompts: list[Prompt], seeds, temperature: float, limits=None) -> list[dict]:
        """For each prompt the fields of a Sample that a sampler knows. limits: the most tokens of
        each completion."""
        limits = limits or [self.cfg.max_completion_length] * len(prompts)
        completions = []
        for start in range(0, len(prompts), 256):  # not all at once, which may take much memory
            part = slice(start, start + 256)
            rest = temperature, limits[part], self.stop_ids, self.cfg
            completions += sample_batch(self.model, prompts[part], seeds[part], *rest)
        return completions


class VLLMSampler:
    """A vLLM engine in each rank's process. It gets the weights in memory."""

    def __init__(self, model, stop_ids: list[int], longest: int, cfg: Config):
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # in this process, to share its tensors
        import vllm

        self.stop_ids = stop_ids
        self.cfg = cfg
        self.asleep = False
        self.on_cuda = model.device.type == "cuda"
        self.llm = vllm.LLM(**vllm_options(model, longest, cfg))
        self.SamplingParams = vllm.SamplingParams

    def load_weights(self, model) -> None:
        """Sends the policy's weights. First it sets all weights to nan, so that a weight not sent
        ends the run (check_gap)."""
        if self.asleep:  # first the weights, then the cache: one peak of memory at a time
            torch.cuda.empty_cache()
            self.llm.wake_up(tags=["weights"])
        self.llm.apply_model(fill_with_nan)
        tensors = tensors_of(model, self.cfg)
        self.llm.collective_rpc("reload_weights", kwargs=dict(weights_iterator=tensors.items()))
        self.llm.apply_model(repack)
        if not self.llm.reset_prefix_cache():  # its keys and values are the old policy's
            raise TrainingError("vLLM keeps its prefix cache of the old weights")
        if self.asleep:
            self.llm.wake_up(tags=["kv_cache"])
            self.asleep = False

    def sleep(self) -> None:
        """Frees the GPU for the update. Level 2 drops the weights: load_weights sends them."""
        if self.on_cuda and not self.asleep:
            self.llm.sleep(level=2)
            self.asleep = True

    def close(self) -> None:
        self.llm.llm_engine.engine_core.shutdown()

    def generate(self, prompts: list[Prompt], seeds, temperature: float, limits=None) -> list[dict]:
        """The same as HFSampler.generate."""
        limits = limits or [self.cfg.max_completion_length] * len(prompts)
        options: dict = dict(temperature=temperature, stop_token_ids=self.stop_ids)
        options |= dict(detokenize=False, flat_logprobs=True)
        options["logprobs"] = 0  # of the sampled token only
        params = []
        for seed, limit in zip(seeds, limits, strict=True):
            [seed] = np.random.SeedSequence(seed).generate_state(1)  # 32 bits
            params.append(self.SamplingParams(seed=int(seed), max_tokens=limit, **options))
        texts: Any = [dict(prompt_token_ids=p.ids.tolist()) for p in prompts]
        completions = []
        for request in self.llm.generate(texts, params, use_tqdm=False):
            output: Any = request.outputs[0]
            logps = np.array(output.logprobs.logprobs, np.float32)
            completions.append(dict(completion_ids=np.array(output.token_ids), sampler_logps=logps))
        return completions


@extra("models")
def vllm_options(model, longest: int, cfg: Config) -> dict:
    options = dict(
        model=cfg.model,
        dtype=cfg.dtype,
        max_model_len=longest,  # prompt and completion
        skip_tokenizer_init=True,
        generation_config="vllm",  # not the model's own, which may set top-p
        logprobs_mode="processed_logprobs",  # after the temperature, as the trainer's are
        load_format="dummy",  # load_weights sends the weights
    )
    if model.device.type == "cuda":
        share = cfg.vllm_gpu_memory_utilization
        options |= dict(gpu_memory_utilization=share, enable_sleep_mode=True)
    else:
        options |= dict(enforce_eager=True, kv_cache_memory_bytes=2**30)
        options["enable_chunked_prefill"] = False  # crashes if a seeded prompt is split
    if dist.is_initialized():  # torchrun has started the processes
        options["distributed_executor_backend"] = "external_launcher"
    return options


@extra("models")
def fill_with_nan(engine_model) -> None:
    for parameter in engine_model.parameters():
        parameter.data.fill_(math.nan)
    repack(engine_model)


@extra("models")
def repack(engine_model) -> None:
    """vLLM's CPU build computes with a copy of a head that is tied to the embeddings. This makes
    the copy anew from the weights."""
    head = engine_model.lm_head
    head.quant_method.process_weights_after_loading(head)


@extra("models")
def make_sampler(run: Run):
    """The sampler's generate returns fields of a Sample for each prompt. A sampler around another
    one may play an environment: it adds turns, with `sampled` False where the policy did not write.
    """
    model = run.policy.model
    ends = [run.tokenizer.eos_token_id, *np.ravel(model.generation_config.eos_token_id)]
    stop_ids = sorted({int(i) for i in ends if i is not None})
    if run.cfg.rollout == "hf":
        return HFSampler(model, stop_ids, run.cfg)
    return VLLMSampler(model, stop_ids, run.longest, run.cfg)


# -- The run on disk, the run
@extra("runs")
def make_files(cfg: Config) -> RunFiles:
    return RunFiles(cfg)


class RunFiles:
    """The directory of a run: config.json, metrics.jsonl, completions.jsonl, and checkpoints
    (step_NNNNNN, a model directory with trainer_state.pt). Rank 0 writes them."""

    def __init__(self, cfg: Config):
        self.path = Path(cfg.out_dir).expanduser().absolute()
        self.history = []  # the lines of metrics.jsonl

    def load_model(self, cfg: Config, device: torch.device) -> tuple:
        """The policy's model, and the rest of the newest checkpoint; {} for a new run."""
        if not (cfg.resume and self.checkpoints()):
            return load_model(cfg.model, cfg, device), {}
        path = self.checkpoints()[-1]
        saved = torch.load(path / "trainer_state.pt", map_location="cpu", weights_only=False)
        self.history = saved["history"]
        return load_model(str(path), cfg, device), saved

    def open(self, run: Run) -> None:
        if RANK == 0:
            self.make_directory(run.cfg)
            self.write("config.json", json.dumps(asdict(run.cfg), indent=1))
            self.write("metrics.jsonl", json_lines(self.history))

    def make_directory(self, cfg: Config) -> None:
        self.path.mkdir(parents=True, exist_ok=cfg.resume)  # a new run needs a new directory

    def log(self, run: Run, metrics: dict, samples: list[Sample]) -> None:
        self.history.append(metrics)
        if RANK == 0:
            self.write("metrics.jsonl", json_lines([metrics]), "a")
            self.write("completions.jsonl", json_lines(self.rows_of(run, samples)), "a")

    def rows_of(self, run: Run, samples: list[Sample]) -> list[dict]:
        """The rows of completions.jsonl."""
        rows = []
        for s in samples:
            texts = dict(prompt=s.prompt.text, completion=s.text)
            rows.append(dict(step=run.step, group=s.group) | texts | dict(reward=s.reward))
        return rows

    def write(self, name: str, text: str, mode: str = "w") -> None:
        with open(self.path / name, mode) as file:
            file.write(text)

    def checkpoints(self) -> list[Path]:
        return sorted(self.path.glob("step_" + "[0-9]" * 6))  # the oldest first

    def save_if_due(self, run: Run) -> None:
        if run.is_due(run.cfg.save_every):
            self.save(run)

    def save(self, run: Run) -> None:
        """Writes a directory that from_pretrained can load. It is renamed once it is complete."""
        path = self.path / f"step_{run.step:06d}"
        if RANK > 0 or path.exists():
            return
        partial = self.path / ".partial"
        shutil.rmtree(partial, ignore_errors=True)  # left by a save that was killed
        save_model(run.policy.model, run.tokenizer, partial)
        torch.save(self.trainer_state(run), partial / "trainer_state.pt")
        partial.rename(path)
        for old in self.checkpoints()[: -run.cfg.keep]:  # --keep 0 removes none
            self.remove(old)

    def trainer_state(self, run: Run) -> dict:
        """What a resume needs besides the model."""
        named, moments = run.policy.named_parameters(), run.optimizer.state  # Adam's
        moments = {name: moments[p] for name, p in named if p in moments}
        weights = run.policy.state_dict().items()  # a head that you added, but not the model
        parts = dict(moments=moments, policy={n: x for n, x in weights if n[:6] != "model."})
        return dict(step=run.step, state=run.state, history=self.history) | parts

    def remove(self, path: Path) -> None:
        shutil.rmtree(path)


def json_lines(rows: list[dict]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


class Run:
    """The parts of a run. All are loaded, on all ranks, before anything is written."""

    def __init__(self, cfg: Config):
        self.cfg = cfg
        self.device = join_ranks(cfg)
        self.tokenizer = load_tokenizer(cfg.model, cfg)
        self.reward_functions = load_rewards(cfg.reward)
        self.train_prompts = load_prompts(cfg.train_data, self.tokenizer, cfg)
        self.eval_prompts = load_prompts(cfg.eval_data, self.tokenizer, cfg)
        prompts = self.train_prompts + self.eval_prompts
        self.longest = max(len(p.ids) for p in prompts) + cfg.max_completion_length  # tokens
        self.files = make_files(cfg)
        model, saved = self.files.load_model(cfg, self.device)
        self.step = saved.get("step", 0)  # the last complete step
        self.state = saved.get("state", {})  # of an algorithm that remembers more than GRPO
        self.cfg = cfg = resolve_auto(cfg, model)
        self.policy = make_policy(model, prompts, cfg)
        self.policy.load_state_dict(saved.pop("policy", {}), strict=False)
        self.reference = load_reference(self)
        self.sampler = make_sampler(self)
        self.ddp = self.policy  # called for training: DDP takes the mean of all ranks' gradients
        if WORLD_SIZE > 1:  # after vLLM, which may switch to another CUDA stream
            # Some experts may get no tokens. DDP must not wait for their gradients.
            has_experts = any(".experts." in name for name, _ in model.named_parameters())
            options: dict = dict(gradient_as_bucket_view=True, find_unused_parameters=has_experts)
            self.ddp = DistributedDataParallel(self.policy, **options)
            self.ddp.broadcast_buffers = False  # no step changes them
        self.optimizer = make_optimizer(self.policy, cfg)
        for group in self.optimizer.param_groups:
            group["initial_lr"] = group["lr"]  # see set_learning_rate
        moments = saved.pop("moments", {})  # by names, as other parameters may learn now
        for name, p in self.policy.named_parameters():
            if name in moments:
                self.optimizer.state[p] = {k: x.to(p.device) for k, x in moments[name].items()}
        self.files.open(self)  # last, so that a failed start leaves nothing behind
        self.stop_requested = False
        self.times = {}  # seconds of the phases of a step
        self.phase_started = time.perf_counter()

    def request_stop(self, *_) -> None:
        self.stop_requested = True

    def should_stop(self) -> bool:
        """Ctrl-C or SIGTERM on any rank ends the run after the step."""
        return self.step >= self.cfg.max_steps or any(all_gather([self.stop_requested]))

    def is_due(self, every: int) -> bool:
        return self.step == self.cfg.max_steps or (every > 0 and self.step % every == 0)

    def record_time(self, phase: str) -> None:
        """Notes the seconds since the last phase ended."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()  # wait for the GPU
        now = time.perf_counter()
        self.times[f"time_{phase}"] = now - self.phase_started
        self.phase_started = now

    def evaluate_if_due(self) -> None:
        is_due = self.step == 0 or self.is_due(self.cfg.eval_every)
        is_done = any(m["step"] == self.step and "eval_accuracy" in m for m in self.files.history)
        if self.eval_prompts and is_due and not is_done:
            self.log(evaluate(self))

    def end_step(self, step: int, samples: list[Sample], metrics: dict) -> None:
        self.step = step
        metrics |= sample_metrics(samples) | self.times
        metrics["step_time"] = sum(self.times.values()) - self.times["time_eval"]
        metrics["tokens_per_s"] = metrics["tokens"] / metrics["step_time"]
        self.log(metrics, samples)

    def log(self, metrics: dict, samples: list[Sample] | None = None) -> None:
        metrics, samples = dict(step=self.step) | metrics, samples or []
        self.files.log(self, metrics, samples)
        show(self, metrics, samples)


SHOWN = """eval_accuracy eval_stderr eval_length reward completions/mean_length grad_norm kl_k1
completions/clipped_ratio frac_reward_zero_std sampling/sampling_logp_difference/mean step_time
tokens_per_s""".split()


@extra("screen")
def show(run: Run, metrics: dict, samples: list[Sample]) -> None:
    shown = [f"{name.split('/', 1)[-1]} {metrics[name]:.3g}" for name in SHOWN if name in metrics]
    line = " ".join(shown).replace("sampling_logp_difference/mean", "gap")
    if RANK == 0:
        print(f"step {run.step}/{run.cfg.max_steps} {line}", flush=True)


@extra("runs")
def run_loop(run: Run) -> None:
    training_loop(run)


@extra("runs")
def train(cfg: Config) -> list[dict]:
    """The whole run. Returns the lines of metrics.jsonl."""
    for name, value in ONLY_WITH_EXTRAS.items():
        if getattr(cfg, name) not in (value, "off", False) and not USE_EXTRAS:
            raise ValueError(f"--{name} needs extras/")
    transformers.logging.disable_progress_bar()
    torch.set_float32_matmul_precision("highest")  # TF32 would look like a wrong sampler
    run = Run(cfg)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, run.request_stop)
    run_loop(run)
    run.files.save(run)  # the last step, also after Ctrl-C
    if dist.is_initialized():
        dist.barrier()  # nobody leaves while rank 0 saves
    del run.ddp  # before vLLM closes, which ends the process group
    run.sampler.close()
    if dist.is_initialized():
        dist.destroy_process_group()
    return run.files.history


@extra("flags")
def main(argv: list[str] | None = None) -> int:
    """The command line. Returns the exit code."""
    if RANK == 0 and not USE_EXTRAS:
        print("extras/ is not used: no checks of data and model")
    train(parse_flags(argv))
    return 0


if __name__ == "__main__":
    sys.exit(main())
