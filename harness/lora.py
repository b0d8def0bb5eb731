"""LoRA: the model is frozen, and each linear layer W gets a small trained product beside it.

The layer computes W x + (ALPHA / rank) B A x, with A [rank, in] drawn at random and B [out, rank]
starting at 0 (Hu et al., arXiv 2106.09685). The layers are peft's.
"""

import contextlib
import os

import torch
from safetensors.torch import load_file, save_file

from harness.flags import ConfigError, TrainingError, need, say

# Divided by the rank, this makes the best learning rate nearly the same for every rank: the start
# of training does not depend on the rank at all (Schulman et al., LoRA Without Regret, 2025).
ALPHA = 32
ADAPTER = "default"  # peft's name of the only adapter
FOLDER = "adapter"  # of a checkpoint, in the form that peft's PeftModel.from_pretrained loads


def add_adapters(model, cfg) -> None:
    """Freezes the model, and puts an adapter on every linear layer but the output head.

    Every rank draws the same adapters, with torch's generator on the CPU.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise ConfigError(f"--lora_rank {cfg.lora_rank}: {error}; pip install peft") from None
    has_experts = any(".experts." in name for name, _ in model.named_parameters())
    need(not has_experts, cfg, "lora_rank", "the experts of this model cannot have adapters")

    torch.manual_seed(cfg.seed)
    config = LoraConfig(
        r=cfg.lora_rank,
        lora_alpha=ALPHA,
        target_modules="all-linear",  # without the output head
        task_type="CAUSAL_LM",
        base_model_name_or_path=cfg.model,
    )
    inject_adapter_in_model(config, model, ADAPTER)
    trained = sum(p.numel() for p in adapters(model).values())
    say(f"--lora_rank {cfg.lora_rank}: {trained / 1e6:.2f} M parameters learn, the model is frozen")


def learning_rate(default: float) -> float:
    """Ten times the default rate, which is best for adapters of every rank.

    "LoRA Without Regret" finds it for supervised and reinforcement learning.
    """
    value = float(f"{10 * default:g}")
    say(f"--learning_rate {value:g} (ten times the default, for --lora_rank)")
    return value


def adapters(model) -> dict:
    """The trained matrices A and B of all layers, by name."""
    return {name: p for name, p in model.named_parameters() if is_adapter(name)}


def is_adapter(name: str) -> bool:
    return ".lora_" in name


def adapted_layers(model) -> list:
    return [module for module in model.modules() if hasattr(module, "lora_A")]


def are_zero(model) -> bool:
    """True if the adapters change nothing, as before the first step."""
    return not any(p.any() for name, p in adapters(model).items() if ".lora_B." in name)


@contextlib.contextmanager
def adapters_off(model):
    """Inside, the model is its own base."""
    for layer in adapted_layers(model):
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in adapted_layers(model):
            layer.enable_adapters(True)


def add_before_rounding(model) -> None:
    """Makes the layers of a run in bfloat16 add W x and B A x in float32, and round once.

    peft rounds W x, and adds B A x to that. A small product, as in the first steps, is less than
    half the distance to the next number, and then the sum is W x: the adapter has no effect.
    """
    from peft.tuners.lora import Linear

    class RoundedOnce(Linear):
        forward = linear_with_adapter

    for layer in adapted_layers(model):
        if type(layer) is Linear and isinstance(layer.base_layer, torch.nn.Linear):
            # A class, as a function on each layer would make torch.compile compile every layer.
            layer.__class__ = RoundedOnce


def linear_with_adapter(layer, x):
    """x [..., in] -> W x + (ALPHA / rank) B A x + bias, [..., out]. Under autocast."""
    base = layer.base_layer
    rows = x.flatten(0, -2)  # [n, in]
    if layer.disable_adapters:  # the same call with 0: fresh adapters have just the base's numbers
        product = rows.new_zeros(len(rows), base.out_features)
    else:
        hidden = layer.lora_A[ADAPTER](rows)  # [n, rank]
        product = layer.lora_B[ADAPTER](hidden) * layer.scaling[ADAPTER]  # [n, out]
    out = torch.addmm(product, rows, base.weight.T)  # the kernel adds up in float32
    if base.bias is not None:
        out = out + base.bias
    return out.view(*x.shape[:-1], -1)


class BasePolicy:
    """The policy with its adapters off: the reference of the KL, without a second model."""

    def __init__(self, policy):
        self.policy = policy
        self.model = policy.model
        self.packs = policy.packs

    def rows(self, samples) -> dict:
        return self.policy.rows(samples)

    def __call__(self, batch: dict) -> tuple:
        with adapters_off(self.model):
            return self.policy(batch)


# -- What leaves the trainer: the weights of a model without adapters


def without_adapters(tensors: dict) -> dict:
    """Named tensors of an adapted model, under the names that they had before it got adapters."""
    plain = {}
    for name, tensor in tensors.items():
        if not is_adapter(name):
            plain[name.replace(".base_layer.", ".")] = tensor
    return plain


def merged(tensors: dict, model, dtype=torch.float32):
    """Yields names and tensors, with W + (ALPHA / rank) B A for each W among them.

    One product is in memory at a time, and the model does not change. tensors: the model's own, as
    without_adapters() returns them; they may have been renamed since. dtype: in which the merged
    ones will be used; for bfloat16 they are rounded here.
    """
    layers = {layer.base_layer.weight.data_ptr(): layer for layer in adapted_layers(model)}
    for number, (name, tensor) in enumerate(tensors.items()):
        layer = layers.pop(tensor.data_ptr(), None)
        if layer is not None:
            product = layer.get_delta_weight(ADAPTER).detach()
            tensor = tensor.to(product.dtype) + product
            if dtype == torch.bfloat16:
                tensor = round_at_random(tensor, seed=number)
        yield name, tensor
    if layers:
        why = "do not appear among the weights in the form of its checkpoint"
        raise TrainingError(f"--lora_rank: {len(layers)} adapted layers of this model {why}")


def round_at_random(tensor, seed: int):
    """float32 to bfloat16, up or down with probabilities that keep the mean.

    W is a bfloat16 number already, and few products reach half the distance to the next one:
    rounded to the nearest, W + B A is mostly W. On SmolLM2-135M small adapters moved the
    log-probabilities by 0.32 nats, and the merged weights were 0.21 off when rounded to the
    nearest, 0.02 when rounded at random.
    """
    bits = tensor.view(torch.int32)
    dropped = 2**16  # values of the 16 bits that bfloat16 lacks
    random = torch.Generator(bits.device).manual_seed(seed)  # a resumed run pushes the same
    noise = torch.randint(
        dropped, bits.shape, generator=random, dtype=torch.int32, device=bits.device
    )
    return (bits + noise).bitwise_and(-dropped).view(torch.float32).bfloat16()


def merged_state(model) -> dict:
    """The state_dict() of a model without adapters; the merged tensors are on the CPU."""
    tensors = without_adapters(model.state_dict())
    state = {}
    for name, tensor in merged(tensors, model):
        if tensor is not tensors[name]:
            tensor = tensor.cpu()  # at once: a card may lack the room for all
        state[name] = tensor
    return state


# -- Checkpoints: the adapters themselves


def save_adapters(model, directory: str) -> None:
    """Writes what peft loads on top of the base model."""
    folder = os.path.join(directory, FOLDER)
    model.peft_config[ADAPTER].save_pretrained(folder)
    tensors = {name_in_file(name): p.detach() for name, p in adapters(model).items()}
    save_file(tensors, adapter_file(directory), metadata=dict(format="pt"))


def load_adapters(model, directory: str) -> None:
    tensors = load_file(adapter_file(directory))
    with torch.no_grad():
        for name, parameter in adapters(model).items():
            parameter.copy_(tensors[name_in_file(name)])


def adapter_file(directory: str) -> str:
    return os.path.join(directory, FOLDER, "adapter_model.safetensors")


def name_in_file(name: str) -> str:
    """The name that peft gives the adapter `name` in a file."""
    return "base_model.model." + name.replace(f".{ADAPTER}.", ".")
