"""What is asked of any model, and what the builds of vLLM differ in."""

import ctypes
import dataclasses
import itertools
import math

import torch
import transformers

from harness.flags import need, say
from harness.rows import Prompt

SMALL = 10e6  # parameters under which a model is a toy: threads, bfloat16 and an engine cost more than they bring


def quiet_transformers(verbose: bool) -> None:
    if not verbose:
        transformers.logging.disable_progress_bar()
        transformers.logging.set_verbosity_error()


def keep_freed_memory(device: torch.device) -> None:
    """With glibc: else the kernel clears the pages of each large tensor anew, a tenth of an update of a 135 M model."""
    if device.type == "cpu" and hasattr(ctypes.CDLL(None), "mallopt"):
        ctypes.CDLL(None).mallopt(
            -4, 0
        )  # M_MMAP_MAX: else each large tensor is a mapping of its own
        ctypes.CDLL(None).mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD


def is_small(model) -> bool:
    return sum(p.numel() for p in model.parameters()) < SMALL


def fast_bfloat16(device: torch.device) -> bool:
    """Without emulation: a CUDA card below 8.0 emulates it, slowly, and vLLM refuses it there."""
    cpu = device.type == "cpu" and (
        torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported()
    )
    return cpu or (
        device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    )


def fit_micro_batch(cfg, model, device: torch.device):
    """The flags with a micro-batch that fits the card, by bytes that studies/memory.py counted for dense models; layers
    are recomputed where not even 2,048 tokens fit. 16 bytes of a parameter: weight, gradient, Adam's two moments."""
    if cfg.micro_batch_tokens or device.type != "cuda":
        return dataclasses.replace(cfg, micro_batch_tokens=cfg.micro_batch_tokens or 2048)
    text, half = model.config.get_text_config(), cfg.dtype == "bfloat16"
    hidden, layers, mlp = (
        text.hidden_size,
        text.num_hidden_layers,
        getattr(text, "intermediate_size", None),
    )
    parameters, head = (
        sum(p.numel() for p in model.parameters()),
        model.get_input_embeddings().weight.numel(),
    )
    kept = sum((16 if p.requires_grad else 4) * p.numel() for p in model.parameters())
    kept += (
        0 if not cfg.beta else 2 * (parameters + head) if half else 4 * parameters
    )  # the reference
    card = torch.cuda.get_device_properties(device).total_memory
    room = 0.95 * card - 2e9 - kept - 17 * head  # 2 GB: CUDA itself, an engine that sleeps
    # bytes that a token leaves in a layer; where that is recomputed, only its input
    layer = (13 if half else 26) * (hidden + (mlp or 4 * hidden))
    # of a token, and of all: autocast's copies of the weights, which recomputed layers do not keep
    needs = {False: (layers * layer, 2 * half * parameters), True: (4 * hidden * layers + layer, 0)}
    ways = itertools.product(sorted({cfg.gradient_checkpointing, True}), (16384, 8192, 4096, 2048))
    fits = [
        (t, recompute)
        for recompute, t in ways
        if t * needs[recompute][0] + needs[recompute][1] <= room
    ]
    sizes = f"the card has {card / 1e9:.0f} GB; weights, gradients, moments and reference take {kept / 1e9:.3g}"
    why = (
        f"{sizes}, an update of 2048 tokens more than the rest: --beta 0, a smaller model, or LoRA"
    )
    need(
        fits,
        cfg,
        "model",
        f"{why} (variants/lora.patch); with --micro_batch_tokens it is tried all the same",
    )
    tokens, recompute = fits[0]
    if recompute:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=dict(use_reentrant=False))
    say(f"--micro_batch_tokens {tokens}{' --gradient_checkpointing' * recompute} ({sizes})")
    return dataclasses.replace(cfg, micro_batch_tokens=tokens, gradient_checkpointing=recompute)


def compile_layers(model, cfg) -> None:
    """Each layer by itself: the code of one serves them all."""
    layers = [
        m
        for m in model.modules()
        if isinstance(m, transformers.modeling_layers.GradientCheckpointingLayer)
    ]
    need(layers, cfg, "compile", "this model has no layers that can be compiled")
    torch._dynamo.config.recompile_limit = (
        64  # 8 by default, as many as modes times layouts; beyond it runs eagerly
    )
    for layer in layers:
        layer.compile(dynamic=True)


def freeze_unused(model) -> None:
    """Freezes what text does not reach, such as a vision tower: DDP would wait for its gradient."""
    learns = [
        p for n, p in model.named_parameters() if p.requires_grad and ".experts." not in n
    ]  # two choose few
    ids = torch.zeros(1, 2, dtype=torch.int64, device=model.device)
    total = model(input_ids=ids, use_cache=False).logits.sum()
    gradients = torch.autograd.grad(total, learns, allow_unused=True)
    for parameter, gradient in zip(learns, gradients, strict=True):
        parameter.requires_grad_(gradient is not None)
    unused = sum(gradient is None for gradient in gradients)
    if unused:
        say(f"{unused} tensors that text does not use are frozen")


def check_sizes(model, prompts: list[Prompt], cfg) -> None:
    """What would end in an index error, in the middle of the run."""
    longest, words = max(len(p.ids) for p in prompts), model.get_input_embeddings().num_embeddings
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None) or math.inf
    why = f"with the longest prompt ({longest} tokens) more than the model's {positions} positions"
    need(longest + cfg.max_completion_length <= positions, cfg, "max_completion_length", why)
    top, name = max(int(p.ids.max()) for p in prompts), "tokenizer" if cfg.tokenizer else "model"
    need(
        top < words,
        cfg,
        name,
        f"the tokenizer makes the token id {top}, and the model knows {words}",
    )


def special_ids(model, tokenizer, cfg) -> tuple[list[int], int]:
    """All ids that end a completion, and one to pad with, all known to the model: some tokenizers have more."""
    eos, known = (
        model.generation_config.eos_token_id,
        range(model.get_input_embeddings().num_embeddings),
    )
    eos = [*(eos if isinstance(eos, list) else [eos]), tokenizer.eos_token_id]
    eos = [i for i in dict.fromkeys(eos) if i in known]  # others are never sampled
    need(eos, cfg, "model", "neither generation_config nor tokenizer names an EOS token it knows")
    return eos, tokenizer.pad_token_id if tokenizer.pad_token_id in known else eos[0]


def same_weights(model, reference) -> bool:
    """Whether they are the same numbers, in the reference's dtype, which may be shorter."""
    theirs = dict(reference.named_parameters())
    for name, p in model.named_parameters():
        q = theirs.get(name)
        if q is None or q.shape != p.shape or not torch.equal(p.to(q.dtype), q):
            return False
    return True


def resolve_auto(cfg, model, device: torch.device):
    """The flags with what `auto` means for this model on this device; prints each choice."""
    if cfg.dtype == "auto":
        if is_small(model):
            dtype, why = "float32", "the model is small"
        elif fast_bfloat16(device):
            dtype, why = "bfloat16", f"this {device.type} has fast bfloat16"
        else:
            dtype, why = "float32", f"this {device.type} has no fast bfloat16"
        cfg = dataclasses.replace(cfg, dtype=dtype)
        say(f"--dtype {dtype} ({why})")
    if cfg.beta > 0 and cfg.kl_in == "loss" and cfg.kl_estimator == "k1":
        say(
            "warning: as a loss, k1 has zero expected gradient: it does not keep the policy near "
            "the reference"
        )
    return fit_micro_batch(cfg, model, device)
