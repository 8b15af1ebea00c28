"""Scores, differences and intervals: against sums by hand, against the theory, in any order of the records."""

import csv
import io
import random
from dataclasses import replace

import numpy as np
import pytest
from eval_records import SETTINGS, saved
from rich.console import Console

from hybridkv.evaluation.results import Saved
from hybridkv.evaluation.settings import EvalSettings
from hybridkv.evaluation.statistics import DRAWS, Estimate, Summary, View, average, compare, draws, summarise
from hybridkv.evaluation.tables import as_csv, interval, show, signed


@pytest.fixture(scope="module")
def summary() -> Summary:
    return summarise(saved())


def record(task: str, number: int, policy: str, score: float, **more: object) -> dict:
    ratio = 1 if policy == "full" else 4
    found = dict(
        kind="answer", unit=f"{task} {number}", task=task, length=1024, mode="seen", policy=policy, ratio=ratio,
        kv_dtype="bf16", state_dtype="f32", number=number, question=0, score=score, tokens=1000, kept=1000 // ratio,
        kv_bytes=1024 // ratio, state_bytes=8, table_bytes=2, peak_bytes=1050, answer_tokens=3, answer="",
    )  # fmt: skip
    return found | more


def summarised(records: list[dict], **change: object) -> Summary:
    asked = dict(tasks=("vt", "cwe", "fwe"), policies=("snapkv",), ratios=(4,), lengths=(1024,), kv_dtypes=("bf16",))
    settings = EvalSettings(**asked | change)  # type: ignore[arg-type]
    return summarise(Saved({"kind": "run", "settings": settings.as_json()}, records))


def test_means_differences_and_bytes_by_hand() -> None:
    scores = {"vt": ([1, 1, 0, 1], [1, 0, 0, 1]), "cwe": ([1, 0.5], [0.5, 0.5]), "fwe": ([0, 0], [1, 1])}
    records = []
    for task, (full, cut) in scores.items():
        records += [record(task, i, "full", score) for i, score in enumerate(full)]
        records += [record(task, i, "snapkv", score) for i, score in enumerate(cut)]
    [view] = summarised(records).views
    full, cut = view.rows
    # fwe has 0 with the full cache: it is shown, and not averaged; each task counts the same, whatever its samples
    assert view.averaged == ["vt", "cwe"] and view.shown_only == {"fwe": 0.0}
    assert full.mean is not None and cut.mean is not None and cut.size is not None
    assert (full.mean.score.value, full.mean.difference.value, full.mean.samples) == (75.0, 0.0, 6)
    assert (cut.mean.score.value, cut.mean.difference.value) == (50.0, -25.0)
    assert {task: s.score.value for task, s in cut.tasks.items()} == {"vt": 50.0, "cwe": 50.0, "fwe": 100.0}
    assert (cut.size.kv_bytes, cut.size.bytes, cut.times_smaller, cut.size.peak_bytes) == (256, 266, 4.0, 1050)
    # every draw gives fwe the same score: its interval has no width
    assert cut.tasks["fwe"].score.low == cut.tasks["fwe"].score.high == 100.0


@pytest.mark.parametrize(("mode", "score"), (("unseen", 87.5), ("seen", 100.0)))
def test_a_sample_with_two_questions_counts_once(mode: str, score: float) -> None:
    """Where the question is seen, the second one was not there when the cache was cut: it does not count."""
    records = [record("vt", 0, "full", 1.0), record("vt", 0, "full", 0.5, question=1), record("vt", 1, "full", 1.0)]
    [view] = summarised([{**each, "mode": mode} for each in records], modes=(mode,)).views
    assert view.rows[0].tasks["vt"].score.value == score and view.rows[0].tasks["vt"].samples == 2


def test_a_difference_is_of_the_texts_that_both_answered() -> None:
    """A run that was stopped has texts that the second dtype has not answered yet: those do not count for it."""
    records = [record("vt", i, "full", 1.0 if i < 2 else 0.5) for i in range(4)]
    records += [record("vt", i, "full", 1.0, kv_dtype="fp8") for i in range(2)]
    [view] = summarised(records, kv_dtypes=("bf16", "fp8")).views
    first, second = view.rows
    assert first.mean is not None and second.mean is not None
    assert (first.mean.score.value, second.mean.score.value, second.mean.difference.value) == (75.0, 100.0, 0.0)


def test_a_task_may_be_averaged_at_one_length_and_not_at_another() -> None:
    records = [record("vt", i, "full", 1.0) for i in range(2)]
    records += [record("vt", i, "full", 0.5, length=2048) for i in range(2)]
    both, short, long = summarised(records, lengths=(1024, 2048)).views
    assert both.length is None and both.averaged == ["vt"] and both.shown_only == {"vt at 2048": 50.0}
    assert both.rows[0].mean is not None and both.rows[0].mean.score.value == 100.0
    assert (short.averaged, long.averaged, long.shown_only) == (["vt"], [], {"vt": 50.0})


def test_sixty_is_enough_however_it_is_summed() -> None:
    [view] = summarised([record("vt", i, "full", s) for i, s in enumerate([0.1, 0.7, 0.8, 0.8, 0.6])]).views
    assert view.averaged == ["vt"]


def test_an_interval_is_as_wide_as_the_theory_says() -> None:
    """Two tasks of 400 coin tosses: the mean's standard error is known, and 95 % is 1.96 of it either way."""
    rng = np.random.default_rng(0)
    full = {(1024, task): dict.fromkeys(range(400), 100.0) for task in ("vt", "cwe")}
    cut = {cell: {i: 100.0 * rng.integers(2) for i in range(400)} for cell in full}
    found = average(list(compare(cut, full).values()))
    assert found is not None
    error = 1.96 * np.sqrt(sum(np.var(list(s.values())) / 400 for s in cut.values())) / 2
    for estimate in (found.score, found.difference):
        assert estimate.high - estimate.value == pytest.approx(error, rel=0.1)
        assert estimate.value - estimate.low == pytest.approx(error, rel=0.1)


def test_intervals_hold_the_truth_about_as_often_as_they_say() -> None:
    rng, inside = np.random.default_rng(1), 0
    full = {(1024, "vt"): dict.fromkeys(range(60), 100.0)}
    for _ in range(300):
        scores = {(1024, "vt"): dict(enumerate(100.0 * (rng.random(60) < 0.8)))}
        found = average(list(compare(scores, full).values()))
        assert found is not None
        inside += found.difference.low <= -20.0 <= found.difference.high
    assert 0.90 <= inside / 300 <= 0.99


def test_a_paired_difference_is_known_better_than_the_score(summary: Summary) -> None:
    """keydiff loses few texts of those that the full cache answers: that is known far better than either score."""
    row = next(r for r in summary.views[0].rows if (r.policy, r.ratio) == ("keydiff", 2))
    assert row.mean is not None
    score, difference = row.mean.score, row.mean.difference
    assert difference.high - difference.low < 0.7 * (score.high - score.low)


def test_draws_are_of_the_samples_and_the_same_every_time() -> None:
    drawn = draws((1024, "vt"), 10)
    assert drawn.shape == (DRAWS, 10) and np.allclose(drawn.sum(1), 1)
    draws.cache_clear()
    assert np.array_equal(drawn, draws((1024, "vt"), 10)) and not np.array_equal(drawn, draws((2048, "vt"), 10))


def text(summary: Summary, width: int = 80) -> str:
    out = io.StringIO()
    show(Console(file=out, width=width, highlight=False), summary)
    return out.getvalue()


def test_the_same_results_give_the_same_bytes_in_any_order(summary: Summary) -> None:
    again = saved()
    random.Random(0).shuffle(again.records)
    other = summarise(again)
    assert text(other) == text(summary) and as_csv(other) == as_csv(summary)


def test_the_table_says_what_was_measured(summary: Summary) -> None:
    shown = text(summary)
    lines = shown.splitlines()
    assert lines[0] == "some-model, question seen, 2048 and 4096 tokens, 20 texts a task"
    assert lines[1].split("  ")[0] == "policy" and "95 % interval" in lines[1] and "KL 99.9 %" in lines[1]
    assert "Not averaged, since the full cache does badly (less than 60): cwe 30.0." in " ".join(shown.split())
    assert any(line.startswith("snapkv") and "-22.5  -30.0 to -15.8" in line for line in lines), shown
    assert not any(line != line.rstrip() for line in lines) and "question not seen" in shown
    # a column for what differs, none for what does not
    assert "fp8" in lines[4] and "f32" not in shown
    [cwe] = [line for line in lines[:40] if line.startswith("policy") and "CWE" in line]
    assert cwe.split()[-4:] == ["S1", "MK2", "VT", "CWE"]
    assert text(summary, width=40).replace("\n", "").replace(" ", "") == shown.replace("\n", "").replace(" ", "")


def test_a_policy_named_auto_says_what_it_was() -> None:
    settings = replace(SETTINGS, policies=("auto",), lengths=(2048,), samples=2, kv_dtypes=("bf16",), divergence=0)
    records = [r | {"policy": "auto"} for r in saved(replace(settings, policies=("keydiff",))).records]
    records = [r | {"policy": "full"} if r["ratio"] == 1 else r for r in records]
    found = summarise(
        Saved({"kind": "run", "settings": settings.as_json(), "auto": {"seen": "peak", "unseen": "keydiff"}}, records)
    )
    said = " ".join(text(found).split())
    assert "auto is peak here." in said and "auto is keydiff here." in said


def test_csv_has_every_view_and_task(summary: Summary) -> None:
    lines = list(csv.DictReader(io.StringIO(as_csv(summary))))
    assert len({tuple(line[k] for k in list(line)[:7]) for line in lines}) == len(lines)  # none twice
    assert {line["length"] for line in lines} == {"all", "2048", "4096"}
    by = {(v.mode, "all" if v.length is None else str(v.length)): v for v in summary.views}
    checked = 0
    for line in lines:
        view: View = by[line["mode"], line["length"]]
        row = next(
            r
            for r in view.rows
            if (r.policy, f"{r.ratio:g}", r.kv_dtype) == (line["policy"], line["ratio"], line["kv_dtype"])
        )
        score = row.mean if line["task"] == "mean" else row.tasks[line["task"]]
        assert score is not None and float(line["difference"]) == pytest.approx(score.difference.value, abs=0.005)
        if line["task"] == "mean":
            assert row.size is not None and float(line["bytes"]) == pytest.approx(row.size.bytes)
        else:
            assert line["averaged"] == ("no" if line["task"] == "cwe" else "yes")
        checked += 1
    assert checked > 100


def test_nothing_is_written_as_minus_nothing() -> None:
    assert [signed(x) for x in (-0.04, 0.0, 0.05001, -1.25)] == ["0.0", "0.0", "+0.1", "-1.2"]
    assert interval(Estimate(0.0, -0.01, 2.0)) == "0.0 to +2.0"


def test_all_texts_have_one_hash(summary: Summary) -> None:
    other = saved()
    other.records[0]["text"] = "another text"
    assert summary.set_hash is not None and summarise(other).set_hash != summary.set_hash
