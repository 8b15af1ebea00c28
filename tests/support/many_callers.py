"""Many callers of one model: what they ask for, and how a test looks at the engine beside its thread."""

import random
from pathlib import Path
from typing import Any

import tiny

from engine.ascii_tokenizer import TEMPLATE, write_tokenizer
from engine.driving import prompt
from hybridkv import LLM, SamplingParams

THREADS, CALLS = 8, 50
ASK = SamplingParams(max_tokens=6, ignore_eos=True)


def open_tiny(kind: str, folder: Path, **more: Any) -> LLM:
    tiny.save(kind, folder)
    write_tokenizer(folder, TEMPLATE)
    settings = {"exact": True, "max_requests": 6, "max_context": 256} | more
    return LLM(folder, device="cpu", dtype="float32", **settings)


def settle(llm: LLM) -> None:
    """Until everything that was asked of the engine's thread has been done."""
    llm.owner.run(lambda engine: None)


def tokens(llm: LLM, ids: list[int], params: SamplingParams) -> list[int]:
    return llm.generate(ids, params)[0].token_ids


def wishes(seed: int) -> tuple[list[int], SamplingParams]:
    """One of forty: prompts of 1 to 90 tokens; greedy or sampled, with penalties and filters."""
    rng = random.Random(seed)
    sampled = {"temperature": rng.choice([0.7, 1.5]), "seed": seed, "top_k": rng.choice([0, 5])}
    kind = rng.choice([{}, sampled, sampled | {"repetition_penalty": 1.3}, {"logprobs": 2}])
    return prompt(rng.randint(1, 90), seed), SamplingParams(max_tokens=rng.randint(1, 9), ignore_eos=True, **kind)


def count_rows(llm: LLM) -> list[int]:
    """How many requests each step has; grows."""
    rows: list[int] = []
    schedule = llm.engine.scheduler.schedule

    def counted(*given: Any) -> Any:
        batch = schedule(*given)
        rows.append(0 if batch is None else len(batch.requests))
        return batch

    llm.engine.scheduler.schedule = counted  # type: ignore[method-assign]
    return rows
