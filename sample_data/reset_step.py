"""An adapter for environments with reset(seed) and step(action), the shape of gem-llm, textarena,
skyrl-gym and OpenEnv: here a game of gem-llm, guess the number.

    pip install --no-deps gem-llm==0.1.0
    python grpo.py --model MODEL --chat --environment sample_data/reset_step.py:play \\
        --train_data sample_data/reset_step.py:rows --reward sample_data/reset_step.py:score

A row is a seed. Each call plays the turns so far again, so nothing is kept between calls.
"""

from gem.envs.game_env.guess_the_number import GuessTheNumberEnv


def replay(turns: list[str], seed: int) -> tuple:
    """What the environment says last, the sum of its rewards, and whether the episode is over."""
    environment = GuessTheNumberEnv(max_turns=5)
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
