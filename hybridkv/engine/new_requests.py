"""New requests: what a caller asks for, checked against the model and its cache, before anything waits or runs.

A request is in no queue yet; `Engine.add` puts it there.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import replace
from operator import index
from typing import TYPE_CHECKING

from hybridkv.cache.checkpoints import KINDS, MOST_CLIENT_MARKS
from hybridkv.config import EvictionConfig, SamplingParams, StructuredOutputs, is_whole, shown
from hybridkv.engine.ending import longest
from hybridkv.engine.held import check_ended
from hybridkv.engine.room import held_tokens
from hybridkv.errors import RequestError
from hybridkv.eviction import find_policy
from hybridkv.request import Request, RequestKey
from hybridkv.text.constraint import Constraint, Thoughts
from hybridkv.text.grammar import Grammars, grammar_text
from hybridkv.text.stream import TextStream
from hybridkv.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from hybridkv.engine.engine import Engine

INHERIT = object()  # "what the engine was opened with"
CACHE_USES = {True: (True, True), False: (False, False), "read": (True, False), "write": (False, True)}


def checked_request(
    engine: Engine,
    tokens: Sequence[int],
    params: SamplingParams,
    hold: bool = False,
    eviction: EvictionConfig | int | None | object = INHERIT,
    prefix: Request | None = None,
) -> Request:
    """A request that is in no queue yet, checked: it can run here if it is alone. Arguments as of `add`."""
    if not isinstance(params, SamplingParams):
        raise RequestError(f"sampling parameters must be SamplingParams, not {type(params).__name__}")
    _check_params(engine, params)
    params = compiled(engine.grammars, params)
    if params.n > 1 and hold:
        raise RequestError(f"the cache of {params.n} answers cannot be held for a next turn; ask for n=1")
    request = new_request(engine, check_tokens(tokens, engine.vocab), params, hold, resolve_eviction(engine, eviction))
    if prefix is not None:
        _begin_with(request, prefix)
    _check_fits(engine, request)
    request.bad_words = bad_word_tokens(params.bad_words, engine.tokenizer)
    for token in (token for word in request.bad_words for token in word if token >= engine.vocab):
        raise RequestError(f"a bad word has token id {token}, which is outside the vocabulary of {engine.vocab}")
    return request


def sibling_of(engine: Engine, request: Request, i: int) -> Request:
    """Answer i to the same prompt. It is in no queue until the prompt has been read."""
    params = request.params
    seed = None if params.seed is None else params.seed + i
    sibling = new_request(engine, list(request.tokens), replace(params, seed=seed), eviction=request.eviction)
    sibling.bad_words, sibling.source, sibling.prefix = request.bad_words, request, request.prefix
    sibling.reads, sibling.writes, sibling.salt = request.reads, request.writes, request.salt
    return sibling


def _begin_with(request: Request, prefix: Request) -> None:
    """The request has the past of `prefix`, what was evicted from that included, or RequestError."""
    check_ended(prefix, "continued")
    before = prefix.prompt_tokens
    if request.tokens[:before] != prefix.tokens[:before]:
        raise RequestError(f"the prompt does not begin with the {before} tokens that it is to go on from")
    if request.eviction is not None:
        raise RequestError("what follows a held prefix is kept whole: leave out eviction, or pass None")
    request.prefix, request.evictions = prefix, dict(prefix.evictions)


def new_request(
    engine: Engine,
    tokens: list[int],
    params: SamplingParams,
    hold: bool = False,
    eviction: EvictionConfig | None = None,
) -> Request:
    """A request that is in no queue yet."""
    params = params.resolved(engine.sampling_defaults)
    seed = secrets.randbits(63) if params.seed is None else params.seed
    number = next(engine.numbers)
    text = TextStream(engine.tokenizer, params.stop)
    ends_at = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else engine.eos_ids)
    asked = params.structured_outputs if isinstance(params.structured_outputs, Constraint) else Constraint()
    return Request(
        RequestKey(number),
        number,
        tokens,
        len(tokens),
        params,
        text,
        seed,
        hold,
        prompt_logprobs=[] if params.prompt_logprobs is None else [None],
        ends_at=ends_at,
        banned=asked.banned,
        following=asked.start(frozenset(i for i in ends_at if i < engine.vocab)) if asked.follows else None,
        eviction=eviction,
    )


def compiled(grammars: Grammars, params: SamplingParams, thoughts: Thoughts | None = None) -> SamplingParams:
    """With what the answer must look like compiled, or RequestError. Any thread may call it, best before `add`:
    what takes time keeps no step waiting then.

    `thoughts`: of the answer, if it has any; they stay free.
    """
    asked = params.structured_outputs
    if not isinstance(asked, StructuredOutputs):
        return params
    what = f"structured_outputs.{asked.kind}"
    text = grammar_text(asked.kind, asked.given, what, thoughts is not None)
    constraint = Constraint(grammars.compile(text, what), thoughts, timer=grammars.timer)
    return replace(params, structured_outputs=constraint)


def _check_params(engine: Engine, params: SamplingParams) -> None:
    """What can be asked of this model, or RequestError."""
    if params.stop and engine.tokenizer is None:
        raise RequestError("stop strings need a tokenizer, which this model does not have; use stop_token_ids")
    if params.bad_words and engine.tokenizer is None:
        raise RequestError("bad_words need a tokenizer, which this model does not have; use logit_bias")
    for name, tokens in (("logit_bias", params.logit_bias), ("stop_token_ids", params.stop_token_ids)):
        for token in tokens:
            if token >= engine.vocab:
                raise RequestError(
                    f"token id {token} of {name} is outside the vocabulary of {engine.vocab}: ids go from 0 to "
                    f"{engine.vocab - 1}"
                )


def resolve_eviction(
    engine: Engine, asked: EvictionConfig | int | None | object, replays: bool = False
) -> EvictionConfig | None:
    """What a request that asks for this keeps, or HybridKVError. Any thread may call it.

    `replays`: whether its text can be read once more for the scores (policy replay).
    """
    found = _find_eviction(engine, asked)
    if found is not None and not replays and find_policy(found.policy).needs_replay:
        raise RequestError(
            "policy 'replay' reads a text once more after it was read, which is done for documents (LLM.compress, "
            "hybridkv compress) and at the end of a conversation's turn; choose another policy for a single prompt"
        )
    return found


def _find_eviction(engine: Engine, asked: EvictionConfig | int | None | object) -> EvictionConfig | None:
    if asked is INHERIT:
        return engine.evictor.default if engine.evictor is not None else None
    if asked is None:
        return None
    if not isinstance(asked, EvictionConfig) and not is_whole(asked):
        raise RequestError(
            f"eviction must be an EvictionConfig, a budget in tokens, or None, not {type(asked).__name__}"
        )
    if engine.evictor is None and engine.manager.schema.compressed:
        raise RequestError("this model compresses its cache itself and never evicts; leave out eviction")
    if engine.evictor is None or (engine.evictor.default is None and not engine.manager.query_buffers.count):
        raise RequestError(
            "the queries that choose what to keep are not stored in this cache; to evict, open the model with "
            "CacheConfig(budget=...), or with query_buffers=1 or more"
        )
    found = asked if isinstance(asked, EvictionConfig) else engine.evictor.with_budget(asked)  # type: ignore[arg-type]
    engine.evictor.check(found, engine.manager)
    return found


def _check_fits(engine: Engine, request: Request) -> None:
    """Whether the request can run if it is alone, or RequestError."""
    alone, limit = engine.tokens_alone, longest(engine, request)
    if len(request.tokens) >= limit:
        raise RequestError(
            f"the prompt has {len(request.tokens)} tokens, the context holds {limit} and needs room for an "
            "answer; shorten the prompt or raise max_context or memory"
        )
    held = held_tokens(engine.scheduler, request, len(request.tokens) + 1)
    if held > alone:
        raise RequestError(
            f"the pools hold {alone} tokens of one request, and {held} are needed at once to read this prompt; "
            "give more memory, or lower budget or step_tokens"
        )


def check_tokens(tokens: Sequence[int], vocab: int) -> list[int]:
    """Plain ints, whatever kind of whole numbers they came as."""
    plain = type(tokens) is list and set(map(type, tokens)) <= {int}  # as tokenizers give them, many at a time
    try:
        found = list(tokens) if plain else [_whole(token) for token in tokens]
    except TypeError:
        raise RequestError("a prompt must be text or whole numbers, the token ids") from None
    if not found:
        raise RequestError("the prompt has no tokens; give at least one")
    for token in (min(found), max(found)):
        if not 0 <= token < vocab:
            raise RequestError(f"token id {token} is outside the vocabulary of {vocab}")
    return found


def cache_uses(cache: bool | str) -> tuple[bool, bool]:
    """Whether a request begins with what others have read, and they with what it reads; or RequestError."""
    if cache not in CACHE_USES:
        raise RequestError(f"cache must be True, False, 'read' or 'write', not {shown(cache)}")
    return CACHE_USES[cache]


def checked_marks(marks: Sequence[tuple[int, str]], tokens: int) -> tuple[tuple[int, str], ...]:
    """Marks of a prompt, or RequestError."""
    for at, kind in marks:
        if not is_whole(at) or not 0 <= at <= tokens or kind not in KINDS:
            raise RequestError(f"a mark must be (position within {tokens} tokens, one of {KINDS}), not {(at, kind)}")
    if sum(kind == "client" for _, kind in marks) > MOST_CLIENT_MARKS:
        raise RequestError(f"a prompt has at most {MOST_CLIENT_MARKS} marks of its client's own")
    return tuple(marks)


def _whole(token: object) -> int:
    if isinstance(token, bool):
        raise TypeError("a truth value is no token id")
    return index(token)  # type: ignore[arg-type]


def bad_word_tokens(words: Sequence[str], tokenizer: Tokenizer | None) -> tuple[tuple[int, ...], ...]:
    """Token sequences of texts that must not appear: each at the beginning of a word and inside one, as vLLM has it."""
    found: dict[tuple[int, ...], None] = {}  # each once, in order
    if tokenizer is None:
        return ()
    for word in words:
        for text in (word.lstrip(), " " + word.lstrip()):
            # after some token: an answer is the middle of a text from its beginning on
            found[tuple(tokenizer.encode(text, special=False, after=-1))] = None
    return tuple(ids for ids in found if ids)
