"""`hybridkv inspect`: a web page that shows which tokens of a prompt the cache kept, by layer and head."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, BadParameter, Option

from hybridkv.commands.options import ModelOptions, with_options
from hybridkv.commands.prompts import read_prompts, refuse_system, to_tokens

if TYPE_CHECKING:
    from hybridkv.config import SamplingParams
    from hybridkv.llm import LLM
    from hybridkv.report.kept import Kept
    from hybridkv.request import Request

BUDGET = 512  # where none is named


@with_options
def inspect(
    model: ModelOptions,
    prompt: Annotated[str | None, Argument(metavar="PROMPT", help="the prompt; - reads standard input")] = None,
    prompt_file: Annotated[
        str | None, Option("--prompt-file", metavar="FILE", help="a file that holds the prompt; - for standard input")
    ] = None,
    output: Annotated[str, Option("--output", "-o", metavar="FILE", help="the page to write")] = "kept.html",
    system: Annotated[str | None, Option("--system", metavar="TEXT", help="system message")] = None,
    raw: Annotated[bool, Option("--raw", help="give the prompt as it is, without the chat template")] = False,
    max_tokens: Annotated[int, Option("--max-tokens", metavar="N", help="longest answer shown")] = 48,
) -> None:
    """Write a web page that shows which tokens of a prompt were kept.

    One self-contained file: the text shaded by how many heads kept each token, each head's own list, a map of all of
    them, and bytes by layer. Without --budget 512 tokens are kept.
    """
    from hybridkv.commands.display import kept_line, note
    from hybridkv.config import SamplingParams
    from hybridkv.report.page import write_page

    [text] = read_prompts(prompt, prompt_file)
    refuse_system(system, raw)
    params, path = SamplingParams(max_tokens=max_tokens), page_path(output)
    model = replace(model, budget=BUDGET) if model.budget is None else model
    llm = model.open()
    found, request = look(llm, to_tokens(llm, text, system, raw), params, model.describe(llm.cache_config))
    write_page(found, path)
    note(kept_line(llm, [request]) or "nothing is evicted")
    print(path)


def page_path(output: str) -> Path:
    """Refused before a model is loaded if it cannot be written."""
    path = Path(output).expanduser()
    if path.is_dir() or not path.parent.is_dir():
        why = "it is a folder" if path.is_dir() else f"there is no folder {str(path.parent)!r}"
        raise BadParameter(f"--output: {output!r} cannot be written: {why}")
    return path


def look(llm: LLM, tokens: list[int], params: SamplingParams, settings: dict[str, str]) -> tuple[Kept, Request]:
    """What the cache holds of a prompt when it has just been read, with the answer that follows."""
    from hybridkv.commands.display import read_prompt
    from hybridkv.errors import HybridKVError
    from hybridkv.eviction.evict import STREAMS
    from hybridkv.report.kept import kept

    if STREAMS not in llm.manager.tables:
        raise HybridKVError(f"{llm.path.name} has no full-attention layer: it holds no tokens that could be shown")
    request = llm.engine.add(tokens, params, hold=True)
    try:
        read_prompt(llm, request)
        llm.completion(request)  # an error in the step is said here
        found = kept(llm, request, storage(llm) | settings)
        answer = "".join(llm.pieces(request))
        return replace(found, answer=answer), request
    finally:
        llm.engine.abort(request)


def storage(llm: LLM) -> dict[str, str]:
    weights, kv = str(llm.dtype).removeprefix("torch."), llm.cache_config.kv_dtype
    return {"weights": weights, "KV": weights if kv == "auto" else kv, "page": f"{llm.cache_config.page_size} tokens"}
