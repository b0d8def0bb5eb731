"""extras/compare.py: sides, numbers, the interval, the picture, and the runs that it makes."""

import json
import re
import runpy
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure

from tests.common import HERE, metrics_of

SCRIPT = f"{HERE}/extras/compare.py"
SCRIPT_OF_A_RUN = """
import json, os, sys
flags = dict(zip(sys.argv[1::2], sys.argv[2::2]))
out = flags["--out_dir"]
with open("starts.txt", "a") as file:
    file.write(" ".join(sys.argv) + "\\n")
os.makedirs(out, exist_ok=True)
config = dict(seed=int(flags["--seed"]), out_dir=out, resume=False, max_steps=4, eval_data="")
config["about"] = dict(script=sys.argv[0])
json.dump(config, open(f"{out}/config.json", "w"))
with open(f"{out}/metrics.jsonl", "a") as file:
    done = len(open(file.name).readlines())
    for step in range(done + 1, 5):
        file.write(json.dumps(dict(step=step, reward=QUALITY * step)) + "\\n")
        print(f"step {step}/4 reward")
        if step == 2 and os.path.exists("stop"):
            sys.exit("a last line")
"""


def write_run(folder, rewards, evals=(), **flags):
    """rewards: of step 1, 2, ...; evals: {step: accuracy}."""
    folder.mkdir()
    lines = [dict(step=i, reward=r, tokens=10) for i, r in enumerate(rewards, 1)]
    for step, accuracy in dict(evals).items():
        lines.append(dict(step=step, eval_accuracy=accuracy, eval_stderr=0.01, eval_length=3))
    lines = [json.dumps(line) + "\n" for line in sorted(lines, key=lambda line: line["step"])]
    (folder / "metrics.jsonl").write_text("".join(lines))
    config = dict(seed=0, out_dir=str(folder), resume=False, max_steps=len(rewards), eval_data="e")
    (folder / "config.json").write_text(json.dumps(config | flags))
    return folder.name


def write_side(folder, name, means, first_seed=0):
    """A run for each mean reward, with the seeds from first_seed on."""
    runs = []
    for seed, mean in enumerate(means, first_seed):
        runs.append(write_run(folder / f"{name}.{seed}", [mean - 0.1, mean + 0.1], seed=seed))
    return f"{name}={','.join(runs)}"


@pytest.fixture
def compare(tmp_path, monkeypatch, capsys):
    """compare(arguments) -> exit code, output, errors. In this process; it saves no picture."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(f"{HERE}/extras")
    monkeypatch.setattr(Figure, "savefig", lambda _, path: Path(path).touch())

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", [SCRIPT, *arguments])
        code = 0
        with np.errstate(), np.printoptions():
            try:
                runpy.run_path(SCRIPT, run_name="__main__")
            except SystemExit as stop:
                code = stop.code
        return code, *capsys.readouterr()

    return run


def last_difference(output):
    """The last line's difference, half of its interval, and verdict."""
    found = re.search(r"(\S+) \+- (\S+), (.*)", output.splitlines()[-1])
    return float(found[1]), float(found[2]), found[3]


def test_runs_of_the_same_flags_are_a_side_and_other_flags_are_printed(tmp_path):
    for number in range(4):
        flags = dict(learning_rate=[0.5, 0.25][number // 2], beta=0.125, resume=number == 1)
        write_run(tmp_path / f"out.{number}", [0.1, number], {0: 0.2}, seed=number % 2, **flags)
    command = [sys.executable, SCRIPT, "out.0", "out.1", "out.2", "out.3"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and (tmp_path / "compare.png").stat().st_size > 10_000
    assert "0.5" in done.stdout and "0.25" in done.stdout and "0.125" not in done.stdout
    assert last_difference(done.stdout)[0] == pytest.approx(1.0)  # 1.3 - 0.3


def test_pairs_have_students_interval_and_other_seeds_welchs(compare, tmp_path):
    a = write_side(tmp_path, "a", [0.5, 0.6, 0.9])
    b = write_side(tmp_path, "b", [0.6, 0.8, 1.2])
    c = write_side(tmp_path, "c", [0.6, 0.8, 1.2], first_seed=3)
    half = 4.303 * 0.1 / 3**0.5
    assert last_difference(compare(a, b)[1])[:2] == pytest.approx((0.2, half), rel=0.02)
    variances = np.var([0.5, 0.6, 0.9], ddof=1) + np.var([0.6, 0.8, 1.2], ddof=1)
    half = 4.303 * (variances / 3) ** 0.5
    assert last_difference(compare(a, c)[1])[:2] == pytest.approx((0.2, half), rel=0.02)


def test_the_verdict_is_honest(compare, tmp_path):
    """As often as 95 % says: runs of one distribution; and a difference of two deviations."""
    out = compare(*[write_side(tmp_path, side, [1, 2, 3]) for side in "yz"])[1]
    same = last_difference(out)[2]
    difference = runpy.run_path(SCRIPT)["difference"]
    rng = np.random.default_rng(0)
    verdicts = []
    for _ in range(200):
        a, b, c = ({seed: rng.normal(0.5, 0.03) for seed in range(i, i + 3)} for i in (0, 3, 0))
        worse = {seed: value - 0.2 for seed, value in c.items()}
        verdicts.append([difference(a, other).endswith(same) for other in (b, c, worse)])
    unpaired, paired, worse = np.mean(verdicts, 0)
    assert unpaired > 0.93 and paired > 0.93 and worse < 0.1


def test_only_steps_that_all_runs_have_count(compare, tmp_path):
    write_run(tmp_path / "short", [0.5, 0.5], seed=0)
    write_run(tmp_path / "long", [0.5, 0.5, 9.0, 9.0], seed=0)
    write_run(tmp_path / "long.1", [0.5, 0.5, 9.0], seed=1)
    with open(tmp_path / "short" / "metrics.jsonl", "a") as file:
        file.write('{"step": 3, "rew')  # it goes on
    write_run(tmp_path / "short.1", [0.5, 0.5, 0.5], seed=1)
    assert last_difference(compare("a=short,short.1", "b=long,long.1")[1])[:2] == (0, 0)


def test_one_run_and_runs_without_evals_have_numbers(compare, tmp_path):
    write_run(tmp_path / "out", [0.1, 0.7])
    write_run(tmp_path / "out.1", [0.1, 0.7], {0: 0.3, 2: 0.625}, learning_rate=1)
    for names, number in ((["out"], "0.7"), (["out", "out.1"], "0.625")):
        code, out, _ = compare(*names)
        assert code == 0 and number in out


@pytest.mark.parametrize("names", [[], ["nowhere"], ["began"], ["out", "--seeds", "many"]])
def test_mistakes_are_one_line(names, compare, tmp_path):
    write_run(tmp_path / "out", [0.1])
    write_run(tmp_path / "began", [], {0: 0.5})
    code, out, err = compare(*names)
    assert (code, out, err.count("\n")) == (2, "", 1)


def test_other_eval_rows_are_refused(compare, tmp_path):
    for name in "ab":
        write_run(tmp_path / name, [0.1], {0: 0.5}, about=dict(eval_rows=f"digest {name}"))
    code, out, err = compare("a", "b")
    assert (code, out, err.count("\n")) == (2, "", 1) and not Path("compare.png").exists()


def test_without_matplotlib_the_numbers_are_printed(compare, tmp_path, monkeypatch):
    write_run(tmp_path / "out", [0.625])
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    _, out, err = compare("out")
    assert "0.625" in out and err.count("\n") == 1


def test_run_makes_what_is_missing_goes_on_and_leaves_out_what_fails(compare, tmp_path):
    Path("base.py").write_text(SCRIPT_OF_A_RUN.replace("QUALITY", "0.1"))
    Path("mine.py").write_text(SCRIPT_OF_A_RUN.replace("QUALITY", "0.2"))
    Path("bad.py").write_text("import sys\nsys.exit('no such thing')")
    arguments = ["--run", "base.py", "mine.py --mine 1", "bad.py", "--seeds", "2", "--jobs", "2"]
    starts = Path("starts.txt")
    Path("stop").touch()
    code, out, _ = compare(*arguments, "--beta", "1")
    assert code == 2 and out.count("a last line") == 4 and out.count("no such thing") == 2
    Path("stop").unlink()
    own = ["--mine 1" in line for line in starts.read_text().splitlines()]
    assert own == ["mine.py" in line for line in starts.read_text().splitlines()]
    starts.unlink()
    code, out, _ = compare(*arguments, "--beta", "1")
    assert code == 0 and last_difference(out)[:2] == (0.25, pytest.approx(0, abs=1e-9))
    assert starts.read_text().count("--resume") == 4 and out.count("no such thing") == 2
    before = starts.read_text()
    compare(*arguments, "--beta", "1")
    assert starts.read_text() == before  # they are all there
    compare(*arguments, "--beta", "2")
    Path("base.py").write_text(Path("base.py").read_text() + "# a comment\n")
    compare(*arguments, "--beta", "2")
    new = starts.read_text().removeprefix(before)
    assert new.count("\n") == 6 and "--resume" not in new
    starts.unlink()
    for value in "112":  # another reward under the same name
        Path("rewards.py").write_text(value)
        compare("--run", "base.py", "--seeds", "1", "--reward", "rewards.py:f,format")
    assert starts.read_text().count("\n") == 2


@pytest.mark.slow
def test_real_runs_killed_and_started_again(tmp_path):
    """A comment changes nothing. Runs that were killed end as those that were not."""
    for name in ("grpo.py", "reward.py", "sample_data", "extras"):
        (tmp_path / name).symlink_to(f"{HERE}/{name}")
    (tmp_path / "mine.py").write_text(Path(HERE, "grpo.py").read_text() + "# a comment\n")
    flags = "--seeds 2 --jobs 2 --max_steps 4 --num_prompts 3 --save_every 1 --eval_data=".split()
    command = [sys.executable, SCRIPT, "--run", "grpo.py", "mine.py", *flags]
    first = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.DEVNULL)
    while not any(path.read_text() for path in tmp_path.glob("compare/*/metrics.jsonl")):
        time.sleep(0.1)
    first.kill()  # its runs go on
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert last_difference(done.stdout)[:2] == (0, 0), done.stderr
    base, base_1, mine, _ = [metrics_of(run) for run in sorted(tmp_path.glob("compare/[gm]*"))]
    assert base == mine != base_1 and [line["step"] for line in base] == [1, 2, 3, 4]
