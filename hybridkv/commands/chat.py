"""`hybridkv chat`: a conversation in the terminal. Its cache stays between turns, so a turn reads only what is new.

Ctrl-C while an answer streams ends that answer; a second one leaves. At the prompt Ctrl-C and Ctrl-D leave.
"""

from __future__ import annotations

import signal
import sys
from dataclasses import replace
from types import FrameType
from typing import TYPE_CHECKING, Annotated

from typer import BadParameter, Option

from hybridkv.commands import completion
from hybridkv.commands.chat_options import DOCUMENT, ChatOptions, refuse_beside_document
from hybridkv.commands.declaring import with_options
from hybridkv.commands.flag_words import in_flags
from hybridkv.commands.invocation import command_name
from hybridkv.commands.options import ModelOptions
from hybridkv.commands.panels import EVICTION, PROMPT
from hybridkv.commands.reuse_options import TurnReuseOptions
from hybridkv.commands.sampling_options import SamplingOptions
from hybridkv.commands.typed import messages
from hybridkv.config import CacheConfig
from hybridkv.errors import HybridKVError

if TYPE_CHECKING:
    from hybridkv.commands.chat_commands import Chat


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
    *,
    load: Annotated[
        str | None,
        Option(
            "--load",
            metavar="FILE",
            help="go on with a conversation that /save wrote",
            rich_help_panel=PROMPT,
            autocompletion=completion.any_file,
        ),
    ] = None,
    document: Annotated[str | None, DOCUMENT] = None,
    chat: ChatOptions,
    model: ModelOptions,
    reuse: TurnReuseOptions,
    keep_turns: Annotated[
        int | None,
        Option(
            "--keep-turns",
            metavar="N",
            help="last turns that stay whole, with the system prompt; all",
            rich_help_panel=EVICTION,
        ),
    ] = None,
    turn_budget: Annotated[
        int | None,
        Option(
            "--turn-budget",
            metavar="TOKENS",
            help=f"tokens kept a stream of each older turn; {CacheConfig.turn_budget}",
            rich_help_panel=EVICTION,
        ),
    ] = None,
    sampling: SamplingOptions,
) -> None:
    """Talk with a model.

    Type a message and press Enter. Pasted lines are one message; a line that ends in \\\\ goes on in the next one, and
    so does everything between two lines of three quotes. /help lists the commands. What was typed is kept for the arrow
    keys in ~/.local/state/hybridkv/chat_history; HYBRIDKV_HISTORY names another file, or off.
    """
    from hybridkv.commands.chat_commands import HELP, Chat
    from hybridkv.commands.display import note, sampling_line

    if document is not None:
        refuse_beside_document(model, chat)
        if load is not None:
            raise BadParameter("--load and --document are both what the chat begins with; give one of them")
    params, variables, tools, cache = sampling.params(), chat.variables, chat.tool_list, model.cache()
    if turn_budget is not None and keep_turns is None:
        raise BadParameter("--turn-budget is for turns older than --keep-turns N, which is missing")
    if keep_turns is not None:
        budget = cache.turn_budget if turn_budget is None else turn_budget
        cache = replace(cache, keep_turns=keep_turns, turn_budget=budget)
    reads_again = str(cache.policy).partition(":")[0] == "replay"
    slots = 2 if document is not None or reads_again else 1  # one more for a fork of the cache
    with model.open(slots, cache, reuse) as llm:
        if llm.chat_template is None:
            raise HybridKVError(f"{llm.path.name} has no chat template; use {command_name()} generate --raw")
        interactive = sys.stdin.isatty() and sys.stdout.isatty()
        about = None if document is None else llm.load_document(document)
        talk = Chat(llm, chat, params, cache, tools, variables, about)
        if about is not None and interactive:
            kept = f"{about.stats['kept_tokens']:.0f} a stream were kept"
            note(f"about a document of {about.stats['tokens']} tokens, {kept}")
        if interactive:
            note(f"{llm.path.stem}, context of {llm.plan.max_tokens} tokens. {HELP}")
            note(sampling_line(llm, params))
        if load is not None:
            talk.load(load)
        try:
            for text in messages(interactive):
                try:
                    if not talk.command(text):
                        _answer(talk, text)
                except (HybridKVError, BadParameter, OSError) as error:
                    if not interactive:
                        raise
                    note(in_flags(str(error)))
                if talk.over:
                    break
        finally:
            talk.conversation.close()


def _answer(talk: Chat, text: str) -> None:
    """One turn: its pieces as they come, then a line of speeds."""
    from hybridkv.commands.display import Voice, cut_line, note, summary

    voice, conversation = Voice(talk.options.hide_thinking), talk.conversation
    answer = conversation.pieces(text)
    with Interrupt() as interrupt:
        try:
            for piece in answer:
                voice.say(piece.text, piece.reasoning)
                if interrupt.asked:
                    voice.say(" ...", piece.reasoning)
                    break
        except HybridKVError:
            if voice.said:
                voice.end()
            raise
        finally:
            answer.close()  # what was said so far is the answer
    voice.end()
    if conversation.last is not None:
        note(summary(conversation.last))
        if remark := cut_line(talk.llm, conversation.last):
            note(remark)
