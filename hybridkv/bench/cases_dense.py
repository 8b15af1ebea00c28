"""Cases of what all layers share: projections, norms and activations."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridkv.bench.cases import Case, Listed, Peers, Setup
from hybridkv.bench.report import check
from hybridkv.bench.timing import copies
from hybridkv.kernels.linear.linear import Linear
from hybridkv.kernels.linear.packed_dequantise import dequantise_ref
from hybridkv.kernels.linear.packed_linear import PackedLinear
from hybridkv.kernels.linear.packed_planes import BITS
from hybridkv.kernels.linear.packed_weights import Packed
from hybridkv.models.random_weights import random_packed

ROUNDING = 1e-2  # bf16 results of f32 sums in another order
FP8_ROUNDING = 6e-2  # many rows: x is rounded to E4M3 too, each value by 1/16 of itself at the most
# of a weight
BYTES = {"f32": 4, "bf16": 2, "fp8": 1, "q8_0": 34 / 32, "q6_k": 212 / 256, "q5_k": 180 / 256, "q4_k": 148 / 256}


def projections(s: Setup) -> dict[str, tuple[int, int]]:
    """Name -> (rows, inputs) of a layer's matrices."""
    c, d = s.shape.config, s.shape.config.gdn
    heads = c.heads * c.head_dim
    found = {
        "qkv": (heads * (2 if d else 1) + 2 * c.kv_heads * c.head_dim, c.hidden),
        "out": (c.hidden, heads),
        "gate_up": (2 * c.intermediate, c.hidden),
        "down": (c.hidden, c.intermediate),
        "head": (c.vocab, c.hidden),
    }
    if d is not None:
        found["gdn_inputs"] = (d.channels + d.value_heads * (d.value_dim + 2), c.hidden)
    return found


MANY = ("qkv", "gate_up", "down", "gdn_inputs")  # that are measured with several rows too


def linear_cases(s: Setup) -> Iterator[Listed]:
    for kind in tuple(BYTES)[1:] if s.device == "cuda" else ("f32",):
        for T in s.some((1, 8, 64), (1,), (1, 3)):
            for name, (rows, inputs) in projections(s).items():
                if T == 1 or s.shape.tiny or name in MANY:
                    build = partial(linear_case, s, kind, rows, inputs, T)
                    yield Listed("linear", f"{kind} {name} [{rows},{inputs}] T={T}", build)
            if kind in ("bf16", "f32"):
                rows, inputs = projections(s)["gate_up"]
                build = partial(linear_case, s, kind, rows, inputs, T, gated=True)
                yield Listed("linear", f"{kind} gate_up, gated [{rows},{inputs}] T={T}", build)


def exact_cases(s: Setup) -> Iterator[Listed]:
    kind = "bf16" if s.device == "cuda" else "f32"
    for T in s.some((1, 16, 64, 256, 4096), (1,), (3,)):
        for name, (rows, inputs) in projections(s).items():
            if name != "head" or T == 1:
                gated = name == "gate_up"
                build = partial(linear_case, s, kind, rows, inputs, T, exact=True, gated=gated)
                yield Listed("linear_exact", f"{kind} {name}{', gated' * gated} [{rows},{inputs}] T={T}", build)


def norm_cases(s: Setup) -> Iterator[Listed]:
    hidden, wide = s.shape.config.hidden, s.shape.config.intermediate
    for T in s.some((1, 4096), (1,), (3,)):
        yield Listed("add_rms_norm", f"T={T} width {hidden}", partial(norm_case, s, T))
        yield Listed("silu_mul", f"T={T} width {wide}", partial(silu_case, s, T))


def linear_case(s: Setup, kind: str, rows: int, inputs: int, T: int, exact: bool = False, gated: bool = False) -> Case:
    """`exact`: the form whose rows do not depend on how many there are, with the fast one beside it. `gated`: the first
    half of the rows are gates of the second.
    """
    from hybridkv.kernels.activation import silu_mul, silu_mul_ref

    def run(y: tuple[Linear, Tensor]) -> Tensor:
        return y[0].gated(y[1]) if gated else y[0](y[1])

    generator = torch.Generator(device=s.device).manual_seed(0)

    def matrix(weight: Tensor, exact: bool = exact) -> Linear:
        if kind.upper() in BITS:
            return PackedLinear([random_packed(BITS[kind.upper()], rows, inputs, generator)])
        if kind != "fp8":
            return Linear(weight, exact=exact)
        from hybridkv.kernels.linear.fp8 import encode_weight

        codes, scale = encode_weight(weight)
        return Linear(codes, scale=scale)

    moved = rows * inputs * BYTES[kind] + T * (rows + inputs) * s.shape.dtype.itemsize
    weights = [s.randn(rows, inputs).mul_(inputs**-0.5) for _ in range(copies(moved, s.device))]
    x = s.randn(T, inputs)
    held = [(matrix(weight), x) for weight in weights]

    def verify() -> float:
        got, some = run(held[0]), slice(0, 8)  # few rows of x, all of the weight
        if kind == "fp8":
            from hybridkv.kernels.linear.fp8 import encode_weight, linear_fp8_ref
            from hybridkv.kernels.linear.gemv import MAX_ROWS

            bound = ROUNDING if T <= MAX_ROWS else FP8_ROUNDING
            return check(f"linear fp8 T={T}", got[some], linear_fp8_ref(x[some], *encode_weight(weights[0])), bound)
        part = held[0][0].parts[0] if isinstance(held[0][0], PackedLinear) else None
        wide = dequantise_ref(part) if isinstance(part, Packed) else weights[0].float()
        want = F.linear(x[some].float(), wide)
        want = silu_mul_ref(want) if gated else want
        return check(f"linear T={T}", got[some], want, ROUNDING)

    peers: Peers = {}
    if exact:
        peers = {"fast": (run, [(matrix(weight, False), x) for weight in weights])}
    elif s.device == "cuda":  # what cuBLAS takes for the bf16 matrix, whatever ours is stored in
        after = silu_mul if gated else lambda y: y
        peers = {"cuBLAS bf16": (lambda weight: after(F.linear(x, weight)), weights)}
    return Case(run, held, verify, moved, 2 * T * rows * inputs, peers=peers)


def norm_case(s: Setup, T: int) -> Case:
    from hybridkv.kernels.norm import add_rms_norm, add_rms_norm_ref

    width, eps = s.shape.config.hidden, s.shape.config.eps
    weight = torch.rand(width, device=s.device) + 0.5
    moved = 4 * T * width * s.shape.dtype.itemsize
    inputs = [(s.randn(T, width), s.randn(T, width), weight, eps) for _ in range(copies(moved, s.device))]

    def verify() -> float:
        pairs = list(zip(add_rms_norm(*inputs[0]), add_rms_norm_ref(*inputs[0]), strict=True))
        check("add_rms_norm sum", *pairs[0], 0)
        return check("add_rms_norm", *pairs[1], ROUNDING)

    return Case(
        lambda x: add_rms_norm(*x), inputs, verify, moved, torch=lambda x: add_rms_norm_ref(*x)
    )  # fmt: skip


def silu_case(s: Setup, T: int) -> Case:
    from hybridkv.kernels.activation import silu_mul, silu_mul_ref

    width = s.shape.config.intermediate
    moved = 3 * T * width * s.shape.dtype.itemsize
    inputs = [s.randn(T, 2 * width) for _ in range(copies(moved, s.device))]
    return Case(
        silu_mul, inputs, lambda: check("silu_mul", silu_mul(inputs[0]), silu_mul_ref(inputs[0]), ROUNDING),
        moved, torch=silu_mul_ref,
    )  # fmt: skip
