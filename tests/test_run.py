"""A run as its user sees it: the command line, bad input, the directory, checkpoints, a resume to
the bit, stops, ranks, rewards that fail."""

import dataclasses
import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import types
from pathlib import Path

import numpy as np
import pytest
import torch

import grpo
from extras import ranks
from extras.errors import ConfigError, TrainingError
from grpo import Config
from tests.common import (
    GAP,
    HERE,
    begun_run,
    checkpoints,
    fake_run,
    flags_of,
    fork,
    lines,
    main,
    metrics_of,
    on_ranks,
    random_samples,
    small_config,
    small_rows,
    small_run,
    tiny_model,
    train,
    weights_of,
    whole_run,
)

MODEL = f"{HERE}/sample_data/model"


def same_run(a, b):
    """The same metrics, completions and weights, to the bit."""
    assert metrics_of(a) == metrics_of(b)
    completions = [lines(Path(out, "completions.jsonl")) for out in (a, b)]
    assert completions[0] == completions[1]
    newest = [checkpoints(out)[-1] for out in (a, b)]
    assert os.path.basename(newest[0]) == os.path.basename(newest[1])
    assert torch.equal(weights_of(newest[0]), weights_of(newest[1]))


# ------------------------------------------------------------------------------------------------
# Bad input: one line, exit code 2, and nothing is left behind


@pytest.mark.parametrize(
    "args, named",
    [
        (["--learning_rat", "1"], ["unknown --learning_rat;", "--learning_rate"]),
        (["--lr", "1"], ["--lr", "--learning_rate"]),
        (["--beta", "x"], ["--beta"]),
        (["--beta", "-1"], ["--beta"]),
        (["--beta", "inf"], ["--beta"]),
        (["--chat", "perhaps"], ["--chat"]),
        (["--num_generations", "1"], ["--num_generations"]),
        (["--num_prompts", "0"], ["--num_prompts"]),
        (["--kl_estimator", "k5"], ["--kl_estimator", "k5"]),
        (["--num_minibatches", "300"], ["--num_minibatches"]),
        (["--kl_in", "reward"], ["--kl_estimator"]),
        (["--chat_template_kwargs", "[1]"], ["--chat_template_kwargs"]),
        (["--model", "nowhere"], ["--train_data"]),
        (["--model", "nowhere", "--train_data", "x.jsonl"], ["--model", "nowhere"]),
        (["--reference", "nowhere"], ["--reference", "nowhere"]),
        (["--reward", "nothing"], ["--reward", "nothing"]),
        (["--reward", "missing.py:f"], ["--reward", "missing.py"]),
        (["--environment", "missing.py:f"], ["--environment", "missing.py"]),
        (["--train_data", "missing.jsonl"], ["--train_data missing.jsonl: "]),
        (["--eval_data", "missing.jsonl"], ["--eval_data", "missing.jsonl"]),
        (["--max_completion_length", "9999"], ["--max_completion_length"]),
        (["--max_completion_length", "100000000000"], ["--max_completion_length"]),
        (["--max_prompt_length", "2"], ["--train_data"]),
        (["--report_to", "trackio"], ["--report_to", "trackio"]),
        (["--chat"], ["--train_data", "row 1"]),  # the bundled model has no chat template
    ],
)
def test_bad_input_is_one_line(args, named, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    if args == ["--kl_in", "reward"]:
        args = [*args, "--beta", "0.1"]
    assert grpo.main(args) == 2
    [line] = [x for x in capfd.readouterr().err.splitlines() if x.strip()]
    for word in named:
        assert word in line
    assert os.listdir(tmp_path) == []


def test_gpus_that_no_rank_can_use_are_said_in_a_line(tmp_path, monkeypatch, capfd):
    """A driver that is too old shows its cards to nvidia-smi alone."""
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho GPU 0: NVIDIA A10")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert grpo.main(["--out_dir", f"{tmp_path}/run"]) == 2
    assert "driver" in capfd.readouterr().err
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert not ranks.has_card()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert grpo.main(["--out_dir", f"{tmp_path}/run"]) == 2
    assert "2 ranks need a GPU each, but 1 can" in capfd.readouterr().err


def test_the_help_has_all_flags(capsys):
    with pytest.raises(SystemExit, match="0"):
        grpo.main(["--help"])
    shown = capsys.readouterr().out
    assert "--model" in shown[:200]  # not after an essay
    for f in dataclasses.fields(Config):
        assert f"--{f.name}" in shown


def test_flags_reach_the_config_and_win_over_the_bundled_task():
    cfg = grpo.parse_flags(
        ["--beta", "0.5", "--chat", "--fast", "false", "--non_stop_reward", "-1"]
    )
    assert (cfg.beta, cfg.chat, cfg.fast, cfg.non_stop_reward) == (0.5, True, False, -1.0)
    assert (cfg.model, cfg.learning_rate) == (MODEL, 3e-4)
    assert grpo.parse_flags(["--train_data", "x.jsonl"]).eval_data == ""
    other = grpo.parse_flags(["--model", "m", "--train_data", "x.jsonl"])
    assert other == Config(model="m", train_data="x.jsonl")
    assert grpo.parse_flags(flags_of(cfg)) == cfg


@pytest.mark.parametrize(
    "error, code",
    [
        (ConfigError("--x: y"), 2),
        (TrainingError("it went wrong"), 1),
        (torch.OutOfMemoryError("CUDA out of memory."), 1),
    ],
)
def test_what_ends_a_run_is_one_line_and_an_exit_code(error, code, monkeypatch, capsys):
    def train(cfg):
        raise error

    monkeypatch.setattr(grpo, "train", train)
    assert grpo.main([]) == code
    said = capsys.readouterr().err
    assert str(error) in said and said.count("\n") == 1


# ------------------------------------------------------------------------------------------------
# The directory


def test_an_unnamed_directory_is_the_first_free_one(tmp_path, monkeypatch):
    """And its newest is what --resume takes. out.mine has a name."""
    monkeypatch.chdir(tmp_path)
    for name in ("out", "out.1", "out.2", "out.mine"):
        cfg = small_config(tmp_path / "run", max_steps=0)
        train(dataclasses.replace(cfg, out_dir="out.mine" if name == "out.mine" else "out"))
        assert json.loads(Path(name, "config.json").read_text())["out_dir"] == f"{tmp_path}/{name}"
    assert grpo.parse_flags(["--resume"]).out_dir == "out.2"


def test_runs_that_start_together_get_a_directory_each(tmp_path, monkeypatch):
    """The first still waits for its dashboard when the second begins."""
    monkeypatch.chdir(tmp_path)
    cfg = dataclasses.replace(small_config(tmp_path / "run", max_steps=0), out_dir="out")

    def init(**options):
        fake.init = lambda **options: None
        grpo.train(dataclasses.replace(cfg, report_to="none"))

    fake = types.SimpleNamespace(init=init, finish=list, log=lambda *_: None)
    monkeypatch.setitem(sys.modules, "trackio", fake)
    train(dataclasses.replace(cfg, report_to="trackio"))
    assert Path("out/config.json").exists() and Path("out.1/config.json").exists()


def test_a_named_directory_with_anything_in_it_is_refused(tmp_path):
    out = tmp_path / "run"
    begun_run(out, 1)
    before = sorted(os.listdir(out))
    with pytest.raises(ConfigError, match="run"):
        small_run(out, max_steps=1)
    assert sorted(os.listdir(out)) == before


def test_a_reward_may_change_the_directory_and_draw(tmp_path, monkeypatch):
    """Checkpoints go where the run began, and two runs of one seed draw the same."""
    text = """
import os, random
import numpy as np

def draws(completion, row):
    os.chdir("/")
    return random.random() + np.random.random()
"""
    path = write_rewards(tmp_path, text)
    (tmp_path / "model").symlink_to(MODEL)
    for name in ("one", "two"):
        monkeypatch.chdir(tmp_path)
        cfg = small_config(tmp_path / name, reward=f"{path}:draws", max_steps=2)
        train(dataclasses.replace(cfg, out_dir=name, model="model"))
    same_run(tmp_path / "one", tmp_path / "two")


def test_a_resume_says_which_files_were_edited(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("HOME", str(tmp_path))
    path = write_rewards(tmp_path, "def one(completion, row):\n    return 1.0\n")
    cfg = small_config(tmp_path / "rows", reward=f"{path}:one")
    for edited in (False, True):
        if edited:
            with open(path, "a") as file:
                file.write("# another version\n")
        train(dataclasses.replace(cfg, out_dir="~/run", max_steps=1 + edited, resume=edited))
        assert ("edited" in capfd.readouterr().out) == edited
    assert metrics_of(tmp_path / "run")[-1]["step"] == 2


def test_what_a_run_leaves(tmp_path):
    out = tmp_path / "run"
    history = grpo.train(small_config(out, eval_data=small_rows(tmp_path), max_steps=1))
    assert lines(out / "metrics.jsonl") == history
    eval_line, step_line, _ = history
    assert eval_line["step"] == 0 and -1 <= eval_line["eval_accuracy"] <= 0
    named = {"reward", "reward_std", "loss", "grad_norm", "entropy", "kl", GAP}
    assert named | {"completions/mean_length", "rewards/overlong/mean"} <= set(step_line)
    rows = lines(out / "completions.jsonl")
    assert len(rows) == 15
    assert {"prompt", "completion", "reward", "advantage", "row"} <= set(rows[0])
    assert [i for i, row in enumerate(rows) if "row" in row] == [0, 5, 10]  # once a group
    signal = dict.fromkeys(range(3), 0.0)
    for row in rows:
        signal[row["group"]] += abs(row["advantage"])
    with_tokens = [row["group"] for row in rows if "tokens" in row]
    assert len(with_tokens) == 10  # the two groups with the most signal
    assert set(with_tokens) == set(sorted(signal, key=signal.get)[1:])
    assert (out / "curves.png").stat().st_size > 1000


def test_an_old_checkpoint_that_is_a_link_now_costs_no_save(tmp_path):
    out, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    begun_run(out, 1)
    shutil.move(out / "step_000001", elsewhere)
    (out / "step_000001").symlink_to(elsewhere)
    small_run(out, keep=1, max_steps=2, resume=True)
    assert [os.path.basename(path) for path in checkpoints(out)] == ["step_000002"]
    assert (elsewhere / "model.safetensors").exists()


def test_an_accuracy_on_other_eval_data_names_no_best_checkpoint(tmp_path):
    text = "def r(_, row):\n    return row['value'] + row['trainer_state']['global_step'] / 100\n"
    reward = write_rewards(tmp_path, text) + ":r"
    for name, value in (("easy", 0.9), ("hard", 0.1)):
        Path(tmp_path, name).with_suffix(".jsonl").write_text(
            json.dumps(dict(prompt="1+1=", value=value)) + "\n"
        )
    options = dict(train_data=f"{tmp_path}/easy.jsonl", reward=reward, eval_every=1, keep=1)
    small_run(tmp_path / "run", eval_data=f"{tmp_path}/easy.jsonl", max_steps=1, **options)
    hard = dict(eval_data=f"{tmp_path}/hard.jsonl", max_steps=3)
    small_run(tmp_path / "run", resume=True, **options, **hard)
    names = [os.path.basename(path) for path in checkpoints(tmp_path / "run")]
    assert names == ["step_000003"]
    # Of a run that has ended, too: 0.9 + 3 / 100 now, and nothing of what hard.jsonl gave.
    easy = options | dict(eval_data=f"{tmp_path}/easy.jsonl", max_steps=3)
    history = small_run(tmp_path / "run", resume=True, **easy)
    evals = [m["eval_accuracy"] for m in history if "eval_accuracy" in m]
    assert evals == [pytest.approx(0.93)]
    assert sum("earlier_accuracy" in m for m in history) == 5


def test_the_newest_and_the_best_checkpoints_are_kept(tmp_path):
    """And the last, which is no save_every-th step. The first was the best so far."""
    text = "def r(_, row):\n    return 1.0 - abs(row['trainer_state']['global_step'] - 2) / 9\n"
    reward = write_rewards(tmp_path, text) + ":r"
    options = dict(eval_data=small_rows(tmp_path), eval_every=1, max_steps=5, reward=reward)
    options |= dict(num_prompts=1, num_minibatches=1)
    for keep, steps in ((2, [2, 4, 5]), (0, [1, 2, 4, 5])):
        small_run(tmp_path / f"run{keep}", save_every=2, keep=keep, **options)
        names = [os.path.basename(path) for path in checkpoints(tmp_path / f"run{keep}")]
        assert names == [f"step_00000{step}" for step in steps]


@pytest.mark.parametrize("trained", [True, False])
def test_moments_are_those_of_the_parameters_name(trained, tmp_path, monkeypatch):
    """A run that trains the second layer only, resumed to the bit; and then all layers."""
    make = grpo.make_optimizer

    def without_first_layer(policy, cfg):
        policy.model.model.layers[0].requires_grad_(False)
        optimizer = make(policy, cfg)
        [group] = optimizer.param_groups
        group["params"] = [p for p in group["params"] if p.requires_grad]
        return optimizer

    monkeypatch.setattr(grpo, "make_optimizer", without_first_layer)
    out = tmp_path / "run"
    small_run(out, max_steps=2)
    if not trained:
        small_run(tmp_path / "whole")
        small_run(out, resume=True)
        return same_run(tmp_path / "whole", out)
    monkeypatch.setattr(grpo, "make_optimizer", make)
    small_run(out, max_steps=3, resume=True)
    moments = torch.load(out / "step_000003" / "trainer_state.pt")["moments"]
    steps = {("layers.0." in name): moment["step"].item() for name, moment in moments.items()}
    assert steps == {True: 2, False: 6}  # two optimizer steps in each step


def test_nothing_that_is_not_finite_is_saved(tmp_path, monkeypatch):
    def spoil(policy, *_):
        with torch.no_grad():
            next(policy.parameters()).fill_(math.nan)
        return dict(skipped_steps=0, optimizer_steps=1)

    monkeypatch.setattr(grpo, "update", spoil)
    with pytest.raises(TrainingError):
        small_run(tmp_path / "run", max_steps=1)
    assert checkpoints(tmp_path / "run") == []


# ------------------------------------------------------------------------------------------------
# Resume


SLOW_OPTIONS = pytest.param(dict(num_epochs=2, weight_decay=0.1), marks=pytest.mark.slow)


@pytest.mark.parametrize("options", [{}, SLOW_OPTIONS, dict(lora_rank=2)])
def test_resume_to_the_bit(options, tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    evals = dict(eval_data=small_rows(tmp_path), eval_every=2)
    small_run(whole, **evals, **options)
    small_run(parts, max_steps=2, **evals, **options)
    small_run(parts, resume=True, **evals, **options)
    same_run(whole, parts)


@pytest.mark.parametrize("name", ["trainer_state.pt", "model.safetensors"])
def test_a_broken_newest_checkpoint_is_passed_over_with_a_word(name, tmp_path, capsys):
    broken = tmp_path / "broken"
    begun_run(broken, 4)
    shutil.copytree(broken / "step_000002", broken / "step_00002b")  # somebody's copy
    file = broken / "step_000004" / name
    file.write_bytes(file.read_bytes()[:1000])
    capsys.readouterr()
    small_run(broken, resume=True)
    assert "step_000004" in capsys.readouterr().out
    same_run(whole_run(), broken)


def test_moments_of_an_earlier_version_are_not_lost_without_a_word(tmp_path):
    out = tmp_path / "run"
    train(small_config(out, max_steps=1))
    path = out / "step_000001" / "trainer_state.pt"
    saved = torch.load(path, weights_only=False)
    torch.save(saved | dict(moments=dict(enumerate(saved["moments"].values()))), path)
    with pytest.raises(ConfigError, match="earlier version"):
        train(small_config(out, max_steps=2, resume=True))


def test_a_resume_by_the_command_line_takes_the_runs_own_flags(tmp_path, capsys):
    out = tmp_path / "run"
    cfg = small_config(out, max_steps=2, seed=7, lr_schedule="cosine", max_turns=3)
    train(cfg)
    assert "--max_turns needs --environment" in capsys.readouterr().out
    resumed = grpo.parse_flags(["--resume", "--out_dir", str(out), "--max_steps", "3"])
    decided = {
        name: getattr(resumed, name)
        for name in ("dtype", "micro_batch_tokens", "fast", "compile", "began")
    }
    decided |= dict(max_steps=3, resume=True, rollout="hf")
    assert resumed == dataclasses.replace(cfg, **decided)
    assert len(train(resumed)) == 3
    said = capsys.readouterr().out
    assert "step 2 of 3" in said and "--max_steps was 2 and is now 3" in said
    assert "--seed" not in said and "the learning rate jumps" in said
    assert len(train(dataclasses.replace(resumed, max_steps=1))) == 3
    assert "step 3 of 1" in capsys.readouterr().out


def test_the_same_command_begins_a_run_and_goes_on(tmp_path, monkeypatch, capsys):
    """With --resume, as a job that may be preempted."""
    monkeypatch.chdir(tmp_path)
    flags = flags_of(small_config(tmp_path / "out", max_steps=Config.max_steps))
    flags = flags[: flags.index("--out_dir")] + flags[flags.index("--out_dir") + 2 :]
    for named in ([], ["--out_dir", str(tmp_path / "named")]):
        for steps in ("1", "2"):
            assert main(*flags, "--resume", *named, "--max_steps", steps) == 0
        assert "begins at step 1 of 2" in capsys.readouterr().out
    assert [len(metrics_of(tmp_path / name)) for name in ("out", "named")] == [2, 2]


def test_a_resume_with_another_model_or_other_rows_is_refused(tmp_path):
    out = tmp_path / "run"
    begun_run(out, 1)
    other = tmp_path / "rows2.jsonl"
    other.write_text("".join(json.dumps(row) + "\n" for row in lines(tmp_path / "rows.jsonl")[:4]))
    with pytest.raises(ConfigError, match="train_data"):
        small_run(out, max_steps=2, resume=True, train_data=str(other))
    model = tmp_path / "model"
    shutil.copytree(out / "step_000001", model)
    with pytest.raises(ConfigError, match="model"):
        small_run(out, max_steps=3, resume=True, model=str(model))


def test_state_of_a_changed_copy_survives_a_resume(tmp_path, monkeypatch):
    """A copy keeps how often each row was drawn, in arrays that it changes in place."""
    honest = grpo.assign_advantages
    states = []

    def count(samples, cfg, state):
        states.append(state)
        for s in samples:
            state.setdefault(str(s.prompt.row_number), np.zeros(1))[:] += 1
        honest(samples, cfg, state)

    monkeypatch.setattr(grpo, "assign_advantages", count)
    small_run(tmp_path / "whole")
    whole = states[-1]
    small_run(tmp_path / "parts", max_steps=2)
    small_run(tmp_path / "parts", resume=True)
    assert states[-1] == whole and sum(whole.values()) == 4 * 15


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, dict(lora_rank=2)])
def test_kill_9_at_random_moments_loses_nothing(options, tmp_path):
    """In the rollout, the update, a save, a rename. Resumed each time, the run ends in the bits of
    an undisturbed one."""
    whole, out = tmp_path / "whole", tmp_path / "run"
    options = dict(max_steps=12, num_prompts=8) | options
    a_step = min(m["step_time"] for m in small_run(whole, **options))
    args = flags_of(small_config(out, **options))
    rng = random.Random(0)
    kills = 0
    for number in range(20):
        more = ["--resume"] if (out / "config.json").exists() else []
        said = tmp_path / f"stdout{number}"
        said.touch()
        process = fork("tests.common.main", [*args, *more], [said])
        if number < 3:
            while "/12 reward" not in said.read_text():  # the line of a step
                assert process.is_alive()
                time.sleep(0.01)
            time.sleep(rng.random() * 3 * a_step)
            process.kill()
            kills += 1
        process.join()
        if process.exitcode == 0:
            break
        for path in checkpoints(out):  # whole or absent
            assert torch.load(f"{path}/trainer_state.pt")["step"] > 0
    assert kills == 3
    same_run(whole, out)


# ------------------------------------------------------------------------------------------------
# Stops and errors


@pytest.mark.parametrize(
    "number", [signal.SIGUSR1, pytest.param(signal.SIGINT, marks=pytest.mark.slow)]
)
def test_a_stop_saves_and_the_run_can_go_on(number, tmp_path):
    out = tmp_path / "run"
    inherited = signal.signal(number, signal.default_int_handler)  # a shell's & ignores SIGINT
    honest = grpo.Run.end_step

    def stop(self, *arguments):
        honest(self, *arguments)
        if self.step == 2:
            os.kill(os.getpid(), number)

    grpo.Run.end_step = stop
    try:
        history = small_run(out, save_every=0)
    finally:
        grpo.Run.end_step = honest
    assert [m["step"] for m in history] == [1, 2]
    assert [os.path.basename(path) for path in checkpoints(out)] == ["step_000002"]
    assert signal.signal(number, inherited) == signal.default_int_handler
    small_run(out, save_every=0, resume=True)
    same_run(whole_run(), out)


@pytest.mark.slow
def test_a_second_signal_some_seconds_later_ends_the_run_at_once(tmp_path):
    code = (
        "import time, grpo\n"
        "from tests.common import small_run\n"
        "def rollout(*args):\n    print('now', flush=True); time.sleep(600)\n"
        f"grpo.rollout = rollout\nsmall_run({str(tmp_path / 'run')!r})"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=HERE
    )
    while process.stdout.readline().strip() != b"now":
        pass
    process.send_signal(signal.SIGTERM)
    process.stderr.readline()  # it says that it stops
    process.send_signal(signal.SIGTERM)  # as torchrun passes its own on
    time.sleep(6)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == -signal.SIGTERM


def test_an_error_saves_the_last_whole_step(tmp_path, monkeypatch):
    honest = grpo.update

    def fail(policy, ddp, optimizer, samples, step, *rest, **options):
        if step < 3:
            return honest(policy, ddp, optimizer, samples, step, *rest, **options)
        raise RuntimeError("no")

    monkeypatch.setattr(grpo, "update", fail)
    with pytest.raises(RuntimeError):
        small_run(tmp_path / "run", save_every=0)
    [path] = checkpoints(tmp_path / "run")
    assert path.endswith("step_000002")


def test_an_error_between_optimizer_steps_saves_nothing(tmp_path, monkeypatch):
    """The weights are then those of no step."""
    honest = grpo.accumulate_gradient
    calls = []

    def fail(*args):
        calls.append(1)
        if len(calls) == 4:  # the second mini-batch of step 2
            raise RuntimeError("no")
        return honest(*args)

    monkeypatch.setattr(grpo, "accumulate_gradient", fail)
    with pytest.raises(RuntimeError):
        small_run(tmp_path / "run", save_every=0)
    assert checkpoints(tmp_path / "run") == []


def test_five_bad_steps_in_a_row_end_the_run(tmp_path, monkeypatch):
    def infinite(samples, cfg, state):
        for s in samples:
            s.advantages[:] = math.inf

    monkeypatch.setattr(grpo, "assign_advantages", infinite)
    with pytest.raises(TrainingError, match="5 steps"):
        small_run(tmp_path / "run", max_steps=9)
    assert [m["skipped_steps"] for m in metrics_of(tmp_path / "run")] == [2] * 5


# ------------------------------------------------------------------------------------------------
# Ranks


def test_two_ranks_divide_anything_and_resume_to_the_bit(tmp_path):
    """Prompts, G, ranks, micro-batch and mini-batches are pairwise prime."""
    one, two, parts = tmp_path / "one", tmp_path / "two", tmp_path / "parts"
    options = dict(max_steps=3, num_minibatches=2, micro_batch_tokens=61)
    small_run(one, **options)
    for out, more in ((two, {}), (parts, dict(max_steps=2)), (parts, dict(resume=True))):
        args = flags_of(small_config(out, **options | more))
        done = on_ranks(2, "tests.common.main", *args)
        assert done.returncode == 0, done.stderr[-3000:]
    same_run(two, parts)
    for a, b in zip(metrics_of(one), metrics_of(two), strict=True):
        assert a.keys() == b.keys()
        assert a == pytest.approx(b, rel=1e-4, abs=1e-6)
    texts = [[row["completion"] for row in lines(out / "completions.jsonl")] for out in (one, two)]
    assert texts[0] == texts[1]


# ------------------------------------------------------------------------------------------------
# Rewards and dashboards in a run


def write_rewards(folder, text):
    path = Path(folder, "rewards.py")
    path.write_text(text)
    return str(path)


def test_a_reward_that_fails_or_hangs_costs_its_samples_and_is_said(tmp_path, capsys):
    text = """
import time

def fails(completion, row):
    if "1" in completion:
        raise KeyError("no such thing")
    return len(completion)

def hangs(completion, row):
    if completion.startswith("0"):
        time.sleep(60)
    return 0.0
"""
    path = write_rewards(tmp_path, text)
    rewards = f"{path}:fails,{path}:hangs"
    history = small_run(tmp_path / "run", reward=rewards, call_timeout=0.2, max_steps=2)
    said = capsys.readouterr().out
    rows = lines(tmp_path / "run" / "completions.jsonl")
    for row in rows:
        if "1" in row["completion"]:
            assert row["rewards"]["fails"] == 0.0 and "no such thing" in row["failure"]
    for metrics in history:
        failed = [r for r in rows if r["step"] == metrics["step"] and "failure" in r]
        assert metrics["failed_rewards"] == len(failed) > 0
    assert said.count("no such thing") + said.count("0.2 s") == 2  # in each step its first


def test_a_cut_off_completion_gets_the_reward_of_the_flag():
    samples = random_samples(4, 2)
    samples[0].finish_reason = samples[1].finish_reason = "length"
    reward = grpo.load_rewards("format")[0]._replace(function=lambda text, row: row["value"])
    for s, value in zip(samples, (1.0, None, 0.5, None), strict=True):
        s.prompt = grpo.Prompt(s.prompt.ids, "", dict(value=value))
    grpo.score(samples, fake_run(Config(non_stop_reward=-2.0), reward_functions=[reward]))
    assert samples[0].reward == -2.0
    assert samples[2].reward == 0.5
    assert math.isnan(samples[1].reward) and math.isnan(samples[3].reward)


@pytest.mark.parametrize("column", ["completion_ids", "max_completion_length", "prompt_messages"])
def test_a_column_with_a_name_of_the_trainers_is_refused(column, tmp_path):
    """It would change what the rewards compute."""
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"prompt": "1+2=", "turns": 3, column: [1]}))
    with pytest.raises(ConfigError, match=f"row 1: .*{column}"):
        small_run(tmp_path / "run", train_data=str(path))


def test_no_reward_sees_what_another_does_to_its_row():
    def spoils(completion, row):
        row["seen"].append(completion)
        row["prompt_messages"].clear()
        return float(len(row["seen"]))

    [sample] = random_samples(1, 1)
    sample.prompt.row = dict(seen=[])
    sample.prompt.messages = [dict(role="user", content="a")]
    first = grpo.load_rewards("format")[0]._replace(function=spoils, name="first")
    rewards = [first, first._replace(name="second")]
    grpo.score([sample, sample], fake_run(Config(), reward_functions=rewards))
    assert sample.rewards == dict(first=1.0, second=1.0)
    assert sample.prompt.row == dict(seen=[]) and len(sample.prompt.messages) == 1


def test_an_eval_leaves_out_what_a_reward_does_not_apply_to(tmp_path):
    text = """
def even(completion, row):
    return None if int(row["answer"]) % 2 else 1.0
"""
    path = write_rewards(tmp_path, text)
    options = dict(reward=f"{path}:even", eval_data=small_rows(tmp_path))
    history = small_run(tmp_path / "run", max_steps=0, eval_samples=2, **options)
    assert history[0]["eval_accuracy"] == history[0]["eval_pass@2"] == 1.0


def test_a_group_is_scored_in_one_call(tmp_path):
    """So a reward may rank the samples of a group, in TRL's form, as in REFERENCE. Every
    rank has whole groups."""
    text = """
def length(completion_ids, log_metric, log_extra, **columns):
    log_metric("calls", 1.0)
    log_extra("length", [len(ids) for ids in completion_ids])
    return [0.0] * len(completion_ids)
"""
    blocks = Path(HERE, "docs/REFERENCE.md").read_text().split("```python\n")[1:]
    [example] = [block.partition("```")[0] for block in blocks if "def longest_wins" in block]
    path = write_rewards(tmp_path, text + example)
    rewards = f"{path}:length,{path}:longest_wins"
    args = flags_of(small_config(tmp_path / "run", reward=rewards, max_steps=1))
    done = on_ranks(2, "tests.common.main", *args)
    assert done.returncode == 0, done.stderr[-3000:]
    [metrics] = metrics_of(tmp_path / "run")
    assert metrics["logged/calls"] == 1.0
    rows = lines(tmp_path / "run" / "completions.jsonl")
    for row in rows:
        assert row["extra"]["length"] == str(row["length"])
        group = [other["length"] for other in rows if other["group"] == row["group"]]
        shorter = [length for length in group if length < row["length"]]
        assert len(group) == 5 and row["rewards"]["longest_wins"] == len(shorter) / 4
    assert {row["rewards"]["longest_wins"] for row in rows} > {0.0, 1.0}


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_a_dashboard_gets_trls_names_and_costs_no_step(name, tmp_path, monkeypatch):
    sent = []
    fake = types.ModuleType(name)
    fake.__spec__ = types.SimpleNamespace(name=name)
    fake.init = lambda **options: sent.append(options)
    if name == "wandb":
        fake.define_metric = lambda *names, step_metric: None

    def log(values, step=None):
        assert (step is None) == (name == "wandb")  # with a step wandb would drop some
        sent.append(values)
        raise ConnectionError("no network")

    def finish(**options):
        sent.append(options)
        raise ConnectionError("no network")

    fake.log, fake.finish = log, finish
    monkeypatch.setitem(sys.modules, name, fake)
    options = dict(report_to=name, eval_data=small_rows(tmp_path), max_steps=1)
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
    small_run(tmp_path / "a" / "run", **options)
    small_run(tmp_path / "b" / "run", report_to=name, max_steps=0)  # another of this name
    small_run(tmp_path / "a" / "run", report_to=name, max_steps=2, resume=True)
    for variable, value in dict(PROJECT="p", NAME="n", RUN_ID="i").items():
        monkeypatch.setenv(f"WANDB_{variable}", value)
    small_run(tmp_path / "sweep", report_to=name, max_steps=0)
    [*_, own] = [x for x in sent if "project" in x]
    sent.remove(own)
    is_theirs = [own["project"], own["name"], own.get("id"), own["resume"]] == [*"pni", "allow"]
    assert is_theirs == (name == "wandb")
    for variable in ("PROJECT", "NAME", "RUN_ID"):
        monkeypatch.delenv(f"WANDB_{variable}")
    begun, zero, one, *_ = sent
    assert "eval/accuracy" in zero and zero["train/step"] == 0
    assert {"train/reward", "train/completions/mean_length"} <= set(one)
    a, b, again = ((x["name"], x.get("id")) for x in sent if "project" in x)
    assert a == again != b and a[0].startswith("run")
    assert [x["resume"] for x in sent if "project" in x] == ["never", "never", "allow"]

    monkeypatch.setattr(grpo, "update", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        small_run(tmp_path / "crash", report_to=name)
    assert sent[-1] == (dict(exit_code=1) if name == "wandb" else {})
    fake.init = None  # as without a key: before a directory is made
    with pytest.raises(ConfigError, match=name):
        small_run(tmp_path / "none", report_to=name)
    assert not (tmp_path / "none").exists()


def test_what_auto_means_for_a_small_model_on_a_cpu(tmp_path):
    cfg = grpo.resolve_auto(Config(max_completion_length=8), tiny_model())
    assert (cfg.dtype, cfg.rollout, cfg.device) == ("float32", "hf", "cpu")
    small_run(tmp_path / "run", max_steps=0, device="auto", micro_batch_tokens=0)
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    # 0, as a resume reads it as a flag: the page may then have another default.
    assert (config["compile"], config["micro_batch_tokens"]) == ("off", 0)
    assert (config["dtype"], config["rollout"], config["device"]) == ("float32", "hf", "cpu")
