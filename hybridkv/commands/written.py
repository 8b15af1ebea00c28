"""Answers as `hybridkv generate` writes them: for people, or as JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from hybridkv.commands.display import Voice, last_eviction, say

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hybridkv.answers import Completion
    from hybridkv.commands.asking import Outcome
    from hybridkv.llm import LLM
    from hybridkv.request import Request, TokenLogprobs


def text_of(llm: LLM, answer: Completion) -> str:
    """Token ids where there is no tokenizer to make text of them."""
    return " ".join(map(str, answer.token_ids)) if llm.tokenizer is None else answer.text


def say_answer(llm: LLM, answer: Completion, hide_thinking: bool) -> None:
    """A whole answer, or all n of them, with numbers before them."""
    for number, each in enumerate(answer.samples, 1):
        voice = Voice(hide_thinking)
        if len(answer.samples) > 1:
            say(f"[{number}] ")
        voice.say(each.reasoning or "", reasoning=True)
        voice.say(text_of(llm, each))
        voice.end()
        say_logprobs(llm, each.token_ids, each.logprobs)


def say_logprobs(llm: LLM, tokens: Sequence[int], found: Sequence[TokenLogprobs | None] | None) -> None:
    """A line for each token: its log probability, and the alternatives that were asked for."""
    for token, entry in zip(tokens, found or [], strict=False):
        if entry is not None:
            others = "".join(f"  {_shown(llm, other)} {value:.3f}" for other, value in entry.top.items())
            say(f"{_shown(llm, token):>16} {entry.token:8.3f} {others}\n")


def _shown(llm: LLM, token: int) -> str:
    return repr(llm.tokenizer.token_text(token)) if llm.tokenizer else str(token)


def outcome_as_dict(llm: LLM, outcome: Outcome) -> dict[str, Any]:
    """What became of a line of a file, with what tells which line it was."""
    line, answer = outcome.job.line, outcome.answer
    found: dict[str, Any] = {"index": line.index}
    if line.id is not None:
        found["id"] = line.id
    found |= {"prompt": line.prompt} if line.messages is None else {"messages": line.messages}
    if outcome.error is not None:
        found["error"] = outcome.error
    if answer is not None and outcome.request is not None:
        found |= answer_as_dict(llm, answer, outcome.request)
    return found


def answer_as_dict(llm: LLM, answer: Completion, request: Request) -> dict[str, Any]:
    """An answer for JSON; answers 2 to n are in "others". Text of tokens is given beside ids."""
    found: dict[str, Any] = {
        "text": answer.text,
        "reasoning": answer.reasoning,
        "token_ids": answer.token_ids,
        "finish_reason": answer.finish_reason,
        "prompt_tokens": answer.prompt_tokens,
        "generated_tokens": len(answer.token_ids),
        "policy": answer.policy,
        "stats": answer.stats,
    }
    if request.eviction is not None:
        found["eviction"] = asdict(last_eviction(llm, request))
    if answer.logprobs is not None:
        found["logprobs"] = _logprobs(llm, answer.token_ids, answer.logprobs)
    if answer.prompt_logprobs is not None:
        found["prompt_logprobs"] = _logprobs(llm, request.tokens[: request.prompt_tokens], answer.prompt_logprobs)
    if answer.others:
        pairs = zip(answer.others, request.siblings, strict=True)
        found["others"] = [answer_as_dict(llm, other, sibling) for other, sibling in pairs]
    return found


def _logprobs(llm: LLM, tokens: Sequence[int], entries: Sequence[TokenLogprobs | None]) -> list[dict[str, Any] | None]:
    return [
        None
        if entry is None
        else {
            "token": token,
            "text": llm.tokenizer.token_text(token) if llm.tokenizer else None,
            "logprob": entry.token,
            "top": [{"token": other, "logprob": value} for other, value in entry.top.items()],
        }
        for token, entry in zip(tokens, entries, strict=False)
    ]
