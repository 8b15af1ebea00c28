"""Columns and states on the host under random use, and proof that faults in copies and their order are found."""

from __future__ import annotations

import pytest

from cache.host_machine import HostMachine
from cache.test_reuse import search_until
from hybridkv.cache import schema as schema_file

AT_LEAST = {
    "steps": 200, "hits": 20, "loads": 10, "columns loaded": 15, "states loaded": 5, "loads that failed": 2,
    "went to the host": 8, "dropped instead": 2, "copies seen": 30, "states seen": 20, "room on the host": 5,
}  # fmt: skip


@pytest.fixture(autouse=True)
def small_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schema_file, "SCAN", 4)


def test_random_use_with_a_host_agrees_with_what_tokens_give() -> None:
    search_until(60, AT_LEAST, HostMachine)
