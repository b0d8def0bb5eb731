#!/usr/bin/env bash
# word2number 1.1: number words in an order that it does not know give another number, without an error.
#
# "nineteen eighty four" is 1524, "fifty five hundred" 350, "one million two thousand" 1003002, "three or
# four" 7. "negative five" is 5.
# It matters to whoever reads golds or answers that were written in words: "one million two thousand" is
# ordinary English, the gold made of it is wrong, and the right answer earns nothing. Compare with a second
# reader before a data set is converted.
#
# Guessed before the run (2026-11-27): "nineteen eighty four" raises an error. The others were seen beside it.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m venv "$dir/venv"
"$dir/venv/bin/pip" install --quiet --disable-pip-version-check --no-deps word2number==1.1
cd "$dir"
"$dir/venv/bin/python" - <<'PY'
import sys
from word2number import w2n

SEEN = {
    "three hundred and forty two": 342,
    "nineteen eighty four": 1524,
    "fifty five hundred": 350,
    "one million two thousand": 1003002,
    "three or four": 7,
    "negative five": 5,
}
found = {words: w2n.word_to_num(words) for words in SEEN}
for words, number in found.items():
    print(f"{words:28} {number}")
sys.exit(found != SEEN)
PY
