"""`hybridkv chat` and `hybridkv demo`, interrupts and closed pipes."""

import os
import shutil
import signal
import subprocess
from importlib.resources import files
from pathlib import Path

import pytest

from cli.commands import SECONDS, TINY, Run, of, process, short_prompt
from engine.ascii_tokenizer import write_tokenizer
from hybridkv import LLM, SamplingParams
from hybridkv.commands import demo
from hybridkv.commands.chat import Interrupt
from hybridkv.config import CacheConfig
from hybridkv.conversation import Conversation
from hybridkv.report import page as page_file
from hybridkv.report.kept import Kept

# ---- chat


def test_a_chat_gives_the_answers_of_a_conversation(run: Run, folder: Path, llm: LLM) -> None:
    talk = Conversation(llm, None, SamplingParams(max_tokens=8))
    expected = ["".join(talk.send(text)) for text in ("Hello", "And then?")]
    talk.close()
    stdin = b"Hello\nAnd then?\n/stats\n/reset\n/stats\nHello\n/exit\nnot read\n"
    code, out, _ = run("chat", "-m", folder, *TINY, "--max-tokens", 8, stdin=stdin)
    lines = out.splitlines()
    assert code == 0 and lines[:2] == expected
    assert lines[2].startswith("2 turns, ") and " 0 of " not in lines[2]
    assert lines[-2].startswith("0 turns, 0 of 512 tokens, ")  # pages stay for others that begin alike
    assert lines[-1] == expected[0]


def test_a_chat_keeps_a_little_of_its_old_turns(run: Run, folder: Path) -> None:
    said = b"Hello, how are you?\nAnd then?\nWhy?\n/stats\n"
    turns = ("--keep-turns", 1, "--turn-budget", 5)
    code, out, _ = run("chat", "-m", folder, *TINY, "--max-tokens", 8, *turns, stdin=said)
    assert code == 0 and "old turns: 2, each at 5 tokens a stream or less" in out and "evicted: " in out
    for wrong, words in (
        (("--turn-budget", 5), "--keep-turns N"),
        (("--keep-turns", 0), "--keep-turns must be a whole number from 1"),
        (("--keep-turns", 1, "--turn-budget", -1), "--turn-budget must be a whole number from 0"),
    ):
        code, _, err = run("chat", "-m", folder, *TINY, *wrong, stdin=said)
        assert code == 2 and words in " ".join(err.split()), err


def test_a_piped_chat_that_outgrows_its_context_is_an_error(run: Run, folder: Path) -> None:
    code, _, err = run("chat", "-m", folder, *TINY, stdin=b"x" * 600 + b"\n")
    assert code == 2 and "--context" in err


def test_a_model_without_a_template_cannot_chat(run: Run, folder: Path, tmp_path: Path) -> None:
    plain = shutil.copytree(folder, tmp_path / "plain")
    write_tokenizer(plain)
    code, _, err = run("chat", "-m", plain, *TINY)
    assert code == 2 and "chat template" in err


def test_the_first_interrupt_asks_and_the_second_leaves() -> None:
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), Interrupt() as interrupt:
        os.kill(os.getpid(), signal.SIGINT)
        assert interrupt.asked
        os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before
    with Interrupt() as interrupt:
        assert not interrupt.asked


def test_an_interrupt_ends_the_answer_and_not_the_chat(long_folder: Path) -> None:
    arguments = ("--device", "cpu", "--dtype", "float32", "--context", 100000, "--max-tokens", 90000, "--ignore-eos")
    with process("chat", "-m", long_folder, *arguments) as chat:
        of(chat.stdin).write("Hello\n/stats\n/exit\n")
        of(chat.stdin).flush()
        first = of(chat.stdout).read(1)
        chat.send_signal(signal.SIGINT)
        rest, err = chat.communicate(timeout=SECONDS)
    assert first and chat.returncode == 0, err
    answer, _, stats = rest.rstrip("\n").rpartition("\n1 turn, ")  # a line on the answer's speed may follow
    assert answer.endswith(" ...") and len(answer) < 80000
    assert " of 100000 tokens, " in stats


def test_an_interrupt_stops_generate_with_130(long_folder: Path) -> None:
    """Also where SIGINT was ignored at the start, as it is for a job that a script starts in the background."""
    arguments = ("--device", "cpu", "--dtype", "float32", "--context", 100000, "--max-tokens", 90000, "--ignore-eos")
    with process("generate", "Hello", "-m", long_folder, *arguments, ignore_interrupts=True) as generate:
        assert of(generate.stdout).read(1)
        generate.send_signal(signal.SIGINT)
        _, err = generate.communicate(timeout=SECONDS)
    assert generate.returncode == 130 and "Traceback" not in err


def test_a_closed_pipe_is_a_quiet_end(long_folder: Path) -> None:
    arguments = ("--device", "cpu", "--dtype", "float32", "--context", 100000, "--max-tokens", 90000, "--ignore-eos")
    with process("generate", "Hello", "-m", long_folder, *arguments, stdin=subprocess.DEVNULL) as generate:
        assert of(generate.stdout).read(1)
        of(generate.stdout).close()
        err = of(generate.stderr).read()
    assert generate.returncode == 141 and err == ""


def test_a_poor_terminal_is_enough() -> None:
    with process("plan", LANG="C", LC_ALL="C", PYTHONIOENCODING="ascii", COLUMNS="1", TERM="dumb") as plan:
        out, err = plan.communicate(timeout=SECONDS)
    assert plan.returncode == 0 and out and err == ""


# ---- demo


def test_the_document_comes_with_the_package() -> None:
    text = files("hybridkv").joinpath("data", demo.DOCUMENT).read_text(encoding="utf-8")
    assert len(text.split()) > 2000 and text.isascii()


def test_the_demo_reads_its_document_once_where_all_is_kept(
    run: Run, folder: Path, llm: LLM, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(demo, "_prompt", short_prompt)
    page = tmp_path / "page.html"
    code, out, err = run("demo", "-m", folder, *TINY, "--budget", 100, "-o", page)
    assert code == 0, err
    text = files("hybridkv").joinpath("data", demo.DOCUMENT).read_text(encoding="utf-8")
    same = os.path.commonprefix([short_prompt(llm, text, question) for question in demo.QUESTIONS])
    words = " ".join(out.split())
    assert f"{len(same)} tokens were in the cache already" in words
    for question in demo.QUESTIONS:
        n = len(short_prompt(llm, text, question))
        assert f"{n} of {n}" in words and f"100 of {n}" in words
    assert str(page) in out.replace("\n", "") and "100 tokens a stream" in page.read_text()


def test_the_demo_gives_the_librarys_answers_from_one_model(
    folder: Path, tmp_path: Path, llm: LLM, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "_prompt", short_prompt)
    shown: list[Kept] = []
    monkeypatch.setattr(page_file, "write_page", lambda kept, path: shown.append(kept))
    opened: list[LLM] = []
    begin = LLM.__init__
    monkeypatch.setattr(LLM, "__init__", lambda self, *what, **how: (opened.append(self), begin(self, *what, **how))[1])
    code, _, _ = run("demo", "-m", folder, *TINY, "--budget", 100, "-o", tmp_path / "page.html")
    [used] = opened
    assert code == 0 and used.manager.free_slots == 1 and used.engine.idle
    text = files("hybridkv").joinpath("data", demo.DOCUMENT).read_text(encoding="utf-8")
    tokens = short_prompt(llm, text, demo.QUESTIONS[0])
    params = SamplingParams(max_tokens=64, temperature=0.0, stop=("\n",))
    own = LLM(folder, device="cpu", dtype="float32", cache=CacheConfig(budget=100), max_requests=1, max_context=512)
    [page] = shown
    for found, eviction in ((page.full_answer, None), (page.answer, own.cache_config.eviction)):
        [expected] = own.generate([tokens], params, eviction=eviction)
        assert found is not None and found.text == expected.text
    assert page.question == demo.QUESTIONS[0] and page.lengths.mean() == 100


def test_the_demo_page_goes_elsewhere_if_the_folder_is_not_writable(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HYBRIDKV_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    assert demo.page_place(demo.PAGE) == Path(demo.PAGE)
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert demo.page_place(demo.PAGE) == tmp_path / "cache" / demo.PAGE
