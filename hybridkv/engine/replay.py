"""Replay: how much each entry of a held request matters, by having the model repeat what it has read.

A fork of the request (shared pages, a copy of recurrent state) is asked to repeat the text and is given the text itself
as its answer. What the answer's queries attend to is what the model needs to say its past again; an entry's score is
the largest softmax weight that any of them pays to it, over the query heads that share its KV head. KVzip, Kim et al.
2025, https://arxiv.org/abs/2505.23416

    the request   | text ................................. |
    fork for part 1                                        | "repeat" | first 2048 tokens of the text |
    fork for part 2                                        | "repeat, from ..." | the next 2048 |

Every part has a fork of its own that is released after it, so the cache never holds more than the request and one part,
and the request itself does not change by a bit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridkv.cache import LayerHandle
from hybridkv.cache.step import upload
from hybridkv.config import CHUNK_QUANTUM
from hybridkv.engine.held import check_ended
from hybridkv.engine.room import room_to_hold
from hybridkv.errors import RequestError
from hybridkv.eviction.entries import positions
from hybridkv.eviction.sizes import STREAMS
from hybridkv.kernels.eviction.peak import peak_scores
from hybridkv.request import Request, RequestKey

if TYPE_CHECKING:
    from hybridkv.engine.engine import Engine


Forked = tuple[RequestKey, list[int]]


@dataclass(frozen=True)
class ReplayPart:
    """A piece of the text that is read again."""

    prompt: list[int]  # asks for it
    text: list[int]  # the piece itself, as if the model said it

    @property
    def tokens(self) -> int:
        """Tokens that are read for it."""
        return len(self.prompt) + len(self.text)


def replay(
    engine: Engine,
    request: Request,
    part: ReplayPart,
    scores: list[Tensor] | None = None,
    agreed: Callable[[Callable[[], Forked]], Forked] = lambda work: work(),
) -> list[Tensor]:
    """Scores [G, L] f32 of each attention layer: the largest weights that `part` gives. The request stays as it is.

    Args:
        engine: who holds it.
        request: what is read again.
        part: a piece of its text.
        scores: what the parts before gave; they are raised in place.
        agreed: does what may be refused, over ranks on all of them or on none.
    """
    manager = engine.manager
    fork, tokens = agreed(lambda: _forked(engine, request, part))
    try:
        where = positions(manager.slot_of[request.key], manager)  # [streams, L]
        if scores is None:
            scores = list(torch.zeros(where.shape, device=manager.device).split(manager.tables[STREAMS].schema.heads))
        _read(engine, fork, tokens, max(0, len(part.prompt) - 1), _Looking(engine, fork, where, scores))
    finally:
        manager.release_request(fork)
    return scores


def _forked(engine: Engine, request: Request, part: ReplayPart) -> Forked:
    """A fork of the request with room for the part's tokens, and these, or RequestError."""
    manager = engine.manager
    if STREAMS not in manager.tables:
        raise RequestError("the model has no full-attention layer: there is nothing to score")
    check_ended(request, "read again")
    if not engine.scheduler.bring_back(request):
        raise RequestError(
            "the cache of what is read again was given up to make room for other requests; do it when they have ended, "
            "or give more memory or a higher max_requests"
        )
    if not part.text:
        raise RequestError("there is no text to read again; give at least one token")
    tokens = engine.check_tokens([*part.prompt, *part.text])
    _make_room(engine, request, len(tokens))
    fork = RequestKey(-1)  # of the engine's own kind: after an interrupt it is released with all that have no owner
    manager.fork_request(request.key, fork)
    return fork, tokens


def _make_room(engine: Engine, request: Request, tokens: int) -> None:
    """A slot and pages for a fork that reads so many tokens, at the cost of other held caches, or RequestError."""
    manager, scheduler = engine.manager, engine.scheduler
    position = manager.position(request.key)
    if position + tokens > manager.max_tokens:
        raise RequestError(
            f"the text's {position} tokens and {tokens} more that are read again do not fit a context of "
            f"{manager.max_tokens}; shorten the text by {position + tokens - manager.max_tokens} tokens, or raise "
            "max_context"
        )
    # the fork shares the open page of every stream, and copies it when it writes there
    need = {
        name: n + manager.tables[name].schema.streams for name, n in manager.pages_needed(request.key, tokens).items()
    }
    with_queries = bool(manager.query_buffers.of[manager.slot_of[request.key]] >= 0)
    given_up = room_to_hold(scheduler, need, with_queries, keep=request)
    if given_up is None:
        raise RequestError(
            f"there is no room to read {tokens} tokens again beside the {position} of the text and "
            f"{len(scheduler.running)} running requests: it takes one of {manager.slots} request slots and "
            f"{sum(need.values())} pages; do it when they have ended, or give more memory or a higher max_requests"
        )
    for held in given_up:
        scheduler.spare(held)


def _read(engine: Engine, fork: RequestKey, tokens: list[int], first: int, looking: _Looking) -> None:
    """Run the tokens in steps; queries from token `first` on count."""
    manager, at = engine.manager, 0
    while at < len(tokens):
        begin = manager.position(fork)
        count = min(len(tokens) - at, (begin + engine.scheduler.step_tokens) // CHUNK_QUANTUM * CHUNK_QUANTUM - begin)
        step = manager.prepare_forward([(fork, count)])
        looking.begin(begin, count, max(0, first - at))
        engine.runner.observe(tokens[at : at + count], step, looking)
        manager.commit([(fork, count)])
        at += count


class _Looking:
    """What the queries of a step attend to, layer by layer (an Observer, cache/handle.py)."""

    def __init__(self, engine: Engine, fork: RequestKey, where: Tensor, scores: list[Tensor]) -> None:
        self.manager, config = engine.manager, engine.runner.model.config
        self.scale, self.heads = config.attention_scale, config.heads
        self.slot = self.manager.slot_of[fork]
        self.where = where  # [streams, L] positions of the entries that are scored; -1 past a stream's length
        self.scores = scores  # of each layer [G, L], raised in place
        self.first = 0  # tokens of the step before the first that counts
        self.when = where[0]  # [T] positions of the step's tokens
        self.seen = where  # [streams, L'] positions of the entries over which softmax is summed
        self.lse_rows: tuple[Tensor, Tensor] | None = None  # where attention leaves the sums

    def begin(self, position: int, count: int, first: int) -> None:
        """A step of `count` tokens from `position` on runs next; those from `first` on count."""
        device = self.manager.device
        self.first, self.when = first, torch.arange(position, position + count, device=device)
        if not self.manager.exact:
            self.lse_rows = (torch.empty(count, self.heads, device=device), torch.arange(count, device=device))
            return
        # exact attention leaves no sums: they are made again, over all that the queries see
        lengths = upload([self.manager.tables[STREAMS].lengths[self.slot]], device)[:, None]
        before = F.pad(positions(self.slot, self.manager), (0, count), value=-1)
        own = torch.arange(before.shape[1], device=device) - lengths
        self.seen = torch.where((own >= 0) & (own < count), own + position, before)

    def __call__(self, handle: LayerHandle, queries: Tensor) -> None:
        if self.first >= len(queries):
            return
        scores = self.scores[handle.rows.start // len(self.scores[0])]
        asked = queries[self.first :], self.when[self.first :], handle.pages("k"), handle.table[self.slot]
        if self.lse_rows is not None:
            sums = self.lse_rows[0][self.first :]
            peak_scores(*asked, self.where[handle.rows], self.scale, sums, out=scores)
        else:
            found = peak_scores(*asked, self.seen[handle.rows], self.scale)
            torch.maximum(scores, found[:, : scores.shape[1]], out=scores)
