"""`hybridkv chat` on a real terminal: pasted text, its commands, Ctrl-C, and what it says after a turn."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from cli.commands import TINY
from cli.terminal import Terminal, terminal


@contextmanager
def chat(folder: Path, history: Path) -> Iterator[Terminal]:
    settings = (*TINY, "--max-tokens", 5, "--ignore-eos")
    with terminal("chat", "-m", folder, *settings, HYBRIDKV_HISTORY=str(history)) as found:
        found.expect("> ")
        yield found


@pytest.fixture
def screen(folder: Path, tmp_path: Path) -> Iterator[Terminal]:
    """A chat that waits for its first message, for a test that leaves it."""
    with chat(folder, tmp_path / "history") as found:
        yield found


@pytest.fixture(scope="module")
def shared_screen(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Terminal, Path]]:
    history = tmp_path_factory.mktemp("shared") / "history"
    with chat(folder, history) as found:
        yield found, history


@pytest.fixture
def same_screen(shared_screen: tuple[Terminal, Path]) -> Terminal:
    """A chat that was started once for all, and begins afresh."""
    screen, _ = shared_screen
    ask(screen, "/budget off")
    assert "started afresh" in ask(screen, "/reset")
    return screen


def ask(screen: Terminal, text: str) -> str:
    """Type a line and wait until the chat asks again; what it said meanwhile."""
    screen.type(f"{text}\r")
    screen.expect("\n")
    return screen.expect("\n> ")


def test_the_start_says_what_runs_and_how_tokens_are_chosen(same_screen: Terminal) -> None:
    assert "tiny-llama, context of 512 tokens. /help lists commands" in same_screen.seen
    assert "sampling: greedy (the model names no sampling settings)" in same_screen.seen


def test_pasted_lines_are_one_turn(same_screen: Terminal, shared_screen: tuple[Terminal, Path]) -> None:
    screen, (_, history) = same_screen, shared_screen
    screen.paste("one\ntwo\nthree")
    screen.type("\r")
    said = screen.expect("\n> ")
    assert said.count("[read ") == 1 and "wrote 5 tokens" in said and "cut at 5 tokens: raise --max-tokens" in said
    assert "1 turn, " in ask(screen, "/stats")
    assert [json.loads(line) for line in history.read_text().splitlines()].count("one\ntwo\nthree") == 1


def test_commands_say_what_they_did(screen: Terminal) -> None:
    ask(screen, "Hello")
    assert "/budget N" in ask(screen, "/help")
    assert "temperature 0.7 (as asked)" in ask(screen, "/set temperature 0.7")
    assert "sampling: greedy" in ask(screen, "/set temperature default")
    assert "there is no setting 'heat'" in ask(screen, "/set heat 1")
    assert "temperature must be a number" in ask(screen, "/set temperature hot")
    assert "has no switch for thinking" in ask(screen, "/think on")
    assert "/think on: let the model think" in ask(screen, "/think perhaps")
    assert "all tokens are kept" in ask(screen, "/budget off")
    assert "such as 32768 or 32k" in ask(screen, "/budget lots")
    assert "smaller than the 64 recent tokens" in ask(screen, "/budget 10")
    assert "there is no command /nonsense" in ask(screen, "/nonsense x")
    assert "started afresh" in ask(screen, "/reset")
    assert "0 turns, 0 of 512 tokens, 0 of " in ask(screen, "/stats")
    assert "started afresh with this system message" in ask(screen, "/system Be kind")
    assert "[read " in ask(screen, "/etc/hosts is a file")  # no command
    screen.type("/exit\r")
    assert screen.end() == 0


def test_a_conversation_is_saved_and_loaded(screen: Terminal, folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "talk"
    first, second = ask(screen, "Hello"), ask(screen, "And then?")
    assert "saved 2 turns to" in ask(screen, f"/save {file}")
    ask(screen, "/reset")
    said = ask(screen, f"/load {file}")
    assert "loaded 2 turns from" in said and "last said: " in said
    assert "2 turns, " in ask(screen, "/stats")
    again = ask(screen, "And then?")
    assert "tokens were in the cache already" in again and again.split("[")[0] != first.split("[")[0] + second
    (tmp_path / "damaged").write_bytes(file.read_bytes()[:-100])
    for path in (tmp_path / "damaged", tmp_path / "absent", tmp_path):
        assert "turns from" not in ask(screen, f"/load {path}")
    assert "3 turns, " in ask(screen, "/stats")  # nothing was lost
    assert "saved 3 turns" not in ask(screen, f"/save {tmp_path / 'no' / 'folder' / 'x'}")
    screen.type("/exit\r")
    assert screen.end() == 0
    with terminal("chat", "-m", folder, *TINY, "--load", file, HYBRIDKV_HISTORY="off") as later:
        later.expect("loaded 2 turns from")


def test_a_budget_of_a_chat_is_seen_in_its_stats(same_screen: Terminal) -> None:
    screen = same_screen
    assert "100 tokens a stream are kept from the next turn on" in ask(screen, "/budget 100")
    ask(screen, "The ship left the harbour at dawn. " * 8)
    assert "evicted: " in ask(screen, "/stats")


def test_a_mistake_in_a_turn_leaves_the_chat_as_it_was(same_screen: Terminal) -> None:
    screen = same_screen
    said = ask(screen, "x" * 600)
    assert "the context holds 512" in said and "--context" in said and "max_context" not in said
    assert "[read " in ask(screen, "Hello")


def test_ctrl_c_ends_the_answer_then_warns_then_leaves(long_folder: Path) -> None:
    arguments = ("--device", "cpu", "--dtype", "float32", "--context", "100k", "--ignore-eos")
    with terminal("chat", "-m", long_folder, *arguments, HYBRIDKV_HISTORY="off") as screen:
        screen.expect("> ")
        screen.type("Hello\r")
        screen.expect("\n")
        while len(screen.seen.rpartition("Hello")[2].strip()) < 20:  # some of the answer
            screen.more()
        screen.type("\x03")
        screen.expect(" ...")
        assert ", abort]" in screen.expect("\n> ")
        assert "1 turn, " in ask(screen, "/stats")
        screen.interrupt()
        screen.expect("Ctrl-C again or /exit leaves")
        screen.expect("> ")
        screen.interrupt()
        assert screen.end() == 0


def test_ctrl_c_in_generate_ends_its_line_and_says_how_far_it_came(long_folder: Path) -> None:
    arguments = ("--device", "cpu", "--dtype", "float32", "--context", "100k", "--ignore-eos", "--raw")
    with terminal("generate", "Hello", "-m", long_folder, *arguments) as screen:
        while len(screen.seen.rpartition("━")[2]) < 60:  # what follows the bar of loading
            screen.more()
        screen.type("\x03")
        screen.expect("\n[read ")
        assert ", abort]" in screen.expect("\n")
        assert screen.end() == 130
