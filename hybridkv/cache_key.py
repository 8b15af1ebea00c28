"""The key of saved caches: all that their bytes depend on beside their tokens, part by part.

What two keys that differ mean, and what can be taken over all the same, is cache/convert.py's.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

import torch

from hybridkv.cache.convert import Key
from hybridkv.kernels.formats.kv_format import pool_format
from hybridkv.models.fingerprint import config_digest
from hybridkv.opening import Opened


def cache_key(opened: Opened, adapter: str, salt: str) -> Key:
    """Of what this model reads for a request with such an adapter and salt: the same over any number of ranks."""
    exact, device, ranks = opened.settings.exact, opened.settings.device, opened.settings.ranks
    schema, config = opened.plan.schema, opened.config if ranks is None else ranks.whole
    assert config is not None
    layers = schema.compressed
    full = [pool_format(table.pool.tensors) for table in opened.manager.tables.values()]
    kv = layers[0].entries.name if layers else next((form.name for form in full if form is not None), "none")
    key = {
        "architecture": config.architecture,
        "config": config_digest(config),
        "weights": opened.identity.digest(),
        "dtype": str(opened.dtype).removeprefix("torch."),
        "weight_form": opened.weight_form,
        "kv_dtype": kv,
        "state_dtype": "+".join(sorted({t.dtype for s in schema.states if not s.lent for t in s.tensors})),
        "index_dtype": next((layer.index.name for layer in layers if layer.index is not None), ""),
        "mode": "exact" if exact else "fast",
        "adapter": adapter,
        "salt": salt,
    }
    if exact:  # bits depend on these
        gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
        versions = {"torch": torch.__version__, "triton": _triton_version()}
        key |= {"device": f"{device.type} {gpu}".strip(), **versions}
    return key


def _triton_version() -> str:
    try:
        return version("triton")
    except PackageNotFoundError:
        return "none"
