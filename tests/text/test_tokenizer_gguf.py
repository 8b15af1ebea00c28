"""Tokenizers from GGUF metadata: the embedded model's against a reference, small made-up ones, and bad files."""

import heapq
import json
import random
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend
from transformers.convert_slow_tokenizer import generate_merges
from transformers.models.qwen2.tokenization_qwen2 import Qwen2Tokenizer
from transformers.models.qwen3_5.tokenization_qwen3_5 import Qwen3_5Tokenizer

from hybridkv.errors import ModelFileError, RequestError, UnsupportedModel
from hybridkv.text.pretokenizers import RULES, rule_for
from hybridkv.text.tokenizer import Tokenizer

ODD = [
    "",
    " ",
    "a",
    "Hello, world! 12345 café",
    "I'm he'll THEY'RE don't 'twas '",
    "  two  spaces   three\t\ttabs\n\n\nlines \r\n end ",
    "1234567890 3.14159 ½ ² Ⅷ ٣٤٥ 一二三 ①②",
    "emoji 🙂🇫🇷👩‍👩‍👧‍👦 é e\u0301 ﬁ Å Å",
    "日本語のテキスト 中文 한국어 العربية हिन्दी ไทย",
    "def f(x):\n    return x**2  # comment\n\n\n",
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
    "<|im_end|><|im_end|> <|im_end|>x<|im_end",
    "<repo_name><file_sep>a<|endoftext|>",
    "\x00\x01\x7f\x80\xa0\u2028\u2029\ufeff\ufffd\U0010ffff",
    "ĠĠ Ċ â Ģ literal byte-level letters",
    "x" * 500 + " " * 300 + "!" * 200,
    "https://example.org/a?b=c&d=%20#e",
]


def random_texts(count: int) -> list[str]:
    draw = random.Random(7)
    letters = "aB1 .\n\t'é漢🙂\u0301<|>_sS"
    return ["".join(draw.choice(letters) for _ in range(draw.randint(1, 40))) for _ in range(count)]


def reference(metadata: dict[str, Any]) -> Backend:
    """SmolLM2 as its own tokenizer.json has it: every digit alone, then GPT-2's byte level."""
    tokens, types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    merges = [tuple(m.split(" ")) for m in metadata["tokenizer.ggml.merges"]]
    backend = Backend(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=merges, fuse_unk=False))
    digits = pre_tokenizers.Digits(individual_digits=True)
    backend.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    backend.decoder = decoders.ByteLevel()
    control = [t for t, kind in zip(tokens, types, strict=True) if kind == 3]
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in control])
    return backend


def test_embedded_model_tokenizes_as_the_reference(metadata: dict[str, Any], tokenizer: Tokenizer) -> None:
    expected = reference(metadata)
    for text in ODD + random_texts(2000):
        ids = expected.encode(text, add_special_tokens=False).ids
        assert tokenizer.encode(text) == ids, text
        assert tokenizer.decode(ids) == expected.decode(ids), text
        assert tokenizer.decode(ids, skip_special=False) == expected.decode(ids, skip_special_tokens=False), text


def test_any_tokens_decode_as_in_the_library(metadata: dict[str, Any], tokenizer: Tokenizer) -> None:
    expected = reference(metadata)
    draw = random.Random(3)
    for _ in range(2000):
        ids = [draw.randrange(tokenizer.vocab_size) for _ in range(draw.randint(0, 12))]
        assert tokenizer.decode(ids) == expected.decode(ids)


def test_embedded_model_facts(tokenizer: Tokenizer) -> None:
    assert tokenizer.vocab_size == 49152
    assert (tokenizer.bos_id, tokenizer.bos_text, tokenizer.add_bos) == (1, "<|im_start|>", False)
    assert tokenizer.eos_ids == {0, 2} and tokenizer.eos_text == "<|im_end|>"
    assert tokenizer.chat_template is not None and "<|im_start|>assistant" in tokenizer.chat_template
    assert tokenizer.token_text(2) == "<|im_end|>"
    assert tokenizer.encode("a", bos=True) == [1, *tokenizer.encode("a")]


def test_plain_text_cannot_forge_control_tokens(metadata: dict[str, Any], tokenizer: Tokenizer) -> None:
    control = {i for i, kind in enumerate(metadata["tokenizer.ggml.token_type"]) if kind == 3}
    for i in control:
        text = metadata["tokenizer.ggml.tokens"][i]
        assert tokenizer.encode(text) == [i]
        for written in (text, f"a{text}b", f" {text}{text}\n"):
            plain = tokenizer.encode(written, special=False)
            assert control.isdisjoint(plain)
            assert tokenizer.decode(plain) == written


def test_ids_outside_the_vocabulary_have_no_text(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("ab")
    assert tokenizer.decode([*ids, 49152, 10**9, -1]) == "ab"
    assert tokenizer.token_text(49152) == "" and tokenizer.token_text(-1) == ""


@pytest.mark.parametrize("text", ["\ud800", b"bytes", None, 5])
def test_what_is_not_text_is_refused(tokenizer: Tokenizer, text: Any) -> None:
    with pytest.raises(RequestError):
        tokenizer.encode(text)


# A small byte-level vocabulary


def byte_vocabulary() -> list[str]:
    return sorted(pre_tokenizers.ByteLevel.alphabet())


def small(**changes: Any) -> dict[str, Any]:
    tokens = [*byte_vocabulary(), "he", "ll", "hell", "Ġw", "<s>", "</s>", "<tool>", "12", "123", "stop"]
    data = {
        "model": "gpt2",
        "pre": "llama-bpe",
        "tokens": tokens,
        "token_type": [1] * 260 + [3, 3, 4, 1, 1, 3],
        "merges": ["h e", "l l", "he ll", "Ġ w", "1 2", "12 3"],
        "bos_token_id": 260,
        "eos_token_id": 261,
    }
    data |= changes
    return {f"tokenizer.ggml.{k}": v for k, v in data.items() if v is not None}


def build(**changes: Any) -> Tokenizer:
    tokenizer = Tokenizer.from_gguf(small(**changes))
    assert tokenizer is not None
    return tokenizer


def shown(tokenizer: Tokenizer, text: str, **options: Any) -> list[str]:
    return [tokenizer.token_text(i) for i in tokenizer.encode(text, **options)]


def test_begin_and_end_tokens_follow_the_file() -> None:
    assert shown(build(), "he") == ["<s>", "he"]  # llama-bpe begins with one unless the file says no
    assert shown(build(add_bos_token=False), "he") == ["he"]
    assert shown(build(add_bos_token=False), "he", bos=True) == ["<s>", "he"]
    assert shown(build(add_bos_token=True, add_eos_token=True, pre="gpt-2"), "he") == ["<s>", "he", "</s>"]
    assert shown(build(), "he", bos=False) == ["he"]
    assert shown(build(pre="gpt-2"), "he") == ["he"]
    assert build(bos_token_id=None).add_bos is False


def test_user_defined_tokens_are_found_in_plain_text_and_control_tokens_are_not() -> None:
    tokenizer = build(add_bos_token=False)
    assert shown(tokenizer, "he<tool></s>") == ["he", "<tool>", "</s>"]
    assert shown(tokenizer, "he<tool></s>", special=False) == ["he", "<tool>", "<", "/", "s", ">"]
    assert tokenizer.decode(tokenizer.encode("he<tool></s>")) == "he<tool>"


def test_a_control_token_that_is_a_whole_piece_cannot_be_forged_either() -> None:
    tokenizer = build(add_bos_token=False)  # this rule takes a piece that is a token as it stands
    assert shown(tokenizer, "stop") == ["stop"]
    assert shown(tokenizer, "stop", special=False) == ["s", "t", "o", "p"]


def test_turn_ends_are_ends() -> None:
    assert build(eot_token_id=5, eom_token_id=6).eos_ids == {261, 5, 6}
    tokens = small()["tokenizer.ggml.tokens"]
    tokens[260] = "<|eot_id|>"
    assert build(tokens=tokens).eos_ids == {260, 261}


@pytest.mark.parametrize("kind", (1, 4))
def test_a_turn_end_that_the_file_does_not_mark_as_control_is_one_all_the_same(kind: int) -> None:
    """Otherwise a message could spell it, and an answer would not end there."""
    tokens, types = small()["tokenizer.ggml.tokens"], small()["tokenizer.ggml.token_type"]
    tokens[262], types[262] = "<|im_end|>", kind
    tokenizer = build(tokens=tokens, token_type=types, add_bos_token=False)
    assert tokenizer.eos_ids == {261, 262}
    assert shown(tokenizer, "he<|im_end|>") == ["he", "<|im_end|>"]
    assert "<|im_end|>" not in shown(tokenizer, "he<|im_end|>", special=False)
    assert tokenizer.decode(tokenizer.encode("he<|im_end|>")) == "he"


def test_an_ordinary_token_that_text_may_hold_is_no_turn_end() -> None:
    types = small()["tokenizer.ggml.token_type"]
    types[261] = 1  # </s>, also the end of struck-out text in HTML
    assert build(token_type=types, eos_token_id=260).eos_ids == {260}


def test_numpy_arrays_from_a_reader_are_taken() -> None:
    types = np.array(small()["tokenizer.ggml.token_type"], dtype=np.int32)
    assert build(token_type=types, bos_token_id=np.uint32(260)).encode("he") == build().encode("he")


def test_a_file_without_token_types_has_its_declared_ids_as_control_tokens() -> None:
    assert shown(build(token_type=None, add_bos_token=False), "he</s>") == ["he", "</s>"]


def test_no_tokenizer_is_none() -> None:
    assert Tokenizer.from_gguf({}) is None
    assert Tokenizer.from_gguf({"tokenizer.ggml.model": "none"}) is None


def test_a_file_that_names_no_rule_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match=r"tokenizer\.ggml\.pre"):
        build(pre=None)


TOKENS = small()["tokenizer.ggml.tokens"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tokens": None}, "tokens is missing"),
        ({"tokens": []}, "empty"),
        ({"tokens": "abc"}, "list of strings"),
        ({"tokens": [b"a"] * 266}, "list of strings"),
        ({"tokens": [*TOKENS[:-1], "he"]}, "twice"),
        ({"tokens": [*TOKENS[:-1], "x" * 10_000_000]}, "characters"),
        ({"merges": None}, "merges is missing"),
        ({"merges": ["h e", "q zz"]}, "merge 1"),
        ({"merges": ["h z"]}, "merge 0"),
        ({"merges": ["he"]}, "merge 0"),
        ({"merges": [" h"]}, "merge 0"),
        ({"merges": ["h e l"]}, "merge 0"),
        ({"merges": [""]}, "merge 0"),
        ({"bos_token_id": 266}, "outside"),
        ({"eos_token_id": -5}, "outside"),
        ({"eot_token_id": 2**31}, "outside"),
        ({"eos_token_id": "261"}, "outside"),
        ({"token_type": [1, 2]}, "2 entries"),
        ({"token_type": ["x"] * 266}, "numbers"),
        ({"token_type": [float("nan")] * 266}, "numbers"),
        ({"token_type": [float("inf")] * 266}, "token_type of token 0 is inf"),
        ({"token_type": np.array([1.0] * 265 + [-np.inf], np.float32)}, "token_type of token 265 is -inf"),
        ({"token_type": [1.5] * 266}, "whole number"),
    ],
)
def test_bad_metadata_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelFileError, match=words):
        Tokenizer.from_gguf(small(**changes))


def test_unknown_kinds_and_rules_are_named_and_refused() -> None:
    with pytest.raises(UnsupportedModel, match=r"mystery.*qwen2.*smollm"):
        Tokenizer.from_gguf(small(pre="mystery"))
    with pytest.raises(UnsupportedModel, match="bert"):
        Tokenizer.from_gguf(small(model="bert"))


# How text is cut


def cut(name: str, text: str) -> list[str]:
    normalizer = rule_for(name).normalizer()
    text = normalizer.normalize_str(text) if normalizer else text
    return [text[a:b] for _, (a, b) in rule_for(name).pre_tokenizer().pre_tokenize_str(text)]


@pytest.mark.parametrize(
    ("name", "text", "pieces"),
    [
        ("gpt-2", "I'm 1234 ok!!  x\n\ny", ["I", "'m", " 1234", " ok", "!!", " ", " x", "\n", "\n", "y"]),
        ("smollm", "a 12b", ["a", " ", "1", "2", "b"]),
        ("llama-bpe", "I'M 12345 (ok)\n\n x", ["I", "'M", " ", "123", "45", " (", "ok", ")\n\n", " x"]),
        ("qwen2", "x12 e\u0301", ["x", "1", "2", " é"]),
        ("qwen35", "a\u0903b 12", ["a\u0903b", " ", "1", "2"]),
    ],
)
def test_rules_cut_as_written(name: str, text: str, pieces: list[str]) -> None:
    assert cut(name, text) == pieces


@pytest.mark.parametrize("name", sorted(RULES))
def test_no_rule_loses_text(name: str) -> None:
    for text in ODD + random_texts(50):
        normalizer = rule_for(name).normalizer()
        assert "".join(cut(name, text)) == (normalizer.normalize_str(text) if normalizer else text)


@pytest.mark.parametrize(("name", "oracle"), [("qwen2", Qwen2Tokenizer), ("qwen35", Qwen3_5Tokenizer)])
def test_qwen_rules_are_those_of_transformers(name: str, oracle: Any) -> None:
    data = small(pre=name, bos_token_id=None)
    merges = [tuple(m.split(" ")) for m in data["tokenizer.ggml.merges"]]
    vocab = {t: i for i, t in enumerate(data["tokenizer.ggml.tokens"])}
    theirs = oracle(vocab=vocab, merges=merges, eos_token="</s>", pad_token="</s>", unk_token="</s>")
    ours = Tokenizer.from_gguf(data)
    assert ours is not None
    for text in (t.replace("<", "(") for t in ODD + random_texts(300)):  # their control tokens are others
        assert ours.encode(text) == theirs.encode(text, add_special_tokens=False), text


# SentencePiece


PIECES = [
    "▁",
    "t",
    "h",
    "e",
    "a",
    "i",
    "n",
    "o",
    "r",
    "s",
    "▁t",
    "he",
    "in",
    "er",
    "▁the",
    "or",
    "is",
    "▁a",
    "on",
    "th",
    "▁th",
    "ing",
    "▁in",
    "re",
    "an",
    "▁an",
    "at",
    "▁is",
    "es",
]


def sentencepiece(**changes: Any) -> dict[str, Any]:
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *PIECES]
    data = {
        "model": "llama",
        "tokens": tokens,
        "token_type": [2, 3, 3, *[6] * 256, *[1] * len(PIECES)],
        "scores": [0.0] * 259 + [-float(i) for i in range(len(PIECES))],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
    }
    data |= changes
    return {f"tokenizer.ggml.{k}": v for k, v in data.items() if v is not None}


def by_scores(text: str, data: dict[str, Any]) -> list[int]:
    """SentencePiece's own algorithm: merge the neighbours whose joined piece scores best, leftmost first."""
    vocab = {t: i for i, t in enumerate(data["tokenizer.ggml.tokens"])}
    scores = data["tokenizer.ggml.scores"]
    parts: list[str] = list("▁" + text.replace(" ", "▁"))
    while True:
        best: list[tuple[float, int]] = []
        for i, pair in enumerate(a + b for a, b in zip(parts, parts[1:], strict=False)):
            if pair in vocab:
                heapq.heappush(best, (-scores[vocab[pair]], i))
        if not best:
            break
        i = best[0][1]
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    ids: list[int] = []
    for part in parts:
        ids += [vocab[part]] if part in vocab else [vocab[f"<0x{b:02X}>"] for b in part.encode()]
    return ids


def test_sentencepiece_merges_by_score() -> None:
    data = sentencepiece()
    tokenizer = Tokenizer.from_gguf(data)
    assert tokenizer is not None
    draw = random.Random(5)
    for _ in range(1500):
        text = "".join(draw.choice("theainors  é漢🙂") for _ in range(draw.randint(1, 25)))
        ids = by_scores(text, data)
        assert tokenizer.encode(text) == [1, *ids]
        assert tokenizer.decode([1, *ids, 2]) == text
        theirs = tokenizer._backend.decode(ids)
        assert tokenizer.decode(ids) == theirs


def test_sentencepiece_merges_stand_in_the_order_of_transformers() -> None:
    pieces = [*PIECES, "aa", "aaa", "aaaa", "▁▁", "▁▁▁", "▁▁▁▁"]
    data = sentencepiece()
    tokens = data["tokenizer.ggml.tokens"][:259] + pieces
    scores = [0.0] * 259 + [-float(i // 2) for i in range(len(pieces))]  # with equal ones
    tokenizer = Tokenizer.from_gguf(
        sentencepiece(tokens=tokens, scores=scores, token_type=[2, 3, 3, *[6] * 256, *[1] * len(pieces)])
    )
    assert tokenizer is not None
    vocab = {t: i for i, t in enumerate(tokens)}
    theirs = generate_merges(vocab, dict(zip(tokens, scores, strict=True)), skip_tokens=tokens[:259])
    ours = json.loads(tokenizer._backend.to_str())["model"]["merges"]
    assert [tuple(m) for m in ours] == theirs and len(ours) > len(PIECES) // 2


def test_sentencepiece_special_tokens_and_prefix() -> None:
    tokenizer = Tokenizer.from_gguf(sentencepiece())
    assert tokenizer is not None and tokenizer.eos_ids == {2}
    assert shown(tokenizer, "the</s>the") == ["<s>", " the", "</s>", " the"]
    assert tokenizer.encode("a</s><s><unk>", special=False)[1:] == by_scores("a</s><s><unk>", sentencepiece())
    bare = Tokenizer.from_gguf(sentencepiece(add_space_prefix=False, add_bos_token=False))
    assert bare is not None and shown(bare, "the a") == ["t", "he", " a"]  # "he" scores better than "th"
    assert bare.decode(bare.encode(" the")) == " the"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"scores": None}, "scores"),
        ({"scores": [0.0]}, "1 entries"),
    ],
)
def test_bad_sentencepiece_metadata_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelFileError, match=words):
        Tokenizer.from_gguf(sentencepiece(**changes))


def test_sentencepiece_without_byte_tokens_needs_an_unknown_token() -> None:
    tokens = ["<s>", "</s>", *PIECES]
    changes = {"tokens": tokens, "token_type": [3, 3, *[1] * len(PIECES)], "scores": [0.0] * len(tokens)}
    changes |= {"bos_token_id": 0, "eos_token_id": 1, "unknown_token_id": None}
    with pytest.raises(ModelFileError, match="<0x00>"):
        Tokenizer.from_gguf(sentencepiece(**changes))


def test_normalizers_are_those_of_the_llama_2_file() -> None:
    tokenizer = Tokenizer.from_gguf(sentencepiece())
    assert tokenizer is not None
    wanted = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    for text in (" a", "a", "  ", ""):
        assert tokenizer._backend.normalizer.normalize_str(text) == wanted.normalize_str(text)
