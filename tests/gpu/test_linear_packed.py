"""Packed GGUF weights on the GPU at the widths of a 27B model: every format, few rows and many, graphs, models."""

from pathlib import Path

import pytest
import tiny
import torch
import torch.nn.functional as F
from numerics import assert_close_rms, assert_same_bytes, logit_gap
from packed_blocks import F16_AT, random_blocks
from torch import Tensor

from hybridkv import LLM
from hybridkv.kernels.backend import has_gluon
from hybridkv.kernels.linear.packed import (
    FEW_ROWS,
    linear_packed,
    linear_packed_hopper,
    linear_packed_triton,
    linear_written_out,
)
from hybridkv.kernels.linear.packed_dequantise import dequantise_ref, dequantise_triton
from hybridkv.kernels.linear.packed_linear import PackedLinear
from hybridkv.kernels.linear.packed_planes import BITS, BLOCK_BYTES
from hybridkv.kernels.linear.packed_weights import Packed, pack
from models.test_packed_models import SETTINGS, mixed, written

pytestmark = pytest.mark.gpu
# (rows, inputs, gated, heads whose columns change places); 1032 is no multiple of a tile; 2560 and 768 columns are no
# whole number of steps of all warps; 9632 rows are more tiles than there are programs
SHAPES = [
    (1032, 6144, False, 48), (4096, 5120, True, 1), (9632, 2560, False, 20), (992, 768, True, 12), (16, 256, False, 1)
]  # fmt: skip
ROWS = (1, 2, 3, 4, 5, 7, 8, 9, 12, 13, 15, 16, 17, 33, 64)
BOUND = 3e-3  # one rounding of the result to bf16; gated, of a product of two sums
WIDE_BOUND = 5e-3  # the weights are rounded to bf16 as well


def drawn(kind: str, N: int, K: int, heads: int = 1) -> Packed:
    order = torch.randperm(heads, device="cuda") if heads > 1 else None
    return pack(random_blocks(kind, N, K, K**-0.5).cuda(), BITS[kind], order).laid(16)


def dense(x: Tensor, weight: Packed, gated: bool = False) -> Tensor:
    torch.backends.cuda.matmul.allow_tf32 = False
    y = F.linear(x.float(), dequantise_ref(weight))
    return F.silu(y[:, : len(y[0]) // 2]) * y[:, len(y[0]) // 2 :] if gated else y


@pytest.mark.parametrize("kind", BITS)
@pytest.mark.parametrize(("N", "K", "gated", "heads"), SHAPES)
def test_products_at_real_widths(kind: str, N: int, K: int, gated: bool, heads: int) -> None:
    weight = drawn(kind, N, K, heads)
    few = FEW_ROWS[weight.bits]
    wide = torch.randn(max(few + 40, 64), K + 64, device="cuda", dtype=torch.bfloat16)[:, 32 : 32 + K]
    want = dense(wide, weight, gated)
    for T in sorted({*ROWS, few, few + 1, few + 40}):
        bound = BOUND if few >= T else WIDE_BOUND
        assert_close_rms(f"{T} rows", want[:T], linear_packed(wide[:T], weight, gated=gated), bound)
    out = torch.empty(N, K, device="cuda", dtype=torch.bfloat16)
    # a multiplication and a subtraction may be one rounding there
    assert_close_rms("written out", dequantise_ref(weight).bfloat16(), dequantise_triton(weight, out), 1e-4)


@pytest.mark.parametrize("kind", BITS)
def test_every_code_is_widened_to_its_number(kind: str) -> None:
    weight, one = drawn(kind, 64, 1024), torch.eye(1024, dtype=torch.bfloat16, device="cuda")
    for rows in (1, 4, 8, 16):
        for product in (linear_packed_triton, *([linear_packed_hopper] if has_gluon(one.device) else [])):
            got = torch.cat([product(part, weight) for part in one.split(rows)])
            assert_close_rms(f"weights, {rows} rows", dequantise_ref(weight).T, got, BOUND)


@pytest.mark.parametrize("rows", [1, 3, 16])
def test_a_row_does_not_see_its_neighbours(rows: int) -> None:
    """Rows of x that are not there have no part in a result, nor has a row that is NaN in any other."""
    weight, x = drawn("Q6_K", 96, 2560), torch.randn(rows + 1, 2560, device="cuda", dtype=torch.bfloat16)
    x[rows] = torch.nan
    want = linear_packed(x[:rows].clone(), weight)
    assert_same_bytes(want, linear_packed(x[:rows], weight))
    x[rows - 1] = torch.nan
    got = linear_packed(x[:rows], weight)
    assert got[rows - 1].isnan().all()
    assert_same_bytes(want[: rows - 1], got[: rows - 1])


@pytest.mark.parametrize("kind", BITS)
def test_scales_of_zero_and_the_smallest_there_are(kind: str) -> None:
    """Subnormal f16 scales keep their values; a row of zeros is zero."""
    blocks = random_blocks(kind, 32, 1024, 1.0)
    per_block = blocks.view(32, -1, BLOCK_BYTES[BITS[kind]])
    at = F16_AT[BITS[kind]]
    per_block[:16, :, at] = 0
    per_block[16:, :, at] = torch.tensor([3, 0] * ((at.stop - at.start) // 2), dtype=torch.uint8)  # 3 x 2^-24
    weight = pack(blocks.cuda(), BITS[kind]).laid(16)
    for T in (1, 8):
        x = torch.randn(T, 1024, device="cuda", dtype=torch.bfloat16)
        got = linear_packed(x, weight)
        assert (got[:, :16] == 0).all()
        assert_close_rms(f"{T} rows", dense(x, weight)[:, 16:], got[:, 16:], BOUND)


@pytest.mark.parametrize("rows", [1, 3, 16, 40])
def test_a_chain_in_a_graph_gives_the_bits_of_one_kernel_at_a_time(rows: int) -> None:
    """Each kernel starts before the one before has ended: what it reads and writes must wait."""
    up, down = drawn("Q4_K", 4096, 1024), drawn("Q6_K", 1024, 2048)

    def run(x: Tensor, stop: bool) -> Tensor:
        for _ in range(10):
            x = linear_packed(linear_packed(x, up, gated=True), down)
            if stop:
                torch.cuda.synchronize()
            x = F.normalize(x.float(), dim=-1).bfloat16() * 30
        return x

    start = torch.randn(rows, 1024, device="cuda", dtype=torch.bfloat16)
    want = run(start, True)
    graph = torch.cuda.CUDAGraph()
    run(start, False)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        got = run(start, False)
    for _ in range(20):
        graph.replay()
    torch.cuda.synchronize()
    assert_same_bytes(want, got)


def test_a_layer_of_parts_writes_its_columns_and_no_others() -> None:
    parts = [drawn("Q5_K", 512, 1024), drawn("Q4_K", 256, 1024)]
    plain = torch.randn(48, 1024, device="cuda", dtype=torch.bfloat16) / 32
    wide = torch.cat([*map(dequantise_ref, parts), plain.float()])
    layer = PackedLinear([*parts, plain])
    for T in (1, 16, 200):
        x = torch.randn(T, 1024, device="cuda", dtype=torch.bfloat16)
        assert_close_rms(f"{T} rows", F.linear(x.float(), wide), layer(x), WIDE_BOUND)
    y = torch.full((200, 600), 7.0, device="cuda", dtype=torch.bfloat16)
    linear_written_out(x, parts[0], None, y[:, 8:520])
    assert (y[:, :8] == 7).all() and (y[:, 520:] == 7).all()


@pytest.mark.parametrize("kind", ["llama", "qwen3_5", "qwen3_next"])
def test_a_gguf_model_stays_packed(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, ids = written(kind, tmp_path, mixed, monkeypatch), tiny.token_ids(150)
    true = LLM(path, dtype="float32", **SETTINGS).logits(ids, 140)
    cuda = {**SETTINGS, "device": "cuda"}
    plain, llm = (LLM(path, weight_dtype=name, **cuda) for name in ("plain", "auto"))
    assert isinstance(llm.model.head, PackedLinear) and not isinstance(plain.model.head, PackedLinear)  # type: ignore
    assert llm.model.nbytes < 0.75 * plain.model.nbytes
    assert logit_gap(true, llm.logits(ids, 140)) < 2 * logit_gap(true, plain.logits(ids, 140))
    assert len(llm.generate([tiny.token_ids(40)])[0].token_ids) > 0
