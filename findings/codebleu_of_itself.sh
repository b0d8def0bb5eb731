#!/usr/bin/env bash
# codebleu 0.7.0: a short program compared with itself scores less than a wrong one.
#
# Where the reference has no data flow, that quarter of the score is 0, and so are most of the n-grams of a
# text of fewer than four words: print(1) against itself is .56, "return x" .66. "a - b" against "a + b"
# in a function of two lines is .83. A warning goes to the log, not into the number.
# It matters to whoever takes it as a reward for code: the best score depends on the row, right one-liners
# are paid less than wrong functions, and a threshold such as .8 can not be reached in some rows. Divide by
# the reference's score of itself.
#
# Guessed before the run (2026-11-27): .75, only the data flow is lost.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m venv "$dir/venv"
"$dir/venv/bin/pip" install --quiet --disable-pip-version-check --no-deps codebleu==0.7.0 \
    tree-sitter==0.22.3 tree-sitter-python==0.21.0 setuptools==80.9.0
cd "$dir"
"$dir/venv/bin/python" - 2>/dev/null <<'PY'
import sys
from codebleu import calc_codebleu

ADD = "def add(a, b):\n    return a + b"
PAIRS = [  # reference, answer, what is seen
    ("print(1)", "print(1)", 0.555),
    ("return x", "return x", 0.658),
    (ADD, ADD, 1.0),
    (ADD, ADD.replace("+", "-"), 0.825),
]
changed = 0
for reference, answer, expected in PAIRS:
    score = calc_codebleu([reference], [answer], lang="python")["codebleu"]
    changed += abs(score - expected) > 0.001
    print(f"{score:.3f} for {answer!r} where {reference!r} is right")
sys.exit(changed > 0)
PY
