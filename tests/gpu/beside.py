"""Prompts that begin alike, asked beside one that answers all the while: what tests of reuse on the GPU share."""

from __future__ import annotations

from dataclasses import replace

import tiny

from engine.driving import run
from engine.reusing import ASK, check
from hybridkv import LLM, SamplingParams
from hybridkv.request import Request

BASE = tiny.token_ids(700)
MARKS = [(at, "client") for at in (128, 256, 512, 640)]
PARAMS = replace(ASK, max_tokens=6)
CASES = ((640, 700), (512, 517), (300, 390), (641, 652), (130, 640), (700, 700))  # (tokens of BASE, tokens)


def parting(shared: int, length: int, seed: int = 1) -> list[int]:
    """So many tokens, of which the first ones are those of BASE."""
    return [*BASE[:shared], *tiny.token_ids(length, seed=seed)[shared:]]


def ask_beside(
    llm: LLM,
    prompts: list[list[int]],
    params: SamplingParams = PARAMS,
    answer: int = 60,
    sound: bool = True,
    **how: object,
) -> list[Request]:
    """All at once, beside one that gets `answer` tokens. `sound`: all of them get answers."""
    engine = llm.engine
    beside = engine.add(tiny.token_ids(30, seed=99), SamplingParams(max_tokens=answer, ignore_eos=True), cache=False)
    for _ in range(4):
        engine.step()
    asked = [engine.add(tokens, params, **how) for tokens in prompts]  # type: ignore[arg-type]
    run(engine)
    check(engine)
    errors = [request.error for request in asked]
    assert beside.error is None and not (sound and any(errors)), errors
    return asked
