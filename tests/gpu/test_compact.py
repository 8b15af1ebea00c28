"""compact on the GPU: the public function runs the kernel, on the entries of a long prompt."""

from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from numerics import assert_same_bytes

from gpu.page_pools import KINDS, G, P, pool
from hybridkv.kernels.eviction import compact as compact_file
from hybridkv.kernels.eviction.compact import compact, compact_ref
from hybridkv.kernels.formats.fp8 import Fp8Pages

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("on_the_gpu")]


@pytest.mark.parametrize("kind", KINDS)
def test_compaction_of_a_long_prompt_moves_the_reference_bytes(
    kind: str, count: Callable[[ModuleType, str], list[str]]
) -> None:
    L, keep = 16384, 2048
    order = torch.randperm(G * L // P).view(G, -1)
    source, target = [], []
    for g in range(G):
        entry = torch.randperm(L)[:keep].sort().values
        source.append(order[g][entry // P] * P + entry % P)
        target.append(order[g][torch.arange(keep) // P] * P + torch.arange(keep) % P)
    calls, pages = count(compact_file, "compact_triton"), pool(kind, G * L // P)
    tensors = list(pages) if isinstance(pages, Fp8Pages) else [pages]
    wanted = [t.clone() for t in tensors]
    compact(tensors, torch.cat(source), torch.cat(target))
    for want, t in zip(wanted, tensors):
        compact_ref(want, torch.cat(source), torch.cat(target))
        assert_same_bytes(want, t)
    assert len(calls) == 1
