"""Sampler: logits to token ids, on the device. Nothing waits for the host until the tokens are asked for.

The order is that of vLLM, but for min-p, which comes last here:

    grammar             tokens that a constraint does not allow: -inf. Nothing below gives them back
    forbidden tokens    the last token of a bad word, and, before min_tokens, those that end the answer: -inf
    logit bias          added
    logits hook         the caller's function, on the host's thread; what the grammar does not allow is -inf after it
    penalties           repetition (prompt and answer), then frequency and presence (answer alone)
    greedy              the largest is taken, the first among equals; nothing below applies
    temperature, top-k, top-p, min-p
    one draw            Gumbel noise, counted by the request's seed, the token's position and its id: neither other
                        requests in the batch nor a preemption change it

kernels/sampling does all of this for all rows in a few launches, but for hooks; here is what a request asks of it.
Logprobs are of the logits before all of this.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from hybridkv.config import SamplingParams
from hybridkv.engine.masking import Masks, mask_logits
from hybridkv.engine.workspace import block_rows
from hybridkv.kernels.best_tokens import best_tokens
from hybridkv.kernels.sampling.log_sum import log_sum_exp
from hybridkv.kernels.sampling.rows import SampleRow, seen_tokens
from hybridkv.kernels.sampling.sample import NO_DISTRIBUTION, NO_TOKEN_LEFT, sample_rows
from hybridkv.request import Request, TokenLogprobs

FAILED_THERE = 3  # beside NO_DISTRIBUTION and NO_TOKEN_LEFT: what rank 0 tells the others of a row (lock_step.py)
PROBLEMS = {
    FAILED_THERE: "its logits hook or grammar failed on rank 0",
    NO_DISTRIBUTION: "the model gave logits that are NaN or infinite; its weights or inputs are broken",
    NO_TOKEN_LEFT: "no token is left to choose from: bad_words, min_tokens and the logits hook must not rule out all, "
    "nor give NaN or +inf",
}


@dataclass
class SamplerState:
    """What is kept for a request from token to token, the tokens seen on the device. It can be dropped at any time, and
    is then made again."""

    row: SampleRow
    counted: int = 0  # tokens that `row.seen` has; on the device that may be more than the host knows


class Filters(NamedTuple):
    """What a request's parameters say about the distribution, none of it open any more; in the order of SampleRow."""

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


class Awaited(Protocol):
    """What the host can wait for: a torch.cuda.Event, or one that is waited for with a limit (parallel/group.py)."""

    def synchronize(self) -> None:
        """Until the device has come to it."""
        ...


@dataclass
class SampledTokens:
    """Tokens that a device may still be sampling. `wait` is called once."""

    drawn: Tensor  # [2, S] int64, on the device: tokens, and what is wrong with a row (PROBLEMS)
    requests: Sequence[Request]  # S
    found: Tensor  # the same on the host
    logprobs: list[tuple[int, Tensor]] = field(default_factory=list)  # row, and its [1 + 2 n] f64 of `token_scores`
    failed: dict[int, str] = field(default_factory=dict)  # rows whose hook or grammar has failed, and how
    prompts: list[PromptScores] = field(default_factory=list)
    ready: Awaited | None = None  # comes after the copies to the host; None: they are there already

    @property
    def tokens(self) -> Tensor:
        """[S] int64, on the device."""
        return self.drawn[0]

    def went_well(self, request: Request) -> bool:
        """Whether a request's logits were numbers, though nobody wants its token any more. The host waits for it."""
        if self.ready is not None:
            self.ready.synchronize()
        return not int(self.found[1, list(self.requests).index(request)])

    def wait(self) -> tuple[list[int], list[str | None]]:
        """The tokens, and what is wrong where there is none. Logprobs, where asked, are added to the requests."""
        if self.ready is not None:
            self.ready.synchronize()
        tokens, flags = self.found.tolist()
        problems = [self.failed.get(i) or PROBLEMS.get(flag) for i, flag in enumerate(flags)]
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
    at_once: int | None = None,  # requests that are sampled at once at the most; None: all
    draw: Callable[[Tensor, Sequence[SampleRow], Tensor], None] | None = None,  # SamplingGraphs, or sample_rows
) -> SampledTokens:
    """The next token of each request."""
    shared = rows is not None
    rows = range(len(requests)) if rows is None else rows
    scores = _Scores(logits, requests, rows, at_once)  # before anything is masked
    masks = mask_logits(logits, requests, rows)
    found = best_tokens(logits)  # all that plain greedy requests need
    if shared:
        found = found.index_select(1, _upload(rows, torch.int64, logits.device))
    sampled = SampledTokens(found, requests, found, failed=masks.failed, prompts=list(prompts))
    drawn = [i for i, request in enumerate(requests) if request.params.temperature or _adjusts(request)]
    at_once = at_once or max(1, len(requests))
    for begin in range(0, len(drawn), at_once):
        _sample_some(logits, rows, drawn[begin : begin + at_once], found, sampled, masks, draw or sample_rows)
    sampled.logprobs = scores.of(logits, sampled.tokens)
    sampled.found = host(found)
    if logits.is_cuda:
        sampled.ready = torch.cuda.current_stream(logits.device).record_event()
    return sampled


def _sample_some(
    logits: Tensor, rows: Sequence[int], some: list[int], found: Tensor, sampled: SampledTokens, masks: Masks,
    draw: Callable[[Tensor, Sequence[SampleRow], Tensor], None],
) -> None:  # fmt: skip
    """Write the tokens of some requests that are not plainly greedy to found [2, S]."""
    together, vocab, device = [], logits.shape[1], logits.device
    for i in some:
        request = sampled.requests[i]
        asked = _row_of(request, vocab, device)
        asked.row, asked.out, asked.position = rows[i], i, len(request.tokens) + request.unseen
        asked.forbidden = _forbidden(request, vocab)
        if request.params.logits_hook is None:
            if asked.temperature or asked.adjusts:
                together.append(asked)
            continue
        try:  # alone: its copy of the logits goes before the next one's is made
            asked.own = _hooked(logits, asked, request)
            masks.apply(rows[i], asked.own)
            sample_rows(logits, [asked], found)
        except HookFailed as problem:
            sampled.failed[i] = str(problem)
        asked.own = None
    draw(logits, together, found)
    for i in some:
        request = sampled.requests[i]
        request.sampler.counted += 1  # the host learns the token later
        if request.source is not None:  # a sibling's first token: it may yet have to wait, and holds nothing until then
            request.sampler = None


def _adjusts(request: Request) -> bool:
    """Whether a greedy request may choose another token than that of the largest logit."""
    params = request.params
    adjusted = _penalises(params) or bool(params.logit_bias) or bool(request.bad_words) or bool(request.banned)
    return adjusted or params.min_tokens > 0 or params.logits_hook is not None


class HookFailed(Exception):
    """A logits hook raised, or gave back something else than logits."""


def _row_of(request: Request, vocab: int, device: torch.device) -> SampleRow:
    """What the request asks, with the tokens that it has seen where a penalty is about them."""
    state: SamplerState | None = request.sampler
    if state is None:
        params, bias = request.params, None
        if params.logit_bias:
            ids = _upload(list(params.logit_bias), torch.int64, device)
            values = _upload(list(params.logit_bias.values()), torch.float32, device)
            bias = torch.zeros(vocab, device=device).scatter_(0, ids, values)
        filters = Filters.of(params)
        row = SampleRow(*filters, params.frequency_penalty, params.presence_penalty, request.seed, bias=bias)
        state = request.sampler = SamplerState(row)
    if _penalises(request.params) and state.counted < len(request.tokens):
        prompt, answer = request.tokens[: request.prompt_tokens], request.generated
        state.row.seen = seen_tokens(vocab, prompt, answer, device)
    state.counted = max(state.counted, len(request.tokens))
    return state.row


def _forbidden(request: Request, vocab: int) -> list[int]:
    """Tokens that must not come next: those that end the answer too early, and ends of bad words."""
    found = [token for token in request.banned if token < vocab]
    if request.params.min_tokens and request.answer_tokens + request.unseen < request.params.min_tokens:
        found += [token for token in request.ends_at if token < vocab]
    for *before, last in request.bad_words:
        known = len(request.tokens) - len(before)
        if known >= request.prompt_tokens and request.tokens[known:] == before:
            found.append(last)
    return found


def _hooked(logits: Tensor, asked: SampleRow, request: Request) -> Tensor:
    """The request's own logits [vocab] f32, as its hook left them. Nothing waits for the device but the hook."""
    row = logits[asked.row].to(torch.float32, copy=True)
    if asked.forbidden:
        row.index_fill_(0, _upload(asked.forbidden, torch.int64, row.device), -torch.inf)
    if asked.bias is not None:
        row += asked.bias
    _run_hook(row, request)
    return row


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


def _penalises(params: SamplingParams) -> bool:
    return params.repetition_penalty not in (1, None) or params.presence_penalty != 0 or params.frequency_penalty != 0


class _Scores:
    """Logprobs of the requests that ask for them: what a row says of its tokens first, its own one when it is known."""

    def __init__(self, logits: Tensor, requests: Sequence[Request], rows: Sequence[int], at_once: int | None) -> None:
        self._asked = [i for i, request in enumerate(requests) if request.params.logprobs is not None]
        if self._asked:
            count = max(requests[i].params.logprobs or 0 for i in self._asked)
            self._index = _upload([[rows[i] for i in self._asked], self._asked], torch.int64, logits.device)
            parts = self._index[0].split(min(block_rows(logits.shape[1]), at_once or max(1, len(requests))))
            self._rows = torch.cat([row_scores(logits.index_select(0, part), count) for part in parts])

    def of(self, logits: Tensor, tokens: Tensor) -> list[tuple[int, Tensor]]:
        """(request, its [1 + 2 n] f64), on the host. A token that was chosen has the logit that it had."""
        if not self._asked:
            return []
        own = logits[self._index[0], tokens[self._index[1]]].float().double().unsqueeze(1)
        return list(zip(self._asked, host(_scored(own, self._rows)), strict=True))


def row_scores(logits: Tensor, count: int) -> Tensor:
    """[t, 1 + 2 n] f64 for logits [t, vocab]: what is taken from a logit, the log probabilities of the `count` best
    tokens, and their ids.
    """
    total = log_sum_exp(logits).unsqueeze(1)
    top = logits.topk(min(count, logits.shape[1]))
    return torch.cat([x.double() for x in (total, top.values.float() - total, top.indices)], 1)


def _scored(own: Tensor, rows: Tensor) -> Tensor:
    """`row_scores` with the log probability of a token, whose logit is `own` [t, 1] f64, in the first place."""
    return torch.cat((own.sub(rows[:, :1]).float().double(), rows[:, 1:]), 1)


def token_scores(logits: Tensor, tokens: Tensor, count: int) -> Tensor:
    """[t, 1 + 2 n] f64 for logits [t, vocab] and tokens [t]: the token's log probability, those of the `count` best
    tokens, and their ids.
    """
    own = logits.gather(1, tokens.unsqueeze(1)).float().double()
    return _scored(own, row_scores(logits, count))


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
