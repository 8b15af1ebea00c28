"""Prompts: what callers write, as token ids: texts, ids, and messages in the model's own chat format.

The tokenizer, templates and what is remembered of texts are text/'s; here they are those of one open model.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from itertools import takewhile
from typing import Any

from hybridkv.checkpoint.checkpoint import Checkpoint
from hybridkv.errors import RequestError, UnsupportedModel
from hybridkv.text.chat import ChatTemplate
from hybridkv.text.memory import ChatMemory
from hybridkv.text.messages import check_messages
from hybridkv.text.prompt import encode_pieces, render_pieces
from hybridkv.text.tokenizer import Tokenizer

Prompt = str | Sequence[int]
Messages = list[dict[str, Any]]
Tools = list[dict[str, Any]] | None


class Prompts:
    """What turns prompts of one model into token ids.

    Args:
        model: its name, for errors.
        tokenizer: None: token ids alone.
        no_tokenizer: what to say then, when text arrives.
        remembers: whether answers are remembered as they were sampled.
    """

    def __init__(self, model: str, tokenizer: Tokenizer | None, no_tokenizer: str, remembers: bool) -> None:
        self.model, self.tokenizer, self.remembers = model, tokenizer, remembers
        self._no_tokenizer = no_tokenizer
        template = tokenizer.chat_template if tokenizer else None
        self.chat_template = (
            ChatTemplate(template, bos=tokenizer.bos_text, eos=tokenizer.eos_text) if tokenizer and template else None
        )

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a text; what is a list of ids already stays as it is."""
        if not isinstance(prompt, str):
            if isinstance(prompt, Mapping | bytes) or not isinstance(prompt, Iterable):
                raise RequestError(f"a prompt must be text or a list of token ids, not {type(prompt).__name__}")
            return list(prompt)
        if self.tokenizer is None:
            raise RequestError(self._no_tokenizer)
        return self.tokenizer.encode(prompt)

    def chat_parts(self) -> tuple[Tokenizer, ChatTemplate]:
        """What a chat needs beside the model, or RequestError where the model's files lack it."""
        if self.tokenizer is None or self.chat_template is None:
            raise RequestError(f"{self.model} has no chat template; give plain text or token ids")
        return self.tokenizer, self.chat_template

    def pieces(
        self, messages: Messages, tools: Tools, thinking: bool | None, variables: Mapping[str, Any]
    ) -> list[tuple[str, bool]]:
        """A conversation in the model's chat format: texts, each with whether it may hold control tokens."""
        tokenizer, template = self.chat_parts()
        return render_pieces(template, tokenizer, messages, tools=tools, thinking=thinking, **variables)

    def encode_chat(
        self, messages: Messages, tools: Tools, thinking: bool | None, variables: Mapping[str, Any]
    ) -> list[int]:
        """Token ids of a conversation, ready for an answer."""
        return encode_pieces(self.chat_parts()[0], self.pieces(messages, tools, thinking, variables))

    def common_tokens(
        self, messages: Messages, tools: Tools, thinking: bool | None, variables: Mapping[str, Any]
    ) -> list[int]:
        """Token ids with which all chats begin that begin with these messages."""
        check_messages(messages)
        asked = messages[-1]["role"] == "user"
        follow = "assistant" if asked else "user"
        chats = [[*messages, {"role": follow, "content": text}] for text in ("a", "b")]
        if asked:
            chats.append(messages)
        found = [self.encode_chat(chat, tools, thinking, variables) for chat in chats]
        alike = (len(set(each)) == 1 for each in zip(*found))
        return found[0][: sum(takewhile(bool, alike))]

    @cached_property
    def chat_memory(self) -> ChatMemory:
        """Marks of the model's chat template, and answers as they were sampled."""
        tokenizer, template = self.chat_parts()
        return ChatMemory(template, tokenizer, on=self.remembers)


def load_tokenizer(checkpoint: Checkpoint) -> tuple[Tokenizer | None, str]:
    """The tokenizer, or None and what to say when text arrives: a model without one still runs on token ids."""
    try:
        gguf = checkpoint.kind == "gguf"
        folder = checkpoint.path
        found = (
            Tokenizer.from_gguf(checkpoint.metadata) if gguf else Tokenizer.from_folder(folder, checkpoint.generation)
        )
    except UnsupportedModel as problem:
        return None, str(problem)
    return found, f"{checkpoint.path.name} has no tokenizer; give token ids instead of text"
