"""Scores completions: trusted rewards in the trainer, others in workers, and counts failures."""

import math
from collections import Counter
from dataclasses import dataclass, field

from harness.flags import TrainingError, say
from harness.user_code import TRAINER_KEYS, call_reward
from harness.workers import Outcome, WorkerPool, outcome_of
from reward import Reward

NOT_FINITE = Outcome(cause="invalid", message="not a finite number")


@dataclass
class Scores:
    """The rewards of some samples. The lists have one entry per sample."""

    totals: list[float]  # sum of weight * value; NaN: no reward applies
    by_reward: dict[str, list[float]]  # 0.0: it failed; NaN: it does not apply
    failed: list[bool]  # a reward failed on this sample
    failures: Counter = field(default_factory=Counter)  # cause -> number of failed values
    first_failure: str = ""  # one line for the log
    metrics: dict = field(default_factory=dict)  # name -> the last value, by TRL's log_metric
    extra: dict[str, list] = field(default_factory=dict)  # column -> None: not logged; by log_extra

    def add(self, reward: Reward, indices: list[int], outcome: Outcome, rows: list[dict]) -> None:
        """Adds the outcome of one call, which was about the samples of these indices."""
        values = [None] * len(indices)
        failure = outcome
        if not outcome.cause:
            values, metrics, extra = outcome.value
            failure = NOT_FINITE  # the cause, if a value is None
            self.add_logged(indices, metrics, extra)

        for i, value in zip(indices, values, strict=True):
            if value is None:
                value = 0.0
                self.failed[i] = True
                self.failures[failure.cause] += 1
                row = [f"{k}={v!a:.60}" for k, v in rows[i].items() if k not in TRAINER_KEYS]
                line = f"reward {reward.name} failed on sample {i + 1} of {len(rows)}"
                why = f"{failure.cause}: {failure.message}"
                self.note_failure(f"{line}: {why}; row: {', '.join(row)[:500]}")
            self.by_reward[reward.name][i] = value
            if math.isnan(self.totals[i]):
                self.totals[i] = reward.weight * value
            elif not math.isnan(value):
                self.totals[i] += reward.weight * value

    def add_logged(self, indices: list[int], metrics: dict, extra: dict) -> None:
        self.metrics.update(metrics)
        for column, logged in extra.items():
            entries = self.extra.setdefault(column, [None] * len(self.totals))
            for i, entry in zip(indices, logged, strict=False):
                entries[i] = entry

    def note_failure(self, line: str) -> None:
        if not self.first_failure:
            self.first_failure = line


class Scorer:
    """Scores completions by rewards.

    timeout: seconds for one call of a reward in a worker.
    memory: bytes that a worker may take for its calls (Linux only).
    """

    def __init__(self, rewards: list[Reward], timeout=10.0, workers=4, memory=4 << 30):
        self.rewards = rewards
        self.failure_was_shown = False  # the log shows only the first failure of a run
        untrusted = [(r.name, r.path, r.text) for r in rewards if not r.trusted]
        load = "harness.user_code:load_in_worker"
        self.pool = WorkerPool(load, (untrusted,), timeout, memory, workers)

    def score(self, completions: list[str], rows: list[dict]) -> Scores:
        """Scores completions[i] with rows[i]. Never raises, whatever a reward function does."""
        n = len(rows)
        scores = Scores(
            totals=[math.nan] * n,
            by_reward={reward.name: [0.0] * n for reward in self.rewards},
            failed=[False] * n,
        )
        everything = list(range(n))
        one_by_one = [[i] for i in range(n)]
        for reward in self.rewards:
            if reward.batched and n > 1:
                [outcome] = self.call(reward, [everything], completions, rows)
                if not outcome.cause:
                    scores.add(reward, everything, outcome, rows)
                    continue
                line = f"reward {reward.name} failed on {n} samples at once, now one by one"
                scores.note_failure(f"{line}: {outcome.cause}: {outcome.message}")
            outcomes = self.call(reward, one_by_one, completions, rows)
            for indices, outcome in zip(one_by_one, outcomes, strict=True):
                scores.add(reward, indices, outcome, rows)
        return scores

    def call(self, reward: Reward, calls: list[list[int]], completions, rows) -> list[Outcome]:
        """One outcome per call. A call is a list of the indices of its samples."""
        jobs = []
        for indices in calls:
            texts = [completions[i] for i in indices]
            jobs.append((reward.name, texts, [rows[i] for i in indices]))
        if reward.trusted:
            return [outcome_of(call_reward, reward, *arguments) for _, *arguments in jobs]
        return self.pool.call_all(jobs)

    def failure_metrics(self, all_scores: list[Scores], step: int, n_samples: int) -> dict:
        """Metrics of the failures in a step, and the means of what rewards logged.

        all_scores: the scores of every rank. Prints the run's first failure. Raises TrainingError
        if no sample of the first step got a reward.
        """
        failed = 0
        without_reward = 0
        causes = Counter()
        logged = {}
        for scores in all_scores:
            if scores.first_failure and not self.failure_was_shown:
                self.failure_was_shown = True
                say(scores.first_failure)
            failed += sum(scores.failed)
            without_reward += sum(map(math.isnan, scores.totals))
            causes.update(scores.failures)
            for name, value in scores.metrics.items():
                logged.setdefault(name, []).append(value)

        if step == 1 and failed + without_reward == n_samples:
            why = "returned None, for every sample"
            if failed:
                why = "failed; the line above says how the first one did"
            raise TrainingError(f"every reward of the first step {why}")

        metrics = {f"reward_failed/{cause}": count for cause, count in causes.items()}
        metrics["failed_rewards"] = None
        if failed:
            metrics["failed_rewards"] = failed
        for name in sorted(logged):
            metrics[f"logged/{name}"] = finite_mean(logged[name])
        return metrics

    def close(self) -> None:
        """Ends the workers and everything that they started. Scoring again starts new ones."""
        self.pool.close()


def finite_mean(values: list[float | None]) -> float | None:
    """The mean of the values that are not None. None without any."""
    finite = [value for value in values if value is not None]
    if not finite:
        return None
    return sum(finite) / len(finite)
