"""Checks the start of a run for silent failures that people have reported in trainers, libraries
and files. A new report becomes a new check here.

A check raises a ValueError, which ends the run with one line that names the flag, the file and the
row, or it returns a text to print. Without extras/ a run starts unchecked.
"""

import contextlib
import copy
import functools
import json
import math
import os
import re
import sys
import typing
from dataclasses import replace
from datetime import date, datetime, time, timedelta
from unicodedata import normalize

import numpy as np

import grpo
from extras import digests
from reward import ADDED, BUILT_IN

LOWEST: dict = dict(num_generations=2, temperature=1e-6, call_timeout=1e-3)  # all others: 0
LOWEST |= dict.fromkeys(("num_prompts", "max_prompt_length", "max_completion_length"), 1)
LOWEST |= dict.fromkeys(("num_minibatches", "num_epochs", "max_turns"), 1)
HIGHEST: dict = dict.fromkeys(("num_prompts", "num_generations", "max_completion_length"), 1e8)


# -- Flags
def suggest_flag(message, names):
    """argparse's message, or for an unknown flag a suggestion, such as learning_rate for lr."""
    unknown = re.match(r"unrecognized arguments: --(\w+)", message)
    if unknown is None:
        return message
    pattern = "(^|_)" + ".*".join(unknown[1])
    meant = " or ".join(f"--{name}" for name in names if re.search(pattern, name))
    if meant:
        return f"unknown --{unknown[1]}; did you mean {meant}?"
    return f"unknown --{unknown[1]}; --help lists the flags"


def check_values(cfg):
    """Rejects impossible values, which would fail later, where they are used."""
    for name, kind in typing.get_type_hints(type(cfg)).items():
        value, choices = getattr(cfg, name), typing.get_args(kind)
        low, high = LOWEST.get(name, 0), HIGHEST.get(name, math.inf)
        default = getattr(type(cfg), name, -1)  # none with a default_factory
        if name == "num_generations" and digests.changed("assign_advantages", "group_advantages"):
            low = 1  # your baseline may not be the mean of the group
        is_known = default >= low if kind in (int, float) else False
        if is_known and not low <= value < high:  # a flag of yours may be negative
            raise ValueError(f"--{name}: must be at least {low} and below {high:g}, not {value}")
        if typing.get_origin(kind) is typing.Literal and value not in choices:
            raise ValueError(f"--{name}: {value} is not one of {', '.join(choices)}")
    for name in ("about", "added", "first_day"):
        if hasattr(cfg, name):
            raise ValueError(f"--{name} is a name that extras/ uses: rename it")
    if cfg.plain:
        raise ValueError("--plain is for the command line; in Python set grpo.USE_EXTRAS = False")
    if not cfg.model:
        raise ValueError("--model is empty; Config(**BUNDLED) is the bundled task")
    if not cfg.train_data:
        raise ValueError("--train_data is required if --model is given")
    if cfg.max_steps > 999_999:
        raise ValueError("--max_steps: 999999 at most, as step_NNNNNN has six digits")
    if cfg.num_minibatches > cfg.num_prompts * cfg.num_generations:
        raise ValueError("--num_minibatches: more than the step's samples")
    is_k1 = digests.changed("kl_from_here_on") or getattr(cfg, "kl_estimator", "k1") == "k1"
    if cfg.kl_in == "reward" and cfg.beta > 0 and not is_k1:
        raise ValueError("--kl_estimator: with --kl_in reward only k1 has the right gradient")
    try:
        datetime.fromisoformat(cfg.began or "2026-01-31")
    except ValueError as error:
        raise ValueError(f"--began: {error}") from error
    try:
        dict(**json.loads(cfg.chat_template_kwargs or "{}"))
    except (ValueError, TypeError) as error:
        raise ValueError(f"--chat_template_kwargs: not a JSON object: {error}") from error


# Flags that do nothing without another one.
NEEDS: dict = dict.fromkeys(("reference", "kl_estimator", "kl_in"), "beta")
NEEDS |= dict(eval_samples="eval_data", max_turns="environment")


def check_used(cfg):
    known = [name for name in NEEDS if hasattr(type(cfg), name)]
    given = [name for name in known if getattr(cfg, name) != getattr(type(cfg), name)]
    unused = [f"--{name} needs --{NEEDS[name]}" for name in given if not getattr(cfg, NEEDS[name])]
    return f"without effect: {', '.join(unused)}" if unused else ""


def check_flags_once(argv):
    """Rejects repeated flags: argparse uses only the last. --fast and --no_fast are one flag."""
    names = [word.partition("=")[0].replace("-", "_") for word in argv if word.startswith("--")]
    names = [name.replace("__no_", "__") for name in names]
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise ValueError(f"--{twice[0][2:]} is given twice")


# Functions of grpo.py, and the flags that need their @extra.
SERVES = dict(
    make_optimizer="weight_decay",
    load_model="gradient_checkpointing",
    make_sampler="environment max_turns compile",
    make_prompt="environment system_prompt began",
    content_of="environment system_prompt",
    load_tokenizer="began",
    make_policy="fast",
    make_files="lora_rank report_to log_completions",
    load_reference="lora_rank",
    tensors_of="lora_rank",
    save_model="lora_rank",
)


def check_marks(cfg):
    """Rejects a flag that would be ignored, because the @extra that it needs has been deleted."""
    for name, flags in SERVES.items():
        is_marked = digests.is_marked(getattr(grpo, name, None))
        for flag in grpo.ONLY_WITH_EXTRAS.keys() & flags.split():  # others are yours
            if not is_marked and getattr(cfg, flag) not in (grpo.ONLY_WITH_EXTRAS[flag], "off"):
                raise ValueError(f"--{flag}: grpo.{name} has no @extra, which this flag needs")


# -- Data
def json_object(pairs):
    """The dict that json.loads makes of {...}. A million rows share the texts of their keys."""
    row = {sys.intern(key): value for key, value in pairs}
    if len(row) < len(pairs):
        raise ValueError(f"a key occurs twice in {[key for key, _ in pairs]}")
    return row


def check_row(row, rewards, environment, cfg):
    """The model and the rewards must be able to use every part of a row."""
    if not isinstance(row, dict):
        raise ValueError("is not a JSON object")
    if digests.changed("score"):  # yours may call none of them
        rewards = ()
    for reward in rewards:
        try:
            reward.check_row(row)
        except ModuleNotFoundError:
            raise
        except Exception as error:
            raise ValueError(f"--reward {reward.name}: {error}") from error
    for column, value in row.items():
        if type(column) is type(value) is str:
            continue  # needs no check, like most
        try:
            json.dumps({column: value}, default=refuse_bytes, allow_nan=False)  # for the log
        except (TypeError, ValueError) as error:
            raise ValueError(f"column {column!r}: {error}") from error
    for column in row.keys() & ADDED:
        raise ValueError(f"column {column!r} has a name that the trainer uses: rename it")
    as_texts = [c for r in rewards if r.function in BUILT_IN.values() for c in r.columns]
    as_texts += re.findall(r"\{([^{}\n]+)\}", cfg.prompt_template)
    for column in as_texts:
        value = row.get(column)
        if isinstance(value, str):
            continue
        if isinstance(value, (date, time, timedelta)):
            raise ValueError(f"column {column!r} is a {type(value).__name__}: save it as text")
        is_chat = isinstance(value, list) and any(isinstance(item, dict) for item in value)
        if is_chat and cfg.prompt_template != f"{{{column}}}":
            raise ValueError(f"column {column!r} is a chat: it must be all of --prompt_template")
    if rewards and not any(reward.applies_to(row) for reward in rewards):
        raise ValueError("no reward applies: the columns that rewards need are null")
    if row.get("image") or row.get("images"):
        raise ValueError("has an image, which the model would not see")
    if row.get("tools") and environment is None and not cfg.prompt_template:
        if not all(names_of_tools(row) or [None]):
            raise ValueError(f"has tools, which {UNSEEN}")


UNSEEN = "the model would not see: use --chat and JSON schemas, or --environment"


def names_of_tools(row):
    return [tool.get("function", tool).get("name") for tool in schemas_of(row)]


def schemas_of(row):
    """The list of JSON schemas in the column `tools`, which may be text, for the chat template."""
    tools = row.get("tools")
    if isinstance(tools, str):
        with contextlib.suppress(ValueError):
            tools = json.loads(tools)
    are_known = isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)
    return without_nulls(tools) if are_known else []


def without_nulls(value) -> typing.Any:  # parquet adds nulls for keys of other schemas
    if isinstance(value, dict):
        return {key: without_nulls(x) for key, x in value.items() if x is not None}
    return [without_nulls(x) for x in value] if isinstance(value, list) else value


def refuse_bytes(value):
    if isinstance(value, bytes):
        raise ValueError("contains bytes: save it as text")
    return str(value)


def check_prompt(row, messages, text, tokenizer, cfg):
    """Checks a prompt's text. messages: the chat that was rendered; None if it is not a chat."""
    text.encode()  # an error if it is not Unicode: tokenizers raise none
    if messages is not None:
        check_chat(messages, text, cfg)
    if row.get("tools") and not cfg.environment and not cfg.prompt_template:
        if messages is None or not all(name in text for name in names_of_tools(row)):
            raise ValueError(f"has tools, which {UNSEEN}")
    check_control_tokens(row, messages, text, tokenizer, cfg)


def check_chat(messages, text, cfg):
    """The chat template must render each message. With --system_prompt a row must not have a system
    message. If the last message is the assistant's, the policy continues it."""
    if cfg.system_prompt and [m["role"] for m in messages].count("system") > 1:
        raise ValueError("has a system message, and --system_prompt would be a second one")
    for m in messages:
        if m["role"] == "user" and not (m.get("content") or cfg.environment):  # reset() may add it
            raise ValueError("a user message has no content")
        if m["role"] not in ("assistant", "tool") and m.get("content", "").strip() not in text:
            raise ValueError(f"the chat template leaves out the message of {m['role']!r}")
    if messages[-1]["role"] == "assistant":
        begun = messages[-1]["content"].strip()
        if not begun:
            raise ValueError("the last message, which the policy would continue, is empty")
        if "<think>" in begun and text.rpartition(begun)[0].rstrip().endswith("</think>"):
            raise ValueError("the chat template writes </think> before the last message's <think>")


def check_control_tokens(row, messages, text, tokenizer, cfg):
    """The text of a row must not have control tokens: they could end a turn. Exceptions are a text
    that is the whole prompt, as it may be a rendered chat, and tokens in --prompt_template, in
    --system_prompt or in the row's column `control_tokens`."""
    if messages is not None:
        text = json.dumps([messages, row.get("tools")], ensure_ascii=False, default=str)
    elif re.fullmatch(r"(\{[^{}]+\})?", cfg.prompt_template):
        return
    meant = cfg.prompt_template + cfg.system_prompt
    named = str(row.get("control_tokens"))
    for name in control_names(tokenizer):
        if text.count(name) > meant.count(name) and name not in named:
            why = "if you want it, name it in a column control_tokens"
            raise ValueError(f"its text has the control token {name!r}: {why}")


@functools.lru_cache(2)
def control_names(tokenizer):
    """Special tokens in brackets, and DeepSeek's <|User|>, which is not marked so. Not <think>."""
    tokens = getattr(tokenizer, "added_tokens_decoder", {}).values()  # yours may have none
    special = r"[<\[].*[>\]]"
    return [t.content for t in tokens if re.match(special if t.special else "<[|｜]", t.content)]


def check_tokenizer(tokenizer, prompt):
    """The ids must decode to the text: transformers may rebuild a tokenizer wrongly, or make one
    up. Spaces beside special tokens may differ, and letters with accents may be composed."""
    decoded = tokenizer.decode(prompt.ids)
    blanks = "|".join(map(re.escape, [*tokenizer.get_added_vocab(), "\u2581"]))
    texts = [normalize("NFC", text) for text in (decoded, prompt.text)]
    words = [re.sub(blanks, " ", text).split() for text in texts]
    if words[0] != words[1]:
        raise ValueError(f"the tokenizer turns {prompt.text!r} into {decoded!r}")
    if tokenizer.chat_template and prompt.messages is None:
        return "this chat model gets the prompts without its chat template; see --chat"


def check_both_data(train_prompts, eval_prompts):
    both = {p.text for p in train_prompts} & {p.text for p in eval_prompts}
    if both:
        return f"{len(both)} prompts are in --train_data and in --eval_data"


# -- Models
def flag_of(path, cfg):
    return "reference" if path == cfg.reference else "model"


def positions_of(model):
    config = model.config.get_text_config()
    positions = getattr(config, "max_position_embeddings", None) or math.inf
    positions = math.inf if positions < 0 else positions  # XLNet's -1
    rope = getattr(config, "rope_parameters", None) or {}  # or a dict for each type of layer
    for one in [rope, *(x for x in rope.values() if isinstance(x, dict))]:
        stretched = (one.get("factor") or 1) * (one.get("original_max_position_embeddings") or 0)
        positions = max(positions, int(stretched))  # by YaRN
    return positions


def longest_text(model, longest, cfg):
    """The length of the longest prompt with its completion. Environments may lengthen prompts."""
    if cfg.environment:
        longest = min(positions_of(model), cfg.max_prompt_length + cfg.max_completion_length)
    return longest


def check_folder(path):
    if path.endswith(".gguf") or os.path.isfile(path):
        kind = "a GGUF file (llama.cpp)" if path.endswith(".gguf") else "a file"
        raise ValueError(f"is {kind}: name the folder or hub model that it was made from")
    if path.startswith((".", "/")) and not os.path.isdir(path):
        raise ValueError("no such folder")
    if os.path.exists(f"{path}/adapter_config.json") and not digests.changed("load_model"):
        raise ValueError("contains adapters: merge them into their model first")


def check_config(config):
    if getattr(config, "quantization_config", None):
        raise ValueError("is quantized: name the model that it was made from")


def check_weights(model):
    ignored = ", ".join(sorted(model._keys_to_ignore_on_load_unexpected))
    if ignored:
        return f"transformers ignores {ignored} in the model's files, so checkpoints will lack them"


def check_room(positions, prompts, cfg):
    """The longest prompt and its completion must fit into the model's positions."""
    longest = max(len(p.ids) for p in prompts) + cfg.max_completion_length
    if longest > positions:
        why = f"but the longest prompt and its completion have {longest} tokens"
        raise ValueError(f"has {positions} positions, {why}: lower --max_completion_length")


def check_ids(model, prompts):
    largest = max(int(p.ids.max()) for p in prompts)
    if largest >= model.get_input_embeddings().num_embeddings:
        raise ValueError(f"the tokenizer produces the id {largest}, which the model does not have")


def largest_window(config, longest):
    """The largest attention window below `longest` tokens; 0 if there is none."""
    sizes = vars(config.get_text_config()).items()
    windows = [n for name, n in sizes if re.search("window|chunk", name)]
    return max((n for n in windows if isinstance(n, int) and 0 < n < longest), default=0)


def check_padding(run, sampler):
    """The hf sampler's left padding and cache must change log-probabilities by rounding only. This
    is checked in float32, as bfloat16 hides errors, with a short and a long prompt in a batch."""
    cfg = sampler.cfg
    if cfg.dtype == "bfloat16":
        sampler.cfg = replace(cfg, dtype="float32")
    window = largest_window(run.policy.model.config, run.longest)
    long = max(8, min(run.longest, window + 32) - 4)
    prompt = run.train_prompts[0]
    prompts = [replace(prompt, ids=np.resize(prompt.ids, n)) for n in (1, long)]
    seeds, limits = [(0, 0), (0, 1)], [3, 4]  # one stops before the other
    completions = copy.copy(sampler).generate(prompts, seeds, 1.0, limits)
    samples = [grpo.Sample(0, p, **c) for p, c in zip(prompts, completions, strict=True)]
    check_samples_agree(run.policy, samples, 1.0, sampler.cfg)
    sampler.cfg = cfg


def check_samples_agree(policy, samples, temperature, cfg):
    """check_gap for samples that no update uses. An eval, too, is wrong if the sampler has other
    weights than the policy."""
    policy = copy.copy(policy)
    policy.dtype = cfg.dtype
    policy.temperature = temperature or 1.0  # greedy: log-probabilities at temperature 1
    grpo.add_logps("old_logps", policy, samples, cfg)
    gaps = np.concatenate([np.abs(s.old_logps - s.sampler_logps)[s.sampled] for s in samples])
    grpo.check_gap(gaps.mean(), cfg, len(gaps))


def check_reference(path, load_tokenizer, tokenizer, model, policy_model):
    """The reference must have the tokens of --model. It may have more ids, such as padding of the
    vocabulary."""
    of_id = {}
    with contextlib.suppress(Exception):  # a folder may have only weights
        of_id = {i: token for token, i in load_tokenizer(path).get_vocab().items()}
    other = [i for token, i in tokenizer.get_vocab().items() if of_id.get(i, token) != token]
    if other:
        raise ValueError(f"has another tokenizer than --model: it differs in the ids {other[:3]}")
    n_ids = [m.get_input_embeddings().num_embeddings for m in (model, policy_model)]
    if n_ids[0] < n_ids[1]:
        raise ValueError(f"has {n_ids[0]} token ids, but --model has {n_ids[1]}")


def check_think_tag(tokenizer):
    marks = r"[<\[][\w|:]*(?:think|thought|channel)[\w|]*[>\]]"
    template = str(getattr(tokenizer, "chat_template", "")).lower()
    marks = set(re.findall(marks, template)) - {"<think>"}
    if marks:
        return f"the chat template has {min(marks)}; the rewards expect <think>"


# -- Samples of a step
def check_cut_off(samples, rewards_before=()):
    """rewards_before: the mean reward of each step so far."""
    rewards = [s.reward for s in samples if s.finish_reason == "length"]
    if len(rewards) > len(samples) / 4 and max(rewards) <= 0:
        if np.nanmean([s.reward for s in samples]) < max(rewards_before, default=0) / 2:
            return "many completions are cut off, and the reward has halved: lower --learning_rate"
        return "cut-off completions earn nothing: see --max_completion_length"


def first_prompt(run):
    """The first prompt of the next step, or of the data if prompts_of_step is yours: it may count
    its calls."""
    if digests.changed("prompts_of_step"):
        return run.train_prompts[0]
    return grpo.prompts_of_step(run.train_prompts, run.step + 1, run.cfg)[0]
