"""Rows of files, and the prompts that they become."""

import contextlib
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
import transformers

from harness.flags import ConfigError, first_line, need, say
from reward import import_file

FILES = (".jsonl", ".json", ".csv", ".tsv", ".parquet")
WHY = {
    json.JSONDecodeError: "not valid JSON: ",
    csv.Error: "not a valid CSV (is a quote not closed?): ",
}
COLUMN = r"\{([A-Za-z_]\w*)\}"  # of --prompt_template; braces around anything else stand as they are: \boxed{}


def read_rows(path: str, name: str) -> list[dict]:
    """Rows of a JSONL, JSON, CSV or parquet file, a hub dataset name:config:split, or path/to/file.py:function."""
    rows, source = [], None
    try:
        source = row_source(path)
        for row in source:  # it is parsed here, so an error is that of the row after the last
            if not isinstance(
                row, dict
            ):  # as of a dict or a DataFrame, which give the names of their columns
                raise ValueError(
                    'must be a JSON object; give a list of them: found["data"], frame.to_dict("records")'
                )
            row = {
                str(k): None if isinstance(v, float) and math.isnan(v) else v
                for k, v in row.items()
            }
            pickle.dumps(row)  # it travels to a reward's process
            json.dumps(row, default=str, allow_nan=False)  # and into completions.jsonl
            rows.append(row)
    except (Exception, SystemExit) as error:
        where = "" if source is None else f" row {len(rows) + 1}"
        why = getattr(error, "strerror", None) or WHY.get(type(error), "") + first_line(error)
        raise ConfigError(f"--{name} {path}{where}: {why}") from None
    if not rows:
        raise ConfigError(f"--{name} {path}: no rows")
    return rows


def row_source(path: str):
    file, _, function = path.rpartition(":")
    zipped, kind = (
        path.lower().endswith(".gz"),
        os.path.splitext(path.lower().removesuffix(".gz"))[1],
    )
    if file.endswith(".py"):
        return getattr(import_file(os.path.abspath(file)), function)()
    if kind == ".parquet" or not (kind in FILES or os.path.exists(path)):
        from datasets import load_dataset

        repository, config, split = f"{path}::".split(":")[:3]
        hub = dict(path=repository, name=config or None, split=split or "train")
        return load_dataset(
            **hub if kind != ".parquet" else dict(path="parquet", data_files=path, split="train")
        )
    with (gzip.open if zipped else open)(path, "rt", encoding="utf-8-sig", newline="") as opened:
        text = opened.read()
    if kind in (".csv", ".tsv"):
        return table_rows(text, "," if kind == ".csv" else "\t")
    return (
        json.loads(text)
        if kind == ".json"
        else map(json.loads, filter(str.strip, text.split("\n")))
    )


def table_rows(text: str, delimiter: str):
    """Rows of a CSV or TSV, each with a field for every name of the header; what pandas refuses is refused."""
    csv.field_size_limit(2**31 - 1)
    table = csv.DictReader(
        io.StringIO(text.lstrip("\r\n"), newline=""), delimiter=delimiter, strict=True
    )
    for row in table:  # of too many fields one is named None, of too few one is None, and a name given twice is one
        if len(row) != len(table.fieldnames) or None in row or None in row.values():
            raise ValueError(
                f"has not one field for each name of the header: {', '.join(table.fieldnames)}"
            )
        yield row


@dataclass
class Prompt:
    ids: np.ndarray  # [P] int32
    text: str
    row: dict
    messages: list | None = None  # where it is a chat


def load_tokenizer(cfg):
    name, path = ("tokenizer", cfg.tokenizer) if cfg.tokenizer else ("model", cfg.model)
    adapter = os.path.exists(os.path.join(cfg.model, "adapter_config.json"))
    need(
        not adapter,
        cfg,
        "model",
        "is a LoRA adapter; merge it into its model (peft: merge_and_unload) and name that",
    )
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    except Exception as error:  # of a file that is not what it should be
        raise ConfigError(
            f"--{name} {path}: no tokenizer can be loaded: {first_line(error)}"
        ) from None
    words = (
        tokenizer.get_vocab().keys()
        - tokenizer.get_added_vocab().keys()
        - set(tokenizer.all_special_tokens)
    )
    need(words, cfg, name, "has no tokenizer files")
    return tokenizer


def load_prompts(name: str, rewards, tokenizer, cfg) -> list[Prompt]:
    """The prompts of --train_data or --eval_data, less those longer than --max_prompt_length."""
    needed = dict.fromkeys(
        re.findall(COLUMN, cfg.prompt_template or "{prompt}"), "; see --prompt_template"
    )
    need(needed, cfg, "prompt_template", "names no column; one stands in braces, as in {question}")
    needed |= {
        column: f", which --reward {cfg.reward} reads"
        for reward in rewards
        for column in reward.columns
    }
    path, prompts, rows = getattr(cfg, name), [], read_rows(getattr(cfg, name), name)
    for number, row in enumerate(rows, 1):
        try:
            missing = [
                f"no column '{column}'{why}"
                for column, why in needed.items()
                if row.get(column) is None
            ]
            if missing:
                raise ValueError(missing[0])
            prompts.append(encode_prompt(row, tokenizer, cfg))
        except Exception as error:
            raise ConfigError(f"--{name} {path} row {number}: {first_line(error)}") from None
    kept = [prompt for prompt in prompts if len(prompt.ids) <= cfg.max_prompt_length]
    limit = f"longer than --max_prompt_length {cfg.max_prompt_length}"
    need(kept, cfg, name, f"every prompt is {limit}")
    if len(kept) < len(rows):
        say(
            f"--{name} {path}: {len(rows) - len(kept)} of {len(rows)} prompts are left out, {limit}"
        )
    if tokenizer.chat_template and any(prompt.messages is None for prompt in kept):
        say(
            f"warning: --{name} {path}: string prompts do not go through the model's chat template; --chat does that"
        )
    return kept


def check_template_kwargs(cfg) -> None:
    options = None
    with contextlib.suppress(ValueError):
        options = json.loads(cfg.chat_template_kwargs or "{}")
    need(isinstance(options, dict), cfg, "chat_template_kwargs", "must be a JSON object")


def encode_prompt(row: dict, tokenizer, cfg) -> Prompt:
    """`prompt`, or what --prompt_template makes, is a string, taken as it is, or a chat, written by the template."""
    template = cfg.prompt_template.replace("\\n", "\n")  # as it arrives from a shell
    prompt = re.sub(COLUMN, lambda column: str(row[column[1]]), template) or row["prompt"]
    prompt = prompt.tolist() if hasattr(prompt, "tolist") else prompt  # of numpy
    if not prompt or not isinstance(prompt, (str, list)):
        raise ValueError(
            f"empty prompt, or one that is neither a string nor a list of messages: {prompt!r}"
        )
    if isinstance(prompt, str) and not (cfg.chat or cfg.system_prompt):
        text, messages = prompt, None
    else:
        messages = [dict(role="system", content=cfg.system_prompt)] if cfg.system_prompt else []
        messages += [dict(role="user", content=prompt)] if isinstance(prompt, str) else prompt
        if not all(
            isinstance(m, dict) and "role" in m and isinstance(m.get("content"), str)
            for m in messages
        ):
            raise ValueError(
                f"each message must have a role and a text as its content: {messages!r}"
            )
        begun = messages[-1]["role"] == "assistant"  # an answer that the policy goes on with
        options = json.loads(cfg.chat_template_kwargs or "{}")
        options |= dict(
            tokenize=False, add_generation_prompt=not begun, continue_final_message=begun
        )
        text = tokenizer.apply_chat_template(messages, **options)
        if any(m["role"] == "system" and m["content"].strip() not in text for m in messages):
            raise ValueError(
                "the chat template leaves out the system message, whose text --prompt_template can hold"
            )
    ids, bos = tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.bos_token_id
    if (
        messages is None
    ):  # a template writes what a prompt begins with; some tokenizers would end every text, too
        start = [i for i in tokenizer("")["input_ids"] if i == bos or i != tokenizer.eos_token_id]
        ids = ids if ids[: len(start)] == start else start + ids
    if not ids:
        raise ValueError("empty prompt")
    return Prompt(np.array(ids, dtype=np.int32), text, row, messages)


def pieces(tokenizer, ids: np.ndarray, text: str) -> list[str]:
    """The text of each token; their join is `text`. That of a character in several tokens stands at the last of them;
    the token that ended it has none."""
    from tokenizers.decoders import DecodeStream

    stream, known, found = DecodeStream(skip_special_tokens=False), len(tokenizer), []
    for i in ids.tolist():
        piece = ""
        with contextlib.suppress(
            Exception
        ):  # bytes that make no character; a tokenizer of another kind
            piece = (stream.step(tokenizer.backend_tokenizer, i) if i < known else "") or ""
        found.append(piece if text.startswith(piece) else "")
        text = text[len(found[-1]) :]
    return [*found[:-1], found[-1] + text]
