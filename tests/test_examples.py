"""The examples run, and do what they say."""

import runpy
from collections.abc import Callable
from pathlib import Path

import pytest
import tiny

from engine.ascii_tokenizer import TEMPLATE, write_tokenizer

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.mark.parametrize("kind", ("llama", "qwen3_5"))
def test_a_request_is_forked_saved_and_restored(
    kind: str, oracle: Callable, capsys: pytest.CaptureFixture[str]
) -> None:
    example = runpy.run_path(str(EXAMPLES / "fork_and_save.py"))
    found = example["main"](str(oracle(kind).folder), tiny.token_ids(40, seed=8))
    assert len(found["request"]) == 12 and found["restored"] == found["request"]
    assert len(found["fork"]) == 12 and found["fork"] != found["request"]
    assert "a request of 47 tokens" in capsys.readouterr().out


@pytest.mark.parametrize("kind", ("llama", "qwen3_5"))
def test_a_conversation_is_saved_loaded_and_forked(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny.save(kind, tmp_path)
    write_tokenizer(tmp_path, TEMPLATE)
    example = runpy.run_path(str(EXAMPLES / "sessions.py"))
    found = example["main"](str(tmp_path))
    assert found["loaded"] == found["stayed"] != found["fork"]
    assert "tokens were there" in capsys.readouterr().out
