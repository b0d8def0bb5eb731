"""Rows from files, and the prompts made from them."""

import csv
import hashlib
import json
import os
import pickle
import re
from dataclasses import dataclass

import numpy as np
import transformers

from harness.chat import CUT, chat_messages, chat_text, encode, protect
from harness.environment import Environment
from harness.flags import ConfigError, first_line, need, say
from harness.player import first_observations
from harness.ranks import ENVIRONMENT, seed_of, stream
from harness.user_code import TRAINER_KEYS, TRL_KEYS, import_file

TEXT_FILES = (".jsonl", ".json", ".csv")
COLUMN = r"\{([A-Za-z_]\w*)\}"  # in --prompt_template; other braces stay, as in \boxed{}
LINE_BREAK = r"\\n(?![a-z])"  # as a shell passes it; before a small letter it is LaTeX, as in \neq


# -- Rows


def read_rows(path: str, name: str) -> list[dict]:
    """The rows of a JSONL, JSON, CSV or parquet file, of a hub dataset name:config:split, or of
    path/to/file.py:function.

    name: the flag. ConfigError with the number of the row that is wrong.
    """
    rows = []
    where = ""
    try:
        source = iter(row_source(path))
        where = " row 1"
        for row in source:  # parsing is lazy: its errors belong to the row after the last
            check_row(row)
            rows.append(row)
            where = f" row {len(rows) + 1}"
    except json.JSONDecodeError as error:
        raise ConfigError(f"--{name} {path}{where}: not valid JSON: {error}") from None
    except (Exception, SystemExit) as error:
        raise ConfigError(f"--{name} {path}{where}: {first_line(error)}") from None
    if not rows:
        raise ConfigError(f"--{name} {path}: no rows")
    return rows


def check_row(row):
    """Raises if row is no dict, or cannot be pickled or written as JSON."""
    if not isinstance(row, dict):  # iterating over a dict or a DataFrame gives column names
        example = 'found["data"], frame.to_dict("records")'
        raise ValueError(f"must be a JSON object; give a list of them: {example}")
    pickle.dumps(row)  # for a reward's process
    json.dumps(row, default=str, allow_nan=False)  # for completions.jsonl


def row_source(path):
    """An iterable of rows, which may read and parse while it is iterated over."""
    file, _, function = path.rpartition(":")
    if file.endswith(".py"):
        module = import_file(os.path.abspath(file))
        return getattr(module, function)()

    kind = os.path.splitext(path)[1].lower()
    is_file = kind in TEXT_FILES or os.path.exists(path)
    if kind == ".parquet" or not is_file:
        from datasets import load_dataset

        if kind == ".parquet":
            return load_dataset("parquet", data_files=path, split="train")
        name, config, split = f"{path}::".split(":")[:3]  # config and split are optional
        return load_dataset(name, name=config or None, split=split or "train")

    with open(path, encoding="utf-8-sig", newline="") as opened:
        text = opened.read()
    if kind == ".csv":
        return csv_rows(text)
    if kind == ".json":
        return json.loads(text)
    return (json.loads(line) for line in text.split("\n") if line.strip())


def csv_rows(text):
    table = csv.DictReader(text.splitlines(keepends=True), strict=True)
    for row in table:
        # DictReader puts extra fields under the key None, and None where a field is missing.
        if None in row or None in row.values():
            columns = ", ".join(table.fieldnames)
            raise ValueError(f"number of fields differs from the header: {columns}")
        yield row


# -- Prompts


@dataclass
class Prompt:
    ids: np.ndarray  # [P] int32
    text: str
    row: dict
    messages: list | None = None  # None: a string, which went through no chat template
    seed: int = 0  # of what the environment draws
    observation: str = ""  # what the environment's reset() said: the end of the prompt


def load_tokenizer(cfg):
    """The tokenizer of --tokenizer, else of --model. ConfigError if there is none."""
    name = "tokenizer" if cfg.tokenizer else "model"
    path = getattr(cfg, name)
    adapter = os.path.exists(os.path.join(cfg.model, "adapter_config.json"))
    merge = "merge it into its model (peft: merge_and_unload) and name that"
    need(not adapter, cfg, "model", f"is a LoRA adapter; {merge}")
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    except Exception as error:
        why = f"no tokenizer can be loaded: {first_line(error)}"
        raise ConfigError(f"--{name} {path}: {why}") from None
    # From a folder without its files transformers makes a tokenizer of special tokens alone.
    words = tokenizer.get_vocab().keys() - tokenizer.get_added_vocab().keys()
    need(words - set(tokenizer.all_special_tokens), cfg, name, "has no tokenizer files")
    return tokenizer


def load_prompts(
    name: str, rewards, tokenizer, cfg, environment: Environment | None = None
) -> list[Prompt]:
    """The prompts of --train_data or --eval_data, less those longer than --max_prompt_length."""
    path = getattr(cfg, name)
    rows = read_rows(path, name)
    needed = needed_columns(rewards, cfg)
    seeds = [seed_of(*stream(cfg.seed, ENVIRONMENT, number=i)) for i in range(len(rows))]
    observations = [""] * len(rows)
    if environment is not None and environment.kind == "class":
        observations = first_observations(environment, rows, seeds, cfg)
    prompts = []
    for number, row in enumerate(rows, 1):
        try:
            for column, flag in needed.items():
                if row.get(column) is None:
                    raise ValueError(f"no column '{column}'; see {flag}")
            for reward in rewards:
                if reward.check is not None:
                    reward.check(row)
            observation = observations[number - 1]
            prompt = encode_prompt(row, tokenizer, cfg, environment, observation)
            prompt.seed = seeds[number - 1]
            prompt.observation = observation
            prompts.append(prompt)
        except Exception as error:
            raise ConfigError(f"--{name} {path} row {number}: {first_line(error)}") from None

    kept = [prompt for prompt in prompts if len(prompt.ids) <= cfg.max_prompt_length]
    limit = f"longer than --max_prompt_length {cfg.max_prompt_length}"
    need(kept, cfg, name, f"every prompt is {limit}")
    dropped = len(rows) - len(kept)
    if dropped:
        say(f"--{name} {path}: {dropped} of {len(rows)} prompts are left out, {limit}")
    if tokenizer.chat_template and any(prompt.messages is None for prompt in kept):
        why = "string prompts do not go through the model's chat template; --chat does that"
        say(f"warning: --{name} {path}: {why}")
    columns = set().union(*rows)
    for names, who in ((TRAINER_KEYS, "rewards"), (TRL_KEYS - TRAINER_KEYS, "rewards like TRL's")):
        hidden = sorted(columns & names)
        if hidden:
            why = f"under these names {who} get the trainer's values, not the data's"
            say(f"warning: --{name} {path}: columns {', '.join(hidden)}: {why}")
    return kept


def needed_columns(rewards, cfg):
    """{column that every row must have: the flag that names it}"""
    columns = ["prompt"]
    if cfg.prompt_template:
        columns = re.findall(COLUMN, cfg.prompt_template)
    why = "names no column; write one in braces, as {question}"
    need(columns, cfg, "prompt_template", why)
    needed = dict.fromkeys(columns, "--prompt_template")
    for reward in rewards:
        needed.update(dict.fromkeys(reward.columns, f"--reward {cfg.reward}"))
    return needed


def check_template_kwargs(cfg):
    """ConfigError if --chat_template_kwargs is not a JSON object."""
    try:
        options = json.loads(cfg.chat_template_kwargs or "{}")
    except ValueError:
        options = None
    need(isinstance(options, dict), cfg, "chat_template_kwargs", "must be a JSON object")


def encode_prompt(
    row: dict, tokenizer, cfg, environment: Environment | None = None, observation: str = ""
) -> Prompt:
    """The prompt of a row: its column `prompt`, or what --prompt_template makes of its columns.

    A string is taken as it is, a list of messages goes through the chat template; so does a string
    with --chat or --system_prompt. observation: goes to the end of the last message, as in TRL.
    ValueError if the result is empty.
    """
    if cfg.prompt_template:
        prompt = fill_template(cfg.prompt_template, row)
    else:
        prompt = row["prompt"]
    if not prompt or not isinstance(prompt, (str, list)):
        why = "one that is neither a string nor a list of messages"
        raise ValueError(f"empty prompt, or {why}: {prompt!r}")

    tools = []
    if environment is not None:
        tools = environment.tools(row)
    if isinstance(prompt, str) and not cfg.chat and not cfg.system_prompt:
        if environment is not None and environment.kind != "text":
            raise ValueError("tools need a chat: a list of messages, or --chat")
        text = prompt
        messages = None
        ids = string_ids(text, tokenizer)
    else:
        messages = chat_messages(prompt, cfg.system_prompt)
        protected = with_observation(messages, protect(observation, tokenizer))
        messages = with_observation(messages, observation)
        text = chat_text(protected, tokenizer, cfg, tools)
        ids = encode(text, tokenizer, begins=True)
        text = text.replace(CUT, "")
    if not ids:
        raise ValueError("empty prompt")
    return Prompt(np.array(ids, dtype=np.int32), text, row, messages)


def with_observation(messages: list[dict], observation: str) -> list[dict]:
    """The last message ends in the observation, as in TRL."""
    last = dict(messages[-1])
    last["content"] += observation
    return [*messages[:-1], last]


def fill_template(template, row):
    r"""Puts columns in place of {names}, and line breaks in place of \n, but keeps \neq and \nu."""
    template = re.sub(LINE_BREAK, "\n", template)
    return re.sub(COLUMN, lambda match: str(row[match[1]]), template)


def string_ids(text, tokenizer):
    """The ids, with the tokenizer's start tokens put before them if they are missing."""
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    start = tokenizer("")["input_ids"]
    if tokenizer.bos_token_id != tokenizer.eos_token_id:  # some tokenizers also append EOS
        start = [i for i in start if i != tokenizer.eos_token_id]
    if ids[: len(start)] == start:
        return ids
    return start + ids


# -- For the ranks and the log


def fingerprint_of_data(prompts: list[Prompt]) -> str:
    """A digest of ids and rows in their order, the same in every process that reads the same."""
    digest = hashlib.sha256()
    for prompt in prompts:
        digest.update(prompt.ids.tobytes())
        digest.update(json.dumps(prompt.row, default=same_everywhere).encode())
    return digest.hexdigest()[:16]


def same_everywhere(value):
    """Stands for a value JSON lacks; leaves out what varies by process: addresses, set order."""
    if hasattr(value, "tolist"):  # from numpy
        return value.tolist()
    return type(value).__name__
