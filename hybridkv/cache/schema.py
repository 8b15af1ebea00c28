"""What a model stores, declared as data. Pools, state, planner and tests loop over this table and know no other sizes.

Two kinds of memory
-------------------
*Paged* memory grows with tokens. It is made of **entries** (one per token in full attention, one per 4 or 128 tokens in
a compressed layer), and a **page** holds a fixed number of them. A **stream** is what has one length and one row of
page ids. A full-attention layer has one stream for each KV head, so heads and layers may keep different numbers of
tokens, and every page they give up is free for others:

    layer 0  head 0   [ 7][ 3][12]          length 150 of 192
             head 1   [ 8][ 4]              length  97 of 128   (64 entries a page)
    layer 1  head 0   [ 9][ 5][13]          ...

Layers whose entry counts are the same function of position may share one stream; they are its **lanes**, and a page
then holds the entries of all of them. A `StreamSchema` declares a set of alike streams that draw on one pool:

    pool tensor = [lanes, pages, entries_per_page, *shape]      one per TensorSpec

*State* has a fixed size for each request (convolution tails, recurrent state, query buffers): `StateSchema`:

    state tensor = [layers, slots, *shape]                      one per TensorSpec, `init` is what a fresh row holds

A **checkpoint** (checkpoints.py) is a copy of what one slot has, some of it perhaps in a narrower dtype
(rounded_states.py).

State that is **lent** has fewer rows than there are slots: a request has one only while it needs it
(`query_buffers.py`).

Position is not slot
--------------------
`position` is the absolute number of tokens a request has seen: it drives RoPE and compression phase. `length` is how
many entries a stream holds. Without eviction length = position // tokens_per_entry. Only eviction moves them apart.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import lcm, prod
from typing import TYPE_CHECKING, TypeVar

from hybridkv.dtypes import ITEMSIZE, dtype_name, torch_dtype
from hybridkv.errors import HybridKVError
from hybridkv.kernels.formats.page_layout import PageFormat

if TYPE_CHECKING:
    import numpy as np
    import torch

Count = TypeVar("Count", int, "np.ndarray")


def ceil_div(a: Count, b: int) -> Count:
    """a / b, rounded up."""
    return -(-a // b)


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of an entry (paged) or of a slot (state)."""

    name: str
    shape: tuple[int, ...]
    dtype: str  # torch's name for it; a torch.dtype may be given too
    init: float = 0.0  # what a fresh state row holds; pages are never read before they are written
    checkpoint_dtype: str = ""  # of a state tensor in a checkpoint, likewise a name; "": as in a slot

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", dtype_name(self.dtype))
        if self.checkpoint_dtype:
            object.__setattr__(self, "checkpoint_dtype", dtype_name(self.checkpoint_dtype))

    @property
    def torch_dtype(self) -> torch.dtype:
        """What a tensor of it is made with."""
        return torch_dtype(self.dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of one entry, or of one slot of a state."""
        return prod(self.shape) * ITEMSIZE[self.dtype]

    @property
    def checkpoint_bytes(self) -> int:
        """Bytes of it in one checkpoint."""
        return prod(self.shape) * ITEMSIZE[self.checkpoint_dtype or self.dtype]


@dataclass(frozen=True)
class StreamSchema:
    """A set of alike streams that share one page pool."""

    name: str
    layers: tuple[int, ...]  # the model layers served
    tensors: tuple[TensorSpec, ...]  # per entry
    entries_per_page: int
    heads: int = 1  # streams that each layer (or, if shared, the whole set) has
    shared: bool = False  # True: the layers are lanes of the same streams
    tokens_per_entry: int = 1

    def __post_init__(self) -> None:
        if not self.layers or min(self.entries_per_page, self.heads, self.tokens_per_entry) < 1 or not self.tensors:
            raise ValueError(f"stream schema '{self.name}' needs layers, tensors and positive sizes: {self}")

    @property
    def streams(self) -> int:
        """Page lists that a request has."""
        return self.heads if self.shared else self.heads * len(self.layers)

    @property
    def lanes(self) -> int:
        """Layers that share each page list."""
        return len(self.layers) if self.shared else 1

    @property
    def page_bytes(self) -> int:
        """Bytes of one page, all lanes together."""
        return self.lanes * self.entries_per_page * sum(t.nbytes for t in self.tensors)

    def new_entries(self, position: Count, tokens: Count) -> Count:
        """Entries that `tokens` more tokens bring to a request at `position`, or to each of several."""
        return (position + tokens) // self.tokens_per_entry - position // self.tokens_per_entry

    def entries(self, tokens: int) -> int:
        """Entries that exist once `tokens` tokens were seen and nothing was evicted."""
        return tokens // self.tokens_per_entry

    def pages_per_stream(self, tokens: int) -> int:
        """Pages that one stream needs for so many tokens, if none is evicted."""
        return ceil_div(self.entries(tokens), self.entries_per_page)

    def pages(self, tokens: int) -> int:
        """Pages that a request of this length holds over all streams."""
        return self.streams * self.pages_per_stream(tokens)

    def place(self, layer: int) -> tuple[int, slice]:
        """(lane, stream rows) of a model layer."""
        i = self.layers.index(layer)
        return (i, slice(0, self.heads)) if self.shared else (0, slice(i * self.heads, (i + 1) * self.heads))


@dataclass(frozen=True)
class StateSchema:
    """Fixed-size memory of a request in some layers."""

    name: str
    layers: tuple[int, ...]
    tensors: tuple[TensorSpec, ...]
    lent: bool = False  # a request has a row of it for a while; else one row a slot

    @property
    def slot_bytes(self) -> int:
        """Bytes of one request, all layers together."""
        return len(self.layers) * sum(t.nbytes for t in self.tensors)

    @property
    def checkpoint_bytes(self) -> int:
        """Bytes of it in one checkpoint, which has nothing that is lent."""
        return 0 if self.lent else len(self.layers) * sum(t.checkpoint_bytes for t in self.tensors)


@dataclass(frozen=True)
class CompressedLayer:
    """A layer that keeps a window of recent tokens, and of the rest one entry for every `ratio` tokens."""

    kind: str  # window | csa | hca
    ratio: int  # tokens an entry stands for; 0: there are none
    window: int  # tokens a query sees one by one, itself included
    heads: int  # query heads; all share the one stored vector
    entries: PageFormat  # of window rows and entries
    index: PageFormat | None = None  # of the keys by which entries are chosen

    @property
    def head_dim(self) -> int:
        """Channels of an entry."""
        return self.entries.dim


@dataclass(frozen=True)
class CacheSchema:
    """All that a model stores for a request."""

    streams: tuple[StreamSchema, ...] = ()
    states: tuple[StateSchema, ...] = ()
    compressed: tuple[CompressedLayer, ...] = ()  # one a layer; none where the model has no such layers
    share_every: int = 1  # a request can be forked or saved only at multiples of this many tokens
    rewind: int = 0  # how many of the last tokens can be taken back in spite of state

    def __post_init__(self) -> None:
        names = [s.name for s in (*self.streams, *self.states)]
        if len(set(names)) != len(names):
            raise ValueError(f"schema names must differ: {names}")
        paged = [str(layer) for s in self.streams for layer in s.layers]
        state = [f"{layer}: {t.name}" for s in self.states for layer in s.layers for t in s.tensors]
        for found, what in ((paged, "layers in two stream schemas"), (state, "state tensors of one name in a layer")):
            if len(set(found)) != len(found):
                raise ValueError(f"{what}: {sorted({x for x in found if found.count(x) > 1})}")

    @property
    def slot_bytes(self) -> int:
        """State bytes of one request, whatever its length, as long as it is resident."""
        return sum(s.slot_bytes for s in self.states if not s.lent)

    @property
    def checkpoint_bytes(self) -> int:
        """Bytes of one checkpoint: `slot_bytes`, but for what is kept in a narrower dtype there."""
        return sum(s.checkpoint_bytes for s in self.states)

    @property
    def query_buffer_bytes(self) -> int:
        """State bytes that are lent to one request."""
        return sum(s.slot_bytes for s in self.states if s.lent)

    @property
    def query_window(self) -> int | None:
        """Last queries of a request that its attention layers keep for scoring; None: they keep none."""
        return next((t.shape[0] for s in self.states for t in s.tensors if t.name == "queries"), None)

    def kv_bytes(self, tokens: int) -> int:
        """Bytes of the pages that one request of this length holds."""
        return sum(s.pages(tokens) * s.page_bytes for s in self.streams)

    def pool_pages(self, requests: int, tokens: int) -> dict[str, int]:
        """Pages of each pool so that this many requests of this length fit."""
        return {s.name: requests * s.pages(tokens) for s in self.streams}

    def table_bytes(self, tokens: int) -> int:
        """Bytes of one slot's page ids on the device, for requests of up to `tokens` tokens."""
        return sum(s.pages(tokens) for s in self.streams) * ITEMSIZE["int32"]

    def bytes(self, pages: dict[str, int], slots: int, max_tokens: int, query_buffers: int = 0) -> int:
        """What pools of these sizes, this many slots for requests of `max_tokens` tokens and query buffers allocate."""
        pools = sum(pages[s.name] * s.page_bytes for s in self.streams)
        return (
            pools + slots * (self.slot_bytes + self.table_bytes(max_tokens)) + query_buffers * self.query_buffer_bytes
        )


# ---- columns: what prompts that begin alike share (reuse.py)

SCAN = 64  # tokens: recurrent state is the same bits however a prompt is cut at multiples of them
LONGEST_COLUMN = 4096


def column_tokens(schema: CacheSchema) -> int:
    """Tokens of a column: whole pages of every stream, and of the scan where there is state."""
    sizes = [s.entries_per_page * s.tokens_per_entry for s in schema.streams]
    return lcm(*sizes, SCAN if any(not s.lent for s in schema.states) else 1)


def check_column(schema: CacheSchema) -> None:
    """Whether the page sizes allow columns, or HybridKVError."""
    q = column_tokens(schema)
    if q > LONGEST_COLUMN:
        sizes = sorted({s.entries_per_page for s in schema.streams})
        raise HybridKVError(
            f"pages of {', '.join(map(str, sizes))} entries fill at the same time only every {q} tokens, too seldom "
            "for prompts to share them; use page_size 16, 32, 64 or 128, or open the model with reuse=None"
        )
