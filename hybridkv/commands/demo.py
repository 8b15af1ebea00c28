"""`hybridkv demo`: a model reads a document that comes with the project and answers two questions about it.

The second question continues on the document's pages: only the question itself is read.
"""

from __future__ import annotations

from dataclasses import replace
from importlib.resources import files
from typing import TYPE_CHECKING

from hybridkv.commands.options import ModelOptions, with_options

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from hybridkv.config import SamplingParams
    from hybridkv.llm import LLM
    from hybridkv.request import Request

DOCUMENT = "petrel_log.txt"
TITLE = "the log of the survey vessel Petrel"
# the small embedded model answers these from the text, in float32 and in bfloat16
QUESTIONS = (
    "What was the most important result of the voyage?",
    "What is the name of the chief scientist of the next voyage?",
)


@with_options
def demo(model: ModelOptions) -> None:
    """Read a document of 3000 tokens and answer two questions about it."""
    from rich.console import Console

    from hybridkv.config import SamplingParams
    from hybridkv.planner import human

    console = Console(highlight=False)
    if model.model is None and model.dtype == "auto":
        model = replace(model, dtype="float32")  # the same answers on every machine, with and without a GPU
    llm = model.open()
    dtype = str(llm.dtype).removeprefix("torch.")
    console.print(f"[bold]{llm.path.stem}[/bold] on {llm.device.type}, {dtype} weights: {human(llm.model.nbytes)}")
    text = files("hybridkv").joinpath("data", DOCUMENT).read_text(encoding="utf-8")
    console.print(f"It reads {TITLE}: {len(text.split())} words.\n")
    params = SamplingParams(max_tokens=64, stop=("\n",))
    request: Request | None = None
    for question in QUESTIONS:
        request = _ask(llm, console, question, _prompt(llm, text, question), params, request)
    assert request is not None
    console.print(_holdings(llm, request))
    page = llm.cache_config.page_size
    console.print(f"A page holds {page} tokens of one head of one layer. Pages are taken as text comes in.")
    console.print("[dim]Next: hybridkv chat\n      hybridkv plan --model Qwen3.5-27B --context 4096[/dim]")
    llm.engine.abort(request)


def _prompt(llm: LLM, text: str, question: str) -> list[int]:
    """The document first: what both prompts begin with is read once."""
    if llm.chat_template is None:
        return llm.encode(f"{text}\n{question}\n")
    return llm.encode_chat([{"role": "user", "content": f"{text}\n{question}"}])


def _ask(
    llm: LLM, console: Console, question: str, prompt: list[int], params: SamplingParams, before: Request | None
) -> Request:
    """Stream one answer. `before`: the request whose pages are continued as far as the tokens agree."""
    from hybridkv.commands.display import pieces, say, summary

    console.print(f"[bold]{question}[/bold]")
    request = llm.engine.add(prompt, params, hold=True, after=before)
    for piece in pieces(llm, request):
        say(piece)
    console.print(f"\n[dim]{summary(llm.completion(request))[1:-1]}[/dim]\n")
    return request


def _holdings(llm: LLM, request: Request) -> Table:
    """What the request holds, by kind of layer."""
    from rich import box
    from rich.table import Table

    from hybridkv.planner import human

    manager = llm.manager
    out = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    out.add_column("The cache now holds", no_wrap=True)
    for heading in ("layers", "streams", "tokens", "pages", "bytes"):
        out.add_column(heading, justify="right", no_wrap=True)
    tokens, pages = manager.position(request.key), manager.held_pages(request.key)
    for s in manager.schema.streams:
        held = pages[s.name]
        out.add_row(s.name, str(len(s.layers)), str(s.streams), str(tokens), str(held), human(held * s.page_bytes))
    for s in manager.schema.states:
        out.add_row(f"{s.name} state", str(len(s.layers)), "", "", "", human(s.slot_bytes))
    return out
