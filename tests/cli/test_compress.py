"""`hybridkv compress`, and the documents it writes in `generate` and `chat`."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from cli.commands import LONG, TINY, Run
from hybridkv import LLM, Conversation, SamplingParams

QUESTION = "Where did it go?"
GREEDY = SamplingParams(max_tokens=8)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("compress") / "ship.txt"
    path.write_text(LONG)
    return path


@pytest.fixture
def document(run: Run, folder: Path, text: Path) -> Path:
    """A document of 4x, made once."""
    path = text.with_name("ship.kv")
    if not path.exists():
        code, out, err = run("compress", text, "-o", path, "--ratio", 4, "-m", folder, *TINY)
        assert code == 0 and out == "", err
        assert "kept 72 of 286 tokens a stream by replay, KV " in err.replace("\n", " ") and "ask with: " in err
    return path


@pytest.fixture
def expected(folder: Path, open_llm: Callable[..., LLM]) -> Callable[[list[str]], list[str]]:
    """What the library answers to questions about the text at 4x."""

    def answers(questions: list[str]) -> list[str]:
        with open_llm(folder).compress(LONG, ratio=4) as found:
            return [answer.text for answer in found.generate(questions, GREEDY)]

    return answers


def test_a_question_is_answered_from_the_file(
    run: Run, folder: Path, document: Path, expected: Callable[[list[str]], list[str]]
) -> None:
    code, out, err = run("generate", QUESTION, "--document", document, "-m", folder, *TINY, "--max-tokens", 8)
    assert code == 0 and out.rstrip("\n") == expected([QUESTION])[0]
    assert "286 tokens were in the cache already" in err


def test_several_questions_run_together(
    run: Run, folder: Path, document: Path, tmp_path: Path, expected: Callable[[list[str]], list[str]]
) -> None:
    questions = [QUESTION, "Who left?", "When?"]
    (tmp_path / "asked").write_text("\n".join(questions))
    given = ("generate", "--prompts-file", tmp_path / "asked", "--document", document, "-m", folder, *TINY)
    code, out, _ = run(*given, "--max-tokens", 8, "--json", "--in-order")
    assert code == 0 and [json.loads(line)["text"] for line in out.splitlines()] == expected(questions)
    for line in ('{"prompt": "Why?", "budget": 64}', '{"messages": [{"role": "user", "content": "Why?"}]}'):
        (tmp_path / "asked.jsonl").write_text(line)
        given = ("generate", "--prompts-file", tmp_path / "asked.jsonl", "--document", document, "-m", folder, *TINY)
        code, _, err = run(*given)
        assert code == 2 and "line 1: a question about a document" in err


def test_a_chat_begins_with_the_document(run: Run, folder: Path, document: Path, open_llm: Callable[..., LLM]) -> None:
    llm = open_llm(folder)
    with llm.compress(LONG, ratio=4) as found:
        talk = Conversation(llm, params=GREEDY, document=found)
        want = ["".join(talk.send(said)) for said in (QUESTION, "And then?")]
        talk.close()
    stdin = f"{QUESTION}\nAnd then?\n/reset\n{QUESTION}\n".encode()
    code, out, _ = run("chat", "--document", document, "-m", folder, *TINY, "--max-tokens", 8, stdin=stdin)
    assert code == 0 and out.splitlines() == [*want, want[0]]
    code, _, err = run("chat", "--document", document, "-m", folder, *TINY, stdin=b"/system Be brief.\n")
    assert code == 2 and "its own system message" in err
    code, _, err = run("chat", "--document", document, "-m", folder, *TINY, stdin=b"/budget 64\n")
    assert code == 2 and "kept whole" in err


@pytest.mark.parametrize(
    ("arguments", "said"),
    (
        (("--ratio", "0.5"), "a number from 1 on"),
        (("--ratio", "x"), "takes a number"),
        (("--ratio", "4", "--budget", "64"), "give one of them"),
        (("--budget", "-3"), "positive number of tokens"),
        (("--policy", "repaly"), "did you mean replay"),
        (("--system", "x" * 100, "--ratio", "8"), "always stay, and the budget is"),
        (("--context", "310"), "shorten the text by"),
        (("-o", "nowhere/doc.kv"), "no folder 'nowhere'"),
    ),
)
def test_bad_arguments_are_told_in_one_line(
    run: Run, folder: Path, text: Path, tmp_path: Path, arguments: tuple[str, ...], said: str
) -> None:
    code, out, err = run("compress", text, "-o", tmp_path / "doc.kv", "-m", folder, *TINY, *arguments)
    assert code == 2 and out == "" and said in err and len(err.strip().splitlines()) == 1
    assert not list(tmp_path.iterdir())


def test_texts_that_cannot_be_read(run: Run, folder: Path, text: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").write_text(" \n")
    for file, said in ((tmp_path / "empty", "holds no text"), (tmp_path / "none", "cannot be read")):
        code, _, err = run("compress", file, "-o", tmp_path / "doc.kv", "-m", folder, *TINY)
        assert code == 2 and said in err
    code, _, err = run("compress", text, "-o", text, "-m", folder, *TINY)
    assert code == 2 and "is the text itself" in err and text.read_text() == LONG


def test_what_does_not_go_with_a_document(run: Run, folder: Path, document: Path, text: Path) -> None:
    for more, said in (
        (("--system", "Be brief."), "--system"),
        (("--raw",), "--raw and --document"),
        (("--budget", "64"), "--budget and --document"),
    ):
        code, _, err = run("generate", "Why?", "--document", document, "-m", folder, *TINY, *more)
        assert code == 2 and said in err
    code, _, err = run("generate", "Why?", "--document", text, "-m", folder, *TINY)
    assert code == 2 and "ship.txt" in err
    code, _, err = run("chat", "--document", document, "--load", document, "-m", folder, *TINY)
    assert code == 2 and "give one of them" in err
    code, _, err = run("chat", "--load", document, "-m", folder, *TINY)
    assert code == 2 and "holds a document" in err
    code, _, err = run("generate", "Why?", "--document", document, "-m", folder, *TINY, "--kv-dtype", "fp8")
    assert code == 2 and "stores other things" in err
