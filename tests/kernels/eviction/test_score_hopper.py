"""score_hopper compiles where there is no GPU. What it computes is tested on one: tests/gpu."""

import pytest
from long_form import LONG
from own_process import compile_alone

pytest.importorskip("triton", minversion="3.6")

SHARED_MEMORY = 227 * 1024  # bytes that a program may have on a Hopper GPU
COMPILE = """
import triton
from long_form import more
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource

from hybridkv.kernels.backend import GLUON
from hybridkv.kernels.eviction.score import key_tiles
from hybridkv.kernels.eviction.score_hopper import WARPS
from hybridkv.kernels.eviction.score_hopper import score_known_hopper_kernel as kernel

assert triton.__version__.startswith(GLUON), "another Triton than score_hopper is written for"
NAMES = kernel.arg_names
TYPES = dict(q="*bf16", when="*i64", table="*i32", positions="*i64", scale="fp32", log2_e="fp32")
TYPES |= dict.fromkeys(("k_scale", "lse", "out"), "*fp32")
SHAPES = ((False, 6, 256, False), (True, 6, 256, True), *more((True, 12, 128, False), (False, 3, 256, True)))
for fp8, R, D, peak in SHAPES:
    types = TYPES | {"k_pool": "*u8" if fp8 else "*bf16"}
    tiles = key_tiles(R, D)
    assert tiles > 0
    fixed = dict(R=R, D=D, P=64, TILES=tiles, FP8=fp8, PEAK=peak, RAISE=fp8, stride_tn=1, stride_pl=1, stride_lh=1)
    signature = {name: "constexpr" if name in fixed else types.get(name, "i32") for name in NAMES}
    at = {name: (i,) for i, name in enumerate(NAMES)}
    wide = {"stride_qw", "stride_qh", *(name for name, type_ in signature.items() if type_[0] == "*")}
    aligned = {at[name]: [["tt.divisibility", 16]] for name in wide}
    source = GluonASTSource(kernel, signature, {at[name]: value for name, value in fixed.items()}, aligned)
    built = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": WARPS})
    ptx = built.asm["ptx"]
    print(R, R * D, built.metadata.shared, ptx.count("wgmma.mma_async"), ptx.count("ex2.approx"), int(peak))
"""


@pytest.mark.long
def test_it_compiles_for_keys_of_both_kinds_and_both_scores() -> None:
    """In a process without the interpreter, which would take the place of the compiler."""
    printed = compile_alone(COMPILE)
    lines = [[int(x) for x in line.split()] for line in printed.splitlines()]
    assert len(lines) == (4 if LONG else 2)
    for heads, channels, shared, products, powers, peak in lines:
        assert 0 < shared <= SHARED_MEMORY
        assert products == 2 * channels // 16  # two workers, each with every head's products in steps of 16 channels
        # a thread of either worker has 32 scores of a head, of 2 keys
        assert powers == 2 * (2 if peak else 32 * heads)
