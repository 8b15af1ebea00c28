"""Ranks that end, stop or do something else are an error of the others, within the time that an exchange may take."""

import os

import pytest
import ranks
import torch
import torch.distributed as dist
from listening import listening

from hybridkv.errors import HybridKVError
from hybridkv.parallel.group import Alone, Group, first_sentence, free_port, listen, torchrun_place
from hybridkv.parallel.launch import DEVICES, _apart, rank_device, sharers
from hybridkv.parallel.signs import said_by


@pytest.mark.parametrize("how", ("ends", "stops", "goes on"))
def test_a_rank_that_does_not_come_is_an_error_and_nothing_hangs(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "LIMIT", 3.0)
    _, codes, errors = ranks.attempt(3, "leave", how=how)
    assert codes[-1] == {"ends": 9, "stops": "ended by the server", "goes on": 0}[how]
    assert codes[:2] == [1, 1]
    for rank, said in enumerate(errors[:2]):
        (line,) = [line for line in said.splitlines() if "GroupError: " in line]
        assert line.partition("GroupError: ")[2].startswith(
            f"rank {rank} of 3: another rank ended or did not come to all_reduce"
        )
        assert "/" not in line and "GLHF" not in line, "a library's sources and words"


def test_of_what_a_library_says_the_first_sentence_is_told() -> None:
    closed = (
        "[/__w/p/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:41898. This is typical. GLHF!"
    )
    assert first_sentence(closed) == "Connection closed by peer [127.0.0.1]:41898"
    assert first_sentence("[a/b.h:1] [c.cpp:22] Timed out waiting 3000ms\nmore") == "Timed out waiting 3000ms"
    assert (
        first_sentence("CUDA error: an illegal address\nCUDA kernel errors might") == "CUDA error: an illegal address"
    )
    assert len(first_sentence("x" * 5000)) == 300
    for problem, said in ((ValueError("no room"), "rank 1: no room"), (ValueError("rank 1 of 2: x"), "rank 1 of 2: x")):
        assert said_by(1, problem) == f"hybridkv: {said}"
    assert said_by(1, ValueError("rank 12 went")) == "hybridkv: rank 1: rank 12 went"


def test_a_group_that_nobody_else_joins_is_an_error() -> None:
    with pytest.raises(HybridKVError, match="rank 0 of 2: rank 1 did not come to 'the group'"):
        Group.join(0, 2, torch.device("cpu"), f"tcp://127.0.0.1:{free_port()}", start=0.5)
    assert not dist.is_initialized()


def test_one_process_has_one_group() -> None:
    before = listening(os.getpid())
    group = Group.join(0, 1, torch.device("cpu"), f"tcp://127.0.0.1:{free_port()}", timeout=5)
    try:
        with pytest.raises(HybridKVError, match="in use in this process already, by 1 ranks"):
            Group.join(0, 1, torch.device("cpu"), f"tcp://127.0.0.1:{free_port()}", timeout=5)
        listens = [address for inode, address in listening(os.getpid()).items() if inode not in before]
        assert set(listens) == {"127.0.0.1"}
        x = torch.arange(3.0)
        assert torch.equal(group.all_gather(x), Alone().all_gather(x))
        assert torch.equal(group.all_reduce(x.clone()), x) and torch.equal(group.broadcast(x.clone()), x)
    finally:
        group.close()
    assert not dist.is_initialized()


def test_a_port_that_is_taken_is_said() -> None:
    with listen() as taken:
        port = taken.getsockname()[1]
        assert taken.getsockname()[0] == "127.0.0.1"
        with pytest.raises(
            HybridKVError, match=f"rank 0 of 1 did not meet the others at tcp://127.0.0.1:{port}: .*in use"
        ):
            Group.join(0, 1, torch.device("cpu"), f"tcp://127.0.0.1:{port}", timeout=5)
    assert not dist.is_initialized()


def test_the_place_that_torchrun_gives() -> None:
    assert torchrun_place({}) is None
    assert torchrun_place({"RANK": "2", "WORLD_SIZE": "4"}) == (2, 4)
    for rank, said in (("x", "must be whole numbers"), ("4", "not a rank"), ("-1", "not a rank")):
        with pytest.raises(HybridKVError, match=said):
            torchrun_place({"RANK": rank, "WORLD_SIZE": "4"})


def test_ranks_run_on_the_gpus_that_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    first, told = torch.device("cuda", 1), {"PATH": "x"}
    assert [rank_device(first, rank).index for rank in range(3)] == [1, 2, 3]
    with pytest.raises(HybridKVError, match="rank 3 would run on GPU 4, and there are 4"):
        rank_device(first, 3)
    monkeypatch.setenv(DEVICES, "3,0,0")
    assert [rank_device(first, rank).index for rank in range(3)] == [3, 0, 0]
    assert [sharers(torch.device("cuda", at), 3) for at in (3, 0)] == [1, 2] and sharers(torch.device("cpu"), 3) == 3
    with pytest.raises(HybridKVError, match="'3,0,0' has 3 GPUs, and rank 3 needs one"):
        rank_device(first, 3)
    _apart(2, 2, told)  # the first two share nothing
    assert told == {"PATH": "x"}
    _apart(2, 3, told)
    assert told == {"PATH": "x", "NCCL_HOSTID": "hybridkv-2", "NCCL_SOCKET_IFNAME": "lo"}
    for wrong in ("0,x", "-1", ","):
        monkeypatch.setenv(DEVICES, wrong)
        with pytest.raises(HybridKVError, match="numbers of GPUs with commas between them"):
            rank_device(first, 0)
    assert rank_device(torch.device("cpu"), 5).type == "cpu"
