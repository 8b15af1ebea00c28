"""`hybridkv chat`: a conversation in the terminal. Its cache stays between turns, so a turn reads only what is new.

Ctrl-C while an answer streams ends that answer; a second one leaves. At the prompt Ctrl-C and Ctrl-D leave.
"""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Generator, Iterator
from types import FrameType
from typing import TYPE_CHECKING, Annotated

from typer import Option

from hybridkv.commands.options import ModelOptions, SamplingOptions, utf8, with_options
from hybridkv.errors import HybridKVError

if TYPE_CHECKING:
    from hybridkv.conversation import Conversation
    from hybridkv.llm import LLM

HELP = "/reset starts afresh, /stats shows what the cache holds, /exit leaves; Ctrl-C ends an answer"


class Interrupt:
    """Inside `with`: the first Ctrl-C sets `asked`, which is looked at between steps so that none is torn; the second
    is an ordinary KeyboardInterrupt.
    """

    asked = False

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True

    def __enter__(self) -> Interrupt:
        self.asked, self._before = False, signal.signal(signal.SIGINT, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self._before)


@with_options
def chat(
    model: ModelOptions,
    sampling: SamplingOptions,
    system: Annotated[str | None, Option("--system", metavar="TEXT", help="system message")] = None,
) -> None:
    """Talk with a model."""
    from hybridkv.commands.display import note
    from hybridkv.conversation import Conversation

    params = sampling.params()
    llm = model.open()
    if llm.chat_template is None:
        raise HybridKVError(f"{llm.path.name} has no chat template; use hybridkv generate --raw")
    interactive = sys.stdin.isatty() and sys.stdout.isatty()
    if interactive:
        note(f"{llm.path.stem}, context of {llm.manager.max_tokens} tokens. {HELP}")
    conversation = Conversation(llm, system, params)
    for line in _lines(interactive):
        match utf8(line).strip():
            case "":
                continue
            case "/exit" | "/quit":
                break
            case "/reset":
                conversation.close()
                conversation = Conversation(llm, system, params)
            case "/stats":
                _say_stats(llm, conversation)
            case text if text.startswith("/") and " " not in text:
                note(HELP)
            case text:
                try:
                    _answer(conversation, text)
                except HybridKVError as error:
                    if not interactive:
                        raise
                    note(f"{error}; /reset starts afresh")
    conversation.close()


def _lines(interactive: bool) -> Iterator[str]:
    """What the user types, until Ctrl-D, a second Ctrl-C in a row, or the end of a pipe."""
    if not interactive:
        yield from sys.stdin
        return
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  gives input() its line editing
    warned = False
    while True:
        try:
            line = input("> ")
        except KeyboardInterrupt:  # perhaps meant for an answer that had just ended
            if warned:
                print()
                return
            warned = True
            print("\nCtrl-C again or /exit leaves")
            continue
        except EOFError:
            print()
            return
        warned = False
        yield line


def _answer(conversation: Conversation, text: str) -> None:
    from hybridkv.commands.display import say

    answer = conversation.send(text)
    with Interrupt() as interrupt:
        for piece in answer:
            say(piece)
            if interrupt.asked:
                say(" ...")
                break
        if isinstance(answer, Generator):
            answer.close()  # what was said so far is the answer
    say("\n")


def _say_stats(llm: LLM, conversation: Conversation) -> None:
    from hybridkv.commands.display import say
    from hybridkv.planner import human

    turns = sum(message["role"] == "user" for message in conversation.messages)
    manager = llm.manager
    tokens = pages = size = 0
    for request in llm.engine.scheduler.held:  # the conversation's own is the only one
        tokens, size = manager.position(request.key), manager.held_bytes(request.key) + manager.schema.slot_bytes
        pages = sum(manager.held_pages(request.key).values())
    total = sum(table.allocator.total for table in manager.tables.values())
    say(f"{turns} turns, {tokens} of {manager.max_tokens} tokens, {pages} of {total} pages, {human(size)}\n")
    if conversation.last is not None and (speed := conversation.last.stats.get("decode_tok_s")):
        say(f"last answer: {len(conversation.last.token_ids)} tokens at {speed:.1f}/s\n")
