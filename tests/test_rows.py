"""TODO."""

import json
import os
import re
import sys
import types

import numpy as np
import pytest

import grpo
import harness.rows
from grpo import Config
from harness.flags import ConfigError
from tests.common import BUNDLED, HERE, TEMPLATE, small_run

pytest_plugins = "tests.common"


def test_bad_files_are_named(tmp_path):
    def rows(text, name="x.jsonl"):
        (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
        return harness.rows.read_rows(str(tmp_path / name), "train_data")

    assert rows('{"prompt": "a"}\n\n{"prompt": "b"}\n') == [{"prompt": "a"}, {"prompt": "b"}]
    assert rows('[{"prompt": "a"}]', "x.json") == [{"prompt": "a"}]
    assert rows('prompt,answer\n"a, b",1\n', "x.csv") == [{"prompt": "a, b", "answer": "1"}]
    assert rows(b"\xef\xbb\xbfprompt,answer\na,1\n", "x.csv") == [{"prompt": "a", "answer": "1"}]  # as Excel writes it
    for text, message in (
        ('{"prompt": "a"}\n{"prompt": \n', "row 2: not valid JSON"),
        ('{"prompt": "a"}\n[1]\n', "row 2: must be a JSON object"),
        ("\n\n", "no rows"),
        (b"\xff\xfe\x00", "train_data"),
        ("[" * 100000, "row 1"),
    ):
        with pytest.raises(ConfigError, match=re.escape(message)) as error:
            rows(text)
        assert "--train_data" in str(error.value) and "x.jsonl" in str(error.value)
    with pytest.raises(ConfigError, match="No such file"):
        harness.rows.read_rows(str(tmp_path / "none.jsonl"), "train_data")
    with pytest.raises(ConfigError, match="row 2"):
        rows('[{"prompt": "a"}, 3]', "x.json")


def test_rows_from_python(tmp_path):
    (tmp_path / "mine.py").write_text(
        "def rows():\n    yield {'prompt': '1+1='}\ndef needs():\n    raise ImportError('needs x: pip install x')\n"
        "def none(): return None\n"
    )

    def read_rows(name):
        return harness.rows.read_rows(f"{tmp_path}/{name}", "train_data")

    assert read_rows("mine.py:rows") == [{"prompt": "1+1="}]
    for name, message in (
        ("mine.py:needs", "needs x: pip install x"),
        ("mine.py:nothing", "nothing"),
        ("mine.py:none", "None"),
        ("other.py:rows", "no file"),
    ):
        with pytest.raises(ConfigError, match=f"--train_data .*{name}: .*{message}"):
            read_rows(name)
    [metrics] = small_run(tmp_path / "out", train_data=f"{tmp_path}/mine.py:rows", max_steps=1, num_minibatches=1)
    assert metrics["tokens"] > 0


def test_prompts_are_encoded_once_and_long_ones_dropped(encode, capsys):
    rows = [{"prompt": "1+2=", "answer": "3"}, {"prompt": "1" * 50, "answer": "0"}]
    prompts = encode(rows, columns=["answer"], max_prompt_length=10)
    assert [p.text for p in prompts] == ["1+2="] and prompts[0].ids.dtype == np.int32 and len(prompts[0].ids) == 4
    assert "1 of 2 prompts are left out, longer than --max_prompt_length 10" in capsys.readouterr().out


@pytest.mark.parametrize(
    "prompt, message",
    [
        ("1" * 50, "every prompt is longer than --max_prompt_length 10"),
        ("", "row 1: empty prompt"),
        (5, "row 1: empty prompt, or one that is neither a string nor a list of messages: 5"),
        (None, "row 1: empty prompt, or one"),
        ([], "row 1: empty prompt, or one"),
        ("\ud800", "row 1: "),
        ([{"role": "user", "content": "1"}], "row 1: chat messages, but the tokenizer has no chat template"),
        ([{"role": "user", "content": 7}], "row 1: a message's content must be text: 7"),
        (["user"], "row 1: "),
        ([{"content": "1"}], "row 1: "),
    ],
)
def test_bad_prompts_are_named(encode, prompt, message):
    with pytest.raises(ConfigError) as error:
        encode([{"prompt": prompt, "answer": ""}], max_prompt_length=10)
    assert message in str(error.value) and "\n" not in str(error.value) and "rows.jsonl" in str(error.value)


def test_missing_columns_are_named(encode):
    for row, message in (
        ({"prompt": "1+1="}, "row 1: no column 'answer', which --reward answer reads"),
        ({"question": "", "answer": ""}, "row 1: no column 'prompt'; see --prompt_template"),
    ):
        with pytest.raises(ConfigError, match=re.escape(message)):
            encode([row], columns=["answer"])


def test_chat_prompts_go_through_the_template_with_one_bos(encode, capsys):
    tokenizer = harness.rows.load_tokenizer(BUNDLED)
    tokenizer.chat_template = TEMPLATE
    chat = [{"prompt": [{"role": "user", "content": "12"}]}]
    [p] = encode(chat, tokenizer)
    assert p.text == "12+" and tokenizer.decode(p.ids) == "12+" and p.messages == chat[0]["prompt"]
    assert encode(chat, tokenizer, system_prompt="9")[0].text == "=9=12+"
    assert encode([{"prompt": "12"}], tokenizer, system_prompt="9")[0].text == "=9=12+"
    assert encode([{"prompt": "12"}], tokenizer, chat=True)[0].text == "12+"
    thinking = dict(chat=True, chat_template_kwargs='{"enable_thinking": true}')
    assert encode([{"prompt": "12"}], tokenizer, **thinking)[0].text == "12+++"
    parts = [{"type": "text", "text": "1"}, {"type": "text", "text": "2"}]
    assert encode([{"prompt": [{"role": "user", "content": parts}]}], tokenizer)[0].text == "12+"
    begun = [{"role": "user", "content": "12"}, {"role": "assistant", "content": "3"}]
    assert encode([{"prompt": begun}], tokenizer)[0].text == "123"  # the policy goes on with it
    assert "do not go through the model's chat template" not in capsys.readouterr().out
    assert encode([{"prompt": "12"}], tokenizer)[0].text == "12"
    assert "string prompts do not go through the model's chat template; --chat does that" in capsys.readouterr().out
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(ConfigError, match="row 1: chat template: roles must alternate"):
        encode(chat, tokenizer)


def test_prompt_template_and_show_prompt(encode, tmp_path, capsys):
    rows = [{"a": 12, "b": [3, 4], "answer": "15"}]
    for template, text in (
        ("{a}+\\n=", "12+\n="),
        ("{a}{}", "12{}"),
        ("{a} \\boxed{}", "12 \\boxed{}"),
        ("{a} {a!r} {a:d} {a.x} {b[0]} {a:>1000000000}", "12 {a!r} {a:d} {a.x} {b[0]} {a:>1000000000}"),
        ("{a", "{a"),
    ):
        assert encode(rows, prompt_template=template)[0].text == text
    with pytest.raises(ConfigError, match=re.escape("row 1: no column 'c'")):
        encode(rows, prompt_template="{a}{c}")
    with pytest.raises(ConfigError, match="row 1: no column 'd'"):  # a short row of a CSV
        encode([{"a": 1, "d": None}], prompt_template="{a}{d}")
    out = tmp_path / "out"
    options = grpo.BUNDLED | dict(prompt_template="{answer}+1=", show_prompt=True, out_dir=str(out))
    assert grpo.train(Config(**options)) == []
    text, ids = capsys.readouterr().out.splitlines()
    assert text.endswith("+1=") and not out.exists()
    assert harness.rows.load_tokenizer(BUNDLED).decode(json.loads(ids)) == text


@pytest.mark.parametrize(
    "data, options",
    [
        ("gsm8k_train.jsonl", dict(reward="gsm8k", prompt_template="{question}", system_prompt="Think.")),
        (
            "gsm8k_train.jsonl",
            dict(
                reward="gsm8k,overlong",
                prompt_template="{question}",
                scale_rewards="none",
                loss_reduction="constant",
                beta=0,
            ),
        ),
        (
            "gsm8k_train.jsonl",
            dict(
                reward="math",
                reward_timeout=100,
                prompt_template="{question}",
                ratio_level="sequence",
                loss_reduction="sequence",
                clip_low=3e-4,
            ),
        ),
        ("countdown.jsonl", dict(reward="countdown,format:0.1")),
    ],
)
def test_the_recipes_data_template_and_rewards_run(data, options, tmp_path, monkeypatch):
    if options["reward"] == "math":
        pytest.importorskip("math_verify")
    load = harness.rows.load_tokenizer

    def with_template(cfg):
        tokenizer = load(cfg)
        tokenizer.chat_template = "{% for m in messages %}{{ m.content }}={% endfor %}"
        return tokenizer

    monkeypatch.setattr(harness.rows, "load_tokenizer", with_template)
    path = os.path.join(HERE, "sample_data", data)
    options = dict(max_steps=1, max_prompt_length=5000, num_minibatches=1, train_data=path) | options
    [metrics] = small_run(tmp_path / "out", **options)
    assert not [key for key in metrics if key.startswith("reward_failed")] and metrics["tokens"] > 0


def test_hub_datasets_and_parquet_go_through_datasets(monkeypatch, tmp_path):
    asked = []
    fake = types.SimpleNamespace(
        load_dataset=lambda *args, **options: asked.append((args, options)) or [{"prompt": "1"}]
    )
    monkeypatch.setitem(sys.modules, "datasets", fake)
    for spec in ("openai/gsm8k:main:test", "org/name", "org/name::dev", str(tmp_path / "x.parquet")):
        assert harness.rows.read_rows(spec, "train_data") == [{"prompt": "1"}]
    parquet = dict(data_files=str(tmp_path / "x.parquet"), split="train")
    assert asked[:2] == [(("openai/gsm8k", "main"), dict(split="test")), (("org/name", None), dict(split="train"))]
    assert asked[2:] == [(("org/name", None), dict(split="dev")), (("parquet",), parquet)]
    fake.load_dataset = lambda *_, **__: []
    with pytest.raises(ConfigError, match="--train_data org/name: no rows"):
        harness.rows.read_rows("org/name", "train_data")
    fake.load_dataset = lambda *_, **__: 1 / 0
    with pytest.raises(ConfigError, match="--train_data org/name: division by zero"):
        harness.rows.read_rows("org/name", "train_data")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ConfigError, match="--train_data org/name: .* pip install datasets"):
        harness.rows.read_rows("org/name", "train_data")
