"""What a machine with a GPU does with this trainer: points to check, times and memory.

    python studies/gpu.py                    # all points, some ten minutes
    python studies/gpu.py float32 resume     # some of them

Each point runs in a process of its own, and prints one line: "right", "WRONG" or "skipped", and the
measurements. The exit code is 1 if a point is WRONG. RESULTS.md contains the numbers of an H200.
"""

import argparse
import functools
import importlib.util
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import bench
import numpy as np
import torch

import grpo
from extras import fast
from grpo import Config

GAP = "sampling/sampling_logp_difference/mean"  # between sampler and trainer
CUDA, CPU = torch.device("cuda"), torch.device("cpu")
SHAPES = {  # parameters: shape of a Llama
    "30M": bench.SHAPE,
    "500M": dict(vocab_size=151_936, hidden_size=896, intermediate_size=4864)
    | dict(num_hidden_layers=24, num_attention_heads=14, num_key_value_heads=2),
    "3B": dict(vocab_size=151_936, hidden_size=2048, intermediate_size=11_008)
    | dict(num_hidden_layers=36, num_attention_heads=16, num_key_value_heads=2),
}


class Skip(Exception):
    """The point needs something that this machine lacks."""


def model_folder(size: str) -> str:
    """A model with random weights, its tokenizer and rows."""
    folder = tempfile.mkdtemp()
    spec = bench.RANDOM | dict(shape=SHAPES[size], prompt=64)
    bench.make_random_model(spec, folder)
    bench.write_random_prompts(spec, f"{folder}/rows.jsonl")
    return folder


def made_up(model, n: int, prompt: int, completion: int) -> list:
    """n samples of random tokens, in groups of 8 that share a prompt."""
    rng = np.random.default_rng(0)
    vocab_size = model.get_input_embeddings().num_embeddings
    ids = rng.integers(0, vocab_size, (n // 8, prompt))
    prompts = [grpo.Prompt(x, "", {}) for x in ids]
    samples = fast.dummy_samples(prompts, [completion] * 8, model)
    for s in samples:
        s.completion_ids = rng.integers(0, vocab_size, completion)
        s.advantages[:] = rng.normal()
    return samples


def gradient_of(policy):
    """[P], on the CPU."""
    return torch.cat([p.grad.flatten().double().to(CPU) for p in policy.parameters()])


def cosine(a, b) -> float:
    return float(a @ b / a.norm() / b.norm())


def against_the_cpu(dtype: str, least_cosine: float, most_error: float) -> tuple:
    """Compares the plain policy on the GPU with float64 on the CPU."""
    folder = model_folder("30M")
    logps, gradients = [], []
    for device, kind in ((CPU, "float64"), (CUDA, dtype)):
        cfg = Config(model=folder, dtype=kind, micro_batch_tokens=4096, tis_cap=0.0)
        policy = grpo.Policy(grpo.load_model(folder, cfg, device), 1.0)
        samples = made_up(policy.model, 16, 64, 64)
        grpo.add_logps("old_logps", policy, samples, cfg)
        logps.append(np.concatenate([s.old_logps for s in samples]))
        grpo.accumulate_gradient(policy, policy, samples, cfg)
        gradients.append(gradient_of(policy))
    error = float(np.abs(logps[1] - logps[0]).mean())
    angle = cosine(*gradients)
    shown = f"log-probabilities {error:.1e} off, cosine of the gradients {angle:.6f}"
    return error < most_error and angle > least_cosine, shown


def point_float32():
    """Log-probabilities and gradient in float32 equal the CPU's."""
    return against_the_cpu("float32", 0.99999, 1e-5)


def point_bfloat16():
    """The same in bfloat16, up to its rounding."""
    if not torch.cuda.is_bf16_supported(including_emulation=False):
        raise Skip("this GPU has no fast bfloat16")
    return against_the_cpu("bfloat16", 0.99, 2e-2)


def point_fast():
    """extras/fast.py computes the plain policy's numbers; how much time and memory both need."""
    folder = model_folder("500M")
    is_fast = torch.cuda.is_bf16_supported(including_emulation=False)
    dtype = "bfloat16" if is_fast else "float32"
    cfg = Config(model=folder, dtype=dtype, micro_batch_tokens=8192, tis_cap=0.0)
    model = grpo.load_model(folder, cfg, CUDA)
    samples = made_up(model, 32, 512, 256)
    faster = grpo.make_policy(model, [samples[0].prompt, samples[8].prompt], cfg)
    shown, gradients = f"{type(faster).__name__}; ", []
    for name, policy in (("plain", grpo.Policy(model, 1.0)), ("fast", faster)):
        for _ in range(2):  # the first one warms up
            torch.cuda.reset_peak_memory_stats()
            torch.cuda.synchronize()
            started = time.perf_counter()
            policy.zero_grad()
            grpo.accumulate_gradient(policy, policy, samples, cfg)
            torch.cuda.synchronize()
            seconds = time.perf_counter() - started
        gradients.append(gradient_of(policy))
        shown += f"{name} {seconds:.2f} s and {torch.cuda.max_memory_allocated() / 1e9:.1f} GB, "
    tokens = sum(s.total_length for s in samples)
    angle = cosine(*gradients)
    return angle > 0.999, f"{shown}{tokens / seconds:.0f} tokens a second, cosine {angle:.6f}"


def run(*flags, ranks: int = 0, resumed: str = "") -> tuple:
    """Runs grpo.py on the GPU, with ranks by torchrun, or resumes the run in a directory. Returns
    the run's directory and the lines of metrics.jsonl."""
    out = resumed or tempfile.mkdtemp()
    command = [sys.executable]
    if ranks > 0:
        command += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    command += [f"{bench.HERE}/../grpo.py", "--device", "cuda", "--out_dir", out, *flags]
    if resumed:
        command.append("--resume")
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        print(done.stdout[-2000:], done.stderr[-6000:], sep="\n", file=sys.stderr)
        raise RuntimeError(f"exit code {done.returncode}: {done.stderr.strip().splitlines()[-1]}")
    return out, [json.loads(line) for line in Path(out, "metrics.jsonl").read_text().splitlines()]


def run_500M(*flags, ranks: int = 0) -> tuple:
    folder = model_folder("500M")
    data = ["--train_data", f"{folder}/rows.jsonl", "--reward", "overlong"]
    return run("--model", folder, *data, *flags, ranks=ranks)


def point_default():
    """The bundled task learns, with the hf sampler."""
    started = time.perf_counter()
    _, lines = run("--rollout", "hf")
    shown = f"eval accuracy {lines[-1]['eval_accuracy']:.3f}, gap {lines[1][GAP]:.1e}, "
    return lines[-1]["eval_accuracy"] > 0.95, shown + f"{time.perf_counter() - started:.0f} s"


def point_vllm(ranks: int = 0):
    """vLLM has the trainer's weights after a sleep and an update; the seconds of the phases."""
    if not importlib.util.find_spec("vllm"):
        raise Skip("vllm is not installed")
    flags = ["--rollout", "vllm", "--learning_rate", "1e-3", "--max_steps", "3"]
    flags += ["--max_completion_length", "256", "--num_prompts", "8"]
    _, lines = run_500M(*flags, ranks=ranks)
    last = lines[-1]
    shown = f"gaps {[round(m[GAP], 5) for m in lines]}, seconds: "
    for name in ("rollout", "update", "eval"):
        shown += f"{name} {last['time_' + name]:.1f}, "
    return last[GAP] < 0.05, f"{shown}{last['tokens_per_s']:.0f} tokens a second"


def point_vllm_ranks():
    """The same by torchrun, with an engine in each rank: two ranks, or one if there is one GPU."""
    ranks = min(2, torch.cuda.device_count())
    right, shown = point_vllm(ranks)
    return right, f"{ranks} ranks, {shown}"


def point_resume():
    """A resumed run continues like an uninterrupted one; the largest difference of the metrics."""
    flags = ["--rollout", "hf", "--eval_data", ""]
    _, whole = run(*flags, "--max_steps", "6")
    out, _ = run(*flags, "--max_steps", "3")
    _, resumed = run("--max_steps", "6", resumed=out)
    return same_run(whole, resumed)


def same_run(lines, others) -> tuple:
    names = ("loss", "reward", "grad_norm")
    differences = [abs(a[k] - b[k]) for a, b in zip(lines, others, strict=True) for k in names]
    return max(differences) < 1e-3, f"{max(differences):.1e}"


def point_ranks():
    """Two GPUs reproduce the run of one."""
    if torch.cuda.device_count() < 2:
        raise Skip("one GPU")
    flags = ["--rollout", "hf", "--eval_data", "", "--max_steps", "3"]
    (_, one), (_, two) = run(*flags), run(*flags, ranks=2)
    return same_run(one, two)


def point_micro_batch():
    """The micro-batch that --micro_batch_tokens 0 chooses fits in memory with long answers."""
    flags = ["--rollout", "hf", "--max_steps", "1", "--num_prompts", "4"]
    out, lines = run_500M(*flags, "--max_completion_length", "1024")
    chosen = json.loads(Path(out, "config.json").read_text())["micro_batch_tokens"]
    return True, f"{chosen} tokens, update {lines[-1]['time_update']:.1f} s"


def point_memory():
    """The trainer's peak memory in each phase of a run of 3B with adapters, without vLLM's own."""
    peaks = {}

    def measure(holder, name):
        function = getattr(holder, name)

        @functools.wraps(function)
        def measured(*args, **options):
            torch.cuda.reset_peak_memory_stats()
            result = function(*args, **options)
            peak = torch.cuda.max_memory_allocated() / 1e9
            peaks[name] = max(peak, peaks.get(name, 0))
            return result

        setattr(holder, name, measured)

    for name in ("load_model", "make_policy", "make_sampler", "rollout", "update", "save_model"):
        measure(grpo, name)
    measure(grpo.VLLMSampler, "load_weights")
    folder = model_folder("3B")
    options = dict(model=folder, train_data=f"{folder}/rows.jsonl", reward="overlong", max_steps=2)
    options |= dict(lora_rank=16, vllm_gpu_memory_utilization=0.45, device="cuda")
    grpo.train(Config(**options, out_dir=f"{tempfile.mkdtemp()}/run"))
    return True, ", ".join(f"{name} {peak:.1f} GB" for name, peak in peaks.items())


POINTS = {name[6:]: f for name, f in list(globals().items()) if name.startswith("point_")}


def check(name: str) -> int:
    """Prints the verdict of a point. Returns 1 if it is WRONG."""
    verdict, failed = "WRONG", 1
    try:
        right, shown = POINTS[name]()
        if right:
            verdict, failed = "right", 0
    except Skip as reason:
        verdict, shown, failed = "skipped", reason, 0
    except Exception as error:
        shown = repr(error)
    print(f"{verdict:8} {name:14} {shown}", flush=True)
    return failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("points", nargs="*", metavar="POINT", help=", ".join(POINTS))
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)  # in this process
    args = parser.parse_args()
    if args.here:
        return check(*args.points)
    failed = 0
    for name in args.points or POINTS:
        failed |= subprocess.run([sys.executable, __file__, name, "--here"]).returncode
    return failed


if __name__ == "__main__":
    sys.exit(main())
