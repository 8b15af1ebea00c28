"""KV_FORMATS: every row says how its entries are stored, and everything that asks it gets the same answer."""

import pytest
import torch
from torch import Tensor

from hybridkv.cache import TensorSpec
from hybridkv.config import KV_DTYPES
from hybridkv.errors import HybridKVError
from hybridkv.kernels.attention.append import append_ref
from hybridkv.kernels.attention.launch import dot_dtype, kernel_pages
from hybridkv.kernels.attention.tile import read_pages
from hybridkv.kernels.formats import kv_format as file
from hybridkv.kernels.formats.kv_format import KV_FORMATS, KVFormat, format_of, kv_format, pages_of, pool_format

N, P, D = 3, 8, 48
FORMATS = pytest.mark.parametrize("fmt", KV_FORMATS.values(), ids=KV_FORMATS)


def pool(fmt: KVFormat) -> dict[str, Tensor]:
    return {name: torch.zeros((N, P, *shape), dtype=dtype) for name, shape, dtype in fmt.tensors(D)}


def test_the_formats_are_those_that_a_cache_can_be_asked_for() -> None:
    assert {name: str(fmt.dtype).removeprefix("torch.") for name, fmt in KV_FORMATS.items()} == KV_DTYPES
    assert all(fmt.name == name for name, fmt in KV_FORMATS.items())


@pytest.mark.parametrize(("name", "nbytes"), (("f32", 8 * D), ("bf16", 4 * D), ("fp8", 2 * (D + 4))))
def test_names_and_bytes_of_an_entry(name: str, nbytes: int) -> None:
    specs = [TensorSpec(*tensor) for tensor in KV_FORMATS[name].tensors(D)]
    assert sum(spec.nbytes for spec in specs) == nbytes
    assert [spec.name for spec in specs] == ["k", "v", "k_scale", "v_scale"][: 4 if name == "fp8" else 2]


@FORMATS
def test_a_format_is_found_from_its_pool_and_from_its_pages(fmt: KVFormat) -> None:
    tensors = pool(fmt)
    assert pool_format(tensors) is fmt and kv_format(fmt.dtype) is fmt
    for name in ("k", "v"):
        pages = pages_of(tensors, name)
        assert format_of(pages) is fmt
        assert [x.data_ptr() for x in file.page_tensors(pages)] == [
            tensors[key].data_ptr() for key in tensors if key.startswith(name)
        ]
    assert pool_format({"entries": torch.zeros(1)}) is None


@FORMATS
def test_what_is_appended_is_what_is_read(fmt: KVFormat) -> None:
    """Bit for bit what `encode` and `decode` say, for keys and for values, at the places asked for."""
    tensors, entries = pool(fmt), torch.randperm(N * P)[:5]
    k, v = torch.randn(5, 1, D), torch.randn(5, 1, D) * 9
    append_ref(pages_of(tensors, "k"), pages_of(tensors, "v"), k, v, entries[None])
    table = torch.arange(N)[None]
    for name, x in (("k", k), ("v", v)):
        got = read_pages(pages_of(tensors, name), table, 0, N * P)[0, entries]
        assert torch.equal(got, fmt.decode(*fmt.encode(x[:, 0])))
        # E4M3 keeps 3 bits of a mantissa, bf16 7
        assert torch.allclose(got.float(), x[:, 0], rtol=1 / 16, atol=0.05)


@FORMATS
def test_kernels_get_the_format_from_the_pages(fmt: KVFormat) -> None:
    tensors = pool(fmt)
    args = kernel_pages(pages_of(tensors, "k"), pages_of(tensors, "v"))
    assert args["FP8"] is fmt.quantised and (args["P"], args["D"]) == (P, D)
    assert args["k_pool"] is tensors["k"] and args["v_pool"] is tensors["v"]
    assert args["k_scale"] is tensors.get("k_scale") and args["v_scale"] is tensors.get("v_scale")
    # 16-bit products only where they hold every stored value
    wanted = torch.bfloat16 if fmt.name in ("bf16", "fp8") else torch.float32
    assert dot_dtype(torch.zeros(1, dtype=torch.bfloat16), pages_of(tensors, "k")) == wanted
    assert dot_dtype(torch.zeros(1), pages_of(tensors, "k")) == torch.float32


def test_keys_and_values_of_two_formats_are_refused() -> None:
    k, v = (pages_of(pool(KV_FORMATS[name]), "k") for name in ("bf16", "fp8"))
    with pytest.raises(AssertionError):
        kernel_pages(k, v)


def test_a_dtype_without_a_format_is_refused_by_name() -> None:
    with pytest.raises(HybridKVError, match="cannot be stored as float64; take float32, bfloat16"):
        kv_format(torch.float64)


@FORMATS
def test_a_card_that_does_not_know_the_format_is_refused(fmt: KVFormat, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file, "HAS_TRITON", True)
    for found in ((0, 0), (7, 5), (8, 9), (9, 0)):
        monkeypatch.setattr(file, "capability", lambda device, found=found: found)
        if (0, 0) < found < fmt.capability:
            with pytest.raises(HybridKVError, match=rf"kv_dtype='{fmt.name}' needs.*has 7.5; use kv_dtype='bf16'"):
                fmt.check_device(torch.device("cuda"))
        else:
            fmt.check_device(torch.device("cuda"))
