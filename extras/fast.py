"""Speed-ups: packed sequences, a head for large vocabularies, compiled layers, micro-batches that
fill a GPU. From 10 M parameters on, packing and the head replace grpo.py's Policy if its code is
unchanged and their numbers are the same.

The head computes the logits of a part of the vocabulary at a time (a tile). For backward it keeps
them or computes them again.

Shapes: n sampled tokens, H hidden units, V words (tokens) in the vocabulary, v words in a tile.
"""

import contextlib
import ctypes
import functools
import math
import mmap
import os
import re
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, grouped_mm_experts_forward
from transformers.modeling_layers import GradientCheckpointingLayer

import grpo
from extras import digests, packed, preflight, ranks
from extras.errors import TrainingError, mistakes_in, one_line, require

TILE = 2**22  # logits of a tile on a CPU; they should fit in its cache
KEPT = dict(cpu=2**26, cuda=0)  # logits kept for backward, which computes the others again
WORDS = 2**14  # words of a tile on a GPU
SMALL = 10e6  # parameters; below, threads, bfloat16, vLLM and this head cost more than they save
BLOCK = 2**17  # logits of a tile that stay in a CPU's cache from one operation to the next


class HeadLogps(torch.autograd.Function):
    """hidden [n, H], weight [V, H], targets [n], temperature -> logps [n], entropy [n].

    With the logits z, their probabilities p, and log Z = log sum exp z over the vocabulary:
    log p(target) = z(target) - log Z, and the entropy is log Z - sum p z. The gradient of
    log p(target) with respect to z is 1 - p at the target and -p elsewhere."""

    @staticmethod
    def forward(ctx, hidden, weight, targets, temperature: float):
        device = hidden.device.type
        # Backward runs outside autocast, so this decides the dtype of its products, too.
        if torch.is_autocast_enabled(device):
            hidden = hidden.to(torch.get_autocast_dtype(device))
        ctx.temperature = temperature
        ctx.kept = {}  # first word of a tile: its z
        parts = []  # for each tile log Z and sum p z, [n, 2]
        of_targets = []  # for each tile the logits of targets in it, else 0, [n, 1]
        with torch.autocast(device, enabled=False):
            for words, _, z in tiles(ctx, hidden, weight):
                parts.append(fused(sums, temperature, z))
                column, inside = columns_of(targets, words)  # [n, 1]
                of_targets.append(widened(z.gather(-1, column).where(inside, 0)))
                if words.stop * len(hidden) <= KEPT[device]:
                    ctx.kept[words.start] = z
        log_zs, means = torch.stack(parts).unbind(-1)  # [tiles, n] both
        log_z = log_zs.logsumexp(0)  # [n]
        p = log_zs.softmax(0)  # [tiles, n], the probability that the word is in the tile
        entropy = log_z - (p * means).sum(0)  # [n]
        logps = torch.cat(of_targets, 1).sum(1) / temperature - log_z
        ctx.save_for_backward(hidden, weight, targets, log_z, logps)
        ctx.mark_non_differentiable(entropy)
        return logps, entropy

    @staticmethod
    def backward(ctx, *grads):
        grad_logps, _ = grads
        hidden, weight, targets, log_z, logps = ctx.saved_tensors
        grad = grad_logps / ctx.temperature  # [n]
        at_target = (-grad * logps.expm1()).to(hidden.dtype)  # grad * (1 - p), [n]
        grad_hidden = torch.zeros_like(hidden, dtype=log_z.dtype)  # [n, H]
        grad_weight, hidden_rows = None, hidden.T  # [V, H], [H, n]
        if ctx.needs_input_grad[1]:  # False with adapters
            grad_weight, hidden_rows = torch.empty_like(weight), hidden_rows.contiguous()
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
    """Yields for each tile its words, their weights [v, H], and hidden @ weights.T [n, v], the
    logits before the temperature. v is a multiple of 64, so that rows stay aligned."""
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
    """The column of each target in the tile, and whether it is in the tile, [n, 1] both."""
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
    """The gradient with respect to z, except at the target, [n, v]."""
    p = (scaled(z, temperature) - log_z[:, None]).exp_()
    return p.mul_(-grad[:, None]).to(z.dtype)


def scaled(z, temperature: float):
    """z / temperature, at least in float32. It is z itself if z is float32 and temperature is 1."""
    z = widened(z)
    return z if temperature == 1 else z / temperature


def widened(z):
    return z.to(torch.promote_types(z.dtype, torch.float32))


@functools.cache
def compiled(function) -> Any:
    return torch.compile(function, dynamic=True)


def fused(function, temperature: float, *tensors, out=None) -> Any:
    """function(temperature, *tensors), which reads the tensors from memory only once: compiled on a
    GPU, a few rows at a time on a CPU, where it writes into `out` if given."""
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
    """A policy, plain or packed, with the head of this file."""

    def __init__(self, policy):
        super().__init__()
        self.model = policy.model
        self.temperature = policy.temperature
        self.dtype = policy.dtype
        self.micro_batches = policy.micro_batches
        self.collate = policy.collate

    def forward(self, batch: dict):
        head = self.model.get_output_embeddings()
        if head.bias is not None:
            raise ValueError("the head has a bias")
        with grpo.autocast(self.model.device, self.dtype):
            hidden = packed.run_model(self.model.base_model, batch).last_hidden_state  # [., L, H]
            hidden = hidden.flatten(0, 1)[batch["logit_index"]]  # [n, H]
            return HeadLogps.apply(hidden, head.weight, batch["targets"], self.temperature)


# -- Which policy

OF_POLICY = "Policy collate padded micro_batches logps_of log_probabilities".split()


def make_policy(plain, model, prompts: list, cfg, *args, **kwargs):
    """For a large model, the first of four policies with the plain one's numbers: packed, then
    padded sequences, each with this head, then with the model's."""
    with mistakes_in(f"--{preflight.flag_of(model.name_or_path, cfg)}", (ValueError,)):
        preflight.check_room(preflight.positions_of(model), prompts, cfg)
        preflight.check_ids(model, prompts)
    policy = plain(model, prompts, cfg, *args, **kwargs)
    if not cfg.fast or model.num_parameters() < SMALL:
        return policy
    mine = digests.changed(*OF_POLICY) or what_is_added(policy)
    if mine:
        ranks.say(f"{', '.join(mine)} changed: your policy runs, padded, instead of a faster one")
        return policy
    attention = model.config._attn_implementation
    if packed.packs(model):  # set by an earlier policy
        attention = "sdpa"
        model.set_attn_implementation(attention)
    shortest = sorted(prompts, key=lambda p: len(p.ids))[:2]  # float32 gradients need memory
    samples = dummy_samples(shortest, [1, 5, min(32, cfg.max_completion_length)], model)
    longest = max(prompts, key=lambda p: len(p.ids))
    [longest] = dummy_samples([longest], [cfg.max_completion_length], model)
    beyond = beyond_windows(model.config, longest)
    expected: list = [numbers_of(policy, [[s] for s in samples + beyond])]
    with exact(policy):
        expected.append(gradients_of(policy, samples))
    of_packed = packed.PackedPolicy(model, policy.temperature, policy.dtype)
    for inner in (of_packed, policy):
        if inner is policy:
            model.set_attn_implementation(attention)
        for form in (FastPolicy(inner), inner):
            why = ""
            if form is not policy:
                why = mismatch(form, samples, beyond, expected)
            if why == "":
                name = " with ".join(dict.fromkeys([type(inner).__name__, type(form).__name__]))
                ranks.say(f"{model.name_or_path}: the policy is {name}")
                if form is not policy:
                    form.register_forward_pre_hook(functools.partial(refuse_late_changes, policy))
                return form
            name = f"{type(inner).__name__}, {type(form).__name__}"
            ranks.say(f"{model.name_or_path}: {name} is not used: {why}")


def refuse_late_changes(policy, *_) -> None:
    """A late change of `policy` is an error: the form in its place would not run the change."""
    late = digests.changed(*OF_POLICY) or what_is_added(policy)
    if late:
        how = "change it before the model is loaded, or use --fast false"
        raise TrainingError(f"{', '.join(late)} changed after the start: {how}")


def what_is_added(policy) -> list[str]:
    """Additions to this policy: a subclass, hooks, attributes."""
    known = vars(grpo.Policy(policy.model, 1.0)).keys()
    hooks = [name for name in known if name.endswith("_hooks") and getattr(policy, name)]
    own = [type(policy).__name__] * (type(policy) is not grpo.Policy)
    inside = {*policy._modules, *policy._parameters, *policy._buffers} - {"model"}
    for name, x in (("model", policy.model), ("head", policy.model.get_output_embeddings())):
        called = [getattr(x, f"_{kind}_hooks") for kind in ("forward", "forward_pre", "backward")]
        is_known = type(x).__module__.startswith(("transformers", "torch.", "peft."))
        if any(called) or "forward" in vars(x) or not is_known:  # FastPolicy would not call them
            hooks.append(f"hooks or class of the {name}")
    return own + hooks + sorted(inside | vars(policy).keys() - known)


@contextlib.contextmanager
def exact(policy):
    """The policy in float32 instead of bfloat16 until the block ends."""
    dtype = policy.dtype
    if dtype == "bfloat16":
        policy.dtype = "float32"
    try:
        yield
    finally:
        policy.dtype = dtype


def dummy_samples(prompts: list, lengths: list[int], model) -> list:
    """For each prompt, completions of these lengths. Those longer than 1 end with an EOS."""
    [end, *_] = np.ravel(model.generation_config.eos_token_id)
    needed = [f.name for f in fields(grpo.Sample) if f.default is f.default_factory]
    blank: dict = dict.fromkeys(needed)
    samples = []
    for group, prompt in enumerate(prompts):
        for length in lengths:
            ids = np.resize(prompt.ids, length)
            if length > 1 and end is not None:
                ids[-1] = end
            own: dict = dict(group=group, prompt=prompt, completion_ids=ids)
            own["sampler_logps"] = np.zeros(length)
            samples.append(grpo.Sample(**blank | own))
    return samples


def beyond_windows(config, s) -> list:
    """A list with a part of the dummy sample s, longer than each attention window that s exceeds;
    [] if s exceeds none. Only its last 8 tokens are compared."""
    window = preflight.largest_window(config, s.total_length)
    if window == 0:
        return []
    length = max(8, window + 32 - len(s.prompt.ids))
    ids = np.random.default_rng(0).permutation(s.completion_ids[:length])  # hard to predict
    own = dict.fromkeys(("sampled", "trainable", "advantages"))  # None: replace fills them in
    made = replace(s, completion_ids=ids, sampler_logps=s.sampler_logps[:length], **own)
    made.sampled[:-8] = False
    return [made]


@torch.no_grad()
def numbers_of(policy, batches: list) -> list:
    """The policy's outputs in float32: log-probabilities [n], entropy [n], perhaps others."""
    with exact(policy):
        outputs = [policy(policy.collate(samples)) for samples in batches]
    return [torch.cat(parts) for parts in zip(*outputs, strict=True)]


def gradients_of(policy, samples: list) -> dict:
    """For each parameter the gradient's norm and products with two directions: whole gradients of a
    large model would need the memory of another one. Tokens are weighted differently."""
    logps = policy(policy.collate(samples))[0]
    shares = torch.linspace(-1, 1, len(logps), dtype=logps.dtype, device=logps.device)
    if logps.requires_grad:  # False for a reference
        (logps * shares.cos()).sum().backward()
    # A direction repeats these numbers. Their count is prime, so the repeats fit no shape.
    numbers = torch.randn(2, 1_000_003, generator=torch.Generator().manual_seed(0))
    numbers = numbers.to(logps.device)  # drawn on a CPU, so the same on all devices
    described = {}
    for name, p in policy.named_parameters():
        if p.grad is not None:
            directions = numbers.to(p.grad.dtype)
            parts = p.grad.flatten().split(directions.shape[1])
            products = torch.stack([directions[:, : len(part)] @ part for part in parts]).sum(0)
            described[name] = [p.grad.norm().item(), *products.tolist()]
    policy.zero_grad()
    return described


def by_kind(gradients: dict) -> dict:
    """Adds up what `gradients_of` gives for a parameter over all layers: they run the same compiled
    code, so its mistakes add up, while the rounding of single layers averages out."""
    added = {}
    for name, (norm, *products) in gradients.items():
        kind = re.sub(r"\d+", "N", name)
        before, *others = added.get(kind, [0.0] * (1 + len(products)))
        added[kind] = [math.hypot(before, norm), *np.add(others, products)]
    return added


def same_gradient(gradients: dict, expected: dict, rtol: float) -> bool:
    """Compares gradients up to rounding. Ones much smaller than the largest may be all rounding."""
    if gradients.keys() != expected.keys():
        return False
    largest = max((norm for norm, *_ in expected.values()), default=0.0)
    for name, values in expected.items():
        near = rtol * values[0] + 1e-3 * largest  # values[0] is the norm
        if not np.allclose(gradients[name], values, rtol=0.0, atol=near):
            return False
    return True


def mismatch(policy, samples: list, beyond: list, expected: list) -> str:
    """Why a policy is wrong; empty if its numbers are the expected ones (computed one sample at a
    time in float32) up to rounding."""
    why = ""
    numbers, gradients = expected
    try:
        with torch.no_grad():
            rounded = policy(policy.collate(samples + beyond))
        both = zip(numbers_of(policy, [samples + beyond]), rounded, numbers, strict=True)
        for name, (x, y, z) in zip(("log-probability", "entropy"), both, strict=True):
            largest, mean = (x - z).abs().max().item(), (y - z).abs().mean().item()
            # Relative, as logps of an untrained model vary little. A nan fails both comparisons.
            if not (largest <= 1e-4 * numbers[0].std().item() and mean <= 0.1):
                why = why or f"its {name} is off by {max(largest, mean):.1g}"
        with exact(policy):
            own = gradients_of(policy, samples)
        if not same_gradient(own, gradients, rtol=0.0):
            why = why or "its gradient differs"
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # a model that cannot do this may raise anything
        why = one_line(error)
    return max(grpo.all_gather([why]))  # the same on all ranks


class InDtype:
    """Wraps a layer of experts so that its weights are cast when they are read."""

    def __init__(self, layer, dtype):
        self.layer = layer
        self.dtype = dtype

    def __getattr__(self, name: str):
        value = getattr(self.layer, name)
        if isinstance(value, nn.Parameter):
            value = value.to(self.dtype)
        return value


def experts(layer, hidden, *chosen):
    """transformers' matrix product of all experts, which uses their weights' dtype. Autocast does
    not cast these: two thirds of a mixture's products would stay in float32."""
    return grouped_mm_experts_forward(in_dtype(layer, hidden.device.type), hidden, *chosen)


def in_dtype(layer, device: str) -> Any:
    if torch.is_autocast_enabled(device):
        return InDtype(layer, torch.get_autocast_dtype(device))
    return layer


ALL_EXPERTS_FUNCTIONS.register("grouped_mm", experts)


def tune_memory() -> None:
    """On a CPU, keeps freed memory for later tensors. glibc would return large blocks to the
    kernel, which clears them before the next use: 10 % of the time of an update of 135 M
    parameters, and more for smaller models."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(-4, 0)  # M_MMAP_MAX: no mapping of its own for a large tensor
        libc.mallopt(-1, -1)  # M_TRIM_THRESHOLD: keep freed memory
        with contextlib.suppress(OSError):  # no large pages if there is no /proc, as in a sandbox
            if Path("/proc/sys/vm/overcommit_memory").read_text().strip() != "2":
                ask_for_large_pages(libc)


def ask_for_large_pages(libc) -> None:
    """A tensor outside the cache is read 1.3 to 1.9 times as fast from pages of 2 MB as from pages
    of 4 KB: an update of 135 M parameters takes .97 of the time, .84 to .90 if other processes load
    the memory. Many kernels give large pages on request only (madvise). So this allocates
    addresses for half of the machine's memory and frees them for later tensors. It uses no memory,
    except where the kernel promises no more than it has (overcommit 2)."""
    half = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    libc.aligned_alloc.restype = ctypes.c_void_p
    start = ctypes.c_void_p(libc.aligned_alloc(ctypes.c_size_t(2**21), ctypes.c_size_t(half)))
    libc.madvise(start, ctypes.c_size_t(half), mmap.MADV_HUGEPAGE)  # no effect if start is None
    libc.free(start)


def tune_for_machine(policy, prompts: list, cfg) -> None:
    """Compiles the layers as --compile asks. If --micro_batch_tokens is 0, finds a value that fills
    the GPU. config.json gets both results."""
    length = min(512, cfg.max_completion_length)
    samples = dummy_samples(prompts[:1], [length] * (2048 // length), policy.model)
    on_cuda = policy.model.device.type == "cuda"
    is_large = policy.model.num_parameters() >= SMALL
    policy.found = dict(compile="off")
    if on_cuda or cfg.compile == "on":
        # With adapters, windows and a reference, a layer has more than 8 forms, torch's limit.
        torch._dynamo.config.recompile_limit = 64
    if cfg.compile == "on" or (cfg.compile == "auto" and on_cuda and is_large and cfg.fast):
        why = compile_layers(policy, samples[: max(2, 512 // length)])
        require(not why or cfg.compile == "auto", "compile", why)
        if any(module._compiled_call_impl for module in policy.model.modules()):
            policy.found["compile"] = "on"
    if cfg.micro_batch_tokens == 0 and on_cuda:
        fitting = tokens_that_fit(policy, policy.collate(samples))
        tokens = min(grpo.all_gather([fitting]))  # the same on all ranks
        ranks.say(f"micro-batches of {tokens} tokens")
        policy.found["micro_batch_tokens"] = tokens
        policy.micro_batches = functools.partial(filled, policy.micro_batches, tokens)
    policy.zero_grad()
    if on_cuda:
        torch.cuda.empty_cache()  # vLLM asks for its share next


def filled(micro_batches, tokens: int, samples: list, cfg) -> list[list]:
    return micro_batches(samples, replace(cfg, micro_batch_tokens=tokens))


def compile_layers(policy, samples: list) -> str:
    """Compiles the layers if that works. Returns an error text if their gradient would be wrong."""
    layers = [m for m in policy.model.modules() if isinstance(m, GradientCheckpointingLayer)]
    with exact(policy):
        expected = by_kind(gradients_of(policy, samples))
    for layer in layers:
        layer.compile(dynamic=True)
    # In bfloat16 SmolLM2-135M's gradient is off by 0.05, compiled or not. Its products with random
    # directions are off by as much on average, and by four times that at most.
    rtol = dict(bfloat16=0.25).get(policy.dtype, 1e-3)
    wrong = why = ""
    try:
        if not same_gradient(by_kind(gradients_of(policy, samples)), expected, rtol):
            wrong = why = "the gradient of compiled layers is wrong on this machine"
    except Exception as error:  # no C compiler, or code that torch cannot compile
        why = one_line(error)
    wrong, why = max(grpo.all_gather([(wrong, why)]))  # the same on all ranks
    if why:
        ranks.say(f"--compile: the layers are not compiled: {why}")
        for layer in layers:
            del layer._compiled_call_impl
    return wrong


def tokens_that_fit(policy, batch: dict) -> int:
    """How many tokens of a micro-batch fit on this GPU, from the peak memory of a small one."""
    make_gradient(policy, batch)  # allocates the gradients
    taken = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    make_gradient(policy, batch)
    of_a_token = (torch.cuda.max_memory_allocated() - taken) / batch["ids"].numel()
    free, _ = torch.cuda.mem_get_info()
    moments = 8 * sum(p.numel() for p in policy.parameters() if p.requires_grad)
    left = free + torch.cuda.memory_reserved() - taken - moments
    return int(min(65536, max(256, 0.8 * left / of_a_token)))


def make_gradient(policy, batch: dict) -> None:
    policy(batch)[0].sum().backward()
