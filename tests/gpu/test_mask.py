"""Masks on the GPU: the bytes of the definition at real widths, in a CUDA graph, behind 2^31 logits, in an engine."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import tiny
import torch
from numerics import assert_same_bytes

from engine.ascii_tokenizer import write_tokenizer
from engine.driving import assert_nothing_held, prompt
from hybridkv import LLM, SamplingParams
from hybridkv.kernels.sampling import mask as file
from hybridkv.kernels.sampling.mask import mask_rows, mask_rows_ref

pytestmark = pytest.mark.gpu


def masks_of(count: int, words: int) -> torch.Tensor:
    return torch.randint(-(1 << 31), 1 << 31, (count, words)).to(torch.int32).cuda()


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("V", (248320, 248319, 151936, 49153, 33, 1))
def test_the_bytes_are_those_of_the_definition(V: int, dtype: torch.dtype, count: Callable) -> None:
    calls = count(file, "mask_rows_triton")
    wide = torch.randn(64, V + 9, dtype=torch.float32).to(dtype).cuda()
    wide[3], wide[9] = torch.nan, torch.inf
    rows = torch.tensor([5, 63, -1, 0, 31], device="cuda")
    masks = masks_of(5, (V + 31) // 32 + 2)
    rows_first = (wide.clone()[:, 4 : 4 + V], wide.clone()[:, 4 : 4 + V])
    for got, want in (rows_first, (wide.T.clone()[:V].T, wide[:, :V].clone())):
        mask_rows(got, masks, rows)
        mask_rows_ref(want, masks, rows)
        assert_same_bytes(want, got)
    assert len(calls) == 2


def test_a_graph_reads_the_masks_that_lie_in_its_buffers() -> None:
    V = 248320
    logits, fresh = torch.randn(8, V).cuda(), torch.randn(8, V).cuda()
    masks, rows = masks_of(8, V // 32), torch.full((8,), -1, device="cuda")
    mask_rows(logits.clone(), masks, rows)  # compiled
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        mask_rows(logits, masks, rows)
    for chosen in ([], [7], list(range(8)), [2, 5]):
        rows.fill_(-1)
        rows[: len(chosen)] = torch.tensor(chosen, dtype=torch.int64)
        masks.copy_(masks_of(8, V // 32))
        logits.copy_(fresh)
        want = fresh.clone()
        mask_rows_ref(want, masks, rows)
        graph.replay()
        assert_same_bytes(want, logits)


def test_rows_behind_2_to_the_31_logits() -> None:
    V = 248320
    R = (1 << 31) // V + 3
    logits = torch.empty(R, V, dtype=torch.bfloat16, device="cuda")
    logits[-2:] = 1.0
    masks = masks_of(1, V // 32)
    mask_rows(logits, masks, torch.tensor([R - 1], device="cuda"))
    want = torch.ones(1, V, dtype=torch.bfloat16, device="cuda")
    mask_rows_ref(want, masks, torch.zeros(1, dtype=torch.int64))
    assert_same_bytes(want[0], logits[-1])
    assert (logits[-2] == 1).all()


@pytest.mark.parametrize("kind", ("llama", "qwen3_5"))
def test_constrained_answers_beside_free_ones(kind: str, tmp_path: Path) -> None:
    """Graphs, steps launched ahead, masks: JSON fits, and free answers are those of a run without it."""
    pytest.importorskip("llguidance")
    tiny.save(kind, tmp_path)
    write_tokenizer(tmp_path)
    numbers, words = {"type": "integer", "minimum": 0, "maximum": 99}, {"enum": ["x", "yz"]}
    schema = {"type": "object", "properties": {"a": numbers, "b": words}, "required": ["a", "b"]}
    structure = {"json": schema | {"additionalProperties": False}}
    bound = SamplingParams(max_tokens=60, temperature=1.0, seed=3, structured_outputs=structure, ignore_eos=True)
    free = [SamplingParams(max_tokens=40, temperature=0.8 * (i % 2), seed=i, ignore_eos=True) for i in range(14)]
    asked = [prompt(5 + 3 * i, i) for i in range(14)]
    with LLM(tmp_path, device="cuda", dtype="float32", exact=True, max_requests=16, max_context=256) as llm:
        alone = [each.token_ids for each in llm.generate(asked, free)]
        together = llm.generate([*asked, prompt(9), prompt(20)], [*free, bound, bound])
        assert [each.token_ids for each in together[:14]] == alone
        for each in together[14:]:
            found = json.loads(each.text)
            assert each.finish_reason == "stop" and 0 <= found["a"] <= 99 and found["b"] in ("x", "yz")
        llm.owner.run(lambda engine: engine.drain(), drained=True)
        assert_nothing_held(llm.engine)
