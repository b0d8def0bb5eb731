r"""The texts of messages and of tokens. A reward that returns a list with a number for each token
may need the tokens' texts: if its attribute `tokens` is True, row["completion_tokens"] has them.

    def steps(completion, row):  # each line is a step: 1 if it has the answer
        texts = row["completion_tokens"]
        values = [None] * len(texts)  # None: no step ends here
        line = ""
        for i, text in enumerate(texts):
            line += text
            if "\n" in text or i == len(texts) - 1:
                values[i] = float(row["answer"] in line)
                line = ""
        return values

    steps.tokens = True
"""

import copy
import json

WINDOW = 8  # a token's text may depend on this many tokens before it


def texts(tokenizer, ids: list[int]) -> list[str]:
    """The text that each token adds to the tokens before it. A character of several tokens belongs
    to the last; the others get "". Some tokenizers drop the first space of any text that they
    decode, so a token is decoded together with some before it."""
    added = []
    for i in range(len(ids)):
        before = tokenizer.decode(ids[max(0, i - WINDOW) : i]).rstrip("\ufffd")
        text = tokenizer.decode(ids[max(0, i - WINDOW) : i + 1]).rstrip("\ufffd")
        added.append(text[len(before) :])
    return added


def text_message(message: dict) -> dict:
    """The message without parquet's nulls, with one text instead of parts, and with the arguments
    of tool calls as dicts (OpenAI has JSON). An image raises ValueError."""
    if not isinstance(message, dict):
        raise ValueError(f"a message is not an object with role and content: {message!r:.80}")
    if message.keys() == {"role", "content"} and isinstance(message["content"], str):
        return message  # no copies of a million rows
    message = {key: value for key, value in copy.deepcopy(message).items() if value is not None}
    if "role" not in message:  # ShareGPT has from and value
        raise ValueError(f"a message has no role, only {', '.join(message)}")
    if isinstance(message.get("content"), list):
        for part in message["content"]:
            if not isinstance(part, dict) or part.get("type") != "text":
                raise ValueError(f"the model would not see a part that is not text: {part!r:.80}")
        message["content"] = "".join(part["text"] for part in message["content"])
    if not isinstance(message.get("content", ""), str):
        raise ValueError(f"the content of a message is not a text: {message['content']!r:.80}")
    for call in message.get("tool_calls", []):
        function = call.get("function", call)
        if isinstance(function.get("arguments"), str):
            function["arguments"] = json.loads(function["arguments"])
    return message
