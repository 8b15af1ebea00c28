"""The largest logit of each row, by the kernels and by torch."""

import pytest
import torch
from numerics import assert_same_bytes
from triton_interpreter import DEVICE

from hybridkv.kernels.best_tokens import PIECE, best_tokens, best_tokens_triton

pytest.importorskip("triton")
FORMS = (best_tokens, best_tokens_triton)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("V", (1, 50, PIECE, PIECE + 1, 3 * PIECE - 5))
@pytest.mark.parametrize("S", (0, 1, 3))
def test_the_largest_of_each_row(form, S: int, V: int) -> None:
    wide = torch.randn(S, V + 3, device=DEVICE)
    for logits in (wide[:, 1 : 1 + V], wide[:, :V].T.contiguous().T):
        got = form(logits)
        assert_same_bytes(torch.stack((logits.argmax(-1), torch.zeros(S, dtype=torch.int64, device=DEVICE))), got)


@pytest.mark.parametrize("form", FORMS)
def test_of_equal_logits_the_first_wins(form) -> None:
    logits = torch.full((4, 2 * PIECE), -torch.inf, device=DEVICE)
    logits[0, [7, 9, PIECE + 1]] = 3.0
    logits[1, [PIECE + 2, PIECE + 1]] = torch.inf
    logits[2, 2 * PIECE - 1] = -1e30
    assert form(logits)[0].tolist() == [7, PIECE + 1, 2 * PIECE - 1, 0]


@pytest.mark.parametrize("form", FORMS)
def test_a_broken_row_is_reported_and_its_neighbours_are_not(form) -> None:
    logits = torch.randn(6, 2 * PIECE + 3, device=DEVICE)
    logits[1, 2 * PIECE + 2], logits[3] = torch.nan, torch.nan
    logits[2, 0], logits[4] = torch.inf, -torch.inf
    logits[5, 1:] = -torch.inf
    tokens, broken = form(logits)
    assert broken.tolist() == [0, 1, 1, 1, 1, 0]
    assert tokens[[0, 2, 5]].tolist() == [int(logits[0].argmax()), 0, 0]
    assert ((tokens >= 0) & (tokens < logits.shape[1])).all()
