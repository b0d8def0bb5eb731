"""A run: what it saves and when, how it stops, its clock. Nothing here knows what an advantage is."""

import contextlib
import dataclasses
import gc
import math
import os
import select
import shutil
import signal
import threading
import time

import torch
import torch.distributed as dist

from harness.checkpoints import Checkpoint, checkpoints, claim_out_dir, write_checkpoint
from harness.flags import ConfigError, TrainingError, differing_flags, first_line, say
from harness.log import Log
from harness.ranks import World, leave_world, seed_of

BAD_STEPS = 5  # steps in a row without a finite gradient that end a run


class Run:
    """A run between its first and its last step: it saves when that is due, on signals, and on the way out of an error.

    A step is a pure function of (seed, step): what the last whole step left can be saved while the next one is under
    way, which --resume makes again. So a stop waits only while weights change: from the first optimiser step of a
    rollout until that step is recorded. On the command line a thread answers it: it saves and ends the process. Python
    callers get KeyboardInterrupt, after the save. SIGUSR1, or a file `save` in out_dir, saves after the step.
    For patches: parts {name: (save, load)} are what trainer_state.pt holds. save() is called on every rank, load() in
    track(). alone = False: a save takes all ranks. change() comes before anything else that moves weights.
    """

    def __init__(
        self,
        cfg,
        world: World,
        checkpoint: Checkpoint | None,
        started: float,
        command_line=False,
        code=None,
    ):
        """code: {path: SHA-256} of the files that rewards come from."""
        self.world, self.checkpoint, self.command_line, self.rank0 = (
            world,
            checkpoint,
            command_line,
            world.rank == 0,
        )
        self.step = self.first = checkpoint.state["step"] if checkpoint else 0
        if len(set(world.gather([self.first]))) > 1:
            raise TrainingError(
                f"--resume: the machines hold different checkpoints in {cfg.out_dir}; share it"
            )
        self.exits, self.clock = contextlib.ExitStack(), Clock(world.device)
        self.cfg = cfg = world.first(lambda: claim_out_dir(cfg, code, self.exits))
        self.exits.callback(leave_world, world)
        self.config = dataclasses.asdict(cfg) | dict(ranks=world.size, reward_code=code)
        self.saved = self.first if checkpoint and checkpoint.path == self.path_of(self.first) else 0
        self.lock, self.changing = (
            threading.RLock(),
            False,
        )  # held while weights change and while they are saved
        self.asked, self.left = (
            0.0,
            False,
        )  # when the first signal came; whether nothing is left to save
        self.parts, self.alone, self.due, self.bad, self.said = (
            {},
            True,
            False,
            0,
            False,
        )  # said: how a reward failed
        self.log = Log(cfg, self.first, started, self.rank0)

    def track(self, model, optimizer, write_model, identity: int) -> None:
        """What a checkpoint is made of. identity: the fingerprint of the weights before the first step."""
        self.model, self.write_model, self.identity = model, write_model, identity
        self.parts.setdefault("optimizer", (optimizer.state_dict, optimizer.load_state_dict))
        optimizer.register_step_pre_hook(lambda *_: self.change())
        if not self.checkpoint:
            return self.world.first(self.try_to_save)
        given = [
            {k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups
        ]
        self.restore(self.checkpoint.state)
        for group, own in zip(
            optimizer.param_groups, given, strict=True
        ):  # flags that are given now win
            group.update(own)

    def try_to_save(self) -> None:
        """That a checkpoint can be written is proved now, not found out after hours."""
        trial = os.path.join(self.cfg.out_dir, ".trial")
        try:
            write_checkpoint(trial, self.write_model, {})
            shutil.rmtree(trial)
        except Exception as error:
            why = f"no checkpoint can be saved there ({first_line(error)})"
            raise ConfigError(f"--out_dir {self.cfg.out_dir}: {why}") from error

    def restore(self, state: dict) -> None:
        for name, (_, load) in self.parts.items():
            if name not in state:
                raise ConfigError(
                    f"--resume {self.checkpoint.path}: it holds no {name}, which is needed here"
                )
            load(state.pop(name))  # pop: nothing else keeps it in memory
        changed = [name for name, old in state["config"].items() if self.config.get(name) != old]
        changed = (
            ", ".join(name for name in changed if name not in ("resume", "out_dir")) or "nothing"
        )
        say(
            f"resumed from {self.checkpoint.path} at step {self.first}; changed since then: {changed}"
        )

    def introduce(self, defaults, what: str) -> None:
        say(f"flags: {differing_flags(self.cfg, defaults)}")
        size = sum(p.numel() for p in self.model.parameters()) / 1e6
        say(
            f"{self.cfg.model}: {size:.2f} M parameters on {self.world.device}, {self.world.size} rank(s); {what}"
        )

    def steps(self):
        """The numbers of the steps that are left. After each one: what is due is saved."""
        if self.rank0:
            with contextlib.suppress(OSError):
                self.tidy()  # an eval that was made again may have another best
        for step in range(self.first + 1, self.cfg.max_steps + 1):
            torch.manual_seed(
                seed_of(self.cfg.seed, 2, step, self.world.rank)
            )  # for a changed copy that draws
            yield step
            every, asked = self.cfg.save_every, os.path.join(self.cfg.out_dir, "save")
            due = [self.due, step == self.cfg.max_steps, bool(every) and step % every == 0]
            if self.rank0:
                due += [step == self.log.best(), os.path.isfile(asked)]
            if any(self.world.gather(due)):
                self.due = False
                with contextlib.suppress(OSError):
                    os.remove(asked)
                self.save()

    def change(self) -> None:
        """From here until the step is recorded the weights are of no whole step: a stop waits."""
        if not self.changing:
            self.lock.acquire()
            self.changing = True

    def record(self, step: int, metrics: dict, rows: list[dict]) -> None:
        """The step is whole: from here on a stop saves it. rows: of its samples, for completions.jsonl."""
        self.change()
        seconds = self.clock.take()
        total = sum(seconds.values())
        speed = dict(step_time=total, tokens_per_s=metrics["tokens"] / max(1e-9, total))
        self.step, self.changing = step, False
        try:
            self.log.step(dict(step=step) | metrics | seconds | speed, rows)
        finally:
            self.lock.release()
        if self.asked and not self.command_line:
            raise KeyboardInterrupt
        self.bad = self.bad + 1 if metrics["skipped_steps"] else 0
        if self.bad == BAD_STEPS:
            why = "lower --learning_rate, look at the rewards and at completions.jsonl, and go on with --resume"
            raise TrainingError(
                f"no finite gradient in {self.bad} steps in a row, so nothing was updated: {why}"
            )

    def eval_due(self, step: int) -> bool:
        """Before the first step, every --eval_every steps and after the last; again where a stop came before it."""
        done = any(m["step"] == step and "eval_accuracy" in m for m in self.log.history[-1:])
        due = step in (0, self.cfg.max_steps) or bool(
            self.cfg.eval_every and step % self.cfg.eval_every == 0
        )
        return bool(self.cfg.eval_data) and self.world.first(lambda: due and not done)

    def record_eval(self, step: int, metrics: dict) -> None:
        with self.lock:
            self.log.eval(step, metrics)

    def path_of(self, step: int) -> str:
        return os.path.join(self.cfg.out_dir, f"step_{step:06d}")

    def save(self) -> None:
        """Rank 0 writes the last whole step. A save that fails is said: the run goes on, the next save tries again."""
        cuda = (
            self.world.device.type == "cuda"
        )  # a stream of its own does not wait for what a lost rank never joins
        with self.lock, torch.cuda.stream(torch.cuda.Stream(self.world.device) if cuda else None):
            state = {}
            try:
                state = {name: save() for name, (save, _) in self.parts.items()}
                if not self.rank0 or self.saved == self.step:
                    return
                state |= dict(step=self.step, identity=self.identity, config=self.config)
                if not torch.nn.utils.get_total_norm(self.model.parameters(), math.inf).isfinite():
                    raise ArithmeticError("some parameters are not finite")
                write_checkpoint(self.path_of(self.step), self.write_model, state)
                self.saved = self.step
                self.tidy()
            except Exception as error:  # a full disk has half a dozen types, too
                if not (self.alone or state):
                    raise  # the other ranks wait for this one
                say(
                    f"step {self.step}: could not save ({first_line(error)}); the checkpoint before stands"
                )

    def tidy(self) -> None:
        """Keeps the newest checkpoints and the best one, to which the link `best` points."""
        best, link = self.path_of(self.log.best()), os.path.join(self.cfg.out_dir, "best")
        past = [
            path for path in checkpoints(self.cfg.out_dir) if path <= self.path_of(self.step)
        ]  # later: damaged
        for path in set(past[: -self.cfg.keep] if self.cfg.keep else []) - {best}:
            shutil.rmtree(path)
        if os.path.isdir(best):
            with contextlib.suppress(FileNotFoundError):
                os.remove(link)
            os.symlink(os.path.basename(best), link)

    def save_last(self, why: str) -> None:
        """Saves what the last whole step left, if it is not saved yet and still there; says what stands."""
        if self.step > self.first and self.alone and not self.changing:
            self.save()
        stands = (
            f"{self.path_of(self.saved)} is saved; go on with --resume"
            if self.saved
            else "nothing is saved"
        )
        say(f"{why}stopped in step {self.step + 1}, {stands}")

    def __enter__(self):
        if threading.current_thread() is threading.main_thread():  # only there signals can be had
            hear, tell = os.pipe()
            os.set_blocking(tell, False)
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
                if signal.getsignal(number) is not signal.SIG_IGN:  # which nohup asks for
                    self.exits.callback(
                        signal.signal, number, signal.signal(number, self.on_signal)
                    )
            self.exits.callback(os.close, tell)  # ends the thread
            self.exits.callback(
                signal.set_wakeup_fd, signal.set_wakeup_fd(tell, warn_on_full_buffer=False)
            )
            threading.Thread(target=self.watch, args=(hear,), daemon=True).start()
        return self

    def on_signal(self, number, frame) -> None:
        """In the main thread. A stop on the command line is for watch()."""
        if number == signal.SIGUSR1:
            self.due = True
        elif not self.command_line and not self.left:
            if self.asked or not self.changing:
                raise KeyboardInterrupt
            self.asked = time.monotonic()

    def watch(self, hear: int) -> None:
        """In a thread: hears signals, even while the main thread sits in one long call."""
        parent = os.getppid()
        while True:
            heard = os.read(hear, 64) if select.select([hear], [], [], 1.0)[0] else None
            if heard == b"":
                return os.close(hear)  # the run has ended
            if "TORCHELASTIC_RUN_ID" in os.environ and os.getppid() != parent:
                os._exit(1)  # torchrun was killed: no orphan trains on beside a --resume
            for number in set(heard or b"") - {signal.SIGUSR1} if self.command_line else ():
                if not self.asked:
                    self.asked = time.monotonic()
                    threading.Thread(target=self.stop, daemon=True).start()
                elif time.monotonic() - self.asked > 1:  # sooner: the same Ctrl-C, by torchrun
                    os._exit(128 + number)

    def stop(self) -> None:
        time.sleep(0 if self.rank0 else 1)  # rank 0 hears of the stop before it misses the others
        with self.lock:
            if not self.left:
                self.save_last("signal: ")
                self.log.close()
                os._exit(0)

    def __exit__(self, kind, error, trace):
        if self.changing:  # what is there is of no whole step, and save_last() knows
            self.lock.release()
        while self.asked and self.command_line:  # until stop() ends the process
            time.sleep(1)
        hidden = (
            () if error is None else (Exception,)
        )  # what follows from an error does not hide it
        with contextlib.suppress(*hidden), self.exits, self.lock:
            self.left = True
            if error is not None:
                self.save_last("")
            self.log.close()
            if error is None and self.world.size > 1:
                dist.barrier()  # nobody leaves while rank 0 still writes
                gc.collect()  # what is left of DDP, before its group: later it can wait for ever for gloo


class Clock:
    """Seconds of each phase of a step."""

    def __init__(self, device):
        self.device, self.seconds = device, {}

    @contextlib.contextmanager
    def __call__(self, phase: str):
        started = time.perf_counter()
        yield
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        self.seconds[f"time_{phase}"] = time.perf_counter() - started

    def take(self) -> dict:
        seconds, self.seconds = self.seconds, {}
        return seconds
