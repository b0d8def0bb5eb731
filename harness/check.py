"""Checks a policy by running the model, never by guessing from its architecture.

Any policy is compared with the plain policy that gets each text alone, in a row without padding.
"""

import math
from types import SimpleNamespace

import numpy as np
import torch
from torch import nn

from harness.arrays import to_device
from harness.flags import ConfigError, say

# In std of a token's logits: float32 rounding gives 1e-6 to 1e-4, a wrong key 0.01 to 1.
ROUNDING = 1e-3
# In bfloat16 the mean error of the plain policy is the unit: right policies have 0.6 to 1.4 of it,
# policies with a fault 3 to 80.
ROUNDING_IN_BFLOAT16 = 2


def first_right(candidates: list, prompts: list, cfg):
    """The first policy with the plain one's log-probs; the plain one is the last candidate.

    prompts: the run's; they set how long the test texts are. ConfigError: two forwards of
    the model differ, or padded rows give other numbers than each text alone.
    """
    plain = candidates[-1]
    texts = {}
    if prompts:
        texts["longest"] = max(len(p.ids) for p in prompts) + cfg.max_completion_length
        texts["token_ids"] = np.concatenate([p.ids for p in prompts[:100]])
        texts["budget"] = cfg.micro_batch_tokens
    try:
        choose_attention(plain.model)
        for policy in candidates:
            if policy.packs:
                policy.attention = "masks"
            error = largest_error(policy, plain, **texts)
            if error <= ROUNDING and fits_bfloat16(policy, plain, cfg, texts):
                break
    except ValueError as problem:
        raise ConfigError(f"--model {cfg.model}: {problem}") from None
    if error > ROUNDING:
        raise ConfigError(
            f"--model {cfg.model}: log-probabilities are off by {error:.2g} std of the logits in "
            "padded rows. A text may change beside a longer row (RoPE of kind longrope, "
            "dynamic): keep prompt and completion within the original positions"
        )

    if cfg.fast and len(candidates) == 1:
        say("--fast: harness/fast.py is missing, so the slower plain policy is used")
    elif cfg.fast and policy is plain:
        say("using the slower plain policy: the fast one's log-probs differ on this model")
    elif cfg.fast and not policy.packs:
        say("rows are padded, and prompts repeated: this model lets the texts of one row mix")
    if policy.packs:
        try_without_masks(policy, plain, cfg, texts)
    return policy


def try_without_masks(policy, plain, cfg, texts: dict) -> None:
    """Lets the policy merge attention from calls without masks, if its numbers stay right."""
    policy.attention = "merged"
    right = largest_error(policy, plain, **texts) <= ROUNDING
    if right and fits_bfloat16(policy, plain, cfg, texts):
        policy.attention = "auto"
    else:
        policy.attention = "masks"
        why = "without them log-probs differ, or the kernel fails"
        say(f"attention takes masks, which is slower: {why}")


def fits_bfloat16(policy, plain, cfg, texts: dict) -> bool:
    """Whether a run in bfloat16 rounds about as the plain policy does. There other kernels run."""
    if cfg.dtype != "bfloat16":
        return True
    errors = errors_of_texts(policy, plain, in_bfloat16=True, **texts)
    of_plain = errors_of_texts(plain, plain, in_bfloat16=True, **(texts | dict(budget=0)))
    limit = ROUNDING_IN_BFLOAT16 * torch.cat(of_plain).mean() + ROUNDING
    return bool(torch.cat(errors).mean() <= limit)


def largest_error(policy, plain, **texts) -> float:
    """The largest of errors_of_texts, in float32."""
    has_experts = any(".experts." in name for name, _ in plain.model.named_parameters())
    errors = []
    for error in errors_of_texts(policy, plain, **texts):
        if has_experts:
            # Rounding may send a token to another expert. So ignore the worst tenth of the tokens,
            # but also test a tenth of the mean error over the text.
            errors.append(error.quantile(0.9, interpolation="lower").item())
            errors.append(error.mean().item() / 10)
        else:
            errors.append(error.max().item())
    return max(errors)


@torch.no_grad()
def errors_of_texts(
    policy,
    plain,
    token_ids=range(1, 37),
    longest: int = 32,
    budget: int = 0,
    in_bfloat16: bool = False,
) -> list:
    """How far the policy's log-probabilities are from the plain policy's in float32: [T] per text.

    Texts of up to `longest` tokens, made of token_ids, stand together in a micro-batch of about
    `budget` tokens, to reveal errors that depend on the place in a row or on the texts beside it.
    The unit is the standard deviation of a token's logits. in_bfloat16: the policy runs under
    autocast. inf: the model does not run on packed rows.
    """
    device = plain.model.device
    texts, others = texts_to_compare(plain.model, token_ids, longest, budget)
    together = to_device(policy.rows(others + texts), device)
    try:
        with torch.autocast(device.type, torch.bfloat16, enabled=in_bfloat16):
            logps, _ = policy(together)  # [N, T]
    except torch.OutOfMemoryError:
        raise
    except Exception:
        if not policy.packs:
            raise
        return [torch.tensor([math.inf])]  # for example, the model takes no positions

    errors = []
    for text, text_logps in zip(texts, logps[len(others) :], strict=True):
        alone = to_device(plain.rows([text]), device)
        targets = alone["completion"][0]  # [T]
        logits = plain.logits(alone)[0]  # [T, V]
        expected = -nn.functional.cross_entropy(logits, targets, reduction="none")
        difference = text_logps[: len(targets)] - expected
        error = difference.abs() / logits.std(-1)
        errors.append(error.nan_to_num(nan=math.inf))
    return errors


def texts_to_compare(model, token_ids, longest: int, budget: int) -> tuple[list, list]:
    """Four texts to compare, and others, as long as the longest, to put before them.

    Two answer the same prompt and have nearly `longest` tokens; one has half as many; one is short.
    """
    longest = max(longest, 8)
    T = min(longest // 4, 32)  # tokens of a completion
    vocabulary = model.config.get_text_config().vocab_size
    ids = np.resize(np.array(token_ids) % vocabulary, longest + 2 * T)

    prompt = ids[: longest - T]
    one = ids[longest - T : longest]
    two = ids[longest : longest + T - 1]
    three = ids[longest + T :]
    texts = [
        sample(0, prompt, one),
        sample(0, prompt, two),
        sample(1, prompt[: longest // 2 - T], three),
        sample(2, prompt[:2], three),
    ]
    others = [sample(3 + i, prompt, one) for i in range(budget // longest - 3)]
    return texts, others


def sample(group: int, prompt_ids, completion_ids):
    prompt = SimpleNamespace(ids=prompt_ids)
    sampled = np.ones(len(completion_ids), bool)
    return SimpleNamespace(
        group=group, prompt=prompt, completion_ids=completion_ids, sampled=sampled
    )


@torch.no_grad()
def choose_attention(model) -> None:
    """Called once, after loading: eager attention instead of sdpa if the two differ on this model.

    sdpa silently ignores what no fused kernel has, such as the cap on Gemma 2's scores.
    ValueError: two forwards of the model differ.
    """
    config = model.config.get_text_config()
    ids = torch.arange(1, 33, device=model.device)[None] % config.vocab_size
    logits = model(input_ids=ids, use_cache=False).logits  # [1, 32, V]
    again = model(input_ids=ids, use_cache=False).logits
    if not torch.equal(again, logits):
        raise ValueError(
            "two forwards of this model differ: it draws random numbers (dropout, router jitter)"
        )

    if config._attn_implementation == "sdpa":
        config._attn_implementation = "eager"
        eager = model(input_ids=ids, use_cache=False).logits
        error = ((eager - logits).abs().amax(-1) / logits.std(-1)).max()
        if error <= ROUNDING:
            config._attn_implementation = "sdpa"
