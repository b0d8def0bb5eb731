"""The user's code: imports Python files, finds reward functions in them, and calls these.

Workers import this room, so it imports nothing that takes time, such as torch.
"""

import asyncio
import contextlib
import hashlib
import inspect
import math
import os
import pkgutil
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace

from harness.workers import InvalidResult, one_line
from reward import BUILT_IN, Reward

LARGEST_REWARD = 1e15  # and largest weight: the squares of larger ones overflow float32
TRAINER_KEYS = {  # what the trainer adds to a data row
    "prompt_text",
    "prompt_messages",
    "completion_ids",
    "completion_length",
    "max_completion_length",
    "finish_reason",
    "trainer_state",
}
TRL_KEYS = {"completions", "prompts", "completion_ids", "trainer_state", "log_extra", "log_metric"}


def reward_row(sample, step: int, cfg) -> dict:
    """What a reward function sees: the data row, and TRAINER_KEYS."""
    row = dict(sample.prompt.row)
    row.update(
        prompt_text=sample.prompt.text,
        prompt_messages=sample.prompt.messages,
        completion_ids=sample.completion_ids.tolist(),
        completion_length=sample.n_sampled,
        max_completion_length=cfg.max_completion_length,
        finish_reason=sample.finish_reason,
        trainer_state=dict(global_step=step - 1, max_steps=cfg.max_steps),
    )
    return row


REWARD_SPEC = re.compile(r"(?:([^:]+\.py):)?([^:]+)(?::([^:]+))?")  # [file.py:]name[:weight]


# -- Loading


def load_rewards(spec: str) -> list[Reward]:
    """The rewards of `--reward spec`. Raises ValueError."""
    rewards = {}
    for item in spec.split(","):
        match = REWARD_SPEC.fullmatch(item.strip())
        weight = None
        if match is not None:
            path, name, weight_text = match.groups(default="")
            weight = number(float(weight_text or 1))
        if weight is None:
            expected = "name[:weight] or path/to/file.py:function[:weight], weight a finite number"
            raise ValueError(f"'{item.strip()}': expected {expected}")
        if name in rewards:
            raise ValueError(f"two rewards are called {name}")
        rewards[name] = replace(find_reward(name, path), weight=weight)
    return list(rewards.values())


def find_reward(name: str, path: str = "", text: str | None = None) -> Reward:
    """A built-in reward if path is empty, else a function from a file, or from its saved text."""
    if path:
        return reward_from_file(name, path, text)
    if name not in BUILT_IN:
        known = ", ".join(BUILT_IN)
        raise ValueError(f"{name} is unknown; known: {known}, path/to/file.py:function")
    reward = BUILT_IN[name]
    if name == "math":  # its first call loads math-verify: here, and in no call with a time limit
        reward.function("1", {"answer": "1"})
    return reward


def reward_from_file(name: str, path: str, text: str | None) -> Reward:
    module = import_file(path, text)
    function = getattr(module, name, None)
    if not callable(function):
        raise ValueError(f"{module.__file__} has no plain function {name}")

    # fn(completion, answer) would get the whole row as its answer, so the name `row` is required.
    signature = inspect.signature(function)
    names = list(signature.parameters)
    takes_row = len(names) > 1 and names[1].startswith(("row", "_"))
    batched = not TRL_KEYS.isdisjoint(names) or str(signature).startswith("(**")
    if not takes_row and not batched:
        styles = "neither (completion, row), by these names, nor TRL's (completions, **columns)"
        raise ValueError(f"{name}{signature} takes {styles}; a decorator needs functools.wraps")

    columns = getattr(function, "columns", None)  # as fn.columns = ("answer",) names them
    if columns is None:
        columns = []
        if batched:
            columns = [name for name in names if is_required(signature.parameters[name])]
    columns = tuple(key for key in columns if key not in TRAINER_KEYS | TRL_KEYS)
    return Reward(
        name,
        weight=1.0,
        function=function,
        columns=columns,
        batched=batched,
        path=module.__file__,
        text=module.__source__,
    )


def is_required(parameter: inspect.Parameter) -> bool:
    variable = str(parameter).startswith("*")  # *args or **kwargs
    return parameter.default is parameter.empty and not variable


def import_file(path: str, text: str | None = None) -> ModuleType:
    """The module of a Python file, or of its saved text. Raises ValueError."""
    path = os.path.abspath(os.path.expanduser(path))
    name = "file_" + os.fsencode(path).hex()
    try:
        if text is None:
            text = Path(path).read_text("utf-8")
        if getattr(sys.modules.get(name), "__source__", None) == text:
            return sys.modules[name]
        module = ModuleType(name)
        module.__file__ = path
        module.__source__ = text
        with neighbours_first(os.path.dirname(path)):
            sys.modules[name] = module  # before the file runs: its dataclasses look for it there
            # optimize=0: the file keeps its docstrings and assertions under python -OO, too.
            code = compile(text, path, "exec", dont_inherit=True, optimize=0)
            exec(code, module.__dict__)
        return module
    except (Exception, SystemExit) as error:
        sys.modules.pop(name, None)
        why = one_line(error)
        if sys.flags.optimize > 1:
            why += " (python -OO removes the docstrings of libraries: try without it)"
        raise ValueError(f"importing {path} failed: {why}") from error


@contextlib.contextmanager
def neighbours_first(folder: str):
    """Lets imports find this folder's modules first, even if others of their names are imported."""
    neighbours = {module.name for module in pkgutil.iter_modules([folder])}
    neighbours -= sys.stdlib_module_names
    hidden = {}
    for name in list(sys.modules):
        if name.partition(".")[0] in neighbours:
            hidden[name] = sys.modules.pop(name)
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        sys.path.remove(folder)
        sys.path.append(folder)  # for imports that the file's functions make later
        sys.modules.update(hidden)


def sources(rewards: list[Reward]) -> dict[str, str]:
    """The files that rewards come from, as they were read: path -> SHA-256."""
    hashes = {}
    for reward in rewards:
        if reward.path:
            hashes[reward.path] = hashlib.sha256(reward.text.encode()).hexdigest()
    return hashes


# -- Calling


def load_in_worker(rewards: list[tuple]) -> dict[str, Callable]:
    """What a worker calls: {name of the reward: function of (completions, rows)}."""
    functions = {}
    for name, path, text in rewards:
        functions[name] = partial(call_reward, find_reward(name, path, text))
        if path:
            sys.path.insert(0, os.path.dirname(path))  # for imports that a call makes
    return functions


def call_reward(reward: Reward, completions: list[str], rows: list[dict]) -> tuple:
    """Calls the function with all completions (TRL's form) or with the only one (ours).

    Returns the values, one per sample (NaN: does not apply, None: not a finite number), and two
    dicts of what the function logged in TRL's way: name -> number, column -> one entry per sample.
    Raises what the function raises, and InvalidResult.
    """
    metrics, extra = {}, {}
    if reward.batched:
        arguments = trl_arguments(reward.function, completions, rows, metrics, extra)
        values = reward.function(**arguments)
    else:
        values = reward.function(completions[0], rows[0])
    if inspect.iscoroutine(values):
        values = asyncio.run(values)
    if not reward.batched:
        values = [values]
    if isinstance(values, (dict, set, str)) or len(values) != len(rows):
        raise InvalidResult(f"not a list of {len(rows)} numbers")

    numbers = []
    for value in values:
        if value is None:
            numbers.append(math.nan)
        else:
            numbers.append(number(value))
    return numbers, metrics, extra


def trl_arguments(
    function: Callable, completions: list[str], rows: list[dict], metrics: dict, extra: dict
) -> dict:
    """The arguments that TRL's trainer would pass. What the function logs goes to the two dicts."""

    def log_metric(name, value):
        metrics[str(name)] = number(value)

    def log_extra(column, values):
        with contextlib.suppress(Exception):  # values that cannot be logged are left out
            extra[str(column)] = [loggable(value) for value in values]

    prompts = [row.get("prompt_messages") or row.get("prompt_text") for row in rows]
    if isinstance(prompts[0], list):  # a chat. As in TRL, the first row decides for all
        completions = [[{"role": "assistant", "content": text}] for text in completions]

    arguments = {}
    for key in set().union(*rows):
        arguments[key] = [row.get(key) for row in rows]
    arguments.update(
        prompts=prompts,
        completions=completions,
        trainer_state=SimpleNamespace(**rows[0].get("trainer_state", {})),
        log_metric=log_metric,
        log_extra=log_extra,
    )
    signature = inspect.signature(function)
    if "**" in str(signature):
        return arguments
    return {name: arguments[name] for name in signature.parameters if name in arguments}


def loggable(value) -> float | str | None:
    if value is None:
        return None
    as_number = number(value)
    if as_number is None:
        return str(value)
    return as_number


def number(value) -> float | None:
    """A finite float, also from a scalar of NumPy or torch. None for anything else."""
    if isinstance(value, (str, bytes)):
        return None
    try:
        value = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    if abs(value) <= LARGEST_REWARD:  # never true for NaN
        return value
    return None
