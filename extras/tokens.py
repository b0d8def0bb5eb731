r"""The texts of messages and of tokens. Those of tokens are for a reward that returns a list with a
number for each of them: `tokens = True` asks for them, and row["completion_tokens"] has them.

    def steps(completion, row):  # a step is a line: 1 if it has the answer
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

WINDOW = 8  # tokens before it, whose text the text of a token may depend on


def texts(tokenizer, ids: list[int]) -> list[str]:
    """What each token adds to the text of those before it. If a character has several tokens, it is
    the last one's, and "" is the text of the others. Some tokenizers leave out the first blank of
    whatever they decode: so a token is decoded together with some that stand before it."""
    added = []
    for i in range(len(ids)):
        before = tokenizer.decode(ids[max(0, i - WINDOW) : i]).rstrip("\ufffd")
        text = tokenizer.decode(ids[max(0, i - WINDOW) : i + 1]).rstrip("\ufffd")
        added.append(text[len(before) :])
    return added


def text_message(message: dict) -> dict:
    """The message without parquet's nulls, with one text instead of parts, and with the arguments
    of tool calls as dicts, where OpenAI has JSON. ValueError for an image"""
    if message.keys() == {"role", "content"} and isinstance(message["content"], str):
        return message  # of a million rows no copy
    message = {key: value for key, value in copy.deepcopy(message).items() if value is not None}
    if "role" not in message:  # ShareGPT has from and value
        raise ValueError(f"a message has no role but {', '.join(message)}")
    if isinstance(message.get("content"), list):
        for part in message["content"]:
            if not isinstance(part, dict) or part.get("type") != "text":
                raise ValueError(f"the model would not see a part that is no text: {part!r:.80}")
        message["content"] = "".join(part["text"] for part in message["content"])
    for call in message.get("tool_calls", []):
        function = call.get("function", call)
        if isinstance(function.get("arguments"), str):
            function["arguments"] = json.loads(function["arguments"])
    return message
