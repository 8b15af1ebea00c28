"""Scripts in processes of their own: there kernels are compiled, not interpreted.

One server process for each pytest process imports torch and Triton once, and forks for every script.
"""

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

SUPPORT = Path(__file__).parent
ROOT = SUPPORT.parents[1]
PATHS = (SUPPORT, SUPPORT.parent, ROOT)
COMPILED = ROOT / ".pytest_cache" / "d" / "triton"  # kept: a kernel is compiled again when it changes (make clean: all)
SERVER = """
import gc, json, os, sys, traceback
import torch, triton, triton.experimental.gluon

gc.freeze()  # so that no child walks, and so copies, what all of them share


def run(job):
    os.environ.update(job["environment"])
    for stream, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(os.path.join(job["folder"], name), os.O_WRONLY | os.O_CREAT), stream)
    code = 1
    try:
        exec(compile(job["script"], "<script>", "exec"), {"__name__": "__main__"})
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


for line in sys.stdin:
    pid = os.fork()
    if pid == 0:
        run(json.loads(line))
    print(os.waitpid(pid, 0)[1], flush=True)
"""


def environment_without_interpreter() -> dict[str, str]:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(str(path) for path in PATHS)}
    env.pop("TRITON_INTERPRET", None)
    return env


@cache
def server() -> subprocess.Popen[str]:
    """It ends when this process does: its standard input is then closed."""
    pipe, env = subprocess.PIPE, environment_without_interpreter()
    return subprocess.Popen([sys.executable, "-c", SERVER], env=env, stdin=pipe, stdout=pipe, text=True)


def run_fresh(script: str) -> None:
    """The script in a process that has imported nothing."""
    command, env = [sys.executable, "-c", script], environment_without_interpreter()
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]


def compile_alone(script: str, cache: Path = COMPILED, **environment: str) -> str:
    """What the script prints in a process without Triton's interpreter, with this cache of compiled kernels."""
    if "ATEN_CPU_CAPABILITY" in os.environ:
        pytest.skip("what is compiled for a GPU does not depend on this CPU")
    child = server()
    assert child.stdin is not None and child.stdout is not None
    with TemporaryDirectory() as folder:
        job = {"script": script, "environment": {"TRITON_CACHE_DIR": str(cache), **environment}, "folder": folder}
        try:
            child.stdin.write(json.dumps(job) + "\n")
            child.stdin.flush()
            status = child.stdout.readline().strip()
        except BaseException:  # the time limit of a test: the next one gets a server of its own
            child.kill()
            server.cache_clear()
            raise
        out, err = (Path(folder, name).read_text() for name in ("out", "err"))
    assert status == "0", err[-3000:]
    return out
