"""The log of a run: a line per step, metrics.jsonl, completions.jsonl, curves.png, a dashboard."""

import os
import time
import warnings
from datetime import timedelta

import numpy as np

from harness.advice import Advice
from harness.chat import decode
from harness.curves import draw, is_number, read_jsonl
from harness.dashboards import DASHBOARDS, scalars
from harness.flags import ConfigError, first_line, say
from harness.jsonl import JsonLines, finite

NOTED_TOKENS = 3072  # tokens noted per step if --log_tokens gives no number: less than 100 kB
SHOWN = {  # metric: its name in the line of a step
    "reward": "reward",
    "completions/mean_length": "length",
    "turns/mean": "turns",
    "loss": "loss",
    "grad_norm": "grad",
    "frac_reward_zero_std": "no-signal",
    "kl_k1": "kl",  # not k3, which one unlikely token can raise tenfold
    "sampler_gap": "gap",
    "failed_rewards": "FAILED REWARDS",
}
# no_advantage is not here: the word no-signal tells of it.
SKIPPED = ("not_finite", "left_out", "nothing_sampled", "at_reference")


# -- metrics of a step


def sample_metrics(samples) -> dict:
    """Metrics over all samples of a step, under TRL's names. `reward` is what the advantages are
    made of, with --non_stop_reward."""
    rewards = np.array([s.reward for s in samples])
    lengths = np.array([s.n_sampled for s in samples])
    cut_off = [s.finish_reason == "length" for s in samples]
    with warnings.catch_warnings(action="ignore"):  # if no sample has a reward, the mean is NaN
        metrics = {
            "reward": np.nan_to_num(np.nanmean(rewards)),
            "reward_std": np.nan_to_num(np.nanstd(rewards, ddof=1)),
            "advantage_abs": np.mean([abs(advantage_of(s)) for s in samples]),
            "completions/mean_length": lengths.mean(),
            "completions/min_length": lengths.min(),
            "completions/max_length": lengths.max(),
            "completions/clipped_ratio": np.mean(cut_off),
        }
        for name in samples[0].parts:
            values = np.array([s.parts[name] for s in samples], dtype=float)
            metrics[f"rewards/{name}/mean"] = np.nanmean(values)
            metrics[f"rewards/{name}/std"] = np.nanstd(values, ddof=1)
    metrics = {name: float(value) for name, value in metrics.items()}
    metrics["tokens"] = sum(s.n_tokens for s in samples)
    if samples[0].transcript is not None:
        metrics.update(episode_metrics(samples))
    return metrics


def episode_metrics(samples) -> dict:
    """Turns, tool calls and tokens of the environment, per sample; the share of the calls that
    raised. tools/ are TRL's names."""
    turns = sum(len(s.transcript.turns) for s in samples)
    calls = sum(len(calls) for s in samples for calls in s.transcript.calls)
    failed_calls = sum(s.transcript.failed_calls for s in samples)
    tokens = sum(len(s.completion_ids) - s.n_sampled for s in samples)
    return {
        "turns/mean": turns / len(samples),
        "tools/call_frequency": calls / len(samples),
        "tools/failure_frequency": failed_calls / max(1, calls),
        "environment/mean_length": tokens / len(samples),
    }


def advantage_of(sample):
    """The mean over its sampled tokens."""
    values = sample.advantages[sample.sampled]
    if len(values) == 0:
        return 0.0
    return float(values.mean())


# -- what is written of a sample


def samples_to_note(samples, cfg) -> list:
    """The samples whose tokens are noted: as many as --log_tokens says, or the first ones of the
    written group with the most signal (which the page shows first). Only samples in the loss."""
    written = first_written(samples, cfg)
    if cfg.log_tokens >= 0:
        return [s for s in written[: cfg.log_tokens] if s.in_loss.any()]

    groups = {}
    for s in written:
        groups.setdefault(s.group, []).append(s)
    noted = []
    tokens = 0
    for s in max(groups.values(), key=signal_of, default=[]):
        tokens += len(s.completion_ids)
        if s.in_loss.any() and tokens <= NOTED_TOKENS:
            noted.append(s)
    return noted


def first_written(samples, cfg):
    """The samples, or the rows made of them, that go into completions.jsonl."""
    if cfg.log_completions < 0:
        return samples
    return samples[: cfg.log_completions]


def signal_of(group):
    return np.mean([abs(advantage_of(s)) for s in group])


def completion_rows(samples, step: int, tokenizer) -> list[dict]:
    """The rows of completions.jsonl."""
    rows = []
    for s in samples:
        row = dict(
            step=step,
            group=s.group,
            prompt=s.prompt.text,
            completion=s.text,
            reward=s.reward,
            parts=s.parts,
            advantage=advantage_of(s),
            length=s.n_sampled,
            finish_reason=s.finish_reason,
            row=s.prompt.row,
        )
        if s.transcript is not None:
            row.update(episode_columns(s, tokenizer))
        if s.extra:
            row["logged"] = s.extra
        if s.token_notes:
            row["tokens"] = in_thousandths(s.token_notes)
            texts = token_texts(tokenizer, s.completion_ids, row["completion"])
            row["tokens"]["text"] = texts
            if not s.sampled.all():
                row["tokens"]["sampled"] = s.sampled.astype(int).tolist()
        rows.append(row)
    return rows


def episode_columns(s, tokenizer) -> dict:
    """What completions.jsonl has of an episode. Its completion is all that follows the prompt."""
    ids = s.completion_ids
    if decode(tokenizer, ids[s.turn_start :]) != s.text:  # the last token ended the turn
        ids = ids[:-1]
    columns = dict(completion=decode(tokenizer, ids))
    columns["turns"] = s.transcript.turns
    columns["replies"] = s.transcript.replies
    if s.failure:
        columns["failure"] = s.failure
    return columns


def in_thousandths(notes: dict) -> dict:
    """Token notes as whole numbers, which take less room: nats, and push, times 1000."""
    columns = {}
    for name, values in notes.items():
        numbers = np.nan_to_num(1000 * values, nan=0, posinf=0, neginf=0)
        columns[name] = numbers.round().astype(int).tolist()
    return columns


def token_texts(tokenizer, ids: np.ndarray, text: str) -> list[str]:
    """The text of each token [T], which join to `text`. The token that ended it has none.

    A character that is made of several tokens stands at the last of them.
    """
    from tokenizers.decoders import DecodeStream

    stream = DecodeStream(skip_special_tokens=False)
    texts = []
    for i in ids.tolist():
        try:
            piece = stream.step(tokenizer.backend_tokenizer, i)
        except Exception:  # bytes that make no character; a tokenizer of another kind
            piece = None
        if piece is None or not text.startswith(piece):
            piece = ""
        texts.append(piece)
        text = text[len(piece) :]
    texts[-1] += text  # the rest, if some piece did not match
    return texts


# -- the log


class Log:
    """Every rank keeps the history of metrics; rank 0 prints it, writes it and sends it."""

    def __init__(self, cfg, start_step: int, started: float, rank0: bool):
        """start_step: the last step before this start; 0: none. started: time.monotonic()."""
        self.cfg = cfg
        self.start_step = start_step
        self.rank0 = rank0
        self.started = started
        self.loop_started = time.monotonic()
        self.history = []
        if rank0:
            self.metrics = JsonLines(os.path.join(cfg.out_dir, "metrics.jsonl"), start_step)
            self.completions = JsonLines(os.path.join(cfg.out_dir, "completions.jsonl"), start_step)
            self.history = read_jsonl(self.metrics.path)
            self.advice = Advice(self.history)
            try:
                self.dashboard = DASHBOARDS[cfg.report_to](cfg, start_step)
            except Exception as error:
                raise ConfigError(f"--report_to {cfg.report_to}: {first_line(error)}") from error

    def step(self, metrics: dict, rows: list[dict]) -> None:
        """rows: one for each sample of the step, of which the first are written."""
        self.add(metrics, first_written(rows, self.cfg), self.step_line(metrics))

    def step_line(self, metrics: dict) -> str:
        step = metrics["step"]
        words = [f"step {step}/{self.cfg.max_steps}"]
        for key, name in SHOWN.items():
            if is_number(metrics.get(key)):
                words.append(f"{name} {metrics[key]:.3g}")
        for cause in SKIPPED:
            count = metrics.get(f"skipped_steps/{cause}")
            if count:
                words.append(f"SKIPPED {count} ({cause})")
        seconds = time.monotonic() - self.loop_started
        seconds_per_step = seconds / (step - self.start_step)
        remaining = timedelta(seconds=round(seconds_per_step * (self.cfg.max_steps - step)))
        return f"{' '.join(words)} | {metrics['tokens_per_s']:.0f} tok/s, {remaining} left"

    def eval(self, step: int, metrics: dict) -> None:
        """An eval gets its own line, after its step's."""
        line = f"step {step}: eval accuracy {accuracy(metrics)}"
        line += f", length {metrics['eval_length']:.3g}"
        self.add(dict(step=step) | metrics, [], line)

    def add(self, metrics: dict, rows: list[dict], line: str) -> None:
        self.history.append(finite(metrics))
        if not self.rank0:
            return
        self.metrics.write(metrics)
        self.completions.write(*rows)
        say(line)
        for note in self.advice.see(self.history[-1]):
            say(note)
        self.report(self.dashboard.send, metrics["step"], scalars(metrics))

    def report(self, call, *args) -> None:
        """A dashboard that fails does not end the run."""
        try:
            call(*args)
        except Exception as error:
            say(f"--report_to {self.cfg.report_to} failed: {first_line(error)}")

    def evals(self) -> list[dict]:
        """The evals with an accuracy (none if the reward applies to no row)."""
        return [m for m in self.history if is_number(m.get("eval_accuracy"))]

    def best(self) -> int:
        """The step with the highest eval accuracy; 0: none yet."""
        evals = [m for m in self.evals() if m["step"] > 0]
        if not evals:
            return 0
        return max(evals, key=lambda m: m["eval_accuracy"])["step"]

    def close(self) -> None:
        """Draws the curves and prints the summary, one "name: value" per line."""
        if not self.rank0:
            return
        now = time.monotonic()
        self.metrics.write()  # lines that are still waiting
        self.completions.write()
        self.report(self.dashboard.finish)
        out_dir = self.cfg.out_dir
        evals = self.evals()
        summary = {}
        if evals:
            summary["accuracy_before"] = accuracy(evals[0])
        if len(evals) > 1:
            summary["accuracy_after"] = accuracy(evals[-1])
        summary.update(
            steps=max([self.start_step, *(m["step"] for m in self.history)]),
            train_seconds=f"{now - self.loop_started:.1f}",
            total_seconds=f"{now - self.started:.1f}",
            out_dir=out_dir,
        )
        if self.completions.size > 0:
            summary["samples"] = f"python view.py {out_dir} --step"
        summary["curves"] = self.draw_curves()
        best = os.path.join(out_dir, "best")
        if os.path.islink(best):
            summary["best"] = f"{best}, of step {self.best()}"
        say("\n".join(f"{name}: {value}" for name, value in summary.items()))

    def draw_curves(self) -> str:
        """The path of the picture, or why there is none: matplotlib and what it calls can raise
        anything; that must not end a run."""
        path = os.path.join(self.cfg.out_dir, "curves.png")
        try:
            draw([self.cfg.out_dir], path)
        except Exception as error:
            return f"not drawn: {first_line(error)}"
        return path


def accuracy(metrics: dict) -> str:
    return f"{metrics['eval_accuracy']:.3f} +- {metrics['eval_stderr']:.3f}"
