"""What is there for speed alone: a head for large vocabularies, compiled layers, micro-batches that
fill a GPU, a sampling loop that computes no row that has stopped. grpo.py takes it if this file is
there; the head, if its numbers are the model's own.

The head makes the logits of some words at a time (a tile), and keeps or makes them again for
backward.

Shapes: n sampled tokens, H hidden units, V words in the vocabulary, v words of a tile.
"""

import contextlib
import ctypes
import functools
import mmap
import os
from pathlib import Path

import numpy as np
import torch
from torch import nn
from transformers.cache_utils import DynamicCache
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, grouped_mm_experts_forward
from transformers.modeling_layers import GradientCheckpointingLayer

TILE = 2**22  # logits on a CPU, where they should fit in the cache
KEPT = dict(cpu=2**26, cuda=0)  # logits that forward keeps, so that backward need not make them
WORDS = 2**14  # of a tile on a GPU
BLOCK = 2**17  # logits of a tile on a CPU that stay in its cache from one operation to the next


class HeadLogps(torch.autograd.Function):
    """hidden [n, H], weight [V, H], targets [n], temperature -> logps [n], entropy [n].

    With the logits z, their probabilities p, and log Z = log sum exp z over the vocabulary:
    log p(target) = z(target) - log Z, and the entropy is log Z - sum p z. The gradient of
    log p(target) by z is 1 - p at the target and -p elsewhere."""

    @staticmethod
    def forward(ctx, hidden, weight, targets, temperature: float):
        device = hidden.device.type
        # Backward runs outside of autocast, so the dtype of its products, too, is decided here.
        if torch.is_autocast_enabled(device):
            hidden = hidden.to(torch.get_autocast_dtype(device))
        ctx.temperature = temperature
        ctx.kept = {}  # first word of a tile: its product
        parts = []  # of each tile [n, 2]: log Z and sum p z
        of_targets = 0
        with torch.autocast(device, enabled=False):
            for words, _, z in tiles(ctx, hidden, weight):
                parts.append(fused(sums, temperature, z))
                column, inside = columns_of(targets, words)  # [n, 1]
                of_targets += widened(z.gather(-1, column).where(inside, 0))
                if words.stop * len(hidden) <= KEPT[device]:
                    ctx.kept[words.start] = z
        log_zs, means = torch.stack(parts).unbind(-1)  # [tiles, n] both
        log_z = log_zs.logsumexp(0)  # [n]
        p = log_zs.softmax(0)  # [tiles, n], the probability that the word is in the tile
        entropy = log_z - (p * means).sum(0)  # [n]
        logps = of_targets[:, 0] / temperature - log_z
        ctx.save_for_backward(hidden, weight, targets, log_z, logps)
        ctx.mark_non_differentiable(entropy)
        return logps, entropy

    @staticmethod
    def backward(ctx, grad_logps, _):
        hidden, weight, targets, log_z, logps = ctx.saved_tensors
        grad = grad_logps / ctx.temperature  # [n]
        at_target = (-grad * logps.expm1()).to(hidden.dtype)  # grad * (1 - p), [n]
        grad_hidden = torch.zeros_like(hidden, dtype=log_z.dtype)  # [n, H]
        grad_weight = None
        if ctx.needs_input_grad[1]:  # not with adapters
            grad_weight = torch.empty_like(weight)  # [V, H]
            hidden_rows = hidden.T.contiguous()  # [H, n]
        rows = torch.arange(len(targets), device=targets.device)
        for words, tile_weight, z in tiles(ctx, hidden, weight):
            grad_z = fused(gradient, ctx.temperature, z, log_z, grad, out=z)  # [n, v]
            column, inside = columns_of(targets, words)
            place = rows, column[:, 0]
            grad_z[place] = torch.where(inside[:, 0], at_target, grad_z[place])
            grad_hidden += grad_z @ tile_weight
            if grad_weight is not None:
                grad_weight[words] = (hidden_rows @ grad_z).T
        return grad_hidden, grad_weight, None, None


def tiles(ctx, hidden, weight):
    """The words of each tile, their weights [v, H], and hidden times these [n, v]: the logits
    before the temperature. v is a multiple of 64, so that rows stay aligned."""
    width = WORDS
    if hidden.device.type == "cpu":
        width = 64 * (1 + TILE // (64 * (1 + len(hidden))))
    for start in range(0, len(weight), width):
        words = slice(start, start + width)
        tile_weight = weight[words].to(hidden.dtype)
        z = ctx.kept.pop(start, None)
        if z is None:
            z = hidden @ tile_weight.T
        yield words, tile_weight, z


def columns_of(targets, words: slice):
    """The column of each target in the tile, and whether the tile has it: [n, 1] each."""
    column = targets[:, None] - words.start
    nearest = column.clamp(0, words.stop - words.start - 1)
    return nearest, nearest == column


def sums(temperature: float, z):
    """log Z and sum p z of a tile, [n, 2]."""
    z = scaled(z, temperature)
    largest = z.amax(-1, keepdim=True)  # [n, 1]
    e = (z - largest).exp_()  # [n, v]
    total = e.sum(-1)
    return torch.stack([largest[:, 0] + total.log(), (e * z).sum(-1) / total], -1)


def gradient(temperature: float, z, log_z, grad):
    """By z, except at the target."""
    p = (scaled(z, temperature) - log_z[:, None]).exp_()
    return p.mul_(-grad[:, None]).to(z.dtype)


def scaled(z, temperature: float):
    """The logits after the temperature, at least in float32. At 1, z itself if it is float32."""
    z = widened(z)
    return z if temperature == 1 else z / temperature


def widened(z):
    return z.to(torch.promote_types(z.dtype, torch.float32))


compiled = functools.cache(functools.partial(torch.compile, dynamic=True))


def fused(function, temperature: float, *tensors, out=None):
    """function(temperature, *tensors) as if it read the tensors once. On a GPU it is compiled; a
    CPU takes a few rows after the other, and writes into `out` if there is one."""
    z = tensors[0]
    if z.is_cuda:
        torch._dynamo.mark_static(z, 1)  # rows of a known length are read faster
        return compiled(function)(temperature, *tensors)
    rows = 1 + BLOCK // z.shape[1]
    blocks = zip(*(x.split(rows) for x in tensors), strict=True)
    results = (function(temperature, *block) for block in blocks)
    if out is None:
        return torch.cat(list(results))
    for result, place in zip(results, out.split(rows), strict=True):
        place.copy_(result)
    return out


class FastPolicy(nn.Module):
    """The plain policy with this head. hidden_of: grpo.py's, a batch -> hidden [n, H]."""

    def __init__(self, plain, hidden_of):
        super().__init__()
        self.model = plain.model
        self.temperature = plain.temperature
        self.hidden_of = hidden_of

    def forward(self, batch: dict):
        head = self.model.get_output_embeddings()
        if head.bias is not None:
            raise ValueError("the head has a bias")
        hidden = self.hidden_of(self.model, batch)  # [n, H]
        return HeadLogps.apply(hidden, head.weight, batch["targets"], self.temperature)


class InDtype:
    """A layer of experts that reads its weights in another dtype."""

    def __init__(self, layer, dtype):
        self.layer = layer
        self.dtype = dtype

    def __getattr__(self, name: str):
        value = getattr(self.layer, name)
        if isinstance(value, nn.Parameter):
            value = value.to(self.dtype)
        return value


def experts(layer, hidden, *chosen):
    """transformers' product of all experts, which takes the dtype of their weights. Autocast does
    not know it: two thirds of a mixture's products would stay in float32."""
    device = hidden.device.type
    if torch.is_autocast_enabled(device):
        layer = InDtype(layer, torch.get_autocast_dtype(device))
    return grouped_mm_experts_forward(layer, hidden, *chosen)


ALL_EXPERTS_FUNCTIONS.register("grouped_mm", experts)


@torch.no_grad()
def sample_batch(
    model, prompts, seeds, temperature, limits, stop_ids, cfg, draw, padded, autocast
) -> list[tuple]:
    """The completions of grpo.py's sample_batch, for a model with packed attention. A row leaves
    the batch when it stops, while generate computes all of them until the last one stops. The last
    three arguments are functions of grpo.py."""
    completions = [[] for _ in prompts]  # pairs of a token and its logp
    streams = map(np.random.default_rng, seeds)
    rows = list(zip(completions, streams, limits, strict=True))  # those that have not stopped
    ids = padded(prompts, side="left").to(model.device)  # [rows, P]; then the new tokens, [rows, 1]
    mask = padded([np.ones_like(p) for p in prompts], side="left").to(model.device)
    cache = DynamicCache(config=model.config)
    with autocast(cfg, model.device, cache=True):
        while rows:
            positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :]
            options = dict(attention_mask=mask, position_ids=positions, past_key_values=cache)
            logits = model(ids, logits_to_keep=1, **options).logits[:, -1]  # [rows, V]
            randoms = torch.tensor([[s.random()] for _, s, _ in rows], dtype=torch.float64)
            ids, logps = draw(logits, temperature, randoms.to(model.device))
            tokens = ids.cpu().numpy()
            stops = np.isin(tokens, stop_ids)
            going = []
            for row, pair in enumerate(zip(tokens, logps.cpu().numpy(), strict=True)):
                completion, _, limit = rows[row]
                completion.append(pair)
                if not stops[row] and len(completion) < limit:
                    going.append(row)
            if len(going) < len(rows):
                rows = [rows[row] for row in going]
                ids, mask = ids[going], mask[going]
                cache.batch_select_indices(going)
            mask = nn.functional.pad(mask, (0, 1), value=1)
    return [tuple(map(np.concatenate, zip(*pairs, strict=True))) for pairs in completions]


def tune_memory(device: torch.device) -> None:
    """For what is allocated from here on. glibc would return the memory of large tensors to the
    kernel, which clears it before it gives it out again: 10 % of an update of 135 M parameters, and
    more of a smaller model's."""
    libc = ctypes.CDLL(None)
    if device.type == "cpu" and hasattr(libc, "mallopt"):
        libc.mallopt(-4, 0)  # M_MMAP_MAX: no mapping of its own for a large tensor
        libc.mallopt(-1, -1)  # M_TRIM_THRESHOLD: keep what is freed
        with contextlib.suppress(OSError):  # a sandbox that shows no /proc: without large pages
            if Path("/proc/sys/vm/overcommit_memory").read_text().strip() != "2":
                ask_for_large_pages(libc)


def ask_for_large_pages(libc) -> None:
    """A tensor that has left the cache is read 1.3 to 1.9 times as fast from pages of 2 MB as from
    those of 4 KB: an update of 135 M parameters takes .97 of the time, .84 to .90 while others load
    the memory. Many kernels give them only to those who ask (madvise). So addresses for half of the
    machine's memory are taken and given back to the heap, where tensors will stand. This takes no
    memory, except from a kernel that promises no more than it has (overcommit 2)."""
    half = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    libc.aligned_alloc.restype = ctypes.c_void_p
    start = ctypes.c_void_p(libc.aligned_alloc(ctypes.c_size_t(2**21), ctypes.c_size_t(half)))
    libc.madvise(start, ctypes.c_size_t(half), mmap.MADV_HUGEPAGE)  # start None: does nothing
    libc.free(start)


def fit(policy, batch: dict, autocast, cfg) -> tuple:
    """What --compile and --micro_batch_tokens become on this machine, and why layers that should be
    compiled are not. batch: some 2,048 made-up tokens."""
    on_cuda = policy.model.device.type == "cuda"
    is_compiled = cfg.compile == "on" or (cfg.compile == "auto" and on_cuda and cfg.fast)
    layers = [m for m in policy.model.modules() if isinstance(m, GradientCheckpointingLayer)]
    why = ""
    if is_compiled:
        for layer in layers:
            layer.compile(dynamic=True)
        try:
            make_gradient(policy, batch, autocast)
        except Exception as error:  # no C compiler, or code that torch cannot take
            why = " ".join(str(error).split())[:500]
            is_compiled = False
            for layer in layers:
                del layer._compiled_call_impl
    tokens = cfg.micro_batch_tokens or 2048
    if cfg.micro_batch_tokens == 0 and on_cuda:
        tokens = tokens_that_fit(policy, batch, autocast)
    policy.zero_grad()
    if on_cuda:
        torch.cuda.empty_cache()  # vLLM asks for its share next
    return dict(compile="on" if is_compiled else "off", micro_batch_tokens=tokens), why


def tokens_that_fit(policy, batch: dict, autocast) -> int:
    """In a micro-batch on this GPU, by the peak of a small one."""
    make_gradient(policy, batch, autocast)  # from here on the gradients have their memory
    taken = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    make_gradient(policy, batch, autocast)
    of_a_token = (torch.cuda.max_memory_allocated() - taken) / batch["ids"].numel()
    free, _ = torch.cuda.mem_get_info()
    moments = 8 * sum(p.numel() for p in policy.parameters() if p.requires_grad)
    left = free + torch.cuda.memory_reserved() - taken - moments
    return int(min(65536, max(256, 0.8 * left / of_a_token)))


def make_gradient(policy, batch: dict, autocast) -> None:
    with autocast():
        logps = policy(batch)[0]
    logps.sum().backward()
