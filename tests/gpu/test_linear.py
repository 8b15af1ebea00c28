"""Products of a decode step on the GPU at the widths of a 27B model: few rows, FP8 weights, in and out of a graph."""

from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import torch.nn.functional as F
from numerics import assert_close_rms, assert_same_bytes, logit_gap
from torch import Tensor

from hybridkv import LLM
from hybridkv.kernels.backend import has_gluon
from hybridkv.kernels.formats.fp8 import fp8_decode
from hybridkv.kernels.linear import skinny
from hybridkv.kernels.linear.fp8 import encode_weight, keeps_codes, linear_fp8, linear_fp8_ref
from hybridkv.kernels.linear.gemv import has_kernel, linear_vector_triton
from hybridkv.kernels.linear.linear import Linear
from hybridkv.kernels.linear.skinny import linear_rows, suits_rows

pytestmark = pytest.mark.gpu
# (rows, inputs, gated); 16480 is no multiple of a tile
SHAPES = [(16480, 5120, False), (5120, 6144, False), (5120, 17408, False), (34816, 5120, True), (248320, 5120, False)]
OF_RANKS = [(17408, 5120, True), (8704, 5120, True), (4120, 5120, False), (5120, 8704, False), (2060, 5120, False)]
OF_RANKS += [(4352, 5120, True), (8240, 5120, False), (5120, 1536, False)]
BOUND = 3e-3  # one rounding of the result to bf16


@pytest.fixture(autouse=True)
def needs_hopper() -> None:
    if not has_kernel(torch.device("cuda")):
        pytest.skip("the kernel needs a Hopper GPU or a newer one")


def drawn(N: int, K: int) -> Tensor:
    return (torch.randn(N, K, device="cuda", dtype=torch.bfloat16) / K**0.5).contiguous()


def dense(x: Tensor, weight: Tensor, gated: bool) -> Tensor:
    """In f32: float64 is slow at these widths, and sums are 1e-6 off."""
    y = torch.cat([F.linear(x.float(), part.float()) for part in weight.split(16384)], 1)
    return F.silu(y[:, : len(weight) // 2]) * y[:, len(weight) // 2 :] if gated else y


@pytest.mark.parametrize("codes", [False, True])
@pytest.mark.parametrize(("N", "K", "gated"), [*SHAPES, *OF_RANKS])
def test_few_rows_at_real_widths(N: int, K: int, gated: bool, codes: bool) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    weight = drawn(N, K)
    given, scale = encode_weight(weight) if codes else (weight, None)
    if scale is not None:
        weight = torch.cat([fp8_decode(c, s) for c, s in zip(given.split(16384), scale.split(16384), strict=True)])
    wide = torch.randn(16, K + 64, device="cuda", dtype=torch.bfloat16)
    want = dense(wide[:, 32 : 32 + K], weight, gated)
    for T in (1, 5, 8, 9, 16):
        got = linear_vector_triton(wide[:T, 32 : 32 + K], given, scale, None, gated)
        assert_close_rms(f"{T} rows", want[:T], got, BOUND)


ODD = [(1000, 1096, False), (40000, 520, False), (2080, 5120, True), (35000, 1096, True), (9, 8, False)]


@pytest.mark.parametrize(("N", "K", "gated"), [*SHAPES, *ODD])
def test_more_rows(N: int, K: int, gated: bool) -> None:
    """Whole tiles, shared ones and both; the same bits each time, and in a graph with other launches behind it."""
    if not has_gluon(torch.device("cuda")):
        pytest.skip("written in another Triton's Gluon")
    torch.backends.cuda.matmul.allow_tf32 = False
    weight, wide = drawn(N, K), torch.randn(64, K + 64, device="cuda", dtype=torch.bfloat16)
    bias = torch.randn(N, device="cuda", dtype=torch.bfloat16) if (N, K, gated) in ODD else None
    wide[10] = torch.nan  # a row does not see its neighbours
    want = dense(wide[:, 32 : 32 + K], weight, False) + (0 if bias is None else bias.float())
    want = F.silu(want[:, : N // 2]) * want[:, N // 2 :] if gated else want
    for T in (9, 16, 17, 33, 64):
        x = wide[:T, 32 : 32 + K]
        got = linear_rows(x, weight, bias, gated)
        assert got.isnan().all(1).nonzero().flatten().tolist() == ([10] if T > 10 else [])
        assert_close_rms(f"{T} rows", want[:T].nan_to_num(), got.nan_to_num(), BOUND)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            again = [linear_rows(x, weight, bias, gated) for _ in range(3)]
        for _ in range(3):
            graph.replay()
            for other in again:
                assert_same_bytes(got, other)


SHARED = [(5120, 17408, False), (34816, 5120, True), (20480, 1024, False), (1000, 1096, False)]  # some tiles or all


def rows_case(N: int, K: int) -> tuple[Tensor, Tensor]:
    if not has_gluon(torch.device("cuda")):
        pytest.skip("written in another Triton's Gluon")
    return torch.randn(64, K, device="cuda", dtype=torch.bfloat16), drawn(N, K)


@pytest.mark.parametrize(("N", "K", "gated"), SHARED)
def test_programs_that_give_up_waiting_change_no_bit(
    N: int, K: int, gated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one look each, nearly all leave their share to the last one to arrive."""
    x, weight = rows_case(N, K)
    for T in (9, 33, 64):
        want = linear_rows(x[:T], weight, None, gated)
        for looks in (1, 2, skinny.LOOKS):
            monkeypatch.setattr(skinny, "LOOKS", looks)
            for _ in range(50):
                assert_same_bytes(want, linear_rows(x[:T], weight, None, gated))


@pytest.mark.parametrize("looks", [1, skinny.LOOKS])
def test_launches_on_two_streams_do_not_meet(looks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has more programs than the other leaves room for: one that waits for all of its own would wait for ever."""
    monkeypatch.setattr(skinny, "LOOKS", looks)
    cases = [(*rows_case(N, K), gated) for N, K, gated in SHARED]
    want = [linear_rows(x, weight, None, gated) for x, weight, gated in cases]
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    got: list[list[Tensor]] = [[], []]
    for i in range(100):
        for number, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                x, weight, gated = cases[(i + number) % len(cases)]
                got[number].append(linear_rows(x, weight, None, gated))
    torch.cuda.synchronize()
    for number, results in enumerate(got):
        for i, result in enumerate(results):
            assert_same_bytes(want[(i + number) % len(cases)], result)


def test_graphs_captured_on_one_stream_can_run_on_two() -> None:
    cases = [(*rows_case(N, K), gated) for N, K, gated in SHARED]
    want = [linear_rows(x, weight, None, gated) for x, weight, gated in cases]
    streams, graphs, got = [torch.cuda.Stream() for _ in range(2)], [], []
    for _ in streams:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got.append([linear_rows(x, weight, None, gated) for x, weight, gated in cases])
        graphs.append(graph)
    for _ in range(50):
        for stream, graph in zip(streams, graphs, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
    torch.cuda.synchronize()
    for results in got:
        for a, b in zip(want, results, strict=True):
            assert_same_bytes(a, b)


def test_more_rows_than_suit_and_fewer_are_left_to_others() -> None:
    weight, x = drawn(16480, 5120), torch.randn(65, 5120, device="cuda", dtype=torch.bfloat16)
    taken = [False, False, *[suits_rows(x[:n], weight) for n in (9, 64)], False]
    assert [suits_rows(x[:n], weight) for n in (0, 8, 9, 64, 65)] == taken
    assert not suits_rows(x[:9].float(), weight) and not suits_rows(x[:9], weight[:128])
    assert not suits_rows(x[:9, 1:5113], weight[:, :5112].contiguous())  # rows do not begin at 16 bytes
    want = dense(x, weight, False)
    for n in (9, 64, 65):  # the kernel, or cuBLAS
        assert_close_rms(f"{n} rows", want[:n], Linear(weight)(x[:n]), BOUND)


def test_a_product_of_many_rows_is_added_to_what_is_there() -> None:
    """In one pass and with one rounding; few rows, biases and codes are left to the next norm."""
    weight, x = drawn(5120, 6144), torch.randn(1030, 6144, device="cuda", dtype=torch.bfloat16)
    h = torch.randn(1030, 5120, device="cuda", dtype=torch.bfloat16)
    want, before = h.float() + dense(x, weight, False), h.clone()
    codes, scale = encode_weight(weight)
    for linear, T in ((Linear(weight), 9), (Linear(weight, weight[:, 0]), 1030), (Linear(codes, scale=scale), 1030)):
        found = linear.add_to(h[:T], x[:T])
        assert found is not None and found.shape == (T, 5120)
        assert_same_bytes(before, h)
    assert Linear(weight).add_to(h, x) is None
    assert_close_rms("sum", want, h, BOUND)


@pytest.mark.parametrize("T", [3, 50])
def test_a_chain_in_a_graph_gives_the_bits_of_one_kernel_at_a_time(T: int) -> None:
    """Each kernel starts before the one before has ended: what it reads and writes must wait."""
    up, down = drawn(34816, 5120), drawn(5120, 17408)
    codes = [encode_weight(w) for w in (up, down)] if T <= 16 else []

    def run(x: Tensor, stop: bool) -> Tensor:
        for _ in range(10):
            for (w, s), gated in zip(((up, None), (down, None), *codes), (True, False, True, False), strict=False):
                x = linear_vector_triton(x, w, s, None, gated) if T <= 16 else linear_rows(x, w, None, gated)
                if stop:
                    torch.cuda.synchronize()
                x = F.normalize(x, dim=-1) * 70 if not gated else x  # a kernel of torch's in between
        return x

    start = torch.randn(T, 5120, device="cuda", dtype=torch.bfloat16)
    want, x = run(start, True), start.clone()
    run(x, False)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = run(x, False)
    for _ in range(20):
        graph.replay()
    torch.cuda.synchronize()
    assert_same_bytes(want, got)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("T", [17, 300, 2048])
@pytest.mark.parametrize(("N", "K"), [(1024, 5120), (5120, 17408), (4120, 5120), (17, 64), (33, 72)])
def test_many_rows_with_fp8_weights(T: int, N: int, K: int, bias: bool) -> None:
    weight, x = drawn(N, K), torch.randn(T, K, device="cuda", dtype=torch.bfloat16)
    x[::3] *= 1000  # a scale for each row
    added = torch.randn(N, device="cuda", dtype=torch.bfloat16) if bias else None
    codes, scale = encode_weight(weight)
    want = linear_fp8_ref(x, codes, scale, added)
    got = linear_fp8(x, codes, scale, added)
    size = want.float().norm(dim=1, keepdim=True)
    # x rounded to three bits of mantissa: 0.026 RMS
    assert_close_rms("rows of one size", want.float() / size, got.float() / size, 0.035)


def test_a_layer_picks_alike_for_one_row_and_for_many() -> None:
    weight, x = drawn(4096, 1024), torch.randn(40, 1024, device="cuda", dtype=torch.bfloat16)
    layer, codes = Linear(weight), Linear(*encode_weight(weight)[:1], scale=encode_weight(weight)[1])
    for op, bound in ((layer, BOUND), (codes, 0.05)):
        want = F.linear(x.float(), weight.float())
        for T in (1, 16, 17, 40):
            assert_close_rms("product", want[:T], op(x[:T]), bound)
            gate, up = want[:T].chunk(2, -1)
            assert_close_rms("gated", F.silu(gate) * up, op.gated(x[:T]), 2 * bound)


FORMS = (("cpu", "float32"), ("cuda", "bfloat16"))


def test_a_model_with_fp8_weights(tmp_path: Path) -> None:
    """Codes on the GPU, rounded weights on the CPU: the same model. So few tokens at once that x is not rounded."""
    tiny.save("llama", tmp_path, torch.bfloat16)  # weights of f32 would be rounded twice on the GPU, and to other codes
    assert keeps_codes(torch.device("cuda"), torch.bfloat16)
    settings: dict[str, Any] = dict(weight_dtype="fp8", max_requests=1, max_context=256)
    ids = tiny.token_ids(16)
    want = LLM(str(tmp_path), device="cpu", dtype="float32", **settings).logits(ids)
    llm = LLM(str(tmp_path), device="cuda", dtype="bfloat16", **settings)
    matrices = [part for layer in llm.model.layers for part in (layer.mixer.qkv, layer.feed.gate_up)]  # type: ignore
    assert all(part.weight.dtype == torch.uint8 and part.scale is not None for part in matrices)
    # bf16 activations: the same model without codes moves its logits as much
    plain = {d: LLM(str(tmp_path), device=d, dtype=t, max_requests=1, max_context=256).logits(ids) for d, t in FORMS}
    assert logit_gap(want, llm.logits(ids)) < 2 * logit_gap(plain["cpu"], plain["cuda"])
    assert len(llm.generate([tiny.token_ids(40)])[0].token_ids) > 0
