"""`hybridkv plan --tp N`: what one of N ranks holds, and what they send each other; and the numbers of cards that are
tried where one does not hold a model. Nothing heavy is imported.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from hybridkv.commands.plan_source import Source
from hybridkv.dtypes import itemsize
from hybridkv.errors import HybridKVError
from hybridkv.eviction.sizes import spread_of
from hybridkv.kernels.linear.packed_planes import BLOCK, GROUP
from hybridkv.models.config import ModelConfig
from hybridkv.models.weight_forms import PACKED, RELEASED, released_forms
from hybridkv.parallel.block_parts import block_shard
from hybridkv.parallel.cuts import share_of
from hybridkv.parallel.rank_bytes import block_of, rank_packed_bytes
from hybridkv.parallel.shard import Shard, check_size, in_exact_mode, kv_copies, local, sizes_that_work
from hybridkv.planner import human

if TYPE_CHECKING:
    from hybridkv.commands.options import ModelOptions
    from hybridkv.commands.plan import Report
    from hybridkv.commands.plan_weights import Weights

LINKS = {"NVLink at 350 GB/s": 350e9, "PCIe 4 at 24 GB/s": 24e9}  # what a link may carry: assumed, not measured
SHOWN = 8  # cards; more only where these are not enough


@dataclass(frozen=True)
class Rank:
    """Bytes of one rank."""

    weights: int
    pages: int
    state: int
    tables: int
    workspace: int
    total: int


@dataclass(frozen=True)
class Ranks:
    """All ranks of a plan, and sentences about them."""

    parts: list[Rank]
    lines: list[str]

    @property
    def size(self) -> int:
        """How many there are."""
        return len(self.parts)


def rank_of(source: Source, options: ModelOptions, gpu: bool, form: str | None, shard: Shard) -> Source:
    """A model as one rank has it."""
    config = source.config
    packs = gpu and not options.exact and options.weight_dtype == "auto" and options.dtype != "float32"
    if form in PACKED:
        shard = replace(shard, block=GROUP if form == "q8_0" else BLOCK)
    elif form is None and packs and source.cuts:
        shard = replace(shard, block=block_of(source.cuts))
    elif RELEASED in (form, options.weight_dtype) or (form is None and packs and source.blocks):
        shard = block_shard(config, shard, source.has, source.blocks or released_forms(config, source.has))
    shard = in_exact_mode(shard) if options.exact else shard
    return replace(
        source,
        config=local(config, shard),
        packed=rank_packed_bytes(config, shard, source.has, source.cuts),
        codes4=frozenset(),  # not cut: parallel/loader.py
        ffn_layer_bytes=None,
        whole=config,
        share=partial(share_of, config, shard, exact=options.exact),
        shard=shard,
    )


def largest_rank(
    source: Source, options: ModelOptions, gpu: bool, form: str | None, tp: int, experts: str = "auto"
) -> Source:
    """The rank whose weights take most: the first, which gets what does not divide. Refuses numbers that do not fit."""
    check_size(source.config, tp, options.exact, experts)
    return rank_of(source, options, gpu, form, Shard(0, tp, experts))


def find_ranks(
    report: Report,
    source: Source,
    options: ModelOptions,
    form: str | None,
    tp: int,
    experts: str,
    held: Callable[[Source], Weights],
) -> Ranks:
    """What each rank takes. Caches are alike on all of them; widths and the vocabulary may be uneven."""
    need, parts = report.judged.need, []
    for rank in range(tp):
        weights = held(rank_of(source, options, report.gpu, form, Shard(rank, tp, experts))).nbytes
        parts.append(Rank(weights, need.pages, need.state, need.tables, need.workspace, weights + need.nbytes))
    return Ranks(parts, lines(report, source.config, parts, options.exact))


def find_cards(alone: Report, over: Callable[[int], Report]) -> list[Report]:
    """The plan of one card and those of more of them, `over` so many: all numbers that work up to SHOWN, and on until
    one fits. Empty: no number works, or no number helps.
    """
    found: list[Report] = []
    for size in [] if alone.judged.refused else sizes_that_work(alone.source.config):
        if size > SHOWN and any(report.judged.fits for report in found):
            break
        with suppress(HybridKVError):  # codes of files that are not cut so
            found.append(over(size))
    return [alone, *found] if found else []


def lines(report: Report, config: ModelConfig, parts: list[Rank], exact: bool) -> list[str]:
    """What a table of one rank does not say."""
    tp, found = len(parts), []
    copies = kv_copies(config, tp)
    if config.v4 is not None:
        found.append(f"Its cache is whole on each of the {tp} ranks: one latent serves all heads.")
    elif copies > 1 and config.attention_layers:
        found.append(f"Each KV head is on {copies} of {tp} ranks: pages are {copies} x an even share.")
    cache = report.judged.estimate.cache
    if cache.budget is not None and spread_of(cache.policy) == "heads" and (shares := tp // copies) > 1:
        room = ", and its pools are made for that" if cache.bounded else ""
        found.append(f"Heads share the budget: a rank may keep up to {shares} x its share{room}.")
    least, most = min(rank.weights for rank in parts), max(rank.weights for rank in parts)
    if least != most:
        found.append(f"The weights are {human(most)} on the largest rank and {human(least)} on the smallest.")
    if exact:
        found.append("Exact mode gathers inputs and outputs instead of summing: it is for checking, not for speed.")
        return found
    sums = 2 * config.layers + 1
    each = config.hidden * itemsize(report.weights.dtype)
    found.append(
        f"A step sums {sums} times over the ranks, {human(each)} a token and sum: {human(sums * each)} a token in all."
    )
    through = 2 * (tp - 1) / tp * sums * each * report.context
    taken = ", ".join(f"{through / speed:.2f} s over {name}" for name, speed in LINKS.items())
    found.append(f"A prompt of {report.context} tokens sends {human(through)} through each link: {taken} (computed).")
    return found
