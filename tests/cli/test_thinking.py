"""Thoughts beside the answer, and what goes to the chat template: thinking on or off, its variables, tools."""

import io
import json
import shutil
import sys
from pathlib import Path

import pytest

from cli.commands import TINY, Run
from engine.ascii_tokenizer import write_tokenizer
from hybridkv import LLM, SamplingParams
from hybridkv.commands.display import Voice

TEMPLATE = (
    "{{ bos_token }}{% for t in tools or [] %}[tool]{{ t.function.name }}{% endfor %}"
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if effort is defined %}[{{ effort }}]{% endif %}"
    "{% if add_generation_prompt %}[assistant]<think>"
    "{% if enable_thinking is defined and not enable_thinking %}</think>{% endif %}{% endif %}"
)


@pytest.fixture(scope="module")
def thinker(folder: Path) -> Path:
    """A model whose prompt opens its thoughts. It never closes them by itself."""
    path = shutil.copytree(folder, folder.with_name("tiny-thinker"))
    write_tokenizer(path, TEMPLATE)
    return path


def asked(llm: LLM, **how: object) -> tuple[list[int], str | None, str]:
    found = llm.chat([{"role": "user", "content": "Hello"}], SamplingParams(max_tokens=6), **how)  # type: ignore[arg-type]
    return found.token_ids, found.reasoning, found.text


def test_thoughts_are_apart_and_thinking_can_be_switched_off(run: Run, thinker: Path) -> None:
    llm = LLM(thinker, device="cpu", dtype="float32", max_requests=1, max_context=512)
    common = ("generate", "Hello", "-m", thinker, *TINY, "--max-tokens", 6)
    tokens, reasoning, text = asked(llm)
    assert reasoning and not text
    code, out, err = run(*common)
    assert code == 0 and out == f"<think>\n{reasoning}\n</think>\n"
    assert "in its thoughts, cut at 6 tokens: raise --max-tokens" in err
    assert run(*common, "--hide-thinking")[1] == "\n"
    found = json.loads(run(*common, "--json")[1])
    assert (found["token_ids"], found["reasoning"], found["text"]) == (tokens, reasoning, text)
    tokens, reasoning, text = asked(llm, thinking=False)
    assert reasoning is None and text
    assert run(*common, "--no-think")[1] == text + "\n"


def test_variables_and_tools_reach_the_template(run: Run, thinker: Path, tmp_path: Path) -> None:
    llm = LLM(thinker, device="cpu", dtype="float32", max_requests=1, max_context=512)
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]
    (tmp_path / "tools.json").write_text(json.dumps(tools))
    flags = ("--template-arg", "effort=low", "--tools", tmp_path / "tools.json", "--max-tokens", 6, "--json")
    code, out, err = run("generate", "Hello", "-m", thinker, *TINY, *flags)
    assert code == 0, err
    assert json.loads(out)["token_ids"] == asked(llm, tools=tools, effort="low")[0]
    (tmp_path / "tools.json").write_text('{"a": 1}')
    code, _, err = run("generate", "Hello", "-m", thinker, *TINY, *flags)
    assert code == 2 and "expected a list of tools" in err


def test_a_chat_has_the_same_switches(run: Run, thinker: Path) -> None:
    llm = LLM(thinker, device="cpu", dtype="float32", max_requests=1, max_context=512)
    stdin = b"Hello\n/reset\n/think off\nHello\n"
    code, out, err = run("chat", "-m", thinker, *TINY, "--max-tokens", 6, stdin=stdin)
    assert code == 0, err
    assert out == f"<think>\n{asked(llm)[1]}\n</think>\n{asked(llm, thinking=False)[2]}\n"
    assert "thinking is off from the next turn on" in err


def test_a_model_without_such_a_switch_says_so(run: Run, folder: Path) -> None:
    for command in (("generate", "Hello"), ("chat",)):
        code, _, err = run(*command, "-m", folder, *TINY, "--no-think")
        assert code == 2 and "no switch for thinking" in err and err.count("\n") == 1


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("terminal", "hide", "shown"),
    [
        (True, False, "\x1b[2mhm, yes\x1b[0m\n\nFour.\n"),
        (False, False, "<think>\nhm, yes\n</think>\n\nFour.\n"),
        (True, True, "Four.\n"),
        (False, True, "Four.\n"),
    ],
)
def test_how_thoughts_are_shown(terminal: bool, hide: bool, shown: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stdout", Screen() if terminal else io.StringIO())
    voice = Voice(hide)
    for text, reasoning in (("hm,", True), ("", False), (" yes", True), ("Four", False), (".", False)):
        voice.say(text, reasoning)
    voice.end()
    assert sys.stdout.getvalue() == shown  # type: ignore[attr-defined]
