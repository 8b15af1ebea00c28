"""The feed of a cache: a snapshot and what changes, to whoever may see it, and nobody waits for a reader."""

import asyncio
import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from hybridkv import LLM, ReuseConfig
from hybridkv.server import feed as feeds
from hybridkv.server import page
from hybridkv.server.feed import BEHIND, MOST_WATCHERS, CacheEvents, CacheFeed, View
from hybridkv.server.picture import Holders, Kind, Picture
from server.running import HI, Running, serving, until
from server.test_metrics import values_of
from server.watching import Reader, ended_row, snapshot, taken

SECRET = "zebra"
CHAT = "/v1/chat/completions"


@pytest.fixture(autouse=True)
def short_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that tokens a second are 0 again soon after the last one."""
    monkeypatch.setattr(feeds, "RATE_SECONDS", 0.3)


def body(**more: Any) -> dict[str, Any]:
    return {"messages": HI, "max_tokens": 6, "temperature": 0, "ignore_eos": True, **more}


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    """Whether two readers know the same, but for events that one has seen for longer."""
    parts = ("engine", "kinds", "requests", "map")
    return all(a[name] == b[name] for name in parts) and a["events"][-1:] == b["events"][-1:]


def test_a_snapshot_and_all_deltas_are_the_next_snapshot(tiny_one: Running) -> None:
    with Reader(tiny_one) as reader:
        assert reader.status == 200 and reader.headers["content-type"] == "text/event-stream; charset=utf-8"
        name, _, first = reader.next()
        assert name == "snapshot" and first["server"]["model"] == "tiny" and first["server"]["eviction"]
        last = max((event["seq"] for event in first["events"]), default=0)
        for i in range(3):
            tiny_one.chat(**body(n=2, messages=[{"role": "user", "content": f"question {i} " * 20}]))
        reader.until(lambda known: sum(e["what"] == "finished" and e["seq"] > last for e in known["events"]) == 6)
        reader.until(lambda known: not known["engine"]["written_per_s"])
        assert same(reader.known, snapshot(tiny_one))
        new = [row for row in reader.known["requests"].values() if row["prompt"] and row["end"] == "length"]
        assert len(new) >= 6 and all(row["written"] == 6 and row["request"] for row in new[-6:])


def test_numbers_are_those_of_the_cache(tiny_one: Running) -> None:
    found, manager = snapshot(tiny_one), tiny_one.llm.manager
    table = manager.tables["attention"]
    attention = next(kind for kind in found["kinds"] if kind["name"] == "attention")
    assert (attention["total"], attention["unit_bytes"]) == (table.allocator.total, table.schema.page_bytes)
    state = next(kind for kind in found["kinds"] if kind["what"] == "states")
    assert (state["name"], state["total"], state["unit_bytes"]) == (
        "gdn",
        manager.slots + manager.checkpoints,
        manager.schema.slot_bytes,
    )
    assert found["server"]["streams"] == table.schema.streams and found["server"]["context"] == 512


def test_checkpoints_of_other_bytes_are_a_kind_of_their_own(tiny_llm: LLM) -> None:
    """In the feed and in the metrics; where they are in bf16."""
    reuse = ReuseConfig(checkpoint_dtype="bf16")
    with (
        LLM(tiny_llm.path, "cpu", "float32", max_requests=2, max_context=512, reuse=reuse) as llm,
        serving(llm, names=("tiny",)) as running,
    ):
        running.chat(**body(messages=[{"role": "user", "content": "question " * 20}]))
        running.idle()
        kept, schema, state = llm.manager.reuse, llm.manager.schema, llm.manager.state
        assert kept is not None and (many := len(kept.checkpoints.all))
        rows = {"gdn": (2, schema.slot_bytes, 0)}
        rows["gdn checkpoint"] = kept.checkpoints.rows, schema.checkpoint_bytes, many

        def shown() -> dict[str, tuple[int, int, int]]:
            kinds = snapshot(running)["kinds"]
            return {k["name"]: (k["total"], k["unit_bytes"], k["later"]) for k in kinds if k["what"] == "states"}

        until(lambda: shown() == rows)
        queries = sum(t.nbytes for (name, _), t in state.tensors.items() if name == "queries")
        assert sum(total * each for total, each, _ in rows.values()) == state.nbytes - queries
        states = values_of(running)['hybridkv_reuse_bytes{model_name="tiny",tier="device",what="states"}']
        assert states == many * schema.checkpoint_bytes < many * schema.slot_bytes


def test_who_comes_back_gets_what_changed_meanwhile(tiny_one: Running) -> None:
    with Reader(tiny_one) as reader:
        _, identity, _ = reader.next()
    known = reader.known
    tiny_one.chat(**body())
    with Reader(tiny_one, last_event_id=identity) as again:
        again.known = known
        name, _, _ = again.next()
        assert name == "delta"
        again.until(lambda found: not found["engine"]["written_per_s"] and not found["engine"]["running"])
        assert same(again.known, snapshot(tiny_one))
    for unknown in ("0.1", "", identity + "9", "x" * 500):
        with Reader(tiny_one, last_event_id=unknown) as other:
            assert other.next()[0] == "snapshot"


def test_sixteen_may_watch(tiny_one: Running) -> None:
    until(lambda: tiny_one.service.feed._watchers == 0)
    readers = [Reader(tiny_one) for _ in range(MOST_WATCHERS)]
    try:
        assert all(reader.next()[0] == "snapshot" for reader in readers)
        status, headers, found = tiny_one.ask("GET", "/v1/cache/events")
        assert status == 429 and headers["retry-after"] and "16 readers" in found["error"]["message"]
        assert tiny_one.ask("GET", "/v1/cache")[0] == 200
        readers.pop().close()
        until(lambda: tiny_one.service.feed._watchers < MOST_WATCHERS)
        with Reader(tiny_one) as reader:
            assert reader.next()[0] == "snapshot"
    finally:
        for reader in readers:
            reader.close()
    until(lambda: tiny_one.service.feed._watchers == 0 and not tiny_one.service.feed.recorder.watched)


def test_readers_that_never_read_hold_up_nobody(tiny_one: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feeds, "PERIOD", 0.001)
    with tiny_one.connect() as silent:
        silent.sendall(b"GET /v1/cache/events HTTP/1.1\r\nhost: localhost\r\n\r\n")
        for _ in range(5):
            tiny_one.chat(**body())
        with Reader(tiny_one) as reader:
            assert reader.next()[0] == "snapshot"


@pytest.fixture
def own_feed(tiny_one: Running) -> Iterator[CacheFeed]:
    """A feed of its own, with pictures that a test makes."""
    yield CacheFeed(tiny_one.service, feeds.Recorder(tiny_one.llm.manager))


def publish(feed: CacheFeed, count: int) -> None:
    """The next picture."""
    last = feed.recorder.latest
    rows = {1: {"n": 1, "read": count}, 100 + count: {"n": 100 + count, "read": 0}}
    event = {"seq": count, "what": "began"}
    feed.recorder.latest = Picture(last.kinds, last.holders, rows, count, 0, 0, 0, (*last.events, event))


def test_changes_are_joined_four_times_a_second(own_feed: CacheFeed, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [50.0]
    monkeypatch.setattr(feeds, "time", type("", (), {"monotonic": staticmethod(lambda: now[0])}))

    async def run() -> list[View]:
        views = [await own_feed.view()]
        for count in range(1, 1001):  # ten seconds of steps of 10 ms
            now[0] += 0.01
            publish(own_feed, count)
            views.append(await own_feed.view())
        now[0] += 1
        views.append(await own_feed.view())
        assert await own_feed.view() is views[-1]
        return views

    first, *views, last = asyncio.run(run())
    different = {view.version for view in views} - {first.version}
    assert 38 <= len(different) <= 40
    delta = own_feed.delta(views[900], last, b"")
    assert delta["requests"]["1"] == {"n": 1, "read": 1000} and delta["requests"]["1100"]["n"] == 1100
    assert [n for n, row in delta["requests"].items() if row is None] == [
        str(n) for n in views[900].picture.rows if n > 1
    ]
    assert [event["seq"] for event in delta["events"]] == list(
        range(views[900].picture.events[-1]["seq"] + 1, 1001)
    )  # none is lost, none comes twice
    assert own_feed.delta(last, last, b"") == {}
    assert own_feed.known(own_feed.id_of(last)) is last and own_feed.known(own_feed.id_of(first)) is None


def test_deltas_of_any_map_lead_to_its_snapshot(own_feed: CacheFeed) -> None:
    rng, recorder, told = np.random.default_rng(3), own_feed.recorder, []
    kinds = (Kind("attention", "pages", 40_000, 4096, 2), Kind("gdn", "states", 8, 100, 6))

    def some(kind: Kind, reach: int) -> Holders:
        ids = rng.permutation(min(reach, kind.total))[: rng.integers(1, 6000)]
        held = np.zeros(kind.total, bool)
        held[ids] = True
        return Holders(held, ((7, ids[: len(ids) // 3]), (9, ids[len(ids) // 4 :][:50])))

    def changed(holders: Holders) -> Holders:
        held = holders.held.copy()
        at = [0, 2, len(held) // 4]  # far apart in the larger one
        held[at] = ~held[at]
        return Holders(held, ())

    async def run() -> None:
        known: dict[str, Any] = {}
        before = None
        for reach in (500, 900, 3000, 2000, 20_000, 39_999, 100, 0, 0):
            last = recorder.latest.holders
            holders = {kind.name: some(kind, reach) if reach else changed(last[kind.name]) for kind in kinds}
            recorder.latest = Picture(kinds, holders)
            view = await own_feed.view(fresh=True)
            whole = own_feed.snapshot(view, b"")
            event = whole if before is None else own_feed.delta(before, view, b"")
            known, before = taken(known, json.loads(json.dumps(event))), view
            assert all(known[part] == taken({}, whole)[part] for part in ("kinds", "map", "requests", "engine"))
            told.append(len(json.dumps(event)) / len(json.dumps(whole)))

    asyncio.run(run())
    assert told[-1] < 0.1  # a few cells are told in few bytes


class Transport:
    """What the feed asks of a connection."""

    unread = 0

    def get_write_buffer_size(self) -> int:
        return self.unread

    def get_extra_info(self, name: str) -> None:
        return None


def test_a_reader_that_is_behind_gets_a_new_snapshot(own_feed: CacheFeed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feeds, "PERIOD", 1e-9)
    sent: list[bytes] = []
    transport = Transport()

    async def run() -> None:
        gone, count = asyncio.Event(), 0

        async def receive() -> dict[str, Any]:
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: dict[str, Any]) -> None:
            nonlocal count
            sent.append(message.get("body", b""))
            if b"behind" in sent[-1]:
                transport.unread = 0  # here a real connection waits until its reader reads
            count += 1
            publish(own_feed, count)
            transport.unread = {6: BEHIND + 1, 9: BEHIND}.get(count, 0)
            if count > 12:
                gone.set()

        events = CacheEvents(own_feed, own_feed._service, b"", None)
        await events({"extensions": {"hybridkv.transport": transport}}, receive, send)

    asyncio.run(asyncio.wait_for(run(), 60))
    names = [part.split(b"event: ")[1].split(b"\n")[0].decode() for part in sent if b"event: " in part]
    at = next(i for i, part in enumerate(sent) if b"behind" in part)
    assert names[0] == "snapshot" and names.count("snapshot") == 2 and names.count("delta") >= 6
    assert sent[:at].count(b"") == 1 and b"event: snapshot" in sent[at + 1]
    seen = json.loads(sent[at + 1].split(b"data: ")[1])
    assert [event["seq"] for event in seen["events"]] == list(range(1, at + 2))[: len(seen["events"])]


@pytest.mark.slow
def test_a_reader_that_sleeps_has_no_backlog(tiny_one: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feeds, "PERIOD", 0.001)
    feed, count, size = tiny_one.service.feed, 0, 0

    def publish_much() -> None:
        nonlocal count, size
        count += 1
        rows = {n: {"n": n, "read": count, "why": f"{count} " * 20} for n in range(200)}
        size += len(json.dumps(rows))
        feed.recorder.latest = replace(feed.recorder.latest, rows=rows, running=count)

    def unread() -> int:
        connections = tiny_one.server._http.server_state.connections  # type: ignore[union-attr]
        return max(protocol.transport.get_write_buffer_size() for protocol in list(connections))

    with Reader(tiny_one, room=4096) as reader:
        assert reader.next()[0] == "snapshot"

        def is_behind() -> bool:
            publish_much()
            return unread() > BEHIND

        until(is_behind)
        for _ in range(50):  # whatever comes now, nothing is added to what it has not read
            publish_much()
            assert unread() <= 2 * BEHIND
        names = [reader.next()[0]]
        while reader.known["engine"]["running"] != count:
            names.append(reader.next()[0])
        assert names.count("snapshot") == 1 and same(reader.known, snapshot(tiny_one))
        assert len(reader.seen) < size / 2
    tiny_one.llm.owner.run(lambda engine: None)  # the true picture again


@pytest.fixture(scope="module")
def locked(tiny_llm: LLM) -> Iterator[Running]:
    with serving(tiny_llm, api_keys=("first", "second"), names=("tiny",)) as running:
        yield running


def test_text_and_names_are_for_the_key_that_asked(locked: Running) -> None:
    with Reader(locked, x_api_key="first") as own, Reader(locked, authorization="Bearer second") as other:
        for reader in (own, other):
            assert reader.next()[0] == "snapshot"
        asked = body(messages=[{"role": "user", "content": f"{SECRET} " * 30}])
        status, headers, _ = locked.ask("POST", CHAT, asked, {"x-api-key": "first", "x-request-id": f"my-{SECRET}"})
        assert status == 200 and headers["x-request-id"] == f"my-{SECRET}"
        for reader in (own, other):
            reader.until(lambda known: any(e["what"] == "finished" for e in known["events"]))
        [mine] = [row for row in own.known["requests"].values() if row.get("request") == f"my-{SECRET}"]
        [theirs] = [row for row in other.known["requests"].values() if row["n"] == mine["n"]]
        assert theirs == {name: value for name, value in mine.items() if name != "request"}
        assert SECRET.encode() not in other.seen and SECRET not in json.dumps(snapshot_text(locked, "second"))
        path = f"/v1/cache/requests/{mine['n']}"
        status, headers, found = locked.ask("GET", path, headers={"x-api-key": "first"})
        assert status == 200 and SECRET in "".join(found["texts"]) and headers["cache-control"] == "no-store"
        assert found["tokens"] == mine["prompt"] == len(found["texts"]) and set(found["counts"]) == {found["streams"]}
        for headers in ({"x-api-key": "second"}, {"authorization": "Bearer second"}):
            status, _, found = locked.ask("GET", path, headers=headers)
            assert status == 404 and SECRET not in json.dumps(found)
        assert locked.ask("GET", path)[0] == 401 and locked.ask("GET", "/v1/cache")[0] == 401
    locked.idle()


def snapshot_text(server: Running, key: str) -> Any:
    return server.ask("GET", "/v1/cache", headers={"x-api-key": key})[2]


def test_a_prompt_is_shaded_by_the_streams_that_kept_each_token(tiny_one: Running) -> None:
    content = "".join(chr(97 + i * i % 26) for i in range(300))
    messages = [{"role": "user", "content": content}]
    asked = body(messages=messages, hybridkv={"budget": 96, "policy": "snapkv"})
    _, found = tiny_one.post(CHAT, asked, x_request_id="shaded")
    row = ended_row(tiny_one, "shaded")
    number = row["n"]
    status, _, shown = tiny_one.ask("GET", f"/v1/cache/requests/{number}")
    assert status == 200 and content in "".join(shown["texts"])
    assert shown["kept"] == 96 and sum(shown["counts"]) == 96 * shown["streams"]
    assert set(shown["counts"][-64:]) == {shown["streams"]} and 0 in shown["counts"]  # the last 64 always stay
    assert found["usage"]["hybridkv"]["kept_tokens"] == 96 + 6 - 1  # the last token is never read
    assert (row["bytes"], row["full"]) == tuple(found["usage"]["hybridkv"][n] for n in ("kv_bytes", "full_bytes"))
    assert tiny_one.ask("GET", f"/v1/cache/requests/{number}?first=99999")[2]["first"] == 0
    for wrong in ("-1", "x", "1" * 40, "%D9%A3", "", "1.5"):
        assert tiny_one.ask("GET", f"/v1/cache/requests/{number}?first={wrong}")[0] == 400
    assert tiny_one.ask("GET", "/v1/cache/requests/abc")[0] == 400
    assert tiny_one.ask("GET", "/v1/cache/requests/999999")[0] == 404


def test_long_prompts_come_in_parts(tiny_one: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "WINDOW", 100)
    tiny_one.post(CHAT, body(messages=[{"role": "user", "content": "abcdefghij" * 25}]), x_request_id="long")
    number = ended_row(tiny_one, "long")["n"]

    def part(first: int) -> Any:
        return tiny_one.ask("GET", f"/v1/cache/requests/{number}?first={first}")[2]

    whole = [part(first) for first in (0, 100, 200)]
    assert "abcdefghij" * 25 in "".join(text for found in whole for text in found["texts"])
    assert sum(len(found["counts"]) for found in whole) == whole[0]["tokens"]
    assert part(10_000) == whole[-1]


def test_the_feed_ends_with_the_server(tiny_llm: LLM) -> None:
    with serving(tiny_llm) as running:
        reader = Reader(running)
        assert reader.next()[0] == "snapshot"
    with pytest.raises(StopIteration):  # it came to its end, and was not cut
        while True:
            reader.next()
    reader.close()
    assert running.service.feed.recorder.observe not in tiny_llm.owner._state.observers


def test_the_page_is_three_files_with_a_strict_policy(tiny_one: Running) -> None:
    for path, kind in (("/", "text/html"), ("/page.css", "text/css"), ("/page.js", "text/javascript")):
        status, headers, text = tiny_one.ask("GET", path)
        assert status == 200 and headers["content-type"] == f"{kind}; charset=utf-8"
        policy = headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; ")
        assert "frame-ancestors 'none'" in policy and "unsafe" not in policy
        again = tiny_one.ask("GET", path, headers={"if-none-match": headers["etag"]})
        assert (again[0], again[2]) == (304, "") and again[1]["etag"] == headers["etag"]
        assert tiny_one.ask("GET", path, headers={"if-none-match": '"other"'})[0] == 200
        outside = text.replace("http://www.w3.org/2000/svg", "")  # the name of a language, nobody asks for it
        assert "http:" not in outside and "https:" not in outside and "//cdn" not in outside
    assert tiny_one.ask("HEAD", "/")[0] == 200 and tiny_one.ask("POST", "/", {})[0] == 405
