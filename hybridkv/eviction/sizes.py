"""How much eviction lets a request hold, and what it takes beside: numbers that a plan needs. No torch is needed."""

from __future__ import annotations

from hybridkv.config import CHUNK_QUANTUM, UNEVEN_POLICIES, CacheConfig, EngineConfig, EvictionConfig

STREAMS = "attention"  # the streams whose entries are chosen
SCORE_BYTES = 64 << 20  # of scores of query heads that are computed at once
QUERY_BUFFERS = EngineConfig.max_requests  # at least: by default every request has one


def max_held_tokens(eviction: EvictionConfig | None, step_tokens: int, page_size: int, parts: int = 1) -> int | None:
    """Tokens that a stream of a bounded request holds on average at the most; None: all of them.

    `parts`: ranks that have different streams of it. Where these share a budget, one of them may keep all of it.
    """
    if eviction is None or not eviction.bounded:
        return None
    spread = spread_of(eviction.policy)
    held = (eviction.budget + step_tokens) * (parts if spread == "heads" else 1)
    # streams of different lengths each fill a last page of their own
    return held + (page_size if spread is not None else 0)


def bounded_stride(step_tokens: int) -> int:
    """Tokens of a bounded prompt from one eviction to the next: a quarter of a step. Between them it may then hold
    three quarters of a step beyond its budget, which is what the question at its end chooses from.
    """
    return max(CHUNK_QUANTUM, step_tokens // 4 // CHUNK_QUANTUM * CHUNK_QUANTUM)


def spread_of(policy: object) -> str | None:
    """`Policy.spread`: between what it shares a budget unevenly."""
    if isinstance(policy, str):
        name, *settings = policy.split(":")
        plain = "spread=all" if name in UNEVEN_POLICIES else "spread=even"
        spread = next((part for part in reversed(settings) if part.startswith("spread=")), plain)
        return {"spread=even": None, "spread=pyramid": "layers"}.get(spread, "heads")
    from hybridkv.eviction.named import find_policy  # policies compute, and so need torch

    return find_policy(policy).spread


def most_held(config: CacheConfig, step_tokens: int, parts: int = 1) -> int | None:
    """`max_held_tokens` of the requests that ask for nothing else."""
    return max_held_tokens(config.eviction, step_tokens, config.page_size, parts)


def query_buffers_for(config: CacheConfig, step_tokens: int, slots: int) -> int:
    """Query buffers that are needed so that no request waits for one; without a budget as many as were asked for.

    A request needs none after its prompt, unless it is evicted again. A prompt that is evicted has more than budget +
    window tokens, and one step can finish one such prompt, read several short ones and start another: each needs a
    buffer. Conversations keep theirs, so raise `query_buffers` for many conversations.
    """
    if config.budget is None:
        return min(slots, config.query_buffers or 0)
    if config.bounded or config.decode_every:
        return slots
    enough = max(QUERY_BUFFERS, step_tokens // (config.budget + config.window + 1) + 2)
    return min(slots, config.query_buffers or enough)
