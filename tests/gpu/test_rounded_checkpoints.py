"""Checkpoints in bf16 on a GPU: rounded by the copies themselves, beside others that decode in graphs, and from the
host bit for bit. Bounds are those of tests/engine/test_rounded_checkpoints.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny
import torch
from numerics import assert_same_bytes

from engine.driving import assert_nothing_held
from engine.reusing import apart, drive_out
from gpu.beside import BASE, CASES, MARKS, ask_beside, parting
from hybridkv import LLM, ReuseConfig
from hybridkv.cache import StatePool, StateSchema, TensorSpec

pytestmark = pytest.mark.gpu
STATE = ("gdn", "recurrent")
ANY = 2e-2


@pytest.mark.parametrize("kind", ["qwen3_5", "qwen3_next"])
def test_hits_are_as_near_to_cold_as_the_rounding_from_the_device_and_from_the_host(kind: str, tmp_path: Path) -> None:
    tiny.save(kind, tmp_path)
    rounding = ReuseConfig(checkpoint_dtype="bf16")
    with LLM(tmp_path, "cuda", "float32", max_requests=8, max_context=1024, reuse=rounding) as llm:
        manager, reuse = llm.manager, llm.manager.reuse
        assert reuse is not None and manager.host.pages and manager.memory_bytes() == llm.plan.nbytes
        ask_beside(llm, [BASE], marks=MARKS)

        def rows() -> dict[int, torch.Tensor]:
            kept = reuse.checkpoints.all.values()
            return {c.position: manager.state.rows(c.row)[STATE].clone() for c in kept if c.position % reuse.q == 0}

        before = rows()
        assert before and all(row.dtype == torch.bfloat16 and row.isfinite().all() for row in before.values())
        cold = [ask_beside(llm, [parting(*case, i + 1)], cache=False)[0] for i, case in enumerate(CASES)]
        for where in ("device", "host"):
            for i, case in enumerate(CASES):
                if where == "host":
                    drive_out(llm.engine)
                [warm] = ask_beside(llm, [parting(*case, i + 1)], cache="read")
                assert warm.cached_tokens >= 128 and warm.reuse["tier"] == where, warm.reuse
                assert 0 < apart(warm, cold[i]) <= ANY
                for position, row in rows().items():
                    assert torch.equal(row, before[position]), "a copy changed it"
        assert manager.host.failed == 0
        assert_nothing_held(llm.engine)


def test_a_copy_rounds_as_on_a_cpu() -> None:
    """To the nearest, of ties the even one; and the host waits for nothing."""
    spec = TensorSpec("recurrent", (3, 5, 7), "float32", checkpoint_dtype="bfloat16")
    pools = {
        device: StatePool((StateSchema("gdn", (0, 2), (spec,)),), 2, torch.device(device), 0, 3)
        for device in ("cpu", "cuda")
    }
    numbers = torch.randn(2, 3, 5, 7) * torch.logspace(-30, 30, 7)
    numbers[0, 0, 0, :4] = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, 0.0, -0.0])  # ties, zeros
    for pool in pools.values():
        pool.tensors[STATE][:, 1] = numbers.to(pool.tensors[STATE].device)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for pool in pools.values():
            pool.copy(1, 4)
            pool.copy(4, 0)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for found in (pools["cuda"].rows(4)[STATE], pools["cuda"].rows(0)[STATE]):
        mine = pools["cpu"].rows(4 if found.dtype == torch.bfloat16 else 0)[STATE]
        assert_same_bytes(found.cpu().contiguous(), mine.contiguous())
