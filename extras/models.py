"""Models, tokenizers and chat templates of all kinds: checks, and fixes where transformers leaves
parts out, gets them wrong or cannot save them. By itself grpo.py only calls from_pretrained."""

import contextlib
import copy
import functools
import importlib.util
import inspect
import itertools
import json
import math
import os
import re
import shutil
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import numpy as np
import torch
import transformers
from transformers.utils.hub import cached_file

import grpo
from extras import digests, fast, preflight, ranks
from extras.errors import cleanup, mistakes_in, require


def checked(cfg):
    """Before anything is loaded, refuses impossible flags, and makes the model's path absolute,
    because a reward may change the working directory."""
    ranks.now.cache_clear()
    with mistakes_in("flags", (ValueError,)):
        preflight.check_values(cfg)
        preflight.check_marks(cfg)
    with mistakes_in(f"--reward {cfg.reward}"):
        grpo.load_rewards(cfg.reward)
    model = cfg.model
    if os.path.isdir(model):  # else a name on the hub
        model = os.path.abspath(model)
    if cfg.fast and (cfg.device == "cpu" or not torch.cuda.is_available()):
        fast.tune_memory()
    return replace(cfg, model=model)


def say(message) -> None:
    if message:
        ranks.say(message)


# -- Tokenizers and templates


def config_of(path: str):
    preflight.check_folder(path)
    adapters = Path(path, "adapter_config.json")
    if adapters.exists():  # your load_model adds them to this model
        path = json.loads(adapters.read_text())["base_model_name_or_path"]
    try:
        return transformers.AutoConfig.from_pretrained(path, trust_remote_code=False)
    except ValueError as error:
        if "trust_remote_code" not in str(error):
            raise
        why = "the model needs custom code of its own (trust_remote_code), which is never run here"
        raise ValueError(why) from error


def load_tokenizer(plain, path: str, cfg, *args, **kwargs):
    """Loads a tokenizer whose chat template writes the date of the run's first start."""
    with mistakes_in("flags", (ValueError,)):
        preflight.check_marks(cfg)  # here, too, as train's own @extra may be gone
    with mistakes_in(f"--{preflight.flag_of(path, cfg)} {path}"):
        config_of(path)  # refuses code from the folder
        tokenizer = plain(path, cfg, *args, **kwargs)
        text = "a b\n\n  c"
        is_yours = digests.changed("load_tokenizer")
        if not is_yours and text not in tokenizer.decode(tokenizer(text)["input_ids"]):
            # transformers 5 follows the class in the config, and may not build the tokenizer that
            # tokenizer.json describes. PreTrainedTokenizerFast uses the file as it is.
            tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(path)
        if not is_yours:  # BERT's cleanup, also in others: rewards would get "x!= y" for "x != y"
            tokenizer.clean_up_tokenization_spaces = False
    write = datetime.fromisoformat(cfg.began or ranks.now()).strftime
    if hasattr(tokenizer, "apply_chat_template"):  # a class of yours may have none
        template = functools.partial(tokenizer.apply_chat_template, strftime_now=write)
        tokenizer.apply_chat_template = template
    if path != cfg.reference:
        say(preflight.check_think_tag(tokenizer))
    return tokenizer


def stop_ids_of(model, tokenizer) -> list[int]:
    """All tokens that end a turn and that the model can sample: the end tokens of the model and the
    tokenizer, and the token that the chat template writes after the assistant's text."""
    ends = {tokenizer.eos_token_id, *np.ravel(model.generation_config.eos_token_id)}
    with contextlib.suppress(Exception):  # no template, or one that refuses such a chat
        chat = [dict(role="user", content="?"), dict(role="assistant", content="b8e24d60f1")]
        text = tokenizer.apply_chat_template(chat, tokenize=False).rpartition("b8e24d60f1")[2]
        after = tokenizer(text.lstrip(), add_special_tokens=False)["input_ids"][:1]
        ends |= set(after) & set(tokenizer.get_added_vocab().values())
    stop_ids = sampled_ones(ends, model)
    require(stop_ids, f"model {model.name_or_path}", "has no EOS token")
    return stop_ids


def sampled_ones(ids, model) -> list[int]:
    vocabulary = range(model.get_input_embeddings().num_embeddings)
    return sorted(int(i) for i in ids if i in vocabulary)


# -- A folder -> a model -> a folder


def load_model(plain, path: str, cfg, device: torch.device, *args, **kwargs):
    """Loads a model without dropout if --gradient_checkpointing puts layers into training mode, and
    without the extra outputs that a config may ask for, as after TRL's SFT of mixtures."""
    path = str(path)
    torch.manual_seed(cfg.seed)  # weights that you add are the same on all ranks and in a resume
    with mistakes_in(f"--{preflight.flag_of(path, cfg)} {path}"):
        config = config_of(path)
        preflight.check_config(config)
        text = config.get_text_config()
        # AutoModelForCausalLM does not load all of a multimodal model. Yours knows what it loads.
        is_multimodal = text is not config and not digests.changed("load_model")
        if is_multimodal:
            model = load_multimodal(path, cfg).to(device).eval()
        else:
            model = plain(path, cfg, device, *args, **kwargs)
        say(preflight.check_weights(model))
        if getattr(text, "attn_logit_softcapping", None):
            model.set_attn_implementation("eager")  # the others leave out the cap
        if cfg.dtype == "float64":
            model.set_experts_implementation("eager")  # the grouped product has no float64
    model.file = config, cfg.model  # for save_model
    if not model.training:
        yours = changed_settings(model.config, config)
        has_dropout = any(re.search(DROPOUT, name) for name in yours)
        for holder in (model.config, *model.modules()):
            plain_forward(holder, yours, cfg.gradient_checkpointing and not has_dropout)
    if is_multimodal:
        freeze_unreached(model)
    if device.type == "cpu":
        # Copies the weights, because transformers maps their file into memory: overwriting the
        # file would change the model.
        copies = {}
        for tensor in itertools.chain(model.parameters(), model.buffers()):
            place = tensor.data_ptr(), tensor.shape, tensor.stride()
            if place not in copies:  # shared tensors stay shared
                copies[place] = tensor.data.clone()
            tensor.data = copies[place]
    if cfg.gradient_checkpointing:
        with mistakes_in("--gradient_checkpointing", (ValueError,)):
            old = model.gradient_checkpointing_enable  # before transformers 5.24
            getattr(model, "activation_checkpointing_enable", old)(dict(use_reentrant=False))
        model.base_model.register_forward_pre_hook(switch_checkpointing)
    return model


def load_multimodal(path: str, cfg):
    dtype = torch.float64 if cfg.dtype == "float64" else torch.float32
    options = dict(dtype=dtype, output_loading_info=True)
    model, info = transformers.AutoModelForMultimodalLM.from_pretrained(path, **options)
    if info["missing_keys"]:
        raise ValueError(f"its files have no weights for {min(info['missing_keys'])}")
    model.get_input_embeddings().padding_idx = None  # as in the plain function
    return model


def freeze_unreached(model) -> None:
    """Freezes what text does not reach, such as vision: these weights must not decay, and DDP would
    wait for their gradients."""
    reached = parameters_of(model(torch.ones(1, 2, dtype=torch.long, device=model.device)).logits)
    reached |= {p for name, p in model.get_decoder().named_parameters() if ".experts." in name}
    for p in model.parameters():
        p.requires_grad_(p in reached)


def parameters_of(output) -> set:
    """The parameters that autograd reaches from a tensor."""
    nodes, seen = [output.grad_fn], set()
    while nodes:
        node = nodes.pop()
        if node not in seen:
            seen.add(node)
            nodes += [before for before, _ in node.next_functions if before is not None]
    return {node.variable for node in seen if hasattr(node, "variable")}


def switch_checkpointing(model, _) -> None:
    """The model learns in eval mode, without dropout and jitter. But transformers computes a layer
    again in backward only if its `training` is True. This sets it for the layer alone, so that the
    dropout inside stays off."""
    for module in model.modules():
        if getattr(module, "gradient_checkpointing", False):
            module.training = torch.is_grad_enabled()


DROPOUT = "dropout|pdrop|layerdrop"
OUTPUTS = r"_?output_(router_\w+|hidden_states|attentions)"


def changed_settings(config, of_file) -> set[str]:
    """Names of settings that you have changed since the file was read, also in inner configs."""
    names = set()
    for name, value in vars(config).items():
        before = getattr(of_file, name, value)
        if hasattr(value, "to_diff_dict"):
            names |= changed_settings(value, before)
        elif before != value:
            names.add(name)
    return names


def plain_forward(holder, yours=(), no_dropout: bool = True) -> None:
    """Sets a config, with its inner configs, or a module to the usual outputs and no dropout.
    yours: names of settings that stay."""
    for name, value in vars(holder).items():
        if hasattr(value, "to_diff_dict"):
            plain_forward(value, yours, no_dropout)
        elif name in yours:
            continue
        elif no_dropout and re.search(DROPOUT, name) and isinstance(value, float):
            setattr(holder, name, 0.0)
        elif re.fullmatch(OUTPUTS, name) and value:
            setattr(holder, name, False)
        elif name == "return_dict":
            holder.return_dict = True
    if no_dropout and isinstance(holder, torch.nn.Dropout):
        holder.p = 0.0


def put_back(config, of_file) -> None:
    """Restores the file's values of settings that plain_forward changes, and of the dtype."""
    for name, value in vars(of_file).items():
        if hasattr(value, "to_diff_dict") and hasattr(config, name):
            put_back(getattr(config, name), value)
        elif re.fullmatch("return_dict|dtype", name):
            setattr(config, name, value)
        elif re.search(f"{DROPOUT}|^{OUTPUTS}$", name) and not getattr(config, name, None):
            setattr(config, name, value)


def save_model(plain, model, tokenizer, folder: Path, *args, **kwargs) -> None:
    """Saves the model with the config of its file plus your changes, with merged adapters and the
    files that servers need. ValueError if the weights are not finite."""
    weights, saved = model.state_dict(), copy.copy(model)
    if any(hasattr(module, "get_delta_weight") for module in model.modules()):  # of peft
        from extras import lora

        merged = lora.Merged(without_tied(weights, model), model).items()
        weights = {name: x.cpu() for name, x in merged}  # one at a time on a GPU
        saved.save_pretrained = functools.partial(saved.save_pretrained, state_dict=weights)
    # In parts, as there may be little memory, for example after an out-of-memory error.
    buffers = dict(model.named_buffers())  # may be infinite, such as a mask
    learned = [x for name, x in weights.items() if name not in buffers]
    parts = (part for x in learned for part in x.flatten().split(2**22))
    if not all(part.isfinite().all() for part in parts):
        raise ValueError("the weights are not finite")
    of_file, source = getattr(model, "file", (model.config, model.name_or_path))
    saved.config = copy.deepcopy(model.config)
    put_back(saved.config, of_file)
    saved.config._attn_implementation = "eager"  # else output_attentions is not saved
    saved.generation_config = transformers.GenerationConfig()  # some can be loaded, but not saved
    blank = saved.generation_config.to_json_string()
    plain(saved, tokenizer, folder, *args, **kwargs)
    generation = Path(folder, "generation_config.json")
    if not generation.exists() or generation.read_text() == blank:  # else you wrote it
        generation.write_text(model.generation_config.to_json_string())
    copy_files(source, folder)


def tensors_of(plain, model, cfg, *args, **kwargs):
    """Adds buffers, leaves out the copy of a tied head, and merges adapters into their layers."""
    parameters = dict(model.named_parameters())
    buffers = {name: x for name, x in model.state_dict().items() if name not in parameters}
    tensors = without_tied(buffers | plain(model, cfg, *args, **kwargs), model)
    # transformers renames and merges some tensors when it loads them, such as experts.
    tensors = transformers.core_model_loading.revert_weight_conversion(model, tensors)
    if cfg.lora_rank > 0:
        from extras import lora

        return lora.Merged(tensors, model, rounded=cfg.dtype == "bfloat16")
    return tensors


def without_tied(tensors: dict, model) -> dict:
    tied = model.all_tied_weights_keys
    return {n: x.detach() for n, x in tensors.items() if n.replace(".base_layer", "") not in tied}


# Files of multimodal models that servers need, and of tokenizers that converters (llama.cpp) need.
PROCESSORS = "preprocessor_config.json processor_config.json video_preprocessor_config.json"
TOKENIZERS = """tokenizer.model tokenizer.model.v3 tekken.json tiktoken.model spiece.model
sentencepiece.bpe.model vocab.json merges.txt vocab.txt added_tokens.json special_tokens_map.json"""


def copy_files(model: str, folder: Path) -> None:
    """Copies files that save_pretrained leaves out. A hub model's tokenizer files are cached."""
    may_miss = ("missing_entries", "connection_errors")
    options = {f"_raise_exceptions_for_{what}": False for what in may_miss}
    for name in f"{PROCESSORS} {TOKENIZERS}".split():
        options["local_files_only"] = name in TOKENIZERS
        path = cached_file(model, name, **options)
        if path is not None and not Path(folder, name).exists():
            shutil.copy(path, folder)


# -- Parts of a run that depend on its models


def resolve_auto(plain, cfg, model, *args, **kwargs):
    """Replaces `auto` with the best values for the model and the machine; config.json has them. The
    plain function decides the others."""
    is_small = model.num_parameters() < fast.SMALL
    theirs = plain(cfg, model, *args, **kwargs)
    if digests.changed("resolve_auto"):
        return theirs
    of_page = dict(cpu="float32", cuda="bfloat16")[model.device.type]  # grpo.py's own choice
    dtype = theirs.dtype
    if cfg.dtype == "auto" and dtype == of_page:
        is_fast = torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported()
        if model.device.type == "cuda":
            is_fast = torch.cuda.is_bf16_supported(including_emulation=False)
        dtype = "bfloat16" if is_fast and not is_small else "float32"
    rollout = cfg.rollout
    has_vllm = importlib.util.find_spec("vllm") is not None
    # vLLM's GPU build would use the GPU, even with --device cpu.
    has_vllm = has_vllm and (model.device.type == "cuda" or not torch.cuda.is_available())
    if rollout == "auto" and has_vllm and not is_small and dtype != "float64":
        rollout = "vllm"
    if rollout == "auto" or theirs.rollout != "hf":
        rollout = theirs.rollout
    # On a GPU vLLM sets one thread later, and then torch would compile all layers once more.
    as_vllm = rollout == "vllm" and model.device.type == "cuda"
    if is_small or (as_vllm and "OMP_NUM_THREADS" not in os.environ):
        torch.set_num_threads(1)
    return replace(theirs, dtype=dtype, rollout=rollout)


def load_reference(plain, run, *args, **kwargs):
    """The policy without its adapters, if it has any, because the plain function would load the
    model once more. If you have changed load_reference, it runs in any case."""
    cfg, policy = run.cfg, run.policy
    needs_none = cfg.beta > 0 and cfg.lora_rank > 0 and not cfg.reference
    if needs_none and not digests.changed("load_reference"):
        from extras import lora

        return lora.AdaptersOff(policy)
    reference = plain(run, *args, **kwargs)
    if hasattr(reference, "model") and cfg.reference:
        with mistakes_in(f"--reference {cfg.reference}", (ValueError,)):
            load = functools.partial(grpo.load_tokenizer, cfg=cfg)
            models = reference.model, policy.model
            preflight.check_reference(cfg.reference, load, run.tokenizer, *models)
    return reference


def make_optimizer(plain, policy, cfg, *args, **kwargs) -> torch.optim.Optimizer:
    optimizer = plain(policy, cfg, *args, **kwargs)
    yours = {group.get("weight_decay", 0.0) for group in optimizer.param_groups} - {0.0}
    why = f"make_optimizer has its own, {', '.join(map(str, yours))}"
    require(not yours or cfg.weight_decay in {0.0, *yours}, "weight_decay", why)
    if cfg.weight_decay > 0 and not yours:
        held = {p for group in optimizer.param_groups for p in group["params"]}
        for name, p in policy.named_parameters():
            is_held = p in held or p.dim() < 2 or not p.requires_grad
            require(is_held, "weight_decay", f"the optimizer of make_optimizer leaves out {name}")
        optimizer.register_step_pre_hook(functools.partial(decay, cfg.weight_decay))
    return optimizer


@torch.no_grad()
def decay(weight_decay: float, optimizer, *_) -> None:
    """Decays weights as AdamW does, but only matrices."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            if p.grad is not None and p.dim() >= 2:
                p.mul_(1 - group["lr"] * weight_decay)


# -- Samplers


def make_sampler(plain, run, *args, **kwargs):
    """Makes and checks the sampler, and wraps the environment around it, if there is one."""
    cfg, model = run.cfg, run.policy.model
    # The plain function reads these. It adds the tokenizer's EOS, unless you have changed that.
    own, eos = np.ravel(model.generation_config.eos_token_id), run.tokenizer.eos_token_id
    stop_ids = [i for i in stop_ids_of(model, run.tokenizer) if i != eos or i in own]
    model.generation_config.eos_token_id = stop_ids
    start = functools.partial(plain, run, *args, **kwargs)
    if cfg.rollout == "hf":
        sampler = start_hf(run, start)
        tune(run)
    else:
        tune(run)
        sampler = start_vllm(run, start) if cfg.rollout == "vllm" else start()  # a choice of yours
    sampler.stop_ids = sampled_ones(sampler.stop_ids, model)
    model.generation_config.eos_token_id = sampler.stop_ids  # saved, so that servers stop there
    sampler.close = functools.cache(sampler.close)  # once: by cleanup at a failure, else by train
    cleanup.callback(sampler.close)
    if cfg.environment:
        from extras import agents

        sampler = agents.around(sampler, run)
    run.first_sampler = sampler  # one that you make later may have other weights
    return sampler


def start_hf(run, start):
    model = run.policy.model
    with mistakes_in(f"--rollout hf: {type(model).__name__} cannot sample"):
        sampler = start()
        if type(sampler) is grpo.HFSampler and not has_plain_cache(model):
            name = type(model).__name__
            ranks.say(f"sample_batch cannot use the cache of {name}, so its generate() samples")
            sampler = GenerateSampler(model, sampler.stop_ids, sampler.cfg)
        preflight.check_padding(run, sampler)
    # The cache grows, and each length would be compiled.
    sampler.generate = torch.compiler.set_stance("force_eager")(sampler.generate)
    return sampler


def tune(run) -> None:
    if run.cfg.lora_rank > 0 and run.cfg.dtype == "bfloat16":
        from extras import lora

        lora.halve_frozen(run.policy.model)
    fast.tune_for_machine(run.policy, run.train_prompts, run.cfg)


def start_vllm(run, start):
    cfg = run.cfg
    require(0.01 <= cfg.temperature <= 2, "temperature", "vLLM allows 0.01 to 2; hf allows any")
    ranks.say("starting vLLM, which takes a minute or more")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    if cfg.dtype == "float32":  # else its attention multiplies in TF32: a gap of 1e-3
        os.environ["TRITON_F32_DEFAULT"] = "ieee"
    with mistakes_in(f"--rollout {cfg.rollout}: vLLM did not start (hf works without it)"):
        sampler = start()
    sampler.load_weights = nan_in_new_memory()(sampler.load_weights)
    for module in run.policy.model.modules():  # after vLLM's import, their classes read this
        module.do_not_compile = True
    return sampler


def has_plain_cache(model) -> bool:
    """True if the cache has only keys and values, and forward takes the positions of the tokens."""
    names = inspect.signature(model.forward).parameters
    if not {"past_key_values", "position_ids", "logits_to_keep"} <= names.keys():
        return False
    with torch.no_grad():
        ids = torch.zeros(1, 1, dtype=torch.long, device=model.device)
        cache = getattr(model(ids, use_cache=True), "past_key_values", None)
    layers = getattr(cache, "layers", [None])
    kinds = (
        transformers.cache_utils.DynamicLayer,
        transformers.cache_utils.DynamicSlidingWindowLayer,
    )
    return all(type(layer) in kinds for layer in layers)


class GenerateSampler(grpo.HFSampler):
    """For models with other caches, which grpo.py's sample_batch cannot use, but their `generate`
    can. It computes all rows until the last one stops."""

    def generate(self, prompts, seeds, temperature, limits=None) -> list[dict]:
        limits = limits or [self.cfg.max_completion_length] * len(prompts)
        completions = []
        for start in range(0, len(prompts), 256):
            part = slice(start, start + 256)
            completions += self.batch(prompts[part], seeds[part], temperature, limits[part])
        return completions

    @torch.no_grad()
    def batch(self, prompts, seeds, temperature, limits) -> list[dict]:
        model, stop_ids, cfg = self.model, self.stop_ids, self.cfg
        device = model.device
        randoms = [np.random.default_rng(seed).random(max(limits)) for seed in seeds]
        randoms = torch.tensor(np.array(randoms), device=model.device)  # [N, T]
        columns = []  # of log-probabilities, [N, 1] each

        def choose(_, logits):  # [N, V]. Other tokens get -inf, so that generate must take this one
            token, logp = grpo.sample_token(logits, temperature, randoms[:, len(columns), None])
            columns.append(logp)
            return torch.full_like(logits, -math.inf).scatter(1, token, 0.0)

        own = model.generation_config  # it may set top-p, and other end tokens
        model.generation_config = transformers.GenerationConfig()
        with grpo.autocast(model.device, cfg.dtype, keep_weights=True):
            ids = model.generate(
                grpo.padded([p.ids for p in prompts], "left").to(device),  # [N, P]
                attention_mask=grpo.padded([p.ids * 0 + 1 for p in prompts], "left").to(device),
                logits_processor=[choose],
                max_new_tokens=max(limits),
                eos_token_id=stop_ids,
                pad_token_id=stop_ids[0],
            )
        model.generation_config = own
        ids = ids[:, -len(columns) :].cpu().numpy()  # [N, T], T of the longest
        logps = torch.cat(columns, 1).cpu().numpy()
        completions = []
        for row, limit in enumerate(limits):
            stops = np.flatnonzero(np.isin(ids[row, :limit], stop_ids))
            T = 1 + min(stops, default=limit - 1)  # with the stop token
            completions.append(dict(completion_ids=ids[row, :T], sampler_logps=logps[row, :T]))
        return completions


def vllm_options(plain, model, longest: int, cfg, *args, **kwargs) -> dict:
    from vllm.platforms import current_platform

    if model.device.type == "cpu":
        type(current_platform).simple_compile_backend = "eager"  # compiling takes 10 s
    # transformers ties no head that differs from the embeddings, whatever the config says.
    overrides = dict(tie_word_embeddings=len(model.all_tied_weights_keys) > 0)
    possible = preflight.longest_text(model, longest, cfg)
    return dict(hf_overrides=overrides) | plain(model, possible, cfg, *args, **kwargs)


def repack(plain, engine_model, *args, **kwargs) -> None:
    """Skips models without a head of their own: the plain function repacks only that."""
    if hasattr(getattr(engine_model, "lm_head", None), "quant_method"):
        plain(engine_model, *args, **kwargs)


def fill_with_nan(plain, engine_model, *args, **kwargs) -> None:
    """vLLM's CPU build multiplies by packed copies of the weights, which it renews when weights
    arrive: those of experts only if they have no kernel yet, so the kernel is removed."""
    plain(engine_model, *args, **kwargs)
    on_cpu = next(engine_model.parameters()).device.type == "cpu"
    for module in engine_model.modules():
        if on_cpu and hasattr(getattr(module, "quant_method", None), "moe_kernel"):
            module.quant_method.moe_kernel = None
        if hasattr(module, "cpu_linear"):
            module.cpu_linear = functools.partial(only_nan, module.cpu_linear)


def only_nan(linear, *args):
    return linear(*args) * math.nan


@contextlib.contextmanager
def nan_in_new_memory():
    """vLLM joins some weights, such as q, k and v, in newly allocated memory. If one of them did
    not arrive, its part would keep the memory's old content, perhaps the old weights."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)  # torch.empty fills in nan
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
