"""The built-in reward functions pay right answers only. Users' functions are found and called, and
whatever one does costs its own samples."""

import asyncio
import math
import os
import re
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from multiprocessing import get_context

import numpy as np
import pytest

import reward

PREFILLED = "User: hi\nAssistant: <think>\n"


def part(name, completion, prompt="", **row):
    return reward.BUILT_IN[name](completion, {"prompt_text": prompt} | row)


# -- The built-in functions
TAGGED = "so <answer>17</answer> no <answer>\n42\n</answer> done"
RIGHT = ["42", "<think>a</think>no<think>b</think>42\n", "a</think>42", "42.0", "+42", TAGGED]
WRONG = ["<think>42</think>", "<think>42", "<answer>42", "<think>a</think>42<think>", "", "4_2"]
WRONG += ["the answer is 42", " ".join(map(str, range(100))), "\u0664\u0662", "-42", "1e999999999"]
ANSWERS = [  # row["answer"], completions that earn it, others
    ("42", RIGHT, WRONG),
    ("-.5", ["-0.50", "\u2212.5"], [".5", "-,5"]),
    ("1234", ["1,234", "1234.0", "1 234"], ["12,34", "1,2,34", "234"]),
    ("3", ["3"], ["3 1/2", "3\xbd", "3\\frac{1}{2}", "3e6", "3 + 3x", "3 million"]),
    ("blue whale", ["blue whale"], ["Blue whale", "a blue whale"]),
    (5e-5, ["0.00005", "<answer>.00005</answer>"], ["5e-05", "0.000051"]),
]
ANSWERS += [("5e-05", ["5e-05"], ["0.00005"]), ("9" * 1001, ["9" * 1001], ["9" * 1001 + ".0"])]
ANSWERS += [(np.float32(5e-5), ["0.00005"], ["0.000050001"]), (np.int64(7), ["7", "7.0"], ["8"])]
ANSWERS += [(1e16, ["10,000,000,000,000,000"], ["1e+16"]), (True, ["True"], ["1"])]


@pytest.mark.parametrize(("gold", "right", "wrong"), ANSWERS, ids=range(len(ANSWERS)))
def test_answer(gold, right, wrong):
    assert [text for text in right + wrong if part("answer", text, answer=gold)] == right


TERMS = r"""3 1/2; 3½; 3 ⅔; 3-1/2; 3\frac{1}{2}; 5e6; 5E+6; 1e-3; 5 \times 10^6; 5\cdot 10^{6}
5 x 10^6; 5*10**6; 5 × 10⁶; 2 + 3x; 2x + 3; x + 2; 2 + x; 5\pi; 2\sqrt{3}; \sqrt{16}; x^{5}
2^{5}; \frac{x}{2}; 5M; 5 \text{ million}; 5-million; 1.234.567; 20-25; 6:30; 1 / 2; 17/18
2^7; x18; 3.14.15; 18²; 18x; 18k; 10-7/2; 5 million""".replace("\n", "; ").split("; ")
FINAL_NUMBERS = {
    "5": ["#### Step 2: Add\n2 + 3 = 5", "2 + 3 = <<2+3=5>>5 eggs", "18 - 13 = 5!", "5 \ud800"],
    "18": ["9 * 2 = 18", "**Answer:18**", "18cm", "it takes 18 m^2", "$18$.", "18%", "17, 18"],
    "18.0": ["\\(x = 18\\,\\text{m}^2\\)", "\\fbox{18}, not 17", "\\boxed{17} or \\boxed{18}"],
    "18.00": ["\\boxed{18}\n#### 17", "17\n#### 18\n7 a day", "#### 18", "\\boxed{18^\\circ}"],
    "18.000": ["18% more", "18/day", "\\boxed{x_1 = 18}", "**18**", "\\boxed{18\\text{ m}^{2}}"],
    "18.0000": ["36 / 2 = 18", "3 x 6 = 18", "- 18", "18 - at least", "#### The answer is 18"],
    "-7": ["#### -$7", "#### \u22127", "it is -7.", "(-7)"],
    "1234567": ["#### 12,34,567", "#### 1 234 567", "\\boxed{1\u202f234\u202f567}"],
    "1042.5": ["so $1,042.50.", "\\boxed{\\$1{,}042.5 \\text{ a day}}.", "1,\\!042.5"],
    "1/2": [".5", "0.50"],
    "9" * 1000: ["9" * 1000],
    None: [*("", "eighteen", "9" * 1001, "\u0664\u0662 or \uff14\uff12", "\\boxed{}", "\\boxed{}5")]
    + ["#### 18 or 19", "\\boxed{17, 18}", "\\boxed{\\frac{1}{2}}"]  # marked, and two numbers
    + ["First \\boxed{5}. No, \\boxed{7", "\\boxed{5} \\boxed{\\frac{7}{7}"]  # not closed
    + [mark + term + "}" for term in TERMS for mark in ("so ", "#### ", "\\boxed{")],
}


@pytest.mark.parametrize("expected", FINAL_NUMBERS, ids=range(len(FINAL_NUMBERS)))
def test_final_number(expected):
    number = None if expected is None else Fraction(expected)
    found = {text: reward.final_number(text) for text in FINAL_NUMBERS[expected]}
    assert set(found.values()) == {number}, found


def test_gsm8k():
    gold = "He pays 2 * $600 = $<<2*600=1200>>1200.\n#### 1,200"
    right = ["So it is $1200.00.", "<answer>1200</answer>", "<think>3</think>#### 1,200"]
    wrong = ["<think>1200</think>1201", "<think>1200", "", "1200 #### 3"]
    assert [text for text in right + wrong if part("gsm8k", text, answer=gold)] == right
    assert part("gsm8k", "42", answer=42.0) == part("gsm8k", "0.00005", answer=5e-5) == 1


MATH = r"""\frac{1}{2} == $\frac{2}{4}$; <think>x</think> \boxed{0.5} != 0.51
0.5 == 50\% != <think>\boxed{0.5}</think>; <think>; \boxed{}
70^\circ == $\angle ABC=70^\circ$; 70 != 71^\circ | x=1 \text{ or } x=2 == $1, 2$ != $1$
x=1 \text{ or } x=2 == x=1 \text{ or } x=2 != 1 | \frac{1}{2^{99}} == 2^{-99} != \frac{1}{2^{98}}
9.1 \times 10^{-31} == $0.91 \times 10^{-30}$ != 1.6 \times 10^{-19}
1000000 == 1,000,000; 10^6 != 1000001 | \frac13 == \frac{2}{6} != 0.3333333
\pi == 3.141593 != 3.1416 | 5 == \fbox{5}; \boxed{\boxed{5}} != \boxed{5}. No, \boxed{5
5 == 5; x=5; 2+3=5; f(4)=5; x_1 = 5; \theta = 5; |AB|=5; 5.0; 5\text{ km} != 4,5; 6
5 == It is 5. != 5\text{ million}; 5 million; It is 5 million; $5$ thousand
5\text{ m} == 5 \mathrm{ m}; 5 != 5\text{ km} | 2 hours == 2\text{ hour}; 2 != 2 minutes
5 m == 5\,\text{m}; $5$; It is 5 m in total. != 5 km; 5\text{ m}^2; It is $5\text{ km}$.
5 m == 5 m != It is 5 km; $5$ million m | 2x+3y == 3 y + 2 x; $3y+2x$ != $3x+2y$ | \$5 == 5 != 6
(1,2) == (1,2) != (1.0000001,2) | 101_3 == 101_{3} != 101_2 | AB == \text{AB} != BA
$y=2x+1$ == y=2x+1; y=1+2x != 2x | 6 == \$6.00 != \$5
25\% == 25; 25\%; It is 0.25; 25\text{ percent} != 2500\%; 2500; 0.0025
12.5 == 12.5\%; It is 12.5%. != 0.125; 12.6\% | 0.25 == 25\%; \frac14 != 25 | 100 == 100\% != 1
\infty == \infty; $+\infty$ != -\infty; 5 | -\infty == $-\infty$ != $\infty$; -5
6:00 \text{ PM} == 6:00\text{ PM}; $6:00$ PM != 6:00\text{ AM}; 7:00\text{ PM}; 0
6:30\text{ p.m.} == 6:30\text{ p.m.} != 7:35\text{ p.m.}; 6:30\text{ a.m.} | 6:30 == 6:30 != 7:35
1:2 == 1:2; $\frac12$ != 2:1 | 1, 3, \ldots == $1, 3, \ldots$ != 1, 2, 3, \ldots
1, 2, \ldots == 1,2,\dots != 1, 3, 5, \ldots; 2; $1, 2$
4 == 4 != x = 4\sqrt(2); $4\sqrt(2)$; It is 4\sqrt(2); It is 4\sqrt{2}
5000000 == 5\text{ million}; It is $5$ million.; It is 5 million != It is 5 billion
5\text{ million dollars} == \$5,000,000; $5 \times 10^6$; 5\text{ million} != 5; It is 5"""


@pytest.mark.parametrize("row", re.split("\n| [|] ", MATH))
def test_math(row):
    """A row has the gold, right and wrong answers: sentences, formulas, and others for a box."""
    pytest.importorskip("math_verify")
    gold, *answers = re.split(" [!=]= ", row)
    box = re.compile(r"(?:^|(?<=; ))(?!It|[$<]|..?box)[^;]+")
    right, wrong = (box.sub(r"\\boxed{\g<0>}", texts).split("; ") for texts in answers)
    assert [text for text in right + wrong if part("math", text, answer=gold)] == right


def test_format():
    right = ["<think>a</think>b", "\n<think>\na <b>\n</think>\n\nb < 3 and c > 4\n"]
    right += [f"<think>a</think>{b}" for b in ("b<|im_end|>", "<answer>b</answer>")]
    right += ["<think> two and two </think> <answer> 4 </answer>"]
    wrong = ["<think>a", "a</think>b", "b", "", "x<think>a</think>b", "<think><think>a</think>b"]
    wrong += ["<think> \n</think>b", "<think></think>b", "<think><|im_end|></think>b"]
    wrong += ["<think>a</think></think>b", "<think>a</think>b<think>c</think>d"]
    answers = ["", "\u200b\x00", "\U000e0041", "<\uff5cend\uff5c> <|im_end|>", "b<br />"]
    answers += ["<answer> </answer>", "<answer>b", "b</answer>", "<answer>b</answer> c"]
    answers += ["<answer>b</answer><answer>c</answer>", "the <b>answer</b>"]
    wrong += [f"<think>a</think>{answer}" for answer in answers]
    assert [text for text in right + wrong if part("format", text)] == right


def test_think_prefilled_by_the_chat_template():
    for name in ("answer", "gsm8k"):
        assert part(name, "a</think>42", PREFILLED, answer="42") == 1
        assert part(name, "42", PREFILLED, answer="42") == 0
        assert part(name, "42", "<think>\n\n</think>\n\n", answer="42") == 1
    assert part("format", "a</think>42", PREFILLED) == 1
    assert part("format", "<think>a</think>42", PREFILLED) == 0


def test_countdown():
    right = ["4*(8-2)/1", "(8-2)*4*1 = 24", "so\n**(8-2)*4*1 = 24**.", "`(8-2)*4*1`", "-(2-8)*4*1"]
    right += ["<think>x</think> so <answer>(8 - 2) * 4 * 1</answer> done"]
    right += ["<answer>8-2*4*1</answer><answer>(8\u22122)\u00d74\u00f71</answer>"]
    right += ["(" * 60 + "8-2" + ")" * 60 + "*4*1"]
    wrong = ["1/(2/8)*4", "(8-2)*4", "(8-2)*4*1*1", "24", "24 = 24", "", "x = (8-2)*4*1"]
    wrong += ["The answer: (8-2)*4*1", "(8-2)*4*1 or 24", "8/(2-2)*4*1", "(8-2)*4*1()"]
    wrong += ["()*8*4*2*1", "8(2)(4)(1)", "8 2 4 1", "__import__('os')", "-" * 400 + "(8-2)*4*1"]
    wrong += ["(08-2)*4*1", "(\uff18-2)*4*1", "(8-2)*4*1\x00", "(" * 100_000]
    wrong += ["<think><answer>(8-2)*4*1</answer></think>", "<answer>(8-2)*4*1"]
    row = dict(numbers=[8, 4, 2, 1], target=24)
    assert [text for text in right + wrong if part("countdown", text, **row)] == right
    assert part("countdown", "1/3*3", numbers=["1", 3, 3], target="1") == 1  # exactly
    assert part("countdown", "1/3+1", numbers=np.array([1, 1, 3]), target="4/3") == 1
    for text, numbers in (("2**3", [2, 3]), ("17//2", [17, 2]), ("9**9**9", [9, 9, 9])):
        assert part("countdown", text, numbers=numbers, target=8) == 0
    assert part("countdown", "5 / 0", numbers=[5, 0], target=np.float32(5)) == 0


def test_overlong():
    lengths = (1, 800, 801, 900, 999, 1000, 1100)
    rows = [dict(completion_ids=[0] * n, max_completion_length=1000) for n in lengths]
    values = [part("overlong", "", **row) for row in rows]
    assert values == pytest.approx([0, 0, -1 / 200, -0.5, -199 / 200, -1, -1])


HOSTILE = ["9" * 10**5, "1,234" * 20_000, ",111" * 25_000, " 1." * 40_000, "1{,}" * 30_000]
HOSTILE += ["$" * 10**5, "1 " * 50_000, "1 million" * 9999, "\\boxed{" + "a{}" * 40_000 + "{"]
HOSTILE += ["\\boxed{" * 15_000, "<think>" * 40_000, "<answer>" * 40_000 + "</answer>" * 40_000]
HOSTILE += ["a" * 10**5 + "!", "5 a" * 30_000 + "!", "5" + " " * 10**5 + "!", "$a" * 50_000]
HOSTILE += ["<a" + " " * 10**5, "<|" * 50_000, ". <" * 40_000 + "b>", "####" + " " * 10**5]
HOSTILE += ["5\\)" * 30_000, "5\\frac{" * 20_000, "5 x " * 30_000, "\\boxed{{" * 15_000]
HOSTILE += ["5 km/" * 20_000, "12:3" * 20_000, "#### 1" + " apple" * 20_000, "\ud800" * 10**5]
HOSTILE += ["\x00", "\u202e43\u202c", "9**9**9", "\\"]


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_no_text_breaks_a_built_in_or_takes_more_than_linear_time(text):
    row = dict(answer="42", numbers=[7, 42, 0], target=49)
    start = time.process_time()
    for completion in (text, "<think>a</think>" + text):
        for name in ("answer", "gsm8k", "countdown"):
            assert reward.BUILT_IN[name](completion, row) == 0
        assert reward.format_reward(completion, row) in (0, 1)
        for answer in (completion, reward.last_formula(completion), "5 " + completion):
            reward.words_of(reward.readable(answer))
    assert time.process_time() - start < 10  # at most 0.5 s on one core; quadratic takes minutes


GOLDS = dict(answer=["", " \n", ["5"], {"a": 5}, None, "<answer>5</answer>", "a</think>5"])
GOLDS |= dict(gsm8k=["#### 18 or 19", "", "five", math.nan], math=["", "\\boxed{}", ["5"]])
UNEARNABLE = [(name, {"answer": gold}) for name in GOLDS for gold in GOLDS[name]]
UNEARNABLE += [("countdown", {"numbers": n, "target": 3}) for n in ([1.5, 2], [-1, 2], "1 2", [])]
UNEARNABLE += [("countdown", {"numbers": [1, 2], "target": "three"})]


@pytest.mark.parametrize(("name", "row"), UNEARNABLE)
def test_a_row_that_nothing_can_satisfy_is_refused(name, row):
    if name == "math":
        pytest.importorskip("math_verify")
    [found] = reward.load_rewards(name)
    with pytest.raises(ValueError):
        found.check(row)
    good = {"answer": "#### 8", "numbers": ["1", 2], "target": "3"}
    found.check_row(good)
    found.check_row(dict.fromkeys(good))  # null: another task's row
    for bad, why in (({}, "has no column '"), (good | dict(answer=[], numbers=[]), None)):
        with pytest.raises(ValueError, match=why):
            found.check_row(bad)


# -- Functions from files
FUNCTIONS = r"""from __future__ import annotations
import asyncio, math, sys, time
from dataclasses import dataclass
import neighbour
@dataclass
class Parsed: text: str
def length(completion, row, **_): return len(completion) + neighbour.ZERO
def needs_gold(completion: dict[str, int], row: dict): return float(completion == row["gold"])
needs_gold.columns = ("gold",)
GATE = asyncio.Semaphore(100)
async def waits(completion, row):
    if completion in ("raise", "exit", "interrupt"): misbehave(completion, row)
    if completion == "exit in a task": await asyncio.gather(waits("exit", row))
    if completion == "cancel": asyncio.current_task().cancel()
    if completion == "block": time.sleep(1.5)
    async with GATE: await asyncio.sleep(9 if completion == "hang" else 0.2)
    return 1.0
def only_even(completion, row): return None if len(completion) % 2 else 4.0
def misbehave(completion, row):
    values = {"nan": float("nan"), "inf": -float("inf"), "text": "1.0", "list": [1.0], "bool": True}
    if completion == "raise": raise KeyError("two\nlines \033 \ud800")
    if completion == "exit": sys.exit(1)
    if completion == "interrupt": raise KeyboardInterrupt
    start = time.monotonic()
    if completion == "swallow":
        try: time.sleep(9)
        except BaseException: completion = "hang"  # until the alarm rings again
    while completion == "hang" and time.monotonic() < start + 9:
        try: time.sleep(1)
        except Exception: pass
    return (values | {"huge": 10**5000, "none": None}).get(completion, 0.5)
def same(left, right): return [float(a == b) for a, b in zip(left, right, strict=True)]
def trl(completions, answer, **kwargs): return same(completions, answer)
def trl_keywords(prompts, *, completions, answer, level=3, **_): return same(completions, answer)
def trl_overlong(completion_ids, **kwargs): return [-len(ids) for ids in completion_ids]
def trl_only_keywords(**kwargs): return iter(same(kwargs["completions"], kwargs["answer"]))
async def trl_waits(completions, **_): return [None if c == "x" else 2 for c in completions]
def trl_everything(prompts, completions, trainer_state, log_extra, log_metric, answer, **_):
    log_extra("seen", answer)
    for i in range(len(completions)): log_metric("mean", i)
    assert prompts[0][0]["role"] == "user" and completions[0][0]["role"] == "assistant"
    progress = trainer_state.global_step / trainer_state.max_steps
    return [len(chat[0]["content"]) + progress for chat in completions]
def trl_misbehave(completions, log_extra, **_):
    if "hang" in completions: time.sleep(9)
    if "log" in completions: log_extra("not one text for each", ["a"])
    return [1 / 0 if c == "raise" else c == "a" for c in completions if c != "short"]
def trl_nan(completions, **_): yield from (math.nan if c == "x" else 2 for c in completions)
def trl_hint(completions, completion_ids=(), **_): return [bool(ids) for ids in completion_ids]
def trl_environments(environments, **_): return [e.score for e in environments]
class Function:
    def __call__(self, completions, answer, **kwargs): return same(completions, answer)
trl_object = Function()
def takes_answer(completion, answer): return 1.0
def one_argument(completion): return 1.0
trl_hidden = (lambda function: lambda *args, **kwargs: function(*args, **kwargs))(trl)
constant = 3
"""
ADDED = dict(prompt_text="", prompt_messages=None, trainer_state=dict(global_step=1, max_steps=4))


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rewards")
    files = dict(neighbour="ZERO = 0", broken="1 / 0", functions=FUNCTIONS)
    for name, source in (files | dict(exits="import sys\nsys.exit('no\\nGPU')")).items():
        (folder / f"{name}.py").write_text(source)
    return str(folder / "functions.py")


@pytest.fixture
def call(file):
    def call(name, completions, rows=None, seconds=5):
        [found] = reward.load_rewards(f"{file}:{name}")
        rows = [ADDED | row for row in rows or [{}] * len(completions)]
        return reward.call_reward(found, completions, rows, seconds)

    return call


def test_load(file):
    names = ("length:-1e-1", "needs_gold", "trl", "trl_keywords:0", "trl_everything", "trl_object")
    specs = ["gsm8k", " format:0.2", *(f"{file}:{name}" for name in names)]
    found = reward.load_rewards(",".join(specs))
    assert [r.name for r in found] == [spec.split(":")[0].strip() for spec in (*specs[:2], *names)]
    assert [r.weight for r in found] == [1.0, 0.2, -0.1, 1.0, 1.0, 0.0, 1.0, 1.0]
    assert [r.columns for r in found] == [("answer",), (), (), ("gold",), (), (), (), ()]
    assert [r.batched for r in found] == [False] * 4 + [True] * 4
    assert reward.load_function(f"{file}:Parsed")("a").text == "a"


LOAD_ERRORS = {
    "gsm9k": "answer, gsm8k, math, format, countdown, overlong, environment",
    **dict.fromkeys(("gsm8k:nan", "gsm8k:", "gsm8k:a", "", "gsm8k,"), "file.py:function[:weight]"),
    "gsm8k,gsm8k:2": "two rewards are called gsm8k",
    "missing.py:f": "No such file",
    "FILE:nothing": "nothing",
    "FILE:constant": "constant: 3 is not a callable",
    **dict.fromkeys(("FILE:one_argument", "FILE:takes_answer"), " is no fn(completion, row)"),
    "FOLDER/broken.py:f": "ZeroDivisionError('division by zero')",
    "FOLDER/exits.py:f": "SystemExit",
    "math": "math: ",
}


@pytest.mark.parametrize("spec", LOAD_ERRORS)
def test_load_errors_are_one_line(spec, file, monkeypatch):
    monkeypatch.setitem(sys.modules, "math_verify", None)  # as if it were not installed
    path = spec.replace("FILE", file).replace("FOLDER", os.path.dirname(file))
    with pytest.raises(ValueError) as caught:
        reward.load_rewards(path)
    assert LOAD_ERRORS[spec] in str(caught.value) and "\n" not in str(caught.value)


def test_a_file_gets_its_own_neighbours(tmp_path, monkeypatch):
    """Even if one is called reward.py, as ours is, or as a neighbour of another file is."""
    monkeypatch.chdir(tmp_path)
    before = list(sys.path)
    source = "import reward, helpers, types\ndef f(completion, row):\n    import late\n"
    source += "    return reward.N + helpers.N + late.N"
    for folder, number in (("a", 1), ("b", 10)):
        files = dict.fromkeys(("reward", "helpers"), f"N = {number}")
        files |= dict(mine=source, late="N = 0", types="1 / 0")  # types: of the standard library
        (tmp_path / folder).mkdir()
        for name in files:
            (tmp_path / folder / f"{name}.py").write_text(files[name])
        function = reward.load_function(f"{folder}/mine.py:f")
        assert function("", {}) == 2 * number
        assert reward.load_function(f"{folder}/mine.py:f") is function  # the file ran once
    assert sys.modules["reward"] is reward and sys.path[: len(before)] == before


POOL = """
import concurrent.futures, multiprocessing, helpers
def length(text): return helpers.N * len(text)
def pool(completions, method, **_):
    context = multiprocessing.get_context(method[0])
    with context.Pool(1) as pool: values = pool.map(length, completions)
    with concurrent.futures.ProcessPoolExecutor(1, context) as executor:
        return map(sum, zip(values, executor.map(helpers.double, completions)))
"""


@pytest.mark.parametrize("method", ("fork", "forkserver", "spawn"))
def test_the_functions_of_a_file_can_go_to_child_processes(tmp_path, method):
    """Also if a file of another folder has its name, as in the other tests here, or reward.py."""
    (folder := tmp_path / "v1.0").mkdir()
    (folder / "helpers.py").write_text("N = 1\ndef double(text): return 2 * len(text)\n")
    for file in (folder / "some-pools.py", folder / "reward.py"):  # with the same neighbour
        file.write_text(POOL)
        [found] = reward.load_rewards(f"{file}:pool")
        given = reward.call_reward(found, ["a", "bb"], [ADDED | dict(method=method)] * 2, 60)
        assert given[:2] == ([3.0, 6.0], {})


# -- Calling
def test_each_misbehaviour_costs_its_own_sample(call):
    bad = ["raise", "exit", "nan", "inf", "text", "list", "huge", *["hang"] * 4, "swallow"]
    values, failures, metrics, extra = call("misbehave", [*bad, "bool", "none", "a"], seconds=0.2)
    assert values == pytest.approx([0.0] * len(bad) + [1.0, math.nan, 0.5], nan_ok=True)
    assert list(failures) == list(range(len(bad))) and metrics == extra == {}
    for i, cause in ((0, "KeyError"), (1, "SystemExit(1)"), (9, "no result after 0.2 s")):
        assert failures[i].startswith("reward misbehave failed: ") and cause in failures[i]
    assert all(line.isprintable() for line in failures.values())
    with pytest.raises(KeyboardInterrupt):
        call("misbehave", ["interrupt"])


def test_asynchronous_calls_run_at_the_same_time(call):
    async def go(n):  # 100 at a time take 0.2 s. Beside a running loop, as in a notebook
        start = time.monotonic()
        assert call("waits", ["a"] * n)[:2] == ([1.0] * n, {})
        assert time.monotonic() - start < 4

    asyncio.run(go(200))
    asyncio.run(go(200))
    child = get_context("fork").Process(target=lambda: asyncio.run(go(50)))
    child.start()
    child.join()
    assert child.exitcode == 0


def test_each_asynchronous_misbehaviour_costs_its_own_sample(call, file):
    bad = ["raise", "exit", "exit in a task", "cancel", "hang"]
    values, failures, *_ = call("waits", ["a", *bad, "b"], seconds=0.6)
    assert values == [1, *[0] * 5, 1] and list(failures) == [1, 2, 3, 4, 5]
    with pytest.raises(KeyboardInterrupt):
        call("waits", ["interrupt"])
    start = time.monotonic()
    assert "TimeUp" in call("waits", ["block"], seconds=0.6)[1][0]
    assert time.monotonic() - start < 1.4  # the run goes on
    time.sleep(1)
    waits = reward.load_function(f"{file}:waits")
    assert reward.finish(reward.begin(5, waits, "a", row={}), 5) == 1  # one call, for agents
    assert reward.finish(reward.begin(5, max, 1, 2), 5) == 2
    with pytest.raises(reward.TimeUp):
        reward.finish(reward.begin(0.1, waits, "hang", {}), 0.1)


@pytest.mark.parametrize("bad", ("raise", "short", "hang", "log"))
def test_a_trl_function_that_fails_costs_the_samples_of_its_call(call, bad):
    values, failures, *_ = call("trl_misbehave", ["a", bad], seconds=0.2)
    assert values == [0.0, 0.0] and list(failures) == [0, 1]
    assert call("trl_misbehave", ["a", "b"])[:2] == ([1.0, 0.0], {})


def test_functions_in_both_forms(call):
    rows = [dict(answer=str(i), completion_ids=[1] * i) for i in (1, 2, 3)]
    names = ("trl", "trl_keywords", "trl_only_keywords", "trl_object", "trl_hidden")
    expected = dict.fromkeys(names, [1, 0, 1]) | dict(trl_overlong=[-1, -2, -3], waits=[1, 1, 1])
    expected |= dict.fromkeys(("trl_waits", "trl_nan"), [2, math.nan, 2])
    for name in expected:
        values, failures, *_ = call(name, ["1", "x", "3"], rows)
        assert values == pytest.approx(expected[name], nan_ok=True) and failures == {}, name
    rows = [dict(answer="1"), dict(answer="1", completion_ids=[1])]  # a column of any row
    assert call("trl_hint", ["1", "1"], rows)[0] == [0, 1]
    assert call("only_even", ["ab", "abc"])[0] == pytest.approx([4, math.nan], nan_ok=True)
    assert call("trl", []) == call("length", []) == ([], {}, {}, {})  # a rank may have no samples


def test_trl_chats_state_logs_and_environments(call):
    chat = [{"role": "user", "content": "a"}]
    row = dict(answer=1, prompt_messages=chat, prompt_text="<user>a", completion_ids=[1, 2])
    values, failures, metrics, extra = call("trl_everything", ["abc", "de"], [row] * 2)
    assert (values, failures) == ([3.25, 2.25], {})
    assert (metrics, extra) == ({"mean": 0.5}, {"seen": ["1", "1"]})
    episode = [{"role": "assistant", "content": "first"}, *chat]  # all turns, not only the last
    assert call("trl_everything", ["a"], [row | dict(completion_messages=episode)])[0] == [5.25]
    one, other = type("Env", (), {"score": 2})(), type("Env", (), {"get_reward": lambda self: 7})()
    assert call("trl_environments", ["a"], [{"environments": one}])[0] == [2.0]
    [own] = reward.load_rewards("environment")
    values, *_ = reward.call_reward(own, ["", ""], [{"environments": x} for x in (one, other)], 5)
    assert values == pytest.approx([math.nan, 7], nan_ok=True)


OWN = """
from trl.rewards import accuracy_reward, reasoning_accuracy_reward, think_format_reward
import trl.rewards as trl
cosine = trl.get_cosine_scaled_reward(max_len=10)
repetition = trl.get_repetition_penalty_reward(ngram_size=2)
overlong = trl.get_soft_overlong_punishment(10, 4)
"""


@pytest.mark.parametrize("chat", (True, False))
def test_trl_own_functions(chat, tmp_path):
    trl = pytest.importorskip("trl.rewards")
    (tmp_path / "own.py").write_text(OWN)
    names = ["repetition", "overlong"]
    texts = ["<think>a</think>$\\boxed{4}$", "$\\boxed{5}$", "<think>$4$</think> so $4$", "", "$4$"]
    columns = dict(prompts=["2+2"] * 5, completions=texts, solution=["$4$"] * 4 + ["?"])
    columns["completion_ids"] = [[1, 2, 3], list(range(8)), [5] * 12, [], [1, 2, 1, 2]]
    if chat:
        names += ["accuracy_reward", "reasoning_accuracy_reward", "think_format_reward", "cosine"]
        assert len(names) == sum(len(n) for n in trl._import_structure.values())  # all of them
        columns["prompts"] = [[{"role": "user", "content": "2+2"}]] * 5
        columns["completions"] = [[{"role": "assistant", "content": text}] for text in texts]
    rows = []
    for i in range(5):
        row = {name: columns[name][i] for name in ("solution", "completion_ids")}
        rows.append(ADDED | row | dict(prompt_messages=columns["prompts"][i] if chat else None))
    logs = dict(trainer_state=None, log_extra=lambda *_: None, log_metric=lambda *_: None)
    for name in names:
        [found] = reward.load_rewards(f"{tmp_path}/own.py:{name}")
        values, failures, *_ = reward.call_reward(found, texts, rows, 60)
        expected = [math.nan if x is None else x for x in found.function(**columns, **logs)]
        assert values == pytest.approx(expected, nan_ok=True) and not failures, name


def test_the_time_limit_leaves_nothing_behind(call):
    before = signal.signal(signal.SIGALRM, mine := lambda *_: None)
    try:
        with pytest.raises(reward.TimeUp), reward.time_limit(0.01):
            time.sleep(9)
        with reward.time_limit(60):
            pass
        assert signal.getsignal(signal.SIGALRM) is mine
        assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    finally:
        signal.signal(signal.SIGALRM, before)
    thread = ThreadPoolExecutor().submit(call, "length", ["abc"])  # which has no limit
    assert thread.result()[:2] == ([3.0], {})
