"""The causal convolution: whole, in uneven pieces and step by step against float64."""

import itertools

import pytest
import torch
from numerics import assert_close_rms, assert_same_bytes, rel_rms
from torch import Tensor

from hybridkv.kernels.gdn.rule import causal_conv_ref, causal_conv_step_ref

BOUND = 5e-7  # four products and a silu in f32


def in_float64(x: Tensor, weight: Tensor, conv_state: Tensor) -> Tensor:
    rows, width = torch.cat((conv_state, x)).double(), weight.shape[1]
    out = torch.zeros(x.shape, dtype=torch.float64)
    for t in range(len(x)):
        for i in range(width):
            out[t] += (
                weight[:, width - 1 - i].double() * rows[width - 1 + t - i]
            )  # the last column meets the newest token
    return out * out.sigmoid()


def case(T: int, width: int = 4, channels: int = 10) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(T, channels), torch.randn(channels, width), torch.randn(width - 1, channels)


@pytest.mark.parametrize("width", (2, 4))
@pytest.mark.parametrize("T", (1, 2, 3, 4, 50))
def test_the_whole_is_the_formula_and_leaves_the_last_inputs(T: int, width: int) -> None:
    x, weight, conv_state = case(T, width)
    own = conv_state.clone()
    assert_close_rms("output", in_float64(x, weight, conv_state), causal_conv_ref(x, weight, own), BOUND)
    assert_same_bytes(torch.cat((conv_state, x))[-(width - 1) :], own)


def pieces(cuts: list[int], channels: int) -> tuple[Tensor, Tensor]:
    """(whole, in pieces); the conv_states they leave are the same bytes."""
    x, weight, conv_state = case(200, channels=channels)
    whole_conv_state, own = conv_state.clone(), conv_state.clone()
    whole = causal_conv_ref(x, weight, whole_conv_state)
    parts = [causal_conv_ref(x[a:b], weight, own) for a, b in itertools.pairwise([0, *cuts, 200])]
    assert_same_bytes(whole_conv_state, own)
    return whole, torch.cat(parts)


@pytest.mark.parametrize("cuts", ([1], [1, 2, 3], [2, 5, 199], [25], list(range(1, 200))))
def test_pieces_are_the_whole(cuts: list[int]) -> None:
    assert_close_rms("output", *pieces(cuts, 10), BOUND)  # torch's silu differs in the last bit at the end of a block


@pytest.mark.parametrize("cuts", ([64], [128, 192], [64, 128, 192]))
def test_pieces_cut_at_multiples_of_64_are_the_whole_bit_for_bit(cuts: list[int]) -> None:
    whole, parts = pieces(cuts, 160)
    assert_same_bytes(whole, parts)


def test_steps_are_the_whole() -> None:
    x, weight, conv_state = case(50)
    own = conv_state.clone()[None]
    steps = torch.cat([causal_conv_step_ref(x[t : t + 1], weight, own) for t in range(50)])
    whole = causal_conv_ref(x, weight, conv_state)
    assert_close_rms("output", whole, steps, BOUND)  # the width may be added in another order
    assert_same_bytes(conv_state, own[0])


def test_bf16_inputs_are_computed_in_f32() -> None:
    x, weight, conv_state = case(9)
    narrow = x.bfloat16()
    out = causal_conv_ref(narrow, weight, conv_state.clone())
    assert out.dtype == torch.float32
    assert_close_rms("output", in_float64(narrow.float(), weight, conv_state), out, BOUND)


def test_the_bound_would_see_reversed_taps() -> None:
    x, weight, conv_state = case(50)
    assert rel_rms(in_float64(x, weight, conv_state), causal_conv_ref(x, weight.flip(1), conv_state.clone())) > 0.1
