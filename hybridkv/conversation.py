"""Conversation: turns of a chat on one cache. A turn computes only what the cache does not hold yet.

The new prompt is the whole conversation rendered by the model's chat template. Where that text begins with what was
computed before (the last prompt and the answer to it), only the rest is tokenised and run. Where it does not, because
a template rewrites earlier turns, the engine reuses as much as it can and computes the rest again.
"""

from __future__ import annotations

from collections.abc import Iterator

from hybridkv.config import SamplingParams
from hybridkv.llm import LLM, Completion
from hybridkv.request import Request
from hybridkv.text.prompt import encode_pieces, render_pieces


class Conversation:
    def __init__(self, llm: LLM, system: str | None = None, params: SamplingParams | None = None) -> None:
        self.llm, self.params = llm, params or SamplingParams(max_tokens=512)
        self.messages = [{"role": "system", "content": system}] if system else []
        self.last: Completion | None = None
        self._request: Request | None = None  # the last turn's, whose cache is held
        self._prompt = ""  # the text that the last turn's prompt was made from

    def send(self, text: str) -> Iterator[str]:
        """The answer's text piece by piece. Closing the iterator early keeps what was said so far as the answer."""
        self.messages.append({"role": "user", "content": text})
        try:
            tokenizer, template = self.llm.chat_parts()
            pieces = render_pieces(template, tokenizer, self.messages)
            request = self.llm.engine.add(self._tokens(pieces), self.params, hold=True, after=self._request)
        except BaseException:
            self.messages.pop()  # the turn did not happen
            raise
        self._request, self._prompt = request, "".join(text for text, _ in pieces)
        try:
            yield from self.llm.pieces(request)
        finally:
            self.llm.engine.stop(request)
            if request.error is None:
                self.messages.append({"role": "assistant", "content": request.text.text})
                self.last = Completion.of(request)
            else:
                self.messages.pop()  # the turn did not happen, and its cache is gone
                self._request = None

    def close(self) -> None:
        """Give the cache back."""
        if self._request is not None:
            self.llm.engine.abort(self._request)
            self._request = None

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
