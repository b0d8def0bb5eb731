"""What does each grader pay?   python studies/graders.py FOLDER

Here 28 graders of 16 packages and three of ours judge 60 answers, each with its gold answer, and
12 wrong answers that mention the right one (graders.toml). Each package is installed from PyPI
into a folder of its own in FOLDER (3 minutes, 0.9 GB; existing folders are not installed again),
with what its graders need. They run in a process that can import only from this folder and from
Python itself.

A grader gets the whole completion. If a grader expects an extracted answer, its package's own
function extracts the answer; the three graders without such a function get the content of the last
box. lm-eval defines its filters for GSM8K in a YAML file; they are written out here.

--quick: does reward.py pay what the published table contains? This needs no package.
"""

import asyncio
import importlib
import importlib.abc
import importlib.machinery
import json
import logging
import math
import os
import platform
import re
import string
import subprocess
import sys
import time
import tomllib
import types
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import MagicMock

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(HERE)
DATA = tomllib.loads(Path(HERE, "graders.toml").read_text())


class StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        if name.startswith(tuple(DATA["stand_ins"].split())):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return MagicMock(name=spec.name, __path__=[], __spec__=spec)

    def exec_module(self, module):
        pass


def load(name):
    """A module without the __init__ of its parent packages, which would import the rest."""
    parts = name.split(".")
    for n in range(1, len(parts)):
        package = types.ModuleType(".".join(parts[:n]))
        package.__path__ = [f"{folder}/{'/'.join(parts[:n])}" for folder in sys.path]
        sys.modules.setdefault(package.__name__, package)
    return importlib.import_module(name)


def in_last_box(module, completion):
    box = module.last_boxed_only_string(completion)
    return module.remove_boxed(box) if box else completion


def function_of(function, extract=None, gold="{}", gold_first=False, options=None, result=None):
    """A grader that graders.toml describes."""
    module, name = function.split()
    module = load(module)

    def verdict(right, text):
        if extract == "last box":
            text = in_last_box(module, text)
        elif extract:
            try:
                text = getattr(module, extract)(text)
            except ValueError:  # there is no answer
                text = None
        if text is None:
            return 0.0
        pair = [text, gold.format(right)]
        if gold_first:
            pair.reverse()
        paid = getattr(module, name)(*pair, **options or {})
        if asyncio.iscoroutine(paid):
            paid = asyncio.run(paid)
        return paid if result is None else paid[result]

    return verdict


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


def lm_eval():
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
    """Runs in the process of a package, and writes {grader: its verdicts}."""
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    sys.meta_path.insert(0, StandIns())
    functions = DATA["functions"].get(package, {})
    graders = {name: function_of(**described) for name, described in functions.items()}
    graders.update(globals().get(package.replace("-", "_"), dict)())
    verdicts = {name: judge(grader) for name, grader in graders.items()}
    Path(out).write_text(json.dumps(verdicts))


def judge(grader):
    """The verdict on each pair: "1" paid, "." refused, "-" not judged, "E" an error."""
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
    text = DATA["answers"]["pairs"] + DATA["answers"]["naming"]
    lines = [line.split(" ; ") for line in text.splitlines()]
    return [(gold, text.replace(r"\n", "\n"), right) for gold, text, right in lines]


def needs_of(package):
    return DATA["packages"][package].format(**DATA["groups"]).split()


def verdicts_of(package, folder):
    """{(package, grader): verdicts}. Installs the package into the folder, unless it exists."""
    if not os.path.exists(folder):
        common.install(folder, *needs_of(package))
    out = f"{folder}/verdicts.json"
    alone = [sys.executable, "-I", "-S", os.path.abspath(__file__), "--grade"]  # no site-packages
    subprocess.run([*alone, package, folder, out], check=True)
    said = json.loads(Path(out).read_text())
    return {(package, grader): verdicts for grader, verdicts in said.items()}


def published():
    """What verdicts_of returned when figures/graders.md was made."""
    rows = Path(HERE, "figures", "graders.md").read_text().split("\n")
    rows = [row.strip("| ").split(" | ") for row in rows if row.startswith("| ")]
    second = next(i for i, row in enumerate(rows) if row[0] == "#")
    graders = [row for row in rows[:second] if len(row[0]) == 1]
    columns = list(zip(*(row[4:-1] for row in rows[second + 2 :]), strict=True))
    return {(row[1], row[3]): c for row, c in zip(graders, columns, strict=True)}


def check(verdicts):
    """The claims about this project's rewards."""
    ours, trl = verdicts["here", "math"], verdicts["trl", "accuracy_reward"]
    for (_, _, right), our, their in zip(pairs(), ours, trl, strict=True):
        assert (our, their, right) != (".", "1", "y"), "math pays what is right for TRL"
        assert (our, their, right) != ("1", ".", "n"), "math pays nothing wrong that TRL refuses"
    judged = zip(pairs(), verdicts["here", "gsm8k"], strict=True)
    paid = {text for (_, text, _), said in judged if said == "1"}
    assert not {r"\boxed{70\text{ or }72}", r"\boxed{[0,1]}"} & paid, "gsm8k takes one number"


def count(verdicts, rights, verdict, first=0, last=60):
    judged = zip(pairs()[first:last], verdicts[first:last], strict=True)
    return sum(right in rights and said in verdict for (_, _, right), said in judged)


def tables(verdicts, versions):
    """The tables: what each grader pays, and each of its verdicts."""
    codes = string.ascii_uppercase + string.ascii_lowercase
    first = [DATA["columns"]]
    for code, (key, said) in zip(codes, verdicts.items(), strict=False):
        counts = [count(said, "yn?", "1"), count(said, "y", ".-E"), count(said, "n", "1")]
        counts += [count(said, "yn?", "-E"), count(said, "n", "1", first=60, last=72)]
        first.append([code, key[0], versions[key[0]], key[1], *counts])
    codes = " | ".join(codes[: len(verdicts)])
    second = [f"# | right? | gold | completion | {codes} | paid by"]
    for i, (gold, text, right) in enumerate(pairs()):
        row = [said[i] for said in verdicts.values()]
        text = text.replace("\n", "\u23ce")
        second.append([i + 1, right, f"`{gold}`", f"`{text}`", *row, row.count("1")])
    return first, second


def draw(verdicts):
    """A column for each grader, a row for each answer."""
    hues, strengths = {"y": 1.0, "?": 0.5, "n": -1.0}, {"1": 1.0, ".": 0.2}
    image, texts = [], []
    for i, (gold, text, right) in enumerate(pairs()):
        row = [said[i] for said in verdicts.values()]
        image.append([hues[right] * strengths.get(x, math.nan) for x in row])
        texts.append(f"{text}  for  {gold}".replace("\n", " ").replace("$", r"\$"))
    figure, axis = plt.subplots(figsize=(13, 13), layout="constrained")
    axis.imshow(image, cmap="RdBu", vmin=-1, vmax=1, aspect="auto")
    axis.grid(False)
    axis.xaxis.tick_top()
    names = [f"{package}: {grader}" for package, grader in verdicts]
    axis.set_xticks(range(len(names)), names, rotation=60, ha="left", fontsize=8)
    axis.set_yticks(range(len(texts)), texts, fontsize=7, family="monospace")
    of = "blue: right, half as strong: a matter of taste, red: wrong"
    figure.supxlabel(f"{of};  strong: paid, pale: refused, white: not judged, or an error")
    return figure


if __name__ == "__main__":
    if sys.argv[1:2] == ["--grade"]:
        sys.path.insert(0, sys.argv[3])
        grade(sys.argv[2], sys.argv[4])
        sys.exit()

    import common
    import matplotlib.pyplot as plt

    import reward

    args = common.arguments(__doc__, "folder")
    if args.quick:
        verdicts = published()
        for name in ("math", "gsm8k", "answer"):
            if name != "math" or importlib.util.find_spec("math_verify"):
                verdict = reward.BUILT_IN[name]
                said = judge(lambda gold, text, f=verdict: f(text, dict(answer=gold)))
                assert said == list(verdicts["here", name]), f"{name} is not what was published"
        check(verdicts)
        sys.exit()
    with ThreadPoolExecutor(args.jobs) as pool:
        folders = [os.path.abspath(f"{args.folder}/{package}") for package in DATA["packages"]]
        parts = list(pool.map(verdicts_of, DATA["packages"], folders))
    verdicts = {key: said for part in parts for key, said in part.items()}
    versions = {package: needs_of(package)[0].split("==")[1] for package in DATA["packages"]}
    versions["here"] = f"{time.strftime('%Y-%m-%d')}, Python {platform.python_version()}"
    check(verdicts)
    draw(verdicts).savefig(Path(args.out, "graders.png"), bbox_inches="tight")
    common.save(args, "graders", [], *tables(verdicts, versions))
