#!/usr/bin/env bash
# smolagents 1.26.0, LocalPythonExecutor: the else of a for or while loop never runs, and nothing says so.
#
# What this interpreter of Python does not know it refuses with an error (yield, match, nonlocal), but a
# loop's else is left out. The usual search for primes, with "for ... break ... else: append", finds none.
# It matters to whoever trains with this tool: right programs get wrong results without an error, and a
# model is taught that its code was wrong. Data made with it holds such results, too.
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

PRIMES = """
found = []
for n in range(2, 20):
    for d in range(2, n):
        if n % d == 0:
            break
    else:
        found.append(n)
"""
WHILE = """
found = "nothing"
n = 0
while n < 3:
    n += 1
else:
    found = "else ran"
"""


def python(code):
    names = {}
    exec(code, names)
    return names["found"]


def executor(code):
    run = LocalPythonExecutor(additional_authorized_imports=[])
    run.send_tools({})
    return run(code + "\nfound").output


for code in (PRIMES, WHILE):
    print("Python:    ", python(code))
    print("smolagents:", executor(code))
sys.exit(not (executor(PRIMES) == [] and executor(WHILE) == "nothing"))
PY
