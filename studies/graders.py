"""What does each grader pay?   python studies/graders.py FOLDER

The same 60 answers, each with the right one, are judged by 31 graders of 16 packages, and so are 12
wrong answers that name the right one. Each package is installed from PyPI in the version that
stands below, into a folder of its own in FOLDER (3 minutes, 0.9 GB; what is there is not installed
again), without its dependencies but for those that its graders need. Its graders run in
a process that sees this folder and Python's own modules only.

A grader gets the whole completion. If it takes an answer that is cut out already, its package's own
function cuts it out; the three that have none get what stands in the last box. lm-eval's filters
for GSM8K stand in a YAML file, and are written out here.

--quick: does reward.py pay what the published table says? Without any package.
"""

import importlib
import importlib.abc
import importlib.machinery
import json
import logging
import os
import platform
import re
import string
import subprocess
import sys
import time
import types
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import MagicMock

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(HERE)
MATH_VERIFY = "math-verify==0.9.0 latex2sympy2_extended==1.11.0 sympy==1.14.0 mpmath==1.3.0"
NEEDS = f"{MATH_VERIFY} antlr4-python3-runtime==4.13.2"
LATEX = f"{NEEDS} pylatexenc==2.10"
PYDANTIC = "pydantic==2.12.5 pydantic-core==2.41.5 annotated-types==0.7.0"
PYDANTIC += " typing-extensions==4.15.0 typing-inspection==0.4.2"
PACKAGES = {  # name of its folder: what is installed there
    "here": NEEDS,
    "trl": f"trl==1.16.0 {NEEDS}",
    "math-verify": NEEDS,
    "verifiers": f"verifiers==0.4.0 {NEEDS}",
    "ms-swift": f"ms-swift==4.6.0 {NEEDS}",
    "opencompass": f"opencompass==0.5.4 {NEEDS}",
    "areal": f"areal==1.0.4 {NEEDS}",
    "verl": f"verl==0.9.1 {NEEDS}",
    "tinker-cookbook": f"tinker-cookbook==0.6.1 {LATEX}",
    "mathruler": f"mathruler==0.1.0 {LATEX}",
    "openrlhf": f"openrlhf==0.11.2 {LATEX}",
    "gem-llm": f"gem-llm==0.1.0 {LATEX}",
    "evalscope": f"evalscope==1.14.1 {NEEDS} {PYDANTIC}",
    "inspect-evals": f"inspect-evals==0.26.0 {NEEDS}",
    "helm": f"crfm-helm==0.5.16 {NEEDS}",
    "lm-eval": f"lm-eval==0.4.13 {MATH_VERIFY} antlr4-python3-runtime==4.11.0",
    "lighteval": f"lighteval==0.13.0 {NEEDS} numpy==2.2.6 packaging==25.0".replace("1.11", "1.0.6"),
}
# What a grader's file imports and the grader does not use: these are stand-ins.
STAND_INS = """areal.utils datasets evalscope.api helm.benchmark.presentation helm.common
helm.benchmark.scenarios.scenario inspect_ai inspect_evals.utils lighteval.metrics.metrics_corpus
lighteval.metrics.metrics_sample lighteval.metrics.normalizations opencompass.openicl
opencompass.registry pytablewriter swift.infer_engine torch tqdm transformers trl.import_utils
verifiers.v1.errors"""

# gold, completion, and is it right? y: most people would pay it, n: wrong, ?: a matter of taste
PAIRS = r"""
72 ; The answer is \boxed{72}. ; y
72 ; The answer is $72$. ; y
72 ; The answer is 72. ; y
72 ; #### 72 ; y
72 ; So she sold 48+24 = 72 clips.\n#### 72 ; y
72 ; \boxed{72.0} ; y
72 ; \boxed{72.} ; y
72 ; \boxed{\text{72 clips}} ; y
72 ; \boxed{72\text{ clips}} ; y
72 ; \boxed{x=72} ; y
72 ; First \boxed{70}, which is wrong. So \boxed{72}. ; y
72 ; First \boxed{72}, which is wrong. So \boxed{70}. ; n
72 ; \boxed{70\text{ or }72} ; n
72 ; **72** ; y
72 ; The answer is 72 because 6*12 = 72 and 72 is more than 70. ; y
1000 ; \boxed{1,000} ; y
1000 ; \boxed{1{,}000} ; y
1000 ; \boxed{1\,000} ; y
1000 ; \boxed{10^3} ; y
18 ; \boxed{\$18} ; y
18 ; \boxed{\$18.00} ; y
\$18 ; \boxed{18} ; y
18 ; #### $18 ; y
25\% ; \boxed{25} ; ?
25\% ; \boxed{0.25} ; ?
25 ; \boxed{25\%} ; y
0.25 ; \boxed{25\%} ; y
\frac{1}{2} ; \boxed{0.5} ; y
\frac{1}{2} ; \boxed{\frac12} ; y
\frac{1}{2} ; \boxed{1/2} ; y
\frac{1}{2} ; \boxed{\dfrac{1}{2}} ; y
\frac{1}{2} ; \boxed{\frac{2}{4}} ; ?
\frac{1}{3} ; \boxed{0.333} ; ?
\frac{3}{2} ; \boxed{1\frac{1}{2}} ; y
1\frac{1}{2} ; \boxed{1.5} ; y
2\sqrt{2} ; \boxed{2\sqrt2} ; y
2\sqrt{2} ; \boxed{\sqrt{8}} ; y
2\sqrt{2} ; \boxed{2.828} ; ?
3\pi ; \boxed{9.42} ; ?
(1,2) ; \boxed{(1, 2)} ; y
(1,2) ; \boxed{(2,1)} ; n
1,2 ; \boxed{2,1} ; y
1,2 ; \boxed{x=1\text{ or }x=2} ; y
1,2 ; \boxed{1}, \boxed{2} ; y
\{1,2\} ; \boxed{\{2,1\}} ; y
[0,1) ; \boxed{[0,1)} ; y
[0,1) ; \boxed{[0,1]} ; n
[0,1) ; \boxed{0\le x<1} ; y
x>3 ; \boxed{(3,\infty)} ; y
(3,\infty) ; \boxed{x>3} ; y
y=2x+1 ; \boxed{2x+1} ; y
2x+1 ; \boxed{y=2x+1} ; y
x^2-1 ; \boxed{(x-1)(x+1)} ; y
\begin{pmatrix}1\\2\end{pmatrix} ; \boxed{\begin{bmatrix}1\\2\end{bmatrix}} ; y
90^\circ ; \boxed{90} ; y
5\text{ cm} ; \boxed{5\text{ m}} ; n
\text{(B)} ; \boxed{B} ; y
\text{Evelyn} ; \boxed{Evelyn} ; y
3:2 ; \boxed{3:2} ; y
101_2 ; \boxed{101_2} ; y
"""
NAMING = r"""
72 ; There are 72 ways to go on, but I do not know which is right. ; n
72 ; The answer is not 72. ; n
72 ; I tried 70 and 72. ; n
72 ; \boxed{70}. It is not 72. ; n
72 ; \boxed{70}, \boxed{72} ; n
72 ; \boxed{72}, \boxed{70} ; n
72 ; \boxed{70,72} ; n
72 ; 72 is too large, so \boxed{} ; n
72 ; 6*12 = 72, so we need ; n
2 ; Let $x = 2$. Then ; n
2 ; \boxed{x^2} ; n
42 ; \boxed{1\,042} ; n
"""


# -- In a process of each package


class StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        if name.startswith(tuple(STAND_INS.split())):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return MagicMock(name=spec.name, __path__=[], __spec__=spec)

    def exec_module(self, module):
        pass


def load(name):
    """A module without the __init__ of the packages that it is in: they would import the rest."""
    parts = name.split(".")
    for n in range(1, len(parts)):
        package = types.ModuleType(".".join(parts[:n]))
        package.__path__ = [f"{folder}/{'/'.join(parts[:n])}" for folder in sys.path]
        sys.modules.setdefault(package.__name__, package)
    return importlib.import_module(name)


def in_last_box(module, completion):
    box = module.last_boxed_only_string(completion)
    return module.remove_boxed(box) if box else completion


def here():
    sys.path.append(ROOT)
    import reward

    for name in ("math", "gsm8k", "answer"):
        yield name, lambda gold, text, f=reward.BUILT_IN[name]: f(text, dict(answer=gold))


def trl():
    reward = load("trl.rewards.accuracy_rewards").accuracy_reward
    yield "accuracy_reward", lambda gold, text: reward([[dict(content=text)]], [f"${gold}$"])[0]
    yield "accuracy_reward, bare gold", lambda gold, text: reward([[dict(content=text)]], [gold])[0]


def math_verify():
    from math_verify import parse, verify

    yield "defaults", lambda gold, text: verify(parse(f"${gold}$"), parse(text))


def verifiers():
    score = load("verifiers.v1.utils.score")
    yield "boxed", lambda gold, text: score.verify_boxed_math_answer(text, gold)


def ms_swift():
    accuracy = load("swift.rewards.orm").MathAccuracy()
    yield "accuracy", lambda gold, text: accuracy([text], [f"${gold}$"])[0]


def opencompass():
    worker = load("opencompass.evaluator.math_evaluator")._verify_worker

    def verdict(gold, text):
        said = []
        worker(text, gold, types.SimpleNamespace(put=said.append))
        return said[0][1] if said[0][0] == "ok" else None

    yield "MATHVerify", verdict


def areal():
    worker = load("areal.reward").MathVerifyWorker(timeout=None)
    yield "math_verify", lambda gold, text: worker.verify(text, gold)


def verl():
    names = ("math_verify", "math_reward", "math_dapo", "gsm8k")
    verify, math, dapo, gsm8k = (load(f"verl.utils.reward_score.{name}") for name in names)
    yield "math_verify", lambda gold, text: verify._verify_in_subprocess(f"\\boxed{{{gold}}}", text)
    yield "MATH", lambda gold, text: math.compute_score(text, gold)
    yield "DAPO", lambda gold, text: dapo.compute_score(text, gold)["acc"]
    strict = dict(strict_box_verify=True)
    yield "DAPO, strict box", lambda gold, text: dapo.compute_score(text, gold, **strict)["acc"]
    yield "gsm8k", lambda gold, text: gsm8k.compute_score(text, gold)
    yield "gsm8k, flexible", lambda gold, text: gsm8k.compute_score(text, gold, method="flexible")


def tinker_cookbook():
    grading = load("tinker_cookbook.recipes.math_rl.math_grading")
    graders = dict(sympy=grading.grade_answer, math_verify=grading.grade_answer_math_verify)
    for name, grader in graders.items():

        def verdict(gold, text, grade=grader):
            try:
                return grade(grading.extract_boxed(text), gold)
            except ValueError:  # no box
                return 0.0

        yield name, verdict


def mathruler():
    grader = load("mathruler.grader")
    box = grader.extract_boxed_content
    yield "grade_answer", lambda gold, text: grader.grade_answer(box(text), gold)


def openrlhf():
    utils = load("openrlhf.utils.math_utils")

    def verdict(gold, text):
        answer = utils.extract_boxed_answer(text)
        return utils.grade_answer(answer, gold) if answer else 0.0

    yield "grade_answer", verdict


def gem_llm():
    grader = load("gem.utils.math_grader")
    yield "boxed", lambda gold, text: grader.boxed_reward_fn(text, gold, fast=True)[1]


def evalscope():
    parser = load("evalscope.metrics.math.parser")
    yield "math", lambda gold, text: parser.math_equal(parser.extract_answer(text), gold)


def inspect_evals():
    import asyncio

    utils = load("inspect_evals.math.utils")
    yield "MATH", lambda gold, text: asyncio.run(utils.is_equiv(in_last_box(utils, text), gold))


def helm():
    scenario = load("helm.benchmark.scenarios.math_scenario")
    yield "MATH", lambda gold, text: scenario.is_equiv_chain_of_thought(text, f"\\boxed{{{gold}}}")


def lm_eval():
    hendrycks = load("lm_eval.tasks.hendrycks_math.utils")
    yield (
        "hendrycks_math",
        lambda gold, text: hendrycks.is_equiv(in_last_box(hendrycks, text), gold),
    )
    minerva = load("lm_eval.tasks.minerva_math.utils")

    def results(gold, text):
        row = dict(answer=minerva.normalize_final_answer(gold), solution=f"$\\boxed{{{gold}}}$")
        return minerva.process_results(row, [text])

    sentence = "Final Answer: The final answer is ${}$. I hope it is correct."  # its few-shot form

    def exact(gold, text):
        return results(gold, sentence.format(in_last_box(minerva, text)))["exact_match"]

    yield "minerva, exact_match", exact
    yield "minerva, math_verify", lambda gold, text: results(gold, text)["math_verify"]

    def plain(text):  # regexes_to_ignore, ignore_case
        return re.sub(r"\.$", "", re.sub(r"[,$]|(?s:.*)#### ", "", text)).lower()

    def strict(gold, text):
        found = re.findall(r"#### (\-?[0-9\.\,]+)", text) or ["[invalid]"]
        return plain(found[0]) == plain(gold)

    def flexible(gold, text):
        found = re.findall(r"(-?[$0-9.,]{2,})|(-?[0-9]+)", text) or [("[invalid]", "")]
        return plain(found[-1][0] or found[-1][1]) == plain(gold)

    yield "gsm8k, strict", strict
    yield "gsm8k, flexible", flexible


def lighteval():
    load("lighteval.metrics.metrics_sample").SampleLevelComputation = object  # of a stand-in
    metrics = load("lighteval.metrics.dynamic_metrics")
    by = load("lighteval.metrics.utils.extractive_match_utils")
    answer = load("lighteval.models.model_output").ModelResponse
    doc = load("lighteval.tasks.requests").Doc
    formula, number = by.LatexExtractionConfig, by.ExprExtractionConfig
    for name, gold_form, kind in (("expr_gold", " {}", number), ("latex_gold", "${}$", formula)):
        how = dict(fallback_mode="first_match", precision=5, aggregation_function=max)
        how |= dict(gold_extraction_target=(kind(),))
        how |= dict(pred_extraction_target=(number(), formula(boxed_match_priority=0)))
        metric = metrics.MultilingualExtractiveMatchMetric(**how)

        def verdict(gold, text, metric=metric, gold_form=gold_form):
            row = doc(query="q", choices=[gold_form.format(gold)], gold_index=0, task_name="t")
            return metric.compute(doc=row, model_response=answer(text=[text]))

        yield name, verdict


def grade(package, out):
    """Writes {grader: its verdicts}: 1 paid, 0 refused, None: not judged, a text: an error."""
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    sys.meta_path.insert(0, StandIns())
    verdicts = {name: judge(grader) for name, grader in globals()[package.replace("-", "_")]()}
    Path(out).write_text(json.dumps(verdicts))


def judge(grader):
    """Its verdict of each pair: "1" paid, "." refused, "-" not judged, "E" an error."""
    said = []
    for gold, text, _ in pairs():
        try:
            verdict = grader(gold, text)
            said.append("-" if verdict is None else ".1"[float(verdict) == 1])
        except Exception:
            said.append("E")
    return said


def pairs():
    """[(gold, completion, is it right?)]"""
    lines = [line.split(" ; ") for line in (PAIRS.strip() + NAMING.rstrip()).split("\n")]
    return [(gold, text.replace(r"\n", "\n"), right) for gold, text, right in lines]


# -- The table and the picture


def verdicts_of(package, folder):
    """{(package, grader): verdicts}. The package is installed in the folder, unless it is there."""
    if not os.path.exists(f"{folder}/done"):
        pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-compile"]
        subprocess.run([*pip, "--target", folder, *PACKAGES[package].split()], check=True)
        Path(folder, "done").touch()
    out = f"{folder}/verdicts.json"
    alone = [sys.executable, "-I", "-S", os.path.abspath(__file__), "--grade"]  # no site-packages
    subprocess.run([*alone, package, folder, out], check=True)
    said = json.loads(Path(out).read_text())
    return {(package, grader): verdicts for grader, verdicts in said.items()}


def published():
    """What verdicts_of gave when figures/graders.md was made."""
    rows = Path(HERE, "figures", "graders.md").read_text().split("\n")
    rows = [row.strip("| ").split(" | ") for row in rows if row.startswith("| ")]
    second = next(i for i, row in enumerate(rows) if row[0] == "#")
    graders = [row for row in rows[:second] if len(row[0]) == 1]
    columns = list(zip(*(row[4:-1] for row in rows[second + 2 :]), strict=True))
    return {(row[1], row[3]): c for row, c in zip(graders, columns, strict=True)}


def check(verdicts):
    """The claims about this project's rewards."""
    math, trl = verdicts["here", "math"], verdicts["trl", "accuracy_reward"]
    for (_, _, right), ours, theirs in zip(pairs(), math, trl, strict=True):
        assert (ours, theirs, right) != (".", "1", "y"), "math pays what is right for TRL"
        assert (ours, theirs, right) != ("1", ".", "n"), "math pays nothing wrong that TRL refuses"
    judged = zip(pairs(), verdicts["here", "gsm8k"], strict=True)
    paid = {text for (_, text, _), said in judged if said == "1"}
    assert not {r"\boxed{70\text{ or }72}", r"\boxed{[0,1]}"} & paid, "gsm8k takes one number"


def count(verdicts, rights, verdict, first=0, last=60):
    judged = zip(pairs()[first:last], verdicts[first:last], strict=True)
    return sum(right in rights and said in verdict for (_, _, right), said in judged)


def tables(verdicts, versions):
    """What each grader pays, and each of its verdicts."""
    codes = string.ascii_uppercase + string.ascii_lowercase
    header = (
        "code | package | version | grader | paid of 60 | right refused of 49 | wrong paid of 5"
    )
    first = [f"{header} | not judged | wrong paid that name the right one, of 12"]
    for code, (key, said) in zip(codes, verdicts.items(), strict=False):
        counts = [count(said, "yn?", "1"), count(said, "y", ".-E"), count(said, "n", "1")]
        counts += [count(said, "yn?", "-E"), count(said, "n", "1", first=60, last=72)]
        first.append([code, key[0], versions[key[0]], key[1], *counts])
    second = [
        "# | right? | gold | completion | " + " | ".join(codes[: len(verdicts)]) + " | paid by"
    ]
    for i, (gold, text, right) in enumerate(pairs()):
        row = [said[i] for said in verdicts.values()]
        text = text.replace("\n", "\u23ce")
        second.append([i + 1, right, f"`{gold}`", f"`{text}`", *row, row.count("1")])
    return first, second


def draw(figure, verdicts):
    """A column for each grader, a row for each answer."""
    colours = {  # is it right?, what is said: the colour, the name
        ("y", "1"): ("#2166ac", "right, paid"),
        ("y", "."): ("#f4a582", "right, refused"),
        ("n", "1"): ("#b2182b", "wrong, paid"),
        ("n", "."): ("#f7f7f7", "wrong, refused"),
        ("?", "1"): ("#92c5de", "a matter of taste, paid"),
        ("?", "."): ("#dddddd", "a matter of taste, refused"),
        ("", "-"): ("#777777", "not judged, or an error"),
    }
    kinds = list(colours)
    image = []
    for i, (_, _, right) in enumerate(pairs()):
        seen = [(right, said[i]) for said in verdicts.values()]
        image.append([kinds.index(kind if kind in kinds else ("", "-")) for kind in seen])
    axis = figure.subplots()
    shown = plt.matplotlib.colors.ListedColormap([colour for colour, _ in colours.values()])
    axis.imshow(image, cmap=shown, vmin=-0.5, vmax=len(kinds) - 0.5, aspect="auto")
    axis.grid(False)
    axis.xaxis.tick_top()
    names = [f"{package}: {grader}" for package, grader in verdicts]
    axis.set_xticks(range(len(names)), names, rotation=60, ha="left", fontsize=8)
    texts = [
        f"{text}  for  {gold}".replace("\n", " ").replace("$", r"\$") for gold, text, _ in pairs()
    ]
    axis.set_yticks(range(len(texts)), texts, fontsize=7, family="monospace")
    packages = [package for package, _ in verdicts]
    for i in range(1, len(packages)):
        if packages[i] != packages[i - 1]:
            axis.axvline(i - 0.5, color="black", lw=0.8)
    axis.axhline(59.5, color="black", lw=0.8)
    squares = [
        plt.Rectangle((0, 0), 1, 1, fc=colour, ec="#777777") for colour, _ in colours.values()
    ]
    labels = [name for _, name in colours.values()]
    figure.legend(squares, labels, loc="outside lower center", ncols=4)


def main():
    args = common.arguments(__doc__, "folder")
    if args.quick:
        verdicts = published()
        for name in ("math", "gsm8k", "answer"):
            if name != "math" or importlib.util.find_spec("math_verify"):
                verdict = reward.BUILT_IN[name]
                said = judge(lambda gold, text, f=verdict: f(text, dict(answer=gold)))
                assert said == list(verdicts["here", name]), f"{name} is not what was published"
        versions = {package: "" for package, _ in verdicts}
    else:
        with ThreadPoolExecutor(args.jobs) as pool:
            folders = [os.path.abspath(f"{args.folder}/{package}") for package in PACKAGES]
            parts = list(pool.map(verdicts_of, PACKAGES, folders))
        verdicts = {key: said for part in parts for key, said in part.items()}
        versions = {
            package: needs.split(" ")[0].split("==")[1] for package, needs in PACKAGES.items()
        }
        versions["here"] = f"{time.strftime('%Y-%m-%d')}, Python {platform.python_version()}"
    check(verdicts)
    figure = plt.figure(figsize=(13, 13), layout="constrained")
    draw(figure, verdicts)
    common.save(args, "graders", figure, *tables(verdicts, versions))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--grade"]:
        sys.path.insert(0, sys.argv[3])
        grade(sys.argv[2], sys.argv[4])
    else:
        import common
        import matplotlib.pyplot as plt

        import reward

        main()
