"""TODO."""

import contextlib
import json
import math
import os
import shutil
import signal
import time
import weakref

import numpy as np
import pytest
import torch

import grpo
import harness.flags
import harness.log
import harness.run
import reward
from grpo import Config
from harness.flags import ConfigError
from harness.ranks import World
from tests.common import METRICS, at_step, copy_cut_back, lines, small_run, state_of, tracked_run, wait_for

pytest_plugins = "tests.common"


def test_resume_to_the_bit(undisturbed, tmp_path, capsys):
    for saved in (1, 3):
        out = tmp_path / str(saved)
        copy_cut_back(undisturbed, out, saved)
        history = small_run(out, resume="latest", train_data=str(undisturbed.parent / "rows.jsonl"))
        assert f"resumed from {out}/step_00000{saved} at step {saved}" in capsys.readouterr().out
        assert [m["step"] for m in history] == [1, 2, 3, 4]
        assert state_of(out) == state_of(undisturbed)


def test_a_resume_keeps_no_second_copy_of_adams_moments(undisturbed, tmp_path, monkeypatch):
    out, loaded, alive = tmp_path / "out", [], []
    copy_cut_back(undisturbed, out, 2)
    load, moved = harness.run.load_checkpoint, torch.optim.Optimizer._process_value_according_to_param_policy

    def noted(path):
        checkpoint = load(path)
        moments = checkpoint.state["optimizer"]["state"].values()
        loaded.extend(weakref.ref(value) for moment in moments for value in moment.values())
        return checkpoint

    monkeypatch.setattr(harness.run, "load_checkpoint", noted)
    # as if they went to a GPU
    elsewhere = staticmethod(lambda *args, **options: moved(*args, **options).clone())
    monkeypatch.setattr(torch.optim.Optimizer, "_process_value_according_to_param_policy", elsewhere)
    at_step(monkeypatch, {3: lambda: alive.extend(ref() for ref in loaded if ref() is not None)})
    small_run(out, resume="latest", train_data=str(undisturbed.parent / "rows.jsonl"))
    assert len(loaded) > 30 and alive == []
    assert state_of(out) == state_of(undisturbed)


def test_a_damaged_checkpoint_is_named_and_passed_over(undisturbed, tmp_path, capsys):
    out = tmp_path / "out"
    shutil.copytree(undisturbed, out)
    with open(out / "step_000004" / "model.safetensors", "r+b") as file:
        file.truncate(1000)
    (out / "step_000003" / "trainer_state.pt").write_bytes(b"PK torn")
    os.remove(out / "step_000002" / "config.json")
    (out / "partial_000005").mkdir()
    options = dict(resume="latest", train_data=str(undisturbed.parent / "rows.jsonl"), beta=0.002, save_every=4)
    small_run(out, **options)
    said = capsys.readouterr().out
    assert all(f"step_00000{n} is damaged" in said for n in (2, 3, 4)) and "step_000001 at step 1" in said
    assert "changed since then: --beta 0.001 -> 0.002" in said
    names = {"step_000001", "step_000004", *(f"step_00000{n}.stale" for n in (2, 3, 4))}
    assert {p.name for p in out.iterdir()} >= names
    assert not (out / "partial_000005").exists()
    with pytest.raises(ConfigError, match="not a whole checkpoint"):
        small_run(out, resume=str(out / "step_000003.stale"))


def test_other_ranks_than_before_are_said_and_other_checkpoints_refused(undisturbed, tmp_path, monkeypatch, capsys):
    out = tmp_path / "out"
    shutil.copytree(undisturbed, out)
    state = torch.load(out / "step_000004" / "trainer_state.pt", weights_only=True)
    path = out / "step_000004" / "trainer_state.pt"
    torch.save(state | dict(world_size=2), path)
    sums = json.loads((path.parent / "checksums.json").read_text()) | {path.name: harness.run.checksum(path)}
    (path.parent / "checksums.json").write_text(json.dumps(sums))
    options = dict(train_data=str(undisturbed.parent / "rows.jsonl"), resume="latest", max_steps=5)
    assert [m["step"] for m in small_run(out, **options)] == [1, 2, 3, 4, 5]
    assert "2 ranks before, 1 now: the sums round differently" in capsys.readouterr().out
    monkeypatch.setattr(World, "gather", lambda self, items: [*items, 0])  # a machine that found nothing
    with pytest.raises(harness.flags.TrainingError, match="the machines hold different checkpoints"):
        small_run(out, **options)


def test_an_earlier_run_is_moved_aside_and_nothing_to_resume_is_said(tmp_path, capsys):
    out = tmp_path / "out"
    small_run(out, max_steps=1)
    before = (out / "metrics.jsonl").read_text()
    small_run(out, max_steps=1, keep=1)
    assert (tmp_path / "out.1" / "metrics.jsonl").read_text() == before
    assert "moved to" in capsys.readouterr().out
    small_run(tmp_path / "new", max_steps=1, resume="latest")
    assert "no checkpoint in" in capsys.readouterr().out and len(lines(tmp_path / "new" / "metrics.jsonl")) == 1


def test_the_newest_and_the_best_are_kept(tmp_path):
    run, accuracies = (
        tracked_run(tmp_path, eval_data="x", keep=2, save_every=1, max_steps=6),
        [-3, -1, -2, -2, -2, -0.5],
    )
    for step in run.steps():
        run.record(step, METRICS, [])
        run.record_eval(step, dict(eval_accuracy=accuracies[step - 1], eval_stderr=0.0, eval_length=1.0))
        if step == 6:  # what stands after the save of step 5
            kept = sorted(name for name in os.listdir(tmp_path) if name[:4] in ("step", "best"))
            assert kept == ["best", "step_000002", "step_000004", "step_000005"]  # negative, and still the best
            assert os.readlink(tmp_path / "best") == "step_000002"
    assert sorted(os.listdir(tmp_path))[-2:] == ["step_000005", "step_000006"]
    assert os.readlink(tmp_path / "best") == "step_000006"


def test_kill_9_at_25_random_moments_loses_nothing(fork, tmp_path):
    """In the rollout, the update, a save, a rename: resumed each time, the end is the undisturbed run's to the bit."""
    options = dict(train_data=str(tmp_path / "rows.jsonl"), max_steps=12)
    small_run(tmp_path / "whole", max_steps=12)
    out, rng, kills, seconds = tmp_path / "out", np.random.default_rng(0), 0, None
    while kills < 25:
        started = time.monotonic()
        [pid], wait = fork("small_run", out, **options, resume="latest")
        if seconds is None:
            wait_for(lambda: (out / "metrics.jsonl").exists() and len(lines_whole(out / "metrics.jsonl")) >= 1)
            seconds = time.monotonic() - started  # from the start to the end of the first step, here
        else:
            time.sleep(rng.uniform(0.3, 1.2) * seconds)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        if wait().returncode == -signal.SIGKILL:
            kills += 1
        else:  # it came to its end first
            seconds *= 0.8
        for path in harness.run.checkpoints(str(out))[8:]:  # near its end: back to an earlier step
            shutil.rmtree(path)
    assert fork("small_run", out, **options, resume="latest")[1]().returncode == 0
    assert state_of(out) == state_of(tmp_path / "whole")


def lines_whole(path):
    return [line for line in path.read_bytes().split(b"\n")[:-1] if line]


@pytest.mark.parametrize("stop", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_saves_and_exits_0_and_a_save_goes_on(fork, undisturbed, tmp_path, stop):
    out = tmp_path / "out"
    rows = str(undisturbed.parent / "rows.jsonl")
    [pid], wait = fork("small_run", out, train_data=rows, save_every=0)
    wait_for(lambda: (out / "metrics.jsonl").exists() and len(lines_whole(out / "metrics.jsonl")) >= 1)
    if stop == signal.SIGTERM:
        os.kill(pid, signal.SIGUSR1)
    else:  # cannot miss, where a signal to torchrun would end it
        (out / "save").touch()
    wait_for(lambda: len(harness.run.checkpoints(str(out))) >= 1)
    os.kill(pid, stop)
    assert wait().returncode == 0
    assert not (out / "save").exists()
    steps = len(lines(out / "metrics.jsonl"))
    assert harness.run.checkpoints(str(out))[-1].endswith(f"step_{steps:06d}")
    small_run(out, train_data=rows, resume="latest")
    assert state_of(out) == state_of(undisturbed)


@pytest.mark.parametrize("how", ["rollout", "step", "one call"])
def test_a_stop_does_not_wait_for_the_step(fork, undisturbed, tmp_path, how):
    """Steps of an hour: what the last whole one left is saved within 5 s, and the run goes on from there to the bit."""
    out, rows = tmp_path / "out", str(undisturbed.parent / "rows.jsonl")
    [pid], wait = fork("stuck_run", out, how, tmp_path / "on", train_data=rows, save_every=0)
    wait_for((tmp_path / "on").exists)
    before = len(lines_whole(out / "metrics.jsonl"))
    assert before >= 2 and harness.run.checkpoints(str(out)) == []
    os.kill(pid, signal.SIGTERM)
    wait_for(lambda: harness.run.checkpoints(str(out)))  # 0 to 5 s where the machine is quiet
    done = wait()
    assert done.returncode == 0 and f"step_{before:06d} is saved; go on with --resume" in done.stdout
    small_run(out, train_data=rows, resume="latest")
    assert state_of(out) == state_of(undisturbed)


def test_a_second_signal_ends_the_run_at_once(fork, undisturbed, tmp_path):
    """In the middle of a save that would take an hour; what was saved stays."""
    out, rows = tmp_path / "out", str(undisturbed.parent / "rows.jsonl")
    [pid], wait = fork("stuck_run", out, "save", tmp_path / "on", train_data=rows)
    wait_for((tmp_path / "on").exists)
    os.kill(pid, signal.SIGTERM)
    time.sleep(1.5)  # less: the same Ctrl-C, passed on by torchrun
    os.kill(pid, signal.SIGTERM)
    assert wait().returncode == 128 + signal.SIGTERM
    assert [os.path.basename(path) for path in harness.run.checkpoints(str(out))] == ["step_000001"]


def test_an_error_saves_first(undisturbed, tmp_path, monkeypatch, capsys):
    out, rows = tmp_path / "out", str(undisturbed.parent / "rows.jsonl")

    def fails():
        raise harness.flags.TrainingError("planted")

    at_step(monkeypatch, {3: fails})
    with pytest.raises(harness.flags.TrainingError, match="planted"):
        small_run(out, train_data=rows, save_every=0)
    assert "step_000002 is saved; go on with --resume" in capsys.readouterr().out
    monkeypatch.undo()
    small_run(out, train_data=rows, resume="latest")
    assert state_of(out) == state_of(undisturbed)


def test_a_full_disk_delays_lines_and_tears_none(tmp_path, monkeypatch, capsys):
    log = harness.log.JsonLines(str(tmp_path / "m.jsonl"), -1)
    log.write({"step": 1})
    whole_open = open

    def full(path, mode):
        file = whole_open(path, mode)
        file.seek(0, 2)
        file.write(b'{"st')  # half a line reaches the disk
        file.close()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(harness.run, "open", full, raising=False)
    log.write({"step": 2})
    monkeypatch.undo()
    assert "No space left on device" in capsys.readouterr().out
    log.write({"step": 3})
    assert lines(tmp_path / "m.jsonl") == [{"step": 1}, {"step": 2}, {"step": 3}]


def test_a_full_disk_and_a_read_only_one(undisturbed, disk, monkeypatch, capsys):
    out = disk("size=9m") / "out"  # room for one checkpoint of 6 MB, not for two
    options = dict(train_data=str(undisturbed.parent / "rows.jsonl"), keep=1)
    small_run(out, **options)
    said = capsys.readouterr().out
    assert [f"step {n}: could not save" in said for n in (1, 2, 3, 4)] == [False, True, True, True]
    assert [os.path.basename(path) for path in harness.run.checkpoints(str(out))] == ["step_000001"]
    assert [m["step"] for m in lines(out / "metrics.jsonl")] == [1, 2, 3, 4]
    disk("size=64m")
    at_step(monkeypatch, {2: lambda: disk("ro"), 3: lambda: disk("rw")})
    small_run(out, **options, resume="latest")
    said = capsys.readouterr().out
    assert "resumed from" in said and said.count("could not save") == 1 and "Read-only file system" in said
    assert said.count("lines wait for the next try") == 2  # metrics and completions of step 2
    assert state_of(out) == state_of(undisturbed)


def test_five_bad_steps_in_a_row_end_the_run(tmp_path, monkeypatch):

    def score(samples, scorer, step, cfg):
        for sample in samples:
            sample.reward = 1.0
        return reward.Scores([], {}, [])

    monkeypatch.setattr(grpo, "score", score)
    honest = grpo.group_advantages
    monkeypatch.setattr(grpo, "group_advantages", lambda *args: honest(*args) + math.inf)
    with pytest.raises(harness.flags.TrainingError, match="no finite gradient in 5 steps in a row"):
        small_run(tmp_path / "out", max_steps=9)
    assert [m["skipped_steps"] for m in lines(tmp_path / "out" / "metrics.jsonl")] == [2] * 5
    for path in harness.run.checkpoints(str(tmp_path / "out")):
        model = grpo.load_model(path, Config())
        assert all(p.isfinite().all() for p in model.parameters())
