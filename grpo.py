r"""GRPO in one file: sample a group of answers to each prompt, score them, and make the answers
that beat the mean of their group more likely.

    python grpo.py                             # the bundled tiny model learns to add, on a CPU
    torchrun --nproc_per_node=2 grpo.py        # the same run, the same gradient, two processes
    torchrun --nproc_per_node=8 grpo.py --model Qwen/Qwen2.5-1.5B-Instruct --chat \
        --train_data train.jsonl --prompt_template '{question}' --reward gsm8k

A whole step, in nine lines. (test_grpo.py runs them, and compares the gradient with this file's.)

    for prompt, row in prompts:  # token ids [P], and the row of the data with the right answer
        answers = [sample(model, prompt) for _ in range(8)]  # a group: token ids, [T] each
        rewards = torch.tensor([reward(decode(answer), row) for answer in answers])  # [8]
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4)  # [8]
        for answer, advantage in zip(answers, advantages):
            logits = model(torch.cat([prompt, answer]))[len(prompt) - 1 : -1]  # [T, V]
            logps = logits.log_softmax(-1)[range(len(answer)), answer]  # [T]
            (-advantage * logps.sum() / n_tokens).backward()  # n_tokens: in all answers of the step
    optimizer.step()

It is fine-tuning on the model's own answers: the cross-entropy of each answer, weighted by its
advantage, which is negative for an answer below the mean of its group. The reward is only a number,
and no gradient goes through it. n_tokens counts the tokens of all answers of the step, so that each
token has the same say. With a mean over each answer, a token of an answer of 10 tokens would count
ten times as much as a token of one of 100. And if you split the answers into several batches and
take a mean in each, tokens in small batches weigh more. (To know n_tokens, the file samples all
groups of the step before the first backward.)

One group: four answers with the rewards 1, 0, 0, 1. Their mean is 0.5 and their standard deviation
0.58, so the advantages A are +0.87, -0.87, -0.87, +0.87. The nine lines use -A * logp. This file
uses -A * exp(logp - old_logp), which also serves a second optimizer step on the same answers.
old_logp is the logp of the model as it was when it sampled, as a constant. In the first optimizer
step after that the model has not changed yet, so the difference is 0. exp(0) is 1, so the value is
-A. The derivative of exp at 0 is 1, too, so the gradient is that of -A * logp.

If the four answers are equally long, the values add up to 0. The gradient does not: it makes the
first and the last answer more likely and the others less. So watch the reward and not the loss,
which can be 0 in every step of a run that learns. Had all four the same reward, all A would be 0,
and the group would teach nothing.

You can skip this at first: by default there is one optimizer step on the answers, and the ratio,
exp(logp - old_logp), is 1. In a second step the model has changed, and the ratio is how many times
as likely the token has become. A ratio of 2 means: new answers would have this token twice as
often. We have only the old answers, so it counts twice. On average that gives about the gradient of
new answers, as long as the model has not changed much. So a clip ends the push on a token of a good
answer (A > 0) when the ratio is above 1.28, and on one of a bad answer when it is below 0.8.

The nine lines, and where they stand with batches, ranks and options:

    prompts, sample, decode    prompts_of_step; rollout (HFSampler, or VLLMSampler with vLLM)
    reward                     score (reward.py has the reward functions)
    advantages                 assign_advantages, group_advantages
    logits, logps              Policy
    the loss                   grpo_loss
    backward, step             accumulate_gradient, update

Words: the policy is the model that is trained, a completion is an answer. A step has two parts. The
rollout samples and scores. The update learns from the samples: by default in one optimizer step,
else in several (--num_minibatches, --num_epochs), each with a minibatch of them. A minibatch goes
through the model in micro-batches, whose gradients add up. The old policy is the policy as it was
when it sampled. The reference is a frozen model, by default the one that the run began with. With
--beta a KL term, a penalty for the distance between two distributions, keeps the policy from
drifting far from it.

Shapes: N samples, P prompt tokens, T completion tokens, L prompt and completion tokens, V tokens in
the vocabulary, G samples of one prompt (a group). In a batch T and L count padding.

By default a rollout has one optimizer step, every token counts the same, and there is no KL (the
bundled task has a little, --beta 0.001): see Config for the rest. Read from training_loop to
update, and you have read GRPO. A sampler follows, and then PLUMBING: first the options of the loss,
for the day on which you change one.
"""

from __future__ import annotations

import contextlib
import copy
import csv
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
from collections import Counter
from dataclasses import asdict, dataclass, field, replace
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
from tqdm import tqdm
from transformers.modeling_layers import GradientCheckpointingLayer

from reward import Reward, call_reward, load_function, load_rewards

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
    """One completion. Arrays are [T], without padding."""

    group: int  # index of the prompt in the step; samples of the same group are compared
    prompt: Prompt
    completion_ids: np.ndarray  # with the sampled EOS: the policy also learns to stop
    # Log-probabilities of these tokens. The first two are of the same weights, and equal but for
    # rounding, unless the sampler is vLLM, which computes in another way.
    sampler_logps: np.ndarray  # by the sampler, when it drew the tokens
    old_logps: np.ndarray | None = None  # by the trainer; None: not needed for one optimizer step
    ref_logps: np.ndarray | None = None  # by the reference; None: no KL term
    # Masks. In a plain run they are True for every token, and you can read over them. The last two
    # are equal, unless an algorithm of yours sets them apart.
    sampled: np.ndarray | None = None  # the policy wrote the token; False: an environment, a tool
    loss_mask: np.ndarray | None = None  # the token is in the loss
    length_mask: np.ndarray | None = None  # the token counts in n_tokens
    advantages: np.ndarray | None = None  # by default 0
    finish_reason: str = "stop"  # or "length": cut off
    text: str = ""  # without the EOS; a reward function gets it
    rewards: dict = field(default_factory=dict)  # name of a reward function: its value
    reward: float = math.nan  # their weighted sum; nan: no reward function applies
    # For the logs:
    failure: str = ""  # why a reward function or the environment failed
    logged: dict = field(default_factory=dict)  # metrics that a reward function logs
    extra: dict = field(default_factory=dict)  # columns that a reward function logs
    episode: typing.Any = None  # with --environment: its turns and replies

    def __post_init__(self):
        T = len(self.completion_ids)
        for name in ("sampled", "loss_mask", "length_mask"):
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
        run.sampler.push(run.policy.model)  # the sampler may have a copy of the model
        run.record_time("push")
        run.evaluate_if_due()
        run.save_if_due()  # weights and optimizer: see Run.save
        run.record_time("eval")
        if run.is_over():
            break

        # Sample a group of completions for each prompt, and score them. Each rank samples some of
        # the groups, and gets all of them.
        step = run.step + 1
        prompts = prompts_of_step(run.train_prompts, step, cfg)
        samples = rollout(run, prompts, SAMPLING, step, cfg.num_generations, cfg.temperature)
        run.sampler.sleep()  # the update needs the memory
        run.record_time("rollout")
        if run.is_over():  # Ctrl-C came. No weight has changed since the last step
            break

        # What the loss compares with: the log-probabilities of the old policy, before the first of
        # several optimizer steps changes it, and those of the reference, if there is a KL term.
        if cfg.num_minibatches * cfg.num_epochs > 1:
            add_logps("old_logps", run.policy, samples, cfg)
        if run.reference is not None:
            add_logps("ref_logps", run.reference, samples, cfg)
        run.record_time("logps")

        # How much better is each completion than its group? Then the optimizer follows.
        assign_advantages(samples, cfg, run.state)
        metrics = update(run.policy, run.ddp, run.optimizer, samples, step, cfg)
        run.record_time("update")
        run.complete(step)  # from here on a checkpoint holds this step
        run.log_step(samples, metrics)


# ------------------------------------------------------------------------------------------------
# A step: sample, reward


def rollout(
    run: Run, prompts: list[Prompt], stream: int, step: int, n: int, temperature: float
) -> list[Sample]:
    """n scored samples of each prompt, group after group. Rank r samples for the prompts r,
    r + WORLD_SIZE and so on; then every rank gets all samples. stream: SAMPLING or EVAL, each with
    random numbers of its own."""
    asked = [(group, i) for group in range(RANK, len(prompts), WORLD_SIZE) for i in range(n)]
    # Each sample has a seed of its own, a pair of numbers, so that what is drawn for one does not
    # depend on which others are in its batch.
    seeds = [(seed_of(run.cfg, stream, step, group), i) for group, i in asked]
    prompt_ids = [prompts[group].ids for group, _ in asked]
    completions = run.sampler.generate(prompt_ids, seeds, temperature)  # (ids [T], logps [T]) each

    samples = []
    for (group, _), (ids, logps) in zip(asked, completions, strict=True):
        s = Sample(group, prompts[group], ids, logps)
        without_eos = ids
        if ids[-1] in run.sampler.stop_ids:
            without_eos = ids[:-1]
        else:
            s.finish_reason = "length"  # cut off
        s.text = decode(run.tokenizer, without_eos)
        samples.append(s)
    if run.player is not None:  # --environment: the turns after the first
        run.player.play(samples, seeds, run.sampler.generate, temperature)
    score(samples, run)
    return sorted(gather(samples), key=lambda s: s.group)


def score(samples: list[Sample], run: Run) -> None:
    """Fills in `rewards`, a value for each reward function, and `reward`, their weighted sum. A
    function gets the text and the row of the data. A call that fails gives 0, and the screen shows
    why. A function that does not apply to a row gives nan, and is left out of the sum."""
    scored = [s for s in samples if not s.failure]  # the others: their environment failed
    texts = [s.text for s in scored]
    rows = [reward_row(s, run) for s in scored]
    for function in run.rewards:
        for s in samples:
            s.rewards[function.name] = 0.0  # and stays 0 if the environment of s failed
        values, failures, metrics, extra = call_reward(function, texts, rows, run.cfg.call_timeout)
        for s, value in zip(scored, values, strict=True):
            s.rewards[function.name] = value
        keep_logs(scored, failures, metrics, extra)
    for s in samples:
        weighted = [function.weight * s.rewards[function.name] for function in run.rewards]
        if not np.isnan(weighted).all():
            s.reward = float(np.nansum(weighted))
            if s.finish_reason == "length" and run.cfg.non_stop_reward is not None:  # an option
                s.reward = run.cfg.non_stop_reward


# ------------------------------------------------------------------------------------------------
# Advantages


def group_advantages(rewards, group_size: int, scale: str = "group", eps: float = 1e-4):
    """How much better than the mean of its group each sample is. rewards [N]: those of the first
    group, then those of the second, and so on. Returns [N].

    scale: what r - mean is divided by. "group": the standard deviation of its group, so that small
    differences teach as much as large ones (DeepSeekMath, arXiv 2402.03300). "batch": the standard
    deviation of all rewards. "none": nothing (Dr. GRPO, arXiv 2503.20783).
    A group of equal rewards gets exactly 0. A reward that is nan is ignored, and gets 0.
    """
    grouped = rewards.double().view(-1, group_size)  # [N / G, G]
    advantages = grouped - grouped.nanmean(1, keepdim=True)
    advantages = zero_where_nan_or_rounding(advantages, grouped)  # the mean of three 0.1 is not 0.1
    if scale == "group":
        advantages = advantages / (nanstd(grouped, 1) + eps)  # [N / G, G] / [N / G, 1]
    elif scale == "batch":
        advantages = advantages / (nanstd(grouped.view(1, -1), 1) + eps)  # [N / G, G] / [1, 1]
    return advantages.flatten().to(rewards.dtype)


def assign_advantages(samples: list[Sample], cfg: Config, state: dict | None = None) -> None:
    """Fills in `advantages`. samples: of all ranks, group after group. Another algorithm puts its
    code here: it sets advantages, loss_mask and length_mask, token by token. state: run.state, for
    what it remembers from step to step."""
    rewards = torch.tensor([s.reward for s in samples], dtype=torch.float64)  # [N]
    advantages = group_advantages(rewards, cfg.num_generations, cfg.scale_rewards)  # [N]
    for s, advantage in zip(samples, advantages.tolist(), strict=True):
        s.advantages[:] = advantage  # the same for all tokens
        # --mask_truncated: a completion that is cut off counts in the mean, and is not trained on.
        leave_out = cfg.mask_truncated and s.finish_reason == "length"
        if leave_out or math.isnan(s.reward):
            s.loss_mask[:] = False
            s.length_mask[:] = False


# ------------------------------------------------------------------------------------------------
# Logits, logps


class Policy(nn.Module):
    """policy(batch) -> logps [N, T], the log-probability of each completion token, and entropy
    [N, T], how uncertain the model was at each token (in nats, for the log). The values at padding
    mean nothing. collate makes a batch. A row of it is a prompt, its completion and padding:

    ids               a b c x y EOS 0    the prompt a b c has the completion x y EOS
    completion_ids    x y EOS
    predicted_at      2 3 4              the logits at c, position 2, predict x

    If extras/fast.py is there, its policy takes the place of this one for large models. It has the
    same numbers, and is faster.
    """

    def __init__(self, model, temperature: float):
        super().__init__()
        self.model = model
        self.temperature = temperature

    def forward(self, batch: dict):
        # The logits one position before each completion token predict it: of one sample they are
        # logits[len(prompt) - 1 : -1], as in the nine lines. Padding stands on the right, where
        # causal attention lets no token see it.
        logits = logits_of_completions(self.model, batch)  # [N, T, V]
        logps = (logits / self.temperature).log_softmax(-1)  # [N, T, V], as the sampler drew
        entropy = torch.special.entr(logps.detach().exp()).sum(-1)  # - sum of p log p
        logps = logps.gather(-1, batch["completion_ids"][:, :, None])  # [N, T, 1]
        return logps[:, :, 0], entropy


# ------------------------------------------------------------------------------------------------
# The loss


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
    sampled=None,  # [N, T], the tokens that the policy sampled; None: the same as mask
    length_mask=None,  # [N, T], the tokens that n_tokens counts; None: the same as mask
):
    """The loss of one micro-batch. With the default flags, up to a factor of about 1 (see below):

        ratio = (logps - old_logps).exp()
        losses = torch.maximum(-A * ratio, -A * ratio.clamp(0.8, 1.28))
        loss = losses[mask].sum() / n_tokens  # A is the advantage

    The SUM over its tokens is divided by the number of tokens in the WHOLE optimizer step. So the
    losses of all micro-batches and ranks add up to the loss of the step. All else is options.
    Returns (loss, stats); stats are sums over the tokens in the loss.
    """
    # Padding, and tokens that the policy did not sample, become 0. You can read over these lines.
    mask, sampled, length_mask = complete_masks(mask, sampled, length_mask)
    tensors = (logps, old_logps, ref_logps, sampler_logps, advantages)
    tensors = [zero_where_not_sampled(x, sampled, logps) for x in tensors]  # [N, T] each, or None
    logps, old_logps, ref_logps, sampler_logps, advantages = tensors

    # The policy gradient. In the first optimizer step on a rollout logps and old_logps are equal:
    # the ratio is 1, with the gradient of logps, because the derivative of exp(x) at 0 is 1.
    ratio = (logps - old_logps).exp()  # [N, T]
    if cfg.ratio_level == "sequence":  # an option: one ratio for the whole completion
        ratio = sequence_ratio(logps, old_logps, sampled)
    if ref_logps is not None and cfg.kl_in == "reward":  # an option: the KL is subtracted
        advantages = advantages - cfg.beta * kl_from_here_on(old_logps, ref_logps)
    losses = -advantages * ratio  # [N, T]
    # The clip (PPO, arXiv 1707.06347, eq. 7). Say A is 1 and the ratio 1.5: the loss is -1.5, the
    # clipped one -1.28. The maximum is -1.28, a constant without gradient: no further push. At 0.5
    # it is -0.5, and the push goes on. With A = -1 the push ends below 0.8, and only there.
    clipped = -advantages * ratio.clamp(1 - cfg.clip_low, 1 + cfg.clip_high)  # [N, T]
    is_clipped = clipped > losses
    losses = torch.maximum(losses, clipped)

    # Two extras: the weight p_trainer / p_sampler of a token, about 1, which makes up for slightly
    # other probabilities in vLLM; and with --beta a KL term, a number for each token.
    losses = losses * sampler_weights(old_logps, sampler_logps, cfg)
    if ref_logps is not None and cfg.kl_in == "loss":
        losses = losses + cfg.beta * kl_estimate(logps, ref_logps, old_logps, cfg.kl_estimator)

    if cfg.loss_reduction == "token":
        losses = losses / n_tokens  # each token counts the same (DAPO, arXiv 2503.14476)
    elif cfg.loss_reduction == "sequence":
        length = length_mask.sum(1, keepdim=True).clamp(min=1)  # [N, 1]
        losses = losses / length  # the mean over the completion (the original GRPO)
        losses = losses / n_sequences  # each completion counts the same
    else:  # by a constant, so that a token's weight depends on no length (Dr. GRPO)
        losses = losses / (n_sequences * cfg.max_completion_length)
    loss = torch.where(mask, losses, 0).sum()
    return loss, token_stats(mask, is_clipped, logps, ref_logps)


# ------------------------------------------------------------------------------------------------
# Backward, step


def accumulate_gradient(policy, ddp, minibatch: list[Sample], cfg: Config) -> dict:
    """The gradient of one optimizer step: a backward for each micro-batch, and all add up. Returns
    sums for the log, over all ranks."""
    lengths = [int((s.sampled & s.length_mask).sum()) for s in minibatch]  # minibatch: of all ranks
    n_tokens = max(1, sum(lengths))
    n_sequences = max(1, np.count_nonzero(lengths))
    sums = []
    for batch, is_last in batches_of_rank(policy, minibatch, cfg):
        # What DDP's no_sync() does: the ranks exchange gradients in the last backward only. (In a
        # single process ddp is the policy, and this does nothing.)
        ddp.require_backward_grad_sync = is_last
        with autocast(cfg, policy.model.device):
            logps, entropy = ddp(batch)  # [N, T] both
        # With one optimizer step nothing is stored: the policy still is the old policy.
        old_logps = batch.get("old_logps", logps.detach())
        loss, stats = grpo_loss(
            logps,
            old_logps,
            ref_logps=batch.get("ref_logps"),
            sampler_logps=batch["sampler_logps"],
            advantages=batch["advantages"],
            mask=batch["loss_mask"],
            cfg=cfg,
            n_tokens=n_tokens,
            n_sequences=n_sequences,
            sampled=batch["sampled"],
            length_mask=batch["length_mask"],
        )
        # DDP takes the mean of the ranks' gradients. We want their sum, because the loss is divided
        # by the counts of all ranks already. The sum is the mean times the number of ranks.
        (loss * WORLD_SIZE).backward()
        sums.append(stats | sampler_stats(loss, entropy, old_logps, batch))
    return sum_over_ranks(sums)


def update(
    policy,
    ddp,  # the policy inside DistributedDataParallel; in a single process the policy itself
    optimizer,
    samples: list[Sample],  # all ranks have the same
    step: int,
    cfg: Config,
) -> dict:
    """All optimizer steps on a rollout, by default one. Returns metrics."""
    sums = Counter()
    norms = []
    taken = 0
    for index, minibatch in minibatches(samples, step, cfg):
        learning_rate = learning_rate_at(index, cfg)
        for parameters in optimizer.param_groups:
            parameters["lr"] = learning_rate
        clear_gradients(optimizer)
        new_sums = accumulate_gradient(policy, ddp, minibatch, cfg)
        if not norms:  # No weight has changed: the sampler must agree, or the run ends here.
            check_gap(new_sums["sampler_gap"] / max(1, new_sums["sampled_tokens"]), cfg)
        sums.update(new_sums)  # a Counter adds
        norm = nn.utils.clip_grad_norm_(ddp.parameters(), cfg.max_grad_norm or math.inf)
        norms.append(norm.item())  # before clipping
        # No step if the gradient is nan. And none if there is nothing to learn, as with equal
        # rewards in each group and no KL: Adam's momentum would move the weights all the same.
        if math.isfinite(norms[-1]) and has_signal(minibatch, optimizer, cfg):
            optimizer.step()
            taken += 1
    clear_gradients(optimizer)
    return dict(learning_rate=learning_rate, optimizer_steps=taken) | update_metrics(sums, norms)


# ------------------------------------------------------------------------------------------------
# The sampler that needs nothing else


class HFSampler:
    """Samples with the policy's own model: slow beside vLLM, but it needs nothing else. See
    make_sampler for which one is taken."""

    BATCH = 256  # completions that are sampled together

    def __init__(self, model, stop_ids: list[int], cfg: Config):
        self.model = model
        self.stop_ids = stop_ids
        self.cfg = cfg

    def push(self, model) -> None:
        """This and the next two do nothing: the model is the trainer's own."""

    def sleep(self) -> None: ...

    def close(self) -> None: ...

    def generate(
        self, prompts: list[np.ndarray], seeds: list[tuple], temperature: float, limits=None
    ) -> list[tuple]:
        """One completion of each prompt: its ids, and their log-probabilities after the
        temperature, both [T]. Temperature 0 is greedy. limits: the most tokens of each."""
        limits = limits or [self.cfg.max_completion_length] * len(prompts)
        completions = []
        for start in range(0, len(prompts), self.BATCH):
            batch = slice(start, start + self.BATCH)
            rows, row_logps = self.sample_batch(
                prompts[batch], seeds[batch], temperature, limits[batch]
            )
            for ids, logps, limit in zip(rows, row_logps, limits[batch], strict=True):
                stops = np.flatnonzero(np.isin(ids[:limit], self.stop_ids))
                length = limit
                if len(stops) > 0:
                    length = stops[0] + 1  # with the token that stops
                completions.append((ids[:length], logps[:length]))
        return completions

    @torch.no_grad()
    @torch.compiler.set_stance("force_eager")  # the cache grows: every length would be compiled
    def sample_batch(self, prompts, seeds, temperature: float, limits: list[int]) -> tuple:
        """Tokens and log-probabilities, [N, T], until all have stopped. generate cuts them."""
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
                positions = (mask.cumsum(1) - 1).clamp(min=0)  # 0 for the first that is no padding
                out = self.model(
                    ids,
                    attention_mask=mask,
                    position_ids=positions[:, -ids.shape[1] :],  # the cache has those before
                    past_key_values=cache,
                    use_cache=True,
                )
                cache = out.past_key_values
                logits = out.logits[:, -1]  # [N, V], of the next token
                ids, logp = draw(logits, temperature, randoms[:, len(tokens), None])  # [N, 1] both
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
        point = random * cumulative[:, -1:]  # the last entry is 1, up to rounding
        token = torch.searchsorted(cumulative, point, right=True)
        token = token.clamp(max=logits.shape[-1] - 1)  # if the logits are nan
    return token, logps.gather(-1, token)


def decode(tokenizer, ids: np.ndarray) -> str:
    """Special tokens stay: a reward may look for <think>. Ids beyond the vocabulary become ''."""
    return tokenizer.decode(ids)


# ------------------------------------------------------------------------------------------------
# PLUMBING. First the options of the loss and the helpers of the functions above; then flags, ranks,
# data, models, vLLM, the run on disk
# ------------------------------------------------------------------------------------------------

# -- The options of the loss


def sampler_weights(old_logps, sampler_logps, cfg: Config):
    """[N, T] or 1, without gradient. Truncated importance sampling (TIS): the weight of a token is
    p_trainer / p_sampler, so that a token which the sampler draws too often counts less."""
    if sampler_logps is None or cfg.tis_cap == 0:
        return 1.0
    return (old_logps - sampler_logps).detach().exp().clamp(max=cfg.tis_cap)


def sequence_ratio(logps, old_logps, sampled):
    """[N, T]: one ratio for the whole completion, exp of the mean difference of its tokens, because
    the ratios of single tokens are noisy (GSPO, arXiv 2507.18071, eq. 7 and 14)."""
    length = sampled.sum(1, keepdim=True).clamp(min=1)
    mean = (logps - old_logps).sum(1, keepdim=True) / length  # [N, 1]; / length: the mean
    # The value of the mean, and for each token the gradient of its own logp, so that each token may
    # have an advantage and a mask of its own:
    return straight_through(mean, logps).exp()


def kl_estimate(logps, ref_logps, old_logps, estimator: str):
    """[N, T]: for each token a number whose average over many samples is KL(policy || reference) or
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


def kl_from_here_on(old_logps, ref_logps):
    """[N, T]: with --kl_in reward the KL is a cost that is subtracted from the advantage. A token
    pays for itself and for the later tokens, because they follow from it."""
    k1 = kl_estimate(old_logps, ref_logps, old_logps, "k1").detach()
    return k1.flip(1).cumsum(1).flip(1)  # the sum from t on


# -- Random streams, the order of the data

# Every random number of the trainer goes back to a generator seeded with (--seed, stream, step,
# index). So nothing depends on the number of ranks, and a resumed run has no generator to restore.
# The streams (SAMPLING and ORDER may both be 0: sampling begins with step 1, ORDER has step 0):
SAMPLING = 0  # completions of a step; index: the prompt within the step
ORDER = 0  # order of the data; index: the pass over the data
EVAL = 1  # completions of an eval; index: the prompt
MINIBATCHES = 4  # order of a rollout's samples; index: the pass over them


def generator(cfg: Config, stream: int, step: int, index: int = 0) -> np.random.Generator:
    return np.random.default_rng((cfg.seed, stream, step, index))


def seed_of(cfg: Config, stream: int, step: int, index: int) -> int:
    sequence = np.random.SeedSequence((cfg.seed, stream, step, index))
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


# -- Numbers


def complete_masks(mask, sampled, length_mask) -> tuple:
    """[N, T] each, and never True where nothing was sampled."""
    sampled = (mask if sampled is None else sampled).bool()
    length_mask = (mask if length_mask is None else length_mask).bool()
    return mask.bool() & sampled, sampled, length_mask & sampled


def zero_where_not_sampled(x, sampled, like):
    """[N, T]. Padding, and tokens that an environment wrote, become 0, even if they hold nan."""
    if x is None:
        return None
    if x.dim() == 1:  # advantages [N]
        x = x[:, None].expand_as(like)
    return torch.where(sampled, x.to(like.dtype), 0)


def zero_where_nan_or_rounding(advantages, grouped):
    """0.1 + 0.2 and 0.3 are the same reward: their difference must teach nothing."""
    advantages = advantages.nan_to_num(0.0)
    largest = grouped.nan_to_num(0.0).abs().amax(1, keepdim=True)  # [N / G, 1]
    is_more = advantages.abs().amax(1, keepdim=True) > 1e-15 * largest
    return torch.where(is_more, advantages, 0.0)


def nanstd(x, dim: int):
    """The standard deviation (n - 1) of the entries that are no nan; 0 for fewer than two."""
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
    """The exponent, or 20 if it is larger, so that exp of it fits float32 in any product. The
    gradient is not capped: that of clamp is 0 from 20 on, where the KL has to pull most."""
    return straight_through(exponent.clamp(max=20), exponent)


# -- Batches: samples become tensors, and are dealt to the ranks


def padded(arrays: list[np.ndarray], side: str = "right") -> torch.Tensor:
    """[N, length of the longest], filled with zeros."""
    tensors = [torch.from_numpy(array) for array in arrays]
    return nn.utils.rnn.pad_sequence(tensors, batch_first=True, padding_side=side)


def padded_texts(samples: list[Sample]) -> dict:
    """The texts of a micro-batch. Policy says what is in it."""
    completion_ids = padded([s.completion_ids for s in samples])  # [N, T]
    ids = padded([np.append(s.prompt.ids, s.completion_ids) for s in samples])  # [N, L]
    last = torch.tensor([len(s.prompt.ids) - 1 for s in samples])  # [N], end of the prompt
    predicted_at = last[:, None] + torch.arange(completion_ids.shape[1])  # [N, T]
    predicted_at = predicted_at.clamp(max=ids.shape[1] - 1)  # at padding any place will do
    first = int(last.min())  # the logits before this position are not needed
    return dict(ids=ids, completion_ids=completion_ids, predicted_at=predicted_at, first=first)


def logits_of_completions(model, batch: dict):
    """[N, T, V], at least in float32. batch["first"] is where the shortest prompt of the batch
    ends. Logits before it are not needed."""
    # The model is in eval mode while it learns, too: no dropout. But gradient checkpointing works
    # in training mode only.
    if model.is_gradient_checkpointing:
        model.train(torch.is_grad_enabled())
    options = dict(use_cache=False)
    kept = batch["ids"].shape[1] - batch["first"]
    if "logits_to_keep" in inspect.signature(model.forward).parameters:
        options["logits_to_keep"] = kept
    logits = model(batch["ids"], **options).logits[:, -kept:]  # [N, L - first, V]
    predicted_at = batch["predicted_at"] - batch["first"]  # [N, T], in these logits
    logits = logits.take_along_dim(predicted_at[:, :, None], dim=1)  # [N, T, V]
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def collate(samples: list[Sample], device: torch.device, layout=padded_texts) -> dict:
    """The tensors of a micro-batch: its texts, and what the loss needs of their tokens. To give the
    loss another field of Sample, add its name here."""
    batch = layout(samples)
    for name in ("sampled", "loss_mask", "length_mask", "advantages", "sampler_logps"):
        batch[name] = padded([getattr(s, name) for s in samples])  # [N, T]
    for name in ("old_logps", "ref_logps"):
        if any(getattr(s, name) is not None for s in samples):
            batch[name] = padded([getattr(s, name) for s in samples])  # an error if some lack it
    for name, value in batch.items():
        if isinstance(value, torch.Tensor):
            batch[name] = value.to(device, non_blocking=True)  # beside what the GPU does
    return batch


def batch_for(policy, samples):
    return collate(samples, policy.model.device, policy.layout)


def micro_batches(samples, budget):
    """Samples of similar length together, at most `budget` tokens with padding, or one sample."""
    batches = []
    for s in sorted(samples, key=lambda s: -s.total_length):
        if not batches or (len(batches[-1]) + 1) * batches[-1][0].total_length > budget:
            batches.append([])
        batches[-1].append(s)  # the first sample of a batch is its longest
    return batches


# extras/fast.py has its own of these two.
Policy.layout = staticmethod(padded_texts)
Policy.micro_batches = staticmethod(micro_batches)


def micro_batches_of_all_ranks(policy, samples, cfg):
    """Small enough that each rank may get one. No split changes the gradient: the loss is a sum."""
    total = sum(s.total_length for s in samples)
    return policy.micro_batches(samples, min(cfg.micro_batch_tokens, total / WORLD_SIZE))


@torch.no_grad()
def add_logps(name: str, policy, samples: list[Sample], cfg: Config) -> None:
    """Fills in old_logps or ref_logps: each rank computes a part, and every rank gets them all."""
    computed = []
    for micro_batch in micro_batches_of_all_ranks(policy, samples, cfg)[RANK::WORLD_SIZE]:
        with autocast(cfg, policy.model.device):
            logps, _ = policy(batch_for(policy, micro_batch))  # [N, T]
        computed.append((micro_batch, logps))
    index_of = {s: i for i, s in enumerate(samples)}
    rows = []
    for micro_batch, logps in computed:
        for s, row in zip(micro_batch, logps.cpu().numpy(), strict=True):
            rows.append((index_of[s], row[: len(s.completion_ids)]))
    for place, row in gather(rows):
        setattr(samples[place], name, row)


def batches_of_rank(policy, minibatch: list[Sample], cfg: Config):
    """Yields this rank's micro-batches, and whether it is the last. All ranks get equally many,
    because DDP needs a backward of every rank: if nothing is left for a rank in the last round, it
    gets another rank's, of which no token counts.
    Samples without a gradient need no pass. If none has one, the first gets a pass all the same:
    check_gap needs its log-probabilities, and DDP a backward."""
    needed = [s for s in minibatch if has_gradient(s, cfg)]
    if not needed:
        needed = minibatch[:1]
    batches = micro_batches_of_all_ranks(policy, needed, cfg)
    for start in range(0, len(batches), WORLD_SIZE):
        one_each = batches[start : start + WORLD_SIZE]
        batch = batch_for(policy, one_each[RANK % len(one_each)])
        if RANK >= len(one_each):
            batch["sampled"].zero_()
        yield batch, start + WORLD_SIZE >= len(batches)


def minibatches(samples: list[Sample], step: int, cfg: Config):
    """Yields, for each optimizer step, its index in the run and its samples: num_epochs passes over
    the samples, each in num_minibatches parts of nearly equal size."""
    index = (step - 1) * cfg.num_minibatches * cfg.num_epochs
    for epoch in range(cfg.num_epochs):
        order = generator(cfg, MINIBATCHES, step, epoch).permutation(len(samples))
        for chosen in np.array_split(order, cfg.num_minibatches):
            yield index, [samples[i] for i in chosen]
            index += 1


# -- Which optimizer steps are taken, and how large


def clear_gradients(optimizer) -> None:
    optimizer.zero_grad(set_to_none=WORLD_SIZE == 1)  # DDP keeps gradients in its own buckets


def learning_rate_at(index: int, cfg: Config) -> float:
    """The learning rate of an optimizer step. index: counted from the start of the run, from 0."""
    if index < cfg.warmup_steps:
        return cfg.learning_rate * (index + 1) / cfg.warmup_steps
    total = cfg.max_steps * cfg.num_minibatches * cfg.num_epochs
    progress = (index - cfg.warmup_steps) / max(1, total - cfg.warmup_steps)  # in [0, 1)
    factors = dict(constant=1, linear=1 - progress, cosine=(1 + math.cos(math.pi * progress)) / 2)
    return cfg.learning_rate * factors[cfg.lr_schedule]


def trained_advantages(s: Sample) -> np.ndarray:
    return s.advantages[s.sampled & s.loss_mask]


def has_gradient(s: Sample, cfg: Config) -> bool:
    """Whether the loss has a gradient at this sample. If you add a term to the loss that acts where
    the advantage is 0, say so here."""
    if cfg.beta > 0:
        return True
    return trained_advantages(s).any()


def has_signal(minibatch: list[Sample], optimizer, cfg: Config) -> bool:
    """Whether an optimizer step has anything to learn from. If not, no step is taken: Adam moves
    the weights by its momentum even if the gradient is 0."""
    # Before the first optimizer step the policy is the reference (unless that is a model of its
    # own), and the KL's gradient is rounding. Adam would make a whole step of it.
    if not optimizer.state and not cfg.reference:
        cfg = replace(cfg, beta=0.0)
    return any(has_gradient(s, cfg) for s in minibatch)


def check_gap(gap: float, cfg: Config) -> None:
    """Sampler and trainer have the same weights. If their log-probabilities differ by more than
    rounding, the samples are not the policy's, and what is learned from them is wrong."""
    limit = cfg.max_sampler_gap
    if limit == 0:
        limit = 0.1 if cfg.dtype == "bfloat16" else 1e-4
    if not gap <= limit:  # or the gap is nan
        raise TrainingError(
            f"the sampler's log-probabilities are {gap:.2g} off on average, more than {limit:g}. "
            "vLLM has other weights, temperature or dtype; --rollout hf has the trainer's own. If "
            "this is hf, the model computes otherwise with padding on the left or with a cache."
        )


# -- Metrics


def token_stats(mask, is_clipped, logps, ref_logps) -> dict:
    """Sums over the tokens in the loss."""
    stats = {"tokens": mask.sum(), "clip_ratio/region_mean": (is_clipped & mask).sum()}
    if ref_logps is not None:
        k3 = kl_estimate(logps, ref_logps, logps, "k3").detach()
        stats["kl"] = torch.where(mask, k3, 0).sum()
        stats["kl_k1"] = torch.where(mask, (logps - ref_logps).detach(), 0).sum()
    return stats


def sampler_stats(loss, entropy, old_logps, batch: dict) -> dict:
    sampled = batch["sampled"]
    gap = (old_logps - batch["sampler_logps"]).abs()
    return dict(
        loss=loss.detach(),
        entropy=torch.where(batch["loss_mask"] & sampled, entropy, 0).sum(),
        sampler_gap=torch.where(sampled, gap, 0).sum(),
        sampled_tokens=sampled.sum(),
    )


def sum_over_ranks(stats: list[dict]) -> Counter:
    """The tensors stay on the device until here, so that no pass waits for them."""
    rows = [torch.stack([value.double() for value in row.values()]) for row in stats]
    sums = torch.stack(rows).sum(0)
    if WORLD_SIZE > 1:
        dist.all_reduce(sums)
    return Counter(dict(zip(stats[0], sums.tolist(), strict=True)))


def update_metrics(sums: Counter, norms: list[float]) -> dict:
    """Metrics of the optimizer steps on a rollout."""
    metrics = dict(grad_norm=float(np.mean(norms)), loss=sums.pop("loss") / len(norms))
    metrics["skipped_steps"] = len(norms) - sum(map(math.isfinite, norms))
    metrics["sampler_gap"] = sums.pop("sampler_gap") / max(1, sums.pop("sampled_tokens"))
    tokens = max(1, sums.pop("tokens"))
    return metrics | {name: value / tokens for name, value in sums.items()}


def sample_metrics(samples: list[Sample]) -> dict:
    """Metrics of a rollout, under TRL's names. `reward` is what the advantages are made of."""
    reward, reward_std = mean_and_std([s.reward for s in samples])
    lengths = [int(s.sampled.sum()) for s in samples]
    largest = np.array([np.abs(trained_advantages(s)).max(initial=0) for s in samples])
    group_size = sum(s.group == samples[0].group for s in samples)
    metrics = {
        "reward": reward,
        "reward_std": reward_std,
        "advantage_abs": float(largest.mean()),
        "frac_reward_zero_std": float((largest.reshape(-1, group_size).max(1) == 0).mean()),
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


# -- Eval


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
    which it does not apply or for which it failed."""
    samples = rollout(run, run.eval_prompts, EVAL, run.step, n, temperature)
    check_eval_gap(run, samples[:8], temperature)
    print_failures(samples)
    name = run.rewards[0].name
    values = np.array([math.nan if s.failure else s.rewards[name] for s in samples])
    values = values.reshape(-1, n)
    metrics = dict(eval_length=float(np.mean([s.sampled.sum() for s in samples])))
    metrics["failed_rewards"] = sum(bool(s.failure) for s in samples)
    return values[~np.isnan(values).any(1)], metrics


def check_eval_gap(run: Run, samples: list[Sample], temperature: float) -> None:
    """An eval is wrong, too, if the sampler has other weights than the policy."""
    policy = copy.copy(run.policy)
    policy.temperature = temperature or 1.0  # greedy log-probabilities are those at 1
    add_logps("old_logps", policy, samples, run.cfg)
    gaps = [np.abs(s.old_logps - s.sampler_logps)[s.sampled] for s in samples]
    check_gap(np.concatenate(gaps).mean(), run.cfg)


# -- Flags


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

LOWEST = dict(num_generations=2, temperature=1e-6, call_timeout=1e-3)  # others: 0
LOWEST |= dict.fromkeys(("num_prompts", "max_prompt_length", "max_completion_length"), 1)
LOWEST |= dict.fromkeys(("num_minibatches", "num_epochs", "max_turns"), 1)


class ConfigError(Exception):
    """The user's mistake: one line on the screen, exit code 2."""


class TrainingError(Exception):
    """The run cannot go on: one line on the screen, exit code 1."""


@contextlib.contextmanager
def mistakes_in(what: str):
    """Whatever fails inside is a mistake of the user in this flag, file or row."""
    try:
        yield
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{what}: {one_line(error)}") from error


def one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__


def require(condition, flag: str, why: str) -> None:
    if not condition:
        raise ConfigError(f"--{flag}: {why}")


def print_rank_0(text: str) -> None:
    if RANK == 0:
        with contextlib.suppress(OSError, RuntimeError):  # a closed pipe; a print inside a print
            print(text, flush=True)


def parse_flags(argv: list[str] | None) -> Config:
    """Given flags win over the flags of the run that --resume continues, and over BUNDLED. A first
    look at argv says which defaults these are."""
    parser = transformers.HfArgumentParser(Config, allow_abbrev=False)
    parser.print_help = lambda: print(__doc__, inspect.getsource(Config), sep="\n")
    parser.error = lambda message: require(False, "help lists the flags", message)
    given = parser.parse_args(argv)
    if given.resume:
        runs = glob.glob("out*/config.json")
        path = max(runs, key=os.path.getmtime, default="out/config.json")  # the newest unnamed run
        if given.out_dir != Config.out_dir:
            path = f"{given.out_dir}/config.json"
        with mistakes_in(f"--resume: {path}"):
            saved = json.loads(Path(path).read_text())
            saved.pop("about", None)
            saved = Config(**saved)
        parser.set_defaults(**asdict(saved) | dict(out_dir=os.path.dirname(path)))
    elif not given.model:
        parser.set_defaults(**BUNDLED)
        if given.train_data:
            parser.set_defaults(eval_data="")  # the bundled eval is another task
    return Config(**vars(parser.parse_args(argv)))


def check_flags(cfg: Config) -> None:
    """Refuses impossible values before anything is loaded or written."""
    for name, kind in typing.get_type_hints(Config).items():
        value = getattr(cfg, name)
        if kind in (int, float):
            low = LOWEST.get(name, 0)
            require(low <= value < math.inf, name, f"{value} is no number from {low} on")
        elif typing.get_origin(kind) is Literal:
            choices = typing.get_args(kind)
            require(value in choices, name, f"{value} is none of {', '.join(choices)}")
    require(cfg.model, "model", "is empty; Config(**BUNDLED) is the bundled task")
    require(cfg.train_data, "train_data", "required if --model is given")
    samples = cfg.num_prompts * cfg.num_generations
    require(cfg.num_minibatches <= samples, "num_minibatches", "more than the step's samples")
    if cfg.kl_in == "reward" and cfg.beta > 0:
        why = "with --kl_in reward only k1 has the right gradient"
        require(cfg.kl_estimator == "k1", "kl_estimator", why)
    with mistakes_in("--chat_template_kwargs: no JSON object"):
        dict(**json.loads(cfg.chat_template_kwargs or "{}"))


# -- Ranks


def gather(items: list) -> list:
    """The items of all ranks, on every rank."""
    if WORLD_SIZE == 1:
        return items
    wait_for_all_ranks()
    lists = [None] * WORLD_SIZE
    dist.all_gather_object(lists, items)
    return [item for one in lists for item in one]


def wait_for_all_ranks() -> None:
    """In a loop, because a blocking wait would let no signal in: see Run.request_stop."""
    arrived = dist.barrier(async_op=True)
    while not arrived.is_completed():
        time.sleep(0.001)


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
    if "RANK" in os.environ:
        with mistakes_in("torchrun sets RANK and more; here only a part is set"):
            dist.init_process_group(backend)
    return device


def digest_of_weights(model) -> list[int]:
    """Sums of bits: the same on every device."""
    bits = [p.detach().reshape(-1).view(torch.int32) for p in model.parameters()]
    return [int(x.sum(dtype=torch.int64)) for x in bits]


def digest(values) -> str:
    text = json.dumps(values, default=lambda value: type(value).__name__)
    return hashlib.sha256(text.encode()).hexdigest()


# -- Data


def read_rows(path: str):
    """Yields the rows of a file, of a hub dataset name:config:split, or of a function."""
    kind = Path(path).suffix.lower()
    if ".py:" in path:
        yield from load_function(path)()
    elif kind in (".json", ".jsonl", ".ndjson"):
        text = Path(path).read_text("utf-8-sig")
        if text.lstrip().startswith("["):
            yield from json.loads(text)
        else:
            for line in filter(str.strip, text.split("\n")):
                yield json.loads(line)
    elif kind == ".csv":
        with open(path, encoding="utf-8-sig", newline="") as file:
            for row in csv.DictReader(file, strict=True):
                if None in row or None in row.values():
                    raise ValueError("more or fewer fields than the header")
                yield row
    elif kind != ".parquet" and os.path.isfile(path):
        raise ValueError(f"{kind} is none of .json, .jsonl, .csv and .parquet")
    elif path.startswith((".", "/")) and not os.path.exists(path):
        raise FileNotFoundError("no such file or folder")
    else:
        from datasets import load_dataset

        if kind == ".parquet":
            yield from load_dataset("parquet", data_files=path, split="train")
        else:
            name, config, split = f"{path}::".split(":", 2)
            yield from load_dataset(name, config or None, split=split.rstrip(":") or "train")


def load_prompts(flag: str, tokenizer, rewards: list[Reward], environment, cfg: Config) -> list:
    """The prompts of --train_data or --eval_data. A row that cannot be used ends the run here."""
    path = getattr(cfg, flag)
    rows = iter(tqdm(read_rows(path), path, delay=10, disable=RANK > 0))  # a bar if it takes long
    prompts = []
    while True:
        with mistakes_in(f"--{flag} {path} row {len(prompts) + 1}"):
            row = next(rows, None)
            if row is None:
                break
            check_row(row, rewards)
            prompts.append(make_prompt(row, len(prompts), tokenizer, environment, cfg))
            if len(prompts) == 1:
                check_tokenizer(tokenizer, prompts[0])
    kept = [p for p in prompts if len(p.ids) <= cfg.max_prompt_length]
    left_out = f"{len(prompts) - len(kept)} of {len(prompts)} prompts are too long"
    require(kept, f"{flag} {path}", left_out)
    if len(kept) < len(prompts):
        print_rank_0(f"--{flag}: {left_out} (--max_prompt_length) and left out")
    if tokenizer.chat_template and kept[0].messages is None:
        print_rank_0(f"--{flag}: strings go to this chat model as they are; see --chat")
    return kept


def check_row(row, rewards: list[Reward]) -> None:
    if not isinstance(row, dict):
        raise ValueError("is no JSON object")
    json.dumps(row, default=str, allow_nan=False)  # for the log
    for reward in rewards:
        reward.check_row(row)


def make_prompt(row: dict, row_number: int, tokenizer, environment, cfg: Config) -> Prompt:
    """The column `prompt`, or --prompt_template filled in, as token ids."""
    text = row.get("prompt")
    if cfg.prompt_template:
        text = fill_template(cfg.prompt_template, row)
    if not text or not isinstance(text, (str, list)):
        raise ValueError(f"column 'prompt' has neither a text nor messages: {text!r}")
    messages = None
    if isinstance(text, list) or cfg.chat or cfg.system_prompt:
        messages = text
        if isinstance(text, str):
            messages = [dict(role="user", content=text)]
        if cfg.system_prompt:
            messages = [dict(role="system", content=cfg.system_prompt), *messages]
        options = dict(tokenize=False) | json.loads(cfg.chat_template_kwargs or "{}")
        if environment is not None:
            seed = (cfg.seed, row_number)
            messages, options["tools"] = environment.open_chat(messages, row, seed, tokenizer)
        text = chat_text(messages, tokenizer, options)
    # One BOS: a chat template writes it, and so does a row that was made by one.
    has_bos = messages is not None or text.startswith(tokenizer.bos_token or "\0")
    text.encode()  # an error if the text is no Unicode, which tokenizers do not say
    ids = tokenizer(text, add_special_tokens=not has_bos)["input_ids"]
    if messages is None and ids[-1:] == [tokenizer.eos_token_id]:  # some tokenizers add it
        ids = ids[:-1]
    return Prompt(np.array(ids, np.int64), text, row, messages, row_number)


def fill_template(template: str, row: dict) -> str:
    r"""Puts the values of the row in the place of {column}. Other braces stay, as in \boxed{} and
    \frac{1}{2}, but not those around what must be meant as a column."""

    def value_of(match):
        command, column = match.groups("")
        if row.get(column) is not None:
            return command + str(row[column])
        if not command and re.fullmatch(r"[^\W\d][\w.-]*", column):
            raise ValueError(f"has no column '{column}'")
        return match[0]

    # A shell passes \n as two letters; before a small letter they are LaTeX, as in \neq
    template = re.sub(r"\\n(?![a-z])", "\n", template)
    filled = re.sub(r"(\\[A-Za-z]+)?\{([^{}\n]+)\}", value_of, template)
    if filled == template:
        raise ValueError("--prompt_template has no column in braces")
    return filled


def chat_text(messages: list[dict], tokenizer, options: dict) -> str:
    """The chat up to where the policy goes on: in a turn of its own, or in one that is begun."""
    write = functools.partial(tokenizer.apply_chat_template, **options)
    if messages[-1]["role"] != "assistant":
        text = write(messages, add_generation_prompt=True)
    else:
        begun = write(messages, continue_final_message=True)
        before, words, after = begun.rpartition(messages[-1]["content"].strip())
        # Qwen3's template puts an empty think block before these words, but not before a turn that
        # the policy begins. What both share is the header, such as <|im_start|>assistant.
        own = write(messages[:-1], add_generation_prompt=True)
        text = os.path.commonprefix([before, own]) + words + after
    return text


def check_tokenizer(tokenizer, prompt: Prompt) -> None:
    """The ids must say the words of the text. transformers may rebuild a tokenizer wrongly, or make
    one up. Blanks beside special tokens may come and go."""
    decoded = tokenizer.decode(prompt.ids)
    blanks = "|".join(map(re.escape, [*tokenizer.get_added_vocab(), "\u2581"]))
    words = [re.sub(blanks, " ", text).split() for text in (decoded, prompt.text)]
    if words[0] != words[1]:
        raise ValueError(f"of {prompt.text!r} the tokenizer makes {decoded!r}")


def keep_logs(samples: list[Sample], failures: dict, metrics: dict, extra: dict) -> None:
    """What a reward function said beside the values: reward.py's call_reward returns it."""
    for i, s in enumerate(samples):
        s.failure = s.failure or failures.get(i, "")
        s.logged |= metrics  # of the whole call: sample_metrics takes the mean over samples
        s.extra |= {column: entries[i] for column, entries in extra.items()}


def reward_row(s: Sample, run: Run) -> dict:
    """What a reward function gets beside the completion: what the trainer knows, and the row of the
    data, whose columns win. reward.py says how functions in TRL's form get it."""
    epoch = run.step * run.cfg.num_prompts / len(run.train_prompts)
    known = dict(
        prompt_text=s.prompt.text,
        prompt_messages=s.prompt.messages,
        completion_ids=s.completion_ids.tolist(),
        completion_length=int(s.sampled.sum()),
        max_completion_length=run.cfg.max_completion_length,
        finish_reason=s.finish_reason,
        trainer_state=dict(global_step=run.step, max_steps=run.cfg.max_steps, epoch=epoch),
    )
    if s.episode is not None:
        known |= s.episode.reward_columns()
    return known | copy.deepcopy(s.prompt.row)  # a copy, because a function may change it


# -- Models


def config_of(path: str):
    if path.startswith((".", "/")) and not os.path.isdir(path):
        raise FileNotFoundError("no such folder")
    names = os.listdir(path) if os.path.isdir(path) else []
    if "adapter_config.json" in names and "config.json" not in names:
        raise ValueError("holds adapters only: merge them into their model first")
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
    """A Hugging Face causal language model without any randomness, in float32 even if the products
    are in bfloat16: at a learning rate of 1e-6 bfloat16 parameters lose 98 % of their updates to
    rounding."""
    with mistakes_in(f"--{flag} {path}"):
        config = config_of(path)
        if getattr(config, "quantization_config", None):
            raise ValueError("is quantized: name the model that it is made of")
        options = dict(config=without_randomness(config), dtype=torch.float32)
        if cfg.dtype == "float64":
            options["dtype"] = torch.float64
        if getattr(config.get_text_config(), "attn_logit_softcapping", None):
            options["attn_implementation"] = "eager"  # the others leave the cap out
        load = transformers.AutoModelForCausalLM.from_pretrained
        model, info = load(path, output_loading_info=True, **options)
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


def autocast(cfg: Config, device: torch.device, cache: bool = False):
    """cache: keep the weights in bfloat16 until the block ends. The sampler uses them often."""
    enabled = cfg.dtype == "bfloat16"
    return torch.autocast(device.type, torch.bfloat16, enabled=enabled, cache_enabled=cache)


def resolve_auto(cfg: Config, model, device: torch.device) -> Config:
    """The flags with a value in place of each `auto`."""
    is_fast = torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported()
    tokens = 2048
    if device.type == "cuda":
        is_fast = torch.cuda.is_bf16_supported(including_emulation=False)
        tokens = tokens_that_fit(model, device)
    if cfg.dtype == "auto":
        is_worth_it = is_fast and model.num_parameters() >= SMALL
        cfg = replace(cfg, dtype="bfloat16" if is_worth_it else "float32")
    if cfg.micro_batch_tokens == 0:
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


def make_policy(model, prompts: list[Prompt], cfg: Config):
    """The plain policy, or the one of extras/fast.py if it is there, right, and faster."""
    plain = Policy(model, cfg.temperature)
    if not cfg.fast or not os.path.exists(f"{HERE}/extras/fast.py"):
        return plain
    from extras import fast

    samples = []  # made up, to compare the two
    for group, prompt in enumerate(prompts[:2]):
        for length in (1, 5, min(32, cfg.max_completion_length)):
            ids = np.resize(prompt.ids, length)
            samples.append(Sample(group, prompt, ids, np.zeros(length)))
    policy, why = fast.choose(plain, samples, collate, cfg)
    if why:
        print_rank_0(f"{type(policy).__name__} for {model.name_or_path}: {why}")
    return policy


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
    theirs = {}
    with contextlib.suppress(Exception):  # a folder may hold the weights alone
        theirs = {i: token for token, i in load_tokenizer(cfg.reference).get_vocab().items()}
    other = [i for token, i in tokenizer.get_vocab().items() if theirs.get(i, token) != token]
    why = f"has another tokenizer than --model: it differs in the ids {other[:3]}"
    require(not other, f"reference {cfg.reference}", why)
    # A reference may have more ids, such as those that pad its vocabulary to another size.
    n_ids = [m.get_input_embeddings().num_embeddings for m in (model, policy.model)]
    why = f"has {n_ids[0]} token ids, --model has {n_ids[1]}"
    require(n_ids[0] >= n_ids[1], f"reference {cfg.reference}", why)
    return make_policy(model, prompts, cfg)


def weights_of(model, cfg: Config, rounded: bool = False) -> dict:
    """By name; adapters are merged into the weights beside which they stand, in bfloat16 if
    `rounded`."""
    if cfg.lora_rank == 0:
        return model.state_dict()
    from extras import lora

    return lora.merged_weights(model, rounded)


def wrap(policy):
    """The policy for backward: inside DDP, which takes the mean of the gradients of all ranks."""
    if WORLD_SIZE == 1:
        return policy
    options = dict(gradient_as_bucket_view=True)
    # A text may reach no image tower, and not every expert. DDP must not wait for those.
    experts = [name for name, _ in policy.named_parameters() if ".experts." in name]
    has_towers = policy.model.config.get_text_config() is not policy.model.config
    options["find_unused_parameters"] = has_towers or len(experts) > 0
    ddp = DistributedDataParallel(policy, **options)
    ddp.broadcast_buffers = False  # no step changes them
    return ddp


def make_optimizer(policy, cfg: Config) -> torch.optim.Optimizer:
    trained = [p for p in policy.parameters() if p.requires_grad]
    matrices = dict(params=[p for p in trained if p.dim() >= 2], weight_decay=cfg.weight_decay)
    vectors = dict(params=[p for p in trained if p.dim() < 2], weight_decay=0.0)
    groups = [group for group in (matrices, vectors) if group["params"]]
    return torch.optim.AdamW(groups, cfg.learning_rate, fused=True)  # fused: 5 times as fast


def check_sizes(flag: str, model, prompts: list[Prompt], cfg: Config) -> int:
    """The most tokens of a prompt and its completion; the model must have room for them."""
    longest = max(len(p.ids) for p in prompts) + cfg.max_completion_length
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None) or longest
    why = f"with the longest prompt {longest} tokens; --{flag} has {positions} positions"
    require(longest <= positions, "max_completion_length", why)
    largest = max(int(p.ids.max()) for p in prompts)
    why = f"the tokenizer of --model makes the id {largest}, which is not in its vocabulary"
    require(largest < model.get_input_embeddings().num_embeddings, flag, why)
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
        run (check_gap)."""
        if self.asleep:  # weights first, then the cache, so that their peaks do not add up
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
        """Frees the GPU for the update. Level 2 drops the weights: the next push brings them."""
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
    renew this copy when it reloads a head that is tied to the embeddings."""
    head = getattr(engine_model, "lm_head", None)
    if hasattr(head, "quant_method"):
        head.quant_method.process_weights_after_loading(head)


def fill_with_nan(engine_model) -> None:
    for parameter in engine_model.parameters():
        parameter.data.fill_(math.nan)
    repack(engine_model)


def make_sampler(model, stop_ids: list[int], longest: int, cfg: Config):
    use_vllm = cfg.rollout == "vllm"
    if cfg.rollout == "auto" and model.num_parameters() >= SMALL and cfg.dtype != "float64":
        use_vllm = importlib.util.find_spec("vllm") is not None
    if not use_vllm:
        return HFSampler(model, stop_ids, cfg)
    print_rank_0("vLLM starts, which takes a minute or more")
    with mistakes_in(f"--rollout {cfg.rollout}: vllm did not start (hf needs none)"):
        return VLLMSampler(model, stop_ids, longest, cfg)


# -- The run on disk


def checkpoints(out_dir: str) -> list[str]:
    """Paths of step_NNNNNN, oldest first."""
    return sorted(glob.glob(f"{glob.escape(out_dir)}/step_??????"))


def newest_checkpoint(cfg: Config) -> dict:
    """What Run.save has written, with its `path`; empty if the run begins."""
    paths = checkpoints(cfg.out_dir) if cfg.resume else []
    for path in reversed(paths):
        try:
            transformers.AutoConfig.from_pretrained(path)
            # weights_only=False: run.state has arrays. The directory is trusted: its config.json
            # names Python files.
            options = dict(map_location="cpu", weights_only=False)
            return torch.load(f"{path}/trainer_state.pt", **options) | dict(path=path)
        except Exception as error:
            print_rank_0(f"--resume: {path} cannot be read ({one_line(error)})")
    require(not paths, "resume", f"no checkpoint in {cfg.out_dir} can be read")
    return {}


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


def completion_row(s: Sample, step: int, tokenizer, with_tokens: bool) -> dict:
    """A line of completions.jsonl."""
    row = dict(step=step, group=s.group, prompt=s.prompt.text, completion=s.text)
    row |= dict(reward=s.reward, rewards=without_nan(s.rewards), advantage=s.advantages[0])
    row |= dict(length=int(s.sampled.sum()), finish_reason=s.finish_reason, row=s.prompt.row)
    optional = dict(failure=s.failure, extra=s.extra)
    row |= {name: value for name, value in optional.items() if value}
    if s.episode is not None:
        row |= s.episode.log_columns()
    if with_tokens:
        values = dict(logp=s.sampler_logps, advantage=s.advantages, sampled=s.sampled)
        row["tokens"] = {k: array.astype(float).round(3).tolist() for k, array in values.items()}
        row["tokens"]["text"] = tokenizer.batch_decode(s.completion_ids[:, None])
    return without_nan(row)


def open_dashboard(cfg: Config, cleanup: contextlib.ExitStack):
    """The module wandb or trackio, which have the same functions; None without a dashboard."""
    if cfg.report_to == "none":
        return None
    with mistakes_in(f"--report_to {cfg.report_to}"):
        module = importlib.import_module(cfg.report_to)
        name = os.path.basename(cfg.out_dir)
        module.init(project="grpo", name=name, config=asdict(cfg), resume="allow")
        cleanup.callback(module.finish)
        return module


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


SHOWN = {  # metric: its name in the line of a step
    "reward": "reward",
    "completions/mean_length": "length",
    "completions/clipped_ratio": "cut-off",
    "frac_reward_zero_std": "no-signal",
    "grad_norm": "grad",
    "kl_k1": "kl_k1",
    "sampler_gap": "gap",
    "tokens_per_s": "tok/s",
}


def why_no_step(metrics: dict) -> str:
    """For the line of a step that moves nothing."""
    cut_off = f"{metrics['completions/clipped_ratio']:.0%} cut off"
    if metrics["skipped_steps"] > 0:
        return "the gradient is not finite"
    if metrics["reward_std"] == 0:
        return f"all rewards are {metrics['reward']:.3g}; {cut_off}"
    return f"in each group all rewards are equal; {cut_off}"


# -- The run: set-up, log, eval, save


def print_failures(samples: list[Sample]) -> None:
    failures = [s.failure for s in samples if s.failure]
    if failures:
        print_rank_0(f"in {len(failures)} of {len(samples)} samples: {failures[0]}")


class Run:
    """All that a run holds. It is loaded and checked, on all ranks, before anything is written."""

    def __init__(self, cfg: Config, device: torch.device, cleanup: contextlib.ExitStack):
        self.times = {}
        self.bad_steps = 0  # in a row
        self.stop_time = math.inf  # when the first Ctrl-C or SIGTERM came
        self.must_not_save = False  # between optimizer steps, and while a save is going on
        self.save_failed = False
        self.load(cfg, device)
        self.check()
        self.open(cleanup)

    def load(self, cfg: Config, device: torch.device) -> None:
        with mistakes_in(f"--model {cfg.model}"):
            self.tokenizer = load_tokenizer(cfg.model)
        marks = r"[<\[][\w|:]*(?:think|thought|channel)[\w|]*[>\]]"
        marks = set(re.findall(marks, str(self.tokenizer.chat_template).lower())) - {"<think>"}
        if marks:
            print_rank_0(f"the chat template has {min(marks)}; the rewards look for <think>")
        with mistakes_in(f"--reward {cfg.reward}"):
            self.rewards = load_rewards(cfg.reward)
        environment = self.player = None
        if cfg.environment:
            from extras import agents

            with mistakes_in(f"--environment {cfg.environment}"):
                environment = agents.load_environment(cfg.environment, cfg.call_timeout)
        data = (self.tokenizer, self.rewards, environment, cfg)
        self.train_prompts = load_prompts("train_data", *data)
        self.eval_prompts = load_prompts("eval_data", *data) if cfg.eval_data else []
        prompts = self.train_prompts + self.eval_prompts

        self.checkpoint = checkpoint = newest_checkpoint(cfg)  # empty: the run begins
        self.step = self.saved = checkpoint.get("step", 0)  # the last whole step
        # For your changes: what stands here when run.complete(step) is called survives --resume.
        # It may hold plain dicts (by texts or ints), lists, numbers and arrays.
        self.state = checkpoint.get("state", {})
        model = load_model("model", cfg.model, cfg, device)
        self.identity = dict(num_prompts=cfg.num_prompts, seed=cfg.seed, lora_rank=cfg.lora_rank)
        self.identity["model"] = digest_of_weights(model)
        if cfg.lora_rank > 0:
            from extras import lora

            lora.add_adapters(model, checkpoint, cfg)
        elif checkpoint:
            model = load_model("model", checkpoint["path"], cfg, device)
        if model.num_parameters() < SMALL:
            torch.set_num_threads(1)
        self.longest = check_sizes("model", model, prompts, cfg)
        self.cfg = cfg = resolve_auto(cfg, model, device)
        self.model = model
        self.policy = make_policy(model, prompts, cfg)
        self.reference = load_reference(cfg, self.policy, self.tokenizer, prompts, device)
        self.stop_ids = stop_ids_of(model, self.tokenizer, cfg)
        if environment is not None:
            with mistakes_in(f"--environment {cfg.environment}"):
                self.player = agents.Player(
                    environment, self.tokenizer, self.stop_ids, prompts, cfg
                )
            self.stop_ids = self.player.stop_ids

    def check(self) -> None:
        """A resume must have what the run began with, and all ranks must have the same."""
        prompts = [(p.ids.tolist(), p.row) for p in self.train_prompts]
        self.identity["train_data"] = digest(prompts)
        if self.cfg.reference and self.reference is not None:
            self.identity["reference"] = digest_of_weights(self.reference.model)
        began_with = self.checkpoint.get("identity", self.identity)
        changed = [name for name in self.identity if began_with.get(name) != self.identity[name]]
        require(not changed, "resume", f"this run began with another {' and '.join(changed)}")
        evals = [p.ids.tolist() for p in self.eval_prompts]
        mine = [asdict(self.cfg), self.identity, evals, self.step, digest_of_weights(self.model)]
        if len(set(gather([digest(mine)]))) > 1:
            raise ConfigError("the ranks differ in flags, rows, rewards, weights or checkpoint")

    def open(self, cleanup: contextlib.ExitStack) -> None:
        """The sampler, the optimizer and, last, the directory: what fails leaves nothing behind."""
        cfg = self.cfg
        model = self.model
        if cfg.lora_rank > 0 and cfg.dtype == "bfloat16":
            from extras import lora

            lora.halve_frozen(model)
        if cfg.compile:
            with mistakes_in("--compile"):
                torch.compile(lambda x: x + 1)(torch.ones(1))  # is there a C compiler?
            for module in model.modules():
                if isinstance(module, GradientCheckpointingLayer):
                    module.compile(dynamic=True)
        self.sampler = make_sampler(model, self.stop_ids, self.longest, cfg)
        cleanup.callback(self.sampler.close)
        self.ddp = wrap(self.policy)  # after vLLM, which may switch to another CUDA stream
        self.optimizer = make_optimizer(self.ddp, cfg)
        if self.checkpoint:
            moments = self.optimizer.state_dict() | dict(state=self.checkpoint.pop("moments"))
            self.optimizer.load_state_dict(moments)
        self.optimizer.register_step_pre_hook(self.forbid_saves)
        self.complete(self.step)
        mine = None
        if RANK == 0:
            mine = self.claim_directory(cleanup)
        out_dir, self.history = gather([mine])[0]
        self.n_written = len(self.history)  # lines that metrics.jsonl has of it
        self.cfg = replace(cfg, out_dir=out_dir)
        about = f"{model.num_parameters() / 1e6:.2f} M parameters, {cfg.dtype}"
        about += f", {WORLD_SIZE} x {model.device}, {type(self.sampler).__name__}"
        print_rank_0(f"{cfg.model}: {about}")
        print_rank_0(f"{len(self.train_prompts)} prompts, out_dir {out_dir}, first prompt:")
        print_rank_0(repr(self.tokenizer.decode(self.train_prompts[0].ids)))
        self.started = self.phase_started = time.perf_counter()
        self.pid = os.getpid()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            before = signal.getsignal(number)
            if before != signal.SIG_IGN:  # nohup ignores SIGHUP
                signal.signal(number, self.request_stop)
                cleanup.callback(signal.signal, number, before)

    def claim_directory(self, cleanup: contextlib.ExitStack) -> tuple:
        """A directory of its own for a new run, so that no run ever overwrites another. Returns its
        path and the lines of metrics.jsonl up to the checkpoint."""
        path = self.cfg.out_dir
        number = 0
        is_unnamed = path == Config.out_dir and not self.cfg.resume
        while is_unnamed and os.path.exists(path):
            number += 1
            path = f"{Config.out_dir}.{number}"
        cfg = replace(self.cfg, out_dir=path)
        is_free = cfg.resume or not os.path.exists(path) or not os.listdir(path)
        require(is_free, f"out_dir {path}", "holds files already; name another, or take --resume")
        self.dashboard = open_dashboard(cfg, cleanup)
        with mistakes_in(f"--out_dir {path}"):
            os.makedirs(path, exist_ok=True)
            lock(cleanup.enter_context(open(f"{path}/metrics.jsonl", "a")))
            source = f"{Path(__file__).name} {digest(Path(__file__).read_text())[:8]}"
            about = dict(script=source, eval_rows=digest([p.row for p in self.eval_prompts])[:8])
            config = asdict(cfg) | dict(about=about)  # which extras/compare.py tells runs by
            Path(path, ".config").write_text(json.dumps(config, indent=1))
            os.replace(f"{path}/.config", f"{path}/config.json")
            cut_log(f"{path}/completions.jsonl", self.step)
            return path, list(map(json.loads, cut_log(f"{path}/metrics.jsonl", self.step)))

    def forbid_saves(self, *_) -> None:
        """From an optimizer step on, until the update is complete, the weights are of no step."""
        self.must_not_save = True

    def complete(self, step: int, **changes) -> None:
        """From here on a checkpoint holds this step, with run.state as it is now and `changes`."""
        self.must_not_save = True
        self.step = step
        self.state |= changes
        json.dumps(self.state, default=refuse_unless_array)
        self.completed_state = copy.deepcopy(self.state)
        self.must_not_save = False

    def record_time(self, phase: str) -> None:
        """Seconds since the last phase ended, once the GPU has done what it was given."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        now = time.perf_counter()
        self.times[f"time_{phase}"] = now - self.phase_started
        self.phase_started = now

    def request_stop(self, number: int, _) -> None:
        """Handles Ctrl-C, SIGTERM and a closed terminal. A launcher kills soon after, so rank 0
        saves at once; then the phase ends, and the run. torchrun passes its own signal on: what
        comes within 5 seconds is the same request, and what comes later ends the process."""
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

    def log(self, metrics: dict, rows: list[dict] = ()) -> None:
        metrics = without_nan(metrics)
        self.history.append(metrics)
        if RANK > 0:
            return
        try:
            append_lines(f"{self.cfg.out_dir}/metrics.jsonl", self.history[self.n_written :])
            self.n_written = len(self.history)
            append_lines(f"{self.cfg.out_dir}/completions.jsonl", rows)
            if self.dashboard is not None:  # under TRL's names: train/reward, eval/accuracy
                names = {k: f"train/{k}".replace("train/eval_", "eval/") for k in metrics}
                self.dashboard.log({names[k]: v for k, v in metrics.items()}, self.step)
        except Exception as error:  # such as a full disk, or no network: it costs no step
            print_rank_0(f"step {self.step} is not logged: {one_line(error)}")

    def log_step(self, samples: list[Sample], metrics: dict) -> None:
        cfg = self.cfg
        metrics = dict(step=self.step) | metrics | sample_metrics(samples) | self.times
        if self.player is not None:
            metrics |= self.player.metrics(samples)
        metrics["step_time"] = sum(self.times.values()) - self.times["time_eval"]
        metrics["tokens_per_s"] = metrics["tokens"] / metrics["step_time"]
        first = samples[: cfg.log_completions]
        signal = Counter()  # the two groups with the largest advantages have their tokens logged
        for s in first:
            signal[s.group] += np.abs(s.advantages[0])
        detailed = dict(signal.most_common(2))
        rows = [completion_row(s, self.step, self.tokenizer, s.group in detailed) for s in first]
        self.log(metrics, rows)

        shown = [f"{name} {metrics[key]:.3g}" for key, name in SHOWN.items() if key in metrics]
        if metrics["optimizer_steps"] == 0:
            shown.append(f"NO OPTIMIZER STEP ({why_no_step(metrics)})")
        print_rank_0(f"step {self.step}/{cfg.max_steps} {' '.join(shown)}")
        print_failures(samples)
        if self.step == 1:
            s = samples[0]
            print_rank_0(f"the first completion, with the reward {s.reward:.3g}:\n{s.text!r}")
            if all(s.failure or math.isnan(s.reward) for s in samples):
                raise TrainingError("no sample of the first step has a reward")
        self.bad_steps = self.bad_steps + 1 if metrics["skipped_steps"] > 0 else 0
        if self.bad_steps == 5:
            raise TrainingError("5 steps in a row had no finite gradient; lower --learning_rate")

    def evaluate_if_due(self) -> None:
        is_done = any(m["step"] == self.step and "eval_length" in m for m in self.history)
        due = self.step == 0 or self.is_due(self.cfg.eval_every)
        if not self.eval_prompts or is_done or not due or self.stop_is_requested():
            return
        m = dict(step=self.step) | evaluate(self)
        shown = f"{m['eval_accuracy']:.3f} +- {m['eval_stderr']:.3f}, length {m['eval_length']:.3g}"
        print_rank_0(f"step {self.step}: eval accuracy {shown}")
        self.log(m)

    def best_step(self) -> int:
        """The step with the highest eval accuracy so far; 0: none."""
        evals = {m["step"]: m["eval_accuracy"] for m in self.history if "eval_accuracy" in m}
        evals.pop(0, None)
        return max(evals, key=evals.get, default=0)

    def path_of(self, step: int) -> str:
        return f"{self.cfg.out_dir}/step_{step:06d}"

    def save_if_due(self) -> None:
        if self.is_due(self.cfg.save_every) or self.step == self.best_step() or self.save_failed:
            self.save()

    def save(self) -> None:
        """Writes a directory that from_pretrained loads. It gets its name once it is complete."""
        if RANK > 0 or self.step == self.saved or self.must_not_save:
            return
        self.must_not_save = True
        partial = f"{self.cfg.out_dir}/.partial"
        shutil.rmtree(partial, ignore_errors=True)  # left by a save that was killed
        try:
            self.write_checkpoint(partial)
            path, best = self.path_of(self.step), self.path_of(self.best_step())
            shutil.rmtree(path, ignore_errors=True)  # one that could not be read
            os.replace(partial, path)
            self.saved = self.step
            self.save_failed = False
            # Checkpoints of later steps could not be read, and do not count.
            paths = [other for other in checkpoints(self.cfg.out_dir) if other <= path]
            for old in paths[: -self.cfg.keep]:  # with 0 none
                if old != best:
                    shutil.rmtree(old)
        except Exception as error:  # such as a full disk
            free = shutil.disk_usage(self.cfg.out_dir).free / 1e6
            print_rank_0(f"step {self.step} is not saved ({free:.0f} MB free): {one_line(error)}")
            self.save_failed = True  # the next step tries again
            shutil.rmtree(partial, ignore_errors=True)
        self.must_not_save = False

    def write_checkpoint(self, folder: str) -> None:
        weights = weights_of(self.model, self.cfg)
        if not all(w.isfinite().all() for w in weights.values()):
            raise ValueError("the weights are not finite")
        self.model.save_pretrained(folder, state_dict=weights)
        self.tokenizer.save_pretrained(folder)
        copy_processors(self.cfg.model, folder)
        state = dict(step=self.step, state=self.completed_state, identity=self.identity)
        state["moments"] = self.optimizer.state_dict()["state"]
        state["adapters"] = {k: p for k, p in self.model.named_parameters() if ".lora_" in k}
        torch.save(state, f"{folder}/trainer_state.pt")


def train(cfg: Config) -> list[dict]:
    """The whole run. Returns the lines of metrics.jsonl."""
    check_flags(cfg)
    transformers.logging.disable_progress_bar()
    torch.set_float32_matmul_precision("highest")  # rounded products look like a wrong sampler
    # Rows hold one text each. transformers would look, and so wait for the GPU in every pass.
    transformers.masking_utils.find_packed_sequence_indices = lambda position_ids: None
    with contextlib.ExitStack() as cleanup:
        run = Run(cfg, join_ranks(cfg), cleanup)
        try:
            training_loop(run)
        finally:
            run.save()  # the last whole step, also if a signal or an error ended the loop
        if WORLD_SIZE > 1:
            dist.barrier()  # nobody leaves while rank 0 saves
        run.ddp = None  # before vLLM closes, which may end the process group
    if dist.is_initialized():
        dist.destroy_process_group()
    with contextlib.suppress(Exception):  # a picture that cannot be drawn ends no run
        from extras import view

        if RANK == 0:
            print_rank_0(f"curves: {view.draw(run.cfg.out_dir)}")
    accuracies = [m["eval_accuracy"] for m in run.history if "eval_accuracy" in m]
    if accuracies:
        print_rank_0(f"accuracy_before: {accuracies[0]:.3f}\naccuracy_after: {accuracies[-1]:.3f}")
    print_rank_0(f"steps: {run.step}\nseconds: {time.perf_counter() - run.started:.1f}")
    print_rank_0(f"out_dir: {run.cfg.out_dir}")
    return run.history


def main(argv: list[str] | None = None) -> int:
    """The command line. Returns the exit code; errors of the user and of the run are one line."""
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace")  # for a terminal that is not UTF-8
    code = 1
    try:
        train(parse_flags(argv))
        return 0
    except (ConfigError, ModuleNotFoundError) as error:  # not installed, or not copied along
        message = str(error)
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
