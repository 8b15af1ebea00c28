"""Files of prompts: text and JSON lines, what is refused before anything runs, and answers as they come."""

import json
import signal
import subprocess
from pathlib import Path

import pytest

from cli.commands import LONG, SECONDS, TINY, Run, of, process
from hybridkv import LLM, EvictionConfig, SamplingParams
from hybridkv.commands.batch import read_batch
from hybridkv.commands.prompts import read_lines
from hybridkv.engine.engine import Engine
from hybridkv.request import Request


def objects(out: str) -> list[dict]:
    return [json.loads(line) for line in out.splitlines()]


def write(path: Path, *lines: object) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def test_an_answer_says_which_line_it_belongs_to(run: Run, folder: Path, tmp_path: Path) -> None:
    file = write(tmp_path / "prompts", "Hello", "", "Another one")
    code, out, _ = run("generate", "--prompts-file", file, "-m", folder, *TINY, "--max-tokens", 4, "--json")
    found = {each["index"]: each["prompt"] for each in objects(out)}
    assert code == 0 and found == {0: "Hello", 2: "Another one"}
    _, out, err = run("generate", "--prompts-file", file, "-m", folder, *TINY, "--max-tokens", 4, "--in-order")
    heads = [line for line in out.splitlines() if line.startswith("[")]
    assert heads == ["[0] > Hello", "[2] > Another one"] and "2 prompts, read " in err


def test_only_line_ends_end_a_line(tmp_path: Path) -> None:
    """JSON may hold U+2028 as it is, and a prompt a form feed: neither begins a new line."""
    file = tmp_path / "prompts.jsonl"
    file.write_bytes(json.dumps({"prompt": "A\u2028B\u0085C"}, ensure_ascii=False).encode() + b'\r\n"D"\n')
    found = read_batch(file.name, read_lines(None, None, str(file)))
    assert [(line.index, line.prompt) for line in found] == [(0, "A\u2028B\u0085C"), (1, "D")]
    file = tmp_path / "prompts.txt"
    file.write_bytes(b"one\x0cpage\n\ntwo")
    assert [(line.index, line.prompt) for line in read_batch(file.name, read_lines(None, None, str(file)))] == [
        (0, "one\x0cpage"),
        (2, "two"),
    ]


def test_json_lines_have_settings_of_their_own(run: Run, folder: Path, llm: LLM, tmp_path: Path) -> None:
    asked = [{"role": "system", "content": "Be kind"}, {"role": "user", "content": "Two\nlines"}]
    file = write(
        tmp_path / "prompts.jsonl",
        {"prompt": "Hello", "id": "a", "max_tokens": 3, "ignore_eos": True},
        "",
        {"messages": asked, "id": 7, "temperature": 0.8, "seed": 3, "max_tokens": 9},
        json.dumps("a string\nof two lines"),
    )
    flags = ("-m", folder, *TINY, "--max-tokens", 5, "--json", "--in-order")
    code, out, err = run("generate", "--prompts-file", file, *flags)
    first, second, third = objects(out)
    assert code == 0, err
    assert (first["index"], first["id"], first["prompt"], len(first["token_ids"])) == (0, "a", "Hello", 3)
    expected = llm.chat(asked, SamplingParams(temperature=0.8, seed=3, max_tokens=9))
    assert (second["index"], second["id"], second["messages"]) == (2, 7, asked)
    assert second["token_ids"] == expected.token_ids
    assert third["index"] == 3 and third["prompt"] == "a string\nof two lines" and "id" not in third
    assert len(third["token_ids"]) <= 5


def test_lines_that_are_objects_are_json_whatever_the_file_is_called() -> None:
    assert [line.prompt for line in read_batch("-", ['{"prompt": "x"}', '"y"'])] == ["x", "y"]
    # ids for a model without a tokenizer, and text that only looks like JSON, are text
    assert [line.prompt for line in read_batch("p.txt", ["[1, 2]", '{"prompt": "x"}'])] == ["[1, 2]", '{"prompt": "x"}']
    assert read_batch("p.jsonl", ['{"prompt": [1, 2]}'])[0].prompt == [1, 2]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "not JSON"),
        ("[1]", "must be an object"),
        ("17", "must be an object"),
        ("{}", "give a prompt or messages"),
        ('{"prompt": "x", "messages": []}', "not both"),
        ('{"prompt": " "}', "the prompt is empty"),
        ('{"messages": []}', "the prompt is empty"),
        ('{"messages": "x"}', "messages are a list"),
        ('{"prompt": 17}', "a prompt is text"),
        ('{"prompt": "x", "id": [1]}', "an id is text"),
        ('{"prompt": "x", "temprature": 1}', "there is no setting 'temprature'"),
        ('{"prompt": "x", "logits_hook": 1}', "there is no setting 'logits_hook'"),
        ('{"prompt": "x", "temperature": "hot"}', "temperature must be"),
        ('{"prompt": "x", "logit_bias": {"a": 1}}', "token ids as its keys, not 'a'"),
        ('{"prompt": "x", "budget": 10}', "smaller than the 64 recent tokens"),
        ('{"prompt": "x", "window": 10}', "window says how to evict and needs a budget"),
        ('{"messages": [{"content": "x"}]}', "role"),
        (json.dumps({"prompt": "x" * 600}), "the context holds 512"),
    ],
)
def test_a_mistake_is_named_by_its_line_before_anything_runs(
    line: str, words: str, run: Run, folder: Path, tmp_path: Path
) -> None:
    file = write(tmp_path / "p.jsonl", {"prompt": "Hello"}, "", line)
    code, out, err = run("generate", "--prompts-file", file, "-m", folder, *TINY, "--max-tokens", 3)
    assert (code, out) == (2, "") and err.count("\n") == 1
    assert "--prompts-file: line 3: " in err and words in err


def test_a_line_may_have_a_budget(run: Run, folder: Path, llm: LLM, tmp_path: Path) -> None:
    lines = [{"prompt": LONG, "budget": 100}, {"prompt": LONG, "budget": None}, {"prompt": LONG}]
    file = write(tmp_path / "p.jsonl", *lines)
    flags = ("-m", folder, *TINY, "--max-tokens", 3, "--json", "--in-order")
    code, out, err = run("generate", "--prompts-file", file, *flags, "--budget", 200)
    assert code == 0, err
    kept = [each.get("eviction", {}).get("kept_tokens") for each in objects(out)]
    assert kept == [100, None, 200]
    settings = read_batch("p.jsonl", ['{"prompt": "x", "budget": 100}'])[0].evicts(EvictionConfig(300, window=16), 0)
    assert settings == EvictionConfig(100, window=16)


def test_a_request_that_fails_is_an_error_in_its_place(
    run: Run, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others go on, and the exit code says that not all is well."""
    add = Engine.add

    def failing(engine: Engine, tokens: list[int], params: SamplingParams, **how: object) -> Request:
        if params.seed == 13:

            def hook(_: object, logits: object) -> None:
                raise ValueError("this one fails")

            params = SamplingParams(max_tokens=5, logits_hook=hook)
        return add(engine, tokens, params, **how)  # type: ignore[arg-type]

    monkeypatch.setattr(Engine, "add", failing)
    file = write(tmp_path / "p.jsonl", {"prompt": "Hello"}, {"prompt": "Bad", "seed": 13}, {"prompt": "Bye"})
    common = ("--prompts-file", file, "-m", folder, *TINY, "--max-tokens", 4, "--in-order")
    code, out, err = run("generate", *common, "--json")
    first, second, third = objects(out)
    assert code == 1 and "1 of 3 prompts failed" in err
    assert "this one fails" in second["error"] and "error" not in first and len(third["token_ids"]) == 4
    code, out, _ = run("generate", *common)
    assert code == 1 and "[1] > Bad\n" in out and "error: " in out


def test_answers_come_as_they_are_ready_and_an_interrupt_loses_none(long_folder: Path, tmp_path: Path) -> None:
    """The short one is written while the long one, which is first in the file, runs on."""
    long = {"prompt": "Hello", "max_tokens": 90000, "ignore_eos": True}
    file = write(tmp_path / "p.jsonl", long, {"prompt": "Bye", "max_tokens": 3})
    arguments = ("--device", "cpu", "--dtype", "float32", "--context", 100000, "--json", "--prompts-file", file)
    with process("generate", "-m", long_folder, *arguments, stdin=subprocess.DEVNULL) as generate:
        first = json.loads(of(generate.stdout).readline())
        generate.send_signal(signal.SIGINT)
        rest, err = generate.communicate(timeout=SECONDS)
    assert first["index"] == 1 and first["prompt"] == "Bye" and rest == ""
    assert generate.returncode == 130 and "stopped after 1 of 2 answers" in err and "Traceback" not in err


def test_answers_go_to_a_file(run: Run, folder: Path, tmp_path: Path) -> None:
    file, output = write(tmp_path / "p", "Hello", "Bye"), tmp_path / "answers.jsonl"
    flags = ("-m", folder, *TINY, "--max-tokens", 3, "--json", "-o", output)
    code, out, _ = run("generate", "--prompts-file", file, *flags)
    assert (code, out) == (0, "") and {each["index"] for each in objects(output.read_text())} == {0, 1}
    code, _, err = run("generate", "Hello", "-m", "no/such/model", "-o", tmp_path / "no" / "folder")
    assert code == 2 and "--output" in err
    code, _, err = run("generate", "Hello", "-m", "no/such/model", "-o", output)
    assert code == 2 and output.stat().st_size > 0  # not lost because something else was wrong
    before, long = output.read_text(), write(tmp_path / "long", "Hello", "x" * 5000)
    code, _, err = run("generate", "--prompts-file", long, *flags)
    assert code == 2 and "line 2" in err and output.read_text() == before
    code, _, err = run("generate", "--prompts-file", file, "-m", folder, *TINY, "-o", file)
    assert code == 2 and "read from it" in err and file.read_text() == "Hello\nBye\n"
    run("generate", "Hello", "-m", "no/such/model", "-o", tmp_path / "new")
    assert not (tmp_path / "new").exists()
