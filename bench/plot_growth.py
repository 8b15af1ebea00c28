"""Draws how cost grows, from JSON lines that `hybridkv bench ... --json FILE` wrote, with the floor drawn in.

    python bench/plot_growth.py results.jsonl [more.jsonl] --out docs

Writes growth_decode_context.svg, growth_decode_batch.svg, growth_prefill.svg and growth_eviction.svg, as far as the
files have rows for them. Needs matplotlib (pip install 'hybridkv[plot]').
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
from matplotlib.ticker import LogLocator

# told apart also without colour: by marker and by the label at the line's end
STYLES = {
    "bf16": ("#1f66c1", "o"), "f32": ("#1f66c1", "o"), "fp8": ("#c2560c", "s"), "with a budget": ("#3c8a4e", "^"),
    "transformers": ("#8a5fb0", "D"),
}  # fmt: skip
INK, FAINT, DASHES = "#1d1f22", "#d9d7d1", (0, (4, 3))
NAMES = {"bf16": "bf16 KV", "f32": "f32 KV", "fp8": "fp8 KV"}
Point = tuple[float, float]


def rows(results: Iterable[dict[str, Any]], bench: str, op: str) -> list[dict[str, Any]]:
    """Of several runs the last one counts."""
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for result in results:
        if result["bench"] == bench:
            found |= {(r["op"], r["case"]): r for r in result["rows"] if r["op"].startswith(op)}
    return list(found.values())


def line(some: list[dict[str, Any]], x: str, y: str) -> list[Point]:
    return sorted((r[x], r[y]) for r in some if r.get(x) is not None and r.get(y) is not None)


def tokens(n: float) -> str:
    return f"{n / 1024:.0f}K" if n >= 1024 else f"{n:.0f}"


def draw(
    path: Path, title: str, labels: tuple[str, str], lines: dict[str, list[Point]], floors: dict[str, list[Point]],
    xname: Callable[[float], str], logy: bool = False,
) -> None:  # fmt: skip
    lines = {name: points for name, points in lines.items() if points}
    if not lines:
        return
    plt.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "hybridkv", "font.size": 11})
    figure, axes = plt.subplots(figsize=(7.2, 4.2))
    for name, points in floors.items():
        if points:
            axes.plot(*zip(*points), color=STYLES[name][0], linewidth=1.3, linestyle=DASHES)
    for name, points in lines.items():
        colour, marker = STYLES[name]
        axes.plot(*zip(*points), color=colour, marker=marker, markersize=5.5, linewidth=2)
    places = sorted({x for points in lines.values() for x, _ in points})
    axes.set_xscale("log", base=2)
    axes.set_xticks(places, [xname(x) for x in places])
    values = [y for points in (*lines.values(), *floors.values()) for _, y in points]
    if logy:
        axes.set_yscale("log")
        axes.set_ylim(min(values) / 1.6, max(values) * 2.2)
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    else:
        axes.set_ylim(0, max(values) * 1.18)
    axes.minorticks_off()
    _name_ends(axes, lines)
    axes.set_title(title, loc="left", color=INK, fontsize=12, fontweight="bold")
    axes.set_xlabel(labels[0])
    axes.set_ylabel(labels[1])
    axes.grid(axis="y", color=FAINT, linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.plot([], [], color=INK, linewidth=2, marker=".", label="measured")
    if any(floors.values()):
        axes.plot([], [], color=INK, linewidth=1.3, linestyle=DASHES, label="floor, same colour")
    axes.legend(loc="upper left", ncols=2, handlelength=2.6, borderpad=0.2, edgecolor="none", framealpha=1)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
    print(path)


def _name_ends(axes: Any, lines: dict[str, list[Point]]) -> None:
    """A line's name stands at its end; names that would meet are moved apart."""
    ends = sorted(((points[-1], name) for name, points in lines.items()), key=lambda e: e[0][1])
    shift = 0.0
    low = None
    for (x, y), name in ends:
        at = axes.transData.transform((x, y))[1]
        shift = max(0.0, (low + 14 - at)) if low is not None else 0.0
        low = at + shift
        axes.annotate(
            NAMES.get(name, name), (x, y), xytext=(8, shift * 0.72), textcoords="offset points",
            color=STYLES[name][0], va="center",
        )  # fmt: skip


def by_kind(some: list[dict[str, Any]], x: str, y: str) -> dict[str, list[Point]]:
    kinds = sorted({r["kv_dtype"] for r in some if r.get("kv_dtype") in STYLES})
    return {kind: line([r for r in some if r["kv_dtype"] == kind], x, y) for kind in kinds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, default=Path("docs"))
    given = parser.parse_args()
    found = [json.loads(text) for path in given.files for text in path.read_text().splitlines() if text[:1] == "{"]
    results = [r for each in found for r in each.get("results", [each])]
    first = next((r for r in results if "model" in r), {"model": "", "device": ""})
    where, out = f"{first['model']}, {first['device'].removeprefix('NVIDIA ')}", given.out
    some = rows(results, "decode", "decode by context")
    draw(out / "growth_decode_context.svg", f"{where}: a decode step of one request",
         ("tokens of context", "milliseconds a token"), by_kind(some, "context", "ms"),
         by_kind(some, "context", "floor_ms"), tokens)  # fmt: skip
    some = rows(results, "decode", "decode by batch")
    length = tokens(some[0]["context"]) if some else ""
    draw(out / "growth_decode_batch.svg", f"{where}: a decode step, {length} of context each",
         ("requests in the step", "milliseconds a step"), by_kind(some, "batch", "ms"),
         by_kind(some, "batch", "floor_ms"), lambda n: f"{n:.0f}")  # fmt: skip
    every = [r for r in rows(results, "prefill", "prefill") if "exact" not in r]  # those are of few layers
    full = [r for r in every if r["op"] == "prefill" and r.get("budget") is None and " chunk " not in r["case"]]
    lines = by_kind(full, "tokens", "s")
    lines["transformers"] = line([r for r in every if r["op"] == "prefill transformers"], "tokens", "s")
    floors = dict(list(by_kind(full, "tokens", "floor_s").items())[:1])  # the same products whatever is stored
    draw(out / "growth_prefill.svg", f"{where}: reading a prompt", ("tokens of prompt", "seconds to the first token"),
         lines, floors, tokens, True)  # fmt: skip
    # by default; older results have one policy and do not name it
    some = [row for row in rows(results, "eviction", "evict") if row.get("policy", "auto") == "auto"]
    kept = next((f"{r['budget']} tokens" for r in results if r["bench"] == "eviction"), "")
    draw(out / "growth_eviction.svg", f"{where}: cutting a prompt to {kept}, all layers",
         ("tokens of prompt", "milliseconds"), by_kind(some, "tokens", "ms"), by_kind(some, "tokens", "floor_ms"),
         tokens, True)  # fmt: skip


if __name__ == "__main__":
    main()
