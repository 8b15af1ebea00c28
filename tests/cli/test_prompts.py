"""Where a prompt comes from: an argument, files, pipes; what a pipe that nobody writes to does not do."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cli.commands import ROOT, SECONDS, TINY, Run
from hybridkv.commands import prompts


def read(*arguments: str | None, stdin: object = subprocess.DEVNULL) -> subprocess.Popen[str]:
    """The prompt that a process reads whose standard input is a real pipe or file."""
    code = "import json, sys; from hybridkv.commands.prompts import read_prompt\n"
    code += "try: print(json.dumps(read_prompt(*json.loads(sys.argv[1]))))\n"
    code += "except Exception as e: print(json.dumps(['error', str(e)]))"
    given = [sys.executable, "-c", code, json.dumps(list(arguments))]
    pipe = subprocess.PIPE
    return subprocess.Popen(given, stdin=stdin, stdout=pipe, stderr=pipe, text=True, cwd=ROOT)  # type: ignore[arg-type]


def found(child: subprocess.Popen[str], text: str | None = None) -> object:
    out, err = child.communicate(text, timeout=SECONDS)
    assert child.returncode == 0, err
    return json.loads(out)


def test_a_pipe_is_read_where_there_is_no_prompt() -> None:
    assert found(read(None, None, stdin=subprocess.PIPE), "What is 2+2?\n") == "What is 2+2?\n"


def test_a_question_comes_after_the_text_that_is_piped_or_in_a_file(tmp_path: Path) -> None:
    text, question = "First line.\nSecond line.\n", "Summarise this"
    together = "First line.\nSecond line.\n\nSummarise this"
    (tmp_path / "report").write_text(text)
    assert found(read(question, None, stdin=subprocess.PIPE), text) == together
    assert found(read(question, str(tmp_path / "report"))) == together
    assert found(read(question, "-", stdin=subprocess.PIPE), text) == together
    with (tmp_path / "report").open() as file:
        assert found(read(question, None, stdin=file)) == together


def test_standard_input_without_text_changes_nothing(tmp_path: Path) -> None:
    """cron and CI give /dev/null, others a pipe that is closed or empty."""
    assert found(read("Hello", None)) == "Hello"
    assert found(read("Hello", None, stdin=subprocess.PIPE), "") == "Hello"
    (tmp_path / "empty").touch()
    with (tmp_path / "empty").open() as file:
        assert found(read("Hello", None, stdin=file)) == "Hello"


def test_a_pipe_that_nobody_writes_to_does_not_block() -> None:
    ours, theirs = os.pipe()
    try:
        child = read("Hello", None, stdin=ours)
        out, err = child.communicate(timeout=SECONDS)
        assert json.loads(out) == "Hello" and "--prompt-file - waits" in err
    finally:
        os.close(ours)
        os.close(theirs)


def test_the_rest_of_a_shell_loops_file_is_left_alone(tmp_path: Path) -> None:
    """`while read line; do hybridkv generate "$line"; done < prompts`: each takes its own line."""
    (tmp_path / "prompts").write_text("one\ntwo\n")
    with (tmp_path / "prompts").open("rb", buffering=0) as file:
        assert file.read(4) == b"one\n"
        assert found(read("one", None, stdin=file)) == "one"
        assert file.read() == b"two\n"


@pytest.mark.parametrize(
    ("prompt", "file", "words"),
    [
        ("", None, "the prompt is empty"),
        (" \n", None, "the prompt is empty"),
        ("", "report", "the prompt is empty"),
        (None, None, "standard input holds no prompt"),
        ("-", None, "standard input holds no prompt"),
        ("-", "report", "PROMPT - and --prompt-file"),
    ],
)
def test_a_prompt_without_text_is_refused(prompt: str | None, file: str | None, words: str) -> None:
    kind, message = found(read(prompt, file))  # type: ignore[misc]
    assert kind == "error" and words in message


def test_on_a_terminal_the_ways_to_give_a_prompt_are_named(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(sys, "stdin", Terminal())
    with pytest.raises(prompts.BadParameter, match="there is no prompt; .*--prompt-file.*pipe.* - to type it"):
        prompts.read_prompt(None, None)


def test_two_sources_of_prompts_are_named(run: Run, tmp_path: Path) -> None:
    (tmp_path / "p").write_text("Hello\n")
    for more, words in ((["hi"], "a prompt and"), (["--prompt-file", "x"], "--prompt-file and")):
        code, _, err = run("generate", *more, "--prompts-file", tmp_path / "p", *TINY)
        assert code == 2 and f"{words} --prompts-file were both given" in err
