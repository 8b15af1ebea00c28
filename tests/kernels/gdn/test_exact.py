"""gdn_exact: the kernels compute what the plain form does, and neither depends on how tokens are cut into steps."""

from collections.abc import Callable

import pytest
import torch
from long_form import few
from numerics import assert_close_rms, assert_same_bytes
from torch import Tensor
from triton_interpreter import DEVICE

from hybridkv.kernels.gdn.exact import Requests, gdn_exact_torch, gdn_exact_triton
from hybridkv.kernels.gdn.step import gdn_step_ref
from kernels.gdn.test_step import HEADS, delta_net, inputs, pools

F32, BF16 = torch.float32, torch.bfloat16
FORMS = {"torch": gdn_exact_torch, "triton": gdn_exact_triton}
# f32: sums of some ten products in another order. bf16: v is rounded (2^-9 at most) before S^T k is taken from it, and
# the result again; rows have four to ten values
BOUND = {F32: 3e-6, BF16: 2e-2}
Form = Callable[..., Tensor]


@pytest.fixture(params=FORMS)
def form(request: pytest.FixtureRequest) -> Form:
    pytest.importorskip("triton")
    return FORMS[request.param]


def step_of(counts: dict[int, int], padding: int = 0) -> Requests:
    """Slots and their numbers of tokens, and tokens of a prompt of padding behind them."""
    slots, tokens = [*counts, -1], [*counts.values(), padding]
    starts = torch.tensor([0, *torch.tensor(tokens).cumsum(0).tolist()])
    of_token = torch.repeat_interleave(torch.arange(len(slots)), torch.tensor(tokens))
    return Requests(torch.tensor(slots, device=DEVICE), starts.to(DEVICE), of_token.to(DEVICE))


@pytest.mark.long
@few("kind, dtype", [*HEADS], (F32, BF16))
def test_every_step_is_the_composition_of_single_tokens(kind: str, dtype: torch.dtype, form: Form) -> None:
    net = delta_net(*HEADS[kind])
    conv_states, states = pools(net, 5, F32)
    want_conv_states, want_states = conv_states.clone(), states.clone()
    for i, counts in enumerate(({3: 1, 1: 1, 4: 7}, {1: 1, 0: 2}, {4: 11, 3: 3})):
        requests, total = step_of(counts, 2), sum(counts.values())
        x = inputs(net, total + 2, dtype)
        got = form(x, net, conv_states, states, requests)
        assert got.dtype == dtype and (got[total:] == 0).all()
        at = 0
        for slot, n in counts.items():
            for t in range(at, at + n):
                one = gdn_step_ref(x[t : t + 1], net, want_conv_states, want_states, torch.tensor([slot]).to(DEVICE))
                assert_close_rms(f"step {i} slot {slot} token {t}", one[0], got[t], BOUND[dtype])
            at += n
        assert_same_bytes(want_conv_states, conv_states)
        assert_close_rms("states", want_states, states, BOUND[dtype])
        assert_same_bytes(want_states[2], states[2])  # nobody's


@pytest.mark.long
@few("kind, dtype", [*HEADS], (BF16, F32))
def test_the_same_bits_from_any_cut_and_in_any_company(kind: str, dtype: torch.dtype, form: Form) -> None:
    net, T = delta_net(*HEADS[kind]), 9  # the convolution is four tokens wide
    x, others = inputs(net, T, dtype), inputs(net, 40, dtype)
    begin = pools(net, 3, F32, dtype)
    found = []
    for cuts, company in (([T], False), ([1] * T, False), ([2, 1, 5, 1], False), ([3, 1, 5], True)):
        conv_states, states = (t.clone() for t in begin)
        parts, at = [], 0
        for n in cuts:
            if company:  # one that decodes before, a prompt behind
                rows = torch.cat((others[at : at + 1], x[at : at + n], others[at : at + 9]))
                parts.append(form(rows, net, conv_states, states, step_of({2: 1, 1: n, 0: 4}, 5))[1 : 1 + n])
            else:
                parts.append(form(x[at : at + n], net, conv_states, states, step_of({1: n})))
            at += n
        found.append((torch.cat(parts), conv_states[1], states[1]))
    for other in found[1:]:
        for one, same in zip(found[0], other, strict=True):
            assert_same_bytes(one, same)


def test_padding_touches_nothing(form: Form) -> None:
    net = delta_net(*HEADS["shared keys"])
    conv_states, states = pools(net, 3, F32)
    conv_states[0], states[0], conv_states[2], states[2] = (torch.nan for _ in range(4))
    was = conv_states.clone(), states.clone()
    x = inputs(net, 9, BF16)
    x[3:] = torch.nan
    requests = Requests(
        *(torch.tensor(t, device=DEVICE) for t in ([-1, 1, -1, -1], [0, 0, 3, 3, 9], [1] * 3 + [3] * 6))
    )
    out = form(x, net, conv_states, states, requests)
    assert out[:3].isfinite().all() and (out[3:] == 0).all()
    for before, after in zip(was, (conv_states, states), strict=True):
        assert_same_bytes(before[[0, 2]], after[[0, 2]])
        assert not torch.equal(before[1], after[1])
    nobody = Requests(torch.tensor([-1], device=DEVICE), *(torch.tensor(t, device=DEVICE) for t in ([0, 2], [0, 0])))
    assert (form(x[:2], net, conv_states, states, nobody) == 0).all()
    assert form(x[:0], net, conv_states, states, step_of({})).shape == (0, 48)


def test_the_state_matters(form: Form) -> None:
    """A control: with another conv_state, or another recurrent state, other numbers come out."""
    net = delta_net(*HEADS["own keys"])
    x, begin = inputs(net, 2, F32), pools(net, 1, F32)
    want = form(x, net, *(t.clone() for t in begin), step_of({0: 2}))
    for i in range(2):
        other = [t.clone() for t in begin]
        other[i] += 1
        assert not torch.equal(form(x, net, *other, step_of({0: 2})), want)
