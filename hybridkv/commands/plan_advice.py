"""What would fit where a plan does not: single changes that do, else several at once, each a command to run."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from hybridkv.cards import CARDS, FP8_KV, PACKED_WEIGHTS, Card
from hybridkv.commands.invocation import command_name
from hybridkv.commands.plan_estimate import Estimate
from hybridkv.commands.plan_weights import KV_NEED, Weights, card_lacks, find_weights, form_weights
from hybridkv.models import family_of
from hybridkv.models.weight_forms import held_today

if TYPE_CHECKING:
    from hybridkv.commands.plan import Report

SMALLER = ("q8_0", "fp8", "q6_k", "q5_k", "q4_k")  # forms to try, the largest first
BUDGET = 2048
MOST = 5  # suggestions, and one more: several such cards


@dataclass(frozen=True)
class Try:
    """One setting, and whether it fits."""

    report: Report
    weights: Weights
    form: str | None  # of --weights; None: as it was
    weigh: Callable[[Card | None], Weights]  # the weights as they were asked for, on a card
    estimate: Estimate
    requests: int
    context: int
    memory: int
    card: Card | None

    @property
    def fits(self) -> bool:
        """Whether all of it has room."""
        return self.estimate.need(self.requests, self.context).nbytes <= self.memory - self.weights.nbytes


def advice(report: Report, flags: list[str], weigh: Callable[[Card | None], Weights]) -> list[str]:
    """Commands that fit. `flags`: those that none of them changes; `weigh`: the weights that were asked for, as a card
    holds them.
    """
    assert report.memory is not None
    asked = first = Try(
        report, report.weights, None, weigh, report.judged.estimate, report.requests, report.context, report.memory,
        report.card,
    )  # fmt: skip
    if report.judged.refused:
        first = replace(asked, estimate=_with(asked.estimate, kv_dtype="bf16"))
    found = [first] if report.judged.refused and first.fits else []
    for change in () if found else (_form, _kv, _budget, _context, _requests):
        found += [tried for tried in change(first) if tried.fits][:1]
    found += [tried for tried in _card(asked) if tried.fits][:1]
    if all(tried.card != first.card for tried in found):  # no single change is enough here
        found = _together(first) + found
    commands = [_command(tried, flags) for tried in found[:MOST]]
    least = next((over.ranks.size for over in report.cards if over.ranks is not None and over.judged.fits), None)
    if least is None:
        return commands
    held = None if report.weights == weigh(None) else "bf16"  # what this card has no kernels for is kept in bf16
    return [*commands, _command(replace(asked, form=held), [*flags, "--tp", str(least)])]


def _form(tried: Try) -> Iterator[Try]:
    """The largest smaller form that the engine holds and the card has kernels for."""
    if not tried.report.gpu:
        if tried.weights.dtype == "float32":
            source = tried.report.source
            half = find_weights(source, False, "bfloat16", "plain", False)
            yield replace(tried, weights=half, form="bf16", estimate=replace(tried.estimate, dtype="bfloat16"))
        return
    for form in SMALLER:
        if not held_today(tried.report.source.config, form) or card_lacks(tried.card, form):
            continue
        if form == "fp8" and tried.card is None:
            continue  # without a card it is not known whether it has FP8 matrices
        weights = form_weights(tried.report.source, form, tried.card)
        if weights.nbytes < tried.weights.nbytes:
            yield replace(tried, weights=weights, form=form)


def _kv(tried: Try) -> Iterator[Try]:
    if tried.estimate.cache.kv_dtype != "fp8" and not (tried.card and tried.card.lacks(KV_NEED, FP8_KV)):
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
    """Larger cards that hold the weights as asked for, the smallest first; where this one does not, or refuses the KV
    dtype, smaller ones too.
    """
    report = tried.report
    if not report.gpu:
        return
    least = max(FP8_KV if tried.estimate.cache.kv_dtype == "fp8" else (0, 0), PACKED_WEIGHTS)
    unable = report.judged.refused is not None or report.weights != tried.weigh(None)
    there = tried.weigh if tried.form is None else partial(form_weights, report.source, tried.form)
    for card in sorted(CARDS, key=lambda card: (card.mib, card.name)):
        weights = there(card)
        if (unable or card.usable > tried.memory) and card.capability >= least and weights == there(None):
            yield replace(tried, weights=weights, card=card, memory=card.usable)


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
        mib = tried.card.mib
        size = f"{mib}MiB" if mib % 1024 else f"{mib // 1024}GB"
        words += ["--card", shlex.quote(size if tried.card.by_size else tried.card.name)]
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
