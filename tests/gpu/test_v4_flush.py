"""The flush kernels on the GPU at DeepSeek-V4's widths: the reference's entries in every format, the same bits however
a prompt is cut, one captured graph for all positions, and pools past 2^31.
"""

from collections.abc import Callable
from dataclasses import fields

import pytest
import torch
from compressor import FORMATS, Cache, Compressor, format_of, pieces
from numerics import assert_close_rms, assert_same_bytes

from hybridkv.kernels.formats.page_format import store_entries_ref
from hybridkv.kernels.formats.page_layout import PageFormat
from hybridkv.kernels.step_index import StepIndex

pytestmark = pytest.mark.gpu

CSA, HCA = 2, 1
F32 = 2e-6  # f32 roundings, and exponentials that are off by 2^-22
# where the reference's number and the kernel's, 1e-7 apart, lie on two sides of a rounding: few places, a step each
BOUND = {"f32": F32, "bf16": 1e-4, "fp8": 2e-3, "fp8_entry": 2e-3, "mxfp4": 5e-3, "nvfp4": 5e-3}
KINDS = [(CSA, name) for name in FORMATS] + [(HCA, name) for name in FORMATS if not name.startswith("index")]


def compressor(streams: int, name: str) -> tuple[Compressor, PageFormat]:
    c = 128 if name.startswith("index") else 512
    return Compressor(streams, c, 64, 4 if streams == CSA else 128, "cuda"), format_of(name, c, 64)


@pytest.mark.parametrize("depth", (0, 16), ids=("one token a step", "drafts"))
@pytest.mark.parametrize(("streams", "name"), KINDS)
def test_prompts_and_decodes_in_a_launch_as_in_the_reference(streams: int, name: str, depth: int) -> None:
    x, fmt = compressor(streams, name)
    m = x.ratio
    begins = [0, m - 1, 5, 2 * m + 1, 3 * m, 0, 255, m - 1, 0, 7 * m - 2]
    counts = [300, 1, 0, 2 * m + 1, m, 3, 1, 1, 4, 3]
    slots = [9, 0, 3, 7, 1, 8, 2, -1, -1, 5]
    want = Cache(x, fmt, 10, 1000, depth)
    for slot, begin in zip(slots, begins):  # what the requests have seen before
        if slot >= 0 and begin:
            want.request("ref", *x.rows(begin), slot, [begin], key=slot)
    got, before = want.copy(), want.copy()
    index = StepIndex.make(slots, begins, counts, "cuda")
    p, z = x.rows(len(index.token_to_req))
    padding = index.token_slots < 0
    p[padding], z[padding] = torch.nan, torch.nan
    want.step("ref", p, z, index, slots)
    got.step("public", p, z, index, slots)
    assert want.places == got.places
    for slot in {*slots} - {-1}:
        bound = BOUND[name.removeprefix("index ")]
        assert_close_rms(f"slot {slot}", want.entries(slot), got.entries(slot), bound)
    for part, a, b in zip("abc", want.state, got.state):
        held = ~a.isnan()
        assert torch.equal(held, ~b.isnan())
        if streams == CSA:
            assert_same_bytes(a, b)
        else:
            assert_close_rms(f"state {part}", a[held], b[held], F32)
    new = [place for key, held in want.places.items() for place in held[len(before.places.get(key, [])) :]]
    assert len(new) >= 6
    for cache in (got, before):  # but for the new entries, the pages are as they were
        store_entries_ref(cache.pages, fmt, torch.tensor(new, device="cuda"), torch.zeros(len(new), x.c, device="cuda"))
    assert_same_bytes(before.pages, got.pages)


@pytest.mark.parametrize(("streams", "name"), ((CSA, "fp8"), (CSA, "index mxfp4"), (HCA, "fp8")))
def test_any_chunking_gives_the_same_bits(streams: int, name: str) -> None:
    x, fmt = compressor(streams, name)
    T = 1100
    p, z = x.rows(T)
    blank = Cache(x, fmt, 2, 300)
    whole = blank.copy()
    whole.request("public", p, z, 1, [T])
    for size in (1, 3, 50, 128, 0):
        parts = blank.copy()
        parts.request("public", p, z, 1, pieces(T, size))
        assert parts.places == whole.places
        assert_same_bytes(whole.pages, parts.pages)
        for a, b in zip(whole.state, parts.state):
            assert_same_bytes(a, b)


@pytest.mark.parametrize(("streams", "name"), ((CSA, "fp8"), (CSA, "index mxfp4"), (HCA, "fp8")))
def test_one_graph_serves_every_position(streams: int, name: str) -> None:
    """Captured with padding alone; replayed for requests at different places, with the bits of eager steps."""
    x, fmt = compressor(streams, name)
    steps, slots, offsets = 2 * x.ratio + 5, [2, 0, -1, 3], [0, 3, 0, 90]
    eager = Cache(x, fmt, 4, 400)
    for slot, offset in zip(slots, offsets):
        if offset:
            eager.request("public", *x.rows(offset), slot, [offset], key=slot)
    replayed = eager.copy()
    static = StepIndex.make([-1] * 4, [0] * 4, [1] * 4, "cuda")
    p, z = (t.clone() for t in x.rows(4))
    cos, sin = (t.clone() for t in x.angles(static.positions))
    entry_index = torch.full((4,), -1, device="cuda")

    def work() -> None:
        replayed.flush("public", p, z, static, entry_index, (cos, sin), longest=1)

    graph = capture(work)
    for step in range(steps):
        index = StepIndex.make(slots, [offset + step for offset in offsets], [1] * 4, "cuda")
        fresh = x.rows(4)
        places = eager.entry_index(index, slots)
        for target, source in zip((p, z, cos, sin, entry_index), (*fresh, *x.angles(index.positions), places)):
            target.copy_(source)
        for field in fields(index):
            getattr(static, field.name).copy_(getattr(index, field.name))
        graph.replay()
        eager.step("public", *fresh, index, slots)
    assert sum(map(len, eager.places.values())) >= 3 * (steps // x.ratio)
    assert_same_bytes(eager.pages, replayed.pages)
    for a, b in zip(eager.state, replayed.state):
        assert_same_bytes(a, b)


@pytest.mark.parametrize(("streams", "slots"), ((CSA, (1 << 18) + 2), (HCA, (1 << 22) + 2)))
def test_pools_past_two_to_the_31_elements(streams: int, slots: int) -> None:
    x, fmt = compressor(streams, "fp8")
    T = x.ratio + 3
    p, z = x.rows(T)
    small, large = Cache(x, fmt, 1, 4), Cache(x, fmt, slots, (1 << 22) - 8)
    assert large.state[0].numel() > 1 << 31 and large.pages.numel() > 1 << 31
    large.places[0] = [large.pages.shape[0] * large.pages.shape[1] - 1]
    small.request("public", p, z, 0, pieces(T, 2))
    large.request("public", p, z, slots - 1, pieces(T, 2))
    assert_same_bytes(small.entries(), large.entries())
    for a, b in zip(small.state, large.state):
        assert_same_bytes(a[0], b[-1])


def capture(work: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """A graph of the work, which has run before, so that its kernels are compiled."""
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph
