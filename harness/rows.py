"""Rows of files, and the prompts that they become."""

import csv
import json
import os
import re
from dataclasses import dataclass

import numpy as np

from harness.flags import ConfigError, first_line, say
from reward import import_file


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
