"""What people reported of other trainers and of the libraries below: it must not happen here."""

import json

import numpy as np
import pytest
import tokenizers
import torch
import transformers

import grpo
from grpo import Config, ConfigError, TrainingError
from reward import load_function
from tests.common import CPU, HERE, lines, small_run, tiny_model
from tests.test_models import load, write
from tests.test_vllm import in_a_process

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


def test_a_prompt_whose_ids_say_something_else_is_refused(tmp_path):
    class DropsBlanks:
        bos_token_id, eos_token_id = None, 1

        def __call__(self, text, add_special_tokens=True):
            return dict(input_ids=[ord(letter) for letter in text if letter != " "])

        def decode(self, ids, **_):
            return "".join(map(chr, ids)).replace("]", "] ")

        def get_added_vocab(self):
            return {"[X]": 7}

    assert grpo.string_ids(" ab", DropsBlanks()).tolist() == [97, 98]  # a leading blank is none
    assert len(grpo.string_ids("a[X]b", DropsBlanks())) == 5  # nor is one beside a special token
    template_column = dict(prompt_template="{question}")
    with pytest.raises(ConfigError, match="no column 'question'"):
        load(f"{HERE}/sample_data/model", [dict(question=None)], tmp_path, **template_column)
    with pytest.raises(ValueError, match="'ab'"):
        grpo.string_ids("a b", DropsBlanks())


def test_rows_as_pandas_reads_them(tmp_path):
    message = {"role": "user", "content": "1+2="}
    row = {"prompt": np.array([message], object), "answer": np.float32(5e-5), "n": np.int64(3)}
    assert grpo.plain_values(row) == {"prompt": [message], "answer": 5e-05, "n": 3}
    path = tmp_path / "rows.py"
    path.write_text("def rows():\n    return [dict(prompt='1+2=', answer='3', x=float('nan'))]\n")
    with pytest.raises(ConfigError, match="row 1: column 'x'"):
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
    with pytest.raises(ConfigError, match="no column 'answer'"):
        load(f"{HERE}/sample_data/model", [dict(prompt="a")], tmp_path, "answer")


@pytest.mark.parametrize("temperature", [0.005, 2.5])
def test_temperatures_that_vllm_changes_are_refused(temperature):
    cfg = Config(model="m", rollout="vllm", temperature=temperature)
    with pytest.raises(ConfigError, match="temperature"):
        grpo.make_sampler(tiny_model(), [1], 64, cfg)


def test_the_reason_of_a_pydantic_error_is_in_a_later_line():
    error = ValueError("1 validation error for VllmConfig\n  Value error, no such cache\n more")
    assert "no such cache" in grpo.one_line(error)
    assert grpo.one_line(ValueError("first\nsecond")) == "first"


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


def test_recurrent_models_see_no_padding(monkeypatch):
    model = tiny_model()
    padded = []

    def forward(ids, attention_mask, **options):
        padded.append(bool((attention_mask == 0).any()))
        return honest(ids, attention_mask=attention_mask, **options)

    honest = model.forward
    monkeypatch.setattr(model, "forward", forward)
    sampler = grpo.HFSampler(model, [1], Config(max_completion_length=3))
    prompts = [np.arange(5, 5 + n) for n in (3, 5, 3, 4)]
    seeds = [(0, i) for i in range(4)]
    first = sampler.generate(prompts, seeds, 1.0)
    assert any(padded)
    padded.clear()
    model._is_stateful = True
    second = sampler.generate(prompts, seeds, 1.0)
    assert not any(padded)
    assert [ids.tolist() for ids, _ in first] == [ids.tolist() for ids, _ in second]


def test_an_eval_by_other_weights_ends_the_run(tmp_path, monkeypatch):
    def sampler_with_other_weights(model, stop_ids, longest, cfg):
        return grpo.HFSampler(grpo.copy.deepcopy(model).apply(double), stop_ids, cfg)

    def double(module):
        if isinstance(module, torch.nn.Linear):
            module.weight.data.mul_(1.1)

    monkeypatch.setattr(grpo, "make_sampler", sampler_with_other_weights)
    with pytest.raises(TrainingError, match="off on average"):
        small_run(tmp_path / "run", eval_data=f"{HERE}/sample_data/eval.jsonl", max_steps=0)


def untied_head(folder):
    """The gap of an engine to a model whose config says tied, and whose head is its own."""
    model = tiny_model("qwen2", tie_word_embeddings=False, vocab_size=64)
    model.config.tie_word_embeddings = True
    model.save_pretrained(folder)
    model.config.tie_word_embeddings = False
    cfg = Config(model=folder, dtype="float32", max_completion_length=16)
    sampler = grpo.VLLMSampler(model, [1], 80, cfg)
    sampler.push(model)
    [(ids, logps)] = sampler.generate([np.arange(5, 12)], [(0, 0)], 1.0)
    sample = grpo.Sample(0, grpo.Prompt(np.arange(5, 12), "", {}), ids, logps)
    with torch.no_grad():
        ours, _ = grpo.Policy(model, 1.0)(grpo.collate([sample], CPU))
    sampler.close()
    print(json.dumps(float(np.abs(ours.numpy()[0] - logps).max())))


@pytest.mark.slow
def test_vllm_does_not_tie_a_head_that_the_trainer_has_untied(tmp_path):
    pytest.importorskip("vllm")
    assert in_a_process("untied_head", tmp_path, module="test_reports") < 1e-4


def test_a_push_that_fails_is_one_line():
    class Engine:
        def apply_model(self, function): ...

        def collective_rpc(self, name, kwargs):
            raise KeyError("e_score_correction_bias")

    sampler = object.__new__(grpo.VLLMSampler)
    sampler.llm, sampler.asleep, sampler.cfg = Engine(), False, Config()
    with pytest.raises(TrainingError, match="--rollout hf"):
        sampler.push(tiny_model())


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
