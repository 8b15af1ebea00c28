"""A document in a chat template: what stands before a question that is not known yet.

Document and question are one user turn, so the prompt is cut in the middle of that turn:

    <|user|> the document | question <|end|> <|assistant|>
             read once    | rendered for every question

The template is rendered around names that nobody can guess, and the text is cut there. So a document is put through it
once, however many questions follow.
"""

from __future__ import annotations

import secrets
from typing import Any

from hybridkv.errors import RequestError
from hybridkv.text.chat import ChatTemplate
from hybridkv.text.prompt import render_pieces
from hybridkv.text.tokenizer import Tokenizer

BETWEEN = "\n\n"  # document and question
NAME_DIGITS = 24

Pieces = list[tuple[str, bool]]  # (text, whether control tokens in it are real), as render_pieces has them


def messages_with(content: str, system: str | None) -> list[dict[str, Any]]:
    """A conversation of one user turn."""
    first = [{"role": "system", "content": system}] if system is not None else []
    return [*first, {"role": "user", "content": content}]


def before_question(
    template: ChatTemplate, tokenizer: Tokenizer, document: str, system: str | None, **settings: Any
) -> tuple[Pieces, int]:
    """The prompt up to the document's end, and how many of its characters stand before the document."""
    begin, end = _name(), _name()
    messages = messages_with(begin + document + end, system)
    pieces, _ = _cut(render_pieces(template, tokenizer, messages, **settings), end)
    head, rest = _cut(pieces, begin)
    before = len(text_of(head))
    if head and rest and head[-1][1] and rest[0][1]:  # one text, as without the names
        head[-1:], rest = [(head[-1][0] + rest[0][0], True)], rest[1:]
    return [*head, *rest], before


def after_document(
    template: ChatTemplate, tokenizer: Tokenizer, question: str, system: str | None, **settings: Any
) -> Pieces:
    """The rest of the prompt: the question, and what the template writes after it."""
    name = _name()
    messages = messages_with(name + BETWEEN + question, system)
    return _cut(render_pieces(template, tokenizer, messages, **settings), name)[1]


def text_of(pieces: Pieces) -> str:
    """The pieces as one text."""
    return "".join(text for text, _ in pieces)


def without_beginning(pieces: Pieces, text: str) -> Pieces | None:
    """What follows `text`; None: they do not begin with it."""
    if not text_of(pieces).startswith(text):
        return None
    left, found = len(text), []
    for piece, real in pieces:
        if piece[left:]:
            found.append((piece[left:], real))
        left = max(0, left - len(piece))
    return found


def _name() -> str:
    return f"{secrets.randbelow(10**NAME_DIGITS):0{NAME_DIGITS}}"


def _cut(pieces: Pieces, name: str) -> tuple[Pieces, Pieces]:
    """What stands before and after the name, or RequestError where the template does not write it once."""
    if sum(text.count(name) for text, _ in pieces) != 1:
        raise RequestError(
            "the model's chat template does not write a user's text once and as it is, so no document can be put "
            "before a question; give the document as token ids"
        )
    at = next(i for i, (text, _) in enumerate(pieces) if name in text)
    text, real = pieces[at]
    before, after = text.split(name)
    return (
        [*pieces[:at], *([(before, real)] if before else [])],
        [*([(after, real)] if after else []), *pieces[at + 1 :]],
    )
