"""Agents and clients that take a base URL, each for a turn against `hybridkv serve`, with no network but loopback.

    python scripts/agents.py --install /tmp/agents          # once; needs npm, pip and their registries
    python scripts/agents.py --at /tmp/agents claude codex  # what they sent and got, on standard output

Not part of continuous integration: the programs are large, and not ours. Each has an empty HOME and talks to a relay
that writes down what passes.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
Agent = Callable[[Path, Path, str], tuple[list[str], dict[str, str]]]
NPM = ("@openai/codex@0.166.0", "@anthropic-ai/claude-code@2.1.197", "opencode-ai@1.18.33")
PIP = ("llm==0.36",)
SYSTEM = "You are a helpful assistant. Answer in one short sentence."
QUESTION = "What is the capital of France?"
MOST = 64  # tokens of an answer where a call is asked for
# how a call looks: the embedded model has 135 million weights, and needs to see some before it makes a sensible one
EXAMPLE = """user: Run echo {word}.
assistant: <tool_call>
{{"name": "{tool}", "arguments": {{"{field}": "echo {word}"}}}}
</tool_call>
"""
SECONDS = 600
SHOWN = 700  # characters of a text that is written down


class Relay(ThreadingHTTPServer):
    """Passes requests on to the server, and what comes back, as it comes; keeps both."""

    daemon_threads = True

    def __init__(self, target: int, forcing: bool) -> None:
        super().__init__(("127.0.0.1", 0), _Passed)
        self.target, self.forcing = target, forcing
        self.seen: list[tuple[str, str, int, str]] = []  # what was asked, its body, status, what came back
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Passed(BaseHTTPRequestHandler):
    server: Relay

    def _pass_on(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        if body and self.server.forcing:
            body = forced(self.path, body)
        there = http.client.HTTPConnection("127.0.0.1", self.server.target, timeout=SECONDS)
        left = ("host", "connection", "content-length")
        headers = {k: v for k, v in self.headers.items() if k.lower() not in left}
        there.request(self.command, self.path, body, headers)
        answer = there.getresponse()
        self.send_response(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in ("transfer-encoding", "connection", "date", "content-length"):
                self.send_header(name, value)
        self.send_header("connection", "close")
        self.end_headers()
        got = b""
        while data := answer.read1():
            got += data
            self.wfile.write(data)
            self.wfile.flush()
        there.close()
        self.close_connection = True
        self.server.seen.append((f"{self.command} {self.path}", body.decode(), answer.status, got.decode()))

    do_GET = do_HEAD = do_POST = _pass_on

    def log_message(self, *_: Any) -> None:
        pass


def forced(path: str, body: bytes) -> bytes:
    """The request with a call asked for, where no result of one is in it yet: no agent has a setting for that."""
    asked = json.loads(body)
    if not asked.get("tools"):
        return body
    if not has_result(body.decode()):
        asked["tool_choice"] = {"type": "any"} if "/messages" in path else "required"
    asked["max_output_tokens" if path.endswith("/responses") else "max_tokens"] = MOST
    return json.dumps(asked).encode()


def has_result(body: str) -> bool:
    """Whether a command's output is in a request, in whatever dialect."""
    return any(name in body for name in ('"tool_result"', '"function_call_output"', '"role":"tool"', '"role": "tool"'))


# ---- the agents: files, environment and command of each


def claude(at: Path, home: Path, address: str) -> tuple[list[str], dict[str, str]]:
    names = ("MODEL", "DEFAULT_HAIKU_MODEL", "DEFAULT_SONNET_MODEL", "DEFAULT_OPUS_MODEL")
    env = {f"ANTHROPIC_{name}": "smol" for name in names}
    env |= {"ANTHROPIC_BASE_URL": address, "ANTHROPIC_AUTH_TOKEN": "any", "CLAUDE_CODE_SUBAGENT_MODEL": "smol"}
    env |= {"CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1", "CLAUDE_CODE_ATTRIBUTION_HEADER": "0"}
    env |= {"CLAUDE_STREAM_IDLE_TIMEOUT_MS": "600000", "API_TIMEOUT_MS": "600000"}
    program = at / "npm/node_modules/@anthropic-ai/claude-code-linux-x64/claude"
    more = ["--tools", "Bash", "--system-prompt", SYSTEM, "--output-format", "json"]
    return [str(program), "-p", QUESTION, *more], env


def calling(agent: Agent, tool: str, field: str, *more: str) -> Agent:
    """The same agent, asked to run a command."""
    shown = [EXAMPLE.format(word=word, tool=tool, field=field) for word in ("one", "two", "three")]

    def ask(at: Path, home: Path, address: str) -> tuple[list[str], dict[str, str]]:
        command, env = agent(at, home, address)
        command[command.index(QUESTION)] = "".join([*shown, "user: Run echo four.\nassistant:"])
        return [*command, *more], env

    return ask


def codex(at: Path, home: Path, address: str) -> tuple[list[str], dict[str, str]]:
    (home / "instructions.md").write_text(SYSTEM)
    provider = f'{{name="local",base_url="{address}/v1",wire_api="responses",env_key="LOCAL_KEY"}}'
    settings = ["model_provider=local", f"model_providers.local={provider}", 'web_search="disabled"']
    settings += [f'model_instructions_file="{home}/instructions.md"']
    settings += ["features.multi_agent=false", "features.goals=false"]
    command = [str(at / "npm/node_modules/.bin/codex"), "exec", "-m", "smol", "--skip-git-repo-check"]
    command += ["--dangerously-bypass-approvals-and-sandbox"]
    for setting in settings:
        command += ["-c", setting]
    return [*command, QUESTION], {"LOCAL_KEY": "any"}


def opencode(at: Path, home: Path, address: str) -> tuple[list[str], dict[str, str]]:
    model = {"name": "smol", "limit": {"context": 8192, "output": 256}}
    provider = {"npm": "@ai-sdk/openai-compatible", "options": {"baseURL": f"{address}/v1", "apiKey": "any"}}
    agent = {"prompt": SYSTEM, "mode": "primary", "tools": {"*": False, "bash": True}}
    config = {"provider": {"local": provider | {"models": {"smol": model}}}, "agent": {"tiny": agent}}
    (home / "opencode.json").write_text(json.dumps(config | {"model": "local/smol", "small_model": "local/smol"}))
    program = str(at / "npm/node_modules/.bin/opencode")
    return [program, "run", "--agent", "tiny", "--model", "local/smol", QUESTION], {}


def llm(at: Path, home: Path, address: str) -> tuple[list[str], dict[str, str]]:
    folder = home / ".config/io.datasette.llm"
    folder.mkdir(parents=True)
    listed = f"- model_id: smol\n  model_name: smol\n  api_base: {address}/v1\n"
    (folder / "extra-openai-models.yaml").write_text(listed)
    more = ["-o", "max_tokens", "32", "-o", "temperature", "0", QUESTION]
    return [str(at / "venv/bin/llm"), "-m", "smol", "--key", "any", *more], {}


AGENTS: dict[str, Agent] = {"claude": claude, "codex": codex, "opencode": opencode, "llm": llm}
CALLS: dict[str, Agent] = {
    "claude-calls": calling(claude, "Bash", "command", "--allowedTools", "Bash(echo:*)", "--max-turns", "2"),
    "codex-calls": calling(codex, "exec_command", "cmd"),
    "opencode-calls": calling(opencode, "bash", "command"),
}


# ---- running them


def install(at: Path) -> None:
    """All of them under one folder, and nothing elsewhere."""
    at.mkdir(parents=True, exist_ok=True)
    subprocess.run(["npm", "install", "--prefix", at / "npm", "--no-audit", "--no-fund", *NPM], check=True)
    subprocess.run([sys.executable, "-m", "venv", at / "venv"], check=True)
    subprocess.run([at / "venv/bin/pip", "install", "-q", *PIP], check=True)


def serve(temperature: float) -> tuple[subprocess.Popen[str], int]:
    """`hybridkv serve` with the embedded model, and its port."""
    command = [sys.executable, "-m", "hybridkv", "serve", "--port", "0", "--alias", "smol", "--context", "8k"]
    command += ["--temperature", str(temperature)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    line = process.stdout.readline()
    found = re.search(r":(\d+) ", line)
    if found is None:
        raise SystemExit(f"the server did not start: {line}")
    return process, int(found[1])


def short(value: Any) -> Any:
    """JSON with its long texts cut."""
    if isinstance(value, str):
        return value if len(value) <= 120 else f"{value[:100]}... [{len(value)} characters]"
    if isinstance(value, list):
        return [short(v) for v in value[:6]] + ([f"... [{len(value)} in all]"] if len(value) > 6 else [])
    return {k: short(v) for k, v in value.items()} if isinstance(value, dict) else value


def report(name: str, command: list[str], env: dict[str, str], done: Any, seen: list[Any], hidden: list[str]) -> None:
    """What was run, what passed, how it ended."""
    said = []
    for asked, body, status, got in seen:
        said.append(f"> {asked}")
        if body:
            said.append(json.dumps(short(json.loads(body)), ensure_ascii=False))
        said.append(f"< {status} {got if len(got) <= 2 * SHOWN else got[:SHOWN] + ' ... ' + got[-SHOWN:]}")
    variables = [f"{k}={v}" for k, v in env.items()]
    text = "\n".join([f"## {name}", f"$ {' '.join(variables)} {shlex.join(command)}", *said])
    code, out, err = done
    text += f"\n= {'stopped' if code is None else f'exit {code}'}\n{out.strip()}\n{err.strip()[-SHOWN:]}\n"
    for path in hidden:
        text = text.replace(path, "HOME")
    print(text, flush=True)


def turn(name: str, at: Path, target: int) -> bool:
    """One turn of one agent; whether it came to its end, or the output of its command came back."""
    relay = Relay(target, name in CALLS)
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        command, more = (AGENTS | CALLS)[name](at, home, relay.address)
        env = {"PATH": os.environ["PATH"], "HOME": folder, "TERM": "dumb", "IS_SANDBOX": "1", **more}
        code, out, err = run(command, home, env, lambda: name in CALLS and came_back(relay))
        report(name, command, more, (code, out, err), relay.seen, [folder])
    relay.shutdown()
    if name in CALLS:
        return came_back(relay)
    return code == 0 and any(body and status == 200 and got for _, body, status, got in relay.seen)


def came_back(relay: Relay) -> bool:
    """Whether the output of a command was sent, and answered."""
    return any(has_result(body) and status == 200 for _, body, status, _ in relay.seen)


def run(command: list[str], home: Path, env: dict[str, str], enough: Callable[[], bool]) -> tuple[int | None, str, str]:
    """Run a program to its end, or until it has done enough; None: it was stopped."""
    out, err = home / "out", home / "err"
    with out.open("w") as to_out, err.open("w") as to_err:
        process = subprocess.Popen(command, cwd=home, env=env, stdin=subprocess.DEVNULL, stdout=to_out, stderr=to_err)
        until = time.monotonic() + SECONDS
        while process.poll() is None and time.monotonic() < until and not enough():
            time.sleep(0.2)
        code = process.poll()
        if code is None:
            process.kill()
            process.wait()
    return code, out.read_text(), err.read_text()


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("agents", nargs="*", metavar="AGENT", help=f"of {', '.join(AGENTS | CALLS)}; all of them")
    options.add_argument("--at", type=Path, default=Path("/tmp/agents"), help="the folder that they are installed in")
    options.add_argument("--install", type=Path, metavar="FOLDER", help="install them there, and end")
    options.add_argument("--temperature", type=float, default=0.0, metavar="X", help="where an agent names none; 0")
    options.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    asked = options.parse_args()
    if asked.install is not None:
        install(asked.install)
        return
    if not asked.inside:  # once more, in a network that has loopback alone
        again = shlex.join([sys.executable, __file__, "--inside", *sys.argv[1:]])
        os.execvp("unshare", ["unshare", "-rn", "bash", "-c", f"ip link set lo up && exec {again}"])
    server, port = serve(asked.temperature)
    try:
        results = {name: turn(name, asked.at, port) for name in asked.agents or AGENTS | CALLS}
    finally:
        server.terminate()
        server.wait(60)
    print(", ".join(f"{name}: {'a turn' if good else 'FAILED'}" for name, good in results.items()))
    raise SystemExit(not all(results.values()))


if __name__ == "__main__":
    main()
