"""Rows and scores of reasoning-gym, which contains a hundred tasks, each with its own scorer.

    python grpo.py --model DIRECTORY --train_data sample_data/gym.py:sums \\
        --eval_data sample_data/gym.py:sums_eval --reward sample_data/gym.py:score

For another task or difficulty, add a line at the end of this file. reasoning_gym defines the names
and options: https://github.com/open-thought/reasoning-gym
"""

import collections
import math
import re
import zlib

try:
    import reasoning_gym
except ImportError as error:
    raise ImportError(f"{error}: pip install reasoning-gym") from None


def split(
    task: str,
    size: int = 2000,
    held_out: float = 0.4,
    kind=None,
    sign_marks: float = 0.0,
    **options,
) -> tuple:
    """Returns two functions that make rows, for --train_data and for --eval_data.

    Questions with the same words, in any order, are on the same side: if 5 - 9 is held out, so are
    9 - 5 and 5 + 9. An easy task may have fewer than `size` questions; each of them is one row.
    All questions come from seed=0, because other seeds give hardly any others: question i is made
    from seed + i, so that seeds 0 and 1 of size 500 share 499 questions.
    Five tasks (isomorphic_strings, knight_swap, polynomial_multiplication, ransom_note,
    word_ladder) ask other questions in each process: PYTHONHASHSEED=0 before the command makes the
    questions the same.

    kind and sign_marks help to learn rare answers. They change only the training rows. kind(row)
    sorts the rows into kinds, and rows of rare kinds are repeated. sign_marks is the score of a
    wrong number with the right sign.
    """

    def rows(evaluation: bool) -> list[dict]:
        by_question = {}
        for entry in reasoning_gym.create_dataset(task, size=size, seed=0, **options):
            words = " ".join(sorted(re.findall(r"\w+", entry["question"])))
            is_held_out = zlib.crc32(words.encode()) % 1000 < 1000 * held_out
            if is_held_out == evaluation:
                prompt = [{"role": "user", "content": entry["question"]}]
                by_question[entry["question"]] = dict(prompt=prompt, task=task, **entry)
        return list(by_question.values())

    def train() -> list[dict]:
        plain = [row | dict(sign_marks=sign_marks) for row in rows(evaluation=False)]
        if kind is None:
            return plain
        counts = collections.Counter(kind(row) for row in plain)
        repeated = []
        for row in plain:
            repeated += [row] * math.ceil(max(counts.values()) / counts[kind(row)])
        return repeated

    def evaluation() -> list[dict]:
        return rows(evaluation=True)

    return train, evaluation


def score(completion: str, row: dict) -> float:
    """1.0 if the task's own scorer gives full marks to the answer at the end of the completion.
    Otherwise 0.0, or the row's `sign_marks` for the right sign.

    The scorer's partial marks do not count: they reward -4 and 14 if the answer is 4. (Read the
    scorer of your task: in 0.1.25, game_of_life_halting's gives full marks to any text.)
    """
    gold = row["answer"] or ""  # None for five tasks, which accept several answers
    answers = answers_of(completion, gold)
    if any(is_right(answer, row) for answer in answers):
        return 1.0
    if answers and answers[0].startswith("-") == gold.startswith("-"):
        return row.get("sign_marks", 0.0)
    return 0.0


def is_right(answer: str, row: dict) -> bool:
    try:
        return reasoning_gym.get_score_answer_fn(row["task"])(answer, row) >= 1
    except Exception:  # three scorers raise if they cannot read an answer
        return False


def answers_of(completion: str, gold: str) -> list[str]:
    """The texts that may be the answer: the last number if gold, the task's own answer, is a
    number; else as many of the last lines as gold has; without a gold, the last line, or all text
    after the last blank line."""
    if re.fullmatch(r"-?\d+(\.\d+)?", gold):
        return re.findall(r"(?:(?<![\w)])-)?\d+(?:\.\d+)?", completion)[-1:]
    text = completion.strip()
    lines = text.split("\n")
    if gold:
        return ["\n".join(lines[-len(gold.split("\n")) :]).strip()]
    return [lines[-1].strip(), text.rpartition("\n\n")[2]]


def sum_kind(row: dict) -> tuple:
    """Is the answer negative? Does the question add? At first the model never writes a minus, then
    always."""
    return row["answer"].startswith("-"), "+" in row["question"]


def sums() -> list[dict]:
    """Sums and differences of one-digit numbers, and differences of numbers from 10 to 19. One
    digit alone gives only 144 questions, which the model memorizes. From 12 - 17 it learns how
    2 - 7 works."""
    teens = re.compile(r" 1\d - 1\d =")
    return one_digit() + [row for row in two_digits() if teens.search(row["question"])]


ONE_DIGIT = dict(min_terms=2, max_terms=2, min_digits=1, max_digits=1)
TWO_DIGITS = dict(min_terms=2, max_terms=2, min_digits=2, max_digits=2)
one_digit, sums_eval = split("chain_sum", kind=sum_kind, sign_marks=0.3, **ONE_DIGIT)
two_digits, _ = split("chain_sum", size=60_000, held_out=0.0, sign_marks=0.3, **TWO_DIGITS)
gcd, gcd_eval = split("gcd", min_value=2, max_value=12)
products, products_eval = split("products", **ONE_DIGIT)
