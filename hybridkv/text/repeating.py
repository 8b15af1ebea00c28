"""How a model is asked to repeat what it has read, piece by piece."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

from hybridkv.errors import RequestError

REPEAT = "Repeat the previous context exactly."
FROM = " It begins: "  # for the pieces after the first: the words before each
WORDS = 8  # tokens of these
LEAST = 64  # tokens of a piece: shorter ones say little of what the model would repeat

Piece = tuple[list[int], list[int]]  # token ids that ask for a piece, and those of the piece itself


def repeat_pieces(
    tokens: Sequence[int], ask: Callable[[str], list[int]], text: Callable[[list[int]], str], chunk: int, room: int
) -> list[Piece]:
    """A text in pieces of about the same size, at most `chunk` tokens, each with what asks for it; or RequestError.

    Args:
        tokens: of the text.
        ask: token ids of a request to the model, as they follow what it has read.
        text: what tokens say.
        chunk: tokens of a piece at the most.
        room: tokens that fit the context beside what has been read.
    """
    longest = chunk
    for _ in range(3):  # how long a request is depends on the words that it quotes
        count = -(-len(tokens) // max(1, longest))
        bounds = [len(tokens) * i // count for i in range(count + 1)]
        asked = [
            ask(REPEAT if not a else REPEAT + FROM + text(list(tokens[max(0, a - WORDS) : a]))) for a in bounds[:-1]
        ]
        found = [(prompt, list(tokens[a:b])) for prompt, (a, b) in zip(asked, pairwise(bounds), strict=True)]
        most = max(len(prompt) + len(piece) for prompt, piece in found)
        if most <= room:
            return found
        longest = min(longest - 1, room - max(len(prompt) for prompt in asked))
        if longest < min(LEAST, len(tokens)):
            break
    least = max(len(prompt) for prompt in asked) + min(LEAST, len(tokens))
    raise RequestError(
        f"reading a text again takes {least} tokens beside its own at the least, and the context has room for {room}; "
        f"shorten the text by {least - room} tokens, or raise max_context or memory"
    )
