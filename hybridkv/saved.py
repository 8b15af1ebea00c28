"""What a session file says of a conversation, beside its request and cache: plain JSON values, checked as they come.

messages   what was said          prompt     the text that the last turn's prompt was made from
eviction   what the cache keeps   settings   tools, thinking and other variables of the chat template; what is kept of
begins     where turns begin                 turns
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import NoneType
from typing import Any

from hybridkv.cache.eviction_words import eviction_as_json, eviction_of_json
from hybridkv.cache.session import plain_json
from hybridkv.cache.snapshot_file import NotWellFormed
from hybridkv.config import EvictionConfig, check_turns, is_whole, shown
from hybridkv.engine.engine import INHERIT
from hybridkv.errors import HybridKVError, RequestError
from hybridkv.text.messages import check_messages, check_tools

HOW = "Conversation.load(llm, path, eviction=EvictionConfig(...))"  # settings that a file does not hold are given
AS_SAVED = object()  # "the eviction settings that the file has"
# attributes of a conversation that shape its prompts and what it keeps of them, and their types
SETTINGS = {
    "tools": (list, NoneType),
    "thinking": (bool, NoneType),
    "template_variables": (dict,),
    "keep_turns": (int, NoneType),
    "turn_budget": (int,),
}


@dataclass(frozen=True)
class SavedConversation:
    """A conversation as a session file has it, without request and cache."""

    messages: list[dict[str, Any]]
    prompt: str
    eviction: EvictionConfig | int | None | object
    settings: dict[str, Any] = field(default_factory=dict)
    begins: list[int] | None = None  # the position at which each turn begins, where that is known

    def as_json(self) -> dict[str, Any]:
        """A copy in plain JSON values, or RequestError."""
        found: dict[str, Any] = {"messages": self.messages, "prompt": self.prompt, "settings": self.settings}
        if self.begins is not None:
            found["begins"] = self.begins
        if self.eviction is not INHERIT:
            found["eviction"] = eviction_as_json(self.eviction)
        return plain_json(found)

    @staticmethod
    def of(found: Mapping[str, Any], eviction: object = AS_SAVED) -> SavedConversation:
        """What a file holds, or NotWellFormed. `eviction`: instead of what it says of that."""
        messages, prompt, settings = found.get("messages"), found.get("prompt"), found.get("settings")
        if not isinstance(messages, list) or not all(_is_message(message) for message in messages):
            raise NotWellFormed("its messages are not a list of messages, each with a role")
        try:
            if messages:  # a conversation that has not begun has none
                check_messages(messages)
        except RequestError as problem:
            raise NotWellFormed(f"its messages: {problem}") from None
        if not isinstance(prompt, str) or not isinstance(settings, dict):
            raise NotWellFormed("its prompt is not a text, or its settings are not a JSON object")
        for name, value in settings.items():
            if not isinstance(value, SETTINGS.get(name, ())):
                raise NotWellFormed(f"its setting {shown(name)} is {shown(value)}")
        try:
            check_tools(settings.get("tools") or [])
        except RequestError as problem:
            raise NotWellFormed(f"its tools: {problem}") from None
        try:
            check_turns(settings.get("keep_turns"), settings.get("turn_budget", 0))
        except HybridKVError as problem:
            raise NotWellFormed(str(problem)) from None
        begins = found.get("begins")
        if begins is not None and not (isinstance(begins, list) and all(is_whole(at) and at >= 0 for at in begins)):
            raise NotWellFormed(f"its turns begin at {shown(begins)}")
        if begins is not None and begins != sorted(begins):
            raise NotWellFormed("its turns are not in order")
        for name in SETTINGS.keys() & settings.get("template_variables", {}):
            raise NotWellFormed(f"its variables of the template have {name}, which is a setting of its own")
        if eviction is AS_SAVED:
            eviction = eviction_of_json(found["eviction"], HOW) if "eviction" in found else INHERIT
        return SavedConversation(messages, prompt, eviction, settings, begins)


def _is_message(message: object) -> bool:
    return isinstance(message, dict) and isinstance(message.get("role"), str)
