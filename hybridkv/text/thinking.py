"""The switch for thinking: each family's template has its own variable for it."""

from __future__ import annotations

from typing import Any

from hybridkv.errors import RequestError
from hybridkv.text.chat import ChatTemplate

SWITCHES = ("enable_thinking", "thinking")  # true or false: Qwen, GLM, SmolLM3; DeepSeek-V3.1, Granite, Kimi
MODE = "thinking_mode"  # a word: DeepSeek-V4 thinking/chat, MiniMax-M3 enabled/disabled
OTHERS = ("reasoning_effort", "thinking_budget", "thinking_effort")  # no switches, but what one may be after


def thinking_variables(template: ChatTemplate, thinking: bool | None) -> dict[str, Any]:
    """The template's variables that turn thinking on (True) or off (False); None: left to the template."""
    if thinking is None:
        return {}
    if not isinstance(thinking, bool):
        raise RequestError(f"thinking must be True, False or None, not {str(thinking)[:80]!r}")
    if found := [name for name in SWITCHES if name in template.variables]:
        return dict.fromkeys(found, thinking)
    if MODE in template.variables:
        on, off = ("enabled", "disabled") if _quotes(template, "enabled") else ("thinking", "chat")
        return {MODE: on if thinking else off}
    others = [name for name in OTHERS if name in template.variables]
    hint = f"; it reads {' and '.join(others)}, which can be given as template variables" if others else ""
    raise RequestError(f"the model's chat template has no switch for thinking{hint}")


def _quotes(template: ChatTemplate, word: str) -> bool:
    return f"'{word}'" in template.source or f'"{word}"' in template.source
