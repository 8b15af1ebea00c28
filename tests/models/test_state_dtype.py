"""Recurrent state in bf16: half the bytes, one rounding a step, everything else as it was."""

from collections.abc import Callable
from pathlib import Path

import pytest
import tiny
import torch
from numerics import rel_rms

from hybridkv import LLM, CacheConfig
from hybridkv.errors import HybridKVError


def opened(folder: Path, state: str, exact: bool = False) -> LLM:
    cache = CacheConfig(kv_dtype="f32", state_dtype=state)
    return LLM(str(folder), "cpu", "float32", exact=exact, cache=cache, max_requests=2, max_context=256)


def test_the_state_takes_half_the_bytes(oracle: Callable) -> None:
    wide, narrow = (opened(oracle("qwen3_5").folder, state).manager for state in ("f32", "bf16"))
    recurrent = wide.state.tensors["gdn", "recurrent"]
    assert recurrent.dtype == torch.float32 and narrow.state.tensors["gdn", "recurrent"].dtype == torch.bfloat16
    assert wide.state.nbytes - narrow.state.nbytes == recurrent.nbytes // 2
    assert narrow.state.tensors["gdn", "conv"].dtype == torch.float32
    assert wide.memory_bytes() - narrow.memory_bytes() == recurrent.nbytes // 2


def test_answers_move_by_the_rounding_of_the_state(oracle: Callable) -> None:
    """A prompt rounds the state once a chunk, single tokens once each: 2^-9 of it, in six layers (seen 1.9e-2)."""
    tiny_model, ids = oracle("qwen3_5"), tiny.token_ids(100)
    want = opened(tiny_model.folder, "f32").logits(ids, prefill=40)
    got = opened(tiny_model.folder, "bf16").logits(ids, prefill=40)
    assert torch.equal(want[:40], got[:40])  # the first chunk begins with no state at all
    found = rel_rms(want[40:], got[40:])
    assert 1e-4 < found < 3e-2, found


def test_where_there_is_no_such_state_it_is_refused(oracle: Callable) -> None:
    with pytest.raises(HybridKVError, match="state_dtype is for recurrent state, which llama does not have"):
        opened(oracle("llama").folder, "bf16")
    with pytest.raises(HybridKVError, match="exact mode keeps recurrent state in f32"):
        opened(oracle("qwen3_5").folder, "bf16", exact=True)
    with pytest.raises(HybridKVError, match="state_dtype must be f32 or bf16, not 'fp8'"):
        CacheConfig(state_dtype="fp8")
