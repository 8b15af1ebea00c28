"""What a request may reuse of others', and where a client wants checkpoints."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from hybridkv.server.events import COMMON, Sharing
from hybridkv.server.fields import Fields
from hybridkv.text.framed import Pieces, text_of
from hybridkv.text.marks import MOST_CLIENT_MARKS
from hybridkv.text.memory import random_name
from hybridkv.text.tokenizer import Tokenizer

Message = dict[str, Any]
MARKED = "cache_marks"  # of a message: characters of its content up to each mark


def sharing_of(asked: Fields) -> Sharing:
    """The salt of the key that the request came with, mixed with its `cache_salt`; `hybridkv: {"cache": false}`;
    `prompt_cache_key`, and `store`: false, which keeps it off the disk; the document that it goes on from.
    """
    given, words, cache = asked.object("hybridkv"), asked.text("cache_salt", 256), True
    if given is not None and "cache" in given:
        cache = given.raw("cache")
        if not isinstance(cache, bool) and cache not in ("read", "write"):
            raise asked.wrong("hybridkv", "its cache must be true, false, 'read' or 'write'")
    salt = asked.salt if words is None else hashlib.sha256(asked.salt + b"\0" + words.encode()).digest()
    conversation = asked.text("prompt_cache_key", 256) or asked.session
    prefix = (given.text("prefix", 256) if given is not None else None) or ""
    if cache is True and not salt and not conversation and not prefix:
        return COMMON
    return Sharing(salt, cache, conversation, asked.raw("store") is not False, prefix)


def is_marked(block: Fields) -> bool:
    """Whether a block has `cache_control`."""
    control = block.object("cache_control")
    if control is None:
        return False
    control.choice("type", ("ephemeral",))
    control.choice("ttl", ("5m", "1h"))
    return True


def joined_marks(first: Message, second: Message, between: int) -> dict[str, list[int]]:
    """The marks of two messages whose contents are joined, with so many characters between them."""
    shift = len(first["content"] or "") + between
    found = [*first.get(MARKED, ()), *(shift + at for at in second.get(MARKED, ()))]
    return {MARKED: found} if found else {}


def named_marks(messages: list[Message]) -> tuple[list[Message], list[str]]:
    """The messages with a name that nobody can guess at each of the first marks, and these names."""
    names: list[str] = []

    def named(message: Message) -> Message:
        content, places = message.get("content"), message.get(MARKED, ())
        if not places or not isinstance(content, str):
            return message
        for at in sorted(set(places), reverse=True):
            end = len(content[:at].rstrip())  # templates trim what stands at the end
            if end or not at:
                names.append(random_name())
                content = content[:end] + names[-1] + content[end:]
        return message | {"content": content}

    return [named(message) for message in messages], names


def marked_tokens(
    tokenizer: Tokenizer, ids: Sequence[int], pieces: Pieces, named: Pieces, names: Sequence[str]
) -> list[int]:
    """Positions in the tokens of a prompt where the names stand. `named`: the same prompt, rendered with the names.

    A name whose place cannot be told, because the template did something else with it, is left out: marks are wishes.
    """
    text, marked = text_of(pieces), text_of(named)
    places = sorted(marked.index(name) for name in names if marked.count(name) == 1)
    found = []
    for place in places:
        before = marked[:place]
        for name in names:
            before = before.replace(name, "")
        if text.startswith(before):
            found.append(len(before.encode()))
    if not found or not tokenizer.joins_bytes:
        return []
    bos = bool(ids) and ids[0] == tokenizer.bos_id and not text.startswith(str(tokenizer.bos_text))
    sizes = [0 if bos and not i else len(tokenizer.piece(token, skip_special=False)) for i, token in enumerate(ids)]
    ends = list(accumulate(sizes))
    positions = sorted({sum(end <= at for end in ends) for at in found})
    return [at for at in positions if at][:MOST_CLIENT_MARKS]
