"""How much memory does an update take, and which line of code owns the peak? Counted without a GPU.

    python studies/memory.py          # Qwen2.5 shapes from 0.5B to 7B: six minutes on one CPU core
    python studies/memory.py --quick  # 0.5B, 2,048 tokens

grpo.update() itself runs on the tests' stand-in for a CUDA device: its tensors have sizes and no
values, autocast and autograd work as on CUDA, attention uses the kernel that CUDA would choose, and
the stand-in counts the bytes that are in use at a time, by the line of code that allocated them.
The last table counts what attention does in a forward pass over one packed row: pairs of query and
key, and bytes that stay for backward, with masks and without, over the least that there can be.
Not counted are CUDA's context (0.5 GB), the workspaces of its kernels, and the memory that the
allocator cannot use because it is fragmented. This has not run on a GPU.
"""

import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.append(os.path.join(os.path.dirname(HERE), "tests"))
import cuda_standin

cuda_standin.be_cuda(values=False)  # before any module asks which device there is

import collections
import ctypes
import linecache
import threading
import warnings

import numpy as np
import torch
import transformers
from common import arguments, fast_policy, save
from torch.utils._python_dispatch import TorchDispatchMode

import grpo
import harness.attention
import harness.auto
import harness.models
from grpo import Config, Sample
from harness import lora
from harness.flags import ConfigError
from harness.ranks import World
from harness.rows import Prompt

SHAPES = {  # hidden, MLP, layers, heads, key-value heads; embeddings are tied, but not those of 7B
    "0.5B": (896, 4864, 24, 14, 2),
    "1.5B": (1536, 8960, 28, 12, 2),
    "3B": (2048, 11008, 36, 16, 2),
    "7B": (3584, 18944, 28, 28, 4),
}
CARDS = {  # compute capability, bytes
    "16 GB (T4)": ((7, 5), 15.8e9),
    "24 GB (3090, 4090, L4)": ((8, 6), 25.2e9),
    "40 GB (A100)": ((8, 0), 42.3e9),
    "80 GB (A100, H100)": ((9, 0), 85.0e9),
    "141 GB (H200)": ((9, 0), 150.0e9),
}
SOLD_AS = {"12 GB": 12.6e9, "16 GB": 16.7e9, "24 GB": 25.2e9, "48 GB": 48.3e9, "80 GB": 85.0e9}
RANK = 16  # of the adapters
ENGINE = 1.5e9  # bytes of keys and values, and of vLLM's activations
LONGEST = 32768  # tokens, the positions of these models
TOKENS = (2048, 8192, 16384)
WORLD = World(0, 1, torch.device("cuda", 0))
PROMPT, COMPLETION, GROUP = 256, 256, 8
OWN_FILES = ("grpo.py", "fast.py", "head.py", "packing.py", "sdpa_attention.py")
AUTOGRAD = "autograd: gradients, and what is computed again"
# the number of each line of code; 0 stands for allocations before the first call of label_of
labels = collections.defaultdict(lambda: len(labels) + 1)


@ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int64)
def label_of(_bytes: int) -> int:
    """The number of the line that allocates: the innermost one of the trainer or of the model."""
    if threading.current_thread() is not threading.main_thread():
        return labels[AUTOGRAD]
    frame = sys._getframe()
    while frame is not None:
        path, name = frame.f_code.co_filename, frame.f_code.co_qualname
        if name in ("model_of", "reference_bytes"):
            return labels["the weights, float32"]
        if "_init_group" in name:
            return labels["Adam's moments"]
        if "/models/" in path or path.endswith(OWN_FILES):
            line = linecache.getline(path, frame.f_lineno).strip()
            return labels[f"{os.path.basename(path)} {name}: `{line}`"]
        frame = frame.f_back
    return labels["elsewhere"]


def model_of(size: str, device: str = "cuda"):
    from transformers import AutoModelForCausalLM, Qwen2Config

    hidden, mlp, layers, heads, key_value_heads = SHAPES[size]
    tied = size != "7B"
    config = Qwen2Config(
        hidden_size=hidden,
        intermediate_size=mlp,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_value_heads,
        vocab_size=151936 if tied else 152064,
        tie_word_embeddings=tied,
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    if device == "meta":
        return model
    model = model.to_empty(device=device).eval()
    model.tie_weights()
    return model


def reference_bytes(size: str, dtype: str) -> int:
    """Bytes of the KL term's frozen model, cast as load_reference() does."""
    before = torch.cuda.memory_allocated()
    model = model_of(size)
    tied = model.get_input_embeddings().weight
    for module in model.modules():
        is_linear = isinstance(module, torch.nn.Linear) and module.weight is not tied
        if is_linear and dtype == "bfloat16":
            module.to(torch.bfloat16)
    return torch.cuda.memory_allocated() - before


def samples_of(tokens: int) -> list[Sample]:
    """Groups of equal lengths that fill a few micro-batches of this many tokens."""
    rng, samples = np.random.default_rng(0), []
    while len(samples) * COMPLETION < 1.5 * tokens:
        prompt = Prompt(rng.integers(0, 1000, PROMPT).astype(np.int32), "", {})
        for _ in range(GROUP):
            ids = rng.integers(0, 1000, COMPLETION).astype(np.int32)
            zeros = np.zeros(COMPLETION, np.float32)
            sample = Sample(len(samples) // GROUP, prompt, ids, zeros, "stop")
            sample.advantages[:] = 1.0
            sample.ref_logps = zeros
            samples.append(sample)
    return samples


class Counted:
    """A policy of one size, the bytes that it holds between updates (`stays`), those of its
    reference, and the peak of each kind of update. rank: of its adapters; 0: all weights learn."""

    def __init__(self, size: str, rank: int = 0):
        self.size = size
        self.rank = rank
        self.model = model_of(size)
        if rank > 0:
            lora.add_adapters(self.model, Config(lora_rank=rank))
        self.policy = fast_policy(self.model, 1.0)
        if rank > 0:
            harness.models.halve_frozen(self.model)
            lora.add_before_rounding(self.model)
        self.optimizer = grpo.make_optimizer(self.policy, Config())
        self.peaks = {}
        self.peak(TOKENS[0], True)  # makes Adam's moments
        self.peaks.clear()
        self.stays = torch.cuda.memory_allocated()
        self.reference = 0  # with adapters it is the model itself
        if rank == 0:
            self.reference = reference_bytes(size, "bfloat16")

    def peak(self, tokens: int, recompute: bool, dtype="bfloat16") -> tuple[int, dict]:
        """The most bytes in use during an update, without the reference, and their share by line of
        code."""
        key = tokens, recompute, dtype
        if key not in self.peaks:
            self.peaks[key] = self.measure(*key)
        return self.peaks[key]

    def measure(self, tokens: int, recompute: bool, dtype: str) -> tuple[int, dict]:
        if recompute:
            options = dict(use_reentrant=False)
            self.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
        else:
            self.model.gradient_checkpointing_disable()
        cfg = Config(micro_batch_tokens=tokens, dtype=dtype, max_sampler_gap=1e9, log_tokens=0)
        torch.cuda.reset_peak_memory_stats()
        grpo.update(self.policy, self.optimizer, samples_of(tokens), cfg, world=WORLD)
        lines = {}
        for line, number in labels.items():
            lines[line] = cuda_standin.native.standin_at_peak(number)
        return torch.cuda.max_memory_allocated(), lines


class Pairs(TorchDispatchMode):
    """Counts pairs of query and key that attention kernels compute, in all heads. A causal kernel
    is taken to skip all later keys; in truth it computes whole tiles of the diagonal."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        query, key, *_ = [*args, None, None]
        if name == "_flash_attention_forward":  # texts one after another: [tokens, heads, D]
            sizes = zip(args[3].cpu().diff(), args[4].cpu().diff(), strict=True)
            self.count += query.shape[1] * sum(pairs(q, k, causal=args[8]) for q, k in sizes)
        elif name == "_scaled_dot_product_flash_attention":
            N, heads, T, _ = query.shape
            self.count += N * heads * pairs(T, key.shape[2], causal=args[4])
        elif name == "_scaled_dot_product_efficient_attention":
            N, heads, T, _ = query.shape
            self.count += N * heads * pairs(T, key.shape[2], causal=False)
        return function(*args, **(kwargs or {}))


def pairs(queries: int, keys: int, causal: bool) -> int:
    if causal:
        return int(queries) * (int(queries) + 1) // 2
    return int(queries) * int(keys)


def attention_rows(model, completion: int) -> list:
    """Rows of the table of attention: a micro-batch of one group, with masks and without."""
    rng = np.random.default_rng(0)
    prompt = Prompt(rng.integers(0, 1000, PROMPT), "", {})
    samples = []
    for _ in range(GROUP):
        size = rng.integers(completion // 2, completion + 1)
        samples.append(Sample(0, prompt, rng.integers(0, 1000, size), None, "stop"))
    policy = fast_policy(model, 1.0)
    batch = grpo.collate(samples, WORLD.device, policy.rows)

    text = model.config
    D = text.hidden_size // text.num_attention_heads
    sizes = [len(s.completion_ids) - 1 for s in samples]
    S = PROMPT + sum(sizes)
    least_pairs = pairs(PROMPT, PROMPT, causal=True)
    for size in sizes:
        least_pairs += size * PROMPT + pairs(size, size, causal=True)
    least_pairs *= text.num_attention_heads
    # queries, keys and the output in bfloat16, one float32 per query; values are there anyway
    least_bytes = S * text.num_attention_heads * (2 * 2 * D + 4)
    least_bytes += S * text.num_key_value_heads * 2 * D

    rows = []
    attend = harness.attention.packed_attention
    for way in ("masks", "merged"):
        policy.attention = way
        kept = []
        counter = Pairs()

        def measured(module, query, *rest, kept=kept, counter=counter, **options):
            before = torch.cuda.memory_allocated()
            with counter:
                out = attend(module, query, *rest, **options)
            kept.append(torch.cuda.memory_allocated() - before)
            return out

        transformers.AttentionInterface.register(harness.attention.ATTENTION, measured)
        with grpo.autocast(Config(dtype="bfloat16"), WORLD.device):
            hidden = policy.hidden(batch)
        del hidden
        work = counter.count / len(kept) / least_pairs
        memory = kept[-1] / least_bytes  # the first layer also makes the masks
        extra = (kept[0] - kept[-1]) / 1e6
        rows.append([f"{completion:,}", way, f"{work:.3f}", f"{memory:.3f}", f"{extra:.0f}"])
    harness.attention.register_attention()
    return rows


def gigabytes(count: float) -> str:
    """As text; empty if it is too little to matter."""
    return f"{count / 1e9:.1f}" if count > 5e7 else ""


def yes_no(value: bool) -> str:
    return "yes" if value else "no"


def be_card(name: str) -> None:
    cuda_standin.be_cuda(name, *CARDS[name], values=False)
    cuda_standin.listen(label_of)


def chosen_row(card: str, counted: Counted) -> list:
    """The micro-batch that harness/models.py chooses for a card, and the memory that it takes."""
    be_card(card)
    capability, card_bytes = CARDS[card]
    dtype = "bfloat16" if capability >= (8, 0) else "float32"
    try:
        cfg = Config(dtype=dtype, beta=0.001)
        cfg = harness.auto.fit_micro_batch(cfg, counted.model, WORLD.device)
    except ConfigError:
        return [card, counted.size, dtype, "refused", "", "", ""]
    tokens, recompute = cfg.micro_batch_tokens, cfg.gradient_checkpointing
    peak = counted.peak(tokens, recompute, dtype)[0] + reference_bytes(counted.size, dtype)
    fits = "yes" if peak < card_bytes else "NO"
    return [card, counted.size, dtype, f"{tokens:,}", yes_no(recompute), gigabytes(peak), fits]


def answers() -> list:
    """Which model trains on which card, with vLLM beside it: a row for each model, in full and with
    adapters, by the plan of harness/auto.py, which the counts above hold against."""
    table = [" | ".join(["model", "trained", *SOLD_AS])]
    for size in SHAPES:
        for rank in (0, RANK):
            model = model_of(size, "meta")
            if rank > 0:
                lora.add_adapters(model, Config(lora_rank=rank))
            cells = [answer(model, rank, card_bytes) for card_bytes in SOLD_AS.values()]
            table.append([size, f"adapters of rank {rank}" if rank else "in full", *cells])
    return table


def answer(model, rank: int, card_bytes: float) -> str:
    """The micro-batch, and the longest text; "" if the card is too small."""
    cfg = Config(dtype="bfloat16", lora_rank=rank)
    room = harness.auto.USABLE * card_bytes
    start, sampling = other_peaks(cfg, model)
    if max(start, sampling) > room:
        return ""

    fixed = harness.auto.peak_bytes(cfg, model, 0, True)
    token = harness.auto.peak_bytes(cfg, model, 1, True) - fixed
    longest = int(min((room - fixed) / token, LONGEST))
    for recompute in (False, True):
        for tokens in harness.auto.MICRO_BATCHES:
            if harness.auto.peak_bytes(cfg, model, tokens, recompute) <= room:
                how = ", recomputed" if recompute else ""
                return f"{tokens:,}{how}; {longest:,}"
    return ""


def other_peaks(cfg, model) -> tuple[float, float]:
    """Bytes at the start, with float32 weights, and while vLLM samples, without gradients."""
    parameters = harness.auto.count(model)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    head = model.get_input_embeddings().weight.numel()
    base = 0
    if cfg.lora_rank > 0:
        base = harness.auto.frozen_bytes(cfg, parameters - trained, head)
    start = harness.auto.CUDA + 4 * parameters
    sampling = harness.auto.CUDA + base + 12 * trained + 2 * parameters + ENGINE
    return start, sampling


def main() -> None:
    args = arguments(__doc__)
    warnings.simplefilter("ignore")  # means over samples without values
    tokens, sizes, cards = TOKENS, list(SHAPES), list(CARDS)
    if args.quick:
        tokens, sizes, cards = TOKENS[:1], sizes[:1], cards[1:2]

    columns = [f"update, {t:,} tokens" for t in tokens]
    columns = ["model", "trained", "recomputed", "weights, moments", "reference", *columns]
    table = [" | ".join(columns)]
    fits = [
        "card | model | dtype | micro-batch | recomputed | GB of the update, with reference | fits"
    ]
    owners = {}  # of each model: {line of code: bytes at the peak}
    for size in sizes:
        be_card("80 GB (A100, H100)")
        counted = Counted(size, RANK)
        for recompute in (False, True):
            peaks = [counted.peak(t, recompute)[0] for t in tokens]
            counts = [counted.stays, counted.reference, *peaks]
            name = f"adapters of rank {RANK}"
            table.append([size, name, yes_no(recompute), *map(gigabytes, counts)])
        del counted
        counted = Counted(size)
        for recompute in (False, True):
            peaks = [counted.peak(t, recompute) for t in tokens]
            name = f"{size}, recomputed" if recompute else size
            owners[name] = peaks[-1][1]
            counts = [counted.stays, counted.reference, *(peak for peak, _ in peaks)]
            table.append([size, "in full", yes_no(recompute), *map(gigabytes, counts)])
        for card in cards:
            fits.append(chosen_row(card, counted))
        del counted

    totals = {}
    for line in labels:
        totals[line] = sum(lines.get(line, 0) for lines in owners.values())
    owner_table = [" | ".join([f"GB at the peak, {tokens[-1]:,} tokens, of", *owners])]
    for line in sorted(totals, key=totals.get, reverse=True)[:12]:
        cells = [gigabytes(lines.get(line, 0)) for lines in owners.values()]
        owner_table.append([line, *cells])
    attention = ["completions to, tokens | way | pairs / least | bytes kept / least | MB of masks"]
    be_card("80 GB (A100, H100)")
    model = model_of("0.5B")
    for completion in (512, 8000):
        attention += attention_rows(model, completion)
    save(args, "memory", None, answers(), table, fits, owner_table, attention)
    assert not any(row[-1] == "NO" for row in fits[1:]), "a chosen micro-batch does not fit"


if __name__ == "__main__":
    main()
