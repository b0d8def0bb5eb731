"""What the tests of a CUDA device share: processes that see a card which is not there."""

import json
import os
import shutil

import pytest
import torch

from tests.common import HERE, lines, run

STANDIN = os.path.join(HERE, "tests", "cuda_standin.py")
CUDA = torch.device("cuda", 0)

# Flags of a run of two short steps.
SHORT = ["--max_steps", 2, "--eval_every", 0, "--eval_data", ""]
SHORT += ["--max_completion_length", 8, "--reward", "overlong"]

NO_STANDIN = [
    pytest.mark.skipif(not shutil.which("g++"), reason="no g++ to compile the stand-in with"),
    pytest.mark.skipif(torch.version.cuda is not None, reason="a CUDA build takes no stand-in"),
]


def on_cuda(what, *args, nproc=0, report=None, **card):
    """Runs a command line (first word grpo.py) or module.function in a process that sees a card.

    Returns what it printed.
    """
    options = dict(card)
    if report:
        options["report"] = str(report)
    done = run(STANDIN, what, *args, nproc=nproc, env=dict(CUDA_STANDIN=json.dumps(options)))
    output = done.stdout[-1000:], done.stderr[-3000:]
    assert done.returncode == 0 and "Traceback" not in done.stderr, output
    return done.stdout


def trained(out, *args, **options):
    """Runs grpo.py on the card. Returns what it printed, and its metrics."""
    args = ["--device", "cuda", "--rollout", "hf", "--out_dir", out, *args]
    shown = on_cuda("grpo.py", *args, **options)
    return shown, [m for m in lines(out / "metrics.jsonl") if "reward" in m]
