"""append on the GPU: the public function runs the kernel, at real sizes and in a captured graph."""

from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from torch import Tensor

from gpu.page_pools import KINDS, D, G, P, copy, pool, same
from hybridkv.kernels.attention import append as append_file
from hybridkv.kernels.attention.append import append, append_ref

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("on_the_gpu")]


def wide_kv(T: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """k and v as slices of one projection."""
    qkv = torch.randn(T, 24 + 2 * G, D).to(dtype)
    return qkv[:, 24 : 24 + G], qkv[:, 24 + G :]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=("f32-in", "bf16-in"))
@pytest.mark.parametrize("T", (1, 64, 4099))
def test_append_stores_the_reference_bytes(
    kind: str, dtype: torch.dtype, T: int, count: Callable[[ModuleType, str], list[str]]
) -> None:
    N = -(-T * G // P) + 3
    k, v = wide_kv(T, dtype)
    index = torch.randperm(N * P)[: T * G].view(G, T)
    index[:, ::7] = -1
    k[::7], v[::7] = torch.nan, torch.inf
    before = pool(kind, N), pool(kind, N)
    want = copy(before[0]), copy(before[1])
    append_ref(*want, k, v, index)
    calls, got = count(append_file, "append_triton"), (copy(before[0]), copy(before[1]))
    append(*got, k, v, index)
    assert calls == ["append_triton"]
    same(want[0], got[0])
    same(want[1], got[1])


def test_a_captured_append_skips_the_rows_that_are_padding_at_replay() -> None:
    T, N = 8, 4
    k, v = wide_kv(T, torch.bfloat16)
    pools = pool("fp8", N), pool("fp8", N)
    index = torch.full((G, T), -1)
    before = copy(pools[0])
    append(*pools, k, v, index)  # compiled before the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        append(*pools, k, v, index)
    same(before, pools[0])
    index[:, :3] = torch.randperm(N * P)[: G * 3].view(G, 3)
    want = copy(pools[0]), copy(pools[1])
    append_ref(*want, k, v, index)
    graph.replay()
    same(want[0], pools[0])
    same(want[1], pools[1])
