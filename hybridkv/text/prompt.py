"""From messages to token ids, so that what a person wrote cannot forge a turn.

Control tokens that the template writes are real; those that a message spells stay plain text.
"""

from __future__ import annotations

import secrets
from typing import Any

from hybridkv.errors import RequestError
from hybridkv.text.chat import ChatTemplate
from hybridkv.text.tokenizer import Tokenizer


def render_pieces(
    template: ChatTemplate, tokenizer: Tokenizer, messages: list[dict[str, Any]]
) -> list[tuple[str, bool]]:
    """The prompt in pieces (text, whether control tokens in it are real).

    Almost always one piece. A message that spells a control token is rendered under a random name that no one can
    guess, and put back as a piece of its own.
    """
    names: dict[str, str] = {}
    shown = []
    for message in messages:
        content = message.get("content")
        if isinstance(content, str) and tokenizer.spells_control(content):
            name = secrets.token_hex(16)
            names[name] = content
            message = {**message, "content": name}
        shown.append(message)
    pieces = [(template.render(shown), True)]
    for name, content in names.items():
        before, found, after = pieces[-1][0].partition(name)
        if not found or name in after:
            raise RequestError(
                "a message spells a control token, and the chat template does not repeat it once and unchanged"
            )
        pieces[-1:] = [(before, True), (content, False), (after, True)]
    return pieces


def encode_pieces(tokenizer: Tokenizer, pieces: list[tuple[str, bool]]) -> list[int]:
    first = pieces[0][0]
    wrote_bos = bool(tokenizer.bos_text) and first.startswith(str(tokenizer.bos_text))  # templates often do
    ids = [] if wrote_bos or not tokenizer.add_bos or tokenizer.bos_id is None else [tokenizer.bos_id]
    for text, real in pieces:
        ids += tokenizer.encode(text, bos=False, special=real)
    return ids
