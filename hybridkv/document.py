"""Document: a text that is read once, cut to a part of its cache, and asked about any number of times.

    compress    read the text, score its entries (policy `replay`: by reading it once more), drop what scores least
    ask         every question goes on in a fork of what is left: pages are shared, recurrent state is copied
    save, load  a session's file (cache/session.py), from which any process with the same model goes on

The cache is held in the engine like a conversation's, and given up like one where running requests need its room. The
next question then has the text read again. The document remembers which entries it kept, so the same ones are dropped.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from numbers import Integral
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from hybridkv.answers import ChatStream, Completion, Stream
from hybridkv.cache import KVCacheManager
from hybridkv.cache.session import RECORD_BYTES, Session, plain_json
from hybridkv.cache.snapshot_file import NotWellFormed, check_place
from hybridkv.config import EvictionConfig, SamplingParams, is_whole, shown
from hybridkv.engine.engine import Engine
from hybridkv.engine.held import has_cache
from hybridkv.engine.owner import EngineOwner, Ticket
from hybridkv.engine.replay import ReplayPart
from hybridkv.engine.stats import kept_bytes, kept_tokens
from hybridkv.errors import HybridKVError, RequestError
from hybridkv.eviction import find_policy
from hybridkv.eviction.named import resolved_name
from hybridkv.eviction.replay import RECENT, Replay
from hybridkv.request import Request
from hybridkv.text.chat import ChatTemplate
from hybridkv.text.framed import BETWEEN, Pieces, after_document, before_question, text_of, without_beginning
from hybridkv.text.prompt import encode_pieces
from hybridkv.text.reasoning import ReasoningSplitter, reasoning_of
from hybridkv.text.repeating import repeat_pieces
from hybridkv.text.thinking import thinking_variables
from hybridkv.text.tokenizer import Tokenizer

RATIO = 4.0  # where neither ratio nor budget is given
READ = SamplingParams(max_tokens=1, temperature=0.0)  # the token after a text is not looked at
STATS = ("kept_tokens", "kv_bytes_full", "kv_bytes_kept", "state_bytes")
KEEP_QUERIES = 1 << 20  # a budget that evicts nothing, and keeps the last queries for a policy to score by

Question = str | Sequence[int]
Progress = Callable[[str, int, int], None]  # what is being done, tokens done, all of them
Asked = tuple[Callable[[Engine], Request], Callable[[], ReasoningSplitter] | None]


class OpenModel(Protocol):
    """What a document needs of an LLM."""

    @property
    def owner(self) -> EngineOwner:
        """The engine's thread."""
        ...

    @property
    def engine(self) -> Engine:
        """What that thread runs."""
        ...

    @property
    def manager(self) -> KVCacheManager:
        """The cache."""
        ...

    @property
    def tokenizer(self) -> Tokenizer | None:
        """None: token ids alone."""
        ...

    @property
    def chat_template(self) -> ChatTemplate | None:
        """None: texts are read as they are."""
        ...

    def chat_parts(self) -> tuple[Tokenizer, ChatTemplate]:
        """Both, or RequestError."""
        ...

    def encode(self, prompt: Question) -> list[int]:
        """Token ids of a text; ids stay as they are."""
        ...


@dataclass(frozen=True)
class Form:
    """How a text was put to the model, and so how questions follow it."""

    rendered: str | None = None  # all of what was read; None: token ids
    before: int = 0  # characters of it that stand before the text itself
    system: str | None = None
    chat: bool = False  # whether it is in the model's chat format

    @property
    def text(self) -> str | None:
        """The document itself."""
        return None if self.rendered is None else self.rendered[self.before :]

    @staticmethod
    def of(found: Mapping[str, Any]) -> Form:
        """What a file says, or NotWellFormed."""
        form = Form(*(found.get(name) for name in ("rendered", "before", "system", "chat")))  # type: ignore[arg-type]
        texts = isinstance(form.rendered, str | None) and isinstance(form.system, str | None)
        if not texts or not isinstance(form.chat, bool) or not is_whole(form.before):
            raise NotWellFormed("it does not say how its document was put to the model")
        if not 0 <= form.before <= len(form.rendered or "") or (form.chat and form.rendered is None):
            raise NotWellFormed("its document is not a part of what was read")
        return form


class Document:
    """A text whose cache was cut, held in its LLM. `LLM.compress` and `LLM.load_document` make it.

    Args:
        llm: the model that holds it.
        request: the engine's request that has read it.
        form: how it was put to the model.
        stats: what is told of it.

    Any number of questions, from any number of threads, may be asked at the same time; none sees another. `stats` has
    tokens, kept_tokens (a stream, on average), kv_bytes_full, kv_bytes_kept, state_bytes, policy, and the seconds that
    reading and cutting took.
    """

    def __init__(self, llm: OpenModel, request: Request, form: Form, stats: Mapping[str, Any]) -> None:
        self.llm, self.form, self.stats = llm, form, dict(stats)
        self._request: Request | None = request  # its cache is held, as long as nobody needs the room; None: closed
        self._reading = threading.Lock()

    @property
    def tokens(self) -> list[int]:
        """Token ids of all that was read."""
        request = self._open()
        return request.tokens[: request.prompt_tokens]

    @property
    def text(self) -> str | None:
        """The text; None where token ids were given."""
        return self.form.text

    @property
    def evicted(self) -> bool:
        """Whether entries were dropped: then the context bounds what follows, as far as what was kept has room."""
        return bool(self._open().evictions)

    def generate(
        self,
        questions: Question | Sequence[Question],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        thinking: bool | None = None,
        **template_variables: Any,
    ) -> list[Completion]:
        """Answers to one question or several, in their order, computed together.

        Args:
            questions: texts that follow the document, in the model's chat format where it has one; or token ids that
                follow it as they are.
            params: how to choose tokens and when to end, for all of them or one for each.
            thinking: as in `LLM.chat`.
            template_variables: as in `LLM.chat`.
        """
        asked = self.requests(questions, params, thinking, template_variables)
        tickets = [Ticket(add) for add, _ in asked]
        try:
            self.llm.owner.submit(tickets)
            for ticket in tickets:
                ticket.wait()
        finally:
            self.llm.owner.cancel(tickets)
        found = [Completion.of(ticket.result()) for ticket in tickets]
        return [each if split is None else each.divided(split) for each, (_, split) in zip(found, asked, strict=True)]

    def stream(
        self,
        question: Question,
        params: SamplingParams | None = None,
        *,
        thinking: bool | None = None,
        **template_variables: Any,
    ) -> Stream | ChatStream:
        """The answer to one question, piece by piece: a ChatStream in the model's chat format, else a Stream.

        Args:
            question: as in `generate`.
            params: as in `generate`.
            thinking: as in `LLM.chat`.
            template_variables: as in `LLM.chat`.
        """
        if getattr(params, "n", 1) != 1:
            raise RequestError(f"a stream is one answer, {getattr(params, 'n', 1)} were asked for; use generate")
        [(add, splitter)] = self.requests([question], params, thinking, template_variables)
        stream = Stream(self.llm.owner, add)
        return stream if splitter is None else ChatStream(stream, splitter)

    def requests(
        self,
        questions: Question | Sequence[Question],
        params: SamplingParams | Sequence[SamplingParams] | None,
        thinking: bool | None,
        template_variables: Mapping[str, Any],
    ) -> list[Asked]:
        """What `generate` hands to the engine's thread: a function for each question that begins its request, and what
        makes the splitter of its answer.
        """
        listed = _as_list(questions)
        each = list(params) if isinstance(params, Sequence) else [params] * len(listed)
        if len(each) != len(listed):
            raise RequestError(f"{len(listed)} questions were given with {len(each)} sampling parameters")
        followed = [self._followed_by(question, thinking, template_variables) for question in listed]
        request = self.held()
        before = request.tokens[: request.prompt_tokens]

        def adding(tokens: list[int], params: SamplingParams | None) -> Callable[[Engine], Request]:
            return lambda engine: engine.add([*before, *tokens], params, eviction=None, prefix=request)

        return [(adding(tokens, one), split) for (tokens, split), one in zip(followed, each, strict=True)]

    def asked(self, question: Question) -> list[int]:
        """Token ids of the document and of a `question` after it, as `generate` has them."""
        return [*self.tokens, *self._followed_by(question, None, {})[0]]

    def continued(self, pieces: Pieces) -> list[int]:
        """Token ids of a chat that begins with the document, its text rendered to `pieces`; or RequestError."""
        tokenizer, _ = self.llm.chat_parts()
        rest = None if self.form.rendered is None else without_beginning(pieces, self.form.rendered)
        if not self.form.chat or rest is None:
            raise RequestError(
                "the conversation does not begin as the document was read: tools, variables of the chat template or a "
                "date that it writes are not the same; compress the document with these, or ask it with generate"
            )
        return [*self.tokens, *_encode_after(tokenizer, rest, self.tokens[-1])]

    def held(self) -> Request:
        """The engine's request that holds the cache. Where the cache was given up, the text is read again."""
        with self._reading:
            request = self._open()
            if not self.llm.owner.run(lambda engine: has_cache(engine, request)):
                try:
                    self._request = _read(self.llm, request.tokens[: request.prompt_tokens], None, prefix=request)
                except HybridKVError as problem:
                    raise RequestError(
                        f"the document's cache was given up to make room for other requests, and cannot be computed "
                        f"again: {problem}"
                    ) from None
            return self._open()

    def save(self, path: str | Path) -> None:
        """Write it to the file `path`, whole or not at all, with its cache: `LLM.load_document` brings it back, in any
        process, with the same model and KV dtype. Only the file's owner may read it.
        """
        path = _path(path)
        check_place(path, "document")
        words = plain_json({"document": {**vars(self.form), "stats": self.stats}})
        request = self.held()
        session = self.llm.owner.session(request, words)
        if session.snapshot is None:
            raise RequestError("the document's cache was given up while it was saved; save it again")
        session.save(path)

    def close(self) -> None:
        """Give the cache back. Answers that are being written end as they would."""
        with self._reading:
            request, self._request = self._request, None
        if request is not None and not self.llm.owner.closed:
            self.llm.owner.run(lambda engine: engine.abort(request))

    def __enter__(self) -> Document:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open(self) -> Request:
        if self._request is None:
            raise RequestError("this document was closed; compress it again, or load it from its file")
        return self._request

    def _followed_by(
        self, question: Question, thinking: bool | None, variables: Mapping[str, Any]
    ) -> tuple[list[int], Callable[[], ReasoningSplitter] | None]:
        """Token ids of a question as they follow the document, and what makes the splitter of its answer."""
        if not isinstance(question, str):
            return self.llm.engine.check_tokens(self.llm.encode(question)), None
        if not question.strip():
            raise RequestError("the question is empty; give at least one word")
        return _asked(self.llm, self.form, question, self.tokens[-1], thinking, variables)


# ---- making one


def compress(
    llm: OpenModel,
    document: Question,
    ratio: float | None = None,
    budget: int | None = None,
    policy: object = "replay",
    system: str | None = None,
    progress: Progress | None = None,
) -> Document:
    """`LLM.compress`."""
    began = time.perf_counter()
    report = progress or (lambda what, done, total: None)
    form, tokens, head = _formed(llm, document, system)
    eviction = _eviction(llm, len(tokens), ratio, budget, policy)
    if head >= eviction.budget:
        raise RequestError(
            f"{head} tokens of chat format and system prompt stand before the document and always stay, and the budget "
            f"is {eviction.budget}; raise the budget, or lower the ratio"
        )
    replays = needs_replay(eviction)
    if llm.manager.slots < 2:
        raise RequestError(
            "a question takes a request slot beside the document's own; open the model with max_requests=2"
        )
    parts = replay_parts(llm, tokens[head:], _asking(llm, form, tokens), eviction, len(tokens)) if replays else []
    window = replace(eviction, budget=KEEP_QUERIES, policy=EvictionConfig.policy)
    request = _read(llm, tokens, None if replays else window, partial(report, "reading"))
    try:
        cut_held(llm, request, eviction, parts, [(0, head)], partial(report, "reading again"))
    except BaseException:
        llm.owner.discard(request)
        raise
    about = {"policy": resolved_name(eviction.policy, seen=False), "seconds": time.perf_counter() - began}
    stats = {"tokens": len(tokens)} | {name: request.stats[name] for name in STATS}
    return Document(llm, request, form, stats | about)


def load_document(llm: OpenModel, path: str | Path) -> Document:
    """`LLM.load_document`."""
    owner, path = llm.owner, _path(path)
    room = llm.engine.cache_bytes + RECORD_BYTES
    session = Session.load(path, owner.check_session_model, room)
    words = session.conversation.get("document")
    if not isinstance(words, dict):
        raise HybridKVError(f"{path.name} holds no document; a conversation is loaded with Conversation.load")
    try:
        form, stats = Form.of(words), words.get("stats")
        if not isinstance(stats, dict):
            raise NotWellFormed("its figures are not a JSON object")
    except NotWellFormed as problem:
        raise HybridKVError(f"document {path.name} is not well-formed: {problem}") from None
    if session.snapshot is None:
        raise HybridKVError(f"document {path.name} is not well-formed: it has no cache")
    if form.chat:
        llm.chat_parts()
    made: list[Request] = []
    try:
        owner.run(lambda engine: made.append(engine.restore_held(session)))
        return Document(llm, made[0], form, stats)
    except BaseException:
        for request in made:
            owner.discard(request)
        raise


def needs_replay(eviction: EvictionConfig | None) -> bool:
    """Whether its scores come from reading a text once more."""
    return eviction is not None and find_policy(eviction.policy, seen=False).needs_replay


def cut_held(
    llm: OpenModel,
    request: Request,
    eviction: EvictionConfig,
    parts: Sequence[ReplayPart],
    stay: Sequence[tuple[int, int]] = (),
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Evict a held request, by replay of `parts` where there are any. Other requests go on between the parts.

    stay: (begin, end) of positions whose entries are kept.
    """
    scores: list[Tensor] | None = None
    done, total = 0, sum(part.tokens for part in parts)
    for part in parts:
        scores = llm.owner.run(lambda engine, part=part, before=scores: engine.replay(request, part, before))
        done += part.tokens
        if progress is not None:
            progress(done, total)

    def evict(engine: Engine) -> None:
        engine.evict_held(request, eviction, scores, stay)
        engine.drop_queries(request)
        request.stats.update(_held_stats(engine, request))

    llm.owner.run(evict)


def replay_parts(
    llm: OpenModel,
    tokens: Sequence[int],
    ask: Callable[[str], list[int]],
    eviction: EvictionConfig | None,
    position: int,
) -> list[ReplayPart]:
    """A text, whose cache is at `position`, in parts that are read again. `ask`: what follows it to ask for one."""
    chunk = Replay.chunk
    policy = None if eviction is None else find_policy(eviction.policy, seen=False)
    if policy is not None:
        chunk = getattr(getattr(policy, "policy", policy), "chunk", chunk)  # a spread has the policy inside
    manager, tokenizer = llm.manager, llm.tokenizer
    room = min(manager.max_tokens, llm.engine.tokens_alone) - position

    def say(tokens: list[int]) -> str:
        return "" if tokenizer is None else tokenizer.decode(tokens)

    return [ReplayPart(*piece) for piece in repeat_pieces(tokens, ask, say, chunk, room)]


def document_parts(
    llm: OpenModel,
    document: Question,
    system: str | None,
    position: int,
    ask: Callable[[str], list[int]] | None = None,
) -> tuple[list[ReplayPart], int]:
    """A document in parts that are read again, and how many tokens stand before it, as `compress` has them.

    position: of the cache, where more than the document was read; then `ask` is what follows that to ask for a part.
    """
    form, tokens, head = _formed(llm, document, system)
    return replay_parts(llm, tokens[head:], ask or _asking(llm, form, tokens), None, position), head


def _asking(llm: OpenModel, form: Form, tokens: list[int]) -> Callable[[str], list[int]]:
    """What follows a document to ask for something."""

    def ask(text: str) -> list[int]:
        if form.rendered is None:  # token ids: they are repeated without being asked for
            return []
        return _asked(llm, form, text, tokens[-1], _without_thoughts(llm, form), {})[0]

    return ask


def _formed(llm: OpenModel, document: Question, system: str | None) -> tuple[Form, list[int], int]:
    """How the text is put to the model, its token ids, and how many of these stand before the text itself."""
    if not isinstance(system, str | None):
        raise RequestError(f"the system prompt must be a text, not {shown(system)}")
    if not isinstance(document, str):
        if system is not None:
            raise RequestError("a system prompt goes with a document that is a text, not with token ids")
        return Form(), llm.engine.check_tokens(llm.encode(document)), 0
    text = document.strip()
    if not text:
        raise RequestError("the document is empty; give at least one word")
    if llm.chat_template is None:
        if system is not None:
            llm.chat_parts()  # says what is missing
        return Form(text), llm.encode(text), 0
    tokenizer, template = llm.chat_parts()
    pieces, before = before_question(template, tokenizer, text, system)
    tokens, rendered = encode_pieces(tokenizer, pieces), text_of(pieces)
    start = encode_pieces(tokenizer, [(rendered[:before], True)])
    head = next(
        (i for i, (a, b) in enumerate(zip(start, tokens, strict=False)) if a != b), min(len(start), len(tokens))
    )
    return Form(rendered, before, system, chat=True), tokens, head


def check_settings(ratio: float | None, budget: int | None, policy: object) -> None:
    """Whether a document can be cut like this, or HybridKVError. No model is needed."""
    if ratio is not None and budget is not None:
        raise RequestError(
            f"ratio {shown(ratio)} and budget {shown(budget)} both say how much is kept; give one of them"
        )
    number = is_whole(ratio) or isinstance(ratio, float)
    if ratio is not None and not (number and math.isfinite(ratio) and ratio >= 1):
        raise RequestError(
            f"ratio says how many times smaller the cache becomes, a number from 1 on, not {shown(ratio)}"
        )
    if budget is not None and (not is_whole(budget) or budget < 1):
        raise RequestError(f"budget must be a positive number of tokens, not {shown(budget)}")
    find_policy(policy, seen=False)


def _eviction(llm: OpenModel, tokens: int, ratio: float | None, budget: int | None, policy: object) -> EvictionConfig:
    """What is kept of so many tokens, or HybridKVError."""
    check_settings(ratio, budget, policy)
    if budget is None:
        budget = max(1, round(tokens / (RATIO if ratio is None else ratio)))
    window = min(EvictionConfig.window, llm.manager.schema.query_window or EvictionConfig.window)
    replays = find_policy(policy, seen=False).needs_replay
    recent = min(RECENT, budget // 8) if replays else min(EvictionConfig.recent, budget // 2)
    found = EvictionConfig(budget, window, recent, policy)
    llm.engine.resolve_eviction(found, replays=True)
    return found


def _read(
    llm: OpenModel,
    tokens: list[int],
    eviction: EvictionConfig | None,
    progress: Callable[[int, int], None] | None = None,
    prefix: Request | None = None,
) -> Request:
    """A held request that has read these tokens. `prefix`: one that had, and whose evictions are carried out again."""

    def add(engine: Engine) -> Request:
        return engine.add(tokens, READ, hold=True, eviction=eviction, prefix=prefix)

    with Stream(llm.owner, add) as stream:
        try:
            for _ in stream.steps():
                if progress is not None:
                    progress(*stream.progress)
        except BaseException:  # it may have ended by then, and hold its cache
            llm.owner.discard(stream.request)
            raise
    return stream.request


def _held_stats(engine: Engine, request: Request) -> dict[str, float]:
    return {
        "kept_tokens": kept_tokens(request, engine.manager),
        "kv_bytes_kept": kept_bytes(request, engine.manager, engine.schema),
    }


# ---- what follows a document


def _asked(
    llm: OpenModel, form: Form, question: str, last: int, thinking: bool | None, variables: Mapping[str, Any]
) -> tuple[list[int], Callable[[], ReasoningSplitter] | None]:
    """Token ids of a question after a document whose last token is `last`, and what makes the answer's splitter."""
    if not form.chat:
        if thinking is not None or variables:
            raise RequestError(
                "thinking and variables of a chat template need a document that was read in a chat format"
            )
        if llm.tokenizer is None:
            return llm.encode(question), None
        between = BETWEEN if form.rendered is not None else ""
        return llm.tokenizer.encode(between + question, bos=False, after=last), None
    tokenizer, template = llm.chat_parts()
    pieces = after_document(template, tokenizer, question, form.system, thinking=thinking, **variables)
    return _encode_after(tokenizer, pieces, last), partial(reasoning_of, template, text_of(pieces))


def _encode_after(tokenizer: Tokenizer, pieces: Pieces, last: int) -> list[int]:
    ids: list[int] = []
    for text, real in pieces:
        ids += tokenizer.encode(text, bos=False, special=real, after=ids[-1] if ids else last)
    return ids


def _without_thoughts(llm: OpenModel, form: Form) -> bool | None:
    """What switches thinking off; None: the template has no such switch."""
    if not form.chat or llm.chat_template is None:
        return None
    try:
        thinking_variables(llm.chat_template, False)
    except RequestError:
        return None
    return False


def _as_list(questions: Question | Sequence[Question]) -> list[Question]:
    if isinstance(questions, str) or not isinstance(questions, Iterable):
        return [questions]
    listed = list(questions)
    return [listed] if listed and isinstance(listed[0], Integral) else listed  # type: ignore[list-item,return-value]


def _path(path: str | Path) -> Path:
    if not isinstance(path, str | Path) or not str(path):
        raise RequestError(f"the name of a file was expected, not {shown(path)}")
    return Path(path).expanduser()
