"""Answers by a grammar in an engine: whole and valid, alone and beside others, through preemptions and forks, launched
ahead or not; and what fails is one request's own.
"""

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.driving import assert_nothing_held, prompt, run
from hybridkv.config import SamplingParams, StructuredOutputs
from hybridkv.engine.engine import Engine
from hybridkv.errors import RequestError
from hybridkv.request import Request
from hybridkv.text import constraint, grammar
from hybridkv.text.constraint import Constraint, Thoughts
from hybridkv.text.tokenizer import Tokenizer

pytest.importorskip("llguidance")
EOS = frozenset({2})
SCHEMA = {
    "type": "object",
    "properties": {
        "n": {"type": "integer", "minimum": -5, "maximum": 99},
        "s": {"type": "string", "maxLength": 4},
        "l": {"type": "array", "items": {"enum": ["a", "bc", True]}, "maxItems": 2},
    },
    "required": ["n", "s", "l"],
    "additionalProperties": False,
}


def fits(text: str) -> bool:
    found = json.loads(text)
    return (
        list(found) == ["n", "s", "l"]
        and -5 <= found["n"] <= 99
        and len(found["s"]) <= 4
        and len(found["l"]) <= 2
        and all(each in ("a", "bc", True) for each in found["l"])
    )


def bound(seed: int = 0, **more: Any) -> SamplingParams:
    given = {"max_tokens": 120, "temperature": 1.0, "seed": seed, "structured_outputs": {"json": SCHEMA}}
    return SamplingParams(**(given | more))


@pytest.fixture(scope="module")
def make(engine_of: Callable[..., Engine], ascii_tokenizer: Tokenizer) -> Callable[..., Engine]:
    """An engine; all of them share the compiled grammars."""
    grammars = None

    def build(kind: str = "llama", ahead: bool = False, **more: Any) -> Engine:
        nonlocal grammars
        engine = engine_of(kind, tokenizer=ascii_tokenizer, eos=EOS, **more)
        grammars = engine.grammars = grammars or engine.grammars
        engine.launches_ahead = ahead
        return engine

    return build


def asked(engine: Engine, params: SamplingParams, tokens: int = 12) -> Request:
    return engine.add(prompt(tokens), params)


def done(engine: Engine, params: SamplingParams) -> Request:
    request = asked(engine, params)
    run(engine)
    assert_nothing_held(engine)
    return request


@pytest.mark.parametrize(("kind", "ahead"), [("llama", False), ("llama", True), ("qwen3_5", True)])
def test_answers_fit_their_schema(kind: str, ahead: bool, make: Callable) -> None:
    engine = make(kind, ahead)
    requests = [asked(engine, bound(seed, ignore_eos=bool(seed % 2)), 5 + seed) for seed in range(4)]
    run(engine)
    assert_nothing_held(engine)
    for request in requests:
        assert request.finish_reason == "stop" and fits(request.text.text), request.text.text
    assert len({request.text.text for request in requests}) > 1


def test_preempted_answers_go_on_where_they_were(make: Callable) -> None:
    alone = [done(make(), bound(seed)).generated for seed in range(3)]
    engine = make(pool=64)  # too little for three
    requests = [asked(engine, bound(seed)) for seed in range(3)]
    run(engine)
    assert_nothing_held(engine)
    assert [request.generated for request in requests] == alone
    assert sum(request.preemptions for request in requests) > 0


@pytest.mark.parametrize("ahead", (False, True))
def test_several_answers_to_a_prompt_each_have_their_own_place(ahead: bool, make: Callable) -> None:
    alone = [done(make(ahead=ahead), bound(7 + i)).generated for i in range(3)]
    engine = make(ahead=ahead)
    request = done(engine, bound(7, n=3))
    assert [each.generated for each in (request, *request.siblings)] == alone
    assert all(fits(each.text.text) for each in (request, *request.siblings))


@pytest.mark.parametrize("ahead", (False, True))
def test_free_answers_beside_two_bound_ones_stay_as_they_are(ahead: bool, make: Callable) -> None:
    free = [SamplingParams(max_tokens=30, temperature=0.9 * (i % 2), seed=i, ignore_eos=True) for i in range(6)]

    def answers(more: list[SamplingParams]) -> list[list[int]]:
        engine = make(exact=True, ahead=ahead)
        added = [engine.add(prompt(9, i), params) for i, params in enumerate(free)]
        others = [engine.add(prompt(7, 20 + i), params) for i, params in enumerate(more)]
        run(engine)
        assert all(fits(other.text.text) for other in others)
        return [request.generated for request in added]

    assert answers([bound(1), bound(2, temperature=0)]) == answers([])


def test_a_bound_answer_is_not_launched_ahead_of_its_token(make: Callable) -> None:
    engine = make(ahead=True)
    request = asked(engine, bound(3))
    while not request.answer_tokens:
        engine.step()
    seen = []
    while not engine.idle:
        engine.step()
        seen.append(request.unseen)
    assert set(seen) == {0} and fits(request.text.text)


def test_logprobs_are_those_of_the_model(make: Callable) -> None:
    """The chosen token's, and the best ones', before any mask."""
    engine = make()
    request = done(engine, bound(4, logprobs=3, n=2))
    for each in (request, *request.siblings):
        logits = engine.score(each.tokens)[each.prompt_tokens - 1 : -1].log_softmax(-1)
        for token, scores, row in zip(each.generated, each.logprobs, logits, strict=True):
            assert abs(scores.token - float(row[token])) < 1e-4  # f32 logits, prompt and single tokens computed apart
            assert list(scores.top) == row.topk(3).indices.tolist()


def test_a_hook_cannot_undo_the_grammar(make: Callable) -> None:
    def hook(generated: list[int], logits: Tensor) -> Tensor:
        return torch.zeros_like(logits)

    assert fits(done(make(), bound(5, logits_hook=hook)).text.text)


@pytest.mark.parametrize(
    "more", [{"logit_bias": {60: 100.0}}, {"repetition_penalty": 2.0}, {"top_k": 1}, {"min_tokens": 50}]
)
def test_what_else_is_asked_of_sampling_changes_nothing_of_the_form(make: Callable, more: dict[str, Any]) -> None:
    request = done(make(), bound(6, **more))
    assert request.finish_reason == "stop" and fits(request.text.text)


def test_a_stop_token_ends_the_answer_only_where_the_grammar_accepts(
    make: Callable, ascii_tokenizer: Tokenizer
) -> None:
    inner = {
        "type": "object",
        "properties": {"x": {"type": "boolean"}},
        "required": ["x"],
        "additionalProperties": False,
    }
    nested = {"type": "object", "properties": {"a": inner, "b": inner}, "required": ["a", "b"]}
    ids = ascii_tokenizer.encode("}q", bos=False)
    params = bound(1, structured_outputs={"json": nested | {"additionalProperties": False}}, stop_token_ids=ids)
    found = json.loads(done(make(), params).text.text)
    assert found.keys() == {"a", "b"} and all(isinstance(each["x"], bool) for each in found.values())
    # where the answer may end or go on, a stop token ends it, and is no part of it
    params = bound(1, structured_outputs={"regex": "[xyz]{2,90}"}, stop_token_ids=ids, logit_bias={ids[1]: 100.0})
    request = done(make(), params)
    assert request.generated[-1] == ids[1] and len(request.text.text) == 2 and request.finish_reason == "stop"


def test_the_limit_cuts_an_answer(make: Callable) -> None:
    request = done(make(), bound(0, max_tokens=5))
    assert request.finish_reason == "length" and request.answer_tokens == 5


@pytest.mark.parametrize(
    ("structure", "good"),
    [({"regex": r"\d{3}-[ab]+c"}, lambda text: text[3] == "-" and text[-1] == "c"),
     ({"choice": ["yes", "no", "perhaps"]}, lambda text: text in ("yes", "no", "perhaps")),
     ({"grammar": 'start: "(" item ("," item)* ")"\nitem: /[0-9]{1,2}/'}, lambda text: text[0] + text[-1] == "()"),
     ({"json_object": True}, lambda text: text[0] == "{"),
     ({"json": json.dumps(SCHEMA)}, fits)],
)  # fmt: skip
def test_other_kinds_of_structure(make: Callable, structure: dict[str, Any], good: Callable[[str], bool]) -> None:
    request = done(make(), bound(2, structured_outputs=structure, top_k=10))
    assert request.error is None and good(request.text.text), request.text.text


@pytest.mark.parametrize(
    ("structure", "said"),
    [({}, "exactly one"), ({"json": SCHEMA, "regex": "a"}, "exactly one"), ({"xml": 1}, "has no 'xml'"),
     ({"json": "{"}, "no valid JSON"), ({"json": [1]}, "json cannot be"), ({"regex": "(?=a)b"}, "look-around"),
     ({"choice": []}, "1 to 4096 texts"), ({"choice": ["", "a"]}, "1 to 4096 texts"), ({"grammar": "start: x"}, "x"),
     ("json", "StructuredOutputs")],
)  # fmt: skip
def test_what_cannot_be_a_structure_is_refused(make: Callable, structure: Any, said: str) -> None:
    engine = make()
    with pytest.raises(RequestError, match=said):
        engine.add(prompt(5), bound(structured_outputs=structure))
    assert engine.idle


def test_without_a_tokenizer_there_is_no_structure(engine_of: Callable) -> None:
    with pytest.raises(RequestError, match="needs a tokenizer"):
        engine_of("llama").add(prompt(5), bound())


def test_without_the_extra_its_name_is_said(make: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "llguidance", None)
    with pytest.raises(RequestError, match=r"hybridkv\[structured\]"):
        make().add(prompt(5), bound(structured_outputs={"choice": ["never compiled before"]}))


# ---- faults


class Broken:
    """A matcher that fails at its n-th call of one of its methods."""

    def __init__(self, matcher: Any, method: str, after: int) -> None:
        self._matcher, self._method, self._left = matcher, method, after

    def __getattr__(self, name: str) -> Any:
        if name == self._method:
            self._left -= 1
            if self._left < 0:
                raise RuntimeError("injected")
        return getattr(self._matcher, name)


@pytest.fixture
def breaks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, int], list[str]]]:
    """`breaks(method, after)`: the next answer's matcher breaks, and no other's."""
    fired: list[str] = []

    def arm(method: str, after: int) -> list[str]:
        original, left = grammar.Grammar.matcher, [method]

        def matcher(self: grammar.Grammar) -> Any:
            found = original(self)
            if not left:
                return found
            fired.append(left.pop())
            return Broken(found, method, after)

        monkeypatch.setattr(grammar.Grammar, "matcher", matcher)
        return fired

    yield arm


@pytest.mark.parametrize(
    ("method", "n", "ahead"),
    [("unsafe_compute_mask_ptr", 1, True), ("unsafe_compute_mask_ptr", 3, False), ("consume_token", 1, False),
     ("consume_token", 3, True), ("is_accepting", 2, True)],
)  # fmt: skip
def test_a_failing_grammar_ends_its_own_request(
    make: Callable, breaks: Callable, method: str, n: int, ahead: bool
) -> None:
    engine = make(ahead=ahead)
    fired = breaks(method, 4)
    broken = engine.add(prompt(6), bound(1, n=n))
    good, free = asked(engine, bound(2)), asked(engine, SamplingParams(max_tokens=20, ignore_eos=True))
    run(engine)
    assert_nothing_held(engine)
    assert fired == [method]
    failed = [each for each in (broken, *broken.siblings) if each.finish_reason == "error"]
    assert len(failed) == 1 and "injected" in (failed[0].error or "")
    assert fits(good.text.text) and free.answer_tokens == 20
    assert all(fits(each.text.text) for each in (broken, *broken.siblings) if each not in failed)
    assert fits(done(engine, bound(3)).text.text)


def test_the_first_mask_fails_for_all_answers_to_a_prompt(make: Callable, breaks: Callable) -> None:
    engine = make()
    breaks("unsafe_compute_mask_ptr", 0)
    broken = engine.add(prompt(6), bound(1, n=2))
    run(engine)
    assert_nothing_held(engine)
    assert [each.finish_reason for each in (broken, *broken.siblings)] == ["error", "error"]


# ---- thoughts


MARKS = ("<think>", "</think>")


def thinking(engine: Engine, budget: int | None, structure: dict[str, Any] | None, opened: bool = True) -> Constraint:
    tokenizer = engine.tokenizer
    assert tokenizer is not None
    thoughts = Thoughts(tokenizer, MARKS, opened, budget)
    if structure is None:
        return Constraint(None, thoughts)
    params = engine.compiled(SamplingParams(structured_outputs=structure), thoughts)
    found = params.structured_outputs
    assert isinstance(found, Constraint)
    return found


@pytest.mark.parametrize("ahead", (False, True))
def test_a_budget_ends_thoughts_and_the_answer_is_bound(make: Callable, ahead: bool) -> None:
    engine = make(ahead=ahead)
    request = done(engine, bound(9, structured_outputs=thinking(engine, 10, {"json": SCHEMA})))
    thoughts, mark, answer = request.text.text.partition("</think>")
    assert len(thoughts) == 10 and mark and fits(answer) and request.finish_reason == "stop"


def test_a_budget_alone_leaves_the_answer_free(make: Callable) -> None:
    engine = make()
    request = done(engine, bound(9, structured_outputs=thinking(engine, 10, None), max_tokens=40, ignore_eos=True))
    assert request.text.text[10:18] == "</think>" and request.answer_tokens == 40
    # one that does not open its thoughts has none to end
    request = done(
        engine, bound(9, structured_outputs=thinking(engine, 10, None, opened=False), max_tokens=40, ignore_eos=True)
    )
    assert "</think>" not in request.text.text


def test_thoughts_are_free_but_do_not_end_the_answer(make: Callable) -> None:
    """Tokens that would end it are masked until the grammar has had its turn; all others come as they would."""
    engine = make()
    plain = done(engine, SamplingParams(max_tokens=30, temperature=1.0, seed=4, logit_bias={2: -100.0}))
    structure = thinking(engine, None, {"choice": ["a"]})
    likely = {"logit_bias": {2: 100.0}, "structured_outputs": structure}
    request = done(engine, SamplingParams(max_tokens=30, temperature=1.0, seed=4, **likely))  # type: ignore[arg-type]
    assert request.generated == plain.generated and request.finish_reason == "length"


def spelled(engine: Engine, text: str, structure: Constraint) -> constraint.Following:
    assert engine.tokenizer is not None
    following = structure.start(EOS)
    for token in engine.tokenizer.encode(text, bos=False, after=-1):
        following.see(token)
    return following


def test_the_matcher_begins_after_the_mark_however_it_is_spelled(make: Callable) -> None:
    engine = make()
    row = torch.zeros(4, dtype=torch.int32).numpy()

    def allowed(text: str, opened: bool = True) -> list[str]:
        following = spelled(engine, text, thinking(engine, None, {"choice": ["xa", "yb"]}, opened))
        assert following.fill(row) and engine.tokenizer is not None
        ids = [i for i in range(97) if row[i >> 5] >> (i & 31) & 1]
        return [engine.tokenizer.token_text(i) for i in ids]

    assert len(allowed("hm </think")) == 96  # all but the end token
    assert allowed("hm </think>") == ["x", "y"] and allowed("a</think></think>x"[:-9]) == ["x", "y"]
    assert allowed("hm </think>y") == ["b"] and allowed("", opened=False) == ["x", "y"]
    assert engine.compiled(SamplingParams(structured_outputs=StructuredOutputs(choice=["xa"]))).structured_outputs
