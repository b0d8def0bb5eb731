"""Scores completions: trusted rewards in the trainer, others in workers, and counts failures."""

import math
from collections import Counter
from dataclasses import dataclass, field
from statistics import fmean

from harness.environment import Environment
from harness.flags import TrainingError, say
from harness.jobs import make_pool
from harness.user_code import call_reward
from harness.workers import Outcome, outcome_of
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
    """

    def __init__(
        self,
        rewards: list[Reward],
        timeout=10.0,
        workers=4,
        environment: Environment | None = None,
    ):
        self.rewards = rewards
        self.environment = environment
        self.failure_was_shown = False  # the log shows only the first failure of a run
        self.pool = make_pool(rewards, environment, timeout, workers)

    def score(
        self, completions: list[str], rows: list[dict], episode_failures: list[str] | None = None
    ) -> Scores:
        """Scores completions[i] with rows[i]. Never raises, whatever a reward function does.

        episode_failures: why the episode of each completion failed; "" or None: it did not. A
        failed episode gets no reward.
        """
        n = len(rows)
        scores = Scores(totals=[math.nan] * n, by_reward={}, failed=[False] * n)
        if episode_failures is None:
            episode_failures = [""] * n
        for i, failure in enumerate(episode_failures):
            if failure:
                add_failure(scores, i, f"environment failed: {failure}", rows[i])
                scores.failures["environment_" + failure.partition(":")[0]] += 1

        scored = [i for i in range(n) if not episode_failures[i]]
        for reward in self.rewards:
            scores.by_reward[reward.name] = [0.0] * n
            calls = self.calls_of(reward, scored, rows)
            jobs = [([completions[i] for i in call], [rows[i] for i in call]) for call in calls]
            if reward.trusted:
                outcomes = [outcome_of(call_reward, reward, *job) for job in jobs]
            else:
                places = [self.worker_of(reward, rows[call[0]]) for call in calls]
                outcomes = self.pool.call_all([(reward.name, *job) for job in jobs], places)
            for call, outcome in zip(calls, outcomes, strict=True):
                add_outcome(scores, reward, outcome, call, rows)

        for i in range(n):
            weighted = [reward.weight * scores.by_reward[reward.name][i] for reward in self.rewards]
            applicable = [value for value in weighted if not math.isnan(value)]
            if applicable:
                scores.totals[i] = sum(applicable)
        return scores

    def calls_of(self, reward: Reward, scored: list[int], rows: list[dict]) -> list[list[int]]:
        """The samples of each call: all together in TRL's form, else one by one.

        TRL's form with `environments`: a call for each worker, with the episodes it has played.
        """
        if not reward.batched:
            return [[i] for i in scored]
        calls = {}
        for i in scored:
            calls.setdefault(self.worker_of(reward, rows[i]), []).append(i)
        return list(calls.values())

    def worker_of(self, reward: Reward, row: dict) -> int | None:
        """Which worker has the object that the reward reads; None: any may make the call."""
        if not reward.reads_objects:
            return None
        return self.pool.worker_of(self.environment.place_of(row["environments"]))

    def failure_metrics(self, all_scores: list[Scores], step: int, n_samples: int) -> dict:
        """Metrics of the failures in a step, and the means of what rewards logged.

        all_scores: the scores of every rank. Prints the run's first failure. Raises TrainingError
        if no sample of the first step got a reward.
        """
        failed = 0  # samples, as in the next line; a failed sample has a total, 0
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
        lost = sum(count for cause, count in causes.items() if cause.startswith("environment_"))
        if step == 1 and lost == n_samples:
            name = self.environment.name
            raise TrainingError(f"environment {name} failed in every episode of the first step")
        if step == 1 and failed + without_reward == n_samples:
            raise TrainingError("in every sample of step 1 a reward failed or returned None")

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


def add_outcome(scores: Scores, reward: Reward, outcome: Outcome, call: list[int], rows) -> None:
    """Adds the outcome of a call about the samples with these indices."""
    if outcome.cause:
        numbers = [outcome.message] * len(call)
        cause = outcome.cause
    else:
        numbers, metrics, extra = outcome.value
        cause = "invalid"  # of a text in the place of a number
        scores.metrics.update(metrics)
        for column, texts in extra.items():
            for i, text in zip(call, texts, strict=True):
                scores.extra.setdefault(column, [""] * len(rows))[i] = text

    for i, number in zip(call, numbers, strict=True):
        if isinstance(number, str):
            scores.failures[cause] += 1
            add_failure(scores, i, f"reward {reward.name} failed: {cause}: {number}", rows[i])
            number = 0.0
        scores.by_reward[reward.name][i] = number


def add_failure(scores: Scores, i: int, message: str, row: dict) -> None:
    scores.failed[i] = True
    if not scores.first_failure:
        shown = {key: value for key, value in row.items() if key != "environments"}
        scores.first_failure = f"{message}; row: {ascii(shown)[:500]}"
