"""What would fit where a plan does not: single changes that do, else several at once, each a command to run."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from hybridkv.cards import CARDS, FP8_KV, FP8_WEIGHTS, PACKED_WEIGHTS, Card
from hybridkv.commands.invocation import command_name
from hybridkv.commands.plan_estimate import Estimate
from hybridkv.commands.plan_weights import Weights, find_weights, form_weights
from hybridkv.models import family_of
from hybridkv.models.weight_forms import PACKED, held_today

if TYPE_CHECKING:
    from hybridkv.commands.plan import Report

SMALLER = ("q8_0", "fp8", "q6_k", "q5_k", "q4_k")  # forms to try, the largest first
BUDGET = 2048
MOST = 5  # suggestions


@dataclass(frozen=True)
class Try:
    """One setting, and whether it fits."""

    report: Report
    weights: Weights
    form: str | None  # of --weights; None: as it was
    estimate: Estimate
    requests: int
    context: int
    memory: int
    card: Card | None

    @property
    def fits(self) -> bool:
        """Whether all of it has room."""
        return self.estimate.need(self.requests, self.context).nbytes <= self.memory - self.weights.nbytes


def advice(report: Report, flags: list[str]) -> list[str]:
    """Commands that fit. `flags`: those that none of them changes."""
    assert report.memory is not None
    first = Try(
        report, report.weights, None, report.judged.estimate, report.requests, report.context, report.memory,
        report.card,
    )  # fmt: skip
    found: list[Try] = []
    for change in (_form, _kv, _budget, _context, _requests, _card):
        found += [tried for tried in change(first) if tried.fits][:1]
    if all(tried.card != first.card for tried in found):  # no single change is enough here
        found = _together(first) + found
    return [_command(tried, flags) for tried in found[:MOST]]


def _form(tried: Try) -> Iterator[Try]:
    """The largest smaller form that the engine holds and the card has kernels for."""
    if not tried.report.gpu:
        if tried.weights.dtype == "float32":
            source = tried.report.source
            half = find_weights(source, False, "bfloat16", "plain", False)
            yield replace(tried, weights=half, form="bf16", estimate=replace(tried.estimate, dtype="bfloat16"))
        return
    for form in SMALLER:
        least = FP8_WEIGHTS if form == "fp8" else PACKED_WEIGHTS if form in PACKED else (0, 0)
        fit_for_card = tried.card is None or tried.card.capability == (0, 0) or tried.card.capability >= least
        if not held_today(tried.report.source.config, form) or not fit_for_card:
            continue
        if form == "fp8" and tried.card is None:
            continue  # without a card it is not known whether it has FP8 matrices
        weights = form_weights(tried.report.source, form, tried.card)
        if weights.nbytes < tried.weights.nbytes:
            yield replace(tried, weights=weights, form=form)


def _kv(tried: Try) -> Iterator[Try]:
    has_fp8 = tried.card is None or tried.card.capability == (0, 0) or tried.card.capability >= FP8_KV
    if tried.estimate.cache.kv_dtype != "fp8" and has_fp8:
        yield replace(tried, estimate=_with(tried.estimate, kv_dtype="fp8"))


def _budget(tried: Try) -> Iterator[Try]:
    if tried.estimate.cache.budget is None and family_of(tried.report.source.config).supports("budget"):
        for bounded in (False, True):
            yield replace(tried, estimate=_with(tried.estimate, budget=BUDGET, bounded=bounded))


def _context(tried: Try) -> Iterator[Try]:
    """A shorter context: the longest that fits, as a round number of tokens."""
    longest = tried.estimate.longest_context(tried.requests, tried.memory - tried.weights.nbytes)
    least = 1024
    if least <= longest < tried.context:
        yield replace(tried, context=longest // least * least)


def _requests(tried: Try) -> Iterator[Try]:
    most = tried.estimate.most_requests(tried.context, tried.memory - tried.weights.nbytes)
    if 1 <= most < tried.requests:
        yield replace(tried, requests=most)


def _card(tried: Try) -> Iterator[Try]:
    """The smallest card that is large enough."""
    fp8 = tried.estimate.cache.kv_dtype == "fp8"
    for card in sorted(CARDS, key=lambda card: (card.mib, card.name)):
        packed = tried.form in PACKED or tried.weights.form == "packed"
        least = max(FP8_KV if fp8 else (0, 0), PACKED_WEIGHTS if packed else (0, 0), (8, 0))
        if card.usable > tried.memory and card.capability >= least and tried.report.gpu:
            yield replace(tried, card=card, memory=card.usable)


def _together(first: Try) -> list[Try]:
    """The first that fits of several changes at once, the gentlest first; a shorter context only where all of them do
    not help, and then the longest there is. None of them: the smallest card for the smallest weights.
    """
    mixed = [
        budget
        for form in (first, *_form(first))
        for kv in (form, *_kv(form))
        for budget in (kv, *_budget(kv))
        if budget is not first
    ]
    for tried in mixed:
        if tried.fits:
            return [tried]
    shorter = [short for tried in mixed for short in _context(tried)]
    if shorter:
        return [max(shorter, key=lambda tried: tried.context)]
    if any(tried.fits for tried in _card(first)):
        return []
    return [tried for form in reversed([*_form(first)]) for tried in _card(form) if tried.fits][:1]


def _with(estimate: Estimate, **changes: object) -> Estimate:
    return replace(estimate, cache=replace(estimate.cache, **changes))  # type: ignore[arg-type]


def _command(tried: Try, flags: list[str]) -> str:
    """The command line that plans it."""
    report, cache = tried.report, tried.estimate.cache
    words = [command_name(), "plan", shlex.quote(report.named)]
    if tried.card is not None:
        size = tried.card.capability == (0, 0)
        words += ["--card", shlex.quote(f"{tried.card.mib / 1024:g}GB" if size else tried.card.name)]
    else:
        words += ["--memory", shlex.quote(str(report.memory_given))]
    if tried.form is not None:
        words += ["--weights", tried.form] + ([] if report.gpu else ["--device", "cpu"])
    else:
        words += report.weight_flags
    words += ["--context", tokens(tried.context)]
    words += ["--requests", str(tried.requests)] if tried.requests > 1 else []
    if cache.kv_dtype != report.judged.kv_dtype or report.kv_named:
        words += ["--kv-dtype", cache.kv_dtype]
    if cache.budget is not None:
        words += ["--budget", str(cache.budget)] + (["--bounded"] if cache.bounded and "--bounded" not in flags else [])
    return " ".join(words + [shlex.quote(flag) for flag in flags])


def tokens(count: int) -> str:
    """32768 -> '32k', 1000 -> '1000'."""
    return f"{count // 1024}k" if count % 1024 == 0 else str(count)
