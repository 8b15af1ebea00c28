"""The page of `hybridkv inspect`: its numbers are the cache's own, and nothing that a prompt says can act on it."""

import base64
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny

from engine.ascii_tokenizer import TEMPLATE, write_tokenizer
from hybridkv import LLM, CacheConfig, EvictionConfig, SamplingParams
from hybridkv.cli import main
from hybridkv.commands.inspect import look
from hybridkv.report.kept import Answer, Kept, positions_held, token_texts
from hybridkv.report.page import page
from hybridkv.text.tokenizer import Tokenizer

PROMPT = "The quick brown fox jumps over the lazy dog. " * 6
HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)><!-- &lt; ' \" \u2028 ]]>"


@pytest.fixture(scope="module", params=["llama", "qwen3_5"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("inspect") / request.param
    tiny.save(request.param, path)
    write_tokenizer(path, TEMPLATE)
    return path


def run(*arguments: object) -> int:
    with pytest.raises(SystemExit) as leaving:
        main([str(a) for a in arguments])
    return leaving.value.code  # type: ignore[return-value]


def embedded(html: str) -> dict[str, Any]:
    [found] = re.findall(r'<script type="application/json" id="data">(.*?)</script>', html, re.DOTALL)
    return json.loads(found)


def masks_of(found: dict[str, Any]) -> np.ndarray:
    """[layers, G, T]"""
    T = len(found["tokens"])
    return np.array(
        [
            [np.unpackbits(np.frombuffer(base64.b64decode(head), np.uint8))[:T] for head in layer]
            for layer in found["masks"]
        ],
        bool,
    )


def inspect(folder: Path, path: Path, *flags: object) -> dict[str, Any]:
    common = ("-m", folder, "--device", "cpu", "--dtype", "float32", "--context", 512, "--raw", "--max-tokens", 4)
    assert run("inspect", PROMPT, *common, "--window", 8, "--recent", 8, *flags, "-o", path) == 0
    return embedded(path.read_text(encoding="utf-8"))


def test_the_page_has_the_counts_of_the_cache(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = inspect(folder, tmp_path / "kept.html", "--budget", 40)
    assert str(tmp_path / "kept.html") in capsys.readouterr().out
    cache = CacheConfig(kv_dtype="f32", budget=40, window=8, recent=8)
    llm = LLM(folder, device="cpu", dtype="float32", cache=cache, max_requests=1, max_context=512)
    request = llm.engine.add(llm.encode(PROMPT), SamplingParams(max_tokens=1), hold=True)
    while not request.finished:
        llm.engine.step()
    positions = llm.manager.entry_positions(request.key, "attention")  # of a request that ended with its prompt
    T = request.prompt_tokens
    assert len(found["tokens"]) == T and "".join(found["tokens"]).removeprefix("<s>") == PROMPT
    masks = masks_of(found)
    schema = llm.manager.schema.streams[0]
    assert masks.shape == (len(schema.layers), schema.heads, T) and found["layers"] == list(schema.layers)
    for mask, kept in zip(masks.reshape(-1, T), positions, strict=True):
        assert np.flatnonzero(mask).tolist() == kept.tolist()
    assert found["counts"] == masks.sum((0, 1)).tolist() and np.mean(found["lengths"]) == 40
    assert sum(found["bytes_before"]) == llm.manager.schema.kv_bytes(T)
    assert sum(found["bytes_after"]) == llm.manager.held_bytes(request.key) < sum(found["bytes_before"])
    assert found["settings"]["budget"] == "40 tokens a stream" and found["settings"]["policy"] == "peak"


def test_positions_are_the_prompts_own_when_it_was_cut_more_than_once(folder: Path) -> None:
    cache = CacheConfig(kv_dtype="f32", budget=40, window=8, recent=8, bounded=True)
    llm = LLM(folder, device="cpu", dtype="float32", cache=cache, max_requests=1, max_context=512, step_tokens=64)
    tokens = llm.encode(PROMPT)
    found, request = look(llm, tokens, SamplingParams(max_tokens=3), {}, cache.eviction, full=False)
    assert len(request.evictions) > 2 and found.full_answer is None
    assert found.lengths.mean() == 40 and found.masks[:, :, -8:].all()
    assert llm.manager.free_slots == 1 and not llm.engine.scheduler.held
    held = llm.engine.add(tokens, SamplingParams(max_tokens=1), hold=True)
    while not held.finished:
        llm.engine.step()
    positions = llm.manager.entry_positions(held.key, "attention")
    found_held = positions_held(request.evictions, len(positions), request.prompt_tokens)
    assert [row.tolist() for row in found_held] == [p.tolist() for p in positions]


@pytest.mark.parametrize("flags", [[], ["--bounded"], ["--scope", "layer"], ["--decode-every", "2"]])
def test_both_answers_are_the_librarys_own(folder: Path, tmp_path: Path, flags: list[str]) -> None:
    found = inspect(folder, tmp_path / "kept.html", "--budget", 40, "--question", "Who jumps?", *flags)
    text = f"{PROMPT.rstrip()}\n\nWho jumps?"
    cache = CacheConfig(kv_dtype="f32", budget=40, window=8, recent=8)
    llm = LLM(folder, device="cpu", dtype="float32", cache=cache, max_requests=1, max_context=512)
    assert found["question"] == "Who jumps?" and len(found["tokens"]) == len(llm.encode(text))
    settings = {"bounded": True} if "--bounded" in flags else {"scope": "layer"} if "--scope" in flags else {}
    settings |= {"decode_every": 2} if "--decode-every" in flags else {}
    for name, eviction in (("full_answer", None), ("answer", EvictionConfig(40, window=8, recent=8, **settings))):
        [expected] = llm.generate([text], SamplingParams(max_tokens=4, temperature=0.0), eviction=eviction)
        assert found[name] == {"text": expected.text, "cut": expected.finish_reason == "length"}


def test_without_a_question_the_prompt_is_what_was_asked(folder: Path, tmp_path: Path) -> None:
    found = inspect(folder, tmp_path / "kept.html", "--budget", 40, "--no-full")
    assert found["question"] == PROMPT.strip() and found["full_answer"] is None and found["answer"]["text"]


def test_a_file_and_a_prompt_are_a_text_and_a_question(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "report.txt").write_text(PROMPT)
    common = ("-m", folder, "--device", "cpu", "--dtype", "float32", "--context", 512, "--max-tokens", 4)
    code = run("inspect", "Who?", "--prompt-file", tmp_path / "report.txt", *common, "-o", tmp_path / "kept.html")
    found = embedded((tmp_path / "kept.html").read_text(encoding="utf-8"))
    assert code == 0 and found["question"] == "Who?"
    assert "lazy dog.Who?" in "".join(found["tokens"])  # this tokenizer has no newline


def test_an_empty_question_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("inspect", "hi", "--question", "  ") == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "--question is empty" in err


def test_state_layers_have_their_own_bytes(folder: Path, tmp_path: Path) -> None:
    found = inspect(folder, tmp_path / "kept.html", "--budget", 40)
    if folder.name == "llama":
        assert found["states"] == []
        return
    llm = LLM(folder, device="cpu", dtype="float32", max_requests=1, max_context=512)
    [state] = found["states"]
    assert state["name"] == "Gated DeltaNet" and not set(state["layers"]) & set(found["layers"])
    assert state["layer_bytes"] * len(state["layers"]) == llm.manager.schema.slot_bytes


def test_a_budget_shared_unevenly_shows_each_heads_own_number(folder: Path, tmp_path: Path) -> None:
    flags = ("--policy", "snapkv", "--spread", "ada", "--pooling", "max")
    found = inspect(folder, tmp_path / "kept.html", "--budget", 40, *flags)
    lengths = np.array(found["lengths"])
    assert lengths.mean() <= 40 and (masks_of(found).sum(2) == lengths).all() and len(np.unique(lengths)) > 1
    assert found["settings"]["policy"] == "snapkv:pooling=max:spread=ada"


def test_a_budget_that_covers_the_prompt_keeps_all(folder: Path, tmp_path: Path) -> None:
    found = inspect(folder, tmp_path / "kept.html", "--budget", 500)
    assert masks_of(found).all() and found["bytes_before"] == found["bytes_after"]


def hostile_page() -> str:
    masks = np.ones((1, 1, 2), bool)
    said = Answer(HOSTILE)
    return page(Kept(HOSTILE, [HOSTILE, "<b>"], [0], masks, [64], [64], {HOSTILE: HOSTILE}, HOSTILE, said, said))


def test_hostile_text_stays_text() -> None:
    html = hostile_page()
    assert embedded(html)["tokens"] == [HOSTILE, "<b>"] and embedded(html)["answer"]["text"] == HOSTILE
    assert html.count("<script") == 2 == html.count("</script>")
    assert "<img" not in html and "<!--" not in html and "alert(1)</" not in html.replace("&lt;", "<lt;")
    script = html[html.rindex("<script>") :]
    for way_in in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("):
        assert way_in not in script


def test_the_page_needs_nothing_from_elsewhere_and_lets_no_other_script_run() -> None:
    html = hostile_page()
    head = re.sub(r"<title>.*</title>", "", html[: html.index("<body>")])
    assert not re.search(r"(?:src|href)\s*=|url\(|@import|https?://", head)
    body = html[html.index("<body>") :]
    assert not re.search(r"<(?:img|link|iframe|object|embed|base|form)\b", body) and "http" not in body
    [policy] = re.findall(r'Content-Security-Policy" content="([^"]*)"', html)
    assert "default-src 'none'" in policy and re.search(r"script-src 'sha256-[\w+/=]{44}'", policy)


def test_a_character_of_several_tokens_appears_once() -> None:
    class Bytes:
        joins_bytes = True

        def piece(self, token: int, skip_special: bool = True) -> bytes:
            return bytes([token])

    text = "naïve 🦊"
    found = token_texts(Bytes(), list(text.encode()))  # type: ignore[arg-type]
    assert "".join(found) == text and len(found) == len(text.encode()) and found[2] == ""


def test_tokens_without_a_tokenizer_show_their_numbers() -> None:
    none: Tokenizer | None = None
    assert token_texts(none, [7, 8]) == ["7 ", "8 "]


@pytest.mark.parametrize("kind", ["folder", "nowhere"])
def test_a_page_that_cannot_be_written_is_refused_before_the_model_is_loaded(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: LLM, *_: object, **__: object) -> None:
        raise AssertionError("the model was loaded")

    monkeypatch.setattr(LLM, "__init__", fail)
    path = tmp_path if kind == "folder" else tmp_path / "no" / "kept.html"
    assert run("inspect", "hi", "-o", path) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "--output" in err


def test_many_tokens_make_a_page_of_moderate_size() -> None:
    tokens, streams = 8192, 90
    masks = np.random.default_rng(0).random((streams // 3, 3, tokens)) < 0.25
    found = Kept("m", [" word"] * tokens, list(range(30)), masks, [1] * 30, [1] * 30, {})
    assert len(page(found)) < 600_000
