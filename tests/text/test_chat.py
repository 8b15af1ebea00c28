"""Chat templates: the same text as transformers, and no template can get out, run on, or fill the memory."""

import json
import signal
import struct
import threading
from pathlib import Path
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from hybridkv.errors import HybridKVError, ModelFileError, RequestError
from hybridkv.text import chat
from hybridkv.text.chat import ChatTemplate
from hybridkv.text.tokenizer import Tokenizer

LLAMA3 = """{% set loop_messages = messages %}{% for message in loop_messages %}
{% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'+ message['content'] | trim + '<|eot_id|>' %}
{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}
{{ content }}{% endfor %}
{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"""  # noqa: E501

QWEN = """{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\\n\\n' }}
    {%- endif %}
    {{- "# Tools\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- else %}
    {%- if messages[0].role == 'system' %}
        {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and message.content is string %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.content is string %}
        {%- set content = message.content %}
    {%- else %}
        {%- set content = '' %}
    {%- endif %}
    {%- if message.role == "system" and loop.first %}
        {%- continue %}
    {%- endif %}
    {%- if message.role == "assistant" and '</think>' in content and loop.index0 < ns.last %}
        {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' + content }}
    {%- if message.tool_calls %}
        {%- for call in message.tool_calls %}
            {{- '\\n<tool_call>\\n{"name": "' ~ call.name ~ '", "arguments": ' ~ (call.arguments | tojson) ~ '}\\n</tool_call>' }}
        {%- endfor %}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}"""  # noqa: E501

GENERATION = """{% for m in messages %}
  {% if m.role == 'assistant' %}{% generation %}{{ m.content }}{{ eos_token }}{% endgeneration %}
  {% else %}
{{ m.role }}: {{ m.content }}
  {% endif %}
{% endfor %}
{% macro field(name, value=none) %}[{{ name }}={{ value | default('-', true) }}]{% endmacro %}
{{ field('a') }}{{ field('b', 3) }}{{ {'z': '<é&"', 'a': [1, 2.5, none, true]} | tojson(indent=2) }}
{% for k, v in {'x': 1}.items() %}{{ k ~ v }}{% if loop.last %}{% break %}{% endif %}{% endfor %}
{{ dict(a=1) }}{{ undefined_thing }}{{ messages | map(attribute='role') | join(',') }}"""

CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "Hi"}],
    [{"role": "system", "content": "Be kind. <b> & 'é' 🙂"}, {"role": "user", "content": "  Hi \n"}],
    [
        {"role": "user", "content": "2+2?"},
        {
            "role": "assistant",
            "content": "<think>\nhm\n</think>\n\n4",
            "tool_calls": [{"name": "f", "arguments": {"é": 1}}],
        },
        {"role": "user", "content": "<|im_end|> and 3?"},
    ],
]
TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": "<temp> & é", "parameters": {"type": "object"}}}
]


@pytest.mark.parametrize("prompt", [True, False])
@pytest.mark.parametrize("name", ["smollm2", "llama3", "qwen", "generation"])
def test_templates_render_as_in_transformers(tokenizer: Tokenizer, name: str, prompt: bool) -> None:
    assert tokenizer.chat_template is not None
    source = {"smollm2": tokenizer.chat_template, "llama3": LLAMA3, "qwen": QWEN, "generation": GENERATION}[name]
    ours = ChatTemplate(source, bos="<s>", eos="</s>")
    extras: list[dict[str, Any]] = [{}, {"enable_thinking": False}, {"tools": TOOLS}]
    for messages in CHATS:
        for extra in extras:
            theirs, _ = render_jinja_template(
                [messages],
                chat_template=source,
                add_generation_prompt=prompt,
                bos_token="<s>",
                eos_token="</s>",
                **extra,
            )
            assert ours.render(messages, add_generation_prompt=prompt, **extra) == theirs[0]
    ours.close()


def test_the_embedded_model_gets_the_prompt_it_was_trained_on(tokenizer: Tokenizer) -> None:
    assert tokenizer.chat_template is not None
    text = ChatTemplate(tokenizer.chat_template, bos=tokenizer.bos_text, eos=tokenizer.eos_text).render(CHATS[0])
    system = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
    assert text == (f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")


def render(source: str, messages: list[dict[str, Any]] | None = None, seconds: float = 5.0, **extra: Any) -> str:
    template = ChatTemplate(source, bos=None, eos=None, seconds=seconds)
    try:
        return template.render(messages or [{"role": "user", "content": "x"}], **extra)
    finally:
        template.close()


ESCAPES = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ messages.__class__ }}",
    "{{ messages|attr('__class__') }}",
    "{{ messages['__class__'].__base__ }}",
    "{{ raise_exception.__globals__['__builtins__']['open']('/etc/passwd').read() }}",
    "{{ strftime_now.__globals__ }}",
    "{{ namespace.__init__.__globals__ }}",
    "{{ self.__init__.__globals__ }}",
    "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "{{ lipsum.__globals__['os'] }}",
    "{{ (messages|map(attribute='__class__')|list)[0].mro() }}",
    "{{ '{0.__class__.__mro__}'.format(messages) }}",
    "{{ '{0.__class__}'.format_map({'0': messages}) }}",
    "{{ 'x'|attr('format')('{0.__class__}') }}{{ ''.__class__() }}",
    "{% set x = joiner.__init__ %}{{ x.__func__.__code__ }}",
    "{% for c in [].__class__.__base__.__subclasses__() %}{{ c }}{% endfor %}",
    "{{ dict.__self__ }}{{ range.__class__('x', (), {}) }}",
    "{% macro m() %}{% endmacro %}{{ m._func.__globals__ }}",
    "{{ loop }}{% for x in [1] %}{{ loop._iterator.__class__.__name__.x.y }}{% endfor %}",
]


@pytest.mark.parametrize("source", ESCAPES)
def test_escapes_end_in_an_error_or_in_nothing(source: str) -> None:
    try:
        text = render(source)
    except HybridKVError:
        return
    assert "class" not in text and "root:" not in text and "module" not in text and "<function" not in text


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'system'}) }}",
        "{{ messages.pop() }}",
        "{% do messages.clear() %}",
        "{{ messages[0].clear() }}",
    ],
)
def test_messages_cannot_be_changed(source: str) -> None:
    messages = [{"role": "user", "content": "x"}]
    with pytest.raises(ModelFileError):
        render(source, messages)
    assert messages == [{"role": "user", "content": "x"}]


@pytest.mark.parametrize("source", ["{% include '/etc/passwd' %}", "{% import 'os' as os %}", "{% extends 'x' %}"])
def test_templates_read_no_files(source: str) -> None:
    with pytest.raises(HybridKVError):
        render(source)


SHARED = "{% set ns = namespace(a=[1], b=[1]) %}{% for i in range(60) %}{% set ns.a = [ns.a, ns.a] %}{% set ns.b = [ns.b, ns.b] %}{% endfor %}"  # noqa: E501


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% for i in range(99999) if false %}{% endfor %}" * 2000,
        "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
        "{{ 10 ** (10 ** 10) }}",
        SHARED + "{{ ns.a == ns.b }}",
    ],
)
def test_endless_work_is_stopped(source: str) -> None:
    with pytest.raises(RequestError, match="longer than 0.5 seconds"):
        render(source, seconds=0.5)


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'x' * 10**9 }}",
        "{{ 'x' * messages|length * 10**9 }}",
        "{% for i in range(99999) %}{{ 'x' * 1000 }}{% endfor %}",
        "{% set ns = namespace(s='xy') %}{% for i in range(40) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}{{ ns.s }}",
        "{{ 'x'.ljust(10**10) }}",
        "{{ '%10000000000d' % 1 }}",
        SHARED + "{{ ns.a | tojson }}",
        "{{ lipsum(n=99999) }}",
    ],
)
def test_endless_output_is_stopped(source: str) -> None:
    with pytest.raises(RequestError, match=r"characters|memory|failed|longer"):
        render(source, seconds=1)


@pytest.mark.parametrize(
    "source",
    [
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "{% for x in [[1]] recursive %}{{ loop([[1]]) }}{% endfor %}",
        "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
        "{% if 1 %}" * 3000 + "{% endif %}" * 3000,
    ],
)
def test_endless_depth_is_stopped(source: str) -> None:
    with pytest.raises(HybridKVError):
        render(source)


def test_memory_is_bounded() -> None:
    with pytest.raises(RequestError, match="512 MiB of memory"):
        render("{{ ('x' * 10**9) | length }}")


def test_a_long_template_is_refused_unread() -> None:
    with pytest.raises(ModelFileError, match="10485760 characters"):
        ChatTemplate("x" * (10 << 20), bos=None, eos=None)


@pytest.mark.parametrize("source", ["{% for %}", "{{ a b }}", "{% if x %}", "{{ x | nofilter }}", "{% nope %}", "{{"])
def test_wrong_templates_say_where(source: str) -> None:
    with pytest.raises(ModelFileError, match="line 1"):
        render(source)


def test_the_templates_own_refusal_is_passed_on() -> None:
    with pytest.raises(RequestError, match="roles must alternate: é"):
        render("{{ raise_exception('roles must alternate: é') }}")


def test_undefined_values_are_empty_until_something_is_asked_of_them() -> None:
    assert render("[{{ nothing }}{{ messages[0].nothing }}]") == "[]"
    with pytest.raises(RequestError, match="nothing"):
        render("{{ nothing.more }}")
    with pytest.raises(RequestError, match="TypeError"):
        render("{{ 'a' + messages[0].content + 1 }}")


def test_the_time_is_there() -> None:
    assert render("{{ strftime_now('%Y') }}").startswith("2")


def test_a_template_works_again_after_it_was_stopped() -> None:
    source = "{% if n %}{% for i in range(n) %}{% for j in range(n) %}{% endfor %}{% endfor %}{% endif %}ok"
    template = ChatTemplate(source, bos=None, eos=None, seconds=0.5)
    message = [{"role": "user", "content": "x"}]
    assert template.render(message) == "ok"
    with pytest.raises(RequestError, match="longer"):
        template.render(message, n=99999)
    assert template.render(message) == "ok"
    template.close()
    assert template.render(message) == "ok"
    template.close()


class Interrupted(BaseException):
    pass


SLOW = "{% for i in range(n or 0) %}{% for j in range(1000) %}{% endfor %}{% endfor %}{{ messages[0].content }}"


@pytest.mark.parametrize("first", [True, False])
def test_an_interrupted_rendering_leaves_no_answer_for_the_next(first: bool) -> None:
    """first: the worker is only being started when the interrupt comes, or soon after."""
    template = ChatTemplate(SLOW, bos=None, eos=None, seconds=30)
    if not first:
        assert template.render([{"content": "before"}], n=1) == "before"

    def interrupt(*_: object) -> None:
        raise Interrupted

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        for i, delay in enumerate((0.01, 0.1, 0.3)):
            with pytest.raises(Interrupted):
                signal.setitimer(signal.ITIMER_REAL, delay)
                template.render([{"content": f"secret {i}"}], n=50_000)
            for text in ("mine", "yours"):
                assert template.render([{"content": text}]) == text
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        template.close()


def test_an_interrupt_at_any_read_ends_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    template = ChatTemplate("{{ messages[0].content }}", bos=None, eos=None)
    assert template.render([{"content": "one"}]) == "one"
    worker = template._worker
    assert worker is not None and worker.alive()

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(chat.struct, "unpack", interrupted)  # after the first bytes of the answer
        with pytest.raises(KeyboardInterrupt):
            template.render([{"content": "two"}])
    assert not worker.alive()
    assert template.render([{"content": "three"}]) == "three"
    template.close()


def test_an_answer_to_another_question_is_never_given_out() -> None:
    template = ChatTemplate("{{ messages[0].content }}", bos=None, eos=None)
    assert template.render([{"content": "one"}]) == "one"
    worker = template._worker
    assert worker is not None and worker._process.stdin is not None
    data = json.dumps({"messages": [{"content": "secret"}]}).encode()
    worker._process.stdin.write(struct.pack("<II", len(data), 7) + data)  # its answer will be first in the pipe
    with pytest.raises(RequestError, match="broke the process"):
        template.render([{"content": "two"}])
    assert template.render([{"content": "three"}]) == "three"
    template.close()


def test_several_threads_share_a_template() -> None:
    template = ChatTemplate("{{ messages[0].content }}", bos=None, eos=None)
    wrong: list[str] = []

    def work(name: str) -> None:
        for i in range(50):
            if template.render([{"content": f"{name}{i}"}]) != f"{name}{i}":
                wrong.append(name)

    threads = [threading.Thread(target=work, args=(c,)) for c in "abcd"]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    template.close()
    assert wrong == []


@pytest.mark.parametrize("messages", ["hi", [1], {"role": "user"}, None, [{"content": b"x"}], [{"content": {1, 2}}]])
def test_bad_messages_are_refused(messages: Any) -> None:
    with pytest.raises(RequestError, match="messages"):
        ChatTemplate("x", bos=None, eos=None).render(messages)


def test_messages_of_any_size_are_counted() -> None:
    with pytest.raises(RequestError, match="bytes"):
        ChatTemplate("x", bos=None, eos=None).render([{"content": "x" * (40 << 20)}])
    assert len(render("{{ messages[0].content }}", [{"content": "é" * (3 << 20)}])) == 3 << 20
    with pytest.raises(RequestError, match="characters"):
        render("{{ messages[0].content }}", [{"content": "x" * (5 << 20)}])


@pytest.mark.parametrize("name", ["bos_token", "eos_token", "raise_exception", "range", "dict"])
def test_a_request_cannot_set_the_templates_own_names(name: str) -> None:
    extra: dict[str, Any] = {name: "x"}
    with pytest.raises(RequestError, match=name):
        ChatTemplate("x", bos=None, eos=None).render([], **extra)


def test_a_worker_that_cannot_start_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(chat.sys, "executable", str(tmp_path / "python"))
    with pytest.raises(ModelFileError, match="did not start"):
        ChatTemplate("x", bos=None, eos=None).render([])
    monkeypatch.setattr(chat.sys, "executable", "/bin/false")
    with pytest.raises(ModelFileError, match="did not start"):
        ChatTemplate("x", bos=None, eos=None).render([])
