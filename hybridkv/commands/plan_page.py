"""`hybridkv plan --html`: one self-contained page that plans every known model on every card, with sliders.

The page computes what plan_estimate.py computes, from numbers that come from the same schemas: nothing is measured or
rounded here. It loads nothing from anywhere, and its policy lets no other script run.
"""

from __future__ import annotations

import base64
import hashlib
import json
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from hybridkv.cache.schema import LONGEST_COLUMN, column_tokens
from hybridkv.cache.tier_sizes import BLOCK, staging_bytes
from hybridkv.cards import CARDS, CONTEXT, FP8_KV, HEADROOM, MIB
from hybridkv.commands.plan import BUDGET, HOST_SHOWN
from hybridkv.commands.plan_estimate import MOST_REQUESTS, Estimate
from hybridkv.commands.plan_source import Source, find_source
from hybridkv.commands.plan_weights import KV_NEED, LABELS, Weights, find_weights, form_weights, needed
from hybridkv.config import GPU_STEP_TOKENS, KV_DTYPES, CacheConfig, EvictionConfig, ReuseConfig
from hybridkv.dtypes import itemsize
from hybridkv.engine import workspace
from hybridkv.errors import HybridKVError
from hybridkv.eviction.sizes import QUERY_BUFFERS, SCORE_BYTES, STREAMS
from hybridkv.kernels import topk_levels
from hybridkv.kernels.eviction import select_sizes
from hybridkv.models import family_of
from hybridkv.models.known import KNOWN
from hybridkv.models.weight_forms import DTYPES, FORMS, has_experts

SIZES = (8, 12, 16, 24, 32, 48, 64, 80, 96, 128, 192)  # of cards by size, in GB as owners say it
FIRST = ("Qwen3.5-27B", "q4_k")  # what the page shows when no model is named
BUDGETS = (256, 512, 1024, 2048, 4096, 8192, 16384)
_INERT = str.maketrans({"<": "\\u003c", ">": "\\u003e", "&": "\\u0026"})


def write_page(path: Path, model: str | None = None) -> Path:
    """Write the page; `model`: one more, or one of the known, that it shows first."""
    text = page(model)
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise HybridKVError(f"the page cannot be written to {str(path)!r}: {error.strerror}") from None
    return path


def page(model: str | None = None) -> str:
    """The page as text."""
    style, script, body = (
        files("hybridkv").joinpath("data", f"plan.{kind}").read_text(encoding="utf-8") for kind in ("css", "js", "html")
    )
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; base-uri 'none'"
    data = json.dumps(export(model)).translate(_INERT)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>What fits on a card</title>\n<style>\n{style}</style>\n</head>\n"
        f'<body>\n{body}<script type="application/json" id="data">{data}</script>\n'
        f"<script>{script}</script>\n</body>\n</html>\n"
    )


def export(model: str | None = None) -> dict[str, Any]:
    """All numbers that the page computes with."""
    sources = {name: find_source(name) for name in KNOWN}
    named = None if model is None else find_source(model)
    if named is not None:
        sources = {named.name: named} | {name: source for name, source in sources.items() if name != named.name}
    first = FIRST[0] if named is None else named.name
    form = FIRST[1] if named is None else "file" if named.packed else "bf16"
    return {
        "models": [of_model(source, model if source is named else None) for source in sources.values()],
        "first": {"model": first, "weights": form},
        "cards": [{"name": c.name, "mib": c.mib, "capability": c.capability} for c in CARDS],
        "sizes": SIZES,
        "budgets": BUDGETS,
        "budget": BUDGET,  # that the host's line is about where none is chosen
        "kv": list(KV_DTYPES),
        "forms": {form: LABELS.get(form, form) for form in FORMS} | {"file": "as the file"},
        "kv_needs": (KV_NEED, FP8_KV),
        "rules": rules(),
    }


def rules() -> dict[str, float]:
    """The constants of reserve, eviction and workspace."""
    places = (
        (workspace, "BLOCK_BYTES LOGIT_BYTES ROW_BYTES PROMPT_ROWS PROMPT_LOGIT_BYTES FEW_ROWS STREAM_SCORE_BYTES"),
        (workspace, "INDEX_SCORE_BYTES PEAK_SCORES"),
        (topk_levels, "RATIO WIDE_RATIO KEPT LOOSE MAX_CHOICES TILE"),
        (select_sizes, "TEMPORARY_BYTES SORT_BYTES_PER_SCORE"),
    )
    found = {name: getattr(place, name) for place, names in places for name in names.split()}
    return found | {
        "MIB": MIB,
        "CONTEXT": CONTEXT,
        "HEADROOM": HEADROOM,
        "STEP": GPU_STEP_TOKENS,
        "MOST_REQUESTS": MOST_REQUESTS,
        "SCORE_BYTES": SCORE_BYTES,
        "QUERY_BUFFERS": QUERY_BUFFERS,
        "WINDOW": EvictionConfig.window,
        "TABLE_BYTES": itemsize("int32"),
        "STAGING": staging_bytes(True, None),
        "HOST": HOST_SHOWN,
        "HOST_BLOCK": BLOCK,
        "CHECKPOINTS": ReuseConfig.MOST_ROWS,
        "CHECKPOINT_SHARE": ReuseConfig.SHARE,
    }


def of_model(source: Source, argument: str | None = None) -> dict[str, Any]:
    """One model: its weights in every form, and what it stores for a request in every KV dtype."""
    config, evicts = source.config, family_of(source.config).supports("budget")
    weights = {form: form_weights(source, form) for form in FORMS}
    if not has_experts(config, source.has):
        del weights["mxfp4"]
    weights = dict(sorted(weights.items(), key=lambda item: -item[1].nbytes))
    if source.packed:
        weights = {"file": find_weights(source, True, "auto", "auto", False)} | weights
    cache = CacheConfig(budget=max(BUDGETS) if evicts else None)  # the budget is not in the schema, but its buffers are
    return {
        "name": source.name,
        "argument": argument or source.name,  # what the command line takes
        "layers": config.layers,
        "max_context": config.max_positions,
        "vocab": config.vocab,
        "heads": config.heads,
        "kv_heads": config.kv_heads,
        "attention_layers": len(config.attention_layers),
        "evicts": evicts,
        "compressed": config.v4 is not None,
        "weights": {form: _of_weights(form, found) for form, found in weights.items()},
        "stores": {
            dtype: {kv: _stores(Estimate(config, replace(cache, kv_dtype=kv), dtype, gpu=True)) for kv in KV_DTYPES}
            for dtype in DTYPES.values()
        },
    }


def _of_weights(form: str, found: Weights) -> dict[str, Any]:
    """As they are held on a card that lacks nothing; on others they are those of bf16."""
    return {
        "bytes": found.nbytes,
        "dtype": found.dtype,
        "itemsize": itemsize(found.dtype),
        "label": found.label,
        "needs": needed(found.form if form == "file" else form),
        "why": found.why,
        "asked_bytes": found.nbytes if found.asked_bytes is None else found.asked_bytes,
    }


def _stores(estimate: Estimate) -> dict[str, Any]:
    schema = estimate.schema
    return {
        "slot": schema.slot_bytes,
        "columns": column_tokens(schema) <= LONGEST_COLUMN,  # whether prompts can share pages at all
        "buffer": schema.query_buffer_bytes,
        "streams": [
            {
                "name": s.name,
                "streams": s.streams,
                "entries_per_page": s.entries_per_page,
                "tokens_per_entry": s.tokens_per_entry,
                "page_bytes": s.page_bytes,
                "evicted": s.name == STREAMS,
            }
            for s in schema.streams
        ],
    }
