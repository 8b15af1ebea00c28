"""`hybridkv plan`: what a model and a context cost in memory, before anything is downloaded or loaded.

Every number comes from the cache schema that the model itself runs with, and from the list of weights that its loading
code is tested against. No torch is imported, and no GPU is needed to plan for one.

    plan_source     the model: a known name, a config.json, a GGUF file's header
    plan_weights    bytes of its weights in the form asked for
    plan_estimate   bytes of cache and workspace, and what fits
    plan_parallel   a rank of several GPUs (--tp), and several where one is not enough
    plan_advice     what would fit where it does not
    plan_tables     what is printed; plan_page: the page of --html
"""

from __future__ import annotations

import functools
import json
import re
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, BadParameter, Option

from hybridkv.commands import completion
from hybridkv.commands.declaring import with_options
from hybridkv.commands.options import ModelOptions
from hybridkv.commands.panels import MEMORY
from hybridkv.commands.reuse_options import ReuseOptions
from hybridkv.config import KV_DTYPES, WEIGHT_DTYPES, CacheConfig, EngineConfig, ReuseConfig
from hybridkv.errors import HybridKVError

if TYPE_CHECKING:
    from hybridkv.cards import Card
    from hybridkv.commands.plan_estimate import Estimate, Need
    from hybridkv.commands.plan_parallel import Ranks
    from hybridkv.commands.plan_source import Source
    from hybridkv.commands.plan_weights import Weights

BUDGET = 2048  # where none is named
HOST_SHOWN = 16 << 30  # bytes on the host, where none are named: how many there are depends on the machine
_MODEL = "a known name (Qwen3.5-27B), a folder with a config.json, a .gguf file; without it SmolLM2-135M-Instruct"
_WEIGHTS = (
    "form of the weights on a GPU: bf16, f32; fp8 (projections); q8_0, q6_k, q5_k, q4_k (projections and experts as a "
    "GGUF file of that format has them; a Q4_K_M file mixes q4_k and q6_k); mxfp4 (experts); released (DeepSeek-V4's "
    "FP8 and FP4 as they are). bf16, or as the .gguf file has them"
)


@dataclass(frozen=True)
class PlanOptions(ModelOptions, ReuseOptions):
    """What is planned. Options of the other commands mean the same here; a GPU is meant unless --device is cpu."""

    tp: Annotated[int, Option("--tp", metavar="N", help="GPUs that share the model; --card, --memory: of one")] = 1
    model: Annotated[
        str | None,
        Option("--model", "-m", metavar="PATH", help="the same as MODEL", autocompletion=completion.model),
    ] = None
    device: Annotated[str, Option("--device", metavar="NAME", help="cuda or cpu, whatever this machine has")] = "auto"
    context: Annotated[  # type: ignore[assignment]
        str | None,
        Option("--context", metavar="TOKENS", help="of each request, such as 32768 or 32k; the model's own limit"),
    ] = None
    memory: Annotated[
        str | None,
        Option("--memory", metavar="SIZE", help="for weights, cache and workspace together, such as 20GiB"),
    ] = None
    host_cache: Annotated[
        str | None,
        Option(
            "--host-cache",
            metavar="SIZE",
            help="memory on the host for caches that wait to be used again; a quarter of what is free, 1GiB on a CPU",
            rich_help_panel=MEMORY,
        ),
    ] = None


@dataclass(frozen=True)
class Choice:
    """One KV dtype, and what fits with it: nothing where it is refused. The last three are None when no memory was
    named.
    """

    estimate: Estimate
    need: Need  # of the requests and the context asked for
    total: int  # with the weights
    refused: str | None = None  # a clause: why the engine does not take this dtype on the card
    fits: bool | None = None
    longest_context: int | None = None  # for the requests asked for
    most_requests: int | None = None  # of the context asked for

    @property
    def kv_dtype(self) -> str:
        """Of the choice."""
        return self.estimate.cache.kv_dtype

    @property
    def index_dtype(self) -> str | None:
        """The dtype of the keys by which DeepSeek-V4 chooses entries."""
        return next((layer.index.name for layer in self.estimate.schema.compressed if layer.index), None)

    @property
    def token_bytes(self) -> float:
        """Bytes of pages that one more token takes in the long run."""
        streams = self.estimate.schema.streams
        return sum(s.streams * s.page_bytes / (s.entries_per_page * s.tokens_per_entry) for s in streams)


@dataclass(frozen=True)
class Buy:
    """One KV dtype with one budget, for the context and the requests asked for. Bytes are those of all requests."""

    kv_dtype: str
    budget: int | None
    bounded: bool
    held_bytes: int  # pages once the prompts are read
    peak_bytes: int  # pages while the last of the prompts is read: they are read one after the other
    state_bytes: int
    longest_context: int | None = None
    most_requests: int | None = None
    ffn_layers: int | None = None  # of the file's, in the bytes that the peak leaves free compared with f32, all kept


@dataclass(frozen=True)
class Kept:
    """How many conversations of one kind the host holds while they wait for a next turn."""

    kv_dtype: str
    tokens: int
    budget: int | None  # entries a stream that were kept; None: all
    conversations: int


@dataclass(frozen=True)
class Report:
    """All that is shown."""

    source: Source
    requests: int
    context: int
    weights: Weights
    gpu: bool
    card: Card | None
    memory: int | None  # bytes for weights, cache and workspace
    budget: int | None  # that was asked for
    choices: list[Choice]
    buys: list[Buy]
    notes: list[str]
    advice: list[str]  # commands that fit, where this one does not
    named: str  # the model, as it was asked for
    memory_given: str | None  # as --memory has it
    weight_flags: list[str]  # that were given
    kv_named: bool  # whether --kv-dtype was given
    host: int  # bytes on the host that `kept` is about
    host_given: bool  # whether --host-cache was given
    kept: list[Kept]
    ranks: Ranks | None = None  # of --tp: all numbers above are of one rank
    cards: list[Report] = field(default_factory=list)  # of one GPU and of several, where one does not hold it

    @property
    def judged(self) -> Choice:
        """The choice that the verdict is about: the KV dtype that was asked for, or that LLM would take."""
        usual = {"bfloat16": "bf16", "float32": "f32"}[self.weights.dtype]
        return next((c for c in self.choices if c.kv_dtype == usual), self.choices[0])


@with_options
def plan(
    options: PlanOptions,
    name: Annotated[
        str | None, Argument(metavar="MODEL", help=_MODEL, show_default=False, autocompletion=completion.model)
    ] = None,
    page: Annotated[str | None, Argument(metavar="FILE", help="of --html", show_default=False)] = None,
    card: Annotated[
        str | None,
        Option(
            "--card",
            metavar="CARD",
            help='a graphics card ("RTX 4090", h200) or its size (24GB: 24 GiB)',
            autocompletion=completion.card,
        ),
    ] = None,
    weights: Annotated[str | None, Option("--weights", metavar="FORM", help=_WEIGHTS)] = None,
    requests: Annotated[int | None, Option("--requests", metavar="N", help="the same as --max-requests; 1")] = None,
    experts: Annotated[
        str, Option("--experts", metavar="HOW", help="with --tp: cut by width, dealt out whole, or auto")
    ] = "auto",
    as_json: Annotated[bool, Option("--json", help="print one JSON object")] = False,
    html: Annotated[bool, Option("--html", help="write a page with sliders for all this to FILE; plan.html")] = False,
) -> None:
    """Show the bytes of weights, KV cache and state for a model and a context, on any card.

    Nothing is loaded, and no GPU is needed. Without --kv-dtype all are shown. With --card or --memory it says what
    fits: the longest context, the most requests, and what would fit where it does not, over several such GPUs, too.
    With --memory, --card or --budget a second table shows what each KV dtype and budget buys; without --budget it takes
    2048 tokens. With --tp all of it is of one GPU of several (tensor parallelism).
    """
    named = [given for given in (name, options.model, page) if given is not None]
    files = [given for given in named if html and given.endswith(".html")]
    models = list(dict.fromkeys(given for given in named if given not in files))
    if len(models) > 1 or len(files) > 1:
        raise BadParameter(f"one model{' and one file that ends in .html' if html else ''} can be given, not {named}")
    options = replace(options, model=models[0] if models else None)
    if html and options.tp != 1:
        raise BadParameter("the page of --html is of one GPU: leave out --tp")
    if html and as_json:
        raise BadParameter("--html writes a page and --json prints an object: give one of them")
    if html:
        from hybridkv.commands.plan_page import write_page

        written = write_page(Path(files[0] if files else "plan.html"), options.model)
        print(f"{written}: open it in a browser; it needs no network")
        return
    many = next((n for n in (requests, options.max_requests) if n is not None), 1)
    report = make_report(options, many, card, weights, experts)
    if as_json:
        from hybridkv.commands.plan_tables import as_dict

        print(json.dumps(as_dict(report)))
        return
    from hybridkv.commands.plan_tables import show

    show(report, buys=report.memory is not None or options.budget is not None)


def read_tokens(text: str | int | None) -> int | None:
    """A number of tokens: 32768, 32k, 128K, 1M. Thousands are of 1024."""
    if text is None or isinstance(text, int):
        return text
    match = re.fullmatch(r"\s*(\d{1,12})\s*([km]?)\s*", text.lower())
    if match is None:
        raise BadParameter(f"--context takes a number of tokens such as 32768 or 32k, not {text[:40]!r}")
    return int(match[1]) << {"": 0, "k": 10, "m": 20}[match[2]]


def make_report(
    options: PlanOptions,
    requests: int,
    card_name: str | None = None,
    form: str | None = None,
    experts: str = "auto",
) -> Report:
    """The plan of what the options ask for, and what would fit where it does not."""
    report = find_report(options, requests, card_name, form, experts)
    if report.judged.fits is not False:
        return report
    from hybridkv.commands.plan_advice import advice

    if options.tp == 1 and report.gpu:
        from hybridkv.commands.plan_parallel import find_cards

        def over(tp: int) -> Report:
            """The plan with --tp."""
            return find_report(replace(options, tp=tp), requests, card_name, form, experts)

        report = replace(report, cards=find_cards(report, over))

    @functools.cache  # several suggestions try all cards
    def weigh(there: Card | None) -> Weights:
        """The weights that were asked for, as they are held on another card."""
        return choose_weights(options, report.source, report.gpu, there, form)

    shared = [] if experts == "auto" else ["--experts", experts]
    return replace(report, advice=advice(report, given(options) + shared, weigh))


def find_report(options: PlanOptions, requests: int, card_name: str | None, form: str | None, experts: str) -> Report:
    """The plan without what else would fit."""
    from hybridkv.cache.rounded_states import checkpoint_dtype_of
    from hybridkv.cache.tier_sizes import CPU_LIMIT
    from hybridkv.cards import find_card
    from hybridkv.commands.plan_source import find_source
    from hybridkv.models import check_exact, family_of

    tp = options.tp
    card = None if card_name is None else find_card(card_name)
    if card is not None and options.memory is not None:
        raise BadParameter("--card says how much memory there is: leave out --memory, or --card")
    given_host: int | str | None = 0 if options.host_cache == "0" else options.host_cache
    limits = EngineConfig(requests, read_tokens(options.context), options.memory, host_cache=given_host)
    host = limits.host_bytes
    gpu = on_gpu(options.device, card)
    source = whole = find_source(options.model)
    if tp != 1:
        from hybridkv.commands.plan_parallel import largest_rank

        source = largest_rank(whole, options, gpu, form, tp, experts)
    config = source.config
    reuse = options.config()
    check_exact(config, options.exact, options.state_dtype, checkpoint_dtype_of(reuse))
    evicts = family_of(config).supports("budget")
    if not evicts and options.budget is not None:
        raise HybridKVError(
            f"--budget is not for {config.architecture}: it compresses its cache itself and never evicts"
        )
    weights = choose_weights(options, source, gpu, card, form)
    context = limits.max_context or config.max_positions
    if context > config.max_positions:
        raise HybridKVError(f"max_context {context} exceeds the model's own limit of {config.max_positions} tokens")
    memory = limits.memory_bytes if card is None else card.usable
    cache = options.cache()
    evicting = (replace(options, budget=BUDGET) if evicts and options.budget is None else options).cache()
    if tp != 1:
        from hybridkv.parallel.rank_bytes import reuse_over_ranks

        reuse = reuse_over_ranks(reuse, cache)
    choices = find_choices(source, cache, weights, gpu, options.exact, requests, context, memory, card, reuse, host)
    buys = []
    if evicts:
        kinds = [choice.kv_dtype for choice in choices if choice.refused is None]
        room = None if memory is None else memory - weights.nbytes
        buys = find_buys(source, evicting, weights, gpu, options.exact, kinds, requests, context, room, reuse, host)
    shown = host if host is not None else HOST_SHOWN if gpu else CPU_LIMIT
    report = Report(
        source=source,
        requests=requests,
        context=context,
        weights=weights,
        gpu=gpu,
        card=card,
        memory=memory,
        budget=cache.budget,
        choices=choices,
        buys=buys,
        notes=[],
        advice=[],
        named=options.model or source.name,
        memory_given=options.memory,
        weight_flags=weight_flags(options, form),
        kv_named=cache.kv_dtype != "auto",
        host=shown,
        host_given=host is not None,
        kept=find_kept(choices, evicting.budget if evicts else None, context, shown, gpu) if tp == 1 else [],
    )
    report = replace(report, notes=notes(report))
    if tp != 1:
        from hybridkv.commands.plan_parallel import find_ranks

        def held(part: Source) -> Weights:
            """The weights of one rank."""
            return choose_weights(options, part, gpu, card, form)

        report = replace(report, ranks=find_ranks(report, whole, options, form, tp, experts, held))
    return report


def on_gpu(device: str, card: Card | None) -> bool:
    """Whether a GPU is planned for. None is needed for that."""
    kind = device.split(":")[0]
    if kind not in ("auto", "cuda", "cpu"):
        raise HybridKVError(f"device {device!r} is not supported; use auto, cpu or cuda")
    if kind == "cpu" and card is not None:
        raise BadParameter(f"--device cpu does not go with --card {card.name}")
    return kind != "cpu"


def choose_weights(options: ModelOptions, source: Source, gpu: bool, card: Card | None, form: str | None) -> Weights:
    """Bytes of the weights as --weights asks for them, or --dtype and --weight-dtype."""
    from hybridkv.commands.plan_weights import check_form, find_weights, form_weights
    from hybridkv.config import MODEL_DTYPES
    from hybridkv.models.weight_forms import DTYPES, FORMS, RELEASED, has_experts

    if options.dtype not in ("auto", *MODEL_DTYPES):
        raise HybridKVError(f"dtype {options.dtype!r} is not supported; choose auto, {', '.join(MODEL_DTYPES)}")
    if options.weight_dtype not in WEIGHT_DTYPES:
        raise HybridKVError(
            f"weight_dtype {options.weight_dtype!r} is not supported; choose {' or '.join(WEIGHT_DTYPES)}; plan takes "
            "other forms as --weights"
        )
    if form is None:
        return find_weights(source, gpu, options.dtype, options.weight_dtype, options.exact, card)
    form = check_form(form)
    if form == RELEASED and options.dtype == options.weight_dtype == "auto" and not options.exact:
        return find_weights(source, gpu, "auto", RELEASED, False)
    if form == "mxfp4" and not has_experts(source.config, source.has):
        raise HybridKVError(
            f"--weights mxfp4 is a form of experts, and {source.name} has none; choose "
            f"{', '.join(other for other in FORMS if other != form)}"
        )
    if options.dtype != "auto" or options.weight_dtype != "auto":
        raise BadParameter("--weights says the form of the weights: leave out --dtype and --weight-dtype")
    if form in DTYPES and (not gpu or options.exact):
        return find_weights(source, gpu, DTYPES[form], "plain", options.exact)
    if not gpu:
        raise HybridKVError(f"--weights {form} is for a GPU; on a CPU weights are bf16 or f32")
    if options.exact:
        raise HybridKVError(f"exact mode computes with plain weights: --weights bf16 or f32, not {form}")
    return form_weights(source, form, card)


def notes(report: Report) -> list[str]:
    """Sentences about what the engine does not do, on this card or at all, and that the verdict does not say; about
    weights in their released form; and what was asked of checkpoints and changes nothing.
    """
    from hybridkv.cache.rounded_states import checkpoint_dtype_of, why_not_rounded
    from hybridkv.commands.plan_weights import card_shares

    estimate = report.judged.estimate
    unrounded = why_not_rounded(estimate.schema, checkpoint_dtype_of(estimate.reuse))
    refused = [c.refused for c in report.choices if c.refused and c is not report.judged]
    about = [note for note in (report.weights.note, card_shares(report.weights, report.source)) if note]
    return about + [f"{clause}." for clause in (*refused, *([unrounded] if unrounded else []))]


def given(options: ModelOptions) -> list[str]:
    """The flags that were given, as a suggestion repeats them: all but what it may change."""
    usual, found = PlanOptions(), []
    changed = ("model", "dtype", "weight_dtype", "kv_dtype", "max_requests", "context", "memory", "budget", "device")
    for f in fields(usual):
        value = getattr(options, f.name)
        if f.name not in changed and value != getattr(usual, f.name):
            flag = f"--{'no-' if value is False else ''}{f.name.replace('_', '-')}"
            found += [flag] + ([] if isinstance(value, bool) else [str(value)])
    return found


def weight_flags(options: ModelOptions, form: str | None) -> list[str]:
    """The flags that chose the weights, and the device."""
    found = [] if form is None else ["--weights", form]
    for name in ("dtype", "weight_dtype", "device"):
        value = getattr(options, name)
        found += [] if value == "auto" else [f"--{name.replace('_', '-')}", value]
    return found


def find_kept(choices: list[Choice], budget: int | None, context: int, host: int, gpu: bool) -> list[Kept]:
    """Whole conversations of the context asked for, and such as have kept a budget, that the host holds. On a CPU it
    holds their state alone.
    """
    from hybridkv.cache.tier_sizes import conversations_held

    found = []
    budgets = (None,) if budget is None else (None, budget)
    kinds = [(c, kept) for kept in budgets for c in choices if not c.refused]
    for choice, kept in kinds if gpu else kinds[:1]:
        if kept is not None and kept >= context:
            continue
        many = conversations_held(choice.estimate.schema, context if kept is None else kept, host, pages=gpu)
        if many is not None:
            found.append(Kept(choice.kv_dtype, context, kept, many))
    return found


def kv_dtypes(cache: CacheConfig) -> tuple[str, ...]:
    """The KV dtypes that are shown."""
    return tuple(KV_DTYPES) if cache.kv_dtype == "auto" else (cache.kv_dtype,)


def find_choices(
    source: Source,
    cache: CacheConfig,
    weights: Weights,
    gpu: bool,
    exact: bool,
    requests: int,
    context: int,
    memory: int | None,
    card: Card | None,
    reuse: ReuseConfig | None,
    host: int | None,
) -> list[Choice]:
    """One for each KV dtype that may be meant."""
    from hybridkv.cards import FP8_KV
    from hybridkv.commands.plan_estimate import Estimate
    from hybridkv.commands.plan_weights import KV_NEED

    choices = []
    for kv_dtype in kv_dtypes(cache):
        settings = replace(cache, kv_dtype=kv_dtype)
        how = (weights.dtype, gpu, exact, reuse, memory, host, weights.coded)
        estimate = Estimate(source.config, settings, *how)
        need = estimate.chosen(requests, context, None if memory is None else memory - weights.nbytes)
        refused = card.lacks(KV_NEED, FP8_KV) if card is not None and kv_dtype == "fp8" else None
        choice = Choice(estimate, need, weights.nbytes + need.nbytes, refused)
        if refused:
            choice = replace(choice, fits=False, longest_context=0, most_requests=0)
        elif memory is not None:
            room = memory - weights.nbytes
            choice = replace(
                choice,
                fits=need.nbytes <= room,
                longest_context=estimate.longest_context(requests, room),
                most_requests=estimate.most_requests(context, room),
            )
        choices.append(choice)
    return choices


def find_buys(
    source: Source,
    evicting: CacheConfig,
    weights: Weights,
    gpu: bool,
    exact: bool,
    kv_dtypes: list[str],
    requests: int,
    context: int,
    room: int | None,
    reuse: ReuseConfig | None,
    host: int | None,
) -> list[Buy]:
    """Each KV dtype with each budget to compare: none, the one asked for, and that one while the prompt is read too."""
    from hybridkv.commands.plan_estimate import Estimate

    budgets: list[tuple[int | None, bool]] = [(None, False), (evicting.budget, True)]
    if not evicting.bounded:
        budgets.insert(1, (evicting.budget, False))

    def estimate(kv_dtype: str, budget: int | None, bounded: bool) -> Estimate:
        settings = replace(evicting, kv_dtype=kv_dtype, budget=budget, bounded=bounded, decode_every=0)
        return Estimate(source.config, settings, weights.dtype, gpu, exact, reuse, host=host, codes=weights.coded)

    whole = estimate("f32", None, False).need(requests, context)
    buys = []
    for kv_dtype in kv_dtypes:
        for budget, bounded in budgets:
            found = estimate(kv_dtype, budget, bounded)
            need = found.need(requests, context)
            buy = Buy(kv_dtype, budget, bounded, need.held, need.pages, need.state)
            if room is not None:
                longest, most = found.longest_context(requests, room), found.most_requests(context, room)
                buy = replace(buy, longest_context=longest, most_requests=most)
            if source.ffn_layer_bytes:
                freed = max(whole.pages + whole.state - need.pages - need.state, 0)  # page tables are alike in all
                buy = replace(buy, ffn_layers=min(freed // source.ffn_layer_bytes, source.config.layers))
            buys.append(buy)
    return buys
