"""What is asked of any model, and what the builds of vLLM differ in."""

import ctypes
import dataclasses
import itertools
import math
import os
import re

import torch
import transformers

from harness.flags import ConfigError, first_line, need, say
from harness.rows import Prompt

SMALL = 10e6  # parameters under which a model is a toy: threads, bfloat16 and an engine cost more than they bring
CACHE_BYTES = 2**30  # what vLLM's keys and values take on a CPU


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


def choose_sampler(cfg, device: torch.device, small: bool) -> tuple[str, str]:
    """Which sampler, and why: vllm wherever it can be imported and has a build for this device, in this process."""
    if cfg.rollout == "hf":
        return "hf", "asked for"
    if cfg.rollout == "auto" and small:
        return "hf", "vLLM would take longer to start than it saves on a model this small"
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # weights go by reference
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "INFO" if cfg.verbose else "ERROR")
    if (
        cfg.dtype == "float32"
    ):  # else vLLM's Triton attention multiplies in TF32, and the gap is 1e-3
        os.environ["TRITON_F32_DEFAULT"] = "ieee"
    install = f"pip install {'--no-deps -r requirements-cpu.txt' if device.type == 'cpu' else '-r requirements.txt'}"
    problem = "vLLM has no float64" if cfg.dtype == "float64" else ""
    try:
        from vllm.platforms import current_platform

        if device.type != current_platform.device_type:
            problem = f"the installed vllm has no {device.type} build; {install}"
        elif device.type == "cuda" and torch.cuda.get_device_capability(device) < (7, 5):
            problem = "vllm has no kernels for cards below compute capability 7.5; --rollout hf does without"
        elif (
            device.type == "cpu"
        ):  # else the first rollout compiles C++ for 10 s, for a token's rank that nobody reads
            type(current_platform).simple_compile_backend = "eager"
    except ImportError as error:
        problem = f"vllm cannot be imported: {error}; {install}"
    need(not problem or cfg.rollout != "vllm", cfg, "rollout", problem)
    return (
        ("hf", problem) if problem else ("vllm", "asked for" if cfg.rollout == "vllm" else "found")
    )


def load_model(path: str, cfg):
    """A Hugging Face causal language model, float32 parameters, nothing random: each forward gives the same numbers."""
    # float32 even where the forward runs in bfloat16: at lr 1e-6 pure bfloat16 loses 98 % of the updates
    options = dict(
        dtype=torch.float64 if cfg.dtype == "float64" else torch.float32, output_loading_info=True
    )
    try:
        config = without_randomness(transformers.AutoConfig.from_pretrained(path))
        model, found = transformers.AutoModelForCausalLM.from_pretrained(
            path, config=config, **options
        )
    except Exception as error:  # of a file that is not what it should be
        raise ConfigError(f"--model {path}: {first_line(error)}") from None
    missing = min(found["missing_keys"], default="")
    need(not missing, cfg, "model", f"its files have no weights for {missing}")
    if cfg.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=dict(use_reentrant=False))
    return model.eval()  # for good: some models draw random numbers while they train


def same_weights(model, reference) -> bool:
    """Whether they are the same numbers, in the reference's dtype, which may be shorter."""
    theirs = dict(reference.named_parameters())
    for name, p in model.named_parameters():
        q = theirs.get(name)
        if q is None or q.shape != p.shape or not torch.equal(p.to(q.dtype), q):
            return False
    return True


def without_randomness(config):
    """The config with every dropout and jitter at 0, in those of its parts, too."""
    for key, value in vars(config).items():
        if hasattr(value, "to_diff_dict"):
            without_randomness(value)
        elif re.search("dropout|pdrop|layerdrop|jitter", key) and isinstance(value, float):
            setattr(config, key, 0.0)
    return config


def fill_with_nan(model) -> None:
    """Before each push: a tensor of the engine that the push does not reach spoils the rollout. A Linear on a CPU is a
    packed copy: that it is stale shows in sampler_gap only."""
    for parameter in model.parameters():
        parameter.data.fill_(math.nan)
    repack(model)


def has_alibi(model) -> bool:
    """Whether its attention holds slopes, which no push brings back."""
    return any(
        getattr(getattr(m, "impl", None), "alibi_slopes", None) is not None for m in model.modules()
    )


def repack(model) -> None:
    """What vLLM's CPU build packs when it starts, but not again when it reloads: a tied head, the experts of a MoE."""
    head = getattr(model, "lm_head", None)
    if hasattr(head, "quant_method"):
        head.quant_method.process_weights_after_loading(head)
    for module in model.modules():
        kernel = getattr(getattr(module, "quant_method", None), "moe_kernel", None)
        if kernel is not None and module.w2_weight.device.type == "cpu":
            kernel.fused_experts.process_weights_after_loading(module)
