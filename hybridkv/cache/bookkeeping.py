"""Bookkeeping that survives an interrupt: methods of the manager that change who holds what."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

from hybridkv.errors import HybridKVError

Method = TypeVar("Method", bound=Callable[..., Any])


def bookkeeping(method: Method) -> Method:
    """A method that changes who holds what. If the one before it was interrupted, the counts are made anew first."""

    @wraps(method)
    def call(self: Any, *args: Any, **more: Any) -> Any:
        if self.interrupted:
            self.rebuild()
        self.interrupted = True
        try:
            result = method(self, *args, **more)
        except (HybridKVError, ValueError):  # refused: lists and pages are checked before anything changes
            self.interrupted = False
            raise
        self.interrupted = False
        return result

    return call  # type: ignore[return-value]
