"""Page formats, window rings and gathers on the GPU at DeepSeek-V4's widths, and past 2^31 bytes and elements. The
small cases are in tests/kernels/test_page_format.py, test_window.py and test_gather.py, which run here too, compiled.
"""

from typing import Any

import pytest
import torch
from numerics import assert_same_bytes
from torch import Tensor

from hybridkv.kernels.formats.page_format import load_entries_ref, store_entries_ref
from hybridkv.kernels.formats.page_layout import PageFormat, entry_format, index_format
from hybridkv.kernels.step_index import StepIndex
from hybridkv.kernels.v4 import gather as gather_file
from hybridkv.kernels.v4 import window_ring as window_file
from hybridkv.kernels.v4.gather import flat_entries, flat_entries_ref, gather_entries, gather_entries_ref
from hybridkv.kernels.v4.window_ring import append_window, append_window_ref, copy_window, copy_window_ref

pytestmark = pytest.mark.gpu
NAMES = ("f32", "bf16", "fp8", "fp8_entry")
KEYS = ("f32", "bf16", "fp8", "mxfp4", "nvfp4")
D, ROPE, R = 512, 64, 128
every_name = pytest.mark.parametrize("name", NAMES)


@pytest.fixture(autouse=True)
def on_the_gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Tensors are made on the GPU, and the public functions must not fall back to the references."""
    for file in (gather_file, window_file):
        monkeypatch.setattr(file, "use_triton", lambda x: x.is_cuda or pytest.fail("a tensor is on the CPU"))
    with torch.device("cuda"):
        yield


def random_pages(fmt: PageFormat, N: int, P: int) -> Tensor:
    return torch.randint(0, 256, (N, P, fmt.nbytes), dtype=torch.uint8).view(fmt.dtype)


def make_index(slots: list[int], begins: list[int], counts: list[int]) -> StepIndex:
    with torch.device("cpu"):
        return StepIndex.make(slots, begins, counts, "cuda")


def exact_step(T: int) -> tuple[Tensor, ...]:
    """x, weight, cos, sin for which norm and rotation round nothing: magnitudes 1 and quarter turns."""
    turns = torch.randint(0, 4, (T, ROPE // 2))
    cos, sin = torch.tensor([1.0, 0, -1, 0])[turns], torch.tensor([0, 1.0, 0, -1])[turns]
    x = (torch.randint(0, 2, (T, D)) * 2.0 - 1).to(torch.bfloat16)
    return x, torch.randint(-64, 65, (D,)) / 16, cos, sin


def random_step(index: StepIndex) -> tuple[Tensor, ...]:
    angle = index.positions.float()[:, None] * 10_000 ** (-torch.arange(0, ROPE, 2) / ROPE)
    return torch.randn(len(index.token_to_req), D).to(torch.bfloat16) * 3, torch.rand(D) + 0.5, angle.cos(), angle.sin()


@every_name
@pytest.mark.parametrize("ring_rows", (R, R + 3))
def test_append_stores_the_reference_bytes_for_exact_rows(name: str, ring_rows: int) -> None:
    fmt = entry_format(name, D, ROPE)
    for slots, begins, counts in (
        ([2], [5], [1]),
        ([3, -1, 0, 1], [1000, 7, 0, 127], [300, 40, 5, 2]),  # longer than the ring, padding
        ([*range(64)], [*range(100, 164)], [1] * 64),
        ([0, 1, 2], [0, 50, 1_000_000], [2000, 2049, 47]),
    ):
        index = make_index(slots, begins, counts)
        x, weight, cos, sin = exact_step(len(index.token_to_req))
        x[index.token_slots < 0] = torch.nan
        before = random_pages(fmt, 65, ring_rows)
        want, got = before.clone(), before.clone()
        append_window_ref(want, fmt, x, weight, 0.0, cos, sin, index)
        append_window(got, fmt, x, weight, 0.0, cos, sin, index)
        assert_same_bytes(want.view(torch.uint8), got.view(torch.uint8))
        assert_same_bytes(before[64].view(torch.uint8), got[64].view(torch.uint8))


@every_name
def test_append_of_random_rows_differs_by_rare_neighbouring_codes_and_never_between_runs(name: str) -> None:
    fmt = entry_format(name, D, ROPE)
    index = make_index([1, 0], [0, 900_000], [127, 128])
    x, weight, cos, sin = random_step(index)
    rings = [torch.zeros(2, R, fmt.width, dtype=fmt.dtype) for _ in range(3)]
    for form, ring in zip((append_window_ref, append_window, append_window), rings):
        form(ring, fmt, x, weight, 1e-6, cos, sin, index)
    assert_same_bytes(rings[1], rings[2])
    want, got = (load_entries_ref(ring, fmt, torch.arange(2 * R)) for ring in rings[:2])
    apart = (want - got).abs()
    # the last f32 bits of a norm and a rotation: a value halfway between two codes may go to the other
    assert (apart > 4e-6 * want.abs() + 1e-5).float().mean() < 0.005
    assert (apart <= {"f32": 4e-6, "bf16": 2**-7}.get(name, 2**-3) * want.abs() + 1e-5).all()


@every_name
def test_copy_window_moves_the_reference_bytes(name: str) -> None:
    fmt = entry_format(name, D, ROPE)
    index = make_index([5, 0, -1, 3], [1000, 3, 50, 127], [4096, 1, 1, 9])
    rows = torch.tensor([1, 0, 3, 2])
    source, before = random_pages(fmt, 6, R), random_pages(fmt, 4, R - 1 + 4096)
    want, got = before.clone(), before.clone()
    copy_window_ref(source, want, fmt, index, rows, R - 1)
    copy_window(source, got, fmt, index, rows, R - 1)
    assert_same_bytes(want.view(torch.uint8), got.view(torch.uint8))
    assert not torch.equal(want.view(torch.uint8), before.view(torch.uint8))


@pytest.mark.parametrize(
    "fmt",
    [entry_format(n, D, ROPE) for n in NAMES] + [index_format(n, 128) for n in KEYS],
    ids=lambda f: f"{f.name}-{f.dim}",
)
@pytest.mark.parametrize("P", (1, 2, 32))
def test_gather_gives_the_rows_of_the_reference(fmt: PageFormat, P: int) -> None:
    N = 4096 // P
    x = torch.randn(N * P, fmt.dim)
    pages = torch.zeros(N, P, fmt.width, dtype=fmt.dtype)
    store_entries_ref(pages, fmt, torch.randperm(N * P), x)
    flat = torch.randint(0, N * P, (64, 512))
    flat[:, 500:] = torch.tensor([-1, -(2**31), 2**31 - 1, N * P, 2**40, -(2**63)] * 2)
    for dtype in (torch.bfloat16, torch.float32):
        want, got = gather_entries_ref(pages, fmt, flat, dtype), gather_entries(pages, fmt, flat, dtype)
        assert not got[:, 500:].any()
        assert_same_bytes(want, got)


def test_flat_entries_of_long_tables() -> None:
    table = torch.randperm(64 * 8192, dtype=torch.int32).view(64, 8192)
    table[:, 8000:] = -1
    slots = torch.arange(-1, 63)[:, None]
    entries = torch.randint(-2, 8193 * 32, (64, 512), dtype=torch.int32)
    want, got = flat_entries_ref(table, slots, entries, 32), flat_entries(table, slots, entries, 32)
    assert (want >= 0).any() and (want == -1).any()
    assert_same_bytes(want, got)


@pytest.mark.parametrize("name", ("fp8", "bf16"))
def test_places_past_two_to_the_31(name: str) -> None:
    """The last pages of a pool: past 2^31 bytes in fp8, past 2^31 elements in bf16."""
    fmt = entry_format(name, D, ROPE)
    S = 2**31 // (R * fmt.width) + 2
    ring = torch.zeros(S, R, fmt.width, dtype=fmt.dtype)
    small = torch.zeros(2, R, fmt.width, dtype=fmt.dtype)
    index, low = make_index([S - 1, S - 2], [100, 0], [30, 64]), make_index([1, 0], [100, 0], [30, 64])
    x, weight, cos, sin = exact_step(94)
    append_window(ring, fmt, x, weight, 0.0, cos, sin, index)
    append_window_ref(small, fmt, x, weight, 0.0, cos, sin, low)
    assert_same_bytes(small, ring[-2:])
    assert not ring[: S - 2].any()
    flat = torch.randint(0, 2 * R, (3, 50))
    assert_same_bytes(gather_entries_ref(small, fmt, flat), gather_entries(ring, fmt, flat + (S - 2) * R))
    copied, after = torch.zeros_like(small), make_index([S - 1, S - 2], [130, 64], [1, 1])
    copy_window(ring, copied, fmt, after, torch.tensor([1, 0]), R)
    assert_same_bytes(small, copied)
    ring[-2:] = 0
    copy_window(small, ring, fmt, make_index([1, 0], [130, 64], [1, 1]), torch.tensor([S - 1, S - 2]), R)
    assert_same_bytes(small, ring[-2:])
    assert not ring[: S - 2].any()


def test_a_captured_append_follows_its_index() -> None:
    """The same graph, other slots and positions: nothing about a step is baked in."""
    fmt = entry_format("fp8", D, ROPE)
    index = make_index([0, -1], [0, 0], [1, 1])
    x, weight, cos, sin = exact_step(2)
    ring, want = (torch.zeros(4, R, fmt.width, dtype=torch.uint8) for _ in range(2))
    append_window(ring, fmt, x, weight, 0.0, cos, sin, index)  # compiled before the capture
    ring.zero_()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        append_window(ring, fmt, x, weight, 0.0, cos, sin, index)
    ring.zero_()
    for slots, begins in (([3, 1], [126, 5]), ([-1, 2], [9, 1_000_000]), ([-1, -1], [1, 1]), ([0, 3], [128, 127])):
        now = make_index(slots, begins, [1, 1])
        for to, new in (
            (index.slots, now.slots),
            (index.num_computed, now.num_computed),
            (index.positions, now.positions),
        ):
            to.copy_(new)
        x.copy_(exact_step(2)[0])
        graph.replay()
        append_window_ref(want, fmt, x, weight, 0.0, cos, sin, now)
        assert_same_bytes(want, ring)
    assert ring.any()
