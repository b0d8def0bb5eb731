"""Reward functions for grpo.py, and the processes that run those that may hang or crash.

A reward is a plain function fn(completion: str, row: dict) -> float. `row` is the data row plus what the
trainer adds: "prompt_text" (what the model saw), "prompt_messages" (the chat it came from, None without one),
"completion_ids", "completion_length" and "max_completion_length" (tokens), "finish_reason" ("stop" | "length") and
"trainer_state" ({"global_step": steps done, "max_steps": ...}). None: this reward does not apply to this sample.
Functions written for TRL, fn(completions, **columns), work as they are, `async def` too.

    --reward gsm8k,format:0.2,path/to/file.py:function:0.5

The built-ins run in the trainer, everything else in worker processes with a time and a memory limit: a call
that fails costs its own sample's reward, never the step. Completions are data, written by a model that is
paid for every hole it finds: they are parsed in linear time, never evaluated.
"""

import ast
import asyncio
import contextlib
import faulthandler
import hashlib
import importlib.util
import inspect
import itertools
import linecache
import logging
import math
import operator
import os
import pickle
import pkgutil
import random
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
import unicodedata
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from fractions import Fraction
from multiprocessing.connection import Connection, wait
from types import SimpleNamespace
from typing import NamedTuple

MAX_DIGITS = 1000  # a longer number is no answer; int <-> str conversion is quadratic
MAX_EXPRESSION, MAX_PARENTHESES = 400, 50  # of a countdown answer: nesting must not exhaust the parser's stack
LARGEST_REWARD = 1e15  # and largest weight; beyond this the squares overflow float32
START_LIMIT = 120.0  # seconds that a worker may take to start and to import the reward file

# ----------------------------------------------------------------------------------------------------------
# what the model answered


def opened_by_prompt(row: dict) -> bool:
    """Whether the chat template already wrote `<think>`: the completion begins inside the reasoning."""
    return row.get("prompt_text", "").rstrip().endswith("<think>")


def answer_of(completion: str, row: dict) -> str:
    """The text after the last `</think>`, all of it without reasoning; of that what stands in the last
    `<answer>...</answer>`, if there is one. "" if reasoning or answer are opened and never end."""
    _, closed, text = completion.rpartition("</think>")
    inside, ended, after = text.rpartition("</answer>")
    if "<think>" in text or "<answer>" in after or (not closed and opened_by_prompt(row)):
        return ""
    return (inside.rpartition("<answer>")[2] if ended else text).strip()


BLANK = "\u115f\u1160\u2800\u3164\uffa0"  # letters and a symbol that show nothing
SPECIAL_TOKEN = re.compile(r"<[|\uff5c][^<>]*[|\uff5c]>")  # <|im_end|>, where it is ordinary text to the tokenizer


def is_visible(text: str) -> bool:
    """Whether there is anything to read: a letter, digit, sign or symbol that shows."""
    text = SPECIAL_TOKEN.sub("", text)
    return any(unicodedata.category(char)[0] in "LNPS" and char not in BLANK for char in text)


SIGNS = dict.fromkeys(map(ord, "\u2010\u2011\u2012\u2013\u2014\u2212\ufe58\ufe63\uff0d"), "-")
SIGNS |= {0xD7: "*", 0xB7: "*", 0x22C5: "*", 0x2217: "*", 0xF7: "/", 0x2248: "="}
THIN_SPACE = re.compile(r"(?<=[0-9])(?:\{,\}|,?\\[!,;: ]|[~\xa0\u2009\u202f])(?=[0-9]{3})")  # between thousands
MARKUP = re.compile(
    r"\^\{?\\circ|\\(?:text|math|boxed|left|right)[a-z]{0,2}(?![a-z])|\\[^A-Za-z]|(?<=[A-Za-z])\^\{?[23]|"
    '[*_`"(){}~#%\xb0\xa2$\u20ac\xa3\xa5\u20b9\u20a9\u20bd]|\\[|\\]'
)
NUMBER = r"(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]*)?|\.[0-9]+"  # ASCII digits only
LAST = re.compile(rf"(?:^|(?<=[ =]))([-+]?) ?({NUMBER})(?! ?[+^!?\xb2\xb3])([^0-9]*)$")
LABEL = re.compile(r"(?:[^0-9]*(?:[:=]|\b(?:is|are|US|USD|EUR|GBP|Rs\.?)))?")
NOT_ALONE = re.compile(r"(?:\b(?:not|than|minus)|n't|[0-9][^ :=]*|[-+/^<>]|[0-9][^ ]* (?:and|or|to))$")
LETTERS = "A-Za-z\xb5\u03bc\u03a9\xc0-\u024f"
UNITS = re.compile(rf" ?[-/]? ?[{LETTERS}][-{LETTERS}\xb2\xb3 ./,;:']*|[.,;: ]*")
SCALE = dict(dozen=12, hundred=100, k=10**3, K=10**3, thousand=10**3, grand=10**3, lakh=10**5, M=10**6, mil=10**6)
SCALE |= dict(million=10**6, crore=10**7, bn=10**9, billion=10**9, trillion=10**12)
NO_UNIT = re.compile(  # words that make another number of the one before them, as most single letters do
    r"(?i:and|or|not|but|is|are|to|plus|minus|point|pi|squared|cubed|factorial|hal(?:f|ves)|"
    r"(?:third|fourth|fifth|sixth|eighth|tenth|hundredth|thousandth)s?)|(?![aAmglLsShHdWVNJCFtpo])[A-Za-z]"
)


def exact(text: str) -> Fraction | None:
    """The value of a text that is one number and nothing else, as 1,042 or -3.50."""
    text = text.translate(SIGNS)
    fits = len(text) <= MAX_DIGITS and re.fullmatch(rf"[-+]?(?:{NUMBER})", text)
    return Fraction(text.replace(",", "")) if fits else None


def number_of(text: str, marked: bool) -> Fraction | None:
    """The last number of a text, times the scale after it (5 million). Where the text is marked as the answer, nothing
    but a label may stand before it ("x =", "Total:") and units after it; else its neighbours must leave it alone."""
    text = " ".join(MARKUP.sub(" ", THIN_SPACE.sub(",", text.translate(SIGNS))).split())
    found = LAST.search(text)
    if found is None:
        return None
    before, (sign, digits, after) = text[: found.start()].rstrip(), found.groups()
    if not marked:
        after = re.match(rf" ?[-/]?[{LETTERS}]*", after)[0]
    words = re.findall(rf"[{LETTERS}]+", after)
    scales = [SCALE.get(word, SCALE.get(word.lower().removesuffix("s"))) for word in words]
    another = any(scale is None and NO_UNIT.fullmatch(word) for word, scale in zip(words, scales, strict=True))
    alone = LABEL.fullmatch(before) if marked else not NOT_ALONE.search(before[-40:])
    value = exact(sign + digits) if alone and UNITS.fullmatch(after) and not another else None
    return None if value is None else value * math.prod(scale or 1 for scale in scales)


def last_boxed(text: str) -> str | None:
    r"""The content of the last `\boxed{...}`, braces balanced; None without one, "" if it does not end."""
    _, found, rest = text.rpartition("\\boxed{")
    depth = 1
    for brace in re.finditer(r"[{}]", rest if found else ""):
        depth += 1 if brace[0] == "{" else -1
        if depth == 0:
            return rest[: brace.start()]
    return "" if found else None


def final_number(text: str) -> Fraction | None:
    r"""The one number in the first line after the last `####`, else in the last `\boxed{}`, with nothing but a label
    before it and units after it; without these marks the last number of the text. A mark decides: where it has no such
    number, there is no answer. The rule is the same for completions and for gold answers."""
    _, *marked = re.split("#{4,}", text)
    if marked:
        last = next((part.strip() for part in reversed(marked) if part.strip()), "")
        return number_of(last.partition("\n")[0], marked=True)
    content = last_boxed(text)
    if content is not None:
        return number_of(content, marked=True)
    line = next((line for line in reversed(text.splitlines()) if re.search("[0-9]", line)), "")
    return number_of(re.sub("[!?]", ".", line), marked=False)


# ----------------------------------------------------------------------------------------------------------
# the built-in rewards


def answer_reward(completion: str, row: dict) -> float:
    """1.0 if the answer is row["answer"], as exact text or as a plain number (1,042 == 1042.0), else 0.0."""
    answer, gold = answer_of(completion, row), str(row["answer"]).strip()
    same = answer == gold or (exact(answer) is not None and exact(answer) == exact(gold))
    return float(same and is_visible(answer))


def gsm8k_reward(completion: str, row: dict) -> float:
    """1.0 if the final number is that of row["answer"], which may be a solution with `####`, else 0.0."""
    gold = final_number(str(row["answer"]))
    if gold is None:  # a reward that is 0 whatever the model says would go unnoticed
        raise ValueError("row['answer'] ends on no number")
    return float(final_number(answer_of(completion, row)) == gold)


TAG = re.compile(r"</?[A-Za-z_][A-Za-z0-9_-]*\s*/?>")


def format_reward(completion: str, row: dict) -> float:
    """1.0 for exactly `<think>reasoning</think>answer`, neither empty, no other tags in the answer, else 0.0. One
    `<answer>...</answer>` around the whole answer is allowed, white space around the parts too, and a `<think>` that
    ends the prompt counts. The tags are text, also where they are special tokens of the tokenizer."""
    text = ("<think>" if opened_by_prompt(row) else "") + completion.strip()
    reasoning, _, answer = text.removeprefix("<think>").partition("</think>")
    answer = answer.strip()
    if answer.startswith("<answer>") and answer.endswith("</answer>"):
        answer = answer.removeprefix("<answer>").removesuffix("</answer>")
    tags_right = text.startswith("<think>") and "<think>" not in reasoning and not TAG.search(answer)
    return float(tags_right and is_visible(reasoning) and is_visible(answer))


OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


def evaluate_expression(node: ast.AST) -> Fraction:
    """The exact value of a tree of + - * / over integers. Any other node is a ValueError."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return Fraction(node.value)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -evaluate_expression(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](evaluate_expression(node.left), evaluate_expression(node.right))
    raise ValueError("only + - * / and integers")


FRACTION = re.compile(r"\\[dt]?frac\{([^{}]*)\}\{([^{}]*)\}")
KEYBOARD = SIGNS | str.maketrans("{}[]xX", "()()**")


def countdown_reward(completion: str, row: dict) -> float:
    """1.0 if the answer's last line is an expression of + - * / and brackets that uses each of row["numbers"] exactly
    once and equals row["target"] exactly, else 0. It may end in `= target`."""
    text = answer_of(completion, row).rpartition("\n")[2]
    if len(text) > MAX_EXPRESSION or len(re.findall(r"[({\[]", text)) > MAX_PARENTHESES:
        return 0.0
    for _ in range(text.count("frac")):  # from the innermost outwards
        text = FRACTION.sub(r"((\1)/(\2))", text)
    text = re.sub(r"\\(?:boxed|left|right)(?![a-z])|\\[^A-Za-z]|\$", "", text)
    text = re.sub(r"\\(?:times|cdot)(?![a-z])", "*", text).replace("\\div", "/").translate(KEYBOARD)
    expression, equals, right = (part.strip(" .") for part in text.partition("="))
    if not re.fullmatch(r"[0-9()+*/ -]+", expression):
        return 0.0
    if sorted(map(int, re.findall(r"[0-9]+", expression))) != sorted(map(Fraction, row["numbers"])):
        return 0.0
    try:
        value = evaluate_expression(ast.parse(expression, mode="eval").body)
    except (SyntaxError, ValueError, ZeroDivisionError):
        return 0.0
    return float(value == Fraction(row["target"]) and (not equals or value == exact(right)))


def overlong_reward(completion: str, row: dict) -> float:
    """Soft over-long penalty in [-1, 0] (DAPO, arXiv 2503.14476, eq. 13): 0 up to 80 % of the maximal length
    in tokens, from there linearly down to -1 at the maximum."""
    limit = row["max_completion_length"]
    cache = max(1, round(0.2 * limit))
    return -min(1.0, max(0.0, (row["completion_length"] - (limit - cache)) / cache))


def math_reward(completion: str, row: dict) -> float:
    """1.0 if the answer equals row["answer"] mathematically, by the math-verify library, else 0.0. The library takes 5
    from `4=5`: here all numbers of an equation must be equal. Its SIGALRM limits are off: outside a main thread they
    score silent zeros. The workers have a time limit."""
    from math_verify import parse, verify
    from sympy import And, Eq

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its limits are off
    gold = str(row["answer"])
    gold = parse(gold if "$" in gold or "\\boxed" in gold else f"\\boxed{{{gold}}}", parsing_timeout=None)
    answer = parse(answer_of(completion, row), parsing_timeout=None)
    if not gold:
        raise ValueError("math-verify reads nothing in row['answer']")
    if not verify(gold, answer, timeout_seconds=None):
        return 0.0
    equations = answer[0].atoms(Eq) if isinstance(answer[0], (Eq, And)) else ()
    numbers = [side for equation in equations for side in equation.args if side.is_number]
    return float(all(verify(numbers[0], number, timeout_seconds=None) for number in numbers))


# ----------------------------------------------------------------------------------------------------------
# --reward


@dataclass(frozen=True)
class Reward:
    """One part of the reward: the total of a sample is the sum of weight * part."""

    name: str
    weight: float
    function: Callable
    columns: tuple[str, ...] = ()  # keys that every data row must have
    trusted: bool = False  # True: runs in the trainer's process; False: in a worker
    batched: bool = False  # TRL style: fn(completions, **columns) -> list
    spec: str = ""  # the item of --reward that loads it in a worker
    path: str = ""  # the file it came from, with its text: workers that start later run what the first ones ran
    text: str = ""


BUILT_IN = {
    "answer": Reward("answer", 1.0, answer_reward, ("answer",), trusted=True),
    "gsm8k": Reward("gsm8k", 1.0, gsm8k_reward, ("answer",), trusted=True),
    "format": Reward("format", 1.0, format_reward, trusted=True),
    "countdown": Reward("countdown", 1.0, countdown_reward, ("numbers", "target"), trusted=True),
    "overlong": Reward("overlong", 1.0, overlong_reward, trusted=True),
    "math": Reward("math", 1.0, math_reward, ("answer",)),
}
TRAINER_KEYS = {"prompt_text", "prompt_messages", "completion_ids", "completion_length", "max_completion_length"}
TRAINER_KEYS |= {"finish_reason", "trainer_state"}
TRL_KEYS = {"completions", "prompts", "completion_ids", "trainer_state", "log_extra", "log_metric"}


def load_rewards(spec: str, texts: dict[str, str] | None = None) -> list[Reward]:
    """The rewards that `--reward spec` names: name[:weight] or path/to/file.py:function[:weight], separated by commas.
    Imports those files, or what they once held (path -> text). Whatever is wrong is a ValueError of one line."""
    rewards = []
    for item in map(str.strip, spec.split(",")):
        try:
            rewards.append(_load(item, texts or {}))
        except ValueError as error:
            raise ValueError(f"--reward {item}: {error}") from error.__cause__
    for name, count in Counter(reward.name for reward in rewards).items():
        if count > 1:
            raise ValueError(f"--reward {spec}: two rewards are called {name}")
    return rewards


def sources(rewards: list[Reward]) -> dict[str, str]:
    """The files that rewards come from, as they were read: path -> SHA-256."""
    return {reward.path: hashlib.sha256(reward.text.encode()).hexdigest() for reward in rewards if reward.path}


def _load(item: str, texts: dict[str, str]) -> Reward:
    match = re.fullmatch(r"(?:([^:]+\.py):)?([^:]+)(?::([^:]*))?", item)
    if match is None:
        raise ValueError("expected name[:weight] or path/to/file.py:function[:weight]")
    path, name, weight = match.groups()
    try:
        weight = 1.0 if weight is None else float(weight)
    except ValueError:
        weight = math.nan
    if not abs(weight) <= LARGEST_REWARD:  # nan and inf neither
        raise ValueError("the weight must be a finite number")
    if path:
        module = import_file(path, texts.get(os.path.abspath(os.path.expanduser(path))))
        function, spec = getattr(module, name, None), f"{module.__file__}:{name}"
        if not callable(function) or inspect.isbuiltin(function):
            raise ValueError(f"{module.__file__} has no plain function {name}")
        columns, batched = _read_signature(name, function)
        return Reward(name, weight, function, columns, False, batched, spec, module.__file__, module.__source__)
    if name not in BUILT_IN:
        raise ValueError(f"unknown; known: {', '.join(BUILT_IN)}, path/to/file.py:function")
    if name == "math":
        try:
            math_reward("1", {"answer": "1"})  # loads library and grammar here, not in a worker's first timed call
        except ImportError as error:
            raise ValueError(f"needs pip install 'math-verify[antlr4_13_2]' ({_one_line(error)})") from error
    return replace(BUILT_IN[name], weight=weight, spec=item)


def _read_signature(name: str, function: Callable) -> tuple[tuple[str, ...], bool]:
    """The columns that it needs, and whether it is TRL's kind. Ours is known by the name `row`: fn(completion, answer)
    would get the whole row as its answer."""
    signature = inspect.signature(function)
    kinds = {key: parameter.kind.name for key, parameter in signature.parameters.items()}
    named = [key for key, kind in kinds.items() if not kind.startswith("VAR")]
    batched = not TRL_KEYS.isdisjoint(named)
    needs = [key for key in named if signature.parameters[key].default is inspect.Parameter.empty]
    if not batched and not (len(needs) <= 2 <= len(named) and named[1].startswith(("row", "_"))):
        batched = "VAR_KEYWORD" in kinds.values() and "VAR_POSITIONAL" not in kinds.values()
        if not batched:
            styles = "neither (completion, row), by these names, nor TRL's (completions, **columns)"
            raise ValueError(f"{name}{signature} takes {styles}; a decorator needs functools.wraps")
    needs = getattr(function, "columns", needs if batched else ())  # as fn.columns = ("answer",) says it
    return tuple(key for key in needs if key not in TRAINER_KEYS | TRL_KEYS), batched


def import_file(path: str, text: str | None = None):
    """The module of a Python file, or of the text that it once held: imported once per process and text. It may import
    its neighbours, also where we have a module of that name. Whatever is wrong is a ValueError of one line."""
    path = os.path.abspath(os.path.expanduser(path))
    folder, name, before, others = os.path.dirname(path), "file_" + path.encode().hex(), list(sys.path), {}
    if text is None and not os.path.isfile(path):
        raise ValueError(f"there is no file {path}")
    try:
        if text is None:
            with open(path, "rb") as file:
                text = importlib.util.decode_source(file.read())
        if getattr(sys.modules.get(name), "__source__", None) == text:
            return sys.modules[name]
        module = importlib.util.module_from_spec(importlib.util.spec_from_file_location(name, path))
        module.__source__ = text
        linecache.cache[path] = len(text), None, text.splitlines(True), path  # tracebacks show what ran
        neighbours = {found.name for found in pkgutil.iter_modules([folder])} - sys.stdlib_module_names
        for other in [other for other in sys.modules if other.partition(".")[0] in neighbours]:
            if not str(getattr(sys.modules[other], "__file__", None)).startswith(folder + os.sep):
                others[other] = sys.modules.pop(other)
        sys.path.insert(0, folder)
        sys.modules[name] = module  # before it runs: its dataclasses look themselves up
        exec(compile(text, path, "exec", dont_inherit=True), module.__dict__)
        return module
    except (Exception, SystemExit) as error:
        sys.modules.pop(name, None)
        raise ValueError(f"importing {path} failed: {_one_line(error)}") from error
    finally:
        sys.path[:] = dict.fromkeys([*before, *sys.path])
        sys.modules.update(others)


# ----------------------------------------------------------------------------------------------------------
# one call of a reward function, in the trainer or in a worker


class Outcome(NamedTuple):
    """Of one call. values: one per sample, NaN where the function said None (it does not apply), None where it
    gave no finite number; or None, if the call failed as a whole. cause: see Scorer."""

    values: list[float | None] | None
    cause: str = ""
    message: str = ""
    metrics: dict = {}  # what it logged, as TRL's log_metric and log_extra do: name -> number,
    extra: dict = {}  # column -> a number, a text or None per sample


def call_reward(reward: Reward, completions: list[str], rows: list[dict]) -> Outcome:
    metrics, extra = {}, {}
    try:
        if reward.batched:
            values = reward.function(**_trl_arguments(reward.function, completions, rows, metrics, extra))
        else:
            values = reward.function(completions[0], rows[0])
        values = asyncio.run(values) if inspect.iscoroutine(values) else values
        if not reward.batched:
            values = [values]
        elif values is None or isinstance(values, (dict, set, str, bytes)) or len(values := list(values)) != len(rows):
            return Outcome(None, "invalid", f"not a list of {len(rows)} numbers")
        values = [math.nan if value is None else _number(value) for value in values]
        metrics = {name: value for name, value in metrics.items() if value is not None}
        return Outcome(values, metrics=metrics, extra=extra)
    except MemoryError:
        return Outcome(None, "memory", "MemoryError")
    except (Exception, SystemExit) as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        return Outcome(None, "exception", f"{_one_line(error)} ({os.path.basename(where.filename)}:{where.lineno})")


def _trl_arguments(function, completions: list[str], rows: list[dict], metrics: dict, extra: dict) -> dict:
    """What TRL's trainer passes: each column that any row has as a list; messages where there is a chat."""

    def log_metric(name, value):
        metrics[str(name)] = _number(value)

    def log_extra(column, values):
        several = hasattr(values, "__iter__") and not isinstance(values, (str, bytes, dict))
        with contextlib.suppress(Exception):  # what cannot be logged is not
            values = list(values) if several and getattr(values, "shape", True) else [values] * len(rows)
            extra[str(column)] = [v if type(v) in (str, int, bool, type(None)) else _number(v, str(v)) for v in values]

    chats = [row.get("prompt_messages", row.get("prompt")) for row in rows]
    prompts = [c if isinstance(c, list) else row.get("prompt_text", c) for c, row in zip(chats, rows, strict=True)]
    completions = [
        [{"role": "assistant", "content": text}] if isinstance(prompt, list) else text
        for prompt, text in zip(prompts, completions, strict=True)
    ]
    columns = set().union(*rows) - {"prompt", "prompt_messages", "completion", "trainer_state"}
    arguments = {key: [row.get(key) for row in rows] for key in columns}
    arguments |= dict(prompts=prompts, completions=completions, log_extra=log_extra, log_metric=log_metric)
    arguments |= dict(trainer_state=SimpleNamespace(**rows[0].get("trainer_state", {})))
    parameters = inspect.signature(function).parameters
    any_keyword = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    return {key: value for key, value in arguments.items() if any_keyword or key in parameters}


def _number(value, instead=None):
    """A finite float (also of a NumPy or torch scalar)."""
    try:
        number = math.nan if isinstance(value, (str, bytes)) else float(value)
    except (TypeError, ValueError, OverflowError):
        return instead
    return number if abs(number) <= LARGEST_REWARD else instead  # NaN is not <= anything


def _one_line(error: BaseException) -> str:
    return printable(traceback.format_exception_only(error)[-1])


def printable(text: str) -> str:
    """One line of at most 500 characters for a terminal: a model wrote it, or a file of unknown origin."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in " ".join(text.split())[:500])


# ----------------------------------------------------------------------------------------------------------
# the worker processes: new ones, because the trainer has threads and CUDA, which do not survive a fork; of
# subprocess, because those of multiprocessing import the trainer (torch) again and leave semaphores behind


class Worker:
    """A process that runs reward functions, in a session of its own: Ctrl-C in the trainer's terminal does not
    reach it, and it can be killed with everything that it started."""

    def __init__(self, rewards: list[Reward], timeout: float, memory: int):
        ours, theirs = socket.socketpair()
        self.connection, self.timeout = Connection(ours.detach()), timeout
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # the worker starts so, and stays so
        try:  # by place, whatever else is called reward.py; prints go to stderr, so as not to mix with the trainer's
            command = [sys.executable, os.path.abspath(__file__), "--worker"]
            self.process = subprocess.Popen(command, stdin=theirs, stdout=2, start_new_session=True)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            theirs.close()
        texts = {reward.path: reward.text for reward in rewards if reward.path}
        with contextlib.suppress(OSError):  # it may be dead already: the first job finds out
            specs = [reward.spec for reward in rewards if not reward.trusted]
            self.connection.send((os.getpid(), specs, texts, list(map(str, sys.path)), timeout, memory))

    def begin(self, job: list[int], message: bytes):
        self.job, self.message, self.limit, self.deadline = job, message, START_LIMIT, time.monotonic() + START_LIMIT

    def proceed(self) -> Outcome | None:
        """The outcome of the job, None while it goes on. After "timeout" and "died" the worker is gone."""
        try:
            if self.connection.poll():
                said = self.connection.recv()
                if said != "ready":
                    return Outcome(*said)
                self.connection.send_bytes(self.message)
                self.limit, self.deadline = self.timeout, time.monotonic() + self.timeout
            elif time.monotonic() >= self.deadline:
                raise TimeoutError
            return None
        except (OSError, EOFError) as error:
            code = self.kill()
            if isinstance(error, TimeoutError):
                return Outcome(None, "timeout", f"no result after {self.limit} s")
            return Outcome(None, "died", f"the worker ended with exit code {code}")

    def gone(self) -> bool:
        if self.process.poll() is not None:
            self.kill()  # what it started may still be there
        return self.connection.closed

    def kill(self) -> int:
        if not self.connection.closed:  # else its number may be another's by now
            with contextlib.suppress(OSError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.connection.close()
        return self.process.wait()


def _serve():
    """The main function of a worker: one job after the other until the trainer is gone."""
    connection, worker = Connection(os.dup(0)), os.getpid()
    os.register_at_fork(after_in_child=connection.close)  # else a fork would hide the worker's end
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # a function that reads from stdin gets nothing, not its next job
    sys.stdout = sys.stderr
    try:
        trainer, specs, texts, path, timeout, memory = connection.recv()
        threading.Thread(target=_end_with, args=(trainer,), daemon=True).start()
        sys.path[:] = [*map(os.path.dirname, texts), *path]  # a function may import its neighbours when it is called
        rewards = {spec: load_rewards(spec, texts)[0] for spec in specs}
        with contextlib.suppress(OSError, ValueError), open("/proc/self/statm") as statm:  # macOS has no such limit
            memory += int(statm.read().split()[0]) * resource.getpagesize()  # on top of what the imports took
            resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
        while True:
            connection.send("ready")
            message = connection.recv_bytes()
            # the trainer enforces `timeout`; this ends code that holds the GIL for ever when the trainer is gone
            faulthandler.dump_traceback_later(2 * timeout + 10, exit=True)
            try:
                spec, completions, rows = pickle.loads(message)
                outcome = call_reward(rewards[spec], completions, rows)
            except BaseException as error:  # KeyboardInterrupt, or a row that holds what is not known here
                outcome = Outcome(None, "exception", _one_line(error))
            if os.getpid() != worker:
                os._exit(0)  # the function forked, and this is the child
            faulthandler.cancel_dump_traceback_later()
            connection.send(tuple(outcome))
    except (EOFError, OSError):
        os.killpg(0, signal.SIGKILL)


def _end_with(trainer: int):
    while os.getppid() == trainer:
        time.sleep(1)
    os.killpg(0, signal.SIGKILL)


# ----------------------------------------------------------------------------------------------------------
# scoring


@dataclass
class Scores:
    """What Scorer.score returns. `parts` are not weighted: 0.0 where the call failed, NaN where the reward does
    not apply. A total is NaN if none of the rewards applies to that sample."""

    totals: list[float]  # [samples], sum of weight * part
    parts: dict[str, list[float]]  # name of the reward -> [samples]
    failed: list[bool]  # [samples], whether any part failed; sum(failed) is how many samples
    failures: dict[str, int] = field(default_factory=Counter)  # cause -> number of failed parts
    first_failure: str = ""  # one line for the log: reward, sample, cause, row
    first_retry: str = ""  # one line: a call with many samples failed and they were tried again in smaller calls
    metrics: dict[str, float] = field(default_factory=dict)  # log_metric: the last value, as TRL names it
    extra: dict[str, list] = field(default_factory=dict)  # log_extra: column -> [samples], None where not logged

    @property
    def without_reward(self) -> int:
        """The number of samples to which no reward applies."""
        return sum(map(math.isnan, self.totals))

    def add(self, reward: Reward, job: list[int], outcome: Outcome, rows: list[dict]):
        for i, value in zip(job, outcome.values or [None] * len(job), strict=True):
            if value is None:
                cause, message = outcome.cause or "invalid", outcome.message or "not a finite number"
                self.failed[i] = True
                self.failures[cause] += 1
                row = ", ".join(f"{k}={v!r:.60}" for k, v in rows[i].items() if k not in TRAINER_KEYS)
                line = f"reward {reward.name} failed on sample {i + 1} of {len(rows)}: {cause}: {message}"
                self.first_failure = self.first_failure or f"{line}; row: {printable(row)}"
            self.parts[reward.name][i] = part = 0.0 if value is None else value
            if not math.isnan(part):
                self.totals[i] = reward.weight * part + (0.0 if math.isnan(self.totals[i]) else self.totals[i])
        self.metrics |= outcome.metrics
        for column, logged in outcome.extra.items():
            column = self.extra.setdefault(column, [None] * len(rows))
            for i, value in zip(job, logged, strict=False):
                column[i] = value


class Scorer:
    """Scores completions: built-ins here, other functions in workers that start when they are first needed.

    timeout: seconds for one call of a function, which is killed then. memory: bytes for a worker (Linux).
    Causes of failure: "exception", "invalid" (NaN, inf, a string, a wrong number of values, ...), "timeout",
    "memory" (MemoryError), "died" (os._exit, a crash, the kernel's out-of-memory killer).

    A function of TRL's kind gets all completions in one call, as TRL does (of this rank; the call has one timeout).
    If that fails, it gets those of one prompt at a time, and those that fail still one by one.

    After 8 timeouts in a row or 40 in all (2 or 10 a worker if that is more) the samples not yet tried count as
    "timeout" too. They run in shuffled order: one prompt that hangs does not end the step for the others.
    """

    def __init__(self, rewards: list[Reward], timeout=10.0, workers=4, memory=4 << 30):
        self.rewards, self.timeout, self.workers, self.memory = rewards, timeout, workers, memory
        self.alive = set()

    def score(self, completions: list[str], rows: list[dict]) -> Scores:
        """Scores completions[i] against rows[i]. Whatever a reward function does, this does not raise."""
        n = len(rows)
        scores = Scores([math.nan] * n, {reward.name: [0.0] * n for reward in self.rewards}, [False] * n)
        try:
            for reward in self.rewards:
                if reward.trusted:
                    for i in range(n):
                        scores.add(reward, [i], call_reward(reward, [completions[i]], [rows[i]]), rows)
                else:
                    self._score_in_workers(reward, completions, rows, scores)
        except BaseException:  # the trainer is to stop: nothing goes on behind its back
            self.close()
            raise
        return scores

    def close(self):
        """Ends the workers and everything they started. Scoring again starts new ones."""
        for worker in self.alive:
            worker.kill()
        self.alive.clear()

    def _score_in_workers(self, reward: Reward, completions: list[str], rows: list[dict], scores: Scores):
        shuffled, patience, in_a_row, in_all = random.Random(0).sample, max(8, 2 * self.workers), 0, 0
        jobs = [list(range(len(rows)))] if reward.batched and rows else [[i] for i in range(len(rows))]
        waiting = deque(shuffled(jobs, len(jobs)))
        for job, outcome in self._outcomes(reward, completions, rows, waiting):
            cause, message = outcome.cause, outcome.message
            in_a_row, in_all = (in_a_row + 1, in_all + 1) if cause == "timeout" else (0, in_all)
            if cause and len(job) > 1:
                line = f"reward {reward.name}: a call with {len(job)} samples failed, and they are tried again"
                scores.first_retry = scores.first_retry or f"{line} in smaller calls: {cause}: {message}"
                parts = [list(part) for _, part in itertools.groupby(job, key=lambda i: rows[i].get("prompt_text"))]
                parts = parts if len(parts) > 1 else [[i] for i in job]
                waiting.extend(shuffled(parts, len(parts)))
            else:
                scores.add(reward, job, outcome, rows)
            if in_a_row >= patience or in_all >= 5 * patience:
                given_up = Outcome(None, "timeout", f"given up after {in_all}, {message}")
                scores.add(reward, list(itertools.chain(*waiting)), given_up, rows)
                waiting.clear()

    def _outcomes(self, reward: Reward, completions: list[str], rows: list[dict], waiting: deque):
        """Runs the waiting jobs, to which others may be added, and yields (job, outcome) as they end."""
        running = []
        while waiting or running:
            while waiting and len(running) < self.workers:  # one job a worker: none queues behind a stuck one
                job = waiting.popleft()
                try:
                    call = pickle.dumps((reward.spec, [completions[i] for i in job], [_plain(rows[i]) for i in job]))
                except Exception as error:
                    yield job, Outcome(None, "exception", f"a row cannot be sent to a worker: {_one_line(error)}")
                    continue
                self.alive = {worker for worker in self.alive if worker in running or not worker.gone()}
                idle = self.alive.difference(running)
                running.append(idle.pop() if idle else Worker(self.rewards, self.timeout, self.memory))
                self.alive.add(running[-1])
                running[-1].begin(job, call)
            if running:
                first = min(worker.deadline for worker in running)
                wait([worker.connection for worker in running], max(0.0, first - time.monotonic()))
            for worker in list(running):
                outcome = worker.proceed()
                if outcome:
                    running.remove(worker)
                    yield worker.job, outcome


def _plain(row: dict) -> dict:
    """The row with its token ids as a list: the trainer has an array, and no built-in asks for them."""
    ids = row.get("completion_ids")
    return row | dict(completion_ids=ids.tolist()) if hasattr(ids, "tolist") else row


if __name__ == "__main__":
    _serve()
