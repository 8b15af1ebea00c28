"""A model of any known shape with random weights, made on the device: for tests and benchmarks at real widths.

Its projections can be packed, as those of a GGUF file: in one format, or in q4_k_m, as files of that name have them:
Q4_K, but the head and, in every other layer, what projects values and what projects back from the MLP, in Q6_K. Or, as
"released", what the model's released files store as FP8 and FP4 codes is random codes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

import torch
from torch import Tensor

from hybridkv.checkpoint.loader import Loader, Part, count
from hybridkv.errors import HybridKVError
from hybridkv.kernels.linear.block_form import BlockForm
from hybridkv.kernels.linear.block_scaled import BlockScaled
from hybridkv.kernels.linear.linear import Linear
from hybridkv.kernels.linear.packed_linear import PackedLinear
from hybridkv.kernels.linear.packed_planes import BITS, BLOCK, BLOCK_BYTES, GROUP, each_for
from hybridkv.kernels.linear.packed_weights import Packed, pack
from hybridkv.models import FAMILIES
from hybridkv.models.config import ModelConfig
from hybridkv.models.decoder import Model
from hybridkv.models.weight_forms import RELEASED, released_forms

PACKED_FORMS = (*(name.lower() for name in BITS), "q4_k_m")
F16_AT = {8: (0,), 4: (0, 2), 5: (0, 2), 6: (208,)}  # bytes of a block where d, or d and dmin, begin
CODES_RMS = {8: 107.0, 4: 2.93}  # of random codes, by their bits: E4M3 without NaN, E2M1
NAN8 = 127  # E4M3's NaN without its sign
SIZE = {8: 1 / 74, 4: 1 / 300, 5: 1 / 600, 6: 1 / 1400}  # of d, for weights near one


class RandomLoader(Loader):
    """Gives weights of the size that keeps activations near 1, from a seed."""

    def __init__(
        self, device: str, dtype: torch.dtype, seed: int = 0, fp8: bool = False, exact: bool = False, form: str = ""
    ) -> None:
        self.device, self.dtype, self.fp8, self.exact = torch.device(device), dtype, fp8, exact
        self.form = form  # one of PACKED_FORMS; empty: nothing is packed
        self.runs_on = self.device
        self.used: set[str] = set()
        self.generator = torch.Generator(device=device).manual_seed(seed)

    def has(self, name: str) -> bool:
        """Whether there is a tensor of this name: a head of its own, nothing else that is optional."""
        return name == "lm_head.weight"

    def raw(self, name: str, *shape: int) -> Tensor:
        wide = torch.randn(shape, generator=self.generator, device=self.device, dtype=self.dtype)
        return wide.mul_(shape[-1] ** -0.5 if len(shape) > 1 else 0.1)

    def fill(self, out: Tensor, name: str) -> None:
        out.copy_(self.raw(name, *out.shape))

    def indices(self, name: str, *shape: int, below: int) -> Tensor:
        """Rows of different indices."""
        rows = torch.rand(*shape[:-1], below, generator=self.generator, device=self.device)
        return rows.topk(shape[-1]).indices

    def stays_packed(self, name: str) -> bool:
        """Everything does, in a form."""
        return bool(self.form)

    def packed_linear(self, inputs: int, parts: Sequence[Part], bias: Tensor | None) -> Linear:
        """Random blocks; in the model's dtype where rows are not whole ones."""
        found: list[Packed | Tensor] = []
        for name, rows in parts:
            bits = self.bits_of(name)
            if each_for(bits, inputs, 1) is None:
                found.append(self.joined(inputs, (name, rows)))
            else:
                found.append(random_packed(bits, count(rows), inputs, self.generator))
        return PackedLinear(found, bias)

    def bits_of(self, name: str) -> int:
        """The format of a matrix of this name."""
        if self.form != "q4_k_m":
            return BITS[self.form.upper()]
        layer = re.search(r"layers\.(\d+)\..*(v_proj|down_proj)", name)
        return 6 if name.startswith("lm_head") or (layer is not None and int(layer[1]) % 2) else 4

    def vector(self, name: str, *shape: int, plus: float = 0.0) -> Tensor:
        return self.raw(name, *shape).float() + (plus or (1.0 if name.endswith("norm.weight") else 0.0))


class RandomReleasedLoader(RandomLoader):
    """What released files of the model store as codes is random codes, with scales that give the same size."""

    def __init__(self, config: ModelConfig, device: str, dtype: torch.dtype, seed: int = 0) -> None:
        super().__init__(device, dtype, seed)
        self.forms = released_forms(config, self.has)
        if not self.forms:
            raise HybridKVError(f"a model of {config.architecture} is not released in codes; DeepSeek-V4 is")

    def block_form(self, name: str) -> BlockForm | None:
        return self.forms.get(name)

    def fill_blocks(self, out: BlockScaled, name: str) -> None:
        draw_codes(out, self.generator)


def draw_codes(out: BlockScaled, generator: torch.Generator) -> None:
    """Random codes, with scales that keep activations near 1."""
    bits = out.form.bits
    out.codes.random_(0, 256, generator=generator)
    if bits == 8:
        out.codes.masked_fill_(out.codes & 127 == NAN8, 0)
    power = round(-math.log2(CODES_RMS[bits] * out.shape[-1] ** 0.5))
    out.scales.fill_(127 + power if out.form.scale_bytes == 1 else 2.0**power)


def random_packed(bits: int, rows: int, columns: int, generator: torch.Generator) -> Packed:
    """A matrix whose weights are near columns ** -0.5, of either sign."""
    size = (rows, columns // (GROUP if bits == 8 else BLOCK), BLOCK_BYTES[bits])
    blocks = torch.randint(0, 256, size, dtype=torch.uint8, device=generator.device, generator=generator)
    for at in F16_AT[bits]:
        d = torch.randn(size[:2], device=generator.device, generator=generator) * (SIZE[bits] * columns**-0.5)
        blocks[..., at : at + 2] = d.half().unsqueeze(-1).view(torch.uint8)
    return pack(blocks.flatten(1), bits)


def random_decoder(
    config: ModelConfig, device: str, dtype: torch.dtype, fp8: bool = False, exact: bool = False, form: str = ""
) -> Model:
    """`fp8`: projections in E4M3. `exact`: a model for exact mode, with the same weights. `form`: of PACKED_FORMS, or
    RELEASED.
    """
    if form == RELEASED:
        return FAMILIES[config.architecture].load(config, RandomReleasedLoader(config, device, dtype))
    return FAMILIES[config.architecture].load(config, RandomLoader(device, dtype, fp8=fp8, exact=exact, form=form))
