"""gdn_step: the kernel is the composition of the reference ops, step after step, and touches its own slots alone."""

import pytest
import torch
from numerics import assert_close_rms, assert_same_bytes
from torch import Tensor
from triton_interpreter import DEVICE

from hybridkv.kernels.gdn.step import _arrivals, gdn_step, gdn_step_ref, gdn_step_triton
from hybridkv.kernels.gdn.weights import DeltaNet

pytest.importorskip("triton")
F32, BF16 = torch.float32, torch.bfloat16
# f32: sums of some ten products in another order. bf16 (activations, or state): one rounding, 2^-9 at most and 1.1e-3
# RMS; a state near the middle of two bf16 values may round to the other one, and the next step starts from there.
BOUND = {F32: 2e-6, BF16: 3e-3}
HEADS = {  # key heads, value heads, K, V, width
    "shared keys": (2, 6, 8, 8, 4),
    "own keys": (2, 2, 8, 4, 4),
    "odd": (1, 2, 6, 10, 3),
    "two width": (1, 3, 5, 3, 2),
}


def delta_net(key_heads: int, value_heads: int, K: int, V: int, width: int, device: str = DEVICE) -> DeltaNet:
    channels = 2 * key_heads * K + value_heads * V
    weights = (torch.randn(channels, width) / 2, torch.rand(value_heads) * 4, torch.randn(value_heads), torch.randn(V))
    return DeltaNet(key_heads, value_heads, K, V, *(w.to(device) for w in weights), eps=1e-6)


def inputs(net: DeltaNet, B: int, dtype: torch.dtype) -> Tensor:
    """The left part of wider rows."""
    return torch.randn(B, sum(net.columns) + 3).to(DEVICE, dtype)[:, : sum(net.columns)]


def pools(net: DeltaNet, slots: int, dtype: torch.dtype, conv_dtype: torch.dtype = F32) -> tuple[Tensor, Tensor]:
    conv_states = torch.randn(slots, net.conv.shape[1] - 1, net.channels)
    states = torch.randn(slots, net.value_heads, net.key_dim, net.value_dim)
    return conv_states.to(DEVICE, conv_dtype), states.to(DEVICE, dtype)


@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize(("dtype", "state_dtype"), [(F32, F32), (BF16, F32), (BF16, BF16)])
def test_steps_in_a_row_match_the_composition(kind: str, dtype: torch.dtype, state_dtype: torch.dtype) -> None:
    net = delta_net(*HEADS[kind])
    conv_states, states = pools(net, 6, state_dtype)
    want_conv_states, want_states = conv_states.clone(), states.clone()
    others = [0, 2, 5]
    for i, slots in enumerate(([4, 1], [1, 3, 4], [3])):
        x, at = inputs(net, len(slots), dtype), torch.tensor(slots, device=DEVICE)
        want = gdn_step_ref(x, net, want_conv_states, want_states, at)
        got = gdn_step_triton(x, net, conv_states, states, at)
        assert got.dtype == dtype
        assert_close_rms(f"output {i}", want, got, BOUND[max(dtype, state_dtype, key=lambda d: d is BF16)])
        assert_same_bytes(want_conv_states, conv_states)
        assert_close_rms(f"states {i}", want_states, states, BOUND[state_dtype])
        assert_same_bytes(want_states[others], states[others])


def test_padding_touches_nothing_and_gives_zeros() -> None:
    net = delta_net(*HEADS["shared keys"])
    conv_states, states = pools(net, 3, F32)
    conv_states[0], states[0] = torch.nan, torch.nan  # what a wrapped index or slot 0 would give
    conv_states[2], states[2] = torch.nan, torch.nan
    was = conv_states.clone(), states.clone()
    x = inputs(net, 4, BF16)
    x[[0, 2, 3]] = torch.nan
    out = gdn_step_triton(x, net, conv_states, states, torch.tensor([-1, 1, -1, -1], device=DEVICE))
    want = gdn_step_ref(x[1:2], net, was[0].clone(), was[1].clone(), torch.tensor([1], device=DEVICE))
    assert_close_rms("the real row", want[0], out[1], BOUND[BF16])
    assert (out[[0, 2, 3]] == 0).all()
    for before, after in zip(was, (conv_states, states)):
        assert_same_bytes(before[[0, 2]], after[[0, 2]])
        assert not torch.equal(before[1], after[1])
    none = torch.zeros(0, dtype=torch.int64, device=DEVICE)
    assert gdn_step_triton(x[:0], net, conv_states, states, none).shape == (0, 48)


def test_tails_of_the_activations_dtype_lose_nothing() -> None:
    """The inputs are bf16 to begin with."""
    net = delta_net(*HEADS["shared keys"])
    conv_states, states = pools(net, 2, F32, BF16)
    wide_conv_states, wide_states, at = conv_states.float(), states.clone(), torch.tensor([1], device=DEVICE)
    for _ in range(4):
        x = inputs(net, 1, BF16)
        assert_same_bytes(
            gdn_step_triton(x, net, wide_conv_states, wide_states, at), gdn_step_triton(x, net, conv_states, states, at)
        )
    assert_same_bytes(wide_conv_states, conv_states.float())
    assert_same_bytes(wide_states, states)


def test_strong_and_weak_gates() -> None:
    """softplus far out on both sides; a state that is wiped, and one that stays."""
    net = delta_net(*HEADS["own keys"])
    x = inputs(net, 4, F32)
    x[:, -2 * net.value_heads :] = torch.tensor([[200.0], [-200.0], [30.0], [-30.0]])
    conv_states, states = pools(net, 4, F32)
    want_conv_states, want_states, at = conv_states.clone(), states.clone(), torch.arange(4, device=DEVICE)
    want = gdn_step_ref(x, net, want_conv_states, want_states, at)
    assert_close_rms("output", want, gdn_step_triton(x, net, conv_states, states, at), BOUND[F32])
    assert_close_rms("states", want_states, states, BOUND[F32])


@pytest.mark.skipif(DEVICE != "cpu", reason="the public function runs the kernel there")
def test_the_public_function_is_the_reference_on_a_cpu() -> None:
    net = delta_net(*HEADS["odd"])
    (conv_states, states), x, at = pools(net, 2, F32), inputs(net, 1, F32), torch.tensor([1])
    want = gdn_step_ref(x, net, conv_states.clone(), states.clone(), at)
    assert_same_bytes(want, gdn_step(x, net, conv_states, states, at))


def test_counters_are_not_made_inside_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """They would be a graph's own memory, and not zero for others."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="must run once on its states before it is captured"):
        _arrivals(1, 2, torch.device("cuda", 0))
