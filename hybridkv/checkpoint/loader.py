"""Loader: takes tensors out of a checkpoint one by one, checks their shape, and puts them where the model runs.

Projections that read the same input are joined along their rows in one buffer, filled part by part, so the peak stays
near the size of the weights. On a GPU those of a GGUF file may stay in its formats (kernels/linear/packed_linear.py),
on a CPU they may be f16 and 4-bit codes (kernels/linear/half.py, int4.py). FP8 and FP4 weights of a folder may stay
codes with their scales (kernels/linear/block_scaled.py).
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence

import torch
from torch import Tensor

from hybridkv.checkpoint.checkpoint import Checkpoint
from hybridkv.checkpoint.in_memory import InMemory
from hybridkv.errors import HybridKVError, ModelFileError
from hybridkv.kernels.backend import HAS_TRITON
from hybridkv.kernels.linear.block_form import BlockForm
from hybridkv.kernels.linear.block_linear import BlockLinear
from hybridkv.kernels.linear.block_scaled import BlockScaled, empty_blocks
from hybridkv.kernels.linear.fp8 import encode_weight, keeps_codes, round_weight_
from hybridkv.kernels.linear.half import HalfLinear, fits_half
from hybridkv.kernels.linear.int4 import Codes4, Int4Linear, join_codes
from hybridkv.kernels.linear.linear import Linear
from hybridkv.kernels.linear.packed_linear import PackedLinear
from hybridkv.kernels.linear.packed_weights import Packed
from hybridkv.kernels.row_ops import EXACT, FAST, RowOps

Progress = Callable[[int, int], None]  # (tensors done, tensors in all)
Part = tuple[str, int | Tensor]  # a name, and its number of rows or a permutation of its rows


def count(rows: int | Tensor) -> int:
    return rows if isinstance(rows, int) else len(rows)


class Loader:
    exact = False  # the layers compute in exact mode
    fp8 = False
    packed = False
    half = False
    int4: Container[str] = ()
    released = False

    def __init__(
        self,
        checkpoint: Checkpoint | InMemory,
        device: torch.device,
        dtype: torch.dtype,
        progress: Progress | None = None,
        exact: bool = False,
        fp8: bool = False,  # projections in E4M3; embedding, norms, convolutions, routers and experts stay
        packed: bool = False,  # projections as a GGUF file has them, where they have a packed form
        half: bool = False,  # projections and the head in f16 on a CPU, where that suits them (kernels/linear/half.py)
        int4: Container[str] = (),  # and, for few rows, these as 4-bit codes beside that
        released: bool = False,  # matrices and experts as the codes and scales of a folder, where it has them
    ) -> None:
        if exact and device.type == "cuda" and not HAS_TRITON:
            raise HybridKVError(
                "exact mode on a GPU runs on Triton, which is not installed; use exact=False or install it"
            )
        self.exact, self.fp8, self.packed, self.half = exact, fp8, packed, half
        self.int4, self.released = int4, released
        self.checkpoint, self.device, self.dtype, self.progress = checkpoint, device, dtype, progress
        self.runs_on = device  # a loader that only counts has its tensors elsewhere
        self.used: set[str] = set()
        self.total = len(checkpoint.names())

    @property
    def ops(self) -> RowOps:
        """What the layers compute with."""
        return EXACT if self.exact else FAST

    def has(self, name: str) -> bool:
        return name in self.checkpoint

    def raw(self, name: str, *shape: int) -> Tensor:
        """The tensor as stored, on the CPU."""
        self._take(name, shape)
        return self.checkpoint.read(name)

    def _take(self, name: str, shape: tuple[int, ...]) -> None:
        if name not in self.checkpoint:
            raise ModelFileError(f"tensor {name} is missing from {self.checkpoint.path.name}")
        found = tuple(self.checkpoint.shape(name))
        if found != shape:
            raise ModelFileError(f"tensor {name} has shape {list(found)}, the config asks for {list(shape)}")
        self.used.add(name)
        if self.progress is not None:
            self.progress(len(self.used), self.total)

    def weight(self, name: str, *shape: int) -> Tensor:
        """A tensor in the model's dtype."""
        out = torch.empty(shape, dtype=self.dtype, device=self.device)
        self.fill(out, name)
        return out

    def fill(self, out: Tensor, name: str) -> None:
        """Copy a tensor into `out`, which may be a view of a larger one. Experts are read one by one."""
        self._take(name, tuple(out.shape))
        self.checkpoint.read_into(out, name)

    def indices(self, name: str, *shape: int, below: int) -> Tensor:
        """A table of whole numbers from 0 to `below` - 1, as int64."""
        table = self.raw(name, *shape)
        if table.is_floating_point() or not 0 <= int(table.min()) <= int(table.max()) < below:
            raise ModelFileError(f"tensor {name} must hold whole numbers from 0 to {below - 1}")
        return table.to(device=self.device, dtype=torch.int64)

    def linear(self, inputs: int, *parts: Part) -> Linear:
        """Projections of the same input as one, with biases where the checkpoint has them."""
        bias = None
        if self.has(f"{parts[0][0]}.bias"):
            found = [(self.raw(f"{name}.bias", count(rows)), rows) for name, rows in parts]
            bias = self.place(torch.cat([b if isinstance(rows, int) else b[rows] for b, rows in found]))
        named = [(f"{name}.weight", rows) for name, rows in parts]
        if any(self.block_form(name) for name, _ in named):
            return self.block_linear(inputs, named, self.dtype, bias)
        if any(self.stays_packed(name) for name, _ in named):
            return self.packed_linear(inputs, named, bias)
        weight = self.joined(inputs, *named)
        if self.half and fits_half(weight) and all(name in self.int4 for name, _ in named):
            return Int4Linear(weight, join_codes([self.codes4(*part) for part in named]), bias)
        return self.make_linear(weight, bias)

    def codes4(self, name: str, rows: int | Tensor) -> Codes4:
        assert isinstance(self.checkpoint, Checkpoint)
        codes = self.checkpoint.read_codes4(name)
        return codes if isinstance(rows, int) else codes.rows(rows)

    def stays_packed(self, name: str) -> bool:
        return self.packed and name in self.checkpoint and self.checkpoint.packed_form(name) is not None

    def packed_linear(self, inputs: int, parts: Sequence[Part], bias: Tensor | None) -> Linear:
        found: list[Packed | Tensor] = []
        for name, rows in parts:
            if not self.stays_packed(name):
                found.append(self.joined(inputs, (name, rows)))
                continue
            assert isinstance(self.checkpoint, Checkpoint)
            self._take(name, (count(rows), inputs))
            packed = self.checkpoint.read_packed(name, self.device)
            found.append(packed if isinstance(rows, int) else packed.rows(rows.to(self.device)))
        return PackedLinear(found, bias)

    def block_form(self, name: str) -> BlockForm | None:
        """How a matrix, or a stack of experts, is kept as codes; None: in a plain dtype."""
        return self.checkpoint.block_form(name) if self.released and name in self.checkpoint else None

    def blocks(self, name: str, *shape: int, form: BlockForm) -> BlockScaled:
        """A matrix, or a stack of experts, as its codes and scales."""
        out = empty_blocks(form, shape, self.device)
        self.fill_blocks(out, name)
        return out

    def fill_blocks(self, out: BlockScaled, name: str) -> None:
        """Codes and scales of a tensor into room for them, which may be rows of a larger one."""
        self._take(name, out.shape)
        self.checkpoint.read_blocks_into(out, name)

    def held(self, name: str, *shape: int) -> tuple[int, ...]:
        """Of a tensor of this shape: the shape of what is loaded, which is less where a rank has a part."""
        return shape

    def experts(self, name: str, *shape: int) -> Tensor | BlockScaled:
        """A stack [E, rows, columns], as codes where they stay."""
        form = self.block_form(name)
        return self.weight(name, *shape) if form is None else self.blocks(name, *shape, form=form)

    def block_linear(
        self, inputs: int, parts: Sequence[Part], dtype: torch.dtype, bias: Tensor | None = None
    ) -> Linear:
        """Projections of the same input, in codes where they stay so, others in `dtype`. Neighbours of one form whose
        blocks come out even are one product.
        """
        found: list[tuple[BlockForm | None, list[Part]]] = []
        for name, rows in parts:
            form = self.block_form(name)
            even = not found or form is None or sum(count(n) for _, n in found[-1][1]) % form.rows == 0
            if found and found[-1][0] == form and even:
                found[-1][1].append((name, rows))
            else:
                found.append((form, [(name, rows)]))
        made: list[BlockScaled | Linear] = []
        for form, run in found:
            if form is None:
                made.append(self.make_linear(self.joined(inputs, *run, dtype=dtype)))
                continue
            coded = empty_blocks(form, (sum(count(rows) for _, rows in run), inputs), self.device)
            at = 0
            for name, rows in run:
                part = coded.part(at, count(rows))
                if isinstance(rows, int):
                    self.fill_blocks(part, name)
                else:
                    stored = self.blocks(name, *part.shape, form=form).taken(rows.to(self.device))
                    part.codes.copy_(stored.codes)
                    part.scales.copy_(stored.scales)
                at += count(rows)
            made.append(coded)
        return BlockLinear(made, bias)

    def make_linear(self, weight: Tensor, bias: Tensor | None = None, shared: bool = False) -> Linear:
        """`shared`: the weight has another use (an embedding) and stays as it is."""
        if self.half and fits_half(weight):
            return HalfLinear(weight, bias)
        if not self.fp8 or shared:
            return Linear(weight, bias, self.exact)
        if self.exact or not keeps_codes(self.device, self.dtype):
            return Linear(round_weight_(weight), bias, self.exact)
        quantised, scale = encode_weight(weight)
        return Linear(quantised, bias, scale=scale)

    def place(self, tensor: Tensor) -> Tensor:
        return tensor.to(device=self.device, dtype=self.dtype).contiguous()

    def vector(self, name: str, *shape: int, plus: float = 0.0) -> Tensor:
        """Norm weights and the like: f32 whatever the model's dtype."""
        return (self.raw(name, *shape).float() + plus).to(self.device)

    def joined(self, inputs: int, *parts: Part, dtype: torch.dtype | None = None) -> Tensor:
        """Matrices [rows, inputs] one below the other. `dtype`: another than the model's."""
        rows_in_all = sum(count(rows) for _, rows in parts)
        out = torch.empty(rows_in_all, inputs, dtype=dtype or self.dtype, device=self.device)
        at = 0
        for name, rows in parts:
            target = out[at : at + count(rows)]
            if isinstance(rows, int):
                self.fill(target, name)
            else:
                target.copy_(self.raw(name, len(rows), inputs)[rows])
            at += count(rows)
        return out

    def finish(self) -> None:
        """Every tensor must have been used: one that is left over does not belong to the model of the config."""
        left = sorted(set(self.checkpoint.names()) - self.used)
        if left:
            raise ModelFileError(f"{len(left)} tensors have no place in this model, for example {left[0]}")
