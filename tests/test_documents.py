"""README.md, REFERENCE.md and the other documents: what they name exists, and their lists are
those of the code. A changed copy of the project may delete this file."""

import ast
import dataclasses
import glob
import graphlib
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

DOCUMENTS = ("README.md", "REFERENCE.md", "studies/README.md", "variants/README.md")
COLUMNS = 100  # tables, headings, links and code may be wider
# Flags of other programs, and of studies, that the documents name.
OTHER_FLAGS = set(
    "no-deps retries nproc_per_node nnodes rdzv_backend rdzv_endpoint max_restarts pid "
    "enforce-eager find-links step html source quick jobs trl float32 large schemas points "
    "help".split()
)
# Names of metrics that depend on the run: pattern -> the name in REFERENCE.md.
GENERIC_METRICS = {
    "rewards/.*/": "rewards/NAME/",
    "logged/.*": "logged/NAME",
    "reward_failed/.*": "reward_failed/CAUSE",
}
FAST_POLICY = ("fast", "head", "packing", "attention", "merged_attention")  # its files in harness/
REWRITE = 'python -c "from tests import test_documents; test_documents.write_documents()"'


def document(name):
    return read(os.path.join(HERE, name))


# -- Lists that are made from the code


def write_documents():
    """Rewrites what is made from the code: the flags, the sections of grpo.py and the sizes."""
    for name in DOCUMENTS:
        text = with_new_list(with_new_lists(document(name)), "SIZE", size_table)
        with open(os.path.join(HERE, name), "w") as file:
            file.write(text)


def with_new_lists(text):
    text = with_new_list(text, "FLAGS", flag_lists)
    return with_new_list(text, "SECTIONS", section_list)


def with_new_list(text, mark, make_list):
    """The text with a new list between <!-- mark --> and <!-- end mark -->, if it has these."""
    begin, end = f"<!-- {mark} -->\n", f"<!-- end {mark} -->"
    if begin not in text:
        return text
    before, _, rest = text.partition(begin)
    _, _, after = rest.partition(end)
    return before + begin + make_list() + end + after


def size_table():
    """Lines and syntax nodes of grpo.py and of all modules, without the fast policy and with it."""
    modules = ["grpo.py", "reward.py", "view.py"]
    modules += [f"harness/{name}" for name in glob.glob("*.py", root_dir=f"{HERE}/harness")]
    fast = {f"harness/{name}.py" for name in FAST_POLICY}
    core = [module for module in modules if module not in fast]
    table = "| | lines | syntax nodes |\n|---|---|---|\n"
    table += size_row("`grpo.py`", ["grpo.py"])
    table += size_row("all modules without the fast policy", core)
    return table + size_row("all modules", modules)


def size_row(title, modules):
    n_lines = 0
    n_nodes = 0
    for module in modules:
        text = document(module)
        n_lines += text.count("\n")
        for node in ast.walk(ast.parse(text)):
            if not isinstance(node, ast.expr_context):
                n_nodes += 1
    return f"| {title} | {n_lines:,} | {n_nodes:,} |\n"


def section_list():
    """The headings of grpo.py, up to their first colon."""
    titles = re.findall(r"^# -{20,}\n# ([^:\n]+)", document("grpo.py"), re.M)
    sentence = "`grpo.py` runs in the order of its sections: " + " · ".join(titles) + "."
    return textwrap.fill(sentence, COLUMNS) + "\n"


def flag_lists():
    """A list for each group of flags: each flag with its default, as one would type it, and its
    help text."""
    text = ""
    for f in dataclasses.fields(Config):
        default = ""
        if f.default is not None and f.default is not False and f.default != "":
            default = f" {f.default}"
        choices = ""
        if f.metadata["choices"]:
            choices = f" ({', '.join(f.metadata['choices'])})"
        if f.metadata["group"]:
            text += f"\n### {f.metadata['group'].capitalize()}\n\n"
        item = f"- `--{f.name}{default}`: {f.metadata['help']}{choices}"
        text += textwrap.fill(item, COLUMNS, subsequent_indent="  ", break_on_hyphens=False) + "\n"

    values = []
    for name, value in grpo.BUNDLED.items():
        values.append(f"`--{name} {str(value).removeprefix(HERE + os.sep)}`")
    preset = "Without `--model` these defaults apply, unless you override them: "
    return f"{text}\n{textwrap.fill(preset + ', '.join(values) + '.', COLUMNS)}\n"


@pytest.mark.parametrize("name", DOCUMENTS)
def test_lists_of_a_document_are_those_of_the_code(name):
    text = document(name)
    assert text == with_new_lists(text), f"{name}: run {REWRITE}"


def test_the_sizes_in_the_readme():
    """Within 3 %, so that a small change of the code does not fail here."""
    table = document("README.md").partition("<!-- SIZE -->\n")[2].partition("<!-- end SIZE -->")[0]
    sizes = [int(number.replace(",", "")) for number in re.findall(r"\d[\d,]*", table)]
    now = [int(number.replace(",", "")) for number in re.findall(r"\d[\d,]*", size_table())]
    assert len(sizes) == 6
    assert sizes == pytest.approx(now, rel=0.03), f"README.md: run {REWRITE}"


def test_help_has_the_flags_and_groups_of_the_reference(capsys):
    with pytest.raises(SystemExit):
        grpo.parse_args(["--help"])
    groups = re.findall(r"^([a-z ]+):\n((?:  .*\n)+)", capsys.readouterr().out, re.M)
    in_help = []
    for title, body in groups[1:]:  # the first group holds only --help
        in_help.append((title, re.findall(r"^  --(\w+)", body, re.M)))

    lists = re.findall(r"^### (.+)\n\n((?:- `--.*\n(?:  .*\n)*)+)", document("REFERENCE.md"), re.M)
    in_reference = []
    for title, body in lists:
        in_reference.append((title.lower(), re.findall(r"^- `--(\w+)", body, re.M)))
    assert in_help == in_reference


def test_every_metric_is_in_the_reference_and_no_other(undisturbed):
    section = re.search(r"(?s)\n## Metrics\n(.*?)\n## ", document("REFERENCE.md"))[1]
    in_reference = set()
    for names in re.findall(r"^- (`[^:]*?`):", section, re.M):
        in_reference.update(re.findall(r"`([\w/@]+)`", names))

    logged = set()
    for line in lines(undisturbed / "metrics.jsonl"):
        logged.update(line)
    logged.remove("step")
    for pattern, generic in GENERIC_METRICS.items():
        logged = {re.sub(f"^{pattern}", generic, name) for name in logged}
    assert logged <= in_reference

    # not every run logs these
    sometimes = ("eval_", "logged/", "reward_failed/", "peak_memory_gb")
    sometimes += ("turns/", "tools/", "environment/")
    missing = {name for name in in_reference - logged if not name.startswith(sometimes)}
    assert missing == set()


# -- What documents name


@pytest.mark.parametrize("name", DOCUMENTS)
def test_links_of_a_document_lead_somewhere(name):
    """To a file, and to a heading of it. No link has a line number: the next commit would make it
    wrong."""
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#\s]*)#?([^)\s]*)\)", document(name)):
        path = os.path.join(HERE, os.path.dirname(name), target or os.path.basename(name))
        assert os.path.isfile(path), target
        if anchor:
            headings = re.findall(r"^#+ (.+)", read(path), re.M)
            anchors = [re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in headings]
            assert anchor in anchors, anchor


@pytest.mark.parametrize("name", DOCUMENTS)
def test_tests_that_a_document_names_exist(name):
    paths = [os.path.join(HERE, "test_grpo.py")]
    paths += glob.glob(os.path.join(HERE, "tests", "test_*.py"))
    tests = set()
    for path in paths:
        tests.update(re.findall(r"def (test_\w+)", read(path)))
    for test in re.findall(r"`(test_\w+\*?)`", document(name)):
        if test.endswith("*"):
            assert any(other.startswith(test[:-1]) for other in tests), test
        else:
            assert test in tests, test


@pytest.mark.parametrize("name", DOCUMENTS)
def test_files_and_functions_of_a_document_exist(name):
    """Paths in backticks, such as `grpo.py`, `studies/bench.py` and `harness/`, and the names in
    the last column of the table of the algorithm."""
    text = document(name)
    folders = ["", os.path.dirname(name), "harness"]
    for path in re.findall(r"`(?:python )?((?:\w+/)*\w+\.(?:py|patch)|(?:\w+/)+)[ `]", text):
        if not re.match(r"my_|file\.py|out|step_", path):
            assert any(os.path.exists(os.path.join(HERE, folder, path)) for folder in folders), path

    code = document("grpo.py")
    table = text.partition("| in `grpo.py` |")[2].partition("\n\n")[0]
    for word in re.findall(r"^\| .* \| `(\w+)`.* \|$", table, re.M):
        assert re.search(rf"\b{word}\b", code), word


@pytest.mark.parametrize("name", DOCUMENTS)
def test_flags_of_a_document_exist_and_its_commands_are_valid(name):
    text = document(name).replace("\\\n", " ")
    flags = {f.name for f in dataclasses.fields(Config)}
    for flag in re.findall(r"(?<![\w-])--([a-z][\w-]*)", text):
        assert flag in flags | OTHER_FLAGS, flag

    commands = re.findall(r"(?m)^    .*?\bgrpo\.py (--.*?)(?: {2,}#.*)?$", text)
    commands += re.findall(r"`(--[^`\s]+\s[^`]+)`", text)
    for command in commands:
        words = shlex.split(command)
        if words[0].strip("-") in flags:
            harness.flags.check_flags(Config(**harness.flags.parse_flags(Config, words, "", "")))


def test_the_worked_example_of_the_readme():
    text = document("README.md")
    advantages = group_advantages(torch.tensor([1.0, 0.0, 0.0, 1.0]), 4)
    assert ", ".join(f"{a:+.4f}" for a in advantages) in text

    mask = torch.arange(6) < torch.tensor([[4], [2], [2], [6]])
    for reduction in REDUCTIONS:
        logps = torch.full((4, 6), -1.0, requires_grad=True)
        same = logps.detach()
        cfg = Config(loss_reduction=reduction, max_completion_length=8)
        loss, _ = grpo_loss(logps, same, same, None, advantages, mask, cfg, 14, 4)
        [gradient] = torch.autograd.grad(loss, logps)

        [row] = [line for line in text.splitlines() if line.startswith(f"| `{reduction}`: ")]
        value = f"{loss.item():.4f}".replace("-0.0000", "0.0000")
        assert f"**{value}**" in row
        assert ", ".join(f"{x:+.4f}" for x in gradient[:, 0]) in row


# -- The order of grpo.py; which module imports which


def test_a_function_is_used_below_where_it_stands():
    """So a reader of grpo.py knows what a line calls."""
    used_above = set()
    known = set()
    functions = {}
    for node in ast.parse(document("grpo.py")).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            functions[node.name] = node
    for name, node in functions.items():
        known.add(name)
        own = {a.arg for a in ast.walk(node) if isinstance(a, ast.arg)}  # its parameters
        for use in ast.walk(node):
            if isinstance(use, ast.Name) and use.id in functions.keys() - known - own:
                used_above.add((use.id, name))
    assert used_above == set()


def module_imports():
    """module -> the modules that it imports, ours with their path: harness/run."""
    paths = ["grpo.py", "reward.py", "view.py"]
    paths += [f"harness/{name}" for name in glob.glob("[!_]*.py", root_dir=f"{HERE}/harness")]
    imports = {}
    for path in paths:
        names = set()
        for node in ast.walk(ast.parse(document(path))):
            if isinstance(node, ast.Import):
                names.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                names.add(node.module)
                names.update(f"{node.module}.{alias.name}" for alias in node.names)
        imports[path.removesuffix(".py")] = {name.replace(".", "/") for name in names}
    return imports


def test_imports_go_one_way():
    """No module imports one that imports it, and nothing imports grpo.py. reward.py and view.py
    run without torch and NumPy, so that a worker and a look at a run start at once."""
    imports = module_imports()
    ours = {module: names & set(imports) for module, names in imports.items()}
    graphlib.TopologicalSorter(ours).prepare()  # CycleError
    for module, names in ours.items():
        assert "grpo" not in names, module

    for module in ("reward", "view"):
        needed, new = set(), {module}
        while new:
            needed |= new
            new = set().union(*(ours[name] for name in new)) - needed
        for name in needed:
            assert not imports[name] & {"torch", "numpy"}, name
