"""Adapters (LoRA, Hu et al., arXiv 2106.09685), by peft. grpo.py takes this file for --lora_rank.

The model is frozen, and trained products stand beside its linear layers. The head has none, and
neither have experts that transformers keeps in one tensor: they stay as they are.
"""

import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import nn
from transformers.pytorch_utils import Conv1D


def add_adapters(model, checkpoint: dict, cfg) -> None:
    """Those of the checkpoint, or fresh ones, which change nothing yet."""
    head = model.get_output_embeddings()
    linear = [n for n, m in model.named_modules() if isinstance(m, nn.Linear | Conv1D)]
    targets = [name for name in linear if model.get_submodule(name) is not head]
    torch.manual_seed(cfg.seed)  # every rank draws the same
    config = LoraConfig(r=cfg.lora_rank, lora_alpha=32, target_modules=targets)
    inject_adapter_in_model(config, model)
    model.load_state_dict(checkpoint.get("adapters", {}), strict=False)


class AdaptersOff:
    """The policy without its adapters: the reference of the KL, at no memory."""

    def __init__(self, policy):
        self.policy = policy
        self.model = policy.model
        self.micro_batches = policy.micro_batches
        self.layout = policy.layout

    def __call__(self, batch: dict):
        layers = [module for module in self.model.modules() if hasattr(module, "lora_A")]
        for layer in layers:
            layer.enable_adapters(False)
        try:
            return self.policy(batch)
        finally:
            for layer in layers:
                layer.enable_adapters(True)


def merged_weights(model, rounded: bool = False) -> dict:
    """Parameters (a tied head once) and saved buffers by name, the adapters merged into the weights
    beside which they stand. rounded: merged weights are in bfloat16."""
    saved = model.state_dict()
    weights = dict(model.named_parameters())
    weights |= {name: buffer for name, buffer in model.named_buffers() if name in saved}
    for number, (name, module) in enumerate(model.named_modules()):
        if hasattr(module, "get_delta_weight"):
            base = f"{name}.base_layer.weight"
            weights[base] = weights[base].float() + module.get_delta_weight("default")
            if rounded:
                weights[base] = round_at_random(weights[base].detach(), number)
    kept = [name for name in weights if ".lora_" not in name]
    return {name.replace(".base_layer", ""): weights[name].detach() for name in kept}


def round_at_random(x, seed: int):
    """float32 to bfloat16 by stochastic rounding: up or down, right on average. Rounded to the
    nearest, a small adapter's share would vanish: it is less than half the distance between two
    numbers of bfloat16."""
    bits = x.view(torch.int32)
    generator = torch.Generator(bits.device).manual_seed(seed)
    options = dict(dtype=torch.int32, device=bits.device, generator=generator)
    noise = torch.randint(2**16, bits.shape, **options)
    return (bits + noise).bitwise_and(-(2**16)).view(torch.float32).bfloat16()
