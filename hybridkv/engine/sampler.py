"""Sampler: logits to token ids. Greedy rows go together; a row that samples uses its request's own random generator.

The order is: repetition penalty, temperature, top-k, top-p, min-p, then one draw (Gumbel noise over the whole
vocabulary, so a request draws the same numbers whoever runs beside it).
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybridkv.config import SamplingParams
from hybridkv.request import Request, TokenLogprobs

MIN_TEMPERATURE = 1e-6  # smaller ones are 0 or overflow in f32, and are as good as greedy here


def sample(logits: Tensor, requests: list[Request]) -> list[int]:
    """The next token of each request from logits [S, vocab] f32. Logprobs, where asked, are added to the requests."""
    plain = [i for i, r in enumerate(requests) if r.params.temperature == 0 and r.params.repetition_penalty == 1]
    tokens = logits.argmax(-1).tolist() if plain else [0] * len(requests)
    for i in sorted(set(range(len(requests))) - set(plain)):
        tokens[i] = _sample_row(logits[i], requests[i])
    for i, request in enumerate(requests):
        if request.params.logprobs is not None:
            request.logprobs.append(_logprobs(logits[i], tokens[i], request.params.logprobs))
    return tokens


def _sample_row(logits: Tensor, request: Request) -> int:
    params = request.params
    scores = penalise(logits, request)
    if params.temperature == 0:
        return int(scores.argmax())
    # below the best score, so that a temperature near 0 makes the others -inf, and not the best one inf
    scores = filter_scores((scores - scores.max()) / max(params.temperature, MIN_TEMPERATURE), params)
    noise = torch.empty_like(scores).exponential_(generator=request.generator).clamp_(min=1e-20)
    return int((scores - noise.log()).argmax())


def penalise(logits: Tensor, request: Request) -> Tensor:
    """Tokens already seen become less likely: positive logits are divided by the penalty, negative ones multiplied."""
    penalty = request.params.repetition_penalty
    if penalty == 1:
        return logits
    if request.seen is None:
        request.seen = torch.zeros(logits.shape[-1], dtype=torch.bool, device=logits.device)
    request.seen[request.tokens[request.counted :]] = True
    request.counted = len(request.tokens)
    return torch.where(request.seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)


def filter_scores(scores: Tensor, params: SamplingParams) -> Tensor:
    """Scores [vocab] with all tokens outside top-k, top-p and min-p at -inf. The best token always stays."""
    if 0 < params.top_k < scores.shape[-1]:
        best = scores.sort(descending=True, stable=True).indices[: params.top_k]  # of equal scores the lower ids
        scores = torch.full_like(scores, -torch.inf).scatter(0, best, scores[best])
    if params.top_p < 1:
        ordered, ids = scores.sort(descending=True, stable=True)
        before = ordered.softmax(-1).cumsum(-1) - ordered.softmax(-1)  # mass of all better tokens
        drop = before >= params.top_p
        drop[0] = False
        scores = scores.masked_fill(torch.zeros_like(drop).scatter(0, ids, drop), -torch.inf)
    if params.min_p > 0:
        probs = scores.softmax(-1)
        scores = scores.masked_fill(probs < params.min_p * probs.max(), -torch.inf)
    return scores


def _logprobs(logits: Tensor, token: int, count: int) -> TokenLogprobs:
    logs = logits.log_softmax(-1)
    top = logs.topk(min(count, len(logs)))
    return TokenLogprobs(float(logs[token]), dict(zip(top.indices.tolist(), top.values.tolist(), strict=True)))
