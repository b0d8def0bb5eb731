"""An adapter for environments with reset(seed) and step(action), such as gem-llm's. The game is a
placeholder: put your class in the place of GuessTheNumber.

    python grpo.py --model MODEL --chat --environment sample_data/reset_step.py:play \\
        --train_data sample_data/reset_step.py:rows --reward sample_data/reset_step.py:score

A row is a seed. Each call plays the turns so far again, so nothing is kept between calls. For other
packages, change the lines in replay():

    textarena   environment.reset(num_players=1, seed=seed)
                _, said = environment.get_observation()  # with all that was said before
                is_over, _ = environment.step(turn)
                rewards, _ = environment.close()  # when it is over: {0: total}
    skyrl-gym   messages, _ = environment.init(messages)
                made = environment.step(turn)  # a dict with observations (messages), reward, done
    OpenEnv     result = await client.step(action)  # with observation, reward, done
                A client is a session of a server: write a class, see docs/REFERENCE.md.
"""

import random
import re


class GuessTheNumber:
    """The player has five guesses at a number from 1 to 20."""

    def reset(self, seed: int) -> tuple:
        self.number = random.Random(seed).randint(1, 20)
        self.guesses = 0
        return "Guess my number between 1 and 20. Put each guess into \\boxed{}.", {}

    def step(self, action: str) -> tuple:
        self.guesses += 1
        is_last = self.guesses == 5
        guess = re.search(r"\\boxed\{(\d+)\}", action)
        if guess is None:
            return "There is no guess in \\boxed{}.", 0.0, is_last, False, {}
        difference = self.number - int(guess[1])
        if difference == 0:
            return "Right.", 1.0, True, False, {}
        hint = "higher" if difference > 0 else "lower"
        return f"My number is {hint}.", 0.0, is_last, False, {}


def replay(turns: list[str], seed: int) -> tuple:
    """The environment's last text, the sum of its rewards, and whether the episode is over."""
    environment = GuessTheNumber()
    said, _ = environment.reset(seed)
    total, is_over = 0.0, False
    for turn in turns:
        said, reward, terminated, truncated, _ = environment.step(turn)
        total += reward
        is_over = terminated or truncated
    return said, total, is_over


def rows() -> list[dict]:
    return [dict(prompt=replay([], seed)[0], seed=seed) for seed in range(200)]


def play(turns: list[str], row: dict) -> str | None:
    said, _, is_over = replay(turns, row["seed"])
    return None if is_over else said


def score(completion: str, row: dict) -> float:
    return replay(row["turns"], row["seed"])[1]
