"""linear_fp8: x W^T + b with W [N, K] in E4M3, one f32 scale for each of its rows (largest magnitude / 448).

    y[t, n] = scale[n] * sum_k x[t, k] * code[n, k] + b[n]

Few rows of x: the codes are upcast in registers and the products are exact (linear_vector). More rows: x is rounded to
E4M3 too, with a scale for each of its rows, and FP8 tensor cores multiply. A GPU without these, and any CPU, keeps W
dequantised: it computes the same model without dequantising W again in every call.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridkv.kernels.formats.fp8 import fp8_decode, fp8_encode
from hybridkv.kernels.linear.gemv import MAX_ROWS, has_kernel, linear_vector

TILE = 16  # rows and columns that torch._scaled_mm takes at a time
BLOCK = 1 << 24  # weights encoded at once: temporaries take a few times their bytes


def keeps_codes(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a model of this dtype computes with the codes on this device."""
    return dtype == torch.bfloat16 and has_kernel(device)


def encode_weight(weight: Tensor) -> tuple[Tensor, Tensor]:
    """[N, K] -> codes [N, K] uint8, scale [N] f32. A row with NaN has NaN for its scale."""
    N, K = weight.shape
    codes = torch.empty((N, K), dtype=torch.uint8, device=weight.device)
    scale = torch.empty(N, dtype=torch.float32, device=weight.device)
    rows = max(1, BLOCK // max(K, 1))
    for a in range(0, N if K else 0, rows):
        part = weight[a : a + rows]
        codes[a : a + rows], found = fp8_encode(part)
        scale[a : a + rows] = found.masked_fill(part.amax(-1).isnan(), torch.nan)  # amax keeps NaN
    return codes, scale


def round_weight_(weight: Tensor) -> Tensor:
    """Round every row to what its codes stand for, in place."""
    N, K = weight.shape
    rows = max(1, BLOCK // max(K, 1))
    for a in range(0, N if K else 0, rows):
        weight[a : a + rows] = fp8_decode(*encode_weight(weight[a : a + rows]))
    return weight


def linear_fp8_ref(x: Tensor, codes: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    y = F.linear(x.float(), codes.view(torch.float8_e4m3fn).float()) * scale
    return (y if bias is None else y + bias.float()).to(x.dtype)


def linear_fp8_rounded(x: Tensor, codes: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """x rounded to E4M3 as well, a scale for each row. N >= TILE, K in tiles.

    A rank's part of a matrix may have rows that fill no tile: the last tile's are then multiplied apart.
    """
    x_codes, x_scale = fp8_encode(x)
    a, a_scale = x_codes.view(torch.float8_e4m3fn), x_scale.unsqueeze(1)

    def product(codes: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
        b = codes.view(torch.float8_e4m3fn).T
        return torch._scaled_mm(a, b, a_scale, scale.unsqueeze(0), bias=bias, out_dtype=x.dtype)

    N, beyond = len(codes), len(codes) % TILE
    if not beyond:
        return product(codes, scale, bias)
    whole, last = slice(N - beyond), slice(N - TILE, N)
    tile = product(codes[last], scale[last].clone(), None if bias is None else bias[last].clone())  # at even addresses
    most = product(codes[whole], scale[whole], None if bias is None else bias[whole])
    return torch.cat((most, tile[:, TILE - beyond :]), 1)


def linear_fp8(x: Tensor, codes: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [T, K], codes [N, K] uint8, scale [N] f32, bias [N] -> [T, N] in x's dtype."""
    N, K = codes.shape
    if has_kernel(x.device) and len(x) <= MAX_ROWS:
        return linear_vector(x, codes, scale, bias)
    if x.is_cuda and N >= TILE and K % TILE == 0:
        return linear_fp8_rounded(x, codes, scale, bias)
    return linear_fp8_ref(x, codes, scale, bias)
