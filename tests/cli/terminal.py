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
from contextlib import contextmanager
from fcntl import ioctl

from cli.commands import ROOT, SECONDS

CODES = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b[=>]|\r")


class Terminal:
    """What a program writes to its terminal, and keys that are pressed there."""

    def __init__(self, child: subprocess.Popen[bytes], end: int) -> None:
        self.child, self._end = child, end
        self._bytes, self._at = b"", 0  # what was written, and how far of its text was looked at

    @property
    def seen(self) -> str:
        """All that was written, without control sequences."""
        return CODES.sub("", self._bytes.decode(errors="replace"))

    def type(self, text: str) -> None:
        """Press keys. What a program asks for is typed once it asks: keys between two questions may be lost."""
        os.write(self._end, text.encode())

    def paste(self, text: str) -> None:
        """What a terminal does with pasted text: put marks around it, if the program has asked for them."""
        asked = self._bytes.rfind(b"\x1b[?2004h") > self._bytes.rfind(b"\x1b[?2004l")
        self.type(f"\x1b[200~{text}\x1b[201~" if asked else text)

    def interrupt(self) -> None:
        """Ctrl-C at a question. Python misses one that comes between its writing the question and waiting for keys."""
        while select.select([self._end], [], [], 0.3)[0] and self.more():
            pass
        self.type("\x03")

    def expect(self, text: str) -> str:
        """Wait until the program has written this, and give what it wrote since the last time."""
        while (found := self.seen.find(text, self._at)) < 0:
            assert self.more(), f"the program ended before {text!r}; seen: {self.seen[self._at :]!r}"
        before, self._at = self.seen[self._at : found], found + len(text)
        return before

    def end(self) -> int:
        """Wait for the program's exit code."""
        while self.more():
            pass
        return self.child.wait(SECONDS)

    def more(self) -> bool:
        """Wait for more; False: there is no more."""
        ready, _, _ = select.select([self._end], [], [], SECONDS)
        assert ready, f"nothing more came; seen: {self.seen[self._at :]!r}"
        try:
            data = os.read(self._end, 1 << 16)
        except OSError:  # the program has closed its terminal
            return False
        self._bytes += data
        return bool(data)


@contextmanager
def terminal(
    *arguments: object, program: tuple[str, ...] = ("-m", "hybridkv"), columns: int = 100, **environment: str
) -> Iterator[Terminal]:
    """`hybridkv` with these arguments on a terminal of its own; it is killed at the end if it is still there."""
    ours, theirs = pty.openpty()
    ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    command = [sys.executable, *program, *map(str, arguments)]
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
