"""Sampler: logits to token ids, on the device. Nothing waits for the host until the tokens are asked for.

The order is that of vLLM, but for min-p, which comes last here:

    forbidden tokens    the last token of a bad word, and, before min_tokens, those that end the answer: -inf
    logit bias          added
    logits hook         the caller's function, on the host's thread
    penalties           repetition (prompt and answer), then frequency and presence (answer alone)
    greedy              the largest is taken, the first among equals; nothing below applies
    temperature, top-k, top-p, min-p
    one draw            Gumbel noise over the whole vocabulary, from the request's own random generator, so other
                        requests in the batch do not change it

Logprobs are of the logits before all of this. Requests with the same kind of filters are computed together, in blocks
of rows that bound the temporary memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from hybridkv.config import SamplingParams
from hybridkv.engine.workspace import block_rows
from hybridkv.kernels.best_tokens import best_tokens
from hybridkv.request import Request, SamplerState, TokenLogprobs

MIN_TEMPERATURE = 1e-6  # smaller ones are 0 or overflow in f32; the result is greedy from here on


NO_DISTRIBUTION = 1  # the model's own logits are broken
NO_TOKEN_LEFT = 2  # what is ruled out, or the hook, leaves nothing to choose from
PROBLEMS = {
    NO_DISTRIBUTION: "the model gave logits that are NaN or infinite; its weights or inputs are broken",
    NO_TOKEN_LEFT: "no token is left to choose from: bad_words, min_tokens and the logits hook must not rule out all, "
    "nor give NaN or +inf",
}


class Filters(NamedTuple):
    """What a request's parameters say about the distribution, none of it open any more."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float

    @staticmethod
    def of(params: SamplingParams) -> Filters:
        """Of resolved parameters; what is None all the same is off."""
        return Filters(
            params.temperature or 0.0,
            params.top_k or 0,
            1.0 if params.top_p is None else params.top_p,
            params.min_p or 0.0,
            params.repetition_penalty or 1.0,
        )


@dataclass
class PromptScores:
    """Logprobs of a part of a prompt."""

    request: Request
    first: int  # the token that the first row is about
    rows: Tensor  # [t, 1 + 2 n] f64 of `token_scores`, on the host


@dataclass
class SampledTokens:
    """Tokens that a device may still be sampling. `wait` is called once."""

    tokens: Tensor  # [S] int64, on the device
    requests: Sequence[Request]  # S
    found: Tensor  # [2, S] int64, on the host: tokens, and what is wrong with a row (PROBLEMS)
    logprobs: list[tuple[int, Tensor]] = field(default_factory=list)  # row, and its [1 + 2 n] f64 of `token_scores`
    failed: dict[int, str] = field(default_factory=dict)  # rows whose hook has failed, and how
    prompts: list[PromptScores] = field(default_factory=list)
    ready: torch.cuda.Event | None = None  # recorded after the copies to the host; None: they are there already

    def wait(self) -> tuple[list[int], list[str | None]]:
        """The tokens, and what is wrong where there is none. Logprobs, where asked, are added to the requests."""
        if self.ready is not None:
            self.ready.synchronize()
        tokens, flags = self.found.tolist()
        problems = [PROBLEMS.get(flag) or self.failed.get(i) for i, flag in enumerate(flags)]
        for i, row in self.logprobs:
            request = self.requests[i]
            if problems[i] or request.finished or request.finish_reason is not None:
                continue  # no token for it, or it ended while this step ran
            request.logprobs.append(_token_logprobs(row, request.params.logprobs or 0))
        for part in self.prompts:
            known, count = part.request.prompt_logprobs, part.request.params.prompt_logprobs or 0
            known += [_token_logprobs(row, count) for row in part.rows[len(known) - part.first :]]
        return tokens, problems


@torch.inference_mode()
def sample(
    logits: Tensor,  # [R, vocab]
    requests: Sequence[Request],  # S
    rows: Sequence[int] | None = None,  # the row of each request; several may share one. None: one each, in order
    prompts: Sequence[PromptScores] = (),  # to be brought to the host together with the tokens
    at_once: int | None = None,  # requests that are sampled at once at the most; None: as many as memory allows
) -> SampledTokens:
    """The next token of each request."""
    found = best_tokens(logits)  # all that plain greedy requests need
    if rows is None:
        rows = range(len(requests))
    else:
        found = found.index_select(1, _upload(rows, torch.int64, logits.device))
    sampled = SampledTokens(found[0], requests, found, prompts=list(prompts))
    size = min(block_rows(logits.shape[1]), at_once or len(requests))
    for group in _groups(requests):
        _sample_group(logits, rows, group, found, sampled, size)
    asked = [i for i, request in enumerate(requests) if request.params.logprobs is not None]
    if asked:
        count = max(requests[i].params.logprobs or 0 for i in asked)
        index = _upload([[rows[i] for i in asked], asked], torch.int64, logits.device)
        scores = [
            token_scores(logits.index_select(0, row), sampled.tokens[i], count)
            for row, i in zip(*(part.split(size) for part in index), strict=True)
        ]
        sampled.logprobs = list(zip(asked, host(torch.cat(scores)), strict=True))
    sampled.found = host(found)
    if logits.is_cuda:
        sampled.ready = torch.cuda.Event()
        sampled.ready.record(torch.cuda.current_stream(logits.device))
    return sampled


def _groups(requests: Sequence[Request]) -> list[list[int]]:
    """Requests that are not plainly greedy, those with the same kind of filters together."""
    groups: dict[tuple, list[int]] = {}
    for i, request in enumerate(requests):
        p = Filters.of(request.params)
        if p.temperature:
            groups.setdefault((p.top_k, p.top_p < 1, p.min_p > 0), []).append(i)
        elif _adjusts(request):
            groups.setdefault((), []).append(i)
    return list(groups.values())


def _sample_group(
    logits: Tensor,
    rows: Sequence[int],
    group: list[int],
    found: Tensor,  # [2, S] on the device
    sampled: SampledTokens,
    size: int,  # of a block
) -> None:
    """Write the tokens of requests that have the same kind of filters (their bounds may differ), or are all greedy."""
    params = [Filters.of(sampled.requests[i].params) for i in group]
    columns = [
        group,
        [rows[i] for i in group],
        [max(p.temperature, MIN_TEMPERATURE) for p in params],
        [p.top_p for p in params],
        [p.min_p for p in params],
    ]
    table = _upload(columns, torch.float64, logits.device)  # [5, group]
    for begin in range(0, len(group), size):
        _sample_block(logits, group[begin : begin + size], table[:, begin : begin + size], found, sampled)


def _sample_block(logits: Tensor, block: list[int], table: Tensor, found: Tensor, sampled: SampledTokens) -> None:
    """One block of a group: table [5, n] f64 has numbers of requests and rows, temperatures, top-p and min-p."""
    requests = [sampled.requests[i] for i in block]
    first = Filters.of(requests[0].params)
    index = table[0].long()
    temperature, top_p, min_p = (column.float().unsqueeze(1) for column in table[2:])  # [n, 1]
    scores = logits.index_select(0, table[1].long()).float()
    rules_out = False
    for i, row, request in zip(block, scores, requests, strict=True):
        try:
            rules_out |= _adjust(row, request)
        except HookFailed as problem:
            sampled.failed[i] = str(problem)
    chosen = index  # until it is known
    if rules_out or not first.temperature:
        chosen, empty = best_tokens(scores).unbind()
        before = found[1].index_select(0, index)
        found[1].scatter_(0, index, torch.where(before > 0, before, NO_TOKEN_LEFT * empty))
    if first.temperature:
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
    found[0].scatter_(0, index, chosen)
    for token, request in zip(chosen.split(1), requests, strict=True):
        if request.sampler is not None:  # the host learns it later
            _count(request.sampler, token)
            request.sampler.counted += 1
        if request.source is not None:  # a sibling's first token: it may yet have to wait, and holds nothing until then
            request.sampler = None


def _adjusts(request: Request) -> bool:
    """Whether a greedy request may choose another token than that of the largest logit."""
    params = request.params
    return _penalises(params) or bool(params.logit_bias) or params.min_tokens > 0 or request.needs_last_token


class HookFailed(Exception):
    """A logits hook raised, or gave back something else than logits."""


def _adjust(row: Tensor, request: Request) -> bool:
    """Change a request's logits [vocab] f32 as it asks, before temperature and filters. Nothing waits for the device,
    but for what a hook does.

    Returns whether tokens may have been ruled out: then perhaps all of them.
    """
    params = request.params
    forbidden = _forbidden(request)
    if forbidden:
        row.index_fill_(0, _upload(forbidden, torch.int64, row.device), -torch.inf)
    if params.logit_bias:
        row.index_add_(0, *_bias(request, row.device))
    if params.logits_hook is not None:
        _run_hook(row, request)
    if _penalises(params):
        row.copy_(penalise(row, request))
    return bool(forbidden) or params.logits_hook is not None


def _forbidden(request: Request) -> list[int]:
    """Tokens that must not come next: those that end the answer too early, and ends of bad words."""
    found = list(request.ends_at) if request.answer_tokens + request.unseen < request.params.min_tokens else []
    for *before, last in request.bad_words:
        known = len(request.tokens) - len(before)
        if known >= request.prompt_tokens and request.tokens[known:] == before:
            found.append(last)
    return found


def _bias(request: Request, device: torch.device) -> tuple[Tensor, Tensor]:
    state = _state(request)
    if state.bias is None:
        bias = request.params.logit_bias
        state.bias = (_upload(list(bias), torch.int64, device), _upload(list(bias.values()), torch.float32, device))
    return state.bias


def _run_hook(row: Tensor, request: Request) -> None:
    assert request.params.logits_hook is not None
    try:
        given = request.params.logits_hook(request.generated, row)
        if given is None:
            return
        if not isinstance(given, Tensor) or given.shape != row.shape:
            what = f"a Tensor {list(given.shape)}" if isinstance(given, Tensor) else f"a {type(given).__name__}"
            raise HookFailed(f"logits_hook must return a Tensor [{len(row)}], or None, not {what}")
        row.copy_(given)
    except HookFailed:
        raise
    except (Exception, SystemExit) as problem:  # what a hook raises is its own request's, even an exit
        raise HookFailed(f"logits_hook failed: {problem!r}") from problem


def _noise(requests: Sequence[Request], vocab: int, device: torch.device) -> Tensor:
    """[n, vocab] f32: exponential noise, each row from its request's generator."""
    noise = torch.empty((len(requests), vocab), device=device)
    for row, request in zip(noise, requests, strict=True):
        row.exponential_(generator=request.generator)
    return noise


def _penalises(params: SamplingParams) -> bool:
    return params.repetition_penalty not in (1, None) or params.presence_penalty != 0 or params.frequency_penalty != 0


def _state(request: Request) -> SamplerState:
    if request.sampler is None:
        request.sampler = SamplerState()
    return request.sampler


def penalise(logits: Tensor, request: Request) -> Tensor:
    """Logits [vocab] with tokens that were seen less likely.

    Repetition, of prompt and answer: positive logits are divided by the penalty, negative ones multiplied. Frequency
    and presence, of the answer alone: the penalty is subtracted as often as a token came, and once if it did.
    """
    params, state = request.params, _state(request)
    factor = Filters.of(params).repetition_penalty
    if factor != 1 and state.seen is None:
        state.seen = torch.zeros(logits.shape[-1], dtype=torch.bool, device=logits.device)
    if (params.frequency_penalty or params.presence_penalty) and state.counts is None:
        state.counts = torch.zeros(logits.shape[-1], dtype=torch.int32, device=logits.device)
    for end, generated in ((request.prompt_tokens, False), (len(request.tokens), True)):
        if state.counted < end:
            _count(state, _upload(request.tokens[state.counted : end], torch.int64, logits.device), generated)
            state.counted = end
    if state.seen is not None:
        logits = torch.where(state.seen, torch.where(logits > 0, logits / factor, logits * factor), logits)
    if state.counts is not None and params.frequency_penalty:
        logits = logits - params.frequency_penalty * state.counts
    if state.counts is not None and params.presence_penalty:
        logits = logits - params.presence_penalty * (state.counts > 0)
    return logits


def _count(state: SamplerState, tokens: Tensor, generated: bool = True) -> None:
    """Take note of tokens [t], of the prompt or generated ones."""
    if state.seen is not None:
        state.seen.index_fill_(0, tokens, True)
    if state.counts is not None and generated:
        state.counts.index_add_(0, tokens, torch.ones_like(tokens, dtype=torch.int32))


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


def token_scores(logits: Tensor, tokens: Tensor, count: int) -> Tensor:
    """[t, 1 + 2 n] f64 for logits [t, vocab] and tokens [t]: the token's log probability, those of the `count` best
    tokens, and their ids.
    """
    logs = logits.float().log_softmax(-1)
    top = logs.topk(min(count, logits.shape[1]))
    own = logs.gather(1, tokens.unsqueeze(1))
    return torch.cat([x.double() for x in (own, top.values, top.indices)], 1)


def _token_logprobs(row: Tensor, count: int) -> TokenLogprobs:
    """One row of `token_scores`, as many of the best tokens as asked for; those of probability 0 are left out."""
    values, ids = (half[:count].tolist() for half in row[1:].chunk(2))
    top = {int(token): value for token, value in zip(ids, values, strict=True) if math.isfinite(value)}
    return TokenLogprobs(float(row[0]), top)


def _upload(values: Sequence, dtype: torch.dtype, device: torch.device) -> Tensor:
    """To the device, in a copy that the host does not wait for."""
    made = torch.tensor(values, dtype=dtype, device="cpu")
    return made.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else made


def host(x: Tensor) -> Tensor:
    """To the host, in a copy that the host does not wait for."""
    if not x.is_cuda:
        return x
    return torch.empty(x.shape, dtype=x.dtype, device="cpu", pin_memory=True).copy_(x, non_blocking=True)
