"""The text of one running request, token by token.

`push` gives text as soon as it is certain: never half a UTF-8 character, and nothing that may yet turn out to be the
beginning of a stop string. Joined, the pushes and `finish` are exactly `tokenizer.decode(all ids)`, cut before the
first stop string. The first is the one that is complete first; of those complete at the same character, the longest.
So the cut depends on the text alone, never on how it was divided into tokens.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from hybridkv.errors import RequestError
from hybridkv.text.tokenizer import Tokenizer


class TextStream:
    """The text of one request. `tokenizer` None: it has no text. `stop`: texts that end it and are cut from it."""

    def __init__(self, tokenizer: Tokenizer | None, stop: Sequence[str] = ()) -> None:
        self.stopped: str | None = None  # the stop string that was met
        self._pieces: list[str] = []  # given out
        self._held = ""  # certain text that may begin a stop string
        self._stops = [_StopString(s) for s in ([stop] if isinstance(stop, str) else stop)]
        self._finished = False
        self._source: _JoinedBytes | _Redecoded | None = None
        if tokenizer is not None:
            self._source = _JoinedBytes(tokenizer) if tokenizer.joins_bytes else _Redecoded(tokenizer)

    @staticmethod
    def ended(text: str, stopped: str | None = None) -> TextStream:
        """One that has come to its end with this text, at this stop string if there was one."""
        stream = TextStream(None)
        stream.stopped, stream._pieces, stream._finished = stopped, [text], True
        return stream

    @property
    def text(self) -> str:
        """All text given out so far."""
        if len(self._pieces) > 1:
            self._pieces = ["".join(self._pieces)]
        return self._pieces[0] if self._pieces else ""

    def push(self, token_id: int, may_stop: bool = True) -> str:
        """One more token; returns the text that is certain now. `may_stop`: a stop string that is complete with it
        counts.
        """
        if self._source is None or self._finished or self.stopped is not None:
            return ""
        return self._give(self._source.push(token_id), last=False, may_stop=may_stop)

    def finish(self) -> str:
        """No more tokens; returns what was held back."""
        if self._source is None or self._finished or self.stopped is not None:
            return ""
        self._finished = True
        return self._give(self._source.finish(), last=True)

    def _give(self, new: str, *, last: bool, may_stop: bool = True) -> str:
        start = len(self._held)
        self._held += new
        out = None
        for i, char in enumerate(new if self._stops else ""):
            complete = [s for s in self._stops if s.push(char)]
            if complete and may_stop:
                longest = max(complete, key=lambda s: len(s.text))
                self.stopped = longest.text
                out = self._held[: start + i + 1 - len(longest.text)]
                self._held = ""
                break
        if out is None:
            keep = 0 if last else max((s.begun for s in self._stops), default=0)
            cut = len(self._held) - keep
            out, self._held = self._held[:cut], self._held[cut:]
        if out:
            self._pieces.append(out)
        return out


class _StopString:
    """Knuth-Morris-Pratt: `matched` characters of the text's end are the beginning of `text`."""

    def __init__(self, text: str) -> None:
        if not isinstance(text, str) or not text:
            raise RequestError(f"stop strings must be strings with at least one character, got {text!r}")
        self.text = text
        self.matched = 0
        self._shorter = [0] * len(text)  # [n] the longest proper beginning of text[: n + 1] that is also its end
        length = 0
        for n in range(1, len(text)):
            length = self._extend(length, text[n])
            self._shorter[n] = length

    @property
    def begun(self) -> int:
        """Characters at the text's end that may yet become the whole stop string, which has not just been met."""
        return self._shorter[-1] if self.matched == len(self.text) else self.matched

    def _extend(self, length: int, char: str) -> int:
        while length and (length == len(self.text) or self.text[length] != char):
            length = self._shorter[length - 1]
        return length + (self.text[length] == char)

    def push(self, char: str) -> bool:
        """True when the text now ends with the whole stop string."""
        self.matched = self._extend(self.matched, char)
        return self.matched == len(self.text)


class _JoinedBytes:
    """For tokenizers whose tokens are byte strings."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._strip = tokenizer.strips_space  # a leading space is still to be dropped

    def push(self, token_id: int) -> str:
        return self._strip_first(self._utf8.decode(self._tokenizer.piece(token_id)))

    def finish(self) -> str:
        return self._strip_first(self._utf8.decode(b"", final=True))

    def _strip_first(self, text: str) -> str:
        if text and self._strip:
            self._strip = False
            return text[1:] if text.startswith(" ") else text
        return text


class _Redecoded:
    """For any other decoder: the last tokens are decoded again at each token, and an unfinished end is held back.

    Tokens are forgotten when the text of those after them is not empty, ends the whole, and was given out: the
    forgotten ones then change nothing of what is to come.
    """

    KEEP = 16  # tokens from which the next are decoded, at least

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._given = 0  # characters of the text of _ids
        self._full = 2 * self.KEEP  # tokens at which the older ones may go

    def push(self, token_id: int) -> str:
        self._ids.append(token_id)
        whole = self._tokenizer.decode(self._ids)
        new = self._rest(whole.rstrip("\ufffd"))
        if len(self._ids) >= self._full:
            self._forget(whole)
        return new

    def finish(self) -> str:
        return self._rest(self._tokenizer.decode(self._ids))

    def _rest(self, text: str) -> str:
        new = text[self._given :]
        self._given = max(self._given, len(text))
        return new

    def _forget(self, whole: str) -> None:
        last = self._ids[-self.KEEP :]
        text = self._tokenizer.decode(last)
        if text and whole.endswith(text) and self._given == len(whole):
            self._ids, self._given, self._full = last, len(text), 2 * self.KEEP
        else:
            self._full += self.KEEP
