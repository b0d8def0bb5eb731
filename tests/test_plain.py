"""grpo.py and reward.py alone: the plain forms train, evaluate, save and resume on a clear day, and
their numbers are those of the extras."""

import dataclasses
import importlib.util
import os
import sys

import pytest
import torch

from tests.common import (
    HERE,
    checkpoints,
    lines,
    on_ranks,
    small_config,
    small_rows,
    small_run,
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


def without_times(metrics):
    return [
        {k: v for k, v in m.items() if "time" not in k and k != "tokens_per_s"} for m in metrics
    ]


@pytest.mark.parametrize("options", [{}, dict(beta=0.1, loss_reduction="sequence")])
def test_a_run_is_that_with_extras_and_resumes_to_the_bit(options, tmp_path):
    options |= dict(eval_data=small_rows(tmp_path), eval_every=2)
    whole = without_times(plain_run(tmp_path / "whole", **options))
    plain_run(tmp_path / "parts", max_steps=2, **options)
    parts = without_times(plain_run(tmp_path / "parts", resume=True, **options))
    # A run of two steps ends with an eval, and so does each of four: these are the same.
    assert parts == whole == without_times(lines(tmp_path / "parts" / "metrics.jsonl"))
    newest = [checkpoints(tmp_path / name)[-1] for name in ("whole", "parts")]
    assert os.path.basename(newest[0]) == "step_000004"
    assert torch.equal(*map(weights_of, newest))
    for ours, theirs in zip(
        whole, without_times(small_run(tmp_path / "x", **options)), strict=True
    ):
        for name in ours:
            assert ours[name] == pytest.approx(theirs[name], rel=1e-3, abs=1e-5), name


def train_plain(out_dir):
    """Runs on every rank."""
    plain_run(out_dir, max_steps=3)


def test_two_ranks_are_one_run(tmp_path):
    done = on_ranks(2, "tests.test_plain.train_plain", tmp_path / "two")
    assert done.returncode == 0, done.stderr[-3000:]
    one = without_times(plain_run(tmp_path / "one", max_steps=3))
    for a, b in zip(one, without_times(lines(tmp_path / "two" / "metrics.jsonl")), strict=True):
        assert a == pytest.approx(b, rel=1e-4, abs=1e-6)


def test_mistakes_of_flags_are_argparses(tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        plain_module().main(["--lr", "1"])
    assert "unrecognized" in capsys.readouterr().err


def test_a_directory_is_not_written_twice(tmp_path):
    plain_run(tmp_path / "run", max_steps=1)
    with pytest.raises(FileExistsError):
        plain_run(tmp_path / "run", max_steps=1)
