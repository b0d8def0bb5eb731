"""What a run had read when it began. The trainer writes it into config.json: extras/compare.py sees
by it whether a file was edited since, and which metrics of two runs are the same quantity."""

import contextlib
import functools
import hashlib
import json
import os
import re
import sys
from pathlib import Path


def of_file(path):
    """None: there is no such file."""
    with contextlib.suppress(OSError):
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()[:8]


def of_values(values):
    text = json.dumps(values, default=lambda value: type(value).__name__)
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def of_files(paths):
    return {path: of_file(path) for path in sorted(paths) if os.path.isfile(path)}


@functools.cache  # thousands of modules share some hundreds of folders
def real_path(folder):
    return os.path.realpath(folder)


def folder_of(path):
    if os.path.islink(path):
        path = os.path.realpath(path)
    return real_path(os.path.dirname(path))


def about(run, out_dir, started):
    """started: when the process began, before it read anything."""
    cfg = run.cfg
    modules = {}
    for name, module in list(sys.modules.items()):
        modules[name] = getattr(module, "__file__", None) or ""
    # reward.py, and what --reward and --environment name, with what these import beside them
    named = re.findall(r"([^,]+\.py):", f"{cfg.reward},{cfg.environment}")
    beside = {os.path.dirname(os.path.abspath(os.path.expanduser(path))) for path in named}
    rewards = [path for path in modules.values() if os.path.dirname(path) in beside]
    rewards = of_files([modules["reward"], *rewards])
    # The script, what lies beside it, and extras/. (Another torch is another installation.)
    folders = {folder_of(modules[name]) for name in ("__main__", "reward")}
    folders |= {f"{folder}/extras" for folder in folders}
    code = [path for path in modules.values() if folder_of(path) in folders]
    files = rewards | of_files([*code, modules["__main__"], cfg.train_data, cfg.eval_data])
    before = {}
    if run.step > 0:  # the run goes on
        config = json.loads(Path(out_dir, "config.json").read_text())
        before = config.get("about", {}).get("files", {})
    for path, digest in files.items():
        if os.path.getmtime(path) > started or before.get(path, digest) != digest:
            files[path] = "edited"  # while it ran: it is no version

    first = f"reward.py {cfg.reward.split(',')[0]}"  # whose mean is the eval accuracy
    code = [digest for path, digest in rewards.items() if Path(path).name in first]
    eval_accuracy_of = [first, code, [prompt.row for prompt in run.eval_prompts]]
    reward_of = [cfg.reward, list(rewards.values()), cfg.temperature, cfg.non_stop_reward]
    reward_of += [eval_accuracy_of, [prompt.row for prompt in run.train_prompts]]
    return dict(
        eval_accuracy_of=of_values(eval_accuracy_of),
        reward_of=of_values(reward_of),
        weights=of_values(run.identity["model"]),
        files=files,
    )
