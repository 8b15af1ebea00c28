"""The picture of a cache that the engine's thread copies: it is what the cache holds, and costs nobody an answer."""

from collections import Counter
from typing import Any

import numpy as np
import pytest

from hybridkv import LLM, SamplingParams
from hybridkv.config import EvictionConfig
from hybridkv.engine.engine import Engine
from hybridkv.server import picture
from hybridkv.server.picture import FREE, LATER, SHARED, Recorder, draw, spans, tag_of


def recorded(llm: LLM, prompts: list[Any], params: SamplingParams, look: Any, **more: Any) -> Recorder:
    """Run prompts with a picture after every step, each shown to `look(picture, engine)`."""
    recorder = Recorder(llm.manager)

    def observe(engine: Engine) -> None:
        recorder._copied = -1e9
        recorder.observe(engine)
        look(recorder.latest, engine)

    problems: list[BaseException] = []

    def observe_loudly(engine: Engine) -> None:  # what an observer raises is swallowed
        try:
            observe(engine)
        except BaseException as problem:
            problems.append(problem)

    end = llm.owner.observe(observe_loudly)
    try:
        llm.generate(prompts, params, **more)
        llm.owner.run(lambda engine: None)  # a change between steps: shown as well
    finally:
        end()
    assert not problems, problems
    return recorder


def test_every_page_is_shown_with_its_owner(tiny_llm: LLM) -> None:
    seen: Counter[str] = Counter()

    def look(found: picture.Picture, engine: Engine) -> None:
        manager, drawn = engine.manager, draw(found, {})
        for kind in found.kinds:
            shown = drawn[kind.name]
            cells = np.frombuffer(shown.cells.data, np.uint8)
            if kind.what == "pages":
                allocator = manager.tables[kind.name].allocator
                assert shown.used + shown.later == allocator.held == int((cells != FREE).sum())
                assert np.array_equal(np.flatnonzero(cells), np.flatnonzero(allocator.refs))
            else:
                assert shown.used == len(manager.slot_of) == int((cells > LATER).sum())
                assert (
                    shown.later == len(manager.reuse.checkpoints.all)
                    and len(cells) == manager.slots + manager.checkpoints
                )
        alone = all((table.allocator.refs <= 1).all() for table in manager.tables.values())
        for n, row in found.rows.items():
            for name, pages in row["pages"].items():
                cells = np.frombuffer(drawn[name].cells.data, np.uint8)
                own = int((cells == row["tag"]).sum())
                assert own == pages if alone else own <= pages, (n, name)
            seen[row["state"]] += 1
            assert row["tag"] == tag_of(n)
        seen["shared"] += any(SHARED in shown.cells.data for shown in drawn.values())

    params = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True, n=2)
    recorder = recorded(tiny_llm, [[5] * 100, [7] * 40, [9] * 20], params, look)
    assert {"waiting", "answering", "ended"} <= set(seen) and seen["shared"]  # two answers share their prompt's pages
    last = recorder.latest
    assert not any(shown.used for shown in draw(last, {}).values()) and not last.running and last.written == 3 * 2 * 6
    assert last.read == 160  # siblings read nothing
    assert {kind.name: kind.what for kind in last.kinds} == {"attention": "pages", "gdn": "states"}


def test_a_prompt_being_read_says_how_far(tiny_llm: LLM) -> None:
    rows: list[dict[str, Any]] = []
    params = SamplingParams(max_tokens=1, temperature=0)
    assert tiny_llm.engine.scheduler.step_tokens < 3 * 400  # one step does not read them all
    recorded(tiny_llm, [[3] * 400] * 3, params, lambda found, engine: rows.extend(found.rows.values()))
    assert {row["read"] for row in rows if row["state"] == "reading"} - {0, 400}


def test_an_eviction_is_told_with_what_it_gave_back(tiny_llm: LLM) -> None:
    before: list[int] = []
    params = SamplingParams(max_tokens=3, temperature=0, ignore_eos=True)
    recorder = recorded(
        tiny_llm,
        [[1 + i % 90 for i in range(300)]],
        params,
        lambda found, engine: before.append(draw(found, {})["attention"].used),
        eviction=EvictionConfig(budget=96, policy="snapkv"),
    )
    told = {event["what"]: event for event in recorder.latest.events}
    evicted, schema = told["evicted"], tiny_llm.manager.tables["attention"].schema
    assert (evicted["before"], evicted["kept"], evicted["at"]) == (300, 96, 300)
    [row] = recorder.latest.rows.values()
    assert row["evictions"] == 1 and row["budget"] == 96 and row["end"] == "length" and row["policy"] == "snapkv"
    assert row["bytes"] < row["full"] / 2
    after = schema.pages(300) - evicted["freed"] // schema.page_bytes
    assert after in before  # what was left is what the next picture shows


def test_checkpoints_and_what_was_reused_are_shown(tiny_llm: LLM) -> None:
    recorder, prompt = Recorder(tiny_llm.manager), [1 + i * i % 90 for i in range(200)]

    def read(engine: Engine, marks: list[tuple[int, str]]) -> dict[str, Any]:
        request = engine.add(prompt, SamplingParams(max_tokens=2, temperature=0, ignore_eos=True), marks=marks)
        while not engine.idle:
            engine.step()
            recorder._copied = -1e9
            recorder.observe(engine)
        return recorder.latest.rows[request.key.number]

    def run(engine: Engine) -> None:
        engine.manager.reuse.forget()
        recorder.observe(engine)
        first, second = read(engine, [(128, "client")]), read(engine, [])
        assert (first["cached"], first["checkpoints"]) == (0, [128]) and "no prompt that begins" in first["why"]
        assert (second["cached"], second["checkpoints"]) == (128, [128]) and second["read"] == 200
        told = [(event["n"], event["what"]) for event in recorder.latest.events]
        assert told.count((first["n"], "checkpoint")) == 1 and (second["n"], "checkpoint") not in told
        began = [event["cached"] for event in recorder.latest.events if event["what"] == "began"]
        assert began == [0, 128] and recorder.latest.read == 200 + 72  # what was reused is not read
        drawn = draw(recorder.latest, {})
        assert drawn["gdn"].later == 2 and drawn["attention"].later and not drawn["attention"].used

    tiny_llm.owner.run(run)


def test_a_cell_stands_for_more_pages_where_there_are_many() -> None:
    found = np.zeros(100_000, np.uint8)
    found[[0, 40_000, 40_001]] = LATER, 7, LATER
    cells = picture._cells(found, 100_000)
    assert cells.per_cell == 8 and len(cells.data) == 12_500
    assert cells.data[0] == LATER and cells.data[5000] == 7 and sum(cells.data) == LATER + 7
    assert picture._cells(found, 16_384).per_cell == 1 and picture._cells(found, 16_385).per_cell == 2
    assert picture._cells(found[:0], 0).data == b""


@pytest.mark.parametrize("last", [0, 1, 1023, 1024, 1025, 5000, 99_999, 100_000])
def test_the_map_reaches_past_all_that_is_used(last: int) -> None:
    reach = picture._reach(last, 100_000)
    assert last <= reach <= max(1024, last * 5 // 4 + 1) or reach == 100_000


def test_changed_cells_are_told_in_few_pieces() -> None:
    before, now = bytearray(5000), bytearray(5000)
    for at in (0, 3, 4000, 4999):
        now[at] = 9
    pieces = list(spans(picture.Cells(5000, 1, bytes(now)), picture.Cells(5000, 1, bytes(before))))
    assert [(at, len(part)) for at, part in pieces] == [(0, 4), (4000, 1), (4999, 1)]
    for at, part in pieces:
        before[at : at + len(part)] = part
    assert before == now


def test_what_is_remembered_is_bounded(tiny_llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(picture, "MOST_TOKENS", 100)
    recorder = Recorder(tiny_llm.manager)

    def add(engine: Engine) -> None:
        for i in range(60):
            request = engine.add([1 + i] * 20, SamplingParams(max_tokens=1))
            recorder.own(request, (b"", f"r{i}"))
            recorder.observe(engine)
            engine.abort(request)
            recorder.observe(engine)
        for i in range(500):  # never seen between their beginning and their end
            request = engine.add([1], SamplingParams(max_tokens=1))
            recorder.own(request, (b"", f"s{i}"))
            engine.abort(request)
            recorder.observe(engine)

    tiny_llm.owner.run(add)
    assert len(recorder.latest.rows) == picture.MOST_ENDED and len(recorder._owners) <= 4 * picture.MOST_ENDED
    assert sum(len(prompt.tokens) for prompt in recorder._prompts.values()) <= 100
    assert {row["end"] for row in recorder.latest.rows.values()} == {"abort"}
    assert len(recorder.latest.events) <= picture.MOST_EVENTS


def test_requests_that_have_ended_do_not_pile_up_between_copies(tiny_llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder, most = Recorder(tiny_llm.manager), []
    monkeypatch.setattr(recorder, "_copied", float("inf"))  # none is due for ever

    def run(engine: Engine) -> None:
        there = engine.add([1, 2, 3], SamplingParams(max_tokens=1))  # so that the engine is never idle
        for i in range(500):
            request = engine.add([1 + i % 90], SamplingParams(max_tokens=1))
            recorder.observe(engine)
            engine.abort(request)
            most.append(len(recorder._followed))
        engine.abort(there)

    tiny_llm.owner.run(run)
    assert len(recorder.latest.rows) == 0, "a copy was made"
    assert max(most) <= 3 * picture.MOST_ENDED


def test_a_next_turn_that_takes_over_a_cache_is_forgotten_at_its_end(tiny_llm: LLM) -> None:
    recorder, params = Recorder(tiny_llm.manager), SamplingParams(max_tokens=2, temperature=0, ignore_eos=True)

    def run(engine: Engine) -> None:
        first = engine.add([5, 6, 7], params, hold=True)
        for tokens in (None, [9]):
            request = first if tokens is None else engine.add([*first.tokens, *tokens], params, after=first)
            while not request.finished:
                engine.step()
                recorder.observe(engine)
        assert request.key is first.key, "it began anew"
        recorder._copied = 0.0
        recorder.observe(engine)

    tiny_llm.owner.run(run)
    assert not recorder._followed


def test_an_observer_that_fails_costs_no_answer(tiny_llm: LLM) -> None:
    calls = []

    def fail(engine: Engine) -> None:
        calls.append(engine.idle)
        raise RuntimeError("a picture cannot be made")

    end = tiny_llm.owner.observe(fail)
    [first] = tiny_llm.generate([[5, 6, 7]], SamplingParams(max_tokens=3, temperature=0, ignore_eos=True))
    end()
    n = len(calls)
    [second] = tiny_llm.generate([[5, 6, 7]], SamplingParams(max_tokens=3, temperature=0, ignore_eos=True))
    assert first.token_ids == second.token_ids and calls[-1] and n == len(calls) >= 4


def test_copies_take_a_small_part_of_the_time(tiny_llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    now, copies = [1000.0], []

    class Clock:
        time = staticmethod(lambda: 0.0)
        monotonic = staticmethod(lambda: now[0])

    monkeypatch.setattr(picture, "time", Clock)
    recorder = Recorder(tiny_llm.manager)

    def copy(engine: Engine) -> None:
        copies.append(now[0])
        now[0] += 0.05  # it takes so long

    monkeypatch.setattr(recorder, "_copy", copy)

    def run(engine: Engine) -> None:
        request = engine.add([1, 2, 3], SamplingParams(max_tokens=1))
        for watched, gap in ((True, 0.05 * picture.SHARE), (False, 0.05 * picture.UNWATCHED_SHARE)):
            recorder.watched, recorder._copied = watched, 0.0
            copies.clear()
            for _ in range(3000):
                recorder.observe(engine)
                now[0] += 0.01
            assert len(copies) == pytest.approx(30 / gap, abs=1.5)
        engine.abort(request)
        recorder.observe(engine)
        assert copies[-1] > now[0] - 0.1  # the last word is never left out

    tiny_llm.owner.run(run)
