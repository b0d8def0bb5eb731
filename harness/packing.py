"""Rows without padding: each prompt once, then its completions; and the attention of such a row.

N = samples, T = completion tokens (padded), n = real completion tokens, S = tokens of a row.
In a block of texts that attend: T = queries, K = keys, both padded.
"""

import contextlib
import functools
import math

import numpy as np
import torch
import transformers
from transformers.integrations import sdpa_attention
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface

from harness.arrays import padded_rows

# transformers finds attention functions by name, in the whole process: two copies of this project
# that live in one process need two names.
ATTENTION = f"packed rows of {__file__}"
NEVER = 2**30  # the position of padding: later than every query, so causal attention drops it


# ------------------------------------------------------------------------------------------------
# Layout of a micro-batch, made on the CPU, which has all lengths: no pass waits for the device


def padded_layout(samples) -> dict:
    """A row for each text, padded on the right: see packed_layout for what the arrays mean."""
    rows = padded_rows(samples)
    lengths = np.array([[len(s.completion_ids)] for s in samples])  # [N, 1]
    N, L = rows["ids"].shape
    real = np.arange(lengths.max()) < lengths  # [N, T]
    read = rows["before"] + L * np.arange(N)[:, None]
    return dict(
        shape=real.shape,
        ids=rows["ids"],  # [N, L]
        targets=rows["completion"][real],
        read=read[real],
        place=np.flatnonzero(real),
    )


def packed_layout(samples, multiple: int = 1) -> dict:
    """One row without padding, as arrays; samples have group, prompt.ids and completion_ids.

    It holds each group's prompt once, then the completions, long ones first, without their last
    tokens, which predict nothing. Of two groups, with prompts ABC and XY, that are answered by def
    and gh and by z:

        ids        A B C X Y d e g     [1, S]
        positions  0 1 2 0 1 3 4 3     [1, S] in the text
        targets    d e f g h z         [n] the tokens of the completions
        read       2 5 6 2 7 4         [n] the place in the row that predicts each of them
        place      0 1 2 3 4 6         [n] where they stand in the table [N, T], flattened
        blocks     the prompts, and the completions: which places attend to which

    multiple: the number of keys of a block is a multiple of it.
    """
    order = sorted(range(len(samples)), key=lambda i: -len(samples[i].completion_ids))
    lengths = np.array([len(samples[i].completion_ids) for i in order])
    T = lengths[0]

    ids, positions, prompt_starts = [], [], {}
    S = 0
    for i in order:
        sample = samples[i]
        if sample.group not in prompt_starts:
            prompt_starts[sample.group] = S
            ids.append(sample.prompt.ids)
            positions.append(np.arange(len(sample.prompt.ids)))
            S += len(sample.prompt.ids)
    prompt_sizes = np.array([len(prompt_ids) for prompt_ids in ids])

    targets, read, place, texts = [], [], [], []
    for i in order:
        sample = samples[i]
        P, C = len(sample.prompt.ids), len(sample.completion_ids)
        prompt_start = prompt_starts[sample.group]
        texts.append((prompt_start, P, S, C - 1))
        ids.append(sample.completion_ids[:-1])
        positions.append(np.arange(P, P + C - 1))
        targets.append(sample.completion_ids)
        read.append([prompt_start + P - 1])  # the first token follows the prompt
        read.append(np.arange(S, S + C - 1))  # the others follow the token before them
        place.append(np.arange(i * T, i * T + C))
        S += C - 1

    blocks = [prompt_block(np.array(list(prompt_starts.values())), prompt_sizes, multiple)]
    for part in long_and_short(lengths):
        blocks.append(completion_block(np.array(texts[part]), multiple))
    return dict(
        shape=(len(samples), int(T)),
        ids=np.concatenate(ids).astype(np.int64)[None],
        positions=np.concatenate(positions)[None],
        targets=np.concatenate(targets).astype(np.int64),
        read=np.concatenate(read),
        place=np.concatenate(place),
        blocks=blocks,
    )


def long_and_short(lengths: np.ndarray) -> list[slice]:
    """Which completions attend together, by their lengths [N], longest first.

    A block is as wide as its longest completion. So long ones part from short ones if that saves a
    fifth of the block. On one CPU core an update of the bundled task then takes 0.80 of the time
    when answers have 9 tokens on average, 0.94 at 22, and no less from 26 on; the update of a model
    of 256 hidden units takes 0.99.
    """
    N = len(lengths)
    cuts = np.arange(N)
    areas = cuts * lengths[0] + (N - cuts) * lengths  # of both blocks, cut before each completion
    cut = int(areas.argmin())
    if 5 * areas[cut] >= 4 * N * lengths[0]:
        cut = 0
    parts = [slice(0, cut), slice(cut, N)]
    return [part for part in parts if part.start < part.stop and lengths[part.start] > 1]


def prompt_block(starts: np.ndarray, sizes: np.ndarray, multiple: int) -> dict:
    """Prompts [N], which attend to themselves, by their starts in the row.

    They make squares [K, K], as causal kernels want them, which do not see padding on the right.
    """
    starts, sizes = starts[:, None], sizes[:, None]  # [N, 1] each
    positions = np.arange(round_up(sizes.max(), multiple))[None]  # [1, K]
    places = starts + np.minimum(positions, sizes - 1)  # [N, K]
    return dict(
        queries=places,
        keys=places,
        query_positions=positions,
        key_positions=positions,
        real=np.flatnonzero(positions < sizes),
        square=True,
    )


def completion_block(texts: np.ndarray, multiple: int) -> dict:
    """Completions, which attend to their prompts and to themselves.

    texts [N, 4]: start and size of the prompt, start and size of the completion in the row.

    queries [N, T], keys [N, K]: places in the row. query_positions, key_positions: positions in
    the text. real: which of the N * T queries are no padding, which repeats the last query.
    """
    prompt_starts, prompt_sizes, starts, sizes = texts.T[:, :, None]  # [N, 1] each
    t = np.arange(sizes.max())  # [T]
    k = np.arange(round_up((prompt_sizes + sizes).max(), multiple))  # [K]
    last = sizes - 1
    query = np.minimum(t, last)  # [N, T]
    key = np.minimum(k - prompt_sizes, last)  # [N, K], negative in the prompt
    return dict(
        queries=starts + query,
        keys=np.where(k < prompt_sizes, prompt_starts + k, starts + key),
        query_positions=prompt_sizes + query,
        key_positions=np.where(k < prompt_sizes + sizes, k, NEVER),
        real=np.flatnonzero(t < sizes),
        square=False,
    )


def round_up(number: int, multiple: int) -> int:
    return math.ceil(number / multiple) * multiple


# ------------------------------------------------------------------------------------------------
# Attention in a row of many texts


def register_attention() -> None:
    """Gives transformers packed_attention under its name, and the answer about grouped heads."""
    # Not compiled with the layers: of many shapes, it would be compiled again and again.
    attention = torch.compiler.disable(packed_attention)
    transformers.AttentionInterface.register(ATTENTION, attention)
    sdpa_attention.use_gqa_in_sdpa = shares_keys


@contextlib.contextmanager
def attention_of_blocks(model, blocks: list[dict]):
    """Inside, the model's attention takes its row apart into these blocks of texts."""
    config = model.config.get_text_config()
    loaded = config._attn_implementation
    AttentionMaskInterface.register(ATTENTION, functools.partial(packed_masks, blocks))
    config._attn_implementation = ATTENTION
    try:
        yield
    finally:
        config._attn_implementation = loaded


def packed_masks(blocks: list[dict], mask_function, dtype, device, **_) -> list[dict]:
    """The blocks with their masks [N or 1, 1, T, K], made once for all layers.

    transformers calls this in place of its own mask builder. mask_function is the model's rule of
    which query sees which key (causal, a sliding window, chunks): here it gets positions in the
    text instead of places in the row. A mask of None is the fast causal kernel.
    """
    kind = torch.device(device).type
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)

    masked = []
    for block in blocks:
        mask = None
        queries, keys = block["query_positions"], block["key_positions"]
        if not (block["square"] and is_causal(mask_function, keys.shape[1])):
            seen = mask_function(0, 0, queries[:, :, None], keys[:, None])  # [N or 1, T, K]
            mask = torch.where(seen, 0.0, -torch.inf).to(dtype)[:, None]
        masked.append(block | dict(mask=mask))
    return masked


def is_causal(mask_function, K: int) -> bool:
    """Whether each of K tokens sees itself and all before it.

    Two tokens show it: a window or chunks would hide something from the last one, and a rule that
    looks ahead would show the first one more than itself.
    """
    keys = torch.arange(K)[None]
    queries = torch.tensor([[0], [K - 1]])
    return torch.equal(mask_function(0, 0, queries, keys), keys <= queries)


def packed_attention(module, query, key, value, attention_mask, **options):
    """Attention in a row: query, key, value [1, heads, S, D] -> [1, S, heads, D].

    Each block's texts are taken out of the row, attend, and the results are put one after another:
    the blocks have the order of the row.
    """
    outputs = []
    for block in attention_mask:
        q = take(query, block["queries"])
        k = take(key, block["keys"])
        v = take(value, block["keys"])
        attend = attention_function(k, v, options)
        out, _ = attend(module, q, k, v, block["mask"], **options)  # [N, T, heads, D]
        outputs.append(out.flatten(0, 1).index_select(0, block["real"]))
    return torch.cat(outputs)[None], None


def take(x, places):
    """x [1, heads, S, D], places [N, T] in the row -> [N, heads, T, D]"""
    tokens = x[0].transpose(0, 1)  # [S, heads, D]
    taken = tokens.index_select(0, places.flatten())
    return taken.unflatten(0, places.shape).transpose(1, 2)


def attention_function(key, value, options: dict):
    """The one that fits: no fused kernel caps scores, and on a CPU it is slow for short texts."""
    if options.get("softcap"):
        return attention_by_products
    # Backward keeps the scores of the products, whose number grows with the square of the length.
    longest = 1024 if value.dtype == torch.bfloat16 else 256
    if value.device.type == "cpu" and key.shape[2] <= longest:
        return attention_by_products
    return sdpa_attention_forward


def attention_by_products(module, query, key, value, mask, scaling=None, softcap=None, **_):
    """Attention as in a textbook: query [N, heads, T, D], mask [N or 1, 1, T, K]; None: causal.

    For short texts on a CPU, where backward of the fused kernel takes 5 times as long in bfloat16,
    and for models that cap its scores.
    """
    N, heads, T, D = query.shape
    shared, K = key.shape[1:3]  # heads of keys, each shared by heads // shared queries
    if mask is None:
        mask = torch.full((T, K), -torch.inf, dtype=value.dtype, device=value.device)
        mask = mask.triu(1)[None, None]
    if scaling is None:
        scaling = D**-0.5

    # Queries that share a key stand one below the other, so keys are not copied.
    query = (query * scaling).to(value.dtype).reshape(N, shared, -1, D)
    scores = query @ key.to(value.dtype).transpose(2, 3)
    scores = scores.view(N, shared, -1, T, K)
    if softcap:
        scores = softcap * (scores / softcap).tanh()
    weights = (scores + mask[:, None]).softmax(-1)
    out = weights.view(N, shared, -1, K) @ value
    return out.view(N, heads, T, -1).transpose(1, 2), None


def shares_keys(attention_mask, key, value) -> bool:
    """Whether fused attention takes grouped heads as they are, without copies of keys.

    Replaces transformers' use_gqa_in_sdpa. On CUDA only the flash kernel does; another one would
    take memory that grows with the square of the length.
    """
    if attention_mask is not None or key.shape[-1] != value.shape[-1] or key.shape[-1] > 256:
        return False
    if not key.is_cuda:
        return True
    capability = torch.cuda.get_device_properties(key.device).major
    return value.itemsize == 2 and capability >= 8
