"""What people see beside the answer: progress on standard error, and numbers in short words. All of it is silent when
standard error is not a terminal, except for `summary`, which a command prints itself.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.status import Status

from hybridkv.answers import ChatStream, Completion, Stream
from hybridkv.cache.schema import ceil_div
from hybridkv.checkpoint.generation_config import describe
from hybridkv.config import SAMPLING_OFF, SamplingParams
from hybridkv.eviction.evict import STREAMS
from hybridkv.kernels.compiling import kernel_folder
from hybridkv.llm import LLM
from hybridkv.planner import human
from hybridkv.request import Request
from hybridkv.text.reasoning import ChatPiece

# what a terminal would obey, should a model write it: control characters except tab and newline
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

    def wait(self, what: str) -> None:
        """A bar that only moves, for what has no measure."""
        self.bars.add_task(what, total=None)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Inside, something else is written to the terminal."""
        self.bars.stop()
        try:
            yield
        finally:
            self.bars.start()


@contextmanager
def progress() -> Iterator[Bars]:
    """Bars on standard error, if it is a terminal; they go away when done."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn(compact=True))
    # standard output stays where it goes: rich would send it to its own console
    settings = {"transient": True, "redirect_stdout": False, "disable": not console.is_terminal}
    with Progress(*columns, console=console, **settings) as bars:  # type: ignore[arg-type]
        yield Bars(bars)


def compiling() -> str:
    """What a first run on a machine waits for, and where that is kept."""
    folder = kernel_folder()
    return "compiling kernels, once on this machine" + (f" (kept in {folder})" if folder is not None else "")


def say(text: str) -> None:
    """Write a piece of an answer at once."""
    sys.stdout.write(text.translate(_CONTROL) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def note(text: str) -> None:
    """A line beside the answer, on standard error."""
    sys.stdout.flush()
    Console(stderr=True, highlight=False, soft_wrap=True).print(text, style="dim", markup=False)


class Voice:
    """Says an answer piece by piece, and thoughts before it apart from it: dim on a terminal, between marks elsewhere,
    and with `hide` not at all.
    """

    def __init__(self, hide: bool = False) -> None:
        self.hide = hide
        self.said = ""  # the last that was written
        self._thinking = False
        self._waiting: Status | None = None  # what a terminal shows instead of hidden thoughts
        self._dim = sys.stdout.isatty() and os.environ.get("TERM") != "dumb"

    def say(self, text: str, reasoning: bool = False) -> None:
        """A piece of the thoughts or of the answer; "" is nothing."""
        if not text:
            return
        if reasoning and self.hide:
            if self._waiting is None:
                self._waiting = Console(stderr=True).status("thinking")
                self._waiting.start()
            return
        self._end_waiting()
        if reasoning != self._thinking:
            self._write(self._begin_thoughts() if reasoning else self._end_thoughts())
            self._thinking = reasoning
        say(text)
        self.said = text

    def end(self) -> None:
        """The answer is over, or was left: what comes next begins on a line of its own."""
        self._end_waiting()
        if self._thinking:
            self._write(self._end_thoughts().rstrip("\n"))
            self._thinking = False
        if not self.said.endswith("\n"):
            self._write("\n")

    def _write(self, text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()
        self.said = text

    def _begin_thoughts(self) -> str:
        return "\x1b[2m" if self._dim else "" if sys.stdout.isatty() else "<think>\n"

    def _end_thoughts(self) -> str:
        return ("\x1b[0m" if self._dim else "" if sys.stdout.isatty() else "\n</think>") + "\n\n"

    def _end_waiting(self) -> None:
        if self._waiting is not None:
            self._waiting.stop()
            self._waiting = None


def read_along(stream: Stream | ChatStream) -> Iterator[ChatPiece]:
    """A stream's pieces, one for each step; a progress bar while its prompt is read."""
    steps = (piece if isinstance(piece, ChatPiece) else ChatPiece(piece, False) for piece in stream.steps())
    with progress() as bars:
        read = bars.show("reading the prompt")
        for piece in steps:
            done, total = stream.progress
            if piece.text or done >= total:
                break
            read(done, total)
        else:
            return
    yield piece
    yield from steps


@dataclass(frozen=True)
class LastEviction:
    """What the last eviction of a request left in a stream on average, and the bytes of its pages before and after."""

    tokens: int  # seen until then
    kept_tokens: float
    bytes_before: int  # had nothing ever been evicted
    bytes_after: int


def last_eviction(llm: LLM, request: Request) -> LastEviction:
    """A request from which nothing was evicted kept all of its prompt."""
    schema = llm.engine.schema
    if not request.evictions:
        size = schema.kv_bytes(request.prompt_tokens)
        return LastEviction(request.prompt_tokens, request.prompt_tokens, size, size)
    position = max(request.evictions)
    record = request.evictions[position]
    lengths = (record.counts() if record.everywhere is None else record.everywhere).ravel().tolist()
    streams = next(s for s in schema.streams if s.name == STREAMS)
    pages = sum(ceil_div(n, streams.entries_per_page) for n in lengths)
    before = schema.kv_bytes(position)
    after = before - (streams.pages(position) - pages) * streams.page_bytes
    return LastEviction(position, sum(lengths) / len(lengths), before, after)


def kept_line(llm: LLM, requests: Sequence[Request]) -> str | None:
    """kept 2048 of 16384 tokens a stream by peak, KV 1024.0 MiB -> 128.0 MiB. None where no request has a budget."""
    requests = [request for request in requests if request.eviction is not None]
    if not requests:
        return None
    found = [last_eviction(llm, request) for request in requests]
    kept = sum(each.kept_tokens for each in found) / len(found)
    tokens = sum(each.tokens for each in found) / len(found)
    before = sum(each.bytes_before for each in found)
    after = sum(each.bytes_after for each in found)
    if not any(request.evictions for request in requests):
        asked = requests[0].eviction
        assert asked is not None
        few = f"no more than the budget of {asked.budget} and the window of {asked.window}"
        return f"kept all {tokens:.0f} tokens a stream ({few}), KV {human(before)}"
    whose = f" of each of {len(found)} requests on average" if len(found) > 1 else ""
    by = ", ".join(dict.fromkeys(request.policy for request in requests if request.policy is not None))
    how = f" by {by}" if by else ""
    return f"kept {kept:.0f} of {tokens:.0f} tokens a stream{whose}{how}, KV {human(before)} -> {human(after)}"


def cut_line(llm: LLM, answer: Completion, limit: str = "--max-tokens") -> str | None:
    """What to raise where an answer was cut, by `limit` or by the context; None where it ended by itself."""
    if answer.finish_reason != "length":
        return None
    full = answer.prompt_tokens + len(answer.token_ids) >= llm.plan.max_tokens
    where = "in its thoughts, " if answer.reasoning and not answer.text else ""
    return f"{where}cut at {counted(len(answer.token_ids), 'token')}: raise {'--context' if full else limit}"


def sampling_line(llm: LLM, params: SamplingParams) -> str:
    """How tokens are chosen, and who said so: `sampling: temperature 0.6, top_p 0.95 (from generation_config.json)`."""
    asked = {name: value for name in SAMPLING_OFF if (value := getattr(params, name)) is not None}
    if not asked:
        return f"sampling: {describe(llm.sampling_defaults)}"
    own = {name: value for name, value in llm.sampling_defaults.items() if name not in asked}
    parts = [(asked, "as asked")] + ([(own, f"from {llm.sampling_defaults.source}")] if own else [])
    return "sampling: " + ", ".join(
        ", ".join(f"{name} {value:g}" for name, value in values.items()) + f" ({who})" for values, who in parts
    )


def counted(number: int, what: str) -> str:
    """1 turn, 2 turns."""
    return f"{number} {what}" + ("" if number == 1 else "s")


def summary(answer: Completion) -> str:
    """Speed and memory of one answer in a line."""
    stats = answer.stats
    cached = int(stats.get("cached_tokens", 0))
    parts = [f"{cached} tokens were in the cache already"] if cached else []
    parts += [f"read {counted(answer.prompt_tokens - cached, 'token')}" + _speed(stats.get("prefill_tok_s", 0))]
    parts += [f"wrote {counted(len(answer.token_ids), 'token')}" + _speed(stats.get("decode_tok_s", 0))]
    parts += [f"KV {human(stats['kv_bytes_kept'])}"] if "kv_bytes_kept" in stats else []
    parts += [f"state {human(stats['state_bytes'])}"] if stats.get("state_bytes") else []
    return "[" + ", ".join([*parts, answer.finish_reason]) + "]"


def _speed(tokens_per_second: float) -> str:
    return f" at {tokens_per_second:.{0 if tokens_per_second >= 100 else 1}f}/s" if tokens_per_second else ""
