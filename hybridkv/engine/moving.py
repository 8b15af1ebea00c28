"""A request that moves: taken out of one engine, in the middle of its answer or before it, and gone on with in another.

    export   a copy on the host, as a Session: tokens, cache, records of evictions; and in `going` its parameters, seed
             and log probabilities. The request stays as it is. Who moves it ends it here once it has arrived there
    resume   the session's cache is held, as any held cache, and a request that continues it waits for its turn. The
             tokens of its answer are seen again, one after the other, without computing anything

So text, stop strings and grammar are where they were, and random numbers need no state: a draw is counted by seed and
position (sampler.py). What a request cannot take along is code: a logits hook, a compiled grammar, a policy of one's
own. Who resumes it gives such parameters again.

Without its cache (it waited, was preempted, stands where it cannot be shared, or lost the queries that its next
eviction needs) it moves as well: then its tokens are read again, and the same entries are evicted.

Over several ranks each does this with its part of the cache, and rank 0 alone with what is not cut (rank_moves.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from hybridkv.cache.eviction_words import eviction_as_json, eviction_of_json
from hybridkv.cache.session import ENDS, Session, check_records, check_session
from hybridkv.cache.snapshot import Snapshot, lent_keys, snapshot_request
from hybridkv.cache.snapshot_file import NotWellFormed
from hybridkv.config import EvictionConfig, SamplingParams, is_whole
from hybridkv.engine import held
from hybridkv.engine.stats import stats_of
from hybridkv.errors import HybridKVError, RequestError
from hybridkv.request import Request, Status, TokenLogprobs

if TYPE_CHECKING:
    from hybridkv.engine.engine import Engine

CODE = ("logits_hook", "structured_outputs")  # parameters that are code, or were compiled
AS_SENT = object()  # "the eviction settings that it came with"


# ---- out


def export(engine: Engine, request: Request, cache: bool | None = None) -> Session:
    """A copy of a request on the host, or RequestError: it has failed, or a step of it is in flight.

    `cache`: whether its cache goes along, as another rank has found; None: as is found here.
    """
    if request.params.n > 1 or request.source is not None:
        raise RequestError("several answers to one prompt share its cache and cannot move; ask for n=1")
    if request.unseen:
        raise RequestError("a step of this request is in flight; call engine.drain() first")
    engine.scheduler.settle(request)
    if request.finish_reason not in (None, *ENDS):
        raise RequestError(f"a request that failed cannot move: {request.error}")
    goes = _has_cache(engine, request) if cache is None else cache
    snapshot = _snapshot(engine, request) if goes else None
    scored = snapshot is not None or not request.answer_tokens
    return Session(
        engine.manager.model_fingerprint(),
        held.about(engine),
        list(request.tokens),
        request.prompt_tokens,
        request.finish_reason or "abort",  # what it is for one who does not go on with it
        request.text.text,
        request.text.stopped,
        dict(request.evictions),
        snapshot,
        {},
        request.policy,
        _going(request, scored),
        engine.manager.model_files(),
    )


def _has_cache(engine: Engine, request: Request) -> bool:
    """Whether there is a cache, and it stands where it can go on elsewhere."""
    manager = engine.manager
    if request.key not in manager.slot_of and request.key not in manager.frozen:
        return False
    position = manager.position(request.key)
    if not position or position % manager.schema.share_every or position >= len(request.tokens):
        return False
    return not must_read_all(request)


def _snapshot(engine: Engine, request: Request) -> Snapshot | None:
    """Its cache; None: it would be of no use."""
    manager = engine.manager
    snapshot, lent = snapshot_request(manager, request.key, pinned=True), lent_keys(manager)
    if _chooses_again(request, snapshot.position):
        return snapshot if lent <= snapshot.states.keys() else None
    return replace(snapshot, states={key: t for key, t in snapshot.states.items() if key not in lent})


def _chooses_again(request: Request, position: int) -> bool:
    """Whether an eviction to come may choose by its last queries."""
    eviction = request.eviction
    if eviction is None:
        return False
    held = request.hold and not request.finished
    return bool(eviction.bounded or eviction.decode_every or held) or position < request.prompt_tokens


def _going(request: Request, scored: bool) -> dict[str, Any]:
    params = request.params
    plain = {f.name: getattr(params, f.name) for f in fields(params) if f.name not in CODE}
    plain["logit_bias"] = {str(token): value for token, value in params.logit_bias.items()}
    for name, value in plain.items():
        plain[name] = list(value) if isinstance(value, tuple) else value
    return {
        "params": plain,
        "code": [name for name in CODE if getattr(params, name) is not None],
        "seed": request.seed,
        "eviction": eviction_as_json(request.eviction),
        "logprobs": [_scores(each) for each in request.logprobs],
        "prompt_logprobs": [_scores(each) for each in request.prompt_logprobs] if scored else [],
    }


def _scores(found: TokenLogprobs | None) -> list[Any] | None:
    """Numbers as texts: JSON has no infinity, and these keep every bit."""
    return None if found is None else [repr(found.token), {str(token): repr(x) for token, x in found.top.items()}]


# ---- in


def resume(
    engine: Engine,
    session: Session,
    params: SamplingParams | None = None,
    hold: bool = False,
    eviction: EvictionConfig | int | None | object = AS_SENT,
    salt: bytes = b"",
    cache: bool | str = True,
) -> Request:
    """A request that goes on with what was exported; see Engine.resume."""
    session = check_fits(engine, session)
    request = asked(engine, session, params, hold, eviction, salt, cache)
    if request.finish_reason is None:
        begin(engine, request, session)
    return request


def asked(
    engine: Engine,
    session: Session,
    params: SamplingParams | None,
    hold: bool,
    eviction: EvictionConfig | int | None | object,
    salt: bytes,
    cache: bool | str,
    see: Callable[[Request, int], object] | None = None,
) -> Request:
    """The request where it stands in its answer, in no queue yet, or RequestError. It has ended if nothing is left.

    Nothing is taken, and the session's cache is not looked at. `see`: in place of the engine's own.
    """
    going = session.going
    if going is None:
        raise RequestError("the session's request has ended, and does not say how it would go on; restore it instead")
    try:
        kept = _read(going, session)
        if params is None:
            params = _params(going)
        if eviction is AS_SENT:
            eviction = eviction_of_json(going.get("eviction"), "Engine.resume(session, eviction=EvictionConfig(...))")
    except NotWellFormed as problem:
        raise RequestError(f"the request that was sent is not well-formed: {problem}") from None
    if session.evictions and engine.evictor is None:
        raise RequestError("the request's cache was evicted, and this model was opened without a budget")
    prompt, answer = session.tokens[: session.prompt_tokens], session.tokens[session.prompt_tokens :]
    if params.n > 1:
        raise RequestError("one answer was sent, and cannot go on as several; ask for n=1")
    request = engine.checked_request(prompt, params, hold, eviction)
    request.reads, request.writes = engine.cache_uses(cache)
    request.seed = kept.seed if params.seed is None else params.seed
    request.salt = salt
    see_again(engine, request, session, engine.see if see is None else see)
    if request.params.logprobs is not None and len(kept.logprobs) != len(answer):
        raise RequestError("log probabilities were asked for, and those of the answer so far were not sent")
    request.logprobs = kept.logprobs if request.params.logprobs is not None else []
    if kept.prompt_logprobs and request.params.prompt_logprobs is not None and session.snapshot is not None:
        request.prompt_logprobs = kept.prompt_logprobs
    if request.finish_reason is not None:
        _end(engine, request)
    return request


def check_fits(engine: Engine, session: Session) -> Session:
    """The session as this model's own, if its cache and records can go on here, but for room, or RequestError."""
    session = check_session(engine.manager, session, held.about(engine))
    if session.snapshot is None:
        check_records(engine.manager, session, 0, None)
    return session


def begin(engine: Engine, request: Request, session: Session) -> None:
    """A request of `asked` waits for its turn, and the session's cache is held for it; or RequestError."""
    scheduler = engine.scheduler
    before = list(scheduler.held)
    try:
        if session.snapshot is not None and not must_read_all(request):
            request.continues = held.restore_held(engine, session)
        scheduler.add(request)
    except BaseException:  # an interrupt: nobody would go on with the cache
        if request not in scheduler.waiting:
            for each in [each for each in scheduler.held if each not in before]:
                scheduler.release_held(each)
        raise


def see_again(engine: Engine, request: Request, session: Session, see: Callable[[Request, int], object]) -> None:
    """The answer so far, as if it had just been sampled; RequestError where it would have become another one."""
    engine.check_tokens(session.tokens)
    request.evictions, request.policy = dict(session.evictions), session.policy
    request.limit = engine.limit(request)
    answer = session.tokens[session.prompt_tokens :]
    for i, token in enumerate(answer):
        see(request, token)
        if request.finish_reason == "error":
            raise RequestError(f"the answer that was sent does not fit: {request.error}")
        if request.finish_reason is not None and i + 1 < len(answer):
            raise RequestError("the answer that was sent would have ended before its last token with these parameters")
    if not session.text.startswith(request.text.text):
        raise RequestError("the answer that was sent has another text here: the tokenizers are not the same")


def must_read_all(request: Request) -> bool:
    """Whether it has to be read from its beginning: logprobs of its prompt are asked for, and not known."""
    asked = request.params.prompt_logprobs is not None
    return asked and len(request.prompt_logprobs) < request.prompt_tokens


def _end(engine: Engine, request: Request) -> None:
    """Nothing is left to do: its last token has ended it."""
    request.text.finish()
    request.cached_tokens = request.prompt_tokens  # nothing of it was computed here
    request.stats = stats_of(request, engine.manager, engine.schema)
    request.status, request.following = Status.FINISHED, None


# ---- what was sent, checked


class _Kept:
    """Of a request that was sent: what its tokens do not say."""

    def __init__(self, seed: int, logprobs: list[TokenLogprobs], prompt_logprobs: list[TokenLogprobs | None]) -> None:
        self.seed, self.logprobs, self.prompt_logprobs = seed, logprobs, prompt_logprobs


def _read(going: dict[str, Any], session: Session) -> _Kept:
    seed = going.get("seed")
    if not is_whole(seed) or not 0 <= seed < 1 << 63:  # type: ignore[operator]
        raise NotWellFormed("it has no seed")
    own, prompt = ([_scores_of(each) for each in _listed(going, name)] for name in ("logprobs", "prompt_logprobs"))
    if len(own) not in (0, len(session.tokens) - session.prompt_tokens) or None in own:
        raise NotWellFormed("its log probabilities are not those of its answer")
    if len(prompt) not in (0, 1, session.prompt_tokens) or None in prompt[1:]:
        raise NotWellFormed("its log probabilities are not those of its prompt")
    return _Kept(seed, own, prompt)  # type: ignore[arg-type]


def _listed(going: dict[str, Any], name: str) -> list[Any]:
    found = going.get(name)
    if not isinstance(found, list):
        raise NotWellFormed(f"its {name} are not a list")
    return found


def _scores_of(found: Any) -> TokenLogprobs | None:
    if found is None:
        return None
    try:
        token, top = found
        return TokenLogprobs(float(token), {int(each): float(x) for each, x in top.items()})
    except (TypeError, ValueError, AttributeError):
        raise NotWellFormed("its log probabilities are not numbers") from None


def _params(going: dict[str, Any]) -> SamplingParams:
    if code := going.get("code"):
        raise RequestError(
            f"the request has {str(code)[:80]}, which is code and was not sent; give its parameters again: "
            "Engine.resume(session, params)"
        )
    plain = going.get("params")
    if not isinstance(plain, dict) or not isinstance(plain.get("logit_bias"), dict):
        raise NotWellFormed("it has no sampling parameters")
    try:
        bias = {int(token): value for token, value in plain["logit_bias"].items()}
        return SamplingParams(
            **{name: value for name, value in plain.items() if name not in CODE} | {"logit_bias": bias}
        )
    except (TypeError, ValueError, HybridKVError) as problem:
        raise NotWellFormed(f"its sampling parameters: {problem}") from None
