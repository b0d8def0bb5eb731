#!/usr/bin/env bash
# transformers 5.19.0, torch 2.13.0 on a CPU: a loaded model's weights are the file on the disk. Whoever
# overwrites model.safetensors in place changes the model in every process that has loaded it.
#
# from_pretrained maps the file and keeps the mapping as the parameters where the dtype is the file's (bfloat16
# and bfloat16, or float32 and float32). A process sees new bytes in each page of 4 KB to which it has not
# written itself. It matters to a reference model, to an eval or to a server that runs while somebody downloads
# or copies the next weights over the old ones (a new file that is renamed changes nothing), and to speed: a
# mapped file is not in large pages. Cloning each parameter after loading ends it.
#
# Guessed before the run (2026-11-28): the weights are copied into the process's memory.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m venv "$dir/venv"
"$dir/venv/bin/pip" install --quiet --disable-pip-version-check --retries 1 \
    --find-links https://download.pytorch.org/whl/cpu/torch/ torch==2.13.0+cpu transformers==5.19.0
cd "$dir"
"$dir/venv/bin/python" - 2>/dev/null <<'PY'
import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM

changed = 0
shape = dict(vocab_size=32, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2)
for saved, loaded, expected in (
    (torch.float32, torch.float32, True),
    (torch.bfloat16, torch.bfloat16, True),
    (torch.bfloat16, torch.float32, False),
):
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**shape)).to(saved).save_pretrained("model")
    model = LlamaForCausalLM.from_pretrained("model", dtype=loaded)
    before = model.model.norm.weight.clone()
    with open("model/model.safetensors", "r+b") as file:
        file.seek(-20_000, 2)  # the last weights
        file.write(bytes(20_000))
    is_changed = not torch.equal(model.model.norm.weight, before)
    changed += is_changed != expected
    print(f"file in {saved}, loaded in {loaded}: the loaded weights change: {is_changed}")
sys.exit(changed > 0)
PY
