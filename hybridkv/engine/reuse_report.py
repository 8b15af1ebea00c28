"""What an answer says of reuse: how much of its prompt was there already, and why not more."""

from __future__ import annotations

from typing import Any

from hybridkv.cache.lookup import Hit
from hybridkv.request import Request


def report(hit: Hit | None, prompt: int, q: int, taken: bool = False) -> dict[str, Any]:
    """`Request.reuse`: plain values. None: nothing was looked for; `taken`: a checkpoint is taken where columns end."""
    if hit is None:
        return {"cached": 0, "matched": 0, "read": prompt, "reason": "off", "why": "nothing was looked up"}
    cached = min(hit.cached, prompt)
    said: dict[str, Any] = {
        "cached": cached, "matched": hit.matched, "read": prompt - cached, "reason": hit.reason,
    }  # fmt: skip
    if cached:
        said["tier"] = "host" if hit.loaded else "device"
    if hit.diverged_at is not None:
        said["diverged_at"] = hit.diverged_at
    return said | {"why": _sentence(hit, q, taken)}


def continued(cached: int, prompt: int, what: str = "the conversation's own cache") -> dict[str, Any]:
    """The same for a turn that goes on in its conversation's own cache, or in that of a document."""
    said = {"cached": cached, "matched": cached, "read": prompt - cached, "reason": "full"}
    return said | {"why": f"{what} goes on"}


def _sentence(hit: Hit, q: int, taken: bool) -> str:
    at, matched = f"{hit.cached:,}", f"{hit.matched:,}"
    now = f"; one is taken at {matched} now" if taken else ""
    return {
        "cold": "no prompt that begins like this one is kept",
        "diverged": f"the prompt leaves what is kept at token {hit.diverged_at or hit.matched:,}",
        "no_checkpoint": f"{matched} tokens are kept, but no checkpoint between {at} and {matched}{now}",
        "dropped": f"a checkpoint between {at} and {matched} was dropped to make room{now}",
        "window": "the queries of the last tokens are needed to choose what is kept",
        "bounded": "what follows is evicted while it is read",
        "loading_slower": "reading it again is quicker than loading it",
        "too_short": f"a prompt needs more than {q} tokens",
        "off": "nothing was looked up",
        "full": "all but the end of the prompt was there",
    }[hit.reason]


def finish_report(request: Request, written: int) -> None:
    """What is known when a request ends: `written`, tokens more that others need not read, and the time of copies."""
    request.reuse["written"] = max(0, written - request.reuse["cached"])
    if request.restored:
        request.reuse["restored"] = request.restored_tokens
    taken = None if request.loading is None else request.loading.ms
    if taken is not None:
        request.reuse["load_ms"] = round(taken, 3)
