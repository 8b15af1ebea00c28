"""Snapshots: out of one cache and into another without changing a bit; what does not fit is refused."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tiny
import torch
from numerics import assert_same_bytes

from cache.machine_model import snapshot as facts
from eviction.harness import Run
from hybridkv.cache.manager import Compaction
from hybridkv.cache.snapshot import Snapshot, fingerprint, restore_request, snapshot_request
from hybridkv.config import CacheConfig
from hybridkv.errors import HybridKVError, OutOfPages, RequestError

KINDS = ("llama", "qwen3_5")
DTYPES = ("f32", "bf16", "fp8")


@pytest.fixture(scope="session")
def run_of(oracle: Callable, open_llm: Callable) -> Callable[..., Run]:
    def build(kind: str, pool: int = 1024, slots: int = 3, context: int = 512, **config: object) -> Run:
        config = {"kv_dtype": "f32", "page_size": 16, "window": 16, "recent": 8, "budget": 40, **config}
        return Run(open_llm(oracle(kind).folder).model, CacheConfig(**config), context, slots, pool)  # type: ignore

    return build


def dirty(run: Run) -> None:
    """Other requests came and went: pages in another order, full of their bytes, other slots taken."""
    rng = np.random.default_rng(3)
    for key, n in (("x", 90), ("y", 50)):
        run.admit(key)
        run.feed(tiny.token_ids(n, seed=n), key=key)
    run.manager.release_request("x")
    free = run.manager.tables["attention"].allocator
    free._stack[: free._top] = rng.permutation(free._stack[: free._top])


def taken(run: Run, compacted: bool = True, more: int = 5) -> Snapshot:
    run.admit()
    ids = tiny.token_ids(150)
    run.feed(ids, 64)
    if compacted:
        run.evict(ids)
    run.feed(tiny.token_ids(more, seed=9), 1)
    return snapshot_request(run.manager, "r")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("compacted", (True, False), ids=("compacted", "whole"))
@pytest.mark.parametrize("kind", KINDS)
def test_decode_after_restore_is_bit_equal(
    kind: str, compacted: bool, dtype: str, run_of: Callable, tmp_path: Path
) -> None:
    run = run_of(kind, kv_dtype=dtype)
    snapshot = taken(run, compacted)
    snapshot.save(tmp_path / "a.safetensors")
    want = run.feed(tiny.token_ids(20, seed=4), 1)
    for source in (snapshot, Snapshot.load(tmp_path / "a.safetensors")):
        other = run_of(kind, kv_dtype=dtype)
        dirty(other)
        slot = restore_request(other.manager, source, "back")
        other.manager.check_integrity()
        assert other.manager.slot_of["back"] == slot and other.manager.position("back") == 155
        assert (slot, other.manager.tables["attention"].pages[slot].tolist()) != (
            run.manager.slot_of["r"],
            run.manager.tables["attention"].pages[run.manager.slot_of["r"]].tolist(),
        )
        assert_same_bytes(want, other.feed(tiny.token_ids(20, seed=4), 1, "back"))
        other.manager.check_integrity()


def test_a_restored_request_can_be_compacted_forked_and_taken_again(run_of: Callable) -> None:
    run = run_of("qwen3_5")
    snapshot = taken(run)
    other = run_of("qwen3_5")
    dirty(other)
    restore_request(other.manager, snapshot, "back")
    again = snapshot_request(other.manager, "back")
    for a, b in ((snapshot.entries, again.entries), (snapshot.states, again.states)):
        assert a.keys() == b.keys()
        for key in a:
            assert_same_bytes(a[key], b[key])
    at = [p.tolist() for p in run.manager.entry_positions("r", "attention")]
    assert at == [p.tolist() for p in other.manager.entry_positions("back", "attention")]
    keep = {layer: [np.arange(0, 45, 3)] * 2 for layer in run.layers}
    more = tiny.token_ids(5, seed=8)
    for each, key in ((run, "r"), (other, "back")):
        each.manager.compact_request(key, keep)
        each.manager.fork_request(key, "fork")
    assert_same_bytes(run.feed(more, 1, "fork"), other.feed(more, 1, "fork"))


def test_another_page_size_holds_the_same_entries(run_of: Callable) -> None:
    run = run_of("llama")
    snapshot = taken(run)
    other = run_of("llama", page_size=7)
    restore_request(other.manager, snapshot, "back")
    back = snapshot_request(other.manager, "back")
    for key in snapshot.entries:
        assert_same_bytes(snapshot.entries[key], back.entries[key])
    assert other.manager.held_pages("back")["attention"] == sum(-(-int(n) // 7) for n in snapshot.lengths["attention"])


def test_taking_a_snapshot_changes_nothing_and_later_writes_do_not_reach_it(run_of: Callable) -> None:
    run = run_of("qwen3_5")
    snapshot = taken(run)
    before = facts(run.manager)
    again = snapshot_request(run.manager, "r")
    assert facts(run.manager) == before
    run.feed(tiny.token_ids(30))
    for key in snapshot.entries:
        assert_same_bytes(snapshot.entries[key], again.entries[key])
    for key in snapshot.states:
        assert_same_bytes(snapshot.states[key], again.states[key])


def test_restoring_is_all_or_nothing(run_of: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = taken(run_of("llama"), compacted=False)
    small = run_of("llama", pool=128)
    before = facts(small.manager)
    with pytest.raises(OutOfPages):
        restore_request(small.manager, snapshot, "back")
    assert facts(small.manager) == before

    run = run_of("llama", slots=1)
    run.admit("x")
    before = facts(run.manager)
    with pytest.raises(HybridKVError, match="slots"):
        restore_request(run.manager, snapshot, "back")
    with pytest.raises(HybridKVError, match="resident"):
        restore_request(run.manager, snapshot, "x")
    assert facts(run.manager) == before

    run = run_of("llama")
    monkeypatch.setattr(run.manager.state, "restore", _no_memory)
    with pytest.raises(MemoryError):
        restore_request(run.manager, snapshot, "back")
    run.manager.check_integrity()
    assert run.manager.tables["attention"].allocator.held == 0 and not run.manager.slot_of


def _no_memory(*args: object) -> None:
    raise MemoryError


def test_a_request_that_is_not_there_cannot_be_taken(run_of: Callable) -> None:
    with pytest.raises(RequestError, match="not resident"):
        snapshot_request(run_of("llama").manager, "nobody")


@pytest.mark.parametrize("other", (dict(kv_dtype="bf16"), dict(kv_dtype="fp8"), dict(window=8), dict(budget=None)))
def test_a_cache_that_stores_other_things_refuses(other: dict, run_of: Callable) -> None:
    snapshot, run = taken(run_of("llama")), run_of("llama", **other)
    before = facts(run.manager)
    with pytest.raises(RequestError, match="other things"):
        restore_request(run.manager, snapshot, "back")
    with pytest.raises(RequestError, match="other things"):
        restore_request(run_of("qwen3_5").manager, snapshot, "back")
    assert facts(run.manager) == before


def test_a_snapshot_past_the_context_is_refused(run_of: Callable) -> None:
    snapshot = taken(run_of("llama"))
    with pytest.raises(RequestError, match="context"):
        restore_request(run_of("llama", context=154).manager, snapshot, "back")


def test_a_snapshot_that_contradicts_itself_is_refused(run_of: Callable) -> None:
    snapshot, run = taken(run_of("llama")), run_of("llama")
    past = snapshot.compaction
    assert past is not None
    kept = past.kept["attention"]
    longer = {name: n + 1 for name, n in snapshot.lengths.items()}
    name = ("attention", "k")
    bad = (
        replace(snapshot, lengths=longer),
        replace(snapshot, lengths={}),
        replace(snapshot, position=snapshot.position + 1),
        replace(snapshot, position=-1),
        replace(snapshot, compaction=None),
        replace(snapshot, compaction=Compaction(past.position, {"attention": [k[::-1] for k in kept]})),
        replace(snapshot, compaction=Compaction(past.position, {"attention": [k + 500 for k in kept]})),
        replace(snapshot, compaction=Compaction(past.position, {"attention": kept[:-1]})),
        replace(snapshot, entries={**snapshot.entries, name: snapshot.entries[name][:, 1:]}),
        replace(snapshot, entries={**snapshot.entries, name: snapshot.entries[name].double()}),
        replace(snapshot, entries={}),
        replace(snapshot, states=dict([*snapshot.states.items()][1:])),
    )
    before = facts(run.manager)
    for each in bad:
        with pytest.raises(RequestError):
            restore_request(run.manager, each, "back")
        assert facts(run.manager) == before


def test_a_snapshot_without_state_is_refused_where_state_is_not_lent(run_of: Callable) -> None:
    """What is left out may be last queries, which are lent; the state of DeltaNet layers may not."""
    run = run_of("qwen3_5")
    before = facts(run.manager)
    with pytest.raises(RequestError, match="does not fit"):
        restore_request(run.manager, replace(taken(run_of("qwen3_5")), states={}), "back")
    assert facts(run.manager) == before
    run = run_of("llama")
    snapshot = taken(run_of("llama"))
    assert snapshot.states
    slot = restore_request(run.manager, replace(snapshot, states={}), "back")
    assert run.manager.query_buffers.of[slot] == -1 and run.manager.query_buffers.count
    run.manager.check_integrity()


def test_a_damaged_file_is_refused_wherever_it_is_damaged(run_of: Callable, tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    taken(run_of("llama")).save(path)
    whole = path.read_bytes()
    header = int.from_bytes(whole[:8], "little")
    broken = tmp_path / "b.safetensors"
    for cut in (0, 4, 8, 20, 8 + header - 1, 8 + header, len(whole) // 2, len(whole) - 1):
        broken.write_bytes(whole[:cut])
        with pytest.raises(HybridKVError):
            Snapshot.load(broken)
    rng = np.random.default_rng(0)
    places = [*range(0, 8), *rng.integers(8, 8 + header, 60), *rng.integers(8 + header, len(whole), 60), len(whole) - 1]
    for at in places:
        altered = bytearray(whole)
        altered[at] ^= 1 << int(rng.integers(0, 8))
        broken.write_bytes(altered)
        with pytest.raises(HybridKVError):
            Snapshot.load(broken)
    broken.write_bytes(whole + b"\0")
    with pytest.raises(HybridKVError):
        Snapshot.load(broken)
    assert Snapshot.load(path).position == 155


def test_what_is_not_a_snapshot_is_refused(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    with pytest.raises(HybridKVError, match="cannot be read"):
        Snapshot.load(tmp_path / "none")
    save_file({"x": torch.zeros(3)}, tmp_path / "other")
    with pytest.raises(HybridKVError, match="not a snapshot"):
        Snapshot.load(tmp_path / "other")
    save_file({"x": torch.zeros(3)}, tmp_path / "later", {"format": "hybridkv-snapshot", "version": "2"})
    with pytest.raises(HybridKVError, match="version 1"):
        Snapshot.load(tmp_path / "later")
    (tmp_path / "deep").write_bytes((100000).to_bytes(8, "little") + b"[" * 100000)
    with pytest.raises(HybridKVError, match="not a snapshot"):
        Snapshot.load(tmp_path / "deep")


def test_a_write_that_fails_leaves_the_old_file_and_no_other(
    run_of: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.safetensors"
    snapshot = taken(run_of("llama"))
    snapshot.save(path)
    before = path.read_bytes()
    monkeypatch.setattr("os.replace", _no_memory)
    with pytest.raises(MemoryError):
        snapshot.save(path)
    assert path.read_bytes() == before and [p.name for p in tmp_path.iterdir()] == ["a.safetensors"]


def test_the_file_holds_what_the_request_holds_and_little_more(run_of: Callable, tmp_path: Path) -> None:
    snapshot = taken(run_of("llama"))
    snapshot.save(tmp_path / "a")
    assert snapshot.nbytes < (tmp_path / "a").stat().st_size < snapshot.nbytes + 16384
    assert len(snapshot.fingerprint) == 64 and fingerprint(run_of("llama").manager.schema) == snapshot.fingerprint
