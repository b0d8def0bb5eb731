"""grpo.py and reward.py alone: the plain forms train, evaluate, save and resume on a clear day, and
their numbers are those of the extras."""

import dataclasses
import importlib.util
import os
import subprocess
import sys

import pytest
import torch

import grpo
from tests.common import (
    GAP,
    HERE,
    checkpoints,
    flags_of,
    metrics_of,
    on_ranks,
    page_with,
    run_page,
    small_config,
    small_rows,
    weights_of,
)


def plain_module():
    """grpo.py once more, as it is where nobody has copied extras/."""
    spec = importlib.util.spec_from_file_location("plain_grpo", f"{HERE}/grpo.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look for it there
    spec.loader.exec_module(module)
    module.USE_EXTRAS = False
    return module


def plain_run(out_dir, **options):
    plain = plain_module()
    cfg = dataclasses.asdict(small_config(out_dir, **options))
    return plain.train(plain.Config(**cfg))


def train_plain(out_dir):
    """Runs on every rank."""
    plain_run(out_dir, max_steps=3)


def test_two_ranks_are_one_run(tmp_path):
    done = on_ranks(2, "tests.test_plain.train_plain", tmp_path / "two")
    assert done.returncode == 0, done.stderr[-3000:]
    plain_run(tmp_path / "one", max_steps=3)
    for a, b in zip(*(metrics_of(tmp_path / name) for name in ("one", "two")), strict=True):
        assert a == pytest.approx(b, rel=1e-4, abs=1e-6)


# -- As scripts: grpo.py and reward.py in a folder of their own


def test_the_two_files_alone_and_with_extras_go_on_with_each_others_runs(tmp_path):
    alone, page = page_with(tmp_path / "alone", alone=True), page_with(tmp_path / "page")
    assert sorted(os.listdir(alone)) == ["grpo.py", "reward.py"]
    options = dict(eval_data=small_rows(tmp_path), eval_every=1, beta=0.1)
    options |= dict(loss_reduction="sequence", num_epochs=2)
    said = run_page(alone, out="../whole", max_steps=3, **options)
    assert "extras/ is not used" in said and not (tmp_path / "whole" / "curves.png").exists()
    for steps, folder, flags in ((1, alone, []), (2, page, []), (3, page, ["--plain"])):
        said = run_page(folder, *flags, out="../run", max_steps=steps, resume=steps > 1, **options)
        assert ("extras/ is not used" in said) == (steps != 2)
    for ours, theirs in zip(*(metrics_of(tmp_path / x) for x in ("run", "whole")), strict=True):
        assert {name: ours[name] for name in theirs} == theirs
    newest = [checkpoints(tmp_path / name)[-1] for name in ("run", "whole")]
    assert torch.equal(*map(weights_of, newest))  # by from_pretrained
    said = run_page(page, "--plain=true", out="other", code=2)
    assert "--plain is for the command line" in said


STOPS = """
import os, signal

def stops(completion, row):
    if row["trainer_state"]["global_step"] == 1 and os.path.exists("stop"):
        os.remove("stop")
        os.kill(os.getpid(), signal.SIGTERM)
    return -len(completion)
"""


def test_a_signal_ends_the_run_after_the_step_and_it_goes_on_to_the_bit(tmp_path):
    page = page_with(tmp_path / "page", alone=True)
    (page / "mine.py").write_text(STOPS)
    options = dict(max_steps=3, save_every=0, reward="mine.py:stops")
    run_page(page, out="whole", **options)
    (page / "stop").touch()
    run_page(page, **options)
    assert [path[-6:] for path in checkpoints(page / "run")] == ["000002"]
    run_page(page, resume=True, **options)
    assert metrics_of(page / "run") == metrics_of(page / "whole")
    newest = [checkpoints(page / name)[-1] for name in ("run", "whole")]
    assert torch.equal(*map(weights_of, newest))


@pytest.mark.slow
def test_vllm(tmp_path):
    """Its log-probabilities are those of the policy, after a step, too."""
    pytest.importorskip("vllm")
    page = page_with(tmp_path / "page", alone=True)
    cfg = small_config(page / "run", rollout="vllm", max_steps=2)
    command = [sys.executable, "grpo.py", *flags_of(cfg)]
    done = subprocess.run(command, cwd=page, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    assert all(m[GAP] < 1e-4 for m in metrics_of(page / "run"))


def test_flags_that_only_extras_serve_are_refused(tmp_path):
    for name in grpo.ONLY_WITH_EXTRAS.keys() - {"fast"}:  # this file has no fast form to leave out
        default = getattr(grpo.Config, name)
        other = not default if isinstance(default, bool) else type(default)(2)
        with pytest.raises(ValueError, match=f"--{name} needs extras/"):
            plain_run(tmp_path / "run", **{name: other})
    assert not (tmp_path / "run").exists()


def test_mistakes_of_flags_are_argparses(tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        plain_module().main(["--lr", "1"])
    assert "unrecognized" in capsys.readouterr().err


def test_a_directory_is_not_written_twice(tmp_path):
    plain_run(tmp_path / "run", max_steps=1)
    with pytest.raises(FileExistsError):
        plain_run(tmp_path / "run", max_steps=1)
