"""The page of `hybridkv eval` in a real browser: its figures are those of the table, by pointer and by keyboard."""

import json
import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path

import pytest
from browser import Browser, Page
from eval_records import SETTINGS, saved

from hybridkv.evaluation.page import page, write_files
from hybridkv.evaluation.plot import plot_svg
from hybridkv.evaluation.results import Saved
from hybridkv.evaluation.settings import EvalSettings
from hybridkv.evaluation.statistics import Summary, View, summarise
from hybridkv.evaluation.tables import signed
from hybridkv.planner import human

DOTS = "[...document.querySelectorAll('#plot .dot')].length"


def make(folder: Path, settings: EvalSettings = SETTINGS, **more: object) -> tuple[Path, Summary]:
    found = saved(settings)
    found.run |= more
    summary = summarise(found)
    write_files(folder, summary, found.records)
    return folder / "index.html", summary


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Summary]:
    return make(tmp_path_factory.mktemp("eval"))


def plain(text: str) -> str:
    """Narrow and fixed spaces as plain ones, the minus as a hyphen."""
    return text.replace("\u202f", " ").replace("\u00a0", " ").replace("\u2212", "-")


def cells(page: Page) -> list[list[str]]:
    read = "[...document.querySelectorAll('#figures tr')].map((r) => [...r.children].map((c) => c.textContent))"
    return [[plain(text) for text in row] for row in page.evaluate(read)]


def expected(view: View, kv: str | None) -> list[list[str]]:
    """Rows of the table: name, dtype, bytes, times smaller, mean, difference and interval."""
    found = []
    for row in (r for r in view.rows if kv in (None, r.kv_dtype)):
        assert row.size and row.mean and row.times_smaller
        size = [human(getattr(row.size, name)) for name in ("bytes", "kv_bytes", "state_bytes", "peak_bytes")]
        smaller = f"{round(row.times_smaller, 1):g}×"
        d = row.mean.difference
        ours = [signed(d.value), f"{signed(d.low)} to {signed(d.high)}"] if row is not view.rows[0] else ["", ""]
        name = "full cache" if row.policy == "full" else f"{row.policy} {row.ratio:g}×"
        found.append([name, row.kv_dtype, *size, smaller, f"{row.mean.score.value:.1f}", *ours])
    return found


def test_every_choice_shows_the_figures_of_the_table(browser: Browser, written: tuple[Path, Summary]) -> None:
    path, summary = written
    shown = browser.open(path)
    for view in summary.views:
        for kv in (None, "bf16", "fp8"):
            length = "all" if view.length is None else view.length
            shown.evaluate(
                "(to) => { location.hash = to; dispatchEvent(new HashChangeEvent('hashchange')); }",
                f"mode={view.mode}&length={length}&kv={kv or 'all'}",
            )
            assert [row[:10] for row in cells(shown)[1:]] == expected(view, kv), (view.mode, length, kv)
            # a point for every row, the full caches included
            assert shown.evaluate(DOTS) == len(expected(view, kv))
            assert "Not averaged: cwe" in shown.text("#averaged")
    assert not shown.errors and not shown.requests


def test_a_wrong_figure_would_be_seen(browser: Browser, written: tuple[Path, Summary], tmp_path: Path) -> None:
    path, summary = written
    text = path.read_text()
    wrong = re.sub(r'("score": \[)(\d+\.\d+)', lambda m: f"{m[1]}{float(m[2]) - 1}", text, count=1)
    (tmp_path / "wrong.html").write_text(wrong)
    assert [row[:10] for row in cells(browser.open(tmp_path / "wrong.html"))[1:]] != expected(summary.views[0], None)


def test_controls_by_pointer_and_keyboard(browser: Browser, written: tuple[Path, Summary]) -> None:
    path, summary = written
    shown = browser.open(path)
    shown.press("Tab")
    shown.press("ArrowRight")  # the question is not seen
    assert "mode=unseen" in shown.evaluate("location.hash")
    assert [row[:10] for row in cells(shown)[1:]] == expected(summary.views[3], None)
    shown.press("Tab", "ArrowRight")
    assert "length=2048" in shown.evaluate("location.hash")
    shown.click("#kv label:nth-child(3)")
    assert {row[1] for row in cells(shown)[1:]} == {"fp8"}
    again = browser.open(path, fragment=shown.evaluate("location.hash.slice(1)"))  # the address holds what was chosen
    assert cells(again) == cells(shown) and not shown.errors and not again.errors


def test_a_line_can_be_switched_off(browser: Browser, written: tuple[Path, Summary]) -> None:
    shown = browser.open(written[0])
    before = shown.evaluate(DOTS)
    assert shown.texts("#legend button") == ["snapkv", "keydiff"]
    shown.click("#legend button")
    assert shown.evaluate(DOTS) == before - 6
    shown.press("Enter")  # it still has the focus
    assert shown.evaluate(DOTS) == before


def test_points_tell_their_figures(browser: Browser, written: tuple[Path, Summary]) -> None:
    path, summary = written
    shown = browser.open(path)
    full, snap = summary.views[0].rows[0], summary.views[0].rows[2]
    assert full.mean and snap.mean and snap.size
    shown.sheet.focus("#plot")
    shown.press("ArrowRight")  # the first point
    lines = plain(shown.text("#tip")).split("\n")
    assert lines[0] == "snapkv 2×" and lines[1] == "KV bf16"
    d = snap.mean.difference
    assert f"score {snap.mean.score.value:.1f} on {snap.mean.samples} texts" in lines
    assert f"{signed(d.value)} to the full cache ({signed(d.low)} to {signed(d.high)})" in lines
    assert plain(shown.text("#said")).startswith("snapkv 2×. KV bf16. ")  # and to a screen reader
    shown.press("ArrowLeft")
    assert plain(shown.text("#tip")).startswith("snapkv 4×")
    shown.press("ArrowDown")
    assert plain(shown.text("#tip")).startswith("snapkv 4×\nKV fp8") or "fp8" in shown.text("#tip")
    shown.press("Escape")
    assert not shown.visible("#tip")
    box = shown.evaluate("document.querySelector('#plot .dot').getBoundingClientRect().toJSON()")
    host = shown.evaluate("document.querySelector('#plot').getBoundingClientRect().toJSON()")
    shown.hover("#plot", (box["x"] + box["width"] / 2 - host["x"] + 3, box["y"] + box["height"] / 2 - host["y"] + 3))
    assert plain(shown.text("#tip")).startswith("snapkv 2×")
    shown.hover("h1")
    assert not shown.visible("#tip") and not shown.errors


def test_points_stand_where_their_figures_are(browser: Browser, written: tuple[Path, Summary]) -> None:
    """More bytes are further right, a better score is higher, and equal ones are level."""
    shown = browser.open(written[0], fragment="kv=bf16")
    rows = [r for r in written[1].views[0].rows if r.kv_dtype == "bf16" and r.policy != "full"]
    at = shown.evaluate(
        "[...document.querySelectorAll('#plot g .dot')].map((e) => { const b = e.getBoundingClientRect();"
        " return [b.x + b.width / 2, b.y + b.height / 2]; })"
    )
    assert len(at) == len(rows)
    for (x, y), row in zip(at, rows, strict=True):
        for (x2, y2), other in zip(at, rows, strict=True):
            assert row.size and other.size and row.mean and other.mean
            if row.size.bytes > other.size.bytes:
                assert x > x2
            if row.mean.score.value > other.mean.score.value + 1:
                assert y < y2


def test_a_task_is_chosen_among_small_plots(browser: Browser, written: tuple[Path, Summary]) -> None:
    path, summary = written
    shown = browser.open(path)
    assert [text.split("\n")[0] for text in shown.texts("#multiples button")] == ["mean", *SETTINGS.tasks]
    assert "not averaged" in shown.texts("#multiples button")[-1]
    shown.click("#multiples button:nth-child(4)")
    assert shown.text("#plot-title").endswith("vt") and "task=vt" in shown.evaluate("location.hash")
    vt = summary.views[0].rows[0].tasks["vt"].score.value
    assert shown.text("#tiles dd") == f"{vt:.1f}"
    shown.click("#multiples button:nth-child(4)")  # and given back
    assert shown.text("#plot-title").endswith("mean over tasks")


def test_tiles_name_the_smallest_cache_that_is_good_enough(browser: Browser, tmp_path: Path) -> None:
    settings = replace(SETTINGS, policies=("keydiff",), kv_dtypes=("bf16",), tasks=("niah_single_1",), samples=40)
    path, summary = make(tmp_path, settings)
    shown = browser.open(path)
    rows = summary.views[0].rows[1:]
    for tile, points in ((2, 1.0), (3, 3.0)):
        good = [r for r in rows if r.mean and r.mean.difference.value >= -points]
        best = min(good, key=lambda r: r.size.bytes if r.size else 0) if good else None
        said = plain(shown.text(f"#tiles > div:nth-child({tile}) .value"))
        assert said == (f"keydiff {best.ratio:g}×" if best else "none")


def test_hostile_answers_are_text(browser: Browser, tmp_path: Path) -> None:
    """Answers, names and tasks may say anything: nothing of it becomes part of the page."""
    found = saved(replace(SETTINGS, samples=3))
    evil = "</script><script>window.hurt = 1</script><img src=x onerror='window.hurt = 1'><!-- ]]> \u2028 {{"
    for record in found.records:
        if record["kind"] == "answer":
            record["answer"] = evil + record["policy"]
    found.run["model_name"] = evil
    summary = summarise(found)
    write_files(tmp_path, summary, found.records)
    shown = browser.open(tmp_path / "index.html")
    assert shown.evaluate("window.hurt") is None and not shown.errors and not shown.requests
    assert shown.evaluate("document.querySelectorAll('img, script:not([type])').length") == 1  # its own script
    assert evil in shown.evaluate("document.getElementById('samples').textContent")
    assert evil[:40] in shown.text("#lead")
    ElementTree.fromstring((tmp_path / "plot.svg").read_text())  # well-formed, so the name is text there too


def test_answers_that_changed_are_shown_side_by_side(browser: Browser, written: tuple[Path, Summary]) -> None:
    shown = browser.open(written[0])
    assert shown.visible("#lost")
    rows = shown.texts(".sample:first-child tr")
    assert rows[0].startswith("full cache") and "100.0" in rows[0] and any("0.0" in row for row in rows[1:])
    shown.choose("#lost-task", "vt")
    assert shown.texts(".sample h3") and not shown.errors


@pytest.mark.parametrize("width", [320, 390, 820, 1200])
def test_it_fits_the_window(browser: Browser, written: tuple[Path, Summary], width: int) -> None:
    shown = browser.open(written[0], width=width)
    assert shown.sticking_out() == []
    shown.resize(width + 100)
    assert shown.sticking_out() == [] and not shown.errors


@pytest.mark.parametrize("dark", [False, True])
def test_text_can_be_read(browser: Browser, written: tuple[Path, Summary], dark: bool) -> None:
    assert browser.open(written[0], dark=dark).low_contrasts() == []


def test_state_dtypes_and_no_divergence(browser: Browser, tmp_path: Path) -> None:
    path, _ = make(tmp_path, replace(SETTINGS, state_dtypes=("f32", "bf16"), divergence=0, lengths=(2048,), samples=4))
    shown = browser.open(path)
    assert not shown.visible("#divergence") and not shown.visible("#length-field") and shown.visible("#state-field")
    shown.click("#state label:nth-child(3)")
    assert {row[2] for row in cells(shown)[1:]} == {"bf16"} and not shown.errors


def test_a_model_that_answers_nothing_has_a_page_too(browser: Browser, tmp_path: Path) -> None:
    found = saved(replace(SETTINGS, samples=3, all_tasks=True))
    for record in found.records:
        if record["kind"] == "answer":
            record["score"] = 0.0
    write_files(tmp_path, summarise(found), found.records)
    shown = browser.open(tmp_path / "index.html")
    assert shown.text("#averaged").startswith("No task is averaged") and not shown.errors
    assert "nothing to show" in shown.evaluate("document.getElementById('plot').textContent")
    assert "no task is averaged" in (tmp_path / "plot.svg").read_text()


def test_auto_says_what_it_was(browser: Browser, tmp_path: Path) -> None:
    settings = replace(SETTINGS, policies=("auto",), samples=3, divergence=0)
    records = [
        r | {"policy": r["policy"].replace("keydiff", "auto")}
        for r in saved(replace(settings, policies=("keydiff",))).records
    ]
    run = {"kind": "run", "settings": settings.as_json(), "auto": {"seen": "peak", "unseen": "keydiff"}}
    write_files(tmp_path, summarise(Saved(run, records)), records)
    shown = browser.open(tmp_path / "index.html")
    assert shown.texts("#legend button") == ["auto (peak)"]
    shown.click("#mode label:nth-child(2)")
    assert shown.texts("#legend button") == ["auto (keydiff)"]


# ---- without a browser


def test_the_same_results_give_the_same_page(written: tuple[Path, Summary]) -> None:
    again = saved()
    again.records.reverse()
    assert page(summarise(again), again.records) == written[0].read_text()


def test_the_page_loads_nothing() -> None:
    found = saved(replace(SETTINGS, samples=2))
    text = page(summarise(found), found.records)
    assert "default-src 'none'" in text and not re.search(r"(?:src|href)=|url\(|@import", text.split('id="data"')[0])
    data = json.loads(re.search(r'id="data">(.*?)</script>', text).group(1))  # type: ignore[union-attr]
    assert data["policies"] == ["snapkv", "keydiff"] and data["kv"] == ["bf16", "fp8"]


def test_the_picture_has_a_panel_for_each_mode_and_every_point(written: tuple[Path, Summary]) -> None:
    picture = plot_svg(written[1])
    root = ElementTree.fromstring(picture)
    titles = [e.text for e in root.iter("{http://www.w3.org/2000/svg}title")]
    assert len(titles) == 1 + 2 * 2 * 6  # the picture's own; two modes, two dtypes, six points
    assert "some-model, question seen" in picture and "some-model, question not seen" in picture
    assert (written[0].parent / "plot.svg").read_text() == picture
