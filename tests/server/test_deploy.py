"""docs/deploy: each file is read, its commands are those of today, and nginx is run where it is installed."""

import http.client
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from hybridkv.cli import program
from hybridkv.server.replicas import ROUTER_OPTIONS, choose_ports, get
from server.running import SECONDS, until

DEPLOY = Path(__file__).parents[2] / "docs" / "deploy"
NGINX = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")


def containers(found: Any) -> Iterator[dict[str, Any]]:
    """All containers anywhere in a file."""
    if isinstance(found, dict):
        yield from found.get("containers", ())
        found = list(found.values())
    for each in found if isinstance(found, list) else ():
        yield from containers(each)


def serve_options() -> set[str]:
    return {flag for option in program().commands["serve"].params for flag in option.opts}


def flags(words: list[str]) -> set[str]:
    return {word for word in words if word.startswith("-")}


def test_the_deployment_asks_for_what_there_is() -> None:
    documents = list(yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text()))
    kinds = {(each["kind"], each["metadata"]["name"]): each for each in documents}
    assert len(documents) == len(kinds) == 7 and all(each["apiVersion"] for each in documents)
    server, router = (next(containers(kinds["Deployment", name])) for name in ("hybridkv", "hybridkv-router"))
    assert server["command"][:2] == ["hybridkv", "serve"] and flags(server["command"]) <= serve_options()
    grace = kinds["Deployment", "hybridkv"]["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
    assert grace > float(server["command"][server["command"].index("--drain") + 1])
    assert {server[probe]["httpGet"]["path"] for probe in ("startupProbe", "readinessProbe", "livenessProbe")} == {
        "/health"
    }
    command = router["command"]
    for name in ("policy", "retry-max-retries", "cb-failure-threshold"):  # those that the replicas were tested with
        assert command[command.index(f"--{name}") + 1] == str(ROUTER_OPTIONS[name])
    labels = kinds["Deployment", "hybridkv"]["spec"]["template"]["metadata"]["labels"]
    assert command[command.index("--selector") + 1] == f"app={labels['app']}"
    known = pytest.importorskip("vllm_router.router_args", reason="vllm-router is not here")
    source = Path(known.__file__).read_text()
    assert [flag for flag in flags(command) if flag.removeprefix("--") not in source] == []


def test_groups_start_again_as_a_whole() -> None:
    group = yaml.safe_load((DEPLOY / "leaderworkerset.yaml").read_text())
    template = group["spec"]["leaderWorkerTemplate"]
    assert group["kind"] == "LeaderWorkerSet" and template["restartPolicy"] == "RecreateGroupOnPodRestart"
    commands = []
    for kind in ("leaderTemplate", "workerTemplate"):
        [container] = containers(template[kind])
        [line] = container["args"]
        commands.append(line)
        ours = line.partition("-m hybridkv serve ")[2].split()
        assert ours and flags(ours) <= serve_options()
        size = line.split()[line.split().index("--nnodes") + 1]
        assert ours[ours.index("--tp") + 1] == size == "$LWS_GROUP_SIZE", "else each pod opens the whole model"
    assert commands[0] == commands[1], "ranks must run the same command"


# ---- nginx


class Plain(BaseHTTPRequestHandler):
    """Says which server it is; 503 once it drains."""

    draining: set[int] = set()
    seen: list[tuple[int, str]] = []

    def do_GET(self) -> None:
        port = self.server.server_address[1]
        self.seen.append((port, self.headers["x-session-id"] or ""))
        body = f'{{"port": {port}}}'.encode()
        self.send_response(503 if port in self.draining else 200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def plain_servers(ports: tuple[int, ...]) -> Iterator[None]:
    servers = [ThreadingHTTPServer(("127.0.0.1", port), Plain) for port in ports]
    threads = [threading.Thread(target=server.serve_forever, daemon=True) for server in servers]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        for server in servers:
            server.shutdown()
            server.server_close()


@pytest.mark.skipif(NGINX is None, reason="nginx is not installed")
def test_nginx_keeps_conversations_and_shuts_the_routes_of_routers(tmp_path: Path) -> None:
    assert NGINX is not None
    ports = choose_ports(0, 2)
    text = (DEPLOY / "nginx.conf").read_text()
    for old, new in (("listen 8000", ports.router), ("127.0.0.1:8001", ports.servers[0]),
                     ("127.0.0.1:8002", ports.servers[1])):  # fmt: skip
        assert text.count(f"{old};") + text.count(f"server {old} ") == 1, old
        text = text.replace(old, f"{old.rpartition(':')[0]}:{new}" if ":" in old else f"listen 127.0.0.1:{new}")
    path = tmp_path / "nginx.conf"
    path.write_text(text)
    process = subprocess.Popen([NGINX, "-p", tmp_path, "-c", path, "-g", "daemon off;"])
    try:
        with plain_servers(ports.servers):
            until(lambda: process.poll() is not None or get(ports.router, "/health")[0] == 200)
            assert process.poll() is None, "nginx does not take the file"
            homes = {}
            for _ in range(3):
                for name in map(str, range(12)):
                    status, found = asked(ports.router, "/v1/models", name)
                    assert status == 200 and homes.setdefault(name, found) == found
            assert set(homes.values()) == set(ports.servers)
            for path_of_router in ("/add_worker?url=x", "/remove_worker?url=x", "/workers", "/metrics"):
                assert get(ports.router, path_of_router)[0] == 404
            Plain.draining.add(ports.servers[0])  # its own are sent to the other one, once
            for name in homes:
                assert asked(ports.router, "/v1/models", name) == (200, ports.servers[1])
    finally:
        Plain.draining.clear()
        process.terminate()
        process.wait(SECONDS)


def asked(port: int, path: str, session: str) -> tuple[int, int]:
    """Status, and the server that answered."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=SECONDS)
    try:
        connection.request("GET", path, headers={"x-session-id": session})
        answer = connection.getresponse()
        return answer.status, int(re.findall(rb"\d+", answer.read())[-1])
    finally:
        connection.close()
