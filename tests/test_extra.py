"""The functions that @extra marks: each has a wrapper in extras/, which calls it. So what stands in
grpo.py always runs, whatever is changed there; and what extras/ add is there all the same."""

import ast
import importlib
import importlib.util
import inspect
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.common import HERE, flags_of, lines, metrics_of, small_config, small_rows

TEXT = Path(HERE, "grpo.py").read_text()
MARKED = re.findall(r'@extra\("(\w+)"\)\ndef (\w+)', TEXT)
OF_VLLM = {"vllm_options", "tensors_of", "fill_with_nan", "repack"}  # a default run has none


def page_with(folder, text=TEXT, link=True):
    """A folder with a changed page."""
    folder.mkdir()
    (folder / "grpo.py").write_text(text)
    shutil.copy(f"{HERE}/reward.py", folder)
    for name in ("extras", "sample_data")[not link :]:
        (folder / name).symlink_to(f"{HERE}/{name}")
    return folder


def run_page(folder, *flags, out="run", code=0, **options):
    """What a small run of it says."""
    options = dict(max_steps=1, num_minibatches=1) | options
    flags = [*flags_of(small_config(folder / out, **options)), *flags]
    command = [sys.executable, "grpo.py", *flags]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == code, done.stdout[-1000:] + done.stderr[-2000:]
    return done.stdout + done.stderr


def replaced(*pairs):
    text = TEXT
    for old, new in pairs:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return text


@pytest.mark.parametrize("file, name", MARKED)
def test_a_wrapper_gets_the_plain_one_and_its_arguments(file, name):
    """And passes on those that it does not know."""
    [plain] = [node for node in ast.parse(TEXT).body if getattr(node, "name", "") == name]
    wrapper = getattr(importlib.import_module(f"extras.{file}"), name)
    parameters = inspect.signature(wrapper).parameters
    named = [n for n, p in parameters.items() if p.kind == p.POSITIONAL_OR_KEYWORD]
    assert named[0] == "plain"
    names = [argument.arg for argument in plain.args.args]
    assert named[1:] == names[: len(named) - 1]
    kinds = {p.kind for p in parameters.values()}
    assert named[1:] == names or inspect.Parameter.VAR_POSITIONAL in kinds
    calls = [x for x in ast.walk(ast.parse(inspect.getsource(wrapper))) if isinstance(x, ast.Name)]
    assert [x for x in calls if x.id == "plain"]


def test_what_stands_in_the_page_runs(tmp_path):
    """Each function and method of it, with all extras: a change of any of them counts."""
    text = TEXT.split("\n")
    expected = set()
    page = ast.parse(TEXT)
    classes = [x for x in page.body if getattr(x, "name", "") in ("Policy", "RunFiles", "Run")]
    for holder in reversed([*classes, page]):
        for node in reversed(holder.body):
            if isinstance(node, ast.FunctionDef) and node.body[0].lineno > node.lineno:
                at = node.body[1 if ast.get_docstring(node) and len(node.body) > 1 else 0].lineno
                line = " " * node.body[0].col_offset + f"sys.stderr.write('RUNS {node.name}\\n')"
                expected.add((at, line, node.name))
    for at, line, _ in sorted(expected, reverse=True):
        text.insert(at - 1, line)
    folder = page_with(tmp_path / "page", "\n".join(text))
    options = dict(eval_data=small_rows(folder), eval_samples=2, beta=0.1)
    said = run_page(folder, max_steps=2, num_minibatches=2, keep=1, **options)
    missing = {name for _, _, name in expected if f"RUNS {name}\n" not in said}
    assert not missing & {name for _, name in MARKED} - OF_VLLM
    # The others are called in other runs: options of the loss, vLLM, a signal.
    assert missing <= OF_VLLM | {"sequence_ratio", "kl_from_here_on", "request_stop"}


@pytest.fixture(scope="module")
def touched(tmp_path_factory):
    """A page that an editor has formatted, with a comment in every function."""
    formatted = [sys.executable, "-m", "ruff", "format", "--line-length", "88", "-"]
    text = subprocess.run(formatted, input=TEXT, capture_output=True, text=True, check=True).stdout
    assert text != TEXT
    text = re.sub(r"(?m)^( *)(return|for|if) ", r"\1# mine\n\1\2 ", text)
    return page_with(tmp_path_factory.mktemp("touched") / "page", text)


def test_flags_of_extras_work_in_a_page_that_is_touched(touched):
    flags = ["--lora_rank", "2", "--system_prompt", "5+", "--weight_decay", "0.5"]
    (touched / "chat.jsonl").write_text('{"prompt": "1+2="}\n{"prompt": "3+4="}\n')
    (touched / "wandb.py").write_text(
        "def init(**o): print('INIT')\ndef log(o): print('LOG')\n"
        "def define_metric(*a, **o): ...\ndef finish(**o): ...\n"
    )
    model = touched / "model"
    shutil.copytree(f"{HERE}/sample_data/model", model)
    (model / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    data = dict(model=str(model), train_data=str(touched / "chat.jsonl"))
    run_page(touched, *flags, "--report_to", "wandb", "--log_completions", "3", **data)
    rows = lines(touched / "run" / "completions.jsonl")
    assert len(rows) == 3 and rows[0]["prompt"].startswith("5+") and "tokens" in rows[0]
    state = torch_load(touched / "run")
    assert state["adapters"] and len(state["moments"]) == len(state["adapters"])


def torch_load(out):
    import torch

    path = max(out.glob("step_*")) / "trainer_state.pt"
    return torch.load(path, weights_only=False)


def test_an_environment_plays_and_layers_are_checkpointed_in_a_page_that_is_touched(touched):
    (touched / "says.py").write_text(
        "def says(turns, row):\n    return None if len(turns) > 1 else 'on'\n"
    )
    flags = ["--environment", "says.py:says", "--gradient_checkpointing", "--max_turns", "3"]
    run_page(touched, *flags, out="turns", max_completion_length=32)
    [metrics] = metrics_of(touched / "turns")
    assert metrics["turns/mean"] > 1


def test_the_same_flags_are_refused_without_extras(tmp_path):
    folder = page_with(tmp_path / "page")
    for name in ("lora_rank", "weight_decay"):
        said = run_page(folder, "--plain", f"--{name}", "2", code=1)
        assert f"--{name} needs extras/" in said and not (folder / "run").exists()


def test_plain_is_the_page_alone(tmp_path):
    """And the two resume each other's runs."""
    folder = page_with(tmp_path / "page")
    alone = page_with(tmp_path / "alone", link=False)
    said = run_page(folder, "--plain")
    assert "extras/ is not used" in said and "accuracy_after" not in said
    assert not (folder / "run" / "curves.png").exists()
    run_page(alone)
    assert metrics_of(folder / "run") == metrics_of(alone / "run")
    assert "extras/ is not used" not in run_page(folder, max_steps=2, resume=True)
    run_page(folder, "--plain", max_steps=3, resume=True)
    assert [m["step"] for m in metrics_of(folder / "run")] == [1, 2, 3]
    said = run_page(folder, "--plain=true", out="other", code=2)
    assert "a word of the command line" in said


MY_FILES = """class MyFiles(RunFiles):
    def save(self, run):
        print("mine saves", isinstance(self, RunFiles))
        super().save(run)

    def trainer_state(self, run):
        return super().trainer_state(run) | dict(mine=1)


@extra("runs")
def make_files(cfg: Config) -> RunFiles:
    return MyFiles(cfg)


class Run:
    \"\"\"All"""


def test_a_subclass_of_run_files_works_and_a_resume_across_the_change_both_ways(tmp_path):
    maker = '@extra("runs")\ndef make_files(cfg: Config) -> RunFiles:\n    return RunFiles(cfg)\n'
    text = replaced((maker, ""), ('class Run:\n    """All', MY_FILES))
    page, mine = page_with(tmp_path / "page"), page_with(tmp_path / "mine", text)
    for first, then in ((page, mine), (mine, page)):
        run_page(first, out="../run")
        said = run_page(then, out="../run", max_steps=2, resume=True)
        assert ("mine saves True" in said) == (then is mine)
        state = torch_load(tmp_path / "run")
        assert ("mine" in state) == (then is mine) and state["step"] == 2
        assert "identity" in state  # what extras/ add is there, too
        assert [m["step"] for m in metrics_of(tmp_path / "run")] == [1, 2]
        shutil.rmtree(tmp_path / "run")


LAST = '        return logps_of(logits, batch["targets"], self.temperature)\n'
CHANGED = LAST.replace("return", "logps, entropy =")


@pytest.mark.parametrize(
    "old, new, why",
    [
        ("torch.special.entr(logps.detach().exp()).sum(-1)", "logps[:, 0].detach() * 0 + 7", ""),
        (LAST, f"{CHANGED}        return logps, 0 * entropy + 7\n", "its entropy is"),
        (
            LAST,
            f"{CHANGED}        return logps / 2 + logps.detach() / 2, entropy\n",
            "its gradient",
        ),
    ],
)
def test_a_changed_policy_is_what_runs(old, new, why, tmp_path):
    """Packed, if its parts are changed, which both have; else padded, and a line says so."""
    same, changed = page_with(tmp_path / "same"), page_with(tmp_path / "new", replaced((old, new)))
    assert "no PackedPolicy" not in run_page(same)
    said = run_page(changed)
    assert ("no PackedPolicy" in said) == bool(why) and why in said
    [before], [after] = metrics_of(same / "run"), metrics_of(changed / "run")
    assert before["reward"] == after["reward"]
    if "gradient" in why:
        assert after["grad_norm"] == pytest.approx(before["grad_norm"] / 2, rel=1e-3)
    else:
        assert after["entropy"] == 7 != before["entropy"]


def test_what_the_page_computes_stays(tmp_path):
    """Of the run, and with a new argument of a function that extras/ wrap."""
    text = replaced(
        ("+ cfg.max_completion_length  # tokens\n", "+ cfg.max_completion_length + 77\n"),
        (
            "    training_loop(run)\n",
            "    print('LONGEST', run.longest)\n    training_loop(run, 3)\n",
        ),
        ("def training_loop(run: Run) -> None:", "def training_loop(run: Run, top: int) -> None:"),
        (
            "def rollout(run: Run, prompts, stream, step, G: int, temperature, first=0)",
            "def rollout(run: Run, prompts, stream, step, top, G: int, temperature, first=0)",
        ),
        (
            "samples = rollout(run, prompts, stream, step, G",
            "samples = rollout(run, prompts, stream, step, top, G",
        ),
    )
    said = run_page(page_with(tmp_path / "page", text))
    longest = int(re.search(r"LONGEST (\d+)", said)[1])
    assert longest > 77 + 8 and "best checkpoint" not in said and "out_dir:" in said


def test_a_second_copy_in_a_process_is_plain():
    """Wrappers would call other functions of the first."""
    spec = importlib.util.spec_from_file_location("second", f"{HERE}/grpo.py")
    second = importlib.util.module_from_spec(spec)
    sys.modules["second"] = second
    spec.loader.exec_module(second)
    assert second.all_gather([1]) == [1] and not second.USE_EXTRAS


def test_a_config_with_an_unknown_flag_is_no_run(tmp_path):
    folder = page_with(tmp_path / "page")
    run_page(folder)
    path = folder / "run" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | dict(betta=1)))
    assert "betta is no flag" in run_page(folder, max_steps=2, resume=True, code=2)
