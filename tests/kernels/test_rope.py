"""Rotary embedding: the formula, the relation of its two layouts, and what makes it useful: only distances matter."""

import math

import pytest
import torch
from numerics import assert_close_rms, assert_same_bytes, rel_rms
from torch import Tensor

from hybridkv.kernels.rope import rope, rope_angles, rope_matrices

# angles are products position * frequency in f32: an error of 2^-24 of the angle, which grows with the position
BOUND = 2e-5


def frequencies(R: int, theta: float = 10000.0) -> Tensor:
    return torch.tensor([theta ** (-i / R) for i in range(R)])


def by_formula(x: Tensor, positions: list[int], freq: Tensor, interleaved: bool) -> Tensor:
    """Pair by pair as complex numbers in float64."""
    R, out = len(freq), x.double().clone()
    for t, position in enumerate(positions):
        for i in range(R):
            a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + R)
            angle = position * float(freq[i])
            c, s = math.cos(angle), math.sin(angle)
            first, second = x[t, :, a].double(), x[t, :, b].double()
            out[t, :, a], out[t, :, b] = first * c - second * s, first * s + second * c
    return out


@pytest.mark.parametrize("interleaved", (False, True))
@pytest.mark.parametrize(("D", "R"), ((32, 16), (100, 50), (64, 8), (256, 32), (2, 1)))
def test_rotation_is_the_formula(D: int, R: int, interleaved: bool) -> None:
    positions, freq = [0, 1, 7, 64, 300, 5000], frequencies(R)
    x = torch.randn(6, 3, D)
    got = rope(x, *rope_angles(torch.tensor(positions), freq), interleaved=interleaved)
    assert_close_rms("rotation", by_formula(x, positions, freq, interleaved), got, BOUND)
    assert_same_bytes(x[0], got[0])  # position 0 turns nothing


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("interleaved", (False, True))
def test_channels_past_the_rotated_ones_stay_bit_for_bit(interleaved: bool, dtype: torch.dtype) -> None:
    x = torch.randn(5, 3, 64).to(dtype)
    got = rope(x, *rope_angles(torch.arange(5) + 9, frequencies(8)), interleaved=interleaved)
    assert got.dtype == dtype
    assert_same_bytes(x[..., 16:].contiguous(), got[..., 16:].contiguous())
    assert not torch.equal(x[..., :16], got[..., :16])


@pytest.mark.parametrize(("D", "R"), ((32, 16), (64, 8)))
def test_the_two_layouts_differ_by_a_permutation_of_channels(D: int, R: int) -> None:
    """Interleaved channel 2i is half-split channel i, and 2i + 1 is i + R: same products, so same bits."""
    place = [c for i in range(R) for c in (i, i + R)] + list(range(2 * R, D))
    x, angles = torch.randn(7, 2, D), rope_angles(torch.arange(7) * 11, frequencies(R))
    half = rope(x, *angles)
    assert_same_bytes(half[..., place], rope(x[..., place], *angles, interleaved=True))


@pytest.mark.parametrize("interleaved", (False, True))
def test_scores_depend_on_the_distance_alone(interleaved: bool) -> None:
    freq, q, k = frequencies(16), torch.randn(1, 1, 40), torch.randn(1, 1, 40)

    def score(at_q: int, at_k: int) -> Tensor:
        turned = (rope(x, *rope_angles(torch.tensor([p]), freq), interleaved) for x, p in ((q, at_q), (k, at_k)))
        return (next(turned) * next(turned)).sum(-1)

    scale = q.norm() * k.norm()
    for distance in (0, 1, 17, 200):
        base = score(distance, 0)
        for shift in (1, 64, 1000):
            assert (score(distance + shift, shift) - base).abs() < 1e-4 * scale  # angles near 1000 are exact to 2^-14
    assert (score(17, 0) - score(18, 0)).abs() > 1e-3 * scale  # guard: the distance does matter


def test_rotation_keeps_lengths() -> None:
    x = torch.randn(9, 3, 64)
    got = rope(x, *rope_angles(torch.arange(9) * 100, frequencies(32)))
    assert_close_rms("norms", x.double().norm(dim=-1), got.norm(dim=-1), 5e-7)


def test_bf16_is_rotated_in_f32_and_rounded_once() -> None:
    positions = [3, 4000]
    x = torch.randn(2, 3, 64).bfloat16()
    got = rope(x, *rope_angles(torch.tensor(positions), frequencies(32)))
    assert_close_rms("bf16", by_formula(x, positions, frequencies(32), False), got, 2**-8)  # one rounding at most


def test_positions_up_to_a_million_have_finite_precise_angles() -> None:
    positions, freq = [2**20 - 1, 2**20], frequencies(4)
    cos, _ = rope_angles(torch.tensor(positions), freq)
    exact = torch.tensor([[math.cos(p * float(f)) for f in freq] for p in positions]).double()
    assert (cos[:, 0].double() - exact).abs().max() < 0.07  # f32 holds an angle of 2^20 to 1/16


def test_the_bound_would_see_a_position_off_by_one() -> None:
    x, freq = torch.randn(6, 3, 64), frequencies(32)
    wrong = by_formula(x, list(range(1, 7)), freq, False)
    assert rel_rms(wrong, rope(x, *rope_angles(torch.arange(6), freq))) > 1e3 * BOUND


@pytest.mark.parametrize(("T", "R"), ((0, 4), (1, 1), (1, 32), (4, 50)))
def test_a_product_with_matrices_is_the_same_rotation(T: int, R: int) -> None:
    x, angles = torch.randn(T, 3, 2 * R), rope_angles(torch.arange(T) * 37 + 5, frequencies(R))
    turn = rope_matrices(*angles)
    assert turn.shape == (T, 2 * R, 2 * R)
    assert_close_rms("rotation", rope(x.double(), *angles).double(), torch.bmm(x, turn), 1e-6)  # f32
