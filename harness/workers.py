"""A pool of worker processes that can be killed. They call functions that may hang or crash.

How trainer and worker talk: each worker has one end of a pipe, as its stdin, and both take turns.

1. The trainer starts a worker and sends the settings, once: its process id, its sys.path, the
   name of the function that loads what it will call, and the limits.
2. The worker loads and answers with an empty Outcome: it is ready. It has START_LIMIT seconds for
   this.
3. The trainer sends a job, (name, *arguments). The worker calls the function of this name and
   answers with the Outcome. This repeats.

If an answer comes too late, the trainer kills the worker with everything that it started, and the
next job starts a new one. If the pipe closes or the trainer is gone, the worker kills itself and
everything that it started. All that travels is plain data: numbers, texts, lists, dicts, tuples.
"""

import contextlib
import itertools
import os
import pkgutil
import random
import resource
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from multiprocessing.connection import Connection, Pipe
from typing import Any, NamedTuple

HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
MAIN = "import sys; sys.path[0] = sys.argv[1]; from harness import workers; workers.serve()"
START_LIMIT = 120.0  # seconds that a worker may take to start and to load its functions
PATIENCE = 8  # timeouts in a row; then the waiting calls are given up


class Outcome(NamedTuple):
    """The end of one call: its value, or the cause of its failure."""

    value: Any = None
    cause: str = ""  # "": it returned. Else exception, timeout, memory or died
    message: str = ""


GIVEN_UP = Outcome(cause="timeout", message=f"given up after {PATIENCE} timeouts in a row")


def outcome_of(function: Callable, *arguments) -> Outcome:
    """Calls the function. Its exceptions are failures of this one call."""
    try:
        return Outcome(function(*arguments))
    except (Exception, SystemExit) as error:
        cause = "memory" if isinstance(error, MemoryError) else "exception"
        last = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{os.path.basename(last.filename)}:{last.lineno}"
        return Outcome(cause=cause, message=f"{one_line(error)} ({place})")


def one_line(error: BaseException) -> str:
    """An error in one line. Escaped for the terminal: its text is untrusted."""
    return ascii(f"{type(error).__name__}: {error}")[1:-1][:500]


# -- In the trainer


class WorkerPool:
    """Calls functions in worker processes, which start when they are first needed.

    load: the name of a function of this project, as "harness.jobs:load". Each worker
        calls it with the arguments; it returns the functions of the jobs: {name: function}.
    timeout: seconds for one call; then its worker is killed.
    memory: bytes that a worker may take after it has loaded its functions (Linux only).
    """

    def __init__(self, load: str, arguments: tuple, timeout: float, memory: int, workers: int):
        self.workers = [Worker((load, arguments, memory, timeout), timeout) for _ in range(workers)]

    def call_all(self, jobs: list[tuple], places: list[int | None] | None = None) -> list[Outcome]:
        """Calls each job, (name, *arguments). The outcomes are in the order of the jobs.

        places: jobs of the same place go to the same worker, which may cache what they share. A
        job without a place goes to whichever worker is free.
        """
        # Shuffle, so that the jobs of one prompt, if they all hang, do not come in a row.
        order = random.Random(0).sample(range(len(jobs)), len(jobs))
        if places is None:
            places = [None] * len(jobs)
        queues = {worker: [] for worker in range(len(self.workers))}
        queues[None] = []
        for index in order:
            queues[self.worker_of(places[index])].append(index)
        shared = iter(queues[None])  # all threads take jobs from here
        outcomes = {}
        causes = []  # of the outcomes, in the order in which they came

        def work(worker, waiting):
            # Ctrl-C is for the main thread. A process that this thread starts ignores it, too.
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            for index in waiting:
                if causes[-PATIENCE:] == ["timeout"] * PATIENCE:
                    outcomes[index] = GIVEN_UP
                else:
                    outcomes[index] = worker.call(jobs[index])
                causes.append(outcomes[index].cause)

        with ThreadPoolExecutor(len(self.workers)) as executor:
            threads = []
            try:
                for number, worker in enumerate(self.workers):
                    waiting = itertools.chain(queues[number], shared)
                    threads.append(executor.submit(work, worker, waiting))
                for thread in threads:
                    thread.result()
            finally:  # after Ctrl-C, too: no call goes on without the trainer
                for queue in queues.values():  # empty, they end the threads after this call
                    queue.clear()
                while wait(threads, timeout=0.01).not_done:
                    self.close()
        return [outcomes[index] for index in range(len(jobs))]

    def worker_of(self, place: int | None) -> int | None:
        """The number of the worker that gets the jobs of a place; None: whichever is free."""
        if place is None:
            return None
        return place % len(self.workers)

    def close(self) -> None:
        """Ends the workers and everything that they started. Another call starts new ones."""
        for worker in self.workers:
            worker.kill()


class Worker:
    """The trainer's side of one worker process.

    The process has a session of its own: Ctrl-C in the trainer's terminal does not reach it, and it
    can be killed with everything that it started.
    """

    def __init__(self, settings: tuple, timeout: float):
        """settings: what the process reads first, in serve()."""
        self.settings = settings
        self.timeout = timeout
        self.process = None

    def call(self, job: tuple) -> Outcome:
        try:
            # The pipe of an idle worker is readable if the worker died.
            if self.process is None or self.connection.poll():
                self.start()
            return self.ask(job, self.timeout)
        except TimeoutError as error:
            self.kill()
            return Outcome(cause="timeout", message=str(error))
        except (OSError, EOFError):  # the worker closed the pipe
            # So it is ending. The pause lets it set its exit code. No wait() before kill(): after
            # that its process id, by which kill() finds its children, could be another's.
            time.sleep(0.3)
            return Outcome(cause="died", message=f"the worker ended with exit code {self.kill()}")

    def start(self):
        self.kill()  # the children of the last process may still be alive
        self.connection, theirs = Pipe()
        command = [sys.executable, "-c", MAIN, HERE]
        # The order of a set is the same in all workers, unless the user wants another one.
        variables = {"PYTHONHASHSEED": "0"} | os.environ
        with theirs:  # stdout=2: what functions print goes to stderr, not into the trainer's output
            self.process = subprocess.Popen(
                command, stdin=theirs, stdout=2, start_new_session=True, env=variables
            )
        self.ask((os.getpid(), sys.path, *self.settings), START_LIMIT)

    def ask(self, message: tuple, limit: float) -> Outcome:
        self.connection.send(message)
        if not self.connection.poll(limit):
            raise TimeoutError(f"no result after {limit} s")
        return Outcome(*self.connection.recv())

    def kill(self) -> int | None:
        """Kills the process with everything that it started. Returns its exit code."""
        if self.process is None:
            return None
        if self.process.returncode is None:  # else its process id may be another's by now
            with contextlib.suppress(OSError):
                os.killpg(self.process.pid, signal.SIGKILL)
        return self.process.wait()


# -- In the worker


def serve():
    """The main function of a worker: one call after the other until the trainer is gone."""
    worker = os.getpid()
    connection = take_connection()
    try:
        trainer, path, load, arguments, memory, timeout = connection.recv()
        threading.Thread(target=die_with, args=(trainer,), daemon=True).start()
        load_functions = pkgutil.resolve_name(load)
        sys.path[:] = path
        functions = load_functions(*arguments)
        limit_resource(resource.RLIMIT_DATA, peak_memory() + memory)

        outcome = Outcome()
        while True:
            connection.send(tuple(outcome))
            name, *job_arguments = connection.recv()
            # If a call holds the GIL for ever no thread here can end it. The trainer does; if that
            # is gone, this limit does.
            seconds = time.process_time() + os.cpu_count() * (timeout + 10)
            limit_resource(resource.RLIMIT_CPU, int(seconds))
            outcome = outcome_of(functions[name], *job_arguments)
            if os.getpid() != worker:  # the function forked, and this is the child
                os._exit(0)
    except (EOFError, OSError):  # the trainer closed the pipe
        os.killpg(0, signal.SIGKILL)


def take_connection():
    """The worker's end of the pipe, out of the reach of the functions that it calls."""
    connection = Connection(os.dup(0))
    os.register_at_fork(after_in_child=connection.close)  # else a fork would keep the pipe open
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # a read of stdin gets EOF, not the next job
    sys.stdout = sys.stderr
    return connection


def die_with(trainer):
    """Kills this worker when the trainer is gone."""
    while os.getppid() == trainer:
        time.sleep(1)
    os.killpg(0, signal.SIGKILL)


def peak_memory():
    """The most bytes that this process has held."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if sys.platform == "darwin":  # a Mac counts bytes, other systems kB
        return peak
    return 1024 * peak


def limit_resource(kind, amount):
    with contextlib.suppress(OSError, ValueError):  # some systems have no such limit
        resource.setrlimit(kind, (amount, resource.getrlimit(kind)[1]))
