#!/usr/bin/env bash
# math-verify 0.9.0: i is a letter like x, so i^2 is not -1.
#
# 4i+3 is paid for 3+4i, because the letters agree. What needs i^2 = -1 is refused: (1+i)^2 for 2i,
# (2+i)(2-i) for 5, |3+4i| for 5.
# It matters to whoever trains on algebra: golds with complex numbers pay only answers that are already
# multiplied out as the gold is, so a right answer in another form earns what a wrong one does.
#
# Guessed before the run (2026-11-27): i^2 is paid for -1.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m venv "$dir/venv"
"$dir/venv/bin/pip" install --quiet --disable-pip-version-check --no-deps math-verify==0.9.0 \
    latex2sympy2_extended==1.11.0 antlr4-python3-runtime==4.13.2 sympy==1.14.0 mpmath==1.3.0
cd "$dir"
"$dir/venv/bin/python" - <<'PY'
import sys
from math_verify import parse, verify

PAIRS = [  # gold, answer, what is seen
    ("3+4i", "4i+3", True),
    ("-1", "i^2", False),
    ("2i", "(1+i)^2", False),
    ("5", "(2+i)(2-i)", False),
    ("5", "|3+4i|", False),
]
changed = 0
for gold, answer, expected in PAIRS:
    paid = verify(parse(rf"\boxed{{{gold}}}"), parse(rf"\boxed{{{answer}}}"))
    changed += paid != expected
    print(f"gold {gold:5} answer {answer:11} {'paid' if paid else 'refused'}")
print("i is read as", repr(parse(r"\boxed{i}")[0]), "of", type(parse(r"\boxed{i}")[0]).__name__)
sys.exit(changed > 0)
PY
