"""standings against counting by hand, torch and Triton."""

import struct

import pytest
import torch

from hybridkv.kernels.eviction import standing

FORMS = ("ref", "triton")


def bin_of(x: float) -> int:
    """The leading bits of 1 + x as a float."""
    above = torch.tensor(x, dtype=torch.float32) + 1
    return struct.unpack("i", struct.pack("f", min(max(float(above), 2**-20), 2.0)))[0] >> 15


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("spread", (1.0, 1e-3, 1e-5))  # keys that nearly agree are told apart as well
def test_a_place_is_the_part_that_is_not_better(form: str, spread: float) -> None:
    torch.manual_seed(0)
    lengths = torch.tensor([50, 1, 0, 33])
    x = (torch.rand(4, 50) * 2 * spread - 1).clamp(-1, 1)
    for g, n in enumerate(lengths.tolist()):
        x[g, n:] = torch.tensor([torch.nan, torch.inf, 1.0, -1.0] * 13)[: 50 - n]  # means nothing
    got = getattr(standing, f"standings_{form}")(x, lengths)
    for g, n in enumerate(lengths.tolist()):
        bins = [bin_of(v) for v in x[g, :n].tolist()]
        want = torch.tensor([1 - sum(b > own for b in bins) / max(n, 1) for own in bins])
        assert torch.allclose(got[g, :n], want, atol=1e-6)
    assert len(set(got[0].tolist())) > 20


@pytest.mark.parametrize("form", FORMS)
def test_the_ends_and_nan(form: str) -> None:
    x = torch.tensor([[-1.0000001, 1.0000001, torch.nan, -torch.inf, 0.0]])
    got = getattr(standing, f"standings_{form}")(x, torch.tensor([5]))
    assert got[0, 1] == 1 and got[0, 4] == pytest.approx(0.8) and got[0, 2].isnan()
    assert got[0, 0] == got[0, 3] == pytest.approx(0.6)  # a NaN is counted with the last


@pytest.mark.parametrize("shape", ((0, 5), (2, 0), (1, 1), (3, 2000)))
def test_both_forms_agree(shape: tuple[int, int]) -> None:
    x = torch.rand(shape) * 2 - 1
    lengths = torch.full(shape[:1], shape[1])
    assert torch.equal(standing.standings_ref(x, lengths), standing.standings_triton(x, lengths))
