"""Tests of the log: its lines, its files, the end of a run, dashboards."""

import json
import os
import sys
import types

import matplotlib
import numpy as np
import pytest

import grpo
import harness.dashboards
import harness.jsonl
import harness.log
import view
from grpo import Config, Sample
from harness.environment import Transcript
from harness.flags import ConfigError
from harness.rows import Prompt
from tests.common import BUNDLED, copy_cut_back, lines, small_run, state_of

pytest_plugins = "tests.common"


def log_of(out_dir, first=0, **flags):
    """The log of a run that begins after the step `first`."""
    return harness.log.Log(Config(out_dir=str(out_dir), **flags), first, started=0.0, rank0=True)


# -- files


def test_a_full_disk_delays_lines_and_tears_none(tmp_path, monkeypatch, capsys):
    log = harness.jsonl.JsonLines(str(tmp_path / "m.jsonl"), 0)
    log.write({"step": 1})
    whole_open = open

    def full(path, mode):
        file = whole_open(path, mode)
        file.write(b'{"st')  # half a line reaches the disk
        file.close()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(harness.jsonl, "open", full, raising=False)
    log.write({"step": 2})
    monkeypatch.undo()
    assert "No space left on device" in capsys.readouterr().out
    log.write({"step": 3})
    assert lines(tmp_path / "m.jsonl") == [{"step": 1}, {"step": 2}, {"step": 3}]


@pytest.mark.parametrize("how", [os.remove, lambda path: os.truncate(path, 0)])
def test_a_log_that_is_moved_away_comes_back(tmp_path, how):
    """Removed, or cut to nothing by a rotation that copies: later lines are in a new file."""
    path = tmp_path / "m.jsonl"
    log = harness.jsonl.JsonLines(str(path), 0)
    for step in (1, 2, 3, 4):
        log.write({"step": step})
        if step == 2:
            how(path)
    assert [row["step"] for row in lines(path)] == [3, 4]


def test_half_a_line_in_a_log_does_not_stop_a_resume(undisturbed, tmp_path):
    out = tmp_path / "out"
    copy_cut_back(undisturbed, out, 2)
    with open(out / "metrics.jsonl", "a") as file:
        file.write('{"step": 9')
    small_run(out, resume="latest", train_data=str(undisturbed.parent / "rows.jsonl"))
    assert state_of(out) == state_of(undisturbed)


def test_a_model_that_scores_no_number_leaves_a_log_that_is_json(tmp_path, capsys):
    (tmp_path / "rewards.py").write_text(
        "def none(completion, row): return None\n"
        "def fails(completion, row): return row['nothing']\n"
    )
    options = dict(eval_data=BUNDLED.eval_data, max_steps=1, num_minibatches=1)
    small_run(tmp_path / "out", reward=f"{tmp_path}/rewards.py:none,overlong", **options)
    text = (tmp_path / "out" / "metrics.jsonl").read_text()
    assert "NaN" not in text and json.loads(text.splitlines()[-1])["eval_accuracy"] is None
    options |= dict(reward=f"overlong,{tmp_path}/rewards.py:fails", max_steps=0)
    small_run(tmp_path / "failing", **options)
    assert "eval of step 0: reward fails failed: " in capsys.readouterr().out


# -- lines, metrics, notes


def test_the_line_of_a_step_shows_the_kl_by_k1(tmp_path, capsys):
    """One unlikely token raises k3 tenfold."""
    metrics = dict(step=1, reward=0.5, kl=0.172, kl_k1=0.0645, tokens_per_s=100)
    log_of(tmp_path, max_steps=4).step(metrics | {"skipped_steps/left_out": 2}, [])
    line = capsys.readouterr().out
    assert line.startswith("step 1/4 reward 0.5 kl 0.0645 SKIPPED 2 (left_out) | 100 tok/s, ")


def test_the_group_with_noted_tokens_is_the_first_card_of_the_page():
    """Also if the last group is written in part: signal is a mean over the samples of a group."""

    def sample(group, i, advantage):
        ids = np.arange(3, dtype=np.int32)
        prompt = Prompt(ids, "p", {})
        return Sample(
            group, prompt, ids, ids * 0.0, "stop", text=f"{i}", advantages=np.full(3, advantage)
        )

    advantages = {0: [0, 0, 0], 1: [1, -0.5, -0.5], 2: [2, -1, -1]}
    samples = [sample(group, i, a) for group, row in advantages.items() for i, a in enumerate(row)]
    for written, group in ((-1, 2), (9, 2), (7, 2), (6, 1), (3, 0)):
        cfg = Config(log_completions=written)
        noted = harness.log.samples_to_note(samples, cfg)
        assert {s.group for s in noted} == {group}
        rows = harness.log.completion_rows(samples, 1, tokenizer=None)
        rows = harness.log.first_written(rows, cfg)
        assert view.make_cards(rows)[0]["title"] == f"group {group}"
    assert harness.log.samples_to_note(samples, Config(log_tokens=4)) == samples[:4]


# -- episodes

ASKS = """
def asks(turns, row):
    if row["answer"] == "708":
        raise KeyError("no such problem")
    if len(turns) < 3:
        return ["1+2=", "3+4="][len(turns) - 1]
asks.stop = ("=",)
"""


@pytest.fixture(scope="module")
def episodes(tmp_path_factory):
    """The metrics and the rows of a step whose environment says 1+2=, then 3+4=, and fails on some
    rows."""
    folder = tmp_path_factory.mktemp("episodes")
    (folder / "asks.py").write_text(ASKS)
    problems = [dict(prompt="12+34=", answer="46"), dict(prompt="610+098=", answer="708")]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in problems))
    options = dict(train_data=str(folder / "rows.jsonl"), environment=f"{folder}/asks.py:asks")
    options |= dict(num_prompts=2, max_completion_length=40, max_steps=1, num_minibatches=1)
    small_run(folder / "out", log_tokens=10, log_completions=-1, **options)
    return lines(folder / "out" / "metrics.jsonl")[0], lines(folder / "out" / "completions.jsonl")


def test_the_row_of_an_episode_has_all_that_follows_the_prompt(episodes):
    tokenizer = grpo.rows.load_tokenizer(BUNDLED)
    whole = [row for row in episodes[1] if len(row["turns"]) == 3]
    assert whole
    for row in whole:
        assert row["replies"] == ["1+2=", "3+4="] and "failure" not in row
        said = [row["turns"][0], "1+2=", row["turns"][1], "3+4=", row["turns"][2]]
        text = row["completion"].replace(tokenizer.eos_token, "")  # which ended the first turns
        assert text == "".join(said) and row["completion"].endswith(row["turns"][2])
        assert "".join(row["tokens"]["text"]) == row["completion"]


def test_tokens_of_the_environment_have_a_text_and_no_measures(episodes):
    for row in episodes[1]:
        tokens = row["tokens"]
        if len(row["turns"]) == 1:
            assert "sampled" not in tokens
            continue
        assert sum(tokens["sampled"]) == row["length"] == len(tokens["text"]) - 8
        replied = [i for i, sampled in enumerate(tokens["sampled"]) if not sampled]
        assert "".join(tokens["text"][i] for i in replied) == "1+2=3+4="
        for name in ("logp", "entropy", "gap", "push", "kl"):
            assert len(tokens[name]) == len(tokens["text"])
            assert {tokens[name][i] for i in replied} == {0}


def test_the_row_of_an_episode_says_why_it_failed(episodes):
    failed = [row for row in episodes[1] if row["row"]["answer"] == "708"]
    assert len(failed) == 5
    for row in failed:
        assert row["failure"].startswith("exception: KeyError: 'no such problem'")
        assert row["replies"] == []
        assert row["turns"] == [row["completion"]]


def test_metrics_of_episodes_count_sampled_tokens(episodes):
    metrics, rows = episodes
    turns = [len(row["turns"]) for row in rows]
    assert metrics["turns/mean"] == sum(turns) / 10 > 1
    assert metrics["environment/mean_length"] == 4 * (sum(turns) - 10) / 10
    assert metrics["completions/mean_length"] == sum(row["length"] for row in rows) / 10
    assert metrics["tools/call_frequency"] == metrics["tools/failure_frequency"] == 0


def test_tool_calls_have_trls_metrics_and_the_line_shows_turns(tmp_path, capsys):
    prompt = Prompt(np.arange(3, dtype=np.int32), "p", {})
    samples = []
    add, divide = ("add", {"a": 1, "b": 2}), ("divide", {"a": 1, "b": 0})
    for calls, failed_calls in (([[add, divide], [add]], 1), ([[divide]], 1), ([], 0), ([], 0)):
        ids = np.arange(9, dtype=np.int32)
        s = Sample(0, prompt, ids, ids * 0.0, "length", sampled=np.arange(9) % 3 > 0)
        s.transcript = Transcript((), {}, 0, "", turns=[""] * (len(calls) + 1), calls=calls)
        s.transcript.failed_calls = failed_calls
        samples.append(s)
    metrics = harness.log.sample_metrics(samples)
    assert metrics["tools/call_frequency"] == 1.0  # of 4 episodes
    assert metrics["tools/failure_frequency"] == 0.5
    assert (metrics["turns/mean"], metrics["environment/mean_length"]) == (1.75, 3)
    assert metrics["completions/mean_length"] == metrics["completions/max_length"] == 6
    assert metrics["completions/clipped_ratio"] == 1
    log_of(tmp_path, max_steps=4).step(metrics | dict(step=1, tokens_per_s=100), [])
    assert "length 6 turns 1.75 | 100 tok/s" in capsys.readouterr().out


def test_a_run_without_an_environment_logs_nothing_of_episodes(undisturbed):
    metrics = lines(undisturbed / "metrics.jsonl")[0]
    assert not any(name.startswith(("turns", "tools", "environment")) for name in metrics)
    for row in lines(undisturbed / "completions.jsonl"):
        assert not {"turns", "replies", "failure"} & set(row)
        assert "sampled" not in row.get("tokens", {})


# -- the end of a run


def test_a_matplotlibrc_that_asks_for_latex_does_not_end_a_run(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(matplotlib.rcParams, "text.usetex", True)  # and there is no LaTeX
    log = log_of(tmp_path)
    log.step(dict(step=1, reward=1.0, tokens_per_s=1), [])
    log.close()
    assert f"curves: {tmp_path}/curves.png\n" in capsys.readouterr().out
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_the_summary_names_only_what_there_is(tmp_path, capsys):
    """A stop in step 1 leaves one eval and no sample."""
    log = log_of(tmp_path)
    metrics = dict(eval_accuracy=0.25, eval_stderr=0.1, eval_length=3.0)
    log.eval(0, metrics)
    log.close()
    out = capsys.readouterr().out
    assert "accuracy_before: 0.250 +- 0.100\n" in out and "steps: 0\n" in out
    assert "accuracy_after" not in out and "samples:" not in out
    log.step(dict(step=1, reward=1.0, tokens_per_s=1), [dict(step=1)])
    log.eval(1, metrics)
    log.close()
    out = capsys.readouterr().out
    assert "accuracy_after: 0.250 +- 0.100\n" in out
    assert f"samples: python view.py {tmp_path} --step\n" in out


@pytest.mark.parametrize("error", [RuntimeError("no font\nand more"), ZeroDivisionError()])
def test_a_picture_that_cannot_be_drawn_does_not_end_a_run(tmp_path, monkeypatch, capsys, error):
    def draw(out_dirs, path):
        raise error

    monkeypatch.setattr(harness.log, "draw", draw)
    log_of(tmp_path).close()
    cause = (str(error) or repr(error)).splitlines()[0]
    assert f"curves: not drawn: {cause}\n" in capsys.readouterr().out


# -- dashboards


@pytest.fixture
def dashboard(monkeypatch, undisturbed):
    """Stands in for wandb or trackio."""
    sent = []
    run = types.SimpleNamespace(
        log=lambda values, step: sent.append((step, values)), finish=lambda: sent.append("end")
    )
    package = types.SimpleNamespace(init=lambda project, name, config, resume: run)
    monkeypatch.setattr(grpo.dashboards, "check_installed", lambda cfg: None)
    for name in ("wandb", "trackio"):
        monkeypatch.setitem(sys.modules, name, package)
    return package, run, sent


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_a_dashboard_gets_trls_names(dashboard, tmp_path, name):
    options = dict(max_steps=1, eval_data=BUNDLED.eval_data)
    small_run(tmp_path / "out", report_to=name, **options)
    *logged, end = dashboard[2]
    assert [step for step, _ in logged] == [0, 1, 1] and end == "end"
    assert "eval/accuracy" in logged[0][1]
    assert {"train/reward", "train/step_time"} <= set(logged[1][1])
    for _, values in logged:
        assert all(isinstance(value, int | float | np.floating) for value in values.values())


@pytest.fixture
def tensorboard(monkeypatch):
    """Stands in for torch.utils.tensorboard. Holds what a writer was made with, sent and closed."""
    calls = types.SimpleNamespace(options={}, sent={}, closed=0)

    class SummaryWriter:
        def __init__(self, folder, **options):
            calls.options = options

        def add_scalar(self, name, value, step):
            calls.sent[name, step] = value

        def close(self):
            calls.closed += 1

    module = types.SimpleNamespace(SummaryWriter=SummaryWriter)
    monkeypatch.setattr(grpo.dashboards, "check_installed", lambda cfg: None)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    return calls


def test_tensorboard_gets_the_same_names(tmp_path, tensorboard):
    small_run(tmp_path / "out", report_to="tensorboard", max_steps=1, eval_data=BUNDLED.eval_data)
    names = "loss grad_norm learning_rate reward reward_std frac_reward_zero_std "
    names += "completions/mean_length kl entropy"
    assert {(f"train/{name}", 1) for name in names.split()} <= set(tensorboard.sent)
    assert {("eval/accuracy", 0), ("eval/accuracy", 1)} <= set(tensorboard.sent)
    assert tensorboard.closed == 1


@pytest.mark.parametrize("first", [0, 7])
def test_tensorboard_forgets_the_steps_that_a_resumed_run_makes_again(tmp_path, tensorboard, first):
    log_of(tmp_path, first, report_to="tensorboard")
    assert tensorboard.options["purge_step"] == first + 1


def test_a_dashboard_that_raises_costs_no_step(dashboard, undisturbed, tmp_path, capsys):
    package, run, _ = dashboard

    def fails(values, step):
        raise ValueError("no network")

    run.log = fails
    rows = str(undisturbed.parent / "rows.jsonl")
    small_run(tmp_path / "out", report_to="wandb", train_data=rows)
    assert "--report_to wandb failed: no network" in capsys.readouterr().out
    assert state_of(tmp_path / "out") == state_of(undisturbed)
    package.init = None
    with pytest.raises(ConfigError, match="--report_to wandb: 'NoneType' object is not callable"):
        small_run(tmp_path / "other", report_to="wandb")


def test_a_dashboard_that_is_not_installed_is_named():
    for name in ("wandb", "trackio"):
        with pytest.raises(ConfigError, match=f"--report_to {name}: not installed; pip install"):
            grpo.prepare(Config(report_to=name))
