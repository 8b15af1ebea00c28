"""DeepSeek-V4's own part of a config: the layer schedule, its low-rank and indexer sizes, experts, residual streams.

Both spellings of a Hugging Face config are read: `layer_types`, `compress_rates`, `mlp_layer_types`,
`partial_rotary_factor`, `rope_parameters {main, compress}`, and `compress_ratios`, `compress_rate_csa/hca`,
`num_hash_layers`, `qk_rope_head_dim`, `rope_scaling` with two thetas, which the released models bring. Where both are
there they must agree. A schedule that is not there is never guessed: the published models differ in theirs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hybridkv.checkpoint.config_reader import Raw, Reader
from hybridkv.config import shown
from hybridkv.errors import ModelFileError, UnsupportedModel
from hybridkv.models.rotation import Rotation, Yarn

CSA, HCA = "compressed_sparse_attention", "heavily_compressed_attention"
LAYER_TYPES = {"sliding_attention": "window", CSA: "csa", HCA: "hca"}
MLP_TYPES = ("hash_moe", "moe")
MAX_RATIO = 1 << 12  # tokens that one entry stands for


@dataclass(frozen=True)
class DeepseekV4Config:
    """What only DeepSeek-V4's config says."""

    kinds: tuple[str, ...]  # one for each layer: window | csa | hca
    csa_ratio: int  # tokens an entry stands for
    hca_ratio: int
    window: int  # last tokens that every layer sees as they are
    rope: int  # rotated channels, the last of each head
    q_rank: int
    o_groups: int
    o_rank: int
    index_heads: int
    index_dim: int
    index_topk: int
    experts: int
    per_token: int
    expert_width: int
    scaling: float  # of the routed experts' weights
    limit: float  # what an expert's gate and up are clipped at
    renormalise: bool
    hash_layers: frozenset[int]  # layers whose experts follow from the token's id
    streams: int  # residual streams
    sinkhorn_iters: int
    hc_eps: float
    compress_rotation: Rotation  # of CSA and HCA layers; ModelConfig.rotation is the window layers'

    @property
    def compress_inv_freq(self) -> tuple[float, ...]:
        """One frequency for each rotated pair."""
        return self.compress_rotation.frequencies


def parse_deepseek_v4(read: Reader, layers: int, heads: int, head_dim: int) -> tuple[Rotation, DeepseekV4Config]:
    """(rotary positions of window layers, all the rest)."""
    _refuse_variants(read.raw)
    csa_ratio, hca_ratio = _ratios(read)
    rope = _rotary_channels(read, head_dim)
    window_rotation, compress_rotation = _rotations(read, rope)
    config = DeepseekV4Config(
        kinds=_kinds(read.raw, layers, csa_ratio, hca_ratio),
        csa_ratio=csa_ratio,
        hca_ratio=hca_ratio,
        window=read.size("sliding_window", 128, limit=1 << 16),
        rope=rope,
        q_rank=read.size("q_lora_rank"),
        o_groups=read.size("o_groups"),
        o_rank=read.size("o_lora_rank"),
        index_heads=read.size("index_n_heads", limit=1 << 12),
        index_dim=read.size("index_head_dim", limit=1 << 12),
        index_topk=read.size("index_topk"),
        experts=read.size("n_routed_experts", limit=1 << 16),
        per_token=read.size("num_experts_per_tok", limit=1 << 10),
        expert_width=read.size("moe_intermediate_size"),
        scaling=read.number("routed_scaling_factor"),
        limit=read.number("swiglu_limit", 10.0),
        renormalise=read.flag("norm_topk_prob", True),
        hash_layers=_hash_layers(read.raw, layers),
        streams=read.size("hc_mult", 4, limit=64),
        sinkhorn_iters=read.size("hc_sinkhorn_iters", 20, limit=1000),
        hc_eps=read.number("hc_eps", 1e-6, high=1.0),
        compress_rotation=compress_rotation,
    )
    if config.per_token > config.experts:
        raise ModelFileError(
            f"config: num_experts_per_tok {config.per_token} exceeds n_routed_experts {config.experts}"
        )
    if rope > config.index_dim:
        raise ModelFileError(f"config: qk_rope_head_dim {rope} exceeds index_head_dim {config.index_dim}")
    if heads % config.o_groups:
        raise ModelFileError(f"config: {heads} attention heads make no {config.o_groups} even groups (o_groups)")
    return window_rotation, config


def _refuse_variants(raw: Raw) -> None:
    """Refuse what no released DeepSeek-V4 has and the forward pass does not compute."""
    for key, only in (
        ("num_key_value_heads", 1),
        ("n_shared_experts", 1),
        ("scoring_func", "sqrtsoftplus"),
        ("hidden_act", "silu"),
        ("attention_bias", False),
        ("mlp_bias", False),
    ):
        if raw.get(key) is not None and raw[key] != only:
            raise UnsupportedModel(f"config: {key} {shown(raw[key])} is not supported for deepseek_v4, only {only}")


def _ratios(read: Reader) -> tuple[int, int]:
    rates = read.raw.get("compress_rates")
    if rates is not None and not isinstance(rates, Mapping):
        raise ModelFileError(f"config: compress_rates must be an object, not {shown(rates)}")
    found = []
    for key, kind, usual in (("compress_rate_csa", CSA, 4), ("compress_rate_hca", HCA, 128)):
        given = None if rates is None else rates.get(kind)
        named = f"compress_rates.{kind}"
        ratio = Reader({named: given}).size(named, read.size(key, usual, MAX_RATIO), MAX_RATIO)
        if given is not None and read.raw.get(key) not in (None, given):
            raise ModelFileError(f"config: {key} {shown(read.raw[key])} and {named} {given} differ")
        found.append(ratio)
    if found[0] == found[1]:
        raise ModelFileError(f"config: the two compress_rates must differ, both are {found[0]}")
    return found[0], found[1]


def _kinds(raw: Raw, layers: int, csa_ratio: int, hca_ratio: int) -> tuple[str, ...]:
    """The kind of each layer. A list may be longer: draft layers, which are not run."""
    by_ratio = {0: "window", csa_ratio: "csa", hca_ratio: "hca"}
    typed = _listed(raw, "layer_types", layers, LAYER_TYPES)
    rated = _listed(raw, "compress_ratios", layers, by_ratio)
    if typed is None and rated is None:
        raise ModelFileError(
            "config: neither layer_types nor compress_ratios says which layers are window, CSA or HCA; published "
            "models differ, so none is assumed: take the config.json that came with the weights"
        )
    if typed is not None and rated is not None and typed != rated:
        at = next(i for i in range(layers) if typed[i] != rated[i])
        raise ModelFileError(f"config: layer_types has layer {at} as {typed[at]}, compress_ratios as {rated[at]}")
    return typed or rated or ()


def _listed(raw: Raw, key: str, layers: int, names: Mapping) -> tuple[str, ...] | None:
    """The first `layers` values of a list, each as `names` calls it."""
    values = raw.get(key)
    if values is None:
        return None
    if not isinstance(values, list | tuple) or len(values) < layers:
        count = len(values) if isinstance(values, list | tuple) else shown(values)
        raise ModelFileError(f"config: {key} must list {layers} layers, not {count}")
    for at, value in enumerate(values[:layers]):
        if isinstance(value, bool) or not isinstance(value, int | str) or value not in names:
            raise ModelFileError(
                f"config: {key} has {shown(value)} for layer {at}; it must be {', '.join(map(str, names))}"
            )
    return tuple(names[value] for value in values[:layers])


def _hash_layers(raw: Raw, layers: int) -> frozenset[int]:
    typed = _listed(raw, "mlp_layer_types", layers, {kind: kind for kind in MLP_TYPES})
    count = raw.get("num_hash_layers")
    if count is None and typed is None:
        raise ModelFileError("config: num_hash_layers (or mlp_layer_types) must say which layers route by token id")
    if count is not None and (not isinstance(count, int) or isinstance(count, bool) or not 0 <= count <= 1 << 24):
        raise ModelFileError(f"config: num_hash_layers must be a whole number from 0, not {shown(count)}")
    counted = None if count is None else frozenset(range(min(count, layers)))
    if typed is None:
        return counted or frozenset()
    found = frozenset(i for i, kind in enumerate(typed) if kind == "hash_moe")
    if counted is not None and counted != found:
        raise ModelFileError(f"config: num_hash_layers {count} and mlp_layer_types differ")
    return found


# --- rotation -------------------------------------------------------------------------------------------------------


def _ropes(raw: Raw) -> tuple[Raw, Raw]:
    """(main, compress): the parameters of both tables, in either spelling."""
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if not isinstance(rope, Mapping):
        raise ModelFileError(f"config: rope_parameters must be an object, not {shown(rope)}")
    main, compress = rope.get("main"), rope.get("compress")
    if (main is None) != (compress is None):
        raise ModelFileError("config: rope_parameters must have both main and compress, or neither")
    if main is None:
        scaling = {k: v for k, v in rope.items() if k not in ("rope_theta", "partial_rotary_factor")}
        return {"rope_theta": raw.get("rope_theta")}, scaling | {"rope_theta": raw.get("compress_rope_theta")}
    if not isinstance(main, Mapping) or not isinstance(compress, Mapping):
        raise ModelFileError("config: rope_parameters.main and rope_parameters.compress must be objects")
    return main, compress


def _rotary_channels(read: Reader, head_dim: int) -> int:
    parts = [read.raw.get("partial_rotary_factor"), *(rope.get("partial_rotary_factor") for rope in _ropes(read.raw))]
    found = {
        round(head_dim * Reader({"partial_rotary_factor": part}).number("partial_rotary_factor", high=1.0 + 1e-9))
        for part in parts
        if part is not None
    }
    if read.raw.get("qk_rope_head_dim") is not None or not found:
        found.add(read.size("qk_rope_head_dim", limit=head_dim))
    if len(found) > 1:
        raise ModelFileError(
            f"config: qk_rope_head_dim and partial_rotary_factor must say the same, not {sorted(found)} channels"
        )
    rope = found.pop()
    if rope % 2 or rope < 2:
        raise ModelFileError(f"config: qk_rope_head_dim {rope} must be an even number of channels")
    return rope


def _rotations(read: Reader, rope: int) -> tuple[Rotation, Rotation]:
    """(window layers, compressed layers). Window layers are never scaled; no table has a magnitude factor."""
    main, compress = _ropes(read.raw)
    plain, kind = _kind(main), _kind(compress)
    if plain != "default":
        raise UnsupportedModel(f"config: rope type {plain!r} of window layers is not supported, only default")
    if kind not in ("default", "yarn"):
        raise UnsupportedModel(f"config: rope type {kind!r} is not supported; supported are default, yarn")
    if compress.get("attention_factor") not in (None, 1, 1.0):
        raise UnsupportedModel(
            f"config: attention_factor {shown(compress['attention_factor'])} is not supported for deepseek_v4, only 1"
        )
    tables = []
    for spelled, table, usual in (("rope_theta", main, 1e4), ("compress_rope_theta", compress, 1.6e5)):
        theta = Reader({spelled: table.get("rope_theta")}).number(spelled, usual, low=1.0)
        scaling = _yarn(Reader(compress), read) if table is compress and kind == "yarn" else None
        tables.append(Rotation(theta, rope, scaling).check(spelled))
    return tables[0], tables[1]


def _kind(rope: Raw) -> str:
    return str(rope.get("rope_type", rope.get("type", "default")))[:40]


def _yarn(scaling: Reader, config: Reader) -> Yarn:
    original = scaling.size("original_max_position_embeddings", limit=1 << 31)
    longest = config.size("max_position_embeddings", limit=1 << 31)
    factor = scaling.number("factor", longest / original, high=1e6)
    fast = scaling.number("beta_fast", 32.0, high=1e6)
    slow = scaling.number("beta_slow", 1.0, high=1e6)
    if fast <= slow:
        raise ModelFileError(f"config: beta_fast {fast:g} must exceed beta_slow {slow:g}")
    return Yarn(factor, fast, slow, original)
