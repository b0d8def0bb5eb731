"""Rows from files, and the prompts made from them."""

import json
import os
import re
import shutil
import subprocess
import sys
import types

import numpy as np
import pytest
import tokenizers

import grpo
import harness.rows
from grpo import Config
from harness.flags import ConfigError
from tests.common import BUNDLED, HERE, TEMPLATE, small_run
from tests.families import family

pytest_plugins = "tests.common"


@pytest.fixture
def rows(tmp_path):
    """rows(name, content) -> the rows of a file with that name and content."""

    def call(name, content):
        content = content if isinstance(content, bytes) else content.encode()
        (tmp_path / name).write_bytes(content)
        return harness.rows.read_rows(str(tmp_path / name), "train_data")

    return call


AB = [{"prompt": "a", "answer": "1"}, {"prompt": "b", "answer": "2"}]
LINES = '{"prompt": "a", "answer": "1"}\n\n{"prompt": "b", "answer": "2"}\n'


@pytest.mark.parametrize(
    "name, content, expected",
    [
        ("x.jsonl", LINES, AB),
        ("x", "\ufeff" + LINES.replace("\n", "\r\n"), AB),
        ("x.json", json.dumps(AB, indent=1), AB),
        ("X.JSON", json.dumps(AB), AB),
        ("x.jsonl", '{"a": "\u2028"}', [{"a": "\u2028"}]),  # a line separator, though not of JSONL
        ("x.csv", "prompt,answer\na,1\nb,2\n", AB),
        (
            "x.CSV",
            "\ufeffprompt,answer\r\na,1\r\n\r\nb,2",
            AB,
        ),  # as Excel writes it, with a blank line
        ("x.csv", 'a,b\n"x, ""y""\nz",\n', [{"a": 'x, "y"\nz', "b": ""}]),
        ("x.csv", ",a\n0,1\n", [{"": "0", "a": "1"}]),  # as pandas writes its index
    ],
)
def test_files_of_rows(rows, name, content, expected):
    assert rows(name, content) == expected


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("x.jsonl", '{"prompt": "a"}\n{"prompt": \n', " row 2: not valid JSON: "),
        ("x.jsonl", '{"prompt": "a"}\n[1]\n', " row 2: must be a JSON object"),
        ("x.jsonl", '{"a": [1, NaN]}', " row 1: Out of range float values are not JSON compliant"),
        ("x.jsonl", "[" * 100000, " row 1: "),
        ("x.jsonl", "\n\n", ": no rows"),
        ("x.jsonl", b"\xff\xfe\x00", ": 'utf-8' codec"),
        ("x.json", '[{"prompt": "a"}, 3]', " row 2: must be a JSON object"),
        ("x.json", "{", ": not valid JSON: "),
        (
            "x.json",
            '{"data": [{"prompt": "a"}]}',
            ' row 1: must be a JSON object; give a list of them: found["data"]',
        ),
        ("x.csv", "", ": no rows"),
        (
            "x.csv",
            "a,b\n1,2\n1,2,3\n",
            " row 2: number of fields differs from the header: a, b",
        ),
        ("x.csv", "a,b\n1,2\n\n3\n", " row 2: number of fields differs from the header: a, b"),
        (
            "x.csv",
            'a,b\n1,2\n"3,4\n5,6\n',
            " row 2: unexpected end of data",
        ),
        ("x.csv", 'a,b\n"1,2\n"3,4\n', " row 1: "),
    ],
)
def test_bad_files_are_named(rows, name, content, message):
    with pytest.raises(ConfigError) as error:
        rows(name, content)
    assert re.fullmatch(f"--train_data .*{re.escape(name)}{re.escape(message)}.*", str(error.value))


FUNCTIONS = """
import numpy as np
class Frame(dict):
    "Like a DataFrame of pandas: iterating gives the names of its columns."
loop = []
loop.append(loop)
def rows():
    yield {"prompt": "1+1=", "x": (1, 2)}
def numpy():
    chat = np.array([{"role": "user", "content": "1"}])
    return [{"prompt": chat, "x": np.float32(1)}]
def needs(): raise ImportError("needs x: pip install x")
def none(): return None
def column(): return Frame(prompt=["a", "b"])
def function(): return [{"x": 1}, {"x": lambda: 1}]
def keys(): return [{"x": 1}, {"x": {(1, 2): 3}}]
def nan(): return [{"x": 1}, {"x": [float("nan")]}]
def cycle(): return [{"x": 1}, {"x": loop}]
def later():
    yield {"x": 1}
    raise ValueError("no second row")
"""


def test_rows_from_python(tmp_path, encode):
    (tmp_path / "mine.py").write_text(FUNCTIONS)

    def read_rows(name):
        return harness.rows.read_rows(f"{tmp_path}/{name}", "train_data")

    assert read_rows("mine.py:rows") == [{"prompt": "1+1=", "x": (1, 2)}]
    [row] = read_rows("mine.py:numpy")
    assert row["x"] == 1.0
    for name, message in (
        ("mine.py:needs", ": needs x: pip install x"),
        ("mine.py:nothing", ": .*nothing"),
        ("mine.py:none", ": .*None"),
        ("other.py:rows", ": .*No such file"),
        ("mine.py:column", r' row 1: must be a JSON object; .* frame.to_dict\("records"\)'),
        ("mine.py:function", " row 2: .*lambda"),
        ("mine.py:keys", " row 2: keys must be str, .* not tuple"),
        ("mine.py:nan", " row 2: Out of range float values .*"),
        ("mine.py:cycle", " row 2: Circular reference detected"),
        ("mine.py:later", " row 2: no second row"),
    ):
        with pytest.raises(ConfigError, match=f"--train_data .*{name}{message}"):
            read_rows(name)
    [metrics] = small_run(
        tmp_path / "out", train_data=f"{tmp_path}/mine.py:rows", max_steps=1, num_minibatches=1
    )
    assert metrics["tokens"] > 0


def test_hub_datasets_and_parquet_go_through_datasets(monkeypatch, tmp_path):
    calls = []

    def load_dataset(path, name=None, **options):
        calls.append((path, name, options))
        return [{"prompt": "1"}]

    fake = types.SimpleNamespace(load_dataset=load_dataset)
    monkeypatch.setitem(sys.modules, "datasets", fake)
    for spec in (
        "openai/gsm8k:main:test",
        "org/name",
        "org/name-1.5::dev",
        str(tmp_path / "x.parquet"),
    ):
        assert harness.rows.read_rows(spec, "train_data") == [{"prompt": "1"}]
    parquet = dict(data_files=str(tmp_path / "x.parquet"), split="train")
    assert calls[:2] == [
        ("openai/gsm8k", "main", dict(split="test")),
        ("org/name", None, dict(split="train")),
    ]
    assert calls[2:] == [("org/name-1.5", None, dict(split="dev")), ("parquet", None, parquet)]
    fake.load_dataset = lambda *_, **__: []
    with pytest.raises(ConfigError, match="--train_data org/name: no rows"):
        harness.rows.read_rows("org/name", "train_data")
    fake.load_dataset = lambda *_, **__: 1 / 0
    with pytest.raises(ConfigError, match="--train_data org/name: division by zero"):
        harness.rows.read_rows("org/name", "train_data")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ConfigError, match="--train_data org/name: .*datasets"):
        harness.rows.read_rows("org/name", "train_data")
    # its ending says that this is a file
    with pytest.raises(ConfigError, match="--train_data data/none.jsonl: .*No such file"):
        harness.rows.read_rows("data/none.jsonl", "train_data")


def test_prompts_are_encoded_once_and_long_ones_dropped(encode, capsys):
    rows = [{"prompt": "1+2=", "answer": "3"}, {"prompt": "1" * 50, "answer": "0"}]
    prompts = encode(rows, columns=["answer"], max_prompt_length=10)
    assert [p.text for p in prompts] == ["1+2="]
    assert prompts[0].ids.dtype == np.int32 and len(prompts[0].ids) == 4
    limit = "1 of 2 prompts are left out, longer than --max_prompt_length 10"
    assert limit in capsys.readouterr().out


NO_MESSAGE = "row 1: each message must have a role and a text as its content: "


@pytest.mark.parametrize(
    "row, options, message",
    [
        (dict(prompt="1" * 50), {}, "every prompt is longer than --max_prompt_length 10"),
        (dict(prompt=""), {}, "row 1: empty prompt"),
        (
            dict(prompt=5),
            {},
            "row 1: empty prompt, or one that is neither a string nor a list of messages: 5",
        ),
        (dict(prompt=[]), {}, "row 1: empty prompt, or one"),
        (dict(prompt="\ud800"), {}, "row 1: "),
        (dict(prompt=None), {}, "row 1: no column 'prompt'; see --prompt_template"),
        (dict(question="1"), {}, "row 1: no column 'prompt'; see --prompt_template"),
        (
            dict(prompt="1", answer=None),
            {},
            "row 1: no column 'answer'; see --reward answer",
        ),
        (
            dict(prompt="1", answer=...),
            {},
            "row 1: no column 'answer'; see --reward answer",
        ),
        (
            dict(prompt=[dict(role="user", content="1")]),
            {},
            "row 1: a chat needs a chat template, and the tokenizer has none",
        ),
        (dict(prompt=[dict(role="user", content=7)]), {}, NO_MESSAGE),
        (dict(prompt=[dict(role="user")]), {}, NO_MESSAGE + "[{'role': 'user'}]"),
        (dict(prompt=[dict(content="1")]), {}, NO_MESSAGE + "[{'content': '1'}]"),
        (dict(prompt=["user"]), {}, NO_MESSAGE + "['user']"),
        (
            dict(prompt="1"),
            dict(prompt_template="{c}"),
            "row 1: no column 'c'; see --prompt_template",
        ),
        (
            dict(prompt="1", c=None),
            dict(prompt_template="{c}"),
            "row 1: no column 'c'; see --prompt_template",
        ),
        *(
            (
                dict(prompt="1"),
                dict(prompt_template=template),
                f"--prompt_template {template}: names no column; ",
            )
            for template in ("{prompt!r}", "{ prompt }", "{}", "plain text", "{a", "\\boxed{}")
        ),
    ],
)
def test_bad_prompts_are_named(encode, row, options, message):
    row = {k: v for k, v in (dict(answer="") | row).items() if v is not ...}
    with pytest.raises(ConfigError) as error:
        encode([row], columns=["answer"], max_prompt_length=10, **options)
    assert message in str(error.value) and "\n" not in str(error.value)
    assert str(error.value).startswith(
        "--prompt_template" if "names no" in message else "--train_data "
    )


def test_prompt_template_and_show_prompt(encode, tmp_path, capsys):
    rows = [{"a": 12, "b": [3, 4], "answer": "15"}]
    for template, text in (
        ("{a}+\\n=", "12+\n="),
        ("{a}{}", "12{}"),
        ("{a} \\boxed{}", "12 \\boxed{}"),
        (
            "{a} {a!r} {a:d} {a.x} {b[0]} {a:>1000000000}",
            "12 {a!r} {a:d} {a.x} {b[0]} {a:>1000000000}",
        ),
    ):
        assert encode(rows, prompt_template=template)[0].text == text
    out = tmp_path / "out"
    options = grpo.BUNDLED | dict(prompt_template="{answer}+1=", show_prompt=True, out_dir=str(out))
    assert grpo.train(Config(**options)) == []
    text, ids = capsys.readouterr().out.splitlines()
    assert text.endswith("+1=") and not out.exists()
    assert harness.rows.load_tokenizer(BUNDLED).decode(json.loads(ids)) == text


@pytest.mark.parametrize(
    "template, text",
    [
        ("{q}\\nThink first.", "7\nThink first."),  # as a shell passes it
        ("{q}\\nthink", "7\\nthink"),  # as LaTeX; a capital, or a real line break
        ("{q}\\n\\n{q}", "7\n\n7"),
        ("{q}\n=", "7\n="),
        ("a\\neq b {q}", "a\\neq b 7"),
        ("\\nabla \\nu \\not\\ni \\ne{q}", "\\nabla \\nu \\not\\ni \\ne7"),
        ("{q}", "7"),
    ],
)
def test_line_breaks_of_a_template(template, text):
    """Not the n of LaTeX's commands, nor what stands in a column."""
    assert harness.rows.fill_template(template, dict(q="7")) == text
    assert harness.rows.fill_template("{q}", dict(q="a\\nb")) == "a\\nb"


def test_an_empty_template_is_not_the_column_prompt(encode):
    with pytest.raises(ConfigError, match="row 1: empty prompt"):
        encode([dict(prompt="1+2=", q="")], prompt_template="{q}")


def test_columns_with_names_of_the_trainer_are_named(encode, capsys):
    encode([dict(prompt="1+2=", answer="3", completion="x")])
    assert "warning" not in capsys.readouterr().out
    encode([dict(prompt="1+2=", finish_reason="x"), dict(prompt="1+2=", prompts="y")])
    out = capsys.readouterr().out
    assert "columns finish_reason: under these names rewards get the trainer's values" in out
    assert "columns prompts: under these names rewards like TRL's get the trainer's values" in out


ODD_ROWS = """
import sys; sys.path.insert(0, {folder!r})
import numpy as np
from harness.rows import Prompt, fingerprint_of_data
class Thing:
    pass
row = dict(a=Thing(), b={{"x", "y", "z"}}, c=np.arange(3), d={{1: 2, "e": 3}})
print(fingerprint_of_data([Prompt(np.arange(3, dtype=np.int32), "", row)]))
"""


def test_the_fingerprint_of_the_data():
    def fingerprint(*pairs):
        prompts = [grpo.Prompt(np.array(ids, np.int32), "", row) for ids, row in pairs]
        return harness.rows.fingerprint_of_data(prompts)

    one, two = ([1, 2], dict(answer="3")), ([1], dict(answer="4"))
    expected = fingerprint(one, two)
    assert expected == fingerprint(one, two) and re.fullmatch("[0-9a-f]{16}", expected)
    others = [
        fingerprint(two, one),
        fingerprint(one),
        fingerprint(one, ([1], dict(answer=4))),
        fingerprint(([1, 3], dict(answer="3")), two),
    ]
    assert len({expected, *others}) == 5
    code = ODD_ROWS.format(folder=HERE)  # addresses and the order of a set differ by process
    runs = []
    for seed in ("1", "2"):
        env = os.environ | dict(PYTHONHASHSEED=seed)
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, env=env, cwd=HERE, capture_output=True, text=True)
        runs.append(done.stdout)
    assert runs[0] == runs[1] != "", done.stderr


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
    begun = [{"role": "user", "content": "12"}, {"role": "assistant", "content": "3"}]
    assert encode([{"prompt": begun}], tokenizer)[0].text == "123"  # the policy goes on with it
    assert harness.rows.encode_prompt(dict(prompt=np.str_("12")), tokenizer, Config()).text == "12"
    assert "do not go through the model's chat template" not in capsys.readouterr().out
    assert encode([{"prompt": "12"}], tokenizer)[0].text == "12"
    warning = "string prompts do not go through the model's chat template; --chat does that"
    assert warning in capsys.readouterr().out
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(ConfigError, match="row 1: roles must alternate"):
        encode(chat, tokenizer)


def test_no_end_token_at_the_end_of_a_string_prompt(encode):
    """After supervised training a tokenizer often ends every text with EOS (add_eos_token)."""
    tokenizer = harness.rows.load_tokenizer(BUNDLED)
    plain = encode([dict(prompt="1+2=")], tokenizer)[0].ids.tolist()
    eos = (tokenizer.eos_token, tokenizer.eos_token_id)
    ends = tokenizers.processors.TemplateProcessing(f"$A {eos[0]}", special_tokens=[eos])
    tokenizer.backend_tokenizer.post_processor = ends
    assert tokenizer("1+2=")["input_ids"] == [*plain, eos[1]]
    assert encode([dict(prompt="1+2=")], tokenizer)[0].ids.tolist() == plain
    # the prompt's own EOS stays, and so does the template's
    ended = [*plain, eos[1]]
    assert encode([dict(prompt=f"1+2={eos[0]}")], tokenizer)[0].ids.tolist() == ended
    tokenizer.chat_template = "{% for m in messages %}{{ m.content + eos_token }}{% endfor %}"
    assert encode([dict(prompt="1+2=")], tokenizer, chat=True)[0].ids.tolist() == ended


def test_a_directory_without_a_tokenizer_is_named(tmp_path):
    for folder, files, message in (
        ("weights", ("tokenizer.json", "tokenizer_config.json"), "has no tokenizer files"),
        ("half", ("tokenizer.json",), "no tokenizer can be loaded: "),
    ):
        path = tmp_path / folder
        shutil.copytree(BUNDLED.model, path)
        for name in files:
            os.remove(path / name)
        for cfg in (Config(model=str(path)), Config(model=BUNDLED.model, tokenizer=str(path))):
            flag = "tokenizer" if cfg.tokenizer else "model"
            with pytest.raises(ConfigError, match=f"--{flag} {path}: {message}"):
                harness.rows.load_tokenizer(cfg)
    path, _ = family(tmp_path / "qwen2", "qwen2")
    os.remove(path / "tokenizer.json")  # its added tokens alone are no tokenizer
    with pytest.raises(ConfigError, match="has no tokenizer files"):
        harness.rows.load_tokenizer(Config(model=str(path)))
    (path / "adapter_config.json").write_text("{}")
    message = f"^--model {path}: is a LoRA adapter; merge it into its model"
    with pytest.raises(ConfigError, match=message):
        harness.rows.load_tokenizer(Config(model=str(path), tokenizer=BUNDLED.model))


GSM8K = dict(prompt_template="{question}", max_prompt_length=5000)


@pytest.mark.parametrize(
    "data, options",
    [
        (
            "gsm8k_train.jsonl",
            dict(reward="gsm8k,overlong", system_prompt="Think.", beta=0, **GSM8K),
        ),
        (
            "gsm8k_train.jsonl",
            dict(reward="math", call_timeout=100, ratio_level="sequence", **GSM8K),
        ),
        (
            "countdown.jsonl",
            dict(reward="countdown,format:0.1", scale_rewards="none", loss_reduction="constant"),
        ),
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
    sizes = dict(max_steps=1, num_minibatches=1, num_prompts=1, num_generations=2)
    [metrics] = small_run(tmp_path / "out", train_data=path, **(sizes | options))
    assert not [key for key in metrics if key.startswith("reward_failed")]
    assert metrics["tokens"] > 0
