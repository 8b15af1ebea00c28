"""The page of `hybridkv plan --html` in a real browser: its numbers are those of `plan --json`, to the byte."""

import json
import random
import shlex
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
import tiny
import tiny_gguf
from browser import Browser, Page
from long_form import LONG

from hybridkv.cards import CARDS
from hybridkv.cli import main
from hybridkv.commands.plan_page import BUDGETS, SIZES, write_page
from hybridkv.models.known import KNOWN
from hybridkv.models.weight_forms import FORMS

GO = "(to) => { location.hash = to; dispatchEvent(new HashChangeEvent('hashchange')); }"
CELLS = "[...document.querySelectorAll('[data-cell]')].map((e) => [e.dataset.cell, Number(e.dataset.value)])"
VALUES = """() => Object.fromEntries([...document.querySelectorAll("[id][data-value]")].map(
  (e) => [e.id, Number(e.dataset.value)]))"""


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_page(tmp_path_factory.mktemp("plan") / "plan.html")


def numbers(capsys: pytest.CaptureFixture[str], words: list[str]) -> dict[str, Any]:
    with pytest.raises(SystemExit) as leaving:
        main([*words, "--json"])
    out, err = capsys.readouterr()
    assert leaving.value.code == 0, (words, err)
    return json.loads(out)


def check(page: Page, capsys: pytest.CaptureFixture[str]) -> None:
    """What is shown is what the command shown prints."""
    words = shlex.split(page.text("#command"))
    assert words[:2] == ["hybridkv", "plan"]
    found = numbers(capsys, words[1:])
    [choice] = found["choices"]
    held = {f"host-{'whole' if k['budget'] is None else 'kept'}": k["conversations"] for k in found["host_holds"]}
    if choice["refused"]:  # the page shows what it would be
        held = {name: n for name, n in page.evaluate(VALUES).items() if name.startswith("host-")}
    assert page.evaluate(VALUES) == held | {
        "part-weights": found["weights_bytes"],
        "part-pages": choice["kv_bytes"],
        "part-state": choice["state_bytes"],
        "part-checkpoints": choice["checkpoint_bytes"],
        "part-staging": choice["staging_bytes"],
        "part-tables": choice["table_bytes"],
        "part-workspace": choice["workspace_bytes"],
        "part-reserve": found["reserve_bytes"],
        "total": choice["total_bytes"],
        "usable": found["memory_bytes"],
        "longest": choice["longest_context"],
        "most": choice["most_requests"],
        "cache": choice["cache_bytes"],
        "room": max(found["memory_bytes"] - found["weights_bytes"], 0),
    }, words
    assert page.evaluate("document.getElementById('verdict').className") == ("yes" if choice["fits"] else "no")
    said, refused, why = page.text("#verdict"), choice["refused"], found["weights_why"]
    assert ("Not possible" in said) == (refused is not None) and (refused or "") in said, (words, said)
    assert (why is not None and not refused) == ("kept in" in said) and (refused or why or "") in said, (words, said)


def random_settings(rng: random.Random) -> dict[str, Any]:
    name = rng.choice(list(KNOWN))
    longest = KNOWN[name]["max_position_embeddings"]
    found = {
        "model": name,
        "card": rng.choice([*(card.name for card in CARDS), *(f"{size}GB" for size in SIZES)]),
        "weights": rng.choice(FORMS),
        "kv": rng.choice(["f32", "bf16", "fp8"]),
        "context": rng.choice([rng.randint(1, longest), 1 << rng.randint(0, longest.bit_length() - 1), longest]),
        "requests": rng.choice([1, 1, 2, 3, rng.randint(1, 64), rng.randint(1, 4096)]),
    }
    if rng.random() < 0.5 and not name.startswith("DeepSeek"):
        found["budget"] = rng.choice([*BUDGETS, rng.randint(64, 40000)])
        if rng.random() < 0.5:
            found["bounded"] = 1
    return found


@pytest.mark.slow
@pytest.mark.long
def test_its_numbers_are_those_of_the_command(
    browser: Browser, written: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """For settings at random; in the long form so many that every model, card, form, KV dtype and budget comes up."""
    page, rng = browser.open(written), random.Random(13)
    check(page, capsys)
    for _ in range(60 if LONG else 15):
        settings = random_settings(rng)
        page.evaluate(
            "(to) => { location.hash = to; dispatchEvent(new HashChangeEvent('hashchange')); }", urlencode(settings)
        )
        check(page, capsys)
    assert not page.errors and not page.requests


def test_a_wrong_rule_would_be_seen(
    browser: Browser, written: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = written.read_text()
    assert '"PROMPT_LOGIT_BYTES": 24' in text
    (tmp_path / "wrong.html").write_text(text.replace('"PROMPT_LOGIT_BYTES": 24', '"PROMPT_LOGIT_BYTES": 25'))
    with pytest.raises(AssertionError):
        check(browser.open(tmp_path / "wrong.html", fragment="requests=8"), capsys)


def test_controls_and_keyboard(browser: Browser, written: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = browser.open(written)
    page.choose("#model", "Llama-3.1-8B")
    page.choose("#card", "H100 80GB")
    page.choose("#weights", "fp8")
    page.choose("#kv", "fp8")
    page.choose("#budget", "1024")
    page.sheet.check("#bounded")
    page.fill("#context", "64k")
    page.fill("#requests", "17")
    check(page, capsys)
    command = page.text("#command")
    assert command == (
        "hybridkv plan Llama-3.1-8B --card 'H100 80GB' --weights fp8 --kv-dtype fp8 --context 64k --requests 17 "
        "--budget 1024 --bounded"
    )
    page.sheet.focus("#context-slide")
    page.press("ArrowRight")
    assert "--context 96k" in page.text("#command")
    page.press("End")
    assert "--context 128k" in page.text("#command")
    check(page, capsys)
    page.fill("#context", "nonsense")
    assert page.evaluate("document.getElementById('context').getAttribute('aria-invalid')") == "true"
    check(page, capsys)  # what was there stays
    page.sheet.focus("#forms button")
    page.press("Tab", "Enter")  # the next cell
    assert "--weights f32 --kv-dtype bf16" in page.text("#command")
    assert page.evaluate("document.activeElement.dataset.cell") == "f32 bf16"
    check(page, capsys)
    page.choose("#model", "DeepSeek-V4-Flash")
    assert not page.visible("#budget-field") and "--budget" not in page.text("#command")
    check(page, capsys)
    assert not page.errors


@pytest.mark.slow
def test_the_address_holds_what_was_chosen(browser: Browser, written: Path) -> None:
    page = browser.open(written, fragment="model=Qwen3-8B&card=24GB&weights=q6_k&context=16k&requests=4&kv=fp8")
    command = page.text("#command")
    assert command == "hybridkv plan Qwen3-8B --card 24GB --weights q6_k --kv-dtype fp8 --context 16k --requests 4"
    again = browser.open(written, fragment=page.evaluate("location.hash.slice(1)"))
    assert again.text("#command") == command
    for name in ("__proto__", "constructor", "toString"):
        odd = browser.open(written, fragment=f"model={name}&card={name}&weights={name}&kv={name}")
        assert "--weights" in odd.text("#command") and odd.text("#verdict") and not odd.errors
    wrong = browser.open(written, fragment="model=nothing&card=%3Cb%3E&context=-4&requests=zz&kv=int2&budget=1")
    assert "Qwen3.5-27B" in wrong.text("#command") and not wrong.errors


def test_every_cell_is_the_longest_context_of_its_form(
    browser: Browser, written: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = browser.open(written, fragment="model=Qwen3.5-9B&card=RTX+5090&context=8k&requests=2")
    cells = page.evaluate(
        "[...document.querySelectorAll('[data-cell]')].map((e) => [e.dataset.cell, +e.dataset.value])"
    )
    assert len(cells) == 3 * (len(FORMS) - 1)  # it has no experts
    for cell, longest in cells:
        form, kv = cell.split()
        words = f"plan Qwen3.5-9B --card 5090 --context 8k --requests 2 --weights {form} --kv-dtype {kv}"
        assert numbers(capsys, words.split())["choices"][0]["longest_context"] == longest


@pytest.mark.slow
@pytest.mark.parametrize("card", ["T4", "RTX 3090", "RTX 4090"])
def test_cells_are_of_what_the_card_can_do(
    browser: Browser, written: Path, card: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Forms without kernels there have the bytes of bf16, and a KV dtype that is refused has no context at all."""
    page = browser.open(written, fragment=urlencode({"model": "Qwen3-1.7B", "card": card, "context": "4k"}))
    for cell, longest in page.evaluate(CELLS):
        form, kv = cell.split()
        words = f"plan Qwen3-1.7B --context 4k --weights {form} --kv-dtype {kv}".split() + ["--card", card]
        found = numbers(capsys, words)["choices"][0]
        assert found["longest_context"] == longest and (longest == 0) == (found["refused"] is not None)
        page.evaluate(GO, urlencode({"model": "Qwen3-1.7B", "card": card, "context": "4k", "weights": form, "kv": kv}))
        check(page, capsys)


@pytest.mark.slow
@pytest.mark.parametrize("width", [320, 390, 820, 1200])
@pytest.mark.parametrize("dark", [False, True])
def test_it_fits_every_window_and_can_be_read(browser: Browser, written: Path, width: int, dark: bool) -> None:
    for fragment in (
        "",
        "model=DeepSeek-V4-Pro&card=8GB&context=1M&requests=4096",
        "model=SmolLM2-135M-Instruct&card=B200",
        "model=Qwen3.5-9B&card=T4&weights=q4_k",
        "model=Qwen3.5-9B&card=T4&weights=q4_k&kv=fp8",
    ):
        page = browser.open(written, width=width, dark=dark, fragment=fragment)
        assert not page.sticking_out() and not page.low_contrasts() and not page.errors


def test_a_model_that_is_named_is_shown_first(
    browser: Browser, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A GGUF file's own weights, and a name that could end the script."""
    path = tmp_path / "a <!--<script> 'model'.gguf"
    tiny_gguf.write_gguf_llama(tiny.build("llama"), path, q8=True)
    page = browser.open(write_page(tmp_path / "plan.html", str(path)))
    assert page.evaluate("document.getElementById('weights').value") == "file"
    check(page, capsys)
    assert page.evaluate("document.querySelectorAll('#model option').length") == len(KNOWN) + 1
    assert not page.errors and not page.requests


def test_where_it_cannot_be_written_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as leaving:
        main(["plan", "--html", str(tmp_path / "nowhere" / "plan.html")])
    assert leaving.value.code == 2 and "cannot be written" in capsys.readouterr().err
