"""FP8 keys and values: E4M3 codes with one f32 scale for each token and head.

    entry   | code 0 | code 1 | ... | code D-1 |      D bytes, E4M3: 1 sign, 4 exponent, 3 mantissa bits, largest value
    448 scale   | f32 |                                  largest magnitude of the entry / 448

There is nothing to calibrate: an entry's scale comes from the entry. A value is off by at most 1/16 of itself, and by
16/448 of the entry's largest (for values under 2^-6 of scale x 1, by half a step of 2^-9 x scale).

What cannot be said in E4M3 is not hidden: NaN stays NaN. Infinity becomes the largest finite value of the entry's
scale, which is taken over finite values only. An entry of zeros has scale 1.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

E4M3_MAX = 448.0
SMALLEST_SCALE = 2.0**-126  # below, f32 itself loses digits


class Fp8Pages(NamedTuple):
    """A pool of FP8 entries."""

    codes: Tensor  # [N, P, D] uint8
    scale: Tensor  # [N, P] f32


Pages = Tensor | Fp8Pages  # what an op reads keys or values from


def fp8_encode_ref(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [..., D] -> codes [..., D] uint8, scale [...] f32."""
    wide = x.float()
    finite = wide.masked_fill(~wide.isfinite(), 0)
    largest = finite.abs().amax(-1)
    scale = torch.where(largest > 0, (largest / E4M3_MAX).clamp(min=SMALLEST_SCALE), 1.0)
    # clamp before the cast: past 464 some versions of torch give NaN; clamp keeps NaN as it is
    scaled = (wide / scale.unsqueeze(-1)).clamp(-E4M3_MAX, E4M3_MAX)
    return scaled.to(torch.float8_e4m3fn).view(torch.uint8), scale


fp8_encode = fp8_encode_ref


def fp8_decode_ref(codes: Tensor, scale: Tensor) -> Tensor:
    """codes [..., D] uint8, scale [...] -> f32 [..., D]."""
    return codes.view(torch.float8_e4m3fn).float() * scale.unsqueeze(-1)


fp8_decode = fp8_decode_ref
