"""window_scores on the GPU: the public function runs the kernel, at real heads and in every launch configuration."""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from numerics import assert_close_rms, assert_same_bytes
from torch import Tensor

from gpu.page_pools import KINDS, D, G, P
from hybridkv.kernels.eviction import score as score_file
from hybridkv.kernels.eviction.score import CONFIGS, TENSOR_CORES, ScoreBlocks, window_scores, window_scores_triton
from hybridkv.kernels.formats.fp8 import Fp8Pages, fp8_encode_ref
from hybridkv.kernels.formats.kv_format import Pages

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("on_the_gpu")]

BOUND = 1e-5  # f32 sums of exact products: errors of a few 2^-24 in a score, which a weight takes over


def layer(kind: str, L: int, W: int, R: int = 6) -> tuple[tuple[Any, ...], Tensor]:
    """Arguments of window_scores for unequal streams, and the scores by definition in float64."""
    lengths = [L, L - 1, L // 2 + 3, 1]
    pages, order = torch.full((G * (-(-L // P)) + 1, P, D), torch.nan), torch.randperm(G * (-(-L // P))).view(G, -1)
    positions = torch.full((G, L), -1, dtype=torch.int64)
    dtype = torch.float32 if kind == "f32" else torch.bfloat16
    q, when = torch.randn(W, G * R, D).to(dtype), torch.arange(L - W, L)
    table = torch.full(order.shape, -1, dtype=torch.int32)
    want = torch.zeros(G * R, L, dtype=torch.float64)
    flat = pages.view(-1, D)
    stored: Pages = pages
    for g, n in enumerate(lengths):
        e = torch.arange(n)
        table[g, : -(-n // P)] = order[g, : -(-n // P)].int()
        positions[g, :n] = e * 0 + (L - n) + e if g % 2 else torch.randperm(L)[:n].sort().values
        flat[order[g][e // P] * P + e % P] = torch.randn(n, D)
    if kind == "fp8":
        codes, scale = fp8_encode_ref(pages)
        hidden = pages.isnan().any(-1)
        codes[hidden], scale[hidden] = 0x7F, torch.nan
        stored, pages = Fp8Pages(codes, scale), codes.view(torch.float8_e4m3fn).double() * scale.double()[..., None]
    else:
        stored = pages = pages.to(dtype)
    for g, n in enumerate(lengths):
        e = torch.arange(n)
        k = pages.view(-1, D)[order[g][e // P] * P + e % P].double()
        s = torch.einsum("whd,ld->hwl", q[:, g * R : (g + 1) * R].double(), k) * D**-0.5
        unseen = positions[g, :n] > when[:, None]
        s = s.masked_fill(unseen, -torch.inf).softmax(-1).nan_to_num(0)  # a query that sees nothing
        want[g * R : (g + 1) * R, :n] = s.sum(1)
    return (q, when, stored, table, positions, D**-0.5), want


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("L", "W"), ((4096, 64), (1003, 33), (300, 128), (70, 1)))
def test_scores_of_real_heads_equal_their_definition(
    kind: str, L: int, W: int, count: Callable[[ModuleType, str], list[str]]
) -> None:
    args, want = layer(kind, L, W)
    calls = count(score_file, "window_scores_triton")
    got = window_scores(*args)
    assert calls == ["window_scores_triton"]
    assert_close_rms("scores", want, got, BOUND)
    for _ in range(20):
        assert_same_bytes(got, window_scores(*args))


@pytest.mark.parametrize("kind", ("bf16", "fp8"))
@pytest.mark.parametrize("config", [c for c in CONFIGS if c.dims == TENSOR_CORES.dims], ids=str)
@pytest.mark.parametrize("W", (16, 64, 128))
def test_every_launch_configuration_on_real_heads(kind: str, config: ScoreBlocks, W: int) -> None:
    args, want = layer(kind, 700, W)
    assert_close_rms(str(config), want, window_scores_triton(*args, config=config), BOUND)
