"""What a request took, in the words of the public interface (`Completion.stats`)."""

from __future__ import annotations

from hybridkv.cache import KVCacheManager
from hybridkv.cache.schema import CacheSchema, ceil_div
from hybridkv.eviction.entries import lengths_everywhere, mean_length
from hybridkv.eviction.sizes import STREAMS
from hybridkv.request import Request


def kept_bytes(request: Request, manager: KVCacheManager, schema: CacheSchema) -> int:
    """Bytes of the pages that a resident request's entries are in; `schema`: as in `stats_of`."""
    if schema is manager.schema:
        return manager.used_bytes(request.key)
    everywhere, own = lengths_everywhere(request, manager.position(request.key)), manager.lengths(request.key)
    total = 0
    for s in schema.streams:
        # without a record of all ranks each of them holds as many entries as this one
        lengths = own[s.name] if everywhere is None or s.name != STREAMS else everywhere
        pages = ceil_div(lengths, s.entries_per_page)
        total += int(pages.sum()) * s.streams // pages.size * s.page_bytes
    return total


def kept_tokens(request: Request, manager: KVCacheManager) -> float:
    """Entries of a stream on average; over ranks of the streams of all of them."""
    return mean_length(request, manager) if request.evictions else manager.kept_tokens(request.key)


def stats_of(request: Request, manager: KVCacheManager, schema: CacheSchema) -> dict[str, float]:
    """`schema`: of the model's whole cache; over ranks the manager's is of this rank's part."""
    stats: dict[str, float] = {"preemptions": request.preemptions, "cached_tokens": request.cached_tokens}
    if request.restored:
        stats |= {"restored": request.restored, "restored_tokens": request.restored_tokens}
    if request.given_up:
        stats["cache_given_up"] = 1  # it was to go on in a held cache, which made room for others
    if request.key in manager.slot_of:
        stats |= {
            "kept_tokens": kept_tokens(request, manager),
            "kv_bytes_full": schema.kv_bytes(manager.position(request.key)),
            "kv_bytes_kept": kept_bytes(request, manager, schema),
            "state_bytes": schema.slot_bytes,
            "eviction_record_bytes": sum(record.nbytes for record in request.evictions.values()),
        }
    if request.first_token_at and request.last_token_at and request.started_at:
        prefill = request.first_token_at - request.started_at
        decode = request.last_token_at - request.first_token_at
        stats |= {
            "wait_s": request.started_at - request.added_at,
            "prefill_s": prefill,
            "prefill_tok_s": (request.prompt_tokens - request.cached_tokens) / prefill,
            "decode_s": decode,
            "decode_tok_s": (request.answer_tokens - 1) / decode if decode > 0 else 0.0,
        }
    return stats
