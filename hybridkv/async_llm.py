"""AsyncLLM: the same model for asyncio. The event loop is never blocked: the engine runs on its own thread, and what
takes time here (tokenising, chat templates) on a worker thread.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Self, TypeVar

from hybridkv.answers import Completion
from hybridkv.asking import ChatRequest, Eviction, one_answer
from hybridkv.config import SamplingParams
from hybridkv.engine.engine import INHERIT, Engine
from hybridkv.engine.loop_mail import loop_mail
from hybridkv.engine.owner import Ticket
from hybridkv.errors import HybridKVError, RequestError
from hybridkv.llm import LLM
from hybridkv.prompts import Messages, Prompt, Tools
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
        self._named: dict[str, _Named] = {}  # requests by the names that callers gave them

    async def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        eviction: Eviction | Sequence[Eviction] = INHERIT,
        cache: bool | str = True,
        request_id: str | None = None,
    ) -> list[Completion]:
        """Answers in the order of the prompts; the arguments are those of `LLM.generate`.

        Args:
            request_id: a name of your own, by which `abort` finds them; aborted answers have finish_reason "abort".
        """
        with self._naming(request_id) as named:
            adds = await asyncio.to_thread(self.llm.requests, prompts, params, eviction, cache)
            return await self._run(adds, named)

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        eviction: Eviction = INHERIT,
        cache: bool | str = True,
        request_id: str | None = None,
    ) -> AsyncStream:
        """The answer's text piece by piece: `async for piece in llm.stream(...)`. The first one begins it.

        The arguments are those of `LLM.stream`, and `request_id` as in `generate`.
        """
        return AsyncStream(self, partial(self.llm.single_request, prompt, params, eviction, cache), request_id)

    async def chat(
        self,
        messages: Messages,
        params: SamplingParams | None = None,
        *,
        tools: Tools = None,
        thinking: bool | None = None,
        eviction: Eviction = INHERIT,
        cache: bool | str = True,
        request_id: str | None = None,
        **template_variables: Any,
    ) -> Completion:
        """The answer to a conversation; the arguments are those of `LLM.chat`, and `request_id` as in `generate`."""
        with self._naming(request_id) as named:
            asked = await asyncio.to_thread(
                self.llm.chat_request, messages, params, tools, thinking, eviction, template_variables, cache
            )
            [found] = await self._run([asked.add], named)
            await asyncio.to_thread(asked.ended, found)
        return found.divided(asked.splitter)

    def chat_stream(
        self,
        messages: Messages,
        params: SamplingParams | None = None,
        *,
        tools: Tools = None,
        thinking: bool | None = None,
        eviction: Eviction = INHERIT,
        cache: bool | str = True,
        request_id: str | None = None,
        **template_variables: Any,
    ) -> AsyncChatStream:
        """Like `chat`, piece by piece: ChatPiece(text, reasoning), `reasoning` True while the model thinks.

        The arguments are those of `LLM.chat`, and `request_id` as in `generate`.
        """
        one_answer(params)
        settings = (messages, params, tools, thinking, eviction, template_variables, cache)
        return AsyncChatStream(self, partial(self.llm.chat_request, *settings), request_id)

    async def abort(self, request_id: str) -> bool:
        """Stop the requests named `request_id`. False: there is none, or it has ended."""
        named = self._named.get(request_id)
        if named is None:
            return False
        named.aborted = True
        await asyncio.to_thread(self.llm.owner.cancel, named.tickets)
        return True

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

    async def _run(self, adds: Sequence[Callable[[Engine], Request]], named: _Named) -> list[Completion]:
        """Run requests to their end. They are stopped if the task is cancelled, and all if one is refused."""
        mail, ended = loop_mail(), asyncio.Event()
        left = len(adds)

        def count() -> None:
            nonlocal left
            left -= 1
            if not left:
                ended.set()

        def tell(piece: str | None) -> None:  # on the engine's thread
            if piece is None:
                mail.send(count)

        tickets = named.tickets = [Ticket(add, tell, every_step=False) for add in adds]
        if not named.aborted and tickets:
            try:
                self.llm.owner.post(tickets)
                await ended.wait()
            finally:
                self.llm.owner.cancel(tickets, wait=False)
        return [_completion(ticket) for ticket in tickets]

    @contextmanager
    def _naming(self, request_id: str | None) -> Iterator[_Named]:
        """Inside, `abort` finds requests by this name."""
        if request_id is not None and request_id in self._named:
            raise RequestError(f"a request named {request_id!r} is running; give each its own request_id")
        named = _Named()
        if request_id is not None:
            self._named[request_id] = named
        try:
            yield named
        finally:
            if request_id is not None:
                del self._named[request_id]


class _Named:
    """Requests that have a name, from before they are made."""

    def __init__(self) -> None:
        self.tickets: list[Ticket] = []
        self.aborted = False  # by name; what has not begun then never does


def _completion(ticket: Ticket) -> Completion:
    """The answer of a ticket that has ended, or was aborted before it began."""
    if ticket.problem is not None:
        raise ticket.problem
    return Completion("", [], "abort", 0, {}) if ticket.request is None else Completion.of(ticket.request)


class _AsyncPieces(AsyncIterator[Piece]):
    """An answer piece by piece, for asyncio. It begins when the first piece is asked for."""

    def __init__(self, llm: AsyncLLM, request_id: str | None) -> None:
        self._llm = llm
        self._naming = llm._naming(request_id)
        self._named: _Named | None = None  # None: not begun
        self._ticket: Ticket | None = None
        self._texts: asyncio.Queue[str | None] = asyncio.Queue()  # None: the end
        self._ready: deque[Piece] = deque()
        self._given, self._over = 0, False

    async def _make(self) -> Callable[[Engine], Request]:
        """What begins the request."""
        raise NotImplementedError

    def _push(self, text: str | None) -> Iterable[Piece]:
        """Text as pieces; None: there is no more."""
        raise NotImplementedError

    @property
    def completion(self) -> Completion | None:
        """The whole answer, once it has ended; None before."""
        ticket = self._ticket
        return Completion.of(ticket.request) if ticket is not None and ticket.ended and ticket.request else None

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Piece:
        try:
            if self._named is None and not self._over:
                await self._begin()
            while not self._ready and not self._over:
                await self._more()
        except BaseException:  # the task was cancelled, the request refused, or its answer an error
            self._end()
            raise
        if self._ready:
            return self._ready.popleft()
        raise StopAsyncIteration

    async def _begin(self) -> None:
        self._named = self._naming.__enter__()
        add = await self._make()
        if self._named.aborted or self._over:
            self._end()
            return
        mail, texts = loop_mail(), self._texts

        def tell(text: str | None) -> None:  # on the engine's thread; it does not know the stream
            if text != "":
                mail.send(texts.put_nowait, text)

        self._ticket = Ticket(add, tell, every_step=False)
        self._named.tickets = [self._ticket]
        self._llm.llm.owner.post([self._ticket])

    async def _more(self) -> None:
        """Wait for the next text, or the end."""
        text = await self._texts.get()
        if text is not None:
            self._given += len(text)
            self._ready.extend(self._push(text))
            return
        self._texts.put_nowait(None)  # for whoever else waits
        if self._over:
            return
        self._over = True
        assert self._ticket is not None
        request = self._ticket.request
        if self._ticket.problem is not None:
            raise self._ticket.problem
        if request is not None:
            self._ready.extend(self._push(request.text.text[self._given :]))
            self._ready.extend(self._push(None))
        self._end()
        if request is not None and request.error is not None:
            raise HybridKVError(request.error)

    def _end(self) -> None:
        """Stop the request if it has not ended, and forget its name."""
        self._over = True
        if self._ticket is not None:
            self._llm.llm.owner.cancel([self._ticket], wait=False)
        if self._named is not None and self._named is not _GONE:
            self._named = _GONE
            self._naming.__exit__(None, None, None)

    async def aclose(self) -> None:
        """Stop the request, if it has not ended. Nothing of it is left when this returns; who waits for a piece gets
        the end.
        """
        self._end()
        self._texts.put_nowait(None)
        if self._ticket is not None:
            await asyncio.to_thread(self._llm.llm.owner.cancel, [self._ticket])

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def __del__(self) -> None:
        if getattr(self, "_over", True) is False:
            self._end()


_GONE = _Named()  # stands for a name that is free again


class AsyncStream(_AsyncPieces[str]):
    """An answer's text piece by piece. `completion` is the whole answer once the text has ended.

    Leaving early (`aclose`, the end of an `async with`, a cancelled task, or dropping the stream) stops the request.
    """

    def __init__(self, llm: AsyncLLM, make: Callable[[], Callable[[Engine], Request]], request_id: str | None) -> None:
        super().__init__(llm, request_id)
        self._request = make

    async def _make(self) -> Callable[[Engine], Request]:
        return await asyncio.to_thread(self._request)

    def _push(self, text: str | None) -> Iterable[str]:
        return [text] if text else []


class AsyncChatStream(_AsyncPieces[ChatPiece]):
    """An answer to a chat piece by piece, thoughts apart from the answer. Like AsyncStream in all else."""

    def __init__(self, llm: AsyncLLM, make: Callable[[], ChatRequest], request_id: str | None) -> None:
        super().__init__(llm, request_id)
        self._request = make
        self._divide: Callable[[], ReasoningSplitter] | None = None
        self._ended: Callable[[Completion], None] | None = None
        self._splitter = ReasoningSplitter(None)

    async def _make(self) -> Callable[[Engine], Request]:
        asked = await asyncio.to_thread(self._request)
        self._divide, self._splitter, self._ended = asked.splitter, asked.splitter(), asked.ended
        return asked.add

    def _push(self, text: str | None) -> Iterable[ChatPiece]:
        if text is None and self._ended is not None and (whole := super().completion) is not None:
            self._ended(whole)
        return self._splitter.finish() if text is None else self._splitter.push(text)

    @property
    def completion(self) -> Completion | None:
        """The whole answer, once it has ended; None before."""
        whole = super().completion
        return whole if whole is None or self._divide is None else whole.divided(self._divide)
