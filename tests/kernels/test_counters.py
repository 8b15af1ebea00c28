"""Counters of launches: which ones share them, and what happens where the driver does not answer."""

from types import SimpleNamespace

import pytest
import torch

from hybridkv.kernels import counters as file
from hybridkv.kernels.counters import Counters, capture_number, counters

CPU = torch.device("cpu")


def test_launches_on_one_stream_share_their_counters_and_others_do_not() -> None:
    held = Counters()
    first = held.take(5, CPU, 1, 0)
    assert first.dtype == torch.int32 and first.tolist() == [0] * 5
    assert held.take(5, CPU, 1, 0) is first
    others = [held.take(5, CPU, 2, 0), held.take(5, torch.device("meta"), 1, 0), held.take(6, CPU, 1, 0)]
    assert all(other is not first for other in others) and len(others[-1]) == 6
    assert held.take(5, CPU, 1, 0) is first, "the counters of a stream stay where they are"


def test_every_capture_has_counters_of_its_own() -> None:
    """Its graph can be replayed on any stream, beside graphs that were captured on the same one."""
    held = Counters()
    eager, captured = held.take(5, CPU, 1, 0), held.take(5, CPU, 1, 7)
    assert captured is not eager and held.take(5, CPU, 1, 7) is captured
    again = held.take(5, CPU, 1, 8)
    assert again is not captured
    again.fill_(3)  # a graph's memory, which other graphs may have written to
    after = held.take(5, CPU, 1, 0)
    assert after.tolist() == [0] * 5 and after is not again
    assert len(held.held) == 1, "what a capture used is given back"


def test_off_a_gpu_every_launch_has_its_own() -> None:
    assert counters(3, CPU).tolist() == [0, 0, 0] and counters(3, CPU) is not counters(3, CPU)


@pytest.mark.parametrize("error", [0, 3])
def test_a_driver_that_does_not_know_the_capture_is_an_error(error: int, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = SimpleNamespace(cuStreamGetCaptureInfo_v2=lambda *given: error)
    monkeypatch.setattr(file, "_driver", lambda: driver)
    with pytest.raises(RuntimeError, match=f"which capture a stream is in: error {error}"):
        capture_number(1)
