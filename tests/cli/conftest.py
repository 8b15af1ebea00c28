"""Tiny models in folders, and commands run in this process."""

import io
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import tiny

from cli.commands import Run
from engine.ascii_tokenizer import TEMPLATE, write_tokenizer
from hybridkv import LLM
from hybridkv.cli import main


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a tokenizer of single characters and a chat template."""
    path = tmp_path_factory.mktemp("cli") / "tiny-llama"
    tiny.save("llama", path)
    write_tokenizer(path, TEMPLATE)
    return path


@pytest.fixture(scope="module")
def long_folder(folder: Path) -> Path:
    """The same model with a context that takes minutes to fill, for runs that are interrupted."""
    path = shutil.copytree(folder, folder.with_name("tiny-long"))
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 1 << 17}))
    return path


@pytest.fixture
def llm(folder: Path, open_llm: Callable[..., LLM]) -> LLM:
    return open_llm(folder)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """`run("plan", "--json", stdin=b"")` -> exit code, standard output, standard error."""

    def call(*arguments: object, stdin: bytes = b"") -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin), encoding="utf-8"))
        with pytest.raises(SystemExit) as leaving:
            main([str(a) for a in arguments])
        out, err = capsys.readouterr()
        return leaving.value.code, out, err  # type: ignore[return-value]

    return call
