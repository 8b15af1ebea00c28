"""Weight forms: the bytes that a model's weights take on a GPU in a form that is named, without any file.

    bf16, f32      every matrix in that dtype
    fp8            projections as E4M3 codes with an f32 scale a row; embedding, routers and experts stay BF16
    q8_0 .. q4_k   projections (the head too, where it is a matrix of its own) and experts as the blocks of a GGUF file
                   in this one format, in the planes that stay in memory (kernels/linear/packed_weights.py); the
                   embedding is BF16. Rows that are not whole blocks go as llama.cpp has them: Q6_K becomes Q8_0, the
                   others are stored in formats that are dequantised to BF16 when they are loaded
    released       matrices and experts in the codes and scales of the released files (DeepSeek-V4: FP8 in blocks of
                   128 x 128, experts in FP4; kernels/linear/block_form.py), all else BF16
    mxfp4          experts in MXFP4 (4 bits, and a byte of scale for 32), all else BF16

Norms, convolutions and the like are f32 in every form. A Q4_K_M file mixes Q4_K and Q6_K: it lies between the two.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod

from hybridkv.dtypes import itemsize
from hybridkv.kernels.linear.block_form import BlockForm
from hybridkv.kernels.linear.packed_planes import BITS, each_for, plane_bytes
from hybridkv.models.config import ModelConfig
from hybridkv.models.inventory import Has, Weight
from hybridkv.models.registry import family_of

DTYPES = {"bf16": "bfloat16", "f32": "float32"}
PACKED = {name.lower(): bits for name, bits in BITS.items()}
FORMS = ("bf16", "f32", "fp8", "q8_0", "q6_k", "q5_k", "q4_k", "mxfp4")
RELEASED = "released"  # a form of models that are released in codes
MXFP4_BLOCK, MXFP4_BYTES = 32, 17
BLOCK_OF_K = 256  # weights of a block in the formats whose names end in _k


def weight_bytes(weight: Weight, dtype: str, on_gpu: bool = True) -> int:
    """Bytes of one tensor in a model of this dtype."""
    kind = {"vector": "float32", "indices": "int64", "wide": dtype if on_gpu else "float32"}.get(weight.kind, dtype)
    return prod(weight.shape) * itemsize(kind)


def fp8_bytes(weight: Weight) -> int:
    """Bytes of a matrix as FP8 codes and a scale for each row."""
    return prod(weight.shape) + weight.shape[0] * itemsize("float32")


def packed_bytes(weight: Weight, bits: int) -> int | None:
    """Bytes of a matrix, or of experts, in the planes of a GGUF format; None: it is dequantised when it is loaded."""
    *rows, columns = weight.shape
    if bits == 6 and columns % BLOCK_OF_K:
        bits = 8
    each = each_for(bits, columns, weight.column_heads)
    return None if each is None else prod(rows) * sum(plane_bytes(bits, columns, each))


def released_forms(config: ModelConfig, has: Has) -> dict[str, BlockForm]:
    """Name -> form of all that the released files of such a model store as codes; empty: they store values."""
    family = family_of(config)
    found = {w.name: form for w in family.weights(config, has) if (form := family.released(w)) is not None}
    return {name: form for name, form in found.items() if form.kept}


def block_bytes(weight: Weight, forms: Mapping[str, BlockForm]) -> int | None:
    """Bytes of a tensor that is kept as codes; None: it is not. Plain matrices that are joined are codes if all are of
    one form, and no block reaches over a border.
    """
    form = forms.get(weight.name)
    if form is None or weight.widened:
        return None
    if weight.kind == "plain" and weight.joined:
        if {forms.get(name) for name, _ in weight.joined} != {form}:
            return None
        form = form.joined(*(rows for _, rows in weight.joined))
    *stack, rows, columns = weight.shape
    return prod(stack) * form.nbytes(rows, columns)


def form_bytes(
    config: ModelConfig, has: Has, form: str, experts: bool = True, share: Callable[[Weight], Weight] | None = None
) -> int:
    """Bytes of all weights on a GPU. `experts`: whether they are in the form too, or in BF16. `share`: what a rank of
    several has of a tensor.
    """
    weights = family_of(config).weights(config, has)
    forms = released_forms(config, has) if form == RELEASED else {}
    return sum(_in_form(weight if share is None else share(weight), form, experts, forms) for weight in weights)


def _in_form(weight: Weight, form: str, experts: bool, forms: Mapping[str, BlockForm]) -> int:
    plain = weight_bytes(weight, DTYPES.get(form, "bfloat16"))
    if (blocks := block_bytes(weight, forms)) is not None:
        return blocks
    if form == "fp8" and weight.kind == "matrix":
        return fp8_bytes(weight)
    if form in PACKED and (weight.kind == "matrix" or (weight.kind == "experts" and experts)):
        packed = packed_bytes(weight, PACKED[form])
        return plain if packed is None else packed
    if form == "mxfp4" and weight.kind == "experts" and experts and weight.shape[-1] % MXFP4_BLOCK == 0:
        return prod(weight.shape) // MXFP4_BLOCK * MXFP4_BYTES
    return plain


def has_experts(config: ModelConfig, has: Has) -> bool:
    """Whether a model has experts, which is all that mxfp4 changes."""
    return any(weight.kind == "experts" for weight in family_of(config).weights(config, has))


def held_today(config: ModelConfig, form: str) -> bool:
    """Whether the engine holds this model's weights in this form. Experts in a GGUF file's formats it does not, nor
    DeepSeek-V4 in anything but a plain dtype and what it is released in.
    """
    if form in DTYPES or form == RELEASED:
        return True
    if config.v4 is not None or form == "mxfp4":
        return False
    return form == "fp8" or config.moe is None
