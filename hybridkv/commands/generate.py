"""`hybridkv generate`: answers to one prompt, streamed, or to a file of prompts, computed together."""

from __future__ import annotations

import contextlib
import io
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TextIO

from typer import Argument, BadParameter, Exit, Option

from hybridkv.commands import completion
from hybridkv.commands.asking import Asking, Outcome, in_order_of, run_together
from hybridkv.commands.batch import Line, read_batch, wrong
from hybridkv.commands.chat_options import DOCUMENT, ChatOptions, refuse_beside_document
from hybridkv.commands.declaring import with_options
from hybridkv.commands.options import ModelOptions
from hybridkv.commands.panels import OUTPUT, PROMPT
from hybridkv.commands.prompts import read_lines, read_prompt
from hybridkv.commands.reuse_options import ReuseOptions
from hybridkv.commands.sampling_options import SamplingOptions
from hybridkv.errors import HybridKVError

if TYPE_CHECKING:
    from hybridkv.config import EvictionConfig, SamplingParams


@with_options
def generate(
    *,
    prompt: Annotated[
        str | None, Argument(metavar="PROMPT", help="the prompt, or the question about a text; - is standard input")
    ] = None,
    prompt_file: Annotated[
        str | None,
        Option(
            "--prompt-file",
            metavar="FILE",
            help="a file that holds the prompt, or the text that PROMPT asks about; - is standard input",
            rich_help_panel=PROMPT,
            autocompletion=completion.any_file,
        ),
    ] = None,
    prompts_file: Annotated[
        str | None,
        Option(
            "--prompts-file",
            metavar="FILE",
            help="prompts that are run together: one a line, or JSON lines with settings of their own; - is standard "
            "input",
            rich_help_panel=PROMPT,
            autocompletion=completion.any_file,
        ),
    ] = None,
    document: Annotated[str | None, DOCUMENT] = None,
    raw: Annotated[
        bool, Option("--raw", help="give the prompt as it is, without the chat template", rich_help_panel=PROMPT)
    ] = False,
    chat: ChatOptions,
    model: ModelOptions,
    reuse: ReuseOptions,
    sampling: SamplingOptions,
    n: Annotated[int, Option("--n", "-n", metavar="N", help="answers to each prompt", rich_help_panel=OUTPUT)] = 1,
    logprobs: Annotated[
        int | None,
        Option(
            "--logprobs",
            metavar="N",
            help="show each token's log probability and N alternatives",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    prompt_logprobs: Annotated[
        int | None,
        Option("--prompt-logprobs", metavar="N", help="the same of the prompt's tokens", rich_help_panel=OUTPUT),
    ] = None,
    as_json: Annotated[
        bool, Option("--json", help="print one JSON object for each prompt, one a line", rich_help_panel=OUTPUT)
    ] = False,
    output: Annotated[
        str | None,
        Option(
            "--output",
            "-o",
            metavar="FILE",
            help="write answers there instead of standard output",
            rich_help_panel=OUTPUT,
            autocompletion=completion.any_file,
        ),
    ] = None,
    in_order: Annotated[
        bool,
        Option(
            "--in-order",
            help="answers to a file of prompts in its order; without this as they are ready",
            rich_help_panel=OUTPUT,
        ),
    ] = False,
) -> None:
    """Answer a prompt, or several together.

    A pipe is read: alone it is the prompt; beside PROMPT it is the text that PROMPT asks about, and comes before it.
    The prompt is put into the model's chat format when it has one. The answer goes to standard output, all else to
    standard error. For a model without a tokenizer prompt and answer are token ids, such as "1 17 4".

    With --document the prompt is a question about a text that `hybridkv compress` has read.

    A file of prompts is run together, and each answer is written as soon as it is ready. In JSON lines each object has
    a "prompt" or "messages", and may have an "id" and settings of its own such as "max_tokens", "temperature" or
    "budget"; answers have "index", the line from 0, and the "id". A mistake in a line is told before anything runs; an
    answer that fails has an "error", the others go on, and the exit code is 1.
    """
    chat.refuse_raw(raw)
    if document is not None:
        refuse_beside_document(model, chat, raw)
    params = sampling.params(n=n, logprobs=logprobs, prompt_logprobs=prompt_logprobs)
    variables, tools, cache = chat.variables, chat.tool_list, model.cache()
    if prompts_file is None:
        lines = [Line(0, prompt=read_prompt(prompt, prompt_file))]
    else:
        lines = read_batch(prompts_file, read_lines(prompt, prompt_file, prompts_file))
        for line in lines:
            with _numbered(line):
                line.params(params)
                line.evicts(cache.eviction, None)
    _check_output(output, prompt_file, prompts_file)
    with model.open(len(lines) * n + (document is not None), cache, reuse) as llm:
        about = None if document is None else llm.load_document(document)
        asking = Asking(llm, chat, raw, variables, tools, about)
        with _written_to(output):
            if prompts_file is not None:
                _several(asking, lines, params, cache.eviction, as_json, in_order)
            elif n > 1:
                _samples(asking, lines[0], params, as_json)
            else:
                _one(asking, lines[0], params, as_json)


def _check_output(output: str | None, *inputs: str | None) -> None:
    """Refuse, before a model is loaded, a file that cannot be written. It is left as it is until there is an answer."""
    if output is None:
        return
    try:
        path = Path(output).expanduser()
        if path.is_dir() or not path.parent.is_dir():
            why = "it is a folder" if path.is_dir() else f"there is no folder {str(path.parent)!r}"
        elif not os.access(path if path.exists() else path.parent, os.W_OK):
            why = "permission denied"
        elif any(source and path.exists() and path.samefile(Path(source).expanduser()) for source in inputs):
            why = "the prompts are read from it"
        else:
            return
    except (OSError, ValueError) as problem:
        why = str(getattr(problem, "strerror", None) or problem)
    raise BadParameter(f"--output: {output!r} cannot be written: {why}")


class _OutputFile(io.TextIOBase):
    """A file that is made, or emptied, when the first answer comes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.file: TextIO | None = None

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        if self.file is None:
            self.file = self.path.open("w", encoding="utf-8")
        return self.file.write(text)

    def flush(self) -> None:
        if self.file is not None and not self.file.closed:
            self.file.flush()

    def close(self) -> None:
        super().close()  # flushes
        if self.file is not None:
            self.file.close()


@contextlib.contextmanager
def _written_to(output: str | None) -> Iterator[None]:
    """Answers go to this file, if one is named."""
    if output is None:
        yield
        return
    with _OutputFile(Path(output).expanduser()) as file, contextlib.redirect_stdout(file):
        yield


@contextlib.contextmanager
def _numbered(line: Line) -> Iterator[None]:
    """A mistake inside is told with the number of the line."""
    try:
        yield
    except HybridKVError as problem:
        raise wrong(line.index, problem) from None


def _one(asking: Asking, line: Line, params: SamplingParams, as_json: bool) -> None:
    """One answer, streamed. Ctrl-C ends it where it is."""
    from hybridkv.commands.display import Voice, cut_line, kept_line, note, read_along, say, summary
    from hybridkv.commands.written import answer_as_dict, say_logprobs, text_of

    llm, voice, stopped = asking.llm, Voice(asking.chat.hide_thinking), False
    with asking.stream(line, params) as stream:
        try:
            for piece in read_along(stream):
                if not as_json:
                    voice.say(piece.text, piece.reasoning)
        except KeyboardInterrupt:
            stopped = True
        except HybridKVError:
            voice.end()
            raise
    answer, request = stream.completion, stream.request
    assert answer is not None
    if as_json:
        say(json.dumps(answer_as_dict(llm, answer, request)) + "\n")
    else:
        if llm.tokenizer is None:
            voice.say(text_of(llm, answer))
        voice.end()
        say_logprobs(llm, request.tokens, answer.prompt_logprobs)
        say_logprobs(llm, answer.token_ids, answer.logprobs)
        note(summary(answer))
        for remark in (cut_line(llm, answer), kept_line(llm, [request])):
            if remark:
                note(remark)
    if stopped:
        raise KeyboardInterrupt


def _samples(asking: Asking, line: Line, params: SamplingParams, as_json: bool) -> None:
    """Several answers to one prompt, which are computed together and shown when all are there."""
    from hybridkv.commands.display import cut_line, kept_line, note, progress, say, summary
    from hybridkv.commands.written import answer_as_dict, say_answer, say_logprobs
    from hybridkv.engine.engine import INHERIT

    jobs = [asking.job(line, params, INHERIT)]
    with progress() as bars, contextlib.closing(run_together(asking.llm, jobs, numbered=False)) as outcomes:
        bars.wait(f"writing {params.n} answers")
        [outcome] = outcomes
    answer, request = outcome.answer, outcome.request
    if answer is None or request is None or outcome.error is not None:
        raise HybridKVError(outcome.error)
    if as_json:
        say(json.dumps(answer_as_dict(asking.llm, answer, request)) + "\n")
        return
    say_logprobs(asking.llm, request.tokens, answer.prompt_logprobs)
    say_answer(asking.llm, answer, asking.chat.hide_thinking)
    for sample in answer.samples:
        note(" ".join(filter(None, (summary(sample), cut_line(asking.llm, sample)))))
    if remark := kept_line(asking.llm, [request]):
        note(remark)


def _several(
    asking: Asking,
    lines: list[Line],
    params: SamplingParams,
    eviction: EvictionConfig | None,
    as_json: bool,
    in_order: bool,
) -> None:
    """All prompts of a file. Each answer is written when it is ready, so that nothing is lost by an interrupt."""
    from hybridkv.commands.display import counted, kept_line, note, progress
    from hybridkv.engine.engine import INHERIT

    llm, began = asking.llm, time.perf_counter()
    jobs = []
    for line in lines:
        with _numbered(line):
            jobs.append(asking.job(line, line.params(params), line.evicts(eviction, INHERIT)))
    ended: list[Outcome] = []
    with progress() as bars, contextlib.closing(run_together(llm, jobs)) as outcomes:
        report = bars.show(f"answering {counted(len(jobs), 'prompt')}")
        report(0, len(jobs))
        try:
            for outcome in in_order_of(jobs, outcomes) if in_order else outcomes:
                ended.append(outcome)
                with bars.aside():
                    _say_outcome(asking, outcome, as_json)
                report(len(ended), len(jobs))
        except KeyboardInterrupt:
            with bars.aside():
                note(f"stopped after {len(ended)} of {counted(len(jobs), 'answer')}")
            raise
    requests = [outcome.request for outcome in ended if outcome.request is not None]
    if not as_json:
        read = sum(request.prompt_tokens for request in requests)
        wrote = sum(each.answer_tokens for request in requests for each in (request, *request.siblings))
        speed = wrote / (time.perf_counter() - began)
        note(f"[{counted(len(requests), 'prompt')}, read {read} tokens, wrote {wrote}, {speed:.1f} written/s]")
        if remark := kept_line(llm, requests):
            note(remark)
    if failed := sum(outcome.error is not None for outcome in ended):
        note(f"{failed} of {counted(len(jobs), 'prompt')} failed")
        raise Exit(1)


def _say_outcome(asking: Asking, outcome: Outcome, as_json: bool) -> None:
    """One line's answer, with what tells which line it was."""
    from hybridkv.commands.display import cut_line, note, say
    from hybridkv.commands.written import outcome_as_dict, say_answer, say_logprobs

    line, answer = outcome.job.line, outcome.answer
    if as_json:
        say(json.dumps(outcome_as_dict(asking.llm, outcome)) + "\n")
        return
    name = f" {line.id}" if line.id is not None else ""
    say(f"[{line.index}]{name} > {line.shown}\n")
    if answer is not None and outcome.request is not None:
        say_logprobs(asking.llm, outcome.request.tokens, answer.prompt_logprobs)
        say_answer(asking.llm, answer, asking.chat.hide_thinking)
        flag = "the line's max_tokens" if "max_tokens" in line.sampling else "--max-tokens"
        if remark := cut_line(asking.llm, answer, flag):
            note(f"[{line.index}] {remark}")
    if outcome.error is not None:
        say(f"error: {outcome.error}\n")
    say("\n")
