#!/usr/bin/env bash
# torch 2.13.0 on a CPU: after a step of a fused optimizer, backward through an older graph gives a wrong
# gradient. With the other implementations it is an error.
#
# torch counts the changes of each tensor (p._version). Backward compares the count with that of the forward
# pass, and raises "modified by an inplace operation" if a weight that it needs has changed since. With
# fused=True, a step of AdamW, Adam, SGD or Adagrad changes the weights but not the count, so backward uses the
# new weights without a word. It matters to whoever takes a step between two backward passes through one
# forward pass, as with two losses, an actor and a critic that share layers, or a GAN: the mistake is found
# with foreach, and hidden with fused, which Hugging Face's trainers use by default. It also matters to code
# that compares _version to learn whether the weights have changed.
#
# Guessed before the run (2026-11-29): each optimizer's step is counted, however it is computed. (We had
# written a check that relied on it.)
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m venv "$dir/venv"
"$dir/venv/bin/pip" install --quiet --disable-pip-version-check --retries 1 \
    --find-links https://download.pytorch.org/whl/cpu/torch/ torch==2.13.0+cpu
cd "$dir"
"$dir/venv/bin/python" - 2>/dev/null <<'PY'
import sys

import torch

changed = 0
cases = [(torch.optim.AdamW, dict(foreach=True), "error"), (torch.optim.AdamW, dict(foreach=False), "error")]
for kind in (torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD, torch.optim.Adagrad):
    cases.append((kind, dict(fused=True), 3.0))
for kind, options, expected in cases:
    w = torch.nn.Parameter(torch.tensor(2.0))
    rate = 0.25 if kind is torch.optim.SGD else 1.0  # from 2 to 1 in each case
    optimizer = kind([w], lr=rate, weight_decay=0, **options)
    first, second = w**2, w**3  # one forward pass, two losses
    first.backward()
    before = w._version
    optimizer.step()
    w.grad = None
    try:
        second.backward()
        found = round(w.grad.item(), 3)
    except RuntimeError:
        found = "error"
    changed += found != expected
    said = f"{kind.__name__} {options}: w is 2, then {w.item():.3g}; {w._version - before} changes counted; "
    print(said + f"gradient of w**3 at 2 (12): {found}")
sys.exit(changed > 0)
PY
