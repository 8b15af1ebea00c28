"""Documents: read and cut once, asked any number of times, from any thread, saved and loaded."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny

from engine.ascii_tokenizer import TEMPLATE, write_tokenizer
from engine.driving import assert_nothing_held
from hybridkv import LLM, CacheConfig, SamplingParams
from hybridkv.document import Document
from hybridkv.engine.replay import ReplayPart
from hybridkv.errors import HybridKVError, RequestError

GREEDY = SamplingParams(max_tokens=8, temperature=0.0)
SYSTEM = "Be brief."
TEXT = "It was a bright cold day in April, and the clocks were striking thirteen. " * 3
QUESTIONS = ["Which month?", "What struck?", "And the weather?"]
KINDS = ("llama", "qwen3_5")


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`folder_of("llama")`: a tiny model with a character tokenizer and a chat template, or without the template."""
    folders: dict[Any, Path] = {}

    def build(kind: str, template: str | None = TEMPLATE) -> Path:
        if (kind, template) not in folders:
            folders[kind, template] = folder = tmp_path_factory.mktemp(kind)
            tiny.save(kind, folder)
            write_tokenizer(folder, template)
        return folders[kind, template]

    return build


@pytest.fixture(scope="module")
def model(folder_of: Callable[..., Path]) -> Callable[..., LLM]:
    """`model("llama")`: opened once for each set of arguments; `number` tells several alike apart."""
    opened: dict[Any, LLM] = {}

    def build(kind: str = "llama", number: int = 0, template: str | None = TEMPLATE, **more: Any) -> LLM:
        key = (kind, number, template, *sorted(more.items()))
        if key not in opened:
            cache = CacheConfig(page_size=8, kv_dtype=more.pop("kv_dtype", "f32"))
            more = {"max_requests": 4, "max_context": 1024, "step_tokens": 64, "cache": cache, **more}
            opened[key] = LLM(folder_of(kind, template), device="cpu", dtype="float32", **more)
        return opened[key]

    return build


def answers(document: Document, questions: list[str] = QUESTIONS) -> list[list[int]]:
    return [answer.token_ids for answer in document.generate(questions, GREEDY)]


def entries(llm: LLM, document: Document) -> list[np.ndarray]:
    """Positions of the entries that each stream of the document holds."""
    return llm.manager.entry_positions(document.held().key, "attention")


# ---- what is kept and what is answered


@pytest.mark.parametrize("kind", KINDS)
def test_at_ratio_one_answers_are_those_of_a_chat(kind: str, model: Callable[..., LLM]) -> None:
    llm = model(kind)
    with llm.compress(TEXT, ratio=1, system=SYSTEM) as document:
        assert document.stats["kept_tokens"] == document.stats["tokens"] == len(document.tokens)
        for question, found in zip(QUESTIONS, answers(document), strict=True):
            said = [
                {"role": "system", "content": SYSTEM},
                {"role": "user", "content": f"{TEXT.strip()}\n\n{question}"},
            ]
            assert found == llm.chat(said, GREEDY).token_ids
    assert_nothing_held(llm.engine)


@pytest.mark.parametrize("policy", ("replay", "replay:spread=even:chunk=64", "keydiff", "auto", "streaming"))
@pytest.mark.parametrize("kind", KINDS)
def test_the_budget_is_kept_and_answers_go_on_in_it(kind: str, policy: str, model: Callable[..., LLM]) -> None:
    llm = model(kind)
    with llm.compress(TEXT, ratio=4, policy=policy) as document:
        stats = document.stats
        budget = round(stats["tokens"] / 4)
        assert budget - 1 <= stats["kept_tokens"] <= budget
        assert stats["kv_bytes_kept"] < stats["kv_bytes_full"] and stats["policy"].split(":")[0] != "auto"
        first = answers(document)
        found = document.generate(QUESTIONS, GREEDY)
        assert [answer.token_ids for answer in found] == first, "the document did not stay as it was"
        assert all(answer.stats["cached_tokens"] == stats["tokens"] for answer in found)
        kept = found[0].stats["kept_tokens"]
        assert kept < budget + 64, "a question had more than the document's entries and its own"
    assert_nothing_held(llm.engine)


def test_the_system_prompt_and_the_best_entries_stay(model: Callable[..., LLM]) -> None:
    llm = model("llama")
    head = len(llm.encode(f"[system]{SYSTEM}")) + 1 + len("[user]")
    with llm.compress(TEXT, budget=64, policy="replay:spread=even", system=SYSTEM) as document:
        for kept in entries(llm, document):
            assert kept[:head].tolist() == list(range(head)) and len(kept) == 64
