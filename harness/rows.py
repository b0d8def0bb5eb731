"""Rows of files, and the prompts that they become."""

import csv
import gzip
import io
import json
import math
import os
import pickle
import re
from dataclasses import dataclass

import numpy as np

from harness.flags import ConfigError, first_line, need, say
from reward import import_file

FILES = ("jsonl", "json", "csv", "tsv", "parquet")
NOT_VALID = {json.JSONDecodeError: "not valid JSON: ", csv.Error: "not a valid CSV (is a quote not closed?): "}


def read_rows(path: str, name: str) -> list[dict]:
    """Rows of a JSONL, JSON, CSV, TSV or parquet file, a hub dataset name:config:split, or path/to/file.py:function."""
    rows, source = [], None
    try:
        source = row_source(path)
        for row in source:  # it is parsed here, so an error is that of the row after the last
            rows.append(checked(row))
    except (Exception, SystemExit) as error:
        where = "" if source is None else f" row {len(rows) + 1}"
        why = getattr(error, "strerror", None) or NOT_VALID.get(type(error), "") + first_line(error)
        raise ConfigError(f"--{name} {path}{where}: {why}") from None
    if not rows:
        raise ConfigError(f"--{name} {path}: no rows")
    return rows


def row_source(path: str):
    file, _, function = path.rpartition(":")
    zipped, kind = path.lower().endswith(".gz"), path.lower().removesuffix(".gz").rpartition(".")[2]
    if file.endswith(".py"):
        return getattr(import_file(os.path.abspath(file)), function)()
    on_the_hub = re.fullmatch(r"[\w.-]+/[\w.-]+(:[\w.-]*){0,2}", path) and kind not in FILES
    if kind == "parquet" or (on_the_hub and not os.path.exists(path)):
        try:
            from datasets import load_dataset
        except ImportError:
            raise ValueError("no such file; a hub dataset or parquet needs pip install datasets") from None
        repository, config, split = (path.split(":") + ["", ""])[:3]
        hub = dict(path=repository, name=config or None, split=split or "train")
        return load_dataset(**hub if kind != "parquet" else dict(path=kind, data_files=path, split="train"))
    with (gzip.open if zipped else open)(path, "rt", encoding="utf-8-sig", newline="") as opened:
        text = opened.read()
    if kind in ("csv", "tsv"):
        return table_rows(text, "," if kind == "csv" else "\t")
    return json.loads(text) if kind == "json" else map(json.loads, filter(str.strip, text.split("\n")))


def table_rows(text: str, delimiter: str):
    """Rows of a CSV or TSV, each with as many fields as the header has."""
    csv.field_size_limit(2**31 - 1)
    table = filter(None, csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True))  # no blank lines
    header = next(table, [])
    if len(set(header)) < len(header):
        raise ValueError(f"the header names a column twice: {', '.join(header)}")
    for fields in table:
        if len(fields) != len(header):
            raise ValueError(f"{len(fields)} fields, where the header has {len(header)}")
        yield dict(zip(header, fields, strict=True))


def checked(row) -> dict:
    """A row that can travel to a reward's process and into completions.jsonl. NaN, as of a DataFrame, is None."""
    if not isinstance(row, dict):  # as of a dict or a DataFrame, which give the names of their columns
        raise ValueError('must be a JSON object; give a list of them: found["data"], frame.to_dict("records")')
    row = {str(key): None if isinstance(value, float) and math.isnan(value) else value for key, value in row.items()}
    pickle.dumps(row)
    json.dumps(row, default=str, allow_nan=False)
    return row


@dataclass
class Prompt:
    ids: np.ndarray  # [P] int32
    text: str
    row: dict
    messages: list | None = None  # where it is a chat


def load_tokenizer(cfg):
    from transformers import AutoTokenizer

    name, path = ("tokenizer", cfg.tokenizer) if cfg.tokenizer else ("model", cfg.model)
    adapter = os.path.exists(os.path.join(cfg.model, "adapter_config.json"))
    need(not adapter, cfg, "model", "is a LoRA adapter; merge it into its model (peft: merge_and_unload) and name that")
    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
    except Exception as error:  # of a file that is not what it should be
        raise ConfigError(f"--{name} {path}: no tokenizer can be loaded: {first_line(error)}") from None
    words = tokenizer.get_vocab().keys() - tokenizer.get_added_vocab().keys() - set(tokenizer.all_special_tokens)
    need(words, cfg, name, "has no tokenizer files")
    return tokenizer


COLUMN = r"\{([A-Za-z_]\w*)\}"  # of --prompt_template; braces around anything else stand as they are: \boxed{}


def load_prompts(name: str, rewards, tokenizer, cfg) -> list[Prompt]:
    """The prompts of --train_data or --eval_data, less those longer than --max_prompt_length."""
    fine = not cfg.prompt_template or re.search(COLUMN, cfg.prompt_template)
    need(fine, cfg, "prompt_template", "names no column; one stands in braces, as in {question}")
    path, prompts, rows = getattr(cfg, name), [], read_rows(getattr(cfg, name), name)
    for number, row in enumerate(rows, 1):
        try:
            missing = [column for reward in rewards for column in reward.columns if row.get(column) is None]
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
    template = f"chat_template {template_options(cfg).get('chat_template', tokenizer.chat_template)}"
    for option in template_options(cfg) if name == "train_data" else ():
        if not re.search(rf"\b{re.escape(option)}\b", template):
            say(f"warning: --chat_template_kwargs: the model's chat template does not read {option}")
    return kept


def encode_prompt(row: dict, tokenizer, cfg) -> Prompt:
    """`prompt` (or what --prompt_template makes) is a string, taken as it is, or chat messages, through the template.
    What is wrong with a row is a ValueError."""

    def column(name):
        if row.get(name) is None:
            raise ValueError(f"no column '{name}'; see --prompt_template")
        return row[name]

    template = cfg.prompt_template.replace("\\n", "\n")  # as it arrives from a shell
    prompt = re.sub(COLUMN, lambda found: str(column(found[1])), template) or column("prompt")
    prompt = prompt.tolist() if hasattr(prompt, "tolist") else prompt  # of numpy
    if not prompt or not isinstance(prompt, (str, list)):
        raise ValueError(f"empty prompt, or one that is neither a string nor a list of messages: {prompt!r}")
    if isinstance(prompt, str) and not (cfg.chat or cfg.system_prompt):
        text, messages, bos = prompt, None, tokenizer.bos_token
        ids = tokenizer(text, add_special_tokens=not (bos and text.startswith(bos)))["input_ids"]  # no second BOS
        bare = tokenizer(text, add_special_tokens=False)["input_ids"]
        if ids[-1:] == [tokenizer.eos_token_id] and ids[-len(bare) :] != bare:
            ids.pop()  # some tokenizers end every text, and nothing follows an end
    else:
        system = [dict(role="system", content=cfg.system_prompt)] if cfg.system_prompt else []
        turns = [dict(role="user", content=prompt)] if isinstance(prompt, str) else prompt
        messages = [message(turn) for turn in system + turns]
        text = chat_text(messages, tokenizer, cfg)
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]  # the template already wrote the BOS
    if not ids:
        raise ValueError("empty prompt")
    return Prompt(np.array(ids, dtype=np.int32), text, row, messages)


def chat_text(messages: list[dict], tokenizer, cfg) -> str:
    if not tokenizer.chat_template:
        raise ValueError("chat messages, but the tokenizer has no chat template")
    begun = messages[-1]["role"] == "assistant"  # an answer that the policy goes on with
    options = dict(tokenize=False, add_generation_prompt=not begun, continue_final_message=begun)
    instead = "; the one of --system_prompt can go into --prompt_template instead" if cfg.system_prompt else ""
    try:
        text = tokenizer.apply_chat_template(messages, **(template_options(cfg) | options))
    except Exception as error:
        raise ValueError(f"chat template: {first_line(error)}{instead}") from None
    if any(turn["role"] == "system" and turn["content"].strip() not in text for turn in messages):
        raise ValueError(f"chat template: it leaves out the system message{instead}")
    return text


def message(turn) -> dict:
    """A turn of a chat: its role, and its text as a string, of which there may be several parts."""
    content = turn.get("content") if isinstance(turn, dict) else None
    if isinstance(content, list) and all(isinstance(part, dict) and "text" in part for part in content):
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str) or not isinstance(turn.get("role"), str):
        raise ValueError(f"a message must have a role and a content of text: {turn!r}")
    return turn | dict(content=content)


def template_options(cfg) -> dict:
    return json.loads(cfg.chat_template_kwargs or "{}")


def pieces(tokenizer, ids: np.ndarray, text: str) -> list[str]:
    """The text of each token; their join is `text`. That of a character in several tokens stands at the last of them;
    the token that ended it has none."""
    from tokenizers.decoders import DecodeStream

    stream, known, found = DecodeStream(skip_special_tokens=False), len(tokenizer), []
    for i in ids.tolist():
        piece = (stream.step(tokenizer.backend_tokenizer, i) if i < known else "") or ""
        found.append(piece if text.startswith(piece) else "")
        text = text[len(found[-1]) :]
    return [*found[:-1], found[-1] + text]
