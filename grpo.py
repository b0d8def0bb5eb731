"""GRPO in one file: sample a group of answers per prompt, reward them, push up what beat its own group.

    python grpo.py                                          # bundled tiny model, laptop CPU
    torchrun --nproc_per_node=2 grpo.py                     # the same run, the same gradient, two processes
    torchrun --nproc_per_node=8 grpo.py --model Qwen/Qwen2.5-1.5B-Instruct --train_data train.jsonl --reward gsm8k

The file reads in the order in which it runs: config, data, policy, rollout, rewards and advantages, objective,
update, eval, checkpoint, main. N = samples, T = completion tokens (padded), L = prompt + completion, V = vocabulary.
Left out on purpose: critics, FSDP, tools, asynchronous rollouts (README.md says what to use instead).
"""

import argparse
import contextlib
import dataclasses
import difflib
import gc
import importlib.util
import json
import math
import os
import random
import re
import shlex
import shutil
import signal
import string
import sys
import time
import warnings
from dataclasses import dataclass, field
from datetime import timedelta

# Before `import torch`: idle OpenMP threads that spin make a step 5 to 30 times slower on busy cores.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# Large CPU tensors in pages of 2 MB: a tenth of the page faults, 0.85 to 0.96 of an update at 30 M parameters.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import numpy as np
import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.rendezvous import rendezvous
from torch.nn.parallel import DistributedDataParallel

import reward as reward_module
import view
from view import say

HERE = os.path.dirname(os.path.abspath(__file__))
HEAD_CHUNK = 2**24  # logits alive at once in the output head, in elements: 64 MB in float32
GENERATE_ROWS = 256  # rows of one HF generate call
BAD_STEPS = 5  # steps in a row without a finite gradient that end the run


class ConfigError(Exception):
    """What the user asked for cannot be done: one line that names the flag or file. Exit code 2."""


class TrainingError(Exception):
    """The run cannot go on: a message that says why. Exit code 1."""


def first_line(error: Exception) -> str:
    return (str(error).strip() or repr(error)).splitlines()[0]


# ----------------------------------------------------------------------------------------------------------------
# Config: every field is a flag


def flag(default, help, choices=None, low=None):
    return field(default=default, metadata={"help": help, "choices": choices, "low": low})


@dataclass
class Config:
    # model and data
    model: str = flag(os.path.join(HERE, "sample_data", "model"), "policy: a directory or a Hugging Face hub name")
    tokenizer: str = flag("", "directory or hub name of the tokenizer; empty: the model's own")
    train_data: str = flag(
        os.path.join(HERE, "sample_data", "train.jsonl"),
        "a JSONL, JSON or parquet file, or a hub dataset name:config:split",
    )
    eval_data: str = flag(os.path.join(HERE, "sample_data", "eval.jsonl"), "held-out rows; empty: no eval")
    reward: str = flag("answer", "name[:weight],... or file.py:function[:weight]; the first one is the eval accuracy")
    reward_timeout: float = flag(10.0, "seconds that one call of a reward from a file may take")
    reward_failure: str = flag("zero", "a failed reward counts as 0, or its sample is left out", ("zero", "exclude"))
    prompt_template: str = flag("", 'made from columns, as in "{question}\\nThink first."; empty: the column prompt')
    show_prompt: bool = flag(False, "print the first prompt, as text and as ids, and exit")
    system_prompt: str = flag("", "system message put before every prompt (needs a chat template)")
    max_prompt_length: int = flag(512, "tokens; longer prompts are dropped and counted", low=1)
    # rollout
    num_prompts: int = flag(32, "prompts per step, over all ranks", low=1)
    num_generations: int = flag(8, "completions per prompt: the group, G")
    max_completion_length: int = flag(40, "tokens; a completion that reaches it is cut off", low=1)
    temperature: float = flag(1.0, "of sampling, and of every log-probability")
    rollout: str = flag("auto", "who samples; auto: vllm where it runs, else hf", ("auto", "vllm", "hf"))
    vllm_gpu_memory_utilization: float = flag(0.3, "share of the GPU that the engine takes while it samples")
    vllm_tensor_parallel_size: int = flag(1, "ranks that share one engine", low=1)
    max_sampler_gap: float = flag(
        0.0, "mean |log-probability gap| to the sampler that stops the run; 0: by dtype", low=0
    )
    tis_cap: float = flag(2.0, "truncated importance weight, trainer over sampler, per token; 0: off", low=0)
    # advantages and objective
    scale_rewards: str = flag("group", "divide r - mean by the std of", ("group", "batch", "none"))
    loss_reduction: str = flag("token", "what weighs the same in the loss", ("token", "sequence", "constant"))
    kl_estimator: str = flag("wk3", "KL term of the loss", ("k1", "k2", "k3", "k4", "wk3"))
    kl_in: str = flag("loss", "where the KL penalty acts; reward takes k1 only", ("loss", "reward"))
    beta: float = flag(0.001, "KL coefficient; 0 loads no reference model", low=0)
    clip_low: float = flag(0.2, "the ratio is clipped below 1 - clip_low", low=0)
    clip_high: float = flag(0.28, "the ratio is clipped above 1 + clip_high", low=0)
    ratio_level: str = flag("token", "importance ratio per token, or per sequence (GSPO)", ("token", "sequence"))
    mask_truncated: bool = flag(False, "leave cut-off completions out of the loss (not out of the baseline)")
    non_stop_reward: float | None = flag(None, "reward of a completion that was cut off; none: as scored")
    advantage_noise: float = flag(0.0, "standard deviation of noise added to the advantages (studies only)", low=0)
    # update
    num_minibatches: int = flag(1, "optimiser steps per pass over a rollout", low=1)
    num_epochs: int = flag(1, "passes over a rollout", low=1)
    micro_batch_tokens: int = flag(2048, "tokens, padding included, of one forward and backward", low=1)
    share_prompt: str = flag("auto", "compute a prompt once for its group; auto: where it saves", ("auto", "on", "off"))
    learning_rate: float = flag(3e-4, "AdamW, float32 parameters", low=0)
    lr_schedule: str = flag("constant", "after the warmup", ("constant", "linear", "cosine"))
    warmup_steps: int = flag(0, "optimiser steps; 0: the first step already learns at the full rate", low=0)
    weight_decay: float = flag(0.0, "of matrices; norms and biases never decay", low=0)
    max_grad_norm: float = flag(1.0, "gradient norm is clipped to this; 0: off", low=0)
    max_steps: int = flag(20, "rollouts; each is num_minibatches * num_epochs optimiser steps", low=0)
    gradient_checkpointing: bool = flag(False, "recompute activations in backward: less memory, a third more time")
    compile: bool = flag(False, "torch.compile the model body")
    dtype: str = flag(
        "auto", "auto: bfloat16 autocast on cuda, else float32", ("auto", "float32", "bfloat16", "float64")
    )
    device: str = flag("auto", "auto: cuda, else mps, else cpu", ("auto", "cpu", "cuda", "mps"))
    seed: int = flag(0, "every random number is a function of it and the step", low=0)
    # output
    out_dir: str = flag("out", "where the run is written")
    eval_every: int = flag(5, "steps between evals; 0: only before the first and after the last step", low=0)
    eval_samples: int = flag(0, "samples per eval prompt at --temperature for pass@k; 0: greedy only", low=0)
    save_every: int = flag(10, "steps between checkpoints; 0: only after the last step", low=0)
    save_dtype: str = flag("float32", "of a checkpoint's model files", ("float32", "bfloat16"))
    keep: int = flag(2, "newest checkpoints kept, besides the best by eval accuracy; 0: all", low=0)
    resume: str = flag("", "continue from the newest checkpoint in --out_dir, or from this one")
    verbose: bool = flag(False, "show what vLLM and transformers print, too")
    log_completions: int = flag(64, "samples written to completions.jsonl per step; -1: all", low=-1)
    report_to: str = flag("none", "a dashboard, with TRL's metric names", ("none", "tensorboard", "wandb"))

    @property
    def updates_per_step(self) -> int:
        return self.num_minibatches * self.num_epochs


def parse_args(argv=None) -> Config:
    def boolean(text):
        return {"true": True, "1": True, "false": False, "0": False}.get(text.lower(), text)

    parser = argparse.ArgumentParser(prog="grpo.py", description=__doc__, allow_abbrev=False, exit_on_error=False)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    for f in dataclasses.fields(Config):
        shown = os.path.relpath(f.default, HERE) if str(f.default).startswith(HERE) else f.default
        about, choices = f.metadata["help"].replace("%", "%%"), f.metadata["choices"]
        options = dict(default=f.default, help=f"{about} [{shown}]", metavar="|".join(choices) if choices else "X")
        if f.type is bool:
            options |= dict(type=boolean, nargs="?", const=True)
        elif f.name == "resume":
            options |= dict(nargs="?", const="latest")
        elif f.type == float | None:
            options |= dict(type=lambda text: None if text.lower() == "none" else float(text))
        else:
            options |= dict(type=f.type)
        parser.add_argument(f"--{f.name}", **options)
    try:
        values, unknown = parser.parse_known_args(argv)
    except argparse.ArgumentError as error:
        raise ConfigError(str(error).removeprefix("argument ")) from None
    if unknown:
        near = difflib.get_close_matches(unknown[0].split("=")[0], [f"--{name}" for name in vars(values)], n=1)
        raise ConfigError(f"unknown flag {unknown[0]}" + (f"; did you mean {near[0]}?" if near else "; see --help"))
    return validate(Config(**vars(values)))


def validate(cfg: Config) -> Config:
    """Impossible values stop here, before anything is loaded or written."""

    def need(fine, name, why):
        if not fine:
            raise ConfigError(f"--{name} {getattr(cfg, name)}: {why}")

    for f in dataclasses.fields(cfg):
        value, choices, low = getattr(cfg, f.name), f.metadata["choices"], f.metadata["low"]
        need(f.type is not bool or isinstance(value, bool), f.name, "must be true or false")
        need(not isinstance(value, float) or math.isfinite(value), f.name, "must be a finite number")
        need(not choices or value in choices, f.name, f"must be one of {', '.join(choices or ())}")
        need(low is None or value >= low, f.name, f"must be at least {low}")
    need(cfg.num_generations > 1, "num_generations", "must be at least 2: a group of one has no baseline")
    need(cfg.temperature > 0, "temperature", "must be above 0")
    need(cfg.reward_timeout > 0, "reward_timeout", "must be above 0")
    need(0 < cfg.vllm_gpu_memory_utilization <= 1, "vllm_gpu_memory_utilization", "must be in (0, 1]")
    need(cfg.clip_low <= 1, "clip_low", "must be at most 1, a ratio is never negative")
    need(
        cfg.num_minibatches <= cfg.num_prompts * cfg.num_generations, "num_minibatches", "more than the step's samples"
    )
    there = cfg.report_to == "none" or importlib.util.find_spec(cfg.report_to)
    need(there, "report_to", f"not installed; pip install {cfg.report_to}")
    ranks, together = int(os.environ.get("WORLD_SIZE", 1)), cfg.vllm_tensor_parallel_size
    need(ranks % together == 0, "vllm_tensor_parallel_size", f"must divide the number of ranks, {ranks}")
    recomputed = cfg.gradient_checkpointing or cfg.compile
    need(cfg.share_prompt != "on" or not recomputed, "share_prompt", "not with --gradient_checkpointing or --compile")
    k1 = cfg.kl_in == "loss" or cfg.beta == 0 or cfg.kl_estimator == "k1"
    need(k1, "kl_in", f"takes --kl_estimator k1 only: the gradient of {cfg.kl_estimator} points elsewhere there")
    return cfg


# ----------------------------------------------------------------------------------------------------------------
# Ranks: the same code with one process and with many


@dataclass
class World:
    rank: int
    size: int
    device: torch.device

    def gather(self, items: list) -> list:
        """The lists of all ranks, one after the other, on every rank."""
        if self.size == 1:
            return items
        parts = [None] * self.size
        dist.all_gather_object(parts, items)
        return [item for part in parts for item in part]


def pick_device(cfg: Config) -> torch.device:
    kind = cfg.device
    if kind == "auto":
        kind = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    if kind == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: torch sees no GPU")
    return torch.device(kind, int(os.environ.get("LOCAL_RANK", 0))) if kind == "cuda" else torch.device(kind)


def join_world(device: torch.device) -> World:
    """Under torchrun, meet the other ranks. Objects travel over gloo, gradients over NCCL where there is a GPU."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if "RANK" not in os.environ:
        return World(0, 1, device)
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        store, rank, size = next(rendezvous("env://"))
        if os.environ.get("GROUP_WORLD_SIZE", "1") == "1":  # torchrun --max_restarts keeps the addresses of the dead
            store = dist.PrefixStore(f"start_{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timedelta(minutes=30))
    return World(dist.get_rank(), dist.get_world_size(), device)


# ----------------------------------------------------------------------------------------------------------------
# Data


@dataclass
class Prompt:
    ids: list[int]
    text: str
    row: dict


@dataclass
class Sample:
    """One completion. Plain lists and arrays: padding happens at the last moment, per micro-batch."""

    group: int  # which prompt of the step: an instance, so a prompt drawn twice makes two groups
    prompt: Prompt
    completion_ids: list[int]  # the sampled EOS included: stopping is an action, too
    sampler_logps: np.ndarray  # [T]
    finish_reason: str  # "stop" or "length"
    text: str = ""
    reward: float = 0.0
    parts: dict = field(default_factory=dict)
    advantage: float = 0.0
    in_loss: bool = True
    old_logps: np.ndarray | None = None  # [T], before the first update of the step; None: not needed
    ref_logps: np.ndarray | None = None  # [T], likewise

    def __len__(self):
        return len(self.prompt.ids) + len(self.completion_ids)


def load_tokenizer(cfg: Config):
    from transformers import AutoTokenizer

    name, path = ("tokenizer", cfg.tokenizer) if cfg.tokenizer else ("model", cfg.model)
    try:
        return AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"--{name} {path}: {first_line(error)}") from None


def read_rows(path: str, name: str) -> list[dict]:
    """Rows of a JSONL file, of a JSON file that holds a list, or of what `datasets` loads. Errors name flag and row."""
    hub = re.fullmatch(r"[\w.-]+/[\w.-]+(:[\w.-]*){0,2}", path) and not os.path.exists(path)
    rows = dataset_rows(path, name) if hub or path.endswith(".parquet") else json_rows(path, name)
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        bad = next((i for i, row in enumerate(rows, 1) if not isinstance(row, dict)), 1)
        raise ConfigError(f"--{name} {path} row {bad}: must be a JSON object")
    if not rows:
        raise ConfigError(f"--{name} {path}: no rows")
    return rows


def json_rows(path: str, name: str) -> list:
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--{name} {path}: {getattr(error, 'strerror', None) or error}") from None
    where = ""
    try:
        if path.endswith(".json"):
            return json.loads(text)
        rows = []
        for number, line in enumerate(text.split("\n"), 1):
            where = f" row {number}"
            if line.strip():
                rows.append(json.loads(line))
        return rows
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"--{name} {path}{where}: not valid JSON ({error})") from None


def dataset_rows(path: str, name: str) -> list[dict]:
    """Rows of a parquet file, or of a hub dataset given as name, name:config or name:config:split (default: train)."""
    try:
        from datasets import load_dataset
    except ImportError:
        raise ConfigError(
            f"--{name} {path}: no such file; a hub dataset or parquet needs pip install datasets"
        ) from None
    try:
        if path.endswith(".parquet"):
            return list(load_dataset("parquet", data_files=path, split="train"))
        repository, config, split = (path.split(":") + ["", ""])[:3]
        return list(load_dataset(repository, config or None, split=split or "train"))
    except Exception as error:
        raise ConfigError(f"--{name} {path}: {first_line(error)}") from None


def encode_prompts(rows: list[dict], columns: set[str], tokenizer, cfg: Config, name: str) -> list[Prompt]:
    """Rows to token ids. `prompt` is a string (taken as it is) or chat messages (through the chat template)."""
    path, prompts = getattr(cfg, name), []
    template = cfg.prompt_template.replace("\\n", "\n")  # as it arrives from a shell
    try:
        fields = {field.split(".")[0].split("[")[0] for _, field, *_ in string.Formatter().parse(template) if field}
    except ValueError as error:
        raise ConfigError(f"--prompt_template {cfg.prompt_template!r}: {error}") from None
    for number, row in enumerate(rows, 1):
        for column in sorted(columns | (fields if template else {"prompt"})):
            if column not in row:
                why = f", which --reward {cfg.reward} reads" if column in columns else "; see --prompt_template"
                raise ConfigError(f"--{name} {path} row {number}: no column '{column}'{why}")
        prompt = template.format_map(row) if template else row["prompt"]
        messages = [{"role": "user", "content": prompt}] if cfg.system_prompt and isinstance(prompt, str) else prompt
        if isinstance(messages, str):
            text, special = messages, True
        else:
            if not tokenizer.chat_template:
                raise ConfigError(
                    f"--{name} {path} row {number}: chat messages, but the tokenizer has no chat template"
                )
            if cfg.system_prompt:
                messages = [{"role": "system", "content": cfg.system_prompt}, *messages]
            try:
                text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            except Exception as error:
                raise ConfigError(f"--{name} {path} row {number}: chat template: {error}") from None
            special = False  # the template already wrote the BOS
        ids = tokenizer(text, add_special_tokens=special)["input_ids"]
        if not ids:
            raise ConfigError(f"--{name} {path} row {number}: empty prompt")
        if len(ids) <= cfg.max_prompt_length:
            prompts.append(Prompt(ids, text, row))
    if not prompts:
        raise ConfigError(f"--{name} {path}: every prompt is longer than --max_prompt_length {cfg.max_prompt_length}")
    return prompts


def load_prompts(name: str, rewards, tokenizer, cfg: Config) -> tuple[list[Prompt], int]:
    """The prompts of --train_data or --eval_data, and how many were dropped for their length."""
    rows = read_rows(getattr(cfg, name), name)
    prompts = encode_prompts(rows, {column for r in rewards for column in r.columns}, tokenizer, cfg, name)
    return prompts, len(rows) - len(prompts)


def prompts_of_step(prompts: list[Prompt], step: int, cfg: Config) -> list[Prompt]:
    """A fresh shuffle per epoch, as a pure function of (seed, step): a resumed run has no position to restore."""
    chosen = []
    for position in range((step - 1) * cfg.num_prompts, step * cfg.num_prompts):
        epoch, offset = divmod(position, len(prompts))
        if not chosen or offset == 0:
            order = np.random.default_rng((cfg.seed, epoch)).permutation(len(prompts))
        chosen.append(prompts[order[offset]])
    return chosen


# ----------------------------------------------------------------------------------------------------------------
# Policy: a language model that returns log-probabilities of completion tokens


def load_model(path: str, cfg: Config):
    """A Hugging Face causal language model, float32 parameters, no dropout: every forward gives the same numbers."""
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(path)
        for key, value in vars(config).items():
            if key.endswith(("dropout", "pdrop", "layerdrop")) and isinstance(value, float):
                setattr(config, key, 0.0)
        # float32 even where the forward runs in bfloat16: at lr 1e-6 pure bfloat16 loses 98 % of the updates
        dtype = torch.float64 if cfg.dtype == "float64" else torch.float32
        model = AutoModelForCausalLM.from_pretrained(path, config=config, dtype=dtype)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"--model {path}: {first_line(error)}") from None
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model.eval()


def special_ids(generation_config, tokenizer, cfg: Config) -> tuple[list[int], int]:
    """All ids that end a completion, and one to pad with (which may be one of them: no mask is made from ids)."""
    eos = generation_config.eos_token_id
    eos = eos if isinstance(eos, list) else [] if eos is None else [eos]
    if tokenizer.eos_token_id is not None and tokenizer.eos_token_id not in eos:
        eos = [*eos, tokenizer.eos_token_id]
    if not eos:
        raise ConfigError(f"--model {cfg.model}: neither generation_config nor tokenizer names an EOS token")
    return eos, eos[0] if tokenizer.pad_token_id is None else tokenizer.pad_token_id


class HeadLogps(torch.autograd.Function):
    """hidden [n, H], head weight [V, H] and bias [V] or None, targets [n] -> logps [n], entropy [n] (no gradient).

    Logits [n, V] never exist: a chunk of HEAD_CHUNK of them is there at a time, and all but the last again in backward,
    where the gradient of a log-probability by its logits, onehot(target) - softmax, is written over it. Half the time
    of log_softmax under torch.utils.checkpoint.
    """

    @staticmethod
    def logits(hidden, weight, bias, temperature):
        logits = nn.functional.linear(hidden, weight, bias)  # [c, V]
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return logits if temperature == 1 else logits.div_(temperature)

    @staticmethod
    def forward(ctx, hidden, weight, bias, targets, temperature):
        ctx.size, parts = max(1, HEAD_CHUNK // weight.shape[0]), []
        for part, y in zip(hidden.split(ctx.size), targets.split(ctx.size), strict=True):
            logits = HeadLogps.logits(part, weight, bias, temperature)
            top = logits.amax(-1, keepdim=True)
            exps = logits.sub_(top).exp()
            total = exps.sum(-1)  # [c]
            logps = logits.gather(-1, y[:, None])[:, 0] - total.log()
            entropy = total.log() - torch.linalg.vecdot(exps, logits) / total  # / total: exps to probabilities
            parts.append((logps, entropy, total.log() + top[:, 0]))
        ctx.kept = exps.div_(total[:, None])  # the last chunk's softmax: backward begins there
        logps, entropy, norms = (torch.cat(part) for part in zip(*parts, strict=True))  # [n] each
        ctx.save_for_backward(hidden, weight, bias, targets, norms)
        ctx.temperature, ctx.autocast = temperature, torch.is_autocast_enabled(hidden.device.type)
        ctx.mark_non_differentiable(entropy)
        return logps, entropy

    @staticmethod
    def backward(ctx, grad_logps, _):
        hidden, weight, bias, targets, norms = ctx.saved_tensors
        dtype = torch.get_autocast_dtype(hidden.device.type) if ctx.autocast else hidden.dtype
        hidden, matrix, shift = (None if x is None else x.to(dtype) for x in (hidden, weight, bias))
        grad_weight, grad_bias = None, None if bias is None else torch.zeros_like(bias)
        grads = grad_logps / ctx.temperature  # logits are divided by it
        chunks = zip(*(x.split(ctx.size)[::-1] for x in (hidden, targets, norms, grads)), strict=True)
        grad_hidden, softmax, ctx.kept = [], ctx.kept, None
        with torch.autocast(hidden.device.type, enabled=False):
            for part, y, norm, grad in chunks:
                if softmax is None:
                    softmax = HeadLogps.logits(part, matrix, shift, ctx.temperature).sub_(norm[:, None]).exp_()
                grad_logits = softmax.mul_(-grad[:, None]).scatter_add_(-1, y[:, None], grad[:, None]).to(dtype)
                grad_hidden.append(grad_logits @ matrix)
                if ctx.needs_input_grad[1]:  # else frozen
                    product = (grad_logits.T @ part).to(weight.dtype)  # [V, H]
                    grad_weight = product if grad_weight is None else grad_weight.add_(product)
                if grad_bias is not None:
                    grad_bias += grad_logits.sum(0)
                softmax = None
        return torch.cat(grad_hidden[::-1]), grad_weight, grad_bias, None, None


class Policy(nn.Module):
    """Wraps the model so that DDP's hooks see one forward, from token ids to log-probabilities.

    forward: input_ids [N, L] right-padded, prompt_lengths [N], completion_lengths [N] ->
    logps [N, T] and entropy [N, T] in nats, 0 on padding. Gradient flows through logps only.
    With groups [N], rows of one group have the same prompt, which is computed once: the same function, fewer tokens.
    """

    def __init__(self, model, temperature: float):
        super().__init__()
        self.model = model
        self.temperature = temperature
        self.backbone = [model.base_model]  # in a list: not a second path to the same parameters
        self.head = [model.get_output_embeddings()]
        self.plain_head = self.head_is_plain()
        self.exact_cache = self.plain_head and self.continues_from_a_cache()

    @torch.no_grad()
    def head_is_plain(self) -> bool:
        """Some architectures scale or soft-cap after the head: there the model's own logits are used."""
        ids = torch.arange(1, 9, device=next(self.model.parameters()).device)[None]
        if not isinstance(self.head[0], nn.Linear) or self.backbone[0] is self.model:
            return False
        hidden = self.backbone[0](input_ids=ids, use_cache=False).last_hidden_state
        return torch.allclose(self.head[0](hidden), self.model(input_ids=ids, use_cache=False).logits, atol=1e-5)

    @property
    def can_share(self) -> bool:
        return self.exact_cache and not self.model.is_gradient_checkpointing  # layers that are recomputed keep no cache

    @torch.no_grad()
    def continues_from_a_cache(self) -> bool:
        """Whether a shared prompt changes nothing: not so for models whose cache holds no keys and values."""
        device = next(self.model.parameters()).device
        ids, lengths = torch.arange(1, 9, device=device).repeat(2, 1), torch.full((2,), 4, device=device)
        try:
            plain, shared = (self(ids, lengths, lengths, groups)[0] for groups in (None, torch.zeros_like(lengths)))
        except Exception:
            return False
        return torch.allclose(plain, shared, atol=1e-4)

    def forward(self, input_ids, prompt_lengths, completion_lengths, groups=None):
        T = int(completion_lengths.max())
        mask = torch.arange(T, device=input_ids.device) < completion_lengths[:, None]  # [N, T]
        row, t = mask.nonzero(as_tuple=True)  # [n], [n]: the n real completion tokens
        position = prompt_lengths[row] + t - 1  # a token is predicted by the position before it
        targets = input_ids[row, position + 1]  # [n]
        # No attention mask: attention is causal and the padding is on the right, so no token ever sees it.
        if groups is not None:
            hidden = self.shared_hidden(input_ids, prompt_lengths, groups, T)[row, t]  # [n, H]
        elif self.plain_head:
            hidden = self.backbone[0](input_ids=input_ids, use_cache=False).last_hidden_state[row, position]  # [n, H]
        if self.plain_head:
            head = self.head[0]
            logps, entropy = HeadLogps.apply(hidden, head.weight, head.bias, targets, self.temperature)  # [n], [n]
        else:
            logits = self.model(input_ids=input_ids, use_cache=False).logits[row, position]  # [n, V]
            logps, entropy = self.token_logps(logits, targets)
        return tuple(x.new_zeros(mask.shape).masked_scatter(mask, x) for x in (logps, entropy))  # [N, T] each

    def shared_hidden(self, input_ids, prompt_lengths, groups, T):
        """[N, T, H], of the position before each completion token. The gradient of a prompt's keys and values, which
        every row of its group continues from, is summed by autograd. 1.8 times faster at (128, 8, 64) tokens of
        prompt, G, tokens of completion, 4.3 times at (512, 16, 64), with 30 M parameters."""
        from transformers import DynamicCache

        names, which = groups.unique(return_inverse=True)  # [P], [N]: the row of its prompt
        first = (groups == names[:, None]).int().argmax(-1)  # [P]: a sample that has it
        L, device = int(prompt_lengths.max()), groups.device
        # Prompts are padded on the left here: a completion follows its prompt, also for a sliding window.
        column = torch.arange(L, device=device) - (L - prompt_lengths[:, None])  # [N, L]
        seen = column >= 0  # no mask where nothing is padded: the fast causal kernel
        mask = None if bool(seen.all()) else seen
        ids, position, cache = input_ids.gather(1, column.clamp(min=0))[first], column.clamp(min=0), DynamicCache()
        options = dict(past_key_values=cache, use_cache=True)
        prompts = self.backbone[0](
            input_ids=ids, position_ids=position[first], attention_mask=None if mask is None else mask[first], **options
        )
        last = prompts.last_hidden_state[which, -1:]  # [N, 1, H]
        if T == 1:
            return last
        cache.batch_select_indices(which)
        position = prompt_lengths[:, None] + torch.arange(T - 1, device=device)  # [N, T-1]: nothing follows the last
        ids = input_ids.gather(1, position.clamp(max=input_ids.shape[1] - 1))
        if mask is not None:
            mask = torch.cat([mask, torch.ones_like(ids, dtype=torch.bool)], 1)
        rest = self.backbone[0](input_ids=ids, position_ids=position, attention_mask=mask, **options)
        return torch.cat([last, rest.last_hidden_state], 1)

    def token_logps(self, logits, targets):
        """logits [n, V], targets [n] -> logps [n], entropy [n]. The logits are divided by T, in float32 at least."""
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) / self.temperature
        all_logps = logits.log_softmax(-1)  # [n, V]
        with torch.no_grad():
            entropy = torch.special.entr(all_logps.exp()).sum(-1)
        return all_logps.gather(-1, targets[:, None]).squeeze(-1), entropy


# ----------------------------------------------------------------------------------------------------------------
# Rollout: token ids in, token ids and log-probabilities out


@dataclass
class Completion:
    ids: list[int]
    logps: np.ndarray  # [T], after temperature
    finish_reason: str


class HFSampler:
    """Hugging Face generate on the policy's own weights: slow, runs everywhere, never stale."""

    def __init__(self, model, eos_ids: list[int], pad_id: int, cfg: Config):
        from transformers import GenerationConfig

        self.model, self.eos_ids, self.pad_id, self.cfg = model, eos_ids, pad_id, cfg
        # A model's own generation config may hold top-p or a repetition penalty: those would sample from a
        # distribution that is not the one being trained.
        self.model.generation_config = GenerationConfig(
            max_new_tokens=cfg.max_completion_length, eos_token_id=eos_ids, pad_token_id=pad_id, do_sample=False
        )

    def nothing(self, *_):
        pass

    push = sleep = wake = close = nothing  # the weights are the policy's own

    @torch.no_grad()
    def generate(self, prompts: list[list[int]], n: int, seeds: list[int], temperature: float):
        """n completions for each prompt, sample i from the random stream (seed, i); temperature 0 is greedy."""
        from transformers import LogitsProcessorList

        rows = [(p, i) for p in range(len(prompts)) for i in range(n)]
        rows.sort(key=lambda row: len(prompts[row[0]]))  # rows of one call have prompts of similar length
        completions = {}
        for start in range(0, len(rows), GENERATE_ROWS):
            part = rows[start : start + GENERATE_ROWS]
            width = max(len(prompts[p]) for p, _ in part)
            ids = torch.tensor([[self.pad_id] * (width - len(prompts[p])) + prompts[p] for p, _ in part])  # [N, P]
            mask = torch.tensor([[0] * (width - len(prompts[p])) + [1] * len(prompts[p]) for p, _ in part])
            sampling = SeededSampling([(seeds[p], i) for p, i in part], temperature, self.cfg.max_completion_length)
            device = self.model.device
            with autocast(self.cfg, device):
                out = self.model.generate(
                    input_ids=ids.to(device),
                    attention_mask=mask.to(device),
                    logits_processor=LogitsProcessorList([sampling]),
                )
            logps = torch.stack(sampling.logps, 1).cpu().numpy()  # [N, T]
            for row, tokens, lp in zip(part, out[:, width:].tolist(), logps, strict=True):
                ends = [t for t, token in enumerate(tokens) if token in self.eos_ids]
                length = ends[0] + 1 if ends else len(tokens)
                completions[row] = Completion(tokens[:length], lp[:length], "stop" if ends else "length")
        return [[completions[p, i] for i in range(n)] for p in range(len(prompts))]


class SeededSampling:
    """Inverse-CDF sampling with one random number per (sample, token): a sample does not depend on its neighbours.

    Plugs into generate as a logits processor: picks the token, notes its log-probability, leaves no other choice.
    """

    def __init__(self, streams: list[tuple], temperature: float, max_length: int):
        self.uniforms = torch.tensor(np.stack([np.random.default_rng(s).random(max_length) for s in streams]))  # [N, T]
        self.temperature = temperature
        self.logps = []

    def __call__(self, input_ids, logits):
        logps = (logits.float() / (self.temperature or 1.0)).log_softmax(-1)  # [N, V]
        if self.temperature == 0:
            token = logits.argmax(-1, keepdim=True)  # [N, 1]
        else:
            cumulative = logps.cpu().double().exp().cumsum(-1)  # [N, V]; float64: MPS has none, so on the CPU
            point = self.uniforms[:, len(self.logps), None] * cumulative[:, -1:]
            token = torch.searchsorted(cumulative, point, right=True).clamp(max=logits.shape[-1] - 1)
            token = token.to(logits.device)
        self.logps.append(logps.gather(-1, token).squeeze(-1))
        return torch.full_like(logits, -torch.inf).scatter(-1, token, 0.0)


class VLLMSampler:
    """A vLLM engine inside this process, one per rank or tensor-parallel group: weights are handed over in memory."""

    def __init__(self, eos_ids: list[int], longest_prompt: int, cfg: Config, world: World):
        from vllm import LLM, SamplingParams

        self.new_params, self.eos_ids, self.cfg = SamplingParams, eos_ids, cfg
        self.cuda, self.asleep = world.device.type == "cuda", False
        options = dict(model=cfg.model, dtype="bfloat16" if half_precision(cfg, world.device) else "float32")
        options |= dict(max_model_len=longest_prompt + cfg.max_completion_length, seed=cfg.seed)
        options |= dict(skip_tokenizer_init=True, generation_config="vllm", use_tqdm_on_load=False)
        options |= dict(logprobs_mode="processed_logprobs")  # after the temperature, as the trainer's are
        options |= dict(load_format="dummy")  # the first push brings the weights: none are read twice
        if self.cuda:
            options |= dict(gpu_memory_utilization=cfg.vllm_gpu_memory_utilization, enable_sleep_mode=True)
        else:
            options |= dict(kv_cache_memory_bytes=2**28, enforce_eager=True)
        if "RANK" in os.environ:
            options |= dict(distributed_executor_backend="external_launcher")
            options |= dict(tensor_parallel_size=cfg.vllm_tensor_parallel_size)
        with quiet(cfg):
            self.llm = LLM(**options)
        # A tensor that no push sets stays NaN, and the first rollout says so.
        self.llm.apply_model(lambda model: [p.data.fill_(math.nan) for p in model.parameters()] and None)

    def push(self, model):
        """In memory: reload, repack, forget cached prefixes."""
        from transformers.core_model_loading import revert_weight_conversion

        weights = {name: p.detach() for name, p in model.named_parameters()}  # a tied head is in it once
        weights = revert_weight_conversion(model, weights)  # the names of checkpoints, which the engine knows (MoE)
        self.llm.collective_rpc("reload_weights", kwargs=dict(weights_iterator=iter(weights.items())))
        self.llm.apply_model(repack)
        self.llm.reset_prefix_cache()  # its keys and values are the old policy's
        if self.asleep:
            self.llm.wake_up(tags=["kv_cache"])
            self.asleep = False

    def sleep(self):
        """Gives the GPU to the trainer. Level 2 drops the weights, too: the next push brings them."""
        if self.cuda and not self.asleep:
            self.llm.sleep(level=2)
            self.asleep = True

    def wake(self):
        """Weights first, the KV cache only after the push: the two peaks never meet."""
        if self.asleep:
            torch.cuda.empty_cache()
            self.llm.wake_up(tags=["weights"])

    def close(self):
        self.llm.llm_engine.engine_core.shutdown()

    def generate(self, prompts: list[list[int]], n: int, seeds: list[int], temperature: float):
        """As HFSampler.generate; vLLM seeds sample i with seed + i."""
        params = [
            self.new_params(
                n=n, seed=seed, temperature=temperature, max_tokens=self.cfg.max_completion_length,
                stop_token_ids=self.eos_ids, logprobs=0, detokenize=False,
            )
            for seed in seeds
        ]  # fmt: skip
        requests = self.llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        return [[self.completion(c) for c in request.outputs] for request in requests]

    def completion(self, output) -> Completion:
        try:  # by token id: the entry of a position may hold more than the sampled token
            pairs = zip(output.logprobs, output.token_ids, strict=True)
            logps = np.array([entry[token].logprob for entry, token in pairs], dtype=np.float32)
        except (KeyError, TypeError, ValueError):
            raise TrainingError("vLLM returned a token without its log-probability") from None
        if not np.isfinite(logps).all() or output.finish_reason not in ("stop", "length"):
            raise TrainingError(
                f"vLLM returned non-finite log-probabilities or a broken completion ({output.finish_reason}): some "
                "weights of the engine were never set, or the policy itself is not finite"
            )
        return Completion(list(output.token_ids), logps, output.finish_reason)


def repack(model) -> None:
    """What vLLM's CPU build packs when it starts, but not again when it reloads: a tied head, the experts of a MoE."""
    head = getattr(model, "lm_head", None)
    if hasattr(head, "quant_method"):
        head.quant_method.process_weights_after_loading(head)
    for module in model.modules():
        kernel = getattr(getattr(module, "quant_method", None), "moe_kernel", None)
        if kernel is not None and module.w2_weight.device.type == "cpu":
            kernel.fused_experts.process_weights_after_loading(module)


@contextlib.contextmanager
def quiet(cfg: Config):
    """Hides what libraries write to the terminal while an engine starts; an exception still comes through."""
    if cfg.verbose:
        yield
        return
    sys.stdout.flush()
    saved = [os.dup(1), os.dup(2)]
    with open(os.devnull, "w") as null:
        try:
            os.dup2(null.fileno(), 1)
            os.dup2(null.fileno(), 2)
            yield
        finally:
            for target, handle in enumerate(saved, 1):
                os.dup2(handle, target)
                os.close(handle)


def choose_sampler(cfg: Config, device: torch.device, small: bool) -> tuple[str, str]:
    """Which sampler, and why: vllm wherever it can be imported and has a build for this device."""
    if cfg.rollout == "hf":
        return "hf", "asked for"
    if cfg.rollout == "auto" and small:
        return "hf", "vLLM would take longer to start than it saves on a model this small"
    if device.type == "mps" or cfg.dtype == "float64":
        problem = f"vLLM has no {device.type} backend" if device.type == "mps" else "vLLM has no float64"
    else:
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # in this process: weights go by reference
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "INFO" if cfg.verbose else "ERROR")
        if device.type == "cpu" and not cfg.compile:
            os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # saves 10 s of C++ compiling at the first rollout
        try:
            from vllm.platforms import current_platform

            built = current_platform.is_cuda() if device.type == "cuda" else current_platform.is_cpu()
            problem = "" if built else f"the installed vllm is not a {device.type} build"
        except ImportError as error:
            problem = f"vllm cannot be imported: {error}"
    if problem and cfg.rollout == "vllm":
        lock = "requirements-cpu.txt" if device.type == "cpu" else "requirements.txt"
        raise ConfigError(f"--rollout vllm: {problem}; pip install --no-deps -r {lock}")
    return ("hf", problem) if problem else ("vllm", "asked for" if cfg.rollout == "vllm" else "found")


def make_sampler(kind: str, why: str, model, eos_ids, pad_id, longest_prompt: int, cfg: Config, world: World):
    """The sampler that choose_sampler chose; with --rollout auto, HF on every rank if an engine does not start."""
    sampler = problem = None
    if kind == "vllm":
        try:
            sampler = VLLMSampler(eos_ids, longest_prompt, cfg, world)
        except Exception as error:
            problem = f"vllm did not start: {first_line(error)}"
            if cfg.rollout == "vllm":
                raise TrainingError(f"{problem} (--verbose shows more)") from error
    problem = next((p for p in world.gather([problem]) if p), None)
    if sampler and not problem:
        return sampler, kind, why
    return HFSampler(model, eos_ids, pad_id, cfg), "hf", problem or why


def sample(sampler, prompts, n, temperature, stream, step, tokenizer, cfg: Config, world: World) -> list[Sample]:
    """n samples for each of this rank's share of the prompts, seeded by (seed, stream, step, prompt) alone."""
    together = cfg.vllm_tensor_parallel_size  # ranks that hold one engine sample the same; the first of them keeps it
    mine = range(world.rank // together, len(prompts), world.size // together)
    seeds = [seed_of(cfg.seed, stream, step, group) for group in mine]
    groups = sampler.generate([prompts[g].ids for g in mine], n, seeds, temperature)
    return [
        Sample(g, prompts[g], c.ids, c.logps, c.finish_reason, decode(tokenizer, c.ids))
        for g, completions in zip(mine, groups, strict=True)
        for c in completions
        if world.rank % together == 0
    ]


def seed_of(*numbers: int) -> int:
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0] >> 2)


def decode(tokenizer, ids: list[int]) -> str:
    """For the rewards and the eye only. Ids beyond the tokenizer (a padded vocabulary) have no text."""
    return tokenizer.decode([i for i in ids if i < len(tokenizer)], skip_special_tokens=True)


def half_precision(cfg: Config, device: torch.device) -> bool:
    return cfg.dtype == "bfloat16" or (cfg.dtype == "auto" and device.type == "cuda")


def autocast(cfg: Config, device: torch.device):
    return torch.autocast(device.type, torch.bfloat16, enabled=half_precision(cfg, device))


# ----------------------------------------------------------------------------------------------------------------
# Rewards and advantages


def load_rewards(cfg: Config) -> list:
    try:
        return reward_module.load_rewards(cfg.reward)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def score(samples: list[Sample], scorer, cfg: Config) -> dict:
    """Fills in the rewards; returns how many reward calls failed, by cause."""
    rows = [
        s.prompt.row
        | dict(completion_length=len(s.completion_ids), max_completion_length=cfg.max_completion_length)
        | dict(finish_reason=s.finish_reason, prompt_text=s.prompt.text)
        for s in samples
    ]
    scores = scorer.score([s.text for s in samples], rows)
    for i, sample in enumerate(samples):
        sample.reward = scores.totals[i]
        sample.parts = {name: values[i] for name, values in scores.parts.items()}
        if sample.finish_reason == "length" and cfg.non_stop_reward is not None:
            sample.reward = cfg.non_stop_reward
        if scores.failed[i] and cfg.reward_failure == "exclude":
            sample.reward = math.nan
    return scores.failures


def group_advantages(rewards, group_size: int, scale: str = "group", eps: float = 1e-4):
    """How much better than its own group each sample did. rewards [N], groups consecutive -> [N].

    "group": (r - mean) / (std + eps), std with ddof 1 (DeepSeekMath, arXiv 2402.03300, as in its code).
    "batch": the same mean, std over the whole step. "none": r - mean (Dr. GRPO, arXiv 2503.20783).
    A group whose rewards are all equal gives exactly 0. A NaN reward takes no part and gets 0.
    """
    grouped = rewards.view(-1, group_size)  # [N / G, G]
    there = ~grouped.isnan()
    mean = grouped.nanmean(1, keepdim=True)
    centred = torch.where(there, grouped - mean, 0.0)
    # float noise must not become a signal: 0.1 + 0.2 and 0.3 are the same reward
    tiny = 1e-6 * grouped.nan_to_num(0.0).abs().amax(1, keepdim=True).clamp(min=1.0)
    centred = torch.where(centred.abs().amax(1, keepdim=True) <= tiny, 0.0, centred)
    if scale == "group":
        count = there.sum(1, keepdim=True)
        std = (centred.square().sum(1, keepdim=True) / (count - 1).clamp(min=1)).sqrt()
        centred = centred / (std + eps)
    elif scale == "batch":
        centred = centred / (rewards[~rewards.isnan()].std() + eps)
    return centred.flatten()


def assign_advantages(samples: list[Sample], step: int, cfg: Config) -> float:
    """Advantages of the step's full list, so that a group can never be split wrongly. Returns frac_zero_std."""
    rewards = torch.tensor([s.reward for s in samples], dtype=torch.float64)
    advantages = group_advantages(rewards, cfg.num_generations, cfg.scale_rewards)
    frac_zero_std = (advantages.view(-1, cfg.num_generations) == 0).all(1).double().mean().item()
    noise = np.random.default_rng((cfg.seed, step, 1)).normal(0.0, cfg.advantage_noise, len(samples))
    for sample, advantage, eta in zip(samples, advantages.tolist(), noise, strict=True):
        sample.advantage = advantage + eta
        cut_off = cfg.mask_truncated and sample.finish_reason == "length"
        sample.in_loss = not cut_off and not math.isnan(sample.reward)
    return frac_zero_std


# ----------------------------------------------------------------------------------------------------------------
# Objective


def kl_estimate(logps, ref_logps, old_logps, estimator: str):
    """Per-token estimates of KL(policy || reference), all [N, T], from samples of the old policy.

    With d = log(policy / reference) and w = policy / old policy: k1 = d, k2 = d^2 / 2, k3 = exp(-d) - 1 + d
    (Schulman, joschu.net/blog/kl-approx.html), k4 = w k1, wk3 = w k3 (DeepSeek-V3.2, arXiv 2512.02556). As losses,
    only k2 (on-policy), k4 and wk3 have the KL's gradient: k1's is zero on average, k3's is biased far from the
    reference. The identity behind wk3: d(w k3)/dlogp = w k1.
    """
    d = logps - ref_logps
    w = (logps - old_logps).clamp(max=20).exp()  # the exponent is clamped, never the result: the slope survives
    k3 = torch.expm1((-d).clamp(max=20)) + d
    return {"k1": d, "k2": d.square() / 2, "k3": k3, "k4": w * d, "wk3": w * k3}[estimator]


def grpo_loss(logps, old_logps, ref_logps, sampler_logps, advantages, mask, cfg, n_tokens, n_sequences):
    """One micro-batch's share of the step's loss: a sum, whose weights carry the step's GLOBAL counts.

    logps, old_logps, ref_logps (None: no KL), sampler_logps (None: no correction), mask: [N, T]; advantages [N] or
    [N, T]; n_tokens, n_sequences: counts over all micro-batches and ranks of the optimiser step. The sum over any
    split of the samples is the whole batch's loss. Returns (loss, stats), stats being sums over tokens, too.
    """
    mask = mask.bool()

    def real(x):  # padding may hold anything, inf and nan too: neither value nor gradient sees it
        return torch.where(mask, x, torch.zeros_like(x))

    logps, old_logps = real(logps), real(old_logps)
    advantages = real((advantages[:, None] if advantages.dim() == 1 else advantages).expand_as(logps))
    ref_logps = None if ref_logps is None else real(ref_logps)
    lengths = mask.sum(1, keepdim=True).clamp(min=1)  # [N, 1]

    if ref_logps is not None and cfg.kl_in == "reward":
        k1 = (old_logps - ref_logps).detach()
        to_go = k1.flip(1).cumsum(1).flip(1)  # a token answers for the KL of itself and what follows
        advantages = advantages - cfg.beta * to_go

    log_ratio = logps - old_logps
    if cfg.ratio_level == "sequence":
        # / lengths: the geometric mean of the token ratios (GSPO, arXiv 2507.18071, eq. 7)
        log_ratio = (log_ratio.sum(1, keepdim=True) / lengths).expand_as(logps)
    ratio = log_ratio.clamp(max=20).exp()
    clipped_ratio = ratio.clamp(1 - cfg.clip_low, 1 + cfg.clip_high)
    per_token = -torch.minimum(ratio * advantages, clipped_ratio * advantages)  # [N, T]
    if sampler_logps is not None and cfg.tis_cap > 0:
        # the samples came from the sampler's distribution: truncated importance sampling towards the trainer's
        per_token = per_token * (old_logps - real(sampler_logps)).detach().exp().clamp(max=cfg.tis_cap)
    if ref_logps is not None and cfg.kl_in == "loss" and cfg.beta > 0:
        per_token = per_token + cfg.beta * kl_estimate(logps, ref_logps, old_logps, cfg.kl_estimator)

    if cfg.loss_reduction == "token":
        weight = 1 / n_tokens  # every token of the step weighs the same (DAPO, arXiv 2503.14476)
    elif cfg.loss_reduction == "sequence":
        # every completion weighs the same, whatever its length (GRPO)
        weight = 1 / (lengths * n_sequences).to(logps.dtype)
    else:
        weight = 1 / (n_sequences * cfg.max_completion_length)  # a constant: no length bias (Dr. GRPO)
    loss = (real(per_token) * weight).sum()

    with torch.no_grad():
        clipped = real(((ratio * advantages) > (clipped_ratio * advantages)).float())  # where clipping acts
        stats = {"tokens": mask.sum(), "clip_frac": clipped.sum()}
        if ref_logps is not None:
            for name in ("k1", "k3"):
                stats[f"kl_{name}"] = kl_estimate(logps, ref_logps, logps, name).sum()
    return loss, stats


# ----------------------------------------------------------------------------------------------------------------
# Update: deal samples to ranks, micro-batches, backward, one optimiser step per mini-batch


def deal(samples: list[Sample], n_ranks: int, shared: bool = False) -> list[list[Sample]]:
    """Longest first, each to the rank with the fewest tokens: the ranks finish together. With shared prompts groups
    stay in one piece, those with long completions first, but for where one rank's part of the tokens ends."""
    if shared:
        longest = {s.group: len(s.completion_ids) for s in sorted(samples, key=lambda s: len(s.completion_ids))}
        samples = sorted(samples, key=lambda s: (-longest[s.group], s.group, -len(s.completion_ids)))
        new = [i == 0 or s.group != samples[i - 1].group for i, s in enumerate(samples)]
        loads = np.cumsum([len(s) if first else len(s.completion_ids) for s, first in zip(samples, new, strict=True)])
        ranks = (loads - 1) * n_ranks // loads[-1]
        return [[s for s, r in zip(samples, ranks, strict=True) if r == rank] for rank in range(n_ranks)]
    shares, loads = [[] for _ in range(n_ranks)], [0] * n_ranks
    for sample in sorted(samples, key=len, reverse=True):
        rank = loads.index(min(loads))
        shares[rank].append(sample)
        loads[rank] += len(sample)
    return shares


def tokens_of(samples: list[Sample], shared: bool) -> int:
    """Tokens that the forward of one micro-batch computes, padding included."""
    if not shared:
        return len(samples) * max(map(len, samples))
    prompts = {s.group: len(s.prompt.ids) for s in samples}
    longest = max(len(s.completion_ids) for s in samples)
    return len(prompts) * max(prompts.values()) + len(samples) * (longest - 1)  # nothing follows a last token


def pack(samples: list[Sample], budget: int, shared: bool = False) -> list[list[Sample]]:
    """Micro-batches of at most `budget` tokens, padding included, from samples in the order of deal(). One that is a
    quarter full ends where padding would be a fifth of a row: that leaves 7 to 10 % padding of 25 to 30 %."""
    batches, groups, prompt, rest, longest = [], set(), 0, 0, 0
    for sample in samples:  # tokens_of(the last batch and this sample), kept up to date
        groups.add(sample.group)
        prompt, rest = max(prompt, len(sample.prompt.ids)), max(rest, len(sample.completion_ids) - 1)
        rows, longest = len(batches[-1]) + 1 if batches else 1, max(longest, len(sample))
        tokens = len(groups) * prompt + rows * rest if shared else rows * longest
        ragged = not shared and len(sample) < 0.8 * longest and 4 * (rows - 1) * longest > budget
        if not batches or tokens > budget or ragged:
            batches.append([])
            groups, longest = {sample.group}, len(sample)
            prompt, rest = len(sample.prompt.ids), len(sample.completion_ids) - 1
        batches[-1].append(sample)
    return batches


def plan(samples: list[Sample], n_ranks: int, can_share: bool, cfg: Config) -> tuple[list, bool]:
    """The micro-batches of every rank, and whether they share prompts: auto, where that saves a sixth of the tokens."""
    ways = {"off": [False], "on": [True], "auto": [False, True]}[cfg.share_prompt]
    if cfg.compile or not can_share:
        ways = [False]
    plans, tokens = {}, {}
    for shared in ways:
        plans[shared] = [pack(share, cfg.micro_batch_tokens, shared) for share in deal(samples, n_ranks, shared)]
        tokens[shared] = sum(tokens_of(micro, shared) for share in plans[shared] for micro in share)
    shared = ways[-1] if len(ways) == 1 else 1.2 * tokens[True] < tokens[False]
    return plans[shared], shared


def collate(samples: list[Sample], device: torch.device) -> dict:
    """Right-padded tensors of one micro-batch."""

    def padded(rows, dtype):
        width = max(len(row) for row in rows)
        out = np.zeros((len(rows), width), dtype=dtype)
        for i, row in enumerate(rows):
            out[i, : len(row)] = row
        return torch.from_numpy(out).to(device)

    lengths = [len(s.completion_ids) for s in samples]
    batch = dict(
        input_ids=padded([s.prompt.ids + s.completion_ids for s in samples], np.int64),  # [N, L]
        prompt_lengths=torch.tensor([len(s.prompt.ids) for s in samples], device=device),  # [N]
        completion_lengths=torch.tensor(lengths, device=device),  # [N]
        groups=torch.tensor([s.group for s in samples], device=device),  # [N]
        mask=padded([np.full(n, s.in_loss) for n, s in zip(lengths, samples, strict=True)], bool),  # [N, T]
        advantages=torch.tensor([s.advantage for s in samples], dtype=torch.float32, device=device),  # [N]
    )
    for name in ("sampler_logps", "old_logps", "ref_logps"):
        if getattr(samples[0], name) is not None:  # all of a micro-batch have it or none
            rows = [getattr(s, name) for s in samples]
            batch[name] = padded(rows, rows[0].dtype)  # [N, T]
    return batch


@torch.no_grad()
def compute_logps(policy: Policy, samples: list[Sample], name: str, cfg: Config, world: World) -> None:
    """Log-probabilities of the samples under `policy`, shared out over the ranks, stored as `sample.name` on each."""
    numbered = {id(sample): i for i, sample in enumerate(samples)}
    results = []
    shares, shared = plan(samples, world.size, policy.can_share, cfg)
    for micro in shares[world.rank]:
        batch = collate(micro, world.device)
        groups = batch["groups"] if shared else None
        with autocast(cfg, world.device):
            logps, _ = policy(batch["input_ids"], batch["prompt_lengths"], batch["completion_lengths"], groups)
        for sample, row in zip(micro, logps.cpu().numpy(), strict=True):
            results.append((numbered[id(sample)], row[: len(sample.completion_ids)]))
    for i, logps in world.gather(results):
        setattr(samples[i], name, logps)


def minibatches(samples: list[Sample], step: int, cfg: Config):
    """num_epochs passes over the samples in num_minibatches parts, whose sizes need not divide anything."""
    for epoch in range(cfg.num_epochs):
        order = np.random.default_rng((cfg.seed, step, 2, epoch)).permutation(len(samples))
        for part in np.array_split(order, cfg.num_minibatches):
            yield [samples[i] for i in part]


def learning_rate_at(update: int, cfg: Config) -> float:
    """Rate of the optimiser step number `update` (from 0): a pure function, so a resume has no schedule to restore."""
    total = cfg.max_steps * cfg.updates_per_step
    warmup = min(1.0, (update + 1) / cfg.warmup_steps) if cfg.warmup_steps else 1.0
    progress = max(0, update - cfg.warmup_steps) / max(1, total - cfg.warmup_steps)  # in [0, 1)
    decay = {"constant": 1.0, "linear": 1 - progress, "cosine": (1 + math.cos(math.pi * progress)) / 2}
    return cfg.learning_rate * warmup * decay[cfg.lr_schedule]


def make_optimizer(policy: Policy, cfg: Config):
    matrices = [p for p in policy.parameters() if p.requires_grad and p.dim() >= 2]
    vectors = [p for p in policy.parameters() if p.requires_grad and p.dim() < 2]
    groups = [dict(params=matrices, weight_decay=cfg.weight_decay), dict(params=vectors, weight_decay=0.0)]
    # fused: one pass over parameters and moments instead of a dozen, a fifth of the time on a CPU
    return torch.optim.AdamW([g for g in groups if g["params"]], lr=cfg.learning_rate, fused=True)


def update(policy, ddp, optimizer, samples: list[Sample], step: int, has_signal: bool, cfg: Config, world: World):
    """All optimiser steps of one rollout. Every rank holds all samples, so counts and shares need no collective."""
    policy.train()
    totals, losses, norms, skipped, all_ratios = {}, [], [], 0, []
    for number, minibatch in enumerate(minibatches(samples, step, cfg)):
        lr = learning_rate_at((step - 1) * cfg.updates_per_step + number, cfg)
        for group in optimizer.param_groups:
            group["lr"] = lr
        counted = [s for s in minibatch if s.in_loss]
        n_sequences = max(1, len(counted))
        n_tokens = max(1, sum(len(s.completion_ids) for s in counted))
        # what has no gradient gets no pass: a sample out of the loss, and without a KL term one without advantage
        learned = [s for s in counted if cfg.beta or s.advantage != 0]
        minibatch = learned or counted[:1] or minibatch[:1]
        shares, shared = plan(minibatch, world.size, policy.can_share, cfg)
        rounds = max(len(share) for share in shares)  # a rank with fewer joins in with weight zero: none waits
        stats, log_ratios = {"loss": 0.0}, np.zeros(0, np.float32)
        for i in range(rounds):
            idle = i >= len(shares[world.rank])
            batch = collate(minibatch[:1] if idle else shares[world.rank][i], world.device)
            mask = batch["mask"] & (not idle)
            last = i == rounds - 1  # gradients are averaged over the ranks in the last backward only
            with contextlib.nullcontext() if last or world.size == 1 else ddp.no_sync():
                with autocast(cfg, world.device):
                    lengths, groups = (batch["prompt_lengths"], batch["completion_lengths"]), batch["groups"]
                    logps, entropy = ddp(batch["input_ids"], *lengths, groups if shared else None)
                # one update per rollout: the old policy is the current one, the ratio is exactly 1
                old_logps = batch.get("old_logps", logps.detach())
                loss, sums = grpo_loss(
                    *(logps, old_logps, batch.get("ref_logps"), batch["sampler_logps"], batch["advantages"], mask),
                    *(cfg, n_tokens, n_sequences),
                )
                (loss * world.size).backward()  # * ranks: DDP takes the mean, the weights already hold global counts
            sums |= {"loss": loss.detach(), "entropy": torch.where(mask, entropy, 0).sum()}
            for name, value in sums.items():
                stats[name] = stats.get(name, 0.0) + value.item()
            log_ratio = (old_logps - batch["sampler_logps"])[mask].float().cpu().numpy()
            log_ratios = np.concatenate([log_ratios, log_ratio])

        gathered = world.gather([(stats, log_ratios)])
        for rank_stats, _ in gathered:  # sums and counts, never means of means
            for name, value in rank_stats.items():
                totals[name] = totals.get(name, 0.0) + value
        losses.append(totals.pop("loss"))
        if number < cfg.num_minibatches:  # in the first epoch; may stop the run: before the step
            all_ratios += [rank_ratios for _, rank_ratios in gathered]
            mismatch = mismatch_metrics(np.concatenate(all_ratios), cfg, world.device)

        norm = nn.utils.clip_grad_norm_(policy.parameters(), cfg.max_grad_norm or math.inf).item()  # before clipping
        norms.append(norm)
        if not math.isfinite(norm):
            skipped += 1  # the reduced gradient is the same on all ranks: all of them skip
        elif has_signal:
            optimizer.step()
        optimizer.zero_grad()
    policy.eval()

    tokens = max(1, totals.pop("tokens"))
    metrics = dict(loss=float(np.mean(losses)), grad_norm=float(np.mean(norms)), lr=lr, skipped_steps=skipped)
    return metrics | {name: value / tokens for name, value in totals.items()} | mismatch


def mismatch_metrics(log_ratio: np.ndarray, cfg: Config, device: torch.device) -> dict:
    """How far the sampler is from the trainer: log(trainer / sampler) of the loss's tokens [n]. Stops on a fault."""
    log_ratio = log_ratio[np.isfinite(log_ratio)]  # one that is not makes a gradient that is not: the step is skipped
    if not len(log_ratio):
        return dict(sampler_gap=0.0)
    gap, ratio = np.abs(log_ratio), np.exp(np.minimum(log_ratio, 20))
    limit = cfg.max_sampler_gap or (0.1 if half_precision(cfg, device) else 1e-3)
    if not gap.mean() <= limit:
        raise TrainingError(
            f"the sampler's log-probabilities are off by {gap.mean():.2g} on average (at most {gap.max():.2g}; "
            f"--max_sampler_gap {limit:g}). Likely causes: weights not pushed or a cache not reset after a push, "
            "log-probabilities before the temperature, top-p or top-k in the sampler, another prompt or chat template "
            "than the one that was scored, another dtype"
        )
    metrics = dict(sampler_gap=gap.mean(), sampler_gap_max=gap.max())
    metrics |= dict(sampler_ratio_q01=np.quantile(ratio, 0.01), sampler_ratio_q99=np.quantile(ratio, 0.99))
    if cfg.tis_cap:
        weight = np.minimum(ratio, cfg.tis_cap)
        ess = weight.sum() ** 2 / (len(weight) * np.square(weight).sum())  # effective share of the tokens
        metrics |= dict(tis_mean=weight.mean(), tis_max=weight.max(), tis_ess=ess)
    return {name: float(value) for name, value in metrics.items()}


# ----------------------------------------------------------------------------------------------------------------
# Eval


def evaluate(sampler, prompts: list[Prompt], tokenizer, scorer, step: int, cfg: Config, world: World) -> dict:
    """Greedy accuracy (the first reward) on held-out prompts, over all ranks, and pass@k at --temperature."""

    def accuracy(n, temperature):
        samples = sample(sampler, prompts, n, temperature, 1, step, tokenizer, cfg, world)
        score(samples, scorer, cfg)
        found = world.gather([(s.group, next(iter(s.parts.values())), len(s.completion_ids)) for s in samples])
        found.sort(key=lambda item: item[0])
        values = np.array([value for _, value, _ in found]).reshape(-1, n)  # [prompts, n]
        return values, float(np.mean([length for *_, length in found]))

    values, length = accuracy(1, 0.0)
    stderr = values.std(ddof=1) / math.sqrt(len(values)) if len(values) > 1 else 0.0
    metrics = dict(eval_accuracy=float(values.mean()), eval_stderr=float(stderr), eval_length=length)
    if cfg.eval_samples:
        k = cfg.eval_samples
        values, _ = accuracy(k, cfg.temperature)
        correct = (values > 0.5).sum(1)  # [prompts]
        metrics |= {f"eval_pass@{j}": pass_at_k(k, correct, j) for j in sorted({1, k})}
    return metrics


def pass_at_k(n: int, correct: np.ndarray, k: int) -> float:
    """Unbiased 1 - C(n - c, k) / C(n, k) (Chen et al., arXiv 2107.03374, eq. 1), mean over prompts. correct [P]."""
    return float(np.mean([1 - math.comb(n - int(c), k) / math.comb(n, k) for c in correct]))


# ----------------------------------------------------------------------------------------------------------------
# Checkpoints and logs: written so that a kill at any moment loses nothing that was complete


def checkpoints(out_dir: str) -> list[str]:
    """Complete checkpoint directories, oldest first."""
    names = os.listdir(out_dir) if os.path.isdir(out_dir) else []
    return [os.path.join(out_dir, name) for name in sorted(names) if name[:5] == "step_" and name[5:].isdigit()]


def save_checkpoint(step, model, generation_config, tokenizer, optimizer, best: dict, cfg, world) -> str | None:
    """A directory that from_pretrained loads, plus trainer_state.pt. It gets its name only when it is whole.

    A save that fails is said and leaves the checkpoint before in place: the run goes on, the next save tries again.
    """
    final = os.path.join(cfg.out_dir, f"step_{step:06d}")
    partial = os.path.join(cfg.out_dir, f"partial_{step:06d}")
    if not all(p.isfinite().all() for p in model.parameters()):
        say(f"step {step}: not saved, some parameters are not finite; the checkpoint before stands")
        return None
    try:
        shutil.rmtree(partial, ignore_errors=True)
        export = model
        if cfg.save_dtype == "bfloat16":
            with torch.device("meta"):
                export = type(model)(model.config).bfloat16()
            export.load_state_dict({k: v.to("cpu", torch.bfloat16) for k, v in model.state_dict().items()}, assign=True)
            export.tie_weights()
        export.save_pretrained(partial)
        generation_config.save_pretrained(partial)  # the user's own, not the one that samples for us
        tokenizer.save_pretrained(partial)
        sizes = {name: os.path.getsize(os.path.join(partial, name)) for name in os.listdir(partial)}
        state = dict(step=step, optimizer=optimizer.state_dict(), config=dataclasses.asdict(cfg), best=best)
        if export is not model:
            state["parameters"] = model.state_dict()  # a resume goes on in full precision
        torch.save(state | dict(sizes=sizes, world_size=world.size), os.path.join(partial, "trainer_state.pt"))
        for name in [*os.listdir(partial), "."]:
            fsync(os.path.join(partial, name))
        shutil.rmtree(final, ignore_errors=True)
        os.replace(partial, final)
        fsync(cfg.out_dir)
        prune_checkpoints(best, cfg)
        return final
    except (OSError, RuntimeError, SafetensorError) as error:  # torch and safetensors report a full disk their own way
        say(f"step {step}: could not save ({error}); the checkpoint before stands, the next save tries again")
        shutil.rmtree(partial, ignore_errors=True)


def fsync(path: str) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def prune_checkpoints(best: dict, cfg: Config) -> None:
    """Keeps the newest --keep and the best, which the link `best` points to."""
    kept = checkpoints(cfg.out_dir)
    best_name = f"step_{best['step']:06d}" if best else ""
    for path in kept[: -cfg.keep] if cfg.keep else []:
        if os.path.basename(path) != best_name:
            shutil.rmtree(path)
    if best and os.path.isdir(os.path.join(cfg.out_dir, best_name)):
        link = os.path.join(cfg.out_dir, "best")
        with contextlib.suppress(FileNotFoundError):
            os.remove(link + ".new")
        os.symlink(best_name, link + ".new")
        os.replace(link + ".new", link)


def load_checkpoint(path: str) -> dict:
    """The trainer state of a checkpoint; OSError if a file of it is missing or cut short."""
    try:
        state = torch.load(os.path.join(path, "trainer_state.pt"), map_location="cpu", weights_only=True)
        for name, size in state["sizes"].items():
            found = os.path.getsize(os.path.join(path, name))
            if found != size:
                raise OSError(f"{name} has {found} bytes, not {size}")
    except Exception as error:  # torch.load raises half a dozen types on a torn file
        raise OSError(first_line(error)) from None
    return state


def find_checkpoint(cfg: Config) -> tuple[str, dict] | tuple[None, None]:
    """What --resume asks for: a named checkpoint, or the newest whole one in out_dir."""
    if cfg.resume != "latest":
        try:
            return cfg.resume, load_checkpoint(cfg.resume)
        except OSError as error:
            raise ConfigError(f"--resume {cfg.resume}: not a whole checkpoint ({error})") from None
    for path in reversed(checkpoints(cfg.out_dir)):
        try:
            return path, load_checkpoint(path)
        except OSError as error:
            say(f"checkpoint {path} is damaged ({error}): trying the one before")
    say(f"--resume: no checkpoint in {cfg.out_dir}, starting from the beginning")
    return None, None


def restore(state: dict, path: str, model, optimizer, cfg: Config, world: World) -> tuple[int, dict]:
    """Puts the trainer where the checkpoint was: load_model has read its weights already. The step, and the best."""
    if "parameters" in state:
        model.load_state_dict(state["parameters"])
    optimizer.load_state_dict(state["optimizer"])
    say(f"resumed from {path} at step {state['step']}")
    for name, old in state["config"].items():
        if name != "resume" and getattr(cfg, name, None) != old:
            say(f"  changed since then: --{name} {old} -> {getattr(cfg, name, 'gone')}")
    if state["world_size"] != world.size:
        say(f"  {state['world_size']} ranks before, {world.size} now: the sums round differently from here on")
    for newer in [p for p in checkpoints(cfg.out_dir) if int(p[-6:]) > state["step"]] if world.rank == 0 else []:
        os.replace(newer, newer + ".stale")  # of a future that this run now leaves
    return state["step"], state["best"]


# ----------------------------------------------------------------------------------------------------------------
# Main


class Signals:
    """SIGTERM and SIGINT: finish the step, save, stop. A second one: exit at once. SIGUSR1: save, go on."""

    def __init__(self):
        self.stopped_at, self.save = None, False
        handlers = {signal.SIGTERM: self.on_stop, signal.SIGINT: self.on_stop, signal.SIGUSR1: self.on_save}
        self.before = {number: signal.signal(number, handler) for number, handler in handlers.items()}

    def on_stop(self, number, frame):
        if self.stopped_at is None:
            self.stopped_at = time.monotonic()
        elif time.monotonic() - self.stopped_at > 1:  # sooner: the same Ctrl-C, which torchrun passes on again
            os._exit(128 + number)

    def on_save(self, number, frame):
        self.save = True

    def restore(self):
        for number, handler in self.before.items():
            signal.signal(number, handler)


class Clock:
    """Seconds of each phase of a step."""

    def __init__(self, device):
        self.device, self.seconds = device, {}

    @contextlib.contextmanager
    def __call__(self, phase):
        started = time.perf_counter()
        yield
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        self.seconds[f"time_{phase}"] = time.perf_counter() - started


def prepare_out_dir(cfg: Config) -> None:
    """Makes out_dir; an earlier run in it is moved aside, never overwritten or mixed."""
    try:
        if not cfg.resume and os.path.exists(os.path.join(cfg.out_dir, "metrics.jsonl")):
            number = 1
            while os.path.exists(f"{cfg.out_dir}.{number}"):
                number += 1
            os.replace(cfg.out_dir, f"{cfg.out_dir}.{number}")
            say(f"{cfg.out_dir} held an earlier run: moved to {cfg.out_dir}.{number}")
        os.makedirs(cfg.out_dir, exist_ok=True)
        for name in os.listdir(cfg.out_dir):
            if name.startswith("partial_"):  # a save that a kill cut short
                shutil.rmtree(os.path.join(cfg.out_dir, name))
        with open(os.path.join(cfg.out_dir, "config.json.new"), "w") as file:
            json.dump(dataclasses.asdict(cfg), file, indent=1)
        os.replace(os.path.join(cfg.out_dir, "config.json.new"), os.path.join(cfg.out_dir, "config.json"))
    except OSError as error:
        raise ConfigError(f"--out_dir {cfg.out_dir}: {error.strerror}") from None


def seed_everything(seed: int) -> None:
    """Nothing here draws from the global generators; a reward or a changed copy that does, resumes exactly too."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def sample_metrics(samples: list[Sample], failures: list[dict], cfg: Config) -> dict:
    """Of all samples of the step, in rewards as the advantages saw them."""
    rewards = np.array([s.reward for s in samples]).reshape(-1, cfg.num_generations)
    with warnings.catch_warnings(action="ignore"):  # a group all of whose rewards are excluded has no mean
        spread = np.nan_to_num(np.nanstd(rewards, 1, ddof=1))
    metrics = dict(
        reward=float(np.nansum(rewards) / max(1, np.isfinite(rewards).sum())),
        reward_std=float(spread.mean()),
        advantage_abs=float(np.mean([abs(s.advantage) for s in samples])),
        completion_length=float(np.mean([len(s.completion_ids) for s in samples])),
        truncated_frac=float(np.mean([s.finish_reason == "length" for s in samples])),
    )
    if len(samples[0].parts) > 1:
        metrics |= {f"reward/{n}": float(np.mean([s.parts[n] for s in samples])) for n in samples[0].parts}
    for cause in sorted({cause for counts in failures for cause in counts}):
        metrics[f"reward_failed/{cause}"] = sum(counts.get(cause, 0) for counts in failures)
    return metrics


def memory_plan(model, reference, longest: int, kind: str, cfg: Config, device: torch.device) -> str:
    """One line: what each rank will hold at its peak, in GB, and which flags turn it down."""
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    sizes, half = model.config.get_text_config(), half_precision(cfg, device)
    # bytes a token, hidden unit and layer: Korthikanti et al. (arXiv 2205.05198, eq. 2) without the attention matrix
    kept = (2 if cfg.gradient_checkpointing else 34) * (1 if half else 2)
    tokens = max(cfg.micro_batch_tokens, longest)
    activations, engine = tokens * sizes.hidden_size * sizes.num_hidden_layers * kept + 3 * 4 * HEAD_CHUNK, 0
    if kind == "vllm" and device.type == "cuda":
        engine = cfg.vllm_gpu_memory_utilization * torch.cuda.get_device_properties(device).total_memory
    parts = {
        "parameters": weights,
        "gradients": weights,
        "Adam": 2 * weights,
        "reference (--beta)": weights if reference else 0,
        "activations (--micro_batch_tokens, --gradient_checkpointing)": activations,
        "engine while it samples (--vllm_gpu_memory_utilization)": engine,
    }
    together = sum(parts.values()) - min(engine, activations)  # the engine sleeps during the update
    shown = ", ".join(f"{name} {size / 1e9:.2g}" for name, size in parts.items() if size)
    return f"memory plan in GB: {shown}; together {together / 1e9:.2g}"


def train(cfg: Config) -> list[dict]:
    """The whole run; returns its metrics, one dict a step. Step 0 is the eval before the first update."""
    started = time.monotonic()
    if not cfg.verbose:
        from transformers.utils import logging

        logging.disable_progress_bar()
        logging.set_verbosity_error()

    # what can be wrong with the flags and files is found first, by every rank by itself
    device, rank0 = pick_device(validate(cfg)), view.is_rank0()
    rewards = load_rewards(cfg)
    tokenizer = load_tokenizer(cfg)
    train_prompts, dropped = load_prompts("train_data", rewards, tokenizer, cfg)
    eval_prompts, _ = load_prompts("eval_data", rewards, tokenizer, cfg) if cfg.eval_data else ([], 0)
    if cfg.show_prompt:
        say(f"{train_prompts[0].text}\n{train_prompts[0].ids}")
        return []
    if int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) > 0 and not cfg.resume:
        cfg = dataclasses.replace(cfg, resume="latest")  # torchrun --max_restarts brought the run back
    path, state = find_checkpoint(cfg) if cfg.resume else (None, None)
    model = load_model(path or cfg.model, cfg).to(device)
    size = sum(p.numel() for p in model.parameters()) / 1e6
    small = device.type == "cpu" and size < 10
    if small and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)  # on small matrices threads cost more than they bring
    kind, why = choose_sampler(cfg, device, small)
    reference_model = load_model(cfg.model, cfg).to(device).requires_grad_(False) if cfg.beta > 0 else None
    policy = Policy(model, cfg.temperature)
    if cfg.share_prompt == "on" and not policy.can_share:
        raise ConfigError(f"--share_prompt on: {cfg.model} cannot continue a prompt from a cache exactly")
    reference = Policy(reference_model, cfg.temperature) if reference_model else None
    generation_config = model.generation_config
    eos_ids, pad_id = special_ids(generation_config, tokenizer, cfg)
    if rank0:
        prepare_out_dir(cfg)

    world = join_world(device)
    if len(set(world.gather([state["step"] if state else 0]))) > 1:
        raise TrainingError(
            f"--resume: the machines hold different checkpoints in {cfg.out_dir}; share it, or copy them"
        )
    if cfg.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=dict(use_reentrant=False))
    if cfg.compile:
        policy.backbone[0].compile(dynamic=True)
    ddp = policy
    if world.size > 1:
        ids = [device.index] if device.type == "cuda" else None
        ddp = DistributedDataParallel(policy, device_ids=ids, gradient_as_bucket_view=True)
    optimizer = make_optimizer(policy, cfg)
    longest = max(len(p.ids) for p in train_prompts + eval_prompts)
    sampler, kind, why = make_sampler(kind, why, model, eos_ids, pad_id, longest, cfg, world)
    scorer = reward_module.Scorer(rewards, timeout=cfg.reward_timeout)

    first, best = restore(state, path, model, optimizer, cfg, world) if state else (0, {})
    log = view.RunLog(cfg, first if state else -1)
    say("config: " + " ".join(f"--{k} {shlex.quote(str(v))}" for k, v in dataclasses.asdict(cfg).items()))
    say(f"policy {cfg.model}: {size:.2f} M parameters on {device}, {world.size} rank(s), rollouts by {kind} ({why})")
    say(f"{len(train_prompts)} train prompts ({dropped} too long, dropped), {len(eval_prompts)} eval prompts")
    say(memory_plan(model, reference, longest + cfg.max_completion_length, kind, cfg, device))
    say(
        "watch reward, eval accuracy, grad and no-signal, not the loss: its value is beta * KL, 0 at first (with "
        "--loss_reduction token: minus the covariance of advantage and length) while its gradient is not 0"
    )
    if cfg.beta and cfg.kl_in == "loss" and cfg.kl_estimator == "k1":
        say("warning: as a loss k1 has an expected gradient of zero, it does not hold the policy near the reference")
    signals, clock = Signals(), Clock(device)
    bad = 0
    with clock("sync"):
        sampler.wake()
        sampler.push(model)
    if not state and eval_prompts:
        log.record(dict(step=0) | evaluate(sampler, eval_prompts, tokenizer, scorer, 0, cfg, world))

    for step in range(first + 1, cfg.max_steps + 1):
        seed_everything(seed_of(cfg.seed, 2, step, world.rank))
        with clock("rollout"):
            prompts = prompts_of_step(train_prompts, step, cfg)
            samples = sample(sampler, prompts, cfg.num_generations, cfg.temperature, 0, step, tokenizer, cfg, world)
            sampler.sleep()
        with clock("reward"):
            failures = world.gather([score(samples, scorer, cfg)])
            samples = sorted(world.gather(samples), key=lambda s: s.group)
        frac_zero_std = assign_advantages(samples, step, cfg)
        with clock("logps"):
            counted = [s for s in samples if s.in_loss] or samples  # the others get no pass, unless all are out
            if cfg.updates_per_step > 1:
                compute_logps(policy, counted, "old_logps", cfg, world)
            if reference:
                compute_logps(reference, counted, "ref_logps", cfg, world)
        with clock("update"):
            metrics = update(policy, ddp, optimizer, samples, step, frac_zero_std < 1, cfg, world)
        with clock("sync"):
            sampler.wake()
            sampler.push(model)
        tokens = sum(map(len, samples))
        metrics = dict(step=step) | metrics | sample_metrics(samples, failures, cfg) | clock.seconds
        metrics |= dict(frac_zero_std=frac_zero_std, tokens=tokens, tokens_per_s=tokens / sum(clock.seconds.values()))
        last = step == cfg.max_steps
        if eval_prompts and (last or (cfg.eval_every and step % cfg.eval_every == 0)):
            metrics |= evaluate(sampler, eval_prompts, tokenizer, scorer, step, cfg, world)
        log.record(metrics, samples)
        bad = bad + 1 if metrics["skipped_steps"] else 0
        if bad == BAD_STEPS:
            raise TrainingError(
                f"no finite gradient in {bad} steps in a row, so nothing was updated: lower --learning_rate, look at "
                "the rewards and at completions.jsonl, and go on with --resume"
            )

        better = metrics.get("eval_accuracy", -1.0) > best.get("eval_accuracy", -1.0)
        if better:
            best = dict(step=step, eval_accuracy=metrics["eval_accuracy"])
        asked = world.gather([(signals.stopped_at is not None, signals.save)])
        signals.save = False
        stop = any(stop for stop, _ in asked)
        due = cfg.save_every and step % cfg.save_every == 0
        saving = due or last or better or stop or any(save for _, save in asked)
        if rank0 and saving:
            saved = save_checkpoint(step, model, generation_config, tokenizer, optimizer, best, cfg, world)
            if stop and saved:
                say(f"signal: stopped after step {step}, saved in {saved}; go on with --resume")
        if stop:
            break
    signals.restore()
    log.close(time.monotonic() - started)
    scorer.close()
    if world.size > 1:
        dist.barrier()  # nobody leaves while rank 0 still writes
        del ddp  # before its group: freed after it, it can wait for gloo's thread while that waits for the GIL
        gc.collect()
    sampler.close()
    if "RANK" in os.environ and dist.is_initialized():  # an engine that closes may have ended it
        dist.destroy_process_group()
    return log.history


@record  # torchrun's report then names the rank that failed first, and why
def main() -> int:
    def fail(code, message, wait=0):
        """What every rank finds by itself, local rank 0 says, and the others only if it did not."""
        if int(os.environ.get("LOCAL_RANK", 0)) > 0:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)  # with which torchrun ends those who wait here
            time.sleep(wait)
        print(f"grpo.py: {message}", file=sys.stderr, flush=True)
        return code

    try:
        train(parse_args())
        return 0
    except ConfigError as error:
        return fail(2, f"error: {error}", wait=10)
    except TrainingError as error:
        return fail(1, f"stopped: {error}", wait=10)
    except torch.OutOfMemoryError as error:
        turn = "turn down --micro_batch_tokens or --vllm_gpu_memory_utilization, or set --gradient_checkpointing"
        return fail(1, f"stopped: {first_line(error)} To need less: {turn}")
    except RuntimeError as error:
        if dist.is_initialized() and re.search("onnection (closed|reset)|gloo|NCCL", str(error)):
            return fail(1, "stopped: another rank is gone; torchrun's report names it")
        raise


if __name__ == "__main__":
    sys.exit(main())
