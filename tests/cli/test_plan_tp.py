"""`hybridkv plan --tp`: the numbers of one rank, what the ranks send each other, and the sizes that work."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_ranks import build, fixed_bytes, packed_model

from cli.test_plan import numbers, plan
from hybridkv.models import open_checkpoint
from hybridkv.models.config import ModelConfig
from hybridkv.models.known import KNOWN
from hybridkv.parallel.group import Alone
from hybridkv.parallel.loader import load_sharded
from hybridkv.parallel.rank_bytes import block_of
from hybridkv.parallel.shard import Shard

GIB = 1 << 30


def test_a_rank_of_a_large_model(capsys: pytest.CaptureFixture[str]) -> None:
    """Figures that were found by hand from the models' sizes."""
    for name, sizes in (
        ("Qwen3.5-27B", {2: 25.1, 4: 12.5, 8: 6.3}),
        ("Qwen3.5-122B-A10B", {2: 113.8, 4: 56.9, 8: 28.5}),
        ("DeepSeek-V4-Flash", {4: 133.7, 8: 67.6}),
    ):
        for size, gib in sizes.items():
            found = numbers(capsys, name, "--tp", size, "--context", 16384)
            assert round(found["weights_bytes"] / GIB, 1) == gib and len(found["ranks"]) == size
            assert max(rank["weights"] for rank in found["ranks"]) == found["weights_bytes"]
    text = " ".join(plan(capsys, "Qwen3.5-122B-A10B", "--tp", 8, "--memory", "80GiB", "--context", "16k").split())
    assert "16384 tokens, one of 8 ranks" in text
    assert "Each KV head is on 4 of 8 ranks: pages are 4 x an even share." in text
    assert "A step sums 97 times over the ranks, 6.0 KiB a token and sum" in text
    assert "s over NVLink at 350 GB/s" in text and "(computed)" in text
    alone = numbers(capsys, "Qwen3.5-27B", "--context", 16384)
    assert alone["ranks"] is None


def test_a_rank_of_flash_as_it_is_released(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What is cut evenly and what is whole, by hand: 43 layers' latents, compressors, index queries, routers, maps."""
    whole = numbers(capsys, "DeepSeek-V4-Flash", "--weight-dtype", "released")
    shares = "Over 1, 2, 4, 8 cards (--tp) they are 145.3 GiB, 73.3 GiB, 37.2 GiB, 19.2 GiB a card."
    assert any(shares in note for note in whole["notes"])
    for size, gib in ((2, 73.3), (4, 37.2), (8, 19.2)):
        for asked in ("--weight-dtype", "--weights"):
            found = numbers(capsys, "DeepSeek-V4-Flash", asked, "released", "--tp", size)
            assert round(found["weights_bytes"] / GIB, 1) == gib and found["weights_form"] == "released"
        weights = [rank["weights"] for rank in found["ranks"]]
        assert len(weights) == size and len(set(weights)) == 1  # 129,280 tokens are divided, too
        # all ranks together: the whole model, and size - 1 times what each has whole
        copies = (sum(weights) - whole["weights_bytes"]) / (size - 1)
        assert copies == pytest.approx(whole_on_every_rank(), rel=1e-3)
    raw = KNOWN["DeepSeek-V4-Flash"] | dict(moe_intermediate_size=96, n_routed_experts=6)
    (tmp_path / "config.json").write_text(json.dumps(raw))
    said = " ".join(plan(capsys, tmp_path, "--weights", "released", "--tp", 8, code=2).split())
    assert "tp=8 does not fit the codes" in said and "use 2, 4 or 1" in said
    alone = numbers(capsys, tmp_path, "--weights", "released")
    assert any("Over 1, 2, 4 cards (--tp) they are" in note for note in alone["notes"]), "8 do not fit"


def whole_on_every_rank() -> int:
    """Bytes of V4-Flash that no rank shares with another."""
    D, d, q, tokens = 4096, 512, 1024, 129_280
    codes = (q + d) * D  # FP8; scales are 1/16384 of it
    maps = 2 * (24 * 4 * D + 24 + 3 + D) * 4 + (q + d) * 4  # hyper-connections and norms, f32
    csa = (2 * 2 * d + 2 * 2 * 128 + 64) * D * 2 + 64 * 128 * q  # compressors and index weights, bf16; index queries
    csa += 4 * (2 * d + 2 * 128) * 4  # position biases, f32
    hca = 2 * d * D * 2 + 128 * d * 4
    router = 256 * D * 2
    tables = 3 * tokens * 6 * 8  # int64
    return 43 * (codes + maps + router) + 21 * csa + 20 * hca + tables


def test_what_does_not_fit_says_so_and_its_suggestions_keep_the_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    found = numbers(capsys, "Qwen3.5-27B", "--tp", 2, "--card", "4090", "--context", "32k")
    assert found["fits"] is False and found["suggestions"]
    assert all(line.endswith("--tp 2") for line in found["suggestions"])
    for size, said in ((3, "DeltaNet key heads; use 2, 4, 8 or 1"), (0, "tp is a number of GPUs from 1 to 64")):
        assert said in " ".join(plan(capsys, "Qwen3.5-27B", "--tp", size, code=2).split())
    assert "experts are cut by" in plan(capsys, "Qwen3.5-35B-A3B", "--tp", 2, "--experts", "rows", code=2)
    assert "leave out --tp" in plan(capsys, "Qwen3.5-27B", "--tp", 2, "--html", code=2)


@pytest.mark.parametrize(
    ("asked", "sizes", "least"),
    [
        ("Qwen3.5-122B-A10B --memory 80GiB --context 16k", [1, 2, 4, 8], 4),
        pytest.param(
            "Qwen3.5-397B-A17B --memory 80GiB --context 16k --kv-dtype fp8",
            [1, 2, 4, 8, 16],
            16,
            marks=pytest.mark.slow,
        ),
        ("Qwen3.5-35B-A3B --memory 20GiB --context 16k --exact", [1, 2, 4, 8], 4),
        ("DeepSeek-V4-Flash --card H100 --weights released --context 128k", [1, 2, 4, 8], 4),
        ("SmolLM2-135M-Instruct --memory 200MiB --context 512 --budget 128 --policy snapkv", [1, 3, 9], 9),
    ],
)
def test_where_one_card_does_not_hold_it_several_are_shown(
    asked: str, sizes: list[int], least: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every figure is that of the plan with --tp, which the last suggestion names with the least number that fits."""
    words = asked.split()
    found, out = numbers(capsys, *words), plan(capsys, *words)
    assert [card["tp"] for card in found["cards"]] == sizes
    assert f" {sizes[-1]} cards" in out and (" (30.4 MiB)" in out) is ("SmolLM2" in asked)
    for card in found["cards"]:
        alone = numbers(capsys, *words, "--tp", card["tp"])
        kinds = {choice["kv_dtype"]: choice for choice in alone["choices"]}
        one = kinds["fp8" if "fp8" in words else "bf16"]
        ranks = [rank["weights"] for rank in alone["ranks"] or [{"weights": alone["weights_bytes"]}]]
        assert card == {
            "tp": len(ranks),
            "pages": one["kv_bytes"],
            "state": one["state_bytes"],
            "checkpoints": one["checkpoint_bytes"],
            "staging": one["staging_bytes"],
            "tables": one["table_bytes"],
            "workspace": one["workspace_bytes"],
            "weights": alone["weights_bytes"],
            "least_weights": min(ranks),
            "total": one["total_bytes"],
            "fits": card["tp"] >= least,
            "longest_context": one["longest_context"],
            "most_requests": one["most_requests"],
        }
        assert alone["fits"] is card["fits"] and alone["memory_bytes"] == found["memory_bytes"]
    named = found["suggestions"][-1]
    assert named.endswith(f" --tp {least}") and named in out
    again = numbers(capsys, *shlex.split(named.partition(" plan ")[2]))
    assert again["fits"] is True and again["budget"] == found["budget"]
    assert len(again["ranks"]) == least


@pytest.mark.parametrize(
    "asked",
    [
        "Qwen3.5-27B --memory 80GiB --context 16k",  # one holds it
        "Qwen3.5-27B --context 16k",  # of which no size is known
        "Qwen3.5-27B --memory 20GiB --context 16k --tp 2",
        "Qwen3.5-27B --memory 20GiB --context 16k --device cpu",  # whose ranks share its memory
        "Qwen3.5-27B --card 3090 --context 16k --kv-dtype fp8",  # which no number of such cards can do
    ],
)
def test_several_cards_are_not_shown_where_they_are_no_way(asked: str, capsys: pytest.CaptureFixture[str]) -> None:
    found, out = numbers(capsys, *asked.split()), plan(capsys, *asked.split())
    assert found["cards"] == [] and "several cards" not in out
    assert "--tp" in asked or not any("--tp" in suggestion for suggestion in found["suggestions"])


@pytest.mark.parametrize(("packed", "exact"), [(False, False), (False, True), (True, False)])
def test_the_ranks_of_a_plan_are_what_they_load(
    packed: bool, exact: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if packed:
        path = packed_model(tmp_path, lambda name: "Q4_K")
    else:
        path = tmp_path
        build("qwen3_5_moe", 1).save_pretrained(path)
    asked = ["--tp", 2, "--context", 256, "--json", *(["--exact"] if exact else [])]
    found: dict[str, Any] = json.loads(plan(capsys, path, *asked))
    assert found["dtype"] == ("packed" if packed else "bfloat16")
    with open_checkpoint(path) as checkpoint:
        config = ModelConfig.from_dict(checkpoint.config)
        block = block_of(checkpoint.column_steps())
        for rank, planned in enumerate(found["ranks"]):
            shard = Shard(rank, 2, block=block)
            how: dict[str, bool] = {"packed": packed, "exact": exact}
            model = load_sharded(config, shard, Alone(), checkpoint, torch.device("cpu"), torch.bfloat16, **how)
            assert model.nbytes - fixed_bytes(model) == planned["weights"]
    if packed:  # three blocks of feed-forward width over two ranks
        assert found["ranks"][0]["weights"] > found["ranks"][1]["weights"]
        assert "on the largest rank and" in plan(capsys, path, "--tp", 2, "--context", 256)
