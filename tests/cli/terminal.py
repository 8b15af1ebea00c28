"""A command in a pseudo terminal, as a person sees it."""

import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from fcntl import ioctl

from cli.commands import ROOT, SECONDS

PASTE = ("\x1b[200~", "\x1b[201~")  # what a terminal puts around pasted text
MODULE = ["-m", "hybridkv"]
CODES = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b[=>]|\r")


class Terminal:
    """What a program writes to its terminal, and keys that are pressed there."""

    def __init__(self, child: subprocess.Popen[bytes], end: int) -> None:
        self.child, self._end, self.seen, self._read = child, end, "", 0

    def type(self, text: str) -> None:
        os.write(self._end, text.encode())

    def expect(self, text: str) -> str:
        """Wait until the program has written this, and give what it wrote up to it. Control sequences are left out."""
        while text not in CODES.sub("", self.seen[self._read :]):
            ready, _, _ = select.select([self._end], [], [], SECONDS)
            assert ready, f"{text!r} did not come; seen: {self.seen[self._read :]!r}"
            try:
                data = os.read(self._end, 1 << 16)
            except OSError:  # the program has closed its terminal
                data = b""
            assert data, f"the program ended before {text!r}; seen: {self.seen[self._read :]!r}"
            self.seen += data.decode(errors="replace")
        before = CODES.sub("", self.seen[self._read :])
        self._read = len(self.seen)
        return before

    def end(self) -> int:
        """Wait for the program's exit code."""
        with suppress(OSError):
            while data := os.read(self._end, 1 << 16):
                self.seen += data.decode(errors="replace")
        return self.child.wait(SECONDS)


@contextmanager
def terminal(*arguments: object, columns: int = 100, **environment: str) -> Iterator[Terminal]:
    """`hybridkv` with these arguments on a terminal of its own; it is killed at the end if it is still there."""
    ours, theirs = pty.openpty()
    ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    command = [sys.executable, *MODULE, *map(str, arguments)]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm-256color", **environment}

    def before_start() -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.setsid()
        ioctl(0, termios.TIOCSCTTY, 0)  # so that Ctrl-C is a signal

    child = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=env, preexec_fn=before_start)
    os.close(theirs)
    try:
        yield Terminal(child, ours)
    finally:
        child.kill()
        child.wait()
        os.close(ours)
