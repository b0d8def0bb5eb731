#!/usr/bin/env bash
# npm @huggingface/jinja 0.5.11 beside jinja2 3.1.6: lstrip('\n') also strips blanks.
#
# Python's lstrip and rstrip take the characters to strip; this engine of chat templates for JavaScript
# ignores them and strips all white space. Qwen3's template (from trl 1.16.0) cuts line ends behind a thought
# with lstrip('\n'): an earlier answer that begins with an indented line loses its indent. A number 1.0 in
# a tool call's arguments becomes 1 as well, since JavaScript has one kind of number.
# It matters to whoever trains in Python and serves, or makes data, in JavaScript: chats of several turns
# become other prompts than those that were trained on, without an error, and indented code changes.
#
# Guessed before the run (2026-11-27): all templates of trl give the same text in both.
# Needs node and npm.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m venv "$dir/venv"
"$dir/venv/bin/pip" install --quiet --disable-pip-version-check --no-deps jinja2==3.1.6 \
    markupsafe==3.0.4 trl==1.16.0
cd "$dir"
npm install --silent --no-audit --no-fund --prefix "$dir" @huggingface/jinja@0.5.11
cat >python.py <<'PY'
import json
import pathlib
import sysconfig
from jinja2.sandbox import ImmutableSandboxedEnvironment

folder = pathlib.Path(sysconfig.get_paths()["purelib"]) / "trl" / "chat_templates"
chat = {
    "messages": [
        {"role": "user", "content": "Only the body, please."},
        {"role": "assistant", "content": "<think>\nshort\n</think>\n\n    return a + b"},
        {"role": "user", "content": "And the minus?"},
    ],
    "add_generation_prompt": True,
}
cases = [
    {"name": "lstrip", "template": "[{{ text.lstrip('\\n') }}]", "input": {"text": "\n    x"}},
    {"name": "rstrip", "template": "[{{ text.rstrip('.') }}]", "input": {"text": "x.. "}},
    {"name": "number", "template": "[{{ n }}]", "input": {"n": 1.0}},
    {"name": "qwen3", "template": (folder / "qwen3.jinja").read_text(), "input": chat},
]
env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
for case in cases:
    case["python"] = env.from_string(case["template"]).render(**case["input"])
pathlib.Path("cases.json").write_text(json.dumps(cases))
PY
"$dir/venv/bin/python" python.py
cat >javascript.mjs <<'JS'
import { readFileSync } from "node:fs";
import { Template } from "@huggingface/jinja";

const same = {};
for (const { name, template, input, python } of JSON.parse(readFileSync("cases.json", "utf8"))) {
  const javascript = new Template(template).render(input);
  same[name] = javascript === python;
  console.log(`${name}: ${same[name] ? "the same text" : "other text"}`);
  console.log("  jinja2            ", JSON.stringify(python));
  console.log("  @huggingface/jinja", JSON.stringify(javascript));
}
process.exit(Object.values(same).some((one) => one) ? 1 : 0);
JS
node javascript.mjs
