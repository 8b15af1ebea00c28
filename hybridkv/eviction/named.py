"""Policies by name, with their settings: `keydiff`, `peak:pooling=31`, `snapkv:pooling=max:spread=layer`.

`spread` says how the budget is shared: `even`, `layer` (Ada), `all` (All) or `pyramid`. A name alone is the policy as
it was measured to be best, `spread` included. `auto` stands for one of two, by what is known when the cache is cut:
AUTO["seen"] where the question has been read, AUTO["unseen"] where it is still to come.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from difflib import get_close_matches

from hybridkv.config import POLICY_NAMES, shown
from hybridkv.errors import HybridKVError
from hybridkv.eviction.policies import KeyDiff, Knorm, Leverage, Peak, Random, SnapKV, Streaming, Tova
from hybridkv.eviction.policy import Policy
from hybridkv.eviction.replay import Replay
from hybridkv.eviction.spread import Ada, All, Pyramid, Spread

POLICIES: dict[str, Callable[[], Policy]] = {
    "peak": lambda: Ada(Peak()),
    "replay": lambda: All(Replay()),
    "snapkv": SnapKV,
    "tova": Tova,
    "knorm": Knorm,
    "keydiff": KeyDiff,
    "leverage": Leverage,
    "streaming": Streaming,
    "random": Random,
}
AUTO = {"seen": "peak", "unseen": "keydiff"}
SPREADS: dict[str, Callable[[Policy], Policy]] = {
    "even": lambda policy: policy,
    "layer": Ada,
    "ada": Ada,
    "all": All,
    "pyramid": Pyramid,
}


def find_policy(policy: object, seen: bool = True, scope: str = "head") -> Policy:
    """The policy itself, or the one that a text names.

    Args:
        policy: a Policy, or a text.
        seen: whether the question has been read, for `auto`.
        scope: where several streams have one list of survivors, a name alone stands for even budgets.
    """
    if isinstance(policy, Policy):
        return policy
    if not isinstance(policy, str):
        raise HybridKVError(
            f"policy {shown(policy)} is unknown; choose {', '.join(POLICY_NAMES)}, or give a hybridkv.eviction.Policy"
        )
    found = parse_policy(resolved_name(policy, seen))
    if scope != "head" and isinstance(found, Spread) and "spread=" not in policy:
        return found.policy
    return found


def resolved_name(policy: object, seen: bool) -> str:
    """What the policy is called, with `auto` replaced by what it stands for."""
    if not isinstance(policy, str):
        return type(policy).__name__
    name, *settings = policy.split(":")
    return ":".join([AUTO["seen" if seen else "unseen"] if name == "auto" else name, *settings])


def parse_policy(text: str) -> Policy:
    """`name` or `name:setting=value:...`, or HybridKVError: what is unknown, and what there is."""
    name, *parts = text.split(":")
    if name not in POLICIES:
        close = get_close_matches(name, POLICY_NAMES, 1)
        meant = f" (did you mean {close[0]}?)" if close else ""
        choices = ", ".join(POLICY_NAMES)
        raise HybridKVError(f"policy {name[:80]!r} is unknown{meant}; choose {choices}, or give a Policy")
    found = POLICIES[name]()
    for part in parts:
        setting, equals, value = part.partition("=")
        if not equals:
            raise HybridKVError(f"policy {text[:80]!r}: settings are written name:setting=value, not {part[:40]!r}")
        found = _with(found, setting, value, text)
    return found


def _with(policy: Policy, setting: str, value: str, text: str) -> Policy:
    inner = policy.policy if isinstance(policy, Spread) else policy
    if setting == "spread":
        if value not in SPREADS:
            raise HybridKVError(f"policy {text[:80]!r}: spread is {', '.join(SPREADS)}, not {value[:40]!r}")
        return SPREADS[value](inner)
    if isinstance(policy, Spread) and setting in {f.name for f in fields(policy)} - {"policy"}:
        return replace(policy, **{setting: _value(policy, setting, value, text)})  # type: ignore[type-var]
    known = [f.name for f in fields(inner)]  # type: ignore[arg-type]
    if setting not in known:
        there = ", ".join([*known, "spread"])
        raise HybridKVError(f"policy {text[:80]!r}: there is no setting {setting[:40]!r}; it has {there}")
    changed = replace(inner, **{setting: _value(inner, setting, value, text)})  # type: ignore[type-var]
    return replace(policy, policy=changed) if isinstance(policy, Spread) else changed


def _value(policy: Policy, setting: str, value: str, text: str) -> object:
    kind = type(getattr(policy, setting))
    try:
        if kind is bool:
            return {"yes": True, "no": False, "true": True, "false": False}[value.lower()]
        return kind(value)
    except (KeyError, ValueError):
        what = "yes or no" if kind is bool else {int: "a whole number", float: "a number"}.get(kind, "a text")
        raise HybridKVError(f"policy {text[:80]!r}: {setting} takes {what}, not {value[:40]!r}") from None
