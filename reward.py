"""The built-in reward functions and their table.

A reward function is fn(completion: str, row: dict) -> float. It returns None if it does not apply.
`row` is the data row with what the trainer adds: prompt_text, completion_length and so on.
Completions are untrusted: the model is rewarded for any loophole it finds. Parsing takes linear
time.
"""

import logging
import re
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

from harness.numbers import as_text, final_number, plain_signs, read_number

SPECIAL_TOKEN = re.compile(r"<[|\uff5c][^<>]*[|\uff5c]>")  # <|im_end|>, even as ordinary text
TAG = re.compile(r"</?[A-Za-z_][A-Za-z0-9_-]*\s*/?>")  # <answer>, </b>, <br />
LABEL = re.compile("^[*_ ]*(?:final )?answer[*_ ]*:", re.IGNORECASE)  # **Answer:**
ARITHMETIC = re.compile(r"(?:[0-9()+ -]|[*/](?![*/])){1,400}")  # (8 - 2) * 4, but no ** and no //


# -- The answer in a completion


def with_prefill(completion: str, row: dict) -> str:
    """The completion, after the `<think>` that the chat template may already have written."""
    if row.get("prompt_text", "").rstrip().endswith("<think>"):
        return "<think>" + completion
    return completion


def answer_of(completion: str, row: dict) -> str:
    """The text after the last `</think>`, and there the inside of the last `<answer>...</answer>`.

    "" if one of them is opened and never closed.
    """
    text = with_prefill(completion, row).rpartition("</think>")[2]
    inside, closed, after = text.rpartition("</answer>")
    if "<think>" in text or "<answer>" in after:
        return ""
    if closed:
        text = inside.rpartition("<answer>")[2]
    return text.strip()


def is_visible(text: str) -> bool:
    """Tells if a reader sees anything of the text."""
    text = SPECIAL_TOKEN.sub("", text)
    return any(char.isprintable() and not char.isspace() for char in text)


# -- The reward functions


def answer_reward(completion: str, row: dict) -> float:
    """1.0 if the answer is row["answer"], as exact text or as a plain number (1,042 == 1042.0)."""
    answer = answer_of(completion, row)
    gold = as_text(row["answer"])
    if not is_visible(answer):
        return 0.0
    if answer == gold:
        return 1.0
    value = read_number(answer)
    return float(value is not None and value == read_number(gold))


def check_answer(row: dict) -> None:
    """If the gold answer itself does not earn the reward, no completion can."""
    gold = row["answer"]
    if isinstance(gold, (list, tuple, dict)) or answer_reward(as_text(gold), row) == 0.0:
        raise ValueError(f"no completion can have the answer {gold!r}")


def gsm8k_reward(completion: str, row: dict) -> float:
    """1.0 if the final number is that of row["answer"], which may be a solution with `####`."""
    return float(final_number(answer_of(completion, row)) == gsm8k_gold(row))


def gsm8k_gold(row: dict) -> Fraction:
    number = final_number(as_text(row["answer"]))
    if number is None:
        raise ValueError("row['answer'] ends in no number")
    return number


def format_reward(completion: str, row: dict) -> float:
    """1.0 for exactly `<think>reasoning</think>answer` without other tags.

    The answer may stand between `<answer>` and `</answer>`.
    """
    text = with_prefill(completion.strip(), row)
    reasoning, closed, answer = text.partition("</think>")
    if not reasoning.startswith("<think>") or not closed:
        return 0.0
    reasoning = reasoning.removeprefix("<think>")
    inside = re.fullmatch("<answer>(.*)</answer>", answer.strip(), re.DOTALL)
    if inside:
        answer = inside[1]
    if "<think>" in reasoning or TAG.search(answer):
        return 0.0
    return float(is_visible(reasoning) and is_visible(answer))


def countdown_reward(completion: str, row: dict) -> float:
    """1.0 if the answer's last line uses each of row["numbers"] once to make row["target"].

    The line is an expression of whole numbers, + - * / and (), and nothing else but the label
    `Answer:`, Markdown marks around the line, and the target on the other side of an equals sign.
    """
    target = Fraction(row["target"])
    line = plain_signs(answer_of(completion, row).rpartition("\n")[2])
    expression, equals, result = LABEL.sub("", line).partition("=")
    expression = expression.strip(" .*`")
    result = result.strip(" .*`")
    if equals and read_number(expression) == target:  # 24 = (8 - 2) * 4
        expression = result
    elif equals and read_number(result) != target:
        return 0.0
    if not ARITHMETIC.fullmatch(expression):
        return 0.0
    numbers = [int(digits) for digits in re.findall("[0-9]+", expression)]
    if sorted(numbers) != sorted(int(number) for number in row["numbers"]):
        return 0.0
    try:  # Python may evaluate such a text: it has no names and no powers, and is not too deep
        value = eval(re.sub("([0-9]+)", r"Fraction(\1)", expression))
    except (SyntaxError, TypeError, ZeroDivisionError, RecursionError, MemoryError):
        return 0.0
    return float(value == target)


def check_countdown(row: dict) -> None:
    Fraction(row["target"])  # a ValueError if it is no number
    if not all(str(number).isdecimal() for number in row["numbers"]):
        raise ValueError("row['numbers'] must be a list of whole numbers")


def overlong_reward(completion: str, row: dict) -> float:
    """In [-1, 0]: 0 up to 80 % of the maximal length, then linearly down to -1 (DAPO, eq. 13)."""
    limit = row["max_completion_length"]
    cache = max(1, round(0.2 * limit))
    # All that --max_completion_length limits: in an episode also what the environment wrote.
    excess = len(row["completion_ids"]) - (limit - cache)
    return -min(1.0, max(0.0, excess / cache))


def environment_reward(completion: str, row: dict) -> float | None:
    """What get_reward() of the episode's environment says; None if its class has no such method."""
    get_reward = getattr(row["environments"], "get_reward", None)
    if get_reward is None:
        return None
    return get_reward()


def math_reward(completion: str, row: dict) -> float:
    """1.0 if math-verify finds the answer equal to row["answer"]."""
    from math_verify import parse, verify

    # math-verify warns if its own time limits are off. They are: they need SIGALRM.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    gold = as_text(row["answer"])
    if "$" not in gold and "\\boxed" not in gold:
        gold = f"\\boxed{{{gold}}}"
    expected = parse(gold, parsing_timeout=None)
    answer = parse(answer_of(completion, row), parsing_timeout=None)
    if not expected:
        raise ValueError("math-verify cannot parse row['answer']")
    return float(verify(expected, answer, timeout_seconds=None))


# -- The table


@dataclass(frozen=True)
class Reward:
    """One reward of a run. The total of a sample is the sum of weight * value over the rewards."""

    name: str
    weight: float
    function: Callable
    columns: tuple[str, ...] = ()  # keys that every data row must have
    check: Callable | None = None  # check(row): a ValueError if no completion can earn the reward
    trusted: bool = False  # it runs in the trainer's process, not in a worker
    reads_objects: bool = False  # row["environments"]: an object of --environment's class
    batched: bool = False  # TRL's form: fn(completions, **columns) -> list
    path: str = ""  # the file it came from
    text: str = ""  # the text of this file: workers that start later run the same text


BUILT_IN = {
    "answer": Reward("answer", 1.0, answer_reward, ("answer",), check_answer, trusted=True),
    "gsm8k": Reward("gsm8k", 1.0, gsm8k_reward, ("answer",), gsm8k_gold, trusted=True),
    "format": Reward("format", 1.0, format_reward, trusted=True),
    "countdown": Reward(
        "countdown", 1.0, countdown_reward, ("numbers", "target"), check_countdown, trusted=True
    ),
    "overlong": Reward("overlong", 1.0, overlong_reward, trusted=True),
    "environment": Reward("environment", 1.0, environment_reward, reads_objects=True),
    "math": Reward("math", 1.0, math_reward, ("answer",)),
}
