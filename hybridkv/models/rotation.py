"""Rotation: what a config says about rotary positions. Its frequencies are computed when a model is loaded.

A config is parsed without torch. The frequencies are torch's own f32 results, so that they have the bits that the
model was trained with; whether f32 holds them is known from their logarithms.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from hybridkv.errors import ModelFileError

if TYPE_CHECKING:
    from torch import Tensor

LEAST, LARGEST, SMALLEST = -126, 128, -149  # powers of two: normal numbers, and those that a division may give


@dataclass(frozen=True)
class Linear:
    """All positions are divided by `factor`."""

    factor: float

    def stretch(self, freq: Tensor, theta: float) -> Tensor:
        """Frequencies [R] as they are after scaling."""
        return freq / self.factor


@dataclass(frozen=True)
class Llama3:
    """Long wavelengths are stretched by `factor`, short ones kept, those between blended."""

    factor: float
    low: float  # rotations over the original context
    high: float
    original: float  # tokens of the original context

    def stretch(self, freq: Tensor, theta: float) -> Tensor:
        """Frequencies [R] as they are after scaling."""
        rotations = self.original * freq / (2 * math.pi)
        blend = ((rotations - self.low) / (self.high - self.low)).clamp(0, 1)
        return freq * blend + freq / self.factor * (1 - blend)


@dataclass(frozen=True)
class Yarn:
    """NTK by parts: pairs that rotate often over the original context are kept, pairs that rotate seldom are stretched
    by `factor`, those between are blended.
    """

    factor: float
    fast: float  # rotations over the original context
    slow: float
    original: float

    def stretch(self, freq: Tensor, theta: float) -> Tensor:
        """Frequencies [R] as they are after scaling."""
        import torch

        rope = 2 * len(freq)

        def pair(rotations: float) -> float:
            """The pair that rotates this often over the original context."""
            return rope * math.log(self.original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

        low = max(math.floor(pair(self.fast)), 0)
        high = min(math.ceil(pair(self.slow)), rope - 1)
        width = high - low if high != low else 0.001
        stretched = ((torch.arange(len(freq), dtype=torch.float32) - low) / width).clamp(0, 1)
        return freq * (1 - stretched) + freq / self.factor * stretched


@dataclass(frozen=True)
class Rotation:
    """Rotary positions of queries and keys."""

    theta: float
    channels: int  # rotated channels of a head, two for each frequency
    scaling: Linear | Llama3 | Yarn | None = None
    factors: tuple[float, ...] | None = None  # what each frequency is divided by besides, as GGUF files have it

    def check(self, spelled: str = "rope_theta") -> Rotation:
        """The rotation, or ModelFileError if f32 does not hold its frequencies. `spelled`: theta's key."""
        last = -(self.channels - 2) / self.channels * math.log2(self.theta)
        plain = (0.0, last)
        divided = [power - math.log2(self.scaling.factor) for power in plain] if self.scaling else [0.0]
        of_pairs = [0.0]
        for i, factor in enumerate(self.factors or ()):
            of_pairs.append(-2 * i / self.channels * math.log2(self.theta) - math.log2(factor))
        if not all(LEAST <= p < LARGEST for p in plain) or not all(
            SMALLEST <= p < LARGEST for p in (*divided, *of_pairs)
        ):
            raise ModelFileError(
                f"config: {spelled} {self.theta:g} and its scaling give rotation frequencies outside f32"
            )
        return self

    @cached_property
    def frequencies(self) -> tuple[float, ...]:
        """One for each rotated pair."""
        import torch

        freq = 1.0 / self.theta ** (torch.arange(0, self.channels, 2, dtype=torch.float32) / self.channels)
        if self.scaling is not None:
            freq = self.scaling.stretch(freq, self.theta)
        if self.factors is not None:
            freq = freq / torch.tensor(self.factors, dtype=torch.float32)
        return tuple(freq.tolist())
