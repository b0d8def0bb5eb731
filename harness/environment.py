"""Environments: they answer the policy between its turns. This module loads and calls them.

--environment file.py:name has one of three kinds:

    text    fn(turns, row) -> str | None: what it says after the policy's turns, None at the end
    tools   a list of functions that the policy may call, as TRL's tools=[...]
    class   a class with reset(**row), as TRL's environment_factory: its other public methods are
            tools. Or a dict of classes, of which the column `environment` names one

The transcript is the truth and comes with every call. The object of a class is only a cache of it,
in a worker: if the worker dies, the next call makes the object again and repeats the tool calls.
"""

import asyncio
import inspect
import random
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

from harness.flags import ConfigError, first_line
from harness.user_code import import_file
from reward import environment_reward

LONGEST_REPLY = 1_000_000  # characters; a longer reply is a failure
CACHED_OBJECTS = 4096  # in each worker


@dataclass(frozen=True)
class Environment:
    name: str
    target: Any  # what the user's file calls by this name
    kind: str  # "text", "tools" or "class"
    path: str
    text: str  # of the file: workers that start later run the same text

    def tools(self, row: dict) -> list:
        """The functions that the chat template describes to the policy."""
        if self.kind == "text":
            return []
        if self.kind == "tools":
            return list(self.target)
        return bound_methods(self.class_of(row))

    def place_of(self, transcript: "Transcript") -> int | None:
        """A number for the worker that caches the object of an episode: the pool takes it modulo
        its workers. None: there is no object, so any worker may answer."""
        if not has_objects(self):
            return None
        return sum(transcript.key)

    def class_of(self, row: dict):
        if not isinstance(self.target, dict):
            return self.target
        name = row.get("environment")
        if name not in self.target:
            names = ", ".join(self.target)
            raise ValueError(f"column 'environment' is {name!r}; the environments are: {names}")
        return self.target[name]


def has_objects(environment: Environment | None) -> bool:
    """True if an episode has an object, with state and perhaps with get_reward."""
    return environment is not None and environment.kind == "class"


@dataclass
class Transcript:
    """What was said in an episode. A call of the environment needs nothing else."""

    key: tuple  # names the episode in a worker's cache
    row: dict
    seed: int  # of the environment's random numbers: the same for a whole group
    observation: str  # what reset() said; it stands in the prompt
    turns: list[str] = field(default_factory=list)  # the policy's texts
    calls: list[list] = field(default_factory=list)  # tool calls of each turn: (name, arguments)
    replies: list = field(default_factory=list)  # after each turn: a text, or tool messages
    failed_calls: int = 0  # tool calls that raised


# -- Loading


def load_environment(spec: str, rewards: list) -> Environment | None:
    """The environment of `--environment file.py:name`. ConfigError if there is none, or if it
    lacks what the rewards read."""
    environment = None
    if spec:
        path, _, name = spec.rpartition(":")
        try:
            if not path:
                raise ValueError("expected path/to/file.py:name")
            environment = find_environment(name, path)
            check_target(environment)
        except Exception as error:  # the user's classes and functions raise what they like
            raise ConfigError(f"--environment {spec}: {first_line(error)}") from None
    for reward in rewards:
        if not reward.reads_objects:
            continue
        why = ""
        if not has_objects(environment):
            why = f"--reward {reward.name} needs a class with reset()"
        elif reward.function is environment_reward and not can_reward(environment):
            why = f"{environment.name} has no get_reward(), which --reward environment calls"
        if why:
            raise ConfigError(f"--environment {spec}: {why}")
    return environment


def can_reward(environment: Environment) -> bool:
    """False if no class of the environment has get_reward()."""
    return any(hasattr(cls, "get_reward") for cls in classes_in(environment.target))


def check_target(environment: Environment) -> None:
    """ValueError if the policy could not call the tools, or if `stop` is not several texts."""
    target = environment.target
    if isinstance(getattr(target, "stop", ()), str):
        raise ValueError("its stop is a text, where it must be a tuple of texts")
    if environment.kind == "tools":
        check_tools(target)
    if environment.kind == "class":
        for cls in classes_in(target):
            check_tools(bound_methods(cls))


def check_tools(tools: list) -> None:
    from transformers.utils import get_json_schema  # here, because workers must start soon

    names = set()
    for tool in tools:
        if not hasattr(tool, "__name__"):
            raise ValueError(f"{tool!r} is no function")
        name = tool.__name__
        if name in names:
            raise ValueError(f"two tools are called {name}")
        names.add(name)
        for parameter in inspect.signature(tool).parameters.values():
            if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.VAR_POSITIONAL):
                why = "the policy names its arguments, so none can be without a name"
                raise ValueError(f"{name}: {why}: {inspect.signature(tool)}")
        try:
            get_json_schema(tool)  # as the chat template does
        except Exception as error:
            raise ValueError(first_line(error)) from None


def find_environment(name: str, path: str, text: str | None = None) -> Environment:
    """The environment of this name in a file, or in the file's saved text."""
    module = import_file(path, text)
    if not hasattr(module, name):
        raise ValueError(f"{module.__file__} has no {name}")
    target = getattr(module, name)
    kind = kind_of(target)
    if kind is None:
        kinds = "fn(turns, row), nor a list of functions, nor a class with reset()"
        raise ValueError(f"{name} is neither {kinds}, nor a dict of such classes")
    return Environment(name, target, kind, module.__file__, module.__source__)


def kind_of(target) -> str | None:
    classes = classes_in(target)
    if classes and all(inspect.isclass(c) and hasattr(c, "reset") for c in classes):
        return "class"
    if isinstance(target, (list, tuple)) and target and all(map(callable, target)):
        return "tools"
    if callable(target) and list(inspect.signature(target).parameters)[:2] == ["turns", "row"]:
        return "text"
    return None


def classes_in(target) -> list:
    """The values of a dict of classes, or the class alone."""
    if isinstance(target, dict):
        return list(target.values())
    return [target]


def bound_methods(cls) -> list:
    """The tools of a class, bound to an object, so that `self` is no argument of the policy's. The
    object is never initialised: state belongs to the workers."""
    unused = object.__new__(cls)
    return [getattr(unused, name) for name in tool_names(cls)]


def tool_names(cls) -> list[str]:
    """The public methods but reset and get_reward, as in TRL."""
    names = {name for name, _ in inspect.getmembers(cls, inspect.isfunction)}
    names -= {"reset", "get_reward"}
    return sorted(name for name in names if not name.startswith("_"))


# -- In a worker. What is raised here is the failure of one episode


def reply_to(environment: Environment, transcript: Transcript) -> tuple:
    """(what the environment says to the last turn, number of tool calls that raised).

    A text, None if the episode is over, or the messages of the tools.
    """
    if environment.kind == "text":
        seed_random(transcript.seed, len(transcript.turns))
        reply = result_of(environment.target(transcript.turns, transcript.row))
        return checked(reply), 0

    *earlier, calls = transcript.calls
    turn = len(transcript.calls)
    if environment.kind == "tools":
        tools = {function.__name__: function for function in environment.target}
        return run_tools(tools, calls, transcript.seed, turn)

    episode = object_after(environment, transcript, earlier)
    messages, failed = run_tools(methods_of(episode), calls, transcript.seed, turn)
    remember(transcript.key, episode, transcript.calls)
    return messages, failed


def observe(environment: Environment, transcript: Transcript) -> str:
    """What reset() says about a row."""
    return reset(environment, transcript)[1]


def final_object(environment: Environment, transcript: Transcript):
    """The object of an episode that is over, for rewards."""
    episode = object_after(environment, transcript, transcript.calls)
    remember(transcript.key, episode, transcript.calls)
    return episode


objects = OrderedDict()  # key of an episode -> (its object, the tool calls that it has answered)


def object_after(environment: Environment, transcript: Transcript, calls: list):
    """The object of an episode after these calls: from the cache, or made again.

    The cache gives it away: the caller changes the object, and then remembers it. If a call fails
    on the way, no half-changed object stays.
    """
    episode, answered = objects.pop(transcript.key, (None, None))
    if answered == calls:
        return episode

    episode, observation = reset(environment, transcript)
    if observation != transcript.observation:
        raise ValueError("reset() said something else to the same row and seed")
    for number, turn_calls in enumerate(calls):
        messages, _ = run_tools(methods_of(episode), turn_calls, transcript.seed, number + 1)
        if messages != transcript.replies[number]:
            raise ValueError("the same tool calls, repeated, had other results")
    return episode


def remember(key: tuple, episode, calls: list) -> None:
    objects[key] = (episode, calls)
    if len(objects) > CACHED_OBJECTS:
        objects.popitem(last=False)


def reset(environment: Environment, transcript: Transcript) -> tuple:
    """A new object, and what its reset() says."""
    seed_random(transcript.seed, 0)
    episode = environment.class_of(transcript.row)()
    row = dict(transcript.row)
    if isinstance(environment.target, dict):
        row.pop("environment")  # as in TRL
    observation = checked(result_of(episode.reset(**row)))
    return episode, observation or ""


def methods_of(episode) -> dict:
    return {name: getattr(episode, name) for name in tool_names(type(episode))}


def run_tools(functions: dict, calls: list, seed: int, turn: int) -> tuple[list[dict], int]:
    """The messages that answer these calls, and how many raised. The policy is told what a tool
    raises, in TRL's words."""
    seed_random(seed, turn)
    messages = []
    failed = 0
    for name, arguments in calls:
        try:
            if name not in functions:
                raise ValueError(f"Tool {name} not found.")
            content = str(result_of(functions[name](**arguments)))
        except MemoryError:  # the worker's limit, not an answer to the policy
            raise
        except Exception as error:
            content = str({"error": str(error)})
            failed += 1
        messages.append(dict(role="tool", name=name, content=checked(content)))
    return messages, failed


def result_of(value):
    if inspect.iscoroutine(value):
        return asyncio.run(value)
    return value


def checked(reply: str | None) -> str | None:
    if reply is None:
        return None
    if not isinstance(reply, str):
        raise TypeError(f"said {reply!r:.100}, which is neither a text nor None")
    if len(reply) > LONGEST_REPLY:
        raise ValueError(f"said {len(reply)} characters; the limit is {LONGEST_REPLY}")
    reply.encode()  # raises on half of a surrogate pair, which no tokenizer takes
    return reply


def seed_random(seed: int, turn: int) -> None:
    """Makes what the user's code draws a function of the prompt and the turn."""
    import numpy  # here, because workers without an environment need not wait for it

    number = (seed + turn) % 2**32
    random.seed(number)
    numpy.random.seed(number)
