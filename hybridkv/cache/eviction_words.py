"""Settings of an eviction in plain JSON values, as session files and requests that move have them."""

from __future__ import annotations

from dataclasses import fields

from hybridkv.cache.snapshot_file import NotWellFormed
from hybridkv.config import EvictionConfig, is_whole, shown
from hybridkv.errors import HybridKVError, RequestError

OWN_POLICY = "a policy of one's own"  # which is code, and no file holds that


def eviction_as_json(eviction: object) -> object:
    """Its settings; numbers and None stay what they are."""
    if not isinstance(eviction, EvictionConfig):
        return eviction
    settings = {f.name: getattr(eviction, f.name) for f in fields(eviction)}
    return settings | ({} if isinstance(eviction.policy, str) else {"policy": OWN_POLICY})


def eviction_of_json(found: object, how: str) -> EvictionConfig | int | None:
    """What `eviction_as_json` gave, or NotWellFormed. RequestError where its policy is code; `how` to give that."""
    if found is None or (is_whole(found) and found > 0):  # type: ignore[operator]
        return found  # type: ignore[return-value]
    if not isinstance(found, dict) or not isinstance(found.get("policy"), str):
        raise NotWellFormed(f"its settings of eviction are {shown(found)}")
    if found["policy"] == OWN_POLICY:
        raise RequestError(
            f"it has an eviction policy of one's own, which is code and is not kept; give it again: {how}"
        )
    try:
        return EvictionConfig(**found)
    except (TypeError, HybridKVError) as problem:
        raise NotWellFormed(f"its settings of eviction: {problem}") from None
