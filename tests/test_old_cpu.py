"""`make test-old-cpu` is not vacuous: its environment variables reached every library that multiplies matrices."""

import ctypes
import os
from pathlib import Path

import numpy as np
import pytest
import torch

pytestmark = pytest.mark.skipif(
    os.environ.get("ATEN_CPU_CAPABILITY") != "avx2", reason="only where `make test-old-cpu` sets the variables"
)


def test_torch_uses_no_avx512() -> None:
    assert torch.backends.cpu.get_cpu_capability() == "AVX2"


def test_onednn_uses_no_avx512() -> None:
    assert os.environ.get("ONEDNN_MAX_CPU_ISA") == "AVX2"
    assert not torch.ops.mkldnn._is_mkldnn_bf16_supported()  # oneDNN has bf16 products from AVX-512 on


def test_fbgemm_is_told_so_too() -> None:
    assert os.environ.get("FBGEMM_ENABLE_INSTRUCTIONS") == "AVX2"  # it tells nobody what it uses


def test_numpy_multiplies_with_openblas_for_haswell() -> None:
    libraries = sorted((Path(np.__file__).parents[1] / "numpy.libs").glob("libscipy_openblas*"))
    if not libraries:
        pytest.skip("this numpy does not bring OpenBLAS")
    core = ctypes.CDLL(str(libraries[0])).scipy_openblas_get_corename64_
    core.restype = ctypes.c_char_p
    assert core() == b"Haswell"
