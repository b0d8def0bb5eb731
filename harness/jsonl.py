"""Files with one JSON object per line, as a run writes them."""

import json
import math
import os

from harness.flags import say


class JsonLines:
    """A file with one JSON object per line. If the disk is full, lines wait for the next write."""

    def __init__(self, path: str, last_step: int):
        """Drops the lines that an interrupted run wrote after last_step: those steps run again."""
        self.path = path
        self.size = bytes_until(path, last_step)  # of the whole lines in the file
        self.waiting = b""  # lines that are not in the file yet
        self.write()

    def write(self, *rows) -> None:
        for row in rows:
            line = json.dumps(finite(row), default=str, separators=(",", ":"))
            self.waiting += line.encode() + b"\n"
        try:
            with open(self.path, "ab") as file:
                self.size = min(self.size, file.tell())  # smaller if the file was moved away
                file.truncate(self.size)  # a write that failed may have left half a line
                file.write(self.waiting)
        except OSError as error:
            why = f"cannot write {self.path} ({error.strerror})"
            say(f"{why}: the lines wait for the next write")
            return
        self.size += len(self.waiting)
        self.waiting = b""


def bytes_until(path, last_step):
    """The size of a log's whole lines up to a step; 0 if there is no log."""
    if not os.path.exists(path):
        return 0
    size = 0
    with open(path, "rb") as file:
        for line in file:
            if not line.endswith(b"\n") or json.loads(line)["step"] > last_step:
                break
            size += len(line)
    return size


def finite(value):
    """Null (None) for numbers that JSON cannot hold."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
