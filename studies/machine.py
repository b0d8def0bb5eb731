"""What does this machine do with a model: is it right, how fast, how much fits?

    python studies/machine.py                                      # bundled model: 2 minutes, CPU
    python studies/machine.py --points                             # for GPUs: 10 minutes
    python studies/machine.py --model Qwen/Qwen2.5-0.5B-Instruct   # at most 10 more on a GPU
    torchrun --nproc_per_node=8 studies/machine.py --random 1.5B   # random weights, Qwen2.5 shapes

The exit code is 1 if something is wrong. Checked are log-probabilities and gradients against the
plain policy in float32, with the loss divided by 1e4 and by 1e6 tokens (small gradients must not
vanish), also in bfloat16; the sampler before and after pushes; a resumed step. MFU counts the FLOP
that the mathematics of a dense model needs, 6 per weight and token, and causal attention, but no
recomputation. Points are statements about GPUs, taken from the sources of torch, transformers and
vLLM: each is tested here, and has an expected answer.
"""

import argparse
import contextlib
import dataclasses
import functools
import gc
import math
import os
import subprocess
import sys
import tempfile
import time

THREADS = os.environ.get("OMP_NUM_THREADS")  # before common sets it

import numpy as np
import torch
from common import HERE, arguments, fast_policy, plt, save
from torch.nn.attention import SDPBackend, sdpa_kernel

import grpo
import harness.attention
import harness.auto
import harness.checkpoints
import harness.engine
import harness.head
import harness.models
import harness.ranks
import harness.rows
import harness.run
import view
from grpo import Config, Sample
from harness.flags import first_line, say
from harness.ranks import World

# Dense bfloat16 TFLOP/s with float32 sums, from the makers' data sheets. Of several names that the
# device's name contains, the longest counts.
PEAKS = {
    "H100": 989, "H100 PCIe": 756, "H100 NVL": 835, "H200": 989, "H800": 989, "GH200": 989,
    "B200": 2250, "A100": 312, "A800": 312, "A10": 125, "A10G": 70, "A30": 165, "A40": 150,
    "RTX A6000": 155, "L4": 121, "L40": 181, "L40S": 362, "RTX 3090": 71, "RTX 4090": 165,
    "RTX 5090": 209, "MI300X": 1307,
}  # fmt: skip
OLD_CARDS = ("T4", "V100", "P100", "RTX 20")  # without fast bfloat16
# hidden, MLP, layers, heads; 2 key-value heads, tied embeddings of 151,936 tokens
QWEN = {"0.5B": (896, 4864, 24, 14), "1.5B": (1536, 8960, 28, 12), "3B": (2048, 11008, 36, 16)}
RIGHT, SPEED, MEMORY, LEFT_OUT, POINTS = [], [], [], [], []  # rows of the tables
SCRIPT = [os.path.join(os.path.dirname(HERE), "grpo.py")]
SMALL_RUN = (
    "--max_steps 2 --eval_data= --reward overlong --num_prompts 4 --max_completion_length 8 "
    "--learning_rate 1e-3"
).split()


def right(m, what: str, fine: bool, shown: str) -> None:
    """Adds a line to the first table: "yes" if every rank is right. The numbers are those of the
    first rank."""
    everywhere = all(m.world.gather([bool(fine)]))
    RIGHT.append([what, shown, "yes" if everywhere else "NO"])
    say("  ".join(RIGHT[-1]))


def same_gradient(m, what: str, gradient: list, true: list, dtype: str, scale=1.0) -> None:
    """Checks the cosine of two gradients, and shows their largest difference relative to the
    largest entry."""
    dot, square, true_square, largest_difference, largest = 0.0, 0.0, 0.0, 0.0, 1e-300
    for a, b in zip(gradient, true, strict=True):
        a, b = a.double() * scale, b.double()
        dot += (a * b).sum().item()
        square += (a * a).sum().item()
        true_square += (b * b).sum().item()
        largest_difference = max(largest_difference, (a - b).abs().max().item())
        largest = max(largest, b.abs().max().item())
    cosine = dot / max(1e-300, square * true_square) ** 0.5
    limit = 0.999 if dtype == "bfloat16" else 0.999999
    difference = f"largest difference {largest_difference / largest:.1g}"
    shown = f"cosine {cosine:.6f} (above {limit}), {difference}"
    right(m, f"{dtype}: {what}", cosine > limit, shown)


def random_model(size: str, device):
    from transformers import AutoModelForCausalLM, Qwen2Config

    hidden, mlp, layers, heads = QWEN[size]
    config = Qwen2Config(
        hidden_size=hidden,
        intermediate_size=mlp,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=2,
        vocab_size=151936,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config).eval()


def made_up(m, rows: int, G: int = 1) -> list[Sample]:
    """Samples of random tokens. A quarter of each row is the prompt, and G rows in a row share it.
    Every second sample has the advantage 1, the others -1."""
    rng, samples = np.random.default_rng(0), []
    n_prompt = m.length // 4
    for i in range(rows):
        ids = rng.integers(2, m.model.config.vocab_size, m.length).astype(np.int32)
        if i % G == 0:
            prompt = grpo.Prompt(ids[:n_prompt], "", {})
        completion = ids[n_prompt:]
        sample = Sample(i // G, prompt, completion, np.zeros(len(completion), np.float32), "stop")
        sample.advantages[:] = (-1.0) ** i
        samples.append(sample)
    return samples


def collate(m, samples: list[Sample]) -> dict:
    return grpo.collate(samples, m.world.device, m.policy.rows)


def forward(m, batch, cfg):
    with grpo.autocast(cfg, m.world.device):
        return m.policy(batch)[0]


def free(m) -> None:
    m.policy.zero_grad(set_to_none=m.world.size == 1)
    gc.collect()
    if m.cuda:
        torch.cuda.empty_cache()


# --------------------------------------------------------------------------------------------------
# Right?


def check_gradient(m) -> None:
    """Log-probabilities and gradients against those of the plain policy in float32, which takes a
    row for each text."""
    samples, cfg, device = made_up(m, 8, G=8), m.cfg, m.world.device
    batch = collate(m, samples)
    mask, advantages = batch["mask"], batch["advantages"]  # [N, T]
    head = set()
    if m.policy.plain_head:
        head = {id(p) for p in m.model.get_output_embeddings().parameters()}
    parameters = sorted(m.policy.parameters(), key=lambda p: id(p) in head)  # the head's at the end
    n_body = sum(id(p) not in head for p in parameters)
    slices = {"body": slice(n_body), "head": slice(n_body, None)}

    exact, _ = m.policy.plain(grpo.collate(samples, device))
    exact = exact[mask]  # [n]
    true = torch.autograd.grad(-(exact * advantages[mask]).sum(), parameters)

    tiles, default_dtype = harness.head.HEAD_TILE, torch.get_autocast_dtype("cpu")
    tile = tiles[device.type]
    tiles[device.type] = mask.sum().item() * m.model.config.vocab_size // 5  # a few for any model
    for dtype in dict.fromkeys((cfg.dtype, "bfloat16")):
        run_cfg = dataclasses.replace(cfg, dtype=dtype)
        for n_tokens in (1e4, 1e6):
            logps = forward(m, batch, run_cfg)
            loss, _ = grpo.grpo_loss(
                logps, logps.detach(), None, None, advantages, mask, run_cfg, n_tokens, len(logps)
            )
            # Backward runs outside of autocast and must not ask for its dtype: with this setting a
            # CPU would give CUDA's answer. And not autograd.grad: as in a run, the head then adds
            # its gradient in place.
            torch.set_autocast_dtype("cpu", torch.float16)
            loss.backward()
            torch.set_autocast_dtype("cpu", default_dtype)
            gradient = [p.grad for p in parameters]
            for name, part in slices.items():
                what = f"gradient of the {name}, {n_tokens:.0e} tokens a step"
                same_gradient(m, what, gradient[part], true[part], dtype, n_tokens)
            m.policy.zero_grad(set_to_none=True)
        gap = (logps[mask] - exact).detach().abs()
        limit = 0.1 if dtype == "bfloat16" else 1e-4
        shown = f"off by {gap.mean():.2g} on average (below {limit:g}), at most {gap.max():.2g}"
        right(m, f"{dtype}: log-probabilities of random tokens", gap.mean() < limit, shown)
    tiles[device.type] = tile


def check_micro_batches(m) -> None:
    samples, gradients = made_up(m, 16 * m.world.size), []
    for rows in (16, 3):
        cfg = dataclasses.replace(m.cfg, micro_batch_tokens=rows * m.length)
        grpo.backward(m.policy, m.ddp, samples, cfg, m.world)
        gradients.append([p.grad.clone() for p in m.policy.parameters()])
        free(m)
    what = "gradient in micro-batches of 16 rows and of 3"
    same_gradient(m, what, *gradients, m.cfg.dtype)


def check_resume(m) -> None:
    """A step that goes on from memory, and twice the same step from a checkpoint. All are the same
    to the bit, if the device's kernels are."""
    samples = made_up(m, 8)

    def step(policy, ddp, optimizer):
        grpo.update(policy, optimizer, samples, m.cfg, step=2, ddp=ddp, world=m.world)
        moments = [x for state in optimizer.state.values() for x in state.values()]
        return [x.detach().to("cpu", copy=True) for x in (*policy.parameters(), *moments)]

    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "step")
        state = dict(optimizer=m.optimizer.state_dict())
        harness.checkpoints.write_checkpoint(path, m.model.save_pretrained, state)
        from_memory = step(m.policy, m.ddp, m.optimizer)
        resumed = []
        for _ in range(2):
            model = grpo.load_model(path, m.cfg).to(m.world.device)
            policy = fast_policy(model, m.cfg.temperature)
            ddp, optimizer = grpo.wrap(policy, m.cfg, m.world), grpo.make_optimizer(policy, m.cfg)
            checkpoint = harness.checkpoints.load_checkpoint(path)
            optimizer.load_state_dict(checkpoint.state.pop("optimizer"))
            resumed.append(step(policy, ddp, optimizer))
            del model, policy, ddp, optimizer
            free(m)
    wrong = count_differences(from_memory, resumed[1])
    noise = count_differences(resumed[0], resumed[1])
    shown = f"{wrong} numbers differ"
    if noise:
        shown += f"; two runs of one step differ in {noise}: the kernels, not the resume"
    right(m, "a resumed step, to the bit", wrong <= 2 * noise, shown)


def count_differences(tensors: list, others: list) -> int:
    return sum((a != b).sum().item() for a, b in zip(tensors, others, strict=True))


# --------------------------------------------------------------------------------------------------
# How fast, how much?


def model_flop(m, samples, passes: int) -> float:
    """FLOP of `passes` forward passes; an update counts as three."""
    config, head = m.model.config.get_text_config(), m.model.get_output_embeddings()
    weights = 0
    for module in m.model.base_model.modules():
        if isinstance(module, torch.nn.Linear):
            weights += module.weight.numel()
    flop = 2 * weights * sum(s.n_tokens for s in samples)
    heads = config.num_attention_heads
    head_size = getattr(config, "head_dim", None) or config.hidden_size // heads
    squares = sum(s.n_tokens**2 for s in samples)
    flop += 2 * config.num_hidden_layers * heads * head_size * squares  # attention
    if head is not None:
        flop += 2 * head.weight.numel() * sum(len(s.completion_ids) for s in samples)
    return passes * flop


class Clock(harness.run.Clock):
    """Also keeps each phase's peak of memory: torch's on a GPU, else the process's (Linux)."""

    def __init__(self, device):
        super().__init__(device)
        self.peaks = {}

    @contextlib.contextmanager
    def __call__(self, phase: str):
        self.peak()
        with super().__call__(phase):
            yield
        self.peaks[phase] = self.peak()

    def peak(self) -> float:
        """The most bytes in use since the last call; 0 if the system does not tell."""
        if self.device.type == "cuda":
            peak = torch.cuda.max_memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            return float(peak)
        try:
            with open("/proc/self/status") as file:
                [line] = [line for line in file if line.startswith("VmHWM")]
            with open("/proc/self/clear_refs", "w") as file:
                file.write("5")
        except OSError:
            return 0.0
        return 1024.0 * int(line.split()[1])


def pass_seconds(m, what: str, samples, cfg, clock) -> float:
    """Seconds of one pass on the slowest rank."""
    with clock("pass"):
        if what == "forward":
            grpo.compute_logps(m.policy, samples, "ref_logps", cfg, m.world)
        else:
            grpo.backward(m.policy, m.ddp, samples, cfg, m.world)
    return max(m.world.gather([clock.take()["time_pass"]]))


def timed(m, what: str, samples, size: int, rounds: int) -> bool:
    """Adds a line to the speed table: the best of the rounds after a warm-up. Returns whether the
    micro-batch fits."""
    tile = harness.head.HEAD_TILE[m.world.device.type]
    cfg = dataclasses.replace(m.cfg, micro_batch_tokens=size)
    clock = Clock(m.world.device)
    line = [what, size, f"2**{tile.bit_length() - 1}"]
    free(m)
    clock.peak()
    try:
        times = [pass_seconds(m, what, samples, cfg, clock) for _ in range(1 + rounds)]
        fits = True
    except Exception as error:  # out of memory, or no compiler
        expected = "compiled" in what or isinstance(error, torch.OutOfMemoryError)
        if m.world.size > 1 or not expected:
            raise
        fits = False
        line += [first_line(error)[:60], "", "", float("nan")]
    if fits:
        seconds = min(times[1:])
        passes = 1 if what == "forward" else 3
        rate = model_flop(m, samples, passes) / m.world.size / seconds  # FLOP/s of a device
        tokens = round(sum(s.n_tokens for s in samples) / seconds)
        mfu = f"{rate / m.peak:.1%}" if m.peak else "?"
        line += [tokens, f"{rate / 1e12:.3g}", mfu, (clock.peaks["pass"] - m.base) / 1e9]
    SPEED.append(line)
    for s in samples:
        s.ref_logps = None
    free(m)
    say("  ".join(map(str, line)))
    return fits


def speed(m, quick: bool) -> None:
    kind, one_rank = m.world.device.type, World(0, 1, m.world.device)
    if m.cuda:
        sizes, rounds, powers = [2048, 8192, 16384, 32768], 3, range(24, 29)
    elif quick:
        sizes, rounds, powers = [1024, 4096], 1, (24, 26)
    else:
        sizes, rounds, powers = [2048, 8192], 2, (24, 26)
    samples = made_up(m, sizes[-1] * m.world.size // m.length)

    def sweep(what):
        """The largest size that fits."""
        return max((size for size in sizes if timed(m, what, samples, size, rounds)), default=0)

    sweep("forward")
    largest = sweep("update")
    tiles = harness.head.HEAD_TILE
    tile = tiles[kind]
    several_tiles = m.cuda or m.model.config.vocab_size * sizes[-1] > 2**24
    for power in powers:
        if several_tiles and 2**power != tile:
            tiles[kind] = 2**power
            timed(m, "update", samples, sizes[-2], rounds)
    tiles[kind] = tile
    m.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=dict(use_reentrant=False))
    sweep("update, checkpointed")
    m.model.gradient_checkpointing_disable()
    if quick and not m.cuda:
        LEFT_OUT.append("compiled layers: a minute of compiling (without --quick)")
    else:
        grpo.wrap(m.policy, dataclasses.replace(m.cfg, compile=True), one_rank)
        sweep("update, compiled layers")
        for module in m.policy.modules():
            module._compiled_call_impl = None
    if m.cuda and m.world.size == 1 and largest == sizes[-1]:
        while largest < 2**21:
            samples = made_up(m, 2 * largest // m.length)
            if not timed(m, "update", samples, 2 * largest, 1):
                break
            largest *= 2
        MEMORY.append(["the largest power of two that fits as a micro-batch", "", largest])


def bytes_kept(m, rows: int) -> int:
    """The bytes that a forward pass keeps for its backward pass, without the parameters."""
    parameters = {p.untyped_storage().data_ptr() for p in m.policy.parameters()}
    sizes = {}  # of each storage

    def note(x):
        storage = x.untyped_storage()
        if storage.data_ptr() not in parameters:
            sizes[storage.data_ptr()] = storage.nbytes()
        return x

    batch = collate(m, made_up(m, rows))
    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        logps = forward(m, batch, m.cfg)  # while the graph lives, no address is used twice
    total = sum(sizes.values())
    del logps
    return total


def memory(m) -> None:
    """Compares arithmetic with measurements: what is kept for backward is counted tensor by tensor;
    peaks are the device's, or the process's on a CPU."""
    config, n = m.model.config.get_text_config(), m.model.num_parameters()
    head, low = m.model.get_output_embeddings(), m.cfg.dtype == "bfloat16"
    four, eight = bytes_kept(m, 4), bytes_kept(m, 8)  # rows
    per_token = (eight - four) / (4 * m.length)
    copies = 2 * four - eight  # does not grow with the rows
    state = sum(p.nbytes for p in m.model.parameters())
    for moments in m.optimizer.state.values():
        state += sum(x.nbytes for x in moments.values())
    per_unit = per_token / config.hidden_size / config.num_hidden_layers
    rows = [
        ["weights and Adam's moments, bytes a parameter (a gradient: 4 more)", 12, state / n],
        ["copies of the weights for autocast, bytes a parameter", 2 if low else 0, copies / n],
        ["kept for backward, bytes per token, hidden unit and layer", 75 if low else "", per_unit],
    ]
    MEMORY[:0] = rows
    for what, size, tile, rate, _, _, peak in SPEED:
        if what == "update" and not isinstance(rate, str) and head is not None:
            logits = min(2 ** int(tile[3:]), 3 * size // 4 * head.weight.shape[0])
            total = state + 4 * n + copies + per_token * size
            total += 10 * logits + 6 * head.weight.numel()
            MEMORY.append([f"update, micro-batch {size}, tile {tile}: peak, GB", total / 1e9, peak])


# --------------------------------------------------------------------------------------------------
# The sampler, and the phases of a step


class Phases:
    """The phases of a step, with their seconds, and the gap to the sampler after each rollout."""

    def __init__(self, m, sampler, prompts, cfg):
        self.m, self.sampler, self.prompts, self.cfg = m, sampler, prompts, cfg
        self.clock = Clock(m.world.device)
        self.seconds = {}

    def timed(self, name, function, *args, **options):
        with self.clock(name):
            result = function(*args, **options)
        self.seconds[name] = self.clock.take()[f"time_{name}"]
        return result

    def push(self, name="push"):
        self.timed(name, self.sampler.push, self.m.model)

    def sleep(self):
        self.timed("sleep", self.sampler.sleep)

    def rollout(self, when: str, push_is_missing=False) -> list[Sample]:
        """The samples of all ranks. Their gap must be small, or large if a push is missing."""
        m, cfg, n = self.m, self.cfg, len(self.prompts)
        seeds = [harness.ranks.seed_of(7, m.world.rank, i) for i in range(n)]
        limits = [cfg.max_completion_length] * n
        generate = self.sampler.generate
        groups = self.timed("rollout", generate, self.prompts, 8, seeds, cfg.temperature, limits)
        samples = []
        for number, (ids, group) in enumerate(zip(self.prompts, groups, strict=True)):
            prompt = grpo.Prompt(ids, "", {})
            for i, c in enumerate(group):
                sample = Sample(64 * m.world.rank + number, prompt, c.ids, c.logps, c.finish_reason)
                sample.advantages[:] = (-1.0) ** i
                samples.append(sample)
        samples = m.world.gather(samples)
        self.timed("logps", grpo.compute_logps, m.policy, samples, "old_logps", cfg, m.world)

        gaps = np.concatenate([s.old_logps - s.sampler_logps for s in samples])
        gap = np.mean(np.abs(gaps))
        low = cfg.dtype == "bfloat16"
        if push_is_missing:
            limit = 0.1 if low else 1e-3
            fine, side = gap > limit, "above"
        else:
            limit = 0.03 if low else 1e-3
            fine, side = gap < limit, "below"
        right(m, f"gap to the sampler, {when}", fine, f"{gap:.2g} ({side} {limit})")
        for s in samples:
            s.old_logps = None
        return samples

    def update(self, samples):
        m = self.m
        self.timed(
            "update",
            grpo.update,
            m.policy,
            m.optimizer,
            samples,
            self.cfg,
            ddp=m.ddp,
            world=m.world,
        )


def sampler_and_phases(m, tokenizer) -> dict:
    """Checks the gap to the sampler before and after pushes; returns the seconds of each phase."""
    kind, why = m.kind, m.why
    sleeps = m.cuda and kind == "vllm"
    length, n_prompts = 24, 16
    if m.cuda:
        length = 64
    if sleeps:
        length, n_prompts = 512, 64
    # a bold learning rate: after an update, a missing push must show
    cfg = dataclasses.replace(m.cfg, max_completion_length=length, learning_rate=1e-2)
    if tokenizer:
        eos, pad = harness.models.special_ids(m.model, tokenizer, cfg)
        prompts = []
        for a in range(100, 100 + n_prompts):
            prompts.append(np.array(tokenizer(f"{a}+{7 * a % 900}=")["input_ids"], np.int32))
    else:
        eos, pad = [m.model.config.vocab_size - 1], 0
        prompts = [s.prompt.ids for s in made_up(m, n_prompts)]
    free_before = torch.cuda.mem_get_info()[0] if m.cuda else 0
    longest_prompt = max(len(ids) for ids in prompts)
    sampler = grpo.make_sampler(kind, m.model, eos, pad, longest_prompt, cfg, m.world)
    phases = Phases(m, sampler, prompts, cfg)

    phases.push()
    phases.rollout("after the first push")
    samples = phases.rollout("again")
    tokens = sum(len(s.completion_ids) for s in samples)
    what = f"rollout by {kind}, {len(samples)} samples of {tokens / len(samples):.3g} tokens"
    rate = round(tokens / phases.seconds["rollout"])
    SPEED.append([what, "", "", rate, "", "", float("nan")])
    phases.update(samples)
    if kind == "vllm":
        phases.rollout("a push left out", push_is_missing=True)
    else:
        what = "a push left out, sleep and wake"
        LEFT_OUT.append(f"{what}: rollouts are by hf, on the policy's own weights ({why})")
    phases.push()
    samples = phases.rollout("after an update and a push")
    if sleeps:
        phases.sleep()
        free(m)
        held = (free_before - torch.cuda.mem_get_info()[0]) / 1e9
        right(m, "memory that the sleeping engine keeps", held < 2, f"{held:.2g} GB (below 2)")
        phases.update(samples)
        phases.push("wake and push")
        phases.rollout("after sleep, update, wake and push")
    sampler.close()
    return phases.seconds


# --------------------------------------------------------------------------------------------------
# The GPUs that people have: is what the sources say of them true on this one?


def point(number: int, statement: str, missing: str, test, *args) -> None:
    """Adds a line to the table of points. test(*args) -> is it as expected, the result.
    missing: why the test cannot run here, or ""."""
    if missing:
        result, answer = missing, "cannot be asked here"
    else:
        try:
            fine, result = test(*args)
        except Exception as error:
            fine, result = False, first_line(error)
        answer = "ok" if fine else "NOT AS EXPECTED"
    POINTS.append([number, statement, result, answer])
    say("  ".join(map(str, POINTS[-1])))


def unless(available: bool, missing: str) -> str:
    return "" if available else missing


def check_points(device) -> None:
    """The numbers are those of the list in gpu.md that the points come from."""
    cuda = torch.cuda
    gpu = unless(device.type == "cuda", "needs a GPU")
    kind, why = "hf", ""
    if not gpu:
        kind, why = harness.engine.choose_sampler(Config(), device, False)
    vllm = gpu or unless("cannot be imported" not in why, "needs vllm")
    engine = gpu or unless(kind == "vllm", why)
    two = gpu or unless(cuda.device_count() > 1, "needs two GPUs")
    nccl = two or unless(torch.distributed.is_nccl_available(), "needs NCCL")
    has_driver = os.path.exists("/proc/driver/nvidia/version")
    driver = gpu or unless(has_driver, "needs NVIDIA's driver")
    low = gpu or unless(harness.auto.fast_bfloat16(device), "needs bfloat16")

    what = "bfloat16 from compute capability 8.0 on, where it is not emulated"
    point(1, what, gpu, bfloat16, device)
    point(1, "vLLM from 7.5 on, below that --rollout auto is hf", vllm, engine_for_card, device)
    point(2, "float32: an engine without TF32, its gap below 1e-4", engine, engine_run, "", 1e-4)
    what = "grouped heads: never the kernel of quadratic memory, in packed rows and padded ones"
    point(3, f"float32, {what}", gpu, no_math_kernel, device, "float32")
    point(3, f"bfloat16, {what}", low, no_math_kernel, device, "bfloat16")
    what = "the micro-batch chosen for Qwen2.5 0.5B fits, with Adam's moments and a reference"
    point(4, what, gpu, chosen_fits, device)
    point(5, "SIGTERM with two ranks: the last whole step is saved", two, stopped_run)
    point(6, "a set-up error of NCCL is reported with its cause", nccl, nccl_error)
    point(7, "CUDA that torch cannot use: one line, no silent run on the CPU", driver, hidden_card)
    point(8, "the bundled task: float32, and no engine", "", bundled, device)
    what = "packed rows: one additive mask a pass, in autocast's dtype, width a multiple of 8"
    point(9, what, gpu, masks, device)
    what = "attention without masks, by the flash kernel for texts of many lengths: its gradient"
    point(9, what, low, without_masks, device)
    point(10, "torch makes what it makes by itself on this rank's card", gpu, current, device)
    what = "an engine sleeps, wakes and has what is no parameter:"
    point(10, f"{what} a router's buffer (GLM 4 MoE)", engine, engine_run, "Glm4Moe", 1e-3)
    point(10, f"{what} ALiBi's slopes (BLOOM)", engine, engine_run, "Bloom", 1e-3)


def trainer(*flags, nproc=1, stop=False, **env) -> tuple:
    """Runs grpo.py in a process of its own, or under torchrun; returns its exit code, its output
    and its metrics. stop: by SIGTERM, in its third step."""
    with tempfile.TemporaryDirectory() as folder:
        out = os.path.join(folder, "out")
        metrics = os.path.join(out, "metrics.jsonl")

        def read_metrics():
            return view.read_jsonl(metrics) if os.path.exists(metrics) else []

        command = [sys.executable]
        if nproc > 1:
            command += ["-m", "torch.distributed.run", f"--nproc_per_node={nproc}"]
        command += [*SCRIPT, "--device", "cuda", "--out_dir", out, *SMALL_RUN, *flags]
        with open(os.path.join(folder, "printed"), "w+") as printed:
            process = subprocess.Popen(
                command,
                env=os.environ | env,
                cwd=os.path.dirname(HERE),
                stdout=printed,
                stderr=subprocess.STDOUT,
            )
            if stop:
                while process.poll() is None and len(read_metrics()) < 2:
                    time.sleep(0.2)
                process.terminate()
            code = process.wait(600)
            printed.seek(0)
            return code, printed.read().strip(), read_metrics()


def last_line(printed: str) -> str:
    """The line that says why a run ended; without one, the end of the output."""
    for line in printed.splitlines():
        if ": stopped:" in line or ": error:" in line:
            return line[-300:]
    return printed[-300:]


# Each function below tests a point: it returns whether the card is as expected, and its result.


def bfloat16(device) -> tuple:
    capability = torch.cuda.get_device_capability(device)
    fast = harness.auto.fast_bfloat16(device)
    assert (torch.ones(2, device=device) * 2).sum() == 4, "torch has no kernels for this card"
    name, version = torch.cuda.get_device_name(device), ".".join(map(str, capability))
    return fast == (capability >= (8, 0)), f"{name}, {version}: {'bfloat16' if fast else 'float32'}"


def engine_for_card(device) -> tuple:
    kind, why = harness.engine.choose_sampler(Config(), device, False)
    expected = torch.cuda.get_device_capability(device) >= (7, 5)
    return (kind == "vllm") == expected, f"{kind} ({why})"


def engine_run(kind: str, limit: float) -> tuple:
    """Two steps of the bundled task in float32: the second one samples after a sleep, an update and
    a push. kind: random weights of another architecture."""
    flags = ["--rollout", "vllm", "--dtype", "float32", "--max_sampler_gap", "1"]
    with tempfile.TemporaryDirectory() as folder:
        if kind:
            random_weights(kind, folder)
            flags += ["--model", folder, "--train_data", grpo.BUNDLED["train_data"]]
        started = time.monotonic()
        # grpo.py switches this off; a user may have switched it on
        _, printed, metrics = trainer(*flags, VLLM_ENABLE_V1_MULTIPROCESSING="1")
        seconds = time.monotonic() - started
    gaps = [m["sampler_gap"] for m in metrics if "sampler_gap" in m]
    if len(gaps) < 2:
        return False, last_line(printed)
    shown = f"gaps {gaps[0]:.2g} and {gaps[1]:.2g} (below {limit:g}), {seconds:.0f} s in all"
    return max(gaps) < limit and "vLLM starts" in printed, shown


def random_weights(kind: str, folder: str) -> None:
    """Saves a small model of one architecture with random weights."""
    import transformers

    sizes = dict(
        vocab_size=18,
        hidden_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        eos_token_id=1,
        pad_token_id=0,
        initializer_range=0.1,
    )
    if kind == "Glm4Moe":
        sizes.update(
            num_key_value_heads=2,
            head_dim=32,
            intermediate_size=128,
            moe_intermediate_size=64,
            n_routed_experts=8,
            num_experts_per_tok=2,
            first_k_dense_replace=1,
            max_position_embeddings=256,
            n_group=1,
            topk_group=1,
        )
    else:
        sizes.update(hidden_dropout=0.0)
    config = getattr(transformers, f"{kind}Config")(**sizes)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    for name, buffer in model.named_buffers():
        if "e_score_correction_bias" in name:
            buffer.normal_()
    model.save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(grpo.BUNDLED["model"]).save_pretrained(folder)


def policy_on(model, length: int, device) -> argparse.Namespace:
    """One rank with a policy, as far as made_up() and forward() need it."""
    world, policy = World(0, 1, device), fast_policy(model, 1.0)
    return argparse.Namespace(model=model, length=length, world=world, policy=policy)


def grouped_heads(device) -> argparse.Namespace:
    """A small policy with grouped heads, and samples for it."""
    from transformers import AutoModelForCausalLM, Qwen2Config

    config = Qwen2Config(
        hidden_size=256,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=512,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).to(device).eval()
    m = policy_on(model, 100, device)
    m.samples = made_up(m, 8, G=4)
    return m


def no_math_kernel(device, dtype: str) -> tuple:
    m = grouped_heads(device)
    allowed = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
    for packs in (True, False):
        m.policy.packs = packs
        with sdpa_kernel(allowed):  # torch raises an error if neither fits
            forward(m, collate(m, m.samples), Config(dtype=dtype)).sum().backward()
    return True, "flash and the memory-efficient one are enough"


def masks(device) -> tuple:
    m = grouped_heads(device)
    m.policy.attention = "masks"
    cfg = Config(dtype="bfloat16" if harness.auto.fast_bfloat16(device) else "float32")
    calls = []
    blocks = harness.attention.PackedRow.blocks

    def noting_blocks(row):
        calls.append(blocks.func(row))
        return calls[-1]

    noting = functools.cached_property(noting_blocks)
    noting.__set_name__(harness.attention.PackedRow, "blocks")
    harness.attention.PackedRow.blocks = noting
    try:
        forward(m, collate(m, m.samples), cfg)
    finally:
        harness.attention.PackedRow.blocks = blocks
    made = [block["mask"] for blocks in calls for block in blocks if block["mask"] is not None]
    kinds = {(str(mask.dtype), mask.shape[-1]) for mask in made}
    fine = len(calls) == 1 and len(kinds) > 0
    for dtype, width in kinds:
        fine = fine and dtype == f"torch.{cfg.dtype}" and width % 8 == 0
    return fine, f"built {len(calls)} time(s) for two layers: {sorted(kinds)}"


def without_masks(device) -> tuple:
    """The error of a gradient in bfloat16, without masks and with them."""
    m = grouped_heads(device)
    batch = collate(m, m.samples)
    parameters = list(m.policy.parameters())
    gradients = []  # [P]
    for way, dtype in (("masks", "float32"), ("masks", "bfloat16"), ("merged", "bfloat16")):
        m.policy.attention = way
        logps = forward(m, batch, Config(dtype=dtype))
        parts = torch.autograd.grad(logps.square().sum(), parameters)
        gradients.append(torch.cat([part.flatten() for part in parts]))
    exact, with_masks, merged = gradients
    error = ((merged - exact).norm() / exact.norm()).item()
    of_masks = ((with_masks - exact).norm() / exact.norm()).item()
    return error < 1.5 * of_masks, f"relative error {error:.2g}; with masks {of_masks:.2g}"


def chosen_fits(device) -> tuple:
    model = random_model("0.5B", device)
    cfg = harness.auto.resolve_auto(Config(max_sampler_gap=1e9), model, device)
    m = policy_on(model, 512, device)
    n, head = model.num_parameters(), model.get_input_embeddings().weight.numel()
    reference_bytes = 2 * (n + head) if cfg.dtype == "bfloat16" else 4 * n
    reference = torch.empty(reference_bytes, dtype=torch.uint8, device=device)
    optimizer = grpo.make_optimizer(m.policy, cfg)
    samples = made_up(m, 2 * cfg.micro_batch_tokens // m.length, G=8)
    torch.cuda.reset_peak_memory_stats()
    for step in (1, 2):  # the second one has Adam's moments from the start
        grpo.update(m.policy, optimizer, samples, cfg, step=step, world=m.world)
    peak = torch.cuda.max_memory_allocated()
    room = 0.95 * torch.cuda.get_device_properties(device).total_memory - 2e9
    del m, model, optimizer, reference
    gc.collect()
    torch.cuda.empty_cache()
    how = f"{cfg.micro_batch_tokens} tokens"
    if cfg.gradient_checkpointing:
        how += ", recomputed"
    return peak < room, f"{how}: {peak / 1e9:.3g} GB at the peak (below {room / 1e9:.3g})"


def stopped_run() -> tuple:
    started = time.monotonic()
    _, printed, _ = trainer("--max_steps", "100000", "--save_every", "0", nproc=2, stop=True)
    saved = [line for line in printed.splitlines() if "is saved; go on with --resume" in line]
    shown = saved[0] if saved else last_line(printed)
    return bool(saved), f"{shown} ({time.monotonic() - started:.0f} s in all)"


def nccl_error() -> tuple:
    _, printed, _ = trainer(nproc=2, NCCL_SOCKET_IFNAME="nowhere0")
    line = last_line(printed)
    return ": stopped:" in line and "NCCL" in line and "interface" in line, line


def hidden_card() -> tuple:
    code, printed, _ = trainer("--device", "auto", CUDA_VISIBLE_DEVICES="")
    return code == 2 and "or say --device cpu" in printed, last_line(printed)


def bundled(device) -> tuple:
    cfg = Config(**grpo.BUNDLED)
    model = grpo.load_model(cfg.model, cfg).to(device)
    dtype = harness.auto.resolve_auto(cfg, model, device).dtype
    kind, why = harness.engine.choose_sampler(cfg, device, harness.auto.is_small(model))
    return (dtype, kind) == ("float32", "hf"), f"{dtype}, {kind} ({why})"


def current(device) -> tuple:
    number = torch.cuda.current_device()
    return number == device.index, f"cuda:{number} for {device}"


# --------------------------------------------------------------------------------------------------
# The whole


def draw(seconds: dict, title: str):
    figure, (left, middle, last) = plt.subplots(1, 3, figsize=(12, 3.8), layout="constrained")
    usual_tile = SPEED[0][2]
    for what in ("forward", "update", "update, compiled layers", "update, checkpointed"):
        sizes, rates, peaks = [], [], []
        for name, size, tile, rate, _, _, peak in SPEED:
            if name == what and tile == usual_tile and not isinstance(rate, str):
                sizes.append(str(size))
                rates.append(rate)
                peaks.append(peak)
        left.plot(sizes, rates, "o-", label=what)
        middle.plot(sizes, peaks, "o-", label=what)
    left.set(title="speed", ylabel="tokens a second", xlabel="--micro_batch_tokens", ylim=0)
    middle.set(title="peak memory", ylabel="GB", xlabel="--micro_batch_tokens", ylim=0)
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=4)
    last.barh([*seconds], [*seconds.values()])
    last.set(title="phases of a step", xlabel="seconds")
    last.invert_yaxis()
    figure.suptitle(title)
    return figure


def device_peak(name: str, given: float) -> float:
    """FLOP/s of the device's data sheet, or as given by the user; 0 if unknown."""
    if given:
        return 1e12 * given
    names = [card for card in PEAKS if card in name]
    if names:
        return 1e12 * PEAKS[max(names, key=len)]
    old = ": it has no fast bfloat16" if any(card in name for card in OLD_CARDS) else ""
    LEFT_OUT.append(f"MFU: '{name}' is not in the table{old} (--peak_tflops)")
    return 0.0


def set_up(args, device, folder: str) -> argparse.Namespace:
    """The model with its config, and everything that an update of it needs."""
    m = argparse.Namespace(cuda=device.type == "cuda")
    cfg = Config(model=args.model, dtype=args.dtype, beta=0.0, tis_cap=0.0, max_sampler_gap=1e9)
    if args.random:  # the engine reads only config.json there: the first push brings the weights
        cfg = dataclasses.replace(cfg, model=folder)
        m.model = random_model(args.random, device)
        m.model.config.save_pretrained(folder)
    else:
        m.model = grpo.load_model(cfg.model, cfg).to(device)
    if device.type == "cpu" and not harness.auto.is_small(m.model) and not THREADS:
        torch.set_num_threads(len(os.sched_getaffinity(0)))
    m.cfg = harness.auto.resolve_auto(cfg, m.model, device)
    m.kind, m.why = harness.engine.choose_sampler(m.cfg, device, False)
    m.world = harness.ranks.join_world(device)

    size = m.model.num_parameters()
    name = torch.cuda.get_device_name(device) if m.cuda else device.type
    m.title = (
        f"{args.random or os.path.basename(args.model)}, {size / 1e6:.3g} M parameters, "
        f"{m.cfg.dtype}, {m.world.size} x {name}, torch {torch.__version__}"
    )
    say(m.title)
    m.peak = device_peak(name, args.peak_tflops)
    positions = getattr(m.model.config.get_text_config(), "max_position_embeddings", None) or 512
    m.length = min(positions, 512 if m.cuda else 256)

    m.policy = fast_policy(m.model, m.cfg.temperature)
    m.base = 0  # bytes of the process that Python and its libraries hold
    if not m.cuda:
        clock = Clock(device)
        clock.peak()
        m.base = clock.peak() - 4 * size
    m.ddp = grpo.wrap(m.policy, m.cfg, m.world)
    m.optimizer = grpo.make_optimizer(m.policy, m.cfg)
    return m


def check_all(m, args) -> dict:
    """Fills the tables; returns the seconds of each phase."""
    check_gradient(m)
    check_micro_batches(m)
    samples = made_up(m, 8 * m.world.size)
    grpo.update(m.policy, m.optimizer, samples, m.cfg, ddp=m.ddp, world=m.world)
    if m.world.size == 1:
        check_resume(m)
    else:
        LEFT_OUT.append("a resumed step: with one process only")
        weights = set(m.world.gather([harness.checkpoints.fingerprint(m.model)]))
        what = "all ranks have the same weights after an update"
        right(m, what, len(weights) == 1, f"{len(weights)}")
    speed(m, args.quick)
    memory(m)
    free(m)
    tokenizer = None if args.random else harness.rows.load_tokenizer(m.cfg)
    return sampler_and_phases(m, tokenizer)


def publish(m, args, seconds: dict) -> None:
    rates = []
    for *cells, peak in SPEED:
        rates.append([*cells, "" if math.isnan(peak) else peak])
    total = sum(seconds.values())
    shares = [[phase, value, f"{value / total:.0%}"] for phase, value in seconds.items()]
    save(
        args,
        "machine",
        draw(seconds, m.title),
        [m.title, *([f"left out: {line}"] for line in LEFT_OUT)],
        ["right? | found | holds", *RIGHT],
        ["pass | micro-batch | head tile | tokens/s | TFLOP/s a device | MFU | peak GB", *rates],
        ["memory | arithmetic | measured", *MEMORY],
        ["phase | seconds | share", *shares],
        ["point | expected | found here | answer", *POINTS],
    )


def add_options(parser) -> None:
    add = parser.add_argument
    add("--model", default=grpo.BUNDLED["model"], help="a directory or a hub name")
    add("--random", default="", choices=["", *QWEN], help="random weights of this size instead")
    add("--dtype", default="auto")
    add("--device", default="auto")
    add("--peak_tflops", type=float, default=0.0, help="of the device, dense, in the run's dtype")
    add("--points", action="store_true", help="only the points, which are expectations of a GPU")


def main() -> int:
    args = arguments(__doc__, add_options)
    args.jobs = int(os.environ.get("WORLD_SIZE", 1))
    device = harness.ranks.pick_device(args.device)
    if "RANK" in os.environ:
        LEFT_OUT.append("what was expected of a GPU, point by point: without torchrun")
    else:
        check_points(device)
    wrong = any(row[-1] == "NOT AS EXPECTED" for row in POINTS)
    if args.points:
        return int(wrong)

    harness.head.HEAD_TILE.setdefault(device.type, 2**24)
    with tempfile.TemporaryDirectory() as folder:
        m = set_up(args, device, folder)
        seconds = check_all(m, args)
    if m.world.rank == 0:
        publish(m, args, seconds)
    del m.ddp  # before its process group
    harness.ranks.leave_world(m.world)
    return int(wrong or any(row[-1] == "NO" for row in RIGHT))


if __name__ == "__main__":
    sys.exit(main())
