"""What people reported of other trainers and of the libraries below: it must not happen here."""

import copy
import io
import json
import os
import re
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import tokenizers
import torch
import transformers

import grpo
from extras import errors, models, screen
from extras.errors import ConfigError, TrainingError
from grpo import Config
from reward import load_function
from tests.common import (
    CPU,
    HERE,
    begun_run,
    checkpoints,
    flags_of,
    lines,
    main,
    prompts_in,
    run,
    small_config,
    small_rows,
    small_run,
    tiny_model,
    tokenizer_of,
    weights_of,
)
from tests.families import bytes_tokenizer, family
from tests.test_models import load, write

ADAPTER = ("play", "score", "rows")
SIZES = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2)


def byte_level_tokenizer(folder):
    """A tokenizer.json of byte-level BPE, under the class name of a sentencepiece tokenizer."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<pad>", "<eos>"], initial_alphabet=alphabet
    )
    tokenizer.train_from_iterator(["Add the numbers.\n3 + 4 = ?"] * 9, trainer)
    tokenizer.save(f"{folder}/tokenizer.json")
    names = dict(tokenizer_class="LlamaTokenizerFast", eos_token="<eos>", pad_token="<pad>")
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    config = transformers.LlamaConfig(vocab_size=300, **SIZES)
    config.save_pretrained(folder)
    return tokenizer


def test_a_tokenizer_is_what_its_file_says(tmp_path):
    written = byte_level_tokenizer(tmp_path)
    loaded = tokenizer_of(tmp_path)
    text = "Add the  numbers.\n\n3 + 4 = ?"
    assert loaded(text)["input_ids"] == written.encode(text).ids


def test_a_reward_reads_the_blanks_that_were_sampled(tmp_path):
    """transformers takes those before . , ? ! out of what is no BPE, if its config says so."""
    ids = {letter: i for i, letter in enumerate("x! =y")}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(ids, "x"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = tokenizers.decoders.Fuse()
    tokenizer.save(f"{tmp_path}/tokenizer.json")
    names = dict(tokenizer_class="PreTrainedTokenizerFast", clean_up_tokenization_spaces=True)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(names))
    transformers.LlamaConfig(vocab_size=5, **SIZES).save_pretrained(tmp_path)
    assert tokenizer_of(tmp_path).decode([0, 2, 1, 3, 2, 4]) == "x != y"


class DropsBlanks:
    """A tokenizer that was rebuilt wrongly. It also writes blanks beside a special token."""

    bos_token, eos_token_id, chat_template = None, 1, None
    added_tokens_decoder = {}

    def __call__(self, text, **_):
        return dict(input_ids=[ord(x) for x in text if x != " "])

    def num_special_tokens_to_add(self):
        return 0

    def decode(self, ids, **_):
        return "".join(map(chr, ids)).replace("]", "] ")

    def get_added_vocab(self):
        return {"[X]": 7}


def test_a_tokenizer_that_loses_blanks_is_refused(tmp_path):
    def load_one(text):
        path = write(tmp_path, [dict(prompt=text)])
        return prompts_in(path, DropsBlanks())

    assert load_one(" ab")[0].ids.tolist() == [97, 98]  # a leading blank is none
    assert len(load_one("a[X]b")[0].ids) == 5  # nor is one beside a special token
    with pytest.raises(ConfigError, match="'ab'"):
        load_one("a b")


def test_a_tokenizer_may_eat_the_blanks_after_a_mark(tmp_path):
    """Phi-3's <|user|> eats the line break that its template writes after it."""
    tokenizer = bytes_tokenizer((), (), None)
    tokenizer.add_special_tokens([tokenizers.AddedToken("<|user|>", rstrip=True)])
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="a")
    path = write(tmp_path, [dict(prompt="<|user|>\n1+2\n")])
    [prompt] = prompts_in(path, tokenizer)
    assert tokenizer.decode(prompt.ids) == "<|user|>1+2\n"


def test_ids_beyond_the_number_of_tokens_have_their_text():
    """In a vocabulary with holes an id can be larger than len(tokenizer)."""
    words = {"a": 0, "b": 1, "</think>": 900}
    model = tokenizers.models.WordLevel(words, unk_token="a")
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(model), eos_token="b"
    )
    assert tokenizer.decode(np.array([0, 900, 1, 500])) == "a </think> b"


def test_the_blank_of_a_pieces_tokenizer_may_stand_in_a_prompt(tmp_path):
    path, _ = family(tmp_path, "gemma3")
    [prompt] = load(path, [dict(prompt="a\u2581b")], tmp_path)
    assert len(prompt.ids) == 4  # with BOS


def test_a_null_column_of_a_template_is_named(tmp_path):
    template_column = dict(prompt_template="{question}")
    with pytest.raises(ConfigError, match="no column 'question'"):
        load(f"{HERE}/sample_data/model", [dict(question=None)], tmp_path, **template_column)


def test_rows_of_two_tasks_have_null_in_the_columns_of_the_other(tmp_path):
    rows = [dict(prompt="1+2=", answer="3", tests=None), dict(prompt="4=", answer=None, tests="4")]
    path = tmp_path / "two.py"
    path.write_text(
        "def tests(completions, tests, **_):\n    return [x and float(x in c) for x, c in"
        " zip(tests, completions)]\n"
    )
    out = tmp_path / "run"
    reward = f"answer,{path}:tests"
    small_run(out, train_data=write(tmp_path, rows), reward=reward, max_steps=2)
    for row in lines(out / "completions.jsonl"):
        assert list(row["rewards"]) == ["answer" if row["prompt"] == "1+2=" else "tests"]
    with pytest.raises(ConfigError, match="no column .*'answer'"):
        load(f"{HERE}/sample_data/model", [dict(prompt="a")], tmp_path, "answer")


def test_the_reason_of_a_pydantic_error_is_in_a_later_line():
    error = ValueError("1 validation error for VllmConfig\n  Value error, no such cache\n more")
    assert "no such cache" in errors.one_line(error) and "\n" not in errors.one_line(error)


def test_models_that_cannot_be_trained_are_one_line(tmp_path):
    tiny_model().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    quantized = config | dict(quantization_config=dict(quant_method="bitsandbytes"))
    foreign = config | dict(model_type="x", auto_map=dict(AutoConfig="c.C"))
    (tmp_path / "c.py").write_text("raise SystemExit\n")
    for changed, word in ((quantized, "quantized"), (foreign, "custom code")):
        (tmp_path / "config.json").write_text(json.dumps(changed))
        with pytest.raises(ConfigError, match=word):
            grpo.load_model(str(tmp_path), Config(), CPU)


def test_failures_of_two_kinds_are_both_said(capsys):
    samples = [SimpleNamespace(failure=f, rewards={}, reward=0.0) for f in ("a", "b", "", "b")]
    screen.show_failures(samples, True)
    assert capsys.readouterr().out.split() == "in 2 of 4 samples: b in 1 of 4 samples: a".split()


def test_a_package_that_a_reward_needs_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "math_verify", None)
    path = write(tmp_path, [dict(prompt="1+2=", answer="3")])
    with pytest.raises(ConfigError, match=r"pip install 'math-verify\[antlr4_13_2\]'"):
        prompts_in(path, tokenizer_of(f"{HERE}/sample_data/model"), rewards="math")


def test_an_eval_by_other_weights_ends_the_run(tmp_path, monkeypatch):
    def sampler_with_other_weights(run):
        model = copy.deepcopy(run.policy.model).apply(double)
        return grpo.HFSampler(model, models.stop_ids_of(model, run.tokenizer), run.cfg)

    def double(module):
        if isinstance(module, torch.nn.Linear):
            module.weight.data.mul_(1.1)

    monkeypatch.setattr(grpo, "make_sampler", sampler_with_other_weights)
    with pytest.raises(TrainingError, match="off on average"):
        small_run(tmp_path / "run", eval_data=small_rows(tmp_path), max_steps=0)


def rewards_in(folder, text):
    (folder / "mine.py").write_text(text)
    return f"{folder / 'mine.py'}:mine"


def test_each_sample_has_a_row_of_its_own(tmp_path):
    text = "def mine(completion, row):\n    row['seen'].append(1)\n    return len(row['seen'])\n"
    rows = [dict(prompt="1+2=", seen=[], tests="x" * 10**6), dict(prompt="2+2=", seen=[1])]
    train_data = write(tmp_path, rows)
    options = dict(reward=rewards_in(tmp_path, text), train_data=train_data)
    small_run(tmp_path / "run", **options)
    for row in lines(tmp_path / "run" / "completions.jsonl"):
        assert row["reward"] == 1 + (row["prompt"] == "2+2=")
    assert (tmp_path / "run" / "completions.jsonl").stat().st_size < 10**5


def test_a_failure_in_an_eval_is_said_and_counts_0(tmp_path, capsys):
    """Of ten rows one is paid: once in the greedy eval, and in one of its two samples."""
    text = """
calls = []
def mine(completion, row):
    calls.append(row["answer"])
    if row["answer"] != "5" or calls.count("5") == 2:
        raise KeyError("no such thing")
    return 1.0
"""
    eval_data = write(tmp_path, [dict(prompt=f"{i}+0=", answer=str(i)) for i in range(10)])
    options = dict(reward=rewards_in(tmp_path, text), eval_data=eval_data, max_steps=0)
    [metrics] = small_run(tmp_path / "run", eval_samples=2, **options)
    assert (metrics["eval_accuracy"], metrics["failed_rewards"]) == (0.1, 9)
    assert (metrics["eval_pass@1"], metrics["eval_pass@2"]) == (0.05, 0.1)
    assert "no such thing" in capsys.readouterr().out


def test_rewards_know_the_last_whole_step_and_the_epoch(tmp_path, capsys):
    text = """
def mine(completion, row):
    state = row["trainer_state"]
    print("state", state["global_step"], state["epoch"], state["max_steps"])
    return 0.0
"""
    options = dict(reward=rewards_in(tmp_path, text), eval_data=small_rows(tmp_path))
    small_run(tmp_path / "run", max_steps=2, eval_every=2, **options)
    states = [x for x in capsys.readouterr().out.splitlines() if x.startswith("state ")]
    # the eval before, steps 1 and 2 of three of five rows each, the eval after
    assert sorted(set(states), key=states.index) == [
        "state 0 0.0 2",
        "state 1 0.6 2",
        "state 2 1.2 2",
    ]


def test_the_newest_and_the_best_are_kept(tmp_path, monkeypatch):
    """An accuracy of 0 can be the best."""
    values = iter([-0.3, 0.0, -0.2, -0.1, -0.4])

    def evaluate(run):
        return dict(eval_accuracy=next(values), eval_stderr=0.0, eval_length=1.0)

    monkeypatch.setattr(grpo, "evaluate", evaluate)
    eval_data = small_rows(tmp_path)
    small_run(tmp_path / "run", eval_data=eval_data, eval_every=1, keep=2)
    assert [int(path[-6:]) for path in checkpoints(tmp_path / "run")] == [1, 3, 4]


def test_a_resume_has_the_flags_it_was_given_or_is_refused_untouched(tmp_path):
    out = tmp_path / "run"
    begun_run(out, 1)
    before = (out / "config.json").read_bytes()
    for changed in (dict(num_prompts=2), dict(seed=1), dict(lora_rank=2)):
        with pytest.raises(ConfigError, match=f"another {next(iter(changed))}"):
            small_run(out, resume=True, **changed)
        assert (out / "config.json").read_bytes() == before
    decayed = small_run(out, resume=True, max_steps=2, weight_decay=99.0, learning_rate=1e-2)
    weights = weights_of(out / "step_000002").norm() / weights_of(out / "step_000001").norm()
    assert len(decayed) == 2 and weights < 0.7  # norms and biases do not decay


def test_what_a_screen_cannot_show_ends_no_run(tmp_path, monkeypatch):
    (tmp_path / "été").mkdir()
    args = flags_of(small_config(tmp_path / "été" / "run", max_steps=1))
    screen = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(screen, "ascii"))
    assert main(*args) == 0
    assert b"\\xe9t\\xe9" in screen.getvalue()
    monkeypatch.setattr("sys.stdout", io.StringIO())  # has no reconfigure, as in a notebook
    assert main(*args, "--max_steps", "x") == 2


def test_none_is_said_with_its_number(tmp_path, capsys):
    text = "def mine(completion, row):\n    if len(completion) % 2: return 1.0\n"
    small_run(tmp_path / "run", reward=rewards_in(tmp_path, text) + ",overlong", max_steps=1)
    last = lines(tmp_path / "run" / "metrics.jsonl")[-1]
    said = re.search(r"mine returned None for (\d+) of 15 samples", capsys.readouterr().out)
    assert 0 < int(said[1]) < 15 and last["rewards/mine/mean"] == 1


def test_what_only_a_launcher_or_another_version_writes_is_one_line(tmp_path, monkeypatch, capsys):
    args = flags_of(small_config(tmp_path / "run", max_steps=0))
    assert main(*args) == 0
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    (tmp_path / "run" / "config.json").write_text(json.dumps(config | dict(old_flag=1)))
    assert main("--resume", "--out_dir", str(tmp_path / "run")) == 2
    monkeypatch.setenv("RANK", "0")
    assert main(*args) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert "old_flag" in first and "WORLD_SIZE" in second  # which is not set


@pytest.mark.slow
def test_without_a_compiler_layers_stay_as_they_are(tmp_path):
    args = flags_of(small_config(tmp_path / "run", compile="on", max_steps=1))
    env = dict(os.environ, CXX="/nowhere", CC="/nowhere", TORCHINDUCTOR_CACHE_DIR=str(tmp_path))
    done = run(*args, env=env)
    assert done.returncode == 0 and "--compile" in done.stdout, done.stderr
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["compile"] == "off"


def test_what_the_screen_says_of_a_step(tmp_path, capsys):
    """The prompt that it shows has its completion there, and so has one of the last step."""
    text = "def mine(completion, row):\n    return 0.0\n"
    rewards = dict(reward=f"{rewards_in(tmp_path, text)},format", max_completion_length=2)
    small_run(tmp_path / "run", eval_data=small_rows(tmp_path), max_steps=2, **rewards)
    said = capsys.readouterr().out
    first = lines(tmp_path / "run" / "completions.jsonl")[0]
    assert f"first prompt:\n{first['prompt']!r}\n" in said
    answers = said.split(f"to the prompt {first['prompt']!r}\n")
    assert len(answers) == 2 and f" {first['completion']!r}" in answers[1]
    assert said.count("the policy answers") == 2
    assert said.count("NO OPTIMIZER STEP") == 2  # no completion has the format
    assert said.count("\nmine 0 format 0\n") == said.count("earn nothing") == 2
    assert (
        "eval_accuracy is the mean of mine" in said
        and "5 prompts are in --train_data and in --eval_data" in said
    )
    assert "best checkpoint" not in said  # no checkpoint is better than what the run began with


def test_an_environment_with_reset_and_step_is_replayed_from_its_turns():
    play, score, rows = [
        load_function(f"{HERE}/sample_data/reset_step.py:{name}") for name in ADAPTER
    ]
    row = rows()[0]
    assert "between 1 and 20" in row["prompt"]
    hints = {guess: play([f"\\boxed{{{guess}}}"], row) for guess in range(1, 21)}
    [answer] = [guess for guess, hint in hints.items() if hint is None]
    assert "higher" in hints[answer - 1] and "lower" in hints[answer + 1]
    turns = [f"\\boxed{{{answer - 1}}}", f"\\boxed{{{answer}}}"]
    assert play(turns, row) is None
    assert score("", dict(row, turns=turns)) == 1
