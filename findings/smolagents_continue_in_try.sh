#!/usr/bin/env bash
# smolagents 1.26.0, LocalPythonExecutor: "continue" and "break" inside try are caught by "except Exception".
#
# The interpreter tells a loop to go on by an exception of its own, and the user's handler gets it first: the
# handler runs although nothing failed, and "break" does not end the loop.
# It matters to whoever trains with this tool: "try: ... continue ... except Exception: count the failure" is
# how models write code that reads lines, and its counts are wrong without a word.
#
# Guessed before the run (2026-11-27): ordinary snippets give what Python gives, or an error.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m venv "$dir/venv"
"$dir/venv/bin/pip" install --quiet --disable-pip-version-check smolagents==1.26.0
cd "$dir"
"$dir/venv/bin/python" - <<'PY'
import sys
from smolagents import LocalPythonExecutor

CODE = """
total, failed = 0, 0
for line in ["1", "", "2", "x", "3"]:
    try:
        if line == "":
            WORD
        total += int(line)
    except Exception:
        failed += 1
(total, failed)
"""


def python(code):
    names = {}
    exec(code.replace("(total, failed)", "found = (total, failed)"), names)
    return names["found"]


def executor(code):
    run = LocalPythonExecutor(additional_authorized_imports=[])
    run.send_tools({})
    return run(code).output


seen = {}
for word in ("continue", "break"):
    code = CODE.replace("WORD", word)
    seen[word] = python(code), executor(code)
    print(f"{word:8} (total, failed): Python {seen[word][0]}, smolagents {seen[word][1]}")
sys.exit(seen != {"continue": ((6, 1), (6, 2)), "break": ((1, 0), (6, 2))})
PY
