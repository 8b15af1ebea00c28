"""What `hybridkv plan` shows: tables at 80 columns, a verdict, and the same as a dictionary."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from hybridkv.kernels.linear.packed_planes import WORKSPACE
from hybridkv.planner import human

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from hybridkv.commands.plan import Report


def show(report: Report, buys: bool) -> None:
    """Print the plan; `buys`: with what each KV dtype and budget buys."""
    from rich.console import Console

    console = Console(highlight=False)
    show_table(console, table(report))
    for line in report.ranks.lines if report.ranks is not None else ():
        console.print(line)
    if report.memory is not None:
        console.print(verdict(report))
        for command in report.advice:
            console.print(f"  {command}", soft_wrap=True)  # never broken, so that it can be copied
    if report.cards:
        console.print()
        show_table(console, cards_table(report))
    nothing = report.memory is not None and report.weights.nbytes >= report.memory
    for line in [] if nothing else reuse_lines(report):
        console.print(line)
    if report.buys and buys and not nothing:
        console.print()
        show_table(console, buys_table(report), least=80)
    for note in report.notes:
        console.print(note)
    if report.weights.packed_on_gpu is not None:
        console.print(f"Weights packed on a GPU: {human(report.weights.packed_on_gpu)}", style="dim")
    if report.memory is not None:
        console.print(footnote(report), style="dim")


def show_table(console: Console, shown: Table, least: int = 1000) -> None:
    """Print a table with whole numbers, wider than the window where it must be; least: columns at which headings may
    wrap.
    """
    from rich.measure import Measurement

    window, natural = console.width, Measurement.get(console, console.options.update(width=1000), shown).maximum
    console.width = max(window, min(natural, least))
    console.print(shown)
    console.width = window


def title(report: Report) -> str:
    """Model, context, and what else was asked for."""
    many = f", {report.requests} requests" if report.requests > 1 else ""
    kept = f", {report.budget} kept" if report.budget is not None else ""
    part = f", one of {report.ranks.size} ranks" if report.ranks is not None else ""
    return f"{report.source.name}, {report.context} tokens{many}{kept}{part}"


def table(report: Report) -> Table:
    """Every part of the memory, a column for each KV dtype."""
    from rich import box
    from rich.table import Table

    out = Table(
        title=title(report),
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0) if len(report.choices) < 3 else 0,  # 80 columns hold three dtypes
    )
    for heading in ("", "layers", "streams", "entries", "pages"):
        out.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    for choice in report.choices:
        out.add_column(f"KV {choice.kv_dtype}", justify="right", no_wrap=True)
    blank, needs = ("", "", "", ""), [c.need for c in report.choices]
    for i, s in enumerate(report.choices[0].estimate.schema.streams):
        sizes = [human(stream_bytes(report, c)[i]) for c in report.choices]
        pages = sum(stream_pages(report, i))
        counts = (len(s.layers), s.streams, s.entries(report.context), pages)
        out.add_row(f"{s.name} pages", *map(str, counts), *sizes)
    for i, s in enumerate(report.choices[0].estimate.schema.states):
        sizes = [human(state_bytes(report, c)[i]) for c in report.choices]
        out.add_row(f"{s.name} state", str(len(s.layers)), "", "", "", *sizes)
    if any(need.rows for need in needs):
        many = {need.rows for need in needs}
        label = f"checkpoints x {needs[0].rows}" if len(many) == 1 else "checkpoints"
        out.add_row(label, *blank, *(human(need.checkpoints) for need in needs))
    if needs[0].staging:
        out.add_row("reuse staging", *blank, *(human(need.staging) for need in needs))
    out.add_row("page tables", *blank, *(human(need.tables) for need in needs))
    out.add_row("workspace", *blank, *(human(need.workspace) for need in needs))
    weights = [human(report.weights.nbytes)] * len(needs)
    layers = str(report.source.config.layers)
    out.add_row(f"weights {report.weights.label}", layers, "", "", "", *weights, end_section=True)
    out.add_row("total", *blank, *(human(c.total) for c in report.choices), style="bold")
    if report.choices[0].estimate.schema.compressed:
        out.add_section()
        out.add_row("index keys", *blank, *(str(c.index_dtype) for c in report.choices))
        out.add_row("bytes a token", *blank, *(f"{c.token_bytes:,.2f}" for c in report.choices))
        out.add_row("cache", *blank, *(human(need.cache) for need in needs))
    if report.memory is not None:
        out.add_section()
        if report.card is not None:
            reserve = human(report.card.nbytes - report.card.usable)
            out.add_row("reserve", *blank, *[reserve] * len(needs))
        fits = ("refused" if c.refused else "yes" if c.fits else "no" for c in report.choices)
        out.add_row(f"fits in {human(report.memory)}", *blank, *fits)
        longest = ("" if c.refused else str(c.longest_context) for c in report.choices)
        out.add_row("longest context", *blank, *longest)
        most = ("" if c.refused else str(c.most_requests) for c in report.choices)
        out.add_row(f"requests of {report.context}", *blank, *most)
    return out


def cards_table(report: Report) -> Table:
    """What the card that takes most has of it, a column for each number of cards."""
    from rich import box
    from rich.table import Table

    heading = f"Over several cards (--tp), what each takes with KV {report.judged.kv_dtype}"
    out = Table(title=heading, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    out.add_column("", no_wrap=True)
    found = [of_card(over) for over in report.cards]
    for each in found:
        out.add_column("1 card" if each["tp"] == 1 else f"{each['tp']} cards", justify="right", no_wrap=True)
    names = {"pages": "pages", "state": "state", "checkpoints": "checkpoints", "staging": "reuse staging"}
    names |= {"tables": "page tables", "workspace": "workspace"}
    for part, name in names.items():
        if any(each[part] for each in found):
            out.add_row(name, *(human(each[part]) for each in found))
    weights = []
    for each in found:
        most, least = human(each["weights"]), human(each["least_weights"])
        weights.append(most if most == least else f"{most} ({least})")
    out.add_row(f"weights {report.weights.label}", *weights, end_section=True)
    out.add_row("total", *(human(each["total"]) for each in found), style="bold", end_section=True)
    assert report.memory is not None
    out.add_row(f"fits in {human(report.memory)}", *("yes" if each["fits"] else "no" for each in found))
    out.add_row("longest context", *(str(each["longest_context"]) for each in found))
    out.add_row(f"requests of {report.context}", *(str(each["most_requests"]) for each in found))
    return out


def of_card(report: Report) -> dict[str, Any]:
    """Bytes of the card that takes most, one or one of several, and what fits."""
    judged, need = report.judged, report.judged.need
    parts = [rank.weights for rank in report.ranks.parts] if report.ranks is not None else [report.weights.nbytes]
    return {
        "tp": len(parts),
        "pages": need.pages,
        "state": need.state,
        "checkpoints": need.checkpoints,
        "staging": need.staging,
        "tables": need.tables,
        "workspace": need.workspace,
        "weights": report.weights.nbytes,
        "least_weights": min(parts),
        "total": judged.total,
        "fits": judged.fits,
        "longest_context": judged.longest_context,
        "most_requests": judged.most_requests,
    }


def stream_pages(report: Report, i: int) -> tuple[int, int]:
    """Pages of the i-th streams: of the requests that have read their prompts, and of the one that reads."""
    estimate = report.choices[0].estimate
    s, context, budget = estimate.schema.streams[i], report.context, estimate.cache.budget
    held = s.pages(context if budget is None else min(context, budget))
    peak = s.pages(min(context, budget + estimate.step)) if budget is not None and estimate.cache.bounded else None
    return (report.requests - 1) * held, s.pages(context) if peak is None else peak


def stream_bytes(report: Report, choice: Any) -> list[int]:
    """Bytes of the pages of each kind of stream. Only attention is evicted, and models that evict have no other."""
    return [sum(stream_pages(report, i)) * s.page_bytes for i, s in enumerate(choice.estimate.schema.streams)]


def state_bytes(report: Report, choice: Any) -> list[int]:
    """Bytes of each kind of state. What is lent is for those who read."""
    schema = choice.estimate.schema
    lent = choice.need.state - report.requests * schema.slot_bytes
    return [lent if s.lent else report.requests * s.slot_bytes for s in schema.states]


def verdict(report: Report) -> str:
    """One sentence: whether it fits, as the engine holds it on this card, and why that is not what was asked for."""
    assert report.memory is not None
    judged, weights = report.judged, report.weights
    on = f" on {report.card.name}" if report.card is not None else ""
    found = {0: "Nothing near it fits.", 1: "This fits:"}.get(len(report.advice), "Each of these fits:")
    if judged.refused:
        return f"Not possible{on}: {judged.refused}. {found}"
    because = f" ({weights.why})" if weights.why else ""
    many, take = ("one request", "takes") if report.requests == 1 else (f"{report.requests} requests", "take")
    held = f"weights kept in {weights.label}{because}" if because else f"{weights.label} weights"
    what = f"{many} of {report.context} tokens with KV {judged.kv_dtype} and {held}"
    if judged.fits:
        left = human(report.memory - judged.total)
        return f"Fits: {what} {take} {human(judged.total)}; {left} of {human(report.memory)} are left."
    if weights.nbytes >= report.memory:
        kept = f", kept in {weights.label}{because}," if because else ""
        short = f"the weights alone{kept} take {human(weights.nbytes)} of {human(report.memory)}"
    else:
        short = f"{what} {take} {human(judged.total)}, {human(judged.total - report.memory)} more than there is"
    return f"Does not fit{on}: {short}. {found}"


def reuse_lines(report: Report) -> list[str]:
    """What is kept for prompts that begin alike, and for conversations that wait for a next turn."""
    judged, found = report.judged, []
    if judged.need.rows:
        schema = judged.estimate.schema
        each = human(schema.checkpoint_bytes) + (" in bf16" if schema.checkpoint_bytes < schema.slot_bytes else "")
        found.append(
            f"Checkpoints: {judged.need.rows} x {each}, states that prompts which begin alike are taken up at."
        )
    if not report.kept:
        return found
    where = f"{human(report.host)} on the host{'' if report.host_given else ' (--host-cache)'}"
    whole = [k for k in report.kept if k.budget is None]
    if not report.gpu:
        return [*found, f"{where} hold the state of {whole[0].conversations} conversations that have no slot."]
    cut = [k for k in report.kept if k.budget is not None][-1:]
    whole = [k for k in whole if k.kv_dtype != "f32"] or whole
    first = "1 conversation" if whole[0].conversations == 1 else f"{whole[0].conversations} conversations"
    parts = [f"{first} of {whole[0].tokens} tokens ({whole[0].kv_dtype})"]
    parts += [f"{k.conversations} ({k.kv_dtype})" for k in whole[1:]]
    parts += [f"or {k.conversations} of {k.budget} kept ({k.kv_dtype})" for k in cut]
    return [*found, f"{where} hold {', '.join(parts)}."]


def footnote(report: Report) -> str:
    """What the reserve is, or what comes on top of a limit."""
    captured = report.judged.estimate.captured
    kept = f"; captured steps keep up to {human(captured)} of it" if captured else ""
    if report.card is not None:
        return (
            f"Reserve: of {human(report.card.nbytes)}, 1 GiB for driver and CUDA context and a tenth of the rest for "
            f"what steps compute with, as LLM leaves{kept}."
        )
    written = f" ({human(2 * WORKSPACE)} of it to write packed weights out)" if report.weights.form == "packed" else ""
    return f"On top comes what a step computes with{written}{kept}: leave about {'2 GiB' if captured else '1 GiB'}."


def buys_table(report: Report) -> Table:
    """Bytes and what fits, a row for each KV dtype and budget."""
    from rich import box
    from rich.table import Table

    heading = "What a dtype and a budget buy" + (f" in {human(report.memory)}" if report.memory is not None else "")
    out = Table(title=heading, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in ("KV", "kept a stream"):
        out.add_column(heading, no_wrap=True)
    headings = ["after reading", "while reading"]
    headings += ["longest context", f"requests of {report.context}"] if report.memory is not None else []
    headings += ["FFN layers"] if report.source.ffn_layer_bytes else []
    for heading in headings:
        out.add_column(heading, justify="right")
    before = ""
    for b in report.buys:
        if before not in ("", b.kv_dtype):
            out.add_section()
        budget = "all" if b.budget is None else f"{b.budget}, bounded" if b.bounded else str(b.budget)
        cells = [human(b.held_bytes), human(b.peak_bytes)]
        cells += [str(b.longest_context), str(b.most_requests)] if report.memory is not None else []
        cells += [f"+{b.ffn_layers}"] if report.source.ffn_layer_bytes else []
        out.add_row("" if before == b.kv_dtype else b.kv_dtype, budget, *cells)
        before = b.kv_dtype
    if report.source.ffn_layer_bytes:
        size = human(report.source.ffn_layer_bytes)
        out.caption = f"FFN layers of {size}, as the file stores them, in what is saved against f32 with all kept"
        out.caption_justify = "left"
    return out


def as_dict(report: Report) -> dict[str, Any]:
    """All numbers of the plan."""
    card = report.card
    return {
        "model": report.source.name,
        "context": report.context,
        "requests": report.requests,
        "device": "cuda" if report.gpu else "cpu",
        "card": None
        if card is None
        else {"name": card.name, "bytes": card.nbytes, "usable_bytes": card.usable, "nominal": card.nominal},
        "reserve_bytes": 0 if card is None else card.nbytes - card.usable,
        "captured_bytes": report.judged.estimate.captured,
        "dtype": report.weights.form,
        "weights_form": report.weights.label,
        "weights_bytes": report.weights.nbytes,
        "weights_why": report.weights.why,
        "weights_asked_bytes": report.weights.asked_bytes,
        "packed_on_gpu_bytes": report.weights.packed_on_gpu,
        "memory_bytes": report.memory,
        "workspace_bytes": report.judged.need.workspace,
        "staging_bytes": report.judged.need.staging,
        "checkpoint_bytes_each": report.judged.estimate.schema.checkpoint_bytes,
        "host_cache_bytes": report.host,
        "host_cache_given": report.host_given,
        "host_holds": [asdict(k) for k in report.kept],
        "budget": report.budget,
        "fits": report.judged.fits,
        "notes": report.notes,
        "suggestions": report.advice,
        "ffn_layer_bytes": report.source.ffn_layer_bytes,
        "ranks": None if report.ranks is None else [asdict(rank) for rank in report.ranks.parts],
        "cards": [of_card(over) for over in report.cards],
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
                        "pages": sum(stream_pages(report, i)),
                        "page_bytes": s.page_bytes,
                        "bytes": stream_bytes(report, choice)[i],
                    }
                    for i, s in enumerate(choice.estimate.schema.streams)
                ],
                "states": [
                    {"name": s.name, "layers": len(s.layers), "bytes": state_bytes(report, choice)[i]}
                    for i, s in enumerate(choice.estimate.schema.states)
                ],
                "kv_bytes": choice.need.pages,
                "kv_bytes_held": choice.need.held,
                "state_bytes": choice.need.state,
                "table_bytes": choice.need.tables,
                "cache_bytes": choice.need.cache,
                "workspace_bytes": choice.need.workspace,
                "checkpoints": choice.need.rows,
                "checkpoint_bytes": choice.need.checkpoints,
                "staging_bytes": choice.need.staging,
                "total_bytes": choice.total,
                "refused": choice.refused,
                "fits": choice.fits,
                "longest_context": choice.longest_context,
                "most_requests": choice.most_requests,
            }
            for choice in report.choices
        ],
    }
