"""What ends a group of ranks: whatever befalls one of them, all of them end, say so, and leave no process behind."""

import io
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from tiny_ranks import saved_model

from hybridkv import LLM, SamplingParams
from hybridkv.parallel import launch, signs
from hybridkv.parallel.group import Group, GroupError, free_port
from hybridkv.parallel.launch import Place
from hybridkv.ranks import Ranks
from server.running import SECONDS, post_bytes, read_all, until
from server.test_command import port_of, started

HOW: dict[str, Any] = dict(device="cpu", dtype="float32", max_requests=2, max_context=256)
LONG = SamplingParams(max_tokens=240, temperature=0, ignore_eos=True)
SERVED = ("--device", "cpu", "--dtype", "float32", "--context", 256, "--tp", 2)
ASKED = {"prompt": "Say", "max_tokens": 240, "ignore_eos": True, "temperature": 0, "stream": True}
pytestmark = pytest.mark.usefixtures("found_by_workers")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_model(tmp_path_factory.mktemp("ends"), "qwen3_5")


def followers_of(parent: int) -> list[int]:
    """Processes that this one has started for its ranks."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and state(int(entry.name))[1] == parent:
            words = (entry / "cmdline").read_bytes().split(b"\0")
            found += [int(entry.name)] if b"hybridkv.follower" in words else []
    return found


def state(pid: int) -> tuple[str, int]:
    """Its letter in /proc and its parent; Z: it has ended."""
    try:
        letter, parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:2]
    except OSError:
        return "Z", 0
    return letter, int(parent)


@pytest.mark.slow
@pytest.mark.parametrize(("how", "limit"), ((signal.SIGKILL, 2 * SECONDS), (signal.SIGSTOP, 3)))
def test_a_server_whose_worker_is_killed_or_hangs_ends_with_code_3(
    how: signal.Signals, limit: float, folder: Path
) -> None:
    """The limit of an exchange is longer than this test waits for one that was killed: that is seen without it."""
    with started("-m", folder, *SERVED, HYBRIDKV_TP_TIMEOUT=str(limit)) as (process, lines):
        [worker] = followers_of(process.pid)
        with socket.create_connection(("127.0.0.1", port_of(lines)), timeout=SECONDS) as connection:
            connection.sendall(post_bytes("/v1/completions", ASKED))
            assert connection.recv(1) == b"H"
            os.kill(worker, how)
            begin = time.monotonic()
            assert process.wait(SECONDS) == 3
            print(f"{how.name}: the server had ended after {time.monotonic() - begin:.2f} s")
            assert b"[DONE]" not in read_all(connection)
        assert state(worker)[0] == "Z"
        assert process.stderr is not None
        said = process.stderr.read()
        assert "a worker ended, and the model with it" in said
        assert ("where the ranks stand" in said) == (how == signal.SIGSTOP)


@pytest.mark.slow
@pytest.mark.parametrize("how", (signal.SIGKILL, signal.SIGTERM))
def test_a_worker_ends_with_the_process_that_started_it(how: signal.Signals, folder: Path) -> None:
    with started("-m", folder, *SERVED) as (process, _):
        [worker] = followers_of(process.pid)
        process.send_signal(how)
        assert process.wait(SECONDS) == (-9 if how == signal.SIGKILL else 0)
        until(lambda: state(worker)[0] == "Z")


@pytest.mark.slow
def test_a_signal_to_all_processes_of_a_server_lets_answers_come_to_their_end(folder: Path) -> None:
    """As systemd sends it, and `kill -- -GROUP`."""
    with started("-m", folder, *SERVED) as (process, lines):
        [worker] = followers_of(process.pid)
        with socket.create_connection(("127.0.0.1", port_of(lines)), timeout=SECONDS) as connection:
            connection.sendall(post_bytes("/v1/completions", ASKED))
            assert connection.recv(1) == b"H"
            os.kill(worker, signal.SIGTERM)
            process.send_signal(signal.SIGTERM)
            assert b"[DONE]" in read_all(connection)
        assert process.wait(SECONDS) == 0
        assert state(worker)[0] == "Z"


@contextmanager
def rank_1(*command: object, **place: str) -> Iterator[subprocess.Popen[str]]:
    """A command as torchrun starts its second process."""
    pipe, env = subprocess.PIPE, {**os.environ, **place, "RANK": "1"}
    words = [sys.executable, "-m", "hybridkv", *map(str, command)]
    process = subprocess.Popen(words, env=env, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def torchrun() -> dict[str, str]:
    return {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}


@pytest.mark.slow
def test_a_command_that_torchrun_has_started_ends_well_on_all_ranks(folder: Path) -> None:
    command = ("generate", "--tp", 2, "-m", folder, "--device", "cpu", "--dtype", "float32", "--context", 256)
    command += ("--max-tokens", 8, "--temperature", 0, "Say")
    place = torchrun()
    with rank_1(*command, **place) as other:
        words = [sys.executable, "-m", "hybridkv", *map(str, command)]
        env = {**os.environ, **place, "RANK": "0"}
        found = subprocess.run(
            words, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=SECONDS
        )
        assert found.returncode == 0 and found.stdout.strip(), found.stderr
        assert other.communicate(timeout=SECONDS) == ("", "") and other.returncode == 0


@pytest.mark.slow
@pytest.mark.parametrize("rank", (0, 1))
def test_a_command_of_a_rank_that_cannot_open_its_model_ends_those_of_all(rank: int, folder: Path) -> None:
    commands = [("generate", "--tp", 2, "-m", folder, "--device", "cpu", "--context", 256, "Say")] * 2
    commands[rank] = ("generate", "--tp", 2, "-m", folder / "nowhere", "--device", "cpu", "--context", 256, "Say")
    place = torchrun()
    with rank_1(*commands[1], **place) as other:
        words = [sys.executable, "-m", "hybridkv", *map(str, commands[0])]
        env, quiet = {**os.environ, **place, "RANK": "0"}, subprocess.DEVNULL
        first = subprocess.run(words, env=env, stdin=quiet, capture_output=True, text=True, timeout=SECONDS)
        said = [first.stderr, other.communicate(timeout=SECONDS)[1]]
        codes = [first.returncode, other.returncode]
    own, heard = said[rank].strip(), said[1 - rank].strip()
    assert codes[rank] == 2 and codes[1 - rank] == 3 and "there is no file or folder" in own
    assert heard == own.replace("error: ", f"error: rank {rank}: ")


@pytest.mark.slow
def test_of_ranks_that_torchrun_has_started_the_first_one_alone_serves(folder: Path) -> None:
    """One port, and a signal to both."""
    port, place = free_port(), torchrun()
    command = ("-m", folder, *SERVED, "--port", port)
    with rank_1("serve", *command, **place) as other, started(*command, RANK="0", **place) as (process, lines):
        assert port_of(lines) == port
        with socket.create_connection(("127.0.0.1", port), timeout=SECONDS) as connection:
            connection.sendall(post_bytes("/v1/completions", ASKED))
            assert connection.recv(1) == b"H"
            other.send_signal(signal.SIGTERM)
            process.send_signal(signal.SIGTERM)
            assert b"[DONE]" in read_all(connection)
        assert process.wait(SECONDS) == 0
        assert other.communicate(timeout=SECONDS) == ("", "") and other.returncode == 0


@pytest.mark.parametrize("how", (signal.SIGINT, signal.SIGTERM))
def test_a_worker_that_still_starts_leaves_signals_to_rank_0_and_ends_with_it(how: signal.Signals) -> None:
    told = {"rank": 1, "size": 2, "device": "cpu", "meeting": "tcp://127.0.0.1:9", "timeout": 5, "settings": {}}
    pipe = subprocess.PIPE
    worker = subprocess.Popen([sys.executable, "-m", launch.FOLLOWER], stdin=pipe, stderr=pipe, stdout=pipe)
    try:
        until(lambda: _ignores(worker.pid, how))
        worker.send_signal(how)
        assert worker.stdin is not None
        worker.stdin.write(json.dumps(told).encode() + b"\n")
        worker.stdin.flush()
        time.sleep(0.3)  # it is importing torch
        assert worker.poll() is None
        assert worker.communicate(timeout=SECONDS) == (b"", b"")  # which closes the pipe
        assert worker.returncode == signs.FAILED
    finally:
        worker.kill()


def _ignores(pid: int, number: signal.Signals) -> bool:
    [line] = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("SigIgn:")]
    return bool(int(line.split()[1], 16) >> (number - 1) & 1)


def ends(llm: LLM, prompt: list[int], params: SamplingParams = LONG) -> None:
    """It answers no more, and its workers are gone."""
    assert llm.ranks is not None
    with pytest.raises(GroupError, match="a worker ended, and the model with it"):
        llm.generate([prompt], params)
    with pytest.raises(GroupError, match="open it again"):
        llm.generate([[1, 2]], LONG)
    assert all(worker.poll() is not None for worker in llm.ranks.place.workers)


def test_a_rank_that_is_out_of_memory_ends_the_group(folder: Path) -> None:
    """Its memory is what it has: the next page that it asks for is refused."""
    with LLM(folder, tp=2, **HOW) as llm:
        assert llm.ranks is not None
        llm.generate([[1, 2, 3]], SamplingParams(max_tokens=4, temperature=0))
        resource.prlimit(llm.ranks.place.workers[0].pid, resource.RLIMIT_AS, (1 << 20, resource.RLIM_INFINITY))
        ends(llm, [5] * 200, SamplingParams(max_tokens=50, temperature=0, ignore_eos=True))
    assert not dist.is_initialized()


def test_an_exception_in_a_forward_pass_of_one_rank_ends_the_group(folder: Path) -> None:
    with LLM(folder, tp=2, **HOW) as llm:
        plain, calls = llm.engine.runner.forward, []

        def forward(inputs: Any) -> Any:
            calls.append(1)
            if len(calls) == 3:
                raise RuntimeError("injected")
            return plain(inputs)

        llm.engine.runner.forward = forward  # type: ignore[method-assign]
        ends(llm, [1, 2, 3])
        assert len(calls) == 3
    assert not dist.is_initialized()


def test_a_rank_that_cannot_open_its_part_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, begun, told_of = launch._start, [], []

    def start(told: dict[str, Any], *how: Any) -> Any:
        told_of.append(told["settings"])
        begun.append(plain(json.loads(json.dumps(told)) | {"settings": told["settings"] | {"model": "/nowhere"}}, *how))
        return begun[-1]

    monkeypatch.setattr(launch, "_start", start)
    with pytest.raises(GroupError, match="rank 1 ended with exit code 2: .*/nowhere"):
        LLM(folder, tp=2, host_cache=0, **HOW)
    assert begun[0].poll() == 2 and not dist.is_initialized()
    assert told_of[0]["host_cache"] == 0, "by which a GPU's sizes are planned"


def test_a_rank_without_memory_for_its_part_is_named_with_the_reason(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has what it needs to start and to meet the others, and not enough for a cache of so many requests."""
    plain = Place.agree

    def agree(place: Place, least: int, *most: int) -> list[int]:
        found = plain(place, least, *most)
        for worker in place.workers:
            sizes = Path(f"/proc/{worker.pid}/status").read_text().partition("VmSize:")[2]
            if sizes:  # else it has ended already, by the limit of the first time
                limit = (int(sizes.split()[0]) << 10) + (64 << 20)
                resource.prlimit(worker.pid, resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
        return found

    monkeypatch.setattr(Place, "agree", agree)
    with pytest.raises(GroupError, match="rank 1 ended with exit code 1: (MemoryError|RuntimeError: .*memory)"):
        LLM(folder, tp=2, **HOW | {"max_requests": 2048}, memory="8GiB")
    assert not dist.is_initialized()


def test_an_interrupt_while_the_others_come_leaves_no_process_and_no_group(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 has loaded its part, and waits."""
    start, meet, begun = launch._start, Group.meet, []

    def watched(told: dict[str, Any], *how: Any) -> Any:
        begun.append(start(told, *how))
        return begun[-1]

    def interrupted(group: Group, where: str, *more: Any, **named: Any) -> None:
        if where == "loaded":
            raise KeyboardInterrupt
        meet(group, where, *more, **named)

    monkeypatch.setattr(launch, "_start", watched)
    monkeypatch.setattr(Group, "meet", interrupted)
    with pytest.raises(KeyboardInterrupt):
        LLM(folder, tp=2, **HOW)
    assert begun[0].poll() is not None and not dist.is_initialized()


def test_where_every_rank_stands_is_written_before_those_that_hang_are_ended(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with LLM(folder, tp=2, **HOW) as llm:
        assert llm.ranks is not None
        llm.generate([[1, 2, 3]], SamplingParams(max_tokens=4, temperature=0))  # from here on the other one follows
        llm.ranks.place.dump_stacks()
        found = capfd.readouterr().err
        assert found.count("Current thread") == 2 and "in follow\n" in found and "in dump_stacks\n" in found
        llm.generate([[1, 2, 3]], SamplingParams(max_tokens=4, temperature=0))  # no harm is done by it
    assert [worker.returncode for worker in llm.ranks.place.workers] == [0]


def test_ranks_are_ended_where_nobody_reads_what_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in `hybridkv serve 2>&1 | head`: each write to stderr fails."""
    ours, theirs = os.pipe()
    os.close(ours)
    worker = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    ranks = object.__new__(Ranks)
    ranks.place = launch.Place(None, [worker])  # type: ignore[arg-type]
    ranks._engine = SimpleNamespace(channel=SimpleNamespace())  # type: ignore[assignment]
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)
    ranks.end_process()
    with os.fdopen(theirs, "wb", 0) as pipe, monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", io.TextIOWrapper(pipe, write_through=True))
        try:
            ranks._engine.on_failure(GroupError("one has gone"))  # type: ignore[union-attr]
        finally:
            sys.stderr.detach()  # type: ignore[attr-defined]
            worker.kill()
    assert codes == [signs.FAILED] and worker.wait(SECONDS) in (-signs.DUMP, -signal.SIGKILL)
