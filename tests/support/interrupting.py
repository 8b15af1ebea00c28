"""Calls that are interrupted at a line of the package, as by Ctrl-C."""

import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

import hybridkv

PACKAGE = str(Path(hybridkv.__file__).parent)


class Interrupted(KeyboardInterrupt):
    pass


def interrupted_at(line: int, function: Callable[[], Any], folder: str = "") -> bool:
    """Whether the call was interrupted at its n-th line in the package, or in a folder of it such as "/cache"."""
    count = 0

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal count
        if not frame.f_code.co_filename.startswith(PACKAGE + folder):
            return None
        if event == "line":
            count += 1
            if count == line:
                sys.settrace(None)
                raise Interrupted
        return trace

    sys.settrace(trace)
    try:
        with suppress(Interrupted):
            function()
            return False
        return True
    finally:
        sys.settrace(None)
