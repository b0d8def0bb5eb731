"""Is a changed copy of grpo.py still whole? Short runs answer four questions. They have four
steps of three prompts: take flags with which your change acts in these. A NO that grpo.py has, too,
with these flags comes from them.

    python tools/selfcheck.py my_grpo.py [--only resume|ranks|fast|signal] [flags of its run]
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

# A dtype is named: by auto the fast run would have another one.
SMALL = """--num_prompts 3 --num_generations 5 --max_completion_length 24 --eval_data= --rollout hf
--dtype float32 --fast false --max_steps 4 --save_every 2""".split()
FAST = """import importlib, os, sys
folder, name = os.path.split(os.path.splitext(os.path.realpath(sys.argv[1]))[0])
sys.path.insert(0, folder)
script = importlib.import_module(name)
importlib.import_module("extras.fast").SMALL = 0  # the fast policy also for a small model
sys.exit(script.main(sys.argv[2:]))"""
QUESTIONS = dict(  # the words, what stands before the script, and what behind it
    resume=("a resume is exact", [], "--resume"),
    ranks=("two ranks are one run", "-m torch.distributed.run --nproc_per_node=2".split()),
    fast=("the fast policy is the plain one", ["-c", FAST], "--fast=true"),
    signal=("a signal is left with --beta 0", [], "--beta=0"),
)


def environment():
    """A copy that stands elsewhere finds reward.py and extras here."""
    here = str(Path(__file__).parents[1])
    return os.environ | dict(PYTHONPATH=f"{os.environ.get('PYTHONPATH', here)}{os.pathsep}{here}")


def by_name(flags):
    """{name: words}, of each flag the last, since the trainer takes one. --no_x is x, and a dash is
    an underscore."""
    said = {}
    for flag in filter(None, re.split(r"\0(?=--[\w-]+(?:[=\0]|$))", "\0".join(flags))):
        name = re.match("(?:--)?(?:no[_-])?([^=\0]*)", flag)[1]
        said[name.replace("-", "_")] = flag.split("\0")
    return said


def run(start, out_dir, *flags):
    """The lines of its metrics.jsonl without times."""
    flags = by_name([*SMALL, *flags, "--out_dir", out_dir])
    command = [sys.executable, *start, *sum(flags.values(), [])]
    done = subprocess.run(command, capture_output=True, text=True, env=environment())
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)}\n{done.stdout[-1000:]}{own_error(done.stderr)}")
    lines = map(json.loads, open(f"{out_dir}/metrics.jsonl"))
    return [{k: v for k, v in m.items() if not re.search("time|per_s", k)} for m in lines]


def own_error(text):
    """Of the rank that failed first the error and the exit code: not what followed from them."""
    traceback = r"^(\[rank\d+\]: |)Traceback .*\n(?:\1 .*\n)+.*"
    found = re.search(rf"{traceback}|^\S+: error: .*|.*\s*\Z", text, re.M)
    return "\n".join([found[0], *re.findall(r"^  (?:rank|exitcode) .*", text, re.M)[-2:]])


def same(a, b):
    """The same metrics up to rounding, which differs with the order of sums."""
    return a.keys() == b.keys() and np.allclose([b[k] for k in a], [*a.values()], 1e-3, 1e-4)


def main(names, script, *flags):
    """Prints each answer once it is known. Returns whether one is NO."""
    is_wrong = False
    with tempfile.TemporaryDirectory() as folder:
        whole = run([script], f"{folder}/resume", *flags)
        shutil.rmtree(f"{folder}/resume/step_000004")
        for name in names:
            words, start, *own = QUESTIONS[name]
            other = run([*start, script], f"{folder}/{name}", *flags, *own)
            moves = any(m.get("grad_norm") for m in other)
            near = [same(*both) for both in zip(whole, other, strict=True)]  # rounding grows
            holds = dict(resume=whole == other, ranks=all(near), fast=all(near[:2]), signal=moves)
            is_wrong = is_wrong or not holds[name]
            print("yes" if holds[name] else "NO ", words, flush=True)
    return is_wrong


if __name__ == "__main__":
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("script")
    parser.add_argument("--only", nargs=1, choices=QUESTIONS, default=QUESTIONS)
    args, flags = parser.parse_known_args()
    sys.exit(main(args.only, args.script, *flags))
