"""What people see beside the answer: progress on standard error, and numbers in short words. All of it is silent when
standard error is not a terminal, except for `summary`, which a command prints itself.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeRemainingColumn

from hybridkv.llm import LLM, Completion
from hybridkv.planner import human
from hybridkv.request import Request

# what a terminal would obey, should a model write it: control characters but for tab and newline
_CONTROL = {i: "\N{REPLACEMENT CHARACTER}" for i in (*range(32), *range(127, 160)) if chr(i) not in "\t\n"}


class Bars:
    """Progress bars, each shown from its first report until it is complete."""

    def __init__(self, bars: Progress) -> None:
        self.bars = bars

    def show(self, what: str) -> Callable[[int, int], None]:
        """A function that takes (done, total)."""
        task: list[TaskID] = []

        def report(done: int, total: int) -> None:
            if not task:
                task.append(self.bars.add_task(what, total=total))
            self.bars.update(task[0], completed=done, total=total, visible=done < total)

        return report


@contextmanager
def progress() -> Iterator[Bars]:
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn(compact=True))
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
        yield Bars(bars)


def say(text: str) -> None:
    """Write a piece of an answer at once."""
    sys.stdout.write(text.translate(_CONTROL) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def note(text: str) -> None:
    """A line beside the answer, on standard error."""
    sys.stdout.flush()
    Console(stderr=True, highlight=False, soft_wrap=True).print(text, style="dim", markup=False)


def pieces(llm: LLM, request: Request) -> Iterator[str]:
    """Run one request to its end: a progress bar while its prompt is read, then its text piece by piece."""
    start = llm.manager.position(request.key) if request.key in llm.manager.slot_of else 0
    try:
        with progress() as bars:
            read = bars.show(f"reading {request.prompt_tokens - start} tokens")
            while not request.finished and len(request.tokens) == request.prompt_tokens:
                llm.engine.step()
                if not request.finished:
                    read(llm.manager.position(request.key) - start, request.prompt_tokens - start)
        yield from llm.pieces(request)
    finally:
        if request.hold:
            llm.engine.stop(request)
        else:
            llm.engine.abort(request)


def summary(answer: Completion) -> str:
    """Speed and memory of one answer in a line."""
    stats = answer.stats
    cached = int(stats.get("cached_tokens", 0))
    parts = [f"{cached} tokens were in the cache already"] if cached else []
    parts += [f"read {answer.prompt_tokens - cached} tokens" + _speed(stats.get("prefill_tok_s", 0))]
    parts += [f"wrote {len(answer.token_ids)} tokens" + _speed(stats.get("decode_tok_s", 0))]
    parts += [f"KV {human(stats['kv_bytes_kept'])}"] if "kv_bytes_kept" in stats else []
    parts += [f"state {human(stats['state_bytes'])}"] if stats.get("state_bytes") else []
    return "[" + ", ".join([*parts, answer.finish_reason]) + "]"


def _speed(tokens_per_second: float) -> str:
    return f" at {tokens_per_second:.{0 if tokens_per_second >= 100 else 1}f}/s" if tokens_per_second else ""
