"""Compressed documents that requests go on from: `hybridkv: {"prefix": NAME}`.

A document is held by the model under the name that `hybridkv serve --document FILE` gave it. What follows it is kept
whole; the client sends the question alone, and the document's own text and system prompt stand before it.
"""

from __future__ import annotations

from typing import Any

from hybridkv.document import Document
from hybridkv.llm import LLM
from hybridkv.server.events import Sharing
from hybridkv.server.problems import ApiError, bad
from hybridkv.text.framed import BETWEEN

Message = dict[str, Any]
PARAM = "hybridkv.prefix"
MOST_NAMES = 20  # in an error


def document_of(llm: LLM, sharing: Sharing) -> Document | None:
    """The document that a request names, or ApiError; None: it names none."""
    if not sharing.prefix:
        return None
    if sharing.prefix in llm.documents:
        return llm.documents[sharing.prefix]
    names = sorted(llm.documents)
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    there = f"there are {', '.join(names[:MOST_NAMES])}{more}" if names else "there is none; serve with --document FILE"
    raise ApiError(404, f"there is no document of that name; {there}", param=PARAM)


def following(document: Document, messages: list[Message]) -> list[Message]:
    """The messages of a chat behind the document and its system prompt, or ApiError."""
    form = document.form
    if not form.chat or document.text is None:
        raise bad("the document was read without a chat format; ask it at /v1/completions", PARAM)
    if any(message["role"] == "system" for message in messages):
        raise bad("the document has its own system prompt: leave out system messages, or compress it with yours", PARAM)
    if not messages or messages[0]["role"] != "user":
        raise bad("the first message after a document must be the user's", PARAM)
    first = messages[0] | {"content": f"{document.text}{BETWEEN}{messages[0]['content'] or ''}"}
    own = [] if form.system is None else [{"role": "system", "content": form.system}]
    return [*own, first, *messages[1:]]


def told_of(document: Document, sharing: Sharing) -> dict[str, Any]:
    """What an answer says of the document that it goes on from."""
    stats = document.stats
    return {"name": sharing.prefix, **{name: stats[name] for name in ("tokens", "kept_tokens") if name in stats}}


def load_documents(llm: LLM, files: dict[str, str]) -> None:
    """Documents of files, by name; HybridKVError where one does not fit the model."""
    for name, path in files.items():
        llm.documents[name] = llm.load_document(path)
