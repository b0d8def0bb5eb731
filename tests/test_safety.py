"""No work is lost, by the real thing: a full disk, a launcher that kills, files that were cut off,
a file system without locks."""

import concurrent.futures
import ctypes
import errno
import os
import resource
import signal
import struct
import subprocess
import sys
import time
import types
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch

import grpo
from extras import runs
from extras.errors import TrainingError
from tests.common import (
    CPU,
    HERE,
    begun_run,
    checkpoints,
    command,
    flags_of,
    lines,
    metrics_of,
    random_samples,
    small_config,
    small_run,
)


def files_of(folder):
    return {str(p): p.read_bytes() for p in Path(folder).rglob("*") if p.is_file()}


def steps_of(folder):
    return [int(path[-6:]) for path in checkpoints(folder)]


def cut(path):
    """As a crash of the machine leaves a file."""
    path.write_bytes(path.read_bytes()[:1000])


# ------------------------------------------------------------------------------------------------
# Checkpoints that cannot be read


def test_a_resume_without_a_readable_checkpoint_changes_nothing(tmp_path, capfd):
    out = tmp_path / "run"
    begun_run(out, 2)
    for step in (1, 2):
        cut(out / f"step_00000{step}" / "trainer_state.pt")
    before = files_of(out)
    capfd.readouterr()
    assert grpo.main(["--resume", "--out_dir", str(out), "--max_steps", "3"]) == 2
    assert capfd.readouterr().err.count("\n") == 1
    assert files_of(out) == before


def test_checkpoints_that_cannot_be_read_do_not_count_for_keep(tmp_path):
    out = tmp_path / "run"
    begun_run(out, 4)
    for step in (3, 4):
        cut(out / f"step_00000{step}" / "trainer_state.pt")
    small_run(out, max_steps=3, keep=2, resume=True)
    assert steps_of(out) == [2, 3, 4]  # 3 was made again; 4 is what it was
    assert torch.load(out / "step_000003" / "trainer_state.pt")["step"] == 3


def test_state_that_could_not_be_loaded_is_refused_when_it_is_saved(tmp_path, monkeypatch):
    def remember(samples, cfg, state):
        state["first"] = samples[0]

    monkeypatch.setattr(grpo, "assign_advantages", remember)
    with pytest.raises(TrainingError, match="Sample"):
        small_run(tmp_path / "run", max_steps=1)


def test_half_a_line_of_the_checkpoints_own_step_is_cut_off(tmp_path):
    out = tmp_path / "run"
    begun_run(out, 2)
    for log in (out / "metrics.jsonl", out / "completions.jsonl"):
        log.write_bytes(log.read_bytes()[:-20])
    small_run(out, max_steps=3, resume=True)
    assert [m["step"] for m in lines(out / "metrics.jsonl")] == [1, 2, 3]  # 2: of the checkpoint
    assert {row["step"] for row in lines(out / "completions.jsonl")} == {1, 2, 3}


def test_a_signal_in_an_update_saves_the_state_of_the_last_whole_step(tmp_path, monkeypatch):
    assign = grpo.assign_advantages

    def remember(samples, cfg, state):
        assign(samples, cfg)
        state["calls"] = state.get("calls", 0) + 1
        if state["calls"] == 3:
            os.kill(os.getpid(), signal.SIGTERM)
            assert steps_of(tmp_path / "run") == [2]  # at once; the run ends after the step

    monkeypatch.setattr(grpo, "assign_advantages", remember)
    small_run(tmp_path / "run", save_every=0)
    for step in (2, 3):
        state = torch.load(tmp_path / "run" / f"step_00000{step}" / "trainer_state.pt")
        assert (state["step"], state["state"]) == (step, dict(calls=step))


def test_a_signal_in_a_save_lets_it_end(tmp_path, monkeypatch):
    """And what an earlier save that was killed has left is no part of it."""
    out = tmp_path / "run"
    begun_run(out, 1)
    (out / ".partial").mkdir()
    (out / ".partial" / "half").touch()
    save = grpo.save_model

    def stop(model, tokenizer, folder):
        os.kill(os.getpid(), signal.SIGTERM)
        save(model, tokenizer, folder)

    monkeypatch.setattr(grpo, "save_model", stop)
    small_run(out, resume=True)
    assert steps_of(out) == [1, 2]
    files = {path.name for path in (out / "step_000002").iterdir()}
    assert files == {path.name for path in (out / "step_000001").iterdir()}
    assert torch.load(out / "step_000002" / "trainer_state.pt")["step"] == 2


FORKS = """
import os, signal, time

def forks(completion, row):
    ends = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(ends[1], b"ready")
        time.sleep(60)
        os._exit(0)
    os.read(ends[0], 5)
    os.kill(child, signal.SIGTERM)
    return float(os.WTERMSIG(os.waitpid(child, 0)[1]))
"""


def test_a_signal_to_a_fork_of_a_reward_ends_the_fork_only(tmp_path):
    (tmp_path / "forks.py").write_text(FORKS)
    reward = f"{tmp_path / 'forks.py'}:forks"
    options = dict(num_prompts=1, num_generations=2, max_steps=2, save_every=0)
    history = small_run(tmp_path / "run", reward=reward, **options)
    assert [m["reward"] for m in history] == [signal.SIGTERM] * 2
    assert steps_of(tmp_path / "run") == [2]


# ------------------------------------------------------------------------------------------------
# A full disk


@pytest.fixture
def disk(tmp_path):
    """A tmpfs of 3 MB, too small for two checkpoints."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(disk)]
    if subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("mounting a tmpfs is not allowed here")
    yield disk
    subprocess.run(["umount", "-R", str(disk)], check=True)


def acting_reward(tmp_path, **actions):
    """The name of a reward that does this in the first call of a step (of 15)."""
    acts = {15 * int(step[-1]) - 14: action for step, action in actions.items()}
    (tmp_path / "acting.py").write_text(f"""
import subprocess
calls = 0
def acting(completion, row):
    global calls
    calls += 1
    if calls in {acts!r}:
        subprocess.run({acts!r}[calls], shell=True, check=True)
    return float(len(completion))
""")
    return f"{tmp_path}/acting.py:acting"


def test_a_full_disk_costs_no_step_and_the_next_save_is_tried_when_it_is_due(disk, tmp_path, capfd):
    out = disk / "run"
    rows = small_config(tmp_path / "x").train_data
    cfg = small_config(out, train_data=rows, save_every=2, keep=1)
    assert grpo.main(flags_of(cfg)) == 2  # two checkpoints will not fit
    assert "room" in capfd.readouterr().err and not out.exists()
    subprocess.run(["mount", "-o", "remount,size=30m", disk], check=True)
    # In step 2 the disk is full, and the log of metrics, too: /dev/full is a disk without room.
    full = f"cat /dev/zero > {disk}/filler; cd {out}; mv metrics.jsonl m; "
    full += "ln -s /dev/full metrics.jsonl"
    room = f"rm {disk}/filler; cd {out}; mv m metrics.jsonl"
    reward = acting_reward(tmp_path, step2=full, step3=room)
    small_run(out, train_data=rows, save_every=2, keep=1, reward=reward)
    said = capfd.readouterr().out
    assert "step 2 is not saved" in said and "step 3 is not saved" not in said
    assert steps_of(out) == [4]  # 3 was not due
    assert [m["step"] for m in metrics_of(out)] == [1, 2, 3, 4]
    assert [row["step"] for row in lines(out / "completions.jsonl")] == np.repeat(
        [1, 2, 3, 4], 15
    ).tolist()


def test_an_old_checkpoint_that_cannot_be_removed_is_no_failed_save(disk, tmp_path, capfd):
    """Something is mounted in it."""
    subprocess.run(["mount", "-o", "remount,size=30m", disk], check=True)
    inside = disk / "run" / "step_000001" / "inside"
    mount = f"mkdir {inside}; mount -t tmpfs tmpfs {inside}"
    reward, rows = acting_reward(tmp_path, step2=mount), small_config(tmp_path / "x").train_data
    small_run(disk / "run", train_data=rows, keep=1, max_steps=3, reward=reward)
    said = capfd.readouterr().out
    assert "step_000001 cannot be removed" in said and "is not saved" not in said
    assert steps_of(disk / "run") == [1, 3]


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, RuntimeError])
def test_a_pass_out_of_memory_is_forgotten_before_the_last_step_is_saved(
    error, tmp_path, capfd, monkeypatch
):
    """RuntimeError: of a vLLM that cannot wake."""
    out, update, save = tmp_path / "run", grpo.update, grpo.save_model
    passes, held = [], []

    def fails(*args):
        if len(passes) == 2:
            activations = torch.ones(100)
            held.append(weakref.ref(activations))
            raise error("CUDA Error: out of memory")
        passes.append(1)
        return update(*args)

    def saves(*args):
        assert held[0]() is None
        save(*args)

    monkeypatch.setattr(grpo, "update", fails)
    monkeypatch.setattr(grpo, "save_model", saves)
    assert grpo.main(flags_of(small_config(out, save_every=0))) == 1
    said = capfd.readouterr().err
    assert said.count("\n") == 1 and "--vllm_gpu_memory_utilization" in said
    assert steps_of(out) == [2]


def test_a_log_line_that_does_not_fit_comes_later_or_is_left_out_whole(tmp_path, capfd):
    """No file may grow over 16 kB: neither a checkpoint nor, after some steps, a log. (config.json
    has the name of each module that the tests have loaded.)"""
    out = tmp_path / "run"
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (16_000, before[1]))
    try:
        with pytest.raises(TrainingError):  # its end is in no checkpoint
            small_run(out, max_steps=40, log_completions=2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "is not logged" in capfd.readouterr().out and steps_of(out) == []
    logged = [m["step"] for m in lines(out / "metrics.jsonl")]
    assert 0 < len(logged) < 40 and logged == [*range(1, 1 + len(logged))]
    assert lines(out / "completions.jsonl")  # no half line


# ------------------------------------------------------------------------------------------------
# Signals


SLOW = """
import os, time
calls = 0
def slow(completion, row):
    global calls
    calls += 1
    if calls > 24 and os.environ.get("RANK", "none") in {ranks!r}:
        time.sleep({seconds})
    return float(len(completion) % 3)
"""


# torchrun starts this as a rank. Each fork is a run of its own, with what torchrun has, a store.
TWELVE_RUNS = """
import os, signal, sys
sys.path.insert(0, {here!r})
import torch
import grpo
from extras import fast, flags, rows, runs, screen
from tools import view
view.draw = str
forks = []
for number in range({n}):
    forks.append(os.fork())
    if forks[-1] == 0:
        store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(store.port))
        flags = [flag.replace({out!r}, {out!r} + str(number)) for flag in sys.argv[1:]]
        os._exit(grpo.main(flags))
signal.signal(signal.SIGTERM, lambda *_: None)
with open({out!r} + ".forks", "w") as file:
    print(*forks, file=file, flush=True)
    print(*[os.waitpid(fork, 0)[1] for fork in forks], file=file)
"""


MORE = dict(num_generations=4, save_every=0, call_timeout=60.0)


def start_torchrun(tmp_path, seconds, ranks, script=f"{HERE}/grpo.py", outs=("run",), n_ranks=1):
    """From step 3 on, each reward takes so many seconds on these ranks. Returns the launcher once
    all runs have logged step 2."""
    (tmp_path / "slow.py").write_text(SLOW.format(ranks=ranks, seconds=seconds))
    options = dict(num_prompts=3 * n_ranks, reward=f"{tmp_path / 'slow.py'}:slow", max_steps=50)
    launch = [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={n_ranks}"]
    launch += ["--standalone", f"--shutdown_timeout={10 * len(outs)}"]
    launch += [script, *flags_of(small_config(tmp_path / "run", **options | MORE))]
    log = (tmp_path / "log").open("w+")
    process = subprocess.Popen(launch, stdout=log, stderr=log)
    deadline = time.monotonic() + 120
    for out in outs:
        path = tmp_path / out / "metrics.jsonl"
        while not path.exists() or path.read_text().count("\n") < 2:
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
    time.sleep(0.3)
    return process


@pytest.mark.slow
def test_a_launcher_that_kills_in_a_long_rollout_loses_no_step(tmp_path):
    """torchrun waits for 30 s, here 10, and kills. In a step of 50 s the last one is saved at the
    signal."""
    process = start_torchrun(tmp_path, 5, "0")
    process.send_signal(signal.SIGINT)
    process.wait(90)
    assert steps_of(tmp_path / "run") == [2]


@pytest.mark.slow
def test_two_ranks_are_one_process_and_a_rank_that_waits_for_another_saves_too(tmp_path):
    """As a user starts two ranks."""
    process = start_torchrun(tmp_path, 10, "1", n_ranks=2)
    process.send_signal(signal.SIGTERM)
    process.wait(90)
    assert steps_of(tmp_path / "run") == [2]
    options = dict(num_prompts=6, reward=f"{tmp_path / 'slow.py'}:slow", max_steps=2)
    small_run(tmp_path / "one", **options | MORE)
    for a, b in zip(metrics_of(tmp_path / "one"), metrics_of(tmp_path / "run"), strict=True):
        assert a == pytest.approx(b, rel=1e-4, abs=1e-6)


@pytest.mark.slow
def test_a_signal_to_launcher_and_ranks_is_one_request(tmp_path):
    """As scancel and a preemption send it. Twelve runs, each somewhere in a step, get their own
    signal, and the launcher's 0.02 to 0.24 s later."""
    outs = [f"run{number}" for number in range(12)]
    script = tmp_path / "forks.py"
    script.write_text(TWELVE_RUNS.format(here=HERE, n=len(outs), out=str(tmp_path / "run")))
    process = start_torchrun(tmp_path, 0.1, "0", script, outs)
    for pid in (tmp_path / "run.forks").read_text().split():
        os.kill(int(pid), signal.SIGTERM)
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    process.wait(150)
    codes = (tmp_path / "run.forks").read_text().splitlines()[1]
    assert codes.split() == ["0"] * len(outs)
    for out in outs:
        assert steps_of(tmp_path / out)[-1] == len(metrics_of(tmp_path / out)) >= 2


@pytest.mark.slow
def test_a_closed_terminal_saves_and_nohup_ignores_it(tmp_path):
    (tmp_path / "slow.py").write_text(SLOW.format(ranks="0", seconds=0.05))
    for prefix, code in (([], 0), (["nohup"], -signal.SIGKILL)):
        out = tmp_path / f"run{len(prefix)}"
        flags = flags_of(small_config(out, save_every=0, max_steps=99))
        process = subprocess.Popen(
            [*prefix, *command(*flags)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        while not (out / "metrics.jsonl").exists() or len(metrics_of(out)) < 2:
            time.sleep(0.05)
        process.send_signal(signal.SIGHUP)
        if prefix:
            time.sleep(3)
            assert process.poll() is None
            process.kill()
        assert process.wait(60) == code
        assert bool(steps_of(out)) != bool(prefix)


# ------------------------------------------------------------------------------------------------
# A file system without locks


def without_flock():
    """From here on the kernel answers ENOSYS to flock, as it does for Lustre without -o flock."""
    number = dict(x86_64=73, aarch64=32)[os.uname().machine]
    program = [(0x20, 0, 0, 0), (0x15, 0, 1, number), (0x06, 0, 0, 0x50000 | errno.ENOSYS)]
    program.append((0x06, 0, 0, 0x7FFF0000))  # all other calls are allowed
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in program))
    filters = struct.pack("HxxxxxxP", len(program), ctypes.addressof(code))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(38, 1, 0, 0, 0) == 0 and libc.prctl(22, 2, filters, 0, 0) == 0


def test_a_file_system_without_locks_is_no_other_run(tmp_path, capsys):
    def lock():
        without_flock()  # in this thread only
        with open(tmp_path / "log", "a") as log:
            runs.lock(log)

    with concurrent.futures.ThreadPoolExecutor() as pool:
        pool.submit(lock).result()
    assert "cannot be locked" in capsys.readouterr().out


def test_a_refused_run_leaves_nothing_in_the_other_ones_directory(tmp_path):
    out = tmp_path / "run"
    begun_run(out, 1)
    before = files_of(out)
    for more in ([], ["--resume"]):
        with open(out / ".lock") as log:
            runs.fcntl.flock(log, runs.fcntl.LOCK_EX)
            assert grpo.main([*flags_of(small_config(out, max_steps=2)), *more]) == 2
        assert files_of(out) == before


def test_a_run_that_does_not_begin_touches_no_dashboard(tmp_path, monkeypatch, capsys):
    """Refused beside another run, or stopped while it waits for its dashboard."""
    out = tmp_path / "run"
    called = []

    def stop(**options):
        raise KeyboardInterrupt

    fake = types.SimpleNamespace(init=stop, finish=called.append, log=lambda *_: None)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    flags = flags_of(small_config(out, max_steps=0, report_to="wandb"))
    for more in ([], ["--resume"]):
        with pytest.raises(KeyboardInterrupt):
            grpo.main([*flags, *more])
        assert not called and not any(files_of(out).values())
    fake.init = lambda **options: called.append(options)
    fake.define_metric = lambda *names, step_metric: None
    fake.finish = lambda **options: called.append(options)
    assert grpo.main([*flags, "--resume"]) == 0
    called.clear()
    with open(out / ".lock") as log:
        runs.fcntl.flock(log, runs.fcntl.LOCK_EX)
        assert grpo.main([*flags, "--resume"]) == 2
    assert not called and "another run" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------
# Errors that were not said


def test_a_reward_that_is_none_for_every_sample_ends_the_run(tmp_path, capfd):
    (tmp_path / "forgot.py").write_text("def forgot(completion, row):\n    len(completion)\n")
    cfg = small_config(tmp_path / "run", reward=f"{tmp_path}/forgot.py:forgot")
    assert grpo.main(flags_of(cfg)) == 1
    error = capfd.readouterr().err
    assert error.count("\n") == 1 and "reward" in error


def test_weights_that_do_not_load_cost_no_line(tmp_path, monkeypatch):
    loads = []

    def load_weights(self, model):
        loads.append(1)
        if len(loads) == 4:  # after step 3
            raise RuntimeError("no")

    monkeypatch.setattr(grpo.HFSampler, "load_weights", load_weights)
    with pytest.raises(RuntimeError):
        small_run(tmp_path / "run", save_every=0)
    assert [m["step"] for m in metrics_of(tmp_path / "run")] == [1, 2, 3]
    assert steps_of(tmp_path / "run") == [3]


def test_a_batch_in_which_some_samples_lack_log_probabilities_is_an_error():
    for missing in (0, 3):
        samples = random_samples(4, 2)
        samples[missing].ref_logps = None
        with pytest.raises(TypeError):
            grpo.collate(samples, CPU)
    for s in samples:
        s.ref_logps = np.zeros(len(s.completion_ids))
    batch = grpo.collate(samples, CPU)
    assert "ref_logps" in batch and "old_logps" not in batch
