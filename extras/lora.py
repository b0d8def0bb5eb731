"""Adapters (LoRA, Hu et al., arXiv 2106.09685), by peft. grpo.py uses this file for --lora_rank.

The model is frozen. Adapters are added to all its linear layers but the head. If transformers keeps
all experts in one tensor, adapters are added to the attention only.
"""

import contextlib
import copy
import re
from collections.abc import Mapping

import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.pytorch_utils import Conv1D

from extras import ranks
from extras.errors import require


def add_adapters(model, checkpoint: dict, cfg) -> None:
    """Adds the adapters of the checkpoint, or new ones, which do not change the output yet."""
    has_experts = any(".experts." in name for name, _ in model.named_parameters())
    # Some layers are never called: the model reads their weight. Adapters there get no gradient.
    called = set()

    def note(module, _):  # a subclass, such as Llama 4's router, may do more than multiply
        if type(module) in (nn.Linear, Conv1D):
            called.add(module)

    hook = nn.modules.module.register_module_forward_pre_hook(note)
    with torch.no_grad():
        model(model.dummy_inputs["input_ids"].to(model.device), use_cache=False)
    hook.remove()
    called.discard(model.get_output_embeddings())
    products = [name for name, module in model.named_modules() if module in called]
    if has_experts:
        products = [name for name in products if not re.search(r"\.(mlp|router|gate)\b", name)]
    # peft finds the names of experts in model.config, and would mistake other layers for them.
    holder = nn.ModuleList([model]) if has_experts else model
    torch.manual_seed(cfg.seed)  # the same draws on all ranks
    yours = added_parameters(model)
    config = LoraConfig(r=cfg.lora_rank, lora_alpha=32, target_modules=products)
    inject_adapter_in_model(config, holder)  # it freezes all other parameters
    for p in yours.values():
        p.requires_grad_(True)
    if yours:
        ranks.say(f"your load_model added {', '.join(yours)}: trained beside the adapters")
    adapters = checkpoint.get("adapters", {})
    missing, _ = model.load_state_dict(adapters, strict=False)
    lost = [name for name in missing if ".lora_" in name]
    if adapters and lost:
        raise ValueError(f"the checkpoint has no {lost[0]}")
    used = getattr(model, "_weight_conversions", None)
    if not (used or get_model_conversion_mapping(model, add_legacy=False)):
        model._weight_conversions = None  # else transformers would read all weights and rename none


def added_parameters(model) -> dict:
    """Trainable parameters that your load_model added: another model of this config lacks them."""
    known = model
    with contextlib.suppress(Exception), torch.device("meta"):  # a class of yours may differ
        known = type(model)(copy.deepcopy(model.config))
    names = {name for name, _ in known.named_parameters()}
    return {n: p for n, p in model.named_parameters() if p.requires_grad and n not in names}


def halve_frozen(model) -> None:
    """Casts frozen linear layers and experts to bfloat16, as each pass would, to save memory."""
    tied = model.get_input_embeddings().weight
    for module in model.modules():
        for p in module.parameters(recurse=False):
            is_experts = p.dim() == 3 and not isinstance(module, nn.Conv1d)
            if is_experts or isinstance(module, nn.Linear):
                if p is not tied and not p.requires_grad:
                    p.data = p.data.bfloat16()


class AdaptersOff:
    """The policy without its adapters, as the KL's reference. It takes no memory."""

    def __init__(self, policy):
        self.policy = policy
        self.model = policy.model
        self.micro_batches = policy.micro_batches
        self.collate = policy.collate

    def __call__(self, batch: dict):
        for name, p in self.model.named_parameters():
            why = f"{name} is trained beside the adapters, so the KL needs a separate model"
            require(not p.requires_grad or ".lora_" in name, "reference", why)
        layers = [module for module in self.model.modules() if hasattr(module, "lora_A")]
        for layer in layers:
            layer.enable_adapters(False)
        try:
            return self.policy(batch)
        finally:
            for layer in layers:
                layer.enable_adapters(True)


class Merged(Mapping):
    """A model's tensors by name, with the adapters merged into the weights of their layers. Merged
    weights are bfloat16 if `rounded`, as for a sampler. Each is merged when it is read: all of
    them would be a second model in memory."""

    def __init__(self, tensors: dict, model, rounded: bool = False):
        names = [name for name in tensors if ".lora_" not in name]
        self.tensors = {name.replace(".base_layer", ""): tensors[name] for name in names}
        self.rounded = rounded
        self.layers = {}  # by the weight's name, the layers that have adapters
        for number, (name, module) in enumerate(model.named_modules()):
            if hasattr(module, "get_delta_weight"):
                self.layers[f"{name}.weight"] = number, module

    def __iter__(self):
        return iter(self.tensors)

    def __len__(self):
        return len(self.tensors)

    @torch.no_grad()
    def __getitem__(self, name: str):
        x = self.tensors[name]
        if name in self.layers:
            number, module = self.layers[name]
            x = x.float() + module.get_delta_weight("default")
            if self.rounded:
                x = round_at_random(x, number)
        return x


def round_at_random(x, seed: int):
    """Rounds float32 to bfloat16 stochastically: up or down, correct on average. Rounding to the
    nearest would erase a small adapter: its share is less than half the distance between two
    bfloat16 numbers."""
    bits = x.view(torch.int32)
    generator = torch.Generator(bits.device).manual_seed(seed)
    noise = torch.empty_like(bits).random_(2**16, generator=generator)
    return (bits + noise).bitwise_and(-(2**16)).view(torch.float32).bfloat16()
