"""How the user started the program, so that a command that is printed as a suggestion works as printed."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from pathlib import Path


def command_name() -> str:
    """`hybridkv` where that starts this program, else what does: `.venv/bin/hybridkv`, `python -m hybridkv`."""
    started = Path(sys.argv[0])
    if started.name in ("__main__.py", "cli.py"):
        return f"{_shortest(Path(sys.executable))} -m hybridkv"
    return _shortest(started) if started.name == "hybridkv" and started.exists() else "hybridkv"


def _shortest(program: Path) -> str:
    """A program's bare name where the shell finds it, else its path, from the current folder if it lies below."""
    # not resolved: a virtual environment's python is a link to one that lacks its packages
    path = Path(os.path.abspath(program))
    found = shutil.which(path.name)
    if found is not None and Path(os.path.abspath(found)) == path:
        return path.name
    here = Path.cwd()
    if path.parent == here:
        return shlex.quote(f"./{path.name}")
    return shlex.quote(str(path.relative_to(here) if path.is_relative_to(here) else path))
