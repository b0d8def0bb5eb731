#!/usr/bin/env bash
# minijinja 3.1.0 beside jinja2 3.1.6 and the chat templates of trl 1.16.0: tojson writes other text.
#
# transformers renders a chat template with jinja2 and a tojson of its own, which leaves <, > and & as they
# are. minijinja, with its mode for Python's methods on, escapes them and the apostrophe, so a tool that is
# described as "true if a < b" stands in the prompt as "a \u003c b". Both are the same JSON, but other tokens.
# It matters to whoever trains with one renderer and serves with the other, as servers written in Rust do:
# the policy reads a tool's description, or its own earlier call, in words that it never saw. No error is
# raised. A filter named tojson that writes plain JSON mends it.
#
# Guessed before the run (2026-11-27): 35 of the 41 templates give the same text, 6 raise, none differs.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m venv "$dir/venv"
"$dir/venv/bin/pip" install --quiet --disable-pip-version-check --no-deps minijinja==3.1.0 \
    jinja2==3.1.6 markupsafe==3.0.4 trl==1.16.0
cd "$dir"
"$dir/venv/bin/python" - <<'PY'
import collections
import datetime
import json
import pathlib
import re
import sys
import sysconfig
import minijinja
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

FUNCTION = {
    "name": "less",
    "description": "true if a < b",
    "parameters": {"type": "object", "properties": {"a": {"type": "string", "description": "a text"}}},
}
CALL = {"type": "function", "id": "abcdefghi", "function": {"name": "less", "arguments": {"a": "1 < 2"}}}
MESSAGES = [
    {"role": "user", "content": "Compare."},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "name": "less", "tool_call_id": "abcdefghi", "content": "yes"},
    {"role": "assistant", "content": "It is."},
]
INPUT = {
    "messages": MESSAGES,
    "tools": [{"type": "function", "function": FUNCTION}],
    "bos_token": "",
    "eos_token": "",
    "add_generation_prompt": False,
}


def today(form):
    return datetime.datetime(2026, 1, 2).strftime(form)


def refuse(message):
    raise ValueError(message)


def as_transformers(source):
    env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    env.filters["tojson"] = lambda x, ensure_ascii=False, indent=None: json.dumps(
        x, ensure_ascii=ensure_ascii, indent=indent
    )
    return env.from_string(source).render(strftime_now=today, raise_exception=refuse, **INPUT)


def as_minijinja(source):
    env = minijinja.Environment(templates={"chat": source})
    env.pycompat = env.trim_blocks = env.lstrip_blocks = True
    env.auto_escape_callback = lambda name: False
    return env.render_template("chat", strftime_now=today, raise_exception=refuse, **INPUT)


def rendered(render, source):
    try:
        return render(source)
    except Exception:
        return None


verdicts = collections.defaultdict(list)
folder = pathlib.Path(sysconfig.get_paths()["purelib"]) / "trl" / "chat_templates"
for path in sorted(folder.glob("*.jinja")):
    if path.stem.endswith("_training"):
        continue
    source = path.read_text()  # {% generation %} only marks what is trained on
    source = re.sub(r"(\{%-?\s*)generation(\s*-?%\})", r"\1if true\2", source)
    source = source.replace("endgeneration", "endif")
    python, rust = rendered(as_transformers, source), rendered(as_minijinja, source)
    if python is None:
        verdicts["transformers' way raises"].append(path.stem)
    elif rust is None:
        verdicts["only minijinja raises"].append(path.stem)
    elif rust == python:
        verdicts["the same text"].append(path.stem)
    elif rust.replace("\\u003c", "<") == python:
        verdicts["the same but for \\u003c"].append(path.stem)
    else:
        verdicts["other text"].append(path.stem)
for verdict, names in verdicts.items():
    print(f"{len(names):2} {verdict}: {' '.join(names)}")
escaped = verdicts["the same but for \\u003c"]
sys.exit(not (len(escaped) == 17 and "qwen3" in escaped and not verdicts["other text"]))
PY
