"""What a run writes and shows: the lines of its logs, dashboards."""

import json
import os
import sys
import types

import numpy as np
import pytest

import grpo
import harness.log
from grpo import Config
from harness.flags import ConfigError
from tests.common import BUNDLED, copy_cut_back, lines, small_run, state_of

pytest_plugins = "tests.common"


def test_a_full_disk_delays_lines_and_tears_none(tmp_path, monkeypatch, capsys):
    log = harness.log.JsonLines(str(tmp_path / "m.jsonl"), 0)
    log.write({"step": 1})
    whole_open = open

    def full(path, mode):
        file = whole_open(path, mode)
        file.write(b'{"st')  # half a line reaches the disk
        file.close()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(harness.log, "open", full, raising=False)
    log.write({"step": 2})
    monkeypatch.undo()
    assert "No space left on device" in capsys.readouterr().out
    log.write({"step": 3})
    assert lines(tmp_path / "m.jsonl") == [{"step": 1}, {"step": 2}, {"step": 3}]


@pytest.mark.parametrize("how", [os.remove, lambda path: os.truncate(path, 0)])
def test_a_log_that_is_moved_away_comes_back(tmp_path, how):
    """Removed, or cut to nothing by a rotation that copies: later lines are in a new file."""
    path = tmp_path / "m.jsonl"
    log = harness.log.JsonLines(str(path), 0)
    for step in (1, 2, 3, 4):
        log.write({"step": step})
        if step == 2:
            how(path)
    assert [row["step"] for row in lines(path)] == [3, 4]


def test_odd_lines_in_a_log_do_not_stop_a_resume(undisturbed, tmp_path):
    out = tmp_path / "out"
    copy_cut_back(undisturbed, out, 2)
    with open(out / "metrics.jsonl", "a") as file:
        file.write('null\n{"a": 1}\n[3]\n"step"\n{"step": null}\n{"step": 9')
    small_run(out, resume="latest", train_data=str(undisturbed.parent / "rows.jsonl"))
    assert state_of(out) == state_of(undisturbed)


def test_a_model_that_scores_no_number_leaves_a_log_that_is_json(tmp_path, capsys):
    (tmp_path / "rewards.py").write_text(
        "def none(completion, row): return None\ndef fails(completion, row): return row['nothing']\n"
    )
    options = dict(eval_data=BUNDLED.eval_data, max_steps=1, num_minibatches=1)
    small_run(tmp_path / "out", reward=f"{tmp_path}/rewards.py:none,overlong", **options)
    text = (tmp_path / "out" / "metrics.jsonl").read_text()
    assert "NaN" not in text and json.loads(text.splitlines()[-1])["eval_accuracy"] is None
    options |= dict(reward=f"overlong,{tmp_path}/rewards.py:fails", max_steps=0)
    small_run(tmp_path / "failing", **options)
    assert "eval of step 0: reward fails failed on sample" in capsys.readouterr().out


# -- dashboards


@pytest.fixture
def dashboard(monkeypatch, undisturbed):
    """Stands in for wandb or trackio, and for the pandas that their tables need, after a run has looked for them."""
    sent = []
    run = types.SimpleNamespace(
        log=lambda values, step: sent.append((step, values)), finish=lambda: sent.append("end")
    )
    package = types.SimpleNamespace(
        init=lambda project, name, config, resume: run, Table=lambda dataframe: ("table", dataframe)
    )
    monkeypatch.setattr(harness.log, "installed", lambda name: True)
    monkeypatch.setitem(sys.modules, "pandas", types.SimpleNamespace(DataFrame=list))
    for name in ("wandb", "trackio"):
        monkeypatch.setitem(sys.modules, name, package)
    return package, run, sent


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_a_dashboard_gets_trls_names_and_table(dashboard, tmp_path, name):
    small_run(
        tmp_path / "out",
        report_to=name,
        max_steps=1,
        eval_data=BUNDLED.eval_data,
        log_completions=3,
    )
    *logged, end = dashboard[2]
    assert [step for step, _ in logged] == [0, 1, 1] and end == "end"
    assert (
        "eval/accuracy" in logged[0][1]
        and "train/reward" in logged[1][1]
        and "train/step_time" in logged[1][1]
    )
    kind, rows = logged[1][1].pop("completions")
    assert kind == "table" and len(rows) == 3
    assert set(rows[0]) >= {"step", "prompt", "completion", "overlong", "advantage"}
    assert all(
        isinstance(value, int | float | np.floating)
        for _, values in logged
        for value in values.values()
    )


def test_tensorboard_gets_the_same_names(tmp_path, monkeypatch):
    sent, closed = {}, []
    writer = types.SimpleNamespace(add_scalar=lambda k, v, step: sent.update({(k, step): v}))
    writer.close = lambda: closed.append(1)
    tensorboard = types.SimpleNamespace(SummaryWriter=lambda folder, flush_secs: writer)
    monkeypatch.setattr(harness.log, "installed", lambda name: True)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", tensorboard)
    small_run(tmp_path / "out", report_to="tensorboard", max_steps=1, eval_data=BUNDLED.eval_data)
    names = "loss grad_norm learning_rate reward reward_std frac_reward_zero_std completions/mean_length kl entropy"
    assert {(f"train/{name}", 1) for name in names.split()} | {
        ("eval/accuracy", 0),
        ("eval/accuracy", 1),
    } <= set(sent)
    assert closed == [1]


def test_a_dashboard_that_raises_costs_no_step(dashboard, undisturbed, tmp_path, capsys):
    package, run, _ = dashboard

    def fails(values, step):
        raise ValueError("no network")

    run.log = fails
    small_run(
        tmp_path / "out", report_to="wandb", train_data=str(undisturbed.parent / "rows.jsonl")
    )
    assert "--report_to wandb failed: no network" in capsys.readouterr().out
    assert state_of(tmp_path / "out") == state_of(undisturbed)
    package.init = None
    with pytest.raises(ConfigError, match="--report_to wandb: 'NoneType' object is not callable"):
        small_run(tmp_path / "other", report_to="wandb")


def test_a_folder_is_no_dashboard(tmp_path, monkeypatch):
    """wandb writes to a folder of its name."""
    (tmp_path / "wandb").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("wandb", "trackio"):
        with pytest.raises(
            ConfigError, match=f"--report_to {name}: not installed; pip install {name} pandas"
        ):
            grpo.prepare(Config(report_to=name))
