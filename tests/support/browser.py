"""A real browser for the tests: the system's Chromium, without a window, on a page that is a file on this machine or
comes from a server on it.

    def test_it(browser: Browser, tmp_path: Path) -> None:
        page = browser.open(tmp_path / "page.html", width=390)
        page.click("#more")
        assert page.text("#answer") == "42" and not page.errors

Nothing outside this machine is reached: no name leads anywhere, a file's page is offline, and what a page asks for is
on record in `page.requests`.
Where there is no Chromium such a test is skipped; with HYBRIDKV_BROWSER=required it fails.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser as Chromium
    from playwright.sync_api import Page as Sheet

NAMES = ("chromium", "chromium-browser", "google-chrome")
HOW = "install it with: apt-get install chromium"
FLAGS = (
    "--no-sandbox",  # CI runs as root
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",  # no name leads anywhere
)

# Elements of which a part is beyond the window's left or right edge. Those inside a box that scrolls or hides by itself
# are held by it, those clipped to nothing are for screen readers.
STICKING_OUT = """() => {
  const width = document.documentElement.clientWidth;
  const held = (e) => {
    for (let up = e.parentElement; up && up !== document.body && up !== document.documentElement; up = up.parentElement)
      if (getComputedStyle(up).overflowX !== "visible") return true;
    return false;
  };
  return [...document.body.querySelectorAll("*")].filter((e) => {
    const box = e.getBoundingClientRect();
    return box.width && box.height && (box.left < -0.5 || box.right > width + 0.5)
      && getComputedStyle(e).clipPath === "none" && !held(e);
  }).map((e) => `${e.tagName.toLowerCase()}${e.id && "#" + e.id} ${e.getBoundingClientRect().right.toFixed(1)}`);
}"""

# The contrast (WCAG 2) of every element that has text of its own and can be seen. Colours are painted on a canvas and
# read back, so that color-mix and light-dark need no parsing; backgrounds that shine through are laid over each other.
CONTRASTS = """() => {
  const pen = document.createElement("canvas").getContext("2d", {willReadFrequently: true});
  const rgba = (css) => {
    pen.clearRect(0, 0, 1, 1);
    pen.fillStyle = css;
    pen.fillRect(0, 0, 1, 1);
    const [r, g, b, a] = pen.getImageData(0, 0, 1, 1).data;
    return [r, g, b, a / 255];
  };
  const over = (top, under) => [0, 1, 2].map((c) => top[c] * top[3] + under[c] * (1 - top[3]));
  const light = (rgb) => {
    const [r, g, b] = rgb.map((v) => (v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const found = [];
  for (const e of document.body.querySelectorAll("*")) {
    const text = [...e.childNodes].filter((n) => n.nodeType === 3).map((n) => n.data).join("").trim();
    const style = getComputedStyle(e), box = e.getBoundingClientRect();
    if (!text || !box.width || !box.height || style.visibility === "hidden" || style.clipPath !== "none") continue;
    if (["SCRIPT", "STYLE", "OPTION", "NOSCRIPT"].includes(e.tagName)) continue;
    const layers = [];
    for (let up = e; up; up = up.parentElement) layers.push(rgba(getComputedStyle(up).backgroundColor));
    const ground = layers.reduceRight((under, top) => over(top, under), [255, 255, 255]);
    const ink = over(rgba(style.color), ground);
    const [high, low] = [light(ink), light(ground)].sort((a, b) => b - a);
    found.push([(high + 0.05) / (low + 0.05), text.slice(0, 40)]);
  }
  return found;
}"""


@dataclass
class Page:
    """A page that is open. `sheet` is Playwright's own object, for what is not said here."""

    sheet: Sheet
    errors: list[str] = field(default_factory=list)  # of the console, and those no script caught
    requests: list[str] = field(default_factory=list)  # addresses it asked for, without its own file

    def click(self, selector: str, at: tuple[float, float] | None = None) -> None:
        """Click an element, in its middle or `at` (x, y) pixels from its corner."""
        self.sheet.click(selector, position=_position(at))

    def hover(self, selector: str, at: tuple[float, float] | None = None) -> None:
        """Move the pointer over an element, to its middle or `at` (x, y) pixels from its corner."""
        self.sheet.hover(selector, position=_position(at))

    def press(self, *keys: str) -> None:
        """Press keys one after another where the focus is: "Tab", "ArrowDown", "Shift+End"."""
        for key in keys:
            self.sheet.keyboard.press(key)

    def fill(self, selector: str, value: str) -> None:
        """Set the value of an input, a slider too, as a person would: with its events."""
        self.sheet.fill(selector, value)

    def choose(self, selector: str, value: str) -> None:
        """Choose an option of a select."""
        self.sheet.select_option(selector, value)

    def resize(self, width: int, height: int = 900) -> None:
        """Give the window's inside another size."""
        self.sheet.set_viewport_size({"width": width, "height": height})

    def theme(self, dark: bool) -> None:
        """Ask for the dark or the light theme, as the system's setting would."""
        self.sheet.emulate_media(color_scheme="dark" if dark else "light")

    def evaluate(self, script: str, argument: Any = None) -> Any:
        """The value of a JavaScript expression or function, as plain data."""
        return self.sheet.evaluate(script, argument)

    def text(self, selector: str) -> str:
        """An element's text as it is seen."""
        return self.sheet.inner_text(selector)

    def texts(self, selector: str) -> list[str]:
        """The text of every element that matches."""
        return [element.inner_text() for element in self.sheet.query_selector_all(selector)]

    def visible(self, selector: str) -> bool:
        """Whether there is such an element and it is shown; it may be outside the window."""
        return self.sheet.is_visible(selector)

    def screenshot(self, path: Path, whole: bool = False) -> None:
        """Write what the window shows as a PNG, or the `whole` page."""
        self.sheet.screenshot(path=path, full_page=whole)

    def sticking_out(self) -> list[str]:
        """Elements beyond the window's left or right edge, and the page itself where it scrolls sideways."""
        wide = self.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
        return ([f"the page scrolls by {wide}"] if wide > 0 else []) + self.evaluate(STICKING_OUT)

    def low_contrasts(self, least: float = 4.5) -> list[str]:
        """Texts whose contrast to what is behind them is below `least`."""
        return [f"{ratio:.2f}: {text}" for ratio, text in self.evaluate(CONTRASTS) if ratio < least]


@dataclass
class Browser:
    """A Chromium that is running; every page gets a fresh profile."""

    chromium: Chromium

    def open(self, path: Path, *, width: int = 1200, height: int = 900, dark: bool = False, fragment: str = "") -> Page:
        """Open a file in a window of that size. `fragment`: what stands behind # in its address."""
        address = path.resolve().as_uri() + (f"#{fragment}" if fragment else "")
        return self.visit(address, width=width, height=height, dark=dark, offline=True)

    def visit(self, address: str, *, width: int = 1200, height: int = 900, dark: bool = False, **more: Any) -> Page:
        """Open what a server on this machine has at an address. `more`: of Playwright's `new_context`."""
        context = self.chromium.new_context(
            viewport={"width": width, "height": height}, color_scheme="dark" if dark else "light", **more
        )
        context.set_default_timeout(300_000)  # a busy machine is slow; pytest ends what hangs
        page, own = Page(context.new_page()), address.partition("#")[0]
        page.sheet.on("console", lambda said: page.errors.append(said.text) if said.type == "error" else None)
        page.sheet.on("pageerror", lambda problem: page.errors.append(str(problem)))
        page.sheet.on("request", lambda asked: None if asked.url == own else page.requests.append(asked.url))
        page.sheet.goto(address)
        return page

    def close_pages(self) -> None:
        """Close every page that is open."""
        for context in self.chromium.contexts:
            context.close()


def find_chromium() -> str:
    """Where the system's Chromium is. Where it or its driver is missing the test ends here."""
    try:
        import playwright.sync_api  # noqa: F401
    except ImportError:
        _leave("needs Playwright, of the dev extra: pip install -c constraints.txt -e '.[dev]'")
    return next(filter(None, map(shutil.which, NAMES)), None) or _leave(f"needs Chromium; {HOW}")


def _leave(why: str) -> NoReturn:
    if os.environ.get("HYBRIDKV_BROWSER") == "required":
        pytest.fail(why)
    pytest.skip(why)


@pytest.fixture(scope="module")  # not longer: Playwright holds the thread's asyncio loop as long as it runs
def chromium() -> Iterator[Browser]:
    """Chromium, started once a module."""
    path = find_chromium()
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=path, args=FLAGS)
        try:
            yield Browser(running)
        finally:
            running.close()


@pytest.fixture
def browser(chromium: Browser) -> Iterator[Browser]:
    """`browser.open(path)` opens a page in Chromium; pages are closed when the test ends."""
    yield chromium
    chromium.close_pages()


def _position(at: tuple[float, float] | None) -> Any:
    return None if at is None else {"x": at[0], "y": at[1]}
