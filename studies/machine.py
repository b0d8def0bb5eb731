"""What this machine does with a model: is it right, how fast, how much fits. Exit code 1 if something is wrong.

    python studies/machine.py                                          # the bundled model: two minutes on a CPU
    python studies/machine.py --points                                 # what was expected of a GPU: ten minutes, first
    python studies/machine.py --model Qwen/Qwen2.5-0.5B-Instruct       # ten minutes more on a GPU, at most
    torchrun --nproc_per_node=8 studies/machine.py --random 1.5B       # random weights in the shapes of Qwen2.5

Right: log-probabilities and gradient against float32 without chunks, the loss divided by 1e4 and by 1e6 tokens (small
gradients must not vanish), also in bfloat16; the sampler around pushes; a resumed step. MFU counts what the mathematics
of a dense model needs: 6 FLOP per weight and token, and causal attention; not what is computed twice. Points: what the
sources of torch, transformers and vLLM say of the cards that people have, each asked here, with its expected answer.
"""

import argparse
import contextlib
import dataclasses
import gc
import os
import subprocess
import sys
import tempfile
import time

THREADS = os.environ.get("OMP_NUM_THREADS")  # common sets it

import numpy as np
import torch
from common import HERE, fast_policy, plt, save
from torch.nn.attention import SDPBackend, sdpa_kernel

import grpo
import harness.auto
import harness.checkpoints
import harness.engine
import harness.head
import harness.models
import harness.packing
import harness.ranks
import harness.rows
import harness.run
import view
from grpo import Config, Sample
from harness.flags import first_line, say
from harness.ranks import World

# Dense bfloat16 TFLOP/s with float32 sums, by the makers' data sheets; the longest name within the device's counts
PEAKS = {
    "H100": 989,
    "H100 PCIe": 756,
    "H100 NVL": 835,
    "H200": 989,
    "H800": 989,
    "GH200": 989,
    "B200": 2250,
}
PEAKS |= {
    "A100": 312,
    "A800": 312,
    "A10": 125,
    "A10G": 70,
    "A30": 165,
    "A40": 150,
    "RTX A6000": 155,
}
PEAKS |= {
    "L4": 121,
    "L40": 181,
    "L40S": 362,
    "RTX 3090": 71,
    "RTX 4090": 165,
    "RTX 5090": 209,
    "MI300X": 1307,
}
# hidden, MLP, layers, heads; 2 key-value heads, tied embeddings of 151,936 tokens
QWEN = {"0.5B": (896, 4864, 24, 14), "1.5B": (1536, 8960, 28, 12), "3B": (2048, 11008, 36, 16)}
RIGHT, SPEED, MEMORY, LEFT_OUT, POINTS = [], [], [], [], []
SCRIPT = [os.path.join(os.path.dirname(HERE), "grpo.py")]
FEW = (
    "--max_steps 2 --eval_data= --reward overlong --num_prompts 4 --max_completion_length 8".split()
)
FEW += ["--learning_rate", "1e-3"]


def right(m, what: str, fine: bool, shown: str) -> None:
    """A line of the first table: right if it is on every rank; the numbers are those of the first."""
    RIGHT.append([what, shown, "yes" if all(m.world.gather([bool(fine)])) else "NO"])
    say("  ".join(RIGHT[-1]))


def alike(m, what: str, found: list, true: list, dtype: str, scale=1.0) -> None:
    """Of two gradients the cosine, and the largest difference in units of the largest entry."""
    dot, a2, b2, worst, most = 0.0, 0.0, 0.0, 0.0, 1e-300
    for a, b in zip(found, true, strict=True):
        a, b = a.double() * scale, b.double()
        dot, a2, b2 = (
            dot + (a * b).sum().item(),
            a2 + (a * a).sum().item(),
            b2 + (b * b).sum().item(),
        )
        worst, most = max(worst, (a - b).abs().max().item()), max(most, b.abs().max().item())
    cosine, limit = dot / max(1e-300, a2 * b2) ** 0.5, 0.999 if dtype == "bfloat16" else 0.999999
    shown = f"cosine {cosine:.6f} (above {limit}), largest difference {worst / most:.1g}"
    right(m, f"{dtype}: {what}", cosine > limit, shown)


def random_model(size: str, device):
    from transformers import AutoModelForCausalLM, Qwen2Config

    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    sizes = dict(zip(names, QWEN[size], strict=True)) | dict(
        vocab_size=151936, num_key_value_heads=2
    )
    torch.manual_seed(0)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(
            Qwen2Config(**sizes, tie_word_embeddings=True)
        ).eval()


def made_up(m, rows: int, G: int = 1) -> list[Sample]:
    """Random tokens, a quarter of each row the prompt, G in a row have the same; every second sample was a good one."""
    rng, samples = np.random.default_rng(0), []
    for i in range(rows):
        ids = rng.integers(2, m.model.config.vocab_size, m.length).astype(np.int32)
        prompt = samples[-1].prompt if i % G else grpo.Prompt(ids[: m.length // 4], "", {})
        rest = ids[m.length // 4 :]
        samples.append(
            Sample(
                i // G,
                prompt,
                rest,
                np.zeros(len(rest), np.float32),
                "stop",
                advantages=np.full(len(rest), (-1.0) ** i),
            )
        )
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


# ----------------------------------------------------------------------------------------------------------------
# Right?


def check_gradient(m) -> None:
    """Against the model's own logits in float32, a row for each text."""
    samples, cfg, kind = made_up(m, 8, G=8), m.cfg, m.world.device.type
    batch = collate(m, samples)
    head = (
        {id(p) for p in m.model.get_output_embeddings().parameters()} if m.policy.plain_head else {}
    )
    parameters = sorted(m.policy.parameters(), key=lambda p: id(p) in head)  # the head's at the end
    n, mask, default = (
        sum(id(p) not in head for p in parameters),
        batch["mask"],
        torch.get_autocast_dtype("cpu"),
    )
    exact = m.policy.plain(grpo.collate(samples, m.world.device))[0][mask]  # [n]
    advantages = batch["advantages"][mask]  # [n]
    true = torch.autograd.grad(-(exact * advantages).sum(), parameters)
    whole, harness.head.HEAD_TILE[kind] = (
        harness.head.HEAD_TILE[kind],
        mask.sum().item() * m.model.config.vocab_size // 5,
    )  # some tiles for any vocabulary
    for dtype in dict.fromkeys((cfg.dtype, "bfloat16")):
        run, limit = dataclasses.replace(cfg, dtype=dtype), 0.1 if dtype == "bfloat16" else 1e-4
        for n_tokens in (1e4, 1e6):
            logps = forward(m, batch, run)
            given = (
                logps,
                logps.detach(),
                None,
                None,
                batch["advantages"],
                mask,
                run,
                n_tokens,
                len(logps),
            )
            # backward must not ask for autocast's dtype outside of it: here a CPU would give CUDA's answer
            torch.set_autocast_dtype("cpu", torch.float16)
            grpo.grpo_loss(*given)[
                0
            ].backward()  # and not autograd.grad: the head then adds in place, as in a run
            torch.set_autocast_dtype("cpu", default)
            found = [p.grad for p in parameters]
            for part, chosen in (("body", slice(n)), ("head", slice(n, None))):
                what = f"gradient of the {part}, {n_tokens:.0e} tokens a step"
                alike(m, what, found[chosen], true[chosen], dtype, n_tokens)
            m.policy.zero_grad(set_to_none=True)
        gap = (logps[mask] - exact).detach().abs()
        shown = f"off by {gap.mean():.2g} on average (below {limit:g}), at most {gap.max():.2g}"
        right(m, f"{dtype}: log-probabilities of random tokens", gap.mean() < limit, shown)
    harness.head.HEAD_TILE[kind] = whole


def check_micro_batches(m) -> None:
    samples, found = made_up(m, 16 * m.world.size), []
    for rows in (16, 3):
        cfg = dataclasses.replace(m.cfg, micro_batch_tokens=rows * m.length)
        grpo.backward(m.policy, m.ddp, samples, {}, cfg, m.world)
        found.append([p.grad.clone() for p in m.policy.parameters()])
        free(m)
    alike(m, "gradient in micro-batches of 16 rows and of 3", *found, m.cfg.dtype)


def check_resume(m) -> None:
    """Goes on from memory, and twice from a checkpoint: the same to the bit, if the device's kernels are."""
    samples = made_up(m, 8)

    def step(policy, ddp, optimizer):
        grpo.update(policy, optimizer, samples, m.cfg, step=2, ddp=ddp, world=m.world)
        moments = [x for state in optimizer.state.values() for x in state.values()]
        return [x.detach().to("cpu", copy=True) for x in (*policy.parameters(), *moments)]

    with tempfile.TemporaryDirectory() as folder:
        path, state = os.path.join(folder, "step"), dict(optimizer=m.optimizer.state_dict())
        harness.checkpoints.write_checkpoint(path, m.model.save_pretrained, state)
        runs = [step(m.policy, m.ddp, m.optimizer)]
        for _ in range(2):
            policy = fast_policy(grpo.load_model(path, m.cfg).to(m.world.device), m.cfg.temperature)
            ddp, optimizer = grpo.wrap(policy, m.cfg, m.world), grpo.make_optimizer(policy, m.cfg)
            optimizer.load_state_dict(
                harness.checkpoints.load_checkpoint(path).state.pop("optimizer")
            )
            runs.append(step(policy, ddp, optimizer))
            del policy, ddp, optimizer
            free(m)
    off, noise = (
        sum((a != b).sum().item() for a, b in zip(run, runs[2], strict=True)) for run in runs[:2]
    )
    why = f"; two runs of one step differ in {noise}: the kernels, not the resume" if noise else ""
    right(m, "a resumed step, to the bit", off <= 2 * noise, f"{off} numbers differ{why}")


# ----------------------------------------------------------------------------------------------------------------
# How fast, how much?


def model_flop(m, samples, passes: int) -> float:
    """Of `passes` forwards; an update is three."""
    config, head = m.model.config.get_text_config(), m.model.get_output_embeddings()
    body = sum(
        x.weight.numel() for x in m.model.base_model.modules() if isinstance(x, torch.nn.Linear)
    )
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    attention = (
        2
        * config.num_hidden_layers
        * config.num_attention_heads
        * width
        * sum(s.n_tokens**2 for s in samples)
    )
    last = (
        0 if head is None else 2 * head.weight.numel() * sum(len(s.completion_ids) for s in samples)
    )
    return passes * (2 * body * sum(s.n_tokens for s in samples) + last + attention)


class Clock(harness.run.Clock):
    """And the peak of memory of each phase: of torch on a GPU, of the process elsewhere (Linux)."""

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
        """The most bytes in use since the last call."""
        if self.device.type == "cuda":
            most = torch.cuda.max_memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            return float(most)
        with (
            contextlib.suppress(OSError),
            open("/proc/self/status") as status,
            open("/proc/self/clear_refs", "w") as reset,
        ):
            most = next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))
            reset.write("5")
            return 1024.0 * most
        return 0.0


def timed(m, what: str, samples, size: int, rounds: int) -> bool:
    """A line of the speed table, the least of the rounds after one that warms up; whether it fitted."""
    chunk = harness.head.HEAD_TILE[m.world.device.type]
    cfg, clock, times = (
        dataclasses.replace(m.cfg, micro_batch_tokens=size),
        Clock(m.world.device),
        [],
    )
    line = [what, size, f"2**{chunk.bit_length() - 1}"]
    free(m)
    clock.peak()
    try:
        for _ in range(1 + rounds):
            with clock("pass"):
                if what == "forward":
                    grpo.compute_logps(m.policy, samples, "ref_logps", cfg, m.world)
                else:
                    grpo.backward(m.policy, m.ddp, samples, {}, cfg, m.world)
            times.append(max(m.world.gather([clock.take()["time_pass"]])))
        seconds, flop = (
            min(times[1:]),
            model_flop(m, samples, 1 if what == "forward" else 3) / m.world.size,
        )
        mfu = f"{flop / seconds / m.peak:.1%}" if m.peak else "?"
        rate = round(sum(s.n_tokens for s in samples) / seconds)
        SPEED.append(
            [*line, rate, f"{flop / seconds / 1e12:.3g}", mfu, (clock.peaks["pass"] - m.base) / 1e9]
        )
    except Exception as error:  # out of memory, or no compiler
        if m.world.size > 1 or not (
            "compiled" in what or isinstance(error, torch.OutOfMemoryError)
        ):
            raise
        SPEED.append([*line, first_line(error)[:60], "", "", float("nan")])
    for s in samples:
        s.ref_logps = None
    free(m)
    say("  ".join(map(str, SPEED[-1])))
    return not isinstance(SPEED[-1][3], str)


def speed(m, quick: bool) -> None:
    kind, alone = m.world.device.type, World(0, 1, m.world.device)
    sizes = [2048, 8192, 16384, 32768] if m.cuda else [1024, 4096] if quick else [2048, 8192]
    samples, rounds = (
        made_up(m, sizes[-1] * m.world.size // m.length),
        3 if m.cuda else 1 if quick else 2,
    )
    chunk = harness.head.HEAD_TILE[kind]

    def sweep(what):
        return max((size for size in sizes if timed(m, what, samples, size, rounds)), default=0)

    sweep("forward")
    fits = sweep("update")
    for power in range(24, 29) if m.cuda else (24, 26):
        if 2**power != chunk and (m.cuda or m.model.config.vocab_size * sizes[-1] > 2**24):
            harness.head.HEAD_TILE[kind] = 2**power
            timed(m, "update", samples, sizes[-2], rounds)
    harness.head.HEAD_TILE[kind] = chunk
    m.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=dict(use_reentrant=False))
    sweep("update, checkpointed")
    m.model.gradient_checkpointing_disable()
    if quick and not m.cuda:
        LEFT_OUT.append("compiled layers: a minute of compiling (without --quick)")
    else:
        grpo.wrap(m.policy, dataclasses.replace(m.cfg, compile=True), alone)
        sweep("update, compiled layers")
        for module in m.policy.modules():
            module._compiled_call_impl = None
    if m.cuda and m.world.size == 1 and fits == sizes[-1]:
        while fits < 2**21 and timed(m, "update", made_up(m, 2 * fits // m.length), 2 * fits, 1):
            fits *= 2
        MEMORY.append(["the largest power of two that fits as a micro-batch", "", fits])


def kept(m, rows: int) -> int:
    """Bytes that a forward keeps for its backward, parameters not counted."""
    sizes, own = {}, {p.untyped_storage().data_ptr() for p in m.policy.parameters()}

    def note(x):
        sizes[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    batch = collate(m, made_up(m, rows))
    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        logps = forward(m, batch, m.cfg)  # while it lives, no address is used twice
    return sum(size for pointer, size in sizes.items() if pointer not in own) + 0 * len(logps)


def memory(m) -> None:
    """What is kept for backward is counted, tensor by tensor; peaks are the device's, or the process's on a CPU."""
    config, n, low = (
        m.model.config.get_text_config(),
        m.model.num_parameters(),
        m.cfg.dtype == "bfloat16",
    )
    few, more, head = kept(m, 4), kept(m, 8), m.model.get_output_embeddings()
    slope, copies = (more - few) / (4 * m.length), 2 * few - more
    state = sum(x.nbytes for s in m.optimizer.state.values() for x in s.values())
    state += sum(p.nbytes for p in m.model.parameters())
    per_unit = slope / config.hidden_size / config.num_hidden_layers
    MEMORY.insert(
        0, ["weights and Adam's moments, bytes a parameter (a gradient: 4 more)", 12, state / n]
    )
    MEMORY.insert(
        1, ["copies of the weights for autocast, bytes a parameter", 2 if low else 0, copies / n]
    )
    MEMORY.insert(
        2,
        ["kept for backward, bytes per token, hidden unit and layer", 75 if low else "", per_unit],
    )
    for what, size, chunk, rate, _, _, peak in SPEED:
        if what == "update" and not isinstance(rate, str) and head is not None:
            logits = min(2 ** int(chunk[3:]), 3 * size // 4 * head.weight.shape[0])
            total = state + 4 * n + copies + slope * size + 10 * logits + 6 * head.weight.numel()
            MEMORY.append(
                [f"update, micro-batch {size}, tile {chunk}: peak, GB", total / 1e9, peak]
            )


# ----------------------------------------------------------------------------------------------------------------
# The sampler, and the phases of a step


def sampler_and_phases(m, tokenizer) -> dict:
    """Gaps to the sampler around pushes; seconds of each phase of a step."""
    kind, why = harness.engine.choose_sampler(m.cfg, m.world.device, False)
    sleeps, low = m.cuda and kind == "vllm", m.cfg.dtype == "bfloat16"
    cfg = dataclasses.replace(
        m.cfg, max_completion_length=512 if sleeps else 64 if m.cuda else 24, learning_rate=1e-2
    )
    eos, pad, prompts = [m.model.config.vocab_size - 1], 0, [s.prompt.ids for s in made_up(m, 64)]
    if tokenizer:
        eos, pad = harness.models.special_ids(m.model, tokenizer, cfg)
        prompts = [
            np.array(tokenizer(f"{a}+{7 * a % 900}=")["input_ids"], np.int32)
            for a in range(100, 164)
        ]
    prompts = prompts[: 64 if sleeps else 16]
    room, clock, seconds = torch.cuda.mem_get_info()[0] if m.cuda else 0, Clock(m.world.device), {}
    sampler = grpo.make_sampler(kind, m.model, eos, pad, max(map(len, prompts)), cfg, m.world)

    def phase(name, work):
        with clock(name):
            result = work()
        seconds[name] = clock.take()[f"time_{name}"]
        return result

    def push(name="push"):
        phase(name, lambda: sampler.push(m.model))

    def rollout(name, seen=False):
        seeds, first = (
            [harness.ranks.seed_of(7, m.world.rank, i) for i in range(len(prompts))],
            64 * m.world.rank,
        )
        groups = phase("rollout", lambda: sampler.generate(prompts, 8, seeds, cfg.temperature))
        samples = [
            Sample(
                first + p,
                grpo.Prompt(prompts[p], "", {}),
                c.ids,
                c.logps,
                c.finish_reason,
                advantage=(-1.0) ** i,
            )
            for p, group in enumerate(groups)
            for i, c in enumerate(group)
        ]
        samples = m.world.gather(samples)
        phase("logps", lambda: grpo.compute_logps(m.policy, samples, "old_logps", cfg, m.world))
        gap = np.mean(np.abs(np.concatenate([s.old_logps - s.sampler_logps for s in samples])))
        limit = (0.1 if low else 1e-3) if seen else 0.03 if low else 1e-3
        shown = f"{gap:.2g} ({'above' if seen else 'below'} {limit})"
        right(m, f"gap to the sampler, {name}", gap > limit if seen else gap < limit, shown)
        for s in samples:
            s.old_logps = None
        return samples

    def update(samples):
        phase(
            "update",
            lambda: grpo.update(m.policy, m.optimizer, samples, cfg, ddp=m.ddp, world=m.world),
        )

    push()
    rollout("after the first push")
    samples = rollout("again")
    tokens = sum(len(s.completion_ids) for s in samples)
    what = f"rollout by {kind}, {len(samples)} samples of {tokens / len(samples):.3g} tokens"
    SPEED.append([what, "", "", round(tokens / seconds["rollout"]), "", "", float("nan")])
    update(samples)  # a bold one, so that a push that is left out must show
    if kind == "vllm":
        rollout("a push left out", seen=True)
    else:
        LEFT_OUT.append(
            f"a push left out, sleep and wake: rollouts are by hf, on the policy's own weights ({why})"
        )
    push()
    samples = rollout("after an update and a push")
    if sleeps:
        phase("sleep", sampler.sleep)
        free(m)
        held = (room - torch.cuda.mem_get_info()[0]) / 1e9
        right(m, "memory that the sleeping engine keeps", held < 2, f"{held:.2g} GB (below 2)")
        update(samples)
        push("wake and push")
        rollout("after sleep, update, wake and push")
    sampler.close()
    return seconds


# ----------------------------------------------------------------------------------------------------------------
# The cards that people have: what the sources say of them, asked here


def point(number: int, asked: str, missing: str, ask, *given) -> None:
    """A line of the table of points. ask(*given) -> whether it is as expected, what was found."""
    try:
        fine, found = (None, missing) if missing else ask(*given)
    except Exception as error:
        fine, found = False, first_line(error)
    answer = "cannot be asked here" if fine is None else "ok" if fine else "NOT AS EXPECTED"
    POINTS.append([number, asked, found, answer])
    say("  ".join(map(str, POINTS[-1])))


def check_points(device) -> None:
    """By the numbers of the list that they come from; its third part, what nobody knows, is the rest of this file."""
    gpu = "" if device.type == "cuda" else "needs a GPU"
    kind, why = ("hf", "") if gpu else harness.engine.choose_sampler(Config(), device, False)
    vllm = gpu or ("needs vllm" if "cannot be imported" in why else "")
    engine = gpu or ("" if kind == "vllm" else why)
    two = gpu or ("" if torch.cuda.device_count() > 1 else "needs two GPUs")
    nccl = two or ("" if torch.distributed.is_nccl_available() else "needs NCCL")
    driver = gpu or (
        "" if os.path.exists("/proc/driver/nvidia/version") else "needs NVIDIA's driver"
    )
    point(
        1,
        "bfloat16 from compute capability 8.0 on, where it is not emulated",
        gpu,
        bfloat16,
        device,
    )
    point(1, "vLLM from 7.5 on, below that --rollout auto is hf", vllm, engine_for_card, device)
    point(2, "float32: an engine without TF32, its gap below 1e-4", engine, engine_run, "", 1e-4)
    for dtype in ("float32", "bfloat16"):
        missing = gpu or (
            "" if dtype == "float32" or harness.auto.fast_bfloat16(device) else "needs bfloat16"
        )
        what = f"{dtype}, grouped heads: never the kernel of quadratic memory, in packed rows and padded ones"
        point(3, what, missing, no_math_kernel, device, dtype)
    what = "the micro-batch chosen for Qwen2.5 0.5B fits, with Adam's moments and a reference"
    point(4, what, gpu, chosen_fits, device)
    point(5, "SIGTERM with two ranks: the last whole step is saved", two, stopped_run)
    point(6, "a set-up error of NCCL is reported with its cause", nccl, nccl_error)
    point(7, "CUDA that torch cannot use: one line, no silent run on the CPU", driver, hidden_card)
    point(8, "the bundled task: float32, and no engine", "", bundled, device)
    point(
        9,
        "packed rows: one additive mask a pass, in autocast's dtype, width a multiple of 8",
        gpu,
        masks,
        device,
    )
    point(10, "torch makes what it makes by itself on this rank's card", gpu, current, device)
    what = "an engine sleeps, wakes and has what is no parameter:"
    point(10, f"{what} a router's buffer (GLM 4 MoE)", engine, engine_run, "Glm4Moe", 1e-3)
    point(10, f"{what} ALiBi's slopes (BLOOM)", engine, engine_run, "Bloom", 1e-3)


def trainer(*flags, nproc=1, stop=False, **env) -> tuple:
    """grpo.py in a process of its own, or under torchrun: its exit code, its output, its metrics. stop: by SIGTERM, in
    its third step."""
    torchrun = ["-m", "torch.distributed.run", f"--nproc_per_node={nproc}"] if nproc > 1 else []
    with (
        tempfile.TemporaryDirectory() as folder,
        open(os.path.join(folder, "printed"), "w+") as printed,
    ):
        out = os.path.join(folder, "out")
        command = [
            sys.executable,
            *torchrun,
            *SCRIPT,
            "--device",
            "cuda",
            "--out_dir",
            out,
            *FEW,
            *flags,
        ]
        streams = dict(stdout=printed, stderr=subprocess.STDOUT)
        process = subprocess.Popen(
            command, env=os.environ | env, cwd=os.path.dirname(HERE), **streams
        )
        metrics = os.path.join(out, "metrics.jsonl")
        while (
            stop
            and process.poll() is None
            and len(view.read_jsonl(metrics) if os.path.exists(metrics) else []) < 2
        ):
            time.sleep(0.2)
        if stop:
            process.terminate()
        code = process.wait(600)
        printed.seek(0)
        return (
            code,
            printed.read().strip(),
            view.read_jsonl(metrics) if os.path.exists(metrics) else [],
        )


def last_line(printed: str) -> str:
    """Of what ended a run."""
    return next(
        (line for line in printed.splitlines() if ": stopped:" in line or ": error:" in line),
        printed,
    )[-300:]


def bfloat16(device) -> tuple:
    capability, fast = (
        torch.cuda.get_device_capability(device),
        harness.auto.fast_bfloat16(device),
    )
    shown = f"{torch.cuda.get_device_name(device)}, {'.'.join(map(str, capability))}: {'bfloat16' if fast else 'float32'}"
    assert (torch.ones(2, device=device) * 2).sum() == 4  # else torch has no kernels for the card
    return fast == (capability >= (8, 0)), shown


def engine_for_card(device) -> tuple:
    kind, why = harness.engine.choose_sampler(Config(), device, False)
    return (kind == "vllm") == (
        torch.cuda.get_device_capability(device) >= (7, 5)
    ), f"{kind} ({why})"


def engine_run(kind: str, limit: float) -> tuple:
    """Two steps of the bundled task in float32: the second samples after a sleep, an update and a push. kind: random
    weights of another architecture. Whoever has set VLLM_ENABLE_V1_MULTIPROCESSING gets the same."""
    with tempfile.TemporaryDirectory() as folder:
        if kind:
            random_weights(kind, folder)
        rows = ["--train_data", grpo.BUNDLED["train_data"]]
        flags = [
            "--rollout",
            "vllm",
            "--dtype",
            "float32",
            *(["--model", folder, *rows] if kind else []),
        ]
        started = time.monotonic()
        _, printed, metrics = trainer(
            *flags, "--max_sampler_gap", "1", VLLM_ENABLE_V1_MULTIPROCESSING="1"
        )
    gaps = [m["sampler_gap"] for m in metrics if "sampler_gap" in m]
    if len(gaps) < 2:
        return False, last_line(printed)
    shown = f"gaps {gaps[0]:.2g} and {gaps[1]:.2g} (below {limit:g}), {time.monotonic() - started:.0f} s in all"
    return max(gaps) < limit and "vLLM starts, which compiles" in printed, shown


def random_weights(kind: str, folder: str) -> None:
    import transformers

    sizes = dict(
        vocab_size=18, hidden_size=128, num_hidden_layers=2, num_attention_heads=4, eos_token_id=1
    )
    more = dict(
        num_key_value_heads=2,
        head_dim=32,
        intermediate_size=128,
        moe_intermediate_size=64,
        n_routed_experts=8,
    )
    more |= dict(num_experts_per_tok=2, first_k_dense_replace=1, max_position_embeddings=256)
    more = more | dict(n_group=1, topk_group=1) if kind == "Glm4Moe" else dict(hidden_dropout=0.0)
    config = getattr(transformers, f"{kind}Config")(
        **sizes, **more, pad_token_id=0, initializer_range=0.1
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    for name, buffer in model.named_buffers():
        if "e_score_correction_bias" in name:
            buffer.normal_()
    model.save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(grpo.BUNDLED["model"]).save_pretrained(folder)


def grouped(device) -> argparse.Namespace:
    """A small policy with grouped heads, and samples for it."""
    from transformers import AutoModelForCausalLM, Qwen2Config

    sizes = dict(
        hidden_size=256,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        vocab_size=512,
    )
    torch.manual_seed(0)
    model = (
        AutoModelForCausalLM.from_config(Qwen2Config(**sizes, num_key_value_heads=2))
        .to(device)
        .eval()
    )
    m = argparse.Namespace(
        model=model, length=100, world=World(0, 1, device), policy=fast_policy(model, 1.0)
    )
    m.samples = made_up(m, 8, G=4)
    return m


def no_math_kernel(device, dtype: str) -> tuple:
    m = grouped(device)
    for packs in (True, False):
        m.policy.packs = packs
        with sdpa_kernel(
            [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
        ):  # an error without them
            forward(m, collate(m, m.samples), Config(dtype=dtype)).sum().backward()
    return True, "flash and the memory-efficient one are enough"


def masks(device) -> tuple:
    m, made, honest = grouped(device), [], harness.packing.packed_masks
    cfg = Config(dtype="bfloat16" if harness.auto.fast_bfloat16(device) else "float32")
    harness.packing.packed_masks = lambda *args, **options: (
        made.append(honest(*args, **options)) or made[-1]
    )
    try:
        forward(m, collate(m, m.samples), cfg)
    finally:
        harness.packing.packed_masks = honest
    biases = [block["mask"] for blocks in made for block in blocks if block["mask"] is not None]
    found = {(str(bias.dtype), bias.shape[-1]) for bias in biases}
    fine = all(dtype == f"torch.{cfg.dtype}" and width % 8 == 0 for dtype, width in found)
    return len(
        made
    ) == 1 and found and fine, f"built {len(made)} time(s) for two layers: {sorted(found)}"


def chosen_fits(device) -> tuple:
    model = random_model("0.5B", device)
    cfg = harness.auto.resolve_auto(Config(max_sampler_gap=1e9), model, device)
    m = argparse.Namespace(
        model=model, length=512, world=World(0, 1, device), policy=fast_policy(model, 1.0)
    )
    n, head = model.num_parameters(), model.get_input_embeddings().weight.numel()
    reference = torch.empty(
        2 * (n + head) if cfg.dtype == "bfloat16" else 4 * n, dtype=torch.uint8, device=device
    )
    optimizer, samples = (
        grpo.make_optimizer(m.policy, cfg),
        made_up(m, 2 * cfg.micro_batch_tokens // m.length, G=8),
    )
    torch.cuda.reset_peak_memory_stats()
    for step in (1, 2):  # in the second one the moments are there
        grpo.update(m.policy, optimizer, samples, cfg, step=step, world=m.world)
    peak, room = (
        torch.cuda.max_memory_allocated(),
        0.95 * torch.cuda.get_device_properties(device).total_memory - 2e9,
    )
    del m, model, optimizer, reference
    gc.collect()
    torch.cuda.empty_cache()
    how = f"{cfg.micro_batch_tokens} tokens{', recomputed' * cfg.gradient_checkpointing}"
    return peak < room, f"{how}: {peak / 1e9:.3g} GB at the peak (below {room / 1e9:.3g})"


def stopped_run() -> tuple:
    started = time.monotonic()
    _, printed, _ = trainer("--max_steps", "100000", "--save_every", "0", nproc=2, stop=True)
    saved = [line for line in printed.splitlines() if "is saved; go on with --resume" in line]
    return bool(
        saved
    ), f"{(saved or [last_line(printed)])[0]} ({time.monotonic() - started:.0f} s in all)"


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
    found = torch.cuda.current_device()
    return found == device.index, f"cuda:{found} for {device}"


def draw(seconds: dict, title: str):
    figure, (left, middle, last) = plt.subplots(1, 3, figsize=(12, 3.8), layout="constrained")
    for what in ("forward", "update", "update, compiled layers", "update, checkpointed"):
        rows = [
            row
            for row in SPEED
            if row[0] == what and row[2] == SPEED[0][2] and not isinstance(row[3], str)
        ]
        sizes = [str(row[1]) for row in rows]
        for axis, column in ((left, 3), (middle, 6)):
            axis.plot(sizes, [row[column] for row in rows], "o-", label=what)
    left.set(title="speed", ylabel="tokens a second", xlabel="--micro_batch_tokens", ylim=0)
    middle.set(title="peak memory", ylabel="GB", xlabel="--micro_batch_tokens", ylim=0)
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=4)
    last.barh([*seconds], [*seconds.values()])
    last.set(title="phases of a step", xlabel="seconds")
    last.invert_yaxis()
    figure.suptitle(title)
    return figure


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=grpo.BUNDLED["model"], help="a directory or a hub name")
    parser.add_argument(
        "--random", default="", choices=["", *QWEN], help="random weights of this size instead"
    )
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument(
        "--peak_tflops", type=float, default=0.0, help="of the device, dense, in the run's dtype"
    )
    parser.add_argument(
        "--points", action="store_true", help="only what was expected of a GPU, point by point"
    )
    parser.add_argument(
        "--quick", action="store_true", help="fewer sizes; writes to a temporary directory"
    )
    parser.add_argument("--jobs", help="of run_all: without effect")
    args = parser.parse_args()
    args.started, args.jobs = time.monotonic(), int(os.environ.get("WORLD_SIZE", 1))
    args.out = (
        os.path.join(tempfile.gettempdir(), "studies_quick")
        if args.quick
        else os.path.join(HERE, "figures")
    )
    os.makedirs(args.out, exist_ok=True)

    device = harness.ranks.pick_device(args.device)
    if "RANK" in os.environ:
        LEFT_OUT.append("what was expected of a GPU, point by point: without torchrun")
    else:
        check_points(device)
    wrong = any(row[-1] == "NOT AS EXPECTED" for row in POINTS)
    if args.points:
        return int(wrong)
    harness.head.HEAD_TILE.setdefault(device.type, 2**24)
    m = argparse.Namespace(world=harness.ranks.join_world(device), cuda=device.type == "cuda")
    cfg = Config(model=args.model, dtype=args.dtype, beta=0.0, tis_cap=0.0, max_sampler_gap=1e9)
    with tempfile.TemporaryDirectory() as folder:
        if (
            args.random
        ):  # the engine reads config.json there, and gets its weights by the first push
            cfg, m.model = dataclasses.replace(cfg, model=folder), random_model(args.random, device)
            m.model.config.save_pretrained(folder)
        else:
            m.model = grpo.load_model(cfg.model, cfg).to(device)
        size, small = m.model.num_parameters(), harness.auto.is_small(m.model)
        if device.type == "cpu" and not small and not THREADS:
            torch.set_num_threads(len(os.sched_getaffinity(0)))
        m.cfg = harness.auto.resolve_auto(cfg, m.model, device)
        name = torch.cuda.get_device_name(device) if m.cuda else device.type
        m.peak = 1e12 * (
            args.peak_tflops
            or PEAKS.get(max((p for p in PEAKS if p in name), key=len, default=""), 0)
        )
        title = f"{args.random or os.path.basename(args.model)}, {size / 1e6:.3g} M parameters, {m.cfg.dtype}, "
        title += f"{m.world.size} x {name}, torch {torch.__version__}"
        say(title)
        if not m.peak:
            old = (
                ": it has no fast bfloat16"
                if any(x in name for x in ("T4", "V100", "P100", "RTX 20"))
                else ""
            )
            LEFT_OUT.append(f"MFU: '{name}' is not in the table{old} (--peak_tflops)")
        positions = (
            getattr(m.model.config.get_text_config(), "max_position_embeddings", None) or 512
        )
        m.length = min(positions, 512 if m.cuda else 256)

        m.policy, clock = fast_policy(m.model, m.cfg.temperature), Clock(device)
        m.base = (
            0 if m.cuda else [clock.peak(), clock.peak()][1] - 4 * size
        )  # what Python and its libraries hold
        m.ddp, m.optimizer = (
            grpo.wrap(m.policy, m.cfg, m.world),
            grpo.make_optimizer(m.policy, m.cfg),
        )
        check_gradient(m)
        check_micro_batches(m)
        grpo.update(
            m.policy, m.optimizer, made_up(m, 8 * m.world.size), m.cfg, ddp=m.ddp, world=m.world
        )
        if m.world.size == 1:
            check_resume(m)
        else:
            LEFT_OUT.append("a resumed step: with one process only")
            weights = m.world.gather([harness.checkpoints.fingerprint(m.model)])
            right(
                m,
                "all ranks have the same weights after an update",
                len(set(weights)) == 1,
                f"{len(set(weights))}",
            )
        speed(m, args.quick)
        memory(m)
        free(m)
        seconds = sampler_and_phases(m, None if args.random else harness.rows.load_tokenizer(m.cfg))
    if m.world.rank == 0:
        rates = [[*row[:6], "" if row[6] != row[6] else row[6]] for row in SPEED]
        shares = [
            [phase, value, f"{value / sum(seconds.values()):.0%}"]
            for phase, value in seconds.items()
        ]
        tables = [
            [[title], *([f"left out: {line}"] for line in LEFT_OUT)],
            [["right?", "found", "holds"], *RIGHT],
        ]
        header = [
            "pass",
            "micro-batch",
            "head tile",
            "tokens/s",
            "TFLOP/s a device",
            "MFU",
            "peak GB",
        ]
        tables += [[header, *rates], [["memory", "arithmetic", "measured"], *MEMORY]]
        tables += [
            [["phase", "seconds", "share"], *shares],
            [["point", "expected", "found here", "answer"], *POINTS],
        ]
        save(args, "machine", draw(seconds, title), *tables)
    del m.ddp
    if (
        "RANK" in os.environ and torch.distributed.is_initialized()
    ):  # an engine that closed may have ended it
        torch.distributed.destroy_process_group()
    return int(wrong or any(row[-1] == "NO" for row in RIGHT))


if __name__ == "__main__":
    sys.exit(main())
