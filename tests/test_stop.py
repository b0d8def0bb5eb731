"""Runs that are cut off: kills, signals, errors, disks. --resume then goes on to the bit."""

import contextlib
import math
import os
import shutil
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import psutil
import pytest

import grpo
import harness.checkpoints
import harness.log
import harness.run
import harness.sampler_gap
import harness.stops
from grpo import Config
from harness.flags import ConfigError, TrainingError
from harness.scorer import Scores
from tests.common import (
    HERE,
    PRIME,
    at_step,
    gone,
    lines,
    names_in,
    read,
    small_run,
    state_of,
    stuck_run,
    wait_for,
)

pytest_plugins = "tests.common"


def whole_lines(path):
    return [line for line in path.read_bytes().split(b"\n")[:-1] if line] if path.exists() else []


@pytest.fixture
def rows(undisturbed):
    return str(undisturbed.parent / "rows.jsonl")


@pytest.mark.parametrize("n_kills, steps", [(2, 7), pytest.param(25, 12, marks=pytest.mark.slow)])
def test_kill_9_at_25_random_moments_loses_nothing(fork, tmp_path, n_kills, steps):
    """In the rollout, the update, a save, a rename. Resumed each time, the run ends in the bits of
    an undisturbed one."""
    options = dict(train_data=str(tmp_path / "rows.jsonl"), max_steps=steps)
    small_run(tmp_path / "whole", max_steps=steps)
    out, rng, kills, seconds = tmp_path / "out", np.random.default_rng(0), 0, None
    while kills < n_kills:
        started = time.monotonic()
        [pid], wait = fork("small_run", out, **options, resume="latest")
        if seconds is None:
            wait_for(lambda: whole_lines(out / "metrics.jsonl"))
            # from the start to the end of the first step, here
            seconds = time.monotonic() - started
        else:
            time.sleep(rng.uniform(0.3, 1.2) * seconds)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        if wait().returncode == -signal.SIGKILL:
            kills += 1
        else:  # it came to its end first
            seconds *= 0.8
        # near its end: back to an earlier step
        for path in harness.checkpoints.checkpoints(str(out))[steps - 4 :]:
            shutil.rmtree(path)
    assert fork("small_run", out, **options, resume="latest")[1]().returncode == 0
    assert state_of(out) == state_of(tmp_path / "whole")


@pytest.mark.parametrize("stop", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_stop_saves_and_exits_0_and_a_save_goes_on(fork, undisturbed, rows, tmp_path, stop):
    out = tmp_path / "out"
    [pid], wait = fork("small_run", out, train_data=rows, save_every=0, command_line=True)
    wait_for(lambda: whole_lines(out / "metrics.jsonl"))
    if stop == signal.SIGTERM:
        os.kill(pid, signal.SIGUSR1)
    else:  # cannot miss, where a signal to torchrun would end it
        (out / "save").touch()
    wait_for(lambda: names_in(out))
    os.kill(pid, stop)
    assert wait().returncode == 0
    assert not (out / "save").exists()
    assert names_in(out)[-1] == f"step_{len(lines(out / 'metrics.jsonl')):06d}"
    small_run(out, train_data=rows, resume="latest")
    assert state_of(out) == state_of(undisturbed)


@pytest.mark.parametrize("how", ["rollout", "step", "one call"])
def test_a_stop_does_not_wait_for_the_step(fork, undisturbed, rows, tmp_path, how):
    """In a step of an hour the last recorded step is saved within 5 s, and --resume goes on from
    there to the bit."""
    out = tmp_path / "out"
    [pid], wait = fork(
        "stuck_run", out, how, tmp_path / "on", train_data=rows, save_every=0, command_line=True
    )
    wait_for((tmp_path / "on").exists)
    before = len(whole_lines(out / "metrics.jsonl"))
    assert before >= 2 and names_in(out) == []
    os.kill(pid, signal.SIGTERM)
    wait_for(lambda: names_in(out))  # 0 to 5 s where the machine is quiet
    done = wait()
    assert (
        done.returncode == 0 and f"step_{before:06d} is saved; go on with --resume" in done.stdout
    )
    small_run(out, train_data=rows, resume="latest")
    assert state_of(out) == state_of(undisturbed)


def test_a_second_signal_ends_the_run_at_once(fork, rows, tmp_path):
    """In the middle of a save that would take an hour; what was saved stays."""
    out = tmp_path / "out"
    [pid], wait = fork(
        "stuck_run", out, "save", tmp_path / "on", train_data=rows, command_line=True
    )
    wait_for((tmp_path / "on").exists)
    with contextlib.suppress(ProcessLookupError):  # it has ended
        for _ in range(4):  # two; on a busy machine it may hear one late
            os.kill(pid, signal.SIGTERM)
            time.sleep(1.5)  # less: the same Ctrl-C, passed on by torchrun
    assert wait().returncode == 128 + signal.SIGTERM
    assert names_in(out) == ["step_000001"]


# before and after the updates of step 2
@pytest.mark.parametrize("where", ["assign_advantages", "sample_metrics"])
def test_a_stop_in_a_notebook_returns_to_the_caller(
    undisturbed, rows, tmp_path, monkeypatch, where
):
    """As KeyboardInterrupt, after a save. If weights have changed it waits for the step's end."""
    out, honest, calls = tmp_path / "out", getattr(grpo, where), []

    def interrupted(*args):
        calls.append(1)
        if len(calls) == 2:
            os.kill(os.getpid(), signal.SIGINT)
        return honest(*args)

    monkeypatch.setattr(grpo, where, interrupted)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        small_run(out, train_data=rows, save_every=0)
    assert signal.getsignal(signal.SIGINT) is handler and threading.active_count() < 20
    assert names_in(out) == ["step_000001" if where == "assign_advantages" else "step_000002"]
    monkeypatch.undo()
    small_run(out, train_data=rows, resume="latest")
    assert state_of(out) == state_of(undisturbed)


def test_what_nohup_ignores_stays_ignored(rows, tmp_path, monkeypatch):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        at_step(monkeypatch, {1: lambda: os.kill(os.getpid(), signal.SIGHUP)})
        assert len(small_run(tmp_path / "out", train_data=rows, max_steps=2)) == 2
    finally:
        signal.signal(signal.SIGHUP, before)


def test_an_error_saves_first(undisturbed, rows, tmp_path, monkeypatch, capsys):
    def fails():
        raise TrainingError("planted")

    at_step(monkeypatch, {3: fails})
    with pytest.raises(TrainingError, match="planted"):
        small_run(tmp_path / "out", train_data=rows, save_every=0)
    assert "step_000002 is saved; go on with --resume" in capsys.readouterr().out
    monkeypatch.undo()
    small_run(tmp_path / "out", train_data=rows, resume="latest")
    assert state_of(tmp_path / "out") == state_of(undisturbed)


def test_a_sampler_that_is_off_stops_before_the_first_of_several_updates(
    rows, tmp_path, monkeypatch
):
    """So that what is there can be saved."""
    honest, calls = harness.sampler_gap.sampler_metrics, []

    def gap(*args):
        calls.append(1)
        if len(calls) == 3:
            raise TrainingError("off")
        return honest(*args)

    monkeypatch.setattr(harness.sampler_gap, "sampler_metrics", gap)
    with pytest.raises(TrainingError, match="off"):
        small_run(tmp_path / "out", train_data=rows, save_every=0)  # two updates a step
    assert names_in(tmp_path / "out") == ["step_000002"]


def test_a_resume_that_fails_leaves_log_and_checkpoints_together(
    undisturbed, rows, tmp_path, monkeypatch
):
    out = tmp_path / "out"
    shutil.copytree(undisturbed, out)
    shutil.rmtree(out / "step_000004")
    monkeypatch.setattr(grpo, "make_sampler", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        small_run(out, train_data=rows, resume="latest")
    monkeypatch.undo()
    small_run(out, train_data=rows, resume="latest")
    assert state_of(out) == state_of(undisturbed)


def test_five_bad_steps_in_a_row_end_the_run(tmp_path, monkeypatch):
    def score(samples, scorer, step, cfg):
        for sample in samples:
            sample.reward = 1.0
        return Scores([], {}, [])

    monkeypatch.setattr(grpo, "score", score)
    honest = grpo.group_advantages
    monkeypatch.setattr(grpo, "group_advantages", lambda *args: honest(*args) + math.inf)
    with pytest.raises(TrainingError, match="no finite gradient in 5 steps in a row"):
        small_run(tmp_path / "out", max_steps=9)
    assert [m["skipped_steps"] for m in lines(tmp_path / "out" / "metrics.jsonl")] == [2] * 5
    for path in harness.checkpoints.checkpoints(str(tmp_path / "out")):
        assert all(p.isfinite().all() for p in grpo.load_model(path, Config()).parameters())


def test_two_runs_in_one_directory_are_refused(fork, undisturbed, rows, tmp_path):
    out = tmp_path / "out"
    [pid], wait = fork("stuck_run", out, "step", tmp_path / "on", train_data=rows)
    wait_for((tmp_path / "on").exists)
    before = state_of(out)
    with pytest.raises(
        ConfigError, match=rf"--out_dir .*: another run \(process {pid}\) is writing there"
    ):
        small_run(out, train_data=rows, resume="latest")
    with pytest.raises(ConfigError, match="holds"):
        small_run(out, train_data=rows)
    assert state_of(out) == before
    os.kill(pid, signal.SIGKILL)
    wait()
    small_run(out, train_data=rows, resume="latest")
    assert state_of(out) == state_of(undisturbed)


# -- disks


def mount(*args):
    if subprocess.run(["mount", *map(str, args)], capture_output=True).returncode:
        pytest.skip("may not mount here")


def test_a_full_disk_and_a_read_only_one(undisturbed, rows, disk, monkeypatch, capsys):
    out = disk("size=64m") / "out"
    options = dict(train_data=rows, keep=1)
    with monkeypatch.context() as patch:
        at_step(patch, {1: lambda: disk("size=9m")})  # room for one checkpoint of 6 MB, not for two
        small_run(out, **options)
    said = capsys.readouterr().out
    assert [f"step {n}: could not save" in said for n in (1, 2, 3, 4)] == [False, True, True, True]
    assert names_in(out) == ["step_000001"]
    assert [m["step"] for m in lines(out / "metrics.jsonl")] == [1, 2, 3, 4]

    def read_only():  # in a mount of its own, because the lock is open for writing
        mount("--bind", out, out)
        mount("-o", "remount,bind,ro", out)

    disk("size=64m")
    at_step(monkeypatch, {2: read_only, 3: lambda: subprocess.run(["umount", "--lazy", str(out)])})
    small_run(out, **options, resume="latest")
    said = capsys.readouterr().out
    assert "resumed from" in said and said.count("could not save") == 1
    assert "Read-only file system" in said
    assert said.count("wait for the next write") == 2  # metrics and completions of step 2
    assert state_of(out) == state_of(undisturbed)


def test_a_failed_save_does_not_stop_the_run(undisturbed, rows, tmp_path, monkeypatch, capsys):
    calls, replace = [], os.replace

    def fails_twice(source, target):
        if ".partial" in str(source) and "step_" in str(target) and len(calls) < 2:
            calls.append(target)
            raise OSError(28, "No space left on device")
        return replace(source, target)

    monkeypatch.setattr(os, "replace", fails_twice)
    small_run(tmp_path / "out", train_data=rows)
    assert len(calls) == 2 and capsys.readouterr().out.count("could not save") == 2
    assert state_of(tmp_path / "out") == state_of(undisturbed)


@pytest.mark.slow
def test_a_log_on_a_full_disk_ends_no_run(rows, tmp_path):
    """`python grpo.py > /dev/full`: it trains, saves and exits with 0."""
    command = [
        sys.executable,
        os.path.join(HERE, "grpo.py"),
        *PRIME,
        "--max_steps",
        1,
        "--rollout",
        "hf",
    ]
    command += ["--max_completion_length", 8, "--eval_data", "", "--train_data", rows, "--out_dir"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            list(map(str, [*command, tmp_path / "out"])), stdout=full, stderr=subprocess.PIPE
        )
    assert done.returncode == 0, done.stderr
    assert names_in(tmp_path / "out") == ["step_000001"]


# -- torchrun

ORPHANS = """
import os, sys, time, grpo
honest = grpo.assign_advantages
def assign(samples, step, cfg):
    if step == 2:
        open(os.environ["MARK"] + os.environ["RANK"], "w").write(str(os.getpid()))
        time.sleep(3600)
    return honest(samples, step, cfg)
grpo.assign_advantages = assign
if __name__ == "__main__":
    sys.exit(grpo.main())
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_a_torchrun_that_ends_leaves_nobody_behind(tmp_path, how):
    """Killed with -9: its ranks end, and free the directory. Stopped in a step of an hour: they
    save."""
    script, out, mark = tmp_path / "script.py", tmp_path / "out", tmp_path / "rank"
    script.write_text(ORPHANS)
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node=2",
        script,
        *PRIME,
    ]
    command += ["--rollout", "hf", "--save_every", 0, "--out_dir", out]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": HERE, "MARK": str(mark)}
    agent = subprocess.Popen(list(map(str, command)), env=environment, stderr=subprocess.DEVNULL)
    wait_for(
        lambda: all(os.path.exists(f"{mark}{rank}") and read(f"{mark}{rank}") for rank in (0, 1))
    )
    ranks = [psutil.Process(int(read(f"{mark}{rank}"))) for rank in (0, 1)]
    agent.send_signal(how)
    agent.wait()
    assert gone(ranks, 300)  # a second or a few, on a machine that is not busy
    assert names_in(out) == ["step_000001"][: how == signal.SIGTERM]


WITH_PARENT = """
import os, sys, threading, time
from harness import stops
sys.platform = sys.argv[1]
os.environ["TORCHELASTIC_RUN_ID"] = "none"
stops.end_with_torchrun()
print(os.getpid(), flush=True)
time.sleep(3600)
"""


@pytest.mark.parametrize("platform", ["linux", "darwin"])  # prctl, and the poll
def test_a_rank_ends_with_its_torchrun(platform):
    start = "import subprocess, sys; subprocess.run([sys.executable, *sys.argv[1:]])"
    command = [sys.executable, "-c", start, "-c", WITH_PARENT, platform]
    parent = subprocess.Popen(command, cwd=HERE, stdout=subprocess.PIPE, text=True)
    rank = psutil.Process(int(parent.stdout.readline()))
    parent.kill()
    assert gone([rank])
    parent.wait()
    parent.stdout.close()


# -- what only reports


def no_latex(*_):
    raise RuntimeError("Failed to process string with tex because latex could not be found")


def stuck_run_without_latex(out, marker, **options):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(harness.log.Log, "close", no_latex)
        stuck_run(out, "step", marker, **options)


def test_a_run_whose_curves_cannot_be_drawn_ends_well(rows, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(harness.log.Log, "close", no_latex)
    assert len(small_run(tmp_path / "out", train_data=rows, max_steps=2)) == 2
    assert "could not finish the log (Failed to process" in capsys.readouterr().out
    assert names_in(tmp_path / "out")[-1] == "step_000002"


def test_a_stop_ends_the_process_even_if_curves_cannot_be_drawn(fork, rows, tmp_path):
    out, marker = tmp_path / "out", tmp_path / "on"
    name = "tests.test_stop.stuck_run_without_latex"
    [pid], wait = fork(name, out, marker, train_data=rows, save_every=0, command_line=True)
    wait_for(marker.exists)
    os.kill(pid, signal.SIGTERM)
    assert gone([psutil.Process(pid)])
    assert wait().returncode == 0
    assert names_in(out) == ["step_000002"]


def run_with_a_signal_of_its_own(out, **options):
    signal.signal(signal.SIGUSR2, lambda number, frame: print("mine", flush=True))
    with pytest.MonkeyPatch.context() as patch:
        at_step(patch, {2: lambda: os.kill(os.getpid(), signal.SIGUSR2)})
        small_run(out, **options)


def test_other_signals_do_not_stop_a_run(fork, undisturbed, rows, tmp_path):
    name, out = "tests.test_stop.run_with_a_signal_of_its_own", tmp_path / "out"
    done = fork(name, out, train_data=rows, command_line=True)[1]()
    assert done.returncode == 0 and "mine" in done.stdout
    assert state_of(out) == state_of(undisturbed)


def test_in_python_a_second_signal_interrupts_even_while_weights_change():
    stops = harness.stops.Stops(None, command_line=False, delay=0.0)
    stops.hold()
    stops.receive(signal.SIGINT)  # waits
    stops.receive(signal.SIGINT)  # within a second: the same Ctrl-C
    stops.first_stop -= 2
    with pytest.raises(KeyboardInterrupt):
        stops.receive(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        stops.release()
    assert not stops.mid_step
