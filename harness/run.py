"""A run on disk: its directory, its checkpoints, its signals, its clock."""

import contextlib
import dataclasses
import fcntl
import gc
import json
import math
import os
import re
import select
import shutil
import signal
import threading
import time
import zlib
from collections import Counter
from dataclasses import dataclass

import torch
import torch.distributed as dist
from safetensors import SafetensorError

import view
from harness.flags import ConfigError, Stopped, TrainingError, differing_flags, first_line, say
from harness.log import Log
from harness.ranks import World, seed_everything, seed_of

BAD_STEPS = 5  # steps in a row without a finite gradient that end a run


WRITTEN = re.compile(  # by a run; nothing else in out_dir is ever touched
    r"(config\.json|metrics\.jsonl|completions\.jsonl|best)(\.new)?|curves\.png|events\.out\.tfevents\..*|wandb"
    r"|(step|partial)_\d{6,}|step_\d{6,}\.stale(\.\d+)?"
)


def claim_out_dir(cfg, checkpoint):
    """Rank 0 only: locks out_dir, moves aside what it holds of other runs, writes config.json. Returns the config (a
    model that was moved has a new path) and the lock. checkpoint: the one to go on from, or None."""
    out = os.path.realpath(cfg.out_dir)  # of a link, of `out/`, of `.`
    with contextlib.ExitStack() as undo:
        try:
            os.makedirs(out, exist_ok=True)
            lock = lock_out_dir(cfg.out_dir)
            undo.callback(os.close, lock)
            if not checkpoint or os.path.dirname(os.path.realpath(checkpoint.path)) != out:
                cfg = move_aside(out, cfg)
            for newer in checkpoints(out):
                if int(newer.rpartition("_")[2]) > checkpoint.state["step"]:  # of a future that this run now leaves
                    os.replace(newer, free_name(newer + ".stale"))
            for name in os.listdir(out):
                if re.fullmatch(r"partial_\d{6,}", name):  # a save that a kill cut short
                    shutil.rmtree(os.path.join(out, name))
            with open(os.path.join(out, "config.json.new"), "w") as file:
                json.dump(dataclasses.asdict(cfg), file, indent=1)
            os.replace(os.path.join(out, "config.json.new"), os.path.join(out, "config.json"))
            with open(os.path.join(out, ".lock"), "w") as file:  # last: from here on what is here is this launch's own
                file.write(f"{os.getpid()} {launch()}")
        except OSError as error:
            raise ConfigError(f"--out_dir {cfg.out_dir}: {error.strerror}") from None
        undo.pop_all()
        return cfg, lock


def lock_out_dir(out_dir: str) -> int:
    """An open, locked file: the system frees it with the process, however that ends."""
    path = os.path.join(out_dir, ".lock")
    handle = os.open(path, os.O_RDONLY | os.O_CREAT, 0o644)  # to read: a disk may become read-only under it
    for wait in [0.1] * 30 + [0]:  # the ranks of a torchrun that was killed take a second to notice
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if wait:
                time.sleep(wait)
                continue
            pid = os.read(handle, 20).decode().split(" ")[0]
            os.close(handle)
            raise ConfigError(f"--out_dir {out_dir}: another run (process {pid}) is writing there") from None
        except OSError:
            pass  # a file system without locks
        return handle


def launch() -> str:
    """Names this start of torchrun, and stays the same over its --max_restarts."""
    return f"{os.environ.get('TORCHELASTIC_RUN_ID', '')} {os.getppid()}"


def restarted(out_dir: str) -> bool:
    """Whether torchrun --max_restarts brought back the very run that last wrote in out_dir."""
    with contextlib.suppress(OSError), open(os.path.join(out_dir, ".lock")) as lock:
        again = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) > 0
        return again and lock.read().partition(" ")[2] == launch()
    return False


def move_aside(out: str, cfg):
    """What a run left in out goes to out.1 (or .2, ...), or into out/earlier.1 where nothing can be moved out."""
    names = sorted(name for name in os.listdir(out) if WRITTEN.fullmatch(name))
    with contextlib.suppress(OSError, ValueError), open(os.path.join(out, "config.json")) as file:
        if "out_dir" not in json.load(file):
            raise ConfigError(f"--out_dir {cfg.out_dir}: holds a config.json that is no run's; name another directory")
    for base in (out, os.path.join(out, "earlier")) if names else ():
        aside = free_name(base, start=1)
        try:
            os.mkdir(aside)
            os.replace(os.path.join(out, names[0]), os.path.join(aside, names[0]))  # not across a mount point
        except OSError:
            if base != out:
                raise
            continue
        for name in names[1:]:
            os.replace(os.path.join(out, name), os.path.join(aside, name))
        shown = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
        say(f"{cfg.out_dir} held an earlier run ({shown}): moved to {aside}")
        for flag_ in ("model", "tokenizer"):
            folder, name = os.path.split(os.path.realpath(getattr(cfg, flag_)))
            if folder == out and name in names:
                cfg = dataclasses.replace(cfg, **{flag_: os.path.join(aside, name)})
                say(f"--{flag_} was in it, and is now {getattr(cfg, flag_)}")
        break
    return cfg


def free_name(base: str, start: int = 0) -> str:
    """base, or base.1, base.2, ...: the first that does not exist."""
    number = start
    while os.path.lexists(name := f"{base}.{number}" if number else base):
        number += 1
    return name


def run_config(config, resume: str, out_dir: str) -> dict:
    """The flags of the run that --resume goes on with: its config.json, less what this version does not know."""
    folder = out_dir if resume == "latest" else os.path.dirname(os.path.abspath(resume))
    known = {f.name for f in dataclasses.fields(config)} - {"resume", "out_dir"}
    try:
        with open(os.path.join(folder, "config.json")) as file:
            saved = json.load(file) | dict(out_dir=folder)
    except (OSError, ValueError, TypeError):  # a checkpoint that was copied alone has the flags, too
        with contextlib.suppress(OSError):
            return {k: v for k, v in load_checkpoint(resume).state["config"].items() if k in known}
        return {}
    return {name: value for name, value in saved.items() if name in known | {"out_dir"}}


@dataclass
class Checkpoint:
    path: str
    state: dict


def checkpoints(out_dir: str) -> list[str]:
    """Complete checkpoint directories, oldest first."""
    names = os.listdir(out_dir) if os.path.isdir(out_dir) else []
    steps = sorted(int(name[5:]) for name in names if re.fullmatch(r"step_\d{6,}", name))
    return [os.path.join(out_dir, f"step_{step:06d}") for step in steps]


def checksum(path: str) -> int:
    value = 0
    with open(path, "rb") as file:
        while part := file.read(1 << 20):
            value = zlib.crc32(part, value)
    return value


def load_checkpoint(path: str) -> Checkpoint:
    """OSError if a file of it is missing, cut short or changed."""
    try:
        with open(os.path.join(path, "checksums.json")) as file:
            for name, expected in json.load(file).items():
                if checksum(os.path.join(path, name)) != expected:
                    raise OSError(f"{name} is not as it was written")
        state = torch.load(os.path.join(path, "trainer_state.pt"), map_location="cpu", weights_only=True)
    except Exception as error:  # torch.load raises half a dozen types on a torn file
        raise OSError(first_line(error)) from None
    return Checkpoint(path, state)


def find_checkpoint(cfg) -> Checkpoint | None:
    """What --resume asks for, a named checkpoint or the newest whole one in out_dir; None: from the beginning."""
    own = checkpoints(cfg.out_dir) if restarted(cfg.out_dir) else []  # of this launch: newer than what it began with
    if cfg.resume not in ("", "latest") and not own:
        try:
            return load_checkpoint(cfg.resume)
        except OSError as error:
            raise ConfigError(f"--resume {cfg.resume}: not a whole checkpoint ({error})") from None
    if not cfg.resume and not own:
        return None
    for path in reversed(checkpoints(cfg.out_dir)):
        try:
            return load_checkpoint(path)
        except OSError as error:
            say(f"checkpoint {path} is damaged ({error}): trying the one before")
    say(f"--resume: no checkpoint in {cfg.out_dir}, starting from the beginning")
    return None


def model_writer(model, tokenizer, source: str):
    """write(directory), which writes what from_pretrained loads. The generation_config.json of `source` comes along as
    it is: transformers refuses to write some that it reads."""
    from transformers import GenerationConfig
    from transformers.utils import cached_file

    generation = None
    try:
        model.generation_config.validate(strict=True)
    except ValueError:  # it would not be written, and the sampler does not need it: vLLM has its own parameters
        model.generation_config = GenerationConfig()
    with contextlib.suppress(OSError), open(cached_file(source, "generation_config.json"), "rb") as file:
        generation = file.read()

    def write(path):
        model.save_pretrained(path)
        tokenizer.save_pretrained(path)
        file = os.path.join(path, "generation_config.json")
        with contextlib.suppress(FileNotFoundError):
            os.remove(file)  # the one that samples for us
        if generation is not None:
            with open(file, "wb") as target:
                target.write(generation)

    return write


def write_checkpoint(final: str, partial: str, write_model, state: dict) -> None:
    """It gets its name only when it is whole."""
    shutil.rmtree(partial, ignore_errors=True)
    write_model(partial)
    torch.save(state, os.path.join(partial, "trainer_state.pt"))
    sums = {name: checksum(os.path.join(partial, name)) for name in files_below(partial)}
    with open(os.path.join(partial, "checksums.json"), "w") as file:
        json.dump(sums, file, indent=1)
    for name in [*sums, *{os.path.dirname(name) for name in sums}, "checksums.json"]:
        fsync(os.path.join(partial, name))
    if os.path.isdir(final):
        os.replace(final, free_name(final + ".stale"))
    os.replace(partial, final)
    fsync(os.path.dirname(final))


def files_below(path: str) -> list[str]:
    """Their names relative to it: a tokenizer with several chat templates writes a folder."""
    found = (os.path.join(folder, name) for folder, _, names in os.walk(path) for name in names)
    return sorted(os.path.relpath(file, path) for file in found)


def fsync(path: str) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def link_best(out_dir: str, best: dict) -> None:
    """The link `best` points to the best checkpoint, if that is still there; else there is none."""
    link, name = os.path.join(out_dir, "best"), f"step_{best['step']:06d}" if best else ""
    with contextlib.suppress(FileNotFoundError):
        os.remove(link + ".new")
    if best and os.path.isdir(os.path.join(out_dir, name)):
        os.symlink(name, link + ".new")
        os.replace(link + ".new", link)
    elif os.path.islink(link):
        os.remove(link)


def fingerprint(model) -> int:
    """Names the weights: the sum of their bits, by parameter. The same on every device."""
    parameters = enumerate(model.parameters(), 1)
    sums = (n * int(p.detach().reshape(-1).view(torch.int32).sum(dtype=torch.int64)) for n, p in parameters)
    return sum(sums) % 2**63


class Run:
    """A run between its first and its last step: it saves when that is due, on signals, and on the way out of an error.

    SIGTERM and SIGINT end it where it is: a step is a pure function of (seed, step), so what the last whole step left
    is saved, unless it is already, and the broken one is made again after --resume. Only an optimiser that works is
    waited for, until the step is recorded. SIGUSR1, or a file `save` in out_dir, saves after the step.
    """

    def __init__(self, cfg, world: World, checkpoint: Checkpoint | None, started: float):
        self.world, self.started, self.rank0 = world, started, world.rank == 0
        self.checkpoint, self.best, self.lock_file = checkpoint, {}, None
        self.step = self.saved = self.first = checkpoint.state["step"] if checkpoint else 0
        if len(set(world.gather([self.first]))) > 1:
            raise TrainingError(
                f"--resume: the machines hold different checkpoints in {cfg.out_dir}; share it, or copy them"
            )
        if self.rank0:  # every rank has read what it needs of an earlier run, which may now be moved
            cfg, self.lock_file = claim_out_dir(cfg, checkpoint)
        self.cfg = world.gather([cfg])[0]
        self.exits, self.clock = contextlib.ExitStack(), Clock(world.device)
        self.lock = threading.Lock()  # held while weights change and while they are saved
        self.held, self.whole, self.stopping, self.left = False, True, False, False
        self.alone = True  # rank 0 can save without the others
        self.model, self.bad, self.said = None, 0, set()
        self.log = Log(self.cfg, self.first if checkpoint else -1, self.rank0)

    def track(self, model, optimizer, write_model, identity: int) -> None:
        """What a checkpoint is made of. write_model(directory) writes what from_pretrained loads; identity: that of
        the weights before the first step. A resumed run gets its optimiser's state back here."""
        self.model, self.optimizer, self.write_model, self.identity = model, optimizer, write_model, identity
        optimizer.register_step_pre_hook(lambda *_: self.hold(whole=False))
        if self.checkpoint:
            self.restore()
        elif self.rank0:
            self.rehearse()

    def state(self) -> dict:
        """What trainer_state.pt holds. Called on every rank when a save is due."""
        return dict(optimizer=self.optimizer.state_dict())

    def restore(self) -> None:
        state, out = self.checkpoint.state, self.cfg.out_dir
        self.optimizer.load_state_dict(state.pop("optimizer"))  # pop: nothing else keeps it in memory
        say(f"resumed from {self.checkpoint.path} at step {self.first}")
        for name, old in state["config"].items():
            if name != "resume" and getattr(self.cfg, name, None) != old:
                say(f"  changed since then: --{name} {old} -> {getattr(self.cfg, name, 'gone')}")
        if state["world_size"] != self.world.size:
            say(f"  {state['world_size']} ranks before, {self.world.size} now: the sums round differently from here on")
        if self.rank0:
            # of the log, not of the checkpoint: an eval comes after its step, and a stop may come between the two
            evals = [m for m in self.log.history if m["step"] and view.is_number(m.get("eval_accuracy"))]
            evals = [m for m in evals if os.path.isdir(os.path.join(out, f"step_{m['step']:06d}"))]
            best = max(evals, key=lambda m: m["eval_accuracy"], default={})
            self.best = {key: best[key] for key in ("step", "eval_accuracy") if best}
            link_best(out, self.best)
        self.best = self.world.gather([self.best])[0]

    def rehearse(self) -> None:
        """That a checkpoint can be written is proved before the first step, not found out after hours."""
        trial = os.path.join(self.cfg.out_dir, "partial_000000")
        try:
            self.write_model(trial)
            room = shutil.disk_usage(trial).free
            size = sum(os.path.getsize(os.path.join(trial, name)) for name in files_below(trial))
        except Exception as error:
            why = f"no checkpoint can be saved there ({first_line(error)})"
            raise ConfigError(f"--out_dir {self.cfg.out_dir}: {why}") from error
        finally:
            shutil.rmtree(trial, ignore_errors=True)
        if room < 3 * size:  # weights and both of Adam's moments
            say(f"warning: {self.cfg.out_dir} has {room / 1e9:.2g} GB free, a checkpoint takes {3 * size / 1e9:.2g}")

    def steps(self):
        """The numbers of the steps that are left. After each one: what is due is saved."""
        for step in range(self.first + 1, self.cfg.max_steps + 1):
            seed_everything(seed_of(self.cfg.seed, 2, step, self.world.rank))
            yield step
            due = self.cfg.save_every and step % self.cfg.save_every == 0
            due = due or step in (self.best.get("step"), self.cfg.max_steps)
            asked = self.rank0 and os.path.isfile(os.path.join(self.cfg.out_dir, "save"))
            if asked:
                os.remove(os.path.join(self.cfg.out_dir, "save"))
            if any(self.world.gather([due or asked])):
                self.save()

    def record(self, step: int, metrics: dict, rows: list[dict]) -> None:
        """The step is whole: from here on a stop saves it. rows: of its samples, for completions.jsonl."""
        self.hold()
        times = self.clock.take()
        speed = dict(tokens_per_s=metrics["tokens"] / max(1e-9, sum(times.values())))
        self.step, self.whole = step, True  # first: a dashboard that raises costs no step
        self.log.step(dict(step=step) | metrics | speed | times, rows)
        self.release()
        if step == self.first + 1:
            self.clock.say_peaks()
        self.bad = self.bad + 1 if metrics["skipped_steps"] else 0
        if self.bad == BAD_STEPS:
            raise TrainingError(
                f"no finite gradient in {self.bad} steps in a row, so nothing was updated: lower --learning_rate, look "
                "at the rewards and at completions.jsonl, and go on with --resume"
            )

    def introduce(self, defaults, what: str) -> None:
        say(f"flags: {differing_flags(self.cfg, defaults)}")
        size = sum(p.numel() for p in self.model.parameters()) / 1e6
        say(f"{self.cfg.model}: {size:.2f} M parameters on {self.world.device}, {self.world.size} rank(s); {what}")

    def failures(self, scores: list, step: int, n_samples: int) -> dict:
        """Of the reward functions that failed, on every rank: said the first time, counted, the end if none came
        through in the first step. And what they logged of their own."""
        failed = sum(sum(s.failed) for s in scores)
        for line in [*(s.first_failure for s in scores), *(s.first_retry for s in scores)]:
            self.say_once("failed" if "failed on" in line else "retry", line)
        if failed == n_samples and step == 1:
            raise TrainingError("every reward of the first step failed; the line above says how the first one did")
        causes = sum((Counter(s.failures) for s in scores), Counter())
        metrics = {name: value for s in scores for name, value in s.metrics.items()}
        return metrics | {f"reward_failed/{c}": n for c, n in causes.items()} | dict(failed_rewards=failed or None)

    def say_once(self, what: str, line: str) -> None:
        if line and what not in self.said:
            self.said.add(what)
            say(line)

    def eval_due(self, step: int) -> bool:
        """Before the first step, every --eval_every steps and after the last; again where a stop came before it."""
        last, every = self.log.history[-1:], self.cfg.eval_every
        done = bool(last) and last[0]["step"] == step and "eval_accuracy" in last[0]
        due = step in (0, self.cfg.max_steps) or bool(every and step % every == 0)
        return bool(self.cfg.eval_data) and self.world.gather([due and not done])[0]

    def record_eval(self, step: int, metrics: dict) -> None:
        """Adds an eval's metrics to the line of its step."""
        self.hold()
        self.log.add(step, metrics)
        if step and metrics["eval_accuracy"] > self.best.get("eval_accuracy", -math.inf):
            self.best = dict(step=step, eval_accuracy=metrics["eval_accuracy"])
        self.release()

    # -- saving

    def save(self) -> None:
        state = self.state()
        self.hold()
        self.write(state)
        self.release()

    def write(self, state: dict) -> None:
        """Rank 0 writes the last whole step. A save that fails is said and leaves the checkpoint before in place: the
        run goes on, the next save tries again."""
        if not self.rank0 or self.saved == self.step:
            return
        final, partial = (os.path.join(self.cfg.out_dir, f"{kind}_{self.step:06d}") for kind in ("step", "partial"))
        if not all(p.isfinite().all() for p in self.model.parameters()):
            say(f"step {self.step}: not saved, some parameters are not finite; the checkpoint before stands")
            return
        state |= dict(step=self.step, config=dataclasses.asdict(self.cfg), best=self.best)
        state |= dict(world_size=self.world.size, identity=self.identity)
        try:
            write_checkpoint(final, partial, self.write_model, state)
            self.saved = self.step
            for path in checkpoints(self.cfg.out_dir)[: -self.cfg.keep] if self.cfg.keep else []:
                if int(path.rpartition("_")[2]) != self.best.get("step"):
                    shutil.rmtree(path)
            link_best(self.cfg.out_dir, self.best)
        except (OSError, RuntimeError, SafetensorError) as error:  # torch and safetensors report a full disk their way
            say(f"step {self.step}: could not save ({error}); the checkpoint before stands, the next save tries again")
            shutil.rmtree(partial, ignore_errors=True)

    def save_last(self) -> str:
        """Saves what the last whole step left, if it is not saved yet and still there; says what stands."""
        if self.step > 0 and self.whole and self.alone:
            self.write(self.state())
        if not self.saved:
            return f"stopped in step {self.step + 1}; nothing is saved"
        if self.checkpoint and self.saved == self.first:  # perhaps of another directory
            return f"stopped in step {self.step + 1}; go on with --resume {self.checkpoint.path}"
        path = os.path.join(self.cfg.out_dir, f"step_{self.saved:06d}")
        return f"stopped in step {self.step + 1}, {path} is saved; go on with --resume"

    # -- signals

    def hold(self, whole: bool | None = None) -> None:
        """Until release() no stop comes in between, and the weights are nobody else's."""
        if not self.held:
            self.held = True  # first: a signal that comes now waits already
            self.lock.acquire()
        self.whole = self.whole if whole is None else whole

    def release(self) -> None:
        self.lock.release()
        self.held = False
        if self.stopping:
            raise Stopped

    def on_stop(self, number, frame) -> None:
        first, self.stopping = not self.stopping, True
        if first and not self.held:
            raise Stopped

    def on_save(self, number, frame) -> None:
        with contextlib.suppress(OSError), open(os.path.join(self.cfg.out_dir, "save"), "w"):
            pass

    def __enter__(self):
        if threading.current_thread() is threading.main_thread():  # only there signals can be had
            hear, tell = os.pipe()
            os.set_blocking(tell, False)
            handlers = {signal.SIGTERM: self.on_stop, signal.SIGINT: self.on_stop, signal.SIGUSR1: self.on_save}
            for number, handler in handlers.items():
                self.exits.callback(signal.signal, number, signal.signal(number, handler))
            self.exits.callback(os.close, tell)  # ends the thread
            self.exits.callback(signal.set_wakeup_fd, signal.set_wakeup_fd(tell, warn_on_full_buffer=False))
            threading.Thread(target=self.watch, args=(hear,), daemon=True).start()
        return self

    def watch(self, hear: int) -> None:
        """A thread that hears signals, too, while the main thread sits in one long call."""
        parent, asked, numbers = os.getppid(), None, b" "
        while numbers:
            ready = select.select([hear], [], [], 1.0)[0]
            if "TORCHELASTIC_RUN_ID" in os.environ and os.getppid() != parent:
                os._exit(1)  # torchrun was killed: no orphan trains on beside a --resume
            numbers = os.read(hear, 64) if ready else b" "
            for number in set(numbers) & {signal.SIGTERM, signal.SIGINT}:
                if asked is None:
                    asked = time.monotonic()
                    threading.Thread(target=self.leave, daemon=True).start()
                elif time.monotonic() - asked > 1:  # sooner: the same Ctrl-C, which torchrun passes on again
                    os._exit(128 + number)
        os.close(hear)

    def leave(self) -> None:
        """Ends the process if the main thread, deep in a call, does not come to it by itself."""
        time.sleep(3)
        if self.left:
            return
        with self.lock:
            line = self.save_last()
        time.sleep(2)  # it may be closing what it had opened
        if not self.left:
            say(f"signal: {line}")
            os._exit(0)

    def __exit__(self, kind, error, trace):
        if error is not None and self.model is not None:
            self.hold()
            say(("signal: " if self.stopping else "") + self.save_last())
            self.lock.release()
        elif self.stopping:
            say("signal: stopped before the first step; nothing was trained")
        self.held = True  # no more stops
        closing = [lambda: self.log.close(time.monotonic() - self.started, self.best), self.exits.close]
        if error is None and self.world.size > 1:  # nobody leaves while rank 0 still writes; and what is left of DDP is
            closing[1:1] = [dist.barrier, gc.collect]  # freed before its group: later it can wait for ever for gloo
        for close in closing:
            with contextlib.suppress(Exception) if error is not None else contextlib.nullcontext():
                close()
        if "RANK" in os.environ and dist.is_initialized():  # an engine that closed may have ended it
            with contextlib.suppress(Exception) if error is not None else contextlib.nullcontext():
                dist.destroy_process_group()
        self.left = True
        if self.lock_file is not None:
            os.close(self.lock_file)
        return self.stopping


class Clock:
    """Seconds of each phase of a step, and in the first one the peak of memory."""

    def __init__(self, device):
        self.device, self.seconds, self.peaks, self.first = device, {}, {}, True

    @contextlib.contextmanager
    def __call__(self, phase: str):
        self.peak()
        started = time.perf_counter()
        yield
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        self.seconds[f"time_{phase}"] = time.perf_counter() - started
        self.peaks[phase] = self.peak()

    def take(self) -> dict:
        seconds, self.seconds = self.seconds, {}
        return seconds

    def peak(self) -> float:
        """The most bytes in use since the last call: of torch on a GPU, of the process elsewhere (Linux)."""
        if self.first and self.device.type == "cuda":
            most = torch.cuda.max_memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            return float(most)
        with contextlib.suppress(OSError):
            if self.first:
                with open("/proc/self/status") as status, open("/proc/self/clear_refs", "w") as reset:
                    most = next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))
                    reset.write("5")
                    return 1024.0 * most
        return 0.0

    def say_peaks(self) -> None:
        self.first = False
        where = "on the GPU" if self.device.type == "cuda" else "resident"
        sampling = "--vllm_gpu_memory_utilization" if self.device.type == "cuda" else "--num_prompts"
        flags = dict(rollout=sampling, logps="--beta 0")
        flags |= dict(update="--micro_batch_tokens, --gradient_checkpointing")
        shown = [f"{p} {self.peaks[p] / 1e9:.2g} ({flags[p]})" for p in flags if self.peaks.get(p)]
        if shown:
            say(f"peak memory of the first step, GB {where}, and what lowers it: {', '.join(shown)}")
