"""Chooses dtype, micro-batch and threads to suit the model and the machine."""

import dataclasses
import os

import torch

from harness.flags import need, say

SMALL = 10e6  # with fewer parameters threads, bfloat16 and vLLM cost more than they save

# Bytes on a card, as studies/memory.py counts them for dense models.
WEIGHT = 4  # of a parameter, in float32
LEARNING = 12  # more per trained parameter: gradient 4, Adam's two moments 8
CAST = 2  # of a parameter: autocast's copy in bfloat16
HEAD = 17  # per weight of the output head: the largest remainder in those measurements
FROZEN_HEAD = 2.7e9  # without a gradient only its tiles of logits remain
ACTIVATION = 26  # per token, layer, and hidden or MLP unit; half in bfloat16
LAYER_INPUT = 4  # per token and hidden unit, for a recomputed layer
CUDA = 2e9  # CUDA and a sleeping vLLM engine
USABLE = 0.95  # of the card: the allocator cannot use the gaps between tensors
MICRO_BATCHES = (16384, 8192, 4096, 2048)  # tokens


def set_threads(model) -> None:
    """One thread for a small model, unless the user has said how many."""
    if is_small(model) and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)


def count(model) -> int:
    return sum(p.numel() for p in model.parameters())


def is_small(model) -> bool:
    return count(model) < SMALL


def fast_bfloat16(device: torch.device) -> bool:
    """True if the device has native bfloat16: a CUDA card below 8.0 emulates it, slowly,
    and vLLM refuses it there."""
    if device.type == "cpu":
        return torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported()
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return False


def choose_dtype(cfg, model, device: torch.device):
    """The config with a dtype in place of auto; prints the choice and the reason."""
    if cfg.dtype != "auto":
        return cfg

    dtype = "float32"
    if is_small(model):
        why = "the model is small"
    elif fast_bfloat16(device):
        dtype = "bfloat16"
        why = f"this {device.type} has fast bfloat16"
    else:
        why = f"this {device.type} has no fast bfloat16"
    say(f"--dtype {dtype} ({why})")
    return dataclasses.replace(cfg, dtype=dtype)


def fit_micro_batch(cfg, model, device: torch.device):
    """The config with a micro-batch that fits the card: the largest, with gradient checkpointing if
    necessary. Without CUDA: 2,048 tokens.

    ConfigError if not even the smallest one fits.
    """
    if cfg.micro_batch_tokens:
        return cfg
    if device.type != "cuda":
        return dataclasses.replace(cfg, micro_batch_tokens=2048)

    card = torch.cuda.get_device_properties(device).total_memory
    choices = [(tokens, True) for tokens in MICRO_BATCHES]
    if not cfg.gradient_checkpointing:
        choices = [(tokens, False) for tokens in MICRO_BATCHES] + choices
    for tokens, recompute in choices:
        peak = peak_bytes(cfg, model, tokens, recompute)
        if peak <= USABLE * card:
            break
    sizes = f"{peak / 1e9:.0f} GB of the card's {card / 1e9:.0f}"
    why = f"an update of {tokens} tokens takes {sizes}: --beta 0, --lora_rank 8 or a smaller model"
    force = "set --micro_batch_tokens to try it anyway"
    need(peak <= USABLE * card, cfg, "model", f"{why}; {force}")

    chosen = f"--micro_batch_tokens {tokens}"
    if recompute:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=dict(use_reentrant=False))
        chosen += " --gradient_checkpointing"
    say(f"{chosen} ({sizes})")
    return dataclasses.replace(cfg, micro_batch_tokens=tokens, gradient_checkpointing=recompute)


def peak_bytes(cfg, model, tokens, recompute):
    """Peak memory of an update: weights, gradients, moments, the reference, activations."""
    text = model.config.get_text_config()
    hidden = text.hidden_size
    layers = text.num_hidden_layers
    mlp = getattr(text, "intermediate_size", 4 * hidden)

    layer = tokens * ACTIVATION * (hidden + mlp)
    casts = 0
    if cfg.dtype == "bfloat16":
        layer = layer / 2
        casts = CAST * count(model)
    if cfg.lora_rank > 0:
        casts = 0  # the base is in bfloat16 already
    activations = layers * layer + casts
    if recompute:  # the inputs of all layers, and all of one layer; no casts are kept
        activations = tokens * LAYER_INPUT * hidden * layers + layer
    return CUDA + resident_bytes(cfg, model) + activations


def resident_bytes(cfg, model):
    """Of what learns, with its gradients and moments; of what is frozen; of the head's tiles."""
    parameters = count(model)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    head = model.get_input_embeddings().weight.numel()
    learns = (WEIGHT + LEARNING) * trained
    if cfg.lora_rank > 0:  # the base is the reference, too
        return learns + frozen_bytes(cfg, parameters - trained, head) + FROZEN_HEAD

    reference = 0
    if cfg.beta > 0:
        reference = frozen_bytes(cfg, parameters, head)
    return learns + WEIGHT * (parameters - trained) + reference + HEAD * head


def frozen_bytes(cfg, parameters, embedding):
    """As models.halve_frozen() leaves them."""
    if cfg.dtype == "bfloat16":
        return CAST * (parameters - embedding) + WEIGHT * embedding
    return WEIGHT * parameters


def resolve_auto(cfg, model, device: torch.device):
    """The config with a value in place of every `auto`; prints each choice and its reason."""
    cfg = choose_dtype(cfg, model, device)
    if cfg.beta > 0 and cfg.kl_in == "loss" and cfg.kl_estimator == "k1":
        say(
            "warning: as a loss, k1 has zero expected gradient: it does not keep the policy near "
            "the reference"
        )
    return fit_micro_batch(cfg, model, device)
