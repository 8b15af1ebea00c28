"""`/props` and `/slots`: what is served and what runs, with llama-server's names where there are such. Never text of a
request; nothing here waits for the engine.
"""

from __future__ import annotations

from typing import Any

from hybridkv import __version__
from hybridkv.config import SamplingParams
from hybridkv.engine.stats import kept_bytes
from hybridkv.errors import RequestError
from hybridkv.llm import LLM
from hybridkv.request import Request
from hybridkv.server.service import Service
from hybridkv.text.call_formats import format_of
from hybridkv.text.reasoning import marks_in

SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


def props(service: Service) -> dict[str, Any]:
    """The model, its template, and how its cache is laid out."""
    llm, template = service.llm, service.llm.chat_template
    params = SamplingParams().resolved({"temperature": 1.0} | llm.sampling_defaults)
    sampled = {name: getattr(params, name) for name in SAMPLING}
    form, tokenizer = service.settings.tool_format, llm.tokenizer
    marks = None if template is None else marks_in(template.source)
    return {
        "model_alias": service.names[0],
        "total_slots": llm.plan.slots,
        "n_ctx": service.context,
        "chat_template": None if template is None else template.source,
        "default_generation_settings": {"n_ctx": service.context, "params": sampled},
        "eos": sorted(llm.engine.eos_ids),
        "eos_token": None if tokenizer is None else [tokenizer.token_text(i) for i in sorted(llm.engine.eos_ids)],
        "tool_format": form or (None if template is None else format_of(template).name),
        "reasoning_format": None if marks is None else list(marks),
        "cache": _cache(llm),
        "build_info": f"hybridkv {__version__}",
    }


def _cache(llm: LLM) -> dict[str, Any]:
    plan = llm.plan
    streams = {
        stream.name: {
            "layers": len(stream.layers),
            "streams": stream.streams,
            "page_bytes": stream.page_bytes,
            "entries_per_page": stream.entries_per_page,
            "tokens_per_entry": stream.tokens_per_entry,
            "pages": plan.pages[stream.name],
        }
        for stream in plan.schema.streams
    }
    states = {s.name: {"layers": len(s.layers), "bytes": s.slot_bytes} for s in plan.schema.states if not s.lent}
    return {"kinds": streams, "states": states, "bytes": plan.nbytes}


def slots(service: Service) -> list[dict[str, Any]]:
    """One object a request, in order of arrival."""
    found = [request for generation in list(service.generations) for request in generation.requests]
    return [_slot(request, service) for request in sorted(found, key=lambda request: request.order)]


def _slot(request: Request, service: Service) -> dict[str, Any]:
    llm, answer = service.llm, request.answer_tokens
    try:
        kept = kept_bytes(request, llm.manager, llm.engine.schema)
    except RequestError:  # it has no slot, or none any more
        kept = 0
    state = "waiting" if request.started_at is None else "reading" if not answer else "answering"
    return {
        "id": request.order,
        "state": "ended" if request.finished else state,
        "is_processing": request.started_at is not None and not request.finished,
        "n_ctx": service.context,
        "prompt_tokens": request.prompt_tokens,
        "cached_tokens": request.cached_tokens,
        "generated_tokens": answer,
        "kept_bytes": kept,
        "full_bytes": llm.engine.schema.kv_bytes(request.prompt_tokens + answer) if kept else 0,
    }
