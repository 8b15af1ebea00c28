"""Triton's interpreter as tests use it: bits of products do not depend on shapes, and integer overflow is an error."""

import numpy as np
import pytest
import torch
import triton_interpreter
from triton_interpreter import DEVICE, INTERPRETED

pytest.importorskip("triton")
import triton
import triton.language as tl

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="kernels are compiled here")


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_a_row_of_a_product_has_the_same_bits_in_any_shape(dtype: type) -> None:
    a, b = (np.random.standard_normal(shape).astype(dtype) for shape in ((64, 80), (80, 48)))
    d = np.random.standard_normal((64, 48)).astype(np.float32)
    whole = triton_interpreter.dot(a, b, d)
    assert np.allclose(whole, a.astype(np.float64) @ b.astype(np.float64) + d, rtol=0, atol=1e-5)
    for rows, columns in ((1, 1), (1, 48), (3, 16), (16, 3), (64, 1), (17, 47)):
        part = triton_interpreter.dot(a[:rows], b[:, :columns], d[:rows, :columns])
        assert part.tobytes() == whole[:rows, :columns].tobytes(), (rows, columns)


@triton.jit
def multiply_kernel(x, y, out):
    tl.store(out, tl.load(x) * tl.load(y))


@pytest.mark.parametrize(("x", "y", "fits"), [(46340, 46340, True), (46341, 46341, False), (-65536, 32769, False)])
def test_integer_overflow_is_an_error(x: int, y: int, fits: bool) -> None:
    a, b, out = (torch.tensor([n], dtype=torch.int32, device=DEVICE) for n in (x, y, 0))
    if fits:
        multiply_kernel[(1,)](a, b, out)
        assert int(out) == x * y
    else:
        with pytest.raises(Exception, match="overflow"):
            multiply_kernel[(1,)](a, b, out)
