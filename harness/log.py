"""What a run writes and shows: the log, metrics, dashboards."""

import contextlib
import importlib
import importlib.util
import json
import math
import os
import time
import warnings
from datetime import timedelta

import numpy as np

import view
from harness.advice import Advice
from harness.flags import ConfigError, first_line, need, say
from harness.rows import pieces

LOGGED = 3072  # tokens of a step that are noted where --log_tokens does not say how many samples: less than 100 kB


def samples_to_note(samples, cfg) -> list:
    """The samples whose tokens are noted (--log_tokens): by default of the rows that are written those of the group
    with the largest advantages, until LOGGED tokens are reached. Not of samples out of the loss."""
    written = samples if cfg.log_completions < 0 else samples[: cfg.log_completions]
    if cfg.log_tokens >= 0:
        return [s for s in written[: cfg.log_tokens] if s.in_loss.any()]
    groups = {}
    for s in written:
        groups.setdefault(s.group, []).append(s)
    noted = max(
        groups.values(), key=lambda group: sum(abs(advantage_of(s)) for s in group), default=[]
    )
    ends = np.cumsum([len(s.completion_ids) for s in noted])
    return [s for s, end in zip(noted, ends, strict=True) if s.in_loss.any() and end <= LOGGED]


def advantage_of(sample) -> float:
    """The mean over its sampled tokens; to the bit where all have the same."""
    values = sample.advantages[sample.sampled]
    if not len(values):
        return 0.0
    return float(values[0] if (values == values[0]).all() else values.mean())


def sample_metrics(samples, cfg) -> dict:
    """Of all samples of the step, in rewards as the advantages saw them. Names as in TRL."""
    rewards = np.array([s.reward for s in samples]).reshape(-1, cfg.num_generations)
    lengths = np.array([s.n_sampled for s in samples])
    ended = lengths[[s.finish_reason != "length" for s in samples]]
    with warnings.catch_warnings(
        action="ignore"
    ):  # a group all of whose rewards are excluded has no mean
        metrics = {
            "reward": np.nan_to_num(np.nanmean(rewards)),
            "reward_std": np.nan_to_num(np.nanstd(rewards, ddof=1)),
            "reward_std_within_groups": np.nan_to_num(np.nanstd(rewards, 1, ddof=1)).mean(),
            "advantage_abs": np.mean([abs(advantage_of(s)) for s in samples]),
            "completions/clipped_ratio": 1 - len(ended) / len(lengths),
        }
        for name in samples[0].parts:
            parts = np.array([s.parts[name] for s in samples], dtype=float)
            metrics |= {
                f"rewards/{name}/mean": np.nanmean(parts),
                f"rewards/{name}/std": np.nanstd(parts, ddof=1),
            }
    for kind, part in (("", lengths), ("terminated_", ended)):
        for name in ("mean", "min", "max") if len(part) else ():
            metrics[f"completions/{name}_{kind}length"] = getattr(part, name)()
    return {name: float(value) for name, value in metrics.items()} | dict(
        tokens=sum(s.n_tokens for s in samples)
    )


def completion_rows(samples, step: int, tokenizer) -> list[dict]:
    """What completions.jsonl holds. tokens: their texts, whose join is the completion, and what note_tokens has."""
    return [
        dict(
            step=step,
            group=s.group,
            prompt=s.prompt.text,
            completion=s.text,
            reward=s.reward,
            parts=s.parts,
        )
        | dict(
            advantage=advantage_of(s),
            length=s.n_sampled,
            finish_reason=s.finish_reason,
            row=s.prompt.row,
        )
        | (dict(logged=s.extra) if s.extra else {})
        | (
            dict(
                tokens=dict(text=pieces(tokenizer, s.completion_ids, s.text))
                | in_thousandths(s.token_notes)
            )
            if s.token_notes
            else {}
        )
        for s in samples
    ]


def in_thousandths(notes: dict) -> dict:
    """Token notes as whole numbers, which take less room: nats, and push, times 1000."""
    return {
        name: np.nan_to_num(1000 * values, nan=0, posinf=0, neginf=0).round().astype(int).tolist()
        for name, values in notes.items()
    }


class JsonLines:
    """A file of one JSON object a line. A full disk delays lines, it does not stop the run or tear the file."""

    def __init__(self, path: str, last_step: int):
        """Cuts off what an interrupted run wrote after its checkpoint: that is made again."""
        self.path, self.pending, self.size = path, b"", 0
        with contextlib.suppress(FileNotFoundError), open(path, "rb") as file:
            for line in file:
                with contextlib.suppress(ValueError, KeyError, TypeError):
                    if json.loads(line)["step"] > last_step:
                        break
                if not line.endswith(b"\n"):
                    break
                self.size += len(line)
        self.write()

    def write(self, *rows) -> None:
        texts = [json.dumps(finite(row), default=str, separators=(",", ":")) for row in rows]
        self.pending += "".join(f"{text}\n" for text in texts).encode()
        try:
            with open(self.path, "ab") as file:
                self.size = min(self.size, file.tell())  # less: it was moved away, and begins anew
                file.truncate(self.size)  # half a line of a write that failed
                file.write(self.pending)
        except OSError as error:
            say(
                f"cannot write {self.path} ({error.strerror}): what is missing waits for the next try"
            )
        else:
            self.size, self.pending = self.size + len(self.pending), b""


class Log:
    """What a run says and writes: metrics.jsonl, completions.jsonl, a line a step, curves.png, a dashboard."""

    def __init__(self, cfg, first: int, started: float, rank0: bool):
        self.cfg, self.first, self.rank0 = (
            cfg,
            first,
            rank0,
        )  # first: the step that the run begins after
        self.history, self.started, self.loop_started = [], started, time.monotonic()
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
        step, steps = metrics["step"], self.cfg.max_steps
        seconds = (time.monotonic() - self.loop_started) / (step - self.first)
        left = timedelta(seconds=round(seconds * (steps - step)))
        shown = [
            f"{name} {metrics[key]:.3g}"
            for key, name in SHOWN.items()
            if view.is_number(metrics.get(key))
        ]
        for cause in (
            "not_finite",
            "left_out",
            "nothing_sampled",
            "at_reference",
        ):  # no_advantage is "no-signal" above
            if metrics.get(f"skipped_steps/{cause}"):
                shown.append(f"SKIPPED {metrics[f'skipped_steps/{cause}']} ({cause})")
        line = f"step {step}/{steps} {' '.join(shown)} | {metrics['tokens_per_s']:.0f} tok/s, {left} left"
        self.add(
            metrics,
            rows if self.cfg.log_completions < 0 else rows[: self.cfg.log_completions],
            line,
        )

    def eval(self, step: int, metrics: dict) -> None:
        """A line of its own, after that of its step."""
        line = (
            f"step {step}: eval accuracy {accuracy(metrics)}, length {metrics['eval_length']:.3g}"
        )
        self.add(dict(step=step) | metrics, [], line)

    def add(self, metrics: dict, rows: list[dict], line: str) -> None:
        self.history.append(finite(metrics))
        if self.rank0:
            self.metrics.write(metrics)
            self.completions.write(*rows)
            for text in (line, *self.advice.see(self.history[-1])):
                say(text)
            self.report(self.send, metrics, rows)

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
        curves, best = os.path.join(out, "curves.png"), os.path.join(out, "best")
        try:
            view.draw([out], curves)
        except (OSError, ImportError, ValueError) as error:  # a picture is not worth a run
            curves = f"not drawn: {error}"
        evals = [accuracy(m) for m in self.history if m.get("eval_accuracy") is not None]
        values = dict(accuracy_before=evals[0], accuracy_after=evals[-1]) if evals else {}
        values |= dict(steps=max([self.first, *(m["step"] for m in self.history)]))
        values |= dict(
            train_seconds=f"{now - self.loop_started:.1f}",
            total_seconds=f"{now - self.started:.1f}",
        )
        values |= dict(out_dir=out, samples=f"python view.py {out} --step", curves=curves)
        values |= dict(best=f"{best}, of step {self.best()}") if os.path.islink(best) else {}
        self.report(self.finish)
        say("\n".join(f"{key}: {value}" for key, value in values.items()))


SHOWN = {
    "reward": "reward",
    "completions/mean_length": "length",
    "loss": "loss",
    "grad_norm": "grad",
}
SHOWN |= {
    "frac_reward_zero_std": "no-signal",
    "kl": "kl",
    "sampler_gap": "gap",
    "failed_rewards": "FAILED REWARDS",
}


def finite(values):
    """What JSON cannot hold becomes null."""
    if isinstance(values, dict):
        return {key: finite(value) for key, value in values.items()}
    return None if isinstance(values, float) and not math.isfinite(values) else values


def accuracy(metrics: dict) -> str:
    return f"{metrics['eval_accuracy']:.3f} +- {metrics['eval_stderr']:.3f}"


# What --report_to needs installed.
DASHBOARDS = {
    "none": (),
    "tensorboard": ("tensorboard",),
    "wandb": ("wandb", "pandas"),
    "trackio": ("trackio", "pandas"),
}


def check_dashboard(cfg) -> None:
    packages = DASHBOARDS[cfg.report_to]
    is_installed = all(installed(package) for package in packages)
    need(is_installed, cfg, "report_to", f"not installed; pip install {' '.join(packages)}")


def installed(package: str) -> bool:
    """A folder of that name is no package: wandb writes to one in the working directory."""
    found = importlib.util.find_spec(package)
    return found is not None and found.origin is not None


def reporter(cfg) -> tuple:
    """Two functions: send(metrics, rows) to a dashboard under TRL's names, and finish(). Imports what is asked for."""
    if cfg.report_to == "none":
        return lambda metrics, rows: None, lambda: None
    if cfg.report_to == "tensorboard":
        package = None  # it has no tables
        writer = importlib.import_module("torch.utils.tensorboard").SummaryWriter(
            cfg.out_dir, flush_secs=10
        )
        log, finish = (
            lambda values, step: [writer.add_scalar(*item, step) for item in values.items()],
            writer.close,
        )
    else:
        package, pandas = importlib.import_module(cfg.report_to), importlib.import_module("pandas")
        os.environ.setdefault("WANDB_DIR", cfg.out_dir)
        resume = "allow" if cfg.resume == "latest" else "never"
        run = package.init(
            project="grpo", name=os.path.basename(cfg.out_dir), config=vars(cfg), resume=resume
        )
        log, finish = lambda values, step: run.log(values, step=step), run.finish

    def send(metrics, rows):
        found = {
            f"eval/{k[5:]}" if k.startswith("eval_") else f"train/{k}": v
            for k, v in metrics.items()
        }
        values = {name: value for name, value in found.items() if view.is_number(value)}
        if rows and package:
            names = ("step", "prompt", "completion", "advantage")
            table = [
                {name: row[name] for name in names} | row["parts"] | row.get("logged", {})
                for row in rows
            ]
            values["completions"] = package.Table(dataframe=pandas.DataFrame(table))
        log(values, metrics["step"])

    return send, finish
