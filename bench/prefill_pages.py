"""Pages in use while a prompt of 32768 tokens is read at a budget of 2048: evicting at the end, and between chunks.

Runs the cache manager itself, with the streams of Qwen3.5-27B and entries of one number each, and draws what its
allocator says as an SVG, in bytes of that model's bf16 pages. Ends with one JSON line.

    python bench/prefill_pages.py docs/prefill_pages.svg
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from hybridkv.cache import CacheSchema, KVCacheManager, TensorSpec
from hybridkv.config import CacheConfig
from hybridkv.models import cache_schema
from hybridkv.models.config import ModelConfig
from hybridkv.models.known import KNOWN

PROMPT, BUDGET, CHUNK = 32768, 2048, 1024
Points = list[tuple[int, int]]  # (tokens read, pages in use)


def streams() -> tuple[CacheSchema, int]:
    """The model's streams with small entries, and what a page of the real ones takes."""
    config = ModelConfig.from_dict(KNOWN["Qwen3.5-27B"])
    [real] = cache_schema(config, CacheConfig(kv_dtype="bf16"), torch.bfloat16).streams
    small = tuple(TensorSpec(name, (1,), torch.float32) for name in ("k", "v"))
    return CacheSchema(streams=(replace(real, tensors=small),)), real.page_bytes


def read(schema: CacheSchema, bounded: bool) -> Points:
    [table] = schema.streams
    manager = KVCacheManager(schema, schema.pool_pages(1, PROMPT), 1, PROMPT)
    manager.admit_request("prompt")
    points = [(0, 0)]
    for position in range(CHUNK, PROMPT + 1, CHUNK):
        manager.prepare_forward([("prompt", CHUNK)])
        manager.commit([("prompt", CHUNK)])
        points.append((position, sum(manager.held_pages("prompt").values())))
        length = int(manager.lengths("prompt")[table.name].max())
        if length > BUDGET and (bounded or position == PROMPT):
            keep = np.sort(np.random.default_rng(position).choice(length, BUDGET, replace=False))
            manager.compact_request("prompt", {layer: [keep] * table.heads for layer in table.layers})
            points.append((position, sum(manager.held_pages("prompt").values())))
    manager.check_integrity()
    return points


STYLE = """
  text { font: 13px system-ui, sans-serif; fill: #55595f }
  .title { font-size: 15px; font-weight: 600; fill: #1d1f22 }
  .grid { stroke: #d9d7d1; stroke-width: 1 }
  .line { fill: none; stroke-width: 2; stroke-linejoin: round }
  .all { stroke: #c2560c } .bounded { stroke: #1f66c1 }
  .all-text { fill: #a8470a } .bounded-text { fill: #1f66c1 }
  @media (prefers-color-scheme: dark) {
    text { fill: #a9adb3 } .title { fill: #e9e8e5 } .grid { stroke: #3a3d42 }
    .all { stroke: #ffa469 } .bounded { stroke: #6aa9ff } .all-text { fill: #ffa469 } .bounded-text { fill: #6aa9ff }
  }
"""


def draw(lines: dict[str, Points], page_bytes: int) -> str:
    left, top, width, height = 84, 46, 640, 260
    most = 2048.0  # MiB

    def x(tokens: float) -> float:
        return left + width * tokens / PROMPT

    def y(mib: float) -> float:
        return top + height * (1 - mib / most)

    parts = [f'<text class="title" x="{left}" y="22">KV pages in use while 32768 tokens are read, budget 2048</text>']
    for mib in range(0, 2049, 512):
        parts.append(f'<line class="grid" x1="{left}" x2="{left + width}" y1="{y(mib):.1f}" y2="{y(mib):.1f}"/>')
        label = f"{mib} MiB" if mib else "0"
        parts.append(f'<text x="{left - 8}" y="{y(mib) + 4:.1f}" text-anchor="end">{label}</text>')
    for tokens in range(0, PROMPT + 1, 8192):
        parts.append(f'<text x="{x(tokens):.1f}" y="{top + height + 20}" text-anchor="middle">{tokens}</text>')
    middle = f'x="{left + width / 2}" y="{top + height + 40}" text-anchor="middle"'
    parts.append(f"<text {middle}>tokens read (Qwen3.5-27B, bf16, chunks of {CHUNK})</text>")
    for name, points in lines.items():
        at = " ".join(f"{x(t):.1f},{y(pages * page_bytes / 2**20):.1f}" for t, pages in points)
        parts.append(f'<polyline class="line {name}" points="{at}"/>')
    parts.append(
        f'<text class="all-text" x="{x(17400):.1f}" y="{y(1270):.1f}" text-anchor="end">evicting at the end</text>'
    )
    parts.append(
        f'<text class="bounded-text" x="{x(20500):.1f}" y="{y(260):.1f}">evicting between chunks (bounded)</text>'
    )
    body = "\n".join(parts)
    size = f'viewBox="0 0 {left + width + 40} {top + height + 54}" width="{left + width + 40}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">\n<style>{STYLE}</style>\n{body}\n</svg>\n'


def main() -> None:
    schema, page_bytes = streams()
    lines = {"all": read(schema, False), "bounded": read(schema, True)}
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(draw(lines, page_bytes), encoding="utf-8")
    [table] = schema.streams
    found = {name: {"peak_pages_a_stream": max(p for _, p in points) // table.streams,
                    "peak_mib": max(p for _, p in points) * page_bytes / 2**20,
                    "end_mib": points[-1][1] * page_bytes / 2**20} for name, points in lines.items()}  # fmt: skip
    for name, numbers in found.items():
        print(f"{name:8} " + "  ".join(f"{key} {value:g}" for key, value in numbers.items()))
    print(json.dumps({"bench": "prefill_pages", "prompt": PROMPT, "budget": BUDGET, "chunk": CHUNK, **found}))


if __name__ == "__main__":
    main()
