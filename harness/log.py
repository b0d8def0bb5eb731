"""What a run writes and shows: the log, metrics, dashboards."""

import contextlib
import json
import math
import os
import sys
import time
from datetime import timedelta

import numpy as np
import torch

import view
from harness.flags import TrainingError, say
from harness.ranks import World


def gap_sums(log_ratio, cfg) -> tuple[dict, np.ndarray]:
    """How far the sampler is from the trainer, log(trainer / sampler) of a rank's tokens [n]: sums of absolute values,
    of truncated importance weights and of their squares, the largest of each, and every k-th value for quantiles."""
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
        metrics |= dict(tis_mean=weight / n, tis_max=largest, tis_ess=weight**2 / (n * square))
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
        """Keeps the lines up to last_step: what an interrupted run wrote after its checkpoint is made again."""
        kept = []
        if last_step >= 0 and os.path.exists(path):
            with open(path, "rb") as file:
                for line in file:
                    with contextlib.suppress(ValueError, KeyError, TypeError):
                        if line.endswith(b"\n") and json.loads(line)["step"] <= last_step:
                            kept.append(line)
        with open(path + ".new", "wb") as file:
            file.writelines(kept)
        os.replace(path + ".new", path)
        self.path, self.pending, self.size = path, [], sum(map(len, kept))
        self.last = self.size - len(kept[-1]) if kept else 0  # where the last line begins

    def write(self, *records, again=False) -> None:
        """again: in place of the last line."""
        if again and self.pending:
            self.pending.pop()
        elif again:
            self.size = self.last
        self.pending += [json.dumps(record, default=str).encode() + b"\n" for record in records]
        try:
            with open(self.path, "r+b") as file:
                file.seek(self.size)
                file.write(b"".join(self.pending))
                file.truncate()  # half a line of a write that failed
        except OSError as error:
            say(f"cannot write {self.path} ({error.strerror}): {len(self.pending)} lines wait for the next try")
            return
        self.size += sum(map(len, self.pending))
        self.last = self.size - len(self.pending[-1]) if self.pending else self.last
        self.pending = []


class Log:
    """What a run says and writes: metrics.jsonl, completions.jsonl, a line a step or a progress bar, curves.png."""

    def __init__(self, cfg, resumed_from: int, rank0: bool):
        """resumed_from: the step of the checkpoint, whose lines are kept; -1 for a new run."""
        from tqdm import tqdm

        self.cfg, self.history, self.rank0, self.shown = cfg, [], rank0, ""
        if rank0:
            self.metrics = JsonLines(os.path.join(cfg.out_dir, "metrics.jsonl"), resumed_from)
            self.completions = JsonLines(os.path.join(cfg.out_dir, "completions.jsonl"), resumed_from)
            self.history = view.read_jsonl(self.metrics.path)
            self.report = reporter(cfg)
        off = not (rank0 and sys.stderr.isatty())
        self.bar = tqdm(total=cfg.max_steps, initial=max(0, resumed_from), unit="step", disable=off)
        self.first, self.started = max(0, resumed_from), time.monotonic()

    def step(self, metrics: dict, rows: list[dict]) -> None:
        metrics |= dict(num_tokens=metrics["tokens"] + (self.history[-1].get("num_tokens", 0) if self.history else 0))
        metrics = finite(metrics)
        self.history.append(metrics)
        if not self.rank0:
            return
        count = self.cfg.log_completions
        self.metrics.write(metrics)
        self.completions.write(*map(finite, rows if count < 0 else rows[:count]))
        self.report(metrics["step"], trl_names(metrics), rows)
        if rows:
            row = rows[metrics["step"] % len(rows)]
            self.shown = f"  sample: {short(row['prompt'])} -> {short(row['completion'])} reward {row['reward']:g}"
        self.bar.set_postfix(reward=metrics["reward"], refresh=False)
        self.bar.update()
        if self.bar.disable:
            seconds_per_step = (time.monotonic() - self.started) / (metrics["step"] - self.first)
            say(log_line(metrics, self.cfg.max_steps, seconds_per_step))

    def add(self, step: int, metrics: dict) -> None:
        """To the line of the step, or as a line of its own."""
        again = bool(self.history) and self.history[-1]["step"] == step
        line = (self.history.pop() if again else dict(step=step)) | metrics
        self.history.append(line)
        if self.rank0:
            self.metrics.write(finite(line), again=again)
            self.report(step, trl_names(metrics), [])
            say(f"step {step}: eval accuracy {accuracy(line)}, length {line['eval_length']:.3g}")
            if self.shown:
                say(self.shown)

    def close(self, total_seconds: float, best: dict) -> None:
        """Draws the curves and says the greppable end of the log."""
        train_seconds = time.monotonic() - self.started
        self.bar.close()
        if not self.rank0:
            return
        out, mine = self.cfg.out_dir, [m for m in self.history if m["step"] > self.first]
        picture = os.path.join(out, "curves.png")
        try:
            view.draw([out], picture)
        except (OSError, ImportError, ValueError) as error:  # a picture is not worth a run
            say(f"no curves.png: {error}")
            picture = ""
        evals = [m for m in self.history if m.get("eval_accuracy") is not None]
        values = dict(accuracy_before=accuracy(evals[0]), accuracy_after=accuracy(evals[-1])) if evals else {}
        seconds = sum(v for m in mine for k, v in m.items() if k.startswith("time_"))
        values |= dict(steps=max([self.first, *(m["step"] for m in self.history)]))
        values |= dict(train_seconds=f"{train_seconds:.1f}", total_seconds=f"{total_seconds:.1f}")
        values |= dict(tokens_per_s=f"{sum(m.get('tokens', 0) for m in mine) / max(seconds, 1e-9):.0f}")
        values |= dict(best=f"{out}/best, of step {best['step']}") if os.path.islink(os.path.join(out, "best")) else {}
        values |= dict(out_dir=out) | (dict(curves=picture) if picture else {})
        values |= dict(samples=f"python view.py {out} --step")
        say("\n".join(f"{key}: {value}" for key, value in values.items()))


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


def log_line(m: dict, max_steps: int, seconds_per_step: float) -> str:
    """The line of one step."""
    left = timedelta(seconds=round(seconds_per_step * (max_steps - m["step"])))
    shown = {"reward": "reward", "completions/mean_length": "length", "loss": "loss", "grad_norm": "grad"}
    shown |= {"frac_reward_zero_std": "no-signal", "kl": "kl", "sampler_gap": "gap", "failed_rewards": "FAILED REWARDS"}
    line = f"step {m['step']}/{max_steps}"
    for key, name in shown.items():
        line += f" {name} {m[key]:.3g}" if view.is_number(m.get(key)) else ""
    line += f" SKIPPED {m['skipped_steps']} (gradient not finite)" if m.get("skipped_steps") else ""
    return line + f" | {m['tokens_per_s']:.0f} tok/s, {left} left"


def reporter(cfg):
    """A function (step, values, rows) that sends a step to a dashboard; imports its package only when asked."""
    if cfg.report_to == "tensorboard":
        from torch.utils.tensorboard import SummaryWriter

        writer = SummaryWriter(cfg.out_dir)
        return lambda step, values, rows: [writer.add_scalar(k, v, step) for k, v in values.items()] and writer.flush()
    if cfg.report_to == "wandb":
        import wandb

        run = wandb.init(project="grpo", name=os.path.basename(cfg.out_dir), config=vars(cfg), dir=cfg.out_dir)
        columns = ["step", "prompt", "completion", "reward", "advantage"]

        def report(step, values, rows):
            table = [[row[name] for name in columns] for row in rows[: max(0, cfg.log_completions)]]
            run.log(values | (dict(completions=wandb.Table(columns, table)) if rows else {}), step=step)

        return report
    return lambda step, values, rows: None


TRL_NAMES = dict(  # where it is the same quantity; the others keep their names
    lr="learning_rate", frac_zero_std="frac_reward_zero_std", kl_k3="kl", clip_frac="clip_ratio/region_mean",
    reward_std="reward_std_within_groups", reward_std_all="reward_std",  # TRL's is over the whole batch
    completion_length="completions/mean_length", truncated_frac="completions/clipped_ratio",
    completion_length_min="completions/min_length", completion_length_max="completions/max_length",
    ended_length="completions/mean_terminated_length", ended_length_min="completions/min_terminated_length",
    ended_length_max="completions/max_terminated_length", sampler_gap="sampling/sampling_logp_difference/mean",
    sampler_gap_max="sampling/sampling_logp_difference/max", tis_mean="sampling/importance_sampling_ratio/mean",
    tis_max="sampling/importance_sampling_ratio/max",
)  # fmt: skip


def trl_names(metrics: dict) -> dict:
    """The metrics under the names that TRL's GRPOTrainer gives them: dashboards carry over."""
    values = {}
    for key, value in metrics.items():
        if key.startswith("eval_"):
            name = "eval/" + key.removeprefix("eval_")
        elif key.startswith("reward/"):
            name = f"train/rewards/{key.removeprefix('reward/')}" + ("" if key.endswith("/std") else "/mean")
        else:
            name = "train/" + TRL_NAMES.get(key, key)
        values |= {name: value} if view.is_number(value) else {}
    return values | {"train/step_time": sum(v for k, v in metrics.items() if k.startswith("time_"))}
