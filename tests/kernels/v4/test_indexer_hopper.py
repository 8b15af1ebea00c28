"""indexer_hopper compiles where there is no GPU. What it computes is tested on one: tests/gpu."""

import pytest
from own_process import compile_alone

pytest.importorskip("triton", minversion="3.6")

COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource

from hybridkv.kernels.backend import GLUON
from hybridkv.kernels.gluon import gl
from hybridkv.kernels.v4.indexer_hopper import PAGE, REGISTERS, WARPS
from hybridkv.kernels.v4.indexer_hopper import decode_logits_hopper_kernel as kernel

assert triton.__version__.startswith(GLUON), "another Triton than indexer_hopper is written for"
NAMES = kernel.arg_names
for W, P in ((32, 32), (16, 96)):
    fixed = dict(RATIO=4, P=P, W=W)
    types = dict(q="*bf16", weights="*fp32", table="*i32", out="*fp32")
    types |= dict.fromkeys(("slots", "owner", "positions"), "*i64")
    types["codes"] = f"tensordesc<i32[{PAGE}, {W}],{gl.NVMMASharedLayout(4 * W, 32, 2)!r}>"
    types["factors"] = f"tensordesc<i32[1, 32],{gl.NVMMASharedLayout(0, 32, 2)!r}>"
    signature = {name: "constexpr" if name in fixed else types.get(name, "i32") for name in NAMES}
    at = {name: (i,) for i, name in enumerate(NAMES)}
    aligned = {at[name]: [["tt.divisibility", 16]] for name, type_ in signature.items() if type_[0] == "*"}
    source = GluonASTSource(kernel, signature, {at[name]: value for name, value in fixed.items()}, aligned)
    options = {"num_warps": WARPS, "maxnreg": REGISTERS}
    built = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    ptx = built.asm["ptx"]
    tensor = ptx.count("cp.async.bulk.tensor")
    print(built.metadata.shared, ptx.count("wgmma.mma_async"), tensor, ptx.count("st.local"), ptx.count("ld.shared.v4"))
"""


def test_it_compiles_for_both_formats() -> None:
    """In a process without the interpreter, which would take the place of the compiler."""
    printed = compile_alone(COMPILE)
    fp8, fp4 = ([int(x) for x in line.split()] for line in printed.splitlines())
    for shared, products, copies, spilled, _ in (fp8, fp4):
        assert 2 * (shared + 1024) <= 227 * 1024  # two programs share a multiprocessor
        assert (products, copies, spilled) == (2 * 128 // 16, 4 * 2, 0)  # two halves; four boxes of codes and scales
    assert fp8[4] - fp4[4] == 4  # a tile's codes are read by 16 bytes: eight times a thread, or four
