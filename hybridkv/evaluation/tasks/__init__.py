"""Tasks: texts with questions that have one right answer, generated. RULER's eleven that need no data, and five more.

`make_sample("niah_single_2", number=7, tokens=4096, seed=0, count=tokenizer_count)` gives the same sample everywhere.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from difflib import get_close_matches

from hybridkv.errors import HybridKVError
from hybridkv.evaluation.sample import CountTokens, Sample
from hybridkv.evaluation.tasks import counting, facts, needles, records
from hybridkv.evaluation.tasks.draft import Draft, Request, fit

__all__ = ["RULER", "TASKS", "Task", "make_sample", "sample_set_hash"]

GOLDEN = 0.6180339887498949  # multiples of it, less their whole part, fill the span from 0 to 1 evenly at any number


@dataclass(frozen=True)
class Task:
    """A kind of sample: its name, what it asks in one line, and what makes its drafts."""

    name: str
    about: str
    draft: Callable[[Request], Draft]


def _task(name: str, draft: Callable[[Request], Draft]) -> Task:
    return Task(name, (draft.__doc__ or "").split("\n")[0], draft)


_RULER = (
    _task("niah_single_1", needles.single_in_noise),
    _task("niah_single_2", needles.single_in_prose),
    _task("niah_single_3", needles.single_uuid_in_prose),
    _task("niah_multikey_1", needles.four_keys_in_prose),
    _task("niah_multikey_2", needles.numbers_only),
    _task("niah_multikey_3", needles.uuids_only),
    _task("niah_multivalue", needles.four_values),
    _task("niah_multiquery", needles.four_queries),
    _task("vt", counting.variable_tracking),
    _task("cwe", counting.common_words),
    _task("fwe", counting.frequent_words),
)
_MORE = (
    _task("paraphrase", facts.paraphrase),
    _task("two_questions", facts.two_questions),
    _task("instruction", facts.instruction),
    _task("phone_book", records.phone_book),
    _task("tool_chain", records.tool_chain),
)

RULER: tuple[str, ...] = tuple(task.name for task in _RULER)  # named as RULER names them (arXiv 2404.06654)
TASKS: dict[str, Task] = {task.name: task for task in _RULER + _MORE}


def make_sample(task: str, number: int, tokens: int, seed: int | str, count: CountTokens) -> Sample:
    """Sample `number` of a task, with a prompt of at most `tokens` tokens and seldom under 93 % of them.

    The prompt is the document, the questions, the beginnings of the answers, and some room for a chat template.

    Args:
        task: a name of `TASKS`.
        number: which sample, from 0; depths of what is asked for are even over the numbers.
        tokens: length of the whole prompt.
        seed: samples of different seeds have nothing in common.
        count: tokens of a text, as the model that will read it counts them.
    """
    if task not in TASKS:
        near = get_close_matches(str(task), TASKS, n=1, cutoff=0.5)
        meant = f"did you mean '{near[0]}'? " if near else ""
        raise HybridKVError(f"there is no task '{task}'; {meant}Tasks: {', '.join(TASKS)}")
    for what, value, least in (("number", number, 0), ("tokens", tokens, 1)):
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise HybridKVError(f"{what} is {value!r}; give a whole number of {least} or more")
    start = random.Random(f"{seed}/{task}").random()
    rng = random.Random(f"{seed}/{task}/{number}/{tokens}")
    draft = TASKS[task].draft(Request(rng, number, tokens, (start + number * GOLDEN) % 1.0))
    return Sample(task, number, fit(draft, tokens, count, task), draft.questions, draft.system)


def sample_set_hash(samples: Iterable[Sample]) -> str:
    """sha256 over all that the samples say, in their order: two runs with the same hash asked the same."""
    digest = hashlib.sha256()
    for sample in samples:
        digest.update(json.dumps(asdict(sample), sort_keys=True, ensure_ascii=True).encode() + b"\n")
    return digest.hexdigest()
