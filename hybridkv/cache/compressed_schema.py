"""What a model with compressed attention (DeepSeek-V4) stores, and how much room that takes.

Every layer keeps the last `window` tokens. Most layers keep one entry for every few tokens besides, for ever:

    window   ring of the last 128 tokens
    csa      ring + an entry and an index key for every 4 tokens; an entry also sees the 4 tokens before its own
    hca      ring + an entry for every 128 tokens

             position  0   1   2   3 | 4   5   6   7 | 8   9 ...
    csa entry          [     0      ]
                       [ . . . . .  +       1       ]              own tokens, and the window before them

All CSA layers have the same number of entries, and all HCA layers: two streams, their layers as lanes, one row of page
ids each. A page covers `block` tokens: 32 CSA entries with their 32 index keys, or one HCA entry, for 128.

What waits to become an entry is state. Nothing in it is ever moved: the place of a token follows from its position.

    window         ring [window + drafts]   position u in row u mod ring; which positions it holds follows from the
                                            request's position, so none are stored
    csa  *_p, *_z  ring [2 * 4 + drafts]    content and gate (bias added) of each token, both streams
    hca  top, total, mixed  [1 + drafts]    running softmax over the open window: largest gate, sum of weights, weighted
                                            sum, after token u in bank u mod (1 + drafts): 6 KiB instead of 512 KiB

`drafts` tokens can be taken back: that much more is kept, so that what they overwrote is still there.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, lcm

from hybridkv.cache.schema import CacheSchema, CompressedLayer, StateSchema, StreamSchema, TensorSpec
from hybridkv.errors import HybridKVError
from hybridkv.kernels.formats.page_layout import PageFormat, entry_format, index_format

BLOCK_SIZE_ORIGINAL_TOKENS = 128  # lcm of both compression ratios
EMPTY = -inf  # gate of a token that is not there: its weight is exactly 0
KINDS = ("window", "csa", "hca")
MAX_DRAFTS = 64


@dataclass(frozen=True)
class CompressedSpec:
    """What the cache must know about a model's attention."""

    kinds: tuple[str, ...]  # one for each layer: window | csa | hca
    heads: int
    head_dim: int
    rope: int  # rotated channels, the last of each head
    index_dim: int
    window: int = 128
    csa_ratio: int = 4
    hca_ratio: int = 128

    def __post_init__(self) -> None:
        wrong = sorted(set(self.kinds) - set(KINDS))
        if wrong or not self.kinds:
            raise HybridKVError(
                f"each layer must be one of {', '.join(KINDS)}, not {', '.join(wrong) or 'none at all'}"
            )

        sizes = {name: getattr(self, name) for name in ("heads", "window", "csa_ratio", "hca_ratio")}
        if min(sizes.values()) < 1:
            raise HybridKVError(f"compressed attention needs sizes of 1 or more, not {sizes}")

    def layers(self, kind: str) -> tuple[int, ...]:
        """Numbers of the layers of a kind: window, csa or hca."""
        return tuple(i for i, k in enumerate(self.kinds) if k == kind)

    def ratio(self, kind: str) -> int:
        """Tokens that one entry of such a layer stands for; 0: it has no entries."""
        return {"window": 0, "csa": self.csa_ratio, "hca": self.hca_ratio}[kind]


def compressed_schema(
    spec: CompressedSpec,
    kv: str = "bf16",  # f32 | bf16 | fp8 | fp8_entry: window rows and entries
    index: str = "mxfp4",  # f32 | bf16 | fp8 | mxfp4 | nvfp4: index keys
    block: int = BLOCK_SIZE_ORIGINAL_TOKENS,  # tokens a page covers
    drafts: int = 0,  # tokens that can be taken back
    ring: int | None = None,  # rows of the window's ring; None: window + drafts
) -> CacheSchema:
    """What DeepSeek-V4's layers store. `block` must be a multiple of both compression ratios."""
    entries = entry_format(kv, spec.head_dim, spec.rope)
    keys = index_format(index, spec.index_dim)
    quantum = lcm(spec.csa_ratio, spec.hca_ratio)
    if block < 1 or block % quantum:
        raise HybridKVError(f"block must be a multiple of {quantum} tokens (both compression ratios), not {block}")
    if not 0 <= drafts <= MAX_DRAFTS:
        raise HybridKVError(f"drafts must be from 0 to {MAX_DRAFTS}, not {drafts}")
    rows = spec.window + drafts if ring is None else ring
    if rows < spec.window + drafts:
        raise HybridKVError(
            f"a ring of {rows} rows is too small: a window of {spec.window} tokens and {drafts} drafts need "
            f"{spec.window + drafts}"
        )
    streams = []
    states = [StateSchema("window", tuple(range(len(spec.kinds))), (_rows("window", entries, rows),))]
    if csa := spec.layers("csa"):
        tensors = (_entry("entries", entries), _entry("index", keys))
        streams.append(_stream("csa", csa, tensors, block, spec.csa_ratio))
        kept = 2 * spec.csa_ratio + drafts
        waiting = _token_rows("main", kept, spec.head_dim) + _token_rows("index", kept, spec.index_dim)
        states.append(StateSchema("csa_rows", csa, waiting))
    if hca := spec.layers("hca"):
        streams.append(_stream("hca", hca, (_entry("entries", entries),), block, spec.hca_ratio))
        states.append(StateSchema("hca_running", hca, _running(1 + drafts, spec.head_dim)))
    layers = tuple(
        CompressedLayer(kind, spec.ratio(kind), spec.window, spec.heads, entries, keys if kind == "csa" else None)
        for kind in spec.kinds
    )
    # at a multiple of the block no page is half full: shared pages are never written
    return CacheSchema(tuple(streams), tuple(states), layers, share_every=block, rewind=drafts)


def _stream(
    name: str, layers: tuple[int, ...], tensors: tuple[TensorSpec, ...], block: int, ratio: int
) -> StreamSchema:
    """One stream that all layers of a kind share as its lanes."""
    return StreamSchema(name, layers, tensors, block // ratio, heads=1, shared=True, tokens_per_entry=ratio)


def _entry(name: str, fmt: PageFormat) -> TensorSpec:
    return TensorSpec(name, (fmt.width,), fmt.codec.stored)


def _rows(name: str, fmt: PageFormat, rows: int) -> TensorSpec:
    return TensorSpec(name, (rows, fmt.width), fmt.codec.stored)


def _token_rows(name: str, rows: int, width: int) -> tuple[TensorSpec, ...]:
    """Content and gate of the last tokens: channels for the next entry, then those for the token's own entry."""
    shape = (rows, 2 * width)
    return TensorSpec(f"{name}_p", shape, "float32"), TensorSpec(f"{name}_z", shape, "float32", init=EMPTY)


def _running(banks: int, width: int) -> tuple[TensorSpec, ...]:
    shape = (banks, width)
    return (
        TensorSpec("top", shape, "float32", init=EMPTY),
        TensorSpec("total", shape, "float32"),
        TensorSpec("mixed", shape, "float32"),
    )


def compute_block_budget(schema: CacheSchema, memory: int, requests: int, max_tokens: int) -> dict[str, int]:
    """Pages of each pool for `requests` requests of `max_tokens`, or HybridKVError that says what they take."""
    if requests < 1 or max_tokens < 0:
        raise HybridKVError(f"a budget is for one request at least, not for {requests} of {max_tokens} tokens")
    pages = schema.pool_pages(requests, max_tokens)
    need = schema.bytes(pages, requests, max_tokens)
    if need > memory:
        state, tables = requests * schema.slot_bytes, requests * schema.table_bytes(max_tokens)
        raise HybridKVError(
            f"{requests} requests of {max_tokens} tokens take {need} bytes ({need - state - tables} of pages, {state} "
            f"of state, {tables} of page tables), and {memory} are given; lower one of the two, or use kv_dtype='fp8'"
        )
    return pages
