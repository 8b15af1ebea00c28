"""Planner: the cache schema and the list of weights turned into bytes. Pure functions, so what fits is known before any
memory is taken, and without torch.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING

from hybridkv.cache.schema import CacheSchema
from hybridkv.dtypes import dtype_name, itemsize
from hybridkv.errors import HybridKVError
from hybridkv.kernels.linear.block_form import BlockForm
from hybridkv.kernels.linear.packed_planes import half_bytes, int4_bytes, suits_half
from hybridkv.models.config import ModelConfig
from hybridkv.models.inventory import Weight
from hybridkv.models.registry import family_of
from hybridkv.models.weight_forms import block_bytes, fp8_bytes, weight_bytes

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class CachePlan:
    """Sizes of all pools: what KVCacheManager is built from, and exactly what it then allocates."""

    schema: CacheSchema
    pages: dict[str, int]
    slots: int
    max_tokens: int  # longest request
    query_buffers: int = 0  # requests whose last queries are kept at the same time
    workspace: int = 0  # bytes that steps take for a while beside it (engine/workspace.py)
    checkpoints: int = 0  # copies of a request's state that are kept for others
    staging: int = 0  # bytes beside it that copies to and from the host go through

    @property
    def checkpoint_bytes(self) -> int:
        """Of the states that are kept for others."""
        return self.checkpoints * self.schema.checkpoint_bytes

    @property
    def pool_bytes(self) -> dict[str, int]:
        """Of the pages of each kind of stream."""
        return {s.name: self.pages[s.name] * s.page_bytes for s in self.schema.streams}

    @property
    def state_bytes(self) -> int:
        """Of what has a fixed size for each request, query buffers included."""
        return self.slots * self.schema.slot_bytes + self.query_buffers * self.schema.query_buffer_bytes

    @property
    def table_bytes(self) -> int:
        """Of the page tables on the device."""
        return self.slots * self.schema.table_bytes(self.max_tokens)

    @property
    def nbytes(self) -> int:
        """Of the whole cache, `workspace` and `staging` aside."""
        every = self.schema.bytes(self.pages, self.slots, self.max_tokens, self.query_buffers)
        return every + self.checkpoint_bytes


def matrix_elements(config: ModelConfig) -> float:
    """Of all that multiplies a token: every weight but the embedding, of which one row is read, and the experts that it
    does not go to.
    """
    count = model_bytes(config, lambda name: name == "lm_head.weight", "bfloat16", "cuda") / 2
    if moe := config.moe:
        unused = (config.layers - len(moe.dense_layers)) * (moe.experts - moe.per_token)
        count -= unused * 3 * config.hidden * moe.intermediate
    return count - (0 if config.tied else config.vocab * config.hidden)


def human(size: float) -> str:
    """1536 -> '1.5 KiB'."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def model_bytes(
    config: ModelConfig,
    has: Callable[[str], bool],
    dtype: str | torch.dtype,
    device: str,
    fp8: bool = False,
    packed: Mapping[str, int] | None = None,
    half: bool = False,
    int4: Container[str] = (),
    share: Callable[[Weight], Weight] | None = None,
    blocks: Mapping[str, BlockForm] | None = None,
) -> int:
    """Bytes of all weights in memory. `has` answers whether the checkpoint holds a tensor that not every model has;
    `device` is cpu or cuda; `fp8`: matrices are kept as E4M3 codes (kernels/linear/fp8.py: keeps_codes); `packed` gives
    the bytes of matrices that stay in a GGUF file's formats; `half`: on a CPU matrices are f16 where that suits
    (kernels/linear/half.py), those named in `int4` have 4-bit codes beside that. `share`: what a rank of several has of
    a tensor (parallel/cuts.py); `packed` is of that part then. `blocks` has the forms of matrices and experts that stay
    codes with a scale for each block (kernels/linear/block_scaled.py).
    """
    name, packed, blocks = dtype_name(dtype), packed or {}, blocks or {}
    total = 0
    for weight in family_of(config).weights(config, has):
        weight = weight if share is None else share(weight)
        coded = block_bytes(weight, blocks)
        if coded is not None:
            total += coded
        elif weight.kind == "matrix" and weight.name in packed:
            total += packed[weight.name]
        elif weight.kind == "matrix" and fp8:
            total += fp8_bytes(weight)
        elif weight.kind == "matrix" and half and suits_half(sum(rows for _, rows in weight.joined), weight.shape[1]):
            total += half_bytes(*weight.shape)
            total += int4_bytes(*weight.shape) if all(part in int4 for part, _ in weight.joined) else 0
        else:
            total += weight_bytes(weight, name, device != "cpu")
    tied = config.tied or not has("lm_head.weight")
    if not tied or device != "cpu":
        return total
    # on a CPU a tied head is a second, packed copy (kernels/linear/)
    table = Weight("model.embed_tokens.weight", (config.vocab, config.hidden), "plain")
    head = (table if share is None else share(table)).shape
    return total + (half_bytes(*head) if half and suits_half(*head) else prod(head) * itemsize(name))


def planned_tensors(config: ModelConfig, raw: Mapping[str, object]) -> Callable[[str], bool]:
    """Which of the tensors that not every model has a Hugging Face config promises, for files not here yet."""
    text = raw.get("text_config")
    found = text if isinstance(text, Mapping) else raw

    def has(name: str) -> bool:
        if name.endswith(".bias"):
            return bool(found.get("attention_bias" if ".self_attn." in name else "mlp_bias"))
        return name == "lm_head.weight" and not config.tied

    return has


def most_that_fits(need: Callable[[int], int], room: int, limit: int) -> int:
    """The largest number up to `limit` whose need, which grows with it, is no more than `room`; 0 if none is."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if need(middle) <= room else (low, middle - 1)
    return low


def fewer_checkpoints(rows: int, least: int) -> Iterator[int]:
    """How many checkpoints are tried, one after the other, where not all that is asked for fits beside them: what is
    kept for others is no reason to refuse.
    """
    yield rows
    while rows > least:
        rows = max(least, rows // 2)
        yield rows


def longest_context(schema: CacheSchema, room: int, requests: int, limit: int) -> int:
    """Most tokens, up to `limit`, that each of `requests` requests can have in `room` bytes if none is evicted."""
    return most_that_fits(lambda n: schema.bytes(schema.pool_pages(requests, n), requests, n), room, limit)


def most_requests(schema: CacheSchema, room: int, context: int) -> int:
    """How many requests of `context` tokens, of which none is evicted, fit in `room` bytes."""
    each = schema.bytes(schema.pool_pages(1, context), 1, context)
    return max(room, 0) // each if each else 0


def plan_cache(
    schema: CacheSchema,
    requests: int,
    context: int,  # tokens of the longest request
    room: int | None,  # bytes for pools, state and page tables; None: as much as it takes
    shrink_context: bool = False,  # whether a shorter longest request is acceptable
    held: int | None = None,  # tokens that a request holds at the most, where eviction bounds it; None: all of them
    query_buffers: int | None = None,  # requests whose last queries are kept at the same time; None: all
    workspace: int = 0,  # bytes of the room that steps take for a while
    checkpoints: int = 0,  # copies of a request's state that are kept for others
    staging: int = 0,  # bytes of the room that copies to and from the host go through
) -> CachePlan:
    """Pools for `requests` requests of `context` tokens, or as many pages as there is room for, but at least one such
    request.
    """
    held = context if held is None else min(held, context)
    query_buffers = (
        min(requests if query_buffers is None else query_buffers, requests) if schema.query_buffer_bytes else 0
    )
    whole = CachePlan(schema, schema.pool_pages(requests, held), requests, context, query_buffers, workspace)
    whole = replace(whole, checkpoints=checkpoints, staging=staging)
    if room is None:
        return whole
    room -= workspace + staging
    if whole.nbytes <= room:
        return whole
    bounded = held < context

    def shared(tokens: int) -> CachePlan:
        """Pages of `tokens` tokens for all of them together."""
        longest = context if bounded else min(context, tokens)
        return replace(whole, pages=schema.pool_pages(1, tokens), max_tokens=longest)

    tokens = most_that_fits(lambda n: shared(n).nbytes, room, requests * held)
    if tokens < held and (bounded or not shrink_context) or tokens < 1:
        least = shared(held)
        parts = {
            f"one context of {held} tokens": schema.kv_bytes(held),
            f"the state of {requests} requests": requests * schema.slot_bytes,
            f"the page tables of {requests} requests": least.table_bytes,
            f"the last queries of {query_buffers} requests": query_buffers * schema.query_buffer_bytes,
            f"{checkpoints} checkpoints of state": least.checkpoint_bytes,
        }
        beside = f" beside {human(workspace)} for logits, sampling and eviction" if workspace else ""
        beside += f" and {human(staging)} for copies to the host" if workspace and staging else ""
        named = ", ".join(f"{human(size)} for {what}" for what, size in parts.items() if size)
        raise HybridKVError(
            f"{human(least.nbytes)} are needed ({named}), but {human(max(room, 0))} are left for the cache{beside}; "
            f"give more memory, lower max_context (at most {tokens} tokens fit) or max_requests, or use kv_dtype='bf16'"
        )
    return shared(tokens)
