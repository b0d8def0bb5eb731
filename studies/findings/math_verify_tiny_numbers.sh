#!/usr/bin/env bash
# math-verify 0.9.0: any two numbers in scientific notation below about 1e-16 are equal.
#
# Planck's constant is paid for the elementary charge, and 0.0 for the electron's mass, fifteen and more
# orders of magnitude beside the answer. Plain decimals are rounded to six places, so 0.00000045 is paid for
# 0.00000012; written as 4.5 and 1.2 times 10^{-7}, the same two numbers differ. 10^{-11} and 10^{-12} differ.
# It matters to whoever trains on physics or chemistry: with golds in SI units every small enough answer is
# right, so a group has no signal or rewards the wrong power of ten. TRL, verl and others grade with it.
# Remedy: golds in units in which they are near 1.
#
# Guessed before the run (2026-11-27): a wrong constant is refused.
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
    (r"6.63\times 10^{-34}", r"1.6\times 10^{-19}", True),
    (r"1.6\times 10^{-19}", r"6.63\times 10^{-34}", True),
    (r"9.11\times 10^{-31}", r"0.0", True),
    (r"6\times 10^{-17}", r"2\times 10^{-17}", True),
    (r"6\times 10^{-16}", r"2\times 10^{-16}", False),
    (r"6.67\times 10^{-11}", r"8.85\times 10^{-12}", False),
    (r"0.00000012", r"0.00000045", True),
    (r"1.2\times 10^{-7}", r"4.5\times 10^{-7}", False),
]
changed = 0
for gold, answer, expected in PAIRS:
    paid = verify(parse(rf"\boxed{{{gold}}}"), parse(rf"\boxed{{{answer}}}"))
    changed += paid != expected
    print(f"gold {gold:22} answer {answer:22} {'paid' if paid else 'refused'}")
sys.exit(changed > 0)
PY
