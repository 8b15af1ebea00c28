"""key_differences against the definition in float64, over tiles and blocks of streams, whatever lies past the ends."""

import pytest
import torch

from eviction.layer_cache import make
from hybridkv.kernels.eviction import key_difference
from hybridkv.kernels.eviction.key_difference import key_differences


@pytest.mark.parametrize("dtype", ("f32", "bf16", "fp8"))
@pytest.mark.parametrize("tile", (7, 16, 1024))
@pytest.mark.parametrize("blocks", (1, 1 << 20))
def test_every_key_against_the_mean_direction(
    dtype: str, tile: int, blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(key_difference, "TILE", tile)
    monkeypatch.setattr(key_difference, "BYTES", blocks)  # one stream at a time, or all of them
    dense = make(lengths=[33, 9, 50], position=70, dtype=dtype)
    got = key_differences(dense.cache.k_pool, dense.cache.table, dense.cache.positions)
    assert got.shape == dense.cache.positions.shape
    for g, keys in enumerate(dense.keys):
        unit = keys.double() / keys.double().norm(dim=-1, keepdim=True)
        mean = unit.mean(0)
        want = -(unit @ mean) / mean.norm()
        assert torch.allclose(got[g, : len(keys)].double(), want, rtol=1e-4, atol=1e-5)  # f32 sums of 50 keys


def test_streams_beside_it_do_not_change_a_bit() -> None:
    dense = make(lengths=[40, 40, 40])
    cache = dense.cache
    together = key_differences(cache.k_pool, cache.table, cache.positions)
    alone = [key_differences(cache.k_pool, cache.table[g : g + 1], cache.positions[g : g + 1]) for g in range(3)]
    assert torch.equal(together, torch.cat(alone))


def test_no_entry_and_no_stream() -> None:
    cache = make(lengths=[5, 5]).cache
    assert key_differences(cache.k_pool, cache.table, cache.positions[:, :0]).shape == (2, 0)
    assert key_differences(cache.k_pool, cache.table[:0], cache.positions[:0]).shape == (0, 5)
