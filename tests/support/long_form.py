"""What takes long has two forms: `make test` runs the short one, `make test-long` (HYBRIDKV_LONG=1) the whole.

Tests that have a long form carry the mark `long`; the short form must still fail when the claim is broken.
"""

import os
from collections.abc import Sequence
from typing import Any

import pytest

LONG = os.environ.get("HYBRIDKV_LONG") == "1"


def more(*cases: Any) -> tuple[Any, ...]:
    """Cases that only the long form has."""
    return cases if LONG else ()


def few(names: str, first: Sequence[Any], second: Sequence[Any]) -> pytest.MarkDecorator:
    """Two parameters: every value of each in some pair, the shorter list begun again; in the long form all pairs."""
    if LONG:
        pairs = [(a, b) for a in first for b in second]
    else:
        n = max(len(first), len(second))
        pairs = [(first[i % len(first)], second[i % len(second)]) for i in range(n)]
    return pytest.mark.parametrize(names.split(", "), pairs)
