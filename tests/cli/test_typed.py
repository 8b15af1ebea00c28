"""What is typed in a chat: lines that belong together, and the history file."""

import json
import stat
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

import pytest

from cli.commands import ROOT
from cli.terminal import Terminal, terminal
from hybridkv.commands import typed


def lines(*given: str) -> list[str]:
    left = iter(given)

    def read(_: str) -> str:
        try:
            return next(left)
        except StopIteration:
            raise EOFError from None

    return list(typed.joined(read))


def test_a_line_is_a_message_and_empty_ones_are_none() -> None:
    assert lines("Hello\n", "", "  \n", " there \n") == ["Hello", "there"]


def test_a_backslash_goes_on_in_the_next_line() -> None:
    assert lines("one\\\n", "  two\\\n", "three\n", "four\n") == ["one\n  two\nthree", "four"]
    assert lines("one\\") == ["one"]


def test_three_quotes_hold_several_lines() -> None:
    assert lines('"""one\n', "\n", ' two\\"""\n', "three\n") == ["one\n\n two\\", "three"]
    assert lines('"""\n', "one\n", '"""\n') == ["one"]
    assert lines('"""one"""\n') == ["one"]
    assert lines('"""one\n', "two\n") == ["one\ntwo"]  # never closed
    assert lines('"""\n', '"""\n', "next\n") == ["next"]


# ---- history

TALK = "from hybridkv.commands.typed import messages\nfor text in messages(True): print('said', repr(text), flush=True)"


Talk = Callable[..., AbstractContextManager[Terminal]]


@pytest.fixture
def history(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "state" / "history"
    monkeypatch.setenv("HYBRIDKV_HISTORY", str(path))
    return path


@pytest.fixture
def talk() -> Talk:
    """A process that repeats what is typed into its terminal."""
    return partial(terminal, program=("-c", TALK))


def leave(screen: Terminal) -> None:
    screen.expect("> ")
    screen.type("\x04")
    assert screen.end() == 0


def test_pasted_lines_are_one_message(talk: Talk, history: Path) -> None:
    with talk() as screen:
        screen.expect("> ")
        screen.paste("one\ntwo\nthree")
        screen.type("\r")
        screen.expect(r"said 'one\ntwo\nthree'")
        leave(screen)
    assert [json.loads(line) for line in history.read_text().splitlines()] == ["one\ntwo\nthree"]


def test_history_is_there_the_next_time_and_for_its_owner_alone(talk: Talk, history: Path) -> None:
    with talk() as screen:
        for text in ("first", "second", "second"):
            screen.expect("> ")
            screen.type(f"{text}\r")
            screen.expect(f"said '{text}'")
        leave(screen)
    assert stat.S_IMODE(history.stat().st_mode) == 0o600
    assert history.read_text().splitlines() == ['"first"', '"second"']
    with talk() as screen:
        screen.expect("> ")
        screen.type("\x1b[A\x1b[A\r")  # arrow up twice
        screen.expect("said 'first'")
        leave(screen)


def test_history_off_keeps_no_file_but_the_arrows_of_this_run(talk: Talk, tmp_path: Path) -> None:
    with talk(HYBRIDKV_HISTORY="off", XDG_STATE_HOME=str(tmp_path)) as screen:
        screen.expect("> ")
        screen.type("first\r")
        screen.expect("said 'first'")
        screen.expect("> ")
        screen.type("\x1b[A\r")
        screen.expect("said 'first'")
        leave(screen)
    assert list(tmp_path.iterdir()) == []


def test_a_history_that_cannot_be_written_is_said_once_and_the_chat_goes_on(talk: Talk, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with talk(HYBRIDKV_HISTORY=str(tmp_path / "file" / "history")) as screen:
        screen.expect("> ")
        screen.type("first\r")
        screen.expect("no history is kept")
        screen.expect("said 'first'")
        screen.expect("> ")
        screen.type("next\r")
        assert "no history" not in screen.expect("said 'next'")
        leave(screen)


def test_ctrl_c_drops_what_is_half_typed_and_the_second_leaves(talk: Talk, history: Path) -> None:
    with talk() as screen:
        screen.expect("> ")
        screen.type('"""half a message\r')
        screen.expect(". ")
        screen.interrupt()
        screen.expect("Ctrl-C again or /exit leaves")
        screen.expect("> ")
        screen.type("whole\r")
        screen.expect("said 'whole'")
        screen.expect("> ")
        screen.interrupt()
        screen.expect("Ctrl-C again")
        screen.expect("> ")
        screen.interrupt()
        assert screen.end() == 0


def test_a_long_history_is_cut_and_what_is_not_ours_is_left_out(history: Path) -> None:
    history.parent.mkdir()
    history.write_text("not JSON\n[1]\n" + "".join(f'"{i}"\n' for i in range(2 * typed.HISTORY_LIMIT)))
    code = "from hybridkv.commands.typed import History; import readline; History()\n"
    code += "n = readline.get_current_history_length()\n"
    code += "print(n, *(readline.get_history_item(i) for i in (1, n)))"
    out = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True).stdout.split()
    assert out == ["1000", "1000", "1999"]
    assert len(history.read_text().splitlines()) == typed.HISTORY_LIMIT
    assert stat.S_IMODE(history.stat().st_mode) == 0o600


def test_where_history_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("HYBRIDKV_HISTORY", raising=False)
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert typed.history_path() == tmp_path / ".local" / "state" / "hybridkv" / "chat_history"
    monkeypatch.setenv("XDG_STATE_HOME", "/state")
    assert typed.history_path() == Path("/state/hybridkv/chat_history")
    for word in ("", "off", "OFF", "0"):
        monkeypatch.setenv("HYBRIDKV_HISTORY", word)
        assert typed.history_path() is None
    monkeypatch.setenv("HYBRIDKV_HISTORY", "~/mine")
    assert typed.history_path() == tmp_path / "mine"
