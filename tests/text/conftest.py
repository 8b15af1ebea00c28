"""The embedded model's tokenizer, read once."""

from typing import Any

import pytest

from hybridkv.checkpoint.gguf_file import GgufFile
from hybridkv.embedded import embedded_model
from hybridkv.text.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def metadata() -> dict[str, Any]:
    with GgufFile(embedded_model()) as file:
        return dict(file.metadata)


@pytest.fixture(scope="session")
def tokenizer(metadata: dict[str, Any]) -> Tokenizer:
    found = Tokenizer.from_gguf(metadata)
    assert found is not None
    return found
