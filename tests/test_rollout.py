"""TODO."""

import math

import numpy as np
import pytest
import torch
import transformers

import grpo
import harness.log
import harness.rows
import reward
from grpo import Config, Prompt, Sample
from tests.common import BUNDLED, CPU, ids_of, sampler_of, texts, tiny_model
from tests.families import pieces_tokenizer

pytest_plugins = "tests.common"


def test_samples_follow_the_scored_distribution():
    """The sampler's log-probabilities are the policy's, and frequencies match them: temperature only, no top-p."""
    import transformers

    model = tiny_model()
    model.generation_config = transformers.GenerationConfig(
        top_p=0.1, top_k=2, repetition_penalty=2.0, do_sample=True
    )
    sampler = sampler_of(model, max_completion_length=1)
    [samples] = sampler.generate([ids_of([5, 6, 7])], 4000, [0], 0.7)
    logps = (model(torch.tensor([[5, 6, 7]])).logits[0, -1] / 0.7).log_softmax(-1)
    counts = torch.bincount(torch.tensor([s.ids[0] for s in samples]), minlength=32) / 4000
    assert (counts - logps.exp()).abs().max() < 4 * 0.5 / math.sqrt(4000)
    for s in samples[:50]:
        assert s.logps[0] == pytest.approx(logps[s.ids[0]].item(), abs=1e-5)


def test_a_sample_depends_on_its_seed_only():
    sampler = sampler_of(tiny_model())
    prompts = [ids_of(ids) for ids in ([5, 6, 7], [8], [9, 10, 11, 12, 13])]
    together = sampler.generate(prompts, 4, [1, 2, 3], 1.0)
    for i, prompt in enumerate(prompts):
        [alone] = sampler.generate([prompt], 4, [i + 1], 1.0)
        assert texts(alone) == texts(together[i])
        assert len({tuple(c.ids) for c in alone}) > 1
    others = sampler.generate(prompts, 4, [4, 5, 6], 1.0)
    assert list(map(texts, others)) != list(map(texts, together))
    assert sampler.generate([], 4, [], 1.0) == []


def test_every_eos_id_stops_and_is_kept():
    sampler = sampler_of(tiny_model(), eos=(1, 2, 3, 4, 5, 6, 7, 8), max_completion_length=20)
    [samples] = sampler.generate([ids_of([9, 10])], 64, [0], 1.0)
    assert {s.finish_reason for s in samples} == {"stop", "length"} or all(
        s.finish_reason == "stop" for s in samples
    )
    for s in samples:
        ended = s.ids[-1] <= 8 and s.ids[-1] >= 1
        assert ended == (s.finish_reason == "stop") and not any(1 <= i <= 8 for i in s.ids[:-1])
        assert len(s.logps) == len(s.ids) and (ended or len(s.ids) == 20)


def test_pad_may_equal_eos():
    model = tiny_model()
    cfg = Config(max_completion_length=10)
    prompts = [ids_of([5]), ids_of([6, 7, 8])]
    one = grpo.HFSampler(model, [1], 0, cfg).generate(prompts, 8, [1, 2], 1.0)
    other = grpo.HFSampler(model, [1], 1, cfg).generate(prompts, 8, [1, 2], 1.0)
    assert list(map(texts, one)) == list(map(texts, other))
    ended = [c for g in one for c in g if c.finish_reason == "stop"]
    assert ended and all(c.ids[-1] == 1 for c in ended)
    # the sampled EOS is an action: it is in the loss
    batch = grpo.collate(
        [Sample(0, Prompt(ids_of([5]), "", {}), ended[0].ids, ended[0].logps, "stop")],
        CPU.device,
    )
    assert batch["mask"].sum() == len(ended[0].ids)


def test_prompts_of_a_step_are_a_function_of_seed_and_step():
    prompts = [Prompt([i], "", {}) for i in range(7)]
    cfg = Config(num_prompts=3)
    drawn = [p.ids[0] for step in range(1, 15) for p in grpo.prompts_of_step(prompts, step, cfg)]
    epochs = [drawn[i : i + 7] for i in range(0, 42, 7)]
    assert all(sorted(e) == list(range(7)) for e in epochs) and len(set(map(tuple, epochs))) > 1
    assert [p.ids[0] for p in grpo.prompts_of_step(prompts, 5, cfg)] == drawn[12:15]
    assert [
        p.ids[0] for p in grpo.prompts_of_step(prompts, 1, Config(num_prompts=3, seed=1))
    ] != drawn[:3]
    assert (
        len(grpo.prompts_of_step(prompts, 1, Config(num_prompts=20))) == 20
    )  # more than there are


def test_a_reward_sees_special_tokens_but_not_the_end():
    """Where <think> is one, as in Qwen3's and R1's tokenizers, the built-in rewards pay all the same."""
    tokenizer = harness.rows.load_tokenizer(BUNDLED)
    tokenizer.add_special_tokens(dict(additional_special_tokens=["<think>", "</think>"]))
    assert "<think>" in tokenizer.all_special_tokens and "<eos>" in tokenizer.all_special_tokens
    ids = ids_of(
        [
            *tokenizer("<think>1+2=3</think>3", add_special_tokens=False)["input_ids"],
            tokenizer.eos_token_id,
        ]
    )
    sample = Sample(0, Prompt(ids_of([2]), "", {}), ids, np.zeros(len(ids)), "stop")
    grpo.add_texts([sample], tokenizer)
    text = sample.text
    assert text == "<think>1+2=3</think>3"
    row = dict(answer="3", prompt_text="1+2=")
    assert [
        reward.BUILT_IN[name].function(text, row) for name in ("answer", "format", "gsm8k")
    ] == [1.0] * 3
    assert "".join(harness.log.token_texts(tokenizer, ids, text)) == text


def test_bytes_that_make_no_character_have_their_place_in_the_log():
    """Llama 2 and Mistral may sample them, and tokenizers' stream gives up. Other kinds of tokenizer have no stream."""
    backend = pieces_tokenizer(["<unk>", "<s>"], "<s>")
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", bos_token="<s>"
    )
    ids = ids_of(tokenizer.convert_tokens_to_ids(["a", "<0x0A>", "<0xF0>", "b", "c"]))
    text = grpo.decode(tokenizer, ids)
    found = harness.log.token_texts(tokenizer, ids, text)
    assert found[0] == "a" and len(found) == len(ids) and "".join(found) == text
    assert harness.log.token_texts(range(300), ids, text) == ["", "", "", "", text]
