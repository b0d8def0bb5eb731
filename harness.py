"""What every trainer needs and no paper is about: flags, ranks, rows from files, the run's directory and its lock,
checkpoints, signals, the clock, the log and the dashboards.

Nothing in here knows what an advantage is: grpo.py uses this file, never the other way round.
"""

import argparse
import contextlib
import csv
import ctypes
import dataclasses
import difflib
import fcntl
import functools
import gc
import json
import math
import os
import pickle
import random
import re
import select
import shlex
import shutil
import signal
import sys
import tempfile
import threading
import time
import zlib
from collections import Counter
from dataclasses import dataclass, field
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch.distributed.rendezvous import rendezvous

import view
from reward import import_file

BAD_STEPS = 5  # steps in a row without a finite gradient that end a run

# ----------------------------------------------------------------------------------------------------------------
# Errors and exit codes


class ConfigError(Exception):
    """What the user asked for cannot be done: one line that names the flag or file. Exit code 2."""


class TrainingError(Exception):
    """The run cannot go on: a message that says why. Exit code 1."""


class Stopped(BaseException):
    """A signal asked the run to end. No Exception, so that no library swallows it."""


def first_line(error: BaseException) -> str:
    return (str(error).strip() or repr(error)).splitlines()[0]


def exit_code(program: str, call, less_memory: str) -> int:
    """Calls it. What ends it is one line and an exit code: 2 for what the user asked for, 1 for the rest."""

    def fail(code, message, wait=0):
        """What every rank finds by itself, local rank 0 says, and the others only if it did not."""
        if int(os.environ.get("LOCAL_RANK", 0)) > 0:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)  # with which torchrun ends those who wait here
            time.sleep(wait)
        print(f"{program}: {message}".encode(errors="backslashreplace").decode(), file=sys.stderr, flush=True)
        return code

    try:
        call()
        return 0
    except ConfigError as error:
        return fail(2, f"error: {error}", wait=10)
    except TrainingError as error:
        return fail(1, f"stopped: {error}", wait=10)
    except KeyboardInterrupt:  # before the run has its own handler
        return fail(130, "interrupted before the first step; nothing was written")
    except torch.OutOfMemoryError as error:
        return fail(1, f"stopped: {first_line(error)} To need less: {less_memory}")
    except RuntimeError as error:
        if dist.is_initialized() and re.search("onnection (closed|reset)|gloo|NCCL", str(error)):
            return fail(1, "stopped: another rank is gone; why, says the report of the machine that it ran on")
        raise


# ----------------------------------------------------------------------------------------------------------------
# Flags: every field of a dataclass is one


def flag(default, help, choices=None, low=None, high=2**31 - 1, group=None, bare=None):
    """A field that is a flag. group: the heading that begins with it; bare: its value when it stands alone."""
    return field(default=default, metadata=dict(help=help, choices=choices, low=low, high=high, group=group, bare=bare))


def parse_flags(config, argv, program: str, description: str) -> dict:
    """The flags that were given, {name: value}; defaults are not among them."""

    def boolean(text):
        return {"true": True, "1": True, "false": False, "0": False}.get(text.lower(), text)

    parser = argparse.ArgumentParser(
        prog=program, description=description, argument_default=argparse.SUPPRESS, allow_abbrev=False,
        exit_on_error=False, formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    here, group = os.path.dirname(os.path.abspath(__file__)), parser
    for f in dataclasses.fields(config):
        about, choices = f.metadata["help"].replace("%", "%%"), f.metadata["choices"]
        group = parser.add_argument_group(f.metadata["group"]) if f.metadata["group"] else group
        options = dict(help=f"{about} [{str(f.default).removeprefix(here + os.sep)}]")
        options |= dict(metavar="|".join(choices) if choices else "X", type=f.type)
        if f.type is bool:
            options |= dict(type=boolean, nargs="?", const=True)
        elif f.metadata["bare"]:
            options |= dict(nargs="?", const=f.metadata["bare"])
        elif f.type == float | None:
            options |= dict(type=lambda text: None if text.lower() == "none" else float(text))
        group.add_argument(f"--{f.name}", **options)
    try:
        values, unknown = parser.parse_known_args(argv)
    except argparse.ArgumentError as error:
        raise ConfigError(str(error).removeprefix("argument ")) from None
    if unknown:
        names = [f"--{f.name}" for f in dataclasses.fields(config)]
        near = difflib.get_close_matches(unknown[0].split("=")[0], names, n=1)
        raise ConfigError(f"unknown flag {unknown[0]}" + (f"; did you mean {near[0]}?" if near else "; see --help"))
    return vars(values)


def check_flags(cfg) -> None:
    """Types, choices and bounds, as the fields have them. Impossible values stop here."""
    for f in dataclasses.fields(cfg):
        value, choices, low, high = (getattr(cfg, f.name), *(f.metadata[key] for key in ("choices", "low", "high")))
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        fits = number if f.type in (int, float) else isinstance(value, f.type)
        need(f.type is not bool or fits, cfg, f.name, "must be true or false")
        kind = getattr(f.type, "__name__", f.type)
        need(fits and (f.type is not int or value == int(value)), cfg, f.name, f"must be of type {kind}")
        need(not number or math.isfinite(value), cfg, f.name, "must be a finite number")
        need(not choices or value in choices, cfg, f.name, f"must be one of {', '.join(choices or ())}")
        need(low is None or value >= low, cfg, f.name, f"must be at least {low}")
        need(f.type is not int or value <= high, cfg, f.name, f"must be at most {high}")


def need(fine, cfg, name: str, why: str) -> None:
    if not fine:
        raise ConfigError(f"--{name} {getattr(cfg, name)}: {why}")


def differing_flags(cfg, defaults) -> str:
    """What differs from the defaults, as it would be typed."""
    values = {f.name: getattr(cfg, f.name) for f in dataclasses.fields(cfg)}
    return " ".join(f"--{k} {shlex.quote(str(v))}" for k, v in values.items() if v != getattr(defaults, k))


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
        mine, sizes = to_bytes(items), torch.empty(self.size, 1, dtype=torch.int64)
        dist.all_gather(list(sizes), torch.tensor([len(mine)]))
        received = torch.empty(self.size, int(sizes.max()), dtype=torch.uint8)  # [ranks, longest]
        received[self.rank, : len(mine)] = torch.from_numpy(mine)
        dist.all_gather(list(received), received[self.rank])
        return [item for part in received.numpy() for item in from_bytes(part)]


def to_bytes(items: list) -> np.ndarray:
    """[n] uint8: the number of its parts, their lengths, and the parts: each array as it lies in memory, then the rest,
    pickled."""
    arrays = []
    rest = pickle.dumps(items, 5, buffer_callback=arrays.append)
    parts = [np.frombuffer(part, np.uint8) for part in (*(array.raw() for array in arrays), rest)]
    lengths = np.array([len(parts), *map(len, parts)])  # int64
    fill = [np.zeros(-len(part) % 8, np.uint8) for part in parts]  # every part begins at a multiple of 8
    return np.concatenate([lengths.view(np.uint8), *(x for pair in zip(parts, fill, strict=True) for x in pair)])


def from_bytes(data: np.ndarray) -> list:
    """The items again. Their arrays lie in data: nothing of them is copied. What follows in data is ignored."""
    count = int(data[:8].view(np.int64)[0])
    lengths = data[8 : 8 * (count + 1)].view(np.int64)
    room = -(-lengths // 8) * 8
    starts = 8 * (count + 1) + np.cumsum(room) - room
    *arrays, rest = (data[start : start + n] for start, n in zip(starts, lengths, strict=True))
    return pickle.loads(rest, buffers=arrays)


def is_rank0() -> bool:
    """Known from torchrun's environment, before the ranks have met."""
    return int(os.environ.get("RANK", 0)) == 0


def pick_device(kind: str) -> torch.device:
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


def seed_of(*numbers: int) -> int:
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0] >> 2)


def seed_everything(seed: int) -> None:
    """Nothing here draws from the global generators; a reward or a changed copy that does, resumes exactly too."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


# ----------------------------------------------------------------------------------------------------------------
# Rows


def read_rows(path: str, name: str) -> list[dict]:
    """Rows of a JSONL, JSON, CSV or parquet file, a hub dataset name:config:split, or path/to/file.py:function."""
    where, (file, _, function) = f"--{name} {path}", path.rpartition(":")
    hub = re.fullmatch(r"[\w.-]+/[\w.-]+(:[\w.-]*){0,2}", path) and not os.path.exists(path)
    try:
        if file.endswith(".py"):
            rows = list(getattr(import_file(os.path.abspath(file)), function)())
        elif hub or path.endswith(".parquet"):
            rows = dataset_rows(path)
        else:
            rows = file_rows(path, where)
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{where}: {getattr(error, 'strerror', None) or first_line(error)}") from None
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        bad = next((i for i, row in enumerate(rows, 1) if not isinstance(row, dict)), 1)
        raise ConfigError(f"{where} row {bad}: must be a JSON object")
    if not rows:
        raise ConfigError(f"{where}: no rows")
    return rows


def file_rows(path: str, where: str) -> list:
    with open(path, encoding="utf-8-sig", newline="") as file:
        if path.endswith(".csv"):
            return list(csv.DictReader(file))
        text = file.read()
    rows, whole = [], path.endswith(".json")
    for number, line in enumerate([text] if whole else text.split("\n"), 1):
        try:
            rows += [json.loads(line)] if line.strip() else []
        except (ValueError, RecursionError) as error:
            row = "" if whole else f" row {number}"
            raise ConfigError(f"{where}{row}: not valid JSON ({error})") from None
    return rows[0] if whole and rows else rows


def dataset_rows(path: str) -> list[dict]:
    try:
        from datasets import load_dataset
    except ImportError:
        raise ValueError("no such file; a hub dataset or parquet needs pip install datasets") from None
    if path.endswith(".parquet"):
        return list(load_dataset("parquet", data_files=path, split="train"))
    repository, config, split = (path.split(":") + ["", ""])[:3]
    return list(load_dataset(repository, config or None, split=split or "train"))


# ----------------------------------------------------------------------------------------------------------------
# Prompts: rows to token ids


@dataclass
class Prompt:
    ids: np.ndarray  # [P] int32
    text: str
    row: dict
    messages: list | None = None  # where it is a chat


def load_tokenizer(cfg):
    from transformers import AutoTokenizer

    name, path = ("tokenizer", cfg.tokenizer) if cfg.tokenizer else ("model", cfg.model)
    try:
        return AutoTokenizer.from_pretrained(path)
    except Exception as error:  # of a file that is not what it should be
        raise ConfigError(f"--{name} {path}: {first_line(error)}") from None


def load_prompts(name: str, rewards, tokenizer, cfg) -> list[Prompt]:
    """The prompts of --train_data or --eval_data, less those longer than --max_prompt_length."""
    path, prompts, rows = getattr(cfg, name), [], read_rows(getattr(cfg, name), name)
    for number, row in enumerate(rows, 1):
        try:
            missing = [column for reward in rewards for column in reward.columns if column not in row]
            if missing:
                raise ValueError(f"no column '{missing[0]}', which --reward {cfg.reward} reads")
            prompts.append(encode_prompt(row, tokenizer, cfg))
        except Exception as error:
            raise ConfigError(f"--{name} {path} row {number}: {first_line(error)}") from None
    kept = [prompt for prompt in prompts if len(prompt.ids) <= cfg.max_prompt_length]
    limit = f"longer than --max_prompt_length {cfg.max_prompt_length}"
    if not kept:
        raise ConfigError(f"--{name} {path}: every prompt is {limit}")
    if len(kept) < len(rows):
        say(f"--{name} {path}: {len(rows) - len(kept)} of {len(rows)} prompts are left out, {limit}")
    if tokenizer.chat_template and any(prompt.messages is None for prompt in kept):
        say(f"warning: --{name} {path}: string prompts do not go through the model's chat template; --chat does that")
    template = str(template_options(cfg).get("chat_template", tokenizer.chat_template))
    for option in template_options(cfg) if name == "train_data" else ():
        if not re.search(rf"\b{re.escape(option)}\b", f"chat_template {template}"):
            say(f"warning: --chat_template_kwargs: the model's chat template does not read {option}")
    return kept


def encode_prompt(row: dict, tokenizer, cfg) -> Prompt:
    """`prompt` (or what --prompt_template makes) is a string, taken as it is, or chat messages, through the template.
    What is wrong with a row is a ValueError."""

    def column(name):
        if name not in row or (cfg.prompt_template and row[name] is None):  # a short row of a CSV has None
            raise ValueError(f"no column '{name}'; see --prompt_template")
        return row[name]

    prompt = cfg.prompt_template.replace("\\n", "\n")  # as it arrives from a shell
    if prompt:  # braces around anything but a column's name stand as they are: \boxed{}
        prompt = re.sub(r"\{([A-Za-z_]\w*)\}", lambda found: str(column(found[1])), prompt)
    else:
        prompt = column("prompt")
    if not prompt or not isinstance(prompt, (str, list)):
        raise ValueError(f"empty prompt, or one that is neither a string nor a list of messages: {prompt!r}")
    if isinstance(prompt, str) and not cfg.chat and not cfg.system_prompt:
        begun = bool(tokenizer.bos_token) and prompt.startswith(tokenizer.bos_token)
        ids = tokenizer(prompt, add_special_tokens=not begun)["input_ids"]  # no second BOS
        if not ids:
            raise ValueError("empty prompt")
        return Prompt(np.array(ids, dtype=np.int32), prompt, row)
    system = [dict(role="system", content=cfg.system_prompt)] if cfg.system_prompt else []
    turns = [dict(role="user", content=prompt)] if isinstance(prompt, str) else prompt
    messages = [*system, *({**turn, "content": plain_text(turn["content"])} for turn in turns)]
    if not tokenizer.chat_template:
        raise ValueError("chat messages, but the tokenizer has no chat template")
    begun = messages[-1]["role"] == "assistant"  # an answer that the policy goes on with
    options = template_options(cfg) | dict(tokenize=False)
    options |= dict(add_generation_prompt=not begun, continue_final_message=begun)
    instead = "; the one of --system_prompt can go into --prompt_template instead" if system else ""
    try:
        text = tokenizer.apply_chat_template(messages, **options)
    except Exception as error:
        raise ValueError(f"chat template: {first_line(error)}{instead}") from None
    if any(turn.get("role") == "system" and turn["content"].strip() not in text for turn in messages):
        raise ValueError(f"chat template: it leaves out the system message{instead}")
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]  # the template already wrote the BOS
    return Prompt(np.array(ids, dtype=np.int32), text, row, messages)


def template_options(cfg) -> dict:
    return json.loads(cfg.chat_template_kwargs or "{}")


def plain_text(content) -> str:
    """A message's content: a string, or a list of parts of type text."""
    if isinstance(content, list) and all(isinstance(part, dict) and "text" in part for part in content):
        return "".join(part["text"] for part in content)
    if not isinstance(content, str):
        raise ValueError(f"a message's content must be text: {content!r}")
    return content


# ----------------------------------------------------------------------------------------------------------------
# Models: what is asked of any of them


def quiet_transformers(verbose: bool) -> None:
    if not verbose:
        from transformers.utils import logging

        logging.disable_progress_bar()
        logging.set_verbosity_error()


SMALL = 10e6  # parameters under which a CPU model is a toy: threads, bfloat16 and an engine cost more than they bring


def is_small(model, device: torch.device) -> bool:
    return device.type == "cpu" and sum(p.numel() for p in model.parameters()) < SMALL


def keep_freed_memory(device: torch.device) -> None:
    """On a CPU with glibc: what is freed stays in the process, for the next tensor. Given back and asked for again, its
    pages are filled with zeros by the kernel each time, a tenth of an update of 135 M parameters."""
    libc = ctypes.CDLL(None)
    if device.type == "cpu" and hasattr(libc, "mallopt"):
        M_MMAP_MAX, M_TRIM_THRESHOLD = -4, -1  # malloc.h
        libc.mallopt(M_MMAP_MAX, 0)  # else each large tensor is a mapping of its own
        libc.mallopt(M_TRIM_THRESHOLD, 2**31 - 1)


def compile_layers(model, cfg) -> None:
    """Each layer by itself: the code of one serves them all."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers = [layer for layer in model.modules() if isinstance(layer, GradientCheckpointingLayer)]
    need(layers, cfg, "compile", "this model has no layers that can be compiled")
    for layer in layers:
        layer.compile(dynamic=True)


def fast_bfloat16(device: torch.device) -> bool:
    asks = ("_is_amx_tile_supported", "_is_avx512_bf16_supported")  # not in every torch
    cpu = device.type == "cpu" and any(getattr(torch.cpu, ask, lambda: False)() for ask in asks)
    return cpu or (device.type == "cuda" and torch.cuda.is_bf16_supported())


def check_sizes(model, prompts: list[Prompt], cfg) -> None:
    """What would end in an index error, in the middle of the run."""
    longest, words = max(len(p.ids) for p in prompts), model.get_input_embeddings().num_embeddings
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None) or math.inf
    why = f"with the longest prompt ({longest} tokens) more than the model's {positions} positions"
    need(longest + cfg.max_completion_length <= positions, cfg, "max_completion_length", why)
    top = max(int(p.ids.max()) for p in prompts)
    name, whose = ("tokenizer", "") if cfg.tokenizer else ("model", "its tokenizer ")
    need(top < words, cfg, name, f"{whose}makes the token id {top}, and the model knows {words}")


def special_ids(model, tokenizer, cfg, prompts=()) -> tuple[list[int], int]:
    """All ids that end a completion, and one to pad with (which may be one of them: no mask is made from ids). Both
    are ids that the model knows: some tokenizers have more."""
    eos, words = model.generation_config.eos_token_id, model.get_input_embeddings().num_embeddings
    eos = [*(eos if isinstance(eos, list) else [eos]), tokenizer.eos_token_id]
    eos = [i for i in dict.fromkeys(eos) if i is not None and 0 <= i < words]  # others are never sampled
    if not eos:
        raise ConfigError(f"--model {cfg.model}: neither generation_config nor tokenizer names an EOS token it knows")
    turn = end_of_turn(tokenizer, cfg) if any(p.messages for p in prompts) else None
    if turn not in (None, *eos):
        token = tokenizer.convert_ids_to_tokens(turn)
        say(
            f"warning: the chat template ends a turn with {token}, which ends no completion: add its id, {turn}, to "
            "eos_token_id in the model's generation_config.json, or name a --tokenizer whose EOS token it is"
        )
    pad = tokenizer.pad_token_id
    return eos, pad if pad is not None and 0 <= pad < words else eos[0]


def end_of_turn(tokenizer, cfg) -> int | None:
    """The special token that the chat template writes after an answer, if there is one."""
    turns = [dict(role=role, content="xyz") for role in ("user", "assistant")]
    options = template_options(cfg) | dict(tokenize=False)
    try:
        text = tokenizer.apply_chat_template(turns, **options).rpartition("xyz")[2]
    except Exception:  # it wants other messages
        return None
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    return next((i for i in ids if i in tokenizer.added_tokens_decoder), None)


@torch.no_grad()
def head_is_plain(model) -> bool:
    """Some architectures scale or soft-cap after the head: there the model's own logits are to be used."""
    ids = torch.arange(1, 9, device=next(model.parameters()).device)[None]
    head, body = model.get_output_embeddings(), model.base_model
    if not isinstance(head, torch.nn.Linear) or body is model:
        return False
    hidden = body(input_ids=ids, use_cache=False).last_hidden_state
    return torch.allclose(head(hidden), model(input_ids=ids, use_cache=False).logits, atol=1e-5)


def padded(rows: list[np.ndarray], dtype, fill=0, left=False) -> np.ndarray:
    """[N, longest]"""
    width = max(map(len, rows))
    out = np.full((len(rows), width), fill, dtype=dtype)
    for i, row in enumerate(rows):
        out[i, slice(width - len(row), width) if left else slice(len(row))] = row
    return out


# ----------------------------------------------------------------------------------------------------------------
# The run's directory: one run writes there, and what others left is moved aside, never overwritten, mixed or removed

WRITTEN = re.compile(  # by a run; nothing else in out_dir is ever touched
    r"(config\.json|metrics\.jsonl|completions\.jsonl|best)(\.new)?|curves\.png|events\.out\.tfevents\..*|wandb"
    r"|(step|partial)_\d{6,}|step_\d{6,}\.stale(\.\d+)?"
)


def claim_out_dir(cfg, checkpoint):
    """Rank 0 only: locks out_dir, moves aside what it holds of other runs, writes config.json. Returns the config (a
    model that was moved has a new path) and the lock. checkpoint: the one to go on from, or None."""
    out = os.path.realpath(cfg.out_dir)  # of a link, of `out/`, of `.`
    with contextlib.ExitStack() as undo:
        try:
            os.makedirs(out, exist_ok=True)
            lock = lock_out_dir(cfg.out_dir)
            undo.callback(os.close, lock)
            if not checkpoint or os.path.dirname(os.path.realpath(checkpoint.path)) != out:
                cfg = move_aside(out, cfg)
            for newer in checkpoints(out):
                if int(newer.rpartition("_")[2]) > checkpoint.state["step"]:  # of a future that this run now leaves
                    os.replace(newer, free_name(newer + ".stale"))
            for name in os.listdir(out):
                if re.fullmatch(r"partial_\d{6,}", name):  # a save that a kill cut short
                    shutil.rmtree(os.path.join(out, name))
            with open(os.path.join(out, "config.json.new"), "w") as file:
                json.dump(dataclasses.asdict(cfg), file, indent=1)
            os.replace(os.path.join(out, "config.json.new"), os.path.join(out, "config.json"))
            with open(os.path.join(out, ".lock"), "w") as file:  # last: from here on what is here is this launch's own
                file.write(f"{os.getpid()} {launch()}")
        except OSError as error:
            raise ConfigError(f"--out_dir {cfg.out_dir}: {error.strerror}") from None
        undo.pop_all()
        return cfg, lock


def lock_out_dir(out_dir: str) -> int:
    """An open, locked file: the system frees it with the process, however that ends."""
    path = os.path.join(out_dir, ".lock")
    handle = os.open(path, os.O_RDONLY | os.O_CREAT, 0o644)  # to read: a disk may become read-only under it
    for wait in [0.1] * 30 + [0]:  # the ranks of a torchrun that was killed take a second to notice
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if wait:
                time.sleep(wait)
                continue
            pid = os.read(handle, 20).decode().split(" ")[0]
            os.close(handle)
            raise ConfigError(f"--out_dir {out_dir}: another run (process {pid}) is writing there") from None
        except OSError:
            pass  # a file system without locks
        return handle


def launch() -> str:
    """Names this start of torchrun, and stays the same over its --max_restarts."""
    return f"{os.environ.get('TORCHELASTIC_RUN_ID', '')} {os.getppid()}"


def restarted(out_dir: str) -> bool:
    """Whether torchrun --max_restarts brought back the very run that last wrote in out_dir."""
    with contextlib.suppress(OSError), open(os.path.join(out_dir, ".lock")) as lock:
        again = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) > 0
        return again and lock.read().partition(" ")[2] == launch()
    return False


def move_aside(out: str, cfg):
    """What a run left in out goes to out.1 (or .2, ...), or into out/earlier.1 where nothing can be moved out."""
    names = sorted(name for name in os.listdir(out) if WRITTEN.fullmatch(name))
    with contextlib.suppress(OSError, ValueError), open(os.path.join(out, "config.json")) as file:
        if "out_dir" not in json.load(file):
            raise ConfigError(f"--out_dir {cfg.out_dir}: holds a config.json that is no run's; name another directory")
    for base in (out, os.path.join(out, "earlier")) if names else ():
        aside = free_name(base, start=1)
        try:
            os.mkdir(aside)
            os.replace(os.path.join(out, names[0]), os.path.join(aside, names[0]))  # not across a mount point
        except OSError:
            if base != out:
                raise
            continue
        for name in names[1:]:
            os.replace(os.path.join(out, name), os.path.join(aside, name))
        shown = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
        say(f"{cfg.out_dir} held an earlier run ({shown}): moved to {aside}")
        for flag_ in ("model", "tokenizer"):
            folder, name = os.path.split(os.path.realpath(getattr(cfg, flag_)))
            if folder == out and name in names:
                cfg = dataclasses.replace(cfg, **{flag_: os.path.join(aside, name)})
                say(f"--{flag_} was in it, and is now {getattr(cfg, flag_)}")
        break
    return cfg


def free_name(base: str, start: int = 0) -> str:
    """base, or base.1, base.2, ...: the first that does not exist."""
    number = start
    while os.path.lexists(name := f"{base}.{number}" if number else base):
        number += 1
    return name


def run_config(config, resume: str, out_dir: str) -> dict:
    """The flags of the run that --resume goes on with: its config.json, less what this version does not know."""
    folder = out_dir if resume == "latest" else os.path.dirname(os.path.abspath(resume))
    known = {f.name for f in dataclasses.fields(config)} - {"resume", "out_dir"}
    try:
        with open(os.path.join(folder, "config.json")) as file:
            saved = json.load(file) | dict(out_dir=folder)
    except (OSError, ValueError, TypeError):  # a checkpoint that was copied alone has the flags, too
        with contextlib.suppress(OSError):
            return {k: v for k, v in load_checkpoint(resume).state["config"].items() if k in known}
        return {}
    return {name: value for name, value in saved.items() if name in known | {"out_dir"}}


# ----------------------------------------------------------------------------------------------------------------
# Checkpoints: a directory that from_pretrained loads, trainer_state.pt, and a checksum of every file


@dataclass
class Checkpoint:
    path: str
    state: dict


def checkpoints(out_dir: str) -> list[str]:
    """Complete checkpoint directories, oldest first."""
    names = os.listdir(out_dir) if os.path.isdir(out_dir) else []
    steps = sorted(int(name[5:]) for name in names if re.fullmatch(r"step_\d{6,}", name))
    return [os.path.join(out_dir, f"step_{step:06d}") for step in steps]


def checksum(path: str) -> int:
    value = 0
    with open(path, "rb") as file:
        while part := file.read(1 << 20):
            value = zlib.crc32(part, value)
    return value


def load_checkpoint(path: str) -> Checkpoint:
    """OSError if a file of it is missing, cut short or changed."""
    try:
        with open(os.path.join(path, "checksums.json")) as file:
            for name, expected in json.load(file).items():
                if checksum(os.path.join(path, name)) != expected:
                    raise OSError(f"{name} is not as it was written")
        state = torch.load(os.path.join(path, "trainer_state.pt"), map_location="cpu", weights_only=True)
    except Exception as error:  # torch.load raises half a dozen types on a torn file
        raise OSError(first_line(error)) from None
    return Checkpoint(path, state)


def find_checkpoint(cfg) -> Checkpoint | None:
    """What --resume asks for, a named checkpoint or the newest whole one in out_dir; None: from the beginning."""
    own = checkpoints(cfg.out_dir) if restarted(cfg.out_dir) else []  # of this launch: newer than what it began with
    if cfg.resume not in ("", "latest") and not own:
        try:
            return load_checkpoint(cfg.resume)
        except OSError as error:
            raise ConfigError(f"--resume {cfg.resume}: not a whole checkpoint ({error})") from None
    if not cfg.resume and not own:
        return None
    for path in reversed(checkpoints(cfg.out_dir)):
        try:
            return load_checkpoint(path)
        except OSError as error:
            say(f"checkpoint {path} is damaged ({error}): trying the one before")
    say(f"--resume: no checkpoint in {cfg.out_dir}, starting from the beginning")
    return None


def model_writer(model, tokenizer, source: str):
    """write(directory), which writes what from_pretrained loads. The generation_config.json of `source` comes along as
    it is: transformers refuses to write some that it reads."""
    from transformers import GenerationConfig
    from transformers.utils import cached_file

    generation = None
    try:
        model.generation_config.validate(strict=True)
    except ValueError:  # it would not be written, and the sampler does not need it: vLLM has its own parameters
        model.generation_config = GenerationConfig()
    with contextlib.suppress(OSError), open(cached_file(source, "generation_config.json"), "rb") as file:
        generation = file.read()

    def write(path):
        model.save_pretrained(path)
        tokenizer.save_pretrained(path)
        file = os.path.join(path, "generation_config.json")
        with contextlib.suppress(FileNotFoundError):
            os.remove(file)  # the one that samples for us
        if generation is not None:
            with open(file, "wb") as target:
                target.write(generation)

    return write


def write_checkpoint(final: str, partial: str, write_model, state: dict) -> None:
    """It gets its name only when it is whole."""
    shutil.rmtree(partial, ignore_errors=True)
    write_model(partial)
    torch.save(state, os.path.join(partial, "trainer_state.pt"))
    sums = {name: checksum(os.path.join(partial, name)) for name in files_below(partial)}
    with open(os.path.join(partial, "checksums.json"), "w") as file:
        json.dump(sums, file, indent=1)
    for name in [*sums, *{os.path.dirname(name) for name in sums}, "checksums.json"]:
        fsync(os.path.join(partial, name))
    if os.path.isdir(final):
        os.replace(final, free_name(final + ".stale"))
    os.replace(partial, final)
    fsync(os.path.dirname(final))


def files_below(path: str) -> list[str]:
    """Their names relative to it: a tokenizer with several chat templates writes a folder."""
    found = (os.path.join(folder, name) for folder, _, names in os.walk(path) for name in names)
    return sorted(os.path.relpath(file, path) for file in found)


def fsync(path: str) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def link_best(out_dir: str, best: dict) -> None:
    """The link `best` points to the best checkpoint, if that is still there; else there is none."""
    link, name = os.path.join(out_dir, "best"), f"step_{best['step']:06d}" if best else ""
    with contextlib.suppress(FileNotFoundError):
        os.remove(link + ".new")
    if best and os.path.isdir(os.path.join(out_dir, name)):
        os.symlink(name, link + ".new")
        os.replace(link + ".new", link)
    elif os.path.islink(link):
        os.remove(link)


def fingerprint(model) -> int:
    """Names the weights: the sum of their bits, by parameter. The same on every device."""
    parameters = enumerate(model.parameters(), 1)
    sums = (n * int(p.detach().reshape(-1).view(torch.int32).sum(dtype=torch.int64)) for n, p in parameters)
    return sum(sums) % 2**63


# ----------------------------------------------------------------------------------------------------------------
# The run


class Run:
    """A run between its first and its last step: it saves when that is due, on signals, and on the way out of an error.

    SIGTERM and SIGINT end it where it is: a step is a pure function of (seed, step), so what the last whole step left
    is saved, unless it is already, and the broken one is made again after --resume. Only an optimiser that works is
    waited for, until the step is recorded. SIGUSR1, or a file `save` in out_dir, saves after the step.
    """

    def __init__(self, cfg, world: World, checkpoint: Checkpoint | None, started: float):
        self.world, self.started, self.rank0 = world, started, world.rank == 0
        self.checkpoint, self.best, self.lock_file = checkpoint, {}, None
        self.step = self.saved = self.first = checkpoint.state["step"] if checkpoint else 0
        if len(set(world.gather([self.first]))) > 1:
            raise TrainingError(
                f"--resume: the machines hold different checkpoints in {cfg.out_dir}; share it, or copy them"
            )
        if self.rank0:  # every rank has read what it needs of an earlier run, which may now be moved
            cfg, self.lock_file = claim_out_dir(cfg, checkpoint)
        self.cfg = world.gather([cfg])[0]
        self.exits, self.clock = contextlib.ExitStack(), Clock(world.device)
        self.lock = threading.Lock()  # held while weights change and while they are saved
        self.held, self.whole, self.stopping, self.left = False, True, False, False
        self.alone = True  # rank 0 can save without the others
        self.model, self.bad, self.said = None, 0, set()
        self.log = Log(self.cfg, self.first if checkpoint else -1, self.rank0)

    def track(self, model, optimizer, write_model, identity: int) -> None:
        """What a checkpoint is made of. write_model(directory) writes what from_pretrained loads; identity: that of
        the weights before the first step. A resumed run gets its optimiser's state back here."""
        self.model, self.optimizer, self.write_model, self.identity = model, optimizer, write_model, identity
        optimizer.register_step_pre_hook(lambda *_: self.hold(whole=False))
        if self.checkpoint:
            self.restore()
        elif self.rank0:
            self.rehearse()

    def state(self) -> dict:
        """What trainer_state.pt holds. Called on every rank when a save is due."""
        return dict(optimizer=self.optimizer.state_dict())

    def restore(self) -> None:
        state, out = self.checkpoint.state, self.cfg.out_dir
        self.optimizer.load_state_dict(state.pop("optimizer"))  # pop: nothing else keeps it in memory
        say(f"resumed from {self.checkpoint.path} at step {self.first}")
        for name, old in state["config"].items():
            if name != "resume" and getattr(self.cfg, name, None) != old:
                say(f"  changed since then: --{name} {old} -> {getattr(self.cfg, name, 'gone')}")
        if state["world_size"] != self.world.size:
            say(f"  {state['world_size']} ranks before, {self.world.size} now: the sums round differently from here on")
        if self.rank0:
            # of the log, not of the checkpoint: an eval comes after its step, and a stop may come between the two
            evals = [m for m in self.log.history if m["step"] and view.is_number(m.get("eval_accuracy"))]
            evals = [m for m in evals if os.path.isdir(os.path.join(out, f"step_{m['step']:06d}"))]
            best = max(evals, key=lambda m: m["eval_accuracy"], default={})
            self.best = {key: best[key] for key in ("step", "eval_accuracy") if best}
            link_best(out, self.best)
        self.best = self.world.gather([self.best])[0]

    def rehearse(self) -> None:
        """That a checkpoint can be written is proved before the first step, not found out after hours."""
        trial = os.path.join(self.cfg.out_dir, "partial_000000")
        try:
            self.write_model(trial)
            room = shutil.disk_usage(trial).free
            size = sum(os.path.getsize(os.path.join(trial, name)) for name in files_below(trial))
        except Exception as error:
            why = f"no checkpoint can be saved there ({first_line(error)})"
            raise ConfigError(f"--out_dir {self.cfg.out_dir}: {why}") from error
        finally:
            shutil.rmtree(trial, ignore_errors=True)
        if room < 3 * size:  # weights and both of Adam's moments
            say(f"warning: {self.cfg.out_dir} has {room / 1e9:.2g} GB free, a checkpoint takes {3 * size / 1e9:.2g}")

    def steps(self):
        """The numbers of the steps that are left. After each one: what is due is saved."""
        for step in range(self.first + 1, self.cfg.max_steps + 1):
            seed_everything(seed_of(self.cfg.seed, 2, step, self.world.rank))
            yield step
            due = self.cfg.save_every and step % self.cfg.save_every == 0
            due = due or step in (self.best.get("step"), self.cfg.max_steps)
            asked = self.rank0 and os.path.isfile(os.path.join(self.cfg.out_dir, "save"))
            if asked:
                os.remove(os.path.join(self.cfg.out_dir, "save"))
            if any(self.world.gather([due or asked])):
                self.save()

    def record(self, step: int, metrics: dict, rows: list[dict]) -> None:
        """The step is whole: from here on a stop saves it. rows: of its samples, for completions.jsonl."""
        self.hold()
        times = self.clock.take()
        speed = dict(tokens_per_s=metrics["tokens"] / max(1e-9, sum(times.values())))
        self.step, self.whole = step, True  # first: a dashboard that raises costs no step
        self.log.step(dict(step=step) | metrics | speed | times, rows)
        self.release()
        if step == self.first + 1:
            self.clock.say_peaks()
        self.bad = self.bad + 1 if metrics["skipped_steps"] else 0
        if self.bad == BAD_STEPS:
            raise TrainingError(
                f"no finite gradient in {self.bad} steps in a row, so nothing was updated: lower --learning_rate, look "
                "at the rewards and at completions.jsonl, and go on with --resume"
            )

    def introduce(self, defaults, what: str) -> None:
        say(f"flags: {differing_flags(self.cfg, defaults)}")
        size = sum(p.numel() for p in self.model.parameters()) / 1e6
        say(f"{self.cfg.model}: {size:.2f} M parameters on {self.world.device}, {self.world.size} rank(s); {what}")

    def failures(self, scores: list, step: int, n_samples: int) -> dict:
        """Of the reward functions that failed, on every rank: said the first time, counted, the end if none came
        through in the first step. And what they logged of their own."""
        failed = sum(sum(s.failed) for s in scores)
        for line in [*(s.first_failure for s in scores), *(s.first_retry for s in scores)]:
            self.say_once("failed" if "failed on" in line else "retry", line)
        if failed == n_samples and step == 1:
            raise TrainingError("every reward of the first step failed; the line above says how the first one did")
        causes = sum((Counter(s.failures) for s in scores), Counter())
        metrics = {name: value for s in scores for name, value in s.metrics.items()}
        return metrics | {f"reward_failed/{c}": n for c, n in causes.items()} | dict(failed_rewards=failed or None)

    def say_once(self, what: str, line: str) -> None:
        if line and what not in self.said:
            self.said.add(what)
            say(line)

    def eval_due(self, step: int) -> bool:
        """Before the first step, every --eval_every steps and after the last; again where a stop came before it."""
        last, every = self.log.history[-1:], self.cfg.eval_every
        done = bool(last) and last[0]["step"] == step and "eval_accuracy" in last[0]
        due = step in (0, self.cfg.max_steps) or bool(every and step % every == 0)
        return bool(self.cfg.eval_data) and self.world.gather([due and not done])[0]

    def record_eval(self, step: int, metrics: dict) -> None:
        """Adds an eval's metrics to the line of its step."""
        self.hold()
        self.log.add(step, metrics)
        if step and metrics["eval_accuracy"] > self.best.get("eval_accuracy", -math.inf):
            self.best = dict(step=step, eval_accuracy=metrics["eval_accuracy"])
        self.release()

    # -- saving

    def save(self) -> None:
        state = self.state()
        self.hold()
        self.write(state)
        self.release()

    def write(self, state: dict) -> None:
        """Rank 0 writes the last whole step. A save that fails is said and leaves the checkpoint before in place: the
        run goes on, the next save tries again."""
        if not self.rank0 or self.saved == self.step:
            return
        final, partial = (os.path.join(self.cfg.out_dir, f"{kind}_{self.step:06d}") for kind in ("step", "partial"))
        if not all(p.isfinite().all() for p in self.model.parameters()):
            say(f"step {self.step}: not saved, some parameters are not finite; the checkpoint before stands")
            return
        state |= dict(step=self.step, config=dataclasses.asdict(self.cfg), best=self.best)
        state |= dict(world_size=self.world.size, identity=self.identity)
        try:
            write_checkpoint(final, partial, self.write_model, state)
            self.saved = self.step
            for path in checkpoints(self.cfg.out_dir)[: -self.cfg.keep] if self.cfg.keep else []:
                if int(path.rpartition("_")[2]) != self.best.get("step"):
                    shutil.rmtree(path)
            link_best(self.cfg.out_dir, self.best)
        except (OSError, RuntimeError, SafetensorError) as error:  # torch and safetensors report a full disk their way
            say(f"step {self.step}: could not save ({error}); the checkpoint before stands, the next save tries again")
            shutil.rmtree(partial, ignore_errors=True)

    def save_last(self) -> str:
        """Saves what the last whole step left, if it is not saved yet and still there; says what stands."""
        if self.step > 0 and self.whole and self.alone:
            self.write(self.state())
        if not self.saved:
            return f"stopped in step {self.step + 1}; nothing is saved"
        if self.checkpoint and self.saved == self.first:  # perhaps of another directory
            return f"stopped in step {self.step + 1}; go on with --resume {self.checkpoint.path}"
        path = os.path.join(self.cfg.out_dir, f"step_{self.saved:06d}")
        return f"stopped in step {self.step + 1}, {path} is saved; go on with --resume"

    # -- signals

    def hold(self, whole: bool | None = None) -> None:
        """Until release() no stop comes in between, and the weights are nobody else's."""
        if not self.held:
            self.held = True  # first: a signal that comes now waits already
            self.lock.acquire()
        self.whole = self.whole if whole is None else whole

    def release(self) -> None:
        self.lock.release()
        self.held = False
        if self.stopping:
            raise Stopped

    def on_stop(self, number, frame) -> None:
        first, self.stopping = not self.stopping, True
        if first and not self.held:
            raise Stopped

    def on_save(self, number, frame) -> None:
        with contextlib.suppress(OSError), open(os.path.join(self.cfg.out_dir, "save"), "w"):
            pass

    def __enter__(self):
        if threading.current_thread() is threading.main_thread():  # only there signals can be had
            hear, tell = os.pipe()
            os.set_blocking(tell, False)
            handlers = {signal.SIGTERM: self.on_stop, signal.SIGINT: self.on_stop, signal.SIGUSR1: self.on_save}
            for number, handler in handlers.items():
                self.exits.callback(signal.signal, number, signal.signal(number, handler))
            self.exits.callback(os.close, tell)  # ends the thread
            self.exits.callback(signal.set_wakeup_fd, signal.set_wakeup_fd(tell, warn_on_full_buffer=False))
            threading.Thread(target=self.watch, args=(hear,), daemon=True).start()
        return self

    def watch(self, hear: int) -> None:
        """A thread that hears signals, too, while the main thread sits in one long call."""
        parent, asked, numbers = os.getppid(), None, b" "
        while numbers:
            ready = select.select([hear], [], [], 1.0)[0]
            if "TORCHELASTIC_RUN_ID" in os.environ and os.getppid() != parent:
                os._exit(1)  # torchrun was killed: no orphan trains on beside a --resume
            numbers = os.read(hear, 64) if ready else b" "
            for number in set(numbers) & {signal.SIGTERM, signal.SIGINT}:
                if asked is None:
                    asked = time.monotonic()
                    threading.Thread(target=self.leave, daemon=True).start()
                elif time.monotonic() - asked > 1:  # sooner: the same Ctrl-C, which torchrun passes on again
                    os._exit(128 + number)
        os.close(hear)

    def leave(self) -> None:
        """Ends the process if the main thread, deep in a call, does not come to it by itself."""
        time.sleep(3)
        if self.left:
            return
        with self.lock:
            line = self.save_last()
        time.sleep(2)  # it may be closing what it had opened
        if not self.left:
            say(f"signal: {line}")
            os._exit(0)

    def __exit__(self, kind, error, trace):
        if error is not None and self.model is not None:
            self.hold()
            say(("signal: " if self.stopping else "") + self.save_last())
            self.lock.release()
        elif self.stopping:
            say("signal: stopped before the first step; nothing was trained")
        self.held = True  # no more stops
        closing = [lambda: self.log.close(time.monotonic() - self.started, self.best), self.exits.close]
        if error is None and self.world.size > 1:  # nobody leaves while rank 0 still writes; and what is left of DDP is
            closing[1:1] = [dist.barrier, gc.collect]  # freed before its group: later it can wait for ever for gloo
        for close in closing:
            with contextlib.suppress(Exception) if error is not None else contextlib.nullcontext():
                close()
        if "RANK" in os.environ and dist.is_initialized():  # an engine that closed may have ended it
            with contextlib.suppress(Exception) if error is not None else contextlib.nullcontext():
                dist.destroy_process_group()
        self.left = True
        if self.lock_file is not None:
            os.close(self.lock_file)
        return self.stopping


class Clock:
    """Seconds of each phase of a step, and in the first one the peak of memory."""

    def __init__(self, device):
        self.device, self.seconds, self.peaks, self.first = device, {}, {}, True

    @contextlib.contextmanager
    def __call__(self, phase: str):
        self.peak()
        started = time.perf_counter()
        yield
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        self.seconds[f"time_{phase}"] = time.perf_counter() - started
        self.peaks[phase] = self.peak()

    def take(self) -> dict:
        seconds, self.seconds = self.seconds, {}
        return seconds

    def peak(self) -> float:
        """The most bytes in use since the last call: of torch on a GPU, of the process elsewhere (Linux)."""
        if self.first and self.device.type == "cuda":
            most = torch.cuda.max_memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            return float(most)
        with contextlib.suppress(OSError):
            if self.first:
                with open("/proc/self/status") as status, open("/proc/self/clear_refs", "w") as reset:
                    most = next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))
                    reset.write("5")
                    return 1024.0 * most
        return 0.0

    def say_peaks(self) -> None:
        self.first = False
        where = "on the GPU" if self.device.type == "cuda" else "resident"
        sampling = "--vllm_gpu_memory_utilization" if self.device.type == "cuda" else "--num_prompts"
        flags = dict(rollout=sampling, logps="--beta 0")
        flags |= dict(update="--micro_batch_tokens, --gradient_checkpointing")
        shown = [f"{p} {self.peaks[p] / 1e9:.2g} ({flags[p]})" for p in flags if self.peaks.get(p)]
        if shown:
            say(f"peak memory of the first step, GB {where}, and what lowers it: {', '.join(shown)}")


# ----------------------------------------------------------------------------------------------------------------
# Packed rows: prompts, each once, and their completions in one row without padding. Only attention knows what belongs
# together, so linear layers see no padding, and layers that are compiled need one graph for all lengths


def pack_row(input_ids, prompt_lengths, groups, mask):
    """input_ids [N, L], right-padded, prompt_lengths [N], groups [N] of rows with the same prompt, mask [N, T] of the
    completions -> the row [1, S], its positions in the texts [1, S], what attention needs (see packed_attention), and
    where in the row stands the token before each completion token [n]."""
    (N, T), device = mask.shape, input_ids.device
    lengths, order = mask.sum(1).sort(descending=True, stable=True)  # [N]: completions lie by length in the row
    input_ids, prompt_lengths, groups = input_ids[order], prompt_lengths[order], groups[order]
    names, which = groups.unique(return_inverse=True)  # [P], [N]: the row of its prompt
    first = (groups == names[:, None]).int().argmax(-1)  # [P]: a sample that has it
    L = int(prompt_lengths.max())
    column = torch.arange(L, device=device)[None]  # [1, L]
    real = column < prompt_lengths[first, None]  # [P, L]
    place = real.flatten().cumsum(0).view_as(real) - 1  # [P, L]: where in the row
    ids, at = input_ids[first, :L][real], column.expand_as(real)[real]
    blocks = [(place, place, real.flatten().nonzero()[:, 0], column, column)]
    read = place[which].gather(1, prompt_lengths[:, None] - 1)  # [N, 1]: the last token of each prompt
    if T > 1:
        rest = mask[order, 1:]  # [N, T-1]: nothing follows the last token, so it is not in the row
        follows = prompt_lengths[:, None] + torch.arange(T - 1, device=device)  # [N, T-1]
        after = rest.flatten().cumsum(0).view_as(rest) - 1 + len(ids)  # [N, T-1]
        ids = torch.cat([ids, input_ids.gather(1, follows.clamp(max=input_ids.shape[1] - 1))[rest]])
        at, read = torch.cat([at, follows[rest]]), torch.cat([read, after], 1)
        k_at = torch.where(torch.cat([real[which], rest], 1), torch.cat([column.expand(N, -1), follows], 1), 2**30)
        q_at = torch.where(rest, follows, prompt_lengths[:, None] - 1)  # padding sees what its prompt saw
        k_from = torch.cat([place[which], after], 1)
        # attention pads: in two blocks of like lengths, if that saves a fifth of it
        cuts = torch.arange(N, device=device)
        area, cut = map(int, (cuts * T + (N - cuts) * lengths).min(0))  # of the rows before the cut and those after it
        for start, end in ((0, cut), (cut, N)) if 5 * area < 4 * N * T else ((0, N),):
            if t := int(lengths[start]) - 1:  # else nothing follows the prompts
                rows, keys = slice(start, end), slice(L + t)
                used = rest[rows, :t].flatten().nonzero()[:, 0]
                blocks.append((after[rows, :t], k_from[rows, keys], used, q_at[rows, :t], k_at[rows, keys]))
    return ids[None], at[None], blocks, read[order.argsort()][mask]


@contextlib.contextmanager
def packed(blocks):
    """Within it the model's attention takes its row for these blocks of texts."""
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    AttentionMaskInterface.register("packed", functools.partial(packed_masks, blocks))
    try:
        yield
    finally:
        AttentionMaskInterface.register("packed", sdpa_mask)


def packed_masks(blocks, mask_function, **_):
    """Stands in for the mask builder of transformers, which every layer gets its mask from. The model's own rule of
    who sees whom (causal, a sliding window, chunks) is asked by position in the text, not by place in the row."""
    masks = [mask_function(0, 0, q_at[:, :, None], k_at[:, None]) for *_, q_at, k_at in blocks]  # [N or 1, T, K]
    plain = [m.shape[0] == 1 and torch.equal(m, m.new_ones(m.shape).tril()) for m in masks]  # the fast causal kernel
    masks = [None if causal else m[:, None] for m, causal in zip(masks, plain, strict=True)]
    return [(*block[:3], mask) for block, mask in zip(blocks, masks, strict=True)]


def attention_by_products(module, query, key, value, mask, scaling=None, **_):
    """Attention of short texts on a CPU, where the fused kernel's backward takes 5 times as long in bfloat16."""
    (N, heads, T, D), (few, K) = query.shape, key.shape[1:3]
    mask = query.new_ones(T, K, dtype=torch.bool).tril() if mask is None else mask[:, None]
    bias = torch.where(mask, 0.0, -torch.inf).to(value.dtype)  # [T, K] or [N, 1, 1, T, K]
    query = (query * (scaling or D**-0.5)).to(value.dtype).reshape(N, few, -1, D)  # heads that have one key: as rows
    scores = (query @ key.to(value.dtype).transpose(2, 3)).view(N, few, -1, T, K) + bias
    out = scores.softmax(-1).view(N, few, -1, K) @ value
    return out.view(N, heads, T, -1).transpose(1, 2), None


@torch.compiler.disable  # many shapes: compiled, it would be compiled again and again
def packed_attention(module, query, key, value, attention_mask, **options):
    """Attention in a row [1, heads, S, D] of many texts: each block's rows are taken out of it, and put back."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if not isinstance(attention_mask, list):
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    parts = []
    for q_from, k_from, real, mask in attention_mask:
        q, k, v = (
            x[0].transpose(0, 1).index_select(0, source.flatten()).unflatten(0, source.shape).transpose(1, 2)
            for x, source in ((query, q_from), (key, k_from), (value, k_from))
        )  # [N, heads, T or K, D]
        short = k.shape[2] <= (1024 if v.dtype == torch.bfloat16 else 256)  # its square is kept for backward
        attend = attention_by_products if short and v.device.type == "cpu" else sdpa_attention_forward
        out = attend(module, q, k, v, mask, **options)[0]  # [N, T, heads, D]
        parts.append(out.flatten(0, 1).index_select(0, real))
    return torch.cat(parts)[None], None


@torch.no_grad()
def packs_exactly(model, hidden) -> bool:
    """Whether texts that lie in one row ignore each other: not so where more than attention looks back. hidden: what
    a Policy computes. Leaves the model with an attention that can do it."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    config, device = model.config.get_text_config(), next(model.parameters()).device
    if config._attn_implementation not in ("sdpa", "packed"):
        return False
    AttentionInterface.register("packed", packed_attention)
    AttentionMaskInterface.register("packed", sdpa_mask)
    # two prompts, two completions each; every token differs
    prompts, completions = torch.tensor([[5, 5, 3, 3], [2, 4, 3, 2]], device=device)
    ids = torch.arange(1, 37, device=device).reshape(4, 9) % config.vocab_size
    ids[1, :5], ids[3, :3] = ids[0, :5], ids[2, :3]
    mask = torch.arange(4, device=device) < completions[:, None]
    try:
        config._attn_implementation = "packed"
        rows, one = hidden(ids, prompts, mask), hidden(ids, prompts, mask, prompts)
        # rounding in float32 makes 1e-6 to 1e-4 of it, one wrong key 0.04 to 0.9
        exact = ((rows - one).norm(dim=-1) <= 1e-2 * rows.norm(dim=-1)).all().item()
    except Exception:
        exact = False
    config._attn_implementation = "packed" if exact else "sdpa"
    return exact


# ----------------------------------------------------------------------------------------------------------------
# The sampler: what vLLM's builds differ in, and whether it samples from the policy

CACHE_BLOCK = 32  # tokens: of its cache of keys and values on a CPU; samples of a prompt share whole blocks of it
CACHE_LIMIT = 2**31  # bytes that this cache takes at most
COLUMNS = 64  # after a push each 64th column of a matrix is compared, another one each time


def find_vllm(device: torch.device, verbose: bool) -> str:
    """Prepares this process for an engine inside it; what stands in the way, or nothing."""
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # in this process: weights go by reference
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "INFO" if verbose else "ERROR")
    install = "--no-deps -r requirements-cpu.txt" if device.type == "cpu" else "-r requirements.txt"
    try:
        from vllm.platforms import current_platform
    except ImportError as error:
        return f"vllm cannot be imported: {error}; pip install {install}"
    if device.type != current_platform.device_type:
        return f"the installed vllm has no {device.type} build; pip install {install}"
    if device.type == "cpu":  # else the first rollout compiles C++ for 10 s, for a token's rank that nobody reads
        type(current_platform).simple_compile_backend = "eager"
    return ""


def choose_sampler(cfg, device: torch.device, small: bool) -> tuple[str, str]:
    """Which sampler, and why: vllm wherever it can be imported and has a build for this device."""
    if cfg.rollout == "hf":
        return "hf", "asked for"
    if cfg.rollout == "auto" and small:
        return "hf", "vLLM would take longer to start than it saves on a model this small"
    problem = "vLLM has no float64" if cfg.dtype == "float64" else find_vllm(device, cfg.verbose)
    if problem and cfg.rollout == "vllm":
        raise ConfigError(f"--rollout vllm: {problem}")
    return ("hf", problem) if problem else ("vllm", "asked for" if cfg.rollout == "vllm" else "found")


def cache_bytes(cfg, length: int, dtype: torch.dtype, world: World) -> int:
    """What the keys and values of a step need on a CPU, within CACHE_LIMIT; and no more, for a cache that is small is
    a cache that stays in the processor's."""
    from transformers import AutoConfig

    sizes = AutoConfig.from_pretrained(cfg.model).get_text_config()
    heads = getattr(sizes, "num_key_value_heads", None) or sizes.num_attention_heads
    width = getattr(sizes, "head_dim", None) or sizes.hidden_size // sizes.num_attention_heads
    rows = min(256, -(-cfg.num_prompts // world.size) * cfg.num_generations)  # 256: the engine's own limit
    one = -(-length // CACHE_BLOCK) * CACHE_BLOCK * 2 * sizes.num_hidden_layers * heads * width * dtype.itemsize
    return max(2 * one, min((rows + 1) * one, CACHE_LIMIT))


def repack(model) -> None:
    """What vLLM's CPU build packs when it starts, but not again when it reloads: a tied head, the experts of a MoE."""
    head = getattr(model, "lm_head", None)
    if hasattr(head, "quant_method"):
        head.quant_method.process_weights_after_loading(head)
    for module in model.modules():
        kernel = getattr(getattr(module, "quant_method", None), "moe_kernel", None)
        if kernel is not None and module.w2_weight.device.type == "cpu":
            kernel.fused_experts.process_weights_after_loading(module)


def weight_bits(model, dtype: torch.dtype, number: int) -> int:
    """The bits of every vector and of each 64th column of every matrix, summed as integers: exact, the same for a model
    here and in the engine, which casts to its dtype and fuses matrices by rows; a tied matrix counts once.

    vLLM's CPU build only keeps packed matrices: their columns are what the layer makes of unit vectors.
    """
    integers, found, first = {4: torch.int32, 2: torch.int16}[dtype.itemsize], set(), number % COLUMNS
    for module in model.modules():
        for name, p in module.named_parameters(recurse=False):
            if name == "weight" and hasattr(module, "cpu_linear"):
                size = getattr(module, "input_size", 0) or module.embedding_dim
                units = torch.nn.functional.one_hot(torch.arange(first, size, COLUMNS), size)
                columns = module.cpu_linear(units.to(p.dtype), p, None)
            else:
                columns = p.detach()[..., first::COLUMNS] if p.dim() > 1 else p.detach()
            columns = columns.to(dtype) + 0.0  # makes -0.0 the 0.0 that a product makes of it
            found.add((id(p), int(columns.view(integers).sum(dtype=torch.int64))))
    return sum(bits for _, bits in found)


def gap_sums(log_ratio, cfg) -> tuple[dict, np.ndarray]:
    """How far the sampler is from the trainer, log(trainer / sampler) of a rank's tokens [n]: sums of absolute values,
    of truncated importance weights and of their squares, the largest of each, and every k-th value for quantiles."""
    gap = log_ratio.abs()
    weight = log_ratio.exp().clamp(max=cfg.tis_cap or math.inf)
    values = torch.stack([gap.sum(), weight.sum(), weight.square().sum()]).tolist() if len(gap) else [0.0] * 3
    most = torch.stack([gap.max(), weight.max()]).tolist() if len(gap) else [0.0] * 2
    some = log_ratio[:: len(gap) // 10_000 + 1].float().cpu().numpy()
    return dict(n=len(gap), sums=values, most=most), some


def gap_metrics(parts: list[tuple], cfg) -> dict:
    """The step's metrics from the sums of all ranks. Stops the run if the sampler is not the policy."""
    n = sum(part["n"] for part, _ in parts)
    if not n:
        return dict(sampler_gap=0.0)
    total, weight, square = np.sum([part["sums"] for part, _ in parts], 0)
    worst, largest = np.max([part["most"] for part, _ in parts], 0)
    limit = cfg.max_sampler_gap or (0.1 if cfg.dtype == "bfloat16" else 1e-4)
    if not total / n <= limit:
        raise TrainingError(
            f"the sampler's log-probabilities are off by {total / n:.2g} on average (at most {worst:.2g}; "
            f"--max_sampler_gap {limit:g}). Likely causes: weights not pushed or a cache not reset after a push, "
            "log-probabilities before the temperature, top-p or top-k in the sampler, another prompt or chat template "
            "than the one that was scored, another dtype"
        )
    low, high = np.quantile(np.exp(np.concatenate([some for _, some in parts])), (0.01, 0.99))
    metrics = dict(sampler_gap=total / n, sampler_gap_max=worst, sampler_ratio_q01=low, sampler_ratio_q99=high)
    if cfg.tis_cap:
        # ess: the effective share of the tokens
        metrics |= dict(tis_mean=weight / n, tis_max=largest, tis_ess=weight**2 / (n * square))
    return {name: float(value) for name, value in metrics.items()}


def rollout_gap(samples: list, cfg, world: World) -> dict:
    """The same of a whole rollout, whose samples every rank holds: each sums up its share of them."""
    counted = [s for s in samples if s.in_loss and s.old_logps is not None][world.rank :: world.size]
    known = [s.old_logps - s.sampler_logps for s in counted]
    log_ratio = torch.from_numpy(np.concatenate(known)) if known else torch.zeros(0)
    return gap_metrics(world.gather([gap_sums(log_ratio, cfg)]), cfg)


def pass_at_k(n: int, correct: np.ndarray, k: int) -> float:
    """Unbiased 1 - C(n - c, k) / C(n, k) (Chen et al., arXiv 2107.03374, eq. 1), mean over prompts. correct [P]."""
    return float(np.mean([1 - math.comb(n - int(c), k) / math.comb(n, k) for c in correct]))


@contextlib.contextmanager
def quiet(verbose: bool):
    """Hides what libraries write to the terminal while an engine starts; the end of it is shown if that fails."""
    if verbose:
        yield
        return
    sys.stdout.flush()
    saved = [os.dup(1), os.dup(2)]
    with tempfile.TemporaryFile() as hidden:
        try:
            os.dup2(hidden.fileno(), 1)
            os.dup2(hidden.fileno(), 2)
            yield
            hidden.truncate(0)
        finally:
            for target, handle in enumerate(saved, 1):
                os.dup2(handle, target)
                os.close(handle)
            hidden.seek(0)
            sys.stderr.write(b"".join(hidden.readlines()[-20:]).decode(errors="replace"))


# ----------------------------------------------------------------------------------------------------------------
# The log


def say(text: str) -> None:
    """One line of the log, from rank 0; above the progress bar where there is one."""
    if is_rank0():
        from tqdm import tqdm

        encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
        tqdm.write(text.encode(encoding, "backslashreplace").decode(encoding), file=sys.stdout)
        sys.stdout.flush()


class JsonLines:
    """A file of one JSON object a line. A full disk delays lines, it does not stop the run or tear the file."""

    def __init__(self, path: str, last_step: int):
        """Keeps the lines up to last_step: what an interrupted run wrote after its checkpoint is made again."""
        kept = []
        if last_step >= 0 and os.path.exists(path):
            with open(path, "rb") as file:
                for line in file:
                    with contextlib.suppress(ValueError, KeyError, TypeError):
                        if line.endswith(b"\n") and json.loads(line)["step"] <= last_step:
                            kept.append(line)
        with open(path + ".new", "wb") as file:
            file.writelines(kept)
        os.replace(path + ".new", path)
        self.path, self.pending, self.size = path, [], sum(map(len, kept))
        self.last = self.size - len(kept[-1]) if kept else 0  # where the last line begins

    def write(self, *records, again=False) -> None:
        """again: in place of the last line."""
        if again and self.pending:
            self.pending.pop()
        elif again:
            self.size = self.last
        self.pending += [json.dumps(record, default=str).encode() + b"\n" for record in records]
        try:
            with open(self.path, "r+b") as file:
                file.seek(self.size)
                file.write(b"".join(self.pending))
                file.truncate()  # half a line of a write that failed
        except OSError as error:
            say(f"cannot write {self.path} ({error.strerror}): {len(self.pending)} lines wait for the next try")
            return
        self.size += sum(map(len, self.pending))
        self.last = self.size - len(self.pending[-1]) if self.pending else self.last
        self.pending = []


class Log:
    """What a run says and writes: metrics.jsonl, completions.jsonl, a line a step or a progress bar, curves.png."""

    def __init__(self, cfg, resumed_from: int, rank0: bool):
        """resumed_from: the step of the checkpoint, whose lines are kept; -1 for a new run."""
        from tqdm import tqdm

        self.cfg, self.history, self.rank0, self.shown = cfg, [], rank0, ""
        if rank0:
            self.metrics = JsonLines(os.path.join(cfg.out_dir, "metrics.jsonl"), resumed_from)
            self.completions = JsonLines(os.path.join(cfg.out_dir, "completions.jsonl"), resumed_from)
            self.history = view.read_jsonl(self.metrics.path)
            self.report = reporter(cfg)
        off = not (rank0 and sys.stderr.isatty())
        self.bar = tqdm(total=cfg.max_steps, initial=max(0, resumed_from), unit="step", disable=off)
        self.first, self.started = max(0, resumed_from), time.monotonic()

    def step(self, metrics: dict, rows: list[dict]) -> None:
        metrics |= dict(num_tokens=metrics["tokens"] + (self.history[-1].get("num_tokens", 0) if self.history else 0))
        metrics = finite(metrics)
        self.history.append(metrics)
        if not self.rank0:
            return
        count = self.cfg.log_completions
        self.metrics.write(metrics)
        self.completions.write(*map(finite, rows if count < 0 else rows[:count]))
        self.report(metrics["step"], trl_names(metrics), rows)
        if rows:
            row = rows[metrics["step"] % len(rows)]
            self.shown = f"  sample: {short(row['prompt'])} -> {short(row['completion'])} reward {row['reward']:g}"
        self.bar.set_postfix(reward=metrics["reward"], refresh=False)
        self.bar.update()
        if self.bar.disable:
            seconds_per_step = (time.monotonic() - self.started) / (metrics["step"] - self.first)
            say(log_line(metrics, self.cfg.max_steps, seconds_per_step))

    def add(self, step: int, metrics: dict) -> None:
        """To the line of the step, or as a line of its own."""
        again = bool(self.history) and self.history[-1]["step"] == step
        line = (self.history.pop() if again else dict(step=step)) | metrics
        self.history.append(line)
        if self.rank0:
            self.metrics.write(finite(line), again=again)
            self.report(step, trl_names(metrics), [])
            say(f"step {step}: eval accuracy {accuracy(line)}, length {line['eval_length']:.3g}")
            if self.shown:
                say(self.shown)

    def close(self, total_seconds: float, best: dict) -> None:
        """Draws the curves and says the greppable end of the log."""
        train_seconds = time.monotonic() - self.started
        self.bar.close()
        if not self.rank0:
            return
        out, mine = self.cfg.out_dir, [m for m in self.history if m["step"] > self.first]
        picture = os.path.join(out, "curves.png")
        try:
            view.draw([out], picture)
        except (OSError, ImportError, ValueError) as error:  # a picture is not worth a run
            say(f"no curves.png: {error}")
            picture = ""
        evals = [m for m in self.history if m.get("eval_accuracy") is not None]
        values = dict(accuracy_before=accuracy(evals[0]), accuracy_after=accuracy(evals[-1])) if evals else {}
        seconds = sum(v for m in mine for k, v in m.items() if k.startswith("time_"))
        values |= dict(steps=max([self.first, *(m["step"] for m in self.history)]))
        values |= dict(train_seconds=f"{train_seconds:.1f}", total_seconds=f"{total_seconds:.1f}")
        values |= dict(tokens_per_s=f"{sum(m.get('tokens', 0) for m in mine) / max(seconds, 1e-9):.0f}")
        values |= dict(best=f"{out}/best, of step {best['step']}") if os.path.islink(os.path.join(out, "best")) else {}
        values |= dict(out_dir=out) | (dict(curves=picture) if picture else {})
        values |= dict(samples=f"python view.py {out} --step")
        say("\n".join(f"{key}: {value}" for key, value in values.items()))


def finite(values):
    """What JSON cannot hold becomes null."""
    if isinstance(values, dict):
        return {key: finite(value) for key, value in values.items()}
    return None if isinstance(values, float) and not math.isfinite(values) else values


def short(text, most=200) -> str:
    """Its end is kept: the answer stands there."""
    text = repr(str(text))
    return text if len(text) <= most else f"{text[: most // 2]} ... {text[-most // 2 :]}"


def accuracy(metrics: dict) -> str:
    return f"{metrics['eval_accuracy']:.3f} +- {metrics['eval_stderr']:.3f}"


def log_line(m: dict, max_steps: int, seconds_per_step: float) -> str:
    """The line of one step."""
    left = timedelta(seconds=round(seconds_per_step * (max_steps - m["step"])))
    shown = {"reward": "reward", "completion_length": "length", "loss": "loss", "grad_norm": "grad"}
    shown |= {"frac_zero_std": "no-signal", "kl_k3": "kl", "sampler_gap": "gap", "failed_rewards": "FAILED REWARDS"}
    line = f"step {m['step']}/{max_steps}"
    for key, name in shown.items():
        line += f" {name} {m[key]:.3g}" if view.is_number(m.get(key)) else ""
    line += f" SKIPPED {m['skipped_steps']} (gradient not finite)" if m.get("skipped_steps") else ""
    return line + f" | {m['tokens_per_s']:.0f} tok/s, {left} left"


# ----------------------------------------------------------------------------------------------------------------
# Dashboards


def reporter(cfg):
    """A function (step, values, rows) that sends a step to a dashboard; imports its package only when asked."""
    if cfg.report_to == "tensorboard":
        from torch.utils.tensorboard import SummaryWriter

        writer = SummaryWriter(cfg.out_dir)
        return lambda step, values, rows: [writer.add_scalar(k, v, step) for k, v in values.items()] and writer.flush()
    if cfg.report_to == "wandb":
        import wandb

        run = wandb.init(project="grpo", name=os.path.basename(cfg.out_dir), config=vars(cfg), dir=cfg.out_dir)
        columns = ["step", "prompt", "completion", "reward", "advantage"]

        def report(step, values, rows):
            table = [[row[name] for name in columns] for row in rows[: max(0, cfg.log_completions)]]
            run.log(values | (dict(completions=wandb.Table(columns, table)) if rows else {}), step=step)

        return report
    return lambda step, values, rows: None


TRL_NAMES = dict(  # where it is the same quantity; the others keep their names
    lr="learning_rate", frac_zero_std="frac_reward_zero_std", kl_k3="kl", clip_frac="clip_ratio/region_mean",
    reward_std="reward_std_within_groups", reward_std_all="reward_std",  # TRL's is over the whole batch
    completion_length="completions/mean_length", truncated_frac="completions/clipped_ratio",
    completion_length_min="completions/min_length", completion_length_max="completions/max_length",
    ended_length="completions/mean_terminated_length", ended_length_min="completions/min_terminated_length",
    ended_length_max="completions/max_terminated_length", sampler_gap="sampling/sampling_logp_difference/mean",
    sampler_gap_max="sampling/sampling_logp_difference/max", tis_mean="sampling/importance_sampling_ratio/mean",
    tis_max="sampling/importance_sampling_ratio/max",
)  # fmt: skip


def trl_names(metrics: dict) -> dict:
    """The metrics under the names that TRL's GRPOTrainer gives them: dashboards carry over."""
    values = {}
    for key, value in metrics.items():
        if key.startswith("eval_"):
            name = "eval/" + key.removeprefix("eval_")
        elif key.startswith("reward/"):
            name = f"train/rewards/{key.removeprefix('reward/')}" + ("" if key.endswith("/std") else "/mean")
        else:
            name = "train/" + TRL_NAMES.get(key, key)
        values |= {name: value} if view.is_number(value) else {}
    return values | {"train/step_time": sum(v for k, v in metrics.items() if k.startswith("time_"))}
