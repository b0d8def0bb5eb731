"""How agents.py calls the user's code of an environment, and what it keeps of an episode. The code
runs in the trainer's process, within a time limit. What it draws from `random` and NumPy is a
function of the seed, the row and the turn."""

import copy
import inspect
import random
import re
from concurrent.futures import wait

import numpy as np

from reward import FAILURES, begin, finish, time_limit


class Episode:
    def __init__(self):
        self.seed = ()  # for the policy's turns
        self.object = None  # of a class of the environment
        self.turns = []  # the policy's texts
        self.replies = []  # after each turn: a text, or messages of tools
        self.messages = []  # both as a chat, in TRL's form
        self.turn_start = 0  # index of the last turn's first token in the completion
        self.calls = self.failed_calls = 0
        self.failure = ""

    def __getstate__(self):  # ranks send each other episodes, and cannot send such an object
        return self.__dict__ | dict(object=None)

    def log_columns(self):
        """What completions.jsonl has of an episode."""
        return dict(turns=self.turns, replies=self.replies)

    def reward_columns(self):
        """What reward functions get of it. environments: the object of a class."""
        columns = copy.deepcopy(self.log_columns() | dict(completion_messages=self.messages))
        if self.object is not None:
            columns["environments"] = self.object
        return columns


def seed_random(*numbers):  # what the user's code draws is a function of seed, row and turn
    random.seed(str(numbers))
    np.random.seed(random.getrandbits(32))


async def seeded(coroutine, seed):
    seed_random(seed)
    return await coroutine


def at_once(generators, seconds):
    """What each returns, or its error. The coroutines that they yield run at the same time."""
    futures = dict.fromkeys(generators)
    ended = {**futures}
    while futures:
        waiting = {}
        for generator, future in futures.items():
            try:
                waiting[generator] = generator.send(future)
            except StopIteration as end:
                ended[generator] = end.value
            except FAILURES as error:
                ended[generator] = error
        futures = {g: begin(seconds, seeded, *waiting[g]) for g in waiting}
        wait(futures.values(), seconds)
    return list(ended.values())


def methods_of(instance):
    members = inspect.getmembers(type(instance), inspect.isfunction)
    pattern = "(?!_|(reset|get_reward|close)$)"
    return [getattr(instance, name) for name, _ in members if re.match(pattern, name)]


def call(seconds, function, /, *arguments, **named):
    """The result of the user's code, for at_once: a coroutine is yielded, and its Future sent."""
    with time_limit(seconds):
        result = function(*arguments, **named)
    if inspect.iscoroutine(result):
        seed = random.random()  # for what it draws, and for what this episode draws after it
        result = finish((yield result, seed))
        seed_random(seed, 1)
    return result
