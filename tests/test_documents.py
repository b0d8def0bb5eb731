"""README.md, REFERENCE.md and the others: short, and what they name exists."""

import ast
import dataclasses
import glob
import os
import re
import shlex
import textwrap

import pytest
import torch

import grpo
import harness.flags
from grpo import Config, group_advantages, grpo_loss
from tests.common import HERE, REDUCTIONS, lines, read

pytest_plugins = "tests.common"

ROOMS = "flags ranks workers rows arrays models recompute check checkpoints advice log run head packing fast hf_sampler"  # upwards
HARNESS = [f"harness/{name}" for name in ROOMS.split()]


def test_arrows_go_one_way():
    """A room imports only rooms below it; reward and view import none, and no torch: a reward's worker needs none."""
    below, there = (
        [],
        {path.removesuffix(".py") for path in glob.glob("harness/[!_]*.py", root_dir=HERE)},
    )
    assert there <= {*HARNESS}
    for room in ["reward", "view", *(room for room in HARNESS if room in there), "grpo"]:
        found = set()
        for node in ast.walk(ast.parse(document(f"{room}.py"))):
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        found = {module.replace(".", "/") for module in found}
        assert found & {"reward", "view", "grpo", *HARNESS} <= set(below), room
        if room in ("reward", "view"):
            assert not found & {"reward", "view", "torch", "numpy"}
        below.append(room)


DOCUMENTS = {
    "README.md": 2000,
    "REFERENCE.md": 3300,
    "studies/README.md": 3000,
    "variants/README.md": 700,
}  # words
TOOLS = "no-deps retries nproc_per_node nnodes rdzv_backend rdzv_endpoint max_restarts pid enforce-eager"
TOOLS += " step html quick jobs trl float32 points help"  # flags of other programs, and of studies
GENERIC = {
    "rewards/.*/": "rewards/NAME/",
    "logged/.*": "logged/NAME",
    "reward_failed/.*": "reward_failed/CAUSE",
}
AGAIN = (
    'python -c "from tests import test_documents; test_documents.write_documents()" makes it again'
)


def document(name):
    return read(os.path.join(HERE, name))


def write_documents():
    """Makes again what is made from the code: the flags, and the sections of grpo.py."""
    for name in DOCUMENTS:
        text = made_again(document(name))
        with open(os.path.join(HERE, name), "w") as file:
            file.write(text)


def made_again(text):
    for mark, make in (("FLAGS", flag_lists), ("TOC", section_list)):
        text = re.sub(
            f"(?s)(?<=<!-- {mark} -->\n).*(?=<!-- end {mark} -->)",
            lambda m, make=make: make(),
            text,
        )
    return text


def section_list():
    titles = re.findall(r"^# -{20,}\n# ([^:\n]+)", document("grpo.py"), re.M)
    return (
        textwrap.fill(
            f"The sections of `grpo.py`, in the order in which it runs: {' · '.join(titles)}.", 120
        )
        + "\n"
    )


def flag_lists():
    """A list for each group of flags: each flag with its default, as it would be typed, and its help text."""
    text = ""
    for f in dataclasses.fields(Config):
        about, choices = f.metadata["help"], f.metadata["choices"] or ""
        default = "" if f.default is None or f.default is False else f" {f.default}".rstrip()
        if f.metadata["group"]:
            text += f"\n### {f.metadata['group'].capitalize()}\n\n"
        text += f"- `--{f.name}{default}`: {about}{choices and ' (' + ', '.join(choices) + ')'}\n"
    preset = ", ".join(
        f"`--{name} {str(value).removeprefix(HERE + os.sep)}`"
        for name, value in grpo.BUNDLED.items()
    )
    return f"{text}\nWithout a `--model` the bundled task applies; what you give wins over it: {preset}.\n"


@pytest.mark.parametrize("name", DOCUMENTS)
def test_a_document_is_short_and_as_the_code_has_it(name):
    text = document(name)
    assert len(text.split()) <= DOCUMENTS[name]
    assert text == made_again(text), f"{name}: {AGAIN}"


def test_help_has_the_flags_and_groups_of_the_reference(capsys):
    with pytest.raises(SystemExit):
        grpo.parse_args(["--help"])
    groups = re.findall(r"^([a-z ]+):\n((?:  .*\n)+)", capsys.readouterr().out, re.M)[
        1:
    ]  # the first one has --help
    lists = re.findall(r"^### (.+)\n\n((?:- `--.*\n)+)", document("REFERENCE.md"), re.M)
    helped = [(title, re.findall(r"^  --(\w+)", body, re.M)) for title, body in groups]
    assert helped == [
        (title.lower(), re.findall(r"^- `--(\w+)", body, re.M)) for title, body in lists
    ]


@pytest.mark.parametrize("name", DOCUMENTS)
def test_links_and_tests_of_a_document_exist(name):
    """No link has a line number: the next commit would make it wrong."""
    text = document(name)
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#\s]*)#?([^)\s]*)\)", text):
        path = os.path.join(HERE, os.path.dirname(name), target or os.path.basename(name))
        assert os.path.isfile(path), target
        if anchor:
            headings = re.findall(r"^#+ (.+)", read(path), re.M)
            assert anchor in [
                re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in headings
            ], anchor
    files = [
        os.path.join(HERE, "test_grpo.py"),
        *glob.glob(os.path.join(HERE, "tests", "test_*.py")),
    ]
    tests = [test for path in files for test in re.findall(r"def (test_\w+)", read(path))]
    for test in re.findall(r"`(test_\w+\*?)`", text):
        assert any(
            known == test or (test[-1] == "*" and known.startswith(test[:-1])) for known in tests
        ), test


@pytest.mark.parametrize("name", DOCUMENTS)
def test_files_and_functions_of_a_document_exist(name):
    """What stands in backticks: `grpo.py`, `studies/bench.py`, `harness/`, and in the table of the algorithm names."""
    text = document(name)
    folders = ["", os.path.dirname(name), "harness"]
    for path in re.findall(r"`(?:python )?((?:\w+/)*\w+\.(?:py|patch)|(?:\w+/)+)[ `]", text):
        if not re.match(r"my_|file\.py|out|step_", path):
            assert any(os.path.exists(os.path.join(HERE, folder, path)) for folder in folders), path
    code = document("grpo.py") + document("harness/head.py")
    table = text.partition("| in `grpo.py` |")[2].partition("\n\n")[0]
    for word in re.findall(r"^\| .* \| `(\w+)`.* \|$", table, re.M):
        assert re.search(rf"\b{word}\b", code), word


@pytest.mark.parametrize("name", DOCUMENTS)
def test_flags_of_a_document_exist_and_its_commands_are_valid(name):
    text = document(name).replace("\\\n", " ")
    flags = {f.name for f in dataclasses.fields(Config)}
    for flag in re.findall(r"(?<![\w-])--([a-z][\w-]*)", text):
        assert flag in flags | set(TOOLS.split()), flag
    commands = re.findall(r"(?m)^    .*?\bgrpo\.py (--.*?)(?: {2,}#.*)?$", text)
    for command in commands + [span for span in re.findall(r"`(--[^`]+ [^`]+)`", text)]:
        words = shlex.split(command)
        if words[0].strip("-") in flags:
            harness.flags.check_flags(Config(**harness.flags.parse_flags(Config, words, "", "")))


def test_every_metric_is_in_the_reference_and_no_other(undisturbed):
    section = re.search(r"(?s)\n## Metrics\n(.*?)\n## ", document("REFERENCE.md"))[1]
    named = {
        name
        for row in re.findall(r"^- (`.*?`):", section, re.M)
        for name in re.findall(r"`([\w/@]+)`", row)
    }
    logged = {key for line in lines(undisturbed / "metrics.jsonl") for key in line} - {"step"}
    for special, generic in GENERIC.items():
        logged = {re.sub(f"^{special}", generic, name) for name in logged}
    assert logged <= named
    assert {
        name
        for name in named - logged
        if not name.startswith(("eval_", "logged/", "reward_failed/"))
    } == set()


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
