"""Environments of a user, good and bad, for the tests: --environment tests/environments.py:name."""

import abc
import asyncio
import functools
import os
import random
import signal
import sys
import time

# --------------------------------------------------------------------------------------------------
# Text: fn(turns, row) -> str | None


def says(turns, row):
    """The texts of the column `says`, one after each turn."""
    if len(turns) > len(row["says"]):
        return None
    return row["says"][len(turns) - 1]


async def waits(turns, row):
    await asyncio.sleep(0)
    return says(turns, row)


def hint(turns, row):
    """After a question, which ends in "=": its answer."""
    if not turns[-1].endswith("="):
        return None
    return row["hint"]


hint.stop = ("=",)


def long_stop(turns, row):
    return None


long_stop.stop = ("1+",)


def letters_as_stop(turns, row):
    return None


letters_as_stop.stop = "12"


def over(turns, row):
    return None


def draws(turns, row):
    return f"{random.randrange(1000)}="


def misbehaves(turns, row):
    print("playing", row["how"], "in", os.getpid())
    match row["how"]:
        case "raise":
            raise KeyError("x")
        case "exit":
            sys.exit(3)
        case "die":
            os._exit(3)
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "int":
            return 5
        case "hang":
            time.sleep(3600)
        case "allocate":
            return "a" * len(bytearray(2**40))
        case "million":
            return "word " * 1_000_000
        case "surrogate":
            return "\ud800"
        case "fork" if os.fork() == 0:
            time.sleep(0.01)
    return "ok" if len(turns) == 1 else None


# --------------------------------------------------------------------------------------------------
# Tools: typed, documented functions


def multiply(a: int, b: int) -> int:
    """
    Multiplies two integers.

    Args:
        a: The first integer.
        b: The second integer.

    Returns:
        The product of the two integers.
    """
    return a * b


async def async_add(a: int, b: int) -> int:
    """
    Asynchronously adds two integers.

    Args:
        a: The first integer.
        b: The second integer.

    Returns:
        The sum of the two integers.
    """
    await asyncio.sleep(0)
    return a + b


def repeat(words: str) -> str:
    """
    Says the words.

    Args:
        words: The words.
    """
    return words


def fail(how: str) -> str:
    """
    Fails.

    Args:
        how: In which way.
    """
    return misbehaves(["", ""], dict(how=how)) or "fine"


QUESTION = "no environment"
TOOLS = [multiply, async_add, repeat, fail]


# --------------------------------------------------------------------------------------------------
# Classes


class IncrementEnv:
    def reset(self, **kwargs) -> str | None:
        self.counter = 0
        self.row = kwargs
        return kwargs.get("says")

    def increment(self, step: int) -> int:
        """
        Increment the internal counter.

        Args:
            step: Value to add to the counter.

        Returns:
            The updated counter value.
        """
        self.counter += step
        return self.counter

    def get_reward(self) -> float:
        return float(self.counter)


class GuessEnv:
    """Draws its secret, and answers at random."""

    def reset(self, **row) -> str:
        import numpy

        self.secret = random.randrange(10**6), int(numpy.random.randint(10**6))
        return f"It begins with {self.secret}."

    def guess(self, number: int) -> str:
        """
        Guess the secret number.

        Args:
            number: The guess.
        """
        return f"{'higher' if number < self.secret[0] else 'lower'} {random.random()}"


class UnseededEnv(GuessEnv):
    def reset(self, **row) -> str:
        return f"It is {os.urandom(8).hex()}."


class BrokenEnv(GuessEnv):
    def reset(self, **row) -> str:
        return misbehaves([""], row)


class SetEnv(GuessEnv):
    """The order of a set of texts differs between processes."""

    def reset(self, **row) -> str:
        return " ".join({f"word{i}" for i in range(20)})


class FragileEnv(IncrementEnv):
    def increment(self, step: int) -> int:
        """
        Increment the internal counter.

        Args:
            step: Value to add to the counter; 0: the process dies.
        """
        if step == 0:
            os._exit(1)
        return self._drift() + super().increment(step)

    def _drift(self) -> int:
        return 0


class FickleEnv(FragileEnv):
    """What it answers depends on the process, so that a replay in another one differs."""

    def _drift(self) -> int:
        return os.getpid()


class CountingEnv:
    """Says how many objects of its row were made in this process."""

    made = {}

    def reset(self, **row):
        self.number = row["number"]
        self.made[self.number] = self.made.get(self.number, 0) + 1

    def calls(self) -> str:
        """Counts."""
        return str(self.made[self.number])


def without_hints(name):
    """
    Greets.

    Args:
        name: Of whom.
    """


def without_names(a: int, /) -> int:
    """
    Counts.

    Args:
        a: The number.
    """
    return a


class UndocumentedEnv:
    def reset(self, **row):
        pass

    def calls(self, how: str) -> str:
        return how


class AbstractEnv(abc.ABC):
    @abc.abstractmethod
    def reset(self, **row):
        pass


PARTIAL = [functools.partial(multiply, b=2)]
TWICE = [multiply, multiply]
WITHOUT_HINTS = [without_hints]
WITHOUT_NAMES = [without_names]
NOT_ALL_CLASSES = {"increment": IncrementEnv, "number": 3}
GAMES = {"increment": IncrementEnv, "guess": GuessEnv}


# --------------------------------------------------------------------------------------------------
# Rewards, in TRL's form and in ours


def counters(environments, **kwargs) -> list[float]:
    return [float(environment.counter) for environment in environments]


def together(completions, **kwargs) -> list[float]:
    """How many completions come in one call."""
    assert "environments" not in kwargs
    return [float(len(completions))] * len(completions)


def of_worker(environments, **kwargs) -> list[float]:
    """How many objects come in one call."""
    return [float(len(environments))] * len(environments)


def saw(completion, row):
    return len(completion)


def tool_messages(completions, **kwargs) -> list[float]:
    """How many messages of tools are in each completion."""
    return [float(sum(m["role"] == "tool" for m in messages)) for messages in completions]


def roles(completion, row):
    """The turns and replies that a reward sees, as a number."""
    return 10.0 * len(row["turns"]) + len(row["replies"])
