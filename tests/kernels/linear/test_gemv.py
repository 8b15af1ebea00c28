"""The product of few rows: the kernel against float64, every code of FP8, and the sizes that a decode step has."""

import pytest
import torch
import torch.nn.functional as F
from numerics import assert_close_rms, assert_same_bytes
from own_process import compile_alone
from torch import Tensor
from triton_interpreter import DEVICE

from hybridkv.kernels.formats.fp8 import fp8_decode_ref
from hybridkv.kernels.linear import gemv as file
from hybridkv.kernels.linear.fp8 import encode_weight
from hybridkv.kernels.linear.gemv import linear_vector_ref, linear_vector_triton

pytest.importorskip("triton")
BOUND = 2.5e-3  # one rounding of the result to bf16, 2^-9 at most
GATED_BOUND = 3e-3  # the same, of a product of two sums


def dense(x: Tensor, weight: Tensor, bias: Tensor | None, gated: bool) -> Tensor:
    y = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    if not gated:
        return y
    gate, up = y.chunk(2, -1)
    return F.silu(gate) * up


@pytest.mark.parametrize("codes", [False, True])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(
    ("T", "N", "K", "bias"), [(1, 33, 264, True), (3, 16, 64, False), (8, 40, 513, False), (16, 7, 300, True)]
)
def test_the_product_of_few_rows(T: int, N: int, K: int, bias: bool, gated: bool, codes: bool) -> None:
    rows = 2 * N if gated else N
    x = torch.randn(T, K + 9, device=DEVICE).bfloat16()[:, 4 : 4 + K]  # a slice of a wider row
    weight = (torch.randn(rows, K, device=DEVICE) / K**0.5).bfloat16()
    added = torch.randn(rows, device=DEVICE).bfloat16() if bias else None
    given, scale = encode_weight(weight) if codes else (weight, None)
    want = dense(x, weight if scale is None else fp8_decode_ref(given, scale), added, gated)
    for op in (linear_vector_triton, linear_vector_ref):
        got = op(x, given, scale, added, gated)
        assert got.dtype == torch.bfloat16 and got.shape == (T, N)
        assert_close_rms(op.__name__, want, got, GATED_BOUND if gated else BOUND)


def test_every_code_is_widened_to_its_number() -> None:
    """With rows of the unit matrix for x, the result is the code's number."""
    codes = torch.arange(256, dtype=torch.uint8, device=DEVICE).repeat(3, 1)
    want = codes[0].view(torch.float8_e4m3fn).to(torch.bfloat16)
    codes[:, want.isnan()] = 0  # NaN stands in the scale instead
    want[want.isnan()] = 0
    one = torch.eye(256, dtype=torch.bfloat16, device=DEVICE)
    got = torch.cat(
        [linear_vector_triton(one[a : a + 16], codes, torch.ones(3, device=DEVICE)) for a in range(0, 256, 16)]
    )
    assert_same_bytes(got.abs(), want.abs().unsqueeze(1).expand(256, 3).contiguous())  # a sum with +0 has no -0
    assert torch.equal(got, want.unsqueeze(1).expand(256, 3))


def test_a_row_does_not_see_its_neighbours() -> None:
    """NaN in one row of x, and past the end of x and W."""
    x, weight = torch.randn(5, 96, device=DEVICE).bfloat16(), torch.randn(20, 96, device=DEVICE).bfloat16()
    x[3] = torch.nan
    got = linear_vector_triton(x, weight)
    assert got[3].isnan().all()
    keep = [0, 1, 2, 4]
    assert_close_rms("others", dense(x[keep], weight, None, False), got[keep], BOUND)


def test_no_rows() -> None:
    assert linear_vector_triton(
        torch.empty(0, 64, device=DEVICE).bfloat16(), torch.ones(8, 64, device=DEVICE).bfloat16()
    ).shape == (0, 8)


def test_the_library_has_the_product_where_the_kernel_does_not_pay() -> None:
    x, weight = torch.randn(1, 64), torch.randn(8, 64)
    assert not file.suits_vector(x, weight) and not file.suits_vector(x.bfloat16(), weight.bfloat16())


def test_more_rows_where_the_library_needs_two_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file, "has_kernel", lambda device: True)
    x, square, long = (torch.zeros(n, k, dtype=torch.bfloat16) for n, k in ((16, 64), (64, 64), (56, 64)))
    assert [file.suits_vector(x[:n], square) for n in (0, 1, 8, 9)] == [False, True, True, False]
    for case in ((square, True), (long, False)):
        assert [file.suits_vector(x.repeat(2, 1)[:n], *case) for n in (0, 9, 16, 17)] == [False, True, True, False]


@pytest.mark.parametrize(
    ("N", "K", "gated", "few", "many"),  # as bf16; the fastest with 1 and with 16 rows of x, or within 4 % of it
    [
        (34816, 5120, True, (16, 128, 2, 4), (16, 128, 2, 4)),
        (17408, 5120, True, (16, 128, 2, 4), (16, 128, 2, 4)),  # of 2 ranks
        (8704, 5120, True, (16, 128, 2, 3), (16, 128, 2, 3)),
        (4352, 5120, True, (16, 128, 2, 4), (16, 128, 2, 4)),
        (8240, 5120, False, (32, 128, 2, 4), (16, 128, 2, 3)),
        (5120, 8704, False, (16, 128, 4, 3), (16, 128, 4, 3)),
        (4120, 5120, False, (16, 64, 4, 5), (16, 128, 4, 3)),
        (3584, 5120, False, (16, 64, 4, 5), (16, 128, 4, 3)),
        (2560, 4096, False, (16, 128, 4, 5), (16, 128, 4, 3)),
        (18432, 2560, True, (16, 128, 2, 3), (16, 128, 2, 4)),  # of a 4B
        (10240, 2560, False, (16, 128, 2, 3), (16, 128, 2, 3)),
        (8224, 1024, False, (16, 128, 1, 6), (16, 128, 1, 6)),  # of a 0.8B
        (2060, 5120, False, (16, 128, 4, 6), (16, 128, 4, 5)),
        (5120, 768, False, (16, 128, 1, 8), (16, 128, 1, 6)),
    ],
)
def test_tiles_are_those_measured(N: int, K: int, gated: bool, few: tuple[int, ...], many: tuple[int, ...]) -> None:
    rows = N // (1 + gated)
    assert file.tile(rows, K, False, gated, many=False, room=True) == few
    assert file.tile(rows, K, False, gated, many=True, room=True) == many


@pytest.mark.parametrize(
    ("N", "K", "gated", "few", "many"),  # as codes, likewise
    [
        (34816, 5120, True, (16, 128, 2, 2), (16, 128, 4, 3)),
        (17408, 5120, True, (16, 128, 2, 3), (16, 128, 2, 3)),
        (8704, 5120, True, (16, 128, 4, 3), (16, 128, 4, 3)),
        (4352, 5120, True, (16, 128, 2, 4), (16, 128, 4, 3)),
        (16480, 5120, False, (16, 128, 2, 3), (32, 128, 2, 4)),
        (8240, 5120, False, (16, 128, 2, 4), (16, 256, 2, 3)),
        (5120, 17408, False, (16, 128, 4, 4), (16, 128, 4, 3)),
        (5120, 1536, False, (16, 128, 2, 4), (16, 128, 2, 3)),
        (4120, 5120, False, (16, 256, 2, 6), (16, 256, 4, 3)),
        (2060, 5120, False, (16, 256, 4, 6), (16, 256, 4, 4)),
    ],
)
def test_tiles_of_codes_are_those_measured(
    N: int, K: int, gated: bool, few: tuple[int, ...], many: tuple[int, ...]
) -> None:
    rows = N // (1 + gated)
    assert file.tile(rows, K, True, gated, many=False, room=True) == few
    assert file.tile(rows, K, True, gated, many=True, room=True) == many


SHARED_MEMORY = 227 * 1024
COMPILE = """
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction


class Nothing:
    def __getattr__(self, name):
        return lambda *args, **more: (0,) * 8


class NoDevice:
    utils, launcher_cls = Nothing(), None
    get_current_target = lambda self: GPUTarget("cuda", 90, 32)
    get_current_device = lambda self: 0
    get_current_stream = lambda self, device=0: 0
    get_active_torch_device = lambda self: torch.device("cpu")
    map_python_to_cpp_type = lambda self, name: "x"


driver.set_active(NoDevice())
run = JITFunction.run


def compile_only(self, *args, grid, warmup, **more):
    built = run(self, *args, grid=grid, warmup=True, **more)
    waits = built.asm["ptx"].index("griddepcontrol.wait") < built.asm["ptx"].index("cp.async")
    print(built.metadata.shared, waits, "local" in built.asm["ptx"])


JITFunction.run = compile_only
from hybridkv.kernels.linear.gemv import linear_vector_triton

SHAPES = ((14336, 5120, 0), (5120, 6144, 0), (34816, 5120, 1))
for N, K, gated in SHAPES:
    x = torch.zeros(1, K, dtype=torch.bfloat16)
    linear_vector_triton(x, torch.empty(N, K, dtype=torch.bfloat16), gated=bool(gated))
    linear_vector_triton(x, torch.empty(N, K, dtype=torch.uint8), torch.empty(N), gated=bool(gated))
for n in (2, 4, 8):  # and a rank of so many
    for N, K, gated in ((16480 // n, 5120, 0), (5120, 6144 // n, 0), (34816 // n, 5120, 1), (5120, 17408 // n, 0)):
        for T in (1, 16):
            x = torch.zeros(T, K, dtype=torch.bfloat16)
            linear_vector_triton(x, torch.empty(N, K, dtype=torch.bfloat16), gated=bool(gated))
            linear_vector_triton(x, torch.empty(N, K, dtype=torch.uint8), torch.empty(N), gated=bool(gated))
"""


def test_the_tiles_of_a_27b_decode_step_compile_for_hopper_and_fit() -> None:
    """In a process without the interpreter. Nothing is read before the kernel before has ended, and nothing spills."""
    printed = compile_alone(COMPILE)
    built = [line.split() for line in printed.splitlines()]
    assert len(built) == 6 + 48
    assert all(int(shared) <= SHARED_MEMORY and rest == ["True", "False"] for shared, *rest in built), built


FOR_99_KIB = """
import torch
from no_device import built
from hybridkv.kernels.linear import gemv

gemv.shared_memory = lambda device: 99 * 1024
for N, K in ((1024, 5120), (5120, 640), (8240, 5120), (16480, 5120)):
    for gated in (False, True):
        x = torch.zeros(16, K, dtype=torch.bfloat16)
        rows = 2 * N if gated else N
        gemv.linear_vector_triton(x, torch.empty(rows, K, dtype=torch.bfloat16), gated=gated)
        gemv.linear_vector_triton(x, torch.empty(rows, K, dtype=torch.uint8), torch.empty(rows), gated=gated)
print(*(kernel.metadata.shared for _, kernel in built))
"""


def test_the_tiles_fit_a_blackwell_card_with_99_kib_of_shared_memory() -> None:
    """RTX 50 cards have PDL, and so this kernel; with as many rows of x as it takes."""
    shared = compile_alone(FOR_99_KIB, COMPILE_FOR="120").split()
    assert len(shared) == 16 and max(map(int, shared)) <= 99 * 1024, shared
