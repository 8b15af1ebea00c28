"""Two models for all tests of servers, opened once: the embedded one, and a tiny random one that thinks."""

from collections.abc import Iterator

import pytest
import tiny
from thinking_template import THINKING_TEMPLATE

from engine.ascii_tokenizer import write_tokenizer
from hybridkv import LLM
from server.running import QUIET, Running, serving


@pytest.fixture(scope="session")
def smol_llm() -> Iterator[LLM]:
    """In f32, whose prompts and single tokens give the same logits but for some 1e-5."""
    with LLM(device="cpu", dtype="float32", max_requests=4, max_context=2048) as llm:
        yield llm


@pytest.fixture(scope="session")
def tiny_llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    """Qwen3.5's kind, 97 tokens of ASCII, a template with thoughts and tools; exact, so that answers do not depend on
    what else runs."""
    folder = tmp_path_factory.mktemp("served")
    tiny.save("qwen3_5", folder)
    write_tokenizer(folder, THINKING_TEMPLATE)
    with LLM(folder, device="cpu", dtype="float32", max_requests=4, max_context=512, exact=True) as llm:
        yield llm


@pytest.fixture(scope="session")
def smol_server(smol_llm: LLM) -> Iterator[Running]:
    with serving(smol_llm, names=("smol", "claude-*"), keep_alive=QUIET) as running:
        yield running


@pytest.fixture(scope="session")
def tiny_server(tiny_llm: LLM) -> Iterator[Running]:
    with serving(tiny_llm, names=("tiny",), keep_alive=QUIET) as running:
        yield running


@pytest.fixture
def smol(smol_server: Running) -> Iterator[Running]:
    """The embedded model's server; after each test its pools are as they were."""
    yield smol_server
    smol_server.idle()


@pytest.fixture
def tiny_one(tiny_server: Running) -> Iterator[Running]:
    """The tiny model's server; after each test its pools are as they were."""
    yield tiny_server
    tiny_server.idle()
