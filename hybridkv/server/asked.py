"""What requests of both dialects may ask of sampling and eviction."""

from __future__ import annotations

from dataclasses import fields as fields_of
from typing import Any

from hybridkv.config import EvictionConfig, SamplingParams
from hybridkv.engine.engine import INHERIT
from hybridkv.errors import HybridKVError
from hybridkv.llm import LLM
from hybridkv.server import settings
from hybridkv.server.fields import INT64, Fields
from hybridkv.server.problems import bad

MAX_TOKENS = 2**31 - 1
EVICTION_FIELDS = tuple(f.name for f in fields_of(EvictionConfig))
OTHER_FIELDS = ("cache", "prefix")  # of `hybridkv`


def sampling(asked: Fields, llm: LLM, **more: Any) -> SamplingParams:
    """How tokens are chosen. What is not said is the model's own default; its temperature, without one, is 1.

    `more`: what a dialect has read itself.
    """
    top_k = asked.whole("top_k", -1, MAX_TOKENS)
    given: dict[str, Any] = {
        "temperature": asked.number("temperature", 0.0, 1e4),
        "top_p": asked.number("top_p", 0.0, 1.0, above=True),
        "top_k": 0 if top_k == -1 else top_k,
        "min_p": asked.number("min_p", 0.0, 1.0),
        "repetition_penalty": asked.number("repetition_penalty", 1e-3, 1e3),
        "presence_penalty": asked.number("presence_penalty", -2.0, 2.0) or 0.0,
        "frequency_penalty": asked.number("frequency_penalty", -2.0, 2.0) or 0.0,
        "min_tokens": asked.whole("min_tokens", 0, MAX_TOKENS) or 0,
        "seed": asked.whole("seed", 0, INT64 - 2 * settings.MAX_ANSWERS),
        "ignore_eos": asked.flag("ignore_eos"),
        "logit_bias": _bias(asked, llm),
        "stop_token_ids": _token_ids(asked, "stop_token_ids", llm, 1024),
    }
    if given["temperature"] is None and "temperature" not in llm.sampling_defaults:
        given["temperature"] = 1.0
    given |= more
    most = given.get("max_tokens")
    if most is not None and given["min_tokens"] > most:
        raise asked.wrong("min_tokens", f"it is more than the {most} tokens that the answer may have")
    return SamplingParams(**given)


def _bias(asked: Fields, llm: LLM) -> dict[int, float]:
    listed = asked.object("logit_bias")
    if listed is None:
        return {}
    if len(listed.data) > settings.MAX_BIASES:
        raise asked.wrong("logit_bias", f"it has {len(listed.data)} tokens, at most {settings.MAX_BIASES} are taken")
    found = {}
    for name in listed.data:
        if not name.isascii() or not name.isdigit() or len(name) > 10 or int(name) >= llm.engine.vocab:
            raise asked.wrong("logit_bias", f"its keys must be token ids from 0 to {llm.engine.vocab - 1}")
        value = listed.number(name, -100.0, 100.0)
        if value is None:
            raise asked.wrong("logit_bias", "its values must be numbers from -100 to 100")
        found[int(name)] = value
    return found


def _token_ids(asked: Fields, name: str, llm: LLM, most: int) -> tuple[int, ...]:
    ids = asked.items(name, most) or []
    if not all(isinstance(i, int) and not isinstance(i, bool) and 0 <= i < llm.engine.vocab for i in ids):
        raise asked.wrong(name, f"it must be token ids from 0 to {llm.engine.vocab - 1}")
    return tuple(ids)


def stops(asked: Fields, name: str) -> tuple[str, ...]:
    """Texts that end an answer."""
    return asked.texts(name, settings.MAX_STOPS, settings.MAX_STOP_LENGTH)


def eviction(asked: Fields, llm: LLM) -> Any:
    """What the request keeps: `hybridkv: {budget, policy, ...}`, or what the server was opened with."""
    given = asked.object("hybridkv")
    on_document = given is not None and bool(given.text("prefix", 256))
    if given is None or not given.data.keys() - OTHER_FIELDS:
        return None if on_document else INHERIT  # what follows a document is kept whole
    known = (*EVICTION_FIELDS, *OTHER_FIELDS)
    if unknown := [name for name in given.data if name not in known]:
        raise given.wrong(unknown[0][:40], f"there is no such setting; there are {', '.join(known)}")
    if on_document:
        raise given.wrong("prefix", "what follows a document is kept whole: leave out the settings of eviction")
    if "budget" in given.data and given.raw("budget") is None:
        return None  # all is kept, whatever the server's own budget is
    values: dict[str, Any] = {
        "budget": given.whole("budget", 1, 1 << 31),
        "policy": given.text("policy", 200),
        "scope": given.choice("scope", ("head", "layer", "global")),
        "bounded": given.flag("bounded") if "bounded" in given else None,
        **{name: given.whole(name, 0, 1 << 20) for name in ("window", "recent", "decode_every", "first")},
    }
    own = llm.cache_config
    found = {name: getattr(own, name) if values[name] is None else values[name] for name in EVICTION_FIELDS}
    if found["budget"] is None:
        raise given.wrong("budget", "it is missing: how many tokens a stream may keep")
    try:
        config = EvictionConfig(**found)
        llm.engine.resolve_eviction(config)
    except HybridKVError as problem:
        raise bad(f"hybridkv: {problem}", "hybridkv") from None
    return config
