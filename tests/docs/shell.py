"""A shell in which `hybridkv` and `python` start at once: one process has imported torch and loaded the embedded model,
and forks for each of them.

Everything else is real: bash, pipes, files, exit codes, the command line itself. Answers end after ANSWER tokens.
"""

import array
import gc
import json
import os
import runpy
import socket
import stat
import subprocess
import sys
import traceback
from contextlib import redirect_stdout, suppress
from pathlib import Path
from typing import Any

from install.building import ROOT

ANSWER = 12  # tokens after which every answer ends
SECONDS = 300

CLIENT = """#!{python} -IS
import array, json, os, socket, sys
name, arguments = os.path.basename(sys.argv[0]), sys.argv[1:]
server = socket.socket(socket.AF_UNIX)
server.connect({address!r})
job = json.dumps({{"program": name, "arguments": arguments, "folder": os.getcwd()}}).encode()
fds = array.array("i", [0, 1, 2])
server.sendmsg([len(job).to_bytes(4, "little") + job], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)])
answer = server.recv(1)
sys.exit(answer[0] if answer else 255)
"""


def serve(address: str) -> None:
    """Import what commands need, then fork for each that comes."""
    import hybridkv.commands.display
    import hybridkv.conversation  # noqa: F401
    from hybridkv.cli import main

    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), suppress(SystemExit):
        main(["plan", "Qwen3.5-4B", "--device", "cpu", "--memory", "1GiB"])  # what commands import once they run
    load_once()
    gc.freeze()  # so that no child walks, and so copies, what all of them share

    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen()
    print("ready", flush=True)
    while True:
        caller, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            code = answer(caller)
            caller.send(bytes([code]))
            os._exit(code)
        caller.close()


def load_once() -> None:
    """The embedded model, which many pages open: its weights are read here, and are there in each process that is
    forked. All else that opening a model does is done as ever.
    """
    from hybridkv import LLM, opening

    plain, loaded = opening.load_model, {}

    def load(config: Any, checkpoint: Any, device: Any, dtype: Any, progress: Any, *form: Any) -> Any:
        asked = repr((checkpoint.path, config, device, dtype, form))
        if asked not in loaded:
            loaded[asked] = plain(config, checkpoint, device, dtype, progress, *form)
        return loaded[asked]

    opening.load_model = load
    LLM(max_context=256).close()


def answer(caller: socket.socket) -> int:
    """In a process of its own: take the caller's place, and run what it was asked to run."""
    first, ancillary, _, _ = caller.recvmsg(4, socket.CMSG_LEN(3 * 4))
    size, text = int.from_bytes(first, "little"), b""
    while len(text) < size:
        text += caller.recv(size - len(text))
    job = json.loads(text)
    for number, fd in enumerate(array.array("i", ancillary[0][2])):
        os.dup2(fd, number)
        os.close(fd)
    sys.stdin, sys.stdout = os.fdopen(0, closefd=False), os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    os.chdir(job["folder"])
    code: object = 0
    try:
        run(job["program"], job["arguments"])
    except SystemExit as leaving:
        code = leaving.code
    except BaseException:
        traceback.print_exc()
        code = 1
    if isinstance(code, str):
        print(code, file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    return code if isinstance(code, int) else int(code is not None)


def run(program: str, arguments: list[str]) -> None:
    """With answers that end soon; one that ends in an error is an exception here."""
    from hybridkv.answers import Completion
    from hybridkv.cli import main
    from hybridkv.config import SamplingParams

    checked, completed = SamplingParams.__post_init__, Completion.of

    def shortened(self: SamplingParams) -> None:
        checked(self)
        object.__setattr__(self, "max_tokens", min(self.max_tokens or ANSWER, ANSWER))

    def of(*given: Any, **more: Any) -> Completion:
        found = completed(*given, **more)
        if found.error is not None:
            raise RuntimeError(f"an answer has ended in an error: {found.error}")
        return found

    SamplingParams.__post_init__ = shortened  # type: ignore[method-assign]
    Completion.of = staticmethod(of)  # type: ignore[method-assign,assignment]
    if program == "hybridkv":
        main(arguments)
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        runpy.run_path(arguments[0], run_name="__main__")


class Shell:
    """Commands run by bash in `folder`."""

    def __init__(self, programs: Path) -> None:
        programs.mkdir()
        address = programs / "server"
        environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
        environment |= {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]), "OMP_NUM_THREADS": "1"}
        environment |= {"COLUMNS": "80", "LINES": "24", "NO_COLOR": "1", "CUDA_VISIBLE_DEVICES": ""}
        self.environment = environment | {"PATH": f"{programs}:{os.environ['PATH']}"}
        command = [sys.executable, "-c", "import sys; from docs.shell import serve; serve(sys.argv[1])", str(address)]
        self.server = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        for name in ("hybridkv", "python"):
            (programs / name).write_text(CLIENT.format(python=sys.executable, address=str(address)))
            (programs / name).chmod(stat.S_IRWXU)
        assert self.server.stdout is not None and self.server.stdout.readline() == "ready\n"

    def run(self, command: str, folder: Path, typed: str = "") -> tuple[int, str]:
        """Exit code, and standard output and standard error as a terminal shows them. `typed` is standard input."""
        done = subprocess.run(
            ["bash", "-o", "pipefail", "-c", command],
            cwd=folder,
            env=self.environment,
            input=typed,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=SECONDS,
        )
        return done.returncode, done.stdout

    def close(self) -> None:
        self.server.kill()
        self.server.wait()
