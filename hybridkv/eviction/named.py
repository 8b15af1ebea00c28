"""Policies by name, with their settings: `keydiff`, `peak:pooling=31`, `snapkv:pooling=max:spread=layer`.

`spread` says how the budget is shared: `even`, `layer` (Ada), `all` (All) or `pyramid`. A name alone is the policy as
it was measured to be best, `spread` included. `auto` stands for one of two, by what is known when the cache is cut:
AUTO["seen"] where the question has been read, AUTO["unseen"] where it is still to come.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace

from hybridkv.config import POLICY_NAMES, meant, shown
from hybridkv.errors import HybridKVError
from hybridkv.eviction.policies import Heads, KeyDiff, Knorm, Leverage, Peak, Random, SnapKV, Streaming, Tova
from hybridkv.eviction.policy import Policy
from hybridkv.eviction.replay import Replay
from hybridkv.eviction.spread import Ada, All, Pyramid, Spread

POLICIES: dict[str, Callable[[], Policy]] = {
    "peak": lambda: All(Peak(), layers=0.75),
    "heads": lambda: All(Heads(), layers=0.5),
    "replay": lambda: All(Replay()),
    "snapkv": SnapKV,
    "tova": Tova,
    "knorm": Knorm,
    "keydiff": KeyDiff,
    "leverage": Leverage,
    "streaming": Streaming,
    "random": Random,
}
AUTO = {"seen": "peak", "unseen": "heads"}
SPREADS: dict[str, Callable[[Policy], Policy]] = {
    "even": lambda policy: policy,
    "layer": Ada,
    "ada": Ada,
    "all": All,
    "pyramid": Pyramid,
}
SPREAD_SETTINGS = ("spread", "floor", "layers", "steepness")


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
    if (
        scope != "head"
        and isinstance(found, Spread)
        and not any(name in SPREAD_SETTINGS for name, _ in _settings(policy))
    ):
        return found.policy
    return found


def resolved_name(policy: object, seen: bool) -> str:
    """What the policy is called, with `auto` replaced by what it stands for."""
    if isinstance(policy, Spread):
        return f"{type(policy).__name__}({resolved_name(policy.policy, seen)})"
    if not isinstance(policy, str):
        return type(policy).__name__
    name, *settings = policy.split(":")
    return ":".join([AUTO["seen" if seen else "unseen"] if name == "auto" else name, *settings])


def parse_policy(text: str) -> Policy:
    """`name` or `name:setting=value:...`, or HybridKVError: what is unknown, and what there is."""
    name = text.partition(":")[0]
    if name not in POLICIES:
        choices = ", ".join(POLICY_NAMES)
        raise HybridKVError(
            f"policy {name[:80]!r} is unknown{meant(name, POLICY_NAMES)}; choose {choices}, or give a Policy"
        )
    found = POLICIES[name]()
    # spread first: the settings of the one that is asked for are set on that one
    for setting, value in sorted(_settings(text), key=lambda pair: pair[0] != "spread"):
        found = _with(found, setting, value, text)
    return found


def _settings(text: str) -> list[tuple[str, str]]:
    """(setting, value) pairs of a text, or HybridKVError where it is not written like that."""
    found: dict[str, str] = {}
    for part in text.split(":")[1:]:
        setting, equals, value = part.partition("=")
        if not equals:
            raise HybridKVError(f"policy {text[:80]!r}: settings are written name:setting=value, not {part[:40]!r}")
        if setting in found:
            raise HybridKVError(f"policy {text[:80]!r}: {setting[:40]} is there twice; leave one out")
        found[setting] = value
    return list(found.items())


def _with(policy: Policy, setting: str, value: str, text: str) -> Policy:
    inner = policy.policy if isinstance(policy, Spread) else policy
    if setting == "spread":
        if value not in SPREADS:
            raise HybridKVError(f"policy {text[:80]!r}: spread is {', '.join(SPREADS)}, not {value[:40]!r}")
        return SPREADS[value](inner)
    of_spread = [f.name for f in fields(policy) if f.name != "policy"] if isinstance(policy, Spread) else []
    if setting in of_spread:
        return replace(policy, **{setting: _value(policy, setting, value, text)})  # type: ignore[type-var]
    known = [f.name for f in fields(inner)]  # type: ignore[arg-type]
    if setting not in known:
        there = [*known, "spread", *of_spread]
        close = meant(setting, there)
        raise HybridKVError(
            f"policy {text[:80]!r}: there is no setting {setting[:40]!r}{close}; it has {', '.join(there)}"
        )
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
