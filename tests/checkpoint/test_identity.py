"""WeightsIdentity: what a look at a few pages of a model's files tells apart."""

import random
from pathlib import Path

import pytest

from hybridkv.checkpoint.identity import LEAST, PAGE, PAGES, WeightsIdentity
from hybridkv.errors import HybridKVError


def test_a_glance_tells_other_sizes_and_other_weights(tmp_path: Path) -> None:
    """Files that are empty, smaller than a page, and larger than all pages that are read of them."""
    draw = random.Random(3)
    sizes = (0, 100, PAGE, 3 * PAGES * PAGE)
    files = [tmp_path / f"{size}.safetensors" for size in sizes]
    for path, size in zip(files, sizes, strict=True):
        path.write_bytes(draw.randbytes(size))
    first = WeightsIdentity(files).glance()
    assert first == WeightsIdentity(files).glance() and len(first) == 64
    for path, change in (
        (files[1], lambda data: data[:-1]),
        (files[1], lambda data: data[:50] + bytes([data[50] ^ 1]) + data[51:]),
        (files[2], lambda data: data + b"x"),
        (files[3], lambda data: data[:-PAGE] + draw.randbytes(PAGE)),
        (files[3], lambda data: draw.randbytes(len(data))),
    ):
        before = path.read_bytes()
        path.write_bytes(change(before))
        assert WeightsIdentity(files).glance() != first
        path.write_bytes(before)
    assert WeightsIdentity(files[::-1]).glance() != first, "files in another order"
    many = [files[3]] * (2 * PAGES)
    assert PAGES // len(many) < LEAST and len(WeightsIdentity(many).glance()) == 64


def test_a_file_that_has_gone_is_said(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"weights")
    found = WeightsIdentity([path])
    path.unlink()
    with pytest.raises(HybridKVError, match=r"model\.gguf' cannot be read: No such file"):
        found.glance()
