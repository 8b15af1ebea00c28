"""Conversation: turns of a chat on one cache. A turn computes only what the cache does not hold yet.

The new prompt is the whole conversation rendered by the model's chat template. Where that text begins with what was
computed before (the last prompt and the answer to it), only the rest is tokenised and run. Where it does not, because
a template rewrites earlier turns, the engine reuses as much as it can and computes the rest again.
"""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterator
from functools import partial
from typing import Any

from hybridkv.answers import ChatStream, Completion, Stream
from hybridkv.config import SamplingParams
from hybridkv.engine.engine import INHERIT, Engine
from hybridkv.errors import RequestError
from hybridkv.llm import LLM, Eviction, Messages, Tools, one_answer
from hybridkv.request import Request
from hybridkv.text.prompt import encode_pieces, render_pieces
from hybridkv.text.reasoning import ChatPiece, assistant_message, reasoning_of


class Conversation:
    """Turns of a chat that share one cache.

    llm: the model; several conversations, in several threads, may use it at once.
    system: what the model is told first.
    params: how answers are chosen; may be changed between turns.
    tools, thinking, template_variables: as in `LLM.chat`, for every turn; `tools` and `thinking` may be changed between
        turns.
    eviction: what the cache keeps: an EvictionConfig, a number (its budget), or None (everything). Without it: what the
        LLM was opened with. May be changed between turns.

    `messages` has what was said, `last` the last answer. Turns of one conversation come one after the other: a second
    thread that sends waits for the first one's answer to end.
    """

    def __init__(
        self,
        llm: LLM,
        system: str | None = None,
        params: SamplingParams | None = None,
        *,
        tools: Tools = None,
        thinking: bool | None = None,
        eviction: Eviction = INHERIT,
        **template_variables: Any,
    ) -> None:
        self.llm, self.params, self.eviction = llm, params, eviction
        self.tools, self.thinking, self.template_variables = tools, thinking, template_variables
        self.messages: Messages = [{"role": "system", "content": system}] if system else []
        self.last: Completion | None = None
        self._request: Request | None = None  # the last turn's, whose cache is held
        self._prompt = ""  # the text that the last turn's prompt was made from
        self._turn = threading.Lock()  # held while a turn is answered
        self._answering: int | None = None  # the thread that reads the answer

    def send(self, text: str) -> Iterator[str]:
        """The answer's text piece by piece, "" where a step gave none; thoughts are left out (`pieces` has them).

        Closing the iterator early ends the answer where the engine is by then, perhaps a step or two further than what
        was heard; `last.text` has all of it.
        """
        pieces = self.pieces(text)
        try:
            for piece in pieces:
                yield "" if piece.reasoning else piece.text
        finally:
            pieces.close()

    def pieces(self, text: str) -> Generator[ChatPiece, None, None]:
        """Like `send`, with the thoughts: ChatPiece(text, reasoning)."""
        self._begin()
        try:
            yield from self._answer(text)
        finally:
            self._answering = None
            self._turn.release()

    def _begin(self) -> None:
        if self._turn.acquire(blocking=False):
            self._answering = threading.get_ident()
            return
        if self._answering == threading.get_ident():
            raise RequestError("the last turn is still being answered; read it to its end, or close it, then send")
        self._turn.acquire()
        self._answering = threading.get_ident()

    def _answer(self, text: str) -> Iterator[ChatPiece]:
        self.messages.append({"role": "user", "content": text})
        try:
            tokenizer, template = self.llm.chat_parts()
            pieces = render_pieces(
                template, tokenizer, self.messages, tools=self.tools, thinking=self.thinking, **self.template_variables
            )
            prompt = "".join(text for text, _ in pieces)
            tokens, params, eviction, before = self._tokens(pieces), self.params, self.eviction, self._request
            one_answer(params)

            def add(engine: Engine) -> Request:
                return engine.add(tokens, params, hold=True, after=before, eviction=eviction)

            stream = ChatStream(Stream(self.llm.owner, add, hold=True), partial(reasoning_of, template, prompt))
        except BaseException:
            self.messages.pop()  # the turn did not happen
            raise
        self._request, self._prompt = stream.request, prompt
        try:
            yield from stream.steps()
        finally:
            stream.close()
            said = stream.completion
            if said is not None and said.error is None:
                self.messages.append(assistant_message(said.text, said.reasoning))
                self.last = said
            else:
                self.messages.pop()  # the turn did not happen, and its cache is gone
                self._request = None

    def close(self) -> None:
        """Give the cache back. A later turn computes all of the conversation again."""
        request, self._request = self._request, None
        if request is not None:
            self.llm.owner.run(lambda engine: engine.abort(request))

    def _tokens(self, pieces: list[tuple[str, bool]]) -> list[int]:
        """Tokens of the whole conversation; those of the last turn are taken over as they were computed."""
        request, prompt, tokenizer = self._request, pieces[0][0], self.llm.chat_parts()[0]
        # where a stop string ended the answer, its tokens say more than its text
        if request is None or len(pieces) > 1 or request.text.stopped is not None:
            return encode_pieces(tokenizer, pieces)
        done = self._prompt + request.text.text
        if not prompt.startswith(done):
            return encode_pieces(tokenizer, pieces)
        # without the token that ended the answer: the template writes that itself
        said = request.tokens[:-1] if request.finish_reason == "stop" else request.tokens
        return said + tokenizer.encode(prompt[len(done) :], bos=False, after=said[-1])
