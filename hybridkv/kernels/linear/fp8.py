"""linear_fp8: x W^T + b with W [N, K] in E4M3, one f32 scale for each of its rows (largest magnitude / 448).

    y[t, n] = scale[n] * sum_k x[t, k] * code[n, k] + b[n]

Few rows of x: the codes are upcast in registers and the products are exact (fp8_hopper.py for up to eight rows on a
Hopper GPU, else linear_vector). More rows: x is rounded to E4M3 too, with a scale for each of its rows, and FP8 tensor
cores multiply. A GPU without these, and any CPU, keeps W dequantised: it computes the same model without dequantising W
again in every call.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridkv.kernels.backend import has_gluon, sm_count
from hybridkv.kernels.formats.fp8 import fp8_decode, fp8_encode
from hybridkv.kernels.gluon import TensorDescriptor, gl
from hybridkv.kernels.linear.gemv import MAX_ROWS, has_kernel, linear_vector

HOPPER_ROWS = 8  # of x, that fp8_hopper.py multiplies at once
TILE = 16  # rows of W that it takes at once
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
    """x rounded to E4M3 as well, a scale for each row."""
    x_codes, x_scale = fp8_encode(x)
    a, b = x_codes.view(torch.float8_e4m3fn), codes.view(torch.float8_e4m3fn).T
    return torch._scaled_mm(a, b, x_scale.unsqueeze(1), scale.unsqueeze(0), bias=bias, out_dtype=x.dtype)


def suits_hopper(x: Tensor, codes: Tensor, gated: bool = False) -> bool:
    """Whether the kernel in fp8_hopper.py takes these shapes."""
    N, K = codes.shape
    if not 0 < len(x) <= HOPPER_ROWS or x.dtype != torch.bfloat16 or not has_gluon(x.device):
        return False
    return N % (TILE * (1 + gated)) == 0 and K % 16 == 0 and codes.is_contiguous() and codes.data_ptr() % 16 == 0


def hopper_tile(N: int, gated: bool) -> tuple[int, int, int, int]:
    """S (and warps), DEPTH, programs a multiprocessor and their registers: the fastest on an H200 at a 27B's widths."""
    return (4, 3, 3, 80) if gated else (4, 6, 3, 80)


def linear_fp8_hopper(
    x: Tensor, codes: Tensor, scale: Tensor, bias: Tensor | None = None, gated: bool = False
) -> Tensor:
    """Arguments as linear_fp8_few's, where suits_hopper."""
    from hybridkv.kernels.linear.fp8_hopper import linear_fp8_hopper_kernel

    (T, K), N = x.shape, len(codes) // (1 + gated)
    if x.stride(-1) != 1 or x.stride(0) % 8 or x.data_ptr() % 16:
        x = x.clone(memory_format=torch.contiguous_format)
    S, depth, per_sm, registers = hopper_tile(N, gated)
    y, words, tiles = torch.empty((T, N), dtype=x.dtype, device=x.device), x.view(torch.int32), N // TILE
    box = [TILE, 32 * S]
    layout = gl.NVMMASharedLayout.get_default_for(box, gl.int32)
    linear_fp8_hopper_kernel[(min(tiles, per_sm * sm_count(x.device)),)](
        words, TensorDescriptor.from_tensor(codes.view(torch.int32), box, layout), scale, y if bias is None else bias,
        y, T, N, K, words.stride(0), tiles, BIAS=bias is not None, GATED=gated, EVEN=K % (128 * S) == 0, S=S,
        DEPTH=depth, num_warps=S, maxnreg=registers, launch_pdl=True,
    )  # fmt: skip
    return y


def linear_fp8_few(
    x: Tensor,  # [T, K], T <= MAX_ROWS
    codes: Tensor,  # [N, K] uint8
    scale: Tensor,  # [N] f32
    bias: Tensor | None = None,  # [N]
    gated: bool = False,  # codes [2 N, K]: silu(first half) * second half
) -> Tensor:  # [T, N]
    taken = linear_fp8_hopper if suits_hopper(x, codes, gated) else linear_vector
    return taken(x, codes, scale, bias, gated)


def linear_fp8(x: Tensor, codes: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [T, K], codes [N, K] uint8, scale [N] f32, bias [N] -> [T, N] in x's dtype."""
    N, K = codes.shape
    if has_kernel(x.device) and len(x) <= MAX_ROWS:
        return linear_fp8_few(x, codes, scale, bias)
    if x.is_cuda and N % 16 == K % 16 == 0:  # what torch._scaled_mm needs
        return linear_fp8_rounded(x, codes, scale, bias)
    return linear_fp8_ref(x, codes, scale, bias)
