"""The environments of sample_data/: they answer as they should, and the bundled model learns to use
them."""

import contextlib
import importlib.util
import json
import os

import pytest

import grpo
import harness.log
import harness.rows
from grpo import Config
from harness.environment import find_environment, load_environment
from harness.player import Player
from harness.scorer import Scorer
from tests.common import BUNDLED, CPU, HERE, lines, read

pytest_plugins = "tests.common"

SAMPLE_DATA = os.path.join(HERE, "sample_data")
CALCULATOR = os.path.join(SAMPLE_DATA, "calculator.py") + ":octal"
GUESS_NUMBER = os.path.join(SAMPLE_DATA, "guess_number.py") + ":guess_number"
GUESS_ROWS = os.path.join(SAMPLE_DATA, "guess_number.py") + ":rows"
TRAIN = os.path.join(SAMPLE_DATA, "octal_train.jsonl")
EVAL = os.path.join(SAMPLE_DATA, "octal_eval.jsonl")


def function_of(spec):
    path, _, name = spec.rpartition(":")
    return find_environment(name, path).target


@contextlib.contextmanager
def player_of(spec, **options):
    """The bundled model's sampler, the player of an environment, and the flags of both."""
    cfg = Config(**(grpo.BUNDLED | dict(environment=spec, num_generations=4) | options))
    environment = load_environment(spec, [])
    tokenizer = harness.rows.load_tokenizer(BUNDLED)
    scorer = Scorer([], environment=environment, workers=1)
    try:
        eos_id = tokenizer.eos_token_id
        player = Player(environment, scorer.pool, tokenizer, [eos_id], prompts=[], cfg=cfg)
        model = grpo.load_model(cfg.model, cfg)
        sampler = grpo.HFSampler(model, player.stop_ids, tokenizer.pad_token_id, cfg)
        yield sampler, player, cfg
    finally:
        scorer.close()


def episodes_of(spec, rows, **options):
    """Samples of the bundled model with an environment, four for each row."""
    with player_of(spec, **options) as (sampler, player, cfg):
        prompts = []
        for row in rows:
            prompts.append(harness.rows.encode_prompt(row, player.tokenizer, cfg))
        seeds = grpo.seeds_of(0, 1, len(prompts), cfg)
        return grpo.sample(sampler, prompts, seeds, cfg, CPU, player=player), player.tokenizer


def texts_of_context(sample, tokenizer):
    """What the policy did not sample, one text for each run of such tokens."""
    texts = []
    for i, token in enumerate(sample.completion_ids):
        if sample.sampled[i]:
            continue
        if i == 0 or sample.sampled[i - 1]:
            texts.append("")
        texts[-1] += tokenizer.decode([int(token)])
    return texts


# ------------------------------------------------------------------------------------------------
# The calculator


@pytest.mark.parametrize(
    "turn, reply",
    [
        ("<think>3+7=", "12"),
        (" 2+4+1=", "7"),
        ("123+456=", "601"),
        ("777+1=", "1000"),
        ("<think>1+1=2 7+7=", "16"),
        ("172", None),  # an answer: the episode is over
        ("</think>172", None),
        ("7=", None),
        ("3+8=", None),  # no octal number
        ("+=", None),
        ("=", None),
        ("", None),
    ],
)
def test_the_calculator_adds_octal_numbers(turn, reply):
    assert function_of(CALCULATOR)(["<think>1+1=", turn], {}) == reply


def test_episodes_with_the_calculator():
    """Its digits are right and are context. A turn with a question ends at its "="."""
    samples, tokenizer = episodes_of(CALCULATOR, lines(TRAIN)[:8])
    asking = [s for s in samples if len(s.transcript.turns) > 1]
    assert 3 <= len(asking) <= 16  # about one in five thinks
    for s in asking:
        assert texts_of_context(s, tokenizer) == s.transcript.replies
        for question, reply in zip(s.transcript.turns, s.transcript.replies, strict=False):
            numbers = question.removeprefix("<think>").strip(" =").split("+")
            assert question.endswith("=")
            assert int(reply, 8) == sum(int(number, 8) for number in numbers)


def test_octal_rows_are_right_and_the_eval_is_held_out(tmp_path):
    spec = importlib.util.spec_from_file_location("make", os.path.join(SAMPLE_DATA, "make.py"))
    make = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(make)
    make.write_octal(tmp_path, seed=0)
    problems = {}
    for path in (TRAIN, EVAL):
        assert read(path) == read(tmp_path / os.path.basename(path))
        problems[path] = set()
        for row in lines(path):
            a, b = row["prompt"].removesuffix("=").split("+")
            assert int(row["answer"], 8) == int(a, 8) + int(b, 8)
            problems[path].add(tuple(sorted((a, b))))
    assert len(problems[TRAIN]) == 4000
    assert len(problems[EVAL]) == 500
    assert not problems[TRAIN] & problems[EVAL]


def train(out, **flags):
    """The bundled run with these flags. Returns its eval lines and its step lines."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(harness.log, "draw", lambda *_: None)  # would take longer than a short run
        metrics = grpo.train(
            Config(**(grpo.BUNDLED | dict(rollout="hf", out_dir=str(out)) | flags))
        )
    evals = [line for line in metrics if "eval_accuracy" in line]
    return evals, [line for line in metrics if "reward" in line]


def short_octal_run(tmp_path, name, **flags):
    """A run of 4 steps on octal sums that logs the mean number of turns."""
    held_out = tmp_path / "held_out.jsonl"
    held_out.write_text("".join(json.dumps(row) + "\n" for row in lines(EVAL)[:50]))
    (tmp_path / "turns.py").write_text("def turns(completion, row): return len(row['turns'])\n")
    reward = f"answer,{tmp_path}/turns.py:turns:0"
    sizes = dict(num_prompts=16, max_steps=4, learning_rate=6e-4, eval_every=0, save_every=0)
    data = dict(train_data=TRAIN, eval_data=str(held_out), reward=reward)
    return train(tmp_path / name, **sizes, **data, **flags)


def test_the_model_learns_to_ask_the_calculator(tmp_path):
    """Without the calculator it learns nothing in these steps: it has seen no octal sum."""
    evals, steps = short_octal_run(tmp_path, "asks", environment=CALCULATOR)
    assert evals[0]["eval_accuracy"] < 0.3
    assert evals[-1]["eval_accuracy"] > 0.8
    assert steps[0]["rewards/turns/mean"] < 2
    assert steps[-1]["rewards/turns/mean"] > 2.5

    evals, _ = short_octal_run(tmp_path, "alone")
    assert evals[-1]["eval_accuracy"] < 0.3


# ------------------------------------------------------------------------------------------------
# Guess the number


@pytest.mark.parametrize(
    "turn, reply", [("3", "9="), ("6", "0="), ("12", "0="), ("5", None), ("", None), ("4+", None)]
)
def test_hints_of_guess_number(turn, reply):
    assert function_of(GUESS_NUMBER)(["1", turn], {"answer": "5"}) == reply


def test_games_of_guess_number():
    """Hints are right and are context. A game ends with the right guess, or after three."""
    rows = harness.rows.read_rows(GUESS_ROWS, "train_data")
    assert [row["answer"] for row in rows] == list("1234567")
    samples, tokenizer = episodes_of(GUESS_NUMBER, rows, max_turns=3, temperature=1.5)
    n_hints = 0
    for s in samples:
        secret = int(s.prompt.row["answer"])
        turns = s.transcript.turns
        hints = texts_of_context(s, tokenizer)
        assert len(hints) == len(turns) - 1
        for guess, hint in zip(turns, hints, strict=False):
            assert int(guess) != secret
            assert hint == ("9=" if int(guess) < secret else "0=")
        assert s.text == turns[-1]  # the reward sees the last guess
        if s.text.isdecimal() and int(s.text) != secret:
            assert len(turns) == 3
            assert s.finish_reason == "length"
        n_hints += len(hints)
    assert n_hints > 8


# ------------------------------------------------------------------------------------------------
# The runs of the README


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_run_with_the_calculator(tmp_path, seed):
    """The run of the README: nearly all of 500 held-out sums are right; alone, one in six."""
    flags = dict(seed=seed, train_data=TRAIN, eval_data=EVAL)
    evals, _ = train(tmp_path / "asks", **flags, environment=CALCULATOR)
    assert evals[0]["eval_accuracy"] < 0.25
    assert evals[-1]["eval_accuracy"] > 0.98
    evals, _ = train(tmp_path / "alone", **flags)
    assert evals[-1]["eval_accuracy"] < 0.25


@pytest.mark.slow
def test_guess_number_can_be_learned(tmp_path):
    """Three guesses without a hint find at most 3 of the 7 numbers."""
    rules = dict(environment=GUESS_NUMBER, max_turns=3, temperature=1.5)
    evals, _ = train(tmp_path / "game", **rules, train_data=GUESS_ROWS, eval_data=GUESS_ROWS)
    assert evals[0]["eval_accuracy"] < 2 / 7
    assert evals[-1]["eval_accuracy"] > 3.5 / 7
