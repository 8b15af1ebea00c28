"""DeepSeek-V4, and Qwen3.5 in FP8, on several ranks with their weights in the codes of the files: what one rank gives,
and what was planned. The bounds are those of test_parity.py: only the order of sums differs, the codes are the same.
"""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import rank_jobs
import ranks
import tiny
import tiny_v4
import torch
from block_cases import FP4, FP8
from long_form import LONG, more
from qwen_fp8 import fp8_model
from qwen_mxfp4 import mxfp4_model
from v4_released import released_model

from hybridkv.parallel.group import Alone
from parallel.test_parity import assert_alike

# eight heads in four groups; all entries are read: with a choice of few, noise may choose another one
HEADS: dict[str, Any] = dict(num_attention_heads=8, o_groups=4, index_topk=512)
WIDE = dict(head_dim=128, partial_rotary_factor=8 / 128, q_lora_rank=128, o_lora_rank=128, hidden_size=256)
KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "ragged": (FP4, dict(moe_intermediate_size=40)),  # 32 and 8 columns at two ranks, whole experts at four
    "crossing": (FP8, dict(moe_intermediate_size=192)),  # borders inside of blocks
    "even": (FP4, dict(moe_intermediate_size=256, **WIDE)),  # whole blocks at two ranks
}
TEXTS = ((77, 70, 33), (1, None, None)) if LONG else ((41, 37, 19), (1, None, None))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    @cache
    def made(kind: str) -> Path:
        place = tmp_path_factory.mktemp(kind)
        experts, changes = KINDS[kind]
        released_model(place, experts, **HEADS, **changes)
        return place

    return made


@cache
def asked() -> dict[str, Any]:
    ids = tiny_v4.token_ids(100, seed=23)
    texts = [[ids[:length], prefill, chunk] for length, prefill, chunk in TEXTS]
    return {"texts": texts, "prompts": [tiny_v4.token_ids(n, seed=n) for n in (3, 30)]}


CASES = (("ragged", 4), ("crossing", 2), *more(("ragged", 2), ("crossing", 4), ("even", 2), ("even", 4)))


@pytest.mark.long
@pytest.mark.parametrize(("kind", "size"), CASES)
def test_logits_tokens_and_bytes(kind: str, size: int, folder: Callable[[str], Path]) -> None:
    path = folder(kind)
    want = rank_jobs.coded(Alone(), str(path), **asked())
    found = ranks.run(size, "coded", path=path, **asked())
    for rank in found:
        for one, other in zip(want["logits"], rank["logits"], strict=True):
            assert_alike("deepseek_v4", one, other)
        assert rank["tokens"] == want["tokens"] and len(rank["tokens"][0]) == 6
        planned, held, planned_cache, held_cache = rank["bytes"]
        assert planned == held < want["bytes"][1] and planned_cache == held_cache
        assert all(torch.equal(a, b) for a, b in zip(found[0]["logits"], rank["logits"], strict=True))
        assert rank["whole"] == (kind == "ragged" and size == 4)


QWEN: dict[str, tuple[Callable[..., object], str, dict[str, Any]]] = {
    "whole experts": (fp8_model, "qwen3_5_moe", {}),
    "by width": (fp8_model, "qwen3_5_moe", dict(moe_intermediate_size=256, num_hidden_layers=4)),
    "dense": (fp8_model, "qwen3_5", dict(intermediate_size=320)),  # borders inside of blocks
    "mxfp4 by width": (mxfp4_model, "qwen3_5_moe", dict(moe_intermediate_size=288, num_hidden_layers=4)),  # 160 and 128
    "mxfp4 next": (mxfp4_model, "qwen3_next", {}),
}


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "size"),
    (("by width", 2), ("mxfp4 by width", 2),
     *more(("whole experts", 2), ("whole experts", 4), ("dense", 4), ("mxfp4 next", 4))),
)  # fmt: skip
def test_qwen_too(kind: str, size: int, tmp_path: Path) -> None:
    make, family, changes = QWEN[kind]
    make(tmp_path, kind=family, **changes)
    ids = tiny.token_ids(100, seed=23)
    given = {"texts": [[ids[:41], 37, 19], [ids[:1]]], "prompts": [ids[50:53], ids[53:90]]}
    want = rank_jobs.coded(Alone(), str(tmp_path), **given)
    for rank in ranks.run(size, "coded", path=tmp_path, **given):
        for one, other in zip(want["logits"], rank["logits"], strict=True):
            assert_alike(family, one, other)
        assert rank["tokens"] == want["tokens"] and rank["whole"] == (kind in ("whole experts", "mxfp4 next"))
        planned, held, planned_cache, held_cache = rank["bytes"]
        assert planned == held < want["bytes"][1] and planned_cache == held_cache


@pytest.mark.parametrize("fault", ("another block's scale", "an expert of another rank"))
def test_what_is_cut_wrongly_is_seen(fault: str, folder: Callable[[str], Path]) -> None:
    """Negative controls of the test above."""
    kind, size = ("crossing", 2) if fault == "another block's scale" else ("ragged", 4)
    want = rank_jobs.coded(Alone(), str(folder(kind)), **asked())["logits"][0]
    got = ranks.run(size, "faulty_codes", path=folder(kind), fault=fault, **asked())[0]["logits"][0]
    assert float((want - got).abs().max() / want.abs().max()) > 0.01
