"""The run on disk: its directory, what --resume means, checkpoints."""

import contextlib
import json
import math
import os
import shutil
import threading
import time
import types
import weakref

import numpy as np
import pytest
import torch

import grpo
import harness.checkpoints
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
    METRICS,
    at_step,
    copy_cut_back,
    lines,
    small_run,
    state_of,
    tiny_model,
    tracked_run,
    write_whole,
)

pytest_plugins = "tests.common"


@pytest.fixture
def again(undisturbed):
    """The undisturbed run once more, elsewhere: again(out, **options)."""
    return lambda out, **options: small_run(
        out, train_data=str(undisturbed.parent / "rows.jsonl"), **options
    )


def names_in(out):
    return [os.path.basename(path) for path in harness.checkpoints.checkpoints(str(out))]


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
        config = lines_of_config(undisturbed) | dict(seed=number)
        (tmp_path / name / "config.json").write_text(json.dumps(config))
        os.utime(tmp_path / name / "config.json", (1000 + number, 1000 + number))
    os.utime(tmp_path / "out.2" / "config.json", (1010, 1010))  # it was started last
    assert flags_of("--resume") == ("out.2", "latest", 0, 3)
    assert flags_of("--resume", "--seed", "0", "--num_prompts", "32") == ("out.2", "latest", 0, 32)
    assert flags_of("--resume", "--out_dir", "named") == ("named", "latest", 4, 3)
    assert flags_of("--resume", "named") == flags_of("--resume", "named", "--out_dir", "./named/")
    assert flags_of("--resume", "named") == ("named", "latest", 4, 3)  # a run's own folder
    assert flags_of("--resume", "named", "--out_dir", "new") == ("new", "named/step_000004", 0, 3)
    assert flags_of("--resume", "named/step_000002") == (
        "out",
        "named/step_000002",
        0,
        3,
    )  # the flags of that moment
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


def lines_of_config(out):
    return json.loads((out / "config.json").read_text())


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
    monkeypatch.setattr(
        World, "gather", lambda self, items: [*items, 0]
    )  # a machine that found nothing
    with pytest.raises(TrainingError, match="the machines hold different checkpoints"):
        again(out, resume="latest")


# -- checkpoints


def test_a_damaged_checkpoint_is_named_and_passed_over(undisturbed, again, tmp_path, capsys):
    out = tmp_path / "out"
    shutil.copytree(undisturbed, out)
    with open(out / "step_000004" / "model.safetensors", "r+b") as file:
        file.truncate(1000)
    (out / "step_000003" / "trainer_state.pt").write_bytes(b"PK torn")
    os.remove(out / "step_000002" / "config.json")
    (out / ".partial").mkdir()
    again(out, resume="latest", save_every=3, keep=1)
    said = capsys.readouterr().out
    assert (
        all(f"step_00000{n} is damaged" in said for n in (2, 3, 4))
        and "step_000001 at step 1" in said
    )
    assert names_in(out) == ["step_000004"] and not (out / ".partial").exists()
    assert state_of(out) == state_of(undisturbed)
    os.remove(out / "step_000004" / "model.safetensors")
    config = lines_of_config(out) | dict(
        resume=str(undisturbed / "step_000002")
    )  # it would cut the log
    (out / "config.json").write_text(json.dumps(config))
    before = state_of_log(out)
    with pytest.raises(ConfigError, match="--resume .*step_000004: not a whole checkpoint"):
        again(out, resume="latest")
    assert state_of_log(out) == before


def state_of_log(out):
    return (out / "metrics.jsonl").read_bytes()


def test_damaged_checkpoints_ahead_do_not_push_out_new_ones(undisturbed, again, tmp_path):
    out = tmp_path / "out"
    shutil.copytree(undisturbed, out)
    for step in (3, 4):
        os.remove(out / f"step_00000{step}" / "model.safetensors")
    again(out, resume="latest", keep=1, save_every=1, max_steps=3)
    assert names_in(out) == ["step_000003", "step_000004"]
    assert harness.checkpoints.load_checkpoint(str(out / "step_000003")).state["step"] == 3


def test_a_changed_byte_is_found(undisturbed, again, tmp_path, capsys):
    out = tmp_path / "out"
    shutil.copytree(undisturbed, out)
    for name, step in (("model.safetensors", 4), ("trainer_state.pt", 3)):
        path = out / f"step_00000{step}" / name
        content = bytearray(path.read_bytes())
        content[-100] ^= 1
        path.write_bytes(content)
    again(out, resume="latest")
    said = capsys.readouterr().out
    assert "model.safetensors is not as it was written" in said and "step_000002 at step 2" in said
    assert state_of(out) == state_of(undisturbed)


def test_that_nothing_can_be_saved_is_found_before_the_first_step(tmp_path, monkeypatch):
    monkeypatch.setattr(grpo, "model_writer", lambda *_: lambda path, trial=False: 1 / 0)
    with pytest.raises(
        ConfigError, match="--out_dir .*: no checkpoint can be saved there .division by zero"
    ):
        small_run(tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_nothing_that_is_not_finite_is_saved(tmp_path, capsys):
    for number, value in enumerate((math.nan, -math.inf)):
        model = tiny_model()
        run = tracked_run(tmp_path / str(number), model, save_every=1, max_steps=1)
        with torch.no_grad():
            list(model.parameters())[-1].view(-1)[-1] = value
        for step in run.steps():
            run.record(step, METRICS, [])
        assert names_in(tmp_path / str(number)) == []
        assert "could not save (some parameters are not finite)" in capsys.readouterr().out


def test_the_newest_and_the_best_are_kept(tmp_path):
    run = tracked_run(tmp_path, eval_data="x", keep=2, save_every=1, max_steps=6)
    for step, accuracy in zip(run.steps(), (-3, -1, -2, -2, -2, -0.5), strict=False):
        run.record(step, METRICS, [])
        run.record_eval(step, dict(eval_accuracy=accuracy, eval_stderr=0.0, eval_length=1.0))
        if step == 6:  # what stands after the save of step 5
            assert names_in(tmp_path) == [
                "step_000002",
                "step_000004",
                "step_000005",
            ]  # negative, and still the best
            assert os.readlink(tmp_path / "best") == "step_000002"
    assert (
        names_in(tmp_path) == ["step_000005", "step_000006"]
        and os.readlink(tmp_path / "best") == "step_000006"
    )


@pytest.mark.parametrize("cut, best", [(1, 1), (3, 3)])  # in the middle, and after the last step
def test_an_eval_that_a_stop_cut_off_is_made_again_and_may_be_the_best(
    tmp_path, monkeypatch, cut, best
):
    made = [0.1, 0.3, 0.2, 0.25]
    accuracies = iter([*made[:cut], None, 0.9, *made[cut + 1 :]])

    def evaluate(*_):
        accuracy = next(accuracies)
        if accuracy is None:
            raise TrainingError("cut off")
        return dict(eval_accuracy=accuracy, eval_stderr=0.0, eval_length=1.0)

    monkeypatch.setattr(grpo, "evaluate", evaluate)
    out, options = (
        tmp_path / "out",
        dict(eval_data=BUNDLED.eval_data, reward="answer", eval_every=1, keep=1),
    )
    options |= dict(train_data=BUNDLED.train_data, num_minibatches=1, save_every=0, max_steps=3)
    with pytest.raises(TrainingError):
        small_run(out, **options)
    history = small_run(out, **options, resume="latest")
    assert [m["eval_accuracy"] for m in history if "eval_accuracy" in m] == [
        *made[:cut],
        0.9,
        *made[cut + 1 :],
    ]
    assert [m["step"] for m in lines(out / "metrics.jsonl")] == [
        0,
        1,
        1,
        2,
        2,
        3,
        3,
    ]  # an eval is a line of its own
    assert os.readlink(out / "best") == f"step_00000{best}" and (out / "best").is_dir()


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


def test_a_patch_adds_to_a_checkpoint(tmp_path, capsys):
    """Several at once: each part comes back under its own name, before the first step."""

    def run_with(checkpoint, parts):
        cfg = Config(
            model="m",
            out_dir=str(tmp_path / "out"),
            max_steps=2,
            resume="latest" if checkpoint else "",
        )
        run, model = harness.run.Run(cfg, CPU, checkpoint, time.monotonic()), tiny_model()
        for name in parts:
            run.checkpoint_parts[name] = (
                lambda name=name: parts[name],
                lambda value, name=name: parts.update({name: value}),
            )
        run.track(model, torch.optim.AdamW(model.parameters()), write_whole(model), 0)
        return run

    for step in (run := run_with(None, dict(adapters=[1], reference=torch.ones(2)))).steps():
        run.record(step, METRICS, [])
    run.exits.close()
    found = dict(adapters=None, reference=None)
    run_with(
        harness.checkpoints.load_checkpoint(str(tmp_path / "out" / "step_000002")), found
    ).exits.close()
    assert found["adapters"] == [1] and torch.equal(found["reference"], torch.ones(2))
    failing = harness.run.Run(
        Config(model="m", out_dir=str(tmp_path / "other")), CPU, None, time.monotonic()
    )
    model = tiny_model()
    failing.track(model, torch.optim.AdamW(model.parameters()), write_whole(model), 0)
    failing.checkpoint_parts["adapters"] = (lambda: 1 / 0, None)
    failing.save()  # a stop by a signal would wait for ever for what it raises
    failing.exits.close()
    assert "step 0: could not save (division by zero)" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="step_000002: it holds no other"):
        run_with(
            harness.checkpoints.load_checkpoint(str(tmp_path / "out" / "step_000002")),
            dict(other=None),
        )


def test_the_users_generation_config_is_kept_as_it_is(tmp_path):
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
    small_run(
        tmp_path / "out", model=str(model), max_steps=3, keep=1, resume="latest"
    )  # its source goes
    assert (tmp_path / "out" / "step_000003" / "generation_config.json").read_text() == mine
    # also where the sampler leaves the model's own in place, as vLLM does
    loaded = grpo.load_model(str(model), Config())
    tokenizer = harness.rows.load_tokenizer(BUNDLED)
    harness.checkpoints.model_writer(loaded, tokenizer, str(model))(str(tmp_path / "saved"))
    assert (tmp_path / "saved" / "generation_config.json").read_text() == mine
    os.remove(model / "generation_config.json")
    harness.checkpoints.model_writer(loaded, tokenizer, str(model))(str(tmp_path / "none"))
    assert not (tmp_path / "none" / "generation_config.json").exists()


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


def test_what_rewards_log_has_names_of_its_own_and_without_any_the_run_ends():
    def failures(step, *scores):
        return Scorer([]).failure_metrics(scores, step, 4)

    scores = [Scores([1.0] * 2, {}, [False] * 2, metrics=dict(step=n)) for n in (2.0, 4)]
    assert failures(1, *scores) == {"logged/step": 3.0, "failed_rewards": None}
    lost = Scores(
        [1.0], {}, [False], metrics=dict(step=None)
    )  # what was logged is no finite number
    assert [failures(2, lost, *more)["logged/step"] for more in ([], scores)] == [None, 3.0]
    none, failed = Scores([math.nan] * 2, {}, [False] * 2), Scores([0.0] * 2, {}, [True] * 2)
    with pytest.raises(TrainingError, match="every reward of the first step returned None"):
        failures(1, none, none)
    with pytest.raises(TrainingError, match="every reward of the first step failed"):
        failures(1, none, failed)
    assert failures(1, none, scores[0])["logged/step"] == 2 and failures(2, none, none) == dict(
        failed_rewards=None
    )


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
        patch.setattr(harness.log, "reporter", lambda cfg: 1 / 0)
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


def test_a_part_that_could_not_be_loaded_is_refused_before_the_first_step(tmp_path):
    """torch.save() takes a numpy array; torch.load(weights_only=True) does not."""
    model = tiny_model()
    run = harness.run.Run(Config(model="m", out_dir=str(tmp_path / "out")), CPU, None, 0.0)
    run.checkpoint_parts["draws"] = (lambda: np.zeros(2), None)
    with pytest.raises(ConfigError, match="the part draws holds more than tensors"):
        run.track(model, torch.optim.AdamW(model.parameters()), write_whole(model), 0)
    run.exits.close()


def test_room_for_two_checkpoints_is_asked_for_before_the_first_step(tmp_path, monkeypatch):
    model = tiny_model()
    size = 3 * sum(p.nbytes for p in model.parameters())
    for number, free in enumerate((2 * size - 1, 2 * size)):
        space = types.SimpleNamespace(free=free)
        monkeypatch.setattr(shutil, "disk_usage", lambda path, space=space: space)
        if free < 2 * size:
            with pytest.raises(ConfigError, match="GB are needed, .* GB are free"):
                tracked_run(tmp_path / str(number), model)
        else:
            tracked_run(tmp_path / str(number), model).exits.close()


@pytest.mark.parametrize("kind", ["qwen2", "mixtral", "gemma3"])
def test_a_trial_writes_a_small_part_of_the_model(kind, tmp_path):
    """Also of one whose experts are written in another form than they are computed in."""
    writer = harness.checkpoints.model_writer(
        tiny_model(kind), harness.rows.load_tokenizer(BUNDLED), BUNDLED.model
    )
    sizes = []
    for trial in (True, False):
        writer(str(tmp_path / str(trial)), trial=trial)
        sizes.append((tmp_path / str(trial) / "model.safetensors").stat().st_size)
    assert sizes[0] < sizes[1] / 10


def run_with_two_evals(out):
    """Keeps the better first step, the newest, and a link to the first."""
    run = tracked_run(out, eval_data="x", keep=1, save_every=1, max_steps=2)
    for step in run.steps():
        run.record(step, METRICS, [])
        run.record_eval(step, dict(eval_accuracy=-step, eval_stderr=0.0, eval_length=1.0))
    return run


def better_step(run):
    """One more step of a run, which becomes the best."""
    run.record(3, METRICS, [])
    run.record_eval(3, dict(eval_accuracy=0.5, eval_stderr=0.0, eval_length=1.0))
    run.save()


def test_in_a_copy_of_a_run_best_is_a_link_again(tmp_path, capsys):
    run = run_with_two_evals(tmp_path)
    os.remove(tmp_path / "best")
    shutil.copytree(tmp_path / "step_000001", tmp_path / "best")  # as `cp -rL` and zip leave it
    better_step(run)
    assert "could not" not in capsys.readouterr().out
    assert os.readlink(tmp_path / "best") == "step_000003"
    assert names_in(tmp_path) == ["step_000003"]


def test_a_directory_of_the_users_with_the_name_best_stays(tmp_path, capsys):
    run = run_with_two_evals(tmp_path)
    os.remove(tmp_path / "best")
    (tmp_path / "best").mkdir()
    (tmp_path / "best" / "notes.txt").write_text("mine")
    better_step(run)
    said = capsys.readouterr().out
    assert "could not save" not in said and "best to the checkpoint of step 3 (" in said
    assert (tmp_path / "best" / "notes.txt").read_text() == "mine"
    assert names_in(tmp_path) == ["step_000003"]


def test_a_file_system_without_links_costs_the_link_only(tmp_path, monkeypatch, capsys):
    def refused(*_):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "symlink", refused)
    better_step(run_with_two_evals(tmp_path))
    said = capsys.readouterr().out
    assert "could not save" not in said and "best to the checkpoint of step 3 (" in said
    assert names_in(tmp_path) == ["step_000003"]


def test_a_save_asks_no_device_that_the_run_does_not_use(tmp_path, monkeypatch, capsys):
    """On a Mac torch.cuda.stream(None) asks for torch.mps.current_device, which does not exist."""
    run = tracked_run(tmp_path, max_steps=2)
    run.record(1, METRICS, [])
    with monkeypatch.context() as mac:
        mac.setattr(torch.backends.mps, "is_available", lambda: True)
        run.save()
    assert names_in(tmp_path) == ["step_000001"]


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
