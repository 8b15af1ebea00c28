"""The largest logit of each row that is cut into parts, by the kernels and by torch: that of the whole row."""

import pytest
import torch
from numerics import assert_same_bytes
from triton_interpreter import DEVICE

from hybridkv.kernels.best_parts import best_part, best_part_triton, join_parts, join_parts_triton
from hybridkv.kernels.best_tokens import PIECE, best_tokens_ref

pytest.importorskip("triton")
FORMS = ((best_part, join_parts), (best_part_triton, join_parts_triton))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize(("S", "sizes"), ((0, (5, 5)), (1, (1, 1, 1)), (3, (PIECE + 3, PIECE + 1)), (2, (50, 50, 7))))
def test_parts_joined_give_what_the_whole_row_gives(form, S: int, sizes: tuple[int, ...], dtype: torch.dtype) -> None:
    """In bfloat16 there are ties."""
    part, join = form
    logits = torch.randn(S, sum(sizes), device=DEVICE).to(dtype)
    firsts = [sum(sizes[:i]) for i in range(len(sizes))]
    parts = torch.stack([part(x, first) for x, first in zip(logits.split(sizes, 1), firsts, strict=True)])
    assert_same_bytes(best_tokens_ref(logits), join(parts))


@pytest.mark.parametrize("form", FORMS)
def test_ties_and_broken_rows_are_those_of_the_whole_row(form) -> None:
    part, join = form
    V = 2 * PIECE + 10
    rows = torch.randn(9, V, device=DEVICE)
    rows[1, [3, V - 2]] = 50.0  # a tie over parts: the lower one
    rows[2, [V - 9, V - 2]] = 50.0
    rows[3, V - 1] = torch.nan
    rows[4, 2] = torch.inf
    rows[5] = -torch.inf
    rows[6, : V // 2 + 1] = -torch.inf  # nothing in the first part
    rows[7] = -torch.inf
    rows[7, 4] = torch.nan  # nothing but that
    rows[8, V - 1] = 60.0
    parts = torch.stack([part(rows[:, : V // 2], 0), part(rows[:, V // 2 :], V // 2)])
    want, got = best_tokens_ref(rows), join(parts)
    assert got[1].tolist() == want[1].tolist() == [0, 0, 0, 1, 1, 1, 0, 1, 0]
    right = want[1] == 0
    assert torch.equal(want[0][right], got[0][right]) and bool(((got[0] >= 0) & (got[0] < V)).all())
