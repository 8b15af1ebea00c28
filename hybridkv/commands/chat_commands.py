"""Commands that are typed in a chat: /save, /load, /budget, /think, /set and others."""

from __future__ import annotations

import json
import re
from dataclasses import fields, replace
from typing import Any

from hybridkv.cache import KVCacheManager
from hybridkv.commands.chat_options import ChatOptions
from hybridkv.commands.declaring import tokens
from hybridkv.commands.display import counted, note, sampling_line, say
from hybridkv.config import CacheConfig, EvictionConfig, SamplingParams
from hybridkv.conversation import Conversation
from hybridkv.document import Document
from hybridkv.engine.engine import INHERIT
from hybridkv.errors import HybridKVError
from hybridkv.llm import LLM
from hybridkv.planner import human
from hybridkv.text.thinking import thinking_variables

HELP = "/help lists commands, Ctrl-C ends an answer, /exit leaves"
COMMANDS = {
    "/help": "this list",
    "/reset": "start afresh",
    "/system TEXT": "start afresh with this system message",
    "/save FILE": "write the conversation and its cache to a file",
    "/load FILE": "go on with a conversation that was saved",
    "/budget N": "keep N tokens a stream from the next turn on; off: keep all",
    "/think on": "let the model think before it answers, if its template can; off: not",
    "/set NAME VALUE": "sampling from the next turn on, such as /set temperature 0.7; default: the model's own",
    "/stats": "what the cache holds, and what was evicted",
    "/exit": "leave; so do Ctrl-D, and Ctrl-C twice",
}
TYPING = (
    'A line that ends in \\ goes on in the next one, and between """ and """ all is one message, as is what is pasted.'
)
NOT_TYPED = ("logits_hook", "n", "logprobs", "prompt_logprobs", "structured_outputs")
SETTINGS = [f.name for f in fields(SamplingParams) if f.name not in NOT_TYPED]


class Chat:
    """A conversation, and what may be changed in it."""

    def __init__(
        self,
        llm: LLM,
        options: ChatOptions,
        params: SamplingParams,
        cache: CacheConfig,  # has the settings of eviction that go with a budget
        tools: list[dict[str, Any]] | None,
        variables: dict[str, Any],
        document: Document | None = None,  # what every conversation begins with
    ) -> None:
        self.document = document
        self.llm, self.options, self.params, self.cache = llm, options, params, cache
        self.tools, self.variables = tools, variables
        self.system, self.thinking, self.eviction = options.system, options.thinking, INHERIT
        self.over = False  # the user wants to leave
        self.conversation = self._new()
        if self.thinking is not None:
            self.set_thinking(self.thinking)

    def _new(self) -> Conversation:
        return Conversation(
            self.llm,
            self.system,
            self.params,
            tools=self.tools,
            thinking=self.thinking,
            eviction=self.eviction,
            document=self.document,
            **self.variables,
        )

    def command(self, text: str) -> bool:
        """Carry a command out; False: the text is none, but something to say to the model."""
        name, _, rest = text.partition(" ")
        if not re.fullmatch(r"/[a-z]+", name):  # a path, perhaps
            return False
        rest = rest.strip()
        match name, rest:
            case "/exit" | "/quit", "":
                self.over = True
            case "/help", "":
                for usage, about in COMMANDS.items():
                    note(f"{usage:<16} {about}")
                note(TYPING)
            case "/reset", "":
                self.reset(self.system)
                note("started afresh: the model remembers nothing that was said before")
            case "/system", said if said:
                if self.document is not None:
                    raise HybridKVError("the document was read with its own system message")
                self.reset(said)
                note("started afresh with this system message")
            case "/stats", "":
                self.say_stats()
            case "/save", path if path:
                self.conversation.save(path)
                turns = counted(self.turns, "turn")
                note(f"saved {turns} to {path!r}")
            case "/load", path if path:
                self.load(path)
            case "/budget", said if said:
                self.set_budget(said)
            case "/think", "on" | "off":
                self.set_thinking(rest == "on")
                note(f"thinking is {rest} from the next turn on")
            case "/set", _:
                self.set_sampling(rest)
                note(sampling_line(self.llm, self.params))
            case _:
                self.refuse(name)
        return True

    @property
    def turns(self) -> int:
        """Messages that the user has sent."""
        return sum(message["role"] == "user" for message in self.conversation.messages)

    def refuse(self, name: str) -> None:
        """A command that is unknown or incomplete."""
        usage = next((f"{usage}: {about}" for usage, about in COMMANDS.items() if usage.split()[0] == name), None)
        note(usage or f"there is no command {name}; {HELP}")

    def reset(self, system: str | None) -> None:
        """Begin again, with this system message."""
        self.conversation.close()
        self.system = system
        self.conversation = self._new()

    def load(self, path: str) -> None:
        """Go on with a saved conversation; the one before is given up only if that succeeds."""
        found = Conversation.load(self.llm, path, self.params)
        self.conversation.close()
        self.conversation = found
        said = [message for message in found.messages if message["role"] != "system"]
        note(f"loaded {counted(self.turns, 'turn')} from {path!r}")
        if said:
            note(f"last said: {str(said[-1].get('content'))[:200]}")

    def set_budget(self, said: str) -> None:
        """Tokens a stream that turns keep from now on, or all."""
        if self.document is not None:
            raise HybridKVError("what follows a document is kept whole")
        if said in ("off", "all", "none"):
            self.eviction = None
        else:
            settings = {f.name: getattr(self.cache, f.name) for f in fields(EvictionConfig)}
            self.eviction = EvictionConfig(**settings | {"budget": tokens(said)})
        self.conversation.eviction = self.eviction
        note(
            "all tokens are kept" if self.eviction is None else f"{said} tokens a stream are kept from the next turn on"
        )

    def set_thinking(self, on: bool) -> None:
        """On or off; refused where the template has no such switch."""
        _, template = self.llm.chat_parts()
        thinking_variables(template, on)
        self.thinking = self.conversation.thinking = on

    def set_sampling(self, said: str) -> None:
        """NAME VALUE, as SamplingParams has them; nothing at all changes nothing."""
        if not said:
            return
        name, _, value = said.replace("=", " ", 1).partition(" ")
        name = name.strip().lstrip("-").replace("-", "_")
        if name not in SETTINGS:
            raise HybridKVError(f"there is no setting {name!r}; choose {', '.join(SETTINGS)}")
        try:
            found: Any = None if value.strip() in ("", "default") else json.loads(value)
        except ValueError:
            found = value.strip()
        if found is None:
            found = getattr(SamplingParams(), name)
        changes: dict[str, Any] = {name: found}
        self.params = self.conversation.params = replace(self.params, **changes)

    def say_stats(self) -> None:
        """What the conversation holds, and what its last turn left out."""
        last = self.conversation.last
        used, total, size = self.llm.owner.run(lambda engine: _pages(engine.manager))
        held = last.prompt_tokens + len(last.token_ids) if last is not None and used else 0
        limit, turns = self.llm.plan.max_tokens, counted(self.turns, "turn")
        say(f"{turns}, {held} of {limit} tokens, {used} of {total} pages, {human(size)}\n")
        if last is None or not used or "kept_tokens" not in last.stats:  # the last is so of what was loaded
            return
        say(f"last answer: {counted(len(last.token_ids), 'token')} at {last.stats.get('decode_tok_s', 0):.1f}/s\n")
        seen = held - 1  # the last token of an answer is read with the next turn
        if last.stats["kept_tokens"] < seen:
            by = f" by {last.policy}" if last.policy else ""
            gone = f"{seen - last.stats['kept_tokens']:.0f} of {seen} tokens a stream{by}"
            say(f"evicted: {gone}, KV {human(last.stats['kv_bytes_full'])} -> {human(last.stats['kv_bytes_kept'])}\n")
        if old := int(last.stats.get("old_turns", 0)):
            say(f"old turns: {old}, each at {last.stats['turn_budget']:.0f} tokens a stream or less\n")


def _pages(manager: KVCacheManager) -> tuple[int, int, int]:
    """Pages in use, all pages, and the bytes of those in use and of the state beside them."""
    tables = list(manager.tables.values())
    used = sum(table.allocator.held for table in tables)
    size = sum(table.allocator.held * table.schema.page_bytes for table in tables)
    state = len(manager.slot_of) * manager.schema.slot_bytes
    return used, sum(table.allocator.total for table in tables), size + state
