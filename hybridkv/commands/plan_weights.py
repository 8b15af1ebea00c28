"""The weights of a plan: their bytes in the form that the options ask for, and whether the engine holds them so."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

from hybridkv.cards import FP8_WEIGHTS, PACKED_WEIGHTS, Card
from hybridkv.commands.plan_source import Source
from hybridkv.errors import HybridKVError
from hybridkv.kernels.linear.block_form import BlockForm
from hybridkv.models import check_fp8
from hybridkv.models.weight_forms import DTYPES, FORMS, PACKED, RELEASED, held_today, released_forms
from hybridkv.parallel.block_parts import block_shard, rank_forms
from hybridkv.parallel.rank_bytes import rank_model_bytes
from hybridkv.parallel.shard import Shard, sizes_that_work
from hybridkv.planner import human

LABELS = {"bfloat16": "bf16", "float32": "f32", "q8_0": "Q8_0", "q6_k": "Q6_K", "q5_k": "Q5_K", "q4_k": "Q4_K"}

CARDS = (1, 2, 4, 8)
FP8_NEED, PACKED_NEED, KV_NEED = "FP8 weights need", "packed weights need", "KV fp8 needs"  # how clauses begin


@dataclass(frozen=True)
class Weights:
    """Bytes of a model's weights, as the engine holds them there."""

    nbytes: int
    form: (
        str  # bfloat16, float32, fp8, a form of --weights, packed (a GGUF file's own); "q4_k as bfloat16" where another
    )
    # is held, "q4_k/bfloat16" where experts are in another
    dtype: str  # of activations
    why: str | None = None  # a clause: why they are not held in the form that was asked for
    asked: str | None = None  # that form
    asked_bytes: int | None = None  # what they would take in it
    packed_on_gpu: int | None = None  # of a GGUF file that is planned for a CPU

    @property
    def label(self) -> str:
        """The form in a word."""
        asked, _, held = self.form.partition(" as ")
        if held and self.why is None:
            return f"{LABELS[held]} ({asked})"
        return "/".join(LABELS.get(part, part) for part in (held or asked).split("/"))

    @property
    def coded(self) -> bool:
        """Whether they are codes with a scale for each block."""
        return self.form == RELEASED

    @property
    def note(self) -> str | None:
        """One sentence, where the engine does not hold them as asked for."""
        if self.why is None or self.asked is None:
            return None
        held, asked = human(self.nbytes), human(self.asked_bytes or 0)
        start = self.why[0].upper() + self.why[1:]
        return f"{start}: weights are kept in {self.label}, {held}; in {self.asked} they would take {asked}."


def form_weights(source: Source, form: str, card: Card | None = None) -> Weights:
    """On a GPU, in a form that --weights names, or in what the engine holds instead of it on this card."""
    config = source.config
    nbytes, dtype, label = source.form_bytes(form), DTYPES.get(form, "bfloat16"), LABELS.get(form, form)
    plain = source.form_bytes("bf16")
    if why := card_lacks(card, form):
        return Weights(plain, f"{form} as bfloat16", dtype, why, label, nbytes)
    if held_today(config, form):
        return Weights(nbytes, DTYPES.get(form, form), dtype)
    what = "this model's experts" if config.v4 is None else "DeepSeek-V4"
    why = f"the engine does not hold {what} in {label} yet"
    if config.v4 is None and form in PACKED:  # all but the experts
        return Weights(source.form_bytes(form, False), f"{form}/bfloat16", dtype, why, label, nbytes)
    return Weights(plain, f"{form} as bfloat16", dtype, why, label, nbytes)


def needed(form: str) -> tuple[str, tuple[int, int]]:
    """What a form needs of a card, in words, and the least compute capability that has it."""
    if form == "fp8":
        return FP8_NEED, FP8_WEIGHTS
    return PACKED_NEED, PACKED_WEIGHTS if form in (*PACKED, "packed", RELEASED) else (0, 0)


def card_lacks(card: Card | None, form: str) -> str | None:
    """Why a card cannot compute with weights in this form, or None. Without a card it can."""
    return None if card is None else card.lacks(*needed(form))


def check_form(form: str) -> str:
    """A form of --weights, spelled in any case."""
    found = form.lower().replace("-", "_")
    found = {"bfloat16": "bf16", "float32": "f32", "fp32": "f32"}.get(found, found)
    if found in ("q4_k_m", "q4_k_s", "q5_k_m", "q5_k_s"):
        raise HybridKVError(
            f"--weights {form[:40]} is a mixture of formats, another for every model: plan {found[:4]} and q6_k, "
            "between which it lies, or give the .gguf file"
        )
    if found not in (*FORMS, RELEASED):
        raise HybridKVError(f"--weights {form[:40]!r} is not known; choose {', '.join((*FORMS, RELEASED))}")
    return found


def find_weights(
    source: Source, gpu: bool, dtype: str, weight_dtype: str, exact: bool, card: Card | None = None
) -> Weights:
    """As `LLM` with these options holds them. dtype: auto, float32 or bfloat16."""
    config = source.config
    device = "cuda" if gpu else "cpu"
    name = dtype if dtype != "auto" else "float32" if source.is_gguf and not gpu else "bfloat16"
    check_fp8(config, weight_dtype == "fp8")
    if weight_dtype == RELEASED:
        return Weights(source.model_bytes(name, device, blocks=_released(source)), RELEASED, name)
    plain = source.model_bytes(name, device)
    computes = gpu and not exact and name == "bfloat16"  # with matrices in other forms than a plain dtype
    if weight_dtype == "fp8" and computes:
        return _held(source.model_bytes(name, device, fp8=True), "fp8", plain, name, card)
    if weight_dtype == "auto" and computes and source.blocks:
        return _held(source.model_bytes(name, device, blocks=_released(source)), RELEASED, plain, name, card)
    may_pack = weight_dtype == "auto" and not exact and source.packed
    if may_pack and computes:
        packed = source.model_bytes(name, device, packed=source.packed)
        if packed < plain:
            return _held(packed, "packed", plain, name, card)
    half = weight_dtype in ("f16", "int4") or (weight_dtype == dtype == "auto" and source.narrow)
    form = f"fp8 as {name}" if weight_dtype == "fp8" else name
    if half and not gpu and not exact and name == "float32" and config.v4 is None:
        codes = source.codes4 if weight_dtype != "f16" else frozenset()  # auto: as with AVX-512
        there = source.model_bytes(name, device, half=True, int4=codes)
        plain, form = there, form if there == plain else "int4" if codes else "f16"
    on_gpu = None
    if may_pack and not gpu:
        unpacked_there = source.model_bytes("bfloat16", "cuda")
        packed_there = source.model_bytes("bfloat16", "cuda", packed=source.packed)
        on_gpu = packed_there if packed_there < unpacked_there else None
    return Weights(plain, form, name, packed_on_gpu=on_gpu)


def _released(source: Source) -> dict[str, BlockForm]:
    """The forms of the released files, or of a rank's part of them, or HybridKVError."""
    forms = source.blocks or released_forms(source.whole or source.config, source.has)
    if not forms:
        raise HybridKVError(
            "a plan without files knows the released FP8 and FP4 codes of DeepSeek-V4 alone; of an FP8 or MXFP4 "
            f"model of Qwen give the folder; {source.name} is not released so: choose another form"
        )
    if source.whole is not None and source.shard is not None:
        return rank_forms(source.whole, source.shard, source.has, forms)
    return forms


def card_shares(weights: Weights, source: Source) -> str | None:
    """One sentence about weights in their released form: what they take on each of several cards. Or, of a model that
    is released so and planned otherwise, that there is such a form.
    """
    if weights.form == "bfloat16" and source.config.v4 is not None and source.whole is None and not source.blocks:
        size = human(source.form_bytes(RELEASED))
        return f"As released, in FP8 and FP4, the weights are {size} (--weights released): a GPU keeps such files so."
    if weights.form != RELEASED:
        return None
    said = "Released: the codes and scales of the files, as they are"
    if source.whole is not None:
        return f"{said}, cut to ranks."
    config, has, works = source.config, source.has, sizes_that_work(source.config)
    forms, ranks = _released(source), []
    for n in CARDS[1:]:
        if n in works:
            with suppress(HybridKVError):  # a number that does not fit the codes is left out
                ranks.append(block_shard(config, Shard(0, n), has, forms))
    shares = [rank_model_bytes(config, rank, has, weights.dtype, "cuda", blocks=forms) for rank in ranks]
    listed = ", ".join(human(size) for size in (weights.nbytes, *shares))
    cards = ", ".join(map(str, (1, *(rank.size for rank in ranks))))
    return f"{said}. Over {cards} cards (--tp) they are {listed} a card."


def _held(nbytes: int, form: str, plain: int, dtype: str, card: Card | None) -> Weights:
    """In this form, or in a plain dtype where the card has no kernels for it."""
    why, asked = card_lacks(card, form), {"packed": "the file's formats", RELEASED: "the files' codes"}.get(form, form)
    if why is None:
        return Weights(nbytes, form, dtype)
    return Weights(plain, f"{form} as {dtype}", dtype, why, asked, nbytes)
