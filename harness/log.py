"""What a run writes and shows: the log, metrics, dashboards."""

import contextlib
import importlib
import importlib.util
import json
import math
import os
import time
from datetime import timedelta

import numpy as np
import torch

import view
from harness.advice import Advice
from harness.flags import ConfigError, TrainingError, first_line, say
from harness.ranks import World


def gap_sums(log_ratio, cfg) -> tuple[dict, np.ndarray]:
    """How far the sampler is from the trainer, log(trainer / sampler) of a rank's tokens [n]: sums of absolute values,
    of truncated importance weights and of their squares, the largest of each, and every k-th value for quantiles."""
    log_ratio = log_ratio[~log_ratio.isinf()]  # inf: a token that the sampler did not draw. NaN stays, and ends the run
    gap = log_ratio.abs()
    weight = log_ratio.exp().clamp(max=cfg.tis_cap or math.inf)
    values = torch.stack([gap.sum(), weight.sum(), weight.square().sum()]).tolist() if len(gap) else [0.0] * 3
    most = torch.stack([gap.max(), weight.max()]).tolist() if len(gap) else [0.0] * 2
    some = log_ratio[:: len(gap) // 10_000 + 1].float().cpu().numpy()
    return dict(n=len(gap), sums=values, most=most), some


def gap_metrics(parts: list[tuple], cfg) -> dict:
    """The step's metrics from the sums of all ranks. Stops the run if the sampler is not the policy."""
    n = sum(part["n"] for part, _ in parts)
    if not n:
        return dict(sampler_gap=0.0)
    total, weight, square = np.sum([part["sums"] for part, _ in parts], 0)
    worst, largest = np.max([part["most"] for part, _ in parts], 0)
    limit = cfg.max_sampler_gap or (0.1 if cfg.dtype == "bfloat16" else 1e-4)
    if not total / n <= limit:
        raise TrainingError(
            f"the sampler's log-probabilities are off by {total / n:.2g} on average (at most {worst:.2g}; "
            f"--max_sampler_gap {limit:g}). Likely causes: weights not pushed or a cache not reset after a push, "
            "log-probabilities before the temperature, top-p or top-k in the sampler, another prompt or chat template "
            "than the one that was scored, another dtype"
        )
    low, high = np.quantile(np.exp(np.concatenate([some for _, some in parts])), (0.01, 0.99))
    metrics = dict(sampler_gap=total / n, sampler_gap_max=worst, sampler_ratio_q01=low, sampler_ratio_q99=high)
    if cfg.tis_cap:
        # ess: the effective share of the tokens
        name = "sampling/importance_sampling_ratio"
        metrics |= {f"{name}/mean": weight / n, f"{name}/max": largest, "tis_ess": weight**2 / (n * square)}
    return {name: float(value) for name, value in metrics.items()}


def rollout_gap(samples: list, cfg, world: World) -> dict:
    """The same of a whole rollout, whose samples every rank holds: each sums up its share of them."""
    counted = [s for s in samples if s.in_loss and s.old_logps is not None][world.rank :: world.size]
    known = [s.old_logps - s.sampler_logps for s in counted]
    log_ratio = torch.from_numpy(np.concatenate(known)) if known else torch.zeros(0)
    return gap_metrics(world.gather([gap_sums(log_ratio, cfg)]), cfg)


def pass_at_k(n: int, correct: np.ndarray, k: int) -> float:
    """Unbiased 1 - C(n - c, k) / C(n, k) (Chen et al., arXiv 2107.03374, eq. 1), mean over prompts. correct [P]."""
    return float(np.mean([1 - math.comb(n - int(c), k) / math.comb(n, k) for c in correct]))


class JsonLines:
    """A file of one JSON object a line. A full disk delays lines, it does not stop the run or tear the file."""

    def __init__(self, path: str, last_step: int):
        """Cuts off what an interrupted run wrote after its checkpoint: that is made again."""
        self.path, self.pending, self.size = path, b"", 0
        with contextlib.suppress(FileNotFoundError), open(path, "rb") as file:
            for line in file:
                later = not line.endswith(b"\n")
                with contextlib.suppress(ValueError, KeyError, TypeError):
                    later = later or json.loads(line)["step"] > last_step
                if later:
                    break
                self.size += len(line)
        self.write()

    def write(self, *rows) -> None:
        self.pending += b"".join(json.dumps(finite(row), default=str).encode() + b"\n" for row in rows)
        try:
            with open(self.path, "ab") as file:
                self.size = min(self.size, file.tell())  # less: it was moved away, and begins anew
                file.truncate(self.size)  # half a line of a write that failed
                file.write(self.pending)
        except OSError as error:
            say(f"cannot write {self.path} ({error.strerror}): what is missing waits for the next try")
        else:
            self.size, self.pending = self.size + len(self.pending), b""


class Log:
    """What a run says and writes: metrics.jsonl, completions.jsonl, a line a step, curves.png, a dashboard."""

    def __init__(self, cfg, first: int, started: float, rank0: bool):
        """first: the step that the run begins after."""
        self.cfg, self.first, self.started, self.rank0 = cfg, first, started, rank0
        self.history, self.shown, self.loop_started = [], "", time.monotonic()
        if rank0:
            self.metrics = JsonLines(os.path.join(cfg.out_dir, "metrics.jsonl"), first)
            self.completions = JsonLines(os.path.join(cfg.out_dir, "completions.jsonl"), first)
            self.history = view.read_jsonl(self.metrics.path)
            self.advice = Advice(cfg, self.history)
            try:
                self.send, self.finish = reporter(cfg)
            except Exception as error:
                raise ConfigError(f"--report_to {cfg.report_to}: {first_line(error)}") from error

    def step(self, metrics: dict, rows: list[dict]) -> None:
        before = next((m["num_tokens"] for m in reversed(self.history) if "num_tokens" in m), 0)
        metrics = finite(metrics | dict(num_tokens=metrics["tokens"] + before))
        self.history.append(metrics)
        if not self.rank0:
            return
        rows = rows if self.cfg.log_completions < 0 else rows[: self.cfg.log_completions]
        self.metrics.write(metrics)
        self.completions.write(*rows)
        seconds = (time.monotonic() - self.loop_started) / (metrics["step"] - self.first)
        left = timedelta(seconds=round(seconds * (self.cfg.max_steps - metrics["step"])))
        shown = [f"{name} {metrics[key]:.3g}" for key, name in SHOWN.items() if view.is_number(metrics.get(key))]
        skipped = f" SKIPPED {metrics['skipped_steps']} (gradient not finite)" if metrics["skipped_steps"] else ""
        line = f"step {metrics['step']}/{self.cfg.max_steps} {' '.join(shown)}{skipped}"
        say(f"{line} | {metrics['tokens_per_s']:.0f} tok/s, {left} left")
        for note in self.advice.see(metrics):
            say(note)
        if rows:
            row = rows[metrics["step"] % len(rows)]
            self.shown = f"  sample: {short(row['prompt'])} -> {short(row['completion'])} reward {row['reward']:g}"
        self.report(self.send, metrics, rows)

    def eval(self, step: int, metrics: dict) -> None:
        """A line of its own, after that of its step."""
        self.history.append(finite(dict(step=step) | metrics))
        if self.rank0:
            self.metrics.write(self.history[-1])
            say(f"step {step}: eval accuracy {accuracy(metrics)}, length {metrics['eval_length']:.3g}")
            for line in filter(None, [self.shown, *self.advice.see(self.history[-1])]):
                say(line)
            self.report(self.send, self.history[-1], [])

    def report(self, call, *args) -> None:
        """What only talks does not end a run."""
        try:
            call(*args)
        except Exception as error:
            say(f"--report_to {self.cfg.report_to} failed: {first_line(error)}")

    def best(self) -> int:
        """The step of the highest eval accuracy; 0: none yet."""
        evals = [m for m in self.history if m["step"] and view.is_number(m.get("eval_accuracy"))]
        return max(evals, key=lambda m: m["eval_accuracy"], default=dict(step=0))["step"]

    def close(self) -> None:
        """Draws the curves and says the greppable end of the log."""
        if not self.rank0:
            return
        self.metrics.write()  # what waits
        self.completions.write()
        out, now = self.cfg.out_dir, time.monotonic()
        mine = [m for m in self.history if m["step"] > self.first and "tokens" in m]
        evals = [m for m in self.history if m.get("eval_accuracy") is not None]
        values = dict(accuracy_before=accuracy(evals[0]), accuracy_after=accuracy(evals[-1])) if evals else {}
        values |= dict(steps=max([self.first, *(m["step"] for m in self.history)]))
        values |= dict(train_seconds=f"{now - self.loop_started:.1f}", total_seconds=f"{now - self.started:.1f}")
        speed = sum(m["tokens"] for m in mine) / max(1e-9, sum(m["step_time"] for m in mine))
        values |= dict(tokens_per_s=f"{speed:.0f}", out_dir=out, samples=f"python view.py {out} --step")
        if os.path.islink(os.path.join(out, "best")):
            values |= dict(best=f"{out}/best, of step {self.best()}")
        try:
            view.draw([out], os.path.join(out, "curves.png"))
            values |= dict(curves=os.path.join(out, "curves.png"))
        except (OSError, ImportError, ValueError) as error:  # a picture is not worth a run
            say(f"no curves.png: {error}")
        self.report(self.finish)
        say("\n".join(f"{key}: {value}" for key, value in values.items()))


SHOWN = {"reward": "reward", "completions/mean_length": "length", "loss": "loss", "grad_norm": "grad"}
SHOWN |= {"frac_reward_zero_std": "no-signal", "kl": "kl", "sampler_gap": "gap", "failed_rewards": "FAILED REWARDS"}


def finite(values):
    """What JSON cannot hold becomes null."""
    if isinstance(values, dict):
        return {key: finite(value) for key, value in values.items()}
    return None if isinstance(values, float) and not math.isfinite(values) else values


def short(text, most=200) -> str:
    """Its end is kept: the answer stands there."""
    text = repr(str(text))
    return text if len(text) <= most else f"{text[: most // 2]} ... {text[-most // 2 :]}"


def accuracy(metrics: dict) -> str:
    return f"{metrics['eval_accuracy']:.3f} +- {metrics['eval_stderr']:.3f}"


def installed(package: str) -> bool:
    """A folder of that name is no package: wandb writes to one in the working directory."""
    found = importlib.util.find_spec(package)
    return found is not None and found.origin is not None


def reporter(cfg) -> tuple:
    """Two functions: send(metrics, rows) to a dashboard under TRL's names, and finish(). Imports what is asked for."""

    def named(metrics):
        found = {f"eval/{k[5:]}" if k.startswith("eval_") else f"train/{k}": v for k, v in metrics.items()}
        return {name: value for name, value in found.items() if view.is_number(value)}

    if cfg.report_to == "none":
        return lambda metrics, rows: None, lambda: None
    if cfg.report_to == "tensorboard":
        from torch.utils.tensorboard import SummaryWriter

        writer = SummaryWriter(cfg.out_dir, flush_secs=10)

        def send(metrics, rows):
            for name, value in named(metrics).items():
                writer.add_scalar(name, value, metrics["step"])

        return send, writer.close

    def send(metrics, rows):
        values, names = named(metrics), ("step", "prompt", "completion", "advantage")
        if rows:
            table = [{name: row[name] for name in names} | row["parts"] | row.get("logged", {}) for row in rows]
            values["completions"] = package.Table(dataframe=pandas.DataFrame(table))
        run.log(values, step=metrics["step"])

    package, pandas = importlib.import_module(cfg.report_to), importlib.import_module("pandas")
    os.environ.setdefault("WANDB_DIR", cfg.out_dir)
    resume = "allow" if cfg.resume == "latest" else "never"
    run = package.init(project="grpo", name=os.path.basename(cfg.out_dir), config=vars(cfg), resume=resume)
    return send, run.finish
