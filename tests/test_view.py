"""tools/view.py: curves, the samples of a step, the page; and links and commands of documents."""

import base64
import dataclasses
import json
import math
import re
import runpy
import shlex
import shutil
import subprocess
import tomllib
import types
import zlib
from datetime import datetime, timedelta
from pathlib import Path

import numpy as np
import pytest

import grpo
from extras import runs, screen
from tests.common import HERE, small_run, tokenizer_of
from tools import view

HOSTILE = '</script><img src=x onerror="document.title=1"><script>document.title=2</script>\x1b[2J'


def write_run(folder, rows=(), metrics=()):
    folder.mkdir(exist_ok=True)
    for name, lines in (("completions.jsonl", rows), ("metrics.jsonl", metrics)):
        (folder / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(folder)


def sample(group, text, reward, advantage, **more):
    row = dict(step=1, group=group, prompt=f"question {group}", completion=text, reward=reward)
    row |= dict(rewards=dict(answer=reward), advantage=advantage, length=len(text))
    return row | dict(finish_reason="stop", row=dict(answer=text)) | more


METRICS = [
    dict(step=0, eval_accuracy=0.2, eval_stderr=0.1),
    dict(step=1, reward=0.5, loss=0.0, grad_norm=1.0),
    dict(step=2, reward=None, loss=math.nan, grad_norm=1e300),
]


def test_a_real_run_is_drawn_summed_up_and_shown_by_step(tmp_path, capsys):
    out = tmp_path / "run"
    small_run(out, max_steps=2)
    capsys.readouterr()
    view.main([str(out)])
    summary = capsys.readouterr().out
    assert "step 2" in summary and "curves.png" in summary
    view.main([str(out), "--step", "1"])
    shown = capsys.readouterr().out
    assert shown.count("== group") == 3 and "step 1" in shown
    assert abs(datetime.now() - datetime.fromisoformat(view.about(out)[-16:])) < timedelta(hours=1)
    view.main([str(out), "--html"])
    page = (out / "page.html").read_text()
    assert "DATA" not in page
    assert not re.search(r"(src|href)=|https?://(?!www.w3.org/2000/svg)", page)


@pytest.mark.parametrize("metrics", [METRICS, METRICS[:1], METRICS[1:2], [dict(step=1)]])
def test_any_numbers_are_drawn(metrics, tmp_path):
    out = write_run(tmp_path / "run", metrics=metrics)
    with open(f"{out}/metrics.jsonl", "a") as file:
        file.write('{"step": 3, "rew')  # the run was killed
    assert Path(view.draw(out)).stat().st_size > 1000


def test_what_a_run_logs_of_its_own_has_curves(tmp_path):
    """And a single reward has one curve."""
    metrics = {"reward": 0.5, "rewards/a/mean": 0.5, "logged/b": 9.0, "turns/mean": 2.0}
    lines = [dict(step=1) | metrics | {"tools/call_frequency": 1.0}]
    curves = [curve["name"] for panel in view.make_panels(lines) for curve in panel["curves"]]
    assert sorted(curves) == ["logged/b", "reward", "tools/call_frequency", "turns/mean"]
    assert Path(view.draw(write_run(tmp_path / "run", metrics=lines))).stat().st_size > 1000
    curves = view.make_panels([lines[0] | {"rewards/c/mean": 0.5}])[0]["curves"]
    assert len(curves) == 3


def read_page(out):
    """What the page unpacks."""
    packed = re.search(r'const packed = "(.*)"', Path(out, "page.html").read_text())[1]
    return json.loads(zlib.decompress(base64.b64decode(packed)))


def test_a_page_of_a_long_run_leaves_steps_out_and_says_which_run_it_is(tmp_path, monkeypatch):
    rows = [sample(0, "long " * 1000, 1.0, 1.0) | dict(step=step) for step in range(1, 31)]
    out = write_run(tmp_path / "run", rows, METRICS)
    Path(out, "config.json").write_text(json.dumps(dict(model="my/model", reward="r", seed=7)))
    view.main([out, "--html"])
    assert len(read_page(out)["groups"]) == 30
    monkeypatch.setattr(view, "PAGE_BYTES", 50_000)
    view.main([out, "--html", "--step", "12"])
    page = read_page(out)
    assert len(json.dumps(page)) < 80_000 and page["n_steps"] == 30 and page["step"] == 12
    assert {"1", "12", "30"} < page["groups"].keys()
    assert "my/model" in page["about"] and "7" in page["about"]


def test_groups_by_signal_samples_by_reward_equal_ones_once(tmp_path, capsys):
    rows = [
        sample(0, "zero", 0.0, 0.0),
        sample(0, "zero", 0.0, 0.0),
        sample(1, "bad", 0.0, -1.0),
        sample(1, "good", 1.0, 1.0),
        sample(1, "none", None, 0.0, failure="KeyError: no"),
    ]
    del rows[-1]["reward"]  # JSON has no nan: the trainer leaves such a reward out
    rows[-1]["rewards"] = {}
    out = write_run(tmp_path / "run", rows, METRICS)
    view.main([out, "--step"])
    shown = capsys.readouterr().out
    words = ["question 1", "good", "bad", "none", "question 0", "2 x ", "zero"]
    places = [shown.index(word) for word in words]
    assert places == sorted(places)
    assert shown.count("zero") == 1 and "KeyError: no" in shown


def test_advantages_token_by_token_are_counted_whole(tmp_path, capsys):
    """In the log, the metrics, the choice of the groups with tokens, and the order of groups."""
    samples = []
    for group, advantages in enumerate([[1, 1, 1, 1], [0, 3, -3, 0], [0, 0, 8, 0]]):
        prompt = grpo.Prompt(np.arange(1), f"question {group}", {})
        samples.append(grpo.Sample(group, prompt, np.arange(4), np.zeros(4)))
        samples[-1].advantages[:] = advantages
    samples[2].trainable[2] = False  # this advantage teaches nothing
    rows = grpo.RunFiles.rows_of(None, types.SimpleNamespace(step=1), samples)
    rows = runs.more_columns(rows, samples, tokenizer_of(f"{HERE}/sample_data/model"))
    names = ["advantage", "advantage_sum", "advantage_abs", "advantage_max"]
    logged = [[row[name] for name in names if name in row] for row in rows]
    assert logged == [[1], [0, 0, 1.5, 3], [0]]
    assert [row["group"] for row in rows if "tokens" in row] == [0, 1]
    metrics = grpo.sample_metrics(samples) | screen.details(samples)
    assert metrics["advantage_abs"] == pytest.approx(2.5 / 3)
    assert metrics["frac_reward_zero_std"] == pytest.approx(1 / 3)
    view.main([write_run(tmp_path / "run", rows, METRICS), "--step"])
    shown = capsys.readouterr().out
    assert shown.index("question 1") < shown.index("question 0") < shown.index("question 2")


def test_an_episode_shows_who_wrote_what(tmp_path, capsys):
    rows = [sample(0, "4", 1.0, 1.0, turns=["3+1=", "4"], replies=["4"])]
    view.main([write_run(tmp_path / "run", rows, METRICS), "--step"])
    shown = capsys.readouterr().out
    assert re.search(r"policy: 3\+1=\n *environment: 4\n *policy: 4", shown)


def test_hostile_text_is_text(tmp_path, capsys):
    rows = [sample(0, HOSTILE, 1.0, 1.0, extra={HOSTILE: HOSTILE})]
    out = write_run(tmp_path / "run", rows, METRICS)
    view.main([out, "--step"])
    assert "\x1b" not in capsys.readouterr().out
    view.main([out, "--html"])
    assert "onerror" not in (tmp_path / "run" / "page.html").read_text()


@pytest.mark.slow
def test_hostile_text_is_text_in_a_browser(tmp_path):
    if shutil.which("chromium") is None:
        pytest.skip("chromium is not installed")
    tokens = dict(text=[HOSTILE, "x"], logp=[-1.0, -2.0], advantage=[1.0, 1.0], sampled=[1, 0])
    rows = [sample(0, HOSTILE, 1.0, 1.0, tokens=tokens), sample(1, "other", 0.0, -1.0)]
    out = write_run(tmp_path / "run", rows, METRICS)
    view.main([out, "--html"])
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=4000"]
    command = ["chromium", *options, "--dump-dom", f"file://{out}/page.html"]
    dom = subprocess.run(command, capture_output=True, text=True, timeout=120).stdout
    assert "<title>A run of grpo.py</title>" in dom  # no script of the text has run
    assert "&lt;img src=x onerror=" in dom and "<img" not in dom
    assert "question 0" in dom and "\\u001b[2J" in dom
    assert dom.count("<small>No colours") == 1  # the tokens of group 1 were not logged


@pytest.mark.parametrize(
    "args", [["nowhere"], ["RUN", "--step", "9"], ["--stepp"], ["RUN", "more"]]
)
def test_errors_are_one_line(args, tmp_path, capsys):
    run = write_run(tmp_path / "run", [sample(0, "a", 1.0, 0.0)], METRICS)
    with pytest.raises(SystemExit) as stop:
        view.main([arg.replace("RUN", run) for arg in args])
    assert stop.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


# ------------------------------------------------------------------------------------------------
# Documents


def test_the_pins_of_pyproject_are_those_of_the_requirements():
    def pins(name):
        return set(re.findall(r"(?m)^\w[^;+\s]*", Path(HERE, name).read_text()))

    project = tomllib.loads(Path(HERE, "pyproject.toml").read_text())["project"]
    extras = {name: set(extra) for name, extra in project["optional-dependencies"].items()}
    assert extras["cpu"] == pins("requirements-cpu.txt")
    assert extras["gpu"] == pins("requirements.txt")
    exact = {pin for extra in extras.values() for pin in extra if "==" in pin}
    assert exact - pins("requirements-test.txt") <= {pin for pin in exact if pin.startswith("vllm")}


DOCUMENTS = ["README.md", "docs/REFERENCE.md", "docs/CONTRIBUTING.md"]
DOCUMENTS += ["variants/README.md", "studies/RESULTS.md"]


@pytest.mark.parametrize("name", DOCUMENTS)
def test_links_lead_somewhere_and_commands_are_valid(name):
    """To a file, and to a heading of it; flags exist, and whole commands are accepted."""
    text = Path(HERE, name).read_text()
    folder = Path(HERE, name).parent
    for target, heading in re.findall(r"\]\((?!http)([^)#]*)#?([^)]*)", text):
        path = folder / target if target else Path(HERE, name)
        assert path.exists(), target
        headings = re.findall(r"(?m)^#+ (.*)", path.read_text()) if heading else [""]
        assert heading in [re.sub(r"[^\w -]", "", h).lower().replace(" ", "-") for h in headings]
    flags = set(re.findall(r"--([a-z]+_[a-z_]+)", text))  # with an underscore: ours, not pip's
    others = {"nproc_per_node", "rdzv_backend", "rdzv_endpoint", "rdzv_id"}  # torchrun's
    others |= {"node_rank", "master_addr", "master_port"}
    assert flags <= {f.name for f in dataclasses.fields(grpo.Config)} | others
    for block in re.findall(r"```(?:sh|bash)?\n(.*?)```", text, re.DOTALL):
        for line in block.replace("\\\n", " ").split("\n"):
            found = re.search(r"\bgrpo\.py((?: [^#\n]*)?)", line)
            if found and re.match(r" *(torchrun|python|\.venv/bin/\w+)", line):
                grpo.parse_flags(shlex.split(found[1]))


RIGHT = ["42", "It is $42$.", "**42**", "<think>17+25=41?</think>42"]
WRONG = ["", "142", "4.42", "It is 41", "<think>42</think> 41", "<think>42</think>"]


def test_readmes_example_of_a_reward_row_and_command(tmp_path, monkeypatch):
    """And its agent: each command trains, with the bundled model and smaller numbers."""
    text = Path(HERE, "README.md").read_text()
    [row] = re.findall(r'`(\{"prompt".*?\})`', text)
    [code] = re.findall(r"```python\n(def my_reward.*?)```", text, re.DOTALL)
    (tmp_path / "rows.jsonl").write_text(f"{row}\n".replace("What is 17 + 25?", "017+025=") * 2)
    (tmp_path / "my_rewards.py").write_text(code)
    my_reward = runpy.run_path(str(tmp_path / "my_rewards.py"))["my_reward"]
    done = json.loads(row) | dict(finish_reason="stop")
    assert [my_reward(c, done) for c in RIGHT + WRONG] == [1] * len(RIGHT) + [0] * len(WRONG)
    assert my_reward("42", done | dict(finish_reason="length")) == 0
    (tmp_path / "sample_data").symlink_to(f"{HERE}/sample_data")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(view, "draw", str)  # it takes longer than a step
    small = "--max_steps 1 --num_prompts 2 --max_completion_length 20 --rollout hf"
    for words in ("--train_data rows.jsonl", "--environment"):
        commands = text.replace("\\\n", "").replace("MODEL", "sample_data/model")
        [flags] = re.findall(rf"(?m)^python3 grpo\.py (.*{words}.*?)(?:--eval_data .*)?$", commands)
        assert grpo.main(shlex.split(f"{flags} {small}")) == 0
