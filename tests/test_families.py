"""Models of many families: their templates, tokenizers, ends, and what is asked of any of them."""

import json
import os
import re
import sys

import numpy as np
import pytest
import torch
import transformers

import grpo
import harness.auto
import harness.checkpoints
import harness.engine
import harness.models
import harness.rows
import harness.run
from grpo import Config
from harness.flags import ConfigError
from tests.common import CPU, ids_of, part, texts, tiny_model
from tests.families import (
    BARS,
    CHATML,
    FAMILIES,
    HEADERS,
    IM,
    QWEN_IDS,
    SAMPLING,
    TURNS,
    family,
    family_run,
)

pytest_plugins = "tests.common"


def chat(*turns):
    """Turns of user and assistant in turn; a first one that begins with * is the system's."""
    roles = ["user", "assistant"] * len(turns)
    if turns[0].startswith("*"):
        roles = ["system", *roles]
    return [
        dict(role=role, content=turn.lstrip("*")) for role, turn in zip(roles, turns, strict=False)
    ]


QUESTION, SYSTEM = chat(" 1+2? "), chat("*Add. ", "1+2?")
TURNS_OF_TWO, GOES_ON = (
    chat("1+2?", "<think>\nhm\n</think>\n\n3", "2+2?"),
    chat("*Add.", "1+2?", "It is "),
)
# What the templates make of QUESTION, SYSTEM, TURNS_OF_TWO and GOES_ON; None: they refuse it.
WRITTEN = dict(
    qwen2=[
        "<S>system\nBe kind.<E>\n<S>user\n 1+2? <E>\n<S>assistant\n",
        "<S>system\nAdd. <E>\n<S>user\n1+2?<E>\n<S>assistant\n",
        "<S>system\nBe kind.<E>\n<S>user\n1+2?<E>\n<S>assistant\n<think>\nhm\n</think>\n\n3<E>\n"
        "<S>user\n2+2?<E>\n<S>assistant\n",
        "<S>system\nAdd.<E>\n<S>user\n1+2?<E>\n<S>assistant\nIt is ",
    ],
    llama3=[
        "<B><H>system</H>\n\nToday: 1 May\n\n<E><H>user</H>\n\n1+2?<E><H>assistant</H>\n\n",
        "<B><H>system</H>\n\nToday: 1 May\n\nAdd.<E><H>user</H>\n\n1+2?<E><H>assistant</H>\n\n",
        "<B><H>system</H>\n\nToday: 1 May\n\n<E><H>user</H>\n\n1+2?<E>"
        "<H>assistant</H>\n\n<think>\nhm\n</think>\n\n3<E>"
        "<H>user</H>\n\n2+2?<E><H>assistant</H>\n\n",
        "<B><H>system</H>\n\nToday: 1 May\n\nAdd.<E><H>user</H>\n\n1+2?<E>"
        "<H>assistant</H>\n\nIt is",
    ],
    gemma2=[
        "<bos><S>user\n1+2?<E>\n<S>model\n",
        None,
        "<bos><S>user\n1+2?<E>\n<S>model\n<think>\nhm\n</think>\n\n3<E>\n<S>user\n2+2?<E>\n<S>model\n",
        None,
    ],
    mistral=[
        "<s>[INST]  1+2? [/INST]",
        "<s>[INST] Add. \n\n1+2?[/INST]",
        "<s>[INST] 1+2?[/INST] <think>\nhm\n</think>\n\n3</s>[INST] 2+2?[/INST]",
        None,  # it writes the system message only into a last turn of the user
    ],
    r1=[
        "<B><U> 1+2? <A><think>\n",
        "<B>Add. <U>1+2?<A><think>\n",
        "<B><U>1+2?<A>\n\n3<E><U>2+2?<A><think>\n",
        "<B>Add.<U>1+2?<A>It is ",
    ],
    qwen3=[
        "<S>user\n 1+2? <E>\n<S>assistant\n",
        "<S>system\nAdd. <E>\n<S>user\n1+2?<E>\n<S>assistant\n",
        "<S>user\n1+2?<E>\n<S>assistant\n3<E>\n<S>user\n2+2?<E>\n<S>assistant\n",
        "<S>system\nAdd.<E>\n<S>user\n1+2?<E>\n<S>assistant\n<think>\n\n</think>\n\nIt is ",
    ],
)
SHORT = dict(
    qwen2={"<S>": IM[1], "<E>": IM[2]},
    qwen3={"<S>": IM[1], "<E>": IM[2]},
    gemma2={"<S>": TURNS[0], "<E>": TURNS[1]},
    llama3={"<B>": HEADERS[0], "<H>": HEADERS[2], "</H>": HEADERS[3], "<E>": HEADERS[5]},
    r1={"<E>": BARS[0], "<U>": BARS[1], "<A>": BARS[2], "<B>": BARS[3]},
)


@pytest.mark.parametrize("name", WRITTEN)
def test_the_templates_of_the_families(name, encode, tmp_path, capsys):
    path, ids = family(tmp_path / "model", name)
    tokenizer, [bos] = (
        harness.rows.load_tokenizer(Config(model=str(path))),
        [FAMILIES[name].get("bos")],
    )
    options = dict(chat_template_kwargs='{"date_string": "1 May"}') if name == "llama3" else {}
    for messages, expected in zip(
        (QUESTION, SYSTEM, TURNS_OF_TWO, GOES_ON), WRITTEN[name], strict=True
    ):
        if expected is None:
            with pytest.raises(
                ConfigError,
                match="row 1: (System role not|the chat template leaves out the system)",
            ):
                encode([dict(prompt=messages)], tokenizer, **options)
            continue
        for short, word in SHORT.get(name, {}).items():
            expected = expected.replace(short, word)
        [prompt] = encode([dict(prompt=messages)], tokenizer, **options)
        assert prompt.text == expected
        assert prompt.ids.tolist().count(ids.get(bos)) == bool(bos)
        if messages[-1]["role"] == "user":
            given = json.loads(options.get("chat_template_kwargs", "{}"))
            written = tokenizer.apply_chat_template(messages, add_generation_prompt=True, **given)[
                "input_ids"
            ]
            assert prompt.ids.tolist() == written
    assert "warning" not in capsys.readouterr().out


def test_what_a_template_refuses_names_the_flag_or_the_row(encode, tmp_path):
    gemma, mistral, r1 = (
        harness.rows.load_tokenizer(Config(model=str(family(tmp_path / name, name)[0])))
        for name in ("gemma2", "mistral", "r1")
    )
    twice = [dict(role="user", content="1"), dict(role="user", content="2")]
    for tokenizer, prompt, options, message in (
        (gemma, "1", dict(system_prompt="Add."), "System role not supported"),
        (
            mistral,
            GOES_ON[1:],
            dict(system_prompt="Add."),
            "the chat template leaves out the system message",
        ),
        (gemma, twice, {}, "Roles must alternate"),
        (mistral, twice, {}, "Roles must alternate"),
        (
            r1,
            chat("1+2?", "<think>a</think>3"),
            {},
            "continue_final_message is set but .*",
        ),  # deleted
    ):
        with pytest.raises(
            ConfigError, match=f"^--train_data .*rows.jsonl row 1: {message}$"
        ) as error:
            encode([dict(prompt=prompt)], tokenizer, **options)
        assert "\n" not in str(error.value)


def test_thinking_that_the_template_begins_or_leaves_out(encode, tmp_path):
    r1, qwen3 = (
        harness.rows.load_tokenizer(Config(model=str(family(tmp_path / name, name)[0])))
        for name in ("r1", "qwen3")
    )
    off = dict(chat=True, chat_template_kwargs='{"enable_thinking": false}')
    begun, none = (encode([dict(prompt="1+2?")], t, **off)[0].text for t in (r1, qwen3))
    assert begun.endswith("<think>\n")
    assert (
        part("format", "hm</think>3", begun)
        == part("answer", "hm</think>3", begun, answer="3")
        == 1
    )
    assert none.endswith("<think>\n\n</think>\n\n") and part("answer", "3", none, answer="3") == 1
    # added tokens, but not special ones
    ids = r1("<think>hm</think>3", add_special_tokens=False)["input_ids"]
    assert len(ids) == 5 and grpo.decode(r1, ids_of(ids)) == "<think>hm</think>3"


def test_todays_date_can_be_pinned(encode, tmp_path):
    tokenizer = harness.rows.load_tokenizer(
        Config(model=str(family(tmp_path / "model", "llama3")[0]))
    )
    assert re.search(
        r"Today: \d\d \w{3} \d{4}\n", encode([dict(prompt=QUESTION)], tokenizer)[0].text
    )
    pinned = encode(
        [dict(prompt=QUESTION)], tokenizer, chat_template_kwargs='{"date_string": "26 Jul 2024"}'
    )
    assert "Today: 26 Jul 2024\n" in pinned[0].text


@pytest.mark.parametrize("name", ["llama3", "r1", "mistral", "gemma2", "smollm2"])
def test_a_string_prompt_has_at_most_one_bos(name, encode, tmp_path):
    """Also where a template wrote it before: rows that hold what apply_chat_template made."""
    path, ids = family(tmp_path / "model", name)
    tokenizer, bos = harness.rows.load_tokenizer(Config(model=str(path))), FAMILIES[name]["bos"]
    plain, written = (
        encode([dict(prompt=text)], tokenizer)[0].ids.tolist() for text in ("1+2?", f"{bos}1+2?")
    )
    assert written[0] == ids[bos] and written.count(ids[bos]) == 1
    assert plain == (written[1:] if name == "smollm2" else written)  # whose tokenizer adds none


@pytest.fixture(scope="module")
def rows_of_two(tmp_path_factory):
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    path.write_text('{"prompt": "1+2?"}\n{"prompt": "the sum of 11 and 22?"}\n')
    return str(path)


# byte-level BPE, and pieces with soft-capped logits; the others are slow
FEW = ("llama3", "gemma2")


@pytest.mark.parametrize(
    "name", [n if n in FEW else pytest.param(n, marks=pytest.mark.slow) for n in FAMILIES]
)
def test_a_family_loads_trains_saves_and_loads(name, tmp_path, rows_of_two, capsys):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path, ids = family(tmp_path / "model", name)
    cfg, ends = Config(model=str(path)), [ids[end] for end in FAMILIES[name]["ends"]]
    [metrics] = family_run(path, tmp_path / "out", rows_of_two)
    assert metrics["grad_norm"] > 0 and metrics["sampler_gap"] < 1e-5
    assert "warning" not in capsys.readouterr().out
    saved = tmp_path / "out" / "step_000001"
    for file in ("config.json", "generation_config.json"):
        assert json.loads((saved / file).read_text()) == json.loads((path / file).read_text())
    before, after = (AutoTokenizer.from_pretrained(folder) for folder in (path, saved))
    prompt = before.apply_chat_template(TURNS_OF_TWO, add_generation_prompt=True)["input_ids"]
    assert (
        after.apply_chat_template(TURNS_OF_TWO, add_generation_prompt=True)["input_ids"] == prompt
    )
    assert after("the 1<think>")["input_ids"] == before("the 1<think>")["input_ids"]
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        assert getattr(after, key) == getattr(before, key)
    # every EOS id ends a sample of ours; and what is saved answers in transformers as in an eval
    model, info = AutoModelForCausalLM.from_pretrained(saved, output_loading_info=True)
    assert not any(info.values())
    loaded = grpo.load_model(str(saved), cfg)
    eos, pad = harness.models.special_ids(loaded, after, cfg)
    assert eos == [*ends, *{after.eos_token_id} - set(ends)] and pad < loaded.config.vocab_size
    neutral = dict(
        do_sample=False, repetition_penalty=1.0, top_k=None, top_p=None, temperature=None
    )
    expected = model.generate(torch.tensor([prompt]), max_new_tokens=20, **neutral)[
        0, len(prompt) :
    ].tolist()
    sampler = grpo.HFSampler(loaded, eos, pad, Config(max_completion_length=20))
    assert texts(sampler.generate([ids_of(prompt)], 1, [0], 0.0)[0]) == [expected]
    # The vocabulary is padded: ids without a token are sampled and trained on, and have no text.
    drawn = np.concatenate([c.ids for c in sampler.generate([ids_of(prompt)], 30, [0], 5.0)[0]])
    known = drawn[drawn < len(after)]
    assert len(known) < len(drawn) and grpo.decode(after, drawn) == grpo.decode(after, known) != ""


def test_no_generation_config_changes_what_is_sampled(tmp_path):
    """Neither its sampling options, nor what transformers would refuse to save."""
    found = []
    for i, generation in enumerate([
        dict(do_sample=None), SAMPLING | dict(do_sample=True), SAMPLING | dict(do_sample=False),
        dict(num_beams=4, length_penalty=0.5, no_repeat_ngram_size=1),
        dict(min_new_tokens=8, max_length=20, max_new_tokens=3, stop_strings=["a"]),
        dict(bad_words_ids=[[7]]),
        dict(suppress_tokens=list(range(5, 250)), num_return_sequences=3, do_sample=True),
    ]):  # fmt: skip
        path, _ = family(tmp_path / f"model{i}", "qwen2", generation)
        cfg = Config(model=str(path), max_completion_length=24)
        model, tokenizer = grpo.load_model(str(path), cfg), harness.rows.load_tokenizer(cfg)
        sampler = grpo.HFSampler(model, *harness.models.special_ids(model, tokenizer, cfg), cfg)
        found.append(texts(sampler.generate([ids_of([5, 6, 7])], 20, [0], 1.0)[0]))
    assert all(other == found[0] for other in found) and len({len(ids) for ids in found[0]}) > 1


def test_a_tokenizer_that_knows_more_than_the_model(tmp_path, rows_of_two):
    """As with tokens that were added and embeddings that were not."""
    # 259 to 262 are the special tokens, 263 has no row
    path, ids = family(tmp_path / "model", "qwen2", size=263)
    cfg = Config(model=str(path))
    tokenizer = harness.rows.load_tokenizer(cfg)
    assert len(tokenizer) == 262
    tokenizer.add_tokens(["<answer>"])
    tokenizer.add_special_tokens(dict(pad_token="[PAD]"))
    tokenizer.save_pretrained(path)
    assert tokenizer.pad_token_id == 263
    # whose prompts differ in length, so there is padding
    [metrics] = family_run(path, tmp_path / "out", rows_of_two)
    assert metrics["sampler_gap"] < 1e-5
    model = grpo.load_model(str(path), cfg)
    tokenizer.add_special_tokens(dict(eos_token="[END]"))
    ends = [ids[end] for end in QWEN_IDS["ends"]]
    assert harness.models.special_ids(model, tokenizer, cfg) == (ends, ids["<|im_end|>"])
    model.generation_config.eos_token_id = [264, -1]
    message = "--model .*: no EOS token of generation_config or tokenizer is in its vocabulary"
    with pytest.raises(ConfigError, match=message):
        harness.models.special_ids(model, tokenizer, cfg)
    prompt = grpo.Prompt(ids_of([1, 263]), "", {})
    for names, said in ((dict(model="m"), "--model m"), (dict(tokenizer="t"), "--tokenizer t")):
        with pytest.raises(
            ConfigError,
            match=f"{said}: the tokenizer makes the token id 263, but the model has 263",
        ):
            harness.models.check_sizes(model, [prompt], Config(max_completion_length=8, **names))


def test_parameters_that_no_text_reaches_are_frozen(capsys):
    """The vision tower of a multimodal class: on two ranks DDP would wait for its gradient."""
    from transformers import AutoModelForCausalLM, Gemma3Config

    sizes = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2)
    text = sizes | dict(
        vocab_size=64, num_key_value_heads=1, head_dim=16, max_position_embeddings=128
    )
    config = Gemma3Config(
        text_config=text, vision_config=sizes | dict(image_size=28, patch_size=14)
    )
    model = AutoModelForCausalLM.from_config(config).eval()
    harness.models.freeze_unused(model, 20)
    assert "tensors that text does not use are frozen" in capsys.readouterr().out
    for name, p in model.named_parameters():
        assert p.requires_grad is not ("vision_tower" in name or "multi_modal_projector" in name)
    for kind, options in (
        ("qwen2", dict(tie_word_embeddings=True)),
        ("mixtral", {}),
        ("gemma2", {}),
    ):
        model = tiny_model(kind, **options)
        harness.models.freeze_unused(model, 20)
        assert all(p.requires_grad and p.grad is None for p in model.parameters())
    assert capsys.readouterr().out == ""


def test_small_models_and_bfloat16_on_every_device(monkeypatch):
    assert harness.auto.is_small(tiny_model())
    with torch.device("meta"):
        assert not harness.auto.is_small(torch.nn.Linear(10_000, 1000))
    asked = []

    def supported(including_emulation=True):  # as of a T4
        asked.append(including_emulation)
        return including_emulation

    monkeypatch.setattr(torch.cuda, "is_bf16_supported", supported)
    assert not harness.auto.fast_bfloat16(torch.device("cuda")) and asked == [False]
    for amx, avx in ((True, False), (False, True), (False, False)):
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda amx=amx: amx)
        monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda avx=avx: avx)
        assert harness.auto.fast_bfloat16(CPU.device) is (amx or avx)


def test_verbose_shows_what_transformers_prints(monkeypatch):
    said = []
    for name in ("disable_progress_bar", "set_verbosity_error"):
        monkeypatch.setattr(transformers.logging, name, lambda name=name: said.append(name))
    harness.models.quiet_transformers(True)
    assert said == []
    harness.models.quiet_transformers(False)
    assert len(said) == 2


def test_what_the_engine_finds_in_its_environment(monkeypatch):
    names = ("VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_LOGGING_LEVEL", "TRITON_F32_DEFAULT")
    for dtype, precision in (("bfloat16", None), ("float32", "ieee")):
        mine = {name: value for name, value in os.environ.items() if name not in names}
        # a user's: the push of weights needs one process
        monkeypatch.setattr(os, "environ", mine | {names[0]: "1"})
        monkeypatch.setitem(sys.modules, "vllm.platforms", None)
        kind, why = harness.engine.choose_sampler(Config(dtype=dtype), CPU.device, False)
        assert kind == "hf" and "vllm cannot be imported" in why
        assert [os.environ.get(name) for name in names] == ["0", "ERROR", precision]


def test_named_templates_are_saved_and_a_changed_one_is_found(tmp_path, rows_of_two, capsys):
    """transformers writes all but the default one into a folder."""
    from transformers import AutoTokenizer

    both = [dict(name="default", template=CHATML), dict(name="tool_use", template="tools")]
    path, _ = family(tmp_path / "model", "qwen2", template=both)
    out = tmp_path / "out"
    family_run(path, out, rows_of_two)
    assert AutoTokenizer.from_pretrained(out / "step_000001").chat_template == dict(
        default=CHATML, tool_use="tools"
    )
    family_run(path, out, rows_of_two, max_steps=2, resume="latest")
    [other] = (out / "step_000002").rglob("tool_use.jinja")
    other.write_text("changed")
    with pytest.raises(OSError, match="tool_use.jinja is damaged"):
        harness.checkpoints.load_checkpoint(str(out / "step_000002"))
    assert "could not save" not in capsys.readouterr().out
