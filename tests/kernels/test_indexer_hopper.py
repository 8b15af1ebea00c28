"""indexer_hopper compiles where there is no GPU. What it computes is tested on one: tests/gpu."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", minversion="3.6")

COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource

from hybridkv.kernels.backend import GLUON
from hybridkv.kernels.indexer_hopper import WARPS
from hybridkv.kernels.indexer_hopper import decode_logits_hopper_kernel as kernel

assert triton.__version__.startswith(GLUON), "another Triton than indexer_hopper is written for"
NAMES = kernel.arg_names
for P in (32, 1):
    fixed = dict(RATIO=4, P=P)
    types = dict(q="*bf16", weights="*fp32", keys="*u8", table="*i32", out="*fp32")
    types |= dict.fromkeys(("slots", "owner", "positions"), "*i64")
    signature = {name: "constexpr" if name in fixed else types.get(name, "i32") for name in NAMES}
    at = {name: (i,) for i, name in enumerate(NAMES)}
    aligned = {at[name]: [["tt.divisibility", 16]] for name, type_ in signature.items() if type_[0] == "*"}
    source = GluonASTSource(kernel, signature, {at[name]: value for name, value in fixed.items()}, aligned)
    built = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": WARPS})
    ptx = built.asm["ptx"]
    print(built.metadata.shared, ptx.count("wgmma.mma_async"), ptx.count("ld.global.v4.b32"))
"""


def test_it_compiles_for_pages_of_any_size(tmp_path: Path) -> None:
    """In a process without the interpreter, which would take the place of the compiler."""
    env = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    env.pop("TRITON_INTERPRET", None)
    done = subprocess.run([sys.executable, "-c", COMPILE], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    whole, single = ([int(x) for x in line.split()] for line in done.stdout.splitlines())
    assert whole[:2] == single[:2] == [64 * 128 * 2, 128 // 16]  # queries in f16; steps of 16 channels
    assert whole[2] > single[2] == 0  # pages of one key begin at any fourth byte: their codes are read by fours
