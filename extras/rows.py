"""Rows of CSV, parquet and the hub, and chats as the templates of models want them. grpo.py alone
reads JSON lines, JSON and functions, and takes messages as they are. Parquet's types become:

    text, number, Decimal, bool, null    what they are; 0.1 in 32 bits is 0.1
    list, struct, map                    list, dict, dict
    arrow.json                           what the JSON says: `datasets` has it for mixed columns
    date, a timestamp at midnight        "2024-02-29": `datasets` makes timestamps of such texts
    other times, durations, UUID, bytes  Python's; see extras/preflight.py, which refuses some
"""

import copy
import csv
import io
import json
import os
import re
from datetime import date, datetime, time
from pathlib import Path

ROLE = r"""\s*\[\s*\{\s*["'](role|content)["']\s*:"""


# -- A file -> rows
def read(path: str):
    """An iterator over the rows of a file or of a hub dataset name:config:split, as dicts."""
    kind = Path(path).suffix.lower()
    if kind == ".csv":
        return rows_of_csv(Path(path).read_text("utf-8-sig"))
    if kind == ".parquet":
        return rows_of_parquet(path)
    if os.path.isfile(path):
        raise ValueError(f"{kind} is none of .json, .jsonl, .csv and .parquet")
    if path.startswith((".", "/")) and not os.path.exists(path):
        raise FileNotFoundError("no such file or folder")
    from datasets import load_dataset

    name, config, split = f"{path}::".split(":", 2)
    rows = load_dataset(name, config or None, split=split.rstrip(":") or "train")
    return map(plain, rows)


def rows_of_csv(text):
    rows = csv.DictReader(io.StringIO(text), strict=True)
    refuse_twice(rows.fieldnames or [])
    for row in rows:
        if None in row or None in row.values():
            raise ValueError("more or fewer fields than the header")
        yield row


def rows_of_parquet(path):
    # Not by `datasets`, which would take [1] for a pattern, and old rows from its cache.
    from pyarrow import struct
    from pyarrow.parquet import ParquetFile

    file = ParquetFile(path)
    refuse_twice(file.schema_arrow.names)
    kind = struct(file.schema_arrow)
    for batch in file.iter_batches(1000):
        yield from (plain(row, kind) for row in batch.to_pylist(maps_as_pydicts="strict"))


def refuse_twice(names):
    if len(set(names)) < len(names):
        raise ValueError("two columns have the same name")


def plain(value, kind=None):
    """The value as a JSON line has it. kind: its type in parquet, or None."""
    if isinstance(value, dict):
        item = getattr(kind, "item_type", None)  # of a map: the type of all its values
        kinds = {} if kind is None or item else {field.name: field.type for field in kind}
        value = {key: plain(x, kinds.get(key, item)) for key, x in value.items()}
    elif isinstance(value, list):
        item = getattr(kind, "value_type", None)
        value = [plain(x, item) for x in value]
    elif isinstance(value, str) and getattr(kind, "extension_name", "") == "arrow.json":
        value = json.loads(value)
    elif isinstance(value, float) and str(kind) in ("float", "halffloat"):  # of 32 and 16 bits
        value = float(str(kind.to_pandas_dtype()(value)))
    elif isinstance(value, datetime) and value.tzinfo is None and value.time() == time():
        value = value.date()
    if type(value) is date:
        value = value.isoformat()
    return value


# -- A prompt -> a text, or messages
def chat(prompt, row, template):
    """Messages as templates want them. A CSV has them as JSON, and a --prompt_template may be the
    name of their column alone. Another text stays."""
    named = row.get(template[1:-1])
    if template[:1] == "{" and isinstance(named, list):
        prompt = named
    if isinstance(prompt, str) and re.match(ROLE, prompt):
        try:
            prompt = json.loads(prompt)
        except ValueError as error:
            raise ValueError(f"begins like a chat, and is no JSON: {prompt[:80]!r}") from error
    if isinstance(prompt, list):
        prompt = [text_message(message) for message in prompt]
    return prompt


def text_message(message: dict) -> dict:
    """The message without parquet's nulls, with one text instead of parts, and with the arguments
    of tool calls as dicts, where OpenAI has JSON. ValueError for an image"""
    if message.keys() == {"role", "content"} and isinstance(message["content"], str):
        return message  # of a million rows no copy
    message = {key: value for key, value in copy.deepcopy(message).items() if value is not None}
    if isinstance(message.get("content"), list):
        for part in message["content"]:
            if part["type"] != "text":
                raise ValueError(f"the model would not see a part of type {part['type']}")
        message["content"] = "".join(part["text"] for part in message["content"])
    for call in message.get("tool_calls", []):
        function = call.get("function", call)
        if isinstance(function.get("arguments"), str):
            function["arguments"] = json.loads(function["arguments"])
    return message
