"""Shell completion: in a real bash, without torch, of commands, options, files and names of models."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from cli.commands import ROOT, Run
from hybridkv.cards import CARDS, find_card
from hybridkv.commands import completion
from hybridkv.models.known import KNOWN

ASK = (
    'hybridkv() { "$PYTHON" -m hybridkv "$@"; }; eval "$(_HYBRIDKV_COMPLETE=source_bash hybridkv)"; '
    'COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _hybridkv_completion "$PROGRAM"; printf "%s\\n" "${COMPREPLY[@]}"'
)


def complete(folder: Path, *words: str, **environment: str) -> list[str]:
    """What bash offers for the last word."""
    program = folder / "hybridkv"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m hybridkv "$@"\n')
    program.chmod(0o755)
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHON": sys.executable, "PROGRAM": str(program), **environment}
    command = ["bash", "--norc", "-c", ASK, "bash", "hybridkv", *words]
    found = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=True)
    return found.stdout.split()


bash = pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")


@bash
def test_bash_completes_commands_and_options(tmp_path: Path) -> None:
    assert complete(tmp_path, "g") == ["generate"]
    assert {"--context", "--top-k"} <= set(complete(tmp_path, "generate", "--"))
    assert complete(tmp_path, "chat", "--kv") == ["--kv-dtype"]


@bash
def test_bash_completes_models(tmp_path: Path) -> None:
    (tmp_path / "models" / "tiny").mkdir(parents=True)
    (tmp_path / "models" / "one.gguf").touch()
    (tmp_path / "models" / "notes.txt").touch()
    (tmp_path / "hub" / "models--Qwen--Qwen3.5-4B").mkdir(parents=True)
    hub = {"HF_HUB_CACHE": str(tmp_path / "hub")}
    assert complete(tmp_path, "plan", "--model", "Qwen3.5-2") == ["Qwen3.5-27B"]
    # a folder comes with what it holds: bash puts a space behind an only match
    assert complete(tmp_path, "generate", "--model", "mod", **hub) == ["models/", "models/one.gguf", "models/tiny/"]
    assert complete(tmp_path, "generate", "-m", "Q", **hub) == ["Qwen/Qwen3.5-4B"]


@bash
def test_bash_completes_cards(tmp_path: Path) -> None:
    assert complete(tmp_path, "plan", "--card", "RTX-409") == ["RTX-4090"]
    assert complete(tmp_path, "plan", "--card", "409") == ["4090"]
    assert [find_card(name) for name in completion.card("")] == list(CARDS)  # each is understood as it is offered


@bash
def test_bash_completes_any_file_of_a_prompt(tmp_path: Path) -> None:
    (tmp_path / "report.txt").touch()
    assert complete(tmp_path, "generate", "--prompt-file", "rep") == ["report.txt"]


def test_completion_does_not_import_torch(tmp_path: Path) -> None:
    code = "import sys; from hybridkv.commands.completion import known; known(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0
    assert completion.known() == list(KNOWN)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_gets_its_script(shell: str) -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "_HYBRIDKV_COMPLETE": f"source_{shell}"}
    found = subprocess.run([sys.executable, "-m", "hybridkv"], env=env, capture_output=True, text=True)
    assert found.returncode == 0 and f"complete_{shell}" in found.stdout and found.stderr == ""


def test_a_folder_that_cannot_be_read_offers_nothing() -> None:
    assert completion.any_file("no/such/folder/x") == completion.any_file("\0") == []


def test_installing_is_an_option(run: Run) -> None:
    _, out, _ = run("--help")
    assert "--install-completion" in out and "--show-completion" in out
