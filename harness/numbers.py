"""Numbers in free text: which number does a completion give as its answer?

Completions are untrusted: the model is rewarded for any loophole it finds. So a number counts only
if no word or sign beside it changes its value. Only ASCII digits count, and reading takes linear
time.
"""

import re
from decimal import Decimal
from fractions import Fraction

# Dashes become -, dots and crosses *, the division sign /, "approximately" = and the signs for
# "at least", "at most" and "not equal" <. Chinese punctuation becomes English punctuation.
SIGNS = dict(
    zip(
        "\u2010\u2011\u2012\u2013\u2014\u2212\xd7\xb7\u22c5\u2217\xf7\u2248"
        "\u2264\u2265\u2260\uff1a\uff0c\u3002",
        "------****/=<<<:,.",
        strict=True,
    )
)
SIGN = re.compile("[" + "".join(SIGNS) + "]")

# At most 1,000 digits: Python's conversion to an integer takes quadratic time.
NUMBER = r"""
    (?: -[ ]? | \+ )?                            # -7, - 7, +7
    (?: (?: [0-9]{1,3} (?: ,[0-9]{3} ){1,300}    # 1,042
          | [0-9]{1,1000} )                      # 1042
        (?: \.[0-9]{0,1000} )?                   # 1042.50
      | \.[0-9]{1,1000} )                        # .5
"""
WHOLE_NUMBER = re.compile(NUMBER, re.VERBOSE)
LAST_NUMBER = re.compile(
    rf"""
    (?: ^ | (?<=[\s=\u3040-\u9fff]) | (?<=[^0-9]:) )  # x=18, answer:18, but no 10:18
    ({NUMBER}) (?<!\.) ([^0-9]*) $
    """,
    re.VERBOSE,
)

BOX = re.compile(r"\\f?box(?:ed)?[ ]?\{")
INSIDE_BOX = re.compile(r"((?:[^{}]|\{[^{}]*\})*)\}(.*)", re.DOTALL)  # 18 \text{ eggs}}
THOUSANDS = re.compile(  # 1{,}042 and 1\,042 and 1,\!042 and 1 042
    r"(?<=[0-9]) (?: \{,\} | ,?\\[!,;:\ ] | [~\ \xa0\u2009\u202f] ) (?=[0-9]{3})", re.VERBOSE
)
MARKUP = re.compile(
    r"""
    <<[^<>]*>>                                                       # <<9*2=18>>18
  | \^\{?\\circ                                                      # 18^\circ
  | \\(?: text|math|boxed|left|right|begin|end|quad|d?frac )[a-z]{0,2}(?![a-z])  # \text{18}
  | \\[^A-Za-z]                                                      # \$18, 18\%, \(18\)
  | (?<=[A-Za-z])\}?\^\{?[23]                                        # 18 \text{ m}^2
  | (?<=[0-9]):00(?![:0-9])                                          # 5:00
  | [][*_`"(){}~#%\xb0\xa2$\u20ac\xa3\xa5\u20b9]                     # **18**, $18
    """,
    re.VERBOSE,
)

CHANGED_BY_TEXT_BEFORE = re.compile(
    r"""(?:
    (?: [0-9][^ :=\n]*                                  # 10 - 18, 5 * 18 and 17, 18
      | \b(?: half|third|quarter|root|out|twice|double|triple|times|plus|minus )
    ) (?: [ ](?: out|of|the ) )*                        # half of 18, 5 out of 18
  | [0-9][^.,:;=\n]*,?[ ](?: and|to|or([ ]\w+)? )       # 2 hours and 18, 17 or maybe 18
  | (?: n't | \b(?: not|never|cannot|might|maybe|perhaps ) ) (?: [ ][a-z]+ ){0,2}
  | \b(?: than([ ]or[ ]equal[ ]to)?|least|most|every|per|(divided|multiplied)[ ]by )
  | (?<![\w'])[b-hj-z]                                  # x - 18
  | (?: [-+/^<] | (?<![=-])> | [<>!]= ) \s*             # x / 18, x != 18, but => 18
  | \\(?! approx|implies|therefore|rightarrow )[a-z]+   # \pi 18
    )[ ]*\Z""",
    re.VERBOSE,
)
CHANGED_BY_TEXT_AFTER = re.compile(
    r"""
    [ ]? (?: [+^] | \\[a-z] )                           # 18^2, 18 + x, 18 \pi
  | ! | -(?![A-Za-z])                                   # 18!, 18-
  | [^\w\n]{0,4}[0-9]                                   # \boxed{18} / 2
  | [^.!\n]*\?                                          # Is it 18?
  | [ .]? [\d\xb2\xb3\xbc-\xbe\u5341\u767e\u5343\u4e07\u842c\u4ebf\u5104\u5146]  # 18\u4e07
  | [ ]?[/-]?[ ]? (?:
        (?![aAmglLsShHdWVNJCFtpoI])[A-Za-z]             # 18x, 5k, but 18 m, 5 p.m., 5 o'clock
      | and|but|to|plus|minus|point|pi|\u03c0|squared|cubed|factorial
      | millions|billions|trillions?|grand|lakh|crore|mil|bn
      | half|halves
      | (?: third|fourth|fifth|sixth|eighth|tenth|hundredth|thousandth )s?
    )\b
  | (?: [ ]\w+ ){0,2} [ ](?: or|not|wrong|incorrect )\b   # 18 or more, 18 is wrong
    """,
    re.VERBOSE,
)
SCALES = {"dozen": 12, "hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9}


def as_text(value) -> str:
    """The text of a value in a data row. Floats are written out: 5e-05 becomes 0.00005."""
    if isinstance(value, float):
        return format(Decimal(str(value)), "f")
    return str(value).strip()


def plain_signs(text: str) -> str:
    """The text with SIGNS replaced: twelve times as fast as str.translate for long texts."""
    return SIGN.sub(lambda match: SIGNS[match[0]], text)


def read_number(text: str) -> Fraction | None:
    """The value of a text that is one number and nothing else, as 1,042 or -3.50."""
    text = plain_signs(text)
    if not WHOLE_NUMBER.fullmatch(text):
        return None
    return Fraction(re.sub("[, ]", "", text))


def final_number(text: str) -> Fraction | None:
    r"""The number that a text gives as its answer; None if the text around the number changes it.

    The answer is the only number in the last `\boxed{}`, or in a line that follows the last `####`
    and starts with a number. Without such a mark the last number of the text is the answer.
    """
    text = re.sub(r"(?<!!)!(?=\s|$)", ".", text)  # an exclamation, not a factorial
    _, mark, text = text.rpartition("####")
    line = text.strip().partition("\n")[0]
    before, box, rest = BOX.sub(r"\\boxed{", text).rpartition(r"\boxed{")
    if box:
        closed = INSIDE_BOX.match(rest)
        if closed is None:
            return None
        return only_number(before, *closed.groups())
    if mark and re.match("[^0-9A-Za-z]*[0-9]", line):  # else the mark may start a heading
        return only_number("", line, "")
    return last_number("", without_markup(text), "")


def only_number(before: str, answer: str, after: str) -> Fraction | None:
    """The number of a marked answer: its only one, or the result of a calculation."""
    answer = without_markup(answer)
    calculation, _, result = answer.rpartition("=")
    if re.search(r"[0-9] ?([-+/ ]|\\times|\\cdot) ?[0-9]", calculation):  # 9 * 2 = 18
        answer = result
    if re.search("[0-9][,.]?[^0-9,.][^0-9]*[0-9]", answer):
        return None
    return last_number(without_markup(before), answer, without_markup(after))


def last_number(before: str, answer: str, after: str) -> Fraction | None:
    """The last number of an answer; None if the text before or after the number changes it."""
    match = LAST_NUMBER.search(answer)
    if match is None:
        return None
    number, end = match.groups()
    before = before + " " + answer[: match.start()]
    after = end + after
    # Only the end of the text before: the search takes quadratic time.
    if CHANGED_BY_TEXT_BEFORE.search(before[-60:]) or CHANGED_BY_TEXT_AFTER.match(after):
        return None
    word = re.match("[ -]?([a-z]*)", after)[1]
    return read_number(number) * SCALES.get(word, 1)


def without_markup(text: str) -> str:
    """The text in plain ASCII signs, without LaTeX, Markdown, currencies and double spaces."""
    text = THOUSANDS.sub(",", plain_signs(text))
    text = MARKUP.sub(" ", text.replace("}{", "/"))  # {1}{18} is a fraction
    return "\n".join(" ".join(line.split()) for line in text.split("\n"))
