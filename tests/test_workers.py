"""The pool of worker processes survives whatever it calls, and leaves no process behind."""

import contextlib
import operator
import os
import resource
import signal
import subprocess
import sys
import time
import types

import psutil
import pytest

import harness.workers
from harness.scorer import Scorer
from harness.user_code import load_rewards
from harness.workers import WorkerPool
from tests.common import HERE, gone, wait_for

pytest_plugins = "tests.common"


def test_a_pool_calls_any_functions_by_name():
    """It needs no rewards. Outcomes have the order of their jobs."""
    functions = {"length": len, "sleep": time.sleep, "divide": operator.truediv}
    pool = WorkerPool("builtins:dict", (functions,), timeout=2, memory=4 << 30, workers=2)
    jobs = [("sleep", 60), *(("length", "a" * n) for n in range(9)), ("divide", 1, 0)]
    outcomes = pool.call_all(jobs)
    pool.close()
    assert [outcome.value for outcome in outcomes] == [None, *range(9), None]
    assert [outcome.cause for outcome in outcomes] == ["timeout", *[""] * 9, "exception"]
    assert outcomes[0].message == "no result after 2 s"
    assert outcomes[-1].message.startswith("ZeroDivisionError: division by zero")
    assert pool.call_all([]) == []


def test_each_misbehaviour_costs_its_own_sample(scorer, capfd):
    causes = {
        "raise": "exception",
        "sys.exit": "exception",
        "interrupt": "died",
        "nan": "exception",
        "inf": "exception",
        "string": "exception",
        "list": "exception",
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
    assert scores.by_reward["misbehave"] == [0.0] * len(causes) + list(fine.values())
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
        f"import os, time\nif os.getpid() != {os.getpid()}: time.sleep(9999)\n"
        "def f(completion, row): return 1.0\n"
    )
    hangs = Scorer(load_rewards(f"{tmp_path}/hangs.py:f"), workers=4)
    assert "no result after 0.5 s" in hangs.score(["a"], [{}]).first_failure
    scores = hangs.score(["a"] * 20, [{}] * 20)
    hangs.close()
    assert scores.failures == {"timeout": 20}


def workers(pid=None):
    """The live workers of a process, and the processes that these started."""
    started = []
    for child in psutil.Process(pid).children():
        alive = child.status() != psutil.STATUS_ZOMBIE
        if alive and harness.workers.MAIN in child.cmdline():
            started += [child, *child.children(recursive=True)]
    return started


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
    """As a regular expression can. No thread of the worker runs then: the system has to end it."""
    limits = scorer("seconds_left", timeout=2, workers=1).score(["a"] * 2, [{}] * 2).totals
    assert all(0 < seconds <= os.cpu_count() * 12 for seconds in limits)


def test_idle_workers_that_die_cost_no_sample(scorer):
    length = scorer("length", workers=2)
    for end in (psutil.Process.kill, psutil.Process.terminate):
        assert length.score(["a", "ab"] * 4, [{}] * 8).totals == [1.0, 2.0] * 4
        started = workers()
        assert len(started) == 2
        for worker in started:
            end(worker)
        wait_for(lambda started=started: all(p.status() == psutil.STATUS_ZOMBIE for p in started))
        # their last thread has ended, too
        wait_for(lambda: all(worker.connection.poll() for worker in length.pool.workers))
    scores = length.score(["abc"], [{}])
    assert scores.totals == [3.0] and not scores.failures


def test_a_worker_that_cannot_start_costs_its_calls(file, tmp_path, capfd):
    here = f"os.getpid() == {os.getpid()}"
    (tmp_path / "raises.py").write_text(
        f"import os\nassert {here}, 'no GPU'\ndef f(completion, row): return 1.0\n"
    )
    dies = f"{os.path.dirname(file)}/dies.py:length"
    for spec, code in ((dies, 7), (f"{tmp_path}/raises.py:f", 1)):
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
from harness.scorer import Scorer
from harness.user_code import load_rewards
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
    """Although main.py never calls close()."""
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
    # a semaphore would stay there after a forced end
    assert not [path for path in maps if path.startswith("/dev/shm")]
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert gone(started)


SLOW_START = "import time\ntime.sleep(2)\ndef slow(completion, row): return time.sleep(60)\n"


@pytest.mark.parametrize("when", ("importing", "scoring"))
def test_ctrl_c_prints_no_traceback_of_a_worker_and_does_not_wait(main, tmp_path, when):
    (tmp_path / "slow.py").write_text(SLOW_START)
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from harness.scorer import Scorer\nfrom harness.user_code import load_rewards\n"
        "scorer = Scorer(load_rewards('slow.py:slow'), timeout=60)\n"
        "print('ready', flush=True)\n"
        "try: scorer.score(['a'] * 8, [{}] * 8)\n"
        "except KeyboardInterrupt: print('stopped', flush=True)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, main[2]],
        cwd=tmp_path,
        text=True,
        # else it ignores Ctrl-C, as a background job of a shell does
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
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


def test_memory_has_one_unit_on_every_system(monkeypatch):
    """getrusage counts bytes on a Mac and kB elsewhere."""
    usage = types.SimpleNamespace(ru_maxrss=3 << 20)
    monkeypatch.setattr(resource, "getrusage", lambda who: usage)
    for platform, expected in (("linux", 3 << 30), ("darwin", 3 << 20)):
        monkeypatch.setattr(sys, "platform", platform)
        assert harness.workers.peak_memory() == expected


def test_workers_are_found_by_place(tmp_path):
    """Also beside a user's own reward.py, and with a Path in sys.path."""
    (tmp_path / "reward.py").write_text("def short(completion, row): return -len(completion)")
    code = (
        "import pathlib, sys; sys.path[:] = [pathlib.Path('x'), sys.argv[1], *sys.path]\n"
        "from harness.scorer import Scorer\nfrom harness.user_code import load_rewards\n"
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
