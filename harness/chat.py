"""Chat templates: prompts as messages, and what follows the policy's turn, as token ids.

Words that come from elsewhere (a tool, a game) are protected: <|im_end|> in them stays a text of
several tokens and never becomes the control token.
"""

import functools
import json
import re

from harness.flags import need

CUT = "7f3c9a1d5e"  # marks where a text is cut before it is encoded; templates pass letters through
MARKS = ("\n", "1", "=")  # put before a piece; each merges with some pieces, and none with all
WORDS = "b8e24d60f1"  # stands for the policy's words in a template


def chat_messages(prompt, system_prompt):
    messages = prompt
    if isinstance(prompt, str):
        messages = [dict(role="user", content=prompt)]
    if system_prompt:
        messages = [dict(role="system", content=system_prompt), *messages]
    for message in messages:
        fine = isinstance(message, dict) and "role" in message
        if not fine or not isinstance(message.get("content"), str):
            why = "each message must have a role and a text as its content"
            raise ValueError(f"{why}: {messages!r}")
    return messages


def chat_text(messages, tokenizer, cfg, tools: list = ()):
    """Applies the chat template, which writes its own BOS. tools: functions that it describes."""
    continued = messages[-1]["role"] == "assistant"  # the policy goes on with this answer
    options = template_options(cfg)
    options["add_generation_prompt"] = not continued
    options["continue_final_message"] = continued
    if tokenizer.chat_template is None:
        raise ValueError("a chat needs a chat template, and the tokenizer has none")
    text = tokenizer.apply_chat_template(messages, **options)
    if tools:
        without_tools = text
        text = tokenizer.apply_chat_template(messages, tools=tools, **options)
        if text == without_tools:
            raise ValueError("the chat template leaves out the tools")
    first = messages[0]  # the one of --system_prompt, if there is one
    if first["content"].strip() not in text:
        raise ValueError(f"the chat template leaves out the {first['role']} message")
    for tool in tools:
        if tool.__name__ not in text:
            raise ValueError(f"the chat template leaves out the tool {tool.__name__}")
    return text


def template_options(cfg) -> dict:
    options = json.loads(cfg.chat_template_kwargs or "{}")
    options["tokenize"] = False
    return options


# -- Protected words


def protect(words: str, tokenizer) -> str:
    """Marks a cut after the first character of each control token that stands in the words."""
    pattern = control_tokens(tokenizer)
    if pattern is None:
        return words
    return pattern.sub(lambda match: match[2] + CUT, words)


@functools.lru_cache(maxsize=1)  # every prompt and every reply is protected
def control_tokens(tokenizer) -> re.Pattern | None:
    """Finds the first character of a control token; None: the tokenizer has no such token."""
    tokens = [str(token) for token in tokenizer.added_tokens_decoder.values()]
    # Some tokenizers have added tokens of blanks alone: these control nothing.
    tokens = [token for token in tokens if len(token) > 1 and not token.isspace()]
    if not tokens:
        return None
    # (?=...) finds tokens that overlap, too.
    return re.compile(f"(?=({'|'.join(map(re.escape, tokens))}))(.)", re.DOTALL)


def protect_message(message: dict, tokenizer) -> dict:
    """The message of a tool or a game with its words protected. The name of the tool is, too: the
    policy wrote it."""
    words = dict(content=protect(message["content"], tokenizer))
    if "name" in message:
        words["name"] = protect(message["name"], tokenizer)
    return message | words


def encode(text: str, tokenizer, begins: bool = False) -> list[int]:
    """The ids of a text with cuts. begins: it is a text of its own, not the middle of one."""
    first, *others = text.split(CUT)
    if begins:
        ids = tokenizer(first, add_special_tokens=False)["input_ids"]
    else:
        ids = encode_piece(first, tokenizer)
    for piece in others:
        ids = ids + encode_piece(piece, tokenizer)
    return ids


def encode_piece(text: str, tokenizer) -> list[int]:
    """Without the blank that sentencepiece puts before a text: here the text is only a piece."""
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    one = tokenizer("1", add_special_tokens=False)["input_ids"]
    if tokenizer.decode(one + one) == "11":  # this tokenizer puts no blank before a text
        return ids
    # Else the text is encoded behind a mark, and the mark's ids are cut off.
    for mark in MARKS:
        mark_ids = tokenizer(mark, add_special_tokens=False)["input_ids"]
        marked = tokenizer(mark + text, add_special_tokens=False)["input_ids"]
        if marked[: len(mark_ids)] == mark_ids:
            return marked[len(mark_ids) :]
    return ids


def messages_of(transcript) -> list[dict]:
    """The completion as messages, for rewards in TRL's form."""
    messages = []
    for number, text in enumerate(transcript.turns):
        message = dict(role="assistant", content=text)
        if number < len(transcript.calls):
            functions = [dict(name=name, arguments=a) for name, a in transcript.calls[number]]
            message["tool_calls"] = [dict(type="function", function=f) for f in functions]
        messages.append(message)
        if number < len(transcript.replies):
            reply = transcript.replies[number]
            if isinstance(reply, str):
                reply = [dict(role="user", content=reply)]
            messages += reply
    return messages


def decode(tokenizer, ids) -> str:
    """Special tokens stay, so that a reward can see a <think>. Ids that the tokenizer does not
    have (some models pad their vocabulary) are dropped."""
    return tokenizer.decode(ids[ids < len(tokenizer)].tolist())


# -- What follows the policy's turn


def talk_with_call(name: str) -> list[dict]:
    """A question, and a turn that calls the tool."""
    call = dict(type="function", function=dict(name=name, arguments={}))
    return [dict(role="user", content="-"), dict(role="assistant", content="", tool_calls=[call])]


class Following:
    """Writes messages of a tool or a user as the chat template does after an assistant's turn.

    role: "tool" or "user". ends: the texts of the tokens that end a turn. ConfigError if the
    template cannot write such a message there.
    """

    def __init__(self, tokenizer, role: str, ends: list[str], cfg):
        self.tokenizer = tokenizer
        self.ends = ends
        self.options = template_options(cfg)
        ways = [self.after_words]
        if role == "tool":  # some templates write a tool's message only after a call of the tool
            ways = [self.after_call, self.after_words]
        example = [dict(role=role, name="f", content="2b4c")]
        ways = [way for way in ways if self.holds(way, example)]
        why = f"the chat template writes no {role} message after the model's turn"
        need(ways, cfg, "environment", why)
        self.way = ways[0]

    def text(self, messages: list[dict]) -> str:
        """From the end of the assistant's turn to the beginning of its next one."""
        return self.way(messages)

    def holds(self, way, messages: list[dict]) -> bool:
        """True if the template writes the messages whole in this way. Else it raises, or drops
        words."""
        try:
            text = way(messages)
        except Exception:  # templates raise what they like
            return False
        return all(message["content"] in text for message in messages)

    def after_call(self, messages: list[dict]) -> str:
        talk = talk_with_call(messages[0]["name"])
        before = self.render(talk)
        text = self.render([*talk, *messages], add_generation_prompt=True)
        if not text.startswith(before):
            raise ValueError("the template changes what stands before a tool's message")
        # The turn ends with its first end token, or if it has none, where the call ends.
        question = len(self.render(talk[:1]))
        start = len(before)
        for end in self.ends:
            place = before.find(end, question)
            if place >= 0:
                start = min(start, place)
        return text[start:]

    def after_words(self, messages: list[dict]) -> str:
        talk = [dict(role="user", content="-"), dict(role="assistant", content=WORDS), *messages]
        _, words, following = self.render(talk, add_generation_prompt=True).rpartition(WORDS)
        if not words:
            raise ValueError("the template leaves out the assistant's words")
        return following

    def written_call(self, name: str) -> str:
        """How the template writes a call of the tool; "" if it writes none."""
        try:
            text = self.render(talk_with_call(name))
        except Exception:  # templates raise what they like
            return ""
        if name not in text:
            return ""
        return text

    def render(self, messages: list[dict], **options) -> str:
        return self.tokenizer.apply_chat_template(messages, **self.options, **options)
