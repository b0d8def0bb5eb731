"""The scorer: totals, failures, and what the trainer makes of them."""

import math
import re

import pytest

import grpo
from grpo import Config, Prompt
from harness.flags import ConfigError, TrainingError
from harness.scorer import Scorer
from harness.user_code import load_rewards
from tests.common import REWARDS, ids_of, random_samples, small_run

pytest_plugins = "tests.common"


def test_token_ids_are_lists(tmp_path):
    (tmp_path / "ids.py").write_text(
        "def last(completion, row):\n    return row['completion_ids'].index(9) + 0.5\n"
    )
    samples = random_samples(2, 2)
    for sample in samples:
        sample.prompt.row = {"answer": "1"}
        sample.completion_ids = ids_of([4, 5, 9])
    scorer = Scorer(load_rewards(f"overlong,{tmp_path}/ids.py:last"), timeout=60, workers=1)
    scores = grpo.score(samples, scorer, 1, Config())
    scorer.close()
    assert scores.by_reward == {"overlong": [0.0, 0.0], "last": [2.5, 2.5]}


def test_a_reward_that_fails_counts_zero_or_is_left_out():
    samples = random_samples(4, 4)
    for sample, text in zip(samples, ("<think>1</think>7", "7", "8", "7"), strict=True):
        sample.text = text
        sample.prompt = Prompt([2], "", {"answer": "7"})
    samples[3].prompt = Prompt([2], "", {})  # the reward fails without an answer
    scorer = Scorer(load_rewards("answer"))
    for failure, last_reward, mean in (("zero", 0.0, 1 / 2), ("exclude", math.nan, 2 / 3)):
        cfg = Config(num_generations=4, reward_failure=failure, scale_rewards="none")
        assert grpo.score(samples, scorer, 1, cfg).failures == {"exception": 1}
        rewards = [sample.reward for sample in samples]
        assert rewards == pytest.approx([1.0, 1.0, 0.0, last_reward], nan_ok=True)
        grpo.assign_advantages(samples, 1, cfg)
        assert samples[0].advantages[0] == pytest.approx(1 - mean)
        assert samples[3].in_loss.all() == (failure == "zero")
        assert grpo.sample_metrics(samples)["reward"] == pytest.approx(mean)
    scorer.close()


def test_a_cut_off_completion_gets_the_reward_of_the_flag():
    samples = random_samples(2, 2)
    scorer = Scorer(load_rewards("answer"))
    for sample, reason in zip(samples, ("stop", "length"), strict=True):
        sample.text = "7"
        sample.finish_reason = reason
        sample.prompt = Prompt([2], "", {"answer": "7"})
    for value, expected in ((None, 1.0), (0.0, 0.0), (-1.0, -1.0)):  # 0 is a value
        grpo.score(samples, scorer, 1, Config(non_stop_reward=value))
        assert [sample.reward for sample in samples] == [1.0, expected]
        assert samples[1].parts["answer"] == 1.0
    scorer.close()


def test_a_cut_off_completion_without_a_reward_stays_without_one(tmp_path):
    """The flag replaces a reward; it makes none for a sample to which no reward applies."""
    (tmp_path / "none.py").write_text(
        "def some(completions, **_):\n    return [None if c == 'x' else 1.0 for c in completions]\n"
    )
    samples = random_samples(2, 2)
    for sample, text in zip(samples, ("7", "x"), strict=True):
        sample.text = text
        sample.finish_reason = "length"
        sample.prompt = Prompt([2], "", {})
    scorer = Scorer(load_rewards(f"{tmp_path}/none.py:some"), timeout=60, workers=1)
    grpo.score(samples, scorer, 1, Config(num_generations=2, non_stop_reward=-1.0))
    scorer.close()
    assert [sample.reward for sample in samples] == pytest.approx([-1.0, math.nan], nan_ok=True)


def test_a_reward_that_fails_is_said(tmp_path, capsys):
    (tmp_path / "rewards.py").write_text(REWARDS)
    with pytest.raises(
        TrainingError, match="in every sample of step 1 a reward failed or returned None"
    ):
        small_run(tmp_path / "out", reward=f"{tmp_path}/rewards.py:wrong_key")
    line = r"reward wrong_key failed: exception: KeyError: 'anwser'"
    assert re.search(line, capsys.readouterr().out)
    metrics = small_run(tmp_path / "out.1", reward=f"{tmp_path}/rewards.py:sometimes")
    output = capsys.readouterr().out
    assert output.count("reward sometimes failed: ") == 1
    assert "ZeroDivisionError" in output
    with_failures = [line for line in metrics if line.get("failed_rewards")]
    for line in with_failures:
        assert line["failed_rewards"] == line["reward_failed/exception"]
    shown = [int(n) for n in re.findall(r"FAILED REWARDS (\d+)", output)]
    assert shown == [line["failed_rewards"] for line in with_failures]
    assert 0 < shown[0] < 15
    with pytest.raises(
        TrainingError, match="in every sample of step 1 a reward failed or returned None"
    ):
        small_run(tmp_path / "none", reward=f"{tmp_path}/rewards.py:none")


def test_a_gold_answer_that_nothing_can_match_is_named_by_row(tmp_path):
    data = tmp_path / "rows.jsonl"
    data.write_text('{"prompt": "a", "answer": "5"}\n{"prompt": "b", "answer": ["5"]}\n')
    cfg = Config(**grpo.BUNDLED | dict(train_data=str(data), eval_data=""))
    message = (
        f"--train_data {re.escape(str(data))} row 2: no completion can have the answer \\['5'\\]"
    )
    with pytest.raises(ConfigError, match=message):
        grpo.load_data(cfg)


def test_built_ins_start_no_process():
    scorer = Scorer(load_rewards("gsm8k:2,format:0.5"))
    rows = [{"answer": "42"}, {"answer": "42"}, {"question": "a\nb", "prompt_text": "c"}]
    scores = scorer.score(["<think>a</think>42", "42", "42"], rows)
    assert not any(worker.process for worker in scorer.pool.workers)
    assert scores.totals == [2.5, 2.0, 0.0]
    assert scores.by_reward == {"gsm8k": [1.0, 1.0, 0.0], "format": [1.0, 0.0, 0.0]}
    assert scores.failed == [False, False, True] and scores.failures == {"exception": 1}
    line = r"reward gsm8k failed: exception: KeyError: 'answer' \(reward.py:\d+\)"
    assert re.fullmatch(
        line + r"; row: {'question': 'a\\nb', 'prompt_text': 'c'}", scores.first_failure
    )
    assert scorer.score([], []).totals == []
    scorer.close()


def test_none_means_that_a_reward_does_not_apply(scorer):
    scores = scorer("only_even", "trl_waits:2").score(["ab", "abc", "none", "n"], [{}] * 4)
    assert str(scores.by_reward["only_even"]) == "[4.0, nan, 4.0, nan]"
    assert str(scores.by_reward["trl_waits"]) == "[2.0, 2.0, nan, 2.0]"
    assert scores.totals == [8.0, 4.0, 4.0, 4.0] and not scores.failures
    scores = scorer("only_even").score(["ab", "abc"], [{}] * 2)
    assert str(scores.totals) == "[4.0, nan]"  # no reward applies: no total
    assert scores.failed == [False, False]


def test_a_trl_function_that_fails_costs_the_samples_of_its_call(scorer):
    row = {"prompt_text": ""}
    for completion, cause in (("raise", "exception"), ("short", "exception"), ("hang", "timeout")):
        scores = scorer("trl_misbehave", "length", timeout=3).score(["a", completion], [row] * 2)
        assert scores.by_reward["trl_misbehave"] == [0.0, 0.0]
        assert scores.totals == [1.0, len(completion)]
        assert scores.failures == {cause: 2} and scores.failed == [True, True]
        assert scores.first_failure.startswith(f"reward trl_misbehave failed: {cause}: ")
    scores = scorer("trl_string").score(["a", "b"], [{}] * 2)
    assert scores.failures == {"invalid": 2}
    line = "reward trl_string failed: invalid: '"
    assert scores.first_failure.startswith(line) and "' is no finite number" in scores.first_failure
    assert scorer("trl").score([], []).totals == []  # a rank may have no samples
