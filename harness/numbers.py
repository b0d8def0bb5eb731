"""Numbers in free text: which number does a completion give as its answer?

Completions are untrusted: the model is rewarded for any loophole it finds. So a number counts only
if no word or sign beside it changes its value. Only ASCII digits count, and reading takes linear
time.
"""

import re
from decimal import Decimal
from fractions import Fraction

# Dashes become -, dots and crosses *, the division sign / and "approximately" =.
SIGNS = str.maketrans(
    "\u2010\u2011\u2012\u2013\u2014\u2212\xd7\xb7\u22c5\u2217\xf7\u2248", "------****/="
)

# At most 1,000 digits: Python's conversion to an integer takes quadratic time.
NUMBER = r"""
    [-+]? [ ]?                                   # -7, - 7
    (?: (?: [0-9]{1,3} (?: ,[0-9]{3} ){1,300}    # 1,042
          | [0-9]{1,1000} )                      # 1042
        (?: \.[0-9]{0,1000} )?                   # 1042.50
      | \.[0-9]{1,1000} )                        # .5
"""
WHOLE_NUMBER = re.compile(NUMBER, re.VERBOSE)
LAST_NUMBER = re.compile(rf"(?: ^ | (?<=[ =]) ) ({NUMBER}) ([^0-9]*) $", re.VERBOSE)

BOXED = re.compile(r"\\boxed\{((?:[^{}]|\{[^{}]*\})*)\}")  # \boxed{18 \text{ eggs}}
THOUSANDS = re.compile(  # 1{,}042 and 1\,042 and 1,\!042 and a narrow space
    r"(?<=[0-9]) (?: \{,\} | ,?\\[!,;:\ ] | [~\xa0\u2009\u202f] ) (?=[0-9]{3})", re.VERBOSE
)
MARKUP = re.compile(
    r"""
    \^\{?\\circ                                                      # 18^\circ
  | \\(?: text|math|boxed|left|right )[a-z]{0,2}(?![a-z])            # \text{18}, \mathbf{18}
  | \\[^A-Za-z]                                                      # \$18, 18\%, \(18\)
  | (?<=[A-Za-z])\^\{?[23]                                           # 18 m^2
  | [][*_`"(){}~#%\xb0\xa2$\u20ac\xa3\xa5\u20b9]                     # **18**, $18
    """,
    re.VERBOSE,
)

CHANGED_BY_TEXT_BEFORE = re.compile(
    r"""(?:
    \b(?: not|than|minus )             # not 18, more than 18, minus 18
  | n't                                # it isn't 18
  | [0-9][^ :=]*                       # 10 - 18, 5 * 18 and 17, 18
  | [0-9][^ ]*[ ](?: and|or|to )       # 17 or 18
  | [-+/^<>]                           # x / 18
  | \\[a-z]+                           # \pi 18
    )$""",
    re.VERBOSE,
)
CHANGED_BY_SIGN_AFTER = re.compile(r"[ ]?[+^!?\xb2\xb3]|-(?![A-Za-z])")  # 18^2, 18!, 18-, 18 + x
NUMBER_WORDS = set(
    "and or not but is are to plus minus point pi squared cubed factorial half halves dozen "
    "hundred thousand million millions billion billions trillion trillions grand lakh crore mil bn "
    "third thirds fourth fourths fifth fifths sixth sixths eighth eighths tenth tenths "
    "hundredth hundredths thousandth thousandths".split()
)
UNIT_LETTERS = set("aAmglLsShHdWVNJCFtpo")  # 18 m, 5 p.m., 5 o'clock; others are factors: 18x, 5k
FOREIGN_LETTER = re.compile(r"[^\WA-Za-z\xb5\xb2\xb3\xc0-\u024f\u03bc\u03a9]")  # 18\u4e07, 18\u03c0


def as_text(value) -> str:
    """The text of a value in a data row. Floats are written out: 5e-05 becomes 0.00005."""
    if isinstance(value, float):
        return format(Decimal(str(value)), "f")
    return str(value).strip()


def read_number(text: str) -> Fraction | None:
    """The value of a text that is one number and nothing else, as 1,042 or -3.50."""
    text = text.translate(SIGNS)
    if not WHOLE_NUMBER.fullmatch(text):
        return None
    return Fraction(re.sub("[, ]", "", text))


def final_number(text: str) -> Fraction | None:
    r"""The number that a text gives as its answer; None if the text around the number changes it.

    If marked (the line after the last `####`, else the last `\boxed{}`), the answer must be the
    only number there. Without a mark the last number of the text is the answer.
    """
    marked = marked_answer(text)
    if marked is None:
        line = without_markup(re.sub("[!?]", ".", text))
    else:
        line = without_markup(marked)
    match = LAST_NUMBER.search(line)
    if match is None:
        return None
    number, after = match.groups()
    before = line[: match.start()].rstrip()

    if marked is not None and re.search("[0-9]", before):
        return None
    if CHANGED_BY_TEXT_BEFORE.search(before[-40:]):  # only its end: the search is quadratic
        return None
    if CHANGED_BY_SIGN_AFTER.match(after):
        return None

    if marked is None:  # the sentence goes on: only the next word can be a unit
        after = re.match(r" ?[-/]?\w*", after)[0]
    if any(changes_a_number(word) for word in re.findall(r"\w+", after)):
        return None
    return read_number(number)


def marked_answer(text: str) -> str | None:
    r"""The line after the last `####`, else the inside of the last `\boxed{}`, else None."""
    _, mark, after = text.rpartition("####")
    if mark:
        return after.strip().partition("\n")[0]
    if "\\boxed{" not in text:
        return None
    boxed = BOXED.match(text, text.rindex("\\boxed{"))
    if boxed is None:  # the box is never closed
        return ""
    return boxed[1]


def without_markup(text: str) -> str:
    """The text in plain ASCII signs, without LaTeX, Markdown, currencies and double spaces."""
    text = THOUSANDS.sub(",", text.translate(SIGNS))
    return " ".join(MARKUP.sub(" ", text).split())


def changes_a_number(word: str) -> bool:
    """Tells if "5 word" is another number than 5, as in 5 million, 5x and 5k."""
    if word.lower() in NUMBER_WORDS:
        return True
    if re.fullmatch("[A-Za-z]", word):
        return word not in UNIT_LETTERS
    return FOREIGN_LETTER.search(word) is not None
