#!/usr/bin/env bash
# jiwer 4.0.0: against an empty reference the word error rate is the number of words, not a rate.
#
# wer("", "a b c") is the integer 3, where the rate has no value: three errors of zero words. cer counts
# characters in the same way.
# It matters to whoever pays 1 - wer for transcripts: a silent clip, whose reference is empty, pays -2 or -40
# according to the hypothesis' length, where other rows pay about 0 to 1. In a mean of rewards, or in groups
# whose advantages are not divided by their deviation, that row outweighs the others. Clip the reward, or
# drop rows without a reference.
#
# Guessed before the run (2026-11-27): an empty reference raises an error.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m venv "$dir/venv"
"$dir/venv/bin/pip" install --quiet --disable-pip-version-check --no-deps jiwer==4.0.0 \
    rapidfuzz==3.14.6 click==8.5.1
cd "$dir"
"$dir/venv/bin/python" - <<'PY'
import sys
import jiwer

seen = {
    'wer("", "a b c")': jiwer.wer("", "a b c"),
    'wer("", 40 words)': jiwer.wer("", "word " * 40),
    'cer("", "abcde")': jiwer.cer("", "abcde"),
    'wer("", "")': jiwer.wer("", ""),
    'wer("a b c", "")': jiwer.wer("a b c", ""),
}
for call, value in seen.items():
    print(f"{call:18} = {value!r}, as a reward {1 - value}")
sys.exit(list(seen.values()) != [3, 40, 5, 0, 1.0])
PY
