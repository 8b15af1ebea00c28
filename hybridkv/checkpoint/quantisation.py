"""Which quantised folders are read: what a config's quantization_config says, and under which names its writer stores
codes and scales. No torch.

    quant_method         codes             scales                          what is read
    fp8                  x.weight          x.scale or x.weight_scale_inv   E4M3 in blocks, MXFP4 beside it (DeepSeek)
    compressed-tensors   x.weight_packed   x.weight_scale                  MXFP4 (format mxfp4-pack-quantized)
    quark                x.weight          x.weight_scale                  MXFP4 (AMD Quark: fp4 per group of 32, e8m0)

Both writers of MXFP4 store it as DeepSeek-V4 stores its experts (block_form.py), in bytes: two E2M1 values each, the
even column in the low half, and one exponent for 32 columns of a row. The tensors say which matrices are codes, so
lists of layers that are left as they are (`ignore`, `exclude`) are not read. Activations are never rounded: where a
config asks for that in every step (W4A4), it is not done; where it has scales for that, it is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from hybridkv.config import shown
from hybridkv.errors import ModelFileError, UnsupportedModel
from hybridkv.kernels.linear.block_form import FP8_BLOCK

PACKED = "weight_packed"
Values = Mapping[str, tuple[object, ...]]  # key -> what it may be, the usual value first


@dataclass(frozen=True)
class Stored:
    """How a writer stores a matrix of codes."""

    codes: str  # the last part of their name
    scales: tuple[str, ...]  # of theirs; any of these
    block: tuple[int, int] | None = None  # rows and columns of an FP8 block; None: all codes are MXFP4


FP8 = Stored("weight", ("scale", "weight_scale_inv"), FP8_BLOCK)
FORMAT = "mxfp4-pack-quantized"  # of compressed-tensors
ROUNDED_LATER: Values = {"dynamic": (True,)}  # activations, in each step
FP4_WEIGHTS: Values = {
    "num_bits": (4,), "type": ("float",), "strategy": ("group", None), "group_size": (32,), "symmetric": (True, None),
    "dynamic": (False, None), "scale_dtype": ("torch.uint8", None),
}  # fmt: skip
QUARK_WEIGHTS: Values = {
    "dtype": ("fp4",), "qscheme": ("per_group",), "group_size": (32,), "scale_format": ("e8m0",),
    "is_dynamic": (False, None), "ch_axis": (-1, 1, None), "symmetric": (None, True),
}  # fmt: skip
QUARK_LATER: Values = {"is_dynamic": (True,)}
FOLDED = ("awq", "gptq", "gptaq", "smooth", "autosmoothquant", "qronos")  # what these of Quark do lies in the weights


def stored_as(quantised: object, methods: Sequence[str]) -> Stored:
    """How the files of a quantization_config are stored, or UnsupportedModel in one line. `methods`: which are read."""
    config = quantised if isinstance(quantised, Mapping) else {}
    method = config.get("quant_method") if config else quantised
    if not config or method not in methods:
        *first, last = methods
        read = f"{', '.join(first)} and {last} are" if first else f"{last} is"
        raise UnsupportedModel(f"config: quantization_config has quant_method {shown(method)}; only {read} read")
    return _READERS[str(method)](config)


def weight_name(name: str) -> str:
    """A stored name as it would be without codes."""
    return name.removesuffix(PACKED) + "weight" if name.endswith(f".{PACKED}") else name


def _fp8(config: Mapping[str, object]) -> Stored:
    if config.get("fmt", "e4m3") != "e4m3":
        raise UnsupportedModel(f"config: quantization_config has fmt {shown(config['fmt'])}; only e4m3 is read")
    size = config.get("weight_block_size", list(FP8_BLOCK))
    good = isinstance(size, list | tuple) and len(size) == 2 and all(type(n) is int and 1 <= n <= 1 << 20 for n in size)
    if not good:
        raise ModelFileError(f"config: weight_block_size must be two whole numbers, not {shown(size)}")
    assert isinstance(size, list | tuple)
    return Stored(FP8.codes, FP8.scales, (size[0], size[1]))


def _compressed_tensors(config: Mapping[str, object]) -> Stored:
    where = "quantization_config"
    _absent(config, where, ("kv_cache_scheme", "sparsity_config", "transform_config"))
    groups = config.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise ModelFileError(f"config: {where} must name its config_groups, not {shown(groups)}")
    for name, group in groups.items():
        where = f"config_groups {shown(name)}"
        group = _object(group, where)
        _is(group | {"format": group.get("format") or config.get("format")}, where, {"format": (FORMAT,)})
        _is(_object(group.get("weights"), f"{where}: weights"), f"{where}: weights", FP4_WEIGHTS)
        for part in ("input_activations", "output_activations"):
            if group.get(part) is not None:
                _is(_object(group[part], f"{where}: {part}"), f"{where}: {part}", ROUNDED_LATER)
    return Stored(PACKED, ("weight_scale",))


def _quark(config: Mapping[str, object]) -> Stored:
    """The packing that a config names (`pack_method`) is for int4: Quark packs fp4 in one way."""
    where = "quantization_config"
    _absent(config, where, ("kv_cache_quant_config", "softmax_quant_spec", "pre_quant_opt_config"))
    if config.get("export") is not None:
        export = _object(config["export"], "export")
        _absent(export, "export", ("kv_cache_group",))
        _is(export, "export", {"weight_format": ("real_quantized", None)})
    algorithms = config.get("algo_config") or []  # of others, such as a rotation, something may be left to every step
    for algorithm in algorithms if isinstance(algorithms, list) else [algorithms]:
        name = algorithm.get("name") if isinstance(algorithm, Mapping) else algorithm
        if name not in FOLDED:
            raise UnsupportedModel(f"config: algo_config names {shown(name)}; only {', '.join(FOLDED)} are read")
    specs = {"global_quant_config": config.get("global_quant_config")}
    for several in ("layer_quant_config", "layer_type_quant_config"):
        if config.get(several):
            found = _object(config[several], several)
            specs |= {f"{several} {shown(name)}": spec for name, spec in found.items()}
    used = {where: _object(spec, where) for where, spec in specs.items() if spec is not None}
    if all(spec.get("weight") is None for spec in used.values()):
        raise ModelFileError("config: quantization_config says of no layer how its weight is quantised")
    for where, spec in used.items():
        _absent(spec, where, ("bias",))
        if spec.get("weight") is not None:
            _is(_object(spec["weight"], f"{where}: weight"), f"{where}: weight", QUARK_WEIGHTS)
        for part in ("input_tensors", "output_tensors"):
            if spec.get(part) is not None:
                _is(_object(spec[part], f"{where}: {part}"), f"{where}: {part}", QUARK_LATER)
    return Stored("weight", ("weight_scale",))


_READERS: dict[str, Callable[[Mapping[str, object]], Stored]] = {
    "fp8": _fp8,
    "compressed-tensors": _compressed_tensors,
    "quark": _quark,
}


def _object(found: object, where: str) -> dict[str, object]:
    if not isinstance(found, Mapping):
        raise UnsupportedModel(f"config: {where} is {shown(found)}; one object with its settings is read")
    return dict(found)


def _is(found: Mapping[str, object], where: str, wanted: Values) -> None:
    """All keys have values that are read."""
    for key, values in wanted.items():
        if found.get(key) not in values:
            read = ", ".join(f"{name} {usual[0]}" for name, usual in wanted.items() if usual[0] is not None)
            raise UnsupportedModel(f"config: {where} has {key} {shown(found.get(key))}; only {read} is read")


def _absent(found: Mapping[str, object], where: str, keys: Sequence[str]) -> None:
    """None of these is set."""
    for key in keys:
        if found.get(key):
            raise UnsupportedModel(f"config: {where} has {key} {shown(found[key])}; only files without it are read")
