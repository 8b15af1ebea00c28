"""Statistics: scores of an evaluation, each with the interval in which it would lie for other texts of the same kind.

A policy answers the same texts as the full cache does, so what counts is the *paired* difference: the mean over texts
of (score with the policy - score with the full cache). Its interval is far narrower than that of either score.

Intervals are 95 % bootstrap percentiles: texts are drawn anew, with replacement, within each task and length, 2000
times, and the mean over tasks is taken each time. Tasks are not drawn: the mean is of these tasks. The draws have a
fixed seed, and all policies are given the same draws.
"""

from __future__ import annotations

import hashlib
import json
import math
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from hybridkv.evaluation.results import Record, Saved
from hybridkv.evaluation.settings import FULL, LEAST_SCORE, EvalSettings

DRAWS = 2000
SEED = 14
INSIDE = (2.5, 97.5)  # percent of the draws
DIGITS = 6  # the last bits of a sum depend on the machine; what is printed must not

Cell = tuple[int, str]  # length, task
Line = tuple[str, float, str, str]  # policy, ratio, kv_dtype, state_dtype
Scores = dict[int, float]  # number of a sample -> its score, 0 to 100


@dataclass(frozen=True)
class Estimate:
    """A mean and its 95 % interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Score:
    """How well texts were answered, and how much better or worse than with the full cache. 0 to 100."""

    samples: int
    score: Estimate
    difference: Estimate  # to the full cache in the first dtypes, on the same texts


@dataclass(frozen=True)
class Size:
    """What a request holds once its prompt is read and cut: means over the texts, and the largest peak."""

    tokens: float
    kept: float  # tokens a stream, on average
    kv_bytes: float
    state_bytes: float
    table_bytes: float
    peak_bytes: float

    @property
    def bytes(self) -> float:
        """Keys and values, state, and page tables."""
        return self.kv_bytes + self.state_bytes + self.table_bytes


@dataclass(frozen=True)
class Divergence:
    """How far the next token's distribution is from the full cache's: means over texts."""

    texts: int
    kl: float
    kl_999: float  # the 99.9 % quantile over a text's tokens
    top1: float  # percent of tokens whose likeliest successor is the same


@dataclass(frozen=True)
class Row:
    """One policy at one ratio, in one pair of dtypes."""

    policy: str
    ratio: float
    kv_dtype: str
    state_dtype: str
    mean: Score | None  # over the averaged tasks; None where there is none
    tasks: dict[str, Score]
    size: Size | None
    times_smaller: float | None  # KV bytes of the full cache in the first dtypes / these
    divergence: Divergence | None
    answer_tokens: float | None


@dataclass(frozen=True)
class View:
    """All rows of one mode and one length. Length None: all lengths together."""

    mode: str
    length: int | None
    rows: list[Row]
    averaged: list[str]  # tasks that the mean is of
    shown_only: dict[str, float]  # tasks that it is not of, with the full cache's score


@dataclass(frozen=True)
class Summary:
    """Everything that table, CSV and page show."""

    run: Record
    settings: EvalSettings
    units: int  # done
    set_hash: str | None  # names all texts that were asked about
    views: list[View]


def summarise(saved: Saved) -> Summary:
    """The views of the results, in the order of the settings: modes, then all lengths, then each length."""
    settings = saved.settings
    # a question that follows another was not there when that one's cache was cut: it counts where none was seen
    answers = [r for r in saved.records if r["kind"] == "answer" and not (r["mode"] == "seen" and r["question"])]
    divergences = [r for r in saved.records if r["kind"] == "divergence"]
    lengths: list[int | None] = [n for n in settings.lengths if any(r["length"] == n for r in saved.records)]
    lengths = [None, *lengths] if len(lengths) > 1 else lengths
    views = []
    for mode in settings.modes:
        for length in lengths:
            here = [_of(records, mode, length) for records in (answers, divergences)]
            if any(here):
                views.append(_view(settings, mode, length, *here))
    return Summary(saved.run, settings, len(saved.done), set_hash(answers), views)


def set_hash(answers: list[Record]) -> str | None:
    """One hash of the hashes of all texts; None where the records have none."""
    texts = {(r["length"], r["task"], r["number"], r["text"]) for r in answers if "text" in r}
    return hashlib.sha256(json.dumps(sorted(texts)).encode()).hexdigest() if texts else None


def _of(records: list[Record], mode: str, length: int | None) -> list[Record]:
    return [r for r in records if r["mode"] == mode and length in (None, r["length"])]


def _line(record: Record) -> Line:
    return record["policy"], record["ratio"], record["kv_dtype"], record["state_dtype"]


def _view(
    settings: EvalSettings, mode: str, length: int | None, answers: list[Record], divergences: list[Record]
) -> View:
    by_line: dict[Line, list[Record]] = {}
    for record in answers:
        by_line.setdefault(_line(record), []).append(record)
    distances: dict[Line, list[Record]] = {}
    for record in divergences:
        distances.setdefault(_line(record), []).append(record)
    lines = sorted({*by_line, *distances}, key=lambda line: _place(settings, line))
    full_records = by_line.get(lines[0], []) if lines[0][0] == FULL else []
    full = _cells(full_records)
    means = {cell: round(_mean(scores.values()), DIGITS) for cell, scores in full.items()}
    cut = {(r["length"], r["task"]) for r in answers if r["policy"] != FULL} or set(full)
    good = {cell for cell, mean in means.items() if mean >= LEAST_SCORE and cell in cut}
    counted = good or set(full)  # where no task is good enough, bytes are still of something
    rows = []
    for line in lines:
        records = by_line.get(line, [])
        size, cells = _size(records, counted), compare(_cells(records), full)
        by_task = {task: average([cells[cell] for cell in sorted(cells) if cell[1] == task]) for task in settings.tasks}
        base = _size(full_records, counted & {(r["length"], r["task"]) for r in records})  # of the same texts
        smaller = round(base.kv_bytes / size.kv_bytes, DIGITS) if base and size and size.kv_bytes else None
        lengths_of_answers = [r["answer_tokens"] for r in records if "answer_tokens" in r]
        rows.append(
            Row(
                *line,
                mean=average([cells[cell] for cell in sorted(cells) if cell in good]),
                tasks={task: score for task, score in by_task.items() if score is not None},
                size=size,
                times_smaller=smaller,
                divergence=_divergence(distances.get(line, [])),
                answer_tokens=round(_mean(lengths_of_answers), DIGITS) if lengths_of_answers else None,
            )
        )
    averaged = [task for task in settings.tasks if any(cell[1] == task for cell in good)]
    return View(mode, length, rows, averaged, _left_out(settings, means, good))


def _left_out(settings: EvalSettings, means: dict[Cell, float], good: set[Cell]) -> dict[str, float]:
    """Tasks that are not averaged, or `vt at 4096` where a task is averaged at other lengths.

    Most have less than the least score. A task that was not cut, since its first texts went badly, is no part of it
    either: every row is to be a mean of the same tasks.
    """
    found = {}
    for task in settings.tasks:
        low = {cell: mean for cell, mean in means.items() if cell[1] == task and cell not in good}
        if any(cell[1] == task for cell in good):
            found |= {f"{task} at {length}": mean for (length, _), mean in sorted(low.items())}
        elif low:
            found[task] = round(_mean(low.values()), DIGITS)
    return found


def _place(settings: EvalSettings, line: Line) -> tuple:
    """The full cache first, then policies, dtypes and ratios as they were asked for."""
    policy, ratio, kv_dtype, state_dtype = line

    def at(known: Sequence[str], name: str) -> tuple[int, str]:
        return (known.index(name), "") if name in known else (len(known), name)

    dtypes = at(settings.kv_dtypes, kv_dtype), at(settings.state_dtypes, state_dtype)
    return policy != FULL, at(settings.policies, policy), dtypes, ratio


def _cells(records: list[Record]) -> dict[Cell, Scores]:
    """Scores of samples by length and task. A sample with several questions has their mean."""
    found: dict[Cell, dict[int, list[float]]] = {}
    for r in records:
        found.setdefault((r["length"], r["task"]), {}).setdefault(r["number"], []).append(100.0 * r["score"])
    return {cell: {n: _mean(scores) for n, scores in sorted(by.items())} for cell, by in found.items()}


@dataclass(frozen=True)
class Compared:
    """One cell: how a policy answered its samples, beside the full cache on the same samples."""

    samples: int
    means: np.ndarray  # [2] of the scores, and of the differences
    drawn: np.ndarray  # [DRAWS, 2] the same of the draws


def compare(scores: dict[Cell, Scores], full: dict[Cell, Scores]) -> dict[Cell, Compared]:
    """Scores of samples by cell and number, beside the full cache's. What one of them lacks is left out."""
    found = {}
    for cell in full:
        both = sorted(scores.get(cell, {}).keys() & full[cell].keys())
        if both:
            mine = np.array([scores[cell][n] for n in both])
            pairs = np.stack([mine, mine - np.array([full[cell][n] for n in both])], axis=1)  # [samples, 2]
            found[cell] = Compared(len(both), pairs.mean(0), draws(cell, len(both)) @ pairs)
    return found


def average(cells: Sequence[Compared]) -> Score | None:
    """The mean over cells, each of which counts the same; None of none."""
    if not cells:
        return None
    values = np.mean([cell.means for cell in cells], axis=0)
    drawn = np.round(np.mean([cell.drawn for cell in cells], axis=0), DIGITS)
    low, high = np.percentile(drawn, INSIDE, axis=0)
    score, difference = (Estimate(*(round(float(x[i]), DIGITS) for x in (values, low, high))) for i in range(2))
    return Score(sum(cell.samples for cell in cells), score, difference)


@lru_cache(maxsize=64)
def draws(cell: Cell, samples: int) -> np.ndarray:
    """[DRAWS, samples] weights: the share that each sample has in a draw; a row adds up to 1."""
    rng = np.random.default_rng([SEED, samples, zlib.crc32(repr(cell).encode())])
    return rng.multinomial(samples, np.full(samples, 1 / samples), size=DRAWS) / samples


def _size(records: list[Record], cells: set[Cell]) -> Size | None:
    here = [r for r in records if (r["length"], r["task"]) in cells]
    if not here:
        return None
    means = [
        round(_mean([r[name] for r in here]), DIGITS)
        for name in ("tokens", "kept", "kv_bytes", "state_bytes", "table_bytes")
    ]
    return Size(*means, peak_bytes=max(r["peak_bytes"] for r in here))


def _divergence(records: list[Record]) -> Divergence | None:
    if not records:
        return None
    kl, kl_999, top1 = (round(_mean([r[name] for r in records]), 9) for name in ("kl", "kl_999", "top1"))
    return Divergence(len(records), kl, kl_999, round(100 * top1, DIGITS))


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return math.fsum(found) / len(found)
