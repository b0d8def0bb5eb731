"""tools/compare.py: sides, numbers, the interval, the picture, and the runs that it makes.
tools/selfcheck.py: what it says if a run fails."""

import importlib
import json
import os
import re
import runpy
import subprocess
import sys
import time
import types
import unittest.mock
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure

import grpo
from extras import digests
from grpo import Prompt
from reward import load_rewards
from tests.common import HERE, fake_run, metrics_of, small_config, small_rows, small_run
from tools import selfcheck

SCRIPT = f"{HERE}/tools/compare.py"
SAVEFIG = Figure.savefig
SAME = dict(reward_of="1", eval_accuracy_of="1")  # quantities, in the about of config.json
SCRIPT_OF_A_RUN = """
import hashlib, json, os, sys
flags = dict(zip(sys.argv[1::2], sys.argv[2::2]))
out = flags["--out_dir"]
with open("starts.txt", "a") as file:
    file.write(" ".join(sys.argv) + "\\n")
os.makedirs(out, exist_ok="--resume" in sys.argv)
if os.path.exists("kill1"):
    os.kill(os.getpid(), 9)
config = dict(seed=int(flags["--seed"]), out_dir=out, resume=False, max_steps=4, reward="r.py:f")
read = [sys.argv[0], "r.py"]
digests = [hashlib.sha256(open(path, "rb").read()).hexdigest()[:8] for path in read]
config["about"] = dict(SAME, files=dict(zip(read, digests)))
with open(f"{out}/config.json", "w") as file:
    json.dump(config, file)
if os.path.exists("kill2"):
    os.kill(os.getpid(), 9)
with open(f"{out}/metrics.jsonl", "a") as file:
    done = len(open(file.name).readlines())
    for step in range(done + 1, 5):
        file.write(json.dumps(dict(step=step, reward=QUALITY * step)) + "\\n")
        print(f"step {step}/4 reward")
        if step == 2 and os.path.exists(f"stop{flags['--seed']}"):
            sys.exit(0)
"""


def with_path(folder):
    """The environment with one more folder to import from."""
    folders = [folder, os.environ.get("PYTHONPATH", "")]
    return os.environ | dict(PYTHONPATH=os.pathsep.join(filter(None, folders)))


def write_run(folder, rewards, evals=(), **flags):
    """rewards: of step 1, 2, ...; evals: {step: accuracy}."""
    folder.mkdir()
    lines = [dict(step=i, reward=r, tokens=10) for i, r in enumerate(rewards, 1)]
    for step, accuracy in dict(evals).items():
        lines.append(dict(step=step, eval_accuracy=accuracy, eval_stderr=0.01, eval_length=3))
    lines = [json.dumps(line) + "\n" for line in sorted(lines, key=lambda line: line["step"])]
    (folder / "metrics.jsonl").write_text("".join(lines))
    config = dict(seed=0, out_dir=str(folder), resume=False, max_steps=len(rewards), about=SAME)
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
    monkeypatch.syspath_prepend(f"{HERE}/tools")
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


def test_runs_of_the_same_flags_are_a_side_and_other_flags_are_printed(compare, tmp_path):
    for number in range(4):
        flags = dict(learning_rate=[0.5, 0.25][number // 2], beta=0.125, resume=number == 1)
        write_run(tmp_path / f"out.{number}", [0.1, number], {2: 0.2}, seed=number % 2, **flags)
    with unittest.mock.patch("matplotlib.figure.Figure.savefig", SAVEFIG):
        code, out, _ = compare("out.0", "out.1", "out.2", "out.3")
    assert code == 0 and (tmp_path / "compare.png").stat().st_size > 10_000
    assert "0.5" in out and "0.25" in out and "0.125" not in out
    assert last_difference(out)[0] == pytest.approx(1.0)  # 1.3 - 0.3


@pytest.mark.parametrize("changed", ["", "model", "rows.jsonl"])
def test_seeds_of_two_checkouts_on_two_days_are_a_side(changed, compare, tmp_path):
    """What has a digest is known by it."""
    for seed, there in enumerate(("/a", "/b/c")):
        files = {f"{there}/{name}": "1" for name in ("rows.jsonl", "r.py")}
        about = SAME | dict(weights="1", files=files)
        if changed == "model" and seed == 1:
            about["weights"] = "2"
        if changed == "rows.jsonl" and seed == 1:
            files[f"{there}/rows.jsonl"] = "2"
        flags = dict(model=f"{there}/model", train_data=f"{there}/rows.jsonl")
        flags |= dict(reward=f"answer,{there}/r.py:f:0.5", first_day=f"2026-01-0{seed + 1}")
        write_run(tmp_path / f"out.{seed}", [0.1], seed=seed, about=about, **flags)
    assert compare("side=out.0,out.1")[0] == (2 if changed else 0)
    assert ("2 seeds" in compare("out.0", "out.1")[1]) == (changed == "")


def test_pairs_have_students_interval_and_other_seeds_welchs(compare, tmp_path):
    a = write_side(tmp_path, "a", [0.5, 0.6, 0.9])
    b = write_side(tmp_path, "b", [0.6, 0.8, 1.2])
    c = write_side(tmp_path, "c", [0.6, 0.8, 1.2], first_seed=3)
    half = 4.303 * 0.1 / 3**0.5
    assert last_difference(compare(a, b)[1])[:2] == pytest.approx((0.2, half), rel=0.02)
    variances = np.var([0.5, 0.6, 0.9], ddof=1) + np.var([0.6, 0.8, 1.2], ddof=1)
    half = 4.303 * (variances / 3) ** 0.5
    assert last_difference(compare(a, c)[1])[:2] == pytest.approx((0.2, half), rel=0.02)
    half_interval = runpy.run_path(SCRIPT)["half_interval"]
    for n, t in {2: 12.706, 5: 2.776, 11: 2.228, 31: 2.042, 1001: 1.962}.items():
        values = np.random.default_rng(n).normal(size=n)
        assert half_interval(values) == pytest.approx(t * np.std(values, ddof=1) / n**0.5, rel=1e-3)


def test_the_verdict_is_honest(compare, tmp_path):
    """As often as 95 % says: runs of one distribution; and a difference of two deviations."""
    means = dict(y=[0.1, 0.2, 0.3], z=[0.2, 0.3, 0.1])
    out = compare(*[write_side(tmp_path, side, means[side]) for side in "yz"])[1]
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
    """A run that goes on, or was stopped, is said."""
    write_run(tmp_path / "a.0", [0.5, 0.5], seed=0, max_steps=3)
    write_run(tmp_path / "b.0", [0.5, 0.5, 9.0], {0: 5.0}, seed=0)
    write_run(tmp_path / "b.1", [0.5, 0.5, 9.0], {0: 5.0}, seed=1)
    with open(tmp_path / "a.0" / "metrics.jsonl", "a") as file:
        file.write('{"step": 3, "rew')  # it goes on
    write_run(tmp_path / "a.1", [0.5, 0.5, 0.5], seed=1)
    code, out, _ = compare("a=a.0,a.1", "b=b.0,b.1")
    assert last_difference(out)[:2] == (0, 0)
    assert code == 1 and " 2 steps" in out and "a: 1 of 2" in out and "b: " in out


def test_one_run_and_runs_without_evals_have_numbers(compare, tmp_path):
    write_run(tmp_path / "out", [0.1, 0.7])
    write_run(tmp_path / "out.1", [0.1, 0.7], {0: 0.3, 2: 0.625}, learning_rate=1)
    write_run(tmp_path / "lists", [0.1, 0.7], betas=[0.5, 0.75])
    numbers = {"out": "0.7", "out out.1": "0.625", "out lists": "[0.5, 0.75]"}
    for names, number in numbers.items():
        code, out, _ = compare(*names.split())
        assert code == 0 and number in out


@pytest.mark.parametrize("names", [[], ["nowhere"], ["began"], ["out", "--seeds", "many"]])
def test_mistakes_are_one_line(names, compare, tmp_path):
    write_run(tmp_path / "out", [0.1])
    write_run(tmp_path / "began", [], {0: 0.5})
    code, out, err = compare(*names)
    assert (code, out, err.count("\n")) == (2, "", 1)


@pytest.mark.parametrize(
    "other, tested",
    [
        (dict(learning_rate=0.5), "reward"),
        (dict(about=SAME | dict(reward_of="2")), "eval_accuracy"),
        (dict(about=dict(reward_of="2", eval_accuracy_of="2")), None),
        (dict(about={}, reward="r.py:f"), None),  # nobody knows
    ],
)
def test_only_what_is_the_same_quantity_is_tested(other, tested, compare, tmp_path):
    flags = dict(learning_rate=0.25)
    if other.get("about") == {}:
        flags["about"] = {}
    for seed in (0, 1):
        write_run(tmp_path / f"a.{seed}", [9.0], {0: 0.5, 1: 0.5 + seed}, seed=seed, **flags)
        more = dict(flags | other, seed=seed)
        write_run(tmp_path / f"b.{seed}", [9.5], {0: 0.5, 1: 0.75 + seed}, **more)
    code, out, err = compare("a=a.0,a.1", "b=b.0,b.1")
    if tested is None:
        assert (code, out, err.count("\n")) == (2, "", 1)
        code, out, _ = compare("a=a.0,a.1", "b=b.0,b.1", "--metric", "eval_accuracy")
    assert code == 0 and last_difference(out)[0] == (0.5 if tested == "reward" else 0.25)


def test_a_folder_of_packages_is_no_code_of_the_user(tmp_path, monkeypatch):
    """Such as pip install --target makes."""
    monkeypatch.syspath_prepend(tmp_path)
    for name, there in (("my_own", {"my_own"}), ("a_package", set())):
        (tmp_path / f"{name}.py").touch()
        if not there:
            (tmp_path / "a_package-1.0.dist-info").mkdir()
        __import__(name)
        assert {"my_own", "a_package"} & digests.loaded_files().keys() == there


def test_a_run_writes_down_what_it_has_read(tmp_path):
    """So that what `reward` and `eval_accuracy` stand for can be told from its config.json."""
    out = tmp_path / "out"
    texts = {
        "r.py": "import lib.helper\ndef f(completion, row):\n    return lib.helper.ONE\n",
        "lib/helper.py": "ONE = 1.0\n",  # a package without __init__.py
        "adv.py": "",  # which the script imports
        "data/rows.py": "import adv\ndef rows():\n    return [dict(prompt='1+1=', answer='2')]\n",
    }
    code, helper, adv, rows = (tmp_path / name for name in texts)
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    later = time.time() + 1000
    flags = dict(max_steps=0, reward=f"answer,{code}:f")
    flags |= dict(train_data=f"{rows}:rows", eval_data=small_rows(tmp_path))
    small_run(out, **flags)
    read = json.loads((out / "config.json").read_text())["about"]
    files = {code, helper, adv, rows, tmp_path / "rows.jsonl"}
    assert {*map(str, files), f"{HERE}/grpo.py", f"{HERE}/reward.py"} < read["files"].keys()
    assert np.__file__ not in read["files"] and json.__file__ not in read["files"]

    def about(step=0, n_rows=1, started=later, **more):
        prompts = [Prompt(np.arange(1), "", dict(answer="2"), row_number=i) for i in range(n_rows)]
        cfg = small_config(out, **(flags | more))
        files = types.SimpleNamespace(notes=dict(identity={"model": 0}))
        run = fake_run(cfg, step=step, files=files, rewards=load_rewards(cfg.reward))
        run.train_prompts = run.eval_prompts = prompts
        before = json.loads((out / "config.json").read_text())["about"] if step else {}
        read, _ = digests.about(run, before, started)
        del read["flags"]
        return read

    first, hotter, longer = about(), about(temperature=0.5), about(n_rows=2)
    assert about(learning_rate=1.0) == first
    adv.write_text("# edited")  # it is no part of the rewards
    mine = about()
    assert mine.pop("files") != first.pop("files") and mine == first
    helper.write_text("ONE = 2.0\n")
    edited = about()
    assert len({run["reward_of"] for run in (first, hotter, longer, edited)}) == 4
    evals = [run["eval_accuracy_of"] for run in (first, hotter, edited, longer)]
    assert evals[0] == evals[1] == evals[2] != evals[3]
    other = about(reward=f"{code}:f")["eval_accuracy_of"]
    helper.write_text("ONE = 3.0\n")
    assert about(reward=f"{code}:f")["eval_accuracy_of"] != other
    envs = [about(reward="environment", environment=f"e.py:{name}") for name in ("Easy", "Hard")]
    assert envs[0]["eval_accuracy_of"] != envs[1]["eval_accuracy_of"]
    for unknown in (about(step=1), about(started=0.0)):  # two versions in one run
        assert "edited" in unknown["files"][str(helper)]
    helper.write_text("ONE = 4.0\n")
    assert about(step=1)["files"][str(helper)] != unknown["files"][str(helper)]


def test_a_side_is_one_script_and_each_seed_once(compare, tmp_path):
    """Folders may have any name."""
    for name, flags in {"lr=1e-4": {}, "again": {}, "x=1": dict(seed=1), "y": dict(beta=1)}.items():
        write_run(tmp_path / name, [0.5], **flags)
    assert compare("lr=1e-4", "x=1")[0] == 0
    assert compare("s=lr=1e-4,x=1", "y")[0] == 0
    assert compare("--run", "y", "y")[0] == 2
    for names in (["lr=1e-4", "again"], ["s=again,y"], ["s=again,again"]):
        code, out, err = compare(*names)
        assert (code, out, err.count("\n")) == (2, "", 1)


def test_without_matplotlib_the_numbers_are_printed(compare, tmp_path, monkeypatch):
    write_run(tmp_path / "out", [0.625])
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    _, out, err = compare("out")
    assert "0.625" in out and err.count("\n") == 1


@pytest.fixture
def scripts(compare):
    """base.py, mine.py, r.py, and starts() -> the commands of all starts since the last call."""
    Path("r.py").touch()
    for name, quality in dict(base=0.1, mine=0.2).items():
        text = SCRIPT_OF_A_RUN.replace("QUALITY", str(quality)).replace("SAME", str(SAME))
        Path(f"{name}.py").write_text(text)

    def starts():
        path = Path("starts.txt")
        lines = path.read_text().splitlines() if path.exists() else []
        path.unlink(missing_ok=True)
        return lines

    return starts


def test_run_makes_what_is_missing(compare, scripts):
    arguments = ["--run", "base.py", "mine.py --mine 1", "--seeds", "2", "--jobs", "2", "--beta"]
    code, out, _ = compare(*arguments, "1")
    assert code == 0 and last_difference(out)[:2] == (0.25, pytest.approx(0, abs=1e-9))
    started = scripts()
    assert [len(started), *["--mine 1" in line for line in started]].count(True) == 2
    assert all("--mine 1" not in line or "mine.py" in line for line in started)
    compare(*arguments, "1")
    assert scripts() == []  # they are all there
    compare(*arguments, "2")
    assert len(scripts()) == 4
    rewards = Path("r.py").read_text()
    Path("r.py").write_text("other")
    compare(*arguments, "2")
    Path("r.py").write_text(rewards)
    compare(*arguments, "2")
    started = scripts()
    assert len(started) == 4 and not any("--resume" in line for line in started)
    assert len(list(Path("compare").glob("*/config.json"))) == 12  # nothing was replaced


def test_a_script_that_is_edited_between_its_runs_is_not_one_side(compare, scripts):
    text = Path("mine.py").read_text()
    Path("mine.py").write_text(text + "open(sys.argv[0], 'a').write('# edited\\n')\n")
    code, out, err = compare("--run", "base.py", "mine.py", "--seeds", "2")
    assert (code, out.count("tested")) == (2, 0) and "mine.py" in err.splitlines()[-1]
    Path("mine.py").write_text(text)
    assert compare("--run", "base.py", "mine.py", "--seeds", "2")[0] == 0


@pytest.mark.parametrize("moment", ["kill1", "kill2"])
def test_a_run_killed_before_its_first_line_is_nothing_yet(moment, compare, scripts):
    """Another default in the script that was edited since is not the old one."""
    arguments = ["--run", "base.py", "mine.py", "--seeds", "2"]
    Path(moment).touch()
    assert compare(*arguments)[0] > 0
    Path(moment).unlink()
    Path("mine.py").write_text(Path("mine.py").read_text() + "# edited")
    scripts()
    assert compare(*arguments)[0] == 0
    started = scripts()
    assert len(started) == 4 and not any("--resume" in line for line in started)


def test_an_error_that_ends_it_is_one_line(tmp_path):
    script = tmp_path / f"{'n' * 240}.py"  # the name of its log would be too long
    script.touch()
    command = [sys.executable, SCRIPT, "--run", script.name]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    error = done.stderr.splitlines()[-1]
    assert done.returncode == 2 and "name too long" in error and "ignored" not in done.stderr


def test_a_copy_elsewhere_finds_the_rest_and_one_without_digests_is_no_side(compare, scripts):
    mine = Path("mine.py")
    mine.write_text("from extras import tokens\nimport reward\n" + mine.read_text())
    arguments = ["--run", "base.py", "mine.py", "--seeds", "2"]
    assert compare(*arguments)[0] == 0
    mine.write_text(mine.read_text().replace("files=", "no_files="))
    for n_started in (6, 0):
        code, out, _ = compare(*arguments)
        assert code == 1 and len(scripts()) == n_started and out.count("has no digests") == 2


def test_what_fails_or_stops_is_said_and_pairs_stay_pairs(compare, scripts):
    Path("bad.py").write_text("import sys\nsys.exit('no such thing')")
    arguments = ["--run", "base.py", "mine.py", "--seeds", "3"]
    Path("stop0").touch()
    code, out, _ = compare(*arguments)
    assert code == 1 and last_difference(out)[0] == 0.25
    assert re.search("2 seeds.*base.py: 1 of 3.*mine.py: 1 of 3", out.splitlines()[-1])
    Path("stop0").unlink()
    scripts()
    code, out, _ = compare(*arguments)
    assert code == 0 and " 3 seeds" in out.splitlines()[-1]
    assert [("--resume" in line) for line in scripts()] == [True, True]
    code, out, _ = compare("--run", "base.py", "bad.py", "--seeds", "2")
    assert code == 1 and out.count("no such thing") == 2 and "bad.py: 2 of 2" in out


def test_flags_that_one_side_lacks_are_refused_before_anything_runs(compare, scripts):
    for name in ("base", "mine"):
        config = (
            "class Config:\n    beta: float = 0.0\n"
            + "    mine: int = 0\n" * (name == "mine")
            + "    keep: int = 0\n"
        )
        Path(f"{name}.py").write_text(f"{Path(f'{name}.py').read_text()}\n{config}")
    sides = ["--run", "base.py", "mine.py --mine 3"]
    for arguments in (["--mine", "3"], ["--mine=3"], ["--seed", "3"], ["--seeds", "2", "bad.py"]):
        code, out, err = compare(*sides, *arguments)
        assert (code, out, err.count("\n")) == (2, "", 1)
    assert scripts() == []
    sides[-1] += " --beta 2"
    assert compare(*sides, "--beta", "1", "--keep", "3")[0] == 0
    for line in scripts():
        flags = re.findall(r"--\w+(?: \d)?", line)
        assert "--keep 3" in flags and f"--beta {1 + ('mine.py' in line)}" in flags
        assert len({flag.split()[0] for flag in flags}) == len(flags)  # no flag is said twice


def test_flags_are_taken_as_the_trainer_takes_them(compare):
    """The error is that of no flags: there are no runs to compare."""
    run = ["--run", f"{HERE}/grpo.py", "--seeds", "0"]
    for fast in ("--no_fast", "--no-fast"):
        flags = ["--num-prompts=2", fast, "--clip_low", "-1", "--system_prompt", "--- be kind ---"]
        grpo.parse_flags(flags)
        assert compare(*run, *flags)[2] == compare(*run)[2]


def test_a_side_is_what_was_trained_and_how(compare, tmp_path, monkeypatch):
    """A later run of a process begins with more modules than the first. A run that was resumed
    with other flags, or made by another trainer, is of another side."""
    monkeypatch.syspath_prepend(tmp_path)
    Path("later.py").touch()
    Path("mine.py").write_text(Path(HERE, "grpo.py").read_text() + "# mine\n")
    small_run("run0", seed=0, max_steps=1)
    importlib.import_module("later")
    small_run("run1", seed=1, max_steps=1)
    small_run("run2", seed=2, max_steps=1, learning_rate=0.1)
    small_run("run2", seed=2, max_steps=2, resume=True)
    mine = importlib.import_module("mine")
    mine.train(mine.Config(**vars(small_config("mine", seed=3, max_steps=1))))
    codes = [compare(f"side=run0,{other}")[0] for other in ("run1", "run2", "mine")]
    assert codes == [0, 2, 2] and "0.1" in compare("run0", "run2")[1]


SCRIPT_OF_A_SELFCHECK = """
import json, only_there, os, sys, time
flags = [word.partition("=")[0] for word in sys.argv if word.startswith("--")]
assert len(set(flags)) == len(flags) and sys.argv[sys.argv.index("--dtype") + 1] == "float32"
if "RANK" in os.environ:
    time.sleep(60 * (os.environ["RANK"] == "0"))
    1 / 0
out = sys.argv[sys.argv.index("--out_dir") + 1]
os.makedirs(f"{out}/step_000004", exist_ok="--resume" in flags)
with open(f"{out}/metrics.jsonl", "w") as file:
    file.write(json.dumps(dict(step=1, step_time=os.getpid(), grad_norm=0.0)))
"""


def test_selfcheck_says_what_it_knows_and_the_error_of_the_rank_that_failed_first(tmp_path):
    """Its runs have each flag once, and one dtype."""
    (tmp_path / "mine.py").write_text(SCRIPT_OF_A_SELFCHECK)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "only_there.py").touch()
    command = [sys.executable, f"{HERE}/tools/selfcheck.py", "mine.py", "--max-steps", "4"]
    environment = with_path(f"{tmp_path}/elsewhere")
    options = dict(capture_output=True, text=True, cwd=tmp_path, env=environment)
    for only, answer, code in ("resume", "yes", 0), ("signal", "NO", 1), ("", "yes", 1):
        done = subprocess.run(command + ["--only", only] * bool(only), **options)
        answers = [line.split()[0] for line in done.stdout.splitlines()]
        assert answers == [answer] and done.returncode == code
    error = done.stderr.splitlines()[1:]
    assert "ZeroDivisionError: division by zero" in error and len(error) < 10
    assert any(re.search("rank *: 1 ", line) for line in error)


@pytest.mark.slow
def test_selfcheck_says_yes_to_the_plain_file():
    assert selfcheck.main(selfcheck.QUESTIONS, f"{HERE}/grpo.py") is False


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
    base, base_1, mine, _ = [metrics_of(run) for run in sorted(tmp_path.glob("compare/*[01]"))]
    assert base == mine != base_1 and [line["step"] for line in base] == [1, 2, 3, 4]
