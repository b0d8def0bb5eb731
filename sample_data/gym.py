"""Rows and scores of reasoning-gym, a hundred tasks that others wrote, each with its own scorer.

    python grpo.py --model DIRECTORY --train_data sample_data/gym.py:sums --eval_data sample_data/gym.py:sums_eval \\
        --reward sample_data/gym.py:score

Another task or difficulty is one more line at the end of this file. Names and options are those of reasoning_gym:
https://github.com/open-thought/reasoning-gym
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
    """Two functions, for --train_data and --eval_data. Questions of the same words, in whatever order, are on the same
    side: with 5 - 9 also 9 - 5 and 5 + 9 are held out. Easy tasks have fewer questions than `size`: each is a row once.

    Two helps to learn what is rare, in training only. With `kind`, a function of the row, rows of rare kinds are there
    several times. A number that is wrong but of the right sign earns `sign_marks`.
    """

    def rows(evaluation: bool) -> list[dict]:
        dataset, found = reasoning_gym.create_dataset(task, size=size, seed=0, **options), {}
        for entry in dataset:
            words = " ".join(sorted(re.findall(r"\w+", entry["question"])))
            if (zlib.crc32(words.encode()) % 1000 < 1000 * held_out) == evaluation:
                prompt = [{"role": "user", "content": entry["question"]}]
                found[entry["question"]] = dict(prompt=prompt, task=task, **entry)
        return list(found.values())

    def train() -> list[dict]:
        found = [row | dict(sign_marks=sign_marks) for row in rows(False)]
        kinds = collections.Counter(map(kind, found)) if kind else {}
        return [
            row
            for row in found
            for _ in range(math.ceil(max(kinds.values()) / kinds[kind(row)]) if kind else 1)
        ]

    return train, lambda: rows(True)


def score(completion: str, row: dict) -> float:
    """1.0 if the task's own scorer gives the last number full marks, or the last line where the answer is not a number.
    Else 0.0, or the row's `sign_marks`: the scorer's own marks for a part of the answer pay -4 and 14 where 4 is asked.
    """
    answer = row["answer"]
    pattern = (
        r"(?:(?<![\w)])-)?\d+(?:\.\d+)?" if re.fullmatch(r"-?\d+(\.\d+)?", answer) else r"\S.*"
    )
    found = re.findall(pattern, completion)
    if reasoning_gym.get_score_answer_fn(row["task"])(found[-1] if found else None, row) >= 1:
        return 1.0
    return (
        row.get("sign_marks", 0.0)
        if found and found[-1].startswith("-") == answer.startswith("-")
        else 0.0
    )


def sum_kind(row: dict) -> tuple:
    """Below zero or not, sum or difference: the model never writes a minus at first, and then always one."""
    return row["answer"].startswith("-"), "+" in row["question"]


def sums() -> list[dict]:
    """Sums and differences of one digit, and differences of 10 to 19: who sees 12 - 17 learns what 2 - 7 has in common
    with the rest, where one digit alone (144 questions) is learned by heart."""
    teens = re.compile(r" 1\d - 1\d =")
    return one_digit() + [row for row in two_digits() if teens.search(row["question"])]


ONE_DIGIT = dict(min_terms=2, max_terms=2, min_digits=1, max_digits=1)
one_digit, sums_eval = split("chain_sum", kind=sum_kind, sign_marks=0.3, **ONE_DIGIT)
two_digits, _ = split(
    "chain_sum", 60_000, 0.0, sign_marks=0.3, **ONE_DIGIT | dict(min_digits=2, max_digits=2)
)
gcd, gcd_eval = split("gcd", min_value=2, max_value=12)
products, products_eval = split("products", **ONE_DIGIT)
