"""Calls of functions in the text of an answer, found as it comes.

    text ... <tool_call> body </tool_call> ... text          what a body is, call_formats.py says

The body's parser follows strings and escapes (JSON) or tags; it never looks for the closing tag inside a JSON string.
How the text came in pieces changes nothing: only what may yet become a tag is held back. Where the opening tag is one
token of the vocabulary, that token alone opens a call; the same letters in prose are text. Where it is not, letters
decide, outside code fences.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hybridkv.text.call_bodies import Body, CallPiece, bare_object, body_of
from hybridkv.text.call_formats import CallFormat
from hybridkv.text.reasoning import ReasoningSplitter, begun


class CallParser:
    """Divides one answer into thoughts, text and calls.

    Args:
        form: how the family writes calls.
        splitter: divides thoughts from the rest.
        tools: functions by name, with their JSON schemas.
        by_token: the opening tag is a token, whose places in the text `push` is told.
        mark: what ends thoughts; a second one is dropped. "": there is none.
    """

    def __init__(
        self,
        form: CallFormat,
        splitter: ReasoningSplitter,
        tools: Mapping[str, Any],
        by_token: bool = False,
        mark: str = "",
    ) -> None:
        self._form, self.splitter, self._tools = form, splitter, tools
        self._by_token, self._mark = by_token, mark
        self._held, self._at = "", 0  # text that is not given out, and where in the answer it begins
        self._places: set[int] = set()
        self._body: Body | None = None
        self._space = ""  # white space after text: dropped if a call follows
        self._called, self._said = False, False
        self._ticks, self._fenced = 0, False
        self._bare = not form.open  # a bare object may still come
        self.made = 0  # whole calls
        self._opened = 0  # where in the answer the body begins that is being read
        self.begins: int | None = None  # where the first call does, its tag included
        self.ends = 0  # where the last one ended

    def push(self, text: str, places: tuple[int, ...] = ()) -> list[CallPiece]:
        """More text; `places`: where in the answer, in characters, opening tokens begin."""
        self._places.update(places)
        self._held += text
        return self._run(last=False)

    def finish(self, complete: bool) -> list[CallPiece]:
        """No more text. `complete`: the model ended its answer; a limit may leave a call that is not reported."""
        found = self._run(last=complete or self._body is None)
        if self._body is not None:
            found += self._count(self._body.finish(complete, self._held))
            self._at += len(self._held)
            self._body, self._held, self.ends = None, "", self._at
        found += self._divided(self._held)
        self._held = ""
        found += self._pieces(self.splitter.finish())
        if self._space and not self._called:
            found.append(CallPiece("text", self._space))
        return found

    # ---- text between calls

    def _run(self, last: bool) -> list[CallPiece]:
        found: list[CallPiece] = []
        while True:
            if self._body is not None:
                before = len(self._held)
                pieces, self._held = self._body.push(self._held, last)
                self._at += before - len(self._held)
                found += self._count(pieces)
                if not self._body.over:
                    return found
                self._body, self.ends = None, self._at
                continue
            if self._bare:
                if self._begin_bare(last):
                    return found
                self._bare = self._body is not None
                continue
            if not self._text(found, last):
                return found

    def _text(self, found: list[CallPiece], last: bool) -> bool:
        """Give out text up to the next tag; whether there was one."""
        tags = [tag for tag in (self._form.open, self._mark) if tag]
        at, tag = min(((self._held.find(t), t) for t in tags if t in self._held), default=(-1, ""))
        if at < 0:
            keep = 0 if last else max((begun(self._held, t) for t in tags), default=0)
            cut = len(self._held) - keep
            found += self._divided(self._take(cut))
            return False
        found += self._divided(self._take(at))
        if tag == self._mark:
            text = self._take(len(tag))
            if not self.splitter.answering:
                found += self._divided(text)
        elif self._opens():
            self._opened = self._at
            self._take(len(tag))
            found += self._pieces(self.splitter.end_thoughts())
            self._body, self._space = body_of(self._form, self._tools), ""
        else:
            found += self._divided(self._take(1))
        return True

    def _opens(self) -> bool:
        if self._by_token:
            return self._at in self._places
        return not self._fenced and self.splitter.answering

    def _begin_bare(self, last: bool) -> bool:
        """An object at the very beginning of the answer, or after another one: perhaps a call. Whether to wait."""
        text = self._held.lstrip("; \n\t\r" if self._called else None)
        if not self.splitter.marked and text.startswith("{"):
            self._take(len(self._held) - len(text))
            self._opened = self._at
            self._body = bare_object(self._tools)
            return False
        return not text and not last

    def _take(self, count: int) -> str:
        text, self._held = self._held[:count], self._held[count:]
        self._at += count
        return text

    def _divided(self, text: str) -> list[CallPiece]:
        for char in text:  # three ticks begin or end a fence
            self._ticks = self._ticks + 1 if char == "`" else 0
            if self._ticks == 3:
                self._fenced, self._ticks = not self._fenced, 0
        return self._pieces(self.splitter.push(text)) if text else []

    def _pieces(self, pieces: list[Any]) -> list[CallPiece]:
        found = []
        for piece in pieces:
            if piece.reasoning:
                found.append(CallPiece("reasoning", piece.text))
                continue
            text = self._space + piece.text
            if self._called and not self._said:
                text = text.lstrip()
            shown = text.rstrip()
            self._space = text[len(shown) :]
            if shown:
                self._said = True
                found.append(CallPiece("text", shown))
        return found

    def _count(self, pieces: list[CallPiece]) -> list[CallPiece]:
        found = []
        for piece in pieces:
            self.made += piece.kind == "end"
            if piece.kind == "start" and self.begins is None:
                self.begins = self._opened
            if piece.kind in ("start", "end"):
                self._called, self._said, self._space = True, False, ""
                self._bare = not self._form.open
            # a body that was no call: its text, as text
            found += self._divided(piece.text) if piece.kind == "text" else [piece]
        return found
