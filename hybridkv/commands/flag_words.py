"""Errors of the library in the words of the command line."""

import re
from dataclasses import fields

from hybridkv.commands.options import ModelOptions
from hybridkv.commands.sampling_options import SamplingOptions

_FLAGS = {"max_context": "context", "keep_turns": "keep_turns", "turn_budget": "turn_budget"} | {
    f.name: f.name for g in (ModelOptions, SamplingOptions) for f in fields(g)
}

# what Python has and the command line has not
_WORDS = {"; None keeps all": "; without --budget all are kept", ", or give a Policy": ""}


def in_flags(message: str) -> str:
    """An error in the words of the command line: kv_dtype='bf16' -> --kv-dtype bf16, max_context -> --context."""

    def flag(match: re.Match[str]) -> str:
        name, value = match[1], match[2]
        if name not in _FLAGS or (value is None and "_" not in name):
            return match[0]
        return f"--{_FLAGS[name].replace('_', '-')}" + (f" {value}" if value else "")

    for words, here in _WORDS.items():
        message = message.replace(words, here)
    return re.sub(r"(?<![\w/.'\"-])([a-z_]+)(?:='(\w+)')?(?![\w/.'\"])", flag, message)
