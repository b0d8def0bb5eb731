"""Tests of the page that view.py writes: what is in the file, and what Chromium makes of it."""

import base64
import json
import os
import random
import re
import shutil
import subprocess
import time
import urllib.request
import zlib

import pytest

import view
from harness.curves import PANELS
from tests.test_view import GAME, HOSTILE, TOOL_WORDS, write_rows, write_run

UP, DOWN = "rgba(0, 130, 200, %s)", "rgba(213, 94, 0, %s)"
TOKENS = dict(  # in thousandths
    text=["4", "+", "4", "<eos>"],
    logp=[-500, -3000, 0, -100],
    gap=[0, -500, 0, 0],
    kl=[1000, -1000, 0, 0],
    entropy=[250, 2000, 0, 500],
    push=[1000, -2000, 0, 500],
)


def write_groups(out_dir, steps=(1, 2, 3), groups=3, prompts="prompt {group} of step {step}"):
    """A run whose group 2 has the most signal, then 1; 0 has none. In each group one sample is
    right and has token notes, two are equal, and one is cut off."""
    write_run(out_dir, steps=max(steps))
    with open(os.path.join(out_dir, "completions.jsonl"), "w") as f:
        for step in steps:
            for group in range(groups):
                for text in ("4+4", "wrong", "wrong", "cut"):
                    row = dict(
                        step=step,
                        group=group,
                        prompt=prompts.format(group=group, step=step),
                        completion=text,
                        reward=0.0,
                        parts={"answer": 0.0},
                        row={"answer": 8},
                        advantage=group * -0.5,
                        length=3,
                        finish_reason="stop",
                    )
                    if text == "4+4":
                        row |= dict(reward=1.0, parts={"answer": 1.0}, advantage=group * 1.5)
                        row["tokens"] = TOKENS
                    if text == "cut":
                        row["finish_reason"] = "length"
                    f.write(json.dumps(row) + "\n")
        f.write('{"step": 3, "group": 0, "prom')  # the run goes on
    return str(out_dir)


def write_page(tmp_path, *out_dirs, flags=()):
    path = str(tmp_path / "page.html")
    view.main([*out_dirs, *flags, "--html", path])
    return path


def data_of(path):
    """What the script of the page reads, with the steps unpacked."""
    with open(path, encoding="utf-8") as f:
        source = f.read()
    data = json.loads(
        re.search(r'<script type="application/json" id="data">(.*?)</script>', source)[1]
    )
    data["unpacked"] = {
        int(s): json.loads(zlib.decompress(base64.b64decode(p))) for s, p in data["packed"].items()
    }
    return data


def test_page_is_one_file_that_loads_nothing(tmp_path, capsys):
    path = write_page(tmp_path, write_groups(tmp_path / "a"))
    assert capsys.readouterr().out == path + "\n"
    with open(path, encoding="utf-8") as f:
        source = f.read()
    with open(
        os.path.join(os.path.dirname(view.__file__), "harness", "page.html"), encoding="utf-8"
    ) as f:
        assert (
            f.read().split('"DATA"')[0] == source[: source.index('id="data">') + len('id="data">')]
        )
    assert not re.search(
        r"""\b(src|href)\s*=|url\(|@import|\bfetch\(|https?://(?!www\.w3\.org)""", source
    )
    assert "innerHTML" not in source and "insertAdjacentHTML" not in source  # text goes in as text


def test_page_holds_hostile_text(tmp_path):
    path = write_page(tmp_path, write_run(tmp_path / "<b><script>"))
    with open(path, encoding="utf-8") as f:
        source = f.read()
    assert source.count("<script") == source.count("</script>") == 2
    data = data_of(path)
    assert data["name"].endswith("/<b><script>")
    samples = [s for card in data["unpacked"][20] for s in card["samples"]]
    assert sorted(s["pieces"][0] for s in samples) == sorted(HOSTILE)


def test_page_has_groups_samples_and_measures(tmp_path):
    data = data_of(write_page(tmp_path, write_groups(tmp_path / "a"), flags=["--step", "2"]))
    assert (data["step"], data["steps"], data["logged"]) == (2, [1, 2, 3], [0, 1, 2, 3])
    cards = data["unpacked"][2]
    assert [card["prompt"] for card in cards] == [
        f"prompt {group} of step 2" for group in (2, 1, 0)
    ]
    run = cards[0]
    assert (run["summary"], run["signal"]) == ("1 of 4 right, mean |advantage| 1.5", 1.5)
    assert [(s["pieces"], s["count"]) for s in run["samples"]] == [
        (TOKENS["text"], 1),
        (["wrong"], 2),
        (["cut"], 1),
    ]
    assert run["samples"][0]["measures"] == {
        "push": [1, -2, 0, 0.5],
        "logp": [-0.5, -3, 0, -0.1],
        "entropy": [0.25, 2, 0, 0.5],
        "kl": [1, -1, 0, 0],
        "gap": [0, -0.5, 0, 0],
    }


def test_measures_that_were_not_logged():
    assert view.measures(dict(text=["a", "b"], logp=[-1234, 1])) == dict(logp=[-1.2, 0.001])


def test_page_of_any_numbers(tmp_path):
    """What the trainer writes where there is no number, and numbers of any size."""
    out, rng = write_run(tmp_path / "a"), random.Random(0)
    odd = [1e300, -1e300, 5e-324, None, 0]
    for name, keys in (
        ("metrics", ["reward", "kl", "eval_accuracy"]),
        ("completions", ["reward"]),
    ):
        with open(f"{out}/{name}.jsonl", "a") as f:
            for group in range(50):
                row = dict(
                    step=20,
                    group=group,
                    prompt="p",
                    completion="c",
                    parts={"a": rng.choice(odd)},
                    row=None,
                    advantage=rng.choice([1e300, -1e300, 5e-324, 0]),
                )
                row |= {key: rng.choice(odd) for key in keys} | dict(length=1, finish_reason="stop")
                f.write(
                    "\n" + json.dumps(row | dict(tokens=dict(text=["a", "b"], logp=[0, 10**9])))
                )
    data = data_of(write_page(tmp_path, out))
    json.dumps(data, allow_nan=False)  # JavaScript's JSON knows no NaN


# ---------------------------------------------------------------- in a browser


class Browser:
    """Chromium, driven by the WebDriver protocol."""

    def __init__(self):
        self.driver = subprocess.Popen(
            ["chromedriver", "--port=0"], stdout=subprocess.PIPE, text=True
        )
        started = (re.search(r"successfully on port (\d+)", line) for line in self.driver.stdout)
        self.url = f"http://127.0.0.1:{next(filter(None, started))[1]}/session"
        arguments = (
            "headless no-sandbox disable-gpu disable-background-networking disable-dev-shm-usage"
        )
        options = dict(
            binary=shutil.which("chromium"), args=["--" + name for name in arguments.split()]
        )
        wanted = {
            "browserName": "chrome",
            "goog:chromeOptions": options,
            "goog:loggingPrefs": {"browser": "ALL"},
        }
        self.url += "/" + self.call("", capabilities=dict(alwaysMatch=wanted))["sessionId"]

    def call(self, path, method="POST", **body):
        data = json.dumps(body).encode() if method == "POST" else None
        request = urllib.request.Request(
            self.url + path, data, {"Content-Type": "application/json"}, method=method
        )
        with urllib.request.urlopen(request, timeout=120) as answer:
            return json.load(answer)["value"]

    def close(self):
        self.call("", method="DELETE")
        self.driver.terminate()
        self.driver.communicate()

    def run(self, script, *arguments):
        return self.call("/execute/sync", script=script, args=arguments)

    def devtools(self, command, **parameters):
        return self.call("/goog/cdp/execute", cmd=command, params=parameters)

    def until(self, script, value):
        """Waits for the script to give the value, and fails with what it gives instead."""
        end = time.monotonic() + 30
        while (found := self.run(f"return {script}")) != value and time.monotonic() < end:
            time.sleep(0.02)
        assert found == value

    def open(self, path, step):
        self.call("/url", url="about:blank")  # else only the step after the # would change
        self.call("/url", url=f"file://{path}")
        self.until("document.getElementById('step').textContent", step)
        self.until("document.querySelectorAll('.sample').length > 0", True)

    def texts(self, selector):
        """Of what is seen."""
        every = "return [...document.querySelectorAll(arguments[0])]"
        return self.run(every + ".filter(e => e.checkVisibility()).map(e => e.innerText)", selector)

    def set(self, name, value):
        """What a user does with a field."""
        script = """
            const field = document.getElementById(arguments[0]);
            field.value = arguments[1];
            field.dispatchEvent(new Event('input', {bubbles: true}));
            field.dispatchEvent(new Event('change', {bubbles: true}));"""
        self.run(script, name, value)

    def press(self, key):
        for kind in ("rawKeyDown", "keyUp"):
            code = dict(ArrowLeft=37, ArrowRight=39)[key]
            self.devtools(
                "Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code
            )

    def mouse(self, selector, click=False, along=0.5):
        """To a point of the first such element, along its width."""
        script = """
            const element = document.querySelector(arguments[0]);
            element.scrollIntoView({block: 'center'});
            const box = element.getBoundingClientRect();
            return [box.left + arguments[1] * box.width, box.top + box.height / 2];"""
        x, y = self.run(script, selector, along)
        event = "Input.dispatchMouseEvent"
        self.devtools(event, type="mouseMoved", x=x, y=y)
        if click:
            button = dict(x=x, y=y, button="left", clickCount=1)
            self.devtools(event, type="mousePressed", **button)
            self.devtools(event, type="mouseReleased", **button)

    def errors(self):
        return [entry["message"] for entry in self.call("/se/log", type="browser")]


@pytest.fixture(scope="module")
def browser():
    if not shutil.which("chromium") or not shutil.which("chromedriver"):
        pytest.skip("needs Chromium and its driver")
    browser = Browser()
    yield browser
    browser.close()


def window(browser, width=1280, scheme="light"):
    size = dict(width=width, height=900, deviceScaleFactor=1, mobile=width < 500)
    browser.devtools("Emulation.setDeviceMetricsOverride", **size)
    browser.devtools(
        "Emulation.setEmulatedMedia", features=[dict(name="prefers-color-scheme", value=scheme)]
    )


@pytest.mark.slow
def test_browser_steps(tmp_path, browser):
    path = write_page(tmp_path, write_groups(tmp_path / "a", steps=(2, 5, 10)))
    browser.open(path, "step 10 of 10")
    for act, step in [
        (lambda: browser.press("ArrowLeft"), 5),
        (lambda: browser.press("ArrowRight"), 10),
        (lambda: browser.press("ArrowRight"), 10),  # there is no further one
        (lambda: browser.mouse("#back", click=True), 5),
        (lambda: browser.set("slider", 0), 2),
        (
            lambda: browser.mouse("#curves svg", click=True, along=0.52),
            5,
        ),  # the curve begins at step 0
    ]:
        act()
        browser.until(
            "document.querySelector('article pre').textContent", f"prompt 2 of step {step}"
        )
        slider = "document.getElementById('slider').value"
        assert browser.run(f"return [location.hash, {slider}]") == [
            f"#{step}",
            str([2, 5, 10].index(step)),
        ]
    browser.call("/refresh")  # the page was made again
    browser.until("document.querySelector('article pre')?.textContent", "prompt 2 of step 5")
    assert browser.errors() == []


@pytest.mark.slow
def test_browser_curves(tmp_path, browser):
    """The values of the chosen step, and while the mouse is there, of the step under it."""
    browser.open(write_page(tmp_path, write_groups(tmp_path / "a", steps=(5, 10))), "step 10 of 10")
    assert [text.split("\n")[0] for text in browser.texts("#curves h3")] == [
        panel[0] for panel in PANELS
    ]
    assert [text.strip() for text in browser.texts(".value")][:4] == [
        "1",
        "0.5",
        "train 50",
        "eval 40",
    ]
    browser.mouse("#curves svg", along=0.31)
    assert [text.strip() for text in browser.texts(".value")][:4] == [
        "0.3",
        "–",
        "train 43",
        "eval –",
    ]
    assert browser.texts("#step") == ["step 3 of 10"]
    browser.mouse("#note")
    assert browser.texts("#step") == ["step 10 of 10"] and browser.texts(".value")[0].strip() == "1"
    assert browser.run("return document.querySelectorAll('#curves path.dots').length") == 2


@pytest.mark.slow
def test_browser_groups_and_filters(tmp_path, browser):
    browser.open(write_page(tmp_path, write_groups(tmp_path / "a")), "step 3 of 3")
    assert browser.texts("article h2") == ["group 2", "group 1", "group 0"]
    assert browser.texts("article:first-child .sample > :first-child") == [
        "reward 1, right, ended, answer 1, advantage +3, 3 tokens",
        "2 × reward 0, wrong, ended, answer 0, advantage -1, 3 tokens",
        "reward 0, wrong, cut off, answer 0, advantage -1, 3 tokens",
    ]
    script = """return [...document.querySelectorAll('.sample')].map(
        sample => getComputedStyle(sample).borderLeftColor)"""
    assert browser.run(script)[:2] == [UP % 0.65, DOWN % 0.65]
    for field, value, samples, cards in [
        ("find", "CUT", 3, 3), ("find", "prompt 1", 4, 1), ("find", "(", 0, 0), ("find", "", 12, 3),
        ("verdict", "right", 3, 3), ("verdict", "wrong", 9, 3), ("verdict", "cut off", 3, 3),
        ("find", "group 1", 1, 1), ("verdict", "", 4, 1), ("find", "", 12, 3),
    ]:  # fmt: skip
        browser.set(field, value)
        assert (
            browser.texts("#note") == [f"{samples} of 12 samples"]
            and len(browser.texts("article")) == cards
        )
    browser.set("verdict", "right")
    browser.press("ArrowLeft")
    browser.until("document.querySelector('article pre').textContent", "prompt 2 of step 2")
    assert browser.texts("#note") == ["3 of 12 samples"]  # the filter stays


@pytest.mark.slow
def test_browser_tokens(tmp_path, browser):
    window(browser)
    browser.open(write_page(tmp_path, write_groups(tmp_path / "a")), "step 3 of 3")
    assert browser.texts(".sample pre")[:3] == ["4+4<eos>", "wrong", "cut"]
    script = """return [...document.querySelector('.sample pre').children].map(
        span => span.style.backgroundColor)"""
    legends, colors = {}, {}
    for measure in view.MEASURES:
        browser.set("measure", measure)
        legends[measure], colors[measure] = browser.texts("#legend small"), browser.run(script)
    assert [legend[:2] for legend in legends.values()] == [
        ["−2", "2"], ["−3", "0"], ["0", "2"], ["−1", "1"], ["−0.5", "0"]
    ]  # fmt: skip
    assert [legend[2] for legend in legends.values()] == list(view.MEASURES.values())
    assert colors["push"] == [UP % 0.325, DOWN % 0.65, UP % 0, UP % 0.16]
    assert colors["entropy"] == [UP % 0.082, UP % 0.65, UP % 0, UP % 0.16]
    assert colors["gap"][1:] == [DOWN % 0.65, UP % 0, UP % 0]
    browser.mouse("article pre span:nth-child(2)")
    tip = "return getComputedStyle(document.querySelector('span:hover'), '::after').content"
    assert (
        json.loads(browser.run(tip).replace("\\a ", "\\n"))
        == '"+"\npush −2\nlogp −3\nentropy 2\nkl −1\ngap −0.5'
    )


def write_episodes(out_dir):
    """A step with a group of one episode with token notes and one without, and a group of tools."""
    write_run(out_dir, steps=1)
    sampled = [1, 1, 1, 1, 0, 1, 1, 1, 1, 1, 0, 1, 1]
    tokens = dict(text=[*"1+2=3 3+4=77", ""], sampled=sampled)
    tokens["push"] = [500 * drawn for drawn in sampled]
    tokens["logp"] = [-1000 * drawn for drawn in sampled]
    rows = [
        GAME | dict(tokens=tokens, advantage=2),
        GAME | dict(reward=0, advantage=-2),
        TOOL_WORDS | dict(group=1),
    ]
    write_rows(out_dir, rows)
    return str(out_dir)


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_browser_shows_who_wrote_what(tmp_path, browser, scheme):
    window(browser, 400, scheme)
    browser.open(write_page(tmp_path, write_episodes(tmp_path / "a")), "step 1 of 1")
    replies = ["3", "7", "environment: 3", "environment: 7", "look: 5", "again: {'error': 'no'}"]
    assert [text.strip() for text in browser.texts("pre .reply")] == replies
    assert browser.texts("#reply") == ["grey: written by the environment, not by the policy"]
    style = """return [...document.querySelectorAll('.sample pre span')].slice(0, 5).map(span => {
        const style = getComputedStyle(span);
        return [style.backgroundColor, style.color, style.fontStyle]; })"""
    *policy, reply = browser.run(style)
    assert {color for color, _, _ in policy} == {UP % 0.65}
    grey, ink = ([int(n) for n in re.findall(r"\d+", color)[:3]] for color in reply[:2])
    assert len(set(grey)) == 1 and abs(grey[0] - ink[0]) > 120 and reply[2] == "italic"
    browser.set("measure", "logp")
    assert browser.run(style)[4] == reply  # no measure colours it
    tip = "return getComputedStyle(document.querySelector('span:hover'), '::after').content"
    browser.mouse("pre .reply")
    assert browser.run(tip) == r'"\"3\"\a written by the environment"'
    for text, samples in (("4=7", 1), ("environment: 7", 1), ("again: {", 1), ("", 3)):
        browser.set("find", text)
        assert browser.texts("#note") == [f"{samples} of 3 samples"]
    assert browser.run("return document.documentElement.scrollWidth") <= 400
    assert browser.errors() == []


@pytest.mark.slow
def test_browser_long_replies_do_not_pale_the_policy(tmp_path, browser):
    window(browser)
    out = write_run(tmp_path / "a", steps=1)
    tokens = dict(text=["x"] * 201, sampled=[1] + [0] * 200, push=[2000] + [0] * 200)
    episode = dict(completion="x" * 201, turns=["x", ""], replies=["x" * 200], tokens=tokens)
    write_rows(out, [episode])
    browser.open(write_page(tmp_path, out), "step 1 of 1")
    assert browser.texts("#legend small")[:2] == ["0", "2"]
    color = "return document.querySelector('.sample pre span').style.backgroundColor"
    assert browser.run(color) == UP % 0.65


@pytest.mark.slow
def test_browser_names_no_environment_without_one(tmp_path, browser):
    window(browser)
    browser.open(write_page(tmp_path, write_groups(tmp_path / "a")), "step 3 of 3")
    assert browser.texts("#reply") == browser.texts("pre .reply") == []


@pytest.mark.slow
def test_browser_shows_hostile_text_as_text(tmp_path, browser):
    out = write_run(tmp_path / "<img src=x onerror=alert(1)>")
    with open(f"{out}/completions.jsonl", "a") as f:
        for i, text in enumerate(HOSTILE):
            row = dict(
                step=20,
                group=f"<i>{text}",
                prompt=f"<img src=x>{text}",
                completion=text,
                reward=1,
                row=[text],
            )
            row |= dict(
                parts={f"<script>alert(3)</script>{text}": 1},
                advantage=i,
                length=4,
                finish_reason="stop",
            )
            row |= dict(tokens=dict(text=["<b>", text, "", "\u202e</script>"], push=[1, 2, 3, 4]))
            f.write("\n" + json.dumps(row))
    browser.open(write_page(tmp_path, out), "step 20 of 30")
    assert (
        browser.run(
            "return document.querySelectorAll('img, .card :is(b, script, i:not(.bar > i))').length"
        )
        == 0
    )
    whole = "\n".join(browser.texts("body"))
    for text in (
        HOSTILE[0],
        HOSTILE[2],
        "∅",
        r"\u202eright to left\u200f",
        r"\u1b[31mred",
        "<img src=x onerror=alert(1)>",
    ):
        assert text in whole
    assert browser.errors() == []


@pytest.mark.slow
@pytest.mark.parametrize("width", [400, 1280])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_browser_is_readable(tmp_path, browser, width, scheme):
    """Nothing is wider than the window, and text stands out against what is behind it."""
    window(browser, width, scheme)
    run = write_groups(tmp_path / "a", prompts="x" * 3000 + "{group}")
    browser.open(write_page(tmp_path, run), "step 3 of 3")
    assert browser.run("return document.documentElement.scrollWidth") <= width
    style = browser.run(
        "const s = getComputedStyle(document.body); return [s.color, s.backgroundColor]"
    )
    ink, paper = (sum(map(int, re.findall(r"\d+", color)[:3])) / 765 for color in style)
    assert abs(ink - paper) > 0.8 and (ink < paper) == (scheme == "light")


@pytest.mark.slow
def test_browser_opens_a_hundred_steps_at_once(tmp_path, browser):
    """64 samples of 512 tokens a step, the numbers of the first group's tokens: at most 10 MB."""
    rng = random.Random(0)
    words = [f" {a}{b}" for a in "bcdfghklmnprstw" for b in ("an", "er", "ing", "out", "ial")]
    out = write_run(tmp_path / "a", steps=100)
    with open(os.path.join(out, "completions.jsonl"), "w") as f:
        for i in range(64):
            text = rng.choices(words, k=512)
            row = dict(
                group=i // 8, prompt=f"question {i // 8}", completion="".join(text), reward=i % 2
            )
            row |= dict(parts={}, advantage=rng.gauss(0, 1), length=512, finish_reason="length")
            if i < 8:
                lists = {
                    name: [round(rng.gauss(0, 1000)) for _ in text]
                    for name in TOKENS
                    if name != "text"
                }
                row |= dict(tokens=dict(text=text) | lists)
            f.writelines(json.dumps(dict(step=step) | row) + "\n" for step in range(1, 101))
    path = write_page(tmp_path, out)
    assert os.path.getsize(path) < 1e7 and len(data_of(path)["steps"]) == 100
    browser.open(path, "step 100 of 100")
    assert len(browser.texts(".sample")) == 64
    # 1 s, left alone
    assert browser.run("return performance.getEntriesByType('navigation')[0].domComplete") < 15000
    start = time.monotonic()
    browser.press("ArrowLeft")
    browser.until("document.getElementById('step').textContent", "step 99 of 100")
    assert time.monotonic() - start < 10
