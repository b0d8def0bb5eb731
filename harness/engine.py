"""Which sampler a run takes: vLLM if it can sample here, else Hugging Face's generate."""

import os
import sys

import torch
import torch.distributed as dist

from harness.flags import ConfigError, this_rank


def shows_progress() -> bool:
    """A bar lives on rank 0, if stderr is a terminal. A log gets none."""
    return this_rank() == 0 and hasattr(sys.stderr, "isatty") and sys.stderr.isatty()


def vllm_problem(cfg, device: torch.device) -> str:
    """Why vLLM cannot sample for this run; "" if it can."""
    requirements = "-r requirements.txt"
    if device.type == "cpu":
        requirements = "--no-deps -r requirements-cpu.txt"
    if cfg.dtype == "float64":
        return "vLLM has no float64"
    if dist.is_initialized() and dist.get_world_size() > 1:
        torchrun = "let torchrun start the ranks and make no group"
        return f"vLLM would end the caller's process group: {torchrun}, or take --rollout hf"
    try:
        from vllm.platforms import current_platform
    except ImportError as error:
        return f"vllm cannot be imported: {error}; pip install {requirements}"
    if device.type != current_platform.device_type:
        return f"the installed vllm has no {device.type} build; pip install {requirements}"
    if device.type == "cpu":
        current_platform.import_kernels()  # of its three libraries, the one for this CPU
        if not hasattr(torch.ops._C, "init_cpu_memory_env"):  # vLLM itself only warns
            return "vllm's library cannot be loaded (--verbose says why); is libnuma1 installed?"
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (7, 5):
        return "vllm has no kernels for cards below compute capability 7.5; --rollout hf needs none"
    return ""


def prepare_vllm(cfg) -> None:
    """Sets the environment for vLLM's import."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # same process: it shares our tensors
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "INFO" if cfg.verbose else "ERROR")
    if cfg.dtype == "float32":  # else its attention multiplies in TF32, and the gap is 1e-3
        os.environ["TRITON_F32_DEFAULT"] = "ieee"


def compile_nothing() -> None:
    """Without it the first rollout on a CPU compiles C++ for 10 s, to no use."""
    from vllm.platforms import current_platform

    type(current_platform).simple_compile_backend = "eager"


def choose_sampler(cfg, device: torch.device, small: bool) -> tuple[str, str]:
    """Its name, vllm or hf, and why. Called before join_world: a process group is the caller's."""
    if cfg.rollout == "hf":
        return "hf", "asked for"
    if cfg.rollout == "auto" and small:
        return "hf", "vLLM would take longer to start than it saves on a model this small"
    prepare_vllm(cfg)
    problem = vllm_problem(cfg, device)
    if problem and cfg.rollout == "vllm":
        raise ConfigError(f"--rollout vllm: {problem}")
    if problem:
        return "hf", problem
    if device.type == "cpu":
        compile_nothing()
    return "vllm", "asked for" if cfg.rollout == "vllm" else "installed"
