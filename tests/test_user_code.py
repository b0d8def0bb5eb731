"""Loading the user's files, with their neighbours, and calling reward functions as TRL does."""

import math
import os
import subprocess
import sys

import pytest

import grpo
import reward
from grpo import Config
from harness.flags import ConfigError
from harness.scorer import Scorer
from harness.user_code import call_reward, import_file, load_rewards, sources
from tests.common import HERE

pytest_plugins = "tests.common"


def test_load(file):
    names = ("length:-1e-1", "needs_gold", "trl", "trl_keywords:0")
    rewards = load_rewards("gsm8k, format:0.2," + ",".join(f"{file}:{name}" for name in names))
    names = [(r.name, r.weight, r.columns, r.trusted, r.batched) for r in rewards]
    assert names == [
        ("gsm8k", 1.0, ("answer",), True, False),
        ("format", 0.2, (), True, False),
        ("length", -0.1, (), False, False),
        ("needs_gold", 1.0, ("gold",), False, False),
        ("trl", 1.0, ("answer",), False, True),
        ("trl_keywords", 0.0, ("answer",), False, True),
    ]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (
            "gsm9k",
            "unknown; known: answer, gsm8k, format, countdown, overlong, environment, math, path",
        ),
        ("gsm8k:nan", "nan is no finite number"),
        ("gsm8k:", "expected name"),
        ("gsm8k:a", "could not convert string to float: 'a'"),
        ("", "expected name"),
        ("gsm8k,gsm8k:2", "two rewards are called gsm8k"),
        ("missing.py:f", "No such file"),
        ("FILE:nothing", "no plain function nothing"),
        ("FILE:constant", "no plain function constant"),
        ("FILE:one_argument", "takes neither"),
        (
            "FILE:takes_answer",
            "takes_answer(completion, answer) takes neither (completion, row), by these names",
        ),
        ("FILE:hidden", "hidden(*args, **kwargs) takes neither"),
        ("FOLDER/broken.py:f", "ZeroDivisionError: division by zero"),
    ],
)
def test_load_errors_are_one_line(spec, message, file):
    spec = spec.replace("FILE", file).replace("FOLDER", os.path.dirname(file))
    with pytest.raises(ValueError) as caught:
        load_rewards(spec)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_math_without_its_library(monkeypatch):
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(ConfigError, match="--reward math: .*math_verify"):
        grpo.load_data(Config(reward="math"))


def test_trl_functions(scorer):
    names = ["trl", "trl_keywords", "trl_overlong", "trl_only_keywords", "trl_waits", "trl_object"]
    rows = [
        {"answer": a, "prompt_text": prompt, "completion_ids": [1] * int(a)}
        for a, prompt in (("1", "a"), ("2", "a"), ("3", "b"))
    ]
    scores = scorer(*names).score(["1", "x", "3"], rows)
    assert scores.failures == {} and scores.first_failure == ""
    assert list(scores.by_reward.values()) == [
        [1, 0, 1],
        [3, 0, 3],
        [-1, -2, -3],
        [1, 0, 1],
        [2, 2, 2],
        [3, 0, 3],
    ]
    assert scorer("waits").score(["a", "b"], [{}] * 2).totals == [1.0, 1.0]


def test_trl_chats_state_and_logs(scorer):
    chat = [{"role": "user", "content": "a"}]
    row = {
        "answer": "1",
        "prompt": "a",
        "prompt_text": "<user>a",
        "prompt_messages": chat,
        "completion_ids": [1, 2],
    }
    rows = [row | {"trainer_state": {"global_step": 1, "max_steps": 4}}] * 2
    scores = scorer("trl_everything", "trl_chat").score(["abc", "de"], rows)
    assert scores.by_reward == {"trl_everything": [2.25, 2.25], "trl_chat": [3, 2]}
    assert scores.metrics == {"batch": 2} and scores.extra == {"seen": ["1", "1"]}
    text = scorer("trl_chat").score(["abc"], [{"prompt_text": "a"}])  # not a chat
    assert text.failures == {"exception": 1}


@pytest.mark.parametrize("chat", (True, False))
def test_trl_own_functions(chat, scorer, tmp_path):
    """TRL's own functions give the scorer the values that they give TRL's trainer."""
    trl = pytest.importorskip("trl.rewards")
    (tmp_path / "own.py").write_text(
        "from trl import rewards\n"
        "from trl.rewards import accuracy_reward, reasoning_accuracy_reward, think_format_reward\n"
        "cosine = rewards.get_cosine_scaled_reward(max_len=10)\n"
        "repetition = rewards.get_repetition_penalty_reward(ngram_size=2)\n"
        "overlong = rewards.get_soft_overlong_punishment(10, 4)\n"
    )
    own = import_file(str(tmp_path / "own.py"))
    names = [
        "accuracy_reward",
        "reasoning_accuracy_reward",
        "think_format_reward",
        "cosine",
        "repetition",
        "overlong",
    ]
    assert len(names) == sum(len(n) for n in trl._import_structure.values())  # all of them
    texts = ["<think>a</think>$\\boxed{4}$", "$\\boxed{5}$", "<think>$4$</think> so $4$", "", "$4$"]
    ids = [[1, 2, 3], list(range(8)), [5] * 12, [], [1, 2, 1, 2]]
    solutions = ["$4$", "$4$", "$4$", "$4$", "?"]
    rows = [
        {"solution": solution, "completion_ids": i, "prompt_text": "2+2"}
        for solution, i in zip(solutions, ids, strict=True)
    ]
    prompts = ["2+2"] * len(texts)
    completions = texts
    if chat:
        message = [{"role": "user", "content": "2+2"}]
        rows = [row | {"prompt_messages": message} for row in rows]
        prompts = [message] * len(texts)
        completions = [[{"role": "assistant", "content": text}] for text in texts]
    else:
        names = names[-2:]  # the others take chats only
    scorer = Scorer(load_rewards(",".join(f"{tmp_path}/own.py:{name}" for name in names)), 60)
    scores = scorer.score(texts, rows)
    scorer.close()
    assert not scores.failures and not scores.first_failure

    columns = dict(prompts=prompts, completions=completions, completion_ids=ids, solution=solutions)
    state = dict(trainer_state=None, log_extra=lambda *_: None, log_metric=lambda *_: None)
    for name in names:
        values = getattr(own, name)(**columns, **state)
        expected = [math.nan if value is None else value for value in values]
        assert scores.by_reward[name] == pytest.approx(expected, nan_ok=True), name
    if chat:
        accuracy = scores.by_reward["accuracy_reward"]
        assert accuracy[:2] == [1.0, 0.0] and math.isnan(accuracy[4])


OWN_NEIGHBOUR = """
import reward, helpers
def f(completion, row):
    return reward.N + helpers.N
"""


def test_a_file_gets_its_own_neighbours(tmp_path, monkeypatch):
    """Even if one is called reward.py, as ours is, or as a neighbour of another file is."""
    monkeypatch.chdir(tmp_path)
    our_reward = sys.modules["reward"]
    path = list(sys.path)
    for folder, number in (("a", 1), ("b", 10)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "mine.py").write_text(OWN_NEIGHBOUR)
        for name in ("reward", "helpers"):
            (tmp_path / folder / f"{name}.py").write_text(f"N = {number}")
    monkeypatch.setattr(sys, "path", [*sys.path, tmp_path])  # as a notebook adds a Path
    for folder, total in (("a", 2), ("b", 20)):
        scorer = Scorer(load_rewards(f"{folder}/mine.py:f"), workers=1, timeout=60)
        assert scorer.score([""], [{}]).totals == [total]
        scorer.close()
    assert sys.modules["reward"] is our_reward is reward
    assert sys.path[: len(path)] == path


def test_a_file_that_is_edited_during_a_run(tmp_path, capfd):
    path = tmp_path / "edited.py"
    path.write_text(
        "import os\n"
        "def f(completion, row):\n"
        "    if completion == 'x': os._exit(1)\n"
        "    return 1.0\n"
    )
    rewards = load_rewards(f"{path}:f")
    scorer = Scorer(rewards, workers=1, timeout=60)
    before = sources(rewards)
    assert scorer.score(["a"], [{}]).totals == [1.0]
    path.write_text("def f(completion, row): return 2.0\n")
    scores = scorer.score(["a", "x", "a", "x", "a"], [{}] * 5)  # new workers begin after each x
    assert scores.totals == [1.0, 0.0, 1.0, 0.0, 1.0] and scores.failures == {"died": 2}
    scorer.close()
    assert sources(rewards) == before != sources(load_rewards(f"{path}:f"))
    assert list(before) == [str(path)] and sources(load_rewards("gsm8k")) == {}


SCORE_ONE = """
import sys; sys.path.insert(0, sys.argv[1])
from harness.scorer import Scorer
from harness.user_code import load_rewards
rewards = load_rewards(sys.argv[2])
scorer = Scorer(rewards, workers=1, timeout=60)
print(scorer.score(["abc"], [{}]).totals, rewards[0].columns)
scorer.close()
"""


def test_a_path_that_is_not_ascii_where_the_locale_is(tmp_path):
    folder = tmp_path / "r\xe9compenses"
    folder.mkdir()
    (folder / "neighbour.py").write_text("ONE = 1")
    (folder / "file.py").write_text(
        "import neighbour\ndef f(completion, row): return len(completion) + neighbour.ONE"
    )
    done = subprocess.run(
        [sys.executable, "-c", SCORE_ONE, HERE, f"{folder}/file.py:f"],
        env=os.environ | dict(LC_ALL="C", PYTHONUTF8="0"),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.stdout == "[4.0] ()\n", done.stderr


def test_columns_are_those_of_any_row(scorer):
    rows = [{"answer": "1"}, {"answer": "1", "hint": "1"}]
    for batch, expected in ((rows, [0, 1]), (rows[::-1], [1, 0])):
        scores = scorer("trl_hint").score(["1"] * len(batch), batch)
        assert scores.totals == expected and not scores.failures


def test_what_a_reward_logs_cannot_end_a_run(scorer):
    [trl_logs] = scorer("trl_logs").rewards
    # called in this process, because a worker would take seconds to import torch
    values, metrics, extra = call_reward(trl_logs, ["a", "b"], [{}] * 2)
    assert values == [1.0, 1.0]
    assert metrics == {"numpy": 2.5, "torch": 3.0, "bool": 1.0, "3": 4.0}
    assert extra == {"numpy": ["0.5", "1.5"], "objects": ["<object>", "None"]}
    assert {type(value) for value in metrics.values()} == {float}  # no object of theirs
