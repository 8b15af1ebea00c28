"""What the handles of compressed attention read back: views, gathers, and whole steps against the definition."""

import pytest
import torch
from numerics import assert_close_rms, assert_same_bytes
from torch import Tensor

from cache.compressed_rig import KINDS, SMALL, Rig, facts, numbers, stored
from hybridkv.kernels import topk
from hybridkv.kernels.formats.page_format import load_entries_ref
from hybridkv.kernels.v4 import flush_csa, flush_hca, gather, indexer, running_pool
from hybridkv.kernels.v4 import sparse as attention_sparse
from hybridkv.kernels.v4 import window_ring as window
from hybridkv.models import v4_attention

WINDOW, CSA, HCA = 0, 1, 2  # layers of the rig
F32 = 2e-6  # sums of a few dozen terms in f32 against float64
# one value of a few hundred may fall on the other side of a rounding edge, and is then off by a step of the format
BOUND = {"f32": F32, "bf16": 1e-3, "fp8": 2e-2, "fp8_entry": 2e-2}
FORMATS = [("f32", "f32"), ("bf16", "bf16"), ("fp8", "mxfp4"), ("fp8_entry", "nvfp4"), ("fp8", "fp8")]
INVALID = (-1, -(2**31), 2**31 - 1)


@pytest.fixture(scope="module")
def rig() -> Rig:
    return Rig()


def test_typed_views(rig: Rig) -> None:
    m = rig.manager(64, kv="fp8", index="nvfp4")
    m.admit_request("a"), m.admit_request("b")
    ran = rig.run(m, {"b": numbers(1), "a": numbers(37)})
    raw, csa, hca = (ran.handles[i] for i in (WINDOW, CSA, HCA))
    assert all((h.num_query_heads, h.head_dim) == (3, 16) for h in ran.handles.values())
    swa = raw.read_swa_view()
    assert swa.ring.shape == (2, 8, m.schema.compressed[0].entries.width) and swa.format.name == "fp8"
    assert swa.slots.tolist() == [m.slot_of["b"], m.slot_of["a"]] and swa.seen.tolist() == [1, 37]
    for view, name, lengths, P in (
        (csa.read_classical_view(), "fp8", [0, 9], 4),
        (csa.read_indexer_view(), "nvfp4", [0, 9], 4),
        (hca.read_classical_view(), "fp8", [0, 2], 1),
    ):
        assert (
            view.format.name == name and view.lengths.tolist() == lengths and view.slots.tolist() == swa.slots.tolist()
        )
        assert view.pages.shape == (8, P, view.format.width) and view.pages.dtype == torch.uint8
        assert view.table.dtype == torch.int32 and view.table.shape == (2, 4)
    for wrong in (raw.read_classical_view, raw.read_indexer_view, raw.gather_all_compressed_kv):
        with pytest.raises(ValueError, match="window layer"):
            wrong()
    with pytest.raises(ValueError, match="hca layer stores no index"):
        hca.read_indexer_view()


@pytest.mark.parametrize(("kv", "index"), FORMATS)
@pytest.mark.parametrize("block", [16, 48])
def test_gathers_are_the_entries_in_the_order_asked(rig: Rig, kv: str, index: str, block: int) -> None:
    m = rig.manager(96, requests=3, kv=kv, index=index, block=block)
    for name in "abc":
        m.admit_request(name)
    for at in range(0, 66, 11):  # pages of the requests lie among each other's
        rig.run(m, {"a": numbers(66)[at : at + 11], "b": numbers(66, 1)[at : at + 11]})
    ran = rig.run(m, {"c": numbers(1), "a": numbers(3), "b": numbers(30)})
    for layer in (CSA, HCA):
        h, ratio = ran.handles[layer], SMALL.ratio(KINDS[layer])
        dense = h.gather_all_compressed_kv()
        assert dense.dtype == torch.bfloat16 and dense.shape == (3, 96 // ratio, 16)
        for row, (name, length) in enumerate((("c", 0), ("a", 69 // ratio), ("b", 96 // ratio))):
            pages, fmt, places = stored(m, layer, name)
            assert len(places) == length
            assert_same_bytes(dense[row, :length], load_entries_ref(pages, fmt, places).bfloat16())
            assert not dense[row, length:].any()
        # of tokens of a and b: all orders, twice the same, and what does not exist
        for dtype in (torch.bfloat16, torch.float32):
            chosen = torch.full((34, 7), -1, dtype=torch.int32)
            last = {1: 69 // ratio, 4: 96 // ratio}
            for token, n in last.items():
                chosen[token] = torch.tensor([n - 1, 0, 0, n, *INVALID])
            chosen[0] = torch.tensor([0, 1, 5, 2, *INVALID])  # c has no entries at all
            got = h.gather_compressed_kv(chosen, dtype)
            assert got.dtype == dtype and not got[0].any() and not got[2:4].any() and not got[5:].any()
            for token, name in ((1, "a"), (4, "b")):
                pages, fmt, places = stored(m, layer, name)
                want = load_entries_ref(pages, fmt, places[[last[token] - 1, 0, 0]]).to(dtype)
                assert want.any(-1).all()
                assert_same_bytes(got[token, :3], want)
                assert not got[token, 3:].any()
    kept, fmt, places = stored(m, CSA, "b", "index")
    want = rig.entries(CSA, numbers(66, 1) + numbers(30), "index")
    bound = {"f32": F32, "bf16": 0.01, "fp8": 0.05, "mxfp4": 0.2, "nvfp4": 0.15}[index]  # the format's own rounding
    got = load_entries_ref(kept, fmt, places)
    assert_close_rms("index keys", want if index != "mxfp4" else hadamard(want), got, bound)


def hadamard(x: Tensor) -> Tensor:
    H = torch.ones(1, 1, dtype=x.dtype)
    while len(H) < x.shape[-1]:
        H = torch.cat((torch.cat((H, H), 1), torch.cat((H, -H), 1)))
    return x @ H * x.shape[-1] ** -0.5


def test_invalid_entries_are_no_part_of_attention(rig: Rig) -> None:
    m = rig.manager(64, requests=1)
    m.admit_request("a")
    tokens = numbers(41)
    rig.run(m, {"a": tokens[:40]})
    ran, layer = rig.prepare(m, {"a": tokens[40:]}), rig.layers[CSA]
    rig.write(ran, {"a": tokens[40:]})
    h, q = ran.handles[CSA], layer.q[tokens[40:]]
    angles = layer.window.angles(torch.tensor([40]))
    results = [
        v4_attention.attend(h, q, layer.sink, rig.scale, angles, torch.tensor([chosen], dtype=torch.int32))
        for chosen in ([2, 7, -1, -1, -1, -1], [2, 7, 10, *INVALID], [-1, 2, 11, -(2**31), 7, 2**31 - 1])
    ]
    assert_close_rms("past the end", results[0], results[1], F32)
    assert_close_rms("in between", results[0], results[2], F32)
    none = v4_attention.attend(h, q, layer.sink, rig.scale, angles, torch.tensor([INVALID], dtype=torch.int32))
    assert none.isfinite().all() and (none - results[0]).abs().max() > 1e-3


# ---- whole steps


@pytest.mark.parametrize("chunk", [1, 3, 8, 16, 45])
def test_attention_is_what_the_definition_says(rig: Rig, chunk: int) -> None:
    """Chunks longer than the window, and shorter; entries from the token that completes them on."""
    m = rig.manager(64, requests=2)
    m.admit_request("old")
    rig.feed(m, "old", numbers(50, 9), 25)
    m.release_request("old")  # its pages and its slot come to the next one as they are
    m.admit_request("a")
    tokens = numbers(45)
    out = rig.feed(m, "a", tokens, chunk)
    for layer in range(len(KINDS)):
        want = torch.stack([rig.attention(layer, tokens, t) for t in range(45)])
        assert_close_rms(f"layer {layer}", want, out[layer], F32)
    for layer in (CSA, HCA):
        pages, fmt, places = stored(m, layer, "a")
        assert_close_rms("entries", rig.entries(layer, tokens), load_entries_ref(pages, fmt, places), F32)


@pytest.mark.parametrize(("kv", "index"), FORMATS[:4])
def test_requests_of_a_step_do_not_see_each_other(rig: Rig, kv: str, index: str) -> None:
    lists = {"a": numbers(34), "b": numbers(20, 1), "c": numbers(3, 2)}
    cuts = {"a": (0, 5, 21, 22, 34), "b": (0, 9, 10, 12, 20), "c": (0, 1, 1, 2, 3)}
    m = rig.manager(64, requests=3, kv=kv, index=index)
    for name in lists:
        m.admit_request(name)
    for turn in range(4):
        fresh = {name: lists[name][cuts[name][turn] : cuts[name][turn + 1]] for name in lists}
        fresh = {name: new for name, new in fresh.items() if new}
        ran, at = rig.run(m, fresh), 0
        for name, n in ran.plan:
            alone = rig.manager(64, requests=1, kv=kv, index=index)
            alone.admit_request(name)
            for k in range(turn + 1):
                part = lists[name][cuts[name][k] : cuts[name][k + 1]]
                last = rig.run(alone, {name: part}) if part else None
            assert last is not None
            for layer in range(len(KINDS)):
                assert_close_rms(f"layer {layer}", last.out[layer], ran.out[layer][at : at + n], BOUND[kv])
            for layer, which in ((CSA, "entries"), (CSA, "index"), (HCA, "entries")):
                mine, yours = (load_entries_ref(*stored(x, layer, name, which)) for x in (m, alone))
                assert_close_rms(f"{which} of {layer}", yours, mine, BOUND[kv])
            at += n
    m.check_integrity()


@pytest.mark.parametrize("rows", [2, 8])
@pytest.mark.parametrize(("kv", "index"), FORMATS[:4])
def test_rows_of_padding_change_nothing(rig: Rig, rows: int, kv: str, index: str) -> None:
    """Their content is NaN. Slots 0 and 2, which no request of the step has, keep every byte."""
    managers = [rig.manager(64, requests=4, kv=kv, index=index) for _ in range(2)]
    for m in managers:
        for name in "abcd":
            m.admit_request(name)
        rig.run(m, {"a": numbers(9, 1), "b": numbers(15), "c": numbers(31, 2), "d": numbers(19, 3)})
        for t in (t for table in m.tables.values() for t in table.pool.tensors.values()):
            for page in (7, 12):
                t[:, page] = 0  # both alike where nobody has written
    padded, plain = managers
    fresh = {"b": numbers(1, 4), "d": numbers(1, 5)}
    for _ in range(3):
        got, want = rig.run(padded, fresh, rows=rows), rig.run(plain, fresh)
        for layer in range(len(KINDS)):
            assert_same_bytes(got.out[layer][:2], want.out[layer])
            assert not got.out[layer][2:].any()
        swa = got.handles[WINDOW].read_swa_view()
        assert swa.positions.shape == (rows, 8) and (swa.positions[2:] == -1).all()
        assert not got.handles[WINDOW].gather_swa_kv()[2:].any()
        assert not got.handles[CSA].gather_all_compressed_kv()[2:].any()
    assert padded.position("b") == 18
    a, b = facts(padded), facts(plain)
    assert not [key for key in a if a[key] != b[key]]


def test_a_step_of_padding_alone_changes_nothing(rig: Rig) -> None:
    m = rig.manager(64)
    m.admit_request("a")
    rig.run(m, {"a": numbers(23)})
    before, step = facts(m), m.padding_step(4)
    handles = m.acquire(step)
    ran = type(rig.prepare(m, {"a": [1]}))(step, handles, [], {})  # type: ignore[arg-type]
    rig.write(ran, {}, attend=True)
    assert facts(m) == before
    assert not any(out.any() for out in ran.out.values())


def test_choosing_in_parts_is_choosing_at_once(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many tokens with long pasts are scored some at a time."""
    m = rig.manager(96)
    m.admit_request("a"), m.admit_request("b")
    rig.run(m, {"a": numbers(30), "b": numbers(25, 1)})
    fresh = {"a": numbers(1, 2), "b": numbers(40, 3)}
    ran = rig.prepare(m, fresh)
    rig.write(ran, fresh)
    layer, at = rig.layers[CSA], torch.tensor([n for name, _ in ran.plan for n in fresh[name]])
    ask = (layer.index_q[at], layer.index_weights[at], 3)
    whole = v4_attention.select(ran.handles[CSA], *ask)
    assert whole is not None and whole.shape == (41, 3)
    monkeypatch.setattr(v4_attention, "MAX_LOGITS", 7 * 16)
    parts = v4_attention.select(ran.handles[CSA], *ask)
    assert parts is not None and torch.equal(whole, parts)
    assert v4_attention.select(ran.handles[CSA], *ask[:2], 16) is None  # all that there are


@pytest.mark.parametrize(("kv", "index"), [("fp8", "mxfp4")])
def test_a_step_of_kernels_is_a_step_of_references(
    rig: Rig, kv: str, index: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that a GPU launches for a chunk, two single tokens and padding, through the handles."""
    managers = [rig.manager(64, requests=3, kv=kv, index=index) for _ in range(2)]
    for m in managers:
        for name in "abc":
            m.admit_request(name)
        rig.run(m, {"a": numbers(31), "b": numbers(19, 1), "c": numbers(14, 2)})
    steps = ({"a": numbers(1, 3), "b": numbers(1, 4), "c": numbers(3, 5)}, {"a": numbers(1, 6), "b": numbers(1, 7)})
    want = [rig.run(managers[0], fresh, rows=None if len(fresh) > 2 else 3) for fresh in steps]
    for module in (window, gather, flush_csa, flush_hca, running_pool, indexer, topk, attention_sparse):
        monkeypatch.setattr(module, "use_triton", lambda x: True)
    got = [rig.run(managers[1], fresh, rows=None if len(fresh) > 2 else 3) for fresh in steps]
    for a, b in zip(want, got, strict=True):
        for layer in range(len(KINDS)):
            assert_close_rms(f"layer {layer}", a.out[layer], b.out[layer], BOUND[kv])
        for layer in (CSA, HCA):
            dense = [x.handles[layer].gather_all_compressed_kv() for x in (a, b)]
            assert_close_rms(f"entries of layer {layer}", *dense, BOUND[kv])
        assert_close_rms("window", *(x.handles[WINDOW].gather_swa_kv() for x in (a, b)), BOUND[kv])
    for layer, which in ((CSA, "index"), (HCA, "entries")):
        for name in "abc":
            mine, theirs = (load_entries_ref(*stored(m, layer, name, which)) for m in managers)
            assert_close_rms(f"{which} of {name}", mine, theirs, BOUND[kv])


@pytest.mark.parametrize("kv", ["fp8", "fp8_entry"])
def test_entries_are_dequantised_for_the_chunks_alone(kv: str, rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A long request that only decodes beside short chunks costs them nothing; a chunk that reads little, neither."""
    m, alone, dequantised = rig.manager(1024, requests=3, kv=kv), rig.manager(64, kv=kv), []
    asked = v4_attention.dequantised_pages
    monkeypatch.setattr(
        v4_attention, "dequantised_pages", lambda entries: dequantised.append(sum(entries)) or asked(entries)
    )
    for name in "abc":
        m.admit_request(name)
    alone.admit_request("b")
    rig.feed(m, "a", numbers(900))
    assert max(dequantised) == 225
    dequantised.clear()
    ran = rig.run(m, {"a": numbers(1, 2), "b": numbers(19), "c": numbers(5, 1)})
    assert dequantised and max(dequantised) == 4 + 1, "entries of the chunks alone"
    assert_close_rms("b among others", rig.feed(alone, "b", numbers(19))[CSA], ran.out[CSA][1:20], F32)
    dequantised.clear()
    after = rig.run(m, {"a": numbers(2, 3)}).out[CSA][-1]
    assert dequantised == [900 // 16], (
        "of the CSA layers two tokens read 3 entries each: only the HCA layer is dequantised"
    )
    seen = numbers(900) + numbers(1, 2) + numbers(2, 3)
    # against true rows: the format's own error, 2.7 % of a row
    assert_close_rms("read from the pages", rig.attention(CSA, seen, 902), after, 4e-2)
