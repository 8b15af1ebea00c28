"""Model folders made to hurt: each is refused with ModelFileError, and nothing in one is ever run."""

import json
import os
import pickle
import shutil
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from hybridkv.checkpoint import checkpoint as weights
from hybridkv.checkpoint import safetensors_file
from hybridkv.errors import ModelFileError, UnsupportedModel
from hybridkv.models import open_checkpoint


def folder_with(tmp_path: Path, weights_bytes: bytes | None, config: str | bytes = "{}") -> Path:
    folder = tmp_path / "m"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_bytes(config if isinstance(config, bytes) else config.encode())
    if weights_bytes is not None:
        (folder / "model.safetensors").write_bytes(weights_bytes)
    return folder


def refused(path: Path, message: str, kind: type[ModelFileError] = ModelFileError) -> None:
    with pytest.raises(kind, match=message) as caught:
        open_checkpoint(path)
    assert len(str(caught.value)) < 1000


def container(header: Any, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def entry(begin: int = 0, end: int = 8, shape: Any = (2,), dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape) if isinstance(shape, tuple) else shape, "data_offsets": [begin, end]}


GOOD = container({"a": entry(), "b": entry(8, 16)}, bytes(16))
DEEP = b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
BAD: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "0 bytes"),
    "one_byte": (b"\0", "1 bytes"),
    "seven_bytes": (bytes(7), "7 bytes"),
    "length_max": (container({}, bytes(8), 2**64 - 1), "header of 18446744073709551615"),
    "length_past_file": (container({"a": entry()}, bytes(8), 1000), "header of 1000"),
    "length_past_limit": (container({"a": entry()}, bytes(8), 100_000_001), "at most 100000000"),
    "length_cuts_json": (container({"a": entry()}, bytes(8), 20), "not valid JSON"),
    "not_utf8": (container(b'{"\xff":1}'), "UTF-8"),
    "no_brace": (container(b"[1, 2, 3]"), "not a safetensors file"),
    "not_json": (container(b"{nonsense}"), "not valid JSON"),
    "nan": (container(b'{"a": NaN}'), "NaN"),
    "too_large_number": (container(b'{"a": 1e400}'), "too large"),
    "digits_5000": (container(b'{"a": ' + b"9" * 5000 + b"}"), "not valid JSON"),
    "deep": (container(DEEP), "nested too deeply"),
    "name_twice": (
        container(b'{"a":%b,"a":%b}' % ((json.dumps(entry()).encode(),) * 2), bytes(8)),
        "'a' stands there twice",
    ),
    "overlap": (container({"a": entry(0, 8), "b": entry(4, 12)}, bytes(12)), "'b' at 4 overlaps"),
    "same_place": (container({"a": entry(0, 8), "b": entry(0, 8)}, bytes(8)), "overlaps"),
    "hole": (container({"a": entry(0, 8), "b": entry(12, 20)}, bytes(20)), "hole"),
    "begins_late": (container({"a": entry(8, 16)}, bytes(16)), "hole"),
    "negative": (container({"a": entry(-8, 0)}, bytes(8)), "not negative"),
    "end_before_begin": (container({"a": entry(8, 0)}, bytes(8)), "make no tensor"),
    "past_end": (container({"a": entry(0, 8)}, bytes(4)), "is it complete"),
    "rest": (GOOD + b"PK\x03\x04", "is it complete"),
    "shape_does_not_fill": (container({"a": entry(0, 8, (3,))}, bytes(8)), "does not fill"),
    "shape_wraps": (container({"a": entry(0, 0, (2**32, 2**32))}), "does not fill"),
    "shape_huge": (container({"a": entry(0, 8, (2**64,))}, bytes(8)), "whole numbers"),
    "shape_negative": (container({"a": entry(0, 8, (-1, -2))}, bytes(8)), "not negative"),
    "shape_text": (container({"a": entry(0, 8, "2")}, bytes(8)), "list of whole numbers"),
    "shape_true": (container({"a": entry(0, 4, (True,))}, bytes(4)), "whole numbers"),
    "shape_0": (container({"a": entry(0, 0, (0, 5))}), "no values"),
    "dtype_unknown": (container({"a": entry(dtype="F7")}, bytes(8)), "unknown dtype 'F7'"),
    "dtype_list": (container({"a": entry(dtype=["F32"])}, bytes(8)), "unknown dtype"),
    "entry_is_number": (container({"a": 5}), "expected dtype, shape"),
    "entry_lacks_shape": (container({"a": {"dtype": "F32", "data_offsets": [0, 8]}}, bytes(8)), "expected dtype"),
    "offsets_three": (container({"a": entry() | {"data_offsets": [0, 8, 8]}}, bytes(8)), "make no tensor"),
    "metadata_number": (container({"__metadata__": {"a": 1}, "a": entry()}, bytes(8)), "__metadata__"),
    "metadata_text": (container({"__metadata__": "x", "a": entry()}, bytes(8)), "__metadata__"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_safetensors_file_is_refused(case: str, tmp_path: Path) -> None:
    data, message = BAD[case]
    refused(folder_with(tmp_path, data), message)


def test_the_good_file_of_these_tests_opens(tmp_path: Path) -> None:
    with open_checkpoint(folder_with(tmp_path, GOOD)) as checkpoint:
        assert torch.equal(checkpoint.read("b"), torch.zeros(2))


def test_a_safetensors_file_cut_at_any_byte_is_refused(tmp_path: Path) -> None:
    for length in range(len(GOOD)):
        with pytest.raises(ModelFileError):
            open_checkpoint(folder_with(tmp_path, GOOD[:length]))


@settings(
    max_examples=200, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.lists(st.tuples(st.integers(0, len(GOOD) - 17), st.integers(0, 255)), min_size=1, max_size=3))
def test_changed_bytes_never_do_more_than_raise(tmp_path: Path, changes: list[tuple[int, int]]) -> None:
    data = bytearray(GOOD)
    for at, value in changes:
        data[at] = value
    try:
        with open_checkpoint(folder_with(tmp_path, bytes(data))) as checkpoint:
            for name in checkpoint.names():
                assert tuple(checkpoint.read(name).shape) == checkpoint.shape(name)
    except ModelFileError:
        pass  # the other allowed end


def test_a_header_of_many_tensors_is_read(tmp_path: Path) -> None:
    header = {f"model.layers.{i}.x": entry(4 * i, 4 * i + 4, (1,)) for i in range(20_000)}
    with open_checkpoint(folder_with(tmp_path, container(header, bytes(80_000)))) as checkpoint:
        assert len(checkpoint.names()) == 20_000


def test_a_file_cut_while_open_is_noticed(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, GOOD)
    with open_checkpoint(folder) as checkpoint:
        checkpoint.read("a")
        os.truncate(folder / "model.safetensors", 20)
        with pytest.raises(ModelFileError, match="changed while it was in use"):
            checkpoint.read("b")


def test_an_error_of_the_library_becomes_a_model_file_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise safetensors_file.SafetensorError("header is odd")

    monkeypatch.setattr(safetensors_file, "safe_open", fail)
    with (
        open_checkpoint(folder_with(tmp_path, GOOD)) as checkpoint,
        pytest.raises(ModelFileError, match="header is odd"),
    ):
        checkpoint.read("a")


class Marker:
    """Writes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, (str(self.path),))


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_pickle_and_zip_under_another_name_are_refused_unread(protocol: int, tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    data = pickle.dumps({"model.a": Marker(marker)}, protocol=protocol)
    refused(folder_with(tmp_path, data), "never loads pickle")
    inner = tmp_path / "m.zip"
    with zipfile.ZipFile(inner, "w") as archive:
        archive.writestr("archive/data.pkl", data)
    refused(folder_with(tmp_path, inner.read_bytes()), "never loads pickle")
    torch.save({"model.a": torch.ones(2)}, inner)
    refused(folder_with(tmp_path, inner.read_bytes()), "never loads pickle")
    assert not marker.exists()


@pytest.mark.parametrize("suffix", [".bin", ".pt", ".pth", ".ckpt", ".pkl", ".PT"])
def test_pickle_by_name_is_refused_unread(suffix: str, tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    folder = folder_with(tmp_path, None)
    file = folder / f"pytorch_model{suffix}"
    file.write_bytes(pickle.dumps(Marker(marker)))
    refused(file, "never loads pickle")
    refused(folder, "never loads pickle")
    refused(tmp_path / f"absent{suffix}", "never loads pickle")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": file.name}}))
    refused(folder, "never loads pickle")
    assert not marker.exists()


def test_code_in_a_model_folder_never_runs(tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    config = {"auto_map": {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}, "model_type": "evil"}
    folder = folder_with(tmp_path, GOOD, json.dumps(config))
    for name in ("evil.py", "config.py", "__init__.py", "modeling_evil.py"):
        (folder / name).write_text(f"import os\nos.mkdir({str(marker)!r})\n")
    with open_checkpoint(folder) as checkpoint:
        assert checkpoint.config["auto_map"], "the key is passed on; nobody follows it"
        checkpoint.read("a")
    assert not marker.exists()


BAD_CONFIG: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "not valid JSON"),
    "list": (b"[]", "expected an object"),
    "null": (b"null", "expected an object"),
    "deep": (DEEP, "nested too deeply"),
    "nan_theta": (b'{"rope_theta": NaN}', "NaN"),
    "minus_infinity": (b'{"a": -Infinity}', "Infinity"),
    "too_large": (b'{"a": [1e999]}', "too large"),
    "key_twice": (b'{"hidden_size": 1, "hidden_size": 2}', "'hidden_size' stands there twice"),
    "not_utf8": (b'{"a": "\xff"}', "UTF-8"),
    "utf16": ('{"a": 1}'.encode("utf-16"), "UTF-8"),
    "too_long": (b'{"a": "' + b"x" * (16 << 20) + b'"}', "at most"),
}


@pytest.mark.parametrize("case", BAD_CONFIG)
def test_a_bad_config_is_refused(case: str, tmp_path: Path) -> None:
    data, message = BAD_CONFIG[case]
    refused(folder_with(tmp_path, GOOD, data), message)


@pytest.mark.parametrize("nested", [False, True])
def test_a_quantised_folder_is_unsupported(nested: bool, tmp_path: Path) -> None:
    config: dict[str, Any] = {"quantization_config": {"quant_method": "gptq"}}
    refused(
        folder_with(tmp_path, GOOD, json.dumps({"text_config": config} if nested else config)), "gptq", UnsupportedModel
    )


@pytest.mark.parametrize(
    "dtype", [torch.int8, torch.int64, torch.uint8, torch.bool, torch.float64, torch.float8_e4m3fn]
)
def test_tensors_that_are_not_plain_floats_are_unsupported(dtype: torch.dtype, tmp_path: Path) -> None:
    folder = folder_with(tmp_path, None)
    save_file({"model.a": torch.zeros(4).to(dtype)}, folder / "model.safetensors")
    refused(folder, "'model.a' is", UnsupportedModel)


def sharded(tmp_path: Path, index: Any) -> Path:
    folder = folder_with(tmp_path, None)
    (folder / "one.safetensors").write_bytes(container({"a": entry()}, bytes(8)))
    (folder / "two.safetensors").write_bytes(container({"b": entry()}, bytes(8)))
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


BAD_INDEX: dict[str, tuple[Any, str]] = {
    "list": ([], "expected an object"),
    "no_map": ({"metadata": {}}, "weight_map"),
    "empty_map": ({"weight_map": {}}, "weight_map"),
    "map_of_numbers": ({"weight_map": {"a": 1}}, "weight_map"),
    "parent": ({"weight_map": {"a": "../m/one.safetensors"}}, "plain name"),
    "absolute": ({"weight_map": {"a": "/etc/x.safetensors"}}, "plain name"),
    "backslash": ({"weight_map": {"a": "..\\one.safetensors"}}, "plain name"),
    "nul": ({"weight_map": {"a": "one\0.safetensors"}}, "plain name"),
    "other_kind": ({"weight_map": {"a": "config.json"}}, "plain name"),
    "missing_shard": (
        {"weight_map": {"a": "one.safetensors", "b": "three.safetensors"}},
        "'three.safetensors' is missing",
    ),
    "missing_tensor": ({"weight_map": {"a": "one.safetensors", "c": "one.safetensors"}}, "'c' in 'one.safetensors'"),
    "wrong_shard": ({"weight_map": {"a": "two.safetensors", "b": "two.safetensors"}}, "'a' in 'two.safetensors'"),
}


@pytest.mark.parametrize("case", BAD_INDEX)
def test_a_bad_index_is_refused(case: str, tmp_path: Path) -> None:
    index, message = BAD_INDEX[case]
    refused(sharded(tmp_path, index), message)


def test_a_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    folder = sharded(tmp_path, {"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}})
    open_checkpoint(folder).close()
    shutil.copy(folder / "one.safetensors", folder / "two.safetensors")
    refused(folder, "'a' is in both 'one.safetensors' and 'two.safetensors'")


def test_things_that_are_not_files_are_refused(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, None)
    target = folder / "model.safetensors"
    os.mkfifo(target)
    refused(folder, "a FIFO")
    target.unlink()
    target.symlink_to("/dev/zero")
    refused(folder, "a device")
    target.unlink()
    target.symlink_to("nowhere")
    refused(folder, "no such file")
    target.unlink()
    target.mkdir()
    refused(folder, "a folder")
    (folder / "config.json").unlink()
    os.mkfifo(folder / "config.json")
    refused(folder, "a FIFO")


def test_what_is_no_model_gets_a_hint(tmp_path: Path) -> None:
    refused(tmp_path / "absent", "no such file or folder")
    refused(Path("nul\0byte"), "no such file or folder")
    refused(tmp_path, "no config.json")
    folder = folder_with(tmp_path, GOOD)
    refused(folder / "model.safetensors", "give the folder it is in")
    refused(folder / "config.json", "give a model folder or a .gguf file")
    (folder / "model.safetensors").unlink()
    refused(folder, "neither model.safetensors nor")
    (folder / "x.gguf").write_bytes(b"")
    refused(folder, "to use 'x.gguf', give its path")


def test_a_folder_that_may_not_be_listed_is_a_model_file_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def deny(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(weights, "_open", deny)
    refused(tmp_path, "Permission denied")


def test_refused_folders_leave_no_file_open(tmp_path: Path) -> None:
    folder = sharded(tmp_path, {"weight_map": {"a": "two.safetensors", "b": "two.safetensors"}})
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        refused(folder, "which lacks it")
    assert len(os.listdir("/proc/self/fd")) == before
