"""Tests of view.py: the curves of a run, and a step in the terminal."""

import glob
import json
import os
import random
import re
import struct
import subprocess
import sys
import time
import warnings

import matplotlib
import pytest

import view
from harness import curves

pytest_plugins = "tests.common"


HOSTILE = [
    "<script>alert(1)</script></td></table>{title}%s",
    "\u202eright to left\u200f \ud800 lone surrogate \x1b[31mred\x1b[0m\r\n\x00\u2028",
    "漢字かな交じり文。" * 60,
    "x" * 5000,
    "e\u0301" * 80 + " \u200b👩\u200d👩\u200d👧 عربى",
    "",
    "one\ntwo\tthree & \"four\" 'five'",
]


def write_run(out_dir, steps=30, beta=0.001, **changes):
    os.makedirs(out_dir, exist_ok=True)
    with open(os.path.join(out_dir, "config.json"), "w") as f:
        json.dump({"beta": beta}, f)
    with open(os.path.join(out_dir, "metrics.jsonl"), "w") as f:
        f.write(
            json.dumps(dict(step=0, eval_accuracy=0.1, eval_stderr=0.02, eval_length=9.0)) + "\n"
        )
        for step in range(1, steps + 1):
            row = {
                "step": step,
                "reward": step / steps,
                "grad_norm": 1.0,
                "completions/mean_length": 40 + step,
            }
            row |= {"advantage_abs": 0.5, "frac_reward_zero_std": 0.25}
            row |= dict(kl_k1=0.01 if beta else None, kl=0.01 if beta else None)
            f.write(json.dumps(row | changes) + "\n")
            if step % 10 == 0:  # an eval is a line of its own
                f.write(
                    json.dumps(
                        dict(step=step, eval_accuracy=0.5, eval_stderr=None, eval_length=40.0)
                    )
                    + "\n"
                )
        f.write('{"step": 31, "rew')  # killed here
    with open(os.path.join(out_dir, "completions.jsonl"), "w") as f:
        for step in (10, 20):
            for i, text in enumerate(HOSTILE):
                row = dict(
                    step=step, group=i % 2, prompt=text, completion=text, reward=0.5, length=7
                )
                row |= dict(parts={"accuracy": 1.0, text[:30]: 0.25}, row={"answer": text})
                row |= dict(advantage=[0, 2, -1.5, 1, 0, 3, -2][i])
                row |= dict(finish_reason="length" if i == 3 else "stop")
                f.write(json.dumps(row) + "\n")
        f.write('{"step": 20, "gro')
    return str(out_dir)


def png_size(path):
    with open(path, "rb") as f:
        head = f.read(24)
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    return struct.unpack(">II", head[16:24])


def test_view_draws(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        a = write_run(tmp_path / "a")
        b = write_run(tmp_path / "x" / "run", steps=1, grad_norm=None)
        c = write_run(tmp_path / "y" / "run", beta=0, grad_norm=float("nan"), kl=1e30)
        # nothing but the eval before the first step
        d = write_run(tmp_path / "_$a$", steps=0, beta=0)
        curves.draw([a, b, c, d], str(tmp_path / "all.png"))
        curves.draw([d], os.path.join(d, "curves.png"))
    assert (
        png_size(tmp_path / "all.png") == png_size(tmp_path / "_$a$" / "curves.png") == (1600, 900)
    )


def test_the_picture_explains_only_the_lines_that_it_has(tmp_path):
    short, long = (write_run(tmp_path / str(steps), steps=steps) for steps in (39, 40))
    assert "faint" not in curves.explanation(curves.read_panels([short]))
    assert "faint: every step" in curves.explanation(curves.read_panels([short, long]))


@pytest.mark.slow
def test_view_draws_any_numbers(tmp_path):
    largest, least = sys.float_info.max, 5e-324
    odd = [
        largest,
        -largest,
        least,
        -1e-300,
        0,
        10**20,
        10**400,
        float("nan"),
        "1",
        None,
        [],
        True,
        1e30,
        -1,
    ]
    rng, dirs = random.Random(0), [str(tmp_path / name) for name in "abcd"]
    for d, values in zip(dirs, ([largest], [least, 0], [largest, -largest], odd), strict=True):
        write_run(d, steps=0)
        with open(os.path.join(d, "metrics.jsonl"), "a") as f:
            f.write("\n\x00\x00\n")
            for step in (3, 1, 1, 2):  # a resumed run's lines
                row = {
                    key: rng.choice(values)
                    for _, _, curves in curves.PANELS
                    for key, _, _ in curves
                }
                f.write(json.dumps(row | dict(step=step, eval_stderr=rng.choice(values))) + "\n")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for chosen in (dirs[:1], dirs[2:3], dirs):
            curves.draw(chosen, str(tmp_path / "odd.png"))
            assert png_size(tmp_path / "odd.png") == (1600, 900)


def test_view_reads_what_is_whole(tmp_path):
    rows = curves.read_jsonl(write_run(tmp_path / "a") + "/metrics.jsonl")
    assert sorted({row["step"] for row in rows}) == list(range(31)) and len(rows) == 34
    assert list(curves.series(rows, "reward")) == list(range(1, 31))
    assert list(curves.series(rows, "eval_accuracy")) == [0, 10, 20, 30]
    assert list(curves.series(rows, "eval_stderr")) == [0]
    resumed = [
        dict(step=2, loss=1),
        dict(step=1, loss=2),
        dict(step=2, loss=3, reward=0),
        dict(step=2),
    ]
    # the later line of a step holds
    assert list(curves.series(resumed, "loss").items()) == [(1, 2), (2, 3)]


def test_smoothing_is_a_centred_mean():
    assert curves.smooth([]) == []
    assert curves.smooth([1.0, 3.0]) == [1.0, 3.0]
    assert curves.smooth([2.0] * 100) == [2.0] * 100
    assert curves.smooth([0.0] * 50 + [5.0] + [0.0] * 49)[47:54] == [0.0] + [1.0] * 5 + [0.0]
    assert curves.smooth([float(i) for i in range(80)])[:3] == [1.0, 1.5, 2.0]  # less at the ends
    after_a_spike = curves.smooth([9.9e99, -1e-99] + [0.1] * 398)[12:]
    assert after_a_spike == pytest.approx([0.1] * 388)  # sums from the start would have lost it


def test_smoothing_a_long_run_takes_no_time():
    """Seconds and 1.1 GB when each window was summed anew."""
    values = [float(i % 101) for i in range(200_000)]  # smoothed over 101 of them
    start = time.process_time()
    means = curves.smooth(values)
    assert time.process_time() - start < 5
    assert means[100_000] == 50


def test_one_spike_does_not_flatten_the_rest(tmp_path):
    out = write_run(tmp_path / "a", steps=100)
    with open(f"{out}/metrics.jsonl", "a") as f:
        f.write('\n{"step": 50, "grad_norm": 800, "reward": -0.5}\n')
    panels = {panel["title"]: panel for panel in curves.read_panels([out])}
    norm, reward = panels["Gradient norm"], panels["Reward"]
    assert (norm["low"], norm["high"], norm["unit"]) == (
        0,
        3,
        "L2, before clipping,\nspikes to 800",
    )
    assert (reward["low"], reward["high"], reward["unit"]) == (-0.5, 1, "mean of the samples")


def test_view_finds_the_newest_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(view, "draw", lambda out_dirs, path: None)
    for i, name in enumerate(("out", "out.2", "out.1", "mine", "out.3")):
        write_run(name)
        os.utime(f"{name}/metrics.jsonl", (i, i))
    os.remove("out.3/metrics.jsonl")  # it has not begun to write
    view.main([])
    assert capsys.readouterr().out == os.path.join("out.1", "curves.png") + "\n"
    os.utime("out/metrics.jsonl", (9, 9))  # a run that was resumed
    view.main([])
    assert capsys.readouterr().out == os.path.join("out", "curves.png") + "\n"


def test_view_step(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "60")
    view.main([write_run(tmp_path / "a"), "--step", "-1"])
    out = capsys.readouterr().out
    assert out.startswith("step 20, 7 samples")
    # nor a lone surrogate
    assert all(line.isprintable() and len(line) < 200 for line in out.split("\n"))
    for shown in (
        r"\x1b[31m",
        r"\u202e",
        r"\ud800",
        "accuracy 1",
        "right, cut off",
        "x ... x",
        "漢字",
    ):
        assert shown in out
    view.main([str(tmp_path / "a"), "--step", "10"])
    assert capsys.readouterr().out.startswith("step 10, 7 samples")


def test_view_step_shows_both_ends_of_a_text(tmp_path, capsys):
    write_rows(tmp_path, [dict(completion="It is" + " a" * 4000 + " so 42")])
    view.main([str(tmp_path), "--step"])
    assert re.search("\nIt is a a.* \\.\\.\\. .*a a so 42\n", capsys.readouterr().out)


def write_rows(out_dir, rows):
    whole = dict(
        step=1, group=0, prompt="p", completion="c", reward=1, parts={}, advantage=0, length=5
    )
    whole |= dict(finish_reason="stop")
    with open(os.path.join(out_dir, "completions.jsonl"), "w") as f:
        f.writelines(json.dumps(whole | row) + "\n" for row in rows)


def test_view_step_is_by_group(tmp_path, capsys):
    """Groups by signal, samples by reward, the prompt and equal samples once; a sample without a
    reward comes last."""
    rows = [
        dict(group=0, prompt="weak", completion=f"w{i}", reward=r, advantage=0.1)
        for i, r in enumerate((0, None, 2))
    ]
    rows += [
        dict(group=1, prompt="strong", completion=c, reward=r, advantage=a)
        for c, r, a in [("no", 0, -1)] * 3
    ]
    rows += [dict(group=1, prompt="strong", completion="yes", reward=1, advantage=3)]
    rows += [
        dict(
            group=1,
            prompt="strong",
            completion="no",
            reward=0,
            advantage=-1,
            finish_reason="length",
        )
    ]
    write_rows(tmp_path, rows)
    view.main([str(tmp_path), "--step"])
    out = capsys.readouterr().out
    places = [
        out.index(text)
        for text in (
            "group 1: strong",
            "yes",
            "3 × ",
            "no\n",
            "cut off",
            "group 0: weak",
            "w2",
            "w0",
            "w1",
        )
    ]
    assert places == sorted(places) and out.count("strong") == 1 and out.count("\nno\n") == 2
    assert (
        "1 of 5 right, mean |advantage| 1.4" in out and "1 of 3 right, mean |advantage| 0.1" in out
    )


GAME = dict(  # the third turn repeats the reply before it
    completion="1+2=3 3+4=77",
    turns=["1+2=", " 3+4=", "7"],
    replies=["3", "7"],
    length=11,
)
TOOL_WORDS = dict(
    completion='<call>{"n": "ü"}<eos>\n<tool>5<tool>{}\n<end>It is 5.',
    turns=['<call>{"n": "ü"}', "It is 5."],
    replies=[
        [
            dict(role="tool", name="look", content="5"),
            dict(role="tool", name="again", content="{'error': 'no'}"),
        ]
    ],
    length=9,
)


def test_view_step_shows_who_wrote_what(tmp_path, capsys):
    failed = dict(turns=["1+2="], replies=[], completion="1+2=", failure="timeout: 10 s")
    failed |= dict(reward=-1, length=4)
    write_rows(tmp_path, [GAME, TOOL_WORDS | dict(reward=0), failed])
    view.main([str(tmp_path), "--step"])
    samples = capsys.readouterr().out.split("\n\n")[2:]
    assert samples == [
        "reward 1, right, ended, advantage +0, 11 tokens\n"
        "     policy: 1+2=\n"
        "environment: 3\n"
        "     policy:  3+4=\n"
        "environment: 7\n"
        "     policy: 7",
        "reward 0, wrong, ended, advantage +0, 9 tokens\n"
        '     policy: <call>{"n": "ü"}\n'
        "       look: 5\n"
        "      again: {'error': 'no'}\n"
        "     policy: It is 5.",
        "reward -1, wrong, ended, advantage +0, 4 tokens, "
        "environment failed: timeout: 10 s\n"
        "     policy: 1+2=\n",
    ]


def test_episodes_that_are_equal_are_shown_once(tmp_path):
    by_itself = GAME | dict(turns=["1+2=3 3+4=77"], replies=[])
    write_rows(tmp_path, [GAME, GAME, by_itself])
    [card] = view.make_cards(view.read_steps(tmp_path)[1])
    assert [sample["count"] for sample in card["samples"]] == [2, 1]
    assert [text.split(":")[1] for text in card["samples"][0]["pieces"]] == [
        " 1+2=", " 3", "  3+4=", " 7", " 7"
    ]  # fmt: skip
    assert [sample["replied"] for sample in card["samples"]] == [[1, 3], []]


def test_who_wrote_a_noted_token(tmp_path):
    texts = [*"1+2=3 3+4=77", ""]
    sampled = [1, 1, 1, 1, 0, 1, 1, 1, 1, 1, 0, 1, 1]
    write_rows(tmp_path, [GAME | dict(tokens=dict(text=texts, sampled=sampled, push=[9] * 13))])
    rows = view.read_steps(tmp_path)[1]
    [card] = view.make_cards(rows)
    [sample] = card["samples"]
    assert sample["pieces"] == texts and sample["replied"] == [4, 10]
    [card] = view.make_cards(rows, by_token=False)
    [sample] = card["samples"]
    assert [text.strip() for text in sample["pieces"]] == [
        "policy: 1+2=",
        "environment: 3",
        "policy:  3+4=",
        "environment: 7",
        "policy: 7",
    ]


def test_right_is_what_the_first_reward_function_says(tmp_path):
    """As pass@k counts it; without one, the reward. Neither, where it has failed."""
    cases = {
        (("a", 1), ("b", -5)): "right",
        (("a", 0.5), ("b", 9)): "wrong",
        (): "right",
        (("a", None), ("b", 1)): None,
    }
    for parts, verdict in cases.items():
        row = dict(
            completion="c",
            reward=1,
            parts=dict(parts),
            finish_reason="length",
            advantage=0,
            length=1,
            group=0,
            prompt="p",
        )
        assert view.make_card([row])["samples"][0]["verdicts"] == [
            v for v in (verdict, "cut off") if v
        ]


@pytest.mark.parametrize(
    "flags, says",
    [
        (["no_such_dir"], "no_such_dir"),
        (["empty"], "metrics.jsonl"),
        (["empty"], "empty has no metrics.jsonl: is it the directory of a run?"),
        (["a", "nowhere"], "nowhere has no metrics.jsonl"),
        (["empty", "--step"], "empty has no completions.jsonl"),
        (["half"], "half/metrics.jsonl has no metrics"),
        (["half", "--step"], "half/completions.jsonl has no completions yet"),
        (["empty", "--html", "x.html"], "completions.jsonl"),
        (["a", "--html", "x.html", "--step", "15"], "logged steps: 10 to 20"),
        (["a", "--html", "no/where.html"], "no/where.html"),
        (["a", "--html", "x.html", "--out", "x.png"], "--out"),
        (["a", "--step", "15"], "logged steps: 10 to 20"),
        (["a", "--step", "many"], "many"),
        (["a", "--stepp", "1"], "--stepp"),
        (["a", "b", "--step", "1"], "--step and --html take one run"),
        (["a", "--step", "10", "--out", "x.png"], "--out"),
        (["a", "--out", "x.unknown"], "unknown"),
        (["a", "--source", "x.html"], "--source takes no run"),
        (["--source", "x.html", "--out", "x.png"], "--source takes no run"),
        (["--source", "x.html", "--step"], "--source takes no run"),
        (["--source", "x.html", "--html", "x.html"], "--source takes no run"),
        (["--source", "x.py"], "--source: x.py does not end in .html"),
        (["--source", ""], "does not end in .html"),
        (["--source", "no/where.html"], "no/where.html"),
        (["--source"], "--source"),
        ([], "no run here (out, out.1, ...)"),
    ],
)
def test_view_errors_are_one_line(tmp_path, monkeypatch, capsys, flags, says):
    monkeypatch.chdir(tmp_path)
    write_run("a"), write_run("b"), os.mkdir("empty")
    os.mkdir("half")
    for log in ("metrics", "completions"):
        with open(f"half/{log}.jsonl", "w") as f:
            f.write('{"step": 1, "rew')
    with pytest.raises(SystemExit) as stop:
        view.main(flags)
    assert stop.value.code == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and says in err and not glob.glob("x.*")


def test_view_draws_where_a_matplotlibrc_asks_for_latex(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(matplotlib.rcParams, "text.usetex", True)  # and there is no LaTeX
    view.main([write_run(tmp_path / "a")])
    assert capsys.readouterr().out == f"{tmp_path}/a/curves.png\n"
    assert png_size(tmp_path / "a" / "curves.png") == (1600, 900)


@pytest.mark.parametrize("error", [RuntimeError("no font\nand more"), ZeroDivisionError("zero")])
def test_whatever_drawing_raises_is_one_line(tmp_path, monkeypatch, capsys, error):
    def draw(out_dirs, path):
        raise error

    monkeypatch.setattr(view, "draw", draw)
    with pytest.raises(SystemExit) as stop:
        view.main([write_run(tmp_path / "a")])
    assert stop.value.code == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and err.startswith("view.py: ")
    assert str(error).split("\n")[0] in err


def test_view_command_line(tmp_path):
    write_run(tmp_path / "a"), write_run(tmp_path / "b")

    def run(*flags, **env):
        command = [sys.executable, view.__file__, *flags]
        return subprocess.run(
            command, cwd=tmp_path, env=os.environ | env, capture_output=True, text=True
        )

    done = run("a", "b")
    assert (done.returncode, done.stdout, done.stderr) == (0, "curves.png\n", "")
    assert png_size(tmp_path / "curves.png") == (1600, 900)
    done = run("a", "--step", PYTHONIOENCODING="ascii")  # not every terminal is UTF-8
    assert done.returncode == 0 and "step 20" in done.stdout and done.stderr == ""
    assert done.stdout.isascii()
    head = f"{sys.executable} {view.__file__} a --step | head -1"
    done = subprocess.run(head, cwd=tmp_path, shell=True, capture_output=True, text=True)
    assert done.stdout.startswith("step 20") and done.stderr == ""
    done = run("a", "--step", "30")
    assert done.returncode == 2 and done.stdout == "" and "Traceback" not in done.stderr
