"""Guess the number: a game of several turns. The policy has three guesses at row["answer"], 1 to 7.

    torchrun grpo.py --environment sample_data/guess_number.py:guess_number \\
        --train_data sample_data/guess_number.py:rows \\
        --eval_data sample_data/guess_number.py:rows --max_turns 3 --temperature 1.5

The bundled model has seen digits, "+" and "=", but no words. So the prompt is a sum and the hints
are two odd texts. After each of these three texts the model samples many different numbers, so it
can try the right one and learn it. In 20 steps it learns 6, 5 and 5 of the 7 numbers (seeds 0, 1
and 2; before, it finds 1). Three guesses without hints find at most 3. For a chat model, use words
and --chat.
"""

HIGHER, LOWER = "9=", "0="


def guess_number(turns: list[str], row: dict) -> str | None:
    """A hint. None, if the last guess is right or is no number, ends the episode."""
    if not turns[-1].isdecimal():
        return None
    guess = int(turns[-1])
    if guess < int(row["answer"]):
        return HIGHER
    if guess > int(row["answer"]):
        return LOWER
    return None


def rows() -> list[dict]:
    return [dict(prompt="000+004=", answer=str(n)) for n in range(1, 8)]
