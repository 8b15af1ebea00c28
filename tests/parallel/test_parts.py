"""What a rank holds: the bytes that were planned, the codes of the whole model, blocks of a GGUF file as they were.

Parts are loaded here without other processes: loading sends nothing.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny_gguf
import torch
from packed_blocks import random_blocks
from tiny_ranks import build, fixed_bytes, packed_model
from torch import Tensor

from hybridkv.cache import KVCacheManager
from hybridkv.checkpoint import loader as plain_loader
from hybridkv.config import CacheConfig
from hybridkv.errors import ModelFileError
from hybridkv.kernels.linear.linear import Linear
from hybridkv.kernels.linear.packed_dequantise import dequantise_ref
from hybridkv.kernels.linear.packed_linear import PackedLinear
from hybridkv.kernels.linear.packed_planes import BITS
from hybridkv.kernels.linear.packed_weights import Packed, pack
from hybridkv.models import cache_schema, load_model, open_checkpoint
from hybridkv.models.config import ModelConfig
from hybridkv.parallel import loader as sharded_loader
from hybridkv.parallel.group import Alone
from hybridkv.parallel.layers import SplitLinear
from hybridkv.parallel.loader import ShardedLoader, load_sharded
from hybridkv.parallel.rank_bytes import block_of, rank_model_bytes
from hybridkv.parallel.shard import Shard, local
from hybridkv.planner import plan_cache

CPU = torch.device("cpu")


def linears(part: object, at: str = "") -> Iterator[tuple[str, Linear]]:
    """Every product of a model, by its place."""
    if isinstance(part, SplitLinear):
        yield at, part.inner
    elif isinstance(part, Linear):
        yield at, part
    elif isinstance(part, tuple):
        for i, item in enumerate(part):
            yield from linears(item, f"{at}.{i}")
    elif hasattr(part, "__dataclass_fields__"):
        for name, item in vars(part).items():
            inner = at if name == "part" else f"{at}.{name}"
            yield from linears(item, inner)


@pytest.fixture(params=["llama", "llama_bias", "qwen3_5", "qwen3_5_moe", "qwen3_next", "deepseek_v4"])
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


def test_the_bytes_of_every_rank_are_those_of_the_plan(kind: str, tmp_path: Path) -> None:
    build(kind, 1).save_pretrained(tmp_path)
    with open_checkpoint(tmp_path) as checkpoint:
        config, has = ModelConfig.from_dict(checkpoint.config), checkpoint.__contains__
        whole = load_model(config, checkpoint, CPU, torch.float32)
        for size in (2, 4):
            held = []
            for rank in range(size):
                for experts in ("whole", "width") if config.moe else ("whole", "auto") if config.v4 else ("auto",):
                    shard = Shard(rank, size, experts)
                    for dtype in (torch.float32, torch.bfloat16):
                        model = load_sharded(config, shard, Alone(), checkpoint, CPU, dtype)
                        name = str(dtype).removeprefix("torch.")
                        planned = rank_model_bytes(config, shard, has, name, "cpu")
                        assert model.nbytes - fixed_bytes(model) == planned
                    if config.moe is not None:  # in exact mode by width, whatever is asked for
                        model = load_sharded(config, shard, Alone(), checkpoint, CPU, torch.float32, exact=True)
                        planned = rank_model_bytes(config, shard, has, "float32", "cpu", exact=True)
                        assert model.nbytes - fixed_bytes(model) == planned
                held.append(model.nbytes)
                if config.v4 is None and config.moe is None:
                    model = load_sharded(config, shard, Alone(), checkpoint, CPU, torch.float32, half=True)
                    planned = rank_model_bytes(config, shard, has, "float32", "cpu", half=True)
                    assert model.nbytes - fixed_bytes(model) == planned
                own = local(config, shard)
                schema = cache_schema(own, CacheConfig(kv_dtype="f32"), "float32")
                plan = plan_cache(schema, 3, 200, None)
                manager = KVCacheManager(schema, plan.pages, 3, 200, CPU, False, plan.query_buffers)
                assert manager.memory_bytes() == plan.nbytes
            assert max(held) < whole.nbytes * 0.8


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("kept", [False, True])
def test_fp8_codes_are_those_of_the_whole_rows(
    kept: bool, exact: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a GPU keeps them, and as they are dequantised elsewhere. A rank's columns have the scales of whole rows."""
    for module in (plain_loader, sharded_loader):
        monkeypatch.setattr(module, "keeps_codes", lambda device, dtype: kept)
    monkeypatch.setattr("hybridkv.kernels.linear.linear._can_pack", lambda weight: False)  # weights can be looked at
    build("qwen3_5", 2).save_pretrained(tmp_path)
    codes = kept and not exact
    with open_checkpoint(tmp_path) as checkpoint:
        config = ModelConfig.from_dict(checkpoint.config)
        whole: Any = load_model(config, checkpoint, CPU, torch.bfloat16, fp8=True, exact=exact)
        parts: list[Any] = [
            load_sharded(config, Shard(rank, 2), Alone(), checkpoint, CPU, torch.bfloat16, fp8=True, exact=exact)
            for rank in range(2)
        ]
    for layer, (a, b) in zip(whole.layers, zip(*(part.layers for part in parts), strict=True), strict=True):
        full, halves = layer.feed.down, [part.feed.down.inner for part in (a, b)]
        assert (full.scale is not None) == codes and (full.weight.dtype == torch.uint8) == codes
        assert torch.equal(full.weight, torch.cat([half.weight for half in halves], 0 if exact else 1))
        for half in halves if codes else ():
            assert torch.equal(half.scale, full.scale)
        gate_up = [part.feed.gate_up for part in (a, b)]
        rows = [torch.cat([half.weight.chunk(2)[i] for half in gate_up]) for i in range(2)]
        assert torch.equal(layer.feed.gate_up.weight, torch.cat(rows))
    planned = rank_model_bytes(config, Shard(1, 2), checkpoint.__contains__, "bfloat16", "cpu", fp8=codes, exact=exact)
    held = parts[1].nbytes - fixed_bytes(parts[1])
    assert held == planned


@pytest.mark.parametrize("kind", BITS)
def test_some_columns_of_packed_blocks_are_the_file_s(kind: str) -> None:
    bits, blocks = BITS[kind], random_blocks(kind, 48, 1024)
    whole = dequantise_ref(pack(blocks, bits)).float()
    for parts, order in ((4, [1, 2]), (8, [6, 1, 3, 4]), (16, [9, 8, 15, 0])):  # blocks, and heads that change places
        some = pack(blocks, bits, torch.tensor(order), parts)
        want = whole.unflatten(1, (parts, -1))[:, order].flatten(1)
        assert torch.equal(dequantise_ref(some).float(), want)
        assert some.shape == tuple(want.shape)


@pytest.mark.parametrize("form", ["Q8_0", "Q4_K", "Q6_K"])
def test_a_gguf_file_stays_packed_where_borders_of_blocks_allow(form: str, tmp_path: Path) -> None:
    path = packed_model(tmp_path, lambda name: "Q8_0" if "ssm_alpha" in name or "ssm_beta" in name else form)
    with open_checkpoint(path) as checkpoint:
        config, cuts = ModelConfig.from_dict(checkpoint.config), checkpoint.column_steps()
        block, has = block_of(cuts), checkpoint.__contains__
        assert block == (32 if form == "Q8_0" else 256)
        whole: Any = load_model(config, checkpoint, CPU, torch.bfloat16, packed=True)
        parts: list[Any] = []
        for rank in range(2):
            shard = Shard(rank, 2, block=block)
            model = load_sharded(config, shard, Alone(), checkpoint, CPU, torch.bfloat16, packed=True)
            planned = rank_model_bytes(config, shard, has, "bfloat16", "cuda", cuts=cuts)
            assert planned == model.nbytes - fixed_bytes(model)
            parts.append(model)
    widths = [part.layers[0].feed.down.shape[1] for part in parts]
    assert widths == ([384, 384] if form == "Q8_0" else [512, 256])
    for place in ("mixer.out", "feed.down"):  # columns, V heads brought back into their order
        full, *halves = (linear_at(model.layers[0], place) for model in (whole, *parts))
        assert torch.equal(full, torch.cat(halves, 1)), place
    gate_up = [linear_at(model.layers[0], "feed.gate_up") for model in parts]
    merged = torch.cat([torch.cat([half.chunk(2)[i] for half in gate_up]) for i in range(2)])
    assert torch.equal(linear_at(whole.layers[0], "feed.gate_up"), merged)
    assert all(isinstance(found, PackedLinear) for part in parts for _, found in linears(part.layers))


def linear_at(layer: Any, place: str) -> Tensor:
    """The numbers that a packed product holds."""
    for name in place.split("."):
        layer = getattr(layer, name)
    found = layer.inner if isinstance(layer, SplitLinear) else layer
    rows = [dequantise_ref(part.laid(1)).float() for part in found.parts if isinstance(part, Packed)]
    assert len(rows) == len(found.parts), "not packed"
    return torch.cat(rows)


def test_a_matrix_that_no_border_fits_is_dequantised_and_counted_so(tmp_path: Path) -> None:
    """V heads of 64 columns: six of them are no whole number of blocks."""
    sizes = dict(hidden_size=256, head_dim=64, linear_value_head_dim=64, intermediate_size=512)
    path = tiny_gguf.write_gguf_qwen35(build("qwen3_5", 4, **sizes), tmp_path / "m.gguf", q8=lambda name: "Q4_K")
    with open_checkpoint(path) as checkpoint:
        config, cuts = ModelConfig.from_dict(checkpoint.config), checkpoint.column_steps()
        shard = Shard(1, 2, block=block_of(cuts))
        model: Any = load_sharded(config, shard, Alone(), checkpoint, CPU, torch.bfloat16, packed=True)
        planned = rank_model_bytes(config, shard, checkpoint.__contains__, "bfloat16", "cuda", cuts=cuts)
    out, down = model.layers[0].mixer.out.inner, model.layers[0].feed.down.inner
    assert not isinstance(out, PackedLinear) and isinstance(down, PackedLinear)
    assert planned == model.nbytes - fixed_bytes(model)


def test_a_file_of_another_shape_is_refused(tmp_path: Path) -> None:
    build("llama", 1).save_pretrained(tmp_path)
    with open_checkpoint(tmp_path) as checkpoint:
        config = ModelConfig.from_dict({**checkpoint.config, "hidden_size": 192})
        loader = ShardedLoader(config, Shard(0, 2), Alone(), checkpoint, CPU, torch.float32)
        with pytest.raises(ModelFileError, match=r"norm.weight has shape \[96\], the config asks for \[192\]"):
            loader.vector("model.norm.weight", 192)
        with pytest.raises(ModelFileError, match=r"rank 0 asks for \[3\] of tensor model.norm.weight"):
            loader.vector("model.norm.weight", 3)
        with pytest.raises(ModelFileError, match="not in the list of this model's weights"):
            loader.vector("model.layers.0.something", 3)
