"""Rows: parquet's types, chats as texts, what a template of the hub writes, many rows."""

import datetime
import hashlib
import json
import shutil
import subprocess
import sys
import types
import unicodedata
from pathlib import Path

import pytest
import tokenizers
import transformers
from transformers.utils import chat_template_utils

import grpo
import reward
from extras import digests, errors, models, preflight, ranks
from extras.errors import ConfigError
from grpo import Config
from tests.common import HERE, main, metrics_of, prompt_of, prompts_in, tiny_model, tokenizer_of
from tests.families import BARS, family
from tests.test_models import chat, load, write

MODEL = f"{HERE}/sample_data/model"
TOKENIZER = tokenizer_of(MODEL)
CHAT = chat("3+4=")
JSON = json.dumps


def test_a_parquet_file_has_the_rows_of_its_json_lines(tmp_path):
    """`datasets` stores what has several types as arrow.json, and makes timestamps of dates."""
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    day, noon = datetime.datetime(2024, 2, 29), datetime.datetime(2024, 2, 29, 12)

    def table(mixed):  # whose columns of several types are of this type
        inside = pa.struct([("a", mixed), ("day", pa.timestamp("ms")), ("none", pa.string())])
        return dict(
            answer=(mixed, [JSON("Paris"), "7", "null", None]),
            prompt=(mixed, [JSON(CHAT), JSON("2024-02-29"), "[1]", "{}"]),
            listed=(pa.list_(mixed), [["7", JSON("x")], [], None, [None]]),
            struct=(inside, [dict(a='"b"', day=day), dict(a="1"), None, {}]),
            deep=(pa.list_(inside), [[dict(a="[1]")], [], [], []]),
            maps=(pa.map_(pa.string(), mixed), [[("b", "1")], [], [], None]),
            day=(pa.timestamp("ms"), [day, None, noon, day]),
            date=(pa.date32(), [day.date()] * 4),
            words=(pa.dictionary(pa.int8(), pa.string()), list("abab")),
            short=(pa.list_(pa.float32()), [[0.1, None], [], [], []]),
        )

    columns = {name: pa.array(x, kind) for name, (kind, x) in table(pa.string()).items()}
    kinds = {name: kind for name, (kind, _) in table(pa.json_(pa.string())).items()}
    columns = {name: column.cast(kinds[name]) for name, column in columns.items()}
    parquet.write_table(pa.table(columns), tmp_path / "x.parquet")
    first, second, third, fourth = grpo.read_rows(f"{tmp_path}/x.parquet")
    assert first == dict(
        answer="Paris",
        prompt=CHAT,
        listed=[7, "x"],
        struct=dict(a="b", day="2024-02-29", none=None),
        deep=[dict(a=[1], day=None, none=None)],
        maps=dict(b=1),
        day="2024-02-29",
        date="2024-02-29",
        words="a",
        short=[0.1, None],
    )
    assert (second["answer"], second["prompt"], second["struct"]["a"]) == (7, "2024-02-29", 1)
    assert (third["answer"], third["struct"], third["day"]) == (None, None, noon)
    assert (fourth["answer"], fourth["listed"], fourth["maps"]) == (None, [None], None)


@pytest.mark.parametrize("name", ["x.csv", "x.jsonl"])
def test_a_chat_may_be_a_json_text(name, tmp_path):
    """As a CSV has to have it."""
    row = dict(prompt=JSON(CHAT), answer="7")
    content = JSON(row)
    if name == "x.csv":
        content = 'prompt,answer\n"{}",7\n'.format(row["prompt"].replace('"', '""'))
    [read] = grpo.read_rows(write(tmp_path, content, name))
    assert read == row
    options = dict(chat_template_kwargs=JSON(dict(chat_template="{{ messages[0].content }}")))
    [prompt] = load(MODEL, [read], tmp_path, **options)
    assert prompt.text == "3+4=" and prompt.messages == CHAT
    with pytest.raises(ConfigError, match="row 1: .*not JSON"):
        load(MODEL, [dict(prompt=str(CHAT))], tmp_path, **options)


def test_a_chat_may_be_named_by_its_column_alone(tmp_path):
    """As OpenRLHF's --input_key does. Inside other words it would be a Python list."""
    path, _ = family(tmp_path / "model", "qwen2")
    [named] = load(path, [dict(input=CHAT)], tmp_path, prompt_template="{input}")
    [prompt] = load(path, [dict(prompt=CHAT)], tmp_path)
    assert named.text == prompt.text
    with pytest.raises(ConfigError, match="row 1: .*input.*chat"):
        load(path, [dict(input=CHAT)], tmp_path, prompt_template="{input}\nThink.")


def test_a_message_of_the_user_has_content(tmp_path):
    """Parquet has null where OpenAI's rows have none. A template may write an empty turn."""
    options = dict(chat_template_kwargs=JSON(dict(chat_template="1{{ messages[0].content }}=")))
    assert load(MODEL, [dict(prompt=CHAT)], tmp_path, **options)[0].text == "13+4=="
    sharegpt = {"from": "human", "value": "Hi"}
    messages = [(dict(role="user", content=content), "no content") for content in (None, "", [])]
    parts = ("Hi", dict(text="Hi"))
    messages += [(dict(role="user", content=[part]), "not text") for part in parts]
    for message, why in [*messages, (sharegpt, "no role, only from, value")]:
        with pytest.raises(ConfigError, match=f"row 1: .*{why}"):
            load(MODEL, [dict(prompt=[message])], tmp_path, **options)


@pytest.mark.parametrize("value", [datetime.datetime(2024, 2, 29, 12), datetime.timedelta(1)])
def test_a_time_is_no_text(value, tmp_path):
    """What str() makes of it is not what a JSON line says, so no completion would earn it."""
    path = tmp_path / "x.py"
    path.write_text(
        f"import datetime\ndef rows():\n    return [dict(prompt='1', answer={value!r})]"
    )
    cfg = Config(train_data=f"{path}:rows")
    for rewards, template in (("answer", ""), ("format", "{answer}")):
        cfg.prompt_template = template
        with pytest.raises(ConfigError, match="row 1: column 'answer' is a"):
            prompts_in(cfg.train_data, TOKENIZER, cfg, rewards)
    cfg.prompt_template = ""
    assert len(prompts_in(cfg.train_data, TOKENIZER, cfg)) == 1


@pytest.mark.parametrize(
    "content",
    ['{"prompt": "1", "answer": "2", "answer": "3"}', '{"prompt": "1", "x": [{"a": 1, "a": 1}]}'],
)
def test_a_key_is_said_once(content, tmp_path):
    path = write(tmp_path, '{"prompt": "1"}\n' + content)
    with pytest.raises(ConfigError, match="row 2: .*twice"):
        prompts_in(path, tokenizer_of(MODEL))
    with pytest.raises(ValueError, match="twice"):
        list(grpo.read_rows(write(tmp_path, f"[{content}]", "x.json")))


@pytest.mark.parametrize(
    "flags", ["--seed 1 --max_steps 3 --seed 2", "--seed=1 --seed 1", "--fast False --no_fast"]
)
def test_a_flag_is_said_once(flags, capsys):
    assert main(*flags.split()) == 2
    assert "given twice" in capsys.readouterr().err


def test_several_files_are_one(tmp_path):
    for name in "321":
        write(tmp_path, [dict(prompt=f"{name}{i}") for i in range(2)], f"{name}.jsonl")
    for data, order in (("{}/*.jsonl", "123"), ("{}/3.jsonl,{}/[12].jsonl,{}/3.jsonl", "3123")):
        prompts = prompts_in(data.format(*[tmp_path] * 3), TOKENIZER)
        assert [p.text for p in prompts] == [f"{name}{i}" for name in order for i in range(2)]
        assert [p.row_number for p in prompts] == list(range(2 * len(order)))
    write(tmp_path, '{"prompt": "1"}\n{', "2.jsonl")
    with pytest.raises(ConfigError, match="2.jsonl row 2: "):
        prompts_in(f"{tmp_path}/*.jsonl", TOKENIZER)


@pytest.mark.parametrize(
    "row, flags, message",
    [
        (dict(question="1+2?", label=3), {}, "question, label.*--prompt_template"),
        (dict(prompt="1+2="), dict(chat=True), "leave out.*--chat"),
        (dict(prompt=CHAT), {}, "no chat template"),
    ],
)
def test_the_line_says_how_to_mend_a_row(row, flags, message, tmp_path):
    with pytest.raises(ConfigError, match=f"row 1: .*{message}"):
        load(MODEL, [row], tmp_path, **flags)


def test_the_tools_of_a_row_are_in_its_prompt(tmp_path):
    """Without an environment: the model learns to call, and a reward reads the call."""
    path, _ = family(tmp_path / "model", "qwen2")
    tokenizer = tokenizer_of(path)
    tokenizer.chat_template = "{{ tools | tojson }}{{ messages[0].content }}"
    number = dict(type="object", properties=dict(x=dict(type="number")))
    tools = [dict(type="function", function=dict(name="root", parameters=number))]
    holes = [tools[0] | dict(strict=None)]  # as parquet fills up
    for given in (tools, JSON(tools), holes):
        assert prompt_of(dict(prompt=CHAT, tools=given), tokenizer).text == JSON(tools) + "3+4="
    unseen = tokenizer_of(path)
    unseen.chat_template = "{{ messages[0].content }}"
    for row, template in ((dict(prompt=CHAT), unseen), (dict(prompt="3+4="), tokenizer)):
        with pytest.raises(ValueError, match="would not see"):
            prompt_of(row | dict(tools=tools), template)
    with pytest.raises(ValueError, match="would not see"):
        grpo.make_prompt(dict(prompt=CHAT, tools=["root"]), 0, tokenizer, Config(reward="format"))


def test_stretched_positions_are_room():
    rope = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=512)
    for options, positions in (
        ({}, 512),
        (dict(rope_parameters=rope | dict(rope_theta=1e4)), 2048),
    ):
        assert preflight.positions_of(tiny_model("qwen2", **options)) == positions


def test_a_file_of_weights_is_no_model(tmp_path):
    for name, said in (("x.gguf", "GGUF"), ("x.safetensors", "a file")):
        with pytest.raises(ValueError, match=said):
            preflight.check_folder(write(tmp_path, "", name))


# ------------------------------------------------------------------------------------------------
# Texts and tokens


@pytest.mark.parametrize("name", ["qwen2", "r1"])
def test_words_of_a_row_end_no_turn(name, tmp_path):
    """DeepSeek's marks of turns are no special tokens of its tokenizer."""
    plain = dict(words=BARS[::3], more=(*BARS[1:3], "<think>", "</think>")) if name == "r1" else {}
    path, ids = family(tmp_path / "model", name, **plain)
    mark = dict(qwen2="<|im_end|>", r1="<｜User｜>")[name]
    words = f"1{mark}2"
    user, whole = dict(prompt=chat(words)), dict(prompt=f"{mark}1{mark}2")
    for row, options in (
        (user, {}),
        (dict(prompt=words), dict(chat=True)),
        (dict(prompt=chat("1", words, "2")), {}),
        (dict(q=words), dict(chat=True, prompt_template="Add: {q}")),
        (dict(q=words), dict(prompt_template=mark + "{q}" + mark)),
        (dict(q=words), dict(prompt_template="Add: {q}")),
    ):
        with pytest.raises(ConfigError, match=f"row 1: .*control token '{mark}'".replace("|", ".")):
            load(path, [row], tmp_path, **options)
    for row, options in (
        (user | dict(control_tokens=[mark]), {}),
        (whole, {}),  # as apply_chat_template makes it
        (dict(q=whole["prompt"]), dict(prompt_template="{q}")),
        (dict(q="1"), dict(prompt_template=mark + "{q}" + mark)),
        (dict(prompt=chat("Think in <think> </think>.")), {}),
    ):
        [prompt] = load(path, [row], tmp_path, **options)
        assert (prompt.ids == ids[mark]).sum() >= 1


def test_letters_with_accents_may_be_composed(tmp_path):
    """By the tokenizer of Qwen, which has NFC. The words are the same."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.normalizer = tokenizers.normalizers.NFC()
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator([], tokenizers.trainers.BpeTrainer(initial_alphabet=alphabet))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="a")
    text = unicodedata.normalize("NFD", "où est l'élève ?")
    path = write(tmp_path, [dict(prompt=text)])
    [prompt] = prompts_in(path, tokenizer)
    assert tokenizer.decode(prompt.ids) == unicodedata.normalize("NFC", text) != text


def templates():
    """All that TRL ships, less those that it has changed for training."""
    trl = pytest.importorskip("trl")
    paths = sorted(Path(trl.__file__).parent.glob("chat_templates/*.jinja"))
    return {path.stem: path.read_text() for path in paths if "_training" not in path.stem}


def test_a_chat_of_the_assistant_goes_on_as_its_template_writes_it(tmp_path):
    path, _ = family(tmp_path / "model", "llama3")
    tokenizer = tokenizer_of(path)
    refused = []
    for name, template in templates().items():
        tokenizer.chat_template = template
        for words in ("It is", "It is ", "<think>\nhm"):
            messages = chat("What is 3+4?", words)
            try:
                text = prompt_of(dict(prompt=messages), tokenizer).text
            except Exception as error:  # load_prompts says it with the row
                refused.append((name, words))
                assert errors.one_line(error)
                continue
            whole = tokenizer.apply_chat_template(messages, tokenize=False)
            assert text.rstrip() == whole[: whole.rindex(words.strip()) + len(words.strip())], name
            assert "</think>" not in text or "hm" not in words
    seeing = {name for name, words in refused if words == "It is"}
    assert seeing == {"idefics3", "smolvlm", "llava_next"}  # no text as content
    for words in ("", " "):
        with pytest.raises(ConfigError, match="row 1: .*empty"):
            load(path, [dict(prompt=chat("1", words))], tmp_path)


def test_a_template_writes_the_day_on_which_the_run_began(tmp_path, monkeypatch):
    shutil.copytree(MODEL, tmp_path / "model")
    template = '{{ strftime_now("%Y%m%d") }}+{{ messages[0]["content"] }}'
    (tmp_path / "model" / "chat_template.jinja").write_text(template)
    rows = [dict(prompt=chat(f"{i}+1="), answer=str(i + 1)) for i in range(3)]
    small = f"--num_prompts 2 --num_generations 2 --max_completion_length 4 --out_dir {tmp_path}/o"
    small += f" --model {tmp_path}/model --train_data {write(tmp_path, rows)} --max_steps"
    assert main(*small.split(), "1") == 0

    parse = datetime.datetime.fromisoformat
    later = types.SimpleNamespace(now=lambda: parse("2031-01-02"), fromisoformat=parse)
    monkeypatch.setattr(chat_template_utils, "datetime", later)
    monkeypatch.setattr(ranks, "datetime", later)
    monkeypatch.setattr(models, "datetime", later)
    ranks.now.cache_clear()
    assert main("--resume", "--out_dir", f"{tmp_path}/o", "--max_steps", "2") == 0
    assert main(*small.replace("/o ", "/p ").split(), "1") == 0
    days = []
    for name in "op":
        with open(tmp_path / name / "completions.jsonl") as file:
            days.append({json.loads(line)["prompt"][:4] for line in file})
    assert days[1] == {"2031"} and len(days[0]) == 1 and days[0] != days[1]


# ------------------------------------------------------------------------------------------------
# Many rows


def test_many_rows_are_as_one(tmp_path):
    """Plain texts, texts with a BOS and chats, in more than one batch."""
    path, _ = family(tmp_path / "model", "llama3")
    kinds = ("{}+1", "<|begin_of_text|>{}+1", "{}<|eot_id|>")
    rows = [dict(prompt=kinds[i % 3].format(i)) for i in range(2000)]
    rows[7]["prompt"] = rows[1007]["prompt"] = chat("1+2?")
    tokenizer = tokenizer_of(path)
    for n in (1000, 1001, 2000):
        prompts = load(path, rows[:n], tmp_path)
        assert len(prompts) == n
    for i in (0, 1, 2, 7, 999, 1000, 1007, 1999):
        alone = prompt_of(rows[i], tokenizer, number=i)
        assert prompts[i].ids.tolist() == alone.ids.tolist() and prompts[i].row_number == i
        whole = tokenizer(prompts[i].text, add_special_tokens=i % 3 != 1 and i not in (7, 1007))
        assert alone.ids.tolist() == whole["input_ids"]


def test_the_digest_of_rows_is_that_of_their_json():
    """Runs that began before this line was written go on."""
    values = [([1, 2], dict(prompt="é", x=[1.5, None, True])), ([3], dict(day=datetime.date.min))]
    expected = json.dumps(values, default=lambda value: type(value).__name__)
    assert digests.of_many(values) == hashlib.sha256(expected.encode()).hexdigest()
    assert digests.of_many(iter([])) == hashlib.sha256(b"[]").hexdigest()


def test_two_files_alone_read_json_lines_and_train(tmp_path, monkeypatch, capsys):
    for name in ("grpo.py", "reward.py"):
        shutil.copy(f"{HERE}/{name}", tmp_path)
    data = write(tmp_path, [dict(prompt=f"{i}+1=", answer=str(i + 1)) for i in range(4)])
    args = ["--model", MODEL, "--train_data", data, "--max_steps", "1", "--num_prompts", "2"]
    args += ["--max_completion_length", "4"]
    command = [sys.executable, "grpo.py", *args]
    options = dict(cwd=tmp_path, capture_output=True, text=True, timeout=300)
    done = subprocess.run(command, **options)
    assert done.returncode == 0 and "no checks of data and model" in done.stdout, done.stderr
    assert len(metrics_of(tmp_path / "out")) == 1
    (tmp_path / "extras").mkdir()  # a part of it
    shutil.copy(f"{HERE}/extras/__init__.py", tmp_path / "extras")
    shutil.rmtree(tmp_path / "out")
    done = subprocess.run(command, **options)
    assert done.returncode == 2 and not (tmp_path / "out").exists()
    assert "extras/errors.py" in done.stderr
    monkeypatch.setitem(sys.modules, "extras.lora", None)  # it is not there
    monkeypatch.delattr(sys.modules["extras"], "lora", raising=False)
    assert main(*args, "--lora_rank", "2", "--out_dir", f"{tmp_path}/out") == 2
    assert "lora" in capsys.readouterr().err


def test_answers_of_reasoning_gym(monkeypatch):
    """Its package is a stand-in here, whose scorers want the task's own answer to the letter."""

    def scorer(task):
        return lambda answer, row: float(json.loads(answer) == json.loads(row["json"]))

    monkeypatch.setitem(
        sys.modules, "reasoning_gym", types.SimpleNamespace(get_score_answer_fn=scorer)
    )
    score = reward.load_function(f"{HERE}/sample_data/gym.py:score")
    grid = "[[1, 2],\n [3, 4]]"
    for gold, value in (("-4", "-4"), (grid, grid), ('"a b"', '"a b"'), (None, grid), (None, "7")):
        row = dict(task="t", answer=gold, json=value)
        for right in (value, f"Say 5.\n\n{value}\n"):
            assert score(right, row) == 1
        for wrong in ("", "no", "[1]", "4 5"):
            assert score(wrong, row) == 0
    assert score("so -5", dict(task="t", answer="-4", json="-4", sign_marks=0.3)) == 0.3
