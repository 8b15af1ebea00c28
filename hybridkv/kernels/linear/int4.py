"""Int4Linear: a HalfLinear whose products of few rows read the 4-bit codes of a GGUF file, a quarter of the f16 bytes.

Formats whose weights are scale * code + least in groups of 32 columns: Q4_0, Q4_1, Q4_K. torch's product for a CPU
takes the codes as they are, scale and middle (least + 8 scale) of each group in bf16, and x in bf16; sums are f32, and
the result is rounded to bf16 once. Perplexity does not show it (docs/facts.md). With AVX-512 it is the faster one up to
FEW_ROWS rows; without it, and beyond them, f16 is.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridkv.kernels.linear.half import HalfLinear
from hybridkv.kernels.linear.packed_planes import GROUP, int4_bytes

FEW_ROWS = 4


@dataclass(frozen=True)
class Codes4:
    """w = scale * code + least, for groups of 32 columns."""

    codes: Tensor  # u8 [N, K], 0 to 15
    scale: Tensor  # f32 [N, K / 32]
    least: Tensor  # f32 [N, K / 32]

    def rows(self, which: Tensor) -> Codes4:
        """Some rows, in another order."""
        return Codes4(self.codes[which], self.scale[which], self.least[which])

    def values(self) -> Tensor:
        """[N, K] f32."""
        scale, least = (x.repeat_interleave(GROUP, 1) for x in (self.scale, self.least))
        return scale * self.codes + least


def join_codes(parts: list[Codes4]) -> Codes4:
    """Matrices one below the other."""
    return Codes4(*(torch.cat([getattr(part, name) for part in parts]) for name in ("codes", "scale", "least")))


def linear_int4_ref(x: Tensor, weight: Codes4) -> Tensor:
    """x [T, K] f32 -> [T, N] f32: the product of rounded numbers."""
    middle = (weight.least + 8 * weight.scale).bfloat16().float()
    scale = weight.scale.bfloat16().float()
    rounded = Codes4(weight.codes, scale, middle - 8 * scale)
    return F.linear(x.bfloat16().float(), rounded.values()).bfloat16().float()


def pack_int4(weight: Codes4) -> tuple[Tensor, Tensor]:
    """What linear_int4 takes: codes in torch's own layout, scales and middles [K / 32, N, 2] bf16."""
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(weight.codes.int(), 1)
    both = torch.stack((weight.scale, weight.least + 8 * weight.scale), -1)
    return packed, both.transpose(0, 1).bfloat16().contiguous()


def linear_int4(x: Tensor, packed: Tensor, scales: Tensor) -> Tensor:
    """x [T, K] f32, a matrix [N, K] of pack_int4 -> [T, N] f32."""
    return torch._weight_int4pack_mm_for_cpu(x.bfloat16(), packed, GROUP, scales).float()  # type: ignore[attr-defined]


def int4_pays() -> bool:
    """Whether this CPU multiplies few rows faster by 4-bit codes than by f16: a rule, so that no result follows from a
    clock.
    """
    return torch.backends.cpu.get_cpu_capability() == "AVX512" and hasattr(torch, "_weight_int4pack_mm_for_cpu")


class Int4Linear(HalfLinear):
    """Up to FEW_ROWS rows by codes, more by f16. `weight`: the same matrix in f32."""

    def __init__(self, weight: Tensor, codes: Codes4, bias: Tensor | None = None) -> None:
        super().__init__(weight, bias)
        self.packed_codes, self.scales = pack_int4(codes)
        self.nbytes += int4_bytes(*self.shape)

    def __call__(self, x: Tensor) -> Tensor:
        if x.shape[0] > FEW_ROWS:
            return super().__call__(x)
        y = linear_int4(x, self.packed_codes, self.scales)
        return y if self.bias is None else y.add_(self.bias)
