"""Scripts in a process of their own: there kernels are compiled, not interpreted."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SUPPORT = Path(__file__).parent
ROOT = SUPPORT.parents[1]
PATHS = (SUPPORT, SUPPORT.parent, ROOT)
COMPILED = ROOT / ".pytest_cache" / "d" / "triton"  # kept: a kernel is compiled again when it changes (make clean: all)
SECONDS = 500


def compile_alone(script: str, cache: Path = COMPILED, **environment: str) -> str:
    """What the script prints in a process without Triton's interpreter, with this cache of compiled kernels."""
    if "ATEN_CPU_CAPABILITY" in os.environ:
        pytest.skip("what is compiled for a GPU does not depend on this CPU")
    paths = os.pathsep.join(str(path) for path in PATHS)
    env = {**os.environ, "TRITON_CACHE_DIR": str(cache), "PYTHONPATH": paths, **environment}
    env.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout
