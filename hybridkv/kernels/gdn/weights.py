"""DeltaNet: what a Gated DeltaNet layer has beside its two projections."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class DeltaNet:
    key_heads: int
    value_heads: int  # a multiple of key_heads: value heads that share a key head are neighbours
    key_dim: int  # K
    value_dim: int  # V
    conv: Tensor  # [channels, W] f32
    decay: Tensor  # [Hv] f32, exp(A_log)
    dt_bias: Tensor  # [Hv] f32
    norm: Tensor  # [V] f32: weight of the output's norm
    eps: float

    @property
    def channels(self) -> int:
        """Channels of the convolution: queries, keys, values."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    @property
    def columns(self) -> list[int]:
        """Widths of the parts of the input projection's output: q | k | v, z, b, a."""
        return [self.channels, self.value_heads * self.value_dim, self.value_heads, self.value_heads]
