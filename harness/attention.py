"""Attention in a row of many texts, in place of the model's own.

Two ways: calls without masks (merged_attention.py), for models that are plain causal; and blocks of
padded texts with masks, for all others, and for short texts on a CPU, where blocks are faster.
N = texts of a block, T = queries, K = keys (padded), S = tokens of the row, D = size of a head.
"""

import contextlib
import functools

import torch
import transformers
from transformers.integrations import sdpa_attention
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface

from harness.merged_attention import MergedAttention, heads_last

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
def attention_of_row(model, layout: dict, way: str = "auto"):
    """Inside, the model attends within the texts of the row that packed_layout describes.

    way: "merged", "masks" or "auto", the faster one. Models that are not plain causal get masks.
    """
    config = model.config.get_text_config()
    loaded = config._attn_implementation
    # transformers builds a "mask" with this and hands it to packed_attention: here a PackedRow.
    AttentionMaskInterface.register(ATTENTION, functools.partial(PackedRow, layout, way))
    config._attn_implementation = ATTENTION
    try:
        yield
    finally:
        config._attn_implementation = loaded


class PackedRow:
    """A row as layers with the same mask rule attend to it; transformers calls this in place of its
    own mask builder, once for all these layers.

    mask_function is the model's rule of which query sees which key (causal, a sliding window,
    chunks): here it gets positions in the text instead of places in the row.
    """

    def __init__(self, layout: dict, way: str, mask_function, dtype, device, **_):
        kind = torch.device(device).type
        if torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
        self.layout = layout
        self.way = way
        self.mask_function = mask_function
        self.dtype = dtype
        longest = max(block["keys"].shape[1] for block in layout["blocks"])
        self.causal = is_causal(mask_function, longest)

    @functools.cached_property
    def blocks(self) -> list[dict]:
        """The blocks with their masks [N or 1, 1, T, K]; None selects the fast causal kernel."""
        masked = []
        for block in self.layout["blocks"]:
            mask = None
            queries, keys = block["query_positions"], block["key_positions"]
            if not (block["prompts"] and is_causal(self.mask_function, keys.shape[1])):
                seen = self.mask_function(0, 0, queries[:, :, None], keys[:, None])
                mask = torch.where(seen, 0.0, -torch.inf).to(self.dtype)[:, None]
            masked.append(block | dict(mask=mask))
        return masked

    def merges(self, key, value, options: dict) -> bool:
        """Whether attention is merged from calls without masks: needs plain causal attention."""
        if self.way == "masks" or not self.causal:
            return False
        if options.get("softcap") or options.get("s_aux") is not None:  # a cap, sinks
            return False
        if key.shape[-1] != value.shape[-1]:
            return False
        if value.device.type != "cpu":
            return has_flash(value) and value.shape[-1] % 8 == 0
        return self.way == "merged" or self.layout["mean_text"] >= shortest_merged(value.dtype)


def shortest_merged(dtype) -> int:
    """A CPU is faster without masks if texts have as many tokens as this on average (measured)."""
    if dtype != torch.bfloat16:
        return 32
    # In bfloat16 the kernel is no faster than in float32; products, which masks need, are.
    if torch.cpu._is_amx_tile_supported():
        return 200
    return 400


def is_causal(mask_function, K: int) -> bool:
    """Whether each of K tokens sees itself and all before it.

    Two tokens show it: a window or chunks would hide something from the last one, and a rule that
    looks ahead would show the first one more than itself.
    """
    keys = torch.arange(K)[None]
    queries = torch.tensor([[0], [K - 1]])
    return torch.equal(mask_function(0, 0, queries, keys), keys <= queries)


def packed_attention(module, query, key, value, attention_mask: PackedRow, **options):
    """Attention in a row: query, key, value [1, heads, S, D] -> [1, S, heads, D]."""
    row = attention_mask
    if row.merges(key, value, options):
        q = heads_last(query).to(value.dtype)  # a rotation may have made them float32
        k = heads_last(key).to(value.dtype)
        v = heads_last(value)
        out = MergedAttention.apply(q, k, v, row.layout["calls"], options.get("scaling"))
        return out[None], None  # no attention weights

    # Copies each block's texts out of the row, runs attention, and puts the results in row order.
    outputs = []
    for block in row.blocks:
        keys = block["keys"]
        q = take(query, block["queries"])
        k = take(key, keys)
        v = take(value, keys)
        attend = attention_function(k, v, options)
        out, _ = attend(module, q, k, v, block["mask"], **options)  # [N, T, heads, D]
        outputs.append(out.flatten(0, 1))
    out = torch.cat(outputs).index_select(0, row.layout["outputs"])
    return out[None], None


def take(x, places):
    """x [1, heads, S, D], places [N, T] in the row -> [N, heads, T, D]"""
    taken = heads_last(x).index_select(0, places.flatten())
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
    return not key.is_cuda or has_flash(value)


def has_flash(value) -> bool:
    """True if CUDA's flash kernel takes these values [..., D]."""
    if not (value.is_cuda and torch.backends.cuda.flash_sdp_enabled()):
        return False
    capability = torch.cuda.get_device_properties(value.device).major
    return value.itemsize == 2 and value.shape[-1] <= 256 and capability >= 8
