"""Plays the environment's side of episodes: its calls, and its replies as tokens.

Token in, token out: what the policy sampled stays as it is; only what the environment adds is
encoded.
"""

import json
import re

import numpy as np

from harness.chat import Following, decode, encode, protect, protect_message
from harness.environment import Environment, Transcript
from harness.flags import need, say
from harness.jobs import OBSERVE, REPLY, make_pool
from harness.workers import Outcome

# How Hermes, Qwen and SmolLM write a call. For others the tokenizer has a response_template.
TOOL_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)


def first_observations(environment: Environment, rows: list[dict], seeds: list[int], cfg) -> list:
    """What reset() says about each row. ConfigError if it fails, or says two things to one row."""
    transcripts = []
    for row, seed in zip(rows, seeds, strict=True):
        transcripts.append(Transcript(key=(), row=row, seed=seed, observation=""))
    # The first row twice: reset() must say the same both times. So jobs 0 and 1 are row 1.
    jobs = [(OBSERVE, transcript) for transcript in [transcripts[0], *transcripts]]
    pool = make_pool([], environment, cfg.call_timeout, cfg.workers)
    try:
        outcomes = pool.call_all(jobs)
    finally:
        pool.close()
    for number, outcome in enumerate(outcomes):
        why = f"reset() failed on row {max(1, number)}: {outcome.cause}: {outcome.message}"
        need(not outcome.cause, cfg, "environment", why)
    again, *observations = [outcome.value for outcome in outcomes]
    why = "reset() says two things to one row; it may draw from random and numpy.random alone"
    need(again == observations[0], cfg, "environment", why)
    return observations


class Player:
    """Plays the environment's side of every episode.

    eos_ids end a turn of the policy. So do the texts in the `stop` of a text function, one token
    each. ConfigError if a stop is not one token, or if the chat template cannot write a reply.
    """

    def __init__(self, environment: Environment, pool, tokenizer, eos_ids, prompts, cfg):
        self.environment = environment
        self.pool = pool
        self.tokenizer = tokenizer
        self.eos_ids = eos_ids
        self.cfg = cfg
        self.unknown_was_said = False
        self.stop_ids = list(eos_ids)
        if environment.kind != "class":  # a class may only observe and reward
            need(cfg.max_turns > 1, cfg, "max_turns", "the environment never answers")
        for text in getattr(environment.target, "stop", ()):
            ids = encode(text, tokenizer)
            why = f"its stop {text!r} has {len(ids)} tokens, where it must have one"
            need(len(ids) == 1, cfg, "environment", why)
            self.stop_ids += ids
        if any(prompt.messages is not None for prompt in prompts):
            role = "user" if environment.kind == "text" else "tool"
            ends = [tokenizer.decode([i]) for i in eos_ids if i < len(tokenizer)]
            self.following = Following(tokenizer, role, ends, cfg)
            if environment.kind != "text":
                self.check_calls_are_read()

    def check_calls_are_read(self) -> None:
        """ConfigError if the policy was taught to write calls in a form that is not read here."""
        text = self.following.written_call("c4d1e9")
        if not text or getattr(self.tokenizer, "response_template", None) is not None:
            return
        try:
            calls = written_calls(text)
        except ValueError:  # no JSON
            calls = []
        why = "the chat template writes calls in a form that only a tokenizer with a"
        need(calls, self.cfg, "environment", f"{why} response_template can read; this one has none")

    def start(self, samples, keys: list[tuple]) -> None:
        """Gives the samples empty transcripts. A key names an episode of the run."""
        for s, key in zip(samples, keys, strict=True):
            s.transcript = Transcript(key, s.prompt.row, s.prompt.seed, s.prompt.observation)

    def reply(self, samples) -> list:
        """Lets the environment answer the last turn of each sample. Returns the samples that go on,
        with the reply appended as context. The others are over, cut off, or have failed."""
        samples = [s for s in samples if self.add_turn(s)]
        places = [self.environment.place_of(s.transcript) for s in samples]
        outcomes = self.pool.call_all([(REPLY, s.transcript) for s in samples], places)
        return [s for s, o in zip(samples, outcomes, strict=True) if self.add_reply(s, o)]

    def add_turn(self, s) -> bool:
        """Adds the last turn to the transcript. False if the episode ends with that turn."""
        transcript = s.transcript
        ids = s.completion_ids[s.turn_start :]
        words = ids
        if len(ids) > 0 and ids[-1] in self.eos_ids:
            words = ids[:-1]
        s.text = decode(self.tokenizer, words)
        transcript.turns.append(s.text)

        if s.finish_reason == "length":
            return False
        if self.environment.kind == "text":
            return True
        calls = self.tool_calls(s, ids)
        if not calls:
            return False
        if len(transcript.turns) == self.cfg.max_turns:
            s.finish_reason = "length"
            return False
        transcript.calls.append(calls)
        return True

    def add_reply(self, s, outcome: Outcome) -> bool:
        """Appends the reply as context. False if the episode is over. A reply that has no room, or
        comes after the last turn, is left out whole, and the episode counts as cut off."""
        transcript = s.transcript
        if outcome.cause:
            s.failure = f"{outcome.cause}: {outcome.message}"
            return False
        reply, failed_calls = outcome.value
        if reply is None:
            return False
        ids = np.array(self.reply_ids(s, reply), np.int32)
        room = self.cfg.max_completion_length - len(s.completion_ids) - len(ids)
        if room < 1 or len(transcript.turns) == self.cfg.max_turns:
            s.finish_reason = "length"
            # The results are lost, so the tools count as not called: a reward gets an object that
            # is made again, without these calls. (A text function has no calls.)
            transcript.calls = transcript.calls[:-1]
            return False
        self.say_what_is_unknown(ids, reply)
        transcript.replies.append(reply)
        transcript.failed_calls += failed_calls
        s.append(ids, np.zeros(len(ids), np.float32), sampled=False)
        return True

    def say_what_is_unknown(self, ids: np.ndarray, reply) -> None:
        """Says once that the policy cannot read a reply."""
        unknown = self.tokenizer.unk_token_id
        if unknown is None or unknown not in ids or self.unknown_was_said:
            return
        self.unknown_was_said = True
        why = "a character of the environment's reply is unknown to the tokenizer"
        say(f"warning: {why}: {ascii(reply)[:200]} is {ascii(decode(self.tokenizer, ids))[:200]}")

    def tool_calls(self, s, ids: np.ndarray) -> list[tuple[str, dict]]:
        """(name, arguments) of each call in the last turn. A malformed call counts as text."""
        try:
            if getattr(self.tokenizer, "response_template", None) is None:
                functions = written_calls(s.text)
            else:
                functions = self.parsed_calls(s, ids)
            calls = [(call["name"], call.get("arguments") or {}) for call in functions]
            json.dumps(calls, ensure_ascii=False).encode()  # half of a surrogate pair is no text
        except Exception:  # the policy writes what it likes, and parsers raise what they like
            return []
        for name, arguments in calls:
            if not isinstance(name, str) or not isinstance(arguments, dict):
                return []
        return calls

    def parsed_calls(self, s, ids: np.ndarray) -> list[dict]:
        """The calls as the tokenizer's response_template reads them. Some have a "function"."""
        before = np.append(s.prompt.ids, s.completion_ids[: s.turn_start])
        tools = self.environment.tools(s.prompt.row)
        parsed = self.tokenizer.parse_response(ids.tolist(), prefix=before.tolist(), tools=tools)
        return [call.get("function", call) for call in parsed.get("tool_calls") or []]

    def reply_ids(self, s, reply: str | list[dict]) -> list[int]:
        """The tokens of a reply, up to where the policy goes on."""
        tokenizer = self.tokenizer
        if s.prompt.messages is None:
            return encode(protect(reply, tokenizer), tokenizer)

        messages = [dict(role="user", content=reply)]
        if self.environment.kind != "text":
            messages = reply
        text = self.following.text([protect_message(m, tokenizer) for m in messages])
        end_of_turn = decode(tokenizer, s.completion_ids[-1:])
        text = text.removeprefix(end_of_turn)  # the policy wrote it

        # sentencepiece may put a blank before a text that follows a control token. So the token
        # that ended the turn is encoded with the reply, and then dropped.
        ids = encode(end_of_turn + text, tokenizer, begins=True)
        if ids[0] == s.completion_ids[-1]:
            return ids[1:]
        return encode(text, tokenizer)


def written_calls(text: str) -> list[dict]:
    """The calls between <tool_call> tags: an object in JSON, or a list of objects, as of SmolLM."""
    calls = []
    for written in TOOL_CALL.findall(text):
        call = json.loads(written)
        if isinstance(call, list):
            calls += call
        else:
            calls.append(call)
    return calls
