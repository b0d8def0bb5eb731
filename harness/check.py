"""Whether the fast policy has the numbers of the plain one: measured on the model, never guessed from its architecture.

What is chosen here: packed rows or padded ones, the head in tiles or the model's own logits.
"""

import contextlib
from types import SimpleNamespace

import numpy as np
import torch
from torch import nn

from harness.arrays import padded_rows, to_device

ROUNDING = 1e-3  # of the spread of a token's logits: float32 makes 1e-6 to 1e-4 of it, one wrong key 0.01 to 1


@torch.no_grad()
def settle(policy, ids=range(1, 37), longest: int = 9, budget: int = 0) -> None:
    """Chooses packed rows if they give the log-probabilities of the plain policy, else padded ones.

    When a policy is made, on three short texts; at the start of a run once more, on tokens of its prompts `ids`, with
    texts of up to `longest` tokens in a micro-batch of `budget`: that finds what depends on the place in a row or on
    the neighbours' lengths. ValueError if padded rows are off, too.
    """
    import transformers.integrations.sdpa_attention

    from harness.kernels import packed_attention, shares_keys

    transformers.integrations.sdpa_attention.use_gqa_in_sdpa = shares_keys
    transformers.AttentionInterface.register("packed", packed_attention)
    words, longest = policy.model.config.get_text_config().vocab_size, max(4, longest)
    few, ids = min(8, longest // 2), np.resize(np.array(ids) % words, longest + 24)
    prompt, one, two, three = np.split(ids, [longest - few, longest, longest + few - 1])
    texts = [text(0, prompt, one), text(0, prompt, two), text(1, three[:few], three[few : 2 * few])]
    others = [
        text(2 + i, prompt, one) for i in range(budget // longest - 3)
    ]  # before them in the row
    expected = plain_logps(policy, texts)
    for packs in (True, False) if policy.packs else (False,):
        use_rows(policy, packs)
        with (
            contextlib.suppress(Exception) if packs else contextlib.nullcontext()
        ):  # as of bodies without positions
            logps = policy(to_device(policy.rows(others + texts), policy.model.device))[0][-3:]
            # in long rows the median: rounding may send a token to another expert
            distance = far(logps, expected, share=0.5 if budget else 1.0)
            if distance <= ROUNDING:
                return
    raise ValueError(
        f"its log-probabilities are off by {distance:.2g} of their spread here. A longer row beside it may change "
        "a text (RoPE of kind longrope, dynamic): keep prompt and completion within the original positions"
    )


def text(group: int, prompt, completion):
    return SimpleNamespace(
        group=group, prompt=SimpleNamespace(ids=prompt), completion_ids=completion
    )


def plain_logps(policy, texts) -> list:
    """For each text, alone: what the plain policy says of its completion, and the spread of the logits, [T] each."""
    if not hasattr(policy.model, "loaded_attention"):
        choose_attention(policy, texts)
    with as_loaded(policy.model):
        batches = [to_device(padded_rows([sample]), policy.model.device) for sample in texts]
        logits = [policy.logits(batch)[0] for batch in batches]  # [T, V] each
    return [
        (logps_of(x, batch["completion"][0]), x.std(-1))
        for x, batch in zip(logits, batches, strict=True)
    ]


def logps_of(logits, targets):
    return -nn.functional.cross_entropy(logits, targets, reduction="none")


def far(logps, expected, share=1.0) -> float:
    """How far log-probabilities are off, in spreads of their logits: in the worst text, what this share of its tokens
    does not exceed."""
    distances = [
        ((a[: len(b)] - b).abs() / spread).nan_to_num(nan=torch.inf)
        for a, (b, spread) in zip(logps, expected, strict=True)
    ]
    return max(x.quantile(share, interpolation="lower").item() for x in distances)


@torch.no_grad()
def choose_attention(policy, texts=None) -> None:
    """As loaded; but eager, where that is another function: sdpa leaves out what no fused kernel has, such as the cap
    on Gemma 2's scores. ValueError if two forwards of the same differ."""
    model, texts = policy.model, texts or [text(0, np.arange(1, 5), np.arange(5, 9))]
    config = model.config.get_text_config()
    model.loaded_attention = config._attn_implementation
    found = plain_logps(policy, texts)
    if far([logps for logps, _ in plain_logps(policy, texts)], found) > 0:
        raise ValueError(
            "two forwards of this model differ: it draws random numbers (dropout, jitter of a router)"
        )
    if model.loaded_attention == "sdpa":
        model.loaded_attention = "eager"
        if far([logps for logps, _ in plain_logps(policy, texts)], found) <= ROUNDING:
            model.loaded_attention = "sdpa"
    config._attn_implementation = model.loaded_attention


def use_rows(policy, packs: bool) -> None:
    policy.packs = packs
    policy.model.config.get_text_config()._attn_implementation = (
        "packed" if packs else policy.model.loaded_attention
    )


@contextlib.contextmanager
def as_loaded(model):
    """Within it the model attends as transformers loaded it, for sampling."""
    config = model.config.get_text_config()
    settled = config._attn_implementation
    config._attn_implementation = getattr(model, "loaded_attention", settled)
    try:
        yield
    finally:
        config._attn_implementation = settled


@torch.no_grad()
def head_is_plain(model) -> bool:
    """Some architectures scale or soft-cap after the head: there the model's own logits are to be used."""
    ids = torch.arange(1, 9, device=model.device)[None]
    head, body = model.get_output_embeddings(), model.base_model
    if not isinstance(head, nn.Linear) or body is model:
        return False
    hidden = body(input_ids=ids, use_cache=False).last_hidden_state
    return torch.allclose(head(hidden), model(input_ids=ids, use_cache=False).logits, atol=1e-5)
