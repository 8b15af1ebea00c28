"""Where a prompt comes from: the command line, a file or standard input; and how it becomes tokens."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from typer import BadParameter

from hybridkv.commands.options import utf8

if TYPE_CHECKING:
    from hybridkv.llm import LLM

MOST_TEXT = 64 << 20  # bytes; an endless file is not read to its end


def refuse_system(system: str | None, raw: bool) -> None:
    if raw and system is not None:
        raise BadParameter("--system needs the chat template, which --raw leaves out")


def read_prompts(prompt: str | None, prompt_file: str | None, prompts_file: str | None = None) -> list[str]:
    given = [p for p in (prompt, prompt_file, prompts_file) if p is not None]
    if len(given) != 1:
        raise BadParameter("give one of: a prompt, --prompt-file, or for generate --prompts-file")
    if prompts_file is not None:
        found = [line for line in _read(prompts_file, "--prompts-file").splitlines() if line.strip()]
        if not found:
            raise BadParameter(f"--prompts-file: {prompts_file!r} holds no prompt")
        return found
    if prompt_file is not None or prompt == "-":
        return [_read(prompt_file or "-", "--prompt-file" if prompt_file else "PROMPT")]
    assert prompt is not None
    return [utf8(prompt)]


def _read(path: str, option: str) -> str:
    try:
        if path == "-":
            data = sys.stdin.buffer.read(MOST_TEXT + 1)
        else:
            with Path(path).expanduser().open("rb") as file:
                data = file.read(MOST_TEXT + 1)
        if len(data) > MOST_TEXT:
            raise BadParameter(
                f"{option}: {path!r} holds more than {MOST_TEXT >> 20} MiB; a prompt is shorter than that"
            )
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadParameter(f"{option}: {path!r} is not UTF-8 text (byte {error.start})") from None
    except (OSError, ValueError) as error:
        raise BadParameter(f"{option}: {path!r} cannot be read: {getattr(error, 'strerror', None) or error}") from None


def to_tokens(llm: LLM, text: str, system: str | None, raw: bool) -> list[int]:
    if llm.tokenizer is None and system is None and (ids := token_ids(text)):
        return ids
    if raw or (llm.chat_template is None and system is None):
        return llm.encode(text)
    messages = [{"role": "system", "content": system}] if system is not None else []
    return llm.encode_chat([*messages, {"role": "user", "content": text}])


def token_ids(text: str) -> list[int] | None:
    """`1 17 4` or `[1, 17, 4]` -> the ids, for a model that has no tokenizer. None: it is something else."""
    words = text.strip().removeprefix("[").removesuffix("]").replace(",", " ").split()
    return [int(word) for word in words] if all(re.fullmatch(r"[0-9]{1,9}", word) for word in words) else None
