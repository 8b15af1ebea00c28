"""Masks over chosen rows of logits, by the kernel and by torch, and what is sampled where little is left."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from numerics import assert_same_bytes
from torch import Tensor
from triton_interpreter import DEVICE

from hybridkv.kernels.best_tokens import best_tokens_ref
from hybridkv.kernels.sampling.launch import sample_rows_triton
from hybridkv.kernels.sampling.mask import WORDS, mask_rows, mask_rows_triton
from hybridkv.kernels.sampling.rows import SampleRow
from hybridkv.kernels.sampling.sample import sample_rows_ref

pytest.importorskip("triton")
FORMS = (mask_rows, mask_rows_triton)
PIECE = 32 * WORDS


def packed(allowed: np.ndarray, words: int) -> Tensor:
    """[M, V] truth values as bits, those behind the vocabulary set: nothing may look at them."""
    bits = np.ones((len(allowed), 32 * words), bool)
    bits[:, : allowed.shape[1]] = allowed
    return torch.from_numpy(np.packbits(bits, 1, bitorder="little").view(np.int32)).to(DEVICE)


def masked(logits: Tensor, allowed: np.ndarray, rows: list[int]) -> Tensor:
    """What is to come out, token by token."""
    want = logits.clone()
    for mask, row in zip(allowed, rows, strict=True):
        if row >= 0:
            want[row, ~torch.from_numpy(mask).to(DEVICE)] = -torch.inf
    return want


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("V", (1, 31, 32, 33, 97, PIECE, PIECE + 1, 2 * PIECE - 5))
def test_chosen_rows_alone_change(form: Callable, dtype: torch.dtype, V: int) -> None:
    rng = np.random.default_rng(V)
    for rows in ([], [2], [4, 0, -1, 3], [-1]):
        for extra in (0, 3):
            allowed = rng.random((len(rows), V)) < 0.3
            masks = packed(allowed, (V + 31) // 32 + extra)[:, : (V + 31) // 32 + extra]
            numbers = torch.tensor(rows, dtype=torch.int64, device=DEVICE)
            wide = torch.randn(6, V + 7, device=DEVICE).to(dtype)
            wide[1], wide[5] = torch.nan, torch.inf  # neighbours that hold anything stay as they are
            for logits in (wide[:, 3 : 3 + V], wide[:, :V].T.contiguous().T):
                whole = logits.clone() if logits.stride(1) != 1 else wide.clone()
                want = masked(logits, allowed, rows)
                form(logits, masks, numbers)
                assert_same_bytes(want, logits)
                if logits.stride(1) == 1:
                    assert_same_bytes(whole[:, :3], wide[:, :3])
                    assert_same_bytes(whole[:, 3 + V :], wide[:, 3 + V :])


@pytest.mark.parametrize("form", FORMS)
def test_the_highest_bit_of_a_word_counts(form: Callable) -> None:
    logits = torch.zeros(1, 64, device=DEVICE)
    form(
        logits,
        torch.tensor([[-(1 << 31), 1]], dtype=torch.int32, device=DEVICE),
        torch.zeros(1, dtype=torch.int64, device=DEVICE),
    )
    assert logits[0].isfinite().nonzero().flatten().tolist() == [31, 32]


@pytest.mark.parametrize(
    "settings",
    [{}, {"temperature": 1.0}, {"temperature": 0.7, "top_k": 5}, {"temperature": 1.3, "top_p": 0.8},
     {"temperature": 1.0, "top_k": 3, "top_p": 0.9, "min_p": 0.1}, {"temperature": 1.0, "top_k": 700}],
)  # fmt: skip
def test_rows_of_which_little_is_left_are_sampled_as_defined(settings: dict[str, float]) -> None:
    """A grammar leaves one token, or a few, of a vocabulary; the kernels choose what the definition chooses."""
    V = 2 * PIECE + 40
    logits = torch.randn(4, V, generator=torch.Generator().manual_seed(3)).to(DEVICE)
    allowed = np.zeros((4, V), bool)
    for row, ids in enumerate(([V - 1], [7, PIECE + 3], [5, 6, PIECE, 2 * PIECE], range(0, V, 9))):
        allowed[row, list(ids)] = True
    mask_rows(logits, packed(allowed, (V + 31) // 32), torch.arange(4, device=DEVICE))
    rows = [SampleRow(**settings, seed=11 + i, row=i, out=i, position=30) for i in range(4)]  # type: ignore[arg-type]
    found, want = best_tokens_ref(logits), best_tokens_ref(logits)
    sample_rows_ref(logits, rows, want)
    sample_rows_triton(logits, rows, found)
    assert_same_bytes(want, found)
    assert all(allowed[i, int(token)] for i, token in enumerate(want[0])) and not want[1].any()
