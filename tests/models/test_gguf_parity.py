"""A GGUF file in llama.cpp's layout gives the logits of the model it was made from."""

from collections.abc import Callable
from pathlib import Path

import pytest
import tiny
import tiny_gguf
from numerics import assert_close_rms, logit_gap
from transformers import PreTrainedModel

from hybridkv.models import open_checkpoint

Writer = Callable[..., Path]

WRITERS: dict[str, tuple[Writer, dict[str, bool]]] = {
    "llama": (tiny_gguf.write_gguf_llama, {}),
    "llama_tied": (tiny_gguf.write_gguf_llama, {}),
    "llama3_rope": (tiny_gguf.write_gguf_llama, {}),
    "qwen3": (tiny_gguf.write_gguf_qwen3, {}),
    "qwen3_5": (tiny_gguf.write_gguf_qwen35, {}),
    "qwen3_5_tied": (tiny_gguf.write_gguf_qwen35, {}),
    "qwen3_5_moe": (tiny_gguf.write_gguf_qwen35, {"moe": True}),
    "qwen3_next": (tiny_gguf.write_gguf_qwen3next, {}),
}
LENGTH = 129


def gap(model: PreTrainedModel, path: Path, open_llm: Callable) -> float:
    ids = tiny.token_ids(LENGTH)
    got = open_llm(path).logits(ids, prefill=LENGTH - 9, chunk=50)
    return logit_gap(tiny.reference_logits(model, ids), got)


def write(kind: str, model: PreTrainedModel, path: Path, **options: bool) -> Path:
    writer, fixed = WRITERS[kind]
    return writer(model, path, **fixed, **options)


@pytest.mark.parametrize("kind", WRITERS)
def test_every_tensor_is_read_back_as_it_was(kind: str, tmp_path: Path, oracle: Callable) -> None:
    source = oracle(kind).model
    with open_checkpoint(write(kind, source, tmp_path / "m.gguf")) as checkpoint:
        parameters = {name: p.data for name, p in source.named_parameters()}
        assert set(checkpoint.names()) == set(parameters)
        for name, values in parameters.items():
            assert checkpoint.shape(name) == tuple(values.shape), name
            # a stored 1 + w, or -exp(w), gives w back to the last bits only
            assert_close_rms(name, values, checkpoint.read(name), 1e-5)


@pytest.mark.parametrize("kind", WRITERS)
def test_float32_gguf_agrees_with_its_source(kind: str, tmp_path: Path, oracle: Callable, open_llm: Callable) -> None:
    source = oracle(kind)
    assert gap(source.model, write(kind, source.model, tmp_path / "m.gguf"), open_llm) <= source.bound


@pytest.mark.parametrize("kind", WRITERS)
def test_quantised_gguf_agrees_with_the_rounded_source(
    kind: str, tmp_path: Path, oracle: Callable, open_llm: Callable
) -> None:
    source = oracle(kind)
    path = write(kind, source.model, tmp_path / "m.gguf", q8=True)
    assert path.stat().st_size < 0.5 * sum(4 * p.numel() for p in source.model.parameters()), "not quantised"
    assert gap(tiny_gguf.quantised(source.model), path, open_llm) <= source.bound


@pytest.mark.parametrize("kind", ("qwen3_5", "qwen3_5_moe"))
def test_next_token_block_is_set_aside(kind: str, tmp_path: Path, oracle: Callable, open_llm: Callable) -> None:
    source = oracle(kind)
    assert gap(source.model, write(kind, source.model, tmp_path / "m.gguf", mtp=True), open_llm) <= source.bound


def test_fused_projection_of_early_qwen3next_files_is_read(
    tmp_path: Path, oracle: Callable, open_llm: Callable
) -> None:
    source = oracle("qwen3_next")
    assert (
        gap(source.model, write("qwen3_next", source.model, tmp_path / "m.gguf", fused=True), open_llm) <= source.bound
    )


@pytest.mark.parametrize("kind", ("qwen3_5", "qwen3_5_moe"))
def test_value_heads_left_in_the_wrong_order_are_seen(
    kind: str, tmp_path: Path, oracle: Callable, open_llm: Callable
) -> None:
    """Negative control: a reader that did not undo the re-ordering could not pass the tests above."""
    source = oracle(kind)
    assert gap(source.model, write(kind, source.model, tmp_path / "m.gguf", reorder=False), open_llm) > 0.1
