"""The page at `/`: three files of the package, and what a request's prompt looks like to the key that asked for it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from importlib.resources import files
from typing import Any

import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from hybridkv.eviction_record import EvictionRecord
from hybridkv.report.kept import positions_held, token_texts
from hybridkv.server.picture import Recorder
from hybridkv.server.problems import ApiError
from hybridkv.text.tokenizer import Tokenizer

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
FILES = {  # path -> media type and what it is made of
    "/": ("text/html", ("page.html",)),
    "/page.css": ("text/css", ("page.css",)),
    "/page.js": ("text/javascript", ("shading.js", "page.js")),
}
WINDOW = 8192  # tokens of a prompt that are shown at once


def static_file(path: str) -> Callable[[Request], Any]:
    """A route that gives one of the files, or 304 to who has it already."""
    kind, names = FILES[path]
    body = b"".join(files("hybridkv").joinpath("data", name).read_bytes() for name in names)
    tag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
    headers = {
        "etag": tag,
        "cache-control": "no-cache",  # asked for again each time, and answered by 304
        "content-security-policy": POLICY,
        "referrer-policy": "no-referrer",
        "cross-origin-opener-policy": "same-origin",
    }

    async def give(request: Request) -> Response:
        known = [name.strip().removeprefix("W/") for name in request.headers.get("if-none-match", "").split(",")]
        if tag in known or "*" in known:
            return Response(status_code=304, headers=headers)
        return Response(body, media_type=f"{kind}; charset=utf-8", headers=headers)

    return give


def shaded_prompt(recorder: Recorder, tokenizer: Tokenizer | None, number: int, owner: bytes, first: int) -> Any:
    """Texts of a prompt's tokens from `first` on, and how many streams hold each. On a worker thread."""
    prompt = recorder.prompt(number, owner)
    if prompt is None:
        raise ApiError(404, "no request of this number that your key asked for is known any more")
    length = len(prompt.tokens)
    first = min(first, max(0, length - 1) // WINDOW * WINDOW)
    last = min(length, first + WINDOW)
    found = {"n": number, "tokens": length, "first": first, "window": WINDOW, "streams": recorder.streams}
    texts = token_texts(tokenizer, prompt.tokens[:last])[first:]
    if not recorder.streams:  # it compresses its cache by itself, and never evicts
        return found | {"texts": texts, "counts": None, "kept": None}
    counts = np.zeros(prompt.seen, np.int64)
    # a record that the engine's thread may pack at this moment is read as a copy
    evictions = {at: EvictionRecord.of_packed(*record.packed()) for at, record in prompt.evictions.items()}
    for positions in positions_held(evictions, recorder.streams, prompt.seen):
        counts[positions] += 1
    counts = counts[:length]
    kept = round(float(counts.sum()) / recorder.streams, 1)
    return found | {"texts": texts, "counts": counts[first:last].tolist(), "kept": kept}
