"""EvalSettings: what an evaluation asks, checked before a model is opened. No torch is needed."""

from __future__ import annotations

import difflib
import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hybridkv.config import KV_DTYPES, MODEL_DTYPES, POLICY_NAMES, is_whole, shown
from hybridkv.errors import HybridKVError
from hybridkv.evaluation.tasks import RULER, TASKS

FULL = "full"  # the policy of the full cache, whose ratio is 1
MODES = ("seen", "unseen")  # whether the question stands in the prompt when the cache is cut
STATE_DTYPES = ("f32", "bf16")
LEAST_SCORE = 60.0  # a task that the full cache answers less well says little about what is cut
MOST_TOKENS = 1 << 20
MOST_SAMPLES = 100_000
MOST_RATIO = 1024

# what is asked where nothing is said
ON_CPU: dict[str, Any] = {"tasks": RULER, "lengths": (1024,), "ratios": (4, 8), "samples": 2, "divergence": 1}
ON_GPU: dict[str, Any] = {
    "tasks": tuple(TASKS), "lengths": (2048, 4096), "ratios": (2, 4, 8, 16), "samples": 100, "divergence": 16
}  # fmt: skip


@dataclass(frozen=True)
class EvalSettings:
    """What an evaluation asks. The same settings and weights give the same answers.

    Args:
        model: a folder, a .gguf file, a hub id or `tiny-hybrid`; None: the embedded SmolLM2-135M-Instruct.
        tasks: names of `hybridkv.evaluation.tasks.TASKS`.
        policies: names of policies, or `name:setting=value`. The full cache is always measured and not named here.
        ratios: how many times smaller the cache gets; each above 1.
        lengths: tokens of a prompt, as the model under test counts them.
        modes: "seen", "unseen" or both.
        samples: texts of each task, for each length.
        seed: of the generated texts.
        kv_dtypes: of the KV cache. The full cache in the first one is what all others are compared with.
        state_dtypes: of Gated DeltaNet's state; the first one likewise.
        divergence: texts on which the distributions are compared with the full cache's, for each length; 0: none.
        all_tasks: cut the cache also for tasks that the full cache answers badly.
        device: auto, cpu or cuda.
        dtype: of the weights: auto, float32 or bfloat16.
        exact: the same bits whatever the batch.
        max_requests: texts that are read and answered together; None: 8 on a CPU, 50 on a GPU.
        memory: for weights and cache together, such as "12GiB"; None: what is free.
        tp: processes that share the model; `memory` is of each.
    """

    model: str | None = None
    tasks: tuple[str, ...] = RULER
    policies: tuple[str, ...] = ("auto", "snapkv")
    ratios: tuple[float, ...] = ON_CPU["ratios"]
    lengths: tuple[int, ...] = ON_CPU["lengths"]
    modes: tuple[str, ...] = MODES
    samples: int = ON_CPU["samples"]
    seed: int = 0
    kv_dtypes: tuple[str, ...] = ("auto",)
    state_dtypes: tuple[str, ...] = ("f32",)
    divergence: int = ON_CPU["divergence"]
    all_tasks: bool = False
    device: str = "auto"
    dtype: str = "auto"
    exact: bool = False
    max_requests: int | None = None
    memory: str | None = None
    tp: int = 1

    def check(self) -> EvalSettings:
        """These settings, or HybridKVError: what was asked, what there is."""
        _known("task", self.tasks, tuple(TASKS))
        _known("mode", self.modes, MODES)
        _known("policy", tuple(policy_name(spec) for spec in self.policies), POLICY_NAMES, once=False)
        _once("policy", self.policies)
        _known("kv_dtype", self.kv_dtypes, ("auto", *KV_DTYPES))
        _known("state_dtype", self.state_dtypes, STATE_DTYPES)
        _known("dtype", (self.dtype,), ("auto", *MODEL_DTYPES))
        if "auto" in self.kv_dtypes and len(self.kv_dtypes) > 1:
            raise HybridKVError(
                f"kv_dtype auto stands for one of the others; name those to compare: {', '.join(KV_DTYPES)}"
            )
        _once("ratio", self.ratios)
        for ratio in self.ratios:
            if isinstance(ratio, bool) or not isinstance(ratio, int | float) or not 1 < ratio <= MOST_RATIO:
                raise HybridKVError(
                    f"a ratio must be above 1 and at most {MOST_RATIO}, not {shown(ratio)}; 4 keeps a quarter, and the "
                    "full cache is always measured"
                )
        _once("length", self.lengths)
        for length in self.lengths:
            _whole("a length, in tokens,", length, 128, MOST_TOKENS)
        _whole("samples", self.samples, 1, MOST_SAMPLES)
        _whole("seed", self.seed, 0, 2**63 - 1)
        _whole("divergence", self.divergence, 0, MOST_SAMPLES)
        if self.max_requests is not None:
            _whole("max_requests", self.max_requests, 1, 4096)
        return self

    def as_json(self) -> dict[str, Any]:
        """As JSON holds them: lists, and whole ratios as whole numbers."""
        found = {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}
        return found | {"ratios": [int(ratio) if ratio == int(ratio) else ratio for ratio in self.ratios]}

    def deciding(self) -> dict[str, Any]:
        """The settings that decide the results; how much memory there is does not."""
        return {name: value for name, value in self.as_json().items() if name != "memory"}

    def digest(self) -> str:
        """16 characters that name `deciding`."""
        return hashlib.sha256(json.dumps(self.deciding(), sort_keys=True).encode()).hexdigest()[:16]

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> EvalSettings:
        """What `as_json` made; names that are not known are left out."""
        known: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in found.items()
            if name in cls.__dataclass_fields__
        }
        return cls(**known)


def policy_name(spec: str) -> str:
    """The name in a policy's text: peak:pooling=15 -> peak."""
    name, *settings = str(spec).split(":")
    for setting in settings:
        if not re.fullmatch(r"[a-z_]+=[\w.+-]+", setting):
            raise HybridKVError(
                f"policy {shown(spec)}: {shown(setting)} is not a setting; write name:setting=value, such as "
                "snapkv:pooling=max:kernel=15"
            )
    return name


def ratio_text(ratio: float) -> str:
    """4.0 -> 4x."""
    return f"{ratio:g}x"


def nearest(name: str, known: Sequence[str]) -> str:
    """` (is vt meant?)`, or nothing where none is near."""
    found = difflib.get_close_matches(str(name).lower(), known, n=1)
    return f" (is {found[0]} meant?)" if found else ""


def _known(what: str, given: Sequence[str], known: Sequence[str], once: bool = True) -> None:
    if not given:
        raise HybridKVError(f"there is no {what} to evaluate; choose from {', '.join(known)}")
    for name in given:
        if name not in known:
            if what == "policy" and name == FULL:
                raise HybridKVError("the full cache is always measured; leave it out of the policies")
            raise HybridKVError(
                f"there is no {what} {shown(name)}{nearest(name, known)}; choose from {', '.join(known)}"
            )
    if once:
        _once(what, given)


def _once(what: str, given: Sequence[object]) -> None:
    if not given:
        raise HybridKVError(f"there is no {what} to evaluate; name one")
    twice = next((item for item in given if given.count(item) > 1), None)
    if twice is not None:
        raise HybridKVError(f"{what} {twice} is named twice; name it once")


def _whole(what: str, value: object, low: int, high: int) -> None:
    if not is_whole(value) or not low <= value <= high:  # type: ignore[operator]
        raise HybridKVError(f"{what} must be a whole number from {low} to {high}, not {shown(value)}")
