"""Where a prompt comes from: the command line, a file or standard input; and how it becomes tokens.

A text and a question about it are put together as one prompt, the question last: the text comes from --prompt-file or
from a pipe, the question is the argument. A pipe beside an argument is read if it holds something or ends within a
second, so that a program that was started with a pipe nobody writes to does not wait for ever; `--prompt-file -` waits.
"""

from __future__ import annotations

import os
import re
import select
import stat
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from typer import BadParameter

from hybridkv.commands.declaring import utf8

if TYPE_CHECKING:
    from hybridkv.llm import LLM

MOST_TEXT = 64 << 20  # bytes; an endless file is not read to its end
WAYS = "give a prompt as an argument, in a file with --prompt-file, through a pipe, or - to type it until Ctrl-D"
PATIENCE = 1.0  # seconds that a pipe beside a prompt may take to show its first byte


def refuse_system(system: str | None, raw: bool) -> None:
    """--raw leaves out what a system message would go into."""
    if raw and system is not None:
        raise BadParameter("--system needs the chat template, which --raw leaves out")


def read_prompts(prompt: str | None, prompt_file: str | None, prompts_file: str | None = None) -> list[str]:
    """One prompt, or those of a file with one a line."""
    if prompts_file is not None:
        return [line for line in read_lines(prompt, prompt_file, prompts_file) if line.strip()]
    return [read_prompt(prompt, prompt_file)]


def read_prompt(prompt: str | None, prompt_file: str | None) -> str:
    """The one prompt of a command."""
    if prompt == "-" and prompt_file is not None:
        raise BadParameter("PROMPT - and --prompt-file are both texts to read; give one of them")
    if prompt == "-" or (prompt is None and prompt_file is None):
        if prompt is None and sys.stdin.isatty():
            raise BadParameter(f"there is no prompt; {WAYS}")
        found = read_text("-", "PROMPT")
    elif prompt is None:
        found = read_text(str(prompt_file), "--prompt-file")
    else:
        question, text = utf8(prompt), ""
        if not question.strip():
            raise BadParameter(f"the prompt is empty; {WAYS}")
        if prompt_file is not None:
            text = read_text(prompt_file, "--prompt-file")
        elif pipe_has_text():
            text = read_text("-", "PROMPT")
            print(f"({len(text)} characters of standard input come before the question)", file=sys.stderr)
        found = f"{text.rstrip()}\n\n{question}" if text.strip() else question
    if not found.strip():
        where = "standard input" if prompt_file in (None, "-") else repr(prompt_file)
        raise BadParameter(f"{where} holds no prompt; {WAYS}")
    return found


def read_lines(prompt: str | None, prompt_file: str | None, prompts_file: str) -> list[str]:
    """The lines of --prompts-file, which stands alone."""
    beside = "a prompt" if prompt is not None else "--prompt-file"
    if prompt is not None or prompt_file is not None:
        raise BadParameter(f"{beside} and --prompts-file were both given; prompts come from one of them")
    # at line ends alone: JSON may hold other characters that end a line elsewhere, such as U+2028
    found = [line.removesuffix("\r") for line in read_text(prompts_file, "--prompts-file").split("\n")]
    found = found[:-1] if found[-1] == "" else found
    if not any(line.strip() for line in found):
        raise BadParameter(f"--prompts-file: {prompts_file!r} holds no prompt")
    return found


def pipe_has_text() -> bool:
    """Whether standard input is meant to be read beside a prompt: a pipe with something in it, or `< file`.

    Not a terminal, /dev/null or a socket; nor a file of which a part was read, as in a shell's `while read` loop.
    """
    try:
        number = sys.stdin.fileno()
        kind = os.fstat(number).st_mode
        if stat.S_ISREG(kind):
            return os.lseek(number, 0, os.SEEK_CUR) == 0
        if not stat.S_ISFIFO(kind):
            return False
        if select.select([number], [], [], PATIENCE)[0]:
            return True
    except (OSError, ValueError):  # closed, or not a file at all
        return False
    from hybridkv.commands.display import note

    note("the pipe on standard input stayed empty and is not read; --prompt-file - waits for it")
    return False


def read_text(path: str, option: str) -> str:
    """A file's text; - is standard input. `option` is named where it cannot be read."""
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
    """A prompt's tokens: in the chat format where there is one, as it is with --raw, or the ids that it spells."""
    if llm.tokenizer is None and system is None and (ids := token_ids(text)):
        return ids
    if raw or (llm.chat_template is None and system is None):
        return llm.encode(text)
    return llm.encode_chat(to_messages(text, system))


def to_messages(text: str, system: str | None) -> list[dict[str, str]]:
    """A prompt as a conversation of one turn."""
    first = [{"role": "system", "content": system}] if system is not None else []
    return [*first, {"role": "user", "content": text}]


def token_ids(text: str) -> list[int] | None:
    """`1 17 4` or `[1, 17, 4]` -> the ids, for a model that has no tokenizer. None: it is something else."""
    words = text.strip().removeprefix("[").removesuffix("]").replace(",", " ").split()
    return [int(word) for word in words] if all(re.fullmatch(r"[0-9]{1,9}", word) for word in words) else None
