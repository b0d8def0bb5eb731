"""What a run had read when it began. The trainer writes it into config.json: extras/compare.py sees
by it whether a file was edited since, and which metrics of two runs are the same quantity."""

import ast
import contextlib
import hashlib
import json
import os
import re
import sys
from pathlib import Path

# Another torch is another installation, and torch writes modules of its own into a cache.
INSTALLED = r"/lib\w*/python\d|-packages/|/\.cache/|/torchinductor_"


def of_file(path):
    """None: there is no such file."""
    with contextlib.suppress(OSError):
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()[:8]


def of_values(values):
    text = json.dumps(values, default=lambda value: type(value).__name__)
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def loaded_files():
    """{module: its file}, without what is installed."""
    # pip install --target has made such a folder, whatever its name is.
    folders = [folder for folder in sys.path if folder and any(Path(folder).glob("*.dist-info"))]
    files = {}
    for name, module in list(sys.modules.items()):
        path = getattr(module, "__file__", None) or ""
        is_installed = re.search(INSTALLED, path) or path.startswith(tuple(folders))
        if not is_installed and os.path.isfile(path):
            files[name] = path
    return files


def with_imports(names, files):
    """Of the loaded modules those with these names, all that they import, and so on."""
    words, found = set(names), set()
    while more := {name for name in files if name.split(".")[-1] in words} - found:
        found |= more
        for name in more:
            with contextlib.suppress(SyntaxError, ValueError):  # compiled code
                for node in ast.walk(ast.parse(Path(files[name]).read_bytes())):
                    if isinstance(node, ast.Import | ast.ImportFrom):
                        words |= set(re.findall(r"\w+", ast.unparse(node)))
    return found


def about(run, out_dir, started):
    """started: when the process began, before it read anything."""
    cfg = run.cfg
    code = loaded_files()
    read = {*code.values(), cfg.train_data, cfg.eval_data}
    files = {path: of_file(path) for path in sorted(read) if os.path.isfile(path)}

    def code_of(names):
        """Digests of reward.py, of the modules in the names of functions, and of their imports."""
        modules = re.findall(r"\s*([^,/]+)\.py:", names) + [type(run.rewards[0]).__module__]
        return sorted(files[code[name]] for name in with_imports(modules, code))

    first = cfg.reward.split(",")[0]  # whose mean is the eval accuracy
    if first.startswith("environment"):
        first += f",{cfg.environment}"
    eval_accuracy_of = [first, code_of(first), [prompt.row for prompt in run.eval_prompts]]
    reward_of = [cfg.reward, code_of(f"{cfg.reward},{cfg.environment}")]
    reward_of += [cfg.environment, cfg.temperature, cfg.non_stop_reward]
    reward_of += [eval_accuracy_of, [prompt.row for prompt in run.train_prompts]]
    before = {}
    if run.step > 0:  # the run goes on
        config = json.loads(Path(out_dir, "config.json").read_text())
        before = config.get("about", {}).get("files", {})
    for path, digest in files.items():
        if os.path.getmtime(path) > started or before.get(path, digest) != digest:
            files[path] = "edited"  # while it ran: it is no version
    return dict(
        eval_accuracy_of=of_values(eval_accuracy_of),
        reward_of=of_values(reward_of),
        weights=of_values(run.identity["model"]),
        files=files,
    )
