"""Records of an evaluation as a run would write them, made from a rule instead of a model."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hybridkv.evaluation.results import Results, Saved
from hybridkv.evaluation.settings import FULL, EvalSettings

SETTINGS = EvalSettings(
    model="some/model",
    tasks=("niah_single_1", "niah_multikey_2", "vt", "cwe"),
    policies=("snapkv", "keydiff"),
    ratios=(2, 4, 8),
    lengths=(2048, 4096),
    samples=20,
    kv_dtypes=("bf16", "fp8"),
    divergence=2,
)
FULL_SCORES = {"niah_single_1": 0.97, "niah_multikey_2": 0.85, "vt": 0.75, "cwe": 0.31}
LOSS = {FULL: 0.0, "snapkv": 0.20, "keydiff": 0.06}  # of the score, for each doubling of the ratio
FACTS = {
    "model_name": "some-model",
    "model_hash": "ab" * 32,
    "set_hash": "cd" * 32,
    "device": "cpu",
    "dtype": "bfloat16",
}
TOKEN_BYTES = {"f32": 46080, "bf16": 23040, "fp8": 12240}


def units(settings: EvalSettings) -> Iterator[list[dict[str, Any]]]:
    """The records of every unit. The same settings give the same records."""
    for kv_dtype in settings.kv_dtypes:
        for state_dtype in settings.state_dtypes:
            for length in settings.lengths:
                for mode in settings.modes:
                    for task in (*settings.tasks, "divergence"):
                        count = settings.divergence if task == "divergence" else settings.samples
                        for number in range(count):
                            unit = (kv_dtype, state_dtype, length, task, number, mode)
                            yield list(_unit(settings, unit))


def _unit(settings: EvalSettings, unit: tuple) -> Iterator[dict[str, Any]]:
    kv_dtype, state_dtype, length, task, number, mode = unit
    luck = random.Random(repr((settings.seed, length, task, number))).random()  # the same for every policy
    for policy, ratio in [(FULL, 1), *((p, r) for p in settings.policies for r in settings.ratios)]:
        halvings = ratio.bit_length() - 1 if isinstance(ratio, int) else 1
        where = dict(unit="/".join(map(str, unit)), task=task, length=length, mode=mode, policy=policy, ratio=ratio)
        where |= dict(kv_dtype=kv_dtype, state_dtype=state_dtype, number=number)
        kept = length // ratio
        size = dict(
            tokens=length, kept=kept, kv_bytes=kept * TOKEN_BYTES.get(kv_dtype, 23040), state_bytes=1 << 20,
            table_bytes=kept // 8, peak_bytes=length * 30000,
        )  # fmt: skip
        if task == "divergence":
            kl = 0.0 if policy == FULL else LOSS[policy] * halvings * (1 + luck)
            yield dict(kind=task, **where, kl=kl, kl_999=8 * kl, top1=1 - kl / 3, **size)
            continue
        if FULL_SCORES[task] < 0.6 and policy != FULL and not settings.all_tasks:
            continue
        good = FULL_SCORES[task] - LOSS[policy] * halvings * (1.5 if mode == "unseen" else 1)
        score = 1.0 if luck < good else 0.0
        yield dict(
            kind="answer", **where, question=0, text=f"{luck:.6f}", score=score, **size, answer_tokens=7,
            answer=f"{policy} says {'yes' if score else 'no'} <b onclick=alert(1)>&amp;</b></script>",
        )  # fmt: skip


def saved(settings: EvalSettings = SETTINGS) -> Saved:
    """All of it in memory."""
    run = {"kind": "run", "version": "0", "commit": None, "digest": settings.digest(), "settings": settings.as_json()}
    return Saved(run | FACTS, [record for records in units(settings) for record in records])


def write(folder: Path, settings: EvalSettings = SETTINGS, most: int | None = None) -> Path:
    """A folder of results; `most`: units, for one that was stopped."""
    with Results(folder, settings) as results:
        every = list(units(settings))
        results.begin(FACTS | {"units": len(every)})
        for records in every[:most]:
            results.write(records)
    return folder
