"""python variants/check.py [NAME ...]: does each patch of this folder still apply, run, and do what it is for?

Each is applied to a fresh copy, which runs a few steps and one check of the variant's own (checks.py). ONE+TWO: both
patches, one on top of the other. One line per variant; exit code 1 if one fails.
"""

import importlib.util
import json
import math
import multiprocessing
import multiprocessing.connection
import os
import runpy
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import checks
import torch
from safetensors.torch import load_file

MOST_LINES = 25
STACKS = ["dynamic_resampling+maxrl", "lora+zero1"]
FORK = multiprocessing.get_context("fork")


class Copy:
    """A directory with the patched grpo.py, the plain one as plain.py, and what both need."""

    def __init__(self, name: str, directory: str):
        self.name, self.directory = name, Path(directory)
        for source in ("grpo.py", "harness", "reward.py", "view.py", "sample_data"):
            copy = shutil.copytree if (HERE.parent / source).is_dir() else shutil.copy
            copy(HERE.parent / source, self.directory / source)
        shutil.copy(self.directory / "grpo.py", self.directory / "plain.py")
        self.lines = 0
        for patch in (HERE / f"{part}.patch" for part in name.split("+")):
            lines = (
                sum(line[:1] in ("+", "-") for line in patch.read_text().splitlines()) - 2
            )  # two name the file
            assert lines <= MOST_LINES, f"{lines} changed lines, more than {MOST_LINES}"
            self.lines += lines
            tool = ["patch", "-p1", "-i"] if "+" in name else ["git", "apply"]
            subprocess.run(
                [*tool, str(patch)], cwd=self.directory, check=True, capture_output="+" in name
            )
        for module in [
            m for m in sys.modules if m.partition(".")[0] in ("harness", "reward", "view")
        ]:
            del sys.modules[module]  # the last copy's
        spec = importlib.util.spec_from_file_location(f"grpo_{name}", self.directory / "grpo.py")
        self.grpo = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(self.grpo)
        sys.path.remove(directory)

    def rank(self, rank: int, environment: dict, program: str, flags: list[str]):
        """In a fork, where everything is imported already: what `torchrun program flags` does on one rank."""
        os.environ.update(
            environment | dict(RANK=str(rank), LOCAL_RANK=str(rank)) if environment else {}
        )
        os.chdir(self.directory)
        for target in (1, 2):
            os.dup2(os.open("log.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND), target)
        sys.argv, sys.path[:0] = [program, *flags], [str(self.directory)]
        import view

        view.draw = lambda *_: None  # no curves: they take longer than the run
        runpy.run_path(program, run_name="__main__")

    def run(self, *flags, out="out", program="grpo.py", ranks=1) -> list[dict]:
        """A short run; its metrics, which must be finite."""
        short = f"--max_steps 2 --num_prompts 4 --rollout hf --out_dir {out} --eval_data".split()
        environment = {}
        if ranks > 1:
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                environment = dict(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free.getsockname()[1]))
            environment |= dict(WORLD_SIZE=str(ranks))
        call = (environment, program, [*short, "", *map(str, flags)])
        processes = [FORK.Process(target=self.rank, args=(rank, *call)) for rank in range(ranks)]
        for process in processes:
            process.start()
        multiprocessing.connection.wait([process.sentinel for process in processes], timeout=300)
        for process in processes:
            process.join(60)  # one has ended: so must the others
            if process.is_alive():
                process.kill()
        codes = [process.exitcode for process in processes]
        assert not any(codes), (
            f"{program} {flags}: {codes}\n{(self.directory / 'log.txt').read_text()[-3000:]}"
        )
        assert "could not save" not in (log := (self.directory / "log.txt").read_text()), log[
            -3000:
        ]
        steps = [
            json.loads(line)
            for line in (self.directory / out / "metrics.jsonl").read_text().splitlines()
        ]
        values = [
            value for step in steps for value in step.values() if isinstance(value, (int, float))
        ]
        assert steps and all(map(math.isfinite, values)), "metrics that are not finite"
        return steps

    def saved(self, out="out") -> tuple[dict, dict]:
        """Weights and trainer state after step 2."""
        path = self.directory / out / "step_000002"
        return load_file(path / "model.safetensors"), torch.load(path / "trainer_state.pt")

    def config(self, **flags):
        """Those flags, over the ones of the bundled task."""
        return self.grpo.Config(**(self.grpo.BUNDLED | flags))

    def policy(self):
        cfg = self.config(dtype="float64")
        return self.grpo.Policy(self.grpo.load_model(cfg.model, cfg), 1.0)


def import_everything():
    """Once, here, what every fork would import for itself when it trains."""
    import matplotlib.pyplot  # noqa: F401
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    bundled = HERE.parent / "sample_data" / "model"
    ids = AutoTokenizer.from_pretrained(bundled)("1+1=", return_tensors="pt")["input_ids"]
    AutoModelForCausalLM.from_pretrained(bundled).generate(ids, max_new_tokens=1)


def main() -> int:
    import_everything()
    failed = False
    for name in sys.argv[1:] or sorted(path.stem for path in HERE.glob("*.patch")) + STACKS:
        check = getattr(checks, f"check_{name.replace('+', '_and_')}")
        if "lora" in name and not importlib.util.find_spec("peft"):
            print(
                f"{name}: skipped, peft is not installed (pip install --no-deps peft accelerate)",
                flush=True,
            )
            continue
        with tempfile.TemporaryDirectory(prefix="variant_") as directory:
            try:
                copy = Copy(name, directory)
                print(f"{name}: ok, {copy.lines} changed lines; {check(copy)}", flush=True)
            except Exception as error:
                failed = True
                print(f"{name}: FAILED, {type(error).__name__}: {error}", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
