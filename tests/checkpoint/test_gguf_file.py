"""The GGUF reader: what it reads is what was written, and no sequence of bytes does more than raise ModelFileError."""

import os
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from gguf import GGUFWriter
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hybridkv.checkpoint import gguf_file
from hybridkv.checkpoint.gguf_file import DEQUANTISED, KEPT, GgufFile
from hybridkv.errors import ModelFileError, UnsupportedModel

# --- writing GGUF files byte by byte ---


def u32(value: int) -> bytes:
    return struct.pack("<I", value)


def u64(value: int) -> bytes:
    return struct.pack("<Q", value)


def text(value: str | bytes) -> bytes:
    data = value if isinstance(value, bytes) else value.encode()
    return u64(len(data)) + data


def key(name: str | bytes, kind: int, value: bytes) -> bytes:
    return text(name) + u32(kind) + value


def tensor(
    name: str = "t", dims: tuple[int, ...] = (8,), kind: int = 0, offset: int = 0, n_dims: int | None = None
) -> bytes:
    count = len(dims) if n_dims is None else n_dims
    return text(name) + u32(count) + b"".join(u64(dim) for dim in dims) + u32(kind) + u64(offset)


def whole(
    keys: tuple[bytes, ...] = (),
    tensors: tuple[bytes, ...] = (),
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    n_keys: int | None = None,
    n_tensors: int | None = None,
    align: int = 32,
    data: int = 64,
) -> bytes:
    counts = u64(len(tensors) if n_tensors is None else n_tensors) + u64(len(keys) if n_keys is None else n_keys)
    head = magic + u32(version) + counts + b"".join(keys) + b"".join(tensors)
    return head + bytes(-len(head) % align) + bytes(range(data))


GOOD_KEY = key("general.name", 8, text("x"))
ALIGN = "general.alignment"


def save(tmp_path: Path, data: bytes) -> Path:
    path = tmp_path / "m.gguf"
    path.write_bytes(data)
    return path


def refused(tmp_path: Path, data: bytes, message: str) -> None:
    with pytest.raises(ModelFileError, match=message) as caught:
        GgufFile(save(tmp_path, data))
    assert "m.gguf" in str(caught.value), "the message names the file"
    assert len(str(caught.value)) < 1000


# --- reading back ---


def written(path: Path, fill: Any) -> Path:
    writer = GGUFWriter(path, "llama")
    fill(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_every_kind_of_value_is_read_back(tmp_path: Path) -> None:
    values = {
        "a.u8": (200, "uint8"), "a.i8": (-5, "int8"), "a.u16": (60000, "uint16"), "a.i16": (-300, "int16"),
        "a.u32": (2**32 - 1, "uint32"), "a.i32": (-(2**31), "int32"), "a.u64": (2**64 - 1, "uint64"),
        "a.i64": (-(2**63), "int64"), "a.f32": (0.5, "float32"), "a.f64": (0.1, "float64"), "a.yes": (True, "bool"),
        "a.no": (False, "bool"), "a.text": ("naïve 🙂\n", "string"), "a.ints": ([1, -2, 3], "array"),
        "a.floats": ([0.5, 1.5], "array"), "a.bools": ([True, False], "array"),
        "a.texts": (["", "é", "long " * 50], "array"),
    }  # fmt: skip

    def fill(writer: GGUFWriter) -> None:
        for name, (value, kind) in values.items():
            getattr(writer, f"add_{kind}")(name, value)

    with GgufFile(written(tmp_path / "m.gguf", fill)) as file:
        for name, (value, _) in values.items():
            assert file.metadata[name] == value and type(file.metadata[name]) is type(value), name


@pytest.mark.parametrize("kind", [t for t in Type if t in DEQUANTISED], ids=lambda t: t.name)
def test_quantised_tensors_equal_the_reference_bit_for_bit(
    kind: Type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(0)
    rows, columns = 37, 768
    per_block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    try:
        stored = gguf.quantize(rng.standard_normal((rows, columns), dtype=np.float32), kind)
    except NotImplementedError:  # no writer for it: any bytes are some tensor
        stored = rng.integers(0, 60, (rows, columns // per_block * block_bytes), dtype=np.uint8)
    path = written(tmp_path / "m.gguf", lambda writer: writer.add_tensor("t", stored, raw_dtype=kind))
    expected = gguf.dequantize(stored, kind)
    monkeypatch.setattr(gguf_file, "_CHUNK", 5 * per_block)  # many chunks, the last of them short
    with GgufFile(path) as file:
        found = file.tensors["t"]
        assert found.shape == (rows, columns) and found.type == kind and found.nbytes == stored.nbytes
        got = file.dequantise(found)
        assert got.dtype == torch.float32
        assert np.array_equal(got.numpy().view(np.uint32), expected.view(np.uint32))
        assert np.array_equal(file.rows(found, 3, 9).numpy().view(np.uint32), expected[3:9].view(np.uint32))
        assert np.array_equal(file.raw(found), stored)


def test_the_list_of_dequantised_types_is_what_the_library_can_do() -> None:
    def can(kind: Type) -> bool:
        try:
            gguf.dequantize(np.zeros((1, gguf.GGML_QUANT_SIZES[kind][1]), dtype=np.uint8), kind)
        except NotImplementedError:
            return False
        return True

    assert {kind for kind in Type if kind not in KEPT and can(kind)} == DEQUANTISED


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_float_tensors_keep_their_dtype_and_bits(dtype: torch.dtype, tmp_path: Path) -> None:
    source = torch.randn(3, 4, 5).to(dtype)
    kind = next(kind for kind, kept in KEPT.items() if getattr(torch, kept) == dtype)
    stored = source.view(torch.uint8).numpy()
    path = written(tmp_path / "m.gguf", lambda writer: writer.add_tensor("t", stored, raw_dtype=kind))
    with GgufFile(path) as file:
        got = file.dequantise(file.tensors["t"])
    assert got.dtype == dtype and got.shape == (3, 4, 5) and torch.equal(got, source)
    got += 1  # it owns its memory: closing the file took nothing away


def test_unaligned_data_are_read(tmp_path: Path) -> None:
    keys = (key(ALIGN, 4, u32(1)),)
    with GgufFile(save(tmp_path, whole(keys, (tensor(offset=3),), align=1))) as file:
        got = file.dequantise(file.tensors["t"])
    assert got.numpy().tobytes() == bytes(range(3, 35))


@pytest.mark.parametrize("version", [2, 3])
def test_a_small_file_of_each_version_opens(version: int, tmp_path: Path) -> None:
    with GgufFile(save(tmp_path, whole((GOOD_KEY,), (tensor(dims=(2, 3)),), version=version))) as file:
        assert file.metadata == {"general.name": "x"} and file.tensors["t"].shape == (3, 2)


def test_a_type_without_dequantiser_is_unsupported(tmp_path: Path) -> None:
    file = GgufFile(save(tmp_path, whole(tensors=(tensor(kind=Type.I32),))))
    with pytest.raises(UnsupportedModel, match="I32"):
        file.dequantise(file.tensors["t"])


# --- files that are not what they should be ---

TWO = (tensor("a"), tensor("b", offset=32))
BAD = {
    "empty": (b"", "0 bytes"),
    "one_byte": (b"G", "1 bytes"),
    "seven_bytes": (b"GGUF\x03\0\0", "7 bytes"),
    "magic": (whole(magic=b"FUGG"), "not a GGUF file"),
    "zip": (b"PK\x03\x04" + bytes(64), "not a GGUF file"),
    "version_0": (whole(version=0), "version 0"),
    "version_1": (whole(version=1), "version 1"),
    "version_4": (whole(version=4), "version 4"),
    "big_endian": (whole(version=3 << 24), "big-endian GGUF v3"),
    "n_tensors_max": (whole(n_tensors=2**64 - 1), "tensors"),
    "n_tensors_2_63": (whole(n_tensors=2**63), "tensors"),
    "n_tensors_one_more": (whole((), (tensor(),), n_tensors=2, data=0), "tensors"),
    "n_keys_max": (whole(n_keys=2**64 - 1), "keys"),
    "n_keys_2_63": (whole(n_keys=2**63), "keys"),
    "key_length_max": (whole((u64(2**64 - 1) + bytes(40),)), "length of 18446744073709551615"),
    "key_length_2_63": (whole((u64(2**63) + bytes(40),)), "length of"),
    "key_too_long": (whole((key("k" * 65536, 0, b"\0"),)), "length of 65536"),
    "key_empty": (whole((key("", 4, u32(1)),)), "no characters"),
    "key_not_utf8": (whole((key(b"\xff\xfe", 4, u32(1)),)), "UTF-8"),
    "key_type_unknown": (whole((key("k", 13, u64(1)),)), "unknown value type 13"),
    "key_type_negative": (whole((key("k", 2**32 - 1, u64(1)),)), "unknown value type"),
    "key_twice": (whole((GOOD_KEY, GOOD_KEY)), "'general.name' stands there twice"),
    "bool_is_7": (whole((key("k", 7, b"\7"),)), "boolean"),
    "string_length_2_63": (whole((key("k", 8, u64(2**63) + bytes(40)),)), "length of"),
    "string_past_end": (whole((key("k", 8, u64(500)),)), "needs 500 bytes"),
    "string_not_utf8": (whole((key("k", 8, text(b"\xc3\x28")),)), "not UTF-8"),
    "array_count_max": (whole((key("k", 9, u32(4) + u64(2**64 - 1)),)), "needs"),
    "array_count_2_62": (whole((key("k", 9, u32(10) + u64(2**62)),)), "needs"),
    "array_of_unknown": (whole((key("k", 9, u32(99) + u64(1)),)), "unknown type 99"),
    "array_in_array": (whole((key("k", 9, u32(9) + u64(1) + u32(4) + u64(1) + u32(0)),)), "array of arrays"),
    "arrays_1000_deep": (whole((key("k", 9, (u32(9) + u64(1)) * 1000),)), "array of arrays"),
    "strings_count_2_63": (whole((key("k", 9, u32(8) + u64(2**63)),)), "strings"),
    "strings_one_too_long": (whole((key("k", 9, u32(8) + u64(2) + text("ok") + u64(2**63)),)), "past"),
    "strings_not_utf8": (whole((key("k", 9, u32(8) + u64(1) + text(b"\xff")),)), "not UTF-8"),
    "alignment_0": (whole((key(ALIGN, 4, u32(0)),)), "power of two"),
    "alignment_3": (whole((key(ALIGN, 4, u32(3)),)), "power of two"),
    "alignment_13": (whole((key(ALIGN, 4, u32(13)),), (tensor(),)), "power of two"),
    "alignment_i32": (whole((key(ALIGN, 5, u32(32)),)), "uint32"),
    "alignment_text": (whole((key(ALIGN, 8, text("32")),)), "uint32"),
    "alignment_2_31": (whole((key(ALIGN, 4, u32(2**31)),), (tensor(),)), "needs 32 bytes at byte 2147483648"),
    "alignment_not_kept": (whole((key(ALIGN, 4, u32(64)),), TWO, align=64, data=96), "multiple of the alignment 64"),
    "name_length_max": (whole(tensors=(u64(2**64 - 1) + bytes(60),)), "length of"),
    "name_too_long": (whole(tensors=(tensor("n" * 64),)), "at most 63"),
    "name_empty": (whole(tensors=(tensor(""),)), "no name"),
    "name_twice": (whole(tensors=(tensor("a"), tensor("a", offset=32))), "'a' stands there twice"),
    "n_dims_0": (whole(tensors=(tensor(dims=()) + bytes(8),)), "0 dimensions"),
    "n_dims_5": (whole(tensors=(tensor(dims=(1, 1, 1, 1, 1)),)), "5 dimensions"),
    "n_dims_max": (whole(tensors=(tensor(n_dims=2**32 - 1),)), "4294967295 dimensions"),
    "dim_0": (whole(tensors=(tensor(dims=(0, 8)),)), "each dimension"),
    "dim_negative": (whole(tensors=(tensor(dims=(2**64 - 8,)),)), "each dimension"),
    "dim_2_31": (whole(tensors=(tensor(dims=(2**31,)),)), "each dimension"),
    "product_wraps_2_64": (whole(tensors=(tensor(dims=(2**30, 2**30, 2**4, 1)),)), "but the file has"),
    "product_past_2_64": (whole(tensors=(tensor(dims=(2**31 - 1, 2**31 - 1, 4, 2)),)), "but the file has"),
    "type_unknown": (whole(tensors=(tensor(kind=4),)), "unknown ggml type 4"),
    "type_max": (whole(tensors=(tensor(kind=2**32 - 1),)), "unknown ggml type"),
    "row_not_blocks": (whole(tensors=(tensor(dims=(33,), kind=Type.Q4_0),)), "multiple of Q4_0's block of 32"),
    "offset_unaligned": (whole(tensors=(tensor(offset=4),)), "multiple of the alignment"),
    "offset_past_end": (whole(tensors=(tensor(offset=64),)), "but the file has"),
    "offset_max": (whole(tensors=(tensor(offset=2**64 - 32),)), "but the file has"),
    "tensors_overlap": (whole(tensors=(tensor("a", (16,)), tensor("b", offset=32))), "'a' and 'b' overlap"),
    "tensors_same_place": (whole(tensors=(tensor("a"), tensor("b"))), "overlap"),
    "data_missing": (whole(tensors=(tensor(),), data=31), "is the download complete"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_file_is_refused(case: str, tmp_path: Path) -> None:
    refused(tmp_path, *BAD[case])


def test_the_two_tensors_of_the_bad_files_are_fine_as_such(tmp_path: Path) -> None:
    with GgufFile(save(tmp_path, whole((GOOD_KEY,), TWO))) as file:
        assert [t.offset % 32 for t in file.tensors.values()] == [0, 0]


FULL = whole(
    (GOOD_KEY, key("k", 9, u32(8) + u64(2) + text("ab") + text("")), key("b", 9, u32(4) + u64(2) + u64(7))),
    TWO,
    data=64,
)


def test_a_file_cut_at_any_byte_is_refused(tmp_path: Path) -> None:
    GgufFile(save(tmp_path, FULL)).close()
    for length in range(len(FULL)):
        with pytest.raises(ModelFileError):
            GgufFile(save(tmp_path, FULL[:length]))


@settings(
    max_examples=300, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.lists(st.tuples(st.integers(4, len(FULL) - 65), st.integers(0, 255)), min_size=1, max_size=4))
def test_changed_bytes_never_do_more_than_raise(tmp_path: Path, changes: list[tuple[int, int]]) -> None:
    data = bytearray(FULL)
    for at, value in changes:
        data[at] = value
    path = save(tmp_path, bytes(data))
    try:
        with GgufFile(path) as file:
            for found in file.tensors.values():
                assert found.offset >= 0 and found.offset + found.nbytes <= len(data)
                if found.type in KEPT or found.type in DEQUANTISED:
                    with np.errstate(all="ignore"):
                        assert file.dequantise(found).shape == found.shape
    except ModelFileError:
        pass  # the other allowed end


def test_the_header_has_a_limit_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_file, "HEADER_LIMIT", 100)
    refused(tmp_path, whole((GOOD_KEY, key("k", 9, u32(0) + u64(200) + bytes(200)))), "header limit of 100 bytes")


ARRAYS = [(0, "u1", 200), (1, "i1", -100), (2, "u2", 60000), (3, "i2", -300), (4, "u4", 2**32 - 1), (5, "i4", -9)]
ARRAYS += [(6, "f4", 0.5), (7, "u1", 1), (10, "u8", 2**64 - 1), (11, "i8", -(2**63)), (12, "f8", 0.1)]


@pytest.mark.parametrize(("kind", "code", "value"), ARRAYS)
def test_a_long_array_of_numbers_takes_no_more_than_in_the_file(
    kind: int, code: str, value: float, tmp_path: Path
) -> None:
    values = np.full(300_000, value, dtype="<" + code)
    path = save(tmp_path, whole((key("k", 9, u32(kind) + u64(len(values)) + values.tobytes()),)))
    tracemalloc.start()
    try:
        with GgufFile(path) as file:
            peak = tracemalloc.get_traced_memory()[1]
            found = file.metadata["k"]
    finally:
        tracemalloc.stop()
    assert peak < 3.5 * values.nbytes + 100_000  # the array, and copies while it is made
    assert len(found) == 300_000 and found[0] == found[-1] == value and type(found[0]) in (int, float)
    assert found != 1 and found not in ("text", 1.0), "it can be compared with anything"


def test_short_arrays_are_lists_and_have_a_limit_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = tuple(key(f"k{i}", 9, u32(1) + u64(100) + bytes([250]) * 100) for i in range(3))
    with GgufFile(save(tmp_path, whole(keys))) as file:
        assert file.metadata["k2"] == [-6] * 100 and type(file.metadata["k2"]) is list
    monkeypatch.setattr(gguf_file, "MAX_LISTED", 299)
    refused(tmp_path, whole(keys), "key 'k2' brings the numbers in short arrays above 299")


@pytest.mark.parametrize("count", [3, 5000])
def test_an_array_of_booleans_holds_0_and_1_only(count: int, tmp_path: Path) -> None:
    bad = bytes(count - 1) + b"\2"
    refused(tmp_path, whole((key("k", 9, u32(7) + u64(count) + bad),)), "boolean")


def test_too_many_tensors_are_refused_before_they_are_read(tmp_path: Path) -> None:
    refused(tmp_path, whole(n_tensors=100_001, data=0) + bytes(33 * 100_001), "claims 100001 tensors")


def test_things_that_are_not_files_are_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.gguf")
    (tmp_path / "zero.gguf").symlink_to("/dev/zero")
    (tmp_path / "loop.gguf").symlink_to("loop.gguf")
    cases = {
        "pipe.gguf": "a FIFO",
        "zero.gguf": "a device",
        "loop.gguf": "cannot be opened",
        "none.gguf": "no such file",
    }
    for name, message in cases.items():
        with pytest.raises(ModelFileError, match=message):
            GgufFile(tmp_path / name)
    with pytest.raises(ModelFileError, match="a folder"):
        GgufFile(tmp_path)
    with pytest.raises(ModelFileError):
        GgufFile("nul\0.gguf")


def test_a_link_and_a_name_with_a_newline_are_fine_and_the_message_stays_one_line(tmp_path: Path) -> None:
    save(tmp_path, FULL)
    odd = tmp_path / "two\nlines.gguf"
    odd.symlink_to(tmp_path / "m.gguf")
    GgufFile(odd).close()
    bad = tmp_path / "bad\nname.gguf"
    bad.write_bytes(b"x")
    with pytest.raises(ModelFileError) as caught:
        GgufFile(bad)
    assert "\n" not in str(caught.value)


def test_a_file_cut_while_open_is_noticed_before_its_bytes_are_touched(tmp_path: Path) -> None:
    path = save(tmp_path, FULL)
    with GgufFile(path) as file:
        os.truncate(path, 40)
        with pytest.raises(ModelFileError, match="changed while it was in use"):
            file.dequantise(file.tensors["a"])


def test_a_file_deleted_while_open_is_still_read(tmp_path: Path) -> None:
    path = save(tmp_path, FULL)
    with GgufFile(path) as file:
        path.unlink()
        assert file.dequantise(file.tensors["a"]).shape == (8,)


def test_reading_after_close_is_an_error_and_closing_twice_is_not(tmp_path: Path) -> None:
    file = GgufFile(save(tmp_path, FULL))
    view = file.raw(file.tensors["a"])
    file.close()
    file.close()
    with pytest.raises(ModelFileError, match="closed"):
        file.dequantise(file.tensors["a"])
    assert view.size == 32  # a view that is still held keeps its memory
