"""How much memory does an update take, and which line of code owns its peak? Counted without a GPU.

    python studies/memory.py          # Qwen2.5 shapes from 0.5B to 7B: four minutes on one CPU core
    python studies/memory.py --quick  # 0.5B, 2,048 tokens

grpo.update() itself runs on the stand-in of a CUDA device of the tests: tensors that have sizes and no values, autocast
and autograd as on CUDA, attention as the kernel that CUDA would choose, and a count of the bytes that live at once, by
the line that asked for them. Not counted: CUDA's context (0.5 GB), workspaces of its kernels, what the allocator cannot
use because it lies in pieces. No GPU has run this.
"""

import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.append(os.path.join(os.path.dirname(HERE), "tests"))
import cuda_standin

cuda_standin.be_cuda(values=False)  # before anything asks for a device

import collections
import ctypes
import linecache
import threading
import warnings

import numpy as np
import torch
from common import arguments, fast_policy, save

import grpo
import harness.models
from grpo import Config, Sample
from harness.flags import ConfigError
from harness.ranks import World
from harness.rows import Prompt

# hidden, MLP, layers, heads, key-value heads; embeddings of 151,936 tokens, tied but for 7B
SHAPES = {
    "0.5B": (896, 4864, 24, 14, 2),
    "1.5B": (1536, 8960, 28, 12, 2),
    "3B": (2048, 11008, 36, 16, 2),
}
SHAPES |= {"7B": (3584, 18944, 28, 28, 4)}
CARDS = {
    "16 GB (T4)": ((7, 5), 15.8e9),
    "24 GB (3090, 4090, L4)": ((8, 6), 25.2e9),
    "40 GB (A100)": ((8, 0), 42.3e9),
}
CARDS |= {"80 GB (A100, H100)": ((9, 0), 85.0e9), "141 GB (H200)": ((9, 0), 150.0e9)}
TOKENS = (2048, 8192, 16384)
WORLD = World(0, 1, torch.device("cuda", 0))
PROMPT, COMPLETION = 256, 256
AUTOGRAD = "autograd: gradients, and what is computed again"
labels = collections.defaultdict(
    lambda: len(labels) + 1
)  # line of code -> number; 0: before anybody asked


@ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int64)
def label_of(_bytes: int) -> int:
    """Whose allocation it is: the innermost line of the trainer or of the model."""
    if threading.current_thread() is not threading.main_thread():
        return labels[AUTOGRAD]
    frame = sys._getframe()
    while frame is not None:
        path, name = frame.f_code.co_filename, frame.f_code.co_qualname
        if name in ("model_of", "reference_bytes"):
            return labels["the weights, float32"]
        if "_init_group" in name:
            return labels["Adam's moments"]
        if "/models/" in path or path.endswith(
            ("grpo.py", "head.py", "packing.py", "sdpa_attention.py")
        ):
            line = linecache.getline(path, frame.f_lineno).strip()
            return labels[f"{os.path.basename(path)} {name}: `{line}`"]
        frame = frame.f_back
    return labels["elsewhere"]


def model_of(size: str):
    from transformers import AutoModelForCausalLM, Qwen2Config

    names = (
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
    )
    tied = size != "7B"
    sizes = dict(zip(names, SHAPES[size], strict=True)) | dict(
        vocab_size=151936 if tied else 152064
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(Qwen2Config(**sizes, tie_word_embeddings=tied))
    model = model.to_empty(device="cuda").eval()
    model.tie_weights()
    return model


def reference_bytes(size: str) -> int:
    """The frozen model of the KL term, as load_reference() casts it."""
    before, model = torch.cuda.memory_allocated(), model_of(size)
    tied = model.get_input_embeddings().weight
    for module in model.modules():
        if isinstance(module, torch.nn.Linear) and module.weight is not tied:
            module.to(torch.bfloat16)
    return torch.cuda.memory_allocated() - before


def samples_of(tokens: int) -> list[Sample]:
    """Groups of 8 of equal lengths: some micro-batches of this many tokens."""
    rng, samples = np.random.default_rng(0), []
    while len(samples) * COMPLETION < 1.5 * tokens:
        prompt = Prompt(rng.integers(0, 1000, PROMPT).astype(np.int32), "", {})
        for _ in range(8):
            ids = rng.integers(0, 1000, COMPLETION).astype(np.int32)
            sample = Sample(
                len(samples) // 8,
                prompt,
                ids,
                np.zeros(COMPLETION, np.float32),
                "stop",
                advantages=np.ones(COMPLETION),
            )
            sample.ref_logps = np.zeros(COMPLETION, np.float32)
            samples.append(sample)
    return samples


class Counted:
    """A policy of one size: its updates, and the bytes at the peak of each, by line."""

    def __init__(self, size: str):
        self.size, self.model, self.found = size, model_of(size), {}
        self.policy = fast_policy(self.model, 1.0)
        self.optimizer = grpo.make_optimizer(self.policy, Config())
        self.peak(TOKENS[0], True)  # makes the moments
        self.found.clear()
        self.stays, self.reference = torch.cuda.memory_allocated(), reference_bytes(size)

    def peak(self, tokens: int, recompute: bool, dtype="bfloat16") -> tuple[int, dict]:
        """Without the reference."""
        if (tokens, recompute, dtype) not in self.found:
            self.model.gradient_checkpointing_enable(
                gradient_checkpointing_kwargs=dict(use_reentrant=False)
            )
            if not recompute:
                self.model.gradient_checkpointing_disable()
            cfg = Config(micro_batch_tokens=tokens, dtype=dtype, max_sampler_gap=1e9, log_tokens=0)
            torch.cuda.reset_peak_memory_stats()
            grpo.update(self.policy, self.optimizer, samples_of(tokens), cfg, world=WORLD)
            lines = {
                line: cuda_standin.native.standin_at_peak(number) for line, number in labels.items()
            }
            self.found[tokens, recompute, dtype] = torch.cuda.max_memory_allocated(), lines
        return self.found[tokens, recompute, dtype]


def show(count: float) -> str:
    return f"{count / 1e9:.1f}" if count > 5e7 else ""


def be_card(name: str) -> None:
    cuda_standin.be_cuda(name, *CARDS[name], values=False)
    cuda_standin.listen(label_of)


def chosen(card: str, counted: Counted) -> list:
    """What harness/models.py chooses for a card, and what that takes."""
    be_card(card)
    model, dtype = counted.model, "bfloat16" if CARDS[card][0] >= (8, 0) else "float32"
    try:
        cfg = harness.models.fit_micro_batch(Config(dtype=dtype), model, WORLD.device)
    except ConfigError:
        return [card, counted.size, dtype, "refused", "", "", ""]
    peak = (
        counted.peak(cfg.micro_batch_tokens, cfg.gradient_checkpointing, dtype)[0]
        + counted.reference
    )
    recompute = "yes" if cfg.gradient_checkpointing else "no"
    fits = "yes" if peak < CARDS[card][1] else "NO"
    return [card, counted.size, dtype, f"{cfg.micro_batch_tokens:,}", recompute, show(peak), fits]


def main() -> None:
    args = arguments(__doc__)
    warnings.simplefilter("ignore")  # means over samples without values
    tokens = TOKENS[:1] if args.quick else TOKENS
    table = [
        [
            "model",
            "recomputed",
            "weights, moments",
            "reference",
            *(f"update, {t:,} tokens" for t in tokens),
        ]
    ]
    fits = [
        [
            "card",
            "model",
            "dtype",
            "micro-batch",
            "recomputed",
            "GB of the update, with reference",
            "fits",
        ]
    ]
    columns = []
    for size in list(SHAPES)[: 1 if args.quick else None]:
        be_card("80 GB (A100, H100)")
        counted = Counted(size)
        for recompute in (False, True):
            peaks = [counted.peak(t, recompute) for t in tokens]
            columns.append((f"{size}{', recomputed' * recompute}", peaks[-1][1]))
            shown = [
                show(counted.stays),
                show(counted.reference),
                *(show(peak) for peak, _ in peaks),
            ]
            table.append([size, "yes" if recompute else "no", *shown])
        fits += [chosen(card, counted) for card in (list(CARDS)[1:2] if args.quick else CARDS)]
        del counted
    total = {line: sum(lines[line] for _, lines in columns if line in lines) for line in labels}
    owners = [[f"GB at the peak, {tokens[-1]:,} tokens, of", *(name for name, _ in columns)]]
    for line in sorted(total, key=total.get, reverse=True)[:12]:
        owners.append([line, *(show(lines.get(line, 0)) for _, lines in columns)])
    save(args, "memory", None, table, fits, owners)
    assert not any(row[-1] == "NO" for row in fits), "a micro-batch that was chosen does not fit"


if __name__ == "__main__":
    main()
