"""Streams give exactly the decoded text, cut at the first stop string, whatever the tokens."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from hybridkv.errors import RequestError
from hybridkv.text.stream import TextStream
from hybridkv.text.tokenizer import Tokenizer

SETTINGS = settings(
    max_examples=200, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
TEXTS = ["🙂🇫🇷👩‍👩‍👧", "日本語", "naïve café", "ab aab aaab", "\n\nUser:", "END", "the end. The End", "<|im_end|>"]


def first_stop(text: str, stops: list[str]) -> tuple[str, str | None]:
    """Character by character: where a stop string is complete, the text ends before the longest one."""
    for end in range(1, len(text) + 1):
        complete = [s for s in stops if text[:end].endswith(s)]
        if complete:
            longest = max(complete, key=len)
            return text[: end - len(longest)], longest
    return text, None


def check(tokenizer: Tokenizer, ids: list[int], stops: list[str]) -> None:
    whole = tokenizer.decode(ids)
    expected, stopped = first_stop(whole, stops)
    stream = TextStream(tokenizer, stops)
    given_out = ""
    for i in ids:
        given_out += stream.push(i)
        assert expected.startswith(given_out)
        assert stream.text == given_out
    given_out += stream.finish()
    assert (given_out, stream.text, stream.stopped) == (expected, expected, stopped)
    assert given_out.count("\ufffd") <= whole.count("\ufffd")
    assert stream.push(ids[0] if ids else 5) == "" and stream.finish() == "" and stream.text == expected


@SETTINGS
@given(data=st.data())
def test_random_tokens_with_stops_cut_out_of_their_text(tokenizer: Tokenizer, data: st.DataObject) -> None:
    pieces = data.draw(st.lists(st.one_of(st.integers(0, 49151), st.sampled_from(TEXTS)), max_size=12))
    ids = [i for p in pieces for i in ([p] if isinstance(p, int) else tokenizer.encode(p))]
    whole = tokenizer.decode(ids)
    stops = data.draw(st.lists(st.sampled_from(["ab", "aab", "aa", "end", "\n\n", "\ufffd", "🙂", "b a"]), max_size=3))
    if whole:
        start = data.draw(st.integers(0, len(whole) - 1))
        stops.append(whole[start : start + data.draw(st.integers(1, 6))])
    check(tokenizer, ids, stops if data.draw(st.booleans()) else [])


@SETTINGS
@given(
    text=st.text(alphabet="ab", max_size=40), stops=st.lists(st.text(alphabet="ab", min_size=1, max_size=6), max_size=4)
)
def test_overlapping_stop_strings(tokenizer: Tokenizer, text: str, stops: list[str]) -> None:
    check(tokenizer, tokenizer.encode(text), stops)


@pytest.fixture(scope="module")
def byte_tokens(metadata: dict[str, Any]) -> dict[int, int]:
    """Byte -> the token that is this byte alone, for the bytes the vocabulary has."""
    vocab = {t: i for i, t in enumerate(metadata["tokenizer.ggml.tokens"])}
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [b for b in range(256) if b not in shown]
    letters = {b: chr(b) for b in shown} | {b: chr(256 + n) for n, b in enumerate(hidden)}
    return {b: vocab[letter] for b, letter in letters.items() if letter in vocab}


@SETTINGS
@given(raw=st.one_of(st.binary(max_size=16), st.text(max_size=8).map(lambda t: t.encode("utf-8", "surrogatepass"))))
def test_any_bytes_one_token_each(tokenizer: Tokenizer, byte_tokens: dict[int, int], raw: bytes) -> None:
    raw = bytes(b for b in raw if b in byte_tokens)
    assert tokenizer.decode([byte_tokens[b] for b in raw]) == raw.decode("utf-8", "replace")
    check(tokenizer, [byte_tokens[b] for b in raw], [])


def test_half_a_character_waits(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("🦜")
    assert len(ids) > 1
    stream = TextStream(tokenizer)
    assert [stream.push(i) for i in ids] == [""] * (len(ids) - 1) + ["🦜"]
    broken = TextStream(tokenizer)
    assert broken.push(ids[0]) == "" and broken.finish() == "\ufffd"


def test_a_possible_beginning_of_a_stop_string_waits(tokenizer: Tokenizer) -> None:
    stream = TextStream(tokenizer, ["User:"])
    assert stream.push(tokenizer.encode("\nUs")[0]) == "\n"
    given_out = [stream.push(i) for i in tokenizer.encode("Us")]
    assert given_out[-1] == "" and stream.text == "\n"
    assert stream.finish() == "Us" and stream.stopped is None


def test_special_tokens_have_no_text(tokenizer: Tokenizer) -> None:
    stream = TextStream(tokenizer, ["x"])
    assert stream.push(2) == "" and stream.finish() == "" and stream.stopped is None


def test_without_a_tokenizer_there_is_no_text() -> None:
    stream = TextStream(None, ["x"])
    assert stream.push(5) == "" and stream.finish() == "" and stream.text == "" and stream.stopped is None


@pytest.mark.parametrize("stops", [[""], ["a", ""], [5]])
def test_empty_stop_strings_are_refused(tokenizer: Tokenizer, stops: list) -> None:
    with pytest.raises(RequestError, match="stop"):
        TextStream(tokenizer, stops)


def sentencepiece_tokenizer() -> Tokenizer:
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), "▁", "a", "b", "▁a", "ab", "▁▁"]
    types = [2, 3, 3, *[6] * 256, 1, 1, 1, 1, 1, 1]
    scores = [0.0] * 259 + [-1.0, -2.0, -3.0, -4.0, -5.0, -6.0]
    data = {"model": "llama", "tokens": tokens, "token_type": types, "scores": scores, "unknown_token_id": 0}
    tokenizer = Tokenizer.from_gguf({f"tokenizer.ggml.{k}": v for k, v in data.items()})
    assert tokenizer is not None
    return tokenizer


@settings(max_examples=200, deadline=None, derandomize=True)
@given(ids=st.lists(st.integers(0, 270), max_size=16), stops=st.lists(st.sampled_from(["ab", " a", "a a"]), max_size=2))
def test_sentencepiece_with_byte_tokens(ids: list[int], stops: list[str]) -> None:
    check(SENTENCEPIECE, ids, stops)


SENTENCEPIECE = sentencepiece_tokenizer()


OTHER: dict[str, decoders.Decoder | None] = {
    "none": None,
    "WordPiece": decoders.WordPiece(),
    "Metaspace": decoders.Metaspace(),
    "BPEDecoder": decoders.BPEDecoder(),
    "CTC": decoders.CTC(pad_token="<unk>"),
    "Strip": decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]),
}


def other_tokenizer(folder: Path, decoder: decoders.Decoder | None) -> Tokenizer:
    vocab = {t: i for i, t in enumerate(["<unk>", "▁a", "b", "##c", "d</w>", "e", "▁", "<s>"])}
    backend = Backend(models.WordLevel(vocab, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens(["<s>"])
    if decoder is not None:
        backend.decoder = decoder
    backend.save(str(folder / "tokenizer.json"))
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer is not None and not tokenizer.joins_bytes
    return tokenizer


@pytest.mark.parametrize("name", OTHER)
def test_other_decoders(tmp_path: Path, name: str) -> None:
    tokenizer = other_tokenizer(tmp_path, OTHER[name])
    for ids in ([1, 2, 3, 4, 5, 6, 1, 1], [2], [], [6, 2, 2, 5, 99]):
        check(tokenizer, ids, [])
        check(tokenizer, ids, ["b"])


@pytest.mark.parametrize("name", OTHER)
@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(runs=st.lists(st.tuples(st.integers(0, 8), st.integers(1, 40)), max_size=12), stop=st.sampled_from(["", "b e"]))
def test_other_decoders_over_many_tokens(tmp_path: Path, name: str, runs: list[tuple[int, int]], stop: str) -> None:
    tokenizer = other_tokenizer(tmp_path, OTHER[name])
    check(tokenizer, [i for i, count in runs for _ in range(count)], [stop] if stop else [])


@pytest.mark.parametrize("name", OTHER)
def test_the_work_for_a_token_does_not_grow_with_the_text(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = other_tokenizer(tmp_path, OTHER[name])
    decode, longest = tokenizer.decode, 0

    def counted(ids: list[int], **options: bool) -> str:
        nonlocal longest
        longest = max(longest, len(ids))
        return decode(ids, **options)

    monkeypatch.setattr(tokenizer, "decode", counted)
    stream = TextStream(tokenizer)
    for i in range(2000):
        stream.push([1, 2, 5, 3][i % 4])
    assert 0 < longest <= 64
