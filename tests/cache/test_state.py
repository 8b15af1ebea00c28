"""StatePool: rows are fresh, apart, and come back exactly from a snapshot."""

from dataclasses import replace

import pytest
import torch
from numerics import assert_same_bytes

from hybridkv.cache import CacheSchema, KVCacheManager, StatePool, StateSchema, TensorSpec

INF = float("inf")
SCHEMAS = (
    StateSchema(
        "compressor",
        (1, 3),
        (
            TensorSpec("p", (4, 6), torch.float32),
            TensorSpec("z", (4, 6), torch.float32, init=-INF),
            TensorSpec("ring", (8,), torch.bfloat16, init=-1e9),
        ),
    ),
    StateSchema(
        "gdn", (0, 3, 5), (TensorSpec("recurrent", (2, 3, 3), torch.float32), TensorSpec("head", (), torch.int64))
    ),
)


def pool(slots: int = 3) -> StatePool:
    return StatePool(SCHEMAS, slots, torch.device("cpu"))


def fill(p: StatePool, slot: int, seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    for t in p.tensors.values():
        t[:, slot] = torch.randint(-99, 99, t[:, slot].shape, generator=g).to(t.dtype)


def copy_of(p: StatePool) -> dict:
    return {key: t.clone() for key, t in p.tensors.items()}


def assert_rows_equal(p: StatePool, before: dict, slots: tuple[int, ...]) -> None:
    for key, t in p.tensors.items():
        for slot in slots:
            assert_same_bytes(t[:, slot].contiguous(), before[key][:, slot].contiguous())


def test_a_new_pool_holds_the_initial_values() -> None:
    p = pool()
    assert (p.tensors["compressor", "z"] == -INF).all() and not p.tensors["compressor", "p"].any()
    assert (p.tensors["compressor", "ring"] == torch.tensor(-1e9, dtype=torch.bfloat16)).all()
    assert not p.tensors["gdn", "head"].any()
    assert p.nbytes == 3 * sum(s.slot_bytes for s in SCHEMAS)


def test_reset_brings_every_initial_value_back_in_one_slot_only() -> None:
    p, fresh = pool(), pool()
    for slot in range(3):
        fill(p, slot, slot)
    before = copy_of(p)
    p.reset(1)
    assert_rows_equal(p, copy_of(fresh), (1,))
    assert_rows_equal(p, before, (0, 2))


def test_reset_clears_nan() -> None:
    p = pool(1)
    p.tensors["compressor", "z"].fill_(float("nan"))
    p.reset(0)
    assert (p.tensors["compressor", "z"] == -INF).all()


def test_a_layer_sees_all_its_state_as_views() -> None:
    p = pool()
    assert set(p.layer(3)) == {"p", "z", "ring", "recurrent", "head"}
    assert set(p.layer(1)) == {"p", "z", "ring"} and set(p.layer(5)) == {"recurrent", "head"} and p.layer(2) == {}
    p.layer(5)["recurrent"][1] = 7
    assert (p.tensors["gdn", "recurrent"][2, 1] == 7).all() and p.tensors["gdn", "recurrent"].sum() == 7 * 18


def test_copy_moves_one_row_to_one_row() -> None:
    p = pool()
    for slot in range(3):
        fill(p, slot, slot)
    before = copy_of(p)
    p.copy(0, 2)
    assert_rows_equal(p, before, (0, 1))
    for key, t in p.tensors.items():
        assert torch.equal(t[:, 2], before[key][:, 0])


def test_what_checkpoints_keep_in_bf16_is_rounded_to_and_widened() -> None:
    """To the nearest, of ties the even one. All else of the row is copied byte for byte, and no slot's row moves."""
    [recurrent, head] = SCHEMAS[1].tensors
    rounded = StateSchema("gdn", (0, 3, 5), (replace(recurrent, checkpoint_dtype="bfloat16"), head))
    p = StatePool((SCHEMAS[0], rounded), 3, torch.device("cpu"), checkpoints=2)
    key, row = ("gdn", "recurrent"), 4
    assert p.rounded.keys() == {key} and p.rounded[key].shape == (3, 2, 2, 3, 3) and p.tensors[key].shape[1] == 3
    assert p.nbytes == 3 * sum(s.slot_bytes for s in SCHEMAS) + 2 * (SCHEMAS[0].slot_bytes + rounded.checkpoint_bytes)
    assert rounded.checkpoint_bytes == 3 * (18 * 2 + 8) and rounded.slot_bytes == SCHEMAS[1].slot_bytes
    for slot in range(3):
        fill(p, slot, slot)
    numbers = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8, 1 + 2**-8 + 2**-20, 0.0, -0.0, INF, 1e-40, 3.0])
    p.tensors[key][1, 1, 0] = numbers.view(3, 3)
    before = copy_of(p)
    p.copy(1, row)
    kept = p.rows(row)
    assert kept[key].dtype == torch.bfloat16
    near = [1.0, 1 + 2**-6, -1.0, 1 + 2**-7, 0.0, -0.0, INF, float(torch.tensor(1e-40).bfloat16()), 3.0]
    assert_same_bytes(kept[key][1, 0].flatten().float(), torch.tensor(near))
    for other in kept.keys() - {key}:
        assert_same_bytes(kept[other].contiguous(), before[other][:, 1].contiguous())
    assert_rows_equal(p, before, (0, 1, 2))
    p.copy(row, 2)
    assert p.rows(2)[key].dtype == torch.float32 and torch.equal(p.rows(2)[key], kept[key].float())
    assert_rows_equal(p, before, (0, 1))
    p.reset(row)
    assert not kept[key].any() and (kept["compressor", "z"] == -INF).all()
    assert torch.equal(p.rows(3)[key].isnan(), torch.ones(3, 2, 3, 3, dtype=torch.bool)), "a row that nobody has moved"


def test_a_snapshot_is_restored_into_a_dirty_slot_byte_for_byte() -> None:
    p = pool()
    fill(p, 0, 10)
    p.tensors["compressor", "z"][0, 0, 0] = torch.tensor([-INF, 0.0, -0.0, INF, float("nan"), 1e-42])
    before = copy_of(p)
    kept = p.snapshot(0)
    fill(p, 0, 11)  # the snapshot is no view
    fill(p, 2, 12)
    other = copy_of(p)
    p.restore(2, kept)
    for key, t in p.tensors.items():
        assert_same_bytes(t[:, 2].contiguous(), before[key][:, 0].contiguous())
    assert_rows_equal(p, other, (0, 1))
    kept["gdn", "recurrent"].fill_(1)
    assert_same_bytes(p.tensors["gdn", "recurrent"][:, 2].contiguous(), before["gdn", "recurrent"][:, 0].contiguous())


def wrong_snapshots() -> dict[str, dict]:
    good = pool().snapshot(0)
    key = ("gdn", "recurrent")
    return {
        "missing": {k: v for k, v in good.items() if k != key},
        "extra": good | {("gdn", "more"): good[key]},
        "empty": {},
        "shape": good | {key: good[key][:, :1]},
        "one layer": good | {key: good[key][:1]},
        "row of a broadcast": good | {key: good[key][0]},
        "dtype": good | {key: good[key].double()},
    }


@pytest.mark.parametrize("kind", wrong_snapshots())
def test_a_snapshot_of_another_pool_is_refused_and_nothing_is_written(kind: str) -> None:
    p = pool()
    fill(p, 1, 5)
    before = copy_of(p)
    with pytest.raises(ValueError, match="snapshot"):
        p.restore(1, wrong_snapshots()[kind])
    assert_rows_equal(p, before, (0, 1, 2))


def test_the_next_owner_of_a_slot_starts_fresh() -> None:
    m = KVCacheManager(CacheSchema((), SCHEMAS), {}, slots=1, max_tokens=100)
    fresh = m.state.snapshot(0)
    for tail in range(5):  # a compression window left at every length
        slot = m.admit_request(tail)
        for key, t in m.state.snapshot(slot).items():
            assert_same_bytes(t, fresh[key])
        m.prepare_forward([(tail, tail + 1)])
        fill(m.state, slot, tail)
        m.state.tensors["compressor", "p"][:, slot] = float("nan")
        m.commit([(tail, tail + 1)])
        m.release_request(tail)


def test_a_model_without_pages_runs_on_state_alone() -> None:
    m = KVCacheManager(CacheSchema((), SCHEMAS), {}, slots=2, max_tokens=8)
    m.admit_request("a")
    handles = m.acquire(m.prepare_forward([("a", 8)]))
    assert set(handles) == {0, 1, 3, 5} and handles[3].view is None and handles[3].paged == {}
    m.commit([("a", 8)])
    assert m.position("a") == 8 and m.held_bytes("a") == 0
    m.check_integrity()
