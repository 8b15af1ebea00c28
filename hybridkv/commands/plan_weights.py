"""The weights of a plan: their bytes in the form that the options ask for, and whether the engine holds them so."""

from __future__ import annotations

from dataclasses import dataclass

from hybridkv.cards import FP8_WEIGHTS, PACKED_WEIGHTS, Card
from hybridkv.commands.plan_source import Source
from hybridkv.errors import HybridKVError
from hybridkv.models import check_fp8
from hybridkv.models.weight_forms import DTYPES, FORMS, PACKED, form_bytes, held_today
from hybridkv.planner import human, model_bytes

LABELS = {"bfloat16": "bf16", "float32": "f32", "q8_0": "Q8_0", "q6_k": "Q6_K", "q5_k": "Q5_K", "q4_k": "Q4_K"}


@dataclass(frozen=True)
class Weights:
    """Bytes of a model's weights in one form."""

    nbytes: int
    form: str  # bfloat16, float32, fp8, a form of --weights, packed (a GGUF file's own), "fp8 as ..." where codes are
    # not kept
    dtype: str  # of activations
    note: str | None = None  # one sentence, where the engine does not hold them so
    packed_on_gpu: int | None = None  # of a GGUF file that is planned for a CPU

    @property
    def label(self) -> str:
        """The form in a word."""
        if self.form.startswith("fp8 as "):
            return f"{LABELS[self.dtype]} (fp8)"
        return LABELS.get(self.form, self.form)


def form_weights(source: Source, form: str, card: Card | None = None) -> Weights:
    """On a GPU, in a form that --weights names."""
    nbytes = form_bytes(source.config, source.has, form)
    note = None
    if not held_today(source.config, form):
        today = human(form_bytes(source.config, source.has, form if source.config.v4 is None else "bf16", False))
        what = "this model's experts" if source.config.v4 is None else "DeepSeek-V4"
        note = f"The engine does not hold {what} in {LABELS.get(form, form)} yet: today the weights take {today}."
    elif card is not None and (0, 0) < card.capability < _least(form):
        note = f"The {card.name} has no {'FP8 matrices' if form == 'fp8' else 'kernels for packed weights'}: there the "
        note += f"engine keeps the weights in bf16, {human(form_bytes(source.config, source.has, 'bf16'))}."
    return Weights(nbytes, DTYPES.get(form, form), DTYPES.get(form, "bfloat16"), note)


def _least(form: str) -> tuple[int, int]:
    return FP8_WEIGHTS if form == "fp8" else PACKED_WEIGHTS if form in PACKED else (0, 0)


def check_form(form: str) -> str:
    """A form of --weights, spelled in any case."""
    found = form.lower().replace("-", "_")
    found = {"bfloat16": "bf16", "float32": "f32", "fp32": "f32"}.get(found, found)
    if found in ("q4_k_m", "q4_k_s", "q5_k_m", "q5_k_s"):
        raise HybridKVError(
            f"--weights {form[:40]} is a mixture of formats, another for every model: plan {found[:4]} and q6_k, "
            "between which it lies, or give the .gguf file"
        )
    if found not in FORMS:
        raise HybridKVError(f"--weights {form[:40]!r} is not known; choose {', '.join(FORMS)}")
    return found


def find_weights(
    source: Source, gpu: bool, dtype: str, weight_dtype: str, exact: bool, card: Card | None = None
) -> Weights:
    """As `LLM` with these options holds them. dtype: auto, float32 or bfloat16."""
    config, has = source.config, source.has
    device = "cuda" if gpu else "cpu"
    name = dtype if dtype != "auto" else "float32" if source.is_gguf and not gpu else "bfloat16"
    check_fp8(config, weight_dtype == "fp8")
    fp8 = weight_dtype == "fp8" and not exact and gpu and name == "bfloat16"
    plain = model_bytes(config, has, name, device, fp8)
    may_pack = weight_dtype == "auto" and not exact
    if may_pack and gpu and name == "bfloat16" and source.packed:
        packed = model_bytes(config, has, name, device, packed=source.packed)
        if packed < plain:
            return Weights(packed, "packed", name)
    on_gpu = None
    if may_pack and not gpu and source.packed:
        unpacked_there = model_bytes(config, has, "bfloat16", "cuda")
        packed_there = model_bytes(config, has, "bfloat16", "cuda", packed=source.packed)
        on_gpu = packed_there if packed_there < unpacked_there else None
    form = "fp8" if fp8 else f"fp8 as {name}" if weight_dtype == "fp8" else name
    return Weights(plain, form, name, packed_on_gpu=on_gpu)
