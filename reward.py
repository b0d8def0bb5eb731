"""The built-in reward functions, and how functions of your own files are loaded and called.

A reward function, async or not, is fn(completion: str, row: dict) -> float, or None if it does not
apply, or a list with one of these for each token. `row` is the row of the data plus columns of the
trainer (see row_of). TRL's fn(completions, **columns) works unchanged."""

import asyncio
import copy
import inspect
import logging
import math
import os
import re
import sys
import traceback
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager, suppress
from decimal import Decimal
from fractions import Fraction
from functools import cache
from importlib import import_module
from pathlib import Path
from signal import ITIMER_REAL, SIGALRM, setitimer, signal
from threading import Thread, current_thread, main_thread
from types import NoneType, SimpleNamespace
from typing import NamedTuple

import numpy as np

ADDED = """prompt_text prompt_messages completion_ids completion_tokens completion_length
max_completion_length completion_messages finish_reason trainer_state""".split()  # reserved names
IN_EPISODES = "turns replies environments".split()
OF_TRL = [*ADDED, *IN_EPISODES, "prompts", "completions", "log_metric", "log_extra"]


# -- The built-in reward functions. ValueError: no completion can earn the row's reward
def answer_reward(completion, row):
    """1.0 if the answer equals row["answer"], as a text or as a number (1,042 is 1042.0)."""
    gold = as_text(row["answer"])
    if not gold or parts_of(gold, {})[1] != gold:
        raise ValueError(f"no completion can have the answer {gold!r}")
    return float(value_of(parts_of(completion, row)[1]) == value_of(gold))


def gsm8k_reward(completion, row):
    """1.0 if the final number equals row["answer"] or, if that has `####`, the number after it."""
    gold = re.split(r"####|\\boxed\{", as_text(row["answer"]))[-1]
    number = final_number(f"\\boxed{{{gold}}}")
    if number is None:
        raise ValueError(f"{gold!r} is not one number")
    return float(final_number(parts_of(completion, row)[1]) == number)


def math_reward(completion, row):
    r"""1.0 if math-verify finds row["answer"] in \boxed{} or, if none, after "the answer is"."""
    from math_verify import LatexExtractionConfig, parse, verify

    logging.getLogger("math_verify").setLevel("ERROR")  # it warns if its own time limit is off
    gold = as_text(row["answer"])
    if not re.search(r"(?<!\\)\$|\\boxed", gold):  # \$ is a dollar sign
        gold = f"\\boxed{{{gold}}}"
    options: dict = dict(parsing_timeout=None)  # the trainer has its own limit
    golds = parse(gold, **options)
    if not golds:
        raise ValueError(f"math-verify cannot parse {gold!r}")
    formulas = LatexExtractionConfig(boxed_match_priority=0, try_extract_without_anchor=False)
    answer = parts_of(completion, row)[1]
    answers = parse(answer, [formulas], extraction_mode="first_match", **options)
    return float(verify(golds, answers, allow_set_relation_comp=True, timeout_seconds=None))


def format_reward(completion, row):
    """1.0 for one `<think>words</think>` at the start, and words after it as the answer."""
    thought, answer = parts_of(completion, row)
    has_words = re.match("<think>" + WORDS, thought) and re.match(WORDS, answer)
    return float(has_words is not None and thought.count("think>") == 1)


def countdown_reward(completion, row):
    """1.0 if the last line makes row["target"] from all row["numbers"] with + - * / and ()."""
    numbers = sorted(map(str, row["numbers"]))
    target = Fraction(as_text(row["target"]))
    if not "".join(numbers).isdecimal():
        raise ValueError("column 'numbers' must be a list of whole numbers")
    line = parts_of(completion, row)[1].rpartition("\n")[2]
    term = line.partition("=")[0].strip(" .*`")
    if re.fullmatch(ARITHMETIC, term) and sorted(re.findall("[0-9]+", term)) == numbers:
        with suppress(Exception):  # eval is safe: term has no names, no powers and little depth
            return float(eval(re.sub("([0-9]+)", r"Fraction(\1)", term)) == target)
    return 0.0


def overlong_reward(completion, row):
    """0.0 up to 80 % of the maximum length, then down to -1.0 (DAPO, arXiv 2503.14476, eq. 13)."""
    return min(0.0, max(-1.0, 4 - 5 * len(row["completion_ids"]) / row["max_completion_length"]))


def environment_reward(completion, row):
    """The value of the environment's get_reward(); None if its class has no such method."""
    return getattr(row["environments"], "get_reward", NoneType)()


BUILT_IN: dict = {name[:-7]: f for name, f in [*globals().items()] if name.endswith("_reward")}
for name in ("answer", "gsm8k", "math"):  # keys that every data row must have
    BUILT_IN[name].columns = ("answer",)
BUILT_IN["countdown"].columns = ("numbers", "target")

# -- Parsing texts. It goes by form, not by meaning: "not 18" counts as 18
ARITHMETIC = r"(?:[0-9()+ -]|[*/](?![*/])){1,400}"  # (8 - 2) * 4, but no ** and no //
THOUSANDS = r"(?<=[0-9])(\{,\}|\\?,(\\!)?)(?=[0-9]{3}(?![0-9]))"  # 1,042 but not 1,2
DECORATION = r"(?<=[0-9])(?:(?:\\,|[\u2007-\u200a\u202f\xa0])(?=[0-9]{3}(?![0-9]))|\.(?=\}))"
DIGITS = r"(?>[0-9]+(?:\.[0-9]+)?|\.[0-9]+)"
NUMBER = rf"[-+]?{DIGITS}"
MARKED = r"####\s*([-+.]?[0-9][^\n#]*|[^\n#]*\Z)"  # the rest of the line, not "#### Step 1"
BOX = r"\\boxed\{((?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*)"  # the text in it
WORD = r"\\.|(?<=[a-z]{2})-(?=[a-z]{2})|[^\\0-9=,;<>^+*/\xb1\xbc-\xbe\xd7\xf7\u2150-\u221a\u03c0-]"
ONE_NUMBER = (  # text with one number, maybe a unit or "x ="; not "70 or 72", "[0, 1)", "1/2"
    r"(?s)^(?!.*\\(?:d?frac|sqrt|pi|[lg]e|times|cdot|div|pm|log|ln|binom))(?:[^=]*=)?"
    rf"(?!.*(?<![A-Za-z\\])[inxyz](?![A-Za-z]))(?:(?!_){WORD})*?"
    rf"((?:(?<![A-Za-z)}}\]])(?<!\b[A-Za-z] )[-+])?{DIGITS})(?![!\xb2\xb3\xb9])"
    rf"(?:{WORD}|/(?=[A-Za-z\\])|\^\{{?\\circ|(?<=[a-z}}]{{2}})\^\{{?[23])*$"
)
WORDS = r"(?:<[^<>]*>|\W)*+\w"  # a first word, after any tags and tokens such as <|im_end|>


def parts_of(completion, row):
    """The text before the last </think>, and the answer: the text after it, or its <answer>."""
    if row.get("prompt_text", "").rstrip().endswith("<think>"):  # the chat template wrote it
        completion = "<think>" + completion
    thought, _, rest = completion.rpartition("</think>")
    before, closed, after = rest.rpartition("</answer>")
    answer = before.rpartition("<answer>")[2] if closed else rest  # the last pair of tags
    if "<think>" in rest or "<answer>" in after:  # a tag is still open
        answer = ""
    return thought.strip(), plain(answer)


def plain(text):  # with - as minus, without thin spaces (1\,042) and the dot of {72.}
    return re.sub(DECORATION, "", re.sub("[\u2212\u2011]", "-", text)).strip()


def as_text(value):  # the text of a data row's value
    if not isinstance(value, str):
        if hasattr(value, "__len__"):
            raise ValueError(f"{value!r} is neither a text nor a number")
        with suppress(ArithmeticError):  # True is not a number
            value = format(Decimal(str(value)), "f")  # 0.00005, where str() gives 5e-05
    return plain(str(value))


def value_of(text):  # a number if the text is one and nothing else, else the text
    digits = re.sub(THOUSANDS, "", text)
    return Decimal(digits) if re.fullmatch(NUMBER, digits) else text


def final_number(text):
    r"""The one number after the last ####; without ####, in the last \boxed{}; else the last one.
    None if there is none, or if the text after #### or in the box is not one number."""
    text = re.sub(THOUSANDS + r"|\\?\$|(?<![0-9])\*|\*(?![0-9])", "", text)  # \$1,042 and **18**
    found = re.findall(MARKED, text) or re.findall(BOX, text)
    numbers = re.findall(ONE_NUMBER, found[-1]) if found else re.findall(NUMBER, text)
    return Decimal(numbers[-1]) if numbers else None


# -- Loading your functions
class RewardFunction(NamedTuple):
    name: str
    weight: float  # a sample's reward is the sum of weight * value over the rewards
    function: Callable  # fn(completion, row), or TRL's form
    columns: tuple  # keys that every data row must have
    batched: bool  # TRL's form: fn(completions, **columns)

    def check_row(self, row):
        """An error if a data row lacks a column, or if a built-in function rejects the row."""
        for column in self.columns:
            if column not in row:
                raise ValueError(f"the row has no column {column!r}")
        if self.batched:
            inspect.signature(self.function).bind(**dict.fromkeys([*row, *OF_TRL]))
        elif self.columns and self.function in BUILT_IN.values():
            self.call("", row)

    def applies_to(self, row):
        return all(row[column] is not None for column in self.columns)  # else another task's row

    def call(self, completion, row):
        return self.function(completion, row) if self.applies_to(row) else None


def load_rewards(spec: str) -> list[RewardFunction]:
    """Loads "name[:weight],file.py:function[:weight],...". Errors have one line."""
    rewards = {}
    for item in spec.split(","):
        match = re.fullmatch(r"(.+\.py:)?(\w+)(?::(-?\d*\.?\d+(?:e-?\d+)?))?", item.strip())
        path, name, weight = match.groups() if match else ("", "", "")
        if not path and name not in BUILT_IN:
            raise ValueError(f"{item!r} is neither file.py:function[:weight] nor in {[*BUILT_IN]}")
        if name in rewards:
            raise ValueError(f"two rewards are called {name}")
        function = load_function(path + name) if path else BUILT_IN[name]
        parameters = inspect.signature(function).parameters
        of_trl = "completions" in parameters or not {"completion", "row"} & parameters.keys()
        batched = "**" in str(parameters) and of_trl
        needed = [p for p in parameters.values() if p.default is p.empty and "*" not in str(p)]
        is_single = len(needed) <= 2 and re.match(r"\w+ (row|_)", " ".join(parameters))
        if not batched and not is_single:
            raise ValueError(f"{name} is not fn(completion, row) or fn(completions, **columns)")
        columns = getattr(function, "columns", ())
        rewards[name] = RewardFunction(name, float(weight or 1), function, columns, batched)
    return list(rewards.values())


@contextmanager
def torch_kept():
    """Restores torch's modes (gradients, dtype, precision) after your code."""
    torch = sys.modules.get("torch")
    modes = "is_grad_enabled get_default_dtype get_float32_matmul_precision" if torch else ""
    with ExitStack() as end:
        for mode in modes.split():
            end.callback(getattr(torch, "set" + mode[mode.index("_") :]), getattr(torch, mode)())
        yield


@torch_kept()
def load_function(spec: str):
    """Returns `name` of "path/to/file.py:name", by `import file`. Errors: a one-line ValueError."""
    file, _, name = spec.rpartition(":")
    path = Path(file).expanduser().absolute()
    if not path.exists():
        raise ValueError(f"{path}: no such file")
    sys.path.insert(0, str(path.parent))  # for its own imports, and for child processes
    try:
        module = import_module(path.stem)
        if not path.samefile(inspect.getfile(module)):
            raise ImportError(f"{module} has the same name: rename your file")
        return getattr(module, name)
    except (Exception, SystemExit) as error:
        raise ValueError(f"{path}: {error!r}") from error


# -- Calling them
def fill_in_reward(reward, samples, run):
    """Stores a reward function's values, failures, metrics and logged columns in the samples."""
    rows = [row_of(sample, reward, run) for sample in samples]  # copies: a function may change them
    texts = [sample.text for sample in samples]
    values, failures, metrics, columns = call_reward(reward, texts, rows, run.cfg.call_timeout)
    for i, (sample, value) in enumerate(zip(samples, values, strict=True)):
        if isinstance(value, list):  # one for each token; nan: none
            of_tokens = reward.weight * np.array(value)  # [T]
            sample.info.setdefault("token_rewards", {})[reward.name] = of_tokens
            value = float(np.nansum(value))
        sample.rewards[reward.name] = value
        sample.failure = sample.failure or failures.get(i, "")
        sample.info.setdefault("metrics", {}).update(metrics)  # the same for all samples
        sample.info.setdefault("columns", {}).update({name: columns[name][i] for name in columns})


def row_of(sample, reward, run):
    """The function's second argument: the row of the data, and the columns of the trainer."""
    cfg, ids = run.cfg, sample.completion_ids.tolist()
    passes = run.step * cfg.num_prompts / len(run.train_prompts)
    known: dict = dict(completion_ids=ids, completion_length=int(sample.sampled.sum()))
    known |= dict(prompt_text=sample.prompt.text, finish_reason=sample.finish_reason)
    known["prompt_messages"] = copy.deepcopy(sample.prompt.messages)
    known["completion_messages"] = [dict(role="assistant", content=sample.text)]
    known["max_completion_length"] = cfg.max_completion_length
    known["trainer_state"] = dict(global_step=run.step, max_steps=cfg.max_steps, epoch=passes)
    if "episode" in sample.info:
        known |= sample.info["episode"].reward_columns()
    if getattr(reward.function, "tokens", False):
        known["completion_tokens"] = import_module("extras.tokens").texts(run.tokenizer, ids)
    return copy.deepcopy(sample.prompt.row) | known


class TimeUp(BaseException): ...  # not an Exception: a function may catch these


OURS = r"/lib(?:64)?/python3|/reward\.py|/extras/agents\.py"
YOUR_LINE = rf'(File "(?![^"]*(?:{OURS}))[^"]*", line [0-9]+), in'
FAILURES = (Exception, SystemExit, TimeUp, asyncio.CancelledError)  # KeyboardInterrupt ends the run


@contextmanager
def time_limit(seconds):
    """Raises TimeUp in the code inside after `seconds`, and then every second. It does not
    work in other threads, in compiled code that checks no signals, or if the code sets an alarm."""

    def ring(*_):
        raise TimeUp(f"no result after {seconds} s")

    if current_thread() != main_thread():
        yield
        return
    before = signal(SIGALRM, ring)
    setitimer(ITIMER_REAL, seconds, 1.0)
    try:
        yield
    finally:
        setitimer(ITIMER_REAL, 0)
        signal(SIGALRM, before)


@cache
def event_loop(_process):  # one per process: a file's Semaphore or client then works in every step
    def run():
        while True:
            with suppress(KeyboardInterrupt, SystemExit):  # the call's Future has the error, too
                loop.run_forever()

    loop = asyncio.new_event_loop()
    loop.set_default_executor(ThreadPoolExecutor(32))  # for asyncio.to_thread
    Thread(target=run, daemon=True).start()
    return loop


def begin(seconds, function, *arguments):
    """Calls a function, async or not, with a time limit. Returns a Future, for finish()."""
    future = Future()
    try:
        with time_limit(seconds):
            returned = function(*arguments)
        if inspect.iscoroutine(returned):
            return asyncio.run_coroutine_threadsafe(returned, event_loop(os.getpid()))
        future.set_result(returned)
    except FAILURES as error:
        future.set_exception(error)
    return future


def finish(future):
    """Returns the result of a call after the wait, or raises its error; TimeUp if it still runs."""
    if not future.done():
        future.cancel()  # its thread may still run: later calls get other threads
        event_loop(os.getpid()).set_default_executor(ThreadPoolExecutor(32))
        raise TimeUp("no result in time")
    return future.result()


@torch_kept()
def call_reward(reward, completions, rows, seconds):
    """Calls a function for each completion, or in TRL's form once, within `seconds`. Returns
    values: for each completion a float, or a list of floats, one for each token. nan: no reward;
            0.0 if its call failed
    failures: {index of a completion: the reason why its call failed, in one line}
    metrics: {name: mean}, columns: {name: a text for each completion}, which TRL's form may log"""
    values, failures, logged, columns = [], {}, {}, {}
    calls = [(reward.call, *pair) for pair in zip(completions, rows, strict=True)]
    if reward.batched:
        calls = [(call_trl, reward.function, completions, rows, logged, columns)]
    futures = [begin(seconds, *call) for call in calls]
    wait(futures, seconds)  # for async calls, which run at the same time
    for future in futures:
        first, count = len(values), len(rows) // len(futures)
        try:
            with time_limit(seconds):  # for a generator, which runs only here
                returned = finish(future) if reward.batched else [finish(future)]
                if isinstance(returned, dict) or len(returned := [*returned]) != count:
                    raise ValueError(f"{returned!r:.80} is not a list of {count} values")
                pairs = zip(rows[first : first + count], returned, strict=True)
                values += [number_of(value, row, reward.batched) for row, value in pairs]
        except FAILURES as error:
            why = f"reward {reward.name} failed: {cause_of(error)}"
            failures |= dict.fromkeys(range(first, first + count), why)
            values += [0.0] * count
    return values, failures, {name: float(np.mean(logged[name])) for name in logged}, columns


def number_of(value, row, nan_is_none):  # a float, or a list of them; else an error
    if isinstance(value, list) and not nan_is_none:
        pairs = zip(row["completion_ids"], value, strict=True)
        return [one_number(part, nan_is_none=True) for _, part in pairs]
    return one_number(value, nan_is_none)


def one_number(value, nan_is_none):
    if value is None or nan_is_none and value != value:
        return math.nan
    if not math.isfinite(value):
        raise ValueError(f"{value} is not a finite number")
    return float(value)


def your_lines(error):  # the traceback's lines in your code, the innermost last
    return re.findall(YOUR_LINE, "".join(traceback.format_exception(error)))


def cause_of(error):  # in one line
    return ", ".join([f"{error!r:.500}", *your_lines(error)[-1:]])


def call_trl(function, completions, rows, logged, more):  # with the arguments that TRL passes
    def log_metric(name, value):
        logged.setdefault(name, []).append(float(value))

    def log_extra(column, values):
        more[column] = [str(value) for _, value in zip(rows, values, strict=True)]

    columns: dict = {key: [row.get(key) for row in rows] for key in set().union(*rows)}
    columns |= dict(prompts=[], completions=[])
    for row, text in zip(rows, completions, strict=True):
        chat = row["prompt_messages"]  # None: the prompt is a text
        columns["prompts"].append(chat or row["prompt_text"])
        columns["completions"].append(row["completion_messages"] if chat else text)
    columns["trainer_state"] = SimpleNamespace(**rows[0]["trainer_state"])
    return function(**columns, log_metric=log_metric, log_extra=log_extra)
