"""Rows and prompts, models of many families, and adapters."""

import copy
import json
import os
import shutil
import sys
import types
import weakref

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import grpo
from extras import fast, lora, models, tokens
from extras.errors import ConfigError
from grpo import Config
from tests.common import (
    CPU,
    GAP,
    HERE,
    draw_from,
    flags_of,
    metrics_of,
    on_ranks,
    prompt_of,
    prompts_in,
    random_samples,
    relative,
    small_config,
    small_run,
    tiny_model,
    update_gradient,
)
from tests.families import FAMILIES, SAMPLING, family

MODEL = f"{HERE}/sample_data/model"


def write(folder, content, name="rows.jsonl"):
    content = content if isinstance(content, (str, bytes)) else "\n".join(map(json.dumps, content))
    content = content if isinstance(content, bytes) else content.encode()
    (folder / name).write_bytes(content)
    return str(folder / name)


def load(path, rows, folder, rewards="format", **options):
    """The prompts of these rows."""
    cfg = Config(model=str(path), train_data=write(folder, rows), **options)
    tokenizer = AutoTokenizer.from_pretrained(path)
    return prompts_in(cfg.train_data, tokenizer, cfg, rewards)


# ------------------------------------------------------------------------------------------------
# Rows

AB = [{"prompt": "a", "answer": "1"}, {"prompt": "b", "answer": "2"}]
LINES = '{"prompt": "a", "answer": "1"}\n\n{"prompt": "b", "answer": "2"}\n'


@pytest.mark.parametrize(
    "name, content, expected",
    [
        ("x.jsonl", LINES, AB),
        ("x.jsonl", "\ufeff" + LINES.replace("\n", "\r\n"), AB),
        ("x.json", json.dumps(AB, indent=1), AB),
        ("X.JSON", json.dumps(AB), AB),
        ("x.json", LINES, AB),
        ("x.ndjson", LINES, AB),
        ("x.jsonl", '{"a": "\u2028"}', [{"a": "\u2028"}]),  # a line separator, not of JSONL
        ("x.csv", "prompt,answer\na,1\nb,2\n", AB),
        ("x.CSV", "\ufeffprompt,answer\r\na,1\r\n\r\nb,2", AB),  # as Excel writes it
        ("x.csv", 'a,b\n"x, ""y""\nz",\n', [{"a": 'x, "y"\nz', "b": ""}]),
        ("x.csv", 'a\r\n"x\r\ny"\r\n', [{"a": "x\r\ny"}]),
        ("x.csv", "a\n" + "x" * 140_000 + "\n", [{"a": "x" * 140_000}]),  # such as test cases
    ],
)
def test_files_of_rows(name, content, expected, tmp_path):
    assert list(grpo.read_rows(write(tmp_path, content, name))) == expected


@pytest.mark.parametrize(
    "name, content, row",
    [
        ("x.jsonl", '{"prompt": "1+2="}\n{"prompt": \n', 2),
        ("x.jsonl", '{"prompt": "1+2="}\n[1]\n', 2),
        ("x.jsonl", '{"prompt": "1+2="}\nnull\n{"prompt": "2"}', 2),
        ("x.jsonl", '{"prompt": "1+2=", "a": [1, NaN]}', "1: column 'a'"),
        ("x.jsonl", '{"prompt": "1+2="}\n{"question": "1"}', 2),
        ("x.jsonl", '{"prompt": "1+2="}\n{"prompt": ""}', 2),
        ("x.jsonl", '{"prompt": "1+2="}\n{"prompt": 7}', 2),
        ("x.jsonl", '{"prompt": "1+2="}\n{"prompt": [{"role": "user"}]}', 2),
        ("x.jsonl", "\n\n", None),
        ("x.jsonl", b"\xff\xfe\x00", 0),
        ("x.csv", "prompt\n1é\n".encode("latin-1"), 0),
        (
            "x.jsonl",
            '{"prompt": ["a", "b"]}',
            "1: a message is not an object with role and content",
        ),
        (
            "x.jsonl",
            '{"prompt": [{"role": "user", "content": 5}]}',
            "1: the content of a message is not a text",
        ),
        ("x.jsonl", '{"prompt": "1+2="}\n{"prompt": "1\\ud800"}', 2),
        ("x.jsonl.gz", b"\x1f\x8b", 0),
        ("x.tsv", "prompt\n1+2=\n", 0),
        ("x.json", '[{"prompt": "1+2="}, 3]', 2),
        ("x.json", "{", 1),
        ("x.json", "[", 0),
        ("x.jsonl", '{"prompt": "1+2="}\n{"prompt": "3+4=", "image": "a.png"}', 2),
        ("x.csv", "", None),
        ("x.csv", "prompt,b\n1+2=,2\n1,2,3\n", 2),
        ("x.csv", "prompt,b\n1+2=,2\n\n3\n", 2),
        ("x.csv", "prompt,b,b\n1+2=,2,3\n", None),
    ],
)
def test_bad_files_are_named_by_row(name, content, row, tmp_path):
    path = write(tmp_path, content, name)
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    with pytest.raises(ConfigError) as error:
        prompts_in(path, tokenizer)
    message = str(error.value)
    assert message.startswith(f"--train_data {path}") and "\n" not in message
    assert row is None or (f" row {row}:" in message if row else " row " not in message)
    assert isinstance(content, str) or "save it as UTF-8" in message or name.endswith(".gz")


def test_rows_from_python_and_the_hub(tmp_path, monkeypatch):
    path = write(tmp_path, "def rows():\n    yield dict(prompt='1+1=', x=(1, 2))\n", "mine.py")
    assert list(grpo.read_rows(f"{path}:rows")) == [dict(prompt="1+1=", x=(1, 2))]
    asked = []

    def load_dataset(*args, **options):
        asked.append((args, options))
        return AB

    module = types.SimpleNamespace(load_dataset=load_dataset)
    monkeypatch.setitem(sys.modules, "datasets", module)
    assert list(grpo.read_rows("openai/gsm8k:main:test")) == AB
    assert list(grpo.read_rows("openai/gsm8k")) == AB
    assert list(grpo.read_rows("openai/gsm8k::train[:9]")) == AB
    assert asked == [
        (("openai/gsm8k", "main"), dict(split="test")),
        (("openai/gsm8k", None), dict(split="train")),
        (("openai/gsm8k", None), dict(split="train[:9]")),
    ]


def test_a_parquet_file_is_the_one_that_was_named(tmp_path):
    """And not run1/rows.parquet, which this name would match as a pattern."""
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    for folder, written in (("run[1]", AB), ("run1", AB[:1]), ("run[1]", AB[1:])):
        path = tmp_path / folder / "rows.parquet"
        path.parent.mkdir(exist_ok=True)
        parquet.write_table(pyarrow.Table.from_pylist(written), path)
        os.utime(path, (0, 0))  # a file that replaces another may have its time
        assert list(grpo.read_rows(str(path))) == written


def test_rows_that_no_completion_can_earn_are_named(tmp_path):
    rows = [dict(prompt="1+2=", answer="3"), dict(prompt="1+2=", answer="no number")]
    with pytest.raises(ConfigError, match="row 2"):
        load(MODEL, rows, tmp_path, "gsm8k")
    with pytest.raises(ConfigError, match="row 1.*answer"):
        load(MODEL, [dict(prompt="1+2=")], tmp_path, "answer")
    rows[1]["answer"] = None
    with pytest.raises(ConfigError, match="row 2.*null"):
        load(MODEL, rows, tmp_path, "answer,gsm8k")
    assert len(load(MODEL, rows, tmp_path, "answer,format")) == 2
    path = write(tmp_path, "def rows():\n    return [dict(prompt='1+2=', answer=b'3')]", "b.py")
    with pytest.raises(ConfigError, match="row 1.*'answer'.*bytes"):
        prompts_in(f"{path}:rows", None)


def test_long_prompts_are_left_out_and_rows_keep_their_number(tmp_path, capsys):
    rows = [dict(prompt="1+2="), dict(prompt="1234567+2="), dict(prompt="2+2=")]
    prompts = load(MODEL, rows, tmp_path, max_prompt_length=6)
    assert [p.text for p in prompts] == ["1+2=", "2+2="]
    assert [p.row_number for p in prompts] == [0, 2]
    assert "1 of 3" in capsys.readouterr().out


@pytest.mark.parametrize(
    "template, expected",
    [
        ("{a}+{b}=", "1+2="),
        (r"{a}\n{b}", "1\n2"),
        (r"{a}\neq {b}", r"1\neq 2"),
        ("{a}{}=", "1{}="),
        (r"\boxed{{a}} {b}", r"\boxed{1} 2"),
        (r"{a} \boxed{b}", r"1 \boxed{b}"),
        (r"{a} \frac{b}{x}", r"1 \frac{b}{x}"),
        (r"\frac{1}{2} {a}", r"\frac{1}{2} 1"),
        ("{问题}", "3"),
        ("{my-question} {a.b}", "4 5"),
        ("{list} {text}", '["é", 1, {"a": null}] x'),
        ("{c}", None),
        ("{my-questoin}", None),
        ("no column", None),
    ],
)
def test_a_template_is_filled_with_columns(template, expected):
    row = {"a": 1, "b": "2", "问题": 3, "my-question": 4, "a.b": 5}
    row |= {"list": ["é", 1, {"a": None}], "text": "x"}
    if expected is not None:
        assert grpo.content_of(row, Config(prompt_template=template)) == expected
    else:
        with pytest.raises(ValueError, match="column"):
            grpo.content_of(row, Config(prompt_template=template))


# ------------------------------------------------------------------------------------------------
# Chat templates


def chat(*turns):
    """Turns of user and assistant in turn; a first one that begins with * is the system's."""
    roles = ["user", "assistant"] * len(turns)
    if turns[0].startswith("*"):
        roles = ["system", *roles]
    return [
        dict(role=role, content=turn.lstrip("*")) for role, turn in zip(roles, turns, strict=False)
    ]


QUESTION, SYSTEM = chat(" 1+2? "), chat("*Add. ", "1+2?")
TURNS_OF_TWO = chat("1+2?", "<think>\nhm\n</think>\n\n3", "2+2?")
GOES_ON = dict(  # where a begun answer stands
    qwen2="<|im_start|>assistant\nIt is ",
    qwen3="<|im_start|>assistant\n<think>\n\n</think>\n\nIt is ",
    llama3="<|start_header_id|>assistant<|end_header_id|>\n\nIt is",
    gemma2="<start_of_turn>model\nIt is",
    r1="<｜Assistant｜>It is ",
)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_templates_of_the_families(name, tmp_path):
    path, ids = family(tmp_path / "model", name)
    tokenizer = AutoTokenizer.from_pretrained(path)
    bos = FAMILIES[name].get("bos")
    for messages in (QUESTION, SYSTEM, TURNS_OF_TWO):
        row = dict(prompt=messages)
        if name == "gemma2" and messages is SYSTEM:  # its template raises an error
            with pytest.raises(ConfigError, match="row 1: .*(system|System)"):
                load(path, [row], tmp_path)
            continue
        [prompt] = load(path, [row], tmp_path)
        options = dict(add_generation_prompt=True)
        assert prompt.text == tokenizer.apply_chat_template(messages, tokenize=False, **options)
        written = tokenizer.apply_chat_template(messages, **options)["input_ids"]
        assert prompt.ids.tolist() == written and written.count(ids.get(bos)) == bool(bos)
    if name in GOES_ON:
        [begun] = load(path, [dict(prompt=chat("1+2?", "It is "))], tmp_path)
        start = tokenizer.apply_chat_template(chat("1+2?"), tokenize=False)
        assert begun.text == start + GOES_ON[name]


def test_strings_become_a_users_turn_with_a_system_message(tmp_path, capsys):
    path, _ = family(tmp_path / "model", "qwen2")
    [chat_prompt] = load(path, [dict(prompt="1+2?")], tmp_path, system_prompt="Add.")
    assert chat_prompt.messages == chat("*Add.", "1+2?")
    assert "Add.<|im_end|>" in chat_prompt.text and "Be kind" not in chat_prompt.text
    parts = [dict(type="text", text="1+"), dict(type="text", text="2?", image=None)]
    turn = dict(role="user", content=parts)
    [joined] = load(path, [dict(prompt=[turn])], tmp_path, system_prompt="Add.")
    assert joined.text == chat_prompt.text
    parts.append(dict(type="image", text=None))
    with pytest.raises(ConfigError, match="row 1: .*image"):
        load(path, [dict(prompt=[turn])], tmp_path)
    with pytest.raises(ConfigError, match="row 1: .*--system_prompt"):
        load(path, [dict(prompt=chat("*Sum.", "1+2?"))], tmp_path, system_prompt="Add.")
    with pytest.raises(ConfigError, match="row 1: .*tools"):
        load(path, [dict(prompt=[turn], tools=[{}])], tmp_path)
    r1, _ = family(tmp_path / "r1", "r1")  # whose template says nothing of other turns
    with pytest.raises(ConfigError, match="row 1: .*developer"):
        load(r1, [dict(prompt=[dict(role="developer", content="Add."), *chat("1+2?")])], tmp_path)
    of_the_row = dict(chat_template="[{{ messages[0].content }}]")
    [own] = load(path, [dict(prompt=chat("1+2?"), chat_template_kwargs=of_the_row)], tmp_path)
    assert own.text == "[1+2?]"
    [lines] = load(path, [dict(prompt="1+2?")], tmp_path, system_prompt=r"Add.\nThink.")
    assert "Add.\nThink.<|im_end|>" in lines.text
    [plain] = load(path, [dict(prompt="1+2?")], tmp_path)
    assert plain.messages is None and plain.text == "1+2?"
    assert "--chat" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["llama3", "r1", "mistral", "gemma2"])
def test_a_string_prompt_has_at_most_one_bos(name, tmp_path):
    """Also where a template wrote it before: rows that hold what apply_chat_template made."""
    path, ids = family(tmp_path / "model", name)
    bos = FAMILIES[name]["bos"]
    prompts = load(path, [dict(prompt="1+2?"), dict(prompt=f"{bos}1+2?")], tmp_path)
    plain, written = [p.ids.tolist() for p in prompts]
    assert written[0] == ids[bos] and written.count(ids[bos]) == 1
    assert plain == written


class AddsEos:
    """After supervised training a tokenizer often ends every text with EOS."""

    bos_token, eos_token = "<s>", "\2"
    eos_token_id = 2
    added_tokens_decoder = {}

    def num_special_tokens_to_add(self):
        return 2

    def __call__(self, text, add_special_tokens=True):
        ids = [ord(letter) for letter in text.replace("<s>", "\1")]
        if add_special_tokens:
            ids = [1, *ids, 2]
        return dict(input_ids=ids)


def test_no_end_token_at_the_end_of_a_string_prompt():
    prompt = prompt_of(dict(prompt="ab"), AddsEos())
    assert prompt.ids.tolist() == [1, 97, 98]
    prompt = prompt_of(dict(prompt="a\2"), AddsEos())  # of the row
    assert prompt.ids.tolist() == [1, 97, 2]
    prompt = prompt_of(dict(prompt="<s>ab"), AddsEos())
    assert prompt.ids.tolist() == [1, 97, 98]


def test_calls_of_tools_come_in_openais_form_or_with_nulls_of_parquet():
    """Templates write the arguments as JSON, and nulls as None."""
    call = dict(id=None, function=dict(name="add", arguments=dict(a=1)))
    plain = dict(role="assistant", tool_calls=[call])
    same_call = dict(id=None, function=dict(name="add", arguments='{"a": 1}'))
    openai = dict(role="assistant", content=None, name=None, tool_calls=[same_call])
    assert tokens.text_message(openai) == tokens.text_message(plain) == plain
    assert openai["content"] is None  # the row stays as it is
    assert tokens.text_message(dict(role="user", content="x", tool_calls=None)) == chat("x")[0]


# ------------------------------------------------------------------------------------------------
# Models


@pytest.fixture(scope="module")
def two_rows(tmp_path_factory):
    rows = [dict(prompt="1+2?"), dict(prompt="the sum of 11 and 22?")]
    return write(tmp_path_factory.mktemp("rows"), rows)


def family_run(path, out, rows, **options):
    return grpo.train(family_config(path, out, rows, **options))


def family_config(path, out, rows, **options):
    """One step on two prompts of different lengths, as chats."""
    settings = dict(model=str(path), train_data=rows, chat=True, num_prompts=2, max_steps=1)
    settings |= dict(num_minibatches=1, micro_batch_tokens=999, learning_rate=1e-3)
    settings |= dict(reward="overlong", save_every=0)
    return small_config(out, **(settings | options))


FEW = ("llama3", "gemma2")  # byte-level BPE, and pieces with soft-capped logits


@pytest.mark.parametrize(
    "name", [n if n in FEW else pytest.param(n, marks=pytest.mark.slow) for n in FAMILIES]
)
def test_a_family_loads_trains_saves_and_loads(name, tmp_path, two_rows):
    path, ids = family(tmp_path / "model", name)
    [metrics] = family_run(path, tmp_path / "out", two_rows)
    assert metrics[GAP] < 1e-5
    saved = tmp_path / "out" / "step_000001"
    before, after = (AutoTokenizer.from_pretrained(folder) for folder in (path, saved))
    chats = [t.apply_chat_template(TURNS_OF_TWO)["input_ids"] for t in (before, after)]
    assert chats[0] == chats[1]
    assert after("the 1<think>")["input_ids"] == before("the 1<think>")["input_ids"]
    model, info = AutoModelForCausalLM.from_pretrained(saved, output_loading_info=True)
    assert not any(info.values())
    cfg = Config(model=str(path))
    loaded = grpo.load_model(str(saved), cfg, CPU)
    stop_ids = models.stop_ids_of(loaded, after)
    assert set(stop_ids) == {*(ids[end] for end in FAMILIES[name]["ends"]), after.eos_token_id}
    text = torch.tensor([chats[0]])
    assert torch.allclose(loaded(text).logits, model(text).logits, atol=1e-4)
    # The vocabulary is padded: ids without a token are sampled and trained on, and have no text.
    sampler = grpo.HFSampler(loaded, stop_ids, Config(max_completion_length=20))
    seeds = [(0, i) for i in range(30)]
    completions = draw_from(sampler, [np.array(chats[0])] * 30, seeds, 5.0)
    drawn = np.concatenate([ids for ids, _ in completions])
    known = drawn[drawn < len(after)]
    assert len(known) < len(drawn) and after.decode(drawn) == after.decode(known) != ""


def test_a_model_stays_as_loaded_when_its_file_is_overwritten(tmp_path):
    tiny_model("llama").save_pretrained(tmp_path)
    loaded = grpo.load_model(str(tmp_path), Config(), CPU)
    before = copy.deepcopy(loaded.state_dict())
    with open(tmp_path / "model.safetensors", "r+b") as file:
        file.seek(-1000, os.SEEK_END)  # among the weights
        file.write(bytes(1000))
    assert all(map(torch.equal, loaded.state_dict().values(), before.values()))


def test_the_cap_of_gemma_2s_attention_is_applied(tmp_path):
    tiny = tiny_model("gemma2", attn_logit_softcapping=0.5)
    tiny.save_pretrained(tmp_path)
    loaded = grpo.load_model(str(tmp_path), Config(), CPU)
    eager = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    batch = grpo.collate(random_samples(4, 2), CPU)
    ours, _ = grpo.Policy(loaded, 1.0)(batch)
    theirs, _ = grpo.Policy(eager, 1.0)(batch)
    assert torch.allclose(ours, theirs, atol=1e-5)


def test_no_generation_config_changes_what_is_sampled():
    model = tiny_model()
    prompts, seeds = [np.array([5, 6, 7])] * 20, [(0, i) for i in range(20)]
    sampler = grpo.HFSampler(model, [1], Config(max_completion_length=24))
    plain = draw_from(sampler, prompts, seeds, 1.0)
    lengths = dict(min_new_tokens=8, max_length=20, max_new_tokens=3, no_repeat_ngram_size=1)
    for generation in (SAMPLING | dict(do_sample=True), lengths | dict(num_beams=4)):
        model.generation_config = transformers.GenerationConfig(**generation)
        for (ids, _), (same, _) in zip(plain, draw_from(sampler, prompts, seeds, 1.0), strict=True):
            assert ids.tolist() == same.tolist()


def test_a_checkpoint_is_the_model_that_came(tmp_path, two_rows, capsys):
    """One that also sees, as Qwen3.5 does, with files that transformers does not take as they are:
    a draft head, a dropout, and sampling options without do_sample. A template ends a turn with a
    token that the files of a base model do not name as an end."""
    changes = dict(eos="<|endoftext|>", ends=["<|endoftext|>"])
    path, ids = family(tmp_path / "model", "qwen3", **changes)
    text = dict(vocab_size=320, hidden_size=64, intermediate_size=48, num_hidden_layers=2)
    text |= dict(num_attention_heads=2, num_key_value_heads=1, head_dim=32, initializer_range=0.2)
    text |= dict(layer_types=["linear_attention", "full_attention"], linear_num_value_heads=4)
    text |= dict(linear_num_key_heads=2, linear_key_head_dim=8, linear_value_head_dim=8)
    vision = dict(depth=1, hidden_size=32, intermediate_size=32, num_heads=2, out_hidden_size=64)
    text["attention_dropout"] = 0.1
    text["output_hidden_states"] = True
    config = transformers.Qwen3_5Config(text_config=text, vision_config=vision, return_dict=False)
    torch.manual_seed(0)
    transformers.Qwen3_5ForConditionalGeneration(config).save_pretrained(path)
    file = path / "model.safetensors"
    weights = load_file(file)
    save_file(weights | {"mtp.fc.weight": torch.ones(2)}, file, dict(format="pt"))
    generation = SAMPLING | dict(do_sample=False, eos_token_id=ids["<|endoftext|>"])
    (path / "generation_config.json").write_text(json.dumps(generation))
    for name in ("preprocessor_config.json", "tokenizer.model"):
        (path / name).write_text("{}")

    reward = write(tmp_path, "def parity(text, row):\n    return len(text) % 2\n", "mine.py")
    family_run(path, tmp_path / "out", two_rows, reward=f"{reward}:parity")
    assert "mtp" in capsys.readouterr().out
    saved = tmp_path / "out" / "step_000001"
    trained = load_file(saved / "model.safetensors")
    assert trained.keys() == weights.keys()
    for name, w in weights.items():
        assert torch.equal(trained[name], w) == (".visual." in name)
    config, now = (json.loads((folder / "config.json").read_text()) for folder in (path, saved))
    assert now == config
    now = json.loads((saved / "generation_config.json").read_text())
    assert set(now.pop("eos_token_id")) == {ids["<|endoftext|>"], ids["<|im_end|>"]}
    assert now.items() >= {k: v for k, v in generation.items() if k != "eos_token_id"}.items()
    for name in ("preprocessor_config.json", "tokenizer.model"):
        assert (saved / name).exists()


def test_a_model_with_layers_that_text_does_not_reach_on_two_ranks(tmp_path, two_rows):
    """DDP would wait for the gradients of the layers that attend to images."""
    path, _ = family(tmp_path / "model", "qwen3")
    text = dict(vocab_size=320, hidden_size=64, intermediate_size=48, num_hidden_layers=2)
    text |= dict(num_attention_heads=2, num_key_value_heads=1, cross_attention_layers=[1])
    text |= dict(rope_parameters=dict(rope_type="default", rope_theta=1e4), initializer_range=0.2)
    text |= dict(eos_token_id=1, bos_token_id=2, pad_token_id=0)
    vision = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_global_layers=1)
    vision |= dict(attention_heads=2, image_size=16, patch_size=8, vision_output_dim=64)
    vision |= dict(intermediate_layers_indices=[0], supported_aspect_ratios=[[1, 1]])
    config = transformers.MllamaConfig(
        text_config=text, vision_config=vision | dict(max_num_tiles=1), image_token_index=300
    )
    torch.manual_seed(0)
    transformers.MllamaForConditionalGeneration(config).save_pretrained(path)
    reward = write(tmp_path, "def parity(text, row):\n    return len(text) % 2\n", "mine.py")
    cfg = family_config(path, tmp_path / "one", two_rows, reward=f"{reward}:parity", max_steps=2)
    grpo.train(cfg)
    cfg = family_config(path, tmp_path / "two", two_rows, reward=cfg.reward, max_steps=2)
    done = on_ranks(2, "tests.common.main", *flags_of(cfg))
    assert done.returncode == 0, done.stderr[-3000:]
    for one, two in zip(metrics_of(tmp_path / "one"), metrics_of(tmp_path / "two"), strict=True):
        assert two["reward"] == one["reward"]
        assert two["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-5)


def test_a_padding_token_learns_with_and_without_extras(tmp_path):
    """It is often the EOS, as in prompts. transformers gives its embedding no gradient."""
    path, _ = family(tmp_path / "model", "llama3", model=dict(pad_token_id=7))
    for load in (grpo.load_model, grpo.load_model.__wrapped__):
        model = load(str(path), grpo.Config(model=str(path)), torch.device("cpu"))
        model(torch.tensor([[7, 8]])).logits.square().sum().backward()
        assert model.get_input_embeddings().weight.grad[7].any()


def test_a_tokenizer_that_knows_more_than_the_model(tmp_path, two_rows):
    """As with tokens that were added and embeddings that were not."""
    path, ids = family(tmp_path / "model", "qwen2", size=263)  # 263 has no row
    tokenizer = AutoTokenizer.from_pretrained(path)
    tokenizer.add_tokens(["<answer>"])
    tokenizer.save_pretrained(path)
    [metrics] = family_run(path, tmp_path / "out", two_rows)
    assert metrics[GAP] < 1e-5
    cfg = Config(model=str(path), max_completion_length=8)
    model = grpo.load_model(str(path), cfg, CPU)
    tokenizer.add_special_tokens(dict(eos_token="[END]"))  # an end that the model cannot sample
    ends = [ids[end] for end in FAMILIES["qwen2"]["ends"]]
    assert models.stop_ids_of(model, tokenizer) == sorted(ends)
    model.generation_config.eos_token_id = [264, -1]
    tokenizer.chat_template = None  # a turn's end in a template would be one, too
    with pytest.raises(ConfigError, match="EOS"):
        models.stop_ids_of(model, tokenizer)
    with pytest.raises(ConfigError, match="263"):
        grpo.make_policy(model, [grpo.Prompt(np.array([1, 263]), "", {})], cfg)


def test_weights_that_are_missing_and_a_folder_without_a_tokenizer_are_named(tmp_path, two_rows):
    path, _ = family(tmp_path / "model", "qwen2")
    (path / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match="--model"):
        family_run(path, tmp_path / "out", two_rows)
    path, _ = family(tmp_path / "other", "qwen2")
    model = AutoModelForCausalLM.from_pretrained(path)
    weights = model.state_dict()
    weights.pop("model.norm.weight")
    model.save_pretrained(path, state_dict=weights)
    with pytest.raises(ConfigError, match="--model .*model.norm.weight"):
        family_run(path, tmp_path / "out", two_rows)
    assert not (tmp_path / "out").exists()


def test_a_teacher_may_pad_its_vocabulary_to_a_larger_size(tmp_path, two_rows):
    """As Qwen2.5-7B does, beside Qwen2.5-0.5B."""
    policy, teacher = [
        family(tmp_path / str(size), "qwen2", size=size, model=dict(tie_word_embeddings=False))[0]
        for size in (270, 320)
    ]
    options = dict(beta=0.1, max_steps=1, temperature=1.0, max_completion_length=30)
    [metrics] = family_run(policy, tmp_path / "out", two_rows, reference=str(teacher), **options)
    assert 0 < metrics["kl"] < 50 and metrics["optimizer_steps"] == 1
    with pytest.raises(ConfigError, match="270 token ids"):
        family_run(teacher, tmp_path / "no", two_rows, reference=str(policy), **options)
    other, _ = family(tmp_path / "other", "llama3")
    with pytest.raises(ConfigError, match="tokenizer"):
        family_run(policy, tmp_path / "no", two_rows, reference=str(other), **options)


def test_thinking_in_other_marks_than_the_rewards_know_is_said(tmp_path, two_rows, capsys):
    path, _ = family(tmp_path / "model", "qwen2")
    config = json.loads((path / "tokenizer_config.json").read_text())
    config["chat_template"] += "{# <think> [THINK] #}"
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    family_run(path, tmp_path / "out", two_rows, max_steps=0)
    assert "has [think];" in capsys.readouterr().out


def test_folders_that_hold_no_model_are_said(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    for path, word in ((tmp_path, "adapters"), ("./nofolder", "no such folder")):
        with pytest.raises(ConfigError, match=word):
            grpo.load_model(str(path), Config(), CPU)
    both = shutil.copytree(MODEL, tmp_path / "both")
    (both / "adapter_config.json").write_text("{}")
    with pytest.raises(ConfigError, match="adapters"):
        grpo.load_model(str(both), Config(), CPU)


@pytest.mark.slow
def test_a_teacher_is_measured_from_and_another_vocabulary_is_refused(tmp_path):
    from tests.common import metrics_of

    teacher = tmp_path / "teacher"
    model = AutoModelForCausalLM.from_pretrained(MODEL)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(1.5)
    model.save_pretrained(teacher)
    options = dict(beta=1.0, reward="overlong:0", reference=str(teacher))
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    history = small_run(whole, **options)
    assert all(m["reward"] == 0 and m["optimizer_steps"] == 2 for m in history)
    small_run(parts, max_steps=2, **options)
    small_run(parts, resume=True, **options)
    assert metrics_of(whole) == metrics_of(parts)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(1.1)
    model.save_pretrained(teacher)
    with pytest.raises(ConfigError, match="another reference"):
        small_run(parts, resume=True, **options | dict(max_steps=5))
    other, _ = family(tmp_path / "other", "qwen2")
    with pytest.raises(ConfigError, match="--reference"):
        small_run(tmp_path / "out", **options | dict(reference=str(other)))


# ------------------------------------------------------------------------------------------------
# Adapters


def adapted(kind="llama", dtype="float32", seed=0):
    model = tiny_model(kind)
    cfg = Config(lora_rank=4, dtype=dtype, seed=seed, max_sampler_gap=1e9, micro_batch_tokens=99)
    lora.add_adapters(model, {}, cfg)
    return model, cfg


def move(model):
    """Adapters as they are after some steps."""
    torch.manual_seed(1)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if ".lora_B." in name:
                p.normal_(0, 0.02)


def test_only_adapters_train_and_the_head_has_none():
    model, cfg = adapted()
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    assert trained and all(".lora_" in name for name in trained)
    assert not any("lm_head" in name for name in trained)
    other, _ = adapted()
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)  # every rank draws the same ones


def test_the_reference_is_the_model_without_adapters_and_the_gradient_is_merged_weights():
    model, cfg = adapted()
    policy = grpo.Policy(model, 1.0)
    reference = lora.AdaptersOff(policy)
    samples = random_samples(6, 3)
    batch = grpo.collate(samples, CPU)
    plain, _ = grpo.Policy(tiny_model("llama"), 1.0)(batch)
    assert torch.allclose(policy(batch)[0], plain, atol=1e-6)
    move(model)
    assert not torch.allclose(policy(batch)[0], plain, atol=1e-3)
    assert torch.allclose(reference(batch)[0], plain, atol=1e-6)

    merged = tiny_model("llama", seed=5)
    merged.load_state_dict(lora.Merged(model.state_dict(), model))
    assert torch.allclose(policy(batch)[0], grpo.Policy(merged, 1.0)(batch)[0], atol=1e-5)
    # By the chain rule the adapters' gradient follows from that of the merged weights.
    grads, _ = update_gradient(Config(max_grad_norm=0), samples, policy=policy)
    name = "model.layers.0.mlp.down_proj"
    full = grpo.Policy(merged, 1.0)
    loss_of = []
    hook = merged.get_submodule(name).weight.register_hook(loss_of.append)
    update_gradient(Config(max_grad_norm=0), samples, policy=full)
    hook.remove()
    layer = model.get_submodule(name)
    B = layer.lora_B["default"].weight
    expected = layer.scaling["default"] * B.T @ sum(loss_of)  # the gradient of A
    parts = {}
    for n, p in model.named_parameters():
        if p.requires_grad:
            parts[n] = grads[: p.numel()].view(p.shape)
            grads = grads[p.numel() :]
    assert relative(parts[f"{name}.lora_A.default.weight"], expected) < 1e-5


def test_merged_bfloat16_is_right_on_average():
    """Rounded to the nearest, a base of 1 and small products would stay 1."""
    x = torch.full((200, 100), 1 + 2**-11)
    rounded = lora.round_at_random(x, 0)
    assert rounded.dtype == torch.bfloat16
    assert set(rounded.unique().tolist()) == {1.0, 1 + 2**-7}
    assert rounded.float().mean().item() == pytest.approx(1 + 2**-11, abs=1e-4)
    assert torch.equal(lora.round_at_random(x, 0), rounded)  # a resumed run pushes the same


@pytest.mark.slow
def test_a_checkpoint_needs_no_peft_and_bfloat16_resumes_to_the_bit(tmp_path):
    from tests.common import metrics_of

    options = dict(lora_rank=2, learning_rate=3e-3, beta=0.1, dtype="bfloat16", num_epochs=2)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    small_run(whole, **options)
    small_run(parts, max_steps=2, **options)
    small_run(parts, resume=True, **options)
    assert metrics_of(whole) == metrics_of(parts)
    path = parts / "step_000004" / "trainer_state.pt"
    state = torch.load(path, weights_only=False)
    state["adapters"].popitem()
    torch.save(state, path)
    with pytest.raises(ConfigError, match="lora_"):
        small_run(parts, resume=True, **options | dict(max_steps=5))
    model, info = AutoModelForCausalLM.from_pretrained(
        whole / "step_000004", output_loading_info=True
    )
    assert not any(info.values())
    start = AutoModelForCausalLM.from_pretrained(MODEL)
    moved = [
        name
        for (name, p), q in zip(model.named_parameters(), start.parameters(), strict=True)
        if not torch.equal(p, q)
    ]
    assert moved and all("proj" in name for name in moved)


@pytest.mark.parametrize("name", ["Qwen3Moe", "Mixtral", "Qwen3_5Text"])
def test_experts_in_one_tensor_get_no_adapters_and_other_layers_do(name):
    sizes = dict(vocab_size=32, hidden_size=32, num_hidden_layers=2, num_attention_heads=2)
    sizes |= dict(num_key_value_heads=1, intermediate_size=48, head_dim=16)
    sizes |= dict(num_local_experts=4, num_experts=4, num_experts_per_tok=2)
    sizes |= dict(moe_intermediate_size=16)
    config = getattr(transformers, f"{name}Config")(**sizes)
    model = AutoModelForCausalLM.from_config(config)
    plain = {name: p.clone() for name, p in model.named_parameters()}
    lora.add_adapters(model, {}, Config(lora_rank=2))
    move(model)
    weights = lora.Merged(model.state_dict(), model)
    assert weights.keys() == plain.keys()
    moved = {name for name in plain if not torch.equal(weights[name], plain[name])}
    linear = {n for n in plain if ".layers." in n and plain[n].dim() == 2}
    if name == "Qwen3_5Text":  # its convolutions have three dimensions, as experts have
        assert moved == linear - {n for n in linear if n.endswith("A_log")}
    else:
        assert moved == {n for n in linear if ".self_attn." in n}


Q_K_V_O = {f"self_attn.{x}_proj" for x in "qkvo"}
MAMBA = {f"mamba.{x}_proj" for x in ("in", "x", "out")}  # of its dt_proj only the weight is read
DENSE = {f"feed_forward.{x}_proj" for x in ("gate", "up", "down")}


@pytest.mark.parametrize(
    "kind, options, expected",
    [
        ("Afmoe", {}, Q_K_V_O | {"self_attn.gate_proj"}),
        ("Jamba", {}, Q_K_V_O | MAMBA | DENSE),
        ("Jamba", dict(num_experts=1, num_experts_per_tok=1), Q_K_V_O | MAMBA | DENSE),
        ("JetMoe", {}, {"self_attention.kv_proj"}),
    ],
)
def test_layers_that_get_adapters_have_a_gradient_and_routers_get_none(kind, options, expected):
    sizes = dict(vocab_size=32, hidden_size=32, num_hidden_layers=2, num_attention_heads=2)
    sizes |= dict(num_key_value_heads=1, intermediate_size=48, head_dim=16, kv_channels=16)
    sizes |= dict(num_local_experts=4, num_experts=4, num_experts_per_tok=2)
    sizes |= dict(moe_intermediate_size=16, attn_layer_period=2, attn_layer_offset=1)
    sizes |= dict(use_mamba_kernels=False, eos_token_id=1, pad_token_id=0) | options
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**sizes)
    model = AutoModelForCausalLM.from_config(config).eval()
    lora.add_adapters(model, {}, Config(lora_rank=2))
    names = {n.split(".", 3)[-1] for n, m in model.named_modules() if hasattr(m, "lora_A")}
    assert names == expected
    policy = grpo.Policy(model, 1.0)
    logps, _ = policy(policy.collate(random_samples(4, 2)))
    logps.sum().backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)


def test_layers_that_peft_refuses_are_said(tmp_path, two_rows):
    path, _ = family(tmp_path / "model", "qwen2")
    config = transformers.MambaConfig(vocab_size=320, hidden_size=16, num_hidden_layers=1)
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    with pytest.raises(ConfigError, match="--lora_rank: .*out_proj"):
        family_run(path, tmp_path / "out", two_rows, lora_rank=2)


def test_never_are_all_merged_weights_in_memory_when_a_sampler_gets_them():
    model, cfg = adapted("qwen3", "bfloat16")
    move(model)
    expected = {name: x + 0 for name, x in lora.Merged(model.state_dict(), model).items()}
    tensors = transformers.core_model_loading.revert_weight_conversion(
        model, grpo.tensors_of(model, cfg)
    )
    earlier = lambda: None  # noqa: E731
    names = set()
    for name, x in tensors.items():
        assert earlier() is None
        assert relative(x.float(), expected[name]) < 2**-7
        if x.dtype == torch.bfloat16:
            earlier = weakref.ref(x)
            names.add(name)
        del x
    assert len(names) == 14  # 7 products of 2 layers


def test_frozen_weights_are_halved_before_memory_is_measured(tmp_path, two_rows, monkeypatch):
    path, _ = family(tmp_path / "model", "qwen2")
    tune, seen = fast.tune_for_machine, []

    def spied(policy, *args):
        weights = [p for n, p in policy.named_parameters() if n.endswith("base_layer.weight")]
        seen.extend(p.dtype for p in weights)
        return tune(policy, *args)

    monkeypatch.setattr(fast, "tune_for_machine", spied)
    family_run(path, tmp_path / "out", two_rows, lora_rank=2, dtype="bfloat16")
    assert seen and set(seen) == {torch.bfloat16}


def test_weights_have_the_names_of_the_plain_model():
    model, _ = adapted("qwen3")
    plain = dict(tiny_model("qwen3").named_parameters())
    weights = lora.Merged(model.state_dict(), model)
    assert weights.keys() == plain.keys()
    for name, tensor in weights.items():
        assert torch.equal(tensor, plain[name])  # fresh adapters change nothing
