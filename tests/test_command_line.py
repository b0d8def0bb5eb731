"""The command line: its errors, torchrun, and runs on two ranks."""

import dataclasses
import math
import os
import re
import socket
import subprocess
import sys

import pytest

import grpo
from grpo import Config
from harness.flags import ConfigError
from tests.common import (
    BUNDLED,
    HERE,
    PRIME,
    command_line,
    lines,
    resumed_on_two_ranks,
    run,
    state_of,
    two_rank_run,
)

pytest_plugins = "tests.common"


@pytest.mark.parametrize("ranks", [0, 2])
def test_bad_input_is_one_line_and_exit_code_2(ranks, fork, tmp_path):
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"prompt": "1+1="}\n{"prompt"\n')
    args = ["--train_data", bad, "--out_dir", tmp_path / "out"]
    done = fork("command_line", *args, ranks=2)[1]() if ranks else run(*args)
    [line] = [line for line in done.stderr.splitlines() if "grpo.py: error" in line]
    assert line.startswith(f"grpo.py: error: --train_data {bad} row 2: not valid JSON: ")
    assert not (tmp_path / "out").exists() and "Traceback" not in done.stderr
    if ranks:
        assert done.returncode != 0
    else:
        assert done.returncode == 2


@pytest.mark.slow
def test_a_rank_without_a_launcher_is_one_line_and_exit_code_2(tmp_path):
    done = run("--out_dir", tmp_path / "out", env=dict(RANK="0"))
    assert done.returncode == 2 and "Traceback" not in done.stderr
    [line] = [line for line in done.stderr.splitlines() if "grpo.py: error" in line]
    assert "RANK is set, MASTER_ADDR, MASTER_PORT, WORLD_SIZE not: start several" in line


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(model="/nowhere"), "--model /nowhere"),
        (dict(tokenizer="/nowhere"), "--tokenizer /nowhere"),
        (dict(train_data="/nowhere.jsonl"), "--train_data /nowhere.jsonl: [Errno 2] No such file"),
        (dict(eval_data="/nowhere.jsonl"), "--eval_data /nowhere.jsonl: [Errno 2] No such file"),
        (dict(reward="magic"), "--reward magic"),
        (dict(reward="/nowhere.py:f"), "--reward /nowhere.py:f"),
        (dict(out_dir="/dev/null/x"), "--out_dir /dev/null/x"),
        (dict(device="tpu"), "--device tpu"),
        (dict(resume="/nowhere"), "--resume /nowhere"),
        (dict(reward="countdown"), "no column 'numbers'; see --reward countdown"),
        (dict(max_prompt_length=3), "every prompt is longer than --max_prompt_length 3"),
    ],
)
def test_what_cannot_be_loaded_is_named(options, message, tmp_path):
    options = grpo.BUNDLED | dict(out_dir=str(tmp_path / "out")) | options
    with pytest.raises(ConfigError) as error:
        grpo.train(Config(**options))
    assert message in str(error.value) and "\n" not in str(error.value)
    assert not (tmp_path / "out" / "metrics.jsonl").exists()


PRIME += ["--max_completion_length", 29, "--max_steps", 3, "--save_every", 1, "--keep", 0]
PRIME += ["--eval_data", ""]


PLANTED = """
import os, signal, sys, grpo
original = grpo.assign_advantages
def assign(samples, step, cfg):
    if os.environ["RANK"] == "1" and step == 2 + int(os.environ["TORCHELASTIC_RESTART_COUNT"]):
        if step == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        raise ValueError("planted on rank 1")
    return original(samples, step, cfg)
grpo.assign_advantages = assign
if __name__ == "__main__":
    sys.exit(grpo.main())
"""


@pytest.fixture(scope="module")
def two_ranks(fork, tmp_path_factory):
    out = tmp_path_factory.mktemp("two") / "whole"
    return out, two_rank_run(fork, out, "hf")


def test_two_ranks_divide_anything_and_resume_to_the_bit(two_ranks, fork, tmp_path):
    """Prompts, G, ranks, micro-batch and mini-batches are pairwise prime. Then a resume."""
    out, (metrics, completions, weights) = two_ranks
    assert [m["step"] for m in metrics] == [1, 2, 3]
    assert all(math.isfinite(m["loss"]) for m in metrics)
    assert resumed_on_two_ranks(fork, out, "hf") == (metrics, completions, weights)
    cfg = grpo.parse_args(list(map(str, PRIME)))
    cfg = dataclasses.replace(cfg, out_dir=str(tmp_path / "one"), rollout="hf", max_steps=1)
    [one_rank] = grpo.train(cfg)
    first = [row for row in completions if row["step"] == 1]
    assert first == lines(tmp_path / "one" / "completions.jsonl")
    for key in ("loss", "grad_norm", "reward", "kl", "entropy", "tokens"):
        assert metrics[0][key] == pytest.approx(one_rank[key], rel=1e-4, abs=1e-6)


def other_rows_on_rank_1(*args):
    """As if rounding on another card, or its memory, had decided otherwise."""
    first_right = grpo.check.first_right
    if os.environ["RANK"] == "1":
        grpo.check.first_right = lambda candidates, *more: first_right(candidates[1:], *more)
    command_line(*args)


def test_the_ranks_agree_on_the_rows(fork, tmp_path):
    args = ["--num_prompts", 7, "--num_generations", 4, "--micro_batch_tokens", 97]
    args += ["--rollout", "hf", "--max_steps", 1]
    two, one = tmp_path / "two", tmp_path / "one"
    function = "tests.test_command_line.other_rows_on_rank_1"
    done = fork(function, *args, "--out_dir", two, ranks=2)[1]()
    assert done.returncode == 0, done.stderr
    more = ["--out_dir", str(one), "--eval_data", ""]
    [one_rank] = grpo.train(grpo.parse_args([*map(str, args), *more]))
    [two_ranks] = [m for m in lines(two / "metrics.jsonl") if "loss" in m]
    for key in ("loss", "grad_norm", "kl", "entropy"):
        assert two_ranks[key] == pytest.approx(one_rank[key], rel=1e-4, abs=1e-6)


@pytest.mark.slow
def test_two_machines(two_ranks, tmp_path):
    """Two torchrun agents meet over the network: the same run, and only rank 0 writes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        meet = f"127.0.0.1:{free.getsockname()[1]}"
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc_per_node=1"]
    command += ["--rdzv_backend=c10d", f"--rdzv_endpoint={meet}", os.path.join(HERE, "grpo.py")]
    command += [*map(str, PRIME), "--rollout", "hf"]
    agents = []
    options = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    options["env"] = os.environ | {"OMP_NUM_THREADS": "1"}
    for node in (0, 1):  # not a shared directory: the second machine's stays empty
        out_dir = str(tmp_path / f"node{node}")
        agents.append(subprocess.Popen([*command, "--out_dir", out_dir], **options))
    outputs = [agent.communicate(timeout=600)[0] for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], outputs
    written = [node for node in (0, 1) if (tmp_path / f"node{node}" / "metrics.jsonl").exists()]
    assert len(written) == 1 and sum("watch reward" in text for text in outputs) == 1
    assert state_of(tmp_path / f"node{written[0]}") == two_ranks[1]


@pytest.mark.slow
def test_a_rank_that_dies_or_raises_is_named(two_ranks, tmp_path):
    """The others end with it; torchrun --max_restarts with --resume continues it, to the bit."""
    script, out = tmp_path / "planted.py", tmp_path / "out"
    script.write_text(PLANTED)
    args = [*PRIME, "--rollout", "hf", "--resume", "--out_dir", out]
    done = run(script, *args, nproc=2, launch=["--max_restarts", "1"])
    # killed in step 2, then an exception in step 3
    assert re.search(r"exitcode: -9\) local_rank: 1", done.stderr)
    assert "step_000001 at step 1" in done.stdout and done.returncode == 1
    assert "ValueError: planted on rank 1" in done.stderr and re.search(r"rank\s*: 1 ", done.stderr)
    metrics, completions, _ = two_ranks[1]
    assert state_of(out)[0] == metrics[:2]
    assert state_of(out)[1] == [row for row in completions if row["step"] < 3]
    assert state_of(out)[2] == (two_ranks[0] / "step_000002" / "model.safetensors").read_bytes()


def test_a_config_made_in_python_knows_what_was_given():
    """The bundled task does not replace a given value, even if it equals Config's default."""
    assert grpo.prepare(Config()).max_steps == 20
    assert grpo.prepare(Config(max_steps=100)).max_steps == 100
    cfg = grpo.prepare(Config(max_steps=100, learning_rate=1e-6))
    assert (cfg.model, cfg.learning_rate, cfg.max_completion_length) == (BUNDLED.model, 1e-6, 40)
    assert grpo.prepare(Config(model="m", train_data="rows")).max_steps == 100
    assert grpo.prepare(Config(train_data="rows.jsonl")).eval_data == ""


LATER = "import reward, view, harness, grpo; assert reward.mine; grpo.parse_args([])"


# started beside such files, and imported after them
@pytest.mark.slow
@pytest.mark.parametrize("args", [["-m", "grpo", "--show_prompt"], ["-c", LATER]])
def test_a_users_own_reward_py_is_not_ours(args, tmp_path):
    for name in ("reward", "view", "harness"):  # very common names
        (tmp_path / f"{name}.py").write_text("mine = True\n")
    done = run(*args, cwd=tmp_path)
    assert done.returncode == 0 and ("show" not in args[-1] or "=" in done.stdout), done.stderr
