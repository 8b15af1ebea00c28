"""attention_decode as it is launched on the GPU: shares of mixed lengths, rows of a larger table, graphs that are
replayed for other lengths, and launch shapes that are not the default.
"""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from numerics import assert_close_rms, assert_same_bytes, rel_rms
from torch import Tensor
from triton_cases import BF16, BOUND, FP8, Streams, dense, queries, streams

from hybridkv.kernels.activation import sigmoid_mul
from hybridkv.kernels.attention.decode import attention_decode, attention_decode_triton
from hybridkv.kernels.attention.decode_tuning import SHORT, DecodeShape
from hybridkv.kernels.attention.inputs import attention_inputs
from hybridkv.kernels.formats.fp8 import Fp8Pages
from hybridkv.kernels.linear.gemv import linear_vector

pytestmark = pytest.mark.gpu

D, H, G = 256, 24, 4


def sums(q: Tensor, held: Streams, scale: float) -> Tensor:
    """[B, H] log-sum-exp of every query, in float64."""
    out = torch.full(q.shape[:2], -torch.inf, dtype=torch.float64, device=q.device)
    for b, g in np.ndindex(*held.lengths.shape):
        k, _ = held.entries(b, g, int(held.lengths[b, g]))
        if len(k):
            out[b].view(G, -1)[g] = (q[b].double().view(G, -1, D)[g] @ k.T * scale).logsumexp(-1)
    return out


@pytest.mark.parametrize("pages", (BF16, FP8))
@pytest.mark.parametrize("P", (64, 128))
def test_one_long_request_among_short_ones(pages: str, P: int) -> None:
    lengths = [[30000, 29999, 17, 30001], *([i % 7, 100 * (i % 5), 64 + i, 129] for i in range(40))]
    held = streams(lengths, P, D, pages, "cuda")
    q = queries(41, H, D, BF16, "cuda")
    got = attention_decode(q, *held.args, D**-0.5, held.on_device)
    want = dense(q, held, list(range(42)), D**-0.5)
    for b in range(41):  # each by itself: no request hides another's error
        assert_close_rms(f"request {b}", want[b], got[b], 1.5 * BOUND[BF16, pages])


@pytest.mark.parametrize("pages", (BF16, FP8))
@pytest.mark.parametrize(
    ("shape", "P"), ((None, 64), (DecodeShape(32, 4, 3, 3), 64), (DecodeShape(64, 8, 3, 1, 3), 16))
)
def test_launch_shapes_of_few_requests(shape: DecodeShape | None, pages: str, P: int) -> None:
    held = streams([[1, 63, 64, 65], [2000, 1, 0, 4097], [300, 300, 300, 300]], P, D, pages, "cuda")
    both = queries(3, H, 2 * D, BF16, "cuda")
    q, gate = both[..., :D].contiguous(), both[..., D:]
    k, v, table, lengths = held.args
    wide = F.pad(table, (0, SHORT // P), value=2**30)  # room for more; these pages are far outside the pool
    for keys in (None, 1):  # what a step says of its streams picks the launch, and nothing else
        got = attention_decode_triton(q, k, v, wide, lengths, D**-0.5, keys=keys, shape=shape)
        assert_close_rms(f"{shape} {keys}", dense(q, held, [0, 1, 2, 3], D**-0.5), got, BOUND[BF16, pages])
        gated = attention_decode_triton(q, k, v, wide, lengths, D**-0.5, gate=gate, keys=keys, shape=shape)
        assert_same_bytes(sigmoid_mul(got, gate), gated.flatten(1))


@pytest.mark.parametrize("pages", (BF16, FP8))
def test_a_graph_is_replayed_for_other_rows_and_lengths(pages: str) -> None:
    """Captured with padding alone; then requests come, grow, move to other rows and leave. Padding reads nothing."""
    lengths = [[9000, 8000, 7000, 1], [300, 2000, 64, 65], [1, 1, 1, 1], [5000, 5000, 5000, 5000]]
    held = streams(lengths, 64, D, pages, "cuda")
    k, v, table, _ = held.args
    slots = torch.full((10, 2 * G, table.shape[2]), 2**30, dtype=torch.int32, device="cuda")  # far outside the pool
    slots[2:6, 1 : 1 + G] = table
    rows = torch.full((6,), -1, device="cuda")
    on_device = torch.full((6, 16), 4000, device="cuda")[:, 3 : 3 + G]
    kept, index = torch.full((9, H), 7.0, device="cuda"), torch.full((6,), -1, device="cuda")
    q = queries(6, H, D, BF16, "cuda")

    def run() -> Tensor:
        return attention_decode(q, k, v, slots[:, 1 : 1 + G], None, 0.1, on_device, rows=rows, lse=(kept, index))

    assert not run().any()  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    for now in ([0], [3, 1], [2, 0, 1, 3], [1]):
        for cut in (0, 1, 130):  # shorter than they are stored
            short = Streams(k, v, table[now], np.maximum(held.lengths[now] - cut, 0))
            n = len(now)
            rows.fill_(-1), index.fill_(-1), kept.fill_(7), on_device.fill_(4000)
            rows[1 : 1 + n] = torch.tensor(now, device="cuda") + 2
            on_device[1 : 1 + n] = short.on_device
            index[1 : 1 + n] = torch.arange(n, device="cuda") + 3
            graph.replay()
            assert not out[0].any() and not out[1 + n :].any()
            assert_close_rms(
                "out", dense(q[1 : 1 + n], short, list(range(n + 1)), 0.1), out[1 : 1 + n], BOUND[BF16, pages]
            )
            want, got = sums(q[1 : 1 + n], short, 0.1), kept[3 : 3 + n].double()
            assert torch.equal(want.isinf(), got.isinf())
            assert_close_rms("sums", want.nan_to_num(neginf=0), got.nan_to_num(neginf=0), 1e-5)  # sums in f32
            assert (kept[:3] == 7).all() and (kept[3 + n :] == 7).all()


@pytest.mark.parametrize("pages", (BF16, FP8))
def test_a_chain_in_a_graph_gives_the_bits_of_one_kernel_at_a_time(pages: str) -> None:
    """It starts before the kernel that writes its queries and the last entries has ended, reads its gates before the
    parts are there, and the product behind it comes early.
    """
    held = streams([[700, 1, 64, 65], [3000, 129, 2, 2000]], 64, D, pages, "cuda")
    (k, v, table, _), ends = held.args, held.on_device
    last = ends.t() - 1  # [G, B]
    at = table.transpose(0, 1).gather(2, (last // 64).unsqueeze(2)).squeeze(2) * 64 + last % 64
    hs = torch.randn(20, 2, 64, device="cuda").to(torch.bfloat16)
    inputs = torch.randn(2 * (H + G) * D, 64, device="cuda").to(torch.bfloat16)
    outputs = torch.randn(64, H * D, device="cuda").to(torch.bfloat16)
    turn = torch.rand(2, 1, 32, device="cuda")
    cos, sin = turn.cos(), turn.sin()

    def run(stop: bool) -> list[Tensor]:
        out = []
        for h in hs:
            x = linear_vector(h, inputs)
            torch.cuda.synchronize() if stop else None
            q = attention_inputs(x, cos, sin, k, v, at, H, G, D, True)
            torch.cuda.synchronize() if stop else None
            gate = x[:, : 2 * H * D].view(2, H, 2 * D)[..., D:]
            mixed = attention_decode(q, k, v, table, None, D**-0.5, ends, gate=gate)
            torch.cuda.synchronize() if stop else None
            out.append(linear_vector(mixed.flatten(1), outputs))
            torch.cuda.synchronize() if stop else None
        return out

    want = torch.stack(run(True))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = run(False)
    for _ in range(10):
        graph.replay()
        assert_same_bytes(want, torch.stack(got))


@pytest.mark.parametrize("pages", (BF16, FP8))
def test_many_requests(pages: str) -> None:
    """4096 streams, most of them within one program."""
    held = streams([[1 + (i * 7 + g) % 90 for g in range(G)] for i in range(1024)], 64, D, pages, "cuda")
    q = queries(1024, H, D, BF16, "cuda")
    got = attention_decode(q, *held.args, D**-0.5)
    assert_close_rms("float64", dense(q, held, list(range(1025)), D**-0.5), got, BOUND[BF16, pages])


@pytest.mark.parametrize("size", (1e-30, 1e30))
def test_fp8_queries_and_values_far_from_one(size: float) -> None:
    held = streams([[400, 33, 70, 5]], 64, D, FP8, "cuda")
    assert isinstance(held.k_pool, Fp8Pages) and isinstance(held.v_pool, Fp8Pages)
    held.k_pool.scale.mul_(1 / size)
    held.v_pool.scale.mul_(size).view(-1)[::3] *= 2.0**-20
    q = (queries(1, H, D, "f32", "cuda") * size).to(torch.bfloat16)
    want = dense(q, held, [0, 1], 0.06) / size
    assert_close_rms("float64", want, attention_decode(q, *held.args, 0.06).double() / size, BOUND[BF16, FP8])


def test_every_fp8_code_is_read_as_its_value() -> None:
    """A stream of one entry gives that entry back: all 256 codes, NaN too."""
    codes = torch.arange(256, dtype=torch.uint8, device="cuda").view(1, 1, D).repeat(1, 64, 1)
    pages = Fp8Pages(codes, torch.full((1, 64), 2.0, device="cuda"))
    keys = Fp8Pages(torch.zeros_like(codes), pages.scale)
    table, lengths = torch.zeros(1, 1, 1, dtype=torch.int32, device="cuda"), np.array([[1]])
    q = queries(1, 6, D, BF16, "cuda")
    got = attention_decode(q, keys, pages, table, lengths, 0.1)[0, 0].double()
    want = codes[0, 0].view(torch.float8_e4m3fn).double() * 2
    assert torch.equal(got.isnan(), want.isnan()) and torch.equal(got.nan_to_num(), want.nan_to_num())


def test_the_bounds_would_see_one_tile_too_few() -> None:
    held = streams([[200, 200, 200, 200]], 64, D, BF16, "cuda")
    q = queries(1, H, D, BF16, "cuda")
    short = Streams(held.k_pool, held.v_pool, held.table, held.lengths - 32)
    assert rel_rms(dense(q, held, [0, 1], D**-0.5), attention_decode(q, *short.args, D**-0.5)) > 5 * BOUND[BF16, BF16]
