"""`hybridkv demo`: a model reads a document that comes with the project and answers two questions about it, once with
every token in the cache and once with a third of them. A web page shows what was kept for the first question.

With all tokens kept the second question continues on the document's pages: only the question itself is read. At a
budget each question chooses for itself what stays, so each reads the document.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

from hybridkv.commands.declaring import with_options
from hybridkv.commands.inspect import held_stream, look, page_path, whole
from hybridkv.commands.invocation import command_name
from hybridkv.commands.options import ModelOptions

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from hybridkv.config import CacheConfig, SamplingParams
    from hybridkv.llm import LLM
    from hybridkv.report.kept import Answer, Kept
    from hybridkv.request import Request

DOCUMENT = "petrel_log.txt"
TITLE = "the log of the survey vessel Petrel"
# the small embedded model answers these from the text, in float32 and in bfloat16
QUESTIONS = (
    "What was the most important result of the voyage?",
    "What is the name of the chief scientist of the next voyage?",
)

BUDGET = 1024  # a third of the tokens
PAGE = "hybridkv-demo.html"
SUGGESTIONS = ("chat", 'plan Qwen3.5-27B --card "RTX 4090" --weights q4_k --context 32k')  # printed at the end


@dataclass(frozen=True)
class Row:
    """One answer, for the table."""

    question: str
    answer: Answer
    kept: float
    tokens: int
    bytes: int
    seconds: float


@with_options
def demo(
    model: ModelOptions,
    output: Annotated[str, Option("--output", "-o", metavar="FILE", help="the page that shows what was kept")] = PAGE,
) -> None:
    """Read a document of 3000 tokens and answer two questions about it, with the full cache and with a part of it."""
    from rich.console import Console

    from hybridkv.config import SamplingParams
    from hybridkv.planner import human
    from hybridkv.report.page import write_page

    console = Console(highlight=False)
    if model.model is None and model.dtype == "auto":
        model = replace(model, dtype="float32")  # the same answers on every machine, with and without a GPU
    path = page_place(output)
    model = replace(model, budget=BUDGET) if model.budget is None else model
    cache = model.cache()
    with model.open(cache=whole(cache)) as llm:
        form = llm.engine.about["weights"]
        size = human(llm.model.nbytes) + ("" if llm.ranks is None else f" on rank 0 of {llm.ranks.group.size}")
        console.print(f"[bold]{llm.path.stem}[/bold] on {llm.device.type}, {form} weights: {size}")
        text = files("hybridkv").joinpath("data", DOCUMENT).read_text(encoding="utf-8")
        console.print(f"It reads {TITLE}: {len(text.split())} words.\n")
        params = SamplingParams(max_tokens=64, temperature=0.0, stop=("\n",))
        rows = full_answers(llm, console, text, params)
        pages = []
        for question, full in zip(QUESTIONS, tuple(rows), strict=True):
            console.print(f"[bold]{question}[/bold] [dim]with {cache.budget} tokens a stream[/dim]")
            row, page = short_answer(llm, model, cache, full, _prompt(llm, text, question), params)
            rows.append(row)
            pages.append(page)
            console.print(f"{row.answer.text}\n", markup=False)
    write_page(pages[0], path)
    console.print(side_by_side(rows))
    console.print(f"What was kept, token by token: [bold]{path}[/bold]", soft_wrap=True)
    for word, what in zip(("Next:", "     "), SUGGESTIONS, strict=True):
        console.print(f"{word} {command_name()} {what}", style="dim", markup=False, soft_wrap=True)


def _prompt(llm: LLM, text: str, question: str) -> list[int]:
    """The document first: what both prompts begin with is read once."""
    if llm.chat_template is None:
        return llm.encode(f"{text}\n{question}\n")
    return llm.encode_chat([{"role": "user", "content": f"{text}\n{question}"}])


def full_answers(llm: LLM, console: Console, text: str, params: SamplingParams) -> list[Row]:
    """Stream the answers with every token kept. The second continues the first one's cache."""
    from hybridkv.commands.display import read_along, say, summary
    from hybridkv.report.kept import Answer

    request: Request | None = None
    rows = []
    for question in QUESTIONS:
        console.print(f"[bold]{question}[/bold]")
        began = time.perf_counter()
        stream = held_stream(llm, _prompt(llm, text, question), params, after=request)
        for piece in read_along(stream):
            say(piece.text)
        request, answer = stream.request, stream.completion
        assert answer is not None
        seconds = time.perf_counter() - began
        console.print(f"\n[dim]{summary(answer)[1:-1]}[/dim]\n")
        tokens = answer.prompt_tokens
        size = llm.engine.schema.kv_bytes(tokens)
        rows.append(Row(question, Answer.of(request), tokens, tokens, size, seconds))
    llm.owner.run(lambda engine: engine.abort(stream.request))  # its cache is not needed any more
    return rows


def short_answer(
    llm: LLM, model: ModelOptions, cache: CacheConfig, full: Row, tokens: list[int], params: SamplingParams
) -> tuple[Row, Kept]:
    """The same question with the budget, and what was kept for it. `full`: the answer with everything kept."""
    from hybridkv.commands.display import last_eviction

    began = time.perf_counter()
    page, request = look(llm, tokens, params, model.describe(cache), cache.eviction, full.question, full.answer)
    seconds = time.perf_counter() - began
    left = last_eviction(llm, request)
    assert page.answer is not None
    return Row(full.question, page.answer, left.kept_tokens, left.tokens, left.bytes_after, seconds), page


def page_place(output: str) -> Path:
    """Where the page goes: where it was asked for, or under the cache folder if the current one is not writable."""
    from hybridkv.embedded import cache_folder

    path = page_path(output)
    if output == PAGE and not os.access(path if path.exists() else path.parent, os.W_OK):
        cache_folder().mkdir(parents=True, exist_ok=True)
        return cache_folder() / PAGE
    return path


def side_by_side(rows: list[Row]) -> Table:
    """Each question's answers under each other."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    from hybridkv.planner import human

    out = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 2, 0, 0))
    for heading in ("tokens kept", "KV", "seconds", "answer"):
        out.add_column(heading, justify="left" if heading == "answer" else "right", no_wrap=heading != "answer")
    for question in QUESTIONS:
        out.add_section()
        for row in (r for r in rows if r.question == question):
            size, tokens = human(row.bytes), f"{row.kept:.0f} of {row.tokens}"
            out.add_row(tokens, size, f"{row.seconds:.1f}", Text(row.answer.text))
    return out
