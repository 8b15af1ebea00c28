"""Grammars: what an answer may look like, compiled by llguidance (extra `structured`) for one tokenizer.

Everything that a client can send becomes a Lark text, with JSON schemas inside. Compiling is a client's program run
here: fifty patterns that must all hold take longer than anyone lives, and no thread can be stopped. So a grammar is
first tried in a small process of its own (`grammar_worker.py`: bounded memory, no open files), which is killed when its
time is up; what came through is built here. Two at a time.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from hybridkv.errors import HybridKVError, RequestError
from hybridkv.text.chat import Worker, WorkerFailed
from hybridkv.text.schema_limits import MAX_SCHEMA_BYTES, checked_schema
from hybridkv.text.tokenizer import Tokenizer, guarded

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

SECONDS = 5.0  # for a compilation, and for its turn
AT_ONCE = 2
WORKER_MEMORY = 1 << 30  # bytes of address space
KEPT = 64  # grammars that are not compiled again
LEXER_STATES = 50_000  # of one answer, some 2 KB each
MOST_WORDS = 4096  # of the choices of an answer
NO_SPACE: dict[str, Any] = {"whitespace_flexible": False}  # with free white space small models write nothing else
SPACED = NO_SPACE | {"item_separator": ", ", "key_separator": ": "}  # as templates show calls


class GrammarError(HybridKVError):
    """A grammar failed while its answer was written."""


class Timer:
    """Seconds by phase, for metrics: {phase: [times, seconds]}."""

    def __init__(self) -> None:
        self.phases: dict[str, list[float]] = {"compile": [0, 0.0], "mask": [0, 0.0]}
        self._lock = threading.Lock()

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Count what runs inside."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            took, found = time.perf_counter() - begin, self.phases[phase]
            with self._lock:
                found[0] += 1
                found[1] += took


class Grammar:
    """A compiled grammar. Each answer has a matcher of its own."""

    def __init__(self, first: LLMatcher, words: int) -> None:
        self._first, self.words = first, words

    def matcher(self) -> LLMatcher:
        """At the beginning of an answer."""
        return self._first.deep_copy()


class Grammars:
    """The grammars of one tokenizer. Any thread may compile."""

    def __init__(self, tokenizer: Tokenizer | None, vocab: int) -> None:
        self._tokenizer, self._vocab = tokenizer, vocab
        self._lock, self._turns = threading.Lock(), threading.BoundedSemaphore(AT_ONCE)
        self._ll: LLTokenizer | None = None
        self._kept: OrderedDict[str, Grammar] = OrderedDict()
        self._workers: list[Worker] = []  # that nobody is asking
        self.timer = Timer()

    @property
    def tokenizer(self) -> Tokenizer:
        """Or RequestError, where the model has none."""
        if self._tokenizer is None:
            raise RequestError("structured output needs a tokenizer, which this model does not have")
        return self._tokenizer

    def compile(self, lark: str, what: str) -> Grammar:
        """The grammar of a Lark text, or RequestError: what is wrong with it, or that it takes too long.

        `what`: the field that asked for it, for messages.
        """
        with self._lock:
            if (found := self._kept.get(lark)) is not None:
                self._kept.move_to_end(lark)
                return found
        end = time.monotonic() + SECONDS
        if not self._turns.acquire(timeout=SECONDS):
            raise RequestError(f"{what}: other grammars are being compiled; ask again later")
        try:
            with self.timer.timed("compile"):
                found = self._compile(lark, what, end)
        finally:
            self._turns.release()
        with self._lock:
            self._kept[lark] = found
            while len(self._kept) > KEPT:
                self._kept.popitem(last=False)
        return found

    def _compile(self, lark: str, what: str, end: float) -> Grammar:
        llguidance = _library()
        source = llguidance.LLMatcher.grammar_from_lark(lark)
        if problem := self._try(source, what, end):
            raise _refused(what, problem)
        tokenizer = self._llguidance()
        limits = llguidance.LLParserLimits(max_lexer_states=LEXER_STATES, verbose_errors=False)
        first = llguidance.LLMatcher(tokenizer, source, log_level=0, limits=limits)
        tried = first.deep_copy()
        if not tried.is_error():
            tried.compute_bitmask()  # a grammar without a first token fails here
        if tried.is_error():
            raise _refused(what, tried.get_error())
        return Grammar(first, (tokenizer.vocab_size + 31) // 32)

    def _try(self, source: str, what: str, end: float) -> str:
        """What is wrong with a grammar, in a process that can be killed."""
        with self._lock:
            worker = self._workers.pop() if self._workers else None
        try:
            if worker is None or worker.owner != os.getpid() or not worker.alive():
                worker = Worker("grammar_worker.py")
                worker.ask(json.dumps({"seconds": SECONDS, "memory": WORKER_MEMORY}).encode(), SECONDS)
                end = max(end, time.monotonic() + SECONDS / 2)  # its start is not the grammar's fault
            found = worker.ask(json.dumps({"grammar": source}).encode(), max(0.1, end - time.monotonic()))
        except WorkerFailed as problem:
            if problem.kind == "start":
                raise HybridKVError(f"the process that tries grammars did not start: {problem.message}") from None
            why = f"takes longer than {SECONDS:g} seconds" if problem.kind == "time" else "needs too much memory"
            raise RequestError(f"{what}: compiling it {why}; make it simpler") from None
        with self._lock:
            self._workers.append(worker)
        return found

    def close(self) -> None:
        """End the processes; a later compilation starts a new one."""
        with self._lock:
            while self._workers:
                self._workers.pop().end()

    def _llguidance(self) -> LLTokenizer:
        """The tokenizer as llguidance has it, made once: it takes half a second."""
        tokenizer, llguidance = self.tokenizer, _library()
        with self._lock:
            if self._ll is None:
                size = max(self._vocab, tokenizer.vocab_size)
                with guarded("this model's tokenizer cannot be used for structured output", RequestError):
                    self._ll = llguidance.LLTokenizer(
                        tokenizer.as_json(), n_vocab=size, eos_token=sorted(tokenizer.eos_ids) or None
                    )
            return self._ll


def _library() -> Any:
    try:
        import llguidance
    except ImportError:
        raise RequestError(
            "structured output (JSON schemas, grammars, forced calls) needs the extra 'structured': "
            "pip install 'hybridkv[structured]'"
        ) from None
    return llguidance


def _refused(what: str, problem: str) -> RequestError:
    said = " ".join(problem.split())  # messages of the regex parser have several lines
    return RequestError(f"{what}: this cannot be turned into a grammar: {said[:300]}")


# ---- Lark texts


def json_rule(schema: dict[str, Any], spaced: bool = False) -> str:
    """A schema as a part of a rule. The only white space is what `spaced` puts after commas and colons."""
    return f"%json {json.dumps(schema | {'x-guidance': SPACED if spaced else NO_SPACE})}"


def lead(after_thoughts: bool) -> str:
    """What may stand before an answer: models that have thought begin it on a new line."""
    return "/\\n{0,2}/ " if after_thoughts else ""


def json_grammar(schema: Any, what: str, after_thoughts: bool = False) -> str:
    """One JSON value by a schema."""
    return f"start: {lead(after_thoughts)}value\nvalue: {json_rule(checked_schema(schema, what))}\n"


def choice_grammar(words: Sequence[str], what: str) -> str:
    """One of a few texts."""
    if not words or len(words) > MOST_WORDS or not all(isinstance(word, str) and word for word in words):
        raise RequestError(f"{what}: it must be 1 to {MOST_WORDS} texts, none empty")
    return _sized("start: " + " | ".join(map(json.dumps, words)) + "\n", what)


def regex_text(pattern: str) -> str:
    """A regular expression as it stands between slashes; \\d and \\w are ASCII, as in JSON schemas."""
    return _library().regex_to_lark(pattern, "dw")


def regex_grammar(pattern: str, what: str) -> str:
    """All of an answer by a regular expression."""
    return _sized(f"start: /{regex_text(pattern)}/\n", what)


def own_grammar(text: str, what: str) -> str:
    """A Lark grammar as it was given."""
    return _sized(text, what)


def _sized(text: str, what: str) -> str:
    size = len(text.encode())
    if size > MAX_SCHEMA_BYTES:
        raise RequestError(f"{what}: the grammar has {size} bytes, at most {MAX_SCHEMA_BYTES} are taken")
    return text


def grammar_text(kind: str, given: Any, what: str, after_thoughts: bool = False) -> str:
    """The Lark text of what was asked for: json, json_object, regex, choice or grammar."""
    if kind in ("json", "json_object"):
        return json_grammar({"type": "object"} if kind == "json_object" else given, what, after_thoughts)
    return {"regex": regex_grammar, "choice": choice_grammar, "grammar": own_grammar}[kind](given, what)
