"""Reward functions for grpo.py. harness/workers.py runs those that may hang or crash.

A reward is a function fn(completion: str, row: dict) -> float, or None where it does not apply. `row` is the data row
plus TRAINER_KEYS. Functions written for TRL, fn(completions, **columns), work as they are, `async def` too.
Completions are data, written by a model that is paid for every hole it finds: they are parsed in linear time.
"""

import ast
import asyncio
import contextlib
import hashlib
import inspect
import logging
import math
import operator
import os
import pkgutil
import re
import sys
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from fractions import Fraction
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import NamedTuple

LARGEST_REWARD = 1e15  # and largest weight; beyond this the squares overflow float32
TRAINER_KEYS = {
    "prompt_text",
    "prompt_messages",
    "completion_ids",
    "completion_length",
    "max_completion_length",
}
TRAINER_KEYS |= {"finish_reason", "trainer_state"}
TRL_KEYS = {"completions", "prompts", "completion_ids", "trainer_state", "log_extra", "log_metric"}


def with_prefill(completion: str, row: dict) -> str:
    """The completion, after the `<think>` that the chat template may already have written."""
    return "<think>" * row.get("prompt_text", "").rstrip().endswith("<think>") + completion


def answer_of(completion: str, row: dict) -> str:
    """What follows the last `</think>`, and in it the last `<answer>...</answer>`. "" if one never ends."""
    text = with_prefill(completion, row).rpartition("</think>")[2]
    inside, ended, after = text.rpartition("</answer>")
    if "<think>" in text or "<answer>" in after:
        return ""
    return (inside.rpartition("<answer>")[2] if ended else text).strip()


def is_visible(text: str) -> bool:
    text = re.sub(
        r"<[|\uff5c][^<>]*[|\uff5c]>", "", text
    )  # <|im_end|>, where it is ordinary text to the tokenizer
    return any(char.isprintable() and not char.isspace() for char in text)


SIGNS = str.maketrans(
    "\u2010\u2011\u2012\u2013\u2014\u2212\xd7\xb7\u22c5\u2217\xf7\u2248", "------****/="
)
THIN_SPACE = re.compile(
    r"(?<=[0-9])(?:\{,\}|,?\\[!,;: ]|[~\xa0\u2009\u202f])(?=[0-9]{3})"
)  # between thousands
MARKUP = re.compile(
    r"\^\{?\\circ|\\(?:text|math|boxed|left|right)[a-z]{0,2}(?![a-z])|\\[^A-Za-z]|(?<=[A-Za-z])\^\{?[23]|"
    '[][*_`"(){}~#%\xb0\xa2$\u20ac\xa3\xa5\u20b9]'
)
# ASCII digits only, and not too many: what turns them into a number takes quadratic time
NUMBER = r"[-+]? ?(?:(?:[0-9]{1,3}(?:,[0-9]{3}){1,300}|[0-9]{1,1000})(?:\.[0-9]{0,1000})?|\.[0-9]{1,1000})"
LAST = re.compile(rf"(?:^|(?<=[ =]))({NUMBER})(?! ?[+^!?\xb2\xb3])([^0-9]*)$")
NOT_ALONE = re.compile(
    r"(?:\b(?:not|than|minus)|n't|[0-9][^ :=]*|[-+/^<>]|\\[a-z]+|[0-9][^ ]* (?:and|or|to))$"
)
NO_UNIT = re.compile(  # words that make another number of the one before them, as most single letters do
    r"\b(?:(?i:and|or|not|but|is|are|to|plus|minus|point|pi|squared|cubed|factorial|hal(?:f|ves)|dozen|hundred|thousand|"
    r"grand|lakh|crore|mil|bn|[mbtr]+illions?|(?:third|fourth|fifth|sixth|eighth|tenth|hundredth|thousandth)s?)|"
    r"(?![aAmglLsShHdWVNJCFtpo])[A-Za-z])\b|[^\W\dA-Za-z\xb5\xb2\xb3\xc0-\u024f\u03bc\u03a9]|^-(?![A-Za-z])"
)
BOXED = re.compile(r"\\boxed\{((?:[^{}]|\{[^{}]*\})*)\}")
FORMAT = re.compile(
    r"(?s)<think>((?:(?!</?think>).)*)</think>\s*(<answer>)?((?:(?!</?[A-Za-z_][A-Za-z0-9_-]*\s*/?>).)*)(?(2)</answer>)"
)
OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
OPERATORS |= {ast.USub: operator.neg}
FRACTION = re.compile(r"\\[dt]?frac\{([^{}]*)\}\{([^{}]*)\}")


def exact(text: str) -> Fraction | None:
    """The value of a text that is one number and nothing else, as 1,042 or -3.50."""
    text = text.translate(SIGNS)
    return Fraction(re.sub("[, ]", "", text)) if re.fullmatch(NUMBER, text) else None


def final_number(text: str) -> Fraction | None:
    r"""The only number of the line after the last `####`, else in the last `\boxed{}`; without them the text's last
    number. None if its neighbours do not leave it alone."""
    _, marked, line = text.rpartition("####")
    if marked:
        text = line.strip().partition("\n")[0]
    elif marked := "\\boxed{" in text:
        boxed = BOXED.match(text, text.rindex("\\boxed{"))
        text = boxed[1] if boxed else ""
    else:
        text = re.sub("[!?]", ".", text)
    text = " ".join(MARKUP.sub(" ", THIN_SPACE.sub(",", text.translate(SIGNS))).split())
    found = LAST.search(text)
    before = text[: found.start()].rstrip() if found else ""
    if not found or NOT_ALONE.search(before[-40:]) or (marked and re.search("[0-9]", before)):
        return None
    digits, after = found.groups()
    return (
        None
        if NO_UNIT.search(after if marked else re.match(r" ?[-/]?\w*", after)[0])
        else exact(digits)
    )


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


def format_reward(completion: str, row: dict) -> float:
    """1.0 for exactly `<think>reasoning</think>answer` without other tags, else 0.0."""
    found = FORMAT.fullmatch(with_prefill(completion.strip(), row))
    return float(found is not None and is_visible(found[1]) and is_visible(found[3]))


def countdown_reward(completion: str, row: dict) -> float:
    """1.0 if the answer's last line uses each of row["numbers"] once to make row["target"], else 0.0."""

    def value_of(node: ast.AST) -> Fraction:
        if isinstance(node, ast.Constant):
            return Fraction(node.value)
        parts = [node.operand] if isinstance(node, ast.UnaryOp) else [node.left, node.right]
        return OPERATORS[type(node.op)](*map(value_of, parts))

    text = answer_of(completion, row).rpartition("\n")[2].translate(SIGNS)
    for _ in range(4):  # from the innermost outwards
        text = FRACTION.sub(r"((\1)/(\2))", text)
    text = re.sub(r"\\boxed|\\[()\[\]]|\$", "", text.replace(r"\times", "*").replace(r"\cdot", "*"))
    expression, equals, right = (part.strip(" .") for part in text.partition("="))
    expression = expression.translate(str.maketrans("{}[]", "()()"))
    if len(text) > 400 or not re.fullmatch(
        r"[0-9()+*/ -]+", expression
    ):  # nesting must not exhaust the parser's stack
        return 0.0
    if sorted(map(int, re.findall("[0-9]+", expression))) != sorted(map(Fraction, row["numbers"])):
        return 0.0
    try:
        value = value_of(ast.parse(expression, mode="eval").body)
    except (
        SyntaxError,
        AttributeError,
        LookupError,
        ZeroDivisionError,
        RecursionError,
        MemoryError,
    ):
        return 0.0
    return float(
        value == Fraction(row["target"]) and (not equals or value == exact(right.strip("}")))
    )


def overlong_reward(completion: str, row: dict) -> float:
    """In [-1, 0] (DAPO, arXiv 2503.14476, eq. 13): 0 up to 80 % of the maximal length, then linearly down to -1."""
    limit = row["max_completion_length"]
    cache = max(1, round(0.2 * limit))
    return -min(1.0, max(0.0, (row["completion_length"] - (limit - cache)) / cache))


def math_reward(completion: str, row: dict) -> float:
    """1.0 if the answer is row["answer"] by math-verify, else 0.0. It takes 5 from `4=5`: here both sides count."""
    from math_verify import parse, verify
    from sympy import And, Eq

    logging.getLogger("math_verify").setLevel(
        logging.ERROR
    )  # it warns that its SIGALRM limits are off
    gold = str(row["answer"])
    gold = parse(
        gold if "$" in gold or "\\boxed" in gold else f"\\boxed{{{gold}}}", parsing_timeout=None
    )
    answer = parse(answer_of(completion, row), parsing_timeout=None)
    if not gold:
        raise ValueError("math-verify reads nothing in row['answer']")
    if not verify(gold, answer, timeout_seconds=None):
        return 0.0
    equations = answer[0].atoms(Eq) if isinstance(answer[0], (Eq, And)) else ()
    numbers = [side for equation in equations for side in equation.args if side.is_number]
    return float(all(verify(numbers[0], number, timeout_seconds=None) for number in numbers))


@dataclass(frozen=True)
class Reward:  # one part of it: the total of a sample is the sum of weight * part
    name: str
    weight: float
    function: Callable
    columns: tuple[str, ...] = ()  # keys that every data row must have
    trusted: bool = False  # True: runs in the trainer's process; False: in a worker
    batched: bool = False  # TRL style: fn(completions, **columns) -> list
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


def load_rewards(spec: str) -> list[Reward]:
    """The rewards of `--reward spec`. Errors are ValueErrors."""
    rewards = {}
    for item in map(str.strip, spec.split(",")):
        match = re.fullmatch(r"(?:([^:]+\.py):)?([^:]+)(?::([^:]+))?", item)
        path, name, weight = match.groups() if match else (None, "", None)
        if number(float(weight or 1)) is None or not name:
            expected = "name[:weight] or path/to/file.py:function[:weight], weight a finite number"
            raise ValueError(f"'{item}': expected {expected}")
        if name in rewards:
            raise ValueError(f"two rewards are called {name}")
        rewards[name] = replace(find_reward(name, path), weight=float(weight or 1))
    return list(rewards.values())


def find_reward(name: str, path: str | None = None, text: str | None = None) -> Reward:
    """A built-in reward, or a function of a file or of its earlier text. Our kind is known by the name `row`:
    fn(completion, answer) would get the whole row as its answer."""
    if not path:
        if name not in BUILT_IN:
            raise ValueError(
                f"{name} is unknown; known: {', '.join(BUILT_IN)}, path/to/file.py:function"
            )
        if name == "math":
            math_reward(
                "1", {"answer": "1"}
            )  # loads library and grammar here, not in a worker's first timed call
        return BUILT_IN[name]
    module = import_file(path, text)
    function = getattr(module, name, None)
    if not callable(function):
        raise ValueError(f"{module.__file__} has no plain function {name}")
    signature = inspect.signature(function)
    batched = str(signature).startswith("(**") or not TRL_KEYS.isdisjoint(signature.parameters)
    if not batched and not "".join([*signature.parameters][1:2]).startswith(("row", "_")):
        styles = "neither (completion, row), by these names, nor TRL's (completions, **columns)"
        raise ValueError(f"{name}{signature} takes {styles}; a decorator needs functools.wraps")
    needs = [
        p.name for p in signature.parameters.values() if p.default is p.empty and "*" not in str(p)
    ]
    columns = getattr(
        function, "columns", needs if batched else ()
    )  # as fn.columns = ("answer",) says it
    columns = tuple(key for key in columns if key not in TRAINER_KEYS | TRL_KEYS)
    return Reward(name, 1.0, function, columns, False, batched, module.__file__, module.__source__)


def import_file(path: str, text: str | None = None) -> ModuleType:
    """The module of a Python file, or of its earlier text. It may import its neighbours, before modules of ours."""
    path = os.path.abspath(os.path.expanduser(path))
    folder, name, before, others = (
        os.path.dirname(path),
        "file_" + path.encode().hex(),
        list(sys.path),
        {},
    )
    try:
        text = Path(path).read_text("utf-8") if text is None else text
        if getattr(sys.modules.get(name), "__source__", None) == text:
            return sys.modules[name]
        module = ModuleType(name)
        module.__file__, module.__source__ = path, text
        neighbours = {
            found.name for found in pkgutil.iter_modules([folder])
        } - sys.stdlib_module_names
        others = {
            m: sys.modules.pop(m) for m in list(sys.modules) if m.partition(".")[0] in neighbours
        }
        sys.path.insert(0, folder)
        sys.modules[name] = module  # before it runs: its dataclasses look themselves up
        exec(compile(text, path, "exec", dont_inherit=True), module.__dict__)
        return module
    except (Exception, SystemExit) as error:
        sys.modules.pop(name, None)
        raise ValueError(f"importing {path} failed: {one_line(error)}") from error
    finally:
        sys.path[:] = dict.fromkeys([*before, *sys.path])
        sys.modules.update(others)


def sources(rewards: list[Reward]) -> dict[str, str]:
    """The files that rewards come from, as they were read: path -> SHA-256."""
    return {
        reward.path: hashlib.sha256(reward.text.encode()).hexdigest()
        for reward in rewards
        if reward.path
    }


class Outcome(NamedTuple):  # of one call of a reward function, in the trainer or in a worker
    values: (
        list[float | None] | None
    )  # one per sample: NaN: does not apply, None: failed; None: all of them did
    cause: str = "invalid"  # why
    message: str = "not a finite number"
    metrics: dict = {}  # what it logged, as TRL's log_metric and log_extra do: name -> number or None,
    extra: dict = {}  # column -> a number, a text or None per sample


def call_reward(reward: Reward, completions: list[str], rows: list[dict]) -> Outcome:
    metrics, extra = {}, {}
    try:
        trl = (
            _trl_arguments(reward.function, completions, rows, metrics, extra)
            if reward.batched
            else {}
        )
        values = (
            reward.function(**trl) if reward.batched else reward.function(completions[0], rows[0])
        )
        values = asyncio.run(values) if inspect.iscoroutine(values) else values
        values = values if reward.batched else [values]
        if isinstance(values, (dict, set, str)) or len(values) != len(rows):
            return Outcome(None, message=f"not a list of {len(rows)} numbers")
        return Outcome(
            [math.nan if v is None else number(v) for v in values], metrics=metrics, extra=extra
        )
    except (Exception, SystemExit) as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        cause = "memory" if isinstance(error, MemoryError) else "exception"
        return Outcome(
            None, cause, f"{one_line(error)} ({os.path.basename(where.filename)}:{where.lineno})"
        )


def _trl_arguments(
    function, completions: list[str], rows: list[dict], metrics: dict, extra: dict
) -> dict:
    """What TRL's trainer passes: each column that any row has as a list; messages where there is a chat."""

    def log_extra(column, values):
        with contextlib.suppress(Exception):  # what cannot be logged is not
            extra[str(column)] = [
                None if v is None else str(v) if number(v) is None else number(v) for v in values
            ]

    arguments = {key: [row.get(key) for row in rows] for key in set().union(*rows)}
    prompts = [row.get("prompt_messages") or row.get("prompt_text") for row in rows]
    if isinstance(prompts[0], list):  # as there, the first row decides
        completions = [[{"role": "assistant", "content": text}] for text in completions]
    state = SimpleNamespace(**rows[0].get("trainer_state", {}))
    arguments |= dict(
        prompts=prompts, completions=completions, trainer_state=state, log_extra=log_extra
    )
    arguments["log_metric"] = lambda name, value: metrics.update({str(name): number(value)})
    signature = inspect.signature(function)
    return {
        k: v for k, v in arguments.items() if k in signature.parameters or "**" in str(signature)
    }


@dataclass
class Scores:
    totals: list[float]  # [samples], sum of weight * part; NaN where no reward applies
    parts: dict[
        str, list[float]
    ]  # name of the reward -> [samples]; 0.0 where it failed, NaN where it does not apply
    failed: list[bool]  # [samples], whether any part failed; sum(failed) is how many samples
    failures: Counter = field(default_factory=Counter)  # cause -> number of failed parts
    first_failure: str = ""  # one line for the log: reward, sample or call, cause, row
    metrics: dict[str, float] = field(
        default_factory=dict
    )  # log_metric: the last value, as TRL names it
    extra: dict[str, list] = field(
        default_factory=dict
    )  # log_extra: column -> [samples], None where not logged

    def add(self, reward: Reward, job: list[int], outcome: Outcome, rows: list[dict]):
        for i, part in zip(job, outcome.values or [None] * len(job), strict=True):
            if part is None:
                part, self.failed[i] = 0.0, True
                self.failures[outcome.cause] += 1
                row = ", ".join(
                    f"{k}={v!a:.60}" for k, v in rows[i].items() if k not in TRAINER_KEYS
                )
                line = f"reward {reward.name} failed on sample {i + 1} of {len(rows)}: {outcome.cause}: "
                self.first_failure = (
                    self.first_failure or f"{line}{outcome.message}; row: {row[:500]}"
                )
            self.parts[reward.name][i] = part
            if not math.isnan(part):
                self.totals[i] = reward.weight * part + (
                    0.0 if math.isnan(self.totals[i]) else self.totals[i]
                )
        self.metrics |= outcome.metrics
        for column, logged in outcome.extra.items():
            for i, value in zip(job, logged, strict=False):
                self.extra.setdefault(column, [None] * len(rows))[i] = value


def number(value) -> float | None:
    """A finite float (also of a NumPy or torch scalar), or None."""
    with contextlib.suppress(TypeError, ValueError, OverflowError):
        if (
            not isinstance(value, (str, bytes)) and abs(float(value)) <= LARGEST_REWARD
        ):  # NaN is not <= anything
            return float(value)


def one_line(error: BaseException) -> str:
    """For a terminal: whose words these are is not known."""
    return ascii(f"{type(error).__name__}: {error}")[1:-1][:500]
