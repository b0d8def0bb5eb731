"""Reads rows from JSON, CSV, parquet, the hub and functions, and makes prompts of them. Templates
may have LaTeX, chats get the form that chat templates need, and rows must not have control tokens.
By itself grpo.py reads only JSON lines, and uses messages as they are. Parquet's types become:

    text, number, Decimal, bool, null    the same; 0.1 in 32 bits becomes 0.1
    list, struct, map                    list, dict, dict
    arrow.json                           the parsed JSON: `datasets` uses it for mixed columns
    date, a timestamp at midnight        "2024-02-29": `datasets` makes timestamps of such texts
    other times, durations, UUID, bytes  Python's types; extras/preflight.py rejects some
"""

import contextlib
import csv
import dis
import functools
import importlib
import inspect
import io
import itertools
import json
import os
import re
from datetime import date, datetime, time
from pathlib import Path
from typing import Any

import transformers
from tqdm import tqdm

import grpo
from extras import digests, preflight, ranks
from extras.errors import ConfigError, one_line, require
from extras.tokens import text_message
from reward import load_function

ROLE = r"""\s*\[\s*\{\s*["'](role|content)["']\s*:"""
END = object()  # end of the rows; not None, as null may be a row
# The row that was read last: its file, its number from 1, and the number of rows so far.
place: dict = dict(file="", row=0, rows=0)


# -- A file -> rows
def read_rows(plain, path: str, *args, **kwargs):
    """Reads files, functions or the hub. A read_rows of yours may read several files at once."""
    place["rows"] = 0
    whole = rows_of_yours(plain, path, *args, **kwargs)
    for one in [path] if whole else digests.paths_of(path):
        place.update(file=one, row=0)
        rows = whole or rows_of(plain, one, *args, **kwargs)
        rows = iter(tqdm(rows, one, unit=" rows", **bar()))
        while True:
            place["row"] += 1
            row = next(rows, END)
            if row is END:
                break
            place["rows"] += 1
            yield row


def bar() -> dict:
    return dict(delay=10, disable=not ranks.is_first())  # shown after 10 s


def rows_of_yours(plain, path: str, *args, **kwargs):
    """None if read_rows is not yours, or cannot read this kind, as its first row shows."""
    if digests.changed("read_rows"):
        with contextlib.suppress(json.JSONDecodeError, UnicodeDecodeError, OSError):
            rows = iter(plain(path, *args, **kwargs))
            first = [*itertools.islice(rows, 1)]
            if all(isinstance(row, dict) for row in first):
                return itertools.chain(first, rows)


def rows_of(plain, path: str, *args, **kwargs):
    """`plain` reads only JSON lines. If it is yours, it is tried on other files, too."""
    if rows := rows_of_yours(plain, path, *args, **kwargs):
        return rows
    kind = Path(path).suffix.lower()
    if ".py:" in path:
        return load_function(path)()
    text = ""
    if kind in (".json", ".jsonl", ".ndjson"):
        text = Path(path).read_text("utf-8-sig").lstrip()
    parse = json.JSONDecoder(object_pairs_hook=preflight.json_object).decode
    if text.startswith("["):
        return parse(text)
    if kind not in (".json", ".jsonl", ".ndjson"):
        return read(path, kind)
    for place["row"], line in enumerate(filter(str.strip, text.split("\n")), 1):
        parse(line)
    place["row"] = 0
    return plain(path, *args, **kwargs)


def read(path: str, kind: str):
    """An iterator over the rows of a file or of a hub dataset name:config:split, as dicts."""
    if kind == ".csv":
        return rows_of_csv(Path(path).read_bytes().decode("utf-8-sig"))
    if kind == ".parquet":
        return rows_of_parquet(path)
    if os.path.isfile(path):
        raise ValueError(f"{kind} is not one of .json, .jsonl, .csv and .parquet")
    if path.startswith((".", "/")) and not os.path.exists(path):
        raise FileNotFoundError("no such file or folder")
    datasets = importlib.import_module("datasets")
    name, config, split = f"{path}::".split(":", 2)
    rows = datasets.load_dataset(name, config or None, split=split.rstrip(":") or "train")
    return map(plain_value, rows)


def rows_of_csv(text):
    csv.field_size_limit(2**31 - 1)  # characters; 131072 by default
    rows = csv.DictReader(io.StringIO(text, newline=""), strict=True)
    refuse_twice(rows.fieldnames or [])
    for row in rows:
        if None in row or None in row.values():
            raise ValueError("more or fewer fields than the header")
        yield row


def rows_of_parquet(path):
    # Not with `datasets`: it reads [1] in a path as a pattern, and may return old, cached rows.
    from pyarrow import struct
    from pyarrow.parquet import ParquetFile

    file = ParquetFile(path)
    refuse_twice(file.schema_arrow.names)
    kind = struct(file.schema_arrow)
    for batch in file.iter_batches(1000):
        yield from (plain_value(row, kind) for row in batch.to_pylist(maps_as_pydicts="strict"))


def refuse_twice(names):
    if len(set(names)) < len(names):
        raise ValueError("two columns have the same name")


def plain_value(value, kind: Any = None):
    """The value as it would be in a JSON line. kind: its type in parquet, or None."""
    if isinstance(value, dict):
        item = getattr(kind, "item_type", None)  # of a map: the type of all its values
        kinds = {} if kind is None or item else {field.name: field.type for field in kind}
        value = {key: plain_value(x, kinds.get(key, item)) for key, x in value.items()}
    elif isinstance(value, list):
        item = getattr(kind, "value_type", None)
        value = [plain_value(x, item) for x in value]
    elif isinstance(value, str) and getattr(kind, "extension_name", "") == "arrow.json":
        value = json.loads(value)
    elif isinstance(value, float) and str(kind) in ("float", "halffloat"):  # 32 and 16 bits
        value = float(str(kind.to_pandas_dtype()(value)))
    elif isinstance(value, datetime) and value.tzinfo is None and value.time() == time():
        value = value.date()
    if type(value) is date:
        value = value.isoformat()
    return value


# -- Rows -> prompts, as token ids
def load_prompts(plain, path: str, tokenizer, cfg, *args, **kwargs) -> list:
    """A row that cannot be used ends the run."""
    flag = "train_data" if path == cfg.train_data else "eval_data"
    loaded.cache_clear()
    encoder_of.cache_clear()
    place.update(file=path, row=0, rows=0)
    try:
        prompts = plain(path, tokenizer, cfg, *args, **kwargs)
    except ConfigError:
        raise
    except UnicodeDecodeError as error:
        raise ConfigError(f"--{flag} {place['file']} is not UTF-8: save it as UTF-8") from error
    except (Exception, SystemExit) as error:  # users' functions may raise anything
        at = f" row {place['row']}" if place["row"] else ""
        raise ConfigError(f"--{flag} {place['file']}{at}: {one_line(error)}") from error
    n_rows = place["rows"]
    require(n_rows or prompts or not path, f"{flag} {path}", "has no rows")
    long = "too long (--max_prompt_length), or left out by load_prompts"
    left_out = f"{n_rows - len(prompts)} of {n_rows} prompts are {long}"
    require(prompts or not path, f"{flag} {path}", left_out)
    if len(prompts) < n_rows:
        ranks.say(f"--{flag}: {left_out}")
    ranks.require_same({f"the rows of --{flag}": digests.of_ids(prompts)})
    return prompts


@functools.cache
def loaded(reward: str, environment: str) -> tuple:
    """The reward functions, and the environment or None."""
    from extras import agents

    return grpo.load_rewards(reward), agents.load(environment) if environment else None


class Encoder:
    """A tokenizer without transformers' work around each call, which takes half of a row's time."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        self.n_added = tokenizer.num_special_tokens_to_add()
        self.keep_eos = digests.changed("load_tokenizer")  # yours may add it on purpose
        kind, own = type(tokenizer), transformers.PreTrainedTokenizerFast  # a subclass may differ
        same = [getattr(kind, f, 0) is getattr(own, f) for f in ("__call__", "_encode_plus")]
        same.append("_encode_plus" not in vars(tokenizer))
        tokenizer("")  # resets a truncation set in its file
        self.encode = tokenizer.backend_tokenizer.encode if all(same) else None

    def __getattr__(self, name):
        return getattr(self.tokenizer, name)

    def __call__(self, text, add_special_tokens=True, **options):
        if options or self.encode is None:
            return self.tokenizer(text, add_special_tokens=add_special_tokens, **options)
        return dict(input_ids=self.encode(text, add_special_tokens=add_special_tokens).ids)


@functools.lru_cache(2)
def encoder_of(tokenizer) -> Any:
    """An Encoder; the tokenizer itself if its class is simple, or if make_prompt is yours."""
    is_known = hasattr(tokenizer, "num_special_tokens_to_add")
    return Encoder(tokenizer) if is_known and not digests.changed("make_prompt") else tokenizer


def copy_of(cfg):  # copy.copy takes 6 us
    own = object.__new__(type(cfg))
    own.__dict__.update(cfg.__dict__)
    return own


def make_prompt(
    plain, row, row_number, tokenizer, cfg, *args, _said=None, _environment=None, **kwargs
):
    """_said: the text that an environment's reset() returned, which ends the prompt."""
    rewards, own_environment = loaded(cfg.reward, cfg.environment)
    environment = _environment or own_environment
    if _said is None:
        preflight.check_row(row, rewards, environment, cfg)
    own = copy_of(cfg)
    opening = _said or "", tokenizer, environment
    vars(own).update(_opening=opening)  # for content_of; a Config of yours may be frozen
    encoder = encoder_of(tokenizer)
    try:
        prompt = plain(row, row_number, encoder, own, *args, **kwargs)
        if not isinstance(prompt, grpo.Prompt):  # yours, for a load_prompts of yours
            return prompt
        prompt.text[0]
        if cfg.system_prompt and not hasattr(own, "_was_opened"):
            raise ValueError("--system_prompt: make_prompt does not call content_of(row, cfg)")
    except Exception as error:
        content = row.get("prompt")
        if cfg.prompt_template or content and isinstance(content, str | list):
            raise
        why = f"column 'prompt' is neither a text nor messages: {content!r}"
        if "prompt" not in row:
            why = f"has no column 'prompt', only {', '.join(row)}: use one in --prompt_template"
        raise ValueError(why) from error
    preflight.check_prompt(row, prompt.messages, prompt.text, tokenizer, cfg)
    if encoder is tokenizer:  # the ids are yours
        return prompt
    if prompt.messages is None and encoder.n_added > 0:
        prompt.ids = without_added_ends(prompt, tokenizer, encoder.keep_eos)
    if row_number == 0 and _said is None:
        told = preflight.check_tokenizer(tokenizer, prompt)
        if told:
            ranks.say(told)
    return prompt


def without_added_ends(prompt, tokenizer, keep_eos):
    """The ids without a second BOS (a rendered chat has one already), and without an EOS that the
    tokenizer added."""
    ids, eos = prompt.ids, tokenizer.eos_token_id
    if prompt.text.startswith(tokenizer.bos_token or "\0") and ids[0] == ids[1]:
        ids = ids[1:]
    own = prompt.text.endswith(tokenizer.eos_token or "\0") and ids[-2] != eos
    return ids[:-1] if ids[-1] == eos and not (own or keep_eos) else ids


def content_of(plain, row: dict, cfg, *args, **kwargs):
    """Messages in the form that templates need. In a CSV they are JSON texts, and --prompt_template
    may be just their column, as {chat}."""
    given, template = row, with_newlines(cfg.prompt_template)
    column = template[1:-1] if template else "prompt"
    chat = row.get(column)
    if isinstance(chat, str) and re.match(ROLE, chat):
        try:
            chat = json.loads(chat)
        except ValueError as error:
            raise ValueError(f"begins like a chat, but is not JSON: {chat[:80]!r}") from error
    if isinstance(chat, list):
        row, template = row | dict(prompt=[text_message(message) for message in chat]), ""
    said, tokenizer, environment = getattr(cfg, "_opening", ("", None, None))
    if template and calls_format(plain):
        template = format_of(template, row)
    elif environment is not None and environment.classes and "prompt" not in row:
        row = row | dict(prompt=[dict(role="user", content="")])  # as in TRL: reset() has the text
    filled = cfg
    if template != cfg.prompt_template:
        filled = copy_of(cfg)
        vars(filled).update(prompt_template=template)
    try:
        content = plain(row, filled, *args, **kwargs)
    except Exception:
        if row is given or not digests.changed("content_of"):
            raise
        content = plain(given, cfg, *args, **kwargs)  # yours may parse a chat's JSON itself
    if content and isinstance(content, str) and cfg.system_prompt:
        content = [dict(role="user", content=content)]
    if not isinstance(content, list):
        return content
    if cfg.system_prompt:
        content = [dict(role="system", content=with_newlines(cfg.system_prompt)), *content]
    options = {}
    if content[-1]["role"] == "assistant":  # the policy continues this turn
        options = dict(continue_final_message=True, add_generation_prompt=False)
    options |= json.loads(cfg.chat_template_kwargs or "{}")
    options |= row.get("chat_template_kwargs") or {}  # as in TRL's rows
    if environment is not None:
        content, options["tools"] = environment.open_chat(content, row, said, tokenizer)
    elif row.get("tools"):  # a single turn, which may call them
        options["tools"] = preflight.schemas_of(row) or None
    known = getattr(tokenizer, "chat_template", None) or options.get("chat_template")
    known = known or "apply_chat_template" in getattr(tokenizer, "__dict__", {})  # yours
    if tokenizer is not None and not known and not digests.changed("make_prompt", "load_tokenizer"):
        mend = "leave out --system_prompt and --chat, and use texts as prompts"
        raise ValueError(f"the tokenizer has no chat template: {mend}")
    if tokenizer is not None:  # for this row; make_prompt reads it next
        vars(cfg).update(chat_template_kwargs=json.dumps(options), _was_opened=True)
    return content


@functools.cache
def calls_format(content_of) -> bool:
    """True if content_of calls prompt_template.format, as format_of expects. Yours may not."""
    code = getattr(inspect.unwrap(content_of), "__code__", None)
    names = [x.argval for x in dis.get_instructions(code)] if code else []
    return ("prompt_template", "format") in itertools.pairwise(names)


def format_of(template: str, row: dict) -> str:
    r"""The template for str.format: braces are doubled, except around a column of the row. Around
    another name they are an error. Braces of a LaTeX command, as in \boxed{answer}, never name a
    column; \boxed{{answer}} inserts its value."""
    columns = []

    def escape(match):
        column, text = match[1], match[0]
        part = re.match(r"(\w+)[.\[:!]", column or "")
        if part and column not in row and row.get(part[1]) is not None:
            columns.append(part[1])
            return match[0]  # {meta[level]} or {answer:>6}, for format
        if column and row.get(column) is not None:
            columns.append(column)
            text = row[column]
            if column.isidentifier() and not isinstance(text, list | dict):
                return match[0]
            if isinstance(text, list | dict):
                text = json.dumps(text, ensure_ascii=False, default=str)
            text = str(text)  # format would read a dot as an attribute
        elif column and re.fullmatch(r"[^\W\d][\w.-]*", column):
            raise ValueError(f"has no column '{column}'")
        return text.replace("{", "{{").replace("}", "}}")

    escaped = re.sub(r"\\[A-Za-z]+(?:\{[^{}\n]*\})+|\{([^{}\n]+)\}|[{}]", escape, template)
    if not columns:
        raise ValueError("--prompt_template has no column in braces")
    return escaped


def with_newlines(text: str) -> str:
    r"""A shell passes \n as two characters. (Before lowercase it is LaTeX, as in \neq.)"""
    return re.sub(r"\\n(?![a-z])", "\n", text)
