"""The page at / in a real browser: a chat that streams, and the cache that changes beside it."""

import re
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from browser import Browser, Page

from hybridkv import LLM
from server.running import SECONDS, Running, forward, serving

WIDTHS = (320, 390, 768, 1200, 1600)
IDLE = re.compile("Page map: 0 pages in use")
MILLISECONDS = 240_000.0  # that anything may take on a busy machine
LOG = " ".join(f"Day {day}: {3 + day * 11 % 17} miles, {20 + day * 13 % 60} crates." for day in range(1, 9))

HEAD = """
- banner:
  - heading "hybridkv" [level=1]
  - paragraph:
    - text: tiny
    - status: ready
  - term: reading
  - definition: 0 tokens/s
  - term: writing
  - definition: 0 tokens/s
  - term: requests
  - definition: 0 running, 0 waiting
  - term: cache
  - definition: /0 B of [\\d.]+ MiB in use/
"""
MAIN = """
- main:
  - region "Chat":
    - heading "Chat" [level=2]
    - button "Try a long text"
    - button "New chat"
    - log "Conversation"
    - textbox "Message"
    - spinbutton "Budget"
    - combobox "Policy"
    - spinbutton "Longest": "256"
    - spinbutton "Temperature"
    - button "Send"
  - group:
    - heading "Memory" [level=2]
    - paragraph: attention pages 0 B of 2.0 MiB
    - paragraph: 0 pages in use 0 kept for later turns 128 free
    - paragraph: /Gated DeltaNet state 0 B of [\\d.]+ [KM]iB/
    - paragraph: /0 states in use 0 kept for later turns \\d+ free/
    - figure /in use, the last minute/
  - group:
    - heading "Requests" [level=2]
    - list:
      - listitem: Nothing was asked yet.
  - group:
    - heading "Page map" [level=2]
    - 'img "Page map: 0 pages in use, 0 kept for later, 128 free"'
    - group: The same as a table
  - group:
    - heading "Events" [level=2]
    - list "Events, the latest first":
      - listitem: Nothing has happened yet.
  - group:
    - heading "What was kept of the prompt" [level=2]
    - status: Choose a request to see which tokens of its prompt the heads still hold.
"""


def expect(locator: Any) -> Any:
    """Playwright's own, which waits. It is looked for when a browser is there: elsewhere these tests are skipped."""
    from playwright.sync_api import expect as found

    found.set_options(timeout=MILLISECONDS)
    return found(locator)


@pytest.fixture
def smol_one(smol_llm: LLM) -> Iterator[Running]:
    """A server of the embedded model that nobody has asked anything."""
    with serving(smol_llm, names=("smol",)) as running:
        yield running
        running.idle()


@pytest.fixture
def tiny_new(tiny_llm: LLM) -> Iterator[Running]:
    """The same of the tiny model."""
    with serving(tiny_llm, names=("tiny",)) as running:
        yield running
        running.idle()


@pytest.fixture
def locked(tiny_llm: LLM) -> Iterator[Running]:
    """One that wants a key, of a model that keeps nothing."""
    tiny_llm.owner.run(lambda engine: engine.manager.reuse and engine.manager.reuse.forget())
    with serving(tiny_llm, names=("tiny",), api_keys=("sesame",)) as running:
        yield running
        running.idle()


def visit(browser: Browser, server: Running, **how: object) -> Page:
    """The page, once it follows the cache."""
    page = browser.visit(f"{server.address}/", **how)  # type: ignore[arg-type]
    expect(page.sheet.locator("#status")).to_have_text("ready")
    return page


def ask(page: Page, text: str, longest: int = 12, budget: int | None = None) -> None:
    page.fill("#text", text)
    page.fill("#longest", str(longest))
    page.fill("#temperature", "0")
    page.fill("#budget", "" if budget is None else str(budget))
    page.choose("#policy", "snapkv")  # which needs no measuring before
    page.click("#send")


def wait_for_end(page: Page) -> None:
    expect(page.sheet.locator("#log")).to_have_attribute("aria-busy", "false")


def check_quiet(page: Page, server: Running) -> None:
    """Nothing was said on the console, and nothing was asked of anybody else."""
    assert page.errors == []
    assert page.requests and all(
        url.startswith(f"{server.address}/") or url.startswith("data:") for url in page.requests
    )


def test_a_question_is_answered_and_the_cache_is_seen_to_change(smol_one: Running, browser: Browser) -> None:
    page = visit(browser, smol_one)
    sheet = page.sheet
    sheet.evaluate(WATCH_ANSWER)
    ask(page, f"{LOG} What is this a log of?", budget=80)
    expect(sheet.locator("#requests b")).to_have_count(1)
    expect(sheet.locator("#events .evicted")).to_have_count(1)
    wait_for_end(page)
    lengths = sheet.evaluate("window.lengths")
    assert len(lengths) >= 4 and lengths == sorted(lengths), "the answer came in one piece"
    took = plain(sheet.locator(".took").inner_text())
    assert re.search(r"read \d+ \(cached 0\)\s+wrote 12\s+[\d.]+ tokens/s\s+kept [\d.]+ MiB of [\d.]+ MiB", took), took
    # freed again when it ended, and the map has moved on
    expect(sheet.locator("#map")).to_have_attribute("aria-label", IDLE)
    labels = sheet.evaluate("window.labels")
    assert any(not label.startswith("Page map: 0 pages") for label in labels) and len(labels) >= 3
    expect(sheet.locator("#events .finished")).to_have_count(1)
    # the prompt, shaded by what was kept
    expect(sheet.locator("#kept-status")).to_contain_text("a head holds 80 on average")
    assert "crates." in page.text("#prompt") and len(shades(page)) > 2
    # another turn: all of the conversation is read, or taken from the cache
    ask(page, "Thank you.", longest=3)
    expect(sheet.locator(".took")).to_have_count(2)
    wait_for_end(page)
    numbers = [
        re.search(r"read (\d+) \(cached (\d+)\)", plain(text)) for text in sheet.locator(".took").all_inner_texts()
    ]
    (first, none), (second, cached) = (map(int, found.groups()) for found in numbers if found)
    assert second > first + 12 and none == 0 and cached >= 64
    expect(sheet.locator("#events .began").first).to_contain_text(f"{cached} of them from the cache")
    expect(sheet.locator("#requests .strip .reused")).to_have_count(1)
    expect(sheet.locator("#requests b")).to_have_count(2)
    check_quiet(page, smol_one)


WATCH_ANSWER = """() => {
  window.lengths = [];
  window.labels = [document.querySelector("#map").getAttribute("aria-label")];
  new MutationObserver(() => {
    const said = document.querySelectorAll("#log .said")[1]?.textContent.length ?? 0;
    if (said && said !== window.lengths.at(-1)) window.lengths.push(said);
  }).observe(document.querySelector("#log"), {subtree: true, childList: true, characterData: true});
  new MutationObserver(() => window.labels.push(document.querySelector("#map").getAttribute("aria-label")))
    .observe(document.querySelector("#map"), {attributes: true, attributeFilter: ["aria-label"]});
}"""


def shades(page: Page) -> set[str]:
    return set(
        page.evaluate("[...document.querySelectorAll('#prompt span')].map(s => s.style.getPropertyValue('--s'))")
    )


def plain(text: str) -> str:
    return text.replace("\u202f", " ").replace("\u00a0", " ").replace("\n", " ")


def test_stop_gives_the_pages_back(smol_one: Running, browser: Browser) -> None:
    page = visit(browser, smol_one)
    for stop in ("button", "Escape"):
        ask(page, "Tell me a very long story about the sea.", longest=1500)
        expect(page.sheet.locator(".said").last).not_to_have_text("")
        expect(page.sheet.locator("#map")).not_to_have_attribute("aria-label", IDLE)
        if stop == "button":
            page.click(".took button:text-is('Stop')")
        else:
            page.press("Escape")
        wait_for_end(page)
        expect(page.sheet.locator(".took").last).to_contain_text("stopped")
        expect(page.sheet.locator("#map")).to_have_attribute("aria-label", IDLE)
    expect(page.sheet.locator("#events .cancelled")).to_have_count(2)
    check_quiet(page, smol_one)


def test_a_keyboard_is_enough(tiny_new: Running, browser: Browser) -> None:
    page = visit(browser, tiny_new)
    sheet = page.sheet
    page.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    page.press("Enter")
    assert page.evaluate("document.activeElement.id") == "text"
    sheet.keyboard.type("first line")
    page.press("Shift+Enter")
    sheet.keyboard.type("second line")
    assert page.evaluate("document.querySelector('#text').value") == "first line\nsecond line"
    page.press("Enter")
    expect(sheet.locator(".user .said")).to_have_text("first line\nsecond line")
    wait_for_end(page)
    expect(sheet.locator("#requests button")).to_have_count(1)
    expect(sheet.locator("#prompt")).to_be_visible()  # it is asked for when the answer has ended
    reached = set()
    for _ in range(30):
        page.press("Tab")
        reached.add(page.evaluate("document.activeElement.id || document.activeElement.tagName"))
        if page.evaluate("document.activeElement !== document.body"):  # as it is between the end and the beginning
            assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid", reached
    assert {
        "log",
        "text",
        "budget",
        "policy",
        "longest",
        "temperature",
        "send",
        "SUMMARY",
        "events",
        "prompt",
    } <= reached
    sheet.focus("#requests button")
    page.press("Enter")
    assert sheet.locator("#requests button").get_attribute("aria-pressed") == "true"
    sheet.focus("#prompt")
    page.press("ArrowRight", "ArrowRight")
    expect(sheet.locator("#token")).to_contain_text("token 1")
    page.press("End")
    expect(sheet.locator("#token")).to_contain_text("kept by")
    sheet.focus("#map-card .table summary")
    page.press("Enter")
    assert "attention pages" in page.text("#map-table") and "Gated DeltaNet" in page.text("#map-table")
    check_quiet(page, tiny_new)


def test_a_key_is_asked_for_and_kept_in_the_tab_alone(locked: Running, browser: Browser) -> None:
    page = browser.visit(f"{locked.address}/")
    sheet = page.sheet
    expect(sheet.locator("#key-dialog")).to_be_visible()
    sheet.fill("#key", "wrong")
    page.press("Enter")
    expect(sheet.locator("#key-problem")).to_be_visible()
    sheet.fill("#key", "sesame")
    page.press("Enter")
    expect(sheet.locator("#status")).to_have_text("ready")
    expect(sheet.locator("header")).to_match_aria_snapshot(HEAD)
    expect(sheet.locator("main")).to_match_aria_snapshot(MAIN)
    assert page.evaluate("localStorage.length") == 0 and page.evaluate("document.cookie") == ""
    sheet.reload()
    expect(sheet.locator("#status")).to_have_text("ready")  # it is still known in this tab
    ask(page, "hello", longest=4)
    wait_for_end(page)
    expect(sheet.locator(".took")).to_contain_text("wrote 4")
    other = browser.visit(f"{locked.address}/")
    expect(other.sheet.locator("#key-dialog")).to_be_visible()  # and in no other
    assert all("401" in problem for problem in page.errors)  # the browser's own lines about what was refused


def test_what_a_model_or_a_person_says_is_text(tiny_new: Running, browser: Browser) -> None:
    page = visit(browser, tiny_new)
    ask(page, "<img src=x onerror=alert(1)><b>bold</b>", longest=2)
    wait_for_end(page)
    expect(page.sheet.locator("#prompt")).to_contain_text("<img src=x")
    assert page.evaluate("document.querySelectorAll('main img, main .said b, #prompt b').length") == 0
    check_quiet(page, tiny_new)


def test_errors_are_told_and_the_message_is_not_lost(tiny_new: Running, browser: Browser) -> None:
    page = visit(browser, tiny_new)
    ask(page, "x" * 600)
    expect(page.sheet.locator("#log .problem[role=alert]")).to_contain_text("prompt is too long")
    assert len(page.evaluate("document.querySelector('#text').value")) == 600
    ask(page, "short", longest=2)
    wait_for_end(page)
    expect(page.sheet.locator(".took").last).to_contain_text("wrote 2")
    assert len(page.errors) == 1 and "400" in page.errors[0]  # the browser's own line


@pytest.mark.parametrize(
    "dark", [pytest.param(False, id="light"), pytest.param(True, id="dark", marks=pytest.mark.slow)]
)
def test_it_fits_and_can_be_read_at_every_width(tiny_new: Running, browser: Browser, dark: bool) -> None:
    page = visit(browser, tiny_new, dark=dark, reduced_motion="reduce")
    ask(page, "abcdefghij" * 20, longest=6, budget=64)
    wait_for_end(page)
    expect(page.sheet.locator("#kept-status")).to_contain_text("on average")
    for width in WIDTHS:
        page.resize(width)
        if width in (320, 1200):  # the first that is narrow, and that is wide
            expect(page.sheet.locator("details.card:not([open])")).to_have_count(5 if width == 320 else 0)
        page.evaluate("document.querySelectorAll('details').forEach(d => { d.open = true; })")
        assert page.sticking_out() == [], width
        assert page.low_contrasts() == [], width
    assert page.evaluate("document.getAnimations().filter(a => a.playState === 'running').length") == 0
    check_quiet(page, tiny_new)


def test_a_new_chat_during_an_answer_begins_with_nothing(browser: Browser, tiny_new: Running) -> None:
    asked: list[list[Any]] = []
    begun, go_on = threading.Event(), threading.Event()

    def before(number: int) -> None:
        if number == 3:  # in the middle of the first answer
            begun.set()
            assert go_on.wait(SECONDS)

    page = visit(browser, tiny_new)
    page.sheet.on("request", lambda sent: asked.append(sent.post_data_json["messages"]) if sent.post_data else None)
    with forward(tiny_new.llm, before):
        ask(page, "one", longest=40)
        assert begun.wait(SECONDS)
        page.click("#new")
        go_on.set()
        wait_for_end(page)
    expect(page.sheet.locator("#send")).to_be_enabled()
    ask(page, "two")
    wait_for_end(page)
    assert [[each["content"] for each in said] for said in asked] == [["one"], ["two"]]
    assert page.sheet.locator("#log > *").count() == 2
