"""Where in a prompt its messages begin, from token ids, and so which places are worth a checkpoint.

A state of a recurrent layer cannot be cut back, so what a later prompt can reuse is decided by where states were kept.
Prompts of one conversation part at few places: before the last message (it was edited, or a reminder in it is gone),
and where the reply to the last real question began (from there on templates drop thoughts, once another question
follows). A client may name others. The grid inside long messages is `cache/checkpoints.py`'s.

What begins a message is learnt from the template itself: it is rendered on four probe chats. Only control tokens count,
and a message that spells one has none (`prompt.py`), so nobody can forge a mark.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hybridkv.errors import HybridKVError, RequestError
from hybridkv.text.call_formats import format_of, opening_token
from hybridkv.text.chat import ChatTemplate
from hybridkv.text.tokenizer import Tokenizer

MOST_CLIENT_MARKS = 4
RESULT = "<observation>"  # begins results of tools, where the template has no role for them and ours is used
SYSTEM, FIRST, ANSWER, SECOND, THOUGHT, OUTPUT = (f"Probe{i}Words" for i in range(6))
FOLLOWING = ("a", "Q", "1", "\n", " b", "<", "{")  # what a message may begin with: an opener's last token may merge


@dataclass(frozen=True)
class Opener:
    """What begins a message of a role: token ids, of which the first `lead` still end the message before."""

    role: str
    ids: tuple[int, ...]
    lead: int = 0


@dataclass(frozen=True)
class ChatMarks:
    """What a template's probe chats say.

    Args:
        openers: what begins a message, by role, the longest first; none: no control token does, so there are no marks.
        answer_end: the text that the template writes after an answer; "": none.
        drops_thinking: whether thoughts are left out once another question follows.
        call_token: opens a call of a function; None: letters do, or nothing.
    """

    openers: tuple[Opener, ...] = ()
    answer_end: str = ""
    drops_thinking: bool = False
    call_token: int | None = None

    @staticmethod
    def probe(template: ChatTemplate, tokenizer: Tokenizer) -> ChatMarks:
        """Render the probe chats. A template that refuses them has no marks."""
        probes = _Probes(template)
        form = format_of(template)
        token = opening_token(tokenizer, form)
        if probes.question is None or probes.talk is None:
            return ChatMarks(call_token=token)
        end_of_question, end = _after(probes.question, FIRST), probes.answer_end
        ask = _between(probes.talk, ANSWER, SECOND).removeprefix(end)
        answer = _between(probes.talk, FIRST, ANSWER).removeprefix(end_of_question)
        texts = {"user": (end, ask), "assistant": (end_of_question, answer, *([probes.reply] if probes.reply else []))}
        if form.own_prompt:
            texts["tool"] = (end, ask + RESULT)
        elif (tool := probes.before_output(end)) is not None:
            texts["tool"] = (end, tool)
        openers = {_opener(tokenizer, role, *text) for role, text in texts.items()}
        found = sorted((o for o in openers if o is not None), key=lambda o: (-len(o.ids), o.role))
        if not {"user", "assistant"} <= {o.role for o in found}:
            found = []
        return ChatMarks(tuple(found), end, probes.drops_thinking, token)

    def messages(self, ids: Sequence[int]) -> list[tuple[int, str]]:
        """(position, role) of each message: where its opener begins. A role that no probe showed is "other"."""
        if not self.openers:
            return []
        tokens = np.asarray(ids, np.int64)
        firsts = {opener.ids[0]: opener.lead for opener in self.openers}
        found = []
        for at in np.flatnonzero(np.isin(tokens, list(firsts))).tolist():
            here = tuple(ids[at : at + len(self.openers[0].ids)])
            role = next((o.role for o in self.openers if here[: len(o.ids)] == o.ids), "other")
            position = at + firsts[ids[at]]
            if position < len(ids):
                found.append((position, role))
        return found

    def marks(self, ids: Sequence[int], client: Sequence[int] = ()) -> list[tuple[int, str]]:
        """(position, kind) of the places of a prompt that are worth a checkpoint, shallowest first: "client" where the
        client said so, "message" before the last message, "reply" where that to the last question begins. Where other
        messages begin is "begin".
        """
        if len(client) > MOST_CLIENT_MARKS:
            raise RequestError(f"{len(client)} places are marked, at most {MOST_CLIENT_MARKS} can be")
        found = {at: "client" for at in client if 0 < at <= len(ids)}
        messages = self.messages(ids)
        questions = [i for i, (_, role) in enumerate(messages) if role == "user"]
        if questions and questions[-1] + 1 < len(messages):
            found.setdefault(messages[questions[-1] + 1][0], "reply")
        said = messages[:-1] if messages and messages[-1][1] == "assistant" else messages  # without the open reply
        if said:
            found.setdefault(said[-1][0], "message")
        for at, _ in messages:
            found.setdefault(at, "begin")
        return sorted((at, kind) for at, kind in found.items() if at > 0)


class _Probes:
    """Four chats, rendered. None: the template refuses one, or does not show its words."""

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template
        head = [{"role": "system", "content": SYSTEM}]
        ask, answer = {"role": "user", "content": FIRST}, {"role": "assistant", "content": ANSWER}
        thought = answer | {"reasoning_content": THOUGHT, "reasoning": THOUGHT}
        more = {"role": "user", "content": SECOND}
        self.question = self._shown([*head, ask], FIRST)
        if self.question is None:  # a template may take no system prompt
            head = []
            self.question = self._shown([ask], FIRST)
        begun = self._shown([*head, ask], FIRST, add_generation_prompt=True)
        self.reply = ""  # what begins an answer
        if begun is not None and self.question is not None and begun.startswith(self.question):
            self.reply = begun[len(self.question) :]
        self.talk = self._shown([*head, ask, answer, more], FIRST, ANSWER, SECOND)
        answered = self._shown([*head, ask, answer], ANSWER)
        self.answer_end = "" if answered is None else _after(answered, ANSWER)
        shown, later = (self._shown([*head, ask, thought, *rest], ANSWER) for rest in ([], [more]))
        self.drops_thinking = shown is not None and THOUGHT in shown and later is not None and THOUGHT not in later
        call: dict[str, Any] = {"id": "p", "type": "function", "function": {"name": "probe", "arguments": {}}}
        called = {"role": "assistant", "content": "", "tool_calls": [call]}
        output = {"role": "tool", "tool_call_id": "p", "name": "probe", "content": OUTPUT}
        self.results = self._shown([*head, ask, called, output], OUTPUT)

    def _shown(self, messages: list[dict[str, Any]], *words: str, add_generation_prompt: bool = False) -> str | None:
        try:
            text = self._template.render(messages, add_generation_prompt=add_generation_prompt)
        except HybridKVError:
            return None
        places = [text.find(word) for word in words]
        return text if -1 not in places and places == sorted(places) else None

    def before_output(self, end: str) -> str | None:
        """What begins the result of a tool; None: the template shows none, or nothing ends the call before it."""
        if self.results is None or not end:
            return None
        before = self.results[: self.results.index(OUTPUT)]
        return before[before.rindex(end) + len(end) :] if end in before else None


def _opener(tokenizer: Tokenizer, role: str, end: str, *texts: str) -> Opener | None:
    """The token ids that all texts begin with, which begin a message of the role, from a control token on. `end`: what
    ends the message before.
    """
    variants = [tokenizer.encode(end + text + word, bos=False) for text in texts for word in FOLLOWING]
    ids = variants[0]
    for other in variants[1:]:
        ids = ids[: _same(ids, other)]
    begins, length = 0, 0  # the first token of the opener
    while begins < len(ids) and length < len(end):
        length += len(tokenizer.token_text(ids[begins]))
        begins += 1
    control = [i for i, token in enumerate(ids) if token in tokenizer.control]
    inside = [i for i in control if i >= begins]
    if inside:
        return Opener(role, tuple(ids[inside[0] :]))
    if not control or begins == len(ids):
        return None
    return Opener(role, tuple(ids[control[-1] :]), begins - control[-1])


def _same(a: Sequence[Any], b: Sequence[Any]) -> int:
    return next((n for n, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


def _after(text: str, word: str) -> str:
    return text[text.index(word) + len(word) :]


def _between(text: str, first: str, second: str) -> str:
    return text[text.index(first) + len(first) : text.index(second)]
