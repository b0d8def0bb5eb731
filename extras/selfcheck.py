"""Is a changed copy of grpo.py still whole? Short runs say if a resume is exact, if two ranks are
one run, if the fast policy is the plain one, and if a signal is left without the KL. They have four
steps of three prompts: take flags with which your change acts in these. A NO that grpo.py has, too,
with these flags comes from them.

    python extras/selfcheck.py my_grpo.py [flags of its run]
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

SMALL = """--num_prompts 3 --num_generations 5 --max_completion_length 24 --eval_data= --rollout hf
--fast false --max_steps 4 --save_every 2""".split()
FAST = """import importlib, os, sys
folder, name = os.path.split(os.path.splitext(os.path.realpath(sys.argv[1]))[0])
sys.path.insert(0, folder)
script = importlib.import_module(name)
script.SMALL = 0  # the fast policy also for a small model
sys.exit(script.main(sys.argv[2:]))"""


def environment():
    """A copy that stands elsewhere finds reward.py and extras here."""
    path = os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(Path(__file__).parents[1])])
    return os.environ | dict(PYTHONPATH=path.lstrip(os.pathsep))


def run(start, out_dir, *flags):
    """The lines of its metrics.jsonl without times."""
    command = [sys.executable, *start, *SMALL, *flags, "--out_dir", out_dir]  # later flags win
    done = subprocess.run(command, capture_output=True, text=True, env=environment())
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)}\n{done.stdout[-1000:]}{own_error(done.stderr)}")
    lines = map(json.loads, Path(out_dir, "metrics.jsonl").read_text().splitlines())
    return [{k: v for k, v in m.items() if "time" not in k and "per_s" not in k} for m in lines]


def own_error(text):
    """Of the rank that failed first the error and the exit code: not what followed from them."""
    traceback = r"^(\[rank\d+\]: |)Traceback .*\n(?:\1 .*\n)+.*"
    found = re.search(rf"{traceback}|^\S+: error: .*|.*\s*\Z", text, re.M)
    return "\n".join([found[0], *re.findall(r"^  (?:rank|exitcode) .*", text, re.M)[-2:]])


def same(whole, other):
    """The same metrics up to rounding, which differs with the order of sums."""
    for a, b in zip(whole, other, strict=True):
        if a.keys() != b.keys():
            return False
        if any(abs(a[name] - b[name]) > 1e-4 + 1e-3 * abs(a[name]) for name in a):
            return False
    return True


def main(script, *flags):
    torchrun = ["-m", "torch.distributed.run", "--nproc_per_node=2", script]
    with tempfile.TemporaryDirectory() as folder:
        whole = run([script], f"{folder}/whole", *flags)
        shutil.rmtree(f"{folder}/whole/step_000004")
        resumed = run([script], f"{folder}/whole", *flags, "--resume")
        two = run(torchrun, f"{folder}/two", *flags)
        fast = run(["-c", FAST, script], f"{folder}/fast", *flags, "--fast", "true")
        bare = run([script], f"{folder}/bare", *flags, "--beta", "0")
    answers = {
        "a resume is exact": whole == resumed,
        "two ranks are one run": same(whole, two),
        "the fast policy is the plain one": same(whole[:2], fast[:2]),  # later rounding has grown
        "a signal is left with --beta 0": any(m.get("grad_norm", 0) > 0 for m in bare),
    }
    for what, holds in answers.items():
        print(f"{'yes' if holds else 'NO '}  {what}")
    return int(not all(answers.values()))


if __name__ == "__main__":
    if not sys.argv[1:] or not os.path.isfile(sys.argv[1]):
        sys.exit(__doc__)
    sys.exit(main(*sys.argv[1:]))
