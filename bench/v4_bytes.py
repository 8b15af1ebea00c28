"""Where the cache bytes of one DeepSeek-V4 request go, by what and by format; drawn as an SVG. Ends with one JSON line.

    python bench/v4_bytes.py docs/deepseek_v4_bytes.svg

All from the schema that the model runs with; nothing is allocated.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from hybridkv.config import CacheConfig
from hybridkv.models import cache_schema
from hybridkv.models.config import ModelConfig
from hybridkv.models.known import KNOWN

TOKENS = 1 << 20
GIB = 1 << 30
MODELS = ("DeepSeek-V4-Flash", "DeepSeek-V4-Pro")
FORMATS = (("bf16", "auto"), ("fp8", "fp8"), ("fp8", "auto"))  # kv_dtype, index_dtype
PARTS = {"csa": "CSA entries", "index": "index keys", "hca": "HCA entries", "state": "windows and compressors"}


def parts(model: str, kv: str, index: str) -> dict[str, int]:
    """Bytes of each part of one request of TOKENS tokens."""
    config = ModelConfig.from_dict(KNOWN[model])
    schema = cache_schema(config, CacheConfig(kv_dtype=kv, index_dtype=index), torch.bfloat16)
    found = {"state": schema.slot_bytes}
    for stream in schema.streams:
        sizes = {t.name: t.nbytes * stream.entries(TOKENS) * stream.lanes for t in stream.tensors}
        found[stream.name] = sizes["entries"]
        if "index" in sizes:
            found["index"] = sizes["index"]
    assert sum(found.values()) == schema.kv_bytes(TOKENS) + schema.slot_bytes
    return found


STYLE = """
  text { font: 13px system-ui, sans-serif; fill: #55595f }
  .title { font-size: 15px; font-weight: 600; fill: #1d1f22 }
  .csa { fill: #1f66c1 } .index { fill: #c2560c } .hca { fill: #3c8a4e } .state { fill: #8a5fb0 }
  @media (prefers-color-scheme: dark) {
    text { fill: #a9adb3 } .title { fill: #e9e8e5 }
    .csa { fill: #6aa9ff } .index { fill: #ffa469 } .hca { fill: #7cc98d } .state { fill: #c3a0e6 }
  }
"""


def draw(rows: list[tuple[str, str, dict[str, int]]]) -> str:
    left, top, width, bar = 210, 74, 500, 22
    most = max(sum(found.values()) for *_, found in rows)
    out = ['<text class="title" x="16" y="24">Cache of one DeepSeek-V4 request of 1,048,576 tokens</text>']
    at = 16
    for name, label in PARTS.items():
        out.append(
            f'<rect class="{name}" x="{at}" y="38" width="12" height="12"/><text x="{at + 18}" y="49">{label}</text>'
        )
        at += 40 + 7 * len(label)
    y = top
    for i, (model, label, found) in enumerate(rows):
        if i % len(FORMATS) == 0:
            out.append(f'<text class="title" x="16" y="{y + 14}">{model}</text>')
            y += 24
        out.append(f'<text x="{left - 10}" y="{y + 16}" text-anchor="end">{label}</text>')
        x = float(left)
        for name in PARTS:
            size = width * found[name] / most
            out.append(f'<rect class="{name}" x="{x:.1f}" y="{y}" width="{max(size, 1):.1f}" height="{bar}"/>')
            x += max(size, 1)
        out.append(f'<text x="{x + 8:.1f}" y="{y + 16}">{sum(found.values()) / GIB:.2f} GiB</text>')
        y += bar + 8 + (14 if i % len(FORMATS) == len(FORMATS) - 1 else 0)
    size = f'viewBox="0 0 {left + width + 90} {y}" width="{left + width + 90}"'
    body = "\n".join(out)
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">\n<style>{STYLE}</style>\n{body}\n</svg>\n'


def main() -> None:
    rows = []
    for model in MODELS:
        for kv, index in FORMATS:
            label = f"{kv}, keys {'mxfp4' if (kv, index) == ('fp8', 'auto') else index if index != 'auto' else kv}"
            rows.append((model, label, parts(model, kv, index)))
    for model, label, found in rows:
        sizes = "  ".join(f"{PARTS[name]} {found[name] / GIB:.3f}" for name in PARTS)
        print(f"{model:18} {label:16} {sum(found.values()) / GIB:7.3f} GiB   {sizes}")
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(draw(rows), encoding="utf-8")
    print(json.dumps({"bench": "v4_bytes", "tokens": TOKENS, "rows": [(m, f, p) for m, f, p in rows]}))


if __name__ == "__main__":
    main()
