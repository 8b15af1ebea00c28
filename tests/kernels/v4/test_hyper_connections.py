"""Hyper-connections against a loop in float64, and the kernels against the reference."""

import pytest
import torch
from numerics import assert_close_rms, assert_same_bytes
from torch import Tensor
from triton_interpreter import DEVICE

from hybridkv.kernels.v4.hyper_connections import (
    CHUNK,
    HyperMap,
    hyper_enter_ref,
    hyper_enter_triton,
    hyper_exit_ref,
    hyper_exit_triton,
    hyper_expand_ref,
    hyper_expand_triton,
    hyper_mix_ref,
)

# f32: sums of a few hundred products. bf16: inputs are the same, the result is rounded once more, where a collapsed row
# may have fallen on either side of a rounding before its norm: two roundings of 1.1e-3 RMS.
BOUND = {torch.float32: 3e-6, torch.bfloat16: 3e-3}
NORM_EPS, EPS, ITERS = 1e-6, 1e-6, 20


def case(n: int, D: int, exit: bool = False, iters: int = ITERS) -> HyperMap:
    rows = n if exit else n * (n + 2)
    fn = torch.randn(rows, n * D) * 2 / (n * D) ** 0.5
    scale = torch.rand(1 if exit else 3) + 0.5
    return HyperMap(fn, torch.randn(rows), scale, 1 + 0.3 * torch.randn(D), NORM_EPS, EPS, iters)


def moved(m: HyperMap) -> HyperMap:
    return HyperMap(*(t.to(DEVICE) for t in (m.fn, m.base, m.scale, m.norm)), m.norm_eps, m.eps, m.iters)


def by_hand(X: Tensor, m: HyperMap) -> tuple[Tensor, Tensor, Tensor]:
    """Coefficients of one token X [n, D], an element at a time in float64."""
    n, flat = len(X), X.double().flatten()
    v = m.fn.double() @ flat / (flat.square().mean() + m.norm_eps).sqrt()
    pre = torch.stack([1 / (1 + (-v[i] * m.scale[0] - m.base[i]).exp()) + m.eps for i in range(n)])
    post = torch.stack([2 / (1 + (-v[n + i] * m.scale[1] - m.base[n + i]).exp()) for i in range(n)])
    C = torch.zeros(n, n, dtype=torch.float64)
    for i in range(n):
        row = [(v[2 * n + i * n + k] * m.scale[2] + m.base[2 * n + i * n + k]).exp() for k in range(n)]
        for k in range(n):
            C[i, k] = row[k] / sum(row) + m.eps
    for turn in range(2 * m.iters - 1):  # columns, rows, columns, ... and columns last
        for k in range(n):
            if turn % 2 == 0:
                C[:, k] = C[:, k] / (C[:, k].sum() + m.eps)
            else:
                C[k] = C[k] / (C[k].sum() + m.eps)
    return pre, post, C


@pytest.mark.parametrize("iters", (1, 2, 20))
def test_coefficients_are_those_of_the_formulas(iters: int) -> None:
    n, D = 4, 24
    m, X = case(n, D, iters=iters), torch.randn(3, n, D) * torch.tensor([1e-3, 1.0, 50.0]).view(3, 1, 1)
    got = hyper_mix_ref(X, m)
    for t in range(3):
        for name, want, g in zip(("pre", "post", "C"), by_hand(X[t], m), got):
            assert_close_rms(f"{name} of token {t}", want, g[t], 1e-5)


def test_balanced_rows_and_columns() -> None:
    C = hyper_mix_ref(torch.randn(5, 4, 32), case(4, 32))[2]
    assert_close_rms("columns", torch.ones(5, 4), C.sum(1), 1e-5)
    assert_close_rms("rows", torch.ones(5, 4), C.sum(2), 1e-2)  # the columns were divided last
    assert (C - C.transpose(1, 2)).abs().max() > 0.05, "a symmetric C would not tell its two directions apart"


def test_collapse_and_expand_by_hand() -> None:
    n, D = 4, 24
    m, X, f = case(n, D), torch.randn(2, n, D), torch.randn(2, D)
    pre, post, C = hyper_mix_ref(X, m)
    x, post_too, C_too = hyper_enter_ref(X, m)
    assert_same_bytes(post, post_too)
    assert_same_bytes(C, C_too)
    y = hyper_expand_ref(X, f, post, C)
    for t in range(2):
        row = sum(pre[t, i].double() * X[t, i].double() for i in range(n))
        assert_close_rms("collapse", row / (row.square().mean() + NORM_EPS).sqrt() * m.norm, x[t], 1e-6)
        for k in range(n):
            want = post[t, k] * f[t].double() + sum(C[t, i, k] * X[t, i].double() for i in range(n))
            assert_close_rms(f"stream {k}", want, y[t, k], 1e-6)


triton = pytest.importorskip("triton")


@pytest.mark.parametrize("dtype", BOUND)
@pytest.mark.parametrize(
    ("T", "n", "D"), ((1, 4, 64), (5, 4, 200), (3, 2, 31), (2, 3, 40), (17, 4, 3 * CHUNK // 4 + 9))
)
def test_kernels_equal_the_reference(dtype: torch.dtype, T: int, n: int, D: int) -> None:
    m, out = case(n, D), case(n, D, exit=True)
    X, f = (torch.randn(T, n, D) * 3).to(dtype), torch.randn(T, D).to(dtype)
    want = hyper_enter_ref(X, m)
    got = hyper_enter_triton(X.to(DEVICE), moved(m))
    assert_close_rms("x", want[0], got[0], BOUND[dtype])
    assert got[0].dtype == dtype
    for name, a, b in zip(("post", "C"), want[1:], got[1:]):
        assert_close_rms(name, a, b, 1e-5)  # f32 whatever the streams; 39 divisions on the way
    assert_close_rms(
        "expanded", hyper_expand_ref(X, f, *want[1:]), hyper_expand_triton(*(t.to(DEVICE) for t in (X, f, *want[1:]))),
        BOUND[dtype],
    )  # fmt: skip
    assert_close_rms("exit", hyper_exit_ref(X, out), hyper_exit_triton(X.to(DEVICE), moved(out)), BOUND[dtype])


def test_no_token() -> None:
    X, m, out = torch.zeros(0, 4, 32, device=DEVICE), moved(case(4, 32)), moved(case(4, 32, exit=True))
    x, post, C = hyper_enter_triton(X, m)
    assert (x.shape, post.shape, C.shape) == ((0, 32), (0, 4), (0, 4, 4))
    assert hyper_expand_triton(X, x, post, C).shape == (0, 4, 32) and hyper_exit_triton(X, out).shape == (0, 32)


def test_a_token_does_not_see_its_neighbours() -> None:
    m, X = moved(case(4, 96)), torch.randn(6, 4, 96, device=DEVICE)
    alone = hyper_enter_triton(X[2:3], m)
    X[:2], X[3:] = torch.nan, torch.inf
    for a, b in zip(alone, hyper_enter_triton(X, m)):
        assert_same_bytes(a[0], b[2])
        assert b[0].isnan().any(), "NaN streams must not give numbers"


def test_streams_that_are_a_slice() -> None:
    m, X = case(4, 48), torch.randn(3, 6, 48)
    want, got = hyper_enter_ref(X[:, 1:5], m), hyper_enter_triton(X.to(DEVICE)[:, 1:5], moved(m))
    assert_close_rms("x", want[0], got[0], BOUND[torch.float32])
