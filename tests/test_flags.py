"""TODO."""

import dataclasses
import importlib
import importlib.machinery
import importlib.util
import json
import os
import shutil
import sys
import types

import pytest
import torch

import grpo
import harness.ranks
from grpo import Config
from harness.flags import ConfigError
from tests.common import BUNDLED, HERE, lines, random_samples, run, small_run

pytest_plugins = "tests.common"


@pytest.mark.parametrize(
    "args, message",
    [
        (["--lerning_rate", "1"], "unknown flag --lerning_rate; did you mean --learning_rate?"),
        (["--num_generations", "1"], "--num_generations 1: must be at least 2"),
        (["--num_prompts", "0"], "--num_prompts 0: must be at least 1"),
        (["--beta", "-1"], "--beta -1.0: must be at least 0"),
        (["--beta", "nan"], "--beta nan: must be a finite number"),
        (["--learning_rate", "inf"], "--learning_rate inf"),
        (["--temperature", "0"], "--temperature 0.0: must be above 0"),
        (["--num_prompts", "many"], "--num_prompts"),
        (["--kl_estimator", "k5"], "--kl_estimator"),
        (["--kl_in", "reward"], "--kl_in reward: takes --kl_estimator k1 only"),
        (["--clip_low", "2"], "--clip_low 2.0"),
        (["--mask_truncated", "maybe"], "--mask_truncated"),
        (["--num_minibatches", "1000"], "--num_minibatches 1000"),
        (["--num_generations", "1000000000000"], "--num_generations 1000000000000: must be at most 1048576"),
        (["--max_completion_length", "100000000000"], "--max_completion_length 100000000000: must be at most"),
        (["--seed", str(2**32)], f"--seed {2**32}: must be at most 2147483647"),
        (["--seed", "-1"], "--seed -1: must be at least 0"),
        (["--model", "m"], "--train_data : needed, with a --model of your own"),
        (["--chat_template_kwargs", "{"], "--chat_template_kwargs {: must be a JSON object"),
        (["--chat_template_kwargs", "[1]"], "--chat_template_kwargs [1]: must be a JSON object"),
        (["--vllm_tensor_parallel_size", "2"], "--vllm_tensor_parallel_size 2: must divide the 1 ranks"),
    ],
)
def test_impossible_flags_are_refused(args, message):
    with pytest.raises(ConfigError) as error:
        grpo.parse_args(args)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_the_bundled_tasks_flags_apply_where_no_model_is_named(tmp_path):
    assert grpo.parse_args([]) == BUNDLED == grpo.validate(Config())
    assert grpo.validate(Config(seed=3)) == dataclasses.replace(BUNDLED, seed=3)
    assert grpo.parse_args(["--learning_rate", "1e-6"]).learning_rate == 1e-6  # given, though it is Config's default
    mine = grpo.parse_args(["--train_data", "rows.jsonl"])
    assert (mine.model, mine.eval_data, mine.learning_rate) == (BUNDLED.model, "", BUNDLED.learning_rate)
    for flags in (["--model", "m"], ["--model", "m", "--seed", "1"]):
        cfg = grpo.parse_args([*flags, "--train_data", "rows.jsonl"])
        assert (cfg.eval_data, cfg.learning_rate, cfg.max_completion_length) == ("", 1e-6, 512)
    assert Config(beta=0.04).warmup_steps == 0 and Config().kl_estimator == "wk3"


@pytest.mark.parametrize("value", ["x", None, 1.5, True])
def test_values_of_the_wrong_type_are_refused(value):
    with pytest.raises(ConfigError, match="--num_prompts .*: must be"):
        grpo.validate(dataclasses.replace(BUNDLED, num_prompts=value))


def test_what_a_model_brings_is_checked_before_anything_is_written(tmp_path):
    """Truncated, mismatched, incomplete and odd model files; more tokens than the model has positions or words."""

    def refused(message, change=lambda path: None, **options):
        path = tmp_path / "model"
        shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(BUNDLED.model, path)
        change(path)
        with pytest.raises(ConfigError, match=message) as error:
            small_run(tmp_path / "out", **(dict(model=str(path)) | options))
        assert "\n" not in str(error.value) and not (tmp_path / "out").exists()

    def config(**changes):
        def change(path):
            known = json.loads((path / "config.json").read_text())
            (path / "config.json").write_text(json.dumps(known | changes))

        return change

    def without(name):
        from safetensors.torch import load_file, save_file

        def change(path):
            weights = load_file(path / "model.safetensors")
            del weights[name]
            save_file(weights, path / "model.safetensors", metadata=dict(format="pt"))

        return change

    refused("--model .*", lambda path: os.truncate(path / "model.safetensors", 1000))
    refused("--model .*", lambda path: (path / "config.json").write_text("[]"))
    refused("--model .*", lambda path: (path / "tokenizer.json").write_text("{"))
    refused("--model .*", config(hidden_size=64))
    refused("no weights for model.norm.weight", without("model.norm.weight"))
    refused("--max_completion_length 250: .* more than the model's 256 positions", max_completion_length=250)
    other = tmp_path / "tokenizer"
    shutil.copytree(BUNDLED.model, other)
    vocabulary = json.loads((other / "tokenizer.json").read_text())
    words = vocabulary["model"]["vocab"]
    words["="] = 99
    (other / "tokenizer.json").write_text(json.dumps(vocabulary))
    refused("--tokenizer .*: makes the token id 99, and the model knows 18", tokenizer=str(other))


def test_a_terminal_that_is_not_utf8(tmp_path):
    """A sample with an accent must not end a run before its save."""
    model = tmp_path / "model"
    shutil.copytree(BUNDLED.model, model)
    tokenizer = (model / "tokenizer.json").read_text()
    (model / "tokenizer.json").write_text(tokenizer.replace('"="', '"é"'))
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+2é", "answer": "3"}\n')
    flags = dict(model=model, train_data=tmp_path / "rows.jsonl", eval_data=tmp_path / "rows.jsonl", num_prompts=1)
    flags |= dict(max_completion_length=4, max_steps=1, rollout="hf", out_dir=tmp_path / "out")
    done = run(*[x for k, v in flags.items() for x in (f"--{k}", v)], env=dict(PYTHONIOENCODING="ascii"))
    assert done.returncode == 0 and r"\xe9" in done.stdout, done.stderr[-2000:]


def test_flags_reach_the_config():
    cfg = grpo.parse_args("--beta 0.5 --mask_truncated --compile false --non_stop_reward -1 --resume".split())
    assert (cfg.beta, cfg.mask_truncated, cfg.compile, cfg.non_stop_reward, cfg.resume) == (
        0.5,
        True,
        False,
        -1.0,
        "latest",
    )
    assert grpo.parse_args(["--non_stop_reward", "none"]).non_stop_reward is None
    # what may be asked for in the reward without a KL to put there
    grpo.parse_args("--kl_in reward --beta 0".split())
    grpo.parse_args("--kl_in reward --kl_estimator k1".split())


def test_k1_as_a_loss_warns(tmp_path, capsys):
    for options, warned in ((dict(kl_estimator="k1"), True), (dict(), False), (dict(kl_estimator="k1", beta=0), False)):
        small_run(tmp_path / "out", max_steps=0, **options)
        assert ("expected gradient of zero" in capsys.readouterr().out) is warned


def tuple_of(*args):
    return args


@pytest.mark.parametrize("kind", ["tensorboard", "wandb"])
def test_report_to_uses_trl_names(kind, tmp_path, monkeypatch):
    sent = {}

    def log(values, step):
        sent.setdefault(step, {}).update(values)

    writer = types.SimpleNamespace(add_scalar=lambda k, v, step: log({k: v}, step), flush=lambda: None)
    logger = types.SimpleNamespace(log=log)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", types.SimpleNamespace(SummaryWriter=lambda _: writer))
    fake = types.SimpleNamespace(init=lambda **_: logger, Table=tuple_of, __spec__=importlib.machinery.ModuleSpec)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    installed, find_spec = [], importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: installed if name == kind else find_spec(name, *rest)
    )
    with pytest.raises(ConfigError, match=f"--report_to {kind}: not installed; pip install {kind}"):
        small_run(tmp_path / "out", report_to=kind)
    installed.append("somewhere")
    rows = os.path.join(HERE, "sample_data", "train.jsonl")
    small_run(tmp_path / "out", report_to=kind, max_steps=1, eval_data=str(tmp_path / "rows.jsonl"), train_data=rows)
    names = "loss grad_norm learning_rate reward reward_std frac_reward_zero_std completions/mean_length kl entropy"
    names += " completions/clipped_ratio clip_ratio/region_mean sampling/sampling_logp_difference/mean"
    assert {f"train/{name}" for name in names.split()} | {"eval/accuracy"} <= set(sent[1])
    assert sent[1]["train/kl"] == lines(tmp_path / "out" / "metrics.jsonl")[1]["kl_k3"]
    if kind == "wandb":
        columns, table = sent[1]["completions"]
        assert columns[1:3] == ["prompt", "completion"] and len(table) == 15 and len(table[0]) == len(columns)


def test_quiet_and_verbose(capfd):
    for verbose in (False, True):
        with harness.ranks.quiet(verbose):
            os.write(1, b"engine")
        assert ("engine" in capfd.readouterr().out) is verbose
    with pytest.raises(RuntimeError), harness.ranks.quiet(False):
        os.write(1, b"from a driver\n" * 30)
        os.write(2, b"the last line")
        raise RuntimeError
    shown = capfd.readouterr()
    assert shown.out == "" and shown.err == "from a driver\n" * 19 + "the last line"


def test_tokenizer_and_gradient_checkpointing_reach_the_run(tmp_path, undisturbed, monkeypatch):
    import transformers

    model, tokenizer = tmp_path / "model", tmp_path / "tokenizer"
    shutil.copytree(grpo.BUNDLED["model"], model)
    tokenizer.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.move(model / name, tokenizer)
    rows = str(undisturbed.parent / "rows.jsonl")
    enabled, honest = [], transformers.PreTrainedModel.gradient_checkpointing_enable

    def enable(self, **options):
        enabled.append(options)
        return honest(self, **options)

    monkeypatch.setattr(transformers.PreTrainedModel, "gradient_checkpointing_enable", enable)
    options = dict(model=str(model), tokenizer=str(tokenizer), train_data=rows, gradient_checkpointing=True)
    [metrics] = small_run(tmp_path / "out", **options, max_steps=1)
    assert enabled == [dict(gradient_checkpointing_kwargs=dict(use_reentrant=False))]
    plain = lines(undisturbed / "metrics.jsonl")[0]
    assert metrics["loss"] == pytest.approx(plain["loss"], rel=1e-5) and metrics["reward"] == plain["reward"]


def test_compile_compiles_the_body(tmp_path, monkeypatch):
    compiled = []
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self, **options: compiled.append((type(self), options)))
    small_run(tmp_path / "out", max_steps=1)
    assert compiled == []
    small_run(tmp_path / "out", max_steps=1, compile=True)
    assert [(kind.__name__, options) for kind, options in compiled] == [("Qwen3DecoderLayer", dict(dynamic=True))] * 3


def test_scale_rewards_and_reward_timeout_reach_the_run(tmp_path):
    hangs = tmp_path / "hangs.py"
    hangs.write_text(
        "import time\ndef f(completion, row):\n    time.sleep(3600 * (len(completion) % 2))\n    return 1\n"
    )
    options = dict(reward=f"overlong,{hangs}:f", reward_timeout=0.5, max_steps=1, num_prompts=2, num_generations=2)
    [metrics] = small_run(tmp_path / "out", **options, num_minibatches=1)
    assert metrics["reward_failed/timeout"] >= 1 and "reward/f" in metrics
    sizes = {}
    for scale in ("group", "batch", "none"):
        samples = random_samples(8, 4)
        for i, s in enumerate(samples):
            s.reward = float(i * i)
        grpo.assign_advantages(samples, 1, Config(num_generations=4, scale_rewards=scale))
        sizes[scale] = max(abs(s.advantage) for s in samples)
    assert sizes["group"] != sizes["batch"] < sizes["none"] and sizes["group"] < 2


def test_eval_every_eval_samples_and_log_completions(tmp_path):
    out, data = tmp_path / "out", os.path.join(HERE, "sample_data", "train.jsonl")
    options = dict(train_data=data, reward="answer", eval_samples=2, eval_every=2, max_steps=3, log_completions=4)
    small_run(out, max_steps=1)  # writes the five rows that eval takes
    history = small_run(out, **(options | dict(eval_data=str(tmp_path / "rows.jsonl"))))
    assert [m["step"] for m in history if "eval_accuracy" in m] == [0, 2, 3]
    for m in history[::3]:
        assert 0 <= m["eval_pass@1"] <= m["eval_pass@2"] <= 1 and m["eval_length"] > 0
    assert [len([r for r in lines(out / "completions.jsonl") if r["step"] == n]) for n in (1, 2, 3)] == [4, 4, 4]
    for count, expected in ((-1, 15), (0, 0)):
        small_run(out, max_steps=1, log_completions=count)
        assert len(lines(out / "completions.jsonl")) == expected
