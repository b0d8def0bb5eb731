"""Agents: an environment replies to the policy between its turns, within one completion.

grpo.py uses this file for --environment file.py:name. The flag names one of three kinds of object:

    text    fn(turns, row) -> str | None: the reply to the policy's turns; None ends the episode.
            fn.stop, a tuple of texts: tokens that end a turn, besides EOS
    tools   a list of functions that the policy may call, like TRL's tools=[...]
    class   a class with reset(**row), or a callable that returns an object with it, like
            TRL's environment_factory: the other public methods are tools. Or a dict of these: the
            row's column `environment` is the key

Tokens that the policy sampled are never encoded again. Text of the environment is context: the
policy reads it, but it is not in the loss. As in TRL, the user's code runs in the trainer's
process, and the policy is told the errors of tools. Other errors, and calls that take too long,
end their own episode. Random draws of the code depend only on the seed, the row and the turn.

As in TRL, a class has one object for each concurrent episode: an object may be a session on a
server of limited capacity. --resume does not restore state that an object keeps across reset().
"""

import copy
import inspect
import json
import random
import re
from collections import defaultdict
from concurrent.futures import wait
from dataclasses import replace
from os.path import commonprefix

import numpy as np
from transformers.utils.chat_template_utils import get_json_schema

import grpo
from extras import preflight, ranks
from extras.errors import cleanup, mistakes_in
from extras.tokens import text_message
from reward import (
    FAILURES,
    begin,
    cause_of,
    finish,
    load_function,
    time_limit,
    torch_kept,
    your_lines,
)

QUESTION = dict(role="user", content="-")  # for dummy chats, which show the template's text
MARK = "b8e24d60f1"  # a placeholder in these chats
CALL = {"open": "<tool_call>", "close_pattern": r"</tool_call>\s*", "repeats": True}
CALL |= {"content": "json", "transform": {"type": "function", "function": "{content}"}}
THOUGHT = {"open": "<think>", "close_pattern": r"</think>\s*"}
HERMES = {  # tool calls of Hermes, Qwen and SmolLM, for tokenizers without a response_template
    "start_anchor_pattern": r"\A.*?(?=(<think>\s*)?\Z)",  # a prompt may end with <think>
    "fields": {"reasoning_content": THOUGHT, "tool_calls": CALL, "content": {}},
}


def load(name: str):
    """Loads the environment file.py:name."""
    with mistakes_in(f"--environment {name}"):
        return Environment(load_function(name))


class Environment:
    """The object that --environment names: a function, classes or tools; else ValueError."""

    def __init__(self, target):
        self.function, self.classes, self.tool_sets = None, {}, {None: []}
        self.column = "environment" if isinstance(target, dict) else None  # row.get(None) is None
        classes = target if isinstance(target, dict) else {None: target}
        if isinstance(target, (list, tuple)):
            self.tool_sets = {None: list(target)}
        elif callable(target) and "turns" in inspect.signature(target).parameters:
            self.function = target
        else:
            self.classes = classes
            self.tool_sets = {name: methods_made_by(make) for name, make in classes.items()}
        for tools in self.tool_sets.values():
            if len({tool.__name__ for tool in tools}) < len(tools):
                raise ValueError("two of its tools have the same name")
            for tool in tools:
                schema = get_json_schema(tool)["function"]  # needs type hints and a docstring
                inspect.signature(tool).bind(**schema["parameters"]["properties"])  # not f(a, /)

    def tools(self, row: dict) -> list:
        """The row's tools, for the chat template. ValueError if its `environment` is unknown."""
        name = row.get(self.column)
        if name not in self.tool_sets:
            raise ValueError(f"column 'environment' must be one of {list(self.tool_sets)}")
        return self.tool_sets[name]

    def open_chat(self, messages: list, row: dict, said, tokenizer) -> tuple:
        """Adds to the last message what reset() returned (text or parts), with control tokens
        broken up. Returns the messages, and the tools' schemas or None. May raise ValueError."""
        said = text_message(dict(role="user", content=said))["content"]
        content = messages[-1]["content"] + harmless(tokenizer, str(said))
        schemas = [get_json_schema(tool) for tool in self.tools(row)]
        return [*messages[:-1], messages[-1] | dict(content=content)], schemas or None


def around(sampler, run):
    """Wraps a sampler so that it plays episodes. ConfigError if an episode cannot begin."""
    cfg = run.cfg
    prompts = run.train_prompts + run.eval_prompts
    room = preflight.longest_text(run.policy.model, run.longest, cfg) - cfg.max_completion_length
    with mistakes_in(f"--environment {cfg.environment}"):
        player = Player(load(cfg.environment), sampler, run.tokenizer, prompts, cfg, room)
        cleanup.callback(player.close_objects)
        if ranks.is_first():
            first = [preflight.first_prompt(run)]
            [player.first_prompt] = player.open(first, strict=run.step == 0)
    return player


def methods_made_by(make) -> list:
    """The tools of the object that make() returns. The object is made only for this, and closed."""
    seconds = grpo.Config.call_timeout
    try:
        inspect.signature(make).bind()  # without arguments, as TRL calls it
    except (TypeError, ValueError) as error:
        what = (
            "is not fn(turns, row), a list of functions, a class with reset() or a factory of one"
        )
        raise ValueError(f"{what}: {error}") from error
    if isinstance(make, type) and make.__new__ is object.__new__:
        made = object.__new__(make)  # without __init__, which may need a server
    else:
        with torch_kept(), time_limit(seconds):
            made = make()
        at_once([call(seconds, end) for end in [getattr(made, "close", None)] if end], seconds)
    if not hasattr(made, "reset"):
        raise ValueError(f"{type(made).__name__} has no reset()")
    return methods_of(made)


def methods_of(instance):
    members = inspect.getmembers(type(instance), inspect.isfunction)
    pattern = "(?!_|(reset|get_reward|close)$)"
    return [getattr(instance, name) for name, _ in members if re.match(pattern, name)]


# -- Calling the user's code


def seed_random(*numbers):  # draws of the user's code depend on seed, row and turn only
    random.seed(str(numbers))
    np.random.seed(random.getrandbits(32))


async def seeded(coroutine, seed):
    seed_random(seed)
    return await coroutine


@torch_kept()
def at_once(generators, seconds):
    """Returns each generator's result or error. Coroutines that they yield run concurrently."""
    futures = dict.fromkeys(generators)
    ended = {**futures}
    while futures:
        waiting = {}
        for generator, future in futures.items():
            try:
                waiting[generator] = generator.send(future)
            except StopIteration as end:
                ended[generator] = end.value
            except FAILURES as error:
                ended[generator] = error
        futures = {g: begin(seconds, seeded, *waiting[g]) for g in waiting}
        wait(futures.values(), seconds)
    return list(ended.values())


def call(seconds, function, /, *arguments, **named):
    """Calls the user's code. A coroutine is yielded to at_once, which sends its Future back."""
    with time_limit(seconds):
        result = function(*arguments, **named)
    if inspect.iscoroutine(result):
        seed = random.random()  # for its draws, and for this episode's draws after it
        result = finish((yield result, seed))
        seed_random(seed, 1)
    return result


# -- An episode


class Episode:
    def __init__(self):
        self.seed = ()  # for the policy's turns
        self.name = self.object = None  # the key of its environment class, and the object
        self.turns = []  # the policy's texts
        self.replies = []  # to each turn: a text, or the messages of tools
        self.messages = []  # turns and replies as a chat, in TRL's form
        self.turn_start = 0  # index of the last turn's first token in the completion
        self.calls_tools = False
        self.calls = self.failed_calls = 0
        self.failure = ""

    def __getstate__(self):  # ranks send each other episodes, without the environment's object
        return self.__dict__ | dict(object=None)

    def log_columns(self):
        """The columns of an episode in completions.jsonl."""
        return dict(turns=self.turns, replies=self.replies)

    def reward_columns(self):
        """The columns for reward functions. environments: the object, if there is a class."""
        columns = copy.deepcopy(self.log_columns() | dict(completion_messages=self.messages))
        if self.object is not None:
            columns["environments"] = self.object
        return columns


def append(sample, ids, logps, sampled: bool):
    """Adds a turn of the policy (sampled: True) or a text of the environment (False)."""
    sample.completion_ids = np.append(sample.completion_ids, ids)
    sample.sampler_logps = np.append(sample.sampler_logps, logps)
    sample.sampled = np.append(sample.sampled, np.full(len(ids), sampled))
    sample.trainable = sample.advantages = None
    sample.__post_init__()


def harmless(tokenizer, words: str) -> str:
    """Breaks up control tokens in an environment's text: <|im_end|> becomes < |im_end|>."""
    for token in map(str.strip, tokenizer.get_added_vocab()):
        while len(token) > 1 and token in words:
            words = words.replace(token, f"{token[0]} {token[1:]}")
    return words


class Player:
    """A sampler of episodes: `sampler` draws the policy's turns, and this runs the environment.
    ValueError if prompts, chat template or tools do not allow it. stop_ids end a turn: EOS, and
    the tokens of a text function's `stop`. room: maximum tokens of a prompt with reset()'s text."""

    def __init__(self, environment, sampler, tokenizer, prompts, cfg, room):
        self.environment = environment
        self.sampler = sampler
        self.load_weights, self.sleep = sampler.load_weights, sampler.sleep
        self.close = sampler.close
        self.tokenizer = tokenizer
        self.eos_ids = eos_ids = sampler.stop_ids
        self.cfg = cfg
        self.room = room
        self.openings = {}  # by row, the text that reset() returned
        self.first_prompt = prompts[0]
        self.episodes = []  # begun by the last call of open()
        self.free = defaultdict(list)  # by class, the objects that no episode uses
        self.told = []  # lines of tools whose errors were printed
        self.options: dict = dict(tokenize=False, add_generation_prompt=True)
        # A tokenizer may have another template for chats with tools.
        self.options["tools"] = sum(environment.tool_sets.values(), []) or None
        self.options |= json.loads(cfg.chat_template_kwargs or "{}")
        self.schema = getattr(tokenizer, "response_template", None) or HERMES
        self.stop_ids = [*eos_ids]
        stop = getattr(environment.function, "stop", ())
        for text in stop:
            ids = tokenizer.encode(text, add_special_tokens=False)
            if isinstance(stop, str) or len(ids) != 1:
                raise ValueError(f"its stop must be a tuple of tokens; {text!r} is not one token")
            self.stop_ids += ids
        sampler.stop_ids = self.stop_ids
        if cfg.max_turns == 1 and not environment.classes:  # a class may do without replies
            raise ValueError("with --max_turns 1 the environment never replies")
        are_chats = [prompt.messages is not None for prompt in prompts]
        if all(are_chats):
            self.check_template()
        elif not environment.function:
            raise ValueError("tools need a chat: a list of messages, or --chat")

    def check_template(self):
        # The template must show tools and replies to the policy, and write calls that can be read.
        tools = self.options["tools"]
        options = self.options | dict(add_generation_prompt=False)
        shown = self.tokenizer.apply_chat_template([QUESTION], **options)
        if tools and tools[0].__name__ not in shown:
            raise ValueError("the chat template leaves out the tools")
        role = "tool" if tools else "user"
        try:
            turn, following = self.around([dict(role=role, name="f", content="2b4c")])
        except Exception:  # a template may raise anything
            turn = following = ""
        if "2b4c" not in following:
            raise ValueError(f"the chat template writes no {role} message after the model's turn")
        turn = turn.removeprefix(commonprefix([turn, shown]))  # the prefix may explain <tool_call>
        calls = self.read(turn, "", tools).get("tool_calls")
        if tools and self.schema is HERMES and str({MARK: MARK}) not in str(calls):
            form = "the chat template writes calls in a form that only a tokenizer with a"
            raise ValueError(f"{form} response_template can parse; this one has none")

    # -- Objects of classes, and the texts of their reset()

    def open(self, prompts: list, strict: bool = False) -> list:
        """Begins an episode of each prompt, for play(). Returns the prompts, with the text of a
        class's reset() at the end. Objects of the previous episodes are used again, so score
        those episodes first. Objects of failed episodes are closed. strict: ValueError if an
        episode cannot begin."""
        if strict:
            self.open(prompts)  # a second reset() must work, too, and return the same text
        before = self.episodes
        self.episodes = [Episode() for _ in prompts]
        for episode in self.episodes:
            episode.calls_tools = self.environment.function is None
        if not self.environment.classes:
            return prompts
        self.end([e.object for e in before if e.failure])
        for e in before:
            if not e.failure:
                self.free[e.name].append(e.object)
        opened = at_once(map(self.start, self.episodes, prompts), self.cfg.call_timeout)
        failures = [e.failure for e in self.episodes if e.failure]
        if strict and failures:
            raise ValueError(f"no episode can begin: {failures[0]}")
        return opened

    def start(self, episode, prompt):
        seconds, environment = self.cfg.call_timeout, self.environment
        row = copy.deepcopy(prompt.row)  # the class may change it
        episode.name = row.pop(environment.column, None)  # not an argument of reset()
        try:
            if self.free[episode.name]:
                episode.object = self.free[episode.name].pop(0)
            else:
                seed_random(self.cfg.seed)  # all objects begin with the same draws
                episode.object = yield from call(seconds, environment.classes[episode.name])
            seed_random(self.cfg.seed, prompt.row_number, 0)
            said = yield from call(seconds, episode.object.reset, **row)
            row_id = hash((prompt.row_number, str(prompt.row)))
            if said != self.openings.setdefault(row_id, said):
                raise ValueError("reset() returns two different texts for one row and seed")
            rest = prompt.row_number, self.tokenizer, self.cfg
            options = dict(_said=said or "", _environment=environment)
            longer = grpo.make_prompt(prompt.row, *rest, **options)
            if len(longer.ids) > self.room:
                room = f"--max_prompt_length or the model allows {self.room}"
                raise ValueError(f"prompt and reset() have {len(longer.ids)} tokens; {room}")
            return longer
        except FAILURES as error:
            episode.failure = self.why(error)
            return prompt

    def why(self, error):  # in one line
        return f"{self.cfg.environment} failed: {cause_of(error)}"

    def end(self, objects):
        seconds = self.cfg.call_timeout
        ends = at_once([call(seconds, o.close) for o in objects if hasattr(o, "close")], seconds)
        errors = [end for end in ends if isinstance(end, FAILURES)]
        if errors:  # a server may keep the session
            print(f"close() of {self.why(errors[0])}", flush=True)

    def close_objects(self):
        """Calls close() of all objects that have it."""
        self.open([])  # moves all objects to self.free
        self.end(sum(self.free.values(), []))

    # -- Turns and replies

    def generate(self, prompts, seeds, temperature, limits=None) -> list[dict]:
        """Returns fields of a Sample for each prompt, as all samplers do. seeds: a tuple each."""
        samples = []
        begun = self.open(prompts)
        limits = limits or [self.cfg.max_completion_length] * len(begun)
        turns = self.sampler.generate(begun, seeds, temperature, limits)
        for prompt, turn in zip(begun, turns, strict=True):
            samples.append(grpo.Sample(0, prompt, **turn))
            samples[-1].finish_reason = self.reason(turn)
        self.play(samples, seeds, temperature)
        names = "prompt completion_ids sampler_logps sampled finish_reason text failure info"
        return [{name: getattr(s, name) for name in names.split()} for s in samples]

    def reason(self, turn: dict) -> str:
        return "stop" if turn["completion_ids"][-1] in self.stop_ids else "length"

    def play(self, samples, seeds, temperature):
        """Plays all turns after the first, and appends them to the samples."""
        for sample, episode, seed in zip(samples, self.episodes, seeds, strict=True):
            sample.info["episode"] = episode
            episode.seed = seed
        while True:
            ends = at_once(map(self.answer, samples), self.cfg.call_timeout)
            for sample, end in zip(samples, ends, strict=True):
                if isinstance(end, FAILURES):
                    sample.info["episode"].failure = self.why(end)
                sample.failure = sample.info["episode"].failure
            samples = [s for s, end in zip(samples, ends, strict=True) if end is None]
            if not samples:
                break
            texts = [np.append(s.prompt.ids, s.completion_ids) for s in samples]
            prompts = [replace(s.prompt, ids=ids) for s, ids in zip(samples, texts, strict=True)]
            seeds = [(*s.info["episode"].seed, len(s.info["episode"].turns)) for s in samples]
            limits = [self.cfg.max_completion_length - len(s.completion_ids) for s in samples]
            turns = self.sampler.generate(prompts, seeds, temperature, limits)
            for sample, turn in zip(samples, turns, strict=True):
                sample.info["episode"].turn_start = len(sample.completion_ids)
                append(sample, turn["completion_ids"], turn["sampler_logps"], sampled=True)
                sample.finish_reason = self.reason(turn)

    def answer(self, sample):  # returns None to go on, else the reason for the end
        environment, episode, prompt = self.environment, sample.info["episode"], sample.prompt
        turn = sample.completion_ids[episode.turn_start :]
        sample.text = self.tokenizer.decode(turn[~np.isin(turn, self.eos_ids)])
        episode.turns.append(sample.text)
        message, tools = dict(role="assistant", content=sample.text), []
        if environment.function is None:
            tools = environment.tools(prompt.row)
            before = np.append(prompt.ids, sample.completion_ids[: episode.turn_start])
            words = sample.text if self.schema is HERMES else self.tokenizer.decode(turn)
            message = self.read(words, before, tools)
        episode.messages.append(message)
        if episode.failure or sample.finish_reason == "length":
            return "the episode did not begin, or the turn is cut off"
        seed_random(self.cfg.seed, prompt.row_number, len(episode.turns))
        if environment.function:
            row = copy.deepcopy(prompt.row)  # the function may change it
            arguments = [*episode.turns], row
            reply = yield from call(self.cfg.call_timeout, environment.function, *arguments)
            messages = [dict(role="user", content=reply)]
            if reply is None:
                return "the function returned None"
        else:
            reply = messages = yield from self.run_tools(message, episode, tools)
            if not messages:
                return "no call"
        added = self.reply_ids(sample, messages)
        room = self.cfg.max_completion_length - len(sample.completion_ids) - len(added)
        if room < 1 or len(episode.turns) == self.cfg.max_turns:
            sample.finish_reason = "length"  # a reply that does not fit is left out whole
            return "no room"
        episode.replies.append(reply)
        episode.messages += messages
        append(sample, np.array(added, int), np.zeros(len(added), np.float32), sampled=False)

    def run_tools(self, message, episode, tools):
        # Returns a message for each call. Errors are reported in TRL's words.
        tools = {tool.__name__: tool for tool in methods_of(episode.object) or tools}
        messages = []
        for written in message.get("tool_calls", []):
            name, arguments = written["function"].values()
            episode.calls += 1
            try:
                if name not in tools:
                    raise ValueError(f"Tool {name} not found.")
                if not isinstance(arguments, dict):
                    raise ValueError("The arguments must be an object.")
                content = yield from call(self.cfg.call_timeout, tools[name], **arguments)
                content = str(content)
            except Exception as error:
                content = str({"error": str(error)})
                episode.failed_calls += 1
                line = your_lines(error)[-1:]
                if line and line not in self.told:  # only once: it may be intended
                    self.told.append(line)
                    print(f"tool {name} of {self.why(error)} (the policy is told)", flush=True)
            messages.append(dict(role="tool", name=str(name), content=content))
        return messages

    # -- The texts of turns and replies, and their tokens

    def read(self, words, before, tools):
        """A turn as a message in TRL's form. If a call is malformed, the whole turn is content."""
        try:
            calls = []
            message = self.tokenizer.parse_response(words, self.schema, prefix=before, tools=tools)
            for call in message.pop("tool_calls", []):
                written = call["function"]
                for f in written if isinstance(written, list) else [written]:  # a list in SmolLM
                    function = dict(name=f["name"], arguments=f.get("arguments", {}))
                    calls.append(dict(type="function", function=function))
            if calls:
                message["tool_calls"] = calls
        except Exception:  # the policy may write anything, and a parser may raise anything
            message = dict(content=words)
        content = message.get("content", "").removesuffix(self.tokenizer.eos_token)
        return message | dict(role="assistant", content=content)

    def reply_ids(self, sample, messages):
        plain = [{key: harmless(self.tokenizer, m[key]) for key in m} for m in messages]
        before, text = "", plain[0]["content"]
        if sample.prompt.messages is not None:
            # Encoded after the turn's last token: sentencepiece starts a text with a space.
            before = self.tokenizer.decode(sample.completion_ids[-1:])
            text = self.around(plain)[1].removeprefix(before)
        first = self.tokenizer.encode(before, add_special_tokens=False)
        return self.tokenizer.encode(before + text, add_special_tokens=False)[len(first) :]

    def around(self, messages):
        # A dummy chat in two texts: up to the end of a turn, and from there to the next turn.
        calls_tool = messages[0]["role"] == "tool"
        turn = dict(role="assistant", content=MARK)
        if calls_tool:
            function = dict(name=messages[0]["name"], arguments={MARK: MARK})
            turn |= dict(content="", tool_calls=[dict(type="function", function=function)])
        text = self.tokenizer.apply_chat_template([QUESTION, turn, *messages], **self.options)
        start = text.rindex(MARK) + len(MARK)
        if calls_tool:  # the end of the call comes before the end of the turn
            ends = filter(None, map(self.tokenizer.decode, self.eos_ids))
            [end, *_] = re.compile("|".join(map(re.escape, ends))).finditer(text, start)
            start = end.start()
        return text[:start], text[start:]


def metrics(samples) -> dict:
    """Turns and tool calls per sample, share of calls that failed, number of failed episodes."""
    episodes = [sample.info["episode"] for sample in samples]
    counts = [(len(e.turns), e.calls, e.failed_calls, bool(e.failure)) for e in episodes]
    turns, calls, failed_calls, failed = np.sum(counts, 0).tolist()
    metrics = {"turns/mean": turns / len(samples), "environment/failed": failed}
    if episodes[0].calls_tools:
        metrics["tools/call_frequency"] = calls / len(samples)
        metrics["tools/failure_frequency"] = failed_calls / max(1, calls)
    return metrics
