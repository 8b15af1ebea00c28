"""The page of an evaluation: one self-contained HTML file with plots, that loads nothing from anywhere.

Answers of a model may be hostile. They reach the page as JSON in which no character can end the element that holds it,
the script puts them into text nodes alone, and the page's own policy lets no other script run.
"""

from __future__ import annotations

import base64
import hashlib
import json
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from hybridkv.errors import HybridKVError
from hybridkv.evaluation.plot import plot_svg
from hybridkv.evaluation.results import Record
from hybridkv.evaluation.settings import FULL, LEAST_SCORE
from hybridkv.evaluation.statistics import Estimate, Row, Score, Summary, View
from hybridkv.evaluation.tables import SHORT, as_csv, model_name, stands_for

CHANGED = 2  # texts shown of each task, length and mode, whose answers changed
MOST_SHOWN = 200  # characters of an answer
_INERT = str.maketrans({"<": "\\u003c", ">": "\\u003e", "&": "\\u0026"})


def write_files(folder: Path, summary: Summary, records: list[Record]) -> None:
    """summary.csv, index.html and plot.svg."""
    texts = {"summary.csv": as_csv(summary), "index.html": page(summary, records), "plot.svg": plot_svg(summary)}
    for name, text in texts.items():
        try:
            (folder / name).write_text(text, encoding="utf-8")
        except OSError as error:
            raise HybridKVError(f"{str(folder / name)!r} cannot be written: {error.strerror}") from None


def page(summary: Summary, records: list[Record]) -> str:
    """The page as HTML."""
    style, script, body = (
        files("hybridkv").joinpath("data", f"eval.{kind}").read_text(encoding="utf-8") for kind in ("css", "js", "html")
    )
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; base-uri 'none'"
    data = json.dumps(export(summary, records)).translate(_INERT)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>What a smaller cache costs in answers: {escape(model_name(summary))}</title>\n"
        f"<style>\n{style}</style>\n</head>\n"
        f'<body>\n{body}<script type="application/json" id="data">{data}</script>\n'
        f"<script>{script}</script>\n</body>\n</html>\n"
    )


def export(summary: Summary, records: list[Record]) -> dict[str, Any]:
    """What the page's script reads."""
    settings, rows = summary.settings, [row for view in summary.views for row in view.rows]

    def in_order(asked: tuple[str, ...], found: set[str]) -> list[str]:
        return [name for name in asked if name in found] + sorted(found - set(asked))

    return {
        "lead": lead(summary, records),
        "full": FULL,
        "least": LEAST_SCORE,
        "modes": in_order(settings.modes, {view.mode for view in summary.views}),
        "tasks": in_order(settings.tasks, {task for row in rows for task in row.tasks}),
        "short": SHORT,
        "auto": {mode: stands_for(summary, mode) for mode in settings.modes},
        "policies": in_order(settings.policies, {row.policy for row in rows} - {FULL}),
        "kv": in_order(settings.kv_dtypes, {row.kv_dtype for row in rows}),
        "state": in_order(settings.state_dtypes, {row.state_dtype for row in rows}),
        "views": [_view(view) for view in summary.views],
        "changed": changed(summary, records),
        "about": about(summary),
    }


def lead(summary: Summary, records: list[Record]) -> str:
    """What was done, in two sentences."""
    tasks = {r["task"] for r in records if r["kind"] == "answer"}
    texts = {(r["length"], r["task"], r["number"]) for r in records if r["kind"] == "answer"}
    return (
        f"{model_name(summary)} answered questions about {len(texts)} generated texts of {len(tasks)} tasks, with the "
        "full cache and with caches that policies made smaller. Where the question is seen, it stands at the end of "
        "the prompt when the cache is cut; where it is not seen, the text is read and cut before the question comes."
    )


def about(summary: Summary) -> list[tuple[str, str]]:
    """Model, texts and settings in words."""
    run, settings = summary.run, summary.settings
    said = {
        "model": model_name(summary),
        "weights": " ".join(str(run[name]) for name in ("dtype", "model_hash") if run.get(name)),
        "device": str(run.get("device", "")),
        "generated texts": summary.set_hash or "",
        "hybridkv": " ".join(str(run[name]) for name in ("version", "commit") if run.get(name)),
        "settings": str(run.get("digest", "")),
        "tasks": ", ".join(settings.tasks),
        "texts of each task and length": str(settings.samples),
        "seed": str(settings.seed),
        "units done": f"{summary.units} of {run['units']}" if "units" in run else str(summary.units),
    }
    return [(name, value) for name, value in said.items() if value]


def _view(view: View) -> dict[str, Any]:
    found = {"mode": view.mode, "length": view.length, "averaged": view.averaged, "shown_only": view.shown_only}
    return found | {"rows": [_row(row) for row in view.rows]}


def _row(row: Row) -> dict[str, Any]:
    found: dict[str, Any] = {"policy": row.policy, "ratio": row.ratio, "kv": row.kv_dtype, "state": row.state_dtype}
    names = ("bytes", "kv_bytes", "state_bytes", "table_bytes", "peak_bytes", "tokens", "kept")
    found |= {name: None if row.size is None else getattr(row.size, name) for name in names}
    found |= {"smaller": row.times_smaller, "mean": _score(row.mean)}
    found["tasks"] = {task: _score(score) for task, score in row.tasks.items()}
    d = row.divergence
    found["divergence"] = None if d is None else {"kl": d.kl, "kl_999": d.kl_999, "top1": d.top1, "texts": d.texts}
    return found


def _score(score: Score | None) -> dict[str, Any] | None:
    if score is None:
        return None
    return {"samples": score.samples, "score": _three(score.score), "difference": _three(score.difference)}


def _three(estimate: Estimate) -> list[float]:
    return [estimate.value, estimate.low, estimate.high]


def changed(summary: Summary, records: list[Record]) -> list[dict[str, Any]]:
    """Of each mode, length and task the first texts that some policy answered worse than the full cache did.

    Answers in the first dtypes alone, the full cache's first.
    """
    full = next((row for view in summary.views for row in view.rows if row.policy == FULL), None)
    if full is None:
        return []
    asked: dict[tuple, list[Record]] = {}
    for r in records:
        if r["kind"] == "answer" and (r["kv_dtype"], r["state_dtype"]) == (full.kv_dtype, full.state_dtype):
            asked.setdefault((r["mode"], r["length"], r["task"], r["number"], r.get("question", 0)), []).append(r)
    order = [(row.policy, row.ratio) for view in summary.views for row in view.rows]
    found, counts = [], dict[tuple, int]()
    for key, answers in sorted(asked.items()):
        answers = sorted(answers, key=lambda r: order.index((r["policy"], r["ratio"])))
        lost = answers[0]["policy"] == FULL and any(r["score"] < answers[0]["score"] for r in answers)
        if not lost or counts.get(key[:3], 0) >= CHANGED:
            continue
        counts[key[:3]] = counts.get(key[:3], 0) + 1
        said = [
            {
                "policy": r["policy"],
                "ratio": r["ratio"],
                "score": r["score"],
                "answer": r.get("answer", "")[:MOST_SHOWN],
            }
            for r in answers
        ]
        names = ("mode", "length", "task", "number", "question")
        found.append(dict(zip(names, key, strict=True)) | {"answers": said})
    return found
