"""The gated delta rule: chunks against the recurrence, both against float64; the state depends on the tokens alone."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from numerics import assert_close_rms, assert_same_bytes, rel_rms
from torch import Tensor

from hybridkv.kernels.gdn.rule import CHUNK, gated_delta_chunks, gated_delta_ref, gated_delta_step_ref

# f32 against float64: each of up to 64 corrected values of a chunk is a sum over those before it, about 2^-24 * 64
BOUND = 4e-6
LENGTHS = (1, 2, 63, 64, 65, 127, 128, 129, 200)
Inputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def inputs(T: int, H: int = 3, K: int = 16, V: int = 24) -> Inputs:
    """q, k, v, g, beta as the layer gives them: unit keys, scaled unit queries, g <= 0, beta in 0..1."""
    q, k = (F.normalize(torch.randn(T, H, K), dim=-1) for _ in range(2))
    return q * K**-0.5, k, torch.randn(T, H, V), -F.softplus(2 * torch.randn(T, H) - 2), torch.rand(T, H)


def start(H: int = 3, K: int = 16, V: int = 24) -> Tensor:
    return torch.randn(H, K, V)


def in_float64(given: Inputs, state: Tensor) -> tuple[Tensor, Tensor]:
    """The formulas of the recurrence, one head and one token at a time."""
    q, k, v, g, beta = (x.double() for x in given)
    out, states = torch.empty_like(v), state.double().clone()
    for h in range(len(state)):
        S = states[h]
        for t in range(len(v)):
            S = torch.exp(g[t, h]) * S
            u = beta[t, h] * (v[t, h] - S.T @ k[t, h])
            S = S + torch.outer(k[t, h], u)
            out[t, h] = S.T @ q[t, h]
        states[h] = S
    return out, states


def check(given: Inputs, state: Tensor, bound: float = BOUND) -> None:
    want_out, want_state = in_float64(given, state)
    for form in (gated_delta_chunks, gated_delta_ref):
        own = state.clone()
        out = form(*given, own)
        assert_close_rms(f"{form.__name__}, output", want_out, out, bound)
        assert_close_rms(f"{form.__name__}, state", want_state, own, bound)


@pytest.mark.parametrize("T", LENGTHS)
def test_chunks_and_recurrence_are_the_formulas(T: int) -> None:
    check(inputs(T), start())
    check(inputs(T), torch.zeros(3, 16, 24))


@pytest.mark.parametrize("T", (64, 129))
def test_chunks_at_the_size_of_a_real_head(T: int) -> None:
    check(inputs(T, 2, 128, 128), start(2, 128, 128))


def changed(given: Inputs, name: str, value: float) -> Inputs:
    parts = dict(zip("qkvgb", given))
    parts[name] = torch.full_like(parts[name], value)
    return tuple(parts.values())  # type: ignore[return-value]


@pytest.mark.parametrize("T", (1, 64, 129))
@pytest.mark.parametrize(
    ("name", "value"),
    [("g", v) for v in (0.0, -1e-6, -30.0, -200.0, -1e4)] + [("b", 0.0), ("b", 1.0), ("k", 0.0), ("q", 0.0)],
)
def test_extreme_gates_strengths_and_keys(name: str, value: float, T: int) -> None:
    """exp(-200) and exp(-1e4) are 0 in f32: the state is forgotten and nothing turns into NaN."""
    check(changed(inputs(T), name, value), start(), bound=2e-5)  # no decay at all: 129 tokens add up in one state


def test_no_strength_and_no_decay_leave_the_state_bit_for_bit() -> None:
    given, state = changed(changed(inputs(100), "g", 0.0), "b", 0.0), start()
    for form in (gated_delta_chunks, gated_delta_ref):
        own = state.clone()
        form(*given, own)
        assert_same_bytes(state, own)


def test_a_zero_key_only_decays_the_state() -> None:
    given, state = changed(inputs(70), "k", 0.0), start()
    want = state * given[3].sum(0).exp()[:, None, None]
    gated_delta_chunks(*given, state)
    assert_close_rms("state", want, state, BOUND)


def test_one_strong_decay_does_not_blur_the_tokens_after_it() -> None:
    """Sums of g reach thousands, differences between neighbours stay near 0.01: they must keep their digits."""
    given = inputs(200)
    given[3].mul_(0.02)
    given[3][5], given[3][70] = -300.0, -3000.0
    check(given, start())


def test_strengths_of_one_on_repeated_keys_replace_the_value() -> None:
    """beta 1, no decay, always the same key: the state answers that key with the last value alone."""
    T, key = 129, F.normalize(torch.randn(3, 16), dim=-1)
    q, _, v, _, _ = inputs(T)
    state = torch.zeros(3, 16, 24)
    gated_delta_chunks(q, key.expand(T, 3, 16), v, torch.zeros(T, 3), torch.ones(T, 3), state)
    answer = (key.unsqueeze(-2) @ state).squeeze(-2)
    assert_close_rms("last value", v[-1], answer, 2e-5)  # 128 replacements, each to 2^-24 of |k|^2 = 1


def split(given: Inputs, state: Tensor, cuts: list[int]) -> tuple[Tensor, Tensor]:
    own, parts = state.clone(), []
    for a, b in itertools.pairwise([0, *cuts, len(given[0])]):
        if b - a == 1:
            parts.append(gated_delta_step_ref(*(x[a:b] for x in given), own[None]))
        else:
            parts.append(gated_delta_chunks(*(x[a:b] for x in given), own))
    return torch.cat(parts), own


@pytest.mark.parametrize("cuts", ([1], [63], [65], [100, 101], [1, 2, 3], [37, 74, 111, 148, 185], list(range(1, 200))))
def test_the_state_does_not_depend_on_the_split(cuts: list[int]) -> None:
    given, state = inputs(200), start()
    want, whole = split(given, state, [])
    out, own = split(given, state, cuts)
    assert_close_rms("state", whole, own, BOUND)  # the same sums in f32, grouped otherwise
    assert_close_rms("output", want, out, BOUND)


@pytest.mark.parametrize("cuts", ([64], [128], [192], [64, 128], [64, 192], [64, 128, 192]))
@pytest.mark.parametrize("shape", ((3, 16, 24), (4, 128, 128)))
def test_splits_at_multiples_of_the_chunk_give_the_same_bits(cuts: list[int], shape: tuple[int, int, int]) -> None:
    assert all(c % CHUNK == 0 for c in cuts)
    given, state = inputs(200, *shape), start(*shape)
    want, whole = split(given, state, [])
    out, own = split(given, state, cuts)
    assert_same_bytes(whole, own)
    assert_same_bytes(want.contiguous(), out.contiguous())


def test_512_steps_do_not_drift() -> None:
    given, state = inputs(512, 4, 32, 32), torch.zeros(4, 32, 32)
    want_out, want_state = in_float64(given, state)
    out, own = split(given, state, list(range(1, 512)))
    # every step rounds at 2^-24 and the decay forgets old rounding, so errors do not add up over the steps
    assert_close_rms("state", want_state, own, 1e-6)
    assert_close_rms("last outputs", want_out[-64:], out[-64:], 1e-6)


def test_steps_of_several_requests_are_steps_of_each() -> None:
    given, states = inputs(5), torch.randn(5, 3, 16, 24)
    alone = states.clone()
    out = gated_delta_step_ref(*given, states)
    for b in range(5):
        one = gated_delta_step_ref(*(x[b : b + 1] for x in given), alone[b : b + 1])
        assert_close_rms("output", one, out[b : b + 1], 1e-6)
    assert_close_rms("states", alone, states, 1e-6)


def test_the_bound_would_see_a_swapped_order() -> None:
    """Guard: correcting before the decay, or a decay that reaches one token too far, is far outside the bound."""
    given, state = inputs(129), start()
    want, _ = in_float64(given, state)
    late = (*given[:3], given[3].roll(1, 0), given[4])
    assert rel_rms(want, gated_delta_chunks(*late, state.clone())) > 1e3 * BOUND
    swapped = (given[0], given[1], given[2], given[3], given[4] * given[3].exp())
    assert rel_rms(want, gated_delta_chunks(*swapped, state.clone())) > 1e3 * BOUND
