"""What a run had read when it began. A resume must have it again, and all ranks must have the same.
The trainer writes it into config.json, too: extras/compare.py sees by it whether a file was edited
since, and which metrics of two runs are the same quantity."""

import ast
import contextlib
import functools
import hashlib
import inspect
import json
import os
import re
import sys
import time
from pathlib import Path

STARTED = time.time() - time.process_time()  # of this process

# Another torch is another installation, and torch writes modules of its own into a cache.
INSTALLED = r"/lib\w*/python\d|-packages/|/\.cache/|/torchinductor_"


def of_file(path):
    """None: there is no such file."""
    with contextlib.suppress(OSError):
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()[:8]


def of_values(*values):
    """A prompt counts by its row."""
    text = json.dumps(values, default=lambda x: getattr(x, "row", type(x).__name__))
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def of_many(values):
    """Of their JSON as a list, one after the other, because that of a million rows is large."""
    sha = hashlib.sha256(b"[")
    comma = ""
    for value in values:
        text = json.dumps(value, default=lambda x: type(x).__name__)
        sha.update((comma + text).encode())
        comma = ", "
    sha.update(b"]")
    return sha.hexdigest()


def of_weights(model):
    """Sums of bits: the same on every device."""
    import torch  # compare.py, which only reads digests, needs none

    bits = [p.detach().reshape(-1).view(torch.int32) for p in model.parameters()]
    return [int(x.sum(dtype=torch.int64)) for x in bits]


def identity(cfg, model, prompts):
    """What a resume must have as the run began. model: as --model has it."""
    identity = dict(num_prompts=cfg.num_prompts, seed=cfg.seed, lora_rank=cfg.lora_rank)
    identity["model"] = of_weights(model)
    identity["train_data"] = of_many((p.ids.tolist(), p.row) for p in prompts)
    return identity


def compare(run, checkpoint):
    """A ValueError if a resume has another identity than the checkpoint. Says from which step on
    evals measured what they do now. Returns a digest of all that the ranks must have the same."""
    if run.cfg.reference and run.reference is not None:
        run.identity["reference"] = of_weights(run.reference.model)
    began_with = checkpoint.get("identity") or run.identity  # {}: it began without this file
    changed = [name for name in run.identity if began_with.get(name) != run.identity[name]]
    if changed:
        raise ValueError(f"this run began with another {' and '.join(changed)}")
    eval_rows = ((p.ids.tolist(), p.row) for p in run.eval_prompts)
    evals = of_many([run.rewards[0].name, list(eval_rows)])
    run.files.evals = evals
    run.files.evals_since = checkpoint.get("evals_since", 0)
    if checkpoint.get("evals", evals) != evals:  # accuracies so far name no best checkpoint
        run.files.evals_since = run.step
    return of_many([vars(run.cfg), run.identity, evals, run.step, of_weights(run.model)])


def loaded_files():
    """{module: its file}, without what is installed."""
    # pip install --target has made such a folder, whatever its name is.
    folders = {str(path.parent) for top in sys.path for path in Path(top).glob("*.dist-info")}
    files = {}
    for name, module in list(sys.modules.items()):
        path = str(getattr(module, "__file__", ""))
        is_installed = re.search(INSTALLED, path) or path.startswith(tuple(folders))
        if os.path.isfile(path) and not is_installed:
            files[name] = path
    return files


# Of the first run in this process. A later run finds, too, what the earlier ones loaded on the way.
first_loaded_files = functools.cache(loaded_files)


def behind(functions, files):
    """Of the loaded modules those in these names of functions, reward.py, what they import, and so
    on: {module: its file}."""
    words, found = {"reward", *re.findall(r"([^,/\s]+)\.py:", functions)}, {}
    while more := {name for name in files if name.split(".")[-1] in words} - found.keys():
        for name in more:
            found[name] = files[name]
            with contextlib.suppress(SyntaxError, ValueError):  # compiled code
                for node in ast.walk(ast.parse(Path(files[name]).read_bytes())):
                    if isinstance(node, ast.Import | ast.ImportFrom):
                        words.update(re.findall(r"\w+", ast.unparse(node)))
    return found


def about(run, out_dir, started=STARTED):
    """What config.json gets, and the files that were edited since the run began."""
    cfg = run.cfg
    functions = f"{cfg.reward},{cfg.environment}"
    code = first_loaded_files() | behind(f"{functions},{cfg.train_data}", loaded_files())
    read = {*code.values(), cfg.train_data, cfg.eval_data}
    files = {path: digest for path in sorted(read) if (digest := of_file(path))}
    before = dict(files={}, flags={})
    if run.step > 0:  # the run goes on
        before = json.loads(Path(out_dir, "config.json").read_text())["about"]
    for path, digest in files.items():
        if os.path.getmtime(path) > started or before["files"].get(path, digest) != digest:
            files[path] += " edited"  # while it ran: who knows which version it had

    def code_of(functions):
        return sorted(files[path] for path in behind(functions, code).values())

    # Whose mean is the eval accuracy.
    first = re.sub("^environment", cfg.environment, cfg.reward.split(",")[0])
    settings = functions, cfg.temperature, cfg.non_stop_reward
    about = dict(
        trainer=of_file(inspect.getfile(type(cfg))),
        eval_accuracy_of=of_values(first, code_of(first), run.eval_prompts),
        reward_of=of_values(settings, code_of(functions), run.train_prompts),
        weights=of_values(run.identity["model"]),
        files=files,
        flags=before["flags"] | {str(run.step): vars(cfg)},  # from each step on
    )
    edited = [path for path, said in files.items() if "edited" in said and run.step > 0]
    return about, edited
