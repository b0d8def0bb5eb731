"""The environment of agents.py: who is whose friend, and how old is everybody?

The class and the reward have TRL's form: `environment_factory=Friends`, `reward_funcs=right`. "How
old is Anna's friend?" takes both tools, one after the other, and then an answer: three turns.
"""

import json
import random
import re

NAMES = """Adam Alice Anna Ben Beth Bob Carl Clara Cora Dan David Dora Emil Emma Eva Fay Finn Frank
    Gina Grace Gus Hans Henry Hugo Ida Irene Ivy Jack Jane Jim Karl Kate Kim Lena Leo Lisa Mary Max
    Mike Nick Nora Olga Otto Paul Pia Ralf Rosa Sam Sue Tina Tom Ugo Uma Vera Vic Wendy Will Yann
    Zoe""".split()


class Friends:
    def reset(self, person: str, friend: str, ages: list, **_) -> None:
        self.friends = {person: friend, friend: person}
        self.ages = dict(zip((person, friend), ages, strict=True))
        self.wanted = [("friend", person), ("age", friend)]
        self.reached = 0

    def age(self, name: str) -> str:
        """Says how old a person is.

        Args:
            name: The person.
        """
        self._note("age", name)
        return str(self.ages[name])

    def friend(self, name: str) -> str:
        """Says who a person's friend is.

        Args:
            name: The person.
        """
        self._note("friend", name)
        return self.friends[name]

    def _note(self, tool: str, name: str) -> None:
        if (tool, name) in self.wanted[self.reached :][:1]:
            self.reached += 1

    def get_reward(self) -> float:
        """A quarter for each of the two right calls, in their order."""
        return self.reached / 4


def right(completions, answer, **_) -> list[float]:
    """Is the last turn the answer, and nothing else?"""
    rewards = []
    for messages, text in zip(completions, answer, strict=True):
        rewards.append(float(messages[-1].get("content", "").strip() == text))
    return rewards


def make_rows(questions: list[str], n: int, seed: int) -> list[dict]:
    rng = random.Random(seed)
    rows = []
    for i in range(n):
        person, friend = rng.sample(NAMES, 2)
        ages = rng.sample(range(20, 90), 2)
        question = questions[i % len(questions)].format(person)
        prompt = [dict(role="user", content=question)]
        rows.append(
            dict(prompt=prompt, person=person, friend=friend, ages=ages, answer=str(ages[1]))
        )
    return rows


def demonstrations() -> list[dict]:
    questions = ["How old is {}?", "Who is {}'s friend?", "How old is {}'s friend?"]
    return make_rows(questions, 96, seed=1)


def train() -> list[dict]:
    return make_rows(["How old is {}'s friend?"], 256, seed=2)


def held_out() -> list[dict]:
    return make_rows(["How old is {}'s friend?"], 32, seed=3)


def expert_turn(text: str) -> str:
    """The right turn after a text in the chat template of friends.jinja."""
    question = r"<\|im_start\|>user\n(How old|Who) is (\w+)('s friend)?\?"
    wanted, name, of_friend = re.search(question, text).groups()
    results = re.findall("<tool_response>(.*)</tool_response>", text)
    tools = []
    if of_friend:
        tools.append("friend")
    if wanted == "How old":
        tools.append("age")

    if len(results) == len(tools):
        return results[-1]
    if results:
        name = results[-1]
    call = dict(name=tools[len(results)], arguments=dict(name=name))
    return f"<tool_call>{json.dumps(call)}</tool_call>"
