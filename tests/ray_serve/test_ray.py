"""Two replicas under Ray Serve. Ray is half a gigabyte and no part of the dev extra: `make test-ray` runs this."""

import json
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

ray = pytest.importorskip("ray", reason="ray is not here: make test-ray")

import tiny  # noqa: E402
from ray import serve  # noqa: E402

from engine.ascii_tokenizer import TEMPLATE, write_tokenizer  # noqa: E402
from hybridkv.errors import HybridKVError  # noqa: E402
from hybridkv.server.ray import app, read  # noqa: E402
from hybridkv.server.replicas import choose_ports  # noqa: E402

ROOT = Path(__file__).parents[2]
SECONDS = 120.0
PORT = choose_ports(0, 1).router
HI = [{"role": "user", "content": "Hello, how are you? I am well, and so is the cat."}]


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    model = tmp_path_factory.mktemp("model")
    tiny.save("qwen3_5", model)
    write_tokenizer(model, TEMPLATE)
    here = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    ray.init(num_cpus=2, include_dashboard=False, runtime_env={"env_vars": here}, log_to_driver=False)
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": PORT})
        asked = {"model": str(model), "replicas": "2", "name": "tiny", "device": "cpu", "cpus": "0.5"}
        serve.run(app({**asked, "context": "512", "budget": "96", "requests": "4"}), name="tiny", route_prefix="/")
        yield f"http://127.0.0.1:{PORT}"
    finally:
        serve.shutdown()
        ray.shutdown()


def post(address: str, session: str, **asked: Any) -> Any:
    body = {"model": "tiny", "messages": HI, "max_tokens": 4, "temperature": 0, **asked}
    headers = {"content-type": "application/json", "x-session-id": session}
    request = urllib.request.Request(f"{address}/v1/chat/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=SECONDS) as answer:
        raw = answer.read().decode()
    return json.loads(raw) if raw.startswith("{") else raw


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

    def answered() -> bool:
        try:
            return all(post(address, f"after {number}")["usage"] for number in range(8))
        except OSError:
            return False

    until(answered)
    until(lambda: sum("hybridkv" in a["name"] for a in ray.util.list_named_actors(all_namespaces=True)) == 2)


def test_wrong_arguments_are_named() -> None:
    for given, said in (
        ({}, "model=... is missing"),
        ({"model": "m", "replica": "2"}, "replica: there is no such argument"),
        ({"model": "m", "replicas": "two"}, "replicas: 'two' is no int"),
        ({"model": "m", "replicas": "3", "most": "2"}, "most not less than replicas"),
    ):
        with pytest.raises(HybridKVError, match=said):
            read(given)
