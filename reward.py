"""The built-in reward functions, and how those of your own files are loaded and called.

A reward function is fn(completion: str, row: dict) -> float; None: it does not apply. `row` is the
row of the data file with prompt_text, prompt_messages, completion_ids, completion_length,
max_completion_length, finish_reason and trainer_state; in episodes also turns, replies,
completion_messages and environments. TRL's form, fn(completions, **columns), works unchanged.
The built-in functions read the form of an answer, not its words: "not 18" says 18. They raise
ValueError if no completion can earn the reward of a row. Your own functions may be async."""

import asyncio
import builtins
import inspect
import logging
import math
import os
import re
import sys
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from decimal import Decimal
from fractions import Fraction
from functools import cache, partial
from importlib import import_module
from importlib.util import spec_from_file_location
from numbers import Real
from pathlib import Path
from signal import ITIMER_REAL, SIGALRM, setitimer, signal
from threading import Thread, current_thread, main_thread
from types import NoneType, SimpleNamespace
from typing import NamedTuple


# -- The built-in reward functions
def answer_reward(completion, row):
    """1.0 if the answer is row["answer"], as exact text or as a plain number (1,042 is 1042.0)."""
    gold = as_text(row["answer"]).translate(SIGNS)
    if not gold or answer_of(gold, {}) != gold:
        raise ValueError(f"no completion can have the answer {gold!r}")
    answer = answer_of(completion, row).translate(SIGNS)
    return float(value_of(answer) == value_of(gold))


def gsm8k_reward(completion, row):
    """1.0 if the final number is that of row["answer"], which may be a solution with `####`."""
    gold = final_number(as_text(row["answer"]))
    if gold is None:
        raise ValueError("row['answer'] has no final number")
    return float(final_number(answer_of(completion, row)) == gold)


def math_reward(completion, row):
    """1.0 if math-verify finds the answer equal to row["answer"]; rational numbers exactly."""
    gold, answer = readable(as_text(row["answer"])), readable(answer_of(completion, row))
    if not re.search(r"(?<!\\)\$|\\boxed", gold):
        gold = f"\\boxed{{{gold}}}"
    shown = last_formula(answer)
    if BOX.search(answer):
        answer = f"\\boxed{{{shown}}}"  # no other one counts. "": it is never closed
    for given, expected in zip(words_of(shown), words_of(last_formula(gold)), strict=True):
        if given and expected and given[: len(expected)] != expected:
            return 0.0  # an answer without a unit, or a gold without one, may be right
    bare = tuple(re.sub(r"\\?%|percent", "", text) for text in (gold, answer))  # 25 % is 25, too
    return float(any(are_equal(*pair) for pair in {(gold, answer), bare}))


def format_reward(completion, row):
    """1.0 for exactly `<think>words</think>words`, also with <answer> tags around the answer."""
    text = with_prefill(completion.strip(), row)
    return float(re.fullmatch(FORMAT, " ".join(text.split())) is not None)


def countdown_reward(completion, row):
    """1.0 if the last line makes row["target"] of all row["numbers"], by + - * / and ()."""
    target = Fraction(as_text(row["target"]))
    numbers = sorted(map(str, row["numbers"]))
    if not "".join(numbers).isdecimal():
        raise ValueError("row['numbers'] must be a list of whole numbers")
    line = answer_of(completion, row).rpartition("\n")[2].translate(SIGNS)
    expression = line.partition("=")[0].strip(" .*`")
    if re.fullmatch(ARITHMETIC, expression) and sorted(re.findall("[0-9]+", expression)) == numbers:
        with suppress(Exception):  # Python may run it: it has no names, no powers and little depth
            return float(eval(re.sub("([0-9]+)", r"Fraction(\1)", expression)) == target)
    return 0.0


def overlong_reward(completion, row):
    """0.0 up to 80 % of the maximal length, then down to -1.0 (DAPO, arXiv 2503.14476, eq. 13)."""
    return min(0.0, max(-1.0, 4 - 5 * len(row["completion_ids"]) / row["max_completion_length"]))


def environment_reward(completion, row):
    """What get_reward() of the episode's environment says; None if its class has no such method."""
    return getattr(row["environments"], "get_reward", NoneType)()


BUILT_IN = dict(answer=answer_reward, gsm8k=gsm8k_reward, math=math_reward, format=format_reward)
BUILT_IN |= dict(countdown=countdown_reward, overlong=overlong_reward)
BUILT_IN["environment"] = environment_reward
answer_reward.columns = gsm8k_reward.columns = math_reward.columns = ("answer",)
countdown_reward.columns = ("numbers", "target")  # keys that every data row must have

# -- How they read a text
SIGNS = str.maketrans("\u2010\u2011\u2012\u2013\u2014\u2212\xd7\xb7\u22c5\u2217\xf7", "------****/")
FORMAT = r"""(?x)  # a special token as <|im_end|> is no word
    <think>  (?: (?!</?think>|<[|\uff5c])\W )* \w (?: (?!</?think>). )*  </think>[ ]?
    (<answer>)?  (?: (?!</?\w[\w-]*[ ]?/?>|<[|\uff5c])\W )* \w (?: (?!</?\w[\w-]*[ ]?/?>). )*
    (?(1)</answer>)"""
ARITHMETIC = r"(?:[0-9()+ -]|[*/](?![*/])){1,400}"  # (8 - 2) * 4, but no ** and no //
BOX = re.compile(r"\\f?box(?:ed)?[ ]?\{(?:(?=(" + r"(?:[^{}]|\{" * 9 + r"\})*+" * 9 + r")\})|)")
SCALES = dict(dozen=12, hundred=1e2, thousand=1e3, million=1e6, billion=1e9, trillion=1e12)
QUANTITY = r"""(?x)  # a number and its unit: 5 km, \frac{1}{2}\,m^2; or only a word
    (?: (?:[^A-Za-z]|\\[A-Za-z]+)* [0-9)}] (?:\s|~|\\\W){1,9} | \s*(?=[A-Za-z]{2}) )
    ( (?=[A-Za-z]) (?: [ /]*+ [A-Za-z.]++ (?:\^\{?[0-9]\}?)?+ )++ ) \s*"""
NUMBER = re.compile(r"""(?x)  # 1,042 and 1{,}042 and 1 042.50; .5. int() takes quadratic time
    [-+]? (?: \.[0-9]{1,1000} | [0-9]{1,1000} (?: (?: ,?\\[,!] | \{,\} | [,'_ \xa0\u202f] )
        [0-9]{2,3} ){0,30} (?<![,!}'_ \xa0\u202f][0-9]{2}) (?: \.[0-9]{0,1000} )? )""")
TERM = re.compile(r"""(?x)  # a number and all that belongs to it: 3 1/2, 5 \times 10^6, 2 + 3x
    (?<![A-Za-z0-9_./^+-]) (?<![_^}]\{) (?<!sqrt\{) (?<!\b[b-z][ ][-+*/][ ])  [-+]? \.? [0-9]+
    (?: (?: [ ]?(?:[-+/xX]|\*\*?)[ ]? | ,?\\[,!] | \{,\} | [.,:'_ \xa0\u202f] ) [0-9]+
      | [ ]? (?: \\(?:times|cdot|div|pm|pi|sqrt|[dt]?frac)\{? | \}\{ | \^(?!\{?\\circ)\{?
        | [\xb2\xb3\xb9\xbc-\xbe\u2070-\u2079\u2150-\u215e\u5343\u4e07\u4ebf] ) [ ]? [0-9]*
      | [A-Za-z](?![A-Za-z]) )*  (?: [ ]?[-+*][ ]?[b-z]\b  # 18x; but 18cm is 18
      | (?:[ ~-]|\\text\{|\\[ ,;!]){0,4} (?i:dozen|hundred|thousand|[bmt]r?illion|lakh)\b )?""")


def with_prefill(completion, row):  # the chat template may already have written a <think>
    prefilled = row.get("prompt_text", "").rstrip().endswith("<think>")
    return "<think>" + completion if prefilled else completion


def answer_of(completion, row):  # behind </think>, and there in <answer>; "" if one is not closed
    text = with_prefill(completion, row).rpartition("</think>")[2]
    inside, closed, after = text.rpartition("</answer>")
    if "<think>" in text or "<answer>" in after:
        return ""
    if closed:
        text = inside.rpartition("<answer>")[2]
    return text.strip()


def as_text(value):  # in a data row. Numbers are written out: 5e-05 becomes 0.00005
    if not isinstance(value, (str, Real)):  # NumPy's numbers are Real
        raise ValueError(f"{value!r} is neither a text nor a number")
    text = str(value).strip()
    if isinstance(value, Real) and re.search("e[-+]", text):
        text = format(Decimal(text), "f")
    return text


def value_of(text):  # the number, if it is one and nothing else
    return Fraction(re.sub("[^0-9.-]", "", text)) if NUMBER.fullmatch(text) else text


def final_number(text):
    r"""The number in the last `\boxed{}` of a text, else in the line of its last `####`, else its
    last number. None if there are two, or if it is a piece of a term, as in 3 1/2."""
    text = text.translate(SIGNS).replace("$", "")
    line = re.findall(r"\A(?s:.*)####\s*([^0-9A-Za-z\n]{0,9}[0-9].*)", text)  # no heading
    marked = [*line, *BOX.findall(text)]
    terms = TERM.findall(marked[-1]) if marked else TERM.findall(text)[-1:]
    number = value_of(" and ".join(terms))
    return None if isinstance(number, str) else number


def last_formula(text):  # or box; else the last number. Without a box with the rest of the line
    end = BOX.findall(text) or re.findall(r"\A(?s:.*)\$([^$\n]+\$.*)", re.sub(r"\\[()]", "$", text))
    return ["", *(end or re.findall("[0-9][0-9.,]*[^0-9\n]*", text))][-1]


def readable(text):  # for math-verify: 5 million as 5*1000000, and dots as a letter
    for word, number in SCALES.items():
        scale = rf"([0-9)}}])(?:\s|~|\\\W){{0,9}}(\$?)\s*((?:\\text\{{\s*)?){word}"
        text = re.sub(scale, rf"\1*{number:.0f}\2\3", text)
    return re.sub(r"\\[lc]?dots", r"\\Xi ", text)


def words_of(text):  # what math-verify does not read: bases (101_2) and times; units, or a word
    text = re.sub(r"\$|\\(?:text|mathrm|mbox)[a-z]*[ ]?\{([^{}]*)\}", r" \1", text).strip(" .")
    match = re.fullmatch(QUANTITY, text.rpartition("=")[2])
    words = match and [re.sub("[{}]|s$", "", word) for word in re.split("[ /]+", match[1])]
    return re.findall(r"[0-9]_\{?([0-9]+)|\b([0-9]{1,2}:[0-5][0-9])", text), words


def are_equal(gold, answer):  # by math-verify; ValueError if it cannot read the gold text
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify
    from sympy import Expr, nsimplify

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns without its own time limit
    kinds = [LatexExtractionConfig(), ExprExtractionConfig()]
    if re.search(r"\\[A-Za-z(\[]|\$.*\$", answer):  # the numbers in a formula are no answers
        kinds.pop()
    golds, answers = parse(gold, parsing_timeout=None), parse(answer, kinds, parsing_timeout=None)
    if not golds:
        raise ValueError(f"math-verify cannot parse {gold!r}")
    if not verify(golds, answers, timeout_seconds=None):
        return False
    if not (isinstance(golds[0], Expr) and isinstance(answers[0], Expr)):
        return True
    difference = nsimplify(golds[0] - answers[0], rational=True).doit()
    return difference == 0 or not difference.is_Rational  # it rounds to six places


# -- Loading your functions
class Reward(NamedTuple):
    name: str
    weight: float  # a sample's reward is the sum of weight * value over the rewards
    function: object  # fn(completion, row), or TRL's form
    columns: tuple = ()  # keys that every data row must have
    check: object = None  # check(row): a ValueError if no completion can earn the reward
    batched: bool = False  # TRL's form: fn(completions, **columns)

    def applies(self, row):  # not if one of its columns is null: the row is another task's
        return all(row[column] is not None for column in self.columns)

    def check_row(self, row):
        """ValueError if a data row lacks a column, or if no completion can earn its reward."""
        for column in self.columns:
            if column not in row:
                raise ValueError(f"has no column {column!r}, which {self.name} needs")
        if self.check and self.applies(row):
            self.check(row)

    def call(self, completion, row):
        return self.function(completion, row) if self.applies(row) else None


def load_rewards(spec: str) -> list[Reward]:
    """The rewards of "name[:weight],file.py:function[:weight],...". A ValueError is one line."""
    rewards, known = {}, ", ".join(BUILT_IN)
    for item in spec.split(","):
        try:
            match = re.fullmatch(r"(.+\.py:)?(\w+)(?::(-?[0-9.]+(?:e-?[0-9])?))?", item.strip())
            path, name, weight = match.groups()
            function = load_function(path + name) if path else BUILT_IN[name]
            if function is math_reward:
                import_module("math_verify")  # now: it takes longer than a call may
            parameters = inspect.signature(function).parameters
        except (AttributeError, KeyError):  # no match, or no such built-in function
            raise ValueError(f"{item!r} is neither file.py:function[:weight] nor {known}") from None
        except (ImportError, TypeError) as error:
            raise ValueError(f"{name}: {error}") from error
        if name in rewards:
            raise ValueError(f"two rewards are called {name}")
        batched = "**" in str(parameters) and "row" not in parameters
        # By these names: fn(completion, answer) would get the whole row as its answer.
        if not batched and not re.match(r"\w+ (row|_)", " ".join(parameters)):
            raise ValueError(f"{name} is no fn(completion, row) and no fn(completions, **columns)")
        columns = getattr(function, "columns", ())
        check = partial(function, "") if columns and not path else None
        rewards[name] = Reward(name, float(weight or 1), function, columns, check, batched)
    return list(rewards.values())


def load_function(spec: str):
    """What "path/to/file.py:name" holds. A ValueError in one line, whatever the file raises."""
    file, _, name = spec.rpartition(":")
    path = Path(file).expanduser().absolute()
    try:
        return getattr(module_of(path), name)
    except (Exception, SystemExit) as error:
        raise ValueError(f"{path}: {error!r}") from error


def module_of(path):  # a file's own imports find its neighbours first, instead of loaded modules
    def import_neighbour(name, *others, **named):
        neighbour = path.with_name(f"{name}.py")
        if neighbour.exists() and name not in sys.stdlib_module_names:
            return module_of(neighbour)
        return import_any(name, *others, **named)

    import_any, builtins.__import__ = builtins.__import__, import_neighbour
    sys.path.append(str(path.parent))  # for imports inside of functions, and in child processes
    try:
        return import_module(f"{__name__}.{str(path).replace('.', '%')}")
    finally:
        builtins.__import__ = import_any


def find_spec(name, *_):  # a file is a part of this module, so that child processes find it
    if "/" in name:
        return spec_from_file_location(name, name.rpartition(".")[2].replace("%", "."))


__path__ = []  # so that it may have parts
sys.meta_path.append(SimpleNamespace(find_spec=find_spec))


# -- Calling them
class TimeUp(BaseException):
    """Not an Exception, so that the `except Exception` of a reward function lets it pass."""


FAILURES = (Exception, SystemExit, TimeUp, asyncio.CancelledError)  # KeyboardInterrupt ends the run


@contextmanager
def time_limit(seconds):
    """Raises TimeUp in the code inside after so many seconds, and each second after that. Not in
    other threads, in compiled code that looks for no signals, or after an alarm set by the code."""
    if current_thread() != main_thread():
        yield
        return

    def ring(*_):
        raise TimeUp(f"no result after {seconds} s")

    before = signal(SIGALRM, ring)
    setitimer(ITIMER_REAL, seconds, 1.0)
    try:
        yield
    finally:
        setitimer(ITIMER_REAL, 0)
        signal(SIGALRM, before)


@cache
def event_loop(_process):  # one each, so that a file's Semaphore or client works in every step
    def run():
        while True:
            with suppress(KeyboardInterrupt, SystemExit):  # the Future of their call has them, too
                loop.run_forever()

    loop = asyncio.new_event_loop()
    Thread(target=run, daemon=True).start()
    return loop


def begin(seconds, function, /, *arguments, **named):
    """Calls a function, async or not, within so many seconds. Returns a Future, for finish()."""
    future = Future()
    try:
        with time_limit(seconds):
            returned = function(*arguments, **named)
        if inspect.iscoroutine(returned):
            return asyncio.run_coroutine_threadsafe(returned, event_loop(os.getpid()))
        future.set_result(returned)
    except FAILURES as error:
        future.set_exception(error)
    return future


def finish(future, seconds):
    """The result of a call, or its error. TimeUp if it has none after so many seconds."""
    if wait([future], seconds).not_done:
        future.cancel()
        raise TimeUp("no result in time")
    return future.result()


def call_reward(reward, completions, rows, seconds):
    """Calls a function for each completion, or in TRL's form once for all of them. Returns
    values: a float for each completion; nan: the reward does not apply; 0.0: the call failed
    failures: {index of a completion: why its call failed, in one line}; it may take `seconds`
    metrics: {name: mean number}, extra: {column: a text for each completion}, as TRL logs them"""
    values, failures, logged, extra = [], {}, {}, {}
    if reward.batched:
        futures = [begin(seconds, call_trl, reward.function, completions, rows, logged, extra)]
    else:
        futures = list(map(partial(begin, seconds, reward.call), completions, rows))
    wait(futures, seconds)  # for the asynchronous ones, which run at the same time
    for future in futures:
        count = len(rows) // len(futures)
        try:
            with time_limit(seconds):  # for a generator
                values += numbers_of(finish(future, 0), count, reward.batched)
        except FAILURES as error:
            message = f"reward {reward.name} failed: {error!r:.500}"
            failures |= dict.fromkeys(range(len(values), len(values) + count), message)
            values += [0.0] * count
    return values, failures, {key: sum(given) / len(given) for key, given in logged.items()}, extra


def numbers_of(returned, count, batched):  # -> floats. An error if they are not so many numbers
    numbers = []
    for value in returned if batched else [returned]:
        if value is None or batched and value != value:  # TRL takes nan for None
            value = math.nan
        elif not math.isfinite(value):  # an error if it is no number
            raise ValueError(f"{value!r:.100} is no finite number")
        numbers.append(float(value))
    if len(numbers) != count:
        raise ValueError(f"{len(numbers)} rewards for {count} completions")
    return numbers


def call_trl(function, completions, rows, logged, extra):  # with the arguments that TRL passes
    def log_metric(name, value):
        logged.setdefault(name, []).append(float(value))

    def log_extra(column, values):
        extra[column] = [str(value) for value, _ in zip(values, rows, strict=True)]

    columns = {key: [row.get(key) for row in rows] for key in set().union(*rows)}
    columns |= dict(prompts=columns["prompt_text"], completions=completions)
    if rows[0]["prompt_messages"]:  # a chat: as in TRL the first row decides for all
        chats = [[dict(role="assistant", content=text)] for text in completions]
        columns["prompts"] = columns["prompt_messages"]
        columns["completions"] = columns.get("completion_messages", chats)
    columns["trainer_state"] = SimpleNamespace(**rows[0]["trainer_state"])
    return function(**columns, log_metric=log_metric, log_extra=log_extra)
