"""Every command and every piece of code in the documents is run, and prints what its page shows.

What is not run says why in its page; the reasons are listed here.
"""

import re
import shlex
from pathlib import Path

import pytest
import typer

from docs import blocks
from docs.shell import Shell
from hybridkv.cli import app
from hybridkv.commands.demo import SUGGESTIONS

# a page may say one of these of a block; more words may follow
REASONS = (
    "needs a GPU",
    "needs the network",
    "needs a terminal",
    "builds the environment",
    "takes minutes",
    "needs a running server",  # tests/server/test_documents.py runs these
    "a piece of the package",
)
PAGES = blocks.pages()
RUN = [page for page in PAGES if any(b.kind in ("sh", "console") and not b.why for b in blocks.blocks_of(page))]
SCRIPTS = [page for page in PAGES if any(b.kind == "python" and not b.why for b in blocks.blocks_of(page))]


@pytest.mark.parametrize("page", RUN)
def test_commands_do_what_the_page_says(page: str, shell: Shell, folder: Path) -> None:
    for block in blocks.blocks_of(page):
        if block.kind not in ("sh", "console") or block.why:
            continue
        for command in blocks.commands_of(block):
            code, printed = shell.run(command.text, folder, block.typed)
            assert code == 0, f"{block}: {command.text}\n{printed}"
            if any(line.strip() for line in command.shown):
                shown = "\n".join(command.shown)
                assert blocks.matches(command.shown, printed), f"{block}: {command.text}\n{printed}\n--- shown\n{shown}"


@pytest.mark.parametrize("page", SCRIPTS)
def test_code_runs(page: str, shell: Shell, folder: Path) -> None:
    found = [block for block in blocks.blocks_of(page) if block.kind == "python" and not block.why]
    (folder / "page.py").write_text(blocks.script_of(page, found))
    code, printed = shell.run("python page.py", folder)
    assert code == 0, f"{page}\n{printed}"


def test_every_block_is_run_or_says_why_not() -> None:
    wrong = []
    for page in PAGES:
        for block in blocks.blocks_of(page):
            if block.kind not in ("sh", "console", "python", "text", ""):
                wrong.append(f"{block}: ```{block.kind} is not known here")
            if block.kind in ("text", "") and blocks.looks_like_a_command(block):
                wrong.append(f"{block}: commands need ```sh or ```console")
            if block.why and not block.why.startswith(REASONS):
                wrong.append(f"{block}: {block.why!r} is no reason that is known here")
    assert wrong == []


def refused(arguments: str) -> str | None:
    """What the command line has against these arguments, without running them."""
    command, *rest = shlex.split(arguments, comments=True)
    rest = rest[: rest.index("--")] if "--" in rest else rest  # what follows is for another program
    if command.startswith("-"):
        return None if command in ("-h", "--help", "--version", "--install-completion") else f"there is no {command}"
    group = typer.main.get_command(app)
    found = group.commands.get(command)  # type: ignore[attr-defined]
    if found is None:
        return f"there is no command {command}"
    flags = {flag for parameter in found.params for flag in [*parameter.opts, *parameter.secondary_opts]}
    given = [word.partition("=")[0] for word in rest if re.match(r"--?[a-z]", word)]
    unknown = [flag for flag in given if flag not in flags | {"-h", "--help"}]
    return f"{command} has no {', '.join(unknown)}" if unknown else None


@pytest.mark.parametrize("page", PAGES)
def test_commands_that_are_not_run_have_no_wrong_option(page: str) -> None:
    """In sentences, and in blocks that need what a test does not have."""
    found = blocks.inline_commands(page) + blocks.commands_not_run(page)
    assert {f"hybridkv {text}": said for text in found if (said := refused(text))} == {}


@pytest.mark.parametrize("suggested", SUGGESTIONS)
def test_what_the_demo_suggests_works_as_it_is_printed(suggested: str, shell: Shell, folder: Path) -> None:
    code, printed = shell.run(f"hybridkv {suggested}", folder, typed="/stats\n/exit\n")
    assert code == 0 and ("0 turns" in printed or "Fits: " in printed), printed


# ---- these checks can fail


def test_a_wrong_option_is_found(shell: Shell, folder: Path) -> None:
    code, printed = shell.run("hybridkv plan --model Qwen3.5-27B --contxt 4096", folder)
    assert code == 2 and "--contxt" in printed
    assert refused("plan --contxt 4096") == "plan has no --contxt"
    assert refused("plam") == "there is no command plam"
    assert refused("plan --context 4096 -m x") is None


def test_code_that_fails_is_found(shell: Shell, folder: Path) -> None:
    (folder / "page.py").write_text("import hybridkv\nhybridkv.no_such_name\n")
    code, printed = shell.run("python page.py", folder)
    assert code == 1 and "line 2" in printed


def test_an_answer_that_ends_in_an_error_is_found(shell: Shell, folder: Path) -> None:
    script = "from hybridkv import LLM, SamplingParams\nllm = LLM('./Qwen3.5-4B', max_context=256)\n"
    script += "llm.generate('One', SamplingParams(logits_hook=lambda logits, tokens: logits.no_such_name))\n"
    (folder / "page.py").write_text(script)
    code, printed = shell.run("python page.py", folder)
    assert code == 1 and "an answer has ended in an error" in printed


def test_pipes_and_files_are_the_shells(shell: Shell, folder: Path) -> None:
    code, printed = shell.run("echo 'hello' | cat > there.txt && hybridkv --version 2>&1 | grep -c hybridkv", folder)
    assert (code, printed) == (0, "1\n")
    assert (folder / "there.txt").read_text() == "hello\n"


def test_other_output_than_shown_is_found() -> None:
    assert blocks.matches(["a ... c", "...", "z"], "a b c\n\nmore\nlines\nz  \n")
    assert not blocks.matches(["a b"], "a c\n")
    assert not blocks.matches(["a", "z"], "a\nb\nz\n")


def test_a_command_in_a_bare_block_is_found() -> None:
    (block,) = blocks.blocks_of("x.md", "Text\n\n```\nhybridkv generate hello\n```\n")
    assert blocks.looks_like_a_command(block)
    (block,) = blocks.blocks_of("x.md", "<!-- not run: needs a GPU -->\n```sh\nhybridkv bench all\n```\n")
    assert block.why == "needs a GPU"
