"""Groups of processes for tests of tensor parallelism: `run(n, job, ...)` runs a function of rank_jobs.py on n ranks.

One server process for each pytest process imports torch and hybridkv once and forks n ranks for every call: a call
costs little more than its work. Ranks meet at a file of their own, so groups of several pytest processes never meet.
Nothing can hang: an exchange that waits for a rank gives up after LIMIT seconds, and the server ends what is left of a
group once a rank has failed, or after TOTAL seconds.
"""

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

SUPPORT = Path(__file__).parent
PATHS = (SUPPORT, SUPPORT.parents[1])
LIMIT, TOTAL = 60.0, 240.0  # seconds: of one exchange, of one call
SERVER = """
import gc, json, os, signal, sys, time, traceback
import torch
import rank_jobs

gc.freeze()  # so that no child walks, and so copies, what all of them share


def rank(job, number):
    for stream, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(os.path.join(job["folder"], f"{name}{number}"), os.O_WRONLY | os.O_CREAT), stream)
    code = 1
    try:
        found = rank_jobs.run(job, number)
        torch.save(found, os.path.join(job["folder"], f"found{number}"))
        code = 0
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def wait(left, until):
    codes, stopped = {}, set()
    while set(left) - (stopped if codes else set()) and time.monotonic() < until:
        pid, status = os.waitpid(-1, os.WNOHANG | os.WUNTRACED)
        if pid == 0:
            time.sleep(0.005)
            continue
        if os.WIFSTOPPED(status):
            stopped.add(pid)
            continue
        codes[left.pop(pid)] = os.waitstatus_to_exitcode(status)
        if any(codes.values()):
            until = min(until, time.monotonic() + job["limit"] + job["grace"])
    for pid, number in left.items():
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        codes[number] = "ended by the server"
    return codes


for line in sys.stdin:
    job, left = json.loads(line), {}
    for number in range(job["size"]):
        pid = os.fork()
        if pid == 0:
            rank(job, number)
        left[pid] = number
    codes = wait(left, time.monotonic() + job["total"])
    print(json.dumps([codes[number] for number in range(job["size"])]), flush=True)
"""


@cache
def server() -> subprocess.Popen[str]:
    """It ends when this process does: its standard input is then closed."""
    paths = [*map(str, PATHS), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    env.pop("TRITON_INTERPRET", None)
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, "-c", SERVER], env=env, stdin=pipe, stdout=pipe, text=True)


def attempt(size: int, job: str, grace: float = 5.0, **arguments: Any) -> tuple[list[Any], list[Any], list[str]]:
    """(what each rank returned or None, its exit code, what it wrote to stderr). `grace`: seconds beyond an exchange's
    limit that ranks have to end in once one has failed.
    """
    child = server()
    assert child.stdin is not None and child.stdout is not None
    with TemporaryDirectory() as folder:
        sent = dict(size=size, name=job, arguments=arguments, folder=folder, limit=LIMIT, total=TOTAL, grace=grace)
        try:
            child.stdin.write(json.dumps(sent, default=str) + "\n")
            child.stdin.flush()
            codes = json.loads(child.stdout.readline() or "[]")
        except BaseException:  # the time limit of a test: the next one gets a server of its own
            child.kill()
            server.cache_clear()
            raise
        found = [Path(folder, f"found{number}") for number in range(size)]
        results = [torch.load(path, weights_only=True) if path.exists() else None for path in found]
        errors = [Path(folder, f"err{number}").read_text() for number in range(size)]
    return results, codes, errors


def run(size: int, job: str, **arguments: Any) -> list[Any]:
    """What each rank returned."""
    results, codes, errors = attempt(size, job, **arguments)
    assert codes == [0] * size, f"{codes}\n" + "\n".join(text[-3000:] for text in errors)
    return results
