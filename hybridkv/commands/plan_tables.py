"""What `hybridkv plan` shows: tables, and the same as a dictionary."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table

    from hybridkv.commands.plan import Report


def table(report: Report) -> Table:
    from rich import box
    from rich.table import Table

    from hybridkv.planner import human

    many = f", {report.requests} requests" if report.requests > 1 else ""
    out = Table(
        title=f"{report.model}, {report.context} tokens{many}",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0) if len(report.choices) < 3 else 0,  # 80 columns hold three dtypes
    )
    for heading in ("", "layers", "streams", "entries", "pages"):
        out.add_column(heading, justify="right" if heading else "left", no_wrap=not heading)
    for choice in report.choices:
        out.add_column(f"KV {choice.kv_dtype}", justify="right", no_wrap=True)
    first = report.choices[0].plan
    for i, s in enumerate(first.schema.streams):
        bytes_of = [human(c.plan.pool_bytes[c.plan.schema.streams[i].name]) for c in report.choices]
        counts = (len(s.layers), s.streams, s.entries(report.context), first.pages[s.name])
        out.add_row(f"{s.name} pages", *map(str, counts), *bytes_of)
    for i, s in enumerate(first.schema.states):
        sizes = [human(report.requests * c.plan.schema.states[i].slot_bytes) for c in report.choices]
        out.add_row(f"{s.name} state", str(len(s.layers)), "", "", "", *sizes)
    out.add_row("page tables", "", "", "", "", *(human(c.plan.table_bytes) for c in report.choices))
    weights = human(report.weights)
    out.add_row(
        f"weights {report.dtype}", str(report.layers), "", "", "", *[weights] * len(report.choices), end_section=True
    )
    out.add_row("total", "", "", "", "", *(human(c.total) for c in report.choices), style="bold")
    if first.schema.compressed:
        out.add_section()
        out.add_row("index keys", "", "", "", "", *(str(c.index_dtype) for c in report.choices))
        out.add_row("bytes a token", "", "", "", "", *(f"{c.token_bytes:,.2f}" for c in report.choices))
        out.add_row("cache", "", "", "", "", *(human(c.plan.nbytes) for c in report.choices))
    if report.memory is not None:
        rows = (
            (f"fits in {human(report.memory)}", ["yes" if c.fits else "no" for c in report.choices]),
            ("longest context", [str(c.longest_context) for c in report.choices]),
            (f"requests of {report.context}", [str(c.most_requests) for c in report.choices]),
        )
        out.add_section()
        for label, cells in rows:
            out.add_row(label, "", "", "", "", *cells)
    return out


def buys_table(report: Report) -> Table:
    from rich import box
    from rich.table import Table

    from hybridkv.planner import human

    title = "What a dtype and a budget buy" + (f" in {human(report.memory)}" if report.memory is not None else "")
    out = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in ("KV", "kept a stream"):
        out.add_column(heading, no_wrap=True)
    headings = ["after reading", "while reading"]
    headings += ["longest context", f"requests of {report.context}"] if report.memory is not None else []
    headings += ["FFN layers"] if report.ffn_layer_bytes else []
    for heading in headings:
        out.add_column(heading, justify="right")
    before = ""
    for b in report.buys:
        if before not in ("", b.kv_dtype):
            out.add_section()
        budget = "all" if b.budget is None else f"{b.budget}, bounded" if b.bounded else str(b.budget)
        cells = [human(b.held_bytes), human(b.peak_bytes)]
        cells += [str(b.longest_context), str(b.most_requests)] if report.memory is not None else []
        cells += [f"+{b.ffn_layers}"] if report.ffn_layer_bytes else []
        out.add_row("" if before == b.kv_dtype else b.kv_dtype, budget, *cells)
        before = b.kv_dtype
    if report.ffn_layer_bytes:
        size = human(report.ffn_layer_bytes)
        out.caption = f"FFN layers of {size}, as the file stores them, in what is saved against f32 with all kept"
        out.caption_justify = "left"
    return out


def as_dict(report: Report) -> dict[str, Any]:
    return {
        "model": report.model,
        "context": report.context,
        "requests": report.requests,
        "dtype": report.dtype,
        "weights_bytes": report.weights,
        "packed_on_gpu_bytes": report.packed_on_gpu,
        "memory_bytes": report.memory,
        "workspace_bytes": report.workspace,
        "ffn_layer_bytes": report.ffn_layer_bytes,
        "buys": [asdict(b) for b in report.buys],
        "choices": [
            {
                "kv_dtype": choice.kv_dtype,
                "index_dtype": choice.index_dtype,
                "token_bytes": choice.token_bytes,
                "streams": [
                    {
                        "name": s.name,
                        "layers": len(s.layers),
                        "streams": s.streams,
                        "lanes": s.lanes,
                        "tokens_per_entry": s.tokens_per_entry,
                        "entries": s.entries(report.context),
                        "pages": choice.plan.pages[s.name],
                        "page_bytes": s.page_bytes,
                        "bytes": choice.plan.pool_bytes[s.name],
                    }
                    for s in choice.plan.schema.streams
                ],
                "states": [
                    {"name": s.name, "layers": len(s.layers), "bytes": report.requests * s.slot_bytes}
                    for s in choice.plan.schema.states
                ],
                "kv_bytes": sum(choice.plan.pool_bytes.values()),
                "state_bytes": choice.plan.state_bytes,
                "table_bytes": choice.plan.table_bytes,
                "cache_bytes": choice.plan.nbytes,
                "total_bytes": choice.total,
                "fits": choice.fits,
                "longest_context": choice.longest_context,
                "most_requests": choice.most_requests,
            }
            for choice in report.choices
        ],
    }
