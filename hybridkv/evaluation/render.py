"""A sample as the tokens that a model reads: the document with all that stands before it, then the question.

With a chat template the document and the question are one user turn, and the answer begins with what the task gives of
it. Without one they are plain text.
"""

from __future__ import annotations

from dataclasses import dataclass

from hybridkv.errors import HybridKVError, RequestError
from hybridkv.evaluation.sample import Question, Sample
from hybridkv.llm import LLM

BETWEEN = "\n\n"  # document and question


@dataclass(frozen=True)
class Rendered:
    """Token ids: `document` is read and may be cut before `question` is known; both together are the prompt."""

    document: list[int]
    question: list[int]

    @property
    def prompt(self) -> list[int]:
        """Document and question."""
        return [*self.document, *self.question]


class Renderer:
    """Samples and further questions in a model's own format."""

    def __init__(self, llm: LLM) -> None:
        if llm.tokenizer is None:
            raise HybridKVError(f"{llm.path.name} has no tokenizer, and tasks are texts; add its tokenizer.json")
        self.llm, self.tokenizer = llm, llm.tokenizer

    def count(self, text: str) -> int:
        """Tokens of a text."""
        return len(self.tokenizer.encode(text, bos=False))

    def sample(self, sample: Sample) -> Rendered:
        """The document and the first question."""
        question = sample.questions[0]
        if self.llm.chat_template is None:
            before = sample.system + BETWEEN + sample.document if sample.system else sample.document
            after = f"{BETWEEN}{question.text}\nAnswer: {question.answer_prefix}"
            return self._encoded(before, after)
        messages = [{"role": "system", "content": sample.system}] if sample.system else []
        messages.append({"role": "user", "content": sample.document + BETWEEN + question.text})
        text = self._render(messages)
        at = text.find(sample.document)
        if at < 0:
            raise HybridKVError(f"the chat template of {self.llm.path.name} changes the text of a message")
        end = at + len(sample.document)
        return self._encoded(text[:end], text[end:] + question.answer_prefix)

    def next_turn(self, question: Question, after: int) -> list[int]:
        """Token ids of a further question, following an answer whose last token is `after`."""
        if self.llm.chat_template is None:
            text = f"{BETWEEN}{question.text}\nAnswer: {question.answer_prefix}"
            return self.tokenizer.encode(text, bos=False, after=after)
        said = "An answer."
        turns = [("user", "A question."), ("assistant", said), ("user", question.text)]
        text = self._render([{"role": role, "content": content} for role, content in turns])
        at = text.find(said)
        if at < 0:
            raise HybridKVError(f"the chat template of {self.llm.path.name} leaves out what was said before")
        tail = text[at + len(said) :] + question.answer_prefix
        return self.tokenizer.encode(tail, bos=False, special=True, after=after)

    def plain(self, text: str) -> list[int]:
        """Token ids of a text by itself."""
        return self.tokenizer.encode(text)

    def decode(self, tokens: list[int]) -> str:
        """The text of an answer, without the token that ended it."""
        ends = self.llm.engine.eos_ids
        return self.tokenizer.decode([token for token in tokens if token not in ends])

    def _render(self, messages: list[dict[str, str]]) -> str:
        try:
            return self.llm.render(messages, thinking=False)
        except RequestError:  # the template has no such switch
            return self.llm.render(messages)

    def _encoded(self, before: str, after: str) -> Rendered:
        bos = self.tokenizer.bos_text
        wrote_bos = bool(bos) and before.startswith(str(bos))
        document = self.tokenizer.encode(before, bos=False, special=True)
        if not wrote_bos and self.tokenizer.add_bos and self.tokenizer.bos_id is not None:
            document = [self.tokenizer.bos_id, *document]
        return Rendered(document, self.tokenizer.encode(after, bos=False, special=True, after=document[-1]))
