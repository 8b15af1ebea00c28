"""Where a model comes from: the embedded one, the small one that is shipped, a folder, a .gguf file, or a hub id, which
alone reaches for the network.

A mistyped path must not reach for it. A name is a hub id only if it is `org/name` or `org/name/file.gguf`, could not
be meant for a file, and nothing of it is here: neither the whole, nor a folder `org`.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from hybridkv.embedded import TINY_HYBRID, Progress, embedded_model, shipped_model
from hybridkv.errors import ModelFileError

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/\w[\w.-]*(/\w[\w.-]*\.gguf)?")
FILES = (".gguf", ".safetensors", ".json", ".bin", ".pt", ".pth")  # what no hub repository's name ends in
HUB_FILES = ["*.json", "*.safetensors", "*.jinja"]


def locate_model(model: str | Path | None, progress: Progress | None = None) -> Path:
    if model is None:
        return embedded_model(progress)
    if folder := shipped_model(model):
        return folder
    path = Path(os.path.expanduser(model))
    if os.path.exists(path):
        return path
    if isinstance(model, str) and is_hub_id(model):
        return _download(model)
    raise ModelFileError(
        f"there is no file or folder {str(model)[:500]!r}; give a Hugging Face folder, a .gguf file, "
        f"{TINY_HYBRID}, or a hub id such as org/name (where there is no local folder org)"
    )


def is_hub_id(name: str) -> bool:
    """Whether a name that is no local path stands for a model on the hub."""
    parts = name.split("/")
    if not HUB_ID.fullmatch(name) or os.path.lexists(parts[0]):
        return False
    return len(parts) == 3 or not name.lower().endswith(FILES)


def _download(model: str) -> Path:
    missing = f"there is no file or folder {model!r}"
    try:
        from huggingface_hub import hf_hub_download, snapshot_download
    except ImportError:
        raise ModelFileError(f"{missing}; if it is meant as a hub id: pip install 'hybridkv[hub]'") from None
    try:
        if model.endswith(".gguf"):
            owner, name, file = model.split("/")
            return Path(hf_hub_download(f"{owner}/{name}", file))
        return Path(snapshot_download(model, allow_patterns=HUB_FILES))
    except (OSError, ValueError, RuntimeError) as problem:  # the hub client derives its errors from these
        raise ModelFileError(f"{missing}, and {_hub_said(problem)}") from None


def _hub_said(problem: Exception) -> str:
    """What went wrong at the hub: no way to it, no such model, or no right to it."""
    reason = str(problem).strip().splitlines()[0] if str(problem).strip() else type(problem).__name__
    kinds = {kind.__name__ for kind in type(problem).__mro__}
    if "GatedRepoError" in kinds:
        said = "the hub gives it only to those who have accepted its terms there and logged in (hf auth login)"
    elif "RepositoryNotFoundError" in kinds:
        said = "the hub has no model of that name that it shows to you"
    elif kinds & {"LocalEntryNotFoundError", "ConnectionError", "TimeoutError"}:
        said = "the hub could not be reached; check the connection, or give a folder that is here"
    else:
        said = "the hub did not give it"
    return f"{said}: {reason[:200]}"
