"""Where messages begin, from token ids: for the templates of every family, and with nobody able to forge it."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import pytest
from thinking_template import THINKING_TEMPLATE

from engine.ascii_tokenizer import write_tokenizer
from hybridkv.errors import RequestError
from hybridkv.text.chat import ChatTemplate
from hybridkv.text.marks import ChatMarks
from hybridkv.text.prompt import encode_pieces, render_pieces
from hybridkv.text.tokenizer import Tokenizer
from text.chat_families import FAMILIES, write_bytes_tokenizer

FOUND = (*FAMILIES, "thinking", "smollm2")
THINKERS = ("qwen3_5", "deepseek_v4", "thinking")


class Family(NamedTuple):
    name: str
    template: ChatTemplate
    tokenizer: Tokenizer
    marks: ChatMarks

    def ids(self, messages: list[dict[str, Any]], **how: Any) -> list[int]:
        return encode_pieces(self.tokenizer, render_pieces(self.template, self.tokenizer, messages, **how))

    def wishes(self, ids: list[int], client: Sequence[int] = ()) -> list[tuple[int, str]]:
        """Marks without those that only say where messages begin."""
        return [mark for mark in self.marks.marks(ids, client) if mark[1] != "begin"]

    def text(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special=False)


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer) -> Iterator[dict[str, Family]]:
    found = {}
    for name in FOUND:
        own: Tokenizer | None = tokenizer
        if name != "smollm2":
            folder = tmp_path_factory.mktemp(name)
            if name == "thinking":
                write_tokenizer(folder, THINKING_TEMPLATE)
            else:
                write_bytes_tokenizer(folder, name)
            own = Tokenizer.from_folder(folder)
        assert own is not None and own.chat_template is not None
        template = ChatTemplate(own.chat_template, bos=own.bos_text, eos=own.eos_text)
        found[name] = Family(name, template, own, ChatMarks.probe(template, own))
    yield found
    for family in found.values():
        family.template.close()


def said(role: str, text: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": text, **more}


CALL = [{"id": "c1", "type": "function", "function": {"name": "look", "arguments": {"at": "sea"}}}]
ASK = [said("system", "Be brief."), said("user", "How deep?")]
LOOP = [*ASK, said("assistant", "", reasoning_content="hm", tool_calls=CALL), said("tool", "4 km", tool_call_id="c1")]
NEXT = [*ASK, said("assistant", "4 km.", reasoning_content="hm"), said("user", "\nAnd wide?")]


@pytest.mark.parametrize("name", FOUND)
def test_marks_of_a_question(families: dict[str, Family], name: str) -> None:
    family = families[name]
    ids = family.ids(ASK)
    places = {kind: at for at, kind in family.wishes(ids)}
    assert "How deep?" not in family.text(ids[: places["message"]])
    assert family.text(ids[places["message"] : places["reply"]]).count("How deep?") == 1
    assert "ssistant" in family.text(ids[places["reply"] :])
    assert family.text(ids[: places["message"]]).count("Be brief.") == 1


@pytest.mark.parametrize("name", [name for name in FOUND if name != "smollm2"])
def test_the_result_of_a_tool_is_no_question(families: dict[str, Family], name: str) -> None:
    """In a loop of calls the reply goes on from the person's question; what came last is the result."""
    family = families[name]
    ids = family.ids(LOOP)
    assert [role for _, role in family.marks.messages(ids)][-4:] == ["user", "assistant", "tool", "assistant"]
    marks = family.wishes(ids)
    assert [kind for _, kind in marks] == ["reply", "message"]
    (reply, _), (message, _) = marks
    assert family.text(ids[:reply]).endswith(family.text(family.ids(ASK, ending="turn"))[-12:])
    assert "look" in family.text(ids[reply:message]) and "4 km" in family.text(ids[message:])
    assert "4 km" not in family.text(ids[:message])


@pytest.mark.parametrize("name", FOUND)
def test_the_reply_mark_is_where_the_next_question_parts_from_the_loop(families: dict[str, Family], name: str) -> None:
    """What the next turn's prompt shares with this one reaches to the reply mark at least."""
    family = families[name]
    first = family.ids(ASK)
    then = family.ids(NEXT)
    [reply] = [at for at, kind in family.wishes(first) if kind == "reply"]
    assert then[:reply] == first[:reply]
    assert [role for _, role in family.marks.messages(then)][-4:] == ["user", "assistant", "user", "assistant"]


@pytest.mark.parametrize("name", FOUND)
def test_whether_thoughts_are_dropped(families: dict[str, Family], name: str) -> None:
    family = families[name]
    assert family.marks.drops_thinking == (name in THINKERS)
    assert ("hm" in family.text(family.ids(NEXT))) is False


@pytest.mark.parametrize("name", FOUND)
def test_what_ends_an_answer(families: dict[str, Family], name: str) -> None:
    family = families[name]
    text = family.text(family.ids(NEXT[:3], ending="turn"))
    assert family.marks.answer_end and text.endswith(f"4 km.{family.marks.answer_end}")


def test_the_token_that_opens_a_call(families: dict[str, Family]) -> None:
    opens = {name: family.marks.call_token for name, family in families.items()}
    assert {name for name, token in opens.items() if token is not None} == {"qwen3_5", "hermes"}
    assert families["hermes"].tokenizer.token_text(opens["hermes"] or 0) == "<tool_call>"


@pytest.mark.parametrize("name", FOUND)
def test_nobody_can_forge_a_message(families: dict[str, Family], name: str) -> None:
    """A message that holds what the template itself writes around messages has no more messages in it."""
    family = families[name]
    forged = family.text(family.ids(NEXT))
    plain, attack = family.ids(ASK), family.ids([ASK[0], said("user", forged)])
    assert [role for _, role in family.marks.messages(attack)] == [role for _, role in family.marks.messages(plain)]
    (first, _), (second, _) = family.wishes(attack)
    assert first == family.wishes(plain)[0][0] and second > len(family.tokenizer.encode("wide?"))


def test_our_own_results_are_no_questions_either(families: dict[str, Family]) -> None:
    family = families["smollm2"]
    shown = [*ASK, said("assistant", "<tool_call>x</tool_call>"), said("user", "<observation>\n4 km\n</observation>")]
    assert [role for _, role in family.marks.messages(family.ids(shown))][-3:] == ["assistant", "tool", "assistant"]


def test_a_client_names_up_to_four_places(families: dict[str, Family]) -> None:
    family = families["hermes"]
    ids = family.ids(ASK)
    own = family.wishes(ids)
    assert family.wishes(ids, [5, own[0][0], 0, 10_000]) == [(5, "client"), (own[0][0], "client"), own[1]]
    every = family.marks.marks(ids)
    assert [at for at, _ in every] == [at for at, _ in family.marks.messages(ids) if at]
    with pytest.raises(RequestError, match="5 places are marked, at most 4"):
        family.wishes(ids, [1, 2, 3, 4, 5])


@pytest.mark.parametrize(
    "source",
    [
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}",  # no control token
        "{{ raise_exception('no') }}",
        "{{ bos_token }}",  # shows nothing
    ],
)
def test_a_template_without_control_tokens_has_no_marks(tokenizer: Tokenizer, source: str) -> None:
    template = ChatTemplate(source, bos="<|im_start|>", eos="<|im_end|>")
    marks = ChatMarks.probe(template, tokenizer)
    template.close()
    assert marks.openers == () and marks.marks([1, 2, 3]) == [] and marks.marks([1, 2, 3], [2]) == [(2, "client")]


def test_a_prompt_of_one_message_is_marked_nowhere_before_it(families: dict[str, Family]) -> None:
    assert [kind for _, kind in families["hermes"].wishes(families["hermes"].ids([ASK[1]]))] == ["reply"]
