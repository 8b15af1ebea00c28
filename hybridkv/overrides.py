"""Environment variables that win over a cache's settings, so that a problem can be bisected without touching code.

    HYBRIDKV_KV_DTYPE      f32 | bf16 | fp8 | auto
    HYBRIDKV_INDEX_DTYPE   f32 | bf16 | fp8 | mxfp4 | nvfp4 | auto: of DeepSeek-V4's index keys
    HYBRIDKV_BUDGET        tokens kept a stream; none: nothing is evicted

What they change is said on standard error.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hybridkv.config import CacheConfig, shown
from hybridkv.errors import HybridKVError

KV_DTYPE, INDEX_DTYPE, BUDGET = "HYBRIDKV_KV_DTYPE", "HYBRIDKV_INDEX_DTYPE", "HYBRIDKV_BUDGET"


def overridden(cache: CacheConfig, environment: Mapping[str, str] = os.environ) -> CacheConfig:
    """The settings with the environment's in their place. Applied twice it changes, and says, nothing more."""
    for variable, read in ((KV_DTYPE, _kv_dtype), (INDEX_DTYPE, _index_dtype), (BUDGET, _budget)):
        value = environment.get(variable, "").strip()
        if not value:
            continue
        try:
            changed = replace(cache, **read(value))
        except HybridKVError as error:
            raise HybridKVError(f"{variable}={value[:80]}: {error}") from None
        if changed != cache:
            print(f"hybridkv: {variable}={value} is in force", file=sys.stderr)
        cache = changed
    return cache


def _kv_dtype(value: str) -> dict[str, Any]:
    return {"kv_dtype": value}


def _index_dtype(value: str) -> dict[str, Any]:
    return {"index_dtype": value}


def _budget(value: str) -> dict[str, Any]:
    if value == "none":
        return {"budget": None, "bounded": False, "decode_every": 0}
    if not value.isascii() or not value.isdigit() or len(value) > 18:
        raise HybridKVError(f"budget must be a positive number of tokens or none, not {shown(value)}")
    return {"budget": int(value)}
