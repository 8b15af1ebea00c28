"""Where a model runs and in which dtypes: what "auto" means on this machine, and what is refused."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch

from hybridkv.config import MODEL_DTYPES, WEIGHT_DTYPES, CacheConfig, shown
from hybridkv.errors import HybridKVError
from hybridkv.kernels.formats.kv_format import KV_FORMATS
from hybridkv.kernels.linear.half import keeps_half
from hybridkv.kernels.linear.linear import fast_bf16


def resolve_device(device: str) -> torch.device:
    """The device that was asked for, a GPU with its number. auto: the current GPU, if there is one."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError):
        raise HybridKVError(f"device {device!r} is unknown; use auto, cpu, cuda or cuda:1") from None
    if found.type not in ("cpu", "cuda"):
        raise HybridKVError(f"device {device!r} is not supported; use auto, cpu or cuda")
    if found.type == "cpu":
        return found
    if not torch.cuda.is_available():
        raise HybridKVError(f"device {device!r} was asked for, but torch sees no GPU; use device='cpu'")
    index = torch.cuda.current_device() if found.index is None else found.index
    if index >= torch.cuda.device_count():
        raise HybridKVError(f"device {device!r} was asked for, but torch sees {torch.cuda.device_count()} GPUs")
    return torch.device("cuda", index)


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Triton launches on the current device: make it this one. Nothing to do where there is no GPU."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def check_fp8_cache(cache: CacheConfig, device: torch.device) -> None:
    """Whether the device's kernels know the format of keys and values, or HybridKVError."""
    if cache.kv_dtype != "auto":
        KV_FORMATS[cache.kv_dtype].check_device(device)


def resolve_dtype(dtype: str, device: torch.device, config: Mapping[str, object]) -> torch.dtype:
    """auto: bfloat16 on a GPU, and on a CPU that has it in hardware if the weights are stored so; else float32."""
    if dtype == "auto":
        text = config.get("text_config")
        found = [c.get(key) for c in (config, text) if isinstance(c, Mapping) for key in ("dtype", "torch_dtype")]
        stored = str(next(filter(None, found), "")).removeprefix("torch.")
        return torch.bfloat16 if device.type == "cuda" or (stored == "bfloat16" and fast_bf16()) else torch.float32
    if dtype not in MODEL_DTYPES:
        raise HybridKVError(f"dtype {dtype!r} is not supported; choose auto, {', '.join(MODEL_DTYPES)}")
    return getattr(torch, dtype)


def resolve_fp8(weight_dtype: str) -> bool:
    """Whether matrices are to be FP8."""
    if weight_dtype not in WEIGHT_DTYPES:
        raise HybridKVError(f"weight_dtype {shown(weight_dtype)} is not supported; choose {' or '.join(WEIGHT_DTYPES)}")
    return weight_dtype == "fp8"


def resolve_half(
    weight_dtype: str, dtype: str, device: torch.device, found: torch.dtype, exact: bool, narrow: bool
) -> bool:
    """Whether matrices are to be f16 on a CPU, multiplied with f32. `found`: what `dtype` came to. auto: where nobody
    named a dtype, nor exact mode, and the files do not store most weights in f32 (`narrow`).
    """
    if weight_dtype == "auto":
        return dtype == "auto" and narrow and not exact and keeps_half(device, found)
    if weight_dtype not in ("f16", "int4"):
        return False
    if exact or device.type != "cpu" or found != torch.float32:
        raise HybridKVError(
            f"weight_dtype={weight_dtype!r} is for device='cpu', dtype='float32' and exact=False; here they are "
            f"{device.type!r}, {str(found).removeprefix('torch.')!r} and {exact}: use weight_dtype='auto'"
        )
    if not keeps_half(device, found):
        raise HybridKVError(f"torch {torch.__version__} has no f16 products on this CPU; use weight_dtype='plain'")
    return True


def free_memory(device: torch.device) -> int:
    """Bytes that can still be taken."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    try:  # a container may have less than its host
        limit, used = (Path(f"/sys/fs/cgroup/memory.{name}").read_text().strip() for name in ("max", "current"))
        return min(free, max(int(limit) - int(used), 0))
    except (OSError, ValueError):
        return free
