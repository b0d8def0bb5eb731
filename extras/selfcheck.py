"""Is a changed copy of grpo.py still whole? Five short runs say if a resume is exact, if two ranks
are one run, and if a signal is left without the KL. The runs have four steps of three prompts: take
flags with which your change acts in these.

    python extras/selfcheck.py my_grpo.py [flags of its run]
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

SMALL = """--num_prompts 3 --num_generations 5 --max_completion_length 24 --eval_data= --rollout hf
--fast false --max_steps 4 --save_every 2""".split()


def run(script, out_dir, *flags, ranks=1):
    """The lines of its metrics.jsonl without times."""
    command = [script, *SMALL, *flags, "--out_dir", out_dir]  # the later of two equal flags wins
    if ranks > 1:
        command = ["-m", "torch.distributed.run", f"--nproc_per_node={ranks}", *command]
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)}\n{done.stdout[-1000:]}{done.stderr[-3000:]}")
    lines = map(json.loads, Path(out_dir, "metrics.jsonl").read_text().splitlines())
    return [{k: v for k, v in m.items() if "time" not in k and "per_s" not in k} for m in lines]


def close(a, b):
    """The same metrics up to rounding, which differs with the order of sums."""
    if a.keys() != b.keys():
        return False
    return all(abs(a[name] - b[name]) <= 1e-4 + 1e-3 * abs(a[name]) for name in a)


def main(script, *flags):
    with tempfile.TemporaryDirectory() as folder:
        whole = run(script, f"{folder}/whole", *flags)
        run(script, f"{folder}/half", *flags, "--max_steps", "2")
        resumed = run(script, f"{folder}/half", *flags, "--resume", "--max_steps", "4")
        two = run(script, f"{folder}/two", *flags, ranks=2)
        bare = run(script, f"{folder}/bare", *flags, "--beta", "0")
    answers = {
        "a resume is exact": whole == resumed,
        "two ranks are one run": len(whole) == len(two) and all(map(close, whole, two)),
        "a signal is left with --beta 0": any(m.get("grad_norm", 0) > 0 for m in bare),
    }
    for what, holds in answers.items():
        print(f"{'yes' if holds else 'NO '}  {what}")
    return int(not all(answers.values()))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
