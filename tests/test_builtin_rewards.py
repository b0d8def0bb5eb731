"""TODO."""

import time
from decimal import Decimal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import reward
from reward import Scorer, load_rewards
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


def test_think_prefilled_by_the_chat_template():
    for name in ("answer", "gsm8k"):
        assert part(name, "a</think>42", PREFILLED, answer="42") == 1
        assert part(name, "42", PREFILLED, answer="42") == 0
        assert part(name, "42", "<think>\n\n</think>\n\n", answer="42") == 1
    assert part("format", "a</think>42", PREFILLED) == 1
    assert part("format", "a</think>42") == 0
    assert part("format", "<think>a</think>42", PREFILLED) == 0


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The answer is 42", "42"),
        ("The answer is 42.", "42"),
        ("42.0", "42"),
        ("1 + 2 = 3 apples", "3"),
        ("1,234", "1234"),
        ("so 1,234,567.50.", "1234567.5"),
        ("1,2345", None),
        ("1, 2, 3", "3"),
        ("$5", "5"),
        ("-$5", "-5"),
        ("$-5", "-5"),
        ("\\$1,000.25", "1000.25"),
        ("$42$", "42"),
        ("50%", "50"),
        ("50\\%", "50"),
        ("+7", "7"),
        ("-7", "-7"),
        ("\u22127", "-7"),
        ("x = -7", "-7"),
        ("(-7)", "-7"),
        ("10-7", None),  # a difference, not a sign
        ("10 - 7", None),
        ("x-7", None),
        ("x=-7", "-7"),
        ("it is - 7", "-7"),
        ("1/2", None),
        ("10:45.", None),
        ("5 million people", None),
        ("18^2", None),
        ("18 - 5 = 13!", "13"),
        ("1 234", "1234"),
        ("$\\frac{1}{2}$", None),
        (".5", "0.5"),
        ("3.14.15", None),
        ("1e3", None),
        ("007", "7"),
        ("#### 42", "42"),
        ("#### 1\n#### $1,042.", "1042"),
        ("#### -42 (that is 6 * 7)", None),
        ("##### 42", "42"),
        ("7 #### none", None),
        ("#### 5 \\boxed{6}", None),
        ("\\boxed{41} \\boxed{42} and 7", "42"),
        ("\\boxed{ 42. }", "42"),
        ("$\\boxed{$42$}$", "42"),
        ("\\boxed{\\$1,000}", "1000"),
        ("\\boxed{1{,}000}", "1000"),
        ("\\boxed{1\\,000}", "1000"),
        ("\\boxed{42\\%}", "42"),
        ("\\boxed{-4.20}", "-4.2"),
        ("\\boxed{x = 42}", None),
        ("\\boxed{\\text{42}}", "42"),
        ("\\boxed{42", None),
        ("\\boxed{}", None),
        ("\\boxed{\\boxed{42}}", "42"),
        ("7 \\boxed 8", "8"),
        ("", None),
        ("none", None),
        ("\u0664\u0662 or \uff14\uff12", None),
        ("9" * 1001, None),
        ("0" * 1000 + "1", None),
        ("9" * 1000, "9" * 1000),
        ("4\x002", None),
        ("\u202e42\u202c \ud800", None),  # shown as 24
        ("42 \ud800", "42"),
    ],
)
def test_final_number(text, expected):
    assert reward.final_number(text) == (None if expected is None else Decimal(expected))


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        *((line, None) for line in ("", "none", "1/2", "1 1/2", "10:45", "5e3", "5E3", "5 e3", "18 or 19", "18-5")),
        *((line, None) for line in ("18 - 5", "18^2", "18**2", "18\u00b2", "1 00", "1 0000", "1,00", "1.234,5", "1_8")),
        *((line, None) for line in ("5 million", "5 billions", "5 Thousand", "5 hundredths", "5k", "5 K", "5M", "5bn")),
        *((line, None) for line in ("5 dozen", "3 quarters", "2 halves", "2 squared", "5 point five", "5 plus two")),
        *((line, None) for line in ("18x", "18 x 2", "18 i", "2 pi", "2\\pi", "18 18", "18, 19", "4=18", "x = 18")),
        *(
            (line, None)
            for line in ("--18", "-$-18", "+-18", "18-", "1\u200b8", "\u0661\u0668", "\uff11\uff18", "0x18")
        ),
        *(
            (line, None)
            for line in ("18 is wrong", "not 18", "18?", "18\u4e07", "5 factorial", "18 m/2", "18 apples 2")
        ),
        *((line, None) for line in ("$\\frac{18}{1}$", "18_8", "18 and 19", "\n18", "18 to 19", "18 to nineteen")),
        *((line, "18") for line in ("18", " 18.", "18.0", "+18", "**18**", "`18`", "(18)", "[18]", "$18$", "\\(18\\)")),
        *(
            (line, "18")
            for line in ("$18", "\\$18", "\u20ac18", "\u00a3 18", "18 \u20ac", "18$", "US$18", "USD 18", "Rs. 18")
        ),
        *(
            (line, "18")
            for line in ("18%", "18 \\%", "18 percent", "18\u00b0", "18 \u00b0C", "18^\\circ", "18^{\\circ}C")
        ),
        *(
            (line, "18")
            for line in ("18 dollars", "18 dollars per day", "18 km/h", "18km", "18 m^2", "18 cm\u00b2", "18 m")
        ),
        *((line, "18") for line in ("18 \\text{ dollars}", "\\mathbf{18}", "\\boxed{18}", "18</answer>", "18\nand 19")),
        *(
            (line, "18")
            for line in ("18\\,\\mathrm{km/h}", "$\\$18$", "18 apples a day.", "18\r\n", "{18}", "\\text{18 cups}")
        ),
        *(
            (line, "-18")
            for line in ("-18", "- 18", "\u201318", "\uff0d18", "\u221218", "\u2013 18", "-$18", "$-18", "- $ 18")
        ),
        *(
            (line, "1234567")
            for line in ("1,234,567", "1 234 567", "1\u00a0234\u202f567", "1\\;234\\,567", "1,\\!234{,}567")
        ),
        ("1 000 000", "1000000"),
        ("-1000000000000000000000000000000001", "-1000000000000000000000000000000001"),
    ],
)
def test_one_rule_after_the_marks(line, expected):
    expected = None if expected is None else Decimal(expected)
    assert reward.final_number("5 or 6\n#### " + line) == expected
    if "\n" not in line and "answer" not in line:
        assert reward.final_number("so \\boxed{" + line + "}") == expected


def test_a_gold_answer_without_a_number_is_no_silent_zero():
    scores = Scorer(load_rewards("gsm8k")).score(["18"], [{"answer": "#### 18 or 19"}])
    assert scores.failed == [True] and "ends on no number" in scores.first_failure


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
        *(
            (f"<think>a</think>{blank}", 0)
            for blank in ("\u3164", "\u2800", "\u034f", "\ufe0f", "\U000e0041", "\u0301")
        ),
        *((f"<think>a</think>{blank}", 0) for blank in ("<|im_end|>", "<|im_end|> <|endoftext|>", "<\uff5cend\uff5c>")),
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
        ("<answer>(8-2)*4*1 = 24.0</answer>", 1),
        ("<answer>(8\u22122)\u00d74\u00f71</answer>", 1),
        ("thus\n(8 - 2) * 4 * 1", 1),
        *(
            (f"<answer>{e}</answer>", 1)
            for e in ("$(8-2)*4*1$", "(8-2)x4 x 1", "(8-2)X4*1", "[(8-2)*4]*1", "\\[(8-2)*4*1\\]")
        ),
        *(
            (f"<answer>{e}</answer>", 1)
            for e in (r"(8-2)\times 4\cdot1", r"\left(8-2\right)\times4\div 1", "(8-2)\u22c54\u00b71")
        ),
        *(
            (f"<answer>{e}</answer>", 1)
            for e in (r"$(8-2)\times 4\times 1 = 24$", r"\boxed{(8-2)*4*1} = 24.", r"\((8-2)*4*1\)")
        ),
        *(
            (f"<answer>{e}</answer>", 0)
            for e in ("(8-2)*4*1 = 24 or 25", "(8-2)*4*1 = 2 4", "(8-2)\\xtimes4*1", "(8-2]*4*")
        ),
        ("so\n$(8-2)*4*1 = 24$", 1),
        ("<answer>8/(2*1)*4+8</answer>", 0),
        ("<answer>1/(2/8)*4</answer>", 0),  # 16
        ("<answer>(8-2)*4*1 = 25</answer>", 0),
        ("<answer>(8-2)*4*1 = 24 = 24</answer>", 0),
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
        ("<answer>-(2-8)*4*1</answer>", 0),  # no unary minus
        ("<answer>__import__('os')</answer>", 0),
        ("<answer>" + "(" * 60 + "8-2" + ")" * 60 + "*4*1</answer>", 0),
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
    assert part("countdown", "1+2", numbers=[1.5, 2], target=3) == 0
    assert part("countdown", "1+2", numbers=["1", 2.0], target="3") == 1


def test_overlong():
    lengths = [1, 800, 801, 900, 999, 1000, 1100]
    parts = [part("overlong", "", completion_length=n, max_completion_length=1000) for n in lengths]
    assert parts == pytest.approx([0, 0, -1 / 200, -0.5, -199 / 200, -1, -1])
    assert part("overlong", "", completion_length=1, max_completion_length=1) == -1
    assert part("overlong", "", completion_length=0, max_completion_length=1) == 0


def test_math():
    pytest.importorskip("math_verify")
    assert part("math", "<think>x</think> $\\frac{2}{4}$", answer="\\frac{1}{2}") == 1
    assert part("math", "<think>x</think> \\boxed{0.5}", answer="$\\frac{1}{2}$") == 1
    assert part("math", "<think>\\boxed{0.5}</think>", answer="0.5") == 0
    assert part("math", "\\boxed{2}", answer="3") == 0
    for wrong in (
        "4=5",
        "4=4=5",
        "x=4=5",
        "4=x=5",
        "x^2=5",
        "2x=5",
        "4\\equiv 5",
        "\\neq 5",
        "4 \\to 5",
        "4==5",
        "4 = 5\\text{ cm}",
    ):
        assert part("math", f"\\boxed{{{wrong}}}", answer="5") == 0, wrong
    for right in ("x=5", "2+3=5", "f(4)=5", "x_1 = 5", "x=2+3=5", "\\theta = 5"):
        assert part("math", f"\\boxed{{{right}}}", answer="5") == 1, right
    assert part("math", "\\boxed{4=5}", answer="4=5") == 1
    assert part("math", "\\boxed{y=2x+1}", answer="2x+1") == part("math", "\\boxed{y=2x+1}", answer="y=2x+1") == 1


PIECES = """<think> </think> <answer> </answer> #### \\boxed{ { } ( ) + - * / ** // = , . $ % \\ 0 7 42 1,234
    1e9 .5 \u0664 \x00 \ud800 \u202e \u2212 \u00d7 9**9 lambda [ ] ' " _ # \n""".split(" ")


TEXTS = st.one_of(st.text(max_size=60), st.lists(st.sampled_from(PIECES), max_size=30).map("".join))


ROW = dict(answer="42", numbers=[7, 42, 0], target=49, completion_length=5, max_completion_length=9)


@settings(max_examples=150, deadline=None, derandomize=True, database=None)
@given(text=TEXTS, prompt=st.sampled_from(["", PREFILLED]), gold=st.one_of(TEXTS, st.integers(), st.floats()))
def test_no_text_breaks_a_built_in(text, prompt, gold):
    row = ROW | {"prompt_text": prompt, "answer": gold}
    for name in ("answer", "gsm8k", "format", "countdown"):
        for completion in (text, "<think>a</think>" + text):
            try:
                assert reward.BUILT_IN[name].function(completion, row) in (0.0, 1.0)
            except ValueError as error:  # of the gold answer, never of the completion
                assert name == "gsm8k" and reward.final_number(str(gold)) is None and "no number" in str(error)


@settings(max_examples=100, deadline=None, derandomize=True, database=None)
@given(
    st.decimals(-(10**9), 10**9, places=2),
    st.booleans(),
    st.sampled_from(["{}", "#### {}", "\\boxed{{{}}}."]),
)
def test_numbers_come_back(number, commas, form):
    assert reward.final_number(form.format(f"{number:,}" if commas else number)) == number


@settings(max_examples=100, deadline=None, derandomize=True, database=None)
@given(st.recursive(st.integers(0, 99), lambda s: st.tuples(s, st.sampled_from("+-*/"), s), max_leaves=8))
def test_expressions_agree_with_python(tree):
    numbers = []

    def build(node):
        if isinstance(node, int):
            numbers.append(node)
            return str(node), reward.Fraction(node)
        (left, a), operator, (right, b) = build(node[0]), node[1], build(node[2])
        undefined = None in (a, b) or (operator == "/" and b == 0)
        value = None if undefined else reward.OPERATORS[OP[operator]](a, b)
        return f"({left} {operator} {right})", value

    text, value = build(tree)
    row = dict(numbers=numbers, target=0 if value is None else value)
    assert part("countdown", f"<answer>{text}</answer>", **row) == (value is not None)
    row["target"] += 1
    assert part("countdown", f"<answer>{text}</answer>", **row) == 0


OP = {"+": reward.ast.Add, "-": reward.ast.Sub, "*": reward.ast.Mult, "/": reward.ast.Div}


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
    ],
    ids=range(30),
)
def test_long_texts_take_linear_time(text):
    def seconds(call):
        start = time.process_time()
        call()
        return time.process_time() - start

    def score():
        for name in ("answer", "gsm8k", "format", "countdown"):
            for completion in (text, "<think>a</think>" + text):
                assert reward.BUILT_IN[name].function(completion, ROW) in ([0, 1] if name == "format" else [0])

    yardstick = seconds(lambda: [i for i in range(10**6)])  # of this machine: 0.02 to 0.05 s; quadratic takes minutes
    assert seconds(score) < 150 * yardstick
