"""Blocks of GGUF's formats with random codes and scales, as a file has them."""

import torch
from torch import Tensor

from hybridkv.kernels.linear.packed_planes import BITS, BLOCK_BYTES

F16_AT = {8: slice(0, 2), 4: slice(0, 4), 5: slice(0, 4), 6: slice(208, 210)}  # d, or d and dmin
SIZE = {8: 1 / 74, 4: 1 / 300, 5: 1 / 600, 6: 1 / 1400}  # of d, for weights near one


def random_blocks(kind: str, rows: int, columns: int, size: float = 1.0) -> Tensor:
    """u8 [rows, bytes of a row]; d has either sign, so the weights' mean is near zero."""
    bits = BITS[kind]
    count = columns // (32 if bits == 8 else 256)
    blocks = torch.randint(0, 256, (rows, count, BLOCK_BYTES[bits]), dtype=torch.uint8)
    at = F16_AT[bits]
    d = torch.randn(rows, count, (at.stop - at.start) // 2) * SIZE[bits] * size
    blocks[..., at] = d.half().view(torch.uint8)
    return blocks.flatten(1)
