"""One tile of keys: torch's CPU kernel against the plain form, also for rows that see nothing; and how tiles join."""

import pytest
import torch
from numerics import assert_close_rms, assert_same_bytes
from torch import Tensor

from hybridkv.kernels.attention.tile import TileSum, read_pages, tile_attention, tile_attention_cpu, tile_attention_ref

BOUND = {torch.float32: 1e-6, torch.bfloat16: 6e-3}  # f32 sums; bf16 weights and result rounded at 2^-9
LSE_BOUND = {torch.float32: 1e-6, torch.bfloat16: 2e-4}  # f32 in both, but torch's bf16 path has a short exp


def tile(dtype: torch.dtype, M: int = 3, L: int = 40, D: int = 64) -> tuple[Tensor, Tensor, Tensor]:
    return tuple(torch.randn(2, 3, n, D).to(dtype) for n in (M, L, L))  # type: ignore[return-value]


@pytest.mark.parametrize("dtype", BOUND)
@pytest.mark.parametrize(("M", "L", "D"), ((1, 1, 32), (3, 40, 64), (40, 40, 100), (7, 700, 256), (130, 150, 64)))
def test_the_cpu_form_is_the_reference(dtype: torch.dtype, M: int, L: int, D: int) -> None:
    q, k, v = tile(dtype, M, L, D)
    for diagonal in (None, 0, 1, L - M, L):
        want, got = (form(q, k, v, 0.2, diagonal) for form in (tile_attention_ref, tile_attention_cpu))
        assert_close_rms(f"output, diagonal {diagonal}", want[0], got[0], BOUND[dtype])
        assert_close_rms(f"log-sum-exp, diagonal {diagonal}", want[1], got[1], LSE_BOUND[dtype])
        assert got[0].dtype == dtype and got[1].dtype == torch.float32


def test_a_diagonal_says_which_keys_a_query_sees() -> None:
    q, k, v = tile(torch.float32, 5, 12)
    for diagonal in (0, 3, 7, 11):
        out, _ = tile_attention_cpu(q, k, v, 0.2, diagonal)
        for i in range(5):
            seen = min(diagonal + i + 1, 12)
            alone = tile_attention_ref(q[:, :, i : i + 1], k[:, :, :seen], v[:, :, :seen], 0.2)[0]
            assert_close_rms(f"query {i} of diagonal {diagonal}", alone, out[:, :, i : i + 1], BOUND[torch.float32])


@pytest.mark.parametrize("dtype", BOUND)
def test_hidden_keys_may_be_nan_and_a_row_that_sees_nothing_gives_zero(dtype: torch.dtype) -> None:
    q, k, v = tile(dtype)
    visible = torch.rand(2, 3, 1, 40) < 0.5
    visible[0, 1], visible[1, 2] = False, True
    hidden = ~visible.transpose(-1, -2)
    want = tile_attention_ref(q, k, v, 0.2, visible=visible)
    k, v = k.masked_fill(hidden, torch.nan), v.masked_fill(hidden, torch.nan)
    for form in (tile_attention_ref, tile_attention_cpu):
        out, lse = form(q, k, v, 0.2, visible=visible)
        assert_close_rms(form.__name__, want[0], out, BOUND[dtype])
        assert_close_rms(form.__name__, want[1], lse, LSE_BOUND[dtype])
        assert (out[0, 1] == 0).all() and lse[0, 1].isneginf().all()


def test_a_mix_of_dtypes_is_computed_in_the_wider_one() -> None:
    q, k, v = tile(torch.float32)
    k, v = k.bfloat16(), v.bfloat16()
    out, _ = tile_attention(q, k, v, 0.2)
    assert_close_rms("f32 query", tile_attention_ref(q.double(), k.double(), v.double(), 0.2)[0], out, 1e-6)
    out, _ = tile_attention(q.bfloat16(), k.float(), v.float(), 0.2)
    assert out.dtype == torch.bfloat16


def test_scores_of_a_thousand_do_not_overflow() -> None:
    q, k, v = tile(torch.float32)
    for form in (tile_attention_ref, tile_attention_cpu):
        out, lse = form(1e3 * q, k, v, 1.0)
        assert out.isfinite().all() and lse.isfinite().all()


@pytest.mark.parametrize("cuts", ((1,), (20,), (7, 8, 30)))
def test_joined_tiles_are_the_whole(cuts: tuple[int, ...]) -> None:
    q, k, v = tile(torch.float32)
    bounds, total = [0, *cuts, 40], TileSum()
    for a, b in zip(bounds, bounds[1:]):
        total.add(*tile_attention(q, k[:, :, a:b], v[:, :, a:b], 0.2))
    whole, lse = tile_attention_ref(q, k, v, 0.2)
    assert_close_rms("output", whole, total.result(torch.float32), 1e-6)
    assert total.lse is not None
    assert_close_rms("log-sum-exp", lse, total.lse, 1e-6)


def test_tiles_that_see_nothing_change_nothing_wherever_they_stand() -> None:
    q, k, v = tile(torch.float32)
    nothing = torch.zeros(2, 3, 1, 40, dtype=torch.bool)
    blind, real = tile_attention(q, k, v, 0.2, visible=nothing), tile_attention(q, k, v, 0.2)
    for order in ((blind, real), (real, blind), (blind, blind, real, blind)):
        total = TileSum()
        for part in order:
            total.add(*part)
        assert_same_bytes(real[0], total.result(torch.float32))


def test_pages_are_read_at_any_cut() -> None:
    pool = torch.arange(5 * 4 * 2).view(5, 4, 2).float()
    table = torch.tensor([[3, 1, 4], [2, -1, -1]], dtype=torch.int32)
    whole = pool[[3, 1, 4]].view(12, 2)
    for a in range(12):
        for b in range(a + 1, 13):
            got = read_pages(pool, table, a, b)
            assert_same_bytes(whole[a:b], got[0])
            if b <= 4:
                assert_same_bytes(pool[2, a:b], got[1])
