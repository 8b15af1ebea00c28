"""Tiny models whose heads several ranks can divide, for tests of tensor parallelism."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import tiny_gguf
import tiny_v4

# eight query heads over two KV heads, so that at four ranks each KV head is on two; R = 3 V heads a K head
HEADS: dict[str, Any] = dict(num_attention_heads=8, num_key_value_heads=2)
LINEAR: dict[str, Any] = dict(linear_num_key_heads=4, linear_num_value_heads=12, num_hidden_layers=4)
CHANGES: dict[str, dict[str, Any]] = {
    "llama": {**HEADS, "intermediate_size": 200},  # at four ranks an uneven width
    "llama_bias": {**HEADS, "mlp_bias": True},
    "qwen3": HEADS,
    "qwen3_5": {**HEADS, **LINEAR},
    "qwen3_5_moe": {**HEADS, **LINEAR},
    "qwen3_next": {**HEADS, **LINEAR},
}
# all entries are read: with a choice of few, noise may choose another one
V4: dict[str, Any] = {**tiny_v4.KINDS["mini"], "num_attention_heads": 8, "o_groups": 4, "index_topk": 512}


def build(kind: str, seed: int, **changes: Any) -> Any:
    """A model of transformers, in float32 on the CPU."""
    with pytest.MonkeyPatch.context() as patch:
        if kind == "deepseek_v4":
            patch.setitem(tiny_v4.KINDS, "ranks", {**V4, **changes})
            return tiny_v4.build("ranks", seed)
        config_class, model_class, arguments = tiny.KINDS[kind]
        patch.setitem(tiny.KINDS, kind, (config_class, model_class, {**arguments, **CHANGES[kind], **changes}))
        return tiny.build(kind, seed)


def saved_model(place: Path, kind: str, seed: int = 9, **changes: Any) -> Path:
    """The same in a folder, with a tokenizer of single characters and a chat template."""
    from engine.ascii_tokenizer import TEMPLATE, write_tokenizer  # here: ranks import this file, and find no test

    build(kind, seed, **changes).save_pretrained(place)
    write_tokenizer(place, TEMPLATE)
    return place


def packed_model(path: Path, kinds: Callable[[str], str]) -> Path:
    """Widths of whole blocks: V heads of 128 columns, a feed-forward of three blocks, which two ranks cannot halve."""
    sizes = dict(hidden_size=256, head_dim=64, linear_value_head_dim=128, intermediate_size=768)
    return tiny_gguf.write_gguf_qwen35(build("qwen3_5", 4, **sizes), path / "m.gguf", q8=kinds)


def fixed_bytes(model: Any) -> int:
    """Bytes of tables of frequencies, which no plan counts."""
    names = ("inv_freq", "window_freq", "compress_freq")
    return sum(getattr(model, name).nbytes for name in names if hasattr(model, name))
