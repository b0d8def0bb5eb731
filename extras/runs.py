"""Protects a run from a full disk, an unreadable checkpoint, a launcher that kills it, and a second
run in the same directory.

Each run gets its own directory. Checkpoints: every save_every-th step, the best, the last, and
after a signal or an error the last complete step.
"""

import contextlib
import copy
import fcntl
import glob
import itertools
import json
import math
import os
import re
import shutil
import signal
import time
import traceback
import types
from collections import defaultdict
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch

import grpo
from extras import digests, models, ranks, screen
from extras.errors import ConfigError, TrainingError, cleanup, mistakes_in, one_line, require

# Sent by users (Ctrl-C), and by launchers and schedulers before they kill.
STOP_SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
STOP_SIGNALS += [signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU]
IGNORED = {n for n in STOP_SIGNALS if signal.getsignal(n) == signal.SIG_IGN}  # nohup: SIGHUP

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # else it warns when a reward forks


# -- Which run to resume

opened = []  # directories of the runs of this process


def config_to_resume(given, unnamed: str) -> str:
    """The path of config.json of the run to resume; "" for a new run. --resume continues the run
    in --out_dir, by default the newest unnamed run. A process that torchrun has restarted
    (--max-restarts) continues the run of its own job."""
    begun = Path(ranks.recall(f"directory of run {len(opened)}") or "/", "config.json")
    if begun.exists():
        return str(begun)
    if not given.resume:
        return ""
    if given.out_dir != unnamed:
        folder = os.path.expanduser(given.out_dir)
        paths = [f"{folder}/config.json"] if holds_something(folder) else []
    else:  # out and out.1 are unnamed runs, and out_mine is not
        found = glob.glob(f"{glob.escape(unnamed)}*/config.json")
        name = re.escape(unnamed)
        paths = [path for path in found if re.fullmatch(rf"{name}(\.\d+)?/config.json", path)]
        paths.sort(key=os.path.getmtime)
    return paths[-1] if paths else ""


def holds_something(folder: str | Path) -> bool:
    """Is any file in it not empty? A run that was stopped before it began leaves an empty log."""
    return any(os.path.getsize(path) for path in Path(folder).glob("*"))


def config_in(folder: Path) -> dict:
    """config.json as a dict; {} if your RunFiles writes another file or format."""
    with contextlib.suppress(OSError, ValueError):
        return json.loads(Path(folder, "config.json").read_text())
    return {}


# -- Logs


def cut_log(path: Path, step: int) -> None:
    """Removes the rows of later steps, which the resumed run writes again, and an incomplete last
    row. Lines in another format of yours stay."""
    with open(path, "ab+") as file:
        length = file.seek(0)
        for line in file:
            is_over = line.startswith(b"{") and not line.endswith(b"\n")
            with contextlib.suppress(ValueError, TypeError, LookupError):
                is_over = is_over or json.loads(line)["step"] > step
            if is_over:
                break
            length += len(line)
        file.truncate(length)


def without_nan(metrics: dict) -> dict:
    """JSON has no nan or inf: such metrics are left out. Scalars of numpy and torch become Python's
    numbers."""
    scalars = [name for name, x in metrics.items() if getattr(x, "ndim", 1) == 0]
    metrics = metrics | {name: metrics[name].item() for name in scalars}
    return {k: v for k, v in metrics.items() if not isinstance(v, float) or math.isfinite(v)}


def more_columns(rows: list[dict], samples: list, tokenizer) -> list[dict]:
    """Adds columns to completions.jsonl. The first sample of a group gets the row of the data, and
    the two groups with the largest advantages get their tokens."""
    sizes = defaultdict(float)
    for s in samples:
        sizes[s.group] += mean_abs(s.advantages_in_loss)
    detailed = sorted(sizes, key=lambda group: -sizes[group])[:2]
    shown = []
    for row, s in zip(rows, samples, strict=True):
        own = dict(row)
        row |= dict(rewards=without_nan(s.rewards))
        row |= advantage_columns(s.advantages_in_loss)
        row |= dict(length=int(s.sampled.sum()), finish_reason=s.finish_reason)
        if not shown or shown[-1]["group"] != s.group:
            row["row"] = {name: cut(value) for name, value in s.prompt.row.items()}
        optional = dict(failure=s.failure, extra=s.info.get("columns"))
        row |= {name: value for name, value in optional.items() if value}
        if "episode" in s.info:
            row |= s.info["episode"].log_columns()
        if s.group in detailed:
            tokens = dict(logp=s.sampler_logps, advantage=s.advantages, sampled=s.sampled)
            tokens = {name: x.astype(float).round(3).tolist() for name, x in tokens.items()}
            texts = [tokenizer.decode(i) for i in s.completion_ids[:, None]]
            row["tokens"] = tokens | dict(text=texts)
        shown.append(without_nan(row | own))
    return shown


def mean_abs(advantages) -> float:
    return float(np.abs(advantages).sum()) / max(1, len(advantages))


def advantage_columns(advantages) -> dict:
    """The mean of a sample's advantages. If they differ, also sum, mean size and largest size."""
    total = float(advantages.sum())
    columns = dict(advantage=total / max(1, len(advantages)))
    if len(set(advantages)) > 1:
        largest = float(np.abs(advantages).max())
        columns |= dict(advantage_sum=total, advantage_abs=mean_abs(advantages))
        columns |= dict(advantage_max=largest)
    return columns


def cut(value):
    """Shortens a value of the data for the log. A column of tests may have a megabyte."""
    text = str(value)
    if len(text) > 2000:
        value = text[:2000] + "..."
    return value


# -- Signals


class StopSignals:
    """Handles STOP_SIGNALS while the loop runs. A launcher kills soon after a signal, so rank 0
    saves at once; the run ends after the current step. torchrun forwards signals, so a repeat
    within 5 seconds is ignored. A later one ends the process."""

    def __init__(self, run):
        self.run = run
        self.time = math.inf  # of the first signal
        self.pid = os.getpid()

    def listen(self) -> None:
        for number in STOP_SIGNALS:
            known = (signal.SIG_DFL, signal.default_int_handler, self.run.request_stop)
            if number not in IGNORED and signal.getsignal(number) in known:  # else: your handler
                signal.signal(number, self.handle)

    def handle(self, number: int, frame) -> None:
        now = time.monotonic()
        if now - self.time > 5 or os.getpid() != self.pid:  # the latter: in a reward's fork
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        elif self.time == math.inf:
            self.time = now
            self.run.request_stop(number, frame)
            os.write(2, b"stopping after this step; a signal at least 5 s later stops at once\n")
            signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])  # used by reward time limits
            self.run.files.save(self.run, as_it_is=False)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGALRM])


# -- The directory


def lock(file) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ValueError("another run is writing there") from None
    except OSError as error:  # a file system without locks
        ranks.say(f"{file.name} cannot be locked ({error}): do not start another run there")


# Names that Files adds; your RunFiles must not have them.
OWN = """prepare check_room claim write_config path_of best_step complete close is_unnamed
is_claimed notes notes_before unwritten dashboard unreadable saved save_failed must_not_save
completed""".split()


def make_files(plain, cfg, *args, **kwargs):
    files = plain(cfg, *args, **kwargs)
    require(isinstance(files, grpo.RunFiles), "out_dir", "make_files must return a RunFiles")
    for name in OWN:
        why = f"extras/runs.py adds the name {name} to RunFiles: rename yours"
        require(not hasattr(files, name), "out_dir", why)
    files.__class__ = type("Files", (Files, type(files)), {})  # Files overrides your class
    files.prepare(cfg)
    return files


class Files(grpo.RunFiles):
    """Extends RunFiles of grpo.py. Rank 0 writes; all ranks know the history."""

    def prepare(self, cfg) -> None:
        self.is_unnamed = cfg.out_dir == getattr(type(cfg), "out_dir", "") and not cfg.resume
        self.notes = {}  # fingerprints for the checkpoint: see digests.py
        self.notes_before = {}  # notes of the resumed checkpoint
        self.unwritten = {}  # {name of a log: text that could not be written yet}
        self.dashboard = None  # a Dashboard, with --report_to
        self.unreadable = set()  # paths of checkpoints
        self.is_claimed = False
        self.saved = -1  # the step of the newest checkpoint
        self.save_failed = False
        self.must_not_save = False  # in an update from its first optimizer step on, and in a save
        self.completed = 0, {}, []  # the last complete step; run.state and some_weights then

    def load_model(self, cfg, device: torch.device) -> tuple:
        """Loads the newest checkpoint that can be read. The model of the run is loaded last, since
        your load_model may keep a reference to it."""
        of_base = None
        if cfg.resume and self.checkpoints() and cfg.lora_rank == 0:
            of_base = digests.of_weights(grpo.load_model(cfg.model, cfg, device))
        while True:
            try:
                model, saved = super().load_model(cfg, device)
                break
            except torch.OutOfMemoryError:
                raise
            except Exception as error:
                if not (cfg.resume and self.checkpoints()):
                    raise
                path = self.checkpoints()[-1]
                ranks.say(f"--resume: {path} cannot be read ({one_line(error)})")
                self.unreadable.add(path)
        require(saved or not self.unreadable, "resume", f"no checkpoint in {self.path} can be read")
        is_old = any(isinstance(key, int) for key in saved.get("moments", {}))
        why = f"{self.path} is from an earlier version (unnamed moments): resume with that version"
        require(not is_old, "resume", why)
        self.saved = saved.get("step", -1)
        names = "identity", "evals", "graders"
        self.notes_before = {name: saved[name] for name in names if name in saved}
        loaded = digests.of_weights(model)
        base = model
        if saved and cfg.lora_rank > 0:
            model = None  # frees the merged model: a GPU may not hold two
            base = grpo.load_model(cfg.model, cfg, device)
        self.notes["identity"] = dict(model=of_base or digests.of_weights(base))
        both = digests.of_values(self.notes["identity"], loaded)
        ranks.require_same({"the weights": both})
        if cfg.lora_rank > 0:
            from extras import lora

            with mistakes_in("--lora_rank"):  # peft rejects the layers of Mamba
                lora.add_adapters(base, saved, cfg)
            return base, saved
        return model, saved

    def open(self, run) -> None:
        """A new run gets its own directory, so that no run overwrites another. The directory is
        created last, so a failed start leaves nothing behind."""
        has_adapters = run.cfg.lora_rank == 0 or "identity" in self.notes
        require(has_adapters, "lora_rank", "Run must load the model with files.load_model")
        # All ranks must have the same fingerprints. A resume must have those of the run's start.
        with mistakes_in("--resume", (ValueError,)):
            mine = digests.compare(run, self.notes_before)
        ranks.require_same(mine)
        self.complete(run)
        before = {}
        if ranks.is_first() and run.step > 0:
            before = config_in(self.path).get("about", {})
        with mistakes_in(f"--out_dir {self.path}", (OSError, ValueError, TypeError)):
            if ranks.is_first():
                self.check_room(run)
            super().open(run)
            if ranks.is_first():
                if not self.is_claimed:  # your `open` may make the directory itself
                    self.claim(run.cfg)
                self.write_config(run, before)
                cut_log(self.path / "completions.jsonl", run.step)
        self.path = grpo.all_gather([self.path])[0]
        opened.append(self.path)

    def check_room(self, run) -> None:
        """Two checkpoints must fit: the old one is removed only when the new one is complete."""
        cfg, model = run.cfg, run.policy.model
        moments = 2 * sum(p.nbytes for p in model.parameters() if p.requires_grad)
        weights = dict(float64=8).get(cfg.dtype, 4) * model.num_parameters()  # tied weights once
        size = (weights + moments) / 1e9
        folder = next(path for path in (self.path, *self.path.parents) if path.exists())
        free = shutil.disk_usage(folder).free / 1e9
        at_once = 1
        if cfg.save_every > 0 or run.eval_prompts:
            at_once = cfg.keep + 2  # plus the best and the one being written
        saves_to_come = cfg.max_steps - run.step
        if cfg.max_steps == 0:
            saves_to_come = 1  # of the initial model
        at_once = min(at_once, saves_to_come)
        most = "all are kept" if cfg.keep == 0 else f"up to {at_once} at once"
        ranks.say(f"a checkpoint takes {size:.3g} GB ({most}), and {free:.3g} GB are free")
        if free + size * len(self.checkpoints()) < size * min(2, at_once):
            raise ValueError("has no room for two checkpoints")

    def make_directory(self, cfg) -> None:
        unnamed = self.path
        for number in itertools.count(1):
            try:
                super().make_directory(cfg)  # of runs that start together, one succeeds
                break
            except FileExistsError:
                if not self.is_unnamed:
                    break
                self.path = unnamed.with_name(f"{unnamed.name}.{number}")
        if holds_something(self.path) and not cfg.resume:
            raise ValueError("contains files already; name another directory, or use --resume")
        self.claim(cfg)

    def claim(self, cfg) -> None:
        """Locks the directory, and opens the dashboard."""
        self.is_claimed = True
        lock(cleanup.enter_context(open(self.path / ".lock", "a")))
        ranks.remember(f"directory of run {len(opened)}", str(self.path))
        if cfg.report_to in ("wandb", "trackio"):  # other dashboards are yours
            with mistakes_in(f"--report_to {cfg.report_to}"):
                from extras import dashboard

                out_dir = str(self.path)
                config = asdict(cfg) | dict(out_dir=out_dir)
                self.dashboard = dashboard.Dashboard(cfg.report_to, out_dir, config)
                cleanup.push(self.dashboard.close)

    def write_config(self, run, before: dict) -> None:
        """Adds digests of the files that were read, and first_day, the date of chat templates."""
        written = asdict(run.cfg) | config_in(self.path)
        added = sorted(written.keys() - vars(run.cfg).keys())  # keys of your RunFiles
        config = dict(first_day=run.cfg.began or ranks.now(), added=added) | written
        config |= dict(out_dir=str(self.path), began="", about={})
        config |= getattr(run.policy, "found", {})  # flags that extras/fast.py chose
        with contextlib.suppress(Exception):  # the run goes on without digests
            config["about"], edited = digests.about(run, before)
            if edited:
                ranks.say(f"edited since the run began: {', '.join(edited)}")
        self.write("config.json", json.dumps(config, indent=1, default=str))

    def write(self, name: str, text: str, mode: str = "w") -> None:
        """Writes all or nothing. Log lines that do not fit on the disk wait for the next write."""
        path = self.path / name
        if mode == "w" and digests.changed("write", of=super()):  # yours may check the name
            super().write(name, text)
            return
        if mode == "w":
            super().write(f".{name}", text)
            os.replace(self.path / f".{name}", path)
            return
        text = self.unwritten.pop(name, "") + text
        length = path.stat().st_size if path.exists() else 0
        try:
            super().write(name, text, mode)
        except OSError as error:  # the step and the other logs go on
            self.unwritten[name] = text
            with contextlib.suppress(OSError):
                os.truncate(path, length)
            ranks.say(f"a step is not logged yet in {path}: {one_line(error)}")

    def log(self, run, metrics: dict, samples: list) -> None:
        shown, metrics = metrics, without_nan(metrics)
        try:
            super().log(run, metrics, samples)
        except OSError as error:  # such as a full disk: the run goes on
            ranks.say(f"step {metrics['step']} is not logged: {one_line(error)}")
        shown |= metrics  # with metrics that your RunFiles added
        if self.dashboard is not None:
            try:
                self.dashboard.log(metrics)
            except Exception as error:  # such as no network
                ranks.say(f"step {metrics['step']} is not on the dashboard: {one_line(error)}")
        self.complete(run)

    def rows_of(self, run, samples: list) -> list[dict]:
        rows = list(super().rows_of(run, samples))
        own = [(row.get("group"), row.get("completion")) for row in rows]
        n = run.cfg.log_completions
        if len(rows) != len(samples):  # your rows: their samples are unknown
            return rows
        if own != [(s.group, s.text) for s in samples]:  # your columns
            return rows[:n]
        return more_columns(rows[:n], samples[:n], run.tokenizer)

    # -- Checkpoints

    def checkpoints(self) -> list[Path]:
        return [path for path in super().checkpoints() if path not in self.unreadable]

    def path_of(self, step: int) -> Path:
        return self.path / f"step_{step:06d}"

    def best_step(self) -> int:
        """The step with the highest eval accuracy so far; 0: none."""
        evals = {m["step"]: m["eval_accuracy"] for m in self.history if "eval_accuracy" in m}
        return max(evals, key=lambda step: evals[step], default=0)

    def complete(self, run, is_due: bool = False) -> None:
        """Records the step and a copy of run.state, for saves. is_due: also if it is not new."""
        if run.step > self.completed[0] or is_due:
            self.must_not_save = True
            json.dumps(run.state, default=refuse_unless_plain, skipkeys=True)
            self.completed = run.step, copy.deepcopy(run.state), some_weights(run)
            self.must_not_save = False

    def save_if_due(self, run) -> None:
        self.complete(run, is_due=True)
        super().save_if_due(run)
        if run.step == self.best_step() and not digests.changed("save_if_due", of=super()):
            self.save(run)

    def save(self, run, *args, as_it_is: bool = True, **kwargs) -> None:
        """as_it_is: save run.state as it is now; False: as it was after the last complete step.
        More arguments are those of your `save`, such as a name."""
        if as_it_is and (not self.must_not_save or run.step > self.completed[0]):
            self.complete(run, is_due=True)
        step, _, weights = self.completed
        if not ranks.is_first() or step != run.step or self.must_not_save:
            return
        # A signal may come while the weights change, by an optimizer of yours, too.
        if not as_it_is and (step == 0 or weights != some_weights(run)):
            return
        if step == self.saved and not (args or kwargs):
            return
        self.must_not_save = True
        try:
            if self.path_of(step) in self.unreadable:
                super().remove(self.path_of(step))
                self.unreadable.remove(self.path_of(step))
            with ranks.saving:
                super().save(run, *args, **kwargs)
            if not (args or kwargs):
                self.saved = step
            self.save_failed = False
        except Exception as error:  # such as a full disk
            free = shutil.disk_usage(self.path).free / 1e6
            ranks.say(f"step {step} is not saved ({free:.0f} MB free): {one_line(error)}")
            self.save_failed = True  # the next --save_every tries again
            shutil.rmtree(self.path / ".partial", ignore_errors=True)
        self.must_not_save = False

    def trainer_state(self, run) -> dict:
        named, learned = run.policy.model.named_parameters(), run.optimizer.state
        adapters = {}  # and other parameters that learn or have learned
        if run.cfg.lora_rank > 0:
            adapters = {
                name: p for name, p in named if ".lora_" in name or p.requires_grad or p in learned
            }
        now, run.state = run.state, self.completed[1]  # run.state may be a step ahead
        try:
            return dict(adapters=adapters) | self.notes | super().trainer_state(run)
        finally:
            run.state = now

    def remove(self, path: Path) -> None:
        try:
            if path.is_symlink():  # a user has moved the checkpoint: keep it there
                path.unlink()
            elif path != self.path_of(self.best_step()):
                super().remove(path)
        except OSError as error:  # such as a file that is open on NFS
            ranks.say(f"{path} cannot be removed: {one_line(error)}")

    def close(self) -> None:
        for name in [*self.unwritten]:
            self.write(name, "", "a")
        if self.save_failed:
            raise TrainingError(f"no checkpoint in {self.path} has the last step")


def some_weights(run) -> list:
    """Up to 64 values of each parameter. (torch's p._version does not count fused steps.)"""
    learn = [p.detach().flatten() for p in run.policy.parameters() if p.requires_grad]
    return torch.cat([p[:: len(p) // 64 + 1] for p in learn]).tolist()  # one copy from a GPU


def refuse_unless_plain(value):
    if isinstance(value, (set, frozenset)):
        return list(value)
    if not isinstance(value, (np.ndarray, np.generic, torch.Tensor)):
        kind = type(value).__name__
        why = "may contain dicts, lists, sets, numbers and arrays"
        raise TrainingError(f"run.state {why}, but no {kind}")


# -- The run


def train(plain, cfg, *args, **kwargs) -> list[dict]:
    """Closes all that the run has opened, even if it fails (several ranks: see ranks.leave)."""
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    try:
        with cleanup:
            try:
                return plain(models.checked(cfg), *args, **kwargs)
            except BaseException as error:
                ranks.leave(error)
                raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run_loop(plain, run, *args, **kwargs) -> None:
    """Saves the last complete step on a signal or an error."""
    if not isinstance(run, grpo.Run):  # another object with a sampler, as in a test
        return plain(run, *args, **kwargs)
    if not isinstance(run.files, Files):
        raise ConfigError("run.files must be made by make_files: create yours there")
    screen.show_begin(run)
    forbid_saves_from_a_step_on(run)
    StopSignals(run).listen()
    started = time.perf_counter()
    try:
        plain(run, *args, **kwargs)
    except BaseException as error:
        while error is not None:  # frees the failed pass's memory for the save
            traceback.clear_frames(error.__traceback__)
            error = error.__context__
        run.files.save(run, as_it_is=False)
        raise
    run.files.complete(run, is_due=True)  # the save at the end may be the only one
    cleanup.callback(screen.show_end, run, started)


def forbid_saves_from_a_step_on(run) -> None:
    """Between an update's first optimizer step and its end, the weights belong to no step."""
    step = run.optimizer.step

    def forbid_and_step(_, *args, **kwargs):  # a method, as torch's schedulers wrap one
        run.files.must_not_save = True
        return step(*args, **kwargs)

    run.optimizer.step = types.MethodType(forbid_and_step, run.optimizer)
