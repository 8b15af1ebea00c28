"""The folder that the commands of a page run in: small models and texts under the names that the pages use."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import tiny
import tiny_gguf
import tiny_v4
from thinking_template import THINKING_TEMPLATE
from v4_released import released_model

from docs.shell import Shell
from engine.ascii_tokenizer import TEMPLATE, add_to_gguf, write_tokenizer
from install.building import ROOT

SENTENCE = "The ship left the harbour at dawn, and the pilot wrote it down. "


@pytest.fixture(scope="session")
def shell(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shell]:
    made = Shell(tmp_path_factory.mktemp("shell") / "programs")
    yield made
    made.close()


@pytest.fixture(scope="session")
def stand_ins(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copied for each page, so that no page lives on what another has left."""
    folder = tmp_path_factory.mktemp("stand-ins")
    tiny.save("qwen3_5", folder / "Qwen3.5-4B")
    write_tokenizer(folder / "Qwen3.5-4B", THINKING_TEMPLATE)
    model = tiny.build("qwen3_5")
    model.config.max_position_embeddings = 262144
    file = folder / "Qwen3.5-27B-Q4_K_M.gguf"
    tiny_gguf.write_gguf_qwen35(model, file, add_tokenizer=lambda writer: add_to_gguf(writer, THINKING_TEMPLATE))
    tiny_v4.build("mini").save_pretrained(folder / "tiny-v4")
    (folder / "models/DeepSeek-V4-Flash").mkdir(parents=True)
    released_model(folder / "models/DeepSeek-V4-Flash")
    write_tokenizer(folder / "models/DeepSeek-V4-Flash", TEMPLATE)
    (folder / "report.txt").write_text(SENTENCE * 20)
    (folder / "prompts.jsonl").write_text('{"prompt": "The sea is", "max_tokens": 8}\n{"prompt": "The moon is"}\n')
    shutil.copytree(ROOT / "examples", folder / "examples")
    return folder


@pytest.fixture
def folder(stand_ins: Path, tmp_path: Path) -> Path:
    return shutil.copytree(stand_ins, tmp_path / "here")
