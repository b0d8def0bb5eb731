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
import contextlib
import faulthandler
import importlib.util
import inspect
import itertools
import logging
import math
import operator
import os
import pickle
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
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from decimal import Decimal
from fractions import Fraction
from types import SimpleNamespace
from typing import NamedTuple

MAX_DIGITS = 1000  # a longer number is no answer; int <-> str conversion is quadratic
MAX_EXPRESSION = 400  # characters of a countdown answer
MAX_PARENTHESES = 50  # so that nesting cannot exhaust the parser's stack
LARGEST_REWARD = 1e15  # and largest weight; beyond this the squares overflow float32
START_LIMIT = 120.0  # seconds that a worker may take to start and to import the reward file

# ----------------------------------------------------------------------------------------------------------
# what the model answered


def opened_by_prompt(row: dict) -> bool:
    """Whether the chat template already wrote `<think>`: the completion begins inside the reasoning."""
    return row.get("prompt_text", "").rstrip().endswith("<think>")


def after_reasoning(completion: str, row: dict) -> str:
    """The text after the last `</think>`; all of it without reasoning; "" if the reasoning never ends."""
    _, closed, answer = completion.rpartition("</think>")
    unfinished = "<think>" in answer or (not closed and opened_by_prompt(row))
    return "" if unfinished else answer.strip()


BLANK = "\u115f\u1160\u2800\u3164\uffa0"  # letters and a symbol that show nothing
SPECIAL_TOKEN = re.compile(r"<[|\uff5c][^<>]*[|\uff5c]>")  # <|im_end|>, where it is ordinary text to the tokenizer


def is_visible(text: str) -> bool:
    """Whether there is anything to read: a letter, digit, sign or symbol that shows."""
    text = SPECIAL_TOKEN.sub("", text)
    return any(unicodedata.category(char)[0] in "LNPS" and char not in BLANK for char in text)


# how LaTeX and typography write what a keyboard has: signs, a degree, spaces; then styles and silent brackets
TYPOGRAPHY = dict.fromkeys(map(ord, "\u2010\u2011\u2012\u2013\u2014\u2212\ufe58\ufe63\uff0d"), "-")
TYPOGRAPHY |= {0xD7: "*", 0xB7: "*", 0x22C5: "*", 0x2217: "*", 0xF7: "/", 0x2248: "="}
LATEX = (
    (r"\^\s*\{?\s*\\circ\s*\}?", "\xb0"),
    (r"\\(?:times|cdot|ast)(?![A-Za-z])", "*"),
    (r"\\div(?![A-Za-z])", "/"),
    (r"\\[,;:\s()\[\]]|~|\\q?quad(?![A-Za-z])", " "),
    (r"\\(?:text(?:bf|it|rm)?|math(?:rm|bf|it|sf)|boldsymbol|mbox|boxed|displaystyle|left|right)(?![A-Za-z])", ""),
    (r"\\!|[{}]|\\(?=[$%])", ""),
)


def plain(text: str) -> str:
    for pattern, replacement in LATEX:
        text = re.sub(pattern, replacement, text)
    return " ".join(text.translate(TYPOGRAPHY).split())


# ASCII digits only, in groups of three or in none
DIGITS = r"(?:(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]{1,3}(?:\ [0-9]{3})+|[0-9]+)(?:\.[0-9]*)?|\.[0-9]+)"
NUMBER = re.compile(rf"[-+]?{DIGITS}", re.VERBOSE)
MONEY = "[$\u20ac\xa3\xa5\u20b9\u20a9\u20bd]"
WORD = r"[A-Za-z\xb5\u03bc\u03a9]+\.?(?:\^[23]|[\xb2\xb3])?"
QUANTITY = re.compile(
    rf"""(?P<sign>[-+]?)\ ?  (?:(?:US|USD|EUR|GBP|Rs\.?)\ ?)? (?:{MONEY}\ ?){{0,2}}  (?P<inner>[-+]?)\ ?
    (?P<digits>{DIGITS})  \ ?(?:(?:{MONEY}|[%\xa2\xb0])\ ?){{0,2}}  (?P<unit>{WORD}(?:[ /*-]{WORD}){{0,5}})?""",
    re.VERBOSE,
)
# words that make another number of the one before them; a single letter does so too, unless it is a usual unit
SCALE = (
    r"(?:hundred|thousand|lakh|crore|dozen|hal[fv]|third|quarter|fourth|fifth|tenth)[a-z]*|[a-z]*illi(?:on|ard)[a-z]*|"
    r"mille?|scores?|squared|cubed|factorial|pi|bn|mn|point|over|plus|minus|times|divided|mod|power"
)
NO_UNIT = re.compile(rf"\b(?:(?i:{SCALE}|and|are|but|is|not|or|to)|(?![aAmglLsShHdWVNJCFt])[A-Za-z])\b")


def to_number(text: str) -> Decimal | None:
    r"""The exact value of a text that is one number and nothing else but currency and units, "-$1,200 per day" or
    "18 \text{ cm}^2"; None for every other: 1/2, 10:45, 5e3, "5 million", "18 or 19"."""
    if len(text) > 2 * MAX_DIGITS:
        return None
    match = QUANTITY.fullmatch(plain(text).strip("*_`()[]\"' ").rstrip("*_`()[]\"' .,;:"))
    if match is None or (match["sign"] and match["inner"]) or NO_UNIT.search(match["unit"] or ""):
        return None
    digits = re.sub("[, ]", "", match["digits"])
    return Decimal(match["sign"] + match["inner"] + digits) if len(digits) <= MAX_DIGITS else None


def last_boxed(text: str) -> str | None:
    r"""The content of the last `\boxed{...}`, braces balanced; None without one, "" if it does not end."""
    _, found, rest = text.rpartition("\\boxed{")
    depth = 1
    for brace in re.finditer(r"[{}]", rest if found else ""):
        depth += 1 if brace[0] == "{" else -1
        if depth == 0:
            return rest[: brace.start()]
    return "" if found else None


def last_number(text: str) -> Decimal | None:
    """The last number of free text. Its neighbours count: 10-7, 1/2 and 5 million are not 7, 2 and 5."""
    line = next((line for line in reversed(text.splitlines()) if re.search("[0-9]", line)), "")
    words = line.translate(TYPOGRAPHY).split()
    last = max((i for i, word in enumerate(words) if re.search("[0-9]", word)), default=0)
    first = last
    while first > 0 and re.fullmatch(rf"(?:[-+*/^=()0-9.,\\]|{MONEY})*[^.,]", words[first - 1]):
        first -= 1
    if last + 1 < len(words) and re.fullmatch(SCALE, words[last + 1].rstrip(".,;:!?"), re.I):
        return None
    return to_number(" ".join(words[first : last + 1]).rpartition("=")[2].rstrip("!?"))


def final_number(text: str) -> Decimal | None:
    r"""The number that a solution ends on, by one rule for completions and gold answers, in training and in
    evaluation: the rest of the line after the last `####`; else the content of the last `\boxed{}`; else the
    last number. The first of these that is there decides: where it is no number, there is no answer."""
    _, marked, rest = text.rpartition("####")
    if marked:
        return to_number(rest.partition("\n")[0].strip().removesuffix("</answer>"))
    content = last_boxed(text)
    return last_number(text) if content is None else to_number(content)


# ----------------------------------------------------------------------------------------------------------
# the built-in rewards


def answer_reward(completion: str, row: dict) -> float:
    """1.0 if the answer is row["answer"], as exact text or as a plain number (1,042 == 1042.0), else 0.0."""
    answer, gold = after_reasoning(completion, row), str(row["answer"]).strip()
    if answer != gold and max(len(answer), len(gold)) <= MAX_DIGITS:
        numbers = [NUMBER.fullmatch(text.translate(TYPOGRAPHY)) for text in (answer, gold)]
        if all(numbers):
            answer, gold = (Decimal(re.sub("[, ]", "", number[0])) for number in numbers)
            return float(answer == gold)
    return float(answer == gold and is_visible(answer))


def gsm8k_reward(completion: str, row: dict) -> float:
    """1.0 if the final number is that of row["answer"], which may be a solution with `####`, else 0.0."""
    gold = final_number(str(row["answer"]))
    if gold is None:  # a reward that is 0 whatever the model says would go unnoticed
        raise ValueError("row['answer'] ends on no number")
    return float(final_number(after_reasoning(completion, row)) == gold)


TAG = re.compile(r"</?[A-Za-z_][A-Za-z0-9_-]*\s*/?>")


def format_reward(completion: str, row: dict) -> float:
    """1.0 for exactly `<think>reasoning</think>answer`, neither empty, no other tags in the answer, else 0.0.
    One `<answer>...</answer>` around the whole answer is allowed. A `<think>` that ends the prompt counts."""
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
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](evaluate_expression(node.left), evaluate_expression(node.right))
    raise ValueError("only + - * / and integers")


def countdown_reward(completion: str, row: dict) -> float:
    """1.0 if the last `<answer>...</answer>` (else the last line) is an expression of + - * / ( ) that uses
    each of row["numbers"] exactly once and equals row["target"] exactly, else 0. It may end in `= target`."""
    text = after_reasoning(completion, row)
    before, closed, _ = text.rpartition("</answer>")
    _, opened, content = before.rpartition("<answer>")
    expression = (content if closed and opened else text[text.rfind("\n") + 1 :]).strip()
    if len(expression) > MAX_EXPRESSION or len(re.findall(r"[(\[]", expression)) > MAX_PARENTHESES:
        return 0.0
    expression = re.sub("[xX]", "*", plain(expression)).replace("[", "(").replace("]", ")")
    expression, equals, right = (part.strip(" $.") for part in expression.partition("="))
    if not re.fullmatch(r"[0-9()+*/ -]+", expression) or (equals and to_number(right) is None):
        return 0.0
    if sorted(map(int, re.findall(r"[0-9]+", expression))) != sorted(map(Fraction, row["numbers"])):
        return 0.0
    try:
        value = evaluate_expression(ast.parse(expression, mode="eval").body)
    except (SyntaxError, ValueError, ZeroDivisionError):
        return 0.0
    return float(value == Fraction(row["target"]) and (not equals or value == Fraction(to_number(right))))


def overlong_reward(completion: str, row: dict) -> float:
    """Soft over-long penalty in [-1, 0] (DAPO, arXiv 2503.14476, eq. 13): 0 up to 80 % of the maximal length
    in tokens, from there linearly down to -1 at the maximum."""
    limit = row["max_completion_length"]
    cache = max(1, round(0.2 * limit))
    return -min(1.0, max(0.0, (row["completion_length"] - (limit - cache)) / cache))


def math_reward(completion: str, row: dict) -> float:
    """1.0 if the answer equals row["answer"] mathematically, by the math-verify library, else 0.0. Its
    SIGALRM limits are off: outside a main thread they score silent zeros. The pool has the time limit."""
    from math_verify import parse, verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its limits are off
    gold = str(row["answer"])
    gold = parse(gold if "$" in gold or "\\boxed" in gold else f"\\boxed{{{gold}}}", parsing_timeout=None)
    answer = parse(after_reasoning(completion, row), parsing_timeout=None)
    if not verify(gold, answer, timeout_seconds=None):
        return 0.0
    # it takes 5 from 4=5: what is left of a relation must be a name (x, f(3)) or equal the answer too
    sides = [] if re.search(RELATION, str(gold[-1])) else re.split(RELATION, str(answer[-1]))[:-1]
    sides = [f"\\boxed{{{side}}}" for side in sides if not re.fullmatch(NAME, side.strip())]
    return float(all(verify(gold, parse(side, parsing_timeout=None), timeout_seconds=None) for side in sides))


RELATION = r"=|\\(?:equiv|neq?|to|(?:[Ll]ong)?[Rr]ightarrow|implies|mapsto)(?![A-Za-z])"
NAME = r"\\?[A-Za-z]+(?:_\{?\w+\}?)?(?:\s*\([^()=]*\))?"

# ----------------------------------------------------------------------------------------------------------
# --reward


@dataclass(frozen=True)
class Reward:
    """One part of the reward: the total of a sample is the sum of weight * part."""

    name: str
    weight: float
    function: Callable
    columns: tuple[str, ...] = ()  # keys that every data row must have
    trusted: bool = False  # True: runs in the trainer's process; False: in the pool
    batched: bool = False  # TRL style: fn(completions, **columns) -> list
    spec: str = ""  # the item of --reward that it came from


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


def load_rewards(spec: str) -> list[Reward]:
    """The rewards that `--reward spec` names: name[:weight] or path/to/file.py:function[:weight], separated
    by commas. Imports those files. Whatever is wrong is a ValueError of one line that begins `--reward`."""
    rewards = [_load(item.strip()) for item in spec.split(",")]
    for name, count in Counter(reward.name for reward in rewards).items():
        if count > 1:
            raise ValueError(f"--reward {spec}: two rewards are called {name}")
    return rewards


def _load(item: str) -> Reward:
    match = re.fullmatch(r"(?:([^:]+\.py):)?([^:]+)(?::([^:]*))?", item)
    if match is None:
        raise ValueError(f"--reward {item}: expected name[:weight] or path/to/file.py:function[:weight]")
    path, name, weight = match.groups()
    try:
        weight = 1.0 if weight is None else float(weight)
    except ValueError:
        weight = math.nan
    if not abs(weight) <= LARGEST_REWARD:  # nan and inf neither
        raise ValueError(f"--reward {item}: the weight must be a finite number")
    if path:
        return _load_file(item, os.path.abspath(path), name, weight)
    if name not in BUILT_IN:
        raise ValueError(f"--reward {item}: unknown; known: {', '.join(BUILT_IN)}, path/to/file.py:function")
    if name == "math":
        try:
            math_reward("1", {"answer": "1"})  # loads library and grammar here, not in a worker's first timed call
        except ImportError as error:
            install = "pip install 'math-verify[antlr4_13_2]'"
            raise ValueError(f"--reward {item}: needs {install} ({_one_line(error)})") from error
    return replace(BUILT_IN[name], weight=weight, spec=item)


def _load_file(item: str, path: str, name: str, weight: float) -> Reward:
    try:
        function = getattr(import_file(path), name, None)
    except ValueError as error:
        raise ValueError(f"--reward {item}: {error}") from error.__cause__
    if not callable(function) or inspect.isbuiltin(function):
        raise ValueError(f"--reward {item}: {path} has no plain function {name}")
    signature = inspect.signature(function)
    named = {key: p for key, p in signature.parameters.items() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
    try:
        batched = not TRL_KEYS.isdisjoint(named) or not signature.bind("completion", {})
    except TypeError:
        batched = _takes_any_keyword(signature)
        if not batched:
            styles = "neither (completion, row) nor TRL's (completions, **columns)"
            raise ValueError(f"--reward {item}: {name}{signature} takes {styles}") from None
    needed = getattr(function, "columns", ())  # a function may say what it needs: fn.columns = ("answer",)
    if batched and not needed:
        needed = [key for key, parameter in named.items() if parameter.default is parameter.empty]
    columns = tuple(key for key in needed if key not in TRAINER_KEYS | TRL_KEYS)
    return Reward(name, weight, function, columns, batched=batched, spec=f"{path}:{name}")


def _takes_any_keyword(signature: inspect.Signature) -> bool:
    return any(parameter.kind is parameter.VAR_KEYWORD for parameter in signature.parameters.values())


def import_file(path: str):
    """The module of a Python file, imported once per process. It may import its neighbours. Whatever is wrong
    with it is a ValueError of one line."""
    path = os.path.abspath(path)
    name = "file_" + re.sub(r"\W", "_", path)
    if name not in sys.modules:
        if not os.path.isfile(path):
            raise ValueError(f"there is no file {path}")
        sys.path.append(os.path.dirname(path))
        spec = importlib.util.spec_from_file_location(name, path)
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module  # before it runs: its dataclasses look themselves up
        try:
            spec.loader.exec_module(module)
        except (Exception, SystemExit) as error:
            del sys.modules[name]
            raise ValueError(f"importing {path} failed: {_one_line(error)}") from error
    return sys.modules[name]


# ----------------------------------------------------------------------------------------------------------
# one call of a reward function, in the trainer or in a worker


class Outcome(NamedTuple):
    """Of one call. values: one per sample, NaN where the function said None (it does not apply), None where it
    gave no finite number; or None, if the call failed as a whole. cause: see Scorer."""

    values: list[float | None] | None
    cause: str = ""
    message: str = ""
    metrics: dict = {}  # what it logged, as TRL's log_metric and log_extra do: name -> value,
    extra: dict = {}  # column -> one value per sample


def call_reward(reward: Reward, completions: list[str], rows: list[dict]) -> Outcome:
    metrics, extra = {}, {}
    try:
        if reward.batched:
            values = reward.function(**_trl_arguments(reward.function, completions, rows, metrics, extra))
        else:
            values = reward.function(completions[0], rows[0])
        if inspect.iscoroutine(values):
            import asyncio  # here, because few need it

            values = asyncio.run(values)
        if not reward.batched:
            values = [values]
        elif values is None or isinstance(values, (dict, set, str, bytes)) or len(values := list(values)) != len(rows):
            return Outcome(None, "invalid", f"not a list of {len(rows)} numbers")
        return Outcome(list(map(_to_float, values)), metrics=metrics, extra=extra)
    except MemoryError:
        return Outcome(None, "memory", "MemoryError")
    except (Exception, SystemExit) as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        return Outcome(None, "exception", f"{_one_line(error)} ({os.path.basename(where.filename)}:{where.lineno})")


def _trl_arguments(function, completions: list[str], rows: list[dict], metrics: dict, extra: dict) -> dict:
    """What TRL's trainer passes: each column as a list; prompts and completions are messages where there is a chat."""
    chats = [row.get("prompt_messages", row.get("prompt")) for row in rows]
    prompts = [c if isinstance(c, list) else row.get("prompt_text", c) for c, row in zip(chats, rows, strict=True)]
    completions = [
        [{"role": "assistant", "content": text}] if isinstance(prompt, list) else text
        for prompt, text in zip(prompts, completions, strict=True)
    ]
    own = ("prompt", "prompt_messages", "completion", "trainer_state")
    arguments = {key: [row.get(key) for row in rows] for key in rows[0] if key not in own}
    arguments |= dict(prompts=prompts, completions=completions, log_extra=extra.__setitem__)
    arguments |= dict(log_metric=metrics.__setitem__, trainer_state=SimpleNamespace(**rows[0].get("trainer_state", {})))
    signature = inspect.signature(function)
    taken = arguments if _takes_any_keyword(signature) else signature.parameters
    return {key: value for key, value in arguments.items() if key in taken}


def _to_float(value) -> float | None:
    if value is None:
        return math.nan
    try:
        number = math.nan if isinstance(value, (str, bytes)) else float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if abs(number) <= LARGEST_REWARD else None  # NaN is not <= anything


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

    def __init__(self, specs: list[str], memory: int):
        self.socket, theirs = socket.socketpair()
        serve = f"import {__name__}; {__name__}._serve({os.getpid()}, {specs!r}, {memory})"
        command = [sys.executable, "-c", f"import sys; sys.path[:] = {sys.path!r}; {serve}"]
        mask = signal.pthread_sigmask(
            signal.SIG_BLOCK, {signal.SIGINT}
        )  # the worker starts with it blocked, and stays so
        try:  # what reward functions print goes to stderr: it must not mix with the trainer's output
            self.process = subprocess.Popen(command, stdin=theirs, stdout=2, start_new_session=True)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            theirs.close()
        self.file = self.socket.makefile("rwb")

    def call(self, spec: str, completions: list[str], rows: list[dict], timeout: float) -> Outcome:
        """What the reward returned, or how the worker ended: after "timeout", "died" and "broken" it is gone."""
        try:
            job = pickle.dumps((spec, completions, rows, timeout))
        except Exception as error:
            return Outcome(None, "exception", f"a row cannot be sent to a worker: {_one_line(error)}")
        begun = False
        try:
            self.socket.settimeout(START_LIMIT)
            self.file.write(job)
            self.file.flush()
            begun = pickle.load(self.file)
            self.socket.settimeout(timeout)
            return pickle.load(self.file)
        except (OSError, EOFError, ValueError, pickle.UnpicklingError) as error:
            code = self.kill()
            if not begun:
                return Outcome(None, "broken", "the workers die before they begin")
            if isinstance(error, TimeoutError):
                return Outcome(None, "timeout", f"no result after {timeout} s")
            return Outcome(None, "died", f"the worker ended with exit code {code}")

    def kill(self) -> int:
        with contextlib.suppress(OSError):
            if self.process.returncode is None:  # else its number may be another's by now
                os.killpg(self.process.pid, signal.SIGKILL)
            self.socket.shutdown(socket.SHUT_RDWR)  # wakes a thread that reads from it
        self.socket.close()
        return self.process.wait()


def _serve(trainer: int, specs: list[str], memory: int):
    """The main function of a worker: one job after the other until the trainer is gone."""
    channel = socket.socket(fileno=os.dup(0))
    file = channel.makefile("rwb")
    os.register_at_fork(after_in_child=lambda: os.close(channel.fileno()))  # else a fork would hide the worker's end
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # a function that reads from stdin gets nothing, not its next job
    sys.stdout = sys.stderr
    threading.Thread(target=_end_with, args=(trainer,), daemon=True).start()
    rewards = {spec: _load(spec) for spec in specs}
    try:
        with open("/proc/self/statm") as statm:  # the limit comes on top of what the imports took
            memory += int(statm.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    except (OSError, ValueError):
        pass  # macOS has no such limit
    worker = os.getpid()
    try:
        while True:
            spec, completions, rows, timeout = pickle.load(file)
            file.write(pickle.dumps(True))  # it has begun
            file.flush()
            # the trainer enforces `timeout`; this ends code that holds the GIL for ever when the trainer is gone
            faulthandler.dump_traceback_later(2 * timeout + 10, exit=True)
            try:
                reply = pickle.dumps(call_reward(rewards[spec], completions, rows))
            except BaseException as error:  # KeyboardInterrupt, or something logged that cannot be sent
                reply = pickle.dumps(Outcome(None, "exception", _one_line(error)))
            if os.getpid() != worker:
                os._exit(0)  # the function forked, and this is the child
            faulthandler.cancel_dump_traceback_later()
            file.write(reply)
            file.flush()
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

    def add(self, reward: Reward, job: list[int], outcome: Outcome, rows: list[dict]):
        values, cause, message, metrics, extra = outcome
        for i, value in zip(job, values or [None] * len(job), strict=True):
            if value is None:
                cause, message = cause or "invalid", message or "not a finite number"
                self.failed[i] = True
                self.failures[cause] += 1
                if not self.first_failure:
                    row = ", ".join(f"{k}={v!r:.60}" for k, v in rows[i].items() if k not in TRAINER_KEYS)
                    where = f"reward {reward.name} failed on sample {i + 1} of {len(rows)}"
                    self.first_failure = f"{where}: {cause}: {message}; row: {printable(row)}"
            self.parts[reward.name][i] = part = 0.0 if value is None else value
            if not math.isnan(part):
                self.totals[i] = reward.weight * part + (0.0 if math.isnan(self.totals[i]) else self.totals[i])
        self.metrics |= metrics
        for column, logged in extra.items():
            column = self.extra.setdefault(column, [None] * len(rows))
            for i, value in zip(job, logged, strict=False):
                column[i] = value


def _plain(row: dict) -> dict:
    """The row with its token ids as a list: the trainer has an array, and no built-in asks for them."""
    ids = row.get("completion_ids")
    return row | dict(completion_ids=ids.tolist()) if hasattr(ids, "tolist") else row


class Scorer:
    """Scores completions: built-ins here, other functions in workers that start when they are first needed.

    timeout: seconds for one call of a function, which is killed then. memory: bytes for a worker (Linux).
    Causes of failure: "exception", "invalid" (NaN, inf, a string, a wrong number of values, ...), "timeout",
    "memory" (MemoryError), "died" (os._exit, a crash, the kernel's out-of-memory killer).

    A function of TRL's kind gets all completions in one call, as TRL does (of this rank; the call has one timeout).
    If that fails, it gets those of one prompt at a time, and those that fail still one by one.

    A function that hangs cannot hold up the step: after 8 timeouts in a row or 40 in all (2 or 10 a worker if
    that is more) the samples not yet tried count as "timeout" too; with 4 workers that is after 2 or 10 times
    `timeout`. Samples run in shuffled order: one prompt that hangs does not end the step for the others.
    A function that is slow but comes back in time is never cut short.
    """

    def __init__(self, rewards: list[Reward], timeout=10.0, workers=4, memory=4 << 30):
        self.rewards, self.timeout, self.workers, self.memory = rewards, timeout, workers, memory
        self.threads = ThreadPoolExecutor(workers)  # each waits for one worker
        self.idle, self.alive = [], set()

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
        self.idle.clear()

    def _score_in_workers(self, reward: Reward, completions: list[str], rows: list[dict], scores: Scores):
        shuffled = random.Random(0).sample
        jobs = [list(range(len(rows)))] if reward.batched and rows else [[i] for i in range(len(rows))]
        waiting, running, in_a_row, in_all = deque(shuffled(jobs, len(jobs))), {}, 0, 0
        patience = max(8, 2 * self.workers)
        while waiting or running:
            while waiting and len(running) < self.workers:  # one job a worker: none queues behind a stuck one
                if not self.idle:
                    self.idle.append(Worker([r.spec for r in self.rewards if not r.trusted], self.memory))
                    self.alive.add(self.idle[-1])
                job, worker = waiting.popleft(), self.idle.pop()
                arguments = (reward.spec, [completions[i] for i in job], [_plain(rows[i]) for i in job], self.timeout)
                running[self.threads.submit(worker.call, *arguments)] = job, worker
            done, _ = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                (job, worker), outcome = running.pop(future), future.result()
                cause, message = outcome.cause, outcome.message
                gone = cause in ("timeout", "died", "broken")
                self.alive.discard(worker) if gone else self.idle.append(worker)
                in_a_row, in_all = (in_a_row + 1, in_all + 1) if cause in ("timeout", "broken") else (0, in_all)
                if cause == "broken":  # no worker had begun this job
                    waiting.appendleft(job)
                elif cause and len(job) > 1:
                    line = f"reward {reward.name}: a call with {len(job)} samples failed, and they are tried again"
                    scores.first_retry = scores.first_retry or f"{line} in smaller calls: {cause}: {message}"
                    by_prompt = itertools.groupby(job, key=lambda i: rows[i].get("prompt_text"))
                    parts = [list(part) for _, part in by_prompt]
                    parts = parts if len(parts) > 1 else [[i] for i in job]
                    waiting.extend(shuffled(parts, len(parts)))
                else:
                    scores.add(reward, job, outcome, rows)
            if waiting and (in_a_row >= patience or in_all >= 5 * patience):
                cause = "timeout" if cause == "timeout" else "died"
                rest = list(itertools.chain(*waiting))
                scores.add(reward, rest, Outcome(None, cause, f"given up after {in_all}, {message}"), rows)
                waiting.clear()
