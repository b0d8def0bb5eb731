"""Is a changed copy of grpo.py still correct? Short runs (four steps of three prompts) answer four
questions. Pass flags with which your change takes effect in such runs. If grpo.py itself gets the
same NO with these flags, they are the cause.

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

# The dtype is set, because with auto the fast run would have another one.
SMALL = """--num_prompts 3 --num_generations 5 --max_completion_length 24 --eval_data= --rollout hf
--dtype float32 --fast false --max_steps 4 --save_every 2""".split()
FAST = """import importlib, os, sys
folder, name = os.path.split(os.path.splitext(os.path.realpath(sys.argv[1]))[0])
sys.path.insert(0, folder)
script = importlib.import_module(name)
importlib.import_module("extras.fast").SMALL = 0  # the fast policy for a small model, too
sys.exit(script.main(sys.argv[2:]))"""
QUESTIONS = dict(  # the question, the words before the script, the words after it
    resume=("a resume is exact", [], "--resume"),
    ranks=("two ranks give the same run", "-m torch.distributed.run --nproc_per_node=2".split()),
    fast=("the fast policy equals the plain one", ["-c", FAST], "--fast=true"),
    signal=("there is a gradient with --beta 0", [], "--beta=0"),
)


def environment():
    """Lets a copy in another folder find reward.py and extras/ here."""
    here = str(Path(__file__).parents[1])
    return os.environ | dict(PYTHONPATH=f"{os.environ.get('PYTHONPATH', here)}{os.pathsep}{here}")


def by_name(flags):
    """{name: words} of the flags. The last of repeated flags counts, since the trainer accepts
    none twice. --no_x is x, and a dash is an underscore."""
    said = {}
    for flag in filter(None, re.split(r"\0(?=--[\w-]+(?:[=\0]|$))", "\0".join(flags))):
        name = re.match("(?:--)?(?:no[_-])?([^=\0]*)", flag)[1]
        said[name.replace("-", "_")] = flag.split("\0")
    return said


def run(start, out_dir, *flags):
    """Runs the script. Returns the lines of metrics.jsonl without times."""
    flags = by_name([*SMALL, *flags, "--out_dir", out_dir])
    command = [sys.executable, *start, *sum(flags.values(), [])]
    done = subprocess.run(command, capture_output=True, text=True, env=environment())
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)}\n{done.stdout[-1000:]}{own_error(done.stderr)}")
    lines = map(json.loads, open(f"{out_dir}/metrics.jsonl"))
    return [{k: v for k, v in m.items() if not re.search("time|per_s", k)} for m in lines]


def own_error(text):
    """The error and exit code of the rank that failed first, without the errors that follow."""
    traceback = r"^(\[rank\d+\]: |)Traceback .*\n(?:\1 .*\n)+.*"
    found = re.search(rf"{traceback}|^\S+: error: .*|.*\s*\Z", text, re.M)
    return "\n".join([found[0], *re.findall(r"^  (?:rank|exitcode) .*", text, re.M)[-2:]])


def same(a, b):
    """Are two lines equal up to rounding, which depends on the order of sums?"""
    return a.keys() == b.keys() and np.allclose([b[k] for k in a], [*a.values()], 1e-3, 1e-4)


def main(names, script, *flags):
    """Prints each answer as soon as it is known. Returns whether one is NO."""
    is_wrong = False
    with tempfile.TemporaryDirectory() as folder:
        whole = run([script], f"{folder}/resume", *flags)
        shutil.rmtree(f"{folder}/resume/step_000004")
        for name in names:
            words, start, *own = QUESTIONS[name]
            other = run([*start, script], f"{folder}/{name}", *flags, *own)
            moves = any(m.get("grad_norm") for m in other)
            near = [same(*both) for both in zip(whole, other, strict=True)]  # rounding errors grow
            holds = dict(resume=whole == other, ranks=all(near), fast=all(near[:2]), signal=moves)
            is_wrong = is_wrong or not holds[name]
            print("yes" if holds[name] else "NO ", words, flush=True)
    return is_wrong


if __name__ == "__main__":
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("script")
    parser.add_argument("--only", nargs=1, choices=QUESTIONS, default=QUESTIONS)
    args, flags = parser.parse_known_args()
    if not os.path.exists(args.script):
        parser.error(f"{args.script}: no such file")
    sys.exit(main(args.only, args.script, *flags))
