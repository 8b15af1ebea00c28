"""Conversation: turns of a chat on one cache. A turn computes only what the cache does not hold yet.

The new prompt is the whole conversation rendered by the model's chat template. Where that text begins with what was
computed before (the last prompt and the answer to it), only the rest is tokenised and run. Where it does not, because
a template rewrites earlier turns, the engine reuses as much as it can and computes the rest again.

With the policy `replay` a turn keeps everything until its answer has been written. Where the cache then holds half as
much again as the budget, or a window more if that is further, the conversation is read once more and cut.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from hybridkv.answers import ChatStream, Completion, Stream
from hybridkv.asking import Eviction, one_answer
from hybridkv.cache.session import RECORD_BYTES, Session
from hybridkv.cache.snapshot_file import NotWellFormed, check_place
from hybridkv.cache.store import Store, check_name
from hybridkv.config import EvictionConfig, SamplingParams, check_turns, shown
from hybridkv.document import Document, cut_held, needs_replay, replay_parts
from hybridkv.engine.engine import INHERIT, Engine
from hybridkv.engine.stats import kept_tokens
from hybridkv.engine.storing import load_request, save_request
from hybridkv.errors import HybridKVError, RequestError
from hybridkv.llm import LLM
from hybridkv.prompts import Messages, Tools
from hybridkv.request import Request
from hybridkv.saved import AS_SAVED, SETTINGS, SavedConversation
from hybridkv.text.call_formats import calls_in
from hybridkv.text.constraint import thoughts_of
from hybridkv.text.framed import BETWEEN, Pieces, text_of, without_beginning
from hybridkv.text.prompt import encode_pieces, render_pieces
from hybridkv.text.reasoning import ChatPiece, assistant_message, reasoning_of
from hybridkv.warming import offer_next_turn


class Conversation:
    """Turns of a chat that share one cache.

    Args:
        llm: the model; several conversations, in several threads, may use it at once.
        system: what the model is told first.
        params: how answers are chosen.
        tools: as in `LLM.chat`, for every turn.
        thinking: as in `LLM.chat`, for every turn.
        eviction: what the cache keeps: an EvictionConfig, a number (its budget), or None (everything). Without it:
            what the LLM was opened with.
        document: a document of the same LLM, with which the first turn begins; it stays as it is, for others too. What
            follows it is kept whole.
        keep_turns: the last turns (a message and its answer) that stay whole, beside what comes before the first one;
            None: all of them. Without it: what the LLM was opened with.
        turn_budget: tokens kept a stream of each turn that is older than those. It is evicted once, when it gets old,
            and never read again for it. Without it: what the LLM was opened with.
        template_variables: as in `LLM.chat`, for every turn.

    All of them but `llm`, `system` and `document` are attributes too, and may be changed between turns. `messages` has
    what was said, `last` the last answer. Turns of one conversation come one after the other: a second
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
        document: Document | None = None,
        keep_turns: int | None | object = INHERIT,
        turn_budget: int | object = INHERIT,
        **template_variables: Any,
    ) -> None:
        self.llm, self.params, self.eviction = llm, params, eviction
        self.keep_turns, self.turn_budget = keep_turns, turn_budget
        self.document = document
        if document is not None:
            system = _system_of(document, llm, system, eviction)
        self.tools, self.thinking, self.template_variables = tools, thinking, template_variables
        self.messages: Messages = [{"role": "system", "content": system}] if system else []
        self.last: Completion | None = None
        self._request: Request | None = None  # the last turn's, whose cache is held
        self._prompt = ""  # the text that the last turn's prompt was made from
        self._converted: tuple[str, ...] = ()  # what was converted when it was brought back from a store
        self._begins: list[int] | None = None  # where each turn begins in the request's tokens, if that was asked for
        self._turn = threading.Lock()  # held while a turn is answered
        self._answering: int | None = None  # the thread that reads the answer

    def send(self, text: str) -> Iterator[str]:
        """The answer to `text`, piece by piece, "" where a step gave none; thoughts are left out (`pieces` has them).

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
        with self._between_turns():
            yield from self._answer(text)

    @contextmanager
    def _between_turns(self) -> Iterator[None]:
        self._begin()
        try:
            yield
        finally:
            self._answering = None
            self._turn.release()

    def _begin(self) -> None:
        if self._turn.acquire(blocking=False):
            self._answering = threading.get_ident()
            return
        if self._answering == threading.get_ident():
            raise RequestError("the last turn is still being answered; read it to its end, or close it, first")
        self._turn.acquire()
        self._answering = threading.get_ident()

    def _answer(self, text: str) -> Iterator[ChatPiece]:
        first = self.document is not None and not any(said["role"] == "user" for said in self.messages)
        content = f"{self.document.text}{BETWEEN}{text}" if self.document is not None and first else text
        self.messages.append({"role": "user", "content": content})
        try:
            template, pieces = self.llm.chat_parts()[1], self._rendered(self.messages)
            prompt = text_of(pieces)
            prefix = self.document.held() if self.document is not None else None
            (tokens, said), params, before = self._tokens(pieces), self.params, self._request
            asked = None if prefix is not None else self.llm.engine.resolve_eviction(self.eviction, replays=True)
            eviction = None if prefix is not None or needs_replay(asked) else self.eviction
            one_answer(params)
            if params is not None:
                thoughts = thoughts_of(template, self.llm.chat_parts()[0], reasoning_of(template, prompt))
                params = self.llm.engine.compiled(params, thoughts)
            begins = self._turn_begins(tokens, said)
            marks = self.llm.chat_memory.marks.marks(tokens)

            def add(engine: Engine) -> Request:
                return engine.add(
                    tokens, params, hold=True, after=before, eviction=eviction, prefix=prefix, marks=marks
                )

            stream = ChatStream(Stream(self.llm.owner, add, hold=True), partial(reasoning_of, template, prompt))
        except BaseException:
            self.messages.pop()  # the turn did not happen
            raise
        self._request, self._prompt, self._begins = stream.request, prompt, begins
        try:
            yield from stream.steps()
        finally:
            try:
                stream.close()
            finally:  # a second interrupt may end the wait
                answer = stream.completion
                if answer is not None and answer.error is None:
                    self.messages.append(assistant_message(answer.text, answer.reasoning))
                    self.last = answer
                    self._evict_old_turns()
                    if asked is None and prefix is None:
                        self._offer_next_turn(stream.request)
                else:
                    self.messages.pop()  # the turn did not happen, and its cache is gone
                    self._request = None
                    self.llm.owner.discard(stream.request)
        if asked is not None and needs_replay(asked):
            self._replay(stream.request, asked)

    def _offer_next_turn(self, request: Request) -> None:
        """The next turn may be read before it comes. One whose old turns were evicted goes on in its own cache."""
        template, said = self.llm.chat_parts()[1], request.tokens
        if request.finish_reason != "stop" or self._turns[0] is not None:
            return
        if self.tools and calls_in(template, request.text.text):
            return
        messages = list(self.messages)

        def spell(text: str) -> list[int]:
            if self._request is not request:
                raise RequestError("the conversation has gone on")
            return self._tokens(self._rendered([*messages, {"role": "user", "content": text}]))[0]

        offer_next_turn(self.llm.warm, self.llm.chat_memory.marks, said, request.prompt_tokens, spell)

    def _rendered(self, messages: Messages) -> Pieces:
        tokenizer, template = self.llm.chat_parts()
        return render_pieces(
            template, tokenizer, messages, tools=self.tools, thinking=self.thinking, **self.template_variables
        )

    def _replay(self, request: Request, eviction: EvictionConfig) -> None:
        """Cut what was said so far, by reading it once more, if that is much more than the budget."""
        manager, tokenizer = self.llm.manager, self.llm.chat_parts()[0]

        def held(engine: Engine) -> tuple[float, int]:
            there = engine.bring_back(request)
            return (kept_tokens(request, manager), manager.position(request.key)) if there else (0, 0)

        kept, position = self.llm.owner.run(held)
        if kept <= eviction.budget + max(eviction.window, eviction.budget // 2):
            return
        said = request.tokens[:position]

        def ask(text: str) -> list[int]:
            tokens, _ = self._tokens(self._rendered([*self.messages, {"role": "user", "content": text}]))
            if tokens[:position] == said:
                return tokens[position:]
            return tokenizer.encode(BETWEEN + text, bos=False, after=said[-1])  # the template rewrites what was said

        cut_held(self.llm, request, eviction, replay_parts(self.llm, said, ask, eviction, position))
        if self.last is not None:
            self.last = replace(self.last, policy=request.policy)

    def close(self) -> None:
        """Give the cache back. A later turn computes all of the conversation again."""
        request, self._request = self._request, None
        if request is not None and not self.llm.owner.closed:
            if self.llm.warm is not None:
                self.llm.warm.forget(b"", request.tokens)
            self.llm.owner.run(lambda engine: engine.abort(request))

    @classmethod
    def load(
        cls, llm: LLM, path: str | Path, params: SamplingParams | None = None, *, eviction: Eviction = AS_SAVED
    ) -> Conversation:
        """A conversation that `save` wrote: it goes on as if it had never been away.

        Args:
            llm: the model that it was saved with, in the same form, with the same KV dtype; anything else is refused,
                with what differs.
            path: the file.
            params: how answers are chosen; they are the caller's, not the file's.
            eviction: what the cache keeps from here on; without it, as when it was saved.

        A file that is damaged, or not what `save` writes, is refused, and nothing is taken. Where slots or pages are
        short, caches of the conversations that were silent longest make room.
        """
        owner, path = llm.owner, _path(path)
        llm.chat_parts()
        room = llm.engine.cache_bytes + RECORD_BYTES
        session = Session.load(path, owner.check_session_model, room)
        if "document" in session.conversation:
            raise HybridKVError(f"{path.name} holds a document, not a conversation; use LLM.load_document")
        try:
            talk = cls._of(llm, session.conversation, params, eviction)
        except NotWellFormed as problem:
            raise HybridKVError(f"session {path.name} is not well-formed: {problem}") from None
        if session.tokens:
            talk._resume(talk._take(lambda engine: engine.restore_held(session)))
        return talk

    def save(self, path: str | Path) -> None:
        """Write all of it to the file `path`, with its cache if that is still there. `load` goes on from it, in any
        process.

        The file is replaced in one go, or not at all; only its owner may read it. Sampling parameters are not in it. An
        answer that another thread reads is waited for; inside one's own, saving is refused.
        """
        path = _path(path)
        check_place(path, "session")  # before anything is copied
        with self._between_turns():
            words, request = self._words(), self._request
            session = self.llm.owner.session(request, words)
        session.save(path)  # other threads' requests go on meanwhile

    def _words(self) -> dict[str, Any]:
        """All of it but request and cache, in plain JSON values."""
        settings = {name: value for name, value in self._settings().items() if value is not INHERIT}
        return SavedConversation(self.messages, self._prompt, self.eviction, settings, self._begins).as_json()

    def save_in(self, store: Store, name: str) -> int:
        """Save it as `name` in a `store` (see `LLM.save`); returns the bytes that were new there.

        An answer that another thread reads is waited for, and a turn that comes meanwhile waits for the end of this.
        """
        check_name(name)
        with self._between_turns():
            key, converted = self.llm.cache_key(), self._converted
            return save_request(self.llm.owner, store, name, self._request, self._words(), key, converted)

    @classmethod
    def load_from(
        cls,
        llm: LLM,
        store: Store,
        name: str,
        params: SamplingParams | None = None,
        *,
        eviction: Eviction = AS_SAVED,
        convert: bool = False,
    ) -> Conversation:
        """A conversation that `save_in` saved as `name` in a `store`, for the model `llm`; see `LLM.load` for `params`
        and `convert`. `eviction`: as in `load`.
        """
        llm.chat_parts()
        request, manifest, converted = load_request(llm.owner, store, name, llm.cache_key(), convert)
        try:
            if "document" in manifest.conversation:
                raise HybridKVError(f"{name!r} holds a document, not a conversation")
            talk = cls._of(llm, manifest.conversation, params, eviction)
        except BaseException as problem:
            if request is not None:
                llm.owner.run(lambda engine: engine.abort(request))
            if isinstance(problem, NotWellFormed):
                raise HybridKVError(f"saved cache {name!r} is not well-formed: {problem}") from None
            raise
        talk._converted = converted
        talk._resume(request)
        return talk

    @classmethod
    def _of(cls, llm: LLM, words: Mapping[str, Any], params: SamplingParams | None, eviction: Eviction) -> Conversation:
        """A conversation out of the words that were saved of it, without its request; or NotWellFormed."""
        saved = SavedConversation.of(words, eviction)
        talk = cls(llm, params=params, eviction=saved.eviction)
        talk.messages, talk._prompt, talk._begins = saved.messages, saved.prompt, saved.begins
        for name, value in saved.settings.items():
            setattr(talk, name, value)
        return talk

    def _resume(self, request: Request | None) -> None:
        """Go on from a request that was brought back."""
        if request is not None:
            self._request = request
            splitter = partial(reasoning_of, self.llm.chat_parts()[1], self._prompt)
            self.last = Completion.of(request).divided(splitter)

    def fork(self) -> Conversation:
        """A second conversation with the same past, which goes on by itself. They share the memory of what was said.

        Where there is no room for a second one, its next turn computes the past again (`last.stats["cached_tokens"]`
        says so), and evicts it anew. A conversation with a budget needs a query buffer of its own for the second one;
        a model opened without a budget has one in all: open it with CacheConfig(query_buffers=...) for more. An answer
        that another thread reads is waited for; inside one's own, forking is refused.
        """
        with self._between_turns():
            fork = type(self)(self.llm, params=self.params, eviction=self.eviction, document=self.document)
            fork.messages, fork._prompt = copy.deepcopy(self.messages), self._prompt
            fork._converted = self._converted
            fork._begins = None if self._begins is None else list(self._begins)
            for name, value in self._settings().items():
                setattr(fork, name, value if value is INHERIT else copy.deepcopy(value))
            request = self._request
            if request is not None:
                fork._take(lambda engine: engine.fork_held(request))
            fork.last = self.last
            return fork

    def _settings(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in SETTINGS}

    def _take(self, make: Callable[[Engine], Request]) -> Request:
        """Go on from a held request that the engine makes; whatever happens here, it is this conversation's or gone."""
        made: list[Request] = []
        try:
            self.llm.owner.run(lambda engine: made.append(make(engine)))
            self._request = made[0]
            return made[0]
        except BaseException:
            self.llm.owner.run(lambda engine: [engine.abort(request) for request in made])
            raise

    @property
    def _turns(self) -> tuple[int | None, int]:
        """(turns that stay whole, budget of each older one), or HybridKVError."""
        cache = self.llm.cache_config
        keep = cache.keep_turns if self.keep_turns is INHERIT else self.keep_turns
        budget = cache.turn_budget if self.turn_budget is INHERIT else self.turn_budget
        check_turns(keep, budget)
        if keep is not None and self.document is not None:
            if self.keep_turns is INHERIT:
                return None, budget  # type: ignore[return-value]
            raise RequestError("what follows a document is kept whole: leave out keep_turns, or pass None")
        if keep is not None and self.llm.engine.evictor is None:
            raise RequestError(
                "keep_turns was given, and this model was opened to keep everything; open it with "
                "CacheConfig(keep_turns=...), if it has full attention"
            )
        return keep, budget  # type: ignore[return-value]

    def _turn_begins(self, tokens: list[int], said: int) -> list[int] | None:
        """Where each turn begins in `tokens`, of which the first `said` are those of the turn before; None: all turns
        stay whole, and nobody asks.
        """
        if self._turns[0] is None:
            return None
        if said and self._begins is not None:
            return [*self._begins, said]
        return turn_begins(tokens, self.messages, self._encode)

    def _encode(self, messages: Messages) -> list[int]:
        """Tokens of a conversation, rendered and encoded anew."""
        return encode_pieces(self.llm.chat_parts()[0], self._rendered(messages))

    def _evict_old_turns(self) -> None:
        """At a turn's end: those that have become old are evicted to their budget. The answer is safe already."""
        (keep, budget), begins, request, last = self._turns, self._begins, self._request, self.last
        if keep is None or begins is None or request is None or last is None:
            return
        old = list(pairwise(begins))[: max(0, len(begins) - keep)]
        stats = self.llm.owner.run(lambda engine: engine.evict_turns(request, old, budget))
        self.last = replace(last, stats=stats | {"old_turns": len(old), "turn_budget": budget})

    def _tokens(self, pieces: list[tuple[str, bool]]) -> tuple[list[int], int]:
        """Tokens of the whole conversation, and how many of them are those of the last turn, taken over as they were
        computed; 0: none are.
        """
        request, tokenizer = self._request, self.llm.chat_parts()[0]
        encode = partial(encode_pieces, tokenizer) if self.document is None else self.document.continued
        # where a stop string ended the answer, its tokens say more than its text
        if request is None or request.text.stopped is not None:
            return encode(pieces), 0
        rest = without_beginning(pieces, self._prompt + request.text.text)
        if rest is None:
            return encode(pieces), 0
        # without the token that ended the answer: the template writes that itself
        said = request.tokens[:-1] if request.finish_reason == "stop" else request.tokens
        return encode_pieces(tokenizer, rest, said), len(said)


def turn_begins(tokens: list[int], messages: Messages, encode: Callable[[Messages], list[int]]) -> list[int]:
    """Where the turns of a conversation begin in its tokens: up to where they would be the same if the user had said
    something else in that turn. Everything before the first one, the system prompt above all, is in no turn.
    """
    found: list[int] = []
    for i, message in enumerate(messages):
        if message["role"] == "user":
            other = "b" if str(message.get("content")).lstrip().startswith("a") else "a"
            changed = encode([*messages[:i], message | {"content": other}])
            same = next((n for n, (x, y) in enumerate(zip(tokens, changed)) if x != y), min(len(tokens), len(changed)))
            found.append(max([same, *found[-1:]]))
    return found


def _system_of(document: Document, llm: LLM, system: str | None, eviction: Eviction) -> str | None:
    """The system prompt that the document was read with, or RequestError: they do not go together."""
    if document.llm is not llm:
        raise RequestError("the document is held by another LLM; load it in this one")
    if not document.form.chat:
        raise RequestError(
            "the document was read without a chat format, so no conversation can follow it; use generate"
        )
    if system is not None:
        raise RequestError("the document was read with its own system prompt; give it to LLM.compress instead")
    if eviction is not INHERIT and eviction is not None:
        raise RequestError("what follows a document is kept whole: leave out eviction, or pass None")
    return document.form.system


def _path(path: str | Path) -> Path:
    if not isinstance(path, str | Path) or not str(path):
        raise RequestError(f"the name of a file was expected, not {shown(path)}")
    return Path(path).expanduser()
