"""TODO."""

import json
import math
import os
import shutil
import signal
import subprocess
import sys

import psutil
import pytest
import torch

import grpo
import harness.flags
import harness.log
import harness.rows
import harness.run
from grpo import Config
from harness.flags import ConfigError
from tests.common import (
    BUNDLED,
    HERE,
    METRICS,
    PRIME,
    copy_cut_back,
    gone,
    lines,
    read,
    small_run,
    state_of,
    tiny_model,
    tracked_run,
    wait_for,
)

pytest_plugins = "tests.common"


def test_nothing_that_is_not_finite_is_saved(tmp_path, capsys):
    model = tiny_model()
    with torch.no_grad():
        next(model.parameters())[0, 0] = math.nan
    run = tracked_run(tmp_path, model, save_every=1, max_steps=1)
    for step in run.steps():
        run.record(step, METRICS, [])
    assert harness.run.checkpoints(str(tmp_path)) == []
    assert "not saved, some parameters are not finite" in capsys.readouterr().out


def test_a_failed_save_does_not_stop_the_run(undisturbed, tmp_path, monkeypatch, capsys):
    out, calls, replace = tmp_path / "out", [], os.replace

    def fails_twice(source, target):
        if "partial_" in str(source) and len(calls) < 2:
            calls.append(target)
            raise OSError(28, "No space left on device")
        return replace(source, target)

    monkeypatch.setattr(os, "replace", fails_twice)
    small_run(out, train_data=str(undisturbed.parent / "rows.jsonl"))
    assert len(calls) == 2 and capsys.readouterr().out.count("could not save") == 2
    assert state_of(out) == state_of(undisturbed)


def test_what_others_left_is_moved_aside_and_nothing_of_the_user_is_touched(tmp_path, capsys):
    out = tmp_path / "out"
    for name in ("step_000050", "step_000100", "partial_results", "partial_000007"):
        (out / name).mkdir(parents=True)
        (out / name / "file").write_text(name)
    (out / "notes.txt").write_text("mine")
    small_run(out, keep=2)
    assert [os.path.basename(path) for path in harness.run.checkpoints(str(out))] == ["step_000003", "step_000004"]
    assert {p.name for p in (tmp_path / "out.1").iterdir()} == {"step_000050", "step_000100", "partial_000007"}
    assert (out / "notes.txt").read_text() == "mine" and (out / "partial_results" / "file").exists()
    assert "held an earlier run (partial_000007, step_000050, step_000100): moved to" in capsys.readouterr().out
    for path in harness.run.checkpoints(str(out)):
        os.remove(os.path.join(path, "model.safetensors"))
    small_run(out, resume="latest", max_steps=1)  # nothing to resume: as a fresh start
    said = capsys.readouterr().out
    assert said.count("is damaged") == 2 and "no checkpoint in" in said and "moved to" in said
    assert [m["step"] for m in lines(out / "metrics.jsonl")] == [1]
    assert len(lines(tmp_path / "out.2" / "metrics.jsonl")) == 4
    assert [os.path.basename(path) for path in harness.run.checkpoints(str(out))] == ["step_000001"]


def test_a_directory_that_is_no_runs_is_refused(tmp_path):
    model = tmp_path / "model"
    shutil.copytree(BUNDLED.model, model)
    with pytest.raises(ConfigError, match="holds a config.json that is no run's"):
        small_run(model, max_steps=1)
    assert sorted(set(os.listdir(model)) - {".lock"}) == sorted(os.listdir(BUNDLED.model))


def test_out_dir_may_be_a_link_end_in_a_slash_or_be_where_one_stands(tmp_path, monkeypatch):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    for out in (f"{tmp_path}/link", f"{tmp_path}/link/"):
        small_run(out, max_steps=1)
        assert (tmp_path / "link").is_symlink() and len(lines(tmp_path / "real" / "metrics.jsonl")) == 1
    assert len(lines(tmp_path / "real.1" / "metrics.jsonl")) == 1
    monkeypatch.chdir(tmp_path / "real")
    small_run(".", max_steps=1, train_data=str(tmp_path / "rows.jsonl"))
    assert len(lines(tmp_path / "real.2" / "metrics.jsonl")) == 1


def test_where_nothing_can_be_moved_out_it_is_moved_down(tmp_path, disk):
    out = disk("size=64m")  # a mount point
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    for _ in range(2):
        small_run(out, max_steps=1, train_data=str(tmp_path / "rows.jsonl"))
    assert len(lines(out / "earlier.1" / "metrics.jsonl")) == len(lines(out / "metrics.jsonl")) == 1


def test_two_runs_in_one_directory_are_refused(fork, undisturbed, tmp_path):
    out, rows = tmp_path / "out", str(undisturbed.parent / "rows.jsonl")
    [pid], wait = fork("stuck_run", out, "step", tmp_path / "on", train_data=rows)
    wait_for((tmp_path / "on").exists)
    before = state_of(out)
    for options in ({}, dict(resume="latest")):
        with pytest.raises(ConfigError, match=rf"--out_dir .*: another run \(process {pid}\) is writing there"):
            small_run(out, train_data=rows, **options)
    assert state_of(out) == before and not (tmp_path / "out.1").exists()
    os.kill(pid, signal.SIGKILL)
    wait()
    small_run(out, train_data=rows, resume="latest")
    assert state_of(out) == state_of(undisturbed)


def test_a_checkpoint_of_another_directory_leaves_that_and_moves_what_is_here(undisturbed, tmp_path, capsys):
    rows, other = str(undisturbed.parent / "rows.jsonl"), tmp_path / "other"
    shutil.copytree(undisturbed, tmp_path / "whole")
    small_run(other, max_steps=1, seed=7)
    theirs = state_of(other)
    whole = state_of(tmp_path / "whole")
    resume = str(tmp_path / "whole" / "step_000002")
    history = small_run(other, train_data=rows, resume=resume)
    assert [m["step"] for m in history] == [3, 4] and state_of(other)[2] == whole[2]
    assert state_of(tmp_path / "other.1") == theirs and state_of(tmp_path / "whole") == whole
    for _ in range(2):  # twice in its own directory: nothing is in the way
        small_run(tmp_path / "whole", train_data=rows, resume=resume)
        assert state_of(tmp_path / "whole") == whole
    assert {"step_000003.stale", "step_000003.stale.1"} <= set(os.listdir(tmp_path / "whole"))


def test_a_restart_resumes_only_what_this_launch_wrote(undisturbed, tmp_path, monkeypatch, capsys):
    out, rows = tmp_path / "out", str(undisturbed.parent / "rows.jsonl")
    shutil.copytree(undisturbed, out)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "another launch")
    assert [m["step"] for m in small_run(out, train_data=rows, max_steps=2)] == [1, 2]
    assert "resumed" not in capsys.readouterr().out
    assert [m["step"] for m in small_run(out, train_data=rows)] == [1, 2, 3, 4]
    assert "resumed from" in capsys.readouterr().out and state_of(out) == state_of(undisturbed)


def test_resume_takes_the_runs_own_flags(undisturbed, tmp_path, monkeypatch, capsys):
    out, rows = tmp_path / "out", str(undisturbed.parent / "rows.jsonl")
    small_run(out, train_data=rows, seed=1, max_steps=2, beta=0.5)
    cfg = grpo.parse_args(["--out_dir", str(out), "--resume", "--max_steps", "3"])
    assert (cfg.seed, cfg.beta, cfg.max_steps, cfg.reward, cfg.out_dir) == (1, 0.5, 3, "overlong", str(out))
    cfg = grpo.parse_args(["--resume", str(out / "step_000001"), "--seed", "0"])
    assert (cfg.seed, cfg.beta, cfg.out_dir, cfg.resume) == (0, 0.5, str(out), str(out / "step_000001"))
    grpo.train(grpo.parse_args(["--out_dir", str(out), "--resume", "--max_steps", "3"]))
    said = capsys.readouterr().out
    assert "changed since then: --max_steps 2 -> 3" in said and said.count("changed since then") == 1
    assert [m["step"] for m in lines(out / "metrics.jsonl")] == [1, 2, 3]


def test_the_reference_is_the_runs_own(undisturbed, tmp_path, capsys):
    """A model that lies in the out_dir that is moved aside; another one under the same name."""
    rows, out = str(undisturbed.parent / "rows.jsonl"), tmp_path / "out"
    shutil.copytree(undisturbed, out)
    options = dict(train_data=rows, model=str(out / "step_000004"), beta=0.1)
    small_run(out, **options, max_steps=2)
    assert f"--model was in it, and is now {tmp_path}/out.1/step_000004" in capsys.readouterr().out
    cfg = grpo.parse_args(["--out_dir", str(out), "--resume", "--max_steps", "4"])
    assert cfg.model == str(tmp_path / "out.1" / "step_000004")
    with pytest.raises(ConfigError, match="--model .*: not the weights that this run began with.*--beta 0"):
        small_run(out, **(options | dict(model=BUNDLED.model)), resume="latest")
    small_run(out, **(options | dict(model=BUNDLED.model, beta=0)), resume="latest")


def test_a_resume_before_the_best_forgets_it(tmp_path, monkeypatch):
    accuracies = iter([0.1, 0.2, 0.9, 0.3, 0.4, 0.5])
    ended = dict(eval_stderr=0.0, eval_length=1.0)
    monkeypatch.setattr(grpo, "evaluate", lambda *_: dict(eval_accuracy=next(accuracies)) | ended)
    out, options = tmp_path / "out", dict(eval_data=BUNDLED.eval_data, reward="answer", eval_every=1)
    options |= dict(train_data=BUNDLED.train_data, num_minibatches=1)
    small_run(out, max_steps=2, **options)
    assert os.readlink(out / "best") == "step_000002"
    (out / "step_000001" / "x").touch()
    history = small_run(out, max_steps=2, resume=str(out / "step_000001"), **options)
    assert history[-1]["eval_accuracy"] == 0.3 and os.readlink(out / "best") == "step_000002"  # better than 0.2
    shutil.rmtree(out / "step_000002")
    small_run(out, max_steps=1, resume=str(out / "step_000001"), **options)
    assert os.readlink(out / "best") == "step_000001"


@pytest.mark.parametrize("where", [100, -100])
def test_a_changed_byte_is_found(undisturbed, tmp_path, where, capsys):
    out = tmp_path / "out"
    shutil.copytree(undisturbed, out)
    for name, step in (("model.safetensors", 4), ("trainer_state.pt", 3)):
        path = out / f"step_00000{step}" / name
        content = bytearray(path.read_bytes())
        content[where] ^= 1
        path.write_bytes(content)
    small_run(out, resume="latest", train_data=str(undisturbed.parent / "rows.jsonl"))
    said = capsys.readouterr().out
    assert "model.safetensors is not as it was written" in said and "step_000002 at step 2" in said
    assert state_of(out) == state_of(undisturbed)


def test_odd_lines_in_a_log_are_left_out_on_resume(undisturbed, tmp_path):
    out = tmp_path / "out"
    copy_cut_back(undisturbed, out, 2)
    with open(out / "metrics.jsonl", "a") as file:
        file.write('null\n{"a": 1}\n[3]\n"step"\n{"step": null}\n{"step": 9')
    small_run(out, resume="latest", train_data=str(undisturbed.parent / "rows.jsonl"))
    assert state_of(out) == state_of(undisturbed)


def test_the_users_generation_config_is_kept_as_it_is(undisturbed, tmp_path):
    """transformers refuses to write some that it reads."""
    from transformers import AutoModelForCausalLM

    model = tmp_path / "model"
    shutil.copytree(BUNDLED.model, model)
    mine = json.dumps(dict(temperature=0.6, top_p=0.9, do_sample=False, eos_token_id=[1, 3]))
    (model / "generation_config.json").write_text(mine)
    small_run(tmp_path / "out", model=str(model), max_steps=1)
    saved = tmp_path / "out" / "step_000001"
    assert (saved / "generation_config.json").read_text() == mine
    assert AutoModelForCausalLM.from_pretrained(saved).generation_config.eos_token_id == [1, 3]
    small_run(tmp_path / "out", model=str(model), max_steps=3, keep=1, resume="latest")  # its source goes
    assert (tmp_path / "out" / "step_000003" / "generation_config.json").read_text() == mine
    os.remove(model / "generation_config.json")
    small_run(tmp_path / "none", model=str(model), max_steps=1)
    assert not (tmp_path / "none" / "step_000001" / "generation_config.json").exists()


def test_that_nothing_can_be_saved_is_found_before_the_first_step(tmp_path, monkeypatch):
    monkeypatch.setattr(harness.run, "model_writer", lambda *_: lambda path: 1 / 0)
    with pytest.raises(ConfigError, match="--out_dir .*: no checkpoint can be saved there .division by zero"):
        small_run(tmp_path / "out")
    assert lines(tmp_path / "out" / "metrics.jsonl") == [] and not list((tmp_path / "out").glob("partial*"))


def test_a_model_whose_generation_config_cannot_be_written_can_be_saved(tmp_path):
    """Also where the sampler leaves the model's own in place, as vLLM does."""
    from transformers import AutoModelForCausalLM

    model = tmp_path / "model"
    shutil.copytree(BUNDLED.model, model)
    mine = json.dumps(dict(temperature=0.6, top_p=0.9, do_sample=False, eos_token_id=1))
    (model / "generation_config.json").write_text(mine)
    loaded = grpo.load_model(str(model), Config())
    harness.run.model_writer(loaded, harness.rows.load_tokenizer(BUNDLED), str(model))(str(tmp_path / "saved"))
    assert (tmp_path / "saved" / "generation_config.json").read_text() == mine
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "saved").num_parameters() == loaded.num_parameters()


def test_a_restart_goes_on_from_its_own_newest_checkpoint(undisturbed, tmp_path, monkeypatch, capsys):
    """Not from the one that --resume named when the launch began."""
    out, rows = tmp_path / "out", str(undisturbed.parent / "rows.jsonl")
    copy_cut_back(undisturbed, out, 1)
    options = dict(train_data=rows, resume=str(out / "step_000001"))
    small_run(out, **options, max_steps=3)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    capsys.readouterr()
    small_run(out, **options)
    assert "step_000003 at step 3" in capsys.readouterr().out and state_of(out) == state_of(undisturbed)


def test_a_dashboard_that_raises_costs_no_step(undisturbed, tmp_path, monkeypatch):
    out, rows = tmp_path / "out", str(undisturbed.parent / "rows.jsonl")

    def report(step, values, rows):
        if step == 3:
            raise ValueError("no network")

    monkeypatch.setattr(harness.log, "reporter", lambda cfg: report)
    with pytest.raises(ValueError, match="no network"):
        small_run(out, train_data=rows, save_every=0)
    monkeypatch.undo()
    small_run(out, train_data=rows, resume="latest")
    assert state_of(out) == state_of(undisturbed)


def test_a_resume_that_fails_leaves_log_and_checkpoints_together(undisturbed, tmp_path, monkeypatch):
    out, rows = tmp_path / "out", str(undisturbed.parent / "rows.jsonl")
    shutil.copytree(undisturbed, out)
    monkeypatch.setattr(grpo, "make_sampler", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        small_run(out, train_data=rows, resume=str(out / "step_000002"))
    monkeypatch.undo()
    small_run(out, train_data=rows, resume="latest")
    assert state_of(out) == state_of(undisturbed)


def test_an_eval_that_a_stop_cut_off_is_made_again_and_may_be_the_best(tmp_path, monkeypatch):
    accuracies = iter([0.1, None, 0.9, 0.3, 0.2])

    def evaluate(*_):
        accuracy = next(accuracies)
        if accuracy is None:
            raise harness.flags.TrainingError("cut off")
        return dict(eval_accuracy=accuracy, eval_stderr=0.0, eval_length=1.0)

    monkeypatch.setattr(grpo, "evaluate", evaluate)
    out, options = tmp_path / "out", dict(eval_data=BUNDLED.eval_data, reward="answer", eval_every=1, keep=1)
    options |= dict(train_data=BUNDLED.train_data, num_minibatches=1, save_every=0, max_steps=3)
    with pytest.raises(harness.flags.TrainingError):
        small_run(out, **options)
    history = small_run(out, **options, resume="latest")
    assert [m.get("eval_accuracy") for m in history] == [0.1, 0.9, 0.3, 0.2]
    assert os.readlink(out / "best") == "step_000001" and (out / "step_000001").is_dir()


def test_a_sampler_that_is_off_stops_before_the_first_of_several_updates(undisturbed, tmp_path, monkeypatch):
    """So that what is there can be saved."""
    out, rows = tmp_path / "out", str(undisturbed.parent / "rows.jsonl")
    honest, calls = harness.log.gap_metrics, []

    def gap(parts, cfg):
        calls.append(1)
        if len(calls) == 3:
            raise harness.flags.TrainingError("off")
        return honest(parts, cfg)

    monkeypatch.setattr(harness.log, "gap_metrics", gap)
    with pytest.raises(harness.flags.TrainingError, match="off"):
        small_run(out, train_data=rows, save_every=0)  # two updates a step
    assert [os.path.basename(path) for path in harness.run.checkpoints(str(out))] == ["step_000002"]


def test_odd_rewards_in_an_eval_are_said_and_leave_a_log_that_is_json(tmp_path, capsys):
    (tmp_path / "rewards.py").write_text(
        "def none(completion, row): return None\n"
        "def extra(completions, log_extra, **_):\n"
        "    log_extra('reward', ['mine'] * len(completions))\n    return [1.0] * len(completions)\n"
        "def fails(completion, row): return row['nothing']\n"
    )
    options = dict(eval_data=BUNDLED.eval_data, max_steps=1, num_minibatches=1)
    small_run(tmp_path / "out", reward=f"{tmp_path}/rewards.py:none,overlong", **options)
    text = (tmp_path / "out" / "metrics.jsonl").read_text()
    assert "NaN" not in text and json.loads(text.splitlines()[-1])["eval_accuracy"] is None
    small_run(tmp_path / "out", reward=f"{tmp_path}/rewards.py:extra", **options)
    assert {row["reward"] for row in lines(tmp_path / "out" / "completions.jsonl")} == {1.0}
    capsys.readouterr()
    small_run(tmp_path / "out", reward=f"overlong,{tmp_path}/rewards.py:fails", **(options | dict(max_steps=0)))
    assert "eval of step 0: reward fails failed on sample" in capsys.readouterr().out


def test_a_directory_called_save_is_the_users(tmp_path):
    out = tmp_path / "out"
    (out / "save").mkdir(parents=True)
    small_run(out, max_steps=2)
    assert (out / "save").is_dir() and len(lines(out / "metrics.jsonl")) == 2


def test_a_checkpoint_that_was_copied_alone_brings_its_flags(undisturbed, tmp_path):
    shutil.copytree(undisturbed / "step_000002", tmp_path / "step_000002")
    cfg = grpo.parse_args(["--resume", str(tmp_path / "step_000002")])
    assert (cfg.num_prompts, cfg.reward, cfg.num_minibatches) == (3, "overlong", 2) and cfg.out_dir == "out"


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


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_a_torchrun_that_ends_leaves_nobody_behind(tmp_path, how):
    """Killed with -9: its ranks end, and free the directory. Asked to stop, in a step of an hour: they save."""
    script, out, mark = tmp_path / "script.py", tmp_path / "out", tmp_path / "rank"
    script.write_text(ORPHANS)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", script, *PRIME]
    command += ["--rollout", "hf", "--save_every", 0, "--out_dir", out]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": HERE, "MARK": str(mark)}
    agent = subprocess.Popen(list(map(str, command)), env=environment, stderr=subprocess.DEVNULL)
    wait_for(lambda: all(os.path.exists(f"{mark}{rank}") and read(f"{mark}{rank}") for rank in (0, 1)))
    ranks = [psutil.Process(int(read(f"{mark}{rank}"))) for rank in (0, 1)]
    agent.send_signal(how)
    agent.wait()
    assert gone(ranks, 300)  # a second or a few, on a machine that is not busy
    assert [os.path.basename(p) for p in harness.run.checkpoints(str(out))] == ["step_000001"][: how == signal.SIGTERM]
