"""Flags, exit codes, and lines of the log."""

import dataclasses
import io
import os
import re
import shutil
import subprocess
import sys
import types

import pytest
import torch
import torch.distributed as dist

import grpo
import harness.auto
from grpo import Config
from harness import flags
from harness.flags import ConfigError, TrainingError
from tests.common import BUNDLED, CPU, HERE, lines, random_samples, small_run

pytest_plugins = "tests.common"


@pytest.mark.parametrize(
    "args, message",
    [
        (
            "--lerning_rate 1",
            "unknown flag --lerning_rate; did you mean --learning_rate? --help shows",
        ),
        ("--num_generations 1", "--num_generations 1: must be from 2 to 1048576"),
        ("--beta -1", "--beta -1.0: must be from 0 to 2147483647"),
        ("--beta nan", "--beta nan: must be from 0 to 2147483647"),
        ("--learning_rate inf", "--learning_rate inf: must be from 0"),
        ("--temperature 0", "--temperature 0.0: must be from 1e-06"),
        (
            "--vllm_gpu_memory_utilization 1.1",
            "--vllm_gpu_memory_utilization 1.1: must be from 0.001 to 1",
        ),
        ("--num_prompts many", "--num_prompts: invalid int value: 'many'"),
        ("--kl_estimator k5", "--kl_estimator k5: must be one of k1, k2, k3, k4, wk3"),
        ("--kl_in reward", "--kl_in reward: takes --kl_estimator k1 only"),
        ("--mask_truncated maybe", "--mask_truncated maybe: must be true or false"),
        ("--num_minibatches 1000", "--num_minibatches 1000"),
        (f"--seed {2**32}", f"--seed {2**32}: must be from 0 to 2147483647"),
        ("--model m", "--train_data : required if --model is given"),
        ("--chat_template_kwargs {", "--chat_template_kwargs {: must be a JSON object"),
        ("--chat_template_kwargs [1]", "--chat_template_kwargs [1]: must be a JSON object"),
    ],
)
def test_impossible_flags_are_refused(args, message):
    with pytest.raises(ConfigError) as error:
        grpo.parse_args(args.split())
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(num_prompts=value), "must be a whole number")
        for value in ("x", None, 1.5, True, float("inf"))
    ]
    + [
        (dict(chat=1), "must be true or false"),
        (dict(model=None), "must be text"),
        (dict(beta="x"), "must be a number"),
    ],
)
def test_values_of_the_wrong_type_are_refused(changes, message):
    with pytest.raises(ConfigError, match=f"--{next(iter(changes))} .*: {message}"):
        grpo.prepare(dataclasses.replace(BUNDLED, **changes))


def test_flags_reach_the_config():
    args = "--beta 0.5 --mask_truncated --compile false --non_stop_reward -1 --resume"
    given = flags.parse_flags(Config, args.split(), "", "")
    assert given == dict(
        beta=0.5, mask_truncated=True, compile=False, non_stop_reward=-1.0, resume="latest"
    )
    assert grpo.parse_args(["--non_stop_reward", "none"]).non_stop_reward is None
    assert grpo.prepare(dataclasses.replace(BUNDLED, non_stop_reward=-1)).non_stop_reward == -1
    # the reward may take the KL's place if beta is 0, or if the estimator is k1
    grpo.parse_args("--kl_in reward --beta 0".split())
    grpo.parse_args("--kl_in reward --kl_estimator k1".split())


def test_the_bundled_tasks_flags_apply_if_no_model_is_named():
    assert grpo.parse_args([]) == BUNDLED == grpo.prepare(Config())
    assert grpo.prepare(Config(seed=3)) == dataclasses.replace(BUNDLED, seed=3)
    # a flag that is given counts, even with Config's default as its value
    assert grpo.parse_args(["--learning_rate", "1e-6"]).learning_rate == 1e-6
    mine = grpo.parse_args(["--train_data", "rows.jsonl"])
    assert (mine.model, mine.eval_data) == (BUNDLED.model, "")
    assert mine.learning_rate == BUNDLED.learning_rate
    for args in (["--model", "m"], ["--model", "m", "--seed", "1"]):
        cfg = grpo.parse_args([*args, "--train_data", "rows.jsonl"])
        assert (cfg.eval_data, cfg.learning_rate, cfg.max_completion_length) == ("", 1e-6, 512)
    assert Config(beta=0.04).warmup_steps == 0 and Config().kl_estimator == "wk3"


def test_flags_that_somebody_set_win_over_the_bundled_task(tmp_path):
    cfg = Config(eval_data="")
    cfg.max_steps = 1
    cfg.learning_rate = 1e-6  # the default
    prepared = grpo.prepare(cfg)
    assert prepared.max_steps == 1
    assert prepared.learning_rate == 1e-6
    assert prepared.eval_data == ""
    assert prepared.max_completion_length == grpo.BUNDLED["max_completion_length"]
    prepared_later = grpo.prepare(dataclasses.replace(cfg, seed=5))
    assert dataclasses.replace(prepared, seed=5) == prepared_later
    assert grpo.prepare(dataclasses.replace(Config(), seed=5)).max_steps == 20
    with pytest.raises(TypeError, match="no flag sede"):
        Config(sede=1)

    cfg.num_prompts = 2
    cfg.num_generations = 2
    cfg.out_dir = str(tmp_path / "out")
    [step] = grpo.train(cfg)
    assert step["step"] == 1
    assert step["learning_rate"] == 1e-6


def test_a_tilde_is_the_home_directory(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    values = flags.parse_flags(Config, ["--out_dir=~/runs", "--model", "~/m"], "grpo.py", "")
    assert values == dict(out_dir="/home/me/runs", model="/home/me/m")


NCCL = """NCCL error in: /pytorch/ProcessGroupNCCL.cpp:94, invalid usage, NCCL version 2.29
ncclInvalidUsage: This usually reflects invalid usage of NCCL library.
Last error:
Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 1000"""


@pytest.mark.parametrize(
    "error, code, shown",
    [
        (ConfigError("--x 1: no"), 2, "error: --x 1: no"),
        (TrainingError("off"), 1, "stopped: off"),
        (KeyboardInterrupt(), 130, "interrupted before the first step"),
        (
            torch.OutOfMemoryError("CUDA out of memory.\nlong"),
            1,
            "stopped: CUDA out of memory. To need less: --beta 0",
        ),
        (
            RuntimeError("[gloo/pair.cc:525] Connection closed by peer"),
            1,
            "peer (if another rank died, the log",
        ),
        (
            dist.DistNetworkError("recvValue: Broken pipe"),
            1,
            "stopped: recvValue: Broken pipe (if another rank",
        ),
        (dist.DistBackendError(NCCL), 1, "Duplicate GPU detected : rank 1 and rank 0"),
        (RuntimeError("shapes differ"), None, "shapes differ"),
        (RuntimeError("the user's own server timed out"), None, "timed out"),
    ],
)
def test_what_ends_a_run_is_one_line_and_an_exit_code(error, code, shown, monkeypatch, capsys):
    def call():
        raise error

    monkeypatch.setenv("RANK", "0")  # the group itself is left by now
    if code is None:
        with pytest.raises(RuntimeError, match=shown):
            flags.exit_code("p", call, "")
        return
    assert flags.exit_code("p", call, "--beta 0") == code
    printed = capsys.readouterr().err
    assert printed.startswith("p: ") and shown in printed and printed.count("\n") == 1


def test_out_of_memory_says_what_needs_less(monkeypatch, capsys):
    def full(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(grpo, "train", full)
    monkeypatch.setattr(sys, "argv", ["grpo.py"])
    assert grpo.main.__wrapped__() == 1  # without torch's @record
    printed = capsys.readouterr().err
    flags_that_help = (
        "micro_batch_tokens",
        "vllm_gpu_memory_utilization",
        "gradient_checkpointing",
        "beta 0",
    )
    assert all(f"--{name}" in printed for name in flags_that_help)


def test_nothing_that_is_said_ends_a_run(monkeypatch, capsys):
    """A full disk, a closed pipe, no stream, a terminal that is not UTF-8. Only rank 0 prints."""
    flags.say("é")
    monkeypatch.setenv("RANK", "1")
    flags.say("nothing")
    assert capsys.readouterr().out == "é\n"
    monkeypatch.setenv("RANK", "0")
    with (
        open("/dev/full", "wb", buffering=0) as full,
        open(os.devnull, "w", encoding="ascii") as narrow,
    ):
        unwritable = io.TextIOWrapper(full, write_through=True)
        for stream in (unwritable, narrow, None, types.SimpleNamespace(), open(os.devnull)):
            monkeypatch.setattr(sys, "stdout", stream)
            flags.say("é")
        unwritable.detach()


SPEAKS = """
import io, os, sys
import harness.auto
from harness import flags
class Tee:
    def __init__(self): self.texts = []
    def write(self, text): self.texts.append(text)
    def flush(self): pass
tee = Tee()
closed = io.StringIO()
closed.close()
for stream in (tee, closed):
    sys.stdout = stream
    for i in range(50):
        flags.say(f"line {i}")
sys.stdout = sys.__stdout__
assert "".join(tee.texts).startswith("line 0\\nline 1\\n"), tee.texts
print("descriptors", len(os.listdir("/proc/self/fd")))
"""


def python(code, **options):
    command = [sys.executable, "-c", code]
    return subprocess.run(command, cwd=HERE, stderr=subprocess.PIPE, text=True, **options)


def test_the_callers_own_output_stays():
    """A stream without an encoding (every Tee class), a closed one: descriptor 1 is not ours."""
    done = python(SPEAKS, stdout=subprocess.PIPE)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"descriptors \d\n", done.stdout)


def test_a_program_whose_output_cannot_be_written_ends_well():
    ends = "import sys; from harness import flags; sys.exit(flags.exit_code('p', call, ''))"
    code = "def call(): flags.say('x')\n" + ends
    with open("/dev/full", "w") as full:
        done = python(code, stdout=full)
    assert (done.returncode, done.stderr) == (0, "")


def test_flags_are_read_without_torch():
    """Importing torch takes seconds, and --help should not."""
    code = """
import dataclasses, sys
from harness import flags
@dataclasses.dataclass
class Config:
    beta: float = flags.flag(0.1, "KL coefficient", group="objective")
    chat: bool = flags.flag(False, "100 %")
assert flags.parse_flags(Config, ["--chat", "--beta", "2"], "p", "d") == dict(beta=2.0, chat=True)
flags.check_flags(Config())
print("torch" in sys.modules, flush=True)
flags.exit_code("p", lambda: flags.parse_flags(Config, ["--help"], "p", "d"), "")
"""
    done = python(code, stdout=subprocess.PIPE)
    assert done.returncode == 0 and done.stdout.startswith("False\nusage: p"), done.stderr
    assert "objective:" in done.stdout and "100 % [False]" in done.stdout


@pytest.mark.slow
def test_python_without_docstrings_is_refused():
    """transformers reads its docstrings, and would blame the model."""
    code = "from grpo import *; validate(Config(**BUNDLED))"
    command = [sys.executable, "-OO", "-c", code]
    done = subprocess.run(command, cwd=HERE, capture_output=True, text=True)
    assert "ConfigError: python -OO drops the docstrings" in done.stderr


def test_k1_as_a_loss_warns(capsys):
    for options, warned in (
        (dict(kl_estimator="k1"), True),
        (dict(), False),
        (dict(kl_estimator="k1", beta=0), False),
    ):
        harness.auto.resolve_auto(
            dataclasses.replace(BUNDLED, **options), torch.nn.Linear(1, 1), CPU.device
        )
        assert ("zero expected gradient" in capsys.readouterr().out) is warned


def test_tokenizer_and_gradient_checkpointing_reach_the_run(tmp_path, undisturbed, monkeypatch):
    import transformers

    model, tokenizer = tmp_path / "model", tmp_path / "tokenizer"
    shutil.copytree(grpo.BUNDLED["model"], model)
    tokenizer.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.move(model / name, tokenizer)
    rows = str(undisturbed.parent / "rows.jsonl")
    enabled = []
    original = transformers.PreTrainedModel.gradient_checkpointing_enable

    def enable(self, **options):
        enabled.append(options)
        return original(self, **options)

    monkeypatch.setattr(transformers.PreTrainedModel, "gradient_checkpointing_enable", enable)
    options = dict(
        model=str(model), tokenizer=str(tokenizer), train_data=rows, gradient_checkpointing=True
    )
    [metrics] = small_run(tmp_path / "out", **options, max_steps=1)
    expected = dict(gradient_checkpointing_kwargs=dict(use_reentrant=False))
    assert enabled and all(options == expected for options in enabled)
    plain = lines(undisturbed / "metrics.jsonl")[0]
    assert metrics["loss"] == pytest.approx(plain["loss"], rel=1e-5)
    assert metrics["reward"] == plain["reward"]


def test_compile_compiles_the_body(tmp_path, monkeypatch):
    compiled = []
    monkeypatch.setattr(
        torch.nn.Module, "compile", lambda self, **options: compiled.append((type(self), options))
    )
    small_run(tmp_path / "out", max_steps=1)
    assert compiled == []
    small_run(tmp_path / "compiled", max_steps=1, compile=True)
    assert [(kind.__name__, options) for kind, options in compiled] == [
        ("Qwen3DecoderLayer", dict(dynamic=True))
    ] * 3


HANGS_ON_ODD_LENGTHS = """
import time
def f(completion, row):
    if len(completion) % 2:
        time.sleep(3600)
    return 1
"""


def test_scale_rewards_and_call_timeout_reach_the_run(tmp_path):
    hangs = tmp_path / "hangs.py"
    hangs.write_text(HANGS_ON_ODD_LENGTHS)
    options = dict(
        reward=f"overlong,{hangs}:f",
        call_timeout=0.5,
        max_steps=1,
        num_prompts=2,
        num_generations=2,
    )
    [metrics] = small_run(tmp_path / "out", **options, num_minibatches=1)
    assert metrics["reward_failed/timeout"] >= 1 and "rewards/f/mean" in metrics
    sizes = {}
    for scale in ("group", "batch", "none"):
        samples = random_samples(8, 4)
        for i, s in enumerate(samples):
            s.reward = float(i * i)
        grpo.assign_advantages(samples, 1, Config(num_generations=4, scale_rewards=scale))
        sizes[scale] = max(abs(s.advantages[0]) for s in samples)
    assert sizes["group"] != sizes["batch"] < sizes["none"] and sizes["group"] < 2


def test_eval_every_eval_samples_temperature_and_log_completions(
    undisturbed, tmp_path, monkeypatch
):
    calls = []
    original = grpo.sample

    def sample(sampler, prompts, seeds, cfg, world, greedy=False, player=None):
        calls.append((1, 0.0) if greedy else (cfg.num_generations, cfg.temperature))
        return original(sampler, prompts, seeds, cfg, world, greedy)

    monkeypatch.setattr(grpo, "sample", sample)
    out = tmp_path / "out"
    data = os.path.join(HERE, "sample_data", "train.jsonl")
    options = dict(
        train_data=data,
        reward="answer",
        eval_samples=2,
        eval_every=2,
        max_steps=3,
        log_completions=4,
    )
    options |= dict(temperature=0.9)
    history = small_run(out, **options, eval_data=str(undisturbed.parent / "rows.jsonl"))
    assert [m["step"] for m in history if "eval_accuracy" in m] == [0, 2, 3]
    assert set(calls) == {(5, 0.9), (1, 0.0), (2, 0.9)}
    for m in history[::3]:
        assert 0 <= m["eval_pass@1"] <= m["eval_pass@2"] <= 1 and m["eval_length"] > 0
    steps = [row["step"] for row in lines(out / "completions.jsonl")]
    assert steps == [1] * 4 + [2] * 4 + [3] * 4
    small_run(tmp_path / "none", max_steps=1, num_minibatches=1, log_completions=0)
    assert lines(tmp_path / "none" / "completions.jsonl") == []
    small_run(tmp_path / "all", max_steps=1, num_minibatches=1, num_prompts=14, log_completions=-1)
    assert len(lines(tmp_path / "all" / "completions.jsonl")) == 14 * 5
