"""The main plot of an evaluation as an SVG picture, for documents: score against bytes, a panel for each mode."""

from __future__ import annotations

import math
from html import escape

from hybridkv.evaluation.settings import FULL, ratio_text
from hybridkv.evaluation.statistics import Row, Summary, View
from hybridkv.evaluation.tables import MODE_WORDS, model_name, stands_for, widest
from hybridkv.planner import human

WIDTH, HEIGHT = 460, 340  # of a panel
LEFT, RIGHT, TOP, BOTTOM = 48, 22, 54, 46
COLOURS = ("#1f66c1", "#b8530a", "#24806f", "#7a4fb5", "#ad3a6d", "#7d6a12", "#35788f", "#6a6f76")
INK, QUIET, FAINT, PAPER = "#1d1f22", "#5d6167", "#e2e0da", "#ffffff"
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Noto Sans', sans-serif"
LEGEND = 24  # a row of names


def plot_svg(summary: Summary) -> str:
    """The picture. Where nothing is averaged it says so."""
    views = [view for view in widest(summary) if any(_drawn(row) for row in view.rows)]
    policies = [p for p in summary.settings.policies if any(r.policy == p for v in views for r in v.rows)]
    rows = _legend_rows(policies, WIDTH * max(len(views), 1))
    wide, high = WIDTH * max(len(views), 1), HEIGHT + LEGEND * len(rows)
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{wide}" height="{high}" viewBox="0 0 {wide} {high}" '
        f'font-family="{FONT}" font-size="12" role="img">',
        f"<title>{escape(model_name(summary))}: score against bytes</title>",
        f'<rect width="{wide}" height="{high}" fill="{PAPER}"/>',
    ]
    if not views:
        out.append(_text(wide / 2, HEIGHT / 2, "no task is averaged", QUIET, "middle"))
    for i, view in enumerate(views):
        out.append(f'<g transform="translate({i * WIDTH} 0)">')
        out += _panel(summary, view, policies)
        out.append("</g>")
    for i, row in enumerate(rows):
        for x, policy in row:
            y, colour = HEIGHT + LEGEND * i + 6, _colour(policies, policy)
            out.append(f'<path d="M{x} {y}h22" stroke="{colour}" stroke-width="2"/>')
            out.append(_marker(policies.index(policy), x + 11, y, colour, False))
            out.append(_text(x + 29, y + 4, policy, INK))
    return "\n".join([*out, "</svg>"]) + "\n"


def _drawn(row: Row) -> bool:
    return row.mean is not None and row.size is not None


def _legend_rows(policies: list[str], wide: int) -> list[list[tuple[int, str]]]:
    """Names with their places, in rows no wider than the picture."""
    rows: list[list[tuple[int, str]]] = []
    x = wide
    for policy in policies:
        needed = 50 + 7 * len(policy)
        if x + needed > wide - RIGHT:
            rows.append([])
            x = LEFT
        rows[-1].append((x, policy))
        x += needed
    return rows


def _panel(summary: Summary, view: View, policies: list[str]) -> list[str]:
    rows = [row for row in view.rows if _drawn(row)]
    sizes = [math.log2(_bytes(row)) for row in rows]
    pad = max(0.12, (max(sizes) - min(sizes)) * 0.06)
    low_x, high_x = min(sizes) - pad, max(sizes) + pad
    values = [value for row in rows for value in _range(row)]
    low, high = max(0, 5 * math.floor((min(values) - 2) / 5)), min(100, 5 * math.ceil((max(values) + 1) / 5))

    def x(row: Row) -> float:
        return LEFT + (math.log2(_bytes(row)) - low_x) / (high_x - low_x) * (WIDTH - LEFT - RIGHT)

    def y(value: float) -> float:
        return TOP + (high - min(max(value, low), high)) / max(high - low, 1) * (HEIGHT - TOP - BOTTOM)

    lengths = [view.length] if view.length is not None else summary.settings.lengths
    title = f"{model_name(summary)}, {MODE_WORDS[view.mode]}"
    out = [_text(LEFT, 20, title, INK, weight=600)]
    about = f"mean of {len(view.averaged)} tasks, {' and '.join(map(str, lengths))} tokens"
    auto = stands_for(summary, view.mode) if "auto" in policies else None
    out.append(_text(LEFT, 37, f"{about}; auto is {auto}" if auto else about, QUIET))
    step = next(s for s in (1, 2, 5, 10, 20, 25, 50, 100) if (high - low) / s <= 7)
    for tick in range(step * math.ceil(low / step), int(high) + 1, step):
        out.append(f'<path d="M{LEFT} {y(tick):.1f}H{WIDTH - RIGHT}" stroke="{FAINT}"/>')
        out.append(_text(LEFT - 7, y(tick) + 4, str(tick), QUIET, "end"))
    floor = HEIGHT - BOTTOM
    for size in _ticks(low_x, high_x):
        at = LEFT + (math.log2(size) - low_x) / (high_x - low_x) * (WIDTH - LEFT - RIGHT)
        out.append(f'<path d="M{at:.1f} {floor}v4" stroke="{QUIET}"/>')
        out.append(_text(at, floor + 18, human(size).replace(".0", ""), QUIET, "middle"))
    out.append(f'<path d="M{LEFT} {floor}H{WIDTH - RIGHT}" stroke="{QUIET}"/>')
    out.append(_text(WIDTH - RIGHT, floor + 36, "bytes held by a request", INK, "end"))
    base = rows[0] if rows[0].policy == FULL else None
    if base is not None:
        value = _range(base)[0]
        out.append(
            f'<path d="M{LEFT} {y(value):.1f}H{WIDTH - RIGHT}" stroke="{INK}" stroke-dasharray="5 4" opacity="0.6"/>'
        )
        out.append(_text(LEFT + 5, y(value) - 6, f"full cache {value:.1f}", INK))
    for line in _lines(rows):
        out += _line(rows, line, policies, x, y)
    for row in (r for r in rows if r.policy == FULL):
        hollow = row is not base
        out.append(_diamond(x(row), y(_range(row)[0]), INK, hollow))
    return out


def _ticks(low: float, high: float) -> list[float]:
    """Powers of two between two logarithms, and what is halfway between them where there are few; six at the most."""
    steps = (1, 1.5) if high - low < 3 else (1,)
    found = [step * 2.0**power for power in range(math.floor(low), math.ceil(high)) for step in steps]
    found = [size for size in found if low <= math.log2(size) <= high]
    return found[:: -(-len(found) // 6) or 1]


def _lines(rows: list[Row]) -> list[list[Row]]:
    """Rows of one policy and pair of dtypes, from the largest cache to the smallest."""
    found: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        if row.policy != FULL:
            found.setdefault((row.policy, row.kv_dtype, row.state_dtype), []).append(row)
    return [sorted(line, key=lambda row: -_bytes(row)) for line in found.values()]


def _line(rows: list[Row], line: list[Row], policies: list[str], x: object, y: object) -> list[str]:
    assert callable(x) and callable(y)
    first, dtypes = rows[0], (line[0].kv_dtype, line[0].state_dtype)
    second = dtypes != (first.kv_dtype, first.state_dtype)
    start = [row for row in rows if row.policy == FULL and (row.kv_dtype, row.state_dtype) == dtypes]
    colour, shape = _colour(policies, line[0].policy), policies.index(line[0].policy)
    path = "".join(f"{'ML'[i > 0]}{x(r):.1f} {y(_range(r)[0]):.1f}" for i, r in enumerate([*start, *line]))
    dashes = ' stroke-dasharray="6 4"' if second else ""
    out = [f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="2"{dashes}/>']
    for row in line:
        value, low, high = _range(row)
        if high > low:
            ends = "".join(f"M{x(row) - 4:.1f} {y(end):.1f}h8" for end in (low, high))
            bar = f"M{x(row):.1f} {y(high):.1f}V{y(low):.1f}{ends}"
            out.append(f'<path d="{bar}" fill="none" stroke="{colour}" opacity="0.6"/>')
        about = f"{row.policy} {ratio_text(row.ratio)}: {value:.1f}, {human(_bytes(row))}"
        out.append(f"<g><title>{escape(about)}</title>{_marker(shape, x(row), y(value), colour, second)}</g>")
    return out


def _bytes(row: Row) -> float:
    assert row.size is not None
    return max(row.size.bytes, 1.0)


def _range(row: Row) -> tuple[float, float, float]:
    """The score, with the interval of its difference to the full cache."""
    assert row.mean is not None
    score, difference = row.mean.score, row.mean.difference
    full = score.value - difference.value
    return score.value, full + difference.low, full + difference.high


def _colour(policies: list[str], policy: str) -> str:
    return COLOURS[policies.index(policy) % len(COLOURS)]


def _marker(shape: int, x: float, y: float, colour: str, hollow: bool) -> str:
    fill, edge = (PAPER, colour) if hollow else (colour, PAPER)
    style = f'fill="{fill}" stroke="{edge}" stroke-width="1.5"'
    if shape % 3 == 1:
        return f'<rect x="{x - 4.5:.1f}" y="{y - 4.5:.1f}" width="9" height="9" {style}/>'
    if shape % 3 == 2:
        return f'<path d="M{x:.1f} {y - 6:.1f}l5.5 10h-11z" {style}/>'
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" {style}/>'


def _diamond(x: float, y: float, colour: str, hollow: bool) -> str:
    fill, edge = (PAPER, colour) if hollow else (colour, PAPER)
    style = f'fill="{fill}" stroke="{edge}" stroke-width="1.5"'
    return f'<path d="M{x:.1f} {y - 6.5:.1f}l6.5 6.5l-6.5 6.5l-6.5 -6.5z" {style}/>'


def _text(x: float, y: float, text: str, colour: str, anchor: str = "start", weight: int = 400) -> str:
    strong = f' font-weight="{weight}"' if weight != 400 else ""
    apart = f'stroke="{PAPER}" stroke-width="4" paint-order="stroke"'  # from lines behind it
    return f'<text x="{x:.1f}" y="{y:.1f}" fill="{colour}" {apart} text-anchor="{anchor}"{strong}>{escape(text)}</text>'
