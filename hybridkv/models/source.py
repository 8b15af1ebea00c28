"""Where a model comes from: the embedded one, a folder, a .gguf file, or a hub id, which alone reaches for the
network.
"""

from __future__ import annotations

import re
from pathlib import Path

from hybridkv.embedded import Progress, embedded_model
from hybridkv.errors import ModelFileError

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+(/[\w.-]+\.gguf)?")
HUB_FILES = ["*.json", "*.safetensors", "*.jinja"]


def locate_model(model: str | Path | None, progress: Progress | None = None) -> Path:
    if model is None:
        return embedded_model(progress)
    path = Path(model).expanduser()
    if path.exists():
        return path
    if isinstance(model, str) and HUB_ID.fullmatch(model) and not model.startswith(("./", "../", "~")):
        return _download(model)
    raise ModelFileError(
        f"there is no model at {str(model)!r}; give a Hugging Face folder, a .gguf file, or a hub id such as org/name"
    )


def _download(model: str) -> Path:
    try:
        from huggingface_hub import hf_hub_download, snapshot_download
    except ImportError:
        raise ModelFileError(f"{model!r} is not a local path, and hub ids need: pip install 'hybridkv[hub]'") from None
    try:
        if model.endswith(".gguf"):
            owner, name, file = model.split("/")
            return Path(hf_hub_download(f"{owner}/{name}", file))
        return Path(snapshot_download(model, allow_patterns=HUB_FILES))
    except (OSError, ValueError, RuntimeError) as problem:  # the hub client derives its errors from these
        reason = str(problem).strip().splitlines()[0] if str(problem).strip() else type(problem).__name__
        raise ModelFileError(f"no local path {model!r}, and the hub did not give it: {reason[:200]}") from None
