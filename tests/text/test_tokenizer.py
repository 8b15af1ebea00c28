"""Encoding long texts, beside which the process goes on, and what spells a control token."""

import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from long_form import spread
from tokenizers import AddedToken, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

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


@spread(
    "special, unit, times", (True, False), [("<|im_start|>", 150_000), ("1", 400_000), ("Well, 12 words. ", 50_000)]
)
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


# ---- what spells a control token

CONTROL = ["<bos>", "<eos>", "<|end|>", "</s>", "<s>1"]
WIDE = str.maketrans({chr(c): chr(c + 0xFEE0) for c in range(0x21, 0x7F)})  # letters that NFKC makes plain ones


def made(model: Any, normalizer: Any = None, normalized: bool = False) -> Backend:
    found = Backend(model)
    found.normalizer = normalizer
    if isinstance(model, models.BPE):
        found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    found.add_special_tokens([AddedToken(text, special=True, normalized=normalized) for text in CONTROL])
    return found


def letters() -> dict[str, int]:
    return {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}


def merged() -> Backend:
    """Whose model puts a control token together by itself: "</s>", from the letters that NFKC gives."""
    steps = [("<", "/"), ("</", "s"), ("</s", ">")]
    vocab = letters() | {a + b: 256 + i for i, (a, b) in enumerate(steps)}
    return made(models.BPE(vocab=vocab, merges=steps), normalizers.NFKC())


KINDS: dict[str, tuple[Callable[[], Backend], bool]] = {
    "control tokens beside the model's": (lambda: made(models.BPE(vocab=letters(), merges=[])), True),
    "and a normalizer": (lambda: made(models.BPE(vocab=letters(), merges=[]), normalizers.NFKC()), True),
    "in the model's, never made": (
        lambda: made(models.BPE(vocab=letters() | {c: 256 + i for i, c in enumerate(CONTROL)}, merges=[])),
        True,
    ),
    "made by merges": (merged, False),
    "whole words of the model": (
        lambda: made(
            models.BPE(vocab=letters() | {c: 256 + i for i, c in enumerate(CONTROL)}, merges=[], ignore_merges=True),
            normalizers.NFKC(),
        ),
        False,
    ),
    "pieces of Unigram": (
        lambda: made(
            models.Unigram([("?", -9.0), *((c, -3.0) for c in letters()), *((c, 0.0) for c in CONTROL)], 0),
            normalizers.NFKC(),
        ),
        False,
    ),
    "normalized": (
        lambda: made(models.BPE(vocab=letters(), merges=[]), normalizers.Lowercase(), normalized=True),
        False,
    ),
}


def texts() -> list[str]:
    """Control tokens, cut, joined, in capitals and in wide letters."""
    source = random.Random(16)
    parts = [*CONTROL, "a", " ", "<", "s>", "1", "é", "<|", "|>", "end", "<b", "os>", "48151623", "\n"]
    found = [""]
    for _ in range(400):
        text = "".join(source.choices(parts, k=source.randint(1, 6)))
        found.append(source.choice([text, text.upper(), text.translate(WIDE), text]))
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_what_spells_a_control_token_is_what_the_library_takes_for_one(kind: str, tmp_path: Path) -> None:
    make, one_way = KINDS[kind]
    make().save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer is not None and len(tokenizer.control) == len(CONTROL)
    assert tokenizer.spelled_one_way is one_way
    answers = []
    for text in texts():
        ids = tokenizer._backend.encode(text, add_special_tokens=False).ids
        answers.append(not tokenizer.control.isdisjoint(ids))
        assert tokenizer.spells_control(text) is answers[-1], text
    assert {True, False} == set(answers)


def test_looking_for_control_tokens_takes_far_less_than_encoding(tokenizer: Tokenizer) -> None:
    text = "The quick brown fox <b>jumps</b> over 12 lazy dogs.\n" * 4_000
    begin = time.process_time()
    tokenizer.encode(text)
    between = time.process_time()
    assert not tokenizer.spells_control(text)
    assert time.process_time() - between < (between - begin) / 10  # some 1/500; encoding it again takes 1
