"""How a model wants its tokens drawn: generation_config.json of a folder, or `general.sampling.*` of a GGUF file.

The meaning is transformers': without `do_sample` true the model is greedy, and then only the repetition penalty counts.
Two kinds of file are read more kindly, because their authors mean to sample: one that names a temperature and says
nothing of do_sample, and a GGUF file, which has no such key. What a file leaves out is off; transformers' own top_k of
50 is the library's habit, not the model's wish.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from hybridkv.checkpoint.checkpoint import Checkpoint
from hybridkv.checkpoint.gguf_file import GgufFile
from hybridkv.config import shown
from hybridkv.errors import ModelFileError
from hybridkv.files import read_json_if_any

FILE = "generation_config.json"
GGUF_KEYS = {  # as llama.cpp's converter writes them
    "temperature": "general.sampling.temp",
    "top_p": "general.sampling.top_p",
    "top_k": "general.sampling.top_k",
    "min_p": "general.sampling.min_p",
    "repetition_penalty": "general.sampling.penalty_repeat",
}
# least, most, and what changes nothing; top_k -1 is also written for "all tokens"
RANGES: dict[str, tuple[float, float, float]] = {
    "temperature": (0.0, 1e4, math.nan),
    "top_p": (0.0, 1.0, 1.0),
    "top_k": (-1, 2**31 - 1, 0),
    "min_p": (0.0, 1.0, 0.0),
    "repetition_penalty": (1e-3, 1e3, 1.0),
}


class SamplingDefaults(dict[str, float]):
    """Names of SamplingParams -> values. Empty: greedy. `source`: the file that names them; None: none does."""

    def __init__(self, values: Mapping[str, float], source: str | None) -> None:
        super().__init__(values)
        self.source = source


def sampling_defaults(model: Checkpoint | str | Path) -> SamplingDefaults:
    """The settings of a model: an open checkpoint, a folder, or a .gguf file."""
    if isinstance(model, Checkpoint):
        if model.kind == "gguf":
            return _from_gguf(model.metadata, model.path)
        return _from_json(model.generation, model.path / FILE)
    path = Path(model)
    if path.suffix.lower() == ".gguf":
        with GgufFile(path) as file:
            return _from_gguf(file.metadata, path)
    return _from_json(read_json_if_any(path / FILE), path / FILE)


def describe(defaults: Mapping[str, float]) -> str:
    """One line for people: "temperature 0.6, top_p 0.95 (from generation_config.json)"."""
    source = getattr(defaults, "source", None)
    values = [f"{name} {value:g}" for name, value in defaults.items()]
    if not defaults.get("temperature"):
        values = ["greedy", *(v for v in values if v.startswith("repetition_penalty"))]
    return f"{', '.join(values)} ({f'from {source}' if source else 'the model names no sampling settings'})"


def _from_json(found: Mapping[str, Any], path: Path) -> SamplingDefaults:
    values = {name: _checked(name, found[name], path, name) for name in RANGES if found.get(name) is not None}
    samples = found.get("do_sample")
    if not isinstance(samples, bool | None):
        raise ModelFileError(f"{str(path)!r}: do_sample must be true or false, not {shown(samples)}")
    named = bool(values) or samples is not None
    return _kept(values, "temperature" in values if samples is None else samples, FILE if named else None)


def _from_gguf(metadata: Mapping[str, Any], path: Path) -> SamplingDefaults:
    values = {}
    for name, key in GGUF_KEYS.items():
        value = metadata.get(key)
        if isinstance(value, float) and math.isfinite(value):
            value = float(str(np.float32(value)))  # stored as float32: 0.95 again, not 0.949999988079071
        if value is not None:
            values[name] = _checked(name, value, path, key)
    return _kept(values, bool(values.keys() - {"repetition_penalty"}), path.name if values else None)


def _checked(name: str, value: Any, path: Path, key: str) -> float:
    low, high, _ = RANGES[name]
    whole = name == "top_k"
    if whole and isinstance(value, float) and value.is_integer():
        value = int(value)  # 20.0
    good = isinstance(value, int if whole else int | float) and not isinstance(value, bool)
    if not good or not low <= value <= high or (name == "top_p" and value == 0):  # NaN fails this too
        least = "above 0" if name == "top_p" else f"from {low:g}"
        kind = "a whole number" if whole else "a number"
        raise ModelFileError(f"{str(path)!r}: {key} must be {kind} {least} to {high:g}, not {shown(value)}")
    return max(value, 0) if whole else float(value)


def _kept(values: dict[str, float], samples: bool, source: str | None) -> SamplingDefaults:
    """What has an effect, in the order in which people name them."""
    if samples:
        values = {"temperature": 1.0} | values
    if not samples or values["temperature"] == 0:
        values = {name: v for name, v in values.items() if name == "repetition_penalty"}
    return SamplingDefaults({n: values[n] for n in RANGES if n in values and values[n] != RANGES[n][2]}, source)
