"""Shard: one rank of n, and what its model looks like: `local` gives a config with its heads and its width.

A cache schema follows from that config as from any other, so a rank's cache needs nothing new. What keeps its whole
size: hidden, vocab (embedding and head are cut where they are loaded), experts and routers, DeepSeek-V4's latents.
Needs no torch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from hybridkv.config import is_whole, shown
from hybridkv.errors import HybridKVError
from hybridkv.models.config import ModelConfig
from hybridkv.models.registry import family_of

EXPERTS = ("auto", "width", "whole")
LEAST_WIDTH = 128  # columns of an expert that a rank keeps at least; with fewer, whole experts are dealt out
MOST = 64  # ranks
EVEN = 16  # a feed-forward width is cut at multiples of it, where there are enough

Span = tuple[int, int]  # first, and one past the last


@dataclass(frozen=True)
class Shard:
    """One rank of `size`."""

    rank: int
    size: int
    experts: str = "auto"  # of EXPERTS: cut by their width, or dealt out whole
    block: int = 1  # columns at whose multiples a packed feed-forward matrix can be cut

    def by_width(self, config: ModelConfig) -> bool:
        """Whether a rank has a part of every expert, or some experts whole."""
        if config.moe is None or self.experts == "width":
            return config.v4 is None or self.experts != "whole"
        return self.experts != "whole" and config.moe.intermediate // self.size >= LEAST_WIDTH


def in_exact_mode(shard: Shard) -> Shard:
    """The same rank, with a part of every expert whatever was asked for."""
    return replace(shard, experts="width")


def spans(total: int, size: int, block: int = 1) -> list[Span]:
    """`total` cut into `size` parts at multiples of `block`; the first ones are larger by a block where it must be."""
    blocks = -(-total // block)
    ends = [min(-(-i * blocks // size) * block, total) for i in range(size + 1)]
    return [(ends[i], ends[i + 1]) for i in range(size)]


def width_spans(total: int, shard: Shard) -> list[Span]:
    """Of a feed-forward width: at the borders of packed blocks if every rank gets one, else at multiples of 16."""
    for block in (max(shard.block, EVEN), EVEN):
        if total // block >= shard.size:
            return spans(total, shard.size, block)
    return spans(total, shard.size)


def vocabulary_span(vocab: int, shard: Shard) -> Span:
    """Rows of embedding and head: equal parts, the last one short."""
    each = -(-vocab // shard.size)
    return min(shard.rank * each, vocab), min((shard.rank + 1) * each, vocab)


def expert_span(config: ModelConfig, shard: Shard) -> Span:
    """The experts that a rank has whole."""
    experts = config.v4 or config.moe
    assert experts is not None
    return spans(experts.experts, shard.size)[shard.rank]


def head_sizes(config: ModelConfig) -> dict[str, int]:
    """What a number of ranks must divide. KV heads are apart: several ranks may have the same one."""
    found = {"attention heads": config.heads}
    if config.gdn is not None and config.gdn_layers:
        found |= {"DeltaNet key heads": config.gdn.key_heads, "DeltaNet value heads": config.gdn.value_heads}
    if config.v4 is not None:
        found |= {"output groups (o_groups)": config.v4.o_groups}
    return found


def why_not(config: ModelConfig, size: int) -> str | None:
    """A clause: why a model cannot be cut into so many parts; None: it can."""
    for what, count in head_sizes(config).items():
        if count % size:
            return f"{size} ranks do not divide its {count} {what}"
    if config.v4 is None and config.attention_layers and config.kv_heads % size and size % config.kv_heads:
        return f"{size} ranks and {config.kv_heads} KV heads do not divide one another"
    widths = {"feed-forward width": config.intermediate, "vocabulary": config.vocab}
    if config.moe is not None:
        widths |= {"expert width": config.moe.intermediate, "shared expert's width": config.moe.shared_intermediate}
        widths |= {"number of experts": config.moe.experts}
    if config.v4 is not None:
        widths = {"expert width": config.v4.expert_width, "vocabulary": config.vocab}
    for what, total in widths.items():
        if total < size or (what == "vocabulary" and (size - 1) * -(-total // size) >= total):
            return f"its {what} of {total} is too small for {size} ranks"
    return None


def sizes_that_work(config: ModelConfig) -> list[int]:
    """Every number of ranks above one that a model can be cut into."""
    return [size for size in range(2, MOST + 1) if why_not(config, size) is None]


def check_size(config: ModelConfig, size: object, exact: bool = False, experts: str = "auto") -> int:
    """The number of ranks, or HybridKVError with the numbers that work."""
    if not is_whole(size) or not isinstance(size, int) or not 1 <= size <= MOST:
        raise HybridKVError(f"tp is a number of GPUs from 1 to {MOST}, not {shown(size)}")
    if experts not in EXPERTS:
        raise HybridKVError(f"experts are cut by {' or '.join(EXPERTS)}, not {shown(experts)}")
    if size == 1:
        return 1
    if problem := why_not(config, size):
        works = ", ".join(map(str, sizes_that_work(config)))
        other = f"use {works} or 1" if works else "use 1"
        raise HybridKVError(f"tp={size} does not fit this {config.architecture} model: {problem}; {other}")
    family_of(config).check("exact", exact)
    if config.v4 is not None and experts == "whole" and config.v4.experts < size:
        raise HybridKVError(
            f"{config.v4.experts} experts are too few to be dealt out to {size} ranks; leave experts at auto"
        )
    return size


def kv_copies(config: ModelConfig, size: int) -> int:
    """On how many ranks each KV head lies."""
    return size if config.v4 is not None else max(1, size // config.kv_heads)


def local(config: ModelConfig, shard: Shard) -> ModelConfig:
    """The config of one rank. The whole one must have passed `check_size`."""
    n, width = shard.size, width_spans(config.intermediate, shard)[shard.rank]
    found = replace(config, heads=config.heads // n, intermediate=width[1] - width[0])
    if config.v4 is not None:
        v4 = replace(config.v4, o_groups=config.v4.o_groups // n)
        if not shard.by_width(config):  # the shared expert's part has a width of its own (Loader.held)
            return replace(found, v4=v4, intermediate=config.intermediate)
        begin, end = width_spans(config.v4.expert_width, shard)[shard.rank]
        return replace(found, v4=replace(v4, expert_width=end - begin), intermediate=end - begin)
    found = replace(found, kv_heads=max(1, config.kv_heads // n))
    if config.gdn is not None:
        gdn = replace(config.gdn, key_heads=config.gdn.key_heads // n, value_heads=config.gdn.value_heads // n)
        found = replace(found, gdn=gdn)
    if config.moe is not None:
        moe = config.moe
        begin, end = width_spans(moe.shared_intermediate, shard)[shard.rank]
        moe = replace(moe, shared_intermediate=end - begin)
        if shard.by_width(config):
            begin, end = width_spans(moe.intermediate, shard)[shard.rank]
            moe = replace(moe, intermediate=end - begin)
        found = replace(found, moe=moe)
    return found
