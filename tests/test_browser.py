"""The browser that other tests look at pages with sees what it must see: errors, edges, contrast, the keyboard."""

from pathlib import Path

import browser as support
import pytest
from browser import Browser


def write(folder: Path, body: str) -> Path:
    path = folder / "page.html"
    path.write_text(f"<!doctype html><meta charset=utf-8><body>{body}", encoding="utf-8")
    return path


def test_it_clicks_presses_hovers_and_fills(browser: Browser, tmp_path: Path) -> None:
    page = browser.open(
        write(
            tmp_path,
            """<button>more</button><input type=range min=0 max=9><p></p><script>
            const say = (what) => document.querySelector("p").append(what + " ");
            document.querySelector("button").onclick = () => say("clicked");
            document.querySelector("button").onpointerenter = () => say("over");
            document.onkeydown = (event) => say(event.key);
            document.querySelector("input").oninput = (event) => say(event.target.value);
            </script>""",
        ),
        fragment="here",
    )
    page.hover("button")
    page.click("button")
    page.press("ArrowDown", "End")
    page.fill("input", "7")
    assert page.text("p") == "over clicked ArrowDown End 7"
    assert page.evaluate("location.hash") == "#here" and not page.errors and not page.requests
    page.screenshot(tmp_path / "shot.png")
    assert (tmp_path / "shot.png").read_bytes().startswith(b"\x89PNG")


def test_it_hears_errors_and_reaches_nothing_outside(browser: Browser, tmp_path: Path) -> None:
    body = "<img src=https://example.org/a.png><script>console.error('said'); missing()</script>"
    page = browser.open(write(tmp_path, body))
    assert {"said", "missing is not defined"} <= set(page.errors)
    assert page.requests == ["https://example.org/a.png"] and page.evaluate("document.images[0].naturalWidth") == 0


def test_it_sees_what_sticks_out_and_what_is_too_pale(browser: Browser, tmp_path: Path) -> None:
    pale = """<style>p { color: light-dark(#999, #ccc) }
    :root { color-scheme: light dark; background: light-dark(#fff, #111) }</style>"""
    page = browser.open(write(tmp_path, f"{pale}<p>words</p><div style='width:500px'>wide</div>"), width=600)
    assert page.sticking_out() == []
    assert [line.split(": ")[1] for line in page.low_contrasts()] == ["words"]
    page.theme(dark=True)
    assert page.low_contrasts() == []
    page.resize(320)
    assert len(page.sticking_out()) == 2


def test_without_chromium_a_test_is_skipped_or_fails_where_it_is_required(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(support, "NAMES", ("no-such-browser",))
    monkeypatch.delenv("HYBRIDKV_BROWSER", raising=False)
    with pytest.raises(pytest.skip.Exception, match="apt-get install chromium"):
        support.find_chromium()
    monkeypatch.setenv("HYBRIDKV_BROWSER", "required")
    with pytest.raises(pytest.fail.Exception, match="apt-get install chromium"):
        support.find_chromium()
