"""transformers under the same load, on the same weights: its continuous batching, where that runs the model, and where
it does not, `generate` on a few requests as one padded batch.

Both models' logits are compared before anything is timed. Ours runs the same requests first.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch

from hybridkv.bench.load_engine import load_engine
from hybridkv.bench.load_serve import serve, warm_up
from hybridkv.bench.load_workload import Asked, sampling
from hybridkv.bench.options import BenchOptions
from hybridkv.bench.peers import build, build_dense, continuous_batching, same_model, tuned_together
from hybridkv.bench.report import Report, check, installed, rounding
from hybridkv.bench.shapes import Shape
from hybridkv.bench.timing import at_most, free_memory, sync
from hybridkv.config import CacheConfig

CHECKED = 192  # tokens whose last logits are compared
STATIC = 8  # requests of one padded batch
SECONDS = 150.0  # that a peer may take


class NotDone(Exception):
    """Time was up."""


def load_peers(shape: Shape, options: BenchOptions, report: Report, cache: CacheConfig, asked: Sequence[Asked]) -> None:
    if not installed("transformers"):
        report.note("transformers is not installed: no peer")
        return
    if shape.config.gdn is not None and shape.config.architecture != "qwen3_5":
        report.note(f"no peer for {shape.config.architecture}")
        return
    report.doing("building transformers")
    hf = build_dense(shape) if shape.config.gdn is None else build(shape)
    problem = refusal(hf)
    free_memory(shape.device)  # its cache took what there was
    few = asked
    if problem is not None:
        few = asked[:STATIC]
        report.note(
            f"transformers' continuous batching does not run {shape.config.architecture}: {problem}; "
            f"{len(few)} requests as one padded batch instead"
        )
    report.doing("our model on the same weights")
    want = ours(shape, options, report, cache, few, hf)
    free_memory(shape.device)
    with torch.no_grad():
        check("logits against transformers", want, last_logits(hf, shape), rounding(shape.config.layers))
    name = "transformers batching" if problem is None else "transformers static"
    limit = SECONDS if report.deadline is None else min(SECONDS, report.deadline - time.monotonic())
    report.doing(name)
    try:
        with at_most(limit):
            seconds = (continuous if problem is None else static)(hf, few, shape.device)
    except Exception as problem:  # no end, no room, or a version that cannot
        report.note(f"{name} skipped: {type(problem).__name__}: {' '.join(str(problem).split())[:100]}")
        return
    finally:
        free_memory(shape.device)
    tokens = sum(a.answer for a in few)
    mine = next(r for r in report.rows if r["op"] == "offline beside peers")
    report.add(name, case(few), s=seconds, tok_s=tokens / seconds, times=seconds / mine["s"], answer_tokens=tokens)
    report.note(f"{name}, {case(few)}: {seconds:.2f} s, {seconds / mine['s']:.2f} times ours")


def case(asked: Sequence[Asked]) -> str:
    return f"{len(asked)} requests, {sum(len(a.prompt) for a in asked)} in, {sum(a.answer for a in asked)} out"


def checked_tokens(shape: Shape) -> list[int]:
    return torch.randint(0, shape.config.vocab, (CHECKED,), generator=torch.Generator().manual_seed(0)).tolist()


def last_logits(hf: Any, shape: Shape) -> torch.Tensor:
    """[vocab] after the checked tokens."""
    tokens = torch.tensor([checked_tokens(shape)], device=shape.device)
    return hf(input_ids=tokens, logits_to_keep=1).logits[0, -1].float()


def ours(
    shape: Shape, options: BenchOptions, report: Report, cache: CacheConfig, asked: Sequence[Asked], hf: Any
) -> torch.Tensor:
    """A row of ours on the peer's weights; returns the logits that both are compared by."""
    model = same_model(shape, hf)
    context = max(CHECKED, *(len(a.prompt) + a.answer for a in asked)) + 8
    engine = load_engine(shape, model, options, CacheConfig(kv_dtype=cache.kv_dtype), len(asked), context)
    logits = engine.score(checked_tokens(shape))[-1]
    warm_up(engine, asked, False, report.doing)
    served = serve(engine, asked, sampling([a.answer for a in asked], False, 0), say=report.doing)
    served.check()
    report.add(
        "offline beside peers", case(asked), s=served.seconds, tok_s=served.answer_tokens / served.seconds,
        prompt_tok_s=served.prompt_tokens / max(served.prompt_s, 1e-9), answer_tokens=served.answer_tokens,
    )  # fmt: skip
    return logits


def refusal(hf: Any) -> str | None:
    """Why continuous batching does not run this model; None: it does. A short request is tried."""
    try:
        with at_most(SECONDS):
            batched(hf, [Asked([1, 2, 3], 2)], SECONDS)
    except Exception as problem:  # an older version, a layer that it has no cache for
        return f"{type(problem).__name__}: {str(problem).splitlines()[0][:100] if str(problem) else ''}"
    return None


def batched(hf: Any, asked: Sequence[Asked], limit: float) -> float:
    """Seconds until all answers are there, starting and warming up not counted; NotDone."""
    with continuous_batching(hf) as manager:
        begin, left, got = time.perf_counter(), len(asked), 0
        for a in asked:
            manager.add_request(list(a.prompt), max_new_tokens=a.answer, eos_token_id=-1)
        while left:
            result = manager.get_result(timeout=1)
            if result is not None and result.is_finished():
                if result.error is not None:
                    raise RuntimeError(result.error)
                got += len(result.generated_tokens)
                left -= 1
            elif result is None and (not manager.is_running() or time.perf_counter() - begin > limit):
                raise NotDone(f"{left} of {len(asked)} requests after {time.perf_counter() - begin:.0f} s")
        seconds = time.perf_counter() - begin
    if got != sum(a.answer for a in asked):
        raise RuntimeError(f"{got} tokens came, {sum(a.answer for a in asked)} were asked for")
    return seconds


def continuous(hf: Any, asked: Sequence[Asked], device: str) -> float:
    return batched(hf, asked, SECONDS)


@torch.no_grad()
def static(hf: Any, asked: Sequence[Asked], device: str) -> float:
    """`generate` on one batch, padded at the left, until the longest answer is there; the others wait for it."""
    longest = max(len(a.prompt) for a in asked)
    tokens = torch.zeros(len(asked), longest, dtype=torch.int64)
    mask = torch.zeros_like(tokens)
    for i, a in enumerate(asked):
        tokens[i, longest - len(a.prompt) :] = torch.tensor(a.prompt)
        mask[i, longest - len(a.prompt) :] = 1
    given: dict[str, Any] = {"input_ids": tokens.to(device), "attention_mask": mask.to(device)}
    given |= {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    with tuned_together():
        hf.generate(**given, max_new_tokens=2)  # compiles
    sync(device)
    begin = time.perf_counter()
    out = hf.generate(**given, max_new_tokens=max(a.answer for a in asked))
    sync(device)
    seconds = time.perf_counter() - begin
    if out.shape[1] != longest + max(a.answer for a in asked):
        raise RuntimeError(f"generate ended after {out.shape[1] - longest} tokens")
    return seconds
