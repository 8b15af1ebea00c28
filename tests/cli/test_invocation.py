"""Suggestions name the program as the user started it; `python -m hybridkv` is the same program."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cli.commands import ROOT
from hybridkv.commands.invocation import command_name


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program hybridkv in a folder of the current one."""
    path = tmp_path / ".venv" / "bin" / "hybridkv"
    path.parent.mkdir(parents=True)
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", os.defpath)
    return path


def test_a_program_that_is_not_on_the_path_is_named_by_its_path(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [str(script.relative_to(Path.cwd())), "demo"])
    assert command_name() == ".venv/bin/hybridkv"
    monkeypatch.setattr(sys, "argv", [str(script)])
    assert command_name() == ".venv/bin/hybridkv"
    monkeypatch.chdir("/usr/lib")
    assert command_name() == str(script)
    monkeypatch.chdir(script.parent)
    assert command_name() == "./hybridkv"


def test_a_program_on_the_path_is_named_by_its_name(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [str(script)])
    monkeypatch.setenv("PATH", str(script.parent))
    assert command_name() == "hybridkv"


def test_another_program_of_that_name_on_the_path_is_not_meant(
    script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "other" / "hybridkv"
    other.parent.mkdir()
    other.write_text("#!/bin/sh\n")
    other.chmod(0o755)
    monkeypatch.setenv("PATH", str(other.parent))
    monkeypatch.setattr(sys, "argv", [str(script)])
    assert command_name() == ".venv/bin/hybridkv"


def test_a_name_that_a_shell_would_split_is_quoted(
    script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spaced = tmp_path / "my tools" / "hybridkv"
    spaced.parent.mkdir()
    spaced.write_text("#!/bin/sh\n")
    monkeypatch.setattr(sys, "argv", [str(spaced)])
    assert command_name() == "'my tools/hybridkv'"


def test_a_module_is_named_with_its_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [str(ROOT / "hybridkv" / "__main__.py")])
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent))
    assert command_name() == f"{Path(sys.executable).name} -m hybridkv"
    monkeypatch.setenv("PATH", "")
    monkeypatch.chdir("/usr/lib")
    assert command_name() == f"{sys.executable} -m hybridkv"


def test_the_package_is_a_program() -> None:
    found = subprocess.run([sys.executable, "-m", "hybridkv", "--version"], cwd=ROOT, capture_output=True, text=True)
    assert found.returncode == 0 and found.stdout.startswith("hybridkv ")
