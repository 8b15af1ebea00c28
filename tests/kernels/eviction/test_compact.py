"""The compaction kernel moves bytes: any dtype, any entry size, overlapping places."""

import pytest
import torch
from numerics import assert_same_bytes
from torch import Tensor
from triton_interpreter import DEVICE

from hybridkv.kernels.eviction.compact import as_words, compact_ref, compact_triton

pytest.importorskip("triton")

ENTRIES = {
    "bf16 x 256": (torch.bfloat16, (256,)),
    "bf16 x 37": (torch.bfloat16, (37,)),
    "f32 x 2 x 5": (torch.float32, (2, 5)),
    "f32 scale": (torch.float32, ()),
    "codes x 100": (torch.uint8, (100,)),
    "codes x 7": (torch.uint8, (7,)),
    "f32 x 300": (torch.float32, (300,)),
}


def poison(entry: str, N: int, P: int) -> Tensor:
    """Random bits, NaN patterns of every payload among them."""
    dtype, shape = ENTRIES[entry]
    bits = torch.randint(0, 256, (N, P, *shape[:-1], (shape or (1,))[-1] * dtype.itemsize), dtype=torch.uint8)
    return bits.view(dtype).view(N, P, *shape)


def check(pool: Tensor, source: Tensor, target: Tensor, apart: bool = False) -> None:
    want, got = pool.clone(), pool.clone().to(DEVICE)
    compact_ref(want, source, target)
    compact_triton([got], source.to(DEVICE), target.to(DEVICE), apart)
    assert_same_bytes(want, got)


def survivors(length: int, keep: int, P: int, pages: Tensor) -> tuple[Tensor, Tensor]:
    """Entries of a stream on `pages` that move to its front."""
    entry = torch.randperm(length)[:keep].sort().values
    flat = lambda e: pages[e // P] * P + e % P  # noqa: E731
    return flat(entry), flat(torch.arange(keep))


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("P", (1, 2, 16, 53, 64))
def test_survivors_move_to_the_front_of_their_stream_byte_for_byte(entry: str, P: int) -> None:
    N = -(-120 // P)
    order = torch.randperm(N + 2)[:N]
    check(poison(entry, N + 2, P), *survivors(min(119, N * P), 41, P, order))


def test_two_streams_of_different_lengths_in_one_call() -> None:
    P, order = 16, torch.randperm(16)
    a, b = survivors(100, 33, P, order[:7]), survivors(70, 5, P, order[7:12])
    check(poison("bf16 x 37", 16, P), torch.cat((a[0], b[0])), torch.cat((a[1], b[1])))


@pytest.mark.parametrize("shift", (-1, 1, 40))
def test_overlap_in_either_direction_is_safe(shift: int) -> None:
    source = torch.arange(60, 160)
    check(poison("codes x 7", 4, 64), source, source + shift)
    check(poison("codes x 7", 4, 64), source, source.flip(0))  # every place is read and written


@pytest.mark.parametrize("apart", (False, True))
def test_pools_of_all_kinds_go_together_and_padding_moves_nothing(apart: bool) -> None:
    kinds = ("bf16 x 37", "codes x 100", "f32 scale", "bf16 x 37", "f32 scale", "bf16 x 37")
    pools = [poison(kind, 12, 8) for kind in kinds]
    source = torch.randperm(48)[:30].sort().values
    target = torch.arange(30) + (48 if apart else 0)
    target[::7] = -1
    got = [pool.clone().to(DEVICE) for pool in pools]
    compact_triton(got, source.where(target >= 0, -1).to(DEVICE), target.to(DEVICE), apart)
    for pool, moved in zip(pools, got):
        compact_ref(pool, source, target)
        assert_same_bytes(pool, moved)
    for entry in ENTRIES:
        check(poison(entry, 12, 8), source, target, apart)


@pytest.mark.parametrize("n", (0, 1))
def test_nothing_and_one_entry(n: int) -> None:
    check(poison("f32 x 2 x 5", 2, 4), torch.tensor([7])[:n], torch.tensor([2])[:n])


def test_a_pool_at_an_odd_address_is_moved_in_narrow_words() -> None:
    whole = torch.randint(0, 256, (1 + 3 * 4 * 8,), dtype=torch.uint8)
    pool = whole[1:].view(3, 4, 8).clone() if DEVICE == "cpu" else whole[1:].view(3, 4, 8).to(DEVICE)
    shifted = torch.empty(97, dtype=torch.uint8, device=DEVICE)[1:].view(3, 4, 8)
    shifted.copy_(pool)
    want = shifted.clone()
    source, target = (torch.tensor(x, device=DEVICE) for x in ([3, 6, 11], [0, 1, 2]))
    assert as_words(shifted)[0].dtype == torch.uint8
    compact_ref(want, source, target)
    compact_triton([shifted], source, target)
    assert_same_bytes(want, shifted)


def test_words_are_as_wide_as_entries_allow() -> None:
    for entry, (dtype, words) in {
        "bf16 x 256": (torch.int64, 64),
        "bf16 x 37": (torch.int16, 37),
        "f32 scale": (torch.int32, 1),
        "codes x 7": (torch.uint8, 7),
    }.items():
        flat, n = as_words(poison(entry, 2, 2))
        assert (flat.dtype, n) == (dtype, words)
