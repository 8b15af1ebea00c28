"""The page of `hybridkv inspect` as people meet it: in a browser, with pointer and keyboard, wide and narrow."""

import shlex
from pathlib import Path

import numpy as np
import pytest
import tiny
from browser import Browser, Page
from long_form import spread

from engine.ascii_tokenizer import TEMPLATE, write_tokenizer
from hybridkv.cli import main
from hybridkv.report.kept import Answer, Kept, State
from hybridkv.report.page import write_page

LAYERS, HEADS, TOKENS = 30, 3, 400
WIDTHS = (320, 360, 390, 414, 1200)
WORDS = [" the", " ship", " left", " harbour", ".", "\n", " Wheatear", " Canyon"]
FULL = Answer("It is the canyon, which is seven kilometres long.")
SHORT = Answer("It is the reef on the bank", cut=True)


def example(tokens: int = TOKENS, **change: object) -> Kept:
    """30 layers of 3 heads that keep about a third of the tokens. Most tokens are kept by somebody, the last by all."""
    rng = np.random.default_rng(0)
    masks = rng.random(tokens) + rng.random((LAYERS, HEADS, tokens)) > 1.2
    masks[:, :, -16:] = True
    masks[:, :, 1:4] = False  # some tokens are kept by none
    parts = dict(
        model="Some-Model-With-A-Long-Name-135M-Instruct.Q4_1",
        texts=[WORDS[i % len(WORDS)] for i in range(tokens)],
        layers=list(range(LAYERS)),
        masks=masks,
        bytes_before=[4816896] * LAYERS,
        bytes_after=[1572864] * LAYERS,
        settings={"budget": "130 tokens a stream", "policy": "snapkv"},
        question="What was found?",
        answer=SHORT,
        full_answer=FULL,
    )
    return Kept(**parts | change)  # type: ignore[arg-type]


@pytest.fixture
def kept() -> Kept:
    return example()


def show(browser: Browser, folder: Path, kept: Kept, **how: object) -> Page:
    write_page(kept, folder / "kept.html")
    return browser.open(folder / "kept.html", **how)  # type: ignore[arg-type]


def plain(text: str) -> str:
    """Narrow and fixed spaces as plain ones."""
    return text.replace("\u202f", " ").replace("\u00a0", " ")


def at(page: Page, stream: int, token: int, tokens: int = TOKENS) -> tuple[float, float]:
    """Pixels on the map."""
    x, y, height = page.evaluate(
        "([s, share]) => [left + share * (canvas.clientWidth - left - right), yOf(s), rowHeight]",
        [stream, (token + 0.5) / tokens],
    )
    return x, y + height / 2


def in_window(page: Page, selector: str) -> bool:
    """Whether all of an element is inside the window as it is scrolled now."""
    box = page.evaluate(f"document.querySelector('{selector}').getBoundingClientRect().toJSON()")
    return box["top"] >= 0 and box["bottom"] <= page.evaluate("innerHeight") and box["height"] > 0


def test_the_question_and_both_answers_stand_side_by_side(browser: Browser, tmp_path: Path, kept: Kept) -> None:
    page = show(browser, tmp_path, kept)
    assert page.text("#question") == "What was found?"
    assert page.texts(".answer") == [FULL.text, SHORT.text]
    headings = [plain(text) for text in page.texts("#pair h3")]
    n = int(kept.lengths.mean().round())
    assert headings == [
        "With everything kept: 400 tokens a stream, 137.8 MiB",
        f"With this budget: {n} tokens a stream, 45.0 MiB",
    ]
    assert page.texts(".answer ins") == ["canyon, which is seven kilometres long.", "reef on the bank"]
    assert page.texts("#pair article p.quiet") == ["Cut here; the model had more to say."]
    left, right = page.evaluate(
        "[...document.querySelectorAll('#pair article')].map((e) => e.getBoundingClientRect().top)"
    )
    assert left == right and in_window(page, "#answers") and not page.errors and not page.requests


def test_equal_answers_say_so_and_one_answer_stands_alone(browser: Browser, tmp_path: Path) -> None:
    page = show(browser, tmp_path, example(answer=FULL))
    assert "the same" in page.text("#parting") and not page.texts(".answer ins")
    page = show(browser, tmp_path, example(full_answer=None))
    assert page.texts(".answer") == [SHORT.text] and page.text("#parting") == ""
    page = show(browser, tmp_path, example(question="long " * 400))
    assert len(page.text("#question")) < 500 and "\u2026" in page.text("#question")


def test_a_stream_is_explained_where_the_word_first_stands(browser: Browser, tmp_path: Path) -> None:
    page = show(browser, tmp_path, example(tokens=2345))
    words = plain(page.text("body"))
    first = words.index("stream")
    assert "Each KV head of each attention layer keeps its own list of tokens" in words[:first]
    assert "here 90 streams, from 30 layers of 3 heads" in words
    assert "3.1× smaller" in words and "2 345 tokens" in words


def test_the_tooltip_follows_the_pointer(browser: Browser, tmp_path: Path, kept: Kept) -> None:
    page = show(browser, tmp_path, kept, height=1100)
    assert not page.visible("#tip")
    for stream, token in ((0, 70), (46, 174), (89, TOKENS - 1)):
        page.hover("#map", at(page, stream, token))
        layer, head = divmod(stream, HEADS)
        verdict = "kept here" if kept.masks[layer, head, token] else "dropped here"
        lines = plain(page.text("#tip")).split("\n")
        assert lines[0] == f"Layer {layer}, head {head}"
        shown = WORDS[token % len(WORDS)].replace("\n", "\\n")
        assert lines[1] == f'"{shown}" at position {token}'
        assert lines[2] == f"{verdict}, kept by {kept.counts[token]} of 90 streams"
        assert in_window(page, "#tip")
        said = plain(page.text("#token"))
        assert f"Layer {layer}, head {head}" in said and f"position {token} " in said and verdict in said
        assert in_window(page, "#token")
    page.hover("#map", (10, 40))  # left of the rows: the row's own number
    assert "keeps" in page.text("#tip")
    page.hover("h1")
    assert not page.visible("#tip") and not page.errors


def test_pointing_at_a_word_says_who_kept_it_without_scrolling(browser: Browser, tmp_path: Path, kept: Kept) -> None:
    page = show(browser, tmp_path, kept, height=700)
    page.hover("#text span:nth-child(72)")
    assert f"kept by {kept.counts[71]} of 90 streams" in plain(page.text("#token")) and in_window(page, "#token")


def test_the_keyboard_walks_through_streams_and_tokens(browser: Browser, tmp_path: Path, kept: Kept) -> None:
    page = show(browser, tmp_path, kept)
    page.press("Tab")
    assert page.evaluate("document.activeElement.id") == "map"
    assert page.visible("#tip") and "All streams" in page.text("#tip")
    page.press("ArrowDown", "ArrowDown", "ArrowDown", "ArrowDown")
    assert page.evaluate("location.hash") == "#layer=1&head=0" and page.text("#tip").startswith("Layer 1, head 0")
    assert "Layer 1, head 0 keeps" in page.text("#status")
    for keys, position in (
        (["ArrowRight"], 1),
        (["PageDown", "PageDown"], 201),
        (["PageUp"], 101),
        (["Shift+ArrowLeft"], 91),
        (["End"], TOKENS - 1),
        (["Home"], 0),
    ):
        page.press(*keys)
        said = f"position {position}"
        assert said in plain(page.text("#tip")) and said in plain(page.text("#token"))
        assert page.evaluate("[...document.querySelectorAll('#text .here')].map((e) => e.token)") == [position]
    page.press("ArrowUp")
    assert page.evaluate("location.hash") == "#layer=0&head=2"
    page.press("Escape")
    assert (
        not page.visible("#tip") and page.evaluate("location.hash") == "" and "All 90 streams" in page.text("#status")
    )
    page.press("ArrowUp", "Tab")
    assert page.evaluate("location.hash") == "#layer=29&head=2"  # up from all of them is the last
    assert page.evaluate("document.activeElement.id") == "layer" and not page.visible("#tip") and not page.errors
    live = "[...document.querySelectorAll('[aria-live=polite]')].map((e) => e.id)"
    assert page.evaluate(live) == ["status", "token"]


def test_an_address_opens_one_stream_and_a_click_chooses_another(browser: Browser, tmp_path: Path, kept: Kept) -> None:
    page = show(browser, tmp_path, kept, fragment="layer=15&head=1")
    assert page.text("#status").startswith("Layer 15, head 1 keeps")
    shaded = "[...document.querySelectorAll('#text span')].map((e) => e.style.getPropertyValue('--s') === '100')"
    assert page.evaluate(shaded) == kept.masks[15, 1].tolist()
    page.click("#map", at(page, 61, 300))
    assert page.evaluate("location.hash") == "#layer=20&head=1" and page.visible("#tip")
    assert page.evaluate("here") == 300
    page.choose("#head", "-1")
    assert page.evaluate("location.hash") == "#layer=20" and page.text("#status").startswith("The 3 heads of layer 20")
    page = show(browser, tmp_path, kept, fragment="layer=99&head=x")
    assert page.text("#status").startswith("All 90 streams") and not page.errors


@spread("width, tokens", (320, 1200), (1, 7, 310, 2345))
def test_the_axis_has_round_numbers(browser: Browser, tmp_path: Path, tokens: int, width: int) -> None:
    page = show(browser, tmp_path, example(tokens=tokens), width=width)
    ticks = [int(text.replace("\u202f", "")) for text in page.texts("#axis span")]
    assert ticks[0] == 0 and ticks[-1] < tokens
    if tokens == 1:
        assert ticks == [0]
        return
    [step] = {b - a for a, b in zip(ticks, ticks[1:])} or {None}
    if step is not None:
        assert str(step).rstrip("0") in ("1", "2", "5")
        assert tokens - ticks[-1] <= step  # they go on to the end
    boxes = page.evaluate("[...document.querySelectorAll('#axis span')].map((e) => e.getBoundingClientRect().toJSON())")
    assert all(a["right"] < b["left"] for a, b in zip(boxes, boxes[1:]))
    marks = page.evaluate("[...document.querySelectorAll('#axis i')].map((e) => parseFloat(e.style.left))")
    assert marks == pytest.approx([at(page, 0, tick, tokens)[0] for tick in ticks], abs=0.01)
    assert step is not None or tokens < 100


def test_differences_are_seen_where_nearly_every_token_is_kept_by_somebody(browser: Browser, tmp_path: Path) -> None:
    masks = np.random.default_rng(1).random((LAYERS, HEADS, TOKENS)) < 0.33  # counts are close together, about 30 of 90
    page = show(browser, tmp_path, example(masks=masks))
    counts = masks.sum((0, 1))
    knots = np.sort(counts)[[int(share * (TOKENS - 1)) for share in (0.05, 0.25, 0.5, 0.75, 0.95)]]
    assert (counts > 0).all() and (np.diff(knots) > 0).all()
    script = "[...document.querySelectorAll('#text span')].map((e) => +e.style.getPropertyValue('--s'))"
    shades = np.array(page.evaluate(script))
    assert np.abs(shades - np.interp(counts, knots, [0, 25, 50, 75, 100])).max() <= 0.5
    assert all((shades >= 25 * k).sum() > 0.2 * (4 - k) * TOKENS for k in range(4))  # all of the scale is used
    shown = [str(knot) for knot in knots]
    assert page.texts("#scale .steps span") == [f"\u2264{shown[0]}", *shown[1:-1], f"\u2265{shown[-1]}"]
    assert plain(page.text("#scale")).replace("\n", " ").endswith("of 90 streams grey: by none")
    page.choose("#layer", "4")
    assert page.texts("#scale .steps span")[0] == "0" and "of 3 heads" in plain(page.text("#scale"))
    page.choose("#head", "1")
    assert page.texts("#scale .steps span") == ["kept"] and "grey: dropped" in page.text("#scale")


def test_an_even_spread_is_one_row_and_an_uneven_one_a_row_for_each_layer(browser: Browser, tmp_path: Path) -> None:
    masks = np.zeros((LAYERS, HEADS, TOKENS), bool)
    masks[:, :, :130] = True
    page = show(browser, tmp_path, example(masks=masks))
    assert [plain(text) for text in page.texts("#bytes tbody td:not(.share)")] == [
        "each of 30",
        "130",
        "4.6 MiB",
        "1.5 MiB",
    ]
    assert "137.8 MiB" in plain(page.text("#bytes tfoot")) and "45.0 MiB" in plain(page.text("#bytes tfoot"))
    masks[3, 1, 130:200] = True
    after = [1572864] * LAYERS
    after[3] += 65536
    page = show(browser, tmp_path, example(masks=masks, bytes_after=after))
    assert len(page.texts("#bytes tbody tr")) == LAYERS and "130 to 200" in plain(
        page.text("#bytes tbody tr:nth-child(4)")
    )
    page.click("#bytes tbody tr:nth-child(4) button")
    assert page.evaluate("location.hash") == "#layer=3" and "on average" in page.text("#lead") and not page.errors


def test_state_layers_are_shown_and_counted(browser: Browser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "qwen3_5"
    of_config, of_model, about = tiny.KINDS["qwen3_5"]
    longer = {**about, "num_hidden_layers": 8, "full_attention_interval": 4}  # runs of such layers
    monkeypatch.setitem(tiny.KINDS, "qwen3_5", (of_config, of_model, longer))
    tiny.save("qwen3_5", folder)
    write_tokenizer(folder, TEMPLATE)
    prompt, path = "The quick brown fox jumps over the lazy dog. " * 6, tmp_path / "kept.html"
    flags = shlex.split("--device cpu --dtype float32 --context 512 --max-tokens 4 --window 8 --recent 8 --budget 40")
    with pytest.raises(SystemExit) as leaving:
        main(["inspect", prompt, "-m", str(folder), *flags, "--question", "What does it do?", "-o", str(path)])
    assert leaving.value.code == 0
    page = browser.open(path)
    kv_before, kv_after, state = (
        320.0,
        64.0,
        6 * 15.0,
    )  # KiB; a layer's state: a matrix of each head and a convolution's tail
    rows = [plain(text).split() for text in page.texts("#bytes tr.fixed")]
    assert rows == [["each", "of", "6", "state", "15.0", "KiB", "15.0", "KiB"]]
    foot = [plain(text).split() for text in page.texts("#bytes tfoot tr")]
    assert foot == [
        ["KV", "320.0", "KiB", "64.0", "KiB"],
        ["state", "90.0", "KiB", "90.0", "KiB"],
        ["all", "410.0", "KiB", "154.0", "KiB"],
    ]
    assert "Layers 0 to 2, 4 to 6 are Gated DeltaNet layers" in page.text("#state-note")
    assert "does not grow" in page.text("#state-note")
    tiles = plain(page.text("#tiles"))
    assert f"{kv_before / kv_after:.1f}× smaller" in tiles
    assert f"{(kv_before + state) / (kv_after + state):.1f}× smaller" in tiles
    assert page.text("#question") == "What does it do?" and len(page.texts(".answer")) == 2
    for width in WIDTHS:
        page.resize(width)
        assert page.sticking_out() == []
    assert not page.errors


@spread("uneven, width", [pytest.param(False, id="even"), pytest.param(True, id="uneven")], WIDTHS)
def test_nothing_sticks_out(browser: Browser, tmp_path: Path, width: int, uneven: bool) -> None:
    kept = example(states=(State("Gated DeltaNet", list(range(30, 78)), 3 << 20),))
    if uneven:
        kept.masks[:, 0, 100:300] = True
    long = "x" * 300
    kept.settings.update({long: long})
    page = show(browser, tmp_path, kept, width=width)
    assert page.sticking_out() == []
    page.press("Tab", "End", "ArrowUp")
    assert page.visible("#tip") and page.sticking_out() == []
    wider = """[...document.querySelectorAll(".card *:not(.unseen)")].filter(
      (e) => e.scrollWidth > e.clientWidth + 1 && !e.closest("#text") && getComputedStyle(e).display !== "inline"
    ).map((e) => e.outerHTML.slice(0, 80))"""
    assert page.evaluate(wider) == []  # nor does anything leave its own box
    outside = """[...document.querySelectorAll(".card")].flatMap((card) => {
      const edge = card.getBoundingClientRect().right - parseFloat(getComputedStyle(card).paddingRight);
      return [...card.querySelectorAll(":scope > *, td")].filter((e) => e.getBoundingClientRect().right > edge + 0.5);
    }).map((e) => e.outerHTML.slice(0, 80))"""
    assert page.evaluate(outside) == []  # or runs into its card's margin


@pytest.mark.parametrize(
    "dark", [pytest.param(False, id="light"), pytest.param(True, id="dark", marks=pytest.mark.slow)]
)
def test_text_has_enough_contrast_in_both_themes(browser: Browser, tmp_path: Path, kept: Kept, dark: bool) -> None:
    page = show(browser, tmp_path, kept, dark=dark)
    for keys in ("Tab", "ArrowDown"):  # all streams, then one; with the tooltip
        page.press(keys)
        assert page.visible("#tip") and page.low_contrasts() == []
    page.evaluate("document.documentElement.style.setProperty('--quiet', '#777')")
    assert page.low_contrasts()  # the check bites


def test_hostile_text_does_nothing_in_a_browser(browser: Browser, tmp_path: Path) -> None:
    hostile = "</script><script>window.bad = 1</script><img src=x onerror='bad = 2'>\u202e\u2028 {{7*7}}"
    masks = np.ones((1, 1, 2), bool)
    kept = Kept(
        hostile, [hostile, ""], [0], masks, [64], [64], {hostile: hostile}, hostile, Answer(hostile), Answer(hostile)
    )
    page = show(browser, tmp_path, kept)
    page.press("Tab", "ArrowDown", "ArrowRight")
    assert "a part of a character" in page.text("#tip")
    page.press("Home")
    assert page.evaluate("window.bad") is None and page.evaluate("document.images.length") == 0
    assert page.evaluate("document.querySelector('#question').textContent") == hostile
    assert not page.errors and not page.requests


def test_the_page_is_about_a_hundred_kilobytes(tmp_path: Path) -> None:
    write_page(example(tokens=3000), tmp_path / "kept.html")
    assert (tmp_path / "kept.html").stat().st_size < 120_000
