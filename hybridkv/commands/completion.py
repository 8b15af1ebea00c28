"""What the shell's Tab offers. Nothing here may import torch: a press of Tab should take a fraction of a second."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from typer import Context

MOST = 200  # names shown at once


def files(incomplete: str, suffixes: tuple[str, ...] = ()) -> list[str]:
    """Paths that begin with what was typed: folders, and files with one of these endings (none named: all files).

    A folder that is the only match is given with what it holds, so that the shell does not put a space behind it.
    """
    folder, begin = os.path.split(incomplete)
    try:
        names = sorted(os.listdir(Path(folder or ".").expanduser()))
    except (OSError, ValueError, RuntimeError):
        return []
    found = []
    for name in names:
        if not name.startswith(begin) or (name.startswith(".") and not begin.startswith(".")):
            continue
        path = os.path.join(folder, name)
        if Path(path).expanduser().is_dir():
            found.append(path + "/")
        elif not suffixes or name.endswith(suffixes):
            found.append(path)
    if len(found) == 1 and found[0].endswith("/"):
        found += files(found[0], suffixes)
    return found[:MOST]


def any_file(incomplete: str) -> list[str]:
    """For an option that takes a file of any kind."""
    return files(incomplete)


def model(context: Context, incomplete: str) -> list[str]:
    """Folders and .gguf files; for `plan` also names of known models, for others hub ids that are here already."""
    planning = context.info_name == "plan"
    names = known() if planning else downloaded()
    fitting = [name for name in names if name.lower().startswith(incomplete.lower())]
    return fitting + files(incomplete, (".gguf", ".json") if planning else (".gguf",))


def known() -> list[str]:
    """Names of models whose shapes are known."""
    from hybridkv.models.known import KNOWN

    return list(KNOWN)


def card(incomplete: str) -> list[str]:
    """Names of graphics cards, in one word as a shell takes it; 40 is as good a beginning as RTX-40."""
    from hybridkv.cards import CARDS

    names = [c.name.replace(" ", "-") for c in CARDS]
    if incomplete[:1].isdigit():
        names = [name.removeprefix("RTX-") for name in names]
    return [name for name in names if name.lower().startswith(incomplete.lower())]


def downloaded() -> list[str]:
    """Hub ids that the hub's own cache holds."""
    home = os.environ.get("HF_HOME") or os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    cache = os.environ.get("HF_HUB_CACHE") or os.path.join(home, "hub")
    try:
        folders = sorted(os.listdir(Path(cache).expanduser()))
    except (OSError, RuntimeError):
        return []
    return [f.removeprefix("models--").replace("--", "/", 1) for f in folders if f.startswith("models--")]


def tasks(incomplete: str) -> list[str]:
    """Tasks of `eval`, also behind a comma."""
    from hybridkv.evaluation.tasks import TASKS

    return _after_comma(incomplete, ["all", "ruler", *TASKS])


def policies(incomplete: str) -> list[str]:
    """Policies, also behind a comma."""
    from hybridkv.config import POLICY_NAMES

    return _after_comma(incomplete, POLICY_NAMES)


def _after_comma(incomplete: str, names: Sequence[str]) -> list[str]:
    before, comma, begin = incomplete.rpartition(",")
    return [before + comma + name for name in names if name.startswith(begin.lower())]
