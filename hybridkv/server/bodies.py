"""Bodies of requests in memory: one has its limit, and all of them together have another. What counts is what has come
and has not been read yet, so a client that only announces a large body takes nothing from others.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress

from starlette.types import Receive

from hybridkv.server.problems import ApiError, ClientGone
from hybridkv.server.turns import share_of

FLUSH_BYTES, FLUSH_SECONDS = 64 << 20, 2.0  # of a body that is refused, read so that its client sees the answer
AGAIN_SECONDS = 2  # after which there may be room


class Bodies:
    """Bytes of all bodies that are held at this moment.

    Args:
        most: that all of them may have; one body of its own limit always fits.
        shared: whether there are several keys; then each has its share, as of all other places.
    """

    def __init__(self, most: int, shared: bool = False) -> None:
        self.most, self._shared = most, shared
        self._held: Counter[bytes] = Counter()  # by the salt of the key

    @property
    def held(self) -> int:
        """Bytes of all of them."""
        return self._held.total()

    def has_room(self, salt: bytes, nbytes: int, limit: int) -> bool:
        """Whether so many more are taken. `limit`: of one body, which alone is always taken."""
        most = max(self.most, limit)
        if self.held + nbytes > most:
            return False
        own = self._held[salt] + nbytes
        return not self._shared or own <= max(share_of(most), limit)

    def count(self, salt: bytes, change: int) -> None:
        """Bytes that came, or that are given back."""
        self._held[salt] += change
        if not self._held[salt]:
            del self._held[salt]


class Body:
    """The body of one request, from its first byte until a route has read it: `with body as raw`."""

    def __init__(self, bodies: Bodies, salt: bytes) -> None:
        self._bodies, self._salt = bodies, salt
        self._data = bytearray()  # in pieces, a byte each would take forty

    async def receive(self, headers: Mapping[str, str], receive: Receive, limit: int, seconds: float) -> None:
        """All of it, of at most `limit` bytes and within so many seconds; or ApiError, and nothing is held."""
        told = headers.get("content-length", "0")
        announced = int(told[:20]) if told.isdigit() else 0
        if announced > limit:
            await _flush(receive)
            raise _too_large(limit)
        if not self._bodies.has_room(self._salt, announced, limit):
            await _flush(receive)
            raise _no_room()
        try:
            async with asyncio.timeout(seconds):
                await self._receive(receive, limit)
        except TimeoutError:
            raise ApiError(408, "the body did not come in time", headers={"connection": "close"}, again=True) from None

    async def _receive(self, receive: Receive, limit: int) -> None:
        more = True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            part, more = message.get("body", b""), message.get("more_body", False)
            problem = None
            if len(self._data) + len(part) > limit:
                problem = _too_large(limit)
            elif not self._bodies.has_room(self._salt, len(part), limit):
                problem = _no_room()
            if problem is not None:
                self.drop()
                if more:
                    await _flush(receive)
                raise problem
            self._data += part
            self._bodies.count(self._salt, len(part))

    def drop(self) -> None:
        """Nothing of it is held any more; also a second time."""
        self._bodies.count(self._salt, -len(self._data))
        self._data = bytearray()

    def __enter__(self) -> bytes:
        return bytes(self._data)

    def __exit__(self, *_: object) -> None:
        self.drop()


async def _flush(receive: Receive) -> None:
    """Read a body that is refused, for a while: a client that is still sending would not see the answer."""
    read, until = 0, time.monotonic() + FLUSH_SECONDS
    with suppress(TimeoutError):
        async with asyncio.timeout(FLUSH_SECONDS):
            while read < FLUSH_BYTES and time.monotonic() < until:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientGone
                read += len(message.get("body", b""))
                if not message.get("more_body", False):
                    return


def _too_large(limit: int) -> ApiError:
    return ApiError(413, f"the body has more than {limit} bytes", headers={"connection": "close"})


def _no_room() -> ApiError:
    told = {"connection": "close", "retry-after": str(AGAIN_SECONDS)}
    return ApiError(503, "bodies of other requests fill the memory that there is for them; ask again", headers=told)
