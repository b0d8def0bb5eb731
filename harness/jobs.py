"""What a worker loads and calls: rewards, and the environment."""

from collections.abc import Callable
from functools import partial

from harness.environment import Environment, final_object, find_environment, observe, reply_to
from harness.user_code import call_reward, find_reward
from harness.workers import WorkerPool

REPLY = "environment.reply"  # names of jobs; no reward has a dot in its name
OBSERVE = "environment.observe"
MEMORY = 4 << 30  # bytes that a worker may take for its calls (Linux only)


def make_pool(
    rewards: list,
    environment: Environment | None,
    timeout: float,  # seconds of a call
    workers: int,
) -> WorkerPool:
    """Workers for the rewards that the trainer does not trust, and for the environment."""
    files = [(r.name, r.path, r.text) for r in rewards if not r.trusted]
    environment_file = None
    if environment is not None:
        environment_file = (environment.name, environment.path, environment.text)
    return WorkerPool("harness.jobs:load", (files, environment_file), timeout, MEMORY, workers)


# -- In a worker


def load(rewards: list[tuple], environment: tuple | None) -> dict[str, Callable]:
    """{name of a job: its function}. rewards, environment: (name, path, text) of each."""
    functions = {}
    if environment is not None:
        import numpy  # noqa: F401  now, so that no call waits for it within its time limit

        environment = find_environment(*environment)
        functions[REPLY] = partial(reply_to, environment)
        functions[OBSERVE] = partial(observe, environment)
    for reward in rewards:
        functions[reward[0]] = partial(call_with_objects, find_reward(*reward), environment)
    return functions


def call_with_objects(reward, environment: Environment | None, completions, rows) -> tuple:
    """call_reward, with the objects of an environment's class in place of the transcripts."""
    for row in rows:
        transcript = row.pop("environments", None)
        if reward.reads_objects:  # else no object need be here, or be made again
            row["environments"] = final_object(environment, transcript)
    return call_reward(reward, completions, rows)
