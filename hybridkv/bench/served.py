"""A server in a process of its own, as `hybridkv serve` starts it, with a tiny model of random weights; and
what it says of itself: its metrics, its memory, whether it is at rest.
"""

from __future__ import annotations

import http.client
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hybridkv.bench.tiny_folder import write_tiny
from hybridkv.errors import HybridKVError

NAME = "tiny"  # what clients call the model
SECONDS = 120.0  # that a start, or an answer to a question about itself, may take
MIB = 1 << 20


class ServerProcess:
    """One that runs. `log`: what it writes to standard error."""

    def __init__(self, process: subprocess.Popen[str], port: int, log: Path) -> None:
        self.process, self.host, self.port, self.log = process, "127.0.0.1", port, log

    def get(self, path: str) -> tuple[int, str]:
        """Status and text, by a connection of its own."""
        connection = http.client.HTTPConnection(self.host, self.port, timeout=SECONDS)
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            return answer.status, answer.read().decode()
        finally:
            connection.close()

    def metrics(self) -> dict[str, float]:
        """Values by name and labels, as they are written."""
        lines = [line.rpartition(" ") for line in self.get("/metrics")[1].splitlines() if line and line[0] != "#"]
        return {name: float(value) for name, _, value in lines}

    def resident(self) -> int:
        """Bytes of memory that the process has."""
        return 4096 * int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])

    def held(self) -> dict[str, float]:
        """What requests hold or wait for: nothing, if the server is at rest."""
        used = re.compile(r'hybridkv_(num_requests_(running|waiting)\{|cache_pages\{.*state="used")')
        return {name: value for name, value in self.metrics().items() if used.match(name) and value}

    def wait_for_rest(self) -> dict[str, float]:
        """What is still held once all has been asked for and answered; after some seconds at the most."""
        return waited_for(self.held)

    def lag(self) -> dict[str, float]:
        """Seconds that the event loop was late: the edges of the histogram's boxes below which 50 % and 99 % lie, and
        how often it was looked at.
        """
        edges = re.compile(r'hybridkv_event_loop_lag_seconds_bucket\{le="(.*)"\}')
        boxes = [(float(m[1]), n) for name, n in self.metrics().items() if (m := edges.fullmatch(name))]
        total = boxes[-1][1]
        found = {f"p{p}": next(edge for edge, n in boxes if n >= total * p / 100) for p in (50, 99)}
        return found | {"looks": total}

    def stop(self) -> int:
        """Told to end; its exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(SECONDS)


def waited_for(held: Callable[[], dict[str, float]]) -> dict[str, float]:
    """Ask until nothing is held any more, for some seconds."""
    until = time.monotonic() + 30.0
    while (found := held()) and time.monotonic() < until:
        time.sleep(0.1)
    return found


@contextmanager
def served(*arguments: Any) -> Iterator[ServerProcess]:
    """A server with these arguments of `hybridkv serve`, or HybridKVError; at the end it is told to end."""
    with tempfile.TemporaryDirectory(prefix="hybridkv-served-") as folder:
        path, model = Path(folder) / "log", Path(folder) / "tiny"
        model.mkdir()
        command = [sys.executable, "-m", "hybridkv", "serve", "--port", "0", "--model", str(write_tiny(model))]
        command += ["--device", "cpu", "--alias", NAME]
        with path.open("w") as log:
            process = subprocess.Popen([*command, *map(str, arguments)], stdout=subprocess.PIPE, stderr=log, text=True)
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            found = re.search(r"at http://127\.0\.0\.1:(\d+) ", line)
            if found is None:
                raise HybridKVError(f"the server did not start: {line.strip() or path.read_text().strip()[-300:]}")
            yield ServerProcess(process, int(found[1]), path)
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                try:
                    process.wait(SECONDS)
                except subprocess.TimeoutExpired:
                    process.kill()
            process.communicate()
