"""Prefix: a text that is read once and stays, for all prompts that begin with it. `LLM.prefix` makes it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from hybridkv.cache.pins import Pin, check_pin, pin_bytes, reuse_of
from hybridkv.config import SamplingParams
from hybridkv.engine.engine import Engine
from hybridkv.engine.owner import EngineOwner, Ticket
from hybridkv.errors import HybridKVError, RequestError
from hybridkv.request import Request

SALT = b""  # of all that the library reads


class Prefix:
    """The beginning of prompts to come, read and kept. Nothing has to name it: prompts that begin with it find it.

    Args:
        owner: the thread of the engine that keeps it.
        tokens: how many of the text's tokens are kept: whole columns (docs/reuse.md).
        nbytes: what they take.
        pinned: what keeps them; None: they go when room is needed, as everything else.
    """

    def __init__(self, owner: EngineOwner, tokens: int, nbytes: int, pinned: Pin | None) -> None:
        self.tokens, self.bytes = tokens, nbytes
        self._owner, self._pin = owner, pinned

    @property
    def pinned(self) -> bool:
        """Whether it stays however short memory is."""
        return self._pin is not None

    def drop(self) -> None:
        """It may go like all that was read, when room is needed. Requests that run on it go on. May be repeated."""
        pinned, self._pin = self._pin, None
        if pinned is not None:
            self._owner.run(lambda engine: engine.unpin(pinned))

    def __repr__(self) -> str:
        return f"Prefix({self.tokens} tokens, {self.bytes} bytes{', pinned' if self.pinned else ''})"


def read_prefix(owner: EngineOwner, tokens: Sequence[int], pinned: bool) -> Prefix:
    """Read a text, or find it, and pin it if that is asked for; HybridKVError where it cannot be kept."""
    whole, found = owner.run(partial(_look, tokens=tokens, pinned=pinned))
    if found is None:
        ticket = Ticket(partial(_begin, tokens=whole, pinned=pinned))
        try:
            owner.submit([ticket])
            ticket.wait()
            request = ticket.result()
            if request.error is not None:
                raise RequestError(f"the prefix could not be read: {request.error}")
            found = request.pinned
        except BaseException:
            owner.cancel([ticket])
            kept = None if ticket.request is None else ticket.request.pinned
            if kept is not None:
                owner.run(lambda engine: engine.unpin(kept))
            raise
        if pinned and found is None:
            raise HybridKVError(
                f"the prefix of {len(whole)} tokens was read, but there was no room to keep it; ask again when fewer "
                "requests run, or give more memory"
            )
    nbytes = owner.run(lambda engine: pin_bytes(engine.manager, len(whole), engine.schema))
    return Prefix(owner, len(whole), nbytes, found)


def _look(engine: Engine, tokens: Sequence[int], pinned: bool) -> tuple[list[int], Pin | None]:
    """The text's whole columns, and a pin if they are there already; or HybridKVError."""
    engine.check_keeps()
    reuse, known = reuse_of(engine.manager), engine.check_tokens(tokens)
    whole = known[: len(known) // reuse.q * reuse.q]
    if not whole:
        raise RequestError(f"a prefix is kept in columns of {reuse.q} tokens, and this one has {len(known)}")
    if reuse.has_state and not reuse.checkpoints.rows:
        raise HybridKVError(
            "a prefix of this model needs a checkpoint of its state, and there is no room for any; open the model with "
            f"ReuseConfig(checkpoints={2 * reuse.checkpoints.row_bytes}) or more"
        )
    return whole, engine.pin(SALT, whole) if pinned else None


def _begin(engine: Engine, tokens: list[int], pinned: bool) -> Request:
    """A request that reads the text, with a checkpoint at its end."""
    if pinned:
        check_pin(engine.manager, SALT, np.array(tokens, np.int32))
    params, marks = SamplingParams(max_tokens=1, temperature=0.0), [(len(tokens), "client")]
    request = engine.add(tokens, params, eviction=None, salt=SALT, marks=marks)
    if pinned:
        engine.pin_when_read(request)
    return request
