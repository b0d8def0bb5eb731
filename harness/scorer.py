"""Scores completions: trusted rewards in the trainer, others in workers, and counts failures."""

import math
from collections import Counter
from dataclasses import dataclass, field
from statistics import fmean

from harness.flags import TrainingError, say
from harness.user_code import call_reward
from harness.workers import WorkerPool, outcome_of
from reward import Reward


@dataclass
class Scores:
    """The rewards of some samples. The lists have one entry per sample."""

    totals: list[float]  # sum of weight * value; NaN: no reward applies
    by_reward: dict[str, list[float]]  # 0.0: it failed; NaN: it does not apply
    failed: list[bool]  # a reward failed on this sample
    failures: Counter = field(default_factory=Counter)  # cause -> number of failed values
    first_failure: str = ""  # one line for the log
    metrics: dict = field(default_factory=dict)  # name -> the last value, by TRL's log_metric
    extra: dict[str, list] = field(default_factory=dict)  # column -> texts, by TRL's log_extra


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
        scores = Scores(totals=[math.nan] * n, by_reward={}, failed=[False] * n)
        for reward in self.rewards:
            size = 1  # samples per call
            if reward.batched:
                size = max(1, n)
            jobs = [(completions[i : i + size], rows[i : i + size]) for i in range(0, n, size)]
            if reward.trusted:
                outcomes = [outcome_of(call_reward, reward, *job) for job in jobs]
            else:
                outcomes = self.pool.call_all([(reward.name, *job) for job in jobs])

            scores.by_reward[reward.name] = []
            for job, outcome in zip(jobs, outcomes, strict=True):
                add_outcome(scores, reward, outcome, job[1])

        for i in range(n):
            weighted = [reward.weight * scores.by_reward[reward.name][i] for reward in self.rewards]
            applicable = [value for value in weighted if not math.isnan(value)]
            if applicable:
                scores.totals[i] = sum(applicable)
        return scores

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
            raise TrainingError("every reward of the first step failed or returned None")

        metrics = {f"reward_failed/{cause}": count for cause, count in causes.items()}
        metrics["failed_rewards"] = None  # None: the step's line omits it
        if failed:
            metrics["failed_rewards"] = failed
        for name in sorted(logged):
            metrics[f"logged/{name}"] = fmean(logged[name])
        return metrics

    def close(self) -> None:
        """Ends the workers and everything that they started. Scoring again starts new ones."""
        self.pool.close()


def add_outcome(scores, reward, outcome, rows):
    """Adds the outcome of the next call, which was about these rows."""
    values = scores.by_reward[reward.name]
    cause = outcome.cause
    message = outcome.message
    if cause:
        numbers = [None] * len(rows)
    else:
        numbers, metrics, extra = outcome.value
        scores.metrics.update(metrics)
        scores.extra.update(extra)
        cause = "invalid"
        message = "not a finite number"

    for row, number in zip(rows, numbers, strict=True):
        if number is None:
            scores.failed[len(values)] = True
            scores.failures[cause] += 1
            if not scores.first_failure:
                why = f"{cause}: {message}; row: {ascii(row)[:500]}"
                scores.first_failure = f"reward {reward.name} failed: {why}"
            number = 0.0
        values.append(number)
