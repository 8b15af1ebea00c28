"""Commands of the command line as processes, and what they are given."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from hybridkv import LLM

ROOT = Path(__file__).parents[2]
TINY = ("--device", "cpu", "--dtype", "float32", "--context", "512")
SECONDS = 300  # after which a command that should have ended is a failure
LONG = "The ship left the harbour at dawn. " * 8  # 280 characters, a token each
Run = Callable[..., tuple[int, str, str]]


@contextmanager
def process(
    *arguments: object, ignore_interrupts: bool = False, stdin: int = subprocess.PIPE, **environment: str
) -> Iterator[subprocess.Popen[str]]:
    """A command that runs; it is killed at the end if it is still there.

    `ignore_interrupts`: it inherits an ignored SIGINT, as a job that a script starts in the background does.
    """
    command = [sys.executable, "-m", "hybridkv.cli", *map(str, arguments)]
    env = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    pipe = subprocess.PIPE

    def before_start() -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN if ignore_interrupts else signal.SIG_DFL)

    child = subprocess.Popen(
        command, stdin=stdin, stdout=pipe, stderr=pipe, env=env, text=True, errors="replace", preexec_fn=before_start
    )
    with child:
        try:
            yield child
        finally:
            with suppress(subprocess.TimeoutExpired):
                child.wait(120)  # it closed its pipes, but may not have ended yet
            child.kill()


def of(stream: IO[str] | None) -> IO[str]:
    assert stream is not None
    return stream


def short_prompt(llm: LLM, text: str, question: str) -> list[int]:
    return llm.encode(text[:300]) + llm.encode(question)
