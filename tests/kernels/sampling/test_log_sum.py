"""log_sum_exp against float64, in both forms."""

import pytest
import torch
from triton_interpreter import DEVICE

from hybridkv.kernels.sampling.log_sum import PIECE, log_sum_exp, log_sum_exp_triton

pytest.importorskip("triton")


@pytest.mark.parametrize("form", (log_sum_exp, log_sum_exp_triton))
@pytest.mark.parametrize("V", (1, 50, PIECE, 2 * PIECE + 3))
@pytest.mark.parametrize("S", (0, 1, 3))
def test_the_logarithm_of_the_sum(form, S: int, V: int) -> None:
    wide = 30 * torch.randn(S, V + 3, device=DEVICE)
    for logits in (wide[:, 1 : 1 + V], wide.bfloat16()[:, :V].T.contiguous().T):
        want = logits.double().logsumexp(-1)
        assert torch.allclose(form(logits).double(), want, rtol=1e-6, atol=1e-5)  # f32 of numbers up to 120


@pytest.mark.parametrize("form", (log_sum_exp, log_sum_exp_triton))
def test_tokens_that_are_ruled_out_add_nothing(form) -> None:
    logits = torch.full((2, 2 * PIECE), -torch.inf, device=DEVICE)
    logits[0, PIECE + 5], logits[1, [3, PIECE]] = 2.0, -1e30
    assert torch.allclose(form(logits), torch.tensor([2.0, -1e30], device=DEVICE))
