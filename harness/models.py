"""Before a run: checks and special ids of its model, settings of its process."""

import contextlib
import ctypes

import torch
import transformers
from packaging.version import Version
from torch import nn

from harness import lora
from harness.flags import ConfigError, need, say
from harness.rows import Prompt

M_MMAP_MAX = -4  # of glibc's malloc.h
M_TRIM_THRESHOLD = -1  # likewise
OLDEST = "5.13"  # transformers; before it the attention takes other arguments
LONGEST_PROBE = 2048  # tokens; needs no more memory than an update


def check_transformers() -> None:
    """ConfigError if the installed one is too old."""
    version = transformers.__version__
    if Version(version) < Version(OLDEST):
        install = f"pip install 'transformers>={OLDEST}'"
        raise ConfigError(f"transformers {version} is too old: {install}")


def quiet_transformers(verbose: bool) -> None:
    if not verbose:
        transformers.logging.disable_progress_bar()
        transformers.logging.set_verbosity_error()


def keep_freed_memory(device: torch.device) -> None:
    """Makes glibc keep freed memory, which the kernel would clear anew for each large tensor.

    The clearing takes 10 % of an update of 135 M parameters. Only glibc is changed.
    """
    libc = ctypes.CDLL(None)
    if device.type == "cpu" and hasattr(libc, "mallopt"):
        libc.mallopt(M_MMAP_MAX, 0)  # no mapping of its own for a large tensor
        libc.mallopt(M_TRIM_THRESHOLD, 2**31 - 1)


@contextlib.contextmanager
def exact_float32():
    """Products of float32 matrices are float32, whatever precision the process has set for them.

    Rounded ones would look like a wrong model or a wrong sampler, and stop the run.
    """
    precision = None
    with contextlib.suppress(RuntimeError):  # raised if the newer settings below are in use
        precision = torch.get_float32_matmul_precision()
    backends = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)
    kinds = [backend.fp32_precision for backend in backends]
    torch.set_float32_matmul_precision("highest")
    if precision != "highest":
        say("float32 products are not rounded in this run, although this process asks for it")
    try:
        yield
    finally:
        if precision:
            torch.set_float32_matmul_precision(precision)
        for backend, kind in zip(backends, kinds, strict=True):
            backend.fp32_precision = kind


def compile_layers(model, cfg) -> None:
    """Compiles each layer on its own: they all share one compiled code."""
    kind = transformers.modeling_layers.GradientCheckpointingLayer
    layers = [module for module in model.modules() if isinstance(module, kind)]
    need(layers, cfg, "compile", "this model has no layers that can be compiled")
    # One code for each mode and layout. Beyond the limit, 8 by default, layers run uncompiled.
    torch._dynamo.config.recompile_limit = 64
    for layer in layers:
        layer.compile(dynamic=True)


def freeze_unused(model, length: int) -> None:
    """Freezes parameters that no text reaches, such as a vision tower: DDP would wait for them.

    length: tokens of the longest text of the run. Some parameters act on long texts only.
    """
    length = min(length, LONGEST_PROBE)
    ids = torch.zeros(1, length, dtype=torch.int64, device=model.device)
    parameters = []
    for name, parameter in model.named_parameters():
        # One text reaches few experts; other texts reach others.
        if parameter.requires_grad and ".experts." not in name:
            parameters.append(parameter)
    total = model(input_ids=ids, use_cache=False).logits.sum()
    gradients = torch.autograd.grad(total, parameters, allow_unused=True)

    frozen = 0
    for parameter, gradient in zip(parameters, gradients, strict=True):
        if gradient is None:
            parameter.requires_grad_(False)
            frozen += 1
    if frozen:
        say(f"{frozen} tensors that text does not use are frozen")


def halve_frozen(model) -> None:
    """Casts the linear layers of a frozen model to bfloat16, as autocast does in every forward: the
    same numbers in half the memory. Not its adapters, nor a tied head, which is the embedding."""
    tied = model.get_input_embeddings().weight
    for name, module in model.named_modules():
        is_linear = isinstance(module, nn.Linear) and not lora.is_adapter(name)
        if is_linear and module.weight is not tied:
            module.to(torch.bfloat16)


def check_sizes(model, prompts: list[Prompt], cfg) -> None:
    """Raises at the start what would be an index error in mid-run."""
    longest = max(len(p.ids) for p in prompts)
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if positions:
        needed = longest + cfg.max_completion_length
        why = f"with the longest prompt ({longest} tokens) more than the model's"
        why += f" {positions} positions"
        need(needed <= positions, cfg, "max_completion_length", why)

    largest = max(int(p.ids.max()) for p in prompts)
    words = model.get_input_embeddings().num_embeddings
    name = "model"
    if cfg.tokenizer:
        name = "tokenizer"
    why = f"the tokenizer makes the token id {largest}, but the model has {words}"
    need(largest < words, cfg, name, why)


def special_ids(model, tokenizer, cfg) -> tuple[list[int], int]:
    """The ids that end a completion, and one to pad with, all in the model's vocabulary.

    Some tokenizers have more ids than the model; those are never sampled.
    """
    vocabulary = range(model.get_input_embeddings().num_embeddings)
    candidates = model.generation_config.eos_token_id
    if not isinstance(candidates, list):
        candidates = [candidates]
    candidates = [*candidates, tokenizer.eos_token_id]
    eos_ids = [i for i in dict.fromkeys(candidates) if i in vocabulary]
    why = "no EOS token of generation_config or tokenizer is in its vocabulary"
    need(eos_ids, cfg, "model", why)

    pad_id = tokenizer.pad_token_id
    if pad_id not in vocabulary:
        pad_id = eos_ids[0]
    return eos_ids, pad_id


def same_weights(model, reference) -> bool:
    """True if all parameters equal the reference's, once cast to its dtype.

    With adapters the reference is the model itself, without them.
    """
    if reference is model:
        return lora.are_zero(model)
    pairs = zip(model.parameters(), reference.parameters(), strict=True)
    return all(torch.equal(p.to(q.dtype), q) for p, q in pairs)
