"""RankMoves: requests that leave several ranks, and that go on over several, whatever their number was elsewhere.

    out   rank 0 exports its own part, and so decides what goes along; the others do as it did, and the parts are joined
    in    rank 0 checks what it alone can judge: model, parameters, grammar, the answer's text. Then the session is cut
          for every rank; if it does not fit on one, all refuse it. The request begins on all of them

How a request goes on (moving.py: seed, logprobs, what was code) is rank 0's alone. One of which nothing is cut, since
it goes without its cache and nothing was evicted from it, leaves rank 0 without a word to the others.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import partial

from hybridkv.cache.session import Session, as_own
from hybridkv.config import EvictionConfig, SamplingParams
from hybridkv.engine import moving
from hybridkv.engine.engine import Engine
from hybridkv.engine.rank_calls import (
    RankCalls,
    eviction_of_words,
    eviction_words,
    params_of_words,
    params_words,
    take_words,
)
from hybridkv.parallel.events import Event
from hybridkv.request import Request


class RankMoves(RankCalls):
    """The calls by which requests move."""

    # ---- out

    def export(self, request: Request) -> Session:
        """As `Engine.export`: the parts of all ranks, joined."""
        self._check_alive()
        own = super().export(request)  # what is refused is refused before the others hear of it
        if request.finished and request not in self.scheduler.held:  # which the others may have forgotten
            own = replace(own, snapshot=None, evictions={}, policy=None)
        if own.snapshot is None and not own.evictions:
            return own
        event = {"event": "export", "number": request.order, "cache": own.snapshot is not None}
        return replace(self._call(event, partial(self._export, event, own)), going=own.going)

    def _export(self, event: Event, own: Session | None = None) -> Session:
        part = self._alike(lambda: self._part(event) if own is None else own)
        assert self.whole is not None
        return self.whole.joined(self.group, replace(part, going={}))

    def _part(self, event: Event) -> Session:
        with Engine.changing(self):
            return moving.export(self, self._named(event), event["cache"])

    # ---- in

    def resume(
        self,
        session: Session,
        params: SamplingParams | None = None,
        hold: bool = False,
        eviction: EvictionConfig | int | None | object = moving.AS_SENT,
        salt: bytes = b"",
        cache: bool | str = True,
    ) -> Request:
        """As `Engine.resume`, of what was exported over any number of ranks."""
        self._check_alive()
        self.check_session_model(session.model, session.about, session.files)
        with Engine.changing(self):
            see = partial(Engine.see, self)  # the others do not see it now
            request = moving.asked(self, session, params, hold, eviction, salt, cache, see)
        if request.finish_reason is not None:
            return request
        words = eviction_words(request.eviction)
        event = {"event": "resume", "number": request.order, **params_words(request), "hold": hold, "eviction": words}
        sent = replace(as_own(self.manager, session), going={})
        if moving.must_read_all(request):
            sent = replace(sent, snapshot=None)
        return self._call(event, partial(self._resume, event, sent, request))

    def _resume(self, event: Event, session: Session | None = None, request: Request | None = None) -> Request:
        assert self.whole is not None
        self.numbers = itertools.count(event["number"] + (request is not None))
        part = self.whole.cut(self.group, session)
        part, made = self._all_or_none(partial(self._fitting, event, part, request))
        made.evictions = dict(part.evictions)
        self._become_uneven(any(not record.alike for record in part.evictions.values()))
        self._may_share(made.eviction)
        with Engine.changing(self):
            moving.begin(self, made, part)
        self._known[made.order] = made
        return self._holding(made) if made.hold else made

    def _fitting(self, event: Event, part: Session, request: Request | None) -> tuple[Session, Request]:
        """A part that fits this rank's cache, and the request; or RequestError, and nothing is taken."""
        part = moving.check_fits(self, part)
        return part, self._asked(event, part) if request is None else request

    def _asked(self, event: Event, part: Session) -> Request:
        """The request of rank 0 on another rank, where it stands in its answer."""
        prompt, eviction = part.tokens[: part.prompt_tokens], eviction_of_words(event["eviction"])
        request = self.checked_request(prompt, params_of_words(event), event["hold"], eviction)
        take_words(request, event)

        def append(request: Request, token: int) -> None:  # where the text is rank 0's
            request.tokens.append(token)

        moving.see_again(self, request, part, append if event["bound"] else self.see)
        if part.snapshot is not None and request.params.prompt_logprobs is not None:
            request.prompt_logprobs = [None] * request.prompt_tokens  # rank 0 has them
        return request
