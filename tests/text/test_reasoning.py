"""Thoughts apart from the answer, however the text is divided into pieces."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from thinking_template import THINKING_TEMPLATE
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from hybridkv.text.chat import ChatTemplate
from hybridkv.text.reasoning import ChatPiece, ReasoningSplitter, assistant_message, marks_in, reasoning_of
from hybridkv.text.stream import TextStream
from hybridkv.text.tokenizer import Tokenizer

MARKS = ("<think>", "</think>")


def split(text: str, opened: bool = False, cuts: tuple[int, ...] = ()) -> tuple[str | None, str]:
    splitter = ReasoningSplitter(MARKS, opened)
    ends = [0, *sorted(c for c in cuts if 0 < c < len(text)), len(text)]
    pieces = [p for a, b in zip(ends, ends[1:], strict=False) for p in splitter.push(text[a:b])] + splitter.finish()
    assert all(p.text for p in pieces)
    kinds = [p.reasoning for p in pieces]
    assert kinds == sorted(kinds, reverse=True)  # first the thoughts, then the answer
    thoughts, answer = ("".join(p.text for p in pieces if p.reasoning is kind) for kind in (True, False))
    assert (splitter.reasoning, splitter.answer) == (thoughts or None, answer)
    return splitter.reasoning, splitter.answer


CASES: dict[str, tuple[str, bool, tuple[str | None, str]]] = {
    "opened by the prompt": ("Hm.\n</think>\n\nYes.", True, ("Hm.", "Yes.")),
    "opened by the model": ("<think>\nHm.\n</think>\n\nYes.", False, ("Hm.", "Yes.")),
    "opened by both": ("<think>\nHm.\n</think>\n\nYes.", True, ("Hm.", "Yes.")),
    "white space before the mark": ("\n<think>Hm.</think>Yes.", False, ("Hm.", "Yes.")),
    "no thoughts": ("Yes.", False, (None, "Yes.")),
    "no thoughts, left as it is": ("\n Yes. \n", False, (None, "\n Yes. \n")),
    "empty thoughts": ("<think>\n\n</think>\n\nYes.", False, (None, "Yes.")),
    "cut inside the thoughts": ("Hm, let me see. ", True, ("Hm, let me see.", "")),
    "cut inside the closing mark": ("Hm.</thi", True, ("Hm.</thi", "")),
    "cut inside the opening mark": ("  <thi", False, (None, "  <thi")),
    "cut inside the opening mark, in thoughts": ("  <thi", True, ("<thi", "")),
    "cut after the closing mark": ("Hm.</think>\n", True, ("Hm.", "")),
    "the mark again in the answer": ("Hm.</think>a <think>b</think> c", True, ("Hm.", "a <think>b</think> c")),
    "the mark in the thoughts": ("a <think> b</think>c", True, ("a <think> b", "c")),
    "a mark that is not first": ("a <think>b</think>", False, (None, "a <think>b</think>")),
    "what begins like a mark": ("a </thin b <</think>c", True, ("a </thin b <", "c")),
    "lines inside stay": ("a\n\n b</think>c\n\n d\n", True, ("a\n\n b", "c\n\n d\n")),
    "nothing": ("", True, (None, "")),
}


@pytest.mark.parametrize("case", CASES)
def test_thoughts_and_answer(case: str) -> None:
    text, opened, expected = CASES[case]
    assert split(text, opened) == expected
    assert split(text, opened, tuple(range(len(text)))) == expected  # a character at a time


PARTS = st.sampled_from(["<think>", "</think>", "<", "</", "</th", "think>", " ", "\n", "a", "b c", "🙂"])


@settings(max_examples=500, deadline=None, derandomize=True)
@given(st.lists(PARTS, max_size=12).map("".join), st.booleans(), st.lists(st.integers(0, 60), max_size=12))
def test_any_division_into_pieces_gives_the_same(text: str, opened: bool, cuts: list[int]) -> None:
    thoughts, answer = split(text, opened)
    assert split(text, opened, tuple(cuts)) == (thoughts, answer)
    # nothing is invented, and nothing but marks and white space beside them is lost
    assert (thoughts or "") in text and text.endswith(answer)


def test_text_is_given_as_soon_as_it_is_certain() -> None:
    splitter = ReasoningSplitter(MARKS, opened=True)
    assert splitter.push("\nHm. ") == [ChatPiece("Hm.", True)]
    assert splitter.push("So <") == [ChatPiece(" So", True)]
    assert splitter.push("b") == [ChatPiece(" <b", True)]
    assert splitter.push("</think") == []
    assert splitter.push(">\n\nY") == [ChatPiece("Y", False)]
    assert splitter.push("es <") == [ChatPiece("es <", False)]
    assert splitter.finish() == []


def test_one_text_gives_both_kinds() -> None:
    splitter = ReasoningSplitter(MARKS)
    assert splitter.push("<think>a</think>b") == [ChatPiece("a", True), ChatPiece("b", False)]


def test_without_marks_all_is_answer() -> None:
    splitter = ReasoningSplitter(None)
    assert splitter.push(" <think>a</think>") == [ChatPiece(" <think>a</think>", False)]
    assert splitter.finish() == [] and splitter.reasoning is None


@pytest.mark.parametrize(
    ("source", "marks"),
    [
        ("{{ '<think>\\n' }}{{ '</think>' }}", MARKS),
        ("{% if '</think>' in content %}{% endif %}", MARKS),
        ("{%- set end = '</seed:think>' -%}", ("<seed:think>", "</seed:think>")),
        ("{{ '[THINK]' + t + '[/THINK]' }}", ("[THINK]", "[/THINK]")),
        ("{{ messages[0].content }}", None),
    ],
)
def test_marks_come_from_the_template(source: str, marks: tuple[str, str] | None) -> None:
    assert marks_in(source) == marks


@pytest.mark.parametrize(
    ("tail", "said", "expected"),
    [
        ("<think>\n", "a</think>b", ("a", "b")),
        ("<think>", "a</think>b", ("a", "b")),
        ("<think>\n\n</think>\n\n", "b</think>", (None, "b</think>")),
        ("</think>", "<think>a</think>b", (None, "<think>a</think>b")),
        ("", "<think>a</think>b", ("a", "b")),
        ("", "b", (None, "b")),
    ],
)
def test_the_prompts_end_says_where_the_answer_begins(tail: str, said: str, expected: tuple[Any, str]) -> None:
    template = ChatTemplate("<think></think>", bos=None, eos=None)
    splitter = reasoning_of(template, "user: <think>\nassistant: " + tail)
    splitter.push(said)
    splitter.finish()
    assert (splitter.reasoning, splitter.answer) == expected


def test_the_message_of_a_turn() -> None:
    assert assistant_message("b") == assistant_message("b", None) == {"role": "assistant", "content": "b"}
    assert assistant_message("b", "a") == {"role": "assistant", "content": "b", "reasoning_content": "a"}


# Marks as tokens


def folder_tokenizer(folder: Path, special: bool, decoder: Any, template: str) -> Tokenizer:
    backend = Backend(models.BPE(vocab={c: i for i, c in enumerate("abcdefg")}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoder
    backend.add_tokens([AddedToken(mark, special=special, normalized=False) for mark in MARKS])
    backend.add_special_tokens([AddedToken("<end>", special=True)])
    backend.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(template)
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer is not None
    return tokenizer


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("decoder", [decoders.ByteLevel(), decoders.Fuse()])
def test_marks_reach_the_text_whether_or_not_they_are_control_tokens(
    tmp_path: Path, special: bool, decoder: Any
) -> None:
    tokenizer = folder_tokenizer(tmp_path, special, decoder, THINKING_TEMPLATE)
    ids = tokenizer.encode("<think>ab</think>cd<end>")
    assert len(ids) == 7
    stream = TextStream(tokenizer)
    said = "".join(stream.push(i) for i in ids) + stream.finish()
    assert said == tokenizer.decode(ids) == "<think>ab</think>cd"  # other control tokens stay without text
    assert split(said) == ("ab", "cd")


def test_marks_that_no_template_knows_are_hidden_like_other_control_tokens(tmp_path: Path) -> None:
    tokenizer = folder_tokenizer(tmp_path, True, decoders.ByteLevel(), "{{ messages }}")
    assert tokenizer.decode(tokenizer.encode("<think>ab</think>cd<end>")) == "abcd"


@pytest.mark.parametrize("kind", [3, 4])  # GGUF: control, user-defined
def test_marks_of_a_gguf_file(kind: int) -> None:
    tokens = ["a", "b", *MARKS, "<|im_end|>"]
    data: dict[str, Any] = {"model": "gpt2", "pre": "qwen35", "tokens": tokens, "merges": []}
    data["token_type"] = [1, 1, kind, kind, 3]
    metadata = {f"tokenizer.ggml.{k}": v for k, v in data.items()} | {"tokenizer.chat_template": THINKING_TEMPLATE}
    tokenizer = Tokenizer.from_gguf(metadata)
    assert tokenizer is not None and tokenizer.decode([2, 0, 3, 1, 4]) == "<think>a</think>b"
