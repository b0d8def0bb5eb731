"""Sessions: how the user's code of an environment is called, and the objects of its classes.

agents.py takes this file. The user's code runs in the trainer's process, within a time limit. Of a
class there are as many objects as episodes at once, as in TRL: an object may be a client of a
server that has so many places. What it draws from `random` and NumPy is a function of the seed, the
row and the turn. What an object remembers beyond reset() no resume can know.
"""

import copy
import inspect
import random
import re
from collections import defaultdict
from concurrent.futures import wait

import numpy as np

from reward import FAILURES, begin, cause_of, finish, time_limit


class Episode:
    def __init__(self):
        self.seed = ()  # for the policy's turns
        self.cls = self.object = None  # a class of the environment, and an instance
        self.turns = []  # the policy's texts
        self.replies = []  # after each turn: a text, or messages of tools
        self.messages = []  # both as a chat, in TRL's form
        self.turn_start = 0  # index of the last turn's first token in the completion
        self.calls = self.failed_calls = 0
        self.failure = ""

    def __getstate__(self):  # ranks send each other episodes, and cannot send such objects
        return self.__dict__ | dict(cls=None, object=None)

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
        result = finish((yield result, seed), 0)
        seed_random(seed, 1)
    return result


def why(error, spec: str) -> str:
    """What failed, in one line."""
    return f"{spec} failed: {cause_of(error)}"


class Sessions:
    """The objects of an environment's classes, and the episodes that they are in."""

    def __init__(self, environment, tokenizer, cfg, make_prompt, room):
        self.environment = environment
        self.tokenizer = tokenizer
        self.cfg = cfg
        self.make_prompt = make_prompt
        self.room = room
        self.openings = {}  # of each row, what reset() says
        self.episodes = []  # that began last
        self.free = defaultdict(list)  # objects of each class that are in no episode

    def open(self, prompts: list, strict: bool = False) -> list:
        """Begins an episode of each prompt. Returns the prompts, which end with what reset() says.
        The objects of the episodes before are used again, so their rewards must be known. Those
        that failed are closed. strict: ValueError if one of these episodes cannot begin."""
        if not self.environment.classes:
            return prompts
        if strict:
            self.open(prompts)  # an object must also begin a second time, and say the same
        self.end([e.object for e in self.episodes if e.failure])
        for e in self.episodes:
            if not e.failure:
                self.free[e.cls].append(e.object)
        self.episodes = [Episode() for _ in prompts]
        opened = at_once(map(self.start, self.episodes, prompts), self.environment.seconds)
        failures = [e.failure for e in self.episodes if e.failure]
        if strict and failures:
            raise ValueError(f"no episode can begin: {failures[0]}")
        return opened

    def start(self, episode, prompt):
        environment = self.environment
        seed = (self.cfg.seed, prompt.row_number)
        row = copy.deepcopy(prompt.row)  # which the class may change
        episode.cls = environment.classes[row.pop(environment.column, None)]  # no column of reset's
        try:
            if self.free[episode.cls]:
                episode.object = self.free[episode.cls].pop(0)
            else:
                seed_random(self.cfg.seed)  # so that all objects are the same
                episode.object = yield from call(environment.seconds, episode.cls)
            seed_random(*seed, 0)
            said = yield from call(environment.seconds, episode.object.reset, **row)
            if said != self.openings.setdefault(hash((seed, str(prompt.row))), said):
                raise ValueError("reset() says two things to one row and seed")
            data = (prompt.row, prompt.row_number, self.tokenizer, environment, self.cfg)
            longer = self.make_prompt(*data, said or "")
            if len(longer.ids) > self.room:
                ids = f"a prompt and what reset() says are {len(longer.ids)} tokens"
                raise ValueError(f"{ids}; by --max_prompt_length or the model {self.room} at most")
            return longer
        except FAILURES as error:
            episode.failure = why(error, environment.spec)
            return prompt

    def end(self, objects):
        seconds = self.environment.seconds
        ends = at_once([call(seconds, o.close) for o in objects if hasattr(o, "close")], seconds)
        errors = [end for end in ends if isinstance(end, FAILURES)]
        if errors:  # a server may keep its places
            print(f"close() in {why(errors[0], self.environment.spec)}", flush=True)

    def close(self):
        """Calls close() of all objects, where there is one."""
        self.open([])  # from here on all are free
        self.end(sum(self.free.values(), []))
