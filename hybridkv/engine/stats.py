"""What a request took, in the words of the public interface (`Completion.stats`)."""

from __future__ import annotations

from hybridkv.cache import KVCacheManager
from hybridkv.eviction.entries import mean_length
from hybridkv.request import Request


def stats_of(request: Request, manager: KVCacheManager) -> dict[str, float]:
    stats: dict[str, float] = {"preemptions": request.preemptions, "cached_tokens": request.cached_tokens}
    if request.restored:
        stats |= {"restored": request.restored, "restored_tokens": request.restored_tokens}
    if request.given_up:
        stats["cache_given_up"] = 1  # it was to go on in a held cache, which made room for others
    if request.key in manager.slot_of:
        stats |= {
            "kept_tokens": mean_length(request, manager) if request.evictions else manager.kept_tokens(request.key),
            "kv_bytes_full": manager.schema.kv_bytes(manager.position(request.key)),
            "kv_bytes_kept": manager.used_bytes(request.key),
            "state_bytes": manager.schema.slot_bytes,
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
