"""Directories as the hub has them, of tiny models of many families."""

import ast
import contextlib
import functools
import importlib.util
import json
from pathlib import Path

import pytest

from tests.common import tiny_model

TRL = Path(getattr(importlib.util.find_spec("trl"), "origin", "none/none")).parent
MISTRAL = """{{ bos_token }}{% set turns = namespace(n=0) %}
{%- if messages[0].role == 'system' %}
    {%- set system, messages = messages[0].content, messages[1:] %}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {{- '[INST] ' + (system + '\n\n' if loop.last and system is defined else '')
            + message.content + '[/INST]' }}
    {%- else %}{{ ' ' + message.content + eos_token }}{% endif %}
{%- endfor %}"""


def template_of(name):
    """A chat template of the hub, as TRL's package has it."""
    if name == "mistral":
        return MISTRAL
    pytest.importorskip("trl")
    return (TRL / "chat_templates" / f"{name}.jinja").read_text("utf-8")


@functools.cache
def of_trl(file):
    """What a file of TRL defines: its functions, and what else needs none of its imports, because
    those need `datasets`."""
    tree = ast.parse((TRL / file).read_text("utf-8"))
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    defined = dict(__file__=str(TRL / file))
    for node in [*tree.body, *functions]:
        with contextlib.suppress(Exception):
            exec(compile(ast.Module([node], []), "trl", "exec"), defined)
    return defined


IM = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TURNS = ("<start_of_turn>", "<end_of_turn>")
HEADERS = tuple(
    f"<|{word}|>"
    for word in "begin_of_text end_of_text start_header_id end_header_id eom_id eot_id".split()
)
BARS = ("<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "<｜begin▁of▁sentence｜>")
SAMPLING = dict(temperature=0.6, top_p=0.8, top_k=2, repetition_penalty=1.3)
ROPE = dict(
    rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, rope_theta=5e5
)
ROPE |= dict(original_max_position_embeddings=128)
QWEN_IDS = dict(eos="<|im_end|>", pad="<|endoftext|>", ends=["<|im_end|>", "<|endoftext|>"])
GEMMA_IDS = dict(bos="<bos>", eos="<eos>", pad="<pad>", ends=["<eos>", "<end_of_turn>"])
GEMMA_FILES = dict(
    pieces=("<pad>", "<eos>", "<bos>", "<unk>", *TURNS),
    tokenizer_class="GemmaTokenizer",
    template="gemma",
)
CAPS = dict(attn_logit_softcapping=50.0, final_logit_softcapping=30.0, sliding_window=16)

# The ids of `ends` are eos_token_id of generation_config.json.
FAMILIES = dict(
    qwen2=dict(
        kind="qwen2",
        words=IM,
        tokenizer_class="Qwen2Tokenizer",
        template="qwen2_5",
        **QWEN_IDS,
        generation=SAMPLING | dict(do_sample=True),
    ),
    llama3=dict(
        kind="llama",
        words=HEADERS,
        tokenizer_class="PreTrainedTokenizerFast",
        template="llama3_1",
        adds_bos=True,
        bos="<|begin_of_text|>",
        eos="<|eot_id|>",
        ends=["<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"],
        generation=dict(do_sample=True, temperature=0.6, top_p=0.9),
        model=dict(rope_parameters=ROPE),
    ),
    gemma2=dict(
        kind="gemma2",
        **GEMMA_FILES,
        **GEMMA_IDS,
        model=CAPS,
        generation=dict(cache_implementation="hybrid"),
    ),
    gemma3=dict(
        kind="gemma3",
        **GEMMA_FILES | dict(template="gemma3"),
        **GEMMA_IDS,
        model=dict(sliding_window=16),
        generation=dict(cache_implementation="hybrid", do_sample=True, top_k=64, top_p=0.95),
    ),
    mistral=dict(
        kind="mistral",
        pieces=("<unk>", "<s>", "</s>", "[INST]", "[/INST]"),
        tokenizer_class="LlamaTokenizer",
        template="mistral",
        bos="<s>",
        eos="</s>",
        ends=["</s>"],
        model=dict(sliding_window=16),
    ),
    r1=dict(
        kind="qwen2",
        words=BARS,
        more=("<think>", "</think>"),
        tokenizer_class="LlamaTokenizerFast",
        template="deepseek_r1_distill",
        adds_bos=True,
        bos=BARS[3],
        eos=BARS[0],
        pad=BARS[0],
        ends=[BARS[0]],
        generation=dict(do_sample=True, temperature=0.6, top_p=0.95),
    ),
    qwen3=dict(
        kind="qwen3",
        words=IM,
        more=("<think>", "</think>"),
        tokenizer_class="Qwen2Tokenizer",
        template="qwen3",
        **QWEN_IDS,
        generation=SAMPLING | dict(do_sample=True),
    ),
)


def bytes_tokenizer(words, more, bos):
    """Byte-level BPE, as GPT-2, Qwen and Llama 3 have it.

    words: special tokens, which follow the others; more: added tokens that are not special.
    """
    from tokenizers import (
        AddedToken,
        Regex,
        Tokenizer,
        decoders,
        models,
        pre_tokenizers,
        processors,
    )

    merges = [("t", "h"), ("th", "e"), ("Ġ", "a")]
    vocabulary = [
        *sorted(pre_tokenizers.ByteLevel.alphabet()),
        *map("".join, merges),
        *words,
        *more,
    ]
    ids = {word: i for i, word in enumerate(vocabulary)}
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=merges))
    split = pre_tokenizers.Split(Regex(r"\p{N}| ?\p{L}+|[^\p{L}\p{N}]+"), "isolated")
    plain = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer, tokenizer.decoder = (
        pre_tokenizers.Sequence([split, plain]),
        decoders.ByteLevel(),
    )
    tokenizer.add_special_tokens([AddedToken(word, normalized=False) for word in words])
    tokenizer.add_tokens([AddedToken(word, normalized=False) for word in more])
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            f"{bos} $A", special_tokens=[(bos, ids[bos])]
        )
    return tokenizer


def pieces_tokenizer(specials, bos):
    """BPE of pieces that falls back to bytes, as Llama 2, Mistral and Gemma have it; the special
    tokens come first."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors

    letters = "\n▁ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+-=.,:;?!"
    vocabulary = [*specials, *(f"<0x{i:02X}>" for i in range(256)), *letters, "▁t", "▁th"]
    ids = {word: i for i, word in enumerate(vocabulary)}
    merges = [("▁", "t"), ("▁t", "h")]
    options = dict(unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=merges, **options))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.add_special_tokens([AddedToken(word, normalized=False) for word in specials])
    tokenizer.post_processor = processors.TemplateProcessing(
        f"{bos} $A", special_tokens=[(bos, ids[bos])]
    )
    return tokenizer


def family(path, name, generation=None, size=None, **changes):
    """A directory as the hub has it: config, weights, tokenizer, template, generation config.

    The vocabulary is padded to a multiple of 64, or is `size`. Returns the path and the ids of
    tokens.
    """
    has = FAMILIES[name] | changes
    bos, eos, pad = (has.get(key) for key in ("bos", "eos", "pad"))
    if "words" in has:
        tokenizer = bytes_tokenizer(
            has["words"], has.get("more", ()), bos if has.get("adds_bos") else None
        )
    else:
        tokenizer = pieces_tokenizer(has["pieces"], bos)
    ids, words = tokenizer.get_vocab(), tokenizer.get_vocab_size()
    own = dict(
        eos_token_id=[ids[end] for end in has["ends"]],
        bos_token_id=ids.get(bos),
        pad_token_id=ids.get(pad),
    )
    sizes = dict(
        vocab_size=size or -(-(words + 1) // 64) * 64,
        tie_word_embeddings=name not in ("llama3", "mistral", "r1"),
    )
    tiny_model(has["kind"], **(sizes | own | has.get("model", {}))).save_pretrained(path)
    tokenizer.save(str(path / "tokenizer.json"))
    added = {
        str(i): token.__getstate__() for i, token in tokenizer.get_added_tokens_decoder().items()
    }
    config = dict(
        added_tokens_decoder=added,
        tokenizer_class=has["tokenizer_class"],
        chat_template=template_of(has["template"]),
    )
    config |= dict(
        bos_token=bos, eos_token=eos, pad_token=pad, clean_up_tokenization_spaces=name == "llama3"
    )
    config |= dict(add_bos_token=bos is not None and "words" not in has)
    (path / "tokenizer_config.json").write_text(
        json.dumps({k: v for k, v in config.items() if v is not None})
    )
    generation = has.get("generation", {}) if generation is None else generation
    generation = {k: v for k, v in (own | generation).items() if v is not None}
    (path / "generation_config.json").write_text(
        json.dumps(generation | dict(transformers_version="4.45.0"))
    )
    return path, ids
