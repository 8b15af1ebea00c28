"""Qwen3.5 from FP8 folders with block scales: widened, or with the codes kept; the logits of the dequantised model."""

from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from long_form import more
from numerics import logit_gap
from qwen_fp8 import fp8_model
from tiny_ranks import fixed_bytes

from hybridkv import LLM, SamplingParams
from hybridkv.errors import HybridKVError
from hybridkv.kernels.linear.block_linear import BlockLinear
from hybridkv.kernels.linear.block_scaled import BlockScaled
from hybridkv.models import open_checkpoint
from hybridkv.planner import model_bytes

BOUND = 1e-4  # of the logits' scale, in f32
WIDE = dict(hidden_size=192, moe_intermediate_size=160)  # more than a block
HOW: dict[str, Any] = dict(device="cpu", dtype="float32", max_requests=2, max_context=128, reuse=None)


@pytest.mark.long
@pytest.mark.parametrize(("kind", "changes"), (("qwen3_5_moe", WIDE), *more(("qwen3_5_moe", {}), ("qwen3_5", {}))))
def test_logits_tokens_and_bytes(kind: str, changes: dict[str, Any], tmp_path: Path) -> None:
    model, ids = fp8_model(tmp_path, kind, **changes), tiny.token_ids(40, seed=5)
    want = tiny.reference_logits(model, ids)
    greedy = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
    found = []
    for form in ("released", "plain"):
        llm = LLM(tmp_path, weight_dtype=form, **HOW)
        assert logit_gap(want, llm.logits(ids, prefill=31, chunk=17)) <= BOUND
        found.append([out.token_ids for out in llm.generate([ids[:7], ids], greedy)])
        layers: Any = llm.model.layers
        kept = form == "released"
        assert isinstance(layers[0].mixer.inputs, BlockLinear) == isinstance(layers[3].mixer.out, BlockLinear) == kept
        if kind == "qwen3_5_moe":
            assert isinstance(layers[0].feed.down, BlockScaled) == kept and layers[0].feed.down.shape[0] == 8
        if kept:
            with open_checkpoint(tmp_path) as checkpoint:
                forms = checkpoint.block_forms()
                planned = model_bytes(llm.config, checkpoint.__contains__, "float32", "cpu", blocks=forms)
            assert llm.model.nbytes - fixed_bytes(llm.model) == planned
    assert found[0] == found[1] and len(found[0][0]) == 6


def test_a_wrong_scale_shows(tmp_path: Path) -> None:
    """The comparison above reads the scales of experts."""
    model, ids = fp8_model(tmp_path), tiny.token_ids(30, seed=5)
    llm = LLM(tmp_path, weight_dtype="released", **HOW)
    layer: Any = llm.model.layers[2]
    layer.feed.down.scales[:] *= 2
    assert logit_gap(tiny.reference_logits(model, ids), llm.logits(ids)) > 10 * BOUND


def test_what_is_not_read_is_refused(tmp_path: Path) -> None:
    fp8_model(tmp_path)
    with pytest.raises(HybridKVError, match="exact mode computes with plain weights, not with weight_dtype='released'"):
        LLM(tmp_path, weight_dtype="released", exact=True, **HOW)
    config = (tmp_path / "config.json").read_text()
    for method, said in (
        ("gptq", "'gptq'; only fp8, compressed"),
        ("compressed-tensors", "must name its config_groups"),
    ):
        (tmp_path / "config.json").write_text(config.replace('"quant_method": "fp8"', f'"quant_method": "{method}"'))
        with pytest.raises(HybridKVError, match=said):
            open_checkpoint(tmp_path)
    assert torch.get_default_dtype() == torch.float32
