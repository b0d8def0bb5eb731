"""Checkpoints: what is saved, kept, found damaged, and tried before the first step."""

import json
import math
import os
import shutil
import time
import types

import numpy as np
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
from tests.common import (
    BUNDLED,
    CPU,
    config_of,
    fast_policy,
    lines,
    names_in,
    small_run,
    state_of,
    tiny_model,
)

pytest_plugins = "tests.common"

METRICS = dict(reward=0.0, tokens=1, skipped_steps=0)


def write_whole(model):
    """A writer as model_writer() returns it, without a tokenizer."""
    return lambda path, trial=False: model.save_pretrained(path)


def tracked_run(out, model=None, **options):
    """A Run as train() makes one, around a tiny model that nobody trains."""
    policy = fast_policy(model or tiny_model(), 1.0)
    cfg = Config(model="m", out_dir=str(out), **options)
    run = harness.run.Run(cfg, CPU, None, time.monotonic())
    optimizer = grpo.make_optimizer(policy, cfg)
    run.track(policy.model, optimizer, write_whole(policy.model), 0)
    return run


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
    config = config_of(out) | dict(resume=str(undisturbed / "step_000002"))  # it would cut the log
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
    """In every file of a checkpoint, near its end and in its middle."""
    out = tmp_path / "out"
    shutil.copytree(undisturbed, out)
    files = [path for path in (out / "step_000004").iterdir() if path.stat().st_size]
    assert len(files) >= 5
    for path in files:
        content = path.read_bytes()
        for position in (len(content) // 2, max(len(content) - 100, 0)):
            changed = bytearray(content)
            changed[position] ^= 1
            path.write_bytes(changed)
            with pytest.raises(Exception, match=f"{path.name} is damaged|zip|magic"):
                harness.checkpoints.load_checkpoint(str(path.parent))
        path.write_bytes(content)
    harness.checkpoints.load_checkpoint(str(out / "step_000004"))

    path = out / "step_000004" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    again(out, resume="latest")
    said = capsys.readouterr().out
    assert "model.safetensors is damaged" in said and "step_000003 at step 3" in said
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
            # negative, and still the best
            assert names_in(tmp_path) == ["step_000002", "step_000004", "step_000005"]
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
    # an eval is a line of its own
    assert [m["step"] for m in lines(out / "metrics.jsonl")] == [0, 1, 1, 2, 2, 3, 3]
    assert os.readlink(out / "best") == f"step_00000{best}" and (out / "best").is_dir()


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
    # its source goes
    small_run(tmp_path / "out", model=str(model), max_steps=3, keep=1, resume="latest")
    assert (tmp_path / "out" / "step_000003" / "generation_config.json").read_text() == mine
    # also where the sampler leaves the model's own in place, as vLLM does
    loaded = grpo.load_model(str(model), Config())
    tokenizer = harness.rows.load_tokenizer(BUNDLED)
    harness.checkpoints.model_writer(loaded, tokenizer, str(model))(str(tmp_path / "saved"))
    assert (tmp_path / "saved" / "generation_config.json").read_text() == mine
    os.remove(model / "generation_config.json")
    harness.checkpoints.model_writer(loaded, tokenizer, str(model))(str(tmp_path / "none"))
    assert not (tmp_path / "none" / "generation_config.json").exists()


def test_weights_that_do_not_load_are_named_by_their_flag(tmp_path):
    empty, partial = tmp_path / "empty", tmp_path / "partial"
    empty.mkdir()
    model = tiny_model()
    weights = model.state_dict()
    del weights["model.norm.weight"]
    model.save_pretrained(partial, state_dict=weights)
    for path, why in ((empty, ""), (partial, "its files have no weights for model.norm.weight")):
        with pytest.raises(ConfigError, match=f"^--model {path}: {why}"):
            grpo.load_model(str(path), Config(model=str(path)))
        with pytest.raises(ConfigError, match=f"^--resume {path}: {why}"):
            grpo.load_model(str(path), Config(model="m", resume="latest"))


def test_a_part_that_could_not_be_loaded_is_refused_before_the_first_step(tmp_path):
    """torch.save() takes a numpy array; torch.load(weights_only=True) does not."""
    model = tiny_model()
    run = harness.run.Run(Config(model="m", out_dir=str(tmp_path / "out")), CPU, None, 0.0)
    run.checkpoint_parts["draws"] = (lambda: np.zeros(2), None)
    with pytest.raises(ConfigError, match="the part draws holds more than tensors"):
        run.track(model, torch.optim.AdamW(model.parameters()), write_whole(model), 0)
    run.exits.close()


def test_the_trial_leaves_the_optimizer_alone(tmp_path):
    """Before the first step torch's get_optimizer_state_dict takes one, to have a state to save."""
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    model = tiny_model()
    optimizer = torch.optim.AdamW(model.parameters())
    run = harness.run.Run(Config(model="m", out_dir=str(tmp_path / "out")), CPU, None, 0.0)
    run.checkpoint_parts["optimizer"] = (
        lambda: get_optimizer_state_dict(model, optimizer),
        optimizer.load_state_dict,
    )
    run.track(model, optimizer, write_whole(model), 0)
    assert not optimizer.state
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
