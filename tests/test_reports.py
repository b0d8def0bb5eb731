"""What people reported of other trainers and of the libraries below: it must not happen here."""

import json

import pytest
import tokenizers
import torch
import transformers

import grpo
from grpo import Config, ConfigError, TrainingError
from reward import load_function
from tests.common import CPU, HERE, lines, small_run, tiny_model
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
    loaded = grpo.load_tokenizer(str(tmp_path))
    text = "Add the  numbers.\n\n3 + 4 = ?"
    assert loaded(text)["input_ids"] == written.encode(text).ids


class DropsBlanks:
    """A tokenizer that was rebuilt wrongly. It also writes blanks beside a special token."""

    bos_token, eos_token_id, chat_template = None, 1, None

    def __call__(self, text, add_special_tokens=True):
        return dict(input_ids=[ord(letter) for letter in text if letter != " "])

    def decode(self, ids, **_):
        return "".join(map(chr, ids)).replace("]", "] ")

    def get_added_vocab(self):
        return {"[X]": 7}


def test_a_tokenizer_that_loses_blanks_is_refused(tmp_path):
    def load_one(text):
        path = write(tmp_path, [dict(prompt=text)])
        return grpo.load_prompts("train_data", DropsBlanks(), [], None, Config(train_data=path))

    assert load_one(" ab")[0].ids.tolist() == [97, 98]  # a leading blank is none
    assert len(load_one("a[X]b")[0].ids) == 5  # nor is one beside a special token
    with pytest.raises(ConfigError, match="'ab'"):
        load_one("a b")


def test_a_null_column_of_a_template_is_named(tmp_path):
    template_column = dict(prompt_template="{question}")
    with pytest.raises(ConfigError, match="no column 'question'"):
        load(f"{HERE}/sample_data/model", [dict(question=None)], tmp_path, **template_column)


def test_a_row_with_nan_is_refused(tmp_path):
    path = tmp_path / "rows.py"
    path.write_text("def rows():\n    return [dict(prompt='1+2=', answer='3', x=float('nan'))]\n")
    with pytest.raises(ConfigError, match="row 1: "):
        small_run(tmp_path / "run", train_data=f"{path}:rows")


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
        assert list(row["rewards"]) == ["answer" if row["row"]["answer"] else "tests"]
    with pytest.raises(ConfigError, match="no column .*'answer'"):
        load(f"{HERE}/sample_data/model", [dict(prompt="a")], tmp_path, "answer")


def test_the_reason_of_a_pydantic_error_is_in_a_later_line():
    error = ValueError("1 validation error for VllmConfig\n  Value error, no such cache\n more")
    assert "no such cache" in grpo.one_line(error) and "\n" not in grpo.one_line(error)


def test_models_that_cannot_be_trained_are_one_line(tmp_path):
    tiny_model().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    quantized = config | dict(quantization_config=dict(quant_method="bitsandbytes"))
    foreign = config | dict(model_type="x", auto_map=dict(AutoConfig="c.C"))
    (tmp_path / "c.py").write_text("raise SystemExit\n")
    for changed, word in ((quantized, "quantized"), (foreign, "custom code")):
        (tmp_path / "config.json").write_text(json.dumps(changed))
        with pytest.raises(ConfigError, match=word):
            grpo.load_model("model", str(tmp_path), Config(), CPU)


def test_an_eval_by_other_weights_ends_the_run(tmp_path, monkeypatch):
    def sampler_with_other_weights(model, stop_ids, longest, cfg):
        return grpo.HFSampler(grpo.copy.deepcopy(model).apply(double), stop_ids, cfg)

    def double(module):
        if isinstance(module, torch.nn.Linear):
            module.weight.data.mul_(1.1)

    monkeypatch.setattr(grpo, "make_sampler", sampler_with_other_weights)
    with pytest.raises(TrainingError, match="off on average"):
        small_run(tmp_path / "run", eval_data=f"{HERE}/sample_data/eval.jsonl", max_steps=0)


def test_a_reward_that_ranks_a_group_sees_it_whole(tmp_path):
    """As in REFERENCE: all samples of a prompt are in one call of a function in TRL's form."""
    example = open(f"{HERE}/REFERENCE.md").read().partition("```python\n")[2].partition("```")[0]
    path = tmp_path / "ranks.py"
    path.write_text(example)
    out = tmp_path / "run"
    small_run(out, reward=f"{path}:longest_wins", max_steps=1)
    groups = {}
    for row in lines(out / "completions.jsonl"):
        groups.setdefault(row["group"], []).append(row["reward"])
    assert len(groups) == 3
    assert all(sorted(rewards) == [0, 0.25, 0.5, 0.75, 1] for rewards in groups.values())


def test_a_step_that_moves_nothing_says_so(tmp_path, capsys):
    small_run(tmp_path / "run", reward="format", max_steps=1)  # no completion has the format
    assert "NO OPTIMIZER STEP" in capsys.readouterr().out


def test_an_environment_with_reset_and_step_is_replayed_from_its_turns():
    pytest.importorskip("gem")
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
