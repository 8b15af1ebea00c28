"""Every kind of model gives transformers' logits, whichever way the tokens go in: whole, in chunks, one by one."""

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import tiny
import torch
from long_form import few
from numerics import logit_gap, rel_rms

from hybridkv.kernels.attention.tile import KEY_TILE
from hybridkv.models import attention, deltanet

LENGTHS = (1, 3, 63, 64, 65, 127, 128, 129, 300)  # around the edges of 64-token chunks and pages
KINDS = tuple(tiny.KINDS)


def check(name: str, oracle: tiny.Oracle, got: torch.Tensor, bound: float | None = None) -> None:
    ref, bound = oracle.logits[: got.shape[0]], bound or oracle.bound
    gap = logit_gap(ref, got)
    assert gap <= bound, f"{name}: logits differ by {gap:.2e} of their scale, over {bound:.0e}"  # a NaN fails this too


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("kind", KINDS)
def test_whole_prefill_agrees_with_transformers(kind: str, length: int, oracle: Callable, open_llm: Callable) -> None:
    tiny_model = oracle(kind)
    got = open_llm(tiny_model.folder).logits(tiny_model.ids[:length])
    assert got.shape == (length, tiny.VOCAB) and got.dtype == torch.float32
    check(f"{kind}, {length} tokens at once", tiny_model, got)


@pytest.mark.long
@few("length, chunk", LENGTHS, (37, 50, 64))
@pytest.mark.parametrize("kind", KINDS)
def test_chunked_prefill_agrees_with_transformers(
    kind: str, length: int, chunk: int, oracle: Callable, open_llm: Callable
) -> None:
    tiny_model = oracle(kind)
    got = open_llm(tiny_model.folder).logits(tiny_model.ids[:length], chunk=chunk)
    check(f"{kind}, {length} tokens in chunks of {chunk}", tiny_model, got)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("kind", KINDS)
def test_prefill_then_decode_agrees_with_transformers(
    kind: str, length: int, oracle: Callable, open_llm: Callable
) -> None:
    tiny_model, prefill = oracle(kind), max(1, length - 9)
    got = open_llm(tiny_model.folder).logits(tiny_model.ids[:length], prefill=prefill, chunk=50)
    check(f"{kind}, {prefill} tokens then {length - prefill} steps", tiny_model, got)


@pytest.mark.parametrize("kind", KINDS)
def test_one_token_at_a_time_agrees_with_transformers(kind: str, oracle: Callable, open_llm: Callable) -> None:
    tiny_model = oracle(kind)
    got = open_llm(tiny_model.folder).logits(tiny_model.ids[:67], prefill=1)  # into a second page
    check(f"{kind}, 67 steps", tiny_model, got)


@pytest.mark.slow
@pytest.mark.parametrize("prefill", (KEY_TILE + 120, KEY_TILE - 8))
@pytest.mark.parametrize("kind", ("llama", "qwen3_5"))
def test_contexts_longer_than_a_key_tile_agree_with_transformers(
    kind: str, prefill: int, oracle: Callable, open_llm: Callable
) -> None:
    """Attention reads the keys a tile at a time; the last chunk, or the last steps, see more than one."""
    tiny_model, ids = oracle(kind), tiny.token_ids(KEY_TILE + 120)
    llm = open_llm(tiny_model.folder, max_requests=1, max_context=len(ids))
    gap = logit_gap(tiny.reference_logits(tiny_model.model, ids), llm.logits(ids, prefill=prefill, chunk=350))
    assert gap <= tiny_model.bound, f"{gap:.2e}"


@pytest.mark.parametrize("kind", KINDS)
def test_prompts_and_steps_take_their_own_paths(
    kind: str, oracle: Callable, open_llm: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guard: two chunks, then ten steps: each layer runs its prompt form twice and its one-token form ten times."""
    tiny_model, calls = oracle(kind), Counter[str]()

    def counted(name: str, operation: Callable) -> Callable:
        def call(*args: object, **more: object) -> object:
            calls[name] += 1
            return operation(*args, **more)

        return call

    for module, name in (
        (attention, "attention_prefill"),
        (attention, "attention_even"),  # of one request whose streams are equally long; no step here is another
        (deltanet, "gdn_prefill"),
        (deltanet, "gdn_step"),
    ):
        monkeypatch.setattr(module, name, counted(name, getattr(module, name)))
    open_llm(tiny_model.folder).logits(tiny_model.ids[:100], prefill=90, chunk=64)
    config = tiny_model.model.config
    linear = (getattr(config, "layer_types", None) or []).count("linear_attention")
    full = config.num_hidden_layers - linear
    assert calls == Counter(
        attention_prefill=2 * full, attention_even=10 * full, gdn_prefill=2 * linear, gdn_step=10 * linear
    )


@pytest.mark.parametrize("kind", KINDS)
def test_requests_leave_nothing_behind(kind: str, oracle: Callable, open_llm: Callable) -> None:
    """The second request reuses pages and state that the first one filled."""
    tiny_model = oracle(kind)
    llm = open_llm(tiny_model.folder)
    llm.logits(tiny.token_ids(200, seed=8), prefill=190)
    check(f"{kind}, second request", tiny_model, llm.logits(tiny_model.ids[:70], prefill=60))


@pytest.mark.parametrize("kind", KINDS)
def test_the_comparison_would_see_one_wrong_token(kind: str, oracle: Callable, open_llm: Callable) -> None:
    """Guard: the first of 129 tokens still moves the last logits far more than the bound allows."""
    tiny_model = oracle(kind)
    wrong = [(tiny_model.ids[0] + 1) % tiny.VOCAB, *tiny_model.ids[1:129]]
    got = open_llm(tiny_model.folder).logits(wrong)[-1]
    assert logit_gap(tiny_model.logits[128], got) > 3 * tiny_model.bound


@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_is_as_close_as_transformers_in_bfloat16(
    kind: str, tmp_path: Path, oracle: Callable, open_llm: Callable
) -> None:
    """The bound is what the same rounding does to transformers itself, doubled: the two round at different places.

    The median over tokens: a router near a tie may pick another expert for a token, in either program.
    """
    reference = tiny.save(kind, tmp_path, torch.bfloat16)
    ids = oracle(kind).ids[:200]
    ref = tiny.reference_logits(reference, ids)
    # loaded, not cast: a cast would round the rotary frequencies too
    in_bfloat16 = type(reference).from_pretrained(tmp_path, dtype=torch.bfloat16, attn_implementation="eager")
    theirs = tiny.reference_logits(in_bfloat16, ids)
    ours = open_llm(tmp_path, dtype="bfloat16", kv_dtype="bf16").logits(ids, prefill=190, chunk=64)
    assert ours.isfinite().all()

    def median_error(got: torch.Tensor) -> float:
        return torch.tensor([rel_rms(r, g) for r, g in zip(ref, got)]).median().item()

    assert median_error(theirs) > 1e-3, "bfloat16 was not used"
    assert median_error(ours) <= 2 * median_error(theirs), f"{kind}: {median_error(ours):.3e}"


@pytest.mark.parametrize("kind", ("llama_tied", "qwen3_5", "qwen3_5_moe"))
def test_several_shards_load_as_one(kind: str, tmp_path: Path, oracle: Callable, open_llm: Callable) -> None:
    tiny.save(kind, tmp_path, shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) >= 3, "one shard shows nothing"
    check(f"{kind} in shards", oracle(kind), open_llm(tmp_path).logits(oracle(kind).ids[:80]))


@pytest.mark.parametrize("kind", ("qwen3_5", "qwen3_5_tied", "qwen3_5_moe"))
def test_the_text_part_of_a_vision_language_checkpoint_runs(
    kind: str, tmp_path: Path, oracle: Callable, open_llm: Callable
) -> None:
    tiny.save_vision_language(kind, tmp_path)
    assert "text_config" in json.loads((tmp_path / "config.json").read_text())
    check(f"{kind} inside a VL checkpoint", oracle(kind), open_llm(tmp_path).logits(oracle(kind).ids[:80], prefill=70))
