"""grpo.py beside its explanation, as one page. annotated.html has the texts, in the order of the
page, and places for code and for the lesson's figures, which are filled here."""

import keyword
import re
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TOKEN = re.compile(  # a string, a comment, a keyword
    r'("""(?s:.*?)"""|"(?:\\.|[^"\\\n])*"|' + r"'(?:\\.|[^'\\\n])*')|(#.*)"
    rf"|\b({'|'.join(keyword.kwlist)})\b"
)
MARKED = r"<q>\1</q><em>\2</em><b>\3</b>"  # two of them are empty
BEGIN = r'^(?:"""|# -+\n# |(?:@.*\n)*(?:def|class) )'  # of the file, a section, a function, a class
PICTURE = r'"id": "([\w-]+)"(?:(?!"id": ).)*?"image/png": "([\w+/=]+)'  # of a cell


def read(path):
    return (ROOT / path).read_text(encoding="utf-8")


def write_annotated(path):
    """Writes a self-contained page. Its links work if it stands beside grpo.py."""
    page = read("harness/annotated.html")
    for cell, png in re.findall(PICTURE, read("learn.ipynb"), re.S):
        page = page.replace(f'src="learn.ipynb#{cell}"', f'src="data:image/png;base64,{png}"')

    # Code without a place of its own belongs to the piece before it.
    names = "|".join(re.findall('<pre id="(.+?)">', page))
    piece = rf"{BEGIN}({names})\b(?s:.*?)(?={BEGIN}(?!\1\b)(?:{names})\b|\Z)"
    source = read("grpo.py")
    for match in re.finditer(piece, source, re.M):
        lines_before = source.count("\n", 0, match.start())
        code = TOKEN.sub(MARKED, escape(match[0], quote=False))
        code = re.sub(rf"(?<![.\w])({names})(?=\()", r'<a href="#\1">\1</a>', code)  # calls
        code = re.sub(r"(?m)^(?=.|\n)", "<i></i>", code)  # CSS writes the line's number into it
        place = f'id="{match[1]}"'
        page = page.replace(
            f"{place}>", f'{place} style="counter-reset: line {lines_before}">{code}'
        )

    empty = re.search(r'<pre id="\w+"></pre>|src="learn.*?"', page)
    if empty:
        raise ValueError(f"harness/annotated.html explains what is gone: {empty[0]}")
    Path(path).write_text(page, encoding="utf-8")
