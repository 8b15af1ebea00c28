"""Policies in plain JSON values: what rank 0 tells the others. Code is not sent: a policy of one's own has no words."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from hybridkv.errors import RequestError
from hybridkv.eviction.policies import Heads, KeyDiff, Knorm, Leverage, Peak, Random, SnapKV, Streaming, Tova
from hybridkv.eviction.policy import Policy
from hybridkv.eviction.replay import Replay
from hybridkv.eviction.spread import Ada, All, Pyramid

KINDS: dict[str, type[Any]] = {
    kind.__name__: kind
    for kind in (Peak, Heads, Replay, SnapKV, Tova, Knorm, KeyDiff, Leverage, Streaming, Random, Ada, All, Pyramid)
}


def policy_words(policy: object) -> object:
    """A policy's name and settings, or RequestError: it is code. A text stays what it is."""
    if not isinstance(policy, Policy):
        return policy
    name = type(policy).__name__
    if KINDS.get(name) is not type(policy):
        raise RequestError(
            f"policy {name} is code of your own, which is not sent to other ranks: choose one of hybridkv's policies, "
            "or use tp=1"
        )
    settings = {f.name: policy_words(getattr(policy, f.name)) for f in fields(policy)}  # type: ignore[arg-type]
    return {"policy": name, "settings": settings}


def policy_of_words(found: Any) -> Any:
    """What `policy_words` was given."""
    if not isinstance(found, dict):
        return found
    return KINDS[found["policy"]](**{name: policy_of_words(value) for name, value in found["settings"].items()})
