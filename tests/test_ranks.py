"""Ranks as processes, also those of two torchruns: they compare what they have, wait for each
other, and end together. What is gone is killed or frozen here, and a killed run goes on."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import grpo
from extras import errors, ranks
from tests.common import (
    HERE,
    flags_of,
    free_port,
    lines,
    metrics_of,
    on_ranks,
    small_config,
    small_rows,
    small_run,
    train,
)

AS_REWARD = "def mine(completion, row):\n    return len(completion) / {}\n"


def differ(what, out):
    """Runs on every rank; rank 1 has another `what`."""
    out = Path(out)
    cfg = small_config(out, max_steps=1)
    folder = out.parent / str(grpo.RANK)
    folder.mkdir()
    if what == "rewards.py":
        (folder / what).write_text(AS_REWARD.format(1 + grpo.RANK))
        cfg.reward = f"{folder}/{what}:mine"
    if grpo.RANK == 1 and what == "--beta":
        cfg.beta = 0.5
    if grpo.RANK == 1 and what == "rows":
        cfg.train_data = f"{folder}/rows.jsonl"
        rows = lines(small_rows(out.parent))[:4]
        Path(cfg.train_data).write_text("".join(json.dumps(row) + "\n" for row in rows))
    if what == "checkpoints":
        cfg = grpo.replace(cfg, resume=True, out_dir=str(folder))
        (folder / f"step_00000{grpo.RANK}").mkdir()
    if grpo.RANK == 1 and what == "weights":
        honest = grpo.load_model

        def other(*args):
            model = honest(*args)
            next(model.parameters()).data += 1
            return model

        grpo.load_model = other
    train(cfg)


@pytest.mark.parametrize("what", ["--beta", "rows", "rewards.py", "weights", "checkpoints"])
def test_ranks_that_differ_are_refused_in_one_line(what, tmp_path):
    done = on_ranks(2, "tests.test_ranks.differ", what, tmp_path / "run")
    assert done.returncode == 2
    # torch may log that the store is gone, if the other rank is still at it.
    [line] = [line for line in done.stderr.splitlines() if line.startswith("grpo.py: ")]
    assert what in line.partition(" (")[0] and f"rank 1, on {os.uname().nodename}" in line
    assert not (tmp_path / "run").exists()


def wait(out):
    """Runs on every rank; rank 1 takes its time before step 1."""
    ranks.PATIENCE = 0.5
    honest = grpo.score

    def slow(samples, run):
        time.sleep(2.0 * (grpo.RANK == 1))
        honest(samples, run)

    grpo.score = slow
    train(small_config(out, max_steps=1))


def test_rank_0_says_for_which_ranks_it_waits(tmp_path):
    """It waits longer than for one that shows no sign of life."""
    done = on_ranks(2, "tests.test_ranks.wait", tmp_path / "run")
    assert done.returncode == 0, done.stderr[-3000:]
    assert "ranks [1]" in done.stdout


def fail(out):
    """Runs on every rank; rank 1 has a mistake in its copy, and rank 0 waits in an update."""
    errors.cleanup.callback(print, "closes")

    def update(*args):
        if grpo.RANK == 1:
            raise KeyError("no such thing")
        time.sleep(600)

    grpo.update = update
    ranks.GRACE = 0.5
    train(small_config(out, max_steps=1))


def test_a_rank_that_fails_says_so_closes_nothing_and_ends_the_others(tmp_path):
    done = on_ranks(2, "tests.test_ranks.fail", tmp_path / "run")
    assert done.returncode != 0 and "closes" not in done.stdout
    [line] = [line for line in done.stderr.splitlines() if ": error: " in line]
    assert f"rank 1, on {os.uname().nodename}: KeyError: 'no such thing'" in line
    assert done.stderr.count("Traceback") == 1 and "tests/test_ranks.py" in done.stderr


@pytest.mark.parametrize("launcher", ["srun", "mpirun", "accelerate"])
def test_processes_that_would_be_a_run_each_are_refused(launcher, tmp_path, monkeypatch, capfd):
    accelerate = dict(ACCELERATE_USE_CPU="True", MASTER_PORT="29500")
    slurm, mpi = dict(SLURM_STEP_NUM_TASKS="2"), dict(OMPI_COMM_WORLD_SIZE="2")
    for name, value in dict(srun=slurm, mpirun=mpi, accelerate=accelerate)[launcher].items():
        monkeypatch.setenv(name, value)
    flags = flags_of(small_config(tmp_path / "run", max_steps=0))
    assert grpo.main(flags) == 2
    said = capfd.readouterr().err
    assert launcher in said and "torchrun --nnodes" in said and not (tmp_path / "run").exists()
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert grpo.main(flags) == 0


# ------------------------------------------------------------------------------------------------
# torchrun, once and twice

# The script of each rank. Its first start pauses at the first of PLACES, to be killed or frozen
# there in step 2; its next start, if there is one, at the next.
PAUSES = """
import functools, os, sys, time
sys.path.insert(0, {here!r})
import grpo
from extras import ranks
ranks.PATIENCE, ranks.GRACE = 3.0, 1.0
for (function, rank, call), pid in {places!r}:
    if not os.path.exists(pid):
        break
calls = []
honest = getattr(grpo, function)

@functools.wraps(honest)
def pauses(*args, **kwargs):
    calls.append(1)
    if grpo.RANK == rank and len(calls) == call and not os.path.exists(pid):
        with open(pid + ".partial", "w") as file:
            file.write(str(os.getpid()))
        os.rename(pid + ".partial", pid)
        time.sleep(600)
    return honest(*args, **kwargs)

setattr(grpo, function, pauses)
sys.exit(grpo.main())
"""


def start_two(folder, places, *options, **more):
    """Two torchruns of a process each. places: (function, rank, which call) of each start."""
    script = folder / "script.py"
    with_pids = [(place, f"{folder}/pid{number}") for number, place in enumerate(places)]
    script.write_text(PAUSES.format(here=HERE, places=with_pids))
    launch = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", *options]
    launch += ["--rdzv_backend", "c10d", "--rdzv_endpoint", f"localhost:{free_port()}"]
    launch += [script, *flags_of(small_config(folder / "run", **more))]
    processes = []
    for node in range(2):
        said = open(folder / f"node{node}", "w")
        processes.append(subprocess.Popen(launch, stdout=said, stderr=said, cwd=folder))
    return processes


def paused(folder, number, processes):
    """The pid of the process that pauses at this place, once it does."""
    pid = folder / f"pid{number}"
    deadline = time.monotonic() + 100
    while not pid.exists():
        assert time.monotonic() < deadline and processes[0].poll() is None, said_by(folder)
        time.sleep(0.1)
    return int(pid.read_text())


def said_by(folder):
    return "".join((folder / f"node{node}").read_text() for node in range(2))


@pytest.mark.slow
def test_torchrun_starts_a_run_again_after_kill_9_and_it_goes_on(tmp_path):
    """In a rollout, then in an update, then in a save: by the same command, without --resume."""
    places = [("score", 1, 2), ("accumulate_gradient", 1, 2), ("save_model", 0, 1)]
    processes = start_two(tmp_path, places, "--max-restarts", "3", max_steps=3)
    for number in range(len(places)):
        os.kill(paused(tmp_path, number, processes), signal.SIGKILL)
    assert [process.wait(100) for process in processes] == [0, 0], said_by(tmp_path)
    assert said_by(tmp_path).count("begins at step 1 of 3") == len(places)
    small_run(tmp_path / "one", max_steps=3)
    for a, b in zip(metrics_of(tmp_path / "one"), metrics_of(tmp_path / "run"), strict=True):
        assert a == pytest.approx(b, rel=1e-4, abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("function, call", [("score", 2), ("accumulate_gradient", 4)])
def test_a_frozen_rank_is_named_and_a_rollout_does_not_wait_for_it(function, call, tmp_path):
    processes = start_two(tmp_path, [(function, 1, call)], max_steps=3)
    pid = paused(tmp_path, 0, processes)
    os.kill(pid, signal.SIGSTOP)
    try:
        deadline = time.monotonic() + 20
        while "no sign of life from rank 1, on " not in said_by(tmp_path):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        while function == "score" and not any(process.poll() == 1 for process in processes):
            assert time.monotonic() < deadline + 30
            time.sleep(0.1)
    finally:
        os.kill(pid, signal.SIGKILL)
        for process in processes:  # the other's torchrun learns of nothing
            process.terminate()
            process.wait(60)
