"""linear_rows: which program has which part of a matrix, when the kernel is taken, and that it compiles without a GPU.
What it computes is tested on one: tests/gpu.
"""

import pytest
import torch
from numerics import assert_close_rms
from own_process import compile_alone

from hybridkv.kernels.linear import skinny as file
from hybridkv.kernels.linear.linear import Linear
from hybridkv.kernels.linear.skinny import divide, linear_rows, suits_rows


@pytest.mark.parametrize("processors", [1, 5, 132, 300])
def test_every_step_of_every_tile_has_one_program(processors: int) -> None:
    """As the kernel finds its own: whole tiles, then a share of one that is left."""
    for tiles in (1, 2, 3, 40, 66, 129, 132, 133, 272, 1940):
        for steps in (1, 3, 80, 400):
            found: dict[int, list[int]] = {}
            P, whole, shared, sharers = division = divide(tiles, steps, processors)
            assert 0 < P <= processors and 0 < division.busy(processors) <= 1 and sharers <= file.MAX_SHARERS
            for i_p in range(P):
                i_shared, i_m = divmod(i_p, sharers)
                if i_shared < shared:
                    mine = range(i_m * steps // sharers, (i_m + 1) * steps // sharers)
                    assert mine, "each program that shares a tile leaves a part of it"
                    found.setdefault(whole * P + i_shared, []).extend(mine)
                for i in range(whole):
                    found.setdefault(i * P + i_p, []).extend(range(steps))
            assert sorted(found) == [*range(tiles)]
            assert all(sorted(part) == [*range(steps)] for part in found.values())


def test_without_the_kernel_it_is_the_product() -> None:
    x, weight, bias = torch.randn(9, 64).bfloat16(), torch.randn(16, 64).bfloat16(), torch.randn(16).bfloat16()
    want = x.double() @ weight.double().T + bias.double()
    assert_close_rms("product", want, linear_rows(x, weight, bias), 2.5e-3)  # one rounding of the result, 2^-9


def test_it_is_taken_where_it_was_measured_to_be_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file, "sm_count", lambda device: 132)
    x = torch.zeros(65, 5120, dtype=torch.bfloat16, device="meta")

    def weight(N: int, K: int = 5120) -> torch.Tensor:
        return torch.empty(N, K, dtype=torch.bfloat16, device="meta")

    assert not suits_rows(x[:9], weight(16480))
    monkeypatch.setattr(file, "has_gluon", lambda device: True)
    monkeypatch.setattr(torch.Tensor, "data_ptr", lambda self: 0)  # of meta tensors
    assert [suits_rows(x[:n], weight(16480)) for n in (0, 8, 9, 64, 65)] == [False, False, True, True, False]
    assert [suits_rows(x[:n], weight(34816)) for n in (9, 32, 33, 64)] == [False, False, True, True]
    assert [suits_rows(x[:64], weight(N)) for N in (14336, 5120)] == [False, False]
    assert not suits_rows(x[:16], weight(17408)), "33 programs would share each of four tiles"
    assert suits_rows(x.new_empty(9, 17408), weight(5120, 17408)) and not suits_rows(x[:9], weight(14700, 5120))
    assert not suits_rows(x.new_empty(9, 5121)[:, 1:], weight(16480)) and not suits_rows(x[:9].float(), weight(16480))


def test_a_layer_takes_it_unless_it_is_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    from hybridkv.kernels.linear import linear

    taken: list[bool] = []
    monkeypatch.setattr(linear, "suits_rows", lambda x, weight: True)
    monkeypatch.setattr(
        linear, "linear_rows", lambda *args, gated=False: taken.append(gated) or linear_rows(*args, gated)
    )
    x, weight = torch.randn(9, 64).double(), torch.randn(16, 64).double()  # which no layer packs
    for exact in (False, True):
        layer = Linear(weight, exact=exact)
        gate, up = (x @ weight.T).chunk(2, -1)
        assert_close_rms("product", x @ weight.T, layer(x), 1e-6)
        assert_close_rms("gated", torch.nn.functional.silu(gate) * up, layer.gated(x), 1e-6)
        assert taken == [False, True], "by the layer that is not exact alone"


COMPILE = """
import torch
import triton
from no_device import SHARED_MEMORY, built
from hybridkv.kernels.linear import skinny as file
from hybridkv.kernels.backend import GLUON

assert triton.__version__.startswith(GLUON), "another Triton than linear_rows_hopper is written for"
file.sm_count = lambda device: 132
for T in (9, 64):
    x = torch.zeros(T, 256, dtype=torch.bfloat16)
    file.linear_rows_hopper(x, torch.zeros(2 * 17408, 256, dtype=torch.bfloat16), gated=True)
    file.linear_rows_hopper(x, torch.zeros(5120, 256, dtype=torch.bfloat16), torch.zeros(5120, dtype=torch.bfloat16))
    file.linear_rows_hopper(x, torch.zeros(16480, 256, dtype=torch.bfloat16))
for name, kernel in built:
    assert kernel.metadata.shared <= SHARED_MEMORY
    ptx = kernel.asm["ptx"]
    print(ptx.count("wgmma.mma_async"), ptx.count("acq_rel.add"), "ld.global.gpu.acquire" in ptx, ".local" in ptx)
"""


def test_it_compiles() -> None:
    """In a process without the interpreter, which would take the place of the compiler."""
    pytest.importorskip("triton", minversion="3.6")
    printed = compile_alone(COMPILE)
    kernels = [line.split() for line in printed.splitlines()]
    # two halves, steps of 16 columns; where tiles are shared, a loop for whole ones and one for shares
    assert all(int(count) % 8 == 0 for count, *_ in kernels)
    assert [shares for _, _, shares, _ in kernels] == ["True", "True", "False"] * 2
    assert [int(adds) > 0 for _, adds, *_ in kernels] == [True, True, False] * 2
    assert all(local == "False" for *_, local in kernels), "registers were spilled"
