"""Ranks that a model starts, ready at once: a process that has imported what they need forks for each of them, where
`python -m hybridkv.follower` would import torch first, for 1.4 s of a processor.

One such process for each pytest process. What a rank is told, by which pipe it hears of the end of rank 0, what signals
do and with which code it ends: all of that is as ever. tests/test_ranks_end.py starts ranks as users do.
"""

import json
import os
import select
import signal
import socket
import subprocess
import sys
from functools import cache
from typing import Any

from hybridkv.parallel.launch import FOLLOWER

SERVER = """
import gc, json, os, select, signal, socket, sys, traceback
import torch.distributed
import hybridkv.engine.lock_step, hybridkv.llm, hybridkv.parallel.launch, hybridkv.ranks
from hybridkv import follower

gc.freeze()  # so that no child walks, and so copies, what all of them share
asked = socket.socket(fileno=int(sys.argv[1]))
woken, wake = os.pipe()
os.set_blocking(wake, False)
signal.signal(signal.SIGCHLD, lambda *_: None)
signal.set_wakeup_fd(wake)
left = {}  # where the exit code of each is to be told


def rank(environment, streams):
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    asked.close()
    for fd in (woken, wake, *left.values()):
        os.close(fd)
    for number, fd in enumerate(streams):
        os.dup2(fd, number)
        os.close(fd)
    os.environ.clear()
    os.environ.update(environment)
    code = 1
    try:
        follower.main()
    except SystemExit as end:
        code = end.code or 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


while True:
    ready = select.select([asked, woken], [], [])[0]
    if woken in ready:
        os.read(woken, 4096)
    for pid in list(left):
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            told = left.pop(pid)
            os.write(told, str(os.waitstatus_to_exitcode(status)).encode())
            os.close(told)
    if asked in ready:
        message, fds, _, _ = socket.recv_fds(asked, 1 << 20, 4)
        if not message:
            break
        pid = os.fork()
        if pid == 0:
            os.close(fds.pop())
            rank(json.loads(message), fds)
        for fd in fds[:3]:
            os.close(fd)
        left[pid] = fds[3]
        asked.send(str(pid).encode())
"""


@cache
def server() -> tuple[socket.socket, subprocess.Popen[bytes]]:
    """It ends when this process does, or closes the socket."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        command = [sys.executable, "-c", SERVER, str(theirs.fileno())]
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()])
    return ours, child


class Rank:
    """What a Popen has, of a process that another one has forked."""

    def __init__(self, environment: dict[str, str]) -> None:
        asked, _ = server()
        (read, write), (ended, tell) = os.pipe(), os.pipe()
        socket.send_fds(asked, [json.dumps(environment).encode()], [read, 1, 2, tell])
        os.close(read)
        os.close(tell)
        self.pid = int(asked.recv(32))
        self.stdin, self._ended = os.fdopen(write, "wb"), os.fdopen(ended, "rb")
        self.returncode: int | None = None

    def poll(self) -> int | None:
        return self._code(0.0)

    def wait(self, timeout: float | None = None) -> int:
        code = self._code(timeout)
        if code is None:
            assert timeout is not None
            raise subprocess.TimeoutExpired(FOLLOWER, timeout)
        return code

    def _code(self, timeout: float | None) -> int | None:
        if self.returncode is None and select.select([self._ended], [], [], timeout)[0]:
            self.returncode = int(self._ended.read())
            self._ended.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def popen(command: list[str], *, env: dict[str, str], **how: Any) -> Any:
    """In the place of subprocess.Popen: a rank that follows is forked."""
    if command[1:] == ["-m", FOLLOWER]:
        return Rank(env)
    return subprocess.Popen(command, env=env, **how)
