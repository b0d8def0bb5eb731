"""The scorer: built-in rewards run here, others in processes that can be killed."""

import contextlib
import math
import os
import random
import resource
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection, Pipe

from reward import Outcome, Reward, Scores, call_reward, find_reward

HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
MAIN = "import sys; sys.path[0] = sys.argv[1]; from harness import workers; workers.serve()"  # found by place
START_LIMIT = 120.0  # seconds that a worker may take to start and to import the reward file
PATIENCE = 8  # timeouts in a row, after which the calls that wait count as timeouts, too
GIVEN_UP = Outcome(None, "timeout", f"given up after {PATIENCE} timeouts in a row")


class Worker:
    """A process that runs reward functions, in a session of its own: Ctrl-C in the trainer's terminal does not
    reach it, and it can be killed with everything that it started. It starts when it is first needed."""

    def __init__(self, rewards: list[Reward], timeout: float, memory: int):
        files = [
            (reward.name, reward.path, reward.text) for reward in rewards if not reward.trusted
        ]
        self.settings, self.timeout, self.process = (files, memory, timeout), timeout, None

    def call(self, *question) -> Outcome:
        try:
            if (
                self.process is None or self.connection.poll()
            ):  # an idle worker says nothing: this is its end
                self.start()
            return self.ask(question, self.timeout)
        except TimeoutError as error:
            self.kill()
            return Outcome(None, "timeout", str(error))
        except (OSError, EOFError):
            time.sleep(
                0.3
            )  # for the exit code to be its own; without wait(), so that kill() finds its group
            return Outcome(None, "died", f"the worker ended with exit code {self.kill()}")

    def start(self):
        self.kill()  # what the last one started may still be there
        self.connection, theirs = Pipe()
        command = [sys.executable, "-c", MAIN, HERE]
        with theirs:  # prints go to stderr, so as not to mix with the trainer's
            self.process = subprocess.Popen(command, stdin=theirs, stdout=2, start_new_session=True)
        self.ask((os.getpid(), list(map(str, sys.path)), *self.settings), START_LIMIT)

    def ask(self, question: tuple, limit: float) -> Outcome:
        self.connection.send(question)
        if not self.connection.poll(limit):
            raise TimeoutError(f"no result after {limit} s")
        return Outcome(*self.connection.recv())

    def kill(self) -> int | None:
        if (
            self.process and self.process.returncode is None
        ):  # else its number may be another's by now
            with contextlib.suppress(OSError):
                os.killpg(self.process.pid, signal.SIGKILL)
        return self.process and self.process.wait()


def serve():
    """The main function of a worker: one call after the other until the trainer is gone."""
    for name in ("reward", "harness", "harness.workers"):
        del sys.modules[name]  # a user's own modules may be called so
    connection, worker = Connection(os.dup(0)), os.getpid()
    os.register_at_fork(after_in_child=connection.close)  # else a fork would hide the worker's end
    os.dup2(
        os.open(os.devnull, os.O_RDONLY), 0
    )  # a function that reads from stdin gets nothing, not its next call
    sys.stdout = sys.stderr

    def end_with(trainer: int):
        while os.getppid() == trainer:
            time.sleep(1)
        os.killpg(0, signal.SIGKILL)

    try:
        trainer, path, files, memory, timeout = connection.recv()
        threading.Thread(target=end_with, args=(trainer,), daemon=True).start()
        sys.path[:] = [
            *(os.path.dirname(file) for _, file, _ in files if file),
            *path,
        ]  # for imports within a call
        rewards = {name: find_reward(name, file, text) for name, file, text in files}
        memory += (
            1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        )  # on top of what the imports took
        _limit(resource.RLIMIT_DATA, memory)
        outcome = Outcome([])
        while True:
            connection.send(tuple(outcome))
            name, completions, rows = connection.recv()
            # the trainer enforces `timeout`; this ends code that holds the GIL for ever when the trainer is gone
            _limit(resource.RLIMIT_CPU, int(time.process_time() + os.cpu_count() * (timeout + 10)))
            outcome = call_reward(rewards[name], completions, rows)
            if os.getpid() != worker:
                os._exit(0)  # the function forked, and this is the child
    except (EOFError, OSError):
        os.killpg(0, signal.SIGKILL)


def _limit(kind: int, amount: int):
    with contextlib.suppress(OSError, ValueError):  # not every system has them, or lets them rise
        resource.setrlimit(kind, (amount, resource.getrlimit(kind)[1]))


class Scorer:
    """timeout: seconds for one call of a function, which is killed then. memory: bytes for a worker (Linux).
    Causes of failure: exception, invalid (no finite number), timeout, memory, died (exit, crash)."""

    def __init__(self, rewards: list[Reward], timeout=10.0, workers=4, memory=4 << 30):
        self.rewards, self.workers = (
            rewards,
            [Worker(rewards, timeout, memory) for _ in range(workers)],
        )

    def score(self, completions: list[str], rows: list[dict]) -> Scores:
        """Scores completions[i] against rows[i]. Whatever a reward function does, this does not raise."""
        n, singles = len(rows), [[i] for i in range(len(rows))]
        scores = Scores(
            [math.nan] * n, {reward.name: [0.0] * n for reward in self.rewards}, [False] * n
        )
        for reward in self.rewards:
            together = reward.batched and n > 1
            results = self._outcomes(
                reward, [list(range(n))] if together else singles, completions, rows
            )
            if together and (failed := results[0][1]).values is None:
                line = f"reward {reward.name} failed on {n} samples at once, now one by one"
                scores.first_failure = (
                    scores.first_failure or f"{line}: {failed.cause}: {failed.message}"
                )
                results = self._outcomes(reward, singles, completions, rows)
            for job, outcome in results:
                scores.add(reward, job, outcome, rows)
        return scores

    def _outcomes(
        self, reward: Reward, jobs: list[list[int]], completions: list[str], rows: list[dict]
    ) -> list:
        """One call for each job, which is a list of samples: [(job, outcome)]."""
        if reward.trusted:
            return [([i], call_reward(reward, [completions[i]], [rows[i]])) for [i] in jobs]
        jobs = random.Random(0).sample(
            jobs, len(jobs)
        )  # one prompt that hangs does not end the step for the others
        waiting, results = iter(jobs), []

        def run(worker: Worker):
            signal.pthread_sigmask(
                signal.SIG_BLOCK, {signal.SIGINT}
            )  # as in the process then: Ctrl-C is the trainer's
            for job in waiting:
                tired = [outcome.cause for _, outcome in results[-PATIENCE:]] == [
                    "timeout"
                ] * PATIENCE
                call = reward.name, [completions[i] for i in job], [rows[i] for i in job]
                results.append((job, GIVEN_UP if tired else worker.call(*call)))

        pool = ThreadPoolExecutor(len(self.workers))
        threads = [pool.submit(run, worker) for worker in self.workers]
        try:
            [thread.result() for thread in threads]
        finally:  # also where the trainer is to stop: nothing goes on behind its back
            jobs.clear()
            while not all(thread.done() for thread in threads):
                self.close()
                time.sleep(0.01)
        return results

    def close(self):
        """Ends the workers and everything they started. Scoring again starts new ones."""
        for worker in self.workers:
            worker.kill()
