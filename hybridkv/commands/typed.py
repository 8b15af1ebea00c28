"""What a user types in `hybridkv chat`, message by message: lines of a pipe, or a terminal's, with editing and history.

A message is one line; pasted lines arrive as one message. A line that ends in \\ goes on in the next one, and between
lines that begin and end with three quotes everything is one message.

History is a file of JSON strings, one message a line, that only its owner can read: $HYBRIDKV_HISTORY, else
$XDG_STATE_HOME/hybridkv/chat_history, else ~/.local/state/hybridkv/chat_history. HYBRIDKV_HISTORY=off keeps none.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

from hybridkv.commands.declaring import utf8

PROMPT, MORE, QUOTES = "> ", ". ", '"""'
HISTORY_LIMIT = 1000  # messages kept
HISTORY_BYTES = 8 << 20  # a file longer than that is not ours


def messages(interactive: bool) -> Iterator[str]:
    """What the user says, until Ctrl-D, a second Ctrl-C in a row, or the end of a pipe."""
    if not interactive:
        yield from joined(lambda _: _line_of_pipe())
        return
    history = History()
    warned = False
    while True:
        try:
            for message in joined(input):
                warned = False
                history.add(message)
                yield message
            print()
            return
        except KeyboardInterrupt:  # perhaps meant for an answer that had just ended; a message half typed is dropped
            if warned:
                print()
                return
            warned = True
            print("\nCtrl-C again or /exit leaves")


def _line_of_pipe() -> str:
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line


def joined(read: Callable[[str], str]) -> Iterator[str]:
    """Lines, those that belong together as one text. `read` takes a prompt and raises EOFError at the end."""
    while True:
        try:
            text = utf8(read(PROMPT)).strip()
        except EOFError:
            return
        begun = text
        try:
            if begun.startswith(QUOTES):
                text = begun.removeprefix(QUOTES)
                while not text.rstrip().endswith(QUOTES):
                    text += "\n" + utf8(read(MORE)).rstrip("\r\n")
                text = text.rstrip().removesuffix(QUOTES).strip("\n")
            else:
                while text.endswith("\\"):
                    text = text.removesuffix("\\") + "\n" + utf8(read(MORE)).rstrip()
        except EOFError:  # what there is, is the message; the next read ends it all
            text = text.removesuffix("\\")
        if text.strip():
            yield text


class History:
    """Line editing for input(), and the messages of earlier chats behind the arrow keys."""

    def __init__(self) -> None:
        self._path: Path | None = None  # None: nothing is kept
        self._readline: ModuleType | None = None
        try:
            import readline
        except ImportError:  # a Python without it: plain lines
            return
        self._readline = readline
        # Python switches this off, and then each pasted line would be a message of its own
        readline.parse_and_bind("set enable-bracketed-paste on")
        readline.set_auto_history(False)  # of lines; a message may have several
        self._path = history_path()
        for message in self._load():
            readline.add_history(message)

    def add(self, message: str) -> None:
        """Remember a message now, so that a crash loses nothing."""
        if self._readline is None:
            return
        last = self._readline.get_current_history_length()
        if last and self._readline.get_history_item(last) == message:
            return
        self._readline.add_history(message)
        if self._path is None:
            return
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
            with open(os.open(self._path, flags, 0o600), "w", encoding="utf-8") as file:
                os.fchmod(file.fileno(), 0o600)
                file.write(json.dumps(message, ensure_ascii=False) + "\n")
        except OSError as problem:
            self._give_up(problem)

    def _load(self) -> list[str]:
        """The last messages of the file, which is cut to them where it has grown to twice as many."""
        if self._path is None or not self._path.exists():
            return []
        try:
            if not self._path.is_file() or self._path.stat().st_size > HISTORY_BYTES:
                raise OSError("it is not a file of earlier messages")
            lines = self._path.read_text(encoding="utf-8", errors="replace").splitlines()
            if len(lines) > 2 * HISTORY_LIMIT:
                fresh = self._path.with_name(f"{self._path.name}.{os.getpid()}")
                with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
                    file.writelines(line + "\n" for line in lines[-HISTORY_LIMIT:])
                os.replace(fresh, self._path)
        except OSError as problem:
            self._give_up(problem)
            return []
        return [message for line in lines[-HISTORY_LIMIT:] if (message := _message(line))]

    def _give_up(self, problem: OSError) -> None:
        from hybridkv.commands.display import note

        why = problem.strerror or problem
        note(f"no history is kept: {str(self._path)!r}: {why}; HYBRIDKV_HISTORY names another file, or off")
        self._path = None


def _message(line: str) -> str | None:
    """A line of the history file; None where it is not one of ours."""
    try:
        found = json.loads(line)
    except ValueError:
        return None
    return found if isinstance(found, str) and "\0" not in found else None


def history_path() -> Path | None:
    """Where messages are kept; None: nowhere."""
    named = os.environ.get("HYBRIDKV_HISTORY")
    if named is not None:
        return None if named.strip().lower() in ("", "off", "0", "none", "no") else Path(named).expanduser()
    state = os.environ.get("XDG_STATE_HOME")
    try:
        folder = Path(state) if state else Path.home() / ".local" / "state"
    except RuntimeError:  # no home folder
        return None
    return folder / "hybridkv" / "chat_history"
