"""python variants/check.py [NAME ...]: does each patch of this folder still apply, run, and do what it is for?

Each is applied to a fresh copy, which runs a few steps and one check of the variant's own (checks.py).
One line per variant; exit code 1 if one fails.
"""

import importlib.util
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import checks
import torch
from safetensors.torch import load_file

HERE = Path(__file__).resolve().parent
MOST_LINES = 25


class Copy:
    """A directory with the patched grpo.py, the plain one as plain.py, and what both need."""

    def __init__(self, name: str, directory: str):
        self.name, self.directory = name, Path(directory)
        for source in ("grpo.py", "reward.py", "view.py", "sample_data"):
            copy = shutil.copytree if (HERE.parent / source).is_dir() else shutil.copy
            copy(HERE.parent / source, self.directory / source)
        shutil.copy(self.directory / "grpo.py", self.directory / "plain.py")
        patch = HERE / f"{name}.patch"
        self.lines = sum(line[:1] in ("+", "-") for line in patch.read_text().splitlines()) - 2  # two name the file
        assert self.lines <= MOST_LINES, f"{self.lines} changed lines, more than {MOST_LINES}"
        self.execute("git", "apply", str(patch))
        spec = importlib.util.spec_from_file_location(f"grpo_{name}", self.directory / "grpo.py")
        sys.path.insert(0, directory)
        self.grpo = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(self.grpo)
        sys.path.remove(directory)

    def execute(self, *command: str):
        options = dict(cwd=self.directory, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        with subprocess.Popen(command, **options) as process:
            try:
                output, _ = process.communicate(timeout=300)
            except subprocess.TimeoutExpired:
                process.terminate()  # not kill: torchrun ends its workers
                raise
        assert process.returncode == 0, f"{' '.join(command)}: exit code {process.returncode}\n{output[-3000:]}"

    def run(self, *flags, out="out", program="grpo.py", ranks=1) -> list[dict]:
        """A short run; its metrics, which must be finite."""
        launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"] if ranks > 1 else []
        short = f"--max_steps 2 --num_prompts 4 --rollout hf --out_dir {out} --eval_data".split()
        self.execute(sys.executable, *launch, program, *short, "", *map(str, flags))
        steps = [json.loads(line) for line in (self.directory / out / "metrics.jsonl").read_text().splitlines()]
        values = [value for step in steps for value in step.values() if isinstance(value, (int, float))]
        assert steps and all(map(math.isfinite, values)), "metrics that are not finite"
        return steps

    def saved(self, out="out") -> tuple[dict, dict]:
        """Weights and trainer state after step 2."""
        path = self.directory / out / "step_000002"
        return load_file(path / "model.safetensors"), torch.load(path / "trainer_state.pt")

    def policy(self):
        model = self.grpo.load_model(self.grpo.Config().model, self.grpo.Config(dtype="float64"))
        return self.grpo.Policy(model, 1.0)


def main() -> int:
    failed = False
    for name in sys.argv[1:] or sorted(path.stem for path in HERE.glob("*.patch")):
        if name == "lora" and not importlib.util.find_spec("peft"):
            print("lora: skipped, peft is not installed (pip install --no-deps peft accelerate)", flush=True)
            continue
        with tempfile.TemporaryDirectory(prefix="variant_") as directory:
            try:
                copy = Copy(name, directory)
                print(f"{name}: ok, {copy.lines} changed lines; {getattr(checks, f'check_{name}')(copy)}", flush=True)
            except Exception as error:
                failed = True
                print(f"{name}: FAILED, {type(error).__name__}: {error}", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
