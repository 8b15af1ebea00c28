"""Log lines, written by a thread of their own: a pipe that nobody reads must not stop the event loop."""

from __future__ import annotations

import logging
import os
import threading
import time
from queue import Full, Queue

MOST_LINES = 4096  # that may wait; more are left out and counted
END_SECONDS = 2.0  # that the end of a process waits for them


class LineWriter(logging.Handler):
    """Writes to a file descriptor, so that no lock of a stream is held while the system takes its time."""

    def __init__(self, fd: int, most: int = MOST_LINES) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter("%(message)s"))
        self._fd = fd
        self._lines: Queue[str] = Queue(most)
        self._left_out = 0
        self._thread: threading.Thread | None = None
        self._busy = False

    def emit(self, record: logging.LogRecord) -> None:
        """Hand over a line; it waits for nothing."""
        if self._thread is None:  # logging calls this under the handler's own lock
            self._thread = threading.Thread(target=self._write, name="hybridkv-log", daemon=True)
            self._thread.start()
        try:
            self._lines.put_nowait(self.format(record))
        except Full:
            self._left_out += 1

    def _write(self) -> None:
        while True:
            line = self._lines.get()
            self._busy = True
            if self._left_out:
                line, self._left_out = f"{line}\n({self._left_out} lines were left out: nobody took them)", 0
            data = line.encode("utf-8", "replace") + b"\n"
            try:
                while data:
                    data = data[os.write(self._fd, data) :]
            except OSError:  # nobody will ever read it
                pass
            self._busy = not self._lines.empty()

    def flush(self) -> None:
        """Wait until all is written, for some seconds at the most."""
        until = time.monotonic() + END_SECONDS
        while (self._busy or not self._lines.empty()) and time.monotonic() < until:
            time.sleep(0.005)
