"""What a caller gets: a Completion, whole, or a Stream, piece by piece."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from queue import SimpleQueue
from types import TracebackType
from typing import Any

from hybridkv.engine.engine import Engine
from hybridkv.engine.owner import EngineOwner, Ticket, TicketsAsTheyEnd
from hybridkv.errors import HybridKVError
from hybridkv.request import Request, TokenLogprobs
from hybridkv.text.reasoning import ChatPiece, ReasoningSplitter


@dataclass(frozen=True)
class Completion:
    """An answer.

    Args:
        text: the answer.
        token_ids: its tokens, the one that ended it included.
        finish_reason: "stop" (the model's own end, or a stop text), "length" (max_tokens or the context was reached),
            "abort" (its caller left) or "error".
        prompt_tokens: how many tokens were asked with.
        stats: kept_tokens, kv_bytes_full, kv_bytes_kept, state_bytes, cached_tokens, prefill_s, prefill_tok_s,
            decode_s, decode_tok_s, wait_s, preemptions, eviction_record_bytes; where it came back from the host after a
            preemption, restored (how often) and restored_tokens; of a conversation that says keep_turns, old_turns
            and turn_budget.
        logprobs: of each token of the answer, where asked for.
        error: what went wrong, where finish_reason is "error".
        reasoning: the thoughts before the answer, where the chat template marks them; None elsewhere.
        prompt_logprobs: of each token of the prompt, where asked for; None for the first, which nothing comes before.
        others: answers 2 to n, where n were asked for; `samples` has all of them.
        policy: by which the cache was cut last, with `auto` replaced by what it stood for; None: nothing was cut.
        reuse: what of the prompt others had read: cached (tokens that were not computed), matched (tokens whose pages
            are shared), read (tokens that were computed), written (tokens more that others need not read), reason (why
            not more, one word), why (the same, a sentence) and, where it is known, diverged_at (the first token that is
            not kept); text_memory: how many tokens of a chat were taken as an earlier answer had them, where any were.
    """

    text: str
    token_ids: list[int]
    finish_reason: str
    prompt_tokens: int
    stats: dict[str, float]
    logprobs: list[TokenLogprobs] | None = None
    error: str | None = None
    reasoning: str | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    others: tuple[Completion, ...] = ()
    policy: str | None = None
    reuse: dict[str, Any] = field(default_factory=dict)

    @property
    def samples(self) -> tuple[Completion, ...]:
        """All n answers, this one first."""
        return (self, *self.others)

    @staticmethod
    def of(request: Request) -> Completion:
        """The answer of a finished `request`."""
        return Completion(
            text=request.text.text,
            token_ids=request.generated,
            finish_reason=request.finish_reason or "abort",
            prompt_tokens=request.prompt_tokens,
            stats=request.stats,
            logprobs=request.logprobs if request.params.logprobs is not None else None,
            error=request.error,
            prompt_logprobs=request.prompt_logprobs if request.params.prompt_logprobs is not None else None,
            others=tuple(map(Completion.of, request.siblings)),
            policy=request.policy,
            reuse=request.reuse | ({"text_memory": request.text_memory} if request.text_memory else {}),
        )

    def divided(self, splitter: Callable[[], ReasoningSplitter]) -> Completion:
        """The same with the thoughts apart from the answer; `splitter` makes one for each of the n answers."""
        found = splitter()
        found.push(self.text)
        found.finish()
        others = tuple(other.divided(splitter) for other in self.others)
        return replace(self, text=found.answer, reasoning=found.reasoning, others=others)


class Stream(Iterator[str]):
    """An answer's text piece by piece, as it is written.

    `completion` is the whole answer once the text has ended. Leaving early (`close`, the end of a `with`, or dropping
    the stream) stops the request. An answer that ends in an error raises it. `LLM.stream` makes it.

    Args:
        owner: the engine's thread.
        add: what that thread does to begin the request.
        hold: whether the request's cache stays for a next turn.
    """

    def __init__(self, owner: EngineOwner, add: Callable[[Engine], Request], hold: bool = False) -> None:
        self._pieces: SimpleQueue[str | None] = SimpleQueue()  # None: the end
        self._given, self._over = 0, False
        self._error: str | None = None  # to be raised when all text has been given
        self._owner, self._ticket = owner, Ticket(add, self._pieces.put, hold)
        owner.submit([self._ticket])

    @property
    def completion(self) -> Completion | None:
        """The whole answer, once it has ended; None before."""
        request = self._ticket.request
        return Completion.of(request) if request is not None and self._ticket.ended else None

    @property
    def progress(self) -> tuple[int, int]:
        """Tokens of the prompt that have been read, and all of them."""
        request = self._ticket.request
        return self._ticket.read, 0 if request is None else request.prompt_tokens

    @property
    def request(self) -> Request:
        """The engine's request. Its fields are the engine's to change until it has finished."""
        assert self._ticket.request is not None
        return self._ticket.request

    def steps(self) -> Iterator[str]:
        """Like iterating the stream, but with a piece for every step of the engine, "" while the prompt is read. Who
        shows progress, or may want to stop, looks in between.
        """
        while (text := self._next()) is not None:
            yield text

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> str:
        while (text := self._next()) is not None:
            if text:
                return text
        raise StopIteration

    def _next(self) -> str | None:
        """The text of the next step; None: it has ended. An interrupt here loses nothing."""
        text = None if self._over else self._pieces.get()
        if text is not None:
            self._given += len(text)
            return text
        if not self._over:
            self._over = True
            request = self._ticket.result()
            self._error = request.error
            if rest := request.text.text[self._given :]:
                return rest
        error, self._error = self._error, None
        if error is not None:
            raise HybridKVError(error)
        return None

    def close(self) -> None:
        """Stop the request, if it has not ended. Nothing of it is left when this returns."""
        self._owner.cancel([self._ticket])

    def __enter__(self) -> Stream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        ticket = getattr(self, "_ticket", None)
        if ticket is not None and not ticket.ended:
            self._owner.cancel([ticket], wait=False)  # whatever thread collects it, waiting could block that one


class ChatStream(Iterator[ChatPiece]):
    """An answer to a chat piece by piece, thoughts apart from the answer. Like Stream in all else."""

    def __init__(
        self,
        stream: Stream,
        splitter: Callable[[], ReasoningSplitter],
        ended: Callable[[Completion], None] | None = None,  # told of the whole answer
    ) -> None:
        self._stream, self._splitter, self._ended = stream, splitter, ended
        self._divide = splitter()
        self._ready: deque[ChatPiece] = deque()
        self._over = False

    @property
    def completion(self) -> Completion | None:
        """The whole answer, once it has ended; None before."""
        whole = self._stream.completion
        return None if whole is None else whole.divided(self._splitter)

    @property
    def progress(self) -> tuple[int, int]:
        """Tokens of the prompt that have been read, and all of them."""
        return self._stream.progress

    @property
    def request(self) -> Request:
        """The engine's request. Its fields are the engine's to change until it has finished."""
        return self._stream.request

    def steps(self) -> Iterator[ChatPiece]:
        """Like iterating the stream, but with a piece for every step of the engine, without text where it gave none."""
        while (piece := self._next()) is not None:
            yield piece

    def __iter__(self) -> ChatStream:
        return self

    def __next__(self) -> ChatPiece:
        while (piece := self._next()) is not None:
            if piece.text:
                return piece
        raise StopIteration

    def _next(self) -> ChatPiece | None:
        if self._ready:
            return self._ready.popleft()
        if self._over:
            return None
        text = self._stream._next()
        self._over = text is None
        if self._over and self._ended is not None and (whole := self._stream.completion) is not None:
            self._ended(whole)
        self._ready.extend(self._divide.finish() if text is None else self._divide.push(text))
        if self._ready:
            return self._ready.popleft()
        return None if self._over else ChatPiece("", False)

    def close(self) -> None:
        """Stop the request, if it has not ended. Nothing of it is left when this returns."""
        self._stream.close()

    def __enter__(self) -> ChatStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AnswersAsTheyEnd(Iterator[tuple[int, Completion]]):
    """The answers to several prompts, each as soon as it is whole, with the number of its prompt. `LLM.as_completed`
    makes it.

    Leaving early (`close`, or dropping it) stops the requests that are left.
    """

    def __init__(self, owner: EngineOwner, adds: Sequence[Callable[[Engine], Request]]) -> None:
        self._tickets = TicketsAsTheyEnd(owner, adds)

    def __next__(self) -> tuple[int, Completion]:
        number, ticket = next(self._tickets)
        return number, Completion.of(ticket.result())

    def close(self) -> None:
        """Stop what has not ended. Nothing of it is left when this returns."""
        self._tickets.close()
