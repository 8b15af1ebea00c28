"""model_fingerprint: a name for the model that computed a cache, so that a snapshot goes back to that model alone.

It is a SHA-256 over the numbers of the config that the forward pass uses (sizes, eps, rope frequencies; the attention
scale follows from them) and, for every weight, its place in the model, shape, dtype and up to 2048 of its values at
fixed places. Another checkpoint of the same shape has another fingerprint, and so has another rope.

It names the weights as they are in memory. The same checkpoint has the same fingerprint on every device only where it
is loaded in the same dtype and form: weights in FP8, in f16, or packed as in a GGUF file, count as another model (4-bit
codes beside f16 do not), and values that are derived on the device (the decay of DeltaNet) may differ in their last
bits between a CPU and a GPU.

Ranks of a model each have a part of it, so their fingerprint is that of their number. `files_name` names the model by
what it was opened from instead, the same over any number of ranks.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterator
from functools import cache

import torch
from torch import Tensor

from hybridkv.checkpoint.identity import WeightsIdentity
from hybridkv.errors import HybridKVError
from hybridkv.kernels.linear.half import HalfLinear
from hybridkv.kernels.linear.linear import Linear
from hybridkv.models.config import ModelConfig
from hybridkv.models.decoder import Model

SAMPLES = 2048  # values of each weight
UNUSED = ("max_positions", "eos_ids")  # parts of a config that no cached value depends on
SAME_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def fingerprint_of(model: Model) -> Callable[[], str]:
    """`model_fingerprint` of the model, computed at the first call."""
    return cache(lambda: model_fingerprint(model))


@torch.inference_mode()
def model_fingerprint(model: Model) -> str:
    """64 characters. A few small kernels for each weight, and one copy to the host."""
    weights, samples = [], []
    for name, tensor in _weights(model, "model"):
        weights.append([name, list(tensor.shape), str(tensor.dtype)])
        samples.append(_sample(tensor))
    digest = hashlib.sha256(json.dumps([_numbers(model.config), weights]).encode())
    digest.update(torch.cat(samples).cpu().numpy().tobytes())
    return digest.hexdigest()


def files_name(
    files: WeightsIdentity, config: ModelConfig, dtype: torch.dtype, form: str, exact: bool
) -> Callable[[], str]:
    """A name for a model by its files, its whole `config`, and how its weights are held and computed with: found at the
    first call. "": the files have been changed since it was opened, or are gone.
    """

    @cache
    def name() -> str:
        try:
            said = [files.digest(), config_digest(config), str(dtype), form, exact]
        except HybridKVError:
            return ""
        return hashlib.sha256(json.dumps(said).encode()).hexdigest()

    return name


def config_digest(config: ModelConfig) -> str:
    """64 characters: the numbers of a config that cached values depend on."""
    return hashlib.sha256(json.dumps(_numbers(config)).encode()).hexdigest()


def _numbers(config: ModelConfig) -> dict[str, object]:
    found = {key: value for key, value in dataclasses.asdict(config).items() if key not in UNUSED}
    return json.loads(json.dumps(found, sort_keys=True, default=sorted))  # sets are sorted


def _weights(part: object, name: str) -> Iterator[tuple[str, Tensor]]:
    """All tensors of a model with their places in it."""
    if isinstance(part, Tensor):
        yield name, part
    elif isinstance(part, tuple | list):
        for i, item in enumerate(part):
            yield from _weights(item, f"{name}.{i}")
    elif dataclasses.is_dataclass(part) and not isinstance(part, type):
        for field in dataclasses.fields(part):
            yield from _weights(getattr(part, field.name), f"{name}.{field.name}")
    elif isinstance(part, HalfLinear):
        yield f"{name}.columns", part.columns()
        yield from _weights(part.bias, f"{name}.bias")
    elif isinstance(part, Linear):
        for key, item in sorted(vars(part).items()):
            yield from _weights(item, f"{name}.{key}")


def _sample(tensor: Tensor) -> Tensor:
    """Bytes of values at fixed places, from the first to the last."""
    if tensor.is_mkldnn:
        tensor = tensor.to_dense()
    count = min(tensor.numel(), SAMPLES)
    places = torch.arange(count, device=tensor.device) * (tensor.numel() - 1) // max(count - 1, 1)
    return tensor.view(SAME_SIZE[tensor.element_size()]).take(places).view(torch.uint8)
