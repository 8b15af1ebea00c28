"""Chat templates: a list of messages becomes the text the model was trained on.

A template comes with the model file, so it is somebody else's program. jinja's immutable sandbox keeps it away from
Python, but not from the processor and the memory: two nested loops over `range(99999)` run for hours, `'x' * 10**10`
asks for 10 GB, and a list that holds itself twice, forty times over, cannot even be compared in a lifetime. Checks
inside our process can count loop turns and output, yet not stop one long operation of the interpreter. So a template
is rendered in a small process of its own (`template_worker.py`: jinja2 and nothing of ours; no open files, bounded
memory), which is started at the first rendering, kept for the next ones (a rendering costs a fraction of a
millisecond then), and killed when its time is up or when its answer is not waited for: the next rendering, perhaps of
another conversation, must not find that answer in the pipe. Questions and answers are numbered for the same reason.
"""

from __future__ import annotations

import contextlib
import json
import os
import struct
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hybridkv.errors import HybridKVError, ModelFileError, RequestError

MAX_SOURCE = 1 << 20  # characters of a template
MAX_OUTPUT = 4 << 20  # characters of a rendered chat
MAX_INPUT = 32 << 20  # bytes of the messages, as JSON
MAX_MEMORY = 1 << 29  # bytes of address space of the worker
MAX_ANSWER = 13 * MAX_OUTPUT  # bytes; JSON writes a character in at most six, or twelve beyond U+FFFF
START_SECONDS = 60.0  # for Python and jinja2 to start
SECONDS = 5.0  # for compiling, and for each rendering
PROBE = "a text part"

RESERVED = frozenset(  # variables that are not a request's to set
    {"messages", "add_generation_prompt", "bos_token", "eos_token"}
    | {"raise_exception", "strftime_now", "namespace", "dict", "range"}
)
_START = threading.Lock()


class ChatTemplate:
    """Renders chats with one template; safe to use from several threads, one rendering at a time."""

    def __init__(self, source: str, *, bos: str | None, eos: str | None, seconds: float = SECONDS) -> None:
        if not isinstance(source, str) or len(source) > MAX_SOURCE:
            size = f"has {len(source)} characters" if isinstance(source, str) else f"is a {type(source).__name__}"
            raise ModelFileError(f"the chat template {size}; at most {MAX_SOURCE} characters are read")
        self.source = source
        self._tokens = {k: v for k, v in {"bos_token": bos, "eos_token": eos}.items() if v is not None}
        self._seconds = seconds
        self._lock = threading.Lock()
        self._worker: Worker | None = None
        self._variables: frozenset[str] | None = None  # known when the template is compiled
        self._takes_parts: bool | None = None

    def render(self, messages: list[dict[str, Any]], *, add_generation_prompt: bool = True, **extra: Any) -> str:
        """`extra` are further variables of the template: tools, documents, enable_thinking, ..."""
        if not isinstance(messages, (list, tuple)) or not all(isinstance(m, dict) for m in messages):
            raise RequestError("messages must be a list of objects such as {'role': 'user', 'content': 'Hello'}")
        if taken := sorted(RESERVED & extra.keys()):
            raise RequestError(f"chat template variables cannot be set by a request: {', '.join(taken)}")
        variables = {"tools": None, "documents": None, **extra, **self._tokens}
        variables |= {"messages": messages, "add_generation_prompt": bool(add_generation_prompt)}
        try:
            data = json.dumps(variables).encode()
        except (TypeError, ValueError, RecursionError) as e:
            raise RequestError(f"messages and template variables must be plain JSON values: {e}") from None
        if len(data) > MAX_INPUT:
            raise RequestError(
                f"the messages have {len(data)} bytes; at most {MAX_INPUT} can be put through a chat template"
            )
        return self._use(lambda worker: worker.ask(data, self._seconds))

    @property
    def variables(self) -> frozenset[str]:
        """The names of the variables that the template reads: messages, tools, enable_thinking, ... Also some that it
        sets itself, in one branch of several, before it reads them.
        """
        if self._variables is None:
            self._use(lambda worker: "")
        assert self._variables is not None
        return self._variables

    @property
    def takes_parts(self) -> bool:
        """Whether content that is a list of text parts can be given as it is: tried once, with one part. A template
        that shows no such message at all, not even with plain text, gets what it is given.
        """
        if self._takes_parts is None:
            text = self._shown([{"type": "text", "text": PROBE}])
            if text is None:
                self._takes_parts = self._shown(PROBE) is None
            else:
                self._takes_parts = PROBE in text and f"'{PROBE}'" not in text and f'"{PROBE}"' not in text
        return self._takes_parts

    def _shown(self, content: Any) -> str | None:
        try:
            return self.render([{"role": "user", "content": content}])
        except RequestError:
            return None

    def _use(self, work: Callable[[Worker], str]) -> str:
        with self._lock:
            try:
                return work(self._running())
            except WorkerFailed as e:
                if self._worker is not None and not self._worker.alive():
                    self._worker = None
                raise _in_words(e.kind, e.message, self._seconds) from None

    def close(self) -> None:
        """Ends the worker; a later rendering starts a new one."""
        with self._lock:
            if self._worker is not None:
                self._worker.end()
            self._worker = None

    def _running(self) -> Worker:
        if self._worker is None or self._worker.owner != os.getpid() or not self._worker.alive():
            self._worker = None
            worker = Worker()
            settings = {"source": self.source, "seconds": self._seconds, "memory": MAX_MEMORY, "output": MAX_OUTPUT}
            try:
                self._variables = frozenset(worker.ask(json.dumps(settings).encode(), self._seconds).split())
            except BaseException:
                worker.end()
                raise
            self._worker = worker
        return self._worker


class WorkerFailed(Exception):
    """What went wrong in a worker: "time", "died", or a word of its own."""

    def __init__(self, kind: str, message: str = "") -> None:
        self.kind, self.message = kind, message


def _in_words(kind: str, message: str, seconds: float) -> HybridKVError:
    if kind == "syntax":
        return ModelFileError(f"the model's chat template is not valid: {message}")
    if kind == "security":
        return ModelFileError(f"the model's chat template does what templates may not: {message}")
    if kind == "refused":
        return RequestError(f"the model's chat template refuses these messages: {message}")
    if kind == "start":
        return ModelFileError(f"the process that renders chat templates did not start: {message}")
    limits = {
        "time": f"takes longer than {seconds:g} seconds",
        "output": f"gives more than {MAX_OUTPUT} characters",
        "memory": f"needs more than {MAX_MEMORY >> 20} MiB of memory",
        "recursion": "nests too deeply",
        "died": "broke the process it was rendered in",
    }
    return RequestError(f"the model's chat template {limits.get(kind, 'failed on these messages: ' + message)}")


class Worker:
    """One running `template_worker.py`, or another script of this folder that answers in the same frames."""

    def __init__(self, script: str = "template_worker.py") -> None:
        self.owner = os.getpid()
        command = [sys.executable, "-P", "-X", "utf8", str(Path(__file__).with_name(script))]
        try:
            with _START:
                pipe = subprocess.PIPE
                self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL)
        except OSError as e:
            raise WorkerFailed("start", str(e)) from None
        self.end = weakref.finalize(self, _end, self._process, self.owner)
        self._number = 0  # of the question that is being answered
        try:
            self._ask(None, START_SECONDS)
        except WorkerFailed:
            raise WorkerFailed(
                "start", f"'{' '.join(command)}' ended or gave no sign of life; is jinja2 installed for it?"
            ) from None

    def alive(self) -> bool:
        """Whether it can be asked."""
        return self.end.alive and self._process.poll() is None

    def ask(self, data: bytes, seconds: float) -> str:
        """Its answer to a frame; it is killed if that takes longer."""
        self._number = (self._number + 1) % 2**32
        return self._ask(struct.pack("<II", len(data), self._number) + data, seconds)

    def _ask(self, frame: bytes | None, seconds: float) -> str:
        late = threading.Event()

        def stop() -> None:
            late.set()
            self._process.kill()

        timer = threading.Timer(seconds, stop)
        timer.daemon = True
        try:
            timer.start()
            answer = self._exchange(frame)
        except BaseException:  # KeyboardInterrupt, say: the answer may still come, and nothing waits for it
            self.end()
            raise
        finally:
            timer.cancel()
        if answer is None:
            self.end()
            raise WorkerFailed("time" if late.is_set() else "died")
        if "error" in answer:
            raise WorkerFailed(answer["error"], answer["message"])
        return answer["text"]

    def _exchange(self, frame: bytes | None) -> dict[str, str] | None:
        """None when the worker is gone, or answers something else."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        try:
            if frame is not None:
                stdin.write(frame)
                stdin.flush()
            head = stdout.read(8)
            size, number = struct.unpack("<II", head) if len(head) == 8 else (0, None)
            if not 0 < size <= MAX_ANSWER or number != self._number:
                return None
            body = stdout.read(size)
            return json.loads(body) if len(body) == size else None
        except (OSError, ValueError):
            return None


def _end(process: subprocess.Popen[bytes], owner: int) -> None:
    if os.getpid() != owner:  # a fork of the program that started it
        return
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()
