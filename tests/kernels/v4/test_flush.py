"""Compressed entries and the state between steps: the definition, any chunking, slot reuse, padding, banks."""

import pytest
import torch
from compressor import FORMATS, Cache, Compressor, format_of, pieces
from numerics import assert_close_rms, assert_same_bytes, rel_rms
from triton_interpreter import DEVICE

from hybridkv.kernels.formats.page_format import store_entries_ref
from hybridkv.kernels.step_index import StepIndex
from hybridkv.kernels.v4.flush_hca import pooled_hca_ref
from hybridkv.kernels.v4.running_pool import pool_row_ref, save_running_ref

F32 = 1e-6  # a few f32 roundings of 6e-8 each: exponentials, sums of up to 128 rows, the norm
CSA, HCA = 2, 1
SHAPES = (  # streams, c, rope, ratio
    (CSA, 16, 8, 4), (CSA, 32, 8, 16), (CSA, 128, 64, 4), (CSA, 512, 64, 4), (CSA, 24, 8, 3),
    (HCA, 16, 8, 4), (HCA, 32, 8, 16), (HCA, 512, 64, 128), (HCA, 24, 8, 5),
)  # fmt: skip
SMALL = ((CSA, 16, 8, 4), (HCA, 16, 8, 4), (HCA, 32, 8, 16))
MISTAKES = {
    CSA: (
        "own stream carried over", "streams swapped", "rotated at the last position", "rotated at the middle",
        "zeros for what is missing", "bias row off by one", "one weight for all channels",
    ),
    HCA: (
        "rotated at the last position", "rotated at the middle", "bias row off by one", "one weight for all channels",
    ),
}  # fmt: skip
FORMS = ("ref", "triton")


@pytest.fixture(autouse=True)
def on_the_kernels_device() -> None:
    pytest.importorskip("triton")


def compressor(streams: int, c: int, rope: int, ratio: int) -> Compressor:
    return Compressor(streams, c, rope, ratio, DEVICE)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_entries_have_the_closed_form_and_no_other(shape: tuple[int, ...], form: str) -> None:
    x = compressor(*shape)
    E = 3 if x.ratio < 128 else 2
    T = E * x.ratio + 2
    p, z = x.rows(T)
    cache = Cache(x, format_of("f32", x.c, x.rope), 2, 8)
    cache.request(form, p, z, 1, pieces(T, x.ratio - 1))
    want = x.entries(p, z)
    assert len(want) == E
    assert_close_rms("entries", want, cache.entries(), F32)
    for wrong in MISTAKES[x.streams]:
        assert rel_rms(want, x.entries(p, z, wrong)) > 0.01, wrong


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("size", (1, 3, 50, 128, 0))
@pytest.mark.parametrize("shape", SMALL, ids=str)
def test_any_chunking_gives_the_same_bits(shape: tuple[int, ...], size: int, form: str) -> None:
    x, T, bits = compressor(*shape), 51 if form == "triton" else 301, []
    p, z = x.rows(T)
    whole = Cache(x, format_of("f32", x.c, x.rope), 2, 80)
    parts = whole.copy()
    whole.request(form, p, z, 0, [T])
    parts.request(form, p, z, 0, pieces(T, size))
    assert whole.places == parts.places and len(whole.places[0]) == T // x.ratio
    assert_same_bytes(whole.pages, parts.pages)
    for a, b in zip(whole.state, parts.state):
        assert_same_bytes(a, b)
        bits.append(a[0])
    assert not torch.stack(bits).isnan().any()  # all of the slot's state was written


@pytest.mark.parametrize("shape", ((CSA, 512, 64, 4), (HCA, 512, 64, 128)), ids=str)
def test_any_chunking_at_real_widths(shape: tuple[int, ...]) -> None:
    x, T = compressor(*shape), 400
    p, z = x.rows(T)
    whole = Cache(x, format_of("fp8", x.c, x.rope), 1, 100)
    for size in (1, 50, 128):
        parts = whole.copy()
        parts.request("ref", p, z, 0, pieces(T, size))
        if size == 1:
            first = parts
            assert_close_rms("entries", x.entries(p, z), parts.entries(), 0.04)  # E4M3
        else:
            assert_same_bytes(first.pages, parts.pages)
            assert all(torch.equal(a, b) for a, b in zip(first.state, parts.state))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_many_requests_in_a_launch_as_in_the_reference(shape: tuple[int, ...]) -> None:
    """Requests of every stage, some with several entries, one without a token, padding between them."""
    x = compressor(*shape)
    m = x.ratio
    begins, counts, slots = (
        [0, m - 1, 0, 2 * m + 1, 0, 3 * m, 7],
        [2 * m + 1, 1, 3, m, 1, 0, 2],
        [4, 0, -1, 3, -1, 2, 1],
    )
    keys = [-1 if slot < 0 else slot for slot in slots]
    want = Cache(x, format_of("f32", x.c, x.rope), 6, 40)
    for slot, begin in zip(slots, begins):  # what the requests have seen before
        if slot >= 0 and begin:
            want.request("ref", *x.rows(begin), slot, [begin], key=slot)
    got, before = want.copy(), want.copy()
    index = StepIndex.make(slots, begins, counts, DEVICE)
    p, z = x.rows(len(index.token_to_req))
    padding = index.token_slots < 0
    p[padding], z[padding] = torch.nan, torch.nan
    want.step("ref", p, z, index, keys)
    got.step("triton", p, z, index, keys)
    assert want.places == got.places
    for key in {*keys} - {-1}:
        assert_close_rms(f"entries of {key}", want.entries(key), got.entries(key), F32)
    new = [place for key, held in want.places.items() for place in held[len(before.places.get(key, [])) :]]
    assert len(new) == 2 + 1 + 1 + (7 + 2) // m - 7 // m
    for cache in (want, got):
        rest = torch.ones(cache.pages.shape[0] * cache.pages.shape[1], dtype=torch.bool, device=DEVICE)
        rest[new] = False
        assert_same_bytes(cache.pages.flatten(0, 1)[rest], before.pages.flatten(0, 1)[rest])
        for now, then in zip(cache.state, before.state):
            assert_same_bytes(now[[2, 5]], then[[2, 5]])  # no token, and nobody's
    for name, a, b in zip("abc", want.state, got.state):
        held = ~a.isnan()
        assert torch.equal(held, ~b.isnan())
        if x.streams == CSA:
            assert_same_bytes(a, b)  # moved, with one addition
        else:
            assert_close_rms(f"state {name}", a[held], b[held], F32)


@pytest.mark.parametrize("c,rope", ((32, 8), (128, 64)))
@pytest.mark.parametrize("streams", (CSA, HCA))
@pytest.mark.parametrize("name", FORMATS)
def test_every_format_stores_the_same_entries(name: str, streams: int, c: int, rope: int) -> None:
    x = compressor(streams, c, rope, 4)
    p, z = x.rows(13)
    plain = Cache(x, format_of("f32", c, rope), 1, 3)
    stored = Cache(x, format_of(name, c, rope), 1, 3)
    plain.free = stored.free = [7, 2, 5, 1]
    for form in FORMS:
        one, other = plain.copy(), stored.copy()
        one.request(form, p, z, 0, [3, 6, 4])
        other.request(form, p, z, 0, [3, 6, 4])
        want = stored.pages.clone()
        places = torch.tensor(one.places[0], device=DEVICE)
        store_entries_ref(want, stored.fmt, places, one.entries())
        assert not torch.equal(want.view(torch.uint8), stored.pages.view(torch.uint8))
        assert_same_bytes(want, other.pages)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("stale", ("a longer request", "nan"))
@pytest.mark.parametrize("shape", SMALL[:2], ids=str)
def test_a_new_request_sees_nothing_of_the_slots_last_one(shape: tuple[int, ...], stale: str, form: str) -> None:
    x = compressor(*shape)
    for T in (1, 2, 3, 4, 5, 9):
        cache = Cache(x, format_of("f32", x.c, x.rope), 1, 20)
        if stale == "a longer request":
            cache.request("ref", *x.rows(23), 0, [23], key=1)
        p, z = x.rows(T)
        cache.request(form, p, z, 0, pieces(T, 1))
        want = x.entries(p, z)
        got = cache.entries()
        assert len(got) == T // 4
        assert_close_rms(f"{T} tokens", want, got, F32)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", SMALL, ids=str)
def test_no_entry_and_no_slot_change_nothing(shape: tuple[int, ...], form: str) -> None:
    x = compressor(*shape)
    before = Cache(x, format_of("bf16", x.c, x.rope), 2, 20)
    before.request("ref", *x.rows(x.ratio + 2), 0, [x.ratio + 2])
    for count in (1, x.ratio):
        for slots, entry in (([-1, -1], 3), ([0, 1], -1)):
            cache = before.copy()
            index = StepIndex.make(slots, [x.ratio + 2, 0], [count, count], DEVICE)
            p, z = (torch.full((2 * count, x.streams * x.c), torch.nan, device=DEVICE) for _ in range(2))
            cache.flush(form, p, z, index, torch.full((2 * count,), entry, device=DEVICE))
            kept = len(cache.memory) if slots[0] < 0 else 1  # rows are saved
            for a, b in zip(cache.memory[:kept], before.memory):
                assert_same_bytes(a, b)
    cache, empty = before.copy(), torch.empty(0, x.streams * x.c, device=DEVICE)
    cache.step(form, empty, empty, StepIndex.make([1], [5], [0], DEVICE), [1])
    for a, b in zip(cache.memory, before.memory):
        assert_same_bytes(a, b)


@pytest.mark.parametrize("form", FORMS)
def test_a_ring_holds_the_last_rows_with_their_bias(form: str) -> None:
    x, R = compressor(CSA, 16, 8, 4), 11
    for T in (3, 11, 12, 30):
        p, z = x.rows(T)
        cache = Cache(x, format_of("f32", 16, 8), 2, 20, depth=R)
        cache.request(form, p, z, 1, [T])
        for u in range(max(0, T - R), T):
            assert_same_bytes(cache.state[0][1, u % R], p[u])
            assert_same_bytes(cache.state[1][1, u % R], z[u] + x.bias[u % 4])
        assert cache.state[0][0].isnan().all() and cache.state[0][1].isnan().any(-1).sum() == max(0, R - T)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("ratio", (4, 16))
@pytest.mark.parametrize("K", (1, 2, 5))
def test_banks_hold_the_pool_after_each_of_the_last_tokens(K: int, ratio: int, form: str) -> None:
    x, T = compressor(HCA, 16, 8, ratio), 2 * ratio + 3
    p, z = x.rows(T)
    gate = z.double() + x.bias.double()[torch.arange(T, device=DEVICE) % ratio]
    for size in (1, 2, 7, T) if form == "ref" else (2, T):
        cache = Cache(x, format_of("f32", 16, 8), 2, 20, depth=K)
        begin = 0
        for count in pieces(T, size):
            index = StepIndex.make([1], [begin], [count], DEVICE)
            cache.step(form, p[begin : begin + count], z[begin : begin + count], index, [0])
            begin += count
            for u in range(max(0, begin - K), begin):
                top, total, mixed = (bank[1, u % K] for bank in cache.state)
                rows = torch.arange(u - u % ratio, u + 1)
                if (u + 1) % ratio == 0:
                    assert top.isneginf().all() and not total.any() and not mixed.any()
                    continue
                weights = (gate[rows] - gate[rows].amax(0)).exp()
                assert_close_rms("top", gate[rows].amax(0), top, F32)
                assert_close_rms("total", weights.sum(0), total, F32)
                assert_close_rms("mixed", (weights * p[rows].double()).sum(0), mixed, F32)
        assert cache.state[0][0].isnan().all()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", SMALL, ids=str)
@pytest.mark.parametrize("back", (1, 3))
def test_tokens_can_be_taken_back(shape: tuple[int, ...], back: int, form: str) -> None:
    """Four tokens at once, the last of them refused, and others in their place: as if these had come at first."""
    x, drafts = compressor(*shape), 4
    m = x.ratio
    fmt = format_of("f32", x.c, x.rope)
    depth = 2 * m + drafts - 1 if x.streams == CSA else drafts
    for begin in range(m - 3, m + 2) if form == "ref" else (m - 2,):
        p, z = x.rows(begin + drafts)
        kept = begin + drafts - back
        more_p, more_z = x.rows(m + 1)
        cache = Cache(x, fmt, 1, 20, depth)
        cache.request(form, p, z, 0, [n for n in (begin, drafts) if n])
        straight = Cache(x, fmt, 1, 20, depth)
        all_p, all_z = torch.cat((p[:kept], more_p)), torch.cat((z[:kept], more_z))
        straight.request(form, all_p, all_z, 0, [len(all_p)])
        index = StepIndex.make([0], [kept], [len(more_p)], DEVICE)
        cache.step(form, more_p, more_z, index, [0])
        assert_same_bytes(cache.entries()[: len(all_p) // m], straight.entries())
        for a, b in zip(cache.state, straight.state):
            assert_same_bytes(a, b)


def test_the_running_pool_equals_the_pool_of_rows() -> None:
    """In float64 to its last digits; in f32 it is no worse than twice a softmax over the rows."""
    c, m = 512, 128
    x = Compressor(HCA, c, 64, m)
    errors: dict[str, list[float]] = {"running": [], "rows": []}
    for cut in (1, 37, 127):
        p, z = x.rows(m)
        want = ((z.double() + x.bias.double()).softmax(0) * p.double()).sum(0)
        for dtype in (torch.float64, torch.float32):
            pool = tuple(torch.full((1, 1, c), torch.nan, dtype=dtype) for _ in range(3))
            rows, gates, bias = p.to(dtype), z.to(dtype), x.bias.to(dtype)
            begin = 0
            for count in pieces(m - 1, cut):
                index = StepIndex.make([0], [begin], [count])
                chunk = slice(begin, begin + count)
                save_running_ref(*pool, rows[chunk], gates[chunk], bias, index, m)
                begin += count
            last = StepIndex.make([0], [m - 1], [1])
            got = pooled_hca_ref(torch.tensor([0]), rows[-1:], gates[-1:], pool, bias, last, m)[0]
            assert got.dtype == dtype
            if dtype == torch.float64:
                assert_close_rms("float64", want, got, 1e-13)
            else:
                errors["running"].append(rel_rms(want, got))
                errors["rows"].append(rel_rms(want, ((gates + bias).softmax(0) * rows).sum(0)))
    assert max(errors["running"]) < 2 * max(errors["rows"]) and max(errors["rows"]) > 1e-9, errors


def test_a_pool_keeps_its_size_for_gates_of_any_size() -> None:
    """Sums are relative to the largest gate: nothing overflows, and a dominant row wins."""
    c = 8
    pool = (torch.full((c,), -torch.inf), torch.zeros(c), torch.zeros(c))
    for value, gate in ((1.0, -3e38), (2.0, 80.0), (3.0, 3e38), (4.0, 1e30)):
        pool = pool_row_ref(pool, torch.full((c,), value), torch.full((c,), gate))
    assert_same_bytes(pool[2] / pool[1], torch.full((c,), 3.0))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", SMALL[:2], ids=str)
def test_nan_in_a_row_is_loud_and_ends_with_its_window(shape: tuple[int, ...], form: str) -> None:
    x = compressor(*shape)
    p, z = x.rows(16)
    z[5] = torch.nan
    cache = Cache(x, format_of("f32", x.c, x.rope), 1, 8)
    cache.request(form, p, z, 0, pieces(16, 3))
    bad = cache.entries().isnan().all(-1).tolist()
    assert bad == ([False, True, True, False] if x.streams == CSA else [False, True, False, False])
