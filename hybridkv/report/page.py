"""The page: one self-contained HTML file that loads nothing from anywhere.

Prompt text may be hostile. It reaches the page as JSON in which no character can end the element that holds it, the
script puts it into text nodes alone, and the page's own policy lets no other script run.
"""

from __future__ import annotations

import base64
import hashlib
import json
from dataclasses import asdict
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

from hybridkv.report.kept import Kept

_INERT = str.maketrans({"<": "\\u003c", ">": "\\u003e", "&": "\\u0026"})


def write_page(kept: Kept, path: Path) -> None:
    """Write the page to a file."""
    path.write_text(page(kept), encoding="utf-8")


def page(kept: Kept) -> str:
    """The page as HTML."""
    style, shading, own, body = (
        files("hybridkv").joinpath("data", name).read_text(encoding="utf-8")
        for name in ("kept.css", "shading.js", "kept.js", "kept.html")
    )
    script = shading + own
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; base-uri 'none'"
    data = json.dumps(as_dict(kept)).translate(_INERT)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>What the cache kept: {escape(kept.model)}</title>\n<style>\n{style}</style>\n</head>\n"
        f'<body>\n{body}<script type="application/json" id="data">{data}</script>\n'
        f"<script>{script}</script>\n</body>\n</html>\n"
    )


def as_dict(kept: Kept) -> dict[str, Any]:
    """What the page's script reads. A mask has one bit for each token, most significant bit first, in base64."""
    return {
        "model": kept.model,
        "tokens": kept.texts,
        "layers": kept.layers,
        "heads": kept.masks.shape[1],
        "masks": [[_bits(head) for head in layer] for layer in kept.masks],
        "lengths": kept.lengths.tolist(),
        "counts": kept.counts.tolist(),
        "bytes_before": kept.bytes_before,
        "bytes_after": kept.bytes_after,
        "settings": kept.settings,
        "question": kept.question,
        "answer": None if kept.answer is None else asdict(kept.answer),
        "full_answer": None if kept.full_answer is None else asdict(kept.full_answer),
        "states": [asdict(state) for state in kept.states],
    }


def _bits(mask: np.ndarray) -> str:
    return base64.b64encode(np.packbits(mask).tobytes()).decode()
