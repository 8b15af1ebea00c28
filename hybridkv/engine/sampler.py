"""Sampler: logits to token ids, on the device. Nothing waits for the host until the tokens are asked for.

The order is: repetition penalty, temperature, top-k, top-p, min-p, then one draw (Gumbel noise over the whole
vocabulary). The noise comes from the request's own random generator, so other requests in the batch do not change it.
Requests with the same kind of filters are computed together, in blocks of rows that bound the temporary memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hybridkv.kernels.best_tokens import best_tokens
from hybridkv.request import Request, TokenLogprobs

MIN_TEMPERATURE = 1e-6  # smaller ones are 0 or overflow in f32; the result is greedy from here on

BLOCK_BYTES = 256 << 20  # temporaries of one block of rows
# Bytes that a row needs for each of its logits. The tensors made here take up to 30; a sort on a GPU, with its keys,
# indices and their second copies, twice as much.
LOGIT_BYTES = 96


def sampling_bytes(rows: int, vocab: int) -> int:
    """The most memory that sampling takes besides the logits: temporaries, and `Request.seen` of every row."""
    return min(rows, _block_rows(vocab)) * vocab * LOGIT_BYTES + rows * vocab


def _block_rows(vocab: int) -> int:
    return max(1, BLOCK_BYTES // (vocab * LOGIT_BYTES))


@dataclass
class SampledTokens:
    """Tokens that a device may still be sampling. `wait` is called once."""

    tokens: Tensor  # [S] int64, on the device
    requests: Sequence[Request]  # S
    found: Tensor  # [2, S] int64, on the host: tokens, and 1 where a row of logits is broken
    logprobs: list[tuple[int, Tensor]] = field(default_factory=list)  # row, and its [1 + 2 n] f64 of `_logprobs`
    ready: torch.cuda.Event | None = None  # recorded after the copies to the host; None: they are there already

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
def sample(logits: Tensor, requests: Sequence[Request]) -> SampledTokens:
    """The next token of each request from logits [S, vocab]."""
    found = best_tokens(logits)  # all that greedy requests without a penalty need
    tokens = found[0]
    for rows in _groups(requests):
        _sample_group(logits, requests, rows, tokens)
    asked = [i for i, request in enumerate(requests) if request.params.logprobs is not None]
    logprobs = []
    if asked:
        logprobs = list(zip(asked, _host(_logprobs(logits, tokens, requests, asked)), strict=True))
    sampled = SampledTokens(tokens, requests, _host(found), logprobs)
    if logits.is_cuda:
        sampled.ready = torch.cuda.Event()
        sampled.ready.record(torch.cuda.current_stream(logits.device))
    return sampled


def _groups(requests: Sequence[Request]) -> list[list[int]]:
    """Rows that are not plainly greedy, those with the same kind of filters together."""
    groups: dict[tuple, list[int]] = {}
    for i, request in enumerate(requests):
        p = request.params
        if p.temperature > 0:
            groups.setdefault((p.top_k, p.top_p < 1, p.min_p > 0), []).append(i)
        elif p.repetition_penalty != 1:
            groups.setdefault((), []).append(i)
    return list(groups.values())


def _sample_group(logits: Tensor, requests: Sequence[Request], rows: list[int], tokens: Tensor) -> None:
    """Write the tokens of rows that have the same kind of filters (their bounds may differ), or are all greedy."""
    params = [requests[i].params for i in rows]
    columns = [
        rows,
        [max(p.temperature, MIN_TEMPERATURE) for p in params],
        [p.top_p for p in params],
        [p.min_p for p in params],
    ]
    table = _upload(columns, torch.float64, logits.device)  # [4, rows]
    size = _block_rows(logits.shape[1])
    for begin in range(0, len(rows), size):
        block = rows[begin : begin + size]
        _sample_block(logits, [requests[i] for i in block], table[:, begin : begin + size], tokens)


def _sample_block(logits: Tensor, requests: Sequence[Request], table: Tensor, tokens: Tensor) -> None:
    """One block of a group: table [4, n] f64 has row numbers, temperatures, top-p and min-p."""
    first = requests[0].params
    index = table[0].long()
    temperature, top_p, min_p = (column.float().unsqueeze(1) for column in table[1:])  # [n, 1]
    scores = logits.index_select(0, index).float()
    for row, request in zip(scores, requests, strict=True):
        if request.params.repetition_penalty != 1:
            row.copy_(penalise(row, request))
    if first.temperature == 0:
        chosen = best_tokens(scores)[0]
    else:
        # relative to the best score: a temperature near 0 then makes the others -inf, and not the best one inf
        scores.sub_(scores.amax(-1, keepdim=True)).div_(temperature)
        scores, ids = filter_logits(
            scores, first.top_k, top_p if first.top_p < 1 else None, min_p if first.min_p > 0 else None
        )
        noise = _noise(requests, logits.shape[1], logits.device)
        if ids is not None:
            noise = noise.gather(1, ids)
        chosen = scores.sub_(noise.clamp_(min=1e-20).log_()).argmax(-1)
        if ids is not None:
            chosen = ids.gather(1, chosen.unsqueeze(1)).squeeze(1)
    tokens.scatter_(0, index, chosen)
    for token, request in zip(chosen.split(1), requests, strict=True):
        if request.seen is not None:  # the host learns it later
            request.seen.index_fill_(0, token, True)
            request.counted = len(request.tokens) + 1


def _noise(requests: Sequence[Request], vocab: int, device: torch.device) -> Tensor:
    """[n, vocab] f32: exponential noise, each row from its request's generator."""
    noise = torch.empty((len(requests), vocab), device=device)
    for row, request in zip(noise, requests, strict=True):
        row.exponential_(generator=request.generator)
    return noise


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


def filter_logits(
    scores: Tensor,  # [n, vocab] f32
    top_k: int,  # 0: all
    top_p: Tensor | None,  # [n, 1]
    min_p: Tensor | None,  # [n, 1]
) -> tuple[Tensor, Tensor | None]:
    """Scores [n, K] of the tokens that pass the filters, and their ids; ids None: the whole vocabulary in order.

    Tokens that top-p and min-p remove are at -inf. The best token always stays. Without filters the scores are returned
    as they are, not copied.
    """
    ids = None
    if 0 < top_k < scores.shape[1]:
        scores, ids = _largest(scores, top_k)
    elif top_p is not None:
        scores, ids = scores.sort(descending=True, stable=True)
    if top_p is not None:
        probs = scores.softmax(-1)
        mass_before = probs.cumsum(-1).sub_(probs)  # of all better tokens
        drop = mass_before >= top_p
        drop[:, 0] = False
        scores = scores.masked_fill(drop, -torch.inf)
    if min_p is not None:
        probs = scores.softmax(-1)
        scores = scores.masked_fill(probs < min_p * probs.amax(-1, keepdim=True), -torch.inf)
    return scores, ids


def _largest(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest of each row in order; among equal scores the lower ids, which topk by itself does not promise."""
    last = scores.shape[1] - 1
    rank = _ordered_integers(scores).long()
    keys = rank.bitwise_left_shift_(32).bitwise_or_(torch.arange(last, -1, -1, device=scores.device))
    ids = keys.topk(k).values.bitwise_and_(0xFFFFFFFF).neg_().add_(last)
    return scores.gather(1, ids), ids


def _ordered_integers(scores: Tensor) -> Tensor:
    """int32 values in the same order as the f32 scores."""
    bits = (scores + 0.0).view(torch.int32)  # -0.0 becomes 0.0, its equal
    return torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


def _logprobs(logits: Tensor, tokens: Tensor, requests: Sequence[Request], rows: list[int]) -> Tensor:
    """[rows, 1 + 2 n] f64: the token's log probability, those of the best tokens, and their ids."""
    count = min(max(requests[i].params.logprobs or 0 for i in rows), logits.shape[1])
    parts = []
    for index in _upload(rows, torch.int64, logits.device).split(_block_rows(logits.shape[1])):
        logs = logits.index_select(0, index).float().log_softmax(-1)
        top = logs.topk(count)
        own = logs.gather(1, tokens[index].unsqueeze(1))
        parts.append(torch.cat([x.double() for x in (own, top.values, top.indices)], 1))
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def _token_logprobs(row: Tensor, count: int) -> TokenLogprobs:
    """One row of `_logprobs`, as many of the best tokens as asked for; tokens with a probability of 0 are left out."""
    values, ids = (half[:count].tolist() for half in row[1:].chunk(2))
    top = {int(token): value for token, value in zip(ids, values, strict=True) if math.isfinite(value)}
    return TokenLogprobs(float(row[0]), top)


def _upload(values: Sequence, dtype: torch.dtype, device: torch.device) -> Tensor:
    """To the device, in a copy that the host does not wait for."""
    made = torch.tensor(values, dtype=dtype, device="cpu")
    return made.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else made


def _host(x: Tensor) -> Tensor:
    """To the host, in a copy that the host does not wait for."""
    if not x.is_cuda:
        return x
    return torch.empty(x.shape, dtype=x.dtype, device="cpu", pin_memory=True).copy_(x, non_blocking=True)
