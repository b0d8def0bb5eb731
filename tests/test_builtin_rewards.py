"""The built-in rewards pay right answers and no others, and no text breaks them."""

import json
import time
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from operator import add, mul, sub, truediv
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import reward
from harness.numbers import final_number
from harness.scorer import Scorer
from harness.user_code import load_rewards
from tests.common import part

pytest_plugins = "tests.common"


PREFILLED = "User: hi\nAssistant: <think>\n"


@pytest.mark.parametrize(
    ("completion", "gold", "expected"),
    [
        ("42", "42", 1),
        ("<think>a</think> 42\n", "42", 1),
        ("<think>a</think>no<think>b</think>42", "42", 1),
        ("a</think>42", "42", 1),
        ("42.0", 42, 1),
        ("+42", "42", 1),
        ("-0.50", "-.5", 1),
        ("blue whale", "blue whale", 1),
        ("Blue whale", "blue whale", 0),
        ("the answer is 42", "42", 0),
        (" ".join(map(str, range(100))), "42", 0),  # all numbers at once
        ("<think>42</think>", "42", 0),  # in the reasoning only
        ("<think>42", "42", 0),
        ("<think>a</think>42<think>", "42", 0),
        ("", "", 0),
        ("<think>a</think> ", "", 0),
        ("\u200b\x00", "\u200b\x00", 0),
        ("\u0664\u0662", "42", 0),  # Arabic-Indic digits
        ("4_2", "42", 0),
        ("42e0", "42", 0),
        ("1,234", "1234", 1),
        ("1234", "1,234.0", 1),
        ("\u221242", "-42", 1),
        ("1,23", "123", 0),
        ("$42", "42", 0),
        ("nan", "nan", 1),  # as text
        ("9" * 1001, "9" * 1001, 1),  # as text
        ("9" * 1001 + ".0", "9" * 1001, 0),
        ("1e999999999", "1", 0),
    ],
)
def test_answer(completion, gold, expected):
    assert part("answer", completion, answer=gold) == expected


@pytest.mark.parametrize(
    ("gold", "text"),
    [
        (0.00005, "0.00005"),
        (-1e-7, "-.0000001"),
        (1e16, "10,000,000,000,000,000"),
        (1.5e300, "15" + "0" * 299),
        (0.5, "0.5"),
    ],
)
@pytest.mark.parametrize("name", ("answer", "gsm8k"))
def test_a_float_is_written_without_an_exponent(name, gold, text):
    """Python's str() gives 5e-05 for 0.00005 from JSON, and no model writes that."""
    assert part(name, text, answer=gold) == 1
    assert part(name, text + "1", answer=gold) == 0


def test_a_text_with_an_exponent_is_a_text():
    assert part("answer", "5e-05", answer="5e-05") == 1


@pytest.mark.parametrize(
    ("name", "row", "why"),
    [
        ("answer", {"answer": ["5"]}, "no completion can have the answer"),
        ("answer", {"answer": {"value": 5}}, "no completion can have the answer"),
        ("answer", {"answer": ""}, "no completion can have the answer ''"),
        ("answer", {"answer": " \n"}, "no completion can have the answer"),
        ("answer", {"answer": "\u200b"}, "no completion can have the answer"),
        ("answer", {"answer": "<answer>5</answer>"}, "no completion can have the answer"),
        ("answer", {"answer": "a</think>5"}, "no completion can have the answer"),
        ("gsm8k", {"answer": "#### 18 or 19"}, "ends in no number"),
        ("countdown", {"numbers": [1, 2], "target": "three"}, "three"),
        ("countdown", {"numbers": [1.5, 2], "target": 3}, "whole numbers"),
        ("countdown", {"numbers": [-1, 2], "target": 3}, "whole numbers"),
        ("countdown", {"numbers": "1 2", "target": 3}, "whole numbers"),
    ],
)
def test_a_row_that_nothing_can_satisfy_is_an_error(name, row, why):
    with pytest.raises(ValueError, match=why):
        reward.BUILT_IN[name].check(row)


@pytest.mark.parametrize(
    ("name", "row"),
    [
        *(("answer", {"answer": gold}) for gold in ("5", 5, 5e-5, True, "a b", "x < y", "nan")),
        ("gsm8k", {"answer": "4 + 4 = 8\n#### 8"}),
        ("gsm8k", {"answer": 1e16}),
        ("countdown", {"numbers": ["1", 2], "target": "3"}),
    ],
)
def test_other_rows_are_none(name, row):
    reward.BUILT_IN[name].check(row)


@pytest.mark.parametrize("name", ("<think>", "<answer>"))
def test_a_tag_that_is_a_special_token_is_text(name):
    """A tag that the tokenizer calls a special token reaches the rewards as its text."""
    text = "<think> two and two </think> <answer> 4 </answer>"
    assert name in text
    assert part("format", text) == 1
    assert part("answer", text, answer="4") == part("gsm8k", text, answer="4") == 1


def test_think_prefilled_by_the_chat_template():
    for name in ("answer", "gsm8k"):
        assert part(name, "a</think>42", PREFILLED, answer="42") == 1
        assert part(name, "42", PREFILLED, answer="42") == 0
        assert part(name, "42", "<think>\n\n</think>\n\n", answer="42") == 1
    assert part("format", "a</think>42", PREFILLED) == 1
    assert part("format", "a</think>42") == 0
    assert part("format", "<think>a</think>42", PREFILLED) == 0


# Right answers that gsm8k does not pay.
UNPAID = {
    "#### 18 ####",
    "#### 5M",  # 5 meters
    "#### 18 dollars and 0 cents",  # after a mark has to stand one number only
    "#### 7 boxes of 12",
    "She makes $18 each day for 7 days.",  # the last number of free text decides
    "**104** bowls in 1 year.",
    "The answer is 18, not 17.",
    "17, not 18",
    "She has **8 apples** left, because 5 were eaten and 7 were sold.",
    "She needs at least 9 boxes, because 8 are not enough.",
    "In total, Betty has $95, which means she needs $5 more to reach $100.",
    "It takes her 2 hours (or 120 minutes).",
    "The total cost is 3(4)+2(7) = 26 dollars, or $26.",
    "It takes him 2.5 hours, or 2 hours and 30 minutes.",
    "Jasmine will have had 276,000 views. (That's 276K!)",
    "Therefore $x=9$ and she has nine apples.",  # 9 and a half is another number
}


def test_gsm8k_on_completions_graded_by_hand():
    """No wrong answer is paid. `right` in the file: a teacher would accept the completion."""
    lines = Path(__file__).with_name("graded_answers.jsonl").read_text().splitlines()
    paid, unpaid = [], []
    for row in map(json.loads, lines):
        if part("gsm8k", row["completion"], answer=row["gold"]):
            paid.append(row)
        else:
            unpaid.append(row)
    assert len(lines) == 605
    assert all(row["right"] for row in paid)
    assert {row["completion"] for row in unpaid if row["right"]} == UNPAID


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("so 1,234,567.50.", "1234567.5"),
        ("1,2345", None),
        ("1, 2, 3", None),
        ("\\$1,000.25", "1000.25"),
        ("it is - 7", "-7"),
        ("(-7)", "-7"),
        ("x-7", None),
        ("10:45.", None),
        ("18 - 5 = 13!", "13"),
        (".5", "1/2"),
        ("3.14.15", None),
        ("5 million people", "5000000"),
        ("#### 5 dozen", "60"),
        ("#### 1.5-million", "1500000"),
        ("5 thousandths", None),
        ("#### 5 millions", None),
        ("2 + 3 = <<2+3=5>>5 eggs", "5"),
        ("5. Is that all?", "5"),
        ("5 or so?", None),
        ("17, or 18", None),
        ("\\boxed{17, or 18}", None),
        ("\\boxed{2 + 3 = 5}", "5"),
        ("\\boxed{x = 4, y = 5}", None),
        ("\\boxed{\\frac{x}{5}}", None),
        ("\\boxed{5} million", "5000000"),
        ("\\boxed{5} or \\boxed{6}", None),
        ("not \\boxed{5}", None),
        ("## Step 2\n\n\\boxed{5}!", "5"),
        ("#### Step 2: Add\n2 + 3 = 5", "5"),
        ("x - 5", None),
        ("5 - x", None),
        ("4.8 \\approx 5", "5"),
        ("=> 5", "5"),
        ("x > 5", None),
        ("10 -\n5", None),
        ("10 -\n\\boxed{5}", None),
        ("Step 2\n5", "5"),
        ("Tom's 5 apples", "5"),
        ("#### 2.5k", None),
        ("#### -42 (that is 6 * 7)", None),
        ("#### 5 \\boxed{6}", None),
        ("\\boxed{42", None),
        ("", None),
        ("\u0664\u0662 or \uff14\uff12", None),
        ("9" * 1001, None),
        ("0" * 1000 + "1", None),
        ("9" * 1000, "9" * 1000),
        ("4\x002", None),
        ("\u202e42\u202c \ud800", None),  # shown as 24
        ("42 \ud800", "42"),
        ("#### 42 \u0664", None),
        ("42.\xb2", None),
        ("42 m\xb2", "42"),
    ],
)
def test_final_number(text, expected):
    assert final_number(text) == (None if expected is None else Fraction(expected))


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("<think>a</think><answer>18</answer>", "18"),
        ("<think>a</think>\n<answer>\n18\n</answer>\n", "18"),
        ("so <answer>17</answer> no <answer>18</answer> done", "18"),
        ("<answer>18", ""),
        ("<answer>18</answer><answer>", ""),
        ("<think><answer>18</answer>", ""),
        ("<think><answer>17</answer></think>18", "18"),
        ("18</answer>", "18"),  # a prompt may have opened it
    ],
)
def test_the_answer_is_what_stands_between_the_marks(text, answer):
    assert reward.answer_of(text, {}) == answer
    for name in ("answer", "gsm8k", "math"):
        assert part(name, text, answer="18") == (answer == "18"), name


def test_a_gold_answer_without_a_number_is_no_silent_zero():
    scores = Scorer(load_rewards("gsm8k")).score(["18"], [{"answer": "#### 18 or 19"}])
    assert scores.failed == [True] and "ends in no number" in scores.first_failure


def test_gsm8k():
    gold = "He pays 2 * $600 = $<<2*600=1200>>1200.\n#### 1,200"
    assert part("gsm8k", "So it is $1200.00.", answer=gold) == 1
    assert part("gsm8k", "<think>1200</think>1201", answer=gold) == 0
    assert part("gsm8k", "<think>1200</think>", answer=gold) == 0
    assert part("gsm8k", "<think>1200", answer=gold) == 0
    assert part("gsm8k", "", answer="1") == 0
    assert part("gsm8k", "42", answer=42.0) == 1


@pytest.mark.parametrize(
    ("completion", "expected"),
    [
        ("<think>a</think>b", 1),
        ("\n<think>\na\n</think>\n\nb < 3 and c > 4\n", 1),
        ("<think>a</think><answer>b</answer>", 1),
        ("<think>a</think> <answer> </answer>", 0),
        ("<think>a</think><answer>b</answer><answer>c</answer>", 0),
        ("<think>a</think><answer>b</answer> c", 0),
        ("<think>a</think>the <b>answer</b>", 0),
        ("<think></think>b", 0),
        ("<think> \n</think>b", 0),
        ("<think>a</think>", 0),
        ("<think>a</think>\u200b\x00", 0),
        *((f"<think>a</think>{blank}", 0) for blank in ("\u200b", "\U000e0041")),
        *(
            (f"<think>a</think>{blank}", 0)
            for blank in ("<|im_end|>", "<|im_end|> <|endoftext|>", "<\uff5cend\uff5c>")
        ),
        ("<think><|im_end|></think>b", 0),
        ("<think>a</think>b<|im_end|>", 1),
        ("<think>a", 0),
        ("a</think>b", 0),
        ("b", 0),
        ("", 0),
        ("x<think>a</think>b", 0),
        ("<think><think>a</think>b", 0),
        ("<think>a</think></think>b", 0),
        ("<think>a</think>b<think>c</think>d", 0),
        ("<think>" * 3 + "</think>" * 3, 0),
        ("</think>b<think>a", 0),
    ],
)
def test_format(completion, expected):
    assert part("format", completion) == expected


@pytest.mark.parametrize(
    ("completion", "expected"),
    [
        ("<answer>(8 - 2) * 4 * 1</answer>", 1),
        ("<think>x</think> so <answer>4*(8-2)/1</answer> done", 1),
        ("<answer>(8-2)*4*1 = 24</answer>", 1),
        ("24 = (8-2)*4*1", 1),
        ("(8-2)*4*1 = **24**.", 1),
        ("so\n**(8-2)*4*1**", 1),
        ("`(8-2)*4*1`", 1),
        ("Answer: (8-2)*4*1", 1),
        ("**Final Answer:** `24 = (8-2)*4*1`", 1),
        ("**answer: (8-2)*4*1 = 24**", 1),
        ("(8-2)*4*1 = 25", 0),
        ("25 = (8-2)*4*1", 0),
        ("24 = (8-2)*4*1 = 24", 0),
        ("24 = 24", 0),
        ("x = (8-2)*4*1", 0),
        ("= (8-2)*4*1", 0),
        ("The answer: (8-2)*4*1", 0),
        ("(8-2)*answer:4*1", 0),
        ("Answer: (8-2)*4*1 or 24", 0),
        ("Answer: Answer: (8-2)*4*1", 0),
        ("**Answer:** __import__('os')", 0),
        ("<answer>(8-2)*4*1.</answer>", 1),
        ("<answer>(8\u22122)\u00d74\u00f71</answer>", 1),
        ("thus\n(8 - 2) * 4 * 1", 1),
        ("<answer>(8-2)\u22c54\u00b71</answer>", 1),
        ("<answer>8/(2*1)*4+8</answer>", 0),
        ("<answer>1/(2/8)*4</answer>", 0),  # 16
        ("<answer>(8-2)*4</answer>", 0),  # a number is missing
        ("<answer>(8-2)*4*1*1</answer>", 0),
        ("<answer>24</answer>", 0),
        ("<answer></answer>", 0),
        ("<answer>8-2*4*1</answer><answer>(8-2)*4*1</answer>", 1),  # the last one counts
        ("<answer>(8-2)*4*1</answer><answer>8-2*4*1</answer>", 0),
        ("<think><answer>(8-2)*4*1</answer></think>", 0),
        ("<answer>(8-2)*4*1", 0),
        ("use 8 2 4 1 as in <answer>(1 + 2) / 3</answer>", 0),  # the example of a prompt
        ("<answer>(8-2)*4*1/(1-1)</answer>", 0),
        ("<answer>8/(2-2)*4*1</answer>", 0),
        ("<answer>9**9**9</answer>", 0),
        ("<answer>8**2*4*1</answer>", 0),
        ("<answer>8//2*4+1</answer>", 0),
        ("<answer>8 2 4 1</answer>", 0),
        ("<answer>8(2)(4)(1)</answer>", 0),
        ("<answer>-(2-8)*4*1</answer>", 1),
        ("<answer>()*8*4*2*1</answer>", 0),
        ("<answer>(8-2)*4*1()</answer>", 0),
        ("<answer>+(8-2)*4*1</answer>", 1),
        ("<answer>__import__('os')</answer>", 0),
        ("<answer>" + "(" * 60 + "8-2" + ")" * 60 + "*4*1</answer>", 1),
        ("<answer>" + "-" * 380 + "8-2*4*1</answer>", 0),
        ("(" * 100_000, 0),
        ("<answer>" * 100_000, 0),
        ("<answer>(\uff18-2)*4*1</answer>", 0),
        ("<answer>(8-2)*4*1\x00</answer>", 0),
        ("<answer>(08-2)*4*1</answer>", 0),
    ],
)
def test_countdown(completion, expected):
    assert part("countdown", completion, numbers=[8, 4, 2, 1], target=24) == expected


def test_countdown_is_exact():
    row = dict(numbers=[1, 3, 3], target=1)
    assert part("countdown", "<answer>1/3*3</answer>", **row) == 1
    assert part("countdown", "<answer>3/3/1</answer>", **row) == 1
    assert part("countdown", "<answer>5 / 0</answer>", numbers=[5, 0], target=5) == 0
    assert part("countdown", "", numbers=[], target=0) == 0
    assert part("countdown", "1+2", numbers=["1", 2], target="3") == 1
    assert part("countdown", "24", numbers=[24], target=24) == 1
    assert part("countdown", "24 = 24", numbers=[24], target=24) == 1


def test_overlong():
    lengths = [1, 800, 801, 900, 999, 1000, 1100]
    parts = [
        part("overlong", "", completion_ids=[0] * n, max_completion_length=1000) for n in lengths
    ]
    assert parts == pytest.approx([0, 0, -1 / 200, -0.5, -199 / 200, -1, -1])
    assert part("overlong", "", completion_ids=[0], max_completion_length=1) == -1
    assert part("overlong", "", completion_ids=[], max_completion_length=1) == 0


def test_math_needs_no_signal():
    """math-verify's own time limits need SIGALRM, so the main thread: the worker's limit holds."""
    pytest.importorskip("math_verify")
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(reward.math_reward, "$\\frac{2}{4}$", dict(answer="0.5")).result() == 1


def test_math():
    pytest.importorskip("math_verify")
    assert part("math", "<think>x</think> $\\frac{2}{4}$", answer="\\frac{1}{2}") == 1
    assert part("math", "<think>x</think> \\boxed{0.5}", answer="$\\frac{1}{2}$") == 1
    assert part("math", "<think>\\boxed{0.5}</think>", answer="0.5") == 0
    assert part("math", "\\boxed{2}", answer="3") == 0
    assert part("math", "\\boxed{4,5}", answer="5") == 0
    for right in (
        "x=5",
        "2+3=5",
        "f(4)=5",
        "x_1 = 5",
        "x=2+3=5",
        "\\theta = 5",
        "P(X=2)=5",
        "|AB|=5",
        "5=5.0",
    ):
        assert part("math", f"\\boxed{{{right}}}", answer="5") == 1, right
    for gold in ("70", "70^\\circ"):
        assert part("math", "$\\angle ABC=70^\\circ$", answer=gold) == 1
    either = "x=1 \\text{ or } x=2"
    assert (
        part("math", f"\\boxed{{{either}}}", answer=either)
        == part("math", "$1, 2$", answer=either)
        == 1
    )
    assert (
        part("math", "\\boxed{y=2x+1}", answer="2x+1")
        == part("math", "\\boxed{y=2x+1}", answer="y=2x+1")
        == 1
    )
    with pytest.raises(ValueError, match="cannot parse"):
        part("math", "5", answer="")


PIECES = """<think> </think> <answer> </answer> #### \\boxed{ { } ( ) + - * / ** // = , . $ % \\ 0 7
    42 1,234 1e9 .5 \u0664 \x00 \ud800 \u202e \u2212 \u00d7 9**9 lambda [ ] ' " _ # \n""".split(" ")


TEXTS = st.one_of(st.text(max_size=60), st.lists(st.sampled_from(PIECES), max_size=30).map("".join))


ROW = dict(answer="42", numbers=[7, 42, 0], target=49, completion_length=5, max_completion_length=9)


@settings(max_examples=150, deadline=None, derandomize=True, database=None)
@given(
    text=TEXTS,
    prompt=st.sampled_from(["", PREFILLED]),
    gold=st.one_of(TEXTS, st.integers(), st.floats()),
)
def test_no_text_breaks_a_built_in(text, prompt, gold):
    row = ROW | {"prompt_text": prompt, "answer": gold}
    for name in ("answer", "gsm8k", "format", "countdown"):
        for completion in (text, "<think>a</think>" + text):
            try:
                assert reward.BUILT_IN[name].function(completion, row) in (0.0, 1.0)
            except ValueError as error:  # of the gold answer, never of the completion
                assert (
                    name == "gsm8k"
                    and final_number(str(gold)) is None
                    and "no number" in str(error)
                )


@settings(max_examples=100, deadline=None, derandomize=True, database=None)
@given(
    st.decimals(-(10**9), 10**9, places=2),
    st.booleans(),
    st.sampled_from(["{}", "#### {}", "\\boxed{{{}}}."]),
)
def test_numbers_come_back(number, commas, form):
    assert final_number(form.format(f"{number:,}" if commas else number)) == number


@settings(max_examples=100, deadline=None, derandomize=True, database=None)
@given(
    st.recursive(
        st.integers(0, 99), lambda s: st.tuples(s, st.sampled_from("+-*/"), s), max_leaves=8
    )
)
def test_expressions_agree_with_python(tree):
    numbers = []

    def build(node):
        if isinstance(node, int):
            numbers.append(node)
            return str(node), Fraction(node)
        (left, a), operator, (right, b) = build(node[0]), node[1], build(node[2])
        undefined = None in (a, b) or (operator == "/" and b == 0)
        value = None if undefined else OPERATORS[operator](a, b)
        return f"({left} {operator} {right})", value

    text, value = build(tree)
    row = dict(numbers=numbers, target=0 if value is None else value)
    assert part("countdown", f"<answer>{text}</answer>", **row) == (value is not None)
    row["target"] += 1
    assert part("countdown", f"<answer>{text}</answer>", **row) == 0


OPERATORS = {"+": add, "-": sub, "*": mul, "/": truediv}


@pytest.mark.parametrize(
    "text",
    [
        "9" * 100_000,
        "1," * 40_000,
        "1,234" * 20_000,
        ",111" * 25_000,
        "-" * 100_000,
        "$" * 100_000,
        "\\boxed{" * 15_000,
        "\\boxed{" + "{" * 100_000,
        "<think>" * 40_000,
        "</think>" * 40_000,
        "<answer>" * 40_000 + "</answer>" * 40_000,
        "<a" * 40_000,
        "<a" + " " * 100_000,
        "\u200b" * 100_000,
        "####" * 25_000,
        "." * 100_000,
        "\\," * 15_000,
        "\\boxed{" + "\\," * 40_000 + "1}",
        "#### 1" + " apple" * 20_000,
        "#### 1" + " 000" * 25_000,
        "1 000 " * 20_000,
        "1 " * 50_000,
        "1 - " * 30_000,
        "1\n" * 50_000,
        "= 1" * 40_000,
        "<|" * 50_000,
        "<|" + "|" * 100_000,
        "#### " + "$ " * 50_000,
        "#### 1" + "a" * 100_000,
        "x" * 100_000 + "=1",
        "#### 1 a" + ".," * 50_000 + "@",
        "#### " + "is: " * 30_000 + "1 @",
        "1 a" + " - " * 40_000 + "@",
        "1,\\ 000" * 20_000,
        "<<1" * 40_000,
        "<<" + "1" * 100_000,
        " 1." * 40_000,
        "1 or a" * 30_000,
        "1 " + "a b " * 40_000 + "?",
        "1" + "!" * 100_000,
        "1" + " " * 100_000 + "?",
        "}{" * 50_000,
        "#### 1 = " * 20_000,
        "\\boxed{" + "1 = " * 30_000 + "}",
        "\\boxed{" * 15_000 + "1" + "}" * 15_000,
        "\\fbox {" * 15_000 + "1 a b }",
        "answer" + "*" * 100_000,
        "*" * 100_000 + "answer",
        "24 = " * 30_000,
    ],
    ids=range(49),
)
def test_long_texts_take_linear_time(text):
    def seconds(call):
        start = time.process_time()
        call()
        return time.process_time() - start

    def score():
        for name in ("answer", "gsm8k", "format", "countdown"):
            for completion in (text, "<think>a</think>" + text):
                assert reward.BUILT_IN[name].function(completion, ROW) in (
                    [0, 1] if name == "format" else [0]
                )

    # of this machine: 0.02 to 0.05 s; quadratic takes minutes
    yardstick = max(seconds(lambda: [i for i in range(10**6)]) for _ in range(3))
    assert seconds(score) < 150 * yardstick
