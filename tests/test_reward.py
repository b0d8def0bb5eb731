"""Rewards from files, TRL's functions, and the worker processes that run them."""

import contextlib
import json
import math
import os
import re
import signal
import subprocess
import sys
import time

import psutil
import pytest

import grpo
import harness.flags
import harness.rows
import harness.workers
import reward
from grpo import Config, Prompt
from harness.workers import Scorer
from reward import load_rewards
from tests.common import REWARDS, gone, ids_of, random_samples, small_run, wait_for

pytest_plugins = "tests.common"

HERE = harness.workers.HERE
ROW = dict(completion_length=1, max_completion_length=9)


def test_token_ids_are_lists(tmp_path):
    (tmp_path / "ids.py").write_text(
        "def last(completion, row):\n    return row['completion_ids'].index(9) + 0.5\n"
    )
    samples = random_samples(2, 2)
    for s in samples:
        s.prompt.row, s.completion_ids = {"answer": "1"}, ids_of([4, 5, 9])
    scorer = Scorer(load_rewards(f"overlong,{tmp_path}/ids.py:last"), timeout=60, workers=1)
    assert grpo.score(samples, scorer, 1, Config()).parts == {
        "overlong": [0.0, 0.0],
        "last": [2.5, 2.5],
    }
    scorer.close()


def test_a_reward_that_fails_counts_zero_or_is_left_out():
    samples = random_samples(4, 4)
    for s, text in zip(samples, ("<think>1</think>7", "7", "8", "7"), strict=True):
        s.text, s.prompt = text, Prompt([2], "", {"answer": "7"} if s is not samples[3] else {})
    scorer = Scorer(load_rewards("answer"))
    for failure, last in (("zero", 0.0), ("exclude", math.nan)):
        cfg = Config(num_generations=4, reward_failure=failure, scale_rewards="none")
        assert grpo.score(samples, scorer, 1, cfg).failures == {"exception": 1}
        rewards = [s.reward for s in samples]
        assert rewards[:3] == [1.0, 1.0, 0.0] and (
            rewards[3] == last or math.isnan(last) and math.isnan(rewards[3])
        )
        grpo.assign_advantages(samples, 1, cfg)
        mean = 0.5 if failure == "zero" else 2 / 3
        assert samples[0].advantages[0] == pytest.approx(1 - mean) and samples[3].in_loss.all() == (
            failure == "zero"
        )
        assert grpo.sample_metrics(samples, cfg)["reward"] == pytest.approx(mean)
    scorer.close()


def test_a_cut_off_completion_gets_the_reward_of_the_flag():
    samples, scorer = random_samples(2, 2), Scorer(load_rewards("answer"))
    for s, reason in zip(samples, ("stop", "length"), strict=True):
        s.text, s.finish_reason, s.prompt = "7", reason, Prompt([2], "", {"answer": "7"})
    for value, last in ((None, 1.0), (0.0, 0.0), (-1.0, -1.0)):  # 0 is a value
        grpo.score(samples, scorer, 1, Config(non_stop_reward=value))
        assert [s.reward for s in samples] == [1.0, last] and samples[1].parts["answer"] == 1.0
    scorer.close()


def test_a_reward_that_fails_is_said(tmp_path, capsys):
    (tmp_path / "rewards.py").write_text(REWARDS)
    with pytest.raises(harness.flags.TrainingError, match="every reward of the first step failed"):
        small_run(tmp_path / "out", reward=f"{tmp_path}/rewards.py:wrong_key")
    line = r"reward wrong_key failed on sample \d+ of 15: exception: KeyError: 'anwser'"
    assert re.search(line, capsys.readouterr().out)
    metrics = small_run(tmp_path / "out.1", reward=f"{tmp_path}/rewards.py:sometimes")
    said = capsys.readouterr().out
    assert said.count("reward sometimes failed on sample") == 1 and "ZeroDivisionError" in said
    assert all(
        m["failed_rewards"] == m["reward_failed/exception"]
        for m in metrics
        if m.get("failed_rewards")
    )
    shown = [int(n) for n in re.findall(r"FAILED REWARDS (\d+)", said)]
    assert (
        shown == [m["failed_rewards"] for m in metrics if m["failed_rewards"]] and 0 < shown[0] < 15
    )
    with pytest.raises(
        harness.flags.TrainingError, match="every reward of the first step returned None"
    ):
        small_run(tmp_path / "none", reward=f"{tmp_path}/rewards.py:none")


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
        ("gsm9k", "unknown; known: answer, gsm8k, format, countdown, overlong, math, path"),
        ("gsm8k:nan", "finite"),
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
    with pytest.raises(harness.flags.ConfigError, match="--reward math: .*math_verify"):
        grpo.load_data(Config(reward="math"))


def test_built_ins_start_no_process():
    scorer = Scorer(load_rewards("gsm8k:2,format:0.5"))
    rows = [{"answer": "42"}, {"answer": "42"}, {"question": "a\nb", "prompt_text": "c"}]
    scores = scorer.score(["<think>a</think>42", "42", "42"], rows)
    assert not any(worker.process for worker in scorer.workers)
    assert scores.totals == [2.5, 2.0, 0.0]
    assert scores.parts == {"gsm8k": [1.0, 1.0, 0.0], "format": [1.0, 0.0, 0.0]}
    assert scores.failed == [False, False, True] and scores.failures == {"exception": 1}
    assert re.fullmatch(
        r"reward gsm8k failed on sample 3 of 3: exception: KeyError: 'answer' \(reward.py:\d+\); row: question='a\\nb'",
        scores.first_failure,
    )
    assert scorer.score([], []).totals == []
    scorer.close()


def test_each_misbehaviour_costs_its_own_sample(scorer, capfd):
    causes = {
        "raise": "exception",
        "sys.exit": "exception",
        "interrupt": "died",
        "nan": "invalid",
        "inf": "invalid",
        "string": "invalid",
        "list": "invalid",
        "hang": "timeout",
        "exit": "died",
        "kill": "died",
        "grandchild": "died",
        "allocate": "memory",
    }
    fine = {
        "bool": 1.0,
        "fork": 0.5,
        "fork and hang": 0.5,
        "modules": 0.0,
        "stdin": 0.0,
        "\ud800\x00": 0.5,
        "a": 0.5,
        "b": 0.5,
    }
    completions = [*causes, *fine]
    scores = scorer("misbehave:2", workers=2).score(completions, [{}] * len(completions))
    assert scores.parts["misbehave"] == [0.0] * len(causes) + list(fine.values())
    assert scores.totals == [0.0] * len(causes) + [2 * value for value in fine.values()]
    assert scores.failed == [True] * len(causes) + [False] * len(fine)
    assert scores.failures == {"exception": 2, "invalid": 4, "timeout": 1, "died": 4, "memory": 1}
    out, err = capfd.readouterr()
    assert "scoring a\n" in err and "scoring" not in out


def test_a_hanging_function_gives_up(scorer, capfd):
    scores = scorer("misbehave", timeout=0.5, workers=2).score(["hang"] * 64, [{}] * 64)
    assert scores.failures == {"timeout": 64}
    assert capfd.readouterr().err.count("scoring hang") <= 12


def test_a_file_that_hangs_when_workers_import_it_is_given_up(tmp_path, monkeypatch):
    monkeypatch.setattr(harness.workers, "START_LIMIT", 0.5)
    (tmp_path / "hangs.py").write_text(
        f"import os, time\nif os.getpid() != {os.getpid()}: time.sleep(9999)\ndef f(completion, row): return 1.0\n"
    )
    hangs = Scorer(load_rewards(f"{tmp_path}/hangs.py:f"), workers=4)
    scores = hangs.score(["a"] * 20, [{}] * 20)
    hangs.close()
    assert scores.failures == {"timeout": 20} and "no result after 0.5 s" in scores.first_failure


def test_none_means_that_a_reward_does_not_apply(scorer):
    scores = scorer("only_even", "trl_waits:2").score(["ab", "abc", "none", "n"], [{}] * 4)
    assert (
        str(scores.parts)
        == "{'only_even': [4.0, nan, 4.0, nan], 'trl_waits': [2.0, 2.0, nan, 2.0]}"
    )
    assert scores.totals == [8.0, 4.0, 4.0, 4.0] and not scores.failures
    scores = scorer("only_even").score(["ab", "abc"], [{}] * 2)
    assert str(scores.totals) == "[4.0, nan]" and scores.failed == [
        False,
        False,
    ]  # no reward at all: no total


def test_trl_functions(scorer):
    names = ["trl", "trl_keywords", "trl_overlong", "trl_only_keywords", "trl_waits", "trl_object"]
    rows = [
        {"answer": a, "prompt_text": prompt, "completion_ids": [1] * int(a)}
        for a, prompt in (("1", "a"), ("2", "a"), ("3", "b"))
    ]
    scores = scorer(*names).score(["1", "x", "3"], rows)
    assert scores.failures == {} and scores.first_failure == ""
    assert list(scores.parts.values()) == [
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
    assert scores.parts == {"trl_everything": [2.25, 2.25], "trl_chat": [3, 2]}
    assert scores.metrics == {"batch": 2} and scores.extra == {"seen": ["1", "1"]}
    assert scorer("trl_chat").score(["abc"], [{"prompt_text": "a"}]).failures == {
        "exception": 1
    }  # text, not a chat


def test_trl_failures_are_retried_one_by_one(scorer):
    completions = ["a", "raise", "none", "b", "c", "hang", "d", "short"]
    rows = [{"prompt_text": str(i // 4)} for i in range(8)]
    scores = scorer("trl_misbehave", timeout=3).score(completions, rows)
    assert str(scores.totals) == "[1.0, 0.0, nan, 1.0, 1.0, 0.0, 1.0, 0.0]"
    assert (
        scores.failures == {"exception": 1, "invalid": 1, "timeout": 1} and sum(scores.failed) == 3
    )
    line = "reward trl_misbehave failed on 8 samples at once, now one by one: exception: ValueError: raise"
    assert scores.first_failure.startswith(line)
    for name in ("trl_dict", "trl_string"):
        assert scorer(name).score(["a", "b"], [{}] * 2).failures == {"invalid": 2}


@pytest.mark.parametrize("chat", (True, False))
def test_trl_own_functions(chat, scorer, tmp_path):
    """The library's functions through Scorer give what they give when its trainer calls them."""
    trl = pytest.importorskip("trl.rewards")
    (tmp_path / "own.py").write_text(
        "from trl import rewards\n"
        "from trl.rewards import accuracy_reward, reasoning_accuracy_reward, think_format_reward\n"
        "cosine = rewards.get_cosine_scaled_reward(max_len=10)\n"
        "repetition = rewards.get_repetition_penalty_reward(ngram_size=2)\n"
        "overlong = rewards.get_soft_overlong_punishment(10, 4)\n"
    )
    own = reward.import_file(str(tmp_path / "own.py"))
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
    prompts = [[{"role": "user", "content": "2+2"}] if chat else "2+2" for _ in texts]
    rows = [
        {
            "solution": s,
            "completion_ids": i,
            "prompt_text": "2+2",
            "prompt_messages": p if chat else None,
        }
        for s, i, p in zip(solutions, ids, prompts, strict=True)
    ]
    completions = [[{"role": "assistant", "content": text}] if chat else text for text in texts]
    spec = ",".join(f"{tmp_path}/own.py:{name}" for name in (names if chat else names[-2:]))
    scorer = Scorer(load_rewards(spec), timeout=60)
    scores = scorer.score(texts, rows)
    scorer.close()
    assert not scores.failures and not scores.first_failure
    for name, parts in scores.parts.items():
        columns = dict(
            prompts=prompts, completions=completions, completion_ids=ids, solution=solutions
        )
        state = dict(trainer_state=None, log_extra=lambda *_: None, log_metric=lambda *_: None)
        expected = [
            math.nan if value is None else value for value in getattr(own, name)(**columns, **state)
        ]
        assert parts == pytest.approx(expected, nan_ok=True), name
    if chat:
        assert scores.parts["accuracy_reward"][:2] == [1.0, 0.0] and math.isnan(
            scores.parts["accuracy_reward"][4]
        )


OWN_NEIGHBOUR = "import reward, {0}\ndef f(completion, row):\n    import reward as again\n    return reward.N + again.N + {0}.N"


def test_a_file_gets_its_own_neighbours(tmp_path, monkeypatch):
    """Also where one is called reward.py, as ours is, and where another folder has one of the same name."""
    monkeypatch.chdir(tmp_path)
    ours, path = dict(sys.modules), list(sys.path)
    for folder, number in (("a", 1), ("b", 10)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "mine.py").write_text(OWN_NEIGHBOUR.format("helpers"))
        for name in ("reward", "helpers"):
            (tmp_path / folder / f"{name}.py").write_text(f"N = {number}")
    monkeypatch.setattr(sys, "path", [*sys.path, tmp_path])  # as a notebook adds a Path
    for folder, total in (("a", 3), ("b", 30)):
        scorer = Scorer(load_rewards(f"{folder}/mine.py:f"), workers=1, timeout=60)
        assert scorer.score([""], [{}]).totals == [total]
        scorer.close()
    assert sys.modules["reward"] is ours["reward"] is reward and sys.path[: len(path)] == path


def test_workers_are_found_by_place(tmp_path):
    """Beside a user's own reward.py, and with a Path in sys.path."""
    (tmp_path / "reward.py").write_text("def short(completion, row): return -len(completion)")
    code = (
        "import pathlib, sys; sys.path[:] = [pathlib.Path('x'), sys.argv[1], *sys.path]\n"
        "from harness.workers import Scorer\nfrom reward import load_rewards\n"
        "scorer = Scorer(load_rewards('reward.py:short'), timeout=60)\n"
        "print(scorer.score(['abc'], [{}])); scorer.close()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, HERE],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert "totals=[-3.0]" in done.stdout and "failures=Counter()" in done.stdout, done.stderr


def test_a_file_that_is_edited_during_a_run(tmp_path, capfd):
    path = tmp_path / "edited.py"
    path.write_text(
        "import os, traceback\ndef f(completion, row):\n    if completion == 'x': os._exit(1)\n    return 1.0\n"
    )
    rewards = load_rewards(f"{path}:f")
    scorer = Scorer(rewards, workers=1, timeout=60)
    before = reward.sources(rewards)
    assert scorer.score(["a"], [{}]).totals == [1.0]
    path.write_text("def f(completion, row): return 2.0\n")
    scores = scorer.score(["a", "x", "a", "x", "a"], [{}] * 5)  # new workers begin after each x
    assert scores.totals == [1.0, 0.0, 1.0, 0.0, 1.0] and scores.failures == {"died": 2}
    scorer.close()
    assert reward.sources(rewards) == before != reward.sources(load_rewards(f"{path}:f"))
    assert list(before) == [str(path)] and reward.sources(load_rewards("gsm8k")) == {}


def test_columns_are_those_of_any_row(scorer):
    rows = [{"answer": "1"}, {"answer": "1", "hint": "1"}]
    for batch, expected in ((rows, [0, 1]), (rows[::-1], [1, 0])):
        scores = scorer("trl_hint").score(["1"] * len(batch), batch)
        assert scores.totals == expected and not scores.failures


def test_what_a_reward_logs_cannot_end_a_run(scorer):
    trl_logs = scorer("trl_logs").rewards[0]
    scores = reward.call_reward(
        trl_logs, ["a", "b"], [{}] * 2
    )  # here, where torch is imported already
    assert scores.values == [1.0, 1.0]
    nothing = dict.fromkeys(["nan", "list", "text", "none"])
    assert scores.metrics == {"numpy": 2.5, "torch": 3.0, "bool": 1.0, "3": 4.0} | nothing
    assert scores.extra == {
        "text": ["w", "o", "r", "d"],
        "numpy": [0.5, 1.5],
        "objects": ["<object>", None],
        "short": [1],
    }
    json.dumps([scores.metrics, scores.extra], allow_nan=False)
    logged = [
        *scores.metrics.values(),
        *(value for column in scores.extra.values() for value in column),
    ]
    assert {type(value) for value in logged} == {
        float,
        str,
        type(None),
    }  # nothing of theirs travels


def workers(pid=None):
    """The live reward workers of a process and what these started."""
    children = [
        child for child in psutil.Process(pid).children() if child.status() != psutil.STATUS_ZOMBIE
    ]
    pool = [child for child in children if harness.workers.MAIN in child.cmdline()]
    return pool + [grandchild for child in pool for grandchild in child.children(recursive=True)]


def test_close_leaves_no_process(scorer):
    misbehave = scorer("misbehave")
    misbehave.score(["fork and hang", "a"], [{}] * 2)
    started = workers()
    assert len(started) == 2  # the worker and its fork
    misbehave.close()
    assert gone(started)
    assert misbehave.score(["a"], [{}]).totals == [0.5]  # starts again


def test_a_worker_that_dies_takes_with_it_what_it_started(scorer):
    misbehave = scorer("misbehave")
    misbehave.score(["fork and hang"], [{}])
    started = workers()
    assert len(started) == 2  # the worker and its fork
    assert misbehave.score(["exit"], [{}]).failures == {"died": 1}
    assert gone(started, 10)


def test_what_holds_the_interpreter_for_ever_ends_without_a_trainer(scorer):
    """A regular expression may: no thread of the worker runs then, so the system ends it."""
    found = scorer("seconds_left", timeout=2, workers=1).score(["a"] * 2, [{}] * 2).totals
    assert all(0 < seconds <= os.cpu_count() * 12 for seconds in found)


def test_idle_workers_that_die_cost_no_sample(scorer):
    length = scorer("length", workers=2)
    for ended in (psutil.Process.kill, psutil.Process.terminate):
        assert length.score(["a", "ab"] * 4, [{}] * 8).totals == [1.0, 2.0] * 4
        started = workers()
        assert len(started) == 2
        for worker in started:
            ended(worker)
        wait_for(lambda started=started: all(p.status() == psutil.STATUS_ZOMBIE for p in started))
        wait_for(
            lambda: all(worker.connection.poll() for worker in length.workers)
        )  # their last thread has ended, too
    scores = length.score(["abc"], [{}])
    assert scores.totals == [3.0] and not scores.failures


def test_a_worker_that_cannot_start_costs_its_calls(file, tmp_path, capfd):
    here = f"os.getpid() == {os.getpid()}"
    (tmp_path / "raises.py").write_text(
        f"import os\nassert {here}, 'no GPU'\ndef f(completion, row): return 1.0\n"
    )
    for spec, code in (
        (f"{os.path.dirname(file)}/dies.py:length", 7),
        (f"{tmp_path}/raises.py:f", 1),
    ):
        cannot = Scorer(load_rewards(spec), workers=2)
        scores = cannot.score(["a"] * 3, [{}] * 3)
        cannot.close()
        assert scores.totals == [0.0] * 3 and scores.failures == {"died": 3}
        assert f"died: the worker ended with exit code {code}" in scores.first_failure
    assert "AssertionError: no GPU" in capfd.readouterr().err


MAIN = """
import pathlib, sys
with open("imported", "a") as log:
    log.write(__name__ + "\\n")
sys.path.insert(0, sys.argv[1])
from harness.workers import Scorer
from reward import load_rewards
if __name__ == "__main__":
    rewards = load_rewards(sys.argv[2] + ":misbehave")
    scorer = Scorer(rewards, timeout=60, workers=len(sys.argv) - 2)
    print(scorer.score(["modules"], [{}]).totals, flush=True)
    if len(sys.argv) > 3:
        scorer.score(["child", "hang"], [{}] * 2)
"""


@pytest.fixture
def main(tmp_path, file):
    (tmp_path / "main.py").write_text(MAIN)
    return [sys.executable, "main.py", HERE, file]


def test_workers_do_not_import_the_main_module_and_end_with_it(main, tmp_path):
    # it never calls close()
    done = subprocess.run(main, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout, done.stderr) == (0, "[0.0]\n", "scoring modules\n")
    assert (tmp_path / "imported").read_text() == "__main__\n"


def test_a_killed_trainer_leaves_no_process_and_no_semaphore(main, tmp_path):
    command = [*main, "hang"]
    process = subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    process.stdout.readline()
    for _ in range(600):
        started = workers(process.pid)
        if len(started) == 3 and any("9876" in p.cmdline() for p in started):
            break
        time.sleep(0.1)
    assert len(started) == 3
    maps = [m.path for p in (psutil.Process(process.pid), *started) for m in p.memory_maps()]
    assert not [
        path for path in maps if path.startswith("/dev/shm")
    ]  # a forced end would leave it there
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert gone(started)


SLOW_START = "import time\ntime.sleep(2)\ndef slow(completion, row): return time.sleep(60)\n"


@pytest.mark.parametrize("when", ("importing", "scoring"))
def test_ctrl_c_prints_no_traceback_of_a_worker_and_does_not_wait(main, tmp_path, when):
    (tmp_path / "slow.py").write_text(SLOW_START)
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); import harness.workers, reward\n"
        "scorer = harness.workers.Scorer(reward.load_rewards('slow.py:slow'), timeout=60)\n"
        "print('ready', flush=True)\n"
        "try: scorer.score(['a'] * 8, [{}] * 8)\n"
        "except KeyboardInterrupt: print('stopped', flush=True)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, main[2]],
        cwd=tmp_path,
        text=True,
        preexec_fn=lambda: signal.signal(
            signal.SIGINT, signal.SIG_DFL
        ),  # a shell's background job ignores it
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout.readline() == "ready\n"
    while len(started := workers(process.pid)) < 4:
        time.sleep(0.01)
    if when == "scoring":
        time.sleep(6)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to the whole group
    for worker in started:
        with contextlib.suppress(psutil.NoSuchProcess):
            worker.send_signal(signal.SIGINT)  # as a cluster's scheduler does: to every process
    out, err = process.communicate(timeout=60)
    assert gone(started)
    assert (out, err, process.returncode) == ("stopped\n", "", 0)
