"""key_differences against the definition in float64, torch and Triton, over tiles and blocks of streams, whatever lies
past the ends.
"""

import pytest
import torch
from long_form import few

from eviction.layer_cache import make
from hybridkv.eviction import LayerCache
from hybridkv.kernels.eviction import key_difference
from hybridkv.kernels.formats.kv_format import Pages


def of(cache: LayerCache) -> tuple[Pages, torch.Tensor, torch.Tensor, int]:
    return cache.k_pool, cache.table, cache.device_lengths, cache.positions.shape[1]


@pytest.mark.long
@few("dtype, tile", ("f32", "bf16", "fp8"), (7, 16, 1024))
@pytest.mark.parametrize("blocks", (1, 1 << 20))
@pytest.mark.parametrize("form", ("ref", "triton"))
def test_every_key_against_the_mean_direction(
    dtype: str, tile: int, blocks: int, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(key_difference, "TILE", tile)
    monkeypatch.setattr(key_difference, "CHUNK", min(16, 1 << (tile.bit_length() - 1)))
    monkeypatch.setattr(key_difference, "SUMS", 2)
    monkeypatch.setattr(key_difference, "NUMBERS", blocks // 8192)  # 1 or 16 keys of 8 numbers
    monkeypatch.setattr(key_difference, "BYTES", blocks)  # one stream at a time, or all of them
    dense = make(lengths=[33, 9, 50], position=70, dtype=dtype)
    find = getattr(key_difference, f"key_differences_{form}")
    got = find(*of(dense.cache))
    assert got.shape == dense.cache.positions.shape
    for g, keys in enumerate(dense.keys):
        unit = keys.double() / keys.double().norm(dim=-1, keepdim=True)
        mean = unit.mean(0)
        want = -(unit @ mean) / mean.norm()
        assert torch.allclose(got[g, : len(keys)].double(), want, rtol=1e-4, atol=1e-5)  # f32 sums of 50 keys


@pytest.mark.parametrize("form", ("ref", "triton"))
def test_streams_beside_it_and_pages_do_not_change_a_bit(form: str) -> None:
    find = getattr(key_difference, f"key_differences_{form}")
    cache = make(lengths=[40, 40, 40]).cache
    together = find(*of(cache))
    alone = [find(cache.k_pool, cache.table[g : g + 1], cache.device_lengths[g : g + 1], 40) for g in range(3)]
    assert torch.equal(together, torch.cat(alone))
    wide = make(lengths=[40, 40, 40], page=16).cache  # the same numbers in other pages
    assert torch.equal(together, find(*of(wide)))


@pytest.mark.parametrize("form", ("ref", "triton"))
def test_a_key_of_nothing_and_one_that_is_nan(form: str) -> None:
    find, cache = getattr(key_difference, f"key_differences_{form}"), make(lengths=[9, 9]).cache
    assert isinstance(cache.k_pool, torch.Tensor)
    page, row = int(cache.table[0, 1]), 2
    cache.k_pool[page, row] = 0
    found = find(*of(cache))
    assert found[0, 6] == 0 and not found.isnan().any()  # it points nowhere
    cache.k_pool[page, row, 3] = torch.nan
    found = find(*of(cache))
    assert found[0].isnan().all() and not found[1].isnan().any()


@pytest.mark.parametrize("form", ("ref", "triton"))
def test_no_entry_and_no_stream(form: str) -> None:
    find, cache = getattr(key_difference, f"key_differences_{form}"), make(lengths=[5, 5]).cache
    assert find(cache.k_pool, cache.table, cache.device_lengths, 0).shape == (2, 0)
    assert find(cache.k_pool, cache.table[:0], cache.device_lengths[:0], 5).shape == (0, 5)
