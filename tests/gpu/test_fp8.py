"""FP8 rows on the GPU: the kernels' bytes are those of the CPU."""

from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from numerics import assert_same_bytes

from gpu.page_pools import D
from hybridkv.kernels.formats import fp8 as quant_file
from hybridkv.kernels.formats.fp8 import fp8_decode, fp8_encode, fp8_encode_ref

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("on_the_gpu")]


def test_fp8_codes_of_the_gpu_are_those_of_the_cpu(count: Callable[[ModuleType, str], list[str]]) -> None:
    x = torch.randn(4096, D) * torch.logspace(-40, 37, 4096)[:, None]
    calls = [count(quant_file, "fp8_encode_triton"), count(quant_file, "fp8_decode_triton")]
    codes, scale = fp8_encode(x)
    back = fp8_decode(codes, scale)
    assert [len(c) for c in calls] == [1, 1]
    for device in ("cpu", "cuda"):
        for a, b in zip(fp8_encode_ref(x.to(device)), (codes, scale)):
            assert_same_bytes(a, b)
    bound = torch.maximum(x.double().abs() / 16, scale.double()[:, None] * 2.0**-10) * (1 + 1e-6)
    assert ((back.double() - x.double()).abs() <= bound).all()
