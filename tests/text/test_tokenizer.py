"""Encoding long texts: what else runs in the process goes on meanwhile."""

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from hybridkv.text.tokenizer import Tokenizer

BEATS = 30  # while a text is encoded, which takes hundreds of milliseconds; each beat waits for one


def beats_during(work: Callable[[], Any]) -> tuple[int, Any]:
    """How often another thread had a turn while the work was done, and what it gave."""
    beats, stop = 0, threading.Event()

    def beat() -> None:
        nonlocal beats
        while not stop.is_set():
            beats += 1
            time.sleep(0.001)

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        before = beats
        found = work()
        return beats - before, found
    finally:
        stop.set()
        thread.join()


@pytest.fixture(scope="module")
def spaced() -> Tokenizer:
    """SentencePiece, which puts a space before a text."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), "▁", "a", "b", "▁a", "ab", "▁ab"]
    data = {"model": "llama", "tokens": tokens, "token_type": [2, 3, 3, *[6] * 256, *[1] * 6]}
    data["scores"] = [0.0] * 259 + [-9.0, -9.0, -9.0, -2.0, -1.0, -0.5]
    found = Tokenizer.from_gguf({f"tokenizer.ggml.{k}": v for k, v in data.items()})
    assert found is not None
    return found


@pytest.mark.parametrize(("unit", "times"), [("<|im_start|>", 150_000), ("1", 400_000), ("Well, 12 words. ", 50_000)])
@pytest.mark.parametrize("special", [True, False])
def test_others_run_while_a_long_text_is_encoded(tokenizer: Tokenizer, unit: str, times: int, special: bool) -> None:
    backend = tokenizer._backend if special else tokenizer._plain
    beats, ids = beats_during(lambda: tokenizer.encode(unit * times, bos=False, special=special))
    assert beats >= BEATS
    assert ids == backend.encode(unit * times, add_special_tokens=False).ids  # as the library encodes one text


@pytest.mark.parametrize("text", ["ab" * 400_000, "a" + "</s>ab" * 100_000])
def test_others_run_while_the_middle_of_a_long_text_is_encoded(spaced: Tokenizer, text: str) -> None:
    beats, ids = beats_during(lambda: spaced.encode(text, after=260))
    assert beats >= BEATS
    begun = spaced.encode("b" + text, bos=False)  # where the space that begins a text is another one's
    assert spaced.decode(begun[:2]) == "b" and ids == begun[2:]
