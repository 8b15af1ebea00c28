"""Random words against the published vectors of Philox, noise and weights against float64, and Triton against torch."""

from typing import Any

import pytest
import torch
from numerics import assert_same_bytes
from torch import Tensor
from triton_interpreter import DEVICE

from hybridkv.kernels.backend import tl, triton
from hybridkv.kernels.sampling.noise import (
    MOST_NOISE,
    gumbel,
    gumbel_bound,
    gumbel_ref,
    philox_ref,
    random_row,
    random_words,
    random_words_ref,
    uniform_ref,
    weights,
    weights_ref,
)

ONES = 0xFFFFFFFF
# Random123's kat_vectors: key, counter, the words of philox4x32 7 and of philox4x32 10
VECTORS = (
    (
        0,
        (0, 0, 0, 0),
        (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48),
        (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8),
    ),
    (
        (1 << 64) - 1,
        (ONES, ONES, ONES, ONES),
        (0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662),
        (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
    ),
    (
        0x299F31D0A4093822,
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0x4DFCCABA, 0x190A87F0, 0xC47362BA, 0xB6B5242A),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
)


@pytest.mark.parametrize(("key", "counter", "seven", "ten"), VECTORS)
def test_philox_gives_the_published_words(key: int, counter: tuple, seven: tuple, ten: tuple) -> None:
    given = tuple(torch.tensor([c]) for c in counter)
    assert tuple(int(word) for word in philox_ref(key, given)) == seven
    assert tuple(int(word) for word in philox_ref(key, given, 10)) == ten


def test_words_follow_from_seed_position_and_id_alone() -> None:
    every = random_words_ref(7, 5, 1001)
    ids = torch.tensor([1000, 0, 3, 4, 999])
    assert torch.equal(random_words_ref(7, 5, ids), every[ids])
    assert int(every[6]) == int(philox_ref(7, (torch.tensor([1]), 5, 0, 0))[2][0])
    for seed, position in ((8, 5), (7, 6), (7 + (1 << 32), 5), (7, 5 + (1 << 32))):
        other = random_words_ref(seed, position, 1001)
        assert (other == every).sum() <= 1  # of 1001 words of 32 bits
    assert ((every >= 0) & (every <= ONES)).all()


EXTREMES = torch.tensor([0, 1, 2, ONES, ONES - 1, ONES // 2, ONES // 2 + 1, 1257966796, 1257966797])


def words(count: int) -> Tensor:
    return torch.cat((EXTREMES, torch.randint(0, 1 << 32, (count,))))


def test_noise_is_that_of_float64() -> None:
    some = words(100_000)
    found, u = gumbel_ref(some), uniform_ref(some).double()
    want = -torch.log(-torch.log1p(-u))
    assert (u > 0).all() and (u < 1).all() and (found - want).abs().max() < 2e-6  # of f32 around 1, twice
    assert float(found.min()) > -2.9 and float(found.max()) < MOST_NOISE
    assert abs(float(found[9:].mean()) - 0.5772) < 0.03 and abs(float(found[9:].var()) - 1.6449) < 0.06  # 7 sigma


def test_weights_are_exponentials() -> None:
    distance = torch.cat((torch.tensor([0.0, 1e-9, 27.0, 28.5, 43.0, 1e30, torch.inf]), 40 * torch.rand(10_000)))
    found, want = weights_ref(distance), torch.exp(-distance.double()) * 2**40
    assert int(found[0]) == 1 << 40 and found[4:7].tolist() == [0, 0, 0]
    # f32 of a distance up to 40, a polynomial of four terms, and the rounding to a number
    assert ((found - want).abs() <= 5e-6 * want + 1).all()


@triton.jit
def all_kernel(word, distance, noise, bound, weight, listed, row, seed, position, first, N: tl.constexpr):
    o_n = tl.arange(0, N)
    b_word = tl.load(word + o_n).to(tl.uint32)
    tl.store(noise + o_n, gumbel(b_word))
    tl.store(bound + o_n, gumbel_bound(b_word))
    tl.store(weight + o_n, weights(tl.load(distance + o_n)))
    tl.store(listed + o_n, random_words(seed, position, first + o_n).to(tl.int64))
    tl.store(row + o_n, random_row(seed, position, first, N).to(tl.int64))


def test_triton_has_the_same_bits() -> None:
    pytest.importorskip("triton")
    N, seed, position, first = 2048, (1 << 62) + 12345, (1 << 33) + 77, 248_000
    some = words(N)[:N].to(DEVICE)
    distance = torch.cat((torch.tensor([0.0, 1e-9, 28.5, 1e30, torch.inf]), 40 * torch.rand(N)))[:N].to(DEVICE)
    out: dict[str, Any] = {name: torch.empty(N, device=DEVICE) for name in ("noise", "bound")}
    out |= {name: torch.empty(N, dtype=torch.int64, device=DEVICE) for name in ("weight", "listed", "row")}
    # the numbers of 64 bits come from a table in the kernels; here as arguments
    all_kernel[(1,)](
        some, distance, *out.values(), torch.tensor(seed).item(), position, first, N=N, enable_fp_fusion=False
    )
    assert_same_bytes(gumbel_ref(some), out["noise"])
    assert_same_bytes(weights_ref(distance), out["weight"])
    want = random_words_ref(seed, position, torch.arange(first, first + N, device=DEVICE))
    assert_same_bytes(want, out["listed"])
    assert_same_bytes(want, out["row"])
    assert (out["bound"] >= out["noise"]).all() and (out["bound"] - out["noise"])[out["noise"] > 5].max() < 0.1
