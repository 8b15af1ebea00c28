"""Many random moves between two engines: every answer is the one that it would have been, and nothing is lost or left.

Requests of random lengths and seeds run, move, are damaged on the way, refused for want of room, preempted or aborted,
in pools that hold about two of them. In exact mode, so that an answer does not depend on who runs beside it.
"""

import random
from collections.abc import Callable

import pytest
from long_form import LONG, few

from engine.driving import assert_nothing_held, prompt, run
from engine.test_moving import sent
from engine.test_sessions import engine_with
from hybridkv import CacheConfig, SamplingParams
from hybridkv.cache.buffers import Buffers
from hybridkv.cache.session import Session
from hybridkv.cache.shelves import RamShelf, new_key
from hybridkv.engine.engine import Engine
from hybridkv.errors import HybridKVError
from hybridkv.request import Request

pytestmark = [pytest.mark.usefixtures("weights_measured_once"), pytest.mark.long]

MOVES = 250 if LONG else 12  # of each of four kinds, or of two
CACHES = {
    "plain": CacheConfig("f32", 4),
    "evicting": CacheConfig("f32", 4, budget=12, window=4, recent=4, decode_every=4),
}


class Moves:
    """Two engines, and requests that go back and forth between them."""

    def __init__(self, engine_of: Callable[..., Engine], kind: str, cache: str, seed: int) -> None:
        def made(pool: int) -> Engine:
            return engine_of(kind, pool, 3, step_tokens=64, exact=True, eviction=CACHES[cache])

        self.random = random.Random(seed)
        self.engines, self.reference = [made(150), made(150)], made(512)
        self.shelf = RamShelf(1 << 30)
        self.live: dict[Request, int] = {}  # and the engine that it is in
        self.wanted: dict[tuple[int, SamplingParams], list[int]] = {}
        self.moved = self.refused = self.ended = 0

    def want(self, request: Request) -> list[int]:
        """Its tokens, if it never moves."""
        key = request.prompt_tokens, request.params
        if key not in self.wanted:
            alone = self.reference.add(request.tokens[: request.prompt_tokens], request.params)
            run(self.reference)
            self.wanted[key] = alone.tokens
        return self.wanted[key]

    def begin(self) -> None:
        words, seed = self.random.randint(3, 60), self.random.randint(0, 3)
        params = SamplingParams(max_tokens=self.random.choice((6, 25)), temperature=1.0, seed=seed)
        at = self.random.randrange(2)
        self.live[self.engines[at].add(prompt(words, words), params)] = at

    def step(self) -> None:
        engine = self.random.choice(self.engines)
        if not engine.idle:
            engine.step()
        for request in [request for request in self.live if request.finished]:
            assert request.finish_reason == "length", (request.finish_reason, request.error)
            assert request.tokens == self.want(request)
            del self.live[request]
            self.ended += 1

    def move(self) -> None:
        request = self.random.choice(list(self.live))
        here, there = self.live[request], 1 - self.live[request]
        buffers = self.engines[here].export(request).to_buffers().seal()
        key = new_key()
        self.shelf.put(key, buffers)
        found = self.shelf.get(key)
        assert found is not None
        if self.random.random() < 0.2:
            found = self.damaged(found)
        try:
            back = self.engines[there].resume(Session.from_buffers(found))
        except HybridKVError:  # it stays where it is
            self.refused += 1
            return
        finally:
            self.shelf.drop(key)
        self.engines[here].abort(request)
        del self.live[request]
        self.live[back] = there
        self.moved += 1

    def damaged(self, buffers: Buffers) -> Buffers:
        parts = list(buffers.parts)
        i = self.random.choice([i for i, part in enumerate(parts) if part.nbytes])
        parts[i] = parts[i].clone()
        parts[i][self.random.randrange(parts[i].nbytes)] ^= 1 << self.random.randrange(8)
        return Buffers(buffers.head, parts)

    def disturb(self) -> None:
        request = self.random.choice(list(self.live))
        engine = self.engines[self.live[request]]
        if request in engine.scheduler.running and self.random.random() < 0.5:
            engine.scheduler.preempt(request)
        else:
            engine.abort(request)
            del self.live[request]

    def run(self, moves: int) -> None:
        while self.moved < moves:
            if len(self.live) < 5:
                self.begin()
            what = self.random.random()
            if what < 0.5:
                self.step()
            elif what < 0.95:
                self.move()
            else:
                self.disturb()
            for engine in self.engines:
                engine.manager.check_counts()


def drained(moves: Moves, engine: Engine) -> None:
    run(engine)
    moves.step()
    assert_nothing_held(engine)
    assert engine.manager.host.used == 0 and not engine.manager.frozen


@pytest.mark.slow
@few("kind, cache", ("llama", "qwen3_5"), list(CACHES))
def test_random_moves_change_no_answer_and_leak_no_page(
    kind: str, cache: str, engine_of: Callable[..., Engine]
) -> None:
    moves = Moves(engine_of, kind, cache, seed=17)
    moves.run(MOVES)
    for engine in moves.engines:
        drained(moves, engine)
    assert not moves.live and moves.ended and moves.refused and moves.moved >= MOVES
    assert moves.shelf.used == 0


def test_a_cache_that_is_not_given_back_is_noticed(
    monkeypatch: pytest.MonkeyPatch, engine_of: Callable[..., Engine]
) -> None:
    """What the test before this one guards is seen to matter."""
    moves = Moves(engine_of, "qwen3_5", "plain", seed=17)
    monkeypatch.setattr(Engine, "abort", lambda self, request: self.scheduler.running.remove(request)
                        if request in self.scheduler.running else None)  # fmt: skip
    with pytest.raises(AssertionError):
        moves.run(5)
        for engine in moves.engines:
            drained(moves, engine)


def test_what_was_sent_twice_is_two_requests() -> None:
    here, there = engine_with("qwen3_5"), engine_with("qwen3_5")
    request = here.add(prompt(30), SamplingParams(max_tokens=12, temperature=1.0, seed=1))
    for _ in range(5):
        here.step()
    session = sent(here.export(request))
    both = [there.resume(session), there.resume(session)]
    run(there), run(here)
    assert [each.tokens for each in both] == [request.tokens] * 2
    assert_nothing_held(there)
