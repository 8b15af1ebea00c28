"""The suite's own instruments work: fresh memory is poisoned, and the comparisons see what they must see."""

import math

import pytest
import torch
from numerics import assert_close_rms, assert_same_bytes, logit_gap, rel_rms

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn)


@pytest.mark.parametrize("dtype", FLOATS)
def test_fresh_float_memory_is_nan(dtype: torch.dtype) -> None:
    like = torch.zeros(4, 3, dtype=dtype)
    for fresh in (torch.empty(4, 3, dtype=dtype), torch.empty_like(like), like.new_empty(4, 3)):
        assert fresh.float().isnan().all()


@pytest.mark.parametrize("dtype", (torch.uint8, torch.int32, torch.int64))
def test_fresh_integer_memory_is_the_largest_value(dtype: torch.dtype) -> None:
    assert (torch.empty(5, dtype=dtype) == torch.iinfo(dtype).max).all()


def test_an_output_that_is_partly_written_is_caught() -> None:
    out = torch.empty(4)
    out[:3] = 1.0
    with pytest.raises(AssertionError, match="1 of 4 values of the result are NaN"):
        assert_close_rms("out", torch.ones(4), out, bound=1.0)


def test_nan_never_passes_not_even_against_nan() -> None:
    nan = torch.tensor([1.0, float("nan")])
    with pytest.raises(AssertionError, match="reference are NaN"):
        assert_close_rms("x", nan, nan, bound=float("inf"))
    assert math.isnan(rel_rms(nan, nan)) and math.isnan(logit_gap(torch.ones(2), nan))


def test_infinities_must_be_in_the_same_places() -> None:
    a, b = torch.tensor([1.0, -math.inf]), torch.tensor([-math.inf, 1.0])
    assert_close_rms("x", a, a.clone(), bound=0.0)
    for wrong in (b, -a, torch.tensor([1.0, -1e30])):
        with pytest.raises(AssertionError, match="on one side only"):
            assert_close_rms("x", a, wrong, bound=math.inf)


def test_relative_rms_is_relative() -> None:
    ref = torch.full((100,), 50.0)
    assert rel_rms(ref, ref * 1.01) == pytest.approx(0.01, rel=1e-4)
    assert rel_rms(torch.zeros(3), torch.zeros(3)) == 0 and rel_rms(torch.zeros(3), torch.ones(3)) == math.inf
    assert logit_gap(torch.tensor([1.0, -4.0]), torch.tensor([1.5, -4.0])) == 0.125


def test_bytes_tell_signed_zero_shape_and_dtype_apart() -> None:
    assert_same_bytes(torch.tensor(1.5), torch.tensor(1.5))
    assert_same_bytes(torch.arange(6.0).view(2, 3).T, torch.arange(6.0).view(2, 3).T.contiguous())
    for a, b in (
        (torch.tensor([0.0]), torch.tensor([-0.0])),
        (torch.zeros(2, 3), torch.zeros(3, 2)),
        (torch.zeros(2), torch.zeros(2, dtype=torch.bfloat16)),
    ):
        with pytest.raises(AssertionError, match="differ"):
            assert_same_bytes(a, b)
