"""TODO."""

import ast
import dataclasses
import itertools
import os
import re
import shlex

import pytest
import torch

import grpo
import harness.flags
import harness.log
from grpo import Config, group_advantages, grpo_loss
from tests.common import HERE, REDUCTIONS, lines, read

pytest_plugins = "tests.common"


def test_arrows_go_one_way():
    """grpo uses harness, reward and view; nothing points back, and a reward's worker loads no torch."""
    imports = {}
    for name in ("harness", "reward", "view"):
        tree = ast.parse(read(os.path.join(HERE, f"{name}.py")))
        found = [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
        found += [node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
        imports[name] = {module.split(".")[0] for module in found}
    assert not any("grpo" in found for found in imports.values())
    assert not {"torch", "numpy", "harness", "view"} & imports["reward"]
    assert not {"torch", "numpy", "harness", "reward"} & imports["view"]


DOCUMENTS = ("README.md", "REFERENCE.md", "studies/README.md", "variants/README.md")


ELSEWHERE = "no-deps extra-index-url nproc_per_node nnodes rdzv_backend rdzv_endpoint max_restarts pid enforce-eager"


ELSEWHERE = {*ELSEWHERE.split(), "step", "html", "quick", "jobs", "trl", "float32", "help"}  # flags of other programs


AGAIN = (
    'python -c "from tests import test_documents; test_documents.write_documents()" makes tables and line numbers again'
)


def document(name):
    return read(os.path.join(HERE, name))


def write_documents():
    """Makes again what is made from the code: tables of flags, the table of sections, line numbers of links."""
    for name in DOCUMENTS:
        text = made_again(document(name))
        with open(os.path.join(HERE, name), "w") as file:
            file.write(text)


def made_again(text):
    for mark, make in (("FLAGS", flag_tables), ("TOC", section_table)):
        text = re.sub(f"(?s)(?<=<!-- {mark} -->\n).*(?=<!-- end {mark} -->)", lambda m, make=make: make(m[0]), text)
    link = re.compile(r"\[([^\]]+)\]\((?:\.\./)?(\w+\.py)#L(\d+)\)")
    return link.sub(lambda m: m[0].replace(f"#L{m[3]})", f"#L{line_of(m[1], m[2])})"), text)


def line_of(title, file):
    """Of the section that a link names, or the `function`, class or constant."""
    name, code = re.escape(" ".join(title.strip("`").split())), document(file)
    begins = rf"^(def|class) {name}\b|^{name} = " if title[0] == "`" else rf"(?i)(?<=-\n)# {name}(:.*)?$"
    found = [code.count("\n", 0, match.start()) + 1 for match in re.finditer(begins, code, re.M)]
    assert len(found) == 1, f"{file} has {len(found)} sections or definitions called {title}"
    return found[0]


def section_table(before):
    """What stands beside a section stays; beside a new one comes what its heading says."""
    known = dict(re.findall(r"^\| \[([^\]]+)\]\S+ \| (.*) \|$", before, re.M))
    sections = re.findall(r"^# -{20,}\n# ([^:\n]+)(?:: )?(.*)", document("grpo.py"), re.M)
    rows = [f"| [{title}](grpo.py#L0) | {known.get(title, about)} |" for title, about in sections]
    return "\n".join(["| section of `grpo.py` | what is there |", "|---|---|", *rows, ""])


def flag_tables(_):
    text, shown = "", lambda value: "empty" if value == "" else str(value).removeprefix(HERE + os.sep)
    for f in dataclasses.fields(Config):
        about, choices = f.metadata["help"].replace("|", "\\|"), f.metadata["choices"] or ""
        if f.metadata["group"]:
            text += f"\n### {f.metadata['group'].capitalize()}\n\n| flag | default | meaning |\n|---|---|---|\n"
        text += f"| `--{f.name}` | {shown(f.default)} | {about}{choices and ' (' + ', '.join(choices) + ')'} |\n"
    preset = ", ".join(f"`--{name} {shown(value)}`" for name, value in grpo.BUNDLED.items())
    return f"{text}\nWithout a `--model` the bundled task applies, and what is given wins over it: {preset}.\n"


def test_what_is_made_from_the_code_is_as_the_code_has_it():
    for name in DOCUMENTS:
        text = document(name)
        for there, now in itertools.zip_longest(text.split("\n"), made_again(text).split("\n")):
            assert there == now, f"{name}: {AGAIN}"
    assert len(document("README.md").split()) <= 2500


def test_help_has_the_flags_and_groups_of_the_reference(capsys):
    with pytest.raises(SystemExit):
        grpo.parse_args(["--help"])
    groups = re.findall(r"^([a-z ]+):\n((?:  .*\n)+)", capsys.readouterr().out, re.M)[1:]  # the first one has --help
    tables = re.findall(r"^### (.+)\n\n\| flag .*\n\|-.*\n((?:\|.*\n)+)", document("REFERENCE.md"), re.M)
    helped = [(title, re.findall(r"^  --(\w+)", body, re.M)) for title, body in groups]
    assert helped == [(title.lower(), re.findall(r"^\| `--(\w+)`", body, re.M)) for title, body in tables]


@pytest.mark.parametrize("name", DOCUMENTS)
def test_links_tests_and_flags_of_a_document_exist(name):
    text = document(name)
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#\s]*)#?([^)\s]*)\)", text):
        path = os.path.join(HERE, os.path.dirname(name), target or os.path.basename(name))
        assert os.path.isfile(path), target
        if anchor and path.endswith(".md"):
            headings = re.findall(r"^#+ (.+)", read(path), re.M)
            assert anchor in [re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in headings], anchor
    tests = re.findall(r"def (test_\w+)", document("test_grpo.py"))
    for test in re.findall(r"`(test_\w+\*?)`", text):
        assert any(known == test or (test[-1] == "*" and known.startswith(test[:-1])) for known in tests), test
    flags = {f.name for f in dataclasses.fields(Config)}
    for flag in re.findall(r"(?<![\w-])--([a-z][\w-]*)", text.replace("`--save_dtype`", "")):  # gone, and said
        assert flag in flags | ELSEWHERE, flag
    text = text.replace("\\\n", " ")
    commands = re.findall(r"(?m)^    .*?\bgrpo\.py (--.*?)(?: {2,}#.*)?$", text)
    for command in commands + [span for span in re.findall(r"`(--[^`]+ [^`]+)`", text)]:
        words = shlex.split(command)
        if words[0].strip("-") in flags:
            harness.flags.check_flags(Config(**harness.flags.parse_flags(Config, words, "", "")))


def test_every_metric_is_in_the_reference(undisturbed):
    """With the name that TRL has for it."""
    known, section = set(), re.search(r"(?s)\n## Metrics\n(.*?)\n## ", document("REFERENCE.md"))[1]
    for row in re.findall(r"^\| `.*", section, re.M):
        first, *_, last = [cell.strip() for cell in row.split("|")[1:-1]]
        names, trls = (re.findall(r"`([\w/@]+)`", cell) for cell in (first, last))
        sent = [next(iter(harness.log.trl_names({name: 1.0}))).removeprefix("train/") for name in names]
        assert sent == (names if last == "same" else trls or sent), names
        known |= set(names)
    for line in lines(undisturbed / "metrics.jsonl"):
        assert {re.sub("(?<=reward/)[a-z]+", "NAME", key) for key in line} - {"step"} <= known


def test_the_readmes_worked_example():
    text = document("README.md")
    a = group_advantages(torch.tensor([1.0, 0.0, 0.0, 1.0]), 4)
    assert ", ".join(f"{x:+.4f}" for x in a) in text
    mask = torch.arange(6) < torch.tensor([[4], [2], [2], [6]])
    for reduction in REDUCTIONS:
        logps = torch.full((4, 6), -1.0, requires_grad=True)
        cfg = Config(loss_reduction=reduction, max_completion_length=8)
        loss, _ = grpo_loss(logps, logps.detach(), logps.detach(), None, a, mask, cfg, 14, 4)
        (grad,) = torch.autograd.grad(loss, logps)
        row = next(line for line in text.splitlines() if line.startswith(f"| `{reduction}`: "))
        assert f"**{loss.item() + 0.0:.4f}**".replace("-0.0000", "0.0000") in row
        assert ", ".join(f"{x:+.4f}" for x in grad[:, 0]) in row
