"""Options of how a prompt is put to a model: what its chat template is given, or the document that it follows."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Annotated, Any

from typer import BadParameter, Option

from hybridkv.commands import completion
from hybridkv.commands.declaring import utf8
from hybridkv.commands.options import ModelOptions
from hybridkv.commands.panels import OUTPUT, PROMPT


@dataclass(frozen=True)
class ChatOptions:
    """What a chat template is given besides the messages."""

    system: Annotated[str | None, Option("--system", metavar="TEXT", help="system message", rich_help_panel=PROMPT)] = (
        None
    )
    thinking: Annotated[
        bool | None,
        Option(
            "--think/--no-think",
            help="let the model think first, or not; as its chat template has it",
            rich_help_panel=PROMPT,
        ),
    ] = None
    template_arg: Annotated[
        list[str] | None,
        Option(
            "--template-arg",
            metavar="KEY=VALUE",
            help="a variable of the chat template, as JSON or text; repeatable",
            rich_help_panel=PROMPT,
        ),
    ] = None
    tools: Annotated[
        str | None,
        Option(
            "--tools",
            metavar="FILE",
            help="functions that the model may call: a JSON list of their schemas",
            rich_help_panel=PROMPT,
            autocompletion=completion.any_file,
        ),
    ] = None
    hide_thinking: Annotated[
        bool, Option("--hide-thinking", help="show the answer without the thoughts before it", rich_help_panel=OUTPUT)
    ] = False

    @property
    def variables(self) -> dict[str, Any]:
        """The template's variables; a value that is not JSON is text."""
        found: dict[str, Any] = {}
        for text in self.template_arg or ():
            key, sign, value = text.partition("=")
            if not sign or not key.isidentifier():
                raise BadParameter(f"--template-arg takes KEY=VALUE such as reasoning_effort=low, not {text!r}")
            if key in ("tools", "thinking", "system", "eviction"):
                flag = {"thinking": "think", "eviction": "budget"}.get(key, key)
                raise BadParameter(f"--template-arg {key}: use --{flag} instead")
            if key in ("self", "llm", "messages", "params", "cache"):
                raise BadParameter(f"--template-arg cannot set {key}: a template's variable is not called that")
            try:
                found[key] = json.loads(value)
            except (ValueError, RecursionError):
                found[key] = utf8(value)
        return found

    @property
    def tool_list(self) -> list[dict[str, Any]] | None:
        """What --tools names."""
        if self.tools is None:
            return None
        from hybridkv.commands.prompts import read_text

        try:
            found = json.loads(read_text(self.tools, "--tools"))
        except (ValueError, RecursionError) as problem:
            raise BadParameter(f"--tools: {self.tools!r} is not JSON ({problem})") from None
        if not isinstance(found, list):
            raise BadParameter(f"--tools: {self.tools!r} holds a JSON {type(found).__name__}, expected a list of tools")
        return found

    def refuse_raw(self, raw: bool) -> None:
        """--raw leaves out the template that these are for."""
        given = {
            "--system": self.system,
            "--think": self.thinking,
            "--template-arg": self.template_arg,
            "--tools": self.tools,
        }
        for flag, value in given.items():
            if raw and value is not None:
                raise BadParameter(f"{flag} needs the chat template, which --raw leaves out")


DOCUMENT = Option(
    "--document",
    metavar="FILE",
    help="ask about a text that `hybridkv compress` has read",
    rich_help_panel=PROMPT,
    autocompletion=completion.any_file,
)


def refuse_beside_document(model: ModelOptions, chat: ChatOptions, raw: bool = False) -> None:
    """What a document brings itself, or what is not done with what follows it."""
    if chat.system is not None:
        raise BadParameter("--system: the document was read with its own; give it to `hybridkv compress`")
    for flag, given in (("--tools", chat.tools is not None), ("--raw", raw), ("--budget", model.budget is not None)):
        if given:
            why = "what follows a document is kept whole" if flag == "--budget" else "the document was read without it"
            raise BadParameter(f"{flag} and --document do not go together: {why}")
