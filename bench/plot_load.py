"""Draws what `hybridkv bench load ... --json FILE` measured, from its JSON lines. Needs nothing but hybridkv.

    python bench/plot_load.py results.jsonl [more.jsonl] --out docs

Writes load_rate.svg (throughput against arrivals, and below it time to first token and time between tokens) and
load_batch.svg (a step's cost against its batch, with the floor drawn in), as far as the files have rows for them.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterable
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

from hybridkv.evaluation.plot import COLOURS, FAINT, FONT, INK, PAPER, QUIET

WIDTH, HEIGHT = 640, 300  # of a panel
LEFT, RIGHT, TOP, BOTTOM = 64, 150, 44, 50
Point = tuple[float, float]


class Line(NamedTuple):
    name: str
    points: list[Point]
    colour: str
    dashed: bool = False


class Panel(NamedTuple):
    title: str
    x: str
    y: str
    lines: list[Line]
    log_x: bool = False
    log_y: bool = False


def rows(results: Iterable[dict[str, Any]], op: str) -> list[dict[str, Any]]:
    """Of several runs the last one counts."""
    found = {(r["op"], r["case"]): r for result in results for r in result["rows"] if r["op"] == op}
    return list(found.values())


def points(some: list[dict[str, Any]], x: str, y: str) -> list[Point]:
    return sorted((r[x], r[y]) for r in some if r.get(x) is not None and r.get(y) is not None)


def ticks(low: float, high: float, log: bool) -> list[float]:
    """Round numbers between both, at most eight."""
    if log:
        found = [
            m * 10.0**e for e in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1) for m in (1, 2, 5)
        ]
        found = [t for t in found if low <= t <= high]
        return found[:: -(-len(found) // 8) or 1]
    step = 10.0 ** math.floor(math.log10(max(high - low, 1e-9)))
    step = next(s for s in (step / 5, step / 2, step, 2 * step) if (high - low) / s <= 7)
    return [step * i for i in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def text(x: float, y: float, words: str, colour: str = QUIET, anchor: str = "start", strong: bool = False) -> str:
    weight = ' font-weight="600"' if strong else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" fill="{colour}" text-anchor="{anchor}"{weight}>{escape(words)}</text>'


def draw_panel(panel: Panel) -> list[str]:
    lines = [line for line in panel.lines if line.points]
    if panel.log_y:
        lines = [line._replace(points=[p for p in line.points if p[1] > 0]) for line in lines]
        lines = [line for line in lines if line.points]
    if not lines:
        return [text(LEFT, 22, f"{panel.title}: nothing to draw", INK, strong=True)]
    xs, ys = ([p[i] for line in lines for p in line.points] for i in (0, 1))
    low_x, high_x = (min(xs), max(xs)) if panel.log_x else (0.0, max(xs))
    low_y, high_y = (min(ys) / 1.3, max(ys) * 1.3) if panel.log_y else (0.0, max(ys) * 1.1)
    if panel.log_x and low_x == high_x:
        low_x, high_x = low_x / 2, high_x * 2

    def place(value: float, low: float, high: float, log: bool) -> float:
        if log:
            value, low, high = math.log(value), math.log(low), math.log(high)
        return (value - low) / ((high - low) or 1.0)

    def x(value: float) -> float:
        return LEFT + place(value, low_x, high_x, panel.log_x) * (WIDTH - LEFT - RIGHT)

    def y(value: float) -> float:
        return HEIGHT - BOTTOM - place(value, low_y, high_y, panel.log_y) * (HEIGHT - TOP - BOTTOM)

    out = [text(LEFT, 22, panel.title, INK, strong=True)]
    for tick in ticks(low_y, high_y, panel.log_y):
        out.append(f'<path d="M{LEFT} {y(tick):.1f}H{WIDTH - RIGHT}" stroke="{FAINT}"/>')
        out.append(text(LEFT - 7, y(tick) + 4, f"{tick:g}", anchor="end"))
    floor = HEIGHT - BOTTOM
    for tick in sorted(set(xs)) if panel.log_x else ticks(low_x, high_x, False):
        out.append(f'<path d="M{x(tick):.1f} {floor}v4" stroke="{QUIET}"/>')
        out.append(text(x(tick), floor + 18, f"{tick:g}", anchor="middle"))
    out.append(f'<path d="M{LEFT} {floor}H{WIDTH - RIGHT}" stroke="{QUIET}"/>')
    out.append(text(WIDTH - RIGHT, floor + 36, panel.x, INK, "end"))
    out.append(text(LEFT, TOP - 6, panel.y, INK))
    taken = math.inf
    for line in sorted(lines, key=lambda line: line.points[-1][1]):  # a name stands at its line's end, none on another
        path = "".join(f"{'ML'[i > 0]}{x(a):.1f} {y(b):.1f}" for i, (a, b) in enumerate(line.points))
        dashes = ' stroke-dasharray="6 4"' if line.dashed else ""
        out.append(f'<path d="{path}" fill="none" stroke="{line.colour}" stroke-width="2"{dashes}/>')
        if not line.dashed:
            out += [f'<circle cx="{x(a):.1f}" cy="{y(b):.1f}" r="3.5" fill="{line.colour}"/>' for a, b in line.points]
        end, at = line.points[-1]
        taken = min(y(at), taken - 15)
        out.append(text(x(end) + 9, taken + 4, line.name, line.colour))
    return out


def draw(path: Path, panels: list[Panel]) -> None:
    """One panel below the other; those without a line are left out, and a picture without panels is not written."""
    panels = [panel for panel in panels if any(line.points for line in panel.lines)]
    if not panels:
        return
    high = HEIGHT * len(panels)
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{high}" viewBox="0 0 {WIDTH} {high}" '
        f'font-family="{FONT}" font-size="12" role="img">',
        f"<title>{escape(panels[0].title)}</title>",
        f'<rect width="{WIDTH}" height="{high}" fill="{PAPER}"/>',
    ]
    for i, panel in enumerate(panels):
        out += [f'<g transform="translate(0 {i * HEIGHT})">', *draw_panel(panel), "</g>"]
    path.write_text("\n".join([*out, "</svg>"]) + "\n", encoding="utf-8")
    print(path)


def rate_panels(where: str, results: list[dict[str, Any]]) -> list[Panel]:
    some, (first, second, third, fourth) = rows(results, "online"), COLOURS[:4]
    given = [
        Line("output", points(some, "rate", "tok_s"), first),
        Line("within limits", points(some, "rate", "good_tok_s"), third),
    ]
    waits = [
        Line("first token, p99", points(some, "rate", "ttft_p99_ms"), second),
        Line("first token, p50", points(some, "rate", "ttft_ms"), second, True),
        Line("between tokens, p99", points(some, "rate", "p99_ms"), fourth),
        Line("between tokens, p50", points(some, "rate", "ms"), fourth, True),
    ]
    return [
        Panel(f"{where}: requests as they arrive", "requests that arrive a second", "tokens a second", given),
        Panel("how long they wait", "requests that arrive a second", "milliseconds", waits, log_y=True),
    ]


def batch_panels(where: str, results: list[dict[str, Any]]) -> list[Panel]:
    pure, mixed = rows(results, "decode by batch"), rows(results, "mixed step")
    chunk = f" + chunk of {mixed[0]['chunk_tokens']}" if mixed else ""
    lines = [
        Line("decode", points(pure, "batch", "ms"), COLOURS[0]),
        Line("its floor", points(pure, "batch", "floor_ms"), COLOURS[0], True),
        Line(f"decode{chunk}", points(mixed, "batch", "ms"), COLOURS[1]),
        Line(
            "sum of both alone", sorted((r["batch"], r["decode_ms"] + r["chunk_ms"]) for r in mixed), COLOURS[1], True
        ),
    ]
    return [Panel(f"{where}: a step, by its batch", "requests that decode", "milliseconds", lines, log_x=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, default=Path("docs"))
    given = parser.parse_args()
    try:
        found = [json.loads(line) for path in given.files for line in path.read_text().splitlines() if line[:1] == "{"]
    except (OSError, ValueError) as problem:
        raise SystemExit(f"{problem}; give files that `hybridkv bench load --json` has written") from None
    results = [r for each in found for r in each.get("results", [each]) if r["bench"] == "load"]
    if not results:
        raise SystemExit("no results of `hybridkv bench load` in these files")
    where = f"{results[-1]['model']}, {results[-1]['device'].removeprefix('NVIDIA ')}"
    draw(given.out / "load_rate.svg", rate_panels(where, results))
    draw(given.out / "load_batch.svg", batch_panels(where, results))


if __name__ == "__main__":
    main()
