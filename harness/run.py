"""A run on disk: what it saves and when, how it ends, its clock. Nothing here is about rewards or
advantages."""

import contextlib
import dataclasses
import gc
import math
import os
import time

import torch
import torch.distributed as dist

from harness.checkpoints import (
    Checkpoint,
    link_best,
    remove_old,
    try_checkpoint,
    write_checkpoint,
)
from harness.directory import checkpoint_path, claim_out_dir, write_config
from harness.flags import ConfigError, TrainingError, differing_flags, first_line, say
from harness.log import Log
from harness.ranks import TORCH, World, leave_world, seed_of, stream
from harness.stops import Stops

BAD_STEPS = 5  # steps in a row without a finite gradient that end a run


class Run:
    """Saves a run when that is due, before a stop (stops.py) and before an error ends it.

    A step depends on the seed, its number and what the step before left. So a save always holds
    the last recorded step, and --resume repeats the one that was cut off.

    For changed copies:
    - checkpoint_parts[name] = (save, load) adds a part to trainer_state.pt, of tensors, numbers,
      text, lists and dicts. Every rank calls save(); track() calls load().
    - collective_save = True says that some save() works on all ranks together. A stop by signal
      then saves nothing, because the other ranks may be gone.
    - Call change() before you alter anything that a checkpoint holds: at any other moment a
      signal may save.
    """

    def __init__(
        self,
        cfg,
        world: World,
        checkpoint: Checkpoint | None,
        started: float,
        command_line: bool = False,
        inputs: dict | None = None,
    ):
        """
        checkpoint: the run continues from it; None: from the beginning.
        started: time.monotonic() at the start of the process.
        command_line: a signal ends the process. Otherwise it raises KeyboardInterrupt.
        inputs: fingerprints of what the run reads, for config.json. A resume names what changed.
        """
        self.world = world
        self.rank0 = world.rank == 0
        self.checkpoint = checkpoint
        self.started = started
        self.start_step = checkpoint.state["step"] if checkpoint else 0
        if len(set(world.gather([self.start_step]))) > 1:
            why = f"the machines hold different checkpoints in {cfg.out_dir}; share it"
            raise TrainingError(f"--resume: {why}")

        self.exits = contextlib.ExitStack()  # what has to be closed at the end, last one first
        self.cfg = cfg = world.first(lambda: claim_out_dir(cfg, self.exits))
        self.exits.callback(leave_world, world)
        self.inputs = inputs or {}
        self.config = dataclasses.asdict(cfg) | dict(ranks=world.size) | self.inputs

        self.clock = Clock(world.device)
        self.stops = Stops(self.save_and_close, command_line, delay=0.0 if self.rank0 else 1.0)
        self.log = None  # until track()
        self.step = self.start_step  # the last recorded one
        self.saved_step = 0  # the last one with a checkpoint in out_dir; 0: none
        if checkpoint and checkpoint.path == self.path_of(self.start_step):
            self.saved_step = self.start_step
        self.checkpoint_parts = {}
        self.collective_save = False
        self.bad_steps = 0  # in a row, without a finite gradient

    def track(self, model, optimizer, write_model, identity: int) -> None:
        """Restores the checkpoint, and opens the log and config.json once all checks have passed.

        write_model: as model_writer() returns it.
        identity: the fingerprint of the weights before the first step.
        """
        self.model = model
        self.write_model = write_model
        self.identity = identity
        self.checkpoint_parts.setdefault(
            "optimizer", (optimizer.state_dict, optimizer.load_state_dict)
        )
        optimizer.register_step_pre_hook(lambda *_: self.change())
        if self.checkpoint:
            self.restore(optimizer)
        self.try_to_save()
        self.log = Log(self.cfg, self.start_step, self.started, self.rank0)
        self.world.first(lambda: write_config(self.cfg, self.inputs))

    def restore(self, optimizer) -> None:
        state = self.checkpoint.state
        flags = [
            {name: value for name, value in group.items() if name != "params"}
            for group in optimizer.param_groups
        ]
        for name, (_, load) in self.checkpoint_parts.items():
            if name not in state:
                why = f"it holds no {name}, which is needed here"
                raise ConfigError(f"--resume {self.checkpoint.path}: {why}")
            load(state.pop(name))  # pop: no second copy stays in memory
        for group, given in zip(optimizer.param_groups, flags, strict=True):
            group.update(given)  # the flags of this start win over the saved ones

        changed = [
            name
            for name, value in state["config"].items()
            if self.config.get(name) != value and name not in ("resume", "out_dir")
        ]
        names = ", ".join(changed) or "nothing"
        where = f"{self.checkpoint.path} at step {self.start_step}"
        say(f"resumed from {where}; changed since then: {names}")

    def try_to_save(self) -> None:
        state = {}
        for name, (save, _) in self.checkpoint_parts.items():
            if name != "optimizer":  # it has no state yet, and some would take a step to make one
                state[name] = save()
        weights = list(self.model.parameters())
        size = sum(p.numel() * max(4, p.itemsize) for p in weights)  # bfloat16 is saved in float32
        size += sum(2 * p.nbytes for p in weights if p.requires_grad)  # Adam's two moments
        self.world.first(lambda: try_checkpoint(self.cfg.out_dir, self.write_model, state, size))

    def introduce(self, defaults, what: str) -> None:
        say(f"flags: {differing_flags(self.cfg, defaults)}")
        size = sum(p.numel() for p in self.model.parameters()) / 1e6
        where = f"{self.world.device}, {self.world.size} rank(s)"
        say(f"{self.cfg.model}: {size:.2f} M parameters on {where}; {what}")

    def steps(self):
        """Yields the numbers of the steps to come. After each one it saves, if that is due."""
        if self.rank0:
            self.tidy()  # an eval that is repeated may have changed the best checkpoint
        for step in range(self.start_step + 1, self.cfg.max_steps + 1):
            # for modified copies: nothing here uses torch's generator
            numbers = stream(self.cfg.seed, TORCH, step, self.world.rank)
            torch.manual_seed(seed_of(*numbers))
            yield step
            if any(self.world.gather([self.save_due(step)])):
                self.stops.save_requested = False
                with contextlib.suppress(OSError):
                    os.remove(self.save_file())
                self.save()

    def save_due(self, step: int) -> bool:
        if self.stops.save_requested or step == self.cfg.max_steps:
            return True
        if self.cfg.save_every and step % self.cfg.save_every == 0:
            return True
        return self.rank0 and (step == self.log.best() or os.path.isfile(self.save_file()))

    def save_file(self) -> str:
        """`touch out/save` asks for a save."""
        return os.path.join(self.cfg.out_dir, "save")

    def change(self) -> None:
        """From here until record() the state to save is changing: a stop has to wait."""
        self.stops.hold()

    def record(self, step: int, metrics: dict, rows: list[dict]) -> None:
        """The step is complete: saves now include it. rows: for completions.jsonl."""
        self.change()
        seconds = self.clock.take()
        costs = seconds | speeds(metrics["tokens"], seconds) | peak_memory(self.world)
        self.log.step(dict(step=step) | metrics | costs, rows)
        self.step = step
        self.stops.release()
        self.refuse_bad_steps(metrics["skipped_steps"])

    def refuse_bad_steps(self, skipped: int) -> None:
        self.bad_steps = self.bad_steps + 1 if skipped else 0
        if self.bad_steps == BAD_STEPS:
            raise TrainingError(
                f"no finite gradient in {BAD_STEPS} steps in a row, so nothing was updated: lower "
                "--learning_rate, look at the rewards and at completions.jsonl, and go on with "
                "--resume"
            )

    def eval_due(self, step: int) -> bool:
        """Before the first step, every --eval_every steps and after the last one; and again if a
        stop prevented it."""
        if not self.cfg.eval_data:
            return False
        due = step in (0, self.cfg.max_steps)
        if self.cfg.eval_every and step % self.cfg.eval_every == 0:
            due = True
        return self.world.first(lambda: due and not self.has_eval(step))

    def has_eval(self, step: int) -> bool:
        newest = self.log.history[-1] if self.log.history else {}
        return newest.get("step") == step and "eval_accuracy" in newest

    def record_eval(self, step: int, metrics: dict) -> None:
        with self.stops.lock:
            self.log.eval(step, metrics)

    def path_of(self, step: int) -> str:
        return checkpoint_path(self.cfg.out_dir, step)

    def save(self) -> None:
        """Writes the last recorded step, on rank 0. If that fails the run goes on, and the next
        save tries again."""
        with self.stops.lock, own_stream(self.world.device):
            state = None
            try:
                state = {name: save() for name, (save, _) in self.checkpoint_parts.items()}
                if not self.rank0 or self.saved_step == self.step:
                    return
                if not torch.nn.utils.get_total_norm(self.model.parameters(), math.inf).isfinite():
                    raise ArithmeticError("some parameters are not finite")
                state |= dict(step=self.step, identity=self.identity, config=self.config)
                write_checkpoint(self.path_of(self.step), self.write_model, state)
            except Exception as error:  # a full disk alone raises six
                if self.collective_save and state is None:
                    raise  # the other ranks wait for this one
                why = f"could not save ({first_line(error)}); the previous one remains"
                say(f"step {self.step}: {why}")
                return
            self.saved_step = self.step
            self.tidy()

    def tidy(self) -> None:
        """Separate from saving: if it fails, the checkpoint exists and the run continues."""
        out = self.cfg.out_dir
        best = self.log.best()
        with report_error(f"could not remove old checkpoints in {out}"):
            remove_old(out, self.step, best, self.cfg.keep)
        with report_error(f"could not point {out}/best to the checkpoint of step {best}"):
            link_best(out, best)

    def save_last(self, why: str) -> None:
        """Saves the last recorded step if that can still be done, and says which step is saved."""
        if self.step > self.start_step and not self.collective_save and not self.stops.mid_step:
            self.save()
        outcome = "nothing is saved"
        if self.saved_step:
            outcome = f"{self.path_of(self.saved_step)} is saved; go on with --resume"
        say(f"{why}stopped in step {self.step + 1}, {outcome}")

    def save_and_close(self) -> None:
        """For a stop by signal: the process then ends."""
        self.save_last("signal: ")
        self.close_log()

    def close_log(self) -> None:
        if self.log is not None:
            with report_error("could not finish the log"):
                self.log.close()

    def __enter__(self):
        self.stops.start(self.exits)
        return self

    def __exit__(self, kind, error, trace):
        """After the last save no failure changes how the process ends."""
        self.stops.finish()
        try:
            if error is not None:
                self.save_last("")
            self.close_log()
            if error is None and self.world.size > 1:
                with report_error("could not wait for the other ranks"):
                    dist.barrier()  # nobody leaves while rank 0 still writes
                gc.collect()  # frees DDP before its process group: later it can hang in gloo
        finally:
            with report_error("could not close everything"):
                self.exits.close()


@contextlib.contextmanager
def report_error(what: str):
    """For what only reports or cleans up: an error there is printed and does not end the run."""
    try:
        yield
    except Exception as error:
        say(f"{what} ({first_line(error)})")


def speeds(tokens: int, seconds: dict) -> dict:
    """Tokens per second of a step, and of each phase that handles every token."""
    step_time = sum(seconds.values())
    rates = dict(step_time=step_time, tokens_per_s=tokens / max(1e-9, step_time))
    for phase in ("rollout", "logps", "update"):
        if f"time_{phase}" in seconds:
            rates[f"tokens_per_s_{phase}"] = tokens / max(1e-9, seconds[f"time_{phase}"])
    return rates


def peak_memory(world: World) -> dict:
    """GB that PyTorch held at most since the last call, on the fullest card; nothing on a CPU."""
    if world.device.type != "cuda":
        return {}
    peak = torch.cuda.max_memory_allocated(world.device)
    torch.cuda.reset_peak_memory_stats(world.device)
    return dict(peak_memory_gb=max(world.gather([peak])) / 1e9)


def own_stream(device: torch.device):
    """On CUDA a stream of its own, which does not wait for a collective that a lost rank left."""
    if device.type == "cuda":
        return torch.cuda.stream(torch.cuda.Stream(device))
    return contextlib.nullcontext()


class Clock:
    """Seconds of each phase of a step, the work of the device included."""

    def __init__(self, device: torch.device):
        self.device = device
        self.seconds = {}

    @contextlib.contextmanager
    def __call__(self, phase: str):
        started = time.perf_counter()
        yield
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        elif self.device.type == "mps":
            torch.mps.synchronize()
        self.seconds[f"time_{phase}"] = time.perf_counter() - started

    def take(self) -> dict:
        """{"time_" + phase: seconds} since the last call."""
        seconds = self.seconds
        self.seconds = {}
        return seconds
