"""A prompt that one server reads and whose answer another writes: the same answer as of one server alone, whatever goes
wrong between the two.
"""

import http.client
import json
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import pytest
from transports import TRANSPORTS

from hybridkv import LLM, CacheConfig
from hybridkv.cache import shelf_server
from hybridkv.cache.buffers import Buffers
from hybridkv.errors import HybridKVError
from hybridkv.server.replicas import ROUTER, choose_ports
from hybridkv.server.settings import ServerSettings
from hybridkv.server.transfers import Transfers
from server.running import QUIET, SECONDS, Running, post_bytes, serving, until
from server.test_command import port_of, refused, started

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
TEXT = "The quick brown fox jumps over the lazy dog and runs away. " * 3
LEG_1 = {
    "do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_block_ids": None,
    "remote_host": None, "remote_port": None,
}  # fmt: skip
ASKED: dict[str, tuple[str, dict[str, Any]]] = {
    "greedy": (COMPLETIONS, {"prompt": TEXT, "temperature": 0, "max_tokens": 20}),
    "seeded": (COMPLETIONS, {"prompt": TEXT, "temperature": 1.2, "seed": 5, "max_tokens": 20, "logprobs": 2}),
    "chat": (CHAT, {"messages": [{"role": "user", "content": TEXT}], "temperature": 1, "seed": 8, "max_tokens": 20}),
    "stop": (COMPLETIONS, {"prompt": TEXT, "temperature": 0.9, "seed": 4, "max_tokens": 40, "stop": ["e", "a"]}),
    "one token": (COMPLETIONS, {"prompt": TEXT, "temperature": 0, "max_tokens": 1}),
    "min_tokens": (COMPLETIONS, {"prompt": TEXT, "temperature": 2, "seed": 1, "max_tokens": 9, "min_tokens": 9}),
}


def first_leg(body: dict[str, Any]) -> dict[str, Any]:
    """As vLLM's proxies send it."""
    found = {name: value for name, value in body.items() if name not in ("min_tokens", "stream_options")}
    return found | {"max_tokens": 1, "stream": False, "kv_transfer_params": LEG_1}


def said(answer: dict[str, Any]) -> Any:
    """What does not depend on when and where it was answered."""
    return answer["choices"], answer["usage"]["completion_tokens"]


@pytest.fixture(scope="module", params=TRANSPORTS)
def transport(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def both(transport: str, tiny_llm: LLM) -> Iterator[Running]:
    ways = {"kv_port": 0, "kv_peers": ("127.0.0.1",), "kv_transport": transport}
    with serving(tiny_llm, names=("tiny",), keep_alive=QUIET, **ways) as running:
        yield running


def alone(server: Running, path: str, body: dict[str, Any]) -> dict[str, Any]:
    status, found = server.post(path, body | {"hybridkv": {"cache": False}})
    assert status == 200, found
    return found


def two_legs(server: Running, path: str, body: dict[str, Any], **change: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Both answers, of a server that does both."""
    status, first = server.post(path, first_leg(body) | {"hybridkv": {"cache": False}})
    assert status == 200, first
    params = first["kv_transfer_params"] | change
    status, second = server.post(path, body | {"kv_transfer_params": params, "hybridkv": {"cache": False}})
    assert status == 200, second
    return first, second


def counted(server: Running) -> dict[str, float]:
    found = {}
    for line in server.ask("GET", "/metrics")[2].splitlines():
        if line.startswith("hybridkv_kv_transfers_total{"):
            found[line.split('what="')[1].split('"')[0]] = float(line.rsplit(" ", 1)[1])
    return {what: found.get(what, 0.0) for what in ("sent", "fetched", "missed")}


@pytest.mark.parametrize("name", ASKED)
def test_the_answer_is_that_of_one_server(
    name: str, both: Running, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, body = ASKED[name]
    if transport == "nixl":
        monkeypatch.setattr(shelf_server, "_send_parts", None)  # they do not come over TCP
    want, before = alone(both, path, body), counted(both)
    first, second = two_legs(both, path, body)
    assert said(second) == said(want) and first["kv_transfer_params"]["hybridkv"]["transport"] == transport
    prompt = want["usage"]["prompt_tokens"]
    assert first["usage"]["completion_tokens"] == 1 and second["usage"]["prompt_tokens"] == prompt > 100
    after = counted(both)
    assert after["sent"] - before["sent"] == after["fetched"] - before["fetched"] == 1
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == prompt, "the prompt was read again"
    both.idle()
    assert both.service.transfers.shelf.used == 0


def test_the_second_leg_streams(both: Running) -> None:
    path, body = ASKED["seeded"]
    want = alone(both, path, body)
    _, first = both.post(path, first_leg(body))
    lines = both.stream(path, body | {"kv_transfer_params": first["kv_transfer_params"]})
    assert lines[-1] == "[DONE]"
    text = "".join(choice["text"] for line in lines[:-1] for choice in json.loads(line)["choices"])
    assert text == want["choices"][0]["text"]


def test_a_seed_that_nobody_gave_goes_along(both: Running) -> None:
    """Without one the first token would be of one answer and the rest of another; here it is seen by its seed."""
    path, body = COMPLETIONS, {"prompt": TEXT, "temperature": 1.5, "max_tokens": 12, "return_token_ids": True}
    seen = []
    plain = both.llm.engine.resume

    def resume(session: Any, *given: Any, **more: Any) -> Any:
        request = plain(session, *given, **more)
        seen.append((session.going["seed"], request.seed, session.tokens[-1]))
        return request

    both.llm.engine.resume = resume  # type: ignore[method-assign]
    try:
        _, second = two_legs(both, path, body)
    finally:
        del both.llm.engine.resume
    [(sent, used, token)] = seen
    assert sent == used and second["choices"][0]["token_ids"][0] == token


def test_what_cannot_be_fetched_is_read_again(both: Running) -> None:
    path, body = ASKED["seeded"]
    want = said(alone(both, path, body))
    other = {"key": "0" * 64, "digest": "0" * 64}
    for change in (
        {"hybridkv": other},  # gone, or guessed
        {"remote_port": 1},  # nobody is there
        {"remote_host": "192.0.2.1"},  # none of its peers: never asked
        {"hybridkv": None, "remote_block_ids": [3]},  # of another engine
        {"hybridkv": {"key": 3, "digest": []}, "remote_port": "x"},
    ):
        before = counted(both)
        _, second = two_legs(both, path, body, **change)
        assert said(second) == want, change
        assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert counted(both)["fetched"] == before["fetched"]
        both.idle()


def test_another_prompt_or_a_damaged_one_is_not_gone_on_with(both: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    path, body = ASKED["greedy"]
    _, first = both.post(path, first_leg(body | {"prompt": "Something else. " * 9}))
    asked = body | {"kv_transfer_params": first["kv_transfer_params"], "hybridkv": {"cache": False}}
    _, second = both.post(path, asked)
    want = said(alone(both, path, body))
    assert said(second) == want and second["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    plain = Buffers.seal

    def spoilt(self: Buffers) -> Buffers:
        found = plain(self)
        large = max(found.parts, key=lambda part: part.nbytes)
        large[large.numel() // 3] ^= 1
        return found

    monkeypatch.setattr(Buffers, "seal", spoilt)
    before = counted(both)
    _, second = two_legs(both, path, body)
    assert said(second) == want and counted(both)["missed"] == before["missed"] + 1
    both.idle()


def test_what_is_fetched_and_finds_no_place_is_read_again(both: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    path, body = ASKED["seeded"]
    want = said(alone(both, path, body))

    def no_room(*given: Any) -> None:
        from hybridkv.errors import RequestError

        raise RequestError("there is no room")

    monkeypatch.setattr("hybridkv.engine.held.make_room", no_room)
    _, second = two_legs(both, path, body)
    assert said(second) == want and second["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    both.idle()


def test_several_answers_are_not_sent_and_a_stream_does_not_say_where_they_wait(both: Running) -> None:
    path, body = ASKED["greedy"]
    status, found = both.post(path, first_leg(body) | {"n": 2})
    assert status == 200 and "kv_transfer_params" not in found and len(found["choices"]) == 2
    status, found = both.post(path, first_leg(body) | {"stream": True})
    assert status == 400 and found["error"]["param"] == "kv_transfer_params.do_remote_decode"
    for params in (3, {"do_remote_decode": "yes"}):
        status, found = both.post(path, body | {"kv_transfer_params": params})
        assert status == 400 and found["error"]["param"].startswith("kv_transfer_params")
    both.idle()


def test_a_client_that_leaves_after_the_first_leg_leaves_nothing_held(both: Running) -> None:
    def ended() -> float:
        lines = both.ask("GET", "/metrics")[2].splitlines()
        asked = [line for line in lines if line.startswith("hybridkv_http_requests_total{") and COMPLETIONS in line]
        return sum(float(line.rsplit(" ", 1)[1]) for line in asked)

    before = ended()
    for _ in range(3):
        with both.connect() as connection:
            connection.sendall(post_bytes(COMPLETIONS, first_leg(ASKED["greedy"][1])))
    until(lambda: ended() == before + 3)  # whatever became of them
    both.idle()


def test_an_evicted_request_is_sent_after_its_cut(tiny_llm: LLM, transport: str) -> None:
    path, body = ASKED["seeded"]
    cache = CacheConfig(budget=48, window=8, recent=8)
    opened = LLM(tiny_llm.path, device="cpu", dtype="float32", max_context=512, exact=True, cache=cache)
    ways = {"kv_port": 0, "kv_peers": ("127.0.0.1",), "kv_transport": transport}
    with opened as llm, serving(llm, names=("tiny",), **ways) as server:
        want = alone(server, path, body)
        first, second = two_legs(server, path, body)
        assert said(second) == said(want) and second["usage"]["hybridkv"]["kept_tokens"] < 80
        prompt = want["usage"]["prompt_tokens"]
        assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == prompt
        sent = first["kv_transfer_params"]["hybridkv"]["bytes"]
        _, whole = server.post(path, first_leg(body) | {"hybridkv": {"budget": None}})
        assert sent < whole["kv_transfer_params"]["hybridkv"]["bytes"]
        server.idle()


def test_no_client_has_a_server_connect_where_it_was_not_told_to(tiny_llm: LLM) -> None:
    path, body = ASKED["greedy"]
    with serving(tiny_llm) as server, socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        own = {"key": "a" * 64, "digest": "b" * 64}
        params = {"do_remote_prefill": True, "remote_host": "127.0.0.1", "remote_port": listener.getsockname()[1]}
        status, found = server.post(path, body | {"kv_transfer_params": params | {"hybridkv": own}})
        assert status == 200 and found["choices"]
        with pytest.raises(BlockingIOError):
            listener.accept()


def test_a_server_with_keys_fetches_only_from_ports_that_it_was_told() -> None:
    told = ServerSettings(role="decode", api_keys=("k",), kv_peers=("10.0.0.5:8101", "[::1]:8102"))
    assert told.may_fetch("10.0.0.5", 8101) and told.may_fetch("::1", 8102)
    assert not any(told.may_fetch(*where) for where in (("10.0.0.5", 6379), ("127.0.0.1", 8101), ("10.0.0.6", 8101)))
    open_ = ServerSettings(role="decode", kv_peers=("10.0.0.5", "fe80::5"))
    assert open_.may_fetch("127.0.0.1", 6379) and open_.may_fetch("10.0.0.5", 1) and open_.may_fetch("fe80::5", 1)
    assert not ServerSettings().may_fetch("127.0.0.1", 8101)
    with pytest.raises(HybridKVError, match="'10.0.0.5' has no port"):
        ServerSettings(api_keys=("k",), kv_peers=("10.0.0.5",))
    for wrong in ("", ":1", "a:", "a:x", "a:0", "a:70000", "[]:1"):
        with pytest.raises(HybridKVError, match="is no HOST or HOST:PORT"):
            ServerSettings(kv_peers=(wrong,))


def test_roles_say_which_legs_a_server_goes(tiny_llm: LLM, transport: str) -> None:
    path, body = ASKED["greedy"]
    way = {"kv_transport": transport}
    with serving(tiny_llm, role="decode", **way) as writer, serving(tiny_llm, role="prefill", **way) as reader:
        want = said(alone(writer, path, body))
        status, found = writer.post(path, first_leg(body))
        assert status == 200 and "kv_transfer_params" not in found
        status, found = reader.post(path, first_leg(body))
        params = found["kv_transfer_params"]
        assert status == 200 and params["do_remote_prefill"] and params["remote_port"] > 0
        asked = body | {"kv_transfer_params": params, "hybridkv": {"cache": False}}
        status, found = reader.post(path, asked)  # it reads, and fetches nothing
        assert said(found) == want and found["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        status, found = writer.post(path, asked)
        assert said(found) == want and found["usage"]["prompt_tokens_details"]["cached_tokens"] > 100


def test_no_client_opens_a_port_of_a_server_that_was_not_told_to(tiny_llm: LLM) -> None:
    path, body = ASKED["greedy"]
    with serving(tiny_llm) as server:
        status, found = server.post(path, first_leg(body))
        assert status == 200 and found["choices"] and "kv_transfer_params" not in found
        assert server.service.transfers._server is None and not server.service.transfers.shelf.used
        server.idle()


def test_what_nobody_fetches_goes_after_a_minute_and_takes_no_more_than_it_may(tiny_llm: LLM) -> None:
    with serving(tiny_llm, kv_port=0, kv_bytes=1 << 10) as server:
        path, body = ASKED["greedy"]
        status, found = server.post(path, first_leg(body))
        assert status == 200 and "kv_transfer_params" not in found, "it is larger than all that may wait"
        server.idle()
    transfers = Transfers(tiny_llm, ServerSettings())
    try:
        assert transfers.shelf.seconds == 60.0 and transfers.shelf.limit == 4 << 30
    finally:
        transfers.close()


def test_settings_that_make_no_sense_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--role must be one of both, prefill, decode" in refused(capsys, "--role", "reader")
    assert "--kv-host must be the address" in refused(capsys, "--kv-host", "0.0.0.0")
    assert "--kv-port must be" in refused(capsys, "--kv-port", "70000")
    assert "--kv-memory must be a size" in refused(capsys, "--kv-memory", "many")
    assert "--kv-transport must be one of tcp, nixl" in refused(capsys, "--kv-transport", "rdma")


def test_nixl_that_is_not_installed_is_said_before_a_model_is_opened(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hybridkv.server.settings.find_spec", lambda name: None)
    assert "pip install 'hybridkv[nixl]'" in refused(capsys, "--kv-transport", "nixl", "--role", "prefill")


def test_nixl_is_kept_to_this_machine_where_all_servers_are_on_it() -> None:
    def local(**how: Any) -> bool:
        return ServerSettings(api_keys=("k",), **how).kv_is_loopback

    assert local(role="prefill") and not local(role="prefill", kv_host="10.0.0.5")
    assert local(role="decode", kv_peers=("127.0.0.1:8101", "[::1]:8102"), kv_host="10.0.0.5")
    assert not local(role="decode", kv_peers=("127.0.0.1:8101", "10.0.0.5:8101"))
    assert not local(role="decode", kv_peers=("localhost.example:8101",))
    assert local(kv_port=0, kv_peers=("127.0.0.1:1",)) and not local(kv_port=0, kv_peers=("10.0.0.5:8101",))


# ---- two processes


def post(port: int, path: str, body: dict[str, Any]) -> dict[str, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=SECONDS)
    try:
        connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
        answer = connection.getresponse()
        found = json.loads(answer.read())
        assert answer.status == 200, found
        return found
    finally:
        connection.close()


@pytest.mark.slow
def test_two_processes_answer_as_one_and_the_one_that_reads_may_be_killed_between_the_legs(
    tiny_llm: LLM, both: Running, transport: str
) -> None:
    model = ("-m", tiny_llm.path, "--context", 512, "--alias", "tiny", "--dtype", "float32", "--exact")
    model += ("--kv-transport", transport)
    with (
        started(*model, "--role", "prefill") as (reader, lines),
        started(*model, "--role", "decode") as (writer, more),
    ):
        reads, writes = port_of(lines), port_of(more)
        for name in ("greedy", "seeded", "chat"):
            path, body = ASKED[name]
            first = post(reads, path, first_leg(body))
            second = post(writes, path, body | {"kv_transfer_params": first["kv_transfer_params"]})
            want = alone(both, path, body)
            assert said(second) == said(want)
            prompt = want["usage"]["prompt_tokens"]
            assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == prompt
        path, body = COMPLETIONS, ASKED["seeded"][1] | {"prompt": "One more. " + TEXT}
        first = post(reads, path, first_leg(body))
        assert first["kv_transfer_params"]["hybridkv"]["key"]
        reader.send_signal(signal.SIGKILL)
        reader.wait(SECONDS)
        second = post(writes, path, body | {"kv_transfer_params": first["kv_transfer_params"]})
        want = alone(both, path, body)
        assert said(second) == said(want)
        assert second["usage"]["prompt_tokens_details"]["cached_tokens"] < want["usage"]["prompt_tokens"]
        writer.send_signal(signal.SIGTERM)
        assert writer.wait(SECONDS) == 0


@contextmanager
def routed(reads: int, writes: int) -> Iterator[int]:
    """vllm-router in front of two servers, at the port that is given back."""
    ports = choose_ports(0, 0)
    ends = ("--prefill", f"http://127.0.0.1:{reads}", "--decode", f"http://127.0.0.1:{writes}")
    own = ("--host", "127.0.0.1", "--port", str(ports.router), "--prometheus-port", str(ports.metrics))
    command = [sys.executable, "-m", ROUTER, "--vllm-pd-disaggregation", *ends, *own]
    router = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        until(lambda: router.poll() is not None or answers(ports.router))
        assert router.poll() is None, "the router has ended"
        yield ports.router
    finally:
        router.kill()
        router.wait(SECONDS)


def answers(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=SECONDS)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


@pytest.mark.skipif(find_spec("vllm_router") is None, reason="vllm-router is not here")
def test_a_router_that_exists_drives_both_legs(tiny_llm: LLM, both: Running, transport: str) -> None:
    model = ("-m", tiny_llm.path, "--context", 512, "--alias", "tiny", "--dtype", "float32", "--exact")
    model += ("--kv-transport", transport)
    with (
        started(*model, "--role", "prefill") as (_, lines),
        started(*model, "--role", "decode") as (_, more),
        routed(port_of(lines), port_of(more)) as port,
    ):
        for name in ("greedy", "seeded", "chat"):
            path, body = ASKED[name]
            # it writes numbers anew, and rounds them
            body = {key: value for key, value in body.items() if key != "logprobs"} | {"model": "tiny"}
            found, want = post(port, path, body), alone(both, path, body)
            assert said(found) == said(want)
            assert found["usage"]["prompt_tokens_details"]["cached_tokens"] == want["usage"]["prompt_tokens"]
