"""AsyncLLM: the same model for asyncio. The event loop is never blocked: the engine runs on its own thread, and what
takes time here (tokenising, chat templates) on a worker thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any, Self, TypeVar

from hybridkv.answers import Completion
from hybridkv.config import SamplingParams
from hybridkv.engine.engine import INHERIT, Engine
from hybridkv.engine.owner import Ticket
from hybridkv.errors import HybridKVError, RequestError
from hybridkv.llm import LLM, ChatRequest, Eviction, Messages, Prompt, Tools, one_answer
from hybridkv.request import Request
from hybridkv.text.reasoning import ChatPiece, ReasoningSplitter

Piece = TypeVar("Piece")


class AsyncLLM:
    """An LLM whose answers are awaited.

    Args:
        model: an LLM that is open already, which goes on working beside this, or what LLM takes as its model.
        settings: the other arguments of LLM, where it is not open yet.

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

        Args:
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
        """The answer's text piece by piece: `async for piece in llm.stream(...)`. The first one begins it.

        The arguments are those of `LLM.stream`, and `request_id` as in `generate`.
        """
        return AsyncStream(self, partial(self.llm.single_request, prompt, params, eviction), request_id)

    async def chat(
        self,
        messages: Messages,
        params: SamplingParams | None = None,
        *,
        tools: Tools = None,
        thinking: bool | None = None,
        eviction: Eviction = INHERIT,
        request_id: str | None = None,
        **template_variables: Any,
    ) -> Completion:
        """The answer to a conversation; the arguments are those of `LLM.chat`, and `request_id` as in `generate`."""
        asked = await asyncio.to_thread(
            self.llm.chat_request, messages, params, tools, thinking, eviction, template_variables
        )
        [request] = await self._run([asked.add], request_id)
        return Completion.of(request).divided(asked.splitter)

    def chat_stream(
        self,
        messages: Messages,
        params: SamplingParams | None = None,
        *,
        tools: Tools = None,
        thinking: bool | None = None,
        eviction: Eviction = INHERIT,
        request_id: str | None = None,
        **template_variables: Any,
    ) -> AsyncChatStream:
        """Like `chat`, piece by piece: ChatPiece(text, reasoning), `reasoning` True while the model thinks.

        The arguments are those of `LLM.chat`, and `request_id` as in `generate`.
        """
        one_answer(params)
        settings = (messages, params, tools, thinking, eviction, template_variables)
        return AsyncChatStream(self, partial(self.llm.chat_request, *settings), request_id)

    async def abort(self, request_id: str) -> bool:
        """Stop the requests named `request_id`. False: there is none, or it has ended."""
        tickets = self._named.get(request_id, [])
        await asyncio.to_thread(self.llm.owner.cancel, list(tickets))
        return bool(tickets)

    async def logits(self, token_ids: Sequence[int]) -> Any:
        """[T, vocab] f32 of a text, as `LLM.logits` gives them."""
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
            self._forget(request_id)
        return [ticket.result() for ticket in tickets]

    def _name(self, request_id: str | None, tickets: list[Ticket]) -> None:
        """Let `abort` find them by this name."""
        if request_id is None:
            return
        if request_id in self._named:
            raise RequestError(f"a request named {request_id!r} is running; give each its own request_id")
        self._named[request_id] = tickets

    def _forget(self, request_id: str | None) -> None:
        """The requests of that name have ended."""
        self._named.pop(request_id, None)


class _AsyncPieces(AsyncIterator[Piece]):
    """An answer piece by piece, for asyncio."""

    def __init__(self, llm: AsyncLLM, request_id: str | None) -> None:
        self.completion: Completion | None = None  # known at the end
        self._llm, self._request_id = llm, request_id
        self._ticket: Ticket | None = None
        self._pieces = self._run()

    def _run(self) -> AsyncGenerator[Piece, None]:
        raise NotImplementedError

    def _whole(self, request: Request) -> Completion:
        return Completion.of(request)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Piece:
        return await anext(self._pieces)

    async def _texts(self, add: Callable[[Engine], Request]) -> AsyncGenerator[str, None]:
        """The text of every step in which the request gave some."""
        loop = asyncio.get_running_loop()
        texts: asyncio.Queue[str | None] = asyncio.Queue()

        def tell(text: str | None) -> None:  # on the engine's thread
            if text != "":
                loop.call_soon_threadsafe(texts.put_nowait, text)

        ticket = Ticket(add, tell)
        owner, given = self._llm.llm.owner, 0
        self._llm._name(self._request_id, [ticket])
        self._ticket = ticket
        try:
            owner.post([ticket])
            while (text := await texts.get()) is not None:
                given += len(text)
                yield text
            request = ticket.result()
            if rest := request.text.text[given:]:
                yield rest
            self.completion = self._whole(request)
            if request.error is not None:
                raise HybridKVError(request.error)
        finally:
            owner.cancel([ticket], wait=False)
            self._llm._forget(self._request_id)

    async def aclose(self) -> None:
        """Stop the request, if it has not ended. Nothing of it is left when this returns."""
        await self._pieces.aclose()
        if self._ticket is not None:
            await asyncio.to_thread(self._llm.llm.owner.cancel, [self._ticket])
            if self.completion is None and self._ticket.request is not None:
                self.completion = self._whole(self._ticket.request)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def __del__(self) -> None:
        ticket = getattr(self, "_ticket", None)
        if ticket is not None and not ticket.ended:
            self._llm.llm.owner.cancel([ticket], wait=False)


class AsyncStream(_AsyncPieces[str]):
    """An answer's text piece by piece. `completion` is the whole answer once the text has ended.

    Leaving early (`aclose`, the end of an `async with`, a cancelled task, or dropping the stream) stops the request.
    """

    def __init__(self, llm: AsyncLLM, make: Callable[[], Callable[[Engine], Request]], request_id: str | None) -> None:
        self._make = make
        super().__init__(llm, request_id)

    async def _run(self) -> AsyncGenerator[str, None]:
        texts = self._texts(await asyncio.to_thread(self._make))
        async with aclosing(texts):
            async for text in texts:
                yield text


class AsyncChatStream(_AsyncPieces[ChatPiece]):
    """An answer to a chat piece by piece, thoughts apart from the answer. Like AsyncStream in all else."""

    def __init__(self, llm: AsyncLLM, make: Callable[[], ChatRequest], request_id: str | None) -> None:
        self._make = make
        self._splitter: Callable[[], ReasoningSplitter] | None = None
        super().__init__(llm, request_id)

    async def _run(self) -> AsyncGenerator[ChatPiece, None]:
        asked = await asyncio.to_thread(self._make)
        self._splitter = asked.splitter
        splitter, texts = asked.splitter(), self._texts(asked.add)
        async with aclosing(texts):
            async for text in texts:
                for piece in splitter.push(text):
                    yield piece
        for piece in splitter.finish():
            yield piece

    def _whole(self, request: Request) -> Completion:
        whole = Completion.of(request)
        return whole if self._splitter is None else whole.divided(self._splitter)
