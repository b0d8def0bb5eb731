"""TODO."""

import contextlib
import ctypes
import dataclasses
import importlib
import itertools
import json
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
import types

os.environ.setdefault(
    "OMP_NUM_THREADS", "1"
)  # for what a test starts: on tiny matrices threads wait for each other

import numpy as np
import psutil
import pytest
import torch

import grpo
import harness.check
import harness.checkpoints
import harness.engine
import harness.hf_sampler
import harness.models
import harness.rows
import harness.run
import reward
from grpo import Config, Prompt, Sample
from harness.fast import FastPolicy
from harness.ranks import World
from harness.scorer import Scorer
from harness.user_code import load_rewards

torch.set_num_threads(1)  # here: a test's file may have imported torch before
HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
CPU = World(0, 1, torch.device("cpu"))
REDUCTIONS = ("token", "sequence", "constant")
F64 = torch.float64
BUNDLED = Config(**grpo.BUNDLED)


def tiny_model(kind="qwen2", dtype=torch.float32, seed=0, **options):
    """A randomly initialised model, sharp enough that its distributions are not uniform."""
    import transformers

    ids = dict(eos_token_id=1, pad_token_id=0, bos_token_id=None, initializer_range=0.1)
    if (
        dtype == F64
    ):  # the RMSNorm of the others computes in float32 inside, whose rounding is not exact to 1e-12
        sizes = dict(vocab_size=32, n_embd=32, n_layer=2, n_head=2, n_positions=128)
        config = transformers.GPT2Config(
            **sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **ids
        )
    else:
        sizes = dict(
            vocab_size=32,
            hidden_size=64,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=2,
        )
        sizes |= dict(num_key_value_heads=1, max_position_embeddings=512)
        if kind not in ("qwen2", "mixtral"):
            sizes |= dict(head_dim=32)
        if kind == "mixtral":
            sizes |= dict(
                num_local_experts=4, intermediate_size=64
            )  # vLLM pads others, and cannot reload them then
        names = dict(
            qwen2="Qwen2",
            qwen3="Qwen3",
            llama="Llama",
            gemma="Gemma",
            gemma2="Gemma2",
            gemma3="Gemma3Text",
        )
        names |= dict(mistral="Mistral", mixtral="Mixtral")
        config = getattr(transformers, names[kind] + "Config")(**(sizes | ids | options))
    torch.manual_seed(seed)
    return transformers.AutoModelForCausalLM.from_config(config).to(dtype).eval()


def ids_of(values):
    return np.array(values, dtype=np.int32)


def random_samples(n, group_size, dtype=np.float32, seed=0, longest=12):
    """n samples in groups, of many lengths, with made-up log-probabilities and advantages."""
    rng, samples = np.random.default_rng(seed), []
    for i in range(n):
        if i % group_size == 0:
            prompt = Prompt(ids_of(rng.integers(2, 32, rng.integers(1, 9))), "", {})
        ids = ids_of(rng.integers(2, 32, rng.integers(1, longest + 1)))
        sample = Sample(
            i // group_size, prompt, ids, rng.normal(-2, 1, len(ids)).astype(dtype), "stop"
        )
        sample.advantages = np.full(len(sample.completion_ids), float(rng.normal()))
        sample.ref_logps = rng.normal(-2, 0.5, len(ids)).astype(dtype)
        samples.append(sample)
    return samples


class Recorder:
    """Stands in for the optimiser: keeps the gradient that update() computed."""

    def __init__(self, policy):
        self.policy, self.param_groups, self.grads = policy, [{"lr": 0.0}], []

    def step(self):
        pass

    def zero_grad(self, set_to_none):
        if all(p.grad is None for p in self.policy.parameters()):
            return  # before the first backward
        self.grads.append(torch.cat([p.grad.flatten().to(F64) for p in self.policy.parameters()]))
        for p in self.policy.parameters():
            p.grad = None


def fast_policy(model, temperature: float):
    """As make_policy() makes it, without its comparison."""
    harness.check.choose_attention(model)
    return FastPolicy(grpo.Policy(model, temperature))


def update_gradient(
    cfg, samples, dtype=torch.float32, ddp=None, policy=None, world=CPU, packs=True
):
    """The parameter gradient [P] and the metrics of one optimiser step, through the real update()."""
    policy = policy or fast_policy(tiny_model(dtype=dtype), cfg.temperature)
    policy.packs = packs and isinstance(policy, FastPolicy)
    cfg = dataclasses.replace(
        cfg, max_sampler_gap=1e9
    )  # the samples' log-probabilities are made up
    cfg = dataclasses.replace(cfg, micro_batch_tokens=cfg.micro_batch_tokens or 2048)
    recorder = Recorder(policy)
    metrics = grpo.update(policy, recorder, samples, cfg, ddp=ddp or policy, world=world)
    return recorder.grads[0], metrics


def relative(a, b):
    return ((a - b).norm() / b.norm()).item()


def run(*args, nproc=0, launch=(), env=None, timeout=900, cwd=HERE):
    """grpo.py as a user starts it, with torchrun where nproc is given."""
    launcher = [sys.executable]
    if nproc:
        launcher += [
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc_per_node={nproc}",
            *launch,
        ]
    script = (
        args
        if args and (args[0] in ("-c", "-m") or str(args[0]).endswith(".py"))
        else (os.path.join(HERE, "grpo.py"), *args)
    )
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": HERE} | (env or {})
    return subprocess.run(
        [*launcher, *map(str, script)],
        capture_output=True,
        text=True,
        timeout=timeout,
        env=environment,
        cwd=cwd,
    )


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """One process runs all tests of the default suite that fork, so that there is one server; others go by file."""
    for item in items:
        forks = "fork" in item.fixturenames and not item.get_closest_marker("slow")
        item.add_marker(pytest.mark.xdist_group("forks" if forks else item.path.name))


def forking_server():
    """Each line of its input is a call: [name, args, options, ranks, file for the output]. It is made in a fork, or in
    one for each rank; the server answers with their pids and, at the end, with their exit codes."""
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr):
        small_run(f"{folder}/out", max_steps=1)
    for line in sys.stdin:
        name, args, options, ranks, output = json.loads(line)
        if name.endswith("vllm_worker") or "vllm" in args:  # for this fork and the later ones
            harness.engine.choose_sampler(Config(rollout="vllm"), CPU.device, False)
            from vllm import LLM  # noqa: F401
            from vllm.v1.worker import cpu_worker  # noqa: F401
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            meet = dict(
                MASTER_ADDR="127.0.0.1",
                MASTER_PORT=str(free.getsockname()[1]),
                WORLD_SIZE=str(ranks),
            )
        pids = []
        for rank in range(ranks or 1):
            pids.append(os.fork())
            if pids[-1] == 0:
                os.environ.update(
                    meet | dict(RANK=str(rank), LOCAL_RANK=str(rank)) if ranks else {}
                )
                forked_call(named(name), args, options, output)
        print(json.dumps(pids), flush=True)
        codes, patience = {}, math.inf
        while len(codes) < len(pids):  # one that fails ends the others, as torchrun does
            pid, status = os.waitpid(-1, os.WNOHANG if patience < math.inf else 0)
            if pid:
                codes[pid] = os.waitstatus_to_exitcode(status)
            if pid and codes[pid] and patience == math.inf:
                patience = time.monotonic() + 30
                end(set(pids) - set(codes), signal.SIGTERM)
            elif not pid:
                time.sleep(0.1)
            if time.monotonic() > patience:
                end(set(pids) - set(codes), signal.SIGKILL)
        print(json.dumps([codes[pid] for pid in pids]), flush=True)


def named(name):
    """The function of this file, or of module.function."""
    module, _, function = name.rpartition(".")
    return getattr(importlib.import_module(module or __name__), function)


def end(pids, how):
    for pid in pids:
        os.kill(pid, how)


def forked_call(function, args, options, output):
    code = 1
    try:
        for target, name in ((1, f"{output}.out"), (2, f"{output}.err")):
            os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND), target)
        function(*args, **options)
        code = 0
    except SystemExit as stop:
        code = int(stop.code or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(code)


def command_line(*args):
    sys.argv = ["grpo.py", *args]
    sys.exit(grpo.main())


@pytest.fixture(scope="session")
def fork(tmp_path_factory):
    """fork(name, *args, ranks=0, **options) -> pids, wait; wait() -> exit codes, stdout, stderr."""
    command = [sys.executable, "-c", "from tests import common\ncommon.forking_server()"]
    pipes = dict(
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        cwd=HERE,
    )
    folder, number = tmp_path_factory.mktemp("forks"), itertools.count()
    with subprocess.Popen(command, **pipes) as server:

        def start(name, *args, ranks=0, **options):
            output = folder / str(next(number))
            server.stdin.write(
                json.dumps([name, list(map(str, args)), options, ranks, str(output)]) + "\n"
            )
            server.stdin.flush()

            def wait():
                codes = json.loads(server.stdout.readline())
                return types.SimpleNamespace(
                    returncode=max(codes, key=abs),
                    stdout=read(f"{output}.out"),
                    stderr=read(f"{output}.err"),
                )

            return json.loads(server.stdout.readline()), wait

        yield start
        server.stdin.close()


def read(path):
    with open(path) as file:
        return file.read()


def lines(path):
    with open(path) as file:
        return [json.loads(line) for line in file]


def small_run(out, command_line=False, **options):
    """A run of seconds whose reward (short completions) has a signal from the first step."""
    rows = os.path.join(os.path.dirname(out), "rows.jsonl")
    if not os.path.exists(rows):
        with (
            open(os.path.join(HERE, "sample_data", "train.jsonl")) as source,
            open(rows, "w") as target,
        ):
            target.writelines(
                itertools.islice(source, 5)
            )  # an epoch ends in the middle of the second step
    settings_ = grpo.BUNDLED | dict(
        reward="overlong",
        rollout="hf",
        train_data=rows,
        eval_data="",
        num_prompts=3,
        num_generations=5,
    )
    settings_ |= dict(
        max_completion_length=8,
        max_steps=4,
        save_every=1,
        keep=0,
        num_minibatches=2,
        out_dir=str(out),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            harness.log, "draw", lambda *_: None
        )  # takes longer than the run; others draw
        return grpo.train(Config(**(settings_ | options)), command_line)


def logps_of(policy, samples, packs=None):
    """packs: in one row, or in padded ones, whatever the policy itself would do."""
    before = policy.packs
    if packs is not None:
        policy.packs = packs
    try:
        return policy(grpo.collate(samples, CPU.device, policy.rows))
    finally:
        policy.packs = before


MODELS = [
    ("qwen2", {}), ("qwen2", dict(tie_word_embeddings=True)), ("qwen3", {}), ("llama", {}), ("gemma", {}),
    ("gemma2", dict(attn_logit_softcapping=1.0)),  # caps its logits after the head, and its attention, as sdpa does not
    ("gemma3", dict(sliding_window=4)), ("mistral", dict(sliding_window=4)), ("mixtral", {}),
    ("qwen2", dict(vocab_size=64)),
]  # fmt: skip


def in_bfloat16(policy, samples, packs=None):
    with torch.autocast("cpu", torch.bfloat16):
        return logps_of(policy, samples, packs)


def texts(completions):
    return [c.ids.tolist() for c in completions]


def sampler_of(model, eos=(1,), **options):
    cfg = Config(max_completion_length=options.pop("max_completion_length", 10), **options)
    return grpo.HFSampler(model, list(eos), 0, cfg)


@pytest.fixture
def encode(tmp_path):
    """encode(rows, tokenizer, columns, **flags) -> prompts, through a file."""

    def call(rows, tokenizer=None, columns=(), **options):
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        rewards = [reward.Reward("none", 1.0, None, tuple(columns))]
        tokenizer = tokenizer or harness.rows.load_tokenizer(BUNDLED)
        return harness.rows.load_prompts(
            "train_data", rewards, tokenizer, Config(train_data=str(path), **options)
        )

    return call


TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'system' %}={{ m.content }}={% else %}{{ m.content }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}+{% if enable_thinking %}++{% endif %}{% endif %}"
)


REWARDS = """
def wrong_key(completion, row): return float(row["anwser"] in completion)
def sometimes(completion, row): return 1 / (len(completion) % 3)
def none(completion, row): return None
def messages(prompts, completions, completion_ids, trainer_state, log_extra, log_metric, **_):
    assert prompts[0][-1] == {"role": "user", "content": "1+2="} and completions[0][0]["role"] == "assistant"
    log_extra("length", [len(ids) for ids in completion_ids])
    log_metric("from_step", trainer_state.global_step)
    return [len(ids) + trainer_state.max_steps for ids in completion_ids]
"""


def state_of(out):
    """What a resumed run must share with an undisturbed one: the metrics but for timings, and the weights' bits."""
    timing = ("time_", "step_time", "tokens_per_s")
    metrics = [
        {k: v for k, v in m.items() if not k.startswith(timing)}
        for m in lines(out / "metrics.jsonl")
    ]
    newest = harness.checkpoints.checkpoints(str(out))[-1]
    with open(os.path.join(newest, "model.safetensors"), "rb") as file:
        return metrics, lines(out / "completions.jsonl"), file.read()


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "whole"
    small_run(out)
    assert any(m["grad_norm"] > 0 for m in lines(out / "metrics.jsonl"))
    return out


def copy_cut_back(run, out, saved):
    """A copy of a run that kept every checkpoint, as if it had been killed after its first `saved` ones."""
    shutil.copytree(run, out)
    for path in harness.checkpoints.checkpoints(str(out))[saved:]:
        shutil.rmtree(path)


def write_whole(model):
    """A writer as model_writer() returns it, without a tokenizer."""
    return lambda path, trial=False: model.save_pretrained(path)


def tracked_run(out, model=None, **options):
    """A Run as train() makes one, around a tiny model that nobody trains."""
    policy = fast_policy(model or tiny_model(), 1.0)
    cfg = Config(model="m", out_dir=str(out), **options)
    run = harness.run.Run(cfg, CPU, None, time.monotonic())
    optimizer = grpo.make_optimizer(policy, cfg)
    run.track(policy.model, optimizer, write_whole(policy.model), 0)
    return run


METRICS = dict(reward=0.0, tokens=1, skipped_steps=0)


def wait_for(condition, seconds=600):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def stuck_run(out, how, marker, **options):
    """A run whose third step takes an hour, in one place or another."""

    def stuck(*_):
        open(marker, "w").close()
        if how == "one call":  # into which no signal comes: as in a backward pass of C++
            signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
            ctypes.CDLL(None).sleep(3600)
        time.sleep(3600)

    with pytest.MonkeyPatch.context() as patch:
        if how == "rollout":
            honest = harness.hf_sampler.SeededSampling.__call__
            steps = itertools.count()
            patch.setattr(
                harness.hf_sampler.SeededSampling,
                "__call__",
                lambda *args: stuck() if next(steps) == 20 else honest(*args),
            )
        elif how == "save":  # of the state after step 2
            honest = harness.run.write_checkpoint
            patch.setattr(
                harness.run,
                "write_checkpoint",
                lambda *args: stuck() if "02" in args[0] else honest(*args),
            )
        else:
            at_step(patch, {3: stuck})
        small_run(out, **options)


@pytest.fixture
def disk(tmp_path):
    """A real, small file system: disk(options) mounts it, or mounts it again with others."""
    folder = tmp_path / "disk"
    folder.mkdir()

    def mount(options):
        how = (
            ["-o", f"remount,{options}"]
            if os.path.ismount(folder)
            else ["-o", options, "-t", "tmpfs", "tmpfs"]
        )
        if subprocess.run(["mount", *how, str(folder)], capture_output=True).returncode:
            pytest.skip("may not mount here")
        return folder

    yield mount
    subprocess.run(
        ["umount", "--lazy", str(folder)], capture_output=True
    )  # weights that were read may still be mapped


def at_step(monkeypatch, actions):
    """Has something happen in the middle of a step of the runs that follow: {step: function}."""
    honest = grpo.assign_advantages

    def assign(samples, step, cfg):
        actions.get(step, lambda: None)()
        return honest(samples, step, cfg)

    monkeypatch.setattr(grpo, "assign_advantages", assign)


DEFAULT_RUN = ["--max_steps", 6, "--eval_every", 6]


@pytest.fixture(scope="session")
def default_run(fork, tmp_path_factory):
    out = tmp_path_factory.mktemp("default") / "out"
    return fork("command_line", *DEFAULT_RUN, "--rollout", "hf", "--out_dir", out)[1](), out


PRIME = [
    "--num_prompts",
    3,
    "--num_generations",
    5,
    "--micro_batch_tokens",
    97,
    "--num_minibatches",
    2,
]


def two_rank_run(fork, out, rollout, *args, launch=False):
    """What the run leaves, in forks or as torchrun starts it."""
    args = [*PRIME, "--rollout", rollout, "--out_dir", out, *args]
    done = run(*args, nproc=2) if launch else fork("command_line", *args, ranks=2)[1]()
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr[-3000:]
    assert "2 rank(s); " in done.stdout and f"rollouts by {rollout} (asked for)" in done.stdout
    assert not any(
        str(out) in " ".join(p.info["cmdline"] or []) for p in psutil.process_iter(["cmdline"])
    )
    return state_of(out)


def resumed_on_two_ranks(fork, whole, rollout):
    """The run again from its first checkpoint: what it leaves."""
    out = whole.parent / "resumed"
    copy_cut_back(whole, out, 1)
    return two_rank_run(fork, out, rollout, "--resume")


def part(name, completion, prompt="", **row):
    return reward.BUILT_IN[name].function(completion, {"prompt_text": prompt} | row)


FUNCTIONS = """
from __future__ import annotations
import asyncio, os, signal, subprocess, sys, threading, time
from dataclasses import dataclass
import neighbour

@dataclass
class Parsed:
    text: str

def length(completion, row):
    return len(completion) + neighbour.ZERO

def seconds_left(completion, row):
    import resource, time
    return resource.getrlimit(resource.RLIMIT_CPU)[0] - time.process_time()

def needs_gold(completion, row):
    return float(completion == row["gold"])
needs_gold.columns = ("gold",)

def misbehave(completion, row):
    print("scoring", completion)
    if completion == "raise": raise KeyError("gold")
    if completion == "none": return None
    if completion == "nan": return float("nan")
    if completion == "inf": return -float("inf")
    if completion == "string": return "1.0"
    if completion == "list": return [1.0]
    if completion == "bool": return True
    if completion == "hang": time.sleep(10_000)
    if completion == "exit": os._exit(0)
    if completion == "sys.exit": sys.exit(1)
    if completion == "kill": os.kill(os.getpid(), signal.SIGKILL)
    if completion == "interrupt": raise KeyboardInterrupt
    if completion == "allocate": return len(bytearray(1 << 45))
    if completion == "fork": os.fork()
    if completion == "fork and hang" and os.fork() == 0: time.sleep(10_000)
    if completion == "stdin": return float(len(sys.stdin.read()))
    if completion == "grandchild" and os.fork() == 0: time.sleep(10_000)
    if completion == "grandchild": os._exit(3)
    if completion == "child": subprocess.Popen(["sleep", "9876"]); time.sleep(10_000)
    if completion == "modules": return sum(m in sys.modules for m in ("torch", "numpy", "grpo"))
    return 0.5

def trl(completions, answer, **kwargs):
    assert len(kwargs["prompts"]) == len(kwargs["prompt_text"]) == len(completions)
    return [float(c == a) for c, a in zip(completions, answer)]

def trl_keywords(prompts, *, completions, answer, level=3):
    return [len(completions) * (c == a) for c, a in zip(completions, answer)]

def trl_chat(completions, **kwargs):
    return [len(c[0]["content"]) if c[0]["role"] == "assistant" else 0 for c in completions]

def trl_misbehave(completions, **kwargs):
    for c in completions:
        if c == "raise": raise ValueError(c)
        if c == "hang": time.sleep(10_000)
        if c == "short": return []
    return [None if c == "none" else 1.0 for c in completions]

def trl_dict(completions, **kwargs): return dict.fromkeys(range(len(completions)), 1.0)
def trl_string(completions, **kwargs): return "1" * len(completions)

def trl_everything(prompts, completions, completion_ids, trainer_state, log_extra, log_metric, answer):
    log_extra("seen", answer)
    log_metric("batch", len(completions))
    assert prompts[0][0]["role"] == "user" and completions[0][0]["role"] == "assistant"
    return [len(ids) + trainer_state.global_step / trainer_state.max_steps for ids in completion_ids]

def trl_overlong(completion_ids, **kwargs): return [-len(ids) for ids in completion_ids]
def trl_only_keywords(**kwargs): return [float(c == a) for c, a in zip(kwargs["completions"], kwargs["answer"])]
async def trl_waits(completions, **kwargs):
    await asyncio.sleep(0.01)
    return [None if c == "none" else 2.0 for c in completions]
class Scaled:
    def __init__(self, scale): self.scale = scale
    def __call__(self, completions, answer, **kwargs):
        return [self.scale * (c == a) for c, a in zip(completions, answer)]
trl_object = Scaled(3)

def only_even(completion, row): return None if len(completion) % 2 else 4.0

def trl_hint(completions, hint, **kwargs): return [float(c == h) for c, h in zip(completions, hint)]

def trl_logs(completions, log_metric, log_extra, **kwargs):
    import enum, numpy, torch
    class Odd:
        def __str__(self): raise ValueError
    class Shown:
        def __str__(self): return "<object>"
    for name, value in dict(numpy=numpy.float32(2.5), torch=torch.tensor(3), bool=True).items(): log_metric(name, value)
    for name, value in dict(nan=float("nan"), list=[1], text="word", none=None).items(): log_metric(name, value)
    log_metric(3, 4)
    for name, value in dict(scalar=7, text="word", numpy=numpy.array([0.5, 1.5]), zero=torch.tensor(2.0)).items():
        log_extra(name, value)
    class Kind(enum.IntEnum): A = 1
    log_extra("kind", Kind.A)
    for name, value in dict(objects=[Shown(), None], odd=[Odd()] * 2, short=[1]).items(): log_extra(name, value)
    return [1.0] * len(completions)

def takes_answer(completion, answer): return float(completion == answer)
def without_wraps(function):
    def decorated(*args, **kwargs): return function(*args, **kwargs)
    return decorated
hidden = without_wraps(trl)
def one_argument(completion): return 1.0
async def waits(completion, row):
    await asyncio.sleep(0.01)
    return 1.0
constant = 3
from math import sqrt
"""


@pytest.fixture(scope="session")
def file(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rewards")
    (folder / "neighbour.py").write_text("ZERO = 0\n")
    (folder / "broken.py").write_text("1 / 0\n")
    (folder / "dies.py").write_text(
        f"import os\nif os.getpid() != {os.getpid()}: os._exit(7)\ndef length(completion, row): return 1.0\n"
    )
    (folder / "functions.py").write_text(FUNCTIONS)
    return str(folder / "functions.py")


@pytest.fixture
def scorer(file):
    scorers = []

    def make(*names, **options):
        spec = ",".join(name if name in reward.BUILT_IN else f"{file}:{name}" for name in names)
        scorers.append(Scorer(load_rewards(spec), **({"workers": 1, "timeout": 5} | options)))
        return scorers[-1]

    yield make
    for each in scorers:
        each.close()


def gone(processes, seconds=60):
    return not psutil.wait_procs(processes, timeout=seconds)[1]
