"""Who may ask: keys, Host, Origin, addresses. And what a server writes down."""

import hmac
import json
import logging
import socket
from typing import Any

import pytest
from starlette.routing import Route

from hybridkv import LLM
from hybridkv.errors import HybridKVError
from hybridkv.server import guard, misses
from hybridkv.server.settings import ServerSettings
from server.running import HI, Running, serving, until

BODY = {"messages": HI, "max_tokens": 1}
CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def locked(tiny_llm: LLM) -> Any:
    with serving(tiny_llm, api_keys=("sesame", "other"), names=("tiny",)) as running:
        yield running


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"authorization": "Bearer sesame"}, 200),
        ({"authorization": "bearer other"}, 200),
        ({"x_api_key": "sesame"}, 200),
        ({"x_api_key": "wrong", "authorization": "Bearer sesame"}, 200),
        ({}, 401),
        ({"authorization": "Bearer Sesame"}, 401),
        ({"authorization": "sesame"}, 401),
        ({"authorization": "Basic sesame"}, 401),
        ({"x_api_key": ""}, 401),
        ({"x_api_key": "sesam"}, 401),
    ],
)
def test_a_key_is_needed(locked: Running, headers: dict[str, str], status: int) -> None:
    found = locked.post(CHAT, BODY, **headers)
    assert found[0] == status
    if status == 401:
        assert found[1]["error"] == found[1]["error"] | {"code": "invalid_api_key", "type": "invalid_request_error"}


def test_every_route_but_the_probes_needs_the_key(locked: Running) -> None:
    routes = locked.server._http.config.app._routes.routes  # type: ignore[union-attr]
    paths = [(route.path, min(route.methods)) for route in routes if isinstance(route, Route)]
    assert len(paths) > 10
    free = [path for path, method in paths if locked.ask(method, path.replace("{id:path}", "tiny"), {})[0] != 401]
    assert sorted(free) == ["/", "/health", "/live", "/page.css", "/page.js", "/ready"]
    assert locked.ask("POST", f"{CHAT}?api_key=sesame", BODY)[0] == 401
    assert locked.ask("GET", "/no/such/path")[0] == 401


def test_keys_are_compared_in_constant_time(locked: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    compared = []

    def compare(a: bytes, b: bytes) -> bool:
        compared.append((len(a), len(b)))
        return hmac.compare_digest(a, b)

    monkeypatch.setattr(guard, "hmac", type("", (), {"compare_digest": staticmethod(compare), "digest": hmac.digest}))
    assert locked.post(CHAT, BODY, x_api_key="sesame")[0] == 200
    assert compared == [(32, 32)] * 2  # digests, and the second key though the first was right


def test_only_its_own_names_and_pages_are_answered(tiny_one: Running) -> None:
    own = f"127.0.0.1:{tiny_one.port}"
    for headers, status in (
        ({"host": "evil.example"}, 403),
        ({"host": "127.0.0.1.evil.example"}, 403),
        ({"host": ""}, 403),
        ({"host": "LOCALHOST:1"}, 200),
        ({"host": "[::1]:8000"}, 200),
        ({"host": own, "origin": f"http://{own}"}, 200),
        ({"host": own, "origin": "http://evil.example"}, 403),
        ({"host": own, "origin": "null"}, 403),
        ({"host": own, "origin": f"http://127.0.0.1:{tiny_one.port + 1}"}, 403),
    ):
        found, sent, _ = tiny_one.ask("POST", CHAT, BODY, headers)
        assert found == status, headers
        assert "access-control-allow-origin" not in sent
        assert tiny_one.ask("GET", "/health", None, headers)[0] == status


def test_names_and_pages_can_be_allowed(tiny_llm: LLM) -> None:
    with serving(tiny_llm, allowed_hosts=("box",), allowed_origins=("http://page",)) as running:
        assert running.ask("GET", "/health", None, {"host": "box:80", "origin": "http://page"})[0] == 200
        assert running.ask("GET", "/health", None, {"host": "bax"})[0] == 403


def test_a_public_address_answers_to_addresses_and_names_that_it_was_told(
    tiny_llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "Box7")
    key = {"x-api-key": "k"}
    with serving(tiny_llm, host="0.0.0.0", api_keys=("k",), allowed_hosts=("llm.example",)) as running:
        for host, status in (
            ("10.1.2.3:8000", 200),
            ("[2001:db8::1]:8000", 200),
            ("localhost", 200),
            ("box7:8000", 200),
            ("LLM.example", 200),
            ("evil.example", 403),
            ("10.1.2.3.nip.io", 403),
            ("box7.evil.example", 403),
            ("", 403),
        ):
            assert running.ask("POST", CHAT, BODY, {"host": host, **key})[0] == status, host
            assert running.ask("GET", "/health", None, {"host": host})[0] == status, host
        assert b" 200 " in running.raw(b"GET /health HTTP/1.0\r\n\r\n")[:20]  # a probe without a Host
    with serving(tiny_llm, host="0.0.0.0", api_keys=("k",), allowed_hosts=("*",)) as running:
        assert running.ask("POST", CHAT, BODY, {"host": "any.example", **key})[0] == 200


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.0.1", "example.org"])
def test_a_public_address_needs_a_key(host: str) -> None:
    with pytest.raises(HybridKVError, match="key"):
        ServerSettings(host=host)
    ServerSettings(host=host, api_keys=("k",))


def test_a_port_in_use_is_told(tiny_one: Running) -> None:
    with pytest.raises(HybridKVError, match=f"port {tiny_one.port}"), serving(tiny_one.llm, port=tiny_one.port):
        pass


# ---- ids and logs


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Any:
    caplog.set_level(logging.INFO, "hybridkv.server")
    return caplog


def test_ids_are_kept_or_made(tiny_one: Running, lines: Any) -> None:
    for sent, kept in (("abc-1.2_X", True), ("a" * 128, True), ("a" * 129, False), ("a b", False), ("é", False)):
        _, headers, _ = tiny_one.ask("POST", CHAT, BODY, {"x-request-id": sent.encode().decode("latin-1")})
        assert (headers["x-request-id"] == sent) == kept and headers["request-id"] == headers["x-request-id"]
        name = headers["request-id"]
        until(lambda name=name: any(name in line for line in lines.messages))  # it is written after the answer
        assert sum(name in line for line in lines.messages) == 1


def test_a_line_says_what_was_used_and_not_what_was_said(tiny_one: Running, lines: Any) -> None:
    secret = "xyzzy-plugh"
    messages = [{"role": "user", "content": secret}]
    tiny_one.chat(messages=messages, max_tokens=3, user=secret)
    tiny_one.post(CHAT, {"messages": messages, "temperature": secret, "n": -1})
    tiny_one.post(f"/{secret}", {})
    until(lambda: sum("code=" in line for line in lines.messages) == 3)
    assert secret not in "".join(lines.messages)
    [line] = [line for line in lines.messages if "code=200" in line]
    assert 'route="POST /v1/chat/completions"' in line and "output=3" in line and "model=tiny" in line


def test_bad_requests_in_numbers_are_one_line_a_second(tiny_one: Running, lines: Any) -> None:
    for _ in range(30):
        tiny_one.post("/tokenize", {"prompt": 1})
    assert 1 <= sum("code=400" in line for line in lines.messages) < 10


def test_methods_that_nobody_knows_are_one_kind(tiny_one: Running, lines: Any) -> None:
    before = len(tiny_one.server._http.config.app._log._quiet)  # type: ignore[union-attr]
    for number in range(40):
        assert tiny_one.ask(f"M{number}", "/nowhere")[0] == 404
    until(lambda: any('route="other other"' in line for line in lines.messages))
    assert sum("code=404" in line for line in lines.messages) < 10
    assert len(tiny_one.server._http.config.app._log._quiet) <= before + 1  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": [{"type": "tool_reference"}] * 3000}]}),
        ("/v1/messages/count_tokens", {"messages": HI, "tools": [{"type": "web_search_1", "name": "w"}] * 300}),
        ("/v1/responses", {"input": [{"type": "x"}] * 3000 + HI, "max_output_tokens": 1}),
        ("/v1/responses", {"input": "a", "tools": [{"type": "web_search"}] * 300, "max_output_tokens": 1}),
    ],
)
def test_what_is_left_out_is_one_line_a_request(tiny_one: Running, lines: Any, path: str, body: dict[str, Any]) -> None:
    status, found = tiny_one.post(path, {"model": "tiny", **body})
    assert status == 200, found
    until(lambda: any("code=200" in line for line in lines.messages))
    said = [line for line in lines.messages if "left out" in line]
    assert len(said) == 1 and ("3000 " in said[0] or "300 " in said[0]), said[:3]


def test_lines_can_be_json(tiny_llm: LLM, lines: Any) -> None:
    with serving(tiny_llm, log_json=True, names=('odd "name"',)) as running:
        running.chat(max_tokens=1)
    found = [json.loads(line) for line in lines.messages]
    assert [f["model"] for f in found if "model" in f] == ['odd "name"']


# ---- prompts that find nothing


def parting(base: int, end: int, more: int = 0) -> dict[str, Any]:
    """A prompt that begins with 128 tokens of its base."""
    tokens = [(base * 31 + i * i) % 90 + 5 for i in range(128)]
    return {"prompt": [*tokens, *([end] * (40 + more))], "max_tokens": 1}


def test_a_line_says_where_a_prompt_leaves_what_is_kept(tiny_llm: LLM, lines: Any) -> None:
    with serving(tiny_llm) as running:
        tiny_llm.forget()
        for base, end in ((2, 5), (1, 5), (1, 6)):
            assert running.post("/v1/completions", parting(base, end, 30))[0] == 200
        until(lambda: sum("code=200" in line for line in lines.messages) == 3)
    *cold, near = (line for line in lines.messages if "code=200" in line)
    assert all(" reuse=cold" in line and "diverged_at" not in line for line in cold)
    assert " reuse=no_checkpoint diverged_at=128" in near


def test_long_prompts_that_begin_with_what_is_kept_and_find_nothing_are_told(
    tiny_llm: LLM, lines: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"LONG": 150, "LAST": 4, "LEAST": 128}.items():
        monkeypatch.setattr(misses, name, value)

    def warnings() -> list[str]:
        return [record.getMessage() for record in lines.records if record.levelno == logging.WARNING]

    with serving(tiny_llm) as running:
        tiny_llm.forget()
        served = 0

        def ask(*asked: int) -> dict[str, Any]:
            nonlocal served
            status, found = running.post("/v1/completions", parting(*asked))
            served += 1
            until(lambda: sum("code=200" in line for line in lines.messages) == served)
            assert status == 200
            return found["usage"]["hybridkv"]["reuse"]

        for base in (1, 2):
            assert not warnings()
            ask(base, 5)
            assert ask(base, 6)["matched"] == 128
        [said] = warnings()
        assert "the last 4 prompts of 150 tokens or more, though 2 of them began with 128 or more" in said
        assert "most often: no_checkpoint" in said
        ask(3, 5), ask(3, 6)
        assert len(warnings()) == 1, "not again within the minute"
        assert ask(3, 6, 1)["cached"] == 168, "the end of a turn"
        running.service.misses._quiet_until = 0.0
        ask(4, 5), ask(4, 6)
        assert len(warnings()) == 1, "one of the last four has found something"
