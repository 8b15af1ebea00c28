"""Cuts: which part of every tensor a rank holds, as one table for each family. Needs no torch.

    rows        equal parts of the first dimension: heads, groups of them, V heads, K heads with all that is theirs
    kv          rows of the rank's KV heads; where there are fewer than ranks, several ranks hold the same one
    q | k | v   each of the three sections in equal parts (a convolution's channels, one projection of all three)
    columns     inputs of a product, whose result is a part: it is summed over the ranks
    width       rows of a feed-forward width, or its columns: at borders of packed blocks, so parts may be uneven
    vocabulary  rows of embedding and head, the last part short
    whole       on every rank

In exact mode no sum is cut: `columns` become rows of the output, and inputs and outputs are gathered; every rank has a
part of every expert.

Heads are contiguous. Hugging Face groups V heads by their K head, so a rank's K heads and V heads belong together; a
GGUF file that tiles them is brought into that order first (checkpoint/gguf_map.py), and then cut.

A tensor that its family's table does not name is an error: what is new must say how it is cut.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate, pairwise

from hybridkv.models.config import ModelConfig
from hybridkv.models.inventory import Weight
from hybridkv.parallel.shard import Shard, Span, expert_span, in_exact_mode, spans, vocabulary_span, width_spans

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Cut:
    """What a rank takes along one dimension: spans, one after the other."""

    dim: int
    spans: tuple[Span, ...]
    partial: bool = False  # a product with it is a part of a sum over the ranks

    def shape(self, full: Shape) -> Shape:
        """Of the part."""
        return (*full[: self.dim], sum(end - begin for begin, end in self.spans), *full[self.dim + 1 :])

    @property
    def columns(self) -> Span | None:
        """The columns of a matrix that is cut along its inputs."""
        return self.spans[0] if self.dim == 1 and len(self.spans) == 1 else None


Rule = Callable[[ModelConfig, Shard, Shape], Cut | None]


def whole(config: ModelConfig, shard: Shard, shape: Shape) -> None:
    """On every rank."""
    return None


def rows(config: ModelConfig, shard: Shard, shape: Shape) -> Cut:
    """An equal part of the first dimension."""
    return Cut(0, (spans(shape[0], shard.size)[shard.rank],))


def kv(config: ModelConfig, shard: Shard, shape: Shape) -> Cut:
    """The rows of the rank's KV heads."""
    heads, each = config.kv_heads, shape[0] // config.kv_heads
    if heads >= shard.size:
        return rows(config, shard, shape)
    first = shard.rank * heads // shard.size
    return Cut(0, ((first * each, (first + 1) * each),))


def qkv(config: ModelConfig, shard: Shard, shape: Shape) -> Cut:
    """The rank's part of queries, of keys and of values."""
    d = config.gdn
    assert d is not None
    ends = accumulate((d.key_heads * d.key_dim, d.key_heads * d.key_dim, d.value_heads * d.value_dim), initial=0)
    return Cut(0, tuple(_within(section, shard) for section in pairwise(ends)))


def columns(config: ModelConfig, shard: Shard, shape: Shape) -> Cut:
    """An equal part of the inputs."""
    return Cut(1, (spans(shape[1], shard.size)[shard.rank],), partial=True)


def width_rows(config: ModelConfig, shard: Shard, shape: Shape) -> Cut:
    """The outputs of a feed-forward layer's first product."""
    return Cut(0, (width_spans(shape[0], shard)[shard.rank],))


def width_columns(config: ModelConfig, shard: Shard, shape: Shape) -> Cut:
    """The inputs of its second."""
    return Cut(1, (width_spans(shape[1], shard)[shard.rank],), partial=True)


def vocabulary(config: ModelConfig, shard: Shard, shape: Shape) -> Cut:
    """The rank's tokens."""
    return Cut(0, (vocabulary_span(shape[0], shard),))


def experts_up(config: ModelConfig, shard: Shard, shape: Shape) -> Cut:
    """[E, gate | up, hidden]: a part of both sections, or some experts whole."""
    if not shard.by_width(config):
        return Cut(0, (expert_span(config, shard),))
    half = shape[1] // 2
    begin, end = width_spans(half, shard)[shard.rank]
    return Cut(1, ((begin, end), (half + begin, half + end)))


def experts_down(config: ModelConfig, shard: Shard, shape: Shape) -> Cut:
    """[E, hidden, width]."""
    if not shard.by_width(config):
        return Cut(0, (expert_span(config, shard),))
    return Cut(2, (width_spans(shape[2], shard)[shard.rank],), partial=True)


def outputs(shard: Shard, shape: Shape) -> Cut:
    """Rows of a matrix, or of each one in a stack, whose inputs are gathered."""
    return Cut(len(shape) - 2, (spans(shape[-2], shard.size)[shard.rank],))


def _within(section: Span, shard: Shard) -> Span:
    begin, end = spans(section[1] - section[0], shard.size)[shard.rank]
    return section[0] + begin, section[0] + end


# --- the table: names inside a layer (`model.layers.0.` is left out), and how they are cut ----------------------------

NORMS = (r"(input|post_attention)_layernorm\.weight", whole)
ENDS = (
    (r"model\.embed_tokens\.weight", vocabulary),
    (r"lm_head\.weight", vocabulary),
    (r"model\.norm\.weight", whole),
)
ATTENTION = (
    (r"self_attn\.q_proj\.(weight|bias)", rows),  # with an output gate, a head's rows are (query, gate)
    (r"self_attn\.[kv]_proj\.(weight|bias)", kv),
    (r"self_attn\.o_proj\.weight", columns),
    (r"self_attn\.o_proj\.bias", whole),  # added once, after the sum
    (r"self_attn\.[qk]_norm\.weight", whole),
)
MLP = (
    (r"mlp\.(gate|up)_proj\.(weight|bias)", width_rows),
    (r"mlp\.down_proj\.weight", width_columns),
    (r"mlp\.down_proj\.bias", whole),
)
DELTANET = (
    (r"linear_attn\.(in_proj_qkv|conv1d)\.weight", qkv),
    (r"linear_attn\.in_proj_(qkvz|ba)\.weight", rows),  # by K head as stored, each with all that is its own
    (r"linear_attn\.in_proj_[zba]\.weight", rows),
    (r"linear_attn\.(A_log|dt_bias)", rows),
    (r"linear_attn\.norm\.weight", whole),
    (r"linear_attn\.out_proj\.weight", columns),
)
EXPERTS = (
    (r"mlp\.gate\.weight", whole),  # every rank routes alike
    (r"mlp\.shared_expert_gate\.weight", whole),
    (r"mlp\.experts\.gate_up_proj", experts_up),
    (r"mlp\.experts\.down_proj", experts_down),
    (r"mlp\.shared_expert\.(gate|up)_proj\.weight", width_rows),
    (r"mlp\.shared_expert\.down_proj\.weight", width_columns),
)
V4 = (
    (r"(attn|ffn)_hc\.(fn|base|scale)", whole),
    (r"self_attn\.(q_a_proj|kv_proj|q_a_norm|kv_norm)\.weight", whole),  # one latent serves all heads
    (r"self_attn\.compressor\..*", whole),  # index picks must be equal on all ranks
    (r"self_attn\.q_b_proj\.weight", rows),
    (r"self_attn\.sinks", rows),
    (r"self_attn\.o_a_proj\.weight", rows),  # by group, whose heads stay together
    (r"self_attn\.o_b_proj\.weight", columns),
    (r"mlp\.gate\.(weight|e_score_correction_bias|tid2eid)", whole),
    (r"mlp\.experts\.gate_up_proj", experts_up),
    (r"mlp\.experts\.down_proj", experts_down),
    (r"mlp\.shared_experts\.(gate|up)_proj\.weight", width_rows),
    (r"mlp\.shared_experts\.down_proj\.weight", width_columns),
    (r"model\.hc_head\.hc_(fn|base|scale)", whole),
)
QWEN3_5 = (*ENDS, NORMS, *ATTENTION, *DELTANET, *MLP, *EXPERTS)
TABLES: dict[str, tuple[tuple[str, Rule], ...]] = {
    "llama": (*ENDS, NORMS, *ATTENTION, *MLP),
    "qwen3": (*ENDS, NORMS, *ATTENTION, *MLP),
    "qwen3_5": QWEN3_5,
    "qwen3_5_moe": QWEN3_5,
    "qwen3_next": QWEN3_5,
    "deepseek_v4": (*ENDS, NORMS, *V4),
}
# products that are summed with the experts beside them, not by themselves
SUMMED_LATER = r"mlp\.shared_expert\.down_proj\.weight"


@cache
def rule_of(architecture: str, name: str) -> Rule:
    """How a tensor is cut; KeyError if the family's table does not say."""
    inside = _inside(name)
    for pattern, rule in TABLES[architecture]:
        if re.fullmatch(pattern, inside):
            return rule
    raise KeyError(f"{name} of {architecture} has no row in the table of cuts")


def _inside(name: str) -> str:
    return re.sub(r"^model\.layers\.\d+\.", "", name)


def summed_later(name: str) -> bool:
    """Whether a partial product is summed together with another one."""
    return re.fullmatch(SUMMED_LATER, _inside(name)) is not None


def cut_of(config: ModelConfig, shard: Shard, name: str, shape: Shape, exact: bool = False) -> Cut | None:
    """What a rank takes of a tensor of this shape in the whole model; None: all of it."""
    rule = rule_of(config.architecture, name)
    if not exact:
        return rule(config, shard, shape)
    cut = rule(config, in_exact_mode(shard), shape)
    if cut is not None and cut.partial:
        return outputs(shard, shape)
    # a bias of such a product goes with its rows
    if name.endswith(("o_proj.bias", "down_proj.bias")):
        return rows(config, shard, shape)
    return cut


def share_of(config: ModelConfig, shard: Shard, weight: Weight, exact: bool = False) -> Weight:
    """One tensor of the whole model as a rank has it: what its bytes are counted by."""
    cut = cut_of(config, shard, weight.name, weight.shape, exact)

    def count(name: str, rows: int) -> int:
        found = cut_of(config, shard, name, (rows, weight.shape[1]), exact)
        return rows if found is None else found.shape((rows, 1))[0]

    joined = tuple((name, count(name, rows)) for name, rows in weight.joined)
    if cut is None:
        return replace(weight, joined=joined)
    heads = weight.column_heads // shard.size if cut.dim == 1 and weight.column_heads > 1 else weight.column_heads
    return replace(weight, shape=cut.shape(weight.shape), joined=joined, column_heads=heads)
