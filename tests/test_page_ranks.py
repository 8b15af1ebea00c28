"""`hybridkv inspect --tp` and `demo --tp`: the page of all heads, which is that of one rank."""

import re
from pathlib import Path

import pytest
import torch.distributed as dist
from tiny_ranks import saved_model

from cli.commands import short_prompt
from hybridkv import LLM, CacheConfig, SamplingParams
from hybridkv.cli import main
from hybridkv.commands import demo
from hybridkv.commands.inspect import look
from hybridkv.report.kept import Kept

pytestmark = pytest.mark.usefixtures("ready_ranks")
PROMPT = "The quick brown fox jumps over the lazy dog. " * 6
TINY = ("--device", "cpu", "--dtype", "float32", "--context", "1024")


def run(*words: object) -> None:
    with pytest.raises(SystemExit) as leaving:
        main([str(word) for word in words])
    assert not leaving.value.code and not dist.is_initialized()


@pytest.mark.parametrize(
    ("kind", "kv_heads", "size", "flags"),
    [
        ("qwen3_5", 4, 2, []),  # two KV heads a rank, between layers with a state
        ("qwen3_5", 1, 2, ["--bounded"]),  # one, which both have
        # two, each on two ranks
        pytest.param("llama", 2, 4, ["--decode-every", "2"], marks=pytest.mark.slow),
        pytest.param("llama", 2, 2, ["--scope", "layer"], marks=pytest.mark.slow),
        pytest.param("llama", 4, 4, ["--policy", "keydiff", "--no-full"], marks=pytest.mark.slow),
    ],
)
def test_the_page_over_ranks_is_that_of_one(
    kind: str, kv_heads: int, size: int, flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = saved_model(tmp_path / "model", kind, num_key_value_heads=kv_heads)
    asked = ("inspect", PROMPT, "-m", folder, *TINY, "--max-tokens", 5, "--budget", 40, "--window", 8, "--recent", 8)
    pages, said = [], []
    for tp in (1, size):
        run(*asked, *flags, "--tp", tp, "-o", tmp_path / f"{tp}.html")
        pages.append((tmp_path / f"{tp}.html").read_text(encoding="utf-8"))
        said.append(capsys.readouterr().err)
    assert pages[0] == pages[1] and said[0] == said[1] and "kept 40 of" in said[0]


def test_lists_of_all_heads_are_told_in_their_order_and_nothing_stays_held(tmp_path: Path) -> None:
    """Heads keep other entries each, so that an order that is not theirs is seen."""
    folder = saved_model(tmp_path / "model", "llama", num_key_value_heads=4)
    cache, found = CacheConfig(kv_dtype="f32", budget=40, window=8, recent=8), []
    for tp in (1, 2):
        with LLM(folder, "cpu", "float32", cache=cache, max_requests=1, max_context=512, tp=tp) as llm:
            tokens = llm.encode(PROMPT)
            params = SamplingParams(max_tokens=3, temperature=0.0)
            for _ in range(3):  # with one slot: what is held would keep the next one out
                page, request = look(llm, tokens, params, {}, cache.eviction, full=False)
            assert llm.manager.free_slots == 1 and not llm.engine.scheduler.held and request.finished
            assert llm.engine.schema.kv_bytes(len(tokens)) == sum(page.bytes_before)
            found.append(page)
    masks = found[0].masks
    assert masks.shape[1] == 4 and (masks == found[1].masks).all()
    assert len({head.tobytes() for layer in masks for head in layer}) == masks.shape[0] * masks.shape[1]
    assert found[0].bytes_after == found[1].bytes_after


@pytest.mark.slow
def test_the_demo_over_ranks_tells_and_shows_what_it_does_on_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = saved_model(tmp_path / "model", "llama", num_key_value_heads=2)
    monkeypatch.setattr(demo, "_prompt", short_prompt)
    pages: list[Kept] = []
    monkeypatch.setattr("hybridkv.report.page.write_page", lambda page, path: pages.append(page))
    said = []
    for tp in (1, 2):
        run("demo", "-m", folder, *TINY, "--budget", 100, "--tp", tp, "-o", tmp_path / "page.html")
        said.append(capsys.readouterr().out)
    assert "on rank 0 of 2" in said[1] and "on rank 0 of" not in said[0]
    tables = [re.findall(r"^\s*([\d.]+ of \d+) +([\d.]+ \w+) +[\d.]+ +(.*)$", text, re.MULTILINE) for text in said]
    assert len(tables[0]) == 4 and tables[0] == tables[1]
    one, two = pages
    assert (one.masks == two.masks).all() and one.lengths.mean() == 100 and one.layers == two.layers
    assert (one.answer, one.full_answer, one.bytes_before, one.bytes_after) == (
        two.answer, two.full_answer, two.bytes_before, two.bytes_after
    )  # fmt: skip
