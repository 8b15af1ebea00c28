"""Weight: one tensor that a model loads, and how it is held in memory. A family lists its own, so that their bytes are
known without torch and without files.

    kind      what it is                                              held as
    matrix    a projection [rows, columns]                            the model's dtype, FP8 codes, or a GGUF format
    experts   the matrices of all experts [E, rows, columns]          the model's dtype
    plain     embedding, biases, routers and other small matrices     the model's dtype
    wide      matrices whose products are f32 (DeepSeek-V4)           the model's dtype on a GPU, f32 on a CPU
    vector    norms, convolutions, decays                             f32
    indices   a table of whole numbers                                int64

A test compares each family's list with what its loading code asks for, tensor by tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from hybridkv.models.config import ModelConfig

Has = Callable[[str], bool]  # whether a checkpoint has a tensor that not every model has


@dataclass(frozen=True)
class Weight:
    """One tensor."""

    name: str  # Hugging Face's
    shape: tuple[int, ...]
    kind: str
    column_heads: int = 1  # equal parts in which a GGUF file's columns change places when it is read; 1: they stay
    joined: tuple[tuple[str, int], ...] = ()  # of a matrix: names and rows of all that are one matrix in memory with it
    widened: bool = False  # read as its values even where a folder has it in codes


def linear(has: Has, inputs: int, *parts: tuple[str, int], column_heads: int = 1) -> Iterator[Weight]:
    """Projections (name, rows) of the same input, with biases where the checkpoint has them."""
    if has(f"{parts[0][0]}.bias"):
        for name, rows in parts:
            yield Weight(f"{name}.bias", (rows,), "plain")
    joined = tuple((f"{name}.weight", rows) for name, rows in parts)
    for name, rows in joined:
        yield Weight(name, (rows, inputs), "matrix", column_heads, joined)


def vector(name: str, *shape: int) -> Weight:
    """A tensor that is f32 whatever the model's dtype."""
    return Weight(name, shape, "vector")


def attention(config: ModelConfig, has: Has, name: str, normed: bool = False, gated: bool = False) -> Iterator[Weight]:
    """Full attention; `normed` and `gated` as in `load_attention`."""
    c = config
    queries, kv = c.heads * c.head_dim, c.kv_heads * c.head_dim
    q_rows = 2 * queries if gated else queries
    yield from linear(has, c.hidden, (f"{name}.q_proj", q_rows), (f"{name}.k_proj", kv), (f"{name}.v_proj", kv))
    yield from linear(has, queries, (f"{name}.o_proj", c.hidden))
    if normed:
        yield vector(f"{name}.q_norm.weight", c.head_dim)
        yield vector(f"{name}.k_norm.weight", c.head_dim)


def gated_mlp(has: Has, name: str, hidden: int, intermediate: int) -> Iterator[Weight]:
    """The three projections of a gated feed-forward layer."""
    yield from linear(has, hidden, (f"{name}.gate_proj", intermediate), (f"{name}.up_proj", intermediate))
    yield from linear(has, intermediate, (f"{name}.down_proj", hidden))


def layer_norms(config: ModelConfig, name: str) -> Iterator[Weight]:
    """The two norms of a layer."""
    for norm in ("input_layernorm", "post_attention_layernorm"):
        yield vector(f"{name}.{norm}.weight", config.hidden)


def ends(config: ModelConfig, has: Has) -> Iterator[Weight]:
    """Embedding, last norm, and the head where it is a matrix of its own."""
    yield Weight("model.embed_tokens.weight", (config.vocab, config.hidden), "plain", widened=True)
    if not config.tied and has("lm_head.weight"):
        yield from linear(has, config.hidden, ("lm_head", config.vocab))
    yield vector("model.norm.weight", config.hidden)


def dense_decoder(config: ModelConfig, has: Has, normed: bool = False) -> Iterator[Weight]:
    """A decoder of attention and gated feed-forward layers: Llama, Qwen3."""
    for i in range(config.layers):
        name = f"model.layers.{i}"
        yield from layer_norms(config, name)
        yield from attention(config, has, f"{name}.self_attn", normed)
        yield from gated_mlp(has, f"{name}.mlp", config.hidden, config.intermediate)
    yield from ends(config, has)
