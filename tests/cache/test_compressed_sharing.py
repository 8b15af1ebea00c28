"""Forks, snapshots and tokens taken back: what follows is bit for bit what it would have been, or it is refused."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from numerics import assert_close_rms, assert_same_bytes
from torch import Tensor

from cache.compressed_rig import REAL, Rig, numbers, refused, stored
from hybridkv.cache import KVCacheManager, OutOfPages
from hybridkv.cache.snapshot import Snapshot, restore_request, snapshot_request
from hybridkv.errors import HybridKVError, RequestError
from hybridkv.kernels.formats.page_format import load_entries_ref

FORMATS = [("f32", "f32"), ("bf16", "bf16"), ("fp8", "mxfp4"), ("fp8_entry", "nvfp4")]
THEN, CUTS = numbers(18, 40), (1, 1, 2, 5, 9)  # what a request goes on with, and in which chunks


@pytest.fixture(scope="module")
def rig() -> Rig:
    return Rig()


def go_on(rig: Rig, m: KVCacheManager, name: str, tokens: list[int] = THEN) -> Tensor:
    """Attention of all layers [layers, T, heads, head_dim]: one token at a time, then chunks."""
    parts, at = [], 0
    for n in CUTS:
        parts.append(rig.feed(m, name, tokens[at : at + n]))
        at += n
    return torch.cat(parts, 1)


@cache
def undisturbed(rig: Rig, length: int, **more: object) -> tuple[KVCacheManager, Tensor]:
    """A cache with one request "a" that went on after `length` tokens, and its attention since."""
    m = rig.manager(96, requests=1, **more)  # type: ignore[arg-type]
    m.admit_request("a")
    rig.feed(m, "a", numbers(length))
    return m, go_on(rig, m, "a")


def same_entries(m: KVCacheManager, name: str, other: KVCacheManager, twin: str) -> None:
    assert m.position(name) == other.position(twin)
    for layer, which in ((1, "entries"), (1, "index"), (2, "entries"), (3, "entries"), (3, "index")):
        mine, theirs = stored(m, layer, name, which), stored(other, layer, twin, which)
        assert_same_bytes(load_entries_ref(*mine), load_entries_ref(*theirs))


def same_state(m: KVCacheManager, name: str, other: KVCacheManager, twin: str) -> None:
    for t, u in zip(m.state.tensors.values(), other.state.tensors.values(), strict=True):
        assert_same_bytes(t[:, m.slot_of[name]], u[:, other.slot_of[twin]])


# ---- forks


@pytest.mark.parametrize(
    ("length", "block", "kv", "index"),
    [(16, 16, "f32", "f32"), (32, 32, "fp8", "mxfp4"), (48, 16, "fp8_entry", "nvfp4"), (0, 16, "bf16", "bf16")],
)
def test_a_fork_and_its_parent_go_on_as_if_alone(rig: Rig, length: int, block: int, kv: str, index: str) -> None:
    """The child takes a slot that another request has used; parent and child write different things in turn."""
    alone, want = undisturbed(rig, length, kv=kv, index=index, block=block)
    m = rig.manager(96, requests=2, kv=kv, index=index, block=block)
    m.admit_request("a")
    rig.feed(m, "a", numbers(length))
    m.admit_request("old")
    rig.feed(m, "old", numbers(50, 7), 25)
    m.release_request("old")
    free = m.free_pages()
    m.fork_request("a", "b")
    assert m.free_pages() == free  # nothing is copied but state
    same_state(m, "a", m, "b")
    other = numbers(18, 3)
    at = 0
    for n in CUTS:  # in one step, and different
        rig.run(m, {"a": other[at : at + n], "b": THEN[at : at + n]})
        at += n
    same_entries(m, "b", alone, "a")
    same_state(m, "b", alone, "a")
    m.check_integrity()
    m.release_request("a")  # the child keeps what they share
    m.admit_request("c")
    rig.feed(m, "c", numbers(block, 8))
    same_entries(m, "b", alone, "a")
    m.release_request("b")
    m.fork_request("c", "d")
    m.release_request("c"), m.release_request("d")
    assert all(t.allocator.held == 0 for t in m.tables.values())


@pytest.mark.parametrize("length", [1, 3, 4, 8, 15, 17, 30])
def test_between_boundaries_there_is_no_fork_and_no_snapshot(rig: Rig, length: int) -> None:
    m = rig.manager(96, drafts=2)
    m.admit_request("a")
    rig.feed(m, "a", numbers(length))
    below, above = length // 16 * 16, length // 16 * 16 + 16
    for call in (lambda: m.fork_request("a", "b"), lambda: snapshot_request(m, "a")):
        refused(m, RequestError, call, f"multiple of 16.*at {length}.*{below}.*{above}")
    assert "b" not in m.slot_of
    rig.feed(m, "a", numbers(above - length, 2))
    m.fork_request("a", "b")


def test_forks_at_the_real_ratios() -> None:
    rig = Rig(REAL)
    m = rig.manager(400, requests=2)
    m.admit_request("a")
    rig.feed(m, "a", numbers(127))
    refused(m, RequestError, lambda: m.fork_request("a", "b"), "multiple of 128.*at 127: do it at 0 or at 128")
    rig.feed(m, "a", numbers(129, 1), 43)
    m.fork_request("a", "b")
    outs = [go_on(rig, m, name) for name in ("a", "b")]
    assert_same_bytes(*outs)
    m.truncate_request("b", m.position("b"))  # nothing to take back
    refused(m, RequestError, lambda: m.truncate_request("b", m.position("b") - 1), "rewound")


def test_a_fork_that_fails_leaves_nothing(rig: Rig) -> None:
    m = rig.manager(96, requests=2)
    m.admit_request("a"), m.admit_request("b")
    rig.feed(m, "a", numbers(16))
    refused(m, HybridKVError, lambda: m.fork_request("a", "c"), "slots")
    refused(m, RequestError, lambda: m.fork_request("a", "b"), "already")


def test_pages_reserved_for_a_step_are_not_shared(rig: Rig) -> None:
    m = rig.manager(96, requests=2)
    m.admit_request("a")
    rig.feed(m, "a", numbers(16))
    m.prepare_forward([("a", 20)])
    assert m.held_pages("a") == {"csa": 3, "hca": 2}
    m.fork_request("a", "b")
    assert m.held_pages("b") == {"csa": 1, "hca": 1}
    assert_same_bytes(go_on(rig, m, "a"), go_on(rig, m, "b"))
    m.check_integrity()


# ---- snapshots


@pytest.mark.parametrize(
    ("length", "kv", "index"),
    [(0, "f32", "f32"), (16, "f32", "f32"), (32, "bf16", "bf16"), (48, "fp8", "mxfp4"), (16, "fp8_entry", "nvfp4")],
)
def test_a_restored_request_goes_on_as_if_never_away(
    rig: Rig, length: int, kv: str, index: str, tmp_path: Path
) -> None:
    alone, want = undisturbed(rig, length, kv=kv, index=index)
    m = rig.manager(96, requests=2, kv=kv, index=index)
    m.admit_request("a")
    rig.feed(m, "a", numbers(length))
    taken = snapshot_request(m, "a")
    taken.save(tmp_path / "a")
    m.release_request("a")
    for name in ("x", "y"):  # other requests use its slot and its pages
        m.admit_request(name)
        rig.feed(m, name, numbers(60, 5))
    m.release_request("x")
    restore_request(m, Snapshot.load(tmp_path / "a"), "a")
    assert m.position("a") == length
    assert_same_bytes(go_on(rig, m, "a"), want)
    same_entries(m, "a", alone, "a")
    same_state(m, "a", alone, "a")
    m.release_request("y")
    restore_request(m, taken, "b")  # what was written since has not reached it
    assert_same_bytes(go_on(rig, m, "b"), want)
    m.check_integrity()


def test_snapshots_do_not_fit_other_caches(rig: Rig) -> None:
    m = rig.manager(96)
    m.admit_request("a")
    rig.feed(m, "a", numbers(32))
    taken = snapshot_request(m, "a")
    for more in ({"kv": "bf16"}, {"index": "fp8"}, {"block": 32}, {"drafts": 1}, {"ring": 9}):
        other = rig.manager(96, **more)  # type: ignore[arg-type]
        refused(other, RequestError, lambda other=other: restore_request(other, taken, "a"), "stores other things")
    tight = rig.manager(96, requests=2, pages={"csa": 1})
    refused(tight, OutOfPages, lambda: restore_request(tight, taken, "a"))
    short = rig.manager(31)
    refused(short, RequestError, lambda: restore_request(short, taken, "a"), "31 tokens")


# ---- tokens taken back


@pytest.mark.parametrize(("back", "at_once"), [(1, True), (2, False), (3, True), (3, False)])
@pytest.mark.parametrize("length", [1, 7, 8, 15, 16, 31, 33])
def test_tokens_taken_back_leave_no_trace(rig: Rig, length: int, back: int, at_once: bool) -> None:
    """Across the ends of entries of both kinds and of pages, and round the ring."""
    alone, want = undisturbed(rig, length, drafts=3)
    m = rig.manager(96, requests=1, drafts=3)
    m.admit_request("a")
    rig.feed(m, "a", numbers(length))
    for attempt in range(2):
        rig.feed(m, "a", numbers(back, 60 + attempt), 0 if at_once else 1)
        m.truncate_request("a", length)
        assert m.position("a") == length
        assert m.held_pages("a") == {"csa": -(-(length // 4) // 4), "hca": length // 16}
        m.check_integrity()
    assert_same_bytes(go_on(rig, m, "a"), want)
    same_entries(m, "a", alone, "a")


@pytest.mark.parametrize(("kv", "index"), FORMATS[1:])
def test_tokens_taken_back_in_every_format(rig: Rig, kv: str, index: str) -> None:
    alone, want = undisturbed(rig, 30, drafts=3, kv=kv, index=index)
    m = rig.manager(96, requests=1, drafts=3, kv=kv, index=index)
    m.admit_request("a")
    rig.feed(m, "a", numbers(30))
    rig.feed(m, "a", numbers(3, 61))
    m.truncate_request("a", 30)
    assert_same_bytes(go_on(rig, m, "a"), want)
    same_entries(m, "a", alone, "a")


@pytest.mark.parametrize("drafts", [0, 1, 3])
def test_more_than_the_drafts_cannot_be_taken_back(rig: Rig, drafts: int) -> None:
    m = rig.manager(96, drafts=drafts)
    m.admit_request("a")
    rig.feed(m, "a", numbers(20))
    refused(m, RequestError, lambda: m.truncate_request("a", 20 - drafts - 1), "rewound")
    refused(m, RequestError, lambda: m.truncate_request("a", 0), "rewound")
    for wrong in (-1, 21):
        refused(m, RequestError, lambda wrong=wrong: m.truncate_request("a", wrong), "at position 20")
    m.truncate_request("a", 20 - drafts)
    assert m.position("a") == 20 - drafts


def test_what_was_overwritten_cannot_be_taken_back_later(rig: Rig) -> None:
    """Rows go by the furthest position a request has seen, not by where it is."""
    m = rig.manager(96, drafts=2)
    m.admit_request("a")
    rig.feed(m, "a", numbers(20))
    m.truncate_request("a", 18)
    refused(m, RequestError, lambda: m.truncate_request("a", 17), "rewound")
    rig.feed(m, "a", numbers(1, 3))
    m.truncate_request("a", 18)  # as before: 20 was the furthest
    refused(m, RequestError, lambda: m.truncate_request("a", 17), "rewound")
    rig.feed(m, "a", numbers(3, 4))  # 21
    refused(m, RequestError, lambda: m.truncate_request("a", 18), "rewound")
    m.truncate_request("a", 19)


def copied(m: KVCacheManager) -> None:
    m.fork_request("a", "b")


def restored(m: KVCacheManager) -> None:
    restore_request(m, snapshot_request(m, "a"), "b")


@pytest.mark.parametrize("duplicate", [copied, restored])
def test_a_duplicate_cannot_take_back_more_than_its_origin(
    rig: Rig, duplicate: Callable[[KVCacheManager], None]
) -> None:
    """Two drafts were taken back before: the rows they overwrote are gone for the duplicate too."""
    m = rig.manager(96, drafts=2)
    m.admit_request("a")
    rig.feed(m, "a", numbers(18))
    m.truncate_request("a", 16)
    duplicate(m)
    for name in "ab":
        refused(m, RequestError, lambda name=name: m.truncate_request(name, 14), "rewound")
    assert_same_bytes(go_on(rig, m, "a"), go_on(rig, m, "b"))


@pytest.mark.parametrize("block", [16, 32])
def test_tokens_taken_back_from_shared_pages(rig: Rig, block: int) -> None:
    """A fork goes back before the boundary it was made at: what its origin has there stays as it is."""
    alone, want = undisturbed(rig, 30, drafts=3, block=block)
    m = rig.manager(96, requests=2, drafts=3, block=block)
    m.admit_request("a")
    rig.feed(m, "a", numbers(32))
    m.fork_request("a", "b")
    m.truncate_request("b", 30)
    assert_same_bytes(go_on(rig, m, "b"), want)
    same_entries(m, "b", alone, "a")
    other, want = undisturbed(rig, 32, drafts=3, block=block)
    assert_same_bytes(go_on(rig, m, "a"), want)
    same_entries(m, "a", other, "a")
    m.check_integrity()


def test_nothing_before_a_snapshot_can_be_taken_back(rig: Rig) -> None:
    m = rig.manager(96, drafts=2)
    m.admit_request("a")
    rig.feed(m, "a", numbers(16))
    restored(m)
    refused(m, RequestError, lambda: m.truncate_request("b", 15), "rewound")
    rig.feed(m, "b", numbers(2, 3))
    m.truncate_request("b", 16)
    assert_same_bytes(go_on(rig, m, "a"), go_on(rig, m, "b"))


@pytest.mark.parametrize(("drafts", "ran", "kept", "fine"), [(0, 1, 0, False), (0, 6, 2, False), (4, 5, 1, True)])
def test_a_step_that_ran_and_was_not_committed(rig: Rig, drafts: int, ran: int, kept: int, fine: bool) -> None:
    """Its tokens are in the state: they can be taken back as drafts, or the request cannot go on."""
    m, tokens = rig.manager(64, drafts=drafts), numbers(40)
    m.admit_request("a")
    rig.run(m, {"a": tokens[:19]})
    wrong = tokens[19 : 19 + kept] + numbers(ran - kept, start=3)
    rig.write(rig.prepare(m, {"a": wrong}), {"a": wrong})
    m.commit([("a", kept)]) if kept else None
    if fine:
        assert_close_rms(
            "after drafts", rig.attention(1, tokens, 25), rig.feed(m, "a", tokens[19 + kept : 26])[1, -1], 1e-5
        )
        return
    with pytest.raises(RequestError, match="was not committed"):
        m.prepare_forward([("a", 1)])
    m.release_request("a")
    m.admit_request("a")
    rig.feed(m, "a", tokens[:5])


def test_a_first_step_that_ran_in_vain_can_be_run_again(rig: Rig) -> None:
    """Before position 0 nothing is read, so nothing that was written matters."""
    m, tokens = rig.manager(64), numbers(21)
    m.admit_request("a")
    rig.write(rig.prepare(m, {"a": numbers(30, start=5)}), {"a": numbers(30, start=5)})
    assert_close_rms("again", rig.attention(2, tokens, 20), rig.feed(m, "a", tokens[:1] + tokens[1:])[2, -1], 1e-5)
    m.prepare_forward([("a", 1)])  # what was run in vain is forgotten
    m.release_request("a")
    m.admit_request("a")
    wrong = numbers(30, start=5)
    rig.write(rig.prepare(m, {"a": wrong}), {"a": wrong})
    assert_close_rms("one by one", rig.attention(1, tokens, 20), rig.feed(m, "a", tokens, chunk=1)[1, -1], 1e-5)
