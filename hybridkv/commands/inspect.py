"""`hybridkv inspect`: a web page that shows which tokens of a prompt the cache kept, by layer and head."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, BadParameter, Option

from hybridkv.commands.declaring import utf8, with_options
from hybridkv.commands.options import ModelOptions
from hybridkv.commands.prompts import read_prompts, refuse_system, to_tokens

if TYPE_CHECKING:
    from hybridkv.answers import Stream
    from hybridkv.config import CacheConfig, EvictionConfig, SamplingParams
    from hybridkv.llm import LLM
    from hybridkv.report.kept import Answer, Kept
    from hybridkv.request import Request

BUDGET = 512  # where none is named


@with_options
def inspect(
    model: ModelOptions,
    prompt: Annotated[str | None, Argument(metavar="PROMPT", help="the prompt; - reads standard input")] = None,
    prompt_file: Annotated[
        str | None, Option("--prompt-file", metavar="FILE", help="a file that holds the prompt; - for standard input")
    ] = None,
    question: Annotated[
        str | None, Option("--question", metavar="TEXT", help="asked after the prompt, which is the text it is about")
    ] = None,
    output: Annotated[str, Option("--output", "-o", metavar="FILE", help="the page to write")] = "kept.html",
    system: Annotated[str | None, Option("--system", metavar="TEXT", help="system message")] = None,
    raw: Annotated[bool, Option("--raw", help="give the prompt as it is, without the chat template")] = False,
    full: Annotated[
        bool, Option("--full/--no-full", help="answer with everything kept as well, which reads the prompt twice")
    ] = True,
    max_tokens: Annotated[int, Option("--max-tokens", metavar="N", help="longest answer shown")] = 64,
) -> None:
    """Write a web page that shows which tokens of a prompt were kept.

    One self-contained file: the answer with everything kept and with the budget, the text shaded by how many heads kept
    each token, each head's own list, a map of all of them, and bytes by layer. Without --budget 512 tokens are kept.
    """
    from hybridkv.commands.display import kept_line, note
    from hybridkv.config import SamplingParams
    from hybridkv.report.page import write_page

    if question is None and prompt not in (None, "-") and prompt_file is not None:
        prompt, question = None, prompt  # a file and a question about it
    if question is not None and not question.strip():
        raise BadParameter("--question is empty; say what is to be asked, or leave it out")
    [text] = read_prompts(prompt, prompt_file)
    refuse_system(system, raw)
    # the likeliest tokens: what differs between the answers is then the cache's doing
    params, path = SamplingParams(max_tokens=max_tokens, temperature=0.0), page_path(output)
    model = replace(model, budget=BUDGET) if model.budget is None else model
    cache = model.cache()
    with model.open(cache=whole(cache) if full else cache, shares=False) as llm:  # one prompt, in pools that it fills
        asked = text.strip() if question is None else utf8(question)
        tokens = to_tokens(llm, text if question is None else f"{text.rstrip()}\n\n{asked}", system, raw)
        found, request = look(llm, tokens, params, model.describe(cache), cache.eviction, asked, full)
        write_page(found, path)
        note(kept_line(llm, [request]) or "nothing is evicted")
    print(path)


def whole(cache: CacheConfig) -> CacheConfig:
    """The same cache with room for requests that keep everything; bounded ones ask for that themselves."""
    return replace(cache, bounded=False, decode_every=0)


def page_path(output: str) -> Path:
    """Refused before a model is loaded if it cannot be written."""
    path = Path(output).expanduser()
    if path.is_dir() or not path.parent.is_dir():
        why = "it is a folder" if path.is_dir() else f"there is no folder {str(path.parent)!r}"
        raise BadParameter(f"--output: {output!r} cannot be written: {why}")
    return path


def look(
    llm: LLM,
    tokens: list[int],
    params: SamplingParams,
    settings: dict[str, str],
    eviction: EvictionConfig | None,
    question: str = "",
    full: Answer | bool = True,
) -> tuple[Kept, Request]:
    """What the cache holds of a prompt when it has just been read, and the answer that follows.

    settings: for the page, in words. question: what the page says was asked.
    full: the answer with everything kept, if it is there already; True asks for it, False leaves it out.
    """
    from hybridkv.errors import HybridKVError
    from hybridkv.eviction.evict import STREAMS
    from hybridkv.report.kept import Answer, kept

    if STREAMS not in llm.manager.tables:
        raise HybridKVError(f"{llm.path.name} has no full-attention layer: it holds no tokens that could be shown")
    if full is True:
        with asked(llm, tokens, params, None) as request:
            full = Answer.of(request)
    with asked(llm, tokens, params, eviction) as request:
        evictions = llm.owner.run(lambda engine: engine.evictions_of(request))
    said = storage(llm) | settings
    if request.policy is not None and "policy" in settings:
        said["policy"] = request.policy  # what auto stood for
    return kept(llm, request, evictions, said, question, full or None), request


@contextmanager
def asked(llm: LLM, tokens: list[int], params: SamplingParams, eviction: EvictionConfig | None) -> Iterator[Request]:
    """A request that has run to its end. Inside it is held, so that all ranks know what they kept of it."""
    from hybridkv.commands.display import read_along

    with held_stream(llm, tokens, params, eviction) as stream:
        for _ in read_along(stream):
            pass
    try:
        yield stream.request
    finally:
        llm.owner.run(lambda engine: engine.abort(stream.request))


def held_stream(
    llm: LLM,
    tokens: list[int],
    params: SamplingParams,
    eviction: EvictionConfig | None = None,
    after: Request | None = None,
) -> Stream:
    """An answer whose cache is held, for a next question or for a look at it; None: everything is kept."""
    from hybridkv.answers import Stream

    return Stream(
        llm.owner, lambda engine: engine.add(tokens, params, hold=True, after=after, eviction=eviction), hold=True
    )


def storage(llm: LLM) -> dict[str, str]:
    """How weights and KV are stored, in words."""
    weights, kv = str(llm.dtype).removeprefix("torch."), llm.cache_config.kv_dtype
    return {"weights": weights, "KV": weights if kv == "auto" else kv, "page": f"{llm.cache_config.page_size} tokens"}
