"""Cases of choosing the next token: the best one, a drawn one, and the whole sampler with the host's part."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hybridkv.bench.cases import Case, Listed, Setup
from hybridkv.bench.report import check
from hybridkv.bench.timing import copies
from hybridkv.config import SamplingParams
from hybridkv.text.stream import TextStream

FILTERS: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.6},
    "top-p": {"temperature": 0.6, "top_p": 0.95},
    "top-k, top-p, min-p, penalties": {
        "temperature": 0.6, "top_k": 50, "top_p": 0.95, "min_p": 0.05,
        "repetition": 1.1, "frequency": 0.2, "presence": 0.1,
    },
}  # fmt: skip
SEEN = 2000  # tokens of a prompt


def sampling_cases(s: Setup) -> Iterator[Listed]:
    vocab = s.shape.config.vocab
    for B in s.some((1, 64, 256), (1,), (2,)):
        yield Listed("best_tokens", f"B={B} of {vocab}", partial(best_case, s, B))
        yield Listed("mask_rows", f"B={B} of {vocab}", partial(mask_case, s, B))
        for name in FILTERS:
            yield Listed("sample_rows", f"B={B} of {vocab}, {name}", partial(rows_case, s, B, name))
        yield Listed("sample", f"B={B} of {vocab}, top-k 50, top-p 0.9", partial(sample_case, s, B))


def best_case(s: Setup, B: int) -> Case:
    from hybridkv.kernels.best_tokens import best_tokens, best_tokens_ref

    vocab = s.shape.config.vocab
    inputs = [s.randn(B, vocab, dtype=torch.float32) for _ in range(copies(4 * B * vocab, s.device))]
    return Case(
        best_tokens, inputs, lambda: check("best_tokens", best_tokens(inputs[0]), best_tokens_ref(inputs[0]), 0),
        4 * B * vocab, torch=best_tokens_ref,
    )  # fmt: skip


def mask_case(s: Setup, B: int) -> Case:
    """Rows of which a grammar leaves one token in sixteen. The floor is writing the others."""
    from hybridkv.kernels.sampling.mask import mask_rows, mask_rows_ref

    vocab, rows = s.shape.config.vocab, torch.arange(B, device=s.device)
    words = torch.randint(-(1 << 31), 1 << 31, (4, B, (vocab + 31) // 32), device=s.device).to(torch.int32)
    masks = words[0] & words[1] & words[2] & words[3]
    inputs = [s.randn(B, vocab, dtype=torch.float32) for _ in range(copies(4 * B * vocab, s.device))]

    def run(logits: Tensor) -> None:
        mask_rows(logits, masks, rows)

    def verify() -> float:
        got, want = inputs[0].clone(), inputs[0].clone()
        run(got)
        mask_rows_ref(want, masks, rows)
        return check("mask_rows", got, want, 0)

    return Case(run, inputs, verify, B * vocab * 4 * 15 // 16)


def rows_case(s: Setup, B: int, name: str) -> Case:
    """Drawn tokens, with what is read first: the best one of each row. The floor is reading the logits once."""
    from hybridkv.kernels.best_tokens import best_tokens
    from hybridkv.kernels.sampling.launch import launch_rows
    from hybridkv.kernels.sampling.rows import SampleRow, seen_tokens, table_of
    from hybridkv.kernels.sampling.sample import sample_rows, sample_rows_ref

    vocab, ask, device = s.shape.config.vocab, FILTERS[name], torch.device(s.device)
    prompt = torch.randint(0, vocab, (SEEN,)).tolist()

    def rows(count: int) -> list[SampleRow]:
        some = [SampleRow(seed=i, row=i, out=i, position=i, **ask) for i in range(count)]
        for row in some:
            if row.repetition != 1:
                row.seen = seen_tokens(vocab, prompt, prompt[: SEEN // 2], device)
        return some

    moved = B * vocab * s.shape.dtype.itemsize
    inputs = [2 * s.randn(B, vocab) for _ in range(copies(moved, s.device))]
    held = rows(B)
    table, flags = table_of(held, vocab, device)

    def run(logits: Tensor) -> Tensor:
        found = best_tokens(logits)
        if device.type == "cuda":  # the table is there already, so that the launches can be captured
            launch_rows(logits, table, flags, B, found)
        else:
            sample_rows(logits, held, found)
        return found

    def verify() -> float:
        few = min(B, 4)
        got, want = best_tokens(inputs[0]), best_tokens(inputs[0])
        sample_rows(inputs[0], rows(B), got)
        sample_rows_ref(inputs[0], rows(few), want)
        return check(f"sample_rows, {name}", got[:, :few], want[:, :few], 0)

    return Case(run, inputs, verify, moved, peers={"torch, sorted": (partial(sorted_draw, ask=ask), inputs)})


def sorted_draw(logits: Tensor, ask: dict[str, Any]) -> Tensor:
    """The same kind of draw by torch's own operations: a sort where top-p is asked for. Penalties are left out."""
    scores = logits.float() / ask["temperature"]
    ids = None
    if "top_k" in ask:
        scores, ids = scores.topk(min(ask["top_k"], scores.shape[1]))
    elif "top_p" in ask:
        scores, ids = scores.sort(descending=True)
    if "top_p" in ask:
        probs = scores.softmax(-1)
        drop = probs.cumsum(-1).sub_(probs) >= ask["top_p"]
        scores = scores.masked_fill(drop, -torch.inf)
    if "min_p" in ask:
        probs = scores.softmax(-1)
        scores = scores.masked_fill(probs < ask["min_p"] * probs.amax(-1, keepdim=True), -torch.inf)
    chosen = (scores - torch.empty_like(scores).exponential_().log_()).argmax(-1, keepdim=True)
    return chosen if ids is None else ids.gather(1, chosen)


def sample_case(s: Setup, B: int) -> Case:
    """Sampling as a step does it, the host's part included: by plain calls."""
    from hybridkv.engine.sampler import sample
    from hybridkv.request import Request, RequestKey

    def requests(temperature: float) -> list[Request]:
        params = SamplingParams(temperature=temperature, top_k=50, top_p=0.9)
        return [Request(RequestKey(i), i, [0], 1, params, TextStream(None, ()), i) for i in range(B)]

    vocab, some, cold = s.shape.config.vocab, requests(0.7), requests(1e-9)
    inputs = [s.randn(B, vocab, dtype=torch.float32) for _ in range(copies(4 * B * vocab, s.device))]
    return Case(
        lambda x: sample(x, some), inputs,
        lambda: check("sampling near temperature 0", sample(inputs[0], cold).tokens, inputs[0].argmax(-1), 0),
        4 * B * vocab, graph=False,
    )  # fmt: skip
