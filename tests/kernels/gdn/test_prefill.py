"""A Gated DeltaNet layer over a prompt: its kernels against the recurrence in float64 and against the reference."""

import itertools
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from gdn_cases import (
    BOUND,
    chunked,
    delta_in_float64,
    make_net,
    make_x,
    one_prompt,
    prefill_triton,
    prepare_one,
    start,
    unchunked,
)
from numerics import assert_close_rms, assert_same_bytes, rel_rms
from torch import Tensor
from triton_interpreter import DEVICE

from hybridkv.kernels.gdn import prefill as module
from hybridkv.kernels.gdn.chunk import delta_chunks
from hybridkv.kernels.gdn.prefill import gdn_prefill, gdn_prefill_ref
from hybridkv.kernels.gdn.rule import CHUNK
from hybridkv.kernels.gdn.weights import DeltaNet

F32, BF16 = torch.float32, torch.bfloat16
ROUNDED = {F32: 2e-6, BF16: 2.5e-3}  # one rounding of a result
# The whole layer against the reference, which rounds nothing on the way: q, k and v are rounded too, and the norm of a
# small output does not make its error smaller.
LAYER = {F32: 5e-6, BF16: 8e-3}


def rule_inputs(T: int, Hk: int, Hv: int, K: int, V: int, dtype: torch.dtype) -> list[Tensor]:
    q, k = (F.normalize(torch.randn(T, Hk, K), dim=-1) for _ in range(2))
    v, g = torch.randn(T, Hv, V).to(dtype), -F.softplus(2 * torch.randn(T, Hv) - 2)
    return [(q * K**-0.5).to(dtype), k.to(dtype), v, g, torch.rand(T, Hv)]


def run_rule(given: list[Tensor], state: Tensor) -> Tensor:
    q, k, v, g, beta = (t.to(DEVICE) for t in given)
    return unchunked(delta_chunks(q, k, chunked(v), g, beta, state[None], one_prompt(len(q), q.device)))


def check_rule(given: list[Tensor], state: Tensor, bound: float) -> None:
    want, want_state = delta_in_float64(*given, state)
    own = state.to(DEVICE)
    got = run_rule(given, own)
    assert_close_rms("output", want, got, bound)
    assert_close_rms("state", want_state, own, bound)


@pytest.mark.parametrize("dtype", BOUND)
@pytest.mark.parametrize(
    ("T", "Hk", "Hv", "K", "V"), [(64, 1, 1, 16, 16), (192, 2, 4, 16, 32), (64, 1, 1, 64, 128), (64, 1, 2, 128, 16)]
)
def test_the_delta_rule_is_the_recurrence(dtype: torch.dtype, T: int, Hk: int, Hv: int, K: int, V: int) -> None:
    check_rule(rule_inputs(T, Hk, Hv, K, V, dtype), torch.randn(Hv, K, V) * 0.3, BOUND[dtype])


@pytest.mark.parametrize(
    ("which", "value"), [(3, v) for v in (0.0, -1e-6, -30.0, -1e4)] + [(4, 0.0), (4, 1.0), (1, 0.0)]
)
def test_extreme_gates_strengths_and_keys(which: int, value: float) -> None:
    """exp(-1e4) is 0 in f32: the state is forgotten and nothing turns into NaN."""
    given = rule_inputs(128, 1, 2, 16, 16, F32)
    given[which].fill_(value)
    check_rule(given, torch.randn(2, 16, 16), 2e-5)  # no decay at all: 128 tokens add up in one state


def test_one_strong_decay_does_not_blur_the_tokens_after_it() -> None:
    """Sums of g reach thousands, differences between neighbours stay near 0.01: they must keep their digits."""
    given = rule_inputs(192, 1, 2, 16, 16, F32)
    given[3].mul_(0.02)
    given[3][5], given[3][70] = -300.0, -3000.0
    check_rule(given, torch.randn(2, 16, 16), BOUND[F32])


def test_equal_keys_of_strength_one_replace_the_value() -> None:
    """The hardest triangular system: all of A is one. The state answers the key with the last value alone."""
    given = rule_inputs(128, 1, 2, 16, 16, F32)
    given[1][:] = F.normalize(torch.randn(16), dim=-1)
    given[3].zero_()
    given[4].fill_(1.0)
    state = torch.zeros(2, 16, 16, device=DEVICE)
    run_rule(given, state)
    answer = given[1][0] @ state.cpu()  # [H, V]
    assert_close_rms("last value", given[2][-1], answer[:, 0], 2e-5)


def test_tokens_that_fill_a_chunk_leave_the_state_as_it_is() -> None:
    """Neither decay nor strength, whatever else."""
    given, state = rule_inputs(64, 1, 2, 16, 16, BF16), torch.randn(2, 16, 16)
    given[3].zero_(), given[4].zero_()
    own = state.to(DEVICE)
    assert run_rule(given, own).any()
    assert_same_bytes(state, own)


def test_the_bound_would_see_a_decay_one_token_late() -> None:
    given, state = rule_inputs(128, 1, 2, 16, 16, BF16), torch.randn(2, 16, 16)
    want, _ = delta_in_float64(*given, state)
    given[3] = given[3].roll(1, 0)
    assert rel_rms(want, run_rule(given, state.to(DEVICE))) > 10 * BOUND[BF16]


def on_device(net: DeltaNet) -> DeltaNet:
    tensors = {name: getattr(net, name).to(DEVICE) for name in ("conv", "decay", "dt_bias", "norm")}
    return replace(net, **tensors)


@pytest.mark.parametrize("dtype", ROUNDED)
@pytest.mark.parametrize("T", (1, 2, 3, 65))
def test_what_comes_before_the_rule(T: int, dtype: torch.dtype) -> None:
    """Convolution, norms and gates; no gates after the last token; also for T below the width."""
    net = make_net(2, 6, 16, 32)
    x, conv_state = make_x(T, net, dtype), start(net)[0].to(dtype)
    rows = torch.cat((conv_state.double(), x[:, : net.channels].double()))
    y = sum(rows[i : i + T] * net.conv[:, i].double() for i in range(4))
    want_q, want_k, want_v = F.silu(y).split([32, 32, 192], -1)  # type: ignore[arg-type]
    want_q, want_k = (
        t.view(T, 2, 16) * (t.view(T, 2, 16).square().sum(-1, True) + 1e-6).rsqrt() for t in (want_q, want_k)
    )
    b, a = x.double().split(net.columns, -1)[2:]
    own = conv_state.to(DEVICE)
    q, k, v, g, beta = prepare_one(x.to(DEVICE), on_device(net), own)
    pad = -T % CHUNK
    for name, want, got, bound in (
        ("q", want_q / 4, q, ROUNDED[dtype]), ("k", want_k, k, ROUNDED[dtype]),
        ("v", want_v.view(T, 6, 32), unchunked(v), ROUNDED[dtype]),
        ("g", -net.decay * F.softplus(a + net.dt_bias), g, 2e-6), ("beta", torch.sigmoid(b), beta, 2e-6),
    ):  # fmt: skip
        assert len(got) == T + pad and (name not in ("g", "beta") or not got[T:].any())
        assert_close_rms(name, want, got[:T], bound)
    assert_same_bytes(rows[T:].to(dtype), own)


def test_gates_of_tokens_that_hardly_decay_keep_their_digits() -> None:
    net = make_net(value_heads=4)
    net.dt_bias.copy_(torch.tensor([-15.0, -20.0, 3.0, 30.0]))
    x, (conv_state, _) = make_x(64, net, F32), start(net)
    g = prepare_one(x.to(DEVICE), on_device(net), conv_state.to(DEVICE))[3].cpu()
    want = -net.decay * F.softplus((x[:, -4:] + net.dt_bias).double())
    assert ((g - want).abs() <= 5e-6 * want.abs()).all()  # of exp at 20


def run(form, x: Tensor, net: DeltaNet, conv_state: Tensor, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # type: ignore[no-untyped-def]
    conv_state, state = conv_state.clone(), state.clone()
    return form(x, net, conv_state, state), conv_state, state


@pytest.mark.parametrize("dtype", LAYER)
@pytest.mark.parametrize("T", (1, 2, 63, 64, 130))
def test_the_layer_is_the_reference(T: int, dtype: torch.dtype) -> None:
    net = make_net()
    x, (conv_state, state) = make_x(T, net, dtype), start(net)
    want, want_conv_state, want_state = run(gdn_prefill_ref, x, net, conv_state, state)
    got, own_conv_state, own_state = run(
        prefill_triton, x.to(DEVICE), on_device(net), conv_state.to(DEVICE), state.to(DEVICE)
    )
    assert got.dtype == dtype and got.is_contiguous()
    assert_close_rms("output", want, got, LAYER[dtype])
    assert_close_rms("state", want_state, own_state, LAYER[dtype])
    assert_same_bytes(want_conv_state, own_conv_state)


@pytest.mark.parametrize("cuts", ([1], [64], [65, 66]))
def test_parts_of_a_prompt_give_what_the_prompt_gives(cuts: list[int]) -> None:
    net = on_device(make_net())
    x, (conv_state, state) = make_x(100, net, F32), start(net)
    want, *held = run(prefill_triton, x, net, conv_state, state)
    parts = [prefill_triton(x[a:b], net, conv_state, state) for a, b in itertools.pairwise([0, *cuts, len(x)])]
    assert_close_rms("output", want, torch.cat(parts), LAYER[F32])
    assert_same_bytes(held[0], conv_state)
    assert_close_rms("state", held[1], state, LAYER[F32])


def test_long_prompts_go_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    net = on_device(make_net())
    x, (conv_state, state) = make_x(100, net, F32), start(net)
    want = run(prefill_triton, x, net, conv_state, state)
    monkeypatch.setattr(module, "PIECE", 64)
    got = run(prefill_triton, x, net, conv_state, state)
    assert_same_bytes(want[1], got[1])
    for name, i in (("output", 0), ("state", 2)):  # a convolution adds what lies in the conv_state last
        assert_close_rms(name, want[i], got[i], LAYER[F32])


def test_a_state_in_bf16_is_rounded_once() -> None:
    net = on_device(make_net())
    x, (conv_state, state) = make_x(70, net, F32), start(net, BF16)
    want = run(prefill_triton, x, net, conv_state, state.float())
    got = run(prefill_triton, x, net, conv_state, state)
    assert_same_bytes(want[0], got[0])
    assert_same_bytes(want[2].to(BF16), got[2])


def test_other_sizes_take_the_reference() -> None:
    net = make_net(K=24, V=20, width=3)
    x, (conv_state, state) = make_x(70, net, F32), start(net)
    for a, b in zip(
        run(gdn_prefill, x, net, conv_state, state), run(gdn_prefill_ref, x, net, conv_state, state), strict=True
    ):
        assert_same_bytes(a, b)


@pytest.mark.parametrize("width", (1, 2, 4, 5))
def test_convolutions_of_any_length(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels are for four width; others take the plain form."""
    monkeypatch.setattr(module, "use_triton", lambda x: True)
    net = on_device(make_net(width=width))
    x, (conv_state, state) = make_x(70, net, torch.float32), start(net)
    want, got = (run(form, x, net, conv_state, state) for form in (gdn_prefill_ref, gdn_prefill))
    for name, a, b in zip(("output", "conv_state", "state"), want, got, strict=True):
        assert_close_rms(name, a, b, 1e-5) if a.numel() else None


@pytest.mark.parametrize(("sms", "taken"), [(16, False), (132, True)])
def test_programs_in_pairs_are_left_to_cards_that_cannot_be_full_of_halves(
    sms: int, taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two programs of scan_hopper.py wait for each other: there must be more multiprocessors than processes."""
    monkeypatch.setattr(module, "has_gluon", lambda device: True)
    monkeypatch.setattr(module, "sm_count", lambda device: sms)
    net = make_net(4, 8, 128, 128)  # rows of a multiple of 16 bytes
    assert module.suits_hopper(make_x(70, net, BF16), net) == taken
