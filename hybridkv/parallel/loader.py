"""ShardedLoader: hands a family's `load` the part of every tensor that a rank holds.

The family is given the rank's config and asks for its shapes. The checkpoint's tensors must have the whole model's, all
of which are checked; the part is what the table says (cuts.py). FP8 codes and their scales are made of whole
rows and then cut, so a model has the same codes on any number of ranks. 4-bit codes of a CPU (int4) are not cut: such
matrices are f16 here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from hybridkv.checkpoint.checkpoint import Checkpoint
from hybridkv.checkpoint.gguf_planes import columns_fit
from hybridkv.checkpoint.in_memory import InMemory
from hybridkv.checkpoint.loader import Loader, Part, Progress, count
from hybridkv.errors import ModelFileError
from hybridkv.kernels.linear.block_form import BlockForm
from hybridkv.kernels.linear.block_linear import BlockLinear
from hybridkv.kernels.linear.block_scaled import BlockScaled
from hybridkv.kernels.linear.fp8 import encode_weight, keeps_codes, round_weight_
from hybridkv.kernels.linear.linear import Linear
from hybridkv.kernels.linear.packed_linear import PackedLinear
from hybridkv.kernels.linear.packed_weights import Packed
from hybridkv.kernels.row_ops import RowOps
from hybridkv.models import check_exact, check_fp8, family_of
from hybridkv.models.config import ModelConfig
from hybridkv.models.decoder import Model
from hybridkv.parallel.block_parts import part_form
from hybridkv.parallel.cuts import Cut, cut_of, summed_later
from hybridkv.parallel.layers import AnyGroup, GatheredLinear, SplitLinear, Vocabulary, run_gathered_experts, sharded
from hybridkv.parallel.shard import (
    Shard,
    Span,
    check_size,
    expert_span,
    in_exact_mode,
    local,
    spans,
    vocabulary_span,
    width_spans,
)


def take(tensor: Tensor, cut: Cut | None) -> Tensor:
    """A rank's part of a whole tensor; a view where it is one piece."""
    if cut is None:
        return tensor
    parts = [tensor.narrow(cut.dim, begin, end - begin) for begin, end in cut.spans]
    return parts[0] if len(parts) == 1 else torch.cat(parts, cut.dim)


class ShardedLoader(Loader):
    """A Loader of one rank's part."""

    def __init__(
        self,
        config: ModelConfig,  # of the whole model
        shard: Shard,
        group: AnyGroup,
        checkpoint: Checkpoint | InMemory,
        device: torch.device,
        dtype: torch.dtype,
        progress: Progress | None = None,
        exact: bool = False,
        fp8: bool = False,
        packed: bool = False,
        half: bool = False,
        released: bool = False,
    ) -> None:
        super().__init__(checkpoint, device, dtype, progress, exact, fp8, packed, half, released=released)
        self.config, self.shard, self.group = config, shard, group
        has = checkpoint.__contains__
        self.steps = checkpoint.column_steps() if packed and isinstance(checkpoint, Checkpoint) else {}
        self.shapes = {weight.name: weight.shape for weight in family_of(config).weights(config, has)}

    def cut(self, name: str) -> Cut | None:
        """What this rank takes of a tensor."""
        shape = self.shapes.get(name)
        if shape is None:
            raise ModelFileError(f"tensor {name} is not in the list of this model's weights")
        return cut_of(self.config, self.shard, name, shape, self.exact)

    def own_shape(self, name: str) -> tuple[int, ...]:
        """Of this rank's part."""
        cut, shape = self.cut(name), self.shapes[name]
        return shape if cut is None else cut.shape(shape)

    def _take(self, name: str, shape: tuple[int, ...]) -> None:
        """The file must have the whole tensor, and the rank's model must have asked for its part of it."""
        own = self.own_shape(name)
        if shape != own:
            raise ModelFileError(
                f"rank {self.shard.rank} asks for {list(shape)} of tensor {name}, its part is {list(own)}"
            )
        super()._take(name, self.shapes[name])

    def raw(self, name: str, *shape: int) -> Tensor:
        self._take(name, shape)
        return take(self.checkpoint.read(name), self.cut(name))

    def weight(self, name: str, *shape: int) -> Tensor:
        """Where a config keeps the size of the whole model (vocab, experts), the whole tensor is asked for."""
        own = self.own_shape(name)
        return super().weight(name, *(own if shape == self.shapes[name] else shape))

    def fill(self, out: Tensor, name: str) -> None:
        self._take(name, tuple(out.shape))
        cut = self.cut(name)
        if not self.checkpoint.experts(name):
            out.copy_(take(self.checkpoint.read(name), cut))
            return
        assert isinstance(self.checkpoint, Checkpoint)
        for at, expert in enumerate(self._experts(cut, self.shapes[name][0])):
            self._fill_expert(out[at], name, expert, cut)

    # ---- experts in exact mode

    @property
    def ops(self) -> RowOps:
        moe, ops = self.config.moe, super().ops
        if moe is None or not self.exact:
            return ops
        inner, outputs = width_spans(moe.intermediate, self.shard), spans(self.config.hidden, self.shard.size)
        run = partial(run_gathered_experts, inner=_sizes(inner), outputs=_sizes(outputs), group=self.group)
        return replace(ops, run_experts=run)

    def experts(self, name: str, *shape: int) -> Tensor | BlockScaled:
        """In exact mode the last matrices have all of their inputs, which the config of a rank does not know."""
        return super().experts(name, *(self.own_shape(name) if self.exact else shape))

    # ---- codes with a scale for each block

    def block_form(self, name: str) -> BlockForm | None:
        """Of this rank's part."""
        form = super().block_form(name)
        return None if form is None else part_form(form, self.cut(name), self.shapes[name])

    def held(self, name: str, *shape: int) -> tuple[int, ...]:
        return self.own_shape(name)

    def blocks(self, name: str, *shape: int, form: BlockForm) -> BlockScaled:
        own = self.own_shape(name)
        return super().blocks(name, *(own if shape == self.shapes[name] else shape), form=form)

    def fill_blocks(self, out: BlockScaled, name: str) -> None:
        """Where the cut is of rows, or of experts, no others are read."""
        self._take(name, out.shape)
        cut, dims = self.cut(name), len(self.shapes[name])
        if cut is None:
            self.checkpoint.read_blocks_into(out, name)
        elif cut.dim == dims - 3:
            self.checkpoint.read_blocks_into(out, name, experts=range(*cut.spans[0]))
        elif cut.dim == dims - 2:
            self.checkpoint.read_blocks_into(out, name, rows=cut.spans)
        else:
            self.checkpoint.read_blocks_into(out, name, columns=cut.spans[0])

    def _experts(self, cut: Cut | None, all_of_them: int) -> range:
        return range(*cut.spans[0]) if cut is not None and cut.dim == 0 else range(all_of_them)

    def _fill_expert(self, out: Tensor, name: str, expert: int, cut: Cut | None) -> None:
        """One expert's rows and columns that are this rank's."""
        assert isinstance(self.checkpoint, Checkpoint)
        rows: Sequence[Span] = cut.spans if cut is not None and cut.dim == 1 else ((0, self.shapes[name][1]),)
        columns = slice(*cut.spans[0]) if cut is not None and cut.dim == 2 else slice(None)
        for first, piece in self.checkpoint.expert_rows(name, expert):
            at = 0
            for begin, end in rows:
                low, high = max(begin, first), min(end, first + len(piece))
                if low < high:
                    out[at + low - begin : at + high - begin] = piece[low - first : high - first, columns]
                at += end - begin

    # ---- products

    def linear(self, inputs: int, *parts: Part) -> Linear:
        parts = tuple((name, self._own_rows(name, rows)) for name, rows in parts)
        name = f"{parts[0][0]}.weight"
        if not self._parted(name):
            return super().linear(inputs, *parts)
        (whole, _), *none = parts
        assert not none, "a product over parts of its inputs stands alone"
        if self.exact:
            return self._gathered(whole)
        inner = self._columns(name)
        if summed_later(name):
            return inner
        bias = self.place(self.raw(f"{whole}.bias", self.shapes[name][0])) if self.has(f"{whole}.bias") else None
        return SplitLinear(inner, bias, self.group)

    def _own_rows(self, name: str, rows: int | Tensor) -> int | Tensor:
        full = self.shapes.get(f"{name}.weight", (0,))[0]
        return self.own_shape(f"{name}.weight")[0] if isinstance(rows, int) and rows == full else rows

    def _parted(self, name: str) -> bool:
        """Whether a matrix's inputs are divided over the ranks."""
        cut = cut_of(self.config, self.shard, name, self.shapes[name]) if name in self.shapes else None
        return cut is not None and cut.partial

    def _columns(self, name: str) -> Linear:
        """The product with this rank's columns of a matrix, without a bias."""
        full, cut = self.shapes[name], self.cut(name)
        if form := self.block_form(name):
            return BlockLinear([self.blocks(name, *full, form=form)])
        if self.stays_packed(name):
            return self.packed_linear(full[1], [(name, full[0])], None)
        if not self.fp8:
            return self.make_linear(self.joined(self.own_shape(name)[1], (name, full[0])))
        whole = torch.empty(full, dtype=self.dtype, device=self.device)
        super()._take(name, full)
        self.checkpoint.read_into(whole, name)
        if self.exact or not keeps_codes(self.device, self.dtype):
            return Linear(take(round_weight_(whole), cut).contiguous(), exact=self.exact)
        codes, scale = encode_weight(whole)
        return Linear(take(codes, cut).contiguous(), scale=scale)

    def _gathered(self, name: str) -> Linear:
        """Exact mode: this rank's outputs of a product, and who has which inputs and outputs."""
        rows, inputs = self.shapes[f"{name}.weight"]
        inner = super().linear(inputs, (name, self.own_shape(f"{name}.weight")[0]))
        mlp = ".mlp." in name
        inputs_of = width_spans(inputs, self.shard) if mlp else spans(inputs, self.shard.size)
        return GatheredLinear(inner, _sizes(inputs_of), _sizes(spans(rows, self.shard.size)), self.group)

    def stays_packed(self, name: str) -> bool:
        """Columns can be cut at borders of blocks; a matrix that no border fits is dequantised."""
        if not super().stays_packed(name):
            return False
        cut = self.cut(name)
        if cut is None or cut.columns is None:
            return True
        form, step = self.steps[name]
        return columns_fit(form, step, *cut.columns)

    def packed_linear(self, inputs: int, parts: Sequence[Part], bias: Tensor | None) -> Linear:
        found: list[Packed | Tensor] = []
        for name, rows in parts:
            if not self.stays_packed(name):
                found.append(self.joined(inputs, (name, rows)))
                continue
            assert isinstance(self.checkpoint, Checkpoint)
            cut = self.cut(name)
            self._take(name, (count(rows), self.own_shape(name)[1]))
            packed = self.checkpoint.read_packed(name, self.device, None if cut is None else cut.columns)
            if cut is not None and cut.dim == 0:
                own = torch.cat([torch.arange(begin, end, device=self.device) for begin, end in cut.spans])
                packed = packed.rows(own)
            found.append(packed if isinstance(rows, int) else packed.rows(rows.to(self.device)))
        return PackedLinear(found, bias)


def _sizes(found: list[Span]) -> list[int]:
    return [end - begin for begin, end in found]


def load_sharded(
    config: ModelConfig,
    shard: Shard,
    group: AnyGroup,
    checkpoint: Checkpoint | InMemory,
    device: torch.device,
    dtype: torch.dtype,
    progress: Progress | None = None,
    exact: bool = False,
    fp8: bool = False,
    packed: bool = False,
    half: bool = False,
    released: bool = False,  # `shard`: of block_shard (block_parts.py)
) -> Model:
    """One rank's part of a model, with its sums. The arguments are those of `load_model`; `config`: of the whole."""
    check_exact(config, exact)
    check_fp8(config, fp8)
    check_size(config, shard.size, exact, shard.experts)
    shard = in_exact_mode(shard) if exact else shard
    family = family_of(config)
    family.check_weights(config, checkpoint.__contains__)
    loader = ShardedLoader(
        config, shard, group, checkpoint, device, dtype, progress, exact, fp8, packed, half, released
    )
    model = family.load(local(config, shard), loader)
    loader.finish()
    sizes = [vocabulary_span(config.vocab, Shard(rank, shard.size)) for rank in range(shard.size)]
    vocabulary = Vocabulary(vocabulary_span(config.vocab, shard), _sizes(sizes), group)
    return sharded(model, vocabulary, None if shard.by_width(config) else expert_span(config, shard)[0], exact)
