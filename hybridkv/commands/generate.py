"""`hybridkv generate`: answers to one prompt, streamed, or to a file of prompts, computed together."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

from typer import Argument, BadParameter, Option

from hybridkv.commands.options import ModelOptions, SamplingOptions, with_options
from hybridkv.commands.prompts import read_prompts, refuse_system, to_tokens

if TYPE_CHECKING:
    from hybridkv.config import SamplingParams
    from hybridkv.llm import LLM, Completion
    from hybridkv.request import Request


@with_options
def generate(
    model: ModelOptions,
    sampling: SamplingOptions,
    prompt: Annotated[str | None, Argument(metavar="PROMPT", help="the prompt; - reads standard input")] = None,
    prompt_file: Annotated[
        str | None, Option("--prompt-file", metavar="FILE", help="a file that holds the prompt; - for standard input")
    ] = None,
    prompts_file: Annotated[
        str | None, Option("--prompts-file", metavar="FILE", help="a file with one prompt a line, run together")
    ] = None,
    system: Annotated[str | None, Option("--system", metavar="TEXT", help="system message")] = None,
    raw: Annotated[bool, Option("--raw", help="give the prompt as it is, without the chat template")] = False,
    logprobs: Annotated[
        int | None, Option("--logprobs", metavar="N", help="show each token's log probability and N alternatives")
    ] = None,
    as_json: Annotated[bool, Option("--json", help="print one JSON object for each prompt, one a line")] = False,
) -> None:
    """Answer a prompt, or several together.

    The prompt is put into the model's chat format when it has one. The answer goes to standard output, all else to
    standard error. For a model without a tokenizer prompt and answer are token ids, such as "1 17 4".
    """
    prompts = read_prompts(prompt, prompt_file, prompts_file)
    refuse_system(system, raw)
    params = sampling.params(logprobs)
    llm = model.open(len(prompts))
    tokens = [to_tokens(llm, text, system, raw) for text in prompts]
    if prompts_file is None:
        _one(llm, tokens[0], params, as_json)
    else:
        _several(llm, prompts, tokens, params, as_json)


def _one(llm: LLM, tokens: list[int], params: SamplingParams, as_json: bool) -> None:
    from hybridkv.commands.display import kept_line, note, pieces, say, summary

    request = llm.engine.add(tokens, params)
    for piece in pieces(llm, request):
        if not as_json:
            say(piece)
    answer = llm.completion(request)
    if as_json:
        say(_json(llm, answer, request))
        return
    if llm.tokenizer is None:
        say(_text(llm, answer))
    say("" if answer.text.endswith("\n") else "\n")
    _say_logprobs(llm, answer)
    note(summary(answer))
    if line := kept_line(llm, [request]):
        note(line)


def _several(llm: LLM, prompts: list[str], tokens: list[list[int]], params: SamplingParams, as_json: bool) -> None:
    from hybridkv.commands.display import kept_line, note, progress, say

    began = time.perf_counter()
    requests = []
    for number, ids in enumerate(tokens, 1):
        try:
            requests.append(llm.engine.add(ids, params))
        except ValueError as error:
            raise BadParameter(f"--prompts-file: prompt {number}: {error}") from None
    with progress() as bars:
        report = bars.show(f"answering {len(requests)} prompts")
        while not llm.engine.idle:
            llm.engine.step()
            report(sum(r.finished for r in requests), len(requests))
    seconds = time.perf_counter() - began
    answers = [llm.completion(request) for request in requests]
    for prompt, answer, request in zip(prompts, answers, requests, strict=True):
        if as_json:
            say(_json(llm, answer, request))
            continue
        say(f"> {prompt}\n{_text(llm, answer)}\n")
        _say_logprobs(llm, answer)
        say("\n")
    if not as_json:
        read, wrote = sum(a.prompt_tokens for a in answers), sum(len(a.token_ids) for a in answers)
        note(f"[{len(answers)} answers, read {read} tokens, wrote {wrote}, {wrote / seconds:.1f} written/s]")
        if line := kept_line(llm, requests):
            note(line)


def _text(llm: LLM, answer: Completion) -> str:
    """Token ids where there is no tokenizer to make text of them."""
    return " ".join(map(str, answer.token_ids)) if llm.tokenizer is None else answer.text


def _say_logprobs(llm: LLM, answer: Completion) -> None:
    from hybridkv.commands.display import say

    for token, found in zip(answer.token_ids, answer.logprobs or [], strict=False):
        others = "".join(f"  {_shown(llm, other)} {value:.3f}" for other, value in found.top.items())
        say(f"{_shown(llm, token):>16} {found.token:8.3f} {others}\n")


def _shown(llm: LLM, token: int) -> str:
    return repr(llm.tokenizer.token_text(token)) if llm.tokenizer else str(token)


def _json(llm: LLM, answer: Completion, request: Request) -> str:
    """One line. Text of tokens is given beside ids where there is a tokenizer."""
    from hybridkv.commands.display import last_eviction

    found: dict[str, object] = {
        "text": answer.text,
        "token_ids": answer.token_ids,
        "finish_reason": answer.finish_reason,
        "prompt_tokens": answer.prompt_tokens,
        "generated_tokens": len(answer.token_ids),
        "stats": answer.stats,
    }
    if llm.cache_config.budget is not None:
        found["eviction"] = asdict(last_eviction(llm, request))
    if answer.logprobs is not None:
        found["logprobs"] = [
            {
                "token": token,
                "text": llm.tokenizer.token_text(token) if llm.tokenizer else None,
                "logprob": entry.token,
                "top": [{"token": other, "logprob": value} for other, value in entry.top.items()],
            }
            for token, entry in zip(answer.token_ids, answer.logprobs, strict=False)
        ]
    return json.dumps(found) + "\n"
