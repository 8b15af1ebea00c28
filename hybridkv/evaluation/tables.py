"""Tables: a summary of an evaluation on the terminal and as CSV. The same results give the same bytes."""

from __future__ import annotations

import csv
import io
import textwrap
from collections.abc import Iterator
from typing import TYPE_CHECKING

from hybridkv.evaluation.settings import FULL, LEAST_SCORE, MODES, policy_name, ratio_text
from hybridkv.evaluation.statistics import Estimate, Row, Score, Size, Summary, View
from hybridkv.planner import human

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

MODE_WORDS = dict(zip(MODES, ("question seen", "question not seen"), strict=True))
# as tables of papers call them; other names are written out
SHORT = {
    "niah_single_1": "S1", "niah_single_2": "S2", "niah_single_3": "S3",
    "niah_multikey_1": "MK1", "niah_multikey_2": "MK2", "niah_multikey_3": "MK3",
    "niah_multivalue": "MV", "niah_multiquery": "MQ", "vt": "VT", "cwe": "CWE", "fwe": "FWE",
    "paraphrase": "para", "two_questions": "two q", "instruction": "instr", "phone_book": "phone",
    "tool_chain": "tools",
}  # fmt: skip
COLUMNS = (
    "mode", "length", "policy", "ratio", "kv_dtype", "state_dtype", "task", "averaged", "samples", "score", "score_low",
    "score_high", "difference", "difference_low", "difference_high", "tokens", "kept", "kv_bytes", "state_bytes",
    "table_bytes", "bytes", "peak_bytes", "times_smaller", "answer_tokens", "kl", "kl_999", "top1",
)  # fmt: skip


def show(console: Console, summary: Summary) -> None:
    """Print two tables for each mode, over all lengths: the means, and each task."""
    for view in widest(summary):
        console.print(title(summary, view), style="bold", markup=False, soft_wrap=True)
        _print(console, table(view))
        console.print(textwrap.fill(beneath(summary, view), console.width), markup=False)
        console.print()
        if any(row.tasks for row in view.rows):
            _print(console, task_table(summary, view))
            console.print()


def widest(summary: Summary) -> list[View]:
    """For each mode the view of all lengths."""
    return list({view.mode: view for view in reversed(summary.views)}.values())[::-1]


def _print(console: Console, shown: Table) -> None:
    """With whole numbers, wider than the window where it must be."""
    from rich.measure import Measurement

    window, natural = console.width, Measurement.get(console, console.options.update(width=1000), shown).maximum
    console.width = max(window, natural)
    with console.capture() as captured:
        console.print(shown)
    console.width = window
    for line in captured.get().splitlines():
        console.out(line.rstrip(), highlight=False)


def model_name(summary: Summary) -> str:
    """As the run calls it."""
    return str(summary.run.get("model_name") or summary.settings.model or "the embedded model")


def title(summary: Summary, view: View) -> str:
    """`SmolLM2, question seen, 2048 tokens, 100 texts a task`, and how far a run has come that is not finished."""
    lengths = [view.length] if view.length is not None else summary.settings.lengths
    texts, units = summary.settings.samples, summary.run.get("units", summary.units)
    said = f"{model_name(summary)}, {MODE_WORDS[view.mode]}, {' and '.join(map(str, lengths))} tokens"
    said += f", {texts} text{'' if texts == 1 else 's'} a task"
    return said if summary.units >= units else f"{said} (unfinished: {summary.units} of {units} units)"


def varying(view: View) -> tuple[bool, bool]:
    """Whether rows differ in the dtype of the KV cache, and in that of the state."""
    return len({r.kv_dtype for r in view.rows}) > 1, len({r.state_dtype for r in view.rows}) > 1


def table(view: View) -> Table:
    """A row for each policy, ratio and dtype: bytes, the mean over tasks, and its difference to the full cache."""
    out = _table()
    kv, state = varying(view)
    sizes = [row.size for row in view.rows if row.size]
    holds_state = any(size.state_bytes for size in sizes)
    diverges = any(row.divergence for row in view.rows)
    columns = [("policy", "left"), ("ratio", "right")] + [("KV", "left")] * kv + [("state", "left")] * state
    columns += [("KV bytes", "right")] + [("state", "right")] * holds_state
    columns += [(name, "right") for name in ("peak", "smaller", "mean", "to full", "95 % interval")]
    columns += [(name, "right") for name in ("KL", "KL 99.9 %", "top-1 %")] * diverges
    for name, side in columns:
        out.add_column(name, justify=side, no_wrap=True)  # type: ignore[arg-type]
    last = view.rows[0].policy if view.rows else ""
    for row in view.rows:
        if row.policy != last:
            out.add_section()
            last = row.policy
        cells = [row.policy, ratio_text(row.ratio)] + [row.kv_dtype] * kv + [row.state_dtype] * state
        cells += [_size(row.size, "kv_bytes")] + [_size(row.size, "state_bytes")] * holds_state
        cells += [_size(row.size, "peak_bytes"), "-" if row.times_smaller is None else f"{row.times_smaller:.1f}x"]
        cells += _score(row, view)
        if diverges:
            d = row.divergence
            cells += ["-"] * 3 if d is None else [f"{d.kl:.4f}", f"{d.kl_999:.3f}", f"{d.top1:.1f}"]
        out.add_row(*cells)
    return out


def _score(row: Row, view: View) -> list[str]:
    if row.mean is None:
        return ["-", "-", "-"]
    value = f"{row.mean.score.value:.1f}"
    if row is view.rows[0] and row.policy == FULL:  # the one that all are compared with
        return [value, "", ""]
    return [value, signed(row.mean.difference.value), interval(row.mean.difference)]


def signed(value: float) -> str:
    """`-2.0`, `+0.5`; what rounds to nothing is `0.0`."""
    return "0.0" if round(value, 1) == 0 else f"{value:+.1f}"


def interval(estimate: Estimate) -> str:
    """`-2.0 to +0.5`."""
    return f"{signed(estimate.low)} to {signed(estimate.high)}"


def stands_for(summary: Summary, mode: str) -> str | None:
    """The policy that `auto` was in a mode."""
    return summary.run.get("auto", {}).get(mode)


def beneath(summary: Summary, view: View) -> str:
    """What the mean is of, and what is left out of it."""
    said = f"Mean of {', '.join(view.averaged)}." if view.averaged else "No task is averaged."
    if view.shown_only:
        left = ", ".join(f"{task} {score:.1f}" for task, score in view.shown_only.items())
        said += f" Not averaged, since the full cache does badly (less than {LEAST_SCORE:g}): {left}."
    auto = stands_for(summary, view.mode)
    if auto and any(policy_name(row.policy) == "auto" for row in view.rows):
        said += f" auto is {auto} here."
    return said


def task_table(summary: Summary, view: View) -> Table:
    """The same rows with a column for each task."""
    out = _table()
    kv, state = varying(view)
    tasks = [task for task in summary.settings.tasks if any(task in row.tasks for row in view.rows)]
    for name in ("policy", "ratio", *["KV"] * kv, *["state"] * state):
        out.add_column(name, justify="right" if name == "ratio" else "left", no_wrap=True)
    for task in tasks:
        out.add_column(SHORT.get(task, task), justify="right", no_wrap=True)
    last = view.rows[0].policy if view.rows else ""
    for row in view.rows:
        if row.policy != last:
            out.add_section()
            last = row.policy
        scores = [f"{row.tasks[task].score.value:.1f}" if task in row.tasks else "-" for task in tasks]
        out.add_row(row.policy, ratio_text(row.ratio), *[row.kv_dtype] * kv, *[row.state_dtype] * state, *scores)
    return out


def _table() -> Table:
    from rich import box
    from rich.table import Table

    return Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)


def _size(size: Size | None, name: str) -> str:
    return "-" if size is None else human(getattr(size, name))


# ---- CSV


def as_csv(summary: Summary) -> str:
    """A line for every mode, length, policy, ratio, dtype and task; the task `mean` is the mean of those averaged."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(COLUMNS)
    for view in summary.views:
        for row in view.rows:
            for task, score in _scores(summary, row):
                line = _csv_line(view, row, task, score)
                writer.writerow([line.get(name, "") for name in COLUMNS])
    return out.getvalue()


def _scores(summary: Summary, row: Row) -> Iterator[tuple[str, Score | None]]:
    yield "mean", row.mean
    yield from ((task, row.tasks[task]) for task in summary.settings.tasks if task in row.tasks)


def _csv_line(view: View, row: Row, task: str, score: Score | None) -> dict[str, object]:
    found: dict[str, object] = {
        "mode": view.mode,
        "length": "all" if view.length is None else view.length,
        "policy": row.policy,
        "ratio": f"{row.ratio:g}",
        "kv_dtype": row.kv_dtype,
        "state_dtype": row.state_dtype,
        "task": task,
    }
    if score is not None:
        found |= (
            {"samples": score.samples} | _estimate("score", score.score) | _estimate("difference", score.difference)
        )
    if task != "mean":
        return found | {"averaged": "yes" if task in view.averaged else "no"}
    if row.size is not None:
        names = ("tokens", "kept", "kv_bytes", "state_bytes", "table_bytes", "bytes", "peak_bytes")
        found |= {name: f"{getattr(row.size, name):.10g}" for name in names}
    if row.times_smaller is not None:
        found |= {"times_smaller": f"{row.times_smaller:.4g}"}
    if row.answer_tokens is not None:
        found |= {"answer_tokens": f"{row.answer_tokens:.4g}"}
    if row.divergence is not None:
        found |= {name: f"{getattr(row.divergence, name):.6g}" for name in ("kl", "kl_999", "top1")}
    return found


def _estimate(name: str, estimate: Estimate) -> dict[str, str]:
    values = {"": estimate.value, "_low": estimate.low, "_high": estimate.high}
    return {name + end: f"{value:.2f}" for end, value in values.items()}
