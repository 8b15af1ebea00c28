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


def spread(names: str, first: Sequence[Any], second: Sequence[Any]) -> pytest.MarkDecorator:
    """Two parameters, of which a value may be several: all pairs; but those of `few` are slow ones."""
    n = max(len(first), len(second))
    quick = {(i % len(first), i % len(second)) for i in range(n)}
    pairs = [
        pytest.param(*_values(a), *_values(b), id=_name(a, b), marks=() if (i, j) in quick else pytest.mark.slow)
        for i, a in enumerate(first)
        for j, b in enumerate(second)
    ]
    return pytest.mark.parametrize(names.split(", "), pairs)


def _values(given: Any) -> Sequence[Any]:
    """`given` is a value, a tuple of values, or a pytest.param without marks, which would be lost."""
    assert not getattr(given, "marks", ()), given
    return getattr(given, "values", given if isinstance(given, tuple) else (given,))


def _name(*given: Any) -> str | None:
    """None: pytest makes it."""
    names = [getattr(each, "id", None) for each in given]
    return "-".join(name or str(each) for name, each in zip(names, given)) if any(names) else None
