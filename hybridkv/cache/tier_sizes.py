"""Sizes of the memory on the host that caches go to, without torch: the planner knows them before anything is taken."""

from __future__ import annotations

from hybridkv.cache.schema import CacheSchema, ceil_div

BLOCK = 256 << 10  # bytes; what is put there takes whole blocks
STAGING = 64 << 20  # bytes of one of two buffers on the device, and of the largest chunk
IN_FLIGHT = 256 << 20  # bytes on their way to the host: while there are more, prefixes are dropped instead
CPU_LIMIT = 1 << 30  # bytes on a CPU, where only the state of frozen caches goes there
MOST = 32 << 30  # bytes where nobody says how many; a quarter of what is free at the most


def staging_bytes(gpu: bool, limit: int | None) -> int:
    """Bytes of device memory that copies to and from the host go through; `limit`: bytes on the host, None: some."""
    return 2 * STAGING if gpu and limit != 0 else 0


def conversations_held(schema: CacheSchema, tokens: int, limit: int, pages: bool = True) -> int | None:
    """How many caches of `tokens` entries a stream, without the last queries of a budget, `limit` bytes on the host
    hold; `pages`: with their pages, else their state alone. None: any number, since there is nothing of them to hold.
    """
    blocks = ceil_div(schema.slot_bytes, BLOCK) + (ceil_div(schema.kv_bytes(tokens), BLOCK) if pages else 0)
    return max(0, limit // BLOCK - 1) // blocks if blocks else None  # one is left for what rounding takes
