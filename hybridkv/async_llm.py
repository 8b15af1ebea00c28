"""AsyncLLM: the same model for asyncio. The event loop is never blocked: the engine runs on its own thread, and what
takes time here (tokenising, chat templates) on a worker thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from functools import partial
from typing import Any

from hybridkv.answers import Completion
from hybridkv.config import SamplingParams
from hybridkv.engine.engine import INHERIT, Engine
from hybridkv.engine.owner import Ticket
from hybridkv.errors import HybridKVError, RequestError
from hybridkv.llm import LLM, Eviction, Prompt
from hybridkv.request import Request


class AsyncLLM:
    """An LLM whose answers are awaited.

    model: an LLM that is open already, which goes on working beside this, or what LLM takes; `settings` are LLM's.

    Cancelling a task that waits for an answer stops its request, and nothing of it is left. Requests of all tasks, and
    of threads that use the LLM itself, run together.
    """

    def __init__(self, model: LLM | Any = None, **settings: Any) -> None:
        if isinstance(model, LLM) and settings:
            raise HybridKVError(f"the model is open already: {', '.join(settings)} cannot be changed any more")
        self.llm = model if isinstance(model, LLM) else LLM(model, **settings)
        self._named: dict[str | None, list[Ticket]] = {}  # requests by the names that callers gave them

    async def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        eviction: Eviction | Sequence[Eviction] = INHERIT,
        request_id: str | None = None,
    ) -> list[Completion]:
        """Answers in the order of the prompts; the arguments are those of `LLM.generate`.

        request_id: a name of your own, by which `abort` finds them; aborted answers have finish_reason "abort".
        """
        adds = await asyncio.to_thread(self.llm.requests, prompts, params, eviction)
        return [Completion.of(request) for request in await self._run(adds, request_id)]

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        eviction: Eviction = INHERIT,
        request_id: str | None = None,
    ) -> AsyncStream:
        """The answer's text piece by piece: `async for piece in llm.stream(...)`. It begins with the first piece."""
        return AsyncStream(self, partial(self.llm.single_request, prompt, params, eviction), request_id)

    async def abort(self, request_id: str) -> bool:
        """Stop the requests of that name. False: there is none, or it has ended."""
        tickets = self._named.get(request_id, [])
        await asyncio.to_thread(self.llm.owner.cancel, list(tickets))
        return bool(tickets)

    async def logits(self, token_ids: Sequence[int]) -> Any:
        """[T, vocab] f32 as `LLM.logits`."""
        return await asyncio.to_thread(self.llm.logits, token_ids)

    async def close(self) -> None:
        """End what runs, and the engine's thread, of the LLM too."""
        await asyncio.to_thread(self.llm.close)

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _run(self, adds: Sequence[Callable[[Engine], Request]], request_id: str | None) -> list[Request]:
        """Run requests to their end. They are stopped if the task is cancelled, and all if one is refused."""
        loop = asyncio.get_running_loop()
        ended = asyncio.Event()
        left = len(adds)

        def count() -> None:
            nonlocal left
            left -= 1
            if not left:
                ended.set()

        def tell(piece: str | None) -> None:  # on the engine's thread
            if piece is None:
                loop.call_soon_threadsafe(count)

        tickets = [Ticket(add, tell) for add in adds]
        self._name(request_id, tickets)
        try:
            self.llm.owner.post(tickets)
            if tickets:
                await ended.wait()
        finally:
            self.llm.owner.cancel(tickets, wait=False)
            self._named.pop(request_id, None)
        return [ticket.result() for ticket in tickets]

    def _name(self, request_id: str | None, tickets: list[Ticket]) -> None:
        if request_id is None:
            return
        if request_id in self._named:
            raise RequestError(f"a request named {request_id!r} is running; give each its own request_id")
        self._named[request_id] = tickets


class AsyncStream(AsyncIterator[str]):
    """An answer's text piece by piece. `completion` is the whole answer once the text has ended.

    Leaving early (`aclose`, the end of an `async with`, a cancelled task, or dropping the stream) stops the request.
    """

    def __init__(
        self, owner: AsyncLLM, make: Callable[[], Callable[[Engine], Request]], request_id: str | None
    ) -> None:
        self.completion: Completion | None = None  # known at the end
        self._llm, self._make, self._request_id = owner, make, request_id
        self._texts = self._run()
        self._ticket: Ticket | None = None

    def __aiter__(self) -> AsyncStream:
        return self

    async def __anext__(self) -> str:
        async for text in self._texts:
            if text:
                return text
        raise StopAsyncIteration

    async def _run(self) -> AsyncGenerator[str, None]:
        add = await asyncio.to_thread(self._make)
        loop = asyncio.get_running_loop()
        texts: asyncio.Queue[str | None] = asyncio.Queue()

        def tell(text: str | None) -> None:  # on the engine's thread
            loop.call_soon_threadsafe(texts.put_nowait, text)

        ticket = self._ticket = Ticket(add, tell)
        owner, given = self._llm.llm.owner, 0
        self._llm._name(self._request_id, [ticket])
        try:
            owner.post([ticket])
            while (text := await texts.get()) is not None:
                given += len(text)
                yield text
            request = ticket.result()
            if rest := request.text.text[given:]:
                yield rest
            self.completion = Completion.of(request)
            if request.error is not None:
                raise HybridKVError(request.error)
        finally:
            owner.cancel([ticket], wait=False)
            self._llm._named.pop(self._request_id, None)

    async def aclose(self) -> None:
        """Stop the request, if it has not ended. Nothing of it is left when this returns."""
        await self._texts.aclose()
        if self._ticket is not None:
            await asyncio.to_thread(self._llm.llm.owner.cancel, [self._ticket])
            if self.completion is None and self._ticket.request is not None:
                self.completion = Completion.of(self._ticket.request)

    async def __aenter__(self) -> AsyncStream:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def __del__(self) -> None:
        ticket = getattr(self, "_ticket", None)
        if ticket is not None and not ticket.ended:
            self._llm.llm.owner.cancel([ticket], wait=False)
