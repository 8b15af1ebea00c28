"""Logprobs of a prompt's own tokens, out of the steps that read it anyway.

The logits after a token say how likely the next one was. Those of all rows of a chunk are never there at once: the
head is applied to a few rows at a time, in the memory that sampling has (`workspace.prompt_rows_at_once`). What a
request knows already, since it was preempted and is computed again, is not asked for twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hybridkv.cache.step import upload
from hybridkv.engine.sampler import PromptScores, host, token_scores
from hybridkv.engine.scheduler import Batch
from hybridkv.request import Request


@dataclass(frozen=True)
class PromptPart:
    """Tokens of a prompt whose logprobs come out of a step."""

    request: Request
    first: int  # the first of these tokens
    rows: range  # of the step, each the token before one of them


def prompt_parts(batch: Batch) -> list[PromptPart]:
    """What a step brings to requests that ask for logprobs of their prompts; as a rule nothing."""
    found = []
    for i, request in enumerate(batch.requests):
        if request.params.prompt_logprobs is None or len(request.prompt_logprobs) >= request.prompt_tokens:
            continue
        begin, tokens = batch.positions[i], batch.counts[i]
        first = max(begin + 1, len(request.prompt_logprobs))
        end = min(begin + tokens + 1, request.prompt_tokens)
        to_row = batch.last_tokens[i] - tokens - begin
        if first < end:
            found.append(PromptPart(request, first, range(first + to_row, end + to_row)))
    return found


@torch.inference_mode()
def score_prompts(
    parts: Sequence[PromptPart],
    hidden: Tensor,  # [U, hidden] of the rows that were asked for
    places: Sequence[Sequence[int]],  # of each part's rows in `hidden`
    head: Callable[[Tensor], Tensor],  # [t, hidden] to logits [t, vocab]
    at_once: int,  # rows of logits
) -> list[PromptScores]:
    """Logprobs of each part's tokens, on their way to the host."""
    found = []
    for part, where in zip(parts, places, strict=True):
        tokens = part.request.tokens[part.first : part.first + len(part.rows)]
        count = part.request.params.prompt_logprobs or 0
        sent = upload([np.array(where), np.array(tokens)], hidden.device).view(2, -1)
        scores = [
            token_scores(head(hidden.index_select(0, rows)), ids, count)
            for rows, ids in zip(*(each.split(at_once) for each in sent), strict=True)
        ]
        found.append(PromptScores(part.request, part.first, host(torch.cat(scores))))
    return found
