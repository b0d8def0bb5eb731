"""What a run had read when it began. A resume must have it again, and all ranks must have the same.
The trainer writes it into config.json, too: tools/compare.py sees by it whether a file was edited
since, and which metrics of two runs are the same quantity."""

import ast
import contextlib
import functools
import glob
import hashlib
import inspect
import json
import os
import re
import sys
import textwrap
import time
from pathlib import Path

STARTED = time.time() - time.process_time()  # of this process

# Another torch is another installation, and torch writes modules of its own into a cache.
INSTALLED = r"/lib\w*/python\d|-packages/|/\.cache/|/torchinductor_"


def of_file(path):
    """None: there is no such file."""
    with contextlib.suppress(OSError):
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()[:8]


def paths_of(data: str) -> list:
    """Of a list with commas, in its order, and of patterns such as data/*.jsonl."""
    if os.path.exists(data):
        return [data]
    return [path for item in data.split(",") for path in sorted(glob.glob(item)) or [item]]


def of_code(thing) -> str:
    """Of a function or a class, without comments, docstrings and layout; "": nobody can read it."""
    if not isinstance(thing, type):
        return of_source(getattr(inspect.unwrap(thing), "__code__", None))
    # As it is now, also with what a script has set.
    own = {name: x for name, x in vars(thing).items() if not re.match("__(?!init)", name)}
    text = str({name: of_code(x) for name, x in sorted(own.items())})
    return hashlib.sha256(text.encode()).hexdigest()[:8]


@functools.cache  # a file of a million rows asks for each of them
def of_source(code) -> str:
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(code)))
    except (OSError, TypeError, SyntaxError):  # made by exec
        return ""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and ast.get_docstring(node):
            node.body = node.body[1:] or [ast.Pass()]
    return hashlib.sha256(ast.unparse(tree).encode()).hexdigest()[:8]


# The code of the page for which extras/ has another form, or of which a check knows what it does:
# these are taken while it is unchanged.
# `python -m extras.digests` renews the table.
WRITTEN_FOR = dict(
    Policy="53307d1d",
    collate="8d7120a9",
    padded="8b87369e",
    micro_batches="7db9597d",
    logps_of="1b0b0a31",
    log_probabilities="7f6bd71a",
    load_reference="780ab9db",
    load_tokenizer="5510918b",
    make_prompt="91c0f8eb",
    read_rows="8e84d75b",
    prompts_of_step="8bfe5595",
    samples_of_eval="e670d561",
    rollout="ed783471",
)


def changed(*names) -> list[str]:
    """Of these functions and classes of the page those whose code is no longer the known one."""
    page = sys.modules["grpo"]
    own = {name: getattr(page, name) for name in names}
    return [n for n, x in own.items() if of_code(x) != WRITTEN_FOR[n] or is_wrapped(x)]


def is_marked(function) -> bool:
    """By the page's @extra."""
    marked = sys.modules["grpo"].extra("")(function)
    return getattr(function, "__code__", None) is marked.__code__


def is_wrapped(thing) -> bool:
    """By a decorator that is not the page's: getsource looks through it."""
    if isinstance(thing, type):
        return any(map(is_wrapped, vars(thing).values()))
    inner = getattr(thing, "__wrapped__", None)
    return inner is not None and (not is_marked(thing) or is_wrapped(inner))


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


def of_ids(prompts):
    sha = hashlib.sha256()
    for prompt in prompts:
        sha.update(prompt.ids.tobytes() + b" ")
    return sha.hexdigest()[:8]


def of_weights(model):
    """Sums of bits: the same on every device."""
    import torch  # compare.py, which only reads digests, needs none

    bits = [p.detach().reshape(-1).view(torch.int32) for p in model.parameters()]
    return [int(x.sum(dtype=torch.int64)) for x in bits]


def compare(run, checkpoint):
    """checkpoint: what it has of run.files.notes. A ValueError if a resume has another identity.
    Evals so far get another name if they measured something else. Returns what all ranks must have
    the same, by name."""
    identity = run.files.notes["identity"]  # what a resume must have; of --model: see runs.py
    cfg = run.cfg
    identity |= dict(num_prompts=cfg.num_prompts, seed=cfg.seed, lora_rank=cfg.lora_rank)
    identity["train_data"] = of_many((p.ids.tolist(), p.row) for p in run.train_prompts)
    if run.cfg.reference and run.reference is not None:
        identity["reference"] = of_weights(run.reference.model)
    began_with = checkpoint.get("identity") or identity  # {}: it began without this file
    changed = [name for name in identity if began_with.get(name) != identity[name]]
    if changed:
        raise ValueError(f"this run began with another {' and '.join(changed)}")
    eval_rows = ((p.ids.tolist(), p.row) for p in run.eval_prompts)
    evals = of_many([run.reward_functions[0].name, list(eval_rows)])
    graders = of_values(code_of(first_reward(cfg), loaded_files()))
    now = dict(evals=evals, graders=graders)
    if any(checkpoint.get(name, now[name]) != now[name] for name in now):
        lines = run.files.history  # keys begin with "eval_", in lines of their own
        run.files.history = [{re.sub("^eval_", "earlier_", k): m[k] for k in m} for m in lines]
    run.files.notes |= now
    rows = {"the rows of --train_data": identity["train_data"], "those of --eval_data": evals}
    reference = {"the weights of --reference": of_values(identity.get("reference"))}
    return before_loading(cfg) | rows | reference | dict(step=run.step)


PATHS = "model reference train_data eval_data reward environment".split()  # may lie elsewhere
VERSIONS = "torch", "transformers"


def before_loading(cfg):
    """What all ranks must have the same as soon as they meet, by name."""
    found = Path(cfg.out_dir).expanduser().glob("step_" + "[0-9]" * 6) if cfg.resume else []
    same: dict = {"the checkpoints that --resume finds in --out_dir": sorted(p.name for p in found)}
    same |= {f"the version of {name}": sys.modules[name].__version__ for name in VERSIONS}
    for name, value in vars(cfg).items():
        if name != "out_dir":  # rank 0 writes
            same[f"--{name}"] = os.path.basename(value) if name in PATHS else str(value)
    for name, path in loaded_files().items():
        name = Path(path).stem if name.startswith("__") else name.replace(".", "/")
        same[f"{name}.py"] = of_file(path)
    return same


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


def code_of(functions, files):
    return sorted(str(of_file(path)) for path in behind(functions, files).values())


def without_folders(functions):
    return re.sub(r"[^,]*/", "", functions)


def first_reward(cfg):
    """Whose mean is the eval accuracy."""
    first = without_folders(cfg.reward.split(",")[0])
    return re.sub("^environment", without_folders(cfg.environment), first)


def about(run, before, started=STARTED):
    """What config.json gets, and the files that were edited since the run began. before: what it
    had when the run last went on; {}: it begins, or had no extras/."""
    cfg = run.cfg
    functions = without_folders(f"{cfg.reward},{cfg.environment}")
    code = first_loaded_files() | behind(f"{functions},{cfg.train_data}", loaded_files())
    read = {*code.values(), *paths_of(cfg.train_data), *paths_of(cfg.eval_data)}
    files = {path: digest for path in sorted(read) if (digest := of_file(path))}
    before = dict(files={}, flags={}) | before
    for path, digest in files.items():
        if os.path.getmtime(path) > started or before["files"].get(path, digest) != digest:
            files[path] += " edited"  # while it ran: who knows which version it had

    def code_read(functions):
        return sorted(files[path] for path in behind(functions, code).values())

    first = first_reward(cfg)
    settings = functions, cfg.temperature, cfg.non_stop_reward
    identity = run.files.notes["identity"]
    about = dict(
        trainer=of_file(inspect.getfile(type(cfg))),
        eval_accuracy_of=of_values(first, code_read(first), run.eval_prompts),
        reward_of=of_values(settings, code_read(functions), run.train_prompts),
        weights=of_values(identity["model"]),
        weights_of_reference=of_values(identity.get("reference")),
        prompts=identity.get("train_data"),  # as tokens
        files=files,
        flags=before["flags"] | {str(run.step): vars(cfg)},  # from each step on
    )
    edited = [path for path, said in files.items() if "edited" in said and run.step > 0]
    return about, edited


if __name__ == "__main__":
    import grpo

    text = Path(__file__).read_text()
    for known in WRITTEN_FOR:
        text = re.sub(rf'\b{known}="\w*",', f'{known}="{of_code(getattr(grpo, known))}",', text)
    Path(__file__).write_text(text)
