"""What a rank holds of a checkpoint in FP8 and FP4 codes: the codes and scales of the whole model, and what is read.

Parts are loaded here without other processes: loading sends nothing.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from block_cases import FORMS, FP4, FP8, random_blocks
from numerics import assert_same_bytes
from qwen_fp8 import fp8_model
from qwen_mxfp4 import mxfp4_model
from tiny_ranks import fixed_bytes
from torch import Tensor
from v4_files import CONFIG, Made, write
from v4_released import released_model

from hybridkv.checkpoint.loader import Loader
from hybridkv.checkpoint.safetensors_file import SafetensorsFile
from hybridkv.errors import HybridKVError
from hybridkv.kernels.linear.block_form import RELEASED_FP8, BlockForm
from hybridkv.kernels.linear.block_scaled import BlockScaled, dequantise_ref, empty_blocks, put_blocks
from hybridkv.models import load_model, open_checkpoint
from hybridkv.models.config import ModelConfig
from hybridkv.models.known import KNOWN
from hybridkv.models.weight_forms import released_forms
from hybridkv.parallel.block_parts import block_shard, part_form, rank_forms
from hybridkv.parallel.cuts import Cut
from hybridkv.parallel.group import Alone
from hybridkv.parallel.layers import SplitLinear
from hybridkv.parallel.loader import ShardedLoader, load_sharded, take
from hybridkv.parallel.rank_bytes import rank_model_bytes
from hybridkv.parallel.shard import Shard
from hybridkv.planner import planned_tensors

CPU, F32 = torch.device("cpu"), torch.float32
HEADS: dict[str, Any] = dict(num_attention_heads=8, o_groups=4)


def matrices(stack: BlockScaled) -> list[BlockScaled]:
    return [stack] if stack.codes.ndim == 2 else [stack[i] for i in range(len(stack))]


def values(stack: BlockScaled) -> Tensor:
    return torch.stack([dequantise_ref(matrix, F32) for matrix in matrices(stack)])


@pytest.mark.parametrize("cut", (((0, 40),), ((40, 130),), ((128, 200),), ((64, 128),), ((8, 16), (136, 144))))
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_some_rows_keep_codes_and_scales(form: BlockForm, cut: tuple[tuple[int, int], ...]) -> None:
    whole, numbers = random_blocks(form, 200, 144)
    rows = [n for begin, end in cut for n in range(begin, end)]
    out = empty_blocks(form.part(rows=cut), (len(rows), 144), CPU)
    at = 0
    for begin, end in cut:
        R = form.rows
        part = BlockScaled(whole.codes[begin:end], whole.scales[begin // R : -(-end // R)], form)
        put_blocks(out, at, part, begin % R)
        at += end - begin
    assert_same_bytes(out.codes, whole.codes[rows])
    assert_same_bytes(dequantise_ref(out, F32), numbers[rows])
    crosses = any(begin % form.rows and begin // form.rows != (end - 1) // form.rows for begin, end in cut)
    assert (out.form.rows < form.rows) == (crosses or (len(cut) > 1 and form.rows > 8))


@pytest.mark.parametrize("columns", ((0, 32), (32, 96), (64, 128), (96, 200), (130, 144), (128, 200)))
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_some_columns_keep_codes_and_scales(form: BlockForm, columns: tuple[int, int]) -> None:
    whole, numbers = random_blocks(form, 130, 200)
    found = part_form(form, Cut(1, (columns,)), (130, 200))
    begin, end = columns
    if begin == 130 and form.columns == 32:  # inside of a block, over whose border it does not reach
        assert found == form.part(columns=[columns]) == form
    assert found is not None and found.columns in (32, 64, 128)
    out = empty_blocks(found, (130, end - begin), CPU)
    put_blocks(out, 0, whole, columns=columns)
    assert_same_bytes(dequantise_ref(out, F32), numbers[:, begin:end])


def test_parts_are_put_where_new_tensors_are_elsewhere() -> None:
    """As in a program that makes its tensors on a GPU (torch.set_default_device)."""
    whole, numbers = random_blocks(FP8, 130, 200)
    out = empty_blocks(FP8.part(columns=[(64, 192)]), (130, 128), CPU)
    with torch.device("meta"):
        put_blocks(out, 0, whole, columns=(64, 192))
    assert_same_bytes(dequantise_ref(out, F32), numbers[:, 64:192])


def test_columns_that_no_block_fits_are_not_kept_and_never_put() -> None:
    assert part_form(FP8, Cut(1, ((120, 200),)), (4, 256)) is None  # blocks of 8
    assert part_form(FP4, Cut(1, ((48, 96),)), (4, 96)) is None  # of 16
    assert part_form(FP4, Cut(1, ((33, 40),)), (4, 96)) is None  # half of a byte
    whole, _ = random_blocks(FP8, 4, 256)
    with pytest.raises(AssertionError, match="blocks of 128 reach over those of 128"):
        put_blocks(empty_blocks(FP8, (4, 80), CPU), 0, whole, columns=(120, 200))


SIZES: dict[str, tuple[BlockForm, dict[str, Any], int]] = {
    "uneven": (FP4, dict(moe_intermediate_size=40), 2),
    "whole experts": (FP4, dict(moe_intermediate_size=40), 4),
    "crossing": (FP8, dict(moe_intermediate_size=192), 4),
    "even": (FP4, dict(moe_intermediate_size=256, hidden_size=256), 2),
    "qwen": (FP8, dict(moe_intermediate_size=160), 4),  # rows and columns of sections, of heads; whole experts
    "mxfp4": (FP4, dict(moe_intermediate_size=256), 2),  # the same in blocks of one row; experts by width
}
QWEN: dict[str, Callable[..., object]] = {"qwen": fp8_model, "mxfp4": mxfp4_model}


@pytest.mark.parametrize("kind", SIZES)
def test_the_codes_of_all_ranks_are_those_of_the_whole_model(kind: str, tmp_path: Path) -> None:
    """Bit for bit, and with the same scales; each rank's bytes are those that were planned, in either dtype."""
    form, changes, size = SIZES[kind]
    if kind in QWEN:
        QWEN[kind](tmp_path, **changes)
    else:
        released_model(tmp_path, form, **HEADS, **changes)
    with open_checkpoint(tmp_path) as checkpoint:
        config, forms = ModelConfig.from_dict(checkpoint.config), checkpoint.block_forms()
        has, plain = checkpoint.__contains__, Loader(checkpoint, CPU, F32, released=True)
        smaller = 0
        for rank in range(size):
            shard = block_shard(config, Shard(rank, size), has, forms)
            assert shard.by_width(config) == (kind not in ("whole experts", "qwen"))
            loader = ShardedLoader(config, shard, Alone(), checkpoint, CPU, F32, released=True)
            kept = rank_forms(config, shard, has, forms)
            assert kept.keys() == forms.keys()
            for name in forms:
                shape = loader.shapes[name]
                whole = plain.blocks(name, *shape, form=forms[name])
                part = loader.blocks(name, *shape, form=kept[name])
                cut = loader.cut(name)
                smaller += part.form != whole.form
                assert_same_bytes(values(part), take(values(whole).view(shape), cut).reshape(values(part).shape))
                if cut is None or cut.dim < len(shape) - 1:
                    assert_same_bytes(part.codes, take(whole.codes, cut).contiguous())
                else:
                    each = 8 // part.form.bits
                    bytes_ = Cut(cut.dim, tuple((begin // each, end // each) for begin, end in cut.spans))
                    assert_same_bytes(part.codes, take(whole.codes, bytes_).contiguous())
            for dtype in (torch.float32, torch.bfloat16):
                model: Any = load_sharded(config, shard, Alone(), checkpoint, CPU, dtype, released=True)
                name = str(dtype).removeprefix("torch.")
                assert model.nbytes - fixed_bytes(model) == rank_model_bytes(
                    config, shard, has, name, "cpu", blocks=forms
                )
        assert (smaller > 0) == (kind in ("crossing", "qwen"))
        if kind in QWEN:
            assert isinstance(model.layers[1].feed.part.down, BlockScaled)
            return
        experts = model.layers[1].experts.part
        assert isinstance(experts.gate_up, BlockScaled) and isinstance(experts.shared.gate_up, BlockScaled)
        assert isinstance(model.layers[1].attention.out, SplitLinear)


@pytest.mark.parametrize("base", (False, True))
def test_only_its_own_rows_are_read(base: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of queries, of groups, of gates and ups; whole experts; scales of both kinds."""
    bytes_read, read = [0], SafetensorsFile.read

    def watched(self: SafetensorsFile, name: str, rows: Any = None) -> Tensor:
        found = read(self, name, rows)
        bytes_read[0] += found.nbytes
        return found

    monkeypatch.setattr(SafetensorsFile, "read", watched)
    with open_checkpoint(write(tmp_path, Made(base).stored)) as checkpoint:
        config = ModelConfig.from_dict(checkpoint.config)
        for experts in ("width", "whole"):
            loader = ShardedLoader(config, Shard(1, 2, experts, 32), Alone(), checkpoint, CPU, F32, released=True)
            names = ["self_attn.q_b_proj.weight", "self_attn.o_a_proj.weight", "mlp.shared_experts.up_proj.weight"]
            names += ["mlp.experts.gate_up_proj"] + ["mlp.experts.down_proj"] * (experts == "whole")
            for name in (f"model.layers.1.{inside}" for inside in names):
                form, bytes_read[0] = loader.block_form(name), 0
                assert form is not None
                part = loader.blocks(name, *loader.own_shape(name), form=form)
                stored = checkpoint.block_form(name)
                assert stored is not None and part.codes.nbytes < part.nbytes
                # a block of which a rank has some rows is read with its one scale
                assert part.codes.nbytes < bytes_read[0] <= part.nbytes, name


def test_a_part_with_nan_is_refused_by_the_rank_that_has_it(tmp_path: Path) -> None:
    made = Made()
    made.stored["layers.1.attn.wq_b.weight"].view(torch.uint8)[60, 1] = 0x7F
    with open_checkpoint(write(tmp_path, made.stored)) as checkpoint:
        config = ModelConfig.from_dict(checkpoint.config)
        for rank in range(2):
            shard = block_shard(config, Shard(rank, 2), checkpoint.__contains__, checkpoint.block_forms())
            if rank == 0:
                load_sharded(config, shard, Alone(), checkpoint, CPU, F32, released=True)
                continue
            with pytest.raises(HybridKVError, match=r"layers.1.self_attn.q_b_proj.weight.*NaN"):
                load_sharded(config, shard, Alone(), checkpoint, CPU, F32, released=True)


def test_sizes_that_do_not_fit_the_codes_are_refused_with_those_that_do() -> None:
    raw = CONFIG | dict(num_attention_heads=8, o_groups=8, n_routed_experts=4, moe_intermediate_size=40)
    config = ModelConfig.from_dict(raw)
    has = planned_tensors(config, raw)
    forms = released_forms(config, has)
    said = (
        "tp=8 does not fit the codes of this deepseek_v4 model: its expert width of 40 has no borders of 32 columns "
        "for that, and its 4 experts are too few to be dealt out; use 2, 4 or 1"
    )
    with pytest.raises(HybridKVError) as problem:
        block_shard(config, Shard(0, 8), has, forms)
    assert str(problem.value) == said
    with pytest.raises(HybridKVError, match="no borders of 32 columns for that; use 2 or 1"):
        block_shard(config, Shard(0, 4, "width"), has, forms)
    assert block_shard(config, Shard(0, 2), has, forms).experts == "auto"
    assert block_shard(config, Shard(0, 4), has, forms).experts == "whole"
    assert block_shard(config, Shard(0, 4), has, {}) == Shard(0, 4)


@pytest.mark.parametrize(("name", "sizes"), (("DeepSeek-V4-Flash", (2, 4, 8)), ("DeepSeek-V4-Pro", (2, 4, 8, 16))))
def test_the_released_models_are_cut_at_borders_of_blocks(name: str, sizes: tuple[int, ...]) -> None:
    """By width, with blocks as they are stored, but for Pro's shared expert at 16 ranks: 192 columns, blocks of 64."""
    config = ModelConfig.from_dict(KNOWN[name])
    has = planned_tensors(config, KNOWN[name])
    forms = released_forms(config, has)
    for size in sizes:
        for rank in {0, 1, size - 1}:
            shard = block_shard(config, Shard(rank, size), has, forms)
            assert shard.by_width(config)
            found = rank_forms(config, shard, has, forms)
            others = {form for at, form in found.items() if form != forms[at]}
            assert found.keys() == forms.keys()
            if size < 16:
                assert not others
            elif rank:
                halved = {replace(RELEASED_FP8, rows=64), replace(RELEASED_FP8, columns=64)}
                assert others <= halved


def test_the_whole_model_is_left_as_it_was(tmp_path: Path) -> None:
    """One rank of one is the model itself: the same bytes, the same experts."""
    released_model(tmp_path, FP4, **HEADS)
    with open_checkpoint(tmp_path) as checkpoint:
        config = ModelConfig.from_dict(checkpoint.config)
        one: Any = load_sharded(config, Shard(0, 1), Alone(), checkpoint, CPU, F32, released=True)
        whole: Any = load_model(config, checkpoint, CPU, F32, released=True)
    assert one.nbytes == whole.nbytes
    assert_same_bytes(one.layers[1].experts.part.down.codes, whole.layers[1].experts.down.codes)
