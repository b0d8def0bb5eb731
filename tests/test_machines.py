"""Anybody's machine and anybody's process: what a run must not depend on without a word."""

import contextlib
import json
import os
import platform
import pty
import shutil
import subprocess
import sys
import termios
import time
import types

import pytest
import torch

import grpo
import harness.engine
from grpo import Config
from harness.flags import ConfigError
from tests.common import HERE, command_line, run, small_run

pytest_plugins = "tests.common"


# -- one process


@pytest.mark.parametrize("flags, code", [(["--help"], 0), (["--bta", "1"], 2)])
def test_help_and_a_mistyped_flag_need_no_torch(flags, code, tmp_path):
    (tmp_path / "torch.py").write_text("raise RuntimeError('imported')")
    done = run(*flags, env={"PYTHONPATH": str(tmp_path)})
    assert done.returncode == code and "imported" not in done.stderr
    if code == 0:
        assert "--kl_estimator" in done.stdout
    else:
        assert "did you mean --beta?" in done.stderr


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_caller_without_gradients_still_trains(mode, tmp_path):
    with mode():
        [step] = small_run(tmp_path / "out", max_steps=1, save_every=0)
        assert not torch.is_grad_enabled()
    assert step["grad_norm"] > 0


def test_a_transformers_that_is_too_old_is_named(monkeypatch):
    """Its attention would end in a traceback."""
    for version, too_old in (("5.12.1", True), ("5.9.0", True), ("5.13.0", False)):
        monkeypatch.setattr(grpo.transformers, "__version__", version)
        outcome = contextlib.nullcontext()
        if too_old:
            message = f"^transformers {version} is too old: pip install 'transformers>=5.13'$"
            outcome = pytest.raises(ConfigError, match=message)
        with outcome:
            grpo.prepare(Config())


def round_by_name():
    torch.set_float32_matmul_precision("medium")


def round_by_backend():
    torch.backends.mkldnn.matmul.fp32_precision = "bf16"  # torch's newer setting


@pytest.fixture
def restore_precision():
    yield
    torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize("round_products", [None, round_by_name, round_by_backend])
def test_float32_is_float32_whatever_the_caller_has_set(
    round_products, restore_precision, tmp_path, monkeypatch, capsys
):
    """Else the rounding looks like a wrong model, or like a wrong sampler, and stops the run."""
    matmuls = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)
    seen = []
    update = grpo.update

    def recorded(*args, **options):
        seen.append(torch.get_float32_matmul_precision())
        seen.extend(matmul.fp32_precision for matmul in matmuls)
        return update(*args, **options)

    monkeypatch.setattr(grpo, "update", recorded)
    if round_products:
        round_products()
    before = [matmul.fp32_precision for matmul in matmuls]
    small_run(tmp_path / "out", max_steps=1, save_every=0)
    assert seen[0] == "highest"
    assert set(seen[1:]) <= {"ieee", "none"}
    assert [matmul.fp32_precision for matmul in matmuls] == before
    if round_products is round_by_name:
        assert torch.get_float32_matmul_precision() == "medium"
    line = "float32 products are not rounded in this run, although this process asks for it"
    assert (line in capsys.readouterr().out) is (round_products is not None)


def test_rounding_does_not_decide_what_is_clipped(tmp_path):
    options = dict(out_dir=str(tmp_path / "out"), num_minibatches=2)
    for side in ("clip_low", "clip_high"):
        with pytest.raises(ConfigError, match=rf"--{side} 0\.0: .*rounding"):
            grpo.prepare(Config(**options, **{side: 0.0}))
        grpo.prepare(Config(**options | {"num_minibatches": 1}, **{side: 0.0}))
    assert not (tmp_path / "out").exists()


LIBRARIES = ("vllm._C", "vllm._C_AVX512", "vllm._C_AVX2")


def test_vllm_whose_library_cannot_be_loaded_is_not_chosen(monkeypatch):
    """Without libnuma vLLM imports, warns, and ends later in an error about another thing."""
    pytest.importorskip("vllm")
    for name in LIBRARIES:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setattr(torch.ops, "_C", types.SimpleNamespace())  # another test may have loaded it
    cpu = torch.device("cpu")
    kind, why = harness.engine.choose_sampler(Config(), cpu, False)
    assert kind == "hf" and "vllm's library cannot be loaded" in why
    with pytest.raises(ConfigError, match="--rollout vllm: vllm's library cannot be loaded"):
        harness.engine.choose_sampler(Config(rollout="vllm"), cpu, False)


OTHER_LIBRARY = """
import sys, torch
torch.cpu._is_avx512_supported = lambda: False
sys.modules["vllm._C"] = sys.modules["vllm._C_AVX512"] = None
import grpo, harness.engine
print(harness.engine.choose_sampler(grpo.Config(), torch.device("cpu"), False))
"""


def test_a_cpu_without_avx_512_gets_vllms_library_for_it():
    """There vllm._C ends the process: illegal instruction."""
    pytest.importorskip("vllm")
    if platform.machine() != "x86_64":
        pytest.skip("vLLM has three libraries for x86-64 only")
    command = [sys.executable, "-c", OTHER_LIBRARY]
    done = subprocess.run(command, cwd=HERE, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1:] == ["('vllm', 'installed')"], done.stderr


TWO_COPIES = """
import importlib.util, sys
first, second, out = sys.argv[1:]

def load(folder, name):
    spec = importlib.util.spec_from_file_location(name, folder + "/grpo.py")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module

copies = {first: load(first, "grpo_1"), second: load(second, "grpo_2")}
for folder, copy in copies.items():
    rooms = [copy.Policy.__module__ and copy]
    seen, waiting = set(), [copy]
    while waiting:
        module = waiting.pop()
        for value in vars(module).values():
            name = getattr(value, "__module__", None) or getattr(value, "__name__", "")
            if not str(name).split(".")[0] in ("harness", "reward", "view"):
                continue
            room = value if hasattr(value, "__path__") or hasattr(value, "__spec__") else None
            marks = getattr(room, "COPY", None) or getattr(value, "__globals__", {}).get("COPY")
            if marks is not None:
                assert marks == folder, (folder, name, marks)
                seen.add(str(name))
            if room is not None and room not in rooms:
                rooms.append(room)
                waiting.append(room)
    assert len(seen) > 15, seen
for i, (folder, copy) in enumerate(copies.items()):
    options = dict(num_prompts=2, num_generations=2, max_steps=1, eval_data="")
    copy.train(copy.Config(**options, out_dir=out + str(i)))
print("both trained")
"""


@pytest.mark.slow
def test_two_copies_in_one_process_do_not_mix(tmp_path):
    """Of the second one, whose folder begins with the first one's name, every room is its own."""
    folders = [tmp_path / "copy", tmp_path / "copy2"]
    for folder in folders:
        folder.mkdir()
        for name in ("grpo.py", "reward.py", "view.py"):
            shutil.copy(os.path.join(HERE, name), folder)
        for name in ("harness", "sample_data"):
            shutil.copytree(os.path.join(HERE, name), folder / name)
        for room in [*folder.glob("*.py"), *folder.glob("harness/*.py")]:
            with open(room, "a") as file:
                if room.name != "grpo.py":
                    file.write(f"\n\nCOPY = {str(folder)!r}\n")
    script = tmp_path / "two.py"
    script.write_text(TWO_COPIES)
    done = run(str(script), *map(str, folders), str(tmp_path / "out"), env={"PYTHONPATH": ""})
    assert done.returncode == 0 and "both trained" in done.stdout, done.stderr[-2000:]


def error_output(command, reader, writer) -> bytes:
    """What a program writes to stderr, which is this terminal or pipe."""
    done = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=writer)
    os.close(writer)
    parts = []
    with contextlib.suppress(OSError):  # a terminal whose other end is closed
        while part := os.read(reader, 4096):
            parts.append(part)
    os.close(reader)
    assert done.wait(300) == 0
    return b"".join(parts)


@pytest.mark.slow
def test_long_work_shows_that_it_lives_on_a_terminal_only(tmp_path):
    flags = "--num_prompts 2 --num_generations 2 --max_steps 1 --save_every 0 --eval_data".split()
    command = [sys.executable, os.path.join(HERE, "grpo.py"), *flags, "", "--out_dir"]
    reader, writer = pty.openpty()
    termios.tcsetwinsize(writer, (24, 80))
    terminal = error_output([*command, str(tmp_path / "terminal")], reader, writer)
    log = error_output([*command, str(tmp_path / "log")], *os.pipe())
    assert b"tokens:" in terminal and b"tokens:" not in log


# -- several ranks, several machines


def differing_ranks(what, folder, *args):
    """Rank 1 starts with another flag, other rows, or another reward file under the same name."""
    if os.environ["RANK"] == "1":
        os.chdir(os.path.join(folder, "other"))
        if what in ("--learning_rate", "--beta"):
            args = [*args, what, "0"]
    else:
        os.chdir(os.path.join(folder, "first"))
    command_line(*args)


@pytest.mark.parametrize("what", ["--learning_rate", "--beta", "--train_data", "--reward"])
def test_ranks_that_differ_are_refused(what, fork, tmp_path):
    for name, answer in (("first", "1"), ("other", "2")):
        (tmp_path / name).mkdir()
        row = {"prompt": "1+1=", "answer": answer if what == "--train_data" else "2"}
        (tmp_path / name / "rows.jsonl").write_text(json.dumps(row))
        value = answer if what == "--reward" else "1"
        (tmp_path / name / "mine.py").write_text(f"def r(completion, row):\n    return {value}\n")
    flags = ["--train_data", "rows.jsonl", "--reward", "mine.py:r", "--num_prompts", 2]
    flags += ["--num_generations", 2, "--max_steps", 1, "--out_dir", tmp_path / "out"]
    function = "tests.test_machines.differing_ranks"
    done = fork(function, what, tmp_path, *flags, ranks=2)[1]()
    assert done.returncode in (2, -15)  # -15: of the rank that lets the first one speak
    assert f"error: {what}: not the same on rank 1 as on rank 0" in done.stderr
    assert not (tmp_path / "out").exists()


def test_a_resume_says_that_the_rows_have_changed(tmp_path, capsys):
    small_run(tmp_path / "out", max_steps=1)
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(reversed(rows.read_text().splitlines(keepends=True))))
    capsys.readouterr()
    small_run(tmp_path / "out", max_steps=2, resume="latest")
    assert "changed since then: max_steps, train_rows\n" in capsys.readouterr().out


@pytest.mark.slow
def test_two_machines_with_other_rows_under_one_name(tmp_path):
    """Two torchrun agents on one machine: rows of the second one were mixed in, exit code 0."""
    port = 20000 + os.getpid() % 20000
    agents = []
    for node in (0, 1):
        folder = tmp_path / f"node{node}"
        folder.mkdir()
        row = {"prompt": f"{node}+1=", "answer": str(node + 1)}
        (folder / "train.jsonl").write_text(json.dumps(row))
        command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2"]
        command += [f"--node_rank={node}", "--master_addr=127.0.0.1", f"--master_port={port}"]
        command += [os.path.join(HERE, "grpo.py"), "--train_data", "train.jsonl", "--max_steps"]
        command += ["1", "--num_prompts", "2", "--num_generations", "2"]
        agents.append(
            subprocess.Popen(
                command,
                cwd=folder,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
        time.sleep(0.5)
    outputs = [agent.communicate(timeout=300)[0] for agent in agents]
    assert all(agent.returncode != 0 for agent in agents), outputs
    assert "--train_data: not the same on rank 1 as on rank 0" in outputs[0]
    assert not any((tmp_path / f"node{node}" / "out").exists() for node in (0, 1))
