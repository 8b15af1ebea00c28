"""Files of prompts: plain text with a prompt a line, or JSON lines with settings of their own.

    What is 2+2?
    {"prompt": "What is 2+2?", "id": "sum", "max_tokens": 20, "temperature": 0.7}
    {"messages": [{"role": "user", "content": "What is 2+2?"}], "budget": 512}

A file is JSON lines if its name ends in .jsonl, or if its first line is a JSON object or a JSON string; then every line
must be one. Blank lines are no prompts, and still count. Everything is checked before anything runs, and a mistake is
named by its line.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from typer import BadParameter

from hybridkv.config import EvictionConfig, SamplingParams
from hybridkv.errors import HybridKVError

OWN = ("prompt", "messages", "id")
SAMPLING = tuple(f.name for f in fields(SamplingParams) if f.name != "logits_hook")
EVICTION = tuple(f.name for f in fields(EvictionConfig))


@dataclass(frozen=True)
class Line:
    """One prompt of a file."""

    index: int  # of its line in the file, from 0
    prompt: str | list[int] | None = None  # or `messages`
    messages: list[dict[str, Any]] | None = None
    id: str | int | None = None
    sampling: dict[str, Any] = field(default_factory=dict)  # of this line alone
    eviction: dict[str, Any] = field(default_factory=dict)

    @property
    def shown(self) -> str:
        """The prompt in one text: the last message, if it has several."""
        if self.messages is None:
            return str(self.prompt)
        return str(self.messages[-1].get("content")) if self.messages else ""

    def params(self, common: SamplingParams) -> SamplingParams:
        """The sampling of all lines with this line's own in its place."""
        return replace(common, **self.sampling)

    def evicts(self, common: EvictionConfig | None, otherwise: Any) -> Any:
        """What this line keeps: `otherwise`, unless it says so itself; `common` has the settings that it leaves out."""
        if not self.eviction:
            return otherwise
        if self.eviction.get("budget", 0) is None:
            return None
        if common is not None:
            return replace(common, **self.eviction)
        if "budget" not in self.eviction:
            raise HybridKVError(f"{next(iter(self.eviction))} says how to evict and needs a budget")
        return EvictionConfig(**self.eviction)


def read_batch(name: str, lines: Sequence[str]) -> list[Line]:
    """The prompts of a file that was read; `name` decides, with the first line, whether it is JSON."""
    numbered = [(index, line) for index, line in enumerate(lines) if line.strip()]
    if not name.lower().endswith((".jsonl", ".ndjson")) and not isinstance(_json(numbered[0][1]), (dict, str)):
        return [Line(index, prompt=line) for index, line in numbered]
    return [_read(index, line) for index, line in numbered]


def wrong(index: int, why: object) -> BadParameter:
    """A mistake in a line, by the number that an editor shows."""
    return BadParameter(f"--prompts-file: line {index + 1}: {why}")


def _json(line: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def _read(index: int, line: str) -> Line:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as problem:
        raise wrong(index, f"not JSON ({problem}); each line of this file must be an object or a string") from None
    if isinstance(found, str):
        found = {"prompt": found}
    if not isinstance(found, dict):
        raise wrong(index, f'it must be an object such as {{"prompt": "Hello"}}, not {line.strip()[:60]}')
    known = (*OWN, *SAMPLING, *EVICTION)
    if unknown := [key for key in found if key not in known]:
        raise wrong(index, f"there is no setting {unknown[0][:80]!r}; known are {', '.join(known)}")
    prompt, messages, name = found.get("prompt"), found.get("messages"), found.get("id")
    if (prompt is None) == (messages is None):
        raise wrong(index, "give a prompt or messages" + ("" if prompt is None else ", not both"))
    if prompt is not None and not (isinstance(prompt, str) or _is_ids(prompt)):
        raise wrong(index, "a prompt is text or a list of token ids")
    if (isinstance(prompt, str) and not prompt.strip()) or messages == []:
        raise wrong(index, "the prompt is empty")
    if messages is not None and not (isinstance(messages, list) and all(isinstance(m, dict) for m in messages)):
        raise wrong(index, 'messages are a list of objects such as {"role": "user", "content": "Hello"}')
    if name is not None and (not isinstance(name, str | int) or isinstance(name, bool)):
        raise wrong(index, "an id is text or a whole number")
    if isinstance(bias := found.get("logit_bias"), dict):  # JSON's keys are always text
        if bad := [key for key in bias if not key.isdecimal() or len(key) > 20]:  # longer ones may be no int at all
            raise wrong(index, f"logit_bias has token ids as its keys, not {bad[0][:80]!r}")
        found["logit_bias"] = {int(key): value for key, value in bias.items()}
    sampling = {key: found[key] for key in SAMPLING if key in found}
    eviction = {key: found[key] for key in EVICTION if key in found}
    return Line(index, prompt, messages, name, sampling, eviction)


def _is_ids(prompt: object) -> bool:
    return isinstance(prompt, list) and all(isinstance(i, int) and not isinstance(i, bool) for i in prompt)
