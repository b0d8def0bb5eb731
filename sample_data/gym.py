"""Rows and scores of reasoning-gym, a hundred tasks that others wrote, each with its own scorer.

    python grpo.py --model DIRECTORY --train_data sample_data/gym.py:sums --eval_data sample_data/gym.py:sums_eval \\
        --reward sample_data/gym.py:score

Another task or difficulty is one more line at the end of this file. Names and options are those of reasoning_gym:
https://github.com/open-thought/reasoning-gym
"""

import re
import zlib

try:
    import reasoning_gym
except ImportError as error:
    raise ImportError(f"{error}: pip install reasoning-gym") from None


def split(task: str, size: int = 2000, held_out: float = 0.4, **options) -> tuple:
    """Two functions, for --train_data and --eval_data. Questions of the same words, in whatever order, are on the same
    side: with 5 - 9 also 9 - 5 and 5 + 9 are held out. Easy tasks have fewer questions than `size`: each is a row once.
    """

    def rows(evaluation: bool) -> list[dict]:
        dataset, found = reasoning_gym.create_dataset(task, size=size, seed=0, **options), {}
        for entry in dataset:
            words = " ".join(sorted(re.findall(r"\w+", entry["question"])))
            if (zlib.crc32(words.encode()) % 1000 < 1000 * held_out) == evaluation:
                prompt = [{"role": "user", "content": entry["question"]}]
                found[entry["question"]] = dict(prompt=prompt, task=task, **entry)
        return list(found.values())

    return lambda: rows(False), lambda: rows(True)


def score(completion: str, row: dict) -> float:
    """1.0 if the task's own scorer gives the last number full marks, or the last line where the answer is not a number.
    Else 0.0: its marks for a part of the answer pay -4 and 14 where 4 is asked."""
    pattern = r"(?:(?<![\w)])-)?\d+(?:\.\d+)?" if re.fullmatch(r"-?\d+(\.\d+)?", row["answer"]) else r"\S.*"
    found = re.findall(pattern, completion)
    return float(reasoning_gym.get_score_answer_fn(row["task"])(found[-1] if found else None, row) >= 1)


sums, sums_eval = split("chain_sum", min_terms=2, max_terms=2, min_digits=1, max_digits=1)
gcd, gcd_eval = split("gcd", min_value=2, max_value=12)
products, products_eval = split("products", min_terms=2, max_terms=2, min_digits=1, max_digits=1)
