"""Fingerprints of the code, data and weights that a run starts with. They must match on all ranks,
and those of the training data and weights on a resume. config.json has them, too:
tools/compare.py checks with them whether a file was edited since, and which metrics of two runs are
the same quantity."""

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

# Paths without a fingerprint: installed packages, and modules that torch writes into a cache.
INSTALLED = r"/lib\w*/python\d|-packages/|/\.cache/|/torchinductor_"


def of_file(path):
    """The fingerprint of a file; None if there is no such file."""
    with contextlib.suppress(OSError):
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()[:8]


def paths_of(data: str) -> list:
    """The files of a comma-separated list, in order. Patterns such as data/*.jsonl are expanded."""
    if os.path.exists(data):
        return [data]
    return [path for item in data.split(",") for path in sorted(glob.glob(item)) or [item]]


def of_code(thing) -> str:
    """Fingerprint of code without comments, docstrings and layout; "" if the source is missing."""
    if not isinstance(thing, type):
        return of_source(getattr(inspect.unwrap(thing), "__code__", None))
    # The class as it is now, with attributes that a script has set.
    own = {name: x for name, x in vars(thing).items() if not re.match("__(?!init|call)", name)}
    text = str({name: of_code(x) for name, x in sorted(own.items())})
    return hashlib.sha256(text.encode()).hexdigest()[:8]


@functools.cache  # it is called for each row of the data
def of_source(code) -> str:
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(code)))
    except (OSError, TypeError, SyntaxError):  # made by exec
        return ""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and ast.get_docstring(node):
            node.body = node.body[1:] or [ast.Pass()]
    return hashlib.sha256(ast.unparse(tree).encode()).hexdigest()[:8]


# Code of grpo.py that extras/ replaces, or that a check relies on, as long as it has these
# fingerprints. `python -m extras.digests` renews the table.
WRITTEN_FOR = dict(
    Policy="53307d1d",
    collate="8d7120a9",
    padded="8b87369e",
    micro_batches="7db9597d",
    logps_of="1b0b0a31",
    log_probabilities="7f6bd71a",
    load_model="578dc866",
    resolve_auto="6310a68e",
    load_reference="780ab9db",
    load_tokenizer="5510918b",
    content_of="c596de4c",
    make_prompt="91c0f8eb",
    read_rows="8e84d75b",
    prompts_of_step="40ae0ad1",
    samples_of_eval="e670d561",
    rollout="ed783471",
    score="a14360ec",
    group_advantages="760c854d",
    assign_advantages="75dc4cd2",
    kl_from_here_on="e67b9a55",
    save_if_due="c404d74d",
    write="253b0ef0",
)


def changed(*names, of=None) -> list[str]:
    """The names whose code differs from WRITTEN_FOR. A name is a function or class of grpo.py, or a
    method of its RunFiles. of: an object whose methods of these names are checked instead."""
    page = sys.modules["grpo"]
    own = {name: getattr(of or page, name, getattr(page.RunFiles, name, None)) for name in names}
    return [n for n, x in own.items() if of_code(x) != WRITTEN_FOR[n] or is_wrapped(x)]


def is_marked(function) -> bool:
    """True if grpo.py's @extra wraps the function."""
    marked = sys.modules["grpo"].extra("")(function)
    return getattr(function, "__code__", None) is marked.__code__


def is_wrapped(thing) -> bool:
    """True if a decorator other than @extra wraps it: of_code looks only at the function inside."""
    if isinstance(thing, type):
        return any(map(is_wrapped, vars(thing).values()))
    inner = getattr(thing, "__wrapped__", None)
    return inner is not None and (not is_marked(thing) or is_wrapped(inner))


def of_values(*values):
    """Fingerprint of the values. A prompt is represented by its row."""
    text = json.dumps(values, default=lambda x: getattr(x, "row", type(x).__name__))
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def of_many(values):
    """SHA-256 of the values as a JSON list, one at a time: the JSON of a million rows is large."""
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
    """The sum of each parameter's bits, the same on every device."""
    import torch  # here, because tools/compare.py does not need it

    sums = []
    for p in model.parameters():
        kind = torch.int8 if p.nbytes % 4 else torch.int32
        bits = p.detach().reshape(-1).view(kind)
        sums.append(int(bits.sum(dtype=torch.int64)))
    return sums


def compare(run, checkpoint):
    """checkpoint: its copy of run.files.notes. ValueError if a resume has another identity. Metrics
    of earlier evals are renamed if they measured something else. Returns {name: value} that must
    match on all ranks."""
    notes, cfg = run.files.notes, run.cfg
    if "identity" not in notes:  # your Run does not call files.load_model
        notes["identity"] = dict(model=of_weights(run.policy.model))
    identity = notes["identity"]  # must match on a resume
    identity |= dict(num_prompts=cfg.num_prompts, seed=cfg.seed, lora_rank=cfg.lora_rank)
    identity["train_data"] = of_many((p.ids.tolist(), p.row) for p in run.train_prompts)
    if run.cfg.reference and run.reference is not None:
        identity["reference"] = of_weights(run.reference.model)
    began_with = checkpoint.get("identity") or identity  # a run begun without extras/ has none
    changed = [name for name in identity if began_with.get(name) != identity[name]]
    if changed:
        raise ValueError(f"this run began with another {' and '.join(changed)}")
    eval_rows = ((p.ids.tolist(), p.row) for p in run.eval_prompts)
    evals = of_many([run.reward_functions[0].name, list(eval_rows)])
    graders = of_values(code_of(first_reward(cfg), loaded_files()))
    now = dict(evals=evals, graders=graders)
    if any(checkpoint.get(name, now[name]) != now[name] for name in now):
        lines = run.files.history  # evals have lines of their own
        run.files.history = [{re.sub("^eval_", "earlier_", k): m[k] for k in m} for m in lines]
    run.files.notes |= now
    rows = {"the rows of --train_data": identity["train_data"], "the rows of --eval_data": evals}
    reference = {"the weights of --reference": of_values(identity.get("reference"))}
    return before_loading(cfg) | rows | reference | dict(step=run.step)


PATHS = "model reference train_data eval_data reward environment".split()  # folders may differ
VERSIONS = "torch", "transformers"


def before_loading(cfg):
    """{name: value} that must match on all ranks as soon as they connect."""
    found = Path(cfg.out_dir).expanduser().glob("step_" + "[0-9]" * 6) if cfg.resume else []
    same: dict = {"the checkpoints that --resume finds in --out_dir": sorted(p.name for p in found)}
    same |= {f"the version of {name}": sys.modules[name].__version__ for name in VERSIONS}
    for name, value in vars(cfg).items():
        if name != "out_dir":  # only rank 0 writes
            same[f"--{name}"] = os.path.basename(value) if name in PATHS else str(value)
    for name, path in loaded_files().items():
        name = Path(path).stem if name.startswith("__") else name.replace(".", "/")
        same[f"{name}.py"] = of_file(path)
    return same


def loaded_files():
    """{module: its file}, without installed packages."""
    # Folders of pip install --target, whatever their names.
    folders = {str(path.parent) for top in sys.path for path in Path(top).glob("*.dist-info")}
    files = {}
    for name, module in list(sys.modules.items()):
        path = str(getattr(module, "__file__", ""))
        is_installed = re.search(INSTALLED, path) or path.startswith(tuple(folders))
        if os.path.isfile(path) and not is_installed:
            files[name] = path
    return files


# Cached in the first run of a process: later runs would also find modules loaded since.
first_loaded_files = functools.cache(loaded_files)


def behind(functions, files):
    """{module: its file} of reward.py, the modules that `functions` names, and their imports, also
    indirect ones, as far as `files` has them."""
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
    """The reward function whose mean is the eval accuracy."""
    first = without_folders(cfg.reward.split(",")[0])
    return re.sub("^environment", without_folders(cfg.environment), first)


def about(run, before, started=STARTED):
    """Returns `about` of config.json, and the files that were edited since the run began. before:
    `about` of the last start; {} for a new run, or one without extras/."""
    cfg = run.cfg
    functions = without_folders(f"{cfg.reward},{cfg.environment}")
    code = first_loaded_files() | behind(f"{functions},{cfg.train_data}", loaded_files())
    read = {*code.values(), *paths_of(cfg.train_data), *paths_of(cfg.eval_data)}
    files = {path: digest for path in sorted(read) if (digest := of_file(path))}
    before = dict(files={}, flags={}) | before
    for path, digest in files.items():
        if os.path.getmtime(path) > started or before["files"].get(path, digest) != digest:
            files[path] += " edited"  # during the run: its version is unknown

    def code_read(functions):
        return sorted(files[path] for path in behind(functions, code).values())

    first = first_reward(cfg)
    settings = functions, cfg.temperature, getattr(cfg, "non_stop_reward", None)
    identity = run.files.notes["identity"]
    about = dict(
        trainer=of_file(inspect.getfile(type(cfg))),
        eval_accuracy_of=of_values(first, code_read(first), run.eval_prompts),
        reward_of=of_values(settings, code_read(functions), run.train_prompts),
        weights=of_values(identity["model"]),
        weights_of_reference=of_values(identity.get("reference")),
        prompts=identity.get("train_data"),  # as tokens
        files=files,
        flags=before["flags"] | {str(run.step): vars(cfg)},  # by their first step
    )
    edited = [path for path, said in files.items() if "edited" in said and run.step > 0]
    return about, edited


if __name__ == "__main__":
    import grpo

    text = Path(__file__).read_text()
    for known in WRITTEN_FOR:
        code = getattr(grpo, known, None) or getattr(grpo.RunFiles, known)
        text = re.sub(rf'\b{known}="\w*",', f'{known}="{of_code(code)}",', text)
    Path(__file__).write_text(text)
