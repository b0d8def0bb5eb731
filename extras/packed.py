"""A batch without padding: its sequences are packed one after the other, each prompt once, then
its completions. extras/fast.py uses this for models whose attention can keep sequences apart. If
a b c has the completions x y . and z ., and d e has w . (with the EOS .):

    ids          a b c x y . z . d e w .    [L]
    positions    0 1 2 3 4 5 3 4 0 1 2 3    [L], counted from the start of the prompt
    targets      x y .   z .   w .          [n], the sampled tokens
    logit_index  2 3 4   2 6   9 10         [n], index of the logits that predict them

The logits at c, place 2, predict both x and z. In each layer packed_attention gives x y . the keys
at 0 1 2 3 4 5, z . the keys at 0 1 2 6 7 and w . the keys at 8 to 11: a completion attends to its
own prompt and itself only.
"""

import functools
import itertools
import math
from collections import defaultdict
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

import grpo

# -- Samples -> micro-batches -> tensors


def micro_batches(samples: list, cfg) -> list[list]:
    """Splits samples into batches. Samples of one prompt are neighbours, because they share it."""
    samples = sorted(samples, key=lambda s: -s.total_length)
    samples.sort(key=prompt_of)
    added = [s.total_length for s in samples]  # tokens that a sample adds to a batch
    for i, (before, s) in enumerate(itertools.pairwise(samples)):
        if prompt_of(s) == prompt_of(before):
            added[i + 1] = len(s.completion_ids)  # the batch has its prompt already
    budget = min(cfg.micro_batch_tokens or 2048, sum(added) / grpo.WORLD_SIZE)
    batches = []
    tokens = math.inf  # of the last batch; inf starts the first
    for s, more in zip(samples, added, strict=True):
        tokens += more
        if tokens > budget:
            batches.append([])
            tokens = s.total_length
        batches[-1].append(s)
    return batches


def prompt_of(sample) -> bytes:
    return sample.prompt.ids.tobytes()


def pack(samples: list, device: torch.device) -> dict:
    """The ids of a batch, their positions, the logit_index, and the sequences for attention."""
    batch = defaultdict(list)

    def append(ids, before):
        """Adds a sequence that also attends to the places `before`. Returns its own places."""
        places = sum(map(len, batch["ids"])) + np.arange(len(ids))
        batch["ids"].append(ids)
        batch["positions"].append(len(before) + np.arange(len(ids)))
        batch["seen"].append(np.append(before, places))
        return places

    prompts = {}  # a prompt: its places
    for s in samples:
        key = prompt_of(s)
        if key not in prompts:
            prompts[key] = append(s.prompt.ids, before=np.arange(0))
        places = append(s.completion_ids, before=prompts[key])
        index = np.append(prompts[key][-1], places[:-1])  # a token is predicted one place earlier
        batch["logit_index"].append(index[s.sampled])
    sequences = Sequences(batch["ids"], batch.pop("seen"), device)
    tensors = {name: torch.from_numpy(np.concatenate(parts)) for name, parts in batch.items()}
    return tensors | dict(sequences=sequences)


def on_device(x, device: torch.device):
    """Copies x, without waiting for a GPU, which needs pinned memory for that."""
    if device.type == "cuda":
        x = x.pin_memory()
    return x.to(device, non_blocking=True)


class Sequences:
    """The sequences of a batch, and the places that each attends to: its prompt's, then its own.
    (Not a dict, because --compile would trace into a dict in every layer.)"""

    def __init__(self, sequences: list, seen: list, device: torch.device):
        self.lengths = [len(ids) for ids in sequences]
        self.seen_lengths = [len(places) for places in seen]
        self.seen = on_device(torch.from_numpy(np.concatenate(seen)), device)
        self.ends = []  # where each sequence begins and ends, in the batch and in `seen`
        for lengths in (self.lengths, self.seen_lengths):
            ends = np.append(0, np.cumsum(lengths)).astype(np.int32)
            self.ends.append(on_device(torch.from_numpy(ends), device))


# -- Attention that keeps sequences apart


@functools.lru_cache(maxsize=2)  # one without a window, and one with it
def causal_mask(S: int, window: int, dtype: torch.dtype, device: torch.device):
    """[S, S], added to the scores: 0 where token i attends to token j, else -inf."""
    unseen = torch.full((S, S), -math.inf, dtype=dtype, device=device)
    mask = unseen.triu(1)  # later tokens
    if window:
        mask += unseen.tril(-window)
    return mask


class Gathered(torch.autograd.Function):
    """rows[places]. The gradient of a prompt is a sum over its completions, at least in float32:
    bfloat16 would round after each, and lose a fifth of the sum over 1024 completions."""

    @staticmethod
    def forward(ctx, rows, places):
        ctx.save_for_backward(places)
        ctx.length = len(rows)
        return rows[places]

    @staticmethod
    def backward(ctx, *grads):
        [grad] = grads
        wide = grad.to(torch.promote_types(grad.dtype, torch.float32))
        total = wide.new_zeros(ctx.length, *grad.shape[1:])
        return total.index_add_(0, ctx.saved_tensors[0], wide).to(grad.dtype), None


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
    dropout=0.0,
    **rest,
):
    """transformers calls this in each layer: query [1, heads, L, units] -> [1, L, heads, units].
    A prompt's keys are copied in front of each of its completions, so that all keys of a sequence
    are contiguous. Without `sequences`, as in the sampler, this is transformers' own attention."""
    if sequences is None:
        rest |= dict(scaling=scaling, sliding_window=sliding_window, dropout=dropout)
        return sdpa_attention_forward(module, query, key, value, attention_mask, **rest)
    query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))  # [L, heads, units]
    is_flash = query.is_cuda and torch.is_autocast_enabled("cuda")
    if is_flash:
        query, key, value = (x.to(torch.bfloat16) for x in (query, key, value))
    key, value = (Gathered.apply(x, sequences.seen) for x in (key, value))
    options: dict = dict(scale=scaling, enable_gqa=True)
    window = 0 if attention_mask is None else attention_mask.shape[-1]  # see mask_of_layers
    if dropout and is_flash:
        raise ValueError("packed attention on a GPU has no dropout: use --fast false")
    if is_flash:
        options |= dict(max_q=max(sequences.lengths), max_k=max(sequences.seen_lengths))
        options["window_size"] = (window - 1, 0)  # -1: all earlier tokens
        out: Any = varlen_attn(query, key, value, *sequences.ends, **options)
        return out[None], None
    queries = query.split(sequences.lengths)
    keys = key.split(sequences.seen_lengths)
    values = value.split(sequences.seen_lengths)
    wide = torch.promote_types(query.dtype, torch.float32)
    mask = causal_mask(max(sequences.seen_lengths), window, wide, query.device)
    out = []
    with torch.autocast(query.device.type, enabled=False):
        for q, k, v in zip(queries, keys, values, strict=True):
            seen = mask[len(k) - len(q) : len(k), : len(k)]  # [T, S], rows after its prompt
            # Below 192 tokens torch's backward on a CPU is 1.6 to 3 times as fast in float32.
            dtype = value.dtype if len(q) >= 192 else wide
            q, k, v = (x.transpose(0, 1)[None].to(dtype) for x in (q, k, v))  # [1, heads, T, units]
            x = nn.functional.scaled_dot_product_attention(q, k, v, seen, dropout, **options)
            out.append(x[0].to(value.dtype))
    return torch.cat(out, 1).transpose(0, 1).contiguous()[None], None


def mask_of_layers(*args, attention_mask=None, local_size=None, **rest):
    """transformers calls this once for each type of layer. Only the mask tells packed_attention
    whether the layer has a sliding window. So for a packed batch, whose attention_mask is empty
    (run_model), this returns a dummy mask whose width is the window (0: none)."""
    if attention_mask is not None and attention_mask.shape[-1] == 0:
        return attention_mask.new_empty(1, 1, 1, local_size or 0)
    return sdpa_mask(*args, attention_mask=attention_mask, local_size=local_size, **rest)


AttentionInterface.register("packed", packed_attention)
AttentionMaskInterface.register("packed", mask_of_layers)


def use_packed_attention(model) -> None:
    """Switches to packed attention if only attention, by the usual formula, mixes tokens."""
    kinds = getattr(model.config.get_text_config(), "layer_types", None) or []
    is_plain = set(kinds) <= {"full_attention", "sliding_attention"}
    is_plain = is_plain and AttentionInterface()["sdpa"] is sdpa_attention_forward  # else yours
    if is_plain and model.config._attn_implementation == "sdpa":
        model.set_attn_implementation("packed")


def packs(model) -> bool:
    return model.config._attn_implementation == "packed"


def run_model(model, batch: dict, **options):
    """The output of a model, or of its body, for the sequences of a batch, packed or padded."""
    if "sequences" in batch:
        if not packs(model):
            raise ValueError("the model's attention cannot keep packed sequences apart")
        options |= dict(sequences=batch["sequences"], position_ids=batch["positions"][None])
        options["attention_mask"] = batch["ids"].new_empty(1, 0)  # see mask_of_layers
    return model(torch.atleast_2d(batch["ids"]), use_cache=False, **options)


class PackedPolicy(grpo.Policy):
    """A Policy with packed sequences. The rest of a batch is from grpo.collate."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        use_packed_attention(self.model)

    def micro_batches(self, samples: list, cfg) -> list[list]:
        return micro_batches(samples, cfg)

    def collate(self, samples: list) -> dict:
        device = self.model.device
        batch = grpo.collate(samples, torch.device("cpu")) | pack(samples, device)
        for name, x in batch.items():
            if isinstance(x, torch.Tensor):
                batch[name] = on_device(x, device)
        return batch

    def forward(self, batch: dict):
        with grpo.autocast(self.model.device, self.dtype):
            logits = run_model(self.model, batch, logits_to_keep=batch["logit_index"]).logits[
                0
            ]  # [n, V]
        return grpo.logps_of(logits, batch["targets"], self.temperature)
