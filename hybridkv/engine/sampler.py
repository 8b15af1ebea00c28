"""Sampler: logits to token ids, on the device. Nothing waits for the host until the tokens are asked for.

The order is: repetition penalty, temperature, top-k, top-p, min-p, then one draw (Gumbel noise over the whole
vocabulary from the request's own random generator, so it draws the same numbers whoever runs beside it). Requests that
filter alike go together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hybridkv.kernels.best_tokens import best_tokens
from hybridkv.request import Request, TokenLogprobs

MIN_TEMPERATURE = 1e-6  # smaller ones are 0 or overflow in f32, and are as good as greedy here


@dataclass
class Drawn:
    """Tokens that a device may still be drawing. `wait` is called once."""

    tokens: Tensor  # [S] int64, on the device
    requests: Sequence[Request]
    found: Tensor  # [2, S] int64, on the host: tokens, and 1 where a row of logits is broken
    logprobs: list[tuple[int, Tensor]] = field(
        default_factory=list
    )  # row -> [1 + 2 n] f64 on the host, see `_logprobs`
    ready: torch.cuda.Event | None = None  # when the host tensors are; None: at once

    def wait(self) -> tuple[list[int], list[bool]]:
        """The tokens, and whether a row's logits were broken. Logprobs, where asked, are added to the requests."""
        if self.ready is not None:
            self.ready.synchronize()
        tokens, flags = self.found.tolist()
        broken = [bool(flag) for flag in flags]
        for i, row in self.logprobs:
            request = self.requests[i]
            if broken[i] or request.finished or request.finish_reason is not None:
                continue  # no token for it, or it ended while this step ran
            request.logprobs.append(_token_logprobs(row, request.params.logprobs or 0))
        return tokens, broken


@torch.inference_mode()
def draw(logits: Tensor, requests: Sequence[Request]) -> Drawn:
    """The next token of each request from logits [S, vocab]."""
    found = best_tokens(logits)
    groups: dict[tuple, list[int]] = {}
    for i, request in enumerate(requests):
        p = request.params
        if p.temperature > 0 or p.repetition_penalty != 1:
            kind = (p.top_k, p.top_p < 1, p.min_p > 0) if p.temperature > 0 else ()
            groups.setdefault(kind, []).append(i)
    for rows in groups.values():
        _draw_alike(logits, requests, rows, found[0])
    asked = [i for i, request in enumerate(requests) if request.params.logprobs is not None]
    made = _host(_logprobs(logits, found[0], requests, asked)) if asked else ()
    drawn = Drawn(found[0], requests, _host(found), list(zip(asked, made, strict=True)))
    if logits.is_cuda:
        drawn.ready = torch.cuda.Event()
        drawn.ready.record(torch.cuda.current_stream(logits.device))
    return drawn


def _draw_alike(logits: Tensor, requests: Sequence[Request], rows: list[int], tokens: Tensor) -> None:
    """Tokens of the rows whose requests have the same filters (their bounds may differ), or are all greedy."""
    alike = [requests[i] for i in rows]
    params = [request.params for request in alike]
    table = [rows, [max(p.temperature, MIN_TEMPERATURE) for p in params], [p.top_p for p in params]]
    index, *bounds = _upload([*table, [p.min_p for p in params]], torch.float64, logits.device)
    temperature, top_p, min_p = (x.float().unsqueeze(1) for x in bounds)  # [n, 1]
    index, first = index.long(), params[0]
    scores = logits.index_select(0, index).float()
    for row, request in zip(scores, alike, strict=True):
        row.copy_(penalise(row, request))
    if first.temperature == 0:
        chosen = best_tokens(scores)[0]
    else:
        # below the best score, so that a temperature near 0 makes the others -inf, and not the best one inf
        scores = (scores - scores.amax(-1, keepdim=True)) / temperature
        scores, ids = narrow(
            scores, first.top_k, top_p if first.top_p < 1 else None, min_p if first.min_p > 0 else None
        )
        noise = torch.empty((len(rows), logits.shape[1]), device=logits.device)
        for row, request in zip(noise, alike, strict=True):
            row.exponential_(generator=request.generator)
        noise = noise if ids is None else noise.gather(1, ids)
        chosen = (scores - noise.clamp_(min=1e-20).log_()).argmax(-1)
        chosen = chosen if ids is None else ids.gather(1, chosen.unsqueeze(1)).squeeze(1)
    tokens.scatter_(0, index, chosen)
    for token, request in zip(chosen.split(1), alike, strict=True):
        if request.seen is not None:  # the host learns it later
            request.seen.index_fill_(0, token, True)
            request.counted = len(request.tokens) + 1


def penalise(logits: Tensor, request: Request) -> Tensor:
    """Tokens already seen become less likely: positive logits are divided by the penalty, negative ones multiplied."""
    penalty = request.params.repetition_penalty
    if penalty == 1:
        return logits
    if request.seen is None:
        request.seen = torch.zeros(logits.shape[-1], dtype=torch.bool, device=logits.device)
    if request.counted < len(request.tokens):
        request.seen.index_fill_(0, _upload(request.tokens[request.counted :], torch.int64, logits.device), True)
        request.counted = len(request.tokens)
    return torch.where(request.seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)


def narrow(
    scores: Tensor,  # [n, vocab] f32
    top_k: int,  # 0: all
    top_p: Tensor | None,  # [n, 1]
    min_p: Tensor | None,  # [n, 1]
) -> tuple[Tensor, Tensor | None]:
    """Scores [n, K] of the tokens that filters leave, and their ids; without ids, of the whole vocabulary in order.

    What top-p and min-p take away is at -inf. The best token always stays.
    """
    ids = None
    if 0 < top_k < scores.shape[1]:
        scores, ids = _largest(scores, top_k)
    elif top_p is not None:
        scores, ids = scores.sort(descending=True, stable=True)
    if top_p is not None:
        probs = scores.softmax(-1)
        drop = probs.cumsum(-1) - probs >= top_p  # mass of all better tokens
        drop[:, 0] = False
        scores = scores.masked_fill(drop, -torch.inf)
    if min_p is not None:
        probs = scores.softmax(-1)
        scores = scores.masked_fill(probs < min_p * probs.amax(-1, keepdim=True), -torch.inf)
    return scores, ids


def _largest(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest of each row in order; of equal scores the lower ids, which topk by itself does not promise."""
    last = scores.shape[1] - 1
    bits = (scores + 0.0).view(torch.int32)  # -0.0 equals 0.0
    rank = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()  # whole numbers in the order of the scores
    keys = (rank << 32) | torch.arange(last, -1, -1, device=scores.device)
    ids = last - (keys.topk(k).values & 0xFFFFFFFF)
    return scores.gather(1, ids), ids


def _logprobs(logits: Tensor, tokens: Tensor, requests: Sequence[Request], rows: list[int]) -> Tensor:
    """[rows, 1 + 2 n] f64: the token's log probability, those of the best tokens, and their ids."""
    index = _upload(rows, torch.int64, logits.device)
    logs = logits.index_select(0, index).float().log_softmax(-1)
    most = max(requests[i].params.logprobs or 0 for i in rows)
    top = logs.topk(min(most, logs.shape[1]))
    own = logs.gather(1, tokens[index].unsqueeze(1))
    return torch.cat([x.double() for x in (own, top.values, top.indices)], 1)


def _token_logprobs(row: Tensor, count: int) -> TokenLogprobs:
    """One row of `_logprobs`, as many of the best tokens as asked for; tokens with a probability of 0 are left out."""
    values, ids = (half[:count].tolist() for half in row[1:].chunk(2))
    top = {int(token): value for token, value in zip(ids, values, strict=True) if math.isfinite(value)}
    return TokenLogprobs(float(row[0]), top)


def _upload(values: Sequence, dtype: torch.dtype, device: torch.device) -> Tensor:
    """To the device in a copy that nobody waits for."""
    made = torch.tensor(values, dtype=dtype, device="cpu")
    return made.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else made


def _host(x: Tensor) -> Tensor:
    """On the host, once the device gets there."""
    if not x.is_cuda:
        return x
    return torch.empty(x.shape, dtype=x.dtype, device="cpu", pin_memory=True).copy_(x, non_blocking=True)
