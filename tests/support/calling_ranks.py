"""What is asked of an engine between its steps, on one rank or several: for tests/parallel/test_calls.py."""

import gc
from dataclasses import replace
from functools import partial
from typing import Any

import tiny
import torch
from byte_tokenizer import byte_tokenizer
from evicting_ranks import CACHE, engine_of, lists_of
from torch import Tensor

from hybridkv.cache.session import Session
from hybridkv.config import EvictionConfig, SamplingParams
from hybridkv.engine.engine import Engine
from hybridkv.engine.lock_step import LockStepEngine
from hybridkv.engine.replay import ReplayPart
from hybridkv.errors import RequestError
from hybridkv.models.config import ModelConfig
from hybridkv.models.decoder import Model
from hybridkv.parallel.group import Alone, Group
from hybridkv.parallel.shard import Shard
from hybridkv.request import Request

TEXT = tiny.token_ids(400, seed=3)
GREEDY = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer", "maximum": 99}}, "required": ["a"]}


def run(group: Group | Alone, part: tuple[Model, ModelConfig, Shard], script: str) -> Any:
    """What the script gives on rank 0; what the others hold at the end of it."""
    settings: dict[str, Any] = {"cache": replace(CACHE, budget=48)} if script == "score" else {}
    if script in ("bound", "hooked"):
        settings["tokenizer"] = byte_tokenizer()
    if script == "bounds":
        settings["pages"] = 50  # 200 tokens, of a context of 320
    engine = engine_of(group, part, rows=16 if script in ("reused", "forgotten", "pinned") else None, **settings)
    found: Any = None
    if group.rank == 0:
        found = globals()[script](engine)
    if isinstance(engine, LockStepEngine):
        vars(engine)["_gives_up"] = lambda event: give_up(engine)
        if group.rank:
            engine.follow()
        else:
            with engine.channel.telling("end"):
                pass
        assert not group.rank or not engine._events, "it remembers what it never tells"
        assert not engine._to_hold or script != "prefixed", "it holds what no caller has"
        assert not engine._scores, "it has scores that no caller has"
    engine.manager.check_integrity()
    held = {r.order: lists_of(r) for r in engine.scheduler.held}
    return found, held, engine.scheduler.manager.free_slots


def finish(engine: Engine, *requests: Request) -> list[Any]:
    while not engine.idle:
        engine.step()
    every = [each for request in requests for each in (request, *request.siblings)]
    return [[request.error, request.generated, request.finish_reason, request.text.text] for request in every]


def bound(engine: Engine) -> list[Any]:
    """Answers that follow a grammar, beside others that do not."""
    asked: list[dict[str, Any]] = [
        {"structured_outputs": {"choice": ["yes", "no"]}, "temperature": 0},
        {"structured_outputs": {"json": SCHEMA}, "temperature": 1.0, "seed": 3},
        {"temperature": 0, "ignore_eos": True, "max_tokens": 9},
        {"structured_outputs": {"regex": "[ab]{3}c*"}, "temperature": 1.2, "seed": 5, "n": 2, "logprobs": 1},
        {"structured_outputs": {"regex": "[ab]{30}"}, "temperature": 0, "max_tokens": 7},
    ]
    added = [engine.add(TEXT[:20], SamplingParams(**{"max_tokens": 40, **each})) for each in asked]
    broken = engine.add(TEXT[:9], SamplingParams(max_tokens=9, structured_outputs={"choice": ["never seen"]}))
    engine.step()
    engine.step()
    broken.following.see = None  # its grammar fails from here on
    return finish(engine, *added, broken)


def hooked(engine: Engine) -> list[Any]:
    """A caller's function of rank 0, and one that fails."""

    def favour(tokens: list[int], row: Tensor) -> None:
        row[40 + len(tokens)] += 50

    def fail(tokens: list[int], row: Tensor) -> None:
        if len(tokens) == 2:
            raise ValueError("on purpose")

    params = [SamplingParams(max_tokens=6, temperature=0.0, logits_hook=hook) for hook in (favour, fail)]
    params += [SamplingParams(max_tokens=6, temperature=0.9, seed=4, n=2, logits_hook=favour), GREEDY]
    return finish(engine, *(engine.add(TEXT[:30], each) for each in params))


def score(engine: Engine) -> list[Tensor]:
    """Logits through steps with a budget; a request beside them is preempted for their pages."""
    running = engine.add(TEXT[:60], replace(GREEDY, max_tokens=8))
    engine.step()
    found = [engine.score(TEXT[:150], 140, 64), engine.score(TEXT[:5])]
    try:
        engine.score(TEXT[:9], 12)
    except RequestError as problem:
        assert "prefill must be from 0 to 9" in str(problem)
    else:
        raise AssertionError("more was asked for than there is")
    return [*found, torch.tensor(finish(engine, running)[0][1])]


def saved(engine: Engine) -> list[Any]:
    """A conversation that was evicted, saved, given up and brought back, and goes on."""
    asked = EvictionConfig(40, 16, 8)
    first = engine.add(TEXT[:120], GREEDY, True, eviction=asked)
    found = finish(engine, first)
    session = Session.from_buffers(engine.session(first, {"said": "so"}).to_buffers())
    assert session.conversation == {"said": "so"} and session.snapshot is not None
    found.append([list(map(len, session.snapshot.lengths.values())), session.snapshot.position])
    found.append({at: [[e.tolist() for e in layer] for layer in record] for at, record in session.evictions.items()})
    engine.abort(first)
    again = engine.restore_held(session)
    assert lists_of(again).keys() == session.evictions.keys()
    turn = engine.add([*again.tokens, *TEXT[200:240]], GREEDY, False, again, asked)
    found += finish(engine, turn)
    found.append([turn.cached_tokens, turn.stats["kept_tokens"]])
    other = replace(session.snapshot, fingerprint="0" * 64)
    for wrong, said in (
        (replace(session, model="0" * 64), "another model"),
        (replace(session, snapshot=other), "other"),
    ):
        try:
            engine.restore_held(wrong)
        except RequestError as problem:
            assert said in str(problem), problem
        else:
            raise AssertionError("a session was taken that does not fit")
    return found + finish(engine, engine.add(TEXT[:9], GREEDY))


def saved_unlike(engine: Engine) -> list[Any]:
    """As `saved`, where half of the heads, which are one rank's of two, drop nothing of an old turn."""
    asked = EvictionConfig(40, 16, 8, "snapkv")
    first = engine.add(TEXT[:120], GREEDY, True, eviction=asked)
    found = finish(engine, first)
    [(at, record)] = engine.session(first).evictions.items()
    heads, end = len(record.lists()[0]), 0
    most: list[int] = []  # entries of the turn, of the fullest stream of each half
    while len(set(most)) < 2:
        end += 10
        assert end < at, "the heads kept the same everywhere"
        of = [[int((layer[g] < end).sum()) for layer in record.lists()] for g in range(heads)]
        most = [max(max(streams) for streams in half) for half in (of[: heads // 2], of[heads // 2 :])]
    found.append(engine.evict_turns(first, [(0, end)], min(most))["kept_tokens"])
    session = Session.from_buffers(engine.session(first).to_buffers())
    assert session.snapshot is not None and len(session.evictions) == 2
    found.append(
        [session.snapshot.lengths["attention"].tolist(), [r.counts().tolist() for r in session.evictions.values()]]
    )
    engine.abort(first)
    again = engine.restore_held(session)
    engine.session(again).to_buffers()
    return found + finish(engine, engine.add([*again.tokens, *TEXT[200:240]], GREEDY, False, again, asked))


def recorded(engine: Engine) -> list[Any]:
    """What evictions kept of all heads: two at a time, of a cache that was given up, and of what nobody holds."""
    asked = EvictionConfig(40, 16, 8, "auto", decode_every=3)
    first = engine.add(TEXT[:120], replace(GREEDY, max_tokens=8), True, eviction=asked)
    found, whole = finish(engine, first), engine.add(TEXT[:30], GREEDY, True)
    found += finish(engine, whole)

    def lists(request: Request) -> dict[int, Any]:
        records = engine.evictions_of(request)
        return {at: [r.lengths.tolist(), [[e.tolist() for e in layer] for layer in r]] for at, r in records.items()}

    found += [lists(first), lists(whole)]
    engine.evict_held(first, EvictionConfig(24, 16, 8, "snapkv"))
    found.append(lists(first))
    if isinstance(engine, LockStepEngine):
        engine._call({"event": "gives_up"}, partial(give_up, engine))
    else:
        give_up(engine)
    found.append(lists(first) == found[-1] and first not in engine.scheduler.held)
    running = engine.add(TEXT[:120], GREEDY, True, eviction=asked)
    while not running.evictions:
        engine.step()
    try:
        lists(running)
    except RequestError as problem:
        found.append(str(problem))
    found += [*finish(engine, running), lists(running)]
    engine.let_go(first)
    try:
        found.append(len(lists(first)))
    except RequestError as problem:
        assert "nobody knows this request any more" in str(problem), problem
        found.append("refused")
    return [*finish(engine, engine.add(TEXT[:9], GREEDY)), *found]


def give_up(engine: Engine) -> None:
    """The caches that are held go, as where running requests need their room."""
    for request in list(engine.scheduler.held):
        engine.scheduler.spare(request)
        if request in engine.scheduler.held:
            engine.scheduler.release_held(request)


def prefixed(engine: Engine) -> list[Any]:
    """A text that is read, cut unevenly, and gone on from: by two answers, by another text, after it was given up, as
    that reads it again, and after nobody has it any more.
    """
    once = replace(GREEDY, max_tokens=1)
    first = engine.add(TEXT[:120], once, True, eviction=EvictionConfig(1 << 20, 16, 8))
    found, read = finish(engine, first), TEXT[:120]
    engine.evict_held(first, EvictionConfig(40, 16, 8, "auto"), ranges=[(0, 3)])
    engine.drop_queries(first)
    found.append(engine.manager.query_buffers.free)

    def ask(*tails: list[int], **how: Any) -> list[Request]:
        asked = [engine.add([*read, *tail], eviction=None, prefix=first, **how) for tail in tails]
        found.extend(finish(engine, *asked))
        found.append([each.cached_tokens for each in asked])
        return asked

    ask([7, 8], TEXT[200:260], params=replace(GREEDY, temperature=0.7, seed=3, n=2))
    ask([7, 8], params=GREEDY)
    if isinstance(engine, LockStepEngine):
        engine._call({"event": "gives_up"}, partial(give_up, engine))
    else:
        give_up(engine)
    [again] = ask([9], params=once, hold=True)
    assert again.cached_tokens == 0 and again in engine.scheduler.held
    found.append({at: [[e.tolist() for e in layer] for layer in r] for at, r in engine.evictions_of(again).items()})
    number, read, first = first.order, again.tokens[: again.prompt_tokens], again  # nobody has the first one any more
    gc.collect()
    ask([5, 6], params=GREEDY)
    if isinstance(engine, LockStepEngine):
        assert engine._there == {again.order} and number not in engine._known
    engine.abort(again)
    try:
        engine.add([*read, 5], GREEDY, eviction=None, prefix=again)
    except RequestError as problem:
        assert "nobody knows this request any more" in str(problem), problem
    return [*found, finish(engine, engine.add(TEXT[:9], GREEDY))[0]]


def replayed(engine: Engine) -> list[Any]:
    """A text that is read again in two parts, and forks that are cut by what was found, which nobody has afterwards."""
    first = engine.add(TEXT[:120], replace(GREEDY, max_tokens=1), True, eviction=EvictionConfig(1 << 20, 16, 8))
    found, scores = finish(engine, first), None
    for at in (0, 50):
        scores = engine.replay(first, ReplayPart([7], TEXT[at : at + 50]), scores)
    for budget in (30, 60):
        fork = engine.fork_held(first)
        engine.evict_held(fork, EvictionConfig(budget, 16, 8, "replay"), scores, ranges=[(0, 3)])
        found.append({at: [[e.tolist() for e in layer] for layer in r] for at, r in engine.evictions_of(fork).items()})
        engine.abort(fork)
    engine.abort(first)
    del scores, fork, first
    gc.collect()
    return [*found, *finish(engine, engine.add(TEXT[:9], GREEDY))]  # the others hear of it


def bounds(engine: Engine) -> list[Any]:
    """The longest questions that pools with little room take after a text of which the ranks kept unlike much."""
    first = engine.add(TEXT[:120], replace(GREEDY, max_tokens=1), True, eviction=EvictionConfig(1 << 20, 16, 8))
    finish(engine, first)
    engine.evict_held(first, EvictionConfig(60, 16, 8, "keydiff:spread=all"))
    longest = 0
    for n in range(1, 190):
        try:
            engine.abort(engine.add([*TEXT[:120], *TEXT[200 : 200 + n]], GREEDY, eviction=None, prefix=first))
        except RequestError as problem:
            assert "the pools hold 200 tokens" in str(problem), problem
            break
        longest = n
    found = finish(engine, engine.add(TEXT[:9], GREEDY))  # now the others hear of them, and must take them too
    everywhere = first.evictions[120].everywhere
    return [longest, None if everywhere is None else everywhere.tolist(), found]


def scored_after(engine: Engine) -> list[Any]:
    """Logits of what follows a held cache, cut and whole; they belong to it from then on."""
    found: list[Any] = []
    for eviction in (None, EvictionConfig(40, 16, 8, "auto")):
        first = engine.add(TEXT[:120], GREEDY, True, eviction=eviction)
        finish(engine, first)
        fork = engine.fork_held(first)
        found += [engine.score_after(first, TEXT[200:230]), engine.score_after(first, TEXT[230:233])]
        turn = engine.add([*first.tokens, 5, 6], GREEDY, False, first, None)
        found += [torch.tensor(finish(engine, turn)[0][1]), torch.tensor([turn.cached_tokens])]
        engine.abort(fork)
        for request, tokens in ((first, [5]), (fork, [5])):
            try:
                engine.score_after(request, tokens)
            except RequestError as problem:
                assert "not held any more" in str(problem), problem
            else:
                raise AssertionError("there was no cache to go on in")
    return [*found, torch.tensor(finish(engine, engine.add(TEXT[:9], GREEDY))[0][1])]


def taken_over(engine: Engine) -> list[Any]:
    """What is asked about a request whose cache a later turn has taken over: there is none, which hurts nobody."""
    first = engine.add(TEXT[:60], GREEDY, True)
    found = finish(engine, first)
    turn = engine.add([*first.tokens, *TEXT[100:120]], GREEDY, True, first)
    found += finish(engine, turn)
    session, fork = engine.session(first, {"said": "so"}), engine.fork_held(first)
    found.append([session.tokens, session.snapshot is None, session.conversation, fork.tokens, fork.finish_reason])
    found.append(engine.evict_turns(first, [(0, 20)], 5)["kept_tokens"])
    for request in (first, fork):
        try:
            engine.evict_held(request, EvictionConfig(20, 4, 8))
        except RequestError as problem:
            found.append(str(problem))
    later = [engine.add([*each.tokens, 5, 6], GREEDY, True, each) for each in (fork, first, turn)]
    found += finish(engine, *later)
    return [*found, [request.cached_tokens for request in later]]


def reused(engine: Engine) -> list[Any]:
    """Prompts that begin alike, by one salt and another; an even budget; and then one that heads share."""
    found: list[Any] = []

    def ask(*prompts: list[int], **how: Any) -> None:
        requests = [engine.add(prompt, GREEDY, **how) for prompt in prompts]
        found.extend(finish(engine, *requests))
        found.append([[r.cached_tokens, r.reuse.get("why"), r.reuse.get("written")] for r in requests])

    ask(TEXT[:150], marks=[(128, "client")])
    ask([*TEXT[:140], 5, 6], [*TEXT[:140], 7], TEXT[:90])
    ask(TEXT[:150], salt=b"other")
    ask(TEXT[:150], salt=b"other", marks=[(100, "client")])
    ask(TEXT[:150], cache=False)
    ask(TEXT[:200], eviction=EvictionConfig(60, 16, 8, "snapkv"))
    ask(TEXT[:160])
    assert found[-1][0][0] > 0
    ask(TEXT[:200], eviction=EvictionConfig(60, 16, 8, "auto"))
    if isinstance(engine, LockStepEngine):  # from here on nothing is kept
        try:
            engine.check_keeps()
        except RequestError as problem:
            assert "where heads share a budget" in str(problem)
        else:
            raise AssertionError("it was to keep something")
    return found


def pinned(engine: Engine) -> list[Any]:
    """A text that is read and stays, however many others come, until it is given back."""
    found, params = [], SamplingParams(max_tokens=1, temperature=0)
    request = engine.add(TEXT[:128], params, marks=[(128, "client")])
    engine.pin_when_read(request)
    finish(engine, request)
    again = engine.pin(b"", TEXT[:128])
    assert request.pinned is not None and again is not None and engine.pin(b"", TEXT[64:192]) is None

    def crowd() -> None:
        for begin in range(1, 9):  # twice what the pools hold
            engine.add([begin, *TEXT[begin : begin + 250]], params)
        finish(engine)
        after = engine.add(TEXT[:150], GREEDY)
        found.append([finish(engine, after), after.cached_tokens])

    crowd()
    engine.unpin(again)
    engine.unpin(again)
    crowd()
    engine.unpin(request.pinned)
    crowd()
    return found


def forgotten(engine: Engine) -> list[Any]:
    """What is kept under two salts and of two texts, dropped one after the other."""
    found: list[Any] = []

    def ask(salt: bytes = b"", begin: int = 0) -> list[int]:
        request = engine.add(TEXT[begin : begin + 150], GREEDY, salt=salt)
        finish(engine, request)
        found.append(request.cached_tokens)
        return request.tokens

    for salt in (b"", b"", b"other", b"other"):
        ask(salt)
    ask(begin=150)
    engine.forget(b"other")
    ask(b"other")
    said = ask()
    engine.forget(None, said)
    ask(begin=150)
    ask()
    engine.forget()
    for salt in (b"", b"other"):
        ask(salt)
    columns = engine.manager.reuse.columns if engine.manager.reuse is not None else None
    return [*found, columns.count if columns is not None else -1]


def held(engine: Engine) -> list[Any]:
    """A conversation that is forked, evicted as a whole and by turns, and goes on."""
    first = engine.add(TEXT[:120], GREEDY, True, eviction=EvictionConfig(200, 16, 8))
    found = finish(engine, first)
    fork = engine.fork_held(first)
    freed = engine.evict_held(fork, EvictionConfig(40, 16, 8, "auto"), ranges=[(3, 9)])
    assert freed > 0
    stats = engine.evict_turns(first, [(0, 50), (50, 100)], 12)
    found += [stats[name] for name in ("kept_tokens", "kv_bytes_full", "kv_bytes_kept")]
    turns = [
        engine.add([*each.tokens, *TEXT[200:240]], GREEDY, True, each, EvictionConfig(60, 16, 8, "snapkv"))
        for each in (first, fork)
    ]
    found += finish(engine, *turns)
    stats = engine.evict_turns(turns[0], [(0, 50), (50, 100), (100, 140)], 10)
    again, other = engine.fork_held(turns[0]), engine.fork_held(turns[1])
    engine.abort(other)
    try:
        engine.evict_held(other, EvictionConfig(40, 16, 8))
    except RequestError as problem:
        assert "not held any more" in str(problem)
    else:
        raise AssertionError("what was given up was evicted")
    last = engine.add([*again.tokens, 5, 6, 7], GREEDY, False, again)
    return [*found, stats["kept_tokens"], *finish(engine, last)]
