"""Helpers and fixtures of the tests: tiny models, made-up samples, runs of seconds, a server that
forks ranks, reward files. A test file gets the fixtures by pytest_plugins = "tests.common"."""

import contextlib
import ctypes
import dataclasses
import gc
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

# for processes that a test starts: on tiny matrices threads only wait for each other
os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import psutil
import pytest
import torch

import grpo
import harness.check
import harness.checkpoints
import harness.directory
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

torch.set_num_threads(1)  # the variable is too late if a test file imported torch before
HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
CPU = World(0, 1, torch.device("cpu"))
REDUCTIONS = ("token", "sequence", "constant")
F64 = torch.float64
BUNDLED = Config(**grpo.BUNDLED)


def tiny_model(kind="qwen2", dtype=torch.float32, seed=0, **options):
    """A model with random weights, large enough that its distributions are not uniform."""
    import transformers

    ids = dict(eos_token_id=1, pad_token_id=0, bos_token_id=None, initializer_range=0.1)
    if dtype == F64:  # other models compute RMSNorm in float32, which is not exact to 1e-12
        sizes = dict(vocab_size=32, n_embd=32, n_layer=2, n_head=2, n_positions=128)
        dropout = dict(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
        config = transformers.GPT2Config(**sizes, **dropout, **ids)
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
        if kind == "mixtral":  # vLLM pads experts of other sizes, and then cannot reload them
            sizes.update(num_local_experts=4, intermediate_size=64)
        elif kind != "qwen2":
            sizes.update(head_dim=32)
        name = "Gemma3Text" if kind == "gemma3" else kind.capitalize()
        config_class = getattr(transformers, f"{name}Config")
        config = config_class(**(sizes | ids | options))
    torch.manual_seed(seed)
    return transformers.AutoModelForCausalLM.from_config(config).to(dtype).eval()


def ids_of(values):
    return np.array(values, dtype=np.int32)


def random_samples(n, group_size, dtype=np.float32, seed=0, longest=12):
    """n samples in groups, with many lengths and made-up log-probabilities and advantages."""
    rng = np.random.default_rng(seed)
    samples = []
    for i in range(n):
        if i % group_size == 0:
            prompt = Prompt(ids_of(rng.integers(2, 32, rng.integers(1, 9))), "", {})
        ids = ids_of(rng.integers(2, 32, rng.integers(1, longest + 1)))
        logps = rng.normal(-2, 1, len(ids)).astype(dtype)
        sample = Sample(i // group_size, prompt, ids, logps, "stop")
        sample.advantages = np.full(len(ids), float(rng.normal()))
        sample.ref_logps = rng.normal(-2, 0.5, len(ids)).astype(dtype)
        samples.append(sample)
    return samples


class Recorder:
    """Takes the optimiser's place and keeps the gradient that update() computed."""

    def __init__(self, policy):
        self.policy = policy
        self.param_groups = [{"lr": 0.0}]
        self.grads = []

    def step(self):
        pass

    def zero_grad(self, set_to_none):
        learns = [p for p in self.policy.parameters() if p.requires_grad]
        if all(p.grad is None for p in learns):
            return  # before the first backward
        self.grads.append(torch.cat([p.grad.flatten().to(F64) for p in learns]))
        for p in learns:
            p.grad = None


def fast_policy(model, temperature: float):
    """The policy of make_policy(), without comparing it with the plain one."""
    harness.check.choose_attention(model)
    return FastPolicy(grpo.Policy(model, temperature))


def update_gradient(
    cfg, samples, dtype=torch.float32, ddp=None, policy=None, world=CPU, packs=True
):
    """The parameter gradient [P] and the metrics of one optimiser step of update()."""
    if policy is None:
        policy = fast_policy(tiny_model(dtype=dtype), cfg.temperature)
    policy.packs = packs and isinstance(policy, FastPolicy)
    # the samples' log-probabilities are made up
    cfg = dataclasses.replace(cfg, max_sampler_gap=1e9)
    if not cfg.micro_batch_tokens:
        cfg = dataclasses.replace(cfg, micro_batch_tokens=2048)
    recorder = Recorder(policy)
    metrics = grpo.update(policy, recorder, samples, cfg, ddp=ddp or policy, world=world)
    return recorder.grads[0], metrics


def relative(a, b):
    return ((a - b).norm() / b.norm()).item()


def run(*args, nproc=0, launch=(), env=None, timeout=900, cwd=HERE):
    """grpo.py as a user starts it, or another script or module; with nproc, under torchrun."""
    command = [sys.executable]
    if nproc:
        command += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={nproc}"]
        command += launch
    args = [str(arg) for arg in args]
    if not args or (args[0] not in ("-c", "-m") and not args[0].endswith(".py")):
        command.append(os.path.join(HERE, "grpo.py"))
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": HERE} | (env or {})
    return subprocess.run(
        command + args,
        capture_output=True,
        text=True,
        timeout=timeout,
        env=environment,
        cwd=cwd,
    )


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """One process runs all tests of the default suite that fork, because it has the server. The
    other tests are shared out by file."""
    for item in items:
        forks = "fork" in item.fixturenames and not item.get_closest_marker("slow")
        item.add_marker(pytest.mark.xdist_group("forks" if forks else item.path.name))


def forking_server():
    """Makes calls in forks of a process that has imported everything. A line of its input is a
    call: [name, args, options, ranks, file for the output]. Each rank is a fork. The server answers
    with their pids and, when all have ended, with their exit codes."""
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr):
        small_run(f"{folder}/out", max_steps=1)
    for line in sys.stdin:
        name, args, options, ranks, output = json.loads(line)
        if name.endswith("vllm_worker") or "vllm" in args:  # once, for this fork and later ones
            harness.engine.choose_sampler(Config(rollout="vllm"), CPU.device, False)
            from vllm import LLM  # noqa: F401
            from vllm.v1.worker import cpu_worker  # noqa: F401
        rendezvous = dict(MASTER_ADDR="127.0.0.1", MASTER_PORT=free_port(), WORLD_SIZE=str(ranks))
        pids = []
        for rank in range(ranks or 1):
            pid = os.fork()
            if pid == 0:
                if ranks:
                    os.environ.update(rendezvous, RANK=str(rank), LOCAL_RANK=str(rank))
                forked_call(named(name), args, options, output)
            pids.append(pid)
        print(json.dumps(pids), flush=True)
        codes = exit_codes(pids)
        print(json.dumps([codes[pid] for pid in pids]), flush=True)


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


def exit_codes(pids):
    """{pid: exit code}. A process that fails ends the others, as under torchrun: by SIGTERM, and
    30 s later by SIGKILL."""
    codes, deadline = {}, math.inf
    while len(codes) < len(pids):
        one_failed = deadline < math.inf
        pid, status = os.waitpid(-1, os.WNOHANG if one_failed else 0)
        if pid:
            codes[pid] = os.waitstatus_to_exitcode(status)
        else:
            time.sleep(0.1)
        if pid and codes[pid] and not one_failed:
            deadline = time.monotonic() + 30
            end(set(pids) - set(codes), signal.SIGTERM)
        if time.monotonic() > deadline:
            end(set(pids) - set(codes), signal.SIGKILL)
    return codes


def named(name):
    """The function `name` of this file, or `module.name` of another one."""
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
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def leave_world():
    """The end of a function that every rank of a fork runs. Its DDP must be out of reach before the
    process group goes: freed later, it can hang in gloo."""
    torch.distributed.barrier()
    gc.collect()
    torch.distributed.destroy_process_group()


def command_line(*args):
    sys.argv = ["grpo.py", *args]
    sys.exit(grpo.main())


@pytest.fixture(scope="session")
def fork(tmp_path_factory):
    """fork(name, *args, ranks=0, **options) -> pids, wait. wait() returns, when all have ended, an
    object with returncode (the worst), stdout and stderr."""
    command = [sys.executable, "-c", "from tests import common\ncommon.forking_server()"]
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    folder, number = tmp_path_factory.mktemp("forks"), itertools.count()
    with subprocess.Popen(command, **pipes, text=True, cwd=HERE) as server:

        def start(name, *args, ranks=0, **options):
            output = str(folder / str(next(number)))
            call = [name, [str(arg) for arg in args], options, ranks, output]
            server.stdin.write(json.dumps(call) + "\n")
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
        five = lines(os.path.join(HERE, "sample_data", "train.jsonl"))[:5]
        with open(rows, "w") as file:  # so that an epoch ends in the middle of the second step
            file.writelines(json.dumps(row) + "\n" for row in five)
    small = dict(
        reward="overlong",
        rollout="hf",
        train_data=rows,
        eval_data="",
        num_prompts=3,
        num_generations=5,
        max_completion_length=8,
        max_steps=4,
        save_every=1,
        keep=0,
        num_minibatches=2,
        out_dir=str(out),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(harness.log, "draw", lambda *_: None)  # would take longer than the run
        return grpo.train(Config(**(grpo.BUNDLED | small | options)), command_line)


def logps_of(policy, samples, packs=None):
    """packs: True for one row, False for padded rows; None: as the policy does."""
    before = policy.packs
    if packs is not None:
        policy.packs = packs
    try:
        return policy(grpo.collate(samples, CPU.device, policy.rows))
    finally:
        policy.packs = before


MODELS = [
    ("qwen2", {}),
    ("qwen2", dict(tie_word_embeddings=True)),
    ("qwen3", {}),
    ("llama", {}),
    ("gemma", {}),
    # caps the logits after the head, and the scores in attention, which sdpa does not
    ("gemma2", dict(attn_logit_softcapping=1.0)),
    ("gemma3", dict(sliding_window=4)),
    ("mistral", dict(sliding_window=4)),
    ("mixtral", {}),
    ("qwen2", dict(vocab_size=64)),
]


def in_bfloat16(policy, samples, packs=None):
    with torch.autocast("cpu", torch.bfloat16):
        return logps_of(policy, samples, packs)


def texts(completions):
    return [c.ids.tolist() for c in completions]


def sampler_of(model, eos=(1,), **options):
    cfg = Config(max_completion_length=options.pop("max_completion_length", 10), **options)
    return grpo.HFSampler(model, list(eos), 0, cfg)


@pytest.fixture
def graphs(monkeypatch):
    """The list of the graphs that torch.compile makes of layers. They run as they are."""
    import torch._dynamo

    made = []

    def backend(graph, _):
        made.append(graph)
        return graph.forward

    compile_ = torch.nn.Module.compile

    def compile_with_backend(self, **options):
        compile_(self, backend=backend, **options)

    monkeypatch.setattr(torch.nn.Module, "compile", compile_with_backend)
    with torch._dynamo.config.patch(disable=False):
        torch._dynamo.reset()  # else those of an earlier test count as these layers' own
        yield made


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
    "{% for m in messages %}{% if m.role == 'system' %}={{ m.content }}="
    "{% else %}{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}+{% if enable_thinking %}++{% endif %}{% endif %}"
)


REWARDS = read(os.path.join(HERE, "tests", "odd_rewards.py"))


def state_of(out):
    """Metrics without timings, completions, and the bytes of the newest weights: a resumed run must
    share them with an undisturbed one."""
    timing = ("time_", "step_time", "tokens_per_s")
    metrics = []
    for line in lines(out / "metrics.jsonl"):
        metrics.append({k: v for k, v in line.items() if not k.startswith(timing)})
    newest = harness.checkpoints.checkpoints(str(out))[-1]
    with open(os.path.join(newest, "model.safetensors"), "rb") as file:
        return metrics, lines(out / "completions.jsonl"), file.read()


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "whole"
    small_run(out)
    assert any(m["grad_norm"] > 0 for m in lines(out / "metrics.jsonl"))
    return out


@pytest.fixture
def again(undisturbed):
    """again(out, **options): the undisturbed run once more, in another directory."""
    rows = str(undisturbed.parent / "rows.jsonl")
    return lambda out, **options: small_run(out, train_data=rows, **options)


def names_in(out):
    """The names of the checkpoints of a run, oldest first."""
    return [os.path.basename(path) for path in harness.directory.checkpoints(str(out))]


def config_of(out):
    with open(os.path.join(out, "config.json")) as file:
        return json.load(file)


def copy_cut_back(run, out, saved):
    """A copy of a run that kept all checkpoints, without those after the first `saved` ones."""
    shutil.copytree(run, out)
    for path in harness.checkpoints.checkpoints(str(out))[saved:]:
        shutil.rmtree(path)


def wait_for(condition, seconds=600):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def stuck_run(out, how, marker, **options):
    """A run that stops for an hour in its third step, in the place that `how` names. It writes the
    file `marker` when it gets there."""

    def stuck(*_):
        open(marker, "w").close()
        if how == "one call":  # C++ such as a backward pass, in which Python gets no signal
            signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
            ctypes.CDLL(None).sleep(3600)
        time.sleep(3600)

    sampling = harness.hf_sampler.SeededSampling
    draw_token, write_checkpoint = sampling.__call__, harness.run.write_checkpoint
    tokens = itertools.count()

    def stuck_at_token_20(*args):
        if next(tokens) == 20:
            stuck()
        return draw_token(*args)

    def stuck_at_step_2(path, *args):
        if "02" in path:
            stuck()
        return write_checkpoint(path, *args)

    with pytest.MonkeyPatch.context() as patch:
        if how == "rollout":
            patch.setattr(sampling, "__call__", stuck_at_token_20)
        elif how == "save":
            patch.setattr(harness.run, "write_checkpoint", stuck_at_step_2)
        else:
            at_step(patch, {3: stuck})
        small_run(out, **options)


@pytest.fixture
def disk(tmp_path):
    """A real, small file system. disk(options) mounts it, or mounts it again with other options."""
    folder = tmp_path / "disk"
    folder.mkdir()

    def mount(options):
        command = ["mount", "-o", options, "-t", "tmpfs", "tmpfs", str(folder)]
        if os.path.ismount(folder):
            command = ["mount", "-o", f"remount,{options}", str(folder)]
        if subprocess.run(command, capture_output=True).returncode:
            pytest.skip("may not mount here")
        return folder

    yield mount
    # lazy, because weights that were read may still be mapped
    subprocess.run(["umount", "--lazy", str(folder)], capture_output=True)


def at_step(monkeypatch, actions):
    """actions {step: function}: later runs call the function in the middle of that step."""
    honest = grpo.assign_advantages

    def assign(samples, step, cfg):
        if step in actions:
            actions[step]()
        return honest(samples, step, cfg)

    monkeypatch.setattr(grpo, "assign_advantages", assign)


PRIME = ["--num_prompts", 3, "--num_generations", 5]
PRIME += ["--micro_batch_tokens", 97, "--num_minibatches", 2]


def two_rank_run(fork, out, rollout, *args, launch=False):
    """Runs on two ranks, in forks or by torchrun (launch); returns state_of(out)."""
    args = [*PRIME, "--rollout", rollout, "--out_dir", out, *args]
    done = run(*args, nproc=2) if launch else fork("command_line", *args, ranks=2)[1]()
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr[-3000:]
    assert "2 rank(s); " in done.stdout and f"rollouts by {rollout} (asked for)" in done.stdout
    for process in psutil.process_iter(["cmdline"]):
        assert str(out) not in " ".join(process.info["cmdline"] or []), "a process is left"
    return state_of(out)


def resumed_on_two_ranks(fork, whole, rollout):
    """Runs again from the first checkpoint of `whole`; returns state_of() it."""
    out = whole.parent / "resumed"
    copy_cut_back(whole, out, 1)
    return two_rank_run(fork, out, rollout, "--resume")


def part(name, completion, prompt="", **row):
    return reward.BUILT_IN[name].function(completion, {"prompt_text": prompt} | row)


@pytest.fixture(scope="session")
def file(tmp_path_factory):
    """A file of reward functions, tests/reward_functions.py, beside other files that it needs."""
    folder = tmp_path_factory.mktemp("rewards")
    (folder / "neighbour.py").write_text("ZERO = 0\n")
    (folder / "broken.py").write_text("1 / 0\n")
    dies = f"if os.getpid() != {os.getpid()}: os._exit(7)"  # in a worker, not in this process
    (folder / "dies.py").write_text(f"import os\n{dies}\ndef length(completion, row): return 1.0\n")
    source = os.path.join(HERE, "tests", "reward_functions.py")
    return str(shutil.copy(source, folder / "functions.py"))


@pytest.fixture
def scorer(file):
    """scorer(*names, **options) -> a Scorer of built-in rewards and functions of `file`."""
    scorers = []

    def make(*names, **options):
        specs = [name if name in reward.BUILT_IN else f"{file}:{name}" for name in names]
        rewards = load_rewards(",".join(specs))
        scorers.append(Scorer(rewards, **({"workers": 1, "timeout": 5} | options)))
        return scorers[-1]

    yield make
    for made in scorers:
        made.close()


def gone(processes, seconds=60):
    return not psutil.wait_procs(processes, timeout=seconds)[1]
