"""`hybridkv generate`: answers to one prompt, streamed, or to a file of prompts, computed together."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, BadParameter, Option

from hybridkv.commands.options import ModelOptions, SamplingOptions, utf8, with_options

if TYPE_CHECKING:
    from hybridkv.config import SamplingParams
    from hybridkv.llm import LLM, Completion


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
    standard error.
    """
    prompts = _prompts(prompt, prompt_file, prompts_file)
    if raw and system is not None:
        raise BadParameter("--system needs the chat template, which --raw leaves out")
    params = sampling.params(logprobs)
    llm = model.open(len(prompts))
    tokens = [_tokens(llm, text, system, raw) for text in prompts]
    if prompts_file is None:
        _one(llm, tokens[0], params, as_json)
    else:
        _several(llm, prompts, tokens, params, as_json)


def _prompts(prompt: str | None, prompt_file: str | None, prompts_file: str | None) -> list[str]:
    given = [p for p in (prompt, prompt_file, prompts_file) if p is not None]
    if len(given) != 1:
        raise BadParameter("give one of: a prompt, --prompt-file, --prompts-file")
    if prompts_file is not None:
        found = [line for line in _read(prompts_file, "--prompts-file").splitlines() if line.strip()]
        if not found:
            raise BadParameter(f"--prompts-file: {prompts_file!r} holds no prompt")
        return found
    if prompt_file is not None or prompt == "-":
        return [_read(prompt_file or "-", "--prompt-file" if prompt_file else "PROMPT")]
    assert prompt is not None
    return [utf8(prompt)]


def _read(path: str, option: str) -> str:
    try:
        data = sys.stdin.buffer.read() if path == "-" else Path(path).expanduser().read_bytes()
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadParameter(f"{option}: {path!r} is not UTF-8 text (byte {error.start})") from None
    except (OSError, ValueError) as error:
        raise BadParameter(f"{option}: {path!r} cannot be read: {getattr(error, 'strerror', None) or error}") from None


def _tokens(llm: LLM, text: str, system: str | None, raw: bool) -> list[int]:
    if raw or (llm.chat_template is None and system is None):
        return llm.encode(text)
    messages = [{"role": "system", "content": system}] if system is not None else []
    return llm.encode_chat([*messages, {"role": "user", "content": text}])


def _one(llm: LLM, tokens: list[int], params: SamplingParams, as_json: bool) -> None:
    from hybridkv.commands.display import note, pieces, say, summary

    request = llm.engine.add(tokens, params)
    for piece in pieces(llm, request):
        if not as_json:
            say(piece)
    answer = llm.completion(request)
    if as_json:
        say(_json(llm, answer))
        return
    say("" if answer.text.endswith("\n") else "\n")
    _say_logprobs(llm, answer)
    note(summary(answer))


def _several(llm: LLM, prompts: list[str], tokens: list[list[int]], params: SamplingParams, as_json: bool) -> None:
    from hybridkv.commands.display import note, progress, say

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
    for prompt, answer in zip(prompts, answers, strict=True):
        if as_json:
            say(_json(llm, answer))
            continue
        say(f"> {prompt}\n{answer.text}\n")
        _say_logprobs(llm, answer)
        say("\n")
    if not as_json:
        read, wrote = sum(a.prompt_tokens for a in answers), sum(len(a.token_ids) for a in answers)
        note(f"[{len(answers)} answers, read {read} tokens, wrote {wrote}, {wrote / seconds:.1f} written/s]")


def _say_logprobs(llm: LLM, answer: Completion) -> None:
    from hybridkv.commands.display import say

    for token, found in zip(answer.token_ids, answer.logprobs or [], strict=False):
        others = "".join(f"  {_shown(llm, other)} {value:.3f}" for other, value in found.top.items())
        say(f"{_shown(llm, token):>16} {found.token:8.3f} {others}\n")


def _shown(llm: LLM, token: int) -> str:
    return repr(llm.tokenizer.token_text(token)) if llm.tokenizer else str(token)


def _json(llm: LLM, answer: Completion) -> str:
    """One line. Text of tokens is given beside ids where there is a tokenizer."""
    found: dict[str, object] = {
        "text": answer.text,
        "token_ids": answer.token_ids,
        "finish_reason": answer.finish_reason,
        "prompt_tokens": answer.prompt_tokens,
        "generated_tokens": len(answer.token_ids),
        "stats": answer.stats,
    }
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
