"""Attention in a row of many texts, in place of the model's own.

N = texts of a block, T = queries, K = keys (padded), S = tokens of the row, D = size of a head.
"""

import contextlib
import functools

import torch
import transformers
from transformers.integrations import sdpa_attention
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface

# transformers finds attention functions by name, in the whole process: two copies of this project
# that live in one process need two names.
ATTENTION = f"packed rows of {__file__}"


def register_attention() -> None:
    """Registers packed_attention with transformers and replaces its use_gqa_in_sdpa."""
    # Not compiled with the layers: its many shapes would recompile it again and again.
    attention = torch.compiler.disable(packed_attention)
    transformers.AttentionInterface.register(ATTENTION, attention)
    sdpa_attention.use_gqa_in_sdpa = shares_keys


@contextlib.contextmanager
def attention_of_blocks(model, blocks: list[dict]):
    """Inside, the model's attention splits its row into these blocks of texts."""
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
    text instead of places in the row. None selects the fast causal kernel.
    """
    kind = torch.device(device).type
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)

    masked = []
    for block in blocks:
        mask = None
        queries, keys = block["query_positions"], block["key_positions"]
        if not (block["prompts"] and is_causal(mask_function, keys.shape[1])):
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

    Copies each block's texts out of the row, runs attention, and concatenates the results: blocks
    are in row order.
    """
    outputs = []
    for block in attention_mask:
        keys = block["keys"]
        q = take(query, block["queries"])
        k = take(key, keys)
        v = take(value, keys)
        attend = attention_function(k, v, options)
        out, _ = attend(module, q, k, v, block["mask"], **options)  # [N, T, heads, D]
        out = out.flatten(0, 1)
        outputs.append(out.index_select(0, block["real"]))
    row = torch.cat(outputs)
    return row[None], None  # no attention weights


def take(x, places):
    """x [1, heads, S, D], places [N, T] in the row -> [N, heads, T, D]"""
    tokens = x[0].transpose(0, 1)  # [S, heads, D]
    taken = tokens.index_select(0, places.flatten())
    return taken.unflatten(0, places.shape).transpose(1, 2)


def attention_function(key, value, options: dict):
    """Fused, except to cap scores (no fused kernel can) and on a CPU for short texts (slow)."""
    if options.get("softcap"):
        return attention_by_products
    # By products, backward keeps all scores: they grow with the square of the length.
    longest = 1024 if value.dtype == torch.bfloat16 else 256
    if value.device.type == "cpu" and key.shape[2] <= longest:
        return attention_by_products
    return sdpa_attention_forward


def attention_by_products(module, query, key, value, mask, scaling=None, softcap=None, **_):
    """Attention as in a textbook: query [N, heads, T, D], mask [N or 1, 1, T, K]; None: causal.

    For short texts on a CPU, where backward of the fused kernel takes 5 times as long in bfloat16,
    and for models that cap the scores.
    """
    N, heads, T, D = query.shape
    shared, K = key.shape[1:3]  # key heads; each serves heads // shared query heads
    if mask is None:
        mask = torch.full((T, K), -torch.inf, dtype=value.dtype, device=value.device)
        mask = mask.triu(1)[None, None]
    if scaling is None:
        scaling = D**-0.5

    # Stack the query heads that share a key head, so that no key is copied.
    query = (query * scaling).to(value.dtype).reshape(N, shared, -1, D)
    key = key.to(value.dtype)
    scores = query @ key.transpose(2, 3)
    scores = scores.view(N, shared, -1, T, K)
    if softcap:
        scores = softcap * (scores / softcap).tanh()
    weights = (scores + mask[:, None]).softmax(-1)
    out = weights.view(N, shared, -1, K) @ value
    return out.view(N, heads, T, -1).transpose(1, 2), None


def shares_keys(attention_mask, key, value) -> bool:
    """True if fused attention accepts grouped heads without copying keys.

    Replaces transformers' use_gqa_in_sdpa. On CUDA only the flash kernel does; another one would
    take memory that grows with the square of the length.
    """
    if attention_mask is not None or key.shape[-1] != value.shape[-1] or key.shape[-1] > 256:
        return False
    if not key.is_cuda:
        return True
    capability = torch.cuda.get_device_properties(key.device).major
    return value.itemsize == 2 and capability >= 8
