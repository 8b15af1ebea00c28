"""Planes of GGUF's formats: every weight is the one that the gguf package reads, wherever rows and columns go."""

import gguf
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from numerics import assert_same_bytes
from packed_blocks import random_blocks
from torch import Tensor

from hybridkv.kernels.linear import packed_weights as file
from hybridkv.kernels.linear.packed_dequantise import dequantise_ref
from hybridkv.kernels.linear.packed_planes import BITS, each_for, plane_bytes
from hybridkv.kernels.linear.packed_weights import join, pack

FILE_BYTES = {"Q8_0": 34 * 8, "Q4_K": 144, "Q5_K": 176, "Q6_K": 210}  # for 256 weights


def stored(kind: str, blocks: Tensor) -> Tensor:
    return torch.from_numpy(gguf.dequantize(blocks.numpy(), Type[kind]))


@pytest.mark.parametrize("kind", BITS)
def test_planes_hold_the_weights_of_the_file(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file, "AT_ONCE", 3 * 1280)  # three rows at once
    blocks = random_blocks(kind, 7, 1280)
    packed = pack(blocks, BITS[kind])
    assert packed.shape == (7, 1280) and packed.each == 256
    assert_same_bytes(stored(kind, blocks), dequantise_ref(packed))
    assert [plane.nbytes for plane in packed.planes] == [7 * n for n in plane_bytes(BITS[kind], 1280, 256)]
    assert packed.nbytes <= 7 * 5 * (FILE_BYTES[kind] + 4)
    some = torch.tensor([5, 0, 5])
    assert_same_bytes(stored(kind, blocks)[some], dequantise_ref(packed.rows(some)))
    assert_same_bytes(torch.cat([stored(kind, blocks)] * 2), dequantise_ref(join([packed, packed])))


@pytest.mark.parametrize("kind", BITS)
@pytest.mark.parametrize("heads", [5, 10, 20])  # of 256, 128 and 64 columns
def test_heads_of_columns_change_places(kind: str, heads: int) -> None:
    blocks, order = random_blocks(kind, 3, 1280), torch.randperm(heads)
    packed = pack(blocks, BITS[kind], order)
    want = stored(kind, blocks).view(3, heads, -1)[:, order].reshape(3, 1280)
    assert_same_bytes(want, dequantise_ref(packed))
    assert packed.nbytes == 3 * sum(plane_bytes(BITS[kind], 1280, packed.each))


@pytest.mark.parametrize("kind", BITS)
def test_rows_beside_each_other(kind: str) -> None:
    packed = pack(random_blocks(kind, 48, 1024), BITS[kind])
    laid = packed.laid(16)
    assert laid.beside == 16 and laid.nbytes == packed.nbytes and laid.laid(16) is laid
    assert all(plane.is_contiguous() for plane in laid.planes)
    if kind != "Q8_0":  # 32 bytes of row 1 after those of row 0
        assert_same_bytes(packed.codes[1, :32], laid.codes.flatten()[32:64])
    assert_same_bytes(packed.scales[17, :3].contiguous(), laid.scales.flatten()[16 * 16 + 1 :: 16][:3].contiguous())
    assert_same_bytes(dequantise_ref(packed), dequantise_ref(laid))
    assert_same_bytes(dequantise_ref(packed)[16:], dequantise_ref(laid.rows(slice(16, None))))
    odd = pack(random_blocks(kind, 5, 256), BITS[kind])
    assert odd.laid(16) is odd


@pytest.mark.parametrize("columns", [32, 96, 1184])
def test_q8_0_rows_of_any_number_of_groups(columns: int) -> None:
    blocks = random_blocks("Q8_0", 5, columns)
    assert_same_bytes(stored("Q8_0", blocks), dequantise_ref(pack(blocks, 8)))


def test_what_has_no_planes() -> None:
    assert each_for(4, 1280, 40) is None, "heads of 32: two of them share a load"
    assert each_for(4, 1280, 3) is None and each_for(4, 96, 1) is None and each_for(8, 48, 1) is None
    assert each_for(8, 1280, 40) is not None, "a scale for each 32 is the file's own"
