"""Helpers of the tests: tiny models, made-up samples, runs of seconds, ranks as processes."""

import atexit
import dataclasses
import functools
import importlib
import json
import multiprocessing
import multiprocessing.connection
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import traceback
import types
import unittest.mock
from pathlib import Path

# before torch is imported: on tiny matrices threads only wait for each other
os.environ.setdefault("OMP_NUM_THREADS", "1")

import huggingface_hub.constants
import numpy as np
import torch
import transformers

import grpo
from grpo import Config, Prompt, Sample

torch.set_num_threads(1)
huggingface_hub.constants.HF_HUB_OFFLINE = True  # a missing model is said at once
HERE = str(Path(__file__).resolve().parent.parent)
REDUCTIONS = ("token", "sequence", "constant")
F64 = torch.float64
CPU = torch.device("cpu")
GAP = "sampling/sampling_logp_difference/mean"  # between sampler and trainer


def tiny_model(kind="qwen2", dtype=torch.float32, seed=0, **options):
    """A model with random weights, large enough that its distributions are not uniform."""
    ids = dict(eos_token_id=1, pad_token_id=0, bos_token_id=None, initializer_range=0.1)
    if dtype == F64:  # other models compute RMSNorm in float32, which is not exact to 1e-12
        sizes = dict(vocab_size=32, n_embd=32, n_layer=2, n_head=2, n_positions=128)
        dropout = dict(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
        config = transformers.GPT2Config(**sizes | dropout | ids | options)
    else:
        sizes = dict(
            vocab_size=32,
            hidden_size=64,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=512,
        )
        if kind != "qwen2":
            sizes["head_dim"] = 32
        name = "Gemma3Text" if kind == "gemma3" else kind.capitalize()
        config = getattr(transformers, f"{name}Config")(**(sizes | ids | options))
    torch.manual_seed(seed)
    return transformers.AutoModelForCausalLM.from_config(config).to(dtype).eval()


def random_samples(n, group_size, dtype=np.float32, seed=0, longest=12):
    """n samples in groups, with many lengths and made-up log-probabilities and advantages."""
    rng = np.random.default_rng(seed)
    samples = []
    for i in range(n):
        if i % group_size == 0:
            prompt = Prompt(rng.integers(2, 32, rng.integers(1, 9)), "", {})
        ids = rng.integers(2, 32, rng.integers(1, longest + 1))
        logps = rng.normal(-2, 1, len(ids)).astype(dtype)
        sample = Sample(i // group_size, prompt, ids, logps)
        sample.advantages[:] = rng.normal()
        sample.ref_logps = rng.normal(-2, 0.5, len(ids)).astype(dtype)
        samples.append(sample)
    return samples


class Recorder:
    """Takes the optimizer's place and keeps the gradient that update() computed."""

    def __init__(self, policy):
        self.policy = policy
        self.param_groups = [{"lr": 0.0}]
        self.state = {"a parameter": {"step": 1}}  # as an optimizer has it after its first step
        self.grads = []

    def step(self): ...

    def zero_grad(self, set_to_none):
        learns = [p for p in self.policy.parameters() if p.grad is not None]
        if learns:
            self.grads.append(torch.cat([p.grad.flatten().to(F64) for p in learns]))
        for p in learns:
            p.grad = None


def update_gradient(cfg, samples, dtype=torch.float32, policy=None, ddp=None, step=1):
    """The parameter gradient [P] and the metrics of one optimizer step of update()."""
    if policy is None:
        policy = grpo.Policy(tiny_model(dtype=dtype), cfg.temperature)
    tokens = cfg.micro_batch_tokens or 2048
    # the samples' log-probabilities are made up
    cfg = dataclasses.replace(cfg, max_sampler_gap=1e9, micro_batch_tokens=tokens)
    recorder = Recorder(policy)
    metrics = grpo.update(policy, ddp or policy, recorder, samples, step, cfg)
    return recorder.grads[-1], metrics


def relative(a, b):
    return ((a - b).norm() / b.norm()).item()


def lines(path):
    with open(path) as file:
        return [json.loads(line) for line in file]


def metrics_of(out_dir):
    """The lines of metrics.jsonl without times."""
    kept = []
    for line in lines(Path(out_dir, "metrics.jsonl")):
        kept.append({k: v for k, v in line.items() if "time" not in k and k != "tokens_per_s"})
    return kept


def checkpoints(folder):
    """Paths of step_NNNNNN, oldest first."""
    return sorted(map(str, Path(folder).glob("step_" + "[0-9]" * 6)))


def weights_of(path):
    """All tensors of a checkpoint, one after the other."""
    model = transformers.AutoModelForCausalLM.from_pretrained(path)
    return torch.cat([p.flatten() for p in model.parameters()])


def small_rows(folder):
    """Five rows, so that an epoch ends in the middle of the second step."""
    path = Path(folder, "rows.jsonl")
    if not path.exists():
        rows = lines(f"{HERE}/sample_data/train.jsonl")[:5]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def small_config(out_dir, **options):
    """A run of seconds. Its reward, for short completions, has a signal from the first step. The
    numbers of prompts, samples, tokens and mini-batches divide nothing."""
    out_dir = Path(out_dir)
    small = dict(
        reward="overlong",
        train_data=small_rows(out_dir.parent),
        eval_data="",
        num_prompts=3,
        num_generations=5,
        num_minibatches=2,
        micro_batch_tokens=61,
        max_completion_length=8,
        device="cpu",
        max_steps=4,
        save_every=1,
        keep=0,
        out_dir=str(out_dir),
    )
    return Config(**grpo.BUNDLED | small | options)


def small_run(out_dir, **options):
    return train(small_config(out_dir, **options))


@functools.cache
def whole_run():
    """The directory of a small run of four steps, made once. Tests leave it as it is."""
    out = tempfile.mkdtemp(prefix="whole_run.") + "/run"
    atexit.register(shutil.rmtree, os.path.dirname(out))
    small_run(out)
    return out


def begun_run(out, steps):
    """A copy of it, as it was killed after so many steps: before the next checkpoint."""
    small_rows(Path(out).parent)
    shutil.copytree(whole_run(), out)
    for path in checkpoints(out)[steps:]:
        shutil.rmtree(path)
    for name in ("metrics.jsonl", "completions.jsonl"):
        kept = [line for line in lines(Path(out, name)) if line["step"] <= steps]
        Path(out, name).write_text("".join(json.dumps(line) + "\n" for line in kept))


@unittest.mock.patch("tools.view.draw", str)  # a picture takes twice as long as a small run
def train(cfg):
    return grpo.train(cfg)


def flags_of(cfg):
    """The command line of a config, less what is at its default."""
    args = []
    for f in dataclasses.fields(cfg):
        if getattr(cfg, f.name) != f.default:
            args += [f"--{f.name}", str(getattr(cfg, f.name))]
    return args


def command(*args):
    """grpo.py as a user starts it, in a process of its own."""
    return [sys.executable, f"{HERE}/grpo.py", *map(str, args)]


def run(*args, **options):
    options = dict(capture_output=True, text=True, timeout=600, cwd=HERE) | options
    return subprocess.run(command(*args), **options)


# -- Ranks, and what is killed: forks of a process that has imported everything and run nothing.
# (A fork of this one may not run autograd where torch has CUDA.)

SERVER = multiprocessing.get_context("forkserver")
PRELOADED = ["tests.common", "extras.flags", "extras.rows", "extras.fast", "extras.screen"]
SERVER.set_forkserver_preload([*PRELOADED, "transformers.trainer_utils"])


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def on_ranks(ranks, function, *args):
    """Calls "module.function" with these texts on every rank. Returns what subprocess.run does.
    When a rank fails the others are ended, as by torchrun."""
    environment = dict(MASTER_PORT=str(free_port()), MASTER_ADDR="127.0.0.1")
    environment |= dict(WORLD_SIZE=str(ranks), PYTEST_XDIST_WORKER="")
    with tempfile.TemporaryDirectory() as folder:
        paths = [f"{folder}/stdout", f"{folder}/stderr"]
        processes = []
        for rank in range(ranks):
            own = environment | dict(RANK=str(rank), LOCAL_RANK=str(rank))
            processes.append(fork(function, map(str, args), paths, **own))
        code = 0
        running = {process.sentinel: process for process in processes}
        while running:
            for sentinel in multiprocessing.connection.wait(running):
                process = running.pop(sentinel)
                process.join()
                if process.exitcode != 0 and code == 0:
                    code = abs(process.exitcode)
                    for other in running.values():
                        other.terminate()
        texts = [Path(path).read_text() for path in paths]
        return subprocess.CompletedProcess(function, code, *texts)


def fork(function, args, paths, **environment):
    """A process that calls "module.function". paths: of its stdout, and of its stderr."""
    arguments = (environment, paths, os.getcwd(), function, [*args])
    process = SERVER.Process(target=be_forked, args=arguments)
    process.start()
    return process


def be_forked(environment, paths, folder, function, args):
    os.environ.update(environment)
    os.chdir(folder)
    grpo.RANK = grpo.LOCAL_RANK = int(environment.get("RANK", 0))
    grpo.WORLD_SIZE = int(environment.get("WORLD_SIZE", 1))
    for number, path in enumerate(paths, 1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    module, _, name = function.rpartition(".")
    try:
        code = getattr(importlib.import_module(module), name)(*args) or 0
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


# -- Changed copies of grpo.py


def page_with(folder, text=None, alone=False):
    """A folder with this grpo.py, reward.py and, unless they are alone, extras/."""
    folder = Path(folder)
    folder.mkdir()
    (folder / "grpo.py").write_text(text or Path(HERE, "grpo.py").read_text())
    shutil.copy(f"{HERE}/reward.py", folder)
    if not alone:
        (folder / "extras").symlink_to(f"{HERE}/extras")
    return folder


def run_page(folder, *flags, code=0, out="run", path="", **options):
    """What a small run says that `python grpo.py` starts there, with these flags."""
    flags = [*flags_of(small_config(Path(folder, out), **dict(max_steps=1) | options)), *flags]
    done = start_page(folder, *flags, PYTHONPATH=path)
    done.join()
    said = Path(folder, "said").read_text()
    assert done.exitcode == code, said[-3000:]
    return said


def start_page(folder, *flags, **environment):
    """A fork in which grpo.py of this folder runs as a script. What it says is in `said`."""
    Path(folder, "said").unlink(missing_ok=True)
    process = SERVER.Process(target=be_page, args=(str(folder), flags, environment))
    process.start()
    return process


def be_page(folder, flags, environment):
    os.environ.update(environment)
    os.chdir(folder)
    for name in list(sys.modules):
        if name.partition(".")[0] in ("grpo", "reward", "extras", "tools", "tests"):
            del sys.modules[name]
    installed = [path for path in sys.path if path not in ("", HERE)]
    sys.path[:] = [folder, *filter(None, [environment["PYTHONPATH"]]), *installed]
    sys.argv[:] = ["grpo.py", *flags]
    for number in (1, 2):
        os.dup2(os.open("said", os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    page = sys.modules["__main__"] = types.ModuleType("__main__")
    page.__file__ = f"{folder}/grpo.py"
    code = 1
    try:
        exec(compile(Path("grpo.py").read_text(), page.__file__, "exec"), vars(page))
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


@unittest.mock.patch("tools.view.draw", str)
def main(*args):
    return grpo.main(list(args))


def draw_from(sampler, prompts, seeds, temperature, limits=None):
    """Of prompts as ids: ids and their log-probabilities."""
    prompts = [Prompt(np.array(ids), "", {}) for ids in prompts]
    fields = sampler.generate(prompts, seeds, temperature, limits)
    return [(f["completion_ids"], f["sampler_logps"]) for f in fields]


def prompts_in(path, tokenizer, cfg=None, rewards="overlong"):
    """Of a file whose rows need what these rewards need."""
    cfg = dataclasses.replace(cfg or Config(), train_data=str(path), reward=rewards)
    return grpo.load_prompts(str(path), tokenizer, cfg)


def tokenizer_of(path):
    return grpo.load_tokenizer(str(path), Config())


def prompt_of(row, tokenizer, cfg=None, number=0):
    """Of a row, with ids."""
    return grpo.make_prompt(row, number, tokenizer, cfg or Config(), _said="")


def fake_run(cfg, **parts):
    """What functions that take a Run need of it, without a set-up."""
    parts = dict(times={}, reward_functions=[], reference=None, step=0) | parts
    return types.SimpleNamespace(**dict(train_prompts=[None]) | parts, cfg=cfg)
