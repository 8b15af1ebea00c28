"""How a prompt is put to the model: through its chat template, as it is, or as token ids; one at a time or many."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from hybridkv.commands.batch import Line, wrong
from hybridkv.commands.chat_options import ChatOptions
from hybridkv.commands.flag_words import in_flags
from hybridkv.commands.prompts import to_messages, token_ids
from hybridkv.errors import HybridKVError

if TYPE_CHECKING:
    from hybridkv.answers import ChatStream, Completion, Stream
    from hybridkv.config import SamplingParams
    from hybridkv.document import Document
    from hybridkv.engine.engine import Engine
    from hybridkv.llm import LLM
    from hybridkv.request import Request
    from hybridkv.text.reasoning import ReasoningSplitter


@dataclass(frozen=True)
class Asking:
    """A model, and what goes to it beside each prompt."""

    llm: LLM
    chat: ChatOptions
    raw: bool
    variables: dict[str, Any]
    tools: list[dict[str, Any]] | None
    document: Document | None = None  # what the prompts ask about

    def messages(self, line: Line) -> list[dict[str, Any]] | None:
        """The conversation that the chat template gets; None where the prompt is given as it is."""
        if line.messages is not None:
            return line.messages
        for_template = self.chat.system is not None or self.chat.thinking is not None or self.variables or self.tools
        if self.raw or not isinstance(line.prompt, str) or (self.llm.chat_template is None and not for_template):
            return None
        return to_messages(line.prompt, self.chat.system)

    def prompt(self, line: Line) -> str | list[int]:
        """The prompt as it is: text, or ids, which it may spell for a model without a tokenizer."""
        assert line.prompt is not None
        if self.llm.tokenizer is None and isinstance(line.prompt, str):
            return token_ids(line.prompt) or line.prompt
        return line.prompt

    def stream(self, line: Line, params: SamplingParams) -> Stream | ChatStream:
        """One answer, piece by piece."""
        if self.document is not None:
            return self.document.stream(self.prompt(line), params, thinking=self.chat.thinking, **self.variables)
        messages = self.messages(line)
        if messages is None:
            return self.llm.stream(self.prompt(line), params)
        return self.llm.chat_stream(messages, params, tools=self.tools, thinking=self.chat.thinking, **self.variables)

    def job(self, line: Line, params: SamplingParams, eviction: object) -> Job:
        """One of several answers."""
        from hybridkv.engine.engine import INHERIT

        if self.document is not None:
            if line.messages is not None or eviction is not INHERIT:
                raise HybridKVError("a question about a document is a prompt without messages, and is kept whole")
            [asked] = self.document.requests([self.prompt(line)], params, self.chat.thinking, self.variables)
            return Job(line, *asked)
        messages = self.messages(line)
        if messages is None:
            [add] = self.llm.requests([self.prompt(line)], params, [eviction])
            return Job(line, add)
        found = self.llm.chat_request(messages, params, self.tools, self.chat.thinking, eviction, self.variables)
        return Job(line, found.add, found.splitter)


@dataclass(frozen=True)
class Job:
    """A line as the engine gets it."""

    line: Line
    add: Callable[[Engine], Request]
    splitter: Callable[[], ReasoningSplitter] | None = None  # of thoughts and answer, where a template marks them


@dataclass(frozen=True)
class Outcome:
    """How a line ended: with a request that has its answer, or with what went wrong."""

    job: Job
    request: Request | None = None
    problem: Exception | None = None

    @property
    def answer(self) -> Completion | None:
        """The answer, thoughts apart from it; None where there is none."""
        from hybridkv.answers import Completion

        if self.request is None:
            return None
        found = Completion.of(self.request)
        return found if self.job.splitter is None else found.divided(self.job.splitter)

    @property
    def error(self) -> str | None:
        """Why there is no answer, or no whole one."""
        if self.problem is not None:
            return in_flags(str(self.problem) or type(self.problem).__name__)
        return self.request.error if self.request is not None else None


def run_together(llm: LLM, jobs: Sequence[Job], numbered: bool = True) -> Generator[Outcome, None, None]:
    """Run all in the same steps, and give each as it ends.

    What the engine refuses is told before anything runs, with the number of its line if they are numbered. Leaving
    early stops what is left.
    """
    from hybridkv.engine.owner import TicketsAsTheyEnd

    def begin(job: Job, engine: Engine) -> Request:
        try:
            return job.add(engine)
        except HybridKVError as problem:
            raise wrong(job.line.index, in_flags(str(problem))) if numbered else problem from None

    tickets = TicketsAsTheyEnd(llm.owner, [partial(begin, job) for job in jobs])  # all, or none if one is refused
    try:
        for number, ticket in tickets:
            try:
                outcome = Outcome(jobs[number], ticket.result())
            except Exception as problem:
                outcome = Outcome(jobs[number], problem=problem)
            yield outcome
    finally:
        tickets.close()


def in_order_of(jobs: Sequence[Job], outcomes: Iterable[Outcome]) -> Iterator[Outcome]:
    """Each once all before it have come."""
    waiting: dict[int, Outcome] = {}
    turn = iter(jobs)
    job = next(turn, None)
    for outcome in outcomes:
        waiting[id(outcome.job)] = outcome
        while job is not None and id(job) in waiting:
            yield waiting.pop(id(job))
            job = next(turn, None)
