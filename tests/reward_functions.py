"""Reward functions of a user, good and bad, for the tests. The fixture `file` of tests/common.py
copies this file into a directory with a neighbour.py, so it cannot be imported from here."""

from __future__ import annotations

import asyncio
import enum
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from math import sqrt  # noqa: F401  callable, but no reward function

import neighbour


@dataclass
class Parsed:
    """dataclasses look up the module of a class in sys.modules: it must be there."""

    text: str


# --------------------------------------------------------------------------------------------------
# function(completion, row)


def length(completion, row):
    return len(completion) + neighbour.ZERO


def seconds_left(completion, row):
    import resource

    return resource.getrlimit(resource.RLIMIT_CPU)[0] - time.process_time()


def needs_gold(completion, row):
    return float(completion == row["gold"])


needs_gold.columns = ("gold",)


def misbehave(completion, row):
    print("scoring", completion)
    match completion:
        case "raise":
            raise KeyError("gold")
        case "none":
            return None
        case "nan":
            return float("nan")
        case "inf":
            return -float("inf")
        case "string":
            return "1.0"
        case "list":
            return [1.0]
        case "bool":
            return True
        case "hang":
            time.sleep(10_000)
        case "exit":
            os._exit(0)
        case "sys.exit":
            sys.exit(1)
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "interrupt":
            raise KeyboardInterrupt
        case "allocate":
            return len(bytearray(1 << 45))
        case "fork":
            os.fork()
        case "fork and hang":
            if os.fork() == 0:
                time.sleep(10_000)
        case "stdin":
            return float(len(sys.stdin.read()))
        case "grandchild":
            if os.fork() == 0:
                time.sleep(10_000)
            os._exit(3)
        case "child":
            subprocess.Popen(["sleep", "9876"])
            time.sleep(10_000)
        case "modules":
            return sum(m in sys.modules for m in ("torch", "numpy", "grpo"))
    return 0.5


def only_even(completion, row):
    return None if len(completion) % 2 else 4.0


async def waits(completion, row):
    await asyncio.sleep(0.01)
    return 1.0


# --------------------------------------------------------------------------------------------------
# TRL's form: function(completions, **columns)


def trl(completions, answer, **kwargs):
    assert len(kwargs["prompts"]) == len(kwargs["prompt_text"]) == len(completions)
    return [float(c == a) for c, a in zip(completions, answer, strict=False)]


def trl_keywords(prompts, *, completions, answer, level=3):
    return [len(completions) * (c == a) for c, a in zip(completions, answer, strict=False)]


def trl_chat(completions, **kwargs):
    return [len(c[0]["content"]) if c[0]["role"] == "assistant" else 0 for c in completions]


def trl_misbehave(completions, **kwargs):
    for c in completions:
        if c == "raise":
            raise ValueError(c)
        if c == "hang":
            time.sleep(10_000)
        if c == "short":
            return []
    return [None if c == "none" else 1.0 for c in completions]


def trl_dict(completions, **kwargs):
    return dict.fromkeys(range(len(completions)), 1.0)


def trl_string(completions, **kwargs):
    return "1" * len(completions)


def trl_everything(
    prompts, completions, completion_ids, trainer_state, log_extra, log_metric, answer
):
    log_extra("seen", answer)
    log_metric("batch", len(completions))
    assert prompts[0][0]["role"] == "user" and completions[0][0]["role"] == "assistant"
    progress = trainer_state.global_step / trainer_state.max_steps
    return [len(ids) + progress for ids in completion_ids]


def trl_overlong(completion_ids, **kwargs):
    return [-len(ids) for ids in completion_ids]


def trl_only_keywords(**kwargs):
    pairs = zip(kwargs["completions"], kwargs["answer"], strict=False)
    return [float(c == a) for c, a in pairs]


async def trl_waits(completions, **kwargs):
    await asyncio.sleep(0.01)
    return [None if c == "none" else 2.0 for c in completions]


class Scaled:
    def __init__(self, scale):
        self.scale = scale

    def __call__(self, completions, answer, **kwargs):
        return [self.scale * (c == a) for c, a in zip(completions, answer, strict=False)]


trl_object = Scaled(3)


def trl_hint(completions, hint, **kwargs):
    return [float(c == h) for c, h in zip(completions, hint, strict=False)]


class Odd:
    def __str__(self):
        raise ValueError


class Shown:
    def __str__(self):
        return "<object>"


class Kind(enum.IntEnum):
    A = 1


def trl_logs(completions, log_metric, log_extra, **kwargs):
    import numpy
    import torch

    log_metric("numpy", numpy.float32(2.5))
    log_metric("torch", torch.tensor(3))
    log_metric("bool", True)
    log_metric("nan", float("nan"))
    log_metric("list", [1])
    log_metric("text", "word")
    log_metric("none", None)
    log_metric(3, 4)
    log_extra("scalar", 7)
    log_extra("text", "word")
    log_extra("numpy", numpy.array([0.5, 1.5]))
    log_extra("zero", torch.tensor(2.0))
    log_extra("kind", Kind.A)
    log_extra("objects", [Shown(), None])
    log_extra("odd", [Odd()] * 2)
    log_extra("short", [1])
    return [1.0] * len(completions)


# --------------------------------------------------------------------------------------------------
# Neither form, or a form that cannot be seen


def takes_answer(completion, answer):
    return float(completion == answer)


def without_wraps(function):
    def decorated(*args, **kwargs):
        return function(*args, **kwargs)

    return decorated


hidden = without_wraps(trl)


def one_argument(completion):
    return 1.0


constant = 3
