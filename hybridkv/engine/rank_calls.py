"""RankCalls: what is asked of an engine between its steps, done on every rank at once.

Rank 0 tells the others which call it makes, with its arguments, and all make it. What they decide they decide alike; an
error that all of them have is the caller's, one that only some have ends the group. A grammar and a logits hook are
rank 0's alone: it draws such tokens, and says which of them end an answer.
"""

from __future__ import annotations

import itertools
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor

from hybridkv.cache.pins import Pin
from hybridkv.cache.schema import CacheSchema
from hybridkv.cache.session import Session, as_own, check_session
from hybridkv.config import EvictionConfig, SamplingParams
from hybridkv.engine.agreement import RanksAgree
from hybridkv.engine.engine import Engine, Update
from hybridkv.engine.held import about
from hybridkv.engine.rank_sessions import WholeCache
from hybridkv.engine.replay import ReplayPart, replay
from hybridkv.errors import HybridKVError, RequestError
from hybridkv.eviction import find_policy
from hybridkv.eviction.policy_words import policy_of_words, policy_words
from hybridkv.eviction_record import EvictionRecord
from hybridkv.parallel.events import Channel, Event
from hybridkv.parallel.group import Group, GroupError
from hybridkv.parallel.layers import Vocabulary
from hybridkv.request import Request

NOT_OVER_RANKS = "over several ranks {what} is not available yet: use tp=1"
ENDS = (None, "stop", "length", "abort", "error")  # finish reasons by number, as rank 0 tells them
OF_RANK_0 = object()  # stands for a grammar that rank 0 follows

Found = TypeVar("Found")


class RankScores(list[Tensor]):
    """Stands for what all ranks' heads look at while a text is read again: each has its own under this number. It has
    no tensors itself, since what a caller of rank 0 did to those the others would not hear of.
    """

    def __init__(self, engine: RankCalls, number: int) -> None:
        super().__init__()
        self.engine, self.number = engine, number


class RankCalls(Engine):
    """The calls of an engine of one rank of several. What LockStepEngine adds are steps."""

    in_parts = True
    group: Group
    channel: Channel
    agreed: RanksAgree
    vocabulary: Vocabulary
    whole: WholeCache | None  # what this rank's cache is a part of
    failure: GroupError | None
    _events: list[Event]  # since the last step
    _known: weakref.WeakValueDictionary[int, Request]
    _to_hold: dict[int, Request]  # not on rank 0, where their callers have them
    _there: set[int]  # rank 0: numbers of what the others hold so
    _gone: deque[int]  # those that no caller has any more; whichever thread finds that adds them
    _scores: dict[int, list[Tensor]]  # by the numbers of RankScores: [g, L] of each layer of this rank

    def fail(self, problem: BaseException) -> NoReturn:
        """End the group."""
        raise NotImplementedError

    def _check_alive(self) -> None:
        raise NotImplementedError

    @property
    def schema(self) -> CacheSchema:
        return super().schema if self.whole is None else self.whole.schema

    @property
    def cache_bytes(self) -> int:
        return super().cache_bytes * self.group.size

    # ---- rank 0 tells, all do

    def _call(self, event: Event, work: Callable[[], Found]) -> Found:
        """Make a call on every rank. HybridKVError is the caller's, whatever else is raised ends the group."""
        self._check_alive()
        self.calls.check_owner()
        if self.calls.active:
            raise RequestError("a call came inside another call of the same engine; make it after that call")
        events = [*self._news(), event]
        problem: BaseException
        try:
            with self.channel.telling("call", events):
                return self._alike(work)
        except GroupError as raised:
            problem = raised
        except HybridKVError:
            raise
        except BaseException as raised:
            problem = raised
        self.fail(problem)

    def _alike(self, work: Callable[[], Found]) -> Found:
        """What `work` gives, or the HybridKVError that it raises on all ranks. GroupError: it did on some."""
        try:
            found, problem = work(), None
        except GroupError:
            raise
        except HybridKVError as raised:
            found, problem = None, raised
        failed = self.group.all_gather(torch.tensor([int(problem is not None)])).flatten().tolist()
        if problem is None:
            if any(failed):
                raise GroupError(f"a call failed on rank {failed.index(1)} and not on rank {self.group.rank}")
            return found  # type: ignore[return-value]
        if not all(failed):
            raise GroupError(f"a call failed on rank {self.group.rank} and not on all: {problem}")
        raise problem

    def _all_or_none(self, check: Callable[[], Found]) -> Found:
        """What a check gives that takes nothing, or RequestError: it fails on some rank."""
        found, problem = None, None
        try:
            found = check()
        except GroupError:
            raise
        except HybridKVError as raised:
            problem = raised
        refused = self.group.all_gather(torch.tensor([int(problem is not None)])).flatten().tolist()
        if problem is not None:
            raise problem
        if any(refused):
            raise RequestError(f"what was sent does not fit the part of rank {refused.index(1)}; nothing was taken")
        return found  # type: ignore[return-value]

    def _do_call(self, event: Event) -> None:
        """One of the others makes the call that rank 0 makes."""
        do = getattr(self, f"_{event['event']}")
        try:
            self._alike(partial(do, event))
        except GroupError:
            raise
        except HybridKVError:
            pass  # which rank 0's caller hears of

    # ---- eviction of held caches

    def evict_held(
        self,
        request: Request,
        eviction: EvictionConfig,
        scores: Sequence[Tensor] | None = None,
        ranges: Sequence[tuple[int, int]] = (),
        seen: bool = False,
    ) -> int:
        """As `Engine.evict_held`; returns the pages that went back on this rank. Refused: scores that `replay` did not
        give, which the others do not have.
        """
        number = None if scores is None else self._own_scores(scores).number
        if self._without_cache(request):
            return super().evict_held(request, eviction, None, ranges, seen)
        event = {
            "event": "evict_held",
            "number": request.order,
            "eviction": eviction_words(eviction),
            "scores": number,
            "ranges": [list(each) for each in ranges],
            "seen": seen,
        }
        return self._call(event, partial(self._evict_held, event))

    def _evict_held(self, event: Event) -> int:
        eviction = eviction_of_words(event["eviction"])
        assert eviction is not None
        self._may_share(eviction)
        scores = None if event["scores"] is None else self._scores[event["scores"]]
        ranges = [(begin, end) for begin, end in event["ranges"]]
        return super().evict_held(self._named(event), eviction, scores, ranges, event["seen"])

    def bring_back(self, request: Request) -> bool:
        """As `Engine.bring_back`, on all ranks or on none."""
        if self._without_cache(request):
            return False
        event = {"event": "bring_back", "number": request.order}
        return self._call(event, partial(self._bring_back, event))

    def _bring_back(self, event: Event) -> bool:
        there = super().bring_back(self._named(event))
        found = self.group.all_gather(torch.tensor([int(there)])).flatten().tolist()
        if len(set(found)) > 1:
            raise GroupError(f"a held cache has come back on rank {found.index(1)} and not on rank {found.index(0)}")
        return there

    def replay(self, request: Request, part: ReplayPart, scores: list[Tensor] | None = None) -> list[Tensor]:
        """As `Engine.replay`. What is returned stands for the scores of all ranks (`RankScores`), which keep them as
        long as a caller of rank 0 has it.
        """
        given = None if scores is None else self._own_scores(scores)
        if self._without_cache(request):
            return super().replay(request, part)  # which says why it cannot be
        tokens, at = self.check_tokens([*part.prompt, *part.text]), len(part.prompt)
        found = RankScores(self, next(self.numbers)) if given is None else given
        event = {
            "event": "replay",
            "number": request.order,
            "prompt": tokens[:at],
            "text": tokens[at:],
            "scores": found.number,
            "first": given is None,
        }
        self._call(event, partial(self._replay, event))
        if given is None:
            self._there.add(found.number)
            weakref.finalize(found, self._gone.append, found.number)
        return found

    def _replay(self, event: Event) -> None:
        number, before = event["scores"], None
        if event["first"]:
            self.numbers = itertools.count(number + 1)
        else:
            before = self._scores[number]
        part = ReplayPart(event["prompt"], event["text"])
        with Engine.changing(self):
            found = replay(self, self._named(event), part, before, self._alike)
        rows, ranks = torch.cat(found), None if self.evictor is None else self.evictor.ranks  # [layers * g, L]
        rows = rows if ranks is None else ranks.strongest(rows)
        self._scores[number] = list(rows.split(len(found[0])))

    def _own_scores(self, scores: Sequence[Tensor]) -> RankScores:
        """Those that all ranks have, or RequestError: not what `replay` of this engine gave."""
        if not isinstance(scores, RankScores) or scores.engine is not self or not self._has(scores.number):
            raise RequestError(NOT_OVER_RANKS.format(what="eviction or replay by scores from outside"))
        return scores

    def _has(self, number: int) -> bool:
        """Whether the scores of this number are there; those of a copy may be gone."""
        return number in self._scores and number not in self._gone

    def evict_turns(self, request: Request, turns: Sequence[tuple[int, int]], budget: int) -> dict[str, float]:
        """As `Engine.evict_turns`."""
        if self._without_cache(request):
            return super().evict_turns(request, turns, budget)
        event = {"event": "evict_turns", "number": request.order, "turns": [list(t) for t in turns], "budget": budget}
        return self._call(event, partial(self._evict_turns, event))

    def _evict_turns(self, event: Event) -> dict[str, float]:
        self._become_uneven()  # heads keep what they have of a turn, which need not be equally much
        turns = [(begin, end) for begin, end in event["turns"]]
        return super().evict_turns(self._named(event), turns, event["budget"])

    def _may_share(self, eviction: EvictionConfig | None) -> None:
        """From the first budget on that heads may share, ranks hold unlike numbers of pages."""
        if eviction is not None and not self.agreed.uneven:
            asked = [find_policy(eviction.policy, seen, eviction.scope) for seen in (True, False)]
            self._become_uneven(any(policy.spread == "heads" for policy in asked))

    def _become_uneven(self, it_is: bool = True) -> None:
        """From here on the fullest rank decides. What a rank gives up for its pages is its own choice then, so nothing
        is kept for others any more.
        """
        if it_is and not self.agreed.uneven:
            self.agreed.uneven = True
            if self.manager.reuse is not None:
                self.manager.reuse.stop()

    def drop_queries(self, request: Request) -> None:
        """As `Engine.drop_queries`."""
        if not self._without_cache(request):
            event = {"event": "drop_queries", "number": request.order}
            self._call(event, partial(self._drop_queries, event))

    def _drop_queries(self, event: Event) -> None:
        super().drop_queries(self._named(event))

    def evictions_of(self, request: Request) -> dict[int, EvictionRecord]:
        """As `Engine.evictions_of`: the lists of all ranks' heads, joined."""
        if not request.evictions:  # nor has any other rank a record
            return super().evictions_of(request)
        self._check_there(request)
        event = {"event": "evictions_of", "number": request.order}
        return self._call(event, partial(self._evictions_of, event))

    def _evictions_of(self, event: Event) -> dict[int, EvictionRecord]:
        request = self._named(event)
        found = super().evictions_of(request)
        assert self.whole is not None
        # `going`: records without a cache are those of a request on its way
        part = Session("", {}, list(request.tokens), request.prompt_tokens, evictions=found, going={})
        return self.whole.joined(self.group, part).evictions

    # ---- forks, and what is saved

    def session(self, request: Request | None, conversation: Mapping[str, Any] | None = None) -> Session:
        """As `Engine.session`: the parts of all ranks, joined."""
        if request is None or self._without_cache(request):
            return super().session(request, conversation)
        event = {"event": "session", "number": request.order}
        found = self._call(event, partial(self._session, event))
        return replace(found, conversation=dict(conversation or {}))

    def _session(self, event: Event) -> Session:
        part = self._alike(lambda: super(RankCalls, self).session(self._named(event)))
        assert self.whole is not None
        return self.whole.joined(self.group, part)

    def restore_held(self, session: Session) -> Request:
        """As `Engine.restore_held`."""
        self.check_session_model(session.model, session.about, session.files)  # before its bytes are sent
        session = as_own(self.manager, session)
        event = {"event": "restore_held", "restored": next(self.numbers)}
        return self._call(event, partial(self._restore_held, event, session))

    def _restore_held(self, event: Event, session: Session | None = None) -> Request:
        self.numbers = itertools.count(event["restored"])
        assert self.whole is not None
        part = self.whole.cut(self.group, session)
        part = self._all_or_none(partial(check_session, self.manager, part, about(self)))
        self._become_uneven(any(not record.alike for record in part.evictions.values()))
        return self._holding(super().restore_held(part))

    def fork_held(self, request: Request) -> Request:
        """As `Engine.fork_held`."""
        if self._without_cache(request):
            return super().fork_held(request)
        event = {"event": "fork_held", "number": request.order, "fork": next(self.numbers)}
        return self._call(event, partial(self._fork_held, event))

    def _fork_held(self, event: Event) -> Request:
        self.numbers = itertools.count(event["fork"])
        return self._holding(super().fork_held(self._named(event)))

    def _holding(self, request: Request) -> Request:
        """The others hold a request as long as a caller of rank 0 has it, its cache or not, and does not give it up."""
        self._known[request.order] = request
        if self.group.rank:
            self._to_hold[request.order] = request
        else:
            self._there.add(request.order)
            weakref.finalize(request, self._gone.append, request.order)
        return request

    def _news(self) -> list[Event]:
        """What the others have not been told yet."""
        events, self._events = self._events, []
        gone = [self._gone.popleft() for _ in range(len(self._gone))]
        events += [{"event": "abort", "number": number} for number in gone if number in self._there]
        self._there.difference_update(gone)
        for number in gone:
            self._scores.pop(number, None)
        return events

    def _check_there(self, request: Request) -> None:
        """RequestError if the others have forgotten a request."""
        if request.order not in self._there:
            raise RequestError(
                "over several ranks nobody knows this request any more: it was not added with hold, a later turn has "
                "taken its cache over, or it was given up"
            )

    def _without_cache(self, request: Request) -> bool:
        """Whether no rank holds the request's cache: a later turn took it over, it was given up, or there is none yet.
        Rank 0 answers alone then, since the others may have forgotten the request.
        """
        self._check_alive()
        return request not in self.scheduler.held

    def _named(self, event: Event) -> Request:
        found = self._known.get(event["number"])
        if found is None:
            raise RequestError("the request's cache is not held any more: there is nothing to change")
        return found

    # ---- what is kept for others

    def check_keeps(self) -> None:
        """As `Engine.check_keeps`. Refused, too, where heads share a budget: ranks then keep nothing for others."""
        if self.agreed.uneven or self.manager.reuse is None:
            raise RequestError(
                "over several ranks nothing is kept for other prompts where heads share a budget, or without reuse; "
                "use budgets that are even (policy='snapkv'), or tp=1"
            )

    def pin(self, salt: bytes, tokens: Sequence[int]) -> Pin | None:
        """As `Engine.pin`."""
        event = {"event": "pin", "salt": salt.hex(), "tokens": list(tokens)}
        return self._call(event, partial(self._pin, event))

    def _pin(self, event: Event) -> Pin | None:
        return super().pin(bytes.fromhex(event["salt"]), event["tokens"])

    def pin_when_read(self, request: Request) -> None:
        """As `Engine.pin_when_read`."""
        event = {"event": "pin_when_read", "number": request.order}
        self._call(event, partial(self._pin_when_read, event))

    def _pin_when_read(self, event: Event) -> None:
        super().pin_when_read(self._named(event))

    def unpin(self, pinned: Pin) -> None:
        """As `Engine.unpin`. All ranks have their pins in one order."""
        pins = [] if self.manager.reuse is None else self.manager.reuse.pins
        if pinned in pins:
            event = {"event": "unpin", "place": pins.index(pinned)}
            self._call(event, partial(self._unpin, event))

    def _unpin(self, event: Event) -> None:
        assert self.manager.reuse is not None
        super().unpin(self.manager.reuse.pins[event["place"]])

    def forget(self, salt: bytes | None = None, tokens: Sequence[int] | None = None) -> None:
        """As `Engine.forget`."""
        event = {"event": "forget", "salt": None if salt is None else salt.hex(), "tokens": tokens}
        self._call(event, partial(self._forget, event))

    def _forget(self, event: Event) -> None:
        super().forget(None if event["salt"] is None else bytes.fromhex(event["salt"]), event["tokens"])

    # ---- logits of a given text

    def score(self, tokens: Sequence[int], prefill: int | None = None, chunk: int | None = None) -> Tensor:
        """As `Engine.score`."""
        event = {"event": "score", "tokens": self.check_tokens(tokens), "prefill": prefill, "chunk": chunk}
        return self._call(event, partial(self._score, event))

    def _score(self, event: Event) -> Tensor:
        default = None if self.evictor is None else self.evictor.default
        self._may_share(default)
        return super().score(event["tokens"], event["prefill"], event["chunk"])

    def score_after(self, request: Request, tokens: Sequence[int]) -> Tensor:
        """As `Engine.score_after`."""
        if self._without_cache(request):
            return super().score_after(request, tokens)
        event = {"event": "score_after", "number": request.order, "tokens": self.check_tokens(tokens)}
        return self._call(event, partial(self._score_after, event))

    def _score_after(self, event: Event) -> Tensor:
        return super().score_after(self._named(event), event["tokens"])

    def whole_rows(self, logits: Tensor) -> Tensor:
        return self.vocabulary.gather(logits)

    # ---- what a grammar, or a hook, says on rank 0

    def see(self, request: Request, token: int) -> Update:
        """As `Engine.see`. Where the answer follows a grammar, rank 0 says whether it ends."""
        if request.following is None:
            return super().see(request, token)
        told = torch.zeros(2, dtype=torch.int64)
        update = Update(request, token, "")
        if self.group.rank == 0:
            update = super().see(request, token)
            told = torch.tensor([ENDS.index(request.finish_reason), int(request.end_token)])
        reason, end_token = self.group.broadcast(told).tolist()
        if self.group.rank:
            request.tokens.append(token)
            request.finish_reason, request.end_token = ENDS[reason], bool(end_token)
            request.error = "its grammar failed on rank 0" if ENDS[reason] == "error" else None
        return update


def of_rank_0(tokens: list[int], row: Tensor) -> NoReturn:
    """Stands for a logits hook, which rank 0 runs."""
    raise AssertionError("rank 0 draws the tokens of requests with a logits hook")


def params_words(request: Request) -> dict[str, Any]:
    """A request's parameters in JSON values, how it uses what others have read, and, of code, that it is there."""
    params = replace(request.params, structured_outputs=None, logits_hook=None)
    return {
        "params": asdict(params),  # resolved: defaults of rank 0 may have been changed
        "hooked": request.params.logits_hook is not None,
        "bound": request.following is not None,
        "banned": list(request.banned),
        "reads": request.reads,
        "writes": request.writes,
        "salt": request.salt.hex(),
        "marks": [list(mark) for mark in request.marks],
    }


def take_words(request: Request, event: Event) -> None:
    """What an event that `params_words` is part of says of a request beside its parameters."""
    request.reads, request.writes = event["reads"], event["writes"]
    request.salt, request.banned = bytes.fromhex(event["salt"]), tuple(event["banned"])
    request.following = OF_RANK_0 if event["bound"] else None


def params_of_words(event: Event) -> SamplingParams:
    """The parameters of an event that `params_words` is part of."""
    given: dict[str, Any] = dict(event["params"])
    given["logit_bias"] = {int(token): value for token, value in given["logit_bias"].items()}
    for name in ("bad_words", "stop", "stop_token_ids"):
        given[name] = tuple(given[name])
    given["logits_hook"] = of_rank_0 if event["hooked"] else None
    return SamplingParams(**given)


def eviction_words(eviction: EvictionConfig | None) -> dict[str, Any] | None:
    """What a request keeps in JSON values, or RequestError: a policy of one's own."""
    return None if eviction is None else vars(eviction) | {"policy": policy_words(eviction.policy)}


def eviction_of_words(found: dict[str, Any] | None) -> EvictionConfig | None:
    """What `eviction_words` was given."""
    return None if found is None else EvictionConfig(**found | {"policy": policy_of_words(found["policy"])})
