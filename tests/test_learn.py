"""learn.ipynb, the lesson: it holds together, its numbers are today's, and the answers of its
exercises. To run the lesson again and store its outputs: see REWRITE."""

import ast
import copy
import math
import os
import re
from dataclasses import replace

import nbformat
import pytest
import torch

import grpo
import harness.models
import studies.lesson
from tests.common import HERE, read

LESSON = os.path.join(HERE, "learn.ipynb")
REWRITE = 'python -c "from tests import test_learn; test_learn.write_lesson()"'
MODULES = {"grpo": grpo, "lesson": studies.lesson, "models": harness.models}
NUMBER = re.compile(r"(?<![\w.])[+-]?\d[\d,]*(?:\.\d+)?(?![\w.]*\d)")


def lesson():
    return nbformat.read(LESSON, as_version=4)


def cells_of(notebook, cell_type):
    return [cell for cell in notebook.cells if cell.cell_type == cell_type]


def executed():
    """The lesson, run from its first to its last cell."""
    from nbclient import NotebookClient

    notebook = lesson()
    NotebookClient(
        notebook,
        timeout=900,  # seconds for one cell
        kernel_name="python3",
        coalesce_streams=True,
        record_timing=False,
        resources={"metadata": {"path": HERE}},
    ).execute()
    notebook.metadata["language_info"] = {"name": "python"}
    return notebook


def write_lesson():
    """Runs the lesson and stores its outputs."""
    notebook = executed()
    nbformat.validate(notebook)
    nbformat.write(notebook, LESSON)


def printed(cell):
    return "".join(output.text for output in cell.outputs if output.output_type == "stream")


def pictures(cell):
    return sum("image/png" in output.get("data", {}) for output in cell.outputs)


def numbers(text):
    return [float(number.replace(",", "")) for number in NUMBER.findall(text)]


# ------------------------------------------------------------------------------------------------
# The stored lesson


def test_the_lesson_is_stored_with_outputs():
    notebook = lesson()
    nbformat.validate(notebook)
    assert 20 <= len(notebook.cells) <= 30
    assert os.path.getsize(LESSON) < 600_000
    code = cells_of(notebook, "code")
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    for cell in code:
        for output in cell.outputs:
            assert output.output_type in ("stream", "display_data"), cell.id
            assert output.get("name", "stdout") == "stdout", cell.id
        assert cell.outputs, cell.id
        assert pictures(cell) == cell.source.count("lesson.draw_"), cell.id


def test_the_cells_are_short():
    notebook = lesson()
    for cell in cells_of(notebook, "code"):
        code = [line for line in cell.source.splitlines() if line.strip()]
        assert len(code) <= 27, cell.id
    for cell in cells_of(notebook, "markdown"):
        for line in cell.source.splitlines():
            assert len(line) <= 100 or line.startswith(("|", "$$")), line


def test_no_formula_is_broken_over_two_lines():
    """Not every program that shows notebooks would typeset it."""
    for cell in cells_of(lesson(), "markdown"):
        for line in cell.source.splitlines():
            assert line.count("$$") % 2 == 0 and line.count("$") % 2 == 0, line


def test_the_names_that_the_lesson_uses_exist():
    """In code: what it takes from the project's modules. In prose: what stands in backticks."""
    notebook = lesson()
    code = "\n".join(cell.source for cell in cells_of(notebook, "code"))
    drawn = set()
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if node.value.id in MODULES:
                assert hasattr(MODULES[node.value.id], node.attr), node.attr
                drawn.add(node.attr)
    helpers = {name for name in vars(studies.lesson) if name.startswith("draw_")}
    assert helpers - drawn == {"draw_boxes", "draw_difference"}  # which others call

    project = code + read(os.path.join(HERE, "grpo.py")) + read(os.path.join(HERE, "learn.ipynb"))
    for cell in cells_of(notebook, "markdown"):
        for name in re.findall(r"`([a-z_]\w+)`", cell.source):
            assert re.search(rf"\b{name}\b", project.replace(f"`{name}`", "")), name
        for flag in re.findall(r"`--(\w+)", cell.source):
            assert hasattr(grpo.Config, flag) or flag in grpo.Config.__annotations__, flag


def test_the_links_of_the_lesson_lead_somewhere():
    for cell in cells_of(lesson(), "markdown"):
        for target in re.findall(r"\]\(([^)]+)\)", cell.source):
            if not target.startswith("http"):
                assert os.path.isfile(os.path.join(HERE, target)), target


def test_the_numbers_in_the_prose_are_printed():
    """Decimal numbers, but those of the exercises, which the tests below compute."""
    notebook = lesson()
    in_outputs = set()
    for cell in cells_of(notebook, "code"):
        in_outputs.update(re.findall(r"\d[\d,]*\.\d+", printed(cell)))
    in_prose = set()
    for cell in cells_of(notebook, "markdown"):
        text = cell.source.partition("## Exercises")[0]
        text = re.sub(r"\]\([^)]*\)|DeepSeek-V\S+", "", text)
        in_prose.update(re.findall(r"\d[\d,]*\.\d+", text))
    assert len(in_prose) >= 15
    assert in_prose <= in_outputs


# ------------------------------------------------------------------------------------------------
# The lesson run again


@pytest.mark.slow
def test_the_lesson_runs_and_its_outputs_are_todays():
    """The words are the same. So are the numbers: to their last digits where everything is
    computed, more loosely where a model samples and learns, which rounding on another CPU changes.
    """
    again = executed()
    for before, now in zip(cells_of(lesson(), "code"), cells_of(again, "code"), strict=True):
        assert pictures(before) == pictures(now)
        old_text = printed(before)
        new_text = printed(now)
        assert NUMBER.sub("#", old_text).split() == NUMBER.sub("#", new_text).split(), REWRITE
        tolerance = dict(abs=2e-4)
        if "sampled" in before.metadata.get("tags", []):
            tolerance = dict(abs=0.02, rel=0.02)
        assert numbers(new_text) == pytest.approx(numbers(old_text), **tolerance), REWRITE


# ------------------------------------------------------------------------------------------------
# The exercises


@pytest.fixture(scope="module")
def names():
    """What the lesson's cells with the tag `setup` have defined: the names a reader works with."""
    import matplotlib.pyplot as plt

    plt.switch_backend("agg")
    names = {}
    for cell in cells_of(lesson(), "code"):
        if "setup" in cell.metadata.get("tags", []):
            exec(cell.source, names)
    plt.close("all")
    return names


def answer(number):
    """The numbers in the lesson's answer to an exercise."""
    prose = lesson().cells[-1].source.partition("## Exercises")[2]
    section = re.search(rf"(?s)\*\*{number}\. .*?</summary>(.*?)</details>", prose)[1]
    return numbers(section)


def mean_of_means(names, parts):
    """Each part divides by its own count; then the gradients are averaged."""
    gradients = [names["gradient"](part) for part in parts]
    return sum(gradients) / len(parts)


def test_exercise_1_turn_the_sign(names):
    flipped = copy.deepcopy(names["group"])
    for s in flipped:
        s.advantages = -s.advantages
    metrics = grpo.update(names["policy"], names["restart"](), flipped, names["cfg"])

    before = names["before"][3]["logp"]  # of a right completion, which begins with <think>
    after = names["notes_of"](flipped)[3]["logp"]
    seen = [math.exp(before[0]), math.exp(after[0]), metrics["loss"]]
    assert seen == pytest.approx(answer(1), abs=2e-3)
    assert metrics["loss"] == pytest.approx(-names["first"]["loss"], abs=1e-4)
    assert after[0] < before[0]


def test_exercise_2_forget_the_std(names):
    names["restart"]()
    samples = copy.deepcopy(names["samples"])
    one_right, four_right = samples[8:16], samples[192:200]
    assert [sum(s.reward for s in group) for group in (one_right, four_right)] == [1, 4]

    angles = []
    for prompts in (one_right, one_right + four_right):
        gradients = []
        for scale in ("group", "none"):
            grpo.assign_advantages(prompts, 1, replace(names["cfg"], scale_rewards=scale))
            gradients.append(names["gradient"](prompts))
        angles.append(names["degrees"](*gradients))
        if prompts is one_right:
            longer = gradients[0].norm() / gradients[1].norm()
    assert [angles[0], longer, angles[1]] == pytest.approx(answer(2), abs=0.05)


def test_exercise_3_take_a_mean_of_means(names):
    names["restart"]()
    samples = names["samples"][:64]
    thinks = [s for s in samples if "<think>" in s.text]
    others = [s for s in samples if "<think>" not in s.text]
    gradient, degrees = names["gradient"], names["degrees"]
    two = mean_of_means(names, [thinks, others])
    singles = mean_of_means(names, [[s] for s in samples])

    whole = gradient(samples)
    seen = [degrees(whole, two), len(samples), degrees(whole, singles)]
    assert seen == pytest.approx(answer(3), abs=0.05)
    by_sequence = gradient(samples, loss_reduction="sequence")
    torch.testing.assert_close(singles, by_sequence, rtol=0, atol=1e-6)
