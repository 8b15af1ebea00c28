"""Scripts in a process of their own: there kernels are compiled, not interpreted."""

import os
import subprocess
import sys
from pathlib import Path

SUPPORT = Path(__file__).parent
PATHS = (SUPPORT, SUPPORT.parent, SUPPORT.parents[1])


def compile_alone(script: str, cache: Path, **environment: str) -> str:
    """What the script prints in a process without Triton's interpreter, with an empty cache of compiled kernels."""
    paths = os.pathsep.join(str(path) for path in PATHS)
    env = {**os.environ, "TRITON_CACHE_DIR": str(cache), "PYTHONPATH": paths, **environment}
    env.pop("TRITON_INTERPRET", None)
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout
