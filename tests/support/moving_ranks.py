"""Requests that leave engines of one rank or several, and go on in others: for tests/parallel/test_moving_ranks.py."""

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import tiny
from byte_tokenizer import byte_tokenizer
from evicting_ranks import CONTEXT, engine_of
from long_form import LONG
from torch import Tensor

from hybridkv.cache.buffers import Buffers
from hybridkv.cache.session import Session
from hybridkv.config import EvictionConfig, SamplingParams
from hybridkv.engine.engine import Engine
from hybridkv.engine.lock_step import LockStepEngine
from hybridkv.errors import HybridKVError
from hybridkv.eviction import Policy
from hybridkv.eviction_record import EvictionRecord
from hybridkv.models.config import ModelConfig
from hybridkv.models.decoder import Model
from hybridkv.parallel.group import Alone, Group
from hybridkv.parallel.shard import Shard
from hybridkv.request import Request

TEXT = tiny.token_ids(400, seed=7)
KV_HEADS = 2
BEFORE, AFTER = 9, 64 if LONG else 16  # tokens of an answer
GREEDY = SamplingParams(max_tokens=BEFORE + AFTER, temperature=0, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=BEFORE + AFTER, temperature=0.9, top_p=0.95, ignore_eos=True, logprobs=2)
KEPT: dict[str, Any] = dict(budget=40, window=16, recent=8)
CASES: dict[str, tuple[SamplingParams, EvictionConfig | None]] = {
    "greedy, whole": (GREEDY, None),
    "sampled, evicted": (SAMPLED, EvictionConfig(**KEPT, policy="auto")),
    "sampled, bounded": (SAMPLED, EvictionConfig(**KEPT, policy="snapkv", bounded=True)),
    "sampled, whole": (SAMPLED, None),
    "greedy, evicted": (replace(GREEDY, logprobs=0), EvictionConfig(**KEPT, policy="keydiff", scope="layer")),
    "greedy, decoding": (GREEDY, EvictionConfig(**KEPT, policy="auto", decode_every=7)),
}


class Own(Policy):
    """Code, which is never sent."""


def run(group: Group | Alone, part: tuple[Model, ModelConfig, Shard], script: str, **given: Any) -> Any:
    """What a script gives on rank 0, and the free slots and pages of this rank at the end of it."""
    settings: dict[str, Any] = {"tokenizer": byte_tokenizer()} if script in ("code", "refusals") else {}
    if script in ("full", "preempted"):
        settings |= {"pages": 40 if script == "full" else 50, "slots": 2}
    engine = engine_of(group, part, exact=True, **settings)
    found: Any = None
    if group.rank == 0:
        found = globals()[script](engine, **given)
    if isinstance(engine, LockStepEngine):
        if group.rank:
            engine.follow()
        else:
            with engine.channel.telling("end"):
                pass
    engine.manager.check_integrity()
    assert engine.idle
    manager = engine.manager
    taken = {name: table.allocator.total - manager.free_pages()[name] for name, table in manager.tables.items()}
    return found, [manager.slots - manager.free_slots, *taken.values(), len(engine.scheduler.held)]


def finish(engine: Engine, *requests: Request) -> list[Any]:
    while not engine.idle:
        engine.step()
    logprobs = [[[repr(each.token), each.top] for each in request.logprobs] for request in requests]
    return [
        [request.error, request.finish_reason, request.generated, request.text.text, scores]
        for request, scores in zip(requests, logprobs, strict=True)
    ]


def begun(engine: Engine, prompt: list[int], params: SamplingParams, tokens: int = BEFORE, **how: Any) -> Request:
    request = engine.add(prompt, params, **how)
    while request.answer_tokens < tokens:
        engine.step()
    return request


def sent(session: Session) -> Session:
    """As another process would get it."""
    return Session.from_buffers(session.to_buffers().seal())


def leave(engine: Engine, folder: str, cases: list[str]) -> dict[str, Any]:
    """Answers, and in the folder the requests as they were in the middle of them."""
    requests = []
    for i, name in enumerate(cases):
        params, eviction = CASES[name]
        request = begun(engine, TEXT[i : 101 + i], params, eviction=eviction)
        session = engine.export(request)
        assert session.snapshot is not None and session.snapshot.position == 101 + BEFORE - 1
        assert bool(session.evictions) == (eviction is not None)
        session.save(Path(folder) / f"{i}")
        requests.append(request)
    answers = finish(engine, *requests)
    return {name: [r.seed, answer] for name, r, answer in zip(cases, requests, answers, strict=True)}


def arrive(engine: Engine, folder: str, cases: list[str]) -> dict[str, Any]:
    """The same answers gone on with, all of them together."""
    requests = [engine.resume(Session.load(Path(folder) / f"{i}")) for i in range(len(cases))]
    answers = finish(engine, *requests)
    assert [request.cached_tokens for request in requests] == [101] * len(cases), "something was read again"
    return {name: [r.seed, answer] for name, r, answer in zip(cases, requests, answers, strict=True)}


def wherever(engine: Engine) -> list[Any]:
    """Requests that wait, read, were preempted, ended and are held, ended and are not; and logprobs of a prompt."""
    eviction, found = EvictionConfig(**KEPT), []
    params = replace(SAMPLED, max_tokens=9, seed=5)

    def moved(request: Request, at_once: bool = True, **how: Any) -> None:
        session = sent(engine.export(request))
        engine.abort(request)
        found.append([session.snapshot is not None, session.text])
        request = engine.resume(session, **how)
        found.append(finish(engine, request) if at_once else None)
        found.append([request.cached_tokens, sorted(request.evictions), len(request.prompt_logprobs)])

    moved(engine.add(TEXT[:200], params, eviction=eviction))
    reading = engine.add(TEXT[:200], params, eviction=eviction)
    engine.step()
    assert 0 < engine.manager.position(reading.key) < 200
    moved(reading)
    moved(begun(engine, TEXT[:60], replace(params, prompt_logprobs=1), 3))
    held = begun(engine, TEXT[:120], replace(params, max_tokens=1), 1, hold=True, eviction=eviction)
    moved(held, params=params)  # as of a server that reads prompts for another
    moved(begun(engine, TEXT[:120], replace(params, max_tokens=2), 2, eviction=eviction), params=params)
    plain = begun(engine, TEXT[:50], params, 4, hold=True)
    moved(plain, hold=True)
    turn = engine.scheduler.held[-1]
    found.append(finish(engine, engine.add([*turn.tokens, *TEXT[300:320]], params, False, turn)))
    return found


def preempted(engine: Engine) -> list[Any]:
    """Two long answers on few pages: one was preempted, and goes without its cache and with its records."""
    params = replace(GREEDY, max_tokens=50)
    asked = EvictionConfig(**KEPT, policy="snapkv")
    first = engine.add(TEXT[:100], params)
    other = engine.add(TEXT[100:190], params, eviction=asked)
    for _ in range(200):
        engine.step()
        gone = next((each for each in (first, other) if each.preemptions and each in engine.scheduler.waiting), None)
        if gone is not None:
            break
    else:
        raise AssertionError("nothing was preempted")
    session = sent(engine.export(gone))
    assert session.snapshot is None and session.evictions
    engine.abort(gone)
    again = engine.resume(session)
    return finish(engine, again, *(each for each in (first, other) if each is not gone))


def code(engine: Engine) -> list[Any]:
    """A grammar, a hook, and a stop string of which half is held back."""

    def favour(tokens: list[int], row: Tensor) -> None:
        row[40 + len(tokens)] += 50

    found = []
    for params in (
        SamplingParams(max_tokens=30, structured_outputs={"regex": "[ab]{4}-[cd]{9}"}, temperature=1.0, seed=4),
        SamplingParams(max_tokens=12, temperature=0.0, logits_hook=favour),
        SamplingParams(max_tokens=30, temperature=0.0, stop=("-----=", "mnopq")),
    ):
        request = begun(engine, TEXT[:40], params, 6)
        session = sent(engine.export(request))
        if session.going and session.going["code"]:
            found.append(refused(lambda session=session: engine.resume(session)))
        again = engine.resume(session, params)
        found += finish(engine, request, again)
        assert found[-1] == found[-2], "it went on otherwise"
    return found


def refused(ask: Callable[[], Any]) -> str:
    try:
        ask()
    except HybridKVError as problem:
        assert type(problem).__name__ == "RequestError", repr(problem)
        return str(problem)
    raise AssertionError("it was taken")


def refusals(engine: Engine) -> Any:
    """What cannot leave, and what does not fit; after each the ranks go on."""
    asked = EvictionConfig(**KEPT)
    request = begun(engine, TEXT[:100], replace(GREEDY, max_tokens=30), eviction=asked)
    session = sent(engine.export(request))
    assert session.snapshot is not None and session.going is not None
    snapshot, want = session.snapshot, finish(engine, request)

    def recorded(change: Callable[[Any, int], Any]) -> Session:
        [(at, record)] = session.evictions.items()
        lists = [[change(each, g) for g, each in enumerate(layer)] for layer in record.lists()]
        return replace(session, evictions={at: EvictionRecord(lists, record.lengths)})

    states = {key: t[:-1] for key, t in snapshot.states.items()}
    past = [*session.tokens, *TEXT[:CONTEXT]]
    wrong: dict[str, tuple[Session, dict[str, Any]]] = {
        "another model": (replace(session, model="0" * 64), {}),
        "does not say how it would go on": (replace(session, going=None), {}),
        "it has no seed": (replace(session, going=session.going | {"seed": -1}), {}),
        "logits_hook": (replace(session, going=session.going | {"code": ["logits_hook"]}), {}),
        "the tokenizers are not the same": (replace(session, text="?" + session.text), {}),
        "stores other": (replace(session, snapshot=replace(snapshot, fingerprint="0" * 64)), {}),
        "the context": (replace(session, tokens=past, prompt_tokens=len(past) - 1), {}),
        "do not agree with its position": (
            replace(session, snapshot=replace(snapshot, position=snapshot.position + 1)),
            {},
        ),
        "ask for n=1": (session, {"params": SamplingParams(n=2)}),
    }
    if states:
        wrong["other"] = (replace(session, snapshot=replace(snapshot, states=states)), {})
    for g in range(KV_HEADS):  # one rank's own
        less = recorded(lambda each, i, g=g: each[:-1] if i == g else each)
        wrong[f"{g}: records of evictions do not lead"] = (less, {})
    if isinstance(engine, LockStepEngine):
        own = EvictionConfig(**KEPT, policy=Own())
        wrong["code of your own"] = (replace(session, snapshot=None), {"eviction": own})
    found = {}
    for name, (other, how) in wrong.items():
        found[name] = refused(lambda other=other, how=how: engine.resume(other, **how))
        assert not engine.scheduler.held and engine.idle
    again = finish(engine, engine.resume(session))  # rank 0 has counted requests that the others have not seen
    several = engine.add(TEXT[:20], replace(GREEDY, max_tokens=3, n=2))
    found["cannot move; ask for n=1"] = refused(lambda: engine.export(several))
    finish(engine, several)
    buffers = session.to_buffers().seal()
    part = max(range(len(buffers.parts)), key=lambda i: buffers.parts[i].nbytes)
    flipped = [each.clone() for each in buffers.parts]
    flipped[part][flipped[part].numel() // 2] ^= 1
    cut = [each[:-1] if i == part else each for i, each in enumerate(buffers.parts)]
    for name, parts in (("a checksum", flipped), ("not as long as", cut)):
        try:
            Session.from_buffers(Buffers(buffers.head, parts))
        except HybridKVError as problem:
            found[name] = str(problem)
    return found, want, again


def full(engine: Engine) -> list[Any]:
    """A request for whose cache there is no room beside what runs, and then there is."""
    request = begun(engine, TEXT[:100], replace(GREEDY, max_tokens=12), 3)
    session = sent(engine.export(request))
    engine.abort(request)
    other = begun(engine, TEXT[200:290], replace(GREEDY, max_tokens=12), 3)
    found = [refused(lambda: engine.resume(session))]
    found += finish(engine, other)
    return [*found, *finish(engine, engine.resume(session))]


def storm(engine: Engine, seed: int, events: int) -> list[Any]:
    """Requests come, run, and move again and again, to the same engine; what leaks is seen at the end."""
    chance, live, moves, answers = random.Random(seed), [], 0, []
    budgets = [None, EvictionConfig(**KEPT), EvictionConfig(**KEPT, policy="snapkv", bounded=True)]
    for number in range(events):
        what = chance.choice(("add", "move", "step", "step", "step"))
        live = [request for request in live if not request.finished]
        if what == "add" and len(live) < 5:
            tokens = [chance.randrange(90) for _ in range(chance.randint(1, 120))]
            params = SamplingParams(max_tokens=chance.randint(2, 30), temperature=1, seed=number, ignore_eos=True)
            live.append(engine.add(tokens, params, chance.random() < 0.2, eviction=chance.choice(budgets)))
            answers.append(live[-1])
        elif what == "move" and live:
            at = chance.randrange(len(live))
            before, session = live[at], engine.export(live[at])
            engine.abort(before)
            try:
                live[at] = engine.resume(sent(session))
            except HybridKVError as problem:
                assert "no room" in str(problem), problem
                live[at] = engine.resume(sent(replace(session, snapshot=None)))
            answers[answers.index(before)] = live[at]
            moves += 1
        elif what == "step" and not engine.idle:
            engine.step()
    finish(engine)
    for request in list(engine.scheduler.held):
        engine.abort(request)
    finish(engine, engine.add(TEXT[:3], replace(GREEDY, max_tokens=2)))  # so that all have heard of that
    return [moves, [[r.finish_reason, r.generated] for r in answers]]
