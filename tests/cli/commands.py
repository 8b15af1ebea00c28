"""Commands of the command line as processes, and what they are given."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import IO

from hybridkv import LLM

ROOT = Path(__file__).parents[2]
TINY = ("--device", "cpu", "--dtype", "float32", "--context", "512")
LONG = "The ship left the harbour at dawn. " * 8  # 280 characters, a token each
Run = Callable[..., tuple[int, str, str]]


def process(*arguments: object, **environment: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "hybridkv.cli", *map(str, arguments)]
    env = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, env=env, text=True, errors="replace")


def of(stream: IO[str] | None) -> IO[str]:
    assert stream is not None
    return stream


def short_prompt(llm: LLM, text: str, question: str) -> list[int]:
    return llm.encode(text[:300]) + llm.encode(question)
