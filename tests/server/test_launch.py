"""`hybridkv launch`: what it sets is enough for a program to ask the server. The programs here are small ones of the
tests' own, which read what the agents read.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cli.commands import ROOT, SECONDS
from hybridkv import LLM
from server.running import Running, serving

# what each agent makes of its environment and its command, by the clients whose variables these are
PROGRAMS = {
    "claude": """
import anthropic
assert not os.environ["ANTHROPIC_API_KEY"], "a key for another service is sent to this one"
assert os.environ["ANTHROPIC_MODEL"] == os.environ["CLAUDE_CODE_SUBAGENT_MODEL"]
client = anthropic.Anthropic(max_retries=0)
asked = {"model": os.environ["ANTHROPIC_MODEL"], "max_tokens": 3, "messages": [{"role": "user", "content": words[-1]}]}
said = client.messages.create(**asked).usage.output_tokens
""",
    "codex": """
import openai, tomllib
at = words.index("-c")
given, words = words[at:], words[:at]
assert given[0::2] == ["-c"] * (len(given) // 2)
settings = {}
for text in given[1::2]:
    name, _, value = text.partition("=")
    settings[name] = tomllib.loads(f"x = {value}")["x"]
provider = settings[f"model_providers.{settings['model_provider']}"]
assert provider["wire_api"] == "responses" and settings["model_context_window"] == 512
client = openai.OpenAI(base_url=provider["base_url"], api_key=os.environ[provider["env_key"]], max_retries=0)
asked = {"model": settings["model"], "max_output_tokens": 3, "input": words[-1]}
said = client.responses.create(**asked).usage.output_tokens
""",
    "opencode": """
import openai
config = json.loads(os.environ["OPENCODE_CONFIG_CONTENT"])
name, _, model = config["model"].partition("/")
about = config["provider"][name]
assert about["models"][model]["limit"] == {"context": 512, "output": 128}
client = openai.OpenAI(base_url=about["options"]["baseURL"], api_key=about["options"]["apiKey"], max_retries=0)
asked = {"model": model, "max_tokens": 3, "messages": [{"role": "user", "content": words[-1]}]}
said = client.chat.completions.create(**asked).usage.completion_tokens
""",
}


def write_program(folder: Path, agent: str) -> None:
    head = f"#!{sys.executable}\nimport json, os, sys\nwords = sys.argv[1:]\n"
    (folder / agent).write_text(head + PROGRAMS[agent] + "print(json.dumps([said, words]))\n")
    (folder / agent).chmod(0o755)


def launched(folder: Path, *words: str, **more: str) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in os.environ.items() if not k.startswith(("ANTHROPIC_", "HYBRIDKV_API"))}
    env |= {"PYTHONPATH": str(ROOT), "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}", **more}
    command = [sys.executable, "-m", "hybridkv.cli", "launch", *words]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=SECONDS)


@pytest.fixture(scope="module")
def locked(tiny_llm: LLM) -> Any:
    with serving(tiny_llm, api_keys=("se'same",), names=("tiny", "big-*")) as running:
        yield running


@pytest.mark.parametrize(
    ("agent", "printed"),
    [
        pytest.param(agent, printed, marks=pytest.mark.slow if (n + printed) % 2 else (), id=f"{way}-{agent}")
        for printed, way in enumerate(("started", "printed"))
        for n, agent in enumerate(PROGRAMS)
    ],
)
def test_an_agent_asks_the_server(locked: Running, tmp_path: Path, agent: str, printed: bool) -> None:
    write_program(tmp_path, agent)
    key = {"HYBRIDKV_API_KEY": "se'same", "ANTHROPIC_API_KEY": "another service's"}
    given = [agent, "--url", f"{locked.address}/v1", "--model", "big-one", *(["--print"] if printed else [])]
    done = launched(tmp_path, *given, "--", "-p", "What's $HOME?", **key)
    assert done.returncode == 0 and "has a context of 512" in done.stderr, done
    if printed:
        assert "sesame" not in done.stdout and "se'same" not in done.stdout
        env = {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}", **key}
        done = subprocess.run(["bash", "-ec", done.stdout], env=env, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done
    said, words = json.loads(done.stdout)
    assert 0 < said <= 3 and words[:2] == ["-p", "What's $HOME?"]


def test_without_a_name_it_is_the_servers_first(tiny_one: Running, tmp_path: Path) -> None:
    done = launched(tmp_path, "claude", "--url", tiny_one.address, "--print")
    assert "export ANTHROPIC_MODEL=tiny\n" in done.stdout and "export ANTHROPIC_AUTH_TOKEN=any\n" in done.stdout
    assert f"export ANTHROPIC_BASE_URL={tiny_one.address}\n" in done.stdout and done.stdout.endswith("\nclaude\n")


def test_what_is_missing_is_told(locked: Running, tmp_path: Path) -> None:
    there = ("--url", locked.address)
    for words, said, key in (
        (("cloud",), "there is no agent 'cloud' here; there are claude, codex, opencode", "se'same"),
        (("codex", *there), "wants a key; set HYBRIDKV_API_KEY", "wrong"),
        (("codex", *there, "--model", "small"), "answers 404: no such model is served here; there is tiny", "se'same"),
        (("codex", "--url", "127.0.0.1:8000"), "is no address such as http://127.0.0.1:8000", ""),
        (("codex", "--url", "http://127.0.0.1:80x"), "is no address such as http://127.0.0.1:8000", ""),
        (("codex", "--url", "http://[::1"), "is no address such as http://127.0.0.1:8000", ""),
        (("codex", *there), "HYBRIDKV_API_KEY has a line break", "se'same\n"),
        (("codex", *there), "HYBRIDKV_API_KEY has a line break", "s\u00e9same"),
        (("codex", "--url", "http://127.0.0.1:9"), "start one: hybridkv serve", ""),
        (("codex", *there), "npm install -g @openai/codex", "se'same"),
    ):
        done = launched(tmp_path, *words, HYBRIDKV_API_KEY=key, PATH=str(tmp_path))
        assert done.returncode == 2 and said in done.stderr and "Traceback" not in done.stderr, done
