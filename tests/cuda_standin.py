"""A CUDA device without a GPU: torch's CPU build believes in one whose memory is the CPU's.

    python tests/cuda_standin.py grpo.py --device cuda --rollout hf   # or module.function
    CUDA_STANDIN='{"name": "Tesla T4", "capability": [7, 5]}' python tests/cuda_standin.py ...

It works under torchrun, too: each rank has a device of its own. Autocast follows CUDA's rules and
its default of float16; tensors of both devices in one operator are an error; each wait of the host
for the device is counted with the line that caused it. It has no streams, no CUDA kernels and their
speed, no NCCL (gloo stands in) and no torch.compile: it does not prove that a GPU works.

In another process: `import cuda_standin` before torch, then call `cuda_standin.be_cuda(...)` once.
"""

import atexit
import collections
import contextlib
import ctypes
import hashlib
import importlib
import importlib.metadata
import importlib.util
import json
import os
import runpy
import subprocess
import sys
import tempfile
import threading
import types

HERE = os.path.dirname(os.path.abspath(__file__))
SOURCE = os.path.join(HERE, "cuda_standin.cpp")
waits, attention, elsewhere = collections.Counter(), collections.Counter(), collections.Counter()


def build() -> str:
    """Compiles cuda_standin.cpp once for each version of it and of torch."""
    root = importlib.util.find_spec("torch").submodule_search_locations[0]
    command = ["g++", "-O1", "-w", "-std=c++20", "-shared", "-fPIC", f"-I{root}/include", SOURCE]
    command += [f"-L{root}/lib", "-lc10", "-ltorch_cpu", "-o"]
    with open(SOURCE, "rb") as file:
        key = file.read() + "".join([*command, importlib.metadata.version("torch")]).encode()
    library = os.path.join(
        tempfile.gettempdir(),
        f"cuda_standin_{os.getuid()}_{hashlib.sha256(key).hexdigest()[:16]}.so",
    )
    if not os.path.exists(library):
        partial = f"{library}.{os.getpid()}"
        subprocess.run([*command, partial], check=True)
        os.replace(partial, library)
    for path in (f"{root}/lib/libc10.so", f"{root}/lib/libtorch_cpu.so"):
        ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
    return library


# before torch, which asks for its hooks once
native = ctypes.CDLL(build(), mode=ctypes.RTLD_GLOBAL)
for _name in ("standin_live", "standin_peak", "standin_at_peak"):
    getattr(native, _name).restype = ctypes.c_int64

import torch  # isort: skip


def callers() -> list[str]:
    """The project's lines on this thread's stack, innermost first."""
    root = os.path.dirname(HERE) + os.sep
    stack = []
    frame = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        if path.startswith(root) and path != __file__:
            stack.append(f"{path[len(root) :]}:{frame.f_lineno} {frame.f_code.co_qualname}")
        frame = frame.f_back
    return stack


@ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_char_p)
def count(what: bytes, which: bytes) -> None:
    """Counts a wait as "operator, line, pass": forward is Policy's, backward autograd's thread."""
    if what == b"attention":
        attention[which.decode()] += 1
        return
    lines = callers()
    if what == b"elsewhere":  # on another card than the process's current one
        elsewhere[lines[0] if lines else ""] += 1
        return
    backward = threading.current_thread() is not threading.main_thread()
    within = "outside"
    if backward:
        within = "backward"
    elif any("Policy.forward" in line for line in lines):
        within = "forward"
    line = lines[0] if lines else "no line of ours"
    waits[f"{which.decode()}, {line}, {within}"] += 1


NO_LABELS = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int64)()


def listen(label_of=NO_LABELS) -> None:
    """label_of(bytes) -> int says to whom an allocation belongs: see native.standin_at_peak."""
    native.standin_listen(count, label_of)
    listen.kept = label_of


def be_cuda(
    name="NVIDIA H100 80GB HBM3", capability=(9, 0), memory=80e9, devices=None, values=True
) -> None:
    """For the rest of the process. Without values floating point tensors take no memory, only
    their size is counted: each of their elements reads as 0, each comparison as true."""
    devices = devices or int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    native.standin_card(devices, capability[0], values)
    listen()
    if not values:
        importlib.import_module("torch._meta_registrations")
    patch_cuda(name, tuple(capability), int(memory), devices)
    patch_flash(tuple(capability))
    patch_collectives()
    atexit.register(native.standin_listen, None, None)  # before Python is gone


class Done:
    """A stream or an event: all work is done when a call returns."""

    def __init__(self, *_, **__):
        pass

    def __getattr__(self, name):
        return lambda *_, **__: None


def patch_cuda(name: str, capability: tuple, memory: int, devices: int) -> None:
    """What torch.cuda asks of the driver."""
    from torch.cuda.amp import common

    major, minor = capability
    card = dict(name=name, major=major, minor=minor, total_memory=memory, multi_processor_count=132)
    live, peak = (lambda *_: native.standin_live()), (lambda *_: native.standin_peak())
    current = lambda *_: native.standin_device()  # noqa: E731

    def set_device(device) -> None:
        index = device if isinstance(device, int) else torch.device(device).index
        if index is not None and not 0 <= index < devices:
            raise RuntimeError(f"CUDA error: invalid device ordinal {index}: {devices} are there")
        native.standin_set_device(current() if index is None else index)

    def bf16_supported(including_emulation=True) -> bool:
        return major >= 8 or including_emulation  # emulated below 8.0, which torch calls supported

    common.amp_definitely_not_available = lambda: False
    answers = dict(
        is_available=True,
        device_count=devices,
        get_device_capability=capability,
        get_device_name=name,
    )
    answers |= dict(
        get_device_properties=types.SimpleNamespace(**card), is_initialized=True, _lazy_init=None
    )
    answers |= dict(
        synchronize=None, empty_cache=None, manual_seed=None, manual_seed_all=None, ipc_collect=None
    )
    for what, answer in answers.items():
        setattr(torch.cuda, what, lambda *_, _answer=answer, **__: _answer)
    torch.cuda._initialized, torch.cuda.is_bf16_supported = True, bf16_supported
    torch.cuda.current_device, torch.cuda.set_device = current, set_device
    torch.cuda.memory_allocated = torch.cuda.memory_reserved = live
    torch.cuda.max_memory_allocated = torch.cuda.max_memory_reserved = peak
    torch.cuda.reset_peak_memory_stats = lambda *_: native.standin_reset_peak()
    torch.cuda.mem_get_info = lambda *_: (memory - live(), memory)
    histc = torch.histc  # which takes whole numbers on CUDA, too
    torch.histc = lambda x, *args, **options: histc(x.float(), *args, **options).to(x.dtype)
    # its operators draw from the CPU's generator
    torch.cuda.get_rng_state, torch.cuda.set_rng_state = (
        lambda *_: torch.get_rng_state(),
        lambda s, *_: torch.set_rng_state(s),
    )
    torch.cuda.Stream = torch.cuda.Event = Done
    torch.cuda.stream = torch.cuda.device = contextlib.nullcontext
    torch.cuda.current_stream = torch.cuda.default_stream = Done


flash_library = None  # kept, or its operators go


def patch_flash(capability: tuple) -> None:
    """CUDA's flash operators for texts of many lengths, on the CPU, one text after another.

    They are as strict as CUDA's, as far as torch's sources and its meta kernels tell.
    """
    global flash_library

    def forward(q, k, v, q_starts, k_starts, longest_q, longest_k, dropout, causal, mask, scale):
        check(capability, dropout, q, k, v)
        assert not mask and q.shape[1] % k.shape[1] == 0
        attention["flash, texts of many lengths"] += 1
        rows = texts(q, q_starts, longest_q), texts(k, k_starts, longest_k)
        outs, lses = [], []
        for text in zip(*rows, texts(v, k_starts, longest_k), strict=True):
            out, lse = flash_forward(*text, 0.0, causal, scale=scale)
            outs.append(out[0].transpose(0, 1))
            lses.append(lse[0])
        out = torch.cat(outs).to(q.dtype)
        random = torch.zeros(2, dtype=torch.uint64)
        return out, torch.cat(lses, 1), random, random.new_empty(()), q.new_empty(0)

    def backward(grad, q, k, v, out, lse, q_starts, k_starts, longest_q, longest_k, dropout, *rest):
        causal, random, _, scale = rest
        check(capability, dropout, grad, q, k, v, out)
        assert lse.is_contiguous() and lse.dtype == torch.float32 and random.dtype == torch.uint64
        assert lse.shape == (q.shape[1], len(q)) and grad.dtype == q.dtype
        attention["flash, texts of many lengths, backward"] += 1
        of_queries = [texts(x, q_starts, longest_q) for x in (grad, q, out)]
        of_keys = [texts(x, k_starts, longest_k) for x in (k, v)]
        lses = [x.contiguous()[None] for x in lse.split(q_starts.diff().tolist(), 1)]
        parts = []
        for text in zip(*of_queries, *of_keys, lses, strict=True):
            g, q_, out_, k_, v_, lse_ = text
            parts.append(flash_backward(g, q_, k_, v_, out_, lse_, 0.0, causal, scale=scale))
        of_rows = zip(*parts, strict=True)
        return tuple(torch.cat([x[0].transpose(0, 1) for x in row]).to(q.dtype) for row in of_rows)

    def texts(row, starts, longest):
        """[n, heads, D] -> [1, heads, text, D] of each text"""
        assert starts.dtype == torch.int32 and starts.is_contiguous() and starts[0] == 0
        sizes = starts.diff().tolist()
        assert sum(sizes) == len(row) and 0 < min(sizes) and max(sizes) <= longest > 1
        return [x.transpose(0, 1)[None].float() for x in row.split(sizes)]

    def keywords(function):
        """Arguments that only CUDA's kernel has stay at their defaults."""

        def call(*args, scale=None, **others):
            assert not any(others.values())
            return function(*args, scale)

        return call

    aten = torch.ops.aten
    flash_forward = aten._scaled_dot_product_flash_attention_for_cpu
    flash_backward = aten._scaled_dot_product_flash_attention_for_cpu_backward
    flash_library = torch.library.Library("aten", "IMPL", "CPU")
    flash_library.impl("_flash_attention_forward", keywords(forward))
    flash_library.impl("_flash_attention_backward", keywords(backward))


def check(capability: tuple, dropout: float, *rows) -> None:
    """Raises what CUDA's flash kernel raises."""
    if capability < (8, 0):
        raise RuntimeError("FlashAttention only supports Ampere GPUs or newer.")
    for x in rows:
        assert x.dim() == 3 and x.stride(-1) == 1 and not dropout
        if x.dtype not in (torch.bfloat16, torch.float16) or x.dtype != rows[0].dtype:
            raise RuntimeError("FlashAttention only support fp16 and bf16 data type")
        if x.shape[-1] % 8 or x.shape[-1] > 256:
            raise RuntimeError(f"no kernel for heads of size {x.shape[-1]}")


def patch_collectives() -> None:
    """gloo in NCCL's place, on the device's memory."""
    import torch.distributed as dist

    init = dist.init_process_group

    def init_process_group(backend=None, *args, **kwargs):
        native.standin_collectives()
        return init(backend and backend.replace("nccl", "gloo"), *args, **kwargs)

    dist.init_process_group = init_process_group


def main() -> None:
    """CUDA_STANDIN is JSON: arguments of be_cuda, and `report`, a file for each rank's counts."""
    options = json.loads(os.environ.get("CUDA_STANDIN", "{}"))
    report = options.pop("report", None)
    be_cuda(**options)
    what, *arguments = sys.argv[1:]
    sys.argv, sys.path[0] = [what, *arguments], os.path.dirname(HERE)
    code = 0
    try:
        if what.endswith(".py"):
            runpy.run_path(os.path.abspath(what), run_name="__main__")
        else:
            module, _, function = what.rpartition(".")
            getattr(importlib.import_module(module), function)(*arguments)
    except SystemExit as end:
        code = end.code or 0
    finally:
        if report:
            with open(f"{report}.{os.environ.get('RANK', 0)}", "w") as file:
                json.dump(
                    dict(waits=waits, attention=attention, elsewhere=elsewhere), file, indent=1
                )
    # Python's own exit destroys autograd's thread for the card, and as this card is none, C++ now
    # and then ends the process there ("terminate called without an active exception").
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    sys.modules["cuda_standin"] = sys.modules["__main__"]
    main()
