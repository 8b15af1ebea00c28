"""The model's own sampling settings: read as transformers means them, refused where they cannot be meant."""

import json
from pathlib import Path
from typing import Any

import pytest
import tiny
from gguf_files import llama, write_gguf

from engine.ascii_tokenizer import write_tokenizer
from hybridkv import files
from hybridkv.checkpoint.generation_config import describe, sampling_defaults
from hybridkv.embedded import embedded_model
from hybridkv.errors import ModelFileError
from hybridkv.models import open_checkpoint
from hybridkv.prompts import load_tokenizer

QWEN = {"temperature": 0.6, "top_p": 0.95, "top_k": 20}


def folder(path: Path, settings: Any) -> Path:
    (path / "generation_config.json").write_text(settings if isinstance(settings, str) else json.dumps(settings))
    return path


MEANT: list[tuple[dict[str, Any], dict[str, float], str]] = [
    (QWEN | {"do_sample": True}, QWEN, "temperature 0.6, top_p 0.95, top_k 20"),
    (QWEN, QWEN, "temperature 0.6, top_p 0.95, top_k 20"),
    (QWEN | {"do_sample": False}, {}, "greedy"),
    ({"do_sample": True}, {"temperature": 1.0}, "temperature 1"),
    ({"do_sample": True, "top_k": 1}, {"temperature": 1.0, "top_k": 1}, "temperature 1, top_k 1"),
    ({"top_p": 0.9, "top_k": 50}, {}, "greedy"),  # transformers samples only when told to
    ({"do_sample": True, "temperature": 0.0, "top_k": 5}, {}, "greedy"),
    (
        {"do_sample": False, "repetition_penalty": 1.1},
        {"repetition_penalty": 1.1},
        "greedy, repetition_penalty 1.1",
    ),
    (
        {"do_sample": True, "temperature": 1, "min_p": 0.05, "repetition_penalty": 1.05},
        {"temperature": 1.0, "min_p": 0.05, "repetition_penalty": 1.05},
        "temperature 1, min_p 0.05, repetition_penalty 1.05",
    ),
    (  # values that change nothing
        {"temperature": 0.7, "top_p": 1.0, "top_k": -1, "min_p": 0, "repetition_penalty": 1.0},
        {"temperature": 0.7},
        "temperature 0.7",
    ),
    (
        {"temperature": 0.7, "top_k": 20.0, "top_p": None},
        {"temperature": 0.7, "top_k": 20},
        "temperature 0.7, top_k 20",
    ),
    ({"eos_token_id": 2, "max_length": "x"}, {}, "greedy"),
    ({}, {}, "greedy"),
]


@pytest.mark.parametrize(("settings", "expected", "words"), MEANT)
def test_settings_of_a_folder(tmp_path: Path, settings: dict[str, Any], expected: dict[str, float], words: str) -> None:
    found = sampling_defaults(folder(tmp_path, settings))
    named = settings.keys() - {"eos_token_id", "max_length"}
    source = "from generation_config.json" if named else "the model names no sampling settings"
    assert dict(found) == expected and describe(found) == f"{words} ({source})"
    assert all(isinstance(value, int if name == "top_k" else float) for name, value in found.items())


def test_a_folder_without_the_file(tmp_path: Path) -> None:
    found = sampling_defaults(tmp_path)
    assert found == {} and describe(found) == "greedy (the model names no sampling settings)"
    assert describe({}) == "greedy (the model names no sampling settings)"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("temperature", -0.1),
        ("temperature", "0.6"),
        ("temperature", True),
        ("temperature", [0.6]),
        ("temperature", 1e9),
        ("top_p", 0),
        ("top_p", 1.5),
        ("top_k", 2.5),
        ("top_k", -2),
        ("top_k", 2**40),
        ("min_p", -1),
        ("repetition_penalty", 0),
        ("do_sample", "yes"),
        ("do_sample", 1),
    ],
)
def test_a_bad_value_is_refused_by_file_and_key(tmp_path: Path, key: str, value: Any) -> None:
    with pytest.raises(ModelFileError, match=rf"generation_config\.json': {key} must be .*, not "):
        sampling_defaults(folder(tmp_path, {"do_sample": True, key: value}))


@pytest.mark.parametrize("text", ["{", "[]", '{"temperature": NaN}', '{"temperature": 1e999}'])
def test_a_file_that_is_no_object_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(ModelFileError, match=r"generation_config\.json"):
        sampling_defaults(folder(tmp_path, text))


LLAMA_KEYS: dict[str, Any] = {
    "block_count": 2,
    "context_length": 64,
    "embedding_length": 16,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "feed_forward_length": 32,
}


def gguf(path: Path, **sampling: Any) -> Path:
    keys = {f"general.sampling.{name}": value for name, value in sampling.items()}
    return write_gguf(path / "m.gguf", "llama", LLAMA_KEYS | keys, llama()[1])


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        ({"temp": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.0}, QWEN),
        ({"top_k": 20, "sequence": "top_k"}, {"temperature": 1.0, "top_k": 20}),
        ({"penalty_repeat": 1.05, "penalty_last_n": 64}, {"repetition_penalty": 1.05}),
        ({"temp": 0.0, "top_k": 20}, {}),
        ({"xtc_probability": 0.5}, {}),
        ({}, {}),
    ],
)
def test_settings_of_a_gguf_file(tmp_path: Path, sampling: dict[str, Any], expected: dict[str, float]) -> None:
    path = gguf(tmp_path, **sampling)
    assert dict(sampling_defaults(path)) == expected  # 0.95 as it was written, not as float32 has it
    words = "from m.gguf" if {"temp", "top_k", "penalty_repeat"} & sampling.keys() else "names no sampling settings"
    assert words in describe(sampling_defaults(path))


@pytest.mark.parametrize(("name", "value"), [("temp", -1.0), ("temp", float("nan")), ("top_p", "high"), ("top_k", 2.5)])
def test_a_bad_value_of_a_gguf_file_is_refused(tmp_path: Path, name: str, value: Any) -> None:
    with pytest.raises(ModelFileError, match=rf"m\.gguf': general\.sampling\.{name} must be"):
        sampling_defaults(gguf(tmp_path, **{name: value}))


def test_the_embedded_model_names_none() -> None:
    with open_checkpoint(embedded_model()) as checkpoint:
        assert describe(sampling_defaults(checkpoint)) == "greedy (the model names no sampling settings)"


def test_an_open_checkpoint_reads_the_file_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny.save("llama", tmp_path)
    write_tokenizer(tmp_path)
    folder(tmp_path, QWEN | {"eos_token_id": [2, 7]})
    read: list[str] = []
    read_bytes = files.read_bytes
    monkeypatch.setattr(files, "read_bytes", lambda path, limit: (read.append(path.name), read_bytes(path, limit))[1])
    with open_checkpoint(tmp_path) as checkpoint:
        tokenizer = load_tokenizer(checkpoint)[0]
        assert dict(sampling_defaults(checkpoint)) == QWEN
    assert tokenizer is not None and tokenizer.eos_ids == {2, 7}
    assert read.count("generation_config.json") == 1
