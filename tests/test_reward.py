"""The built-in reward functions pay right answers. Users' functions are found and called, and
whatever one does costs its own samples."""

import asyncio
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import get_context

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

import reward
from extras import tokens
from tests.common import HERE, metrics_of, run, small_run

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
    ("-.5", ["-0.50"], [".5"]),
    ("1234", ["1,234", "1234.0"], ["1 234", "234", "1.234", "1,2,34", "12,34"]),
    ("3", ["3"], ["3 1/2", "3\xbd", "3\\frac{1}{2}", "3e6", "3 + 3x", "3 million"]),
    ("blue whale", ["blue whale"], ["Blue whale", "a blue whale"]),
    (5e-5, ["0.00005", "<answer>.00005</answer>"], ["5e-05", "0.000051"]),
    ("5e-05", ["5e-05"], ["0.00005"]),
    ("9" * 9999, ["9" * 9999, "9" * 9999 + ".0"], ["9" * 9998]),
    (np.int64(7), ["7", "7.0"], ["8"]),
    (True, ["True"], ["1"]),
    (np.float32(5e-5), ["0.00005"], ["5e-05"]),
    ("-5", ["\u22125", "\u20115"], ["5", "\u20135"]),  # a typographic minus
    ("\u22121042", ["-1\u202f042", "\u22121\xa0042", "-1\u2009042", "-1\\,042"], ["42", "-42"]),
]


@pytest.mark.parametrize(("gold", "right", "wrong"), ANSWERS, ids=range(len(ANSWERS)))
def test_answer(gold, right, wrong):
    assert [text for text in right + wrong if part("answer", text, answer=gold)] == right


SEVERAL = (
    r"70\text{ or }72; [0,1]; [0, 1); \frac{1}{2}; 1/2; 2\sqrt{2}; 10^3; 3\pi; {1,2}; x > 3; x^2"
)
SEVERAL += r"; x=1\text{ or }x=2; (0,\infty); 0\le x; 3:2; 101_2; 5e-05"
SEVERAL += r"; y - 4; 4-y; 4y; 2x+4; n -4; 3*4; a + 4; 4\cdot a; \pm 4; 4/y; 3 \times y; 4!"
SEVERAL = [f"\\boxed{{{text}}}" for text in SEVERAL.split("; ")]
PARTS = "1/2; 3 1/4; 3\xbd; 3\xb2; y - 4; 4 + y; 18 or 20; 18 for 2; 5 - 3; 3*4; 3 \xd7 a"
SEVERAL += [f"17 #### {text}" for text in PARTS.split("; ")]
FINAL_NUMBERS = {
    "18": ["9 * 2 = 18", "**Answer:18**", "18cm", "$18$.", "18%", "17, 18", "a 1 18 \ud800", "18!"],
    "18.0": ["17\n#### 18\n7 a day", "#### $18", "#### 7 #### **18**\n\\boxed{5}", "####18 a day"],
    "18.00": ["\\boxed{18}, not 17", "\\boxed{17} \\boxed{x_1 = 18}", "\\boxed{18\\text{ m}^2} 5"],
    "60": ["#### 60 km/h", "\\boxed{\\$60/\\text{hour}}", "#### 60 m\xb2.", "#### \\boxed{60}"],
    "11": ["#### Step 1: add 5 and 6\nso 11", "#### x = 11", "#### 11 six-packs", "####\n*11*"],
    "-7": ["#### -$7", "it is -7.", "(-7)", "\\boxed{-7}", "#### -7.", "\\boxed{-7.}"],
    "72": ["\\boxed{48+24=72}", "\\boxed{\\text{72 clips}}", "\\boxed{72\\,\\text{cm}^{3}}"],
    "90": ["\\boxed{90^\\circ}", "\\boxed{\\{9\\}} \\boxed{\\approx 90\\%}"],
    "1042.5": [
        "so $1,042.50.",
        "\\boxed{\\$1{,}042.5 \\text{ a day}}.",
        "1,\\!042.5",
        "#### 1,042.5",
    ],
    ".5": ["0.50", "1 .5"],
    "5": ["3,5"],
    "9" * 9999: ["9" * 9999],
    None: ["", "eighteen", "\u0664\u0662", "\\boxed{}", "\\boxed{}5", *SEVERAL],
}


@pytest.mark.parametrize("expected", FINAL_NUMBERS, ids=range(len(FINAL_NUMBERS)))
def test_final_number(expected):
    found = {text: reward.final_number(text) for text in FINAL_NUMBERS[expected]}
    number = expected if expected is None else reward.value_of(expected)
    assert set(found.values()) == {number}, found


def test_gsm8k():
    for line in open(f"{os.path.dirname(__file__)}/../sample_data/gsm8k_train.jsonl"):
        row = json.loads(line)
        gold = row["answer"].rpartition("#### ")[2]
        for right in (row["answer"], f"It is ${gold}.", f"<think>1</think>\\boxed{{{gold}.00}}"):
            assert part("gsm8k", right, answer=row["answer"]) == 1
        for wrong in ("", f"<think>{gold}", f"{gold}1", f"#### 1{gold}\n{gold}"):
            assert part("gsm8k", wrong, answer=row["answer"]) == 0
    assert part("gsm8k", "42", answer=42.0) == part("gsm8k", "0.00005", answer=5e-5) == 1


MATH = r"""\frac{1}{2} == the answer is $\frac{2}{4}$; \boxed{0.5} but not $3$ != 0.5; \boxed{}
(1,2) == \boxed{(1,2)} != \boxed{(2,1)} | 2x+3y == \boxed{3y+2x} != \boxed{3x+2y}
5\text{ m} == \boxed{5 \text{ meters}}; \boxed{5}; Answer: $5$ m != \boxed{6 m}
\$5 == \boxed{5} != $5$ | \text{Yes} == \boxed{yes} != \boxed{no}
\infty == \boxed{\infty} != \boxed{-\infty}"""
MORE = r"""72 == \boxed{72.} != There are 72.; It is not 72.; \boxed{70}, not 72; 6*12 = 72
1000 == \boxed{1\,000}; \boxed{1THIN000} != \boxed{1\,001} | 43 == \boxed{43.} != \boxed{1\,042}
[0,1) == \boxed{0\le x<1} != \boxed{[0,1]}; \boxed{0<x<1} | 42 == \boxed{42.} != \boxed{1THIN042}
7 == \boxed{7.} != \boxed{7}, \boxed{8}; \boxed{8}, \boxed{7}; \boxed{7,8}; If $x = 7$; \boxed{x^7}
\frac{1}{2} == \boxed{\frac12} != \boxed{\frac21} | 2\sqrt{2} == \boxed{2\sqrt2} != \boxed{2}"""
MORE = MORE.replace("THIN", "\u202f")


@pytest.mark.parametrize("row", re.split("\n| [|] ", f"{MATH}\n{MORE}"))
def test_math_pays_what_trl_pays_and_more(row):
    """A row has the gold text, completions that earn it (of MORE not by TRL), and others."""
    accuracy = pytest.importorskip("trl.rewards").accuracy_reward
    gold, *texts = re.split(" [!=]= ", row)
    right, wrong = (text.split("; ") for text in texts)
    assert [text for text in right + wrong if part("math", text, answer=gold)] == right
    assert part("math", f"<think>{right[0]}</think>{wrong[0]}", answer=gold) == 0
    formula = gold if "$" in gold.replace(r"\$", "") else f"${gold}$"
    chats = [[dict(content=text)] for text in right + wrong]
    verdicts = accuracy(chats, [formula] * len(chats))
    if row in MATH:
        assert verdicts == [1.0] * len(right) + [0.0] * len(wrong)
    else:
        assert verdicts[: len(right)] == [0.0] * len(right)


def test_format():
    right = ["<think>a</think>b", "\n<think>\na <b>\n</think>\n\nb < 3 and c > 4\n"]
    right += [f"<think>a</think>{b}" for b in ("b<|im_end|>", "<answer>b</answer>")]
    wrong = ["<think>a", "a</think>b", "b", "", "x<think>a</think>b", "<think><think>a</think>b"]
    wrong += ["<think> \n</think>b", "<think></think>b", "<think><|im_end|></think>b"]
    wrong += ["<think>a</think></think>b", "<think>a</think>b<think>c</think>d"]
    answers = ["", "\u200b\x00", "<\uff5cend\uff5c> <|im_end|>", "<answer> </answer>", "<answer>b"]
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
    assert part("countdown", "5 / 0", numbers=[5, 0], target=5.0) == 0


def test_overlong():
    lengths = (1, 800, 801, 900, 999, 1000, 1100)
    rows = [dict(completion_ids=[0] * n, max_completion_length=1000) for n in lengths]
    values = [part("overlong", "", **row) for row in rows]
    assert values == pytest.approx([0, 0, -1 / 200, -0.5, -199 / 200, -1, -1])


HOSTILE = ["9" * 10**5, "1,234" * 20_000, " 1." * 40_000, "1{,}" * 30_000, "1 " * 50_000, "\x00"]
HOSTILE += ["\\boxed{" * 15_000, "<think>" * 40_000, "<answer>" * 40_000 + "</answer>" * 40_000]
HOSTILE += ["</think>" * 20_000, "<a" + " " * 10**5, "<|" * 50_000, ". <" * 40_000 + "b>"]
HOSTILE += ["#" * 10**5, "####" + " " * 10**5, "#### 1" + " apple" * 20_000, "\ud800" * 10**5]
HOSTILE += ["a" * 10**5 + "!", "\u202e43\u202c", "9**9**9", "\\", "(" * 10**5]


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_no_text_breaks_a_built_in_or_takes_more_than_linear_time(text):
    row = dict(answer="42", numbers=[7, 42, 0], target=49)
    start = time.process_time()
    for completion in (text, "<think>a</think>" + text):
        for name in ("answer", "gsm8k", "countdown"):
            assert reward.BUILT_IN[name](completion, row) == 0
        assert reward.format_reward(completion, row) in (0, 1)
    assert time.process_time() - start < 10  # at most 0.5 s on one core; quadratic takes minutes


GOLDS = dict(answer=["", " \n", ["5"], {"a": 5}, "<answer>5</answer>", "a</think>5"])
GOLDS["answer"] += [np.array([5]), ("5",), b"5"]
GOLDS |= dict(gsm8k=["", "five", math.nan, *SEVERAL, "[0,1)"], math=["", "\\boxed{}", ["5"]])
UNEARNABLE = [(name, {"answer": gold}) for name in GOLDS for gold in GOLDS[name]]
UNEARNABLE += [("countdown", {"numbers": n, "target": 3}) for n in ([1.5, 2], [-1, 2], "1 2", [])]
UNEARNABLE += [("countdown", {"numbers": [1, 2], "target": "three"})]


@pytest.mark.parametrize(("name", "row"), UNEARNABLE)
def test_a_row_that_nothing_can_satisfy_is_refused(name, row):
    if name == "math":
        pytest.importorskip("math_verify")
    [found] = reward.load_rewards(name)
    with pytest.raises(ValueError):
        found.check_row(row)
    good = {"answer": "#### 8", "numbers": ["1", 2], "target": "3"}
    found.check_row(good)
    found.check_row(dict.fromkeys(good))  # null: another task's row
    with pytest.raises(ValueError, match="has no column '"):
        found.check_row({})


# -- Functions from files
FUNCTIONS = r"""from __future__ import annotations
import asyncio, json, math, sys, time, torch
from dataclasses import dataclass
import neighbour
@dataclass
class Parsed: text: str
def length(completion, row, **_): return len(completion) + neighbour.ZERO
def needs_gold(completion: dict[str, int], row: dict): return float(completion == row["gold"])
needs_gold.columns = ("gold",)
GATE = asyncio.Semaphore(100)
def in_a_thread(completion): time.sleep(9 if completion == "hang" else 0.2); return 1.0
async def threads(completion, row): return await asyncio.to_thread(in_a_thread, completion)
def spoil(): torch.set_grad_enabled(False); torch.set_default_dtype(torch.float16); return 1.0
spoil()
def spoils(completion, row): return spoil()
async def spoils_later(completion, row): await asyncio.sleep(0); return spoil()
async def waits(completion, row):
    if completion in ("raise", "exit", "interrupt"): misbehave(completion, row)
    if completion == "exit in a task": await asyncio.gather(waits("exit", row))
    if completion == "cancel": asyncio.current_task().cancel()
    if completion == "block": time.sleep(1.5)
    async with GATE: await asyncio.sleep(9 if completion == "hang" else 0.2)
    return 1.0
def only_even(completion, row): return None if len(completion) % 2 else 4.0
def steps(completion, row): return row["returned"]
def helper(text): return json.loads(text)  # raises in Python's own file
def misbehave(completion, row):
    values = {"nan": float("nan"), "inf": -float("inf"), "text": "1.0", "list": [1.0], "bool": True}
    if completion == "raise": raise KeyError("two\nlines \033 \ud800")
    if completion == "deep": return helper(completion)
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
    if "dict" in completions: return dict.fromkeys(range(len(completions)), 1.0)
    return [1 / 0 if c == "raise" else c == "a" for c in completions if c != "short"]
def trl_nan(completions, **_): yield from (math.nan if c == "x" else 2 for c in completions)
def trl_hint(completions, completion_ids=(), **_): return [bool(ids) for ids in completion_ids]
def trl_environments(environments, **_): return [e.score for e in environments]
def trl_column(completions, completion, **_): return same(completions, completion)
def trl_row(completions, row, **_): return same(completions, row)
def trl_kinds(prompts, completions, **_):
    return [len(p) + 10 * len(c) + 100 * isinstance(c, list) for p, c in zip(prompts, completions)]
class Function:
    def __call__(self, completions, answer, **kwargs): return same(completions, answer)
trl_object = Function()
def takes_answer(completion, answer): return 1.0
def neither_form(completion, total, **_): return 1.0
def one_argument(completion): return 1.0
def three_arguments(completion, row, more): return 1.0
def two_of_three(completion, row, more=1, *, last=2, **rest): return 1.0
trl_hidden = (lambda function: lambda *args, **kwargs: function(*args, **kwargs))(trl)
constant = 3
"""
ADDED = dict(prompt_text="", prompt_messages=None, trainer_state=dict(global_step=1, max_steps=4))


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rewards")
    files = dict(neighbour="ZERO = 0", broken="1 / 0", functions=FUNCTIONS, reward="", math="")
    for name, source in (files | dict(exits="import sys\nsys.exit('no\\nGPU')")).items():
        (folder / f"{name}.py").write_text(source)
    return str(folder / "functions.py")


@pytest.fixture
def call(file):
    def call(name, completions, rows=None, seconds=5):
        [found] = reward.load_rewards(f"{file}:{name}")
        rows = [ADDED | row for row in rows or [{}] * len(completions)]
        for completion, row in zip(completions, rows, strict=True):
            row.setdefault("completion_messages", [dict(role="assistant", content=completion)])
        return reward.call_reward(found, completions, rows, seconds)

    return call


def test_load(file):
    names = ("length:-1e-1", "needs_gold", "trl", "trl_keywords:0", "trl_everything", "trl_object")
    specs = ["gsm8k", " format:0.2", *(f"{file}:{name}" for name in names)]
    found = reward.load_rewards(",".join(specs))
    assert [r.name for r in found] == [spec.split(":")[0].strip() for spec in (*specs[:2], *names)]
    assert [r.weight for r in found] == [1.0, 0.2, -0.1, 1.0, 1.0, 0.0, 1.0, 1.0]
    assert [r.columns for r in found[:4]] == [("answer",), (), (), ("gold",)]
    assert [r.batched for r in found] == [False] * 4 + [True] * 4
    assert reward.load_function(f"{file}:Parsed")("a").text == "a"
    for name, batched in dict(trl_column=True, trl_row=True, two_of_three=False).items():
        [one] = reward.load_rewards(f"{file}:{name}:2.5e-10")
        assert one.batched == batched and one.weight == 2.5e-10


LOAD_ERRORS = {
    "gsm9k": "'answer', 'gsm8k', 'math', 'format', 'countdown', 'overlong', 'environment'",
    **dict.fromkeys(("gsm8k:nan", "gsm8k:", "gsm8k:a"), "file.py:function[:weight]"),
    **dict.fromkeys(("gsm8k:1.2.3", "", "gsm8k,"), "file.py:function[:weight]"),
    "gsm8k,gsm8k:2": "two rewards are called gsm8k",
    "missing.py:f": "no such file",
    "FILE:nothing": "nothing",
    "FILE:constant": "3 is not a callable",
    "FILE:one_argument": "is not fn(completion, row)",
    "FILE:three_arguments": "is not fn(completion, row)",
    "FILE:takes_answer": "is not fn(completion, row)",
    "FILE:neither_form": "is not fn(completion, row) or fn(completions, **columns)",
    "FOLDER/broken.py:f": "ZeroDivisionError('division by zero')",
    "FOLDER/exits.py:f": "SystemExit",
    "FOLDER/reward.py:f": "reward.py",  # ours is called so
    "FOLDER/math.py:f": "math",  # and one of Python's
}


@pytest.mark.parametrize("spec", LOAD_ERRORS)
def test_load_errors_are_one_line(spec, file):
    path = spec.replace("FILE", file).replace("FOLDER", os.path.dirname(file))
    with pytest.raises((ValueError, TypeError)) as caught:
        reward.load_rewards(path)
    assert LOAD_ERRORS[spec] in str(caught.value) and "\n" not in str(caught.value)


def test_a_column_that_trls_form_asks_for_is_found_missing_in_the_data(file):
    names = "trl trl_keywords trl_everything trl_environments trl_hidden"
    [*found] = reward.load_rewards(",".join(f"{file}:{name}" for name in names.split()))
    for one in found[:3]:
        one.check_row(dict(answer=1))
        with pytest.raises(TypeError, match="answer"):
            one.check_row(dict(solution=1))
    for one in found[3:]:
        one.check_row({})


def test_a_file_is_imported_as_python_does(tmp_path, monkeypatch):
    """By its name, with its neighbours, once, from whatever path."""
    monkeypatch.chdir(tmp_path)
    for folder in ("a", "b", "100%25.dir"):
        os.mkdir(folder)
        for name in ("mine", "my-rewards"):
            source = f"import helpers, types\ndef f(completion, row): return helpers.N, {folder!r}"
            with open(f"{folder}/{name}.py", "w") as file:
                file.write(source)
        with open(f"{folder}/helpers.py", "w") as file:
            file.write("from email import utils\nN = 1")
        with open(f"{folder}/utils.py", "w") as file:  # not what a library calls utils
            file.write("1 / 0")
    os.symlink("a", "link")
    function = reward.load_function("a/mine.py:f")
    assert function("", {}) == (1, "a") and function.__module__ == "mine"
    for path in ("a/mine.py", f"{tmp_path}/a/mine.py", "link/mine.py", "./b/../a/mine.py"):
        assert reward.load_function(f"{path}:f") is function
    assert reward.load_function("100%25.dir/my-rewards.py:f")("", {}) == (1, "100%25.dir")
    with pytest.raises(ValueError, match="a/mine.py.* same name"):
        reward.load_function("b/mine.py:f")


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
    (folder := tmp_path / "v1.0").mkdir()
    (folder / "helpers.py").write_text("N = 1\ndef double(text): return 2 * len(text)\n")
    (folder / "some-pools.py").write_text(POOL)
    call = "reward.call_reward(found, ['a', 'bb'], [json.loads(sys.argv[1])] * 2, 60)"
    code = f"import json, reward, sys\n[found] = reward.load_rewards('{folder}/some-pools.py:pool')"
    # In a process of its own: a fork of this one may lack the threads of earlier tests, which hang.
    command = [sys.executable, "-c", f"{code}\nif __name__ == '__main__': print({call}[:2])"]
    row = json.dumps(ADDED | dict(method=method))
    done = subprocess.run([*command, row], cwd=HERE, capture_output=True, text=True, timeout=100)
    assert done.stdout == "([3.0, 6.0], {})\n", done.stderr[-1000:]


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


def test_a_failure_names_the_line_of_your_own_code(call, file):
    places = dict(misbehave="return json.loads", waits="raise KeyError", trl_misbehave="1 / 0")
    for name, code in places.items():
        line = FUNCTIONS.partition(code)[0].count("\n") + 1
        [why] = call(name, ["deep" if name == "misbehave" else "raise"])[1].values()
        assert why.endswith(f'File "{file}", line {line}')


def test_a_list_is_a_value_for_each_token(call):
    good = [[1, None, -0.5], [0, True, np.float32(2)], 4, None]
    bad = [[1, 2], [1, 2, 3, 4], [1, 2, math.inf], [1, [2], 3], [1, "2", 3], []]
    rows = [dict(completion_ids=[5, 6, 7], returned=value) for value in good + bad]
    values, failures, *_ = call("steps", [""] * len(rows), rows)
    assert values[0] == pytest.approx([1, math.nan, -0.5], nan_ok=True)
    assert values[1:3] == [[0, 1, 2], 4] and math.isnan(values[3])
    assert values[4:] == [0.0] * len(bad) and list(failures) == list(range(4, len(rows)))


LISTS = """
def values(row):
    return [None if i % 2 else len(text) / 8 for i, text in enumerate(row["completion_tokens"])]
def steps(completion, row):
    assert "".join(row["completion_tokens"]).startswith(completion)
    return values(row)
def total(completion, row): return sum(value or 0 for value in values(row))
steps.tokens = total.tokens = True
"""


def test_the_sum_of_a_list_is_the_reward_of_the_sample(tmp_path):
    (tmp_path / "lists.py").write_text(LISTS)
    for name in ("steps", "total"):
        small_run(tmp_path / name, reward=f"{tmp_path}/lists.py:{name}:-2,overlong", max_steps=2)
    of_lists, of_sums = (repr(metrics_of(tmp_path / name)) for name in ("steps", "total"))
    assert of_lists.replace("steps/", "total/") == of_sums and "rewards/total/std" in of_sums


def test_the_texts_of_tokens():
    """Their places in the text, also where a character has several tokens, or a first blank is
    dropped by whatever decodes."""
    text = " caf\xe9 \U0001f600\U0001f600 1 + 1 = 2, \u4f60\u597d"
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = ["\u2581", *dict.fromkeys("caf\xe9\U0001f6001+=2,\u4f60\u597d")]
    of_bytes = (letters, pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel())
    of_words = (words, pre_tokenizers.Metaspace(), decoders.Metaspace())
    for vocabulary, splits, joins in (of_bytes, of_words):
        tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(vocabulary)}, []))
        tokenizer.pre_tokenizer, tokenizer.decoder = splits, joins
        ids = tokenizer.encode(text).ids
        whole = tokenizer.decode(ids)
        texts = tokens.texts(tokenizer, ids)
        assert len(texts) == len(ids) and "".join(texts) == whole and whole.strip() == text.strip()
        assert tokens.texts(tokenizer, ids[:5]) == texts[:5]
    assert texts[-1] == "\u597d" and max(map(len, texts)) == 1


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


def test_32_threads_at_once_however_few_cores_and_whatever_hangs(call, monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    for hanging in (32, 0):
        values, failures, *_ = call(
            "threads", ["hang"] * hanging + ["a"] * 64 * (not hanging), seconds=1
        )
        assert sum(values) == 64 * (not hanging) and len(failures) == hanging


def test_what_torch_computes_with_is_as_before(call):
    for name in ("spoils", "spoils_later"):
        assert call(name, ["a", "b"])[:2] == ([1.0, 1.0], {})
        assert torch.is_grad_enabled() and torch.get_default_dtype() == torch.float32


JUDGE = """
import asyncio, threading
async def judge(completion, row):
    if row["trainer_state"]["global_step"] == 1:
        threading.Thread(target=threading.Event().wait).start()
        await asyncio.to_thread(threading.Event().wait)
    return len(completion)
"""


@pytest.mark.slow
def test_the_process_ends_when_its_run_does(tmp_path):
    (tmp_path / "judges.py").write_text(JUDGE)
    flags = "--num_prompts 2 --num_generations 2 --max_steps 2 --call_timeout 1 --eval_data="
    flags = [*flags.split(), "--reward", f"{tmp_path}/judges.py:judge"]
    done = run(*flags, "--out_dir", tmp_path / "run", timeout=120)
    assert done.returncode == 0 and "thread" in done.stderr
    assert [m["failed_rewards"] for m in metrics_of(tmp_path / "run")] == [0, 4]


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
    future = reward.begin(5, waits, "a", {})
    reward.wait([future], 5)
    assert reward.finish(future) == 1  # one call, for agents
    assert reward.finish(reward.begin(5, max, 1, 2)) == 2
    with pytest.raises(reward.TimeUp):
        reward.finish(reward.begin(5, waits, "hang", {}))


@pytest.mark.parametrize("bad", ("raise", "short", "hang", "log", "dict"))
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
    rows = [row, row | dict(prompt_messages=None, prompt_text="abcd")]  # a chat and a text
    for order in (rows, rows[::-1]):
        expected = [111 if one is row else 54 for one in order]
        assert call("trl_kinds", ["fghij"] * 2, order)[0] == expected
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
        row["completion_messages"] = columns["completions"][i]
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
