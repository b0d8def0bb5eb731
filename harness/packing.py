"""Rows without padding: each prompt once, then the completions; and the attention of such a row.

N = samples, T = completion tokens (padded), n = real completion tokens, S = tokens of a row.
"""

import contextlib
import functools

import numpy as np
import torch
import transformers
from transformers.integrations import sdpa_attention
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface

from harness.arrays import padded

# The name under which transformers finds packed_attention, in the whole process: two copies of this project have two.
ATTENTION = f"packed rows of {__file__}"

# ----------------------------------------------------------------------------------------------------------------
# Rows, made on the host, which knows all lengths: inside a pass nothing waits for the device


def spans(starts, lengths) -> np.ndarray:
    """start, start + 1, ... of each span, one after the other: [sum of the lengths]."""
    ends = np.cumsum(lengths)
    return np.arange(ends[-1]) + np.repeat(starts - ends + lengths, lengths)


def rows_of(samples, packs: bool, multiple: int = 1) -> dict:
    """Where the tokens of a micro-batch lie, as arrays; samples have group, prompt.ids and completion_ids.

    packs: one row [1, S] without padding: each group's prompt once, then the completions, long ones first, without
    their last tokens, which nothing follows. Only attention knows what belongs together (blocks: see packed_attention).
    Else a row for each text [N, L], padded on the right, where causal attention does not see it.
    targets [n]: the completions' tokens; place [n]: where they stand in [N, T]; read [n]: the place in the rows of the
    token before each, whose output predicts it.
    """
    order = np.argsort([-len(s.completion_ids) for s in samples], kind="stable")
    samples = [samples[i] for i in order]  # long ones first, in all that follows
    P = np.array([len(s.prompt.ids) for s in samples])  # [N]
    C = np.array([len(s.completion_ids) for s in samples])  # [N]
    N, T = len(samples), int(C[0])
    row = dict(
        shape=(N, T), targets=np.concatenate([s.completion_ids for s in samples]).astype(np.int64)
    )
    row |= dict(place=spans(order * T, C))
    if not packs:
        ids = padded(
            [np.concatenate([s.prompt.ids, s.completion_ids]) for s in samples], np.int64
        )  # [N, L]
        return row | dict(ids=ids, read=spans(np.arange(N) * ids.shape[1] + P - 1, C))
    prompts = {s.group: s.prompt.ids for s in samples}
    ids = np.concatenate([*prompts.values(), *(s.completion_ids[:-1] for s in samples)]).astype(
        np.int64
    )
    sizes = np.array([*map(len, prompts.values()), *(C - 1)])
    starts = np.cumsum(sizes) - sizes
    number = {group: i for i, group in enumerate(prompts)}
    prompt_start, start = (
        starts[[number[s.group] for s in samples]],
        starts[len(prompts) :],
    )  # [N] each
    first, zero = starts[: len(prompts)], np.zeros(len(prompts), np.int64)
    positions = spans(np.concatenate([zero, P]), sizes)
    read = spans(start - 1, C)
    read[np.cumsum(C) - C] = prompt_start + P - 1  # a first token follows its prompt
    blocks = [block(first, zero, first, sizes[: len(prompts)], multiple)]
    blocks += [
        block(prompt_start[part], P[part], start[part], C[part] - 1, multiple)
        for part in two_parts(C)
    ]
    return row | dict(ids=ids[None], positions=positions[None], read=read, blocks=blocks)


def two_parts(lengths) -> list[slice]:
    """Attention pads a block: long completions apart from short ones, where that saves a fifth of it."""
    N, cuts = len(lengths), np.arange(len(lengths))
    area = cuts * lengths[0] + (N - cuts) * lengths  # of the rows before the cut and those after it
    cut = area.argmin() if 5 * area.min() < 4 * N * lengths[0] else 0
    return [
        slice(a, b) for a, b in ((0, cut), (cut, N)) if a < b and lengths[a] > 1
    ]  # 1: nothing follows the prompts


def block(prompt_start, prompt_size, start, size, multiple: int) -> tuple:
    """Texts [N], each a prompt and what follows it, by their starts in the row and their sizes; the queries are what
    follows. -> q_from [N, T] and k_from [N, K], places in the row; which queries are real, in [N * T]; q_at [N, T] and
    k_at [N, K], positions in the text."""
    p_start, p_size, start, size = (x[:, None] for x in (prompt_start, prompt_size, start, size))
    k = np.arange(-(-(p_size + size).max() // multiple) * multiple)
    prompts = not p_size.any()  # they make a square, as causal kernels want it
    t = k if prompts else np.arange(size.max())
    last = size - 1  # padding asks what the last token asks, and is seen by none
    q_from = start + np.minimum(t, last)
    k_from = np.where(k < p_size, p_start + k, start + np.minimum(k - p_size, last))
    q_at, k_at = p_size + np.minimum(t, last), np.where(k < p_size + size, k, 2**30)
    if prompts:  # causal attention does not see the padding on their right
        q_at, k_at = t[None], k[None]
    return q_from, k_from, np.flatnonzero(t < size), q_at, k_at


# ----------------------------------------------------------------------------------------------------------------
# Attention in a row of many texts


@contextlib.contextmanager
def attention_of_blocks(model, blocks):
    """Inside, the model's attention takes its row for these blocks of texts."""
    config = model.config.get_text_config()
    loaded = config._attn_implementation
    AttentionMaskInterface.register(ATTENTION, functools.partial(packed_masks, blocks))
    config._attn_implementation = ATTENTION
    try:
        yield
    finally:
        config._attn_implementation = loaded


def packed_masks(blocks, mask_function, dtype, device, **_) -> list:
    """Stands in for the mask builder of transformers, which every layer gets its mask from. The model's own rule of
    who sees whom (causal, a sliding window, chunks) is asked by position in the text, not by place in the row."""
    kind = torch.device(device).type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else dtype
    found = []
    for q_from, k_from, real, q_at, k_at in blocks:
        k, mask = torch.arange(k_at.shape[1]), None  # None: the fast causal kernel
        ends = k[[0, -1], None]  # the first token sees itself, the last one all: plain causal
        prompts = q_at.shape == k_at.shape == (1, len(k))
        if not (prompts and torch.equal(mask_function(0, 0, ends, k[None]), k <= ends)):
            mask = mask_function(0, 0, q_at[:, :, None], k_at[:, None])  # [N or 1, T, K]
            mask = torch.where(mask, 0.0, -torch.inf).to(dtype)[:, None]  # once for all layers
        found.append((q_from, k_from, real, mask))
    return found


def shares_keys(attention_mask, key, value) -> bool:
    """For transformers: grouped heads without copies of keys? On CUDA only for flash; the other kernel is quadratic."""
    flash = not key.is_cuda or (
        value.itemsize == 2 and torch.cuda.get_device_properties(key.device).major >= 8
    )
    return flash and attention_mask is None and key.shape[-1] == value.shape[-1] <= 256


@torch.compiler.disable  # many shapes: compiled, it would be compiled again and again
def packed_attention(module, query, key, value, attention_mask, **options):
    """Attention in a row [1, heads, S, D] of many texts: each block's rows are taken out of it, and put back."""
    parts = []
    for q_from, k_from, real, bias in attention_mask:
        q, k, v = (
            x[0]
            .transpose(0, 1)
            .index_select(0, source.flatten())
            .unflatten(0, source.shape)
            .transpose(1, 2)
            for x, source in ((query, q_from), (key, k_from), (value, k_from))
        )  # [N, heads, T or K, D]
        short = k.shape[2] <= (
            1024 if v.dtype == torch.bfloat16 else 256
        )  # its square is kept for backward
        by_products = options.get("softcap") or (short and v.device.type == "cpu")
        attend = attention_by_products if by_products else sdpa_attention_forward
        out = attend(module, q, k, v, bias, **options)[0]  # [N, T, heads, D]
        parts.append(out.flatten(0, 1).index_select(0, real))
    return torch.cat(parts)[None], None


def attention_by_products(module, query, key, value, bias, scaling=None, softcap=None, **_):
    """Attention of short texts on a CPU, where the fused kernel's backward takes 5 times as long in bfloat16, and of
    models that cap its scores, which no fused kernel does. bias [N or 1, 1, T, K], or None: causal."""
    (N, heads, T, D), (few, K) = query.shape, key.shape[1:3]
    if bias is None:
        bias = torch.full((T, K), -torch.inf, dtype=value.dtype, device=value.device).triu(1)[
            None, None
        ]
    query = (
        (query * (scaling or D**-0.5)).to(value.dtype).reshape(N, few, -1, D)
    )  # heads that have one key: as rows
    scores = (query @ key.to(value.dtype).transpose(2, 3)).view(N, few, -1, T, K)
    if softcap:
        scores = softcap * (scores / softcap).tanh()
    out = (scores + bias[:, None]).softmax(-1).view(N, few, -1, K) @ value
    return out.view(N, heads, T, -1).transpose(1, 2), None


def register_attention() -> None:
    """transformers looks an attention function up by its name, and asks a function of its own about grouped heads."""
    transformers.AttentionInterface.register(ATTENTION, packed_attention)
    sdpa_attention.use_gqa_in_sdpa = shares_keys
