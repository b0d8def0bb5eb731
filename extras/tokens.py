r"""The text of each token, for a reward that returns a list with a number for each of them. It asks
for these texts by `tokens = True`, and gets them as row["completion_tokens"].

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
