"""Settings: what an LLM is opened with, checked, with "auto" and None as they come out on this machine.

What follows from the model's files is decided while they are open (weight_choice.py, sizing.py, opening.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from hybridkv.config import CacheConfig, EngineConfig, ReuseConfig

if TYPE_CHECKING:
    from hybridkv.ranks import Ranks

REUSE = ReuseConfig()  # where nothing is said of it


@dataclass(frozen=True)
class Settings:
    """Of one LLM. The arguments of `LLM` say what each means."""

    device: torch.device
    dtype: str
    weight_dtype: str
    fp8: bool  # whether that asks for E4M3 codes, a scale for each row
    exact: bool
    cache: CacheConfig
    limits: EngineConfig
    reuse: ReuseConfig | None
    ranks: Ranks | None = None  # None: one process has the whole model
