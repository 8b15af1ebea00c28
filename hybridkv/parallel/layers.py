"""Parts of a model that hold a rank's share: products that are summed or gathered, experts, embedding and head.

A rank's product over a part of the inputs is a part of the sum, so it is summed over the ranks before anything is added
to it: a bias, the residual. In exact mode no sum is parted: inputs are gathered, each rank computes whole sums of some
outputs, and these are gathered.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridkv.kernels.linear.linear import Linear
from hybridkv.kernels.moe.block_experts import ExpertStack, run_block_experts
from hybridkv.kernels.moe.expert_loop import run_softmax_experts
from hybridkv.kernels.row_ops import run_experts_exact
from hybridkv.models.decoder import Decoder, DecoderLayer, Model
from hybridkv.models.deepseek_v4 import Block, DeepseekV4, Experts
from hybridkv.models.qwen3_5 import SparseMoe
from hybridkv.parallel.group import Alone, Group
from hybridkv.parallel.shard import Span

AnyGroup = Group | Alone


def gather_columns(group: AnyGroup, x: Tensor, sizes: list[int]) -> Tensor:
    """x [T, size of this rank] -> [T, sum of sizes], the ranks' columns side by side. Parts may be uneven."""
    widest = max(sizes)
    padded = x if x.shape[1] == widest else F.pad(x, (0, widest - x.shape[1]))
    parts = group.all_gather(padded)  # [n, T, widest]
    if min(sizes) == widest:
        return parts.transpose(0, 1).reshape(len(x), sum(sizes))  # of no rows too, where a step ends inside a prompt
    return torch.cat([part[:, :size] for part, size in zip(parts, sizes, strict=True)], 1)


class SplitLinear(Linear):
    """A product whose inputs are divided over the ranks: x [T, K / n] -> the whole sum [T, N] on every rank.

    `add_to` never adds to the residual: every rank would add it.
    """

    def __init__(self, inner: Linear, bias: Tensor | None, group: AnyGroup) -> None:
        self.inner, self.bias, self.group = inner, bias, group
        self.shape, self.exact, self.packed = inner.shape, inner.exact, True
        self.nbytes = inner.nbytes + (0 if bias is None else bias.nbytes)

    def __call__(self, x: Tensor) -> Tensor:
        y = self.group.all_reduce(self.inner(x))
        return y if self.bias is None else y.add_(self.bias)

    def adds_in_place(self, h: Tensor, x: Tensor) -> bool:
        return False


class GatheredLinear(Linear):
    """The same without a sum in parts: x [T, K / n] is gathered, each rank computes outputs, these are gathered."""

    def __init__(self, inner: Linear, inputs: list[int], outputs: list[int], group: AnyGroup) -> None:
        self.inner, self.group = inner, group
        self.bias: Tensor | None = None  # the inner product has it
        self.inputs, self.outputs = inputs, outputs  # columns of each rank
        self.shape, self.exact, self.packed = inner.shape, inner.exact, True
        self.nbytes = inner.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        return gather_columns(self.group, self.inner(gather_columns(self.group, x, self.inputs)), self.outputs)

    def adds_in_place(self, h: Tensor, x: Tensor) -> bool:
        return False


@dataclass(frozen=True)
class SummedMoe:
    """A mixture of experts of which this rank has a part: one sum for routed and shared experts together."""

    part: SparseMoe
    group: AnyGroup

    def __call__(self, x: Tensor, h: Tensor | None = None) -> Tensor:
        return self.group.all_reduce(self.part(x))


@dataclass(frozen=True)
class SummedExperts:
    """The same for DeepSeek-V4."""

    part: Experts
    group: AnyGroup

    def __call__(self, x: Tensor, tokens: Tensor) -> Tensor:
        return self.group.all_reduce(self.part(x, tokens))


def run_own_experts(
    x: Tensor,
    weights: Tensor,
    chosen: Tensor,
    gate_up: Tensor,
    down: Tensor,
    first: int,
    run: Callable[..., Tensor] = run_softmax_experts,
) -> Tensor:
    """run_softmax_experts of the experts that are here, of which the first has this number. Others add nothing."""
    own = chosen - first
    beyond = (own < 0) | (own >= len(down))
    own = own.masked_fill(beyond, len(down)).to(chosen.dtype)  # sorted last, and not run
    return run(x, weights.masked_fill(beyond, 0.0), own, gate_up, down, others=True)


def run_gathered_experts(
    x: Tensor,
    weights: Tensor,
    chosen: Tensor,
    gate_up: Tensor,
    down: Tensor,
    inner: list[int],
    outputs: list[int],
    group: AnyGroup,
) -> Tensor:
    """run_experts_exact of a part of every expert: what goes into `down` is gathered, each rank computes whole sums of
    some outputs, and these are gathered. `inner`, `outputs`: columns of each rank.
    """
    routed = run_experts_exact(x, weights, chosen, gate_up, down, partial(gather_columns, group, sizes=inner))
    return gather_columns(group, routed, outputs)


def run_own_v4_experts(
    x: Tensor, weights: Tensor, chosen: Tensor, stacks: Sequence[ExpertStack], limit: float, first: int
) -> Tensor:
    """run_block_experts of the routed experts that are here, of which the first has this number, and of this rank's
    part of the shared one, which every token takes last.
    """
    here = len(stacks[0].down)
    own = chosen - first
    beyond = (own < 0) | (own >= here)
    beyond[:, -1] = False
    own = own.masked_fill(beyond, here + 1)  # sorted last, and not run
    own[:, -1] = here
    return run_block_experts(x, weights.masked_fill(beyond, 0.0), own, stacks, limit, others=True)


@dataclass(frozen=True)
class Vocabulary:
    """A rank's rows of embedding and head."""

    span: Span
    sizes: list[int]  # of all ranks
    group: AnyGroup

    def embed(self, tokens: Tensor, embedding: Tensor) -> Tensor:
        """[T] tokens, this rank's rows [v, hidden] -> [T, hidden] on every rank, with the bits of the table."""
        own = tokens - self.span[0]
        beyond = (own < 0) | (own >= len(embedding))
        found = F.embedding(own.masked_fill(beyond, 0), embedding).masked_fill(beyond.unsqueeze(1), 0)
        # one rank has a row, the others zeros: as whole numbers the sum has its very bits, that of a zero's sign too
        whole = torch.int32 if found.shape[1] * found.element_size() % 4 == 0 else torch.uint8
        self.group.all_reduce(found.view(whole))
        return found

    def gather(self, logits: Tensor) -> Tensor:
        """[S, v] of this rank -> [S, vocab] of all."""
        return gather_columns(self.group, logits, self.sizes)


@dataclass(frozen=True)
class Sharded:
    """Stands before a family's class: this rank has its heads, its width and its part of the vocabulary."""

    vocabulary: Vocabulary
    parted: bool = False  # `forward` gives the logits of this rank's tokens alone

    def embed(self: Any, tokens: Tensor) -> Tensor:
        return self.vocabulary.embed(tokens, self.embedding)

    @torch.inference_mode()
    def forward(
        self: Any, tokens: Tensor, positions: Tensor, handles: Mapping[int, Any], rows: Tensor | None
    ) -> Tensor:
        found = self.hidden(tokens, positions, handles, rows)
        return self.own_logits(found) if self.parted else self.logits(found)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        return self.vocabulary.gather(self.own_logits(hidden))

    @torch.inference_mode()
    def own_logits(self, hidden: Tensor) -> Tensor:
        """[S, hidden] -> [S, v] of this rank's tokens."""
        return super().logits(hidden)  # type: ignore[misc]  # of the family's class


@dataclass(frozen=True)
class ShardedDecoder(Sharded, Decoder):
    """A Decoder of which this rank has its part."""


@dataclass(frozen=True)
class ShardedV4(Sharded, DeepseekV4):
    """A DeepseekV4 of which this rank has its part. Its cache is whole."""


def sharded(model: Model, vocabulary: Vocabulary, first_expert: int | None, exact: bool = False) -> Model:
    """A model that was loaded in parts, with its sums. `first_expert`: of the rank's own, where experts are whole.
    `exact`: there are none, its products gather.
    """
    group = vocabulary.group
    if isinstance(model, DeepseekV4):
        blocks = tuple(_summed_block(block, group, first_expert) for block in model.layers)
        return ShardedV4(**_fields(model, layers=blocks, vocabulary=vocabulary))
    assert isinstance(model, Decoder)
    layers = model.layers if exact else tuple(_summed(layer, group, first_expert) for layer in model.layers)
    return ShardedDecoder(**_fields(model, layers=layers, vocabulary=vocabulary))


def _summed_block(block: Block, group: AnyGroup, first_expert: int | None) -> Block:
    experts = block.experts
    if first_expert is not None:
        experts = replace(experts, run=partial(run_own_v4_experts, first=first_expert))
    return replace(block, experts=SummedExperts(experts, group))  # type: ignore[arg-type]


def _summed(layer: DecoderLayer, group: AnyGroup, first_expert: int | None) -> DecoderLayer:
    moe = layer.feed
    if not isinstance(moe, SparseMoe):
        return layer
    if first_expert is not None:
        run = partial(run_own_experts, first=first_expert)
        moe = replace(moe, ops=replace(moe.ops, run_experts=run))
    return replace(layer, feed=SummedMoe(moe, group))


def _fields(model: Decoder | DeepseekV4, **changed: Any) -> dict[str, Any]:
    return {field.name: getattr(model, field.name) for field in fields(model)} | changed
