"""`hybridkv launch`: a coding agent, set up for a server that runs.

What each agent has to be told is in one function: its environment, and what is added to its command. Nothing is written
to the agent's own files.
"""

from __future__ import annotations

import http.client
import json
import os
import shlex
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any
from urllib.parse import quote, urlsplit

from typer import Argument, BadParameter, Option

from hybridkv.commands.declaring import with_options
from hybridkv.commands.serve import KEY_VARIABLE
from hybridkv.errors import HybridKVError

SECONDS = 10  # for the server to say what it serves
PATIENCE = "600000"  # milliseconds that an agent waits for an answer: a long prompt takes time on slow hardware
PROVIDER = "hybridkv"
ANSWER = 8192  # tokens of an answer that opencode keeps free, at the most
KEY = f"${KEY_VARIABLE}"  # stands for the key where it is shown


@dataclass(frozen=True)
class Server:
    """A server that an agent is to ask; `context` is 0 where nobody knows it."""

    url: str
    model: str
    context: int
    key: str


@dataclass(frozen=True)
class Setup:
    """What an agent is started with."""

    environment: dict[str, str]
    options: tuple[str, ...] = ()


def claude(server: Server) -> Setup:
    """Claude Code speaks Messages; its address has no /v1."""
    models = ("MODEL", "DEFAULT_HAIKU_MODEL", "DEFAULT_SONNET_MODEL", "DEFAULT_OPUS_MODEL")
    # a key for Anthropic's own service would be sent along, and is nothing for this one
    found = {"ANTHROPIC_BASE_URL": server.url, "ANTHROPIC_AUTH_TOKEN": server.key, "ANTHROPIC_API_KEY": ""}
    found |= {f"ANTHROPIC_{name}": server.model for name in models}
    found |= {"CLAUDE_CODE_SUBAGENT_MODEL": server.model}
    # no requests elsewhere, and no line in the prompt that differs each time: it would end the match with the cache
    found |= {"CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1", "CLAUDE_CODE_ATTRIBUTION_HEADER": "0"}
    return Setup(found | {"CLAUDE_STREAM_IDLE_TIMEOUT_MS": PATIENCE, "API_TIMEOUT_MS": PATIENCE})


def codex(server: Server) -> Setup:
    """Codex speaks Responses; it takes settings in TOML, and a JSON string is one there."""
    about = {"name": PROVIDER, "base_url": f"{server.url}/v1", "wire_api": "responses", "env_key": KEY_VARIABLE}
    table = ", ".join(f"{name} = {json.dumps(value)}" for name, value in about.items())
    settings = [f"model={json.dumps(server.model)}", f"model_provider={json.dumps(PROVIDER)}"]
    settings += [f"model_providers.{PROVIDER}={{{table}}}"]
    if server.context:
        settings.append(f"model_context_window={server.context}")
    return Setup({KEY_VARIABLE: server.key}, tuple(word for setting in settings for word in ("-c", setting)))


def opencode(server: Server) -> Setup:
    """opencode speaks Chat Completions, and takes a configuration from its environment."""
    model: dict[str, Any] = {"name": server.model}
    if server.context:
        model["limit"] = {"context": server.context, "output": min(ANSWER, server.context // 4)}
    options = {"baseURL": f"{server.url}/v1", "apiKey": server.key}
    provider = {"npm": "@ai-sdk/openai-compatible", "name": PROVIDER, "options": options}
    name = f"{PROVIDER}/{server.model}"
    config = {"model": name, "small_model": name, "provider": {PROVIDER: provider | {"models": {server.model: model}}}}
    return Setup({"OPENCODE_CONFIG_CONTENT": json.dumps(config)})


@dataclass(frozen=True)
class Agent:
    """A program, how it is installed, and the tokens of its first request."""

    setup: Callable[[Server], Setup]
    package: str
    first_request: int


AGENTS = {
    "claude": Agent(claude, "@anthropic-ai/claude-code", 20_800),
    "codex": Agent(codex, "@openai/codex", 9_400),
    "opencode": Agent(opencode, "opencode-ai", 7_600),
}


@with_options
def launch(
    *,
    agent: Annotated[str, Argument(metavar="AGENT", help=", ".join(AGENTS), autocompletion=lambda: list(AGENTS))],
    arguments: Annotated[
        list[str] | None, Argument(metavar="[-- ARGUMENTS]", help="for the agent", show_default=False)
    ] = None,
    url: Annotated[
        str, Option("--url", metavar="URL", help="where the server answers; without /v1")
    ] = "http://127.0.0.1:8000",
    model: Annotated[
        str | None,
        Option("--model", metavar="NAME", help="as the server calls it; the first that it names", show_default=False),
    ] = None,
    print_only: Annotated[
        bool, Option("--print", help="show the environment and the command, and start nothing")
    ] = False,
) -> None:
    """Start a coding agent (Claude Code, Codex or opencode) on a server that runs.

    The server's key, if it has one, is taken from HYBRIDKV_API_KEY. The agent's own settings are left as they are.
    """
    if agent not in AGENTS:
        raise BadParameter(f"there is no agent {agent!r} here; there are {', '.join(AGENTS)}")
    found = AGENTS[agent]
    key = os.environ.get(KEY_VARIABLE, "")
    server = find_server(url, model, key or "any")
    if 0 < server.context < 2 * found.first_request:
        print(
            f"note: {agent}'s first request alone has some {found.first_request:,} tokens, and {server.model} has a "
            f"context of {server.context:,}; serve it with a larger --context",
            file=sys.stderr,
        )
    if print_only:
        shown = Server(server.url, server.model, server.context, KEY if key else "any")
        print(as_commands(agent, found.setup(shown), arguments or []))
        return
    program = shutil.which(agent)
    if program is None:
        raise HybridKVError(f"{agent} is not installed, or not in PATH: npm install -g {found.package}")
    setup = found.setup(server)
    sys.stdout.flush()
    os.execve(program, [agent, *(arguments or []), *setup.options], {**os.environ, **setup.environment})


def find_server(url: str, model: str | None, key: str) -> Server:
    """What is served there; HybridKVError where nothing is, or not that model."""
    refused = BadParameter(f"--url: {url!r} is no address such as http://127.0.0.1:8000")
    try:
        parts = urlsplit(url.rstrip("/").removesuffix("/v1"))
        good = parts.scheme in ("http", "https") and parts.hostname and not parts.query and parts.port != 0
    except ValueError:  # brackets that are not closed, a port that is no number
        raise refused from None
    if not good:
        raise refused
    if not (key.isascii() and key.isprintable()):
        raise HybridKVError(f"{KEY_VARIABLE} has a line break or another character that no header can carry")
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = kind(parts.netloc.rpartition("@")[2], timeout=SECONDS)
    path = f"{parts.path}/v1/models" + ("" if model is None else f"/{quote(model)}")
    try:
        connection.request("GET", path, headers={"authorization": f"Bearer {key}"})
        answer = connection.getresponse()
        status, raw = answer.status, answer.read()
    except (OSError, http.client.HTTPException) as problem:
        reason = getattr(problem, "strerror", None) or str(problem) or type(problem).__name__
        raise HybridKVError(f"no server answers at {url} ({reason}); start one: hybridkv serve") from None
    finally:
        connection.close()
    if status == 401:
        raise HybridKVError(f"the server at {url} wants a key; set {KEY_VARIABLE} to one that it takes")
    try:
        found, said, name, context = json.loads(raw), "", "", 0
        if status == 200:
            first = found if model is not None else found["data"][0]
            name, context = str(first["id"]), int(first.get("max_model_len") or 0)
        else:
            said = str(found["error"]["message"])
    except (ValueError, LookupError, TypeError, AttributeError):
        raise HybridKVError(f"what answers at {url} does not say which models it serves (status {status})") from None
    if said:
        raise HybridKVError(f"the server at {url} answers {status}: {said}")
    return Server(f"{parts.scheme}://{parts.netloc}{parts.path}", name, context, key)


def as_commands(agent: str, setup: Setup, arguments: list[str]) -> str:
    """The same for a shell. A key is shown by the name of its variable."""
    lines = [
        f"export {name}={_quoted(value)}"
        for name, value in setup.environment.items()
        if (name, value) != (KEY_VARIABLE, KEY)  # it is set already
    ]
    return "\n".join([*lines, " ".join(map(shlex.quote, [agent, *arguments, *setup.options]))])


def _quoted(value: str) -> str:
    """A word of a shell, in which the key is its variable."""
    return f'"{KEY}"'.join(shlex.quote(part) if part else "" for part in value.split(KEY)) or "''"
