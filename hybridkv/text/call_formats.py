"""How model families write calls of functions, one row of a table each, and which family a template is of."""

from __future__ import annotations

from dataclasses import dataclass

from hybridkv.text.chat import ChatTemplate
from hybridkv.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class CallFormat:
    """One family's form.

    Args:
        name: by which users know it.
        open: what begins calls; "" where a bare object at the beginning of the answer is one.
        close: what ends them.
        function: (before the name, after it, what ends the function) where parameters have tags of their own; None:
            a JSON object.
        parameter: (before the key, after it, what ends the value).
        lines: whether a value stands on lines of its own.
        own_prompt: whether the template knows no tools, and ours describes them.
    """

    name: str
    open: str
    close: str = ""
    function: tuple[str, str, str] | None = None
    parameter: tuple[str, str, str] | None = None
    lines: bool = False
    own_prompt: bool = False


_DSML = "｜DSML｜"
HERMES = CallFormat("hermes", "<tool_call>", "</tool_call>")
PLAIN = CallFormat("plain", "<tool_call>", "</tool_call>", own_prompt=True)
QWEN_XML = CallFormat(
    "qwen_xml",
    "<tool_call>",
    "</tool_call>",
    ("<function=", ">", "</function>"),
    ("<parameter=", ">", "</parameter>"),
    lines=True,
)
LLAMA = CallFormat("llama", "")
DSML = CallFormat(
    "dsml",
    f"<{_DSML}tool_calls>",
    f"</{_DSML}tool_calls>",
    (f'<{_DSML}invoke name="', '">', f"</{_DSML}invoke>"),
    (f'<{_DSML}parameter name="', '">', f"</{_DSML}parameter>"),
)
FORMATS = {f.name: f for f in (HERMES, QWEN_XML, LLAMA, DSML, PLAIN)}


def format_of(template: ChatTemplate) -> CallFormat:
    """The form that a template asks its model for; our own where it asks for none that is known."""
    source = template.source
    if "tools" not in template.variables:
        return PLAIN
    if _DSML in source:
        return DSML
    if "<function=" in source:
        return QWEN_XML
    if "<tool_call>" in source:
        return HERMES
    if "python_tag" in source or ("ipython" in source and '"parameters"' in source):
        return LLAMA
    return PLAIN


def calls_in(template: ChatTemplate, answer: str) -> bool:
    """Whether an answer may have calls in it, by its letters alone."""
    form = format_of(template)
    return form.open in answer if form.open else answer.lstrip().startswith("{")


def opening_token(tokenizer: Tokenizer, form: CallFormat) -> int | None:
    """The token that opens a call, where the tag is one."""
    if not form.open:
        return None
    ids = tokenizer.encode(form.open, bos=False)
    return ids[0] if len(ids) == 1 and tokenizer.token_text(ids[0]) == form.open else None
