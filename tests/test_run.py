"""The run on disk: its directory, and what --resume means."""

import contextlib
import json
import math
import os
import shutil
import threading
import time
import weakref

import pytest
import torch

import grpo
import harness.checkpoints
import harness.dashboards
import harness.directory
import harness.log
import harness.rows
import harness.run
from grpo import Config
from harness.flags import ConfigError, TrainingError
from harness.ranks import World
from harness.scorer import Scorer, Scores
from tests.common import (
    BUNDLED,
    CPU,
    at_step,
    config_of,
    copy_cut_back,
    names_in,
    small_run,
    state_of,
)

pytest_plugins = "tests.common"


# -- the directory


def test_an_unnamed_directory_is_the_first_free_one(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    options = dict(max_steps=1, train_data=BUNDLED.train_data)
    (tmp_path / "out.1").mkdir()
    (tmp_path / "out.1" / "notes.txt").write_text("mine")
    small_run("out", **options)
    before = (tmp_path / "out" / "metrics.jsonl").read_text()
    small_run("out", **options, seed=1)
    assert "out_dir: out.2" in capsys.readouterr().out
    assert (tmp_path / "out" / "metrics.jsonl").read_text() == before and len(
        os.listdir("out.1")
    ) == 1
    assert json.loads((tmp_path / "out.2" / "config.json").read_text())["out_dir"] == "out.2"


def test_a_named_directory_with_a_run_or_a_model_is_refused(undisturbed, again, tmp_path):
    for holds in (undisturbed, BUNDLED.model, undisturbed / "step_000001"):
        out = tmp_path / "out"
        shutil.copytree(holds, out)
        files = sorted(out.rglob("*"))
        with pytest.raises(
            ConfigError, match=r"--out_dir .*/out: holds files of a run or a model; --resume"
        ):
            again(out)
        assert sorted(out.rglob("*")) == files
        shutil.rmtree(out)


def test_a_directory_that_a_run_leaves_while_another_waits_for_it_is_refused(tmp_path):
    out, first = tmp_path / "out", contextlib.ExitStack()
    cfg = harness.directory.claim_out_dir(Config(out_dir=str(out)), first)
    harness.directory.write_config(cfg, {})
    before = (out / "config.json").read_bytes()
    os.rename(out / "config.json", out / "later")  # as it was when the second one first looked
    timer = threading.Timer(
        0.5, lambda: (os.rename(out / "later", out / "config.json"), first.close())
    )
    timer.start()
    with contextlib.ExitStack() as second, pytest.raises(ConfigError, match="holds files of a run"):
        harness.directory.claim_out_dir(Config(out_dir=str(out)), second)
    timer.join()
    assert (out / "config.json").read_bytes() == before


def files_of(folder):
    """Everything in a directory, but for the lock."""
    paths = [path for path in folder.rglob("*") if path.is_file() and path.name[0] != "."]
    return {path: path.read_bytes() for path in paths}


def test_a_resume_that_is_refused_late_leaves_no_trace(undisturbed, again, tmp_path, monkeypatch):
    """By a part that the checkpoint lacks, a model that cannot be written, a dashboard."""
    out = tmp_path / "out"
    shutil.copytree(undisturbed, out)
    before = files_of(out)
    track = harness.run.Run.track

    def track_more(run, *args):
        run.checkpoint_parts["other"] = (dict, dict)
        track(run, *args)

    with monkeypatch.context() as patch:
        patch.setattr(harness.run.Run, "track", track_more)
        with pytest.raises(ConfigError, match="holds no other"):
            again(out, resume="latest", num_prompts=4)
    assert files_of(out) == before
    with monkeypatch.context() as patch:
        patch.setattr(grpo, "model_writer", lambda *_: lambda path, trial=False: 1 / 0)
        with pytest.raises(ConfigError, match="no checkpoint can be saved"):
            again(out, resume="latest", num_prompts=4)
    assert files_of(out) == before
    with monkeypatch.context() as patch:
        patch.setitem(harness.dashboards.DASHBOARDS, "none", lambda cfg, first: 1 / 0)
        with pytest.raises(ConfigError, match="--report_to"):
            again(out, resume="latest", num_prompts=4)
    assert files_of(out) == before
    again(out, resume="latest")
    assert state_of(out) == state_of(undisturbed)


def test_a_new_run_that_is_refused_late_leaves_its_directory_free(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(grpo, "model_writer", lambda *_: lambda path, trial=False: 1 / 0)
        with pytest.raises(ConfigError, match="no checkpoint can be saved there"):
            small_run("out", max_steps=1, train_data=BUNDLED.train_data)
    assert not os.path.exists("out")


# -- what --resume means


def test_resume_to_the_bit(undisturbed, again, tmp_path, capsys):
    for saved in (1, 3):
        out = tmp_path / str(saved)
        copy_cut_back(undisturbed, out, saved)
        assert [m["step"] for m in again(out, resume="latest")] == [1, 2, 3, 4]
        assert f"resumed from {out}/step_00000{saved} at step {saved}" in capsys.readouterr().out
        assert state_of(out) == state_of(undisturbed)


def flags_of(*args):
    cfg = grpo.parse_args(list(args))
    return cfg.out_dir, cfg.resume, cfg.seed, cfg.num_prompts


def test_resume_finds_the_run_and_its_flags(undisturbed, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert (
        flags_of("--resume") == ("out", "", 0, 32)
        and "no run in out yet, so one begins" in capsys.readouterr().out
    )
    for number, name in enumerate(("out.2", "out", "out.10", "out.x", "named")):
        shutil.copytree(undisturbed, name)
        config = config_of(undisturbed) | dict(seed=number)
        (tmp_path / name / "config.json").write_text(json.dumps(config))
        os.utime(tmp_path / name / "config.json", (1000 + number, 1000 + number))
    os.utime(tmp_path / "out.2" / "config.json", (1010, 1010))  # it was started last
    assert flags_of("--resume") == ("out.2", "latest", 0, 3)
    assert flags_of("--resume", "--seed", "0", "--num_prompts", "32") == ("out.2", "latest", 0, 32)
    assert flags_of("--resume", "--out_dir", "named") == ("named", "latest", 4, 3)
    assert flags_of("--resume", "out") == ("out", "latest", 1, 3)  # and not the newest
    assert flags_of("--resume", "named") == flags_of("--resume", "named", "--out_dir", "./named/")
    assert flags_of("--resume", "named") == ("named", "latest", 4, 3)  # a run's own folder
    assert flags_of("--resume", "named", "--out_dir", "new") == ("new", "named/step_000004", 0, 3)
    # the flags of that moment
    assert flags_of("--resume", "named/step_000002") == ("out", "named/step_000002", 0, 3)
    # the same for a Config made in Python, where a default that is given counts, too
    cfg = grpo.prepare(Config(resume="latest", out_dir="named", beta=0.5, num_prompts=32))
    assert (cfg.seed, cfg.num_prompts, cfg.beta, cfg.reward, cfg.out_dir) == (
        4,
        32,
        0.5,
        "overlong",
        "named",
    )
    assert grpo.prepare(cfg) == cfg


def test_a_named_checkpoint_begins_a_run_of_its_own(
    undisturbed, again, tmp_path, monkeypatch, capsys
):
    shutil.copytree(undisturbed, tmp_path / "whole")
    monkeypatch.chdir(tmp_path)
    resume = str(tmp_path / "whole" / "step_000002")
    metrics, completions, weights = state_of(undisturbed)
    for out in ("new", "out"):  # named, and the first free one
        assert [m["step"] for m in again(out, resume=resume)] == [3, 4]
        assert state_of(tmp_path / out)[2] == weights
        ours, theirs = (
            [m["reward"] for m in log] for log in (state_of(tmp_path / out)[0], metrics)
        )
        assert ours == theirs[2:]
    with pytest.raises(ConfigError, match="holds"):
        again(str(tmp_path / "whole"), resume=resume)
    assert state_of(tmp_path / "whole") == state_of(undisturbed)


def test_before_its_first_checkpoint_a_run_begins_where_it_began(
    undisturbed, again, tmp_path, monkeypatch
):
    """And not with the model of --model."""
    out = tmp_path / "out"
    monkeypatch.chdir(undisturbed)
    for i in range(2):  # killed twice
        with pytest.MonkeyPatch.context() as patch, pytest.raises(ZeroDivisionError):
            at_step(patch, {3: lambda: 1 / 0})
            again(out, resume="latest" if i else "step_000002")
    assert names_in(out) == []
    monkeypatch.chdir(tmp_path)
    history = again(out, resume="latest")
    assert [m["step"] for m in history] == [3, 4]
    assert state_of(out)[2] == state_of(undisturbed)[2]


def test_a_restart_by_torchrun_resumes_nothing_by_itself(undisturbed, again, tmp_path, monkeypatch):
    """In a container torchrun has the same process id and rendezvous id each time: another run in
    `out` looks as if this torchrun had started it."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(undisturbed, "out")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert [m["step"] for m in again("out", max_steps=1)] == [1]
    assert state_of(tmp_path / "out") == state_of(undisturbed)
    assert names_in("out.1") == ["step_000001"]


def test_a_restart_by_torchrun_resumes_where_the_command_says_so(
    undisturbed, again, tmp_path, monkeypatch
):
    out = tmp_path / "named"
    for restart in range(2):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(restart))
        with pytest.MonkeyPatch.context() as patch:
            at_step(patch, {2 + restart: lambda: 1 / 0})
            with pytest.raises(ZeroDivisionError):
                again(out, resume="latest")
    again(out, resume="latest")
    assert state_of(out) == state_of(undisturbed)


def test_the_reference_is_the_runs_own(undisturbed, again, tmp_path):
    out, options = tmp_path / "out", dict(model=str(undisturbed / "step_000004"), beta=0.1)
    again(out, **options, max_steps=1)
    with pytest.raises(
        ConfigError, match="--model .*: not the weights that this run began with.*--beta 0"
    ):
        again(out, model=BUNDLED.model, beta=0.1, resume="latest")
    again(out, model=BUNDLED.model, beta=0, max_steps=2, resume="latest")


def test_what_changed_is_said_and_other_checkpoints_are_refused(
    again, tmp_path, monkeypatch, capsys
):
    out, rewards = tmp_path / "out", tmp_path / "rewards.py"
    for number in (1, 2):
        rewards.write_text(f"def length(completion, row): return {number} * len(completion)")
        resume = dict(resume="latest", num_prompts=4) if number == 2 else {}
        again(out, reward=f"{rewards}:length", max_steps=1, **resume)
    assert "at step 1; changed since then: num_prompts, reward_code\n" in capsys.readouterr().out
    assert json.loads((out / "config.json").read_text())["reward_code"].keys() == {str(rewards)}

    def gather(self, items):  # another machine found no checkpoint
        return [*items, 0] if type(items[0]) is int else items

    monkeypatch.setattr(World, "gather", gather)
    with pytest.raises(TrainingError, match="the machines hold different checkpoints"):
        again(out, resume="latest")


def test_a_flag_of_the_optimizer_counts_on_a_resume(undisturbed, again, tmp_path):
    for name, decay in (("same", 0.0), ("other", 0.9)):
        copy_cut_back(undisturbed, tmp_path / name, 3)
        again(tmp_path / name, resume="latest", weight_decay=decay)
        assert (state_of(tmp_path / name) == state_of(undisturbed)) == (decay == 0)


def test_a_stop_while_a_named_checkpoint_loads_has_nothing_to_save(undisturbed, tmp_path, capsys):
    checkpoint = harness.checkpoints.load_checkpoint(str(undisturbed / "step_000002"))
    cfg = Config(model="m", out_dir=str(tmp_path / "out"), resume=checkpoint.path, max_steps=4)
    run = harness.run.Run(cfg, CPU, checkpoint, time.monotonic())
    run.save_last("signal: ")  # before track()
    run.exits.close()
    assert "signal: stopped in step 3, nothing is saved" in capsys.readouterr().out


def test_a_resume_keeps_no_second_copy_of_adams_moments(undisturbed, again, tmp_path, monkeypatch):
    out, loaded, alive = tmp_path / "out", [], []
    copy_cut_back(undisturbed, out, 2)
    load, moved = (
        harness.checkpoints.load_checkpoint,
        torch.optim.Optimizer._process_value_according_to_param_policy,
    )

    def noted(path):
        checkpoint = load(path)
        moments = checkpoint.state["optimizer"]["state"].values()
        loaded.extend(weakref.ref(value) for moment in moments for value in moment.values())
        return checkpoint

    monkeypatch.setattr(harness.checkpoints, "load_checkpoint", noted)
    # as if they went to a GPU
    elsewhere = staticmethod(lambda *args, **options: moved(*args, **options).clone())
    monkeypatch.setattr(
        torch.optim.Optimizer, "_process_value_according_to_param_policy", elsewhere
    )
    at_step(monkeypatch, {3: lambda: alive.extend(ref() for ref in loaded if ref() is not None)})
    again(out, resume="latest")
    assert len(loaded) > 30 and alive == []
    assert state_of(out) == state_of(undisturbed)


# -- the steps


def test_what_rewards_log_has_names_of_its_own_and_without_any_the_run_ends():
    def failures(step, *scores):
        return Scorer([]).failure_metrics(scores, step, 4)

    scores = [Scores([1.0] * 2, {}, [False] * 2, metrics=dict(step=n)) for n in (2.0, 4)]
    assert failures(1, *scores) == {"logged/step": 3.0, "failed_rewards": None}
    none, failed = Scores([math.nan] * 2, {}, [False] * 2), Scores([0.0] * 2, {}, [True] * 2)
    with pytest.raises(
        TrainingError, match="in every sample of step 1 a reward failed or returned None"
    ):
        failures(1, none, none)
    with pytest.raises(
        TrainingError, match="in every sample of step 1 a reward failed or returned None"
    ):
        failures(1, none, failed)
    assert failures(1, none, scores[0])["logged/step"] == 2 and failures(2, none, none) == dict(
        failed_rewards=None
    )


def test_a_phase_waits_for_the_device(monkeypatch):
    waits = []
    for name in ("cuda", "mps"):
        monkeypatch.setattr(
            getattr(torch, name), "synchronize", lambda name=name: waits.append(name)
        )
    for name in ("cpu", "cuda", "mps"):
        clock = harness.run.Clock(torch.device(name))
        with clock("rollout"):
            pass
        assert list(clock.take()) == ["time_rollout"]
    assert waits == ["cuda", "mps"]
