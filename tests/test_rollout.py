"""What a step samples: prompts, the Hugging Face sampler, texts; and how samples are shared out."""

import itertools

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


# ------------------------------------------------------------------------------------------------
# Prompts


def test_prompts_of_a_step_are_a_function_of_seed_and_step():
    prompts = [Prompt([i], "", {}) for i in range(7)]
    cfg = Config(num_prompts=3)

    def drawn(step, cfg=cfg):
        return [p.ids[0] for p in grpo.prompts_of_step(prompts, step, cfg)]

    stream = list(itertools.chain(*(drawn(step) for step in range(1, 15))))
    epochs = [stream[i : i + 7] for i in range(0, 42, 7)]
    assert all(sorted(epoch) == list(range(7)) for epoch in epochs)
    assert len(set(map(tuple, epochs))) > 1
    assert drawn(5) == stream[12:15]
    assert drawn(1, Config(num_prompts=3, seed=1)) != stream[:3]
    assert len(drawn(1, Config(num_prompts=20))) == 20  # more than there are


# ------------------------------------------------------------------------------------------------
# The sampler


def test_samples_follow_the_scored_distribution():
    """The sampler's log-probabilities are the policy's, and frequencies match them: temperature
    only, whatever else the model's generation config asks for."""
    model = tiny_model()
    model.generation_config = transformers.GenerationConfig(
        top_p=0.1, top_k=2, repetition_penalty=2.0, do_sample=True
    )
    sampler = sampler_of(model, max_completion_length=1)
    n = 4000
    [samples] = sampler.generate([ids_of([5, 6, 7])], n, [0], 0.7)
    logps = (model(torch.tensor([[5, 6, 7]])).logits[0, -1] / 0.7).log_softmax(-1)
    counts = torch.bincount(torch.tensor([s.ids[0] for s in samples]), minlength=32)
    assert (counts / n - logps.exp()).abs().max() < 4 * 0.5 / n**0.5
    for s in samples[:50]:
        assert s.logps[0] == pytest.approx(logps[s.ids[0]].item(), abs=1e-5)


def test_a_sample_depends_on_its_seed_only():
    sampler = sampler_of(tiny_model())
    prompts = [ids_of(ids) for ids in ([5, 6, 7], [8], [9, 10, 11, 12, 13])]
    together = sampler.generate(prompts, 4, [1, 2, 3], 1.0)
    for i, prompt in enumerate(prompts):
        [single] = sampler.generate([prompt], 4, [i + 1], 1.0)
        assert texts(single) == texts(together[i])
        assert len({tuple(c.ids) for c in single}) > 1
    others = sampler.generate(prompts, 4, [4, 5, 6], 1.0)
    assert list(map(texts, others)) != list(map(texts, together))
    assert sampler.generate([], 4, [], 1.0) == []


def test_a_sampler_stops_at_its_own_tokens_only():
    """A second sampler on the same model, such as one that stops at calls of tools."""
    model = tiny_model()
    sampler = sampler_of(model)
    prompt = ids_of([5, 6, 7])
    [before] = sampler.generate([prompt], 8, [1], 1.0)
    other = sampler_of(model, eos=range(0, 32, 2))
    [cut] = other.generate([prompt], 8, [1], 1.0)
    [after] = sampler.generate([prompt], 8, [1], 1.0)
    assert texts(cut) != texts(before)
    assert texts(after) == texts(before)


def test_a_limit_for_each_prompt_only_cuts():
    sampler = sampler_of(tiny_model())  # at most 10 tokens
    prompts = [ids_of(ids) for ids in ([5, 6, 7], [8])]
    whole = sampler.generate(prompts, 8, [1, 2], 1.0)
    cut = sampler.generate(prompts, 8, [1, 2], 1.0, limits=[3, 7])
    for group, cut_group, limit in zip(whole, cut, (3, 7), strict=True):
        for completion, other in zip(group, cut_group, strict=True):
            assert other.ids.tolist() == completion.ids[:limit].tolist()
            assert np.allclose(other.logps, completion.logps[:limit], atol=1e-5)
            is_cut = len(completion.ids) > limit
            assert other.finish_reason == ("length" if is_cut else completion.finish_reason)


def test_every_eos_id_stops_and_is_kept():
    eos = range(1, 9)
    sampler = sampler_of(tiny_model(), eos=eos, max_completion_length=20)
    [samples] = sampler.generate([ids_of([9, 10])], 64, [0], 1.0)
    assert "stop" in {s.finish_reason for s in samples}
    for s in samples:
        ended = s.ids[-1] in eos
        assert ended == (s.finish_reason == "stop")
        assert not any(i in eos for i in s.ids[:-1])
        assert len(s.logps) == len(s.ids)
        assert ended or len(s.ids) == 20


def test_pad_may_equal_eos():
    model = tiny_model()
    cfg = Config(max_completion_length=10)
    prompts = [ids_of([5]), ids_of([6, 7, 8])]
    groups = grpo.HFSampler(model, [1], 0, cfg).generate(prompts, 8, [1, 2], 1.0)
    others = grpo.HFSampler(model, [1], 1, cfg).generate(prompts, 8, [1, 2], 1.0)
    assert list(map(texts, groups)) == list(map(texts, others))
    ended = [c for group in groups for c in group if c.finish_reason == "stop"]
    assert ended and all(c.ids[-1] == 1 for c in ended)

    # The sampled EOS is an action: it is in the loss.
    first = ended[0]
    sample = Sample(0, Prompt(ids_of([5]), "", {}), first.ids, first.logps, "stop")
    assert grpo.collate([sample], CPU.device)["mask"].sum() == len(first.ids)


# ------------------------------------------------------------------------------------------------
# Texts


def test_a_reward_sees_special_tokens_but_not_the_end():
    """<think> may be one, as in Qwen3's and R1's tokenizers; the built-in rewards pay all the
    same."""
    tokenizer = harness.rows.load_tokenizer(BUNDLED)
    tokenizer.add_special_tokens(dict(additional_special_tokens=["<think>", "</think>"]))
    assert "<think>" in tokenizer.all_special_tokens and "<eos>" in tokenizer.all_special_tokens
    written = "<think>1+2=3</think>3"
    ids = tokenizer(written, add_special_tokens=False)["input_ids"]
    ids = ids_of([*ids, tokenizer.eos_token_id])
    sample = Sample(0, Prompt(ids_of([2]), "", {}), ids, np.zeros(len(ids)), "stop")
    grpo.add_texts([sample], tokenizer)
    text = sample.text
    assert text == written
    row = dict(answer="3", prompt_text="1+2=")
    for name in ("answer", "format", "gsm8k"):
        assert reward.BUILT_IN[name].function(text, row) == 1.0
    assert "".join(harness.log.token_texts(tokenizer, ids, text)) == text


def test_bytes_that_make_no_character_have_their_place_in_the_log():
    """Llama 2 and Mistral may sample them, and tokenizers' stream gives up. Other kinds of
    tokenizer have no stream."""
    backend = pieces_tokenizer(["<unk>", "<s>"], "<s>")
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", bos_token="<s>"
    )
    ids = ids_of(tokenizer.convert_tokens_to_ids(["a", "<0x0A>", "<0xF0>", "b", "c"]))
    text = grpo.decode(tokenizer, ids)
    pieces = harness.log.token_texts(tokenizer, ids, text)
    assert pieces[0] == "a" and len(pieces) == len(ids) and "".join(pieces) == text
    assert harness.log.token_texts(range(300), ids, text) == ["", "", "", "", text]


# ------------------------------------------------------------------------------------------------
# Micro-batches


@pytest.mark.parametrize("packs", [True, False])
@pytest.mark.parametrize("n_ranks", [1, 3, 5])
def test_micro_batches_fill_their_budget_and_ranks_get_nearly_the_same(n_ranks, packs):
    samples = []
    for group in range(4):
        prompt = Prompt(ids_of([5] * 100), "", {})
        samples += [Sample(group, prompt, ids_of([6] * 20), None, "stop") for _ in range(8)]

    def size(micro):
        if not packs:
            return len(micro) * 120
        return 100 * len({s.group for s in micro}) + 19 * len(micro)

    budget = 300
    cfg = Config(micro_batch_tokens=budget)
    shares = grpo.plan(samples, packs, cfg, n_ranks)
    micros = [micro for share in shares for micro in share]
    assert sorted(map(id, itertools.chain(*micros))) == sorted(map(id, samples))
    assert all(size(micro) <= budget for micro in micros)
    for share in shares:
        for micro, following in itertools.pairwise(share):
            assert size([*micro, following[0]]) > budget
    loads = [sum(map(size, share)) for share in shares]
    assert max(loads) < 1.5 * sum(loads) / n_ranks + 100
