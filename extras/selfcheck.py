"""Is a changed copy of grpo.py still whole? Five short runs say if a resume is exact, if two ranks
are one run, and if a signal is left without the KL.

    python extras/selfcheck.py my_grpo.py [flags of its run]
"""

import json
import os
import subprocess
import sys
import tempfile

STEPS = 4
SMALL = dict(num_prompts=3, num_generations=5, eval_data="", rollout="hf", fast="false")
SMALL |= dict(save_every=STEPS // 2, max_completion_length=24)


def run(script, out_dir, flags, ranks=1, **changes):
    """The lines of its metrics.jsonl without times."""
    command = [sys.executable, script]
    if ranks > 1:
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
        command = [sys.executable, *launcher, script]
    for name, value in (SMALL | dict(max_steps=STEPS)).items():
        command += [f"--{name}", str(value)]
    command += flags  # given flags come later, and win
    for name, value in (dict(out_dir=out_dir) | changes).items():
        command += [f"--{name}", str(value)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)}\n{done.stdout[-1000:]}{done.stderr[-3000:]}")
    with open(os.path.join(out_dir, "metrics.jsonl")) as file:
        lines = [json.loads(line) for line in file]
    return [{k: v for k, v in m.items() if "time" not in k and "per_s" not in k} for m in lines]


def close(a, b):
    """The same metrics up to rounding, which differs with the order of sums."""
    near = [abs(a[name] - b.get(name, float("inf"))) <= 1e-4 + 1e-3 * abs(a[name]) for name in a]
    return a.keys() == b.keys() and all(near)


def main(script, *flags):
    flags = list(flags)
    with tempfile.TemporaryDirectory() as folder:
        whole = run(script, f"{folder}/whole", flags)
        run(script, f"{folder}/parts", flags, max_steps=STEPS // 2)
        parts = run(script, f"{folder}/parts", flags, resume="true")
        two = run(script, f"{folder}/two", flags, ranks=2)
        bare = run(script, f"{folder}/bare", flags, beta=0)
    answers = {
        "a resume is exact": whole == parts,
        "two ranks are one run": all(map(close, whole, two)) and len(whole) == len(two),
        "a signal is left with --beta 0": any(m.get("grad_norm", 0) > 0 for m in bare),
    }
    for what, holds in answers.items():
        print(f"{'yes' if holds else 'NO '}  {what}")
    return int(not all(answers.values()))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
