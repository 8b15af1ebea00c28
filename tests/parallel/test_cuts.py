"""Every tensor of every model has a row in the table of cuts, and the parts of all ranks make up the whole."""

from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from hybridkv.errors import HybridKVError
from hybridkv.models import family_of
from hybridkv.models.config import ModelConfig
from hybridkv.models.inventory import Weight
from hybridkv.models.known import KNOWN
from hybridkv.parallel.cuts import TABLES, cut_of, rule_of, share_of
from hybridkv.parallel.shard import (
    EXPERTS,
    Shard,
    check_size,
    kv_copies,
    local,
    sizes_that_work,
    spans,
    why_not,
    width_spans,
)
from hybridkv.planner import planned_tensors

# which numbers of ranks work, by the sizes that the models' configs have
WORKS = {
    "SmolLM2-135M-Instruct": [3, 9],
    "Qwen3.5-0.8B": [2, 4, 8],
    "Qwen3.5-4B": [2, 4, 8, 16],
    "Qwen3.5-27B": [2, 4, 8],
    "Qwen3.5-35B-A3B": [2, 4, 8, 16],
    "Qwen3.5-122B-A10B": [2, 4, 8, 16],
    "Qwen3.5-397B-A17B": [2, 4, 8, 16],
    "DeepSeek-V4-Flash": [2, 4, 8],
    "DeepSeek-V4-Pro": [2, 4, 8, 16],
}


def known(name: str, layers: int = 8) -> tuple[ModelConfig, Any]:
    config = ModelConfig.from_dict(KNOWN[name])
    has = planned_tensors(config, KNOWN[name])
    short = replace(config, layers=min(config.layers, layers))
    if config.v4 is not None:
        return replace(short, v4=replace(config.v4, kinds=config.v4.kinds[:layers])), has
    return replace(short, attention_layers=tuple(i for i in config.attention_layers if i < layers)), has


def weights(config: ModelConfig, has: Any) -> list[Weight]:
    return list(family_of(config).weights(config, has))


@pytest.mark.parametrize("name", KNOWN)
def test_the_parts_of_all_ranks_make_up_every_tensor(name: str) -> None:
    config, has = known(name)
    assert sizes_that_work(config), name
    for size, exact in product(sizes_that_work(config)[:4], (False, True)):
        for weight in weights(config, has):
            parts = [cut_of(config, Shard(rank, size), weight.name, weight.shape, exact) for rank in range(size)]
            if parts[0] is None:
                assert parts == [None] * size
                continue
            copies = kv_copies(config, size) if "k_proj" in weight.name or "v_proj" in weight.name else 1
            found = sorted(span for part in parts if part is not None for span in part.spans)
            assert found[::copies] == found[copies - 1 :: copies], weight.name
            borders = [0, *(end for _, end in found[::copies])]
            assert [begin for begin, _ in found[::copies]] == borders[:-1], weight.name
            assert borders[-1] == weight.shape[parts[0].dim], weight.name


@pytest.mark.parametrize("experts", ["width", "whole"])
@pytest.mark.parametrize("name", KNOWN)
def test_a_rank_s_config_lists_the_shapes_that_the_table_cuts(name: str, experts: str) -> None:
    """Two descriptions of the same parts: what the rank's model asks for, and what it is given."""
    config, has = known(name)
    for size in sizes_that_work(config)[:3]:
        for rank in {0, size - 1}:
            shard = Shard(rank, size, experts)
            asked = {weight.name: weight for weight in weights(local(config, shard), has)}
            for weight in weights(config, has):
                given, rule = share_of(config, shard, weight), rule_of(config.architecture, weight.name).__name__
                if rule == "vocabulary" or (rule.startswith("experts") and not shard.by_width(config)):
                    assert asked[weight.name].shape == weight.shape  # the config keeps the whole size
                    assert given.shape[0] < weight.shape[0] and given.shape[1:] == weight.shape[1:]
                    continue
                if config.v4 is not None and experts == "whole" and rule.startswith("width"):
                    continue  # the shared expert's width is not the others': Loader.held
                assert asked[weight.name].shape == given.shape, weight.name
                assert dict(asked[weight.name].joined) == dict(given.joined) or rule == "vocabulary", weight.name


def test_a_tensor_without_a_row_is_an_error() -> None:
    config, _ = known("Qwen3.5-27B")
    with pytest.raises(KeyError, match="sinks of qwen3_5 has no row"):
        cut_of(config, Shard(0, 2), "model.layers.0.self_attn.sinks", (24,))
    assert set(TABLES) == {ModelConfig.from_dict(raw).architecture for raw in KNOWN.values()}


@pytest.mark.parametrize("name", WORKS)
def test_the_sizes_that_work_are_known(name: str) -> None:
    config = ModelConfig.from_dict(KNOWN[name])
    assert [size for size in sizes_that_work(config) if size <= 16] == WORKS[name]
    for size in range(2, 17):
        if size in WORKS[name]:
            assert check_size(config, size) == size
            continue
        with pytest.raises(HybridKVError) as said:
            check_size(config, size)
        assert f"tp={size} does not fit" in str(said.value)
        assert f"use {', '.join(map(str, sizes_that_work(config)))} or 1" in str(said.value)


def test_every_refusal_says_what_does_not_divide() -> None:
    llama, _ = known("Llama-3.1-8B")
    qwen, _ = known("Qwen3.5-27B")
    v4, _ = known("DeepSeek-V4-Flash")
    moe, _ = known("Qwen3.5-35B-A3B")
    assert llama.heads == 32 and qwen.gdn is not None and moe.moe is not None and v4.v4 is not None
    cases = [
        (llama, 5, "5 ranks do not divide its 32 attention heads"),
        (replace(llama, heads=24, kv_heads=8), 6, "6 ranks and 8 KV heads do not divide one another"),
        (qwen, 3, "3 ranks do not divide its 16 DeltaNet key heads"),
        (replace(qwen, gdn=replace(qwen.gdn, value_heads=18)), 4, "4 ranks do not divide its 18 DeltaNet value heads"),
        (v4, 16, "16 ranks do not divide its 8 output groups (o_groups)"),
        (replace(llama, intermediate=3), 4, "its feed-forward width of 3 is too small for 4 ranks"),
        (replace(llama, vocab=5), 4, "its vocabulary of 5 is too small for 4 ranks"),
        (replace(moe, moe=replace(moe.moe, experts=3)), 4, "its number of experts of 3 is too small for 4 ranks"),
        (replace(v4, v4=replace(v4.v4, expert_width=2)), 4, "its expert width of 2 is too small for 4 ranks"),
    ]
    for config, size, said in cases:
        assert why_not(config, size) == said
    for wrong in (0, -2, 65, True, 2.0, "2", None):
        with pytest.raises(HybridKVError, match="tp is a number of GPUs from 1 to 64"):
            check_size(llama, wrong)
    with pytest.raises(HybridKVError, match="experts are cut by auto or width or whole, not 'rows'"):
        check_size(moe, 2, experts="rows")
    with pytest.raises(HybridKVError, match="exact mode is not available for deepseek_v4"):
        check_size(v4, 2, exact=True)
    few = replace(v4, v4=replace(v4.v4, experts=3))
    assert check_size(few, 4) == check_size(v4, 4, experts="whole") == 4
    with pytest.raises(HybridKVError, match="3 experts are too few to be dealt out to 4 ranks; leave experts at auto"):
        check_size(few, 4, experts="whole")
    assert check_size(moe, 1, exact=True) == 1
    assert check_size(qwen, 2, exact=True) == check_size(moe, 2, exact=True, experts="whole") == 2


@pytest.mark.parametrize("experts", EXPERTS)
def test_in_exact_mode_every_rank_has_whole_sums_of_every_expert(experts: str) -> None:
    config, has = known("Qwen3.5-35B-A3B")
    shard = Shard(1, 8, experts)
    shapes = {w.name: share_of(config, shard, w, exact=True).shape for w in weights(config, has)}
    mlp = "model.layers.0.mlp"
    assert shapes[f"{mlp}.experts.gate_up_proj"] == (256, 2 * 64, 2048)
    assert shapes[f"{mlp}.experts.down_proj"] == (256, 2048 // 8, 512)
    assert shapes[f"{mlp}.shared_expert.down_proj.weight"] == (2048 // 8, 512)
    assert shapes[f"{mlp}.gate.weight"] == (256, 2048)


def test_a_width_of_packed_blocks_may_be_uneven() -> None:
    assert [end - begin for begin, end in width_spans(68 * 256, Shard(0, 8, block=256))] == [9 * 256, 8 * 256] * 4
    assert width_spans(512, Shard(0, 4, block=256)) == spans(512, 4)  # too few blocks: it is dequantised
    assert [end - begin for begin, end in width_spans(160, Shard(0, 3))] == [64, 48, 48]
    assert [end - begin for begin, end in width_spans(13, Shard(0, 4))] == [4, 3, 3, 3]


def test_experts_go_by_width_while_a_rank_keeps_enough_of_it() -> None:
    by_width = {
        (name, size): Shard(0, size).by_width(ModelConfig.from_dict(KNOWN[name]))
        for name in ("Qwen3.5-35B-A3B", "Qwen3.5-122B-A10B", "Qwen3.5-397B-A17B")
        for size in (4, 8)
    }
    assert by_width[("Qwen3.5-35B-A3B", 4)] and not by_width[("Qwen3.5-35B-A3B", 8)]
    assert by_width[("Qwen3.5-122B-A10B", 8)] and by_width[("Qwen3.5-397B-A17B", 8)]
