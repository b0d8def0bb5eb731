"""Does each patch of this folder still apply, run, and do what it is for?

    python variants/check.py                 # all patches, and the pairs in STACKS
    python variants/check.py rloo            # one of them
    python variants/check.py dynamic_resampling+maxrl  # both patches, one on top of the other

Each check (checks.py) patches a fresh copy of the project, runs a few steps of it, and prints one
line. The exit code is 1 if one fails.
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
PROJECT = HERE.parent
sys.path.insert(0, str(PROJECT))

import checks
import torch
from safetensors.torch import load_file

MAX_LINES = 25  # that one patch may change
STACKS = ["dynamic_resampling+maxrl"]
NEEDS = {"adamw8bit": "torchao"}  # patch: its package, which the trainer does not need
FORK = multiprocessing.get_context("fork")
SHORT_RUN = ["--max_steps", 2, "--num_prompts", 4, "--rollout", "hf", "--eval_data", ""]
TIMEOUT = 300  # seconds for a run


class Copy:
    """A copy of the project in `directory`: the patched grpo.py, and the original as plain.py."""

    def __init__(self, name: str, directory: str):
        """name: a patch, or several joined by +."""
        self.name = name
        self.directory = Path(directory)
        for source in ("grpo.py", "reward.py", "view.py"):
            shutil.copy(PROJECT / source, self.directory)
        for source in ("harness", "sample_data"):
            shutil.copytree(PROJECT / source, self.directory / source)
        shutil.copy(PROJECT / "grpo.py", self.directory / "plain.py")

        names = name.split("+")
        self.changed_lines = 0
        for patch_name in names:
            patch = HERE / f"{patch_name}.patch"
            lines = changed_lines(patch)
            assert lines <= MAX_LINES, f"{lines} changed lines, more than {MAX_LINES}"
            self.changed_lines += lines
            if len(names) == 1:
                command = ["git", "apply", str(patch)]
            else:  # git apply refuses a file that another patch has changed
                command = ["patch", "-p1", "--silent", "-i", str(patch)]
            subprocess.run(command, cwd=self.directory, check=True)
        self.grpo = self.import_grpo()

    def import_grpo(self):
        """The patched module, which imports the modules of this copy, not those of the last one."""
        for module in list(sys.modules):
            if module.split(".")[0] in ("harness", "reward", "view"):
                del sys.modules[module]
        path = self.directory / "grpo.py"
        spec = importlib.util.spec_from_file_location(f"grpo_{self.name}", path)
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        sys.path.remove(str(self.directory))  # which grpo.py put there
        return module

    def run(self, *flags, out="out", program="grpo.py", ranks=1) -> list[dict]:
        """A short run with these flags on top; returns its metrics, which must be finite."""
        flags = [str(flag) for flag in (*SHORT_RUN, "--out_dir", out, *flags)]
        environment = {}
        if ranks > 1:
            environment = dict(
                MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()), WORLD_SIZE=str(ranks)
            )
        processes = []
        for rank in range(ranks):
            call = (rank, environment, program, flags)
            processes.append(FORK.Process(target=self.run_rank, args=call))
        for process in processes:
            process.start()

        # Once one rank has ended, the others must end, too.
        multiprocessing.connection.wait([p.sentinel for p in processes], timeout=TIMEOUT)
        for process in processes:
            process.join(60)
            if process.is_alive():
                process.kill()
                process.join()
        log = (self.directory / "log.txt").read_text()
        codes = [process.exitcode for process in processes]
        assert codes == [0] * ranks, f"{program} {flags}: exit codes {codes}\n{log[-3000:]}"
        assert "could not save" not in log, log[-3000:]

        lines = (self.directory / out / "metrics.jsonl").read_text().splitlines()
        metrics = [json.loads(line) for line in lines]
        assert metrics, "no step was logged"
        for step in metrics:
            for name, value in step.items():
                if isinstance(value, (int, float)):
                    assert math.isfinite(value), f"{name} is {value}"
        return metrics

    def run_rank(self, rank: int, environment: dict, program: str, flags: list[str]):
        """What torchrun starts as one rank, in a fork that has everything imported."""
        if environment:
            os.environ.update(environment, RANK=str(rank), LOCAL_RANK=str(rank))
        os.chdir(self.directory)
        log = os.open("log.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        sys.argv = [program, *flags]
        sys.path.insert(0, str(self.directory))

        import harness.curves

        harness.curves.draw = draw_nothing
        runpy.run_path(program, run_name="__main__")

    def saved(self, out="out") -> tuple[dict, dict]:
        """The weights and the trainer state after step 2."""
        path = self.directory / out / "step_000002"
        return load_file(path / "model.safetensors"), torch.load(path / "trainer_state.pt")

    def config(self, **flags):
        """These flags on top of those of the bundled task."""
        return self.grpo.Config(**(self.grpo.BUNDLED | flags))

    def policy(self):
        """The plain policy with the bundled weights, in float64."""
        cfg = self.config(dtype="float64")
        return self.grpo.Policy(self.grpo.load_model(cfg.model, cfg), 1.0)


def changed_lines(patch: Path) -> int:
    lines = [line for line in patch.read_text().splitlines() if line[:1] in ("+", "-")]
    return len(lines) - 2  # two of them name the file


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def draw_nothing(*_):
    """In place of the curves, which take longer than the run."""


def import_everything():
    """Imports here, once, what each fork would import for itself when it trains."""
    import matplotlib.pyplot  # noqa: F401
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    bundled = PROJECT / "sample_data" / "model"
    ids = AutoTokenizer.from_pretrained(bundled)("1+1=", return_tensors="pt")["input_ids"]
    AutoModelForCausalLM.from_pretrained(bundled).generate(ids, max_new_tokens=1)


def main() -> int:
    names = sys.argv[1:]
    if not names:
        names = sorted(path.stem for path in HERE.glob("*.patch")) + STACKS
    import_everything()
    failed = False
    for name in names:
        package = NEEDS.get(name)
        if package and importlib.util.find_spec(package) is None:
            print(f"{name}: skipped, as {package} is not installed (see the head of the patch)")
            continue
        check = getattr(checks, f"check_{name.replace('+', '_and_')}")
        with tempfile.TemporaryDirectory(prefix="variant_") as directory:
            try:
                copy = Copy(name, directory)
                shown = check(copy)
                print(f"{name}: ok, {copy.changed_lines} changed lines; {shown}", flush=True)
            except Exception as error:
                failed = True
                print(f"{name}: FAILED, {type(error).__name__}: {error}", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
