"""Two replicas under Ray Serve. Ray is half a gigabyte and no part of the dev extra: `make test-ray` runs this."""

import json
import os
import signal
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

ray = pytest.importorskip("ray", reason="ray is not here: make test-ray")

import tiny  # noqa: E402
from ray import serve  # noqa: E402

from engine.ascii_tokenizer import TEMPLATE, write_tokenizer  # noqa: E402
from hybridkv.errors import HybridKVError  # noqa: E402
from hybridkv.parallel.launch import FOLLOWER  # noqa: E402
from hybridkv.server.ray import app, read  # noqa: E402
from hybridkv.server.replicas import choose_ports  # noqa: E402

ROOT = Path(__file__).parents[2]
SECONDS = 120.0
PORT = choose_ports(0, 1).router
HI = [{"role": "user", "content": "Hello, how are you? I am well, and so is the cat."}]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    tiny.save("qwen3_5", folder)
    write_tokenizer(folder, TEMPLATE)
    return str(folder)


@pytest.fixture(scope="module")
def address(model: str) -> Iterator[str]:
    here = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    ray.init(num_cpus=2, include_dashboard=False, runtime_env={"env_vars": here}, log_to_driver=False)
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": PORT})
        deploy(model, replicas="2", budget="96")
        yield f"http://127.0.0.1:{PORT}"
    finally:
        serve.shutdown()
        ray.shutdown()


def deploy(model: str, **asked: str) -> None:
    """Until all replicas are there. What was deployed before is drained."""
    given = {"model": model, "name": "tiny", "device": "cpu", "cpus": "0.5", "context": "4096", "requests": "4"}
    serve.run(app({**given, "drain": str(SECONDS), **asked}), name="tiny", route_prefix="/")


def open_answer(address: str, session: str, **asked: Any) -> Any:
    body = {"model": "tiny", "messages": HI, "max_tokens": 4, "temperature": 0, **asked}
    headers = {"content-type": "application/json", "x-session-id": session}
    request = urllib.request.Request(f"{address}/v1/chat/completions", json.dumps(body).encode(), headers)
    return urllib.request.urlopen(request, timeout=SECONDS)


def post(address: str, session: str, **asked: Any) -> Any:
    with open_answer(address, session, **asked) as answer:
        raw = answer.read().decode()
    return json.loads(raw) if raw.startswith("{") else raw


def ranks_of_replicas() -> list[Path]:
    """Processes that a replica has started as its model's other ranks."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if FOLLOWER.encode() in (folder / "cmdline").read_bytes():
                mother = (folder / "stat").read_text().rpartition(") ")[2].split()[1]
                found += [folder] if Path("/proc", mother, "cmdline").read_bytes().startswith(b"ray::") else []
        except OSError:  # it has ended
            continue
    return found


def answered(address: str) -> bool:
    try:
        return all(post(address, f"after {number}")["usage"] for number in range(8))
    except OSError:
        return False


def until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + SECONDS
    while not true():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.1)


def test_a_conversation_of_six_turns_stays_and_reads_only_what_is_new(address: str) -> None:
    said, before = list(HI), 0
    for number in range(6):
        found = post(address, "talk", messages=said)
        usage = found["usage"]
        cached, prompt = usage["prompt_tokens_details"]["cached_tokens"], usage["prompt_tokens"]
        assert cached == 0 if not number else prompt > cached >= before - 1 > 0, (number, usage)
        before = prompt + usage["completion_tokens"]
        said += [found["choices"][0]["message"], {"role": "user", "content": f"And {number}?"}]


def test_answers_are_streamed(address: str) -> None:
    found = post(address, "stream", stream=True, max_tokens=6, ignore_eos=True)
    assert found.count("data: {") >= 3 and found.rstrip().endswith("data: [DONE]")


def test_a_replica_that_dies_is_replaced(address: str) -> None:
    actors = [a for a in ray.util.list_named_actors(all_namespaces=True) if "hybridkv" in a["name"]]
    assert len(actors) == 2
    ray.kill(ray.get_actor(actors[0]["name"], namespace=actors[0]["namespace"]))

    until(lambda: answered(address))
    until(lambda: sum("hybridkv" in a["name"] for a in ray.util.list_named_actors(all_namespaces=True)) == 2)


def test_what_is_deployed_instead_loses_no_answer_and_may_be_of_two_ranks(address: str, model: str) -> None:
    """Ray drains the replicas that it takes down: an answer that is being written comes whole."""
    want = post(address, "same")["choices"][0]["message"]["content"]
    assert not ranks_of_replicas()
    asked = {"stream": True, "stream_options": {"include_usage": True}, "max_tokens": 3900, "ignore_eos": True}
    with open_answer(address, "long", **asked) as answer:
        begun, read_at = answer.readline(), []

        def rest() -> bytes:
            found = begun
            while line := answer.readline():
                found += line
                read_at.append(time.monotonic())
            return found

        with ThreadPoolExecutor() as pool:
            reading, at = pool.submit(rest), time.monotonic()
            deploy(model, replicas="1", tp="2")
            found = reading.result()
    assert b'"completion_tokens":3900' in found and found.rstrip().endswith(b"data: [DONE]")
    assert read_at[-1] > at + 1, "it was written before anything was drained"
    until(lambda: sum("hybridkv" in a["name"] for a in ray.util.list_named_actors(all_namespaces=True)) == 1)
    assert post(address, "same")["choices"][0]["message"]["content"] == want
    [rank] = ranks_of_replicas()
    os.kill(int(rank.name), signal.SIGKILL)  # the replica ends with it, and Ray starts another
    until(lambda: len(there := ranks_of_replicas()) == 1 and there != [rank] and answered(address))
    assert post(address, "same")["choices"][0]["message"]["content"] == want
    serve.delete("tiny")
    until(lambda: not ranks_of_replicas())


def test_wrong_arguments_are_named() -> None:
    for given, said in (
        ({}, "model=... is missing"),
        ({"model": "m", "replica": "2"}, "replica: there is no such argument"),
        ({"model": "m", "replicas": "two"}, "replicas: 'two' is no int"),
        ({"model": "m", "replicas": "3", "most": "2"}, "most not less than replicas"),
        ({"model": "m", "tp": "0"}, "replicas, requests and tp must be 1 or more"),
        ({"model": "m", "tp": "2", "gpus": "1"}, "gpus=1 is fewer than tp=2: leave gpus out"),
    ):
        with pytest.raises(HybridKVError, match=said):
            read(given)
