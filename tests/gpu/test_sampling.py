"""Sampling on the GPU: the tokens of the definition on the CPU, one by one; in a CUDA graph; and in bounded memory."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from hybridkv.engine import workspace
from hybridkv.engine.sampling_graphs import SamplingGraphs
from hybridkv.kernels.best_tokens import best_tokens
from hybridkv.kernels.sampling import sample as file
from hybridkv.kernels.sampling.launch import launch_rows
from hybridkv.kernels.sampling.rows import SampleRow, seen_tokens, table_of
from hybridkv.kernels.sampling.sample import sample_rows, sample_rows_ref

pytestmark = pytest.mark.gpu
V = 248320
FILTERS: tuple[dict[str, Any], ...] = (
    {}, {"top_p": 0.95}, {"top_k": 50}, {"min_p": 0.05}, {"top_k": 50, "top_p": 0.95, "min_p": 0.05}, {"top_p": 0.1},
    {"top_k": 1000}, {"top_k": 5000, "top_p": 0.9}, {"top_p": 1e-9}, {"top_k": 1}, {"min_p": 1.0},
)  # fmt: skip


def rows_on(device: str, count: int, penalties: bool, only: dict[str, Any] | None = None) -> list[SampleRow]:
    made = []
    for i in range(count):
        more: dict[str, Any] = {}
        if penalties:
            prompt, answer = [*range(i, 3000 + i), V - 1], [7 * i, 7 * i, 100_000 + i]
            more = dict(repetition=1.2, frequency=0.3, presence=0.1, forbidden=[5, V - 1 - i])
            more["seen"] = seen_tokens(V, prompt, answer, torch.device(device))
        ask = FILTERS[i % len(FILTERS)] if only is None else only
        temperature = (0.6, 1.0, 0.0)[i // len(FILTERS) % 3]
        made.append(SampleRow(temperature, seed=(i << 50) + i, position=i, row=i, out=i, **ask, **more))
    return made


def logits_of(kind: str, count: int, dtype: torch.dtype) -> Tensor:
    """flat: as random weights give them. peaked: as a trained model does. equal: many ties."""
    x = torch.randn(count, V)
    if kind == "peaked":
        x = 2 * x
        x.scatter_(1, torch.randint(0, V, (count, 40)), torch.linspace(8, 20, 40).expand(count, 40))
    if kind == "equal":
        x = (2 * x).round_() / 4
    return x.to(dtype)


@pytest.mark.parametrize("penalties", (False, True))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("kind", ("flat", "peaked", "equal"))
def test_the_tokens_are_those_of_the_cpu(kind: str, dtype: torch.dtype, penalties: bool, count: Callable) -> None:
    """Equal without exception: every number on the way is defined to the last bit."""
    calls = count(file, "sample_rows_triton")
    S = 3 * len(FILTERS)
    logits = logits_of(kind, S, dtype)
    on_cpu, on_gpu = rows_on("cpu", S, penalties), rows_on("cuda", S, penalties)
    for _ in range(2):  # the second time with the first token seen
        want, found = best_tokens(logits), best_tokens(logits.cuda())
        sample_rows_ref(logits, on_cpu, want)
        sample_rows(logits.cuda(), on_gpu, found)
        assert found.tolist() == want.tolist()
    assert len(calls) == 2 and not found[1].any()
    for a, b in zip(on_cpu, on_gpu):
        assert a.seen is None or b.seen is None or torch.equal(a.seen, b.seen.cpu())


def test_zeros_of_both_signs_are_equal() -> None:
    """As where a hook rules out all but some tokens, whose logits are 0 or -0."""
    S = len(FILTERS)
    logits = torch.where(torch.rand(S, V) < 0.5, -0.0, 0.0)
    logits[:, 200:] = -torch.inf
    logits[:, 0] = torch.tensor([0.0, -0.0])[torch.arange(S) % 2]
    want, found = best_tokens(logits), best_tokens(logits.cuda())
    sample_rows_ref(logits, rows_on("cpu", S, False), want)
    sample_rows(logits.cuda(), rows_on("cuda", S, False), found)
    assert found.tolist() == want.tolist()


def test_launches_can_be_captured() -> None:
    logits = logits_of("flat", 22, torch.bfloat16).cuda()
    want = best_tokens(logits)
    sample_rows(logits, rows_on("cuda", 22, False), want)
    table, flags = table_of(rows_on("cuda", 22, False), V, logits.device)
    fresh = best_tokens(logits)
    found = fresh.clone()
    launch_rows(logits, table, flags, 22, found)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch_rows(logits, table, flags, 22, found)
    for _ in range(2):
        found.copy_(fresh)
        graph.replay()
        assert found.tolist() == want.tolist()


@pytest.mark.parametrize("penalties", (False, True))
def test_sampling_after_a_captured_step_is_captured_too(penalties: bool) -> None:
    """Rows come and go, some are plainly greedy, logits change in place: the tokens of single launches, every time."""
    whole = logits_of("peaked", 16, torch.float32).cuda()
    decode = SimpleNamespace(captured={0: SimpleNamespace(logits=whole)})
    draw = SamplingGraphs(decode)  # type: ignore[arg-type]
    ask = {"top_p": 0.5}  # many rows are drawn again
    mine, plain = (rows_on("cuda", 16, penalties, ask) for _ in range(2))
    for row in (*mine, *plain):
        row.forbidden = ()
    for turn, count in enumerate((16, 16, 13, 9, 16, 2, 1, 16)):
        whole.copy_(whole.roll(turn, 1))
        chosen = [i for i in range(count) if i % 3 != turn % 3]
        found = best_tokens(whole[:count])
        want = found.clone()
        for row in (*mine, *plain):
            row.position += 1
        draw(whole[:count], [mine[i] for i in chosen], found)
        sample_rows(whole[:count], [plain[i] for i in chosen], want)
        assert found.tolist() == want.tolist(), (turn, count)
        assert any(a != b for a, b in zip(found[0].tolist(), best_tokens(whole[:count])[0].tolist())) or count < 9
    assert draw.captured and not draw.failed
    if penalties:
        for a, b in zip(mine, plain, strict=True):
            assert a.seen is not None and b.seen is not None and torch.equal(a.seen, b.seen)
    elsewhere = whole.clone()  # not where the graph's logits lie: single launches
    before, found = len(draw.captured), best_tokens(elsewhere)
    draw(elsewhere, mine, found)
    assert len(draw.captured) == before


@pytest.mark.parametrize("ask", ({}, {"top_p": 0.95}, {"top_k": 50, "top_p": 0.95, "min_p": 0.05}), ids=str)
def test_temporaries_are_those_of_the_plan(ask: dict[str, Any]) -> None:
    S = 256
    logits = torch.randn(S, V, device="cuda").bfloat16()
    rows = rows_on("cuda", S, True, ask)
    found = best_tokens(logits)
    sample_rows(logits, rows, found)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    sample_rows(logits, rows, found)
    torch.cuda.synchronize()
    taken = torch.cuda.max_memory_allocated() - before
    assert 0 < taken <= S * (workspace.ROW_BYTES + V // 8 + 512)  # and the bits of what is forbidden
    assert taken <= V * min(S, workspace.block_rows(V)) * workspace.LOGIT_BYTES
