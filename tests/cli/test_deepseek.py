"""DeepSeek-V4 from the command line: token ids in and out, its options, and what it refuses."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import tiny_v4

from hybridkv import LLM, CacheConfig, SamplingParams
from hybridkv.cli import main
from hybridkv.commands.prompts import token_ids
from hybridkv.errors import HybridKVError
from hybridkv.overrides import overridden

IDS = tiny_v4.token_ids(40)
TEXT = " ".join(map(str, IDS))
TINY = ("--device", "cpu", "--dtype", "float32", "--context", "128", "--max-tokens", "6")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_v4.Oracle("mini", tmp_path_factory.mktemp("v4")).folder


@pytest.fixture(scope="module")
def answer(folder: Path) -> list[int]:
    llm = LLM(folder, device="cpu", dtype="float32", max_requests=1, max_context=128)
    return llm.generate([IDS], SamplingParams(max_tokens=6))[0].token_ids


Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def call(*arguments: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as leaving:
            main([str(a) for a in arguments])
        out, err = capsys.readouterr()
        return leaving.value.code, out, err  # type: ignore[return-value]

    return call


def test_ids_in_and_ids_out(run: Run, folder: Path, answer: list[int]) -> None:
    code, out, err = run("generate", "-m", folder, *TINY, TEXT)
    assert code == 0, err
    assert out.split() == [str(token) for token in answer] and "read 40 tokens" in err


def test_several_prompts_of_ids(run: Run, folder: Path, answer: list[int], tmp_path: Path) -> None:
    (tmp_path / "prompts").write_text(f"{IDS}\n1,2 3\n")
    code, out, err = run("generate", "-m", folder, *TINY, "--prompts-file", tmp_path / "prompts", "--in-order")
    assert code == 0, err
    assert out.splitlines()[:2] == [f"[0] > {IDS}", " ".join(map(str, answer))]


def test_json_has_the_ids(run: Run, folder: Path, answer: list[int]) -> None:
    code, out, err = run("generate", "-m", folder, *TINY, TEXT, "--json")
    assert code == 0, err
    assert json.loads(out)["token_ids"] == answer


@pytest.mark.parametrize("index", ["auto", "fp8", "nvfp4"])
def test_formats_are_chosen_by_options(run: Run, folder: Path, index: str) -> None:
    code, out, err = run("generate", "-m", folder, *TINY, "--kv-dtype", "fp8", "--index-dtype", index, TEXT)
    assert code == 0, err
    assert len(out.split()) == 6


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--index-dtype", "int4"), "--index-dtype 'int4' is not supported; choose auto, f32"),
        (("--budget", "64"), "it compresses its cache itself"),
        (("--exact",), "exact mode is not available for deepseek_v4"),
    ],
)
def test_what_is_refused_is_one_line(run: Run, folder: Path, arguments: tuple[str, ...], words: str) -> None:
    code, out, err = run("generate", "-m", folder, *TINY, *arguments, TEXT)
    assert code == 2 and out == "" and words in err and len(err.splitlines()) == 1


def test_text_without_a_tokenizer_is_refused(run: Run, folder: Path) -> None:
    for prompt in ("hello", "1 two 3", "-1", "[]"):
        code, out, err = run("generate", "-m", folder, *TINY, "--", prompt)
        assert code == 2 and out == "" and "give token ids instead of text" in err


def test_an_id_outside_the_vocabulary_is_refused(run: Run, folder: Path) -> None:
    code, out, err = run("generate", "-m", folder, *TINY, "1 999999999")
    assert code == 2 and out == "" and "999999999" in err


def test_a_config_of_another_checkpoint_is_refused(run: Run, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").symlink_to(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config["layer_types"][1], config["layer_types"][2] = config["layer_types"][2], config["layer_types"][1]
    (tmp_path / "config.json").write_text(json.dumps(config))
    code, out, err = run("generate", "-m", tmp_path, *TINY, TEXT)
    assert code == 2 and out == "" and "layer 1 is HCA by the config" in err and "weights of CSA" in err


def test_token_ids() -> None:
    assert token_ids("1 17 4") == token_ids(" [1, 17,4] \n") == token_ids("1,17,4") == [1, 17, 4]
    assert token_ids("") == token_ids("[]") == []
    for text in ("one", "1 two", "-1", "1.5", "9" * 10, "²", "1;2"):
        assert token_ids(text) is None


def test_the_environment_overrides_the_index_keys(capsys: pytest.CaptureFixture[str]) -> None:
    found = overridden(CacheConfig("fp8"), {"HYBRIDKV_INDEX_DTYPE": "nvfp4"})
    assert found == CacheConfig("fp8", index_dtype="nvfp4")
    assert capsys.readouterr().err == "hybridkv: HYBRIDKV_INDEX_DTYPE=nvfp4 is in force\n"
    with pytest.raises(HybridKVError, match="HYBRIDKV_INDEX_DTYPE=int4: index_dtype 'int4'"):
        overridden(CacheConfig(), {"HYBRIDKV_INDEX_DTYPE": "int4"})
