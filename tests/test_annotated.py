"""Tests of `view.py --source`: grpo.py beside its explanation. What the texts in
harness/annotated.html name exists, and the page holds all of grpo.py."""

import base64
import json
import os
import re
from html import unescape

import pytest

import view
from harness import annotated
from tests.common import HERE, read
from tests.test_page import browser, window  # noqa: F401, a fixture

TEMPLATE = read(os.path.join(HERE, "harness", "annotated.html"))
SCRIPT = read(os.path.join(HERE, "grpo.py"))
ARTICLES = re.findall(r"<article>(.*?)</article>", TEMPLATE, re.S)
SECTIONS = re.findall(r"^# -{20,}\n# ([^:\n]+)", SCRIPT, re.M)
LINKS = [re.sub(r"\s+", "", target) for target in re.findall(r'href="([^"#][^"]*)"', TEMPLATE)]
FIGURES = re.findall(r'src="learn\.ipynb#([\w-]+)"', TEMPLATE)


def lesson_cells():
    return json.loads(read(os.path.join(HERE, "learn.ipynb")))["cells"]


def plain(html):
    return unescape(re.sub(r"<[^>]*>", "", html))


# -- The texts


def test_every_section_has_a_text():
    titles = [re.search(r"<h2>(.*?)</h2>", section) for section in TEMPLATE.split("<section")[1:]]
    assert len(SECTIONS) >= 9
    assert sorted(title[1] for title in titles) == sorted(["grpo.py", *SECTIONS])
    assert len(re.findall(r'<a href="#', TEMPLATE)) == len(titles)  # its table of contents


def test_every_text_has_a_function_of_its_section():
    """The page shows code up to the next text's, so a function under the heading of another section
    would be read there."""
    sections = re.split(r"^# -{20,}\n# ", SCRIPT, flags=re.M)[1:]
    code = {section.partition("\n")[0].partition(":")[0]: section for section in sections}
    texts = 0
    for section in TEMPLATE.split("<section")[1:]:
        title = re.search(r"<h2>(.*?)</h2>", section)[1]
        for name, place in re.findall(r'<h3>(\w+)</h3>(?s:.*?)<pre id="(\w+)"', section):
            texts += 1
            assert name == place
            assert re.search(rf"^(def|class) {name}\b", code[title], re.M), name
    assert texts >= 35


@pytest.mark.parametrize("article", ARTICLES, ids=re.findall('<pre id="(.+?)">', TEMPLATE))
def test_texts_are_short(article):
    others = r'(?s)<p class="(see|formula)">.*?</p>|<h\d>.*?</h\d>|<figure>.*'
    text = plain(re.sub(others, "", article))
    assert 1 <= len(re.findall(r"[.?!]\s", text)) <= 4
    assert 10 <= len(text.split()) <= 80


@pytest.mark.parametrize("target", sorted(set(LINKS)))
def test_links_of_the_texts_lead_somewhere(target):
    """To a file, a test in it, a heading of the lesson or of another document."""
    path, _, place = target.partition("#")
    assert os.path.isfile(os.path.join(HERE, path))
    text = read(os.path.join(HERE, path))
    if path == "learn.ipynb":
        source = "\n".join("".join(cell["source"]) for cell in lesson_cells())
        headings = [h.replace(" ", "-") for h in re.findall(r"^#+ (.+)", source, re.M)]
        assert not place or place in headings
    elif path.endswith(".py"):  # a browser scrolls to this text
        assert re.search(rf"^ *def {place.removeprefix(':~:text=')}\(", text, re.M)
    else:
        headings = re.findall(r"^#+ (.+)", text, re.M)
        assert place in [re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in headings]


def test_the_texts_link_tests_studies_and_lesson():
    targets = " ".join(LINKS)
    assert targets.count(":~:text=test_") >= 40
    assert len(set(re.findall(r"studies/README\.md#(\d)", targets))) == 8
    assert len(set(re.findall(r"learn\.ipynb#(\d)", targets))) == 9


def test_names_of_code_in_the_texts_are_in_the_code():
    for name in re.findall(r"<code>(\w+)</code>", TEMPLATE):
        assert re.search(rf"\b{name}\b", SCRIPT), name


# -- The page


@pytest.fixture
def page(tmp_path, capsys):
    path = str(tmp_path / "annotated.html")
    view.main(["--source", path])
    assert capsys.readouterr().out == path + "\n"
    return path


def test_the_page_has_every_line_of_the_script_once_with_its_number(page):
    lines = {}
    pieces = re.findall(
        r'<pre id="\w+" style="counter-reset: line (\d+)">(.*?)</pre>', read(page), re.S
    )
    for before, code in pieces:
        assert code.count("<i></i>") == code.count("\n")  # a number for each line
        for number, line in enumerate(plain(code).splitlines(), int(before) + 1):
            assert number not in lines
            lines[number] = line
    assert [lines[number] for number in sorted(lines)] == SCRIPT.splitlines()


def test_the_page_is_one_file_that_loads_nothing(page):
    source = read(page)
    assert not re.search(r"<script|<link|@import|url\(", source)
    assert not re.search(r"https?://", re.sub(r"<pre.*?</pre>", "", source, flags=re.S))
    ids = re.findall(r' id="([^"]+)"', source)
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'href="#([^"]+)"', source)) <= set(ids)


def test_the_figures_are_the_lessons(page):
    shown = re.findall(r'<img alt="" src="data:image/png;base64,([\w+/=]+)">', read(page))
    assert len(shown) == len(FIGURES) >= 6
    for cell_id, png in zip(FIGURES, shown, strict=True):
        [cell] = [cell for cell in lesson_cells() if cell["id"] == cell_id]
        [data] = [output["data"] for output in cell["outputs"] if "data" in output]
        assert base64.b64decode(png) == base64.b64decode(data["image/png"])


def test_the_page_opens_with_the_loop_and_goes_on_in_the_order_of_the_script(page):
    assert SECTIONS[-1] == "Train"
    assert re.findall(r"<h2>(.*?)</h2>", read(page)) == ["Train", "grpo.py", *SECTIONS[:-1]]


def test_calls_are_links_and_methods_of_the_same_name_are_not(page):
    source = read(page)
    assert '<a href="#update">update</a>(' in source
    assert "metrics.update(" in source and ".backward()" in source


def test_comments_strings_and_keywords_are_marked(page):
    source = read(page)
    assert re.search(r"<b>for</b>(<\w></\w>|<em></em>|\w| )* <q></q><em></em><b>in</b>", source)
    assert "<em># [N, T]</em>" in source
    assert '<q>"sampler_logps"</q>' in source


@pytest.mark.parametrize(
    "old, new, says",
    [
        ('<pre id="token_loss">', '<pre id="token_losses">', '<pre id="token_losses"></pre>'),
        ('"learn.ipynb#ratio-code"', '"learn.ipynb#no-code"', 'src="learn.ipynb#no-code"'),
    ],
)
def test_a_text_of_something_that_is_gone_is_one_line(
    old, new, says, tmp_path, monkeypatch, capsys
):
    read_file = annotated.read
    monkeypatch.setattr(annotated, "read", lambda path: read_file(path).replace(old, new))
    path = tmp_path / "x.html"
    with pytest.raises(SystemExit) as stop:
        view.main(["--source", str(path)])
    assert stop.value.code == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and says in err
    assert not path.exists()


@pytest.mark.slow
@pytest.mark.parametrize("width", [400, 1280])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_is_readable(page, browser, width, scheme):  # noqa: F811
    """Nothing is wider than the window, at 1280 no line of code is cut off, and text stands out
    against what is behind it."""
    window(browser, width, scheme)
    browser.call("/url", url=f"file://{page}")
    assert browser.run("return document.documentElement.scrollWidth") <= width
    widths = browser.run(
        "return [...document.querySelectorAll('pre')].map(p => p.scrollWidth - p.clientWidth)"
    )
    assert (max(widths) == 0) == (width == 1280)
    for selector in ("body", "pre em", "pre q", "pre b", "pre a", ".see"):
        ink = browser.run(f"return getComputedStyle(document.querySelector('{selector}')).color")
        light = sum(map(int, re.findall(r"\d+", ink)[:3])) / 765
        assert (light < 0.45) == (scheme == "light"), selector
    background = browser.run("return getComputedStyle(document.body).backgroundColor")
    light = sum(map(int, re.findall(r"\d+", background)[:3])) / 765
    assert light > 0.95 if scheme == "light" else light < 0.15
    assert browser.errors() == []
