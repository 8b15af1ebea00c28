"""Numbers that sampling draws and weighs by: each in plain torch and in Triton, equal bit for bit.

Random numbers are counted, not remembered: token i at position p of a request with seed s has word i % 4 of
Philox-4x32-7 (Salmon et al., 2011: seven rounds pass every test of BigCrush) with key s and counter (i / 4, p mod 2^32,
p / 2^32, 0). So they depend on nothing else: not on the batch, not on what was drawn before, not on the device.

A function of a library may differ in its last bit from one device to the next, and a sum in another order does. So
logarithms and powers here are polynomials of f32 products and sums, each rounded (kernels that use them are compiled
without fused multiply-add), and weights are whole numbers, whose sums have one value in any order. Where a float is
made a whole number, a large one is added: then its last bits are that number, which takes no conversion.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybridkv.kernels.backend import tl, triton

UNIT_BITS = 40  # the best token's weight is 2^40: the sum of 2^22 tokens fits in an int64
MAX_VOCAB = 1 << 22
MOST_NOISE = 23.0  # Gumbel noise lies between -2.9 and this: the words have 32 bits

LOG2_E = 1.4426950408889634
LN_2 = 0.6931471805599453
# 2^-f - 1 over f, for f from -1/2 to 1/2 (off by 3e-6 at the most); and log(1 + x), of which x - x^2 / 2 is taken, over
# x^3 (Cephes, logf)
POWER = (0.009582852944731712, -0.055906426161527634, 0.24024099111557007, -0.6931241750717163)
LOG = (
    0.070376836292, -0.11514610310, 0.11676998740, -0.12420140846, 0.14249322787, -0.16668057665, 0.20000714765,
    -0.24999993993, 0.33333331174,
)  # fmt: skip
ROOT_HALF = 0x3F3504F3  # bits of sqrt(1/2)
BELOW_ONE = 1 - 2**-24
ROUNDS = 7  # of Philox
WHOLE = 1.5 * 2.0**23  # added to a float up to 2^22, its last bit is 1
ONE, FINE = 0x3F800000, 0x37400000  # bits of 1, whose last bit is 2^-23; and of 1.5 * 2^-17, whose last bit is 2^-40
FINE_BITS = UNIT_BITS - 23  # of a weight that do not fit the last bit of 1

_POWER, _LOG = tl.constexpr(POWER), tl.constexpr(LOG)
_LOG2_E, _LN_2, _ROOT_HALF, _BELOW_ONE = map(tl.constexpr, (LOG2_E, LN_2, ROOT_HALF, BELOW_ONE))
_ROUNDS, _WHOLE, _ONE, _FINE = map(tl.constexpr, (ROUNDS, WHOLE, ONE, FINE))
FINE_SHIFT = tl.constexpr(FINE_BITS)


# ---- plain torch


def philox_ref(
    seed: int, counter: tuple[Tensor | int, Tensor | int, Tensor | int, Tensor | int], rounds: int = ROUNDS
) -> tuple[Tensor, ...]:
    """Four words of 32 bits, int64 each, of Philox-4x32."""
    low = 0xFFFFFFFF
    c0, c1, c2, c3 = counter
    k0, k1 = seed & low, seed >> 32 & low
    for _ in range(rounds):
        a, b = c0 * 0xD2511F53, c2 * 0xCD9E8D57  # int64 keeps the 64 bits of a product, whatever its sign
        c0, c1, c2, c3 = (b >> 32 & low) ^ c1 ^ k0, b & low, (a >> 32 & low) ^ c3 ^ k1, a & low
        k0, k1 = k0 + 0x9E3779B9 & low, k1 + 0xBB67AE85 & low
    return c0, c1, c2, c3  # type: ignore[return-value]


def random_words_ref(seed: int, position: int, ids: Tensor | int, device: torch.device | None = None) -> Tensor:
    """Words [n] int64 of tokens ids [n] int64; of all tokens below a number."""
    every = isinstance(ids, int)
    counts = torch.arange((ids + 3) // 4, device=device) if isinstance(ids, int) else ids >> 2
    words = philox_ref(seed, (counts, position & 0xFFFFFFFF, position >> 32, 0))
    if every:
        return torch.stack(words, 1).flatten()[:ids]
    return torch.stack(words, 1).gather(1, (ids & 3).unsqueeze(1)).squeeze(1)  # type: ignore[operator]


def uniform_ref(words: Tensor) -> Tensor:
    """f32 above 0 and below 1, as precise near 0 as elsewhere."""
    return (words.float() * 2.0**-32 + 2.0**-33).clamp_(max=BELOW_ONE)


def _log1p_ref(x: Tensor) -> Tensor:
    """log(1 + x) for 1 + x from sqrt(1/2) to sqrt(2)."""
    sums = torch.full_like(x, LOG[0])
    for c in LOG[1:]:
        sums = sums * x + c
    square = x * x
    return (sums * x * square - square * 0.5) + x


def _split_ref(x: Tensor) -> tuple[Tensor, Tensor]:
    """x = m 2^e with m from sqrt(1/2) to sqrt(2): m, and e in f32."""
    bits = x.view(torch.int32) - ROOT_HALF
    return ((bits & 0x7FFFFF) + ROOT_HALF).view(torch.float32), (bits >> 23).float()


def gumbel_ref(words: Tensor) -> Tensor:
    """Gumbel noise f32, -log(-log(1 - u)), of words int64."""
    u = uniform_ref(words)
    m, e = _split_ref(1.0 - u)
    wait = -(_log1p_ref(torch.where(e == 0, -u, m - 1.0)) + e * LN_2)  # exponential noise
    m, e = _split_ref(wait)
    return -(_log1p_ref(m - 1.0) + e * LN_2)


def weights_ref(distance: Tensor) -> Tensor:
    """exp(-distance) 2^40 as whole numbers int64, for distances f32 from 0 to inf."""
    x = (distance * LOG2_E).clamp(max=62.0)
    whole = x + WHOLE
    f = x - (whole - WHOLE)
    sums = torch.full_like(f, POWER[0])
    for c in POWER[1:]:
        sums = sums * f + c
    power = (sums * f + 1.0).view(torch.int32) - (whole.view(torch.int32) << 23)  # of two: 2^-f less `whole`
    value = power.view(torch.float32)
    above = value + 1.0
    left = value - (above - 1.0) + 1.5 * 2.0**-17
    return ((above.view(torch.int32) - ONE).long() << FINE_BITS) + (left.view(torch.int32) - FINE)


# ---- Triton


@triton.jit
def random_words(seed, position, b_id):
    """Words uint32 of tokens b_id int32."""
    c1 = (position & 0xFFFFFFFF).to(tl.uint32) + tl.zeros_like(b_id).to(tl.uint32)
    c2 = (position >> 32).to(tl.uint32) + tl.zeros_like(b_id).to(tl.uint32)
    w0, w1, w2, w3 = tl.philox(seed, (b_id >> 2).to(tl.uint32), c1, c2, tl.zeros_like(c1), n_rounds=_ROUNDS)
    b_place = b_id & 3
    return tl.where(b_place < 2, tl.where(b_place == 0, w0, w1), tl.where(b_place == 2, w2, w3))


@triton.jit
def random_row(seed, position, first, N: tl.constexpr):
    """Words uint32 [N] of the tokens from `first` on, a multiple of 4."""
    b_count = ((first >> 2) + tl.arange(0, N // 4)).to(tl.uint32)
    c1 = tl.zeros_like(b_count) + (position & 0xFFFFFFFF).to(tl.uint32)
    c2 = tl.zeros_like(b_count) + (position >> 32).to(tl.uint32)
    w0, w1, w2, w3 = tl.philox(seed, b_count, c1, c2, tl.zeros_like(c1), n_rounds=_ROUNDS)
    return tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3))


@triton.jit
def uniform(b_word):
    return tl.minimum(b_word.to(tl.float32) * 2.3283064365386963e-10 + 1.1641532182693481e-10, _BELOW_ONE)


@triton.jit
def _log1p(b_x):
    b_sum = tl.zeros_like(b_x) + _LOG[0]
    for i in tl.static_range(1, 9):
        b_sum = b_sum * b_x + _LOG[i]
    b_square = b_x * b_x
    return (b_sum * b_x * b_square - b_square * 0.5) + b_x


@triton.jit
def _split(b_x):
    b_bits = b_x.to(tl.int32, bitcast=True) - _ROOT_HALF
    return ((b_bits & 0x7FFFFF) + _ROOT_HALF).to(tl.float32, bitcast=True), (b_bits >> 23).to(tl.float32)


@triton.jit
def gumbel(b_word):
    b_u = uniform(b_word)
    b_m, b_e = _split(1.0 - b_u)
    b_wait = -(_log1p(tl.where(b_e == 0, -b_u, b_m - 1.0)) + b_e * _LN_2)
    b_m, b_e = _split(b_wait)
    return -(_log1p(b_m - 1.0) + b_e * _LN_2)


@triton.jit
def gumbel_bound(b_word):
    """At least the noise, in a few instructions: -log(1 - u) is more than u, and log2 above lines between powers."""
    b_bits = uniform(b_word).to(tl.int32, bitcast=True).to(tl.float32)
    return (127.0 - b_bits * 1.1920928955078125e-07) * _LN_2 + 0.001


@triton.jit
def weight_parts(b_distance):
    """A weight as two numbers int32: above * 2^17 + fine. Each can be added up for some 200 tokens."""
    b_x = tl.minimum(b_distance * _LOG2_E, 62.0)
    b_whole = b_x + _WHOLE
    b_f = b_x - (b_whole - _WHOLE)
    b_sum = tl.zeros_like(b_f) + _POWER[0]
    for i in tl.static_range(1, 4):
        b_sum = b_sum * b_f + _POWER[i]
    b_power = (b_sum * b_f + 1.0).to(tl.int32, bitcast=True) - (b_whole.to(tl.int32, bitcast=True) << 23)
    b_value = b_power.to(tl.float32, bitcast=True)
    b_above = b_value + 1.0
    b_left = b_value - (b_above - 1.0) + 1.1444091796875e-05  # 1.5 * 2^-17
    return b_above.to(tl.int32, bitcast=True) - _ONE, b_left.to(tl.int32, bitcast=True) - _FINE


@triton.jit
def weights(b_distance):
    b_above, b_fine = weight_parts(b_distance)
    return (b_above.to(tl.int64) << FINE_SHIFT) + b_fine
