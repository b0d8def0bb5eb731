"""The user's code: imports Python files, finds reward functions in them, and calls these.

Workers import this file, so it imports nothing slow, such as torch.
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
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace

from harness.chat import messages_of
from harness.workers import one_line
from reward import BUILT_IN, Reward

LARGEST_REWARD = 1e15  # also of a weight: squares of larger ones overflow float32
TRAINER_KEYS = {  # what the trainer adds to a data row
    "prompt_text",
    "prompt_messages",
    "completion_ids",
    "completion_length",
    "max_completion_length",
    "finish_reason",
    "trainer_state",
    "completion_messages",
    "turns",
    "replies",
}
TRL_KEYS = {
    "completions",
    "prompts",
    "completion_ids",
    "environments",
    "trainer_state",
    "log_extra",
    "log_metric",
}


def reward_row(sample, step: int, cfg) -> dict:
    """What a reward function sees: the data row, and TRAINER_KEYS."""
    row = dict(sample.prompt.row)
    turns = [sample.text]
    replies = []
    if sample.transcript is not None:
        turns = sample.transcript.turns
        replies = sample.transcript.replies
        row["completion_messages"] = messages_of(sample.transcript)
        row["environments"] = sample.transcript  # in a worker: the object of its class
    row.update(
        turns=turns,
        replies=replies,
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
        if match is None:
            expected = "name[:weight] or path/to/file.py:function[:weight]"
            raise ValueError(f"'{item.strip()}': expected {expected}")
        path, name, weight = match.groups(default="")
        if name in rewards:
            raise ValueError(f"two rewards are called {name}")
        rewards[name] = find_reward(name, path)
        if weight:
            rewards[name] = replace(rewards[name], weight=number(float(weight)))
    return list(rewards.values())


def find_reward(name: str, path: str = "", text: str | None = None) -> Reward:
    """A built-in reward if path is empty, else a function from a file, or from its saved text."""
    if path:
        return reward_from_file(name, path, text)
    if name not in BUILT_IN:
        known = ", ".join(BUILT_IN)
        raise ValueError(f"{name} is unknown; known: {known}, path/to/file.py:function")
    reward = BUILT_IN[name]
    if name == "math":  # the first call imports math-verify: do it outside the time limit
        reward.function("1", {"answer": "1"})
    return reward


def reward_from_file(name, path, text) -> Reward:
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

    columns = getattr(function, "columns", ())  # as fn.columns = ("answer",) names them
    if batched:  # the parameters without a default, but for *args and **kwargs
        required = [p for p in signature.parameters.values() if p.default is p.empty]
        columns = [p.name for p in required if not str(p).startswith("*")]
    columns = tuple(key for key in columns if key not in TRAINER_KEYS | TRL_KEYS)
    path, text = module.__file__, module.__source__
    return Reward(
        name,
        1.0,
        function,
        columns,
        reads_objects="environments" in names,
        batched=batched,
        path=path,
        text=text,
    )


def import_file(path: str, text: str | None = None) -> ModuleType:
    """The module of a Python file, or of its saved text. Raises ValueError."""
    path = os.path.abspath(os.path.expanduser(path))
    try:
        if text is None:
            text = Path(path).read_text("utf-8")
        imported = sys.modules.get(path)
        if imported is not None and imported.__source__ == text:
            return imported
        module = ModuleType(path)
        module.__file__ = path
        module.__source__ = None  # not yet: the file may fail
        with neighbours_first(os.path.dirname(path)):
            sys.modules[path] = module  # before the file runs: its dataclasses look for it there
            exec(compile(text, path, "exec"), module.__dict__)
        module.__source__ = text
        return module
    except (Exception, SystemExit) as error:
        raise ValueError(f"importing {path} failed: {one_line(error)}") from error


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


def sources(loaded: list) -> dict[str, str]:
    """The files of rewards and environment (or None), as they were read: path -> SHA-256."""
    files = [x for x in loaded if x is not None and x.path]
    return {x.path: hashlib.sha256(x.text.encode()).hexdigest() for x in files}


# -- Calling


def call_reward(reward: Reward, completions: list[str], rows: list[dict]) -> tuple:
    """Calls the function with all completions (TRL's form) or with the only one (ours).

    Returns the values, one per sample (NaN: does not apply; a text: why the value is a failure),
    and two dicts of what the function logged in TRL's way: name -> number, column -> one text per
    sample. Raises what the function raises.
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
    if len(values) != len(rows):
        raise ValueError(f"{len(values)} rewards for {len(rows)} completions")

    numbers = []
    for value in values:
        if value is None:
            numbers.append(math.nan)
            continue
        try:
            numbers.append(number(value))
        except (TypeError, ValueError, OverflowError):
            numbers.append(f"{value!r:.100} is no finite number")
    return numbers, metrics, extra


def trl_arguments(function, completions, rows, metrics, extra) -> dict:
    """The arguments that TRL's trainer would pass. What the function logs goes to the two dicts."""

    # Values that cannot be logged are left out.
    def log_metric(name, value):
        with contextlib.suppress(Exception):
            metrics[str(name)] = number(value)

    def log_extra(column, values):
        with contextlib.suppress(Exception):
            extra[str(column)] = [str(value) for value, _ in zip(values, rows, strict=True)]

    prompts = [row.get("prompt_messages") or row.get("prompt_text") for row in rows]
    if isinstance(prompts[0], list):  # a chat. As in TRL, the first row decides for all
        messages = [[{"role": "assistant", "content": text}] for text in completions]
        completions = []
        for row, message in zip(rows, messages, strict=True):
            completions.append(row.get("completion_messages", message))

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


def number(value) -> float:
    """The value as a float, also of a scalar of NumPy or torch. Raises an error if not finite."""
    if isinstance(value, str) or not abs(float(value)) <= LARGEST_REWARD:
        raise ValueError(f"{value!r} is no finite number")
    return float(value)
