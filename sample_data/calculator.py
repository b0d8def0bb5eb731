"""An agent in miniature: sums of octal numbers, and a calculator that the policy may ask.

    torchrun grpo.py --environment sample_data/calculator.py:octal \\
        --train_data sample_data/octal_train.jsonl --eval_data sample_data/octal_eval.jsonl

The bundled model has seen only decimal sums. If it thinks column by column, it writes "3+7=" as
before. A turn ends with "=", and then the calculator writes the next digits, in octal: "12".
"""

import re


def octal(turns: list[str], row: dict) -> str | None:
    """The value of a sum at the end of the policy's last turn. None, if there is no such sum, ends
    the episode."""
    question = re.search(r"[0-7]+(\+[0-7]+)+=$", turns[-1])
    if question is None:
        return None
    numbers = re.findall("[0-7]+", question[0])
    total = sum(int(number, 8) for number in numbers)
    return f"{total:o}"


octal.stop = ("=",)
