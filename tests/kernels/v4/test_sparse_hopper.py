"""sparse_hopper.py compiles where there is no GPU. What it computes is tested on one: tests/gpu."""

import pytest
from long_form import more
from own_process import compile_alone

pytest.importorskip("triton", minversion="3.6")

SHARED_MEMORY = 227 * 1024  # bytes that a program may have on a Hopper GPU
COMPILE = """
import triton
from long_form import more
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource

from hybridkv.kernels.v4.sparse import HOPPER_SHAPE
from hybridkv.kernels.backend import GLUON
from hybridkv.kernels.v4.sparse_hopper import attention_hopper_kernel as kernel
from hybridkv.kernels.formats.page_layout import entry_format

assert triton.__version__.startswith(GLUON), "another Triton than sparse_hopper.py is written for"
NAMES = kernel.arg_names
CASES = (
    ("bf16", True, True, False, 64),
    ("fp8", True, False, True, 16),
    *more(("fp8_entry", False, False, False, 64), ("fp8", True, True, False, 64)),
)
for kind, entries, chosen, split, heads in CASES:
    fmt = entry_format(kind, 512, 64)
    held = "*bf16" if fmt.plain else "*u8"
    types = dict(q="*bf16", ring=held, pages=held, table="*i32", chosen="*i32", out="*bf16", scale="fp32")
    types |= dict.fromkeys(("rows", "slots", "owner", "positions"), "*i64")
    types |= dict.fromkeys(("sink", "cos", "sin", "part", "lse"), "*fp32")
    fixed = dict(
        WINDOW=128, RATIO=4, R=135, P=32, VALUE=fmt.width if fmt.plain else fmt.value_bytes, SCALE=fmt.scale_bytes,
        QUANTISED=not fmt.plain, E8M0=kind == "fp8", ENTRIES=entries, CHOSEN=chosen, SPLIT=split,
        OVERLAP=split, EARLY=split, HEADS=heads,
    )
    absent = {"table": entries, "chosen": chosen, "part": split, "lse": split}
    fixed |= {name: None for name, there in absent.items() if not there}
    signature = {name: "constexpr" if name in fixed else types.get(name, "i32") for name in NAMES}
    at = {name: (i,) for i, name in enumerate(NAMES)}
    aligned = {at[name]: [["tt.divisibility", 16]] for name, type_ in signature.items() if type_[0] == "*"}
    source = GluonASTSource(kernel, signature, {at[name]: value for name, value in fixed.items()}, aligned)
    built = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": HOPPER_SHAPE.warps})
    counts = [built.asm["ptx"].count(name) for name in ("wgmma.mma_async", "setmaxnreg", "griddepcontrol")]
    print(kind, built.metadata.shared, *counts)
"""


@pytest.mark.long
def test_it_compiles_in_every_format() -> None:
    """In a process without the interpreter, which would take the place of the compiler."""
    printed = compile_alone(COMPILE)
    lines = [line.split() for line in printed.splitlines()]
    assert [kind for kind, *_ in lines] == ["bf16", "fp8", *more("fp8_entry", "fp8")]
    for number, (_, shared, products, registers, waits) in enumerate(lines):
        assert 0 < int(shared) <= SHARED_MEMORY
        # steps of 16: channels of S = q K^T; keys of O += P K, for each 128 channels
        assert int(products) == 512 // 16 + 512 // 128 * 64 // 16
        assert int(registers) > 0  # dropped where those asked for are more than there are
        assert int(waits) == (2 if number == 1 else 0)
