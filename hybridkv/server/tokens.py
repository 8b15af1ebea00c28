"""`/tokenize`, `/detokenize` and `/apply-template`, with the field names of vLLM and of llama-server."""

from __future__ import annotations

from typing import Any

from hybridkv.server.fields import Fields
from hybridkv.server.openai_chat import read_chat_prompt
from hybridkv.server.openai_common import TokenNames
from hybridkv.server.problems import bad
from hybridkv.server.service import Service
from hybridkv.text.tokenizer import Tokenizer

MAX_IDS = 1 << 20


def read_tokenize(asked: Fields, service: Service) -> dict[str, Any]:
    """Tokens of `prompt` or `messages` (vLLM), or of `content` (llama-server). It runs on a worker thread."""
    tokenizer = _tokenizer(service)
    if "content" in asked:
        text, special = asked.needed_text("content"), asked.flag("add_special")
        real = asked.flag("parse_special", True)  # whether control tokens that the text spells are such
        ids = tokenizer.encode(text, bos=None if special else False, special=real)
        if asked.flag("with_pieces"):
            return {"tokens": [{"id": i, "piece": _piece(tokenizer, i)} for i in ids]}
        return {"tokens": ids, "count": len(ids), "max_model_len": service.context}
    service.model_name(asked.text("model", 256))
    if "messages" in asked:
        ids = read_chat_prompt(asked, service).prompt.tokens
    elif "prompt" in asked:
        ids = tokenizer.encode(
            asked.needed_text("prompt"), bos=None if asked.flag("add_special_tokens", True) else False
        )
    else:
        raise bad("give prompt, messages or content")
    found: dict[str, Any] = {"count": len(ids), "max_model_len": service.context, "tokens": ids, "token_strs": None}
    if asked.flag("return_token_strs"):
        found["token_strs"] = [tokenizer.token_text(i) for i in ids]
    return found


def read_detokenize(asked: Fields, service: Service) -> dict[str, Any]:
    """The text of token ids, under both names that clients look for."""
    tokenizer, ids = _tokenizer(service), asked.items("tokens", MAX_IDS)
    vocab = service.llm.engine.vocab
    if ids is None or not all(isinstance(i, int) and not isinstance(i, bool) and 0 <= i < vocab for i in ids):
        raise asked.wrong("tokens", f"it must be a list of token ids from 0 to {vocab - 1}")
    text = tokenizer.decode(ids, skip_special=False)
    return {"prompt": text, "content": text}


def read_template(asked: Fields, service: Service) -> dict[str, str]:
    """The prompt of a chat as text (llama-server)."""
    return {"prompt": read_chat_prompt(asked, service).text}


def _piece(tokenizer: Tokenizer, token: int) -> str | list[int]:
    """A token's text, or its bytes where these are no whole characters."""
    text = tokenizer.token_text(token)
    return TokenNames(tokenizer).bytes(token) if "\ufffd" in text else text


def _tokenizer(service: Service) -> Tokenizer:
    found = service.llm.tokenizer
    if found is None:
        raise bad("this model has no tokenizer")
    return found
