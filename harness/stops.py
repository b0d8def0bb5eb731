"""Stops: what a signal does to a run."""

import ctypes
import os
import signal
import sys
import threading
import time

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
SAME_SIGNAL = 1.0  # seconds. One Ctrl-C reaches a rank twice: from the terminal and from torchrun
PR_SET_PDEATHSIG = 1  # the option of Linux's prctl() that kills a process together with its parent


class Stops:
    """Ends a run on SIGTERM, SIGINT (Ctrl-C) or SIGHUP, after a save. SIGUSR1 asks for a save only.

    - A stop acts at once, even in the middle of a rollout: it saves the last recorded step, and
      --resume repeats the step that was cut off.
    - A stop waits while weights change, from hold() to release(), and while somebody holds `lock`
      (a save, a line of the log).
    - On the command line a thread answers, because Python runs no signal handler while the main
      thread is inside one long call. The thread calls save_and_close() and exits with code 0.
    - Python callers get KeyboardInterrupt in the main thread, and Run.__exit__ saves.
    - A second signal ends the process at once with exit code 128 + signal, without a save. Python
      callers get KeyboardInterrupt, even while weights change.
    """

    def __init__(self, save_and_close, command_line: bool, delay: float):
        """delay: seconds that the thread waits first, so that rank 0 gets its signal before this
        rank is gone."""
        self.save_and_close = save_and_close
        self.command_line = command_line
        self.delay = delay
        self.lock = threading.RLock()
        self.mid_step = False  # weights have changed since the last recorded step
        self.save_requested = False  # by SIGUSR1
        self.finished = False  # the main thread has left the run
        self.first_stop = None  # time.monotonic() of the first signal
        self.stop_thread = None

    def start(self, exits) -> None:
        """Listens until `exits` (an ExitStack) closes."""
        end_with_torchrun()
        if threading.current_thread() is not threading.main_thread():
            return  # Python allows signal handlers in the main thread only

        if self.command_line:
            read_end, write_end = os.pipe()
            os.set_blocking(write_end, False)
            exits.callback(os.close, write_end)  # ends the thread
            before = signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
            exits.callback(signal.set_wakeup_fd, before)
            threading.Thread(target=self.listen, args=(read_end,), daemon=True).start()

        for number in (*STOP_SIGNALS, signal.SIGUSR1):
            before = signal.getsignal(number)
            if before != signal.SIG_IGN:  # nohup and background jobs ask to ignore some
                signal.signal(number, self.handle)
                exits.callback(signal.signal, number, before)

    def handle(self, number: int, frame) -> None:
        """Runs in the main thread, as soon as that executes Python code."""
        if not self.command_line:
            self.receive(number)

    def listen(self, read_end: int) -> None:
        """Runs in a thread. Each signal writes its number into the pipe at once."""
        while numbers := os.read(read_end, 1):
            self.receive(numbers[0])
        os.close(read_end)

    def receive(self, number: int) -> None:
        if number == signal.SIGUSR1:
            self.save_requested = True
        elif number in STOP_SIGNALS:
            now = time.monotonic()
            if self.first_stop is None:
                self.first_stop = now
                self.begin_stop()
            elif now - self.first_stop > SAME_SIGNAL:
                self.end_at_once(number)

    def begin_stop(self) -> None:
        if self.command_line:
            self.stop_thread = threading.Thread(target=self.stop, daemon=True)
            self.stop_thread.start()
        elif self.finished or not self.mid_step:
            raise KeyboardInterrupt  # else release() raises it

    def end_at_once(self, number: int) -> None:
        if self.command_line:
            os._exit(128 + number)
        raise KeyboardInterrupt

    def stop(self) -> None:
        """Runs in a thread of its own, because listen() still has to receive a second signal."""
        time.sleep(self.delay)
        with self.lock:
            if not self.finished:
                try:
                    self.save_and_close()
                finally:
                    os._exit(0)

    def hold(self) -> None:
        """Weights are about to change: a stop waits for release()."""
        if not self.mid_step:
            self.lock.acquire()
            self.mid_step = True

    def release(self) -> None:
        """The step is recorded. Raises the KeyboardInterrupt that had to wait, if there is one."""
        self.mid_step = False
        self.lock.release()
        if self.first_stop is not None and not self.command_line:
            raise KeyboardInterrupt

    def finish(self) -> None:
        """The main thread leaves the run: a first signal now does nothing. If a stop is under way,
        waits for it to end the process."""
        if self.mid_step:  # it stays True: the weights are of no recorded step
            self.lock.release()
        if self.stop_thread is not None:
            self.stop_thread.join()
        with self.lock:
            self.finished = True


def end_with_torchrun() -> None:
    """If torchrun is killed, its ranks end too: none trains on beside the run that resumes."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL))
    else:
        threading.Thread(target=watch_parent, args=(os.getppid(),), daemon=True).start()


def watch_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)
