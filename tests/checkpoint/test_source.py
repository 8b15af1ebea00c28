"""Only what is plainly a hub id reaches for the network."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from hybridkv.checkpoint.source import locate_model
from hybridkv.errors import ModelFileError


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[str, ...]]:
    """What was asked of the hub. The working folder is empty at first."""
    asked: list[tuple[str, ...]] = []

    def download(*names: str, **_: object) -> str:
        asked.append(names)
        return "/from/the/hub"

    client = SimpleNamespace(hf_hub_download=download, snapshot_download=download)
    monkeypatch.setitem(sys.modules, "huggingface_hub", client)
    monkeypatch.chdir(tmp_path)
    return asked


def test_a_path_that_is_there_is_taken(hub: list, tmp_path: Path) -> None:
    (tmp_path / "org" / "name").mkdir(parents=True)
    assert locate_model("org/name") == Path("org/name")
    assert locate_model(tmp_path) == tmp_path
    assert hub == []


def test_hub_ids_are_asked_of_the_hub(hub: list) -> None:
    for model in ("org/name", "HuggingFaceTB/SmolLM2-135M-Instruct", "org/Qwen3.5-0.8B", "org/name.v2-GGUF"):
        assert locate_model(model) == Path("/from/the/hub")
    locate_model("org/name/model.Q4_1.gguf")
    assert hub[0] == ("org/name",) and hub[-1] == ("org/name", "model.Q4_1.gguf") and len(hub) == 5


MISTYPED = ["models/foo", "models/foo/m.gguf", "models/foo/bar", "m.gguf", "other/m.gguf", "other/model.safetensors"]
MISTYPED += ["other/M.GGUF", "a/b/c/d.gguf", "other/deep/path", "./org/name", "../org/name", "~/org", "~nobody-here/x"]
MISTYPED += ["/abs/olute", "name", "org/", "org/..", "org/.hidden", "a" * 100_000, "a/" + "b" * 5000 + ".gguf", "x\0/y"]


@pytest.mark.parametrize("model", MISTYPED, ids=lambda m: m[:20].replace("\0", "NUL"))
def test_a_mistyped_path_stays_here(hub: list, tmp_path: Path, model: str) -> None:
    (tmp_path / "models").mkdir()
    with pytest.raises(ModelFileError, match="^there is no file or folder") as caught:
        locate_model(model)
    assert len(str(caught.value)) < 1000
    assert hub == []


def test_a_path_object_is_never_a_hub_id(hub: list) -> None:
    with pytest.raises(ModelFileError, match="no file or folder"):
        locate_model(Path("org/name"))
    assert hub == []


def test_a_failed_download_says_first_that_there_is_no_such_path(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError("401 Client Error\nmore lines")

    monkeypatch.setitem(sys.modules, "huggingface_hub", SimpleNamespace(hf_hub_download=fail, snapshot_download=fail))
    with pytest.raises(ModelFileError, match="^there is no file or folder 'org/name', and the hub.*401 Client Error$"):
        locate_model("org/name")


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("LocalEntryNotFoundError", "the hub could not be reached; check the connection"),
        ("OfflineModeIsEnabled", "the hub could not be reached"),
        ("RepositoryNotFoundError", "the hub has no model of that name"),
        ("GatedRepoError", "the hub gives it only to those who have accepted its terms"),
    ],
)
def test_what_the_hub_said_is_told_apart(kind: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    errors = pytest.importorskip("huggingface_hub.errors")

    def fail(*_: object, **__: object) -> None:
        error = getattr(errors, kind)
        raise error.__new__(error)  # those of answers want the answer itself

    monkeypatch.setitem(sys.modules, "huggingface_hub", SimpleNamespace(hf_hub_download=fail, snapshot_download=fail))
    with pytest.raises(ModelFileError, match=f"^there is no file or folder 'org/name', and {words}"):
        locate_model("org/name")


def test_without_the_hub_client_the_path_comes_first_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ModelFileError, match="^there is no file or folder 'org/name'.*pip install"):
        locate_model("org/name")
